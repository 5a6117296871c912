"""The implementations of the comparison: this package, `all_to_all_single` of torch.distributed, the real `deep_ep`."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (torch.autograd.Function.apply, Tensor.split and nn.Module.__call__ have no types.)

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ._weight_rows import weight_rows
from .buffer import Buffer
from .moe import TokenDispatcher


@dataclass(frozen=True)
class Case:
    """The sizes of the comparison. `tokens` is the number on each rank."""

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    skew: float
    dtype: str
    device: str
    iters: int
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "f32": torch.float32}[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.torch_dtype.itemsize


class Inputs(NamedTuple):
    """One rank's tokens and routing, and the gradient of the layer's output."""

    tokens: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, case: Case, rank: int, device: torch.device) -> Inputs:
        """Draws random inputs. The popularity of experts follows Zipf's law with exponent `skew` (0: uniform), in the
        same order on all ranks."""
        shared = torch.Generator().manual_seed(case.seed)
        own = torch.Generator().manual_seed(case.seed + 1 + rank)
        popularity = torch.arange(1, case.experts + 1)[torch.randperm(case.experts, generator=shared)].pow(-case.skew)
        gumbel = -torch.rand(case.tokens, case.experts, generator=own).clamp_min(1e-9).log().neg().log()
        topk_idx = (popularity.log() + gumbel).topk(case.topk, dim=1).indices
        topk_weights = torch.rand(case.tokens, case.topk, generator=own) + 0.1
        topk_weights /= topk_weights.sum(dim=1, keepdim=True)
        tokens, grad = torch.randn(2, case.tokens, case.hidden, generator=own).to(device, case.torch_dtype)
        return cls(tokens, topk_idx.to(device), topk_weights.to(device), grad)


# A function that multiplies rows by their weights. Arguments: rows, float32 weights, the type of the result.
Weigh = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def by_pytorch(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows * weights[:, None]).to(dtype)


# The experts: a function of the rows, grouped by local expert, and of the number of rows of each expert.
Experts = Callable[[Tensor, Tensor], Tensor]


def identity(rows: Tensor, counts: Tensor) -> Tensor:
    return rows


class Implementation(Protocol):
    """One implementation of the operators. A plan is the result of its preprocess.

    If `preprocesses` is False, a plan can be made only by a dispatch.
    """

    name: str
    preprocesses: bool

    def preprocess(self, inputs: Inputs) -> Any: ...
    def dispatch(self, plan: Any, inputs: Inputs) -> Tensor: ...
    def preprocess_and_dispatch(self, inputs: Inputs) -> tuple[Any, Tensor]: ...
    def outputs(self, rows: Tensor) -> Tensor:
        """Copies `rows` to the memory where experts should best write their outputs."""
        ...

    def combine(self, plan: Any, rows: Tensor) -> Tensor: ...
    def layer(self, inputs: Inputs, experts: Experts) -> Tensor:
        """Runs a layer; differentiable with respect to tokens and weights."""
        ...

    def weighing(self, weigh: Weigh) -> Implementation:
        """Returns the implementation with a different multiplication by weights in its layer, if it has that step."""
        ...


class Ours:
    """This package: `Buffer`, with the layer of `TokenDispatcher`."""

    name = "hybrid_ep"
    preprocesses = True

    def __init__(self, case: Case, group: dist.ProcessGroup, device: torch.device) -> None:
        self.buffer = Buffer(group, num_experts=case.experts, device=device)
        self.dispatcher = TokenDispatcher(self.buffer)
        self.weigh: Weigh = self.fused

    def fused(self, rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiplies as `TokenDispatcher` does: in one pass forward and one backward."""
        return weight_rows(rows, weights, dtype, self.buffer)

    def weighing(self, weigh: Weigh) -> Ours:
        other = copy.copy(self)
        other.weigh = weigh
        return other

    def preprocess(self, inputs: Inputs) -> Any:
        return self.buffer.preprocess(inputs.topk_idx, inputs.topk_weights, pad_multiple=1)

    def dispatch(self, plan: Any, inputs: Inputs) -> Tensor:
        return self.buffer.dispatch_with_permute(inputs.tokens, handle=plan).tokens

    def preprocess_and_dispatch(self, inputs: Inputs) -> tuple[Any, Tensor]:
        received = self.buffer.dispatch_with_permute(inputs.tokens, inputs.topk_idx, inputs.topk_weights)
        return received.handle, received.tokens

    def outputs(self, rows: Tensor) -> Tensor:
        return self.buffer.empty(*rows.shape, dtype=rows.dtype).copy_(rows)

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return self.buffer.combine_with_unpermute(rows, plan).tokens

    def layer(self, inputs: Inputs, experts: Experts) -> Tensor:
        received = self.dispatcher.dispatch(inputs.tokens, inputs.topk_idx, inputs.topk_weights)
        assert received.tokens_per_expert is not None and received.probs is not None, "permuted, with weights"
        outputs = experts(received.tokens, received.tokens_per_expert)
        weighted = self.weigh(outputs, received.probs, outputs.dtype)
        return self.buffer.combine_with_unpermute(weighted, received.handle).tokens


