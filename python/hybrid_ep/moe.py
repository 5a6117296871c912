"""A mixture-of-experts layer built on `Buffer`, short enough to copy from.

    buffer = Buffer(dist.group.WORLD, num_experts=64)
    layer = MoELayer(buffer, hidden=2048, intermediate=1408, topk=8)
    y = layer(x)                                   # any shape [..., hidden], any number of tokens on any rank
    (loss + layer.balance_loss).backward()
    reduce_gradients(layer)                        # all-reduces dense parameters; experts' gradients are complete

For layers of your own: `TokenDispatcher` is the part between the router and the experts, `LocalExperts` the base class
of experts.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (torch.autograd.Function.apply, Tensor.split and nn.Module.__call__ have no types.)

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ._gradients import clip_gradients, reduce_gradients
from ._sharing import SharedGroup
from .buffer import Buffer
from .dispatcher import TokenDispatcher
from .errors import CallerError
from .experts import GroupedExperts, LocalExperts, expert_parameters, local_part, parameter_groups

__all__ = [
    "GroupedExperts",
    "LocalExperts",
    "MoELayer",
    "Routed",
    "Router",
    "TokenDispatcher",
    "clip_gradients",
    "expert_parameters",
    "local_part",
    "parameter_groups",
    "reduce_gradients",
    "with_loss",
]


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.shape, loss.dtype, loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.loss
        return grad, torch.ones(shape, dtype=dtype, device=device)


def with_loss(y: Tensor, loss: Tensor) -> Tensor:
    """Returns `y`, whose backward pass also computes the gradients of `loss`, as if `loss` were added to the loss.

    For a part of a model that does not see the loss, such as an early stage of a pipeline: `with_loss(layer(x),
    layer.balance_loss)`. If the program divides the loss by the number of micro-batches, divide `loss`, too.

    Args:
        y: A floating-point tensor that the loss depends on.
        loss: A floating-point scalar.

    Raises:
        CallerError: `loss` is not a floating-point scalar.
    """
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CallerError(f"loss: expected a floating-point scalar, found {loss.dtype} of shape {list(loss.shape)}")
    return _WithLoss.apply(y, loss)


class Routed(NamedTuple):
    """The router's decision for T tokens."""

    topk_idx: Tensor
    """int64 [T, K]; -1 if the expert was full."""
    topk_weights: Tensor
    """float32 [T, K]."""
    balance_loss: Tensor
    """float32 scalar."""


class Router(nn.Module):
    """A softmax router: the `topk` experts with the largest probabilities, computed in float32 for any token type.

    Args:
        hidden: The width of a token.
        num_experts: E, the number of experts on all ranks.
        topk: K, the number of experts of each token.
        normalize: Whether the K weights of a token are divided by their sum.
        capacity_factor: Bounds what one rank sends to one expert: this factor times an even share of the rank's
            choices. Choices of later tokens beyond the bound get the index -1. This needs no communication.
        balance_coef: The factor of the load-balancing loss of the Switch Transformer (Fedus et al., 2021), which is
            `num_experts * sum(share * probability)` and equals 1 if all experts are equally likely.
        balance_group: If given, the shares count the tokens of all ranks of this group, by one all-reduce.
        device: The device of the weight.

    Raises:
        CallerError: `topk` is not between 1 and `num_experts`, or `hidden` or `capacity_factor` is not positive.
    """

    # Read by `_layers`.
    _equal_on_all_ranks: ClassVar = ("num_experts", "topk", "normalize", "capacity_factor", "balance_coef")

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
        if not 1 <= topk <= num_experts or topk != int(topk):
            raise CallerError(f"topk is {topk}, must be from 1 to the number of experts, {num_experts}")
        if hidden < 1:
            raise CallerError(f"hidden is {hidden}, must be 1 or more")
        if capacity_factor is not None and not 0.0 < capacity_factor < math.inf:
            raise CallerError(f"capacity_factor is {capacity_factor}, must be a positive number, or None for no bound")
        self.num_experts, self.topk, self.normalize = num_experts, topk, normalize
        self.capacity_factor, self.balance_coef = capacity_factor, balance_coef
        self._balance_group = SharedGroup(balance_group)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device))
        nn.init.normal_(self.weight, std=hidden**-0.5)

    @property
    def balance_group(self) -> dist.ProcessGroup | None:
        """The group whose tokens the load-balancing loss counts; None for this rank alone."""
        return self._balance_group.group

    def forward(self, tokens: Tensor) -> Routed:
        """Routes tokens.

        Args:
            tokens: Floating-point [T, hidden].

        Returns:
            The chosen experts, their weights, and the balance loss times `balance_coef`.
        """
        # Autocast would compute the products in half precision, and count tokens in it.
        with torch.autocast(tokens.device.type, enabled=False):
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
    """For each choice, counts the earlier choices of the same expert."""
    experts, order = idx.flatten().sort(stable=True)
    place = torch.arange(len(order), device=idx.device) - torch.searchsorted(experts, experts)
    return torch.empty_like(place).scatter_(0, order, place).view_as(idx)


