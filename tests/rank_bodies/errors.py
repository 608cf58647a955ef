"""Bodies that provoke every error of the contract and report what each rank saw.

A body returns a :class:`Caught` (or None when nothing was raised) instead of asserting, so that a test sees
all ranks at once. Each body that leaves its group usable ends with a good step on it, compared with the
oracle.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pool import RankContext
from torch import Tensor

import moe_a2a
from rank_bodies import windows
from rank_bodies.inputs import GroupSpec, Step, make_inputs
from rank_bodies.steps import check_step

AT_ONCE = 5.0  # seconds on a busy machine; the groups' timeout is 20
USUAL = GroupSpec(experts=4, top_k=2, max_tokens=16, hidden=8)


@dataclass(frozen=True)
class Caught:
    """An exception as seen by a rank: the names of its classes, its text, and how long it took to come."""

    kinds: tuple[str, ...]
    message: str
    seconds: float


def caught(action: Callable[[], object]) -> Caught | None:
    """Run ``action`` and return what it raises."""
    begin = time.monotonic()
    try:
        action()
    except (Exception, KeyboardInterrupt) as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Caught(kinds, str(error), time.monotonic() - begin)
    return None


def good_step(ctx: RankContext, group: Any, seed: int = 3) -> None:
    """A step that has to work, with every rank sending to every other."""
    tokens = tuple(1 + (rank + seed) % group.max_tokens for rank in range(ctx.world_size))
    step = Step(
        tokens, min(2, group.top_k), min(8, group.hidden_size), rows="random", routing="any", seed=seed
    )
    check_step(ctx, group, step)


def good_arguments(ctx: RankContext) -> dict[str, Any]:
    """Arguments of a dispatch on a ``USUAL`` group: T = 16, K = 2, H = 8."""
    step = Step((16,) * ctx.world_size, 2, 8, seed=1)
    mine = make_inputs(step, ctx.rank, 4)
    return {"x": mine.x_TH, "topk_idx": mine.idx_TK, "topk_weights": mine.weights_TK}


def with_id(value: int, token: int = 9, k: int = 1) -> Tensor:
    """[16, 2] ids that are all fine but one."""
    idx_TK = torch.arange(32).view(16, 2) % 4
    idx_TK[token, k] = value
    return idx_TK


BAD_DISPATCH: dict[str, Callable[[], dict[str, Any]]] = {
    "rows of x and ids": lambda: {
        "x": torch.zeros(16, 8),
        "topk_idx": torch.zeros(15, 2).long(),
        "topk_weights": None,
    },
    "ids and weights": lambda: {"topk_weights": torch.zeros(16, 3)},
    "x with one dimension": lambda: {"x": torch.zeros(16)},
    "x with three dimensions": lambda: {"x": torch.zeros(16, 2, 4)},
    "ids with one dimension": lambda: {"topk_idx": torch.zeros(16).long(), "topk_weights": None},
    "weights with one dimension": lambda: {"topk_weights": torch.zeros(16)},
    "too many tokens": lambda: {
        "x": torch.zeros(17, 8),
        "topk_idx": torch.zeros(17, 2).long(),
        "topk_weights": torch.zeros(17, 2),
    },
    "too large K": lambda: {"topk_idx": torch.zeros(16, 3).long(), "topk_weights": torch.zeros(16, 3)},
    "row too wide": lambda: {"x": torch.zeros(16, 9)},
    "row too wide by dtype": lambda: {"x": torch.zeros(16, 8, dtype=torch.float64)},
    "int32 id": lambda: {"topk_idx": with_id(4).int()},
    "first id": lambda: {"topk_idx": with_id(77, 0, 0)},
    "last id": lambda: {"topk_idx": with_id(-7, 15, 1)},
    "x not a tensor": lambda: {"x": [[0.0] * 8] * 16},
    "ids not a tensor": lambda: {"topk_idx": [[0, 1]] * 16},
    "weights not a tensor": lambda: {"topk_weights": 1.0},
    "integer weights": lambda: {"topk_weights": torch.ones(16, 2, dtype=torch.int64)},
    "sparse x": lambda: {"x": torch.zeros(16, 8).to_sparse()},
    "tag not a string": lambda: {"tag": 3.5},
}


def bad_dispatch(ctx: RankContext, changes: dict[str, Any], bad_rank: int = 0) -> Caught | None:
    """One rank dispatches with ``changes``; nothing of it may reach its window; a good step follows."""
    group = USUAL.open(ctx)
    arguments = good_arguments(ctx)
    if ctx.rank == bad_rank:
        arguments.update(changes)
    copied = group.stats()["copied_bytes"]
    error = caught(
        lambda: moe_a2a.dispatch(arguments.pop("x"), arguments.pop("topk_idx"), group, **arguments)
    )
    wrote = group.stats()["copied_bytes"] != copied
    good_step(ctx, group)
    assert ctx.rank != bad_rank or not wrote, "a rank with bad input wrote payload"
    return error


def bad_shape(ctx: RankContext, what: str, bad_rank: int = 0) -> Caught | None:
    """One of :data:`BAD_DISPATCH` on one rank."""
    return bad_dispatch(ctx, BAD_DISPATCH[what](), bad_rank)


def bad_id(ctx: RankContext, value: int) -> Caught | None:
    """One id out of range on rank 0."""
    return bad_dispatch(ctx, {"topk_idx": with_id(value)})


def bad_id_dtype(ctx: RankContext, dtype: str) -> Caught | None:
    """Ids of an unsupported dtype on rank 0."""
    return bad_dispatch(ctx, {"topk_idx": torch.zeros(16, 2).to(getattr(torch, dtype))})


def bad_x_dtype(ctx: RankContext, dtype: str) -> Caught | None:
    """Rows of an unsupported dtype on rank 0."""
    return bad_dispatch(ctx, {"x": torch.zeros(16, 8).to(getattr(torch, dtype))})


def bad_on_two_ranks(ctx: RankContext) -> Caught | None:
    """Ranks 1 and 2 of 4 have bad input in the same call: each raises its own error."""
    group = USUAL.open(ctx)
    arguments = good_arguments(ctx)
    if ctx.rank in (1, 2):
        arguments["topk_idx"] = with_id(10 + ctx.rank)
    error = caught(
        lambda: moe_a2a.dispatch(arguments.pop("x"), arguments.pop("topk_idx"), group, **arguments)
    )
    good_step(ctx, group)
    return error


def many_errors_in_a_row(ctx: RankContext, count: int) -> list[str]:
    """Bad calls of changing ranks with good steps between them; returns what this rank got each time."""
    group = USUAL.open(ctx)
    names = []
    for turn in range(count):
        arguments = good_arguments(ctx)
        if ctx.rank == turn % ctx.world_size:
            arguments["topk_idx"] = with_id(5 + turn)
        ctx.jitter(2)
        error = caught(lambda a=arguments: moe_a2a.dispatch(a["x"], a["topk_idx"], group))  # type: ignore[misc]
        assert error is not None and str(5 + turn) in error.message, error
        names.append(error.kinds[0])
        if turn % 3:
            good_step(ctx, group, turn)
    return names


def mismatch(ctx: RankContext, what: str) -> Caught | None:
    """Rank 0 calls dispatch with something that all ranks have to agree on and don't."""
    group = USUAL.open(ctx)
    arguments = good_arguments(ctx)
    if what == "tag":
        arguments["tag"] = f"layer {ctx.rank}"
    elif what == "tag on one rank":
        arguments["tag"] = "layer 0" if ctx.rank == 0 else None
    elif ctx.rank == 0:
        if what == "hidden":
            arguments["x"] = arguments["x"][:, :7]
        elif what == "dtype":
            arguments["x"] = arguments["x"].bfloat16()
        elif what == "weights":
            arguments["topk_weights"] = None
        elif what == "weight dtype":
            arguments["topk_weights"] = arguments["topk_weights"].double()
        else:
            raise ValueError(what)
    error = caught(
        lambda: moe_a2a.dispatch(arguments.pop("x"), arguments.pop("topk_idx"), group, **arguments)
    )
    good_step(ctx, group)
    return error


