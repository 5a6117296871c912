"""The gradients of a model with experts: their reduction over ranks, and their norm. `moe` has both functions.

A gradient of an expert counts the tokens of all ranks of its buffer already. If the job has several expert-parallel
groups, other ranks have the same experts and add the tokens of their groups.
"""

# mypy: disable-error-code="no-untyped-call"
# (torch.distributed has functions without types.)

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ._layers import Groups, extremes, groups_of, owners, unequal_layers, unmarked_layers
from ._watch import Watch
from .buffer import Buffer
from .dispatcher import TokenDispatcher
from .errors import CallerError
from .experts import LocalExperts, expert_parameters, local_part

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

__all__ = ["clip_gradients", "reduce_gradients"]


@torch.no_grad()
def reduce_gradients(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    expert_group: dist.ProcessGroup | None = None,
    op: Literal["mean", "sum"] = "mean",
    dense: bool = True,
) -> None:
    """Makes the gradients on every rank those of the mean (or sum) of the ranks' losses. Collective.

    Gradients of dense parameters are all-reduced. Gradients of experts (`expert_parameters`) already count the tokens
    of all ranks of the layer's buffer, so they are only scaled for the mean. If the buffer has fewer ranks than
    `group`, they are also all-reduced over `expert_group`. With one rank and without `torch.distributed` the function
    does nothing. A layer is any submodule that is a `LocalExperts`, or has a `Buffer` or a `TokenDispatcher` as an
    attribute.

    If ranks have unequal numbers of tokens, divide each rank's summed loss by the number of tokens of all ranks, and
    use `op="sum"`.

    Args:
        module: The module whose gradients are reduced, in place. A missing gradient counts as zero.
        group: All ranks that train the module. Default: the default process group.
        expert_group: The ranks that have the same experts, this rank among them. Needed if `group` has several
            expert-parallel groups.
        op: "mean" or "sum".
        dense: False leaves the gradients of dense parameters as they are, because FSDP or DistributedDataParallel has
            averaged them.

    Raises:
        CallerError: `op` is neither "mean" nor "sum"; the groups do not fit the layer's buffer; a dense gradient is a
            `DTensor`; the buffer of a layer has several ranks, and `torch.distributed` is not initialized; a parameter
            inside of a `LocalExperts` is not marked; the gradients are reduced already; or, in the first call for a
            module, a dense parameter, a setting of a layer, or the shape or type of a parameter is not equal on all
            ranks.
        PeerError: Another rank died, left, failed, stalled or is late. Ranks on GPUs are not watched.

    Warns:
        UserWarning: A layer sends tokens to several ranks, and none of its parameters is marked as an expert's. Then
            the gradients of different experts are averaged. Set `expert_parallel = False` on the layer if all of its
            parameters are dense. Or gradients of experts seem to have been reduced before.
    """
    if op not in ("mean", "sum"):
        raise CallerError(f'op is {op!r}, must be "mean" or "sum"')
    if any(hasattr(part, "migration") for part in module.modules() if isinstance(part, LocalExperts)):
        raise CallerError(
            "reduce_gradients: the module has a HybridMoELayer, whose gradients its migration reduces: call "
            "migration.reduce_gradients(module)"
        )
    buffers = _buffers(module)
    if not _has_group("reduce_gradients", buffers):
        return
    watch = Watch(module, buffers)
    scale = 1.0 / dist.get_world_size(group) if op == "mean" else 1.0
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    for buffer in buffers:
        _check_groups(buffer, device, group, expert_group)
    experts = {id(parameter) for parameter in expert_parameters(module)}
    _check_marks(module, experts)
    if dense and (unmarked := unmarked_layers(module, experts)) is not None:
        warnings.warn(
            f"no parameter of {unmarked} is marked as an expert's, although tokens go from there to the experts of "
            "several ranks, so all gradients are averaged over the ranks: derive the experts from LocalExperts, or set "
            "parameter.expert_parallel = True on each of their parameters; if all ranks train the same parameters, set "
            "expert_parallel = False on the module",
            stacklevel=3,
        )
    if (unequal := unequal_layers(module, experts, group, watch, device, dense=dense)) is not None:
        raise CallerError(f"reduce_gradients: {unequal}")
    owned: list[nn.Parameter] = []
    replicated: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        of_expert = id(parameter) in experts
        if not parameter.requires_grad or not (of_expert or dense):
            continue
        if not of_expert and _is_sharded(parameter):
            raise CallerError(
                f"reduce_gradients: {name} is a DTensor. If FSDP sharded it, FSDP averages its gradient: pass "
                "dense=False. If it is tensor-parallel, reduce its gradient over the data-parallel ranks, and pass "
                "dense=False"
            )
        if parameter.grad is None:  # other ranks may have used the parameter, and all ranks must reduce the same bytes
            parameter.grad = torch.zeros_like(parameter)
        if of_expert:
            owned.append(parameter)
        else:
            replicated[name] = parameter
    if (differing := _first_that_differs(_begun, module, lambda: {**replicated}, group, watch)) is not None:
        raise CallerError(f"reduce_gradients: {unequal_start(*differing)}")
    _check_reduced_once(owned)
    of_experts = _gradients_of(owned)
    if expert_group is None:
        for gradient in of_experts:
            gradient.mul_(scale)
    else:
        _all_reduce(of_experts, expert_group, scale, watch)
    _all_reduce(_gradients_of(replicated.values()), group, scale, watch)
    for parameter in owned:
        assert parameter.grad is not None, "a missing one was made"
        _reduced[parameter] = weakref.ref(parameter.grad), parameter.grad._version


