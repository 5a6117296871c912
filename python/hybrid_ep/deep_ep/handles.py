"""The handles of a `HybridEPBuffer`: tuples of DeepEP's lengths, because programs index and unpack them.

Known programs read only the last slot of 11, and slots 3 and 4 of 7; these have DeepEP's meaning. The first two slots
hold what combine needs, so that a handle outlives the `HybridEPBuffer` that made it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from hybrid_ep import Buffer, CallerError, Handle

from .config import HybridEpConfigInstance


class PlainHandle(NamedTuple):
    """The handle that `HybridEPBuffer.dispatch` returns: 7 slots."""

    native: Handle
    buffer: Buffer
    reserved_2: None
    num_dispatched_tokens: Tensor
    """int32 [1] on the CPU: the number of received rows."""
    local_expert_routing_map: Tensor
    """bool [rows, experts per rank]: the local experts of each row."""
    num_of_tokens_per_rank: int
    config: HybridEpConfigInstance


class PermutedHandle(NamedTuple):
    """The handle that `HybridEPBuffer.dispatch_with_permute` returns: 11 slots."""

    native: Handle
    buffer: Buffer
    reserved_2: None
    reserved_3: None
    reserved_4: None
    reserved_5: None
    reserved_6: None
    tokens_per_expert: Tensor
    """int64 [experts per rank], without padding."""
    num_of_tokens_per_rank: int
    config: HybridEpConfigInstance
    overflow_flag: Tensor
    """int32 [1] on the tokens' device: 1 if rows were dropped, else 0."""


AnyHandle = TypeVar("AnyHandle", PlainHandle, PermutedHandle)

_MADE_BY = {PlainHandle: "dispatch", PermutedHandle: "dispatch_with_permute"}


def parse(handle: Any, kind: type[AnyHandle]) -> AnyHandle:
    """Checks a handle that a program passed back, possibly as another kind of sequence.

    Args:
        handle: What the program passed.
        kind: `PlainHandle` or `PermutedHandle`.

    Raises:
        CallerError: `handle` is not a handle of that kind.
    """
    if isinstance(handle, kind):
        return handle
    if isinstance(handle, tuple | list) and len(handle) == len(kind._fields) and isinstance(handle[0], Handle):
        return kind(*handle)
    raise CallerError(f"handle: expected what {_MADE_BY[kind]} returned last, found {_description(handle)}")


def _description(handle: Any) -> str:
    for kind, maker in _MADE_BY.items():
        if isinstance(handle, kind):
            return f"what {maker} returned"
    if isinstance(handle, tuple | list):
        return f"a {type(handle).__name__} of {len(handle)} that it did not return"
    return "none" if handle is None else f"a {type(handle).__name__}"
