"""`TokenDispatcher`: the part of a mixture-of-experts layer between its router and its experts."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ._weight_rows import weight_rows
from .buffer import Buffer, Dispatched
from .errors import CallerError

__all__ = ["TokenDispatcher"]


def _in_transit(dtype: torch.dtype) -> torch.dtype:
    """The type in which rows of a type travel: the operators send bfloat16 and float32."""
    return dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32


class TokenDispatcher:
    """Sends tokens to the ranks of their experts, and returns the weighted sums of the experts' outputs.

    The dispatcher keeps no state between `dispatch` and `combine`, so several micro-batches may be in flight. `combine`
    applies the weights to the outputs in float32, and the weights receive gradients.

    Args:
        buffer: The communicator.
        pad_multiple: The rows of each expert are padded to a multiple of this number.
        capacity: The number of rows of each dispatch output. With a capacity, shapes are static and the host does not
            wait for the GPU; `overflow` of the result says whether rows were dropped. None: exactly the rows that
            arrive.
        dtype: The type of rows in transit, bfloat16 or float32. Default: that of the tokens, or float32 if they have a
            different type.

    Example:
        >>> received = dispatcher.dispatch(tokens, topk_idx, topk_weights)
        >>> outputs = experts(received.tokens, received.tokens_per_expert)
        >>> tokens = dispatcher.combine(outputs, received)
    """

    # Read by `_layers`. Capacities may differ.
    _equal_on_all_ranks: ClassVar = ("pad_multiple", "dtype")

    def __init__(
        self, buffer: Buffer, *, pad_multiple: int = 1, capacity: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.buffer, self.pad_multiple, self.capacity, self.dtype = buffer, pad_multiple, capacity, dtype

    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """Sends tokens to the ranks of their experts. Collective. See `Buffer.dispatch_with_permute`.

        Args:
            tokens: Floating-point [T, H], converted to `dtype`.
            topk_idx: int32 or int64 [T, K]; -1 names no expert.
            topk_weights: Floating-point [T, K].

        Returns:
            Rows grouped by local expert, with their weights in `probs`.

        Raises:
            CallerError: The arguments do not fit.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        return self.buffer.dispatch_with_permute(
            tokens.to(self.dtype or _in_transit(tokens.dtype)),
            topk_idx,
            topk_weights,
            pad_multiple=self.pad_multiple,
            capacity=self.capacity,
        )

    def combine(self, outputs: Tensor, received: Dispatched) -> Tensor:
        """Weights the experts' outputs and sums them for each token. Collective.

        Args:
            outputs: [R, H]: the output for each row of `received.tokens`.
            received: The result of `dispatch`.

        Returns:
            [T, H], of type `dtype`; by default of the outputs' type, or float32 if that is neither bfloat16 nor
            float32.

        Raises:
            CallerError: The arguments do not fit.
            PeerError: Another rank died, left, failed, stalled or was late.
        """
        if not torch.compiler.is_compiling():
            _check(outputs, received)
        assert received.probs is not None, "checked above"
        weighted = weight_rows(outputs, received.probs, self.dtype or _in_transit(outputs.dtype), self.buffer)
        return self.buffer.combine_with_unpermute(weighted, received.handle).tokens


def _check(outputs: Tensor, received: Dispatched) -> None:
    """Checks the arguments of `combine`, which a compiler traces without these checks."""
    if not isinstance(received, Dispatched):
        found = f"found {type(received).__name__}"
        raise CallerError(f"received: expected what dispatch returned, not only its handle or a part of it; {found}")
    if received.probs is None:
        raise CallerError("received: has no weights for the experts' outputs; dispatch with topk_weights")
    if received.probs.dim() != 1:
        raise CallerError(
            "received: is the result of a dispatch in plain mode; expected one of TokenDispatcher.dispatch"
        )
    if not isinstance(outputs, Tensor):
        raise CallerError(f"outputs: expected a tensor, found {type(outputs).__name__}")
    rows = len(received.tokens)
    if outputs.dim() != 2 or len(outputs) != rows:
        raise CallerError(
            f"outputs: expected [{rows}, H], one row for each row of received.tokens, found shape {list(outputs.shape)}"
        )
