"""Trains a small mixture-of-experts language model on the Python standard library's sources, byte by byte.

    python examples/train_moe_lm.py                                              # one process
    torchrun --standalone --nproc-per-node 4 examples/train_moe_lm.py --compare  # 4 ranks, then one process

The dense part is data-parallel, and experts are spread over the ranks. The batch is the same for any number of ranks,
so the loss is the same within rounding. `--compare` shows this: rank 0 trains the same model once more alone.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from moe_lm import Model, Sizes, add_model_arguments, corpus, total_loss
from torch import Tensor

from hybrid_ep import Buffer
from hybrid_ep.moe import MoELayer, Routed, parameter_groups, reduce_gradients


def model_of(buffer: Buffer, args: argparse.Namespace) -> Model:
    """Makes the model with experts spread over the ranks of the buffer."""

    def moe() -> MoELayer:
        return MoELayer(
            buffer,
            args.width,
            args.expert_width,
            topk=args.topk,
            balance_coef=0.01,
            balance_group=dist.group.WORLD if buffer.world_size > 1 else None,
            comm_dtype={"bf16": torch.bfloat16, "f32": torch.float32}[args.comm],
        )

    return Model(Sizes(args.width, args.heads, args.layers, args.context), moe).to(buffer.device)


class Run(NamedTuple):
    """The results of a training run; all but `routed` are the same on all ranks."""

    losses: list[float]  # of each step, in nats per byte of the whole batch
    loads: list[Tensor]  # of each step, [layers, experts]: how often each expert was chosen
    routed: list[Routed]  # of each layer, in the last step: this rank's tokens


def train(buffer: Buffer, text: Tensor, args: argparse.Namespace) -> Run:
    torch.manual_seed(args.seed)
    model = model_of(buffer, args)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / args.steps))
    routed: list[Routed] = []
    for block in model.blocks:
        block.moe.router.register_forward_hook(lambda module, inputs, output: routed.append(output))

    draw = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    loads: list[Tensor] = []
    started = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=draw)
        own = starts.tensor_split(buffer.world_size)[buffer.rank]  # parts may be unequal, or empty
        windows = text[own[:, None] + torch.arange(args.context + 1)].long().to(buffer.device)
        routed.clear()
        optimizer.zero_grad()
        loss = total_loss(model, windows) / (args.batch * args.context)
        (loss + model.balance_loss() * len(own) / args.batch).backward()
        loss = loss.detach()
        chosen = torch.stack([layer.topk_idx.flatten().bincount(minlength=args.experts) for layer in routed])
        if buffer.world_size > 1:
            reduce_gradients(model, op="sum")
            dist.all_reduce(loss)
            dist.all_reduce(chosen)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        loads.append(chosen)
        if buffer.rank == 0 and (step % 20 == 0 or step == args.steps - 1):
            pace = (time.perf_counter() - started) / (step + 1)
            who = f"{buffer.world_size} ranks" if buffer.world_size > 1 else "one process"
            print(f"{who}, step {step:4}: {losses[-1]:.4f} nats per byte, {pace:.2f} s a step", flush=True)
    return Run(losses, loads, routed)


def record_routing(path: Path, routed: list[Routed], buffer: Buffer, args: argparse.Namespace) -> None:
    """Writes the routing as a trace for `hybrid-ep bench --routing`; traces/README.md describes the format."""
    own = [(layer.topk_idx.int().cpu(), layer.topk_weights.detach().float().cpu()) for layer in routed]
    ranks: list[Any] = [own]
    if buffer.world_size > 1:
        ranks = [None] * buffer.world_size
        dist.all_gather_object(ranks, own)
    if buffer.rank != 0:
        return
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "hybrid-ep-routing",
            "version": "1",
            "experts": str(args.experts),
            "topk": str(args.topk),
            "layers": str(args.layers),
            "ranks": str(buffer.world_size),
            "source": f"examples/train_moe_lm.py, step {args.steps}, seed {args.seed}: the batch it trained on",
        }
    }
    data = b""
    for rank, layers in enumerate(ranks):
        for layer, (idx, weights) in enumerate(layers):
            for name, dtype, tensor in (("topk_idx", "I32", idx), ("topk_weights", "F32", weights)):
                values = tensor.numpy().astype(tensor.numpy().dtype.newbyteorder("<")).tobytes()
                header[f"layer{layer}.rank{rank}.{name}"] = {
                    "dtype": dtype,
                    "shape": list(tensor.shape),
                    "data_offsets": [len(data), len(data) + len(values)],
                }
                data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Comparison(NamedTuple):
    """The differences between two runs of the same training."""

    differences: list[float]  # of the losses, absolute
    parting: int | None  # the first step in which an expert was chosen more often in one run

    @classmethod
    def of(cls, ours: Run, alone: Run) -> Comparison:
        differences = [abs(a - b) for a, b in zip(ours.losses, alone.losses, strict=True)]
        partings = [step for step, loads in enumerate(ours.loads) if not torch.equal(loads, alone.loads[step])]
        return cls(differences, partings[0] if partings else None)

    def __str__(self) -> str:
        if self.parting is None:
            return f"losses differ by {max(self.differences):.1e} nats per byte at most"
        before, after = self.differences[: self.parting], self.differences[self.parting :]
        return (
            f"until step {self.parting}, where rounding first sends a token to another expert, losses differ by "
            f"{max(before, default=0.0):.1e} nats per byte at most, then by {max(after):.1e}"
        )


def plot(path: Path, ours: Run, alone: Run, comparison: Comparison, ranks: int) -> None:
    """Draws both curves, and their difference below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    above.plot(alone.losses, color="#f0a030", linewidth=5, alpha=0.6, label="one process")
    above.plot(ours.losses, color="#103060", linewidth=1.2, label=f"{ranks} ranks, experts spread over them")
    above.set_ylabel("loss, nats per byte")
    below.plot(comparison.differences, color="#a02020", linewidth=1)
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    if comparison.parting is not None:
        label = "rounding sends a token to another expert"
        below.axvline(comparison.parting, color="#606060", linestyle=":", label=label)
        below.legend(frameon=False, loc="lower right")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="windows of text a step, over all ranks")
    add_model_arguments(parser)
    parser.add_argument("--comm", choices=("f32", "bf16"), default="f32", help="type of the rows that travel")
    parser.add_argument("--compare", action="store_true", help="train once more in one process, and compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --compare: draw the curves (needs matplotlib)")
    parser.add_argument("--record-routing", type=Path, metavar="FILE", help="write the last step's routing as a trace")
    args = parser.parse_args()
    if args.plot and not args.compare:
        parser.error("--plot draws what --compare compares: give both")
    return args


