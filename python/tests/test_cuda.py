"""Tests that need GPUs: streams, CUDA graphs, counts that stay on the device. Other files also run on GPUs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, CallerError
from process_worlds import Rank, world_of_processes
from test_processes import free_port, meet, no_errors, processes
from worlds import make_case, on_threads, world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CAPACITY = 64
# Whether PyTorch allocates by `cudaMallocAsync` (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync).
_ASYNC = torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"
# What PyTorch says with this allocator about memory of a graph that the program drops.
_ASYNC_WARNING = "uncaptured free of a captured allocation", "This is technically allowed"


def round_of(
    buffer: Buffer, x: Tensor, idx: Tensor, weights: Tensor, capacity: int | None = CAPACITY
) -> tuple[Tensor, ...]:
    got = buffer.dispatch_with_permute(x, idx, weights, pad_multiple=4, capacity=capacity)
    assert got.probs is not None
    assert got.tokens_per_expert is not None
    back = buffer.combine_with_unpermute(got.tokens * got.probs[:, None], got.handle, probs=got.probs)
    assert back.probs is not None
    return back.tokens, back.probs, got.tokens_per_expert, got.overflow


def inputs_of(buffer: Buffer, ranks: int, seed: int) -> list[Tensor]:
    case = make_case(ranks=ranks, experts=4 * ranks, topk=2, seed=seed, tokens=[5] * ranks)
    return [t[buffer.rank].to(buffer.device) for t in (case.tokens, case.topk_idx, case.topk_weights)]


def expected_of(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return x * (weights * (idx >= 0)).sum(1, keepdim=True)


@pytest.mark.parametrize("capacity", [None, CAPACITY])
def test_counts_are_on_the_host_without_a_capacity_and_on_the_gpu_with_one(capacity: int | None) -> None:
    def work(buffer: Buffer) -> None:
        *_, counts, overflow = round_of(buffer, *inputs_of(buffer, 2, 1), capacity)
        assert counts.device.type == ("cpu" if capacity is None else "cuda")
        assert counts.is_pinned() == (capacity is None)
        assert overflow.device == buffer.device
        assert overflow.tolist() == [0]

    world(work, 2, device="cuda")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_round_can_be_captured_and_replayed(ranks: int) -> None:
    def work(buffer: Buffer) -> None:
        x, idx, weights = inputs_of(buffer, ranks, 1)
        with torch.no_grad():
            # Load kernels and allocate scratch memory before the capture.
            round_of(buffer, x, idx, weights)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                outputs = round_of(buffer, x, idx, weights)
            for seed in (2, 3, 1):
                new = inputs_of(buffer, ranks, seed)
                for old, tensor in zip((x, idx, weights), new, strict=True):
                    old.copy_(tensor)
                graph.replay()
                replayed = [output.clone() for output in outputs]
                # Calls between replays do not get the memory that replays write to.
                kept = buffer.dispatch_with_permute(*new, pad_multiple=4, capacity=CAPACITY)
                before = kept.tokens.clone()
                graph.replay()
                assert torch.equal(kept.tokens, before)
                for got, want in zip(replayed, round_of(buffer, *new), strict=True):
                    assert torch.equal(got, want)
                torch.testing.assert_close(replayed[0], expected_of(*new[::2], new[1]))

    world(work, ranks, device="cuda", experts=4 * ranks)


@pytest.mark.skipif(_ASYNC, reason="an error that ends a capture ends the process inside PyTorch with this allocator")
def test_a_capture_without_a_capacity_is_refused() -> None:
    def work(buffer: Buffer) -> None:
        inputs = inputs_of(buffer, 1, 1)
        round_of(buffer, *inputs)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CallerError, match="capacity"), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            buffer.dispatch_with_permute(*inputs)

    world(work, 1, device="cuda", experts=4)


def _captured(here: Rank, seed: int) -> tuple[Buffer, torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
    """Returns a buffer, a graph of a round, and the round's inputs and outputs. The handle and delivered rows of the
    round are dropped; only the graph keeps them."""
    buffer = Buffer(here.group, num_experts=4 * here.size, device=here.device, timeout=20)
    inputs = inputs_of(buffer, here.size, seed)
    with torch.no_grad():
        round_of(buffer, *inputs)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            outputs = round_of(buffer, *inputs)
        # With PyTorch's allocator `cudaMallocAsync`, a graph's memory exists only after its first replay.
        graph.replay()
        torch.cuda.current_stream().synchronize()
    return buffer, graph, inputs, outputs


def _outlived(here: Rank, replays: int, close: str, stream: str) -> None:
    """Queues replays, then drops the buffer; if `close` leaves the graph, replays again."""
    with torch.cuda.stream(torch.cuda.Stream(here.device)):
        buffer, graph, (x, idx, weights), outputs = _captured(here, 1)
        expected = expected_of(x, weights, idx)
        replayed_in = torch.cuda.Stream(here.device) if stream == "another" else torch.cuda.current_stream()
        torch.cuda.current_stream().synchronize()
        outputs[0].zero_()
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(replayed_in):
            # A delay before the replays, so that all are pending when the buffer is dropped.
            torch.cuda._sleep(200_000_000)
            for _ in range(replays):
                graph.replay()
            if close == "close":
                buffer.close()
            del buffer
            if close == "graph too":
                del graph
            gc.collect()
            replayed_in.synchronize()
            torch.testing.assert_close(outputs[0], expected)
            if close == "graph too":
                return
            # Shows that the replay writes the output again.
            outputs[0].zero_()
            graph.replay()
            replayed_in.synchronize()
            torch.testing.assert_close(outputs[0], expected)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stream", ["another", "the same"])
@pytest.mark.parametrize("close", ["close", "drop", "graph too"])
def test_replays_outlive_the_buffer(ranks: int, close: str, stream: str) -> None:
    world_of_processes(ranks, "cuda").run(_outlived, 100, close, stream)


def _freed(here: Rank) -> None:
    torch.zeros(1, device=here.device)
    with torch.cuda.stream(torch.cuda.Stream(here.device)):
        kept = [_captured(here, seed)[1:] for seed in range(2)]
        used = torch.cuda.mem_get_info(here.device)[0]
        kept.clear()
        gc.collect()
        deadline = time.monotonic() + 30
        # Each graph, with its buffer, frees at least 32 MiB.
        while torch.cuda.mem_get_info(here.device)[0] < used + (64 << 20):
            assert time.monotonic() < deadline, "memory of graphs and buffers that are gone is not freed"
            time.sleep(0.01)


def test_memory_is_freed_with_the_last_graph() -> None:
    world_of_processes(1, "cuda").run(_freed)


# Everything lives until the interpreter ends, while replays run.
_LEFT_TO_THE_END = """
import torch
from hybrid_ep import Buffer

