"""Bodies of the reported faults that need more than a list of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pool import RankContext
from torch import Tensor

import moe_a2a
from moe_a2a import reference
from rank_bodies.inputs import (
    GroupSpec,
    Step,
    all_inputs,
    assert_bits,
    assert_close_to_truth,
    make_inputs,
    run_experts,
    scale_expert,
    tag_rows,
)
from rank_bodies.steps import check_combine, check_dispatch, check_step, dispatch_step, run_step


def rows_of(source_N3: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """[N, H]: the rows that ``source_N3`` (rank, token, k) names, gathered at once: there may be very many."""
    first_R = torch.tensor([0, *[len(x) for x in xs[:-1]]]).cumsum(0)
    return torch.cat(list(xs))[first_R[source_N3[:, 0]] + source_N3[:, 1]]


def sources(idxs: Sequence[Tensor], local_experts: range) -> tuple[Tensor, Tensor]:
    """([N, 3] (rank, token, k), [E_local] counts) of what the owner of ``local_experts`` has to receive."""
    expert = torch.cat([idx.flatten() for idx in idxs])
    triples = torch.cat(
        [
            torch.stack(
                [
                    torch.full((idx.numel(),), rank),
                    torch.arange(idx.numel()) // idx.shape[1],
                    torch.arange(idx.numel()) % idx.shape[1],
                ],
                dim=1,
            )
            for rank, idx in enumerate(idxs)
        ]
    )
    mine = (expert >= local_experts.start) & (expert < local_experts.stop)
    order = expert[mine].argsort(stable=True)
    counts = torch.bincount(expert[mine] - local_experts.start, minlength=len(local_experts))
    return triples[mine][order], counts


def large_step(ctx: RankContext, spec: GroupSpec, step: Step) -> list[int]:
    """A step of many tokens: every row tag once per slot, in order, and the sum by bits; returns counts."""
    group = ctx.fresh_group(**spec.kwargs(ctx.world_size))
    inputs = all_inputs(step, spec.experts)
    outcome = run_step(group, step, inputs[ctx.rank])
    what = f"rank {ctx.rank}, {step}"
    xs, idxs = [i.x_TH for i in inputs], [i.idx_TK for i in inputs]
    weights = [i.weights_TK for i in inputs if i.weights_TK is not None]
    ys = []
    for rank, local_experts in enumerate(reference.expert_owner(spec.experts, ctx.world_size)):
        source_N3, counts = sources(idxs, local_experts)
        rows_NH = rows_of(source_N3, xs)
        if rank == ctx.rank:
            assert_bits(outcome.dispatched.counts, counts, f"{what}: counts")
            assert_bits(outcome.dispatched.x, rows_NH, f"{what}: rows")
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        ys.append(run_experts(rows_NH, offsets, local_experts, rows_NH.dtype))
    out_TH = reference.combine_reference(ys, idxs, spec.experts, weights)[ctx.rank]
    assert_bits(outcome.out_TH, out_TH, f"{what}: combined")
    result: list[int] = outcome.dispatched.counts.tolist()
    return result


def dispatches_only(ctx: RankContext, spec: GroupSpec, count: int) -> None:
    """Nothing but dispatches of large rows, all handles dropped: only the records keep the ranks apart.

    A combine would hide it when x is overwritten while a slower peer still reads it.
    """
    group = spec.open(ctx)
    tokens = (spec.max_tokens,) * ctx.world_size
    steps = [
        Step(
            tokens,
            spec.top_k,
            spec.hidden,
            spec.dtype,
            weight_dtype=None,
            routing="any",
            rows="turn",
            source=("plain", "window")[seed // 3 % 2],
            seed=seed,
        )
        for seed in range(count)
    ]
    mine = [make_inputs(step, ctx.rank, spec.experts) for step in steps]
    received = [dispatch_step(group, step, own) for step, own in zip(steps, mine, strict=True)]
    for step, d in zip(steps, received, strict=True):
        inputs = all_inputs(step, spec.experts)
        source_N3, counts = sources([i.idx_TK for i in inputs], group.local_experts)
        what = f"rank {ctx.rank} of {ctx.world_size}, dispatch {step.seed}"
        assert_bits(d.counts, counts, f"{what}: counts")
        assert_bits(d.x, rows_of(source_N3, [i.x_TH for i in inputs]), f"{what}: rows")


def changing_tokens(ctx: RankContext, spec: GroupSpec, count: int) -> None:
    """T random on each rank and in each step, one group."""
    group = spec.open(ctx)
    for seed in range(count):
        lengths = torch.randint(
            0, spec.max_tokens + 1, (ctx.world_size,), generator=torch.Generator().manual_seed(seed)
        )
        step = Step(tuple(lengths.tolist()), spec.top_k, spec.hidden, spec.dtype, rows="random", seed=seed)
        outcome = run_step(group, step, make_inputs(step, ctx.rank, spec.experts))
        what = f"rank {ctx.rank}, {step}"
        check_dispatch(group, step, outcome.dispatched, ctx.rank, what)
        check_combine(step, outcome.out_TH, spec.experts, ctx.rank, what)


def run_and_check(
    ctx: RankContext,
    spec: GroupSpec,
    xs: Sequence[Tensor],
    idxs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    expert_fn: Callable[[int, Tensor], Tensor] = scale_expert,
) -> tuple[Any, Tensor]:
    """One step on given inputs of all ranks, compared with the oracle; returns (dispatched, out [T, H])."""
    group = spec.open(ctx)
    r = ctx.rank
    own = None if weights is None else weights[r]
    before = xs[r].clone(), idxs[r].clone(), None if own is None else own.clone()
    d = moe_a2a.dispatch(xs[r], idxs[r], group, topk_weights=own)
    want = reference.dispatch_reference(xs, idxs, spec.experts, weights)[r]
    assert_bits(d.x, want.x_NH, f"rank {r}: rows")
    assert_bits(d.counts, want.counts, f"rank {r}: counts")
    shares = d.x.split(d.counts.tolist()) if len(group.local_experts) else ()
    parts = [expert_fn(e, rows) for e, rows in zip(group.local_experts, shares, strict=True)]
    y_NH = torch.cat(parts) if parts else d.x
    out_TH = moe_a2a.combine(y_NH, d.handle, topk_weights=own)
    assert_bits(
        out_TH, reference.moe_reference(xs, idxs, weights, expert_fn, spec.experts)[r], f"rank {r}: combined"
    )
    assert_bits(xs[r], before[0], f"rank {r}: x was changed")
    assert_bits(idxs[r], before[1], f"rank {r}: topk_idx was changed")
    if own is not None and before[2] is not None:
        assert_bits(own, before[2], f"rank {r}: topk_weights was changed")
    return d, out_TH


def case_04(ctx: RankContext) -> tuple[list[int], list[int], bool]:
    """All ids on rank 0: rank 1 receives nothing, and its empty result still has H columns."""
    spec = GroupSpec(4, 1, 8, 16)
    xs = [tag_rows(r, 8, 16, torch.float32) for r in range(2)]
    idxs = [torch.arange(8)[:, None] % 2 for _ in range(2)]
    d, out_TH = run_and_check(ctx, spec, xs, idxs, [torch.full((8, 1), 0.5)] * 2)
    return list(d.x.shape), d.counts.tolist(), bool(out_TH.isfinite().all())


def case_10(ctx: RankContext, seed: int) -> bool:
    """A third of the slots is -1, with NaN weights."""
    step = Step((8, 8), 2, 16, drop=0.3, rows="random", routing="any", seed=seed)
    inputs = all_inputs(step, 4)
    weights = [i.weights_TK for i in inputs if i.weights_TK is not None]
    assert any(w.isnan().any() for w in weights), "the case needs NaN weights"
    spec = GroupSpec(4, 2, 8, 16)
    _, out_TH = run_and_check(ctx, spec, [i.x_TH for i in inputs], [i.idx_TK for i in inputs], weights)
    return bool(out_TH.isnan().any())


def case_11(ctx: RankContext) -> list[list[int]]:
    """Rows 0 and 5 have only -1 and hold Inf; returns the integer views of their outputs."""
    step = Step((6,) * 4, 4, 16, rows="random", seed=11)
    inputs = all_inputs(step, 8)
    for i in inputs:
        i.x_TH[[0, 5]] = float("inf")
        i.idx_TK[[0, 5]] = -1
    weights = [i.weights_TK for i in inputs if i.weights_TK is not None]
    spec = GroupSpec(8, 4, 6, 16)
    _, out_TH = run_and_check(ctx, spec, [i.x_TH for i in inputs], [i.idx_TK for i in inputs], weights)
    assert out_TH.isfinite().all()
    return [row.view(torch.int32).tolist() for row in out_TH[[0, 5]]]


def case_13(ctx: RankContext) -> Tensor:
    """Row ids [1, 1, 3] with weights .2, .3, .5 in fp64; returns out - (.5 f1 + .5 f3)."""
    spec = GroupSpec(4, 3, 4, 8, "float64")
    rng = torch.Generator().manual_seed(13)
    xs = [torch.randn(4, 8, generator=rng, dtype=torch.float64) for _ in range(2)]
    idxs = [torch.tensor([[1, 1, 3]] * 4) for _ in range(2)]
    weights = [torch.tensor([[0.2, 0.3, 0.5]] * 4, dtype=torch.float64) for _ in range(2)]

    def linear(expert: int, rows: Tensor) -> Tensor:
        return (expert + 1) * rows

    d, out_TH = run_and_check(ctx, spec, xs, idxs, weights, linear)
    assert d.counts.tolist() == ([0, 16] if ctx.rank == 0 else [0, 8])
    x_TH = xs[ctx.rank]
    return out_TH - (0.5 * 2 * x_TH + 0.5 * 4 * x_TH)


def case_14(ctx: RankContext) -> list[Tensor]:
    """The same ids as int32, as int64, and int32 on rank 0 with int64 on rank 1; returns three outputs."""
    spec = GroupSpec(16, 4, 32, 24)
    outs = []
    for kinds in (("int32", "int32"), ("int64", "int64"), ("int32", "int64")):
        inputs = all_inputs(Step((32, 32), 4, 24, rows="random", drop=0.1, seed=14), 16)
        idxs = [i.idx_TK.to(getattr(torch, kind)) for i, kind in zip(inputs, kinds, strict=True)]
        weights = [i.weights_TK for i in inputs if i.weights_TK is not None]
        outs.append(run_and_check(ctx, spec, [i.x_TH for i in inputs], idxs, weights)[1])
    return outs


def strided_inputs(kind: str, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x [16, 32], ids [16, 2], weights [16, 2]) with unusual strides."""
    rng = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    wide_ids = torch.randint(0, 4, (16, 5), generator=rng)
    wide_weights = torch.rand(16, 7, generator=rng)
    x_TH = {
        "every second column": lambda: random(16, 64)[:, ::2],
        "transposed": lambda: random(32, 16).t(),
        "one row expanded": lambda: random(1, 32).expand(16, 32),
        "one column expanded": lambda: random(16, 1).expand(16, 32),
        "rows with a gap": lambda: random(16, 40)[:, 3:35],
        "every third row": lambda: random(48, 32)[::3],
        "middle of three dimensions": lambda: random(16, 3, 32)[:, 1],
        "flipped storage": lambda: random(2, 16, 32)[1],
    }[kind]()
    return x_TH, wide_ids[:, 1:3], wide_weights[:, ::3][:, :2]


