"""`LossGuard`: complete weights for the replicas when the loss rises."""

from __future__ import annotations

import math
from typing import Protocol

from ..errors import CallerError

__all__ = ["LossGuard"]


_STATE = ("_seen", "_mean", "_last", "_variance", "_lowest", "_above", "rises")


class _Migration(Protocol):
    def start_over(self) -> None: ...


class LossGuard:
    """Watches the training loss, and makes the messages of the codec `delta` complete when the loss rises.

    With `delta`, replicas lag behind their owners where weights change fast. The guard smooths the loss, and compares
    it with the lowest smoothed loss so far. If the smoothed loss is higher by more than `tolerance` standard deviations
    of the loss for `patience` steps in a row, the next messages are complete. If the loss rises `strikes` times, all
    later messages are complete, as those of the codec `int8` are.

    Ranks may decide differently. To make all ranks decide alike, pass the same loss on all of them, such as the mean.

    Attributes:
        rises: How often the loss has risen.

    Args:
        migration: The migration whose messages become complete.
        window: The number of steps over which the loss is smoothed.
        tolerance: The number of standard deviations by which the smoothed loss may exceed the lowest smoothed loss.
        patience: The number of consecutive steps after which the loss counts as risen.
        strikes: The number of rises after which all messages are complete.

    Raises:
        CallerError: A number is not positive.

    Example:
        >>> guard = LossGuard(migration)
        >>> for batch in batches:
        ...     loss = step(batch)
        ...     guard.observe(loss.item())
        ...     migration.publish()
    """

    def __init__(
        self,
        migration: _Migration,
        *,
        window: int = 50,
        tolerance: float = 2.0,
        patience: int = 10,
        strikes: int = 2,
    ) -> None:
        for name, value in (("window", window), ("tolerance", tolerance), ("patience", patience), ("strikes", strikes)):
            if not value > 0:
                raise CallerError(f"{name} is {value}, must be positive")
        self._migration = migration
        self._rate, self._window = 1 / window, window
        self._tolerance, self._patience, self._strikes = tolerance, patience, strikes
        self._seen = 0
        self._mean = self._last = self._variance = 0.0
        self._lowest = math.inf
        self._above = 0
        self.rises = 0

    def observe(self, loss: float) -> bool:
        """Takes the loss of a step. Call it before `publish`.

        Args:
            loss: The loss. A loss that is not finite counts as a rise.

        Returns:
            Whether the next messages are complete.
        """
        if self._has_risen(loss):
            self.rises += 1
            # Restarts the smoothing: the loss stays high for some time after complete messages. This is not another
            # rise.
            self._seen, self._above, self._lowest = 0, 0, math.inf
        elif self.rises < self._strikes:
            return False
        self._migration.start_over()
        return True

    def state_dict(self) -> dict[str, float]:
        """Returns the state, for a checkpoint: a run resumed with it decides as an uninterrupted run does."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from `state_dict`.

        Args:
            state: The state of a guard with the same arguments.

        Raises:
            CallerError: `state` is not such a state.
        """
        if state.keys() != {*_STATE}:
            raise CallerError(f"state: expected {', '.join(_STATE)}, found {', '.join(state) or 'nothing'}")
        for name, value in state.items():
            setattr(self, name, value)

    def _has_risen(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        self._seen += 1
        if self._seen == 1:
            self._mean, self._last = loss, loss
            return False
        # At first the mean of all losses, later an exponential moving average.
        rate = max(self._rate, 1 / self._seen)
        self._mean += rate * (loss - self._mean)
        # Half the squared difference of successive losses estimates the variance of the noise, even if the loss falls
        # or rises.
        self._variance += rate * ((loss - self._last) ** 2 / 2 - self._variance)
        self._last = loss
        if self._seen < self._window:
            return False
        self._lowest = min(self._lowest, self._mean)
        is_above = self._mean > self._lowest + self._tolerance * math.sqrt(self._variance)
        self._above = self._above + 1 if is_above else 0
        return self._above >= self._patience
