"""`DenseGradients`: the reduction of dense gradients over all ranks, through a codec between datacenters.

Gradients are packed into buckets, in the reverse order of the parameters, which is about the order in which a backward
pass completes them. Once a module has been reduced, hooks begin each bucket as soon as a backward pass has completed it
and all buckets before it, so that buckets travel while the pass goes on.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _native
from ..errors import CallerError, PeerError
from ..experts import parameter_groups
from .carrier import Carrier

__all__ = ["BUCKET_BYTES", "SECOND_PASS", "DenseGradients"]

# A larger bucket begins later, and smaller ones have more messages. A larger parameter is a bucket of its own.
BUCKET_BYTES = 4 << 20
# f16 is sent as f32: the codecs know two types.
_WIDE = {torch.float32: True, torch.float16: True, torch.bfloat16: False}
# The error that hooks of dense parameters and of experts raise.
SECOND_PASS = (
    "a second backward pass after the gradients of this step have left: run all backward passes but the last of a step "
    "inside `with migration.accumulate():`, and call reduce_gradients after the last; after this error, leave the step "
    "out: call discard_gradients, zero_grad and publish on all ranks"
)
# Seconds in which news of a fault reaches all ranks.
_NEWS = 0.5


def start_reduction(
    rank: int,
    carrier: Carrier,
    datacenters: Sequence[Sequence[int]],
    codec: str,
    regular_elements: int,
    timeout: float,
    run: int,
) -> _native.DenseReduction:
    """Starts the native part of a reduction; closes the carrier if that fails.

    Args:
        rank: As for `DenseGradients`.
        carrier: As for `DenseGradients`.
        datacenters: As for `DenseGradients`.
        codec: As for `DenseGradients`.
        regular_elements: The most elements of a bucket whose receives are posted ahead.
        timeout: As for `DenseGradients`.
        run: As for `DenseGradients`.
    """
    settings: _native.DenseSettings = {
        "rank": rank,
        "datacenters": [[*ranks] for ranks in datacenters],
        "codec": codec,
        "regular_elements": regular_elements,
        "timeout": timeout,
        "run": run,
    }
    try:
        return _native.DenseReduction(settings, carrier)
    except BaseException:
        carrier.close()
        raise


class DenseGradients:
    """A rank's part in the reduction of dense gradients.

    All calls may raise `PeerError`, and then raise it again.

    Args:
        rank: This rank.
        carrier: What `connect` returned for all ranks, used by this object alone, which closes it.
        datacenters: The ranks of each datacenter, ascending, in the order in which sums are computed.
        codec: The codec between datacenters.
        timeout: Seconds that a wait for another rank may take.
        run: A number that the ranks agree on.
    """

    def __init__(
        self,
        rank: int,
        carrier: Carrier,
        datacenters: Sequence[Sequence[int]],
        codec: str,
        timeout: float,
        run: int,
    ) -> None:
        self._carrier = carrier
        # The narrower type has more elements in a bucket.
        self._native = start_reduction(rank, carrier, datacenters, codec, BUCKET_BYTES // 2, timeout, run)
        self._plans: list[Plan] = []
        # States of plans that no call has needed yet.
        self._saved: list[dict[str, Any]] = []
        # The plan whose buckets hooks begin. None before the first reduction, and after a second module was reduced.
        self._overlapped: Plan | None = None
        self._round = 0

    @property
    def has_left(self) -> bool:
        """Whether gradients of this round have left."""
        return self._overlapped is not None and self._overlapped.begun > 0

    def begin_all(self, parameters: list[nn.Parameter], step: int) -> Plan:
        """Begins all buckets that hooks have not begun. A missing gradient counts as zero.

        Args:
            parameters: The dense parameters of a module.
            step: The step that errors name.

        Returns:
            The plan to finish.

        Raises:
            CallerError: A gradient cannot be reduced, or has changed since it left.
        """
        plan = next((plan for plan in self._plans if plan.is_of(parameters)), None)
        if plan is None:
            plan = self._add(parameters)
        if self._overlapped not in (None, plan):
            # Ranks may have begun different buckets of the other module. All ranks abandon these buckets.
            self._stop_overlap()
        for bucket in plan.buckets[: plan.begun]:
            bucket.check()
        while plan.begun < len(plan.buckets):
            self._begin_next(plan, step)
        return plan

    @torch.no_grad()
    def finish_all(self, plan: Plan, step: int, scale: float) -> None:
        """Waits for all sums, and writes them times `scale` to the gradients.

        Args:
            plan: What `begin_all` returned.
            step: The step that errors name.
            scale: The factor.
        """
        for at, bucket in enumerate(plan.buckets):
            sums = torch.empty(bucket.elements, dtype=bucket.dtype, device="cpu")
            self._native.finish((plan.index, at, self._round, step), bucket.wide, (sums.data_ptr(), sums.nbytes))
            bucket.write(sums if scale == 1 else sums.mul_(scale))
        self.next_round()
        if len(self._plans) == 1 and self._overlapped is None:
            self._overlapped = plan

    def next_round(self) -> None:
        """Abandons the buckets that were begun and not finished. All ranks must call this."""
        self._round += 1
        for plan in self._plans:
            if plan.begun:
                self._native.abandon(self._round)
            plan.restart()

    def complete(self, plan: Plan, bucket: int, parameter: Tensor, step: int) -> None:
        """Begins buckets whose gradients are complete. A hook of the backward pass.

        Args:
            plan: The plan of the parameter.
            bucket: The parameter's bucket.
            parameter: A parameter whose gradient is complete.
            step: The step that errors name.

        Raises:
            CallerError: The gradient has left before.
        """
        if plan is not self._overlapped:
            return
        if bucket < plan.begun:
            raise CallerError(SECOND_PASS)
        plan.buckets[bucket].missing.discard(id(parameter))
        while plan.begun < len(plan.buckets) and not plan.buckets[plan.begun].missing:
            self._begin_next(plan, step)

    def watch(self, plan: Plan, hook: Callable[[Plan, int, Tensor], None]) -> None:
        """Calls `hook` with the plan, the bucket and the parameter whenever a pass has completed a gradient."""
        if plan.hooks or plan is not self._overlapped:
            return
        for at, bucket in enumerate(plan.buckets):
            for parameter in bucket.parameters:

                def completed(parameter: Tensor, at: int = at) -> None:
                    hook(plan, at, parameter)

                plan.hooks.append(parameter.register_post_accumulate_grad_hook(completed))

    @torch.no_grad()
    def _begin_next(self, plan: Plan, step: int) -> None:
        at = plan.begun
        bucket = plan.buckets[at]
        flat = bucket.pack()
        self._native.begin((plan.index, at, self._round, step), bucket.wide, (flat.data_ptr(), flat.nbytes))
        plan.begun += 1

    def _add(self, parameters: list[nn.Parameter]) -> Plan:
        plan = Plan(parameters, len(self._plans))
        shape = [(bucket.elements, bucket.wide) for bucket in plan.buckets]
        saved = next((saved for saved in self._saved if saved["buckets"] == shape), None)
        if saved is None and self._saved:
            raise CallerError(
                "the state of the migration is of a module with other dense parameters: reduce that module, or resume "
                "without the state"
            )
        state = None if saved is None else saved["state"].numpy().tobytes()
        self._native.add_plan(shape, state)
        self._saved = [other for other in self._saved if other is not saved]
        self._plans.append(plan)
        return plan

    def _stop_overlap(self) -> None:
        assert self._overlapped is not None
        self._overlapped.unhook()
        self._overlapped = None
        self.next_round()

    # ---- failures

    def check(self) -> None:
        """Raises the error of this reduction, if it has one."""
        self._native.check()

    def blame(self, rank: int, fault: str) -> None:
        """Tells all ranks that `rank` is at fault."""
        self._native.blame(rank, fault)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Wraps waits of other parts of a step: names the rank at fault, and tells all ranks, whichever part finds
        it."""
        try:
            yield
        except PeerError as error:
            # What was found may follow from the fault of a third rank, whose name is on its way.
            bound = time.monotonic() + _NEWS
            while time.monotonic() < bound:
                self.check()
                time.sleep(0.01)
            self.blame(error.peer, error.fault)
            raise

    # ---- checkpoints, the end

    def state(self) -> list[dict[str, Any]]:
        """Returns the state of the codec of every plan."""
        plans = [
            {
                "buckets": [(bucket.elements, bucket.wide) for bucket in plan.buckets],
                "state": torch.frombuffer(bytearray(self._native.save(plan.index)), dtype=torch.uint8),
            }
            for plan in self._plans
        ]
        return plans + self._saved

    def load(self, state: list[dict[str, Any]]) -> None:
        """Continues from `state`: before the first reduction."""
        self._saved = [{**saved, "state": saved["state"].cpu().contiguous()} for saved in state]
        for saved in self._saved:
            saved["buckets"] = [tuple(bucket) for bucket in saved["buckets"]]

    def stats(self) -> dict[str, int]:
        return self._native.stats()

    def close(self, *, at_once: bool) -> None:
        for plan in self._plans:
            plan.unhook()
        self._native.close(at_once)
        self._carrier.close()


