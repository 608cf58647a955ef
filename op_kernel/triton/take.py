"""Await rows and take them: out of the own window what sources pushed, out of their windows what they left to be pulled.

Example, call n = 3 (code 3): the entry {rank 0, row 10, 5 rows, group 2, out row 12} waits for code 3 at the row flags of
rows 11, 13 and 14 (groups of two, the last one shorter), then copies rows 10..14 of the own slot to rows 12..16 of ``out``.
"""

import triton
import triton.language as tl

from .push import gather_rows, slot_of_rows
from .signal import leave, poll, resumed, words_at
from .words import (
    AT_ROW_FLAG,
    AT_ROW_FLAG_SLOT_STRIDE,
    AT_ROW_FLAG_STRIDE,
    AT_TOKEN_LIST,
    AT_TOKEN_LIST_SLOT_STRIDE,
    AT_WEIGHT,
    AT_WEIGHT_SLOT_STRIDE,
    CALL_CODE,
    CALL_RECORD_SLOT,
    CALL_SLOT,
    ERROR_ROWS,
    ERROR_TOKEN,
    PHASE_END,
    PHASE_ROWS,
    WORK_GROUP,
    WORK_OUT,
    WORK_PLACE,
    WORK_RANK,
    WORK_ROW,
    WORK_ROWS,
    WORK_WORDS,
)