buffer = Buffer(num_experts=4)
x = torch.ones(4, 8, device=buffer.device)
idx = torch.arange(4, device=buffer.device)[:, None]
stream = torch.cuda.Stream(buffer.device)

def work():
    got = buffer.dispatch_with_permute(x, idx, capacity=64)
    return buffer.combine_with_unpermute(got.tokens, got.handle).tokens

with torch.no_grad(), torch.cuda.stream(stream):
    work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = work()
    torch.cuda._sleep(200_000_000)
    for _ in range(100):
        graph.replay()
    done = stream.record_event()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_interpreter_ends_while_replays_are_queued(ranks: int) -> None:
    port = str(free_port())
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _LEFT_TO_THE_END],
            env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in started:
        said, _ = process.communicate(timeout=240)
        ignored = _ASYNC_WARNING if _ASYNC else ()
        lines = [line for line in said.splitlines() if not any(part in line for part in ignored)]
        assert (process.returncode, lines) == (0, [])


def test_delivered_tensors_outlive_the_buffer_while_kernels_use_them() -> None:
    (buffer,) = Buffer.threads(1, num_experts=1, device="cuda")
    x = torch.randn(512, 1024, device=buffer.device)
    got = buffer.dispatch(x, torch.zeros(512, 1, dtype=torch.int64, device=buffer.device)).tokens
    buffer.close()
    del buffer
    assert torch.equal(got, x)
    stream = torch.cuda.Stream(got.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        doubled = 2 * got
    del got
    gc.collect()
    stream.synchronize()
    assert torch.equal(doubled, 2 * x)


def test_tensors_and_handles_of_another_buffer() -> None:
    """Handles are refused; delivered tensors are ordinary GPU memory, which any buffer can read."""
    one, other = (Buffer.threads(1, num_experts=4, device="cuda")[0] for _ in range(2))
    idx = torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    x = torch.randn(3, 8, device="cuda")
    got = one.dispatch(x, idx)
    with pytest.raises(CallerError, match="made by another buffer"):
        other.combine(got.tokens, got.handle)
    with pytest.raises(CallerError, match="made by another buffer"):
        torch.ops.hybrid_ep.combine(got.tokens, None, got.handle.tensor, other._number, 3, False, None)
    again = other.dispatch(got.tokens, idx)
    assert torch.equal(other.combine(again.tokens, again.handle).tokens, x)


def test_operators_follow_the_current_stream() -> None:
    def work(buffer: Buffer) -> None:
        x, idx, weights = inputs_of(buffer, 2, 1)
        want = expected_of(x, weights, idx)
        ready = torch.cuda.current_stream().record_event()
        for _ in range(20):
            streams = [torch.cuda.Stream(), torch.cuda.Stream()]
            with torch.cuda.stream(streams[0]):
                ready.wait()
                got = buffer.dispatch_with_permute(x, idx, weights)
                assert got.probs is not None
                rows = got.tokens * got.probs[:, None]
            with torch.cuda.stream(streams[1]):
                # The buffer orders its own operators; the caller must wait for the product in between.
                streams[0].record_event().wait()
                tokens = buffer.combine_with_unpermute(rows, got.handle).tokens
            streams[1].synchronize()
            torch.testing.assert_close(tokens, want)

    world(work, 2, device="cuda")


def test_the_host_does_not_wait_with_a_capacity() -> None:
    """As far as PyTorch's sync debug mode detects it."""

    def work(buffer: Buffer) -> None:
        x, idx, weights = inputs_of(buffer, 1, 1)
        x.requires_grad_()
        weights.requires_grad_()
        round_of(buffer, x, idx, weights)[0].sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            round_of(buffer, x, idx, weights)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    world(work, 1, device="cuda", experts=4)


@pytest.mark.parametrize("capacity", [None, CAPACITY])
def test_a_bad_routing_is_found_on_the_gpu(capacity: int | None) -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device="cuda", timeout=5)
    idx = torch.tensor([[0], [7]], device=buffer.device)
    with pytest.raises(CallerError, match=r"row 1: expert index 7 is out of range"):
        buffer.preprocess(idx, pad_multiple=1, capacity=capacity)
        buffer.synchronize()


