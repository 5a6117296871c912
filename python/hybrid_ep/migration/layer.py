"""`HybridMoELayer`: a mixture-of-experts layer whose rank also holds replicas of other datacenters' experts."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (Tensor.split and nn.Module's methods have no types.)

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buffer import Buffer, Dispatched
from ..errors import CallerError
from ..experts import GroupedExperts, local_part, one_by_one
from ..moe import MoELayer, Router, SharedExpert, TokenDispatcher
from .runtime import ExpertMigration

__all__ = ["HybridExperts", "HybridMoELayer"]


class HybridExperts(GroupedExperts):
    """The experts that a rank holds: its own, which are the parameters, and replicas of its peers' experts.

    Attributes:
        gate_up: Parameter [experts, hidden, 2 * intermediate]; all experts if it is a `DTensor`, else this rank's own.
        down: Parameter [experts, intermediate, hidden], likewise.
        working: [held experts, elements], what the layer computes with: a copy of this rank's own experts, then the
            replicas in the order of their owners. A row is an expert: `gate_up`, then `down`. Not a parameter; its
            gradient goes to the owners.
        replica_steps: The step of the weights of each peer, in rank order.

    Args:
        migration: The runtime, which says which experts this rank holds.
        hidden: The width of a row.
        intermediate: The width inside an expert.
        dtype: The type of the parameters. Default: PyTorch's default type.
        working_dtype: The type of `working`: float32 or bfloat16. Default: `dtype`.

    Raises:
        CallerError: `working_dtype` is not one of these types, or the migration has begun its first step.
    """

    replica_steps: list[int]

    def __init__(
        self,
        migration: ExpertMigration,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype | None = None,
        working_dtype: torch.dtype | None = None,
    ) -> None:
        # GroupedExperts asks its buffer only which experts are this rank's.
        device = migration.buffer.device
        super().__init__(cast(Buffer, migration.ownership), hidden, intermediate, device=device, dtype=dtype)
        self.migration = migration
        working_dtype = working_dtype or self.down.dtype
        if working_dtype not in (torch.float32, torch.bfloat16):
            raise CallerError(f"working_dtype is {working_dtype}, must be torch.float32 or torch.bfloat16")
        self._own = migration.ownership.num_local_experts
        self._shape = (hidden, intermediate)
        held = len(migration.held_experts)
        shape = (held, 3 * hidden * intermediate)
        self.working = torch.zeros(shape, dtype=working_dtype, device=device, requires_grad=True)
        # Where the engine decodes replicas. The codec `delta` changes the values that are there.
        self.host_replicas = migration.host_memory.counterpart(self.replicas())
        self.gathered = -1
        # The gradient that has left in this step, and its version.
        self._left: tuple[Tensor, int] | None = None
        self.replica_steps = []
        self._index = index = migration.register(self)
        # The migration holds the layer, and the layer the tensor. A hook that holds the migration would close a cycle.
        weak = weakref.ref(migration)

        def complete(_: Tensor) -> None:
            if (living := weak()) is not None:
                living.gradients_complete(index)

        self.working.register_post_accumulate_grad_hook(complete)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Applies each held expert to its rows. Waits for the weights of the last `publish`.

        Args:
            rows: Floating-point [R, hidden]: first the rows of the first held expert, then those of the second, and so
                on.
            tokens_per_expert: int64 [held experts]: the number of rows of each; the sum is at most R.

        Returns:
            [R, hidden] of the type of `working`. Rows after the last expert's are zero.

        Raises:
            PeerError: Another rank of the expert domain died, failed or is late.
        """
        self.migration.gather(self._index)
        hidden, intermediate = self._shape
        # Separate tensors for each expert: the gradients of slices of one tensor would each be as large as the tensor.
        halves = [row.split([2 * hidden * intermediate, hidden * intermediate]) for row in self.working.unbind(0)]
        gate_up = [first.view(hidden, 2 * intermediate) for first, _ in halves]
        down = [second.view(intermediate, hidden) for _, second in halves]
        return one_by_one(rows.to(self.working.dtype), gate_up, down, tokens_per_expert)

    # ---- called by the migration

    @torch.no_grad()
    def refresh(self) -> Tensor:
        """Copies the parameters into `working`. Returns the copy, [own experts, elements]."""
        own = self.working[: self._own]
        border = local_part(self.gate_up)[0].numel()
        own[:, :border].copy_(local_part(self.gate_up).flatten(1))
        own[:, border:].copy_(local_part(self.down).flatten(1))
        return own

    def replicas(self) -> Tensor:
        """The replicas, [replicas, elements], without gradient."""
        return self.working.detach()[self._own :]

    def take_replicas(self) -> None:
        """Takes what the engine has decoded."""
        if self.migration.host_memory.copies:
            self.replicas().copy_(self.host_replicas)
        else:
            # The engine wrote to the tensor. Autograd must notice a backward pass through an older forward pass.
            torch.autograd.graph.increment_version(self.working)

    @property
    def sent(self) -> bool:
        """Whether the gradients of this step have left."""
        return self._left is not None

    def note_sent(self) -> None:
        """Notes that the gradients have left."""
        gradient = self._gradient()
        self._left = gradient, gradient._version

    def check_gradient(self) -> None:
        """Raises `CallerError` if the gradients have changed since they left: the owners lack the change."""
        if self._left is None:
            return
        gradient, version = self._left
        if self.working.grad is not gradient or gradient._version != version:
            raise CallerError(
                "gradients of experts changed after they had left in the backward pass: leave this step out, by "
                "discard_gradients, zero_grad and publish on all ranks"
            )

    def own_gradient(self) -> Tensor:
        return self._gradient()[: self._own]

    def replica_gradient(self) -> Tensor:
        return self._gradient()[self._own :]

    def _gradient(self) -> Tensor:
        # It is None if no token of the dispatch group came to this rank, or if no backward pass was run.
        if self.working.grad is None:
            self.working.grad = torch.zeros_like(self.working)
        elif not self.working.grad.is_contiguous():
            self.working.grad = self.working.grad.contiguous()
        return self.working.grad

    def empty_sum(self) -> Tensor:
        """Makes a tensor for the sum of gradients over the expert domain: float32 [own experts, elements], in main
        memory."""
        return torch.empty(self._own, self.working.shape[1], dtype=torch.float32, device="cpu")

    def scratch_sum(self) -> Tensor:
        """Like `empty_sum`, where the engine works, for a sum that is used before the next call for any layer."""
        rows, elements = self._own, self.working.shape[1]
        if self.migration.host_memory.copies:
            return self.migration.host_memory.sum_of(rows, elements)
        return torch.empty(rows, elements, dtype=torch.float32, device=self.working.device)

    def finish_gradients(self, total: Tensor) -> None:
        """Adds the sum over the expert domain to the gradient of the parameters, and forgets that of `working`."""
        border = local_part(self.gate_up)[0].numel()
        total = total.to(self.working.device)
        for parameter, part in ((self.gate_up, total[:, :border]), (self.down, total[:, border:])):
            if parameter.requires_grad:
                local = local_part(parameter)
                gradient = self._sharded(part.reshape(local.shape).to(local.device, local.dtype))
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Forgets the gradient of `working`."""
        self.working.grad = None
        self._left = None

    # ---- checkpoints and copies

    @torch.no_grad()
    def held_state_dict(self) -> dict[str, Tensor]:
        """Returns all experts that this rank holds, replicas included, as a state dict.

        A rank of a job that restarts without the lost ranks loads its experts from such a state dict.

        Returns:
            `gate_up`, `down` and `expert_ids` as plain tensors; `load_state_dict` selects the experts that it needs.

        Raises:
            CallerError: No replicas have arrived yet.
        """
        if self.gathered < 0:
            raise CallerError("the layer has no replicas before its first forward pass")
        hidden, intermediate = self._shape
        gate_up, down = self.working.detach().clone().split([2 * hidden * intermediate, hidden * intermediate], dim=1)
        gate_up = gate_up.reshape(-1, hidden, 2 * intermediate).to(self.gate_up.dtype)
        down = down.reshape(-1, intermediate, hidden).to(self.down.dtype)
        # This rank's experts come from the parameters, which may be more precise than the copy.
        gate_up[: self._own], down[: self._own] = local_part(self.gate_up), local_part(self.down)
        return {"gate_up": gate_up, "down": down, "expert_ids": torch.tensor(self.migration.held_experts)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HybridExperts:
        super()._apply(fn, recurse)
        if self._device() != self.working.device:
            raise CallerError(
                f"a layer of a migration was moved from {self.working.device} to {self._device()}: make the migration "
                "with device=, and its layers are made there"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise CallerError(
            "a layer of a migration cannot be copied, because its peers know its number; make another layer, and load "
            "the state dict of this one"
        )

    def __reduce__(self) -> Any:
        raise CallerError("a layer of a migration cannot be pickled: save its state dict")


class _PlacedDispatcher(TokenDispatcher):
    """Sends the tokens of an expert to the rank of the dispatch group that holds it."""

    def __init__(self, migration: ExpertMigration, **options: Any) -> None:
        super().__init__(migration.buffer, **options)
        self._places = migration.places

    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return super().dispatch(tokens, self._places[topk_idx], topk_weights)


class HybridMoELayer(MoELayer):
    """A mixture-of-experts layer whose tokens stay inside the dispatch group: router, dispatch, held experts, combine.

    Forward and backward are collective in the dispatch group. The first forward pass after a `publish` waits for the
    weights of the peers in other datacenters. Parameters of experts hold this rank's own experts, and work with
    `clip_gradients`, state dicts and `torch.distributed.checkpoint` like those of `MoELayer`. With the same seed both
    layers start with the same weights.

    Attributes:
        balance_loss: As for `MoELayer`.
        overflow: As for `MoELayer`.

    Args:
        migration: The runtime. Make the layers of all ranks in the same order, before the first step.
        hidden: As for `MoELayer`.
        intermediate: As for `MoELayer`.
        topk: As for `MoELayer`.
        normalize: As for `MoELayer`.
        shared_intermediate: As for `MoELayer`.
        capacity_factor: As for `MoELayer`.
        balance_coef: As for `MoELayer`.
        balance_group: As for `MoELayer`.
        capacity: As for `MoELayer`.
        comm_dtype: As for `MoELayer`.
        pad_multiple: As for `MoELayer`.
        dtype: As for `MoELayer`.
        working_dtype: The type in which experts are computed and in which their weights and gradients travel: float32
            or bfloat16. Default: `dtype`.

    Raises:
        CallerError: `topk` or `working_dtype` does not fit, or the migration has begun its first step.
    """

    def __init__(
        self,
        migration: ExpertMigration,
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
        working_dtype: torch.dtype | None = None,
    ) -> None:
        # The parts draw their weights in the same order as those of MoELayer.
        nn.Module.__init__(self)
        device = migration.buffer.device
        self.router = Router(
            hidden,
            migration.num_experts,
            topk,
            normalize=normalize,
            capacity_factor=capacity_factor,
            balance_coef=balance_coef,
            balance_group=balance_group,
            device=device,
        )
        self.dispatcher = _PlacedDispatcher(migration, pad_multiple=pad_multiple, capacity=capacity, dtype=comm_dtype)
        self.experts = HybridExperts(migration, hidden, intermediate, dtype=dtype, working_dtype=working_dtype)
        self.shared = (
            SharedExpert(hidden, shared_intermediate, device=device, dtype=dtype) if shared_intermediate else None
        )
