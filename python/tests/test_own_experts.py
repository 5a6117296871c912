"""Layers whose experts are modules of the user: `LocalExperts` and `TokenDispatcher`."""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hybrid_ep import Buffer, CallerError, MoELayer, TokenDispatcher
from hybrid_ep.moe import (
    LocalExperts,
    clip_gradients,
    expert_parameters,
    local_part,
    parameter_groups,
    reduce_gradients,
)
from process_worlds import Rank, world_of_processes
from worlds import world

HIDDEN, EXPERTS, TOPK = 16, 4, 2


class Experts(LocalExperts):
    """One matrix and one bias for each expert."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self.weight = self.new_parameter(HIDDEN, HIDDEN, init=nn.init.xavier_uniform_)
        self.bias = self.new_parameter(HIDDEN, init=functools.partial(nn.init.normal_, std=0.1))

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        counts = tokens_per_expert.tolist()
        *parts, unused = rows.split([*counts, len(rows) - sum(counts)])
        weight, bias = local_part(self.weight), local_part(self.bias)
        outputs = [part @ weight[expert] + bias[expert] for expert, part in enumerate(parts)]
        return torch.cat([*outputs, torch.zeros_like(unused)])


class Plain(nn.Module):
    """The same without `LocalExperts`: plain parameters of this rank's experts."""

    def __init__(self, buffer: Buffer, marked: bool) -> None:
        super().__init__()
        own = buffer.local_experts
        self.weight = nn.Parameter(torch.stack([torch.full((HIDDEN, HIDDEN), 0.1 * e + 0.1) for e in own]))
        if marked:
            self.weight.expert_parallel = True  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        parts = rows.split(tokens_per_expert.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, self.weight, strict=True)])


class Modules(nn.Module):
    """An `nn.Module` for each expert, as docs/python.md shows it."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        seed = int(torch.randint(2**62, ()))
        self.experts = nn.ModuleDict()
        for expert in buffer.local_experts:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + expert)
                self.experts[str(expert)] = nn.Linear(HIDDEN, HIDDEN)
        for parameter in self.parameters():
            parameter.expert_parallel = True  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        counts = tokens_per_expert.tolist()
        *parts, unused = rows.split([*counts, len(rows) - sum(counts)])
        outputs = [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
        return torch.cat([*outputs, torch.zeros_like(unused)])


class Layer(nn.Module):
    def __init__(self, buffer: Buffer, experts: Callable[[Buffer], nn.Module] = Experts, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.dispatcher = TokenDispatcher(buffer, **options)
        self.experts = experts(buffer)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(dim=-1).topk(TOPK)
        received = self.dispatcher.dispatch(x, experts, weights)
        outputs = self.experts(received.tokens, received.tokens_per_expert)
        return self.dispatcher.combine(outputs, received)


def tokens_of(rank: int) -> Tensor:
    return torch.randn(6 + 3 * rank, HIDDEN, generator=torch.Generator().manual_seed(rank))


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(layer: nn.Module, batches: list[int]) -> dict[str, Tensor]:
    """The outputs of some ranks' tokens, the reduced gradients, and their norm."""
    found = {}
    for batch in batches:
        y = layer(tokens_of(batch))
        y.square().sum().backward()
        found[f"y{batch}"] = y.detach()
    reduce_gradients(layer, op="sum")
    found["norm"] = clip_gradients(layer, 1e9)
    for name, parameter in layer.named_parameters():
        found[name] = whole(parameter.grad)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("experts", [Experts, Modules])
def test_experts_of_the_user_train_alike_on_any_number_of_ranks(experts: Callable[[Buffer], nn.Module]) -> None:
    def work(here: Rank) -> dict[str, Tensor]:
        with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
            return train(Layer(buffer, experts), [*range(here.rank, 2, here.size)])

    (alone,), two = (world_of_processes(ranks, "cpu").run(work) for ranks in (1, 2))
    for found in two:
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], msg=lambda text, name=name: f"{name}: {text}")
    assert {name for found in two for name in found} == alone.keys()


