#!/usr/bin/env python3
"""Times dispatch and combine over `all_to_all_single` of torch.distributed with gloo: one line of JSON.

The dispatcher, its check and its clock are those of `python -m hybrid_ep bench --compare`, which also measures this
package from PyTorch. This program measures gloo alone, so that `benches/peers/run` can run it in turn with other
programs.

Needs PyTorch and the package `hybrid_ep`: `pip install .` in the repository's root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from hybrid_ep._contenders import AllToAll, Case, Inputs
from hybrid_ep.compare import Clock, check

WARM_UP = 2


def rank_main(rank: int, case: Case, rendezvous: str) -> None:
    """Runs one rank. Exits with status 1 if its results are wrong."""
    # Each rank has its share of the cores, like the ranks of `hybrid-ep bench`.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // case.ranks))
    device = torch.device("cpu")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=case.ranks)
    group = dist.group.WORLD
    assert group is not None
    inputs, implementation, clock = Inputs.draw(case, rank, device), AllToAll(case, group), Clock(group, device)

    problems: list[str | None] = [None] * case.ranks
    dist.all_gather_object(problems, check(implementation, inputs, case, rank), group=group)
    if found := [problem for problem in problems if problem]:
        if rank == 0:
            print(f"gloo.py: error: {'; '.join(found)}; nothing was timed", file=sys.stderr)
        dist.destroy_process_group()
        sys.exit(1)

    plan, rows = implementation.preprocess_and_dispatch(inputs)
    operators = {
        "dispatch": lambda: implementation.dispatch(plan, inputs),
        "combine": lambda: implementation.combine(plan, rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operators}
    for _ in range(WARM_UP + case.iters):
        for name, operator in operators.items():
            seconds[name].append(clock.seconds(operator))
    milliseconds = {
        f"{name}_ms": 1e3 * statistics.median(clock.slowest(times)[WARM_UP:]) for name, times in seconds.items()
    }
    received = torch.tensor([len(rows)])
    dist.all_reduce(received, dist.ReduceOp.MAX, group=group)
    load = received.item() / (case.tokens * case.topk)
    dist.destroy_process_group()
    if rank == 0:
        report = {
            "library": f"gloo of PyTorch {torch.__version__}",
            **asdict(case),
            "verified": True,
            "rank_max_over_mean": load,
            "pairs": milliseconds,
        }
        print(json.dumps(report), flush=True)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 4), ("tokens", 4096), ("hidden", 2048), ("experts", 64), ("topk", 8), ("seed", 1)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--iters", type=int, default=12, help=f"timed iterations, after {WARM_UP} warm-up iterations")
    arguments = options.parse_args()
    for name, value in vars(arguments).items():
        if value < 1:
            options.error(f"--{name} must be at least 1")
    if arguments.experts % arguments.ranks:
        options.error(f"--experts {arguments.experts} must be a multiple of --ranks {arguments.ranks}")
    if arguments.topk > arguments.experts:
        options.error(f"--topk {arguments.topk} is above --experts {arguments.experts}")
    case = Case(skew=0.0, dtype="bf16", device="cpu", **vars(arguments))
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(rank_main, args=(case, f"file://{folder}/rendezvous"), nprocs=case.ranks)
        except ProcessExitedException as error:
            return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
