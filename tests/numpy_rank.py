"""A rank written a second time, in numpy, from docs/protocol.md alone.

It shares no code with the product: every offset, every code and every order of rows below is computed here from
the document. It takes part in a group by reading and writing the mapped windows of all ranks, so a group in which
one rank is a :class:`NumpyRank` and the others are the product works only if both follow the document.

It is slow on purpose: plain loops, no torch, nothing clever.

T tokens of a rank, H hidden, E experts, K top-k, R ranks, N received rows, NS slots, V largest code, P kept pairs of a rank,
B bytes of a row.

Elements are numpy arrays of the storage types in :data:`STORAGE`; numpy has no bfloat16, so its bits travel as
uint16 and are widened and rounded here with integer arithmetic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# ------------------------------------------------------------------------------------- the numbers of the document

COMPACT, PORTABLE, LINE = 0, 1, 2
COUNTS, ROUND, ABORT, LEAVE = 1, 2, 3, 4
OK, POISON, LEFT, EXCLUDED = 1, 2, 3, 4
(
    IDLE,
    DISPATCH_PACK,
    DISPATCH_COUNTS,
    DISPATCH_ROWS,
    COMBINE_WRITE,
    COMBINE_WAIT,
    COMBINE_SUM,
    DISPATCH_PUSH,
) = range(8)
PULL, PUSH, FUSED = 0, 1, 2
X, WEIGHTS, EXPERTS, RECOMPUTE = 1, 2, 4, 8  # of GRADIENTS
NONE, INT8, FP8_E4M3 = 0, 1, 2
DISPATCH_READ, COMBINE_READY, COMBINE_READ = 0, 1, 2
NO_DTYPE, FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = range(5)
RECORD_WORDS, CELL_WORDS, STATUS_WORDS = 30, 8, 8
CELL_TEXT_BYTES = 192
CODE_BYTES = 32  # portable and line
LINE_BYTES, LINE_PAYLOAD = 512, 480
LEAST_PAYLOAD = 480
BESIDE_A_ROW = 32
LEAST_RETURNED = 8  # room for a row of y or z
SCALE_COLUMNS = 128  # of FP8_E4M3
LARGEST_CODE = {COMPACT: 2**62, PORTABLE: 2**31 - 1, LINE: 2**31 - 1}
REFUSED_BIT = 2**63  # compact
LOST, TIMED_OUT = 6, 7


def _numbered(names: str) -> dict[str, int]:
    return {name: word for word, name in enumerate(names.split())}


HEADER = _numbered("MAGIC VERSION FORMAT GENERATION RANK WORLD_SIZE TOTAL_BYTES NONCE_LO NONCE_HI")
MAGIC = 0x6D6F655F61326131
VERSION = 4
RECORD = _numbered(
    "KIND REASON GENERATION EPOCH_LO EPOCH_HI TOKENS HIDDEN DTYPE QUANT WEIGHT_DTYPE TOP_K MODE PAD_LO PAD_HI ALIGN "
    "TAG_LO TAG_HI X_LO X_HI X_STRIDE TEXT_BYTES FLAG_ROWS ROUTING_LO ROUTING_HI READ_LO READ_HI ASYNC GRADIENTS "
    "IDS_LO IDS_HI"
)
CELL = _numbered("REASON DTYPE HIDDEN STRIDE Y_LO Y_HI TEXT_BYTES MODE")
STATUS = _numbered("REASON WHO EPOCH_LO EPOCH_HI PHASE GENERATION")
PROGRESS = _numbered("EPOCH PHASE VERDICT")

STORAGE: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    BFLOAT16: np.dtype("<u2"),
    FLOAT16: np.dtype("<f2"),
    FLOAT64: np.dtype("<f8"),
}


class ProtocolError(AssertionError):
    """A peer wrote something that the document does not allow."""


class PeerAborted(RuntimeError):
    """A peer's record is an ABORT, or its combine cell a refusal."""


class CallMismatch(RuntimeError):
    """The records of a call, or the combine cells of a handle, don't go together."""


class PadTooSmall(RuntimeError):
    """Some rank would receive more rows than its PAD."""


class PeerGone(RuntimeError):
    """A peer poisoned the group or left it."""


class HandleExpired(RuntimeError):
    """Combined or received before, or too many newer dispatches have started; nothing was sent."""


# ------------------------------------------------------------------------------------------------------- the layout


