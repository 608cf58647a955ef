"""Run a small mixture-of-experts layer over a play by Shakespeare, between processes, and check every row.

``python examples/demo.py`` starts the ranks by itself. The last line says what was verified, or what was not;
the exit code is 0 or 1 accordingly. Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType

HOW_TO_INSTALL = "run `make demo`, or `pip install -e '.[demo]'` in the repository first"
try:
    from demo_types import FAULTS, SPEED_REPEATS, SPEED_SIDES, Failure, RankReport, Settings, plan_batches
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as missing:
    print(f"NOT verified: {missing.name} is not installed; {HOW_TO_INSTALL}", flush=True)
    raise SystemExit(1) from None

TEXT = Path(__file__).resolve().parent / "data" / "hamlet.txt"
# What a rank may need, after another one has failed, to say that it noticed.
GRACE_SECONDS = 5.0


def parse_arguments(argv: Sequence[str] | None) -> tuple[Settings, Path]:
    parser = argparse.ArgumentParser(
        prog="demo.py", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes to start on this machine (R)")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="most tokens of one rank in one batch; a token is a byte"
    )
    parser.add_argument(
        "--experts", type=int, default=16, help="experts in total (E); need not be a multiple of the ranks"
    )
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (K)")
    parser.add_argument(
        "--hidden", type=int, default=256, help="columns of a token's row (H), experts are half as wide"
    )
    parser.add_argument(
        "--batches", type=int, default=0, help="stop after so many batches; 0 reads the whole text"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the rows that travel; the experts always compute in fp32",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "cpu-shm", "collective"),
        default="auto",
        help="how rows travel; auto takes the fastest that works here and says why",
    )
    parser.add_argument(
        "--seed", type=int, default=3, help="of the layer's weights and the lengths of the batches"
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the picture")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which the watchdog ends the run"
    )
    parser.add_argument("--inject-fault", choices=FAULTS, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("ranks", "tokens", "experts", "top_k", "hidden"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.top_k > args.experts:
        parser.error(
            f"--top-k {args.top_k} is more than the --experts {args.experts} there are to choose from"
        )
    if args.batches < 0 or args.timeout <= 0:
        parser.error("--batches must be 0 or more and --timeout more than 0")
    settings = Settings(
        ranks=args.ranks,
        tokens=args.tokens,
        experts=args.experts,
        top_k=args.top_k,
        hidden=args.hidden,
        batches=args.batches,
        seed=args.seed,
        dtype=args.dtype,
        transport=args.transport,
        timeout=args.timeout,
        text_path=str(TEXT),
        inject_fault=args.inject_fault,
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if settings.weight_bytes > memory // 2:
        parser.error(
            f"--hidden {args.hidden} with {args.experts} experts and {args.ranks} ranks needs "
            f"{settings.weight_bytes / 1e9:.0f} GB for weights, more than half of this machine's memory "
            f"({memory / 1e9:.0f} GB); choose smaller sizes"
        )
    return settings, args.out


class TellingErrors:
    """Sends what ends the block, whatever it is, through the pipe: a rank has no terminal of its own."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            text = "".join(traceback.format_exception(kind, error, trace))
            with contextlib.suppress(BrokenPipeError):  # the parent is gone, nobody is left to tell
                self.pipe.send(("error", f"{type(error).__name__}: {error}", text))
        return True


def rank_main(rank: int, settings: Settings, store_file: str, pipe: Connection) -> None:
    """A rank process: everything it has to say goes through ``pipe``, errors included."""
    # Ctrl-C reaches every process of the terminal; the parent alone decides, so that one message comes out.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent ends ranks that take too long. This is for the case that the parent itself was killed.
    faulthandler.dump_traceback_later(settings.timeout + 3 * GRACE_SECONDS, exit=True)

    def say(*message: object) -> None:
        pipe.send(message)

    with TellingErrors(pipe):
        say("stage", "importing torch")
        from demo_rank import RankRun

        say("report", RankRun(rank, settings, store_file, say).run())