def equal_tags(ctx: RankContext) -> None:
    """The same tag on all ranks is fine."""
    group = USUAL.open(ctx)
    arguments = good_arguments(ctx)
    d = moe_a2a.dispatch(arguments.pop("x"), arguments.pop("topk_idx"), group, **arguments, tag="layer 7")
    moe_a2a.combine(d.x, d.handle)
    good_step(ctx, group)


# ---------------------------------------------------------------------------------------------------- combine


BAD_COMBINE: dict[str, Callable[[Tensor, Tensor], tuple[Any, Any]]] = {
    "a row too few": lambda y, w: (y[:-1], w),
    "a row too many": lambda y, w: (torch.cat([y, y[:1]]), w),
    "one dimension": lambda y, w: (y.flatten(), w),
    "integer y": lambda y, w: (y.int(), w),
    "y not a tensor": lambda y, w: (None, w),
    "too wide by dtype": lambda y, w: (y.double(), w),
    "weights of another shape": lambda y, w: (y, w[:, :1]),
    "weights of another T": lambda y, w: (y, w[:-1]),
    "integer weights": lambda y, w: (y, w.int()),
    "weights not a tensor": lambda y, w: (y, [1.0, 2.0]),
}


def bad_combine(
    ctx: RankContext, what: str, bad_rank: int, later: bool = False, **options: Any
) -> Caught | None:
    """One rank combines with bad input. The last rank's tokens stay on it: only its own error concerns it."""
    spec = GroupSpec(experts=2 * ctx.world_size, top_k=2, max_tokens=6, hidden=8, **options)
    group = spec.open(ctx)
    last = ctx.world_size - 1
    x_TH, weights_TK = torch.ones(6, 8), torch.ones(6, 2)
    everywhere_TK, own_TK = (
        torch.arange(12).view(6, 2) % spec.experts,
        torch.tensor([[2 * last, 2 * last + 1]] * 6),
    )
    idx_TK = own_TK if ctx.rank == last else everywhere_TK
    d = moe_a2a.dispatch(x_TH, idx_TK, group)
    y_NH, weights = d.x, weights_TK
    if ctx.rank == bad_rank:
        y_NH, weights = BAD_COMBINE[what](y_NH, weights_TK)
    if later:
        error = caught(lambda: moe_a2a.combine(y_NH, d.handle, topk_weights=weights, async_op=True).wait())
    else:
        error = caught(lambda: moe_a2a.combine(y_NH, d.handle, topk_weights=weights))
    again = caught(lambda: moe_a2a.combine(d.x, d.handle))
    good_step(ctx, group)
    assert again is not None and "HandleExpired" in again.kinds, f"combining once more gave {again}"
    return error


