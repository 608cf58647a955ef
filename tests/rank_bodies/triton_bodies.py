"""Ranks that are launches of Triton's kernels and nothing else, alone, in several processes a rank, and beside ranks in
numpy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy_rank
import torch
import torch.distributed as dist
from numpy_rank import NumpyRank, Sizes
from pool import RankContext
from torch import Tensor
from triton_rank import KernelFailed, KernelRank, Memory, open_window, window_memory

from moe_a2a import reference
from moe_a2a.op_host.layout import Format, Quant, WindowLayout, window_layout
from moe_a2a.op_kernel.triton import take
from rank_bodies.inputs import Inputs, Step, all_inputs, assert_bits, dtype_of, run_experts
from rank_bodies.numpy_rank_bodies import code_of, quantised, to_numpy, to_torch

QUANTS = {None: Quant.NONE, "int8": Quant.INT8, "fp8_e4m3": Quant.FP8_E4M3}


@dataclass(frozen=True)
class Case:
    """A group of such ranks, and the steps they make.

    Attributes:
        experts, max_tokens, recv_rows, slots, code_max: of the group; recv_rows None: all rows fit.
        programs: processes of a rank.
        flag_rows: of each rank, by rank mod its length.
        numpy: ranks that are numpy.
        delay_ms: before launches, at most.
        late, late_s: (process, kernel): that process is so many seconds late with that kernel.
    """

    experts: int
    steps: tuple[Step, ...]
    max_tokens: int = 16
    recv_rows: int | None = None
    slots: int = 2
    code_max: int | None = None
    programs: int = 1
    flag_rows: tuple[int, ...] = (0,)
    numpy: tuple[int, ...] = ()
    delay_ms: float = 1.0
    late: tuple[tuple[int, str], ...] = ()
    late_s: float = 0.3

    def delay(self, ctx: RankContext, kernel: str) -> None:
        """Sleep before a launch."""
        if (ctx.rank, kernel) in self.late:
            time.sleep(self.late_s)
        elif self.delay_ms:
            ctx.jitter(self.delay_ms)

    def layout(self, ranks: int) -> WindowLayout:
        K = max(step.top_k for step in self.steps)
        width = max(step.hidden * dtype_of(step.y_dtype or step.dtype).itemsize for step in self.steps)
        return window_layout(
            world_size=ranks,
            num_experts=self.experts,
            top_k=K,
            max_tokens=self.max_tokens,
            row_bytes=width,
            recv_rows=ranks * self.max_tokens * K + 64 if self.recv_rows is None else self.recv_rows,
            slots=self.slots,
            record_format=Format.PORTABLE,
            push=True,
            code_max=self.code_max,
        )


def members(ctx: RankContext, case: Case) -> tuple[int, int, list[Memory], Memory | None, WindowLayout]:
    """This process's rank and program, all windows, and the memory of its rank's programs."""
    rank, program = divmod(ctx.rank, case.programs)
    ranks = ctx.world_size // case.programs
    layout = case.layout(ranks)
    made: list[Any] = []
    if program == 0:
        window, address = window_memory(layout, rank)
        made = [address]
        # What was never written isn't zero in a window that has been used: only codes are.
        for region in ("x", "y", "row", "z"):
            at = getattr(layout, region)
            window.bytes[at : at + layout.regions()[region]] = 0xFF
        if case.programs > 1:
            fd = os.memfd_create("programs")
            os.ftruncate(fd, 1 << 22)
            made.append((os.getpid(), fd))
    told: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(told, made, group=ctx.process_group)
    windows = [open_window(told[r * case.programs][0]) for r in range(ranks)]
    shared = None
    if case.programs > 1:
        pid, fd = told[rank * case.programs][1]
        shared = Memory(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), 1 << 22)
    ctx.barrier()
    return rank, program, windows, shared, layout


def kernel_rank(ctx: RankContext, case: Case, **options: Any) -> KernelRank:
    """This process's part of a rank."""
    rank, program, windows, shared, layout = members(ctx, case)
    return KernelRank(
        rank,
        layout,
        windows,
        shared=shared,
        program=program if case.programs > 1 else None,
        programs=case.programs,
        flag_rows=case.flag_rows[rank % len(case.flag_rows)],
        delay=lambda kernel: case.delay(ctx, kernel),
        **options,
    )


def expected_of(step: Step, inputs: list[Inputs], experts: int, rank: int) -> tuple[Any, Any, list[Tensor]]:
    """What the oracle says: (received, combined, y of all ranks)."""
    xs, idxs = [i.x_TH for i in inputs], [i.idx_TK for i in inputs]
    weights = (
        None if step.weight_dtype is None else [i.weights_TK for i in inputs if i.weights_TK is not None]
    )
    received = reference.dispatch_reference(
        xs, idxs, experts, weights, align=step.align, quantize=step.quantize
    )
    owners = reference.expert_owner(experts, len(xs))
    y_dtype = dtype_of(step.y_dtype or step.dtype)
    ys = [
        run_experts(r.x_NH, r.offsets, owned, y_dtype, r.counts, r.scales)
        for r, owned in zip(received, owners, strict=True)
    ]
    combined = reference.combine_reference(ys, idxs, experts, weights, align=step.align)
    return received[rank], combined[rank], ys


