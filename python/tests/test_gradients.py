"""`reduce_gradients` and `clip_gradients`: several expert-parallel groups, a model in FSDP or DDP, and lost ranks."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hybrid_ep import Buffer, CallerError, MoELayer
from hybrid_ep.experts import expert_parameters, local_part
from hybrid_ep.moe import clip_gradients, parameter_groups, reduce_gradients
from process_worlds import Rank, skip_where_gpus_are_shared, world_of_processes

HIDDEN = 16


def model_of(buffer: Buffer) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN, device=buffer.device), MoELayer(buffer, HIDDEN, 24, topk=2))


def backward(model: nn.Module, here: Rank) -> None:
    x = torch.randn(5 + 3 * here.rank, HIDDEN, generator=torch.Generator().manual_seed(here.rank))
    model(x.to(here.device)).square().mean().backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of whole parameters, with those of all experts."""
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
    """Checks that the norm is right and has the same bits on all ranks, and what clipping to half of it gives."""
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
            model.zero_grad()
            backward(model, here)
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
            with pytest.raises(
                CallerError, match=r"dense parameter 1\.router\.weight of rank 1 differs from that of rank 0"
            ):
                reduce_gradients(model)

        def step(**options: bool) -> None:
            model.zero_grad()
            backward(model, here)
            reduce_gradients(model, **options)  # type: ignore[arg-type]

        # FSDP may keep the other parameters equal, or they may be frozen.
        step(dense=False)
        model[1].router.weight.requires_grad_(False)
        step()
        # Parameters are compared once per module, so a later difference is not found.
        model[0].bias.data.add_(here.rank)
        step()


def test_ranks_that_start_with_unequal_dense_parameters_are_told(device: str) -> None:
    skip_where_gpus_are_shared(device, 2)
    world_of_processes(2, device).run(_unequal_start)


def test_several_expert_parallel_groups_train_one_model(device: str) -> None:
    skip_where_gpus_are_shared(device, 4)
    world_of_processes(4, device).run(_several_groups)


def _forgotten(here: Rank) -> None:
    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        model = model_of(buffer)
        backward(model, here)
        with pytest.raises(CallerError, match=r"the gradient of 0\.weight .*: call reduce_gradients first"):
            clip_gradients(model, 1.0)
        reduce_gradients(model)
        with pytest.raises(CallerError, match="reduced already: call it once per step"):
            reduce_gradients(model)
        clip_gradients(model, 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.zero_grad()
            backward(model, here)
            reduce_gradients(model)
        # The second micro-batch of a step.
        backward(model, here)
        with pytest.warns(UserWarning, match="reduced before and not reset since: call reduce_gradients once per step"):
            reduce_gradients(model)


def test_forgotten_and_repeated_reductions_are_told(device: str) -> None:
    skip_where_gpus_are_shared(device, 2)
    world_of_processes(2, device).run(_forgotten)


def _unmarked(here: Rank) -> None:
    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        model = model_of(buffer)
        experts = model[1].experts
        experts.adapter = nn.Linear(2, 2, device=here.device)
        for parameter in experts.adapter.parameters():
            nn.init.zeros_(parameter)
        backward(model, here)
        with pytest.raises(CallerError, match=r"whether adapter\.weight, a parameter inside of GroupedExperts"):
            reduce_gradients(model)
        for parameter, is_experts in zip(experts.adapter.parameters(), (True, False), strict=True):
            parameter.expert_parallel = is_experts
            parameter.grad = torch.full_like(parameter, here.rank + 1)
        reduce_gradients(model)
        # An expert's gradient is scaled for the mean, that of a dense parameter is averaged.
        assert [float(p.grad.max()) for p in experts.adapter.parameters()] == [(here.rank + 1) / 2, 1.5]


def test_parameters_inside_of_experts_must_be_marked(device: str) -> None:
    skip_where_gpus_are_shared(device, 2)
    world_of_processes(2, device).run(_unmarked)


def _steps(here: Rank) -> None:
    def after_a_step(groups: Callable[[nn.Module], Any], **options: bool) -> list[Tensor]:
        model = model_of(buffer)
        optimizer = torch.optim.AdamW(groups(model), lr=0.1, **options)
        backward(model, here)
        optimizer.step()
        return [local_part(parameter.detach()) for parameter in model.parameters()]

    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        expected = after_a_step(lambda model: model.parameters(), foreach=False)
        for options in ({}, {"foreach": True}, {"fused": True}):
            torch.testing.assert_close(after_a_step(parameter_groups, **options), expected, rtol=0, atol=1e-6)
        # A group may be empty.
        for part, sizes in ((model_of(buffer)[0], [2, 0]), (model_of(buffer)[1].experts, [0, 2])):
            groups = parameter_groups(part)
            assert [len(group["params"]) for group in groups] == sizes
            torch.optim.AdamW(groups).step()


def test_optimizers_update_experts_and_dense_parameters_as_two_groups(device: str) -> None:
    world_of_processes(2, device).run(_steps)


# ---- lost ranks

LOSES_RANK_1 = """
import os, signal, sys, time
import torch, torch.distributed as dist
from hybrid_ep import Buffer, MoELayer
from hybrid_ep.moe import clip_gradients, parameter_groups, reduce_gradients

rank, function, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=3)
buffer = Buffer(num_experts=3, device="cpu", timeout=60.0, stall_timeout=3.0)
torch.manual_seed(0)
layer = MoELayer(buffer, 8, 8, topk=1)
layer(torch.ones(4, 8)).sum().backward()
reduce_gradients(layer)
clip_gradients(layer, 1.0)
layer.zero_grad()
layer(torch.ones(4, 8)).sum().backward()
# All ranks are at the same place: what follows waits for rank 1 only.
dist.barrier()
if rank == 1:
    if how == "leaves":
        buffer.close()
        time.sleep(3600)
    os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])
{"reduce": reduce_gradients, "clip": lambda layer: clip_gradients(layer, 1.0)}[function](layer)
"""


@pytest.mark.parametrize(
    ("function", "how", "fault"),
    [
        ("reduce", "dies", "died"),
        ("reduce", "stops", "stalled"),
        ("reduce", "leaves", "left"),
        ("clip", "stops", "stalled"),
    ],
)
def test_a_lost_rank_ends_the_reduction_and_is_named(function: str, how: str, fault: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOSES_RANK_1, str(rank), function, how, str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            # The process ends, too: nothing that gloo still does may keep it.
            said = ranks[rank].communicate(timeout=60)[1]
            assert ranks[rank].returncode == 1, said
            assert f"PeerError: rank 1 {fault} (reduce #" in said, said
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


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
