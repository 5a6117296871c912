"""Calls whose tensors the native module reads by itself, beside the same calls through checks and copies in Python."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, CallerError, Handle, _native, ops

EXPERTS, TOKENS, HIDDEN = 4, 6, 256
IDX = torch.tensor([[0, 1], [2, -1], [3, 0], [1, 2], [0, 3], [2, 1]])
X = (torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN) % 113 - 50) / 16
WEIGHTS = torch.arange(TOKENS * 2).view(TOKENS, 2) / 16

newer_pytorch = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this PyTorch does not have the C interface of DLPack"
)


class Took:
    """A native buffer that counts the calls whose tensors it took."""

    def __init__(self, native: _native.Buffer) -> None:
        self._native, self.calls = native, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if not name.endswith("_tensors"):
            return found

        def call(*arguments: Any) -> Any:
            result = found(*arguments)
            self.calls += result is not None
            return result

        return call


class OnlyNumbers:
    """A native buffer that takes no tensors, as with a PyTorch that does not have the interface."""

    def __init__(self, native: _native.Buffer) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def dispatch_tensors(self, *_: Any) -> None:
        return None

    combine_tensors = dispatch_tensors


def made(device: str) -> Buffer:
    (buffer,) = Buffer.threads(1, num_experts=EXPERTS, device=device, workers=1)
    return buffer


def only_numbers(buffer: Buffer) -> Buffer:
    buffer._end.native = OnlyNumbers(buffer._end.native)  # type: ignore[assignment]
    return buffer


def flat(results: Any) -> list[Tensor]:
    """The tensors of results, without those of the handle."""
    return [result for result in results if isinstance(result, Tensor)]


def fp8_inputs(device: str, block: int, dtype: torch.dtype) -> dict[str, Tensor]:
    scales = torch.full((TOKENS, HIDDEN // block), 127, dtype=torch.uint8, device=device)
    scales = scales.view(dtype) if dtype != torch.float32 else torch.ones_like(scales, dtype=dtype)
    return {"tokens": X.to(device).to(torch.float8_e4m3fn), "scales": scales}


def all_calls(buffer: Buffer) -> list[list[Tensor]]:
    """The results of calls of every kind."""
    device = str(buffer.device)
    x, idx, weights = X.to(device), IDX.to(device), WEIGHTS.to(device)
    results: list[list[Tensor]] = []
    for permuted in (False, True):
        dispatch = buffer.dispatch_with_permute if permuted else buffer.dispatch
        combine: Callable[..., Any] = buffer.combine_with_unpermute if permuted else buffer.combine
        mode = {"pad_multiple": 4} if permuted else {}
        for tokens in (x, x.bfloat16()):
            got = dispatch(tokens, idx, weights, **mode)
            results.append(flat(got))
            results.append(flat(dispatch(tokens, handle=got.handle)))
            dense = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1)).to(device)
            results.append(flat(dispatch(tokens, handle=got.handle, probs=dense)))
            results.append(flat(combine(got.tokens, got.handle)))
            results.append(flat(combine(got.tokens, got.handle, probs=got.probs, wire=torch.float32)))
            results.append(flat(combine(got.tokens, got.handle, wire=torch.bfloat16)))
            handle = buffer.preprocess(idx, capacity=40, **mode)
            results.append(flat(dispatch(tokens, handle=handle)))
        for fp8 in ops.FP8_FORMATS:
            results.append(flat(dispatch(x.bfloat16(), idx, weights, fp8=fp8, **mode)))
        for block, dtype in ((128, torch.float32), (128, torch.uint8), (32, torch.uint8)):
            results.append(flat(dispatch(topk_idx=idx, **fp8_inputs(device, block, dtype), **mode)))
        if hasattr(torch, "float8_e8m0fnu"):
            results.append(flat(dispatch(topk_idx=idx, **fp8_inputs(device, 32, torch.float8_e8m0fnu), **mode)))
    return results


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape and found.stride() == expected.stride()
    assert found.device == expected.device and found.requires_grad == expected.requires_grad
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_both_ways_give_the_same_results(device: str) -> None:
    found, expected = all_calls(made(device)), all_calls(only_numbers(made(device)))
    assert len(found) == len(expected) >= 40
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)


@newer_pytorch
def test_usual_calls_need_no_check_in_python(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native.adopt_tensors(Tensor)
    buffer = made(device)
    idx = IDX.to(device)
    handles = {pad: buffer.preprocess(idx, WEIGHTS.to(device), pad_multiple=pad) for pad in (None, 4)}

    def refuses(*arguments: Any, **_: Any) -> Tensor:
        raise AssertionError(f"{arguments[1]} is checked in Python")

    monkeypatch.setattr(ops, "_checked", refuses)
    for permuted, handle in ((False, handles[None]), (True, handles[4])):
        dispatch = buffer.dispatch_with_permute if permuted else buffer.dispatch
        combine: Callable[..., Any] = buffer.combine_with_unpermute if permuted else buffer.combine
        for tokens in (X.to(device), X.to(device).bfloat16()):
            got = dispatch(tokens, handle=handle, probs=torch.rand(TOKENS, EXPERTS, device=device))
            combine(got.tokens, handle)
            combine(got.tokens, handle, probs=got.probs, wire=torch.float32)
        dispatch(X.to(device).bfloat16(), handle=handle, fp8="ue8m0")
        dispatch(handle=handle, **fp8_inputs(device, 32, torch.uint8))
    with pytest.raises(AssertionError, match="tokens is checked"):
        buffer.dispatch(X.to(device).t().contiguous().t(), handle=handles[None])


def shifted(x: Tensor) -> Tensor:
    """The same values, one element behind an aligned address."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    memory[1:] = x.reshape(-1)
    return memory[1:].view(x.shape)


