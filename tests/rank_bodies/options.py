"""Bodies that use dispatch's options and asynchronous calls wrongly and report what each rank saw.

As in :mod:`rank_bodies.errors`; each body that leaves its group usable ends with a good step on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankContext
from torch import Tensor

import moe_a2a
from moe_a2a import reference
from moe_a2a.exchange import Handle
from rank_bodies.errors import Caught, caught, good_arguments, good_step
from rank_bodies.inputs import GroupSpec, Step, assert_bits, make_inputs
from rank_bodies.steps import check_step


def written_to(handle: Any, word: int) -> Any:
    """The same handle with one of its words changed."""
    meta = handle.meta.clone()
    meta[word] += 1
    return Handle(meta, handle.group)


BAD_OPTIONS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "negative pad_to": lambda handle, other: {"pad_to": -2},
    "pad_to -1": lambda handle, other: {"pad_to": -1},
    "huge pad_to": lambda handle, other: {"pad_to": 2**31},
    "pad_to a string": lambda handle, other: {"pad_to": "7"},
    "align 0": lambda handle, other: {"align": 0},
    "negative align": lambda handle, other: {"align": -4},
    "huge align": lambda handle, other: {"align": 2**20 + 1},
    "align a string": lambda handle, other: {"align": "4"},
    "unknown quantize": lambda handle, other: {"quantize": "int4"},
    "quantize a number": lambda handle, other: {"quantize": 1},
    "both": lambda handle, other: {"routing": handle},
    "neither": lambda handle, other: {"topk_idx": None},
    "routing a tensor": lambda handle, other: {"topk_idx": None, "routing": handle.meta},
    "routing of another group": lambda handle, other: {"topk_idx": None, "routing": other},
    "routing of another T": lambda handle, other: {
        "topk_idx": None,
        "routing": handle,
        "x": torch.zeros(15, 8),
        "topk_weights": None,
    },
    "routing of another K": lambda handle, other: {
        "topk_idx": None,
        "routing": handle,
        "topk_weights": torch.zeros(16, 1),
    },
    "magic written to": lambda handle, other: {"topk_idx": None, "routing": written_to(handle, 0)},
    "tokens written to": lambda handle, other: {"topk_idx": None, "routing": written_to(handle, 3)},
    "K written to": lambda handle, other: {"topk_idx": None, "routing": written_to(handle, 4)},
    "ids written to": lambda handle, other: {
        "topk_idx": None,
        "routing": written_to(handle, int(handle.meta[14])),
    },
}


def bad_option(ctx: RankContext, spec: GroupSpec, what: str, later: bool, bad_rank: int) -> Caught | None:
    """One rank dispatches with one of :data:`BAD_OPTIONS`."""
    group, other = spec.open(ctx), GroupSpec(4, 2, 16, 8, depth=3, transport=spec.transport).open(ctx)
    arguments = good_arguments(ctx)
    handle, foreign = (
        moe_a2a.dispatch(arguments["x"], arguments["topk_idx"], made).handle for made in (group, other)
    )
    if ctx.rank == bad_rank:
        arguments.update(BAD_OPTIONS[what](handle, foreign))
    x_TH, idx_TK = arguments.pop("x"), arguments.pop("topk_idx")

    def call() -> Any:
        if later:
            return moe_a2a.dispatch(x_TH, idx_TK, group, async_op=True, **arguments).wait()
        return moe_a2a.dispatch(x_TH, idx_TK, group, **arguments)

    error = caught(call)
    good_step(ctx, group)
    return error


def pad_too_small(
    ctx: RankContext, spec: GroupSpec, align: int, missing: int, later: bool
) -> list[Caught | None]:
    """All send to expert 1; its owner asks for ``missing`` rows fewer than come, the others for none. Both of two waits."""
    group = spec.open(ctx)
    owner = next(rank for rank in range(ctx.world_size) if 1 in group.expert_range(rank))
    rows = -(-8 * ctx.world_size // align) * align
    mine = make_inputs(Step((8,) * ctx.world_size, 1, 8, routing="one", target=1), ctx.rank, spec.experts)
    options: dict[str, Any] = {"pad_to": rows - missing if ctx.rank == owner else 0, "align": align}
    errors: list[Caught | None] = []
    if later:
        # On the collective transport it is the call that raises.
        made: list[Any] = []
        begun = caught(
            lambda: made.append(moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group, async_op=True, **options))
        )
        errors += [begun] if begun is not None else [caught(made[0].wait), caught(made[0].wait)]
    else:
        errors.append(caught(lambda: moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group, **options)))
    good_step(ctx, group)
    return errors


def mismatch(ctx: RankContext, spec: GroupSpec, what: str, later: bool) -> Caught | None:
    """The last rank differs in one option."""
    group = spec.open(ctx)
    last = ctx.rank == ctx.world_size - 1
    arguments = good_arguments(ctx)
    x_TH, idx_TK = arguments["x"], arguments["topk_idx"]
    same = moe_a2a.dispatch(x_TH, idx_TK, group).handle
    turned = moe_a2a.dispatch(x_TH, torch.zeros_like(idx_TK), group).handle
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "align": ({"align": 2}, {"align": 4}),
        "quantize": ({}, {"quantize": "int8"}),
        "scheme": ({"quantize": "fp8_e4m3"}, {"quantize": "int8"}),
        "new routing": ({"topk_idx": idx_TK}, {"topk_idx": None, "routing": same}),
        "other routing": (
            {"topk_idx": None, "routing": same},
            {"topk_idx": None, "routing": turned},
        ),
    }
    mine, other = cases[what]
    options = {"topk_idx": idx_TK, **(other if last else mine)}
    ids = options.pop("topk_idx")
    if later:
        error = caught(lambda: moe_a2a.dispatch(x_TH, ids, group, async_op=True, **options).wait())
    else:
        error = caught(lambda: moe_a2a.dispatch(x_TH, ids, group, **options))
    good_step(ctx, group)
    return error


def padded_y(ctx: RankContext, spec: GroupSpec) -> Caught | None:
    """y without the rows of padding."""
    group = spec.open(ctx)
    arguments = good_arguments(ctx)
    d = moe_a2a.dispatch(arguments["x"], arguments["topk_idx"], group, align=16, pad_to=200 + ctx.rank)
    assert d.x.shape == (200 + ctx.rank, 8)
    error = caught(lambda: moe_a2a.combine(d.x[: int(d.offsets[-1])], d))
    good_step(ctx, group)
    return error


def pending_ends(ctx: RankContext, spec: GroupSpec) -> list[Caught | None]:
    """[a dispatch waited for too late, a combine waited for too late, a combine of a handle that was begun already,
    bad weights at a combine's wait, the same a second time].
    """
    group = spec.open(ctx)
    arguments = good_arguments(ctx)
    x_TH, idx_TK = arguments["x"], arguments["topk_idx"]
    errors: list[Caught | None] = []
    late = moe_a2a.dispatch(x_TH, idx_TK, group, async_op=True)
    for seed in range(spec.depth):
        good_step(ctx, group, seed)
    errors.append(caught(late.wait))

    d = moe_a2a.dispatch(x_TH, idx_TK, group)
    given = moe_a2a.combine(d.x.clone(), d, async_op=True)
    errors.append(caught(lambda: moe_a2a.combine(d.x, d)))
    for seed in range(spec.depth):
        good_step(ctx, group, seed)
    errors.insert(1, caught(given.wait))

    d = moe_a2a.dispatch(x_TH, idx_TK, group)
    weights = torch.zeros(16, 3) if ctx.rank == 0 else None
    made: list[Any] = []
    begun = caught(lambda: made.append(moe_a2a.combine(d.x, d, weights, async_op=True)))
    errors += [begun] if begun is not None else [caught(made[0].wait), caught(made[0].wait)]
    good_step(ctx, group)
    return errors


def weights_before_wait(ctx: RankContext, spec: GroupSpec) -> None:
    """What comes out of waits are the same objects, and reprs say how far they are."""
    group = spec.open(ctx)
    step = Step((5,) * ctx.world_size, 2, 8, rows="random", seed=4)
    mine = make_inputs(step, ctx.rank, spec.experts)
    pending = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group, topk_weights=mine.weights_TK, async_op=True)
    assert isinstance(pending, moe_a2a.exchange.PendingDispatch) and group.name in repr(pending)
    d = pending.wait()
    assert pending.wait() is d and "received" in repr(pending)
    given = moe_a2a.combine(d.x, d, mine.weights_TK, async_op=True)
    assert isinstance(given, moe_a2a.exchange.PendingCombine) and group.name in repr(given)
    out_TH = given.wait()
    assert given.wait() is out_TH and "received" in repr(given)
    again = moe_a2a.dispatch(mine.x_TH, None, group, mine.weights_TK, routing=d)
    assert_bits(again.x, d.x, "rows")
    assert d.weights is not None and again.weights is not None
    assert_bits(again.weights, d.weights, "weights")
    assert_bits(moe_a2a.combine(again.x, again, mine.weights_TK), out_TH, "combined")
    check_step(ctx, group, step)


def no_memory_on_one(ctx: RankContext, spec: GroupSpec) -> Caught | None:
    """Rank 0 of a collective group has no memory for its rows; the calls after that are in step."""
    group = spec.open(ctx)
    arguments = good_arguments(ctx)

    def no_memory(*_: Any) -> Tensor:
        raise RuntimeError("can't allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 0:
            patch.setattr(reference, "_pack_rows", no_memory)
        error = caught(lambda: moe_a2a.dispatch(arguments["x"], arguments["topk_idx"], group))
    for seed in range(3):
        good_step(ctx, group, seed)
    return error
