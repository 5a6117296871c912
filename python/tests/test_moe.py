"""The layer, compared with a dense reference that computes all experts for all tokens in one process, in f64."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybrid_ep import Buffer, CallerError
from hybrid_ep._weight_rows import weight_rows
from hybrid_ep.experts import _at_once, local_part, one_by_one
from hybrid_ep.moe import GroupedExperts, MoELayer, Router, TokenDispatcher, clip_gradients, reduce_gradients
from process_worlds import Rank, world_of_processes
from worlds import world

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 32, 24, 8, 3
TOKENS = [21, 40, 0, 7]  # of ranks 0, 1, ...


def on_threads(ranks: int, work: Callable[[Buffer], Any], domains: int = 1) -> list[Any]:
    """Runs `work` on each rank of a new world; returns the results."""
    return world(work, ranks, experts=EXPERTS, domains=domains)


class Trained(NamedTuple):
    """A step of one rank: input, output and all gradients."""

    x: Tensor
    y: Tensor
    grad_y: Tensor
    grad_x: Tensor
    parameters: dict[str, Tensor]
    grads: dict[str, Tensor]


def step(buffer: Buffer, dtype: torch.dtype = torch.float32, **options: Any) -> Trained:
    """Runs forward and backward of a new layer, the same on all ranks, with this rank's tokens."""
    own = torch.Generator().manual_seed(100 + buffer.rank)
    x = torch.randn(TOKENS[buffer.rank], HIDDEN, generator=own).to(buffer.device, dtype).requires_grad_()
    grad_y = torch.randn(x.shape, generator=own).to(buffer.device, dtype)
    layer = seeded_layer(buffer, dtype=dtype, **options)
    y = layer(x)
    ((y * grad_y).sum() + layer.balance_loss).backward()
    parameters = {name: local_part(parameter.detach()).cpu() for name, parameter in layer.named_parameters()}
    grads = {name: local_part(parameter.grad).cpu() for name, parameter in layer.named_parameters()}
    return Trained(x.detach().cpu(), y.detach().cpu(), grad_y.cpu(), x.grad.cpu(), parameters, grads)


SEEDING = threading.Lock()


def seeded_layer(buffer: Buffer, **options: Any) -> MoELayer:
    with SEEDING:  # threads share the global generator
        torch.manual_seed(5)
        return MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK, **options)


