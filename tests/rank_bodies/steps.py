"""Runs steps on a group and compares everything that comes back with the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from pool import RankContext
from torch import Tensor

import moe_a2a
from moe_a2a import reference
from moe_a2a.op_host import native
from rank_bodies.inputs import (
    GroupSpec,
    Inputs,
    Step,
    all_inputs,
    assert_bits,
    assert_close_to_truth,
    dtype_of,
    make_inputs,
    run_experts,
    scale_expert,
)


@dataclass
class Outcome:
    """What one step gave on this rank."""

    dispatched: Any
    y_NH: Tensor
    out_TH: Tensor


def fill_freed_memory(*tensors: Tensor) -> None:
    """Leave NaN behind in memory of these sizes, so that an output that isn't fully written shows it."""
    for tensor in tensors:
        garbage = torch.empty(tensor.shape, dtype=tensor.dtype)
        garbage.view(torch.uint8).fill_(0xFF)  # NaN in every float type
        del garbage


def begin_dispatch(
    group: Any,
    step: Step,
    mine: Inputs,
    handles: dict[int, Any] | None = None,
    may_be_busy: bool = False,
) -> Any:
    """Call dispatch the way the step asks for, and overwrite what may be: PendingDispatch if asynchronous.

    Args:
        handles: of earlier steps by their seeds, for steps that use a routing again.
        may_be_busy: an ordinary x will do where all window tensors are in use.
    """
    x_TH, in_window = mine.x_TH, step.source == "window"
    if in_window:
        try:
            x_TH = group.empty(x_TH.shape[0], step.hidden, dtype_of(step.dtype))
        except moe_a2a.errors.WindowBusy:
            if not may_be_busy:
                raise
            in_window = False
    if in_window:
        assert x_TH.shape == mine.x_TH.shape and x_TH.dtype == mine.x_TH.dtype
        x_TH.fill_(float("nan"))
        x_TH.copy_(mine.x_TH)
    options: dict[str, Any] = {
        "topk_weights": mine.weights_TK if step.weigh in ("both", "dispatch") else None
    }
    idx_TK: Tensor | None = mine.idx_TK
    if step.again is not None:
        assert handles is not None
        idx_TK, options["routing"] = None, handles[step.again]
    if step.pad is not None:
        options["pad_to"] = pads_of(step, group.num_experts)[group.rank]
    if step.align != 1:
        options["align"] = step.align
    if step.quantize is not None:
        options["quantize"] = step.quantize
    if step.later not in ("dispatch", "both"):
        return moe_a2a.dispatch(x_TH, idx_TK, group, **options)
    if not in_window:
        x_TH = x_TH.clone()
    pending = moe_a2a.dispatch(x_TH, idx_TK, group, async_op=True, **options)
    if not in_window:
        x_TH.fill_(float("nan"))
    return pending


def end_dispatch(step: Step, begun: Any, handles: dict[int, Any] | None = None) -> Any:
    """The Dispatched of a dispatch that was begun."""
    d = begun
    if step.later in ("dispatch", "both"):
        d = begun.wait()
        assert begun.wait() is d
    if handles is not None:
        handles[step.seed] = d.handle
    return d


def dispatch_step(group: Any, step: Step, mine: Inputs, handles: dict[int, Any] | None = None) -> Any:
    """Both of them, one after the other."""
    return end_dispatch(step, begin_dispatch(group, step, mine, handles), handles)


def expert_step(group: Any, step: Step, d: Any) -> Tensor:
    """Run the local experts, into the window if the step asks for it."""
    y_dtype = dtype_of(step.y_dtype or step.dtype)
    y_NH = run_experts(d.x, d.offsets, group.local_experts, y_dtype, d.counts, d.scales)
    if step.result == "window":
        slot_NH: Tensor = d.empty_like_rows(y_NH.dtype)
        assert slot_NH.shape == y_NH.shape and slot_NH.dtype == y_NH.dtype
        slot_NH.fill_(float("nan"))
        slot_NH.copy_(y_NH)
        return slot_NH
    return y_NH


