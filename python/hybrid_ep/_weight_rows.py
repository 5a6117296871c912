"""`(rows * weights[:, None]).to(dtype)` and its gradients, without the f32 copies of all rows that PyTorch would make.

On the CPU those copies, in memory that is fresh each time, cost ten times what the products do. There rows are taken in
pieces that stay in a core's cache, and results are written where peers read them, which saves combine a copy. On a GPU
PyTorch multiplies bf16 by f32 at a third of the memory's speed: there is a kernel for it, and one for both gradients.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (torch.autograd.Function.apply and Tensor.split have no types.)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .buffer import Buffer


def weight_rows(rows: Tensor, weights: Tensor, dtype: torch.dtype, buffer: Buffer) -> Tensor:
    """Rows of type `dtype`, each multiplied by its weight in f32 and rounded once."""
    if torch.compiler.is_compiling():  # the compiler sees to all of this
        return (rows * weights[:, None]).to(dtype)
    return _WeightRows.apply(rows, weights, dtype, buffer)


class _WeightRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, dtype: torch.dtype, buffer: Buffer) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.buffer = buffer
        if rows.device.type != "cpu":
            if _has_kernel(rows, dtype):
                return ops.weight_rows(buffer._end, rows, weights, dtype)[0]
            return torch.mul(rows, weights[:, None], out=torch.empty_like(rows, dtype=dtype))
        weighted = buffer.empty(*rows.shape, dtype=dtype)
        wide = _workspace(rows)
        for to, row, weight in _pieces(len(wide), weighted, rows, weights[:, None]):
            to.copy_(wide[: len(row)].copy_(row).mul_(weight))
        return weighted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weights = ctx.saved_tensors
        if rows.device.type != "cpu":
            if _has_kernel(rows, grad.dtype):
                grad_rows, grad_weights = ops.weight_rows(ctx.buffer._end, grad, weights, rows.dtype, rows)
                return grad_rows, grad_weights, None, None
            grad_rows = torch.mul(grad, weights[:, None], out=torch.empty_like(rows))
            return grad_rows, torch.linalg.vecdot(grad.float(), rows.float()), None, None
        grad_rows, grad_weights = ctx.buffer.empty(*rows.shape, dtype=rows.dtype), torch.empty_like(weights)
        wide, wide_rows = _workspace(rows), _workspace(rows)
        parts = (grad_rows, grad_weights, grad, rows, weights[:, None])
        for to_rows, to_weights, piece, row, weight in _pieces(len(wide), *parts):
            widened = wide[: len(row)].copy_(piece)
            torch.sum(wide_rows[: len(row)].copy_(row).mul_(widened), dim=1, out=to_weights)
            to_rows.copy_(widened.mul_(weight))
        return grad_rows, grad_weights, None, None


def _has_kernel(rows: Tensor, dtype: torch.dtype) -> bool:
    return {rows.dtype, dtype} <= {torch.bfloat16, torch.float32} and rows.shape[1] % 8 == 0


def _workspace(rows: Tensor) -> Tensor:
    """f32 for as many rows at a time as a core's cache holds."""
    return torch.empty(max(1, (1 << 19) // rows.shape[1]), rows.shape[1], dtype=torch.float32)


def _pieces(length: int, *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(tensor.split(length) for tensor in tensors), strict=True)
