"""Records: publish this rank's send counts to every peer, await those of all peers.

Example, R = 2, E = 4: rank 0 sends 2 tokens to expert 0 and one to expert 3. ``publish`` writes header and counts {2, 0,
0, 1}, then the code, into record [n mod NREC][0] of both windows. ``await_records`` there sees both codes and copies:
``records`` [2, 36] has the header in words 0..31 and the counts in words 32..35 of row 0.
"""

import triton
import triton.language as tl

from .signal import leave, poll, signal, words_at
from .words import (
    AT_RECORD,
    AT_RECORD_CODE,
    AT_RECORD_HEADER,
    AT_RECORD_PAYLOAD,
    AT_RECORD_SLOT_STRIDE,
    AT_RECORD_STRIDE,
    CALL_CODE,
    CALL_RECORD_SLOT,
    ERROR_RECORD,
    PHASE_END,
    PHASE_RECORDS,
)


@triton.jit
def record_offset(layout, call, rank):
    """Bytes from a window's start to the record of the call that ``rank`` writes."""
    return (
        tl.load(layout + AT_RECORD)
        + tl.load(call + CALL_RECORD_SLOT) * tl.load(layout + AT_RECORD_SLOT_STRIDE)
        + rank * tl.load(layout + AT_RECORD_STRIDE)
    )


@triton.jit
def publish_phase(
    windows,
    layout,
    call,
    header,
    payload,
    me,
    program,
    programs,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_P: tl.constexpr,
    SYS: tl.constexpr,
):
    """Writes the record into every window, this rank's own too: then everybody finds all records in one place."""
    code = tl.load(call + CALL_CODE).to(tl.int32)
    offset = record_offset(layout, call, me)
    w = tl.arange(0, 32)
    head = tl.load(header + w)
    i = tl.arange(0, WORDS_P)
    body = tl.load(payload + i, mask=i < WORDS, other=0)
    for r in range(program, R, programs):
        record = tl.load(windows + r) + offset
        tl.store(words_at(record + tl.load(layout + AT_RECORD_HEADER)) + w, head)
        tl.store(words_at(record + tl.load(layout + AT_RECORD_PAYLOAD)) + i, body, mask=i < WORDS)
        signal(words_at(record + tl.load(layout + AT_RECORD_CODE)), code, SYS)


@triton.jit
def records_phase(
    windows,
    layout,
    call,
    records,
    me,
    program,
    programs,
    first,
    step,
    polls,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_P: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits the records of ranks first, first + step, ... and copies those of this program (rank mod programs).

    All of them are looked at, even if one is missing: an ABORT ends a call at once.

    Returns:
        (error, a rank that is missing)
    """
    code = tl.load(call + CALL_CODE).to(tl.int32)
    mine = tl.load(windows + me)
    w = tl.arange(0, 32)
    i = tl.arange(0, WORDS_P)
    error = 0
    who = 0
    for r in range(first, R, step):
        record = mine + record_offset(layout, call, r)
        if poll(words_at(record + tl.load(layout + AT_RECORD_CODE)), code, code, polls, SYS) == 0:
            error = ERROR_RECORD
            who = r
        else:
            if r % programs == program:
                row = records + r * (32 + WORDS)
                head = tl.load(words_at(record + tl.load(layout + AT_RECORD_HEADER)) + w)
                counts = words_at(record + tl.load(layout + AT_RECORD_PAYLOAD)) + i
                body = tl.load(counts, mask=i < WORDS, other=0)
                tl.store(row + w, head)
                tl.store(row + 32 + i, body, mask=i < WORDS)
    return error, who


@triton.jit
def publish(
    windows,
    layout,
    call,
    header,
    payload,
    me,
    program0,
    programs,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_P: tl.constexpr,
    SYS: tl.constexpr,
):
    """Publishes this rank's record to every rank.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``. call: int64 [8], the CALL words.
        header: int32 [32], the record's header; words it doesn't use are 0.
        payload: int32 [WORDS]: send counts [E], or what else the record carries (the text of an ABORT, padded with zeros).
        me: this rank. program0, programs: this launch's programs are program0, ... of ``programs`` that share the work.
        WORDS_P: the next power of two of WORDS, at least 8. SYS: see signal.py.
    """
    program = tl.program_id(0) + program0
    publish_phase(windows, layout, call, header, payload, me, program, programs, R, WORDS, WORDS_P, SYS)


@triton.jit
def await_records(
    windows,
    layout,
    call,
    records,
    state,
    me,
    program0,
    programs,
    polls,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_P: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits all records of the call and copies them where they stay.

    Args:
        records: int32 [R, 32 + WORDS], written: header, then payload, of each rank whose record is there. Zeroed by the
            host before, KIND tells which are, also when others are missing.
        state: int32 [programs, 8], the STATE words; zeros at first. Errors: ERROR_RECORD.
        polls: int32, looks at a code before a program gives up.
        The others: see :func:`publish`.
    """
    program = tl.program_id(0) + program0
    error, who = records_phase(
        windows,
        layout,
        call,
        records,
        me,
        program,
        programs,
        program,
        programs,
        polls,
        R,
        WORDS,
        WORDS_P,
        SYS,
    )
    leave(state, program, error, tl.where(error == 0, PHASE_END, PHASE_RECORDS), 0, who)
