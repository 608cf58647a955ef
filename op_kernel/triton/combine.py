"""Combine: await the owners' cells, fetch what an owner left in its y, and sum K rows a token.

The sum is exact about its order: with acc the wider of float32 and y's type a term is acc(weight) * acc(row), rounded;
terms are added in k order, each addition rounded; the result is rounded to y's type once. The launch forbids fused
multiply-adds where the compiler would make them.

Example, K = 2: token 3 has z rows 6 and 9 and weights 0.5 and 0.25: out[3] = 0.5 * z[6] + 0.25 * z[9]. With place {6, -1}:
0.5 * z[6]. With {-1, -1}: 0.
"""

import triton
import triton.language as tl

from .give import cell_offset, z_offset
from .rounding import narrow, widen
from .signal import leave, poll, resumed, words_at
from .take import copy_rows
from .words import (
    AT_CELL_BODY,
    AT_CELL_CODE,
    CALL_CODE,
    CELL_DTYPE,
    CELL_HIDDEN,
    CELL_MODE,
    CELL_STRIDE,
    CELL_Y_HI,
    CELL_Y_LO,
    ERROR_CELL,
    ERROR_CELL_JUDGE,
    ERROR_REFUSED,
    MODE_PULL,
    MODE_PUSH,
    PHASE_COMBINE,
    PHASE_END,
    WORK_PLACE,
    WORK_RANK,
    WORK_ROW,
    WORK_ROWS,
    WORK_WORDS,
)


@triton.jit
def word_of(block, word):
    """One of a block of eight int32."""
    return tl.sum(tl.where(tl.arange(0, 8) == word, block, 0), 0)