def with_gaps(x: Tensor) -> Tensor:
    wide = torch.zeros(x.shape[0], x.shape[1] + 8, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "of the opposite sign": lambda x: torch._neg_view(-x),
    "transposed": lambda x: x.t().contiguous().t(),
    "not aligned": shifted,
    "with gaps between rows": with_gaps,
    "one row for all": lambda x: x[:1].expand(x.shape),
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "that requires a gradient": lambda x: x.clone().requires_grad_(),
    "without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_tensors_that_are_not_what_they_seem(device: str, kind: str, dtype: torch.dtype) -> None:
    buffer = made(device)
    took = buffer._end.native = Took(buffer._end.native)  # type: ignore[assignment]
    idx = IDX.to(device)
    x = UNUSUAL[kind](X.to(device, dtype))
    plain = x.detach().clone(memory_format=torch.contiguous_format)
    handle = buffer.preprocess(idx, pad_multiple=4)
    # The CPU needs 4 bytes of alignment, GPUs 16.
    fits_the_cpu = kind == "not aligned" and device == "cpu" and dtype == torch.float32
    with torch.no_grad():
        got = buffer.dispatch_with_permute(x, handle=handle).tokens
        assert took.calls == (_native.adopt_tensors(Tensor) and (kind == "that requires a gradient" or fits_the_cpu))
        expected = buffer.dispatch_with_permute(plain, handle=handle).tokens
        assert_equal(got, expected)
        rows = UNUSUAL[kind](expected)
        back = buffer.combine_with_unpermute(rows, handle).tokens
        assert_equal(back, buffer.combine_with_unpermute(rows.detach().clone().contiguous(), handle).tokens)
        probs = UNUSUAL[kind](torch.rand(TOKENS, EXPERTS, device=device))
        routed = buffer.dispatch(X.to(device), handle=buffer.preprocess(idx), probs=probs)
        kept = buffer.dispatch(X.to(device), handle=buffer.preprocess(idx), probs=probs.clone().contiguous())
        assert routed.probs is not None and kept.probs is not None
        assert_equal(routed.probs, kept.probs)


@newer_pytorch
@pytest.mark.parametrize("first", [0, 3])
def test_probabilities_in_a_wider_matrix_and_in_every_second_row(device: str, first: int) -> None:
    buffer = made(device)
    got = buffer.dispatch(X.to(device), IDX.to(device))
    wide = torch.rand(2 * got.tokens.shape[0], EXPERTS + 5, device=device)

    def combined(probs: Tensor, first_column: int | None) -> Tensor:
        end, handle = buffer._end, got.handle
        found = ops.combine(end, got.tokens, probs, handle.tensor, handle.tokens, False, None, first_column)[1]
        assert found is not None
        return found

    took = buffer._end.native = Took(buffer._end.native)  # type: ignore[assignment]
    found = [combined(wide[::2], first), combined(wide[::2, first : first + EXPERTS], None)]
    assert took.calls == 2
    only_numbers(buffer)
    for probs in found:
        assert_equal(probs, combined(wide[::2, first : first + EXPERTS].clone(), None))
    with pytest.raises(CallerError, match="probs: expected shape"):
        buffer.combine(got.tokens, got.handle, probs=wide[::2])


def test_types_that_dlpack_does_not_tell_from_bytes_are_refused(device: str) -> None:
    buffer = made(device)
    handle = buffer.preprocess(IDX.to(device))
    tokens, scales = fp8_inputs(device, 128, torch.uint8).values()
    buffer.dispatch(tokens, handle=handle, scales=scales)
    with pytest.raises(CallerError, match=r"scales: expected float32 or uint8.*found uint4"):
        buffer.dispatch(tokens, handle=handle, scales=scales.view(torch.uint4))


def test_a_trace_records_the_operators(device: str) -> None:
    """An operator whose call the tracer does not see would become a constant of the traced function."""
    buffer = made(device)
    idx = IDX.to(device)
    x = X.to(device)
    for permuted in (False, True):
        handle = buffer.preprocess(idx, pad_multiple=4 if permuted else None)

        def layer(x: Tensor, permuted: bool = permuted, handle: Handle = handle) -> Tensor:
            if permuted:
                rows = buffer.dispatch_with_permute(x, handle=handle).tokens
                return buffer.combine_with_unpermute(rows * 2, handle).tokens
            return buffer.combine(buffer.dispatch(x, handle=handle).tokens * 2, handle).tokens

        traced = torch.jit.trace(layer, (x,))
        assert_equal(traced(x + 1), layer(x + 1))


def test_a_number_of_another_type_is_no_handle(device: str) -> None:
    """The tensor of a handle is read without a check in Python, too."""
    buffer = made(device)
    handle = buffer.preprocess(IDX.to(device))

    def call(tensor: Tensor) -> Handle:
        return buffer.dispatch(X.to(device), handle=handle._replace(tensor=tensor)).handle

    for tensor in (handle.tensor.int(), handle.tensor.double(), handle.tensor.view(1, 1), torch.empty(0).long()):
        with pytest.raises(CallerError, match="handle: expected the tensor of a Handle"):
            call(tensor)
    with pytest.raises(CallerError, match="names no live handle"):
        call(torch.tensor([-1]))
    call(handle.tensor)


def test_registered_memory_is_known_by_its_address_until_the_last_view_is_gone(device: str) -> None:
    buffer = made(device)
    native = buffer._end.native
    got = buffer.dispatch(X.to(device), IDX.to(device))
    address, view = got.tokens.untyped_storage().data_ptr(), got.tokens[2:]
    assert _native.is_registered(address) and not _native.is_registered(X.untyped_storage().data_ptr())
    native.forget_freed()
    del got
    gc.collect()
    # The map of the local experts is gone.
    assert native.has_freed()
    native.forget_freed()
    assert _native.is_registered(view.untyped_storage().data_ptr()) and not native.has_freed()
    del view
    assert native.has_freed() and not _native.is_registered(address)
