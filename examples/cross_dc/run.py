"""Trains a small language model over an emulated link between two datacenters, with and without migration of experts.

    python examples/cross_dc/run.py --rate 100Mbit --modes plain,int8
    python examples/cross_dc/run.py --rate 300Mbit --delay 15ms --modes plain,exact,int8,delta,shared --steps 200

Two network namespaces stand for two datacenters, with two ranks in each. The program needs Linux, root, and the
commands `ip` and `tc`; without them it runs all ranks on one machine without a limit of the rate, and says so. The mode
`plain` sends tokens between the datacenters and needs libfabric.

The program writes results.json and curves.png into the folder of --out, and prints each mode's predicted and measured
time of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import network
import predict
import train

PORT = 29500
# A mode; one with migration may have a depth and a carrier.
KNOWN = f"plain|({'|'.join(train.HYBRID)})(@[1-9][0-9]?)?(/[a-z]+)?"
RANKS_PER_DATACENTER = 2


def main() -> int:
    args = arguments()
    # A signal ends the program as an exception does, so that namespaces and ranks are removed.
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, frame: sys.exit(128 + number))
    args.out.mkdir(parents=True, exist_ok=True)
    reason = "--unshaped" if args.unshaped else network.why_not()
    if reason is None:
        with network.Network(args.rate, args.delay) as joined:
            status = start(args, joined)
    else:
        print(f"The rate is not limited, and nothing is delayed ({reason}): all ranks run on this machine.", flush=True)
        status = start(args, None)
    if status:
        return status
    result = json.loads((args.out / "training.json").read_text())
    (args.out / "training.json").unlink()
    report(args, result, shaped=reason is None)
    return 0


def start(args: argparse.Namespace, joined: network.Network | None) -> int:
    """Starts the ranks and waits for them. Returns the exit status."""
    passed = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED]
    work = [str(Path(train.__file__)), f"--modes={','.join(args.modes)}", *passed]
    work += ["--result", str(args.out / "training.json")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if joined is None:
        count = str(train.DATACENTERS * RANKS_PER_DATACENTER)
        commands = [[*torchrun, count, "--standalone", *work]]
    else:
        environment |= {
            "HYBRID_EP_SECRET": secrets.token_hex(32),
            "HYBRID_EP_TRANSPORT": "tcp",
            "HYBRID_EP_TRANSPORT_ADDRESS": network.DEVICE,
            "GLOO_SOCKET_IFNAME": network.DEVICE,
        }
        meeting = ["--master-addr", joined.addresses[0], "--master-port", str(PORT)]
        layout = [str(RANKS_PER_DATACENTER), "--nnodes", str(train.DATACENTERS), "--node-rank"]
        commands = [
            [*joined.inside(node), *torchrun, *layout, str(node), *meeting, *work] for node in range(train.DATACENTERS)
        ]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            nodes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        # If a rank fails, the torchrun of its datacenter ends, and the other torchrun notices.
        return max(abs(node.wait()) for node in nodes)
    finally:
        network.stop(nodes)


def report(args: argparse.Namespace, result: dict[str, Any], *, shaped: bool) -> None:
    """Prints and writes the figures, and draws them."""
    given = predict.Given(
        datacenters=train.DATACENTERS,
        ranks=train.DATACENTERS * RANKS_PER_DATACENTER,
        layers=args.layers,
        width=args.width,
        expert_width=args.expert_width,
        experts=args.experts,
        topk=args.topk,
        tokens=args.windows * args.context,
        context=args.context,
        dense_parameters=result["dense_parameters"],
        compute_seconds=result["compute_seconds"],
        optimizer_seconds=result["optimizer_seconds"],
    )
    predicted = predictions(args, given, shaped=shaped)
    if args.steps == 0:
        for mode, expected in predicted.items():
            print(f"{mode:8} {expected:.3f} s a step, predicted")
        figures = {"compute_seconds": given.compute_seconds, "optimizer_seconds": given.optimizer_seconds}
        written = json.dumps({**figures, "step_seconds": predicted}, indent=1)
        (args.out / "predictions.json").write_text(written + "\n")
        return
    names = [predict.mode_of(mode).name for mode in args.modes]
    codecs = ", ".join(f"{mode} {predict.DENSE.get(mode, 'exact')}" for mode in dict.fromkeys(names) if mode != "plain")
    if codecs:
        print(f"\ndense gradients between datacenters: {codecs}")
    columns = f"{'predicted':>10} {'measured':>10} {'ratio':>6} {'mean':>9} {'link, MB a step':>16} {'final loss':>11}"
    print(f"\n{'mode':8} {columns}")
    for mode, figures in result["modes"].items():
        counted = [s for s, yes in zip(figures["step_seconds"], figures["counted"], strict=True) if yes]
        figures["median_step_seconds"] = measured = statistics.median(counted or figures["step_seconds"])
        figures["predicted_step_seconds"] = expected = predicted.get(mode)
        moved = figures["link_bytes_per_step"]
        last = figures["losses_nats_per_byte"][-10:]
        print(
            f"{mode:8} {'-' if expected is None else f'{expected:.3f} s':>10} {f'{measured:.3f} s':>10} "
            f"{'-' if expected is None else f'{measured / expected:.2f}':>6} "
            f"{figures['mean_step_seconds']:>7.3f} s "
            f"{'-' if moved is None else f'{moved / 1e6:.3f}':>16} {statistics.mean(last):>11.4f}"
        )
    link = {"rate": args.rate, "delay_seconds": args.delay} if shaped else None
    sizes = {name: getattr(args, name) for name in PASSED}
    (args.out / "results.json").write_text(json.dumps({"link": link, "sizes": sizes, **result}, indent=1) + "\n")
    try:
        import draw
    except ImportError:
        print("matplotlib is not installed, so nothing is drawn: pip install 'hybrid-ep[examples]'")
        return
    title = f"{args.rate}, {1e3 * args.delay:g} ms each way" if shaped else "one machine"
    draw.draw(args.out / "curves.png", result["modes"], title)


def predictions(args: argparse.Namespace, given: predict.Given, *, shaped: bool) -> dict[str, float]:
    """Predicts the seconds of a step of each mode, or reads what an earlier run predicted. Empty without a link."""
    if args.predictions is not None:
        earlier: dict[str, float] = json.loads(args.predictions.read_text())["step_seconds"]
        return earlier
    cluster = args.cluster
    if cluster is None and shaped:
        cluster = predict.cluster_file(args.out, given, args.rate, args.delay, args.efficiency)
    return {} if cluster is None else {mode: predict.predict(cluster, given, mode) for mode in args.modes}


# The arguments of train.py that are numbers.
PASSED = "steps turn windows context layers width heads experts topk expert_width lr seed".split()


def seconds(text: str) -> float:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if parts is None:
        raise argparse.ArgumentTypeError(f"expected a number and us, ms or s, found {text!r}")
    return float(parts[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[parts[2]]


def rate(text: str) -> str:
    if re.fullmatch(predict.RATE, text, re.IGNORECASE) is None:
        raise argparse.ArgumentTypeError(f"expected a number and kbit, Mbit or Gbit, found {text!r}")
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=rate, default="100Mbit", help="rate of the link in each direction")
    parser.add_argument("--delay", type=seconds, default=0.0, metavar="TIME", help="delay in each direction")
    parser.add_argument("--unshaped", action="store_true", help="all ranks on this machine, without an emulated link")
    parser.add_argument("--out", type=Path, default=Path("cross-dc"), metavar="DIR", help="where the results go")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="predict with this cluster file of the planner")
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="compare with the predictions.json that an earlier run with --steps 0 wrote",
    )
    parser.add_argument(
        "--efficiency", type=float, default=0.8, help="predict with this part of the rate [gloo reaches 0.74 to 0.86]"
    )
    train.add_arguments(parser)
    args = parser.parse_args()
    unknown = [mode for mode in args.modes if not re.fullmatch(KNOWN, mode)]
    if unknown or not args.modes:
        parser.error(
            f"--modes: unknown {', '.join(unknown)}; possible: {', '.join(train.MODES)}, int8@2 for depth=2, and "
            "int8/tcp for the carrier tcp"
        )
    carriers = {predict.mode_of(mode).options.get("carrier", "gloo") for mode in args.modes}
    if ("plain" in args.modes and not args.unshaped) or carriers - {"gloo", "loopback"}:
        try:
            ctypes.CDLL("libfabric.so.1")
        except OSError:
            parser.error(
                "the mode plain and carriers such as tcp need libfabric: apt-get install libfabric1 (Debian, Ubuntu), "
                "dnf install libfabric (Fedora); or leave the modes out"
            )
    return args


if __name__ == "__main__":
    sys.exit(main())