@triton.jit
def cells_phase(
    windows,
    layout,
    call,
    cell,
    owned,
    me,
    done,
    polls,
    FETCHED: tl.constexpr,
    R: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits the cells of all owners of this rank's rows, from owner ``done`` on, and compares them with ``cell``, the own one.

    FETCHED: rows of owners whose cells say pull have been fetched already.

    Returns:
        (error, owners that are through, the owner concerned)
    """
    code = tl.load(call + CALL_CODE).to(tl.int32)
    mine = tl.load(windows + me)
    dtype = tl.load(cell + CELL_DTYPE)
    hidden = tl.load(cell + CELL_HIDDEN)
    error = 0
    who = 0
    through = done
    for owner in range(done, R):
        if error == 0:
            if tl.load(owned + owner) > 0:
                at = mine + cell_offset(layout, call, owner)
                seen = poll(words_at(at + tl.load(layout + AT_CELL_CODE)), code, -code, polls, SYS)
                if seen == 0:
                    error = ERROR_CELL
                else:
                    if seen != code:
                        error = ERROR_REFUSED
                    else:
                        body = tl.load(words_at(at + tl.load(layout + AT_CELL_BODY)) + tl.arange(0, 8))
                        fits = (word_of(body, CELL_DTYPE) == dtype) & (word_of(body, CELL_HIDDEN) == hidden)
                        if not FETCHED:
                            fits = fits & (word_of(body, CELL_MODE) == MODE_PUSH)
                        error = tl.where(fits, error, ERROR_CELL_JUDGE)
            if error == 0:
                through += 1
            else:
                who = owner
    return error, through, who


@triton.jit
def sum_phase(
    windows,
    layout,
    call,
    place,
    weights,
    out,
    T,
    stride,
    me,
    program,
    programs,
    K: tl.constexpr,
    H: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACC: tl.constexpr,
    ROUND: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Sums the rows of this program's tokens. Arguments: see :func:`combine`."""
    ELEMENT: tl.constexpr = out.dtype.element_ty
    BITS: tl.constexpr = out.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    z = (tl.load(windows + me) + z_offset(layout, call)).to(tl.pointer_type(ELEMENT))
    i = tl.arange(0, BT)
    c = tl.arange(0, BH)
    row_stride = stride // ITEM
    for t0 in range(program * BT, T, programs * BT):
        token = t0 + i
        there = token < T
        for c0 in range(0, H, BH):
            mask = there[:, None] & (c < H - c0)[None, :]
            acc = tl.zeros((BT, BH), ACC)
            started = tl.zeros((BT,), tl.int32)
            for k in range(K):
                row = tl.load(place + token * K + k, mask=there, other=-1)
                # Of a dropped pair some row is read, and then not used: a mask that depends on data would make a copy of
                # each element.
                source = tl.maximum(row, 0).to(tl.int64)
                term = tl.load(z + source[:, None] * row_stride + (c0 + c)[None, :], mask=mask, other=0.0)
                term = widen(term, ACC, ROUND)
                if WEIGHTED:
                    weight = tl.load(weights + token * K + k, mask=there, other=0.0)
                    weight = widen(weight, ACC, ROUND)
                    term = weight[:, None] * term
                kept = (row >= 0)[:, None]
                # The first term begins the sum: 0 + -0 would be +0.
                total = tl.where((started > 0)[:, None], acc + term, term)
                acc = tl.where(kept, total, acc)
                started = tl.where(row >= 0, 1, started)
            tl.store(
                out + token.to(tl.int64)[:, None] * H + (c0 + c)[None, :],
                narrow(acc, ELEMENT, ROUND),
                mask=mask,
            )


@triton.jit
def fetch(
    windows,
    layout,
    call,
    y,
    cell,
    owned,
    work,
    state,
    entries,
    stride,
    me,
    program0,
    programs,
    polls,
    R: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits the owners' cells and copies what owners left in their y into the own z: after it every row stands there.

    Args:
        y: any pointer to elements of the results' type; only its type is used.
        cell: int32 [8], this rank's own cell. owned: int32 [R], rows of this rank that each owner holds.
        work: int32 [entries, 8]: RANK the owner, PLACE the first place in z, ROWS, ROW the first row at the owner.
        state: int32 [programs, 8], the STATE words; zeros at first. Errors: ERROR_CELL, ERROR_REFUSED, ERROR_CELL_JUDGE.
        The others: see :func:`combine`.
    """
    program = tl.program_id(0) + program0
    BITS: tl.constexpr = y.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    mine = tl.load(windows + me)
    done = resumed(state, program, PHASE_COMBINE)
    error, through, who = cells_phase(windows, layout, call, cell, owned, me, done, polls, True, R, SYS)
    if error == 0:
        i = tl.arange(0, 8)
        to = mine + z_offset(layout, call)
        for q in range(program, entries, programs):
            entry = work + q * WORK_WORDS
            owner = tl.load(entry + WORK_RANK)
            at = mine + cell_offset(layout, call, owner) + tl.load(layout + AT_CELL_BODY)
            body = tl.load(words_at(at) + i)
            if word_of(body, CELL_MODE) == MODE_PULL:
                low = word_of(body, CELL_Y_LO).to(tl.int64) & 0xFFFFFFFF
                start = (word_of(body, CELL_Y_HI).to(tl.int64) << 32) | low
                y_stride = word_of(body, CELL_STRIDE).to(tl.int64)
                first = tl.load(windows + owner) + start + tl.load(entry + WORK_ROW).to(tl.int64) * y_stride
                rows = first.to(tl.pointer_type(y.dtype.element_ty))
                places = to + tl.load(entry + WORK_PLACE).to(tl.int64) * stride
                z = places.to(tl.pointer_type(y.dtype.element_ty))
                n = tl.load(entry + WORK_ROWS)
                copy_rows(rows, y_stride // ITEM, z, stride // ITEM, n, H, BR, BH)
    leave(state, program, error, tl.where(error == 0, PHASE_END, PHASE_COMBINE), through, who)


@triton.jit
def combine(
    windows,
    layout,
    call,
    place,
    weights,
    out,
    cell,
    owned,
    state,
    T,
    stride,
    me,
    program0,
    programs,
    polls,
    R: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FETCHED: tl.constexpr,
    ACC: tl.constexpr,
    ROUND: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits the owners' cells and sums the rows in z.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``. call: int64 [8], the handle's
            CALL words.
        place: int32 [T, K], each pair's place in this rank's token list, -1 dropped. weights: [T, K], any float type.
        out: [T, H], written, of y's type.
        cell: int32 [8], this rank's own cell. owned: int32 [R], rows of this rank that each owner holds.
        state: int32 [programs, 8], the STATE words; zeros at first. Errors: ERROR_CELL, ERROR_REFUSED, ERROR_CELL_JUDGE.
        stride: int64, bytes from row to row in z.
        me: this rank. program0, programs: this launch's programs are program0, ... of ``programs`` that share the work.
        polls: int32, looks at a code before a program gives up.
        WEIGHTED: False: rows are added as they are. With K = 1 and place [P, 1] the result is the rows themselves, zeros
            where dropped.
        FETCHED: :func:`fetch` has run. ACC: tl.float64 for float64 rows, else tl.float32. ROUND: see rounding.py.
        BT, BH: tokens and columns that are summed together, powers of two. SYS: see signal.py.
    """
    program = tl.program_id(0) + program0
    done = resumed(state, program, PHASE_COMBINE)
    error, through, who = cells_phase(windows, layout, call, cell, owned, me, done, polls, FETCHED, R, SYS)
    if error == 0:
        sum_phase(
            windows,
            layout,
            call,
            place,
            weights,
            out,
            T,
            stride,
            me,
            program,
            programs,
            K,
            H,
            WEIGHTED,
            ACC,
            ROUND,
            BT,
            BH,
        )
    leave(state, program, error, tl.where(error == 0, PHASE_END, PHASE_COMBINE), through, who)
