"""The tutorial, run as a user runs it: one command, its last line and its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lanes import slow

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "minimal_put_signal.py"


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, everything printed)."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("ranks", "epochs"), [(3, 5), slow(2, 50)])
def test_every_row_arrives(ranks: int, epochs: int) -> None:
    code, printed = run("--ranks", str(ranks), "--epochs", str(epochs))
    assert code == 0, printed
    rows = epochs * ranks * (ranks - 1)
    assert f"verified: {ranks} ranks, {epochs} epochs, {rows} rows through " in printed.splitlines()[-1]
    # Each process maps the windows at addresses of its own, all of them.
    assert printed.count("windows of 2097152 bytes") == ranks


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no-signal", "TimeoutError: rank 0: the row of rank 1 in epoch 3 didn't come within 5 s"),
        slow("wrong-row", "AssertionError: rank 0: epoch 3 brought [21000.0, "),
    ],
)
def test_a_fault_is_named(fault: str, sentence: str) -> None:
    code, printed = run("--epochs", "3", "--timeout", "5", "--inject-fault", fault)
    assert code == 1, printed
    last = [line for line in printed.splitlines() if line.startswith("NOT verified: ")]
    assert last and sentence in last[0], printed


def test_bad_arguments_are_refused() -> None:
    code, printed = run("--ranks", "1")
    assert code == 2 and "--ranks must be at least 2" in printed
