"""`HybridEPBuffer`, DeepEP's interface of that name, on `hybrid_ep.Buffer`.

The operators mean what docs/semantics.md says. The signatures are the original's, every parameter is accepted, and
where one has no meaning here its method says so. Nothing records gradients: programs wrap these calls in autograd
functions of their own.
"""

from __future__ import annotations

import operator
import os
import warnings
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_ep import Buffer, CallerError

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
from .config import BufferConfig, Configurer, HybridEpConfigInstance
from .handles import PermutedHandle, PlainHandle, parse

__all__ = ["HybridEPBuffer", "indices_to_map"]

AnyTensor = TypeVar("AnyTensor", Tensor, Tensor | None)


class HybridEPBuffer:
    """One rank's end of the dispatch and combine of a `torch.distributed` group.

    Nothing is allocated and nobody is waited for here: the first operator does both, for the number of experts that it
    names and the device of its tokens, and so it is collective, as are all operators. `hidden_dim`,
    `max_num_of_tokens_per_rank` and `num_local_experts` are no limits; any call may have more.

    The larger of `num_sms_dispatch_api` and `num_sms_combine_api` is the number of SMs of either operator; by default
    it is `HYBRID_EP_SMS`. `use_fp8` is what `dispatch` takes where it is not told.
    `num_of_hybrid_ep_ranks_per_nvlink_domain` emulates NVLink domains on the CPU; on GPUs all ranks must be in one.

    Without meaning here: `num_sms_preprocessing_api`, `num_blocks_permute`, `num_blocks_unpermute`,
    `load_cached_kernels` (always), `use_shared_buffer`, `enable_custom_allgather`, `use_mnnvl` (found out).
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
                max_num_of_tokens_per_rank=operator.index(max_num_of_tokens_per_rank),
                num_of_experts_per_rank=operator.index(num_local_experts),
                num_of_ranks_per_node=self.num_of_hybrid_ep_ranks_per_nvlink_domain,
                num_of_nodes=self.num_of_nodes,
            )
        )
        self._sms = max((n for n in (num_sms_dispatch_api, num_sms_combine_api) if n is not None), default=None)
        self._buffers: dict[tuple[torch.device, int], Buffer] = {}

    @property
    def config(self) -> BufferConfig:
        """Where programs of before June 2026 look for `configurer.buffer_config`."""
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
        """The settings that a call with these arguments has. Calls need no such preparation; `**kwargs` (kernel
        settings of the original) are in the result, and change nothing."""
        made_for = self.configurer.buffer_config
        if num_of_tokens_per_rank is not None:
            made_for.max_num_of_tokens_per_rank = max(made_for.max_num_of_tokens_per_rank, num_of_tokens_per_rank)
        settings: dict[str, Any] = {
            "hidden_dim": made_for.hidden_dim if hidden_dim is None else hidden_dim,
            "max_num_of_tokens_per_rank": made_for.max_num_of_tokens_per_rank,
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
        """Removes the compiled kernels from the disk, those of other programs of this user as well. They are compiled
        again when needed; none can be out of date, as each is kept under all that it depends on."""
        for kernel in _kernel_cache().glob("*.cubin"):
            kernel.unlink(missing_ok=True)

    @torch.no_grad()
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
        """Tokens to the ranks of their experts: `(tokens, probs, scaling_factor, handle)`, one row per distinct token
        that has an expert here, ordered by source rank and token.

        `probs` is `[rows, experts of this NVLink domain]`, as in the original, with zeros but for this rank's experts.
        With a `handle` the routing is not looked at, but for the weights, and nothing synchronises. `scaling_factor` is
        not looked at unless the tokens are FP8. `num_dispatched_tokens` and `..._tensor` are not needed: the output
        has the rows that come.
        """
        tokens = Tokens(hidden, scaling_factor, self.use_fp8)
        if handle is not None:
            cached = parse(handle, PlainHandle)
            weights = weights_again(hidden, topk_idx, topk_weights, probs, cached.buffer.num_experts)
            received = cached.buffer.dispatch(tokens.rows, handle=cached.native, **tokens.format, **weights)
            return tokens.restored(received), self._widened(received.probs), received.scales, cached
        num_experts = self._num_experts(routing_map, num_of_experts, None)
        routing = fresh_routing(hidden, topk_idx, topk_weights, routing_map, probs, num_experts)
        _refuse_capture(hidden, "dispatch without a handle waits for the number of rows")
        buffer = self._buffer_for(hidden.device, num_experts)
        received = buffer.dispatch(tokens.rows, **tokens.format, **routing)
        assert received.local_experts is not None  # plain mode
        made = PlainHandle(
            native=received.handle,
            buffer=buffer,
            reserved_2=None,
            num_dispatched_tokens=torch.tensor([received.tokens.shape[0]], dtype=torch.int32),
            local_expert_routing_map=received.local_experts,
            num_of_tokens_per_rank=hidden.shape[0],
            config=self._config(hidden, num_experts),
        )
        return tokens.restored(received), self._widened(received.probs), received.scales, made

    @torch.no_grad()
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: PlainHandle | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Experts' outputs back to the tokens' ranks, summed: `(tokens, probs)`, the latter `[tokens, experts]` where
        probs were given: `[rows, experts of this NVLink domain]`, of which this rank's are read, or those alone."""
        made = parse(handle, PlainHandle)
        combined = made.buffer.combine(hidden, made.native, probs=self._narrowed(probs, made.buffer))
        return combined.tokens, combined.probs

    @torch.no_grad()
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
        """Tokens to the ranks of their experts, grouped by expert: `(tokens, probs, scaling_factor, tokens_per_expert,
        handle)`.

        `tokens_per_expert` is int64 and counts the padding to `pad_multiple`. By default the output has exactly those
        rows, which on a GPU means to wait for the counts once; `num_permuted_tokens` is then no more than a hint. With
        `non_blocking` nothing waits: the output has `num_permuted_tokens` rows, what is beyond is dropped, the last
        experts' first, and the flag in `handle[-1]` tells.

        With a `handle` the layout is that of the dispatch which made it, nothing synchronises, and `probs` is returned
        where weights are given. A `num_permuted_tokens` below the rows of the handle cuts off the end of what a
        `non_blocking` dispatch laid out; of an exact layout nothing can be spared.

        Without meaning here: `fuse_permute_dispatch` (always), and the deprecated `num_dispatched_tokens`.
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
        buffer = self._buffer_for(hidden.device, num_experts)
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
            tokens_per_expert=received.handle.raw_tokens_per_expert,
            num_of_tokens_per_rank=hidden.shape[0],
            config=self._config(hidden, num_experts, pad_multiple=multiple, use_fp8=use_fp8),
            overflow_flag=received.overflow,
        )
        return tokens.restored(received), received.probs, received.scales, received.handle.tokens_per_expert, made

    @torch.no_grad()
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
        """Experts' outputs back to the tokens' ranks, summed: `(tokens, probs)`, the latter f32 `[tokens, experts]`
        where `probs` (`[rows]`) were given. The layout comes from the handle.

        Without meaning here: `fuse_unpermute_combine` (always), and the deprecated `num_dispatched_tokens`.
        """
        _deprecated(False, num_dispatched_tokens, None)
        made = parse(handle, PermutedHandle)
        check_pad_multiple(pad_multiple, made)
        combined = made.buffer.combine_with_unpermute(hidden, made.native, probs=probs)
        return combined.tokens, combined.probs

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
        """The number of experts that the arguments name, which may do so several times."""
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

    def _buffer_for(self, device: torch.device, num_experts: int) -> Buffer:
        """The communicator for tokens on that device; made, with all ranks of the group, where there is none yet."""
        buffer = self._buffers.get((device, num_experts))
        if buffer is None:
            buffer = self._buffers[device, num_experts] = self._join(device, num_experts)
        return buffer

    def _join(self, device: torch.device, num_experts: int) -> Buffer:
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise CallerError(
                    f"there is no buffer yet for {num_experts} experts on {device}, and a CUDA graph's capture cannot "
                    "make one, as the ranks must meet: run one step without capturing first"
                )
            if self.num_of_nodes > 1:
                raise CallerError(
                    f"num_of_hybrid_ep_ranks_per_nvlink_domain={self.num_of_hybrid_ep_ranks_per_nvlink_domain} makes "
                    f"{self.num_of_nodes} NVLink domains of {self.group_size} ranks; on GPUs one is served: "
                    "leave the argument out, and give a group whose ranks are in one NVLink domain"
                )
        return Buffer(self.group, num_experts=num_experts, domains=self.num_of_nodes, device=device, sms=self._sms)

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
        """`[rows, local experts]` as `[rows, experts of the domain]`."""
        ranks = self.num_of_hybrid_ep_ranks_per_nvlink_domain
        if probs is None or ranks == 1:
            return probs
        rows, experts = probs.shape
        wide = probs.new_zeros(rows, ranks, experts)
        wide[:, self.local_rank] = probs
        return wide.view(rows, ranks * experts)

    def _narrowed(self, probs: Tensor | None, buffer: Buffer) -> Tensor | None:
        """The reverse, for probs that are so wide."""
        experts = buffer.num_local_experts
        wide = experts * self.num_of_hybrid_ep_ranks_per_nvlink_domain
        if probs is None or probs.dim() != 2 or probs.shape[1] != wide:
            return probs
        return probs[:, self.local_rank * experts :][:, :experts]


def _first(rows: int | None, tensor: AnyTensor) -> AnyTensor:
    return tensor if tensor is None or rows is None or rows >= tensor.shape[0] else tensor[:rows]


def _domains(ranks: int, per_domain: int | None) -> int:
    if per_domain is None or per_domain >= ranks:
        return 1
    if per_domain < 1 or ranks % per_domain:
        raise CallerError(
            f"num_of_hybrid_ep_ranks_per_nvlink_domain: expected a divisor of the group's {ranks} ranks, "
            f"found {per_domain}"
        )
    return ranks // per_domain


def _deprecated(non_blocking: bool, num_dispatched_tokens: int | None, use_host_meta: bool | None) -> bool:
    if num_dispatched_tokens is not None:
        warnings.warn("num_dispatched_tokens is deprecated and not needed", DeprecationWarning, stacklevel=4)
    if use_host_meta is None:
        return non_blocking
    warnings.warn("use_host_meta is deprecated: say non_blocking", DeprecationWarning, stacklevel=4)
    return not use_host_meta


def _refuse_capture(hidden: Tensor, why: str) -> None:
    if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CallerError(
            f"{why}, which a CUDA graph's capture cannot do: call dispatch_with_permute with non_blocking=True and "
            "num_permuted_tokens, or pass a handle"
        )


def _kernel_cache() -> Path:
    """Where compiled kernels are kept, by the same rules as the library that keeps them."""
    if own := os.environ.get("HYBRID_EP_CACHE_DIR"):
        return Path(own)
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "hybrid-ep"
