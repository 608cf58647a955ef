"""Where every byte of a window is.

One function, :func:`window_layout`, computes the layout of a group's windows; the kernels (C++, Triton, anything that can
add two integers) are handed its :meth:`WindowLayout.params` as a vector of int64 and compute nothing themselves. All
offsets and strides are bytes and Python integers, so nothing overflows. ``docs/protocol.md`` shows the same as tables.

Shape symbols, here and everywhere: T tokens of a rank, H hidden size, E experts, K top-k, R ranks, N received rows.

A window of rank p holds, in this order::

    header      what this is; written by p before the window is shared
    progress    what p is doing (written by p, read by peers that report a hang)
    status      R cells; cell q is written by rank q only: OK, POISON, LEFT
    record      NREC x R records; record [n mod NREC][q] is written by rank q only: its send counts of call n
    combine     NS x R cells; cell [h mod NS][q] is written by rank q only: "the rows of y you need are there"
    wave        NS x 3 x R cells; cell [n mod NS][what][q] is written by rank q only: how many waves of call n are done
    token list  NX x int32[max_tokens * K]: p's (token, k) pairs sorted by expert, as token numbers (pull dispatch)
    weight      NX x 8 bytes x [max_tokens * K]: the routing weights in the same order, when they travel
    x           (NX + NSTAGE) x max_tokens rows: what p dispatches; the last NSTAGE are handed out by ``group.empty``
    y           NS x max_recv_rows rows: what p's experts made of the rows p received (pull combine); in a fused call first
                those rows themselves, written by their sources
    row flag    NS x max_recv_rows codes, by row: "this row and those before it of its group are there" (not in line)

and, in groups that may push::

    row         NS x max_recv_rows rows: what p receives, written by the sources, each row by one of them (push dispatch)
    z           NS x max_tokens * K rows: what the owners return to p, in the order of p's token list (push combine)

Formats, chosen once per group:

* ``compact``: a code is a u64 in front of what it guards; rows are packed. For groups of CPU ranks.
* ``portable``: a code is a block of 32 bytes, eight equal int32, behind what it guards; rows start at multiples of 512
  bytes. For groups in which a rank moves data by DMA and tests a block with min == max == code.
* ``line``: data as flag. What a rank writes into another one's window is cut in lines of 512 bytes, 480 of payload and a
  block of 32, so that a line proves itself. For links that promise no order between two writes.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

LAYOUT_VERSION = 4
MAGIC = 0x6D6F655F61326131  # "moe_a2a1", big endian: the first eight bytes of a window as an int64
PAGE = 2 * 1024 * 1024  # windows and their row regions are cut in huge pages
REGION_ALIGN = 4096
CACHE_LINE = 64
LINE = 512  # of the line format: LINE_PAYLOAD bytes, then a code block
LINE_PAYLOAD = 480


class Format(enum.IntEnum):
    COMPACT = 0
    PORTABLE = 1
    LINE = 2


class Mode(enum.IntEnum):
    """Who moves the rows of a source (dispatch) or of an owner (combine)."""

    PULL = 0
    PUSH = 1
    FUSED = 2  # dispatch only: pushed, into the y of the owner


class Quant(enum.IntEnum):
    """How rows are quantised while they travel."""

    NONE = 0
    INT8 = 1
    FP8_E4M3 = 2


class Wave(enum.IntEnum):
    """What a wave cell of rank q in the window of p counts."""

    DISPATCH_READ = 0  # waves of p's pushed rows that q has copied out of its window
    COMBINE_READY = 1  # waves of y that q has made readable for p
    COMBINE_READ = 2  # waves of p's y that q has copied


class HeaderWord(enum.IntEnum):
    """int64 words of a window's header."""

    MAGIC = 0
    VERSION = 1
    FORMAT = 2
    GENERATION = 3
    RANK = 4
    WORLD_SIZE = 5
    TOTAL_BYTES = 6
    NONCE_LO = (
        7  # 16 random bytes of this window: whoever opens it compares them with what the owner announced
    )
    NONCE_HI = 8


