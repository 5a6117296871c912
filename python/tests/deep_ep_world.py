"""Shared by tests of the `deep_ep` interface: ranks as processes, and a naive definition of the operators.

`world_of` is a fixture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep.deep_ep import HybridEPBuffer
from process_worlds import Rank, World, world_of_processes


@dataclasses.dataclass(frozen=True)
class Case:
    """The routing and tokens of all ranks; every rank computes the same values.

    All values are small integers or eighths, so sums are exact in bf16 and tests can require equality.
    """

    tokens: tuple[int, ...]
    experts: int = 16
    hidden: int = 128
    density: float = 0.25
    pad: int | None = None
    dtype: torch.dtype = torch.bfloat16
    repeated: int = 1
    """Tensor parallel size: this many ranks have the same experts, and a token goes to all of them."""
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    def experts_of(self, rank: int) -> slice:
        return slice(rank * self.local, (rank + 1) * self.local)

    def hidden_of(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        values = torch.randint(-2, 3, (self.tokens[rank], self.hidden), generator=generator)
        return values.to(self.dtype)

    def map_of(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + 500 + rank)
        distinct = torch.rand(self.tokens[rank], self.experts // self.repeated, generator=generator) < self.density
        distinct[1::7] = False  # rows without any expert
        groups = distinct.view(self.tokens[rank], self.ranks // self.repeated, 1, self.local)
        return groups.expand(-1, -1, self.repeated, -1).reshape(self.tokens[rank], self.experts).contiguous()

    def probs_of(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + 900 + rank)
        eighths = torch.randint(1, 9, (self.tokens[rank], self.experts), generator=generator) / 8
        return eighths * self.map_of(rank)

    def copies(self, rank: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """For each expert of a rank: the (source rank, token) pairs that it receives, in order."""
        maps = [self.map_of(source) for source in range(self.ranks)]
        for expert in range(*self.experts_of(rank).indices(self.experts)):
            yield expert, [(s, t) for s in range(self.ranks) for t in maps[s][:, expert].nonzero()[:, 0].tolist()]


@dataclasses.dataclass
class Permuted:
    """The expected rows of a rank in permuted mode."""

    sources: list[tuple[int, int] | None]
    """(source rank, token) of each row; None for padding."""
    experts: list[int]
    """The (global) expert of each row."""
    counts: list[int]
    dropped: bool


def permuted(case: Case, rank: int, capacity: int | None = None) -> Permuted:
    pad = case.pad or 1
    result = Permuted([], [], [], False)
    for expert, copies in case.copies(rank):
        room = len(copies) if capacity is None else max(0, capacity - len(result.sources))
        result.dropped |= len(copies) > room
        kept = copies[:room]
        padding = -len(kept) % pad
        result.sources += [*kept, *[None] * padding]
        result.experts += [expert] * (len(kept) + padding)
        result.counts.append(len(kept) + padding)
    return result


def rows_of(case: Case, layout: Permuted, per_rank: list[Tensor]) -> Tensor:
    """Selects the rows of a layout from the `[tokens, ...]` of each rank; padding is zero."""
    shape = per_rank[0].shape[1:]
    rows = [
        torch.zeros(shape, dtype=per_rank[0].dtype) if at is None else per_rank[at[0]][at[1]] for at in layout.sources
    ]
    return torch.stack(rows) if rows else torch.zeros((0, *shape), dtype=per_rank[0].dtype)


def probs_of(case: Case, layout: Permuted) -> Tensor:
    probs = [case.probs_of(rank) for rank in range(case.ranks)]
    values = [
        0.0 if at is None else probs[at[0]][at[1], expert].item()
        for at, expert in zip(layout.sources, layout.experts, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float32)


def scale_of(expert: int) -> int:
    """The factor by which an expert of the tests multiplies."""
    return 1 + expert % 3


def scales_of(case: Case) -> Tensor:
    return torch.tensor([float(scale_of(expert)) for expert in range(case.experts)])


def combined(case: Case, rank: int, kept: list[Permuted] | None = None) -> tuple[Tensor, Tensor]:
    """The expected result of combine in f32: tokens and weights. Dropped rows contribute nothing."""
    taken = case.map_of(rank).clone()
    if kept is not None:
        taken[:] = False
        for layout in kept:
            for at, expert in zip(layout.sources, layout.experts, strict=True):
                if at is not None and at[0] == rank:
                    taken[at[1], expert] = True
    factors = (taken * scales_of(case)).sum(1, keepdim=True)
    return case.hidden_of(rank).float() * factors, case.probs_of(rank) * taken


def combined_identity(case: Case, rank: int) -> Tensor:
    return (case.hidden_of(rank).float() * case.map_of(rank).sum(1, keepdim=True)).to(case.dtype)


@pytest.fixture
def world_of(device: str) -> Callable[[int], World]:
    """Returns a function that finds the world of a size on the device."""
    return lambda size: world_of_processes(size, device)


def new_buffer(here: Rank, case: Case, **arguments: Any) -> HybridEPBuffer:
    return HybridEPBuffer(here.group, case.hidden, max(case.tokens), case.local, **arguments)


def same(found: Tensor | None, expected: Tensor, what: str) -> None:
    assert found is not None, what
    assert found.dtype == expected.dtype and found.shape == expected.shape, f"{what}: {found.dtype} {found.shape}"
    if found.dtype == torch.float8_e4m3fn:
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(found.cpu(), expected), f"{what} differ"


def inputs(here: Rank, case: Case) -> dict[str, Tensor]:
    return {
        "hidden": case.hidden_of(here.rank).to(here.device),
        "routing_map": case.map_of(here.rank).to(here.device),
        "probs": case.probs_of(here.rank).to(here.device),
    }


def experts(case: Case, here: Rank, rows: Tensor) -> Tensor:
    """The outputs of this rank's experts for permuted rows of an exact layout."""
    layout = permuted(case, here.rank)
    factors = torch.tensor([scale_of(expert) for expert in layout.experts], dtype=rows.dtype, device=rows.device)
    return rows * factors.unsqueeze(1)
