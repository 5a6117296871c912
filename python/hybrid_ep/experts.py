"""The experts of a rank: their computation, and their identity among the experts of all ranks.

The experts of all ranks have the same parameter names and shapes, so the parameters record which experts they hold:

- If the buffer has a process group of 2 or more ranks, parameters are `DTensor`s, sharded by expert over `Buffer.mesh`.
  `torch.distributed.checkpoint` then saves the experts of all ranks, with their optimizer states, and loads those of a
  rank on any number of ranks.
- Otherwise parameters are plain tensors of this rank's experts.
- A state dict has `expert_ids` beside the parameters. Loading refuses a state dict that lacks this rank's experts.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (Tensor.split and nn.Module's methods have no types.)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._grouped_mm import grouped_mm
from .buffer import Buffer
from .errors import CallerError

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Shard

__all__ = ["GroupedExperts", "expert_parameters", "local_part"]


def _has_grouped_mm(device: torch.device) -> bool:
    """Whether `torch._grouped_mm` works there: it needs Hopper or later, and PyTorch 2.8 or later."""
    return (
        device.type == "cuda" and hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(device) >= (9, 0)
    )


class GroupedExperts(nn.Module):
    """This rank's experts: each computes `down(silu(gate(x)) * up(x))` on its group of rows.

    Attributes:
        gate_up: Parameter [experts, hidden, 2 * intermediate]; all experts if it is a `DTensor`, else this rank's.
        down: Parameter [experts, intermediate, hidden], likewise.

    Args:
        buffer: The communicator, which says which experts this rank has.
        hidden: The width of a row.
        intermediate: The width inside an expert.
        device: The device of the parameters. Default: PyTorch's default device.
        dtype: The type of the parameters. Default: PyTorch's default type.
    """

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
        self.buffer = buffer
        local = buffer.num_local_experts
        self.gate_up = nn.Parameter(torch.empty(local, hidden, 2 * intermediate, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(local, intermediate, hidden, device=device, dtype=dtype))
        self._init_experts(buffer.local_experts)
        self._settle()

    @torch.no_grad()
    def _init_experts(self, experts: range) -> None:
        # An expert's weights depend on the seed and its global index only, and every rank draws one number from the
        # global generator. So equally seeded ranks hold the same model for any number of ranks.
        seed = int(torch.randint(2**62, (), device="cpu"))
        for local, expert in enumerate(experts):
            own = torch.Generator("cpu").manual_seed(seed + expert)
            for weight in (self.gate_up[local], self.down[local]):
                weight.copy_(torch.randn(weight.shape, generator=own, device="cpu") * weight.shape[0] ** -0.5)

    @property
    def expert_ids(self) -> Tensor:
        """int64 [experts]: the global indices of the experts in the parameters, sharded like the parameters."""
        return self._sharded(torch.tensor([*self.buffer.local_experts], device=self._device()))

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Applies each expert to its rows.

        Args:
            rows: Floating-point [R, hidden]: first the rows of local expert 0, then those of expert 1, and so on.
            tokens_per_expert: int64 [local experts]: the number of rows of each expert; the sum is at most R.

        Returns:
            [R, hidden] of the parameters' type. Rows after the last expert's are undefined.
        """
        gate_up, down = local_part(self.gate_up), local_part(self.down)
        rows = rows.to(down.dtype)
        if self._grouped and rows.dtype == torch.bfloat16:
            return _at_once(rows, gate_up, down, tokens_per_expert)
        if torch.compiler.is_compiling():
            gate, up = grouped_mm(rows, gate_up, tokens_per_expert).chunk(2, dim=-1)
            return grouped_mm(F.silu(gate) * up, down, tokens_per_expert)
        return one_by_one(rows, gate_up, down, tokens_per_expert)

    # ---- identity of the experts

    def _device(self) -> torch.device:
        return local_part(self.gate_up).device

    def _sharded(self, local: Tensor) -> Tensor:
        """Wraps this rank's part as a `DTensor` of all experts, if there is a mesh."""
        mesh = self.buffer.mesh
        return local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    def _settle(self) -> None:
        """Turns parameters that are plain tensors of this rank into what this world needs: `DTensor`s or not."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            settled = nn.Parameter(self._sharded(parameter.detach()), parameter.requires_grad)
            settled.expert_parallel = True  # type: ignore[attr-defined]  # other libraries may read it
            setattr(self, name, settled)
        self._note_device()

    def _note_device(self) -> None:
        # Not in `forward`, which `torch.compile` traces.
        self._grouped = _has_grouped_mm(self._device())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedExperts:
        # `to`, `cuda` and others, which may move the parameters to another device.
        super()._apply(fn, recurse)
        self._note_device()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "expert_ids"] = self.expert_ids

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        ids = own.pop(prefix + "expert_ids", None)
        for name, parameter in self.named_parameters(recurse=False):
            key = prefix + name
            if key not in own:
                continue
            try:
                own[key] = self._own_part(own[key], ids, parameter)
            except CallerError as error:
                errors.append(f"{key}: {error}")
                del own[key]
                # Without an entry PyTorch would also report the key as missing.
                own[key] = parameter
        super()._load_from_state_dict(own, prefix, metadata, strict, missing, unexpected, errors)

    def _own_part(self, value: Tensor, ids: Tensor | None, parameter: Tensor) -> Tensor:
        """Selects this rank's experts from a tensor of a state dict."""
        total, own = self.buffer.num_experts, [*self.buffer.local_experts]
        rows = local_part(value)
        if ids is not None:
            there = local_part(ids).tolist()
        elif len(rows) == total:
            there = [*range(total)]
        else:
            raise CallerError(
                f"holds {len(rows)} of {total} experts, and expert_ids, which says which ones, is missing; "
                "load a checkpoint with expert_ids, or one of all experts"
            )
        places = {expert: place for place, expert in enumerate(there)}
        if len(there) != len(rows) or not places.keys() >= {*own}:
            raise CallerError(
                f"holds the experts {_listed(there)}, but this rank has {_listed(own)}; load the part that this rank "
                "saved, or use torch.distributed.checkpoint, which loads a rank's experts from the parts of all ranks"
            )
        if there != own:
            rows = rows[[places[expert] for expert in own]]
        return self._sharded(rows.to(local_part(parameter).device))

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """Saves plain tensors of this rank's experts; unpickling shards them over the mesh of its own buffer."""
        state = _plain_state(self)
        state["_parameters"] = {
            name: nn.Parameter(local_part(parameter).detach(), parameter.requires_grad)
            for name, parameter in self._parameters.items()
            if parameter is not None
        }
        state["_experts"] = [*self.buffer.local_experts]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_experts")
        super().__setstate__(state)
        if saved != [*self.buffer.local_experts]:
            raise CallerError(
                f"the layer holds the experts {_listed(saved)}, but this rank has "
                f"{_listed([*self.buffer.local_experts])}: another rank saved it, or another number of ranks; load "
                "the layer that this rank saved, or use torch.distributed.checkpoint"
            )
        self._settle()


