"""Gradients of dispatch and combine, compared with those of the same layer computed densely in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hybrid_ep import Buffer, CallerError, PeerError
from test_buffer import PADS, combine, dispatch
from worlds import Case, make_case, on_threads, world


def experts_of(case: Case, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Two matrices for each expert."""
    random = torch.Generator().manual_seed(seed)
    hidden = case.tokens[0].shape[1]
    return tuple(torch.randn(case.experts, hidden, hidden, generator=random) * 0.3 for _ in range(2))  # type: ignore[return-value]


def expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.tanh(x @ up) @ down


def dense_gradients(case: Case, kept: set[tuple[int, int, int]] | None = None) -> list[tuple[Tensor, ...]]:
    """Returns the output, and the gradients of tokens and weights, of all ranks.

    `kept` has the (rank, token, expert) triples that are not dropped.
    """
    up, down = experts_of(case)
    results = []
    for rank in range(case.ranks):
        x, weights = (t.float().clone().requires_grad_() for t in (case.tokens[rank], case.topk_weights[rank]))
        nothing = 0 * (x.sum() + weights.sum())
        rows = [torch.zeros_like(row) + nothing for row in x]
        for token, experts in enumerate(case.topk_idx[rank].tolist()):
            for column, e in enumerate(experts):
                if e >= 0 and (kept is None or (rank, token, e) in kept):
                    rows[token] = rows[token] + weights[token, column] * expert(x[token], up[e], down[e])
        y = torch.cat([x[:0] + nothing, *(row[None] for row in rows)])
        y.square().sum().backward()
        assert x.grad is not None and weights.grad is not None
        results.append((y.detach(), x.grad, weights.grad))
    return results


def layer(
    buffer: Buffer, case: Case, pad: int | None, x: Tensor, weights: Tensor, capacity: int | None = None
) -> Tensor:
    idx = case.topk_idx[buffer.rank].to(buffer.device)
    up, down = (t[buffer.local_experts.start : buffer.local_experts.stop].to(x) for t in experts_of(case))
    got = dispatch(buffer, pad, x, idx, weights, capacity=capacity)
    assert got.probs is not None
    if pad is None:
        assert got.local_experts is not None
        weighted = got.probs * got.local_experts
        outputs = sum(weighted[:, e, None].to(x) * expert(got.tokens, up[e], down[e]) for e in range(case.local))
    else:
        assert got.tokens_per_expert is not None
        groups = [*got.tokens_per_expert.tolist()]
        groups.append(got.tokens.shape[0] - sum(groups))
        pieces = [
            expert(t, u, d) for t, u, d in zip(got.tokens.split(groups), [*up, up[0]], [*down, down[0]], strict=True)
        ]
        outputs = torch.cat(pieces) * got.probs[:, None].to(x)
    return combine(buffer, pad, outputs, got.handle).tokens


def check_layer(
    case: Case, device: str, pad: int | None, capacities: list[int | None] | None, tolerance: float
) -> None:
    capacities = capacities or [None] * case.ranks
    kept = {
        (row.source, row.token, e)
        for rank in range(case.ranks)
        for row in case.rows(rank, pad, capacities[rank])
        if row is not None
        for e in row.experts
    }

    def work(buffer: Buffer) -> tuple[Tensor, ...]:
        inputs = (case.tokens[buffer.rank], case.topk_weights[buffer.rank])
        x, weights = (t.to(buffer.device, copy=True).requires_grad_() for t in inputs)
        y = layer(buffer, case, pad, x, weights, capacities[buffer.rank])
        y.float().square().sum().backward()
        assert x.grad is not None and weights.grad is not None and x.grad.dtype == x.dtype
        return y.detach().cpu(), x.grad.cpu(), weights.grad.cpu()

    results = world(work, case.ranks, device=device, experts=case.experts, domains=case.domains)
    for got, expected in zip(results, dense_gradients(case, kept), strict=True):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pad", PADS)
def test_a_layer_has_the_gradients_of_a_dense_one(device: str, pad: int | None) -> None:
    check_layer(make_case(), device, pad, None, 1e-5)


@pytest.mark.parametrize("pad", [None, 1])
def test_domains(pad: int | None) -> None:
    check_layer(make_case(domains=2), "cpu", pad, None, 1e-5)


