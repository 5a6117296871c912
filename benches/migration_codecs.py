"""Times the codecs of the migration of experts on the CPU and on GPUs: two ranks, each with a GPU, in two datacenters.

    torchrun --nproc-per-node 2 benches/migration_codecs.py
    torchrun --nproc-per-node 2 benches/migration_codecs.py --weights delta:0.01 --gradients topk:0.01

Prints a row for each place of the codecs: medians over the steps, of rank 0, in milliseconds. `encode` and `decode` are
the time in the codecs, weights and gradients together; `publish`, `gather` and `reduce` are the calls, with copies
between GPU and main memory and with the transfer of the messages. A line before says how many bytes a step reads and
sends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridMoELayer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="times the codecs of the migration of experts")
    parser.add_argument("--experts", type=int, default=16, help="of both ranks")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--gradients", default="int8")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--carrier", default="gloo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--places", default="cpu,cuda", help="where codecs run, in this order")
    return parser.parse_args()


def timed(call) -> float:
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def measure(args: argparse.Namespace, place: str, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    migration = ExpertMigration(
        ExpertDomains.uniform(ranks=2, datacenters=2),
        num_experts=args.experts,
        weights=args.weights,
        gradients=args.gradients,
        carrier=args.carrier,
        device=device,
        codec_device=place,
    )
    layer = HybridMoELayer(migration, args.hidden, args.intermediate, topk=2, dtype=getattr(torch, args.dtype))
    experts = layer.experts
    times: dict[str, list[float]] = {name: [] for name in ("encode", "decode", "publish", "gather", "reduce")}
    before: dict[str, float] = {"encoding": 0.0, "decoding": 0.0}
    for step in range(args.steps + 3):
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-4)
        publish = timed(migration.publish)
        gather = timed(lambda: migration.gather(0))
        experts.working.grad = torch.randn_like(experts.working)
        reduce = timed(lambda: migration.reduce_gradients(layer))
        stats = migration.stats()
        if step >= 3:
            times["publish"].append(publish)
            times["gather"].append(gather)
            times["reduce"].append(reduce)
            times["encode"].append(1000 * (stats["encoding"] - before["encoding"]))
            times["decode"].append(1000 * (stats["decoding"] - before["decoding"]))
        elif step == 0:
            elements, width = experts.replicas().numel(), experts.working.element_size()
            if dist.get_rank() == 0:
                sent = stats["weights_sent"] + stats["gradients_sent"]
                print(f"  {2 * elements * width / 1e6:.0f} MB of weights and gradients, sent as {sent / 1e6:.0f} MB")
        before = stats
    migration.close()
    return {name: statistics.median(all_of) for name, all_of in times.items()}


def main() -> None:
    args = arguments()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    if rank == 0:
        print(f"weights {args.weights}, gradients {args.gradients}, {args.dtype}; {torch.cuda.get_device_name(device)}")
    for place in args.places.split(","):
        found = measure(args, place, device)
        if rank == 0:
            print(f"  {place:<5}" + "".join(f"  {name} {value:8.2f}" for name, value in found.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
