"""Lossy codecs and stale replicas of training across datacenters."""

from __future__ import annotations

from typing import Any

import pytest

from migration_world import EXPERTS, TWO, adam, hybrid, runtime, train_hybrid
from process_worlds import Rank, world_of_processes


def _lossy(
    here: Rank, options: dict[str, Any], engine: str = "rust"
) -> tuple[list[float], dict[str, float], list[int]]:
    with runtime(engine)(TWO, num_experts=EXPERTS, **options) as migration:
        model = hybrid(migration)
        losses = train_hybrid(migration, model, range(20), adam(model))
        layer: Any = model[1]
        return losses, migration.stats(), layer.experts.replica_steps


@pytest.mark.parametrize(
    ("options", "tolerance", "compression"),
    [
        ({"weights": "int8", "gradients": "int8"}, 0.05, 3.5),
        ({"weights": "delta:0.05,warm_up=1", "gradients": "topk:0.05"}, 0.05, 8),
        ({"weights": "shared:0.05", "gradients": "int8", "shared_refresh": 10}, 0.3, 1.0),
        ({"weights": "exact", "gradients": "exact", "staleness": 2}, 0.05, None),
    ],
    ids=["int8", "delta", "shared", "stale"],
)
def test_codecs_save_bytes_and_still_learn(
    options: dict[str, Any], tolerance: float, compression: float | None
) -> None:
    world = world_of_processes(4, "cpu")
    exact = world.run(_lossy, {"weights": "exact", "gradients": "exact"})
    for (losses, stats, steps), (lossless, plain_stats, _) in zip(world.run(_lossy, options), exact, strict=True):
        assert losses == pytest.approx(lossless, rel=tolerance)
        assert 19 - options.get("staleness", 0) <= steps[0] <= 19, "the last forward pass used weights of its step"
        if compression is not None:
            assert losses != lossless
            assert stats["gradients_sent"] < plain_stats["gradients_sent"] / 3.5
            assert stats["weights_sent"] < plain_stats["weights_sent"] / compression


def test_copies_of_tensors_change_no_bit() -> None:
    world = world_of_processes(4, "cpu")
    for options in (
        {"weights": "delta:0.05", "gradients": "topk:0.05"},
        {"weights": "shared:0.05", "gradients": "int8", "shared_refresh": 4},
        {"weights": "int8", "gradients": "int8", "depth": 1},
    ):
        copied, plain = (world.run(_lossy, options, engine) for engine in ("copied", "rust"))
        assert [losses for losses, _, _ in copied] == [losses for losses, _, _ in plain]
