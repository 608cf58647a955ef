"""Experts: SwiGLU on tiles of rows of one expert, ``(silu(x @ gate.T) * (x @ up.T)) @ down.T``.

Gate and up are rounded to the rows' type before the activation, and the activation before the second product, as two
matrix products of torch would round them. Sums are made in float32 (float64 for float64), in another order than torch's.

``VECTOR`` multiplies and adds on the vector cores and rereads the weights for each row: for tiny decode batches on Ascend,
where a kernel that uses the matrix unit can't safely poll.

Example, H = 2, I = 1, gate {1, 0}, up {0, 1}, down {2, 3}: the row {1, 4} has gate 1 and up 4, silu(1) * 4 = 2.924, and
becomes {5.848, 8.772}.
"""

import triton
import triton.language as tl

from .geometry import column
from .push import slot_of_rows
from .rounding import narrow


@triton.jit
def swiglu(gate, up, ELEMENT: tl.constexpr, ACC: tl.constexpr, ROUND: tl.constexpr):
    """silu(gate) * up of rounded gate and up, in ELEMENT."""
    gate = narrow(gate, ELEMENT, ROUND).to(ACC)
    up = narrow(up, ELEMENT, ROUND).to(ACC)
    return narrow(gate / (1 + tl.exp(-gate)) * up, ELEMENT, ROUND)


@triton.jit
def expert_tile(
    x,
    x_stride,
    gate_up,
    down,
    act,
    y,
    n,
    H: tl.constexpr,
    I: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile of n <= BM rows.

    Args:
        x: pointer to the first row. x_stride: int64, in elements. gate_up: pointer to [2 I, H]. down: pointer to [H, I].
        act: pointer to [BM, I] of scratch that only this program uses. y: pointer to the first result, [n, H].
        DOT: type that tl.dot is handed (float32 in the interpreter and on x86, which multiply bfloat16's bits).
    """
    ELEMENT: tl.constexpr = x.dtype.element_ty
    m = tl.arange(0, BM)
    j = tl.arange(0, BN)
    k = tl.arange(0, BK)
    there = (m < n)[:, None]
    if VECTOR:
        for i in range(n):
            row = x + i * x_stride
            for n0 in range(0, I, BN):
                g = tl.zeros((BN,), ACC)
                u = tl.zeros((BN,), ACC)
                for k0 in range(0, H, BK):
                    a = tl.load(row + k0 + k, mask=k < H - k0, other=0.0).to(ACC)[None, :]
                    mask = (j < I - n0)[:, None] & (k < H - k0)[None, :]
                    at = (n0 + j)[:, None] * H + (k0 + k)[None, :]
                    g += tl.sum(a * tl.load(gate_up + at, mask=mask, other=0.0).to(ACC), 1)
                    u += tl.sum(a * tl.load(gate_up + I * H + at, mask=mask, other=0.0).to(ACC), 1)
                tl.store(act + n0 + j, swiglu(g, u, ELEMENT, ACC, ROUND), mask=j < I - n0)
            tl.debug_barrier()
            for n0 in range(0, H, BN):
                s = tl.zeros((BN,), ACC)
                for k0 in range(0, I, BK):
                    a = tl.load(act + k0 + k, mask=k < I - k0, other=0.0).to(ACC)[None, :]
                    mask = (j < H - n0)[:, None] & (k < I - k0)[None, :]
                    at = (n0 + j)[:, None] * I + (k0 + k)[None, :]
                    s += tl.sum(a * tl.load(down + at, mask=mask, other=0.0).to(ACC), 1)
                tl.store(y + i * H + n0 + j, narrow(s, ELEMENT, ROUND), mask=j < H - n0)
            tl.debug_barrier()
    else:
        rows = x + m[:, None] * x_stride
        hidden = act + m[:, None] * I
        for n0 in range(0, I, BN):
            g = tl.zeros((BM, BN), ACC)
            u = tl.zeros((BM, BN), ACC)
            for k0 in range(0, H, BK):
                a = tl.load(rows + (k0 + k)[None, :], mask=there & (k < H - k0)[None, :], other=0.0).to(DOT)
                mask = (j < I - n0)[:, None] & (k < H - k0)[None, :]
                at = (n0 + j)[:, None] * H + (k0 + k)[None, :]
                g = tl.dot(a, tl.trans(tl.load(gate_up + at, mask=mask, other=0.0)).to(DOT), g)
                u = tl.dot(a, tl.trans(tl.load(gate_up + I * H + at, mask=mask, other=0.0)).to(DOT), u)
            tl.store(
                hidden + (n0 + j)[None, :], swiglu(g, u, ELEMENT, ACC, ROUND), mask=(j < I - n0)[None, :]
            )
        tl.debug_barrier()
        for n0 in range(0, H, BN):
            s = tl.zeros((BM, BN), ACC)
            for k0 in range(0, I, BK):
                a = tl.load(hidden + (k0 + k)[None, :], mask=(k < I - k0)[None, :], other=0.0).to(DOT)
                mask = (j < H - n0)[:, None] & (k < I - k0)[None, :]
                at = (n0 + j)[:, None] * I + (k0 + k)[None, :]
                s = tl.dot(a, tl.trans(tl.load(down + at, mask=mask, other=0.0)).to(DOT), s)
            out = y + m[:, None] * H + (n0 + j)[None, :]
            tl.store(out, narrow(s, ELEMENT, ROUND), mask=there & (j < H - n0)[None, :])
        tl.debug_barrier()


@triton.jit
def experts(
    windows,
    layout,
    call,
    x,
    x_stride,
    matrix,
    matrix_stride,
    gate_up,
    down,
    act,
    y,
    first_expert,
    first,
    last,
    align,
    me,
    program0,
    programs,
    R: tl.constexpr,
    RP: tl.constexpr,
    ELP: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    PARTS: tl.constexpr,
    IN_WINDOW: tl.constexpr,
    VECTOR: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Computes the rows of local experts first..last - 1. It polls nothing: its rows are there when it is launched.

    Args:
        x: [N, H], rows in final order. x_stride: int64, elements from row to row; IN_WINDOW: x gives only the type, the
            rows stand in the own window's y, in the call's slot.
        matrix: int32, send counts; row r begins at r * matrix_stride (int32).
        gate_up: [E_local, 2 I, H]. down: [E_local, H, I]. act: [programs, BM, I], scratch. y: [N, H], written.
        first_expert: this rank's first expert. first, last: local indices. align: each expert's rows are padded to a
            multiple of this.
        PARTS: parts that an expert's tiles are dealt into, each of them one program's.
        The others: see :func:`expert_tile`.
    """
    program = tl.program_id(0) + program0
    if IN_WINDOW:
        start = tl.load(windows + me) + slot_of_rows(layout, call, True)
        rows = start.to(tl.pointer_type(x.dtype.element_ty))
    else:
        rows = x
    scratch = act + program.to(tl.int64) * (BM * I)
    for q in range(program, (last - first) * PARTS, programs):
        local = first + q // PARTS
        by_source, begin = column(matrix, matrix_stride, first_expert, local, align, R, RP, ELP)
        total = tl.sum(by_source, 0)
        weights = local.to(tl.int64) * (H * I)
        for r0 in range(q % PARTS * BM, total, PARTS * BM):
            row = (begin + r0).to(tl.int64)
            expert_tile(
                rows + row * x_stride,
                x_stride,
                gate_up + weights * 2,
                down + weights,
                scratch,
                y + row * H,
                tl.minimum(total - r0, BM),
                H,
                I,
                VECTOR,
                ACC,
                DOT,
                ROUND,
                BM,
                BN,
                BK,
            )
