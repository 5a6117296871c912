"""`Buffer`: one rank's end of a communicator."""

from __future__ import annotations

import atexit
import os
import weakref
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import _native, ops
from .errors import CallerError
from .rendezvous import Meeting

__all__ = ["Buffer", "Combined", "Dispatched", "Handle", "Traffic"]


class Handle(NamedTuple):
    """A routing laid out: made by `preprocess` or `dispatch`, good for any number of dispatches and combines while the
    routing stands. T is the number of this rank's tokens, R that of the rows it receives.
    """

    tensor: Tensor
    """int64 [1] on the CPU; whoever keeps its storage alive keeps the handle alive."""
    buffer: int
    """Number of the buffer that made it."""
    tokens: int
    """T."""
    rows: int | None
    """R; None inside `torch.compile` where no capacity was given."""
    permuted: bool
    pad_multiple: int
    """Rows to a multiple of which an expert's are padded; 1 in plain mode."""
    capacity: int | None
    topk_idx: Tensor | None
    """[T, K], where the routing was given so."""
    tokens_per_expert: Tensor
    """int64 [local experts], padding included; empty in plain mode. On the CPU, or on the GPU with a capacity."""
    raw_tokens_per_expert: Tensor
    """The same without padding."""
    overflow: Tensor
    """int32 [1] on the tokens' device: whether the capacity dropped rows."""


class Dispatched(NamedTuple):
    """What a rank received: R rows."""

    tokens: Tensor
    """[R, H]: R rows exactly, or `capacity`."""
    probs: Tensor | None
    """f32 [R] (permuted) or [R, local experts] (plain); None where no weights were given."""
    scales: Tensor | None
    """[R, H / 128] f32 or uint8 (ue8m0), or [R, H / 32] uint8 (MXFP8); None without FP8."""
    local_experts: Tensor | None
    """bool [R, local experts], plain mode: whether the row's token chose the expert; None otherwise."""
    tokens_per_expert: Tensor | None
    """int64 [local experts], padding included, permuted mode; None otherwise."""
    overflow: Tensor
    """int32 [1] on the tokens' device: whether the capacity dropped rows."""
    handle: Handle
    """For combine, and for dispatches and combines to come."""


class Combined(NamedTuple):
    """The sums of a rank's T tokens."""

    tokens: Tensor
    """[T, H] of the rows' type."""
    probs: Tensor | None
    """f32 [T, E], zero where not chosen; None where no probabilities were given."""


class Traffic(NamedTuple):
    """Bytes and times so far; differences of two readings belong to what ran between them."""

    domain_bytes: int
    """Written to, or read from, other ranks of the NVLink domain."""
    transport_bytes: int
    """Handed to the transport for other domains."""
    transport_messages: int
    preprocess_bytes: int
    """Counts received in preprocessing."""
    waited_seconds: float
    """In which no worker of this rank could make progress."""


