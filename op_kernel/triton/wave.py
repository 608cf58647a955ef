"""Waves: what goes round when some rank receives more rows than a slot holds.

A rank that has taken a wave which isn't the last clears that wave's flags and then says how many waves it has read; a
source writes rows of wave w > 0 to an owner only after that owner has read w of them. The watermark counts only beside the
call's code.

Example, call n = 3 (code 3), two waves: rank 1 has taken wave 0. ``clear_flags`` zeroes the row flags of the rows it
received, then ``say`` writes mark 1 and code 3 into wave cell [slot][DISPATCH_READ][1] of every rank that pushes to it;
rank 0's ``hear`` returns when it sees code 3 there and a mark of at least 1.
"""

import triton
import triton.language as tl

from .signal import fill, leave, look, poll, resumed, signal, words_at
from .words import (
    AT_ROW_FLAG,
    AT_ROW_FLAG_SLOT_STRIDE,
    AT_ROW_FLAG_STRIDE,
    AT_WAVE,
    AT_WAVE_CODE,
    AT_WAVE_KIND_STRIDE,
    AT_WAVE_MARK,
    AT_WAVE_SLOT_STRIDE,
    AT_WAVE_STRIDE,
    CALL_CODE,
    CALL_SLOT,
    ERROR_WAVE,
    PHASE_END,
    PHASE_ROWS,
)


@triton.jit
def wave_offset(layout, call, kind, writer):
    """Bytes from a window's start to the wave cell of the call that ``writer`` writes."""
    return (
        tl.load(layout + AT_WAVE)
        + tl.load(call + CALL_SLOT) * tl.load(layout + AT_WAVE_SLOT_STRIDE)
        + kind * tl.load(layout + AT_WAVE_KIND_STRIDE)
        + writer * tl.load(layout + AT_WAVE_STRIDE)
    )


@triton.jit
def clear_flags(windows, layout, call, rows, me, program0, programs):
    """Zeroes the row flags of rows 0..rows - 1 of the call's slot in the own window. A launch of its own, between take and say.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``. call: int64 [8], the CALL words.
        rows: int32. me: this rank. program0, programs: this launch's programs are program0, ... of ``programs`` that share
            the work.
    """
    flags = tl.load(windows + me) + tl.load(layout + AT_ROW_FLAG)
    flags += tl.load(call + CALL_SLOT) * tl.load(layout + AT_ROW_FLAG_SLOT_STRIDE)
    for row in range(tl.program_id(0) + program0, rows, programs):
        fill(words_at(flags + row * tl.load(layout + AT_ROW_FLAG_STRIDE)), 0, False)


@triton.jit
def say(
    windows, layout, call, listeners, kind, mark, me, program0, programs, R: tl.constexpr, SYS: tl.constexpr
):
    """Writes how many waves this rank is through with, the mark before the code.

    Args:
        listeners: int32 [R], not 0 for ranks that want to know. kind: int32, number of the watermark (docs/protocol.md).
            mark: int32, at least 1. The others: see :func:`clear_flags`. SYS: see signal.py.
    """
    code = tl.load(call + CALL_CODE).to(tl.int32)
    for r in range(tl.program_id(0) + program0, R, programs):
        if tl.load(listeners + r) != 0:
            at = tl.load(windows + r) + wave_offset(layout, call, kind, me)
            signal(words_at(at + tl.load(layout + AT_WAVE_MARK)), mark, SYS)
            signal(words_at(at + tl.load(layout + AT_WAVE_CODE)), code, SYS)


@triton.jit
def hear(
    windows,
    layout,
    call,
    speakers,
    state,
    kind,
    mark,
    me,
    program0,
    programs,
    polls,
    R: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits watermarks of at least ``mark``. Any programs; none of them may go on before all have returned: a launch of
    its own.

    Args:
        speakers: int32 [R], not 0 for ranks whose watermark is awaited.
        state: int32 [programs, 8], the STATE words; zeros at first. Errors: ERROR_WAVE.
        polls: int32, looks at a watermark before a program gives up. The others: see :func:`say`.
    """
    program = tl.program_id(0) + program0
    code = tl.load(call + CALL_CODE).to(tl.int32)
    mine = tl.load(windows + me)
    done = resumed(state, program, PHASE_ROWS)
    i = tl.arange(0, 8)
    error = 0
    who = 0
    for r in range(program + done * programs, R, programs):
        if error == 0:
            if tl.load(speakers + r) != 0:
                at = mine + wave_offset(layout, call, kind, r)
                seen = poll(words_at(at + tl.load(layout + AT_WAVE_CODE)), code, code, polls, SYS)
                heard = 0
                left = tl.where(seen == 0, 0, polls)
                marks = words_at(at + tl.load(layout + AT_WAVE_MARK)) + i
                while (heard == 0) & (left > 0):
                    value = look(marks, SYS)
                    low = tl.min(value, 0)
                    heard = tl.where((low == tl.max(value, 0)) & (low >= mark), 1, 0)
                    left -= 1
                error = tl.where(heard == 0, ERROR_WAVE, error)
            if error == 0:
                done += 1
            else:
                who = r
    leave(state, program, error, tl.where(error == 0, PHASE_END, PHASE_ROWS), done, who)
