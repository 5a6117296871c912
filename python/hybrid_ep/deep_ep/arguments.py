"""Checks the arguments of `HybridEPBuffer` and converts them to those of `hybrid_ep.Buffer`."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from hybrid_ep import CallerError, Dispatched
from hybrid_ep._dense import dense_routing, dense_weights

from .handles import PermutedHandle

_FP8_TYPES = (torch.uint8, torch.float8_e4m3fn)


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Converts a top-k routing to a routing map and dense weights.

    A negative index names no expert. On the CPU an index past the last expert is an error; on a GPU it names no expert,
    because the host would wait for the GPU to read it. If a row names an expert twice, the weights are added.

    Args:
        topk_idx: Integer [tokens, K].
        topk_weights: Floating-point [tokens, K], or None.
        num_of_tokens: The number of tokens.
        num_of_experts: The number of experts.

    Returns:
        bool [tokens, experts] and float32 [tokens, experts]; None instead of the latter without weights.

    Raises:
        CallerError: A shape or device does not fit, or, on the CPU, an index is past the last expert.
    """
    return dense_routing(topk_idx, topk_weights, num_of_tokens, num_of_experts)


class Tokens:
    """Tokens in the form of `hybrid_ep.Buffer`; `restored` gives received tokens the type that the program expects."""

    def __init__(self, hidden: Tensor, scaling_factor: Tensor | None, use_fp8: bool) -> None:
        if hidden.dim() != 2:
            raise CallerError(f"hidden: expected [tokens, hidden], found {list(hidden.shape)}")
        self.as_bytes = hidden.dtype == torch.uint8
        self.rows = hidden.view(torch.float8_e4m3fn) if self.as_bytes else hidden
        self.format: dict[str, Any] = {}
        if hidden.dtype in _FP8_TYPES:
            if scaling_factor is None:
                raise CallerError(f"scaling_factor: tokens of type {hidden.dtype} are FP8 and need it")
            self.format = {"scales": scaling_factor}
        elif use_fp8:
            if scaling_factor is not None:
                raise CallerError(
                    f"scaling_factor goes with FP8 tokens; these are {hidden.dtype} and, with use_fp8, quantised here"
                )
            self.format = {"fp8": "f32"}

    def restored(self, received: Dispatched) -> Tensor:
        """Returns received tokens as uint8 if the program passed FP8 tokens as uint8, else unchanged."""
        return received.tokens.view(torch.uint8) if self.as_bytes else received.tokens


def fresh_routing(
    hidden: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing_map: Tensor | None,
    probs: Tensor | None,
    num_experts: int,
) -> dict[str, Any]:
    """Selects the routing of a new layout: prefers `routing_map` to `topk_idx`, and `probs` to `topk_weights`."""
    if routing_map is not None:
        return {"routing_map": routing_map, "probs": probs}
    if topk_idx is None:
        raise CallerError("a dispatch needs a routing: routing_map, topk_idx, or the handle of an earlier dispatch")
    if probs is None:
        return {"topk_idx": topk_idx, "topk_weights": topk_weights}
    return {"routing_map": indices_to_map(topk_idx, None, hidden.shape[0], num_experts)[0], "probs": probs}


def weights_again(
    hidden: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    probs: Tensor | None,
    num_experts: int,
) -> dict[str, Any]:
    """Selects the weights to send with an existing layout. None are sent if none are given."""
    if probs is not None or topk_weights is None:
        return {"probs": probs}
    if topk_idx is None:
        return {"topk_weights": topk_weights}
    return {"probs": dense_weights(topk_idx, topk_weights, hidden.shape[0], num_experts)}


def given_pad_multiple(pad_multiple: int | None) -> int | None:
    """Checks `pad_multiple`. None and 0 both mean that the program does not choose."""
    if pad_multiple is None or pad_multiple == 0:
        return None
    if pad_multiple < 0:
        raise CallerError(f"pad_multiple: expected a positive number, found {pad_multiple}")
    return operator.index(pad_multiple)


def check_pad_multiple(pad_multiple: int | None, made: PermutedHandle) -> None:
    """Checks that `pad_multiple`, if given, equals that of the handle."""
    multiple = given_pad_multiple(pad_multiple)
    if multiple not in (None, made.native.pad_multiple):
        raise CallerError(
            f"pad_multiple: the handle was made with {made.native.pad_multiple}, found {multiple}; "
            "leave it out, the handle determines it"
        )


def given_capacity(num_permuted_tokens: SupportsIndex | None, pad_multiple: int) -> int:
    """Checks the capacity of a non-blocking dispatch."""
    if num_permuted_tokens is None:
        raise CallerError("non_blocking needs num_permuted_tokens, the rows of the output")
    capacity = operator.index(num_permuted_tokens)
    if capacity < 0 or capacity % pad_multiple:
        raise CallerError(
            f"num_permuted_tokens: with non_blocking, expected a multiple of pad_multiple = {pad_multiple}, "
            f"found {capacity}"
        )
    return capacity


def rows_wanted(num_permuted_tokens: SupportsIndex | None, made: PermutedHandle) -> int | None:
    """Returns how many of the layout's first rows the program wants; None for all rows."""
    if num_permuted_tokens is None or (isinstance(num_permuted_tokens, Tensor) and num_permuted_tokens.is_cuda):
        return None  # reading a number from the GPU would wait
    rows, there = operator.index(num_permuted_tokens), made.native.rows
    exact = made.native.capacity is None
    if rows < 0 or (exact and there is not None and rows < there):
        raise CallerError(
            f"num_permuted_tokens: the handle's layout has {there} rows, found {rows}; leave it out, "
            "the handle determines it"
        )
    return rows
