"""Training across datacenters: plans, layers, gradients and checkpoints, with worlds of processes."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from exact_engine import ExactEngine
from hybrid_ep import Buffer, CallerError, MoELayer, PeerError
from hybrid_ep.experts import expert_parameters, local_part
from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridExperts, HybridMoELayer
from hybrid_ep.migration.job_ranks import JobRanks
from hybrid_ep.migration.runtime import _close_all
from hybrid_ep.moe import clip_gradients, parameter_groups, reduce_gradients
from process_worlds import Rank, has_libfabric, world_of_processes

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 16, 24, 8, 2, 20
TWO = ExpertDomains.uniform(ranks=4, datacenters=2)
ENGINES = ["python", "rust", "copied"]


class Copied(ExpertMigration):
    """The runtime as on a GPU: the engine gets copies of all tensors."""

    _copies = True


class InPython(ExpertMigration):
    """The runtime over the oracle's engine."""

    _make_engine = ExactEngine


def runtime(engine: str) -> type[ExpertMigration]:
    return {"python": InPython, "rust": ExpertMigration, "copied": Copied}[engine]


@contextmanager
def _raises(says: str) -> Iterator[None]:
    with pytest.raises(CallerError, match=says):
        yield


# ---- models: a dense layer, then two mixtures of experts


def network(moe: Callable[[], MoELayer]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), moe(), nn.RMSNorm(HIDDEN), moe())


def hybrid(migration: ExpertMigration, **options: Any) -> nn.Sequential:
    return network(lambda: HybridMoELayer(migration, HIDDEN, INTERMEDIATE, topk=TOPK, **options))


