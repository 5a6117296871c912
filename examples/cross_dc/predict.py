"""Predicts step times with the planner (`hybrid-ep plan`)."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

INT8 = '"int8"'
RATE = r"(\d+(?:\.\d+)?)([kmg])bit"
# Compression of weights and of gradients, as in the planner's file: a codec, or bytes over the bytes that travel.
COMPRESSION = {"exact": ("1", "1"), "int8": (INT8, INT8), "delta": ("50", INT8), "shared": ("50", INT8)}

# The codec of dense gradients between datacenters, where it is not "exact". Then, by codec: bytes of an element.
DENSE = {"delta": "int8", "shared": "int8"}
DENSE_BYTES = {"exact": 4.0, "int8": 1 + 4 / 128}


class Given(NamedTuple):
    """What a prediction needs, all of it known before training or measured without communication."""

    datacenters: int
    ranks: int
    layers: int
    width: int
    expert_width: int
    experts: int
    topk: int
    tokens: int  # of a rank and step
    context: int
    dense_parameters: int
    compute_seconds: float  # forward and backward pass of one rank without communication
    optimizer_seconds: float  # the optimizer's step of one rank


class Mode(NamedTuple):
    """A mode, and options of the migration that it sets; without them the defaults apply."""

    name: str
    options: dict[str, Any]


def mode_of(text: str) -> Mode:
    """Reads a mode, such as `int8`, `int8@2` with `depth=2`, `int8/tcp` with `carrier="tcp"`, or `int8@2/tcp`."""
    rest, _, carrier = text.partition("/")
    name, _, depth = rest.partition("@")
    options: dict[str, Any] = {}
    if depth:
        options["depth"] = int(depth)
    if carrier:
        options["carrier"] = carrier
    return Mode(name, options)


def cluster_file(folder: Path, given: Given, rate: str, delay: float, efficiency: float) -> Path:
    """Writes the cluster file of the emulated link.

    Args:
        folder: Where the file is written.
        given: The sizes.
        rate: The rate of the link as `tc` writes it, such as "100Mbit".
        delay: Seconds in each direction.
        efficiency: The part of the rate that transfers reach.

    Returns:
        The file.

    Raises:
        ValueError: `rate` is not a rate.
    """
    parts = re.fullmatch(RATE, rate, re.IGNORECASE)
    if parts is None:
        raise ValueError(f"rate: expected a number and kbit, Mbit or Gbit, found {rate!r}")
    number, unit = parts[1], {"k": "k", "m": "M", "g": "G"}[parts[2].lower()]
    file = folder / "cluster.toml"
    file.write_text(f"""# The emulated link, for `hybrid-ep plan --cluster`.
