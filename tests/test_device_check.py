"""The script for one GPU, as far as it goes without one: by the interpreter, and what it says when there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "device_check.py"


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, everything printed)."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=230
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    code, printed = run()
    assert code == 3, printed
    assert printed.startswith("device_check: torch sees no GPU here, so nothing was run")


def test_by_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    code, printed = run("--interpret", "--out", str(out))
    assert code == 0, printed
    assert printed.splitlines()[-1] == (
        "verified by the interpreter, nothing was run on a device: virtual ranks, times, two processes"
    ), printed
    report = json.loads(out.read_text())
    assert report["device"] == "interpreter" and report["failures"] == []
    # It was the kernels that did it, and all ranks of the fused call stood in one launch: programs run one after another, so
    # it takes several of them until each has seen the others.
    for kernel in ("publish", "await_records", "push", "take", "give", "combine", "virtual_ranks"):
        assert report["kernel_launches"][kernel] > 0, report
    assert 2 <= report["fused_launches"] <= 8
    assert "Triton kernels on interpreter" in report["pair"]["transport"]
    assert "times" not in report, "the interpreter's times mean nothing"


@pytest.mark.slow
def test_a_wrong_row_is_noticed() -> None:
    code, printed = run("--interpret", "--only", "virtual ranks", "--inject-fault", "wrong-row")
    assert code == 1, printed
    last = printed.splitlines()[-1]
    assert last.startswith("NOT verified by the interpreter"), printed
    assert "Wrong: dispatch: rank 1: 1 of " in last and "rows differ, first 0" in last
