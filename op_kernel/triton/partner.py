"""What runs beside the vector-core fused kernel on Ascend: experts in a second stream, in three launches that are each safe.

A kernel that uses the matrix unit runs on two kinds of core, and one that polls there can hang: so the poll, the product
and the word that it is done are launches of their own, stream-ordered: ``gate`` (vector) awaits the ready epoch of some
experts, ``experts`` computes them and polls nothing, ``finish`` (vector) writes their done epoch.

Example, call code 3, experts 0..1 of 4: ``gate`` returns when ``ready[0]`` and ``ready[1]`` hold 3; after ``experts``
``finish`` writes 3 into ``done[0]`` and ``done[1]``, and the fused kernel returns those rows while experts 2 and 3 are
computed.
"""

import triton
import triton.language as tl

from .signal import leave, poll, resumed, signal
from .words import CALL_CODE, ERROR_READY, PHASE_END, PHASE_ROWS


@triton.jit
def gate(call, ready, state, first, last, program0, programs, polls, SYS: tl.constexpr):
    """Awaits the ready epochs of local experts first..last - 1.

    Args:
        call: int64 [8], the CALL words. ready: int32 [E_local, 8], written by the fused kernel, in own memory.
        state: int32 [programs, 8], the STATE words; zeros at first. Errors: ERROR_READY.
        program0, programs: this launch's programs are program0, ... of ``programs`` that share the work.
        polls: int32, looks at a code before a program gives up. SYS: see signal.py.
    """
    program = tl.program_id(0) + program0
    code = tl.load(call + CALL_CODE).to(tl.int32)
    done = resumed(state, program, PHASE_ROWS)
    error = 0
    who = 0
    for local in range(first + program + done * programs, last, programs):
        if error == 0:
            if poll(ready + local * 8, code, code, polls, SYS) == 0:
                error = ERROR_READY
                who = local
            else:
                done += 1
    leave(state, program, error, tl.where(error == 0, PHASE_END, PHASE_ROWS), done, who)


@triton.jit
def finish(call, done, first, last, program0, programs, SYS: tl.constexpr):
    """Writes the done epochs of local experts first..last - 1, whose results the stream has ordered before this launch.

    Args:
        done: int32 [E_local, 8], in own memory. The others: see :func:`gate`.
    """
    code = tl.load(call + CALL_CODE).to(tl.int32)
    for local in range(first + tl.program_id(0) + program0, last, programs):
        signal(done + local * 8, code, SYS)