@triton.jit
def await_run(flags, flag_stride, code, first, last, rows, group, polls, SYS: tl.constexpr):
    """Awaits rows first..last - 1 of a run of ``rows`` rows whose groups have ``group`` rows (0: one group).

    Args:
        flags: int64, address of the row flag of the run's first row.

    Returns:
        int32: 1, or 0 when the polls ran out.
    """
    size = tl.where(group == 0, rows, group)
    seen = 1
    for g in range(first // size, (last - 1) // size + 1):
        if seen != 0:
            row = tl.minimum((g + 1) * size, rows) - 1
            seen = poll(words_at(flags + row * flag_stride), code, code, polls, SYS)
    return tl.where(seen == 0, 0, 1)


@triton.jit
def copy_rows(x, x_stride, out, out_stride, n, H: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """Copies n rows of H elements; strides (int64) in elements."""
    i = tl.arange(0, BR)
    c = tl.arange(0, BH)
    for i0 in range(0, n, BR):
        ins = x + i0 * x_stride
        outs = out + i0 * out_stride
        for c0 in range(0, H, BH):
            mask = (i < n - i0)[:, None] & (c < H - c0)[None, :]
            value = tl.load(ins + i[:, None] * x_stride + (c0 + c)[None, :], mask=mask)
            tl.store(outs + i[:, None] * out_stride + (c0 + c)[None, :], value, mask=mask)


@triton.jit
def take(
    windows,
    layout,
    call,
    out,
    scales,
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
    polls,
    H: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_P: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FUSED: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits rows that were pushed, and copies them out of the own slot.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``. call: int64 [8], the CALL words.
        out: [N, H] of the type that travels (int8 when quantised). scales: float32 [N, SCALES]. weights: [N].
        work: int32 [entries, 8]: RANK the source, ROWS, ROW the first row in the own slot (of this wave), OUT the first
            row of ``out``, GROUP how many rows share a flag, 0 all.
        state: int32 [programs, 8], the STATE words; zeros at first. Errors: ERROR_ROWS.
        stride: int64, bytes from row to row in the window. scales_at, weight_at: int64, bytes from a row's begin.
        me: this rank. program0, programs: this launch's programs are program0, ... of ``programs`` that share the work.
        polls: int32, looks at a code before a program gives up.
        SCALES: scales of a row, 0 none; SCALES_P the next power of two. WEIGHTED: a weight travels beside each row.
        FUSED: the rows stand in the slot of y and not of row.
        BR, BH: rows and columns that move together, powers of two, BR at least 2. SYS: see signal.py.
    """
    program = tl.program_id(0) + program0
    BITS: tl.constexpr = out.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    code = tl.load(call + CALL_CODE).to(tl.int32)
    slot = tl.load(call + CALL_SLOT)
    mine = tl.load(windows + me)
    region = mine + slot_of_rows(layout, call, FUSED)
    flags = mine + tl.load(layout + AT_ROW_FLAG) + slot * tl.load(layout + AT_ROW_FLAG_SLOT_STRIDE)
    flag_stride = tl.load(layout + AT_ROW_FLAG_STRIDE)
    done = resumed(state, program, PHASE_ROWS)
    error = 0
    who = 0
    for q in range(program + done * programs, entries, programs):
        if error == 0:
            entry = work + q * WORK_WORDS
            n = tl.load(entry + WORK_ROWS)
            row = tl.load(entry + WORK_ROW).to(tl.int64)
            group = tl.load(entry + WORK_GROUP)
            if await_run(flags + row * flag_stride, flag_stride, code, 0, n, n, group, polls, SYS) == 0:
                error = ERROR_ROWS
                who = tl.load(entry + WORK_RANK)
            else:
                at = region + row * stride
                to = tl.load(entry + WORK_OUT).to(tl.int64)
                rows = at.to(tl.pointer_type(out.dtype.element_ty))
                copy_rows(rows, stride // ITEM, out + to * H, H, n, H, BR, BH)
                if SCALES > 0:
                    beside = (at + scales_at).to(tl.pointer_type(tl.float32))
                    copy_rows(beside, stride // 4, scales + to * SCALES, SCALES, n, SCALES, BR, SCALES_P)
                if WEIGHTED:
                    WEIGHT_BITS: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth
                    WEIGHT: tl.constexpr = WEIGHT_BITS // 8
                    weight = (at + weight_at).to(tl.pointer_type(weights.dtype.element_ty))
                    copy_rows(weight, stride // WEIGHT, weights + to, 1, n, 1, BR, 1)
                done += 1
    leave(state, program, error, tl.where(error == 0, PHASE_END, PHASE_ROWS), done, who)


@triton.jit
def pull(
    windows,
    layout,
    call,
    sources,
    out,
    scales,
    weights,
    work,
    state,
    entries,
    scales_at,
    program0,
    programs,
    H: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_P: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    """Gathers rows that sources left in their windows: x, and for each place of their token list which row of it.

    Needs no polls: the sources' records, which are here, say that all of it is there.

    Args:
        sources: int64 [R, 4]: address of x as the source's record says, bytes from one row to the next, T, 0.
        work: int32 [entries, 8]: RANK the source, PLACE the first place in its token list, ROWS, OUT the first row of ``out``.
        state: int32 [programs, 8], the STATE words. Errors: ERROR_TOKEN, a list names a token that isn't there.
        The others: see :func:`take`.
    """
    program = tl.program_id(0) + program0
    BITS: tl.constexpr = out.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    slot = tl.load(call + CALL_RECORD_SLOT)
    lists = tl.load(layout + AT_TOKEN_LIST) + slot * tl.load(layout + AT_TOKEN_LIST_SLOT_STRIDE)
    weight_lists = tl.load(layout + AT_WEIGHT) + slot * tl.load(layout + AT_WEIGHT_SLOT_STRIDE)
    i = tl.arange(0, BR)
    error = 0
    who = 0
    for q in range(program, entries, programs):
        if error == 0:
            entry = work + q * WORK_WORDS
            source = tl.load(entry + WORK_RANK)
            place = tl.load(entry + WORK_PLACE).to(tl.int64)
            n = tl.load(entry + WORK_ROWS)
            to = tl.load(entry + WORK_OUT).to(tl.int64)
            x = tl.load(sources + source * 4)
            stride = tl.load(sources + source * 4 + 1)
            window = tl.load(windows + source)
            tokens = words_at(window + lists + place * 4)
            largest = 0
            smallest = 0
            for i0 in range(0, n, BR):
                token = tl.load(tokens + i0 + i, mask=i < n - i0, other=0)
                largest = tl.maximum(largest, tl.max(token, 0))
                smallest = tl.minimum(smallest, tl.min(token, 0))
            if (largest >= tl.load(sources + source * 4 + 2)) | (smallest < 0):
                error = ERROR_TOKEN
                who = source
            else:
                rows = x.to(tl.pointer_type(out.dtype.element_ty))
                gather_rows(rows, stride // ITEM, tokens, out + to * H, H, n, H, BR, BH)
                if SCALES > 0:
                    beside = (x + scales_at).to(tl.pointer_type(tl.float32))
                    gather_rows(
                        beside, stride // 4, tokens, scales + to * SCALES, SCALES, n, SCALES, BR, SCALES_P
                    )
                if WEIGHTED:
                    WEIGHT_BITS: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth
                    WEIGHT: tl.constexpr = WEIGHT_BITS // 8
                    listed = (window + weight_lists + place * WEIGHT).to(
                        tl.pointer_type(weights.dtype.element_ty)
                    )
                    copy_rows(listed, 1, weights + to, 1, n, 1, BR, 1)
    leave(state, program, error, PHASE_END, 0, who)
