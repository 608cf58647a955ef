"""A rank written a second time, in numpy, from docs/protocol.md alone.

It shares no code with the product: every offset, every code and every order of rows below is computed here from
the document. It takes part in a group by reading and writing the mapped windows of all ranks, so a group in which
one rank is a :class:`NumpyRank` and the others are the product works only if both follow the document.

It is slow on purpose: plain loops, no torch, nothing clever.

T tokens of a rank, H hidden, E experts, K top-k, R ranks, N received rows, NS slots, V largest code.

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

COMPACT, PORTABLE = 0, 1
COUNTS, ROUND, ABORT, LEAVE = 1, 2, 3, 4
OK, POISON, LEFT, EXCLUDED = 1, 2, 3, 4
IDLE, DISPATCH_PACK, DISPATCH_COUNTS, DISPATCH_ROWS, COMBINE_WRITE, COMBINE_WAIT, COMBINE_SUM = range(7)
NO_DTYPE, FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = range(5)
NREC = 2
RECORD_WORDS, CELL_WORDS, STATUS_WORDS = 30, 8, 8
CELL_TEXT_BYTES = 192
PORTABLE_CODE_BYTES = 32
LEAST_PAYLOAD = 480
LARGEST_CODE = {COMPACT: 2**62, PORTABLE: 2**31 - 1}
REFUSED_BIT = 2**63  # compact


def _numbered(names: str) -> dict[str, int]:
    return {name: word for word, name in enumerate(names.split())}


HEADER = _numbered("MAGIC VERSION FORMAT GENERATION RANK WORLD_SIZE TOTAL_BYTES NONCE_LO NONCE_HI")
MAGIC = 0x6D6F655F61326131
VERSION = 1
RECORD = _numbered(
    "KIND REASON GENERATION EPOCH_LO EPOCH_HI TOKENS HIDDEN DTYPE QUANT WEIGHT_DTYPE TOP_K MODE PAD_LO PAD_HI ALIGN "
    "TAG_LO TAG_HI X_LO X_HI X_STRIDE TEXT_BYTES"
)
CELL = _numbered("REASON DTYPE HIDDEN STRIDE Y_LO Y_HI TEXT_BYTES")
STATUS = _numbered("REASON WHO EPOCH_LO EPOCH_HI PHASE GENERATION")
PROGRESS = _numbered("EPOCH PHASE STEPS")

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


class TooManyRows(RuntimeError):
    """Some rank would receive more than max_recv_rows rows."""


class PeerGone(RuntimeError):
    """A peer poisoned the group or left it."""


class HandleExpired(RuntimeError):
    """Combined before, or too many newer dispatches have started; nothing was sent."""


# ------------------------------------------------------------------------------------------------------- the layout


def align(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return (a + b - 1) // b * b


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
        compact = fmt == COMPACT
        R, NS = sizes.world_size, sizes.slots
        self.format = fmt
        self.row_align = 1 if compact else 512
        front = 8 if compact else 0  # compact puts the code in front of what it guards
        behind = 0 if compact else PORTABLE_CODE_BYTES
        cell_align = 64 if compact else 512

        self.record_header = front
        self.record_payload = 128
        self.record_payload_bytes = align(max(4 * sizes.num_experts, LEAST_PAYLOAD), 32)
        end = self.record_payload + self.record_payload_bytes
        self.record_code = 0 if compact else end
        self.record_stride = align(end + behind, cell_align)

        self.cell_body = front
        self.cell_text = front + 4 * CELL_WORDS
        self.cell_text_bytes = CELL_TEXT_BYTES
        end = self.cell_text + self.cell_text_bytes
        self.cell_code = 0 if compact else end
        self.cell_stride = align(end + behind, cell_align)

        self.status_body = front
        end = front + 4 * STATUS_WORDS
        self.status_code = 0 if compact else end
        self.status_stride = align(end + behind, cell_align)

        row = align(sizes.row_bytes, self.row_align)
        pairs = sizes.max_tokens * sizes.top_k
        self.progress = 4096
        self.status = align(self.progress + 512, 512)
        self.record = align(self.status + R * self.status_stride, 4096)
        self.record_slot_stride = R * self.record_stride
        self.cell = align(self.record + NREC * self.record_slot_stride, 4096)
        self.cell_slot_stride = R * self.cell_stride
        self.token_list = align(self.cell + NS * self.cell_slot_stride, 4096)
        self.token_list_slot_stride = align(4 * pairs, 4096)
        self.weight = align(self.token_list + NS * self.token_list_slot_stride, 4096)
        self.weight_slot_stride = align(8 * pairs, 4096)
        self.x = align(self.weight + NS * self.weight_slot_stride, 4096)
        self.x_slot_stride = align(sizes.max_tokens * row, 4096)
        self.y = align(self.x + 2 * NS * self.x_slot_stride, 4096)  # NSTAGE is as many as NS
        self.y_slot_stride = align(sizes.max_recv_rows * row, 4096)
        self.total_bytes = align(self.y + NS * self.y_slot_stride, 2 << 20)
        self.row_stride = row


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


def cut(text: str, limit: int) -> bytes:
    """The text as UTF-8, without a broken character at the end."""
    return text.encode()[:limit].decode(errors="ignore").encode()


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


# ------------------------------------------------------------------------------------------------------------- a rank


@dataclass(frozen=True)
class Handle:
    """What combine needs of a dispatch: the call, its own ids and everybody's counts."""

    n: int
    idx_TK: Array
    counts_RE: Array


