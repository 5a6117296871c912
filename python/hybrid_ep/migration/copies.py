"""`CopiesOfExperts`: the sum of experts' gradients over the EP groups.

Every EP group has all experts. The ranks at the same place of the EP groups own the same experts, and each has the sum
of gradients over its own expert domain. This module sums these sums, so that all of these ranks update their experts
alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import CallerError
from .carrier import Carrier
from .dense import BUCKET_BYTES, start_reduction

__all__ = ["CopiesOfExperts"]

_Span: TypeAlias = tuple[int, int]

# The most elements of a bucket. The experts of a layer are divided into buckets, so that ranks post receives of them.
_BUCKET = BUCKET_BYTES // 4


class CopiesOfExperts:
    """A rank's part in the sums over the ranks that own the same experts.

    Args:
        rank: This rank.
        ranks: The ranks that own the same experts, itself among them.
        carrier: What `connect` returned for these ranks, used by this object alone, which closes it.
        datacenters: The ranks of each datacenter, in the order in which sums are computed; others than `ranks` are left
            out.
        codec: The codec between datacenters.
        timeout: Seconds that a wait for another rank may take.
        run: A number that the ranks agree on.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        carrier: Carrier,
        datacenters: Sequence[Sequence[int]],
        codec: str,
        timeout: float,
        run: int,
    ) -> None:
        self._carrier = carrier
        located = [[rank for rank in site if rank in ranks] for site in datacenters]
        sites = [site for site in located if site]
        self._native = start_reduction(rank, carrier, sites, codec, _BUCKET, timeout, run)
        # The elements of each layer. None before the first sum.
        self._layers: list[int] | None = None
        self._saved: dict[str, Any] | None = None
        self._round = 0

    def sum(self, layers: list[int], totals: Iterable[Tensor], step: int) -> None:
        """Sums the gradients of all layers, in place. Collective over the ranks that own the same experts.

        Args:
            layers: The elements of each layer.
            totals: For each layer, contiguous float32: this rank's sum over its expert domain. An iterable may wait for
                them: each leaves as soon as the iterable has it.
            step: The step that errors name.

        Raises:
            CallerError: A sum is not finite, and the codec is lossy; or the saved state is of other layers.
            PeerError: Another of these ranks died, failed or is late. Every later call raises it again.
        """
        if self._layers is None:
            self._add_plan(layers)
        begun: list[_Span] = []
        for total in totals:
            for part in total.view(-1).split(_BUCKET):
                span = (part.data_ptr(), part.nbytes)
                self._native.begin((0, len(begun), self._round, step), True, span)
                begun.append(span)
        for at, span in enumerate(begun):
            self._native.finish((0, at, self._round, step), True, span)
        self._round += 1

    def _add_plan(self, layers: list[int]) -> None:
        state = None
        if self._saved is not None:
            if self._saved["layers"] != layers:
                raise CallerError("the state of the migration is of other layers: resume with the same, or without it")
            state = self._saved["state"].numpy().tobytes()
        buckets = [min(_BUCKET, elements - start) for elements in layers for start in range(0, elements, _BUCKET)]
        self._native.add_plan([(elements, True) for elements in buckets], state)
        self._layers, self._saved = layers, None

    def state(self) -> dict[str, Any] | None:
        """Returns the state of the codec; None before the first sum."""
        if self._layers is None:
            return self._saved
        saved = torch.frombuffer(bytearray(self._native.save(0)), dtype=torch.uint8)
        return {"layers": self._layers, "state": saved}

    def load(self, state: dict[str, Any] | None) -> None:
        """Continues from `state`: before the first sum."""
        self._saved = None if state is None else {**state, "state": state["state"].cpu().contiguous()}

    def stats(self) -> dict[str, int]:
        """Returns bytes sent and received by name, between datacenters (`link`) and inside this one."""
        return {name.replace("dense", "copies"): count for name, count in self._native.stats().items()}

    def close(self, *, at_once: bool) -> None:
        """Ends the sums and their carrier."""
        self._native.close(at_once)
        self._carrier.close()
