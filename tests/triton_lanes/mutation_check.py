"""Which lane notices which fault? Puts each of mutations.py into a copy of the kernels and runs every lane on it.

    python -m triton_lanes.mutation_check [--only barrier] [--jobs 2]

Fails when a mutation is caught by no lane, when a lane fails on the kernels as they are, and when a lane breaks down instead of
saying that something is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import lane
from .mutations import MUTATIONS, Mutation, apply
from .native import ASCEND_PYTHON, ROOT

# What the lint looks at when there is no fault: whatever it looks at when there is one.
LINTED = tuple(sorted({kernel for mutation in MUTATIONS for kernel in mutation.linted}))


Command = Callable[[Path, Path, Mutation | None, float], list[str]]


@dataclass(frozen=True)
class Lane:
    """One way of looking at kernels.

    Attributes:
        command: from (the copy's folder, a folder for builds, the mutation, seconds) to a command line.
        wrong: its exit status when it has found something.
    """

    name: str
    command: Command
    wrong: int


def run_lane(kind: str, *options: str) -> Command:
    def command(root: Path, builds: Path, mutation: Mutation | None, seconds: float) -> list[str]:
        limits = ["--stuck", str(seconds / 4), "--patience", str(seconds * 0.9)]
        where = ["--root", str(root), "--folder", str(builds), "--steps", "exchange", "--dtypes", "bfloat16"]
        return [sys.executable, "-m", "triton_lanes.lane", kind, *where, *limits, *options]

    return command


def lint(root: Path, builds: Path, mutation: Mutation | None, seconds: float) -> list[str]:
    names = LINTED if mutation is None else mutation.linted
    kernels = [word for name in names for word in ("--kernel", f"{name}-small")]
    command = [str(ASCEND_PYTHON), "-m", "moe_a2a.ascend_lint", "--target", "Ascend910B1", "--jobs", "1"]
    return [*command, *kernels]


LANES = (
    Lane("interpreter", run_lane("interpreter", "--calls", "4"), lane.WRONG),
    Lane("native x86", run_lane("native", "--weak", "--calls", "50"), lane.WRONG),
    Lane("lint", lint, 1),
)


@dataclass(frozen=True)
class Verdict:
    """What a lane says: caught or not, its last word, and whether it broke down."""

    caught: bool
    word: str
    broken: bool = False


def look(which: Lane, root: Path, builds: Path, mutation: Mutation | None, seconds: float) -> Verdict:
    """Runs one lane on the kernels under ``root``."""
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            which.command(root, builds, mutation, seconds),
            capture_output=True,
            text=True,
            env=environment,
            timeout=seconds,
            cwd=root,
        )
    except subprocess.TimeoutExpired:
        return Verdict(True, f"hangs: not back after {seconds:.0f} s")
    took = f"{time.monotonic() - begin:.0f} s"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == 0:
        return Verdict(False, took)
    if done.returncode == which.wrong:
        word = next((line for line in lines if ": " in line and not line.startswith("kernel ")), lines[-1])
        return Verdict(True, word[:90])
    return Verdict(False, (done.stderr.strip().splitlines() or ["?"])[-1][:200], broken=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="mutations whose name has this in it")
    parser.add_argument(
        "--lane", action="append", choices=[each.name for each in LANES], help="all when not given"
    )
    parser.add_argument("--jobs", type=int, default=2, help="lanes that run side by side")
    parser.add_argument(
        "--seconds", type=float, default=60, help="for one lane on one mutation; what takes longer hangs"
    )
    options = parser.parse_args(arguments)
    lanes = [each for each in LANES if each.name in (options.lane or [each.name])]
    cases: list[Mutation | None] = [None, *(m for m in MUTATIONS if options.only in m.name)]
    table = Table(
        "mutation", *(each.name for each in lanes), title="Which lane notices which fault", show_lines=True
    )
    failures = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        builds = Path(folder, "builds")
        builds.mkdir()
        waiting = []
        for number, mutation in enumerate(cases):
            root = Path(folder, str(number))
            root.mkdir()
            apply(mutation, ROOT, root)
            waiting.append(
                [pool.submit(look, each, root, builds, mutation, options.seconds) for each in lanes]
            )
        for mutation, futures in zip(cases, waiting, strict=True):
            name = "none" if mutation is None else mutation.name
            verdicts = [future.result() for future in futures]
            print(
                f"{name}: {', '.join(each.name for each, v in zip(lanes, verdicts, strict=True) if v.caught)}",
                flush=True,
            )
            cells = ["broke down: " * v.broken + ("caught: " if v.caught else "") + v.word for v in verdicts]
            table.add_row(
                name,
                *(c if v.caught or v.broken else f"- ({c})" for c, v in zip(cells, verdicts, strict=True)),
            )
            if any(v.broken for v in verdicts):
                failures.append(f"{name}: a lane broke down")
            elif mutation is None and any(v.caught for v in verdicts):
                failures.append("a lane fails on the kernels as they are")
            elif mutation is not None and not any(v.caught for v in verdicts):
                failures.append(f"{name}: caught by none")
    Console(width=150).print(table)
    print("\n".join(f"mutation-check: {failure}" for failure in failures) or "mutation-check: each is caught")
    return min(len(failures), 1)


if __name__ == "__main__":
    sys.exit(main())