def assert_sums(out: Tensor, expected: Tensor, what: str) -> None:
    """Bit for bit, but one NaN is as good as another: torch's own kernels differ in it."""
    assert torch.equal(out.isnan(), expected.isnan()), f"{what}: NaN elsewhere"
    assert_bits(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0), what)


def scales_like(scales_NS: Tensor, expected: Any) -> Tensor:
    """Scales as the oracle has them: [N] for int8."""
    return scales_NS[:, 0] if expected.scales.dim() == 1 else scales_NS


def exchange(ctx: RankContext, case: Case) -> int:
    """Dispatch and combine of all steps, bit for bit; no barrier between them. Returns how often a launch was repeated."""
    node = kernel_rank(ctx, case)
    for number, step in enumerate(case.steps):
        inputs = all_inputs(step, case.experts)
        mine = inputs[node.me]
        expected, combined, ys = expected_of(step, inputs, case.experts, node.me)
        what = f"rank {node.me}, step {number} {step}"
        got = node.dispatch(
            mine.x_TH, mine.idx_TK, mine.weights_TK, quant=QUANTS[step.quantize], align=step.align
        )
        x_NH = got.x_NH.view(expected.x_NH.dtype)
        assert_bits(x_NH, expected.x_NH, f"{what}: x")
        if step.quantize:
            assert_bits(scales_like(got.scales_NS, expected), expected.scales, f"{what}: scales")
        if expected.weights_N is not None:
            assert_bits(got.weights_N, expected.weights_N, f"{what}: weights")
        out = node.combine(ys[node.me], got.handle, mine.weights_TK)
        assert_sums(out, combined, f"{what}: out")
    ctx.barrier()
    return node.repeats


def pair_rows(ctx: RankContext, case: Case) -> None:
    """The rows as they are, one for each pair, zeros where it was dropped."""
    node = kernel_rank(ctx, case)
    (step,) = case.steps
    inputs = all_inputs(step, case.experts)
    mine = inputs[node.me]
    _, _, ys = expected_of(step, inputs, case.experts, node.me)
    got = node.dispatch(mine.x_TH, mine.idx_TK)
    rows = node.combine(ys[node.me], got.handle, pairs=True)
    alone = [
        replace(i, idx_TK=i.idx_TK.reshape(-1, 1), x_TH=i.x_TH.repeat_interleave(step.top_k, 0))
        for i in inputs
    ]
    want = reference.combine_reference(ys, [i.idx_TK for i in alone], case.experts)
    assert_bits(rows, want[node.me], f"rank {node.me}: rows of pairs")
    ctx.barrier()


# ----------------------------------------------------------------------------------------------------- the fused call


