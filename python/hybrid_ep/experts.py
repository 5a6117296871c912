"""The experts of a rank: their computation, and their identity among the experts of all ranks.

The experts of all ranks have the same parameter names and shapes, so the parameters record which experts they hold:

- If the buffer has a process group of 2 or more ranks, parameters are `DTensor`s, sharded by expert over `Buffer.mesh`.
  `torch.distributed.checkpoint` then saves the experts of all ranks, with their optimizer states, and loads those of a
  rank on any number of ranks.
- Otherwise parameters are plain tensors of this rank's experts.
- A state dict has `expert_ids` besides the parameters. Loading refuses a state dict that lacks this rank's experts.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (Tensor.split and nn.Module's methods have no types.)

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ._grouped_mm import grouped_mm
from .buffer import Buffer
from .errors import CallerError

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Shard

__all__ = ["GroupedExperts", "LocalExperts", "expert_parameters", "local_part", "parameter_groups"]


def _has_grouped_mm(device: torch.device) -> bool:
    """Whether `torch._grouped_mm` works on the device: it needs Hopper or later, and PyTorch 2.8 or later."""
    return (
        device.type == "cuda" and hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(device) >= (9, 0)
    )


class LocalExperts(nn.Module):
    """Base class of this rank's experts, whose parameters record which experts they hold.

    Every parameter that is set as an attribute has this rank's experts along its first dimension: [local experts, ...].
    If the buffer has a process group of several ranks, the attribute is a new parameter, a `DTensor` [experts of all
    ranks, ...]; compute with `local_part(parameter)`. Checkpoints then hold the experts of all ranks.
    `reduce_gradients` and `clip_gradients` handle the parameters as those of experts, whose gradients already count the
    tokens of all ranks.

    Args:
        buffer: The communicator, which says which experts this rank has.

    Raises:
        CallerError: The buffer was made before `torch.distributed` was initialized.

    Example:
        >>> class Experts(LocalExperts):
        ...     def __init__(self, buffer, hidden):
        ...         super().__init__(buffer)
        ...         self.weight = self.new_parameter(hidden, hidden, init=nn.init.xavier_uniform_)
        ...
        ...     def forward(self, rows, tokens_per_expert):
        ...         counts = tokens_per_expert.tolist()
        ...         *parts, unused = rows.split([*counts, len(rows) - sum(counts)])
        ...         weight = local_part(self.weight)
        ...         outputs = [part @ weight[expert] for expert, part in enumerate(parts)]
        ...         return torch.cat([*outputs, torch.zeros_like(unused)])
    """

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        has_groups = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if has_groups and buffer.num_local_experts < buffer.num_experts and buffer.mesh is None:
            # A checkpoint would hold the experts of one rank only, without a warning.
            raise CallerError(
                "the buffer has several ranks and no process group, because it was made before init_process_group: "
                "call init_process_group before the buffer is made"
            )
        self.buffer = buffer

    def new_parameter(
        self,
        *shape: int,
        init: Callable[..., Any],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """Makes a parameter for this rank's experts, to be set as an attribute.

        An expert's values follow from the seed of PyTorch's global generator and the expert's index. So ranks with
        equal seeds hold the same model for any number of ranks, and no two experts are equal. Call this method on all
        ranks, in the same order.

        Args:
            shape: The shape of one expert's part.
            init: Fills the part of one expert in place, such as a function of `torch.nn.init`. It is called as
                `init(part, generator=generator)` if it has this parameter, else as `init(part)`, with PyTorch's global
                generator set for the expert. The part is float32, on the CPU.
            device: The device of the parameter. Default: the buffer's.
            dtype: The type of the parameter. Default: PyTorch's default type.

        Returns:
            A parameter [local experts, *shape].
        """
        own = self.buffer.local_experts
        values = torch.empty(len(own), *shape, device="cpu", dtype=torch.float32)
        takes_generator = _takes_generator(init)
        for part, generator in zip(values, _generators(own), strict=True):
            if takes_generator:
                init(part, generator=generator)
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(generator.initial_seed())
                    init(part)
        return nn.Parameter(values.to(device or self.buffer.device, dtype or torch.get_default_dtype()))

    @property
    def expert_ids(self) -> Tensor:
        """int64 [experts]: the global indices of the experts in the parameters, sharded like the parameters."""
        return self._sharded(torch.tensor([*self.buffer.local_experts], device=self._device()))

    # ---- identity of the experts

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter whose first dimension is this rank's experts, as setting an attribute does.

        Raises:
            CallerError: The first dimension is not the number of this rank's experts.
        """
        if param is not None:
            own = self.buffer.num_local_experts
            if param.dim() == 0 or len(local_part(param)) != own:
                raise CallerError(
                    f"{name}: the first dimension of a parameter of LocalExperts is this rank's experts: expected "
                    f"[{own}, ...], found {list(local_part(param).shape)}; set other parameters on the module around it"
                )
            if not _is_sharded(param) and self.buffer.mesh is not None:
                param = nn.Parameter(self._sharded(param.detach()), param.requires_grad)
            param.expert_parallel = True  # type: ignore[attr-defined]  # other libraries may read it
        super().register_parameter(name, param)

    def _device(self) -> torch.device:
        first = next(self.parameters(recurse=False), None)
        return self.buffer.device if first is None else local_part(first).device

    def _sharded(self, local: Tensor) -> Tensor:
        """Wraps this rank's part as a `DTensor` of all experts, if there is a mesh."""
        mesh = self.buffer.mesh
        return local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

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
        for name, parameter in list(self.named_parameters(recurse=False)):
            self.register_parameter(name, parameter)


