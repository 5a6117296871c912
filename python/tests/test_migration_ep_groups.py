"""Several EP groups: each has all experts, and the gradients of the ranks that own the same ones are summed."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_ep.experts import expert_parameters, local_part
from hybrid_ep.migration import ExpertDomains, ExpertMigration
from hybrid_ep.moe import clip_gradients
from migration_world import (
    EXPERTS,
    adam,
    hybrid,
    lose_rank_3,
    loss_of,
    refused,
    run_and_lose_rank_3,
    tokens_of,
    train_hybrid,
    train_plain,
)
from process_worlds import Rank, World, world_of_processes

# Two datacenters of two ranks. Each EP group has a rank in both, which gather each other's experts.
GATHERED = ExpertDomains.uniform(ranks=4, datacenters=2, ep_groups=2)
# Each datacenter is an EP group, and no experts are gathered: only gradients cross the link.
INSIDE = ExpertDomains([[0], [1], [2], [3]], [[0, 1], [2, 3]], ep_groups=[[0, 1], [2, 3]])
PLANS = [pytest.param(GATHERED, id="gathered"), pytest.param(INSIDE, id="inside")]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = world_of_processes(4, "cpu")
    yield world
    world.stop()


def process_groups(plan: ExpertDomains) -> dict[str, Any]:
    """The process groups of this rank's EP group, and of the ranks that own the same experts."""
    rank = dist.get_rank()
    ep_groups = [dist.new_group([*ranks]) for ranks in plan.ep_groups]
    places = [dist.new_group([*ranks]) for ranks in zip(*plan.ep_groups, strict=True)]
    at = next(at for at, ranks in enumerate(plan.ep_groups) if rank in ranks)
    return {"ep_group": ep_groups[at], "expert_group": places[plan.ep_groups[at].index(rank)]}


def own_experts(model: torch.nn.Module) -> list[torch.Tensor]:
    return [local_part(parameter.detach()).clone() for parameter in expert_parameters(model)]


def _train(here: Rank, plan: ExpertDomains, options: dict[str, str]) -> tuple[list[float], list[torch.Tensor]]:
    groups = process_groups(plan)
    with ExpertMigration(plan, num_experts=EXPERTS, ep_group=groups["ep_group"], **options) as migration:
        model = hybrid(migration)
        return train_hybrid(migration, model, range(8), adam(model)), own_experts(model)


def _plain(here: Rank) -> list[float]:
    return train_plain(here, range(8))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("carrier", ["gloo", "loopback"])
def test_without_loss_the_ranks_train_as_plain_expert_parallelism_does(
    world: World, plan: ExpertDomains, carrier: str
) -> None:
    exact = {"weights": "exact", "gradients": "exact", "carrier": carrier}
    trained = world.run(_train, plan, exact)
    for (losses, _), plain in zip(trained, world.run(_plain), strict=True):
        assert losses == pytest.approx(plain, rel=1e-5)
    for rank, (_, experts) in enumerate(trained):
        for copy in plan.copies_of(rank):
            assert all(map(torch.equal, experts, trained[copy][1])), f"ranks {rank} and {copy}"


@pytest.mark.parametrize("plan", PLANS)
def test_copies_stay_equal_with_lossy_codecs(world: World, plan: ExpertDomains) -> None:
    lossy = {"weights": "int8", "gradients": "int8", "dense_gradients": "topk:0.2"}
    trained, again = world.run(_train, plan, lossy), world.run(_train, plan, lossy)
    for rank, (losses, experts) in enumerate(trained):
        assert losses == again[rank][0], "the same bits in every run"
        assert losses[-1] < losses[0]
        for copy in plan.copies_of(rank):
            assert all(map(torch.equal, experts, trained[copy][1])), f"ranks {rank} and {copy}"


def _resume(here: Rank, plan: ExpertDomains) -> None:
    lossy: dict[str, Any] = {"gradients": "int8", "dense_gradients": "topk:0.2", **process_groups(plan)}
    lossy.pop("expert_group")
    with ExpertMigration(plan, num_experts=EXPERTS, **lossy) as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        train_hybrid(migration, model, range(3), optimizer)
        saved: dict[str, Any] = {}
        for step in range(3, 8):
            optimizer.zero_grad()
            loss_of(model, tokens_of(here.rank, step)).backward()
            migration.reduce_gradients(model, op="sum")
            optimizer.step()
            if step == 4:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved = {**saved, "migration": migration.state_dict()}
                saved = torch.load(_stored(saved), weights_only=False)
            migration.publish()
        whole = own_experts(model)
    with ExpertMigration(plan, num_experts=EXPERTS, **lossy) as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        migration.load_state_dict(saved["migration"])
        train_hybrid(migration, model, range(5, 8), optimizer)
        assert all(map(torch.equal, whole, own_experts(model)))


def _stored(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("plan", PLANS)
def test_a_resumed_run_has_the_bits_of_a_whole_one(world: World, plan: ExpertDomains) -> None:
    world.run(_resume, plan)


def _clip(here: Rank, plan: ExpertDomains) -> float:
    groups = process_groups(plan)
    exact = {"weights": "exact", "gradients": "exact"}
    with ExpertMigration(plan, num_experts=EXPERTS, ep_group=groups["ep_group"], **exact) as migration:
        model = hybrid(migration)
        loss_of(model, tokens_of(here.rank, 0)).backward()
        migration.reduce_gradients(model, op="sum")
        return float(clip_gradients(model, 1.0, expert_group=groups["expert_group"]))


def test_the_norm_counts_every_expert_once(world: World) -> None:
    norms = [world.run(_clip, plan) for plan in (GATHERED, INSIDE)]
    for found in norms:
        assert len(set(found)) == 1 and found[0] == pytest.approx(norms[0][0], rel=1e-5)


def _refused(here: Rank) -> None:
    with refused(r"ep_group: the plan has 2 EP groups; pass .* ranks \[\d, \d\]"):
        ExpertMigration(GATHERED, num_experts=EXPERTS)
    with refused(r"ep_group: has ranks \[0, 1, 2, 3\], must have those of this rank's EP group"):
        ExpertMigration(GATHERED, num_experts=EXPERTS, ep_group=dist.group.WORLD)
    with refused("a multiple of the number of ranks of an EP group, 2"):
        ExpertMigration(GATHERED, num_experts=7)
    groups = process_groups(GATHERED)
    with ExpertMigration(GATHERED, num_experts=EXPERTS, ep_group=groups["ep_group"]) as migration:
        model = hybrid(migration)
        # Rank 1 begins with other experts than rank 0, which owns the same.
        if here.rank == 1:
            with torch.no_grad():
                local_part(expert_parameters(model)[0]).add_(1)
        loss_of(model, tokens_of(here.rank, 0)).backward()
        with refused("the experts of rank 1 differ from those of rank 0, which owns the same"):
            migration.reduce_gradients(model)


def test_mistakes_are_refused(world: World) -> None:
    world.run(_refused)


def _lose_a_rank(here: Rank, plan: ExpertDomains) -> None:
    groups = process_groups(plan)
    lose_rank_3(here, lambda: ExpertMigration(plan, num_experts=EXPERTS, ep_group=groups["ep_group"]))


@pytest.mark.parametrize("plan", PLANS)
def test_a_lost_rank_is_named_in_every_ep_group(plan: ExpertDomains) -> None:
    run_and_lose_rank_3(_lose_a_rank, plan)
