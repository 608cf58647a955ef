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
QUANTIZE_HEADER = (ROOT / "op_kernel/cpu/quantize.h").read_text()


def cpp_enum(name: str, header: str = HEADER) -> dict[str, int]:
    """Names and values of an enum in layout.h or another header."""
    body = re.search(rf"enum (?:class )?{name}\b[^{{]*{{(.*?)}};", header, re.DOTALL)
    assert body is not None, f"no enum {name}"
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
        "Mode",
        "Wave",
        "Quant",
    ],
)
def test_words_are_the_same_in_cpp(name: str) -> None:
    theirs = cpp_enum(name, QUANTIZE_HEADER if name == "Quant" else HEADER)
    assert theirs == {member.name: member.value for member in getattr(layout, name)}


@pytest.mark.parametrize(
    "name",
    [
        "RECORD_HEADER_WORDS",
        "CELL_BODY_WORDS",
        "HANDLE_HEADER_WORDS",
        "HANDLE_MAGIC",
        "CODE_BLOCK",
        "LINE",
        "LINE_PAYLOAD",
    ],
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


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("record_format", list(Format))
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "tokens", "row_bytes", "recv_rows", "slots"),
    [(1, 1, 1, 1, 1, 1, 2), (3, 7, 3, 33, 129 * 2, 100, 2), (8, 1024, 16, 257, 7168 * 8, 4112, 5)],
)
def test_nothing_overlaps(
    record_format: Format,
    push: bool,
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
        push=push,
    )
    line = record_format == Format.LINE
    code = 8 if record_format == Format.COMPACT else layout.CODE_BLOCK
    pieces = [
        (0, 8 * len(layout.HeaderWord), "header"),
        (lay.progress, 8 * len(layout.ProgressWord), "progress"),
    ]

    def guarded(start: int, code_at: int, size: int, name: str) -> None:
        """The lines that ``size`` bytes of payload take, or what they are; and where there are no lines, their code."""
        if line:
            pieces.append((start, layout.LINE * layout.lines_for(size), name))
        else:
            first = 0 if code_at else code
            pieces.append((start + first, size - first, name))
            pieces.append((start + code_at, code, f"code of {name}"))

    for rank in range(ranks):
        start = lay.status + rank * lay.status_stride
        guarded(start, lay.status_code, lay.status_body + 4 * layout.CELL_BODY_WORDS, f"status {rank}")
        for slot in range(lay.record_slots):
            start = lay.record + slot * lay.record_slot_stride + rank * lay.record_stride
            assert lay.record_header + 4 * layout.RECORD_HEADER_WORDS <= lay.record_payload
            assert lay.record_payload_bytes >= max(4 * experts, 480)
            guarded(
                start, lay.record_code, lay.record_payload + lay.record_payload_bytes, f"record {slot} {rank}"
            )
        for slot in range(slots):
            start = lay.cell + slot * lay.cell_slot_stride + rank * lay.cell_stride
            assert lay.cell_body + 4 * layout.CELL_BODY_WORDS <= lay.cell_text
            guarded(start, lay.cell_code, lay.cell_text + lay.cell_text_bytes, f"cell {slot} {rank}")
            for kind in layout.Wave:
                start = lay.wave + slot * lay.wave_slot_stride + kind * lay.wave_kind_stride
                start += rank * lay.wave_stride
                guarded(start, lay.wave_code, lay.wave_mark + code, f"wave {slot} {kind.name} {rank}")

    def stride(size: int) -> int:
        """Of rows that their owner writes."""
        return layout.align_up(size, lay.row_align)

    def remote(size: int) -> int:
        """Of rows that another rank writes."""
        return layout.LINE * layout.lines_for(size) if line else stride(size)

    regions = [
        ("token_list", lay.source_slots, 4 * tokens * top_k),
        ("weight", lay.source_slots, 8 * tokens * top_k),
        ("x", lay.source_slots + lay.stage_slots, tokens * stride(row_bytes + layout.ROW_TAIL)),
        ("y", slots, recv_rows * stride(max(row_bytes, layout.SCALAR_BYTES))),
    ]
    if not line:  # fused calls have flags in groups without push, too
        assert lay.row_flag_stride >= code
        regions.append(("row_flag", slots, recv_rows * lay.row_flag_stride))
    if push:
        regions.append(("row", slots, recv_rows * remote(row_bytes + layout.ROW_TAIL)))
        regions.append(("z", slots, tokens * top_k * remote(max(row_bytes, layout.SCALAR_BYTES))))
    for name, number, size in regions:
        for slot in range(number):
            start = getattr(lay, name) + slot * getattr(lay, f"{name}_slot_stride")
            pieces.append((start, size, f"{name} {slot}"))
    pieces.sort()
    for (start, size, name), (after, _, other) in itertools.pairwise(pieces):
        assert start + size <= after, f"{name} runs into {other}"
    assert pieces[-1][0] + pieces[-1][1] <= lay.total_bytes
    assert lay.total_bytes % layout.PAGE == 0
    assert sum(lay.regions().values()) == lay.total_bytes
    assert lay.push == push
    without = sum(lay.regions()[name] for name in ("row", "z"))
    assert push or without < layout.PAGE, "a group that never pushes pays nothing for it"


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
            push=True,
        )
        unit = 8 if record_format == Format.COMPACT else 32
        for offset in (
            lay.record + lay.record_code,
            lay.cell + lay.cell_code,
            lay.status + lay.status_code,
            lay.wave + lay.wave_code,
            lay.wave + lay.wave_mark,
            lay.row_flag,
        ):
            assert offset % unit == 0
        for stride in (
            lay.record_stride,
            lay.cell_stride,
            lay.status_stride,
            lay.record_slot_stride,
            lay.wave_stride,
            lay.wave_kind_stride,
            lay.wave_slot_stride,
            lay.row_flag_stride,
            lay.row_flag_slot_stride,
        ):
            assert stride % unit == 0
        if record_format == Format.LINE:
            for offset in (lay.record, lay.cell, lay.status, lay.wave, lay.row, lay.z):
                assert offset % layout.LINE == 0
            for stride in (lay.record_stride, lay.row_slot_stride, lay.z_slot_stride):
                assert stride % layout.LINE == 0


