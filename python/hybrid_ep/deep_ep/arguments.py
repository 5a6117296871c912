"""What programs give to a `HybridEPBuffer`, checked and in the form that `hybrid_ep.Buffer` takes."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from hybrid_ep import CallerError, Dispatched

from .handles import PermutedHandle

_FP8_TYPES = (torch.uint8, torch.float8_e4m3fn)


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """The routing `[tokens, k]` as a map: bool and f32 `[tokens, experts]`; no second one without weights.

    A negative index is none. So is one past the last expert on a GPU, where looking at it would mean to wait; on the
    CPU that is an error. The weights of an expert that a row names twice are added.
    """
    size = (num_of_tokens, num_of_experts)
    places = _places(topk_idx, *size)
    routing_map = torch.zeros(_and_one_more(size), dtype=torch.bool, device=topk_idx.device).scatter(0, places, True)
    probs = None if topk_weights is None else _dense(topk_idx, topk_weights, places, size)
    return routing_map[:-1].view(size), probs


def indices_to_probs(topk_idx: Tensor, topk_weights: Tensor, num_of_tokens: int, num_of_experts: int) -> Tensor:
    """The second half of that."""
    size = (num_of_tokens, num_of_experts)
    return _dense(topk_idx, topk_weights, _places(topk_idx, *size), size)


def _places(topk_idx: Tensor, tokens: int, experts: int) -> Tensor:
    """Where in `[tokens x experts]` each index belongs: one past the end if it is none."""
    if topk_idx.dim() != 2 or topk_idx.shape[0] != tokens:
        raise CallerError(f"topk_idx: expected [{tokens}, k], found {list(topk_idx.shape)}")
    beyond = topk_idx >= experts
    if topk_idx.device.type == "cpu" and bool(beyond.any()):
        row = int(beyond.any(dim=1).nonzero()[0])
        raise CallerError(f"topk_idx: row {row} names an expert past the last of {experts}")
    row_starts = torch.arange(0, tokens * experts, experts, device=topk_idx.device).unsqueeze(1)
    return torch.where((topk_idx < 0) | beyond, tokens * experts, row_starts + topk_idx).flatten()


def _dense(topk_idx: Tensor, topk_weights: Tensor, places: Tensor, size: tuple[int, int]) -> Tensor:
    if topk_weights.shape != topk_idx.shape:
        raise CallerError(
            f"topk_weights: expected the shape of topk_idx, {list(topk_idx.shape)}, found {list(topk_weights.shape)}"
        )
    probs = torch.zeros(_and_one_more(size), dtype=torch.float32, device=topk_idx.device)
    return probs.scatter_add(0, places, topk_weights.float().flatten())[:-1].view(size)


def _and_one_more(size: tuple[int, int]) -> int:
    return size[0] * size[1] + 1


class Tokens:
    """Tokens as `hybrid_ep.Buffer` takes them, and as the program wants what comes of them."""

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
        return received.tokens.view(torch.uint8) if self.as_bytes else received.tokens


def fresh_routing(
    hidden: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing_map: Tensor | None,
    probs: Tensor | None,
    num_experts: int,
) -> dict[str, Any]:
    """The routing of a new layout. A map takes precedence over indices, and dense weights over those of indices."""
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
    """The weights to send in a layout that stands. Without any none are sent."""
    if probs is not None or topk_weights is None:
        return {"probs": probs}
    if topk_idx is None:
        return {"topk_weights": topk_weights}
    return {"probs": indices_to_probs(topk_idx, topk_weights, hidden.shape[0], num_experts)}


def given_pad_multiple(pad_multiple: int | None) -> int | None:
    """None where a program leaves it to us, which it says by 0 as well."""
    if pad_multiple is None or pad_multiple == 0:
        return None
    if pad_multiple < 0:
        raise CallerError(f"pad_multiple: expected a positive number, found {pad_multiple}")
    return operator.index(pad_multiple)


def check_pad_multiple(pad_multiple: int | None, made: PermutedHandle) -> None:
    multiple = given_pad_multiple(pad_multiple)
    if multiple not in (None, made.native.pad_multiple):
        raise CallerError(
            f"pad_multiple: the handle was made with {made.native.pad_multiple}, found {multiple}; "
            "leave it out, the handle knows it"
        )


def given_capacity(num_permuted_tokens: SupportsIndex | None, pad_multiple: int) -> int:
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
    """How many of a layout's rows the program wants, from the first; None: all there are."""
    if num_permuted_tokens is None or (isinstance(num_permuted_tokens, Tensor) and num_permuted_tokens.is_cuda):
        return None  # reading a number on the GPU would wait for it
    rows, there = operator.index(num_permuted_tokens), made.native.rows
    exact = made.native.capacity is None
    if rows < 0 or (exact and there is not None and rows < there):
        raise CallerError(
            f"num_permuted_tokens: the handle's layout has {there} rows, found {rows}; leave it out, "
            "the handle knows it"
        )
    return rows