def begin_combine(step: Step, y_NH: Tensor, d: Any, mine: Inputs) -> Any:
    """Call combine the way the step asks for: PendingCombine if asynchronous."""
    weights = mine.weights_TK if step.weigh in ("both", "combine") else None
    if step.later not in ("combine", "both"):
        return moe_a2a.combine(y_NH, d.handle, topk_weights=weights)
    own = y_NH if step.result == "window" else y_NH.clone()
    pending = moe_a2a.combine(own, d.handle, topk_weights=weights, async_op=True)
    if step.result != "window":
        own.fill_(float("nan"))
    return pending


def end_combine(step: Step, begun: Any) -> Tensor:
    """The result of a combine that was begun."""
    out = begun
    if step.later in ("combine", "both"):
        out = begun.wait()
        assert begun.wait() is out
    assert isinstance(out, Tensor)
    return out


def combine_step(step: Step, y_NH: Tensor, d: Any, mine: Inputs) -> Tensor:
    """Both of them, one after the other."""
    return end_combine(step, begin_combine(step, y_NH, d, mine))


@lru_cache(maxsize=512)
def pads_of(step: Step, experts: int) -> tuple[int | None, ...]:
    """pad_to of each rank."""
    if step.pad is None:
        return (None,) * len(step.tokens)
    inputs = all_inputs(step, experts)
    # Rows aren't needed to count them.
    received = reference.dispatch_reference(
        [i.x_TH[:, :1] for i in inputs], [i.idx_TK for i in inputs], experts, align=step.align
    )
    return tuple(len(r.x_NH) + step.pad + rank for rank, r in enumerate(received))


@dataclass(frozen=True)
class Expected:
    """What the oracle says about one step on one rank."""

    received: reference.DispatchReference
    matrix_RE: Tensor
    out_TH: Tensor


@lru_cache(maxsize=512)
def expected(step: Step, experts: int, rank: int) -> Expected:
    """The oracle on the inputs of all ranks; kept, because a test runs the same steps in several kinds of groups."""
    inputs = all_inputs(step, experts)
    xs, idxs = [i.x_TH for i in inputs], [i.idx_TK for i in inputs]
    weights = [i.weights_TK for i in inputs if i.weights_TK is not None] or None
    at_dispatch = weights if step.weigh in ("both", "dispatch") else None
    at_combine = weights if step.weigh in ("both", "combine") else None
    pads, align = pads_of(step, experts), step.align
    received = reference.dispatch_reference(
        xs, idxs, experts, at_dispatch, pad_to=pads, align=align, quantize=step.quantize
    )
    owners = reference.expert_owner(experts, len(inputs))
    y_dtype = dtype_of(step.y_dtype or step.dtype)
    ys = [
        run_experts(r.x_NH, r.offsets, e, y_dtype, r.counts, r.scales)
        for r, e in zip(received, owners, strict=True)
    ]
    return Expected(
        received[rank],
        torch.stack([reference.send_counts_reference(idx, experts)[0] for idx in idxs]).int(),
        reference.combine_reference(ys, idxs, experts, at_combine, pad_to=pads, align=align)[rank],
    )


def check_dispatch(group: Any, step: Step, d: Any, rank: int, what: str) -> None:
    """Compare every field of a dispatch's result with the oracle."""
    oracle = expected(step, group.num_experts, rank)
    want = oracle.received
    assert_bits(d.handle.send_count_matrix, oracle.matrix_RE, f"{what}: send-count matrix")
    assert_bits(d.counts, want.counts, f"{what}: counts")
    assert_bits(d.offsets, want.offsets, f"{what}: offsets")
    assert_bits(d.x, want.x_NH, f"{what}: rows")
    if want.weights_N is None:
        assert d.weights is None, f"{what}: weights came without having been sent"
    else:
        assert_bits(d.weights, want.weights_N, f"{what}: weights")
    if want.scales is None:
        assert d.scales is None, f"{what}: scales came without quantised rows"
    else:
        assert_bits(d.scales, want.scales, f"{what}: scales")
    assert d.handle.num_tokens == step.tokens[rank] and d.handle.top_k == step.top_k, what


