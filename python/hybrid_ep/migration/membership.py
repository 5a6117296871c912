"""What a rank is in a plan: checks of process groups, the agreement on arguments, and `Ownership` of experts."""

from __future__ import annotations

import json
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._sharing import Shared
from ..errors import CallerError
from ..rendezvous import Meeting
from .plan import ExpertDomains

__all__ = ["Ownership", "agree", "ranks_of"]


class Ownership(Shared):
    """Which experts a rank owns, with the attributes of a buffer that `GroupedExperts` reads."""

    def __init__(
        self, plan: ExpertDomains, rank: int, num_experts: int, ep_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.num_experts = num_experts
        self.local_experts = plan.owned_by(rank, num_experts)
        self.num_local_experts = len(self.local_experts)
        self._group, self._device_type = ep_group, device.type
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks of the EP group as a device mesh, over which the parameters of experts are sharded; None for one
        rank."""
        if self._mesh is None and self._group.size() > 1:
            self._mesh = DeviceMesh.from_group(self._group, self._device_type, mesh_dim_names=("ep",))
        return self._mesh


def ranks_of(
    plan: ExpertDomains, group: dist.ProcessGroup, ep_group: dist.ProcessGroup | None, num_experts: int
) -> tuple[tuple[int, ...], dist.ProcessGroup]:
    """Checks that process groups and the number of experts fit a plan.

    Returns:
        The ranks of `group` in the job, and the process group of this rank's EP group.

    Raises:
        CallerError: They do not fit.
    """
    stages = len(plan.stages)
    if plan.ranks != group.size():
        remedy = f"; the plan has {stages} pipeline stages: pass group=, this stage's ranks" if stages > 1 else ""
        raise CallerError(f"plan: is for {plan.ranks} ranks, and the group has {group.size()}{remedy}")
    ranks = tuple(dist.get_process_group_ranks(group))
    if stages > 1 and ranks not in plan.stages:
        raise CallerError(
            f"group: has ranks {[*ranks]}, which are not a pipeline stage of the plan; pass those of this "
            "rank's stage, plan.stages[plan.stage_of(rank)]"
        )
    of_group = len(plan.ep_groups[0])
    if num_experts < 1 or num_experts % of_group:
        which = " of an EP group" if len(plan.ep_groups) > 1 else ""
        raise CallerError(f"num_experts is {num_experts}, must be a multiple of the number of ranks{which}, {of_group}")
    return ranks, _ep_group(plan, group, ep_group, ranks)


def _ep_group(
    plan: ExpertDomains, group: dist.ProcessGroup, ep_group: dist.ProcessGroup | None, ranks: tuple[int, ...]
) -> dist.ProcessGroup:
    """Returns the process group of this rank's EP group. `ranks` are those of `group` in the job."""
    expected = tuple(ranks[place] for place in plan.ep_group_of(group.rank()))
    if ep_group is None:
        if len(plan.ep_groups) == 1:
            return group
        raise CallerError(
            f"ep_group: the plan has {len(plan.ep_groups)} EP groups; pass the process group of this rank's, ranks "
            f"{[*expected]}"
        )
    found = tuple(dist.get_process_group_ranks(ep_group))
    if found != expected:
        raise CallerError(f"ep_group: has ranks {[*found]}, must have those of this rank's EP group, {[*expected]}")
    return ep_group


def agree(meeting: Meeting, settings: dict[str, Any]) -> int:
    """Checks that all ranks passed the same arguments. Returns a new number, the same on all ranks."""
    own = json.dumps([settings, secrets.randbits(63)]).encode()
    found = [json.loads(one) for one in meeting.all_gather(own)]
    first: dict[str, Any]
    run: int
    first, run = found[0]
    for rank, (theirs, _) in enumerate(found):
        for name, value in first.items():
            if theirs.get(name) != value:
                raise CallerError(
                    f"{name} is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank}; it must be the same on "
                    "every rank"
                )
    return run
