"""Lossy codecs and stale replicas of training across datacenters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hybrid_ep.experts import local_part
from hybrid_ep.migration import ExpertDomains, ExpertMigration
from migration_world import EXPERTS, TWO, adam, hybrid, loss_of, refused, runtime, tokens_of, train_hybrid
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


def _on_a_gpu(here: Rank, options: dict[str, Any]) -> None:
    plan = ExpertDomains.uniform(ranks=2, datacenters=2)
    found = []
    for codec_device in ("cpu", "cuda"):
        made = {"num_experts": EXPERTS, "device": here.device, "codec_device": codec_device, **options}
        with ExpertMigration(plan, **made) as migration:
            model = hybrid(migration, working_dtype=torch.bfloat16).to(here.device)
            optimizer = adam(model)
            losses = train_hybrid(migration, model, range(5), optimizer)
            assert model[1].experts.host_replicas.device.type == codec_device, "what the engine decodes into"
            replicas = model[1].experts.replicas().clone()
            found.append((losses, replicas, [*model.parameters()], migration.stats()["weights_sent"]))
    (losses, replicas, parameters, sent), other = found
    assert (losses, sent) == (other[0], other[3])
    assert torch.equal(replicas, other[1])
    for one, another in zip(parameters, other[2], strict=True):
        assert torch.equal(local_part(one), local_part(another))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_codecs_on_a_gpu_change_no_bit() -> None:
    world = world_of_processes(2, "cuda")
    for options in (
        {"weights": "exact", "gradients": "exact"},
        {"weights": "int8", "gradients": "int8"},
        {"weights": "delta:0.05,warm_up=2", "gradients": "topk:0.05"},
        {"weights": "shared:0.05", "gradients": "int8", "shared_refresh": 2},
    ):
        world.run(_on_a_gpu, options, seconds=60)


def _loads_the_state_of_codecs_elsewhere(here: Rank) -> None:
    plan = ExpertDomains.uniform(ranks=2, datacenters=2)
    made: dict[str, Any] = {"num_experts": EXPERTS, "weights": "delta:0.05", "gradients": "int8", "device": here.device}
    with ExpertMigration(plan, codec_device="cpu", **made) as migration:
        model = hybrid(migration).to(here.device)
        optimizer = adam(model)
        train_hybrid(migration, model, range(3), optimizer)
        # A checkpoint comes between the step of the optimizer and publish.
        optimizer.zero_grad()
        loss_of(model, tokens_of(here.rank, 3).to(here.device)).backward()
        migration.reduce_gradients(model, op="sum")
        optimizer.step()
        saved = copy.deepcopy((migration.state_dict(), model.state_dict(), optimizer.state_dict()))
        migration.publish()
        expected = train_hybrid(migration, model, range(4, 7), optimizer)
    for codec_device in ("cpu", torch.device(here.device).type):
        with ExpertMigration(plan, codec_device=codec_device, **made) as migration:
            model = hybrid(migration).to(here.device)
            optimizer = adam(model)
            # The optimizer goes on with the tensors that it loads.
            of_migration, of_model, of_optimizer = copy.deepcopy(saved)
            migration.load_state_dict(of_migration)
            model.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
            migration.publish()
            assert train_hybrid(migration, model, range(4, 7), optimizer) == expected, codec_device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_continues_with_the_state_of_codecs_on_the_cpu() -> None:
    world_of_processes(2, "cuda").run(_loads_the_state_of_codecs_elsewhere, seconds=60)


def _other_codec_devices(here: Rank) -> None:
    plan = ExpertDomains.uniform(ranks=2, datacenters=2)
    with refused('codec_device is .cuda., must be "cpu" with tensors on cpu'):
        ExpertMigration(plan, num_experts=EXPERTS, codec_device="cuda")


def test_codecs_run_where_the_tensors_are_or_on_the_cpu() -> None:
    world_of_processes(2, "cpu").run(_other_codec_devices)
