"""The table of targets: every tile fits in the memories it is cut for, and is as large as they allow."""

from __future__ import annotations

import doctest
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from moe_a2a.op_host import tiling
from moe_a2a.op_host.tiling import TARGETS, Phase, device_cores, product_tile, row_tile, target_of

HIDDEN = (1, 65, 2048, 7168, 8192, 8193, 100_000)
ROWS = (0, 1, 2, 3, 17, 128, 129, 10**6)


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("phase", get_args(Phase))
def test_row_tiles_fit_and_are_no_smaller_than_they_must_be(name: str, phase: Phase) -> None:
    target = TARGETS[name]
    for hidden, rows, itemsize in itertools.product(HIDDEN, ROWS, (1, 2, 4, 8)):
        height, width = row_tile(target, phase, hidden=hidden, itemsize=itemsize, rows=rows)
        live = tiling.live_bytes(target, phase, itemsize)
        assert power_of_two(height) and power_of_two(width)
        assert height * width * live <= target.vector, (hidden, rows, itemsize)
        # Twice as wide would hold nothing more, or wouldn't fit; so would twice as high.
        least = 2 if target.ascend else 1
        assert width >= hidden or 2 * width * least * live > target.vector
        assert height >= min(rows, tiling.MOST_ROWS) or 2 * height * width * live > target.vector
        assert width < 2 * hidden and least <= height <= max(least, 2 * rows - 1)


@pytest.mark.parametrize("name", TARGETS)
def test_product_tiles_fit(name: str) -> None:
    target = TARGETS[name]
    for hidden, inter, rows, itemsize in itertools.product(HIDDEN, (1, 32, 768, 2048), ROWS, (2, 4)):
        m, n, k = product_tile(target, hidden=hidden, intermediate=inter, itemsize=itemsize, rows=rows)
        case = (hidden, inter, rows, itemsize)
        assert all(map(power_of_two, (m, n, k))) and m >= target.least_m and min(n, k) >= 16, case
        assert 2 * m * n * 4 <= target.sums, case
        if target.ascend:
            assert max(m, n) * k * itemsize * target.stages <= target.operands, case
            assert m * n * tiling.ACTIVATION_BYTES <= target.vector, case
        else:
            assert (m * k + 2 * n * k) * itemsize * target.stages <= target.operands, case


def test_what_was_measured() -> None:
    """Tiles that were compiled without spills (GPUs) or lowered (Ascend) at DeepSeek-V3's sizes; see docs/measurements.md."""
    tiles = {
        name: product_tile(target, hidden=7168, intermediate=2048, itemsize=2, rows=32)
        for name, target in TARGETS.items()
    }
    assert tiles == {
        "910B": (32, 128, 128),
        "910_93": (32, 128, 128),
        "950": (32, 128, 128),
        "sm_90": (64, 128, 64),
        "gfx942": (32, 64, 64),
    }


def test_the_readme_has_the_table() -> None:
    readme = (Path(__file__).resolve().parent.parent / "op_host" / "README.md").read_text()
    for name, target in TARGETS.items():
        tiles = [
            "{} x {}".format(*row_tile(target, phase, hidden=7168, itemsize=2, rows=32))
            for phase in get_args(Phase)
        ]
        m, n, k = product_tile(target, hidden=7168, intermediate=2048, itemsize=2, rows=32)
        cells = [name, target.vector, target.operands, target.sums, *tiles, f"{m}, {n}, {k}"]
        assert f"| {' | '.join(map(str, cells))} |" in readme


def test_the_docstrings_are_right() -> None:
    assert doctest.testmod(tiling).failed == 0


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, arch: str, capability: tuple[int, int]
) -> None:
    properties = SimpleNamespace(
        gcnArchName=arch, major=capability[0], minor=capability[1], multi_processor_count=77
    )
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("hip", "arch", "capability", "name"),
    [(None, "", (9, 0), "sm_90"), ("7.0", "gfx942:sramecc+:xnack-", (9, 4), "gfx942")],
)
def test_gpus_are_found_in_the_table(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, arch: str, capability: tuple[int, int], name: str
) -> None:
    fake_gpu(monkeypatch, hip, arch, capability)
    assert target_of(torch.device("cuda", 0)) == name
    assert device_cores(torch.device("cuda", 0)) == 77


def test_a_device_that_is_not_in_the_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, None, "", (7, 5))
    with pytest.raises(ValueError, match=r"no line for sm_75 \(device cuda:0\); it has 910B, .*gfx942"):
        target_of(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="no line for cpu"):
        target_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("Ascend910B1", "910B"),
        ("Ascend910B4", "910B"),
        ("Ascend910_9391", "910_93"),
        ("Ascend950PR_9589", "950"),
    ],
)
def test_npus_are_found_in_the_table(monkeypatch: pytest.MonkeyPatch, chip: str, name: str) -> None:
    """The stream's limit counts, not the chip: on a limited stream a full grid of programs that poll would deadlock."""
    npu = SimpleNamespace(
        get_device_name=lambda device: chip,
        current_stream=lambda device: "stream",
        get_stream_limit=lambda stream: (
            {"vector_core_num": 24, "cube_core_num": 12} if stream == "stream" else {}
        ),
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    device = SimpleNamespace(type="npu")
    assert target_of(device) == name  # type: ignore[arg-type]
    assert device_cores(device) == 24  # type: ignore[arg-type]


def test_the_interpreter_runs_one_program_at_a_time() -> None:
    assert device_cores(torch.device("cpu")) == 1
