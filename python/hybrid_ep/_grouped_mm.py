"""A grouped matrix product as one PyTorch operator: the rows of each expert times the expert's matrix.

The operator does not break a graph of `torch.compile`: output shapes do not depend on the counts, which may stay on the
GPU. It computes one product for each expert, with the same bits as `GroupedExperts` without a compiler.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# (operators have no types.)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._compilers import opaque
from ._library import OPERATOR_TAGS

__all__ = ["grouped_mm"]

_library = torch.library.Library("hybrid_ep", "FRAGMENT")
_library.define(
    "grouped_mm(Tensor rows, Tensor weights, Tensor counts) -> Tensor",
    tags=OPERATOR_TAGS,
)
_library.define(
    "grouped_mm_weights(Tensor rows, Tensor grads, Tensor counts) -> Tensor",
    tags=OPERATOR_TAGS,
)


def grouped_mm(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiplies each expert's rows by the expert's matrix. Differentiable. Follows autocast.

    Args:
        rows: [R, K]: first `counts[0]` rows of expert 0, then `counts[1]` rows of expert 1, and so on.
        weights: [E, K, N], of the rows' type.
        counts: int64 [E].

    Returns:
        [R, N]; zero in the rows after the last expert's.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weights = rows.to(dtype), weights.to(dtype)
    return torch.ops.hybrid_ep.grouped_mm(rows, weights, counts)


@torch.library.impl(_library, "grouped_mm", "CompositeExplicitAutograd")
@opaque
def _grouped_mm(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    out = rows.new_empty((rows.shape[0], weights.shape[2]))
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        torch.mm(rows[begin : begin + count], weights[expert], out=out[begin : begin + count])
        begin += count
    out[begin:].zero_()
    return out


@torch.library.impl(_library, "grouped_mm_weights", "CompositeExplicitAutograd")
@opaque
def _grouped_mm_weights(rows: Tensor, grads: Tensor, counts: Tensor) -> Tensor:
    """Computes the gradients of the matrices, `[E, K, N]`."""
    out = rows.new_empty((counts.shape[0], rows.shape[1], grads.shape[1]))
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        torch.mm(rows[begin : begin + count].T, grads[begin : begin + count], out=out[expert])
        begin += count
    return out


@torch.library.register_fake("hybrid_ep::grouped_mm", lib=_library)
def _grouped_mm_fake(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


@torch.library.register_fake("hybrid_ep::grouped_mm_weights", lib=_library)
def _grouped_mm_weights_fake(rows: Tensor, grads: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty((counts.shape[0], rows.shape[1], grads.shape[1]))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, counts = ctx.saved_tensors
    of_rows, of_weights = None, None
    if ctx.needs_input_grad[0]:
        of_rows = torch.ops.hybrid_ep.grouped_mm(grad, weights.transpose(1, 2), counts)
    if ctx.needs_input_grad[1]:
        of_weights = torch.ops.hybrid_ep.grouped_mm_weights(rows, grad, counts)
    return of_rows, of_weights, None


torch.library.register_autograd("hybrid_ep::grouped_mm", _backward, setup_context=_setup, lib=_library)
