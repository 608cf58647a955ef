"""The fused call: publish, await records, pack + put, await rows, experts, return and combine, in as many launches as the
target wants.

One source; PHASES says what a launch does (the DO bits):

* 63, everything in one launch: GPUs, the interpreter, x86. With VECTOR on Ascend too, for tiny decode batches.
* 7, then the ``experts`` kernel, then 48: Ascend's default, three stream-ordered launches.
* 55 with PARTNER: Ascend's vector-core fused kernel. It writes each expert's ready epoch when all of its rows are there,
  and awaits the done epoch before it returns them; partner.py says what runs beside it.

Every program awaits all records itself and knows all places from them, so nothing but the rows travels and there is no
barrier over all programs. Programs do wait for others of the launch (for counts of returned rows): no more programs than
are resident.

Rows stand in the owner's y slot as their sources wrote them; results go to ``y`` in own memory, so a launch whose polls
ran out can be repeated with the same ``state`` and goes on where it was. When the records don't go together, or some rank
receives more rows than a slot holds, every rank finds that out before it has written a row (ERROR_JUDGE), and the host
takes over.

Example, R = 2, E = 2, K = 1, one token a rank, both for expert 1: both ranks publish {0, 1}; rank 0 writes its token to
row 0 of rank 1's y, rank 1 to row 1 of its own. Rank 1 sees both flags, computes one tile of two rows, writes result 0 to
z row 0 of rank 0 and result 1 to its own, and a cell to each. Both sum one row.
"""

import triton
import triton.language as tl

from .combine import cells_phase, sum_phase
from .experts import expert_tile
from .geometry import column, place_of, run_of
from .give import write_cell, z_offset
from .push import push_phase, slot_of_rows
from .record import publish_phase, record_offset, records_phase
from .signal import count, leave, poll, resumed, signal, words_at
from .take import await_run, copy_rows
from .words import (
    AT_MAX_TOKENS,
    AT_RECORD_HEADER,
    AT_RECORD_PAYLOAD,
    AT_RECORD_STRIDE,
    AT_RECV_ROWS,
    AT_ROW_FLAG,
    AT_ROW_FLAG_SLOT_STRIDE,
    AT_ROW_FLAG_STRIDE,
    AT_TOP_K,
    CALL_CODE,
    CALL_SLOT,
    DO_AWAIT,
    DO_COMBINE,
    DO_EXPERTS,
    DO_PUBLISH,
    DO_PUSH,
    DO_RETURN,
    ERROR_DONE,
    ERROR_GIVEN,
    ERROR_JUDGE,
    ERROR_ROWS,
    KIND_COUNTS,
    PHASE_CELLS,
    PHASE_COMBINE,
    PHASE_END,
    PHASE_PUBLISH,
    PHASE_PUSH,
    PHASE_RECORDS,
    PHASE_ROWS,
    PHASE_TILES,
    QUANT_NONE,
    RECORD_AGREE,
    RECORD_FLAG_ROWS,
    RECORD_KIND,
)


@triton.jit
def judge(
    layout,
    headers,
    header_stride,
    matrix,
    matrix_stride,
    starts,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
):
    """Whether the records are of one plain fused call whose rows fit in the slots. Every rank comes to the same answer.

    Args:
        headers: pointer to the header of rank 0's record, headers are header_stride words apart. starts: int32 [R + 1],
            first expert of each rank.

    Returns:
        ERROR_NONE or ERROR_JUDGE.
    """
    r = tl.arange(0, RP)[:, None]
    w = tl.arange(0, 32)
    e = tl.arange(0, EP)
    there = (r < R) & (w >= 0)[None, :]
    words = tl.load(headers + r * header_stride + w[None, :], mask=there, other=0)
    high = tl.max(tl.where(there, words, -2147483648), 0)
    low = tl.min(tl.where(there, words, 2147483647), 0)
    differ = tl.sum(tl.where(high == low, 0, ((w * 0 + RECORD_AGREE) >> w) & 1), 0)
    kind = tl.sum(tl.where(w == RECORD_KIND, high, 0), 0)
    limit = tl.load(layout + AT_MAX_TOKENS) * tl.load(layout + AT_TOP_K)
    wrong = tl.where((differ == 0) & (kind == KIND_COUNTS), 0, 1)
    totals = tl.zeros((EP,), tl.int32)
    for source in range(R):
        row = tl.load(matrix + source * matrix_stride + e, mask=e < E, other=0)
        bad = (tl.min(row, 0) < 0) | (tl.sum(row, 0) > limit)
        wrong = tl.where(bad, 1, wrong)
        totals += row
    cap = tl.load(layout + AT_RECV_ROWS)
    for owner in range(R):
        mine = (e >= tl.load(starts + owner)) & (e < tl.load(starts + owner + 1))
        wrong = tl.where(tl.sum(tl.where(mine, totals, 0), 0) > cap, 1, wrong)
    return tl.where(wrong == 0, 0, ERROR_JUDGE)


