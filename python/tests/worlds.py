"""Worlds of ranks, and the definition of dispatch and combine by docs/semantics.md, written independently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hybrid_ep import Buffer
from process_worlds import Rank, world_of_processes

T = TypeVar("T")


def on_threads(buffers: list[Buffer], work: Callable[[Buffer], T], *, raises: bool = True) -> list[T | BaseException]:
    """Runs `work` for each rank on its own thread; returns the results, or raises the first error."""
    results: list[Any] = [None] * len(buffers)

    def run(buffer: Buffer) -> None:
        try:
            results[buffer.rank] = work(buffer)
        except BaseException as error:
            results[buffer.rank] = error
            if raises:
                # The other ranks must not wait for this one.
                buffer.close()

    threads = [threading.Thread(target=run, args=(buffer,)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raises:
        errors = [result for result in results if isinstance(result, BaseException)]
        # An error that only reports a peer is not the cause: raise it last.
        for error in sorted(errors, key=lambda error: isinstance(error, ConnectionError)):
            raise error
    return results


def world(
    work: Callable[[Buffer], T], ranks: int, *, device: str = "cpu", experts: int = 8, **options: Any
) -> list[Any]:
    """Runs `work` for each rank of a new world, of threads on the CPU and of processes on GPUs; returns the results.

    Threads can also use GPUs. But a call of PyTorch on one thread may wait for the kernel of another rank, which may
    wait for a kernel of the first.
    """
    if device == "cuda":
        return world_of_processes(ranks, device).run(_work_on_gpu, work, experts, options)
    options = {"timeout": 20.0, "workers": 1} | options
    buffers = Buffer.threads(ranks, num_experts=experts, device=device, **options)
    try:
        return on_threads(buffers, work)
    finally:
        for buffer in buffers:
            buffer.close()


def _work_on_gpu(here: Rank, work: Callable[[Buffer], T], experts: int, options: dict[str, Any]) -> T:
    with (
        Buffer(here.group, num_experts=experts, device=here.device, **options) as buffer,
        # A CUDA graph cannot be captured on the default stream.
        torch.cuda.stream(torch.cuda.Stream(here.device)),
    ):
        result = work(buffer)
        # Raises the error of a kernel that gave up; the test reads no result that would raise it.
        buffer.synchronize()
    return result


class Row(NamedTuple):
    """A row that a rank receives: its source, and the experts of the rank that it is for."""

    source: int
    token: int
    experts: list[int]


@dataclass
class Case:
    """The inputs of all ranks, on the CPU."""

    ranks: int
    experts: int
    tokens: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    domains: int = 1

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    def weight(self, source: int, token: int, expert: int) -> float:
        column = self.topk_idx[source][token].tolist().index(expert)
        return float(self.topk_weights[source][token, column])

    def map(self, rank: int) -> Tensor:
        """Returns the routing of a rank as a map."""
        idx = self.topk_idx[rank]
        chosen = torch.zeros(idx.shape[0], self.experts + 1, dtype=torch.bool)
        return chosen.scatter(1, torch.where(idx < 0, self.experts, idx), True)[:, :-1]

    def probs(self, rank: int) -> Tensor:
        """Returns the weights of a rank as `[T, E]`."""
        idx, weights = self.topk_idx[rank], self.topk_weights[rank]
        dense = torch.zeros(idx.shape[0], self.experts + 1)
        return dense.scatter(1, torch.where(idx < 0, self.experts, idx), weights)[:, :-1]

    def copies(self) -> Iterator[tuple[int, int, list[int]]]:
        for source in range(self.ranks):
            for token, experts in enumerate(self.topk_idx[source].tolist()):
                yield source, token, sorted(expert for expert in experts if expert >= 0)

    def local_experts(self, rank: int) -> range:
        return range(rank * self.local, (rank + 1) * self.local)

    def rows(self, rank: int, pad_multiple: int | None, capacity: int | None = None) -> list[Row | None]:
        """Returns the rows of a rank up to the last used one; None for a padding row."""
        mine = self.local_experts(rank)
        limit = float("inf") if capacity is None else capacity
        if pad_multiple is None:
            all_rows = [Row(s, t, [e for e in es if e in mine]) for s, t, es in self.copies() if {*es} & {*mine}]
            return [row for at, row in enumerate(all_rows) if at < limit]
        rows: list[Row | None] = []
        for expert in mine:
            group = [Row(s, t, [expert]) for s, t, es in self.copies() if expert in es]
            kept = int(max(0, min(len(group), limit - len(rows))))
            rows += group[:kept] + [None] * (-kept % pad_multiple)
            if kept < len(group):
                # All later experts begin beyond the capacity.
                break
        return rows

    def counts(self, rank: int, pad_multiple: int, capacity: int | None = None) -> tuple[list[int], list[int]]:
        """Counts the rows of each local expert, with padding and without."""
        kept = [0] * self.local
        for row in self.rows(rank, pad_multiple, capacity):
            if row is not None:
                kept[row.experts[0] - rank * self.local] += 1
        return [-(-count // pad_multiple) * pad_multiple for count in kept], kept

    def combined(
        self,
        outputs: list[Tensor],
        pad_multiple: int | None,
        capacities: list[int | None] | None = None,
        wire: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Computes the expected result of combine on every rank, exact to the last bit."""
        capacities = capacities or [None] * self.ranks
        wire = wire or outputs[0].dtype
        # Partial sums: the sum of one rank's rows of a token, by (token's rank, token, rank).
        partial: dict[tuple[int, int, int], Tensor] = {}
        for rank in range(self.ranks):
            for at, row in enumerate(self.rows(rank, pad_multiple, capacities[rank])):
                if row is not None:
                    key = (row.source, row.token, rank)
                    partial[key] = partial.get(key, torch.zeros(outputs[rank].shape[1])) + outputs[rank][at].float()
        size = self.ranks // self.domains
        results = []
        for source in range(self.ranks):
            result = torch.zeros(self.tokens[source].shape[0], outputs[source].shape[1])
            for token in range(result.shape[0]):
                for domain in range(self.domains):
                    # The rank on the token's rail reduces the partial sums of a domain.
                    summer = domain * size + source % size
                    terms = [
                        (rank, partial.get((source, token, rank))) for rank in range(domain * size, (domain + 1) * size)
                    ]
                    total = torch.zeros(result.shape[1])
                    for rank, term in terms:
                        if term is not None:
                            total = total + (term if rank == summer else term.to(wire).float())
                    if any(term is not None for _, term in terms):
                        result[token] += total if domain == source // size else total.to(wire).float()
            results.append(result.to(outputs[source].dtype))
        return results


def make_case(
    ranks: int = 4,
    experts: int = 8,
    topk: int = 3,
    hidden: int = 16,
    tokens: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    domains: int = 1,
    seed: int = 0,
) -> Case:
    """Draws a case with unequal numbers of tokens, in which some choices are -1."""
    # Two generators, so that the routing does not depend on the hidden size.
    random, values = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    counts = [5 + 3 * rank for rank in range(ranks)] if tokens is None else tokens
    case = Case(ranks, experts, [], [], [], domains)
    for count in counts:
        case.tokens.append(torch.randn(count, hidden, generator=values).to(dtype))
        chosen = torch.rand(count, experts, generator=random).argsort(1)[:, :topk]
        open_ = torch.rand(count, topk, generator=random) < 0.2
        case.topk_idx.append(chosen.masked_fill(open_, -1))
        case.topk_weights.append(torch.rand(count, topk, generator=random) + 0.1)
    return case
