"""Dispatch + combine against what a user would write today, in one interleaved run.

    python benchmarks/bench_dispatch_combine.py                  # ten sizes, two ranks, table and JSON
    python benchmarks/bench_dispatch_combine.py --short          # two sizes, three assertions (what CI runs)
    python benchmarks/bench_dispatch_combine.py --ranks 4 --sizes 1,7168,64,8

Starts its own ranks on this host: by mpiexec where mpi4py and mpiexec are there (then the MPI peers take
part), else as plain processes. Exits with 1 and a sentence when a contender's result is wrong, when the
shared-memory path wasn't taken, or when ``--short`` finds less than 3x gloo at one token.

What is timed, and how fairness is kept, is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_plan import MESSAGE_MARK, Plan, Size, StartLine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
MIN_SHORT_RATIO = 3.0
NOISY_CORES = 0.2  # more than this used by other processes, and the table says so
PROBE = "from mpi4py import MPI; c = MPI.COMM_WORLD; n = c.allreduce(1); c.Get_rank() or print(n)"

# The peers' best case: with glibc's defaults every large output is mapped and faulted in anew (3-5x slower).
STRONG_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

SIZES = [
    Size(1, 2048, 8, 2),
    Size(1, 7168, 64, 8),
    Size(16, 2048, 64, 8),
    Size(8, 7168, 64, 8),
    Size(128, 2048, 8, 2),
    Size(32, 7168, 64, 8),
    Size(128, 7168, 64, 8),
    Size(1024, 2048, 64, 8),
    Size(2048, 4096, 8, 2),
    Size(4096, 4096, 64, 8),
]
SHORT_SIZES = [Size(1, 2048, 8, 2), Size(128, 2048, 8, 2)]


def find_mpi() -> tuple[list[str] | None, str]:
    """The command that starts MPI ranks, and why or why not."""
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py isn't installed"
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec") or shutil.which("mpirun")
    if launcher is None:
        return None, "no mpiexec found"
    try:
        version = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30).stdout
        command = [launcher]
        if "Open MPI" in version or "OpenRTE" in version or "prte" in version.lower():
            command += ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                command.append("--allow-run-as-root")
        elif "HYDRA" in version:
            command += ["-bind-to", "none"]
        probe = subprocess.run(
            [
                *command,
                "-n",
                "2",
                sys.executable,
                "-c",
                PROBE,
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{launcher} doesn't work: {error}"
    if probe.stdout.strip() != "2":
        return (
            None,
            f"two ranks started by mpiexec didn't find each other: {(probe.stdout + probe.stderr).strip()}",
        )
    return command, "mpi4py and mpiexec work"


def read_text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def machine() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in (read_text("/proc/cpuinfo") or "").splitlines()
            if "model name" in line
        ),
        platform.processor() or platform.machine(),
    )
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = read_text(f"{index}/level"), read_text(f"{index}/type")
        caches[f"L{level} {kind}"] = read_text(f"{index}/size")
    thp = "/sys/kernel/mm/transparent_hugepage"
    memory = next(
        (line.split()[1] for line in (read_text("/proc/meminfo") or "").splitlines() if "MemTotal" in line),
        "0",
    )
    return {
        "cpu": cpu,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "caches": caches,
        "memory_GiB": round(int(memory) / 2**20, 1),
        "thp": {name: read_text(f"{thp}/{name}") for name in ("enabled", "defrag", "shmem_enabled")},
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "load_before": os.getloadavg()[0],
    }


def git_state() -> dict[str, Any]:
    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(HERE), *args], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "modified": None if changes is None else bool(changes)}


class Ranks:
    """The ranks' processes: starts them, passes on what they print, and leaves none behind."""

    SILENCE_S = 300.0

    def __init__(
        self, plan: Plan, plan_path: Path, launcher: list[str] | None, environment: dict[str, str]
    ) -> None:
        worker = [sys.executable, str(HERE / "bench_rank.py"), str(plan_path)]
        commands: list[tuple[list[str], dict[str, str]]]
        if launcher is not None:
            commands = [([*launcher, "-n", str(plan.ranks), *worker], environment)]
        else:
            commands = [(worker, {**environment, "RANK": str(r)}) for r in range(plan.ranks)]
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._processes = [
            subprocess.Popen(
                command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            for command, env in commands
        ]
        for number in range(len(self._processes)):
            threading.Thread(target=self._read, args=(number,), daemon=True).start()

    def _read(self, number: int) -> None:
        stream = self._processes[number].stdout
        assert stream is not None
        for line in stream:
            self._lines.put((number, line.rstrip("\n")))
        self._lines.put((number, None))

    def lines(self) -> Iterator[str]:
        """Lines as they come, until all processes end. Raises RuntimeError if one fails or all are silent."""
        running = set(range(len(self._processes)))
        while running:
            try:
                number, line = self._lines.get(timeout=self.SILENCE_S)
            except queue.Empty:
                raise RuntimeError(f"the ranks said nothing for {self.SILENCE_S:.0f} s") from None
            if line is not None:
                yield line
                continue
            running.discard(number)
            code = self._processes[number].wait(timeout=60)
            if code != 0:
                raise RuntimeError(f"a rank's process ended with exit code {code}")

    def stop(self) -> None:
        for sig in (signal.SIGTERM, signal.SIGKILL):
            left = [p for p in self._processes if p.poll() is None]
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sig)
            for process in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)


