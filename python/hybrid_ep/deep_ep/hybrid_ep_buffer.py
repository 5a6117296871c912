"""`HybridEPBuffer`: the interface of DeepEP's `hybrid-ep` branch, implemented by `hybrid_ep.Buffer`.

Signatures are DeepEP's. Every parameter is accepted; the docstrings name those without effect. docs/semantics.md
defines the operators. No call records gradients: programs wrap the calls in their own autograd functions.
"""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_ep import Buffer, CallerError, Dispatched, _calls
from hybrid_ep.work import is_capturing

from .arguments import (
    Tokens,
    check_pad_multiple,
    fresh_routing,
    given_capacity,
    given_pad_multiple,
    indices_to_map,
    rows_wanted,
    weights_again,
)
from .config import NO_MAXIMUM, BufferConfig, Configurer, HybridEpConfigInstance
from .handles import PermutedHandle, PlainHandle, parse

__all__ = ["HybridEPBuffer", "indices_to_map"]

# DeepEP's variable. Programs such as Megatron-Core pass no argument for it.
_RANKS_PER_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"

AnyTensor = TypeVar("AnyTensor", Tensor, Tensor | None)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _without_gradients(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Like `torch.no_grad`, but without cost if gradients are already off, as in an autograd function."""

    @functools.wraps(call)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with torch.no_grad():
            return call(*args, **kwargs)

    return run


class HybridEPBuffer:
    """One rank's end of dispatch and combine between the ranks of a `torch.distributed` group.

    The constructor allocates nothing and contacts no rank. The first operator makes a `hybrid_ep.Buffer` for its number
    of experts and the device of its tokens. All operators are collective. On a GPU they run in the current stream; the
    rules for tensors used by other streams are those of `hybrid_ep.Buffer`.

    Args:
        group: The ranks.
        hidden_dim: Not a limit: any call may have a different hidden size. On GPUs in several NVLink domains, a longer
            row may need HYBRID_EP_CUDA_LANE_BYTES.
        max_num_of_tokens_per_rank: Not a limit: any call may have more tokens. On GPUs in several NVLink domains it is
            one, unless another rank, or the first call, has more tokens. Ranks may differ.
        num_local_experts: Experts of each rank, for calls that do not give the number of experts.
        use_fp8: The default of `use_fp8` in dispatches: bfloat16 tokens are quantized in flight.
        num_sms_dispatch_api: SMs of dispatch. The larger of this and `num_sms_combine_api` applies to both operators.
            Default: HYBRID_EP_SMS.
        num_sms_combine_api: SMs of combine.
        num_sms_preprocessing_api: No effect.
        num_blocks_permute: No effect.
        num_blocks_unpermute: No effect.
        load_cached_kernels: No effect: cached kernels are always loaded.
        use_shared_buffer: No effect.
        enable_custom_allgather: No effect.
        num_of_hybrid_ep_ranks_per_nvlink_domain: The ranks of each NVLink domain. Default: all
            ranks. As in DeepEP, NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN in the environment overrides it. On GPUs with
            several domains, HYBRID_EP_TRANSPORT must be `tcp`, or `shm` on one machine.
        use_mnnvl: No effect: the package detects MNNVL.

    Raises:
        CallerError: The ranks cannot be split into domains of the given size, or the environment variable is not a
            number.

    Example:
        >>> buffer = HybridEPBuffer(group, hidden_dim=512, max_num_of_tokens_per_rank=128, num_local_experts=4)
        >>> rows, probs, scales, counts, handle = buffer.dispatch_with_permute(
        ...     hidden=tokens, topk_idx=topk_idx, topk_weights=topk_weights, pad_multiple=16
        ... )
        >>> combined, _ = buffer.combine_with_unpermute(hidden=experts(rows, counts), handle=handle)
    """

    def __init__(
        self,
        group: ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.num_of_nodes = _domains(self.group_size, num_of_hybrid_ep_ranks_per_nvlink_domain)
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.group_size // self.num_of_nodes
        self.local_rank = self.rank % self.num_of_hybrid_ep_ranks_per_nvlink_domain
        self.node_rank = self.rank // self.num_of_hybrid_ep_ranks_per_nvlink_domain
        self.use_fp8 = use_fp8
        self.configurer = Configurer(
            BufferConfig(
                hidden_dim=operator.index(hidden_dim),
                max_num_of_tokens_per_rank=NO_MAXIMUM,
                num_of_experts_per_rank=operator.index(num_local_experts),
                num_of_ranks_per_node=self.num_of_hybrid_ep_ranks_per_nvlink_domain,
                num_of_nodes=self.num_of_nodes,
            )
        )
        self._most_tokens = operator.index(max_num_of_tokens_per_rank)
        self._sms = max((n for n in (num_sms_dispatch_api, num_sms_combine_api) if n is not None), default=None)
        self._buffers: dict[tuple[torch.device, int], Buffer] = {}
        self._own: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def config(self) -> BufferConfig:
        """The same as `configurer.buffer_config`, by the name that programs before June 2026 use."""
        return self.configurer.buffer_config

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """Returns the settings of a call with these arguments. Calls do not need this preparation.

        `**kwargs` are DeepEP's kernel settings. They become attributes of the result and have no effect.
        """
        made_for = self.configurer.buffer_config
        if num_of_tokens_per_rank is not None:
            self._most_tokens = max(self._most_tokens, num_of_tokens_per_rank)
        settings: dict[str, Any] = {
            "hidden_dim": made_for.hidden_dim if hidden_dim is None else hidden_dim,
            "max_num_of_tokens_per_rank": self._most_tokens,
            "num_of_experts_per_rank": (
                made_for.num_of_experts_per_rank if num_local_experts is None else num_local_experts
            ),
            "num_of_ranks_per_node": made_for.num_of_ranks_per_node,
            "num_of_nodes": made_for.num_of_nodes,
            "pad_multiple": pad_multiple or 1,
            "use_fp8": self.use_fp8 if use_fp8 is None else use_fp8,
            "fuse_permute_dispatch": fuse_permute_dispatch,
        }
        return HybridEpConfigInstance(**settings | kwargs)

    def empty_jit_cache(self) -> None:
        """Deletes the compiled kernels on disk, including those of this user's other programs.

        Kernels are compiled again when needed. Stale kernels cannot occur: the key of each contains all that it depends
        on.
        """
        for kernel in _kernel_cache().glob("*.cubin"):
            kernel.unlink(missing_ok=True)

    @_without_gradients
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: PlainHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, PlainHandle]:
        """Sends tokens to the ranks of their experts, in plain mode. Collective.

        A rank receives one row for each token that chose at least one of its experts, ordered by source rank and token.
        The output has exactly the rows that arrive.

        Args:
            hidden: [tokens, hidden], bfloat16, float32, or FP8 as float8_e4m3fn or uint8.
            scaling_factor: Scales of FP8 tokens, as for `hybrid_ep.Buffer.dispatch`; ignored for other tokens, and
                an error with `use_fp8`.
            topk_idx: Integer [tokens, K]; -1 names no expert.
            topk_weights: Floating-point [tokens, K].
            num_of_experts: Experts of all ranks.
            probs: float32 [tokens, experts].
            routing_map: bool [tokens, experts], instead of `topk_idx`.
            num_dispatched_tokens_tensor: No effect.
            num_dispatched_tokens: No effect.
            handle: The handle of an earlier `dispatch`: its layout is reused and the host does not wait. Only weights
                are read from the routing.

        Returns:
            `(tokens, probs, scaling_factor, handle)`. `probs` is float32 [rows, experts of this NVLink domain], zero
            for experts of other ranks.

        Raises:
            CallerError: The arguments do not fit, or a CUDA graph is being captured and no handle is given.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        tokens = Tokens(hidden, scaling_factor, self.use_fp8)
        if handle is not None:
            cached = parse(handle, PlainHandle)
            weights = weights_again(hidden, topk_idx, topk_weights, probs, cached.buffer.num_experts)
            received = self._plain_again(cached, tokens, **weights)
            return tokens.restored(received), self._widened(received.probs), received.scales, cached
        num_experts = self._num_experts(routing_map, num_of_experts, None)
        routing = fresh_routing(hidden, topk_idx, topk_weights, routing_map, probs, num_experts)
        _refuse_capture(hidden, "dispatch without a handle waits for the number of rows")
        buffer = self._buffer_for(hidden, num_experts)
        received = buffer.dispatch(tokens.rows, **tokens.format, **routing)
        assert received.local_experts is not None  # plain mode
        made = PlainHandle(
            native=received.handle,
            buffer=buffer,
            reserved_2=None,
            num_dispatched_tokens=torch.full((1,), received.tokens.shape[0], dtype=torch.int32),
            local_expert_routing_map=received.local_experts,
            num_of_tokens_per_rank=hidden.shape[0],
            config=self._config(hidden, num_experts),
        )
        return tokens.restored(received), self._widened(received.probs), received.scales, made

    @_without_gradients
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: PlainHandle | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sends the experts' outputs back and sums them for each token, in plain mode. Collective.

        Args:
            hidden: [rows, hidden], bfloat16 or float32: the output for each row that `dispatch` delivered.
            probs: float32 [rows, experts of this NVLink domain], of which this rank's experts are read, or
                [rows, experts of this rank].
            handle: The handle of the dispatch.

        Returns:
            `(tokens, probs)`: [tokens, hidden], and float32 [tokens, experts], or None without `probs`.

        Raises:
            CallerError: The arguments do not fit.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        made = parse(handle, PlainHandle)
        end = made.buffer._end
        column = self._first_column(probs, end.local_experts)
        combined = _calls.combine(end, hidden, made.native, probs, wire=None, permuted=False, first_column=column)
        return combined.tokens, combined.probs

    @_without_gradients
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: SupportsIndex | None = None,
        pad_multiple: int | None = None,
        handle: PermutedHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermutedHandle]:
        """Sends tokens to the ranks of their experts, in permuted mode. Collective.

        Args:
            hidden: As for `dispatch`.
            topk_idx: As for `dispatch`.
            topk_weights: As for `dispatch`.
            num_of_experts_per_rank: Experts of each rank.
            num_of_experts: As for `dispatch`.
            use_fp8: Whether bfloat16 tokens are quantized in flight. Default: the constructor's value.
            routing_map: As for `dispatch`.
            probs: As for `dispatch`.
            scaling_factor: As for `dispatch`.
            num_permuted_tokens: With `non_blocking`, the rows of the output; further rows are dropped, those of the
                last experts first. Without `non_blocking`, a hint without effect. With a handle of a non-blocking
                dispatch, the number of first rows to return; a handle of an exact layout returns all its rows.
            pad_multiple: The rows of each expert are padded to a multiple of this number. None or 0: no padding, or
                the value of the handle.
            handle: The handle of an earlier `dispatch_with_permute`: its layout is reused, the host does not wait, and
                `probs` is returned if weights are given.
            non_blocking: Whether the host does not wait for the row counts; needs `num_permuted_tokens`.
            fuse_permute_dispatch: No effect: dispatch always permutes.
            num_dispatched_tokens: Deprecated, no effect.
            use_host_meta: Deprecated: the opposite of `non_blocking`.

        Returns:
            `(tokens, probs, scaling_factor, tokens_per_expert, handle)`. `tokens_per_expert` is int64
            [experts per rank] and includes padding. `handle[-1]` is 1 if rows were dropped.

        Raises:
            CallerError: The arguments do not fit, or a CUDA graph is being captured and the call would wait.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        non_blocking = _deprecated(non_blocking, num_dispatched_tokens, use_host_meta)
        tokens = Tokens(hidden, scaling_factor, self.use_fp8 if use_fp8 is None else use_fp8)
        if handle is not None:
            made = parse(handle, PermutedHandle)
            return self._dispatch_again(tokens, made, topk_idx, topk_weights, probs, num_permuted_tokens, pad_multiple)
        num_experts = self._num_experts(routing_map, num_of_experts, num_of_experts_per_rank)
        routing = fresh_routing(hidden, topk_idx, topk_weights, routing_map, probs, num_experts)
        multiple = given_pad_multiple(pad_multiple) or 1
        capacity = given_capacity(num_permuted_tokens, multiple) if non_blocking else None
        if capacity is None:
            _refuse_capture(hidden, "dispatch_with_permute without non_blocking waits for the counts")
        buffer = self._buffer_for(hidden, num_experts)
        received = buffer.dispatch_with_permute(
            tokens.rows, pad_multiple=multiple, capacity=capacity, **tokens.format, **routing
        )
        made = PermutedHandle(
            native=received.handle,
            buffer=buffer,
            reserved_2=None,
            reserved_3=None,
            reserved_4=None,
            reserved_5=None,
            reserved_6=None,
            tokens_per_expert=received.handle.kept_per_expert,
            num_of_tokens_per_rank=hidden.shape[0],
            config=self._config(hidden, num_experts, pad_multiple=multiple, use_fp8=use_fp8),
            overflow_flag=received.overflow,
        )
        return tokens.restored(received), received.probs, received.scales, received.handle.tokens_per_expert, made

    @_without_gradients
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PermutedHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sends the experts' outputs back and sums them for each token, in permuted mode. Collective.

        Args:
            hidden: [rows, hidden], bfloat16 or float32: the output for each row that the dispatch delivered.
            probs: float32 [rows].
            handle: The handle of the dispatch; it determines the layout.
            pad_multiple: None, or the value of the handle.
            fuse_unpermute_combine: No effect: combine always unpermutes.
            num_dispatched_tokens: Deprecated, no effect.

        Returns:
            `(tokens, probs)`: [tokens, hidden], and float32 [tokens, experts], or None without `probs`.

        Raises:
            CallerError: The arguments do not fit.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        _deprecated(False, num_dispatched_tokens, None)
        made = parse(handle, PermutedHandle)
        check_pad_multiple(pad_multiple, made)
        combined = _calls.combine(made.buffer._end, hidden, made.native, probs, wire=None, permuted=True)
        return combined.tokens, combined.probs

    def _plain_again(
        self, made: PlainHandle, tokens: Tokens, *, topk_weights: Tensor | None = None, probs: Tensor | None = None
    ) -> Dispatched:
        scales, fp8 = tokens.format.get("scales"), tokens.format.get("fp8")
        # The handle already holds the map of local experts.
        weights = _calls.Given(topk_weights=topk_weights, probs=probs)
        return _calls.dispatch(
            made.buffer._end, tokens.rows, weights, made.native, scales=scales, fp8=fp8, local_experts=False
        )

    def _dispatch_again(
        self,
        tokens: Tokens,
        made: PermutedHandle,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        probs: Tensor | None,
        num_permuted_tokens: SupportsIndex | None,
        pad_multiple: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermutedHandle]:
        check_pad_multiple(pad_multiple, made)
        rows = rows_wanted(num_permuted_tokens, made)
        weights = weights_again(tokens.rows, topk_idx, topk_weights, probs, made.buffer.num_experts)
        received = made.buffer.dispatch_with_permute(tokens.rows, handle=made.native, **tokens.format, **weights)
        return (
            _first(rows, tokens.restored(received)),
            _first(rows, received.probs),
            _first(rows, received.scales),
            made.native.tokens_per_expert,
            made,
        )

    def _num_experts(
        self, routing_map: Tensor | None, num_of_experts: int | None, num_of_experts_per_rank: int | None
    ) -> int:
        """Returns the number of experts, which several arguments may give; checks that they agree."""
        named = {}
        if routing_map is not None:
            named["the columns of routing_map"] = routing_map.shape[-1]
        if num_of_experts is not None:
            named["num_of_experts"] = operator.index(num_of_experts)
        if num_of_experts_per_rank is not None:
            named[f"num_of_experts_per_rank x {self.group_size} ranks"] = (
                operator.index(num_of_experts_per_rank) * self.group_size
            )
        if len(set(named.values())) > 1:
            listed = ", ".join(f"{what} = {number}" for what, number in named.items())
            raise CallerError(f"the arguments differ in the number of experts: {listed}")
        if named:
            return next(iter(named.values()))
        return self.configurer.buffer_config.num_of_experts_per_rank * self.group_size

    def _buffer_for(self, hidden: Tensor, num_experts: int) -> Buffer:
        """Returns the communicator for the device of the tokens and the number of experts. Making one is collective."""
        device = hidden.device
        buffer = self._buffers.get((device, num_experts))
        if buffer is None:
            buffer = self._buffers[device, num_experts] = self._join(hidden, num_experts)
            self._own_rank(device)  # a CUDA graph's capture could not copy it to the GPU later
        return buffer

    def _join(self, hidden: Tensor, num_experts: int) -> Buffer:
        device = hidden.device
        if device.type == "cuda" and is_capturing(device):
            raise CallerError(
                f"there is no buffer yet for {num_experts} experts on {device}, and a CUDA graph's capture cannot "
                "make one, as the ranks must meet: run one step without capturing first"
            )
        tokens, row = hidden.shape
        return Buffer(
            self.group,
            num_experts=num_experts,
            domains=self.num_of_nodes,
            device=device,
            sms=self._sms,
            max_tokens=max(self._most_tokens, tokens, 1),
            max_hidden=max(self.configurer.buffer_config.hidden_dim, row, 1),
        )

    def _config(
        self, hidden: Tensor, num_experts: int, *, pad_multiple: int | None = None, use_fp8: bool | None = None
    ) -> HybridEpConfigInstance:
        return self.update_template_config(
            hidden_dim=hidden.shape[1],
            num_of_tokens_per_rank=hidden.shape[0],
            num_local_experts=num_experts // self.group_size,
            pad_multiple=pad_multiple,
            use_fp8=use_fp8,
        )

    def _widened(self, probs: Tensor | None) -> Tensor | None:
        """Widens `[rows, local experts]` to `[rows, experts of the domain]`, with zeros."""
        ranks = self.num_of_hybrid_ep_ranks_per_nvlink_domain
        if probs is None or ranks == 1:
            return probs
        rows, experts = probs.shape
        own, zero = self._own_rank(probs.device)
        wide = torch.where(own, probs.unsqueeze(1), zero)
        return wide.view(rows, ranks * experts)

    def _own_rank(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """bool [ranks of the domain, 1], True for this rank, and a float32 zero. Cached: a copy to a GPU takes time."""
        made = self._own.get(device)
        if made is None:
            ranks = torch.arange(self.num_of_hybrid_ep_ranks_per_nvlink_domain).unsqueeze(1)
            made = self._own[device] = ((ranks == self.local_rank).to(device), torch.zeros((), device=device))
        return made

    def _first_column(self, probs: Tensor | None, experts: int) -> int | None:
        """The first column of this rank in `[rows, experts of the domain]`; None for narrower probs."""
        wide = experts * self.num_of_hybrid_ep_ranks_per_nvlink_domain
        if probs is None or probs.dim() != 2 or probs.shape[1] != wide:
            return None
        return self.local_rank * experts


def _first(rows: int | None, tensor: AnyTensor) -> AnyTensor:
    return tensor if tensor is None or rows is None or rows >= tensor.shape[0] else tensor[:rows]


def _domains(ranks: int, argument: int | None) -> int:
    """The number of NVLink domains of a group: as the environment says, else as the argument says, else one."""
    name, per_domain = "num_of_hybrid_ep_ranks_per_nvlink_domain", argument
    if variable := os.environ.get(_RANKS_PER_DOMAIN):
        name = f"{_RANKS_PER_DOMAIN} (an environment variable)"
        try:
            per_domain = int(variable)
        except ValueError:
            raise CallerError(f"{name}: expected a number of ranks, found {variable!r}") from None
    if per_domain is None or per_domain >= ranks:
        return 1
    if per_domain < 1 or ranks % per_domain:
        raise CallerError(f"{name}: expected a divisor of the group's {ranks} ranks, found {per_domain}")
    return ranks // per_domain


def _deprecated(non_blocking: bool, num_dispatched_tokens: int | None, use_host_meta: bool | None) -> bool:
    if num_dispatched_tokens is not None:
        warnings.warn("num_dispatched_tokens is deprecated and not needed", DeprecationWarning, stacklevel=4)
    if use_host_meta is None:
        return non_blocking
    warnings.warn("use_host_meta is deprecated: say non_blocking", DeprecationWarning, stacklevel=4)
    return not use_host_meta


def _refuse_capture(hidden: Tensor, why: str) -> None:
    if hidden.is_cuda and is_capturing(hidden.device):
        raise CallerError(
            f"{why}, which a CUDA graph's capture cannot do: call dispatch_with_permute with non_blocking=True and "
            "num_permuted_tokens, or pass a handle"
        )


def _kernel_cache() -> Path:
    """The directory of compiled kernels, by the rules of the ep-cuda crate (`HYBRID_EP_KERNEL_CACHE`)."""
    if own := os.environ.get("HYBRID_EP_KERNEL_CACHE"):
        return Path(own)
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "hybrid-ep"
