"""The operators over tensors, as plain functions, and the table of buffers by number.

A function checks its tensors, allocates outputs, and calls the native module. `_calls` calls these functions unless
autograd or a compiler must see the call, which saves the time of PyTorch's dispatcher; `_library` wraps them as
`torch.ops.hybrid_ep.*`.

Dispatch and combine first give the tensors themselves to the native module. It does the whole call if it can use all
of them as they are, in half the time; only if it returns None is there anything to check, to copy or to refuse here.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from . import _native
from .errors import CallerError
from .work import Communication

__all__ = [
    "FP8_FORMATS",
    "End",
    "check_count",
    "check_device",
    "check_tokens",
    "chosen",
    "combine",
    "current_stream",
    "dispatch",
    "empty",
    "end_of",
    "is_plain",
    "preprocess",
    "span",
    "weight_rows",
]

# Scale formats: the names that `fp8=` takes, and the numbers that `_native` takes.
FP8_FORMATS = {"f32": 0, "ue8m0": 1, "mxfp8": 2}
_BF16, _F32, _FP8, _QUANTISE = range(4)
_TOKEN_TYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
# The numbers of the formats of tokens without scales.
_UNSCALED = {torch.bfloat16: (_BF16, 0), torch.float32: (_F32, 0)}
_SKIP, _FROM_ROUTING, _DENSE = range(3)
_NARROW, _WIDE, _MAP = range(3)
_MOST_ROWS = 2**32 - 1
_CPU = torch.device("cpu")
_ONE = torch.Size((1,))

current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


class End:
    """The native buffer, with the facts that operators read at every call."""

    __slots__ = ("__weakref__", "alignment", "communication", "device", "experts", "local_experts", "native", "number")

    def __init__(self, native: _native.Buffer) -> None:
        first, end = native.local_experts
        self.native = native
        self.number: int = native.id
        self.experts: int = native.experts
        self.local_experts: int = end - first
        on_gpu = native.backend == "cuda"
        self.device = torch.device("cuda", native.ordinal) if on_gpu else torch.device("cpu")
        # Tensors must start at a multiple of this many bytes.
        self.alignment: int = native.alignment
        self.communication = Communication(self.device) if on_gpu else None
        _ends[self.number] = self

    def stream(self) -> int:
        """Returns the raw handle of PyTorch's current stream; 0 on the CPU."""
        return current_stream(self.device.index) if self.device.type == "cuda" else 0


# An older PyTorch may lack the interface (2.11 has it). Then the native module never takes tensors.
_native.adopt_tensors(torch.Tensor)

_ends: weakref.WeakValueDictionary[int, End] = weakref.WeakValueDictionary()


