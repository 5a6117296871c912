"""`python -m hybrid_ep bench --compare`: compares this package with others, with one routing, in one run.

- this package: `Buffer` and `TokenDispatcher`;
- `all_to_all_single` of torch.distributed (gloo on the CPU, NCCL on GPUs) with index permutations: `AllToAll`;
- `deep_ep.HybridEPBuffer`, on GPUs, where the real package is installed.

The program first checks all implementations against the same closed form. Then it times them in turns, so that other
load on the machine slows all of them alike. A figure is the median over iterations of the slowest rank's time.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (torch.autograd.Function.apply, Tensor.split and nn.Module.__call__ have no types.)

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ._contenders import AllToAll, Case, DeepEP, Implementation, Inputs, Ours, by_pytorch, identity, real_deep_ep

# The measured rate at which each GPU sends over NVLink 4 (H100, H200) by bulk copies on all SMs, while all GPUs send.
NVLINK_BYTES_PER_SECOND = 340e9
PROGRAM = "python -m hybrid_ep bench --compare"
PLAIN_LAYER = "layer, plain weights"
OPERATORS = ("preprocess", "dispatch", "preprocess + dispatch", "combine", "layer", PLAIN_LAYER)
# Minimum number of seconds between two lines of progress.
PROGRESS_SECONDS = 2.0
WARM_UP = 3
# GPU cycles, about 0.1 ms: a delay before the timed work, so that the host runs ahead with launches as in training.
LAUNCH_CYCLES = 200_000

DEFINITIONS = """\
preprocess = from the router's lists to all that dispatch needs; dispatch = rows to the ranks of their experts, grouped
by expert, with preprocess done before; combine = the experts' rows back, summed per token; layer = a training step
through autograd with a new routing: preprocess, dispatch, experts (the identity), weighted combine, and the gradients
of tokens and weights; this package's kernel multiplies rows by their weights, for deep_ep too; layer, plain weights =
the same layer, where PyTorch's operators multiply rows by their weights; all_to_all multiplies in its batched sum in
both"""


class Progress:
    """Lines of progress on stderr, from rank 0 only."""

    def __init__(self, rank: int) -> None:
        self.speaks = rank == 0
        self.begin = self.last = time.monotonic()

    def say(self, what: str, *, at_once: bool = True) -> None:
        """Prints a line; without `at_once`, only if the last line is `PROGRESS_SECONDS` old."""
        now = time.monotonic()
        if self.speaks and (at_once or now - self.last >= PROGRESS_SECONDS):
            self.last = now
            print(f"{PROGRAM}: {now - self.begin:.0f} s: {what}", file=sys.stderr, flush=True)


def check(implementation: Implementation, inputs: Inputs, case: Case, rank: int) -> str | None:
    """Compares this rank's results with closed forms, with experts that each multiply by a constant.

    Returns:
        What differs, or None.
    """
    local = case.experts // case.ranks
    factor = 1.0 + torch.arange(case.experts, device=inputs.tokens.device) % 7 / 8

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        own = factor[rank * local : (rank + 1) * local].to(rows.dtype)
        return rows * own.repeat_interleave(counts.to(rows.device), output_size=len(rows))[:, None]

    leaf = inputs._replace(
        tokens=inputs.tokens.clone().requires_grad_(), topk_weights=inputs.topk_weights.clone().requires_grad_()
    )
    result = implementation.layer(leaf, experts)
    grad_tokens, grad_weights = torch.autograd.grad(result, (leaf.tokens, leaf.topk_weights), inputs.grad)
    plan, rows = implementation.preprocess_and_dispatch(inputs)
    again = implementation.dispatch(plan, inputs)
    summed = implementation.combine(plan, implementation.outputs(rows))

    tokens, grad, chosen = inputs.tokens.float(), inputs.grad.float(), factor[inputs.topk_idx]
    gain = (inputs.topk_weights * chosen).sum(dim=1, keepdim=True)
    expected = {
        "the layer's output": (result, tokens * gain),
        "the gradient of tokens": (grad_tokens, grad * gain),
        "the gradient of weights": (grad_weights, chosen * (tokens * grad).sum(dim=1, keepdim=True)),
        "the sum of a token's rows": (summed, tokens * case.topk),
        "what the second dispatch delivered": (again, rows),
    }
    tolerance = 2**-6 if case.dtype == "bf16" else 2**-14
    for what, (found, wanted) in expected.items():
        slack = tolerance * (wanted.float().abs() + wanted.float().square().mean().sqrt())
        wrong = ((found.float() - wanted.float()).abs() > slack).any(dim=1)
        if wrong.any():
            return f"{implementation.name}, rank {rank}: {what} is wrong in {int(wrong.sum())} of {len(wrong)} rows"
    return None


class Clock:
    """Times calls on all ranks at once."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device

    def seconds(self, work: Callable[[], object]) -> float:
        """Measures this rank's time, from a barrier of all ranks to the completion of this rank's results."""
        if self.device.type == "cpu":
            dist.barrier(self.group)
            start = time.perf_counter()
            results = work()
            elapsed = time.perf_counter() - start
            del results  # after the clock stops, so that freeing is not timed
            return elapsed
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier(self.group)
        torch.cuda.synchronize()
        torch.cuda._sleep(LAUNCH_CYCLES)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def slowest(self, seconds: list[float]) -> list[float]:
        """Returns the slowest rank's time of each call."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        return times.tolist()


def calls(implementation: Implementation, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Returns the calls to time, by operator."""
    plan, rows = implementation.preprocess_and_dispatch(inputs)
    outputs = implementation.outputs(rows)
    leaf = inputs._replace(
        tokens=inputs.tokens.clone().requires_grad_(), topk_weights=inputs.topk_weights.clone().requires_grad_()
    )

    def step(implementation: Implementation) -> Callable[[], object]:
        def layer() -> object:
            result = implementation.layer(leaf, identity)
            return torch.autograd.grad(result, (leaf.tokens, leaf.topk_weights), inputs.grad)

        return layer

    timed: dict[str, Callable[[], object]] = {
        "preprocess": lambda: implementation.preprocess(inputs),
        "dispatch": lambda: implementation.dispatch(plan, inputs),
        "preprocess + dispatch": lambda: implementation.preprocess_and_dispatch(inputs),
        "combine": lambda: implementation.combine(plan, outputs),
        "layer": step(implementation),
        PLAIN_LAYER: step(implementation.weighing(by_pytorch)),
    }
    return timed if implementation.preprocesses else {k: v for k, v in timed.items() if k != "preprocess"}


