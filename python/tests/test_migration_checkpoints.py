"""Checkpoints of training across datacenters: a run resumes, and a smaller job restarts from replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_ep import Buffer, MoELayer
from hybrid_ep.experts import local_part
from migration_world import (
    ENGINES,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOPK,
    TWO,
    adam,
    hybrid,
    loss_of,
    refused,
    runtime,
    tokens_of,
    train_hybrid,
)
from process_worlds import Rank, world_of_processes


def _resume(here: Rank, engine: str, codecs: dict[str, str], folder: Path) -> tuple[list[float], list[float]]:
    make, file = runtime(engine), folder / f"{here.rank}.pt"
    with make(TWO, num_experts=EXPERTS, **codecs) as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        train_hybrid(migration, model, range(3), optimizer)
        with refused("call state_dict between the optimizer's step and publish"):
            migration.state_dict()
        optimizer.zero_grad()
        loss_of(model, tokens_of(here.rank, 3)).backward()
        migration.reduce_gradients(model, op="sum")
        optimizer.step()
        states = {"model": model, "optimizer": optimizer, "migration": migration}
        torch.save({name: part.state_dict() for name, part in states.items()}, file)
        migration.publish()
        uninterrupted = train_hybrid(migration, model, range(4, 9), optimizer)
    with make(TWO, num_experts=EXPERTS, **codecs) as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        with torch.no_grad():
            for parameter in model.parameters():
                local_part(parameter).zero_()
        state = torch.load(file, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        migration.load_state_dict(state["migration"])
        assert migration.step == 4, "the first forward pass publishes, then each of 3 steps"
        resumed = train_hybrid(migration, model, range(4, 9), optimizer)
        with refused("comes too late"):
            migration.load_state_dict(state["migration"])
    return uninterrupted, resumed


CODECS = {
    "python": [{"weights": "exact", "gradients": "exact"}],
    "rust": [
        {"weights": "exact", "gradients": "exact"},
        {"weights": "int8", "gradients": "int8"},
        {"weights": "delta:0.05", "gradients": "topk:0.05"},
    ],
    "copied": [{"weights": "delta:0.05", "gradients": "topk:0.05"}],
}


@pytest.mark.parametrize(
    ("engine", "codecs"),
    [(engine, codecs) for engine in ENGINES for codecs in CODECS[engine]],
    ids=lambda value: value if isinstance(value, str) else value["weights"],
)
def test_a_resumed_run_continues_bit_by_bit(engine: str, codecs: dict[str, str], tmp_path: Path) -> None:
    for uninterrupted, resumed in world_of_processes(4, "cpu").run(_resume, engine, codecs, tmp_path):
        assert resumed == uninterrupted


def _survive(here: Rank, engine: str) -> Any:
    with runtime(engine)(TWO, num_experts=EXPERTS, weights="exact", gradients="exact") as migration:
        model = hybrid(migration)
        train_hybrid(migration, model, range(2), adam(model))
        with torch.no_grad():
            model(tokens_of(here.rank, 0))  # waits for the last weights
        layer: Any = model[1]
        own = {name: local_part(value).clone() for name, value in layer.experts.state_dict().items()}
        return own, layer.experts.held_state_dict()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_smaller_job_restarts_from_replicas(engine: str) -> None:
    found = world_of_processes(4, "cpu").run(_survive, engine)
    # Datacenter 1, ranks 2 and 3, is lost. Ranks 0 and 1 restart with all experts.
    held = [held for _, held in found[:2]]
    state = {name: torch.cat([part[name] for part in held]) for name in ("gate_up", "down", "expert_ids")}
    (buffer,) = Buffer.threads(1, num_experts=EXPERTS, device="cpu")
    with buffer:
        experts = MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK).experts
        experts.load_state_dict(state)
        for rank, (own, _) in enumerate(found):
            part = slice(2 * rank, 2 * rank + 2)
            assert own["expert_ids"].tolist() == [2 * rank, 2 * rank + 1]
            assert torch.equal(experts.gate_up[part], own["gate_up"]) and torch.equal(experts.down[part], own["down"])