@pytest.mark.parametrize("format", ["f32", "ue8m0", "mxfp8"])
def test_quantization_rounds_as_on_the_cpu_for_every_largest_value(format: str) -> None:
    """One block for each finite bf16 number of at least 0, which is the block's largest value."""
    largest = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    below = torch.rand(largest.numel(), 128, generator=torch.Generator().manual_seed(1)) * 2 - 1
    values = (largest.float()[:, None] * below).bfloat16()
    values[:, ::32] = largest[:, None]
    x, idx = values.view(255, 128 * 128), torch.zeros(255, 1, dtype=torch.int64)
    found, expected = (
        Buffer.threads(1, num_experts=1, device=device)[0].dispatch(x.to(device), idx.to(device), fp8=format)
        for device in ("cuda", "cpu")
    )
    for one, other in ((found.tokens, expected.tokens), (found.scales, expected.scales)):
        assert one is not None and other is not None
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def test_tensors_of_other_devices_are_refused() -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device="cuda")
    on_gpu, on_cpu = torch.zeros(2, 1, dtype=torch.int64, device="cuda"), torch.zeros(2, 8)
    with pytest.raises(CallerError, match="tokens: expected a tensor on cuda:0"):
        buffer.dispatch(on_cpu, on_gpu)
    with pytest.raises(CallerError, match="topk_idx: expected a tensor on cuda:0"):
        buffer.dispatch(on_cpu.cuda(), on_gpu.cpu())


