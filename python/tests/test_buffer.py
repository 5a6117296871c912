"""Dispatch and combine, compared with their definition; ranks are threads on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, CallerError, Combined, Dispatched, Handle, Traffic
from hybrid_ep._settings import settings_of
from hybrid_ep._weight_rows import weight_rows
from worlds import Case, make_case, world

PADS = [None, 1, 4]


def dispatch(buffer: Buffer, pad: int | None, *args: Any, **named: Any) -> Dispatched:
    if pad is None:
        return buffer.dispatch(*args, **named)
    if named.get("handle") is None:
        named["pad_multiple"] = pad
    return buffer.dispatch_with_permute(*args, **named)


def combine(buffer: Buffer, pad: int | None, *args: Any, **named: Any) -> Combined:
    return (buffer.combine if pad is None else buffer.combine_with_unpermute)(*args, **named)


def inputs(case: Case, buffer: Buffer) -> tuple[Tensor, Tensor, Tensor]:
    all_of = (case.tokens, case.topk_idx, case.topk_weights)
    return tuple(tensors[buffer.rank].to(buffer.device) for tensors in all_of)  # type: ignore[return-value]


def expert_outputs(rows: Tensor, rank: int) -> Tensor:
    """Outputs that differ from the input and between ranks, and that bf16 must round."""
    return (rows.float() * 1.37 + 0.1 * (rank + 1)).to(rows.dtype)


def check_dispatched(case: Case, rank: int, pad: int | None, got: Dispatched, capacity: int | None = None) -> None:
    rows = case.rows(rank, pad, capacity)
    assert got.tokens.shape[0] == (len(rows) if capacity is None else capacity)
    tokens, probs = got.tokens.cpu(), None if got.probs is None else got.probs.cpu()
    for at, row in enumerate(rows):
        expected = torch.zeros(tokens.shape[1], dtype=tokens.dtype)
        if row is not None:
            expected = case.tokens[row.source][row.token]
        assert torch.equal(tokens[at], expected), (rank, at)
        if probs is None:
            continue
        if pad is None:
            assert row is not None
            weights = torch.zeros(case.local)
            for expert in row.experts:
                weights[expert - rank * case.local] = case.weight(row.source, row.token, expert)
            assert torch.equal(probs[at], weights)
        else:
            assert probs[at] == (0 if row is None else case.weight(row.source, row.token, row.experts[0]))
    rest = slice(len(rows), None)
    assert not tokens[rest].any() and (probs is None or not probs[rest].any())
    if pad is None:
        assert got.local_experts is not None and got.tokens_per_expert is None
        chosen = [[e in row.experts for e in case.local_experts(rank)] for row in rows if row is not None]
        assert got.local_experts.cpu()[: len(rows)].tolist() == chosen
        assert not got.local_experts[rest].any()
    else:
        assert got.local_experts is None and got.tokens_per_expert is not None
        padded, kept = case.counts(rank, pad, capacity)
        assert got.tokens_per_expert.tolist() == padded
        assert got.handle.kept_per_expert.tolist() == kept
    wanted = len(case.rows(rank, pad))
    assert got.overflow.tolist() == [int(capacity is not None and wanted > capacity)]


def check_round(case: Case, device: str, pad: int | None, capacities: list[int | None] | None = None) -> None:
    """Checks dispatch, experts, and combine with probabilities against the definition."""
    capacities = capacities or [None] * case.ranks

    def work(buffer: Buffer) -> tuple[Tensor, Tensor, Tensor | None]:
        capacity = capacities[buffer.rank]
        got = dispatch(buffer, pad, *inputs(case, buffer), capacity=capacity)
        check_dispatched(case, buffer.rank, pad, got, capacity)
        outputs = expert_outputs(got.tokens, buffer.rank)
        combined = combine(buffer, pad, outputs, got.handle, probs=got.probs)
        return outputs.cpu(), combined.tokens.cpu(), None if combined.probs is None else combined.probs.cpu()

    results = world(work, case.ranks, device=device, experts=case.experts, domains=case.domains)
    expected = case.combined([outputs for outputs, _, _ in results], pad, capacities)
    for rank, (_, tokens, probs) in enumerate(results):
        assert torch.equal(tokens, expected[rank])
        kept = torch.zeros_like(probs)
        for owner in range(case.ranks):
            for row in case.rows(owner, pad, capacities[owner]):
                if row is not None and row.source == rank:
                    kept[row.token, row.experts] = case.probs(rank)[row.token, row.experts]
        assert torch.equal(probs, kept)


def test_combine_takes_probs_that_are_columns_of_a_wider_matrix(device: str) -> None:
    case = make_case(3, 6)

    def work(buffer: Buffer) -> None:
        got = buffer.dispatch(*inputs(case, buffer))
        assert got.probs is not None
        gap = 1 + buffer.rank
        wide = torch.full((len(got.probs), got.probs.shape[1] + gap), torch.nan, device=buffer.device)
        wide[:, gap:] = got.probs
        gathered = [buffer.combine(got.tokens, got.handle, probs=probs).probs for probs in (got.probs, wide[:, gap:])]
        assert gathered[0] is not None and gathered[1] is not None
        assert gathered[0].any() and torch.equal(*gathered)

    world(work, case.ranks, device=device, experts=case.experts)


def test_the_stride_of_a_single_row_has_no_meaning(device: str) -> None:
    def work(buffer: Buffer) -> None:
        tokens = torch.ones(1, 8, dtype=torch.bfloat16, device=buffer.device)
        got = buffer.dispatch(tokens, torch.tensor([[2]], device=buffer.device))
        probs = torch.arange(4.0, device=buffer.device).as_strided((1, 4), (0, 1))
        assert probs.stride(0) == 0
        gathered = buffer.combine(got.tokens, got.handle, probs=probs).probs
        assert gathered is not None and gathered.tolist() == [[0, 0, 2, 0]]

    world(work, 1, device=device, experts=4)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_round_equals_the_definition(device: str, pad: int | None, dtype: torch.dtype) -> None:
    check_round(make_case(dtype=dtype), device, pad)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_domains(pad: int | None, dtype: torch.dtype) -> None:
    check_round(make_case(dtype=dtype, domains=2), "cpu", pad)


@pytest.mark.parametrize("pad", PADS)
def test_one_rank(device: str, pad: int | None) -> None:
    check_round(make_case(ranks=1, experts=4), device, pad)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("tokens", [[0, 7, 0, 1], [0, 0, 0, 0]])
def test_ranks_without_tokens(device: str, pad: int | None, tokens: list[int]) -> None:
    check_round(make_case(tokens=tokens), device, pad)


@pytest.mark.parametrize("pad", PADS)
def test_tokens_without_experts(device: str, pad: int | None) -> None:
    case = make_case()
    for idx in case.topk_idx:
        idx[::2] = -1
    case.topk_idx[1][:] = -1
    check_round(case, device, pad)


@pytest.mark.parametrize("pad", PADS)
def test_capacity_drops_the_last_rows(device: str, pad: int | None) -> None:
    case = make_case(ranks=2, experts=4, tokens=[20, 30])
    for capacities in ([12, 20], [0, 200], [8, None]):
        check_round(case, device, pad, capacities)


@pytest.mark.parametrize("pad", PADS)
def test_without_gradients_only_the_map_and_the_probs_are_cleared(device: str, pad: int | None) -> None:
    case = make_case(ranks=2, experts=4, tokens=[3, 3])

    @torch.no_grad()
    def work(buffer: Buffer) -> None:
        # Fills the memory that the next dispatch reuses.
        for capacity in (64, 48):
            got = dispatch(buffer, pad, *inputs(case, buffer), capacity=capacity)
            used = len(case.rows(buffer.rank, pad))
            assert got.probs is not None and not got.probs[used:].any()
            assert got.local_experts is None or not got.local_experts[used:].any()
            got.tokens.fill_(7)
            got.probs.fill_(7)

    world(work, 2, device=device, experts=4)


@pytest.mark.parametrize("pad", PADS)
def test_all_forms_of_a_routing_give_the_same(device: str, pad: int | None) -> None:
    case = make_case()

    def work(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)
        routing_map, probs = (t.to(buffer.device) for t in (case.map(buffer.rank), case.probs(buffer.rank)))
        for named in (
            {"topk_idx": idx, "topk_weights": weights},
            {"topk_idx": idx.int(), "topk_weights": weights.double()},
            {"routing_map": routing_map, "probs": probs},
            {"routing_map": routing_map.to(torch.uint8), "probs": probs},
            # Not contiguous and not aligned.
            {"topk_idx": idx.t().contiguous().t(), "topk_weights": torch.stack([weights, weights], 2)[..., 1]},
        ):
            check_dispatched(case, buffer.rank, pad, dispatch(buffer, pad, x, **named))
        without = dispatch(buffer, pad, x, routing_map=routing_map)
        assert without.probs is None
        check_dispatched(case, buffer.rank, pad, without)

    world(work, 4, device=device)


def test_tokens_need_not_be_contiguous(device: str) -> None:
    case = make_case()

    def work(buffer: Buffer) -> Tensor:
        x, idx, weights = inputs(case, buffer)
        wide = torch.cat([x, x], 1)
        shifted = torch.empty(x.numel() + 1, device=x.device)[1:].view(x.shape).copy_(x)
        for tokens in (wide[:, :16], shifted, x.t().contiguous().t()):
            got = buffer.dispatch(tokens, idx, weights)
            check_dispatched(case, buffer.rank, None, got)
            twice = torch.cat([got.tokens, got.tokens], 1)[:, 16:]
            combined = buffer.combine(twice, got.handle)
        return combined.tokens.cpu()

    results = world(work, 4, device=device)
    rows = [torch.stack([case.tokens[r.source][r.token] for r in case.rows(k, None) if r]) for k in range(4)]
    for got, expected in zip(results, case.combined(rows, None), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("pad", PADS)
def test_a_handle_serves_new_tokens_and_types(device: str, pad: int | None) -> None:
    case = make_case()
    other = make_case(hidden=32, dtype=torch.bfloat16, seed=9)
    other.topk_idx, other.topk_weights = case.topk_idx, case.topk_weights

    def work(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)
        handle = buffer.preprocess(idx, weights, pad_multiple=pad)
        assert handle.tokens == x.shape[0] and handle.permuted == (pad is not None)
        for tokens, of in ((x, case), (other.tokens[buffer.rank].to(x.device), other), (x, case)):
            got = dispatch(buffer, pad, tokens, handle=handle)
            assert got.probs is None and got.handle is handle
            check_dispatched(of, buffer.rank, pad, got)
            combine(buffer, pad, got.tokens, handle)
        # New weights for the same routing, in both forms.
        case2 = Case(4, 8, case.tokens, case.topk_idx, [w * 2 for w in case.topk_weights])
        check_dispatched(case2, buffer.rank, pad, dispatch(buffer, pad, x, handle=handle, topk_weights=weights * 2))
        probs = case2.probs(buffer.rank).to(x.device)
        check_dispatched(case2, buffer.rank, pad, dispatch(buffer, pad, x, handle=handle, probs=probs))

    world(work, 4, device=device)


def quantised(x: Tensor, block: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Computes FP8 codes and f32 scales of rows by docs/semantics.md."""
    rows, hidden = x.shape
    blocks = x.float().view(rows, hidden // block, block)
    scale = blocks.abs().amax(2).clamp(min=1e-4) / 448
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    codes = (blocks * (1 / scale)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(rows, hidden), scale


@pytest.mark.parametrize("pad", [None, 4])
@pytest.mark.parametrize(("fp8", "block"), [("f32", 128), ("ue8m0", 128), ("mxfp8", 32)])
def test_fp8_is_quantized_in_flight_or_given(device: str, pad: int | None, fp8: str, block: int) -> None:
    case = make_case(hidden=256, dtype=torch.bfloat16)
    codes, scales = zip(*(quantised(x, block, fp8 != "f32") for x in case.tokens), strict=True)
    if fp8 != "f32":
        scales = tuple((torch.log2(scale) + 127).to(torch.uint8) for scale in scales)
    moved = make_case(hidden=256)
    moved.tokens = [code.view(torch.uint8) for code in codes]
    scaled = make_case()
    scaled.tokens = list(scales)

    def work(buffer: Buffer) -> None:
        x, idx, weights = inputs(case, buffer)
        own = codes[buffer.rank].to(x.device), scales[buffer.rank].to(x.device)
        for got in (
            dispatch(buffer, pad, x, idx, weights, fp8=fp8),
            dispatch(buffer, pad, own[0], idx, weights, scales=own[1]),
        ):
            assert got.tokens.dtype == torch.float8_e4m3fn and got.scales is not None
            assert got.scales.shape == (got.tokens.shape[0], 256 // block)
            assert got.scales.dtype == (torch.float32 if fp8 == "f32" else torch.uint8)
            check_dispatched(moved, buffer.rank, pad, got._replace(tokens=got.tokens.view(torch.uint8)))
            check_dispatched(scaled, buffer.rank, pad, got._replace(tokens=got.scales))
        if fp8 != "f32" and hasattr(torch, "float8_e8m0fnu"):
            got = dispatch(buffer, pad, own[0], idx, scales=own[1].view(torch.float8_e8m0fnu))
            check_dispatched(scaled, buffer.rank, pad, got._replace(tokens=got.scales))

    world(work, 4, device=device)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_travel_in_the_wire_type(device: str, dtype: torch.dtype, wire: torch.dtype) -> None:
    case = make_case(dtype=dtype, topk=5)

    def work(buffer: Buffer) -> tuple[Tensor, Tensor]:
        got = buffer.dispatch_with_permute(*inputs(case, buffer))
        outputs = expert_outputs(got.tokens, buffer.rank)
        return outputs.cpu(), buffer.combine_with_unpermute(outputs, got.handle, wire=wire).tokens.cpu()

    results = world(work, 4, device=device)
    expected = case.combined([outputs for outputs, _ in results], 1, wire=wire)
    for (_, got), want in zip(results, expected, strict=True):
        assert got.dtype == dtype and torch.equal(got, want)


def test_experts_may_write_into_registered_memory(device: str) -> None:
    case = make_case()

    def work(buffer: Buffer) -> tuple[Tensor, Tensor]:
        got = buffer.dispatch_with_permute(*inputs(case, buffer))
        outputs = buffer.empty(*got.tokens.shape, dtype=got.tokens.dtype)
        assert outputs.shape == got.tokens.shape and outputs.device == buffer.device
        outputs.copy_(expert_outputs(got.tokens, buffer.rank))
        from_empty = buffer.combine_with_unpermute(outputs, got.handle).tokens
        # In place, in the delivered rows.
        got.tokens.copy_(outputs)
        assert torch.equal(buffer.combine_with_unpermute(got.tokens, got.handle).tokens, from_empty)
        return outputs.cpu(), from_empty.cpu()

    results = world(work, 4, device=device)
    expected = case.combined([outputs for outputs, _ in results], 1)
    assert all(torch.equal(got, want) for (_, got), want in zip(results, expected, strict=True))


def test_properties_of_a_buffer(device: str) -> None:
    buffers = Buffer.threads(2, num_experts=6, device=device)
    for rank, buffer in enumerate(buffers):
        assert (buffer.rank, buffer.world_size, buffer.num_experts, buffer.num_local_experts) == (rank, 2, 6, 3)
        assert buffer.local_experts == range(3 * rank, 3 * rank + 3)
        assert buffer.domains == 1 and buffer.device.type == device
        assert buffer.backend == ("host" if device == "cpu" else "cuda")
        assert f"rank={rank}" in repr(buffer)


@pytest.mark.parametrize(
    ("current", "variables", "taken"),
    [
        (0, {}, 0),
        (3, {}, 3),
        (0, {"LOCAL_RANK": "2"}, 2),
        (0, {"SLURM_LOCALID": "1"}, 1),
        (1, {"LOCAL_RANK": "2"}, 1),
        (0, {"LOCAL_RANK": "4"}, 0),
        (0, {"LOCAL_RANK": "two"}, 0),
    ],
)
def test_the_gpu_of_a_launched_rank(
    current: int, variables: dict[str, str], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four GPUs, as PyTorch would report them."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    of_any, of_one = (settings_of(torch.device(d), 8, 1, None, None, None, None) for d in ("cuda", "cuda:3"))
    assert (of_any["gpu"], of_one["gpu"]) == (taken, 3)


def test_traffic_is_counted(device: str) -> None:
    case = make_case(ranks=2, experts=4, hidden=64, tokens=[3, 3])

    def work(buffer: Buffer) -> Traffic:
        before = buffer.traffic()
        buffer.dispatch(*inputs(case, buffer))
        buffer.synchronize()
        after = buffer.traffic()
        assert after.preprocess_bytes > before.preprocess_bytes and after.waited_seconds >= 0
        return Traffic(*(new - old for new, old in zip(after, before, strict=True)))

    for rank, moved in enumerate(world(work, 2, device=device, experts=4)):
        sent = sum(row is not None and row.source == rank for row in case.rows(1 - rank, None))
        assert moved.domain_bytes == sent * 64 * 4
        assert moved.transport_bytes == moved.transport_messages == 0


def test_fields_of_a_handle(device: str) -> None:
    def work(buffer: Buffer) -> None:
        idx = torch.tensor([[0], [1], [-1]], device=buffer.device)
        plain = buffer.preprocess(idx)
        assert isinstance(plain, Handle) and plain.tensor.shape == (1,) and plain.tensor.dtype == torch.int64
        assert (plain.tokens, plain.rows, plain.permuted, plain.pad_multiple, plain.capacity) == (3, 2, False, 1, None)
        assert plain.topk_idx is idx and plain.tokens_per_expert.numel() == 0
        permuted = buffer.preprocess(idx, pad_multiple=4, capacity=16)
        assert (permuted.rows, permuted.permuted, permuted.pad_multiple, permuted.capacity) == (16, True, 4, 16)
        assert permuted.tokens_per_expert.tolist() == [4, 4] and permuted.overflow.tolist() == [0]
        # A routing of zero columns.
        assert buffer.preprocess(idx[:, :0]).rows == 0

    world(work, 1, device=device, experts=2)


def test_indices_that_changed_after_preprocess_are_refused(device: str) -> None:
    with Buffer(num_experts=4, device=device, workers=1) as buffer:
        x, weights = torch.ones(2, 16, device=device), torch.rand(2, 1, device=device)
        idx = torch.tensor([[0], [1]], device=device)
        handle = buffer.preprocess(idx, pad_multiple=1)
        assert buffer.dispatch_with_permute(x, handle=handle, topk_weights=weights).probs is not None
        idx.copy_(idx + 2)
        with pytest.raises(CallerError, match="topk_idx of this handle was changed in place after the preprocess"):
            buffer.dispatch_with_permute(x, handle=handle, topk_weights=weights)
        buffer.dispatch_with_permute(x, handle=handle)
        with torch.inference_mode():
            handle = buffer.preprocess(torch.tensor([[0], [1]], device=device), pad_multiple=1)
            buffer.dispatch_with_permute(x, handle=handle, topk_weights=weights)


class Wrapper(Tensor):
    """A tensor without memory of its own, like DTensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = torch.utils._pytree.tree_map_only(Wrapper, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return function(*inside[0], **inside[1])


def test_tensors_without_memory_are_unwrapped_or_refused(device: str) -> None:
    with Buffer(num_experts=4, device=device, workers=1) as buffer:
        x, idx = torch.ones(2, 128, device=device), torch.tensor([[0], [1]], device=device)
        weights = torch.tensor([[0.25], [0.75]], device=device)
        got = buffer.dispatch_with_permute(x, idx, Wrapper(weights))
        assert got.probs is not None and got.probs.tolist() == [0.25, 0.75]
        handle = buffer.preprocess(idx, Wrapper(weights), pad_multiple=1)
        assert buffer.combine_with_unpermute(Wrapper(got.tokens), handle=got.handle).tokens.equal(x)
        del handle
        rows, scales = x.to(torch.float8_e4m3fn), torch.ones(2, 1, device=device)
        given = buffer.dispatch_with_permute(rows, idx, scales=Wrapper(scales))
        assert given.scales is not None and given.scales.equal(scales)
        with pytest.raises(CallerError, match="values: a Wrapper has no memory of its own"):
            weight_rows(Wrapper(torch.ones(2, 16, device=device)), torch.ones(2, device=device), torch.float32, buffer)


def test_a_tensor_whose_memory_does_not_hold_its_values_is_copied() -> None:
    idx, rows = torch.tensor([[0], [1], [2]]), torch.arange(48.0).view(3, 16)
    with Buffer(num_experts=4, device="cpu") as buffer:

        def delivered(tokens: Tensor) -> Tensor:
            return buffer.dispatch_with_permute(tokens, idx).tokens.clone()

        assert torch.equal(delivered(torch._neg_view(rows)), -rows)
        assert torch.equal(delivered(torch._efficientzerotensor((3, 16))), torch.zeros(3, 16))


def test_inductor_makes_no_cuda_graphs_of_operators() -> None:
    importlib.import_module("hybrid_ep.experts")  # it has operators of its own
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    names = ["preprocess", "dispatch", "combine", "grouped_mm", "grouped_mm_weights"]
    missing = [name for name in names if tag not in getattr(torch.ops.hybrid_ep, name).default.tags]
    assert tag is None or not missing
