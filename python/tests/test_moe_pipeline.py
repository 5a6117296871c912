"""`MoELayer` in a pipeline: each stage has an expert-parallel group, and adds the balance loss of its layers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hybrid_ep import Buffer, CallerError, MoELayer
from hybrid_ep.moe import clip_gradients, reduce_gradients, with_loss
from process_worlds import Rank, world_of_processes

HIDDEN, EXPERTS, MICRO_BATCHES, TOKENS = 32, 8, 4, 24
# Each stage has two ranks.
STAGES = [[0, 1], [2, 3]]


class Stage(nn.Module):
    """Half of the model. It starts with the same weights wherever it is made."""

    def __init__(self, buffer: Buffer, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.dense = nn.Linear(HIDDEN, HIDDEN, device=buffer.device)
        self.moe = MoELayer(buffer, HIDDEN, 64, topk=2, balance_coef=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.moe(self.dense(x))
        return with_loss(y, self.moe.balance_loss / MICRO_BATCHES)


def batch(place: int) -> Tensor:
    return torch.randn(MICRO_BATCHES * TOKENS, HIDDEN, generator=torch.Generator().manual_seed(place))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean() / MICRO_BATCHES


def gradients(module: nn.Module) -> list[Tensor]:
    grads = (parameter.grad for parameter in module.parameters())
    return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads if grad is not None]


def test_balance_losses_of_all_stages_count() -> None:
    def body(here: Rank) -> tuple[list[list[Tensor]], list[Tensor], list[float]]:
        groups = [dist.new_group(ranks, backend="gloo") for ranks in STAGES]
        pipelines = [dist.new_group([*ranks], backend="gloo") for ranks in zip(*STAGES, strict=True)]
        at, place = divmod(here.rank, 2)
        with Buffer(groups[at], num_experts=EXPERTS, device="cpu") as buffer:
            # The whole model, on the ranks of every stage: losses are added up, and `with_loss` is not needed.
            parts = [Stage(buffer, number) for number in range(2)]
            for x in batch(place).chunk(MICRO_BATCHES):
                y = x
                balance = torch.zeros(())
                for part in parts:
                    y = y + part.moe(part.dense(y))
                    balance = balance + part.moe.balance_loss / MICRO_BATCHES
                (loss_of(y, x.roll(1, dims=1)) + balance).backward()
            whole = nn.ModuleList(parts)
            reduce_gradients(whole, groups[at])
            norms = [float(clip_gradients(whole, 1e9, groups[at]))]
            expected = [gradients(part) for part in parts]

            module = Stage(buffer, at)
            example = torch.empty(TOKENS, HIDDEN)
            stage = PipelineStage(
                module, at, 2, torch.device("cpu"), input_args=example, output_args=example, group=pipelines[place]
            )
            schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
            if at == 0:
                schedule.step(batch(place))
            else:
                schedule.step(target=batch(place).roll(1, dims=1), losses=[])
            reduce_gradients(module, groups[at])
            norms.append(float(clip_gradients(module, 1e9, groups[at], pipeline=pipelines[place])))
            return expected, gradients(module), norms

    for rank, (expected, found, norms) in enumerate(world_of_processes(4, "cpu").run(body)):
        wanted = expected[rank // 2]
        assert len(found) == len(wanted) > 3
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_loss_counts_as_if_it_were_added() -> None:
    x = torch.randn(3, requires_grad=True)
    weight = torch.tensor(2.0, requires_grad=True)
    y = with_loss(x * 1.0, weight.square())
    assert torch.equal(y, x)
    (3.0 * y.sum()).backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0)) and weight.grad == 4.0
    for wrong in (torch.ones(1), torch.tensor(1)):
        with pytest.raises(CallerError, match="floating-point scalar"):
            with_loss(x, wrong)
