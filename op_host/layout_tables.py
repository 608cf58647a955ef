"""Prints the tables of docs/protocol.md from the layout itself: ``python -m moe_a2a.op_host.layout_tables``.

A test compares the document with what this prints, so the two can't drift apart.
"""

from __future__ import annotations

import enum
import re
from typing import Any

from ..errors import FAILURE_KINDS, INTERRUPTED
from .layout import (
    CELL_BODY_WORDS,
    CELL_TEXT_BYTES,
    CODE_BLOCK,
    DTYPE_CODES,
    LAYOUT_VERSION,
    LINE,
    LINE_PAYLOAD,
    RECORD_HEADER_WORDS,
    RECORD_TEXT_BYTES,
    ROW_TAIL,
    SCALAR_BYTES,
    CellWord,
    Format,
    Gradient,
    HeaderWord,
    Kind,
    Mode,
    Phase,
    ProgressWord,
    Quant,
    RecordWord,
    Status,
    StatusWord,
    Wave,
    WindowLayout,
    window_layout,
)

EXAMPLE: dict[str, Any] = {
    "world_size": 2,
    "num_experts": 8,
    "top_k": 2,
    "max_tokens": 16,
    "row_bytes": 130,  # H = 65 in bfloat16
    "recv_rows": 64,
    "push": True,
}

_MEANINGS = {
    "HeaderWord.MAGIC": "0x6D6F655F61326131",
    "HeaderWord.VERSION": f"layout version, {LAYOUT_VERSION}",
    "HeaderWord.FORMAT": "0 compact, 1 portable, 2 line",
    "HeaderWord.GENERATION": "number of this set of windows",
    "HeaderWord.RANK": "the window's owner",
    "HeaderWord.WORLD_SIZE": "R",
    "HeaderWord.TOTAL_BYTES": "bytes of the window",
    "HeaderWord.NONCE_LO": "16 random bytes of this window, first half",
    "HeaderWord.NONCE_HI": "second half",
    "RecordWord.KIND": "kind of the record, below",
    "RecordWord.REASON": "ABORT: number of the error (1, 2 or 11)",
    "RecordWord.GENERATION": "of the windows",
    "RecordWord.EPOCH_LO": "n, low 32 bits",
    "RecordWord.EPOCH_HI": "n, high 32 bits",
    "RecordWord.TOKENS": "T of the source",
    "RecordWord.HIDDEN": "H",
    "RecordWord.DTYPE": "x's dtype, below",
    "RecordWord.QUANT": "how rows are quantised, below",
    "RecordWord.WEIGHT_DTYPE": "dtype of the weights that travel, 0 none",
    "RecordWord.TOP_K": "K of the source",
    "RecordWord.MODE": "who moves this source's rows, below",
    "RecordWord.PAD_LO": "rows this rank wants at most (pad_to), -1 any; low 32 bits",
    "RecordWord.PAD_HI": "high 32 bits",
    "RecordWord.ALIGN": "an expert's rows are padded to a multiple of this, 1 not",
    "RecordWord.TAG_LO": "the caller's tag, low 32 bits",
    "RecordWord.TAG_HI": "high 32 bits",
    "RecordWord.X_LO": "byte offset of x in the source's window, low 32 bits",
    "RecordWord.X_HI": "high 32 bits",
    "RecordWord.X_STRIDE": "bytes from one row of x to the next",
    "RecordWord.TEXT_BYTES": "ABORT: bytes of UTF-8 text in the payload",
    "RecordWord.FLAG_ROWS": "push, fused: rows of an expert that share a flag, 0 all of them",
    "RecordWord.ROUTING_LO": "0, or a digest of the routing that is used again, low 32 bits; then there is no payload",
    "RecordWord.ROUTING_HI": "high 32 bits",
    "RecordWord.READ_LO": "the source reads no x of calls up to this one any more, low 32 bits",
    "RecordWord.READ_HI": "high 32 bits",
    "RecordWord.ASYNC": "1 when this rank may wait for its rows later than the call",
    "RecordWord.GRADIENTS": "what this rank wants gradients of, bits, below; and 16 times W",
    "RecordWord.IDS_LO": "a digest of the source's ids, low 32 bits",
    "RecordWord.IDS_HI": "high 32 bits",
    "CellWord.REASON": "refusal: number of the error",
    "CellWord.DTYPE": "y's dtype",
    "CellWord.HIDDEN": "y's H",
    "CellWord.STRIDE": "bytes from one row of y to the next",
    "CellWord.Y_LO": "byte offset of y's row 0 in the owner's window, low 32 bits",
    "CellWord.Y_HI": "high 32 bits",
    "CellWord.TEXT_BYTES": "refusal: bytes of UTF-8 text",
    "CellWord.MODE": "where the rows are, below: in the owner's y (pull) or in the reader's z (push)",
    "StatusWord.REASON": "number of the error",
    "StatusWord.WHO": "the rank that was missing, -1 none",
    "StatusWord.EPOCH_LO": "n, low 32 bits",
    "StatusWord.EPOCH_HI": "n, high 32 bits",
    "StatusWord.PHASE": "what the writer was doing, below",
    "StatusWord.GENERATION": "of the windows",
    "ProgressWord.EPOCH": "n, the call counter itself: a call reads it, adds one and writes it back",
    "ProgressWord.PHASE": "what the owner is doing, below",
    "ProgressWord.VERDICT": "how the owner's last call ended: 0, or the number of its error",
}


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _words(words: type[enum.IntEnum]) -> str:
    return _table(
        ["word", "name", "meaning"],
        [[str(word.value), word.name, _MEANINGS[f"{words.__name__}.{word.name}"]] for word in words],
    )


