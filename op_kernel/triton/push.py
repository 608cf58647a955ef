"""Pack + put: a source writes each of its rows once, at its final place in the owner's window, then the code of its group.

A work-list entry is one group (or a whole run): rows of one expert that share a flag, as wide as the host likes. Its rows
go out several at a time (BR), all columns of them when BH allows; then one barrier, then one flag at the group's last row.

Example, R = 2, NS = 2, call n = 3 (slot 1, code 3): rank 0 sends tokens 4 and 7 to expert 5, whose run begins at row 10 of
rank 1. The entry {rank 1, place p, 2 rows, row 10} reads ``tokens[p : p + 2] = {4, 7}``, writes x[4] and x[7] to rows 10
and 11 of slot 1 in rank 1's window, and the code 3 at the row flag of row 11.
"""

import triton
import triton.language as tl

from .geometry import column, run_of
from .rounding import divisor_of, encode_fp8, encode_int8, magnitude
from .signal import leave, resumed, signal, words_at
from .words import (
    AT_ROW,
    AT_ROW_FLAG,
    AT_ROW_FLAG_SLOT_STRIDE,
    AT_ROW_FLAG_STRIDE,
    AT_ROW_SLOT_STRIDE,
    AT_Y,
    AT_Y_SLOT_STRIDE,
    CALL_CODE,
    CALL_SLOT,
    PHASE_END,
    PHASE_PUSH,
    QUANT_BLOCK,
    QUANT_INT8,
    QUANT_NONE,
    WORK_EXPERT,
    WORK_FIRST_EXPERT,
    WORK_PLACE,
    WORK_RANK,
    WORK_ROW,
    WORK_ROWS,
    WORK_WORDS,
)


