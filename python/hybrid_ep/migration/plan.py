"""`ExpertDomains`: the groups of a plan, and which rank holds which experts."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CallerError

__all__ = ["ExpertDomains"]


class ExpertDomains:
    """The ranks, divided twice.

    The ranks of an *expert domain* gather each other's experts, so all of them hold the same experts. The ranks of a
    *dispatch group* exchange tokens. A dispatch group has one rank of every expert domain: the rank at position `d` is
    in domain `d`.

    The ranks may form several *EP groups*, each of which has all experts and its own domains and dispatch groups. The
    ranks at the same place of every EP group own the same experts: in a group of `n` ranks, expert `e` of E is owned by
    the rank at place `e // (E // n)`.

    Attributes:
        ranks (int): The number of ranks.
        ep_groups (tuple[tuple[int, ...], ...]): The ranks of each EP group, ascending.
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
        ep_groups: The ranks of each EP group, in any order; all have equally many. Every expert domain and every
            dispatch group lies inside one of them, and the position of a domain counts those of its EP group. Default:
            one EP group of all ranks.

    Raises:
        CallerError: A rank is missing or is in two groups, or the divisions do not fit.

    Example:
        >>> ExpertDomains([[0, 2], [1, 3]], [[0, 1], [2, 3]]) == ExpertDomains.uniform(ranks=4, datacenters=2)
        True
    """

    def __init__(
        self,
        expert_domains: Sequence[Sequence[int]],
        dispatch_groups: Sequence[Sequence[int]],
        datacenters: Sequence[Sequence[int]] | None = None,
        *,
        ep_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.expert_domains = tuple(tuple(sorted(domain)) for domain in expert_domains)
        self.dispatch_groups = tuple(tuple(group) for group in dispatch_groups)
        sites = dispatch_groups if datacenters is None else datacenters
        self.datacenters = tuple(sorted(tuple(sorted(ranks)) for ranks in sites))
        self.ranks = sum(map(len, self.expert_domains))
        self.stages: tuple[tuple[int, ...], ...] = (tuple(range(self.ranks)),)
        groups_of_all = [range(self.ranks)] if ep_groups is None else ep_groups
        self.ep_groups = tuple(sorted(tuple(sorted(group)) for group in groups_of_all))
        for name in ("expert_domains", "dispatch_groups", "datacenters", "ep_groups"):
            groups: tuple[tuple[int, ...], ...] = getattr(self, name)
            if not all(groups):
                raise CallerError(f"{name}: a group has no rank, found {_lists(groups)}")
            if sorted(rank for group in groups for rank in group) != [*range(self.ranks)] or not self.ranks:
                raise CallerError(f"{name}: must have each rank exactly once, numbered from 0, found {_lists(groups)}")
        self._domain_of = {rank: at for at, domain in enumerate(self.expert_domains) for rank in domain}
        self._group_of = {rank: at for at, group in enumerate(self.dispatch_groups) for rank in group}
        self._ep_group_of = {rank: at for at, group in enumerate(self.ep_groups) for rank in group}
        if len({len(group) for group in self.ep_groups}) > 1:
            raise CallerError(f"ep_groups: all must have equally many ranks, found {_lists(self.ep_groups)}")
        for name in ("expert_domains", "dispatch_groups"):
            for ranks in getattr(self, name):
                if len({self._ep_group_of[rank] for rank in ranks}) > 1:
                    raise CallerError(f"{name}: {list(ranks)} must lie inside one EP group of {_lists(self.ep_groups)}")
        domains_of: list[list[int]] = [[] for _ in self.ep_groups]
        for at, domain in enumerate(self.expert_domains):
            domains_of[self._ep_group_of[domain[0]]].append(at)
        for group in self.dispatch_groups:
            found = [self._domain_of[rank] for rank in group]
            if found != domains_of[self._ep_group_of[group[0]]]:
                within = " of its EP group" if len(self.ep_groups) > 1 else ""
                raise CallerError(
                    f"dispatch_groups: {list(group)} must have one rank of each expert domain{within}, in the order of "
                    f"the domains; its ranks are in the domains {found}"
                )

    @classmethod
    def uniform(cls, *, ranks: int, datacenters: int, ep_groups: int = 1) -> ExpertDomains:
        """Makes the plan in which tokens stay inside a datacenter.

        Datacenter `c` has `ranks // datacenters` consecutive ranks, the first of which is `c * (ranks // datacenters)`.
        An expert domain has the ranks of equal index in all datacenters; a dispatch group is a datacenter.
        `datacenters=1` is expert parallelism without migration.

        With `ep_groups=g`, the ranks of a datacenter are divided into `g` dispatch groups of consecutive ranks. An EP
        group has one of them in each datacenter.

        Args:
            ranks: The number of ranks.
            datacenters: The number of datacenters, a divisor of `ranks`.
            ep_groups: The number of EP groups, a divisor of the number of ranks of a datacenter.

        Returns:
            The plan.

        Raises:
            CallerError: `datacenters` does not divide `ranks`, or `ep_groups` the ranks of a datacenter.
        """
        if datacenters < 1 or ranks < 1 or ranks % datacenters:
            raise CallerError(f"datacenters is {datacenters}, must divide the number of ranks, {ranks}")
        size = ranks // datacenters
        if ep_groups < 1 or size % ep_groups:
            raise CallerError(f"ep_groups is {ep_groups}, must divide the number of ranks of a datacenter, {size}")
        part = size // ep_groups
        return cls(
            [range(place, ranks, size) for place in range(size)],
            [range(first, first + part) for first in range(0, ranks, part)],
            [range(first, first + size) for first in range(0, ranks, size)],
            ep_groups=[[rank for rank in range(ranks) if rank % size // part == group] for group in range(ep_groups)],
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
            CallerError: The file does not have this form, its groups do not fit, or the plan has tensor parallelism,
                which is not implemented.
            OSError: The file cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            content = json.loads(text)
            domains, groups, located = _groups_of(content)
            of_group = cls(domains, groups, located)
        except (CallerError, ValueError) as error:
            raise CallerError(f"{os.fspath(path)}: {error}; write the file with hybrid-ep plan --groups") from None
        try:
            layout = _layout_of(content.get("layout"), of_group)
            sites = layout.datacenters if datacenters is None else datacenters
            # The file has the groups of one EP group, and all EP groups are divided alike.
            plan = cls(
                [
                    [ranks[place] for place in domain]
                    for ranks in layout.ep_groups
                    for domain in of_group.expert_domains
                ],
                [[ranks[place] for place in group] for ranks in layout.ep_groups for group in of_group.dispatch_groups],
                sites,
                ep_groups=layout.ep_groups,
            )
        except CallerError as error:
            raise CallerError(f"{os.fspath(path)}: {error}") from None
        plan.stages = layout.stages
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

    def ep_group_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a rank's EP group, ascending."""
        return self.ep_groups[self._ep_group_of[rank]]

    def copies_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that own the same experts as a rank, itself among them: one of each EP group, ascending."""
        place = self.ep_group_of(rank).index(rank)
        return tuple(sorted(group[place] for group in self.ep_groups))

    def owned_by(self, rank: int, num_experts: int) -> range:
        """Returns the experts that a rank owns, of `num_experts`, a multiple of the number of ranks of an EP group."""
        group = self.ep_group_of(rank)
        local, place = num_experts // len(group), group.index(rank)
        return range(place * local, (place + 1) * local)

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
            For every expert the remaining ranks that hold it: first the remaining owners, ascending, then ranks with a
            replica, ascending. The list is empty if the expert is lost.
        """
        local = num_experts // len(self.ep_groups[0])
        holders = {}
        for expert in range(num_experts):
            owners = sorted(group[expert // local] for group in self.ep_groups)
            replicas = sorted(rank for owner in owners for rank in self.domain_of(owner) if rank != owner)
            holders[expert] = [rank for rank in (*owners, *replicas) if rank not in lost]
        return holders

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertDomains):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        *groups, of_all = (_lists(groups) for groups in self._key())
        several = f", ep_groups={of_all}" if len(of_all) > 1 else ""
        return f"ExpertDomains({', '.join(map(str, groups))}{several})"

    def _key(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return self.expert_domains, self.dispatch_groups, self.datacenters, self.ep_groups


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


class _Layout(NamedTuple):
    """The ranks of the stages, and how a stage is divided. Groups number the ranks of a stage from 0."""

    stages: tuple[tuple[int, ...], ...]
    ep_groups: list[list[int]]
    datacenters: list[list[int]]


def _layout_of(layout: Any, of_group: ExpertDomains) -> _Layout:
    """Reads a file's layout. Refuses a plan that the runtime cannot execute. A forward plan has no layout.

    Args:
        layout: What the file has.
        of_group: The groups of one EP group.
    """
    one = [[*range(of_group.ranks)]]
    if layout is None:
        return _Layout((tuple(one[0]),), one, _lists(of_group.datacenters))
    tensor_parallel = layout.get("tensor_parallel") if isinstance(layout, dict) else None
    if type(tensor_parallel) is not int:
        raise CallerError("layout: tensor_parallel: expected an integer")
    if tensor_parallel != 1:
        raise CallerError(
            f"the plan has {tensor_parallel} GPUs that split the dense parameters (tensor parallelism); training "
            "across datacenters needs 1: plan with --runnable; if the model does not fit then, plan for more memory, "
            "more stages or a smaller model"
        )
    try:
        groups = [[[int(rank) for rank in group] for group in stage] for stage in layout["ep_groups"]]
    except (LookupError, TypeError, ValueError):
        raise CallerError("layout: ep_groups: expected the lists of ranks of the EP groups of each stage") from None
    stages = tuple(tuple(sorted(rank for group in stage for rank in group)) for stage in groups)
    all_ranks = sorted(rank for stage in stages for rank in stage)
    ascend = all(group == sorted(group) for stage in groups for group in stage)
    sizes = {len(group) for stage in groups for group in stage}
    if not ascend or sizes != {of_group.ranks} or all_ranks != [*range(len(all_ranks))]:
        raise CallerError(
            f"layout: ep_groups: an EP group must have {of_group.ranks} ranks, ascending, and a rank be in one of "
            f"them, found {groups}"
        )
    # Of each stage: the EP groups, in its own numbering.
    places = [[[stage.index(rank) for rank in group] for group in of] for stage, of in zip(stages, groups, strict=True)]
    if any(other != places[0] for other in places):
        raise CallerError(f"layout: ep_groups: all stages must be divided alike, found {groups}")
    if len(places[0]) == 1:
        return _Layout(stages, places[0], _lists(of_group.datacenters))
    try:
        sites = [[int(rank) for rank in ranks] for ranks in layout["datacenters"]]
    except (LookupError, TypeError, ValueError):
        raise CallerError(
            "layout: datacenters: expected the ranks of each datacenter; write the file with this version of hybrid-ep"
        ) from None
    located = [[[stage.index(rank) for rank in site if rank in stage] for site in sites] for stage in stages]
    if any(other != located[0] for other in located):
        raise CallerError(f"layout: datacenters: all stages must be divided alike, found {sites}")
    return _Layout(stages, places[0], [site for site in located[0] if site])


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
