"""Errors of training across datacenters name the rank at fault."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_ep import CallerError, PeerError
from hybrid_ep.migration import ExpertMigration
from hybrid_ep.migration.job_ranks import JobRanks
from migration_world import EXPERTS, TWO, lose_rank_3, refused, run_and_lose_rank_3
from process_worlds import Rank, world_of_processes


def _one_stays_away(here: Rank) -> None:
    # New processes may take longer than the timeout to begin.
    dist.barrier()
    with mock.patch.dict(os.environ, HYBRID_EP_TIMEOUT_MS="500"):
        if here.rank != 3:
            with pytest.raises(
                PeerError, match=r"rank 3 never joined.*every rank of the group must make the migration"
            ):
                ExpertMigration(TWO, num_experts=EXPERTS)
    dist.barrier()


def test_a_rank_that_makes_no_migration_is_named() -> None:
    # Afterwards the ranks have had different numbers of meetings: use new processes.
    world = world_of_processes(4, "cpu")
    try:
        world.run(_one_stays_away, seconds=60)
    finally:
        world.stop()


def _lose_a_rank(here: Rank) -> None:
    # Rank 2 is in the lost rank's dispatch group, whose buffer counts ranks from 0; rank 1 is in its expert domain.
    error = lose_rank_3(here, lambda: ExpertMigration(TWO, num_experts=EXPERTS))
    if here.rank == 1:
        assert error.fault == "died", error


def test_a_lost_rank_is_named_and_ends_all_ranks() -> None:
    run_and_lose_rank_3(_lose_a_rank)


class _Refuses:
    ranks = 2

    def dispatch(self, error: Exception) -> None:
        raise error

    check_peers = dispatch


_LOST = PeerError(
    "rank 1 died (dispatch #3): rank 0 waited for a flag (reported by rank 9)",
    peer=1,
    rank=0,
    operator="dispatch",
    fault="died",
    step=3,
    machine="node-a",
)


def test_errors_of_a_dispatch_group_name_ranks_of_the_job() -> None:
    group = JobRanks(_Refuses(), [7, 4], contextlib.nullcontext)
    assert group.ranks == 2
    with pytest.raises(PeerError) as caught:
        group.dispatch(_LOST)
    error = caught.value
    assert str(error) == "rank 4 died (dispatch #3): rank 7 waited for a flag (reported by rank 9)"
    assert (error.peer, error.rank, error.fault, error.machine) == (4, 7, "died", "node-a")
    with refused("hidden is 8 on rank 7 and 16 on rank 4"):
        group.dispatch(CallerError("hidden is 8 on rank 0 and 16 on rank 1"))


def test_only_errors_of_operators_are_passed_on() -> None:
    passed_on: list[bool] = []

    @contextlib.contextmanager
    def explained() -> Iterator[None]:
        passed_on.append(True)
        yield

    group = JobRanks(_Refuses(), [7, 4], explained)
    for call, count in ((group.check_peers, 0), (group.dispatch, 1)):
        with pytest.raises(PeerError):
            call(_LOST)
        assert len(passed_on) == count


def _group_of(migration: ExpertMigration) -> JobRanks:
    return JobRanks(_Refuses(), migration.plan.group_of(migration.rank), migration._dense.explained)


def _an_operator_fails(here: Rank) -> None:
    with ExpertMigration(TWO, num_experts=EXPERTS) as migration:
        if here.rank == 0:
            with pytest.raises(PeerError, match=r"rank 1 died \(dispatch #3\)"):
                _group_of(migration).dispatch(_LOST)
        with pytest.raises(PeerError, match="rank 1 died"):
            while True:
                migration._dense.check()
                time.sleep(0.01)


def test_an_error_of_an_operator_is_passed_on_to_other_dispatch_groups() -> None:
    world_of_processes(4, "cpu").run(_an_operator_fails, seconds=60)


def _a_rank_leaves_for_a_fault_elsewhere(here: Rank) -> None:
    left = PeerError("rank 1 left", peer=1, rank=0, operator="combine", fault="left", step=3)
    with ExpertMigration(TWO, num_experts=EXPERTS) as migration:
        dist.barrier()
        if here.rank == 0:
            # Rank 1 has left because rank 3 died, and news of it comes after the end of rank 1.
            with pytest.raises(PeerError, match="rank 3 died"), mock.patch("hybrid_ep.migration.dense._NEWS", 30):
                _group_of(migration).dispatch(left)
        elif here.rank == 1:
            time.sleep(0.1)
            migration._dense.blame(3, "died")
        dist.barrier()


def test_a_rank_that_leaves_for_a_fault_elsewhere_is_not_the_rank_at_fault() -> None:
    world_of_processes(4, "cpu").run(_a_rank_leaves_for_a_fault_elsewhere, seconds=60)