def merge(ranks: list[Trained]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Collects the model's parameters and gradients: concatenates experts, sums dense gradients."""
    parameters, grads = {}, {}
    for name in ranks[0].parameters:
        expert = name.startswith("experts.")
        every = [rank.grads[name].double() for rank in ranks]
        grads[name] = torch.cat(every) if expert else torch.stack(every).sum(0)
        values = [rank.parameters[name].double() for rank in ranks]
        parameters[name] = torch.cat(values) if expert else values[0]
    return parameters, grads


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = x @ gate_up[..., :half], x @ gate_up[..., half:]
    return (gate * torch.sigmoid(gate) * up) @ down


Keep = Callable[[list[Tensor]], list[Tensor]]


def reference(
    ranks: list[Trained], normalize: bool = True, keep: Keep | None = None, balance: float = 0.0
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Computes outputs and gradients of tokens by rank, then of parameters. `keep` maps bool `[T, E]`, by rank."""
    parameters, _ = merge(ranks)
    leaves = {name: parameter.requires_grad_() for name, parameter in parameters.items()}
    inputs = [rank.x.double().requires_grad_() for rank in ranks]
    probs = [(x @ leaves["router.weight"].T).softmax(dim=1) for x in inputs]
    chosen = [p >= p.sort(dim=1, descending=True).values[:, TOPK - 1 : TOPK] for p in probs]
    kept = keep(chosen) if keep else chosen
    outputs, total = [], torch.zeros((), dtype=torch.float64)
    for x, p, choice, stays, rank in zip(inputs, probs, chosen, kept, ranks, strict=True):
        weights = p * choice
        if normalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        every = swiglu(x, leaves["experts.gate_up"], leaves["experts.down"])  # [E, T, H]
        y = torch.einsum("te,eth->th", weights * stays, every)
        if "shared.down.weight" in leaves:
            y = y + swiglu(x, leaves["shared.gate_up.weight"].T, leaves["shared.down.weight"].T)
        outputs.append(y)
        share = choice.sum(dim=0) / max(1, choice.sum())
        balance_loss = balance * EXPERTS * (share * p.sum(dim=0) / max(1, len(p))).sum()
        total = total + (y * rank.grad_y.double()).sum() + balance_loss
    total.backward()
    return [y.detach() for y in outputs], {f"x{i}": x.grad for i, x in enumerate(inputs)} | {
        name: leaf.grad for name, leaf in leaves.items()
    }


def check(ranks: list[Trained], tolerance: float, **options: Any) -> None:
    outputs, expected = reference(ranks, **options)
    _, grads = merge(ranks)
    found = grads | {f"x{i}": rank.grad_x for i, rank in enumerate(ranks)}
    for rank, (trained, y) in enumerate(zip(ranks, outputs, strict=True)):
        close(trained.y, y, tolerance, f"output of rank {rank}")
    for name, grad in expected.items():
        assert name.startswith("x") or grad.abs().max() > 0, f"the reference has no gradient for {name}"
        close(found[name], grad, tolerance, f"gradient of {name}")


def close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    scale = expected.square().mean().sqrt().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance * scale, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": False}, {"shared_intermediate": 40}, {"pad_multiple": 1}, {"balance_coef": 5.0}],
    ids=["default", "weights as they are", "shared expert", "unpadded", "balance loss"],
)
def test_layer_equals_the_dense_reference(ranks: int, options: dict[str, Any]) -> None:
    trained = on_threads(ranks, lambda buffer: step(buffer, **options))
    check(trained, 1e-4, normalize=options.get("normalize", True), balance=options.get("balance_coef", 0.0))


@pytest.mark.parametrize("ranks", [1, 4])
def test_layer_in_bf16(ranks: int) -> None:
    # The router must choose as the reference does, so its weights and logits are f32, on the same bf16 tokens.
    trained = on_threads(ranks, lambda b: step(b, torch.bfloat16, shared_intermediate=40))
    assert {t.y.dtype for t in trained} == {torch.bfloat16}
    check(trained, 6e-2)


def test_how_experts_are_computed_follows_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_ep.experts._has_grouped_mm", lambda device: device.type == "meta")
    with Buffer(num_experts=4, device="cpu") as buffer:
        experts = GroupedExperts(buffer, HIDDEN, INTERMEDIATE)
        assert not experts._grouped
        assert experts.to("meta")._grouped


@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_input_and_parameters_may_have_different_types(given: torch.dtype, dtype: torch.dtype) -> None:
    with Buffer(num_experts=4, device="cpu") as buffer:
        exact, layer = (
            MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=2, shared_intermediate=8, dtype=of).requires_grad_()
            for of in (torch.float32, dtype)
        )
        layer.load_state_dict(exact.state_dict())
        x = torch.randn(5, HIDDEN).to(given).requires_grad_()
        y, expected = layer(x), exact(x.float())
        assert y.dtype == given
        y.float().sum().backward()
        assert x.grad is not None and all(parameter.grad is not None for parameter in layer.parameters())
        torch.testing.assert_close(y.float(), expected, atol=5e-2, rtol=5e-2)


def test_f32_layer_with_bf16_rows() -> None:
    trained = on_threads(2, lambda b: step(b, comm_dtype=torch.bfloat16))
    check(trained, 6e-2)
    for rank in trained:
        assert rank.y.dtype == torch.float32
        assert torch.equal(rank.y, rank.y.bfloat16().float()), "sums did not come back in bf16"
    assert any(not torch.equal(rank.y, rank.y.bfloat16().float()) for rank in on_threads(2, step))


def test_router_computes_in_f32() -> None:
    router = Router(HIDDEN, EXPERTS, TOPK)
    tokens = torch.randn(64, HIDDEN).bfloat16()
    narrow, wide = router(tokens), router(tokens.float())
    assert torch.equal(narrow.topk_idx, wide.topk_idx) and torch.equal(narrow.topk_weights, wide.topk_weights)


def test_router_computes_in_f32_under_autocast(device: str) -> None:
    router = Router(HIDDEN, EXPERTS, TOPK, balance_coef=0.5, device=device)
    tokens = torch.randn(64, HIDDEN, device=device)
    expected = router(tokens)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = router(tokens)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_dispatcher_converts_rows_in_transit() -> None:
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        idx, weights = torch.rand(5, EXPERTS).topk(TOPK).indices, torch.rand(5, TOPK)
        for dtype in (torch.bfloat16, torch.float32):
            dispatcher = TokenDispatcher(buffer, dtype=dtype)
            received = dispatcher.dispatch(torch.randn(5, HIDDEN), idx, weights)
            assert received.tokens.dtype == dtype
            assert dispatcher.combine(received.tokens.double(), received).dtype == dtype
        with pytest.raises(CallerError, match="received: has no weights"):
            dispatcher.combine(received.tokens, buffer.dispatch_with_permute(torch.randn(5, HIDDEN), idx))


def test_two_domains() -> None:
    check(on_threads(4, step, domains=2), 1e-4)


@pytest.mark.parametrize("ranks", [1, 4])
def test_capacity_factor_drops_late_choices(ranks: int) -> None:
    factor = 0.75
    dropped = 0

    def keep(chosen: list[Tensor]) -> list[Tensor]:
        nonlocal dropped
        kept = []
        for choice in chosen:
            room = -(-int(factor * 1000 * choice.sum()) // (1000 * EXPERTS))
            kept.append(choice & (choice.cumsum(dim=0) <= room))
            dropped += int(choice.sum() - kept[-1].sum())
        return kept

    trained = on_threads(ranks, lambda b: step(b, capacity_factor=factor))
    check(trained, 1e-4, keep=keep)
    assert dropped > 0


def test_row_capacity_drops_what_does_not_fit() -> None:
    ranks, capacity, pad = 4, 48, 4
    local = EXPERTS // ranks

    def keep(chosen: list[Tensor]) -> list[Tensor]:
        kept = [choice.clone() for choice in chosen]
        for rank in range(ranks):
            row = 0
            for expert in range(rank * local, (rank + 1) * local):
                for source, choice in enumerate(chosen):
                    for token in choice[:, expert].nonzero().flatten().tolist():
                        kept[source][token, expert] = row < capacity
                        row += 1
                row = -(-row // pad) * pad
        return kept

    seen = []

    def work(buffer: Buffer) -> Trained:
        return step(buffer, capacity=capacity, pad_multiple=pad)

    trained = on_threads(ranks, work)
    check(trained, 1e-4, keep=lambda chosen: seen.extend(zip(chosen, kept := keep(chosen), strict=True)) or kept)
    assert any(not torch.equal(before, after) for before, after in seen)


def test_overflow_is_reported() -> None:
    def work(buffer: Buffer) -> list[bool]:
        told = []
        for capacity in (16, 1024):
            layer = seeded_layer(buffer, capacity=capacity)
            layer(torch.randn(50, HIDDEN))
            told.append(bool(layer.overflow.item()))
        return told

    assert on_threads(2, work) == [[True, False]] * 2


def test_no_rank_has_a_token() -> None:
    def work(buffer: Buffer) -> None:
        layer = seeded_layer(buffer, balance_coef=0.1, capacity_factor=1.0)
        x = torch.empty(2, 0, HIDDEN, requires_grad=True)
        y = layer(x)
        assert y.shape == (2, 0, HIDDEN)
        (y.sum() + layer.balance_loss).backward()
        assert all(parameter.grad.abs().sum() == 0 for parameter in layer.parameters())

    on_threads(2, work)


def test_the_same_bits_every_run() -> None:
    first, second = (on_threads(4, step) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.y, other.y) and torch.equal(one.grad_x, other.grad_x)
        assert all(torch.equal(one.grads[name], other.grads[name]) for name in one.grads)


def test_the_same_model_for_any_number_of_ranks() -> None:
    models = [merge(on_threads(ranks, step))[0] for ranks in (1, 2, 4)]
    for model in models[1:]:
        assert all(torch.equal(models[0][name], model[name]) for name in model)
    gate_up = models[0]["experts.gate_up"]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(gate_up, 2)), "experts must differ"


def test_micro_batches_overlap() -> None:
    def work(buffer: Buffer) -> None:
        dispatcher = TokenDispatcher(buffer)
        batches = []
        for count in (5, 9):
            idx = torch.rand(count, EXPERTS).topk(TOPK).indices
            batches.append((torch.randn(count, HIDDEN), idx, torch.rand(count, TOPK)))
        received = [dispatcher.dispatch(*batch) for batch in batches]
        for (tokens, _, weights), got in reversed(list(zip(batches, received, strict=True))):
            combined = dispatcher.combine(got.tokens, got)
            torch.testing.assert_close(combined, tokens * weights.sum(dim=1, keepdim=True))

    on_threads(2, work)


def test_dispatcher_compiles_to_one_graph() -> None:
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        dispatcher = TokenDispatcher(buffer, capacity=128, pad_multiple=4)

        def experts(tokens: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            received = dispatcher.dispatch(tokens, idx, weights)
            return dispatcher.combine(received.tokens.relu(), received)

        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        tokens, weights = torch.randn(16, HIDDEN).bfloat16().requires_grad_(), torch.rand(16, TOPK).requires_grad_()
        idx, grad = torch.rand(16, EXPERTS).topk(TOPK).indices, torch.randn(16, HIDDEN).bfloat16()
        results = []
        for run in (compiled, experts):
            y = run(tokens, idx, weights)
            results.append((y, *torch.autograd.grad(y, (tokens, weights), grad)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        check([step(buffer)], 1e-4)
        layer = seeded_layer(buffer)
        reduce_gradients(layer)
    assert not dist.is_initialized()


def test_several_ranks_need_a_process_group_to_reduce_gradients() -> None:
    assert not dist.is_initialized()
    buffers = Buffer.threads(2, num_experts=EXPERTS, device="cpu")
    layer = seeded_layer(buffers[0])
    for function in (reduce_gradients, lambda layer: clip_gradients(layer, 1.0)):
        with pytest.raises(CallerError, match=r"buffer has 2 ranks, and torch\.distributed is not initialized"):
            function(layer)
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
@pytest.mark.parametrize("hidden", [HIDDEN, 7168, 12])  # 12 is not a multiple of 8: PyTorch multiplies
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_weights_are_applied_in_f32(device: str, hidden: int, given: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator(device).manual_seed(1)
    with Buffer(num_experts=EXPERTS, device=device) as buffer:
        for rows in (0, 1, 20_000 if hidden == HIDDEN else 1001):

            def random(*shape: int) -> torch.Tensor:
                return torch.randn(shape, device=device, generator=generator)

            outputs = random(rows, hidden).to(given).requires_grad_()
            weights = random(rows).requires_grad_()
            grad = random(rows, hidden).to(dtype)
            weighted = weight_rows(outputs, weights, dtype, buffer)
            plain = (outputs * weights[:, None]).to(dtype)
            assert torch.equal(weighted, plain)
            found = torch.autograd.grad(weighted, (outputs, weights), grad)
            expected = torch.autograd.grad(plain, (outputs, weights), grad)
            assert torch.equal(found[0], expected[0])
            exact = (outputs.double() * grad.double()).sum(dim=1)
            torch.testing.assert_close(found[1].double(), exact, rtol=1e-4, atol=1e-4)


def test_weights_have_no_second_derivative() -> None:
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        rows, weights = torch.randn(3, 8, requires_grad=True), torch.rand(3, requires_grad=True)
        grads = torch.autograd.grad(
            weight_rows(rows, weights, torch.float32, buffer).square().sum(), (rows, weights), create_graph=True
        )
        with pytest.raises(RuntimeError, match="differentiate twice"):
            sum(grad.square().sum() for grad in grads).backward()


def test_a_balance_loss_without_gradient_is_warned_of() -> None:
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        layer = MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK, balance_coef=0.1)
        x = torch.randn(5, HIDDEN, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False)
        with torch.no_grad():
            layer(x.detach())
            layer.eval()(x)
        with pytest.warns(UserWarning, match="balance_loss has no gradient.*use_reentrant=False"):
            checkpoint(layer.train(), x, use_reentrant=True)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this PyTorch has no grouped product")
def test_grouped_experts_equal_experts_one_by_one() -> None:
    with Buffer(num_experts=4, device="cpu") as buffer:
        experts = GroupedExperts(buffer, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
    counts = torch.tensor([16, 0, 48, 32])
    unused = 16
    grads = []
    for compute in (_at_once, one_by_one):
        rows = torch.randn(int(counts.sum()) + unused, HIDDEN, generator=torch.Generator().manual_seed(1))
        rows = rows.bfloat16().requires_grad_()
        outputs = compute(rows, experts.gate_up, experts.down, counts)[:-unused]
        outputs.square().sum().backward()
        grads.append((outputs, rows.grad[:-unused], *(p.grad for p in experts.parameters())))
        experts.zero_grad()
    for grouped, single in zip(*grads, strict=True):
        assert single.abs().max() > 0
        close(grouped, single.double(), 2e-2, "grouped")


def test_balance_loss_is_one_when_balanced_and_grows_with_skew() -> None:
    torch.manual_seed(0)
    router = Router(HIDDEN, EXPERTS, TOPK, balance_coef=0.5)
    tokens = torch.randn(4096, HIDDEN)
    balanced = router(tokens).balance_loss
    with torch.no_grad():
        router.weight[0] = 3 * tokens.mean(dim=0).sign()
    tokens = tokens + tokens.mean(dim=0).sign()
    skewed = router(tokens).balance_loss
    assert 0.5 <= balanced < 0.6 and skewed > 1.2 * balanced
    skewed.backward()
    assert router.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topk": 3}, r"topk is 3, must be from 1 to .* 2"),
        ({"topk": 1.5}, r"topk is 1\.5"),
        ({"hidden": -64}, "hidden is -64, must be 1 or more"),
        ({"intermediate": 0}, "intermediate is 0, must be 1 or more"),
        ({"shared_intermediate": -1}, "shared_intermediate is -1, must be 0 or more"),
        ({"capacity_factor": 0.0}, r"capacity_factor is 0\.0, must be a positive number"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
    ],
)
def test_wrong_options_of_a_layer_are_refused(options: dict[str, Any], text: str) -> None:
    with Buffer(num_experts=2, device="cpu") as buffer, pytest.raises(CallerError, match=text):
        MoELayer(buffer, **{"hidden": HIDDEN, "intermediate": INTERMEDIATE, "topk": 1, **options})


def test_tokens_that_are_no_numbers_with_a_fraction_are_refused() -> None:
    with Buffer(num_experts=2, device="cpu") as buffer:
        layer = MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=1)
        for dtype in (torch.int32, torch.bool):
            with pytest.raises(CallerError, match=f"expected a floating-point type, found {dtype}"):
                layer(torch.zeros(3, HIDDEN, dtype=dtype))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(CallerError, match="op is 'max'"):
        reduce_gradients(torch.nn.Linear(1, 1), op="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3, HIDDEN + 8), (HIDDEN, 3), ()])
def test_another_hidden_is_refused(shape: tuple[int, ...]) -> None:
    with Buffer(num_experts=2, device="cpu") as buffer:
        layer = MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=1)
        with pytest.raises(CallerError, match=rf"x: expected \[\.\.\., {HIDDEN}\], the layer's hidden, found shape"):
            layer(torch.ones(shape))


def batch(rank: int) -> Tensor:
    return torch.randn(TOKENS[rank], HIDDEN, generator=torch.Generator().manual_seed(100 + rank))


def objective(layer: MoELayer, x: Tensor, count: int) -> Tensor:
    return (layer(x).square().sum() + x.shape[0] * layer.balance_loss) / count


def train_once(here: Rank) -> tuple[Any, Any]:
    ranks = here.size
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        layer = seeded_layer(buffer, balance_coef=0.1, balance_group=here.group, shared_intermediate=16)
        count = sum(TOKENS[:ranks])
        grads = {}
        for op, scale in (("sum", 1.0), ("mean", ranks)):
            layer.zero_grad()
            (scale * objective(layer, batch(here.rank), count)).backward()
            reduce_gradients(layer, op=op)
            grads[op] = {name: local_part(parameter.grad).clone() for name, parameter in layer.named_parameters()}
        trained = step(buffer, shared_intermediate=16)
        dist.barrier()
    return trained, grads


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_train_like_one(ranks: int) -> None:
    """The layer in gloo processes: reduced gradients equal those of one process with the whole batch."""
    loaded = world_of_processes(ranks, "cpu").run(train_once)
    check([trained for trained, _ in loaded], 1e-4)

    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        layer = seeded_layer(buffer, balance_coef=0.1, shared_intermediate=16)
        whole = torch.cat([batch(rank) for rank in range(ranks)])
        objective(layer, whole, len(whole)).backward()
    for op in ("sum", "mean"):
        for name, parameter in layer.named_parameters():
            own = [grads[op][name] for _, grads in loaded]
            if not name.startswith("experts."):
                assert all(torch.equal(own[0], other) for other in own), "dense gradients must agree on all ranks"
            found = torch.cat(own) if name.startswith("experts.") else own[0]
            close(found, parameter.grad.double(), 1e-4, f"{op} of {name}")


def train_on_gpu(here: Rank) -> list[Any]:
    with Buffer(here.group, num_experts=EXPERTS) as buffer:
        assert buffer.backend == "cuda"
        bf16, most = torch.bfloat16, TOPK * sum(TOKENS) + 16 * EXPERTS
        static = step(buffer, bf16, capacity=most + -most % 16)
        trained = [step(buffer), step(buffer, bf16), static]
        dist.barrier()
    return trained


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_layer_on_gpus() -> None:
    ranks = max(count for count in (1, 2, 4) if count <= torch.cuda.device_count())
    loaded = world_of_processes(ranks, "cuda").run(train_on_gpu)
    for case, tolerance in enumerate((1e-3, 6e-2, 6e-2)):
        check([rank[case] for rank in loaded], tolerance)