def test_offsets_are_64_bit() -> None:
    lay = window_layout(
        world_size=8, num_experts=64, top_k=8, max_tokens=2**20, row_bytes=7168 * 2, recv_rows=2**24, slots=2
    )
    last = layout.row_offset(lay.y, 1, lay.y_slot_stride, 2**24 - 1, lay.row_stride(7168, 2))
    assert last == lay.y + lay.y_slot_stride + (2**24 - 1) * 14336 > 2**38
    assert last + 14336 <= lay.total_bytes


def test_code_wraps_and_is_never_zero() -> None:
    lay = window_layout(
        world_size=2, num_experts=2, top_k=1, max_tokens=1, row_bytes=4, recv_rows=1, code_max=5
    )
    assert [lay.code(n) for n in range(1, 13)] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert [lay.lap(n) for n in range(1, 13)] == [0] * 5 + [1] * 5 + [2] * 2


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_two_records_that_are_there_at_once_never_have_the_same_code(slots: int) -> None:
    def make(code_max: int) -> layout.WindowLayout:
        return window_layout(
            world_size=2,
            num_experts=2,
            top_k=1,
            max_tokens=1,
            row_bytes=4,
            recv_rows=1,
            slots=slots,
            code_max=code_max,
        )

    lay = make(2 * slots + 1)
    for n in range(1, 100):
        assert lay.code(n) != lay.code(n + lay.record_slots)
    with pytest.raises(ValueError, match=f"code_max = {2 * slots}"):
        make(2 * slots)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"slots": 1}, "slots = 1"),
        ({"world_size": 0}, "world_size = 0"),
        ({"code_max": 4}, "code_max = 4"),
        ({"slots": 3, "code_max": 6}, "code_max = 6"),
        ({"code_max": 2**62 + 1}, "code_max = 4611686018427387905"),
        ({"code_max": 2**31, "record_format": Format.PORTABLE}, "code_max = 2147483648"),
        ({"code_max": 2**31, "record_format": Format.LINE}, "code_max = 2147483648"),
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
