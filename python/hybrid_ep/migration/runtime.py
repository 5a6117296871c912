"""`ExpertMigration`: a rank's part of the runtime that moves expert weights and gradients between datacenters."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _native
from .._gradients import sums_of_bits, unequal_start
from .._layers import digest_of, facts_of, first_difference
from .._settings import device_of, join_timeout
from .._sharing import Shared
from ..buffer import Buffer
from ..errors import CallerError
from ..experts import expert_parameters, local_part
from ..rendezvous import Meeting
from .carrier import Carrier, connect
from .copies import CopiesOfExperts
from .dense import SECOND_PASS, DenseGradients, dense_parameters
from .engine import Engine, span_of
from .host_memory import HostMemory
from .job_ranks import JobRanks
from .membership import Ownership, agree, ranks_of
from .plan import ExpertDomains

if TYPE_CHECKING:
    from typing_extensions import Self

    from .dense import Plan
    from .layer import HybridExperts

__all__ = ["ExpertMigration"]


class ExpertMigration(Shared):
    """Moves the weights and gradients of experts between datacenters.

    Make the migration on all ranks, then the layers (`HybridMoELayer`), in the same order on all ranks. The
    constructor, `publish`, `reduce_gradients` and every pass through a layer are collective.

    A step is: forward and backward passes, `reduce_gradients`, the optimizer's step, `publish`. The first forward pass
    publishes if nothing was published before.

    Attributes:
        plan (ExpertDomains): The plan.
        rank (int): This rank's number.
        num_experts (int): E, the number of experts.
        buffer (Buffer): The communicator of this rank's dispatch group.

    Args:
        plan: Which rank gathers from which.
        num_experts: E, the number of experts of every layer; a multiple of the number of ranks of an EP group.
        weights: The codec of weights: "exact", "int8", "delta:DENSITY", "delta:DENSITY,warm_up=STEPS" or
            "shared:DENSITY". The first pass refuses an unknown codec.
        gradients: The codec of gradients of experts: "exact", "int8" or "topk:DENSITY".
        dense_gradients: The codec of all other gradients between datacenters, likewise; also that of experts' gradients
            between EP groups in different datacenters.
        depth: The number of layers whose weights a rank receives ahead of the layer that it computes; without a limit
            if `staleness` is not 0.
        staleness: The number of steps that a replica may lag behind its owner; 0 with the codec "shared".
        shared_refresh: With the codec "shared": the number of steps between two shared experts.
        timeout: Seconds that a wait for another rank's weights or gradients may take. An error comes at most a second
            later.
        carrier: What moves messages between ranks: "gloo", or an engine of rails by its name, as HYBRID_EP_TRANSPORT
            has it: "tcp", "efa", or on one machine "loopback".
        group: The ranks of the plan: in a job with pipeline stages, those of this rank's stage. Default: the default
            process group.
        ep_group: If the plan has several EP groups: the process group of this rank's, `plan.ep_group_of(rank)`, over
            which the parameters of experts are sharded.
        domains: As for `Buffer`: the number of NVLink domains that a dispatch group spans.
        device: The device of all tensors: the CPU or a CUDA device, as for `Buffer`.
        codec_device: "cpu": weights and gradients of a GPU are copied to main memory and encoded there, and what
            arrives is decoded there and copied to the GPU. "cuda", with `device`: the GPU encodes and decodes, and only
            encoded bytes cross PCIe (with weights by "shared", whole weights). What encoders keep is then in GPU
            memory: with gradients by "int8" or "topk", 4 bytes for each element of the replicas, and of one expert of
            each size; with weights by "delta", a copy of this rank's experts. The bits are the same.
        workers: As for `Buffer`.

    Raises:
        CallerError: There is no process group, the plan or the number of experts does not fit it, or ranks passed
            different arguments.
        SetupError: There is too little memory, or the carrier cannot connect the ranks.
        PeerError: A rank did not make the migration within HYBRID_EP_TIMEOUT_MS.

    Example:
        >>> migration = ExpertMigration(ExpertDomains.uniform(ranks=4, datacenters=2), num_experts=8)
        >>> layer = HybridMoELayer(migration, hidden=64, intermediate=128, topk=2)
        >>> optimizer = torch.optim.AdamW(parameter_groups(layer))
        >>> layer(torch.randn(100, 64)).square().mean().backward()
        >>> migration.reduce_gradients(layer)
        >>> optimizer.step()
        >>> migration.publish()
    """

    # Tests replace both. `_copies` says whether tensors on the CPU are copied as those of a GPU are.
    _make_engine: Callable[[_native.MigrationSettings, Any, bytes | None], Engine] = _native.Migration
    _copies: bool | None = None

    def __init__(
        self,
        plan: ExpertDomains,
        *,
        num_experts: int,
        weights: str = "int8",
        gradients: str = "int8",
        dense_gradients: str = "exact",
        depth: int = 4,
        staleness: int = 0,
        shared_refresh: int = 100,
        timeout: float = 60.0,
        carrier: str = "gloo",
        group: dist.ProcessGroup | None = None,
        ep_group: dist.ProcessGroup | None = None,
        domains: int = 1,
        device: torch.device | str | int = "cpu",
        codec_device: str = "cpu",
        workers: int | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise CallerError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
        group = group or dist.group.WORLD
        assert group is not None
        meeting = Meeting.of(group, "migration")
        with meeting.reported():
            meeting.timeout = join_timeout()
            where = device_of(device)
            if codec_device not in ("cpu", where.type):
                either = '"cpu"' if where.type == "cpu" else f'"cpu" or "{where.type}"'
                raise CallerError(f"codec_device is {codec_device!r}, must be {either} with tensors on {where}")
            ranks, own_group = ranks_of(plan, group, ep_group, num_experts)
            if not timeout > 0:
                raise CallerError(f"timeout is {timeout}, must be greater than 0")
            settings = {
                "plan": repr(plan),
                "stages": plan.stages,
                "num_experts": num_experts,
                "weights": weights,
                "gradients": gradients,
                "dense_gradients": dense_gradients,
                "depth": depth,
                "staleness": staleness,
                "shared_refresh": shared_refresh,
                "timeout": timeout,
                "carrier": carrier,
                "domains": domains,
                "device": where.type,
            }
            self._run = agree(meeting, settings)
        meeting.end()
        self._process = os.getpid()
        self.plan, self.num_experts, self.rank = plan, num_experts, group.rank()
        self._stage = plan.stages.index(ranks) if len(plan.stages) > 1 else 0
        self._weights, self._gradients, self._depth, self._staleness = weights, gradients, depth, staleness
        self._shared_refresh, self._timeout = shared_refresh, timeout
        self._group, self._dense_codec = group, dense_gradients
        # The number is unique, so that a later group does not find what gloo has left in the store.
        place = f"migration {self._run}"
        self.ownership = Ownership(plan, self.rank, num_experts, own_group, where)
        # Codecs on a GPU read and write its tensors.
        self._codecs_on_gpu = codec_device == "cuda"
        self.host_memory = HostMemory(where, False if self._codecs_on_gpu else self._copies)
        self._domain = plan.domain_of(self.rank)
        # All ranks connect first, so that the error about a missing rank has its number among all ranks.
        everyone = range(plan.ranks)
        to_all = connect(meeting.among(f"{place}/all ranks", everyone), carrier, everyone)
        self._dense = DenseGradients(self.rank, to_all, plan.datacenters, dense_gradients, timeout, self._run)
        # The carrier of the expert domain; None for a domain of one rank, which has no replicas.
        self._carrier: Carrier | None = None
        # None if there is one EP group.
        self._over_groups: CopiesOfExperts | None = None
        try:
            copies = plan.copies_of(self.rank)
            if len(copies) > 1:
                to_copies = connect(meeting.among(f"{place}/copies", copies), carrier, copies)
                self._over_groups = CopiesOfExperts(
                    self.rank, copies, to_copies, plan.datacenters, dense_gradients, timeout, self._run
                )
            if len(self._domain) > 1:
                meet = meeting.among(f"{place}/expert domain", self._domain)
                self._carrier = connect(meet, carrier, self._domain)
            self.buffer = Buffer._of_meeting(
                meeting.among(f"{place}/dispatch group", plan.group_of(self.rank)),
                num_experts=num_experts,
                domains=domains,
                device=where,
                workers=workers,
            )
        except BaseException:
            self._dense.close(at_once=True)
            if self._over_groups is not None:
                self._over_groups.close(at_once=True)
            if self._carrier is not None:
                self._carrier.close()
            raise
        end = self.buffer._end
        own = JobRanks(end.native, plan.group_of(self.rank), self._dense.explained)
        end.native = cast(_native.Buffer, own)
        self._layers: list[HybridExperts] = []
        self._engine: Engine | None = None
        self._step = 0
        # Whether this object has published, and whether it has reduced gradients since.
        self._published = self._reduced = self._discarded = False
        self._accumulating = False
        # The modules whose dense parameters the ranks have compared.
        self._begun: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # The state of the codecs that the engine begins with.
        self._saved: bytes | None = None
        self._closed = False
        _open.add(self)

    # ---- properties

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks."""
        return self._group

    @property
    def step(self) -> int:
        """The number of calls of `publish`."""
        return self._step

    @property
    def _last_step(self) -> int:
        """The step of the last `publish`, which errors name."""
        return max(self._step - 1, 0)

    @property
    def held_experts(self) -> list[int]:
        """The experts that this rank holds: first its own, then replicas, in the order of their owners."""
        return self.plan.held_by(self.rank, self.num_experts)

    @property
    def places(self) -> Tensor:
        """int64 [E + 1]: for each expert, where the buffer of the dispatch group has it. The last element, which the
        index -1 selects, is -1."""
        places = torch.full((self.num_experts + 1,), -1)
        held = self.num_experts // len(self.plan.group_of(self.rank))
        for position, rank in enumerate(self.plan.group_of(self.rank)):
            experts = torch.tensor(self.plan.held_by(rank, self.num_experts))
            places[experts] = torch.arange(position * held, (position + 1) * held)
        return places.to(self.buffer.device)

    # ---- a step

    @torch.no_grad()
    def publish(self) -> None:
        """Encodes the weights of this rank's experts, and queues a message for each layer and peer.

        Call it after every step of the optimizer, on all ranks, and after the weights of experts were loaded.

        Raises:
            CallerError: A weight is not finite, there is no layer, or gradients of this step were neither reduced nor
                discarded.
            PeerError: Another rank of the expert domain died, failed or is late.
        """
        engine = self._started()
        if self._has_gradients and not self._discarded:
            raise CallerError(
                "the gradients of this step were not reduced: call reduce_gradients before the optimizer's step, or, "
                "to leave the step out, discard_gradients and zero_grad on all ranks"
            )
        all_own = [experts.refresh() for experts in self._layers]
        if engine is not None and self._weights != "exact":
            for index, own in enumerate(all_own):
                # Checks before the first message, because all layers must be in the same step.
                if not own.isfinite().all():
                    raise CallerError(f"weights of layer {index} are not finite; nothing was sent")
        for index, (experts, own) in enumerate(zip(self._layers, all_own, strict=True)):
            experts.discard_gradients()
            if engine is not None:
                self._publish(engine, index, self.host_memory.read(own))
        self._dense.next_round()
        self._step += 1
        self._published, self._reduced, self._discarded = True, False, False

    @property
    def _has_gradients(self) -> bool:
        """Whether a backward pass since the last publish has left gradients here, or sent some."""
        return self._dense.has_left or any(experts.working.grad is not None for experts in self._layers)

    def _publish(self, engine: Engine, index: int, own: Tensor) -> None:
        try:
            with self._dense.explained():
                engine.publish(index, span_of(own), self._stream())
        except CallerError:
            if index > 0:
                # Other layers are in the next step already. The peers would wait for this one.
                self._close(at_once=True)
            raise

    def start_over(self) -> None:
        """Makes the next messages of all layers complete: replicas then equal their owners, apart from the rounding of
        `int8`.

        Needed with the codec `delta` only, when replicas lag too far behind; `LossGuard` decides that. Messages of the
        other codecs are always complete. A rank may call this alone, before `publish`.
        """
        if (engine := self._started()) is not None:
            engine.start_over()

    def discard_gradients(self) -> None:
        """Forgets the gradients of experts since the last `reduce_gradients`.

        `zero_grad` of a model or an optimizer does not do this: before `reduce_gradients` these gradients are not those
        of parameters. Call both to leave out micro-batches.

        If gradients have left, which they do in a backward pass outside of `accumulate`, the step is left out: call
        this on all ranks, and then `publish`, without another backward pass or `reduce_gradients` before it.
        """
        if self._dense.has_left or any(experts.sent for experts in self._layers):
            # Keeps the gradients until `publish`, so that a further backward pass finds that they have left.
            self._discarded = True
            return
        for experts in self._layers:
            experts.discard_gradients()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keeps gradients on this rank: for the backward passes of all micro-batches of a step except the last.

        Example:
            >>> with migration.accumulate():
            ...     loss(model, first).backward()
            >>> loss(model, last).backward()
            >>> migration.reduce_gradients(model)
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def reduce_gradients(self, module: nn.Module, *, op: Literal["mean", "sum"] = "mean") -> None:
        """Makes the gradients on every rank those of the mean (or sum) of the ranks' losses. Collective.

        The gradient of an expert is the sum over its expert domain, in rank order, and goes to its owner. With several
        EP groups, the sums of an expert's owners are summed like dense gradients. Gradients of dense parameters are
        summed in rank order inside each datacenter, and these sums in the order of the datacenters. From the second
        step on, most of them have left during the backward pass.

        Args:
            module: The module whose gradients are reduced, in place: all that the optimizer updates. A missing gradient
                counts as zero.
            op: "mean" or "sum".

        Raises:
            CallerError: `op` is neither "mean" nor "sum", a gradient has changed since it left, a gradient is not
                finite and the codec is lossy, a dense gradient has a type that cannot be reduced, the gradients of this
                step were reduced or discarded before, or, in the first call for a module, a dense parameter, a setting
                of a layer, or the shape or type of a parameter is not equal on all ranks.
            PeerError: Another rank died, failed or is late.
        """
        if op not in ("mean", "sum"):
            raise CallerError(f'op is {op!r}, must be "mean" or "sum"')
        engine = self._started()
        if self._published and self._reduced:
            raise CallerError(
                "the gradients of this step are reduced already: call publish after the optimizer's step, which begins "
                "the next one"
            )
        if self._discarded:
            raise CallerError("the gradients of this step were discarded: call publish, which begins the next step")
        parameters = dense_parameters(module, self.buffer.device)
        self._check_start(module, parameters)
        scale = 1.0 / self.plan.ranks if op == "mean" else 1.0
        # Gradients leave in the order of the backward pass, so the first to arrive are those of the last layer.
        backward = [*enumerate(self._layers)][::-1]
        for experts in self._layers:
            experts.check_gradient()
        with self._dense.explained():
            for index, experts in backward:
                self._send_gradients(index, experts)
            plan = self._dense.begin_all(parameters, self._last_step)
            if self._over_groups is None:
                for index, experts in backward:
                    experts.finish_gradients(self._total(engine, index, experts, experts.scratch_sum()))
            else:
                # The sum of a layer leaves for the other EP groups while the next layers wait for their domain.
                totals = [experts.empty_sum() for _, experts in backward]
                filled = (
                    self._total(engine, index, experts, total)
                    for (index, experts), total in zip(backward, totals, strict=True)
                )
                elements = [total.numel() for total in totals]
                self._over_groups.sum(elements, filled, self._last_step)
                for (_, experts), total in zip(backward, totals, strict=True):
                    experts.finish_gradients(total)
            self._dense.finish_all(plan, self._last_step, scale)
        for parameter in expert_parameters(module):
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.mul_(scale)
        self._dense.watch(plan, _dense_hook(self))
        self._reduced = True

    def _total(self, engine: Engine | None, index: int, experts: HybridExperts, total: Tensor) -> Tensor:
        """Waits for the sum of a layer's gradients over the expert domain. Returns `total`, which has it."""
        own = self.host_memory.read(experts.own_gradient())
        if engine is None:
            return total.copy_(own)
        # The engine sums where it decodes; sums over EP groups are in main memory.
        sums = total if total.device == own.device else torch.empty_like(total, device=own.device)
        engine.reduce_gradients(index, span_of(own), span_of(sums), self._stream())
        return total if sums is total else total.copy_(sums)

    def _stream(self) -> int:
        """Returns the raw handle of the stream whose work an engine waits for; 0 if it works in main memory."""
        return torch.cuda.current_stream(self.buffer.device).cuda_stream if self._codecs_on_gpu else 0

    def _check_start(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Compares layers, dense parameters and, over the EP groups, experts, once for each module: gradients keep them
        equal."""
        if module in self._begun:
            return
        dense = {id(parameter) for parameter in parameters}
        named = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in dense}
        facts = facts_of(module, {id(parameter) for parameter in expert_parameters(module)}, dense=True)
        # One EP group has every expert once.
        several = len(self.plan.ep_groups) > 1
        experts_of = [local_part(parameter) for parameter in expert_parameters(module)] if several else []
        own = [
            digest_of(facts),
            sums_of_bits(experts_of).tolist() if experts_of else [],
            *(sums_of_bits(named.values()).tolist() if named else []),
        ]
        # Does not use a collective of the group, whose wait for a lost rank may take 30 minutes.
        meeting = Meeting.of(self._group, "first reduction of the module")
        meeting.timeout, meeting.check = self._timeout, self._dense.check
        with self._dense.explained():
            found = [json.loads(one) for one in meeting.all_gather(json.dumps(own).encode())]
            differ = len({digest for digest, *_ in found}) > 1
            texts = meeting.all_gather(json.dumps(facts).encode()) if differ else []
        meeting.end()
        unequal = first_difference([json.loads(text) for text in texts], range(len(texts)))
        if unequal is not None:
            raise CallerError(f"reduce_gradients: {unequal}")
        # All ranks compare all, so that all raise the error.
        for rank in range(self.plan.ranks):
            first = self.plan.copies_of(rank)[0]
            if found[rank][1] != found[first][1]:
                raise CallerError(
                    f"the experts of rank {rank} differ from those of rank {first}, which owns the same: call "
                    "torch.manual_seed with the same number on all ranks before the model is made, or load the same "
                    "experts in every EP group"
                )
        for name, *values in zip(named, *(sums for _, _, *sums in found), strict=True):
            if (other := next((rank for rank, value in enumerate(values) if value != values[0]), None)) is not None:
                raise CallerError(unequal_start(name, 0, other))
        self._begun.add(module)

    def _check_peers(self, waited_for: str, waited: float, has_failed: bool) -> None:
        """Checks the other ranks during a wait for a collective of PyTorch, like `Buffer._check_peers`.

        Raises:
            PeerError: A rank died, left, failed, stalled or is late.
        """
        self._dense.check()
        self.buffer._check_peers(waited_for, waited, has_failed)

    # ---- called by layers

    def register(self, experts: HybridExperts) -> int:
        """Takes the experts of a layer, before the first step. Returns the number of the layer."""
        if self._engine is not None or self._published:
            raise CallerError("the layer comes too late: make all layers before the first forward pass")
        self._layers.append(experts)
        return len(self._layers) - 1

    def gather(self, index: int) -> None:
        """Brings the replicas of a layer to the step of the last `publish`."""
        if not self._published:
            self.publish()
        experts, engine = self._layers[index], self._started()
        if experts.gathered == self._step:
            return
        if engine is not None:
            with self._dense.explained():
                experts.replica_steps = engine.gather(index, span_of(experts.host_replicas), self._stream())
            experts.take_replicas()
        experts.gathered = self._step

    def gradients_complete(self, index: int) -> None:
        """Sends the gradients of a layer, unless more micro-batches follow. A hook of the backward pass."""
        experts = self._layers[index]
        if experts.sent or self._discarded:
            # An error even inside `accumulate`: the owners do not get what this pass has added.
            raise CallerError(SECOND_PASS)
        if not self._accumulating:
            with self._dense.explained():
                self._send_gradients(index, experts)

    def _send_gradients(self, index: int, experts: HybridExperts) -> None:
        if experts.sent:
            return
        if (engine := self._started()) is not None:
            gradients = self.host_memory.read(experts.replica_gradient())
            engine.send_gradients(index, span_of(gradients), self._stream())
        experts.note_sent()

    def _started(self) -> Engine | None:
        """Returns the engine; None for an expert domain of one rank, which has no replicas."""
        if self._closed:
            raise CallerError("the migration is closed")
        if self._engine is not None or self._carrier is None:
            return self._engine
        if not self._layers:
            raise CallerError("the migration has no layer: make HybridMoELayer(migration, ...) first")
        types = {experts.working.dtype for experts in self._layers}
        if len(types) > 1:
            raise CallerError(f"all layers must have the same working_dtype, found {sorted(map(str, types))}")
        settings: _native.MigrationSettings = {
            "rank": self.rank,
            "domain": [*self._domain],
            "experts_per_rank": self.ownership.num_local_experts,
            "expert_elements": [experts.working.shape[1] for experts in self._layers],
            "wide": types == {torch.float32},
            "gpu": self.buffer.device.index if self._codecs_on_gpu else None,
            "weights": self._weights,
            "gradients": self._gradients,
            "depth": self._depth,
            "staleness": self._staleness,
            "shared_refresh": self._shared_refresh,
            "timeout": self._timeout,
            "run": self._run,
        }
        self._engine = type(self)._make_engine(settings, self._carrier, self._saved)
        self._saved = None
        return self._engine

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint of this rank needs besides the state dicts of model and optimizer.

        Call it between the optimizer's step and `publish`. A rank loads what it saved itself.

        Returns:
            The number of the step, and the state of the codecs.

        Raises:
            CallerError: The weights of the last step of the optimizer have been published.
        """
        if self._published and not self._reduced:
            raise CallerError("call state_dict between the optimizer's step and publish: then no message is on its way")
        engine = self._started()
        state = b"" if engine is None else engine.save()
        return {
            "rank": self.rank,
            "copies": None if self._over_groups is None else self._over_groups.state(),
            "stage": self._stage,
            "step": self._step,
            # torch.load(weights_only=True) accepts tensors. `frombuffer` refuses an empty buffer.
            "codecs": torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else torch.zeros(0).byte(),
            "dense": self._dense.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, on all ranks. Load the state dict of the model, too, before the first pass.

        Args:
            state: The state that this rank saved, with the same plan, layers and codecs.

        Raises:
            CallerError: Another rank saved the state, it does not fit, or this migration has begun its first step.
        """
        if self._engine is not None or self._published:
            raise CallerError("the state comes too late: load it before the first forward pass")
        saved, own = (state.get("stage", 0), state["rank"]), (self._stage, self.rank)
        if saved != own:
            stages = len(self.plan.stages) > 1
            by, here = (f"rank {rank}" + (f" of stage {stage}" if stages else "") for stage, rank in (saved, own))
            raise CallerError(f"state: {by} saved it, and this is {here}")
        codecs = state["codecs"].cpu().contiguous()
        self._saved = ctypes.string_at(codecs.data_ptr(), codecs.numel())
        try:
            self._started()
        finally:
            self._saved = None
        self._dense.load(state["dense"])
        if self._over_groups is not None:
            self._over_groups.load(state.get("copies"))
        self._step = state["step"]

    # ---- the end

    def stats(self) -> dict[str, float]:
        """Returns counters since the first step. An expert domain of one rank has only those of dense gradients.

        Returns:
            Bytes with headers: of experts, `weights_sent`, `weights_received`, `gradients_sent` and
            `gradients_received`; of dense gradients, `dense_link_sent` and `dense_link_received` between datacenters,
            `dense_inside_sent` and `dense_inside_received` inside this one; with several EP groups, of sums of experts'
            gradients over them, `copies_link_sent` and so on. Seconds: `encoding` and `decoding` of
            experts, and the waits for peers, `gather_waits` and `reduce_waits`.
        """
        copies = {} if self._over_groups is None else self._over_groups.stats()
        return {**self._dense.stats(), **copies, **({} if self._engine is None else self._engine.stats())}

    def close(self) -> None:
        """Leaves together with all ranks of the expert domain. Call this method before
        `torch.distributed.destroy_process_group`.

        The method waits up to `timeout` for ranks that have not called it. A second call does nothing.
        """
        self._close(at_once=False)

    def _close(self, *, at_once: bool) -> None:
        if self._closed or os.getpid() != self._process:
            return  # a forked child does not leave for its parent
        self._closed = True
        self._dense.close(at_once=at_once)
        if self._over_groups is not None:
            self._over_groups.close(at_once=at_once)
        if self._engine is not None:
            self._engine.close(at_once)
        if self._carrier is not None:
            self._carrier.close()
        self.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A rank that failed tells the others, and does not wait until they need nothing more.
        self._close(at_once=kind is not None)

    def __repr__(self) -> str:
        return (
            f"ExpertMigration(rank={self.rank}, {self.plan}, num_experts={self.num_experts}, "
            f"weights={self._weights!r}, gradients={self._gradients!r}, dense_gradients={self._dense_codec!r})"
        )


def _dense_hook(migration: ExpertMigration) -> Callable[[Plan, int, Tensor], None]:
    # Parameters hold the hook. A hook that holds the migration would keep it as long as the model lives.
    weak = weakref.ref(migration)

    def complete(plan: Plan, bucket: int, parameter: Tensor) -> None:
        living = weak()
        if living is not None and not living._accumulating:
            living._dense.complete(plan, bucket, parameter, living._last_step)

    return complete


_open: weakref.WeakSet[ExpertMigration] = weakref.WeakSet()


# Threads of the engine must not outlive the interpreter.
@atexit.register
def _close_all() -> None:
    for migration in list(_open):
        migration._close(at_once=True)