class SharedExpert(nn.Module):
    """The expert that processes every token; it needs no dispatch. A part of `MoELayer`."""

    def __init__(self, hidden: int, intermediate: int, **factory: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False, **factory)
        self.down = nn.Linear(intermediate, hidden, bias=False, **factory)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = self.gate_up(tokens).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MoELayer(nn.Module):
    """A mixture-of-experts layer: router, dispatch, this rank's experts, combine.

    Forward and backward are collective: every rank of the buffer calls them in the same order, with any number of
    tokens. Parameters of the experts hold this rank's part; see `hybrid_ep.experts`.

    Attributes:
        balance_loss: After a call, the float32 scalar to add to the loss.
        overflow: After a call, int32 [1]: 1 if the capacity dropped rows.

    Args:
        buffer: The communicator. It sets the number of experts and the device.
        hidden: The width of a token.
        intermediate: The width inside an expert, `down(silu(gate(x)) * up(x))`.
        topk: K, the number of experts of each token.
        normalize: Whether the K weights of a token are divided by their sum.
        shared_intermediate: If not 0, the width of an additional expert that processes every token.
        capacity_factor: Bounds what one rank sends to one expert, in even shares of the rank's choices; see `Router`.
        balance_coef: The factor of the load-balancing loss; see `Router`.
        balance_group: The group whose tokens the load-balancing loss counts; see `Router`.
        capacity: The maximum number of rows that a rank receives; further rows are dropped, and `overflow` says so.
            With a capacity, shapes are static and the host does not wait for the GPU. None: exactly the rows that
            arrive.
        comm_dtype: The type of rows in transit, bfloat16 or float32. Default: that of the tokens, or float32.
        pad_multiple: The rows of each expert are padded to a multiple of this number.
        dtype: The type of the experts' parameters.

    Raises:
        CallerError: `topk` is not between 1 and the number of experts, or a width or `capacity_factor` is not positive.

    Example:
        >>> buffer = Buffer(num_experts=8)
        >>> layer = MoELayer(buffer, hidden=64, intermediate=128, topk=2, balance_coef=0.01)
        >>> x = torch.randn(4, 25, 64, device=buffer.device)
        >>> y = layer(x)
        >>> (y.square().mean() + layer.balance_loss).backward()
        >>> reduce_gradients(layer)
        >>> y.shape
        torch.Size([4, 25, 64])
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
        for name, width, least in (("intermediate", intermediate, 1), ("shared_intermediate", shared_intermediate, 0)):
            if width < least:
                raise CallerError(f"{name} is {width}, must be {least} or more")
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
            SharedExpert(hidden, shared_intermediate, device=buffer.device, dtype=dtype)
            if shared_intermediate
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer. Collective.

        Args:
            x: Floating-point [..., hidden], on the buffer's device.

        Returns:
            A tensor of the shape and type of `x`.

        Raises:
            CallerError: The shape, type or device of `x` does not fit.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        hidden = self.router.weight.shape[1]
        if x.shape[-1:] != (hidden,):
            raise CallerError(f"x: expected [..., {hidden}], the layer's hidden, found shape {list(x.shape)}")
        if not x.is_floating_point():
            raise CallerError(
                f"x: expected a floating-point type, found {x.dtype}; convert it, for example with x.float()"
            )
        tokens = x.reshape(-1, hidden)
        if self.training and x.requires_grad and not torch.is_grad_enabled() and self.router.balance_coef:
            # This is so inside `torch.utils.checkpoint`, whose reentrant form runs the forward pass without gradients.
            warnings.warn(
                "balance_loss has no gradient: the layer trains, and gradients are off. With activation checkpoints "
                "pass use_reentrant=False",
                stacklevel=2,
            )
        routed = self.router(tokens)
        received = self.dispatcher.dispatch(tokens, routed.topk_idx, routed.topk_weights)
        outputs = self.experts(received.tokens, received.tokens_per_expert)
        y = self.dispatcher.combine(outputs, received).to(x.dtype)
        if self.shared is not None:
            y = y + self.shared(tokens.to(self.shared.down.weight.dtype)).to(x.dtype)
        self.balance_loss, self.overflow = routed.balance_loss, received.overflow
        return y.view_as(x)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # Results of the last call are not state. `balance_loss` is also part of an autograd graph and cannot be copied.
        for name in ("balance_loss", "overflow", "_compiled_call_impl"):
            state.pop(name, None)
        return state