def combine_mismatch(
    ctx: RankContext, what: str, later: bool = False, spec: GroupSpec = USUAL
) -> Caught | None:
    """The owners' y have different dtypes or widths, and every rank needs rows of both."""
    group = spec.open(ctx)
    d = moe_a2a.dispatch(torch.ones(4, 8), torch.tensor([[0, 3]] * 4), group)
    y_NH = d.x
    if ctx.rank == 1:
        y_NH = d.x.bfloat16() if what == "dtype" else d.x[:, :7]
    if later:
        error = caught(lambda: moe_a2a.combine(y_NH, d.handle, async_op=True).wait())
    else:
        error = caught(lambda: moe_a2a.combine(y_NH, d.handle))
    good_step(ctx, group)
    return error


def combine_twice(ctx: RankContext) -> tuple[Caught | None, Caught | None]:
    """The second combine of a handle, and the combine of one ``depth`` dispatches old: local errors."""
    group = USUAL.open(ctx)
    mine = make_inputs(Step((16,) * ctx.world_size, 2, 8, seed=1), ctx.rank, 4)
    first = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group)
    moe_a2a.combine(first.x, first.handle)
    twice = caught(lambda: moe_a2a.combine(first.x, first.handle))
    old = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group)
    newer = [moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group) for _ in range(group.depth)]
    expired = caught(lambda: moe_a2a.combine(old.x, old.handle))
    for d in newer:
        moe_a2a.combine(d.x, d.handle)
    good_step(ctx, group)
    return twice, expired


