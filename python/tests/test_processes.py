"""Ranks as processes: joining, and errors about ranks that are gone."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, CallerError, PeerError, SetupError
from process_worlds import has_libfabric, new_processes
from worlds import make_case

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks as processes need Linux")

# Seconds after which a test counts as hanging. No test takes this long.
PATIENCE = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(work: Callable[..., Any], rank: int, ranks: int, arguments: tuple[Any, ...], answer: Any) -> None:
    torch.set_num_threads(1)
    try:
        result = work(rank, ranks, *arguments)
    except BaseException as error:
        answer.send((False, error))
        # Ends with an exception, like a program that is not a test.
        raise
    answer.send((True, result))


def processes(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs `work(rank, ranks, *arguments)` in each process; returns what it returned or raised.

    The result is "killed by N" if signal N ended the process.
    """
    fresh = new_processes()
    started = []
    for rank in range(ranks):
        receive, send = fresh.Pipe(duplex=False)
        process = fresh.Process(target=_child, args=(work, rank, ranks, arguments, send))
        process.start()
        # Otherwise this process would keep the pipe of a dead child open.
        send.close()
        started.append((process, receive))
    results = []
    deadline = time.monotonic() + PATIENCE
    for process, receive in started:
        answered = receive.poll(max(deadline - time.monotonic(), 0))
        try:
            results.append(receive.recv()[1] if answered else TimeoutError("no answer"))
        except EOFError:
            process.join()
            results.append(f"killed by {-(process.exitcode or 0)}")
    for process, _ in started:
        process.join(5)
        if process.is_alive():
            process.kill()
    return results


