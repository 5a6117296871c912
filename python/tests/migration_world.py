"""Shared by tests of the migration: runtimes, models, and training with expert domains and with expert parallelism."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from exact_engine import ExactEngine
from hybrid_ep import Buffer, CallerError, MoELayer, PeerError
from hybrid_ep.experts import expert_parameters
from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridMoELayer
from hybrid_ep.moe import parameter_groups, reduce_gradients
from process_worlds import Rank, world_of_processes

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
def refused(says: str) -> Iterator[None]:
    """Expects a `CallerError` whose text matches `says`."""
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


# ---- training


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


def lose_rank_3(here: Rank, make: Callable[[], ExpertMigration]) -> PeerError:
    """Trains until rank 3 is killed. Returns the error of this rank, which names it."""
    with pytest.raises(PeerError) as caught, make() as migration:
        model = hybrid(migration)
        optimizer = adam(model)
        train_hybrid(migration, model, range(2), optimizer)
        if here.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        train_hybrid(migration, model, range(2, 100), optimizer)
    assert caught.value.peer == 3 and "rank 3" in str(caught.value), caught.value
    return caught.value


def run_and_lose_rank_3(function: Callable[..., Any], *arguments: Any) -> None:
    """Runs a function that calls `lose_rank_3` on four processes."""
    with pytest.raises(AssertionError) as caught:
        world_of_processes(4, "cpu").run(function, *arguments, seconds=60)
    assert str(caught.value).strip() == "rank 3: died"


def train_plain(here: Rank, steps: range, plan: ExpertDomains | None = None) -> list[float]:
    """Trains with expert parallelism over all ranks. With a plan, dense gradients are summed in the order of the
    runtime."""
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


def sum_by_datacenter(gradient: Tensor, plan: ExpertDomains, group: dist.ProcessGroup) -> None:
    """Sums a dense gradient in the order of the runtime: ranks in a datacenter, then datacenters."""
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    dist.all_gather(parts, gradient.contiguous(), group=group)
    zero = torch.zeros_like(gradient)
    gradient.copy_(sum((sum((parts[rank] for rank in ranks), start=zero) for ranks in plan.datacenters), start=zero))
