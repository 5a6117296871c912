"""Who owns what dispatch delivers, and when it goes back."""

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
def test_memory_comes_back(device: str, permuted: bool) -> None:
    """Rounds with gradients, of which a single one would be seen if it stayed."""
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


def test_freed_memory_is_used_again(device: str) -> None:
    buffer, x, idx = single(device)
    places = set()
    for _ in range(8):
        got = buffer.dispatch(x, idx)
        places.add(got.tokens.data_ptr())
        # From another thread, as autograd does.
        thread = threading.Thread(target=lambda tensors: tensors.clear(), args=([got.tokens, got],))
        del got
        thread.start()
        thread.join()
    # Handles, which peers may read a little longer on a GPU, push them about.
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
    # Whatever is written over its number.
    view.fill_(-1)
    del view
    with pytest.raises(CallerError, match="names none that is alive"):
        buffer.dispatch(x, handle=copy)


def test_registered_rows_are_combined_in_place() -> None:
    """A staging copy would take registered memory of its own, beside what the output takes."""
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
    with pytest.raises(CallerError, match="shape: expected numbers"):
        buffer.empty(-1, 2, dtype=torch.float32)