def wrong_objects(ctx: RankContext) -> list[Caught | None]:
    """Things that aren't a group or a handle, a handle of another group, and send_counts with bad input."""
    group, other = USUAL.open(ctx), GroupSpec(4, 2, 16, 9).open(ctx)
    mine = make_inputs(Step((16,) * ctx.world_size, 2, 8, seed=1), ctx.rank, 4)
    d = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group)
    not_a_group: Any = "group"
    not_a_handle: Any = "handle"
    stranger = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, other)
    results = [
        caught(lambda: moe_a2a.dispatch(mine.x_TH, mine.idx_TK, not_a_group)),
        caught(lambda: moe_a2a.combine(d.x, not_a_handle)),
        caught(lambda: moe_a2a.send_counts(torch.tensor([[0, 9]]), 4)),
        caught(lambda: moe_a2a.send_counts(torch.tensor([[0.0]]), 4)),
        caught(lambda: moe_a2a.send_counts(torch.tensor([0]), 4)),
        caught(lambda: torch.ops.moe_a2a.dispatch(mine.x_TH, mine.idx_TK, None, "no such group")),
    ]
    moe_a2a.combine(d.x, d.handle)
    moe_a2a.combine(stranger.x, stranger.handle)
    good_step(ctx, group)
    return results


def bad_empty(ctx: RankContext) -> list[Caught | None]:
    """``group.empty`` beyond the group's bounds."""
    group = USUAL.open(ctx)
    return [
        caught(lambda: group.empty(17)),
        caught(lambda: group.empty(4, 9)),
        caught(lambda: group.empty(4, 8, torch.float64)),
        caught(lambda: group.empty(-1)),
        caught(lambda: group.empty(4, 8, torch.int32)),
    ]


# --------------------------------------------------------------------------------------------------- creation


def create_with(ctx: RankContext, field: str, values: list[Any]) -> Caught | None:
    """Create a group with ``values[rank]`` for one argument; a good group must still be possible then."""
    kwargs = {**USUAL.kwargs(ctx.world_size), field: values[ctx.rank]}

    def create() -> None:
        moe_a2a.EPGroup(ctx.process_group, **kwargs).close()

    error = caught(create)
    with moe_a2a.EPGroup(ctx.process_group, **USUAL.kwargs(ctx.world_size)) as group:
        good_step(ctx, group)
    return error


def create_huge(ctx: RankContext) -> Caught | None:
    """A window of 2**30 rows of 32 KiB, which no machine has; a good group must still be possible then."""
    kwargs = {**USUAL.kwargs(ctx.world_size), "max_recv_rows": 2**30, "hidden_size": 8192}
    error = caught(lambda: moe_a2a.EPGroup(ctx.process_group, **kwargs).close())
    with moe_a2a.EPGroup(ctx.process_group, **USUAL.kwargs(ctx.world_size)) as group:
        good_step(ctx, group)
    return error


# ----------------------------------------------------------------------------------- timeouts, signals, death


