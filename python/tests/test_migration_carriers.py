"""The runtime over engines of rails in place of gloo."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from hybrid_ep import CallerError, PeerError, SetupError
from hybrid_ep.migration import ExpertDomains, ExpertMigration
from migration_world import EXPERTS, TWO, adam, hybrid, lose_rank_3, run_and_lose_rank_3, train_hybrid
from process_worlds import Rank, World, has_libfabric, world_of_processes

ALL = ExpertDomains.uniform(ranks=4, datacenters=4)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = world_of_processes(4, "cpu")
    yield world
    world.stop()


def _losses(here: Rank, plan: ExpertDomains, carrier: str) -> list[float]:
    codecs = {"weights": "delta:0.1", "gradients": "topk:0.1", "dense_gradients": "int8"}
    with ExpertMigration(plan, num_experts=EXPERTS, carrier=carrier, **codecs) as migration:
        model = hybrid(migration)
        return train_hybrid(migration, model, range(6), adam(model))


@pytest.mark.parametrize("plan", [TWO, ALL], ids=["pairs", "all"])
def test_every_carrier_gives_the_same_bits(world: World, plan: ExpertDomains) -> None:
    expected = world.run(_losses, plan, "gloo")
    over_libfabric = ("tcp", "shm") if has_libfabric() else ()
    for carrier in ("loopback", "paced:1GB/s,1ms", *over_libfabric):
        assert world.run(_losses, plan, carrier) == expected, carrier


def _refused(here: Rank, carrier: str, says: str) -> None:
    # A rank may be told of another rank's error before it finds its own.
    with pytest.raises((CallerError, SetupError, PeerError), match=says) as error:
        ExpertMigration(TWO, num_experts=EXPERTS, carrier=carrier)
    assert not re.search(r"HYBRID_EP_TRANSPORT\b", str(error.value)), "the engine is an argument"


@pytest.mark.parametrize(
    ("carrier", "says"),
    [
        ("no-such-engine", "no-such-engine|libfabric"),
        ("paced:fast", r"carrier = paced:fast: .*such as 25GB/s,5us"),
        ("paced:1GB/s,1ms,kernel", "only GPUs have a `kernel`"),
    ],
)
def test_an_engine_that_cannot_be_opened_is_refused_on_every_rank(world: World, carrier: str, says: str) -> None:
    world.run(_refused, carrier, says)


def _differ(here: Rank) -> None:
    with pytest.raises(CallerError, match="carrier is 'gloo' on rank 0 and 'loopback' on rank 2"):
        ExpertMigration(TWO, num_experts=EXPERTS, carrier="loopback" if here.rank == 2 else "gloo")


def test_ranks_with_different_carriers_are_refused(world: World) -> None:
    world.run(_differ)


def _lose_a_rank(here: Rank) -> None:
    error = lose_rank_3(here, lambda: ExpertMigration(TWO, num_experts=EXPERTS, carrier="loopback"))
    # Rank 1 is in the expert domain of the lost rank.
    if here.rank == 1:
        assert error.fault == "died", error


def test_a_lost_rank_is_named_and_ends_all_ranks() -> None:
    run_and_lose_rank_3(_lose_a_rank)
