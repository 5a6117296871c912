"""Which objects own delivered memory, and when the buffer reuses it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, CallerError
from worlds import make_case, world

MIB = 1 << 20


def single(device: str) -> tuple[Buffer, Tensor, Tensor]:
    (buffer,) = Buffer.threads(1, num_experts=2, device=device, workers=1)
    x = torch.arange(64.0, device=device).repeat(256, 64)
    return buffer, x, torch.arange(256, device=device)[:, None] % 2


@pytest.mark.parametrize("permuted", [False, True])
def test_registered_memory_does_not_grow(device: str, permuted: bool) -> None:
    """Runs rounds with gradients; a leak of a single round would show."""
    case = make_case(ranks=2, experts=4, hidden=2048, tokens=[300, 500])

    def work(buffer: Buffer) -> None:
        rank, to = buffer.rank, buffer.device
        x, weights = (t[rank].to(to).requires_grad_() for t in (case.tokens, case.topk_weights))
        idx = case.topk_idx[rank].to(to)
        after_the_first = 0
        for turn in range(100):
            if permuted:
                got = buffer.dispatch_with_permute(x, idx, weights, pad_multiple=16)
                y = buffer.combine_with_unpermute(got.tokens * 2, got.handle, probs=got.probs)
            else:
                got = buffer.dispatch(x, idx, weights)
                y = buffer.combine(got.tokens * 2, got.handle, probs=got.probs)
            assert y.probs is not None
            (y.tokens.sum() + y.probs.sum()).backward()
            if turn == 1:
                after_the_first = buffer.registered_bytes
        assert buffer.registered_bytes == after_the_first

    world(work, 2, device=device, experts=4)


def test_tensors_outlive_their_buffer(device: str) -> None:
    buffer, x, idx = single(device)
    got, own = buffer.dispatch(x, idx), buffer.empty(4, 4, dtype=torch.float32)
    own.fill_(3)
    buffer.close()
    handle_tensor, rows = got.handle.tensor, got.tokens
    del buffer, got
    gc.collect()
    assert torch.equal(rows, x) and own.sum() == 48
    rows.add_(1)
    del rows, own, handle_tensor
    gc.collect()


def test_a_view_keeps_its_memory(device: str) -> None:
    buffer, x, idx = single(device)
    view = buffer.dispatch(x, idx).tokens[3:, 5:9]
    kept = view.clone()
    for turn in range(4):
        buffer.dispatch(torch.full_like(x, float(turn)), idx)
    assert torch.equal(view, kept)


def test_rows_that_autograd_saved_are_not_reused(device: str) -> None:
    """`record_stream` does not protect delivered tensors, so a reference must."""
    buffer, x, idx = single(device)
    x.requires_grad_()
    loss = buffer.dispatch(x, idx).tokens.square().sum()
    for turn in range(4):
        buffer.dispatch(torch.full_like(x, float(turn)), idx)
    loss.backward()
    assert torch.equal(x.grad, 2 * x)  # type: ignore[arg-type]


def test_another_thread_may_use_delivered_rows(device: str) -> None:
    buffer, x, idx = single(device)
    got = buffer.dispatch(x, idx).tokens
    sums: list[Tensor] = []
    # The thread holds the only reference while the buffer works on.
    started = threading.Event()

    def read(rows: list[Tensor]) -> None:
        started.wait()
        sums.append(rows.pop().clone())

    thread = threading.Thread(target=read, args=([got],))
    thread.start()
    del got
    for turn in range(4):
        buffer.dispatch(torch.full_like(x, float(turn)), idx)
    started.set()
    thread.join()
    assert torch.equal(sums[0], x)


def test_freed_memory_is_reused(device: str) -> None:
    buffer, x, idx = single(device)
    places = set()
    for _ in range(8):
        got = buffer.dispatch(x, idx)
        places.add(got.tokens.data_ptr())
        # Freed on another thread, as autograd does.
        thread = threading.Thread(target=lambda tensors: tensors.clear(), args=([got.tokens, got],))
        del got
        thread.start()
        thread.join()
    # On a GPU peers may read handles a little longer, which shifts the places.
    assert len(places) <= (1 if device == "cpu" else 4)


def test_a_capsule_that_becomes_no_tensor_is_freed() -> None:
    buffer, _, _ = single("cpu")
    place = buffer.empty(64, dtype=torch.uint8).data_ptr()
    for _ in range(3):
        capsule = buffer._end.native.empty(0, 64 * MIB)
        del capsule
    assert buffer.registered_bytes == 32 * MIB + 64 * MIB
    assert buffer.empty(64, dtype=torch.uint8).data_ptr() == place


def test_the_storage_of_its_tensor_owns_a_handle(device: str) -> None:
    buffer, x, idx = single(device)
    handle = buffer.preprocess(idx)
    copy = handle._replace(tensor=handle.tensor.clone())
    view = handle.tensor.view(1, 1)[0]
    del handle
    gc.collect()
    assert buffer.dispatch(x, handle=copy).tokens.shape == x.shape
    # Overwriting the number does not free another handle.
    view.fill_(-1)
    del view
    with pytest.raises(CallerError, match="names no live"):
        buffer.dispatch(x, handle=copy)


def test_registered_rows_are_combined_in_place() -> None:
    """A staging copy would take more registered memory than the output."""
    (buffer,) = Buffer.threads(1, num_experts=1, device="cpu", workers=1)
    x = torch.ones(1024, 16 * 1024)
    got = buffer.dispatch(x, torch.zeros(1024, 1, dtype=torch.int64))
    outputs = []

    def grown(rows: Tensor) -> int:
        before = buffer.registered_bytes
        outputs.append(buffer.combine(rows, got.handle).tokens)
        return buffer.registered_bytes - before

    assert grown(got.tokens) == 64 * MIB
    own = buffer.empty(1024, 16 * 1024, dtype=torch.float32)
    assert grown(own) == 64 * MIB
    assert grown(torch.ones_like(x)) == 128 * MIB
    del outputs[:]
    assert grown(own) == 0


def test_empty_has_any_shape_and_type(device: str) -> None:
    buffer, _, _ = single(device)
    for shape, dtype in [((3, 5), torch.bfloat16), ((), torch.float32), ((0, 8), torch.float32), ((7,), torch.bool)]:
        tensor = buffer.empty(*shape, dtype=dtype)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.device.type == device
        assert tensor.data_ptr() % 64 == 0
    with pytest.raises(CallerError, match="shape: expected integers"):
        buffer.empty(-1, 2, dtype=torch.float32)
