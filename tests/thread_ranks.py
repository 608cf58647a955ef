"""Builds and runs tests/cpu/ranks.cpp: ranks as threads of one process.

As a script it builds the harness with another compiler and runs a few setups, if need be under an emulator::

    python tests/thread_ranks.py --cxx aarch64-linux-gnu-g++ --flags=-static --under qemu-aarch64
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from moe_a2a.op_host.layout import Format, window_layout
from moe_a2a.op_host.tiling import NEVER, Tiling

ROOT = Path(__file__).resolve().parent.parent

SOURCES = [
    *sorted((ROOT / "op_kernel/cpu").glob("*.cpp")),
    *sorted((ROOT / "op_host/cpu").glob("group*.cpp")),
    ROOT / "tests/cpu/ranks.cpp",
]
INCLUDED = [
    *sorted((ROOT / "op_kernel/cpu").glob("*.h")),
    *sorted((ROOT / "op_kernel/cpu").glob("*.inc")),
    *sorted((ROOT / "op_host/cpu").glob("*.h")),
]
FLAGS = ["-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", "-g1", "-DMOE_A2A_TEST_HOOKS"]
VARIANTS = {
    "plain": ["-O1"],
    "thread": ["-O1", "-fsanitize=thread"],
    # Not optimised: that would take the compiler twice as long.
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


def compiler() -> str:
    """What builds the package: CXX, or the first that there is."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "c++"


