"""Measures the host time of each call of `HybridEPBuffer`.

    torchrun --standalone --nproc-per-node 2 examples/drop_in_cost.py

Prints, for this package and for a real `deep_ep` if one is installed, the microseconds from a call to its return
and the GPU activities (kernels, copies, fills) that it queues; without GPUs, PyTorch's operators instead of activities.
Times are medians of the slowest rank, without gradients, as in the autograd functions in which programs wrap the calls.
Blocking calls include their wait for the GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

Calls = dict[str, Callable[[], object]]
WARM_UP = 5


class Operators(TorchDispatchMode):
    """Records the names of the PyTorch operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def calls(module: Any, group: dist.ProcessGroup, device: torch.device, tokens: int, hidden: int, local: int) -> Calls:
    """Returns the calls to measure, by name. All except `indices_to_map` are collective."""
    experts, topk = local * group.size(), min(8, local * group.size())
    generator = torch.Generator().manual_seed(group.rank())
    topk_idx = torch.rand(tokens, experts, generator=generator).topk(topk).indices.to(device)
    topk_weights = torch.rand(tokens, topk, generator=generator).to(device)
    x = torch.randn(tokens, hidden, generator=generator).to(device, torch.bfloat16)
    fp8, scales = x.to(torch.float8_e4m3fn).view(torch.uint8), torch.ones(tokens, hidden // 128, device=device)
    to_map = importlib.import_module(f"{module.__name__}.hybrid_ep_buffer").indices_to_map
    routing_map, probs = to_map(topk_idx, topk_weights, tokens, experts)

    def buffer(use_fp8: bool) -> Any:
        sizes = {"hidden_dim": hidden, "max_num_of_tokens_per_rank": tokens, "num_local_experts": local}
        return module.HybridEPBuffer(group=group, use_fp8=use_fp8, **sizes)

    of_bf16 = buffer(False)
    of_fp8 = buffer(True)
    indices = {"topk_idx": topk_idx, "topk_weights": topk_weights, "num_of_experts": experts}
    dense = {"routing_map": routing_map, "probs": probs, "num_of_experts_per_rank": local, "pad_multiple": 16}
    # What a backward pass passes: a handle, and dense weights.
    rows, row_probs, _, handle = of_bf16.dispatch(hidden=x, **indices)
    fp8_handle = of_fp8.dispatch(hidden=fp8, scaling_factor=scales, **indices)[-1]
    permuted, permuted_probs, _, _, permuted_handle = of_bf16.dispatch_with_permute(hidden=x, **dense)
    again: dict[str, Any] = {"handle": permuted_handle, "num_permuted_tokens": len(permuted), "pad_multiple": 16}
    room = (len(permuted) * 3 // 2 + 15) // 16 * 16
    count = {"num_dispatched_tokens": len(rows)}
    return {
        "indices_to_map": lambda: to_map(topk_idx, topk_weights, tokens, experts),
        "dispatch": lambda: of_bf16.dispatch(hidden=x, **indices),
        "dispatch, handle": lambda: of_bf16.dispatch(hidden=x, num_of_experts=experts, handle=handle, **count),
        "dispatch, handle + topk": lambda: of_bf16.dispatch(hidden=x, **indices, handle=handle, **count),
        "dispatch FP8, handle + topk": lambda: of_fp8.dispatch(
            hidden=fp8, scaling_factor=scales, **indices, handle=fp8_handle, **count
        ),
        "combine": lambda: of_bf16.combine(hidden=rows, handle=handle),
        "combine, probs": lambda: of_bf16.combine(hidden=rows, probs=row_probs, handle=handle),
        "permuted dispatch": lambda: of_bf16.dispatch_with_permute(hidden=x, **dense),
        "permuted dispatch, topk": lambda: of_bf16.dispatch_with_permute(
            hidden=x, **indices, num_of_experts_per_rank=local, pad_multiple=16
        ),
        "permuted dispatch, non-blocking": lambda: of_bf16.dispatch_with_permute(
            hidden=x, **dense, num_permuted_tokens=room, non_blocking=True
        ),
        "permuted dispatch, handle": lambda: of_bf16.dispatch_with_permute(hidden=x, **again),
        "permuted dispatch, handle + topk": lambda: of_bf16.dispatch_with_permute(hidden=x, **indices, **again),
        "permuted combine": lambda: of_bf16.combine_with_unpermute(hidden=permuted, handle=permuted_handle),
        "permuted combine, probs": lambda: of_bf16.combine_with_unpermute(
            hidden=permuted, probs=permuted_probs, handle=permuted_handle
        ),
    }


def operators_of(call: Callable[[], object]) -> list[str]:
    """Lists the PyTorch operators in a call."""
    with Operators() as operators:
        call()
    # The package registers its operators with PyTorch, and calls them directly if no mode is active.
    return [name for name in operators.names if not name.startswith("hybrid_ep.")]


def activities_of(call: Callable[[], object]) -> int:
    """Counts the kernels, copies and fills that a call queues on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    events = found.events() or []
    return sum(event.device_type == DeviceType.CUDA and not event.is_user_annotation for event in events)


def host_seconds(
    same: list[Callable[[], object]], group: dist.ProcessGroup, device: torch.device, repeats: int
) -> list[float]:
    """Measures each call's median time to its return, on the slowest rank, with nothing queued before the call.

    The calls take turns, so that a machine that slows down or speeds up changes all times alike.
    """
    samples: list[list[float]] = [[] for _ in same]
    for repeat in range(-WARM_UP, repeats):
        for call, times in zip(same, samples, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier(group)
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            result = call()
            if repeat >= 0:
                times.append(time.perf_counter() - begin)
            del result
    slowest = torch.tensor([statistics.median(times) for times in samples], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def costs(
    modules: list[Any], group: dist.ProcessGroup, device: torch.device, args: argparse.Namespace
) -> dict[str, list[tuple[float, int]]]:
    """Returns seconds and GPU activities (without GPUs: PyTorch's operators) of every call, for each of the modules."""
    of_modules = [calls(module, group, device, args.tokens, args.hidden, args.local_experts) for module in modules]
    found = {}
    for name in of_modules[0]:
        same = [of_module[name] for of_module in of_modules]
        seconds = host_seconds(same, group, device, args.repeats)
        numbers = [activities_of(call) if device.type == "cuda" else len(operators_of(call)) for call in same]
        found[name] = list(zip(seconds, numbers, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank; the original needs multiples of 64")
    parser.add_argument("--hidden", type=int, default=2048, help="the original needs multiples of 512")
    parser.add_argument("--local-experts", type=int, default=8, help="experts of each rank")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    group = dist.group.WORLD
    assert group is not None
    from hybrid_ep._contenders import real_deep_ep

    original, why_not = real_deep_ep() if on_gpu else (None, "deep_ep: not measured, it needs GPUs")
    modules = [importlib.import_module("hybrid_ep.deep_ep")] + ([] if original is None else [original])
    with torch.no_grad():
        found = costs(modules, group, device, args)
    if group.rank() == 0:
        what = "activities" if on_gpu else "operators"
        print(f"{'call':<34}{'hybrid_ep':>12}{what:>12}{'deep_ep':>12}{what:>12}")
        for name, of_modules in found.items():
            columns = [f"{1e6 * seconds:>9.0f} us{number:>12}" for seconds, number in of_modules]
            print(f"{name:<34}" + "".join(columns) + (f"{'-':>12}{'-':>12}" if original is None else ""))
        if original is None:
            print(why_not)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