def replaced(buffer: Buffer) -> MoELayer:
    """A `MoELayer` whose experts are a module of the user."""
    torch.manual_seed(7)
    layer = MoELayer(buffer, HIDDEN, 24, topk=TOPK)
    layer.experts = Modules(buffer)  # type: ignore[assignment]
    return layer


def test_the_experts_of_a_layer_may_be_replaced() -> None:
    def work(here: Rank) -> dict[str, Tensor]:
        with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
            return train(replaced(buffer), [*range(here.rank, 2, here.size)])

    (alone,), two = (world_of_processes(ranks, "cpu").run(work) for ranks in (1, 2))
    for found in two:
        for name, value in found.items():
            torch.testing.assert_close(value, alone[name], msg=lambda text, name=name: f"{name}: {text}")
    assert {name for found in two for name in found} == alone.keys()
    assert "experts.experts.3.weight" in alone and alone["router.weight"].any()


def test_a_layer_with_replaced_experts_learns() -> None:
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        layer, x = replaced(buffer), tokens_of(0)
        optimizer = torch.optim.AdamW(parameter_groups(layer), lr=1e-2)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (layer(x) - x).square().mean()
            loss.backward()
            reduce_gradients(layer)
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] / 2, losses


def test_the_router_may_have_sigmoids_and_a_bias_of_the_choice() -> None:
    """Like the router of DeepSeek-V3: the bias counts for the choice, but not for the weights."""
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        layer, x = Layer(buffer), tokens_of(0)
        bias = torch.tensor([5.0, 0.0, 0.0, 0.0])
        scores = layer.router(x).sigmoid()
        chosen = (scores.detach() + bias).topk(TOPK).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(dim=1, keepdim=True)
        received = layer.dispatcher.dispatch(x, chosen, weights)
        y = layer.dispatcher.combine(layer.experts(received.tokens, received.tokens_per_expert), received)
        assert (chosen == 0).any(dim=1).all()
        expected = sum(
            (x @ layer.experts.weight[e] + layer.experts.bias[e])  # type: ignore[operator, index]
            * (weights * (chosen == e)).sum(dim=1, keepdim=True)
            for e in range(EXPERTS)
        )
        torch.testing.assert_close(y, expected)
        (of_router,) = torch.autograd.grad(y.square().sum(), layer.router.weight, retain_graph=True)
        (right,) = torch.autograd.grad(expected.square().sum(), layer.router.weight)  # type: ignore[union-attr]
        torch.testing.assert_close(of_router, right)


def test_experts_differ_and_follow_from_the_seed() -> None:
    def work(buffer: Buffer) -> Tensor:
        return Experts(buffer).weight.detach()

    torch.manual_seed(3)
    (alone,) = world(work, 1, experts=EXPERTS)
    assert len(alone.flatten(1).unique(dim=0)) == EXPERTS
    torch.manual_seed(3)
    (again,) = world(work, 1, experts=EXPERTS)
    assert torch.equal(alone, again)


def test_start_values_may_come_from_functions_without_a_generator() -> None:
    """Each expert's values then follow from the seed and its index, too, and the generators of the ranks stay equal."""

    (alone,), (zero, one) = (world_of_processes(ranks, "cpu").run(start_values) for ranks in (1, 2))
    assert not alone[0].any() and alone[1].unique(dim=0).shape == (EXPERTS, HIDDEN)
    assert torch.equal(torch.cat([zero[1], one[1]]), alone[1])
    assert zero[2] == one[2] == alone[2]


def start_values(here: Rank) -> tuple[Tensor, Tensor, Tensor]:
    """A parameter of zeros, one of random numbers, and a draw from the global generator after them."""
    torch.manual_seed(3)
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        experts = LocalExperts(buffer)
        shift = experts.new_parameter(HIDDEN, init=nn.init.zeros_)
        noise = experts.new_parameter(HIDDEN, init=lambda part: part.copy_(torch.randn(HIDDEN)))
        return shift.detach(), noise.detach(), torch.rand(1)


