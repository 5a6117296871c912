"""`hybrid_ep.deep_ep`, compared with DeepEP's interface and with naively written operators."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_ep
from deep_ep_world import (
    Case,
    combined,
    combined_identity,
    experts,
    inputs,
    new_buffer,
    permuted,
    probs_of,
    rows_of,
    same,
    scale_of,
    scales_of,
    world_of,
)
from hybrid_ep import _native, ops
from hybrid_ep.deep_ep import HybridEPBuffer, HybridEpConfigInstance
from hybrid_ep.deep_ep.hybrid_ep_buffer import indices_to_map
from process_worlds import Rank

__all__ = ["world_of"]  # a fixture

# The interface.

CONSTRUCTOR = {
    "group": ...,
    "hidden_dim": ...,
    "max_num_of_tokens_per_rank": ...,
    "num_local_experts": ...,
    "use_fp8": False,
    "num_sms_dispatch_api": None,
    "num_sms_combine_api": None,
    "num_sms_preprocessing_api": None,
    "num_blocks_permute": None,
    "num_blocks_unpermute": None,
    "load_cached_kernels": False,
    "use_shared_buffer": True,
    "enable_custom_allgather": False,
    "num_of_hybrid_ep_ranks_per_nvlink_domain": None,
    "use_mnnvl": None,
}
DISPATCH = {
    "hidden": ...,
    "scaling_factor": None,
    "topk_idx": None,
    "topk_weights": None,
    "num_of_experts": None,
    "probs": None,
    "routing_map": None,
    "num_dispatched_tokens_tensor": None,
    "num_dispatched_tokens": None,
    "handle": None,
}
COMBINE = {"hidden": ..., "probs": None, "handle": None}
DISPATCH_WITH_PERMUTE = {
    "hidden": ...,
    "topk_idx": None,
    "topk_weights": None,
    "num_of_experts_per_rank": None,
    "num_of_experts": None,
    "use_fp8": None,
    "routing_map": None,
    "probs": None,
    "scaling_factor": None,
    "num_permuted_tokens": None,
    "pad_multiple": None,
    "handle": None,
    "non_blocking": False,
    "fuse_permute_dispatch": False,
    "num_dispatched_tokens": None,
    "use_host_meta": None,
}
COMBINE_WITH_UNPERMUTE = {
    "hidden": ...,
    "probs": None,
    "handle": None,
    "pad_multiple": None,
    "fuse_unpermute_combine": False,
    "num_dispatched_tokens": None,
}


@pytest.mark.parametrize(
    ("method", "expected", "keywords_only"),
    [
        ("__init__", CONSTRUCTOR, False),
        ("dispatch", DISPATCH, False),
        ("combine", COMBINE, False),
        ("dispatch_with_permute", DISPATCH_WITH_PERMUTE, True),
        ("combine_with_unpermute", COMBINE_WITH_UNPERMUTE, True),
    ],
)
def test_signatures_are_those_of_deep_ep(method: str, expected: dict[str, Any], keywords_only: bool) -> None:
    parameters = dict(inspect.signature(getattr(HybridEPBuffer, method)).parameters)
    del parameters["self"]
    found = {
        name: ... if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in parameters.items()
    }
    assert list(found.items()) == list(expected.items())
    kind = inspect.Parameter.KEYWORD_ONLY if keywords_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {parameter.kind for parameter in parameters.values()} == {kind}


def group_of(ranks: int, rank: int = 0) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: ranks)


def test_buffer_config_has_the_sizes_of_the_constructor() -> None:
    group = group_of(8, rank=5)
    buffer = HybridEPBuffer(group, 1024, 4096, 4, num_of_hybrid_ep_ranks_per_nvlink_domain=4)
    config = buffer.configurer.buffer_config
    assert buffer.group is group and buffer.config is config
    assert (config.hidden_dim, config.num_of_experts_per_rank) == (1024, 4)
    # Programs make another buffer if a rank has more tokens than this, and other ranks may have fewer.
    assert config.max_num_of_tokens_per_rank == 2**31 - 1
    assert (buffer.rank, buffer.group_size, buffer.local_rank, buffer.node_rank, buffer.num_of_nodes) == (5, 8, 1, 1, 2)


def test_template_config_has_the_arguments() -> None:
    buffer = HybridEPBuffer(group_of(2), 1024, 4096, 4)
    config = buffer.update_template_config(hidden_dim=512, num_of_tokens_per_rank=5000, pad_multiple=32, some_knob=7)
    assert isinstance(config, HybridEpConfigInstance)
    assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.pad_multiple) == (512, 5000, 32)
    assert config.some_knob == 7
    assert buffer.update_template_config().max_num_of_tokens_per_rank == 5000
    assert buffer.update_template_config().hidden_dim == 1024


def test_ranks_per_domain_must_divide_the_group() -> None:
    with pytest.raises(hybrid_ep.CallerError, match="divisor of the group's 8 ranks, found 3"):
        HybridEPBuffer(group_of(8), 64, 16, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=3)
    assert HybridEPBuffer(group_of(8), 64, 16, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=72).num_of_nodes == 1


def test_the_environment_says_how_many_ranks_a_domain_has(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    monkeypatch.setenv(name, "2")
    buffer = HybridEPBuffer(group_of(8, rank=5), 64, 16, 1)
    assert (buffer.num_of_nodes, buffer.node_rank, buffer.local_rank) == (4, 2, 1)
    # As in DeepEP, the variable decides even if the program passes a number.
    assert HybridEPBuffer(group_of(8), 64, 16, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=4).num_of_nodes == 4
    monkeypatch.setenv(name, "72")
    assert HybridEPBuffer(group_of(8), 64, 16, 1).num_of_nodes == 1
    monkeypatch.setenv(name, "")
    assert HybridEPBuffer(group_of(8), 64, 16, 1).num_of_nodes == 1
    for wrong, expected in [
        ("3", "divisor of the group's 8 ranks, found 3"),
        ("two", "a number of ranks, found 'two'"),
    ]:
        monkeypatch.setenv(name, wrong)
        with pytest.raises(hybrid_ep.CallerError, match=rf"^{name} \(an environment variable\): expected .*{expected}"):
            HybridEPBuffer(group_of(8), 64, 16, 1)


def test_empty_jit_cache_removes_kernels_and_nothing_else(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_EP_KERNEL_CACHE", str(tmp_path))
    for name in ("dispatch-sm_90a-00.cubin", "notes.txt"):
        (tmp_path / name).touch()
    HybridEPBuffer(group_of(2), 64, 16, 1).empty_jit_cache()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    monkeypatch.setenv("HYBRID_EP_KERNEL_CACHE", str(tmp_path / "never made"))
    HybridEPBuffer(group_of(2), 64, 16, 1).empty_jit_cache()


def test_no_buffer_is_made_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_ep.deep_ep.hybrid_ep_buffer, "is_capturing", lambda device: True)
    buffer = HybridEPBuffer(group_of(2), 64, 16, 4)
    with pytest.raises(hybrid_ep.CallerError, match="run one step without capturing first"):
        buffer._join(SimpleNamespace(device=torch.device("cuda", 0), shape=(0, 64)), 8)  # type: ignore[arg-type]


def test_a_buffer_of_several_domains_has_room_for_the_tokens_of_the_constructor_and_of_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(hybrid_ep.deep_ep.hybrid_ep_buffer, "Buffer", lambda group, **options: made.append(options))
    buffer = HybridEPBuffer(group_of(4), 64, 16, 4, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
    for rows, hidden in [(3, 64), (20, 128), (0, 32)]:
        buffer._join(torch.empty(rows, hidden), 16)
    sizes = [(options["domains"], options["max_tokens"], options["max_hidden"]) for options in made]
    assert sizes == [(2, 16, 64), (2, 20, 128), (2, 16, 64)]


def test_indices_to_map() -> None:
    topk_idx = torch.tensor([[0, 2], [-1, -1], [3, -1], [1, 1]])
    weights = torch.tensor([[0.25, 0.5], [9, 9], [1, 9], [0.25, 0.5]], dtype=torch.bfloat16)
    routing_map, probs = indices_to_map(topk_idx, weights, 4, 4)
    same(routing_map, torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool), "map")
    same(probs, torch.tensor([[0.25, 0, 0.5, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0.75, 0, 0]]), "probs")
    assert routing_map.is_contiguous() and indices_to_map(topk_idx.int(), None, 4, 4)[1] is None
    with pytest.raises(hybrid_ep.CallerError, match="row 2 names an expert past the last of 3"):
        indices_to_map(topk_idx, weights, 4, 3)
    with pytest.raises(hybrid_ep.CallerError, match=r"expected \[5, k\]"):
        indices_to_map(topk_idx, weights, 5, 4)


def test_sizes_that_the_tensors_do_not_have_are_refused() -> None:
    idx, routing_map = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.bool)
    for sizes in [(2**63, 2, 4), (3, 2, 4), (2, 2**63, 4), (2, 2, 5), (2**62, 2**62, 2**62)]:
        with pytest.raises(hybrid_ep.CallerError, match=r"topk_idx|routing_map|map"):
            _native.dense_routing(None, 0, sizes, True, ops.span(idx), None, ops.span(routing_map), None)


def test_weights_of_indices_have_gradients() -> None:
    weights = torch.rand(2, 2, requires_grad=True)
    _, probs = indices_to_map(torch.tensor([[0, 1], [2, -1]]), weights, 2, 3)
    assert probs is not None
    (probs * torch.tensor([[1.0, 2, 4], [8, 16, 32]])).sum().backward()
    same(weights.grad, torch.tensor([[1.0, 2], [32, 0]]), "gradient")


# Permuted dispatch and combine.


def check_layer(here: Rank, case: Case, **constructor: Any) -> None:
    """Runs dispatch, experts, combine; then again with the handle, without and with weights."""
    buffer = new_buffer(here, case, **constructor)
    given = inputs(here, case)
    rows, probs, scales, counts, handle = buffer.dispatch_with_permute(
        **given, num_of_experts_per_rank=case.local, pad_multiple=case.pad
    )
    layout = permuted(case, here.rank)
    expected = rows_of(case, layout, [case.hidden_of(rank) for rank in range(case.ranks)])
    same(rows, expected, "tokens")
    same(probs, probs_of(case, layout), "probs")
    same(counts, torch.tensor(layout.counts), "tokens_per_expert")
    assert counts.device.type == "cpu" and counts.is_pinned() == (here.device.type == "cuda")
    assert scales is None and len(handle) == 11
    same(handle[-1], torch.zeros(1, dtype=torch.int32), "overflow flag")
    assert handle[-1].device == here.device

    outputs = experts(case, here, rows)
    tokens, weights = buffer.combine_with_unpermute(hidden=outputs, probs=probs, handle=handle, pad_multiple=case.pad)
    expected_tokens, expected_weights = combined(case, here.rank)
    same(tokens, expected_tokens.to(case.dtype), "combined tokens")
    same(weights, expected_weights, "combined probs")
    assert buffer.combine_with_unpermute(hidden=outputs, handle=handle)[1] is None

    again = buffer.dispatch_with_permute(
        hidden=2 * given["hidden"],
        scaling_factor=None,
        handle=handle,
        pad_multiple=case.pad,
        num_permuted_tokens=counts.sum(),
    )
    same(again[0], 2 * expected, "tokens with a handle")
    assert again[1] is None and again[3] is counts and again[4] is handle
    again = buffer.dispatch_with_permute(hidden=given["hidden"], probs=given["probs"] / 2, handle=handle)
    same(again[1], probs_of(case, layout) / 2, "probs with a handle")


@pytest.mark.parametrize("pad", [None, 1, 16, 256])
@pytest.mark.parametrize("tokens", [(16, 16), (0, 3), (16, 16, 16, 16), (5, 0, 33, 1)])
def test_a_layer(world_of: Any, tokens: tuple[int, ...], pad: int | None) -> None:
    world_of(len(tokens)).run(check_layer, Case(tokens, pad=pad))


@pytest.mark.parametrize("repeated", [1, 2, 4])
@pytest.mark.parametrize("tokens", [16, 32, 256])
def test_layouts_of_tensor_and_expert_parallelism(world_of: Any, tokens: int, repeated: int) -> None:
    """With tensor parallelism the map repeats, and has more experts per token than a top-k routing."""
    world_of(4).run(check_layer, Case((tokens,) * 4, experts=32, hidden=1024, pad=16, repeated=repeated))


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_any_density_of_the_map(world_of: Any, density: float) -> None:
    world_of(4).run(check_layer, Case((16, 7, 0, 20), density=density, pad=16))


@pytest.mark.parametrize("hidden", [8, 24, 1000])
def test_any_hidden_size(world_of: Any, hidden: int) -> None:
    world_of(2).run(check_layer, Case((9, 4), hidden=hidden))


def test_f32_tokens(world_of: Any) -> None:
    world_of(2).run(check_layer, Case((9, 4), dtype=torch.float32, pad=16))


@pytest.mark.parametrize("per_domain", [1, 2])
def test_emulated_nvlink_domains(world_of: Any, device: Any, per_domain: int) -> None:
    if torch.device(device).type == "cuda":
        pytest.skip("processes on GPUs need libfabric for several domains")
    run = check_emulated_domains
    world_of(4).run(run, Case((5, 0, 33, 1), pad=16), per_domain)


def check_emulated_domains(here: Rank, case: Case, per_domain: int) -> None:
    check_layer(here, case, num_of_hybrid_ep_ranks_per_nvlink_domain=per_domain)
    check_plain(here, case, num_of_hybrid_ep_ranks_per_nvlink_domain=per_domain)


def test_parameters_without_effect_are_accepted(world_of: Any) -> None:
    world_of(2).run(check_parameters_without_meaning, Case((9, 4)))


def check_parameters_without_meaning(here: Rank, case: Case) -> None:
    check_layer(
        here,
        case,
        num_sms_dispatch_api=8,
        num_sms_combine_api=16,
        num_sms_preprocessing_api=108,
        num_blocks_permute=4,
        num_blocks_unpermute=4,
        load_cached_kernels=True,
        use_shared_buffer=False,
        enable_custom_allgather=True,
        use_mnnvl=True,
    )
    buffer = new_buffer(here, case)
    plain = buffer.dispatch_with_permute(**inputs(here, case))
    fused = buffer.dispatch_with_permute(**inputs(here, case), fuse_permute_dispatch=True, num_permuted_tokens=10_000)
    same(fused[0], plain[0].cpu(), "tokens, fused")
    same(
        buffer.combine_with_unpermute(hidden=plain[0], handle=plain[4], fuse_unpermute_combine=True)[0],
        buffer.combine_with_unpermute(hidden=plain[0], handle=plain[4])[0].cpu(),
        "combined tokens, fused",
    )


def test_top_k_routing(world_of: Any) -> None:
    world_of(2).run(check_top_k, Case((9, 4), density=0.15, pad=16))


def check_top_k(here: Rank, case: Case) -> None:
    buffer = new_buffer(here, case)
    given = inputs(here, case)
    most = max(int(case.map_of(rank).sum(1).max()) for rank in range(case.ranks))
    topk_weights, topk_idx = given["probs"].topk(most, dim=1)
    topk_idx[topk_weights == 0] = -1
    layout = permuted(case, here.rank)
    for dtype in (torch.int32, torch.int64):
        rows, probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=given["hidden"],
            topk_idx=topk_idx.to(dtype),
            topk_weights=topk_weights,
            num_of_experts=case.experts,
            pad_multiple=case.pad,
        )
        same(rows, rows_of(case, layout, [case.hidden_of(rank) for rank in range(case.ranks)]), "tokens")
        same(probs, probs_of(case, layout), "probs")
    # New weights in the same layout, in each form.
    for weights in (
        {"topk_weights": topk_weights / 2},
        {"topk_idx": topk_idx, "topk_weights": topk_weights / 2, "num_of_experts": case.experts},
        {"probs": given["probs"] / 2, "routing_map": given["routing_map"]},
    ):
        again = buffer.dispatch_with_permute(hidden=given["hidden"], handle=handle, **weights)
        same(again[1], probs_of(case, layout) / 2, f"probs with a handle and {', '.join(weights)}")
    # Dense weights take precedence over those of indices.
    dense = buffer.dispatch_with_permute(hidden=given["hidden"], topk_idx=topk_idx, probs=given["probs"])
    same(dense[1], rows_of_probs_without_padding(case, here), "dense probs")
    # Without weights no weights are delivered.
    bare = buffer.dispatch_with_permute(hidden=given["hidden"], topk_idx=topk_idx)
    assert bare[1] is None
    same(bare[3].sum(), torch.tensor(dense[0].shape[0]), "rows")


def rows_of_probs_without_padding(case: Case, here: Rank) -> Tensor:
    probs = probs_of(case, permuted(case, here.rank))
    return probs[probs != 0]


def test_inputs_need_not_be_contiguous(world_of: Any) -> None:
    world_of(2).run(check_strided_inputs, Case((9, 4), pad=16))


def check_strided_inputs(here: Rank, case: Case) -> None:
    buffer = new_buffer(here, case)
    given = inputs(here, case)

    def strided(tensor: Tensor) -> Tensor:
        result = torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0].T.contiguous().T
        assert tensor.numel() < 2 or not result.is_contiguous()
        return result

    rows, probs, _, _, handle = buffer.dispatch_with_permute(
        **{name: strided(tensor) for name, tensor in given.items()}, pad_multiple=case.pad
    )
    layout = permuted(case, here.rank)
    same(rows, rows_of(case, layout, [case.hidden_of(rank) for rank in range(case.ranks)]), "tokens")
    same(probs, probs_of(case, layout), "probs")
    assert probs is not None
    every_second = torch.stack([probs, probs], dim=1)[:, 0]
    tokens, weights = buffer.combine_with_unpermute(
        hidden=strided(experts(case, here, rows)), probs=every_second, handle=handle
    )
    same(tokens, combined(case, here.rank)[0].to(case.dtype), "combined tokens")
    same(weights, combined(case, here.rank)[1], "combined probs")


# non_blocking: a capacity, drops, flags.


@pytest.mark.parametrize("pad", [None, 16])
@pytest.mark.parametrize("capacity", [0, 16, 48, 4096])
def test_non_blocking_drops_what_does_not_fit(world_of: Any, capacity: int, pad: int | None) -> None:
    world_of(4).run(check_capacity, Case((16, 7, 0, 20), pad=pad), capacity)


def check_capacity(here: Rank, case: Case, capacity: int) -> None:
    buffer = new_buffer(here, case)
    given = inputs(here, case)
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        **given, pad_multiple=case.pad, num_permuted_tokens=torch.tensor(capacity), non_blocking=True
    )
    layouts = [permuted(case, rank, capacity) for rank in range(case.ranks)]
    layout = layouts[here.rank]
    used = len(layout.sources)
    assert rows.shape == (capacity, case.hidden)
    same(rows[:used], rows_of(case, layout, [case.hidden_of(rank) for rank in range(case.ranks)]), "tokens")
    assert probs is not None
    same(probs[:used], probs_of(case, layout), "probs")
    same(counts, torch.tensor(layout.counts), "tokens_per_expert")
    assert counts.device == here.device
    same(handle[-1], torch.tensor([int(layout.dropped)], dtype=torch.int32), "overflow flag")
    flag = torch.zeros(1, dtype=torch.bool, device=here.device)
    flag |= handle[-1] != 0
    assert flag.item() == layout.dropped

    factors = torch.zeros(capacity, 1, dtype=rows.dtype, device=rows.device)
    factors[:used, 0] = torch.tensor([scale_of(expert) for expert in layout.experts], dtype=rows.dtype)
    outputs = torch.where(factors == 0, 0, rows * factors)
    tokens, weights = buffer.combine_with_unpermute(hidden=outputs, probs=probs, handle=handle)
    expected_tokens, expected_weights = combined(case, here.rank, layouts)
    same(tokens, expected_tokens.to(case.dtype), "combined tokens")
    same(weights, expected_weights, "combined probs")

    for wanted in (None, capacity, used, capacity + 16):
        again = buffer.dispatch_with_permute(hidden=given["hidden"], handle=handle, num_permuted_tokens=wanted)
        assert again[0].shape[0] == (capacity if wanted is None else min(wanted, capacity))
        same(again[0][:used], rows[:used].cpu(), "tokens with a handle")
        assert again[3] is counts


def test_use_host_meta_is_the_old_name_of_blocking(world_of: Any) -> None:
    world_of(2).run(check_use_host_meta, Case((9, 4)))


def check_use_host_meta(here: Rank, case: Case) -> None:
    buffer = new_buffer(here, case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows, *_ = buffer.dispatch_with_permute(**inputs(here, case), num_permuted_tokens=64, use_host_meta=False)
    assert rows.shape[0] == 64
    [warning] = caught
    assert warning.category is DeprecationWarning and warning.filename == __file__


def test_what_a_cuda_graph_can_capture(world_of: Any, device: Any) -> None:
    if torch.device(device).type != "cuda":
        pytest.skip("needs GPUs")
    world_of(2).run(check_captured, Case((9, 4), pad=16), Case((9, 4), pad=16, seed=1))


def check_captured(here: Rank, case: Case, other: Case) -> None:
    buffer = new_buffer(here, case)
    given, capacity = inputs(here, case), 256
    # NCCL's threads may query events during the capture.
    capture = {"capture_error_mode": "thread_local"}
    options = {"pad_multiple": case.pad, "num_permuted_tokens": capacity, "non_blocking": True}
    too_early = pytest.raises(hybrid_ep.CallerError, match="run one step without capturing first")
    with too_early, torch.cuda.graph(torch.cuda.CUDAGraph(), **capture):
        buffer.dispatch_with_permute(**given, **options)
    rows, _, _, _, handle = buffer.dispatch_with_permute(**given, **options)
    buffer.combine_with_unpermute(hidden=rows, handle=handle)
    blocking = pytest.raises(
        hybrid_ep.CallerError, match="waits for the counts, which a CUDA graph's capture cannot do"
    )
    with blocking, torch.cuda.graph(torch.cuda.CUDAGraph(), **capture):
        buffer.dispatch_with_permute(**given)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **capture):
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(**given, **options)
        tokens, weights = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        again, *_ = buffer.dispatch_with_permute(hidden=tokens, handle=handle, num_permuted_tokens=capacity)
    for replayed in (other, case):
        for name, tensor in inputs(here, replayed).items():
            given[name].copy_(tensor)
        graph.replay()
        layout = permuted(replayed, here.rank, capacity)
        used = len(layout.sources)
        assert not layout.dropped
        same(rows[:used], rows_of(replayed, layout, [replayed.hidden_of(r) for r in range(here.size)]), "tokens")
        same(counts, torch.tensor(layout.counts), "tokens_per_expert")
        same(tokens, combined_identity(replayed, here.rank), "combined tokens")
        same(weights, replayed.probs_of(here.rank), "combined probs")
        sums = [combined_identity(replayed, rank) for rank in range(here.size)]
        same(again[:used], rows_of(replayed, layout, sums), "tokens with a handle")


# Plain dispatch and combine.


def check_plain(here: Rank, case: Case, **constructor: Any) -> None:
    buffer = new_buffer(here, case, **constructor)
    given = inputs(here, case)
    rows, probs, scales, handle = buffer.dispatch(
        hidden=given["hidden"], scaling_factor=None, routing_map=given["routing_map"], probs=given["probs"]
    )
    maps = torch.cat([case.map_of(rank) for rank in range(case.ranks)])[:, case.experts_of(here.rank)]
    here_too = maps.any(dim=1)
    all_tokens = torch.cat([case.hidden_of(rank) for rank in range(case.ranks)])
    local_probs = torch.cat([case.probs_of(rank) for rank in range(case.ranks)])[here_too, case.experts_of(here.rank)]
    same(rows, all_tokens[here_too], "tokens")
    # As in DeepEP, there is a column for each expert of the NVLink domain.
    domain = case.local * buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
    first = case.local * buffer.local_rank
    assert probs is not None and probs.shape == (rows.shape[0], domain)
    same(probs[:, first : first + case.local], local_probs, "probs")
    assert not probs[:, :first].any() and not probs[:, first + case.local :].any()
    assert scales is None

    _, _, _, num_dispatched_tokens, local_expert_routing_map, _, _ = handle
    same(num_dispatched_tokens, torch.tensor([rows.shape[0]], dtype=torch.int32), "num_dispatched_tokens")
    same(local_expert_routing_map, maps[here_too], "local_expert_routing_map")

    local_scales = scales_of(case)[case.experts_of(here.rank)].to(here.device)
    outputs = rows * (local_expert_routing_map * local_scales).sum(1, keepdim=True).to(rows.dtype)
    expected_tokens, expected_weights = combined(case, here.rank)
    for weights in (probs, probs[:, first : first + case.local]):
        tokens, back = buffer.combine(outputs, weights, handle)
        same(tokens, expected_tokens.to(case.dtype), "combined tokens")
        same(back, expected_weights, "combined probs")
    assert buffer.combine(outputs, handle=handle)[1] is None

    again = buffer.dispatch(2 * given["hidden"], handle=handle)
    same(again[0], 2 * all_tokens[here_too], "tokens with a handle")
    assert again[1] is None and again[3] is handle
    again = buffer.dispatch(given["hidden"], probs=given["probs"] / 2, handle=handle)
    assert again[1] is not None
    same(again[1][:, first : first + case.local], local_probs / 2, "probs with a handle")


@pytest.mark.parametrize("tokens", [(16, 16), (0, 3), (5, 0, 33, 1)])
def test_plain_dispatch(world_of: Any, tokens: tuple[int, ...]) -> None:
    world_of(len(tokens)).run(check_plain, Case(tokens))


# FP8.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_tokens_travel_with_their_scales(world_of: Any, dtype: torch.dtype) -> None:
    world_of(2).run(check_fp8_given, Case((9, 4), hidden=256, pad=16), dtype)


def check_fp8_given(here: Rank, case: Case, dtype: torch.dtype) -> None:
    def tokens_of(rank: int) -> Tensor:
        # All bytes, NaNs included.
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(0, 256, (case.tokens[rank], case.hidden), dtype=torch.uint8, generator=generator)

    def scales_of(rank: int) -> Tensor:
        return torch.randn(case.tokens[rank], case.hidden // 128, generator=torch.Generator().manual_seed(9 + rank))

    buffer = new_buffer(here, case, use_fp8=True)
    hidden = tokens_of(here.rank).view(dtype).to(here.device)
    scaling_factor = scales_of(here.rank).to(here.device)
    routing = {"routing_map": case.map_of(here.rank).to(here.device), "probs": case.probs_of(here.rank).to(here.device)}
    everyone = range(case.ranks)
    layout = permuted(case, here.rank)

    rows, probs, scales, _, handle = buffer.dispatch_with_permute(
        hidden=hidden, scaling_factor=scaling_factor, pad_multiple=case.pad, **routing
    )
    same(rows, rows_of(case, layout, [tokens_of(rank) for rank in everyone]).view(dtype), "tokens")
    same(scales, rows_of(case, layout, [scales_of(rank) for rank in everyone]), "scales")
    same(probs, probs_of(case, layout), "probs")
    again = buffer.dispatch_with_permute(hidden=hidden, scaling_factor=scaling_factor, handle=handle)
    same(again[0], rows.cpu(), "tokens with a handle")

    rows, _, scales, _ = buffer.dispatch(hidden=hidden, scaling_factor=scaling_factor, **routing)
    maps = torch.cat([case.map_of(rank) for rank in everyone])[:, case.experts_of(here.rank)]
    same(rows, torch.cat([tokens_of(rank) for rank in everyone])[maps.any(1)].view(dtype), "plain tokens")
    same(scales, torch.cat([scales_of(rank) for rank in everyone])[maps.any(1)], "plain scales")


def test_bf16_tokens_are_quantized_in_flight_with_use_fp8(world_of: Any) -> None:
    world_of(2).run(check_fp8_quantised, Case((9, 4), hidden=256, pad=16))


def check_fp8_quantised(here: Rank, case: Case) -> None:
    layout = permuted(case, here.rank)
    expected = rows_of(case, layout, [case.hidden_of(rank) for rank in range(case.ranks)]).float()
    told_at_once = new_buffer(here, case, use_fp8=True).dispatch_with_permute(**inputs(here, case), pad_multiple=16)
    told_by_call = new_buffer(here, case).dispatch_with_permute(**inputs(here, case), pad_multiple=16, use_fp8=True)
    for rows, _, scales, _, _ in (told_at_once, told_by_call):
        assert rows.dtype == torch.float8_e4m3fn and scales is not None
        assert scales.shape == (expected.shape[0], case.hidden // 128)
        blocks = rows.cpu().float().view(expected.shape[0], -1, 128) * scales.cpu().unsqueeze(-1)
        # e4m3 has 3 bits of mantissa: half a step of 1/8, relative to the largest value.
        torch.testing.assert_close(blocks.flatten(1), expected, rtol=2**-4, atol=2**-9)


# Errors. The buffer stays usable.


def test_errors_name_what_is_wrong(world_of: Any) -> None:
    world_of(2).run(check_errors, Case((9, 4), pad=16))


def check_errors(here: Rank, case: Case) -> None:
    buffer = new_buffer(here, case)
    given = inputs(here, case)
    hidden = given["hidden"]
    rows, _, _, counts, handle = buffer.dispatch_with_permute(**given, pad_multiple=16)
    plain = buffer.dispatch(**given)

    def refused(what: str, call: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(hybrid_ep.CallerError, match=what):
            call(*arguments, **options)

    dispatch, combine = buffer.dispatch_with_permute, buffer.combine_with_unpermute
    refused("non_blocking needs num_permuted_tokens", dispatch, **given, non_blocking=True)
    refused(
        "multiple of pad_multiple = 16, found 24",
        dispatch,
        **given,
        pad_multiple=16,
        num_permuted_tokens=24,
        non_blocking=True,
    )
    refused("found -16", dispatch, **given, num_permuted_tokens=-16, non_blocking=True)
    refused("pad_multiple: expected a positive number, found -1", dispatch, **given, pad_multiple=-1)
    refused("needs a routing", dispatch, hidden=hidden)
    refused("needs a routing", buffer.dispatch, hidden)
    refused(
        r"columns of routing_map = 16, num_of_experts_per_rank x 2 ranks = 8",
        dispatch,
        **given,
        num_of_experts_per_rank=4,
    )
    refused(r"hidden: expected \[tokens, hidden\], found \[", dispatch, **{**given, "hidden": hidden[None]})
    refused("FP8 and need it", dispatch, **{**given, "hidden": hidden.to(torch.float8_e4m3fn)})
    scaling_factor = torch.ones(hidden.shape[0], 1, device=here.device)
    refused("goes with FP8 tokens", dispatch, **given, scaling_factor=scaling_factor, use_fp8=True)
    refused("made with 16, found 32", dispatch, hidden=hidden, handle=handle, pad_multiple=32)
    refused("made with 16, found 32", combine, hidden=rows, handle=handle, pad_multiple=32)
    refused(
        f"layout has {rows.shape[0]} rows, found {rows.shape[0] - 1}",
        dispatch,
        hidden=hidden,
        handle=handle,
        num_permuted_tokens=counts.sum() - 1,
    )
    refused("expected what dispatch_with_permute returned last, found none", combine, hidden=rows)
    refused("found what dispatch returned", combine, hidden=rows, handle=plain[3])
    refused(
        "expected what dispatch returned last, found what dispatch_with_permute", buffer.combine, rows, None, handle
    )
    refused("a tuple of 11 that it did not return", combine, hidden=rows, handle=(None,) * 11)
    refused("found a Tensor", dispatch, hidden=hidden, handle=hidden)
    # The peers have seen none of these calls.
    output, _ = combine(hidden=experts(case, here, rows), handle=handle)
    same(output, combined(case, here.rank)[0].to(case.dtype), "combined tokens")
