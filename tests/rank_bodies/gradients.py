"""Bodies on gradients: finite differences, who wants which, the odd ways of running backward, and what ends badly.

T tokens, H hidden, E experts, K top-k, R ranks.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import RankContext
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import moe_a2a
from moe_a2a.op_host import native
from moe_a2a.op_host.layout import HandleView
from rank_bodies.errors import Caught, caught
from rank_bodies.inputs import assert_bits
from rank_bodies.moe_bodies import (
    NAMES,
    TOLERANCE,
    WAYS,
    Layer,
    Leaves,
    Result,
    check,
    expected,
    expert,
    fused,
    leaves,
    local_expert,
    make_world,
    parts,
    run,
    same_bits,
)


def differences(ctx: RankContext, layer: Layer, way: str, changes: dict[str, Any] | None = None) -> int:
    """Finite differences of the sum over all ranks' losses, by every element in turn; all ranks run every forward.

    Returns how many."""
    step = 1e-5
    group = replace(layer.spec, **(changes or {})).open(ctx)
    found = run(layer, group, way).grads
    own, world = leaves(layer, group, ""), make_world(layer)
    g = world.gs[ctx.rank]

    def sizes(rank: int) -> list[int]:
        experts = len(group.expert_range(rank))
        w = world.ws[rank]
        shares = [0 if value is None else value[0].numel() * experts for value in world.parameters]
        return [world.xs[rank].numel(), 0 if w is None else w.numel(), *shares]

    losses = []
    with torch.no_grad():
        for rank in range(ctx.world_size):
            for place, size in enumerate(sizes(rank)):
                for element, sign in itertools.product(range(size), (1, -1)):
                    value = own.all[place] if rank == ctx.rank else None
                    before = None
                    if value is not None:
                        flat = value.view(-1)
                        before = flat[element].clone()
                        flat[element] += sign * step
                    losses.append((WAYS[way](layer, group, own) * g).sum())
                    if value is not None and before is not None:
                        value.view(-1)[element] = before
    total = torch.stack(ctx.gather(torch.stack(losses))).sum(0)
    slopes = (total[::2] - total[1::2]) / (2 * step)
    begin = sum(sum(sizes(rank)) for rank in range(ctx.rank))
    for name, grad, size in zip(NAMES, found, sizes(ctx.rank), strict=True):
        want = slopes[begin : begin + size]
        begin += size
        if grad is not None and size:
            worst = (grad.flatten() - want).abs().max().item()
            assert worst <= 1e-6 * max(1.0, want.abs().max().item()), (
                f"{way}, {name}: off by {worst}, {layer}"
            )
    return len(losses)


def weight_gradients(ctx: RankContext, layer: Layer, ways: tuple[str, ...]) -> None:
    """w.grad[t, k] = <g[t], f_e(x[t])>, exactly 0 at -1; x.grad exactly 0 in rows without experts; nothing is NaN."""
    group = layer.spec.open(ctx)
    world = make_world(layer)
    x, idx_TK, g = world.xs[ctx.rank], world.idxs[ctx.rank], world.gs[ctx.rank].double()
    want = torch.zeros(idx_TK.shape, dtype=torch.float64)
    for (t, k), e in zip(
        itertools.product(*map(range, idx_TK.shape)), idx_TK.flatten().tolist(), strict=True
    ):
        if e >= 0:
            want[t, k] = (g[t] * expert(layer, world.parameters, e, x[t : t + 1].double())).sum()
    for way in ways:
        result = run(layer, group, way)
        x_grad, w_grad = result.grads[:2]
        assert x_grad is not None and w_grad is not None
        assert (w_grad[idx_TK < 0] == 0).all(), f"{way}: gradients of dropped slots"
        scale = max(1.0, want.abs().max().item())
        assert (w_grad - want).abs().max() <= 10 * TOLERANCE[layer.dtype] * scale, way
        for value in (result.out, x_grad):
            assert not value.isnan().any(), way
            assert (value[(idx_TK < 0).all(1)] == 0).all(), way
        check(result, expected(layer, group), 10 * TOLERANCE[layer.dtype], way)


def idle_rank(ctx: RankContext, layer: Layer, ways: tuple[str, ...]) -> None:
    """All rows go to rank 0: the others' experts get zeros, and everybody gets through backward."""
    group = layer.spec.open(ctx)
    for way in ways:
        ctx.jitter(3)
        own = leaves(layer, group)
        WAYS[way](layer, group, own).sum().backward()
        for name, grad in zip(NAMES[2:], own.grads()[2:], strict=True):
            assert grad is not None, f"{way}: {name}"
            assert (grad == 0).all() == (ctx.rank > 0), f"{way}: {name}"
        assert own.x.grad is not None and (own.x.grad != 0).any()


# ---------------------------------------------------------------------------------------------------- who wants what