def run_ranks(plan: Plan, launcher: list[str] | None, environment: dict[str, str]) -> dict[str, Any]:
    """Starts the ranks, shows progress, returns their messages: {"start": ..., "sizes": [...]}."""
    found: dict[str, Any] = {"start": None, "sizes": []}
    plan_path = Path(plan.scratch) / "plan.json"
    plan.save(plan_path)
    StartLine.create(Path(plan.scratch) / "start_line", plan.ranks)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        sizes = progress.add_task("starting ranks", total=len(plan.sizes))
        ranks = Ranks(plan, plan_path, launcher, environment)
        finished = 0
        try:
            for line in ranks.lines():
                if not line.startswith(MESSAGE_MARK):
                    progress.console.print(line, markup=False, highlight=False)
                    continue
                message = json.loads(line[len(MESSAGE_MARK) :])
                kind = message.pop("kind")
                if kind == "start":
                    found["start"] = message
                elif kind == "size":
                    progress.update(sizes, description=message["name"])
                elif kind == "progress":
                    progress.update(sizes, completed=finished + message["done"])
                else:
                    found["sizes"].append(message)
                    finished += 1
                    progress.update(sizes, completed=finished)
        finally:
            ranks.stop()
    return found


def size_in(result: dict[str, Any]) -> Size:
    return Size(*(result[key] for key in Size._fields))


def show_table(results: list[dict[str, Any]], ranks: int) -> None:
    def cell(value: float | None, digits: int = 0) -> str:
        return "n/a" if value is None else f"{value:,.{digits}f}"

    table = Table(
        title=f"dispatch + combine, bf16, {ranks} ranks: median us (min); peers' times divided by ours",
        caption="ours / window: ordinary x and y / x and y in the window. Peers: the better of two.",
    )
    for name in (
        "T,H,E,K",
        "MB/rank",
        "ours",
        "window",
        "gloo",
        "MPI",
        "bare MPI",
        "gloo x",
        "MPI x",
        "bare x",
    ):
        table.add_column(name, justify="left" if name == "T,H,E,K" else "right", no_wrap=True)
    for result in results:
        rows, best, ratios = result["contenders"], result["best"], result["ratios"]

        def times(name: str | None, rows: dict[str, Any] = rows) -> str:
            if name is None:
                return "n/a"
            total = rows[name]["total_us"]
            digits = 1 if total["median"] < 100 else 0
            return f"{cell(total['median'], digits)} ({cell(total['min'], digits)})"

        def times_ours(family: str, ratios: dict[str, Any] = ratios) -> str:
            return " / ".join(cell(ratios[own][family], 1) for own in ("ours", "ours-window"))

        table.add_row(
            f"{result['T']},{result['H']},{result['E']},{result['K']}",
            "n/a" if result["mb_per_rank"] == 0 else f"{result['mb_per_rank']:.3g}",
            times("ours"),
            times("ours-window"),
            *(times(best[family]) for family in ("gloo", "mpi", "bare_mpi")),
            *(times_ours(family) for family in ("gloo", "mpi", "bare_mpi")),
        )
    noisy = [str(size_in(result)) for result in results if result["cores_used_by_others"] > NOISY_CORES]
    if noisy:
        table.caption = (
            f"{table.caption}\nOther processes used more than {NOISY_CORES:g} cores: {'; '.join(noisy)}"
        )
    Console(width=max(180, Console().width)).print(table)