def check_combine(step: Step, out_TH: Tensor, experts: int, rank: int, what: str) -> None:
    """Compare combine's result with the oracle, bit by bit."""
    want_TH = expected(step, experts, rank).out_TH
    if step.rows == "nan" and step.quantize is not None:
        # Which NaN comes out of a sum of several isn't said; that it is one is.
        assert torch.equal(out_TH.isnan(), want_TH.isnan()), f"{what}: combined"
        return
    assert_bits(out_TH, want_TH, f"{what}: combined")


def check_truth(step: Step, out_TH: Tensor, experts: int, rank: int, what: str) -> None:
    """Compare combine's result with fp64, within the rule's bound."""
    if step.rows == "nan" or step.quantize is not None:
        return
    # Only this rank's part: the truth needs no other rank's rows.
    mine = make_inputs(step, rank, experts)
    x_TH = mine.x_TH.to(dtype_of(step.y_dtype or step.dtype))
    weights = None if mine.weights_TK is None or step.weigh == "dispatch" else [mine.weights_TK]
    truth = reference.moe_truth_fp64([x_TH], [mine.idx_TK], weights, scale_expert, experts)[0]
    magnitude = reference.moe_magnitude_fp64([x_TH], [mine.idx_TK], weights, scale_expert, experts)[0]
    assert_close_to_truth(out_TH, truth, magnitude, f"{what}: combined against fp64")


def run_step(group: Any, step: Step, mine: Inputs, handles: dict[int, Any] | None = None) -> Outcome:
    """Dispatch, experts, combine; nothing is compared."""
    d = dispatch_step(group, step, mine, handles)
    y_NH = expert_step(group, step, d)
    return Outcome(d, y_NH, combine_step(step, y_NH, d, mine))


def check_step(ctx: RankContext, group: Any, step: Step, handles: dict[int, Any] | None = None) -> Tensor:
    """Run one step and compare all of it; returns out [T, H]."""
    mine = make_inputs(step, ctx.rank, group.num_experts)
    want = expected(step, group.num_experts, ctx.rank)
    fill_freed_memory(want.received.x_NH, want.out_TH)
    outcome = run_step(group, step, mine, handles)
    what = f"rank {ctx.rank} of {ctx.world_size}, {step}"
    check_dispatch(group, step, outcome.dispatched, ctx.rank, what)
    check_combine(step, outcome.out_TH, group.num_experts, ctx.rank, what)
    check_truth(step, outcome.out_TH, group.num_experts, ctx.rank, what)
    return outcome.out_TH


def prefill_windows(ctx: RankContext, group: Any) -> None:
    """Write NaN into every x and y row a window has, in all slots, by ordinary steps of NaN rows."""
    for turn in range(2 * group.depth):
        step = Step(
            tokens=(group.max_tokens,) * ctx.world_size,
            top_k=group.top_k,
            hidden=group.hidden_size,
            dtype=str(group.dtype).removeprefix("torch."),
            weight_dtype=None,
            routing="round",
            rows="nan",
            source="window" if turn % 2 else "plain",
            result="window" if turn % 2 else "plain",
        )
        outcome = run_step(group, step, make_inputs(step, ctx.rank, group.num_experts))
        assert outcome.out_TH.isnan().all()


def steps_match(
    ctx: RankContext, spec: GroupSpec, steps: Sequence[Step], prefill: bool = True
) -> list[Tensor]:
    """Check each step against the oracle; returns this rank's outputs."""
    group = spec.open(ctx)
    if prefill:
        prefill_windows(ctx, group)
    handles: dict[int, Any] = {}
    return [check_step(ctx, group, step, handles) for step in steps]


