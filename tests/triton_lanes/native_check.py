"""Executes what the Ascend compiler gets, on x86: every kernel of the catalogue where it builds.

    python -m triton_lanes.native_check [--root CHECKOUT]

Three tables: small kernels with a fault, which must fail; kernels and whether they build; exchanges between ranks (processes)
whose programs are threads, exposed to delays and to stores that overtake each other, against the oracle.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .native import ROOT, Builder, CantBuild, Weather

PING = {"window": "*i32", "out": "*i32", "round": "i32"}
ROUNDS = 200


def ping(builder: Builder, weak_stores: bool = False, **constants: bool) -> str:
    """Rounds of ``small.ping``; "" if the receiver always had the round's payload."""
    kernel = builder.build("triton_lanes.small", "ping", PING, constants)
    window, out = torch.zeros(16, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    kernel.share([(window.data_ptr(), window.nbytes)])
    wrong = 0
    for number in range(1, ROUNDS + 1):
        weather = Weather(seed=number, delay_one_in=3, delay_max_us=30, weak_stores=weak_stores)
        kernel(2, {"window": window, "out": out, "round": number}, weather)
        wrong += not bool((out == number).all())
    return f"{wrong} of {ROUNDS} rounds wrong" if wrong else ""


def vanished(builder: Builder) -> str:
    """A loop that the adapter deletes."""
    try:
        builder.build("triton_lanes.small", "unused_spin", {"flag": "*i32", "out": "*i32"}, {})
    except CantBuild as error:
        return str(error)
    return ""


def tally(builder: Builder) -> str:
    """Atomic additions of four programs to the same counts."""
    kernel = builder.build("triton_lanes.small", "tally", {"total": "*i32", "rounds": "i32"}, {})
    total = torch.zeros(8, dtype=torch.int32)
    kernel(4, {"total": total, "rounds": 20_000})
    return "" if bool((total == 80_000).all()) else f"{total.tolist()} and not 80000 each"


CLEAN = {"BARRIER": True, "VOLATILE": True, "WAIT": True}
SEEDED: list[tuple[str, bool, Callable[[Builder], str]]] = [  # name, whether it must fail, what runs it
    ("clean, stores in order", False, lambda b: ping(b, **CLEAN)),
    ("clean, stores overtake", False, lambda b: ping(b, weak_stores=True, **CLEAN)),
    ("no barrier before the flag", True, lambda b: ping(b, weak_stores=True, **{**CLEAN, "BARRIER": False})),
    ("no wait", True, lambda b: ping(b, **{**CLEAN, "WAIT": False})),
    ("poll without volatile", True, lambda b: ping(b, **{**CLEAN, "VOLATILE": False})),
    ("scalar poll, value unused", True, vanished),
    ("atomics of four programs", False, tally),
]


def check_seeded(builder: Builder, console: Console) -> int:
    """Prints what the lane says of each small kernel; the number of surprises."""
    table = Table("small kernel", "expected", "seen", title="Does the lane see faults?")
    surprises = 0
    for name, faulty, body in SEEDED:
        fault = body(builder)
        surprises += bool(fault) != faulty
        table.add_row(name, "fails" if faulty else "right", fault or "right")
    console.print(table)
    return surprises


def check_builds(root: Path, folder: Path, console: Console, sizes: str) -> int:
    """Prints which variants of the catalogue have an x86 build, and why the others don't; the number of those."""
    with Builder(folder, root) as one, Builder(folder, root) as other, ThreadPoolExecutor(2) as pool:
        names = [name for name in one.variants() if name.endswith(sizes)]

        def build(builder: Builder, mine: list[str]) -> dict[str, str]:
            said = {}
            for name in mine:
                try:
                    said[name] = f"yes, {builder.spins(name)}"
                except CantBuild as error:
                    said[name] = str(error).removeprefix(f"{name}: ")
            return said

        halves = [pool.submit(build, one, names[::2]), pool.submit(build, other, names[1::2])]
        said = {name: word for half in halves for name, word in half.result().items()}
    table = Table("kernel", "builds, loops that wait", title="The catalogue on x86")
    for name in names:
        table.add_row(name, said[name])
    console.print(table)
    return sum(not word.startswith("yes") for word in said.values())


# Ranks, programs of each, calls, and whether stores overtake each other.
RUNS = (
    ["--ranks", "2", "--calls", "120", "--quantize"],
    ["--ranks", "3", "--calls", "150", "--weak", "--group", "0", "--seed", "2"],
    ["--ranks", "2", "--calls", "40", "--weak", "--steps", "partner", "--dtypes", "bfloat16"],
)


def check_runs(root: Path, folder: Path, console: Console, seconds: float) -> int:
    """Prints what came of the exchanges; the number of those that went wrong."""
    table = Table(
        "run", "result", title="Ranks as processes, programs as threads, against the oracle", show_lines=True
    )
    failures = 0
    limits = [
        "--stuck",
        str(seconds / 3),
        "--patience",
        str(seconds),
        "--root",
        str(root),
        "--folder",
        str(folder),
    ]
    for options in RUNS:
        command = [sys.executable, "-m", "triton_lanes.lane", "native", *limits, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        failures += done.returncode != 0
        table.add_row(" ".join(options), (done.stdout + done.stderr).strip())
    console.print(table)
    return failures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout, or a copy with a fault in it")
    parser.add_argument("--seconds", type=float, default=90, help="for one run of ranks")
    parser.add_argument("--sizes", default="small", help="build the variants whose name ends so; empty: all")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Builder(folder, ROOT / "tests") as builder:
            failures = check_seeded(builder, console)
        failures += check_builds(options.root, folder, console, options.sizes)
        failures += check_runs(options.root, folder, console, options.seconds)
    print(f"native-check: {failures} failed" if failures else "native-check: all right")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