def align(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return -(-a // b) * b


@dataclass(frozen=True)
class Sizes:
    """What a group was created with."""

    world_size: int
    num_experts: int
    top_k: int
    max_tokens: int
    row_bytes: int
    max_recv_rows: int
    slots: int
    push: bool = False

    def first_expert(self, rank: int) -> int:
        """The first expert of ``rank``; E for rank R."""
        e, r = divmod(self.num_experts, self.world_size)
        return rank * e + min(rank, r)

    def experts_of(self, rank: int) -> range:
        """The experts of ``rank``."""
        return range(self.first_expert(rank), self.first_expert(rank + 1))


class Layout:
    """Byte offsets of a window; the names are those of the document's tables."""

    def __init__(self, sizes: Sizes, fmt: int) -> None:
        R, NS = sizes.world_size, sizes.slots
        self.format = fmt
        self.row_align = 1 if fmt == COMPACT else 512
        front = 8 if fmt == COMPACT else 0  # compact puts the code in front of what it guards

        def code_and_stride(end: int) -> tuple[int, int]:
            """Where the code of a cell or record is whose bytes end there, and how far the next one is."""
            if fmt == COMPACT:
                return 0, align(end, 64)
            if fmt == PORTABLE:
                return end, align(end + CODE_BYTES, 512)
            return LINE_PAYLOAD, self.remote_stride(end)

        self.record_header = front
        self.record_payload = 128
        self.record_payload_bytes = align(max(4 * sizes.num_experts, LEAST_PAYLOAD), 32)
        self.record_code, self.record_stride = code_and_stride(
            self.record_payload + self.record_payload_bytes
        )

        self.cell_body = front
        self.cell_text = front + 4 * CELL_WORDS
        self.cell_text_bytes = CELL_TEXT_BYTES
        self.cell_code, self.cell_stride = code_and_stride(self.cell_text + self.cell_text_bytes)

        self.status_body = front
        self.status_code, self.status_stride = code_and_stride(front + 4 * STATUS_WORDS)

        self.wave_mark = front
        self.wave_code, self.wave_stride = code_and_stride(front + (8 if fmt == COMPACT else CODE_BYTES))

        pairs, cap = sizes.max_tokens * sizes.top_k, sizes.max_recv_rows
        self.progress = 4096
        self.status = 4096 + 512
        self._end = self.status + R * self.status_stride
        self.record, self.record_slot_stride = self._region(R * self.record_stride, 2 * NS, 1)
        self.cell, self.cell_slot_stride = self._region(R * self.cell_stride, NS, 1)
        self.wave, self.wave_slot_stride = self._region(3 * R * self.wave_stride, NS, 1)
        self.token_list, self.token_list_slot_stride = self._region(4 * pairs, 2 * NS)
        self.weight, self.weight_slot_stride = self._region(8 * pairs, 2 * NS)
        self.x_row = align(sizes.row_bytes + BESIDE_A_ROW, self.row_align)
        self.x, self.x_slot_stride = self._region(sizes.max_tokens * self.x_row, 3 * NS)
        returned = max(sizes.row_bytes, LEAST_RETURNED)
        self.y_row = align(returned, self.row_align)
        self.y, self.y_slot_stride = self._region(cap * self.y_row, NS)
        self.y_end = self._end
        self.row_flag_stride = {COMPACT: 8, PORTABLE: CODE_BYTES, LINE: 0}[fmt]
        self.row_flag, self.row_flag_slot_stride = self._region(cap * self.row_flag_stride, NS)
        if sizes.push:
            self.row, self.row_slot_stride = self._region(
                cap * self.remote_stride(sizes.row_bytes + BESIDE_A_ROW), NS
            )
            self.z, self.z_slot_stride = self._region(pairs * self.remote_stride(returned), NS)
        self.total_bytes = align(self._end, 2 << 20)

    def _region(self, slot_bytes: int, slots: int, unit: int = 4096) -> tuple[int, int]:
        """Start and slot stride of the next region."""
        start, stride = align(self._end, 4096), align(slot_bytes, unit)
        self._end = start + slots * stride
        return start, stride

    def remote_stride(self, row_bytes: int) -> int:
        """From one row to the next where another rank writes them."""
        if self.format == LINE:
            return LINE_BYTES * -(-row_bytes // LINE_PAYLOAD)
        return align(row_bytes, self.row_align)


# --------------------------------------------------------------------------------------------------- words and floats


def low(value: int) -> int:
    """The low 32 bits as an int32."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def high(value: int) -> int:
    """The high 32 of 64 bits as an int32."""
    return low(value >> 32)


def joined(low_word: int, high_word: int) -> int:
    """The signed 64-bit number of two int32 words."""
    return (high_word << 32) | (low_word & 0xFFFFFFFF)


def both(name: str, value: int) -> dict[str, int]:
    """The two words of a 64-bit value."""
    return {f"{name}_LO": low(value), f"{name}_HI": high(value)}


def cut(text: str, limit: int) -> bytes:
    """The text as UTF-8, without a broken character at the end."""
    return text.encode()[:limit].decode(errors="ignore").encode()


def digest(counts_RE: Array, n: int) -> int:
    """What ROUTING carries of call n's matrix; never 0."""
    s = 0x9E3779B97F4A7C15
    for value in [*counts_RE.reshape(-1).tolist(), n % 2**32, n >> 32]:
        s = (s ^ int(value)) * 0xFF51AFD7ED558CCD % 2**64
        s ^= s >> 32
    return s or 1


def ids_digest(idx_TK: Array) -> int:
    """What IDS carries of a routing."""
    total = 0
    for p, value in enumerate(idx_TK.reshape(-1).tolist()):
        a = (p + 1) * 0x9E3779B97F4A7C15 % 2**64
        total += (value + 1) * ((a ^ (a >> 32)) * 0xFF51AFD7ED558CCD % 2**64 | 1)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


def widen(values: Array, dtype: int, acc: type[np.floating[Any]]) -> Array:
    """Storage to the type that sums are made in."""
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(acc)
    return values.astype(acc)


def narrow(values: Array, dtype: int) -> Array:
    """Sums to storage, rounded once, to nearest even."""
    if dtype != BFLOAT16:
        return values.astype(STORAGE[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)  # the carry could run over a NaN's bits


def as_bytes(rows: Array) -> Array:
    """[rows, bytes of a row]."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.uint8).reshape(len(rows), rows[0].nbytes if len(rows) else 0)


@dataclass(frozen=True)
class RowForm:
    """What a row of x is while it travels: elements, scales, and in a pushed row its weight."""

    element_bytes: int
    scales: int
    weight_bytes: int

    @property
    def scales_at(self) -> int:
        return align(self.element_bytes, 4)

    @property
    def pulled_bytes(self) -> int:
        return self.scales_at + 4 * self.scales if self.scales else self.element_bytes

    @property
    def weight_at(self) -> int:
        return align(self.pulled_bytes, 8)

    @property
    def pushed_bytes(self) -> int:
        return self.weight_at + self.weight_bytes if self.weight_bytes else self.pulled_bytes


# ------------------------------------------------------------------------------------------------------------- a rank


@dataclass(frozen=True)
class Handle:
    """What combine and a routing that is used again need of a dispatch."""

    n: int
    idx_TK: Array
    counts_RE: Array
    align: int
    gradients: int = 0  # what some rank wants gradients of
    ids: tuple[int, ...] = ()  # IDS of every rank


@dataclass(frozen=True)
class Met:
    """A call whose records are all here and go together."""

    records: dict[int, dict[str, int]]
    counts_RE: Array
    first_RE: Array
    totals: list[int]
    waves: int
    handle: Handle


@dataclass(frozen=True)
class Computed:
    """What the experts of a fused call made of their rows: y [N, H], and in which order they did."""

    y_NH: Array
    order: list[int]
    handle: Handle


@dataclass(frozen=True)
class Received:
    """What dispatch returns; the arrays are copies. Rows of padding are 0. x_NH is bytes when it was quantised."""

    x_NH: Array
    scales_NS: Array | None
    weights_N: Array | None
    counts: Array
    handle: Handle


@dataclass
class Call:
    """A dispatch of this rank that has published its record."""

    n: int
    record: dict[str, int]
    form: RowForm
    x: Array  # as given: bytes or elements
    rows_TB: Array  # as they are pulled
    weights_P: Array | None  # in list order
    idx_TK: Array
    pairs_P: Array  # t * K + k in list order
    counts_E: Array
    matrix_RE: Array | None  # of a routing that is used again
    missing: set[int]  # peers whose record hasn't been seen
    records: dict[int, dict[str, int]] = field(default_factory=dict)
    counts: dict[int, Array] = field(default_factory=dict)
    aborts: dict[int, str] = field(default_factory=dict)


class NumpyRank:
    """One rank of a group, over the raw bytes of all windows.

    Args:
        views: the windows of all ranks, by rank.
        rank: this one.
        sizes: what the group was created with.
        fmt: COMPACT, PORTABLE or LINE.
        timeout: seconds that any wait may take.
        largest_code: V, for tests that wrap around it.
    """

    def __init__(
        self,
        views: Sequence[memoryview],
        rank: int,
        sizes: Sizes,
        fmt: int = PORTABLE,
        timeout: float = 20.0,
        largest_code: int | None = None,
    ) -> None:
        self.rank = rank
        self.sizes = sizes
        self.cap = sizes.max_recv_rows
        self.at = Layout(sizes, fmt)
        self.timeout = timeout
        self.V = LARGEST_CODE[fmt] if largest_code is None else largest_code
        self.ranks = range(sizes.world_size)
        self.peers = [q for q in self.ranks if q != rank]
        self.own = sizes.experts_of(rank)
        self._open: set[int] = set()  # handles
        self._under_way: dict[int, Call] = {}  # dispatches whose rows haven't been received
        self._missing: dict[int, set[int]] = {}  # call -> peers whose record hasn't been seen
        self._ended = False
        self._lock = threading.Lock()
        self._windows: list[Array] = [np.frombuffer(view, np.uint8) for view in views]
        self.generation = self.header(rank)["GENERATION"]

    def detach(self) -> None:
        """Let go of the windows, which can't be unmapped while an array looks into them."""
        self._windows = []

    # ---------------------------------------------------------------------------------------- bytes of a window

    def header(self, rank: int) -> dict[str, int]:
        """The header of a rank's window, by the document's names."""
        words = self._windows[rank][: 8 * len(HEADER)].view("<i8")
        return {name: int(words[word]) for name, word in HEADER.items()}

    def _bytes(self, window: int, offset: int, count: int) -> Array:
        if offset < 0 or offset + count > self.at.total_bytes:
            raise ProtocolError(f"bytes {offset}..{offset + count} of window {window}")
        return self._windows[window][offset : offset + count]

    def _words(self, window: int, offset: int, count: int) -> Array:
        return self._bytes(window, offset, 4 * count).view("<i4")

    def _rows(self, window: int, offset: int, stride: int, shape: tuple[int, int]) -> Array:
        """[rows, bytes] that their owner wrote; numpy refuses what does not lie in the window."""
        if 0 in shape:
            return np.empty(shape, np.uint8)
        return np.ndarray(shape, np.uint8, self._windows[window].data, offset, (stride, 1))

    def _where(self, start: int, b: int, count: int) -> Array:
        """Where bytes b.. of something that starts there and that another rank writes stand in the window."""
        i = np.arange(b, b + count)
        return start + (i // LINE_PAYLOAD * LINE_BYTES + i % LINE_PAYLOAD if self.at.format == LINE else i)

    def _put(self, window: int, start: int, b: int, data: bytes | Array) -> None:
        data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        self._windows[window][self._where(start, b, len(data))] = data

    def _get(self, window: int, start: int, b: int, count: int) -> Array:
        return self._windows[window][self._where(start, b, count)]

    def _fence(self) -> None:
        """Order what came before against what follows: Python has no fence, but taking a lock twice is one."""
        for _ in range(2):
            with self._lock:
                pass

    def _write_code(self, window: int, offset: int, value: int) -> None:
        """Publish what was written before; a negative value is a refusal."""
        self._fence()
        if self.at.format == COMPACT:
            word = value if value >= 0 else -value | REFUSED_BIT
            self._bytes(window, offset, 8).view("<u8")[0] = word
        else:
            self._words(window, offset, 8)[:] = value

    def _read_code(self, window: int, offset: int) -> int:
        """The code there, negative for a refusal; 0 when never written or torn."""
        if self.at.format == COMPACT:
            word = int(self._bytes(window, offset, 8).view("<u8")[0])
            value = word if word < REFUSED_BIT else -(word & (REFUSED_BIT - 1))
        else:
            block = self._words(window, offset, 8).copy()
            value = int(block[0]) if block.min() == block.max() else 0
        self._fence()
        return value

    def _all_here(self, n: int, offsets: list[int]) -> bool:
        """Whether the code of n stands at all these places of the own window."""
        return all(self._read_code(self.rank, offset) == self.code(n) for offset in offsets)

    def _code_offsets(self, start: int, code: int, size: int) -> list[int]:
        """Where the codes of something of ``size`` bytes are: in line one in each line."""
        if self.at.format == LINE:
            return [start + i + LINE_PAYLOAD for i in range(0, self.at.remote_stride(size), LINE_BYTES)]
        return [start + code]

    def code(self, n: int) -> int:
        """code(n), 1..V."""
        return (n - 1) % self.V + 1

    def lap(self, n: int) -> int:
        """lap(n)."""
        return (n - 1) // self.V

    def _record(self, n: int, source: int) -> int:
        """Offset of the record of call n that ``source`` writes, in any window."""
        slot = n % (2 * self.sizes.slots)
        return self.at.record + slot * self.at.record_slot_stride + source * self.at.record_stride

    def _cell(self, h: int, owner: int) -> int:
        """Offset of the combine cell of handle h that ``owner`` writes, in any window."""
        return self._slot("cell", h) + owner * self.at.cell_stride

    def _wave(self, n: int, kind: int, writer: int) -> int:
        """Offset of the wave cell of call n that ``writer`` writes, in any window."""
        return self._slot("wave", n) + (kind * self.sizes.world_size + writer) * self.at.wave_stride

    def _slot(self, region: str, n: int) -> int:
        slots = self.sizes.slots * (2 if region in ("token_list", "weight", "x") else 1)
        return int(getattr(self.at, region) + n % slots * getattr(self.at, f"{region}_slot_stride"))

    # -------------------------------------------------------------------------------------------------- progress

    @property
    def _own_progress(self) -> Array:
        return self._bytes(self.rank, self.at.progress, 8 * len(PROGRESS)).view("<i8")

    @property
    def n(self) -> int:
        """The call counter, which lives in the window."""
        return int(self._own_progress[PROGRESS["EPOCH"]])

    def _phase(self, phase: int) -> None:
        self._own_progress[PROGRESS["PHASE"]] = phase

    def _end_call(self, verdict: int) -> None:
        self._own_progress[PROGRESS["VERDICT"]] = verdict
        self._phase(IDLE)

    # -------------------------------------------------------------------------------------------------- waiting

    def _wait(
        self,
        what: str,
        waiting: set[int],
        poll: Callable[[int], bool],
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Poll until nobody is left in ``waiting``, or ``enough`` says so; removes from ``waiting`` who came."""

        def done() -> bool:
            waiting.difference_update([q for q in sorted(waiting) if poll(q)])
            return not waiting or (enough is not None and enough())

        deadline = time.monotonic() + self.timeout
        next_look = time.monotonic() + 3e-3
        while not done():
            now = time.monotonic()
            if now >= deadline:
                self.poison(min(waiting), TIMED_OUT)
                raise TimeoutError(
                    f"rank {self.rank}, {what}, call {self.n}: waited {self.timeout:g} s for ranks {sorted(waiting)}"
                )
            if now >= next_look:
                next_look = now + 3e-3
                gone = self.gone()
                # A peer may have done its part just before it went.
                if gone and done():
                    return
                # One that left is missed only by who still waits for it; a poisoned group has ended for all.
                fatal = {q: code for q, code in gone.items() if code != LEFT or q in waiting}
                if fatal:
                    self.poison(min(fatal), LOST)
                    raise PeerGone(f"rank {self.rank}, {what}, call {self.n}: status of peers {fatal}")
            time.sleep(5e-5)

    def gone(self) -> dict[int, int]:
        """Peers that poisoned the group or left it, and their codes."""
        codes = {
            q: self._read_code(self.rank, self.at.status + q * self.at.status_stride + self.at.status_code)
            for q in self.peers
        }
        return {q: code for q, code in codes.items() if code in (POISON, LEFT, EXCLUDED)}

    def status_of(self, q: int) -> dict[str, int]:
        """The body of q's status cell here."""
        words = self._words(
            self.rank, self.at.status + q * self.at.status_stride + self.at.status_body, STATUS_WORDS
        )
        return {name: int(words[word]) for name, word in STATUS.items()}

    # ---------------------------------------------------------------------------------------------------- places

    def _first_rows(self, counts_RE: Array, padding: int) -> tuple[Array, list[int]]:
        """[R, E] the final row of the first pair of s for e, at e's owner; and the rows of every rank, padding included."""
        first_RE = np.zeros_like(counts_RE)
        totals = []
        for p in self.ranks:
            row = 0
            for e in self.sizes.experts_of(p):
                first_RE[:, e] = row + np.cumsum(counts_RE[:, e]) - counts_RE[:, e]
                row += align(int(counts_RE[:, e].sum()), padding)
            totals.append(row)
        return first_RE, totals

    def _parts(
        self, counts_RE: Array, first_RE: Array, source: int, owner: int, wave: int | None
    ) -> Iterator[tuple[int, int, int]]:
        """(place in the source's list, first, last + 1 final row) of the source's runs at an owner; None: not cut in waves."""
        for e in self.sizes.experts_of(owner):
            begin = int(first_RE[source, e])
            lo, hi = begin, begin + int(counts_RE[source, e])
            if wave is not None:
                lo, hi = max(lo, wave * self.cap), min(hi, (wave + 1) * self.cap)
            if lo < hi:
                yield int(counts_RE[source, :e].sum()) + lo - begin, lo, hi

    # ----------------------------------------------------------------------------------------------------- waves

    def _say(self, q: int, n: int, kind: int, mark: int) -> None:
        start = self._wave(n, kind, self.rank)
        self._write_code(q, start + self.at.wave_mark, mark)
        self._write_code(q, start + self.at.wave_code, self.code(n))

    def _heard(self, q: int, n: int, kind: int) -> int:
        start = self._wave(n, kind, q)
        if self._read_code(self.rank, start + self.at.wave_code) != self.code(n):
            return 0
        return self._read_code(self.rank, start + self.at.wave_mark)

    # -------------------------------------------------------------------------------------------------- dispatch

    def _begin_call(self) -> None:
        """The part of a call that counts also when it is aborted: n, and the codes of the lap before."""
        if self._ended:
            raise RuntimeError(f"rank {self.rank}: the group has ended, after call {self.n}")
        self._end_old_call(self.n + 1 - self.sizes.slots)
        self._own_progress[PROGRESS["EPOCH"]] += 1
        self._phase(DISPATCH_PACK)
        n = self.n
        before = n - 2 * self.sizes.slots
        if self.lap(n) != (self.lap(before) if before > 0 else 0):
            self._clear_slot()

    def _end_old_call(self, old: int) -> None:
        """A peer may not have read the records of that call, and one of them stands where it isn't asked again."""
        self._under_way.pop(old, None)
        self._open.discard(old)
        self._wait(f"records of call {old}", self._missing.pop(old, set()), lambda q: self._came(old, q))

    def _clear_slot(self) -> None:
        """Codes of the lap before would match again in this one."""
        n = self.n
        offsets = [self._cell(n, q) + self.at.cell_code for q in self.ranks]
        offsets += [self._wave(n, kind, q) + self.at.wave_code for kind in range(3) for q in self.ranks]
        if self.at.format == LINE:
            for region in ("row", "z") if self.sizes.push else ():
                size = getattr(self.at, f"{region}_slot_stride")
                offsets += [self._slot(region, n) + i + LINE_PAYLOAD for i in range(0, size, LINE_BYTES)]
        else:
            offsets += [self._flag(n, row) for row in range(self.cap)]
        for offset in offsets:
            self._write_code(self.rank, offset, 0)

    def _came(self, n: int, q: int) -> bool:
        """Whether q's record is there, in line with all lines that it needs."""
        start = self._record(n, q)
        if self._read_code(self.rank, start + self.at.record_code) != self.code(n):
            return False
        size = self.at.record_payload + self.at.record_payload_bytes
        return self._all_here(n, self._code_offsets(start, self.at.record_code, size))

    def _send_record(self, words: dict[str, int], payload: bytes) -> None:
        """Write the record of this call into every peer's window: body and payload, then the code."""
        n, start = self.n, self._record(self.n, self.rank)
        words = {
            "GENERATION": self.generation,
            **both("EPOCH", n),
            **both("READ", min(self._under_way, default=n) - 1),
            **words,
        }
        body = np.zeros(RECORD_WORDS, "<i4")
        for name, value in words.items():
            body[RECORD[name]] = value
        for q in self.peers:
            self._put(q, start, self.at.record_header, body.tobytes())
            self._put(q, start, self.at.record_payload, payload)
            size = self.at.record_payload + self.at.record_payload_bytes
            for offset in self._code_offsets(start, self.at.record_code, size):
                self._write_code(q, offset, self.code(n))

    def abort(self, text: str, reason: int = 1) -> None:
        """This rank's input is bad: tell all peers, and use up the call."""
        self._begin_call()
        data = cut(text, self.at.record_payload_bytes)
        self._send_record({"KIND": ABORT, "REASON": reason, "TEXT_BYTES": len(data)}, data)
        self._missing[self.n] = set(self.peers)
        self._end_call(reason)

    def dispatch(self, *args: Any, **kwargs: Any) -> Received:
        """Both halves of a dispatch."""
        return self.receive(self.begin(*args, **kwargs))

    def begin(
        self,
        x: Array,
        topk_idx: Array | None,
        weights: Array | None,
        dtype: int,
        weight_dtype: int = NO_DTYPE,
        tag: int = 0,
        staged: bool = False,
        push: bool = False,
        flag_rows: int = 0,
        padding: int = 1,
        pad: int = -1,
        quant: int = NONE,
        scales: Array | None = None,
        routing: Handle | None = None,
        later: bool = False,
        fused: bool = False,
        gradients: int = 0,
    ) -> Call:
        """Publish the record of a dispatch, or of a fused call.

        Args:
            x: [T, H] of STORAGE[dtype]; when quantised, [T, H] of bytes.
            topk_idx: [T, K] ids, -1 for none; None with ``routing``.
            weights: [T, K] of STORAGE[weight_dtype], or None.
            staged: put x into one of the other x slots, with rows as far apart as the group's widest; the default is
                the slot of n, with rows as close as they may be. The record tells.
            push: write the rows into the windows of their owners.
            flag_rows: how many pushed rows of an expert share a flag, 0 all; of a fused call, too.
            padding: ALIGN.
            pad: PAD.
            scales: [T, S] float32, of quantised rows.
            routing: of an earlier dispatch, to use again.
            later: the rows may be waited for later than the call (ASYNC).
            fused: :meth:`compute` and not :meth:`receive` comes next.
            gradients: GRADIENTS.
        """
        idx_TK = routing.idx_TK if routing is not None else topk_idx
        assert idx_TK is not None
        (T, K), H = idx_TK.shape, x.shape[1]
        assert self.sizes.max_tokens >= T and self.sizes.top_k >= K
        assert x.dtype == (np.uint8 if quant else STORAGE[dtype]) and len(x) == T
        self._begin_call()
        n = self.n

        # Kept pairs in (expert, token, k) order.
        flat = idx_TK.reshape(-1).astype(np.int64)
        pairs_P = np.array(sorted(np.flatnonzero(flat >= 0), key=lambda pair: (flat[pair], pair)), np.int64)
        counts_E = np.array([np.count_nonzero(flat == e) for e in range(self.sizes.num_experts)], "<i4")
        tokens_P = (pairs_P // K).astype("<i4")
        self._words(self.rank, self._slot("token_list", n), len(pairs_P))[:] = tokens_P
        weights_P = None
        if weights is not None:
            weights_P = weights.astype(STORAGE[weight_dtype], copy=False).reshape(-1)[pairs_P]
            self._bytes(self.rank, self._slot("weight", n), weights_P.nbytes)[:] = weights_P.view(np.uint8)

        form = RowForm(
            H * x.itemsize,
            0 if scales is None else scales.shape[1],
            0 if weights_P is None else weights_P.itemsize,
        )
        rows_TB = np.zeros((T, form.pulled_bytes), np.uint8)
        if T:
            rows_TB[:, : form.element_bytes] = as_bytes(x)
            if scales is not None:
                rows_TB[:, form.scales_at :] = as_bytes(scales)
        stride = self.at.x_row if staged else align(form.pulled_bytes, self.at.row_align)
        x_offset = self._slot("x", n)
        if staged:
            x_offset = self.at.x + (2 * self.sizes.slots + n % self.sizes.slots) * self.at.x_slot_stride
        if not (push or fused):
            rows = self._rows(self.rank, x_offset, stride, rows_TB.shape)
            for pair in pairs_P:  # a row that no other rank needs is left out
                if int(flat[pair]) not in self.own:
                    rows[pair // K] = rows_TB[pair // K]

        record = {
            "KIND": COUNTS,
            "TOKENS": T,
            "HIDDEN": H,
            "DTYPE": dtype,
            "QUANT": quant,
            "WEIGHT_DTYPE": NO_DTYPE if weights is None else weight_dtype,
            "TOP_K": K,
            "MODE": FUSED if fused else PUSH if push else PULL,
            **both("PAD", pad),
            "ALIGN": padding,
            **both("TAG", tag),
            **({} if push or fused else {**both("X", x_offset), "X_STRIDE": stride}),
            "FLAG_ROWS": flag_rows if push or fused else 0,
            **both("ROUTING", 0 if routing is None else digest(routing.counts_RE, routing.n)),
            "ASYNC": int(later),
            "GRADIENTS": gradients,
            **both("IDS", ids_digest(idx_TK)),
        }
        self._send_record(record, counts_E.tobytes() if routing is None else b"")
        missing = self._missing[n] = set(self.peers)
        call = Call(
            n,
            record,
            form,
            x,
            rows_TB,
            weights_P,
            idx_TK.copy(),
            pairs_P,
            counts_E,
            None if routing is None else routing.counts_RE,
            missing,
        )
        self._under_way[n] = call
        self._phase(IDLE)
        return call

    def _see_records(self, call: Call) -> None:
        """Wait for the records of a call, or for one that is an abort."""

        def poll(q: int) -> bool:
            if not self._came(call.n, q):
                return False
            record, payload = self._read_record(call.n, q)
            if record["KIND"] == ABORT:
                call.aborts[q] = payload.tobytes().decode(errors="replace")
            else:
                call.records[q] = record
                call.counts[q] = payload.view("<i4")
            return True

        self._wait(f"dispatch {call.n}", call.missing, poll, lambda: bool(call.aborts))

    def _meet(self, call: Call) -> Met:
        """Wait for the records of all peers, and judge them."""
        if self._under_way.get(call.n) is not call:
            raise HandleExpired(f"rank {self.rank}: dispatch {call.n} at call {self.n}")
        self._phase(DISPATCH_COUNTS)
        for n in sorted(self._under_way):
            if n <= call.n:
                self._see_records(self._under_way[n])
        del self._under_way[call.n]
        where = f"rank {self.rank}, dispatch of call {call.n}"
        if call.aborts:
            self._end_call(3)
            raise PeerAborted(f"{where}: {call.aborts}")
        records = {self.rank: call.record, **call.records}
        for names in (
            "KIND",
            "TAG_LO TAG_HI",
            "HIDDEN",
            "DTYPE",
            "WEIGHT_DTYPE",
            "QUANT",
            "ALIGN",
            "ROUTING_LO ROUTING_HI",
        ):
            said = {q: tuple(record[name] for name in names.split()) for q, record in records.items()}
            if len(set(said.values())) > 1:
                self._end_call(4)
                raise CallMismatch(f"{where}: {names} by rank: {said}")
        fused = {q: record["MODE"] == FUSED for q, record in records.items()}
        if len(set(fused.values())) > 1:
            self._end_call(4)
            raise CallMismatch(f"{where}: MODE is FUSED by rank: {fused}")
        gradients = 0
        for record in records.values():
            gradients |= record["GRADIENTS"] % 16
        weights = {q: record["GRADIENTS"] // 16 for q, record in records.items() if record["GRADIENTS"] >= 16}
        if gradients and len(set(weights.values())) > 1:
            self._end_call(4)
            raise CallMismatch(f"{where}: weights of combine by rank: {weights}, gradients {gradients}")
        if call.matrix_RE is not None:
            C = call.matrix_RE
        else:
            C = np.array([call.counts.get(q, call.counts_E) for q in self.ranks], np.int64)
        first_RE, totals = self._first_rows(C, call.record["ALIGN"])
        for q, record in records.items():
            pad = joined(record["PAD_LO"], record["PAD_HI"])
            if 0 <= pad < totals[q]:
                self._end_call(5)
                raise PadTooSmall(f"{where}: rank {q} would receive {totals[q]} rows, PAD {pad}")
        W = 1
        if max(totals) > self.cap and any(record["MODE"] != PULL for record in records.values()):
            W = max(-(-total // self.cap) for total in totals)
        ids = tuple(joined(records[q]["IDS_LO"], records[q]["IDS_HI"]) for q in self.ranks)
        handle = Handle(call.n, call.idx_TK, C, call.record["ALIGN"], gradients, ids)
        return Met(records, C, first_RE, totals, W, handle)

    def receive(self, call: Call) -> Received:
        """Wait for the rows of a dispatch."""
        met = self._meet(call)
        records, C, first_RE, totals, W = met.records, met.counts_RE, met.first_RE, met.totals, met.waves
        pushing = {q for q in self.ranks if records[q]["MODE"] != PULL}
        pad = joined(call.record["PAD_LO"], call.record["PAD_HI"])
        N = totals[self.rank] if pad < 0 else pad
        rows_NB = np.zeros((N, call.form.pulled_bytes), np.uint8)
        weights_N = None if call.weights_P is None else np.zeros(N, call.weights_P.dtype)
        self._phase(DISPATCH_ROWS)
        for s in self.ranks:
            if s == self.rank or s not in pushing:
                for begin, lo, hi in self._parts(C, first_RE, s, self.rank, None):
                    rows_NB[lo:hi], some = self._pulled(call, s, records[s], begin, hi - lo)
                    if weights_N is not None:
                        weights_N[lo:hi] = some
        senders = {s for s in pushing - {self.rank} if C[s, self.own].any()}
        for w in range(W):
            if self.rank in pushing:
                self._phase(DISPATCH_PUSH)
                self._push(call, C, first_RE, w)
                self._phase(DISPATCH_ROWS)
            parts = {s: list(self._parts(C, first_RE, s, self.rank, w)) for s in senders}
            self._take(call, records, parts, w, rows_NB, weights_N)
            if w + 1 < W:
                for s in senders:
                    for offset in self._flags(call, records[s]["FLAG_ROWS"], parts[s], w):
                        self._write_code(self.rank, offset, 0)
                for s in senders:
                    self._say(s, call.n, DISPATCH_READ, w + 1)
        self._open.add(call.n)
        self._end_call(0)
        form, x = call.form, call.x
        x_NH = np.ascontiguousarray(rows_NB[:, : form.element_bytes]).view(x.dtype).reshape(N, x.shape[1])
        scales_NS = None
        if form.scales:
            scales_NS = np.ascontiguousarray(rows_NB[:, form.scales_at :]).view("<f4").reshape(N, form.scales)
        return Received(x_NH, scales_NS, weights_N, C[:, self.own].sum(0), met.handle)

    # ------------------------------------------------------------------------------------------------ fused calls

    def push_experts(self, call: Call) -> Met:
        """The first half of a fused call whose rows all fit: this rank's rows go to their owners, its own to itself."""
        met = self._meet(call)
        assert met.waves == 1
        self._phase(DISPATCH_PUSH)
        for p in (*self.peers, self.rank):
            for run in self._parts(met.counts_RE, met.first_RE, self.rank, p, None):
                self._push_run(call, p, *run)
        self._phase(IDLE)
        self._open.add(call.n)
        return met

    def _push_run(self, call: Call, p: int, begin: int, lo: int, hi: int) -> None:
        """One run of a fused call: rows lo..hi of p's y in groups with a flag each. The last group comes first: no order is
        promised among them, and an owner that looks at one flag of several would show here."""
        K, size = call.idx_TK.shape[1], call.record["FLAG_ROWS"] or hi - lo
        for first in reversed(range(lo, hi, size)):
            end = min(first + size, hi)
            for r in range(first, end):
                token = call.pairs_P[begin + r - lo] // K
                self._put(p, self._pushed_row(call, r), 0, call.rows_TB[token])
            self._write_code(p, self._flag(call.n, end - 1), self.code(call.n))
            self._pause()

    def _pause(self) -> None:
        """Called between groups of pushed rows; tests make it slow."""

    def compute_experts(self, call: Call, met: Met, expert: Callable[[Array, int], Array]) -> Computed:
        """The second half: an expert gets its rows [n, H] and its number when those of all sources are there, and its results,
        of the same size, take their places.
        """
        H = call.x.shape[1]
        shape = (met.totals[self.rank], call.form.element_bytes)
        rows = self._rows(
            self.rank, self._pushed_row(call, 0), self._pushed_row(call, 1) - self._pushed_row(call, 0), shape
        )
        order: list[int] = []
        waiting = {e for e in self.own if met.counts_RE[:, e].any()}

        def poll(e: int) -> bool:
            for s in self.peers:
                first = int(met.first_RE[s, e])
                run = [(0, first, first + int(met.counts_RE[s, e]))]
                if not self._all_here(call.n, self._flags(call, met.records[s]["FLAG_ROWS"], run, 0)):
                    return False
            lo = int(met.first_RE[0, e])
            hi = lo + int(met.counts_RE[:, e].sum())
            x_nH = np.ascontiguousarray(rows[lo:hi]).view(call.x.dtype).reshape(hi - lo, H)
            rows[lo:hi] = as_bytes(expert(x_nH, e))
            order.append(e)
            return True

        self._phase(DISPATCH_ROWS)
        deadline = time.monotonic() + self.timeout
        while waiting:
            waiting.difference_update([e for e in sorted(waiting) if poll(e)])
            if time.monotonic() > deadline:
                self.poison(-1, TIMED_OUT)
                raise TimeoutError(f"rank {self.rank}, call {call.n}: experts {sorted(waiting)} miss rows")
            if any(code != LEFT for code in self.gone().values()):
                self.poison(-1, LOST)
                raise PeerGone(f"rank {self.rank}, call {call.n}: status of peers {self.gone()}")
            time.sleep(5e-5)
        self._end_call(0)
        return Computed(rows.copy().view(call.x.dtype).reshape(shape[0], H), order, met.handle)

    def fits(self, call: Call) -> bool:
        """Whether the rows of a call fit the windows; known when its records are here."""
        self._see_records(call)
        if call.aborts:
            return True
        C = np.array([call.counts.get(q, call.counts_E) for q in self.ranks], np.int64)
        return max(self._first_rows(C, 1)[1]) <= self.cap

    def round(self, routing: Handle, tag: int = 0) -> Handle:
        """Open a call in which rows of an older routing are combined."""
        self._begin_call()
        n, (T, K) = self.n, routing.idx_TK.shape
        record = {
            **dict.fromkeys(RECORD, 0),
            "KIND": ROUND,
            "TOKENS": T,
            "TOP_K": K,
            **both("PAD", -1),
            "ALIGN": routing.align,
            **both("TAG", tag),
            **both("ROUTING", digest(routing.counts_RE, routing.n)),
        }
        del record["GENERATION"], record["EPOCH_LO"], record["EPOCH_HI"], record["READ_LO"], record["READ_HI"]
        self._send_record(record, b"")
        missing = self._missing[n] = set(self.peers)
        nothing = np.zeros(0, np.uint8)
        call = Call(
            n,
            record,
            RowForm(0, 0, 0),
            nothing,
            nothing,
            None,
            routing.idx_TK,
            nothing,
            nothing,
            routing.counts_RE,
            missing,
        )
        self._under_way[n] = call
        handle = self._meet(call).handle
        self._open.add(n)
        self._end_call(0)
        return handle

    def _pulled(
        self, call: Call, s: int, record: dict[str, int], begin: int, count: int
    ) -> tuple[Array, Array | None]:
        """Rows and weights of entries ``begin``.. of the list of s, which is this rank or one that doesn't push."""
        if s == self.rank:
            tokens = call.pairs_P[begin : begin + count] // call.idx_TK.shape[1]
            weights = None if call.weights_P is None else call.weights_P[begin : begin + count]
            return call.rows_TB[tokens], weights
        entries = self._words(s, self._slot("token_list", call.n) + 4 * begin, count).copy()
        if not (entries.min() >= 0 and entries.max() < record["TOKENS"]):
            raise ProtocolError(f"rank {s}, call {call.n}: token list {entries}, T {record['TOKENS']}")
        shape = (record["TOKENS"], call.form.pulled_bytes)
        rows = self._rows(s, joined(record["X_LO"], record["X_HI"]), record["X_STRIDE"], shape)
        if call.weights_P is None:
            return rows[entries], None
        size = call.weights_P.itemsize
        packed = self._bytes(s, self._slot("weight", call.n) + begin * size, count * size)
        return rows[entries], packed.copy().view(call.weights_P.dtype)

    def _flag(self, n: int, row: int) -> int:
        return self._slot("row_flag", n) + row * self.at.row_flag_stride

    def _pushed_row(self, call: Call, row: int) -> int:
        if call.record["MODE"] == FUSED:
            return self._slot("y", call.n) + row * align(call.form.element_bytes, self.at.row_align)
        return self._slot("row", call.n) + row * self.at.remote_stride(call.form.pushed_bytes)

    def _flags(self, call: Call, flag_rows: int, parts: list[tuple[int, int, int]], w: int) -> list[int]:
        """Where the codes of a source's rows of a wave are, in their owner's window."""
        offsets = []
        for _, lo, hi in parts:
            for r in range(lo, hi):
                row = r - w * self.cap
                if self.at.format == LINE:
                    offsets += self._code_offsets(self._pushed_row(call, row), 0, call.form.pushed_bytes)
                elif r == hi - 1 or (flag_rows and (r - lo) % flag_rows == flag_rows - 1):
                    offsets.append(self._flag(call.n, row))
        return offsets

    def _push(self, call: Call, C: Array, first_RE: Array, w: int) -> None:
        """Write this rank's rows of a wave into the windows of their owners."""
        K, form = call.idx_TK.shape[1], call.form
        for p in self.peers:
            parts = list(self._parts(C, first_RE, self.rank, p, w))
            if parts and w:
                self._wait(f"wave {w}", {p}, lambda q: self._heard(q, call.n, DISPATCH_READ) >= w)
            for begin, lo, hi in parts:
                for r in range(lo, hi):
                    place = begin + r - lo
                    row = np.zeros(form.pushed_bytes, np.uint8)
                    row[: form.pulled_bytes] = call.rows_TB[call.pairs_P[place] // K]
                    if call.weights_P is not None:
                        row[form.weight_at :] = call.weights_P[place : place + 1].view(np.uint8)
                    self._put(p, self._pushed_row(call, r - w * self.cap), 0, row)
            for offset in self._flags(call, call.record["FLAG_ROWS"], parts, w):
                self._write_code(p, offset, self.code(call.n))

    def _take(
        self,
        call: Call,
        records: dict[int, dict[str, int]],
        parts: dict[int, list[tuple[int, int, int]]],
        w: int,
        rows_NB: Array,
        weights_N: Array | None,
    ) -> None:
        """Copy the rows of a wave that were pushed here."""
        left = {s: self._flags(call, records[s]["FLAG_ROWS"], some, w) for s, some in parts.items()}

        self._wait(
            f"rows of dispatch {call.n}, wave {w}", set(parts), lambda s: self._all_here(call.n, left[s])
        )
        form = call.form
        for some in parts.values():
            for _, lo, hi in some:
                for r in range(lo, hi):
                    row = self._get(self.rank, self._pushed_row(call, r - w * self.cap), 0, form.pushed_bytes)
                    rows_NB[r] = row[: form.pulled_bytes]
                    if weights_N is not None:
                        weights_N[r] = row[form.weight_at :].view(weights_N.dtype)[0]

    def _read_record(self, n: int, q: int) -> tuple[dict[str, int], Array]:
        """The record of q, held against everything that the document says about one."""
        start = self._record(n, q)
        words = self._get(self.rank, start, self.at.record_header, 4 * RECORD_WORDS).view("<i4")
        record = {name: int(words[word]) for name, word in RECORD.items()}

        def demand(what: str, good: object) -> None:
            if not good:
                raise ProtocolError(
                    f"record of rank {q}, call {n}: {what}: {record}, all words {words.tolist()}"
                )

        def payload(size: int) -> Array:
            return self._get(self.rank, start, self.at.record_payload, size)

        demand("words not named are 0", not words[len(RECORD) :].any())
        demand("KIND", record["KIND"] in (COUNTS, ROUND, ABORT))
        demand("GENERATION", record["GENERATION"] == self.generation)
        demand("EPOCH", joined(record["EPOCH_LO"], record["EPOCH_HI"]) == n)
        demand("READ", n - self.sizes.slots <= joined(record["READ_LO"], record["READ_HI"]) < n)
        if record["KIND"] == ABORT:
            demand("REASON", record["REASON"] in (1, 2, 11))
            demand("TEXT_BYTES", 0 < record["TEXT_BYTES"] <= self.at.record_payload_bytes)
            return record, payload(record["TEXT_BYTES"])
        demand("no REASON, no text", (record["REASON"], record["TEXT_BYTES"]) == (0, 0))
        demand(
            "TOKENS and TOP_K",
            record["TOKENS"] <= self.sizes.max_tokens and record["TOP_K"] <= self.sizes.top_k,
        )
        demand("GRADIENTS", record["GRADIENTS"] % 16 <= X | WEIGHTS | EXPERTS | RECOMPUTE)
        demand("weights", 0 <= record["GRADIENTS"] // 16 <= 1 + max(STORAGE))
        plain = ("HIDDEN", "DTYPE", "QUANT", "WEIGHT_DTYPE", "MODE", "FLAG_ROWS", "ASYNC")
        if record["KIND"] == ROUND:
            demand("nothing but a routing", not any(record[name] for name in plain))
            demand("no PAD", joined(record["PAD_LO"], record["PAD_HI"]) == -1 and record["ALIGN"] >= 1)
            demand("ROUTING", record["ROUTING_LO"] or record["ROUTING_HI"])
            demand("no IDS", (record["IDS_LO"], record["IDS_HI"]) == (0, 0))
            return record, payload(0)
        demand("dtypes", record["DTYPE"] in STORAGE and record["WEIGHT_DTYPE"] in (NO_DTYPE, *STORAGE))
        if record["MODE"] == FUSED:
            demand("a format that fuses", self.at.format != LINE)
            demand(
                "nothing but rows",
                not any(
                    record[name] for name in plain if name not in ("HIDDEN", "DTYPE", "MODE", "FLAG_ROWS")
                ),
            )
            demand("no PAD, no ALIGN", (record["PAD_LO"], record["PAD_HI"], record["ALIGN"]) == (-1, -1, 1))
        demand("MODE", record["MODE"] in (PULL, FUSED) or (record["MODE"] == PUSH and self.sizes.push))
        demand("FLAG_ROWS", record["FLAG_ROWS"] >= 0 and (record["MODE"] != PULL or not record["FLAG_ROWS"]))
        demand("PAD and ALIGN", joined(record["PAD_LO"], record["PAD_HI"]) >= -1 and record["ALIGN"] >= 1)
        demand("QUANT", record["QUANT"] in (NONE, INT8, FP8_E4M3))
        H = record["HIDDEN"]
        demand("HIDDEN", H > 0 and H * STORAGE[record["DTYPE"]].itemsize <= self.sizes.row_bytes)
        if record["TOKENS"] and record["MODE"] == PULL:
            scales = {NONE: 0, INT8: 1, FP8_E4M3: -(-H // SCALE_COLUMNS)}[record["QUANT"]]
            size = 1 if scales else STORAGE[record["DTYPE"]].itemsize
            row = RowForm(H * size, scales, 0).pulled_bytes
            x, stride = joined(record["X_LO"], record["X_HI"]), record["X_STRIDE"]
            end = x + (record["TOKENS"] - 1) * stride + row
            demand("x in the x region", self.at.x <= x and end <= self.at.y)
            demand("rows of x start where they may", x % self.at.row_align == 0)
            demand("X_STRIDE", stride >= row and stride % self.at.row_align == 0)
        if record["ROUTING_LO"] or record["ROUTING_HI"]:
            return record, payload(0)
        counts = payload(4 * self.sizes.num_experts)
        said = counts.view("<i4")
        demand("counts", said.min() >= 0 and said.sum() <= record["TOKENS"] * record["TOP_K"])
        return record, counts

    # --------------------------------------------------------------------------------------------------- combine

    def _close_handle(self, handle: Handle) -> None:
        if handle.n not in self._open:
            raise HandleExpired(
                f"rank {self.rank}: handle {handle.n} at call {self.n}; open: {sorted(self._open)}"
            )
        self._open.remove(handle.n)

    def _waves_of(self, totals: list[int]) -> tuple[int, set[int]]:
        """How many waves a combine takes, and the owners that give in waves."""
        if self.sizes.push or max(totals) <= self.cap:
            return 1, set()
        return max(-(-total // self.cap) for total in totals), {p for p in self.ranks if totals[p] > self.cap}

    def _sources(self, handle: Handle) -> list[int]:
        """Other ranks that have rows here."""
        return [q for q in self.peers if handle.counts_RE[q, self.own].any()]

    def _owners(self, handle: Handle) -> set[int]:
        """Other ranks that have rows of this one."""
        return {p for p in self.peers if handle.counts_RE[self.rank, self.sizes.experts_of(p)].any()}

    def _send_cell(self, q: int, h: int, words: dict[str, int], text: bytes, code: int) -> None:
        start = self._cell(h, self.rank)
        body = np.zeros(CELL_WORDS, "<i4")
        for name, value in words.items():
            body[CELL[name]] = value
        self._words(q, start + self.at.cell_body, CELL_WORDS)[:] = body
        self._bytes(q, start + self.at.cell_text, len(text))[:] = np.frombuffer(text, np.uint8)
        self._write_code(q, start + self.at.cell_code, code)

    def refuse(self, handle: Handle, text: str, reason: int = 1) -> None:
        """This rank's y is unusable: tell those that wait for it. The handle is closed."""
        self._close_handle(handle)
        data = cut(text, self.at.cell_text_bytes)
        for q in self._sources(handle):
            words = {"REASON": reason, "TEXT_BYTES": len(data)}
            self._send_cell(q, handle.n, words, data, -self.code(handle.n))
        W, waving = self._waves_of(self._first_rows(handle.counts_RE, handle.align)[1])
        for p in waving & self._owners(handle):
            self._say(p, handle.n, COMBINE_READ, W)
        self._end_call(reason)

    def combine(
        self,
        y: Array,
        handle: Handle,
        weights: Array | None,
        dtype: int,
        weight_dtype: int = NO_DTYPE,
        wide: bool = False,
        push: bool = False,
        sums: bool = True,
        there: bool = False,
        pairs: bool = False,
    ) -> Array:
        """One combine.

        Args:
            y: [N, H] of STORAGE[dtype].
            weights: [T, K] of STORAGE[weight_dtype], or None.
            wide: put y's rows as far apart as the group's widest.
            push: write them into the windows of their sources.
            sums: False for a rank whose weights are unusable.
            there: y's rows stand in the slot already, those of a fused call.
            pairs: return the rows as they are.

        Returns:
            [T, H] of STORAGE[dtype]; with ``pairs`` [T, K, H].
        """
        self._close_handle(handle)
        h, C, H = handle.n, handle.counts_RE, y.shape[1]
        first_RE, totals = self._first_rows(C, handle.align)
        assert y.dtype == STORAGE[dtype] and len(y) >= totals[self.rank]
        W, waving = self._waves_of(totals)
        push = self.sizes.push and (push or totals[self.rank] > self.cap)
        y_NB = as_bytes(y)
        B = H * y.itemsize
        error: Exception | None = None if sums else ValueError("the weights are unusable")
        rows_PB = np.zeros((int(C[self.rank].sum()), B), np.uint8)  # in list order
        cells: dict[int, dict[str, int]] = {}
        owners = self._owners(handle)
        for w in range(W):
            self._phase(COMBINE_WRITE)
            cut_at = w if self.rank in waving else None
            if cut_at is not None or w == 0:
                self._give(handle, y_NB, dtype, H, first_RE, cut_at, wide, push, there)
            self._phase(COMBINE_WAIT)
            try:
                if error is None and w == 0:
                    cells = self._see_cells(handle, owners, dtype, H)
                for p in sorted(owners & set(cells)) if error is None else ():
                    if w == 0 or p in waving:
                        self._fetch(handle, p, cells[p], first_RE, w if p in waving else None, rows_PB)
            except (PeerAborted, CallMismatch) as found:
                error = found
            if error is not None:
                for p in waving & owners:
                    self._say(p, h, COMBINE_READ, W)
        if error is not None:
            self._end_call(1)
            raise error
        for begin, lo, hi in self._parts(C, first_RE, self.rank, self.rank, None):
            rows_PB[begin : begin + hi - lo] = y_NB[lo:hi]

        self._phase(COMBINE_SUM)
        T, K = handle.idx_TK.shape
        acc: type[np.floating[Any]] = np.float64 if dtype == FLOAT64 else np.float32
        out = np.zeros((T, H), acc)
        started = np.zeros(T, bool)
        flat = handle.idx_TK.reshape(-1)
        listed = sorted(np.flatnonzero(flat >= 0), key=lambda pair: (flat[pair], pair))
        if pairs:
            rows_TKB = np.zeros((T * K, B), np.uint8)
            rows_TKB[listed] = rows_PB
            self._end_call(0)
            return rows_TKB.view(STORAGE[dtype]).reshape(T, K, H)
        with np.errstate(all="ignore"):
            for place in np.argsort(listed):  # in (token, k) order
                t, k = divmod(int(listed[place]), K)
                value = widen(rows_PB[place].view(STORAGE[dtype]), dtype, acc)
                if weights is not None:
                    value = value * widen(weights[t, k : k + 1], weight_dtype, acc)
                out[t] = out[t] + value if started[t] else value
                started[t] = True
            result = narrow(out, dtype)
        self._end_call(0)
        return result

    def _give(
        self,
        handle: Handle,
        y_NB: Array,
        dtype: int,
        H: int,
        first_RE: Array,
        wave: int | None,
        wide: bool,
        push: bool,
        there: bool,
    ) -> None:
        """The owner's part: its rows (of a wave), then the cells, or after the first wave the watermarks."""
        h, C, B = handle.n, handle.counts_RE, y_NB.shape[1]
        first_row = (wave or 0) * self.cap

        def sources_of(w: int | None) -> set[int]:
            return {q for q in self._sources(handle) if any(self._parts(C, first_RE, q, self.rank, w))}

        if wave:
            self._wait(
                f"wave {wave} of combine {h}",
                sources_of(wave - 1),
                lambda q: self._heard(q, h, COMBINE_READ) >= wave,
            )
        stride = self.at.y_row if wide else align(B, self.at.row_align)
        y_offset = self._slot("y", h)
        for q in self._sources(handle):
            for begin, lo, hi in self._parts(C, first_RE, q, self.rank, wave):
                for r in range(lo, hi):
                    if push:
                        start = self._slot("z", h) + (begin + r - lo) * self.at.remote_stride(B)
                        self._put(q, start, 0, y_NB[r])
                        if self.at.format == LINE:
                            for offset in self._code_offsets(start, 0, B):
                                self._write_code(q, offset, self.code(h))
                    elif not there:
                        self._rows(self.rank, y_offset + (r - first_row) * stride, stride, (1, B))[0] = y_NB[
                            r
                        ]
        words = {"DTYPE": dtype, "HIDDEN": H, "MODE": PUSH if push else PULL}
        if not push:
            words |= {"STRIDE": stride, **both("Y", y_offset)}
        if not wave:
            for q in self._sources(handle):
                self._send_cell(q, h, words, b"", self.code(h))
        else:
            for q in sources_of(wave):
                self._say(q, h, COMBINE_READY, wave + 1)

    def _see_cells(self, handle: Handle, owners: set[int], dtype: int, H: int) -> dict[int, dict[str, int]]:
        """Wait for the cells of all owners."""
        h = handle.n
        cells: dict[int, dict[str, int]] = {}
        refusals: dict[int, str] = {}

        def poll(p: int) -> bool:
            start = self._cell(h, p)
            code = self._read_code(self.rank, start + self.at.cell_code)
            if code not in (self.code(h), -self.code(h)):
                return False
            body = self._words(self.rank, start + self.at.cell_body, CELL_WORDS).copy()
            cells[p] = {name: int(body[word]) for name, word in CELL.items()}
            if code < 0:
                text = self._bytes(self.rank, start + self.at.cell_text, cells[p]["TEXT_BYTES"])
                refusals[p] = text.tobytes().decode(errors="replace")
            return True

        self._wait(f"combine {h}", set(owners), poll)
        if refusals:
            raise PeerAborted(f"rank {self.rank}, combine of handle {h}: {refusals}")
        said = {p: (cell["DTYPE"], cell["HIDDEN"]) for p, cell in cells.items()}
        if set(said.values()) - {(dtype, H)}:
            raise CallMismatch(f"rank {self.rank}, combine of handle {h}: {(dtype, H)} here, by rank: {said}")
        for p, cell in cells.items():
            if cell["MODE"] not in (PULL, PUSH) or (cell["MODE"] == PUSH and not self.sizes.push):
                raise ProtocolError(f"cell of rank {p}, handle {h}: {cell}")
        return cells

    def _fetch(
        self, handle: Handle, p: int, cell: dict[str, int], first_RE: Array, wave: int | None, rows_PB: Array
    ) -> None:
        """Copy this rank's rows of an owner (of a wave) to their places in the list."""
        h, B = handle.n, rows_PB.shape[1]
        parts = list(self._parts(handle.counts_RE, first_RE, self.rank, p, wave))
        if not parts:
            return
        if wave:
            self._wait(
                f"wave {wave} of combine {h}", {p}, lambda q: self._heard(q, h, COMBINE_READY) >= wave + 1
            )
        y, stride = joined(cell["Y_LO"], cell["Y_HI"]), cell["STRIDE"]
        for begin, lo, hi in parts:
            for r in range(lo, hi):
                place = begin + r - lo
                if cell["MODE"] == PULL:
                    offset = y + (r - (wave or 0) * self.cap) * stride
                    if not (self.at.y <= offset and offset + B <= self.at.y_end):
                        raise ProtocolError(f"cell of rank {p}, handle {h}: {cell}")
                    rows_PB[place] = self._rows(p, offset, stride, (1, B))[0]
                    continue
                start = self._slot("z", h) + place * self.at.remote_stride(B)
                if self.at.format == LINE:
                    offsets = self._code_offsets(start, 0, B)
                    self._wait(f"rows of combine {h}", {p}, lambda _: self._all_here(h, offsets))  # noqa: B023  called here
                rows_PB[place] = self._get(self.rank, start, 0, B)
        if wave is not None:
            self._say(p, h, COMBINE_READ, wave + 1)

    # ------------------------------------------------------------------------------------------------------ ends

    def _send_status(self, code: int, who: int, reason: int) -> None:
        words = {
            "REASON": reason,
            "WHO": who,
            **both("EPOCH", self.n),
            "PHASE": int(self._own_progress[PROGRESS["PHASE"]]),
            "GENERATION": self.generation,
        }
        body = np.zeros(STATUS_WORDS, "<i4")
        for name, value in words.items():
            body[STATUS[name]] = value
        for q in self.peers:
            start = self.at.status + self.rank * self.at.status_stride
            self._words(q, start + self.at.status_body, STATUS_WORDS)[:] = body
            self._write_code(q, start + self.at.status_code, code)
        self._ended = True

    def poison(self, who: int = -1, reason: int = LOST) -> None:
        """Tell all peers that the group has ended because ``who`` was missing."""
        self._send_status(POISON, who, reason)

    def leave(self) -> None:
        """Tell all peers that this rank has closed its group."""
        self._send_status(LEFT, -1, 0)
