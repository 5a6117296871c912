"""Streams and events that record what happens before what, in place of those of `torch.cuda`.

An operator runs on the CPU at once, so only the recorded order shows whether a GPU would have waited. Nothing here
orders the operators of a buffer, as nothing in the native buffer does while a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, ops
from hybrid_ep.work import Communication


class Event:
    def __init__(self, before: set[str] | None = None) -> None:
        self.before = before or set()
        # As in PyTorch, 0 until the event is recorded.
        self.cuda_event = 0 if before is None else id(self)
        self.complete = False

    def query(self) -> bool:
        return self.complete

    def synchronize(self) -> None:
        self.complete = True


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.done: set[str] = set()

    def record_event(self) -> Event:
        return Event(set(self.done))

    def wait_event(self, event: Event) -> None:
        self.done |= event.before

    def wait_stream(self, stream: Stream) -> None:
        self.done |= stream.done


class Cuda:
    """The state of a device: its current stream, and what ran in which stream after what."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.capturing = False
        self.asked = 0
        self.streams: list[Stream] = []
        self.stream_of: dict[str, Stream] = {}
        self.before: dict[str, set[str]] = {}
        self.recorded: list[tuple[int, Stream]] = []

    def launch(self, name: str) -> None:
        """Puts a kernel into the current stream."""
        self.before[name], self.stream_of[name] = set(self.current.done), self.current
        self.current.done.add(name)

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(device, priority))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def is_capturing(self) -> bool:
        self.asked += 1
        return self.capturing

    def recorded_in(self, stream: Stream) -> set[int]:
        return {address for address, where in self.recorded if where is stream}


class Native:
    """The native buffer; records every operator as a kernel: "preprocess 0", "dispatch 1", ..."""

    def __init__(self, native: Any, cuda: Cuda) -> None:
        self._native, self._cuda, self._calls = native, cuda, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if name == "combine_tensors":
            # Its outputs are in registered memory on the CPU; see `_output` below.
            return lambda *args: None
        operator = name.removesuffix("_tensors")
        if operator not in ("preprocess", "dispatch", "combine"):
            return found

        def call(*args: Any) -> Any:
            result = found(*args)
            if result is None and operator != name:
                return None
            self._cuda.launch(f"{operator} {self._calls}")
            self._calls += 1
            return result

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Replaces the streams of `torch.cuda`."""
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fake.is_capturing)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: fake.recorded.append((tensor.data_ptr(), stream))
    )
    # Allocates outputs as on a GPU. On the CPU, outputs are in registered memory.
    monkeypatch.setattr(ops, "_output", lambda end, like, shape, dtype: like.new_empty(shape, dtype=dtype))
    return fake


def on_streams(cuda: Cuda, experts: int = 4) -> Buffer:
    """Makes a buffer of one rank on the CPU that treats streams as a buffer on a GPU does."""
    (buffer,) = Buffer.threads(1, num_experts=experts, device="cpu", workers=1)
    end = buffer._end
    end.communication = Communication(end.device)
    end.native = Native(end.native, cuda)  # type: ignore[assignment]
    return buffer
