"""Layers that differ between ranks, and layers whose experts are not marked: the first `reduce_gradients` tells."""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_ep import Buffer, CallerError, MoELayer, TokenDispatcher
from hybrid_ep.migration import ExpertDomains, ExpertMigration, HybridMoELayer
from hybrid_ep.moe import reduce_gradients
from process_worlds import Rank, skip_where_gpus_are_shared, world_of_processes

HIDDEN = 16

# The options of rank 1's layer, where those of rank 0's differ, and what the error says.
UNEQUAL: list[tuple[dict[str, Any], str]] = [
    ({"topk": 1}, "topk of 1.router is 1 on rank 1 and 2 on rank 0"),
    ({"normalize": False}, "normalize of 1.router is False on rank 1 and True on rank 0"),
    ({"capacity_factor": 1.5}, "capacity_factor of 1.router is 1.5 on rank 1 and None on rank 0"),
    ({"balance_coef": 0.01}, "balance_coef of 1.router is 0.01 on rank 1 and 0.0 on rank 0"),
    ({"pad_multiple": 8}, "pad_multiple of 1.dispatcher is 8 on rank 1 and 16 on rank 0"),
    ({"comm_dtype": torch.bfloat16}, "dtype of 1.dispatcher is torch.bfloat16 on rank 1 and None on rank 0"),
    (
        {"intermediate": 20},
        "an expert's part of 1.experts.gate_up is [16, 40] float32 on rank 1 and [16, 48] float32 on rank 0",
    ),
    (
        {"dtype": torch.bfloat16},
        "an expert's part of 1.experts.gate_up is [16, 48] bfloat16 on rank 1 and [16, 48] float32 on rank 0",
    ),
    (
        {"shared_intermediate": 8},
        "the dense parameter 1.shared.gate_up.weight is [16, 16] float32 on rank 1 and missing on rank 0",
    ),
]


def said_by(function: Callable[[nn.Module], None], model: nn.Module) -> str:
    """The text of the error."""
    with pytest.raises(CallerError) as error:
        function(model)
    return str(error.value)


def _unequal(here: Rank) -> list[str]:
    said = []
    with Buffer(here.group, num_experts=4, device=here.device) as buffer:
        for options, _ in UNEQUAL:
            mine = {"intermediate": 24, "topk": 2, **(options if here.rank == 1 else {})}
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), MoELayer(buffer, HIDDEN, **mine)).to(here.device)
            # A module that has failed is compared again.
            said += {said_by(reduce_gradients, model) for _ in range(2)}
        # The layer may be the module, and its capacity may differ.
        torch.manual_seed(3)
        layer = MoELayer(buffer, HIDDEN, 24, topk=2 - here.rank, capacity=16 + 16 * here.rank)
        said.append(said_by(reduce_gradients, layer))
        layer.router.topk = 2
        reduce_gradients(layer)
    return said


def test_layers_with_other_settings_on_another_rank_are_told(device: str) -> None:
    skip_where_gpus_are_shared(device, 2)
    texts = [*(text for _, text in UNEQUAL), "topk of router is 1 on rank 1 and 2 on rank 0"]
    expected = [f"reduce_gradients: {text}; it must be the same on every rank" for text in texts]
    for said in world_of_processes(2, device).run(_unequal):
        assert said == expected


class Own(nn.Module):
    """A layer with a dispatcher and plain parameters of experts, which nothing uses."""

    def __init__(self, buffer: Buffer, width: int, mark: bool | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, buffer.num_experts, bias=False)
        self.dispatcher = TokenDispatcher(buffer)
        self.weight = nn.Parameter(torch.zeros(buffer.num_local_experts, HIDDEN, width))
        if mark is not None:
            self.weight.expert_parallel = mark  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x