class Buffer:
    """One rank's end of a communicator. Making one is collective, and so is every operator: all ranks call the same
    operators in the same order, with the same hidden size, types and mode; numbers of tokens and capacities may differ.

    Without `group` the ranks are those of the default process group where there is one, else what the environment of
    torchrun or SLURM says, else this process alone. A buffer may be used from any thread, one call at a time.

    On a GPU, operators go into the current stream. They can be captured in a CUDA graph where they have a capacity;
    what a capture allocates stays with the buffer as long as it lives, since replays write to it. Handles and tensors
    from before the capture are the caller's to keep.

    Args:
        group: the ranks. Ranks in errors are ranks of this group.
        num_experts: E, over all ranks; a multiple of their number. Expert `e` is on rank `e // (E / ranks)`.
        domains: NVLink domains of equal size, emulated; the CPU only.
        device: where tensors live; the CPU where there is no GPU, else the current CUDA device, which under torchrun
            or SLURM is the one of the rank's place on its machine unless the program has set another.
        timeout: seconds without progress after which a peer is given up; HYBRID_EP_TIMEOUT_MS, or 30.
        workers: threads of an operator on the CPU; cores divided by ranks.
        sms: SMs of an operator on a GPU.

    Raises:
        CallerError: arguments that cannot be served.
        EnvironmentError: no GPU, compiler, or memory for it.
        PeerError: a rank that did not come; it is named.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        domains: int = 1,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        workers: int | None = None,
        sms: int | None = None,
    ) -> None:
        settings = _settings(_device(device), num_experts, domains, timeout, workers, sms)
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            native = _native.Buffer.launched(settings)
        else:
            meeting = Meeting(group, _native.timeout_of(settings))
            native = _native.Buffer.join(meeting.rank, meeting.ranks, settings, meeting.all_gather)
            meeting.end()
        self._adopt(native)

    @classmethod
    def threads(
        cls,
        ranks: int,
        *,
        num_experts: int,
        domains: int = 1,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        workers: int | None = None,
        sms: int | None = None,
    ) -> list[Buffer]:
        """All `ranks` ranks in this process, in order, each to be used from a thread of its own.

        On GPUs they are spread over all there are. Ranks that share one wait for each other inside kernels. Then each
        thread needs a `torch.cuda.stream` of its own; CUDA_DEVICE_MAX_CONNECTIONS must allow for as many, and
        CUDA_MODULE_LOADING be EAGER, before CUDA starts; and nothing in a backward may wait for the GPU, since PyTorch
        runs all of a GPU's on one thread. Even then what PyTorch does for the first time, such as pinning memory, may
        wait for kernels that wait for other ranks, until they time out: where that matters, take a process for each
        rank. Arguments and errors as of `Buffer`.
        """
        where = _device(device)
        if where.index is not None and where.type == "cuda" and torch.cuda.device_count() > 1:
            raise CallerError(
                f"device: ranks are spread over all GPUs, or those of CUDA_VISIBLE_DEVICES; found {where}"
            )
        settings = _settings(where, num_experts, domains, timeout, workers, sms)
        ops.check_count("ranks", ranks)
        buffers = []
        for native in _native.Buffer.threads(ranks, settings):
            buffer = cls.__new__(cls)
            buffer._adopt(native)
            buffers.append(buffer)
        return buffers

    def _adopt(self, native: _native.Buffer) -> None:
        self._end = ops.End(native)
        self._number = self._end.number
        self._num_experts = self._end.experts
        _open.add(self)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._end.native.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._end.native.ranks

    @property
    def num_experts(self) -> int:
        """Number of experts on all ranks."""
        return self._num_experts

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank."""
        return self._end.local_experts

    @property
    def local_experts(self) -> range:
        """The experts on this rank."""
        return range(*self._end.native.local_experts)

    @property
    def domains(self) -> int:
        """Number of NVLink domains."""
        return self._end.native.domains

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self._end.device

    @property
    def backend(self) -> str:
        """ "host" or "cuda"."""
        return self._end.native.backend

    def preprocess(
        self,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        pad_multiple: int | None = None,
        capacity: int | None = None,
        max_experts_per_token: int | None = None,
    ) -> Handle:
        """Lays out a routing, exchanging counts with all ranks. Collective. Not differentiable.

        Args:
            topk_idx: int32 or int64 [T, K]; -1 = none.
            topk_weights: floating [T, K], which may be left out.
            routing_map: bool or uint8 [T, E], instead of `topk_idx`.
            probs: floating [T, E] beside `routing_map`, which may be left out.
            pad_multiple: None for the plain mode; else the permuted mode, each expert's rows padded to a multiple of
                it.
            capacity: R, beyond which rows are dropped; None for as many rows as come. On a GPU that waits for them.
            max_experts_per_token: of a `routing_map` on a GPU, where it only sizes memory; all experts.

        Raises:
            CallerError: a routing or capacity that does not fit; on a GPU with a capacity a later call may say so.
            PeerError: another rank is gone, or late.
        """
        routing, weights, is_map = _routing(topk_idx, topk_weights, routing_map, probs)
        if weights is not None:
            weights = _f32("probs" if is_map else "topk_weights", weights)
        return self._preprocess(routing, weights, is_map, pad_multiple, capacity, max_experts_per_token)

    def _preprocess(
        self,
        routing: Tensor,
        weights: Tensor | None,
        is_map: bool,
        pad_multiple: int | None,
        capacity: int | None,
        most: int | None,
    ) -> Handle:
        most = self._num_experts if most is None else most
        if weights is not None:
            weights = weights.detach()
        if _is_plain_call(routing):
            arguments = (routing, weights, is_map, pad_multiple, capacity, most)
            tensor, found, padded, raw, overflow = ops.preprocess(self._end, *arguments)
            rows: int | None = found
        else:
            tensor, padded, raw, overflow = torch.ops.hybrid_ep.preprocess(
                routing, weights, self._number, is_map, pad_multiple, capacity, most
            )
            rows = capacity
        return Handle(
            tensor,
            self._number,
            routing.shape[0],
            rows,
            pad_multiple is not None,
            1 if pad_multiple is None else pad_multiple,
            capacity,
            None if is_map else routing,
            padded,
            raw,
            overflow,
        )

    def dispatch(
        self,
        tokens: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        scales: Tensor | None = None,
        fp8: str | None = None,
        capacity: int | None = None,
    ) -> Dispatched:
        """Sends tokens to their experts' ranks: one row per distinct token that has an expert there, ordered by
        (source rank, token). Collective.

        The routing is given as for `preprocess`, or as the `handle` of an earlier preprocess or dispatch: then nothing
        is preprocessed, nothing waits, and no weights travel unless `topk_weights` or `probs` are given again.

        What is delivered lies in memory of the buffer, which `Tensor.record_stream` does not know: keep a tensor until
        work on it in other streams than the current one is done.

        With a capacity, rows that no token takes are zero, but for the tokens under `torch.no_grad()`: those are
        undefined there, since nothing will sum over them.

        Args:
            tokens: [T, H] of bfloat16, float32 (moved as they are), or float8_e4m3fn with `scales`. A row is a
                multiple of 16 bytes.
            scales: f32 or uint8 [T, H / 128], or uint8 [T, H / 32] (MXFP8).
            fp8: "f32", "ue8m0" or "mxfp8": quantises bfloat16 tokens on the way, with scales of that format.
            capacity: as for `preprocess`; with a handle, that of the handle.

        Gradients flow to `tokens` unless rows are FP8, and to `topk_weights` or `probs`. The gradient of dispatch is a
        combine: ranks must call backward in the same order too.

        Raises:
            CallerError: arguments that do not fit; found before anything was sent, they leave the buffer usable.
            PeerError: another rank is gone, or late.
        """
        return self._dispatch(tokens, topk_idx, topk_weights, routing_map, probs, handle, scales, fp8, capacity, None)

    def dispatch_with_permute(
        self,
        tokens: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        scales: Tensor | None = None,
        fp8: str | None = None,
        capacity: int | None = None,
        pad_multiple: int | None = None,
    ) -> Dispatched:
        """As `dispatch`, with one row per (token, local expert): grouped by local expert, in a group ordered by (source
        rank, token), each group padded with zero rows to a multiple of `pad_multiple`, 1 where it is left out.
        """
        if pad_multiple is None:
            pad_multiple = 1 if handle is None else handle.pad_multiple
        arguments = (tokens, topk_idx, topk_weights, routing_map, probs, handle, scales, fp8, capacity)
        return self._dispatch(*arguments, pad_multiple)

    def _dispatch(
        self,
        tokens: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
        handle: Handle | None,
        scales: Tensor | None,
        fp8: str | None,
        capacity: int | None,
        pad_multiple: int | None,
    ) -> Dispatched:
        if fp8 is not None and fp8 not in ops.FP8_FORMATS:
            raise CallerError(f"fp8: expected one of {', '.join(map(repr, ops.FP8_FORMATS))}, or None; found {fp8!r}")
        fresh = handle is None
        if handle is None:
            routing, weights, is_map = _routing(topk_idx, topk_weights, routing_map, probs)
            if weights is not None:
                weights = _f32("probs" if is_map else "topk_weights", weights)
            handle = self._preprocess(routing, weights, is_map, pad_multiple, capacity, None)
        else:
            if topk_idx is not None or routing_map is not None:
                raise CallerError("handle: it stands for a routing; give one or the other")
            self._check_handle(handle, pad_multiple is not None)
            if capacity not in (None, handle.capacity):
                raise CallerError(f"capacity: the handle's is {handle.capacity}, found {capacity}")
            if pad_multiple not in (None, handle.pad_multiple):
                raise CallerError(f"pad_multiple: the handle's is {handle.pad_multiple}, found {pad_multiple}")
            weights = self._dense_weights(handle, topk_weights, probs)

        permuted = handle.permuted
        # Only a gradient of weights sums over rows that no token took.
        clear_tokens = handle.capacity is not None and torch.is_grad_enabled()
        if _is_plain_call(tokens, weights):
            out, out_scales, out_probs, out_map = ops.dispatch(
                self._end, tokens, scales, weights, handle.tensor, fresh, fp8, clear_tokens, not permuted
            )
        else:
            topk = handle.topk_idx if fresh and weights is not None else None
            out, some_scales, some_probs, some_map = torch.ops.hybrid_ep.dispatch(
                tokens, scales, weights, topk, handle.tensor, self._number,
                fresh, fp8, permuted, handle.rows, clear_tokens, not permuted,
            )  # fmt: skip
            out_scales = None if scales is None and fp8 is None else some_scales
            out_probs = None if weights is None else some_probs
            out_map = None if permuted else some_map
        counts = handle.tokens_per_expert if permuted else None
        return Dispatched(out, out_probs, out_scales, out_map, counts, handle.overflow, handle)

    def _dense_weights(self, handle: Handle, topk_weights: Tensor | None, probs: Tensor | None) -> Tensor | None:
        """Weights that travel with a cached handle, as `[T, E]`."""
        if topk_weights is None:
            return None if probs is None else _f32("probs", probs)
        if probs is not None:
            raise CallerError("probs: topk_weights are given too; give one or the other")
        if handle.topk_idx is None:
            raise CallerError("topk_weights: the handle was not made from topk_idx; give probs [T, E]")
        if topk_weights.shape != handle.topk_idx.shape:
            expected, found = list(handle.topk_idx.shape), list(topk_weights.shape)
            raise CallerError(f"topk_weights: expected shape {expected}, that of topk_idx, found {found}")
        weights = _f32("topk_weights", topk_weights)
        # What goes to no expert goes to a column of its own, which is cut off.
        index = handle.topk_idx.long()
        index = torch.where(index < 0, self._num_experts, index)
        dense = weights.new_zeros((weights.shape[0], self._num_experts + 1))
        return dense.scatter(1, index, weights)[:, :-1]

    def combine(
        self, tokens: Tensor, handle: Handle, *, probs: Tensor | None = None, wire: torch.dtype | None = None
    ) -> Combined:
        """Sums for each token its experts' rows, with f32 accumulators, in an order that never changes. Collective.

        Dropped rows count as zero, and rows that no token took are not read. Weights are not applied: experts do that.

        Args:
            tokens: [R, H] of bfloat16 or float32: the experts' outputs, in the rows where dispatch put their inputs.
                Made by `empty`, or delivered by `dispatch`, they are not copied on the CPU.
            handle: that of the dispatch.
            probs: f32 as dispatch delivers them, to be gathered to [T, E]: the way back of probabilities' gradients.
            wire: type of partial sums between ranks: torch.bfloat16 or torch.float32; that of `tokens`.

        Raises:
            CallerError: arguments that do not fit, or a handle that was never dispatched.
            PeerError: another rank is gone, or late.
        """
        return self._combine(tokens, handle, probs, wire, False)

    def combine_with_unpermute(
        self, tokens: Tensor, handle: Handle, *, probs: Tensor | None = None, wire: torch.dtype | None = None
    ) -> Combined:
        """As `combine`, of rows as `dispatch_with_permute` delivers them."""
        return self._combine(tokens, handle, probs, wire, True)

    def _combine(
        self, tokens: Tensor, handle: Handle, probs: Tensor | None, wire: torch.dtype | None, permuted: bool
    ) -> Combined:
        self._check_handle(handle, permuted)
        if probs is not None:
            probs = _f32("probs", probs)
        if _is_plain_call(tokens, probs):
            return Combined(*ops.combine(self._end, tokens, probs, handle.tensor, handle.tokens, permuted, wire))
        out, some_probs = torch.ops.hybrid_ep.combine(
            tokens, probs, handle.tensor, self._number, handle.tokens, permuted, wire
        )
        return Combined(out, None if probs is None else some_probs)

    def _check_handle(self, handle: Handle, permuted: bool) -> None:
        if not isinstance(handle, Handle):
            raise CallerError(f"handle: expected a Handle, found {type(handle).__name__}")
        if handle.buffer != self._number:
            raise CallerError("handle: it was made by another buffer")
        if handle.permuted != permuted:
            made, call = ("permuted", "dispatch_with_permute and combine_with_unpermute")
            if not handle.permuted:
                made, call = ("plain", "dispatch and combine")
            raise CallerError(f"handle: it is of the {made} mode, that of {call}")

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised registered memory: experts that write their outputs into it save combine a copy on the CPU."""
        if any(size < 0 for size in shape):
            raise CallerError(f"shape: expected numbers from 0 on, found {list(shape)}")
        return ops.empty(self._end, shape, dtype)

    @property
    def registered_bytes(self) -> int:
        """Memory that this rank has registered. It grows when it must, and is reused."""
        return self._end.native.registered_bytes()

    def traffic(self) -> Traffic:
        """Bytes and times so far."""
        return Traffic(*self._end.native.traffic())

    def synchronize(self) -> None:
        """Waits for all operators so far.

        Raises:
            Error: the first error of any of them.
        """
        self._end.native.synchronize()

    def close(self) -> None:
        """Takes part in nothing any more: ranks that still wait for this one get an error that says it left. Tensors
        and handles that the buffer made may be freed before or after.
        """
        self._end.native.close()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Buffer(rank={self.rank}, world_size={self.world_size}, num_experts={self.num_experts}, "
            f"device={str(self.device)!r})"
        )


_open: weakref.WeakSet[Buffer] = weakref.WeakSet()


# A traceback may keep a buffer for as long as the interpreter lives; the others should not wait for it.
@atexit.register
def _close_all() -> None:
    for buffer in list(_open):
        buffer.close()


def _is_plain_call(*tensors: Tensor | None) -> bool:
    """Whether nobody but the operator needs to see a call with these tensors: no compiler, no autograd, no tracer."""
    if torch.compiler.is_compiling():
        return False
    differentiable = torch.is_grad_enabled()
    # What is no tensor at all is for the operator to refuse.
    return not any(
        isinstance(tensor, Tensor) and ((differentiable and tensor.requires_grad) or type(tensor) not in _PLAIN)
        for tensor in tensors
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _routing(
    topk_idx: Tensor | None, topk_weights: Tensor | None, routing_map: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None, bool]:
    """The routing, its weights, and whether it is a map."""
    if (topk_idx is None) == (routing_map is None):
        found = "none" if topk_idx is None else "both"
        raise CallerError(f"routing: expected one of topk_idx, routing_map and handle, found {found}")
    if topk_idx is not None:
        if probs is not None:
            raise CallerError("probs: they go with a routing_map; weights of topk_idx are topk_weights")
        return topk_idx, topk_weights, False
    if topk_weights is not None:
        raise CallerError("topk_weights: they go with topk_idx; weights of a routing_map are probs")
    assert routing_map is not None
    return routing_map, probs, True


def _f32(name: str, weights: Tensor) -> Tensor:
    """Weights in f32; autograd sees the cast."""
    if not isinstance(weights, Tensor):
        raise CallerError(f"{name}: expected a tensor, found {type(weights).__name__}")
    if weights.dtype == torch.float32:
        return weights
    if not weights.dtype.is_floating_point:
        raise CallerError(f"{name}: expected a floating-point type, found {str(weights.dtype).removeprefix('torch.')}")
    return weights.float()


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise CallerError(f"device: expected the CPU or a CUDA device, found {device}")
    return device


def _current_gpu() -> int:
    """PyTorch's; where that is the first, as it is when no program has set it, the one of this rank's number on its
    machine, lest all its ranks share a GPU.
    """
    current = torch.cuda.current_device()
    place = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    # A launcher may also let each rank see a GPU of its own only: then there is no other to take.
    if current == 0 and place.isdecimal() and int(place) < torch.cuda.device_count():
        return int(place)
    return current


def _settings(
    device: torch.device,
    num_experts: int,
    domains: int,
    timeout: float | None,
    workers: int | None,
    sms: int | None,
) -> _native.Settings:
    on_gpu = device.type == "cuda"
    gpu = device.index
    for name, value in [("num_experts", num_experts), ("domains", domains), ("workers", workers), ("sms", sms)]:
        if value is not None:
            ops.check_count(name, value)
    if not isinstance(timeout, float | int | None):
        raise CallerError(f"timeout: expected seconds, found {timeout!r}")
    if on_gpu and gpu is None:
        gpu = _current_gpu()
    return {
        "backend": "cuda" if on_gpu else "host",
        "gpu": gpu if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "experts": num_experts,
        "domains": domains,
        "timeout": timeout,
        "workers": workers,
        "sms": sms,
    }
