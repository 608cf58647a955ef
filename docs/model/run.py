#!/usr/bin/env python3
"""Run the checks of checks.toml with Spin: one line a check, exit status 1 if one is unexpected or incomplete.

Python 3.11 or newer, spin and a C compiler; no other package.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
# Lane ci: compiling is what takes the time. Lane all: long searches. Where the stack (-m) is too small for one, pan says so
# and the check is incomplete.
BUILD = {"ci": ["-O0"], "all": ["-O2"]}
SEARCH = {"ci": ["-m50000", "-w20"], "all": ["-m1000000", "-w24"]}
INCOMPLETE = re.compile(
    r"max search depth too small|out of memory|reached -DMEMLIM|hash table is full|aborting"
)


@dataclass(frozen=True)
class Check:
    name: str
    model: str
    defines: tuple[str, ...]
    script: tuple[str, ...]
    expect: str
    way: str
    depth_first: bool
    lane: str
    shows: str


@dataclass(frozen=True)
class Outcome:
    found: str  # holds, fails, or incomplete
    way: str  # wrong or hang, where found is fails
    states: str
    seconds: float
    detail: str


def load(path: Path) -> list[Check]:
    """The checks of the file; what can't be right is an error here and not a check that shows nothing."""
    checks = []
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        unknown = set(entry) - {"model", "defines", "script", "expect", "way", "depth_first", "lane", "shows"}
        if unknown:
            raise SystemExit(f"{path.name}: {name}: unknown {', '.join(sorted(unknown))}")
        check = Check(
            name=name,
            model=entry["model"],
            defines=tuple(entry.get("defines", [])),
            script=tuple(entry.get("script", "").split()),
            expect=entry["expect"],
            way=entry.get("way", ""),
            depth_first=entry.get("depth_first", entry["expect"] == "holds"),
            lane=entry["lane"],
            shows=entry["shows"],
        )
        if check.expect not in ("holds", "fails") or check.lane not in ("ci", "all"):
            raise SystemExit(f"{path.name}: {name}: expect is holds or fails, lane is ci or all")
        if check.way not in (("wrong", "hang") if check.expect == "fails" else ("",)):
            raise SystemExit(
                f"{path.name}: {name}: way is wrong or hang where expect is fails, and absent elsewhere"
            )
        if not (HERE / f"{check.model}.pml").is_file():
            raise SystemExit(f"{path.name}: {name}: there is no model {check.model}.pml")
        text = (HERE / f"{check.model}.pml").read_text(encoding="utf-8")
        for define in check.defines:
            if not re.search(rf"\b{re.escape(define.split('=')[0])}\b", text):
                raise SystemExit(f"{path.name}: {name}: {check.model}.pml knows no {define}")
        checks.append(check)
    return checks


def script_defines(script: tuple[str, ...]) -> Iterator[str]:
    """A script of calls as defines of exchange.pml: B begin, F finish, D both, Cn combine of handle n."""
    steps: list[int] = []
    for word in script:
        if word == "D":
            steps += [1, 2]
        else:
            steps.append({"B": 1, "F": 2}[word] if word in "BF" else 16 + int(word[1:]))
    if steps:
        yield f"STEPS={len(steps)}"
    yield from (f"S{i}={step}" for i, step in enumerate(steps))


