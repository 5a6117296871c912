"""The rendezvous of the ranks of a `torch.distributed` group: through the group's store, a few hundred bytes.

The exchanged bytes contain random keys with which ranks then authenticate each other. Every process that can reach the
store can read the keys, so the job is as open as its store. With HYBRID_EP_SECRET, ranks must also know that secret.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import CallerError, PeerError, SetupError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Meeting"]


# Seconds to wait before the timeout is known.
_UNTIL_KNOWN = 600.0
# Seconds between two reads of the store; the pauses grow from the shortest to the longest.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
# The key under which the first rank that gives up writes the reason.
_LOST = "lost"


def _underlying(store: Any) -> Any:
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    return store


def _host(store: Any) -> str | None:
    # Only a store in a network has a host.
    host = getattr(_underlying(store), "host", None)
    return host if isinstance(host, str) else None


def _place(store: Any) -> str:
    """Where the store is, for errors."""
    below = _underlying(store)
    if (host := _host(store)) is not None:
        return f"at {host}:{below.port}"
    path = getattr(below, "path", None)
    return f"in the file {path}" if isinstance(path, str) else f"of type {type(below).__name__}"


@contextlib.contextmanager
def _reached(store: Any) -> Iterator[None]:
    """Names the store if it cannot be reached."""
    try:
        yield
    except RuntimeError as error:  # older versions of PyTorch raise no DistError
        raise SetupError(
            f"the store of the process group, {_place(store)}, cannot be reached: {error}. The process that serves it, "
            "rank 0 or torchrun, has ended, or the network failed: see its output, and start the job again"
        ) from error


class Meeting:
    """The rendezvous of some ranks. `_native` calls `all_gather` and `abandon`, and reads `host`: the host of the
    store, or None for a store that is not in a network.

    Args:
        store: Where the ranks leave their bytes. No other meeting has used its keys.
        rank: This rank.
        ranks: The number of ranks.
        timeout: Seconds to wait for each round. It may be set later.
        making: What the ranks meet for, for errors.
    """

    def __init__(self, store: distributed_c10d.Store, rank: int, ranks: int, timeout: float, making: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.store, self.timeout, self.making = store, timeout, making
        self.host = _host(store)
        # Called while this rank waits. It raises an error if there is a reason to stop waiting.
        self.check: Callable[[], None] = lambda: None
        self._rounds = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup, making: str = "buffer") -> Self:
        """Returns the next meeting of a process group's ranks.

        Call it before anything that may fail on one rank alone, and do the rest inside `reported`: all ranks must count
        the same meetings.

        Args:
            group: The process group.
            making: What the ranks meet for, for errors.

        Raises:
            CallerError: This process is not a member of the group.
            SetupError: The group's store cannot be reached.
        """
        if not isinstance(group, dist.ProcessGroup):
            hint = "; the number of experts is num_experts=" if isinstance(group, int) else ""
            raise CallerError(f"group: expected a process group that contains this process, found {group!r}{hint}")
        # Each group has its own prefix in the store, but older versions of PyTorch give one prefix to all groups of a
        # `split_group`. These have no rank in common.
        store = distributed_c10d._get_process_group_store(group)
        first = min(dist.get_process_group_ranks(group))
        # The number of this rank's meetings over the group separates the keys of one from those of the next. It is the
        # same on all ranks, because making a buffer or a migration is collective. The store counts: it may outlive the
        # group, and a later group of the same name would find what a meeting of the earlier one has left.
        with _reached(store):
            number = store.add(f"hybrid_ep/{first}/meetings of {group.rank()}", 1)
        store = distributed_c10d.PrefixStore(f"hybrid_ep/{first}/{number}", store)
        return cls(store, group.rank(), group.size(), _UNTIL_KNOWN, making)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Tells the other ranks if this rank fails inside the `with` block; they would wait until their timeout."""
        try:
            yield
        except PeerError:
            raise  # known to the others, or reported by each of them
        except BaseException as error:
            self.abandon(self.rank, "failed", f"{type(error).__name__}: {error}")
            raise

    def among(self, name: str, ranks: Sequence[int]) -> Self:
        """Returns a meeting of some of the ranks, which includes this one.

        Args:
            name: Separates the meetings of this meeting. Those of one name have no rank in common.
            ranks: The ranks, in the order in which the new meeting numbers them.
        """
        store = distributed_c10d.PrefixStore(f"{name}/{min(ranks)}", self.store)
        return type(self)(store, ranks.index(self.rank), len(ranks), self.timeout, self.making)

    def all_gather(self, blob: bytes) -> list[bytes]:
        """Exchanges bytes with all ranks.

        Args:
            blob: This rank's bytes.

        Returns:
            The bytes of all ranks, in rank order.

        Raises:
            PeerError: A rank did not write its bytes in time, or another rank has given up on it.
            SetupError: The group's store cannot be reached.
        """
        turn, self._rounds = self._rounds, self._rounds + 1
        with _reached(self.store):
            self.store.set(f"{turn}/{self.rank}", blob)  # type: ignore[arg-type]  # bytes are taken too
            deadline = time.monotonic() + self.timeout
            return [self._take(f"{turn}/{peer}", peer, deadline) for peer in range(self.ranks)]

    def _take(self, key: str, peer: int, deadline: float) -> bytes:
        # The store's own wait would lose a signal: translating its exceptions drops the one that a handler raised.
        pause = _SHORTEST_PAUSE
        while not self.store.check([key]):
            # A rank may give up after it wrote its bytes. The bytes take precedence over its report: comparing those of
            # all ranks names the difference.
            if self.store.check([_LOST]) and not self.store.check([key]):
                self._report(self.store.get(_LOST))
            # The deadline is checked after the read: a late rank still gets the bytes that are already there.
            if time.monotonic() >= deadline:
                told = (
                    f"rank {self.rank} waited {self.timeout:.3f} s for it in the group's store {_place(self.store)}; "
                    f"every rank of the group must make the {self.making}"
                )
                raise self._error(peer, "never joined", told)
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.store.get(key)

    def abandon(self, peer: int, fault: str, text: str) -> None:
        """Tells the other ranks that this rank gives up, and which rank is at fault.

        Args:
            peer: The rank at fault.
            fault: What happened to it, as in `PeerError.fault`.
            text: The error's text.

        Raises:
            PeerError: Another rank gave up earlier; the error names the rank that was at fault then.
        """
        own = json.dumps({"by": self.rank, "peer": peer, "fault": fault, "text": text})
        try:
            first = self.store.compare_set(_LOST, "", own)
        except (dist.DistStoreError, RuntimeError):
            # The store is gone, or lacks compare_set. Then each rank reports the failure after its own timeout.
            return
        if peer != self.rank:
            self._report(first)

    def _report(self, lost: bytes) -> None:
        """Raises the error for which another rank gave up."""
        known = json.loads(lost)
        by, peer, fault = known["by"], known["peer"], known["fault"]
        if by == self.rank:
            return
        if peer == self.rank:
            peer, fault = by, "failed"
        raise self._error(peer, fault, f"rank {self.rank} was told by rank {by}: {known['text']}")

    def _error(self, peer: int, fault: str, text: str) -> PeerError:
        text = f"rank {peer} {fault} (join): {text}"
        return PeerError(text, peer=peer, rank=self.rank, operator="join", fault=fault, step=0)

    def end(self) -> None:
        """Ends the rendezvous. The last rank deletes the keys, because a later group may use the same prefix."""
        # The ranks have met. If the store is gone, so are the keys.
        with contextlib.suppress(RuntimeError):
            if self.store.add("left", 1) == self.ranks:
                for turn in range(self._rounds):
                    for rank in range(self.ranks):
                        self.store.delete_key(f"{turn}/{rank}")
                self.store.delete_key("left")