# The groups whose ranks have compared their dense parameters, and their dense gradients, by module.
_begun: Groups = weakref.WeakKeyDictionary()
_clipped: Groups = weakref.WeakKeyDictionary()


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _first_that_differs(
    done: Groups,
    module: nn.Module,
    named: Callable[[], dict[str, Tensor]],
    group: dist.ProcessGroup | None,
    watch: Watch,
) -> tuple[str, int, int] | None:
    """Compares tensors over the ranks, unless `done` has the module and the group. Returns the name of one that differs
    between ranks, and two of these ranks.
    """
    group, groups = groups_of(done, module, group)
    if group in groups or not (tensors := named()):
        return None
    own = sums_of_bits(tensors.values())
    largest, smallest = extremes(own, group, watch)
    differs = (largest != smallest).nonzero()
    if len(differs):
        at = int(differs[0])
        of_rank = own.new_zeros(dist.get_world_size(group))
        of_rank[dist.get_rank(group)] = own[at]
        watch.all_reduce(of_rank, dist.ReduceOp.SUM, group)
        other = int((of_rank != of_rank[0]).nonzero()[0])
        return [*tensors][at], dist.get_global_rank(group, 0), dist.get_global_rank(group, other)
    groups.add(group)
    return None


# The gradients of experts that were reduced last, and their versions.
_reduced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _check_reduced_once(parameters: Iterable[nn.Parameter]) -> None:
    """Finds gradients of experts that were reduced before: the reduction would scale them again."""
    for parameter in parameters:
        before, version = _reduced.get(parameter, (None, 0))
        if before is None or before() is not parameter.grad:
            continue
        if parameter.grad is not None and parameter.grad._version == version:
            raise CallerError(
                "reduce_gradients: the gradients of the experts are reduced already: call it once per step, and "
                "zero_grad before the next step"
            )
        warnings.warn(
            "gradients of experts were reduced before and not reset since: call reduce_gradients once per step, after "
            "the backward pass of the last micro-batch. (zero_grad(set_to_none=False) keeps the tensors, so that a "
            "reset cannot be detected: use set_to_none=True)",
            stacklevel=4,
        )
        return


def _check_marks(module: nn.Module, experts: set[int]) -> None:
    """Refuses parameters inside of experts that are marked neither as an expert's nor as dense."""
    for part in module.modules():
        for name, parameter in part.named_parameters() if isinstance(part, LocalExperts) else ():
            if parameter.requires_grad and id(parameter) not in experts and not hasattr(parameter, "expert_parallel"):
                raise CallerError(
                    f"reduce_gradients: nothing says whether {name}, a parameter inside of {type(part).__name__}, is "
                    "an expert's: set parameter.expert_parallel = True if it is, and False if all ranks train the same "
                    "one (copy.deepcopy loses the attribute)"
                )