def frozen(ctx: RankContext, layer: Layer, way: str, wants: list[tuple[str, ...]]) -> int:
    """For each entry, one string of letters (x, w, e) a rank: no hang, right gradients, none where none is wanted."""
    group = layer.spec.open(ctx)
    ways = ("fused", "recomputed", "applied") if way == "fused" else (way,)
    for number, mine in enumerate(wants):
        kind = ways[number % len(ways)]
        union = set("".join(mine))
        what = f"rank {ctx.rank}, {kind}, {mine}"
        own = leaves(layer, group, mine[ctx.rank])
        ctx.jitter(1)
        out = WAYS[kind](layer, group, own)
        assert out.requires_grad == bool(union) == (out.grad_fn is not None), what
        want = expected(layer, group)
        if union:
            out.backward(make_world(layer).gs[ctx.rank])
        for letter, value, grad in zip("xweeee", own.all, want.grads, strict=True):
            if value is not None and letter not in mine[ctx.rank]:
                assert value.grad is None, what
            elif value is not None:
                check(
                    Result(out, [value.grad] + [None] * 5),
                    Result(want.out, [grad] + [None] * 5),
                    3e-6,
                    what,
                )
    return len(wants)


def only_one_wants_what_dispatch_cannot_know(ctx: RankContext, layer: Layer, letter: str) -> Caught | None:
    """Rank 0's experts, or the weights of its combine, want gradients, and nothing else does: nobody heard of it."""
    group = replace(layer.spec, timeout=1.0).kwargs(ctx.world_size)
    made = ctx.fresh_group(**group)
    own = leaves(layer, made, letter if ctx.rank == 0 else "")
    out = parts(layer, made, own)
    assert out.requires_grad == (ctx.rank == 0)
    error = caught(out.sum().backward) if ctx.rank == 0 else None
    ctx.barrier()
    return error


def no_backward(ctx: RankContext, layer: Layer, way: str, under_no_grad: bool) -> Caught | None:
    """Rank 1 doesn't run backward, or ran forward so that it can't."""
    group = ctx.fresh_group(**replace(layer.spec, timeout=1.0).kwargs(ctx.world_size))
    run(layer, group, way)
    own = leaves(layer, group)
    if ctx.rank == 1 and under_no_grad:
        with torch.no_grad():
            out = WAYS[way](layer, group, own)
        assert not out.requires_grad
    else:
        out = WAYS[way](layer, group, own)
    error = None if ctx.rank == 1 else caught(out.sum().backward)
    ctx.barrier()
    return error


def recompute_on_some(ctx: RankContext, layers: list[Layer]) -> None:
    """recompute is each rank's own choice."""
    for layer, chosen in itertools.product(layers, range(1 << ctx.world_size)):
        group = layer.spec.open(ctx)
        own = leaves(layer, group)
        out = fused(layer, group, own, recompute=bool(chosen >> ctx.rank & 1))
        out.backward(make_world(layer).gs[ctx.rank])
        check(Result(out, own.grads()), expected(layer, group), TOLERANCE["float32"], f"{chosen:b}, {layer}")


def without_rows_nobody_is_cut_off(ctx: RankContext, way: str) -> None:
    """Experts that are skipped where they have no rows, and ranks without experts: these ranks run backward all the same."""
    layer = Layer((3, 4, 2)[: ctx.world_size], experts=2, routing="one", drop=0.0, bias=False)
    group = layer.spec.open(ctx)
    want = expected(layer, group)
    own = leaves(layer, group)

    def one(rows: Tensor, local: int) -> Tensor:
        return local_expert(layer, own, rows, local) if len(rows) else torch.empty(rows.shape)

    if way == "parts":
        d = moe_a2a.dispatch(own.x, own.idx, group)
        out = moe_a2a.combine(one(d.x, 0) if len(d.x) else torch.empty(d.x.shape), d, own.w)
    else:
        out = moe_a2a.moe_apply(one, own.x, own.idx, own.w, group)
    out.backward(make_world(layer).gs[ctx.rank])
    found = own.grads()
    check(
        Result(out, [*found[:2], None, None, None, None]),
        Result(want.out, [*want.grads[:2], None, None, None, None]),
        TOLERANCE["float32"],
        way,
    )


# --------------------------------------------------------------------------------------------- odd ways of running backward


def accumulate(ctx: RankContext, layer: Layer, way: str) -> None:
    """fwd, fwd, bwd, bwd on one group, in both orders; two losses on one graph; backward twice."""
    group = layer.spec.open(ctx)
    once = run(layer, group, way)
    g = make_world(layer).gs[ctx.rank]
    for order in ((0, 1), (1, 0)):
        own = leaves(layer, group)
        outs = [WAYS[way](layer, group, own) for _ in range(2)]
        for number in order:
            ctx.jitter(1)
            outs[number].backward(g)
        for out in outs:
            assert_bits(out.detach(), once.out, f"{way}: out")
        twice(once, own, way)
    twice(once, run_into(layer, group, way, lambda out: out.backward(g, retain_graph=True), 2), way)
    own = leaves(layer, group)
    out = WAYS[way](layer, group, own)
    (out * g).sum().backward(retain_graph=True)
    (2 * (out * g).sum() - (out * g).sum()).backward()
    twice(once, own, way)


