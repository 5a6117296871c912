"""`MoELayer` under `torch.compile`: graphs, breaks and recompilations are counted."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hybrid_ep import Buffer, MoELayer, _library
from hybrid_ep.experts import local_part
from process_worlds import Rank, world_of_processes

# Compiles everything except machine code, which would take seconds.
QUICK = "aot_eager"
OPTIONS: list[dict[str, Any]] = [{}, {"capacity_factor": 1.25, "balance_coef": 0.1, "shared_intermediate": 8}]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def buffer(device: str) -> Buffer:
    (buffer,) = Buffer.threads(1, num_experts=8, device=device, workers=1)
    return buffer


def layer_of(buffer: Buffer, **options: Any) -> MoELayer:
    torch.manual_seed(5)
    return MoELayer(buffer, 16, 24, topk=2, **options)


def step(layer: Any, parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    """Returns the output and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad(y.square().sum() + layer.balance_loss, (x, *parameters))
    return [y.detach(), *map(local_part, grads)]


def assert_same(layer: nn.Module, compiled: Any, tokens: int, device: torch.device) -> None:
    x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens)).to(device)
    parameters = list(layer.parameters())
    for found, expected in zip(step(compiled, parameters, x), step(layer, parameters, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_recipe_is_one_graph_for_any_number_of_tokens(buffer: Buffer, options: dict[str, Any]) -> None:
    layer = layer_of(buffer, capacity=256, **options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=QUICK)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (9, 20, 33, 7):
            assert_same(layer, compiled, tokens, buffer.device)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_without_the_recipe_recompilations_do_not_grow(buffer: Buffer) -> None:
    """The second number of tokens makes the graph dynamic; further numbers do not recompile."""
    layer = layer_of(buffer, capacity=256)
    compiled = torch.compile(layer, fullgraph=True, backend=QUICK)
    for tokens in (9, 20):
        assert_same(layer, compiled, tokens, buffer.device)
    assert counters["stats"]["unique_graphs"] == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (33, 7, 12, 50):
            assert_same(layer, compiled, tokens, buffer.device)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_without_a_capacity_one_setting_keeps_the_graph_whole(buffer: Buffer) -> None:
    layer = layer_of(buffer)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=QUICK)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (9, 20, 7):
                assert_same(layer, compiled, tokens, buffer.device)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_without_both_it_breaks_at_the_dispatch_alone(buffer: Buffer) -> None:
    layer = layer_of(buffer)
    x = torch.randn(9, 16, device=buffer.device)
    found = torch._dynamo.explain(layer)(x)
    # There is one place. The compiler also ends the graphs of the functions that call the operator there.
    assert len({str(reason.user_stack[-1]) for reason in found.break_reasons}) == 1, found.break_reasons
    assert (found.graph_count, found.graph_break_count) == (4, 3)
    assert all("hybrid_ep.dispatch" in str(reason.reason) for reason in found.break_reasons), found.break_reasons


def test_machine_code_gives_the_same(buffer: Buffer) -> None:
    layer = layer_of(buffer, capacity=256, shared_intermediate=8)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (9, 20):
        assert_same(layer, compiled, tokens, buffer.device)


@contextlib.contextmanager
def without_cached_graphs() -> Iterator[None]:
    """Traces and lowers again. PyTorch's cache of graphs on disk does not know how operators are registered.

    The caches of machine code stay. `force_disable_caches` would also compile the precompiled header in each test.
    """
    # Imports by name: the settings cannot be sent to the process of a rank.
    lowering, tracing = (importlib.import_module(f"torch.{of}.config") for of in ("_inductor", "_functorch"))
    with lowering.patch(fx_graph_cache=False), tracing.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def no_cache() -> Iterator[None]:
    with without_cached_graphs():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collective operators that run, in order."""
    ran: list[str] = []

    def recorded(name: str) -> Any:
        operator = getattr(_library, name)

        def record(*args: Any) -> Any:
            ran.append(name)
            return operator(*args)

        return record

    for name in ("preprocess", "dispatch", "combine"):
        monkeypatch.setattr(_library, name, recorded(name))
    return ran


@pytest.mark.usefixtures("no_cache")
def test_no_collective_is_dropped_on_a_rank_with_0_tokens(buffer: Buffer, calls: list[str]) -> None:
    """The outputs of that rank have no elements, so the compiler knows them without a call. Other ranks wait for the
    call."""
    layer = layer_of(buffer, capacity=256)
    compiled = torch.compile(lambda x: layer(x * 2).square().sum(), fullgraph=True, dynamic=True)
    forward, backward = ["preprocess", "dispatch", "combine"], ["dispatch", "combine"]
    for tokens in (9, 0):
        calls.clear()
        loss = compiled(torch.randn(tokens, 16, device=buffer.device, requires_grad=True))
        assert calls == forward
        loss.backward()
        assert calls == forward + backward
        calls.clear()
        with torch.no_grad():
            compiled(torch.randn(tokens, 16, device=buffer.device))
        assert calls == forward


@pytest.mark.usefixtures("no_cache")
def test_independent_collectives_keep_their_order(buffer: Buffer, calls: list[str]) -> None:
    def forward(x: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
        first = buffer.dispatch(x, idx, capacity=64)
        second = buffer.dispatch(x + 1, idx, capacity=64)
        third = buffer.dispatch(x, handle=first.handle)
        last = third.tokens.sum() + buffer.combine(second.tokens, second.handle).tokens
        return buffer.combine(first.tokens, first.handle).tokens, last

    compiled = torch.compile(forward, fullgraph=True, dynamic=True)
    for tokens in (9, 0):
        idx = torch.zeros(tokens, 1, dtype=torch.long, device=buffer.device)
        calls.clear()
        compiled(torch.randn(tokens, 16, device=buffer.device), idx)
        assert calls == ["preprocess", "dispatch"] * 2 + ["dispatch", "combine", "combine"]


def test_a_rank_with_0_tokens_trains_with_the_others(device: str) -> None:
    def work(here: Rank) -> None:
        torch._dynamo.reset()
        with without_cached_graphs(), Buffer(here.group, num_experts=8, device=here.device) as buffer:
            # The router of the second layer does not depend on the first layer if there are no tokens.
            layer = nn.Sequential(layer_of(buffer, capacity=256), layer_of(buffer, capacity=256))
            layer.balance_loss = 0.0
            compiled = torch.compile(layer, fullgraph=True, dynamic=True)
            compiled.balance_loss = 0.0
            for tokens in ((9, 20), (9, 0), (0, 20)):
                assert_same(layer, compiled, tokens[here.rank], buffer.device)

    # A rank waits while its peers compile.
    world_of_processes(2, device).run(work)


def test_sharded_experts_are_one_graph(device: str) -> None:
    """With a process group, parameters are DTensors, which the compiler traces."""

    def work(here: Rank) -> None:
        # Imported here: in the process of a rank this module's global is a copy.
        from torch._dynamo.utils import counters

        # Earlier tests in this process have compiled, too.
        torch._dynamo.reset()
        counters.clear()
        with Buffer(here.group, num_experts=8, device=here.device) as buffer:
            layer = layer_of(buffer, capacity=256)
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=QUICK)
            for tokens in (9, 20):
                assert_same(layer, compiled, tokens, buffer.device)
            assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]

    # A rank waits while its peers compile.
    world_of_processes(2, device).run(work)
