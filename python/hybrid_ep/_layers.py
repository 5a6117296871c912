"""The layers of a module: whether they are the same on all ranks, and which of them have no marked experts.

The first `reduce_gradients` of a module checks both. Ranks compare *facts*: a setting of a layer, the shape and type of
a parameter. A class names its settings that must be equal in `_equal_on_all_ranks`.
"""

# mypy: disable-error-code="no-untyped-call"
# (torch.distributed has functions without types.)

from __future__ import annotations

import ctypes
import hashlib
import json
import weakref
from collections.abc import Container, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._watch import Watch
from .buffer import Buffer
from .dispatcher import TokenDispatcher
from .experts import LocalExperts

__all__ = [
    "Facts",
    "Groups",
    "digest_of",
    "extremes",
    "facts_of",
    "first_difference",
    "groups_of",
    "owners",
    "unequal_layers",
    "unmarked_layers",
]

Facts: TypeAlias = dict[str, tuple[str, bool]]
"""The value of each fact, and whether every rank must have the fact: names of experts may differ between ranks."""

Groups: TypeAlias = "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[dist.ProcessGroup]]"
"""The groups whose ranks have compared a module, by module."""

# Indexed by whether dense parameters were compared, too.
_compared: dict[bool, Groups] = {True: weakref.WeakKeyDictionary(), False: weakref.WeakKeyDictionary()}


def facts_of(module: nn.Module, experts: Container[int], *, dense: bool) -> Facts:
    """Lists what must be equal on all ranks.

    Args:
        module: The module.
        experts: The ids of the parameters of experts.
        dense: Whether dense parameters that need gradients are among the facts.
    """
    facts: Facts = {}
    in_all: set[int] = set()
    for path, part in module.named_modules():
        if isinstance(part, LocalExperts):
            in_all |= {id(parameter) for parameter in part.parameters(recurse=False)}
        held = {name: value for name, value in vars(part).items() if isinstance(value, TokenDispatcher)}
        for name, holder in {"": part, **held}.items():
            place = ".".join(filter(None, (path, name))) or type(part).__name__.lower()
            for setting in getattr(type(holder), "_equal_on_all_ranks", ()):
                facts[f"{setting} of {place}"] = str(getattr(holder, setting)), True
    for name, parameter in module.named_parameters():
        form = str(parameter.dtype).removeprefix("torch.")
        if id(parameter) in experts:
            # The first dimension counts the experts of a rank or of all ranks.
            facts[f"an expert's part of {name}"] = f"{list(parameter.shape[1:])} {form}", id(parameter) in in_all
        elif dense and parameter.requires_grad:
            facts[f"the dense parameter {name}"] = f"{list(parameter.shape)} {form}", True
    return facts


def digest_of(facts: Facts) -> int:
    """Returns a number below 2**56 that differs if facts differ."""
    return int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:7], "big")


def first_difference(all_facts: Sequence[Facts], ranks: Sequence[int]) -> str | None:
    """Compares the facts of ranks.

    Args:
        all_facts: The facts of each rank.
        ranks: The numbers of the ranks, for the text.

    Returns:
        The text of an error; None if nothing differs that must be equal.
    """
    for fact in dict.fromkeys(fact for facts in all_facts for fact in facts):
        in_all = any(facts[fact][1] for facts in all_facts if fact in facts)
        found = [
            (facts[fact][0] if fact in facts else "missing", rank)
            for facts, rank in zip(all_facts, ranks, strict=True)
            if in_all or fact in facts
        ]
        value, first = found[0]
        for other, rank in found[1:]:
            if other != value:
                told = f"{fact} is {other} on rank {rank} and {value} on rank {first}"
                return f"{told}; it must be the same on every rank"
    return None


def groups_of(
    done: Groups, module: nn.Module, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]]:
    """Returns the group itself (None: all ranks), and the groups that `done` has for the module."""
    group = dist.group.WORLD if group is None else group
    assert group is not None, "torch.distributed is initialized"
    return group, done.setdefault(module, weakref.WeakSet())


