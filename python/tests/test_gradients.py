"""`reduce_gradients` and `clip_gradients`: several expert-parallel groups, and a model in FSDP or DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybrid_ep import Buffer, CallerError, MoELayer
from hybrid_ep.experts import expert_parameters
from hybrid_ep.moe import clip_gradients, reduce_gradients
from process_worlds import Rank, skip_where_gpus_are_shared, world_of_processes

HIDDEN = 16


def model_of(buffer: Buffer) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN, device=buffer.device), MoELayer(buffer, HIDDEN, 24, topk=2))


def backward(model: nn.Module, here: Rank) -> None:
    x = torch.randn(5 + 3 * here.rank, HIDDEN, generator=torch.Generator().manual_seed(here.rank))
    model(x.to(here.device)).square().mean().backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all experts and of whole parameters."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def expected(here: Rank, op: str) -> tuple[dict[str, Tensor], float]:
    """The gradients of one expert-parallel group, and their norm."""
    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        model = model_of(buffer)
        backward(model, here)
        reduce_gradients(model, op=op)  # type: ignore[arg-type]
        grads = gradients(model)
    return grads, float(torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


def assert_clips(model: nn.Module, norm: float, **groups: dist.ProcessGroup) -> None:
    """Checks that the norm is right and has the same bits on all ranks, and what clipping by the half of it gives."""
    before = gradients(model)
    found = clip_gradients(model, norm / 2, **groups)
    assert float(found) == pytest.approx(norm, rel=1e-4)
    norms = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, found)
    assert len({float(one) for one in norms}) == 1
    assert_same(gradients(model), {name: grad / 2 for name, grad in before.items()})


def _several_groups(here: Rank) -> None:
    # Ranks 0 and 1 are an expert-parallel group, and so are 2 and 3. Ranks 0 and 2 have the same experts.
    group = [dist.new_group([first, first + 1]) for first in (0, 2)][here.rank // 2]
    replicas = [dist.new_group([first, first + 2]) for first in (0, 1)][here.rank % 2]
    assert isinstance(group, dist.ProcessGroup) and isinstance(replicas, dist.ProcessGroup)
    for op in ("mean", "sum"):
        right, norm = expected(here, op)
        with Buffer(group, num_experts=4, device=here.device) as buffer:
            model = model_of(buffer)
            backward(model, here)
            for call in (
                lambda model=model: reduce_gradients(model),
                lambda model=model: clip_gradients(model, 1.0),
            ):
                with pytest.raises(CallerError, match="so 2 ranks have each expert, and expert_group is missing"):
                    call()
            reduce_gradients(model, expert_group=replicas, op=op)  # type: ignore[arg-type]
            assert_same(gradients(model), right)
            assert_clips(model, norm, expert_group=replicas)
            # The ranks of a buffer may train a model of their own.
            reduce_gradients(model, group)
            clip_gradients(model, 1.0, group)
            with pytest.raises(CallerError, match="first experts of the ranks of expert_group are 0, 2"):
                reduce_gradients(model, expert_group=group)
            with pytest.raises(CallerError, match="so 2 ranks have each expert, and expert_group has 4 ranks"):
                reduce_gradients(model, expert_group=here.group)
    three = dist.new_group([0, 1, 2])
    if here.rank < 2:
        with Buffer(group, num_experts=4, device=here.device) as buffer:
            model = model_of(buffer)
            with pytest.raises(CallerError, match="the group has 3 ranks, and the layer's buffer 2, which does not"):
                reduce_gradients(model, three)


def _unequal_start(here: Rank) -> None:
    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        model = model_of(buffer)
        if here.rank == 1:
            with torch.no_grad():
                model[1].router.weight[0, 0] += 1e-6
        backward(model, here)
        for _ in range(2):
            with pytest.raises(CallerError, match=r"dense parameter 1\.router\.weight is not equal on all ranks"):
                reduce_gradients(model)
        reduce_gradients(model, dense=False)
        # Also if FSDP keeps the other parameters equal, or if they are frozen.
        model[1].router.weight.requires_grad_(False)
        reduce_gradients(model)
        # Once per module: whatever the program does later is its own affair.
        model[0].bias.data.add_(here.rank)
        reduce_gradients(model)


def test_ranks_that_start_with_unequal_dense_parameters_are_told(device: str) -> None:
    skip_where_gpus_are_shared(device, 2)
    world_of_processes(2, device).run(_unequal_start)


def test_several_expert_parallel_groups_train_one_model(device: str) -> None:
    skip_where_gpus_are_shared(device, 4)
    world_of_processes(4, device).run(_several_groups)


def test_norms_are_f32_whatever_the_default_type_is() -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(1000))
    for parameter in model:
        parameter.grad = torch.ones(1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        norm = clip_gradients(model, 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx(1000**0.5)


def _fsdp(here: Rank) -> None:
    from torch.distributed.fsdp import fully_shard

    right, norm = expected(here, "mean")
    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        model = model_of(buffer)
        fully_shard(model, ignored_params={*expert_parameters(model)})
        backward(model, here)
        with pytest.raises(CallerError, match=r"0\.weight is a DTensor.*pass dense=False"):
            reduce_gradients(model)
        reduce_gradients(model, dense=False)
        assert_same(gradients(model), right)
        assert_clips(model, norm)


def test_fsdp_shards_the_dense_parameters(device: str) -> None:
    skip_where_gpus_are_shared(device, 2)
    world_of_processes(2, device).run(_fsdp)


def _ddp(here: Rank) -> None:
    right, norm = expected(here, "mean")
    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        model = model_of(buffer)
        experts = {id(parameter) for parameter in expert_parameters(model)}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in experts]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = DistributedDataParallel(model)
        backward(wrapped, here)
        reduce_gradients(wrapped, dense=False)
        assert_same(gradients(wrapped), right)
        assert_clips(wrapped, norm)


def test_ddp_reduces_the_dense_parameters(device: str) -> None:
    skip_where_gpus_are_shared(device, 2)
    world_of_processes(2, device).run(_ddp)
