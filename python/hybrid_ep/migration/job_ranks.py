"""`JobRanks`: a buffer of some ranks of a job, whose errors have the numbers that the ranks have in the job."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import HybridEPError, PeerError

__all__ = ["JobRanks", "of_job"]

_RANK = re.compile(r"\brank (\d+)\b")


class JobRanks:
    """A native buffer whose errors have the numbers of ranks in the job. Delegates everything else to the buffer.

    Args:
        native: The native buffer.
        ranks: For each rank of the buffer, its number in the job.
        explained: Makes the context manager inside which a `PeerError` is raised. The context manager tells the ranks
            of other buffers, and may raise a different `PeerError` instead, about a rank that the buffer does not have.
    """

    def __init__(
        self, native: Any, ranks: Sequence[int], explained: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._native, self._ranks, self._explained = native, ranks, explained

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if not callable(found):
            return found
        # What `check_peers` finds during a wait is final only if the wait does not end soon.
        explained = nullcontext if name == "check_peers" else self._explained

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return found(*arguments, **named)
            except HybridEPError as error:
                with explained():
                    raise of_job(error, self._ranks) from error.__cause__

        return call


def of_job(error: HybridEPError, ranks: Sequence[int], text: str | None = None) -> HybridEPError:
    """Returns the error with the numbers that ranks have in the job.

    Args:
        error: An error that numbers ranks as a buffer or a meeting does.
        ranks: For each of these ranks, its number in the job.
        text: What the error says. Default: its own text.
    """

    def number(place: int) -> int:
        return ranks[place] if place < len(ranks) else place

    text = _RANK.sub(lambda match: f"rank {number(int(match[1]))}", text or str(error))
    if not isinstance(error, PeerError):
        return type(error)(text)
    return PeerError(
        text,
        peer=number(error.peer),
        rank=number(error.rank),
        operator=error.operator,
        fault=error.fault,
        step=error.step,
        machine=error.machine,
    )