def no_errors(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


def meet(rank: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)


def check_round(buffer: Buffer, seed: int) -> None:
    """Checks forward and backward with experts that only scale."""
    case = make_case(ranks=buffer.world_size, experts=buffer.num_experts, topk=2, seed=seed)
    rank, device = buffer.rank, buffer.device
    x, weights = (t[rank].to(device, copy=True).requires_grad_() for t in (case.tokens, case.topk_weights))
    got = buffer.dispatch_with_permute(x, case.topk_idx[rank].to(device), weights, pad_multiple=4)
    assert got.tokens.shape[0] == len(case.rows(rank, 4)) and got.probs is not None
    y = buffer.combine_with_unpermute(got.tokens * got.probs[:, None], got.handle).tokens
    y.sum().backward()
    total = case.probs(rank).sum(1, keepdim=True).to(device)
    torch.testing.assert_close(y.detach(), x.detach() * total)
    torch.testing.assert_close(x.grad, total.expand_as(x))


def _groups(rank: int, ranks: int, store: str) -> None:
    meet(rank, ranks, store)
    first = Buffer(num_experts=6, device="cpu")
    pair = dist.new_group([2, 1])
    second = Buffer(dist.group.WORLD, num_experts=9, device="cpu", domains=3)
    assert (first.rank, first.world_size, second.domains) == (rank, ranks, 3)
    dist.barrier()
    # A later group with the same store must not find these keys.
    store_of_world = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    left = [f"hybrid_ep/0/{made}/{key}" for made in range(2) for key in ("0/0", "1/2", "left")]
    assert not any(store_of_world.check([key]) for key in left)
    check_round(second, 1)
    check_round(first, 2)
    if rank > 0:
        of_pair = Buffer(pair, num_experts=4, device="cpu")
        assert of_pair.rank == dist.get_group_rank(pair, rank) and of_pair.world_size == 2
        check_round(of_pair, 3)
        with Buffer(pair, num_experts=4, device="cpu") as again:
            check_round(again, 4)
    else:
        with pytest.raises(CallerError, match="group: expected a process group that contains this process"):
            Buffer(pair, num_experts=4, device="cpu")
    check_round(first, 5)
    mine = {0: 6, 1: 9, 2: 9}[rank]
    with pytest.raises(CallerError, match="rank 0"):
        Buffer(num_experts=mine, device="cpu")
    dist.barrier()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_groups_and_subgroups(kind: str, tmp_path: Path) -> None:
    store = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/store"
    no_errors(processes(3, _groups, store))


class _Full:
    """A native buffer without room for any call. Delegates everything else to the buffer."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def has_room(self, settings: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


class _Bounded(Buffer):
    """A buffer on the CPU whose calls are bounded like those of GPUs in several domains."""

    _is_bounded = True


def _reserve_on_the_cpu(rank: int, ranks: int, store: str) -> None:
    meet(rank, ranks, store)
    with _Bounded(num_experts=4, device="cpu", domains=2, timeout=20, max_tokens=7) as buffer:
        check_round(buffer, 1)
        first = buffer._end.native
        buffer.reserve(max_tokens=9)
        assert buffer._end.native is first, "there is room"
        if rank == 1:
            buffer._end.native = _Full(first)  # type: ignore[assignment]
        handle = buffer.preprocess(torch.zeros(1, 1, dtype=torch.int64))
        buffer.reserve(max_tokens=8)
        assert buffer._settings is not None and buffer._settings["max_tokens"] == 8
        assert buffer._end.native not in (first, None) and not isinstance(buffer._end.native, _Full)
        with pytest.raises(CallerError, match="handle"):
            buffer.dispatch(torch.zeros(1, 16), handle=handle)
        check_round(buffer, 2)
        # An error of one rank reaches the others at once, and the next call works.
        with pytest.raises(CallerError if rank == 1 else PeerError, match="max_tokens") as refused:
            buffer.reserve(max_tokens=0 if rank == 1 else 9)
        if isinstance(refused.value, PeerError):
            assert (refused.value.peer, refused.value.fault) == (1, "failed")
        check_round(buffer, 3)
        buffer.reserve(max_tokens=8)
        check_round(buffer, 4)


def test_ranks_join_again_if_one_lacks_room() -> None:
    no_errors(processes(2, _reserve_on_the_cpu, f"tcp://127.0.0.1:{free_port()}"))


def _reserve_on_gpus(rank: int, ranks: int, store: str) -> None:
    os.environ.update(HYBRID_EP_TRANSPORT="tcp", HYBRID_EP_CUDA_LANE_BYTES="131072", HYBRID_EP_CUDA_RAIL_TOKENS="64")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    meet(rank, ranks, store)

    def call(buffer: Buffer, tokens: int) -> None:
        x = torch.full((tokens, 512), rank + 1, dtype=torch.bfloat16, device=buffer.device)
        topk_idx = (torch.arange(2 * tokens, device=buffer.device) % 4).view(tokens, 2)
        got = buffer.dispatch_with_permute(x, topk_idx, torch.ones(tokens, 2, device=buffer.device))
        assert torch.equal(buffer.combine_with_unpermute(got.tokens, got.handle).tokens, 2 * x)

    with Buffer(num_experts=4, domains=2, timeout=20) as buffer:
        call(buffer, 64)
        native = buffer._end.native
        buffer.reserve(max_tokens=64, max_hidden=256)
        assert buffer._end.native is native, "there is room"
        with pytest.raises(CallerError, match=r"65 tokens.*Buffer\.reserve"):
            call(buffer, 65)
        # The largest number of all ranks applies.
        buffer.reserve(max_tokens=[1000, 65][rank], max_hidden=512)
        call(buffer, [1000, 700][rank])
        with pytest.raises(CallerError, match="1001 tokens"):
            call(buffer, 1001)


@pytest.mark.skipif(not torch.cuda.is_available() or not has_libfabric(), reason="needs a GPU, and libfabric")
def test_reserve_makes_room_between_domains_of_gpus() -> None:
    no_errors(processes(2, _reserve_on_gpus, f"tcp://127.0.0.1:{free_port()}"))


def _machines(rank: int, ranks: int, store: str, device: str) -> Any:
    os.environ.update(HYBRID_EP_MACHINE=f"node-{rank // 2}", HYBRID_EP_TRANSPORT="tcp")
    os.environ.update(HYBRID_EP_CUDA_LANE_BYTES="1048576", HYBRID_EP_CUDA_RAIL_TOKENS="1024")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    meet(rank, ranks, store)
    with Buffer(num_experts=8, device=device, domains=2) as buffer:
        check_round(buffer, 1)
    # As with tensor parallelism inside a machine: the ranks of each group are on both machines.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with Buffer(groups[rank % 2], num_experts=4, device=device, domains=2, timeout=20) as buffer:
        check_round(buffer, 2)
    with pytest.raises(CallerError, match="are in one NVLink domain"):
        Buffer(groups[rank % 2], num_experts=4, device=device, timeout=20)
    dist.barrier()
    buffer = Buffer(num_experts=8, device=device, domains=2, timeout=20, stall_timeout=10)
    check_round(buffer, 3)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as raised:
        check_round(buffer, 4)
    return raised.value


@pytest.mark.skipif(not has_libfabric(), reason="libfabric is not installed")
def test_groups_over_several_machines(device: str) -> None:
    results = processes(4, _machines, f"tcp://127.0.0.1:{free_port()}", device)
    assert results[3] == f"killed by {signal.SIGKILL.value}"
    for error in results[:3]:
        assert isinstance(error, PeerError), error
        assert (error.peer, error.fault, error.machine) == (3, "died", "node-1"), str(error)


def _forked(rank: int, ranks: int, store: str, transport: str) -> None:
    os.environ["HYBRID_EP_TRANSPORT"] = transport
    meet(rank, ranks, store)
    with Buffer(num_experts=4, device="cpu", domains=2, timeout=20) as buffer:
        check_round(buffer, 1)
        received = buffer.dispatch_with_permute(torch.ones(4, 16), torch.arange(4).view(4, 1))
        expected = received.tokens.clone()
        if rank == 0 and (child := os.fork()) == 0:
            # The child shares the memory of the rank, and has none of its threads.
            signal.alarm(20)
            try:
                buffer.dispatch_with_permute(torch.full((4, 16), 5.0), torch.arange(4).view(4, 1))
                os._exit(1)
            except CallerError as error:
                if "forked child" not in str(error):
                    os._exit(2)
            buffer.close()
            os._exit(0)
        if rank == 0:
            assert os.waitpid(child, 0)[1] == 0
        assert received.tokens.equal(expected)
        check_round(buffer, 2)


@pytest.mark.parametrize("transport", ["loopback", "paced:1GB/s,5us"])
def test_a_forked_child_cannot_act_as_its_parent(transport: str) -> None:
    no_errors(processes(2, _forked, f"tcp://127.0.0.1:{free_port()}", transport))


def _without_descriptors(rank: int, ranks: int, store: str) -> Any:
    meet(rank, ranks, store)
    buffer = Buffer(num_experts=4, device="cpu", timeout=20, stall_timeout=10)
    check_round(buffer, 1)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        os.close(held.pop())  # for the segment; none is left to send it
    start = time.monotonic()
    with pytest.raises((SetupError, PeerError)) as raised:
        buffer.dispatch_with_permute(torch.zeros(20_000, 1024), torch.full((20_000, 1), rank), pad_multiple=1)
    took = time.monotonic() - start
    buffer.close()
    return raised.value, took


def test_a_rank_that_cannot_send_a_descriptor_says_so_at_once() -> None:
    (own, took), (told, waited) = processes(2, _without_descriptors, f"tcp://127.0.0.1:{free_port()}")
    assert isinstance(own, SetupError) and "ulimit -n" in str(own), own
    assert isinstance(told, PeerError) and told.peer == 0 and told.fault == "left", told
    assert max(took, waited) < 8, "waited for the stall bound"


def _one_fails_first(rank: int, ranks: int, store: str) -> Any:
    meet(rank, ranks, store)
    for workers in (-1, None):
        try:
            with Buffer(num_experts=4, device="cpu", workers=workers if rank == 1 else None, timeout=60) as buffer:
                check_round(buffer, 1)
            error = None
        except (CallerError, PeerError) as raised:
            error = raised
        if workers == -1:
            first = error
    return first, error


def test_a_rank_whose_arguments_are_wrong_tells_the_others_and_may_try_again() -> None:
    start = time.monotonic()
    (first, again), (wrong, then) = processes(2, _one_fails_first, f"tcp://127.0.0.1:{free_port()}")
    assert time.monotonic() - start < 30, "rank 0 waited for its timeout"
    assert isinstance(wrong, CallerError) and isinstance(first, PeerError), (wrong, first)
    assert (first.peer, first.fault) == (1, "failed") and "workers" in str(first), first
    assert again is None and then is None, (again, then)


def _launched(rank: int, ranks: int, port: int) -> tuple[int, int]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port - 1))
    for seed in range(2):
        with Buffer(num_experts=4, device="cpu", timeout=20) as buffer:
            check_round(buffer, seed)
    return buffer.rank, buffer.world_size


def test_the_environment_of_a_launcher_is_enough_to_join() -> None:
    assert processes(2, _launched, free_port()) == [(0, 2), (1, 2)]


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with Buffer(num_experts=3, device="cpu") as buffer:
        assert (buffer.rank, buffer.world_size, buffer.local_experts) == (0, 1, range(3))
        check_round(buffer, 0)


def _absent(rank: int, ranks: int, store: str) -> Any:
    meet(rank, ranks, store)
    if rank == 1:
        dist.barrier()
        return None
    with pytest.raises(PeerError) as raised:
        Buffer(num_experts=6, device="cpu", timeout=1)
    dist.barrier()
    return raised.value


def test_a_rank_that_never_joins_is_named() -> None:
    place = f"127.0.0.1:{free_port()}"
    results = processes(3, _absent, f"tcp://{place}")
    for rank in (0, 2):
        error = results[rank]
        assert (error.peer, error.rank, error.operator, error.fault, error.step) == (1, rank, "join", "never joined", 0)
        assert str(error).startswith(f"rank 1 never joined (join): rank {rank} waited 1.000 s")
        # The other rank may have reported first.
        assert f"for it in the group's store at {place}; every rank of the group must make the buffer" in str(error)


def _gone(rank: int, ranks: int, store: str, how: str) -> Any:
    meet(rank, ranks, store)
    buffer = Buffer(num_experts=2 * ranks, device="cpu", timeout=60)
    case = make_case(ranks=ranks, experts=2 * ranks, topk=2)
    got = buffer.dispatch(case.tokens[rank], case.topk_idx[rank])
    if rank == 1:
        match how:
            case "raises":
                raise KeyError("what a layer of rank 1 met")
            case "exits":
                sys.exit(0)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
    # Long before the timeout, after which the fault would be "stalled".
    with pytest.raises(PeerError) as raised:
        buffer.combine(got.tokens, got.handle)
    return raised.value


@pytest.mark.parametrize(("how", "fault"), [("raises", "left"), ("exits", "left"), ("is killed", "died")])
def test_an_error_names_a_rank_that_is_gone(how: str, fault: str, tmp_path: Path) -> None:
    results = processes(3, _gone, f"file://{tmp_path}/store", how)
    for rank in (0, 2):
        error = results[rank]
        assert (error.peer, error.rank, error.operator, error.fault) == (1, rank, "combine", fault), str(error)
    assert {"raises": "KeyError", "exits": "SystemExit", "is killed": "str"}[how] == type(results[1]).__name__
    if how == "is killed":
        assert results[1] == f"killed by {signal.SIGKILL.value}"