class Kind(enum.IntEnum):
    """What a record is."""

    COUNTS = 1
    ROUND = 2
    ABORT = 3
    LEAVE = 4


class Status(enum.IntEnum):
    """Code of a status cell; 0 is never written."""

    OK = 1
    POISON = 2
    LEFT = 3
    EXCLUDED = 4


class Phase(enum.IntEnum):
    """What a rank is doing, in its progress cell."""

    IDLE = 0
    DISPATCH_PACK = 1
    DISPATCH_COUNTS = 2
    DISPATCH_ROWS = 3
    COMBINE_WRITE = 4
    COMBINE_WAIT = 5
    COMBINE_SUM = 6
    DISPATCH_PUSH = 7


class RecordWord(enum.IntEnum):
    """int32 words of a record's header. 64-bit values take two words, low word first; unused words are 0."""

    KIND = 0
    REASON = 1  # abort: a number of errors.FAILURE_KINDS
    GENERATION = 2
    EPOCH_LO = 3
    EPOCH_HI = 4
    TOKENS = 5
    HIDDEN = 6
    DTYPE = 7  # DTYPE_CODES
    QUANT = 8  # 0 none
    WEIGHT_DTYPE = 9  # DTYPE_CODES, 0 when no weights travel
    TOP_K = 10
    MODE = 11  # Mode
    PAD_LO = 12  # pad_to of this source as an owner, -1 when exact
    PAD_HI = 13
    ALIGN = 14  # an expert's rows are padded to a multiple of this, 1 when not
    TAG_LO = 15
    TAG_HI = 16
    X_LO = 17  # byte offset of x in its owner's window
    X_HI = 18
    X_STRIDE = 19  # bytes from one row of x to the next
    TEXT_BYTES = 20  # abort: bytes of UTF-8 text in the payload
    FLAG_ROWS = 21  # push, fused: rows of an expert that share a flag, 0 all of them
    ROUTING_LO = 22  # 0, or a digest of the matrix that is used again; then the payload is empty
    ROUTING_HI = 23
    READ_LO = 24  # the source reads nothing of calls up to this one any more
    READ_HI = 25
    ASYNC = 26  # 1 when the source may wait for its rows later than the call
    GRADIENTS = 27  # bits of Gradient: what the source wants gradients of; plus said_weights()
    IDS_LO = 28  # ids_digest() of the source's topk_idx
    IDS_HI = 29


class Gradient(enum.IntFlag):
    """What a rank wants gradients of. Backward is collective, so what it does is agreed on in forward."""

    X = 1
    WEIGHTS = 2  # the routing weights
    EXPERTS = 4  # the experts' parameters
    RECOMPUTE = 8  # the fused call: rows aren't kept, so backward dispatches x again


GRADIENT_BITS = 15
COMBINE_WEIGHTS = 16  # of RecordWord.GRADIENTS: this times one more than the code of the weights' dtype


def said_weights(topk_weights: torch.Tensor | None) -> int:
    """What GRADIENTS says, beside the bits, of the weights that combine will get: they travel in backward, so ranks must agree.

    0 for a dtype that doesn't travel, which is refused elsewhere.
    """
    code = 0 if topk_weights is None else DTYPE_CODES.get(topk_weights.dtype, -1)
    return (code + 1) * COMBINE_WEIGHTS


class CellWord(enum.IntEnum):
    """int32 words of a combine cell's body (in front of an abort's text)."""

    REASON = 0
    DTYPE = 1
    HIDDEN = 2
    STRIDE = 3  # bytes from one row of y to the next
    Y_LO = 4  # byte offset of y in its owner's window
    Y_HI = 5
    TEXT_BYTES = 6
    MODE = 7  # 0 pull: rows are in the owner's y; 1 push: rows are in the reader's z