def main() -> None:
    args = arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        join()
    text = corpus()
    with Buffer(dist.group.WORLD if ranks > 1 else None, num_experts=args.experts) as buffer:
        ours = train(buffer, text, args)
        if args.record_routing:
            record_routing(args.record_routing, ours.routed, buffer, args)
        if buffer.rank == 0:
            report(ours, text, args, ranks)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def join() -> None:
    """Joins through NCCL if each rank has a GPU; through gloo on the CPU, and if ranks share GPUs."""
    gpus, local_rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")


def report(ours: Run, text: Tensor, args: argparse.Namespace, ranks: int) -> None:
    """Reports a run of rank 0, and trains the model alone to compare."""
    result: dict[str, Any] = {"ranks": ranks, "comm": args.comm, "losses_nats_per_byte": ours.losses}
    if args.compare:
        (buffer,) = Buffer.threads(1, num_experts=args.experts)
        with buffer:
            alone = train(buffer, text, args)
        comparison = Comparison.of(ours, alone)
        result |= {
            "losses_of_one_process": alone.losses,
            "largest_difference": max(comparison.differences),
            "first_step_routed_differently": comparison.parting,
        }
        print(f"{ranks} ranks ended at {ours.losses[-1]:.4f}, one process at {alone.losses[-1]:.4f}:\n{comparison}")
        if args.plot:
            plot(args.plot, ours, alone, comparison, ranks)
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
