#!/usr/bin/env python3
"""Make a small real routing trace for hybrid-ep, or check and summarise one.

The script trains a small mixture-of-experts (MoE) language model on the source
code of the Python standard library, then runs it over text it was not trained
on and writes down what every MoE gate decided: which experts each token goes
to, and with which weights. The format is described in README.md.

The model is a decoder-only transformer with one dense block followed by MoE
blocks, 64 experts each. The gate takes the 8 largest of 64 logits, and the
weights are the softmax over those 8 logits, so they sum to 1. The usual
load-balancing loss is added with a small coefficient. No token is dropped:
there is no capacity limit.

Run (Python 3.11; no GPU needed):

    pip install torch==2.11.0 safetensors numpy
    python make_trace.py --out stdlib-moe-64e-top8.safetensors   # about 7 minutes on 2 idle cores
    python make_trace.py --summary stdlib-moe-64e-top8.safetensors

Everything is seeded and uses deterministic kernels. The same Python sources,
torch version, processor type and thread count give the same tensors; with
another of these the decisions differ in detail.
"""

import argparse
import math
import platform
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FORMAT = "hybrid-ep-routing"
VERSION = "1"

# Model and data sizes.
VOCAB = 2048  # 256 bytes + the most frequent pieces
CONTEXT = 256  # tokens in one window
BATCH = 8  # windows in one training step
D_MODEL = 128
HEADS = 4
DENSE_HIDDEN = 512
EXPERT_HIDDEN = 96
EXPERTS = 64
TOP_K = 8
MOE_LAYERS = 3

# Training.
PEAK_LR = 3e-3
WARMUP_STEPS = 50
REPORT_EVERY = 50  # steps between progress lines; also the span of `train_loss`
HELDOUT_SHARE = 0.1  # share of the source files kept out of training