def steps(here: Rank, layer: Layer, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Trains on the same four batches with any number of ranks."""
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in range(here.rank, 4, here.size):
            loss = layer(tokens_of(batch)).square().sum()
            loss.backward()
            total += loss.detach()
        reduce_gradients(layer, op="sum")
        optimizer.step()
        if here.size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def trained(here: Rank, path: str, experts: Callable[[Buffer], nn.Module], resumes: bool) -> list[float]:
    """Trains three steps; saves after one of them, or continues from that checkpoint with two. Returns all losses."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        layer = Layer(buffer, experts)
        optimizer = torch.optim.AdamW(parameter_groups(layer), lr=1e-2)
        losses = []
        if resumes:
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.zero_()
        else:
            losses = steps(here, layer, optimizer, 1)
        model, optim = get_state_dict(layer, optimizer, options=flat)
        state = {"model": model, "optim": optim}
        if resumes:
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                layer, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=flat
            )
        else:
            dcp.save(state, checkpoint_id=path)
        return losses + steps(here, layer, optimizer, 2)


@pytest.mark.parametrize("experts", [Experts, Modules])
def test_training_goes_on_from_a_checkpoint_on_another_number_of_ranks(
    experts: Callable[[Buffer], nn.Module], tmp_path: Path
) -> None:
    zero, one = world_of_processes(2, "cpu").run(trained, str(tmp_path), experts, False)
    assert zero == one and zero[2] < zero[1] < zero[0]
    for ranks in (1, 2, 4):
        for losses in world_of_processes(ranks, "cpu").run(trained, str(tmp_path), experts, True):
            assert losses == pytest.approx(zero[1:], rel=1e-5), f"{ranks} ranks"


def save(here: Rank, path: str, experts: Callable[[Buffer], nn.Module]) -> dict[str, Tensor]:
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        layer = Layer(buffer, experts)
        with torch.no_grad():
            for parameter in expert_parameters(layer):
                local_part(parameter).add_(torch.arange(10.0)[buffer.local_experts.start])
        dcp.save({"layer": layer.state_dict()}, checkpoint_id=path)
        return {name: whole(value) for name, value in layer.state_dict().items()}