def absent_from_dispatch(ctx: RankContext, absent: int, timeout: float) -> list[Caught | None]:
    """One rank doesn't come to the second dispatch; then everybody calls again."""
    group = ctx.fresh_group(**{**USUAL.kwargs(ctx.world_size), "timeout": timeout})
    good_step(ctx, group)
    mine = good_arguments(ctx)
    errors = []
    if ctx.rank != absent:
        errors.append(caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group)))
    ctx.barrier()
    errors.append(caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group)))
    errors.append(caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group)))
    return errors


def absent_from_combine(ctx: RankContext, absent: int, timeout: float) -> list[Caught | None]:
    """One rank dispatches and doesn't combine; then everybody dispatches."""
    group = ctx.fresh_group(**{**USUAL.kwargs(ctx.world_size), "timeout": timeout})
    good_step(ctx, group)
    mine = good_arguments(ctx)
    d = moe_a2a.dispatch(mine["x"], torch.arange(32).view(16, 2) % 4, group)
    errors = []
    if ctx.rank != absent:
        errors.append(caught(lambda: moe_a2a.combine(d.x, d.handle)))
    ctx.barrier()
    errors.append(caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group)))
    return errors


def dispatch_meets_combine(ctx: RankContext, timeout: float) -> Caught | None:
    """Rank 0 drops its handle and dispatches again while rank 1 combines the first: an error, not a hang."""
    group = ctx.fresh_group(**{**USUAL.kwargs(ctx.world_size), "timeout": timeout})
    good_step(ctx, group)
    x_TH, idx_TK = torch.ones(4, 8), torch.tensor([[0, 3]] * 4)
    d = moe_a2a.dispatch(x_TH, idx_TK, group)
    if ctx.rank == 0:
        return caught(lambda: moe_a2a.dispatch(x_TH, idx_TK, group))
    return caught(lambda: moe_a2a.combine(d.x, d.handle))


def late_first_call(ctx: RankContext, late: float) -> tuple[Caught | None, Caught | None]:
    """timeout 0.5 s, warmup_timeout 2.5 s, and rank 1 comes ``late`` seconds late to its first call."""
    group = ctx.fresh_group(**{**USUAL.kwargs(ctx.world_size), "timeout": 0.5, "warmup_timeout": 2.5})
    mine = good_arguments(ctx)
    if ctx.rank == 1:
        time.sleep(late)
    first = caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group))
    ctx.barrier()
    return first, caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group))


def interrupted_wait(ctx: RankContext, operation: str) -> tuple[Caught | None, float, int] | None:
    """Rank 1 never comes; rank 0 gets a SIGINT after 1 s while a Python thread counts.

    Returns (error, seconds from the signal to the exception, counts of the thread during the wait).
    """
    group = ctx.fresh_group(**{**USUAL.kwargs(ctx.world_size), "timeout": 60.0})
    good_step(ctx, group)
    mine = good_arguments(ctx)
    idx_TK = torch.arange(32).view(16, 2) % 4
    d = moe_a2a.dispatch(mine["x"], idx_TK, group) if operation == "combine" else None
    if ctx.rank == 1:
        ctx.barrier()
        return None
    count, running, sent = [0], [True], [0.0]

    def counter() -> None:
        while running[0]:
            count[0] += 1
            time.sleep(0.001)

    def interrupt() -> None:
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    thread, timer = threading.Thread(target=counter), threading.Timer(1.0, interrupt)
    thread.start()
    timer.start()
    try:
        if d is None:
            error = caught(lambda: moe_a2a.dispatch(mine["x"], idx_TK, group))
        else:
            error = caught(lambda: moe_a2a.combine(d.x, d.handle))
        raised = time.monotonic()
        seen = count[0]
    finally:
        running[0] = False
        timer.join()
        thread.join()
    ctx.barrier()
    return error, raised - sent[0], seen