class AllToAllPlan(NamedTuple):
    """The routing of this rank, for exchanges with `all_to_all_single`."""

    order: Tensor  # the T * K choices, sorted by expert, and so by rank
    inverse: Tensor  # the place of each choice in that order
    send: list[int]  # rows to each rank
    receive: list[int]  # rows from each rank
    regroup: Tensor  # the permutation of received rows from the order (source rank, expert) to the order of experts
    ungroup: Tensor  # the inverse of `regroup`
    counts: Tensor  # rows of each local expert, on the CPU


class AllToAll:
    """The usual dispatcher of training programs: sort by expert, exchange counts, exchange rows, sort again.

    The sum over a token's experts is a batched product, and the backward pass of a permutation is a gather by its
    inverse. Autograd's own choice, scattered additions, is slower and, on GPUs, not deterministic.
    """

    preprocesses = True

    def weighing(self, weigh: Weigh) -> AllToAll:
        return self  # the batched product applies the weights

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self.name = f"all_to_all ({dist.get_backend(group)})"
        self.case, self.group = case, group

    def preprocess(self, inputs: Inputs) -> AllToAllPlan:
        ranks, local = self.case.ranks, self.case.experts // self.case.ranks
        choices = inputs.topk_idx.flatten()
        order = choices.argsort(stable=True)
        own = choices.bincount(minlength=self.case.experts)
        incoming = torch.empty_like(own)
        dist.all_to_all_single(incoming, own, group=self.group)
        per_rank = torch.stack([own, incoming]).view(2, ranks, local).cpu()
        send, receive = per_rank.sum(dim=2).tolist()
        expert = torch.arange(local, device=own.device).repeat(ranks)
        regroup = expert.repeat_interleave(incoming, output_size=sum(receive)).argsort(stable=True)
        return AllToAllPlan(order, _inverse(order), send, receive, regroup, _inverse(regroup), per_rank[1].sum(dim=0))

    def dispatch(self, plan: AllToAllPlan, inputs: Inputs) -> Tensor:
        return self._forth(plan, inputs.tokens)

    def preprocess_and_dispatch(self, inputs: Inputs) -> tuple[AllToAllPlan, Tensor]:
        plan = self.preprocess(inputs)
        return plan, self._forth(plan, inputs.tokens)

    def outputs(self, rows: Tensor) -> Tensor:
        return rows.clone()

    def combine(self, plan: AllToAllPlan, rows: Tensor) -> Tensor:
        return self._back(plan, rows).sum(dim=1)

    def layer(self, inputs: Inputs, experts: Experts) -> Tensor:
        plan = self.preprocess(inputs)
        outputs = self._back(plan, experts(self._forth(plan, inputs.tokens), plan.counts))
        return torch.bmm(inputs.topk_weights[:, None].to(outputs.dtype), outputs).squeeze(1)

    def _forth(self, plan: AllToAllPlan, tokens: Tensor) -> Tensor:
        copies = _Copies.apply(tokens, plan.order, plan.inverse)
        arrived = _Exchange.apply(copies, plan.send, plan.receive, self.group)
        return _Permuted.apply(arrived, plan.regroup, plan.ungroup)

    def _back(self, plan: AllToAllPlan, rows: Tensor) -> Tensor:
        """Returns the rows of each token's choices, `[T, K, H]`."""
        leaving = _Permuted.apply(rows, plan.ungroup, plan.regroup)
        returned = _Exchange.apply(leaving, plan.receive, plan.send, self.group)
        return _Permuted.apply(returned, plan.inverse, plan.order).view(-1, self.case.topk, self.case.hidden)


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


