"""Bodies that count copied payload and look for outputs that share memory with a window."""

from __future__ import annotations

from typing import Any

import torch
from pool import RankContext

import moe_a2a
from rank_bodies.inputs import GroupSpec, Step, make_inputs
from rank_bodies.steps import (
    check_combine,
    check_dispatch,
    check_step,
    combine_step,
    dispatch_step,
    expert_step,
    run_step,
)


def copied(group: Any, before: dict[str, int]) -> dict[str, int]:
    """Payload bytes copied since ``before``."""
    now = group.stats()["copied_bytes"]
    return {name: now[name] - before[name] for name in now}


def count_copies(ctx: RankContext, spec: GroupSpec, step: Step) -> dict[str, Any]:
    """Run one checked step and return the bytes that each part of it copied, with what the design allows."""
    group = spec.open(ctx)
    start = group.stats()["copied_bytes"]
    mine = make_inputs(step, ctx.rank, spec.experts)
    d = dispatch_step(group, step, mine)
    after_dispatch = copied(group, start)
    y_NH = expert_step(group, step, d)
    assert copied(group, start) == after_dispatch
    out_TH = combine_step(step, y_NH, d, mine)
    check_dispatch(group, step, d, ctx.rank, "counted")
    check_combine(step, out_TH, spec.experts, ctx.rank, "counted")
    local = group.local_experts
    idx_TK = mine.idx_TK
    away_TK = (idx_TK >= 0) & ((idx_TK < local.start) | (idx_TK >= local.stop))
    own = int(((idx_TK >= local.start) & (idx_TK < local.stop)).sum())
    return {
        "dispatch": after_dispatch,
        "both": copied(group, start),
        "row": step.hidden * d.x.element_size(),
        "y_row": step.hidden * y_NH.element_size(),
        "out_row": step.hidden * out_TH.element_size(),
        "tokens": len(mine.x_TH),
        "tokens_kept": int((idx_TK >= 0).any(dim=1).sum()),
        "tokens_away": int(away_TK.any(dim=1).sum()),
        "rows_leaving": int(away_TK.sum()),
        "rows": len(d.x),
        "rows_away": len(d.x) - own,
    }


def outputs_are_private(ctx: RankContext, spec: GroupSpec, step: Step) -> list[int]:
    """Outputs of step 1 survive later steps, and overwriting them changes nothing that is still read.

    Returns the pointers of d.x and out of both steps.
    """
    group = spec.open(ctx)
    mine = make_inputs(step, ctx.rank, spec.experts)
    first = run_step(group, step, mine)
    rows, out = first.dispatched.x.clone(), first.out_TH.clone()
    for seed in range(3):
        check_step(
            ctx, group, Step(step.tokens, step.top_k, step.hidden, step.dtype, rows="random", seed=90 + seed)
        )
    assert torch.equal(first.dispatched.x, rows) and torch.equal(first.out_TH, out), (
        "later calls changed an output"
    )
    # d.x is overwritten before combine and while slower peers may still be reading x from this window.
    again = dispatch_step(group, step, mine)
    y_NH = expert_step(group, step, again)
    kept = again.x.clone()
    again.x.fill_(float("nan"))
    ctx.jitter(3)
    out_again = moe_a2a.combine(y_NH, again.handle, topk_weights=mine.weights_TK)
    assert torch.equal(kept, rows) and torch.equal(out_again, out)
    out_again.fill_(float("nan"))
    first.out_TH.fill_(float("nan"))
    first.dispatched.x.fill_(float("nan"))
    check_step(ctx, group, step)
    return [first.dispatched.x.data_ptr(), again.x.data_ptr(), out_again.data_ptr(), mine.x_TH.data_ptr()]


def inputs_may_change(ctx: RankContext, spec: GroupSpec, step: Step) -> None:
    """Ordinary x and y may be overwritten as soon as the call has returned, whatever peers still read."""
    group = spec.open(ctx)
    for turn in range(20):
        turn_step = Step(step.tokens, step.top_k, step.hidden, step.dtype, rows="random", seed=turn)
        mine = make_inputs(turn_step, ctx.rank, spec.experts)
        ctx.jitter(2)
        d = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group, topk_weights=mine.weights_TK)
        weights_TK = mine.weights_TK.clone() if mine.weights_TK is not None else None
        mine.x_TH.fill_(float("nan"))
        mine.idx_TK.fill_(10**6)
        y_NH = expert_step(group, turn_step, d)
        ctx.jitter(2)
        out_TH = moe_a2a.combine(y_NH, d.handle, topk_weights=weights_TK)
        y_NH.fill_(float("nan"))
        check_dispatch(group, turn_step, d, ctx.rank, f"turn {turn}")
        check_combine(turn_step, out_TH, spec.experts, ctx.rank, f"turn {turn}")


def count_fused_copies(ctx: RankContext, spec: GroupSpec, step: Step, gradients: bool) -> dict[str, Any]:
    """Run one checked fused call and return the bytes that it copied, with what the design allows."""
    group = spec.open(ctx)
    inputs = [make_inputs(step, rank, spec.experts) for rank in range(ctx.world_size)]
    mine, local = inputs[ctx.rank], group.local_experts
    eye = torch.eye(step.hidden, dtype=mine.x_TH.dtype)
    down = torch.stack([eye * 2.0 ** (e % 8) for e in local]) if local else eye[None][:0]
    up = eye.repeat(len(local), 1, 1).requires_grad_(gradients)
    start = group.stats()["copied_bytes"]
    out_TH = moe_a2a.moe(
        mine.x_TH, mine.idx_TK, mine.weights_TK, up, down, group, activation="relu", gated=False
    ).detach()
    counts = copied(group, start)

    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        return rows.relu() * 2.0 ** (e % 8)

    weights: Any = [one.weights_TK for one in inputs]
    xs, idxs = [one.x_TH for one in inputs], [one.idx_TK for one in inputs]
    want = moe_a2a.reference.moe_reference(xs, idxs, weights, expert, spec.experts)[ctx.rank]
    assert torch.equal(out_TH, want)
    idx_TK = mine.idx_TK
    own = int(((idx_TK >= local.start) & (idx_TK < local.stop)).sum())
    rows = sum(int(((idx >= local.start) & (idx < local.stop)).sum()) for idx in idxs)
    return {
        "copied": counts,
        "row": step.hidden * mine.x_TH.element_size(),
        "tokens": len(mine.x_TH),
        "own": own,
        "leaving": int((idx_TK >= 0).sum()) - own,
        "rows": rows,
    }
