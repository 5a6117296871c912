"""`Buffer`: one rank's end of a communicator, with the operators as its methods.

joining      the base class: how a rank joins and leaves, and its place among the ranks
  _settings    the device and settings of a new buffer
  rendezvous   how the ranks of a process group meet
  _sharing     copies and pickles of a buffer
results      what the operators return
work         asynchronous operators
_calls       from a method's arguments to an operator
ops          the operators over tensors
  _library     the same as torch.ops.hybrid_ep.*, for compilers
  _autograd    their gradients
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from . import _calls, ops
from ._calls import Given
from ._sharing import attach
from .errors import CallerError
from .joining import Joined
from .results import Combined, Dispatched, Handle, Traffic
from .work import Work

__all__ = ["Buffer", "Combined", "Dispatched", "Handle", "Traffic", "Work"]


_After: TypeAlias = torch.cuda.Event | Work | None


class Buffer(Joined):
    """One rank's end of a communicator between the ranks that share the experts of a model.

    The constructor and every operator (`preprocess`, `dispatch`, `combine` and their variants) are collective: all
    ranks call the same operators in the same order, with the same hidden size, types and mode. Numbers of tokens and
    capacities may differ between ranks, and may be zero. Any thread may use a buffer, one call at a time: calls at the
    same time are an error of the program. Operators release the GIL.

    **Ranks.** The ranks are those of `group`; without `group`, those of the default process group if it is initialized;
    else those that the environment of torchrun or SLURM describes; else this process alone.

    **Streams.** On a GPU, an operator is put into the current stream (`torch.cuda.current_stream()`) and returns at
    once, except a preprocess without `capacity`, which waits for the row counts. With `async_op=True` it is put into
    the buffer's communication stream, and `Work.wait` makes the current stream wait for it. The operators of one buffer
    run in call order, whichever streams they are in. On the CPU an operator returns when its result is complete.

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
        domains: The number of NVLink domains of equal size. The engine of HYBRID_EP_TRANSPORT carries tokens between
            them. Each domain is on one machine, or on several whose GPUs one NVLink network connects (never tested).
        device: The device of all tensors. Default: the CPU if there is no GPU, else the current CUDA device. If that
            is device 0, as it is if the program has set none, torchrun's LOCAL_RANK or SLURM's SLURM_LOCALID selects
            the device.
        timeout: The entry bound in seconds: how long a rank waits for a live peer to join or to enter an operator.
            Default: HYBRID_EP_TIMEOUT_MS, else 600.
        stall_timeout: The stall bound in seconds: how long a peer inside an operator may make no progress, or its
            heartbeat may be silent. Default: HYBRID_EP_STALL_TIMEOUT_MS, else 30. A shorter `timeout` limits it.
        workers: CPU only: the number of threads of an operator. Default: cores divided by ranks.
        sms: GPU only: the number of streaming multiprocessors that dispatch and combine use. Default: HYBRID_EP_SMS,
            else 48 for one or two ranks in one domain, and 32 otherwise.
        max_tokens: GPUs in several domains only: makes room for this many tokens of a rank in a call. It only raises
            HYBRID_EP_CUDA_RAIL_TOKENS (4,096 if not set). Of the values of all ranks, the largest applies; a call with
            more tokens fails.
        max_hidden: GPUs in several domains only: makes room for that many bfloat16 rows of this many elements. It only
            raises HYBRID_EP_CUDA_LANE_BYTES (64 MiB if not set). Give the same number on all ranks.

    Raises:
        CallerError: An argument is out of range, or ranks passed different arguments.
        SetupError: There is no GPU, no kernel compiler, or too little memory.
        PeerError: A rank did not join in time; `peer` names it.

    Example:
        Run with `torchrun --standalone --nproc-per-node 4`, with or without GPUs:

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

    @overload
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
        async_op: Literal[False] = False,
        after: None = None,
    ) -> Handle: ...

    @overload
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
        async_op: Literal[True],
        after: _After = None,
    ) -> tuple[Handle, Work]: ...

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
        async_op: bool = False,
        after: _After = None,
    ) -> Handle | tuple[Handle, Work]:
        """Computes the layout of a routing; ranks exchange counts only. Collective. Not differentiable.

        Give the routing as `topk_idx`, or as `routing_map`. All tensors are on the buffer's device. Non-contiguous
        tensors are copied.

        Args:
            topk_idx: int32 or int64 [T, K]: the experts of each token; -1 names no expert.
            topk_weights: Floating-point [T, K], optional: only checked here. A dispatch with the handle sends weights
                only if they are given to it.
            routing_map: bool or uint8 [T, E], non-zero where the token chose the expert.
            probs: Floating-point [T, E], optional, with `routing_map`: only checked here, like `topk_weights`.
            pad_multiple: None for the plain mode (one row per token and rank). A number selects the permuted mode (rows
                grouped by expert): the rows of each expert are padded to a multiple of it.
            capacity: The number of rows R of each dispatch output; rows beyond it are dropped. None: exactly the rows
                that arrive, for which a call on a GPU waits.
            max_experts_per_token: GPU and `routing_map` only: an upper bound on the number of experts of a token. The
                memory of the handle grows with T times this number. Default: E. A row with more experts is an error.
            async_op: As for `dispatch`. Operators of this buffer may take the handle before `wait`.
            after: As for `dispatch`.

        Returns:
            The handle for dispatch and combine; with `async_op`, the handle and a `Work`.

        Raises:
            CallerError: The routing or the capacity is invalid. On a GPU the kernel checks indices and weights; with a
                capacity, a later call raises the error.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        given = Given(topk_idx, topk_weights, routing_map, probs)
        arguments = (self._end, given, pad_multiple, capacity, max_experts_per_token)
        if async_op or after is not None:
            return _calls.start(async_op, after, _calls.preprocess, *arguments)
        return _calls.preprocess(*arguments)

    @overload
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
        async_op: Literal[False] = False,
        after: None = None,
    ) -> Dispatched: ...

    @overload
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
        async_op: Literal[True],
        after: _After = None,
    ) -> tuple[Dispatched, Work]: ...

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
        async_op: bool = False,
        after: _After = None,
    ) -> Dispatched | tuple[Dispatched, Work]:
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
            async_op: True puts the operator into the buffer's communication stream, and returns a `Work`, too. Without
                a capacity or handle the host still waits for the row counts. On the CPU the operator is complete when
                the call returns. The backward pass runs in the stream that is current at this call.
            after: With `async_op` only: an event that has been recorded, or the work of another operator. The operator
                waits for `after` instead of the current stream. On the CPU the host waits. The operator waits for the
                current stream, too, under one of these conditions:

                - An argument must be converted to float32 or to `[T, E]`.
                - A tensor that this buffer delivered has been freed since an operator followed the current stream.
                - A CUDA graph is being captured.
                - The work is of a buffer on the CPU.

        Returns:
            The received rows; with `async_op`, the rows and a `Work`. See `Dispatched` for the lifetime of their
            memory.

        Raises:
            CallerError: The arguments do not fit. If the error is found before the rank sends anything, the buffer
                stays usable.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        given = Given(topk_idx, topk_weights, routing_map, probs)
        arguments = (self._end, tokens, given, handle, scales, fp8, capacity)
        if async_op or after is not None:
            return _calls.start(async_op, after, _calls.dispatch, *arguments)
        return _calls.dispatch(*arguments)

    @overload
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
        async_op: Literal[False] = False,
        after: None = None,
    ) -> Dispatched: ...

    @overload
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
        async_op: Literal[True],
        after: _After = None,
    ) -> tuple[Dispatched, Work]: ...

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
        async_op: bool = False,
        after: _After = None,
    ) -> Dispatched | tuple[Dispatched, Work]:
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
            async_op: As for `dispatch`.
            after: As for `dispatch`.

        Returns:
            The received rows, with `tokens_per_expert`; with `async_op`, the rows and a `Work`.

        Raises:
            CallerError: As for `dispatch`.
            PeerError: As for `dispatch`.
        """
        if pad_multiple is None:
            pad_multiple = 1 if handle is None else handle.pad_multiple
        given = Given(topk_idx, topk_weights, routing_map, probs)
        arguments = (self._end, tokens, given, handle, scales, fp8, capacity, pad_multiple)
        if async_op or after is not None:
            return _calls.start(async_op, after, _calls.dispatch, *arguments)
        return _calls.dispatch(*arguments)

    @overload
    def combine(
        self,
        tokens: Tensor,
        handle: Handle,
        *,
        probs: Tensor | None = None,
        wire: torch.dtype | None = None,
        async_op: Literal[False] = False,
        after: None = None,
    ) -> Combined: ...

    @overload
    def combine(
        self,
        tokens: Tensor,
        handle: Handle,
        *,
        probs: Tensor | None = None,
        wire: torch.dtype | None = None,
        async_op: Literal[True],
        after: _After = None,
    ) -> tuple[Combined, Work]: ...

    def combine(
        self,
        tokens: Tensor,
        handle: Handle,
        *,
        probs: Tensor | None = None,
        wire: torch.dtype | None = None,
        async_op: bool = False,
        after: _After = None,
    ) -> Combined | tuple[Combined, Work]:
        """Sends the experts' outputs back and sums them for each token, in plain mode. Collective. Differentiable.

        Sums use float32 accumulators in a fixed order, so results are the same in every run. Dropped rows count as
        zero, and rows that no token takes are not read. Combine does not apply weights: the experts do.

        Args:
            tokens: [R, H], bfloat16 or float32: the output for each row that dispatch delivered, in the same order, on
                the buffer's device. On the CPU, tensors made by `empty` or delivered by `dispatch` are not copied.
            handle: The handle of the dispatch.
            probs: Optional, float32, of the shape that dispatch delivers: gathered to [T, E]. The backward pass of
                dispatch returns gradients of probabilities this way.
            wire: The type of sums between ranks: torch.bfloat16 or torch.float32. Default: that of `tokens`.
            async_op: As for `dispatch`.
            after: As for `dispatch`.

        Returns:
            The sums for this rank's T tokens; with `async_op`, the sums and a `Work`.

        Raises:
            CallerError: The arguments do not fit, or the handle was not used in a dispatch.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        arguments = (self._end, tokens, handle, probs, wire, False)
        if async_op or after is not None:
            return _calls.start(async_op, after, _calls.combine, *arguments)
        return _calls.combine(*arguments)

    @overload
    def combine_with_unpermute(
        self,
        tokens: Tensor,
        handle: Handle,
        *,
        probs: Tensor | None = None,
        wire: torch.dtype | None = None,
        async_op: Literal[False] = False,
        after: None = None,
    ) -> Combined: ...

    @overload
    def combine_with_unpermute(
        self,
        tokens: Tensor,
        handle: Handle,
        *,
        probs: Tensor | None = None,
        wire: torch.dtype | None = None,
        async_op: Literal[True],
        after: _After = None,
    ) -> tuple[Combined, Work]: ...

    def combine_with_unpermute(
        self,
        tokens: Tensor,
        handle: Handle,
        *,
        probs: Tensor | None = None,
        wire: torch.dtype | None = None,
        async_op: bool = False,
        after: _After = None,
    ) -> Combined | tuple[Combined, Work]:
        """Sends the experts' outputs back and sums them for each token, in permuted mode. Collective.

        Everything is as for `combine`; the rows are those that `dispatch_with_permute` delivered.

        Args:
            tokens: As for `combine`.
            handle: The handle of the dispatch.
            probs: As for `combine`.
            wire: As for `combine`.
            async_op: As for `dispatch`.
            after: As for `dispatch`.

        Returns:
            The sums for this rank's T tokens; with `async_op`, the sums and a `Work`.

        Raises:
            CallerError: As for `combine`.
            PeerError: As for `combine`.
        """
        arguments = (self._end, tokens, handle, probs, wire, True)
        if async_op or after is not None:
            return _calls.start(async_op, after, _calls.combine, *arguments)
        return _calls.combine(*arguments)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Makes an uninitialized tensor in registered memory. On the CPU, combine does not copy such a tensor.

        The memory follows the rules of `Dispatched`: `Tensor.record_stream` has no effect on it. On a GPU the call
        makes the current stream wait for the buffer's asynchronous operators.

        Args:
            *shape: The sizes, each 0 or more.
            dtype: The type of the elements.

        Returns:
            A contiguous tensor on the buffer's device.

        Raises:
            CallerError: A size is not an integer of at least 0, `dtype` is not a type, or the buffer is closed.
            SetupError: There is too little memory.
        """
        if not all(hasattr(size, "__index__") and size >= 0 for size in shape):
            text = f"shape: expected integers of at least 0, each as a separate argument, found {list(shape)}"
            raise CallerError(text)
        if not isinstance(dtype, torch.dtype):
            raise CallerError(f"dtype: expected a torch.dtype, found {dtype!r}")
        return ops.empty(self._end, shape, dtype)

    def attach(self) -> AbstractContextManager[Buffer]:
        """Gives this buffer to layers that this thread unpickles inside a `with` block.

        Returns:
            A context manager; its value is this buffer.

        Example:
            >>> with buffer.attach():
            ...     layer = torch.load("layer.pt", weights_only=False)
        """
        return attach(self)