def extremes(own: Tensor, group: dist.ProcessGroup, watch: Watch) -> tuple[Tensor, Tensor]:
    """Returns the maximum and the minimum of each integer over the ranks. Collective."""
    # `~` reverses the order, so the second half of the maxima has the minima.
    largest, smallest = both = torch.stack([own, ~own])
    watch.all_reduce(both, dist.ReduceOp.MAX, group)
    return largest, ~smallest


def unequal_layers(
    module: nn.Module,
    experts: Container[int],
    group: dist.ProcessGroup | None,
    watch: Watch,
    device: torch.device,
    *,
    dense: bool,
) -> str | None:
    """Compares the facts of a module over the ranks, unless the ranks of the group have done so. Collective.

    Args:
        module: The module.
        experts: The ids of the parameters of experts.
        group: The ranks.
        watch: Reduces tensors over the ranks.
        device: Where these tensors are.
        dense: Whether dense parameters are compared, too.

    Returns:
        The text of an error; None if nothing differs that must be equal.
    """
    group, groups = groups_of(_compared[dense], module, group)
    if group in groups:
        return None
    facts = facts_of(module, experts, dense=dense)
    text = json.dumps(facts).encode()
    own = torch.tensor([digest_of(facts), len(text)], device=device)
    largest, smallest = extremes(own, group, watch)
    if not torch.equal(largest, smallest):
        texts = torch.zeros(group.size(), int(largest[1]), dtype=torch.uint8, device=device)
        texts[group.rank(), : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        watch.all_reduce(texts, dist.ReduceOp.MAX, group)
        all_facts = [json.loads(_bytes(row)) for row in texts.cpu()]  # each row is contiguous
        if (told := first_difference(all_facts, dist.get_process_group_ranks(group))) is not None:
            return told
    groups.add(group)
    return None


def _bytes(row: Tensor) -> bytes:
    return ctypes.string_at(row.data_ptr(), row.numel()).rstrip(b"\0")


def owners(buffer: Buffer) -> int:
    """Returns the number of ranks that share the experts of a layer."""
    return buffer.num_experts // buffer.num_local_experts


def unmarked_layers(module: nn.Module, experts: Container[int]) -> str | None:
    """Names the layers that send tokens to several ranks, and have no parameter that is marked as an expert's.

    A module with a `TokenDispatcher` is a layer. A module with a `Buffer` is a layer if it neither contains a layer nor
    is inside of one. If a layer has no parameters, the module around it counts instead.

    Args:
        module: The module.
        experts: The ids of the parameters of experts.

    Returns:
        The layers, as a part of a sentence; None if there is no such layer.
    """
    parts = dict(module.named_modules())
    dispatching: list[str] = []
    holding: list[str] = []
    for path, part in parts.items():
        if isinstance(part, LocalExperts):
            continue
        held = vars(part).values()
        if any(isinstance(value, TokenDispatcher) and owners(value.buffer) > 1 for value in held):
            dispatching.append(path)
        elif any(isinstance(value, Buffer) and owners(value) > 1 for value in held):
            holding.append(path)
    layers = [
        path
        for path in holding
        if not any(_is_inside(other, path) for other in [*dispatching, *holding])
        and not any(_is_inside(path, other) for other in dispatching)
    ]
    found: dict[str, str] = {}
    for path in [*dispatching, *layers]:
        while path and next(parts[path].parameters(), None) is None:
            path = path.rpartition(".")[0]
        if _lacks_marks(parts[path], experts):
            found[path] = f"{path or 'the module'} ({type(parts[path]).__name__})"
    names = [found[path] for path in parts if path in found]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or None


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _lacks_marks(part: nn.Module, experts: Container[int]) -> bool:
    """Whether no parameter is marked as an expert's, and nothing says that all are dense."""
    if getattr(part, "expert_parallel", None) is False:
        return False
    if any(id(parameter) in experts for parameter in part.parameters()):
        return False
    return any(p.requires_grad and not hasattr(p, "expert_parallel") for p in part.parameters())
