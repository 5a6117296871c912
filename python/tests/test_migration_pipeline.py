"""A pipeline whose stages span datacenters: the runtime moves the experts of each stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridMoELayer
from hybrid_ep.moe import clip_gradients
from migration_world import EXPERTS, HIDDEN, INTERMEDIATE, TOPK, adam, refused, tokens_of
from process_worlds import Rank, world_of_processes

STEPS, MICRO_BATCHES, TOKENS = 4, 3, 12


def planned(directory: Path) -> Path:
    """Returns the file of a plan for 2 datacenters of 2 GPUs, with 2 stages that each have a GPU of both."""
    groups, model = directory / "groups.json", directory / "model.toml"
    model.write_text(
        f"[model]\nhidden = {HIDDEN}\nexpert_intermediate = {INTERMEDIATE}\nexperts = {EXPERTS}\ntopk = {TOPK}\n"
        f"moe_layers = 2\ntokens_per_gpu = {TOKENS}\ncontext = {TOKENS}\n"
    )
    where = ["--cluster", "dgx-h100", "--nodes", "1", "--gpus-per-node", "2", "--model", str(model)]
    layout = ["--runnable", "--set", "pipeline_stages=2", "--groups", str(groups)]
    command = [sys.executable, "-m", "hybrid_ep", "plan", *where, *layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return groups


def stage_module(migration: ExpertMigration, stage: int) -> nn.Sequential:
    """Half of the model. It starts with the same weights wherever it is made."""
    torch.manual_seed(stage)
    return nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), nn.RMSNorm(HIDDEN), HybridMoELayer(migration, HIDDEN, INTERMEDIATE, topk=TOPK)
    )


def batch(datacenter: int) -> Tensor:
    return torch.cat([tokens_of(0, 10 * datacenter + part)[:TOKENS] for part in range(MICRO_BATCHES)])


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


# What a step leaves: the losses of its micro-batches, and the norm of the gradients.
Step = tuple[list[float], float]


def train_whole(group: dist.ProcessGroup, plan: ExpertDomains, max_norm: float) -> list[Step]:
    """Trains the whole model on every rank, one micro-batch after the other."""
    steps = []
    with ExpertMigration(plan, num_experts=EXPERTS, group=group) as migration:
        model = nn.Sequential(stage_module(migration, 0), stage_module(migration, 1))
        optimizer = adam(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            parts = []
            for part in batch(migration.rank).chunk(MICRO_BATCHES):
                with migration.accumulate():
                    loss = loss_of(model(part), part.roll(1, dims=1))
                    loss.backward()
                parts.append(float(loss.detach()))
            migration.reduce_gradients(model, op="sum")
            norm = float(clip_gradients(model, max_norm, group))
            optimizer.step()
            migration.publish()
            steps.append((parts, norm))
    return steps


def train_pipeline(here: Rank, plan: ExpertDomains, max_norm: float) -> list[Step]:
    """Trains with PyTorch's pipeline. Only ranks of the last stage have losses."""
    stages = [dist.new_group([*ranks], backend="gloo") for ranks in plan.stages]
    pipelines = [dist.new_group([*ranks], backend="gloo") for ranks in zip(*plan.stages, strict=True)]
    at = plan.stage_of(here.rank)
    steps = []
    with ExpertMigration(plan, num_experts=EXPERTS, group=stages[at]) as migration:
        datacenter = migration.rank
        module = stage_module(migration, at)
        optimizer = adam(module)
        example = torch.empty(TOKENS, HIDDEN)
        stage = PipelineStage(
            module, at, len(stages), here.device, input_args=example, output_args=example, group=pipelines[datacenter]
        )
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
        for _ in range(STEPS):
            optimizer.zero_grad()
            tokens, parts = batch(datacenter), list[Tensor]()
            with migration.accumulate():
                if at == 0:
                    schedule.step(tokens)
                else:
                    schedule.step(target=tokens.roll(1, dims=1), losses=parts)
            migration.reduce_gradients(module, op="sum")
            norm = float(clip_gradients(module, max_norm, stages[at], pipeline=pipelines[datacenter]))
            optimizer.step()
            migration.publish()
            steps.append(([float(loss.detach()) for loss in parts], norm))
    return steps


@pytest.mark.parametrize("max_norm", [1e9, 1.0], ids=["unclipped", "clipped"])
def test_a_pipeline_trains_as_the_whole_model_does(max_norm: float, tmp_path: Path) -> None:
    def body(here: Rank, path: str) -> tuple[list[Step], list[Step]]:
        plan = ExpertDomains.from_file(path)
        stages = [dist.new_group([*ranks], backend="gloo") for ranks in plan.stages]
        whole = train_whole(stages[0], plan, max_norm) if here.rank in plan.stages[0] else []
        return whole, train_pipeline(here, plan, max_norm)

    file = planned(tmp_path)
    assert json.loads(file.read_text())["layout"]["ep_groups"] == [[[0, 2]], [[1, 3]]]
    results = world_of_processes(4, "cpu").run(body, str(file))
    for datacenter in range(2):
        whole, first = results[2 * datacenter]
        _, last = results[2 * datacenter + 1]
        losses, expected = ([loss for loss, _ in steps] for steps in (last, whole))
        assert sum(losses[-1]) < sum(losses[0]), "the model learns"
        if max_norm == 1e9:
            assert losses == expected
        # The stages' squares are added in a different order.
        assert torch.tensor(losses).allclose(torch.tensor(expected), rtol=1e-5, atol=0)
        for (none, of_first), (_, of_last), (_, of_all) in zip(first, last, whole, strict=True):
            assert none == [] and of_first == of_last and of_last == pytest.approx(of_all, rel=1e-5)
            assert of_all > 1.0, "there is something to clip"


def test_a_state_of_another_stage_is_refused(tmp_path: Path) -> None:
    def body(here: Rank, path: str) -> None:
        plan = ExpertDomains.from_file(path)
        stages = [dist.new_group([*ranks], backend="gloo") for ranks in plan.stages]
        at = plan.stage_of(here.rank)

        def run(state: dict[str, Any] | None) -> dict[str, Any]:
            with ExpertMigration(plan, num_experts=EXPERTS, group=stages[at]) as migration:
                module = stage_module(migration, at)
                if state is not None:
                    other = state | {"stage": 1 - at}
                    with refused(
                        f"rank {migration.rank} of stage {1 - at} saved it, and this is rank .* of stage {at}"
                    ):
                        migration.load_state_dict(other)
                    migration.load_state_dict(state)
                module(batch(migration.rank)).sum().backward()
                migration.reduce_gradients(module)
                return migration.state_dict()

        run(run(None))

    world_of_processes(4, "cpu").run(body, str(planned(tmp_path)))


def test_the_plan_of_a_stage_does_not_fit_all_ranks(tmp_path: Path) -> None:
    def body(here: Rank, path: str) -> None:
        with refused("for 2 ranks, and the group has 4; the plan has 2 pipeline stages: pass group="):
            ExpertMigration(ExpertDomains.from_file(path), num_experts=EXPERTS)
        # These groups have as many ranks as a stage.
        pipelines = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
        with refused("has ranks .*, which are not a pipeline stage of the plan; pass those of this rank's stage"):
            ExpertMigration(ExpertDomains.from_file(path), num_experts=EXPERTS, group=pipelines[here.rank // 2])

    world_of_processes(4, "cpu").run(body, str(planned(tmp_path)))
