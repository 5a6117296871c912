"""`(rows * weights[:, None]).to(dtype)` and its gradients, in one pass each.

PyTorch makes float32 copies of all rows in between, or multiplies bf16 by f32 at a third of a GPU's memory speed. On
the CPU the result is written to registered memory, where peers read it, so combine need not copy it.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (torch.autograd.Function.apply has no types.)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ops
from .buffer import Buffer


def weight_rows(rows: Tensor, weights: Tensor, dtype: torch.dtype, buffer: Buffer) -> Tensor:
    """Multiplies each row by its weight in float32 and rounds once. Differentiable. Local to this rank.

    Args:
        rows: bfloat16 or float32 [R, H].
        weights: float32 [R].
        dtype: The type of the result.
        buffer: The buffer in whose registered memory a result on the CPU lies.

    Returns:
        [R, H] of type `dtype`.
    """
    types = {rows.dtype, dtype} <= {torch.bfloat16, torch.float32}
    # A compiler fuses the expression into one kernel.
    if torch.compiler.is_compiling() or not types or rows.shape[1] % 8:
        return (rows * weights[:, None]).to(dtype)
    return _WeightRows.apply(rows, weights, dtype, buffer)


class _WeightRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, dtype: torch.dtype, buffer: Buffer) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.buffer = buffer
        return ops.weight_rows(buffer._end, rows, weights, dtype)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weights = ctx.saved_tensors
        grad_rows, grad_weights = ops.weight_rows(ctx.buffer._end, grad, weights, rows.dtype, rows)
        return grad_rows, grad_weights, None, None
