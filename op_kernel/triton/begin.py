"""Begin a call: advance the counter, say what the kernels of the call need to know, and clear the codes of an old lap.

These are launches of their own, before the others of the call, in the same stream. A host that isn't in a frozen graph may do
the first one's arithmetic itself.

Example, NS = 2, V = 5: the 6th call finds EPOCH 5, writes EPOCH 6, and ``call`` is n = 6, code (6 - 1) mod 5 + 1 = 1, slot
6 mod 2 = 0, record slot 6 mod 4 = 2, and clear = 1: lap(6) = 1, lap(6 - 2 NS = 2) = 0.
"""

import triton
import triton.language as tl

from .signal import fill, words_at
from .words import (
    AT_CELL,
    AT_CELL_CODE,
    AT_CELL_SLOT_STRIDE,
    AT_CELL_STRIDE,
    AT_CODE_MAX,
    AT_PROGRESS,
    AT_RECORD_SLOTS,
    AT_RECV_ROWS,
    AT_ROW_FLAG,
    AT_ROW_FLAG_SLOT_STRIDE,
    AT_SLOTS,
    AT_WAVE,
    AT_WAVE_CODE,
    AT_WAVE_SLOT_STRIDE,
    AT_WAVE_STRIDE,
    CALL_CLEAR,
    CALL_CODE,
    CALL_N,
    CALL_RECORD_SLOT,
    CALL_SLOT,
    RECORD_EPOCH_HI,
    RECORD_EPOCH_LO,
    RECORD_READ_HI,
    RECORD_READ_LO,
)


@triton.jit
def begin(windows, layout, call, header, me):
    """Advances the call counter in the own window and writes what follows from it. One program.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``.
        call: int64 [8], written: the CALL words.
        header: int32 [32], written: the words EPOCH and READ (n - 1) of the record.
        me: this rank.
    """
    progress = (tl.load(windows + me) + tl.load(layout + AT_PROGRESS)).to(tl.pointer_type(tl.int64))
    n = tl.load(progress) + 1
    tl.store(progress, n)
    largest = tl.load(layout + AT_CODE_MAX)
    slots = tl.load(layout + AT_SLOTS)
    before = tl.maximum(n - 2 * slots, 1)
    lap = (n - 1) // largest
    tl.store(call + CALL_N, n)
    tl.store(call + CALL_CODE, (n - 1) % largest + 1)
    tl.store(call + CALL_SLOT, n % slots)
    tl.store(call + CALL_RECORD_SLOT, n % tl.load(layout + AT_RECORD_SLOTS))
    tl.store(call + CALL_CLEAR, tl.where(lap != (before - 1) // largest, 1, 0).to(tl.int64))
    tl.store(header + RECORD_EPOCH_LO, n.to(tl.int32))
    tl.store(header + RECORD_EPOCH_HI, (n >> 32).to(tl.int32))
    tl.store(header + RECORD_READ_LO, (n - 1).to(tl.int32))
    tl.store(header + RECORD_READ_HI, ((n - 1) >> 32).to(tl.int32))


@triton.jit
def clear(windows, layout, call, me, program0, programs, R: tl.constexpr, BLOCK: tl.constexpr):
    """Zeroes the codes of the call's slot in the own window: cells, wave cells, row flags, if ``call`` says so. Any programs.

    Nobody writes a code of this lap there before it has seen this rank's record of the call, which is published later.

    Args:
        program0, programs: this launch's programs are program0, program0 + 1, ... of ``programs`` that share the work.
        BLOCK: int32 that are zeroed by one store.
    """
    program = tl.program_id(0) + program0
    if tl.load(call + CALL_CLEAR) != 0:
        slot = tl.load(call + CALL_SLOT)
        mine = tl.load(windows + me)
        cells = (
            mine
            + tl.load(layout + AT_CELL)
            + slot * tl.load(layout + AT_CELL_SLOT_STRIDE)
            + tl.load(layout + AT_CELL_CODE)
        )
        for r in range(program, R, programs):
            fill(words_at(cells + r * tl.load(layout + AT_CELL_STRIDE)), 0, False)
        waves = (
            mine
            + tl.load(layout + AT_WAVE)
            + slot * tl.load(layout + AT_WAVE_SLOT_STRIDE)
            + tl.load(layout + AT_WAVE_CODE)
        )
        for r in range(program, 3 * R, programs):
            fill(words_at(waves + r * tl.load(layout + AT_WAVE_STRIDE)), 0, False)
        flags = mine + tl.load(layout + AT_ROW_FLAG) + slot * tl.load(layout + AT_ROW_FLAG_SLOT_STRIDE)
        words = tl.load(layout + AT_RECV_ROWS) * 8
        for first in range(program.to(tl.int64) * BLOCK, words, programs.to(tl.int64) * BLOCK):
            block = (flags + first * 4).to(tl.pointer_type(tl.int32)) + tl.arange(0, BLOCK)
            tl.store(block, tl.zeros((BLOCK,), tl.int32), mask=tl.arange(0, BLOCK) < words - first)