def expert_weights(experts: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(gate_up [E, 2 I, H], down [E, H, I]) of all experts."""
    rng = torch.Generator().manual_seed(5)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=rng, dtype=torch.float64) / hidden**0.5
    down = torch.randn(experts, hidden, inner, generator=rng, dtype=torch.float64) / inner**0.5
    return gate_up.to(dtype), down.to(dtype)


def swiglu_expert(gate_up: Tensor, down: Tensor) -> Callable[[int, Tensor], Tensor]:
    """The expert of the oracle: products and activation rounded where the kernel rounds them."""

    def expert(e: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ gate_up[e].T).chunk(2, -1)
        wide = torch.promote_types(torch.float32, rows.dtype)
        act = torch.nn.functional.silu(gate.to(wide)) * up.to(wide)
        return act.to(rows.dtype) @ down[e].T

    return expert


def assert_near(out: Tensor, expected: Tensor, what: str) -> None:
    """Products are summed in another order, and roundings in between may fall the other way."""
    bound = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[out.dtype]
    torch.testing.assert_close(
        out, expected, rtol=bound, atol=bound, msg=lambda text: f"{what}: {text}", equal_nan=True
    )


def fused_calls(ctx: RankContext, case: Case, launches: tuple[int, ...], vector: bool, inner: int) -> int:
    """Fused calls, against experts of torch; the first step's routing is used again by the last."""
    node = kernel_rank(ctx, case)
    first = None
    for number, step in enumerate(case.steps):
        inputs = all_inputs(step, case.experts)
        mine = inputs[node.me]
        gate_up, down = expert_weights(case.experts, step.hidden, inner, dtype_of(step.dtype))
        weights = (
            None if step.weight_dtype is None else [i.weights_TK for i in inputs if i.weights_TK is not None]
        )
        expert = swiglu_expert(gate_up, down)
        expected = reference.moe_reference(
            [i.x_TH for i in inputs], [i.idx_TK for i in inputs], weights, expert, case.experts
        )[node.me]
        own = slice(node.own.start, node.own.stop)
        out, handle = node.moe(
            mine.x_TH,
            mine.idx_TK,
            mine.weights_TK,
            gate_up[own],
            down[own],
            launches=launches,
            vector=vector,
            again=first if step.again is not None else None,
        )
        assert_near(out, expected, f"rank {node.me}, step {number} {step}")
        first = first or handle
    ctx.barrier()
    return node.repeats


def fused_judged(ctx: RankContext, case: Case) -> list[int]:
    """A fused call whose rows don't fit, and one whose ranks disagree about H: every rank finds out before it has written
    a row.
    """
    node = kernel_rank(ctx, case)
    errors = []
    for step in case.steps:
        mine = all_inputs(step, case.experts)[node.me]
        hidden = step.hidden - (node.me if step.seed else 0)
        gate_up, down = expert_weights(case.experts, hidden, 8, dtype_of(step.dtype))
        own = slice(node.own.start, node.own.stop)
        y_before = node._windows[node.me].bytes[node.layout.y : node.layout.row_flag].clone()
        try:
            x_TH = mine.x_TH[:, :hidden].contiguous()
            node.moe(x_TH, mine.idx_TK, mine.weights_TK, gate_up[own], down[own])
            raise AssertionError("nobody noticed")
        except KernelFailed as failed:
            errors.append(failed.error)
        ctx.barrier()
        assert torch.equal(node._windows[node.me].bytes[node.layout.y : node.layout.row_flag], y_before)
        ctx.barrier()
    return errors


# ---------------------------------------------------------------------------------------------------- beside numpy


def numpy_node(layout: WindowLayout, windows: list[Memory], rank: int) -> NumpyRank:
    """A rank made from the document alone."""
    made = Sizes(
        layout.world_size,
        layout.num_experts,
        layout.top_k,
        layout.max_tokens,
        layout.row_bytes,
        layout.recv_rows,
        layout.slots,
        True,
    )
    views = [window.bytes.numpy().data for window in windows]
    return NumpyRank(views, rank, made, numpy_rank.PORTABLE, 30.0, layout.code_max)


def mixed(ctx: RankContext, case: Case) -> None:
    """Some ranks are kernels, others numpy; these pull and push by chance, with flags of their own."""
    rank, _, windows, _, layout = members(ctx, case)
    if rank in case.numpy:
        node = numpy_node(layout, windows, rank)
    else:
        kernels = KernelRank(
            rank,
            layout,
            windows,
            flag_rows=case.flag_rows[rank % len(case.flag_rows)],
            delay=lambda kernel: case.delay(ctx, kernel),
        )
    for number, step in enumerate(case.steps):
        inputs = all_inputs(step, case.experts)
        mine = inputs[rank]
        expected, combined, ys = expected_of(step, inputs, case.experts, rank)
        y_NH, what = ys[rank], f"rank {rank}, step {number} {step}"
        if rank not in case.numpy:
            got = kernels.dispatch(
                mine.x_TH, mine.idx_TK, mine.weights_TK, quant=QUANTS[step.quantize], align=step.align
            )
            x_NH = got.x_NH.view(expected.x_NH.dtype)
            scales: Tensor | None = got.scales_NS
            weights_N: Tensor | None = got.weights_N
            out = kernels.combine(y_NH, got.handle, mine.weights_TK, fetched=True)
        else:
            time.sleep(ctx.rng.random() * case.delay_ms / 1e3)
            x, scales_in = to_numpy(mine.x_TH), None
            if step.quantize:
                q_TH, scales_in = quantised(mine.x_TH, step.quantize)
                x = q_TH.view(torch.uint8).numpy()
            call = node.begin(
                x,
                mine.idx_TK.numpy(),
                None if mine.weights_TK is None else to_numpy(mine.weights_TK),
                code_of(mine.x_TH),
                code_of(mine.weights_TK),
                push=ctx.rng.random() < 0.5,
                flag_rows=ctx.rng.choice([0, 1, 3]),
                padding=step.align,
                quant=int(QUANTS[step.quantize]),
                scales=scales_in,
            )
            had = node.receive(call)
            x_NH = to_torch(had.x_NH, expected.x_NH.dtype)
            scales = None if had.scales_NS is None else torch.from_numpy(had.scales_NS)
            weights_N = None if had.weights_N is None else to_torch(had.weights_N, expected.weights_N.dtype)
            out = to_torch(
                node.combine(
                    to_numpy(y_NH),
                    had.handle,
                    None if mine.weights_TK is None else to_numpy(mine.weights_TK),
                    code_of(y_NH),
                    code_of(mine.weights_TK),
                    push=ctx.rng.random() < 0.5,
                ),
                y_NH.dtype,
            )
        assert_bits(x_NH, expected.x_NH, f"{what}: x")
        if step.quantize:
            assert scales is not None
            assert_bits(scales_like(scales, expected), expected.scales, f"{what}: scales")
        if expected.weights_N is not None:
            assert weights_N is not None
            assert_bits(weights_N, expected.weights_N, f"{what}: weights")
        assert_sums(out, combined, f"{what}: out")
    ctx.barrier()
    if rank in case.numpy:
        node.detach()


def refused(ctx: RankContext, case: Case) -> int:
    """A numpy owner refuses its rows: the kernels' rank sees the refusal and not its rows."""
    rank, _, windows, _, layout = members(ctx, case)
    (step,) = case.steps
    mine = all_inputs(step, case.experts)[rank]
    if rank in case.numpy:
        node = numpy_node(layout, windows, rank)
        call = node.begin(to_numpy(mine.x_TH), mine.idx_TK.numpy(), None, code_of(mine.x_TH), push=True)
        node.refuse(node.receive(call).handle, "no y")
        error = 0
        ctx.barrier()
        node.detach()
    else:
        kernels = KernelRank(rank, layout, windows)
        got = kernels.dispatch(mine.x_TH, mine.idx_TK)
        try:
            kernels.combine(got.x_NH, got.handle)
            raise AssertionError("a refusal was taken for rows")
        except KernelFailed as failed:
            error = failed.error
        ctx.barrier()
    return error


def missing(ctx: RankContext, case: Case) -> list[int]:
    """Rank 1 never comes: rank 0's launches come back every time, and say who is missing."""
    node = kernel_rank(ctx, case, patience=2.0)
    (step,) = case.steps
    mine = all_inputs(step, case.experts)[node.me]
    found = [0, 0]
    if node.me == 0:
        try:
            node.dispatch(mine.x_TH, mine.idx_TK)
            raise AssertionError("rank 1's record came from nowhere")
        except KernelFailed as failed:
            found = [failed.error, failed.who]
        assert node.repeats > 0
    ctx.barrier()
    return found


# --------------------------------------------------------------------------------------------------------- one rank


def exact_sums(ctx: RankContext) -> None:
    """A sum of one -0.0 is -0.0, subnormals survive, and a value between two of bfloat16 goes to the even one."""
    case = Case(experts=2, steps=(Step(tokens=(4,), top_k=2, hidden=6, dtype="bfloat16"),))
    node = kernel_rank(ctx, case)
    x_TH = torch.tensor([[-0.0], [9.18e-41], [1.0], [1.0078125]]).repeat(1, 6).bfloat16()
    idx_TK = torch.tensor([[0, -1], [-1, 1], [0, 1], [1, 0]])
    weights_TK = torch.tensor([[1.0, float("nan")], [float("nan"), 1.0], [1.0, 2.0**-8], [1.0, 2.0**-8]])
    got = node.dispatch(x_TH, idx_TK, weights_TK)
    out = node.combine(got.x_NH, got.handle, weights_TK)
    (want,) = reference.combine_reference([got.x_NH], [idx_TK], 2, [weights_TK])
    assert_bits(out, want, "sums")
    assert torch.signbit(out[0]).all() and (out[1] != 0).all()
    assert out[2, 0] == 1.0 and out[3, 0] == 1.015625


def lying_list(ctx: RankContext, token: int) -> int:
    """A source's token list names a token that isn't there: nothing is read for it, and the error says whose list it is."""
    case = Case(experts=1, steps=(Step(tokens=(3,), top_k=1, hidden=8),))
    node = kernel_rank(ctx, case)
    listed = node.layout.token_list
    node._windows[0].bytes[listed : listed + 8] = torch.tensor([1, token], dtype=torch.int32).view(
        torch.uint8
    )
    out = torch.zeros(2, 8)
    arguments: dict[str, Any] = {
        "call": torch.zeros(8, dtype=torch.int64),
        "sources": torch.tensor([[node.windows_R[0] + node.layout.x, 512, 3, 0]]),
        "out": out,
        "scales": torch.zeros(1),
        "weights": torch.zeros(1),
        "work": node.work([(0, 0, 2)]),
        "entries": 1,
        "scales_at": 0,
    }
    constants = {"H": 8, "SCALES": 0, "SCALES_P": 1, "WEIGHTED": False, "BR": 2, "BH": 8}
    try:
        node.run(take.pull, arguments, constants)
    except KernelFailed as failed:
        assert failed.who == 0 and not out.any()
        return failed.error
    return 0
