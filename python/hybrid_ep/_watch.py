"""`Watch`: all-reduces of PyTorch that end when a rank is lost, with an error that names it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .buffer import Buffer
from .errors import PeerError
from .experts import LocalExperts

__all__ = ["Watch"]

# The time between two checks of the other ranks.
_LOOK = timedelta(seconds=0.05)
# Seconds in which a collective may end after a rank has left, or news of a lost rank may come after one has failed.
_NEWS = 1.0


class Watch:
    """All-reduces of gradients that end when a rank of a buffer is lost.

    PyTorch's gloo does not notice that a process has stopped, and names no rank when one has died. Collectives of GPUs
    are not waited for here, since the host must not wait for a GPU.
    """

    def __init__(self, module: nn.Module, buffers: list[Buffer]) -> None:
        # The buffer of a HybridMoELayer has only some of the ranks; its migration has all.
        used: dict[int, Any] = {id(buffer): buffer for buffer in buffers if isinstance(buffer, Buffer)}
        for part in module.modules():
            if isinstance(part, LocalExperts) and hasattr(part, "migration"):
                used[id(part.migration)] = part.migration
        self._checks: list[Callable[[str, float, bool], None]] = [one._check_peers for one in used.values()]

    def all_reduce(self, tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
        """Reduces a tensor in place.

        Raises:
            PeerError: A rank died, left, failed, stalled or is late.
        """
        if tensor.device.type != "cpu":
            dist.all_reduce(tensor, op, group)
            return
        started = time.monotonic()
        try:
            work = dist.all_reduce(tensor, op, group, async_op=True)
            while not self._is_over(work, started):
                pass
        except RuntimeError:
            self._find_fault(started)
            raise

    def _is_over(self, work: dist.Work, started: float) -> bool:
        if _waited(work, _LOOK):
            return True
        try:
            self._check(started)
        except PeerError as error:
            # A rank may leave when it has sent all that this one needs, or because it has heard of a lost rank earlier.
            if error.fault == "left" and _waited(work, timedelta(seconds=_NEWS)):
                return True
            self._check(started, has_failed=True)
        return False

    def _check(self, started: float, *, has_failed: bool = False) -> None:
        for check in self._checks:
            check("all ranks to reduce gradients", time.monotonic() - started, has_failed)

    def _find_fault(self, started: float) -> None:
        """Raises a `PeerError` if the reason for the failure of a collective comes to be known soon."""
        end = time.monotonic() + _NEWS
        while time.monotonic() < end:
            self._check(started, has_failed=True)
            time.sleep(0.01)


def _waited(work: dist.Work, time: timedelta) -> bool:
    """Waits for this time at most. Returns whether the collective is complete."""
    try:
        work.wait(time)
    except RuntimeError:
        # The time is over, or the collective has failed, or it has ended meanwhile.
        if not work.is_completed():
            return False
        work.wait()
    return True
