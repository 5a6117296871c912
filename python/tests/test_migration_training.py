"""Training across datacenters gives the losses and gradients of expert parallelism."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_ep import Buffer, MoELayer
from hybrid_ep.experts import local_part
from hybrid_ep.migration import ExpertDomains, ExpertMigration
from hybrid_ep.moe import clip_gradients, reduce_gradients
from migration_world import (
    ENGINES,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOPK,
    TWO,
    Losses,
    adam,
    hybrid,
    loss_of,
    network,
    refused,
    runtime,
    sum_by_datacenter,
    tokens_of,
    train_hybrid,
    train_plain,
)
from process_worlds import Rank, has_libfabric, world_of_processes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class OracleExperts(nn.Module):
    """All experts of the domain as parameters of every rank, in rank order."""

    def __init__(self, domain: tuple[int, ...]) -> None:
        super().__init__()
        seed = int(torch.randint(2**62, ()))
        local = EXPERTS // 4
        self.weights = nn.ParameterList()
        for expert in (rank * local + place for rank in domain for place in range(local)):
            draw = torch.Generator().manual_seed(seed + expert)
            for shape in ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)):
                self.weights.append(torch.randn(shape, generator=draw) * shape[0] ** -0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        outputs = []
        for place, part in enumerate(rows.split(counts.tolist())):
            gate, up = (part @ self.weights[2 * place]).chunk(2, dim=-1)
            outputs.append((nn.functional.silu(gate) * up) @ self.weights[2 * place + 1])
        return torch.cat(outputs)


def train_oracle(here: Rank, plan: ExpertDomains, steps: range) -> list[float]:
    """Trains with data parallelism over copies of experts: each rank updates all experts of its domain, with the
    gradients of all ranks of the domain added in rank order."""
    group, domain = (
        {rank: made for ranks in lists for made in [dist.new_group(ranks, backend="gloo")] for rank in ranks}[here.rank]
        for lists in (plan.dispatch_groups, plan.expert_domains)
    )
    losses = Losses()
    with Buffer(group, num_experts=EXPERTS, device=here.device, workers=1) as buffer:
        # Where the dispatch group has each expert: position d has those of domain d, in rank order.
        order = [expert for ranks in plan.expert_domains for rank in ranks for expert in plan.owned_by(rank, EXPERTS)]
        places = torch.tensor(order, device=here.device).argsort()

        def moe() -> Any:
            # The router is drawn on the device, and the seed of the experts on the CPU.
            with torch.random.fork_rng(devices=[here.device] if here.device.type == "cuda" else []):
                layer: Any = MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK)
            # Draw again what the layer drew, up to the seed of the experts.
            nn.init.normal_(layer.router.weight, std=HIDDEN**-0.5)
            layer.experts = OracleExperts(plan.domain_of(here.rank))
            dispatch = layer.dispatcher.dispatch
            layer.dispatcher.dispatch = lambda tokens, idx, weights: dispatch(tokens, places[idx], weights)
            return layer

        model = network(moe).to(here.device)
        optimizer = adam(model)
        experts = {id(weight) for layer in (model[1], model[3]) for weight in layer.experts.weights}
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, tokens_of(here.rank, step).to(here.device))
            loss.backward()
            for parameter in model.parameters():
                if id(parameter) in experts:
                    parts = [torch.empty_like(parameter.grad) for _ in range(domain.size())]
                    dist.all_gather(parts, parameter.grad, group=domain)
                    parameter.grad = sum(parts, start=torch.zeros_like(parameter.grad))
            for parameter in model.parameters():
                if id(parameter) not in experts:
                    sum_by_datacenter(parameter.grad, plan, here.group)
            optimizer.step()
            losses.add(loss)
    return losses


def _lossless(here: Rank, engine: str, plan: ExpertDomains, steps: int, **options: Any) -> list[float]:
    exact = {"weights": "exact", "gradients": "exact", "device": here.device}
    with runtime(engine)(plan, num_experts=EXPERTS, **exact, **options) as migration:
        model = hybrid(migration).to(here.device)
        assert model[1].experts.working.device == migration.buffer.device
        return train_hybrid(migration, model, range(steps), adam(model))


def _all_ways(here: Rank, plan: ExpertDomains, steps: int) -> tuple[list[list[float]], list[float], list[float]]:
    ours = [_lossless(here, engine, plan, steps) for engine in ENGINES]
    if here.device.type == "cuda":
        ours.append(_lossless(here, "rust", plan, steps, codec_device="cuda"))
    return ours, train_oracle(here, plan, range(steps)), train_plain(here, range(steps))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize(("datacenters", "steps"), [(2, 50), (4, 8)])
def test_lossless_training_equals_copies_of_experts_bit_by_bit_and_plain_ep_nearly(
    device: str, datacenters: int, steps: int
) -> None:
    plan = ExpertDomains.uniform(ranks=4, datacenters=datacenters)
    for ours, oracle, plain in world_of_processes(4, device).run(_all_ways, plan, steps):
        assert ours == [oracle] * len(ours)
        assert steps < 50 or sum(oracle[-10:]) < 0.95 * sum(oracle[:10]), "it does not learn"
        for here, there in zip(oracle, plain, strict=True):
            assert abs(here - there) < 1e-5 * abs(there)


def _after_groups_of_some_ranks(here: Rank) -> list[list[float]]:
    # PyTorch names a group by a counter of each process, and the counters differ after this.
    dist.new_group([0, 1, 2])
    return [_lossless(here, "rust", TWO, 2) for _ in range(2)]


def test_ranks_may_have_made_different_numbers_of_groups() -> None:
    for first, again in world_of_processes(4, "cpu").run(_after_groups_of_some_ranks, seconds=60):
        assert first == again


def _in_any_order(here: Rank, plan: ExpertDomains) -> tuple[list[float], list[float]]:
    return _lossless(here, "rust", plan, 5), train_plain(here, range(5))


def test_domains_and_groups_may_be_listed_in_any_order() -> None:
    # Rank 1 is at position 0 of its dispatch group, since its expert domain is the first.
    plan = ExpertDomains([[1, 3], [0, 2]], [[3, 2], [1, 0]])
    for ours, plain in world_of_processes(4, "cpu").run(_in_any_order, plan, seconds=60):
        assert ours == pytest.approx(plain, rel=1e-5)


def _over_some_datacenters(here: Rank, engine: str) -> tuple[list[float], list[float]]:
    # Each rank is a datacenter. Ranks 0 and 1 hold the same experts, and so do 2 and 3; tokens cross between the pairs.
    plan = ExpertDomains([[0, 1], [2, 3]], [[0, 2], [1, 3]], datacenters=[[0], [1], [2], [3]])
    machine = {"HYBRID_EP_TRANSPORT": engine}
    if engine == "tcp":
        machine |= {"HYBRID_EP_TRANSPORT_ADDRESS": "127.0.0.1", "HYBRID_EP_MACHINE": f"site-{here.rank}"}
    with (
        mock.patch.dict(os.environ, machine),
        ExpertMigration(plan, num_experts=EXPERTS, weights="exact", gradients="exact", domains=2) as migration,
    ):
        model = hybrid(migration)
        ours = train_hybrid(migration, model, range(5), adam(model))
    return ours, train_plain(here, range(5))


@pytest.mark.parametrize(
    "engine",
    [
        "loopback",
        pytest.param("tcp", marks=pytest.mark.skipif(not has_libfabric(), reason="libfabric is not installed")),
    ],
)
def test_expert_domains_of_some_datacenters(engine: str) -> None:
    for ours, plain in world_of_processes(4, "cpu").run(_over_some_datacenters, engine, seconds=60):
        assert ours == pytest.approx(plain, rel=1e-5)


def _without_migration(here: Rank) -> tuple[list[float], list[float]]:
    plan = ExpertDomains.uniform(ranks=4, datacenters=1)
    with ExpertMigration(plan, num_experts=EXPERTS) as migration:
        model = hybrid(migration)
        ours = train_hybrid(migration, model, range(5), adam(model))
        stats = migration.stats()
        assert stats.pop("dense_inside_sent") == stats.pop("dense_inside_received") > 0
        assert stats == {"dense_link_sent": 0, "dense_link_received": 0}
    return ours, train_plain(here, range(5), plan)


def test_one_datacenter_is_expert_parallelism() -> None:
    for ours, plain in world_of_processes(4, "cpu").run(_without_migration):
        assert ours == plain


def _gradients(here: Rank, engine: str) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Returns the gradients of two micro-batches at once, those of one after the other, and the bytes sent for each."""
    results, sent = [], []
    for accumulated in (False, True):
        with runtime(engine)(TWO, num_experts=EXPERTS, weights="exact", gradients="exact") as migration:
            model = hybrid(migration)
            first, last = tokens_of(here.rank, 0), tokens_of(here.rank, 1)
            if accumulated:
                with migration.accumulate():
                    model(first).square().sum().backward()
                model(last).square().sum().backward()
            else:
                model(torch.cat([first, last])).square().sum().backward()
            migration.reduce_gradients(model, op="sum")
            results.append([local_part(parameter.grad).clone() for parameter in model.parameters()])
            sent.append(migration.stats()["gradients_sent"])
    return results[0], results[1], sent


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_micro_batches_travel_once(engine: str) -> None:
    for at_once, accumulated, sent in world_of_processes(4, "cpu").run(_gradients, engine):
        for one, other in zip(at_once, accumulated, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert sent[0] == sent[1] > 0


def _means_and_norms(here: Rank, engine: str) -> tuple[list[Tensor], list[Tensor], float, float]:
    """Returns gradients of `op="mean"` and their norm: of the runtime, and of plain expert parallelism."""
    with runtime(engine)(TWO, num_experts=EXPERTS, weights="exact", gradients="exact") as migration:
        model = hybrid(migration)
        loss_of(model, tokens_of(here.rank, 0)).backward()
        migration.reduce_gradients(model)
        norm = float(clip_gradients(model, 0.1))
        ours = [local_part(parameter.grad).clone() for parameter in model.parameters()]
    with Buffer(here.group, num_experts=EXPERTS, device="cpu", workers=1) as buffer:
        model = network(lambda: MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK))
        loss_of(model, tokens_of(here.rank, 0)).backward()
        reduce_gradients(model, here.group)
        plain_norm = float(clip_gradients(model, 0.1))
        return ours, [local_part(parameter.grad) for parameter in model.parameters()], norm, plain_norm


