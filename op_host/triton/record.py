"""Records and combine cells as Python values: what a host reads of them, checks, and writes.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..layout import (
    CELL_BODY_WORDS,
    CODE_DTYPES,
    RECORD_HEADER_WORDS,
    CellWord,
    Kind,
    Mode,
    RecordWord,
    WindowLayout,
)
from ..quant import QUANT_NAMES


def low(value: int) -> int:
    """The low 32 bits as an int32.

    >>> low(-1), low(2**31), high(2**31), high(-1)
    (-1, -2147483648, 0, -1)
    """
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def high(value: int) -> int:
    """The high 32 of 64 bits as an int32."""
    return low(value >> 32)


def joined(low_word: int, high_word: int) -> int:
    """The signed 64-bit number of two int32 words."""
    return (high_word << 32) | (low_word & 0xFFFFFFFF)


def clip_text(text: str, limit: int) -> bytes:
    """The text as UTF-8 of at most ``limit`` bytes, whole characters only, without zeros."""
    data = text.replace("\0", "?").encode(errors="replace")[:limit]
    return data.decode(errors="ignore").encode()


def text_of(words: Sequence[int], size: int) -> str:
    """The text that another process wrote as int32 words; what isn't UTF-8 reads as a question mark."""
    data = b"".join((word & 0xFFFFFFFF).to_bytes(4, "little") for word in words)
    return data[: max(0, min(size, len(data)))].decode(errors="replace").replace("�", "?")


def words_of(data: bytes) -> list[int]:
    """Bytes as int32 words, with zeros up to a whole word."""
    data += b"\0" * (-len(data) % 4)
    return [low(int.from_bytes(data[i : i + 4], "little")) for i in range(0, len(data), 4)]


def routing_digest(matrix: Iterable[int], epoch: int) -> int:
    """The signed 64-bit number that stands for call ``epoch``'s send-count matrix, row by row; not 0.

    >>> routing_digest([0], 1) != routing_digest([0], 2)
    True
    """
    state = 0x9E3779B97F4A7C15
    for value in (*matrix, epoch & 0xFFFFFFFF, epoch >> 32):
        state = (state ^ (value & 0xFFFFFFFF)) * 0xFF51AFD7ED558CCD & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    state = state or 1
    return state - 2**64 if state >= 2**63 else state


_HALVES = {
    "epoch": "EPOCH",
    "pad_to": "PAD",
    "tag": "TAG",
    "x": "X",
    "routing": "ROUTING",
    "read": "READ",
    "ids": "IDS",
}
_WORDS = {
    "kind": RecordWord.KIND,
    "reason": RecordWord.REASON,
    "generation": RecordWord.GENERATION,
    "tokens": RecordWord.TOKENS,
    "hidden": RecordWord.HIDDEN,
    "dtype": RecordWord.DTYPE,
    "quant": RecordWord.QUANT,
    "weight_dtype": RecordWord.WEIGHT_DTYPE,
    "top_k": RecordWord.TOP_K,
    "mode": RecordWord.MODE,
    "align": RecordWord.ALIGN,
    "x_stride": RecordWord.X_STRIDE,
    "text_bytes": RecordWord.TEXT_BYTES,
    "flag_rows": RecordWord.FLAG_ROWS,
    "later": RecordWord.ASYNC,
    "gradients": RecordWord.GRADIENTS,
}


@dataclass(frozen=True)
class Record:
    """A record's header; docs/protocol.md says what each word means."""

    kind: int
    generation: int
    epoch: int
    reason: int = 0
    tokens: int = 0
    hidden: int = 0
    dtype: int = 0
    quant: int = 0
    weight_dtype: int = 0
    top_k: int = 0
    mode: int = 0
    pad_to: int = -1
    align: int = 1
    tag: int = 0
    x: int = 0  # byte offset in the source's window
    x_stride: int = 0
    text_bytes: int = 0
    flag_rows: int = 0
    routing: int = 0
    read: int = 0
    later: int = 0
    gradients: int = 0  # bits of Gradient, and what said_weights() says
    ids: int = 0

    def words(self) -> list[int]:
        """int32 [RECORD_HEADER_WORDS], as they stand in the window."""
        words = [0] * RECORD_HEADER_WORDS
        for name, word in _WORDS.items():
            words[word] = getattr(self, name)
        for name, word_name in _HALVES.items():
            value = getattr(self, name)
            words[RecordWord[f"{word_name}_LO"]] = low(value)
            words[RecordWord[f"{word_name}_HI"]] = high(value)
        return words

    @classmethod
    def of(cls, words: Sequence[int]) -> Record:
        """Undoes :meth:`words`.

        >>> record = Record(1, 1, 2**40, tag=-5, pad_to=7)
        >>> Record.of(record.words()) == record
        True
        """
        fields = {name: words[word] for name, word in _WORDS.items()}
        for name, word_name in _HALVES.items():
            fields[name] = joined(words[RecordWord[f"{word_name}_LO"]], words[RecordWord[f"{word_name}_HI"]])
        return cls(**fields)


_KINDS = {int(Kind.COUNTS): "a dispatch of rows", int(Kind.ROUND): "a round of backward"}


