"""`bench --compare`: implementations agree, wrong ones are found, and a small case runs from end to end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import compare
from hybrid_ep._contenders import (
    AllToAll,
    AllToAllPlan,
    Case,
    DeepEP,
    Experts,
    Implementation,
    Inputs,
    Ours,
    by_pytorch,
)
from process_worlds import Rank, world_of_processes

CPU = torch.device("cpu")


def case_of(ranks: int, **changes: Any) -> Case:
    sizes: dict[str, Any] = {"tokens": 37, "hidden": 48, "experts": 8, "topk": 3, "skew": 0.9, "iters": 2, "seed": 3}
    return Case(ranks=ranks, **(sizes | {"dtype": "bf16", "device": "cpu"} | changes))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def agreeing_rank(here: Rank) -> None:
    from hybrid_ep import deep_ep  # in place of the real deep_ep, which needs a GPU

    for changes in ({}, {"tokens": 1, "topk": 1, "skew": 3.0}, {"topk": 8}, {"dtype": "f32"}):
        case = case_of(2, **changes)
        inputs, group = Inputs.draw(case, here.rank, CPU), here.group
        ours = Ours(case, group, CPU)
        implementations: list[Implementation] = [
            ours,
            AllToAll(case, group),
            DeepEP(deep_ep, case, group, inputs),
        ]
        delivered = []
        for implementation in implementations:
            assert (problem := compare.check(implementation, inputs, case, here.rank)) is None, problem
            # With either multiplication by weights, the layer's results and gradients are right.
            for weigh in (ours.fused, by_pytorch):
                problem = compare.check(implementation.weighing(weigh), inputs, case, here.rank)
                assert problem is None, problem
            delivered.append(implementation.preprocess_and_dispatch(inputs)[1].clone())
        assert all(torch.equal(rows, delivered[0]) for rows in delivered), "the same rows in the same order"
    dist.barrier()


def test_all_deliver_the_same_rows_and_results() -> None:
    world_of_processes(2, "cpu").run(agreeing_rank)


class SumsTwice(AllToAll):
    def combine(self, plan: AllToAllPlan, rows: Tensor) -> Tensor:
        return 2 * super().combine(plan, rows)


class ForgetsWeights(AllToAll):
    def layer(self, inputs: Inputs, experts: Experts) -> Tensor:
        return super().layer(inputs._replace(topk_weights=inputs.topk_weights * 0 + 1 / self.case.topk), experts)


class SwapsExperts(AllToAll):
    def layer(self, inputs: Inputs, experts: Experts) -> Tensor:
        return super().layer(inputs, lambda rows, counts: experts(rows, counts.flip(0)))


class DetachesWeights(AllToAll):
    def layer(self, inputs: Inputs, experts: Experts) -> Tensor:
        weights = inputs.topk_weights
        return super().layer(inputs._replace(topk_weights=weights.detach() + 0 * weights), experts)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (SumsTwice, "the sum of a token's rows"),
        (ForgetsWeights, "the layer's output"),
        (SwapsExperts, "the layer's output"),
        (DetachesWeights, "the gradient of weights"),
    ],
)
def test_a_wrong_implementation_is_found(wrong: type[AllToAll], said: str, alone: dist.ProcessGroup) -> None:
    case = case_of(1)
    inputs = Inputs.draw(case, 0, CPU)
    assert compare.check(AllToAll(case, alone), inputs, case, 0) is None
    problem = compare.check(wrong(case, alone), inputs, case, 0)
    assert problem is not None and said in problem and "rank 0" in problem


def test_nothing_is_timed_when_results_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "AllToAll", SumsTwice)
    assert compare.worker(0, case_of(1), f"file://{tmp_path}/store", None) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the sum of a token's rows is wrong in 37 of 37 rows; nothing was timed" in shown.err


def test_smallest_case_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    argv = "--device cpu --ranks 2 --tokens 16 --hidden 32 --experts 4 --topk 2 --iters 2".split()
    assert compare.main([*argv, "--json", str(file)]) == 0
    captured = capfd.readouterr()
    shown, progress = captured.out, captured.err
    for step in ("checking results, 2 of 2: all_to_all (gloo)", "timing, warm-up 1 of 3", "timing, iteration 1 of 2"):
        assert progress.count(step) == 1, progress
    figures = json.loads(file.read_text())
    assert figures["case"]["tokens"] == 16 and figures["implementations"] == ["hybrid_ep", "all_to_all (gloo)"]
    for operator in compare.OPERATORS:
        assert set(figures["median_seconds"][operator]) == set(figures["implementations"])
        assert all(seconds > 0 for seconds in figures["median_seconds"][operator].values())
        assert f" {operator} " in shown
    assert "2 ranks (processes)" in shown and "agree with the closed form" in shown


def test_floor_counts_every_byte_once(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "copy_rate", lambda clock, ranks: 1.0)  # a byte per second
    case = case_of(1)
    seconds, basis = compare.floors(case, Inputs.draw(case, 0, CPU), compare.Clock(alone, CPU))
    rows = 37 * 3
    assert seconds["combine"] == (37 + rows) * 48 * 2
    assert seconds["dispatch"] == (37 + rows) * 48 * 2 + rows * 4
    assert seconds[compare.PLAIN_LAYER] == seconds["layer"] == 2 * (seconds["dispatch"] + seconds["combine"])
    assert basis["max_over_mean_rows"] == 1.0


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA A100-SXM4-80GB", False),
    ],
)
def test_floor_of_a_gpu_is_known_where_it_was_measured(name: str, known: bool) -> None:
    assert compare.has_nvlink_4(name) is known


def test_skew_makes_some_experts_popular() -> None:
    loads = []
    for skew in (0.0, 1.2):
        idx = Inputs.draw(case_of(1, tokens=2000, skew=skew), 0, CPU).topk_idx
        assert (idx.sort(dim=1).values.diff(dim=1) > 0).all(), "an expert twice in a row"
        load = idx.flatten().bincount(minlength=8)
        loads.append((load.max() / load.float().mean()).item())
    assert loads[0] < 1.15 < 1.5 < loads[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--ranks 3", "--experts 64 must be a multiple of the 3 ranks"),
        ("--topk 65", "--topk 65 is above --experts 64"),
        ("--tokens 0", "--tokens must be at least 1"),
        ("--dtype fp8", "invalid choice"),
    ],
)
def test_wrong_options_are_explained(argv: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        compare.main(["--device", "cpu", *argv.split()])
    assert exit_.value.code == 2 and said in capsys.readouterr().err


def test_the_real_deep_ep_is_distinguished_from_the_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_ep import deep_ep as ours

    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "cannot be imported" in compare.real_deep_ep()[1]
    monkeypatch.setitem(sys.modules, "deep_ep", ours)
    assert "own drop-in" in compare.real_deep_ep()[1]
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    assert "no HybridEPBuffer" in compare.real_deep_ep()[1]
    real = SimpleNamespace(HybridEPBuffer=type("HybridEPBuffer", (), {"__module__": "deep_ep.hybrid_ep_buffer"}))
    monkeypatch.setitem(sys.modules, "deep_ep", real)
    assert compare.real_deep_ep() == (real, "")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0000734, "73.4 µs"), (0.000518, "518 µs"), (0.0026, "2.60 ms"), (1.234, "1,234 ms")]
)
def test_durations_have_three_digits(seconds: float, shown: str) -> None:
    assert compare.duration(seconds) == shown
