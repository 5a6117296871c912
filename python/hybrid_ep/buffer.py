"""`Buffer`: one rank's end of a communicator."""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import _native, ops
from ._dense import dense_weights
from ._sharing import Shared, attach, find_buffer
from .errors import CallerError, SetupError
from .rendezvous import Meeting

__all__ = ["Buffer", "Combined", "Dispatched", "Handle", "Traffic"]


class Handle(NamedTuple):
    """The result of `preprocess`: where each copy of a token goes.

    One handle serves any number of dispatches and combines with the same routing. `Dispatched.handle` is the handle
    that a `dispatch` made. T is the number of this rank's tokens, R the number of rows that this rank receives.
    """

    tensor: Tensor
    """int64 [1] on the CPU. The storage of this tensor owns the handle: keep the storage alive to keep the handle."""
    buffer: int
    """The number of the buffer that made the handle."""
    tokens: int
    """T."""
    rows: int | None
    """R; None inside `torch.compile` if no capacity was given."""
    permuted: bool
    """True for the permuted mode, False for the plain mode."""
    pad_multiple: int
    """The rows of each expert are padded to a multiple of this number; 1 in plain mode."""
    capacity: int | None
    """The capacity in rows, if one was given: then R equals it."""
    topk_idx: Tensor | None
    """[T, K], if the routing was given as `topk_idx`; None for a `routing_map`."""
    tokens_per_expert: Tensor
    """int64 [local experts]: rows of each local expert, padding included; empty in plain mode. On the buffer's device
    with a capacity, else on the CPU."""
    raw_tokens_per_expert: Tensor
    """As `tokens_per_expert`, without padding."""
    overflow: Tensor
    """int32 [1] on the buffer's device: 1 if the capacity dropped rows, else 0."""


class Dispatched(NamedTuple):
    """The result of a dispatch: the R rows that this rank received.

    `tokens`, `probs`, `scales` and `local_experts` lie in the buffer's registered memory, not in memory of PyTorch's
    allocator. The last tensor or view of that memory gives it back, and the buffer's next operator may reuse it.
    `torch.Tensor.record_stream` has no effect on them: see `Buffer`.
    """

    tokens: Tensor
    """[R, H], of the input's type, or float8_e4m3fn with `fp8`. R is the capacity, if one was given, else the exact
    number of rows."""
    probs: Tensor | None
    """float32 [R] (permuted mode) or [R, local experts] (plain mode); None if no weights were given."""
    scales: Tensor | None
    """float32 or uint8 (ue8m0) [R, ceil(H / 128)], or uint8 (MXFP8) [R, ceil(H / 32)]; None without FP8."""
    local_experts: Tensor | None
    """Plain mode: bool [R, local experts], True if the row's token chose the expert. Permuted mode: None."""
    tokens_per_expert: Tensor | None
    """Permuted mode: int64 [local experts], padding included, on the CPU, or on the buffer's device with a capacity.
    Plain mode: None."""
    overflow: Tensor
    """int32 [1] on the buffer's device: 1 if the capacity dropped rows, else 0."""
    handle: Handle
    """The handle for combine and for further dispatches with the same routing."""


class Combined(NamedTuple):
    """The result of a combine: one sum for each of this rank's T tokens."""

    tokens: Tensor
    """[T, H], of the input rows' type."""
    probs: Tensor | None
    """float32 [T, E], zero for experts that the token did not choose; None if no probabilities were given."""


class Traffic(NamedTuple):
    """Counters of a buffer since it was made. Subtract two readings to measure what ran between them."""

    domain_bytes: int
    """Bytes written to, or read from, other ranks of the NVLink domain."""
    transport_bytes: int
    """Bytes handed to the transport for other domains."""
    transport_messages: int
    """Messages handed to the transport for other domains."""
    preprocess_bytes: int
    """Bytes of counts received in preprocess."""
    waited_seconds: float
    """Seconds in which no worker of this rank could make progress."""


