"""The registered operators: PyTorch's own checks, and equal results with and without a compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, CallerError, ops
from process_worlds import Rank, world_of_processes
from test_buffer import combine, dispatch
from worlds import make_case

MODES = [None, 4]
OP = torch.ops.hybrid_ep
# Compiles everything except machine code, which would take seconds.
QUICK = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def buffer(device: str) -> Buffer:
    (buffer,) = Buffer.threads(1, num_experts=4, device=device, workers=1)
    return buffer


def sample(buffer: Buffer, tokens: int = 6, hidden: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    case = make_case(ranks=1, experts=4, topk=2, hidden=hidden, tokens=[tokens])
    return tuple(t[0].to(buffer.device) for t in (case.tokens, case.topk_idx, case.topk_weights))  # type: ignore[return-value]


def layer(
    buffer: Buffer, pad: int | None, capacity: int | None
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """A minimal mixture of experts, in both modes."""

    def forward(x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        got = dispatch(buffer, pad, x * 2, idx, weights, capacity=capacity)
        assert got.probs is not None
        scale = got.probs[:, None] if pad is not None else got.probs.sum(1, keepdim=True)
        back = combine(buffer, pad, torch.tanh(got.tokens) * scale, got.handle, probs=got.probs)
        assert back.probs is not None
        return back.tokens + x, back.probs.sum(), got.overflow

    return forward


def gradients(function: Any, x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y, total, overflow = function(x, idx, weights)
    (y.square().sum() + 3 * total).backward()
    assert x.grad is not None and weights.grad is not None
    return y.detach(), total.detach(), overflow, x.grad, weights.grad


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pad", MODES)
def test_one_graph_with_a_capacity(buffer: Buffer, pad: int | None) -> None:
    eager = layer(buffer, pad, 24)
    compiled = torch.compile(eager, fullgraph=True)
    for tokens in (6, 6, 5):
        inputs = sample(buffer, tokens)
        assert_same(gradients(compiled, *inputs), gradients(eager, *inputs))
        with torch.no_grad():
            assert_same(compiled(*inputs), eager(*inputs))


@pytest.mark.parametrize("pad", MODES)
def test_one_graph_for_any_number_of_tokens(buffer: Buffer, pad: int | None) -> None:
    eager = layer(buffer, pad, 48)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=QUICK)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (6, 9, 3):
            inputs = sample(buffer, tokens)
            assert_same(gradients(compiled, *inputs), gradients(eager, *inputs))


@pytest.mark.parametrize("pad", MODES)
def test_one_graph_with_rows_that_depend_on_data(buffer: Buffer, pad: int | None) -> None:
    eager = layer(buffer, pad, None)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(eager, fullgraph=True)
        for tokens in (6, 5):
            inputs = sample(buffer, tokens)
            assert_same(gradients(compiled, *inputs), gradients(eager, *inputs))


@pytest.mark.parametrize("pad", MODES)
def test_without_a_capacity_the_graph_breaks_and_results_are_equal(buffer: Buffer, pad: int | None) -> None:
    eager = layer(buffer, pad, None)
    compiled = torch.compile(eager)
    for tokens in (6, 5):
        inputs = sample(buffer, tokens)
        assert_same(gradients(compiled, *inputs), gradients(eager, *inputs))


def test_activation_checkpoints(buffer: Buffer) -> None:
    """The backward pass repeats the operators of the forward pass."""
    from torch.utils.checkpoint import checkpoint

    layered = layer(buffer, 4, 48)

    def forward(x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        y, total, overflow = checkpoint(layered, x, idx, weights, use_reentrant=False)
        again, more, _ = checkpoint(layered, y, idx, weights, use_reentrant=False)
        return again, total + more, overflow

    compiled = torch.compile(forward, fullgraph=True)
    inputs = sample(buffer)
    assert_same(gradients(compiled, *inputs), gradients(forward, *inputs))


@pytest.mark.parametrize("pad", MODES)
def test_a_handle_from_outside(buffer: Buffer, pad: int | None) -> None:
    def forward(x: Tensor, handle: Any, weights: Tensor) -> Tensor:
        got = dispatch(buffer, pad, x, handle=handle, topk_weights=weights)
        assert got.probs is not None
        scale = got.probs[:, None] if pad is not None else got.probs.sum(1, keepdim=True)
        return combine(buffer, pad, got.tokens * scale, handle).tokens

    compiled = torch.compile(forward, fullgraph=True, backend=QUICK)
    for tokens in (6, 5):
        x, idx, weights = sample(buffer, tokens)
        handle = buffer.preprocess(idx, pad_multiple=pad)
        results = []
        for function in (compiled, forward):
            x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
            y = function(x, handle, weights)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, weights.grad))
        assert_same(*results)


@pytest.mark.parametrize("pad", MODES)
def test_a_handle_out_of_a_graph_owns_itself(buffer: Buffer, pad: int | None) -> None:
    compiled = torch.compile(lambda x, idx: dispatch(buffer, pad, x, idx, capacity=24), fullgraph=True, backend=QUICK)
    x, idx, _ = sample(buffer)
    got = compiled(x, idx)
    again = dispatch(buffer, pad, x, handle=got.handle)
    assert torch.equal(got.tokens, again.tokens)
    copy = got.handle._replace(tensor=got.handle.tensor.clone())
    del got, again
    with pytest.raises(CallerError, match="names no live"):
        dispatch(buffer, pad, x, handle=copy)


@pytest.mark.parametrize("fp8", ["f32", "ue8m0", "mxfp8"])
def test_fp8_in_a_graph(buffer: Buffer, fp8: str) -> None:
    def forward(x: Tensor, idx: Tensor) -> tuple[Tensor, ...]:
        got = buffer.dispatch_with_permute(x, idx, fp8=fp8, capacity=16)
        again = buffer.dispatch_with_permute(
            got.tokens[: x.shape[0]], handle=got.handle, scales=got.scales[: x.shape[0]]
        )
        assert got.scales is not None and again.scales is not None and got.tokens_per_expert is not None
        return got.tokens, got.scales, again.tokens, again.scales, got.tokens_per_expert

    x, idx, _ = sample(buffer, hidden=256)
    x = x.bfloat16()
    results = [function(x, idx) for function in (torch.compile(forward, fullgraph=True, backend=QUICK), forward)]
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_several_ranks_compiled(device: str) -> None:
    """Each rank compiles its own graph, since a graph contains the number of its buffer."""
    case = make_case()

    def work(here: Rank) -> None:
        # Earlier tests in this process have compiled, too.
        torch._dynamo.reset()
        with Buffer(here.group, num_experts=8, device=here.device) as buffer:
            inputs = [t[here.rank].to(here.device) for t in (case.tokens, case.topk_idx, case.topk_weights)]
            eager = layer(buffer, 4, 64)
            compiled = torch.compile(eager, fullgraph=True, backend=QUICK)
            assert_same(gradients(compiled, *inputs), gradients(eager, *inputs))

    # Processes: PyTorch does not support compiling in several threads. A rank waits while its peers compile.
    world_of_processes(4, device).run(work)


@pytest.mark.parametrize("pad", MODES)
@pytest.mark.parametrize("capacity", [None, 24])
@pytest.mark.parametrize("grad", [False, True])
def test_pytorch_finds_the_operators_well_registered(
    buffer: Buffer, pad: int | None, capacity: int | None, grad: bool
) -> None:
    x, idx, weights = sample(buffer)
    x.requires_grad_(grad)
    weights.requires_grad_(grad)
    number = buffer._number
    torch.library.opcheck(
        OP.preprocess.default, (idx, weights.detach(), number, False, pad, capacity, 4), test_utils=OF_SHAPES
    )
    handle = buffer.preprocess(idx, weights, pad_multiple=pad, capacity=capacity)
    rows = handle.rows
    dense = torch.zeros(6, 4, device=x.device).requires_grad_(grad)
    for arguments in (
        (x, None, weights, idx, handle.tensor, number, True, None, pad is not None, rows, True, pad is None),
        (x, None, None, None, handle.tensor, number, False, None, pad is not None, rows, True, pad is None),
        (x, None, dense, None, handle.tensor, number, False, None, pad is not None, rows, True, False),
    ):
        torch.library.opcheck(OP.dispatch.default, arguments)
    got = dispatch(buffer, pad, x.detach(), idx, weights.detach(), capacity=capacity)
    assert got.probs is not None
    out, probs = got.tokens.clone().requires_grad_(grad), got.probs.clone().requires_grad_(grad)
    for given in (None, probs):
        torch.library.opcheck(
            OP.combine.default, (out, given, got.handle.tensor, number, 6, pad is not None, torch.float32)
        )


# A handle is a new number in each call, so results are not compared; it has no gradient.
OF_SHAPES = ("test_schema", "test_faketensor")


def test_shapes_are_known_without_data(buffer: Buffer) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, idx, weights = sample(buffer, hidden=256)
    x = x.bfloat16()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (x, idx, weights)]
        got = buffer.dispatch_with_permute(*fake, capacity=24, fp8="mxfp8")
        assert got.tokens.shape == (24, 256) and got.tokens.dtype == torch.float8_e4m3fn
        assert got.scales is not None and got.scales.shape == (24, 8) and got.scales.dtype == torch.uint8
        assert got.probs is not None and got.probs.shape == (24,)
        back = buffer.combine_with_unpermute(got.tokens.to(torch.bfloat16), got.handle, probs=got.probs)
        assert back.tokens.shape == (6, 256) and back.probs is not None and back.probs.shape == (6, 4)


def test_a_graph_outlives_no_buffer(device: str) -> None:
    (buffer,) = Buffer.threads(1, num_experts=4, device=device, workers=1)
    x, idx, _ = sample(buffer)
    number, handle = buffer._number, buffer.preprocess(idx, pad_multiple=1)

    def forward(x: Tensor, handle: Tensor) -> Tensor:
        return OP.dispatch(x, None, None, None, handle, number, False, None, True, 12, False, False)[0]

    compiled = torch.compile(forward, fullgraph=True, backend=QUICK)
    compiled(x, handle.tensor)
    ops.end_of(number)
    del buffer
    with pytest.raises(CallerError, match="names no live"):
        compiled(x, handle.tensor)


EAGER_PROGRAM = """
import sys, torch
from hybrid_ep import Buffer, MoELayer
(buffer,) = Buffer.threads(1, num_experts=4, device={device!r}, workers=1)
tokens = torch.ones(6, 16, device={device!r}).requires_grad_()
idx = torch.arange(6, device={device!r})[:, None] % 4
got = buffer.dispatch_with_permute(tokens, idx, torch.ones(6, 1, device={device!r}).requires_grad_())
buffer.combine_with_unpermute(got.tokens, got.handle, probs=got.probs).tokens.sum().backward()
assert tokens.grad is not None
print("torch._dynamo" in sys.modules)
got, work = buffer.dispatch(tokens, idx, async_op=True)
work.wait()
assert "torch._dynamo" in sys.modules
"""


def test_a_program_that_compiles_nothing_does_not_import_the_compiler(device: str) -> None:
    """The import takes longer than all else that a short program does."""
    program = [sys.executable, "-c", EAGER_PROGRAM.format(device=device)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]