@triton.jit
def ready_phase(
    matrix,
    matrix_stride,
    flags,
    flag_stride,
    groups,
    code,
    ready,
    first_expert,
    local_experts,
    program,
    programs,
    done,
    polls,
    R: tl.constexpr,
    RP: tl.constexpr,
    ELP: tl.constexpr,
    SYS: tl.constexpr,
):
    """Awaits all rows of each of this program's experts, then writes its ready epoch.

    Returns:
        (error, experts done, the source whose rows are missing)
    """
    error = 0
    who = 0
    for local in range(program + done * programs, local_experts, programs):
        if error == 0:
            by_source, begin = column(matrix, matrix_stride, first_expert, local, 1, R, RP, ELP)
            for source in range(R):
                before, rows = run_of(by_source, source, RP)
                if (rows > 0) & (error == 0):
                    _, group = run_of(groups, source, RP)
                    run = flags + (begin + before) * flag_stride
                    if await_run(run, flag_stride, code, 0, rows, rows, group, polls, SYS) == 0:
                        error = ERROR_ROWS
                        who = source
            if error == 0:
                signal(ready + local * 8, code, SYS)
                done += 1
    return error, done, who


@triton.jit
def return_tile(
    windows,
    matrix,
    matrix_stride,
    by_source,
    y,
    given,
    z,
    stride,
    expert,
    r0,
    n,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    H: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    SYS: tl.constexpr,
):
    """Writes rows r0..r0 + n - 1 of an expert to their sources' z, and counts them.

    Args:
        by_source: int32 [RP], the expert's rows by source. y: pointer to the first of these results.
        z: int64, bytes from a window's start to the slot of z.
    """
    BITS: tl.constexpr = y.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    for source in range(R):
        before, rows = run_of(by_source, source, RP)
        low = tl.maximum(r0, before)
        high = tl.minimum(r0 + n, before + rows)
        if high > low:
            place = place_of(matrix + source * matrix_stride, expert, E, EP) + low - before
            at = tl.load(windows + source) + z + place.to(tl.int64) * stride
            to = at.to(tl.pointer_type(y.dtype.element_ty))
            copy_rows(y + (low - r0).to(tl.int64) * H, H, to, stride // ITEM, high - low, H, BR, BH)
            count(given + source * 8, high - low, SYS)


@triton.jit
def fused(
    windows,
    layout,
    call,
    header,
    counts,
    starts,
    owned,
    x,
    tokens,
    work,
    place,
    weights,
    gate_up,
    down,
    act,
    y,
    cell,
    given,
    ready,
    done,
    records,
    matrix,
    out,
    state,
    entries,
    T,
    stride,
    me,
    program0,
    programs,
    polls,
    PHASES: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    ELP: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    WEIGHTED: tl.constexpr,
    REUSED: tl.constexpr,
    PARTNER: tl.constexpr,
    VECTOR: tl.constexpr,
    PARTS: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    GPU: tl.constexpr,
    SYS: tl.constexpr,
):
    """The fused call of one rank, or the phases of it that PHASES names.

    Args:
        windows: int64 [R], address of each window. layout: int64, ``WindowLayout.params()``. call: int64 [8], the CALL words.
        header: int32 [32], the record's header (MODE fused). counts: int32 [E], this rank's send counts.
        starts: int32 [R + 1], first expert of each rank. owned: int32 [R], rows of this rank that each owner holds.
        x: [T, H]. tokens: int32 [P], the kept pairs' tokens in (expert, token, k) order.
        work: int32 [entries, 8]: RANK the owner, PLACE the first of ``tokens``, ROWS, ROW counted from the run's begin,
            EXPERT, FIRST_EXPERT of the owner.
        place: int32 [T, K], each pair's place in ``tokens``, -1 dropped. weights: [T, K], any float type.
        gate_up: [E_local, 2 I, H]. down: [E_local, H, I]. act: [programs, BM, I], scratch. y: [cap, H], scratch of x's type.
        cell: int32 [8], body of the combine cell. given: int32 [R, 8], zeros before the call's first launch.
        ready, done: int32 [E_local, 8]; only with PARTNER. Never cleared: codes of calls differ.
        records: int32 [R, 32 + E], written: what the host judges, and the handle's matrix.
        matrix: int32 [R, E] of the routing that is used again; only with REUSED.
        out: [T, H], written. state: int32 [programs, 8], the STATE words; zeros before the call's first launch of these PHASES.
        stride: int64, bytes from row to row in y and z.
        me: this rank. program0, programs: this launch's programs are program0, ... of ``programs`` that share the work.
        polls: int32, looks at a code before a program gives up.
        PARTS: parts that an expert's tiles are dealt into, each of them one program's.
        RP, EP, ELP: powers of two, at least R, E (and 8) and the experts of any rank. BR, BH: rows and columns that move
            together. BT: tokens that are summed together. ROUND: see rounding.py. GPU, SYS: see push.py and signal.py.
            ACC, DOT, BM, BN, BK, VECTOR: see experts.py.
    """
    BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    ITEM: tl.constexpr = BITS // 8
    program = tl.program_id(0) + program0
    code = tl.load(call + CALL_CODE).to(tl.int32)
    mine = tl.load(windows + me)
    first_expert = tl.load(starts + me)
    local_experts = tl.load(starts + me + 1) - first_expert
    record = mine + record_offset(layout, call, 0)
    headers = words_at(record + tl.load(layout + AT_RECORD_HEADER))
    words_apart = tl.load(layout + AT_RECORD_STRIDE) // 4
    if REUSED:
        sent = matrix
        sent_stride = words_apart * 0 + E
    else:
        sent = words_at(record + tl.load(layout + AT_RECORD_PAYLOAD))
        sent_stride = words_apart
    error = 0
    phase = 0
    item = 0
    who = 0

    if DO_PUBLISH & PHASES:
        publish_phase(
            windows,
            layout,
            call,
            header,
            counts,
            me,
            program + resumed(state, program, PHASE_PUBLISH) * programs,
            programs,
            R,
            E,
            EP,
            SYS,
        )
    if DO_PUSH & PHASES:
        error, who = records_phase(
            windows, layout, call, records, me, program, programs, 0, 1, polls, R, E, EP, SYS
        )
        phase = tl.where(error == 0, phase, PHASE_RECORDS)
        if error == 0:
            error = judge(layout, headers, words_apart, sent, sent_stride, starts, R, RP, E, EP)
            phase = tl.where(error == 0, phase, PHASE_RECORDS)
        if error == 0:
            push_phase(
                windows,
                layout,
                call,
                x,
                tokens,
                weights,
                work,
                entries,
                sent,
                sent_stride,
                stride,
                0,
                0,
                me,
                program,
                programs,
                resumed(state, program, PHASE_PUSH),
                R,
                RP,
                ELP,
                H,
                True,
                False,
                QUANT_NONE,
                False,
                BR,
                BH,
                GPU,
                SYS,
            )

    slot = tl.load(call + CALL_SLOT)
    flags = mine + tl.load(layout + AT_ROW_FLAG) + slot * tl.load(layout + AT_ROW_FLAG_SLOT_STRIDE)
    flag_stride = tl.load(layout + AT_ROW_FLAG_STRIDE)
    r = tl.arange(0, RP)
    groups_at = words_at(record + tl.load(layout + AT_RECORD_HEADER) + 4 * RECORD_FLAG_ROWS)
    groups = tl.load(groups_at + r * words_apart, mask=r < R, other=0)
    if (DO_AWAIT & PHASES) and PARTNER:
        if error == 0:
            error, item, who = ready_phase(
                sent,
                sent_stride,
                flags,
                flag_stride,
                groups,
                code,
                ready,
                first_expert,
                local_experts,
                program,
                programs,
                resumed(state, program, PHASE_ROWS),
                polls,
                R,
                RP,
                ELP,
                SYS,
            )
            phase = tl.where(error == 0, phase, PHASE_ROWS)
    if (DO_AWAIT | DO_EXPERTS | DO_RETURN) & PHASES:
        rows_in = (mine + slot_of_rows(layout, call, True)).to(tl.pointer_type(x.dtype.element_ty))
        row_stride = stride // ITEM
        scratch = act + program.to(tl.int64) * (BM * I)
        z = z_offset(layout, call)
        tile = 0
        tiles_done = resumed(state, program, PHASE_TILES)
        failed = tl.where(error == 0, 0, 1)
        for q in range(program, local_experts * PARTS, programs):
            local = q // PARTS
            by_source, begin = column(sent, sent_stride, first_expert, local, 1, R, RP, ELP)
            total = tl.sum(by_source, 0)
            expert_at = tl.zeros((), tl.int64) + local
            for r0 in range(q % PARTS * BM, total, PARTS * BM):
                n = tl.minimum(total - r0, BM)
                if (tile >= tiles_done) & (error == 0):
                    if (DO_AWAIT & PHASES) and not PARTNER:
                        for source in range(R):
                            before, rows = run_of(by_source, source, RP)
                            low = tl.maximum(r0, before)
                            high = tl.minimum(r0 + n, before + rows)
                            if (high > low) & (error == 0):
                                _, group = run_of(groups, source, RP)
                                run = flags + (begin + before) * flag_stride
                                if (
                                    await_run(
                                        run,
                                        flag_stride,
                                        code,
                                        low - before,
                                        high - before,
                                        rows,
                                        group,
                                        polls,
                                        SYS,
                                    )
                                    == 0
                                ):
                                    error = ERROR_ROWS
                                    who = source
                    row = (begin + r0).to(tl.int64)
                    if DO_EXPERTS & PHASES:
                        if error == 0:
                            expert_tile(
                                rows_in + row * row_stride,
                                row_stride,
                                gate_up + expert_at * (2 * I * H),
                                down + expert_at * (H * I),
                                scratch,
                                y + row * H,
                                n,
                                H,
                                I,
                                VECTOR,
                                ACC,
                                DOT,
                                ROUND,
                                BM,
                                BN,
                                BK,
                            )
                    if (DO_RETURN & PHASES) and PARTNER:
                        if error == 0:
                            if poll(done + local * 8, code, code, polls, SYS) == 0:
                                error = ERROR_DONE
                                who = local
                    if DO_RETURN & PHASES:
                        if error == 0:
                            return_tile(
                                windows,
                                sent,
                                sent_stride,
                                by_source,
                                y + row * H,
                                given,
                                z,
                                stride,
                                first_expert + local,
                                r0,
                                n,
                                R,
                                RP,
                                E,
                                EP,
                                H,
                                BR,
                                BH,
                                SYS,
                            )
                if error == 0:
                    tile += 1
        if (error != 0) & (failed == 0):
            phase = PHASE_TILES
            item = tile
    if DO_RETURN & PHASES:
        through = resumed(state, program, PHASE_CELLS)
        j = tl.arange(0, ELP)
        failed = tl.where(error == 0, 0, 1)
        for source in range(program + through * programs, R, programs):
            if error == 0:
                held = tl.load(
                    sent + source * sent_stride + first_expert + j, mask=j < local_experts, other=0
                )
                total = tl.sum(held, 0)
                if total > 0:
                    if poll(given + source * 8, total, total, polls, SYS) == 0:
                        error = ERROR_GIVEN
                        who = source
                    else:
                        write_cell(windows, layout, call, cell, source, me, SYS)
                if error == 0:
                    through += 1
        if (error != 0) & (failed == 0):
            phase = PHASE_CELLS
            item = through
    if DO_COMBINE & PHASES:
        if error == 0:
            through = resumed(state, program, PHASE_COMBINE)
            error, item, who = cells_phase(
                windows, layout, call, cell, owned, me, through, polls, False, R, SYS
            )
            phase = tl.where(error == 0, phase, PHASE_COMBINE)
            if (error == 0) & (through <= R):
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
    leave(state, program, error, tl.where(error == 0, PHASE_END, phase), item, who)