@pytest.mark.parametrize("pad", [None, 1])
def test_bf16_gradients_equal_dense_ones_up_to_rounding(device: str, pad: int | None) -> None:
    check_layer(make_case(dtype=torch.bfloat16), device, pad, None, 6e-2)


@pytest.mark.parametrize("pad", PADS)
def test_dropped_rows_have_no_gradient(device: str, pad: int | None) -> None:
    case = make_case(ranks=2, experts=4, tokens=[9, 12])
    check_layer(case, device, pad, [12, 8], 1e-5)
    check_layer(case, device, pad, [0, 128], 1e-5)


@pytest.mark.parametrize("pad", [None, 1])
def test_ranks_without_tokens_take_part(device: str, pad: int | None) -> None:
    check_layer(make_case(tokens=[0, 5, 0, 3]), device, pad, None, 1e-5)


@pytest.mark.parametrize("pad", PADS)
def test_the_gradient_of_rows_is_where_their_tokens_are(device: str, pad: int | None) -> None:
    """Combine alone, exact to the last bit: its gradient is copied, not summed."""
    case = make_case()
    upstream = make_case(seed=7).tokens

    def work(buffer: Buffer) -> None:
        rank = buffer.rank
        x, idx = case.tokens[rank].to(buffer.device), case.topk_idx[rank].to(buffer.device)
        got = dispatch(buffer, pad, x, idx)
        rows = got.tokens.clone().requires_grad_()
        y = combine(buffer, pad, rows, got.handle).tokens
        (grad,) = torch.autograd.grad(y, rows, upstream[rank].to(buffer.device))
        for at, row in enumerate(case.rows(rank, pad)):
            expected = (
                torch.zeros_like(x[0] if len(x) else grad[at]) if row is None else upstream[row.source][row.token]
            )
            assert torch.equal(grad[at].cpu(), expected.cpu())

    world(work, 4, device=device)


@pytest.mark.parametrize("pad", PADS)
def test_the_gradient_of_tokens_is_the_sum_of_their_rows(device: str, pad: int | None) -> None:
    """Dispatch alone, exact to the last bit: its gradient is a combine."""
    case = make_case()

    def work(buffer: Buffer) -> tuple[Tensor, Tensor]:
        rank = buffer.rank
        x = case.tokens[rank].to(buffer.device).requires_grad_()
        got = dispatch(buffer, pad, x, case.topk_idx[rank].to(buffer.device))
        upstream = torch.randn(got.tokens.shape, generator=torch.Generator().manual_seed(rank))
        (grad,) = torch.autograd.grad(got.tokens, x, upstream.to(x.device))
        return upstream, grad.cpu()

    results = world(work, 4, device=device)
    expected = case.combined([upstream for upstream, _ in results], pad)
    assert all(torch.equal(grad, want) for (_, grad), want in zip(results, expected, strict=True))


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("form", ["topk", "map", "cached topk", "cached probs"])
def test_gradients_of_weights_have_the_form_of_the_weights(device: str, pad: int | None, form: str) -> None:
    case = make_case()

    def work(buffer: Buffer) -> None:
        rank, to = buffer.rank, buffer.device
        x, idx = case.tokens[rank].to(to), case.topk_idx[rank].to(to)
        weights = case.topk_weights[rank].to(to, torch.float64).requires_grad_()
        probs = case.probs(rank).to(to).requires_grad_()
        if form == "topk":
            got, leaf = dispatch(buffer, pad, x, idx, weights), weights
        elif form == "map":
            got, leaf = dispatch(buffer, pad, x, routing_map=case.map(rank).to(to), probs=probs), probs
        else:
            handle = buffer.preprocess(idx, pad_multiple=pad)
            given = {"topk_weights": weights} if form == "cached topk" else {"probs": probs}
            got, leaf = dispatch(buffer, pad, x, handle=handle, **given), next(iter(given.values()))
        assert got.probs is not None
        # A different number for each (rank, token, expert).
        factors = torch.zeros_like(got.probs)
        for at, row in enumerate(case.rows(rank, pad)):
            for e in row.experts if row is not None else []:
                value = row.source * 10_000 + row.token * 100 + e
                factors[at if pad is not None else (at, e - rank * case.local)] = value
        (got.probs * factors).sum().backward()
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
        for token, experts in enumerate(idx.tolist()):
            for column, e in enumerate(experts):
                expected = 0 if e < 0 else rank * 10_000 + token * 100 + e
                if leaf is weights:
                    assert leaf.grad[token, column] == expected
                elif e >= 0:
                    assert leaf.grad[token, e] == expected
        if leaf is probs:
            assert not leaf.grad.cpu()[~case.map(rank)].any()

    world(work, 4, device=device)


