"""What holds collectives in place inside torch.compile: none is removed, none changes places with another.

Three things, each for what the others can't reach (docs/compile.md has the reasons and what else was tried):

* ``LEDGER``: an int64 that each operator of a forward reads and that is written after it, with a result of it as an argument.
  So the graph has an effect, which isn't removed, and the operators form a chain of data, whatever a rank does with results.
* ``ANCHOR``: an empty tensor that wants a gradient, an input of each operator. So autograd records the call, and its backward
  isn't removed, on a rank that itself wants no gradient.
* :func:`order_in_inductor`: what inductor makes of the operators is scheduled in the order of its graph, also in backward,
  where recomputed calls and those of backward stand side by side.

Shape symbols: none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .op_host import native

P_ = ParamSpec("P_")
R_ = TypeVar("R_")

with torch.inference_mode(False):
    LEDGER = torch.zeros(1, dtype=torch.int64, device="cpu")
    ANCHOR = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)

ORDERED = (
    "dispatch",
    "dispatch_full",
    "combine",
    "moe",
    "dispatch_backward",
    "combine_backward",
    "moe_backward",
)


def held(gradients: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """(ledger, anchor) for a call that is traced. An exported program takes neither: it has no outside to change."""
    if torch.compiler.is_exporting():
        return None, None
    return LEDGER, ANCHOR if gradients and torch.is_grad_enabled() else None


def constant(number: float) -> float:
    """The number itself, where a graph with dynamic sizes would have a symbol, which checkpointed parts can't take."""
    if torch.compiler.is_compiling() and isinstance(number, float):
        return float.fromhex(number.hex())
    return float(number)


def hold(result: Tensor) -> None:
    """Holds the call that made ``result`` in the graph, before whatever reads the ledger next."""
    if not torch.compiler.is_exporting():
        # Not one operator that writes: its output would be an element of a tuple, which checkpointing doesn't keep at the
        # border of two parts. The first part would be recomputed before the second one's backward, and so on.
        LEDGER.copy_(torch.ops.moe_a2a.witness.default(LEDGER, result))


def not_in_window(name: str, tensor: Tensor, group: str) -> None:
    """A graph keeps its inputs for backward as they are; it can't be told to copy what later calls will write over."""
    from ._ops import in_window

    if in_window(tensor, group):
        raise ValueError(
            f"{name} lies in the window (it came from group.empty or empty_like_rows), where later calls write, and a compiled "
            "call with gradients needs it in backward; pass a tensor of your own"
        )


EAGER_ONLY = (
    "an asynchronous call, or moe_a2a.moe_apply, can't be traced: what it does depends on when rows come. It runs between two "
    "graphs; with fullgraph=True leave async_op out, and use moe instead of moe_apply"
)


def eagerly(call: Callable[P_, R_], *args: P_.args, **kwargs: P_.kwargs) -> R_:
    """Runs what can't be traced, and all that it calls, outside of graphs. Called while tracing only."""
    import torch._dynamo

    return torch._dynamo.disable(call, reason=EAGER_ONLY)(*args, **kwargs)  # type: ignore[no-any-return]


# torch.compiler.disable, without importing all of torch._dynamo. A graph ends in front of it, or (fullgraph) says why it can't.
eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]
eagerly._torchdynamo_disable_msg = EAGER_ONLY  # type: ignore[attr-defined]


def anchored(backward: Callable[P_, tuple[Tensor, ...]]) -> Callable[P_, tuple[Tensor, ...]]:
    """As the operator: with the anchor's gradient, and errors by their names."""

    @functools.wraps(backward)
    def call(*args: P_.args, **kwargs: P_.kwargs) -> tuple[Tensor, ...]:
        try:
            return *backward(*args, **kwargs), torch.zeros(0, dtype=torch.float32, device="cpu")
        except RuntimeError as error:
            native.raise_kernel_failure(error)
            raise

    return call


def order_in_inductor() -> None:
    """Has inductor schedule the operators of a graph one after the other. Called whenever a fake runs, which precedes that.

    Inductor may reorder what isn't tied by data, to save memory, and so by sizes, which differ between ranks.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    # A module that is being imported hasn't all its names yet; then it isn't lowering anything either.
    if lowering is None or not hasattr(lowering, "fallback_handler") or not hasattr(lowering, "lowerings"):
        return
    for name in ORDERED:
        operator = getattr(torch.ops.moe_a2a, name).default
        if operator not in lowering.lowerings:
            lowering.lowerings[operator] = _in_order(operator, lowering.fallback_handler(operator))


def _in_order(operator: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    @functools.wraps(lower)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        known = len(graph.operations)
        result = lower(*args, **kwargs)
        (call,) = (
            made
            for made in graph.operations[known:]
            if isinstance(made, FallbackKernel) and made.op_overload is operator
        )
        before = getattr(graph, "_moe_a2a_last", None)
        if before is not None:
            graph.additional_star_deps[call.get_operation_name()].add(before)
        graph._moe_a2a_last = call.get_name()
        return result

    return lowered
