"""How the ranks of a `torch.distributed` group meet: through the group's store, once, with a few hundred bytes."""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from itertools import count

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import CallerError, PeerError

__all__ = ["Meeting"]

# How many buffers this process has made over each group. All its ranks make them in the same order.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]] = weakref.WeakKeyDictionary()


class Meeting:
    """The ranks of `group` on their way to one buffer.

    Raises:
        CallerError: this process is not of the group.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise CallerError(f"group: expected a process group that this process is of, found {group!r}")
        self.rank, self.ranks = group.rank(), group.size()
        self._timeout = timeout
        made = next(_made.setdefault(group, count()))
        # The group's own store: other groups have other prefixes.
        store = distributed_c10d._get_process_group_store(group)
        self._store = distributed_c10d.PrefixStore(f"hybrid_ep/{made}", store)
        self._rounds = 0

    def all_gather(self, blob: bytes) -> list[bytes]:
        """Everybody's bytes for this rank's.

        Raises:
            PeerError: names the first rank that did not come in time.
        """
        turn, self._rounds = self._rounds, self._rounds + 1
        self._store.set(f"{turn}/{self.rank}", blob)  # type: ignore[arg-type]  # bytes are taken too
        deadline = time.monotonic() + self._timeout
        return [self._take(f"{turn}/{peer}", peer, deadline) for peer in range(self.ranks)]

    def _take(self, key: str, peer: int, deadline: float) -> bytes:
        # Whoever came last gets the others' answers even when its time is up.
        left = max(deadline - time.monotonic(), 0.01)
        try:
            self._store.wait([key], timedelta(seconds=left))
            return self._store.get(key)
        except dist.DistStoreError as error:
            raise PeerError(
                f"rank {peer} never joined (join #0): "
                f"rank {self.rank} waited {self._timeout:.3f} s for it in the group's store",
                peer=peer,
                rank=self.rank,
                operator="join",
                fault="never joined",
                step=0,
            ) from error

    def end(self) -> None:
        """Whoever leaves last clears up: a group that is made anew may find the same keys in the same store."""
        if self._store.add("left", 1) == self.ranks:
            for turn in range(self._rounds):
                for rank in range(self.ranks):
                    self._store.delete_key(f"{turn}/{rank}")
            self._store.delete_key("left")
