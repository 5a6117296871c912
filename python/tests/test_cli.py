"""`python -m hybrid_ep` and the script `hybrid-ep`: all commands, with and without PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hybrid_ep
from hybrid_ep import __main__ as program

TINY = "bench --backend host --tokens 24 --hidden 64 --experts 8 --topk 3 --iters 2".split()
# Runs for hours.
ENDLESS = ["verify", "--backend", "host", "--soak", "100000000", "--ranks", "3"]
PATIENCE = 60.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import torch` fails, without the settings of this process's environment."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    launchers = ("HYBRID_EP_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    package = str(Path(hybrid_ep.__file__).parent.parent)
    return {**kept, "PYTHONPATH": os.pathsep.join([str(tmp_path), package])}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hybrid_ep", *arguments]


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_pip_installs_a_script_with_a_name_of_its_own(environment: dict[str, str]) -> None:
    assert {entry.value for entry in entry_points(group="console_scripts", name="hybrid-ep")} == {
        "hybrid_ep.__main__:script"
    }
    start = "import sys; from hybrid_ep.__main__ import script; sys.exit(script())"
    arguments = [sys.executable, "-c", start, "--help"]
    shown = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert shown.returncode == 0 and "Usage: hybrid-ep <COMMAND>" in shown.stdout


def test_help_names_the_program_as_it_was_started(environment: dict[str, str]) -> None:
    shown = run(environment, "--help")
    assert shown.returncode == 0 and "Usage: python -m hybrid_ep <COMMAND>" in shown.stdout
    for name in ("bench", "verify", "doctor", "warm", "plan", "simulate", "reproduce"):
        assert f"\n  {name} " in shown.stdout
    bench = run(environment, "bench", "--help").stdout
    assert "Usage: python -m hybrid_ep bench [OPTIONS]" in bench
    assert bench.endswith("python -m hybrid_ep bench --compare --help\n")
    assert run(environment, "--version").stdout == f"hybrid-ep {hybrid_ep.__version__}\n"


def test_every_command_works_without_torch(environment: dict[str, str]) -> None:
    for arguments, last in [
        (TINY, "verified: all 288 dispatched rows"),
        ("verify --backend host --cases 5 --ranks 2 --seed 3".split(), " and 5 random cases, seed 3"),
        ("verify --backend host --soak 20 --seed 3".split(), "verified: 4 ranks through 20 iterations, seed 3"),
        (["doctor"], "; try: python -m hybrid_ep bench"),
        (["plan"], ""),
        (["simulate"], ""),
        (["reproduce", "table4"], ""),
    ]:
        done = run(environment, *arguments)
        assert done.returncode == 0 and done.stderr == "", (arguments, done)
        assert last in done.stdout.splitlines()[-1], (arguments, done.stdout)


def test_json_on_stdout_is_the_only_output(environment: dict[str, str]) -> None:
    done = run(environment, "doctor", "--json")
    assert json.loads(done.stdout)["hybrid_ep_version"] == hybrid_ep.__version__


def test_errors_are_one_line_and_a_code(environment: dict[str, str]) -> None:
    for arguments, what in [
        ([*TINY, "--ranks", "0"], "--ranks 0"),
        (["bench", "--compare"], "PyTorch is not installed"),
        (["warm", "--arch", "sm_90a"], "keeping compiled kernels"),
    ]:
        done = run({**environment, "HYBRID_EP_KERNEL_CACHE": "/dev/null"}, *arguments)
        assert done.returncode == 2 and what in done.stderr, done
        assert done.stderr.startswith("python -m hybrid_ep: error: ") and done.stderr.count("\n") == 1, done
    assert run(environment, "no-such-command").returncode == 2


def children_of(pid: int) -> dict[int, list[str]]:
    """Returns the command lines of a process's children."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            line = (status.parent / "cmdline").read_text()
        except (OSError, IndexError, ValueError):
            continue  # the process has ended
        if parent == pid:
            found[int(status.parent.name)] = line.rstrip("\0").split("\0")
    return found


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def endless(environment: dict[str, str], request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(command(*ENDLESS, *request.param), env=environment, stdout=subprocess.PIPE, text=True)
    yield started
    started.kill()
    started.communicate()


@pytest.mark.parametrize("endless", [[], ["--processes"]], ids=["threads", "processes"], indirect=True)
def test_ctrl_c_ends_the_program(endless: subprocess.Popen[str]) -> None:
    assert endless.stdout is not None
    # The program writes its output at once: it can be read while the program runs.
    assert endless.stdout.readline().startswith("soaking the host backend, ranks as ")
    endless.send_signal(signal.SIGINT)
    assert endless.wait(PATIENCE) == -signal.SIGINT


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("endless", [["--processes"]], ids=["processes"], indirect=True)
def test_ranks_as_processes_run_the_same_program(endless: subprocess.Popen[str]) -> None:
    until(lambda: len(children_of(endless.pid)) == 3, "three ranks")
    ranks = children_of(endless.pid)
    for line in ranks.values():
        assert line[: 3 + len(ENDLESS)] == command(*ENDLESS), line
    endless.send_signal(signal.SIGINT)
    endless.wait(PATIENCE)
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in ranks), "ranks end with their launcher")


def test_ranks_as_processes_agree(environment: dict[str, str]) -> None:
    done = run(environment, *TINY, "--processes", "--ranks", "2")
    assert done.returncode == 0 and done.stdout.startswith("2 ranks (processes)"), done


def test_help_of_bench_ends_without_a_traceback_if_its_output_cannot_be_written(environment: dict[str, str]) -> None:
    arguments = [sys.executable, "-m", "hybrid_ep", "bench", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        done = subprocess.run(arguments, env=environment, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(arguments, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "No space left" in done.stderr and "Traceback" not in done.stderr, done


def test_compare_gets_the_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        given.append(arguments)
        return 1

    monkeypatch.setitem(sys.modules, "hybrid_ep.compare", SimpleNamespace(main=main))
    assert program.main(["bench", "--ranks", "2", "--compare", "--hidden", "64"]) == 1
    assert given == [["--ranks", "2", "--hidden", "64"]]


def test_the_sigint_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert program.main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
