"""A mixture-of-experts layer on top of `Buffer`, short enough to copy from.

    buffer = Buffer(dist.group.WORLD, num_experts=64)
    layer = MoELayer(buffer, hidden=2048, intermediate=1408, topk=8)
    y = layer(x)                                   # any shape [..., hidden], any number of tokens on any rank
    (loss + layer.balance_loss).backward()
    reduce_gradients(layer)                        # dense parameters; the experts' gradients are whole already

`TokenDispatcher` is the part between router and experts, for layers of your own.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (torch.autograd.Function.apply, Tensor.split and nn.Module.__call__ have no types.)

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ._weight_rows import weight_rows
from .buffer import Buffer, Dispatched
from .errors import CallerError

__all__ = ["GroupedExperts", "MoELayer", "Routed", "Router", "TokenDispatcher", "reduce_gradients"]


class Routed(NamedTuple):
    """What the router decided for `[T]` tokens."""

    topk_idx: Tensor  # int64 [T, K]; -1 where the expert was full
    topk_weights: Tensor  # f32 [T, K]
    balance_loss: Tensor  # f32 scalar


class Router(nn.Module):
    """Softmax over all experts, then the `topk` largest, in f32 whatever the tokens' type.

    `capacity_factor` bounds what one rank sends to one expert: that many times an even share of its choices. Choices
    beyond it, of later tokens, are dropped: their index becomes -1. No communication is needed to know them.

    `balance_coef` weighs the load-balancing loss of the Switch Transformer, `num_experts * sum(share * probability)`:
    1 when all experts are equally likely. With a `balance_group` the shares are those of all its ranks' tokens.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        normalize: bool = True,
        capacity_factor: float | None = None,
        balance_coef: float = 0.0,
        balance_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= topk <= num_experts:
            raise CallerError(f"topk is {topk}, must be from 1 to the number of experts, {num_experts}")
        self.num_experts, self.topk, self.normalize = num_experts, topk, normalize
        self.capacity_factor, self.balance_coef, self.balance_group = capacity_factor, balance_coef, balance_group
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device))
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def forward(self, tokens: Tensor) -> Routed:
        probs = F.linear(tokens.float(), self.weight.float()).softmax(dim=-1)
        weights, idx = probs.topk(self.topk, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        balance_loss = self._balance_loss(probs, idx)
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * idx.numel() / self.num_experts)
            idx = idx.masked_fill(_place_in_expert(idx) >= capacity, -1)
        return Routed(idx, weights, balance_loss)

    def _balance_loss(self, probs: Tensor, idx: Tensor) -> Tensor:
        if self.balance_coef == 0.0:
            return probs.new_zeros(())
        choices = torch.zeros_like(probs).scatter_(1, idx, 1.0).sum(dim=0)
        if self.balance_group is not None:
            dist.all_reduce(choices, group=self.balance_group)
        share = choices / choices.sum().clamp_min(1)
        mean_probs = probs.sum(dim=0) / max(1, len(probs))
        return self.balance_coef * self.num_experts * (share * mean_probs).sum()


def _place_in_expert(idx: Tensor) -> Tensor:
    """For each choice, how many earlier choices are of the same expert."""
    experts, order = idx.flatten().sort(stable=True)
    place = torch.arange(len(order), device=idx.device) - torch.searchsorted(experts, experts)
    return torch.empty_like(place).scatter_(0, order, place).view_as(idx)


