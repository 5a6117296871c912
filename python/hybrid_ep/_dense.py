"""Converts a top-k routing `[T, K]` to a routing map and dense weights `[T, E]`: one kernel launch, or one CPU pass."""

# mypy: disable-error-code="no-untyped-call"
# (torch.autograd.Function.apply has no types.)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native, ops
from .errors import CallerError

__all__ = ["dense_routing", "dense_weights"]

_INDICES = (torch.int64, torch.int32)


def dense_routing(
    topk_idx: Tensor, topk_weights: Tensor | None, tokens: int, experts: int
) -> tuple[Tensor, Tensor | None]:
    """Converts a top-k routing to a map and dense weights. Differentiable with respect to `topk_weights`.

    A negative index names no expert. On the CPU an index past the last expert is an error; on a GPU it names no expert,
    because the host would wait for the GPU to read it. If a row names an expert twice, the weights are added.

    Args:
        topk_idx: Integer [tokens, K], on any device.
        topk_weights: Floating-point [tokens, K], optional, on the same device.
        tokens: The number of tokens.
        experts: The number of experts.

    Returns:
        The map, bool [tokens, experts], and the weights, float32 [tokens, experts], or None without weights.

    Raises:
        CallerError: A shape or device does not fit, or, on the CPU, an index is past the last expert.
    """
    _check(topk_idx, topk_weights, tokens)
    if not _is_native(topk_idx, topk_weights):
        return _traced(topk_idx, topk_weights, tokens, experts)
    routing_map = torch.empty((tokens, experts), dtype=torch.bool, device=topk_idx.device)
    if topk_weights is not None and topk_weights.requires_grad and torch.is_grad_enabled():
        return routing_map, _Dense.apply(topk_idx, topk_weights, experts, routing_map)
    return routing_map, _spread(topk_idx, topk_weights, experts, routing_map)


def dense_weights(topk_idx: Tensor, topk_weights: Tensor, tokens: int, experts: int) -> Tensor:
    """Like `dense_routing`, but returns the weights only."""
    _check(topk_idx, topk_weights, tokens)
    if not _is_native(topk_idx, topk_weights):
        weights = _traced(topk_idx, topk_weights, tokens, experts)[1]
    elif topk_weights.requires_grad and torch.is_grad_enabled():
        weights = _Dense.apply(topk_idx, topk_weights, experts, None)
    else:
        weights = _spread(topk_idx, topk_weights, experts, None)
    assert weights is not None  # weights were given
    return weights


def _check(topk_idx: Tensor, topk_weights: Tensor | None, tokens: int) -> None:
    if topk_idx.dim() != 2 or topk_idx.shape[0] != tokens:
        raise CallerError(f"topk_idx: expected [{tokens}, k], found {list(topk_idx.shape)}")
    if topk_weights is None:
        return
    if topk_weights.shape != topk_idx.shape:
        raise CallerError(
            f"topk_weights: expected the shape of topk_idx, {list(topk_idx.shape)}, found {list(topk_weights.shape)}"
        )
    if topk_weights.device != topk_idx.device:
        raise CallerError(f"topk_weights: expected a tensor on {topk_idx.device}, found {topk_weights.device}")


def _is_native(topk_idx: Tensor, topk_weights: Tensor | None) -> bool:
    """Whether the tensors have addresses. Tensors of a compiler or a tracer have none."""
    plain = ops.is_plain(topk_idx) and (topk_weights is None or ops.is_plain(topk_weights))
    return plain and topk_idx.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling()


def _spread(topk_idx: Tensor, topk_weights: Tensor | None, experts: int, routing_map: Tensor | None) -> Tensor | None:
    """Fills the map, if given, and returns dense weights, if weights are given."""
    if topk_idx.dtype not in _INDICES:
        topk_idx = topk_idx.long()
    # Variables keep the tensors alive during the call: they may be copies.
    indices, weights, probs = topk_idx.contiguous(), None, None
    tokens, k = indices.shape
    if topk_weights is not None:
        weights = topk_weights.detach() if topk_weights.requires_grad else topk_weights
        weights = weights.to(torch.float32).contiguous()
        probs = torch.empty((tokens, experts), dtype=torch.float32, device=indices.device)
    gpu = indices.device.index
    _native.dense_routing(
        gpu,
        0 if gpu is None else ops.current_stream(gpu),
        (tokens, k, experts),
        indices.dtype == torch.int64,
        ops.span(indices),
        None if weights is None else ops.span(weights),
        None if routing_map is None else ops.span(routing_map),
        None if probs is None else ops.span(probs),
    )
    return probs


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, topk_idx: Tensor, topk_weights: Tensor, experts: int, routing_map: Tensor | None) -> Any:
        ctx.save_for_backward(topk_idx)
        ctx.dtype = topk_weights.dtype
        return _spread(topk_idx, topk_weights, experts, routing_map)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (topk_idx,) = ctx.saved_tensors
        return None, ops.chosen(grad, topk_idx).to(ctx.dtype), None, None


def _traced(topk_idx: Tensor, topk_weights: Tensor | None, tokens: int, experts: int) -> tuple[Tensor, Tensor | None]:
    """Does the same with PyTorch's operators, which compilers and tracers understand."""
    # Indices that name no expert go to an additional column, which is cut off.
    index = topk_idx.long()
    index = torch.where((index < 0) | (index >= experts), experts, index)
    size = (tokens, experts + 1)
    routing_map = torch.zeros(size, dtype=torch.bool, device=index.device).scatter(1, index, True)
    probs = None
    if topk_weights is not None:
        probs = torch.zeros(size, dtype=torch.float32, device=index.device).scatter_add(1, index, topk_weights.float())
        probs = probs[:, :-1].contiguous()
    return routing_map[:, :-1].contiguous(), probs