def _several_domains(device: str, domains: int, monkeypatch: pytest.MonkeyPatch) -> list[Buffer]:
    # Short lanes take less time to pin.
    monkeypatch.setenv("HYBRID_EP_CUDA_LANE_BYTES", str(1 << 20))
    monkeypatch.setenv("HYBRID_EP_CUDA_RAIL_TOKENS", "64")
    return Buffer.threads(4, num_experts=16, domains=domains, device=device, timeout=20)


def _plain_round(buffer: Buffer, x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Runs only operators of the buffer: any other one might wait for the kernel of another rank on the same GPU."""
    got = buffer.dispatch_with_permute(x, idx, weights, pad_multiple=4, capacity=CAPACITY)
    assert got.probs is not None
    back = buffer.combine_with_unpermute(got.tokens, got.handle, probs=got.probs)
    assert back.probs is not None
    return back.tokens, back.probs


@pytest.mark.parametrize("domains", [2, 4])
def test_several_domains_equal_those_of_the_cpu(domains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as threads of one process, which the engine `loopback` connects; also when graphs are replayed."""
    host = _several_domains("cpu", domains, monkeypatch)
    seeds = (1, 2, 3)
    given = [[inputs_of(buffer, 4, seed) for buffer in host] for seed in seeds]

    def on_cpu(buffer: Buffer) -> list[tuple[Tensor, ...]]:
        return [_plain_round(buffer, *inputs[buffer.rank]) for inputs in given]

    wanted: list[Any] = on_threads(host, on_cpu)

    buffers = _several_domains("cuda", domains, monkeypatch)
    streams = [torch.cuda.Stream(buffer.device) for buffer in buffers]

    def placed(inputs: list[Any]) -> list[list[Tensor]]:
        return [[tensor.to(buffer.device) for tensor in inputs[buffer.rank]] for buffer in buffers]

    fixed = placed(given[0])
    replacements = [placed(inputs) for inputs in given]
    meeting = threading.Barrier(4)
    turn = threading.Lock()

    def on_gpu(buffer: Buffer) -> list[tuple[Tensor, ...]]:
        inputs = fixed[buffer.rank]
        found = []
        with torch.no_grad(), torch.cuda.stream(streams[buffer.rank]):
            _plain_round(buffer, *inputs)
            buffer.synchronize()
            meeting.wait(60)
            with turn:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=streams[buffer.rank], capture_error_mode="thread_local"):
                    outputs = _plain_round(buffer, *inputs)
            for replacement in replacements:
                meeting.wait(60)
                for old, new in zip(inputs, replacement[buffer.rank], strict=True):
                    old.copy_(new)
                graph.replay()
                buffer.synchronize()
                streams[buffer.rank].synchronize()
                meeting.wait(60)
                found.append(tuple(output.cpu() for output in outputs))
        return found

    for buffer in buffers:
        torch.cuda.synchronize(buffer.device)
    for rank, found in enumerate(on_threads(buffers, on_gpu)):
        assert not isinstance(found, BaseException)
        for got, want in zip(found, wanted[rank], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), rank


def test_ranks_that_are_threads_cannot_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = _several_domains("cuda", 2, monkeypatch)
    with pytest.raises(CallerError, match=r"max_tokens and max_hidden when the buffers are made"):
        buffers[0].reserve(max_tokens=65)
    (alone,) = Buffer.threads(1, num_experts=4, device="cuda")
    alone.reserve(max_tokens=1 << 30)


