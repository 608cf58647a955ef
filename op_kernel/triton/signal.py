"""Codes: how a rank says that what it wrote is there, and how another one sees it.

A code is a block of 32 bytes, eight equal int32, written after what it guards. A reader takes it only when min == max == code.

Two ways of writing and reading it, chosen by ``SYS``. True (GPUs): atomics of system scope, release and acquire; a plain
store orders nothing there. False (Ascend, the interpreter, x86): a tile store behind a barrier and a volatile tile load;
an atomic exchange is lost when lowered for Ascend, a scalar poll goes through the data cache and may never see a peer's write.

Example: rank 1 has written rows for call n = 5 (V large, so code 5) and calls ``signal(flag, 5)``: eight times 5 stand at
``flag`` in rank 0's window. ``poll(flag, 5, 5, polls=100)`` there returns 5 as soon as all eight are seen, and 0 if they
aren't after 100 looks.
"""

import triton
import triton.language as tl


@triton.jit
def words_at(address):
    """Pointer to the int32 at an address (int64). Offsets are added before: a constant behind the cast doesn't lower."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def fill(at, value, SYS: tl.constexpr):
    """Writes a block of eight equal int32, ordered after nothing. at: pointer to int32."""
    block = at + tl.arange(0, 8)
    values = tl.zeros((8,), tl.int32) + value
    if SYS:
        tl.atomic_xchg(block, values, sem="release", scope="sys")
    else:
        tl.store(block, values)


@triton.jit
def signal(at, code, SYS: tl.constexpr):
    """Publishes what this program wrote before: a barrier, then the code's block. at: pointer to int32."""
    tl.debug_barrier()
    fill(at, code, SYS)


@triton.jit
def look(block, SYS: tl.constexpr):
    """One look at a block, pointers to eight int32, that another core or rank may be writing."""
    if SYS:
        value = tl.atomic_add(block, 0, sem="acquire", scope="sys")
    else:
        value = tl.load(block, volatile=True)
    return value


@triton.jit
def poll(at, code, refusal, polls, SYS: tl.constexpr):
    """Looks at a block until it holds ``code`` or ``refusal``, at most ``polls`` times. What comes after it is ordered
    behind it.

    Args:
        at: pointer to int32. code, refusal, polls: int32, not 0; refusal may be code again.

    Returns:
        int32: what was seen, or 0 when the polls ran out.
    """
    block = at + tl.arange(0, 8)
    seen = 0
    left = polls
    while (seen == 0) & (left > 0):
        value = look(block, SYS)
        low = tl.min(value, 0)
        high = tl.max(value, 0)
        seen = tl.where((low == high) & ((low == code) | (low == refusal)), low, 0)
        left -= 1
    tl.debug_barrier()
    return seen


@triton.jit
def count(at, more, SYS: tl.constexpr):
    """Adds to a block of eight equal counts in own memory, after what this program wrote before; several programs may."""
    tl.debug_barrier()
    block = at + tl.arange(0, 8)
    values = tl.zeros((8,), tl.int32) + more
    if SYS:
        tl.atomic_add(block, values, sem="release", scope="sys")
    else:
        tl.atomic_add(block, values)


@triton.jit
def resumed(state, program, PHASE: tl.constexpr):
    """Items of a phase that this program has done in an earlier launch; more than there are when it is beyond that phase."""
    words = state + program * 8
    phase = tl.load(words + 1)
    item = tl.load(words + 2)
    return tl.where(phase == PHASE, item, tl.where(phase > PHASE, 1 << 20, 0))


@triton.jit
def leave(state, program, error, phase, item, who):
    """Writes how far this program came."""
    words = state + program * 8
    tl.store(words, error)
    tl.store(words + 1, phase)
    tl.store(words + 2, item)
    tl.store(words + 3, who)
