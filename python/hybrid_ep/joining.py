"""`Joined`: how a rank joins a communicator, its place among the ranks, its counters, and how it leaves.

`Buffer` inherits the class and adds the operators; only `buffer` imports this module.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _native, ops
from ._settings import device_of, settings_of
from ._sharing import Shared, find_buffer
from .errors import CallerError
from .rendezvous import Meeting
from .results import Traffic
from .work import is_capturing

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Joined"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _needs_experts(call: str, example: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes errors about the arguments of a constructor name the call that the program has written.

    Args:
        call: The call, without its arguments.
        example: The arguments of a call that works.
    """

    def named(make: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(make)
        def checked(*args: _P.args, **options: _P.kwargs) -> _R:
            if "num_experts" not in options:
                raise TypeError(f"{call}: num_experts is missing; write {call}({example})")
            return make(*args, **options)

        make.__qualname__ = call  # Python begins the text of its own TypeErrors with it
        return checked

    return named


class Joined(Shared):
    """One rank of a communicator, without the operators. `Buffer` documents the arguments."""

    @_needs_experts("Buffer", "num_experts=8")
    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        domains: int = 1,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        workers: int | None = None,
        sms: int | None = None,
        max_tokens: int | None = None,
        max_hidden: int | None = None,
    ) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        meeting = None if group is None else Meeting.of(group)
        with contextlib.nullcontext() if meeting is None else meeting.reported():
            bounds = (timeout, stall_timeout, workers, sms, max_tokens, max_hidden)
            settings = settings_of(device_of(device), num_experts, domains, *bounds)
            native = _native.Buffer.launched(settings) if meeting is None else _joined(meeting, settings)
        self._adopt(native, group, settings)

    @classmethod
    def _of_meeting(
        cls, meeting: Meeting, *, num_experts: int, domains: int, device: torch.device, workers: int | None
    ) -> Self:
        """Makes a buffer for the ranks of a meeting, which have no process group."""
        settings = settings_of(device, num_experts, domains, None, None, workers, None)
        buffer = cls.__new__(cls)
        with meeting.reported():
            buffer._adopt(_joined(meeting, settings))
        return buffer

    @classmethod
    @_needs_experts("Buffer.threads", "4, num_experts=8")
    def threads(
        cls,
        ranks: int,
        *,
        num_experts: int,
        domains: int = 1,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        stall_timeout: float | None = None,
        workers: int | None = None,
        sms: int | None = None,
        max_tokens: int | None = None,
        max_hidden: int | None = None,
    ) -> list[Self]:
        """Makes all ranks of a communicator in this process. Use each buffer from its own thread.

        On GPUs the ranks are spread over all visible GPUs. Ranks that share a GPU wait for each other inside kernels,
        which brings these conditions:

        - Each thread uses its own `torch.cuda.stream`.
        - Before CUDA starts, CUDA_DEVICE_MAX_CONNECTIONS is at least the number of streams, and CUDA_MODULE_LOADING is
          EAGER. A rank with asynchronous operators has two streams, and at most 32 ranks of a GPU may have them.
        - Nothing in a backward pass waits for the GPU, since PyTorch runs all backward passes of a GPU on one thread.

        Even then, what PyTorch does for the first time, such as pinning memory, may wait for kernels that wait for
        other ranks, until the kernels time out. Use one process for each rank if that matters.

        Args:
            ranks: The number of ranks.
            num_experts: As for `Buffer`.
            domains: As for `Buffer`.
            device: "cpu" or "cuda"; a CUDA device with an index only on a machine with one GPU.
            timeout: As for `Buffer`.
            stall_timeout: As for `Buffer`.
            workers: As for `Buffer`.
            sms: As for `Buffer`.
            max_tokens: As for `Buffer`.
            max_hidden: As for `Buffer`.

        Returns:
            The buffers of ranks 0 to `ranks - 1`, in order.

        Raises:
            CallerError: An argument is out of range.
            SetupError: There is no GPU, no kernel compiler, or too little memory.
        """
        where = device_of(device)
        if where.index is not None and where.type == "cuda" and torch.cuda.device_count() > 1:
            raise CallerError(
                f"device: ranks are spread over all GPUs, or those of CUDA_VISIBLE_DEVICES; found {where}"
            )
        bounds = (timeout, stall_timeout, workers, sms, max_tokens, max_hidden)
        settings = settings_of(where, num_experts, domains, *bounds)
        ops.check_count("ranks", ranks)
        buffers = []
        for native in _native.Buffer.threads(ranks, settings):
            buffer = cls.__new__(cls)
            buffer._adopt(native)
            buffers.append(buffer)
        return buffers

    def _adopt(
        self,
        native: _native.Buffer,
        group: dist.ProcessGroup | None = None,
        settings: _native.Settings | None = None,
    ) -> None:
        """Takes the native buffer. `settings`: those with which its ranks can join again, if they can."""
        self._end = ops.End(native)
        self._group = group
        self._settings = settings
        self._mesh: DeviceMesh | None = None
        self._number = self._end.number
        self._num_experts = self._end.experts
        _open.add(self)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks; None if the buffer was made without one."""
        return self._group

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks as a device mesh with one dimension, "ep", over which experts are sharded. None for one rank, and
        for a buffer without a process group."""
        if self._mesh is None and self._group is not None and self.world_size > 1:
            self._mesh = DeviceMesh.from_group(self._group, self.device.type, mesh_dim_names=("ep",))
        return self._mesh

    def __reduce__(self) -> tuple[Any, ...]:
        return find_buffer, (self._name(), self.num_experts, self.world_size)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._end.native.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._end.native.ranks

    @property
    def num_experts(self) -> int:
        """E, the number of experts on all ranks."""
        return self._num_experts

    @property
    def num_local_experts(self) -> int:
        """The number of experts on this rank."""
        return self._end.local_experts

    @property
    def local_experts(self) -> range:
        """The global indices of the experts on this rank."""
        return range(*self._end.native.local_experts)

    @property
    def domains(self) -> int:
        """The number of NVLink domains."""
        return self._end.native.domains

    @property
    def device(self) -> torch.device:
        """The device that all tensor arguments must be on."""
        return self._end.device

    @property
    def backend(self) -> str:
        """The backend: "host" or "cuda"."""
        return self._end.native.backend

    @property
    def registered_bytes(self) -> int:
        """Bytes of memory that this rank has registered. The memory grows on demand and is reused."""
        return self._end.native.registered_bytes()

    def traffic(self) -> Traffic:
        """Reads the counters of this rank.

        Returns:
            Bytes, messages and waiting time since the buffer was made.
        """
        return Traffic(*self._end.native.traffic())

    def _check_peers(self, waited_for: str, waited: float, has_failed: bool) -> None:
        """Checks the other ranks during a wait for a collective of PyTorch. Ranks on GPUs are not checked.

        If the wait `has_failed`, the other ranks learn of an error.

        Raises:
            PeerError: A rank died, left, failed, stalled or is late.
        """
        self._end.native.check_peers(waited_for, waited, has_failed)

    @property
    def _is_bounded(self) -> bool:
        """Whether the memory between domains bounds the calls."""
        return self.backend == "cuda" and self.domains > 1

    def reserve(self, *, max_tokens: int | None = None, max_hidden: int | None = None) -> None:
        """Makes room for larger calls between the NVLink domains of GPUs. Collective.

        In one domain, and on the CPU, calls have no maximum, and this method has no effect. The same is true if all
        ranks have room already; but ranks that the environment of a launcher describes always join again. Joining again
        takes as long as making a buffer. Meanwhile both the old and the new memory exist; the old one is freed once no
        tensor, handle or CUDA graph uses it.

        Everything that holds the buffer, such as a layer, may go on using it. Handles made before are refused, also in
        the backward pass of an earlier forward pass. CUDA graphs captured before keep using the old memory. Counters of
        `traffic` start again. Do not call it while another thread captures a graph on this GPU.

        Args:
            max_tokens: The number of tokens of a rank in a call. Ranks may give different numbers: the largest applies.
            max_hidden: The number of elements of a bfloat16 row. Give the same number on all ranks.

        Raises:
            CallerError: An argument is out of range, a CUDA graph is being captured, or the buffer was made by
                `Buffer.threads` or by a migration.
            SetupError: There is too little memory. The buffer is unchanged.
            PeerError: A rank did not call the method in time, or failed. The buffer is unchanged.
        """
        if not self._is_bounded:
            _check_room(max_tokens, max_hidden)
            return
        if self._settings is None:
            raise CallerError(
                "reserve: only the ranks of a process group, or of a launcher's environment, can join again; give "
                "max_tokens and max_hidden when the buffers are made"
            )
        meeting = None if self._group is None else Meeting.of(self._group, "call of reserve")
        with contextlib.nullcontext() if meeting is None else meeting.reported():
            _check_room(max_tokens, max_hidden)
            if self.device.type == "cuda" and is_capturing(self.device):
                raise CallerError("reserve: a CUDA graph is being captured, and the ranks must meet: call it before")
            self.synchronize()
            settings = self._settings.copy()
            settings["max_tokens"] = max(max_tokens or 0, settings["max_tokens"] or 0) or None
            settings["max_hidden"] = max(max_hidden or 0, settings["max_hidden"] or 0) or None
            if meeting is None:
                native = _native.Buffer.launched(settings)
            else:
                meeting.timeout = _native.timeout_of(settings)
                has_room = self._end.native.has_room(settings)
                if all(one == b"room" for one in meeting.all_gather(b"room" if has_room else b"none")):
                    meeting.end()
                    return
                native = _joined(meeting, settings)
        # All ranks have joined, so none waits for the old buffer any more.
        old, self._end.native, self._settings = self._end.native, native, settings
        old.close()

    def synchronize(self) -> None:
        """Waits until all operators called so far are complete.

        Raises:
            HybridEPError: The first error of any of these operators.
        """
        self._end.native.synchronize()

    def close(self) -> None:
        """Leaves the communicator. Peers that still wait for this rank get a `PeerError` with the fault "left".

        Tensors and handles that the buffer made may be freed before or after. A second call does nothing. If a call of
        the buffer runs in another thread, `close` waits for it, up to the bounds of that call.

        On a GPU the rank leaves when its operators are over, replays of CUDA graphs included, and its memory is freed
        when the GPU has finished the work that was queued by then. `close` waits for at most 2 seconds, and a
        background thread waits for the rest. Memory still in use after the entry bound plus the stall bound is not
        freed, and a warning on stderr gives its size.

        CUDA cannot tell whether a GPU is idle without breaking captures in progress. Do not close a buffer, or free its
        last tensor, while another thread captures a graph on the same GPU.
        """
        self._end.native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Buffer(rank={self.rank}, world_size={self.world_size}, num_experts={self.num_experts}, "
            f"device={str(self.device)!r})"
        )


def _check_room(max_tokens: int | None, max_hidden: int | None) -> None:
    for name, value in (("max_tokens", max_tokens), ("max_hidden", max_hidden)):
        if value is not None:
            ops.check_count(name, value)


def _joined(meeting: Meeting, settings: _native.Settings) -> _native.Buffer:
    meeting.timeout = _native.timeout_of(settings)
    native = _native.Buffer.join(meeting.rank, meeting.ranks, settings, meeting)
    meeting.end()
    return native


_open: weakref.WeakSet[Joined] = weakref.WeakSet()


# A traceback may keep a buffer alive until the interpreter ends. Peers must not wait until then.
@atexit.register
def _close_all() -> None:
    for buffer in list(_open):
        buffer.close()
    _native.finish()