def case_16(ctx: RankContext, kind: str, dtype: torch.dtype, ids: torch.dtype) -> None:
    """Strided x, ids and weights (and a strided y) give what contiguous copies give."""
    spec = GroupSpec(4, 2, 16, 32)
    every = [strided_inputs(kind, rank, dtype) for rank in range(2)]
    xs, idxs, weights = [e[0] for e in every], [e[1].to(ids) for e in every], [e[2] for e in every]
    # .to copies into contiguous memory when it converts, so cut the ids out of a wide tensor again.
    idxs = [torch.cat([i, i, i], dim=1)[:, 2:4] for i in idxs]
    assert not xs[ctx.rank].is_contiguous() or kind == "flipped storage"
    assert not idxs[ctx.rank].is_contiguous() and not weights[ctx.rank].is_contiguous()
    _, out_TH = run_and_check(ctx, spec, xs, idxs, weights)
    group = spec.open(ctx)
    d = moe_a2a.dispatch(xs[ctx.rank].contiguous(), idxs[ctx.rank].contiguous(), group)
    y_NH = run_experts(d.x, d.offsets, group.local_experts, d.x.dtype)
    strided_y = torch.empty(32, len(y_NH), dtype=dtype).t().copy_(y_NH)
    again = moe_a2a.combine(strided_y, d.handle, topk_weights=weights[ctx.rank].contiguous())
    assert_bits(again, out_TH, f"rank {ctx.rank}: contiguous copies against {kind}")