def peer_killed(ctx: RankContext, where: str, proc_closed: bool) -> Caught | None:
    """Rank 1 kills itself before or after its dispatch; rank 0 must notice long before the timeout."""
    with contextlib.ExitStack() as stack:
        if proc_closed:
            stack.enter_context(windows.replaced("open_by_proc", windows.no_entry))
        group = ctx.group(**{**USUAL.kwargs(ctx.world_size), "timeout": 60.0 + proc_closed})
    good_step(ctx, group)
    mine = good_arguments(ctx)
    d = None
    if where == "combine":
        d = moe_a2a.dispatch(mine["x"], torch.arange(32).view(16, 2) % 4, group)
    if ctx.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if d is None:
        return caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group))
    return caught(lambda: moe_a2a.combine(d.x, d.handle))


# ------------------------------------------------------------------------------------------------- life cycle


def closing(ctx: RankContext) -> dict[str, Caught | None]:
    """Use after close, close twice, and as a context manager."""
    mine = good_arguments(ctx)
    with moe_a2a.EPGroup(ctx.process_group, **USUAL.kwargs(ctx.world_size)) as group:
        good_step(ctx, group)
        d = moe_a2a.dispatch(mine["x"], mine["topk_idx"], group)
        rows, name = d.x.clone(), group.name
        ctx.barrier()
    errors = {
        "dispatch": caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group)),
        "combine": caught(lambda: moe_a2a.combine(d.x, d.handle)),
        "empty": caught(lambda: group.empty(3)),
        "operator": caught(lambda: torch.ops.moe_a2a.dispatch(mine["x"], mine["topk_idx"], None, name)),
        "close again": caught(group.close),
    }
    assert torch.equal(d.x, rows), "outputs outlive the group"
    return errors


def peer_closed(ctx: RankContext) -> Caught | None:
    """Rank 0 closes, the others dispatch: they must be told, not left waiting."""
    group = ctx.fresh_group(**USUAL.kwargs(ctx.world_size))
    good_step(ctx, group)
    if ctx.rank == 0:
        group.close()
        return None
    mine = good_arguments(ctx)
    return caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group))


def _resources() -> tuple[int, int]:
    """(open descriptors, mappings of memfds or of /dev/shm) of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:" in line or "/dev/shm" in line for line in maps)


def cycles(ctx: RankContext, count: int) -> tuple[list[tuple[int, int]], int]:
    """Create, step, close, several times; returns what was open after each, and new names in /dev/shm."""
    names = set(os.listdir("/dev/shm"))
    seen = []
    for turn in range(count):
        group = moe_a2a.EPGroup(ctx.process_group, **USUAL.kwargs(ctx.world_size))
        good_step(ctx, group, turn)
        ctx.barrier()
        group.close()
        del group
        gc.collect()
        ctx.barrier()
        seen.append(_resources())
    return seen, len(set(os.listdir("/dev/shm")) - names)


def window_tensor_after_close(ctx: RankContext) -> float:
    """A tensor of ``group.empty`` is still readable after the close: the memory lives as long as it does."""
    group = moe_a2a.EPGroup(ctx.process_group, **USUAL.kwargs(ctx.world_size))
    x_TH = group.empty(5)
    x_TH.fill_(2.0)
    ctx.barrier()
    group.close()
    del group
    gc.collect()
    return float(x_TH.sum())


def forked_child(ctx: RankContext) -> tuple[str, str]:
    """A child made by fork uses the group: an error there, no harm here. Returns what the child said."""
    group = USUAL.open(ctx)
    mine = good_arguments(ctx)
    answers = []
    for use in ("dispatch", "close"):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if use == "dispatch":
                    error = caught(lambda: moe_a2a.dispatch(mine["x"], mine["topk_idx"], group))
                else:
                    error = caught(group.close)
                text = "nothing raised" if error is None else f"{error.kinds[0]}: {error.message}"
                os.write(writer, text.encode())
            finally:
                os._exit(0)
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], 15)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        answers.append(os.read(reader, 4000).decode() if ready else "the child hung")
        os.close(reader)
    ctx.barrier()
    good_step(ctx, group)
    return answers[0], answers[1]
