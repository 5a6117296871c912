"""Exceptions of this package, one class for each side that can be at fault.

- `CallerError`, a ValueError: the call is wrong.
- `SetupError`, an OSError: the machine or its configuration is wrong.
- `PeerError`, a ConnectionError: another rank is at fault.

All are subclasses of `HybridEPError`.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["CallerError", "HybridEPError", "PeerError", "SetupError"]


class HybridEPError(Exception):
    """Base class of every exception that this package defines."""


class CallerError(HybridEPError, ValueError):
    """The call is wrong: an argument has a wrong type, shape, device or value, or does not fit the buffer's state.

    If the error is found before the rank sends anything, the buffer stays usable.
    """


class SetupError(HybridEPError, OSError):
    """The machine does not allow the call: it lacks a GPU, a driver, a kernel compiler, memory or a setting."""


class PeerError(HybridEPError, ConnectionError):
    """Another rank died, left, failed, stalled, was late, is unreachable or never joined. Every later call of the
    buffer or migration raises the error again.

    Attributes:
        peer (int): The rank at fault.
        rank (int): The rank that reports the error.
        operator (str): The operator that did not complete: "join", "preprocess", "dispatch" or "combine"; "reduce" is
            `reduce_gradients` or `clip_gradients`; "publish" and "gather" belong to an `ExpertMigration`.
        fault (str): What happened to the peer, for example "died", "left", "failed", "stalled", "is late" or
            "never joined".
        step (int): The number of the operator call on this buffer, or of the migration's step. An operator has the same
            number on all ranks. Ranks that waited in different operators report different numbers.
        machine (str | None): The machine of the rank at fault, in a job of several machines.
    """

    def __init__(
        self, message: str, *, peer: int, rank: int, operator: str, fault: str, step: int, machine: str | None = None
    ) -> None:
        super().__init__(message)
        self.peer, self.rank, self.operator, self.fault, self.step = peer, rank, operator, fault, step
        self.machine = machine

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes pickle their exceptions; the default pickling loses keyword arguments.
        return _peer_error, (str(self), self.peer, self.rank, self.operator, self.fault, self.step, self.machine)


def _peer_error(
    message: str, peer: int, rank: int, operator: str, fault: str, step: int, machine: str | None
) -> PeerError:
    return PeerError(message, peer=peer, rank=rank, operator=operator, fault=fault, step=step, machine=machine)


# `EnvironmentError` hid the builtin of that name wherever it was imported.
_RENAMED = {"EnvironmentError": SetupError, "Error": HybridEPError}


def renamed(name: str, *, stacklevel: int = 3) -> type[HybridEPError] | None:
    """Looks up a class by its name before version 0.1.0, with a DeprecationWarning.

    Args:
        name: The old name.
        stacklevel: As for `warnings.warn`, counted from this function.

    Returns:
        The class, or None if no class had that name.
    """
    new = _RENAMED.get(name)
    if new is not None:
        text = f"hybrid_ep.{name} is deprecated: use hybrid_ep.{new.__name__}"
        warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    return new


def __getattr__(name: str) -> Any:
    if (new := renamed(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return new
