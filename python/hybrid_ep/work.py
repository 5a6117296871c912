"""Asynchronous operators: `Work`, which stands for one, and `Communication`, the stream in which they run.

`ops.End` holds the `Communication` of a buffer on a GPU; `ops` runs every operator through it. `_calls` starts
asynchronous operators and returns their `Work`. docs/overlap.md has the rules for users.

The order of a buffer's operators is their call order. The native buffer keeps it between streams by events. It cannot
do so while a CUDA graph is captured, so `Communication` also makes a synchronous operator's stream wait for the
asynchronous operators before it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from . import _native
from ._compilers import opaque
from .errors import CallerError

if TYPE_CHECKING:
    from .ops import End

__all__ = ["Communication", "Work"]

Result = TypeVar("Result")


class Work:
    """An operator that was called with `async_op=True`.

    Before `wait`, nothing may use the results of the operator or write to its inputs. Inputs and results may be dropped
    at any time. The memory of the results is freed after the first `wait`. If the work is dropped without one, it is
    freed after the buffer's next operator that waits for the work or finds it complete.

    As a context manager, `wait` is called at the end of the `with` block, even if the block raises:

        received, work = buffer.dispatch(tokens, topk_idx, capacity=4096, async_op=True)
        with work:
            shared = shared_expert(tokens)  # beside the dispatch
        outputs = experts(received.tokens)

    On the CPU the operator is complete when the call returns, and all methods return at once.
    """

    __slots__ = ("__weakref__", "_captured", "_communication", "_end", "_event", "_held", "_results")

    def __init__(self, end: End) -> None:
        self._end = weakref.ref(end)
        self._communication = end.communication
        # None: the operator is complete.
        self._event: torch.cuda.Event | None = None
        self._captured = False
        # Storages instead of tensors: a tensor would keep its autograd graph.
        self._held: list[torch.UntypedStorage] = []
        # Without their autograd graphs. The first stream that waits is recorded for them, however late it waits.
        self._results: list[Tensor] = []

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event after the operator in the communication stream; None if the operator is complete, as on the CPU."""
        return self._event

    @opaque
    def wait(self) -> None:
        """Makes the current stream wait for the operator. On a GPU the host does not wait.

        The results may then be used in this stream, and the inputs overwritten. `wait` may be called again, also in
        another stream; that stream must then follow the rules of PyTorch and of `Buffer` for tensors in several
        streams.

        Raises:
            CallerError: The operator was called in a CUDA graph's capture and this call is not in the capture, or the
                other way round.
        """
        if self._event is None or self._communication is None:
            return
        device = self._communication.device
        self._check_capture(is_capturing(device))
        current = torch.cuda.current_stream(device)
        current.wait_event(self._event)
        for tensor in self._results:
            _record(tensor, current)
        self._results = []
        self._communication.waited(self)

    @opaque
    def is_completed(self) -> bool:
        """Whether the GPU has finished the operator. Does not wait.

        Raises:
            CallerError: The operator was called in a CUDA graph's capture, so that it runs when the graph is replayed.
        """
        self._check_capture(False)
        return self._event is None or self._event.query()

    @opaque
    def synchronize(self) -> None:
        """Makes the host wait until all operators that were called on this buffer so far are complete.

        Ctrl-C ends the wait. On the CPU there is nothing to wait for: the call of the operator has raised any error.

        Raises:
            CallerError: The routing was invalid; or the buffer is closed; or as for `is_completed`.
            PeerError: Another rank died, left, failed, stalled or was late in any of these operators.
        """
        self._check_capture(False)
        if self._event is None:
            return
        end = self._end()
        if end is None:
            self._event.synchronize()
        else:
            end.native.synchronize()

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    def _check_capture(self, capturing: bool) -> None:
        if self._captured and not capturing:
            raise CallerError(
                "work: its operator was captured in a CUDA graph and runs in replays only; call wait() in the capture, "
                "and after a replay wait for the stream of the replay"
            )
        if capturing and self._event is not None and not self._captured:
            raise CallerError(
                "work: its operator was called before the capture of the CUDA graph; call wait() before the capture"
            )

    def _release(self) -> None:
        """Drops the references that keep the inputs until a stream has waited for the operator."""
        self._held = []


class _ThreadCall(threading.local):
    call: _Call | None = None