class StatusWord(enum.IntEnum):
    """int32 words of a status cell's body."""

    REASON = 0
    WHO = 1  # the rank that was missing, -1 none
    EPOCH_LO = 2
    EPOCH_HI = 3
    PHASE = 4
    GENERATION = 5


class ProgressWord(enum.IntEnum):
    """int64 words of the progress cell. EPOCH is the group's call counter itself: a call reads it, adds one and writes it back,
    so it means the same to a kernel whose arguments were frozen in a graph."""

    EPOCH = 0
    PHASE = 1
    VERDICT = 2  # how the last call that ended did: 0, or the number of its error


RECORD_HEADER_WORDS = 30
RECORD_TEXT_BYTES = 480  # room for an abort's text even where E is small
CELL_BODY_WORDS = 8
CELL_TEXT_BYTES = 192
CODE_BLOCK = 32  # portable and line: eight equal int32
SCALAR_BYTES = 8  # of the widest scalar that backward sends for a pair
ROW_TAIL = 32  # at most, beside a row: scales that quantising doesn't make room for, alignment and a weight

DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float64: 4,
}
CODE_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}


def align_up(value: int, to: int) -> int:
    """The smallest multiple of ``to`` that is not below ``value``."""
    return -(-value // to) * to


def lines_for(size: int) -> int:
    """Lines that ``size`` bytes take in the line format.

    >>> lines_for(480), lines_for(481)
    (1, 2)
    """
    return -(-size // LINE_PAYLOAD)


def row_offset(region: int, slot: int, slot_stride: int, row: int, row_stride: int) -> int:
    """Byte offset of a row: ``region + slot * slot_stride + row * row_stride`` (64-bit by being Python integers).

    >>> row_offset(0, 1, 4096, 3, 512)
    5632
    """
    return region + slot * slot_stride + row * row_stride


@dataclass(frozen=True)
class WindowLayout:
    """The layout of every window of a group, in bytes. The field order is what :meth:`params` hands to kernels."""

    version: int
    format: int
    world_size: int
    num_experts: int
    max_tokens: int
    top_k: int
    row_bytes: int  # the widest row: hidden_size * itemsize of the group
    recv_rows: int  # rows of one y slot
    slots: int  # NS: handles open at once
    record_slots: int  # NREC
    source_slots: int  # NX: slots of token list, weight and x
    stage_slots: int  # NSTAGE: x slots that group.empty hands out
    code_max: int  # V: codes are 1..V
    generation: int
    row_align: int  # rows start at multiples of this
    push: int  # 1 when the push regions exist
    progress: int
    status: int
    status_stride: int
    status_body: int
    status_code: int
    record: int
    record_slot_stride: int
    record_stride: int
    record_header: int
    record_payload: int
    record_payload_bytes: int
    record_code: int
    cell: int
    cell_slot_stride: int
    cell_stride: int
    cell_body: int
    cell_text: int
    cell_text_bytes: int
    cell_code: int
    wave: int
    wave_slot_stride: int
    wave_kind_stride: int
    wave_stride: int
    wave_mark: int
    wave_code: int
    token_list: int
    token_list_slot_stride: int
    weight: int
    weight_slot_stride: int
    x: int
    x_slot_stride: int
    y: int
    y_slot_stride: int
    row_flag: int
    row_flag_slot_stride: int
    row_flag_stride: int
    row: int
    row_slot_stride: int
    z: int
    z_slot_stride: int
    total_bytes: int

    def params(self) -> list[int]:
        """The fields as a vector of int64, in the order of ``enum LayoutParam`` in op_kernel/cpu/layout.h."""
        return [getattr(self, field.name) for field in fields(self)]

    def row_stride(self, hidden: int, itemsize: int) -> int:
        """Bytes from one row of x or y to the next for rows of ``hidden`` elements of ``itemsize`` bytes."""
        return align_up(hidden * itemsize, self.row_align)

    def code(self, epoch: int) -> int:
        """The code of an epoch: 1..V, never 0 (0 is a cell that was never written)."""
        return (epoch - 1) % self.code_max + 1

    def lap(self, epoch: int) -> int:
        """How often the codes have wrapped before this epoch."""
        return (epoch - 1) // self.code_max

    def regions(self) -> dict[str, int]:
        """Bytes of each region."""
        starts = {
            "header": 0,
            "progress": self.progress,
            "status": self.status,
            "record": self.record,
            "combine": self.cell,
            "wave": self.wave,
            "token_list": self.token_list,
            "weight": self.weight,
            "x": self.x,
            "y": self.y,
            "row_flag": self.row_flag,
            "row": self.row,
            "z": self.z,
        }
        ends = [*list(starts.values())[1:], self.total_bytes]
        return {name: end - start for (name, start), end in zip(starts.items(), ends, strict=True)}


def window_layout(
    *,
    world_size: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    row_bytes: int,
    recv_rows: int,
    slots: int = 2,
    record_format: Format = Format.COMPACT,
    push: bool = False,
    code_max: int | None = None,
    generation: int = 1,
) -> WindowLayout:
    """Computes the layout of one window; all ranks of a group compute the same.

    Args:
        world_size, num_experts, top_k, max_tokens: R, E, K and the largest T.
        row_bytes: bytes of the widest row (hidden size times item size).
        recv_rows: rows one y slot holds.
        slots: NS, the handles that may be open, and the dispatches that may be under way, at once; at least 2.
        record_format: ``Format.COMPACT``, ``Format.PORTABLE`` or ``Format.LINE``.
        push: with the regions that push needs.
        code_max: V, the largest code; None takes the format's own (2**62 or 2**31 - 1).
        generation: number of this set of windows.

    Raises:
        ValueError: for a size that can't be laid out, naming it.
    """
    # A rank publishes record n only when it has read all records of n - NS, which a peer published after it had read all
    # of n - 2 NS: so a record is read before the one 2 NS later overwrites it. The same holds for x and its lists, since a rank
    # that publishes n has also done with the rows of n - NS.
    record_slots = source_slots = 2 * slots
    line, blocks = record_format == Format.LINE, record_format != Format.COMPACT
    limit = 2**31 - 1 if blocks else 2**62
    if code_max is None:
        code_max = limit
    # Two uses of a slot in a row must have different codes.
    least = max(record_slots, slots) + 1
    if not least <= code_max <= limit:
        raise ValueError(
            f"window_layout: code_max = {code_max} is outside {least}..{limit} ({record_format.name})"
        )
    for name, value, minimum in (
        ("world_size", world_size, 1),
        ("num_experts", num_experts, 1),
        ("top_k", top_k, 1),
        ("max_tokens", max_tokens, 0),
        ("row_bytes", row_bytes, 1),
        ("recv_rows", recv_rows, 0),
        ("slots", slots, 2),
    ):
        if value < minimum:
            raise ValueError(f"window_layout: {name} = {value} is below {minimum}")
    if max_tokens * top_k >= 2**31 or recv_rows >= 2**31:
        raise ValueError(
            f"window_layout: max_tokens * top_k = {max_tokens * top_k} and recv_rows = {recv_rows} must be below 2**31, "
            "since positions travel as int32"
        )

    row_align = 512 if blocks else 1
    stage_slots = slots
    payload_bytes = align_up(max(4 * num_experts, RECORD_TEXT_BYTES), CODE_BLOCK)
    if line:
        # Offsets are those of the payload; a code stands at the end of each line.
        record_header, record_payload, record_code = 0, 128, LINE_PAYLOAD
        record_stride = lines_for(record_payload + payload_bytes) * LINE
        cell_body, cell_text, cell_code, cell_stride = 0, 4 * CELL_BODY_WORDS, LINE_PAYLOAD, LINE
        status_body, status_code, status_stride = 0, LINE_PAYLOAD, LINE
        wave_mark, wave_code, wave_stride, row_flag_stride = 0, LINE_PAYLOAD, LINE, 0
    elif blocks:
        record_header, record_payload = 0, 128
        record_code = record_payload + payload_bytes
        record_stride = align_up(record_code + CODE_BLOCK, 512)
        cell_body, cell_text = 0, 4 * CELL_BODY_WORDS
        cell_code = cell_text + CELL_TEXT_BYTES
        cell_stride = align_up(cell_code + CODE_BLOCK, 512)
        status_body, status_code, status_stride = 0, 32, 512
        wave_mark, wave_code, wave_stride, row_flag_stride = 0, CODE_BLOCK, 512, CODE_BLOCK
    else:
        # The code stands in front so that a small record takes as few cache lines as can be.
        record_code, record_header, record_payload = 0, 8, 128
        record_stride = align_up(record_payload + payload_bytes, CACHE_LINE)
        cell_code, cell_body = 0, 8
        cell_text = cell_body + 4 * CELL_BODY_WORDS
        cell_stride = align_up(cell_text + CELL_TEXT_BYTES, CACHE_LINE)
        status_code, status_body, status_stride = 0, 8, CACHE_LINE
        wave_code, wave_mark, wave_stride, row_flag_stride = 0, 8, CACHE_LINE, 8

    position = REGION_ALIGN  # the header has the first page to itself

    def region(size: int, align: int = REGION_ALIGN) -> int:
        nonlocal position
        start = align_up(position, align)
        position = start + size
        return start

    progress = region(512)
    status = region(world_size * status_stride, 512)
    record_slot_stride = world_size * record_stride
    record = region(record_slots * record_slot_stride)
    cell_slot_stride = world_size * cell_stride
    cell = region(slots * cell_slot_stride)
    wave_kind_stride = world_size * wave_stride
    wave_slot_stride = len(Wave) * wave_kind_stride
    wave = region(slots * wave_slot_stride)
    pairs = max_tokens * top_k
    token_list_slot_stride = align_up(4 * pairs, REGION_ALIGN)
    token_list = region(source_slots * token_list_slot_stride)
    weight_slot_stride = align_up(8 * pairs, REGION_ALIGN)
    weight = region(source_slots * weight_slot_stride)
    # A row that travels has its scales, and a pushed one its weight, behind it.
    x_slot_stride = align_up(max_tokens * align_up(row_bytes + ROW_TAIL, row_align), REGION_ALIGN)
    x = region((source_slots + stage_slots) * x_slot_stride)
    # Backward sends a scalar for each pair back, which may be wider than a very narrow row.
    returned_bytes = max(row_bytes, SCALAR_BYTES)
    y_slot_stride = align_up(recv_rows * align_up(returned_bytes, row_align), REGION_ALIGN)
    y = region(slots * y_slot_stride)
    row_flag_slot_stride = align_up(recv_rows * row_flag_stride, REGION_ALIGN)
    row_flag = region(slots * row_flag_slot_stride)

    def remote_rows(rows: int, size: int) -> int:
        """Bytes of a slot of rows that other ranks write."""
        return align_up(rows * (lines_for(size) * LINE if line else align_up(size, row_align)), REGION_ALIGN)

    row_slot_stride = remote_rows(recv_rows, row_bytes + ROW_TAIL) if push else 0
    row = region(slots * row_slot_stride)
    z_slot_stride = remote_rows(pairs, returned_bytes) if push else 0
    z = region(slots * z_slot_stride)
    return WindowLayout(
        version=LAYOUT_VERSION,
        format=int(record_format),
        world_size=world_size,
        num_experts=num_experts,
        max_tokens=max_tokens,
        top_k=top_k,
        row_bytes=row_bytes,
        recv_rows=recv_rows,
        slots=slots,
        record_slots=record_slots,
        source_slots=source_slots,
        stage_slots=stage_slots,
        code_max=code_max,
        generation=generation,
        row_align=row_align,
        push=int(push),
        progress=progress,
        status=status,
        status_stride=status_stride,
        status_body=status_body,
        status_code=status_code,
        record=record,
        record_slot_stride=record_slot_stride,
        record_stride=record_stride,
        record_header=record_header,
        record_payload=record_payload,
        record_payload_bytes=payload_bytes,
        record_code=record_code,
        cell=cell,
        cell_slot_stride=cell_slot_stride,
        cell_stride=cell_stride,
        cell_body=cell_body,
        cell_text=cell_text,
        cell_text_bytes=CELL_TEXT_BYTES,
        cell_code=cell_code,
        wave=wave,
        wave_slot_stride=wave_slot_stride,
        wave_kind_stride=wave_kind_stride,
        wave_stride=wave_stride,
        wave_mark=wave_mark,
        wave_code=wave_code,
        token_list=token_list,
        token_list_slot_stride=token_list_slot_stride,
        weight=weight,
        weight_slot_stride=weight_slot_stride,
        x=x,
        x_slot_stride=x_slot_stride,
        y=y,
        y_slot_stride=y_slot_stride,
        row_flag=row_flag,
        row_flag_slot_stride=row_flag_slot_stride,
        row_flag_stride=row_flag_stride,
        row=row,
        row_slot_stride=row_slot_stride,
        z=z,
        z_slot_stride=z_slot_stride,
        total_bytes=align_up(position, PAGE),
    )


def expert_ranges(num_experts: int, world_size: int) -> list[range]:
    """Global expert ids of each rank: contiguous, and the first E mod R ranks own one expert more.

    >>> expert_ranges(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    share, more = divmod(num_experts, world_size)
    starts = [rank * share + min(rank, more) for rank in range(world_size + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


# ---------------------------------------------------------------------------------------------------------------------
# The handle tensor: what dispatch leaves for combine. int64, one-dimensional; int32 parts are packed two to a word.


class HandleWord(enum.IntEnum):
    """int64 words of a handle's header."""

    MAGIC = 0
    EPOCH = 1
    GENERATION = 2
    TOKENS = 3
    TOP_K = 4
    HIDDEN = 5
    ROWS = 6  # N, rows this rank received, with the padding of ALIGN
    WORLD_SIZE = 7
    NUM_EXPERTS = 8
    RANK = 9
    DTYPE = 10
    COUNTS = 11  # first word of counts: int64 [E_local]
    OFFSETS = 12  # first word of offsets: int32 [E_local + 1]
    MATRIX = 13  # first word of the send-count matrix: int32 [R, E]
    EXPERT = 14  # first word of expert: int32 [T, K], -1 dropped
    ROW = 15  # first word of row: int32 [T, K], position in the owner's received rows, -1 dropped
    GROUP = 16  # which group of this process it belongs to
    ALIGN = 17  # each expert's rows are padded to a multiple of this
    OUT_ROWS = 18  # rows of d.x: ROWS, or pad_to
    GRADIENTS = 19  # bits of Gradient: what some rank wants gradients of
    IDS = 20  # first word of the digests of all ranks' topk_idx: int64 [R]


HANDLE_HEADER_WORDS = 21
HANDLE_MAGIC = 0x6D6F655F68646C31


def handle_words(
    *, num_tokens: int, top_k: int, world_size: int, num_experts: int, local_experts: int
) -> list[int]:
    """First words of counts, offsets, matrix, expert, row and ids, and the number of words in all."""

    def int32s(count: int) -> int:
        return (count + 1) // 2

    counts = HANDLE_HEADER_WORDS
    offsets = counts + local_experts
    matrix = offsets + int32s(local_experts + 1)
    expert = matrix + int32s(world_size * num_experts)
    row = expert + int32s(num_tokens * top_k)
    ids = row + int32s(num_tokens * top_k)
    return [counts, offsets, matrix, expert, row, ids, ids + world_size]


class HandleView:
    """Reads a handle tensor (int64, 1-D, on the CPU). Tensors are views of it, made when asked for."""

    __slots__ = ("_meta", "_words")

    def __init__(self, meta: torch.Tensor) -> None:
        self._meta = meta
        self._words: list[int] = meta[:HANDLE_HEADER_WORDS].tolist()
        if self._words[HandleWord.MAGIC] != HANDLE_MAGIC:
            raise ValueError("not a handle of moe_a2a.dispatch: its first word is wrong")

    @property
    def epoch(self) -> int:
        """n, the call number of the dispatch."""
        return self._words[HandleWord.EPOCH]

    @property
    def generation(self) -> int:
        return self._words[HandleWord.GENERATION]

    @property
    def num_tokens(self) -> int:
        return self._words[HandleWord.TOKENS]

    @property
    def top_k(self) -> int:
        return self._words[HandleWord.TOP_K]

    @property
    def hidden(self) -> int:
        return self._words[HandleWord.HIDDEN]

    @property
    def rows(self) -> int:
        return self._words[HandleWord.ROWS]

    @property
    def out_rows(self) -> int:
        """Rows of what dispatch returned: ``rows``, or pad_to."""
        return self._words[HandleWord.OUT_ROWS]

    @property
    def align(self) -> int:
        return self._words[HandleWord.ALIGN]

    @property
    def gradients(self) -> Gradient:
        """What some rank of the group wants gradients of."""
        return Gradient(self._words[HandleWord.GRADIENTS])

    @property
    def world_size(self) -> int:
        return self._words[HandleWord.WORLD_SIZE]

    @property
    def num_experts(self) -> int:
        return self._words[HandleWord.NUM_EXPERTS]

    @property
    def rank(self) -> int:
        return self._words[HandleWord.RANK]

    @property
    def dtype(self) -> torch.dtype:
        return CODE_DTYPES[self._words[HandleWord.DTYPE]]

    @property
    def counts(self) -> torch.Tensor:
        """[E_local] int64: rows of each local expert."""
        return self._meta[self._words[HandleWord.COUNTS] : self._words[HandleWord.OFFSETS]]

    def _int32(self, word: HandleWord, count: int) -> torch.Tensor:
        start = self._words[word]
        return self._meta[start : start + (count + 1) // 2].view(torch.int32)[:count]

    @property
    def offsets(self) -> torch.Tensor:
        """[E_local + 1] int32: first row of each local expert, and N."""
        return self._int32(
            HandleWord.OFFSETS, self._words[HandleWord.OFFSETS] - self._words[HandleWord.COUNTS] + 1
        )

    @property
    def counts_RE(self) -> torch.Tensor:
        """[R, E] int32: the send-count matrix of the call."""
        return self._int32(HandleWord.MATRIX, self.world_size * self.num_experts).view(
            self.world_size, self.num_experts
        )

    @property
    def expert_TK(self) -> torch.Tensor:
        """[T, K] int32: the expert of each pair, -1 where dropped."""
        return self._int32(HandleWord.EXPERT, self.num_tokens * self.top_k).view(self.num_tokens, self.top_k)

    @property
    def row_TK(self) -> torch.Tensor:
        """[T, K] int32: the row of each pair among its owner's received rows, -1 where dropped."""
        return self._int32(HandleWord.ROW, self.num_tokens * self.top_k).view(self.num_tokens, self.top_k)

    @property
    def ids(self) -> list[int]:
        """Digests of all ranks' topk_idx, the same on every rank of a call."""
        start = self._words[HandleWord.IDS]
        return self._meta[start : start + self.world_size].tolist()


def ids_digest(topk_idx: torch.Tensor) -> torch.Tensor:
    """A number that tells routings [T, K] of one shape apart: int64 [], on the device of the ids (-1 for no expert).

    The sum over pairs p = t K + k, modulo 2^64, of ``(id + 1) * factor(p)``, where the factor is odd: one id that changes
    always changes the sum. ``op_kernel/cpu/route.cpp`` has the same.

    >>> [hex(ids_digest(torch.tensor([ids])).item() % 2**64) for ids in ([-1, -1], [0, -1], [-1, 0])]
    ['0x0', '0x7fc315610e539abd', '0x12309df51ca73579']
    """
    pairs = torch.arange(1, topk_idx.numel() + 1, device=topk_idx.device)
    mixed = pairs * _signed(0x9E3779B97F4A7C15)
    # torch's shift keeps the sign.
    factor = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _signed(0xFF51AFD7ED558CCD) | 1
    return (factor * (topk_idx.reshape(-1).long() + 1)).sum()


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def routing_digest(meta: torch.Tensor) -> int:
    """31 bits that tell the routings of handles apart; the same on every rank of a call."""
    return zlib.crc32(repr(HandleView(meta).ids).encode()) & 0x7FFFFFFF


def pack_handle(
    *,
    epoch: int,
    generation: int,
    num_tokens: int,
    top_k: int,
    hidden: int,
    rows: int,
    rank: int,
    dtype: torch.dtype,
    counts_RE: torch.Tensor,
    expert_TK: torch.Tensor,
    row_TK: torch.Tensor,
    ids_R: Sequence[int],
    num_experts: int,
    group: int = 0,
    align: int = 1,
    out_rows: int | None = None,
    gradients: int = 0,
) -> torch.Tensor:
    """Builds the handle tensor in plain torch (the C++ kernel writes the same words).

    Args:
        counts_RE: [R, E] integers, the send-count matrix.
        expert_TK, row_TK: [T, K] integers, -1 where dropped.
        ids_R: :func:`ids_digest` of each rank's topk_idx.

    Returns:
        int64 [words]; read it with :class:`HandleView`.
    """
    world_size = counts_RE.shape[0]
    local = expert_ranges(num_experts, world_size)[rank]
    words = handle_words(
        num_tokens=num_tokens,
        top_k=top_k,
        world_size=world_size,
        num_experts=num_experts,
        local_experts=len(local),
    )
    meta = torch.zeros(words[-1], dtype=torch.int64, device="cpu")
    header: dict[HandleWord, Any] = {
        HandleWord.MAGIC: HANDLE_MAGIC,
        HandleWord.EPOCH: epoch,
        HandleWord.GENERATION: generation,
        HandleWord.TOKENS: num_tokens,
        HandleWord.TOP_K: top_k,
        HandleWord.HIDDEN: hidden,
        HandleWord.ROWS: rows,
        HandleWord.WORLD_SIZE: world_size,
        HandleWord.NUM_EXPERTS: num_experts,
        HandleWord.RANK: rank,
        HandleWord.DTYPE: DTYPE_CODES[dtype],
        HandleWord.GROUP: group,
        HandleWord.ALIGN: align,
        HandleWord.OUT_ROWS: rows if out_rows is None else out_rows,
        HandleWord.GRADIENTS: gradients,
        HandleWord.COUNTS: words[0],
        HandleWord.OFFSETS: words[1],
        HandleWord.MATRIX: words[2],
        HandleWord.EXPERT: words[3],
        HandleWord.ROW: words[4],
        HandleWord.IDS: words[5],
    }
    for word, value in header.items():
        meta[word] = value
    view = HandleView(meta)
    counts = counts_RE[:, local.start : local.stop].sum(0)
    view.counts.copy_(counts)
    view.offsets[1:].copy_((-(-counts // align) * align).cumsum(0))
    view.counts_RE.copy_(counts_RE)
    view.expert_TK.copy_(expert_TK)
    view.row_TK.copy_(row_TK)
    meta[words[5] :] = torch.tensor(ids_R, dtype=torch.int64)
    return meta