@pytest.mark.parametrize("pad", PADS)
def test_combined_probs_have_gradients(device: str, pad: int | None) -> None:
    case = make_case()

    def work(buffer: Buffer) -> None:
        rank, to = buffer.rank, buffer.device
        x, idx, weights = (t[rank].to(to) for t in (case.tokens, case.topk_idx, case.topk_weights))
        got = dispatch(buffer, pad, x, idx, weights)
        assert got.probs is not None
        probs = got.probs.clone().requires_grad_()
        y = combine(buffer, pad, got.tokens, got.handle, probs=probs)
        assert y.probs is not None
        factors = torch.arange(y.probs.numel(), device=to).view(y.probs.shape) + 1.0 + 1000 * rank
        (y.probs * factors).sum().backward()
        assert probs.grad is not None
        for at, row in enumerate(case.rows(rank, pad)):
            for e in row.experts if row is not None else []:
                found = probs.grad[at] if pad is not None else probs.grad[at, e - rank * case.local]
                assert found == row.token * case.experts + e + 1 + 1000 * row.source

    world(work, 4, device=device)


@pytest.mark.parametrize("unused", ["tokens", "probs"])
def test_outputs_that_one_rank_does_not_use_have_gradient_zero(device: str, unused: str) -> None:
    """The ranks call the same operator in backward although their losses depend on different outputs."""
    case = make_case()

    def work(buffer: Buffer) -> tuple[Tensor, Tensor]:
        rank, to = buffer.rank, buffer.device
        x, weights = (t[rank].to(to).requires_grad_() for t in (case.tokens, case.topk_weights))
        got = buffer.dispatch_with_permute(x, case.topk_idx[rank].to(to), weights)
        assert got.probs is not None
        loss = got.probs.sum() if unused == "tokens" else got.tokens.sum()
        if rank > 0:
            loss = got.probs.sum() + got.tokens.sum()
        loss.backward()
        assert x.grad is not None and weights.grad is not None
        return x.grad.cpu(), weights.grad.cpu()

    results = world(work, 4, device=device)
    for rank, (of_x, of_weights) in enumerate(results):
        chosen = case.topk_idx[rank] >= 0
        # The experts of rank 0 return zero for unused outputs.
        counted = chosen & (case.topk_idx[rank] >= case.local)
        of_tokens, of_probs = (counted, chosen) if unused == "tokens" else (chosen, counted)
        assert torch.equal(of_x, of_tokens.sum(1, keepdim=True).float().expand_as(of_x))
        assert torch.equal(of_weights, of_probs.float())


@pytest.mark.parametrize("pad", [None, 1])
@pytest.mark.parametrize("wants", ["tokens", "weights", "both"])
def test_inputs_that_need_no_gradient_cost_none(device: str, pad: int | None, wants: str) -> None:
    case = make_case()

    def work(buffer: Buffer) -> None:
        rank, to = buffer.rank, buffer.device
        x, idx, weights = (t[rank].to(to) for t in (case.tokens, case.topk_idx, case.topk_weights))
        x.requires_grad_(wants != "weights")
        weights.requires_grad_(wants != "tokens")
        got = dispatch(buffer, pad, x, idx, weights)
        assert got.probs is not None
        (got.tokens.sum() + got.probs.sum()).backward()
        chosen = idx >= 0
        assert (x.grad is None) == (wants == "weights") and (weights.grad is None) == (wants == "tokens")
        if weights.grad is not None:
            assert torch.equal(weights.grad, chosen.float())
        if x.grad is not None:
            # One row for each expert, or for each rank that has any.
            of = chosen.sum(1) if pad is not None else torch.stack(
                [((idx >= r * case.local) & (idx < (r + 1) * case.local)).any(1) for r in range(4)]
            ).sum(0)  # fmt: skip
            assert torch.equal(x.grad, of[:, None].float().expand_as(x))

    world(work, 4, device=device)


