"""The gradients of the registered operators.

    dispatch   tokens -> rows      backward: combine
    combine    rows   -> tokens    backward: dispatch

Backward calls a collective operator, so its arguments must depend only on facts that are equal on all ranks: on which
inputs need gradients, never on which outputs have a gradient on this rank. Autograd fills in zeros for an output
without a gradient. `_calls` imports this module to register the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._library import library
from .errors import CallerError
from .ops import chosen

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


_Backward = Callable[..., tuple[Tensor | None, ...]]


def _once(operator: str, backward: _Backward) -> _Backward:
    """Wraps `backward` so that a double backward raises an error instead of returning wrong gradients."""

    def run(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled() and any(grad.requires_grad for grad in grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not differentiable:
            return results
        there = [result for result in results if result is not None]
        once = iter(_Once.apply(operator, len(there), *there, *grads))
        return tuple(None if result is None else next(once) for result in results)

    return run


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tokens, _, _, topk_idx, handle, buffer, _, fp8, permuted, _, _, _ = inputs
    out, out_scales, _, out_map = output
    is_fp8 = fp8 is not None or tokens.dtype == torch.float8_e4m3fn
    # Not a saved tensor: hooks that move saved tensors would copy the handle's number and drop its storage, the owner.
    ctx.handle = handle
    ctx.save_for_backward(topk_idx)
    ctx.buffer, ctx.permuted, ctx.tokens = buffer, permuted, tokens.shape[0]
    ctx.of_tokens = ctx.needs_input_grad[0] and not is_fp8
    ctx.mark_non_differentiable(out_scales, out_map, *([out] if is_fp8 else []))


def _dispatch_backward(ctx: Any, grad: Tensor, _scales: Tensor, grad_probs: Tensor, _map: Tensor) -> Any:
    (topk_idx,) = ctx.saved_tensors
    of_weights = ctx.needs_input_grad[2]
    rows = grad if ctx.of_tokens else grad_probs.new_zeros((grad_probs.shape[0], _NARROWEST), dtype=torch.bfloat16)
    of_tokens, dense = torch.ops.hybrid_ep.combine(
        rows, grad_probs if of_weights else None, ctx.handle, ctx.buffer, ctx.tokens, ctx.permuted, None
    )
    weights = None
    if of_weights:
        weights = dense if topk_idx is None else chosen(dense, topk_idx)
    return of_tokens if ctx.of_tokens else None, None, weights, *[None] * 9


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, _, handle, buffer, _, permuted, _ = inputs
    ctx.handle = handle
    ctx.buffer, ctx.permuted, ctx.rows = buffer, permuted, rows.shape[0]


def _combine_backward(ctx: Any, grad: Tensor, grad_probs: Tensor) -> Any:
    of_rows, of_probs = ctx.needs_input_grad[:2]
    tokens = grad if of_rows else grad_probs.new_zeros((grad_probs.shape[0], _NARROWEST), dtype=torch.bfloat16)
    rows, _, probs, _ = torch.ops.hybrid_ep.dispatch(
        tokens, None, grad_probs if of_probs else None, None, ctx.handle, ctx.buffer,
        False, None, ctx.permuted, ctx.rows, True, False,
    )  # fmt: skip
    return rows if of_rows else None, probs if of_probs else None, *[None] * 5


torch.library.register_autograd(
    "hybrid_ep::dispatch", _once("dispatch", _dispatch_backward), setup_context=_dispatch_setup, lib=library
)
torch.library.register_autograd(
    "hybrid_ep::combine", _once("combine", _combine_backward), setup_context=_combine_setup, lib=library
)