@contextlib.contextmanager
def dirty_outputs() -> Iterator[None]:
    """Meanwhile every output of the kernels lies in memory of 0xFF bytes: NaN, where it isn't written."""
    native.pool_fill(0xFF)
    try:
        yield
    finally:
        native.pool_fill(-1)


def back_to_back(
    ctx: RankContext, spec: GroupSpec, steps: Sequence[Step], jitter_ms: float, dirty: bool = False
) -> int:
    """Run all steps with random delays and nothing that orders the ranks, then compare all of them.

    Every second step's outputs are overwritten with NaN after a copy was taken: what is allocated later then
    lies in dirty memory, and if an output were the window itself, its later readers would see NaN. With
    ``dirty`` all outputs lie in such memory.
    """
    group = spec.open(ctx)
    mine = [make_inputs(step, ctx.rank, spec.experts) for step in steps]
    kept: list[Outcome] = []
    rows: list[Tensor] = []
    handles: dict[int, Any] = {}
    with dirty_outputs() if dirty else contextlib.nullcontext():
        for number, (step, own) in enumerate(zip(steps, mine, strict=True)):
            ctx.jitter(jitter_ms)
            begun = begin_dispatch(group, step, own, handles)
            if step.later:
                ctx.jitter(jitter_ms)
            d = end_dispatch(step, begun, handles)
            ctx.jitter(jitter_ms)
            y_NH = expert_step(group, step, d)
            begun = begin_combine(step, y_NH, d, own)
            if step.later:
                ctx.jitter(jitter_ms)
            out_TH = end_combine(step, begun)
            rows.append(d.x.clone())
            kept.append(Outcome(d, y_NH, out_TH.clone() if number % 2 else out_TH))
            if number % 2:
                d.x.view(torch.uint8).fill_(0xFF)
                out_TH.fill_(float("nan"))
    for number, (step, outcome) in enumerate(zip(steps, kept, strict=True)):
        what = f"rank {ctx.rank} of {ctx.world_size}, step {number}, {step}"
        if number % 2:
            outcome.dispatched.x.copy_(rows[number])
        check_dispatch(group, step, outcome.dispatched, ctx.rank, what)
        check_combine(step, outcome.out_TH, spec.experts, ctx.rank, what)
    return len(kept)


def interleaved(
    ctx: RankContext, spec: GroupSpec, order: str, steps: Sequence[Step], dirty: bool = False
) -> None:
    """Run dispatches and combines in the order of ``"D0 D1 C1 C0"``; ``X0`` drops a handle.

    ``B0 W0`` and ``G0 T0`` are the parts of ``D0`` and of ``C0``: begin and wait. Steps whose ``later`` doesn't ask for
    asynchronous calls do all at the first of them.
    """
    group = spec.open(ctx)
    inputs = [make_inputs(step, ctx.rank, spec.experts) for step in steps]
    begun: dict[int, Any] = {}
    opened: dict[int, Any] = {}
    given: dict[int, Any] = {}
    results: dict[int, Tensor] = {}
    handles: dict[int, Any] = {}
    with dirty_outputs() if dirty else contextlib.nullcontext():
        for word in order.split():
            number = int(word[1:])
            step, mine = steps[number], inputs[number]
            ctx.jitter(2)
            if word[0] in "BD":
                begun[number] = begin_dispatch(group, step, mine, handles)
            if word[0] in "WD":
                opened[number] = end_dispatch(step, begun.pop(number), handles)
            if word[0] in "GC":
                d = opened[number]
                given[number] = begin_combine(step, expert_step(group, step, d), d, mine)
            if word[0] in "TC":
                results[number] = end_combine(step, given.pop(number))
            if word[0] == "X":
                # Dropped: the tensors and the handle, or what was begun, are garbage from here on.
                for place in (begun, opened, given):
                    place.pop(number, None)
                handles.pop(step.seed, None)
    for number, d in opened.items():
        what = f"{order}, step {number}, rank {ctx.rank}"
        check_dispatch(group, steps[number], d, ctx.rank, what)
    for number, out_TH in results.items():
        what = f"{order}, step {number}, rank {ctx.rank}"
        check_combine(steps[number], out_TH, spec.experts, ctx.rank, what)