class Buffer(Shared):
    """One rank's end of a communicator between the ranks that share the experts of a model.

    The constructor and every operator (`preprocess`, `dispatch`, `combine` and their variants) are collective: all
    ranks call the same operators in the same order, with the same hidden size, types and mode. Numbers of tokens and
    capacities may differ between ranks, and may be zero. Any thread may use a buffer, one call at a time. Operators
    release the GIL.

    Which ranks: those of `group`; without `group`, those of the default process group if it is initialized; else the
    ranks that the environment of torchrun or SLURM describes; else this process alone.

    **Streams.** On a GPU, an operator is put into the current stream (`torch.cuda.current_stream()`) and returns at
    once, except a preprocess without `capacity`, which waits for the row counts. The operators of one buffer run in
    call order also when the current stream changes. On the CPU an operator returns when its result is complete.

    **Memory of results.** What `dispatch` delivers, and what `empty` returns, lies in registered memory of the buffer.
    PyTorch's allocator does not own this memory, so `Tensor.record_stream` has no effect on it. If another stream uses
    such a tensor, make the stream of the buffer's next operator wait for that use before the last reference to the
    tensor is dropped: `torch.cuda.current_stream().wait_stream(other)`. What `combine` returns on a GPU comes from
    PyTorch's allocator and follows PyTorch's rules.

    **CUDA graphs.** Operators with a capacity, or with a handle, can be captured. Memory that a capture allocates stays
    with the buffer, because replays write to it. The graph keeps the buffer's memory and the captured handles alive, so
    it may be replayed after both are dropped; the rank leaves when the graph is gone, too. The caller keeps all other
    tensors from before the capture alive.

    **Copies.** A copy of an object that holds a buffer, such as `copy.deepcopy(layer)`, holds the same buffer. A pickle
    such as `torch.save(layer)` holds none; load it in another process inside `with buffer.attach():`.

    Args:
        group: The ranks. Rank numbers in errors are those of this group.
        num_experts: E, the number of experts on all ranks; a multiple of the number of ranks. Expert `e` is on rank
            `e // (E // world_size)`.
        domains: The number of emulated NVLink domains of equal size. CPU only.
        device: The device of all tensors. Default: the CPU if there is no GPU, else the current CUDA device. If the
            program has set no CUDA device, torchrun's LOCAL_RANK or SLURM's SLURM_LOCALID selects it.
        timeout: The entry bound in seconds: how long a rank waits for a live peer to join or to enter an operator.
            Default: HYBRID_EP_TIMEOUT_MS, else 600.
        stall_timeout: The stall bound in seconds: how long a peer inside an operator may make no progress, or its
            heartbeat may be silent. Default: HYBRID_EP_STALL_TIMEOUT_MS, else 30. A shorter `timeout` limits it.
        workers: CPU only: threads of an operator. Default: cores divided by ranks.
        sms: GPU only: streaming multiprocessors that dispatch and combine take. Default: HYBRID_EP_SMS, else 32.

    Raises:
        CallerError: An argument is out of range, or ranks passed different arguments.
        SetupError: There is no GPU, no kernel compiler, or too little memory.
        PeerError: A rank did not join in time; `peer` names it.

    Example:
        Run with `torchrun --nproc-per-node 4`, with or without GPUs:

        >>> buffer = Buffer(num_experts=8)
        >>> tokens = torch.randn(100, 512, device=buffer.device, dtype=torch.bfloat16)
        >>> topk_idx = torch.rand(100, 8, device=buffer.device).topk(2).indices
        >>> topk_weights = torch.full((100, 2), 0.5, device=buffer.device)
        >>> received = buffer.dispatch_with_permute(tokens, topk_idx, topk_weights)
        >>> outputs = received.tokens * received.probs[:, None].bfloat16()  # stands for the experts
        >>> combined = buffer.combine_with_unpermute(outputs, received.handle).tokens
        >>> combined.shape
        torch.Size([100, 512])
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        domains: int = 1,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        workers: int | None = None,
        sms: int | None = None,
    ) -> None:
        settings = _settings(_device(device), num_experts, domains, timeout, stall_timeout, workers, sms)
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            native = _native.Buffer.launched(settings)
        else:
            meeting = Meeting(group, _native.timeout_of(settings))
            native = _native.Buffer.join(meeting.rank, meeting.ranks, settings, meeting)
            meeting.end()
        self._adopt(native, group)

    @classmethod
    def threads(
        cls,
        ranks: int,
        *,
        num_experts: int,
        domains: int = 1,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        workers: int | None = None,
        sms: int | None = None,
    ) -> list[Buffer]:
        """Makes all ranks of a communicator in this process. Use each buffer from its own thread.

        On GPUs the ranks are spread over all visible GPUs. Ranks that share a GPU wait for each other inside kernels,
        which brings these conditions:

        - Each thread uses its own `torch.cuda.stream`.
        - Before CUDA starts, CUDA_DEVICE_MAX_CONNECTIONS is at least the number of streams, and CUDA_MODULE_LOADING is
          EAGER.
        - Nothing in a backward pass waits for the GPU, since PyTorch runs all backward passes of a GPU on one thread.

        Even then, what PyTorch does for the first time, such as pinning memory, may wait for kernels that wait for
        other ranks, until the kernels time out. Use one process for each rank if that matters.

        Args:
            ranks: The number of ranks.
            num_experts: As for `Buffer`.
            domains: As for `Buffer`.
            device: "cpu" or "cuda"; a CUDA device with an index only on a machine with one GPU.
            timeout: As for `Buffer`.
            stall_timeout: As for `Buffer`.
            workers: As for `Buffer`.
            sms: As for `Buffer`.

        Returns:
            The buffers of ranks 0 to `ranks - 1`, in order.

        Raises:
            CallerError: An argument is out of range.
            SetupError: There is no GPU, no kernel compiler, or too little memory.
        """
        where = _device(device)
        if where.index is not None and where.type == "cuda" and torch.cuda.device_count() > 1:
            raise CallerError(
                f"device: ranks are spread over all GPUs, or those of CUDA_VISIBLE_DEVICES; found {where}"
            )
        settings = _settings(where, num_experts, domains, timeout, stall_timeout, workers, sms)
        ops.check_count("ranks", ranks)
        buffers = []
        for native in _native.Buffer.threads(ranks, settings):
            buffer = cls.__new__(cls)
            buffer._adopt(native)
            buffers.append(buffer)
        return buffers

    def _adopt(self, native: _native.Buffer, group: dist.ProcessGroup | None = None) -> None:
        self._end = ops.End(native)
        self._group = group
        self._mesh: DeviceMesh | None = None
        self._number = self._end.number
        self._num_experts = self._end.experts
        _open.add(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks; None if the buffer was made without one."""
        return self._group

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a device mesh with one dimension, "ep", over which experts are sharded. None for one rank, and
        for a buffer without a process group."""
        if self._mesh is None and self._group is not None and self.world_size > 1:
            self._mesh = DeviceMesh.from_group(self._group, self.device.type, mesh_dim_names=("ep",))
        return self._mesh

    def attach(self) -> AbstractContextManager[Buffer]:
        """Gives this buffer to layers that this thread unpickles inside a `with` block.

        Returns:
            A context manager; its value is this buffer.

        Example:
            >>> with buffer.attach():
            ...     layer = torch.load("layer.pt", weights_only=False)
        """
        return attach(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return find_buffer, (self._name(), self.num_experts, self.world_size)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._end.native.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._end.native.ranks

    @property
    def num_experts(self) -> int:
        """E, the number of experts on all ranks."""
        return self._num_experts

    @property
    def num_local_experts(self) -> int:
        """The number of experts on this rank."""
        return self._end.local_experts

    @property
    def local_experts(self) -> range:
        """The global indices of the experts on this rank."""
        return range(*self._end.native.local_experts)

    @property
    def domains(self) -> int:
        """The number of NVLink domains."""
        return self._end.native.domains

    @property
    def device(self) -> torch.device:
        """The device that all tensor arguments must be on."""
        return self._end.device

    @property
    def backend(self) -> str:
        """The backend: "host" or "cuda"."""
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
        """Computes the layout of a routing; ranks exchange counts only. Collective. Not differentiable.

        Give the routing as `topk_idx`, or as `routing_map`. All tensors are on the buffer's device. Non-contiguous
        tensors are copied.

        Args:
            topk_idx: int32 or int64 [T, K]: the experts of each token; -1 names no expert.
            topk_weights: Floating-point [T, K], optional; converted to float32.
            routing_map: bool or uint8 [T, E], non-zero where the token chose the expert.
            probs: Floating-point [T, E], optional, with `routing_map`; converted to float32.
            pad_multiple: None for the plain mode (one row per token and rank). A number selects the permuted mode (rows
                grouped by expert): the rows of each expert are padded to a multiple of it.
            capacity: The rows R of each dispatch output; rows beyond it are dropped. None: exactly the rows that
                arrive, for which a call on a GPU waits.
            max_experts_per_token: GPU and `routing_map` only: an upper bound that sizes memory. Default: E.

        Returns:
            The handle for dispatch and combine.

        Raises:
            CallerError: The routing or the capacity is invalid. On a GPU the kernel checks indices and weights; with a
                capacity, a later call raises the error.
            PeerError: Another rank died, left, failed, stalled or came late.
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
        if weights is not None and weights.requires_grad:
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
        """Sends tokens to the ranks of their experts, in plain mode. Collective.

        A rank receives one row for each token that chose at least one of its experts, ordered by (source rank, token).

        Give the routing as for `preprocess`, or give the `handle` of an earlier preprocess or dispatch. With a handle
        the call does not preprocess and does not wait, and weights travel only if `topk_weights` or `probs` are given.

        Gradients flow to `tokens`, unless the rows are FP8, and to `topk_weights` or `probs`. The backward pass of
        dispatch is a combine, so all ranks must run backward passes in the same order, too.

        With a capacity, the rows after the last delivered row are zero. The exception is `tokens` under
        `torch.no_grad()`: those rows are undefined, because only gradients sum over all rows.

        Args:
            tokens: [T, H], bfloat16 or float32 (delivered unchanged), or float8_e4m3fn with `scales`, on the buffer's
                device. The bytes of a row are a multiple of 16.
            topk_idx: int32 or int64 [T, K]: the experts of each token; -1 names no expert.
            topk_weights: Floating-point [T, K]; also with a handle that was made from `topk_idx`.
            routing_map: bool or uint8 [T, E].
            probs: Floating-point [T, E], with `routing_map` or `handle`.
            handle: The handle of a routing in plain mode.
            scales: float32 or uint8 (ue8m0) [T, ceil(H / 128)], or uint8 (MXFP8) [T, ceil(H / 32)].
            fp8: "f32", "ue8m0" or "mxfp8": quantises bfloat16 tokens in flight, with scales of that format.
            capacity: As for `preprocess`. With a handle: the capacity of the handle, or None.

        Returns:
            The received rows. See `Dispatched` for the lifetime of their memory.

        Raises:
            CallerError: The arguments do not fit. If the error is found before the rank sends anything, the buffer
                stays usable.
            PeerError: Another rank died, left, failed, stalled or came late.
        """
        arguments = (tokens, topk_idx, topk_weights, routing_map, probs, handle, scales, fp8, capacity)
        return self._dispatch(*arguments, None)

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
        """Sends tokens to the ranks of their experts, in permuted mode. Collective.

        A rank receives one row for each (token, local expert) pair. Rows are grouped by local expert, and ordered by
        (source rank, token) within a group. Each group is padded with zero rows to a multiple of `pad_multiple`.

        Everything else is as for `dispatch`.

        Args:
            tokens: As for `dispatch`.
            topk_idx: As for `dispatch`.
            topk_weights: As for `dispatch`.
            routing_map: As for `dispatch`.
            probs: As for `dispatch`.
            handle: The handle of a routing in permuted mode.
            scales: As for `dispatch`.
            fp8: As for `dispatch`.
            capacity: As for `preprocess`. With a handle: the capacity of the handle, or None.
            pad_multiple: Default: 1, or the value of the handle.

        Returns:
            The received rows, with `tokens_per_expert`.

        Raises:
            CallerError: As for `dispatch`.
            PeerError: As for `dispatch`.
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
        *,
        local_experts: bool = True,
    ) -> Dispatched:
        """Dispatches in plain mode (`pad_multiple` is None) or in permuted mode.

        Args:
            local_experts: Whether to deliver the map of that name, in plain mode.
        """
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
                raise CallerError("handle: a routing is given too; give one or the other")
            self._check_handle(handle, pad_multiple is not None)
            if capacity not in (None, handle.capacity):
                raise CallerError(f"capacity: the handle's is {handle.capacity}, found {capacity}")
            if pad_multiple not in (None, handle.pad_multiple):
                raise CallerError(f"pad_multiple: the handle's is {handle.pad_multiple}, found {pad_multiple}")
            weights = self._dense_weights(handle, topk_weights, probs)

        permuted = handle.permuted
        local_experts = local_experts and not permuted
        # Without gradients nothing sums over the rows that no token takes, so they need not be cleared.
        clear_tokens = handle.capacity is not None and torch.is_grad_enabled()
        if _is_plain_call(tokens, weights):
            out, out_scales, out_probs, out_map = ops.dispatch(
                self._end, tokens, scales, weights, handle.tensor, fresh, fp8, clear_tokens, local_experts
            )
        else:
            topk = handle.topk_idx if fresh and weights is not None else None
            out, some_scales, some_probs, some_map = torch.ops.hybrid_ep.dispatch(
                tokens, scales, weights, topk, handle.tensor, self._number,
                fresh, fp8, permuted, handle.rows, clear_tokens, local_experts,
            )  # fmt: skip
            out_scales = None if scales is None and fp8 is None else some_scales
            out_probs = None if weights is None else some_probs
            out_map = some_map if local_experts else None
        counts = handle.tokens_per_expert if permuted else None
        return Dispatched(out, out_probs, out_scales, out_map, counts, handle.overflow, handle)

    def _dense_weights(self, handle: Handle, topk_weights: Tensor | None, probs: Tensor | None) -> Tensor | None:
        """The weights for a dispatch with a cached handle, as float32 `[T, E]`."""
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
        return dense_weights(handle.topk_idx, weights, handle.topk_idx.shape[0], self._num_experts)

    def combine(
        self, tokens: Tensor, handle: Handle, *, probs: Tensor | None = None, wire: torch.dtype | None = None
    ) -> Combined:
        """Sends the experts' outputs back and sums them for each token, in plain mode. Collective. Differentiable.

        Sums use float32 accumulators in a fixed order, so results are the same in every run. Dropped rows count as
        zero, and rows that no token takes are not read. Combine does not apply weights: the experts do.

        Args:
            tokens: [R, H], bfloat16 or float32: the output for each row that dispatch delivered, in the same order, on
                the buffer's device. On the CPU, tensors made by `empty` or delivered by `dispatch` are not copied.
            handle: The handle of the dispatch.
            probs: Optional, float32, of the shape that dispatch delivers: gathered to [T, E]. The backward pass of
                dispatch returns gradients of probabilities this way.
            wire: The type of partial sums between ranks: torch.bfloat16 or torch.float32. Default: that of `tokens`.

        Returns:
            The sums for this rank's T tokens.

        Raises:
            CallerError: The arguments do not fit, or the handle was not used in a dispatch.
            PeerError: Another rank died, left, failed, stalled or came late.
        """
        return self._combine(tokens, handle, probs, wire, False)

    def combine_with_unpermute(
        self, tokens: Tensor, handle: Handle, *, probs: Tensor | None = None, wire: torch.dtype | None = None
    ) -> Combined:
        """Sends the experts' outputs back and sums them for each token, in permuted mode. Collective.

        Everything is as for `combine`; the rows are those that `dispatch_with_permute` delivered.

        Args:
            tokens: As for `combine`.
            handle: The handle of the dispatch.
            probs: As for `combine`.
            wire: As for `combine`.

        Returns:
            The sums for this rank's T tokens.

        Raises:
            CallerError: As for `combine`.
            PeerError: As for `combine`.
        """
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
            raise CallerError("handle: made by another buffer; use it with the buffer that made it")
        if handle.permuted != permuted:
            made, call = ("permuted", "dispatch_with_permute and combine_with_unpermute")
            if not handle.permuted:
                made, call = ("plain", "dispatch and combine")
            raise CallerError(f"handle: made in {made} mode, for {call}")

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Makes an uninitialized tensor in registered memory. On the CPU, combine does not copy such a tensor.

        The memory follows the rules of `Dispatched`: `Tensor.record_stream` has no effect on it.

        Args:
            *shape: The sizes, each 0 or more.
            dtype: The type of the elements.

        Returns:
            A contiguous tensor on the buffer's device.

        Raises:
            CallerError: A size is negative, or the buffer is closed.
            SetupError: There is too little memory.
        """
        if any(size < 0 for size in shape):
            raise CallerError(f"shape: expected numbers from 0 on, found {list(shape)}")
        return ops.empty(self._end, shape, dtype)

    @property
    def registered_bytes(self) -> int:
        """Bytes of memory that this rank has registered. The memory grows on demand and is reused."""
        return self._end.native.registered_bytes()

    def traffic(self) -> Traffic:
        """Reads the counters of this rank.

        Returns:
            Bytes, messages and waiting time since the buffer was made.
        """
        return Traffic(*self._end.native.traffic())

    def synchronize(self) -> None:
        """Waits until all operators called so far are complete.

        Raises:
            HybridEPError: The first error of any of these operators.
        """
        self._end.native.synchronize()

    def close(self) -> None:
        """Leaves the communicator. Peers that still wait for this rank get a `PeerError` with the fault "left".

        Tensors and handles that the buffer made may be freed before or after. A second call does nothing.

        On a GPU the rank leaves when its operators are over, replays of CUDA graphs included, and its memory is freed
        when the GPU has finished the work that was queued by then. `close` waits for at most 2 seconds, and a
        background thread waits for the rest. Memory still in use after the entry bound plus the stall bound is not
        freed, and a warning on stderr gives its size.

        CUDA cannot tell whether a GPU is idle without breaking captures in progress. Do not close a buffer, or free its
        last tensor, while another thread captures a graph on the same GPU.
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


# A traceback may keep a buffer alive until the interpreter ends. Peers must not wait until then.
@atexit.register
def _close_all() -> None:
    for buffer in list(_open):
        buffer.close()
    _native.finish()


def _is_plain_call(*tensors: Tensor | None) -> bool:
    """Whether the operator can be called directly: no compiler, autograd or tracer needs to see the call."""
    if torch.compiler.is_compiling():
        return False
    differentiable = torch.is_grad_enabled()
    # The operator itself refuses arguments that are not tensors.
    return not any(
        isinstance(tensor, Tensor) and ((differentiable and tensor.requires_grad) or not ops.is_plain(tensor))
        for tensor in tensors
    )


def _routing(
    topk_idx: Tensor | None, topk_weights: Tensor | None, routing_map: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None, bool]:
    """Returns the routing, its weights, and whether the routing is a map."""
    if (topk_idx is None) == (routing_map is None):
        found = "none" if topk_idx is None else "both"
        raise CallerError(f"routing: expected one of topk_idx, routing_map and handle, found {found}")
    if topk_idx is not None:
        if probs is not None:
            raise CallerError("probs: expected with a routing_map only; with topk_idx give topk_weights")
        return topk_idx, topk_weights, False
    if topk_weights is not None:
        raise CallerError("topk_weights: expected with topk_idx only; with a routing_map give probs")
    assert routing_map is not None
    return routing_map, probs, True


def _f32(name: str, weights: Tensor) -> Tensor:
    """Converts weights to float32; autograd sees the cast."""
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
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SetupError(f"device={str(device)!r}: {_no_cuda()}; without a GPU take device='cpu'")
    return device


def _no_cuda() -> str:
    """Says why PyTorch cannot use CUDA, and what would help."""
    try:
        _native.check_cuda()
    except SetupError as error:
        return str(error)
    # The driver lists GPUs, so the cause is PyTorch's build.
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA; install a build for CUDA (pytorch.org says which)"
    built = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}"
    return f"{built}, cannot use the GPU; torch.cuda.init() says why"


def _current_gpu() -> int:
    """The CUDA device for a buffer without `device`.

    PyTorch's current device, unless that is device 0, which it is when the program has set none. Then the launcher's
    local rank selects the device, so that the ranks of a machine do not share GPU 0.
    """
    current = torch.cuda.current_device()
    place = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    # A launcher may show each rank only one GPU; then the local rank is out of range.
    if current == 0 and place.isdecimal() and int(place) < torch.cuda.device_count():
        return int(place)
    return current


def _settings(
    device: torch.device,
    num_experts: int,
    domains: int,
    timeout: float | None,
    stall_timeout: float | None,
    workers: int | None,
    sms: int | None,
) -> _native.Settings:
    on_gpu = device.type == "cuda"
    gpu = device.index
    for name, value in [("num_experts", num_experts), ("domains", domains), ("workers", workers), ("sms", sms)]:
        if value is not None:
            ops.check_count(name, value)
    for name, seconds in [("timeout", timeout), ("stall_timeout", stall_timeout)]:
        if not isinstance(seconds, float | int | None):
            raise CallerError(f"{name}: expected seconds, found {seconds!r}")
    if on_gpu and gpu is None:
        gpu = _current_gpu()
    return {
        "backend": "cuda" if on_gpu else "host",
        "gpu": gpu if on_gpu else None,
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "experts": num_experts,
        "domains": domains,
        "timeout": timeout,
        "stall_timeout": stall_timeout,
        "workers": workers,
        "sms": sms,
    }