@pytest.mark.parametrize("pad", [None, 1])
@pytest.mark.parametrize("fp8", ["f32", "mxfp8"])
def test_fp8_tokens_have_no_gradient_but_their_weights_do(device: str, pad: int | None, fp8: str) -> None:
    case = make_case(hidden=128, dtype=torch.bfloat16)

    def work(buffer: Buffer) -> None:
        rank, to = buffer.rank, buffer.device
        x, weights = (t[rank].to(to).requires_grad_() for t in (case.tokens, case.topk_weights))
        idx = case.topk_idx[rank].to(to)
        got = dispatch(buffer, pad, x, idx, weights, fp8=fp8)
        assert got.probs is not None and not got.tokens.requires_grad
        got.probs.sum().backward()
        assert x.grad is None and weights.grad is not None
        assert torch.equal(weights.grad, (idx >= 0).float())

    world(work, 4, device=device)


def test_a_handle_serves_several_backwards(device: str) -> None:
    case = make_case()

    def work(buffer: Buffer) -> None:
        rank, to = buffer.rank, buffer.device
        x, idx = case.tokens[rank].to(to).requires_grad_(), case.topk_idx[rank].to(to)
        handle = buffer.preprocess(idx, pad_multiple=1)
        outs = [buffer.dispatch_with_permute(x, handle=handle).tokens * k for k in (1.0, 2.0)]
        outs.append(buffer.combine_with_unpermute(outs[0] + outs[1], handle).tokens)
        # Only the saved state of backward keeps the handle.
        del handle
        outs[2].sum().backward(retain_graph=True)
        first = x.grad
        x.grad = None
        outs[2].sum().backward()
        assert first is not None and x.grad is not None and torch.equal(first, x.grad)
        assert torch.equal(x.grad, 3.0 * (idx >= 0).sum(1, keepdim=True).expand_as(x))

    world(work, 4, device=device)


