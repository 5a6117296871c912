"""Runs the examples with small sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from process_worlds import has_libfabric

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Their output must not depend on the machine.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(ranks: int, *command: str) -> str:
    """Runs a program under torchrun and returns its output; `--standalone` finds a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ten_lines_print_what_the_readme_shows() -> None:
    printed = torchrun(4, str(EXAMPLES / "ten_lines.py"))
    assert "its tokens came back bit for bit" in printed
    shown = (EXAMPLES / "README.md").read_text()
    assert printed in shown, f"examples/README.md does not show this:\n{printed}"


def test_ten_lines_run_alone() -> None:
    command = [sys.executable, str(EXAMPLES / "ten_lines.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0 of 1 sent 1000 tokens") and "bit for bit" in done.stdout


SMALL = "--steps 12 --lr 0.02 --batch 6 --context 32 --layers 2 --width 32 --heads 2 --experts 8 --expert-width 32"


@pytest.mark.parametrize(("ranks", "comm", "tolerance"), [(4, "f32", 1e-4), (2, "bf16", 3e-2)])
def test_ranks_learn_like_one_process(ranks: int, comm: str, tolerance: float, tmp_path: Path) -> None:
    losses, trace = tmp_path / "losses.json", tmp_path / "trace.safetensors"
    torchrun(
        ranks,
        str(EXAMPLES / "train_moe_lm.py"),
        *SMALL.split(),
        *("--compare", "--comm", comm, "--json", str(losses), "--record-routing", str(trace)),
    )
    result = json.loads(losses.read_text())
    ours, alone = result["losses_nats_per_byte"], result["losses_of_one_process"]
    assert len(ours) == len(alone) == 12
    assert max(abs(a - b) for a, b in zip(ours, alone, strict=True)) == result["largest_difference"] < tolerance
    assert ours[0] == pytest.approx(np.log(256), abs=0.2) and ours[-1] < ours[0] - 0.5, "it does not learn"
    check_trace(trace, ranks)


def check_trace(path: Path, ranks: int) -> None:
    """Checks a trace against traces/README.md: names, types, shapes, and values."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert {key: metadata[key] for key in ("format", "version", "experts", "topk", "layers", "ranks")} == {
        "format": "hybrid-ep-routing",
        "version": "1",
        "experts": "8",
        "topk": "2",
        "layers": "2",
        "ranks": str(ranks),
    }
    assert set(header) == {
        f"layer{layer}.rank{rank}.{what}"
        for layer in range(2)
        for rank in range(ranks)
        for what in ("topk_idx", "topk_weights")
    }

    def tensor(name: str, dtype: str) -> Any:
        entry = header[name]
        assert entry["dtype"] == dtype
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        return np.frombuffer(data[begin:end], {"I32": "<i4", "F32": "<f4"}[dtype]).reshape(entry["shape"])

    for layer in range(2):
        rows = 0
        for rank in range(ranks):
            idx = tensor(f"layer{layer}.rank{rank}.topk_idx", "I32")
            weights = tensor(f"layer{layer}.rank{rank}.topk_weights", "F32")
            assert idx.shape == weights.shape == (len(idx), 2)
            assert ((idx >= 0) & (idx < 8)).all() and (idx[:, 0] != idx[:, 1]).all()
            np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
            rows += len(idx)
        assert rows == 6 * 32, "every token of the batch, on one rank each"


def cross_dc(out: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Runs the example in two modes, a few steps of each, and returns its output and its results."""
    small = "--steps 4 --turn 2 --windows 2 --context 32 --layers 2 --width 32 --heads 2 --experts 8 --expert-width 32"
    program = [sys.executable, str(EXAMPLES / "cross_dc" / "run.py"), *small.split(), "--out", str(out), *options]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    results = out / "results.json"
    return done.stdout, json.loads(results.read_text()) if results.exists() else {}


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.slow
def test_modes_across_datacenters_learn_the_same(tmp_path: Path) -> None:
    printed, result = cross_dc(tmp_path, "--unshaped", "--modes", "plain,exact,int8")
    assert "The rate is not limited" in printed and result["link"] is None
    plain = result["modes"]["plain"]["losses_nats_per_byte"]
    assert len(plain) == 4 and plain[0] == pytest.approx(np.log(256), abs=0.3)
    assert result["modes"]["exact"]["losses_nats_per_byte"] == pytest.approx(plain, rel=1e-4)
    assert result["modes"]["int8"]["losses_nats_per_byte"] == pytest.approx(plain, rel=1e-2)
    sent = {
        mode: [rank["weights_sent"] for rank in result["modes"][mode]["sent_by_rank"]] for mode in ("exact", "int8")
    }
    assert all(3.5 * int8 < exact for int8, exact in zip(sent["int8"], sent["exact"], strict=True))


@pytest.mark.slow
def test_the_emulated_link_is_measured_and_predicted(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES / "cross_dc"))
    import network

    if (reason := network.why_not()) is not None:
        pytest.skip(reason)
    before = namespaces()
    # Between namespaces as between machines: over gloo, and over an engine.
    engine = "int8/tcp" if has_libfabric() else "int8@2"
    link = ("--rate", "20Mbit", "--delay", "5ms", "--modes", f"int8,{engine}")
    # First a prediction without training, then training that is compared with it.
    printed, result = cross_dc(tmp_path, *link, "--steps", "0")
    predicted = json.loads((tmp_path / "predictions.json").read_text())["step_seconds"]
    assert result == {} and f"int8     {predicted['int8']:.3f} s a step, predicted" in printed
    _, result = cross_dc(tmp_path, *link, "--predictions", str(tmp_path / "predictions.json"))
    figures = result["modes"]["int8"]
    assert result["modes"][engine]["losses_nats_per_byte"] == figures["losses_nats_per_byte"]
    assert figures["predicted_step_seconds"] == predicted["int8"]
    # Weights and gradients of two ranks cross the link in each direction, and dense gradients.
    experts = sum((rank["weights_sent"] + rank["gradients_sent"]) / 4 for rank in figures["sent_by_rank"][:2])
    assert figures["link_bytes_per_step"] > experts > 0
    # The prediction also has the compute time, so it exceeds the time in which the link carries these bytes.
    assert figures["predicted_step_seconds"] > experts / (20e6 / 8)
    left = {name for name in namespaces() - before if name.startswith(network.PREFIX)}
    assert not left


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_curves_are_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "curves.png"
    command = [sys.executable, str(EXAMPLES / "train_moe_lm.py"), *SMALL.split(), "--compare", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    # One process is compared with itself, and gives the same bits in every run.
    assert "losses differ by 0.0e+00 nats per byte at most" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
