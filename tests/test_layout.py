"""The layout: one description, and everybody's copy of it is the same."""

from __future__ import annotations

import doctest
import itertools
import re
from dataclasses import fields
from pathlib import Path

import pytest

from moe_a2a import errors
from moe_a2a.op_host import layout, layout_tables
from moe_a2a.op_host.layout import Format, expert_ranges, window_layout

ROOT = Path(__file__).resolve().parent.parent
HEADER = (ROOT / "op_kernel/cpu/layout.h").read_text()


def cpp_enum(name: str) -> dict[str, int]:
    """Names and values of an enum in layout.h."""
    body = re.search(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}};", HEADER, re.DOTALL)
    assert body is not None, f"no enum {name} in layout.h"
    names: dict[str, int] = {}
    for entry in re.sub(r"//.*", "", body[1]).split(","):
        if not entry.strip():
            continue
        key, _, value = entry.partition("=")
        names[key.strip()] = int(value) if value else len(names)
    return names


def test_params_are_handed_over_in_the_order_the_kernels_read_them() -> None:
    ours = [field.name.upper() for field in fields(layout.WindowLayout)]
    theirs = cpp_enum("LayoutParam")
    assert theirs.pop("LAYOUT_PARAMS") == len(ours)
    assert list(theirs) == ours
    assert list(theirs.values()) == list(range(len(ours)))


@pytest.mark.parametrize(
    "name",
    [
        "Kind",
        "Status",
        "Phase",
        "RecordWord",
        "CellWord",
        "StatusWord",
        "ProgressWord",
        "HandleWord",
        "Format",
    ],
)
def test_words_are_the_same_in_cpp(name: str) -> None:
    assert cpp_enum(name) == {member.name: member.value for member in getattr(layout, name)}


@pytest.mark.parametrize(
    "name", ["RECORD_HEADER_WORDS", "CELL_BODY_WORDS", "HANDLE_HEADER_WORDS", "HANDLE_MAGIC"]
)
def test_constants_are_the_same_in_cpp(name: str) -> None:
    value = re.search(rf"constexpr \w+ {name} = (\w+);", HEADER)
    assert value is not None and int(value[1], 0) == getattr(layout, name)


def test_dtype_codes_are_the_same_in_cpp() -> None:
    body = re.search(r"enum class Dtype[^{]*{(.*?)}", HEADER)
    assert body is not None
    assert body[1].strip() == "NONE = 0, F32 = 1, BF16 = 2, F16 = 3, F64 = 4"
    assert [str(dtype) for dtype in layout.DTYPE_CODES] == [
        "torch.float32",
        "torch.bfloat16",
        "torch.float16",
        "torch.float64",
    ]


def test_failure_kinds_are_the_same_in_cpp() -> None:
    text = (ROOT / "op_host/cpu/failure.h").read_text()
    theirs = {name: int(value) for name, value in re.findall(r"^  ([A-Z_]+) = (\d+),", text, re.MULTILINE)}
    assert theirs.pop("INTERRUPTED") == errors.INTERRUPTED
    snake = {
        number: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()
        for number, kind in errors.FAILURE_KINDS.items()
    }
    assert {number: name for name, number in theirs.items()} == snake


def test_the_document_shows_this_layout() -> None:
    document = (ROOT / "docs/protocol.md").read_text()
    assert set(re.findall(r"<!-- table ([a-z-]+) -->", document)) == set(layout_tables.tables())
    assert layout_tables.fill(document) == document, "docs/protocol.md is stale: see op_host/layout_tables.py"