def _own_parameters(here: Rank) -> str:
    with Buffer(here.group, num_experts=4, device="cpu") as buffer:
        torch.manual_seed(3)
        said = said_by(reduce_gradients, Own(buffer, 24 + here.rank, mark=True))
        # Experts with names of their own may have shapes of their own.
        torch.manual_seed(3)
        layer = MoELayer(buffer, HIDDEN, 24, topk=2)
        experts = nn.ModuleDict({str(e): nn.Linear(HIDDEN, HIDDEN + e) for e in buffer.local_experts})
        for parameter in experts.parameters():
            parameter.expert_parallel = True  # type: ignore[attr-defined]
        layer.experts = experts  # type: ignore[assignment]
        reduce_gradients(layer)
    return said


def test_parameters_of_experts_of_the_user_are_compared_by_name() -> None:
    for said in world_of_processes(2, "cpu").run(_own_parameters):
        assert said == (
            "reduce_gradients: an expert's part of weight is [16, 25] float32 on rank 1 and [16, 24] float32 on "
            "rank 0; it must be the same on every rank"
        )


def _of_a_migration(here: Rank) -> list[str]:
    said = []
    plan = ExpertDomains.uniform(ranks=2, datacenters=2)
    for options in ({"topk": 1}, {"shared_intermediate": 8}):
        with ExpertMigration(plan, num_experts=4, timeout=20.0) as migration:
            torch.manual_seed(3)
            mine = {"topk": 2, **(options if here.rank == 1 else {})}
            layer = HybridMoELayer(migration, HIDDEN, 24, **mine)  # type: ignore[arg-type]
            layer(torch.ones(4, HIDDEN)).sum().backward()
            said.append(said_by(migration.reduce_gradients, layer))
    return said


def test_layers_of_a_migration_are_compared() -> None:
    for said in world_of_processes(2, "cpu").run(_of_a_migration):
        assert said == [
            "reduce_gradients: topk of router is 1 on rank 1 and 2 on rank 0; it must be the same on every rank",
            "reduce_gradients: the dense parameter shared.gate_up.weight is [16, 16] float32 on rank 1 and missing on "
            "rank 0; it must be the same on every rank",
        ]


# ---- layers without marks


class Sender(nn.Module):
    """Holds the dispatcher of a layer, and no parameter."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self.dispatcher = TokenDispatcher(buffer)


class Around(nn.Module):
    """A layer whose dispatcher is in a module of its own. It knows the buffer, as a whole model may."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self.buffer = buffer
        self.sender = Sender(buffer)
        self.experts = nn.Linear(HIDDEN, HIDDEN)


def warned(model: nn.Module, **options: Any) -> str:
    """Returns the text of the warnings of `reduce_gradients`."""
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reduce_gradients(model, **options)
    return "".join(str(warning.message) for warning in caught)


def _unmarked(here: Rank) -> None:
    with Buffer(here.group, num_experts=4, device="cpu") as buffer:
        torch.manual_seed(3)
        model = nn.Sequential(
            MoELayer(buffer, HIDDEN, 24, topk=2), Own(buffer, 8), Own(buffer, 8, mark=True), Around(buffer)
        )
        model.buffer = buffer  # type: ignore[assignment]
        said = warned(model)
        assert said.startswith("no parameter of 1 (Own) and 3 (Around) is marked"), said
        assert "set expert_parallel = False on the module" in said
        assert not warned(model, dense=False)
        # The module, or every parameter, says that all ranks train the same parameters.
        model[3].expert_parallel = False  # type: ignore[assignment]
        model[1].weight.expert_parallel = False  # type: ignore[union-attr]
        assert warned(model).startswith("no parameter of 1 (Own) is marked")
        model[1].router.weight.expert_parallel = False  # type: ignore[union-attr]
        assert not warned(model)
        assert warned(Own(buffer, 8)).startswith("no parameter of the module (Own) is marked")
        many = nn.Sequential(*(Own(buffer, 8) for _ in range(5)))
        assert warned(many).startswith("no parameter of 0 (Own), 1 (Own), 2 (Own) and 2 more is marked")
        # A layer that does not train.
        assert not warned(nn.Sequential(nn.Linear(2, 2, bias=False), Own(buffer, 8).requires_grad_(False)))


def test_every_layer_without_marked_parameters_is_warned_of() -> None:
    def work(here: Rank) -> None:
        torch.manual_seed(3)
        _unmarked(here)

    world_of_processes(2, "cpu").run(work)