def run_into(layer: Layer, group: Any, way: str, backward: Callable[[Tensor], None], times: int) -> Leaves:
    own = leaves(layer, group)
    out = WAYS[way](layer, group, own)
    for _ in range(times):
        backward(out)
    return own


def twice(once: Result, own: Leaves, what: str) -> None:
    for name, one, grad in zip(NAMES, once.grads, own.grads(), strict=True):
        if one is not None:
            assert grad is not None
            assert_bits(grad, one + one, f"{what}: gradient of {name}")


def many_steps(ctx: RankContext, layer: Layer, way: str, count: int) -> None:
    """The same step again and again, with delays, in dirty memory: the same bits."""
    group = layer.spec.open(ctx)
    first = run(layer, group, way)
    check(first, expected(layer, group), TOLERANCE[layer.dtype], way)
    native.pool_fill(0xFF)
    try:
        for _ in range(count):
            ctx.jitter(2)
            same_bits(run(layer, group, way), first, way)
    finally:
        native.pool_fill(-1)


LOSSES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda out, rank: out.sum(),
    "every second column": lambda out, rank: out.t()[::2].sum(),
    "squares": lambda out, rank: out[:, ::2].pow(2).sum(),
    "one row": lambda out, rank: out[0].sum(),
    "nothing on rank 1": lambda out, rank: out.sum() * (0 if rank == 1 else 1),
    "transposed": lambda out, rank: (out.t().contiguous() * 3).sum(),
    "negated imaginary part": lambda out, rank: torch.complex(out, out * 2).conj().imag.sum(),
}


def odd_gradients(ctx: RankContext, layer: Layer, way: str) -> None:
    """Whatever the layout in which the gradient of out comes: as with a dense one of the same values."""
    group = layer.spec.open(ctx)
    for name, loss in LOSSES.items():
        own = leaves(layer, group)
        out = WAYS[way](layer, group, own)
        loss(out, ctx.rank).backward()
        leaf = out.detach().requires_grad_()
        loss(leaf, ctx.rank).backward()
        assert leaf.grad is not None
        dense = leaves(layer, group)
        again = WAYS[way](layer, group, dense)
        again.backward(leaf.grad.clone(memory_format=torch.contiguous_format))
        same_bits(Result(out.detach(), own.grads()), Result(again.detach(), dense.grads()), f"{way}, {name}")
        assert name == "nothing on rank 1" or any(g is not None and (g != 0).any() for g in own.grads()[:1])


def interleaved_groups(ctx: RankContext, layer: Layer, count: int) -> None:
    """Layers on several groups in one graph, one after the other and side by side."""
    specs = [replace(layer.spec, depth=2 + number) for number in range(3)]
    groups = [spec.open(ctx) for spec in specs]
    for turn in range(count):
        own = [leaves(layer, group) for group in groups]
        ways = [list(WAYS)[(turn + number) % 4] for number in range(3)]
        alone = [run(layer, group, way) for group, way in zip(groups, ways, strict=True)]
        outs = [WAYS[way](layer, group, one) for way, group, one in zip(ways, groups, own, strict=True)]
        ctx.jitter(2)
        g = make_world(layer).gs[ctx.rank]
        torch.stack(outs).sum(0).backward(g)
        for number in range(3):
            same_bits(Result(outs[number].detach(), own[number].grads()), alone[number], f"turn {turn}")


def checkpointed(ctx: RankContext, layer: Layer, way: str, reentrant: bool) -> None:
    """Bitwise as without a checkpoint."""
    group = layer.spec.open(ctx)
    plain = run(layer, group, way)
    own = leaves(layer, group)

    def block(x: Tensor) -> Tensor:
        return WAYS[way](layer, group, Leaves(x * 1, own.idx, own.w, own.parameters))

    out = checkpoint(block, own.x, use_reentrant=reentrant)
    ctx.jitter(2)
    assert isinstance(out, Tensor)
    out.backward(make_world(layer).gs[ctx.rank])
    same_bits(Result(out.detach(), own.grads()), plain, f"{way}, reentrant {reentrant}")


SAVED = (
    "dispatch_raw",
    "dispatch_full_raw",
    "dispatch_wait_raw",
    "dispatch_begin_raw",
    "combine_raw",
    "combine_begin_raw",
    "combine_wait_raw",
    "moe_raw",
    "moe_begin_raw",
    "moe_finish_raw",
)


