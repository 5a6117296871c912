"""What the operators of `Buffer` return: `Handle`, `Dispatched`, `Combined` and `Traffic`.

These are tuples without behaviour. `buffer` and `_calls` make them; the package exports them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Combined", "Dispatched", "Handle", "Traffic"]


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
    kept_per_expert: Tensor
    """Like `tokens_per_expert`, but without padding."""
    overflow: Tensor
    """int32 [1] on the buffer's device: 1 if the capacity dropped rows, else 0."""
    topk_version: int | None = None
    """The version of `topk_idx` at the preprocess, by which a later change in place is noticed."""


class Dispatched(NamedTuple):
    """The result of a dispatch: the R rows that this rank received.

    `tokens`, `probs`, `scales` and `local_experts` lie in the buffer's registered memory, not in memory of PyTorch's
    allocator. The memory is returned when its last tensor or view is freed; the buffer's next operator may reuse it.
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
    """CPU: seconds in which the workers of this rank waited inside of operators, for other ranks or for messages; the
    mean over the workers. GPU: 0, because kernels wait."""
