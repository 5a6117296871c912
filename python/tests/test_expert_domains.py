"""Plans of training across datacenters: which rank gathers from which, and which ranks exchange tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep import CallerError
from hybrid_ep.migration import ExpertDomains

TWO = ExpertDomains.uniform(ranks=4, datacenters=2)


def test_a_uniform_plan_keeps_tokens_inside_datacenters() -> None:
    plan = ExpertDomains.uniform(ranks=6, datacenters=3)
    assert plan.expert_domains == ((0, 2, 4), (1, 3, 5))
    assert plan.dispatch_groups == ((0, 1), (2, 3), (4, 5))
    assert plan.domain_of(3) == (1, 3, 5) and plan.group_of(3) == (2, 3)
    # 12 experts: rank 3 owns 6 and 7; its peers 1 and 5 own 2 and 3, and 10 and 11.
    assert plan.held_by(3, 12) == [6, 7, 2, 3, 10, 11]


@pytest.mark.parametrize("datacenters", [1, 2, 4])
def test_every_dispatch_group_holds_all_experts(datacenters: int) -> None:
    plan = ExpertDomains.uniform(ranks=4, datacenters=datacenters)
    for group in plan.dispatch_groups:
        held = [expert for rank in group for expert in plan.held_by(rank, 8)]
        assert sorted(held) == [*range(8)]


def test_survivors_are_the_holders_that_remain() -> None:
    assert TWO.survivors(4, lost={2, 3}) == {0: [0], 1: [1], 2: [0], 3: [1]}
    assert TWO.survivors(4, lost={0}) == {0: [2], 1: [1, 3], 2: [2], 3: [3, 1]}
    assert TWO.survivors(4, lost={0, 2})[0] == []


def test_the_planner_s_file_is_read(tmp_path: Path) -> None:
    groups = tmp_path / "groups.json"
    options = ["--cluster", "paper-m", "--model", "paper-gpt-large", "--strategy", "expert-domains"]
    command = [sys.executable, "-m", "hybrid_ep", "plan", *options, "--groups", str(groups)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plan = ExpertDomains.from_file(groups)
    written = json.loads(groups.read_text())
    assert plan.ranks == written["ranks"]
    for rank, entry in enumerate(written["rank_groups"]):
        assert plan.domain_of(rank) == tuple(written["expert_domains"][entry["expert_domain"]])
        assert plan.group_of(rank) == tuple(written["dispatch_groups"][entry["dispatch_group"]])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "Expecting"),
        ("[]", "expected a JSON object"),
        ('{"expert_domains": [[0]]}', "dispatch_groups: expected a list of lists of ranks"),
        ('{"expert_domains": [[0.5]], "dispatch_groups": [[0]]}', "expert_domains: expected a list of lists of ranks"),
        ('{"expert_domains": [[0, 2]], "dispatch_groups": [[0], [1]]}', r"found \[\[0, 2\]\]"),
        ('{"expert_domains": [[0, 1]], "dispatch_groups": [[0, 1]]}', r"in the domains \[0, 0\]"),
        ('{"expert_domains": [[0], [1]], "dispatch_groups": [[1, 0]]}', r"in the domains \[1, 0\]"),
    ],
)
def test_a_wrong_file_is_refused(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    file.write_text(content)
    with pytest.raises(CallerError, match=f"groups.json: .*{says}"):
        ExpertDomains.from_file(file)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tensor_parallel": 4}, r"4 GPUs that .* \(tensor parallelism\); .* --runnable"),
        ({"tensor_parallel": None}, "layout: tensor_parallel: expected an integer"),
        ({"ep_groups": None}, "ep_groups: expected the lists of ranks"),
        ({"ep_groups": [[0, 1], [2, 3]]}, "ep_groups: expected the lists of ranks"),
        ({"ep_groups": [[[0], [1]]]}, r"must have 2 ranks, .* found \[\[\[0\], \[1\]\]\]"),
        ({"ep_groups": [[[0, 1]], [[2]]]}, r"must have 2 ranks, .* found \[\[\[0, 1\]\], \[\[2\]\]\]"),
        ({"ep_groups": [[[1, 0]], [[2, 3]]]}, r"2 ranks, ascending, .* found \[\[\[1, 0\]\]"),
        ({"ep_groups": [[[0, 1]], [[1, 2]]]}, r"a rank be in one of them, found \[\[\[0, 1\]\], \[\[1, 2\]\]\]"),
        ({"ep_groups": [[[0, 1], [2, 3]]]}, "datacenters: expected the ranks of each datacenter; write the file with"),
        (
            {"ep_groups": [[[0, 1], [2, 3]], [[4, 6], [5, 7]]], "datacenters": [[*range(8)]]},
            "ep_groups: all stages must be divided alike",
        ),
        (
            {"ep_groups": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], "datacenters": [[0, 1, 2, 3, 4], [5, 6, 7]]},
            "datacenters: all stages must be divided alike",
        ),
    ],
)
def test_a_plan_that_cannot_run_is_refused(layout: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "groups.json"
    runnable: dict[str, Any] = {"tensor_parallel": 1, "ep_groups": [[[0, 2]], [[1, 3]]]}
    content: dict[str, object] = {"expert_domains": [[0], [1]], "dispatch_groups": [[0, 1]], "layout": runnable}
    file.write_text(json.dumps(content))
    plan = ExpertDomains.from_file(file)
    assert (plan.ranks, plan.stages) == (2, ((0, 2), (1, 3)))
    assert [plan.stage_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(CallerError, match="rank 4 is in no stage of the plan, which has 2 of 2 ranks"):
        plan.stage_of(4)
    file.write_text(json.dumps(content | {"layout": runnable | layout}))
    with pytest.raises(CallerError, match=f"groups.json: .*{says}"):
        ExpertDomains.from_file(file)


def test_the_ep_groups_of_a_file_are_divided_like_the_first(tmp_path: Path) -> None:
    # Two stages with two EP groups in each, each of which has ranks at both datacenters.
    file = tmp_path / "groups.json"
    layout = {
        "tensor_parallel": 1,
        "ep_groups": [[[0, 1, 8, 9], [2, 3, 10, 11]], [[4, 5, 12, 13], [6, 7, 14, 15]]],
        "datacenters": [[*range(8)], [*range(8, 16)]],
    }
    content = {"expert_domains": [[0, 2], [1, 3]], "dispatch_groups": [[0, 1], [2, 3]], "layout": layout}
    file.write_text(json.dumps(content))
    plan = ExpertDomains.from_file(file)
    uniform = ExpertDomains.uniform(ranks=8, datacenters=2, ep_groups=2)
    assert (plan.expert_domains, plan.ep_groups) == (uniform.expert_domains, uniform.ep_groups)
    assert (sorted(plan.dispatch_groups), plan.datacenters) == (sorted(uniform.dispatch_groups), uniform.datacenters)
    assert plan.stages == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


def test_datacenters_must_divide_the_ranks() -> None:
    with pytest.raises(CallerError, match="must divide the number of ranks, 4"):
        ExpertDomains.uniform(ranks=4, datacenters=3)


def test_ep_groups_divide_the_ranks_of_every_datacenter() -> None:
    plan = ExpertDomains.uniform(ranks=8, datacenters=2, ep_groups=2)
    assert plan.ep_groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert plan.datacenters == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert plan.dispatch_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (plan.domain_of(3), plan.group_of(3), plan.copies_of(3)) == ((3, 7), (2, 3), (1, 3))
    # 8 experts, two for each rank of an EP group: the ranks 1 and 3 own 2 and 3.
    assert [*plan.owned_by(3, 8)] == [*plan.owned_by(1, 8)] == [2, 3]
    assert plan.held_by(3, 8) == [2, 3, 6, 7]
    for group in plan.dispatch_groups:
        assert sorted(expert for rank in group for expert in plan.held_by(rank, 8)) == [*range(8)]
    assert plan.survivors(8, lost={1, 4})[2] == [3, 5, 7]
    with pytest.raises(CallerError, match="must divide the number of ranks of a datacenter, 4"):
        ExpertDomains.uniform(ranks=8, datacenters=2, ep_groups=3)


@pytest.mark.parametrize(
    ("domains", "groups", "ep_groups", "says"),
    [
        ([[0], [1], [2]], [[0], [1], [2]], [[0, 1], [2]], "equally many ranks"),
        ([[0, 1], [2], [3]], [[0], [1], [2, 3]], [[0, 2], [1, 3]], r"expert_domains: \[0, 1\] must lie inside one EP"),
        ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], r"dispatch_groups: \[0, 1\] must lie inside one EP"),
        ([[0], [1], [2], [3]], [[0, 2], [3, 1]], [[0, 2], [1, 3]], r"\[3, 1\] must have one rank of each .* \[3, 1\]"),
        ([[0], [1]], [[0], [1]], [[0]], r"ep_groups: must have each rank exactly once"),
    ],
)
def test_ep_groups_that_do_not_fit_are_refused(
    domains: list[list[int]], groups: list[list[int]], ep_groups: list[list[int]], says: str
) -> None:
    with pytest.raises(CallerError, match=says):
        ExpertDomains(domains, groups, ep_groups=ep_groups)
