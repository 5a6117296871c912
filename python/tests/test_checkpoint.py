"""Copies, pickles and checkpoints of layers keep every expert, on any number of ranks."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from hybrid_ep import Buffer, CallerError, MoELayer, TokenDispatcher
from hybrid_ep.experts import LocalExperts, local_part
from hybrid_ep.moe import clip_gradients, parameter_groups, reduce_gradients
from process_worlds import Rank, world_of_processes
from worlds import on_threads

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 8, 16, 24, 2


def layer_of(buffer: Buffer, seed: int = 0, **options: Any) -> MoELayer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoELayer(buffer, HIDDEN, INTERMEDIATE, topk=TOPK, shared_intermediate=8, **options)


def input_of(rank: int) -> Tensor:
    return torch.randn(5 + rank, HIDDEN, generator=torch.Generator().manual_seed(rank))


def train(layer: MoELayer, optimizer: torch.optim.Optimizer, ranks: int, rank: int, steps: int) -> None:
    """Distributes 4 batches over the ranks."""
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in range(rank, 4, ranks):
            layer(input_of(batch)).square().sum().backward()
        reduce_gradients(layer, op="sum")
        optimizer.step()


def outputs(layer: MoELayer, ranks: int, rank: int) -> dict[int, Tensor]:
    """Computes outputs of all 4 batches in one call: each expert then has the same rows for any number of ranks."""
    own = range(4 * rank // ranks, 4 * (rank + 1) // ranks)
    with torch.no_grad():
        y = layer(torch.cat([input_of(batch) for batch in own]))
    return dict(zip(own, y.split([len(input_of(batch)) for batch in own]), strict=True))


def save(here: Rank, path: str) -> dict[int, Tensor]:
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        layer = layer_of(buffer)
        optimizer = torch.optim.AdamW(parameter_groups(layer), lr=1e-2)
        train(layer, optimizer, here.size, here.rank, 3)
        model, optim = get_state_dict(layer, optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
        return outputs(layer, here.size, here.rank)


def load(here: Rank, path: str) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Returns the outputs, and the optimizer's moments of this rank's experts."""
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        layer = layer_of(buffer, seed=1)
        optimizer = torch.optim.AdamW(parameter_groups(layer), lr=1e-2)
        model, optim = get_state_dict(layer, optimizer)
        state = {"model": model, "optim": optim}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(layer, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        moments = {
            name: local_part(optimizer.state[parameter]["exp_avg_sq"]).clone()
            for name, parameter in layer.named_parameters()
        }
        return outputs(layer, here.size, here.rank), moments


def merged(parts: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    return {batch: y for part in parts for batch, y in part.items()}


def test_saved_on_4_ranks_and_loaded_on_2_and_1(tmp_path: Path) -> None:
    saved = merged(world_of_processes(4, "cpu").run(save, str(tmp_path)))
    found = {ranks: world_of_processes(ranks, "cpu").run(load, str(tmp_path)) for ranks in (2, 1)}
    experts = ("experts.gate_up", "experts.down")
    for ranks, parts in found.items():
        loaded = merged([part for part, _ in parts])
        assert loaded.keys() == saved.keys() == {*range(4)}
        for batch, y in saved.items():
            assert torch.equal(loaded[batch], y), f"batch {batch} on {ranks} ranks"
        for name in experts:
            whole = torch.cat([moments[name] for _, moments in parts])
            assert whole.shape[0] == EXPERTS and whole.abs().amin(dim=0).max() > 0
            assert torch.equal(whole, torch.cat([moments[name] for _, moments in found[1]]))


def test_copies_have_the_same_buffer_and_train_on_their_own() -> None:
    def work(here: Rank) -> None:
        with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
            layer = layer_of(buffer, balance_coef=0.1, balance_group=here.group)
            x = input_of(here.rank)
            y = layer(x)
            # After a call, so that the layer has `balance_loss` and `overflow`.
            for again in (copy.deepcopy(layer), loaded(saved(layer))):
                assert again.dispatcher.buffer is buffer and again.experts.buffer is buffer
                assert again.router.balance_group is here.group
                assert type(again.experts.down) is type(layer.experts.down) is DTensor
                assert torch.equal(again(x), y)
                again(x).square().sum().backward()
                before = local_part(again.experts.down.grad).clone()
                reduce_gradients(again, op="sum")  # experts' gradients are complete
                assert torch.equal(local_part(again.experts.down.grad), before) and before.abs().max() > 0
                with torch.no_grad():
                    local_part(again.experts.down).zero_()
            assert torch.equal(layer(x), y) and layer.experts.down.grad is None
            dispatcher = TokenDispatcher(buffer, capacity=64)
            assert copy.deepcopy(dispatcher).buffer is buffer and loaded(saved(dispatcher)).capacity == 64

    world_of_processes(2, "cpu").run(work)


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def loaded(data: bytes, weights_only: bool = False) -> Any:
    return torch.load(io.BytesIO(data), weights_only=weights_only)


def test_a_layer_saved_whole_is_loaded_onto_a_buffer(tmp_path: Path) -> None:
    path = tmp_path / "layer.pt"
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        layer = layer_of(buffer)
        expected = layer(input_of(0))
        torch.save(layer, path)
    program = f"""
import torch
from hybrid_ep import Buffer, CallerError
try:
    torch.load({str(path)!r}, weights_only=False)
except CallerError as error:
    print(error)
with Buffer(num_experts={EXPERTS}, device="cpu") as buffer:
    with buffer.attach():
        layer = torch.load({str(path)!r}, weights_only=False)
    x = torch.randn(5, {HIDDEN}, generator=torch.Generator().manual_seed(0))
    torch.save(layer(x), {str(path)!r})
with Buffer(num_experts=4, device="cpu") as other, other.attach():
    try:
        torch.load({str(tmp_path / "again.pt")!r}, weights_only=False)
    except CallerError as error:
        print(error)
"""
    torch.save(layer, tmp_path / "again.pt")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "saved with a Buffer of 8 experts on 1 ranks: load it `with buffer.attach():`" in done.stdout
    assert "saved with a Buffer of 8 experts; the one to attach it to has 4" in done.stdout
    assert torch.equal(torch.load(path), expected)


def test_a_rank_does_not_take_another_ranks_experts() -> None:
    """Neither from a state dict nor from a pickled layer, with a process group and without."""

    def of_group(here: Rank) -> None:
        with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
            layer = layer_of(buffer)
            files: list[Any] = [None] * here.size
            dist.all_gather_object(files, (saved(layer.state_dict()), saved(layer)), group=here.group)
            check(layer, files)
            assert layer.state_dict()["experts.down"].shape[0] == EXPERTS, "a tensor of all experts"

    def check(layer: MoELayer, files: list[tuple[bytes, bytes]]) -> None:
        buffer = layer.dispatcher.buffer
        for rank, (state, whole) in enumerate(files):
            own = rank == buffer.rank
            other = layer_of(buffer, seed=1)
            try:
                other.load_state_dict(loaded(state, weights_only=True))
                assert own
                assert torch.equal(local_part(other.experts.down), local_part(layer.experts.down))
            except RuntimeError as error:
                assert not own and f"holds the experts {4 * rank} to {4 * rank + 3}, but this rank has" in str(error)
            try:
                with buffer.attach():
                    loaded(whole)
                assert own
            except CallerError as error:
                assert not own and "load the layer that this rank saved" in str(error)

    world_of_processes(2, "cpu").run(of_group)
    buffers = Buffer.threads(2, num_experts=EXPERTS, device="cpu")
    layers = [layer_of(buffer) for buffer in buffers]
    files = [(saved(layer.state_dict()), saved(layer)) for layer in layers]
    on_threads(buffers, lambda buffer: check(layers[buffer.rank], files))


def _save_state(here: Rank, path: str) -> None:
    with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
        torch.save(layer_of(buffer).state_dict(), f"{path}/{here.rank}.pt")


def test_parts_of_a_process_group_are_concatenated_without_one(tmp_path: Path) -> None:
    """As docs/checkpoints.md says: the files hold `DTensor`s, of a group that this process does not have."""
    world_of_processes(2, "cpu").run(_save_state, str(tmp_path))
    files = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    state = dict(files[0])
    for name in ("experts.gate_up", "experts.down", "experts.expert_ids"):
        state[name] = torch.cat([local_part(file[name]) for file in files])
    with Buffer(num_experts=EXPERTS, device="cpu") as buffer:
        layer, right = layer_of(buffer, seed=1), layer_of(buffer)
        layer.load_state_dict(state)
        for found, expected in zip(layer.parameters(), right.parameters(), strict=True):
            assert torch.equal(found, expected)


def test_a_state_dict_of_all_experts_serves_every_rank(tmp_path: Path) -> None:
    """From one process, or made by `dcp_to_torch_save`; without `expert_ids` the experts are in order."""
    with Buffer(num_experts=EXPERTS, device="cpu") as alone:
        whole = layer_of(alone)
        state = whole.state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    unnamed = {key: value for key, value in state.items() if key != "experts.expert_ids"}
    for given in (torch.load(tmp_path / "whole.pt"), state, unnamed):
        for buffer in Buffer.threads(2, num_experts=EXPERTS, device="cpu"):
            layer = layer_of(buffer, seed=1)
            layer.load_state_dict(given)
            first = 4 * buffer.rank
            assert torch.equal(layer.experts.gate_up, whole.experts.gate_up[first : first + 4])
            part = {key: value[:4] if key.startswith("experts.") else value for key, value in unnamed.items()}
            with pytest.raises(
                RuntimeError, match="holds 4 of 8 experts, and expert_ids, which says which ones, is missing"
            ):
                layer.load_state_dict(part)
            with pytest.raises(RuntimeError, match=r"Missing key.*experts\.down"):
                layer.load_state_dict({key: value for key, value in state.items() if key != "experts.down"})


def test_gradients_are_clipped_by_the_norm_of_all_experts() -> None:
    def work(here: Rank) -> list[Tensor]:
        with Buffer(here.group, num_experts=EXPERTS, device="cpu") as buffer:
            layer = layer_of(buffer)
            for batch in range(here.rank, 2, here.size):
                layer(input_of(batch)).square().sum().backward()
            reduce_gradients(layer, op="sum")
            norm = clip_gradients(layer, 0.5)
            return [norm, clip_gradients(layer, 1e9), layer.router.weight.grad]

    (alone,), two = (world_of_processes(ranks, "cpu").run(work) for ranks in (1, 2))
    for norm, after, router in two:
        torch.testing.assert_close(norm, alone[0])
        torch.testing.assert_close(after, torch.tensor(0.5))
        torch.testing.assert_close(router, alone[2])
        assert torch.equal(router, two[0][2])


def _buffer_made_too_early(here: Rank) -> None:
    # Such a buffer met its ranks through the environment.
    buffer = SimpleNamespace(num_experts=4, num_local_experts=4 // here.size, mesh=None)
    with pytest.raises(CallerError, match="made before init_process_group"):
        LocalExperts(buffer)  # type: ignore[arg-type]


def test_a_buffer_without_a_group_beside_groups_of_pytorch_is_refused() -> None:
    world_of_processes(2, "cpu").run(_buffer_made_too_early)
