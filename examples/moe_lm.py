"""The language model of the examples: a small byte-level transformer with mixtures of experts, and its text."""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_ep import MoELayer

VOCABULARY = 256


class Sizes(NamedTuple):
    """The sizes of the model outside the experts."""

    width: int  # of a token
    heads: int
    layers: int
    context: int  # bytes of a window


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that all programs with this model take."""
    parser.add_argument("--context", type=int, default=128, help="bytes of a window")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--expert-width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)


class Block(nn.Module):
    """Causal attention, then a mixture of experts."""

    def __init__(self, sizes: Sizes, moe: Callable[[], MoELayer]) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.moe_norm = nn.RMSNorm(sizes.width)
        self.moe = moe()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.moe_norm(x))


class Model(nn.Module):
    """A byte-level transformer whose feed-forward layers are mixtures of experts.

    Equally seeded ranks make the same model: `moe` is called once per layer, and draws from the global generator.
    """

    def __init__(self, sizes: Sizes, moe: Callable[[], MoELayer]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width)
        nn.init.normal_(self.position.weight, std=0.5)
        self.blocks = nn.ModuleList(Block(sizes, moe) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def balance_loss(self) -> Tensor:
        """Sums the load-balancing losses of the last forward pass."""
        return torch.stack([block.moe.balance_loss for block in self.blocks]).sum()


def total_loss(model: Model, windows: Tensor) -> Tensor:
    """Sums the cross-entropy over the bytes of int64 [windows, context + 1], in nats."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


def corpus() -> Tensor:
    """Reads the sources of the standard library, without tests and installed packages, as uint8 [bytes]."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
