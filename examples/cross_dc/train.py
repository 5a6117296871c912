"""Trains the language model of the examples in several modes, which take turns. `run.py` starts it, once per rank.

All modes start with the same weights and learn from the same batches. Turns have a few steps, so that load from other
programs affects all modes alike. Between turns the ranks wait until the link is silent, and the first step of a turn,
whose weights have been delivered by then, is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from network import DEVICE
from torch import Tensor

# The model is beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import predict
from moe_lm import Model, Sizes, add_model_arguments, corpus, total_loss

from hybrid_ep import Buffer, MoELayer
from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridMoELayer
from hybrid_ep.moe import parameter_groups, reduce_gradients

DATACENTERS = 2
# Codecs of weights and gradients of experts. The density 0.048 is a compression of about 50 for f32.
HYBRID = {
    "exact": ("exact", "exact"),
    "int8": ("int8", "int8"),
    "delta": ("delta:0.048", "int8"),
    "shared": ("shared:0.048", "int8"),
}
MODES = ("plain", *HYBRID)
# The link is silent if fewer bytes pass in each direction within PAUSE seconds. Heartbeats of buffers are fewer.
SILENCE, PAUSE = 20_000, 0.1


class Step(NamedTuple):
    """A training step on one rank."""

    loss: Tensor  # the rank's part of the batch's mean, in nats per byte
    seconds: float
    counted: bool  # False for the first step of a turn


class Trainer:
    """One mode: a model, its optimizer, and how gradients are reduced."""

    def __init__(self, mode: str, args: argparse.Namespace) -> None:
        mode, options = predict.mode_of(mode)
        self.mode, self.args = mode, args
        self.steps: list[Step] = []
        self.link_bytes = 0
        self.migration: ExpertMigration | None = None
        self.buffer: Buffer | None = None
        if mode == "plain":
            self.buffer = Buffer(num_experts=args.experts, domains=DATACENTERS, device="cpu", workers=1)
        else:
            plan = ExpertDomains.uniform(ranks=dist.get_world_size(), datacenters=DATACENTERS)
            weights, gradients = HYBRID[mode]
            self.migration = ExpertMigration(
                plan,
                num_experts=args.experts,
                weights=weights,
                gradients=gradients,
                dense_gradients=predict.DENSE.get(mode, "exact"),
                workers=1,
                **options,
            )
        torch.manual_seed(args.seed)
        self.model = model_of(args, self.moe)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01
        )

    def moe(self) -> MoELayer:
        sizes = (self.args.width, self.args.expert_width)
        if self.migration is not None:
            return HybridMoELayer(self.migration, *sizes, topk=self.args.topk, balance_coef=0.01)
        assert self.buffer is not None
        return MoELayer(self.buffer, *sizes, topk=self.args.topk, balance_coef=0.01)

    def step(self, windows: Tensor, counted: bool) -> None:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        ranks = dist.get_world_size()
        loss = total_loss(self.model, windows) / (ranks * windows[:, 1:].numel())
        (loss + self.model.balance_loss() / ranks).backward()
        if self.migration is not None:
            self.migration.reduce_gradients(self.model, op="sum")
        else:
            reduce_gradients(self.model, op="sum")
        self.optimizer.step()
        if self.migration is not None:
            self.migration.publish()
        self.steps.append(Step(loss.detach(), time.perf_counter() - started, counted))

    def sent(self) -> dict[str, Any]:
        """Counters of this rank since the start."""
        if self.migration is not None:
            return self.migration.stats()
        assert self.buffer is not None
        return self.buffer.traffic()._asdict()

    def close(self) -> None:
        if self.migration is not None:
            self.migration.close()
        if self.buffer is not None:
            self.buffer.close()


def model_of(args: argparse.Namespace, moe: Any) -> Model:
    return Model(Sizes(args.width, args.heads, args.layers, args.context), moe)


def batches(args: argparse.Namespace) -> Any:
    """Yields this rank's int64 [windows, context + 1] of each step. Every mode has a generator of its own."""
    text, draw = corpus(), torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(len(text) - args.context, (dist.get_world_size(), args.windows), generator=draw)
        yield text[starts[dist.get_rank()][:, None] + torch.arange(args.context + 1)].long()