class GroupedExperts(nn.Module):
    """This rank's experts, `down(silu(gate(x)) * up(x))` each, on rows that are grouped by expert."""

    def __init__(
        self,
        buffer: Buffer,
        hidden: int,
        intermediate: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        local = buffer.num_local_experts
        self.gate_up = nn.Parameter(torch.empty(local, hidden, 2 * intermediate, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(local, intermediate, hidden, device=device, dtype=dtype))
        for parameter in self.parameters():
            parameter.expert_parallel = True  # type: ignore[attr-defined]  # reduce_gradients asks for it
        self._init_experts(buffer.local_experts)

    @torch.no_grad()
    def _init_experts(self, experts: range) -> None:
        # An expert's weights follow from the seed and its global index alone, and every rank draws one number from the
        # global generator: so ranks that were seeded alike hold the same model for any number of them.
        seed = int(torch.randint(2**62, (), device="cpu"))
        for local, expert in enumerate(experts):
            own = torch.Generator("cpu").manual_seed(seed + expert)
            for weight in (self.gate_up[local], self.down[local]):
                weight.copy_(torch.randn(weight.shape, generator=own, device="cpu") * weight.shape[0] ** -0.5)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """`rows` start with `tokens_per_expert` rows for each expert; outputs of rows after these mean nothing."""
        rows = rows.to(self.down.dtype)
        compute = self._grouped if _has_grouped_mm(rows) else self._one_by_one
        return compute(rows, tokens_per_expert)

    def _one_by_one(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        counts = tokens_per_expert.tolist()
        *segments, unused = rows.split([*counts, len(rows) - sum(counts)])
        outputs = []
        for expert, segment in enumerate(segments):
            gate, up = (segment @ self.gate_up[expert]).chunk(2, dim=-1)
            outputs.append((F.silu(gate) * up) @ self.down[expert])
        return torch.cat([*outputs, torch.zeros_like(unused)])

    def _grouped(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """One launch for all experts, and no wait for the counts."""
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(rows, self.gate_up, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends)


def _has_grouped_mm(rows: Tensor) -> bool:
    """Hopper and later, in bf16; PyTorch 2.8 and later."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(rows.device) >= (9, 0)


class TokenDispatcher:
    """Tokens to the ranks of their experts, and the experts' outputs back, weighted and summed.

        received = dispatcher.dispatch(tokens, topk_idx, topk_weights)
        outputs = experts(received.tokens, received.tokens_per_expert)
        tokens = dispatcher.combine(outputs, received)

    It has no state between the two: several micro-batches may be under way. Weights are applied to the outputs, in f32,
    and get their gradients. With a `capacity`, in rows, nothing waits for the GPU and shapes are static; `overflow` of
    what was received says whether it dropped rows. `dtype` is that of the rows on their way, default: the tokens'.
    """

    def __init__(
        self, buffer: Buffer, *, pad_multiple: int = 1, capacity: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.buffer, self.pad_multiple, self.capacity, self.dtype = buffer, pad_multiple, capacity, dtype

    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return self.buffer.dispatch_with_permute(
            tokens.to(self.dtype or tokens.dtype),
            topk_idx,
            topk_weights,
            pad_multiple=self.pad_multiple,
            capacity=self.capacity,
        )

    def combine(self, outputs: Tensor, received: Dispatched) -> Tensor:
        if received.probs is None:
            raise CallerError(
                "received: it came without weights, so there is nothing to weigh the experts' outputs with"
            )
        weighted = weight_rows(outputs, received.probs, self.dtype or outputs.dtype, self.buffer)
        return self.buffer.combine_with_unpermute(weighted, received.handle).tokens


class _SharedExpert(nn.Module):
    """The expert that every token visits; it needs no dispatch."""

    def __init__(self, hidden: int, intermediate: int, **factory: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False, **factory)
        self.down = nn.Linear(intermediate, hidden, bias=False, **factory)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = self.gate_up(tokens).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MoELayer(nn.Module):
    """Router, dispatch, this rank's experts, combine. Collective: every rank of the buffer calls it, with any tokens.

    `topk`, `normalize`, `capacity_factor`, `balance_coef`, `balance_group`: see `Router`. `shared_intermediate` adds an
    expert of that width for all tokens. `capacity`, `comm_dtype`, `pad_multiple`: see `TokenDispatcher`.

    After a call, `balance_loss` is to be added to the loss, and `overflow` says whether the capacity dropped rows.
    """

    balance_loss: Tensor
    overflow: Tensor

    def __init__(
        self,
        buffer: Buffer,
        hidden: int,
        intermediate: int,
        *,
        topk: int,
        normalize: bool = True,
        shared_intermediate: int = 0,
        capacity_factor: float | None = None,
        balance_coef: float = 0.0,
        balance_group: dist.ProcessGroup | None = None,
        capacity: int | None = None,
        comm_dtype: torch.dtype | None = None,
        pad_multiple: int = 16,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(
            hidden,
            buffer.num_experts,
            topk,
            normalize=normalize,
            capacity_factor=capacity_factor,
            balance_coef=balance_coef,
            balance_group=balance_group,
            device=buffer.device,
        )
        self.dispatcher = TokenDispatcher(buffer, pad_multiple=pad_multiple, capacity=capacity, dtype=comm_dtype)
        self.experts = GroupedExperts(buffer, hidden, intermediate, device=buffer.device, dtype=dtype)
        self.shared = (
            _SharedExpert(hidden, shared_intermediate, device=buffer.device, dtype=dtype)
            if shared_intermediate
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routed = self.router(tokens)
        received = self.dispatcher.dispatch(tokens, routed.topk_idx, routed.topk_weights)
        outputs = self.experts(received.tokens, received.tokens_per_expert)
        y = self.dispatcher.combine(outputs, received).to(x.dtype)
        if self.shared is not None:
            y = y + self.shared(tokens)
        self.balance_loss, self.overflow = routed.balance_loss, received.overflow
        return y.view_as(x)


def reduce_gradients(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, op: Literal["mean", "sum"] = "mean"
) -> None:
    """Makes the gradients on every rank those of the mean (or sum) of the ranks' losses.

    Dense parameters are all-reduced. Experts (`parameter.expert_parallel`) are not: their gradients hold the tokens of
    all ranks already, and are only scaled for the mean. With unequal numbers of tokens, divide each rank's summed loss
    by the tokens of all ranks and take the sum. Without `torch.distributed` there is one rank, and nothing to do.
    """
    if op not in ("mean", "sum"):
        raise CallerError(f'op is {op!r}, must be "mean" or "sum"')
    if not dist.is_initialized():
        return
    scale = 1.0 / dist.get_world_size(group) if op == "mean" else 1.0
    dense: dict[torch.dtype, list[Tensor]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # unused on this rank, but perhaps not on the others
            parameter.grad = torch.zeros_like(parameter)
        if getattr(parameter, "expert_parallel", False):
            parameter.grad.mul_(scale)
        else:
            dense.setdefault(parameter.dtype, []).append(parameter.grad)
    for gradients in dense.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, reduced in zip(gradients, flat.mul_(scale).split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(reduced.view_as(gradient))