def end_of(number: int) -> End:
    """Finds the buffer with this number.

    Raises:
        CallerError: No live buffer has this number.
    """
    end = _ends.get(number)
    if end is None:
        raise CallerError(f"buffer: number {number} names no live Buffer; keep the Buffer while it is in use")
    return end


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _in_call_order(
    operator: Callable[Concatenate[End, _Arguments], _Result],
) -> Callable[Concatenate[End, _Arguments], _Result]:
    """Runs a collective operator on a GPU after the buffer's asynchronous operators, or as one of them."""

    @functools.wraps(operator)
    def ordered(end: End, /, *args: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        communication = end.communication
        if communication is None or communication.idle:
            return operator(end, *args, **named)
        return communication.run(operator, end, *args, **named)

    return ordered


class Preprocessed(NamedTuple):
    handle: Tensor
    rows: int
    tokens_per_expert: Tensor
    kept_per_expert: Tensor
    overflow: Tensor


Delivered: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Tokens, scales, probabilities and the map of local experts."""


@_in_call_order
def preprocess(
    end: End,
    routing: Tensor,
    weights: Tensor | None,
    is_map: bool,
    pad_multiple: int | None,
    capacity: int | None,
    most: int,
) -> Preprocessed:
    """Computes the layout of this rank's routing. Collective; see `Buffer.preprocess`."""
    if pad_multiple is not None:
        check_count("pad_multiple", pad_multiple, least=1)
    if capacity is not None:
        check_count("capacity", capacity)
        if capacity > _MOST_ROWS:
            raise CallerError(f"capacity: at most {_MOST_ROWS} rows can be numbered, found {capacity}")
    check_count("max_experts_per_token", most)
    name, weights_name = ("routing_map", "probs") if is_map else ("topk_idx", "topk_weights")
    types = (torch.bool, torch.uint8) if is_map else (torch.int64, torch.int32)
    routing = _checked(end, name, routing, types)
    tokens, width = routing.shape
    if is_map and width != end.experts:
        raise CallerError(f"{name}: expected {end.experts} columns, one for each expert, found {width}")
    if weights is not None:
        weights = _checked(end, weights_name, weights, (torch.float32,), (tokens, width))
    form = _MAP if is_map else _WIDE if routing.dtype == torch.int64 else _NARROW
    counts = 0 if pad_multiple is None else end.local_experts
    # Without a capacity, preprocess waits for the counts and can write them to host memory.
    told = end.device if capacity is not None else _CPU
    pin = told != end.device
    padded = torch.empty(counts, dtype=torch.int64, device=told, pin_memory=pin)
    kept = torch.empty(counts, dtype=torch.int64, device=told, pin_memory=pin)
    overflow = torch.empty(1, dtype=torch.int32, device=end.device)
    capsule, rows = end.native.preprocess(
        end.stream(),
        form,
        span(routing),
        None if weights is None else span(weights),
        (tokens, width),
        most,
        pad_multiple,
        capacity,
        (padded.data_ptr(), kept.data_ptr(), overflow.data_ptr()),
    )
    return Preprocessed(from_dlpack(capsule), rows, padded, kept, overflow)


def check_tokens(end: End, tokens: Tensor, scales: Tensor | None, fp8: str | None, routing: tuple[str, Tensor]) -> None:
    """Checks the tokens of a dispatch before the preprocess of its routing, which other ranks take part in.

    Args:
        end: The buffer.
        tokens: As for `dispatch`.
        scales: As for `dispatch`.
        fp8: As for `dispatch`.
        routing: The name of the routing's argument, and the routing.

    Raises:
        CallerError: An argument does not fit.
    """
    tokens = _checked(end, "tokens", tokens, _TOKEN_TYPES, copy=False)
    _, formats = _formats_of(end, tokens, scales, fp8, copy=False)
    name, of_tokens = routing
    if isinstance(of_tokens, Tensor) and of_tokens.dim() == 2 and len(of_tokens) != len(tokens):
        raise CallerError(f"tokens: expected {len(of_tokens)} rows, one for each row of {name}, found {len(tokens)}")
    _native.check_row(tokens.shape[1], formats)


def _formats_of(
    end: End, tokens: Tensor, scales: Tensor | None, fp8: str | None, copy: bool = True
) -> tuple[Tensor | None, tuple[int, int]]:
    """Checks scales and the type of tokens. Returns scales, and the numbers of both formats for `_native`."""
    if fp8 is not None:
        if tokens.dtype != torch.bfloat16:
            raise CallerError(f"tokens: fp8={fp8!r} quantises bfloat16, found {_name(tokens.dtype)}")
        if scales is None:
            return None, (_QUANTISE, FP8_FORMATS[fp8])
    if tokens.dtype == torch.float8_e4m3fn:
        scales, scale_format = _checked_scales(end, scales, tokens.shape[0], tokens.shape[1], copy)
        return scales, (_FP8, scale_format)
    if scales is not None:
        raise CallerError(f"scales: expected with float8_e4m3fn tokens only, found {_name(tokens.dtype)} tokens")
    return None, _UNSCALED[tokens.dtype]


@_in_call_order
def dispatch(
    end: End,
    tokens: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    handle: Tensor,
    from_routing: bool,
    fp8: str | None,
    clear_tokens: bool,
    local_experts: bool,
) -> Delivered:
    """Sends tokens to the ranks of their experts. Collective; see `Buffer.dispatch`.

    `weights` are those of the routing (`from_routing`), or dense `[T, E]` ones, or None to send none.
    """
    scales_of = None if fp8 is None else FP8_FORMATS[fp8]
    done = end.native.dispatch_tensors(
        tokens, scales, weights, handle, from_routing, scales_of, clear_tokens, local_experts
    )
    if done is not None:
        return done
    tokens = _checked(end, "tokens", tokens, _TOKEN_TYPES)
    rows, hidden = tokens.shape
    formats = _UNSCALED.get(tokens.dtype) if fp8 is None and scales is None else None
    if formats is None:
        scales, formats = _formats_of(end, tokens, scales, fp8)
    probs_from = _SKIP if weights is None else _FROM_ROUTING if from_routing else _DENSE
    # The variable keeps the tensor alive during the call: it may be a copy.
    dense = None
    if weights is not None and probs_from == _DENSE:
        dense = _checked(end, "probs", weights, (torch.float32,), (rows, end.experts))
    out, out_scales, out_probs, out_map = end.native.dispatch(
        end.stream(),
        _number(handle),
        (rows, hidden),
        formats,
        span(tokens),
        None if scales is None else span(scales),
        probs_from,
        None if dense is None else span(dense),
        local_experts,
        clear_tokens,
    )
    delivered = from_dlpack(out)
    return (
        delivered if formats[0] < _FP8 else delivered.view(torch.float8_e4m3fn),
        None if out_scales is None else from_dlpack(out_scales),
        None if out_probs is None else from_dlpack(out_probs),
        None if out_map is None else from_dlpack(out_map).view(torch.bool),
    )


@_in_call_order
def combine(
    end: End,
    rows: Tensor,
    probs: Tensor | None,
    handle: Tensor,
    tokens: int,
    permuted: bool,
    wire: torch.dtype | None,
    first_column: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sums the rows of each token, and gathers probabilities to `[T, E]`. Collective; see `Buffer.combine`.

    `first_column` is the first of the columns of `probs` that belong to the local experts.
    """
    done = end.native.combine_tensors(rows, probs, handle, tokens, permuted, wire, first_column)
    if done is not None:
        return done
    rows = _checked(end, "tokens", rows, (torch.bfloat16, torch.float32))
    count, hidden = rows.shape
    if wire not in (None, torch.bfloat16, torch.float32):
        raise CallerError(f"wire: expected torch.bfloat16 or torch.float32, found {wire}")
    wide = rows.dtype == torch.float32
    out = _output(end, rows, (tokens, hidden), rows.dtype)
    row_probs, out_probs = None, None
    if probs is not None:
        columns = 1 if permuted else end.local_experts
        width = columns if first_column is None else probs.shape[-1]
        shape = (count,) if permuted else (count, width)
        probs = _checked(end, "probs", probs, (torch.float32,), shape, strided_rows=True)
        row_probs = _strided(probs, first_column or 0, columns)
        out_probs = _output(end, probs, (tokens, end.experts), torch.float32)
    end.native.combine(
        end.stream(),
        _number(handle),
        (count, tokens, hidden),
        (wide, wide if wire is None else wire == torch.float32),
        span(rows),
        row_probs,
        span(out),
        None if out_probs is None else span(out_probs),
    )
    return out, out_probs


def weight_rows(
    end: End, values: Tensor, weights: Tensor, dtype: torch.dtype, rows: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Multiplies each row by its weight in float32 and rounds once. Local to this rank.

    Args:
        end: The buffer.
        values: bfloat16 or float32 [R, H]: the rows, or, in the backward pass, the gradient of the weighted rows.
        weights: float32 [R].
        dtype: The type of the result.
        rows: Given in the backward pass only: the rows that were weighted, of type `dtype`.

    Returns:
        The weighted rows and None, or the gradients of the rows and of the weights.
    """
    floats = (torch.bfloat16, torch.float32)
    values = _checked(end, "values", values, floats)
    count, hidden = values.shape
    weights = _checked(end, "weights", weights, (torch.float32,), (count,))
    out = _output(end, values, (count, hidden), dtype)
    backward, dots = None, None
    if rows is not None:
        rows = _checked(end, "rows", rows, (dtype,), (count, hidden))
        dots = torch.empty_like(weights)
        backward = (span(rows), span(dots))
    end.native.weight_rows(
        end.stream(),
        (count, hidden),
        (values.dtype == torch.float32, dtype == torch.float32),
        span(values),
        span(weights),
        span(out),
        backward,
    )
    return out, dots


def chosen(dense: Tensor, topk_idx: Tensor) -> Tensor:
    """Gathers `[T, K]` from `[T, E]`; 0 where an index names no expert."""
    index = topk_idx.long()
    there = index.clamp(0, dense.shape[1] - 1)
    return dense.gather(1, there).masked_fill(index != there, 0)


def empty(end: End, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Makes an uninitialized tensor in registered memory."""
    if end.communication is not None:
        # The memory may be that of a freed tensor that an asynchronous operator still reads or writes.
        end.communication.join(end, operates=False)
    size = math.prod(shape) * dtype.itemsize
    # Detached, because autograd may refuse to change such a view in place.
    memory: Tensor = from_dlpack(end.native.empty(end.stream(), size))
    return memory.view(dtype).view(shape).detach()


def _output(end: End, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocates an output on the device of `like`, from an allocator that keeps freed memory.

    PyTorch's CPU allocator returns large memory to the system, which clears every page again at the next call; that
    takes as long as an operator. Peers also read registered memory directly.
    """
    if end.device.type == "cpu":
        return empty(end, shape, dtype)
    # `new_empty` takes half the host time of `torch.empty`.
    return like.new_empty(shape, dtype=dtype)


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether the value is a plain tensor with memory, not of a subclass made by a compiler, tracer or library."""
    return type(value) in _PLAIN


_PLAIN = (Tensor, torch.nn.Parameter)


def check_count(name: str, value: int, least: int = 0) -> None:
    """Checks that `value` is an integer of at least `least`.

    Raises:
        CallerError: `value` is not such an integer.
    """
    if not hasattr(value, "__index__") or not least <= value < 1 << 63:
        raise CallerError(f"{name}: expected an integer of at least {least}, found {value!r}")


def check_device(end: End, name: str, tensor: Tensor) -> None:
    """Checks that the tensor is on the buffer's device.

    Raises:
        CallerError: The tensor is on a different device.
    """
    if tensor.device != end.device:
        raise CallerError(f"{name}: expected a tensor on {end.device}, where the buffer is, found {tensor.device}")


def _checked(
    end: End,
    name: str,
    tensor: Tensor,
    types: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | None = None,
    strided_rows: bool = False,
    copy: bool = True,
) -> Tensor:
    """Checks a tensor, and returns it, or an aligned contiguous copy.

    Args:
        end: The buffer, whose device the tensor must be on.
        name: The name of the argument, for errors.
        tensor: What the caller passed.
        types: The accepted types.
        shape: The required shape. Default: any two dimensions.
        strided_rows: Whether the result may have gaps between its rows; it is aligned to its elements only.
        copy: False returns the tensor itself.

    Raises:
        CallerError: The argument does not fit.
    """
    if not isinstance(tensor, Tensor):
        raise CallerError(f"{name}: expected a tensor, found {type(tensor).__name__}")
    if tensor.dtype not in types:
        text = f"{name}: expected {' or '.join(map(_name, types))}, found {_name(tensor.dtype)}"
        if tensor.dtype == torch.float16 and torch.float32 in types:
            text += "; convert to float32, which has every float16 value, or to bfloat16, which rounds"
        raise CallerError(text)
    check_device(end, name, tensor)
    if shape is None:
        if tensor.dim() != 2:
            raise CallerError(f"{name}: expected 2 dimensions, found shape {list(tensor.shape)}")
    elif tensor.shape != shape:
        raise CallerError(f"{name}: expected shape {list(shape)}, found {list(tensor.shape)}")
    if tensor.layout is not torch.strided:
        raise CallerError(f"{name}: expected a dense tensor, found layout {_name(tensor.layout)}; call to_dense()")
    if not copy:
        return tensor
    if tensor.is_neg():  # a view whose memory has the opposite sign
        tensor = tensor.detach().clone()
    if tensor.numel() and not tensor.data_ptr():
        if tensor._is_zerotensor():
            return tensor.detach().clone()
        raise CallerError(
            f"{name}: a {type(tensor).__name__} has no memory of its own; pass the tensor inside (`to_local()` of a "
            "DTensor, `wait()` of an AsyncCollectiveTensor)"
        )
    if strided_rows and tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]:
        aligned = tensor.data_ptr() % tensor.element_size() == 0
    else:
        aligned = tensor.is_contiguous() and tensor.data_ptr() % end.alignment == 0
    if not aligned:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor


def _checked_scales(end: End, scales: Tensor | None, rows: int, hidden: int, copy: bool) -> tuple[Tensor, int]:
    """Checks scales, and returns them with the number of their format."""
    if scales is None:
        raise CallerError("scales: required with float8_e4m3fn tokens")
    if not isinstance(scales, Tensor):
        raise CallerError(f"scales: expected a tensor, found {type(scales).__name__}")
    widths = {"f32": -(-hidden // 128), "ue8m0": -(-hidden // 128), "mxfp8": -(-hidden // 32)}
    bytewise = scales.dtype in _BYTES
    fitting = "f32" if not bytewise else "mxfp8" if scales.shape[-1:] == (widths["mxfp8"],) else "ue8m0"
    shape = (rows, widths[fitting])
    return _checked(end, "scales", scales, (torch.float32, *_BYTES), shape, copy=copy), FP8_FORMATS[fitting]


# PyTorch 2.6, the oldest supported version, lacks float8_e8m0fnu.
_BYTES = tuple(filter(None, [torch.uint8, getattr(torch, "float8_e8m0fnu", None)]))


def _name(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _strided(rows: Tensor, first: int, columns: int) -> tuple[tuple[int, int], int]:
    """The memory of the columns from `first` on, in all rows, and the elements from one row to the next."""
    count, bytes_each = rows.shape[0], rows.element_size()
    # The stride of a dimension of one element or none has no meaning.
    stride = rows.stride(0) if count > 1 else columns
    elements = (count - 1) * stride + columns if count else 0
    return (rows.data_ptr() + first * bytes_each, elements * bytes_each), stride


def _number(handle: Tensor) -> int:
    if handle.dtype != torch.int64 or handle.shape != _ONE or handle.device != _CPU:
        raise CallerError(
            "handle: expected the tensor of a Handle, int64 [1] on the CPU, "
            f"found {_name(handle.dtype)} {list(handle.shape)} on {handle.device}"
        )
    return handle.item()  # type: ignore[return-value]