@pytest.mark.parametrize("operator", ["dispatch", "combine"])
def test_a_second_derivative_is_refused(device: str, operator: str) -> None:
    def work(buffer: Buffer) -> None:
        x = torch.randn(3, 8, device=buffer.device, requires_grad=True)
        got = buffer.dispatch_with_permute(
            x.detach() if operator == "combine" else x, torch.tensor([[0], [1], [0]]).to(x.device)
        )
        y, leaf = got.tokens, x
        if operator == "combine":
            leaf = got.tokens.clone().requires_grad_()
            y = buffer.combine_with_unpermute(leaf, got.handle).tokens
        # Where the gradient does not depend on the input, there is nothing to refuse.
        (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True, retain_graph=True)
        assert torch.equal(grad, torch.ones_like(leaf)) and not grad.requires_grad
        (grad,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        assert torch.allclose(grad, 2 * leaf)
        with pytest.raises(CallerError, match=f"gradient of {operator} cannot be differentiated again"):
            grad.sum().backward()

    world(work, 1, device=device, experts=2)


def test_outputs_may_be_changed_in_place(device: str) -> None:
    def work(buffer: Buffer) -> None:
        x = torch.randn(3, 8, device=buffer.device, requires_grad=True)
        got = buffer.dispatch_with_permute(x, torch.tensor([[0], [1], [0]]).to(x.device))
        got.tokens.mul_(3)
        y = buffer.combine_with_unpermute(got.tokens, got.handle).tokens
        y += x
        y.sum().backward()
        assert x.grad is not None and torch.allclose(x.grad, torch.full_like(x, 4.0))

    world(work, 1, device=device, experts=2)


def test_gradients_of_a_batch_take_the_registered_operators() -> None:
    def work(buffer: Buffer) -> None:
        x = torch.randn(3, 8, requires_grad=True)
        got = buffer.dispatch_with_permute(x, torch.tensor([[0], [1], [0]]))
        grads = torch.stack([torch.full_like(got.tokens, float(value)) for value in range(2)])
        (found,) = torch.autograd.grad(got.tokens, x, grads, is_grads_batched=True)
        assert torch.equal(found, torch.stack([torch.zeros_like(x), torch.ones_like(x)]))

    world(work, 1, device="cpu", experts=2)


def test_activation_checkpointing_runs_the_operators_again() -> None:
    """On the CPU only: PyTorch runs all backward passes of a GPU on one thread, where no rank may wait for another."""
    case = make_case()

    def work(buffer: Buffer) -> tuple[Tensor, ...]:
        x, weights = (
            t[buffer.rank].to(buffer.device, copy=True).requires_grad_() for t in (case.tokens, case.topk_weights)
        )
        y = checkpoint(layer, buffer, case, 1, x, weights, use_reentrant=False)
        y.square().sum().backward()
        assert x.grad is not None and weights.grad is not None
        return y.detach().cpu(), x.grad.cpu(), weights.grad.cpu()

    for got, expected in zip(world(work, 4), dense_gradients(case), strict=True):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_hooks_may_move_saved_tensors(device: str) -> None:
    """Hooks replace saved tensors by copies; the handle must survive that."""
    case = make_case()

    def work(buffer: Buffer) -> tuple[Tensor, ...]:
        x, weights = (
            t[buffer.rank].to(buffer.device, copy=True).requires_grad_() for t in (case.tokens, case.topk_weights)
        )
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = layer(buffer, case, 1, x, weights)
        y.square().sum().backward()
        assert x.grad is not None and weights.grad is not None
        return y.detach().cpu(), x.grad.cpu(), weights.grad.cpu()

    for got, expected in zip(world(work, 4, device=device), dense_gradients(case), strict=True):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pad", PADS)
def test_the_registered_operators_have_the_same_gradients(device: str, pad: int | None) -> None:
    """A mode sees the registered operators; without one, autograd calls the operators directly."""
    case = make_case()

    class Listing(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += [function.name()] if function.namespace == "hybrid_ep" else []
            return function(*args, **(kwargs or {}))

    def work(buffer: Buffer) -> None:
        def gradients() -> list[Tensor | None]:
            inputs = [t[buffer.rank].to(buffer.device, copy=True) for t in (case.tokens, case.topk_weights)]
            x, weights = (t.requires_grad_() for t in inputs)
            y = layer(buffer, case, pad, x, weights)
            y.square().sum().backward()
            return [y.detach(), x.grad, weights.grad]

        direct = gradients()
        with Listing() as mode:
            listed = gradients()
        names = ["preprocess", "dispatch", "combine", "dispatch", "combine"]
        assert mode.seen == [f"hybrid_ep::{name}" for name in names]
        for one, other in zip(direct, listed, strict=True):
            assert one is not None and other is not None and torch.equal(one, other)

    world(work, case.ranks, device=device, experts=case.experts)


def test_an_error_in_backward_is_raised_there() -> None:
    buffers = Buffer.threads(2, num_experts=2, device="cpu", workers=1, timeout=10)

    def work(buffer: Buffer) -> None:
        x = torch.randn(2, 8, requires_grad=True)
        got = buffer.dispatch_with_permute(x, torch.tensor([[0], [1]]))
        if buffer.rank == 1:
            buffer.close()
            return
        with pytest.raises(PeerError, match="rank 1 left") as raised:
            got.tokens.sum().backward()
        assert raised.value.operator == "combine"

    on_threads(buffers, work)


def test_forward_mode_gradients_are_refused(device: str) -> None:
    with Buffer(num_experts=4, device=device, workers=1) as buffer, forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 16, device=device), torch.ones(2, 16, device=device))
        with pytest.raises(CallerError, match="forward-mode gradients are not implemented"):
            buffer.dispatch_with_permute(x, torch.zeros(2, 1, dtype=torch.long, device=device))


def test_a_selective_checkpoint_may_keep_preprocess_and_dispatch(device: str) -> None:
    kept = {torch.ops.hybrid_ep.preprocess.default, torch.ops.hybrid_ep.dispatch.default}

    def policy(_: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    with Buffer(num_experts=4, device=device, workers=1) as buffer:
        idx = torch.tensor([[0], [1]], device=device)

        def block(x: Tensor) -> Tensor:
            got = buffer.dispatch_with_permute(x * 2, idx)
            return buffer.combine_with_unpermute(got.tokens.tanh(), got.handle).tokens.sin()

        grads = []
        for function in (
            block,
            lambda x: checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            ),
        ):
            x = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
            function(x).sum().backward()
            grads.append(x.grad)
        assert grads[0].equal(grads[1])