def wandering(
    ctx: RankContext, spec: GroupSpec, order: str, steps: Sequence[Step], dropped: Sequence[int]
) -> None:
    """Begin in the order of ``"B0 B1 G0 G1"``, which is every rank's, and wait wherever this rank's chance has it.

    A dispatch is waited for before its combine begins, a combine before the call that makes it expire; the handles in
    ``dropped`` are never combined.
    """
    group = spec.open(ctx)
    inputs = [make_inputs(step, ctx.rank, spec.experts) for step in steps]
    begun: dict[int, Any] = {}
    opened: dict[int, Any] = {}
    given: dict[int, Any] = {}
    results: dict[int, Tensor] = {}
    handles: dict[int, Any] = {}

    def receive(number: int) -> None:
        opened[number] = end_dispatch(steps[number], begun.pop(number), handles)

    def sum_up(number: int) -> None:
        results[number] = end_combine(steps[number], given.pop(number))

    with dirty_outputs():
        for word in order.split():
            number = int(word[1:])
            step, mine = steps[number], inputs[number]
            for waiting, wait in ((begun, receive), (given, sum_up)):
                late = [n for n in waiting if ctx.rng.random() < 0.4]
                ctx.rng.shuffle(late)
                for n in late:
                    wait(n)
            ctx.jitter(1)
            if word[0] == "B":
                for n in [n for n in given if n <= number - spec.depth]:
                    sum_up(n)
                for n in [n for n in begun if n <= number - spec.depth]:
                    assert n in dropped
                    del begun[n]
                begun[number] = begin_dispatch(group, step, mine, handles, True)
            else:
                if number in begun:
                    receive(number)
                d = opened[number]
                given[number] = begin_combine(step, expert_step(group, step, d), d, mine)
        for n in list(given):
            sum_up(n)
    for number, d in opened.items():
        check_dispatch(group, steps[number], d, ctx.rank, f"{order}, step {number}, rank {ctx.rank}")
    assert sorted(results) == [n for n in range(len(steps)) if n not in dropped]
    for number, out_TH in results.items():
        what = f"{order}, step {number}, rank {ctx.rank}"
        check_combine(steps[number], out_TH, spec.experts, ctx.rank, what)


def operators_match(ctx: RankContext, spec: GroupSpec, step: Step) -> None:
    """The same step through ``torch.ops.moe_a2a``: functional operators that take the group's name."""
    group = spec.open(ctx)
    inputs = all_inputs(step, spec.experts)
    mine = inputs[ctx.rank]
    ops = torch.ops.moe_a2a
    counts_E, slot_TK = ops.send_counts(mine.idx_TK, spec.experts)
    want_counts, want_slots = reference.send_counts_reference(mine.idx_TK, spec.experts)
    assert_bits(counts_E, want_counts, "send_counts: counts")
    assert_bits(slot_TK, want_slots, "send_counts: slots")
    rows_NH, counts, offsets, weights_N, handle = ops.dispatch(
        mine.x_TH, mine.idx_TK, mine.weights_TK, group.name
    )
    want = reference.dispatch_reference(
        [i.x_TH for i in inputs],
        [i.idx_TK for i in inputs],
        spec.experts,
        [i.weights_TK for i in inputs if i.weights_TK is not None],
    )[ctx.rank]
    assert_bits(rows_NH, want.x_NH, "operator: rows")
    assert_bits(counts, want.counts, "operator: counts")
    assert_bits(offsets, want.offsets, "operator: offsets")
    assert want.weights_N is not None
    assert_bits(weights_N, want.weights_N, "operator: weights")
    y_NH = run_experts(rows_NH, want.offsets, group.local_experts, rows_NH.dtype)
    out_TH = ops.combine(y_NH, handle, mine.weights_TK, len(mine.x_TH), group.name)
    check_combine(step, out_TH, spec.experts, ctx.rank, f"operator, rank {ctx.rank}")


