"""Every Python block in README.md and docs/ runs, or a marker above it gives the reason why not."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import hybrid_ep
from process_worlds import new_processes

ROOT = Path(__file__).resolve().parents[2]
# In the Markdown above a fence: <!-- not run: the reason -->
MARKER = re.compile(r"<!-- not run: (?P<reason>.+) -->$")
# With this reason, a block runs where there is a GPU.
NEEDS_GPU = "needs a GPU"
# Every block with a marker: its file, and the number of such blocks. The tests fail for a marker that is not listed.
NOT_RUN = {"docs/machines.md": 1, "docs/migration.md": 3, "docs/overlap.md": 2, "docs/python.md": 4}

# Code to run before and after a block that is not a whole program, by the block's file and first line
# without its comment.
AROUND = {
    ("README.md", "import torch"): (
        "",
        """
assert received.tokens.shape == (2000, 512)
assert torch.equal(combined, tokens)
""",
    ),
    # The files of 4 ranks.
    ("docs/checkpoints.md", "import torch"): (
        """
import os, pathlib, torch
from hybrid_ep import Buffer, MoELayer
os.chdir(pathlib.Path(__file__).parent)
for rank, buffer in enumerate(Buffer.threads(4, num_experts=8, device="cpu")):
    torch.manual_seed(0)
    torch.save(MoELayer(buffer, 64, 128, topk=2).state_dict(), f"rank{rank}.pt")
""",
        """
torch.manual_seed(0)
right = MoELayer(Buffer(num_experts=8, device="cpu"), 64, 128, topk=2).state_dict()
assert state.keys() == right.keys() and all(torch.equal(state[name], right[name]) for name in right)
""",
    ),
    ("docs/migration.md", "import torch"): ("", "assert migration.step == 4"),
    # The plan of one GPU. Two stages with two EP groups of two GPUs each need 8 ranks.
    ("docs/planner.md", "import json"): (
        """
import json, os, pathlib
import torch
import torch.distributed as dist
part_of_the_model = torch.nn.Linear(2, 2)
os.chdir(pathlib.Path(__file__).parent)
pathlib.Path("groups.json").write_text(json.dumps({"layout": {"ep_groups": [[[0]]]}}))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
""",
        """
assert (buffer.rank, dist.get_world_size(same_experts), dist.get_world_size(stage_group)) == (0, 1, 1)
assert part_of_the_model.weight.grad is not None
buffer.close()
dist.destroy_process_group()
""",
    ),
    ("docs/megatron.md", "from hybrid_ep import install_as_deep_ep"): (
        "",
        """
import deep_ep, hybrid_ep.deep_ep
assert deep_ep.HybridEPBuffer is hybrid_ep.deep_ep.HybridEPBuffer
""",
    ),
}
# The ranks of a block that torchrun starts.
RANKS = {("README.md", "import torch, torch.distributed as dist"): 2, ("docs/migration.md", "import torch"): 4}


class Block(NamedTuple):
    """A fenced block of a Markdown file."""

    file: str
    line: int
    text: str
    reason: str | None
    """The reason in the marker above the block, if there is one."""

    @property
    def key(self) -> tuple[str, str]:
        return self.file, self.text.splitlines()[0].split("  # ")[0]


def blocks() -> list[Block]:
    found = []
    directories = [ROOT / name for name in ("crates", "docs", "examples", "traces")]
    files = {*ROOT.glob("*.md"), *(path for directory in directories for path in directory.rglob("*.md"))}
    for path in sorted(files):
        lines = path.read_text().splitlines()
        number = 0
        while number < len(lines):
            if lines[number].startswith("```"):
                end = lines.index("```", number + 1)
                if lines[number] == "```python":
                    marker = MARKER.match(lines[number - 1])
                    text = "\n".join(lines[number + 1 : end])
                    reason = marker["reason"] if marker else None
                    found.append(Block(str(path.relative_to(ROOT)), number + 1, text, reason))
                number = end
            number += 1
    return found


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.file}:{block.line}")
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    on_gpu = block.reason == NEEDS_GPU and torch.cuda.is_available()
    if block.reason is not None and not on_gpu:
        pytest.skip(block.reason)
    before, after = AROUND.get(block.key, ("", ""))
    program = tmp_path / "snippet.py"
    program.write_text(f"{before}\n{block.text}\n{after}")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if (ranks := RANKS.get(block.key)) is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *launcher, program], capture_output=True, text=True, timeout=240, env=environment
        )
        code, errors = done.returncode, done.stderr
    else:
        code, errors = _run(program, environment)
    assert code == 0, f"{block.file}:{block.line}\n{errors}"


def _run(program: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Runs a program in a new process. Returns its exit code, None if it has not ended, and what it wrote to stderr."""
    errors = program.with_suffix(".err")
    process = new_processes().Process(target=_main, args=(program, environment, errors))
    process.start()
    process.join(240)
    process.kill()
    return process.exitcode, errors.read_text()


def _main(program: Path, environment: dict[str, str], errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = [str(program)], str(program.parent)
    runpy.run_path(str(program), run_name="__main__")


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.file}:{block.line}")
def test_a_block_imports_the_modules_that_it_names(block: Block) -> None:
    # The process that runs a block has imported them already.
    program = ast.parse(block.text)
    imported = {name.name for node in ast.walk(program) if isinstance(node, ast.Import) for name in node.names}
    named = {
        f"hybrid_ep.{node.attr}"
        for node in ast.walk(program)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hybrid_ep"
    }
    modules = {f"hybrid_ep.{name.stem}" for name in Path(hybrid_ep.__file__).parent.iterdir()}
    assert named & modules <= imported


def test_every_block_that_does_not_run_is_listed() -> None:
    assert Counter(block.file for block in blocks() if block.reason is not None) == NOT_RUN


def test_every_entry_of_around_names_a_block() -> None:
    keys = {block.key for block in blocks()}
    assert set(AROUND) <= keys, set(AROUND) - keys


def test_the_readme_shows_the_output_of_the_example() -> None:
    """test_examples.py compares that output with what the example prints."""
    printed = (ROOT / "examples" / "README.md").read_text().split("```text\n")[1].split("```")[0]
    assert printed.startswith("rank 0 of 4 sent") and printed in (ROOT / "README.md").read_text()
    shown = [block for block in blocks() if block.file == "README.md"]
    example = (ROOT / "examples" / "ten_lines.py").read_text()
    for line in shown[0].text.splitlines():
        assert line.split("  # ")[0] in example, line