def tail(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def words(found: str, way: str) -> str:
    return f"{found} ({way})" if way else found


def run_check(check: Check, limit: float, memory: int, keep: Path | None) -> Outcome:
    """Build the verifier in a folder of its own and run it."""
    start = time.monotonic()

    def left() -> float:
        return max(1.0, limit - (time.monotonic() - start))

    def incomplete(detail: str) -> Outcome:
        return Outcome("incomplete", "", "-", time.monotonic() - start, detail)

    with tempfile.TemporaryDirectory(prefix="moe-a2a-model-") as name:
        folder = Path(name)
        if keep is not None:
            folder = keep / check.name
            folder.mkdir(parents=True, exist_ok=True)
        source = f"{check.model}.pml"
        shutil.copy(HERE / source, folder)
        options = [f"-D{define}" for define in (*check.defines, *script_defines(check.script))]
        # Breadth first where a fault is looked for: the trail is a shortest one. COLLAPSE: about a third of the memory.
        build = [
            *BUILD[check.lane],
            *([] if check.depth_first else ["-DBFS"]),
            "-DCOLLAPSE",
            f"-DMEMLIM={memory}",
        ]
        commands = [
            ["spin", "-a", *options, source],
            ["gcc", *build, "-w", "-DSAFETY", "-DVECTORSZ=2048", "-o", "pan", "pan.c"],
            ["./pan", *SEARCH[check.lane], "-n"],
        ]
        log = ""
        for command in commands:
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    timeout=left(),
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            except subprocess.TimeoutExpired:
                return incomplete(f"{command[0]} didn't end within {limit:.0f} s")
            log = done.stdout
            if command[0] != "./pan" and (done.returncode != 0 or "Error" in log):
                return incomplete(f"{command[0]}: {tail(log)}")
        errors = re.search(r"errors: (\d+)", log)
        if errors is None:
            return incomplete(f"pan: {tail(log)}")
        states = re.search(r"(\d+) states, stored", log)
        count = states.group(1) if states else "?"
        seconds = time.monotonic() - start
        if errors.group(1) != "0":
            what = re.search(r"pan:1: (.*)", log)
            text = what.group(1) if what else ""
            if keep is not None:
                trail = subprocess.run(
                    ["spin", "-t", "-p", "-g", "-l", *options, source],
                    cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                (folder / "trail.txt").write_text(trail.stdout, encoding="utf-8")
            if text.startswith("invalid end state"):
                return Outcome("fails", "hang", count, seconds, text)
            if text.startswith("assertion violated") and "invalid array index" not in text:
                return Outcome("fails", "wrong", count, seconds, text[:160])
            return Outcome("incomplete", "", count, seconds, text)  # a bug of the model
        if INCOMPLETE.search(log):
            return Outcome("incomplete", "", count, seconds, "the search was cut short")
        return Outcome("holds", "", count, seconds, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lane", choices=("ci", "all"), default="ci", help="all includes ci (default: ci)")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="this check, of any lane; may be repeated"
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="checks at a time (default: ci 2, all 1)")
    parser.add_argument(
        "--limit", metavar="S", type=float, default=900.0, help="seconds a check may take (default: 900)"
    )
    parser.add_argument(
        "--memory", metavar="MB", type=int, default=6000, help="memory of a check (default: 6000)"
    )
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="keep the folders of the checks, with trail.txt of what fails",
    )
    parser.add_argument("--list", action="store_true", help="only say what the checks show")
    arguments = parser.parse_args()

    checks = load(HERE / "checks.toml")
    if arguments.only:
        missing = set(arguments.only) - {check.name for check in checks}
        if missing:
            parser.error(f"no check named {', '.join(sorted(missing))}; see --lane all --list")
        checks = [check for check in checks if check.name in arguments.only]
    elif arguments.lane == "ci":
        checks = [check for check in checks if check.lane == "ci"]
    if arguments.list:
        for check in checks:
            print(f"{check.name:37} {words(check.expect, check.way):13} {check.shows}")
        return 0
    for tool, remedy in (("spin", "apt-get install spin"), ("gcc", "apt-get install gcc libc6-dev")):
        if shutil.which(tool) is None:
            print(f"run.py: {tool} not found, nothing was checked (Debian: {remedy})", file=sys.stderr)
            return 1

    start = time.monotonic()
    wrong: list[str] = []
    # Checks of lane ci are small; one of lane all may need --memory.
    jobs = max(1, arguments.jobs or (2 if all(check.lane == "ci" for check in checks) else 1))
    keep = arguments.keep.resolve() if arguments.keep else None
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = pool.map(lambda check: run_check(check, arguments.limit, arguments.memory, keep), checks)
        for check, outcome in zip(checks, outcomes, strict=True):
            as_expected = outcome.found == check.expect and outcome.way == check.way
            if not as_expected:
                wrong.append(check.name)
            verdict = "ok" if as_expected else "FAIL"
            line = f"{verdict:4} {check.name:37} {words(outcome.found, outcome.way):14} "
            line += f"{outcome.states:>9} states {outcome.seconds:6.1f} s"
            if not as_expected:
                line += f"  expected: {words(check.expect, check.way)}; {outcome.detail}"
            print(line, flush=True)
    print(
        f"{len(checks) - len(wrong)} of {len(checks)} checks as expected in {time.monotonic() - start:.0f} s",
        end="",
    )
    print(f"; not: {', '.join(wrong)}" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ["LC_ALL"] = "C"
    sys.exit(main())