class GroupedExperts(LocalExperts):
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
        super().__init__(buffer)
        local = buffer.num_local_experts
        gate_up = torch.empty(local, hidden, 2 * intermediate, device=device, dtype=dtype)
        down = torch.empty(local, intermediate, hidden, device=device, dtype=dtype)
        for place, generator in enumerate(_generators(buffer.local_experts)):
            for weight in (gate_up[place], down[place]):
                weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * weight.shape[0] ** -0.5)
        self.gate_up = nn.Parameter(gate_up)
        self.down = nn.Parameter(down)
        self._note_device()

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

    def _note_device(self) -> None:
        # Not in `forward`, which `torch.compile` traces.
        self._grouped = _has_grouped_mm(self._device())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_device()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedExperts:
        # `to`, `cuda` and others, which may move the parameters to another device.
        super()._apply(fn, recurse)
        self._note_device()
        return self


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
        The parameters of every `LocalExperts` in it, such as `GroupedExperts`, and every parameter with a true
        attribute `expert_parallel`; each once.
    """
    found = [
        parameter
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if isinstance(part, LocalExperts) or getattr(parameter, "expert_parallel", False)
    ]
    return list({id(parameter): parameter for parameter in found}.values())


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Splits the parameters of a model for an optimizer: those of experts, and the dense ones.

    PyTorch's optimizers update all parameters of a group at once if these are on a GPU, or if `foreach` or `fused` is
    set. Parameters of experts are `DTensor`s, and PyTorch refuses such a call for `DTensor`s together with plain
    tensors, or together with those that FSDP shards. Numbers of groups, and their order, are the same for any number of
    ranks.

    Args:
        module: The model.

    Returns:
        Two groups with the key "params": the dense parameters, then those of `expert_parameters`. A group may be empty.
        Options of a group, such as "lr" or "weight_decay", may be added.

    Example:
        >>> optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3)
    """
    experts = expert_parameters(module)
    ids = {id(parameter) for parameter in experts}
    return [
        {"params": [parameter for parameter in module.parameters() if id(parameter) not in ids]},
        {"params": experts},
    ]


def _takes_generator(init: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(init).parameters.values()
    except ValueError:  # a function without a signature, such as a built-in one
        return False
    return any(parameter.name == "generator" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _generators(experts: range) -> list[torch.Generator]:
    """A generator of random numbers for each expert: it depends on the seed and the expert's index only.

    Every rank draws one number from the global generator, so ranks with equal seeds keep equal ones.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    return [torch.Generator("cpu").manual_seed(seed + expert) for expert in experts]


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return torch.distributed.is_available() and isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a `DTensor`, and any other tensor unchanged. Differentiable."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


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
