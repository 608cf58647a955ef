"""Programs of this repository, run as a user runs them: a process of their own, in another folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def run_as_user(folder: Path, *arguments: str, limit: float, **environment: str) -> tuple[int, str]:
    """(exit code, everything printed) of ``python *arguments`` in ``folder``; its whole process group is gone afterwards.

    Args:
        limit: seconds; more fails the test.
        environment: variables beside those of this process.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "100", "PYTHONUTF8": "1", **environment},
    )
    try:
        printed, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the run didn't end within {limit:g} s; it printed:\n{process.communicate()[0]}")
    return process.returncode, printed