@triton.jit
def gather_rows(x, x_stride, tokens, out, out_stride, n, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """Copies rows ``tokens[0:n]`` of x to rows 0..n - 1 of out; H elements each, strides (int64) in elements."""
    i = tl.arange(0, BR)
    c = tl.arange(0, BH)
    for i0 in range(0, n, BR):
        token = tl.load(tokens + i0 + i, mask=i < n - i0, other=0).to(tl.int64)
        rows = out + i0 * out_stride
        for c0 in range(0, H, BH):
            mask = (i < n - i0)[:, None] & (c < H - c0)[None, :]
            value = tl.load(x + token[:, None] * x_stride + (c0 + c)[None, :], mask=mask)
            tl.store(rows + i[:, None] * out_stride + (c0 + c)[None, :], value, mask=mask)


@triton.jit
def quantise_rows(
    x,
    tokens,
    to,
    stride,
    scales_at,
    n,
    QUANT: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    GPU: tl.constexpr,
):
    """Rows ``tokens[0:n]`` of x [T, H] to address ``to`` (int64), one every ``stride`` bytes (int64), in one byte a value,
    with the float32 scales ``scales_at`` bytes behind a row's begin.
    """
    i = tl.arange(0, BR)
    for i0 in range(0, n, BR):
        token = tl.load(tokens + i0 + i, mask=i < n - i0, other=0).to(tl.int64)
        first = to + i0 * stride
        rows = first.to(tl.pointer_type(tl.int8))
        scales = words_at(first + scales_at)
        if QUANT == QUANT_INT8:
            c = tl.arange(0, BH)
            amax = tl.zeros((BR,), tl.int32)
            for c0 in range(0, H, BH):
                mask = (i < n - i0)[:, None] & (c < H - c0)[None, :]
                value = tl.load(x + token[:, None] * H + (c0 + c)[None, :], mask=mask, other=0.0)
                amax = tl.maximum(amax, tl.max(magnitude(value.to(tl.float32)), 1))
            divisor, scale = divisor_of(amax, 127.0, GPU)
            tl.store(scales + i * (stride // 4), scale, mask=i < n - i0)
            for c0 in range(0, H, BH):
                mask = (i < n - i0)[:, None] & (c < H - c0)[None, :]
                value = tl.load(x + token[:, None] * H + (c0 + c)[None, :], mask=mask, other=0.0)
                q = encode_int8(value.to(tl.float32), divisor[:, None], GPU)
                tl.store(rows + i[:, None] * stride + (c0 + c)[None, :], q, mask=mask)
        else:
            c = tl.arange(0, QUANT_BLOCK)
            for c0 in range(0, H, QUANT_BLOCK):
                mask = (i < n - i0)[:, None] & (c < H - c0)[None, :]
                value = tl.load(x + token[:, None] * H + (c0 + c)[None, :], mask=mask, other=0.0).to(
                    tl.float32
                )
                divisor, scale = divisor_of(tl.max(magnitude(value), 1), 448.0, GPU)
                tl.store(scales + i * (stride // 4) + c0 // QUANT_BLOCK, scale, mask=i < n - i0)
                q = encode_fp8(value, divisor[:, None], GPU)
                tl.store(rows + i[:, None] * stride + (c0 + c)[None, :], q, mask=mask)


@triton.jit
def weigh_rows(weights, to, stride, n, BR: tl.constexpr):
    """Writes ``weights[0:n]`` beside rows, one every ``stride`` bytes from address ``to``."""
    BITS: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    i = tl.arange(0, BR)
    for i0 in range(0, n, BR):
        value = tl.load(weights + i0 + i, mask=i < n - i0)
        rows = (to + i0 * stride).to(tl.pointer_type(weights.dtype.element_ty))
        tl.store(rows + i * (stride // ITEM), value, mask=i < n - i0)


@triton.jit
def slot_of_rows(layout, call, FUSED: tl.constexpr):
    """Bytes from a window's start to the slot that the call's rows are pushed into."""
    slot = tl.load(call + CALL_SLOT)
    if FUSED:
        offset = tl.load(layout + AT_Y) + slot * tl.load(layout + AT_Y_SLOT_STRIDE)
    else:
        offset = tl.load(layout + AT_ROW) + slot * tl.load(layout + AT_ROW_SLOT_STRIDE)
    return offset


@triton.jit
def push_phase(
    windows,
    layout,
    call,
    x,
    tokens,
    weights,
    work,
    entries,
    matrix,
    matrix_stride,
    stride,
    scales_at,
    weight_at,
    me,
    program,
    programs,
    done,
    R: tl.constexpr,
    RP: tl.constexpr,
    ELP: tl.constexpr,
    H: tl.constexpr,
    FUSED: tl.constexpr,
    PLACED: tl.constexpr,
    QUANT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    GPU: tl.constexpr,
    SYS: tl.constexpr,
):
    """Writes the rows of this program's entries, and their flags. Arguments: see :func:`push`."""
    BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    code = tl.load(call + CALL_CODE).to(tl.int32)
    slot = tl.load(call + CALL_SLOT)
    region = slot_of_rows(layout, call, FUSED)
    flags = tl.load(layout + AT_ROW_FLAG) + slot * tl.load(layout + AT_ROW_FLAG_SLOT_STRIDE)
    for q in range(program + done * programs, entries, programs):
        entry = work + q * WORK_WORDS
        place = tl.load(entry + WORK_PLACE)
        n = tl.load(entry + WORK_ROWS)
        row = tl.load(entry + WORK_ROW).to(tl.int64)
        if not PLACED:
            first = tl.load(entry + WORK_FIRST_EXPERT)
            rows, begin = column(
                matrix, matrix_stride, first, tl.load(entry + WORK_EXPERT) - first, 1, R, RP, ELP
            )
            before, _ = run_of(rows, me, RP)
            row += begin + before
        window = tl.load(windows + tl.load(entry + WORK_RANK))
        to = window + region + row * stride
        if QUANT == QUANT_NONE:
            rows_to = to.to(tl.pointer_type(x.dtype.element_ty))
            gather_rows(x, H, tokens + place, rows_to, stride // ITEM, n, H, BR, BH)
        else:
            quantise_rows(x, tokens + place, to, stride, scales_at, n, QUANT, H, BR, BH, GPU)
        if WEIGHTED:
            weigh_rows(weights + place, to + weight_at, stride, n, BR)
        flag = window + flags + (row + n - 1) * tl.load(layout + AT_ROW_FLAG_STRIDE)
        signal(words_at(flag), code, SYS)


@triton.jit
def push(
    windows,
    layout,
    call,
    x,
    tokens,
    weights,
    work,
    state,
    entries,
    stride,
    scales_at,
    weight_at,
    me,
    program0,
    programs,
    H: tl.constexpr,
    FUSED: tl.constexpr,
    QUANT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    GPU: tl.constexpr,
    SYS: tl.constexpr,
):
    """Writes rows into their owners' windows. Only when all records of the call are there and go together.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``. call: int64 [8], the CALL words.
        x: [T, H]. tokens: int32 [P], the kept pairs' tokens in (expert, token, k) order.
        weights: [P] in the same order, as wide as they travel; any pointer when not WEIGHTED.
        work: int32 [entries, 8]: RANK the owner, PLACE the first of ``tokens``, ROWS, ROW the final row in the owner's
            slot (of this wave).
        state: int32 [programs, 8], the STATE words.
        stride: int64, bytes from row to row in the window. scales_at, weight_at: int64, bytes from a row's begin.
        me: this rank. program0, programs: this launch's programs are program0, ... of ``programs`` that share the work.
        FUSED: into the owners' y and not row. QUANT: one of the QUANT numbers. WEIGHTED: a weight travels beside each row.
        BR, BH: rows and columns that move together, powers of two, BR at least 2.
        GPU: quantise with exact division there. SYS: see signal.py.
    """
    program = tl.program_id(0) + program0
    done = resumed(state, program, PHASE_PUSH)
    push_phase(
        windows,
        layout,
        call,
        x,
        tokens,
        weights,
        work,
        entries,
        work,
        0,
        stride,
        scales_at,
        weight_at,
        me,
        program,
        programs,
        done,
        1,
        1,
        1,
        H,
        FUSED,
        True,
        QUANT,
        WEIGHTED,
        BR,
        BH,
        GPU,
        SYS,
    )
    leave(state, program, 0, PHASE_END, 0, 0)
