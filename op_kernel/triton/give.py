"""Return: an owner writes what its experts made of a source's rows into that source's z, and one code for all of them.

A source's rows may be written by several programs. They count them in own memory (``given``); one program awaits the count
and writes the combine cell. So the launch must not have more programs than are resident, and there is no barrier over all
of them.

Example: rank 1 has made y rows 10 and 11 of rank 0's places 6 and 7: the entry {rank 0, place 6, 2 rows, row 10}. Its
program copies both rows to z rows 6 and 7 of slot h mod NS in rank 0's window and adds 2 to ``given[0]``. When that is
``totals[0]``, some program writes body and code(h) into cell [h mod NS][1] there.
"""

import triton
import triton.language as tl

from .signal import count, leave, poll, resumed, signal, words_at
from .take import copy_rows
from .words import (
    AT_CELL,
    AT_CELL_BODY,
    AT_CELL_CODE,
    AT_CELL_SLOT_STRIDE,
    AT_CELL_STRIDE,
    AT_Z,
    AT_Z_SLOT_STRIDE,
    CALL_CODE,
    CALL_SLOT,
    ERROR_GIVEN,
    PHASE_CELLS,
    PHASE_END,
    PHASE_TILES,
    WORK_PLACE,
    WORK_RANK,
    WORK_ROW,
    WORK_ROWS,
    WORK_WORDS,
)


@triton.jit
def cell_offset(layout, call, owner):
    """Bytes from a window's start to the combine cell of the call that ``owner`` writes."""
    return (
        tl.load(layout + AT_CELL)
        + tl.load(call + CALL_SLOT) * tl.load(layout + AT_CELL_SLOT_STRIDE)
        + owner * tl.load(layout + AT_CELL_STRIDE)
    )


@triton.jit
def z_offset(layout, call):
    """Bytes from a window's start to the call's slot of z."""
    return tl.load(layout + AT_Z) + tl.load(call + CALL_SLOT) * tl.load(layout + AT_Z_SLOT_STRIDE)


@triton.jit
def write_cell(windows, layout, call, cell, source, me, SYS: tl.constexpr):
    """Tells a source that all of its rows are there: the body ``cell`` int32 [8], then the code."""
    i = tl.arange(0, 8)
    at = tl.load(windows + source) + cell_offset(layout, call, me)
    tl.store(words_at(at + tl.load(layout + AT_CELL_BODY)) + i, tl.load(cell + i))
    signal(words_at(at + tl.load(layout + AT_CELL_CODE)), tl.load(call + CALL_CODE).to(tl.int32), SYS)


@triton.jit
def give(
    windows,
    layout,
    call,
    y,
    cell,
    work,
    totals,
    given,
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
    """Writes rows of y into their sources' z, then the combine cells. The first launch of a call finds ``given`` zeroed.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``. call: int64 [8], the handle's
            CALL words.
        y: [N, H], the results. cell: int32 [8], the body of the combine cell (DTYPE, HIDDEN, MODE push).
        work: int32 [entries, 8]: RANK the source, PLACE the first place in its z, ROWS, ROW the first row of y.
        totals: int32 [R], rows of each source. given: int32 [R, 8], zeros at first, in own memory.
        state: int32 [programs, 8], the STATE words; zeros at first. Errors: ERROR_GIVEN.
        stride: int64, bytes from row to row in z.
        me: this rank. program0, programs: this launch's programs are program0, ... of ``programs`` that share the work.
        polls: int32, looks at a count before a program gives up.
        BR, BH: rows and columns that move together, powers of two. SYS: see signal.py.
    """
    program = tl.program_id(0) + program0
    BITS: tl.constexpr = y.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    offset = z_offset(layout, call)
    done = resumed(state, program, PHASE_TILES)
    for q in range(program + done * programs, entries, programs):
        entry = work + q * WORK_WORDS
        source = tl.load(entry + WORK_RANK)
        n = tl.load(entry + WORK_ROWS)
        at = tl.load(windows + source) + offset + tl.load(entry + WORK_PLACE).to(tl.int64) * stride
        rows = at.to(tl.pointer_type(y.dtype.element_ty))
        copy_rows(y + tl.load(entry + WORK_ROW).to(tl.int64) * H, H, rows, stride // ITEM, n, H, BR, BH)
        count(given + source * 8, n, SYS)
    done = resumed(state, program, PHASE_CELLS)
    error = 0
    who = 0
    for source in range(program + done * programs, R, programs):
        if error == 0:
            total = tl.load(totals + source)
            if total > 0:
                if poll(given + source * 8, total, total, polls, SYS) == 0:
                    error = ERROR_GIVEN
                    who = source
                else:
                    write_cell(windows, layout, call, cell, source, me, SYS)
            if error == 0:
                done += 1
    leave(state, program, error, tl.where(error == 0, PHASE_END, PHASE_CELLS), done, who)
