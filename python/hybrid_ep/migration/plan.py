"""`ExpertDomains`: the groups of a plan, and which rank holds which experts."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..errors import CallerError

__all__ = ["ExpertDomains"]


class ExpertDomains:
    """The ranks, divided twice.

    The ranks of an *expert domain* gather each other's experts, so all of them hold the same experts. The ranks of a
    *dispatch group* exchange tokens. A dispatch group has one rank of every expert domain: the rank at position `d` is
    in domain `d`.

    Expert `e` of E is owned by rank `e // (E // ranks)`.

    Attributes:
        ranks (int): The number of ranks.
        expert_domains (tuple[tuple[int, ...], ...]): The ranks of each expert domain, ascending.
        dispatch_groups (tuple[tuple[int, ...], ...]): The ranks of each dispatch group, by position.
        datacenters (tuple[tuple[int, ...], ...]): The ranks of each datacenter, ascending. Dense gradients are summed
            inside each of them first, then between them in this order.
        stages (tuple[tuple[int, ...], ...]): The ranks of the job in each pipeline stage, ascending. The groups
            number the ranks of one stage from 0. There is one stage of all ranks, unless `from_file` reads others.

    Args:
        expert_domains: The ranks of each expert domain, in any order.
        dispatch_groups: The ranks of each dispatch group; the rank at position `d` is in `expert_domains[d]`.
        datacenters: The ranks of each datacenter, in any order; they may have different numbers of ranks. Default: the
            dispatch groups.

    Raises:
        CallerError: A rank is missing or is in two groups, or the two divisions do not fit.

    Example:
        >>> ExpertDomains([[0, 2], [1, 3]], [[0, 1], [2, 3]]) == ExpertDomains.uniform(ranks=4, datacenters=2)
        True
    """

    def __init__(
        self,
        expert_domains: Sequence[Sequence[int]],
        dispatch_groups: Sequence[Sequence[int]],
        datacenters: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.expert_domains = tuple(tuple(sorted(domain)) for domain in expert_domains)
        self.dispatch_groups = tuple(tuple(group) for group in dispatch_groups)
        sites = dispatch_groups if datacenters is None else datacenters
        self.datacenters = tuple(sorted(tuple(sorted(ranks)) for ranks in sites))
        self.ranks = sum(map(len, self.expert_domains))
        self.stages: tuple[tuple[int, ...], ...] = (tuple(range(self.ranks)),)
        for name in ("expert_domains", "dispatch_groups", "datacenters"):
            groups: tuple[tuple[int, ...], ...] = getattr(self, name)
            if not all(groups):
                raise CallerError(f"{name}: a group has no rank, found {_lists(groups)}")
            if sorted(rank for group in groups for rank in group) != [*range(self.ranks)] or not self.ranks:
                raise CallerError(f"{name}: must have each rank exactly once, numbered from 0, found {_lists(groups)}")
        self._domain_of = {rank: at for at, domain in enumerate(self.expert_domains) for rank in domain}
        self._group_of = {rank: at for at, group in enumerate(self.dispatch_groups) for rank in group}
        for group in self.dispatch_groups:
            found = [self._domain_of[rank] for rank in group]
            if found != [*range(len(self.expert_domains))]:
                raise CallerError(
                    f"dispatch_groups: {list(group)} must have one rank of each expert domain, in the order of the "
                    f"domains; its ranks are in the domains {found}"
                )

    @classmethod
    def uniform(cls, *, ranks: int, datacenters: int) -> ExpertDomains:
        """Makes the plan in which tokens stay inside a datacenter.

        Datacenter `c` has `ranks // datacenters` consecutive ranks, the first of which is `c * (ranks // datacenters)`.
        An expert domain has the ranks of equal index in all datacenters; a dispatch group is a datacenter.
        `datacenters=1` is expert parallelism without migration.

        Args:
            ranks: The number of ranks.
            datacenters: The number of datacenters, a divisor of `ranks`.

        Returns:
            The plan.

        Raises:
            CallerError: `datacenters` does not divide `ranks`.
        """
        if datacenters < 1 or ranks < 1 or ranks % datacenters:
            raise CallerError(f"datacenters is {datacenters}, must divide the number of ranks, {ranks}")
        size = ranks // datacenters
        return cls(
            [range(place, ranks, size) for place in range(size)],
            [range(first, first + size) for first in range(0, ranks, size)],
        )

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, datacenters: Sequence[Sequence[int]] | None = None
    ) -> ExpertDomains:
        """Reads the file that `hybrid-ep plan --groups` writes.

        Args:
            path: The file: JSON with `expert_domains` and `dispatch_groups`, and the `location` of each rank in
                `rank_groups`, whose first number is the datacenter.
            datacenters: The ranks of each datacenter. Default: those of the file.

        Returns:
            The plan.

        Raises:
            CallerError: The file does not have this form, its groups do not fit, or the plan has several EP groups in a
                stage or tensor parallelism, which are not implemented.
            OSError: The file cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            content = json.loads(text)
            domains, groups, located = _groups_of(content)
            plan = cls(domains, groups, located if datacenters is None else datacenters)
        except (CallerError, ValueError) as error:
            raise CallerError(f"{os.fspath(path)}: {error}; write the file with hybrid-ep plan --groups") from None
        try:
            plan.stages = _stages_of(content.get("layout"), plan)
        except CallerError as error:
            raise CallerError(f"{os.fspath(path)}: {error}") from None
        return plan

    def stage_of(self, rank: int) -> int:
        """Returns the pipeline stage of a rank of the job.

        Raises:
            CallerError: No stage has this rank.
        """
        for stage, ranks in enumerate(self.stages):
            if rank in ranks:
                return stage
        raise CallerError(f"rank {rank} is in no stage of the plan, which has {len(self.stages)} of {self.ranks} ranks")

    def domain_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a rank's expert domain, ascending."""
        return self.expert_domains[self._domain_of[rank]]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a rank's dispatch group, by position."""
        return self.dispatch_groups[self._group_of[rank]]

    def owned_by(self, rank: int, num_experts: int) -> range:
        """Returns the experts that a rank owns, of `num_experts`, which is a multiple of the number of ranks."""
        local = num_experts // self.ranks
        return range(rank * local, (rank + 1) * local)

    def held_by(self, rank: int, num_experts: int) -> list[int]:
        """Returns the experts that a rank holds: first its own, then the replicas, in the order of their owners."""
        peers = [peer for peer in self.domain_of(rank) if peer != rank]
        return [expert for holder in (rank, *peers) for expert in self.owned_by(holder, num_experts)]

    def survivors(self, num_experts: int, lost: Collection[int]) -> dict[int, list[int]]:
        """Lists which ranks still hold each expert when some ranks are lost.

        Args:
            num_experts: E, the number of experts.
            lost: The lost ranks.

        Returns:
            For every expert the remaining ranks that hold it: its owner first, if it remains, then ranks with a
            replica, ascending. The list is empty if the expert is lost.
        """
        local = num_experts // self.ranks
        holders = {}
        for expert in range(num_experts):
            owner = expert // local
            domain = [owner, *(rank for rank in self.domain_of(owner) if rank != owner)]
            holders[expert] = [rank for rank in domain if rank not in lost]
        return holders

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertDomains):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"ExpertDomains({', '.join(str(_lists(groups)) for groups in self._key())})"

    def _key(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return self.expert_domains, self.dispatch_groups, self.datacenters


def _groups_of(content: Any) -> tuple[list[list[int]], list[list[int]], list[list[int]] | None]:
    if not isinstance(content, dict):
        raise CallerError("expected a JSON object")
    found = []
    for key in ("expert_domains", "dispatch_groups"):
        groups = content.get(key)
        if not isinstance(groups, list) or not all(
            isinstance(group, list) and all(type(rank) is int for rank in group) for group in groups
        ):
            raise CallerError(f"{key}: expected a list of lists of ranks")
        found.append(groups)
    return found[0], found[1], _datacenters_of(content)


# What the runtime needs to be 1 in a plan, and what a user can do about it.
_LAYOUT = {
    "ep_groups_per_stage": ("EP groups in a stage", "plan with --runnable"),
    "tensor_parallel": (
        "GPUs that split the dense parameters (tensor parallelism)",
        "plan with --runnable; if the model does not fit then, plan for more memory, more stages or a smaller model",
    ),
}


def _stages_of(layout: Any, plan: ExpertDomains) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage. Refuses a plan that the runtime cannot execute. A forward plan has no layout."""
    if layout is None:
        return plan.stages
    for key, (what, remedy) in _LAYOUT.items():
        if not isinstance(layout, dict) or type(layout.get(key)) is not int:
            raise CallerError(f"layout: {key}: expected an integer")
        if layout[key] != 1:
            raise CallerError(f"the plan has {layout[key]} {what}; training across datacenters needs 1: {remedy}")
    try:
        stages = tuple(tuple(ranks) for [ranks] in layout["ep_groups"])
        all_ranks = sorted(int(rank) for stage in stages for rank in stage)
    except (LookupError, TypeError, ValueError):
        raise CallerError("layout: ep_groups: expected a list of ranks for the EP group of each stage") from None
    ascend = all([*stage] == sorted(stage) for stage in stages)
    if not ascend or {len(stage) for stage in stages} != {plan.ranks} or all_ranks != [*range(len(all_ranks))]:
        raise CallerError(
            f"layout: ep_groups: a stage must have {plan.ranks} ranks, ascending, and a rank one stage, found "
            f"{_lists(stages)}"
        )
    return stages


def _datacenters_of(content: dict[str, Any]) -> list[list[int]] | None:
    """The ranks by the first number of their location; None for a file without locations."""
    if "rank_groups" not in content:
        return None
    found: dict[int, list[int]] = {}
    try:
        for rank, place in enumerate(content["rank_groups"]):
            found.setdefault(int(place["location"][0]), []).append(rank)
    except (LookupError, TypeError):
        raise CallerError("rank_groups: expected the location of each rank, a list of numbers") from None
    return [*found.values()]


def _lists(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*group] for group in groups]