def test_processes_need_an_engine_for_several_domains() -> None:
    def work(buffer: Buffer) -> None:
        raise AssertionError("there must be no buffer")

    # The error of the process that raised the CallerError, as text.
    with pytest.raises(AssertionError, match=r"CallerError: HYBRID_EP_TRANSPORT = loopback.*choose `shm` or `tcp`"):
        world(work, 2, device="cuda", domains=2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_need_not_be_the_buffers() -> None:
    buffers = Buffer.threads(2, num_experts=4, device="cuda")
    assert [buffer.device.index for buffer in buffers] == [0, 1]
    one = Buffer(num_experts=4, device="cuda:1")
    with torch.cuda.device(0):
        x = torch.randn(3, 8, device="cuda:1")
        got = one.dispatch(x, torch.zeros(3, 1, dtype=torch.int64, device="cuda:1"))
        assert got.tokens.device == got.overflow.device == one.device == torch.device("cuda", 1)
        assert torch.equal(got.tokens, x)


def test_threads_share_the_gpus() -> None:
    """Ranks as threads; in the other tests each rank is a process."""
    buffers = Buffer.threads(2, num_experts=8, device="cuda", timeout=20)
    inputs = [inputs_of(buffer, 2, 1) for buffer in buffers]
    streams = [torch.cuda.Stream(buffer.device) for buffer in buffers]

    def work(buffer: Buffer) -> Tensor:
        with torch.cuda.stream(streams[buffer.rank]):
            x, idx, _ = inputs[buffer.rank]
            got = buffer.dispatch(x, idx, capacity=CAPACITY)
            y = buffer.combine(got.tokens, got.handle).tokens
            buffer.synchronize()
            return y

    torch.cuda.synchronize()
    for y, (x, idx, _) in zip(on_threads(buffers, work), inputs, strict=True):
        ranks_chosen = torch.stack([((idx // 4 == rank) & (idx >= 0)).any(1) for rank in range(2)]).sum(0)
        assert isinstance(y, Tensor)
        torch.testing.assert_close(y, x * ranks_chosen[:, None])


def _rank_of_a_job(rank: int, ranks: int, store: str) -> None:
    torch.cuda.set_device(rank)
    meet(rank, ranks, store)
    buffer = Buffer(num_experts=4 * ranks)
    assert buffer.device == torch.device("cuda", rank)
    for seed in range(3):
        x, idx, weights = inputs_of(buffer, ranks, seed)
        x.requires_grad_()
        weights.requires_grad_()
        tokens: Any = round_of(buffer, x, idx, weights, None if seed == 0 else CAPACITY)[0]
        torch.testing.assert_close(tokens, expected_of(x, weights, idx))
        tokens.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, expected_of(torch.ones_like(x), weights, idx))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_with_a_gpu_each(tmp_path: Path) -> None:
    no_errors(processes(torch.cuda.device_count(), _rank_of_a_job, f"file://{tmp_path}/store"))


def test_memory_is_not_reused_before_a_stream_that_the_next_operator_waits_for() -> None:
    """The rule of `Buffer` for tensors that other streams use; `record_stream` is ignored."""

    def work(buffer: Buffer) -> None:
        x, idx, weights = inputs_of(buffer, 1, 1)
        side = torch.cuda.Stream(buffer.device)
        with torch.no_grad():
            expected = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY).tokens.clone()
            rows = buffer.dispatch_with_permute(x, idx, weights, capacity=CAPACITY).tokens
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000_000)
                read = rows.clone()
            if not _ASYNC:  # which raises an internal error for memory that it has not allocated
                rows.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            del rows
            for _ in range(8):
                buffer.dispatch_with_permute(torch.zeros_like(x), idx, weights, capacity=CAPACITY)
            torch.cuda.synchronize()
        counted = int((idx >= 0).sum())
        assert torch.equal(read[:counted], expected[:counted])

    world(work, 1, device="cuda", experts=4)