class _Permuted(torch.autograd.Function):
    """`rows[permutation]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, permutation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Copies(torch.autograd.Function):
    """Copies the token of each choice, in the given order of choices."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = (len(tokens), -1, tokens.shape[1])
        return tokens.index_select(0, order // (len(order) // max(1, len(tokens))))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).view(ctx.shape).sum(dim=1), None, None


class _Exchange(torch.autograd.Function):
    """`all_to_all_single`; the gradient is the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = (receive, send, group)
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.back), None, None, None


class DeepEP:
    """The real `deep_ep.HybridEPBuffer`. It needs a dense routing, which is made outside the timed calls."""

    name = "deep_ep"
    preprocesses = False

    def __init__(
        self, module: Any, case: Case, group: dist.ProcessGroup, inputs: Inputs, weigh: Weigh = by_pytorch
    ) -> None:
        self.weigh = weigh
        self.local = case.experts // case.ranks
        self.buffer = module.HybridEPBuffer(
            group=group,
            hidden_dim=case.hidden,
            max_num_of_tokens_per_rank=case.tokens,
            num_local_experts=self.local,
        )
        dense = inputs.topk_weights.new_zeros(case.tokens, case.experts)
        self.routing_map = dense.bool().scatter_(1, inputs.topk_idx, True)
        self.probs = dense.scatter(1, inputs.topk_idx, inputs.topk_weights)

    def preprocess(self, inputs: Inputs) -> Any:
        return self.preprocess_and_dispatch(inputs)[0]

    def dispatch(self, plan: Any, inputs: Inputs) -> Tensor:
        return self.redispatch(plan, inputs.tokens)

    def preprocess_and_dispatch(self, inputs: Inputs) -> tuple[Any, Tensor]:
        rows, _, _, _, handle = self.first_dispatch(inputs.tokens, self.probs)
        return (handle, len(rows)), rows

    def outputs(self, rows: Tensor) -> Tensor:
        return rows.clone()

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return self.combine_with_probs(plan, rows, None)[0]

    def layer(self, inputs: Inputs, experts: Experts) -> Tensor:
        probs = torch.zeros_like(self.probs).scatter(1, inputs.topk_idx, inputs.topk_weights)
        plan: list[Any] = []
        rows, row_probs = _DeepEPDispatch.apply(inputs.tokens, probs, self, plan)
        outputs = experts(rows, plan[2])
        weighted = self.weigh(outputs, row_probs, outputs.dtype)
        return _DeepEPCombine.apply(weighted, self, plan)

    def weighing(self, weigh: Weigh) -> DeepEP:
        other = copy.copy(self)
        other.weigh = weigh
        return other

    def first_dispatch(self, tokens: Tensor, probs: Tensor) -> Any:
        return self.buffer.dispatch_with_permute(
            hidden=tokens,
            routing_map=self.routing_map,
            probs=probs,
            num_of_experts_per_rank=self.local,
            fuse_permute_dispatch=True,
        )

    def redispatch(self, plan: Any, tokens: Tensor) -> Tensor:
        handle, rows = plan[:2]
        return self.buffer.dispatch_with_permute(
            hidden=tokens, handle=handle, num_permuted_tokens=rows, fuse_permute_dispatch=True
        )[0]

    def combine_with_probs(self, plan: Any, rows: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=plan[0], fuse_unpermute_combine=True)


class _DeepEPDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, deep_ep: DeepEP, plan: list[Any]) -> tuple[Tensor, Tensor]:
        rows, row_probs, _, counts, handle = deep_ep.first_dispatch(tokens, probs)
        plan.extend((handle, len(rows), counts))
        ctx.deep_ep, ctx.plan = deep_ep, plan
        return rows, row_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        tokens, probs = ctx.deep_ep.combine_with_probs(ctx.plan, grad.contiguous(), grad_probs.contiguous())
        return tokens, probs, None, None


class _DeepEPCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, deep_ep: DeepEP, plan: list[Any]) -> Tensor:
        ctx.deep_ep, ctx.plan = deep_ep, plan
        return deep_ep.combine(plan, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.deep_ep.redispatch(ctx.plan, grad.contiguous()), None, None


def real_deep_ep() -> tuple[Any | None, str]:
    """Imports the real `deep_ep`. Returns the module, or None and the reason why there is none."""
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        return None, f"deep_ep: not compared, it cannot be imported ({error})"
    buffer = getattr(module, "HybridEPBuffer", None)
    if buffer is None:
        return None, "deep_ep: not compared, this version has no HybridEPBuffer (its branch hybrid-ep has one)"
    if buffer.__module__.split(".")[0] == __package__.split(".")[0]:
        return None, "deep_ep: not compared, it is this package's own drop-in"
    return module, ""