def split_batch(
    ctx: RankContext, spec: GroupSpec, total: Step, tokens: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """This rank's share of one global batch, run twice; returns both outputs [T, H]."""
    group = spec.open(ctx)
    whole = make_inputs(total, 0, spec.experts)
    start = sum(tokens[: ctx.rank])
    share = slice(start, start + tokens[ctx.rank])
    weights = None if whole.weights_TK is None else whole.weights_TK[share]
    mine = Inputs(whole.x_TH[share], whole.idx_TK[share], weights)
    outs = []
    for _ in range(2):
        ctx.jitter(3)
        outs.append(run_step(group, total, mine).out_TH)
    return outs[0], outs[1]


def two_groups(ctx: RankContext, first: GroupSpec, second: GroupSpec) -> None:
    """Alternate between two groups, with a handle open on each while the other is used."""
    groups = [first.open(ctx), second.open(ctx)]
    specs = [first, second]
    for turn in range(6):
        steps, inputs, opened = [], [], []
        for group, spec in zip(groups, specs, strict=True):
            tokens = tuple((turn * 5 + rank * 3) % (spec.max_tokens + 1) for rank in range(ctx.world_size))
            step = Step(tokens, spec.top_k, spec.hidden, spec.dtype, rows="random", seed=turn)
            mine = make_inputs(step, ctx.rank, spec.experts)
            ctx.jitter(2)
            opened.append(dispatch_step(group, step, mine))
            steps.append(step)
            inputs.append(mine)
        for i in (turn % 2, 1 - turn % 2):
            d = opened[i]
            what = f"group {i}, turn {turn}, rank {ctx.rank}"
            check_dispatch(groups[i], steps[i], d, ctx.rank, what)
            out_TH = combine_step(steps[i], expert_step(groups[i], steps[i], d), d, inputs[i])
            check_combine(steps[i], out_TH, specs[i].experts, ctx.rank, what)


def local_experts(ctx: RankContext, spec: GroupSpec) -> tuple[list[int], int, list[list[int]]]:
    """(experts this rank owns, their number, what it thinks every rank owns)."""
    group = spec.open(ctx)
    ranges = [list(group.expert_range(rank)) for rank in range(ctx.world_size)]
    return list(group.local_experts), group.num_local_experts, ranges


def corrupted(ctx: RankContext, spec: GroupSpec, step: Step, part: str) -> None:
    """A good step whose result is damaged in one element on the last rank before it is compared."""
    group = spec.open(ctx)
    outcome = run_step(group, step, make_inputs(step, ctx.rank, spec.experts))
    damaged = {"rows": outcome.dispatched.x, "counts": outcome.dispatched.counts, "combined": outcome.out_TH}
    if part and ctx.rank == ctx.world_size - 1:
        damaged[part].view(torch.uint8).flatten()[-4] ^= 1
    check_dispatch(group, step, outcome.dispatched, ctx.rank, "damaged")
    check_combine(step, outcome.out_TH, spec.experts, ctx.rank, "damaged")


def statistics(ctx: RankContext, spec: GroupSpec) -> dict[str, Any]:
    """What the cached group has counted."""
    stats: dict[str, Any] = spec.open(ctx).stats()
    return stats


def kernels_in_use(ctx: RankContext) -> str:
    """The instruction set this rank's kernels use."""
    return native.cpu_kernels()
