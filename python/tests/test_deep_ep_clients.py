"""`hybrid_ep.deep_ep`, called as programs call it: Megatron-Core, torchtitan, DeepEP's test, a benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep_world import Case, combined, combined_identity, experts, inputs, new_buffer, same, world_of
from hybrid_ep.deep_ep import HybridEPBuffer
from hybrid_ep.deep_ep.hybrid_ep_buffer import indices_to_map
from process_worlds import Rank

__all__ = ["world_of"]  # a fixture


class Dispatch(torch.autograd.Function):
    """Megatron-Core's wrapper of dispatch: backward is a combine with the forward's handle."""

    @staticmethod
    def forward(
        ctx: Any, buffer: HybridEPBuffer, hidden: Tensor, routing_map: Tensor, probs: Tensor, options: Any
    ) -> Any:
        rows, row_probs, scales, counts, handle = buffer.dispatch_with_permute(
            hidden=hidden, routing_map=routing_map, probs=probs, scaling_factor=None, **options
        )
        ctx.buffer, ctx.handle, ctx.pad = buffer, handle, options["pad_multiple"]
        return rows, row_probs, scales, counts, handle

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor, *_: Any) -> Any:
        grad_hidden, grad_probs = ctx.buffer.combine_with_unpermute(
            hidden=grad_rows, probs=grad_probs, handle=ctx.handle, pad_multiple=ctx.pad
        )
        return None, grad_hidden, None, grad_probs, None


class Combine(torch.autograd.Function):
    """Megatron-Core's wrapper of combine: backward is a dispatch with the same handle."""

    @staticmethod
    def forward(ctx: Any, buffer: HybridEPBuffer, rows: Tensor, handle: Any, count: Any, pad: int | None) -> Tensor:
        hidden, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=pad)
        ctx.buffer, ctx.handle, ctx.count, ctx.pad = buffer, handle, count, pad
        return hidden

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor) -> Any:
        grad_rows, *_ = ctx.buffer.dispatch_with_permute(
            hidden=grad_hidden,
            scaling_factor=None,
            handle=ctx.handle,
            pad_multiple=ctx.pad,
            num_permuted_tokens=ctx.count,
        )
        return None, grad_rows, None, None, None


@pytest.mark.parametrize("capacity", [None, 512])
@pytest.mark.parametrize("repeated", [1, 2])
def test_training_as_megatron_does(world_of: Any, capacity: int | None, repeated: int) -> None:
    case = Case((16, 7, 0, 20), hidden=64, pad=16, dtype=torch.float32, repeated=repeated)
    world_of(4).run(check_megatron, case, capacity)