def _numbers(names: type[enum.IntEnum | enum.IntFlag]) -> str:
    return ", ".join(f"{name.value} {name.name}" for name in names)


def _fields(layouts: list[WindowLayout], *names: str) -> str:
    return _table(
        ["field", *(Format(layout.format).name.lower() for layout in layouts)],
        [[f"`{name}`", *(str(getattr(layout, name)) for layout in layouts)] for name in names],
    )


def tables() -> dict[str, str]:
    """Markdown by name of the place in docs/protocol.md."""
    layouts = [window_layout(**EXAMPLE, record_format=record_format) for record_format in Format]
    return {
        "header": _words(HeaderWord),
        "record": _words(RecordWord),
        "record-bytes": _fields(
            layouts,
            "record_header",
            "record_payload",
            "record_payload_bytes",
            "record_code",
            "record_stride",
        ),
        "cell": _words(CellWord),
        "cell-bytes": _fields(
            layouts, "cell_body", "cell_text", "cell_text_bytes", "cell_code", "cell_stride"
        ),
        "wave-bytes": _fields(layouts, "wave_mark", "wave_code", "wave_stride"),
        "status": _words(StatusWord),
        "status-bytes": _fields(layouts, "status_body", "status_code", "status_stride"),
        "progress": _words(ProgressWord),
        "numbers": _table(
            ["what", "numbers"],
            [
                ["kind of a record", _numbers(Kind)],
                ["code of a status cell", _numbers(Status)],
                ["phase", _numbers(Phase)],
                ["mode", _numbers(Mode)],
                ["quantisation", _numbers(Quant)],
                ["kind of a wave cell", _numbers(Wave)],
                ["bits of gradients", _numbers(Gradient)],
                [
                    "dtype",
                    "0 none, "
                    + ", ".join(f"{code} {str(d).removeprefix('torch.')}" for d, code in DTYPE_CODES.items()),
                ],
                [
                    "error",
                    ", ".join(f"{number} {kind.__name__}" for number, kind in FAILURE_KINDS.items())
                    + f", {INTERRUPTED} interrupted",
                ],
                ["words of a record's header", str(RECORD_HEADER_WORDS)],
                ["least bytes of a record's payload", str(RECORD_TEXT_BYTES)],
                ["words of a combine or status body", str(CELL_BODY_WORDS)],
                ["bytes of a refusal's text", str(CELL_TEXT_BYTES)],
                ["bytes of a code in portable and line", str(CODE_BLOCK)],
                ["bytes of a line, and of its payload", f"{LINE}, {LINE_PAYLOAD}"],
                ["most bytes beside a row's elements", str(ROW_TAIL)],
                ["room for a row of y or z, at least", str(SCALAR_BYTES)],
            ],
        ),
        "example": _fields(
            layouts,
            "progress",
            "status",
            "record",
            "record_slot_stride",
            "cell",
            "cell_slot_stride",
            "wave",
            "wave_slot_stride",
            "token_list",
            "token_list_slot_stride",
            "weight",
            "weight_slot_stride",
            "x",
            "x_slot_stride",
            "y",
            "y_slot_stride",
            "row_flag",
            "row_flag_slot_stride",
            "row_flag_stride",
            "row",
            "row_slot_stride",
            "z",
            "z_slot_stride",
            "total_bytes",
        ),
    }


def fill(document: str) -> str:
    """The document with every table between ``<!-- table NAME -->`` and ``<!-- end -->`` replaced by the current one."""
    known = tables()

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{known[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table ([a-z-]+) -->\n.*?<!-- end -->", replace, document, flags=re.DOTALL)


if __name__ == "__main__":
    for name, table in tables().items():
        print(f"{name}\n\n{table}\n")
