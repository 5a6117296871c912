"""Jobs of several ranks for `ci/hostile` and `ci/machines`, and what the ranks of a lost job report.

BACKEND selects the backend, `host` (default) or `cuda`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("HYBRID_EP", str(ROOT / "target/release/hybrid-ep"))
SEED = int(os.environ.get("SEED", "1"))
BACKEND = os.environ.get("BACKEND", "host")
# How much later than its bound a rank may end, in seconds. A process on a GPU that it shares takes up to a second to
# end after its error.
SLACK = float(os.environ.get("SLACK", "3" if BACKEND == "cuda" else "1"))
# Bounds of the ranks, in seconds: the entry bound, and the stall bound. They are longer on GPUs, because processes that
# share a GPU run alternately.
TIMEOUT, STALL = (20.0, 5.0) if BACKEND == "cuda" else (4.0, 2.0)
# A fault comes at most this many seconds after the start of the job. Ranks join during the first part.
MOMENTS = 12.0 if BACKEND == "cuda" else 1.2
FAULTS = "died|left|stalled|is late|failed|never joined|is unreachable"
NAMED = re.compile(rf"rank (\d+)(?: on \S+)? ({FAULTS})")


def require_program(name: str) -> None:
    if not os.access(PROGRAM, os.X_OK):
        text = f"{name}: {PROGRAM} is not an executable: run cargo build --release, or set HYBRID_EP"
        print(text, file=sys.stderr)
        sys.exit(2)


class Job:
    """Ranks of a command, started one by one."""

    def __init__(self, ranks: int, store: str, arguments: list[str], secret: str | None) -> None:
        self.ranks = ranks
        self.command = [PROGRAM, *arguments]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HYBRID_EP", "SLURM", "MASTER"))}
        self.environment = {
            **kept,
            "WORLD_SIZE": str(ranks),
            "HYBRID_EP_STORE": store,
            "HYBRID_EP_WORKERS": "1",
            "HYBRID_EP_TIMEOUT_MS": str(int(1000 * TIMEOUT)),
            "HYBRID_EP_STALL_TIMEOUT_MS": str(int(1000 * STALL)),
        }
        if secret is not None:
            self.environment["HYBRID_EP_SECRET"] = secret
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def prefix(self, rank: int) -> list[str]:
        """The command that starts the program of a rank."""
        return []

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank] = subprocess.Popen(
                [*self.prefix(rank), *self.command],
                env={**self.environment, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def has_ended(self) -> list[str]:
        """The errors of the ranks that have ended."""
        ended = [process for process in self.processes.values() if process.poll() is not None]
        return [process.communicate()[1] for process in ended]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


def endless_bench(ranks: int, domains: int, iterations: int = 1_000_000) -> list[str]:
    """The arguments of a small benchmark with this many iterations."""
    return [
        "bench", "--backend", BACKEND, "--processes", "--ranks", str(ranks), "--domains", str(domains),
        "--experts", str(4 * ranks), "--tokens", "200", "--hidden", "128", "--topk", "3", "--iters", str(iterations),
    ]  # fmt: skip


@dataclass
class Report:
    """What a surviving rank reported."""

    rank: int
    code: int | None
    # Seconds from the fault to the end of the rank; None if it did not end.
    took: float | None
    # The last line of its errors.
    line: str

    @property
    def named(self) -> int | None:
        """The rank at fault."""
        found = NAMED.search(self.line)
        return int(found[1]) if found else None

    @property
    def fault(self) -> str | None:
        found = NAMED.search(self.line)
        return found[2] if found else None

    @property
    def joining(self) -> bool:
        """Whether the rank was joining, or in the benchmark's barrier: the entry bound applies there."""
        return "(join)" in self.line

    @property
    def waited(self) -> float | None:
        """Seconds that the rank waited inside the operator."""
        if " was waiting for " in self.line:
            return 0.0
        found = re.search(r"waited ([\d.]+) s", self.line)
        return float(found[1]) if found else None


def survivors(job: Job, victims: set[int], start: float) -> list[Report]:
    """Waits until all ranks but the victims have ended. `start` is when the fault came."""
    deadline = start + TIMEOUT + SLACK + 20
    ends: dict[int, float] = {}
    others = {rank: process for rank, process in job.processes.items() if rank not in victims}
    while len(ends) < len(others) and time.monotonic() < deadline:
        for rank, process in others.items():
            if rank not in ends and process.poll() is not None:
                ends[rank] = time.monotonic() - start
        time.sleep(0.005)
    reports = []
    for rank, process in others.items():
        if rank not in ends:
            reports.append(Report(rank, None, None, "(hangs)"))
            continue
        error = process.communicate()[1].strip()
        line = error.splitlines()[-1] if error else "(nothing)"
        reports.append(Report(rank, process.returncode, ends[rank], line))
    return reports
