"""Ctrl-C while a rank waits for another one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from process_worlds import has_libfabric

PROGRAM = """
import signal, sys, time
import torch
import torch.distributed as dist
from hybrid_ep import Buffer, HybridEPError

# A shell starts programs in the background with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
rank, store, device, call, domains = int(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if device == "cuda":
    device = f"cuda:{rank % torch.cuda.device_count()}"
buffer = None

def join():
    global buffer
    buffer = Buffer(dist.group.WORLD, num_experts=4, device=device, domains=domains, timeout=100)

if call != "join":
    join()
x = torch.ones(6, 64, device=device, dtype=torch.bfloat16)
idx = torch.arange(12, device=device).view(6, 2) % 4
if call not in ("join", "preprocess"):
    got = buffer.dispatch_with_permute(x, idx)
    buffer.synchronize()

def finish(what):
    # On a GPU an operator returns at once, so synchronize waits.
    buffer.synchronize()

calls = {
    "join": join,
    "preprocess": lambda: buffer.preprocess(idx, pad_multiple=1),
    "dispatch": lambda: finish(buffer.dispatch_with_permute(x, handle=got.handle)),
    "combine": lambda: finish(buffer.combine_with_unpermute(got.tokens, got.handle)),
}
print("ready", flush=True)
if rank == 1:
    sys.stdin.readline()  # stays until the test is over
    sys.exit()
try:
    calls[call]()
    print("finished")
except KeyboardInterrupt:
    print("interrupted", flush=True)
    if buffer is not None:
        try:
            calls[call]()
            print("finished")
        except HybridEPError:
            print("unusable")
"""


@pytest.mark.parametrize("call", ["join", "preprocess", "dispatch", "combine"])
def test_ctrl_c_ends_a_wait(device: str, call: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("ranks that share a GPU")
    _interrupt(device, call, tmp_path, domains=1)


CALLED_BY_A_HANDLER = """
import signal, sys
import torch
import torch.distributed as dist
from hybrid_ep import Buffer, CallerError

rank, store, call = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
buffer = Buffer(dist.group.WORLD, num_experts=4, device="cpu", timeout=100)
calls = {"close": buffer.close, "traffic": buffer.traffic, "synchronize": buffer.synchronize}
signal.signal(signal.SIGTERM, lambda *_: calls[call]())
print("ready", flush=True)
if rank == 1:
    sys.stdin.readline()  # stays until the test is over
    sys.exit()
try:
    buffer.preprocess(torch.zeros(2, 1, dtype=torch.long), pad_multiple=1)
except CallerError as error:
    print(error, flush=True)
buffer.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("call", ["close", "traffic", "synchronize"])
def test_a_handler_that_calls_the_buffer_ends_the_operator(call: str, tmp_path: Path) -> None:
    out, err = _interrupted(CALLED_BY_A_HANDLER, tmp_path, call, sends=signal.SIGTERM)
    assert out.startswith("a signal handler called this buffer while an operator of the buffer waits"), out + err
    assert out.endswith("closed\n"), out + err


@pytest.mark.skipif(not has_libfabric(), reason="libfabric is not installed")
def test_ctrl_c_ends_a_wait_for_another_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Libraries that libfabric loads may handle signals themselves.
    monkeypatch.setenv("HYBRID_EP_TRANSPORT", "tcp")
    _interrupt("cpu", "dispatch", tmp_path, domains=2)


def _interrupt(device: str, call: str, folder: Path, *, domains: int) -> None:
    out, err = _interrupted(PROGRAM, folder, device, call, str(domains), sends=signal.SIGINT)
    assert out == ("interrupted\n" if call == "join" else "interrupted\nunusable\n"), out + err


def _interrupted(program: str, folder: Path, *arguments: str, sends: signal.Signals) -> tuple[str, str]:
    """Starts two ranks, of which the second does not enter the operator, and sends the first a signal. Returns what the
    first wrote."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(folder / "store"), *arguments],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", rank.communicate()
        time.sleep(1)  # by then the operator waits
        ranks[0].send_signal(sends)
        # Far less than the timeout. On a GPU the process does not wait for the kernel to end, either.
        return ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


CLOSE = """
import signal, threading, time
import torch
from hybrid_ep import Buffer

signal.signal(signal.SIGINT, signal.default_int_handler)
one, _other = Buffer.threads(2, num_experts=2, device="cpu", timeout=600)
idx = torch.zeros(3, 1, dtype=torch.int64)
threading.Thread(target=one.preprocess, args=(idx,), daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
try:
    one.close()
    print("closed", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
import os
os._exit(0)
"""


def test_close_can_be_interrupted_while_another_thread_waits_in_an_operator() -> None:
    with subprocess.Popen([sys.executable, "-c", CLOSE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        try:
            assert process.communicate(timeout=60)[0] == "interrupted\n"
        finally:
            process.kill()