def sums_of_bits(parameters: Iterable[Tensor]) -> Tensor:
    """Returns the sums of the tensors' bits, read as integers: int64 [number of tensors], on the first one's device.

    Tensors that were initialized from different random numbers have different sums.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    sums = []
    for parameter in parameters:
        flat = parameter.detach().flatten()
        sums.append(flat.view(integers.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64))
    return torch.stack([one.to(sums[0].device) for one in sums])


def unequal_start(name: str, rank: int, other: int) -> str:
    """What the error says about a dense parameter that differs between two ranks."""
    return (
        f"the dense parameter {name} of rank {other} differs from that of rank {rank}, so the ranks would train "
        "different models: call torch.manual_seed with the same number on all ranks before the model is made, or copy "
        "rank 0's dense parameters to the others (dist.broadcast); if the parameter is an expert's, mark it "
        "(LocalExperts, or parameter.expert_parallel = True)"
    )


def _all_reduce(gradients: list[Tensor], group: dist.ProcessGroup | None, scale: float, watch: Watch) -> None:
    """Sums gradients over the ranks and scales the sums, in one all-reduce for each type."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_type.values():
        flat = torch.cat([gradient.flatten() for gradient in alike])
        watch.all_reduce(flat, dist.ReduceOp.SUM, group)
        for gradient, reduced in zip(alike, flat.mul_(scale).split([g.numel() for g in alike]), strict=True):
            gradient.copy_(reduced.view_as(gradient))


