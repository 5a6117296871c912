"""The settings objects that programs read from a `HybridEPBuffer`, and some write.

Nothing here sizes memory or selects a kernel: buffers grow with the calls, and kernels are compiled for what a call
asks for. The objects exist because programs decide by them whether to build another buffer, and print them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass
class BufferConfig:
    """What a `HybridEPBuffer` was made for, and the most tokens that it has seen."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int


@dataclass
class Configurer:
    """Where programs look for the `BufferConfig`."""

    buffer_config: BufferConfig


class HybridEpConfigInstance(SimpleNamespace):
    """What one call was made with. Any attribute can be set, as kernel settings of the original are, to no effect."""
