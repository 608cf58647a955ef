"""Numbers of what the host hands to every kernel: the layout's vector, a call, a program's state, entries of work lists.

``layout`` (int64) is ``WindowLayout.params()``; the ``AT_`` numbers repeat its order, and a test compares them name by
name. Records and cells are those of docs/protocol.md.
"""

import triton.language as tl

AT_MAX_TOKENS = tl.constexpr(4)
AT_TOP_K = tl.constexpr(5)
AT_RECV_ROWS = tl.constexpr(7)
AT_SLOTS = tl.constexpr(8)
AT_RECORD_SLOTS = tl.constexpr(9)
AT_CODE_MAX = tl.constexpr(12)
AT_PROGRESS = tl.constexpr(16)
AT_RECORD = tl.constexpr(21)
AT_RECORD_SLOT_STRIDE = tl.constexpr(22)
AT_RECORD_STRIDE = tl.constexpr(23)
AT_RECORD_HEADER = tl.constexpr(24)
AT_RECORD_PAYLOAD = tl.constexpr(25)
AT_RECORD_CODE = tl.constexpr(27)
AT_CELL = tl.constexpr(28)
AT_CELL_SLOT_STRIDE = tl.constexpr(29)
AT_CELL_STRIDE = tl.constexpr(30)
AT_CELL_BODY = tl.constexpr(31)
AT_CELL_CODE = tl.constexpr(34)
AT_WAVE = tl.constexpr(35)
AT_WAVE_SLOT_STRIDE = tl.constexpr(36)
AT_WAVE_KIND_STRIDE = tl.constexpr(37)
AT_WAVE_STRIDE = tl.constexpr(38)
AT_WAVE_MARK = tl.constexpr(39)
AT_WAVE_CODE = tl.constexpr(40)
AT_TOKEN_LIST = tl.constexpr(41)
AT_TOKEN_LIST_SLOT_STRIDE = tl.constexpr(42)
AT_WEIGHT = tl.constexpr(43)
AT_WEIGHT_SLOT_STRIDE = tl.constexpr(44)
AT_Y = tl.constexpr(47)
AT_Y_SLOT_STRIDE = tl.constexpr(48)
AT_ROW_FLAG = tl.constexpr(49)
AT_ROW_FLAG_SLOT_STRIDE = tl.constexpr(50)
AT_ROW_FLAG_STRIDE = tl.constexpr(51)
AT_ROW = tl.constexpr(52)
AT_ROW_SLOT_STRIDE = tl.constexpr(53)
AT_Z = tl.constexpr(54)
AT_Z_SLOT_STRIDE = tl.constexpr(55)

# ``call``: int64 [8], made by the host or by ``begin``; a handle keeps it, so combine takes its n from memory, too.
CALL_N = tl.constexpr(0)
CALL_CODE = tl.constexpr(1)  # code(n)
CALL_SLOT = tl.constexpr(2)  # n mod NS
CALL_RECORD_SLOT = tl.constexpr(3)  # n mod NREC, which is also n mod NX
CALL_CLEAR = tl.constexpr(4)  # 1: the codes of this slot are of the lap before (``clear``)
CALL_WORDS = tl.constexpr(8)

# ``state``: int32 [programs, 8], zeros before the first launch of a kernel. A kernel whose polls ran out can be launched
# again with the same state (the host zeroes ERROR) and goes on where each program stopped.
STATE_ERROR = tl.constexpr(0)  # one of the ERROR_ numbers
STATE_PHASE = tl.constexpr(1)  # the phase the program is in
STATE_ITEM = tl.constexpr(2)  # items of it that it has done
STATE_WHO = tl.constexpr(3)  # the rank concerned
STATE_WORDS = tl.constexpr(8)

