"""A checkpointed part of a model whose routing is another one when it is computed again: an error, on every rank.

``torch.utils.checkpoint`` runs a part's forward a second time in backward. Routers choose between near ties, so the second
routing may differ, and the gradients would be those of rows that the loss never saw. Records carry a digest of their rank's
``topk_idx``, so every rank knows the digests of all; here they are kept for each call of a checkpointed part, and compared when
it is computed again. All ranks hold the same digests, so they raise at the same call, and none is left waiting.

Where the digests are kept: on the object that torch itself has for a checkpoint, its ``ctx`` (``use_reentrant=True``) or its
``_CheckpointFrame`` (False). It is found on the stack, from which also follows whether a call is of the forward or of the
computation after it. Calls outside of checkpoints don't look at the stack: three questions to torch rule them out.

Example: a part with two layers on two ranks leaves [(4, [a, b]), (5, [c, d])], call numbers and the digests of both ranks. It
is computed again as calls 8 and 9 with [a, b] and [c, e]: call 9 raises on both ranks, and names rank 1.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from . import errors
from ._ops import unseen
from .compiled import eagerly
from .op_host.layout import HandleView

_CHECKPOINT_FILE = inspect.unwrap(CheckpointFunction.backward).__code__.co_filename
_ENGINE = inspect.unwrap(_engine_run_backward).__code__
_LOG = "_moe_a2a_routings"

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id
_forward_mode = torch._C._is_fwd_grad_enabled


class _Log:
    """The calls of a checkpointed part: (call number, digests [R]) of those in its forward; how many each run after it made."""

    __slots__ = ("calls", "made")

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int]]] = []
        self.made: Counter[Hashable] = Counter()


def check_routing(operation: str, meta: Tensor) -> None:
    """To be called with each new handle [words], before its call is given gradients: see above.

    Raises:
        CallMismatch: on all ranks: this call's checkpointed part is being computed again, and some rank's routing isn't that of
            its forward.
    """
    if torch.compiler.is_compiling():  # between graphs, a stack is a stack
        return eagerly(check_routing, operation, meta)
    # Inside a checkpoint's forward there are hooks for saved tensors, or (reentrant) it is that of an autograd.Function, where
    # torch has forward-mode gradients off; computing again happens in a task of backward.
    if _graph_task() == -1 and _forward_mode() and _top_hooks(True) is None:
        return
    if type(meta) is not Tensor or torch.is_inference_mode_enabled():
        return
    found = list(_checkpoints())
    if not found:
        return
    view, ids = unseen(lambda: (view := HandleView(meta), view.ids))
    for keeper, run in found:
        log: _Log = keeper.__dict__.setdefault(_LOG, _Log())
        if run is None:
            log.calls.append((view.epoch, ids))
            continue
        at = log.made[run]
        log.made[run] += 1
        if at < len(log.calls) and log.calls[at][1] != ids:
            _refuse(operation, view, at, *log.calls[at], ids)


def _checkpoints() -> Iterator[tuple[Any, Hashable | None]]:
    """(what stands for a checkpoint, None in its forward or else a name of the run) for those around the caller, inner first.

    Ends where backward was called, or with the part that it computes again: what is around that has nothing to do with it.
    """
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is _ENGINE:
            return
        if code.co_filename == _CHECKPOINT_FILE:
            names = frame.f_locals
            if code.co_name == "forward":
                yield names["ctx"], None
            elif code.co_name == "backward":
                yield names["ctx"], _graph_task()
                return
            elif code.co_name == "checkpoint" and "gen" in names:
                yield names["gen"].gi_frame.f_locals["new_frame"], None
            elif code.co_name == "unpack_hook":
                yield names["frame"], names["gid"]
                return
        frame = frame.f_back  # type: ignore[assignment]


def _refuse(operation: str, view: HandleView, at: int, first: int, old: list[int], new: list[int]) -> None:
    ranks = ", ".join(str(rank) for rank, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
    raise errors.CallMismatch(
        f"{operation}, call {view.epoch} on rank {view.rank}: a checkpointed part is computed again with another routing: "
        f"topk_idx of rank {ranks} isn't what it was in call {first}, which this one repeats (number {at + 1} of the part). "
        f"All ranks raise this, and the group stays usable. Compute topk_idx outside of the checkpointed part, keep it (or "
        f"this package's operators) with a selective checkpoint policy, or make the router repeatable (same noise, threads)"
    )
