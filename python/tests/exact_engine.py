"""An engine of the migration runtime in plain Python: the codec `exact`, one message after the other.

It has the interface of `_native.Migration` and is the oracle of its tests: it has no threads and no queues. A message
is a header of four numbers and the bytes of the tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct

import torch

from hybrid_ep import _native
from hybrid_ep.migration.carrier import GlooCarrier

HEADER = struct.Struct("<qqqq")
# Lanes: the first of each kind is for headers, the next for bodies.
WEIGHTS, GRADIENTS, BYE = 0, 2, 4


class ExactEngine:
    """Codecs, `depth` and `staleness` have no effect."""

    def __init__(self, settings: _native.MigrationSettings, carrier: GlooCarrier, saved: bytes | None) -> None:
        rank, domain = settings["rank"], settings["domain"]
        self.rank, self.domain = rank, domain
        self.peers = [peer for peer in domain if peer != rank]
        self.dtype = torch.float32 if settings["wide"] else torch.bfloat16
        row = settings["experts_per_rank"] * self.dtype.itemsize
        self.sizes = [row * elements for elements in settings["expert_elements"]]
        self.carrier = carrier
        # The number of publishes, by layer. It numbers gradients, too: a rank may publish without reducing them.
        self.published = [0] * len(self.sizes)
        self.early: dict[tuple[int, int, int, int], bytes] = {}
        if saved is not None:
            self.published = [*struct.unpack(f"<{len(self.sizes)}q", saved)]
        self.sent_bytes = [0, 0]

    def start_over(self) -> None:
        """Does nothing: all messages are complete."""

    def publish(self, layer: int, span: tuple[int, int], stream: int) -> None:
        address, nbytes = span
        assert nbytes == self.sizes[layer]
        for peer in self.peers:
            self._send(peer, WEIGHTS, layer, self.published[layer], ctypes.string_at(address, nbytes))
        self.published[layer] += 1

    def gather(self, layer: int, span: tuple[int, int], stream: int) -> list[int]:
        size = self.sizes[layer]
        address, nbytes = span
        assert nbytes == size * len(self.peers)
        for place, peer in enumerate(self.peers):
            data = self._receive(peer, WEIGHTS, layer, self.published[layer] - 1)
            ctypes.memmove(address + place * size, data, size)
        return [self.published[layer]] * len(self.peers)

    def send_gradients(self, layer: int, span: tuple[int, int], stream: int) -> None:
        size = self.sizes[layer]
        address, nbytes = span
        assert nbytes == size * len(self.peers)
        for place, peer in enumerate(self.peers):
            self._send(peer, GRADIENTS, layer, self.published[layer], ctypes.string_at(address + place * size, size))

    def reduce_gradients(self, layer: int, own: tuple[int, int], sum: tuple[int, int], stream: int) -> None:
        size = self.sizes[layer]
        elements = size // self.dtype.itemsize
        total = torch.zeros(elements)
        for rank in self.domain:
            if rank == self.rank:
                data = ctypes.string_at(*own)
            else:
                data = self._receive(rank, GRADIENTS, layer, self.published[layer])
            total += torch.frombuffer(bytearray(data), dtype=self.dtype)
        ctypes.memmove(sum[0], total.data_ptr(), sum[1])

    def save(self) -> bytes:
        return struct.pack(f"<{len(self.sizes)}q", *self.published)

    def stats(self) -> dict[str, float]:
        return {"weights_sent": self.sent_bytes[0], "gradients_sent": self.sent_bytes[1]}

    def close(self, at_once: bool) -> None:
        """Waits for the peers to close, since a connection that closes earlier loses what they have yet to receive."""
        with contextlib.suppress(ConnectionError):
            for peer in self.peers:
                self.carrier.send(peer, BYE, bytes(1))
            for peer in self.peers:
                self.carrier.receive(peer, BYE, 1).wait(1)

    def _send(self, peer: int, lane: int, layer: int, number: int, data: bytes) -> None:
        self.carrier.send(peer, lane, HEADER.pack(lane, layer, number, len(data)))
        self.carrier.send(peer, lane + 1, data)
        self.sent_bytes[lane // 2] += HEADER.size + len(data)

    def _receive(self, peer: int, lane: int, layer: int, number: int) -> bytes:
        """Returns a message, and keeps the ones that arrive before it."""
        while (peer, lane, layer, number) not in self.early:
            header = self.carrier.receive(peer, lane, HEADER.size).wait(HEADER.size)
            assert header is not None
            kind, its_layer, its_number, nbytes = HEADER.unpack(header)
            assert kind == lane
            data = self.carrier.receive(peer, lane + 1, nbytes).wait(nbytes)
            assert data is not None
            self.early[peer, lane, its_layer, its_number] = data
        return self.early.pop((peer, lane, layer, number))
