"""`Engine`: what moves weights and gradients for the runtime."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor

__all__ = ["Engine", "span_of"]

_Span: TypeAlias = tuple[int, int]


class Engine(Protocol):
    """What moves weights and gradients: `_native.Migration`. All calls may raise `PeerError`, and then raise it again.

    A span is the address of a contiguous tensor, in main memory or in that of the GPU of the settings, and its number
    of bytes. Calls come after the work of `stream`, the raw handle of a stream of that GPU, and return when theirs is
    done."""

    def publish(self, layer: int, weights: _Span, stream: int) -> None: ...
    def start_over(self) -> None: ...
    def gather(self, layer: int, replicas: _Span, stream: int) -> list[int]: ...
    def send_gradients(self, layer: int, gradients: _Span, stream: int) -> None: ...
    def reduce_gradients(self, layer: int, own: _Span, sum: _Span, stream: int) -> None: ...
    def save(self) -> bytes: ...
    def stats(self) -> dict[str, float]: ...
    def close(self, at_once: bool) -> None: ...


def span_of(tensor: Tensor) -> _Span:
    """Returns the span of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes
