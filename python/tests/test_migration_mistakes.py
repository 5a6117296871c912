"""The migration refuses mistaken calls, with an error that names the mistake."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from exact_engine import ExactEngine
from hybrid_ep import CallerError
from hybrid_ep.experts import local_part
from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridExperts
from hybrid_ep.moe import reduce_gradients
from migration_world import (
    ENGINES,
    EXPERTS,
    TWO,
    InPython,
    adam,
    hybrid,
    loss_of,
    refused,
    runtime,
    tokens_of,
    train_hybrid,
)
from process_worlds import Rank, world_of_processes


def _forgets(here: Rank) -> None:
    plan = ExpertDomains.uniform(ranks=4, datacenters=1)
    with ExpertMigration(plan, num_experts=EXPERTS) as migration:
        model = hybrid(migration)
        loss_of(model, tokens_of(here.rank, 0)).backward()
        with refused(r"call\s+migration.reduce_gradients"):
            reduce_gradients(model)
        with refused("were not reduced: call reduce_gradients"):
            migration.publish()
        migration.reduce_gradients(model)
        loss_of(model, tokens_of(here.rank, 1)).backward()
        with refused("call publish after the optimizer's step"):
            migration.reduce_gradients(model)


def test_a_forgotten_call_and_the_other_reduction_are_refused() -> None:
    world_of_processes(4, "cpu").run(_forgets, seconds=60)


class _RefusesTheLastLayer(ExactEngine):
    def publish(self, layer: int, weights: tuple[int, int], stream: int) -> None:
        if layer == 1:
            raise CallerError("refused")
        super().publish(layer, weights, stream)


class _Refusing(ExpertMigration):
    _make_engine = _RefusesTheLastLayer


def _refused(here: Rank) -> None:
    migration = _Refusing(TWO, num_experts=EXPERTS, timeout=5)
    hybrid(migration)
    with refused("refused"):
        migration.publish()
    with refused("the migration is closed"):
        migration.publish()


def test_layers_in_different_steps_end_the_migration() -> None:
    world_of_processes(4, "cpu").run(_refused, seconds=60)


def _unequal_start(here: Rank) -> None:
    with ExpertMigration(TWO, num_experts=EXPERTS) as migration:
        model = hybrid(migration)
        migration.publish()
        part = nn.Linear(4, 4)
        for parameter in part.parameters():
            nn.init.zeros_(parameter)
        if here.rank == 3:
            nn.init.ones_(part.bias)
        with refused("the dense parameter bias of rank 3 differs from that of rank 0"):
            migration.reduce_gradients(part)
        if here.rank == 3:
            nn.init.zeros_(part.bias)
        migration.reduce_gradients(part)
        migration.publish()
        with refused(r"the dense parameter bias is missing on rank 2 and \[4\] float32 on rank 0; it must be the same"):
            migration.reduce_gradients(nn.Linear(4, 4, bias=here.rank != 2))
        # Nothing was sent: the migration still works.
        loss_of(model, tokens_of(here.rank, 0)).backward()
        migration.reduce_gradients(model)


def test_ranks_that_start_with_unequal_dense_parameters_are_told() -> None:
    world_of_processes(4, "cpu").run(_unequal_start, seconds=60)


def _mistakes(here: Rank) -> None:
    with refused("is for 2 ranks, and the group has 4"):
        InPython(ExpertDomains.uniform(ranks=2, datacenters=2), num_experts=8)
    with refused("num_experts is 6, must be a multiple of the number of ranks, 4"):
        InPython(TWO, num_experts=6)
    with refused("timeout is 0"):
        InPython(TWO, num_experts=8, timeout=0)
    with refused("depth is 4 on rank 0 and 5 on rank 3; it must be the same on every rank"):
        InPython(TWO, num_experts=8, depth=5 if here.rank == 3 else 4)
    with ExpertMigration(TWO, num_experts=EXPERTS, weights="gzip") as migration:
        hybrid(migration)
        with refused("weights = gzip: .*exact"):
            migration.publish()
    with (
        InPython(TWO, num_experts=EXPERTS) as migration,
        refused("moved from cpu to meta: make the migration with"),
    ):
        hybrid(migration).to("meta")
    with InPython(TWO, num_experts=EXPERTS) as migration:
        with refused("rank 9 saved it"):
            migration.load_state_dict({"rank": 9})
        with refused("has no layer"):
            migration.publish()
        with refused("working_dtype is torch.float16"):
            HybridExperts(migration, 8, 8, working_dtype=torch.float16)
        model = hybrid(migration)
        with refused("cannot be copied"):
            copy.deepcopy(model)
        with refused("cannot be pickled"):
            torch.save(model, "/dev/null")
        with refused("op is 'max'"):
            migration.reduce_gradients(model, op="max")  # type: ignore[arg-type]
        model(tokens_of(here.rank, 0)).sum().backward()
        with refused("comes too late"):
            HybridExperts(migration, 8, 8)
        migration.reduce_gradients(model)
        loss = model(tokens_of(here.rank, 0)).sum()
        migration.publish()
        with pytest.raises(RuntimeError, match="modified inplace"):
            loss.backward()
    with refused("the migration is closed"):
        migration.publish()


def _gradients_of(migration: ExpertMigration, model: nn.Module, step: int) -> list[Tensor]:
    model.zero_grad()
    model(tokens_of(migration.rank, step)).square().sum().backward()
    migration.reduce_gradients(model, op="sum")
    return [local_part(parameter.grad).clone() for parameter in model.parameters()]


def _second_passes(here: Rank, engine: str) -> None:
    """A second backward pass after gradients have left, in the first step and in later ones."""
    exact = {"weights": "exact", "gradients": "exact"}

    def passes_once_more(migration: ExpertMigration, model: nn.Module, accumulates: bool) -> None:
        says = "a second backward pass after the gradients of this step have left.*: call discard_gradients"
        with refused(says), migration.accumulate() if accumulates else nullcontext():
            model(tokens_of(here.rank, 1)).square().sum().backward()

    with runtime(engine)(TWO, num_experts=EXPERTS, **exact) as migration:
        expected = _gradients_of(migration, hybrid(migration), 2)
    for accumulates in (False, True):
        with runtime(engine)(TWO, num_experts=EXPERTS, **exact) as migration:
            model = hybrid(migration)
            for _ in range(2):
                model(tokens_of(here.rank, 0)).square().sum().backward()
                passes_once_more(migration, model, accumulates)
                # The owners have the gradients of the first pass only.
                for _ in range(2):
                    with refused("gradients of experts changed after they had left .*: leave this step out"):
                        migration.reduce_gradients(model, op="sum")
                with refused("were not reduced: call reduce_gradients"):
                    migration.publish()
                migration.discard_gradients()
                passes_once_more(migration, model, accumulates)
                with refused("were discarded: call publish"):
                    migration.reduce_gradients(model, op="sum")
                migration.publish()
                for ours, right in zip(_gradients_of(migration, model, 2), expected, strict=True):
                    assert torch.equal(ours, right)
                migration.publish()


def _destroy_groups_first(here: Rank) -> None:
    migration = ExpertMigration(TWO, num_experts=EXPERTS)
    model = hybrid(migration)
    train_hybrid(migration, model, range(1), adam(model))
    dist.barrier()
    dist.destroy_process_group()
    migration.close()


def test_mistakes_are_named_and_closing_after_the_groups_are_destroyed_ends() -> None:
    # A failed backward pass leaves the ranks of a dispatch group at different operators: use new processes afterwards.
    world = world_of_processes(4, "cpu")
    try:
        world.run(_mistakes)
        for engine in ENGINES:
            world.run(_second_passes, engine)
        world.run(_destroy_groups_first, seconds=60)
    finally:
        world.stop()