def load(here: Rank, path: str, experts: Callable[[Buffer], nn.Module]) -> dict[str, Tensor]:
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        layer = Layer(buffer, experts)
        state = {"layer": layer.state_dict()}
        dcp.load(state, checkpoint_id=path)
        layer.load_state_dict(state["layer"])
        return {name: whole(value) for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("experts", [Experts, Modules])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_has_the_experts_of_all_ranks(
    ranks: int, experts: Callable[[Buffer], nn.Module], tmp_path: Path
) -> None:
    zero, one = world_of_processes(2, "cpu").run(save, str(tmp_path), experts)
    saved, loaded = zero | one, {}
    for found in world_of_processes(ranks, "cpu").run(load, str(tmp_path), experts):
        loaded |= found
        for name, value in found.items():
            assert torch.equal(value, saved[name]), name
    assert loaded.keys() == saved.keys()


def test_copies_keep_their_experts() -> None:
    def work(buffer: Buffer) -> None:
        layer = Layer(buffer)
        stream = io.BytesIO()
        torch.save(layer, stream)
        stream.seek(0)
        with buffer.attach():
            again = torch.load(stream, weights_only=False)
        assert expert_parameters(again) == [again.experts.weight, again.experts.bias]
        torch.testing.assert_close(again.state_dict(), layer.state_dict())

    world(work, 2, experts=EXPERTS)


def test_parameters_without_an_expert_dimension_are_refused() -> None:
    class Scaled(LocalExperts):
        def __init__(self, buffer: Buffer) -> None:
            super().__init__(buffer)
            self.scale = nn.Parameter(torch.ones(HIDDEN))

    said = r"scale: .*expected \[4, \.\.\.\], found \[16\]; set other parameters on"
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer, pytest.raises(CallerError, match=said):
        Scaled(buffer)


@pytest.mark.parametrize("capacity", [None, 64])
def test_rows_after_the_last_expert(capacity: int | None) -> None:
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        layer = Layer(buffer, capacity=capacity)
        x = tokens_of(0)
        weights, chosen = layer.router(x).softmax(dim=-1).topk(TOPK)
        parts = [
            (x @ layer.experts.weight[e] + layer.experts.bias[e])  # type: ignore[operator, index]
            * (weights * (chosen == e)).sum(dim=-1, keepdim=True)
            for e in range(EXPERTS)
        ]
        torch.testing.assert_close(layer(x), torch.stack(parts).sum(dim=0))


# ---- gradients without LocalExperts


def test_several_ranks_need_a_process_group() -> None:
    """Even if the experts are not `GroupedExperts`, or the module has only the dispatcher or the buffer."""
    assert not dist.is_initialized()
    buffers = Buffer.threads(2, num_experts=EXPERTS, device="cpu")
    holder = nn.Linear(2, 2)
    holder.buffer = buffers[0]  # type: ignore[assignment]
    modules = [Layer(buffers[0]), Layer(buffers[0], lambda buffer: Plain(buffer, True)), nn.Sequential(holder)]
    for module in modules:
        for function in (reduce_gradients, lambda module: clip_gradients(module, 1.0)):
            with pytest.raises(CallerError, match=r"buffer has 2 ranks, and torch\.distributed is not initialized"):
                function(module)
    for buffer in buffers:
        buffer.close()


def test_a_missing_expert_group_is_refused_for_plain_experts() -> None:
    def work(here: Rank) -> list[str]:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        said = []
        with Buffer(halves[here.rank // 2], num_experts=EXPERTS, device="cpu") as buffer:
            layer = Layer(buffer, lambda buffer: Plain(buffer, True))
            for function in (reduce_gradients, lambda layer: clip_gradients(layer, 1.0)):
                try:
                    function(layer)
                except CallerError as error:
                    said.append(str(error))
        return said

    for said in world_of_processes(4, "cpu").run(work):
        assert len(said) == 2
        assert all("so 2 ranks have each expert, and expert_group is missing" in text for text in said), said


@pytest.mark.parametrize("marked", [True, False])
def test_experts_that_are_not_marked_are_warned_of(marked: bool) -> None:
    def work(here: Rank) -> tuple[list[str], list[float]]:
        with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
            layer = Layer(buffer, lambda buffer: Plain(buffer, marked))
            if not marked:
                with pytest.raises(
                    CallerError, match=r"experts\.weight of rank 1 differs from that of rank 0.* mark it"
                ):
                    reduce_gradients(layer)
                torch.nn.init.ones_(layer.experts.weight)  # type: ignore[arg-type, union-attr]
            layer(tokens_of(here.rank)).sum().backward()
            before = layer.experts.weight.grad.clone()  # type: ignore[union-attr, operator]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                reduce_gradients(layer)
            said = [str(warning.message) for warning in caught if "marked as an expert's" in str(warning.message)]
            return said, [torch.equal(layer.experts.weight.grad, before / 2)]  # type: ignore[arg-type]

    for said, kept in world_of_processes(2, "cpu").run(work):
        assert (len(said), kept) == ((0, [True]) if marked else (1, [False]))


# ---- wrong arguments of combine


def test_wrong_arguments_of_combine_are_named() -> None:
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        dispatcher = TokenDispatcher(buffer)
        x, chosen = tokens_of(0), torch.tensor([[0, 1]] * 6)
        received = dispatcher.dispatch(x, chosen, torch.ones(6, 2))
        plain = buffer.dispatch(x, chosen, torch.ones(6, 2))
        unweighted = buffer.dispatch_with_permute(x, chosen)
        rows = received.tokens
        for outputs, given, expected in [
            (rows[:-1], received, r"outputs: expected \[12, H\], one row for each.*, found shape \[11, 16\]"),
            (rows[0], received, r"outputs: expected \[12, H\].*found shape \[16\]"),
            ([rows], received, "outputs: expected a tensor, found list"),
            (rows, received.handle, "received: expected what dispatch returned, .* found Handle"),
            (rows, rows, "received: expected what dispatch returned, .* found Tensor"),
            (rows, plain, "received: is the result of a dispatch in plain mode"),
            (rows, unweighted, "received: has no weights"),
        ]:
            with pytest.raises(CallerError, match=expected):
                dispatcher.combine(outputs, given)  # type: ignore[arg-type]
        assert dispatcher.combine(rows, received).shape == x.shape