# Directories and files of the standard library that are not ordinary source
# code: tests, installed packages, generated tables and build settings.
SKIP_DIRS = {"__pycache__", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
SKIP_PREFIXES = ("_sysconfigdata", "config-")


# --------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------


def read_sources() -> list[str]:
    """Return the standard library's source files, ordered by relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIP_DIRS.isdisjoint(parts) and not parts[0].startswith(SKIP_PREFIXES):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


class Tokenizer:
    """Splits text into words, numbers, punctuation and line starts.

    A piece that is among the most frequent ones of the training text is one
    token (256 and up); any other piece is spelled in UTF-8 bytes (0 to 255).
    """

    # A line start with its indentation, a word, a digit, a run of punctuation
    # (word and punctuation with the space before it), or other white space.
    PIECE = re.compile(r"\n *| ?[^\W\d_]+|\d| ?(?:[^\w\s]|_)+|\s")

    def __init__(self, texts: list[str], vocab: int) -> None:
        counts = Counter(piece for text in texts for piece in self.PIECE.findall(text))
        ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
        self.ids = {piece: 256 + i for i, piece in enumerate(ranked[: vocab - 256])}

    def encode(self, text: str) -> Tensor:
        out: list[int] = []
        for piece in self.PIECE.findall(text):
            if piece in self.ids:
                out.append(self.ids[piece])
            else:
                out.extend(piece.encode("utf-8"))
        return torch.tensor(out, dtype=torch.long)


@dataclass
class Corpus:
    train: Tensor  # all training files, one after another
    heldout: list[Tensor]  # one window of CONTEXT + 1 tokens per held-out file


def load_corpus(seed: int) -> Corpus:
    """Split the files into training and held-out ones and tokenise both.

    The window of a held-out file starts at a random place, so that the windows
    are not all module headers. Files shorter than a window are not used.
    """
    rng = random.Random(seed)
    texts = read_sources()
    rng.shuffle(texts)
    cut = int(len(texts) * HELDOUT_SHARE)
    tokenizer = Tokenizer(texts[cut:], VOCAB)

    windows = []
    for tokens in map(tokenizer.encode, texts[:cut]):
        if len(tokens) > CONTEXT:
            start = rng.randrange(len(tokens) - CONTEXT)
            windows.append(tokens[start : start + CONTEXT + 1])
    return Corpus(torch.cat([tokenizer.encode(text) for text in texts[cut:]]), windows)


# --------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, D_MODEL // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, D_MODEL))


@dataclass
class Routing:
    """What one gate decided for T tokens."""

    idx: Tensor  # [T, TOP_K], experts in falling order of weight
    weights: Tensor  # [T, TOP_K], each row sums to 1
    balance: Tensor  # scalar load-balancing loss, 1 when perfectly even

    def load(self) -> Tensor:
        """Number of tokens each expert received."""
        return torch.bincount(self.idx.flatten(), minlength=EXPERTS)


class MoE(nn.Module):
    """Top-k mixture of experts; each expert is a two-layer GELU network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D_MODEL, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, D_MODEL, EXPERT_HIDDEN) / math.sqrt(D_MODEL))
        self.w_out = nn.Parameter(torch.randn(EXPERTS, EXPERT_HIDDEN, D_MODEL) / math.sqrt(EXPERT_HIDDEN))

    def route(self, x: Tensor) -> Routing:
        logits = self.gate(x)
        top = logits.topk(TOP_K, dim=-1)
        # Load balancing: for each expert, its share of the assignments times
        # its mean gate probability, summed over the experts.
        share = torch.bincount(top.indices.flatten(), minlength=EXPERTS) / top.indices.numel()
        balance = EXPERTS * (share * logits.softmax(dim=-1).mean(dim=0)).sum()
        return Routing(top.indices, top.values.softmax(dim=-1), balance)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        shape = x.shape
        x = x.reshape(-1, D_MODEL)
        routing = self.route(x)

        # Sort the (token, expert) pairs by expert, so that each expert's input
        # is one contiguous block, and put the results back in token order.
        order = routing.idx.flatten().argsort(stable=True)
        blocks = x.index_select(0, order // TOP_K).split(routing.load().tolist())
        results = [
            F.gelu(block @ w_in) @ w_out
            for block, w_in, w_out in zip(blocks, self.w_in.unbind(), self.w_out.unbind(), strict=True)
        ]
        pairs = torch.cat(results).index_select(0, order.argsort()).view(-1, TOP_K, D_MODEL)
        return (routing.weights.unsqueeze(-1) * pairs).sum(dim=1).view(shape), routing


class Block(nn.Module):
    """Pre-norm transformer block with a dense or an MoE feed-forward layer."""

    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(D_MODEL)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(D_MODEL)
        self.ffn = (
            MoE()
            if moe
            else nn.Sequential(nn.Linear(D_MODEL, DENSE_HIDDEN), nn.GELU(), nn.Linear(DENSE_HIDDEN, D_MODEL))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        x = x + self.attention(self.norm1(x))
        y = self.ffn(self.norm2(x))
        y, routing = y if isinstance(y, tuple) else (y, None)
        return x + y, routing


class Model(nn.Module):
    """Decoder-only language model: one dense block, then MOE_LAYERS MoE blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D_MODEL)
        self.position = nn.Embedding(CONTEXT, D_MODEL)
        self.blocks = nn.ModuleList(Block(moe=i > 0) for i in range(1 + MOE_LAYERS))
        self.norm = nn.LayerNorm(D_MODEL)
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.position.weight, std=0.05)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return the next-token logits and the MoE layers' routing decisions."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            if routing is not None:
                routings.append(routing)
        return F.linear(self.norm(x), self.embed.weight), routings


def next_token_loss(logits: Tensor, windows: Tensor) -> Tensor:
    """Cross-entropy in nats per token; `windows` is one token longer."""
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


# --------------------------------------------------------------------------
# Training and recording
# --------------------------------------------------------------------------


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then cosine decay to a tenth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LR * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(model: Model, tokens: Tensor, steps: int, balance_coef: float, seed: int) -> list[float]:
    """Train on random windows of `tokens`; return every step's loss."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    offsets = torch.arange(CONTEXT + 1)
    losses = []
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)
        windows = tokens[starts + offsets]
        logits, routings = model(windows[:, :-1])
        loss = next_token_loss(logits, windows)
        balance = sum(routing.balance for routing in routings)

        optimizer.zero_grad()
        (loss + balance_coef * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()

        losses.append(loss.item())
        if step == 0 or (step + 1) % REPORT_EVERY == 0:
            recent = losses[-REPORT_EVERY:]
            skew = " ".join(f"{r.load().max() / r.load().float().mean():.2f}" for r in routings)
            print(
                f"step {step + 1:5}/{steps}  loss {sum(recent) / len(recent):.3f}"
                f"  max/mean expert load {skew}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return losses


@torch.inference_mode()
def record(model: Model, corpus: Corpus, tokens_per_rank: list[int]) -> dict[str, Tensor]:
    """Run held-out text through the model and return the gates' decisions.

    A rank's batch is packed from windows of different files, and no two ranks
    share a file. The last window of a rank is cut to its token count.
    """
    remaining = iter(corpus.heldout)
    tensors = {}
    for rank, count in enumerate(tokens_per_rank):
        per_window = []  # one list of layers for each window
        for start in range(0, count, CONTEXT):
            window = next(remaining)[: min(CONTEXT, count - start)]
            per_window.append(model(window.unsqueeze(0))[1])
        for layer, parts in enumerate(zip(*per_window, strict=True)):
            prefix = f"layer{layer}.rank{rank}"
            tensors[f"{prefix}.topk_idx"] = torch.cat([part.idx for part in parts]).int()
            tensors[f"{prefix}.topk_weights"] = torch.cat([part.weights for part in parts])
    return tensors


def make(out: Path, steps: int, seed: int, balance_coef: float, threads: int, tokens_per_rank: list[int]) -> None:
    """Train, record and write the trace."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)

    corpus = load_corpus(seed)
    needed = sum(math.ceil(count / CONTEXT) for count in tokens_per_rank)
    if needed > len(corpus.heldout):
        raise ValueError(f"the tokens asked for need {needed} held-out files; there are {len(corpus.heldout)}")
    print(f"{len(corpus.train)} training tokens, {len(corpus.heldout)} held-out windows of {CONTEXT} tokens")

    model = Model()
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    losses = train(model, corpus.train, steps, balance_coef, seed)
    train_loss = sum(losses[-REPORT_EVERY:]) / len(losses[-REPORT_EVERY:])
    with torch.inference_mode():
        windows = torch.stack(corpus.heldout)
        heldout_loss = next_token_loss(model(windows[:, :-1])[0], windows).item()
    print(f"loss: first step {losses[0]:.3f}, train {train_loss:.3f}, held-out {heldout_loss:.3f}")

    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "experts": str(EXPERTS),
        "topk": str(TOP_K),
        "layers": str(MOE_LAYERS),
        "ranks": str(len(tokens_per_rank)),
        "source": "Gate decisions of a small MoE language model trained on the Python standard library's"
        " sources, recorded over held-out files of it by traces/make_trace.py.",
        "gate": "top-8 of 64 logits, weights are the softmax over the selected logits",
        "balance_coef": str(balance_coef),
        "steps": str(steps),
        "seed": str(seed),
        "first_loss": f"{losses[0]:.4f}",
        "train_loss": f"{train_loss:.4f}",
        "heldout_loss": f"{heldout_loss:.4f}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    save_file(record(model, corpus, tokens_per_rank), out, metadata)
    print(f"wrote {out}, {out.stat().st_size} bytes")


# --------------------------------------------------------------------------
# Checking and summarising
# --------------------------------------------------------------------------


def check(ok: object, message: str) -> None:
    """Raise ValueError with `message` unless `ok` is true."""
    if not ok:
        raise ValueError(message)


def check_pair(name: str, idx: Tensor, weights: Tensor, experts: int, topk: int) -> None:
    """Check one layer's and rank's pair of tensors against the format."""
    check(idx.dtype == torch.int32, f"{name}.topk_idx: not int32")
    check(weights.dtype == torch.float32, f"{name}.topk_weights: not float32")
    check(idx.dim() == 2 and idx.shape[1] == topk, f"{name}.topk_idx: shape is not [T, {topk}]")
    check(idx.shape == weights.shape, f"{name}: topk_idx and topk_weights differ in shape")
    check(((idx >= -1) & (idx < experts)).all(), f"{name}.topk_idx: index out of range")
    ranked = idx.sort(dim=1).values
    repeated = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)
    check(not repeated.any(), f"{name}.topk_idx: an expert twice in one row")
    check(weights.isfinite().all(), f"{name}.topk_weights: NaN or infinity")


def read_trace(path: Path) -> tuple[dict[str, str], list[list[Tensor]]]:
    """Read and check a trace; return its metadata and topk_idx[layer][rank]."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        check(metadata.get("format") == FORMAT, f"metadata: format is not {FORMAT}")
        check(metadata.get("version") == VERSION, f"metadata: version is not {VERSION}")
        for key in ("experts", "topk", "layers", "ranks"):
            check(re.fullmatch(r"[1-9]\d*", metadata.get(key, "")), f"metadata: {key} is not a positive number")
        experts, topk, layers, ranks = (int(metadata[key]) for key in ("experts", "topk", "layers", "ranks"))

        names = set(file.keys())
        routing: list[list[Tensor]] = []
        for layer in range(layers):
            routing.append([])
            for rank in range(ranks):
                name = f"layer{layer}.rank{rank}"
                pair = f"{name}.topk_idx", f"{name}.topk_weights"
                check(names.issuperset(pair), f"{name}: missing tensor")
                idx, weights = map(file.get_tensor, pair)
                check_pair(name, idx, weights, experts, topk)
                routing[layer].append(idx)
                check(len(idx) == len(routing[0][rank]), f"{name}: T differs between layers")
    return metadata, routing


def summarise(path: Path) -> None:
    """Check a trace and print its metadata and its skew."""
    metadata, routing = read_trace(path)
    for key in sorted(metadata):
        print(f"{key}: {metadata[key]}")
    experts, ranks = int(metadata["experts"]), int(metadata["ranks"])
    check(experts % ranks == 0, "summary: the experts do not divide evenly over the ranks")
    print(f"tokens per rank: {' '.join(str(len(idx)) for idx in routing[0])}")
    print(f"{experts // ranks} consecutive experts per rank\n")
    print("| layer | expert max/mean | expert min/mean | hottest expert | rank max/mean | ranks per token |")
    print("|---|---|---|---|---|---|")
    for layer, per_rank in enumerate(routing):
        idx = torch.cat(per_rank)
        used = idx >= 0
        expert_load = torch.bincount(idx[used], minlength=experts).double()
        rank_load = expert_load.view(ranks, -1).sum(dim=1)
        # Which ranks hold at least one expert of a token; column `ranks` collects the -1 entries.
        reached = torch.zeros(len(idx), ranks + 1)
        reached.scatter_(1, torch.where(used, idx // (experts // ranks), ranks).long(), 1.0)
        print(
            f"| {layer} | {expert_load.max() / expert_load.mean():.2f}"
            f" | {expert_load.min() / expert_load.mean():.2f}"
            f" | {100 * expert_load.max() / expert_load.sum():.2f}% (expert {expert_load.argmax()})"
            f" | {rank_load.max() / rank_load.mean():.3f}"
            f" | {reached[:, :ranks].sum(dim=1).mean():.2f} |"
        )


def positive(text: str) -> int:
    """Argument type: a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small MoE language model and record its gate decisions as a routing trace,"
        " or check and summarise an existing trace.",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="FILE", help="make a trace and write it to FILE")
    action.add_argument("--summary", type=Path, metavar="FILE", help="check FILE and print its metadata and skew")
    parser.add_argument(
        "--steps", type=positive, default=1600, help="training steps of 2048 tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of weights, data split and batches (default: %(default)s)"
    )
    parser.add_argument(
        "--balance-coef",
        type=float,
        default=0.002,
        help="coefficient of the load-balancing loss (default: %(default)s)",
    )
    parser.add_argument("--threads", type=positive, default=2, help="processor threads (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[2048, 1920, 2048, 1792],
        help="tokens recorded on each rank; the number of values is the number of ranks (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        if args.summary:
            summarise(args.summary)
        else:
            make(args.out, args.steps, args.seed, args.balance_coef, args.threads, args.tokens)
    except (OSError, SafetensorError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
