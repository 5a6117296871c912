"""The handles that a `HybridEPBuffer` gives out: tuples, since programs index and unpack them as those of the original.

Of the slots only these are read by programs that we know: the last of 11, and number 3 and 4 of 7. The first two carry
what combine needs, so that a handle outlives the `HybridEPBuffer` that made it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from hybrid_ep import Buffer, CallerError, Handle

from .config import HybridEpConfigInstance


class PlainHandle(NamedTuple):
    """What `dispatch` returns last."""

    native: Handle
    buffer: Buffer
    reserved_2: None
    num_dispatched_tokens: Tensor
    """int32 `[1]` on the CPU: the rows that came."""
    local_expert_routing_map: Tensor
    """bool `[rows, experts per rank]`: which of this rank's experts a row is for."""
    num_of_tokens_per_rank: int
    config: HybridEpConfigInstance


class PermutedHandle(NamedTuple):
    """What `dispatch_with_permute` returns last."""

    native: Handle
    buffer: Buffer
    reserved_2: None
    reserved_3: None
    reserved_4: None
    reserved_5: None
    reserved_6: None
    tokens_per_expert: Tensor
    """int64 `[experts per rank]`, without padding."""
    num_of_tokens_per_rank: int
    config: HybridEpConfigInstance
    overflow_flag: Tensor
    """int32 `[1]` on the tokens' device: whether rows were dropped."""


AnyHandle = TypeVar("AnyHandle", PlainHandle, PermutedHandle)

_MADE_BY = {PlainHandle: "dispatch", PermutedHandle: "dispatch_with_permute"}


def parse(handle: Any, kind: type[AnyHandle]) -> AnyHandle:
    """The handle that a program passed back, which may have turned it into another kind of sequence on the way."""
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