class Plan:
    """The buckets of a module's dense parameters."""

    def __init__(self, parameters: list[nn.Parameter], index: int) -> None:
        self.index = index
        self.buckets: list[_Bucket] = []
        # The number of buckets of this round that have begun.
        self.begun = 0
        self.hooks: list[Any] = []
        # Weak: a plan must not keep a module that the program has dropped.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        open_buckets: dict[bool, list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            wide = _WIDE[parameter.dtype]
            size = 4 if wide else 2
            bucket = open_buckets.setdefault(wide, [])
            if bucket and size * (sum(p.numel() for p in bucket) + parameter.numel()) > BUCKET_BYTES:
                self.buckets.append(_Bucket(bucket, wide))
                bucket = open_buckets[wide] = []
            bucket.append(parameter)
        self.buckets += [_Bucket(bucket, wide) for wide, bucket in open_buckets.items()]
        self.restart()

    def is_of(self, parameters: list[nn.Parameter]) -> bool:
        own = [reference() for reference in self._parameters]
        return len(own) == len(parameters) and all(a is b for a, b in zip(own, parameters, strict=True))

    def restart(self) -> None:
        self.begun = 0
        for bucket in self.buckets:
            bucket.restart()

    def unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


class _Bucket:
    """Gradients that are reduced together."""

    def __init__(self, parameters: list[nn.Parameter], wide: bool) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self.wide, self.dtype = wide, torch.float32 if wide else torch.bfloat16
        self.elements = sum(parameter.numel() for parameter in parameters)
        # The parameters whose gradients a backward pass has not completed.
        self.missing: set[int] = set()
        # The gradients that left, and their versions.
        self._left: list[tuple[Tensor, int]] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        found = [reference() for reference in self._parameters]
        return [parameter for parameter in found if parameter is not None]

    def restart(self) -> None:
        self.missing = {id(parameter) for parameter in self.parameters}
        self._left = []

    def pack(self) -> Tensor:
        """Returns all gradients in one tensor, in host memory."""
        gradients = []
        for parameter in self.parameters:
            if parameter.grad is None:  # other ranks may have used the parameter
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise CallerError("a dense parameter has a sparse gradient: use embeddings with sparse=False")
            gradients.append(parameter.grad)
        self._left = [(gradient, gradient._version) for gradient in gradients]
        return torch.cat([gradient.reshape(-1).to(self.dtype) for gradient in gradients]).cpu()

    def check(self) -> None:
        """Raises `CallerError` if a gradient has changed since it left."""
        for parameter, (gradient, version) in zip(self.parameters, self._left, strict=True):
            if parameter.grad is not gradient or gradient._version != version:
                raise CallerError(
                    f"a gradient of shape {[*parameter.shape]} changed after it had left in the backward pass: change "
                    "gradients after reduce_gradients, or run the backward pass inside `with migration.accumulate():`"
                )

    def write(self, sums: Tensor) -> None:
        parts = sums.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            assert parameter.grad is not None, "pack made it"
            parameter.grad.copy_(part.view_as(parameter.grad))


def dense_parameters(module: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Returns the parameters that need gradients and are not of experts, each once.

    Args:
        module: The module.
        device: The device on which the parameters must be.

    Raises:
        CallerError: A parameter has a type or a device that cannot be reduced.
    """
    dense, _ = parameter_groups(module)
    found = [p for p in dense["params"] if p.requires_grad]
    for parameter in found:
        if parameter.dtype not in _WIDE or parameter.device != device:
            raise CallerError(
                f"a dense parameter is of {parameter.dtype} on {parameter.device}: it must be float32, float16 or "
                f"bfloat16, on the device of the migration, {device}"
            )
    return found
