"""The guard against a rising loss, without ranks."""

from __future__ import annotations

import math
import random

import pytest

from hybrid_ep.errors import CallerError
from hybrid_ep.migration import LossGuard


class Migration:
    def __init__(self) -> None:
        self.complete: list[int] = []
        self.step = 0

    def start_over(self) -> None:
        self.complete.append(self.step)


def watch(losses: list[float], **options: float) -> Migration:
    migration = Migration()
    guard = LossGuard(migration, **options)  # type: ignore[arg-type]
    for migration.step, loss in enumerate(losses):
        is_complete = guard.observe(loss)
        assert is_complete == (migration.step in migration.complete)
    return migration


def falling(steps: int, noise: float = 0.1, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [2 + 3 * math.exp(-step / 100) + draw.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_loss_with_noise_changes_nothing(seed: int) -> None:
    assert watch(falling(1000, seed=seed)).complete == []


def test_a_single_spike_changes_nothing() -> None:
    losses = falling(400)
    losses[300] += 1
    assert watch(losses).complete == []


def test_a_lasting_rise_asks_for_complete_weights_once() -> None:
    losses = falling(400)
    losses[300:] = [loss + 1 for loss in losses[300:]]
    found = watch(losses).complete
    assert len(found) == 1
    assert 300 < found[0] < 360


def test_the_second_rise_makes_all_messages_complete() -> None:
    losses = falling(800)
    for rise in (300, 500):
        losses[rise:] = [loss + 1 for loss in losses[rise:]]
    found = watch(losses).complete
    assert found[0] < 360
    assert found[1:] == [*range(found[1], 800)]
    assert 500 < found[1] < 560


def test_a_loss_that_is_not_finite_is_a_rise() -> None:
    assert watch([3.0, math.nan, 3.0]).complete == [1]
    assert watch([3.0, math.inf, 3.0, math.nan, 3.0]).complete == [1, 3, 4]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(CallerError, match="window is 0, must be positive"):
        LossGuard(Migration(), window=0)
    with pytest.raises(CallerError, match="tolerance is nan"):
        LossGuard(Migration(), tolerance=math.nan)


def test_a_guard_continues_from_a_checkpoint() -> None:
    losses = falling(400)
    losses[300:] = [loss + 1 for loss in losses[300:]]
    guard = LossGuard(Migration())
    for loss in losses[:310]:
        guard.observe(loss)
    resumed = LossGuard(Migration())
    resumed.load_state_dict(guard.state_dict())
    after = [guard.observe(loss) for loss in losses[310:]]
    assert [resumed.observe(loss) for loss in losses[310:]] == after
    assert any(after)
    with pytest.raises(CallerError, match="found nothing"):
        resumed.load_state_dict({})
