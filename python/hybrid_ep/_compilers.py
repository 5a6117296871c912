"""What compilers must know: into which functions they cannot look, and that Inductor runs every collective operator of
a graph, in the graph's order.

Other ranks wait for each call. But Inductor drops calls whose outputs are not read, such as those of a rank with 0
tokens, and moves calls that do not depend on each other, perhaps differently on each rank.

The operators have no effect (`torch.library._register_effectful_op`): with one, PyTorch 2.11 cannot compile activation
checkpoints, nor sizes that depend on data, and its scheduler ignores the order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["opaque", "prepare_inductor"]

Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Keeps compilers out of a function: a graph breaks at its call, and what it calls is not compiled either.

    `torch.compiler.disable` does the same, but imports the compiler at once, which takes 1.5 s and more. PyTorch's own
    form of it, as its optimizers use it, does so when the function is first called.
    """
    disable = getattr(getattr(torch, "_compile", None), "_disable_dynamo", torch.compiler.disable)
    disabled: Function = disable(function)
    return disabled


def prepare_inductor() -> None:
    """Registers lowerings of the operators, once Inductor is in use: importing it takes seconds.

    Each shape function calls this. Inductor calls them before it lowers a graph.
    """
    if "torch._inductor.lowering" in sys.modules:
        _register_lowerings()


@functools.cache
def _register_lowerings() -> None:
    from torch._inductor import lowering

    for name in ("preprocess", "dispatch", "combine"):
        operator = getattr(torch.ops.hybrid_ep, name).default
        # Inputs keep the strides of the graph, as they do for operators without a lowering.
        lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
        lowering.register_lowering(operator, type_promotion_kind=None)(_lowering(operator))


def _lowering(operator: Any) -> Callable[..., Any]:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def boxed(output: Any) -> Any:
        return ir.TensorBox.create(output) if isinstance(output, ir.IRNode) else output

    def lower(*args: Any, **named: Any) -> Any:
        graph: Any = V.graph
        before = len(graph.operations)
        outputs = torch.utils._pytree.tree_map(boxed, ir.FallbackKernel.create(operator, *args, **named))
        made = graph.operations[before:]
        # Before PyTorch 2.10 there is no such table, and the order is not kept.
        after = getattr(graph, "additional_star_deps", None)
        previous = getattr(graph, "_hybrid_ep_previous", None)
        for operation in made:
            operation.has_side_effects = lambda: True
            if after is not None and previous is not None:
                after[operation.get_operation_name()].add(previous)
        graph._hybrid_ep_previous = made[-1].get_name()
        return outputs

    return lower