class Supervisor:
    """Starts the ranks, shows their progress and ends them: all reported, one failed, or time is up."""

    def __init__(self, settings: Settings, batches: int, console: Console) -> None:
        self.settings, self.batches, self.console = settings, batches, console
        self.processes: list[SpawnProcess] = []
        self.pipes: list[Connection] = []
        self.reports: dict[int, RankReport] = {}
        self.problems: list[str] = []
        # What ranks raised: often the same on several of them, which is then said once.
        self.errors: dict[str, list[int]] = {}
        self.details: dict[str, str] = {}
        self.stage = ["starting"] * settings.ranks
        self.done = [0] * settings.ranks

    def run(self) -> None:
        """Fills ``reports`` and ``problems``; whatever ranks do, it returns soon after the timeout."""
        deadline = time.monotonic() + self.settings.timeout
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="moe_a2a_demo_") as folder, progress:
                try:
                    self.start(os.path.join(folder, "store"))
                    self.watch(deadline, progress)
                finally:
                    self.stop()
        except KeyboardInterrupt:
            self.problems.append("interrupted from the keyboard")

    def start(self, store_file: str) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.settings.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(rank, self.settings, store_file, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def watch(self, deadline: float, progress: Progress) -> None:
        bars = [
            progress.add_task(f"rank {rank}: starting", total=self.batches)
            for rank in range(self.settings.ranks)
        ]
        started = time.monotonic()
        open_pipes = dict(enumerate(self.pipes))
        told = -1
        while open_pipes:
            left = deadline - time.monotonic()
            if left <= 0:
                if not self.problems and not self.errors:
                    where = ", ".join(f"rank {rank} {self.stage[rank]}" for rank in open_pipes)
                    self.problems.append(
                        f"the watchdog ended the run after {self.settings.timeout:g} s; last heard: {where}"
                    )
                return
            ready = wait(list(open_pipes.values()), timeout=min(left, 0.5))
            for rank, pipe in list(open_pipes.items()):
                if pipe not in ready:
                    continue
                try:
                    kind, *content = pipe.recv()
                except EOFError:
                    del open_pipes[rank]
                    if rank not in self.reports and self.stage[rank] != "failed":
                        self.processes[rank].join(1)
                        self.problems.append(
                            f"rank {rank} ended without a word (exit code "
                            f"{self.processes[rank].exitcode}), last heard: {self.stage[rank]}"
                        )
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    continue
                if kind == "stage":
                    self.stage[rank] = content[0]
                elif kind == "batch":
                    self.done[rank] = content[0] + 1
                    self.stage[rank] = f"checked batch {content[0]}"
                elif kind == "report":
                    self.reports[rank] = content[0]
                    self.stage[rank] = "done"
                else:
                    self.errors.setdefault(content[0], []).append(rank)
                    self.details.setdefault(content[0], f"rank {rank}:\n{content[1]}")
                    self.stage[rank] = "failed"
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                progress.update(
                    bars[rank], completed=self.done[rank], description=f"rank {rank}: {self.stage[rank]}"
                )
            # Without a terminal there is no bar: a line now and then instead.
            quarter = 4 * min(self.done) // self.batches
            if quarter > told and min(self.done) > 0 and not self.console.is_terminal:
                told = quarter
                self.console.print(
                    f"{time.monotonic() - started:5.1f} s  every rank has checked "
                    f"{min(self.done)} of {self.batches} batches"
                )

    def stop(self) -> None:
        """Give ranks that have reported a moment to leave by themselves; end the others."""
        for rank, process in enumerate(self.processes):
            process.join(2.0 if rank in self.reports else 0.0)
            if process.is_alive():
                process.terminate()
        for process in self.processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join(2.0)
        for pipe in self.pipes:
            pipe.close()


def summarise_failures(failures: Sequence[Failure]) -> list[str]:
    """One sentence per kind of check, with the total and the first place."""
    lines = []
    for what in dict.fromkeys(failure.what for failure in failures):
        kind = [failure for failure in failures if failure.what == what]
        first = min(kind, key=lambda failure: (failure.batch, failure.rank))
        lines.append(
            f"{what}: {sum(failure.wrong for failure in kind)} wrong, first in batch {first.batch} on rank "
            f"{first.rank} ({first.wrong} of {first.of}, {first.detail})"
        )
    return lines


def verdict(
    settings: Settings, tokens: int, batches: int, reports: Sequence[RankReport], problems: Sequence[str]
) -> tuple[bool, str]:
    """(verified, last line). Verified: no problem, no failed check, and all items that exist were checked."""
    rows = tokens * settings.top_k
    open_points = list(problems)
    open_points += summarise_failures([failure for report in reports for failure in report.failures])
    if not problems:
        counts = [
            ("rows", sum(report.rows_checked for report in reports), rows),
            ("combined tokens", sum(report.tokens_checked for report in reports), tokens),
            ("tokens end to end", sum(report.tokens_end_to_end for report in reports), tokens),
        ]
        for side in SPEED_SIDES:
            timed_rows = sum(report.timed_rows_checked[side] for report in reports)
            timed_tokens = sum(report.timed_tokens_checked[side] for report in reports)
            counts.append((f"timed rows of {side}", timed_rows, SPEED_REPEATS * rows))
            counts.append((f"timed tokens of {side}", timed_tokens, SPEED_REPEATS * tokens))
        for name, checked, there in counts:
            if checked != there:
                open_points.append(f"{name}: only {checked} of {there} were checked")
    if open_points:
        return False, "NOT verified: " + "; ".join(" ".join(point.split()) for point in open_points)
    return True, (
        f"verified: {settings.ranks} ranks, {batches} batches, {rows} rows bitwise, {tokens} tokens bitwise "
        f"and end to end against fp64, transport {reports[0].transport}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    settings, out = parse_arguments(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without Unicode gets a question mark, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    plan = plan_batches(TEXT.stat().st_size, settings.ranks, settings.tokens, settings.batches, settings.seed)
    tokens = sum(span.length for spans in plan for span in spans)
    console.print(
        f"[bold]moe_a2a demo[/bold]: {tokens:,} bytes of Hamlet, each a token, through {settings.experts} "
        f"experts (top-{settings.top_k}) on {settings.ranks} local ranks, {len(plan)} batches"
    )
    for package in ("torch", "matplotlib", "moe_a2a"):
        if importlib.util.find_spec(package) is None:
            print(f"NOT verified: {package} is not installed; {HOW_TO_INSTALL}", flush=True)
            return 1
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"NOT verified: --out {out} can't be made: {error}", flush=True)
        return 1
    # Large allocations from the heap instead of fresh pages each time: the all_to_all side gains most,
    # and without it the comparison would flatter moe_a2a.
    os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 40))

    started = time.monotonic()
    supervisor = Supervisor(settings, len(plan), console)
    supervisor.run()
    reports = [supervisor.reports[rank] for rank in sorted(supervisor.reports)]
    for detail in supervisor.details.values():
        console.print(detail, style="red", markup=False, soft_wrap=True)
    problems = list(supervisor.problems)
    for reason, ranks in supervisor.errors.items():
        who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
        problems.append(f"{who} stopped: {reason}")
    if len(reports) == settings.ranks:
        from demo_report import print_report, write_picture

        print_report(console, settings, plan, reports)
        try:
            picture = write_picture(out / "send_counts.png", settings, tokens, reports)
            console.print(f"picture: {picture}", soft_wrap=True)
        except OSError as error:
            problems.append(f"the picture couldn't be written: {error}")
    console.print(f"whole run: {time.monotonic() - started:.1f} s")
    verified, last_line = verdict(settings, tokens, len(plan), reports, problems)
    # Not through rich: the line must arrive in one piece, whatever the width of the terminal.
    print(last_line, flush=True)
    return 0 if verified else 1


if __name__ == "__main__":
    sys.exit(main())
