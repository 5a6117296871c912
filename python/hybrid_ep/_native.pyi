"""The native module. Private to the package: it trusts the addresses that it is given."""

from typing import Protocol, TypedDict

import torch
from torch import Tensor

from .rendezvous import Meeting

__version__: str

class Settings(TypedDict):
    backend: str
    gpu: int | None
    gpus: int
    experts: int
    domains: int
    timeout: float | None
    stall_timeout: float | None
    workers: int | None
    sms: int | None
    max_tokens: int | None
    max_hidden: int | None

# Address of a tensor, and its number of bytes. A result of type `object` is a DLPack capsule for `from_dlpack`.
_Span = tuple[int, int]

def timeout_of(settings: Settings) -> float: ...
def finish() -> None: ...
def check_cuda() -> None: ...
def adopt_tensors(tensor_class: type[Tensor]) -> bool: ...
def is_registered(address: int) -> bool: ...
def check_row(hidden: int, format: tuple[int, int]) -> None: ...
def dense_routing(
    gpu: int | None,
    stream: int,
    size: tuple[int, int, int],
    wide: bool,
    indices: _Span,
    weights: _Span | None,
    map: _Span | None,
    probs: _Span | None,
) -> None: ...
def cli(arguments: list[str], name: str, command: list[str]) -> int: ...

class Buffer:
    @staticmethod
    def threads(ranks: int, settings: Settings) -> list[Buffer]: ...
    @staticmethod
    def join(rank: int, ranks: int, settings: Settings, meeting: Meeting) -> Buffer: ...
    @staticmethod
    def launched(settings: Settings) -> Buffer: ...
    @property
    def id(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def local_experts(self) -> tuple[int, int]: ...
    @property
    def domains(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    def registered_bytes(self) -> int: ...
    def has_room(self, settings: Settings) -> bool: ...
    def preprocess(
        self,
        stream: int,
        form: int,
        routing: _Span,
        weights: _Span | None,
        size: tuple[int, int],
        most: int,
        pad_multiple: int | None,
        capacity: int | None,
        report: tuple[int, int, int],
    ) -> tuple[object, int]: ...
    def dispatch(
        self,
        stream: int,
        number: int,
        size: tuple[int, int],
        format: tuple[int, int],
        tokens: _Span,
        scales: _Span | None,
        probs_from: int,
        probs: _Span | None,
        local_experts: bool,
        clear_tokens: bool,
    ) -> tuple[object, object | None, object | None, object | None]: ...
    def dispatch_tensors(
        self,
        tokens: Tensor,
        scales: Tensor | None,
        weights: Tensor | None,
        handle: Tensor,
        from_routing: bool,
        scales_of: int | None,
        clear_tokens: bool,
        local_experts: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None: ...
    def combine_tensors(
        self,
        rows: Tensor,
        probs: Tensor | None,
        handle: Tensor,
        tokens: int,
        permuted: bool,
        wire: torch.dtype | None,
        first_column: int | None,
    ) -> tuple[Tensor, Tensor | None] | None: ...
    def combine(
        self,
        stream: int,
        number: int,
        size: tuple[int, int, int],
        wide: tuple[bool, bool],
        rows: _Span,
        probs: tuple[_Span, int] | None,
        out: _Span,
        out_probs: _Span | None,
    ) -> None: ...
    def weight_rows(
        self,
        stream: int,
        size: tuple[int, int],
        wide: tuple[bool, bool],
        values: _Span,
        weights: _Span,
        out: _Span,
        backward: tuple[_Span, _Span] | None,
    ) -> None: ...
    def empty(self, stream: int, bytes: int) -> object: ...
    def has_freed(self) -> bool: ...
    def forget_freed(self) -> None: ...
    def synchronize(self) -> None: ...
    def check_peers(self, waited_for: str, waited: float, has_failed: bool) -> None: ...
    def traffic(self) -> tuple[int, int, int, int, float]: ...
    def close(self) -> None: ...

class MigrationSettings(TypedDict):
    rank: int
    domain: list[int]
    experts_per_rank: int
    expert_elements: list[int]
    wide: bool
    gpu: int | None
    weights: str
    gradients: str
    depth: int
    staleness: int
    shared_refresh: int
    timeout: float
    run: int

class Sending(Protocol):
    def wait(self) -> None: ...

class Receiving(Protocol):
    def wait(self, length: int) -> bytes: ...

# Lanes: 0 headers, 1 weights, 2 gradients, 3 longer weights, 4 longer gradients.
class Carrier(Protocol):
    def send(self, rank: int, lane: int, message: bytes) -> Sending: ...
    def receive(self, rank: int, lane: int, capacity: int) -> Receiving: ...
    def abort(self) -> None: ...

class RailCarrier:
    @staticmethod
    def join(rank: int, names: list[int], engine: str, timeout: float, meeting: Meeting) -> RailCarrier: ...
    def close(self) -> None: ...

class Migration:
    def __init__(self, settings: MigrationSettings, carrier: Carrier | RailCarrier, saved: bytes | None) -> None: ...
    def publish(self, layer: int, weights: _Span, stream: int) -> None: ...
    def start_over(self) -> None: ...
    def gather(self, layer: int, replicas: _Span, stream: int) -> list[int]: ...
    def send_gradients(self, layer: int, gradients: _Span, stream: int) -> None: ...
    def reduce_gradients(self, layer: int, own: _Span, sum: _Span, stream: int) -> None: ...
    def save(self) -> bytes: ...
    def stats(self) -> dict[str, float]: ...
    def close(self, at_once: bool) -> None: ...

class DenseSettings(TypedDict):
    rank: int
    datacenters: list[list[int]]
    codec: str
    regular_elements: int
    timeout: float
    run: int

# A turn is (plan, bucket, round, step).
class DenseReduction:
    def __init__(self, settings: DenseSettings, carrier: Carrier | RailCarrier) -> None: ...
    def add_plan(self, buckets: list[tuple[int, bool]], saved: bytes | None) -> int: ...
    def begin(self, turn: tuple[int, int, int, int], wide: bool, gradients: _Span) -> None: ...
    def finish(self, turn: tuple[int, int, int, int], wide: bool, sums: _Span) -> None: ...
    def abandon(self, round: int) -> None: ...
    def blame(self, rank: int, fault: str) -> None: ...
    def check(self) -> None: ...
    def save(self, plan: int) -> bytes: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, at_once: bool) -> None: ...
