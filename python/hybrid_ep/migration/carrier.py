"""Moves messages between the ranks of an expert domain, or between all ranks: `connect` makes the carrier.

`_native.RailCarrier` is over an engine of rails. `GlooCarrier` is over a gloo group of its own. The engine of the
migration calls `send`, `receive` and `abort` from its threads, and `wait` of the transfers that they return. Messages
of a lane between two ranks arrive in order.

How gloo behaves, and what follows (PyTorch 2.11):

- A receive counts as complete only after a wait for it, so transfers cannot be polled.
- A wait that ends by its timeout closes the connections to all ranks of the group, which ends all other waits. So waits
  have no timeout, and `abort` is a wait with a short one.
- A message that is longer than its receive ends the process; a shorter one leaves the rest of the memory unchanged. The
  engine learns the length from a header of fixed size, and never posts a receive that a correct peer's message would
  not fit.
- A message leaves only when the sender knows of its receive. The engine therefore posts receives ahead.
- `torch.distributed.new_group` names a group by counters of the process, which differ between the ranks of a program in
  which some ranks are in more groups than others; groups that do not agree on their name never connect. So this module
  makes the backend itself, in a part of the store that belongs to this meeting. `torch.distributed` does not know of
  it, and a program that destroys its groups before it closes the carrier still ends.
- The memory of a send must live until the receiver has taken it. One thread waits for sends, and frees their memory.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from .. import _native
from ..errors import HybridEPError, SetupError
from ..rendezvous import Meeting
from .job_ranks import of_job

if TYPE_CHECKING:
    from .._native import Receiving, Sending

__all__ = ["Carrier", "GlooCarrier", "GlooGroup", "connect"]

Carrier: TypeAlias = "GlooCarrier | _native.RailCarrier"

# The tag of the receive that `abort` posts; lanes are the tags below it.
_ABORT = 1000
# Gloo has no wait without a timeout. Sends wait as long as the group lives.
_ENDLESS = timedelta(days=365)


# What gloo's errors say when the connection to a peer is closed, or its machine cannot be reached.
_CLOSED = ("onnection", "closed", "Broken pipe", "o route to host", "unreachable")


class GlooGroup(Protocol):
    """What `ProcessGroupGloo` has of a process group; PyTorch's types say less."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...


def connect(meeting: Meeting, carrier: str, names: Sequence[int]) -> Carrier:
    """Connects the ranks of a meeting to each other.

    Args:
        meeting: The meeting.
        carrier: "gloo" or an engine of rails, as for `ExpertMigration`.
        names: The ranks in the numbering of the caller, in the order of the meeting.

    Raises:
        CallerError: There is no such engine, or it does not connect the machines.
        PeerError: A rank did not join in time, or was lost.
        SetupError: The ranks met, but could not connect, or the engine cannot be loaded.
    """
    if carrier == "gloo":
        try:
            return GlooCarrier(_connect_gloo(meeting), tuple(names))
        except HybridEPError as error:
            raise of_job(error, names) from error.__cause__
    try:
        joined = _native.RailCarrier.join(meeting.rank, [*names], carrier, meeting.timeout, meeting)
    except HybridEPError as error:
        # Errors of engines name the variable that selects one for a buffer. Here the engine is an argument.
        text = re.sub(r"\bHYBRID_EP_TRANSPORT\b", "carrier", str(error))
        raise of_job(error, names, text) from error.__cause__
    meeting.end()
    return joined


def _connect_gloo(meeting: Meeting) -> GlooGroup:
    """Connects the ranks of a meeting by gloo.

    Raises:
        PeerError: A rank did not join in time.
        SetupError: The ranks met, but could not connect.
    """
    # Gloo does not say which rank is missing. The meeting does.
    meeting.all_gather(b"")
    try:
        store = PrefixStore("gloo", meeting.store)
        group = ProcessGroupGloo(store, meeting.rank, meeting.ranks, timeout=timedelta(seconds=meeting.timeout))
    except RuntimeError as error:
        raise SetupError(
            f"gloo could not connect rank {meeting.rank} of {meeting.ranks} to the others: {error}; if a machine has "
            "several networks, set GLOO_SOCKET_IFNAME to the interface that reaches the other machines"
        ) from None
    meeting.end()
    return cast(GlooGroup, group)