def tokens_of(rank: int, step: int) -> Tensor:
    """Tokens that differ in number and value between ranks and steps."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS + 3 * rank, HIDDEN, generator=draw)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    # A target that the model can learn.
    return (model(tokens) - tokens.roll(1, dims=1)).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), lr=1e-3)


class Losses(list[float]):
    def add(self, loss: Tensor) -> None:
        self.append(float(loss.detach()))


def train_hybrid(migration: ExpertMigration, model: nn.Module, steps: range, optimizer: Any) -> list[float]:
    losses = Losses()
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, tokens_of(migration.rank, step).to(migration.buffer.device))
        loss.backward()
        migration.reduce_gradients(model, op="sum")
        optimizer.step()
        migration.publish()
        losses.add(loss)
    return losses


def sum_by_datacenter(gradient: Tensor, plan: ExpertDomains, group: dist.ProcessGroup) -> None:
    """The order in which the runtime sums dense gradients: ranks in a datacenter, then datacenters."""
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    dist.all_gather(parts, gradient.contiguous(), group=group)
    zero = torch.zeros_like(gradient)
    gradient.copy_(sum((sum((parts[rank] for rank in ranks), start=zero) for ranks in plan.datacenters), start=zero))


def train_plain(here: Rank, steps: range, plan: ExpertDomains | None = None) -> list[float]:
    """Expert parallelism over all ranks. With a plan, dense gradients are summed in the order of the runtime."""
    losses = Losses()
    with Buffer(here.group, num_experts=EXPERTS, device=here.device, workers=1) as buffer:
        model = network(lambda: MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK)).to(here.device)
        optimizer = adam(model)
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, tokens_of(here.rank, step).to(here.device))
            loss.backward()
            if plan is None:
                reduce_gradients(model, here.group, op="sum")
            else:
                experts = {id(parameter) for parameter in expert_parameters(model)}
                for parameter in model.parameters():
                    if id(parameter) not in experts and parameter.grad is not None:
                        sum_by_datacenter(parameter.grad, plan, here.group)
            optimizer.step()
            losses.add(loss)
    return losses


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
    """Data parallelism over copies of experts: each rank updates all experts of its domain, with the gradients of all
    ranks of the domain added in rank order."""
    group, domain = (
        {rank: made for ranks in lists for made in [dist.new_group(ranks, backend="gloo")] for rank in ranks}[here.rank]
        for lists in (plan.dispatch_groups, plan.expert_domains)
    )
    losses = Losses()
    with Buffer(group, num_experts=EXPERTS, device="cpu", workers=1) as buffer:
        # Where the dispatch group has each expert: position d has those of domain d, in rank order.
        order = [expert for ranks in plan.expert_domains for rank in ranks for expert in plan.owned_by(rank, EXPERTS)]
        places = torch.tensor(order).argsort()

        def moe() -> Any:
            state = torch.get_rng_state()
            layer: Any = MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK)
            torch.set_rng_state(state)
            # Draw again what the layer drew, up to the seed of the experts.
            nn.init.normal_(layer.router.weight, std=HIDDEN**-0.5)
            layer.experts = OracleExperts(plan.domain_of(here.rank))
            dispatch = layer.dispatcher.dispatch
            layer.dispatcher.dispatch = lambda tokens, idx, weights: dispatch(tokens, places[idx], weights)
            return layer

        model = network(moe)
        optimizer = adam(model)
        experts = {id(weight) for layer in (model[1], model[3]) for weight in layer.experts.weights}
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, tokens_of(here.rank, step))
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


# ---- training


def _lossless(here: Rank, engine: str, plan: ExpertDomains, steps: int) -> list[float]:
    with runtime(engine)(plan, num_experts=EXPERTS, weights="exact", gradients="exact") as migration:
        model = hybrid(migration)
        return train_hybrid(migration, model, range(steps), adam(model))


def _all_ways(here: Rank, plan: ExpertDomains, steps: int) -> tuple[list[list[float]], list[float], list[float]]:
    ours = [_lossless(here, engine, plan, steps) for engine in ENGINES]
    return ours, train_oracle(here, plan, range(steps)), train_plain(here, range(steps))


@pytest.mark.parametrize(("datacenters", "steps"), [(2, 50), (4, 8)])
def test_lossless_training_equals_copies_of_experts_bit_by_bit_and_plain_ep_nearly(
    datacenters: int, steps: int
) -> None:
    plan = ExpertDomains.uniform(ranks=4, datacenters=datacenters)
    for ours, oracle, plain in world_of_processes(4, "cpu").run(_all_ways, plan, steps):
        assert ours == [oracle] * len(ENGINES)
        assert steps < 50 or oracle[-1] < 0.95 * oracle[0], "it does not learn"
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


def _with_a_child(here: Rank) -> list[float]:
    with ExpertMigration(TWO, num_experts=EXPERTS, weights="exact", gradients="exact") as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        losses = train_hybrid(migration, model, range(2), optimizer)
        if here.rank == 0 and (child := os.fork()) == 0:
            # As at the end of the interpreter.
            _close_all()
            os._exit(0)
        if here.rank == 0:
            assert os.waitpid(child, 0)[1] == 0
        return losses + train_hybrid(migration, model, range(2, 4), optimizer)


def test_a_forked_child_does_not_leave_for_its_parent() -> None:
    world = world_of_processes(4, "cpu")
    for losses, plain in zip(world.run(_with_a_child, seconds=60), world.run(train_plain, range(4)), strict=True):
        assert losses == pytest.approx(plain, rel=1e-5)


class _RefusesTheLastLayer(ExactEngine):
    def publish(self, layer: int, weights: tuple[int, int]) -> None:
        if layer == 1:
            raise CallerError("refused")
        super().publish(layer, weights)


class _Refusing(ExpertMigration):
    _make_engine = _RefusesTheLastLayer


def _refused(here: Rank) -> None:
    migration = _Refusing(TWO, num_experts=EXPERTS, timeout=5)
    hybrid(migration)
    with _raises("refused"):
        migration.publish()
    with _raises("the migration is closed"):
        migration.publish()


def test_layers_in_different_steps_end_the_migration() -> None:
    world_of_processes(4, "cpu").run(_refused, seconds=60)


def _forgets(here: Rank) -> None:
    plan = ExpertDomains.uniform(ranks=4, datacenters=1)
    with ExpertMigration(plan, num_experts=EXPERTS) as migration:
        model = hybrid(migration)
        loss_of(model, tokens_of(here.rank, 0)).backward()
        with _raises(r"call\s+migration.reduce_gradients"):
            reduce_gradients(model)
        with _raises("were not reduced: call reduce_gradients"):
            migration.publish()
        migration.reduce_gradients(model)
        loss_of(model, tokens_of(here.rank, 1)).backward()
        with _raises("call publish after the optimizer's step"):
            migration.reduce_gradients(model)


def test_a_forgotten_call_and_the_other_reduction_are_refused() -> None:
    world_of_processes(4, "cpu").run(_forgets, seconds=60)


def _one_stays_away(here: Rank) -> None:
    # New processes import for longer than the timeout, and not equally long.
    dist.barrier()
    with mock.patch.dict(os.environ, HYBRID_EP_TIMEOUT_MS="500"):
        if here.rank != 3:
            with pytest.raises(
                PeerError, match=r"rank 3 never joined.*every rank of the group must make the migration"
            ):
                ExpertMigration(TWO, num_experts=EXPERTS)
    dist.barrier()


def test_a_rank_that_makes_no_migration_is_named() -> None:
    # The ranks have met different numbers of times afterwards: use new processes.
    world = world_of_processes(4, "cpu")
    try:
        world.run(_one_stays_away, seconds=60)
    finally:
        world.stop()


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
    """The gradients of two micro-batches at once, and one after the other; and the bytes that were sent for each."""
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
    """Gradients of `op="mean"` and their norm: of the runtime, and of plain expert parallelism."""
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


# ---- checkpoints


def _resume(here: Rank, engine: str, codecs: dict[str, str], folder: Path) -> tuple[list[float], list[float]]:
    make, file = runtime(engine), folder / f"{here.rank}.pt"
    with make(TWO, num_experts=EXPERTS, **codecs) as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        train_hybrid(migration, model, range(3), optimizer)
        with _raises("call state_dict between the optimizer's step and publish"):
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
        with _raises("comes too late"):
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


# ---- lossy codecs, staleness


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


def _on_gpus(here: Rank) -> tuple[list[float], list[float], list[float]]:
    """Losses of lossless migration, of plain expert parallelism, and of lossy migration."""
    exact, lossy = ({"weights": codec, "gradients": codec, "dense_gradients": codec} for codec in ("exact", "int8"))
    found = []
    for options in (exact, lossy):
        with ExpertMigration(TWO, num_experts=EXPERTS, device=here.device, **options) as migration:
            model = hybrid(migration).to(here.device)
            assert model[1].experts.working.device == migration.buffer.device
            found.append(train_hybrid(migration, model, range(20), adam(model)))
            model(tokens_of(here.rank, 0).to(here.device)).sum().backward()
            with _raises("were not reduced"):
                migration.publish()
    return found[0], train_plain(here, range(20)), found[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpus_train_as_plain_ep() -> None:
    for exact, plain, lossy in world_of_processes(4, "cuda").run(_on_gpus, seconds=120):
        assert exact == pytest.approx(plain, rel=1e-4)
        assert lossy != exact and lossy == pytest.approx(plain, rel=0.05)


# ---- calls out of the ordinary


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
        with _raises("were not reduced: call reduce_gradients"):
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


# ---- failures


def _lose_a_rank(here: Rank) -> None:
    with pytest.raises(PeerError) as caught, ExpertMigration(TWO, num_experts=EXPERTS) as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        train_hybrid(migration, model, range(2), optimizer)
        if here.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        train_hybrid(migration, model, range(2, 100), optimizer)
    # Rank 2 is in the lost rank's dispatch group, whose buffer counts ranks from 0; rank 1 is in its expert domain.
    assert caught.value.peer == 3 and "rank 3" in str(caught.value), caught.value
    if here.rank == 1:
        assert caught.value.fault == "died", caught.value


def test_a_lost_rank_is_named_and_ends_all_ranks() -> None:
    world = world_of_processes(4, "cpu")
    with pytest.raises(AssertionError) as caught:
        world.run(_lose_a_rank, seconds=60)
    assert str(caught.value).strip() == "rank 3: died"


class _Refuses:
    ranks = 2

    def dispatch(self, error: Exception) -> None:
        raise error


def test_errors_of_a_dispatch_group_name_ranks_of_the_job() -> None:
    group = JobRanks(_Refuses(), [7, 4])
    assert group.ranks == 2
    lost = PeerError(
        "rank 1 died (dispatch #3): rank 0 waited for a flag (rank 9 says so)",
        peer=1,
        rank=0,
        operator="dispatch",
        fault="died",
        step=3,
        machine="node-a",
    )
    with pytest.raises(PeerError) as caught:
        group.dispatch(lost)
    error = caught.value
    assert str(error) == "rank 4 died (dispatch #3): rank 7 waited for a flag (rank 9 says so)"
    assert (error.peer, error.rank, error.fault, error.machine) == (4, 7, "died", "node-a")
    with _raises("hidden is 8 on rank 7 and 16 on rank 4"):
        group.dispatch(CallerError("hidden is 8 on rank 0 and 16 on rank 1"))


# ---- mistakes


def _mistakes(here: Rank) -> None:
    with _raises("is for 2 ranks, and the group has 4"):
        InPython(ExpertDomains.uniform(ranks=2, datacenters=2), num_experts=8)
    with _raises("num_experts is 6, must be a multiple of the number of ranks, 4"):
        InPython(TWO, num_experts=6)
    with _raises("timeout is 0"):
        InPython(TWO, num_experts=8, timeout=0)
    with _raises("depth is 4 on rank 0 and 5 on rank 3; it must be the same on every rank"):
        InPython(TWO, num_experts=8, depth=5 if here.rank == 3 else 4)
    with ExpertMigration(TWO, num_experts=EXPERTS, weights="gzip") as migration:
        hybrid(migration)
        with _raises("weights = gzip: .*exact"):
            migration.publish()
    with InPython(TWO, num_experts=EXPERTS) as migration, _raises("moved from cpu to meta: make the migration with"):
        hybrid(migration).to("meta")
    with InPython(TWO, num_experts=EXPERTS) as migration:
        with _raises("rank 9 saved it"):
            migration.load_state_dict({"rank": 9})
        with _raises("has no layer"):
            migration.publish()
        with _raises("working_dtype is torch.float16"):
            HybridExperts(migration, 8, 8, working_dtype=torch.float16)
        model = hybrid(migration)
        with _raises("cannot be copied"):
            copy.deepcopy(model)
        with _raises("cannot be pickled"):
            torch.save(model, "/dev/null")
        with _raises("op is 'max'"):
            migration.reduce_gradients(model, op="max")  # type: ignore[arg-type]
        model(tokens_of(here.rank, 0)).sum().backward()
        with _raises("comes too late"):
            HybridExperts(migration, 8, 8)
        migration.reduce_gradients(model)
        loss = model(tokens_of(here.rank, 0)).sum()
        migration.publish()
        with pytest.raises(RuntimeError, match="modified inplace"):
            loss.backward()
    with _raises("the migration is closed"):
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
        with _raises(says), migration.accumulate() if accumulates else nullcontext():
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
                    with _raises("gradients of experts changed after they had left .*: leave this step out"):
                        migration.reduce_gradients(model, op="sum")
                with _raises("were not reduced: call reduce_gradients"):
                    migration.publish()
                migration.discard_gradients()
                passes_once_more(migration, model, accumulates)
                with _raises("were discarded: call publish"):
                    migration.reduce_gradients(model, op="sum")
                migration.publish()
                for ours, right in zip(_gradients_of(migration, model, 2), expected, strict=True):
                    assert torch.equal(ours, right)
                migration.publish()


def _unequal_start(here: Rank) -> None:
    with ExpertMigration(TWO, num_experts=EXPERTS) as migration:
        model = hybrid(migration)
        migration.publish()
        part = nn.Linear(4, 4)
        for parameter in part.parameters():
            nn.init.zeros_(parameter)
        if here.rank == 3:
            nn.init.ones_(part.bias)
        with _raises("the dense parameter bias is not equal on all ranks"):
            migration.reduce_gradients(part)
        if here.rank == 3:
            nn.init.zeros_(part.bias)
        migration.reduce_gradients(part)
        migration.publish()
        with _raises("the ranks have different numbers of dense parameters: 2, 2, 1, 2"):
            migration.reduce_gradients(nn.Linear(4, 4, bias=here.rank != 2))
        # Nothing was sent: the migration still works.
        loss_of(model, tokens_of(here.rank, 0)).backward()
        migration.reduce_gradients(model)


def test_ranks_that_start_with_unequal_dense_parameters_are_told() -> None:
    world_of_processes(4, "cpu").run(_unequal_start, seconds=60)


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