def selectively(ctx: RankContext, layer: Layer, way: str) -> tuple[int, int]:
    """Checkpointing that keeps what this package's operators return: (calls in backward without a checkpoint, with one)."""
    group = layer.spec.open(ctx)
    kept = {getattr(torch.ops.moe_a2a, name).default for name in SAVED}

    def policy(state: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    own = leaves(layer, group)
    g = make_world(layer).gs[ctx.rank]
    out = WAYS[way](layer, group, own)
    begin = group.stats()["epoch"]
    out.backward(g)
    alone = group.stats()["epoch"] - begin
    plain = Result(out.detach(), own.grads())

    own = leaves(layer, group)

    def block(x: Tensor) -> Tensor:
        return torch.tanh(WAYS[way](layer, group, Leaves(x * 1, own.idx, own.w, own.parameters)) * 1.0)

    straight = block(own.x)
    straight.backward(g)
    want = Result(straight.detach(), own.grads())
    own = leaves(layer, group)
    out = checkpoint(block, own.x, use_reentrant=False, context_fn=contexts)
    begin = group.stats()["epoch"]
    out.backward(g)
    same_bits(Result(out.detach(), own.grads()), want, way)
    assert plain.grads[0] is not None
    return alone, group.stats()["epoch"] - begin


def micro_batches(ctx: RankContext, layers: tuple[Layer, Layer], way: str) -> None:
    """Two batches under way at once, forward; their backwards one after the other."""
    group = layers[0].spec.open(ctx)
    alone = [run(layer, group) for layer in layers]
    own = [leaves(layer, group) for layer in layers]
    pending: list[Any] = []
    if way == "fused":
        for layer, one in zip(layers, own, strict=True):
            pending.append(fused(layer, group, one, async_op=True))
            ctx.jitter(1)
        outs = [pending[1].wait(), pending[0].wait()][::-1]
    else:
        for one in own:
            pending.append(moe_a2a.dispatch(one.x, one.idx, group, async_op=True))
            ctx.jitter(1)
        ends = []
        for layer, one, begun in zip(layers, own, pending, strict=True):
            d = begun.wait()
            offsets = d.offsets.tolist()
            y = torch.cat(
                [
                    local_expert(layer, one, d.x[b:e], n)
                    for n, (b, e) in enumerate(itertools.pairwise(offsets))
                ]
            )
            ends.append(moe_a2a.combine(y, d, one.w, async_op=True))
        outs = [end.wait() for end in ends]
    for layer, out in zip(layers, outs, strict=True):
        ctx.jitter(1)
        out.backward(make_world(layer).gs[ctx.rank])
    for layer, out, one, want in zip(layers, outs, own, alone, strict=True):
        check(Result(out, one.grads()), expected(layer, group), TOLERANCE["float32"], way)
        if way == "fused":
            same_bits(Result(out.detach(), one.grads()), want, way)


# ---------------------------------------------------------------------------------------------------- results are one's own


def written_to(ctx: RankContext, layer: Layer, way: str) -> None:
    """Results may be changed in place, with gradients; they aren't views, and later calls leave them alone."""
    group = layer.spec.open(ctx)
    plain = run(layer, group, way)
    g = make_world(layer).gs[ctx.rank]
    own = leaves(layer, group)
    out = WAYS[way](layer, group, own)
    assert not out._is_view()
    out.add_(own.x.detach()).mul_(2)
    kept, value = out, out.detach().clone()
    assert_bits(value, (plain.out + own.x.detach()) * 2, f"{way}: changed in place")
    for _ in range(3):
        run(replace(layer, seed=layer.seed + 1), group, way)
    assert_bits(kept.detach(), value, f"{way}: kept over later steps")
    out.backward(g)
    twice(plain, own, way)
    with torch.no_grad():
        kept.fill_(float("nan"))  # would be seen by the next step if it were the window
    same_bits(run(layer, group, way), plain, way)


def rows_written_to(ctx: RankContext, layer: Layer) -> None:
    """The same for what dispatch returns."""
    group = layer.spec.open(ctx)
    own = leaves(layer, group)
    d = moe_a2a.dispatch(own.x, own.idx, group, own.w)
    weights = d.weights
    assert weights is not None and not d.x._is_view() and not weights._is_view()
    before, light = d.x.detach().clone(), weights.detach().clone()
    d.x.mul_(3)
    weights.mul_(5)
    out = moe_a2a.combine(d.x * weights[:, None], d)
    for _ in range(3):
        run(layer, group)
    assert_bits(d.x.detach(), before * 3, "rows")
    assert_bits(weights.detach(), light * 5, "weights")
    out.sum().backward()
    real_TK = own.idx >= 0
    assert own.w is not None and own.w.grad is not None and own.x.grad is not None
    total = 15 * torch.where(real_TK, own.w.detach(), 0).sum(1, keepdim=True)
    torch.testing.assert_close(own.x.grad, total.expand_as(own.x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        own.w.grad,
        torch.where(real_TK, 15 * own.x.detach().sum(1, keepdim=True), 0.0),
        rtol=1e-5,
        atol=1e-5,
    )


def modes(ctx: RankContext, layer: Layer, way: str) -> None:
    """inference_mode, no_grad, training, and back: the same bits, and a window tensor for each."""
    group = ctx.fresh_group(**layer.spec.kwargs(ctx.world_size))
    outs = []
    for mode in (torch.inference_mode, torch.no_grad, None, torch.inference_mode, None):
        if mode is None:
            result = run(layer, group, way)
            check(result, expected(layer, group), TOLERANCE["float32"], way)
            outs.append(result.out)
        else:
            with mode():
                outs.append(WAYS[way](layer, group, leaves(layer, group, "")))
    for out in outs[1:]:
        if way == "applied":  # torch's products depend on where rows lie
            torch.testing.assert_close(out.clone(), outs[0].clone())
        else:
            assert_bits(out.clone(), outs[0].clone(), way)


def window_training(ctx: RankContext, layer: Layer, count: int) -> None:
    """Steps on tensors in the window whose backwards run when the window holds other rows already."""
    group = layer.spec.open(ctx)
    want, other = expected(layer, group), replace(layer, seed=layer.seed + 1)
    g = make_world(layer).gs[ctx.rank]
    for turn in range(count):
        own = leaves(layer, group)
        if turn % 2:
            x = group.empty(*own.x.shape)
            x.copy_(own.x.detach())
            x.requires_grad_()
            own = Leaves(x, own.idx, own.w, own.parameters)
            out = fused(layer, group, own, recompute=True)
        else:
            out = WAYS["in window"](layer, group, own)
        for _ in range(group.depth):
            ctx.jitter(1)
            WAYS["in window"](other, group, leaves(other, group, ""))
        if turn % 2:
            own.x.data.fill_(float("nan"))  # the next batch, say: the tensor is the caller's
        out.backward(g)
        check(Result(out, own.grads()), want, TOLERANCE["float32"], f"turn {turn}")


def memory(ctx: RankContext, layer: Layer, way: str, count: int) -> tuple[int, int, int]:
    """Growth over ``count`` training steps: (resident bytes, bytes of the pool in use, objects that only gc finds)."""

    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what was given back doesn't count
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    group = layer.spec.open(ctx)
    for _ in range(30):
        run(layer, group, way)
    gc.collect()
    before = resident(), native.pool_stats()["held_bytes"]
    gc.disable()
    try:
        for _ in range(count):
            run(layer, group, way)
        found = gc.collect()
    finally:
        gc.enable()
    return resident() - before[0], native.pool_stats()["held_bytes"] - before[1], found


# ------------------------------------------------------------------------------------------------------------ bad ends

BAD: dict[str, tuple[str, Callable[[Leaves], dict[str, Any]]]] = {
    "up of another E": ("gate_up_proj", lambda own: {"up": own.parameters[0][:-1]}),  # type: ignore[index]
    "up of another H": ("gate_up_proj", lambda own: {"up": own.parameters[0][:, :, :-1]}),  # type: ignore[index]
    "odd columns": ("gate_up_proj", lambda own: {"up": own.parameters[0][:, :-1]}),  # type: ignore[index]
    "two dimensions": ("gate_up_proj", lambda own: {"up": own.parameters[0][0]}),  # type: ignore[index]
    "down of another I": ("down_proj", lambda own: {"down": own.parameters[1][:, :, :-1]}),  # type: ignore[index]
    "down of another type": ("down_proj", lambda own: {"down": own.parameters[1].double()}),  # type: ignore[union-attr]
    "integers": ("gate_up_proj", lambda own: {"up": own.parameters[0].int()}),  # type: ignore[union-attr]
    "both wider than x": (
        "float64",
        lambda own: {"up": own.parameters[0].double(), "down": own.parameters[1].double()},  # type: ignore[union-attr]
    ),
    "bias of another width": ("bias", lambda own: {"gate_up_bias": torch.zeros(2, 3)}),
    "down bias of another width": ("down_bias", lambda own: {"down_bias": torch.zeros(3)}),
    "down bias of another type": ("down_bias", lambda own: {"down_bias": torch.zeros(2, 6).half()}),
    "up a list": ("gate_up_proj", lambda own: {"up": [1.0]}),
    "down None": ("down_proj", lambda own: {"down": None}),
    "bias a list": ("gate_up_bias", lambda own: {"gate_up_bias": [0.0]}),
    "activation": ("activation", lambda own: {"activation": "swish"}),
    "limit": ("limit", lambda own: {"limit": "high"}),
    "weights of another K": ("topk_weights", lambda own: {"w": torch.zeros(4, 3)}),
    "id out of range": ("topk_idx", lambda own: {"idx": own.idx + 77}),
    "x a list": ("x", lambda own: {"x": [[1.0]]}),
    "tag": ("tag", lambda own: {"tag": 1.5}),
}


def bad_argument(
    ctx: RankContext, what: str, bad_rank: int, changes: dict[str, Any] | None = None
) -> Caught | None:
    """One rank passes something that doesn't go together."""
    layer = Layer((4, 4, 4)[: ctx.world_size], experts=2 * ctx.world_size)
    group = replace(layer.spec, **(changes or {})).open(ctx)
    own = leaves(layer, group)
    arguments: dict[str, Any] = {"x": own.x, "idx": own.idx, "w": own.w}
    arguments.update(zip(("up", "down"), own.parameters, strict=False))
    if ctx.rank == bad_rank:
        arguments.update(BAD[what][1](own))
    copied = group.stats().get("copied_bytes")
    names = ("x", "idx", "w", "up", "down")
    positional = [arguments.pop(name) for name in names]
    call: Any = moe_a2a.moe
    error = caught(lambda: call(*positional, group, **arguments))
    assert ctx.rank != bad_rank or group.stats().get("copied_bytes") == copied, "something was sent"
    same_bits(run(layer, group), run(layer, group), "afterwards")
    return error


def experts_that_fail(ctx: RankContext, changes: dict[str, Any]) -> tuple[Caught | None, int]:
    """The products of rank 1 fail when its rows have come: (its or the others' error, calls that the group made)."""
    layer = Layer((4, 3, 5)[: ctx.world_size], routing="2,4", drop=0.0)
    group = replace(layer.spec, **changes).open(ctx)
    own = leaves(layer, group)
    want = run(layer, group)
    module = sys.modules["moe_a2a.moe"]  # the package has a function of that name
    real = module._experts_raw

    def fail(rows: Tensor, *rest: Any) -> Any:
        if len(rows):
            raise RuntimeError("no memory for products")
        return real(rows, *rest)

    def calls() -> int:
        return int(group.stats()["epoch"] if group._exchange is None else group._exchange._epoch)

    before = calls()
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(module, "_experts_raw", fail)
        error = caught(lambda: fused(layer, group, own))
        made = calls() - before
    same_bits(run(layer, group), want, "afterwards")
    return error, made


def other_weights(
    ctx: RankContext, changes: dict[str, Any], how: str, wants: str, way: str
) -> tuple[Caught | None, Caught | None]:
    """Rank 1 has routing weights of another kind than the others: what forward and backward say.

    Args:
        how: "none", or their dtype.
        wants: what each rank but 0 wants gradients of; rank 0 wants none.
        way: "moe", "apply" or "parts".
    """
    layer = Layer((4, 3, 5)[: ctx.world_size], routing="2,4", drop=0.0)
    group = replace(layer.spec, **changes).open(ctx)
    want = run(layer, group)
    own = leaves(layer, group, wants if ctx.rank else "")
    assert own.w is not None
    if ctx.rank == 1:
        own = replace(own, w=None if how == "none" else own.w.detach().to(getattr(torch, how)))

    def forward() -> Tensor:
        if way == "moe":
            return fused(layer, group, own)
        if way == "apply":
            return moe_a2a.moe_apply(lambda rows, e: rows * 1, own.x, own.idx, own.w, group)
        d = moe_a2a.dispatch(own.x, own.idx, group)
        return moe_a2a.combine(d.x * 1, d, own.w)

    out: list[Tensor] = []
    first = caught(lambda: out.append(forward()))
    second = None
    if out and out[0].requires_grad:
        second = caught(out[0].sum().backward)
    ctx.barrier()
    same_bits(run(layer, group), want, "afterwards")
    return first, second


def raising(ctx: RankContext, where: str, kind: str) -> Caught | None:
    """A callable raises on rank 1; the group goes on."""
    layer = Layer((4, 3, 5)[: ctx.world_size], routing="2,4", drop=0.0)
    group = layer.spec.open(ctx)
    own = leaves(layer, group)
    errors: dict[str, BaseException] = {
        "RuntimeError": RuntimeError("wanted"),
        "KeyboardInterrupt": KeyboardInterrupt("wanted"),
        "PeerAborted": moe_a2a.errors.PeerAborted("wanted"),  # of a call on another group, say
    }

    def fail(rows: Tensor, *_: Any) -> Tensor:
        if ctx.rank == 1:
            raise errors[kind]
        return rows * 1

    if where == "shared":
        error = caught(lambda: fused(layer, group, own, shared=fail))
    elif where == "experts":
        error = caught(lambda: moe_a2a.moe_apply(fail, own.x, own.idx, own.w, group))
    elif where == "experts without gradients":
        with torch.no_grad():
            error = caught(lambda: moe_a2a.moe_apply(fail, own.x, own.idx, own.w, group))
    else:
        error = caught(
            lambda: moe_a2a.moe_apply(lambda r, e: r * 1, own.x, own.idx, own.w, group, shared=fail)
        )
    same_bits(run(layer, group), run(layer, group), "afterwards")
    return error


def shared_calls_the_group(ctx: RankContext) -> None:
    """The callable beside may use the same group: it is one call more that is open."""
    layer = Layer((4, 3, 5)[: ctx.world_size])
    group = layer.spec.open(ctx)
    plain = run(layer, group)
    own, inner = leaves(layer, group), leaves(layer, group)

    def nested(x: Tensor) -> Tensor:
        return fused(layer, group, Leaves(x, inner.idx, inner.w, inner.parameters))

    out = fused(layer, group, own, shared=nested)
    out.backward(make_world(layer).gs[ctx.rank])
    near_twice = Result(out.detach() / 2, [None, own.grads()[1], *own.grads()[2:]])
    check(
        near_twice,
        Result(plain.out.double(), [None, *(None if g is None else g.double() for g in plain.grads[1:])]),
        TOLERANCE["float32"],
        "nested",
    )
    assert own.x.grad is not None and plain.grads[0] is not None
    torch.testing.assert_close(own.x.grad, 2 * plain.grads[0], rtol=1e-5, atol=1e-5)


def mixed_calls(ctx: RankContext) -> list[Caught | None]:
    """moe against dispatch; other dtypes of weights; weights on one rank only."""
    layer = Layer((4,) * ctx.world_size)
    group = layer.spec.open(ctx)
    own = leaves(layer, group)
    found = []
    if ctx.rank == 0:
        found.append(caught(lambda: fused(layer, group, own)))
    else:
        found.append(caught(lambda: moe_a2a.dispatch(own.x, own.idx, group)))
    for other in (None, None if own.w is None else own.w.detach().double()):
        w = own.w if ctx.rank == 0 else other
        mine = Leaves(own.x, own.idx, w, own.parameters)

        def step(mine: Leaves = mine) -> None:
            fused(layer, group, mine).sum().backward()

        found.append(caught(step))
    same_bits(run(layer, group), run(layer, group), "afterwards")
    return found


def fails_in_backward(ctx: RankContext, way: str) -> Caught | None:
    """Rank 1 has no memory in the middle of backward: the others hear why, and the group goes on."""
    layer = Layer((4, 3, 5)[: ctx.world_size], routing="2,4", drop=0.0)
    group = layer.spec.open(ctx)
    own = leaves(layer, group)
    out = WAYS[way](layer, group, own)

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            if way == "parts":
                patch.setattr(sys.modules["moe_a2a.backward"], "wide", no_memory)
            else:
                patch.setattr(sys.modules["moe_a2a.moe"], "_experts_backward_raw", no_memory)
        error = caught(out.sum().backward)
    same_bits(run(layer, group, way), run(layer, group, way), "afterwards")
    return error


def killed(ctx: RankContext, where: str) -> Caught | None:
    """Rank 2 dies inside a step of moe; nobody waits for its end in vain."""
    layer = Layer((4,) * ctx.world_size, experts=2 * ctx.world_size, drop=0.0)
    group = ctx.fresh_group(**replace(layer.spec, timeout=5.0).kwargs(ctx.world_size))
    run(layer, group)
    own = leaves(layer, group)

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        if where == "experts":
            moe_a2a.moe_apply(
                die if ctx.rank == 2 else lambda rows, e: rows * 1, own.x, own.idx, own.w, group
            ).sum().backward()
            return
        out = fused(layer, group, own)
        if ctx.rank == 2 and where == "before backward":
            out.register_hook(die)
        out.sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 2 and where == "in backward":
            patch.setattr(sys.modules["moe_a2a.moe"], "_experts_backward_raw", die)
        error = caught(step)
    again = caught(lambda: run(layer, group))
    assert again is not None and again.seconds < 1.0, again
    return error


# ------------------------------------------------------------------------------------------------- what a review found


def in_the_order_of_experts(ctx: RankContext) -> None:
    """With gradients ``experts`` is called in the experts' order, whichever rows come first: checkpointing goes by places."""
    group = ctx.fresh_group(num_experts=4, top_k=1, max_tokens=512, hidden_size=64, dtype=torch.float32)
    tokens = (
        512 if ctx.rank else 1
    )  # rank 1's many rows for rank 0's first expert are late, the second's are there at once
    x = torch.ones(tokens, 64, requires_grad=True)
    idx = torch.full((tokens, 1), 0 if ctx.rank else 1)
    for _ in range(20):
        called: list[int] = []

        def experts(rows: Tensor, expert: int, called: list[int] = called) -> Tensor:
            called.append(expert)
            return rows * 2

        out = moe_a2a.moe_apply(experts, x, idx, None, group)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert called == [0, 1], called
        assert (grad == 2).all()


def waited_for_in_another_order(ctx: RankContext) -> str:
    """Two dispatches of equal counts, their gradients made in another order on rank 1."""
    group = ctx.fresh_group(num_experts=2, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32, depth=3)
    idx = torch.tensor([[0], [1], [0]])
    xs = [torch.ones(3, 8, requires_grad=True) for _ in range(2)]
    pending = [moe_a2a.dispatch(x, idx, group, async_op=True) for x in xs]
    done = {i: pending[i].wait() for i in ((0, 1), (1, 0))[ctx.rank]}
    outs = [moe_a2a.combine(done[i].x * scale, done[i]) for i, scale in ((0, 1.0), (1, 100.0))]
    try:
        (outs[0].sum() + outs[1].sum()).backward()
    except moe_a2a.errors.MoeA2AError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def frozen_that_recomputes(ctx: RankContext) -> None:
    """Rank 1 wants nothing and asks for recomputing, rank 0 trains and keeps its rows."""
    group = ctx.fresh_group(num_experts=2, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float64)
    torch.manual_seed(1)
    up, down = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(2, 8, 3, dtype=torch.float64)
    own = slice(ctx.rank, ctx.rank + 1)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=ctx.rank == 0)
    idx = torch.tensor([[0], [1], [1], [0]])
    out = moe_a2a.moe(x, idx, None, up[own], down[own], group, recompute=ctx.rank == 1)
    out.sum().backward()
    if ctx.rank == 0:
        leaf = x.detach().requires_grad_()
        gate, value = torch.einsum("twh,th->tw", up[idx[:, 0]], leaf).chunk(2, -1)
        whole = torch.einsum("thi,ti->th", down[idx[:, 0]], torch.nn.functional.silu(gate) * value)
        (want,) = torch.autograd.grad(whole.sum(), leaf)
        assert x.grad is not None and torch.allclose(x.grad, want)
    else:
        assert x.grad is None


def results_of_another_form(ctx: RankContext) -> None:
    """Results narrower than rows, and no rows for the experts of rank 1."""
    group = ctx.fresh_group(num_experts=2, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32)
    x, idx = torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    for wants in (False, True):
        x.requires_grad_(wants)
        out = moe_a2a.moe_apply(lambda rows, expert: rows[:, :3].double() * 2, x, idx, None, group)
        assert out.shape == (3, 3) and out.dtype == torch.float64 and (out == 2).all()
    many = ctx.fresh_group(num_experts=4, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32)
    buffer = torch.empty(8, 8)  # one for the results of all experts
    idx = torch.tensor([[0], [1], [3]])
    with torch.no_grad():
        out = moe_a2a.moe_apply(
            lambda rows, expert: torch.mul(rows, expert + 1, out=buffer[: len(rows)]), x, idx, None, many
        )
    assert torch.equal(out, x * (idx % 2 + 1))


def ends_of_pending(ctx: RankContext) -> dict[str, str]:
    """What a second wait says, and gradients of a call that is waited for under no_grad."""
    said = {}
    group = ctx.fresh_group(num_experts=2, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32)
    x, idx = torch.ones(2, 8, requires_grad=True), torch.tensor([[0], [1]])
    up, down = torch.ones(1, 6, 8), torch.ones(1, 8, 3)
    pending = moe_a2a.moe(x, idx, None, up, down, group, async_op=True)
    with torch.no_grad():
        out = pending.wait()
    out.sum().backward()
    assert x.grad is not None and pending.wait() is out
    (first,) = torch.autograd.grad(moe_a2a.moe(x, idx, None, up, down, group).sum(), x, create_graph=True)
    try:
        first.square().sum().backward()
    except RuntimeError as error:
        said["second"] = str(error)
    ticket = moe_a2a.moe(x, idx, None, up, down, group, async_op=True)
    group.close()
    for what in ("once", "again"):
        try:
            ticket.wait()
        except moe_a2a.errors.MoeA2AError as error:
            said[what] = type(error).__name__
    return said


def handle_written_to(ctx: RankContext) -> str:
    """Offsets of the handle that the operator returned, changed before backward."""
    group = ctx.fresh_group(num_experts=1, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32)
    x, idx = torch.ones(2, 8, requires_grad=True), torch.zeros(2, 1, dtype=torch.int64)
    spec = 256
    out, _, _, handle = torch.ops.moe_a2a.moe(
        x,
        idx,
        None,
        torch.ones(1, 6, 8),
        torch.ones(1, 8, 3),
        None,
        None,
        spec,
        7.0,
        1.7,
        group.name,
        0,
        7,
        True,
    )
    HandleView(handle.data).offsets[1] = 1000  # behind the back of autograd, which sees other writes
    try:
        out.sum().backward()
    except moe_a2a.errors.MoeA2AError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
