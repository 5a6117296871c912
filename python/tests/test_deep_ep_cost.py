"""What a call of the `deep_ep` interface costs besides its own kernel: PyTorch's operators, which take some
microseconds of host time each, and those of them that launch something on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from process_worlds import Rank, world_of_processes

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "drop_in_cost.py"
# Operators that make a view, allocate, or read a number on the CPU: no kernel, no copy.
LAUNCH_NOTHING = (
    "aten.empty", "aten.new_empty", "aten.view", "aten._unsafe_view", "aten.slice", "aten.unsqueeze", "aten.detach",
    "aten.alias", "aten._local_scalar_dense", "aten.expand", "aten.full.default", "aten.lift_fresh",
)  # fmt: skip

# Maximum number of PyTorch operators in a call, and of launches. Neither exceeds what DeepEP's source has for
# the same call: its indices_to_map alone is 4 operators, two of which copy before they scatter, so 6 launches.
BOUNDS = {
    "indices_to_map": (2, 0),
    "dispatch": (11, 1),
    "dispatch, handle": (1, 0),
    "dispatch, handle + topk": (5, 1),
    "dispatch FP8, handle + topk": (11, 1),
    "combine": (4, 0),
    "combine, probs": (8, 0),
    "permuted dispatch": (4, 0),
    "permuted dispatch, topk": (4, 0),
    "permuted dispatch, non-blocking": (4, 0),
    "permuted dispatch, handle": (1, 0),
    "permuted dispatch, handle + topk": (2, 0),
    "permuted combine": (4, 0),
    "permuted combine, probs": (7, 0),
}


def of_script(here: Rank, path: Path, tokens: int, measure: str, names: Iterable[str]) -> dict[str, Any]:
    """Applies the example's function of this name to its calls."""
    spec = importlib.util.spec_from_file_location("drop_in_cost", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    calls = script.calls(importlib.import_module("hybrid_ep.deep_ep"), here.group, here.device, tokens, 512, 4)
    for call in calls.values():  # a first call may do more
        call()
    assert calls.keys() == BOUNDS.keys()
    return {name: getattr(script, measure)(calls[name]) for name in names}


def test_calls_take_few_operators_and_fewer_launches(device: str) -> None:
    for found in world_of_processes(2, device).run(of_script, SCRIPT, 64, "operators_of", list(BOUNDS)):
        for name, operators in found.items():
            launches = [operator for operator in operators if not operator.startswith(LAUNCH_NOTHING)]
            most, most_launches = BOUNDS[name]
            assert len(operators) <= most and len(launches) <= most_launches, f"{name}: {operators}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_calls_queue_few_activities_on_the_gpu() -> None:
    # The operator's kernel, and those that make top-k dense and widen probabilities to the domain.
    most = {
        "indices_to_map": 1,
        "dispatch, handle": 1,
        "dispatch, handle + topk": 3,
        "combine, probs": 1,
        "permuted dispatch, handle": 1,
    }
    for found in world_of_processes(2, "cuda").run(of_script, SCRIPT, 1024, "activities_of", list(most)):
        assert all(found[name] <= most[name] for name in most), found