def _plain_state(module: nn.Module) -> dict[str, Any]:
    state = module.__dict__.copy()
    # A compiled call cannot be copied; `module.compile()` makes it again.
    state.pop("_compiled_call_impl", None)
    return state


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters of experts in a module, whose gradients already count the tokens of all ranks.

    Args:
        module: Any module.

    Returns:
        The parameters of every `GroupedExperts` in it, and every parameter with a true attribute `expert_parallel`;
        each once.
    """
    found = [
        parameter
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if isinstance(part, GroupedExperts) or getattr(parameter, "expert_parallel", False)
    ]
    return list({id(parameter): parameter for parameter in found}.values())


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a `DTensor`, and any other tensor unchanged. Differentiable."""
    if torch.distributed.is_available() and isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _listed(experts: list[int]) -> str:
    if experts == [*range(experts[0], experts[-1] + 1)]:
        return f"{experts[0]} to {experts[-1]}"
    return ", ".join(map(str, experts))


def one_by_one(
    rows: Tensor, gate_up: Tensor | Sequence[Tensor], down: Tensor | Sequence[Tensor], tokens_per_expert: Tensor
) -> Tensor:
    """Applies each expert to its rows, one expert after the other. Rows after the last expert's become zero."""
    counts = tokens_per_expert.tolist()
    *segments, unused = rows.split([*counts, len(rows) - sum(counts)])
    outputs = []
    for expert, segment in enumerate(segments):
        gate, up = (segment @ gate_up[expert]).chunk(2, dim=-1)
        outputs.append((F.silu(gate) * up) @ down[expert])
    return torch.cat([*outputs, torch.zeros_like(unused)])


def _at_once(rows: Tensor, gate_up: Tensor, down: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Computes all experts in one launch for each product, without waiting for the counts."""
    ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
    return torch._grouped_mm(F.silu(gate) * up, down, offs=ends)
