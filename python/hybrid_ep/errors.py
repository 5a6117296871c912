"""What can go wrong, by whose fault it is."""

from __future__ import annotations

from typing import Any

__all__ = ["CallerError", "EnvironmentError", "Error", "PeerError"]


class Error(Exception):
    """Any error of this package."""


class CallerError(Error, ValueError):
    """The call is wrong: fix it. One that is found before anything was sent leaves the buffer usable."""


class EnvironmentError(Error, OSError):
    """The machine, or how it is set up, does not allow what was asked: fix that."""


class PeerError(Error, ConnectionError):
    """Another rank died, left, failed, stalled or never joined. The buffer repeats this error from then on.

    Attributes:
        peer: the rank at fault.
        rank: the rank that reports it.
        operator: the operator that could not be completed: "join", "preprocess", "dispatch" or "combine".
        fault: "died", "left", "failed", "stalled" or "never joined".
        step: the operator's number since the buffer was made; the same on every rank.
    """

    def __init__(self, message: str, *, peer: int, rank: int, operator: str, fault: str, step: int) -> None:
        super().__init__(message)
        self.peer, self.rank, self.operator, self.fault, self.step = peer, rank, operator, fault, step

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers send their exceptions to other processes; keywords would be lost.
        return _peer_error, (str(self), self.peer, self.rank, self.operator, self.fault, self.step)


def _peer_error(message: str, peer: int, rank: int, operator: str, fault: str, step: int) -> PeerError:
    return PeerError(message, peer=peer, rank=rank, operator=operator, fault=fault, step=step)
