"""Copies and pickles of objects that hold a communicator.

A communicator is a rank's place among other ranks, not a value. So within a process, a copy of a layer holds the same
communicator. In another process the program that unpickles the layer supplies one:
`with buffer.attach(): torch.load(...)`.
"""

from __future__ import annotations

import itertools
import os
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .errors import CallerError

if TYPE_CHECKING:
    from .buffer import Buffer

__all__ = ["Shared", "SharedGroup", "attach"]

_attached: ContextVar[Buffer | None] = ContextVar("hybrid_ep_attached", default=None)
_RUN = uuid.uuid4().hex
_living: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_places = itertools.count()


@contextmanager
def attach(buffer: Buffer) -> Iterator[Buffer]:
    """Attaches the buffer to the objects that this thread unpickles inside the `with` block."""
    token = _attached.set(buffer)
    try:
        yield buffer
    finally:
        _attached.reset(token)


class Shared:
    """A base class of objects that copying returns unchanged, and that unpickling finds again."""

    __slots__ = ("__weakref__", "_place")

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def _name(self) -> str:
        """Returns a name that is unique to this object and this process."""
        # Not `id`: another object may have the same `id` once this one is gone.
        if not hasattr(self, "_place"):
            self._place = next(_places)
        name = f"{_RUN}/{os.getpid()}/{self._place}"
        _living[name] = self
        return name


class SharedGroup(Shared):
    """A process group or None, for objects that are copied and pickled."""

    __slots__ = ("group",)

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_group, (self._name(), self.group is not None)


def _find_group(name: str, has_one: bool) -> SharedGroup:
    attached = _attached.get()
    if not has_one:
        return SharedGroup(None)
    if attached is None:
        if (living := _living.get(name)) is not None:
            return living  # type: ignore[no-any-return]
        raise CallerError(f"this object was saved with a process group: {_HOW}")
    if attached.group is None:
        raise CallerError(
            "this object was saved with a process group, and the buffer that it is attached to has none: "
            "make the buffer with the group"
        )
    return SharedGroup(attached.group)


def find_buffer(name: str, num_experts: int, ranks: int) -> Buffer:
    """Finds the buffer for an unpickled object.

    Args:
        name: The name that the saved buffer had in its process.
        num_experts: The number of experts of the saved buffer.
        ranks: The number of ranks of the saved buffer.

    Raises:
        CallerError: There is no such buffer in this process and none is attached, or the attached buffer has a
            different number of experts.
    """
    attached = _attached.get()
    if attached is None:
        if (living := _living.get(name)) is not None:
            return living  # type: ignore[no-any-return]
        raise CallerError(f"this object was saved with a Buffer of {num_experts} experts on {ranks} ranks: {_HOW}")
    if attached.num_experts != num_experts:
        raise CallerError(
            f"this object was saved with a Buffer of {num_experts} experts; the one to attach it to has "
            f"{attached.num_experts}"
        )
    return attached


_HOW = "load it `with buffer.attach():`, where buffer is one that this process has made"