def _dtype(code: int) -> str:
    return "none" if code == 0 else str(CODE_DTYPES.get(code, code)).removeprefix("torch.")


# Fields that all ranks have to agree on, in the order in which they are compared: what they are called, and how they read.
_AGREE: dict[str, tuple[str, Callable[[int], str]]] = {
    "generation": ("the generation of the windows", str),
    "epoch": ("the call number", str),
    "kind": ("the kind of call", lambda kind: _KINDS.get(kind, str(kind))),
    "tag": ("tag (which layer is calling)", str),
    "hidden": ("x's hidden size H", str),
    "dtype": ("x's dtype", _dtype),
    "weight_dtype": ("topk_weights' dtype (none: not given)", _dtype),
    "quant": ("quantize", lambda code: str(QUANT_NAMES.get(code))),
    "align": ("align", str),
    "routing": (
        "the routing",
        lambda digest: f"one that is used again (digest {digest})" if digest else "new",
    ),
}


def rows_fit(offset: int, stride: int, rows: int, row_bytes: int, begin: int, end: int) -> bool:
    """Do ``rows`` rows of ``row_bytes``, the first at byte ``offset``, lie in begin..end?"""
    if rows == 0:
        return True
    last = offset if rows == 1 else offset + (rows - 1) * stride  # the stride of one row means nothing
    return begin <= offset and (rows == 1 or stride >= 0) and last + row_bytes <= end


def differs(mine: Record, theirs: Record, rank: int, peer: int, pull_bytes: int, layout: WindowLayout) -> str:
    """How a peer's record doesn't go with this rank's; empty when it does.

    What another process wrote is checked before it is used: a rank mustn't read outside of a window because another is wrong.
    """
    for name, (what, show) in _AGREE.items():
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b:
            return f"{what} is {show(a)} on rank {rank} and {show(b)} on rank {peer}"
    fused = theirs.mode == Mode.FUSED
    if fused != (mine.mode == Mode.FUSED):
        calls = ("moe_a2a.moe", "dispatch") if fused else ("dispatch", "moe_a2a.moe")
        return f"the call is {calls[1]} on rank {rank} and {calls[0]} on rank {peer}"
    if (
        theirs.mode not in tuple(Mode)
        or (theirs.mode == Mode.PUSH and not layout.push)
        or theirs.flag_rows < 0
    ):
        return (
            f"rank {peer}'s record asks for mode {theirs.mode} with {theirs.flag_rows} rows a flag, which rank {rank} doesn't "
            "know"
        )
    if theirs.pad_to < -1:
        return f"rank {peer}'s record says pad_to = {theirs.pad_to}"
    pulled = theirs.mode == Mode.PULL and theirs.kind != Kind.ROUND
    if (
        not 0 <= theirs.tokens <= layout.max_tokens
        or not 0 <= theirs.top_k <= layout.top_k
        or (pulled and not rows_fit(theirs.x, theirs.x_stride, theirs.tokens, pull_bytes, layout.x, layout.y))
    ):
        return (
            f"rank {peer}'s record places x [{theirs.tokens}, {theirs.hidden}] at byte {theirs.x} with {theirs.x_stride} bytes "
            "from row to row, which isn't inside its x region"
        )
    return ""


@dataclass(frozen=True)
class Cell:
    """A combine cell's body."""

    reason: int = 0
    dtype: int = 0
    hidden: int = 0
    stride: int = 0
    y: int = 0  # byte offset in the owner's window
    text_bytes: int = 0
    mode: int = 0

    def words(self) -> list[int]:
        """int32 [CELL_BODY_WORDS]."""
        words = [0] * CELL_BODY_WORDS
        for name in ("reason", "dtype", "hidden", "stride", "text_bytes", "mode"):
            words[CellWord[name.upper()]] = getattr(self, name)
        words[CellWord.Y_LO], words[CellWord.Y_HI] = low(self.y), high(self.y)
        return words

    @classmethod
    def of(cls, words: Sequence[int]) -> Cell:
        """Undoes :meth:`words`."""
        names = ("reason", "dtype", "hidden", "stride", "text_bytes", "mode")
        fields = {name: words[CellWord[name.upper()]] for name in names}
        return cls(y=joined(words[CellWord.Y_LO], words[CellWord.Y_HI]), **fields)


@dataclass(frozen=True)
class RowForm:
    """What a row is while it travels: its elements, its scales when quantised, its weight when pushed with one. Bytes.

    >>> form = RowForm(5, 1, 4)  # 5 int8 with a scale and a float weight
    >>> form.scales_at, form.weight_at, form.pushed_bytes
    (8, 16, 20)
    """

    element_bytes: int
    scales: int
    weight_bytes: int

    @property
    def scales_at(self) -> int:
        return -(-self.element_bytes // 4) * 4

    @property
    def pulled_bytes(self) -> int:
        return self.scales_at + 4 * self.scales if self.scales else self.element_bytes

    @property
    def weight_at(self) -> int:
        return -(-self.pulled_bytes // 8) * 8

    @property
    def pushed_bytes(self) -> int:
        return self.weight_at + self.weight_bytes if self.weight_bytes else self.pulled_bytes
