"""The registered operators `torch.ops.hybrid_ep.*`: their schemas, implementations, and shapes for compilers.

A registered operator takes tensors and numbers only. So a buffer is passed as its number, a handle as the tensor that
owns it, and an absent output is an empty tensor. Only `_autograd` imports this module; it adds the gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._compilers import opaque, prepare_inductor
from .ops import Delivered, check_device, combine, dispatch, end_of, preprocess

__all__ = ["OPERATOR_TAGS", "call_combine", "call_dispatch", "library"]

_CPU = torch.device("cpu")

library = torch.library.Library("hybrid_ep", "DEF")
# The host takes part in every operator, and a handle is an object of the host. Inductor must not put operators into
# CUDA graphs of its own (`mode="reduce-overhead"`): a replay would use the handle of the capture. PyTorch 2.6 lacks the
# tag. The products of `_grouped_mm`, whose counts the host reads, have the same tags.
OPERATOR_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name)
)
library.define(
    "preprocess(Tensor routing, Tensor? weights, int buffer, bool is_map, int? pad_multiple, SymInt? capacity,"
    " int most) -> (Tensor handle, Tensor tokens_per_expert, Tensor kept_per_expert, Tensor overflow)",
    tags=OPERATOR_TAGS,
)
# `topk_idx` maps the gradient of weights [T, E] to [T, K]. `rows` is known with a capacity or from an earlier call;
# without `rows` the number of rows depends on data.
library.define(
    "dispatch(Tensor tokens, Tensor? scales, Tensor? weights, Tensor? topk_idx, Tensor handle, int buffer,"
    " bool from_routing, str? fp8, bool permuted, SymInt? rows, bool clear_tokens, bool local_experts)"
    " -> (Tensor tokens, Tensor scales, Tensor probs, Tensor local_experts)",
    tags=OPERATOR_TAGS,
)
library.define(
    "combine(Tensor rows, Tensor? probs, Tensor handle, int buffer, SymInt tokens, bool permuted, ScalarType? wire)"
    " -> (Tensor tokens, Tensor probs)",
    tags=OPERATOR_TAGS,
)


# ---- implementations
#
# `opaque` keeps the compiler out of the implementations. If it breaks a graph at an operator, it would
# otherwise try to compile the implementation.


def _or_empty(tensor: Tensor | None) -> Tensor:
    return torch.empty(0, device=_CPU) if tensor is None else tensor


@torch.library.impl(library, "preprocess", "CompositeExplicitAutograd")
@opaque
def _preprocess_op(
    routing: Tensor,
    weights: Tensor | None,
    buffer: int,
    is_map: bool,
    pad_multiple: int | None,
    capacity: int | None,
    most: int,
) -> tuple[Tensor, ...]:
    done = preprocess(end_of(buffer), routing, weights, is_map, pad_multiple, capacity, most)
    return done.handle, done.tokens_per_expert, done.kept_per_expert, done.overflow


def call_dispatch(
    tokens: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    _topk_idx: Tensor | None,
    handle: Tensor,
    buffer: int,
    from_routing: bool,
    fp8: str | None,
    _permuted: bool,
    _rows: int | None,
    clear_tokens: bool,
    local_experts: bool,
) -> Delivered:
    """Calls dispatch with the arguments of the registered operator. An absent output is None."""
    end = end_of(buffer)
    return dispatch(end, tokens, scales, weights, handle, from_routing, fp8, clear_tokens, local_experts)


def call_combine(
    rows: Tensor,
    probs: Tensor | None,
    handle: Tensor,
    buffer: int,
    tokens: int,
    permuted: bool,
    wire: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Calls combine with the arguments of the registered operator. An absent output is None."""
    return combine(end_of(buffer), rows, probs, handle, tokens, permuted, wire)


@torch.library.impl(library, "dispatch", "CompositeExplicitAutograd")
@opaque
def _dispatch_op(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(map(_or_empty, call_dispatch(*arguments)))


@torch.library.impl(library, "combine", "CompositeExplicitAutograd")
@opaque
def _combine_op(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(map(_or_empty, call_combine(*arguments)))


# ---- shapes of the outputs, for compilers


@torch.library.register_fake("hybrid_ep::preprocess", lib=library)
def _preprocess_fake(
    routing: Tensor,
    weights: Tensor | None,
    buffer: int,
    is_map: bool,
    pad_multiple: int | None,
    capacity: int | None,
    most: int,
) -> tuple[Tensor, ...]:
    prepare_inductor()
    end = end_of(buffer)
    check_device(end, "routing_map" if is_map else "topk_idx", routing)
    counts = 0 if pad_multiple is None else end.local_experts
    told = end.device if capacity is not None else _CPU
    return (
        torch.empty(1, dtype=torch.int64, device=_CPU),
        torch.empty(counts, dtype=torch.int64, device=told),
        torch.empty(counts, dtype=torch.int64, device=told),
        torch.empty(1, dtype=torch.int32, device=end.device),
    )


@torch.library.register_fake("hybrid_ep::dispatch", lib=library)
def _dispatch_fake(
    tokens: Tensor,
    scales: Tensor | None,
    weights: Tensor | None,
    topk_idx: Tensor | None,
    handle: Tensor,
    buffer: int,
    from_routing: bool,
    fp8: str | None,
    permuted: bool,
    rows: int | None,
    clear_tokens: bool,
    local_experts: bool,
) -> tuple[Tensor, ...]:
    prepare_inductor()
    end = end_of(buffer)
    check_device(end, "tokens", tokens)
    count = torch.library.get_ctx().new_dynamic_size() if rows is None else rows
    hidden = tokens.shape[1]
    none = functools.partial(torch.empty, 0, device=_CPU)
    out = tokens.new_empty((count, hidden), dtype=tokens.dtype if fp8 is None else torch.float8_e4m3fn)
    out_scales = none()
    if scales is not None:
        dtype = torch.float32 if scales.dtype == torch.float32 else torch.uint8
        out_scales = scales.new_empty((count, scales.shape[1]), dtype=dtype)
    elif fp8 is not None:
        block = 32 if fp8 == "mxfp8" else 128
        dtype = torch.float32 if fp8 == "f32" else torch.uint8
        out_scales = tokens.new_empty((count, (hidden + block - 1) // block), dtype=dtype)
    shape = (count,) if permuted else (count, end.local_experts)
    out_probs = none() if weights is None else tokens.new_empty(shape, dtype=torch.float32)
    with_map = local_experts and not permuted
    out_map = tokens.new_empty((count, end.local_experts), dtype=torch.bool) if with_map else none()
    return out, out_scales, out_probs, out_map


@torch.library.register_fake("hybrid_ep::combine", lib=library)
def _combine_fake(
    rows: Tensor,
    probs: Tensor | None,
    handle: Tensor,
    buffer: int,
    tokens: int,
    permuted: bool,
    wire: torch.dtype | None,
) -> tuple[Tensor, ...]:
    prepare_inductor()
    end = end_of(buffer)
    check_device(end, "tokens", rows)
    out = rows.new_empty((tokens, rows.shape[1]))
    return out, torch.empty(0, device=_CPU) if probs is None else probs.new_empty((tokens, end.experts))