@torch.no_grad()
def clip_gradients(
    module: nn.Module,
    max_norm: float,
    group: dist.ProcessGroup | None = None,
    *,
    expert_group: dist.ProcessGroup | None = None,
    pipeline: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scales gradients so that their norm over the parameters of all ranks is at most `max_norm`. Collective.

    Call `reduce_gradients` first. `torch.nn.utils.clip_grad_norm_` counts only this rank's experts, so it scales the
    dense gradients differently on each rank. The norm counts every expert once, even if several ranks have it, and all
    shards of a `DTensor`.

    Args:
        module: The module whose gradients are scaled, in place.
        max_norm: The largest norm.
        group: All ranks that train the module: with pipeline stages, those of this stage. Default: the default process
            group.
        expert_group: As for `reduce_gradients`.
        pipeline: With pipeline stages, one rank of each stage, this one included; every rank is in one such group. The
            norm is then that of all stages. Default: the norm of this module alone.

    Returns:
        The norm before scaling: a float32 scalar, the same on every rank.

    Raises:
        CallerError: The groups do not fit the layer's buffer; a gradient is a `DTensor` of partial sums; the buffer of
            a layer has several ranks, and `torch.distributed` is not initialized; or, in the first call for a module, a
            dense gradient is not equal on all ranks.
        PeerError: As for `reduce_gradients`.
    """
    buffers = _buffers(module)
    has_group = _has_group("clip_gradients", buffers)
    replicas = dist.get_world_size(expert_group) if has_group and expert_group is not None else 1
    if has_group:
        for buffer in buffers:
            _check_replicas("clip_gradients", buffer, group, expert_group)
    experts = {id(parameter) for parameter in expert_parameters(module)}
    device = next(module.parameters()).device
    watch = Watch(module, buffers)
    if has_group:

        def dense() -> dict[str, Tensor]:
            return {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and id(parameter) not in experts and not _is_sharded(parameter)
            }

        if (unequal := _first_that_differs(_clipped, module, dense, group, watch)) is not None:
            name, rank, other = unequal
            raise CallerError(
                f"clip_gradients: the gradient of {name} of rank {other} differs from that of rank {rank}: call "
                "reduce_gradients first"
            )
    of_experts, of_dense = torch.zeros(2, dtype=torch.float32, device=device).unbind()
    # Sums of the squares of this rank's shards, by mesh and by which of its dimensions are sharded.
    of_shards: dict[tuple[DeviceMesh, tuple[bool, ...]], Tensor] = {}
    own: list[Tensor] = []
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        if grad is None:
            continue
        own.append(local_part(grad))
        square = own[-1].float().square().sum()
        if id(parameter) in experts:
            of_experts += square / replicas
        elif _is_sharded(grad):
            placements = grad.placements
            if any(placement.is_partial() for placement in placements):
                raise CallerError(
                    f"clip_gradients: the gradient of {name} is a DTensor of partial sums; reduce it first"
                )
            key = (grad.device_mesh, tuple(placement.is_shard() for placement in placements))
            of_shards[key] = of_shards.get(key, 0) + square
        else:
            of_dense += square
    if has_group:
        watch.all_reduce(of_experts, dist.ReduceOp.SUM, group)
    for (mesh, sharded), square in of_shards.items():
        partial = [Partial() if split else Replicate() for split in sharded]
        of_dense += DTensor.from_local(square, mesh, partial, run_check=False).full_tensor()
    square = of_experts + of_dense
    if pipeline is not None:
        watch.all_reduce(square, dist.ReduceOp.SUM, pipeline)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part_of_grad in own:
        part_of_grad.mul_(factor.to(part_of_grad.dtype))
    return norm


def _buffers(module: nn.Module) -> list[Buffer]:
    """The buffers that say which ranks share the experts of the module's layers, each once."""
    found: dict[int, Buffer] = {}
    for part in module.modules():
        if isinstance(part, LocalExperts):
            used = [part.buffer]
        elif any(isinstance(child, LocalExperts) for child in part.children()):
            # Skips the dispatcher of these experts: in a HybridMoELayer it has fewer ranks than share the experts.
            continue
        else:
            values = [value.buffer if isinstance(value, TokenDispatcher) else value for value in vars(part).values()]
            used = [value for value in values if isinstance(value, Buffer)]
        found |= {id(buffer): buffer for buffer in used}
    return list(found.values())


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return dist.is_available() and isinstance(tensor, DTensor)


def _has_group(function: str, buffers: Iterable[Buffer]) -> bool:
    """Whether `torch.distributed` is initialized. Several ranks without it could not reduce anything."""
    if dist.is_available() and dist.is_initialized():
        return True
    ranks = max(map(owners, buffers), default=1)
    if ranks > 1:
        raise CallerError(
            f"{function}: the layer's buffer has {ranks} ranks, and torch.distributed is not initialized: call "
            "init_process_group before the buffer is made (threads of Buffer.threads have no process group)"
        )
    return False


def _check_replicas(
    function: str, buffer: Buffer, group: dist.ProcessGroup | None, expert_group: dist.ProcessGroup | None
) -> None:
    """Checks that the ranks of the buffer and of `expert_group` make up the group."""
    ranks, sharing = dist.get_world_size(group), owners(buffer)
    replicas = 1 if expert_group is None else dist.get_world_size(expert_group)
    if ranks == sharing * replicas:
        return
    if ranks % sharing:
        raise CallerError(
            f"{function}: the group has {ranks} ranks, and the layer's buffer {sharing}, which does not divide them: "
            "pass group=, all ranks that train the module"
        )
    given = "is missing" if expert_group is None else f"has {replicas} ranks"
    raise CallerError(
        f"{function}: the group has {ranks} ranks, and the layer's buffer {sharing}, so {ranks // sharing} ranks have "
        f"each expert, and expert_group {given}: pass the group of the ranks that have the experts of this rank, or, "
        "if the ranks of the buffer train a model of their own, pass group="
    )


# The numbers of experts and the first experts that the ranks of a group have compared.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


def _check_groups(
    buffer: Buffer, device: torch.device, group: dist.ProcessGroup | None, expert_group: dist.ProcessGroup | None
) -> None:
    """Checks the groups of a reduction. The first call compares the experts of the ranks of `expert_group`."""
    _check_replicas("reduce_gradients", buffer, group, expert_group)
    if expert_group is None:
        return
    own = (buffer.num_experts, buffer.local_experts[0])
    compared = _compared.setdefault(expert_group, set())
    if own in compared:
        return
    gathered = [torch.empty(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(expert_group))]
    dist.all_gather(gathered, torch.tensor(own, device=device), group=expert_group)
    found = [tuple(one.tolist()) for one in gathered]
    if any(one != own for one in found):
        first = ", ".join(str(start) for _, start in found)
        raise CallerError(
            f"reduce_gradients: the first experts of the ranks of expert_group are {first}; expected ranks that have "
            "the same experts, one of each expert-parallel group"
        )
    compared.add(own)