def link() -> tuple[int, int] | None:
    """Reads the bytes that left and reached this namespace since it was made; None without a link of its own."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            received, *_, sent = numbers.split()[0:9]
            return int(sent), int(received)
    return None


def wait_for_silence() -> None:
    """Waits until all ranks have arrived and nothing travels."""
    dist.barrier()
    before = link()
    while before is not None:
        time.sleep(PAUSE)
        after = link()
        assert after is not None
        if max(after[0] - before[0], after[1] - before[1]) < SILENCE:
            break
        before = after
    dist.barrier()


class Alone(NamedTuple):
    """What a rank measures without communication, while the other ranks do so too. All ranks have the same result."""

    compute_seconds: float  # forward and backward pass
    optimizer_seconds: float  # with this rank's share of the experts
    dense_parameters: int


def alone(args: argparse.Namespace) -> Alone:
    """Measures a step without communication. Collective."""
    windows = next(batches(args))
    passes, updates = [], []
    with local_buffer(args.experts) as all_experts, local_buffer(args.experts // dist.get_world_size()) as share:
        model = model_of(args, lambda: MoELayer(all_experts, args.width, args.expert_width, topk=args.topk))
        owned = model_of(args, lambda: MoELayer(share, args.width, args.expert_width, topk=1))
        optimizer = torch.optim.AdamW(parameter_groups(owned))
        for parameter in owned.parameters():
            parameter.grad = torch.ones_like(parameter)
        dist.barrier()
        for _ in range(6):
            started = time.perf_counter()
            (total_loss(model, windows) / windows.numel()).backward()
            passes.append(time.perf_counter() - started)
        for _ in range(6):
            started = time.perf_counter()
            optimizer.step()
            updates.append(time.perf_counter() - started)
    dense, _ = parameter_groups(model)
    seconds = torch.tensor([statistics.median(times[1:]) for times in (passes, updates)])
    dist.all_reduce(seconds)
    return Alone(*(seconds / dist.get_world_size()).tolist(), sum(parameter.numel() for parameter in dense["params"]))


def local_buffer(experts: int) -> Buffer:
    """A buffer of one rank, without peers."""
    return Buffer.threads(1, num_experts=experts, device="cpu", workers=1)[0]


def result_of(trainer: Trainer) -> dict[str, Any]:
    """Collects a mode's figures of all ranks. Collective."""
    losses = torch.stack([step.loss for step in trainer.steps])
    dist.all_reduce(losses)
    own = {"seconds": [step.seconds for step in trainer.steps], "sent": trainer.sent()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    link_bytes = torch.tensor([trainer.link_bytes])
    dist.all_reduce(link_bytes, op=dist.ReduceOp.MAX)
    return {
        "losses_nats_per_byte": losses.tolist(),
        # A step is over when the slowest rank has finished it.
        "step_seconds": [max(rank["seconds"][step] for rank in ranks) for step in range(len(losses))],
        "counted": [step.counted for step in trainer.steps],
        # A rank that is late in a step is early in the next, so the mean is less than that of the slowest ranks.
        "mean_step_seconds": max(mean_seconds(rank["seconds"], trainer.steps) for rank in ranks),
        "link_bytes_per_step": int(link_bytes) / len(losses) if link() is not None else None,
        "sent_by_rank": [rank["sent"] for rank in ranks],
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    measured = alone(args)
    trainers = {mode: Trainer(mode, args) for mode in args.modes} if args.steps else {}
    data = {mode: batches(args) for mode in trainers}
    for first in range(0, args.steps, args.turn):
        for mode, trainer in trainers.items():
            wait_for_silence()
            before = link()
            for step in range(first, min(first + args.turn, args.steps)):
                trainer.step(next(data[mode]), counted=step > first)
            wait_for_silence()
            if before is not None and (after := link()) is not None:
                # The busier direction of the link, from one silence to the next.
                trainer.link_bytes += max(now - then for now, then in zip(after, before, strict=True))
        if dist.get_rank() == 0:
            done = min(first + args.turn, args.steps)
            medians = (f"{mode} {median_seconds(trainer.steps):.3f} s" for mode, trainer in trainers.items())
            print(f"step {done} of {args.steps}: {', '.join(medians)}", flush=True)
    result = {
        **measured._asdict(),
        "modes": {mode: result_of(trainer) for mode, trainer in trainers.items()},
    }
    for trainer in trainers.values():
        trainer.close()
    return result


def mean_seconds(seconds: list[float], steps: list[Step]) -> float:
    counted = [time for time, step in zip(seconds, steps, strict=True) if step.counted]
    return statistics.mean(counted or seconds)


def median_seconds(steps: list[Step]) -> float:
    return statistics.median([step.seconds for step in steps if step.counted] or [steps[0].seconds])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `run.py` passes on."""
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["plain", "int8"],
        metavar="MODE,...",
        help="int8@2 is the mode int8 with depth=2, int8/tcp with the carrier tcp",
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of each mode; 0 predicts and trains nothing")
    parser.add_argument("--turn", type=int, default=10, help="steps of a mode before the next mode's turn")
    parser.add_argument("--windows", type=int, default=8, help="windows of text a rank and step")
    add_model_arguments(parser)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = run(args)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
