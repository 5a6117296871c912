"""From the arguments of `Buffer`'s operators to one call of an operator.

The functions check what concerns several arguments together, convert weights to float32, and select how the operator is
called: as the plain function of `ops`; with gradients (`_autograd`); or, if a compiler or a mode must see the call,
as the registered operator `torch.ops.hybrid_ep.*`. `ops` checks each tensor by itself. `buffer` imports this
module. So does `deep_ep`, for dispatches that deliver no map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

# `_autograd` also registers the operators.
from . import _autograd, ops
from ._compilers import opaque
from ._dense import dense_weights
from .errors import CallerError
from .ops import End
from .results import Combined, Dispatched, Handle
from .work import Work

__all__ = ["Given", "combine", "dispatch", "preprocess", "start"]

Result = TypeVar("Result")


class Given(NamedTuple):
    """The routing arguments of a call, as the caller gave them. See `Buffer.preprocess` and `Buffer.dispatch`."""

    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None
    routing_map: Tensor | None = None
    probs: Tensor | None = None


class _Routing(NamedTuple):
    """A checked routing."""

    tensor: Tensor
    weights: Tensor | None
    """float32, of the shape of `tensor`."""
    is_map: bool


def preprocess(
    end: End, given: Given, pad_multiple: int | None, capacity: int | None, max_experts_per_token: int | None
) -> Handle:
    """Computes the layout of a routing. See `Buffer.preprocess`."""
    return _preprocess(end, _routing(given), pad_multiple, capacity, max_experts_per_token)


def _preprocess(
    end: End, routing: _Routing, pad_multiple: int | None, capacity: int | None, most: int | None
) -> Handle:
    tensor, weights, is_map = routing
    most = end.experts if most is None else most
    if weights is not None and weights.requires_grad:
        weights = weights.detach()
    if _way(tensor, weights) == _PLAIN:
        arguments = (tensor, weights, is_map, pad_multiple, capacity, most)
        handle, found, padded, kept, overflow = ops.preprocess(end, *arguments)
        rows: int | None = found
    else:
        handle, padded, kept, overflow = torch.ops.hybrid_ep.preprocess(
            tensor, weights, end.number, is_map, pad_multiple, capacity, most
        )
        rows = capacity
    return Handle(
        handle,
        end.number,
        tensor.shape[0],
        rows,
        pad_multiple is not None,
        1 if pad_multiple is None else pad_multiple,
        capacity,
        None if is_map else tensor,
        padded,
        kept,
        overflow,
        None if is_map or torch.compiler.is_compiling() or tensor.is_inference() else tensor._version,
    )


def dispatch(
    end: End,
    tokens: Tensor,
    given: Given,
    handle: Handle | None,
    scales: Tensor | None = None,
    fp8: str | None = None,
    capacity: int | None = None,
    pad_multiple: int | None = None,
    local_experts: bool = True,
) -> Dispatched:
    """Dispatches in plain mode (`pad_multiple` is None) or in permuted mode. See `Buffer.dispatch`.

    Args:
        end: The buffer.
        tokens: As for `Buffer.dispatch`.
        given: The routing, or, with a handle, only weights.
        handle: As for `Buffer.dispatch`.
        scales: As for `Buffer.dispatch`.
        fp8: As for `Buffer.dispatch`.
        capacity: As for `Buffer.dispatch`.
        pad_multiple: As for `Buffer.preprocess`.
        local_experts: Whether to deliver the map of that name, in plain mode.
    """
    if fp8 is not None and fp8 not in ops.FP8_FORMATS:
        raise CallerError(f"fp8: expected one of {', '.join(map(repr, ops.FP8_FORMATS))}, or None; found {fp8!r}")
    fresh = handle is None
    if handle is None:
        routing = _routing(given)
        weights = routing.weights
        # A compiled graph has symbolic sizes; its operators check tensors when it runs.
        if not torch.compiler.is_compiling():
            name = "routing_map" if routing.is_map else "topk_idx"
            ops.check_tokens(end, tokens, scales, fp8, (name, routing.tensor))
        handle = _preprocess(end, routing, pad_multiple, capacity, None)
    else:
        if given.topk_idx is not None or given.routing_map is not None:
            raise CallerError("handle: a routing is given too; give one or the other")
        _check_handle(end, handle, pad_multiple is not None)
        if capacity not in (None, handle.capacity):
            raise CallerError(f"capacity: the handle's is {handle.capacity}, found {capacity}")
        if pad_multiple not in (None, handle.pad_multiple):
            raise CallerError(f"pad_multiple: the handle's is {handle.pad_multiple}, found {pad_multiple}")
        weights = _weights_of(end, handle, given)

    permuted = handle.permuted
    local_experts = local_experts and not permuted
    # Without gradients nothing sums over the rows that no token takes, so they need not be cleared.
    clear_tokens = handle.capacity is not None and torch.is_grad_enabled()
    way = _way(tokens, weights, scales)
    if way == _PLAIN:
        out, out_scales, out_probs, out_map = ops.dispatch(
            end, tokens, scales, weights, handle.tensor, fresh, fp8, clear_tokens, local_experts
        )
    else:
        topk = handle.topk_idx if fresh and weights is not None else None
        call = _autograd.dispatch if way == _GRADIENT else torch.ops.hybrid_ep.dispatch
        out, some_scales, some_probs, some_map = call(
            tokens, scales, weights, topk, handle.tensor, end.number,
            fresh, fp8, permuted, handle.rows, clear_tokens, local_experts,
        )  # fmt: skip
        out_scales = None if scales is None and fp8 is None else some_scales
        out_probs = None if weights is None else some_probs
        out_map = some_map if local_experts else None
    counts = handle.tokens_per_expert if permuted else None
    return Dispatched(out, out_probs, out_scales, out_map, counts, handle.overflow, handle)


def combine(
    end: End,
    tokens: Tensor,
    handle: Handle,
    probs: Tensor | None,
    wire: torch.dtype | None,
    permuted: bool,
    first_column: int | None = None,
) -> Combined:
    """Combines in plain mode or in permuted mode. See `Buffer.combine`.

    Args:
        end: The buffer.
        tokens: As for `Buffer.combine`.
        handle: As for `Buffer.combine`.
        probs: As for `Buffer.combine`; with `first_column`, wider.
        wire: As for `Buffer.combine`.
        permuted: Whether to combine in permuted mode.
        first_column: In plain mode, the column of `probs` that belongs to the first local expert, if `probs` has
            columns of other ranks' experts.
    """
    _check_handle(end, handle, permuted)
    if probs is not None:
        probs = _f32("probs", probs)
    way = _way(tokens, probs)
    if way == _PLAIN:
        arguments = (tokens, probs, handle.tensor, handle.tokens, permuted, wire, first_column)
        return Combined(*ops.combine(end, *arguments))
    if probs is not None and first_column is not None:
        probs = probs.narrow(1, first_column, end.local_experts)
    call = _autograd.combine if way == _GRADIENT else torch.ops.hybrid_ep.combine
    out, some_probs = call(tokens, probs, handle.tensor, end.number, handle.tokens, permuted, wire)
    return Combined(out, None if probs is None else some_probs)


def start(
    async_op: bool, after: torch.cuda.Event | Work | None, call: Callable[..., Result], *arguments: Any
) -> Result | tuple[Result, Work]:
    """Starts one of the functions above as an asynchronous operator.

    Args:
        async_op: As for `Buffer.dispatch`; False is an error, since `after` is given.
        after: As for `Buffer.dispatch`.
        call: The function.
        *arguments: Its arguments, the buffer first.

    Returns:
        The result and the `Work`.
    """
    if not async_op:
        raise CallerError(
            "after: expected with async_op=True only; without it an operator follows the current stream: make that "
            "stream wait for the event"
        )
    started: tuple[Result, Work] = _start(after, call, *arguments)
    return started


# A compiled graph has no streams, and no Work: the graph breaks here.
@opaque
def _start(
    after: torch.cuda.Event | Work | None, call: Callable[..., Result], end: End, *arguments: Any
) -> tuple[Result, Work]:
    if not isinstance(after, torch.cuda.Event | Work | None):
        raise CallerError(f"after: expected a torch.cuda.Event or a Work, found {type(after).__name__}")
    # PyTorch creates the CUDA event at the first record(). Until then, a wait for the event does nothing.
    if isinstance(after, torch.cuda.Event) and not after.cuda_event:
        raise CallerError("after: the event was never recorded: call record() before the operator")
    if end.communication is None:
        if after is not None:
            after.synchronize()
        return call(end, *arguments), Work(end)
    with end.communication.call(end, after, _plain_tensors(arguments)) as work:
        return call(end, *arguments), work


def _plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Given):
            yield from _plain_tensors(value)
        elif isinstance(value, Handle):
            yield value.tensor
        elif isinstance(value, Tensor) and ops.is_plain(value):
            yield value


# How an operator is called. Numbers, because reading a member of an enum takes a tenth of a microsecond.
_PLAIN, _GRADIENT, _REGISTERED = range(3)


def _way(*tensors: Tensor | None) -> int:
    """How the operator must be called for a compiler, autograd, a mode or a tracer to see the call."""
    if _autograd.is_watched():
        return _REGISTERED
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    differentiable = torch.is_grad_enabled()
    way = _PLAIN
    for tensor in tensors:
        if tensor is None:
            continue
        if ops.is_plain(tensor):
            if differentiable and tensor.requires_grad:
                way = _GRADIENT
        elif isinstance(tensor, Tensor):
            return _REGISTERED
    # The operator itself refuses arguments that are not tensors.
    return way


def _refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Refuses forward-mode gradients. If no tensor requires a gradient, PyTorch would drop them silently."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise CallerError("a tensor has a tangent: forward-mode gradients are not implemented; use backward mode")


def _routing(given: Given) -> _Routing:
    """Checks that one routing is given, with weights that fit it."""
    topk_idx, topk_weights, routing_map, probs = given
    if (topk_idx is None) == (routing_map is None):
        found = "none" if topk_idx is None else "both"
        raise CallerError(f"routing: expected one of topk_idx, routing_map and handle, found {found}")
    if topk_idx is not None:
        if probs is not None:
            raise CallerError("probs: expected with a routing_map only; with topk_idx give topk_weights")
        return _Routing(topk_idx, None if topk_weights is None else _f32("topk_weights", topk_weights), False)
    if topk_weights is not None:
        raise CallerError("topk_weights: expected with topk_idx only; with a routing_map give probs")
    assert routing_map is not None
    return _Routing(routing_map, None if probs is None else _f32("probs", probs), True)


def _weights_of(end: End, handle: Handle, given: Given) -> Tensor | None:
    """The weights for a dispatch with a cached handle, as float32 `[T, E]`."""
    if given.topk_weights is None:
        return None if given.probs is None else _f32("probs", given.probs)
    if given.probs is not None:
        raise CallerError("probs: topk_weights are given too; give one or the other")
    if handle.topk_idx is None:
        raise CallerError("topk_weights: the handle was not made from topk_idx; give probs [T, E]")
    if given.topk_weights.shape != handle.topk_idx.shape:
        expected, found = list(handle.topk_idx.shape), list(given.topk_weights.shape)
        raise CallerError(f"topk_weights: expected shape {expected}, that of topk_idx, found {found}")
    known = None if torch.compiler.is_compiling() else handle.topk_version
    if known is not None and handle.topk_idx._version != known:
        raise CallerError(
            "topk_weights: the topk_idx of this handle was changed in place after the preprocess, so the experts that "
            "the weights are for are unknown; keep it unchanged, or give probs [T, E]"
        )
    weights = _f32("topk_weights", given.topk_weights)
    return dense_weights(handle.topk_idx, weights, handle.topk_idx.shape[0], end.experts)


def _check_handle(end: End, handle: Handle, permuted: bool) -> None:
    if not isinstance(handle, Handle):
        raise CallerError(f"handle: expected a Handle, found {type(handle).__name__}")
    if handle.buffer != end.number:
        raise CallerError("handle: made by another buffer; use it with the buffer that made it")
    if handle.permuted != permuted:
        made, call = ("permuted", "dispatch_with_permute and combine_with_unpermute")
        if not handle.permuted:
            made, call = ("plain", "dispatch and combine")
        raise CallerError(f"handle: made in {made} mode, for {call}")


def _f32(name: str, weights: Tensor) -> Tensor:
    """Converts weights to float32; autograd sees the cast."""
    if not isinstance(weights, Tensor):
        raise CallerError(f"{name}: expected a tensor, found {type(weights).__name__}")
    if weights.dtype == torch.float32:
        return weights
    if not weights.dtype.is_floating_point:
        raise CallerError(f"{name}: expected a floating-point type, found {str(weights.dtype).removeprefix('torch.')}")
    return weights.float()