[cluster]
name = "{given.datacenters} emulated datacenters"
[[cluster.level]]
name = "wan"
members = {given.datacenters}
bandwidth = "{number} {unit}bit/s"
sharing = "per-member"
efficiency = {efficiency}
round_trip = "{2e3 * delay} ms"
[[cluster.level]]
name = "host"                    # shared memory; its rate hardly matters beside the link's
members = {given.ranks // given.datacenters}
bandwidth = "20 Gbit/s"
[cluster.gpu]
throughput = "1 TFLOP/s"         # replaced by the measured compute time
memory = "8 GB"
memory_bandwidth = "10 GB/s"
""")
    return file


def predict(cluster: Path, given: Given, mode: str) -> float:
    """Predicts the seconds of a training step.

    The planner prices the compute and the transfers of a layer. The prediction adds dense gradients, which leave after
    those of the experts, and the optimizer.

    Args:
        cluster: A cluster file, from `cluster_file` or `hybrid-ep calibrate`.
        given: The sizes.
        mode: A mode of the example. Its depth is assumed to be sufficient.

    Returns:
        Seconds.

    Raises:
        ValueError: The cluster does not fit, or the planner refuses the problem; the text is its message.
    """
    mode = mode_of(mode).name
    weights, gradients = COMPRESSION.get(mode, COMPRESSION["exact"])
    # The planner counts operations. A first run finds their number, the second uses the measured throughput.
    plan = run_planner(cluster, given, weights, gradients, None)
    members = plan["plan"]["scaling_factors"]
    if members[0] != given.datacenters or math.prod(members) != given.ranks:
        raise ValueError(
            f"{cluster}: its levels have {members} members, and the example has {given.datacenters} datacenters of "
            f"{given.ranks // given.datacenters} ranks: add a level for the ranks of a datacenter"
        )
    layer = plan["plan"]["baselines"][0]["candidate"]["forward"]
    throughput = plan["problem"]["cluster"]["gpu"]["sustained_tflops"]
    operations = 3 * given.layers * (layer["pre_expert"] + layer["expert"]) * throughput
    plan = run_planner(cluster, given, weights, gradients, operations / given.compute_seconds)
    wan = plan["problem"]["cluster"]["levels"][0]
    rates = wan["bandwidth_gbit_per_s"]
    slowest = min(rates) if isinstance(rates, list) else rates
    bytes_per_second = slowest * 1e9 / 8 * wan["efficiency"]
    dense = dense_link_bytes(given, mode) / bytes_per_second + dense_messages(given, mode) * wan["round_trip_s"] / 2
    layer = layer_of(plan["plan"], mode, given.datacenters)
    passes = [pass_seconds(layer[name], given.layers, mode) for name in ("forward", "backward")]
    return sum(passes) + dense + given.optimizer_seconds


def dense_link_bytes(given: Given, mode: str) -> float:
    """Counts the bytes of dense gradients that leave a datacenter in a step.

    The mode `plain` uses gloo's ring over all ranks, whose link between two datacenters carries `2 (ranks - 1) / ranks`
    of the bytes. In the other modes each datacenter sends its sum once to every other datacenter; headers are not
    counted.
    """
    if mode == "plain":
        return 2 * (given.ranks - 1) / given.ranks * 4 * given.dense_parameters
    return (given.datacenters - 1) * DENSE_BYTES[DENSE.get(mode, "exact")] * given.dense_parameters


def dense_messages(given: Given, mode: str) -> int:
    """Counts the messages between datacenters that are sent one after the other."""
    return 2 * (given.ranks - 1) if mode == "plain" else 1


def pass_seconds(layer: dict[str, float], layers: int, mode: str) -> float:
    """Adds up the layers of a forward or backward pass.

    With migration, the link sends one layer while the processors compute another. The slower of the two works all the
    time, except while the other one works on its first or last layer: in a forward pass the first layer is computed
    after its weights have arrived, in a backward pass the last gradients leave after they were computed. In the mode
    `plain`, a layer alternates between sending and computing.

    Args:
        layer: The times of one layer, from the planner.
        layers: The number of layers.
        mode: A mode of the example.

    Returns:
        Seconds.
    """
    if mode == "plain":
        return layers * layer["total"]
    compute = sum(layer[part] for part in ("pre_expert", "expert", "decode", "encode"))
    link = sum(layer[part] for part in ("all_gather", "all_to_all", "gradients"))
    return layers * max(compute, link) + min(compute, link)


def layer_of(plan: dict[str, Any], mode: str, datacenters: int) -> Any:
    """Finds the candidate of a mode in a plan."""
    if mode == "plain":
        # The buffer sends a token once to each datacenter, and gets one sum back.
        found = [b["candidate"] for b in plan["baselines"] if b["kind"].startswith("hierarchical")]
    else:
        # Domains over the datacenters only.
        sizes = [datacenters] + [1] * (len(plan["scaling_factors"]) - 1)
        candidates = [plan["best"], *plan["alternatives"]]
        found = [c for c in candidates if c["domain_sizes"] == sizes and c["replicas_kept"]]
    if not found:
        raise ValueError(f"the planner did not price the mode {mode}")
    return found[0]


def run_planner(cluster: Path, given: Given, weights: str, gradients: str, tflops: float | None) -> Any:
    width = given.width
    dense = given.dense_parameters - given.layers * 4 * width * width
    problem = f"""
[model]
name = "examples/moe_lm.py"
hidden = {width}
expert_intermediate = {given.expert_width}
experts = {given.experts}
topk = {given.topk}
moe_layers = {given.layers}
tokens_per_gpu = {given.tokens}
context = {given.context}
attention = {{ parameters = {4 * width * width}, score_width = {2 * width} }}
other_parameters = {dense}
precision = {{ weights = "f32", dispatch = "f32", combine = "f32", gradients = "f32" }}
[options]
replicas = "keep"
weight_compression = {weights}
gradient_compression = {gradients}
"""
    command = [sys.executable, "-m", "hybrid_ep", "plan", "--strategy", "expert-domains"]
    with tempfile.TemporaryDirectory() as folder:
        model, result = Path(folder) / "model.toml", Path(folder) / "plan.json"
        model.write_text(problem)
        command += ["--cluster", str(cluster), "--model", str(model), "--json", str(result)]
        if tflops is not None:
            command += ["--set", f"throughput={tflops:.9f}TFLOP/s"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr.strip())
        return json.loads(result.read_text())
