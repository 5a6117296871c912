"""The reduction of dense gradients between datacenters: sums, bytes, codecs, overlap, lost ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_ep import CallerError, PeerError
from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridMoELayer
from hybrid_ep.migration import dense as dense_module
from hybrid_ep.moe import parameter_groups
from process_worlds import Rank, World, _packed, _unpacked, world_of_processes

TWO = ExpertDomains.uniform(ranks=4, datacenters=2)
# Three ranks in the first datacenter, one in the second. Dispatch groups are pairs, one of which spans both.
UNEQUAL = ExpertDomains([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 1, 2], [3]])
FOUR = ExpertDomains.uniform(ranks=4, datacenters=4)
EXACT = {"weights": "exact", "gradients": "exact"}


class Mixed(nn.Module):
    """Tied, unused and frozen parameters, of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(40, 30)
        self.tied = nn.Linear(40, 30)
        self.tied.weight = self.wide.weight
        self.narrow = nn.Linear(30, 20, dtype=torch.bfloat16)
        self.short = nn.Parameter(torch.zeros(7, dtype=torch.float16))
        self.odd = nn.Linear(3, 1)  # only ranks of odd number use it
        self.unused = nn.Parameter(torch.zeros(5))
        self.frozen = nn.Parameter(torch.zeros(9), requires_grad=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        y = (self.wide(x) + self.tied(2 * x)).square()
        out = self.narrow(y.bfloat16()).float().sum() + self.short.float().sum() * x.sum()
        return out + self.odd(x[:, :3]).sum() if rank % 2 else out


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def expected(module: nn.Module, plan: ExpertDomains, step: int, scale: float) -> list[Tensor | None]:
    """The sums of a plain computation, in the order of the runtime: in f32, rounded once."""
    parts = []
    for rank in range(plan.ranks):
        module.zero_grad()
        module(batch(rank, step), rank).backward()
        parts.append(grads(module))
    sums: list[Tensor | None] = []
    for at, parameter in enumerate(module.parameters()):
        if not parameter.requires_grad:
            sums.append(None)
            continue
        zero = torch.zeros(parameter.shape)
        of = [zero if part[at] is None else part[at].float() for part in parts]
        total = sum((sum((of[rank] for rank in ranks), start=zero) for ranks in plan.datacenters), start=zero)
        # f16 travels as f32, so it is scaled before it is rounded.
        rounded = total if parameter.dtype == torch.float16 else total.to(parameter.dtype)
        sums.append((rounded * scale).to(parameter.dtype))
    module.zero_grad()
    return sums


def _sums(here: Rank, plan: ExpertDomains, bucket_bytes: int) -> None:
    dense_module.BUCKET_BYTES = bucket_bytes
    try:
        with ExpertMigration(plan, num_experts=4, **EXACT) as migration:
            HybridMoELayer(migration, 8, 8, topk=1)
            torch.manual_seed(1)
            module = Mixed()
            # A model of its own: backward passes of the plain computation must not begin buckets.
            model = Mixed()
            model.load_state_dict(module.state_dict())
            for step, op in enumerate(("sum", "mean", "sum", "sum")):
                right = expected(model, plan, step, 0.25 if op == "mean" else 1.0)
                migration.publish()
                module.zero_grad()
                module(batch(here.rank, step), here.rank).backward()
                migration.reduce_gradients(module, op=op)  # type: ignore[arg-type]
                for ours, theirs in zip(grads(module), right, strict=True):
                    assert (ours is None) == (theirs is None)
                    assert ours is None or torch.equal(ours, theirs), (here.rank, step)
    finally:
        dense_module.BUCKET_BYTES = 4 << 20


@pytest.mark.parametrize("plan", [TWO, UNEQUAL, FOUR], ids=["two", "unequal", "four"])
def test_sums_have_the_bits_of_a_plain_computation(plan: ExpertDomains) -> None:
    # With buckets of 256 bytes, nearly every parameter has its own, and most leave during the backward pass.
    world_of_processes(4, "cpu").run(_sums, plan, 256 if plan is not FOUR else 4 << 20)


# ---- bytes


def message(codec: str, elements: int) -> int:
    """The formula of docs/migration.md."""
    payload = 4 * elements if codec == "exact" else elements + 4 * -(-elements // 128)
    return 64 + 40 + payload if elements else 0


def _bytes(here: Rank, plan: ExpertDomains, codec: str) -> None:
    with ExpertMigration(plan, num_experts=4, dense_gradients=codec) as migration:
        HybridMoELayer(migration, 8, 8, topk=1)
        torch.manual_seed(0)
        module = nn.Linear(100, 10)
        for step in range(3):
            migration.publish()
            module(torch.randn(4, 100)).sum().backward()
            migration.reduce_gradients(module)
            assert migration.step == step + 1
        stats = migration.stats()
    datacenters = len(plan.datacenters)
    ranks = next(ranks for ranks in plan.datacenters if here.rank in ranks)
    place, size = ranks.index(here.rank), len(ranks)
    share = 1010 * (place + 1) // size - 1010 * place // size
    assert stats["dense_link_sent"] == stats["dense_link_received"] == 3 * (datacenters - 1) * message(codec, share)


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_bytes_over_the_link_are_those_of_the_formula(codec: str) -> None:
    for plan in (TWO, FOUR):
        world_of_processes(4, "cpu").run(_bytes, plan, codec)


# ---- training with a codec


def _train(here: Rank, codec: str, folder: Path) -> tuple[list[float], list[float], list[Tensor]]:
    """The losses of an uninterrupted run and of one that resumes, and dense parameters at the end."""

    def make(migration: ExpertMigration) -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 16), HybridMoELayer(migration, 16, 24, topk=2), nn.RMSNorm(16))
        return model, torch.optim.AdamW(parameter_groups(model), lr=1e-3)

    def step(migration: ExpertMigration, model: nn.Module, optimizer: Any, number: int) -> float:
        draw = torch.Generator().manual_seed(100 * number + here.rank)
        first, last = torch.randn(2, 20, 16, generator=draw)
        optimizer.zero_grad()
        with migration.accumulate():
            (model(first) - first.roll(1, dims=1)).square().mean().backward()
        loss = (model(last) - last.roll(1, dims=1)).square().mean()
        loss.backward()
        migration.reduce_gradients(model)
        optimizer.step()
        return float(loss.detach())

    losses = []
    with ExpertMigration(TWO, num_experts=8, dense_gradients=codec) as migration:
        model, optimizer = make(migration)
        for number in range(8):
            losses.append(step(migration, model, optimizer, number))
            if number == 3:
                parts = {"model": model, "optimizer": optimizer, "migration": migration}
                torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"{here.rank}.pt")
            migration.publish()
        held = [p.detach().clone() for p in model[0].parameters()]
    with ExpertMigration(TWO, num_experts=8, dense_gradients=codec) as migration:
        model, optimizer = make(migration)
        state = torch.load(folder / f"{here.rank}.pt", weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        migration.load_state_dict(state["migration"])
        resumed = []
        for number in range(4, 8):
            resumed.append(step(migration, model, optimizer, number))
            migration.publish()
    return losses, resumed, held


def test_a_resumed_run_with_int8_continues_bit_by_bit_and_ranks_stay_equal(tmp_path: Path) -> None:
    world = world_of_processes(4, "cpu")
    found = world.run(_train, "int8", tmp_path)
    for (losses, resumed, held), (exact, _, exact_held) in zip(
        found, world.run(_train, "exact", tmp_path), strict=True
    ):
        assert resumed == losses[4:]
        assert losses == pytest.approx(exact, rel=0.02) and losses != exact
        assert all(torch.equal(a, b) for a, b in zip(held, found[0][2], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(held, exact_held, strict=True))


# ---- overlap, and calls out of the ordinary


def _overlap(here: Rank) -> None:
    dense_module.BUCKET_BYTES = 1024
    with ExpertMigration(TWO, num_experts=4, **EXACT) as migration:
        layer = HybridMoELayer(migration, 8, 8, topk=1)
        torch.manual_seed(1)
        module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

        def backward(number: int) -> None:
            module.zero_grad()
            module(torch.ones(2, 16) * (here.rank + number)).sum().backward()

        def publish() -> None:
            migration.publish()
            with torch.no_grad():
                layer(torch.zeros(1, 8))  # a forward pass takes the weights

        def sent() -> float:
            return migration.stats()["dense_inside_sent"]

        publish()
        backward(1)
        assert sent() == 0, "the first step knows no module"
        migration.reduce_gradients(module)
        publish()
        before = sent()
        with migration.accumulate():
            backward(1)
        assert sent() == before
        backward(2)
        assert sent() > before, "buckets leave during the backward pass"
        with pytest.raises(CallerError, match="a second backward pass after the gradients of this step have left"):
            backward(3)
        with pytest.raises(CallerError, match="were not reduced"):
            migration.publish()
        # The step is left out: ranks forget what has left.
        migration.discard_gradients()
        publish()
        backward(4)
        last = module[3]
        assert isinstance(last, nn.Linear) and last.bias.grad is not None
        last.bias.grad.add_(1)
        with pytest.raises(CallerError, match="changed after it had left"):
            migration.reduce_gradients(module)
        migration.discard_gradients()
        publish()
        # Another module ends the overlap: ranks forget what has left of the first module.
        backward(5)
        right = nn.Linear(3, 3)
        right(torch.ones(1, 3)).sum().backward()
        migration.reduce_gradients(right, op="sum")
        assert right.bias.grad is not None and right.bias.grad.tolist() == [4.0] * 3
        publish()
        before = sent()
        migration.reduce_gradients(module, op="sum")
        assert torch.equal(last.bias.grad, torch.full((16,), 8.0)) and sent() > before
    for wrong, says in ((nn.Linear(2, 2, dtype=torch.float64), "float64"), (nn.Embedding(4, 2, sparse=True), "sparse")):
        with ExpertMigration(TWO, num_experts=4) as migration:
            HybridMoELayer(migration, 8, 8, topk=1)
            migration.publish()
            wrong(torch.zeros(1, dtype=torch.long) if says == "sparse" else torch.ones(1, 2).double()).sum().backward()
            with pytest.raises(CallerError, match=says):
                migration.reduce_gradients(wrong)
    with pytest.raises(CallerError, match="dense_gradients = gzip"):
        ExpertMigration(TWO, num_experts=4, dense_gradients="gzip")
    dist.barrier()


def test_buckets_leave_during_the_backward_pass_and_mistakes_are_named() -> None:
    world = world_of_processes(4, "cpu")
    try:
        world.run(_overlap)
    finally:
        world.stop()


# ---- lost ranks

TIMEOUT = 2.0


def _lose_a_rank(here: Rank, number: int) -> tuple[int, str, float] | None:
    migration = ExpertMigration(TWO, num_experts=4, timeout=TIMEOUT)
    HybridMoELayer(migration, 8, 8, topk=1)
    torch.manual_seed(0)
    module = nn.Linear(64, 64)
    migration.publish()
    module(torch.ones(1, 64)).sum().backward()
    migration.reduce_gradients(module)
    migration.publish()
    dist.barrier()
    if here.rank == 3:
        os.kill(os.getpid(), number)
        return None
    started = time.monotonic()
    with pytest.raises(PeerError) as caught, migration:
        module(torch.ones(1, 64)).sum().backward()
        migration.reduce_gradients(module)
    return caught.value.peer, caught.value.fault, time.monotonic() - started


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_rank_names_a_lost_rank(number: int) -> None:
    world = World(4, "cpu")
    try:
        found = _answers(world, number)
    finally:
        for process, _ in world._ranks:
            process.kill()
        world.stop()
    for peer, fault, _ in found:
        assert peer == 3 and fault in ({"died"} if number == signal.SIGKILL else {"stalled", "is late"}), found


def _answers(world: World, number: int) -> list[tuple[int, str, float]]:
    """What ranks 0 to 2 return."""
    world._start()
    for _, pipe in world._ranks:
        pipe.send_bytes(_packed((_lose_a_rank, (number,))))
    found = []
    for _, pipe in world._ranks[:3]:
        assert pipe.poll(60), "a rank does not end"
        failure, result = _unpacked(pipe.recv_bytes())
        assert not failure, failure
        found.append(result)
    return found
