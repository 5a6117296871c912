"""The gradients of the operators.

    dispatch   tokens -> rows      backward: combine
    combine    rows   -> tokens    backward: dispatch

Both the registered operators and the functions `dispatch` and `combine` of this module have gradients. The functions
are for programs that run without a compiler, mode or tracer: PyTorch's dispatcher and its wrapper of registered
gradients take at least a hundred microseconds of host time for each call.

Backward calls a collective operator, so its arguments must depend only on facts that are equal on all ranks: on which
inputs need gradients, never on which outputs have a gradient on this rank. Autograd fills in zeros for an output
without a gradient. `_calls` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from ._library import call_combine, call_dispatch, library
from .errors import CallerError
from .ops import chosen, is_plain

__all__ = ["combine", "dispatch", "is_watched"]

# The number of active modes that see calls of PyTorch's operators.
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The state of `torch.jit.trace`; None outside of it.
_tracing: Callable[[], object] = torch._C._get_tracing_state

# The narrowest row that an operator can move: 16 bytes of bf16.
_NARROWEST = 8


class _Once(torch.autograd.Function):
    """The identity on gradients; differentiating them again raises an error."""

    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operator = operator
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise CallerError(f"the gradient of {ctx.operator} cannot be differentiated again")


def is_watched() -> bool:
    """Whether a compiler, a mode or a tracer must see calls of operators. A mode may keep results for checkpoints."""
    return torch.compiler.is_compiling() or _modes() > 0 or _tracing() is not None


_Backward = Callable[..., tuple[Tensor | None, ...]]


def _once(operator: str, backward: _Backward) -> _Backward:
    """Wraps `backward` so that a double backward raises an error instead of returning wrong gradients."""

    # The gradient of an output that is absent, or that nothing uses, is None in an eager call.
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled() and any(grad is not None and grad.requires_grad for grad in grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not differentiable:
            return results
        there = [result for result in results if result is not None]
        once = iter(_Once.apply(operator, len(there), *there, *grads))
        return tuple(None if result is None else next(once) for result in results)

    return run


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    tokens, _, _, topk_idx, handle, buffer, _, fp8, permuted, _, _, _ = inputs
    out, out_scales, _, out_map = output
    is_fp8 = fp8 is not None or tokens.dtype == torch.float8_e4m3fn
    # Not a saved tensor: hooks that move saved tensors would copy the number of the handle, and drop the storage that
    # owns the handle.
    ctx.handle = handle
    ctx.save_for_backward(topk_idx)
    ctx.buffer, ctx.permuted, ctx.tokens = buffer, permuted, tokens.shape[0]
    ctx.of_tokens = ctx.needs_input_grad[0] and not is_fp8
    apart = [out_scales, out_map, *([out] if is_fp8 else [])]
    ctx.mark_non_differentiable(*(tensor for tensor in apart if tensor is not None))


def _dispatch_backward(ctx: Any, grad: Tensor, _scales: Tensor, grad_probs: Tensor, _map: Tensor) -> Any:
    (topk_idx,) = ctx.saved_tensors
    of_weights = ctx.needs_input_grad[2]
    rows = grad if ctx.of_tokens else grad_probs.new_zeros((grad_probs.shape[0], _NARROWEST), dtype=torch.bfloat16)
    arguments = (rows, grad_probs if of_weights else None, ctx.handle, ctx.buffer, ctx.tokens, ctx.permuted, None)
    of_tokens, dense = (call_combine if _is_direct(grad, grad_probs) else torch.ops.hybrid_ep.combine)(*arguments)
    weights = None
    if of_weights:
        assert dense is not None
        weights = dense if topk_idx is None else chosen(dense, topk_idx)
    return of_tokens if ctx.of_tokens else None, None, weights, *[None] * 9


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    rows, _, handle, buffer, _, permuted, _ = inputs
    ctx.handle = handle
    ctx.buffer, ctx.permuted, ctx.rows = buffer, permuted, rows.shape[0]


def _combine_backward(ctx: Any, grad: Tensor, grad_probs: Tensor) -> Any:
    of_rows, of_probs = ctx.needs_input_grad[:2]
    tokens = grad if of_rows else grad_probs.new_zeros((grad_probs.shape[0], _NARROWEST), dtype=torch.bfloat16)
    arguments = (
        tokens, None, grad_probs if of_probs else None, None, ctx.handle, ctx.buffer,
        False, None, ctx.permuted, ctx.rows, True, False,
    )  # fmt: skip
    direct = _is_direct(grad, grad_probs)
    rows, _, probs, _ = (call_dispatch if direct else torch.ops.hybrid_ep.dispatch)(*arguments)
    return rows if of_rows else None, probs if of_probs else None, *[None] * 5


def _is_direct(*grads: Tensor | None) -> bool:
    """Whether a backward pass with these gradients can call an operator directly."""
    if is_watched():
        return False
    # `is_grads_batched` wraps gradients without a subclass. The wrapper has no memory.
    return all(grad is None or (is_plain(grad) and not is_legacy_batchedtensor(grad)) for grad in grads)


_dispatch_once = _once("dispatch", _dispatch_backward)
_combine_once = _once("combine", _combine_backward)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        outputs = call_dispatch(*inputs)
        _dispatch_setup(ctx, inputs, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _dispatch_once(ctx, *grads)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        outputs = call_combine(*inputs)
        _combine_setup(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _combine_once(ctx, *grads)


def dispatch(*arguments: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Like `torch.ops.hybrid_ep.dispatch`, for plain tensors outside compilers and modes. Absent outputs are None."""
    delivered: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] = _Dispatch.apply(*arguments)
    return delivered


def combine(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Like `torch.ops.hybrid_ep.combine`, with the restrictions of `dispatch`."""
    combined: tuple[Tensor, Tensor | None] = _Combine.apply(*arguments)
    return combined


torch.library.register_autograd("hybrid_ep::dispatch", _dispatch_once, setup_context=_dispatch_setup, lib=library)
torch.library.register_autograd("hybrid_ep::combine", _combine_once, setup_context=_combine_setup, lib=library)