class Communication:
    """The asynchronous operators of one buffer on a GPU, and the stream in which they run.

    Memory of PyTorch's allocator is protected by `record_stream`. The allocator does not own registered memory, so for
    that memory two rules hold. A `Work` keeps the operator's inputs, which may be registered memory of another buffer,
    until a stream waits for it. And an operator whose caller gave `after` waits for the current stream, too, if
    delivered memory has been freed since the last operator that did so: the operator may reuse the memory, which
    kernels in the current stream may still read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Whether no operator was asynchronous yet.
        self.idle = True
        # None before the first asynchronous operator.
        self._stream: torch.cuda.Stream | None = None
        # The asynchronous call of each thread.
        self._calls = _ThreadCall()
        # The works for which no stream waits yet, in call order.
        self._pending: deque[Work] = deque()

    @contextmanager
    def call(self, end: End, after: torch.cuda.Event | Work | None, given: Iterable[Tensor]) -> Iterator[Work]:
        """Makes the operators inside the block asynchronous.

        Args:
            end: The buffer.
            after: What the operators wait for instead of the current stream.
            given: The tensors of the caller. Others were made by this call in the current stream.

        Returns:
            The work of the operators.
        """
        addresses = set() if after is None else {tensor.data_ptr() for tensor in given}
        self.idle = False
        call = self._calls.call = _Call(Work(end), after, addresses)
        try:
            yield call.work
        finally:
            self._calls.call = None
            # Also after an error: the first of several operators may have been launched.
            if call.work._event is not None:
                self._pending.append(call.work)

    def run(self, operator: Callable[..., Result], end: End, *args: Any) -> Result:
        """Runs an operator in the current stream, or, inside `call`, in the communication stream."""
        call = self._calls.call
        if call is not None:
            return self._launch(call, operator, end, *args)
        self.join(end, operates=True)
        return operator(end, *args)

    def join(self, end: End, *, operates: bool) -> None:
        """Makes the current stream wait for all asynchronous operators so far.

        Args:
            end: The buffer.
            operates: Whether an operator in the current stream follows.
        """
        if self._stream is None or self._calls.call is not None:
            return
        capturing = is_capturing(self.device)
        self._tidy(capturing)
        if self._pending:
            event = self._pending[-1]._event
            assert event is not None
            torch.cuda.current_stream(self.device).wait_event(event)
            self._release_through(self._pending[-1])
        if operates and not capturing:
            end.native.forget_freed()

    def waited(self, work: Work) -> None:
        """Called when a stream waits for this work, and so for all works before it."""
        if work in self._pending:
            self._release_through(work)
        else:
            work._release()

    def _launch(self, call: _Call, operator: Callable[..., Result], end: End, *args: Any) -> Result:
        if self._stream is None:
            # High priority, so that the operator's blocks start before those of kernels that are queued already.
            self._stream = torch.cuda.Stream(self.device, priority=-1)
        stream, current = self._stream, torch.cuda.current_stream(self.device)
        capturing = is_capturing(self.device)
        self._tidy(capturing)
        inputs = self._tensors_of(args)
        self._fork(end, stream, current, call, inputs, capturing)
        work = call.work
        work._captured = capturing
        try:
            with torch.cuda.stream(stream):
                for tensor in inputs:
                    _record(tensor, stream)
                results = operator(end, *args)
                work._event = stream.record_event()
        except BaseException:
            if capturing:
                # A capture that ends with a stream that was not joined again would hide this error by its own.
                current.wait_stream(stream)
            raise
        outputs = self._tensors_of(results)
        for tensor in outputs:
            _record(tensor, current)
        work._held += [tensor.untyped_storage() for tensor in inputs]
        work._results += [tensor.detach() for tensor in outputs]
        return results

    def _fork(
        self,
        end: End,
        stream: torch.cuda.Stream,
        current: torch.cuda.Stream,
        call: _Call,
        inputs: list[Tensor],
        capturing: bool,
    ) -> None:
        """Makes the communication stream wait for what must precede the operator."""
        after = call.after
        if isinstance(after, Work):
            # First: in a capture, the communication stream joins the capture below.
            after._check_capture(capturing)
            # None: the work is complete, so the operator follows the current stream.
            after = after._event
        if (
            after is None
            or capturing
            or end.native.has_freed()
            or any(tensor.data_ptr() not in call.given for tensor in inputs)
        ):
            # Replays write to memory of the capture only, so a capture does not order later operators.
            if not capturing:
                end.native.forget_freed()
            stream.wait_stream(current)
        if after is not None:
            stream.wait_event(after)

    def _tensors_of(self, values: Any) -> list[Tensor]:
        return [value for value in values if isinstance(value, Tensor) and value.device == self.device]

    def _tidy(self, capturing: bool) -> None:
        """Drops works for which no operator needs to wait, and refuses a capture that could not wait for them."""
        if capturing:
            if any(not work._captured for work in self._pending):
                raise CallerError(
                    "asynchronous operators of this buffer were called before the capture of the CUDA graph, and no "
                    "stream waits for them: call wait() on their Work before the capture"
                )
            return
        # The stream of a replay, not an event, orders captured operators.
        while self._pending and (self._pending[0]._captured or self._pending[0].is_completed()):
            self._pending.popleft()._release()

    def _release_through(self, work: Work) -> None:
        while self._pending:
            first = self._pending.popleft()
            first._release()
            if first is work:
                return


class _Call:
    """An asynchronous call in progress."""

    __slots__ = ("after", "given", "work")

    def __init__(self, work: Work, after: torch.cuda.Event | Work | None, given: set[int]) -> None:
        self.work, self.after = work, after
        # The addresses of the caller's tensors; not used without `after`.
        self.given = given


def _record(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Keeps memory of PyTorch's allocator from being reused before the stream is done with it."""
    if _native.is_registered(tensor.untyped_storage().data_ptr()):
        return
    try:
        tensor.record_stream(stream)
    except RuntimeError:
        # The caller may pass memory of another library. PyTorch's default allocator ignores it. `cudaMallocAsync`
        # raises an internal assertion for all memory that it has not allocated, and for nothing else.
        if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
            raise


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of this device captures a CUDA graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