def check_megatron(here: Rank, case: Case, capacity: int | None) -> None:
    """Two layers in flight on one buffer; their gradients equal those of dense arithmetic."""
    buffer = new_buffer(here, case)
    weight = torch.randn(case.experts, case.hidden, generator=torch.Generator().manual_seed(3)).to(here.device)
    mine = case.experts_of(here.rank)

    def leaves() -> tuple[Tensor, Tensor, Tensor]:
        hidden = case.hidden_of(here.rank).to(here.device).requires_grad_()
        probs = case.probs_of(here.rank).to(here.device).requires_grad_()
        return hidden, probs, weight.clone().requires_grad_()

    def layer(hidden: Tensor, probs: Tensor, weight: Tensor) -> Tensor:
        options = {"num_of_experts_per_rank": case.local, "pad_multiple": case.pad}
        if capacity is not None:
            options |= {"num_permuted_tokens": capacity, "non_blocking": True}
        rows, row_probs, _, counts, handle = Dispatch.apply(
            buffer, hidden, case.map_of(here.rank).to(here.device), probs, options
        )
        ends = counts.cumsum(0).tolist()
        outputs = [
            rows[start:end] * weight[expert] * row_probs[start:end, None]
            for expert, start, end in zip(range(mine.start, mine.stop), [0, *ends], ends, strict=False)
        ]
        outputs.append(torch.zeros_like(rows[ends[-1] :]))
        count = counts.sum() if capacity is None else capacity
        return Combine.apply(buffer, torch.cat(outputs), handle, count, case.pad)

    def dense(hidden: Tensor, probs: Tensor, weight: Tensor) -> Tensor:
        return hidden * ((probs * case.map_of(here.rank).to(here.device)) @ weight)

    hidden, probs, weights = leaves()
    output = layer(layer(hidden, probs, weights), probs, weights)
    expected_hidden, expected_probs, expected_weights = leaves()
    expected = dense(dense(expected_hidden, expected_probs, expected_weights), expected_probs, expected_weights)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(here.rank)).to(here.device)
    output.backward(gradient)
    expected.backward(gradient)
    close = torch.testing.assert_close
    close(output, expected, rtol=1e-5, atol=1e-4)
    close(hidden.grad, expected_hidden.grad, rtol=1e-5, atol=1e-3)
    close(probs.grad, expected_probs.grad * case.map_of(here.rank).to(here.device), rtol=1e-5, atol=1e-3)
    # An expert's gradient is complete on its rank; the dense gradient is a sum over ranks.
    assert weights.grad is not None and expected_weights.grad is not None
    dist.all_reduce(expected_weights.grad, group=here.group)
    close(weights.grad[mine], expected_weights.grad[mine], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_training_as_torchtitan_does(world_of: Any, capacity_factor: float | None) -> None:
    world_of(2).run(check_torchtitan, Case((24, 24), experts=8, hidden=64, dtype=torch.float32), capacity_factor)


def check_torchtitan(here: Rank, case: Case, capacity_factor: float | None) -> None:
    """Converts top-k to a map, applies scores outside, combines without a padding, gathers gradients of weights."""
    buffer = new_buffer(here, case, load_cached_kernels=True, use_shared_buffer=True, enable_custom_allgather=True)
    config = buffer.configurer.buffer_config
    tokens, top_k = case.tokens[here.rank], 3
    assert buffer.group == here.group and config.max_num_of_tokens_per_rank >= tokens
    scores = torch.rand(tokens, case.experts, generator=torch.Generator().manual_seed(here.rank)).to(here.device)
    topk_weights, topk_idx = scores.topk(top_k, dim=1)
    routing_map, probs = indices_to_map(topk_idx, topk_weights.float(), tokens, case.experts)
    non_blocking = capacity_factor is not None
    capacity = int(tokens * here.size * min(case.local, top_k) * capacity_factor) if non_blocking else None
    hidden = case.hidden_of(here.rank).to(here.device)
    rows, row_scores, _, counts, handle = buffer.dispatch_with_permute(
        hidden=hidden,
        routing_map=routing_map,
        probs=probs,
        scaling_factor=None,
        num_of_experts_per_rank=case.experts // here.size,
        pad_multiple=None,
        num_permuted_tokens=capacity,
        non_blocking=non_blocking,
    )
    assert row_scores is not None and counts.shape == (case.local,)
    used = int(counts.sum())
    # Rows after the last segment are undefined, and combine does not read them.
    outputs = rows * row_scores[:, None]
    outputs[used:] = float("nan")
    output, none = buffer.combine_with_unpermute(hidden=outputs, handle=handle)
    assert none is None
    torch.testing.assert_close(output, hidden * topk_weights.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)

    gradient, *_ = buffer.dispatch_with_permute(
        hidden=output, scaling_factor=None, handle=handle, num_permuted_tokens=outputs.shape[0], pad_multiple=None
    )
    assert gradient.shape == outputs.shape
    row_gradients = torch.arange(float(rows.shape[0]), device=here.device)
    _, dense = buffer.combine_with_unpermute(hidden=gradient, probs=row_gradients, handle=handle)
    assert dense is not None and dense.shape == (tokens, case.experts)
    gathered = dense.gather(1, topk_idx)
    assert gathered.shape == topk_weights.shape and not dense.masked_fill(routing_map, 0).any()


def test_calls_as_the_test_of_deep_ep_makes_them(world_of: Any) -> None:
    world_of(2).run(check_original_test, Case((16, 16), hidden=256))


def check_original_test(here: Rank, case: Case) -> None:
    """Passes scaling factors with bf16 tokens, and all arguments with a handle."""
    buffer = new_buffer(here, case)
    hidden = case.hidden_of(here.rank).to(here.device)
    scores = torch.rand(hidden.shape[0], case.experts, generator=torch.Generator().manual_seed(here.rank))
    topk_idx = scores.topk(4, dim=1).indices.to(here.device)
    topk_weights = torch.ones(topk_idx.shape, device=here.device)
    scaling_factor = torch.randn(hidden.shape[0], case.hidden // 128, device=here.device)
    routing_map, probs = indices_to_map(topk_idx, topk_weights, hidden.shape[0], case.experts)

    for weights in (topk_weights, None):
        arguments = {
            "hidden": hidden,
            "scaling_factor": scaling_factor,
            "topk_idx": topk_idx,
            "topk_weights": weights,
            "num_of_experts": case.experts,
        }
        rows, row_probs, scales, handle = buffer.dispatch(**arguments)
        assert scales is None and (row_probs is None) == (weights is None)
        copies = handle[4][: handle[3].cpu().item()].sum(dim=1)
        back, back_probs = buffer.combine(rows * copies.unsqueeze(1), row_probs, handle)
        same(back / 4, hidden.cpu(), "combined tokens")
        if weights is not None:
            assert probs is not None
            same(back_probs, probs.cpu(), "combined probs")
        again = buffer.dispatch(**arguments, handle=handle)
        same(again[0], rows.cpu(), "tokens with a handle")
        assert (again[1] is None) == (weights is None)

    arguments = {
        "hidden": hidden,
        "scaling_factor": scaling_factor,
        "routing_map": routing_map,
        "probs": probs,
        "pad_multiple": 32,
    }
    rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(**arguments)
    again = buffer.dispatch_with_permute(**arguments, handle=handle, num_permuted_tokens=counts.sum().item())
    same(again[0], rows.cpu(), "permuted tokens with a handle")
    assert row_probs is not None
    same(again[1], row_probs.cpu(), "permuted probs with a handle")


def test_a_training_step_of_a_layer_as_measured(world_of: Any) -> None:
    world_of(2).run(check_measured_layer, Case((32, 32), experts=16, hidden=128, pad=32))


def check_measured_layer(here: Rank, case: Case) -> None:
    """The calls of a benchmark of one layer: first call, with a capacity, with the handle; many times."""
    buffer = HybridEPBuffer(
        group=here.group,
        hidden_dim=case.hidden,
        max_num_of_tokens_per_rank=max(case.tokens),
        num_local_experts=case.local,
        num_sms_dispatch_api=8,
        num_sms_combine_api=8,
    )
    given = inputs(here, case)
    options = {"pad_multiple": case.pad, "fuse_permute_dispatch": True}
    cold = dict(**given, num_of_experts_per_rank=case.local, **options)
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(**cold)
    number = rows.shape[0]
    capacity = ((number * 3 // 2) // 32 + 1) * 32
    unpermute = {"pad_multiple": case.pad, "fuse_unpermute_combine": True}
    expected = combined_identity(case, here.rank)
    for _ in range(10):
        _, _, _, _, fresh = buffer.dispatch_with_permute(**cold)
        same(buffer.combine_with_unpermute(hidden=rows, handle=fresh, **unpermute)[0], expected, "combined tokens")
        roomy = buffer.dispatch_with_permute(**cold, num_permuted_tokens=capacity, non_blocking=True)
        same(roomy[3], counts, "tokens_per_expert")
        again = buffer.dispatch_with_permute(
            hidden=given["hidden"], handle=fresh, num_permuted_tokens=number, **options
        )
        same(again[0], rows.cpu(), "tokens")
        _, weights = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=fresh, **unpermute)
        same(weights, case.probs_of(here.rank), "combined probs")
    buffer.combine_with_unpermute(hidden=rows, handle=handle, **unpermute)


# Megatron-Core uses one buffer for all layers.


def test_one_buffer_serves_calls_of_all_sizes(world_of: Any) -> None:
    cases = [
        Case((4, 4), experts=4, hidden=64),
        Case((40, 9), experts=16, hidden=1024, pad=16),
        Case((300, 0), experts=4, hidden=64, seed=1),
    ]
    world_of(2).run(check_one_buffer, cases)


def check_one_buffer(here: Rank, cases: list[Case]) -> None:
    buffer = new_buffer(here, cases[0])
    made = []
    for case in cases:
        made.append(buffer.dispatch_with_permute(**inputs(here, case), pad_multiple=case.pad))
    # Both communicators and the handles are still usable.
    for case, (rows, _, _, _, handle) in reversed(list(zip(cases, made, strict=True))):
        output, _ = buffer.combine_with_unpermute(hidden=experts(case, here, rows), handle=handle)
        same(output, combined(case, here.rank)[0].to(case.dtype), "combined tokens")
    most = max(c.tokens[here.rank] for c in cases)
    assert buffer.update_template_config().max_num_of_tokens_per_rank == most


def test_a_program_that_sizes_its_buffer_by_the_tokens_of_a_rank_keeps_it(world_of: Any) -> None:
    cases = [Case((8, 8)), Case((4, 8), seed=1), Case((12, 6), seed=2)]
    world_of(2).run(check_sized_by_tokens, cases)


def check_sized_by_tokens(here: Rank, cases: list[Case]) -> None:
    """Like torchtitan, makes another buffer if this rank has more tokens than the buffer was made for."""
    buffer = new_buffer(here, cases[0])
    for case in cases:
        if buffer.configurer.buffer_config.max_num_of_tokens_per_rank < case.tokens[here.rank]:
            buffer = new_buffer(here, case)
        rows, _, _, _, handle = buffer.dispatch_with_permute(**inputs(here, case), pad_multiple=case.pad)
        output, _ = buffer.combine_with_unpermute(hidden=experts(case, here, rows), handle=handle)
        same(output, combined(case, here.rank)[0].to(case.dtype), "combined tokens")


def test_a_handle_outlives_the_buffer_that_made_it(world_of: Any) -> None:
    world_of(2).run(check_handle_outlives, Case((9, 4)))


def check_handle_outlives(here: Rank, case: Case) -> None:
    rows, _, _, _, handle = new_buffer(here, case).dispatch_with_permute(**inputs(here, case))
    another = new_buffer(here, case)
    plain = tuple(handle)  # what remains after a program unpacks and packs the handle
    output, _ = another.combine_with_unpermute(hidden=experts(case, here, rows), handle=plain)
    same(output, combined(case, here.rank)[0].to(case.dtype), "combined tokens")


def test_nothing_records_gradients(world_of: Any) -> None:
    world_of(2).run(check_no_autograd, Case((9, 4)))


def check_no_autograd(here: Rank, case: Case) -> None:
    given = inputs(here, case)
    given["hidden"].requires_grad_()
    given["probs"].requires_grad_()
    buffer = new_buffer(here, case)
    rows, probs, _, _, handle = buffer.dispatch_with_permute(**given)
    output, weights = buffer.combine_with_unpermute(hidden=rows.requires_grad_(), probs=probs, handle=handle)
    assert probs is not None and not probs.requires_grad and not output.requires_grad
    assert weights is not None and not weights.requires_grad