@pytest.mark.parametrize("record_format", list(Format))
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "tokens", "row_bytes", "recv_rows", "slots"),
    [(1, 1, 1, 1, 1, 1, 2), (3, 7, 3, 33, 129 * 2, 100, 2), (8, 1024, 16, 257, 7168 * 8, 4112, 5)],
)
def test_nothing_overlaps(
    record_format: Format,
    ranks: int,
    experts: int,
    top_k: int,
    tokens: int,
    row_bytes: int,
    recv_rows: int,
    slots: int,
) -> None:
    lay = window_layout(
        world_size=ranks,
        num_experts=experts,
        top_k=top_k,
        max_tokens=tokens,
        row_bytes=row_bytes,
        recv_rows=recv_rows,
        slots=slots,
        record_format=record_format,
    )
    row = lay.row_stride(row_bytes, 1)
    pieces = [
        (0, 8 * len(layout.HeaderWord), "header"),
        (lay.progress, 8 * len(layout.ProgressWord), "progress"),
    ]
    for rank in range(ranks):
        pieces.append((lay.status + rank * lay.status_stride, lay.status_stride, f"status {rank}"))
        for slot in range(lay.record_slots):
            start = lay.record + slot * lay.record_slot_stride + rank * lay.record_stride
            pieces.append(
                (start + lay.record_header, 4 * layout.RECORD_HEADER_WORDS, f"record header {slot} {rank}")
            )
            pieces.append(
                (start + lay.record_payload, max(4 * experts, 480), f"record payload {slot} {rank}")
            )
            pieces.append((start + lay.record_code, 32 if record_format else 8, f"record code {slot} {rank}"))
        for slot in range(slots):
            start = lay.cell + slot * lay.cell_slot_stride + rank * lay.cell_stride
            pieces.append((start + lay.cell_body, 4 * layout.CELL_BODY_WORDS, f"cell body {slot} {rank}"))
            pieces.append((start + lay.cell_text, lay.cell_text_bytes, f"cell text {slot} {rank}"))
            pieces.append((start + lay.cell_code, 32 if record_format else 8, f"cell code {slot} {rank}"))
    for slot in range(slots):
        pieces.append(
            (lay.token_list + slot * lay.token_list_slot_stride, 4 * tokens * top_k, f"list {slot}")
        )
        pieces.append((lay.weight + slot * lay.weight_slot_stride, 8 * tokens * top_k, f"weight {slot}"))
        pieces.append((lay.y + slot * lay.y_slot_stride, recv_rows * row, f"y {slot}"))
    for slot in range(slots + lay.stage_slots):
        pieces.append((lay.x + slot * lay.x_slot_stride, tokens * row, f"x {slot}"))
    pieces.sort()
    for (start, size, name), (after, _, other) in itertools.pairwise(pieces):
        assert start + size <= after, f"{name} runs into {other}"
    assert pieces[-1][0] + pieces[-1][1] <= lay.total_bytes
    assert lay.total_bytes % layout.PAGE == 0
    assert sum(lay.regions().values()) == lay.total_bytes


def test_codes_are_aligned_for_atomics() -> None:
    for record_format in Format:
        lay = window_layout(
            world_size=3,
            num_experts=5,
            top_k=1,
            max_tokens=3,
            row_bytes=7,
            recv_rows=5,
            record_format=record_format,
        )
        unit = 32 if record_format == Format.PORTABLE else 8
        for offset in (lay.record + lay.record_code, lay.cell + lay.cell_code, lay.status + lay.status_code):
            assert offset % unit == 0
        for stride in (lay.record_stride, lay.cell_stride, lay.status_stride, lay.record_slot_stride):
            assert stride % unit == 0


def test_offsets_are_64_bit() -> None:
    lay = window_layout(
        world_size=8, num_experts=64, top_k=8, max_tokens=2**20, row_bytes=7168 * 2, recv_rows=2**24, slots=2
    )
    last = layout.row_offset(lay.y, 1, lay.y_slot_stride, 2**24 - 1, lay.row_stride(7168, 2))
    assert last == lay.y + lay.y_slot_stride + (2**24 - 1) * 14336 > 2**38
    assert last + 14336 <= lay.total_bytes


def test_code_wraps_and_is_never_zero() -> None:
    lay = window_layout(
        world_size=2, num_experts=2, top_k=1, max_tokens=1, row_bytes=4, recv_rows=1, code_max=3
    )
    assert [lay.code(n) for n in range(1, 8)] == [1, 2, 3, 1, 2, 3, 1]
    assert [lay.lap(n) for n in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"slots": 1}, "slots = 1"),
        ({"world_size": 0}, "world_size = 0"),
        ({"code_max": 2}, "code_max = 2"),
        ({"code_max": 2**31, "record_format": Format.PORTABLE}, "code_max = 2147483648"),
        ({"max_tokens": 2**30, "top_k": 2}, r"max_tokens \* top_k = 2147483648"),
        ({"recv_rows": 2**31}, "recv_rows = 2147483648"),
    ],
)
def test_what_cannot_be_laid_out_is_named(change: dict[str, int], name: str) -> None:
    sizes = {"world_size": 2, "num_experts": 2, "top_k": 1, "max_tokens": 1, "row_bytes": 4, "recv_rows": 1}
    with pytest.raises(ValueError, match=name):
        window_layout(**{**sizes, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(("experts", "ranks"), [(7, 3), (30, 8), (4, 8), (1, 1), (64, 8), (5, 4)])
def test_every_expert_has_one_owner(experts: int, ranks: int) -> None:
    ranges = expert_ranges(experts, ranks)
    assert [e for owned in ranges for e in owned] == list(range(experts))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(layout).failed == 0
