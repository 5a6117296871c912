"""Unusual calls of the migration: repeated, left out, and in a forked child."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from hybrid_ep.experts import local_part
from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridExperts
from hybrid_ep.migration.runtime import _close_all
from migration_world import EXPERTS, TWO, adam, hybrid, refused, tokens_of, train_hybrid, train_plain
from process_worlds import Rank, world_of_processes


def _unusual_calls(here: Rank) -> None:
    plan = ExpertDomains.uniform(ranks=2, datacenters=2)
    batch = tokens_of(here.rank, 0)

    def gradients(migration: ExpertMigration, model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        model(batch).square().sum().backward()
        migration.reduce_gradients(model, op="sum")
        return [local_part(parameter.grad).clone() for parameter in model.parameters()]

    with ExpertMigration(plan, num_experts=EXPERTS, gradients="exact", depth=1) as migration:
        # PyTorch's default must not reach the tensors that the engine reads and writes.
        torch.set_default_dtype(torch.float64)
        try:
            model = hybrid(migration, dtype=torch.float32).float()
            expected = gradients(migration, model)
        finally:
            torch.set_default_dtype(torch.float32)
        # Weights may be published again before any layer has gathered them.
        migration.publish()
        migration.start_over()
        migration.publish()
        torch.testing.assert_close(gradients(migration, model), expected, rtol=0, atol=0)

        # A micro-batch that is left out leaves nothing behind.
        with migration.accumulate():
            model(2 * batch).square().sum().backward()
        with refused("were not reduced: call reduce_gradients"):
            migration.publish()
        migration.discard_gradients()
        migration.publish()
        torch.testing.assert_close(gradients(migration, model), expected, rtol=0, atol=0)

        # Gradients that a loss gave to the parameters themselves are kept.
        for part in model.modules():
            if isinstance(part, HybridExperts):
                part.down.grad = torch.ones_like(part.down)
        migration.publish()
        model(batch).square().sum().backward()
        migration.reduce_gradients(model, op="sum")
        part = model[1].experts
        place = [id(parameter) for parameter in model.parameters()].index(id(part.down))
        torch.testing.assert_close(local_part(part.down.grad), expected[place] + 1)

        # A copy of the experts does not change with them.
        held = part.held_state_dict()
        before = held["down"].clone()
        with torch.no_grad():
            local_part(part.down).add_(1)
        migration.publish()
        model(batch)
        assert torch.equal(held["down"], before)
        assert not torch.equal(part.held_state_dict()["down"], before)


def test_unusual_calls_do_what_they_say() -> None:
    world_of_processes(2, "cpu").run(_unusual_calls)


def _with_a_child(here: Rank) -> list[float]:
    with ExpertMigration(TWO, num_experts=EXPERTS, weights="exact", gradients="exact") as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        losses = train_hybrid(migration, model, range(2), optimizer)
        if here.rank == 0 and (child := os.fork()) == 0:
            # The interpreter calls this when it ends.
            _close_all()
            os._exit(0)
        if here.rank == 0:
            assert os.waitpid(child, 0)[1] == 0
        return losses + train_hybrid(migration, model, range(2, 4), optimizer)


def test_a_forked_child_does_not_leave_for_its_parent() -> None:
    world = world_of_processes(4, "cpu")
    for losses, plain in zip(world.run(_with_a_child, seconds=60), world.run(train_plain, range(4)), strict=True):
        assert losses == pytest.approx(plain, rel=1e-5)
