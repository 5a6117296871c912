"""Worlds of processes. The processes serve several tests: they wait for functions to run."""

from __future__ import annotations

import ctypes.util
import dataclasses
import functools
import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclasses.dataclass(frozen=True)
class Rank:
    """The rank that runs a test's function."""

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device


class World:
    """Processes that wait for functions; all run the same one. After a failure the next run starts new processes.

    On GPUs, rank r uses GPU r modulo the number of GPUs.
    """

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self.device = device
        self._ranks: list[tuple[Any, Any]] = []

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 240) -> list[Any]:
        """Returns what `function(rank, *arguments)` returned on each rank; raises with the traceback of each failure.

        The function may be local to its test. Its changes to global state stay in the process of the rank.
        """
        if not self._ranks:
            self._start()
        work = _packed((function, arguments))
        for _, pipe in self._ranks:
            pipe.send_bytes(work)
        results, failures = [], []
        deadline = time.monotonic() + seconds
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                failure, result = (
                    _unpacked(pipe.recv_bytes())
                    if pipe.poll(max(0.0, deadline - time.monotonic()))
                    else (f"no answer in {seconds} s\n", None)
                )
            except EOFError:
                failure, result = "died\n", None
            results.append(result)
            if failure:
                failures.append(f"rank {rank}: {failure}")
        if failures:
            self.stop()
            raise AssertionError("\n" + "\n".join(failures))
        return results

    def stop(self) -> None:
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []

    def _start(self) -> None:
        context = new_processes()
        with tempfile.NamedTemporaryFile(prefix="hybrid-ep-test-", delete=False) as file:
            meeting = file.name
        os.unlink(meeting)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self.device, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def new_processes() -> Any:
    """Returns the context of `multiprocessing` that makes the processes of tests.

    The processes are new, and have the environment variables of the first call. A server imports once for all of them,
    since an import of PyTorch takes seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["process_worlds", "hybrid_ep.migration", "hybrid_ep.moe"])
    return context


@functools.cache
def world_of_processes(size: int, device: str) -> World:
    """Returns the world of this size. Its processes end with the test process."""
    return World(size, device)


def has_libfabric() -> bool:
    """Whether the engine between machines can run."""
    # Does not load the library, which may then handle signals of this process.
    if ctypes.util.find_library("fabric") is not None:
        return True
    assert os.environ.get("HYBRID_EP_REQUIRE_LIBFABRIC") != "1", "libfabric.so.1 is not installed"
    return False


def skip_where_gpus_are_shared(device: str, ranks: int) -> None:
    """Skips a test that gathers `DTensor`s of ranks that share a GPU."""
    if device == "cuda" and ranks > torch.cuda.device_count():
        # Seen with PyTorch 2.11: `DTensor.full_tensor` in `wait_tensor`.
        pytest.skip("NCCL refuses ranks that share a GPU, and PyTorch crashes when it gathers DTensors over gloo")


def _packed(thing: Any) -> bytes:
    file = io.BytesIO()
    # cloudpickle alone cannot pickle tensors of every type; torch.save alone cannot pickle local functions.
    torch.save(thing, file, pickle_module=cloudpickle)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _serve(rank: int, size: int, device: str, meeting: str, pipe: Any) -> None:
    os.environ.setdefault("HYBRID_EP_TIMEOUT_MS", "60000")
    torch.set_num_threads(1)
    where, backend = torch.device(device), "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        where = torch.device(device, rank % gpus)
        torch.cuda.set_device(where)
        # NCCL refuses ranks that share a GPU.
        backend = "nccl" if size <= gpus else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    here = Rank(rank, size, dist.group.WORLD, where)
    while True:
        try:
            function, arguments = _unpacked(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = _packed((None, function(here, *arguments)))
        except BaseException:
            answer = _packed((traceback.format_exc(), None))
        pipe.send_bytes(answer)
    dist.destroy_process_group()
