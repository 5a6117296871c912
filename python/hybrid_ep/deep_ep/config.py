"""The settings objects of a `HybridEPBuffer`.

Programs print these settings, and read them to decide whether to make another buffer. The settings size no memory and
select no kernel: buffers grow on demand, and kernels are compiled for what a call needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

# The largest value of DeepEP's type for `max_num_of_tokens_per_rank`.
NO_MAXIMUM = 2**31 - 1


@dataclass
class BufferConfig:
    """The sizes that a `HybridEPBuffer` was made for."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    """`NO_MAXIMUM`. Programs such as torchtitan make another buffer if a rank has more tokens than this. A rank that
    has more would then join alone."""
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    """Ranks of each NVLink domain."""
    num_of_nodes: int
    """NVLink domains."""


@dataclass
class Configurer:
    """The holder of the `BufferConfig`, as `HybridEPBuffer.configurer`."""

    buffer_config: BufferConfig


class HybridEpConfigInstance(SimpleNamespace):
    """The settings of one call. Programs may set any attribute, such as DeepEP's kernel settings, without effect."""