class GlooCarrier:
    """This rank's end of the messages of its expert domain.

    Args:
        group: The connected ranks of the domain, used by this carrier alone.
        domain: The ranks of the domain in the numbering of the caller, in the order of the group.
    """

    def __init__(self, group: GlooGroup, domain: tuple[int, ...]) -> None:
        self._group = group
        self._place = {rank: at for at, rank in enumerate(domain)}
        self._peers = [rank for rank in domain if rank != domain[group.rank()]]
        self._ended = False
        self._sends: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        # The thread must not hold the carrier: otherwise a carrier that is dropped without `close` would live forever.
        self._waiter = threading.Thread(
            target=_wait_for_sends, args=(self._sends,), name="hybrid_ep carrier", daemon=True
        )
        weakref.finalize(self, self._sends.put, None)
        self._waiter.start()

    def send(self, peer: int, lane: int, data: bytes) -> Sending:
        """Posts a message.

        Args:
            peer: The receiving rank.
            lane: 0 to 4.
            data: The message; it is copied.

        Returns:
            A transfer, whose `wait` returns when the message is sent. Calling `wait` is optional.

        Raises:
            ConnectionError: The connection to the peer is closed.
        """
        memory = _tensor(bytearray(data))
        with self.translated():
            work = self._group.send([memory], self._place[peer], lane)
        send = _Send(self, memory, work)
        self._sends.put(send)
        return send

    def receive(self, peer: int, lane: int, capacity: int) -> Receiving:
        """Posts the receive of a message.

        Args:
            peer: The sending rank.
            lane: 0 to 4.
            capacity: The maximum number of bytes of the message.

        Returns:
            A transfer, whose `wait` takes the length, which gloo does not report, and returns the message.

        Raises:
            ConnectionError: The connection to the peer is closed.
        """
        memory = bytearray(capacity)
        with self.translated():
            work = self._group.recv([_tensor(memory)], self._place[peer], lane)
        return _Receive(self, memory, work)

    def abort(self) -> None:
        """Closes all connections of the domain, which ends all waits, here and at the peers."""
        self._ended = True
        for peer in self._peers:
            # A receive from a peer whose connection is closed already fails, and closes no other.
            with contextlib.suppress(RuntimeError):
                work = self._group.recv([torch.empty(1, dtype=torch.uint8)], self._place[peer], _ABORT)
                work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends the carrier and its thread. Messages that no peer has received by now are lost."""
        self.abort()
        self._sends.put(None)
        if threading.current_thread() is not self._waiter:
            # Gloo does not end the wait for a message that is partly sent. The thread then ends with the process.
            self._waiter.join(timeout=1.0)

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turns gloo's errors, which differ in their text only, into the exceptions of Python."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if self._ended:
                raise ConnectionAbortedError(f"this rank closed its connections: {text}") from None
            if any(part in text for part in _CLOSED):
                raise ConnectionError(text) from None
            raise


def _wait_for_sends(sends: queue.SimpleQueue[_Send | None]) -> None:
    while (send := sends.get()) is not None:
        send.finish()
        del send  # it holds the carrier


def _tensor(memory: bytearray) -> Tensor:
    """Returns the memory as a tensor, which keeps the memory alive."""
    return torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)


class _Send:
    """A message that waits for its receiver. The thread of the carrier finishes it."""

    def __init__(self, carrier: GlooCarrier, memory: Tensor, work: dist.Work) -> None:
        self._carrier = carrier
        self._held: tuple[Tensor, dist.Work] | None = (memory, work)
        self._error: Exception | None = None
        self._ended = threading.Event()

    def finish(self) -> None:
        assert self._held is not None, "only the thread of the carrier calls this, once"
        try:
            with self._carrier.translated():
                self._held[1].wait(_ENDLESS)
        except Exception as error:
            self._error = error
        self._held = None
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


class _Receive:
    def __init__(self, carrier: GlooCarrier, memory: bytearray, work: dist.Work) -> None:
        self._carrier, self._memory, self._work = carrier, memory, work

    def wait(self, length: int) -> bytes:
        with self._carrier.translated():
            self._work.wait(_ENDLESS)
        return bytes(memoryview(self._memory)[:length])
