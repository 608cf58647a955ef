"""Small kernels, clean and with a fault, that show what the native lane sees. Two programs of one launch play two ranks.

Example of ``ping``: program 0 writes eight int32 of ``round`` to ``window`` and a flag behind them; program 1 waits for the
flag and copies the eight to ``out``. Without the barrier the flag may be there first, and ``out`` has the round before.
"""

import triton
import triton.language as tl


@triton.jit
def ping(window, out, round, BARRIER: tl.constexpr, VOLATILE: tl.constexpr, WAIT: tl.constexpr):
    """window: int32 [16], eight of payload, eight of flag. out: int32 [8]."""
    i = tl.arange(0, 8)
    if tl.program_id(0) == 0:
        tl.store(window + i, tl.zeros((8,), tl.int32) + round)
        if BARRIER:
            tl.debug_barrier()
        tl.store(window + 8 + i, tl.zeros((8,), tl.int32) + round)
    else:
        if WAIT:
            seen = 0
            left = 100000
            while (seen != round) & (left > 0):
                seen = tl.min(tl.load(window + 8 + i, volatile=VOLATILE), 0)
                left -= 1
        tl.store(out + i, tl.load(window + i))


@triton.jit
def unused_spin(flag, out):
    """A scalar is polled and not used afterwards: the adapter deletes the loop. flag, out: int32 [1]."""
    left = 100000
    seen = tl.load(flag, volatile=True)
    while (seen == 0) & (left > 0):
        seen = tl.load(flag, volatile=True)
        left -= 1
    tl.store(out, 1)


@triton.jit
def tally(total, rounds):
    """Each program adds 1 to each of eight counts, ``rounds`` times."""
    i = tl.arange(0, 8)
    for _ in range(rounds):
        tl.atomic_add(total + i, tl.zeros((8,), tl.int32) + 1)