@dataclass(frozen=True)
class Received:
    """What dispatch returns; the arrays are copies."""

    x_NH: Array
    weights_N: Array | None
    counts: Array
    handle: Handle


@dataclass
class _Owed:
    """Records of an ended call that have to be waited for before the next record is written."""

    n: int
    ranks: set[int] = field(default_factory=set)


class NumpyRank:
    """One rank of a group, over the raw bytes of all windows.

    Args:
        views: the windows of all ranks, by rank.
        rank: this one.
        sizes: what the group was created with.
        fmt: PORTABLE or COMPACT.
        timeout: seconds that any wait may take.
        largest_code: V, for tests that wrap around it.
        first_n: number of the first call.
    """

    def __init__(
        self,
        views: Sequence[memoryview],
        rank: int,
        sizes: Sizes,
        fmt: int = PORTABLE,
        timeout: float = 20.0,
        largest_code: int | None = None,
        first_n: int = 1,
    ) -> None:
        self.rank = rank
        self.sizes = sizes
        self.at = Layout(sizes, fmt)
        self.timeout = timeout
        self.V = LARGEST_CODE[fmt] if largest_code is None else largest_code
        self.n = first_n - 1
        self.peers = [q for q in range(sizes.world_size) if q != rank]
        self._open: set[int] = set()
        self._owed = _Owed(self.n)
        self._ended = False
        self.phase = IDLE
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
        return self._windows[window][offset : offset + count]

    def _words(self, window: int, offset: int, count: int) -> Array:
        return self._bytes(window, offset, 4 * count).view("<i4")

    def _rows(self, window: int, offset: int, stride: int, shape: tuple[int, int], dtype: int) -> Array:
        """[rows, H] inside a window; numpy refuses what does not lie in it."""
        storage = STORAGE[dtype]
        if shape[0] == 0:
            return np.empty(shape, storage)
        return np.ndarray(shape, storage, self._windows[window].data, offset, (stride, storage.itemsize))

    def _fence(self) -> None:
        """Order what came before against what follows: Python has no fence, but taking a lock twice is one."""
        for _ in range(2):
            with self._lock:
                pass

    def _write_code(self, window: int, offset: int, value: int) -> None:
        """Publish what was written before; a negative value is a refusal."""
        self._fence()
        if self.at.format == PORTABLE:
            self._words(window, offset, 8)[:] = value
        else:
            word = value if value >= 0 else -value | REFUSED_BIT
            self._bytes(window, offset, 8).view("<u8")[0] = word

    def _read_code(self, window: int, offset: int) -> int:
        """The code there, negative for a refusal; 0 when never written or torn."""
        if self.at.format == PORTABLE:
            block = self._words(window, offset, 8).copy()
            value = int(block[0]) if block.min() == block.max() else 0
        else:
            word = int(self._bytes(window, offset, 8).view("<u8")[0])
            value = word if word < REFUSED_BIT else -(word & (REFUSED_BIT - 1))
        self._fence()
        return value

    def code(self, n: int) -> int:
        """code(n), 1..V."""
        return (n - 1) % self.V + 1

    def lap(self, n: int) -> int:
        """lap(n)."""
        return (n - 1) // self.V

    def _record(self, n: int, source: int) -> int:
        """Offset of the record of call n that ``source`` writes, in any window."""
        return self.at.record + n % NREC * self.at.record_slot_stride + source * self.at.record_stride

    def _cell(self, h: int, owner: int) -> int:
        """Offset of the combine cell of handle h that ``owner`` writes, in any window."""
        return self.at.cell + h % self.sizes.slots * self.at.cell_slot_stride + owner * self.at.cell_stride

    def _slot(self, region: str, n: int) -> int:
        return int(
            getattr(self.at, region) + n % self.sizes.slots * getattr(self.at, f"{region}_slot_stride")
        )

    def _progress(self, phase: int) -> None:
        words = self._bytes(self.rank, self.at.progress, 24).view("<i8")
        words[PROGRESS["EPOCH"]] = self.n
        words[PROGRESS["PHASE"]] = phase
        self.phase = phase

    # -------------------------------------------------------------------------------------------------- waiting

    def _wait(
        self,
        what: str,
        waiting: set[int],
        poll: Callable[[int], bool],
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Poll until nobody is left in ``waiting``, or ``enough`` says so; removes from ``waiting`` who came."""
        deadline = time.monotonic() + self.timeout
        next_look = time.monotonic() + 3e-3
        while True:
            waiting -= {q for q in sorted(waiting) if poll(q)}
            if not waiting or (enough is not None and enough()):
                return
            now = time.monotonic()
            if now >= deadline:
                self.poison(min(waiting))
                raise TimeoutError(
                    f"rank {self.rank}, {what} of call {self.n}: waited {self.timeout:g} s for ranks {sorted(waiting)}"
                )
            if now >= next_look:
                next_look = now + 3e-3
                gone = self.gone()
                if gone:
                    # A peer may have done its part just before it went.
                    waiting -= {q for q in sorted(waiting) if poll(q)}
                    if not waiting or (enough is not None and enough()):
                        return
                    # One that left is missed only by who still waits for it; a poisoned group has ended for all.
                    fatal = {q: code for q, code in gone.items() if code != LEFT or q in waiting}
                    if fatal:
                        self._ended = True
                        raise PeerGone(f"rank {self.rank}, {what} of call {self.n}: status of peers {fatal}")
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

    # -------------------------------------------------------------------------------------------------- dispatch

    def _begin(self) -> None:
        """The part of a call that counts also when it is aborted: n, and the codes of the lap before."""
        if self._ended:
            raise RuntimeError(f"rank {self.rank}: the group has ended, after call {self.n}")
        self._wait_out()
        self.n += 1
        self._open = {h for h in self._open if self.n - h < self.sizes.slots}
        self._progress(DISPATCH_PACK)
        if self.lap(self.n) != self.lap(self.n - self.sizes.slots):
            self._clear_cells()

    def _wait_out(self) -> None:
        """A peer may not have read the record before the last one, which stands where the next one goes."""
        self._wait("the records left over", self._owed.ranks, lambda q: self._came(self._owed.n, q))

    def _clear_cells(self) -> None:
        """Codes of the lap before would match again in this one."""
        for q in range(self.sizes.world_size):
            self._write_code(self.rank, self._cell(self.n, q) + self.at.cell_code, 0)

    def _came(self, n: int, q: int) -> bool:
        return self._read_code(self.rank, self._record(n, q) + self.at.record_code) == self.code(n)

    def _send_record(self, words: dict[str, int], payload: bytes) -> None:
        """Write the record of this call into every peer's window: body and payload, then the code."""
        body = np.zeros(RECORD_WORDS, "<i4")
        for name, value in words.items():
            body[RECORD[name]] = value
        for q in self.peers:
            start = self._record(self.n, self.rank)
            self._words(q, start + self.at.record_header, RECORD_WORDS)[:] = body
            self._bytes(q, start + self.at.record_payload, len(payload))[:] = np.frombuffer(payload, np.uint8)
            self._write_code(q, start + self.at.record_code, self.code(self.n))

    def _base_words(self, kind: int) -> dict[str, int]:
        return {
            "KIND": kind,
            "GENERATION": self.generation,
            "EPOCH_LO": low(self.n),
            "EPOCH_HI": high(self.n),
        }

    def abort(self, text: str, reason: int = 1) -> None:
        """This rank's input is bad: tell all peers, and use up the call."""
        self._begin()
        data = cut(text, self.at.record_payload_bytes)
        self._send_record(
            {**self._base_words(ABORT), "REASON": reason, "TEXT_BYTES": len(data)},
            data,
        )
        self._owed = _Owed(self.n, set(self.peers))
        self._progress(IDLE)

    def dispatch(
        self,
        x: Array,
        topk_idx: Array,
        weights: Array | None,
        dtype: int,
        weight_dtype: int = NO_DTYPE,
        tag: int = 0,
        staged: bool = False,
    ) -> Received:
        """One pull dispatch.

        Args:
            x: [T, H] of STORAGE[dtype].
            topk_idx: [T, K] ids, -1 for none.
            weights: [T, K] of STORAGE[weight_dtype], or None.
            staged: put x into one of the other x slots, with rows as far apart as the group's widest; the default is
                the slot of n, with rows as close as they may be. The record tells.
        """
        T, K = topk_idx.shape
        H = x.shape[1]
        item = STORAGE[dtype].itemsize
        assert self.sizes.max_tokens >= T and self.sizes.top_k >= K and self.sizes.row_bytes >= H * item
        assert x.dtype == STORAGE[dtype] and len(x) == T
        self._begin()
        n = self.n

        # Kept pairs in (expert, token, k) order.
        flat = topk_idx.reshape(-1).astype(np.int64)
        pairs = np.array(sorted(np.flatnonzero(flat >= 0), key=lambda pair: (flat[pair], pair)), np.int64)
        counts_E = np.array([np.count_nonzero(flat == e) for e in range(self.sizes.num_experts)], "<i4")
        tokens = (pairs // K).astype("<i4")
        self._words(self.rank, self._slot("token_list", n), len(tokens))[:] = tokens
        if weights is not None:
            packed = weights.astype(STORAGE[weight_dtype], copy=False).reshape(-1)[pairs]
            self._bytes(self.rank, self._slot("weight", n), packed.nbytes)[:] = packed.view(np.uint8)
        stride = self.at.row_stride if staged else align(H * item, self.at.row_align)
        x_offset = self._slot("x", n) + staged * self.sizes.slots * self.at.x_slot_stride
        own = self.sizes.experts_of(self.rank)
        needed = {int(pair) // K for pair in pairs if int(flat[pair]) not in own}
        rows = self._rows(self.rank, x_offset, stride, (T, H), dtype)
        for t in needed:  # a row that no other rank needs is left out
            rows[t] = x[t]

        mine = {
            **self._base_words(COUNTS),
            "TOKENS": T,
            "HIDDEN": H,
            "DTYPE": dtype,
            "WEIGHT_DTYPE": NO_DTYPE if weights is None else weight_dtype,
            "TOP_K": K,
            "PAD_LO": -1,
            "PAD_HI": -1,
            "ALIGN": 1,
            "TAG_LO": low(tag),
            "TAG_HI": high(tag),
            "X_LO": low(x_offset),
            "X_HI": high(x_offset),
            "X_STRIDE": stride,
        }
        self._send_record(mine, counts_E.tobytes())

        self._progress(DISPATCH_COUNTS)
        records: dict[int, dict[str, int]] = {self.rank: mine}
        counts_RE = np.zeros((self.sizes.world_size, self.sizes.num_experts), np.int64)
        counts_RE[self.rank] = counts_E
        aborts: dict[int, str] = {}

        def poll(q: int) -> bool:
            if not self._came(n, q):
                return False
            record, payload = self._read_record(n, q)
            if record["KIND"] == ABORT:
                aborts[q] = payload[: record["TEXT_BYTES"]].tobytes().decode(errors="replace")
            else:
                records[q] = record
                counts_RE[q] = payload[: 4 * self.sizes.num_experts].view("<i4")
            return True

        waiting = set(self.peers)
        self._wait("dispatch", waiting, poll, lambda: bool(aborts))
        self._owed = _Owed(n, waiting)
        if aborts:
            self._progress(IDLE)
            raise PeerAborted(f"rank {self.rank}, dispatch of call {n}: {aborts}")
        for names in (["KIND"], ["TAG_LO", "TAG_HI"], ["HIDDEN"], ["DTYPE"], ["WEIGHT_DTYPE"]):
            said = {q: tuple(record.get(name, 0) for name in names) for q, record in records.items()}
            if len(set(said.values())) > 1:
                self._progress(IDLE)
                raise CallMismatch(f"rank {self.rank}, dispatch of call {n}: {names} by rank: {said}")
        for p in range(self.sizes.world_size):
            total = int(counts_RE[:, self.sizes.experts_of(p)].sum())
            if total > self.sizes.max_recv_rows:
                self._progress(IDLE)
                raise TooManyRows(
                    f"rank {self.rank}, dispatch of call {n}: rank {p} would receive {total} rows"
                )

        self._progress(DISPATCH_ROWS)
        N = int(counts_RE[:, own].sum())
        x_NH = np.empty((N, H), STORAGE[dtype])
        weights_N = None if weights is None else np.empty(N, STORAGE[weight_dtype])
        position = 0
        for e in own:
            for s in range(self.sizes.world_size):
                count = int(counts_RE[s, e])
                begin = int(counts_RE[s, :e].sum())
                entries = self._words(s, self._slot("token_list", n), begin + count)[begin:].copy()
                to = slice(position, position + count)
                position += count
                if s == self.rank:
                    x_NH[to] = x[entries]
                else:
                    record = records[s]
                    if count and not (entries.min() >= 0 and entries.max() < record["TOKENS"]):
                        raise ProtocolError(f"rank {s}, call {n}: token list {entries}, T {record['TOKENS']}")
                    offset = joined(record["X_LO"], record["X_HI"])
                    source = self._rows(s, offset, record["X_STRIDE"], (record["TOKENS"], H), dtype)
                    x_NH[to] = source[entries]
                if weights_N is not None:
                    size = weights_N.itemsize
                    at = self._slot("weight", n) + begin * size
                    weights_N[to] = self._bytes(s, at, count * size).copy().view(weights_N.dtype)
        self._open.add(n)
        self._progress(IDLE)
        handle = Handle(n, topk_idx.copy(), counts_RE)
        return Received(x_NH, weights_N, counts_RE[:, own].sum(0), handle)

    def _read_record(self, n: int, q: int) -> tuple[dict[str, int], Array]:
        """The record of q, held against everything that the document says about one."""
        start = self._record(n, q)
        words = self._words(self.rank, start + self.at.record_header, RECORD_WORDS).copy()
        payload = self._bytes(self.rank, start + self.at.record_payload, self.at.record_payload_bytes).copy()
        record = {name: int(words[word]) for name, word in RECORD.items()}

        def demand(what: str, good: bool) -> None:
            if not good:
                raise ProtocolError(
                    f"record of rank {q}, call {n}: {what}: {record}, all words {words.tolist()}"
                )

        demand("words not named are 0", not words[len(RECORD) :].any())
        demand("KIND", record["KIND"] in (COUNTS, ABORT))
        demand("GENERATION", record["GENERATION"] == self.generation)
        demand("EPOCH", joined(record["EPOCH_LO"], record["EPOCH_HI"]) == n)
        if record["KIND"] == ABORT:
            demand("REASON", record["REASON"] in (1, 2))
            demand("TEXT_BYTES", 0 < record["TEXT_BYTES"] <= self.at.record_payload_bytes)
            return record, payload
        demand("QUANT and MODE", (record["QUANT"], record["MODE"]) == (0, 0))
        demand("PAD and ALIGN", (record["PAD_LO"], record["PAD_HI"], record["ALIGN"]) == (-1, -1, 1))
        demand("no REASON, no text", (record["REASON"], record["TEXT_BYTES"]) == (0, 0))
        demand(
            "TOKENS and TOP_K",
            record["TOKENS"] <= self.sizes.max_tokens and record["TOP_K"] <= self.sizes.top_k,
        )
        demand("dtypes", record["DTYPE"] in STORAGE and record["WEIGHT_DTYPE"] in (NO_DTYPE, *STORAGE))
        row = record["HIDDEN"] * STORAGE[record["DTYPE"]].itemsize
        demand("HIDDEN", 0 < row <= self.sizes.row_bytes)
        x = joined(record["X_LO"], record["X_HI"])
        if record["TOKENS"]:
            end = x + (record["TOKENS"] - 1) * record["X_STRIDE"] + row
            demand("x in the window", x >= 0 and end <= self.at.total_bytes)
            demand("rows of x start where they may", x % self.at.row_align == 0)
            demand("X_STRIDE", record["X_STRIDE"] >= row and record["X_STRIDE"] % self.at.row_align == 0)
        counts = payload[: 4 * self.sizes.num_experts].view("<i4")
        demand("counts", counts.min() >= 0 and counts.sum() <= record["TOKENS"] * record["TOP_K"])
        return record, payload

    # --------------------------------------------------------------------------------------------------- combine

    def _close_handle(self, handle: Handle) -> None:
        if handle.n not in self._open:
            raise HandleExpired(
                f"rank {self.rank}: handle {handle.n} at call {self.n}; open: {sorted(self._open)}"
            )
        self._open.remove(handle.n)

    def _rows_at(self, handle: Handle, source: int, owner: int) -> int:
        """How many rows of ``source`` the experts of ``owner`` computed."""
        return int(handle.counts_RE[source, self.sizes.experts_of(owner)].sum())

    def _concerned(self, handle: Handle) -> Iterator[int]:
        """Other ranks that have rows here."""
        return (q for q in self.peers if self._rows_at(handle, q, self.rank))

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
        for q in self._concerned(handle):
            words = {"REASON": reason, "TEXT_BYTES": len(data)}
            self._send_cell(q, handle.n, words, data, -self.code(handle.n))

    def combine(
        self,
        y: Array,
        handle: Handle,
        weights: Array | None,
        dtype: int,
        weight_dtype: int = NO_DTYPE,
        wide: bool = False,
    ) -> Array:
        """One pull combine.

        Args:
            y: [N, H] of STORAGE[dtype].
            weights: [T, K] of STORAGE[weight_dtype], or None.
            wide: put y's rows as far apart as the group's widest.

        Returns:
            [T, H] of STORAGE[dtype].
        """
        self._close_handle(handle)
        h, own = handle.n, self.sizes.experts_of(self.rank)
        N, H = y.shape
        assert y.dtype == STORAGE[dtype] and handle.counts_RE[:, own].sum() == N
        self._progress(COMBINE_WRITE)
        stride = self.at.row_stride if wide else align(H * y.itemsize, self.at.row_align)
        y_offset = self._slot("y", h)
        self._rows(self.rank, y_offset, stride, (N, H), dtype)[:] = y
        words = {
            "DTYPE": dtype,
            "HIDDEN": H,
            "STRIDE": stride,
            "Y_LO": low(y_offset),
            "Y_HI": high(y_offset),
        }
        for q in self._concerned(handle):
            self._send_cell(q, h, words, b"", self.code(h))

        self._progress(COMBINE_WAIT)
        cells: dict[int, dict[str, int]] = {}
        refusals: dict[int, str] = {}

        def poll(p: int) -> bool:
            start = self._cell(h, p)
            code = self._read_code(self.rank, start + self.at.cell_code)
            if code not in (self.code(h), -self.code(h)):
                return False
            body = self._words(self.rank, start + self.at.cell_body, CELL_WORDS).copy()
            cell = {name: int(body[word]) for name, word in CELL.items()}
            if code > 0:
                cells[p] = cell
            else:
                text = self._bytes(self.rank, start + self.at.cell_text, cell["TEXT_BYTES"])
                refusals[p] = text.tobytes().decode(errors="replace")
            return True

        waiting = {p for p in self.peers if self._rows_at(handle, self.rank, p)}
        self._wait("combine", waiting, poll)
        if refusals:
            self._progress(IDLE)
            raise PeerAborted(f"rank {self.rank}, combine of handle {h}: {refusals}")
        said = {p: (cell["DTYPE"], cell["HIDDEN"]) for p, cell in cells.items()}
        if set(said.values()) - {(dtype, H)}:
            self._progress(IDLE)
            raise CallMismatch(f"rank {self.rank}, combine of handle {h}: {(dtype, H)} here, by rank: {said}")

        self._progress(COMBINE_SUM)
        T, K = handle.idx_TK.shape
        acc: type[np.floating[Any]] = np.float64 if dtype == FLOAT64 else np.float32
        out = np.zeros((T, H), acc)
        started = np.zeros(T, bool)
        places = self._places(handle)
        with np.errstate(all="ignore"):
            for k in range(K):
                for t in range(T):
                    if (t, k) not in places:
                        continue
                    p, row = places[t, k]
                    if p == self.rank:
                        term = y[row]
                    else:
                        cell = cells[p]
                        offset = joined(cell["Y_LO"], cell["Y_HI"]) + row * cell["STRIDE"]
                        term = self._rows(p, offset, cell["STRIDE"], (1, H), dtype)[0]
                    value = widen(term, dtype, acc)
                    if weights is not None:
                        value = value * widen(weights[t, k : k + 1], weight_dtype, acc)
                    out[t] = out[t] + value if started[t] else value
                    started[t] = True
            result = narrow(out, dtype)
        self._progress(IDLE)
        return result

    def _places(self, handle: Handle) -> dict[tuple[int, int], tuple[int, int]]:
        """(token, k) -> (owner, row at the owner), for every kept pair of this rank."""
        places: dict[tuple[int, int], tuple[int, int]] = {}
        C = handle.counts_RE
        for p in range(self.sizes.world_size):
            experts = self.sizes.experts_of(p)
            for e in experts:
                row = int(C[:, experts.start : e].sum() + C[: self.rank, e].sum())
                for t, k in np.argwhere(handle.idx_TK == e):
                    places[int(t), int(k)] = (p, row)
                    row += 1
        return places

    # ------------------------------------------------------------------------------------------------------ ends

    def _send_status(self, code: int, who: int) -> None:
        words = {
            "WHO": who,
            "EPOCH_LO": low(self.n),
            "EPOCH_HI": high(self.n),
            "PHASE": self.phase,
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

    def poison(self, who: int = -1) -> None:
        """Tell all peers that the group has ended because ``who`` was missing."""
        self._send_status(POISON, who)

    def leave(self) -> None:
        """Tell all peers that this rank has closed its group."""
        self._send_status(LEFT, -1)