@pytest.mark.parametrize("engine", ENGINES)
def test_means_and_clipped_gradients_are_those_of_plain_ep(engine: str) -> None:
    norms = set()
    for ours, plain, norm, plain_norm in world_of_processes(4, "cpu").run(_means_and_norms, engine):
        assert norm == pytest.approx(plain_norm, rel=1e-5) and norm > 0.1
        norms.add(norm)
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert len(norms) == 1, "the same on all ranks"


def _bf16(here: Rank, engine: str) -> list[float]:
    with runtime(engine)(TWO, num_experts=EXPERTS, weights="exact", gradients="exact") as migration:
        model = hybrid(migration, working_dtype=torch.bfloat16)
        experts: Any = model[1].experts
        losses = train_hybrid(migration, model, range(20), adam(model))
        assert experts.working.dtype == torch.bfloat16 and experts.down.dtype == torch.float32
        own = torch.cat([local_part(experts.gate_up).flatten(1), local_part(experts.down).flatten(1)], dim=1)
        assert torch.equal(experts.working[: len(own)], own.bfloat16()), "it computes with rounded masters"
        assert torch.equal(experts.held_state_dict()["down"][:2], local_part(experts.down)), "it saves masters"
    return losses


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_working_weights_have_f32_masters(engine: str) -> None:
    world = world_of_processes(4, "cpu")
    exact = world.run(_lossless, engine, TWO, 20)
    for losses, in_f32 in zip(world.run(_bf16, engine), exact, strict=True):
        assert losses != in_f32
        assert losses == pytest.approx(in_f32, rel=0.02)


def _on_gpus(here: Rank) -> tuple[list[float], list[float]]:
    """Losses of lossy migration, and of plain expert parallelism."""
    lossy = dict.fromkeys(("weights", "gradients", "dense_gradients"), "int8")
    with ExpertMigration(TWO, num_experts=EXPERTS, device=here.device, **lossy) as migration:
        model = hybrid(migration).to(here.device)
        found = train_hybrid(migration, model, range(20), adam(model))
        model(tokens_of(here.rank, 0).to(here.device)).sum().backward()
        with refused("were not reduced"):
            migration.publish()
    return found, train_plain(here, range(20))


@needs_gpu
def test_gpus_train_with_loss_nearly_as_plain_ep() -> None:
    for lossy, plain in world_of_processes(4, "cuda").run(_on_gpus, seconds=120):
        assert lossy != plain and lossy == pytest.approx(plain, rel=0.05)