def build(flags: list[str], cxx: str | None = None, sources: list[Path] | None = None) -> Path:
    """The harness built with these flags; under build/, by a digest of all that goes into it."""
    cxx = cxx or compiler()
    sources = sources or SOURCES
    digest = hashlib.blake2b(repr((cxx, flags, FLAGS)).encode(), digest_size=8)
    for path in [*sources, *INCLUDED, *sorted({path.parent for path in sources})]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    folder = ROOT / "build" / "ranks" / digest.hexdigest()
    program = folder / "ranks"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str | Path) -> None:
        command = [*cxx.split(), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        if done.returncode != 0:
            raise RuntimeError(f"{cxx} {' '.join(map(str, arguments))}\n{done.stderr}")

    def flags_for(source: Path) -> list[str]:
        # The harness itself takes a compiler four times as long with the checks for undefined behaviour.
        return [flag.replace(",undefined", "") if source.name == "ranks.cpp" else flag for flag in flags]

    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        list(
            pool.map(
                lambda pair: run(*FLAGS, *flags_for(pair[0]), "-c", pair[0], "-o", pair[1]),
                zip(sources, objects, strict=True),
            )
        )
    run(*flags, *objects, "-pthread", "-o", program.with_suffix(".new"))
    program.with_suffix(".new").replace(program)
    return program


@dataclass(frozen=True)
class Setup:
    """A group and what its ranks do. `options` go to the harness as they are: see make_plan in ranks.cpp."""

    ranks: int = 3
    format: Format = Format.COMPACT
    protocol: str = "pull"  # pull, push, or mixed: by chance
    slots: int = 2
    codes: int | None = None  # V
    experts: int = 7
    top_k: int = 3
    tokens: int = 6
    row_bytes: int = 48
    recv_rows: int | None = None  # None: nothing comes in waves
    flag_rows: int = 0
    streaming: bool = False
    spin: bool = False
    codes_by_hand: int | None = None  # a V that window_layout refuses
    options: Mapping[str, object] = field(default_factory=dict)

    def but(self, **options: object) -> Setup:
        return replace(self, options={**self.options, **options})

    def arguments(self) -> list[str]:
        roomy = 2 * self.ranks * self.tokens * self.top_k + 20
        layout = window_layout(
            world_size=self.ranks,
            num_experts=self.experts,
            top_k=self.top_k,
            max_tokens=self.tokens,
            row_bytes=self.row_bytes,
            recv_rows=roomy if self.recv_rows is None else self.recv_rows,
            slots=self.slots,
            record_format=self.format,
            push=self.protocol != "pull",
            code_max=self.codes,
        )
        if self.codes_by_hand is not None:
            layout = replace(layout, code_max=self.codes_by_hand)
        push_from = 0 if self.protocol == "push" else NEVER
        tiling = Tiling(
            pauses=2_000_000 if self.spin else 0,
            yields=50,
            sleep_ns=20_000,
            streaming_bytes=0 if self.streaming else NEVER,
            dispatch_push_from=push_from,
            combine_push_from=push_from,
            flag_rows=self.flag_rows,
            mix=77 if self.protocol == "mixed" else 0,
        )
        return [
            f"params={','.join(map(str, layout.params()))}",
            f"tiling={','.join(map(str, tiling.params()))}",
            *(f"{key}={value}" for key, value in self.options.items()),
        ]


@dataclass(frozen=True)
class Outcome:
    verdict: str  # ok, wrong, hang, error, or crash
    line: str  # the last line of stdout
    output: str
    seconds: float

    @property
    def steps(self) -> int:
        """Steps of a run that went well, or the step that it ended at."""
        word = next((word for word in self.line.split() if word.startswith(("steps=", "step="))), "steps=0")
        return int(word.partition("=")[2])


@dataclass(frozen=True)
class Harness:
    program: Path
    environment: dict[str, str] = field(default_factory=dict)
    under: str | None = None

    def run(self, setup: Setup, limit: float = 120) -> Outcome:
        environment = {key: value for key, value in os.environ.items() if key != "MOE_A2A_CPU"}
        command = [*([self.under] if self.under else []), str(self.program), *setup.arguments()]
        start = time.monotonic()
        done = subprocess.run(
            command, env={**environment, **self.environment}, capture_output=True, text=True, timeout=limit
        )
        line = (done.stdout.strip().splitlines() or [""])[-1]
        verdict = line.partition(" ")[0]
        codes = {"ok": 0, "wrong": 1, "hang": 2, "error": 3}
        complaint = "Sanitizer" in done.stderr or "runtime error" in done.stderr
        if codes.get(verdict) != done.returncode or complaint:
            verdict = "crash"
        output = (
            f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        )
        return Outcome(verdict, line, output, time.monotonic() - start)


@functools.cache
def variant(name: str) -> Harness:
    """plain, thread (ThreadSanitizer) or address (AddressSanitizer and UndefinedBehaviorSanitizer)."""
    environments: dict[str, dict[str, str]] = {
        "plain": {},
        # It doesn't see stores that bypass the cache; the portable kernels have none.
        "thread": {"TSAN_OPTIONS": "halt_on_error=1", "MOE_A2A_CPU": "portable"},
        # Leaks aren't looked for: that takes ptrace, which many containers refuse.
        "address": {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    }
    return Harness(build(VARIANTS[name]), environments[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cxx", default=compiler())
    parser.add_argument("--flags", default="")
    parser.add_argument("--under", help="program that runs it, such as qemu-aarch64")
    arguments = parser.parse_args()
    harness = Harness(build(["-O2", *arguments.flags.split()], arguments.cxx), under=arguments.under)
    for protocol in ("pull", "push", "mixed"):
        for record_format in Format:
            for recv_rows in (None, 5):
                setup = Setup(
                    format=record_format,
                    protocol=protocol,
                    recv_rows=recv_rows,
                    codes=5,
                    options={
                        "steps": 300,
                        "timeout": 60,
                        "delay": 0.02,
                        "fused": 0.3,
                        "round": 0.15,
                        "pairs": 0.2,
                    },
                )
                outcome = harness.run(setup)
                waves = "waves" if recv_rows else "no waves"
                print(f"{protocol}, {record_format.name.lower()}, {waves}: {outcome.line}")
                if outcome.verdict != "ok":
                    sys.exit(outcome.output)


if __name__ == "__main__":
    main()