def size_of(text: str) -> Size:
    parts = text.split(",")
    if len(parts) != 4 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size: expected T,H,E,K, four positive numbers")
    size = Size(*map(int, parts))
    if size.K > size.E:
        raise argparse.ArgumentTypeError(
            f"{text!r}: K={size.K} distinct experts can't be chosen from E={size.E}"
        )
    return size


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Dispatch + combine against gloo and MPI, interleaved.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="two sizes, and assert >= 3x gloo at one token")
    parser.add_argument(
        "--sizes", type=size_of, nargs="+", metavar="T,H,E,K", help="instead of the ten of the table"
    )
    parser.add_argument("--max-mb", type=float, help="leave out sizes with more 10^6 bytes per rank")
    parser.add_argument("--seconds", type=float, help="of sampling per size (default 8; 3 with --short)")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: results/latest.json beside this script)"
    )
    parser.add_argument("--mpi", choices=("auto", "off"), default="auto")
    parser.add_argument(
        "--check", action="store_true", help="check every sample, not only the first and the last ones"
    )
    parser.add_argument(
        "--inject-fault", choices=("none", "wrong-row"), default="none", help="must make the run fail"
    )
    parser.add_argument(
        "--routing", choices=("uniform", "dropped"), default="uniform", help="dropped: all ids are -1"
    )
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="rank 1 comes this late to every timed part"
    )
    parser.add_argument(
        "--default-malloc", action="store_true", help="keep glibc's defaults, which slow the peers"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    if arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: at least one rank is needed")
    sizes = arguments.sizes or (SHORT_SIZES if arguments.short else SIZES)
    arguments.sizes = [s for s in sizes if arguments.max_mb is None or s.megabytes <= arguments.max_mb]
    if not arguments.sizes:
        parser.error(f"--max-mb {arguments.max_mb} leaves no size")
    arguments.seconds = arguments.seconds or (3.0 if arguments.short else 8.0)
    arguments.out = arguments.out or HERE / "results" / ("short.json" if arguments.short else "latest.json")
    return arguments


def verdict(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> list[str]:
    """Why the run has to fail, as sentences."""
    failures = [text for result in results for text in result["failures"]]
    if len(results) != len(arguments.sizes):
        failures.append(f"{len(results)} of {len(arguments.sizes)} sizes were measured")
    if arguments.short and arguments.routing == "uniform":
        for result in results:
            ratio = result["ratios"]["ours"]["gloo"]
            if result["T"] != 1:
                continue
            size = size_in(result)
            print(f"{size}: {ratio:.1f} times as fast as gloo (at least {MIN_SHORT_RATIO:g} wanted)")
            if ratio < MIN_SHORT_RATIO:
                failures.append(
                    f"{size}: only {ratio:.2f} times as fast as gloo, at least {MIN_SHORT_RATIO:g} wanted"
                )
    return failures


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    launcher, reason = find_mpi() if arguments.mpi == "auto" else (None, "switched off by --mpi off")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    allocator = {} if arguments.default_malloc else STRONG_MALLOC
    environment.update(allocator)
    record: dict[str, Any] = {
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/" + Path(__file__).name, *argv],
        "git": git_state(),
        "machine": machine(),
        "settings": {
            "ranks": arguments.ranks,
            "seconds_per_size": arguments.seconds,
            "routing": arguments.routing,
            "delay_ms": arguments.delay_ms,
            "check_every_sample": arguments.check,
            "inject_fault": arguments.inject_fault,
            "seed": arguments.seed,
            "dtype": "bfloat16",
            "malloc": allocator or "glibc defaults",
            "mpi": {"used": launcher is not None, "reason": reason},
        },
    }
    with tempfile.TemporaryDirectory(prefix="moe_a2a_bench_") as scratch:
        plan = Plan(
            ranks=arguments.ranks,
            sizes=arguments.sizes,
            seconds=arguments.seconds,
            check_all=arguments.check,
            inject_fault=arguments.inject_fault,
            routing=arguments.routing,
            delay_ms=arguments.delay_ms,
            seed=arguments.seed,
            mpi=launcher is not None,
            scratch=scratch,
            cores=sorted(os.sched_getaffinity(0)),
        )
        try:
            found = run_ranks(plan, launcher, environment)
        except RuntimeError as error:
            print(f"benchmark failed: {error}; the ranks' own errors are above", file=sys.stderr)
            return 1
    failures = verdict(arguments, found["sizes"])
    start = found["start"] or {}
    record.update(
        versions=start.get("versions"),
        placement=start.get("placement"),
        sizes=found["sizes"],
        verdict={"ok": not failures, "failures": failures},
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    show_table(found["sizes"], arguments.ranks)
    if failures:
        for text in failures:
            print(f"benchmark failed: {text}", file=sys.stderr)
        return 1
    print("benchmark: all results are right, and the shared-memory path was taken")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
