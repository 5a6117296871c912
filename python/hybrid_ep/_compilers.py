"""What compilers must know of the collective operators: every call runs, in the order of the program.

Other ranks wait for each call, also if this rank does not use its outputs, or if they have no elements, as with 0
tokens. Without this knowledge Inductor drops such calls, and moves calls that do not depend on each other, on each rank
in its own way. Only `_library` imports this module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["keep_in_order", "prepare_inductor"]

_COLLECTIVE = ("preprocess", "dispatch", "combine")


def keep_in_order(library: torch.library.Library) -> None:
    """Registers the effect of the operators of `library`."""
    for name in _COLLECTIVE:
        if hasattr(torch.library, "_register_effectful_op"):
            ordered = torch.library.EffectType.ORDERED  # type: ignore[attr-defined]  # not in __all__
            torch.library._register_effectful_op(f"hybrid_ep::{name}", ordered, lib=library)
        else:
            # Before PyTorch 2.10 calls can be kept, but their order cannot be stated.
            torch.fx.node.has_side_effect(_operator(name))


def prepare_inductor() -> None:
    """Makes Inductor schedule the operators in the order of the graph. Each shape function calls this.

    PyTorch 2.11 notes the order under the names of buffers, where its scheduler looks for names of operations. A
    lowering of our own notes it under the latter. Importing Inductor takes seconds, so it is registered once Inductor
    is in use.
    """
    if "torch._inductor.lowering" in sys.modules and hasattr(torch.library, "_register_effectful_op"):
        _register_lowerings()


@functools.cache
def _register_lowerings() -> None:
    from torch._inductor.lowering import register_lowering

    for name in _COLLECTIVE:
        register_lowering(_operator(name), type_promotion_kind=None)(_lowering(_operator(name)))


def _operator(name: str) -> Any:
    return getattr(torch.ops.hybrid_ep, name).default


def _lowering(operator: Any) -> Callable[..., Any]:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def boxed(output: Any) -> Any:
        return ir.TensorBox.create(output) if isinstance(output, ir.IRNode) else output

    def lower(*args: Any, **named: Any) -> Any:
        graph = V.graph
        before = len(graph.operations)
        outputs = torch.utils._pytree.tree_map(boxed, ir.FallbackKernel.create(operator, *args, **named))
        previous = graph.effectful_ops.get(torch.library.EffectType.ORDERED)  # type: ignore[attr-defined]
        if previous is not None:
            for operation in graph.operations[before:]:
                graph.additional_star_deps[operation.get_operation_name()].add(previous.get_name())
        return outputs

    return lower