ERROR_NONE = tl.constexpr(0)
ERROR_RECORD = tl.constexpr(1)  # polls ran out: the record of WHO isn't there
ERROR_ROWS = tl.constexpr(2)  # polls ran out: rows of WHO aren't there
ERROR_GIVEN = tl.constexpr(3)  # polls ran out: other programs haven't written the rows of WHO
ERROR_CELL = tl.constexpr(4)  # polls ran out: the combine cell of WHO isn't there
ERROR_DONE = tl.constexpr(5)  # polls ran out: the partner hasn't computed expert WHO (local index)
ERROR_READY = tl.constexpr(6)  # polls ran out: rows of expert WHO (local index) aren't ready
ERROR_WAVE = tl.constexpr(7)  # polls ran out: WHO hasn't read the wave
ERROR_JUDGE = tl.constexpr(8)  # the records want the host's judgement; nothing was pushed
ERROR_REFUSED = tl.constexpr(9)  # the cell of WHO is a refusal
ERROR_CELL_JUDGE = tl.constexpr(10)  # the cell of WHO is of another shape, dtype or mode
ERROR_TOKEN = tl.constexpr(11)  # a token list of WHO names a token it doesn't have

# Phases of the fused kernel, in their order; PHASE_END says that a program has done everything.
PHASE_PUBLISH = tl.constexpr(1)
PHASE_RECORDS = tl.constexpr(2)
PHASE_PUSH = tl.constexpr(3)
PHASE_ROWS = tl.constexpr(4)
PHASE_TILES = tl.constexpr(5)
PHASE_CELLS = tl.constexpr(6)  # writing them
PHASE_COMBINE = tl.constexpr(7)  # awaiting the owners' cells, and what follows
PHASE_END = tl.constexpr(8)

# Bits of PHASES, what a launch of the fused kernel does.
DO_PUBLISH = tl.constexpr(1)
DO_PUSH = tl.constexpr(2)
DO_AWAIT = tl.constexpr(4)
DO_EXPERTS = tl.constexpr(8)
DO_RETURN = tl.constexpr(16)
DO_COMBINE = tl.constexpr(32)

# Work lists: int32 [entries, 8]. An entry is rows that lie side by side at both ends and share their flags.
WORK_RANK = tl.constexpr(0)  # the other rank: owner (push, fetch) or source (take, pull, give)
WORK_PLACE = tl.constexpr(1)  # first place in the source's token list (give, fetch: in its z)
WORK_ROWS = tl.constexpr(2)  # how many rows
WORK_ROW = tl.constexpr(
    3
)  # first row at the owner: in its slot, or in the run where the kernel knows where that begins
WORK_EXPERT = tl.constexpr(4)  # push without rows: the expert, and its owner's first one
WORK_FIRST_EXPERT = tl.constexpr(5)
WORK_OUT = tl.constexpr(6)  # take, pull: first row of the output
WORK_GROUP = tl.constexpr(
    7
)  # take: rows that share a flag, counted from the entry's first row; 0 all of them
WORK_WORDS = tl.constexpr(8)

# int32 words of a record's header and of a combine cell, and int64 words of progress (docs/protocol.md).
RECORD_KIND = tl.constexpr(0)
RECORD_EPOCH_LO = tl.constexpr(3)
RECORD_EPOCH_HI = tl.constexpr(4)
RECORD_FLAG_ROWS = tl.constexpr(21)
RECORD_READ_LO = tl.constexpr(24)
RECORD_READ_HI = tl.constexpr(25)
RECORD_HEADER = tl.constexpr(32)  # words from a record's header to its payload
# Words that all ranks must agree on in a fused call: KIND, GENERATION, EPOCH, HIDDEN, DTYPE, QUANT, WEIGHT_DTYPE, MODE,
# PAD, ALIGN, TAG, ROUTING, as bits.
RECORD_AGREE = tl.constexpr(
    sum(1 << word for word in (0, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 22, 23))
)
KIND_COUNTS = tl.constexpr(1)
CELL_DTYPE = tl.constexpr(1)
CELL_HIDDEN = tl.constexpr(2)
CELL_STRIDE = tl.constexpr(3)
CELL_Y_LO = tl.constexpr(4)
CELL_Y_HI = tl.constexpr(5)
CELL_MODE = tl.constexpr(7)
MODE_PULL = tl.constexpr(0)
MODE_PUSH = tl.constexpr(1)

QUANT_NONE = tl.constexpr(0)
QUANT_INT8 = tl.constexpr(1)
QUANT_FP8_E4M3 = tl.constexpr(2)
QUANT_BLOCK = tl.constexpr(128)  # columns that share a scale in fp8_e4m3