def case_20b(ctx: RankContext, most: int, hidden: int) -> int:
    """``most`` rows of rank 0 and one of rank 1 go to rank 1: with 70000 rows of 32 KiB, offsets pass 2**31.

    Returns the number of rows that this rank received.
    """
    tokens = (most, 1)
    group = ctx.fresh_group(
        num_experts=2,
        top_k=1,
        max_tokens=most,
        hidden_size=hidden,
        dtype=torch.bfloat16,
        max_recv_rows=most + 1,
        timeout=600.0,
    )
    x_TH = torch.zeros(tokens[ctx.rank], hidden, dtype=torch.bfloat16)
    x_TH[:, :8] = tag_rows(ctx.rank, tokens[ctx.rank], 8, torch.bfloat16)
    x_TH[:, -8:] = x_TH[:, :8]
    d = moe_a2a.dispatch(x_TH, torch.ones(tokens[ctx.rank], 1, dtype=torch.int64), group)
    received = len(d.x)
    if received:
        want = torch.cat([tag_rows(0, most, 8, torch.bfloat16), tag_rows(1, 1, 8, torch.bfloat16)])
        for row in (0, 1, most // 2 - 1, most // 2, most - 4464, most - 1, most):
            assert_bits(d.x[row, :8], want[row], f"row {row}, first columns")
            assert_bits(d.x[row, -8:], want[row], f"row {row}, last columns")
            assert not d.x[row, 8:-8].any(), f"row {row}"
    out_TH = moe_a2a.combine(d.x, d.handle)
    for token in {0, tokens[ctx.rank] // 2, tokens[ctx.rank] - 1}:
        assert_bits(out_TH[token], x_TH[token], f"token {token} after combine")
    return received


def case_55(ctx: RankContext, last: int) -> list[float]:
    """x = 1, factors 1, 2**-9 and -1 on experts 0, 1 and ``last``: the sum is 2**-9 and needs fp32."""
    spec = GroupSpec(8, 3, 4, 16, "bfloat16")
    factor = {0: 1.0, 1: 2.0**-9, last: -1.0}
    xs = [torch.ones(4, 16, dtype=torch.bfloat16) for _ in range(2)]
    idxs = [torch.tensor([[0, 1, last]] * 4) for _ in range(2)]
    weights = [torch.ones(4, 3) for _ in range(2)]

    def fixed(expert: int, rows: Tensor) -> Tensor:
        return rows * factor.get(expert, 0.0)

    _, out_TH = run_and_check(ctx, spec, xs, idxs, weights, fixed)
    return sorted({float(value) for value in out_TH.flatten()})


def case_55_random(ctx: RankContext, seed: int) -> None:
    """Random K = 8 in bf16, against fp64."""
    step = Step((19, 32), 8, 48, "bfloat16", rows="random", seed=seed)
    spec = GroupSpec(8, 8, 32, 48, "bfloat16")
    check_step(ctx, spec.open(ctx), step)


def case_56_repeat(ctx: RankContext, runs: int) -> list[Tensor]:
    """The same step again and again, with delays and with 1 or 8 threads in torch; returns all outputs."""
    step = Step((40,) * 4, 4, 64, rows="random", routing="any", seed=56)
    spec = GroupSpec(16, 4, 40, 64)
    group, mine = spec.open(ctx), make_inputs(step, ctx.rank, 16)
    outs = []
    try:
        for run in range(runs):
            torch.set_num_threads(8 if run % 2 else 1)
            ctx.jitter(5)
            outs.append(run_step(group, step, mine).out_TH)
    finally:
        torch.set_num_threads(1)
    return outs


def case_56_linear(ctx: RankContext, tokens: tuple[int, ...]) -> Tensor:
    """A share of one global batch through linear experts in fp32; returns out [T, H]."""
    E, H = 8, 32
    rng = torch.Generator().manual_seed(7)
    matrix_EHH = torch.randn(E, H, H, generator=rng) / H**0.5
    x_TH = torch.randn(64, H, generator=rng)
    idx_TK = torch.rand(64, E, generator=rng).topk(3).indices
    weights_TK = torch.rand(64, 3, generator=rng)
    group = GroupSpec(E, 3, 64, H).open(ctx)
    share = slice(sum(tokens[: ctx.rank]), sum(tokens[: ctx.rank + 1]))
    d = moe_a2a.dispatch(x_TH[share], idx_TK[share], group)
    parts = [
        rows @ matrix_EHH[e]
        for e, rows in zip(group.local_experts, d.x.split(d.counts.tolist()), strict=True)
    ]
    out = moe_a2a.combine(torch.cat(parts), d.handle, topk_weights=weights_TK[share])
    truth = reference.moe_truth_fp64(
        [x_TH[share]], [idx_TK[share]], [weights_TK[share]], lambda e, rows: rows @ matrix_EHH[e].double(), E
    )[0]
    # fp32 matrix products of 32 terms on top of the rule's own rounding.
    magnitude = reference.moe_magnitude_fp64(
        [x_TH[share]],
        [idx_TK[share]],
        [weights_TK[share]],
        lambda e, rows: rows.abs() @ matrix_EHH[e].double().abs(),
        E,
    )[0]
    assert_close_to_truth(out, truth, 32 * magnitude, f"rank {ctx.rank}")
    assert isinstance(out, Tensor)
    return out


def case_56_identity(ctx: RankContext, dtype: torch.dtype) -> None:
    """R1 E1 K1 w=1: out is x, to the bit, signs of zero included; NaN stays NaN."""
    group = ctx.group(num_experts=1, top_k=1, max_tokens=33, hidden_size=21, dtype=dtype, max_recv_rows=33)
    x_TH = torch.randn(33, 21, generator=torch.Generator().manual_seed(1)).to(dtype)
    x_TH[3], x_TH[4, ::2], x_TH[5] = -0.0, float("-inf"), 0.0
    rows = moe_a2a.dispatch(x_TH * float("nan"), torch.zeros(33, 1, dtype=torch.int32), group)
    assert moe_a2a.combine(rows.x, rows.handle).isnan().all()
    for weights in (torch.ones(33, 1), torch.ones(33, 1, dtype=torch.float64), None):
        d = moe_a2a.dispatch(x_TH, torch.zeros(33, 1, dtype=torch.int32), group)
        assert_bits(d.x, x_TH, "rows")
        assert_bits(
            moe_a2a.combine(d.x, d.handle, topk_weights=weights), x_TH, f"combined, weights {weights is None}"
        )