def measure(
    implementations: list[Implementation], inputs: Inputs, clock: Clock, iters: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Measures the median seconds of the slowest rank, by operator and implementation, in turns."""
    timed = [(one.name, calls(one, inputs)) for one in implementations]
    samples: dict[tuple[str, str], list[float]] = {}
    for iteration in range(-WARM_UP, iters):
        number = f"warm-up {iteration + WARM_UP + 1} of {WARM_UP}"
        if iteration >= 0:
            number = f"iteration {iteration + 1} of {iters}"
        # Always announce the first warm-up and the first iteration.
        progress.say(f"timing, {number}", at_once=iteration in (-WARM_UP, 0))
        for operator in OPERATORS:
            progress.say(f"timing, {number}: {operator}", at_once=False)
            for turn in range(len(timed)):
                name, operators = timed[(turn + iteration) % len(timed)]
                if operator not in operators:
                    continue
                seconds = clock.seconds(operators[operator])
                if iteration >= 0:
                    samples.setdefault((operator, name), []).append(seconds)
    medians: dict[str, dict[str, float]] = {operator: {} for operator in OPERATORS}
    for (operator, name), seconds_of in samples.items():
        medians[operator][name] = statistics.median(clock.slowest(seconds_of))
    return medians


def floors(case: Case, inputs: Inputs, clock: Clock) -> tuple[dict[str, float], dict[str, float | str]]:
    """Computes the floor of each operator in seconds, and the figures that it follows from."""
    owner = inputs.topk_idx // (case.experts // case.ranks)
    rows = torch.bincount(owner.flatten(), minlength=case.ranks)
    dist.all_reduce(rows, group=clock.group)
    load = {"max_over_mean_rows": (rows.max() / rows.float().mean()).item()}
    if clock.device.type == "cpu":
        rate = copy_rate(clock, case.ranks)
        tokens_and_rows = case.ranks * case.tokens + int(rows.sum())
        dispatch, combine = tokens_and_rows * case.row_bytes + 4 * int(rows.sum()), tokens_and_rows * case.row_bytes
        basis = f"the read + written {rate / 1e9:.1f} GB/s of all ranks' copies of 64 MiB at once, measured in this run"
    elif has_nvlink_4(torch.cuda.get_device_name(clock.device)):
        rate = NVLINK_BYTES_PER_SECOND
        visits = torch.zeros(case.tokens, case.ranks, device=owner.device).scatter_(1, owner, 1.0).sum(dim=0)
        visits[dist.get_rank(clock.group)] = 0  # copies within a GPU use no NVLink
        dist.all_reduce(visits, group=clock.group)
        dispatch = combine = int(visits.max()) * case.row_bytes
        basis = f"the {rate / 1e9:.0f} GB/s that NVLink 4 carries out of every GPU at once (not measured in this run)"
    else:
        return {}, {"floor": "not known for these GPUs", **load}
    what = {
        "cpu": "every token and row read or written once",
        "cuda": "what the busiest rank must receive, each token once",
    }[clock.device.type]
    seconds = {"dispatch": dispatch / rate, "combine": combine / rate, "layer": 2 * (dispatch + combine) / rate}
    seconds["preprocess + dispatch"], seconds[PLAIN_LAYER] = seconds["dispatch"], seconds["layer"]
    return seconds, {"floor": f"{what}, at {basis}", "bytes_per_second": rate, **load}


def has_nvlink_4(gpu: str) -> bool:
    """Whether the GPU with this name has all 18 links. PCI Express cards and MIG slices contain the same words."""
    words = set(gpu.split())
    return bool(words & {"H100", "H200"}) and not words & {"PCIe", "NVL", "MIG"}


def copy_rate(clock: Clock, ranks: int) -> float:
    """Measures the bytes read and written per second while all ranks copy."""
    source = torch.ones(1 << 24)
    target = torch.empty_like(source).copy_(source)

    def copies() -> None:
        for _ in range(8):
            target.copy_(source)
        dist.barrier(clock.group)  # ranks that share a core may copy one after another; time all of them

    moved = 2 * 8 * ranks * source.numel() * source.element_size()
    return moved / min(clock.slowest([clock.seconds(copies) for _ in range(5)]))


def run(case: Case, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Runs this rank's part of the comparison. The report is the same on all ranks."""
    rank = dist.get_rank(group)
    progress = Progress(rank)
    progress.say(f"drawing {case.tokens:,} tokens on each of {case.ranks} ranks, and joining")
    inputs = Inputs.draw(case, rank, device)
    ours = Ours(case, group, device)
    implementations: list[Implementation] = [ours, AllToAll(case, group)]
    notes: list[str] = []
    if device.type == "cuda":
        module, why_not = real_deep_ep()
        if module is not None:
            implementations.append(DeepEP(module, case, group, inputs, ours.fused))
        else:
            notes.append(why_not)
    for number, implementation in enumerate(implementations, 1):
        progress.say(f"checking results, {number} of {len(implementations)}: {implementation.name}")
        problems: list[str | None] = [None] * case.ranks
        dist.all_gather_object(problems, check(implementation, inputs, case, rank), group=group)
        if found := [problem for problem in problems if problem]:
            raise ComparisonError("; ".join(found))
    clock = Clock(group, device)
    progress.say("measuring the floor")
    floor_seconds, basis = floors(case, inputs, clock)
    medians = measure(implementations, inputs, clock, case.iters, progress)
    return {
        "machine": machine(device),
        "case": asdict(case),
        "implementations": [one.name for one in implementations],
        "median_seconds": medians,
        "floor_seconds": floor_seconds,
        **basis,
        "notes": notes,
    }


class ComparisonError(Exception):
    """The results of an implementation are wrong."""


def machine(device: torch.device) -> str:
    """Describes the machine, PyTorch and Python."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores ({name}), {versions}"


def _cpuinfo() -> Iterator[str]:
    try:
        yield from Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return


def table(report: dict[str, Any]) -> str:
    """Formats the report as a table."""
    case, names = report["case"], report["implementations"]
    ours, others = names[0], names[1:]
    head = f" {'operator':<22}{ours:>11}" + "".join(f"{name:>21}{'ratio':>8}" for name in others)
    head += f"{'floor':>11}{'ours / floor':>14} "
    lines = [
        f"{case['ranks']} ranks (processes), {report['machine']}",
        f"{case['tokens']:,} tokens a rank, hidden {case['hidden']}, {case['experts']} experts, top-{case['topk']}, "
        f"{case['dtype']}, skew {case['skew']:g}, seed {case['seed']}, {case['iters']} iterations",
        "─" * len(head),
        head,
        "─" * len(head),
    ]
    for operator, seconds in report["median_seconds"].items():
        own = seconds[ours]
        line = f" {operator:<22}{duration(own):>11}"
        for name in others:
            other = seconds.get(name)
            line += f"{duration(other):>21}{f'{other / own:.1f}x':>8}" if other else f"{'-':>21}{'-':>8}"
        floor = report["floor_seconds"].get(operator)
        line += f"{duration(floor):>11}{own / floor:>14.2f} " if floor else f"{'-':>11}{'-':>14} "
        lines.append(line)
    lines += [
        "─" * len(head),
        "median of the slowest rank's time; ratio = the other time / ours, measured in turns in the same run",
        DEFINITIONS,
        f"floor = {report['floor']};",
        "the floor of the layer counts its two dispatches and two combines, not the weighting of rows and autograd",
        f"load: the fullest rank has {report['max_over_mean_rows']:.2f} times the mean number of rows",
        *report["notes"],
        "checked: outputs, and gradients of tokens and weights, of all implementations agree with the closed form",
    ]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    unit, scale = ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    value = seconds * scale
    return f"{value:,.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def worker(rank: int, case: Case, init: str, json_path: str | None) -> int:
    """Runs one rank; returns the exit status of its process."""
    device = torch.device("cpu")
    if case.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // case.ranks))
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=init,
        rank=rank,
        world_size=case.ranks,
        device_id=device if on_gpu else None,
    )
    group = dist.group.WORLD
    assert group is not None
    try:
        report = run(case, group, device)
    except ComparisonError as error:  # all ranks raise it with the same text
        if rank == 0:
            print(f"{PROGRAM}: error: {error}; nothing was timed", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(table(report), flush=True)
        if json_path is not None:
            Path(json_path).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def spawned(rank: int, *arguments: Any) -> None:
    sys.exit(worker(rank, *arguments))


def parser() -> argparse.ArgumentParser:
    gpus = torch.cuda.device_count()
    options = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compares this package's operators with all_to_all_single and, on GPUs, with deep_ep, in one run. "
        "Starts its own ranks, or runs as one of the ranks that torchrun started.",
    )
    options.add_argument("--ranks", type=int, help="default: torchrun's number, else the number of GPUs, else 4")
    options.add_argument("--tokens", type=int, default=4096, help="tokens of each rank")
    options.add_argument("--hidden", type=int, default=2048)
    options.add_argument("--experts", type=int, default=64)
    options.add_argument("--topk", type=int, default=8)
    options.add_argument("--skew", type=float, default=0.0, help="exponent of the experts' popularity; 0 = uniform")
    options.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    options.add_argument("--iters", type=int, default=12)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return options


def parse(argv: list[str]) -> tuple[Case, str | None]:
    options = parser()
    args = options.parse_args(argv)
    gpus, world = torch.cuda.device_count(), os.environ.get("WORLD_SIZE")
    if args.device == "cuda" and gpus == 0:
        options.error("--device cuda: PyTorch sees no GPU; take --device cpu")
    if world is not None and args.ranks not in (None, int(world)):
        options.error(f"--ranks {args.ranks}, but torchrun started {world}: leave --ranks out")
    ranks = int(world or args.ranks or (gpus if args.device == "cuda" else 4))
    if world is None and args.device == "cuda" and ranks > gpus:
        options.error(f"--ranks {ranks}, but PyTorch sees {gpus} GPUs, and NCCL needs one GPU for each rank")
    for name in ("tokens", "hidden", "experts", "topk", "iters"):
        if getattr(args, name) < 1:
            options.error(f"--{name} must be at least 1")
    if ranks < 1 or args.experts % ranks:
        options.error(f"--experts {args.experts} must be a multiple of the {ranks} ranks")
    if args.topk > args.experts:
        options.error(f"--topk {args.topk} is above --experts {args.experts}")
    json_path = args.json
    del args.json, args.ranks
    return Case(ranks=ranks, **vars(args)), json_path


def main(argv: list[str]) -> int:
    case, json_path = parse(argv)
    if "WORLD_SIZE" in os.environ:
        return worker(int(os.environ["RANK"]), case, "env://", json_path)
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/rendezvous"
        try:
            spawn(spawned, args=(case, init, json_path), nprocs=case.ranks)
        except ProcessExitedException as error:
            return int(error.exit_code)
    return 0
