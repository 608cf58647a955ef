"""Tables and the picture of the demonstration. R ranks, E experts; rows are (token, expert) pairs."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from demo_types import PHASES, SPEED_SIDES, RankReport, Settings, Span
from rich import box
from rich.console import Console
from rich.table import Table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Beyond these the full matrix fits neither a terminal nor the cells of a picture.
MOST_RANKS_IN_TABLE, MOST_EXPERTS_IN_TABLE, MOST_EXPERTS_WITH_NUMBERS = 8, 64, 24
BAR_WIDTH = 12
RANK_COLOURS = ("#4477aa", "#ee6677", "#228833", "#b8860b", "#66ccee", "#aa3377", "#bbbbbb", "#332288")


def send_counts(reports: Sequence[RankReport]) -> Ints:
    """C [R, E]: rows that each rank sent to each expert in the whole run."""
    return np.stack([report.sent_E for report in reports])


def rows_between_ranks(reports: Sequence[RankReport]) -> Ints:
    """[R, R]: rows from the sending rank (first) to the rank that owns the expert."""
    counts_RE = send_counts(reports)
    return np.stack([counts_RE[:, slice(*report.local_experts)].sum(1) for report in reports], axis=1)


def owners(reports: Sequence[RankReport], experts: int) -> list[int]:
    """Rank that owns each expert."""
    owner = [-1] * experts
    for report in reports:
        for expert in range(*report.local_experts):
            owner[expert] = report.rank
    return owner


def step_seconds(spans: Sequence[Sequence[tuple[int, int]]]) -> tuple[Floats, Floats]:
    """Per step, from ``spans[rank][step]``: the longest on any rank, and the time after the last rank came.

    The second leaves out how long early ranks waited for late ones. All ranks read the same clock.
    """
    start, end = (np.array([[span[i] for span in rank] for rank in spans], dtype=np.int64) for i in (0, 1))
    return (end - start).max(0) / 1e9, (end.max(0) - start.max(0)) / 1e9


def typical_bytes(histogram_256: Ints) -> str:
    """The three bytes most often sent to an expert, printable."""
    names = {ord(" "): "␣", ord("\n"): "↵"}
    printable = set(string.printable.encode()) - set(string.whitespace.encode())
    most = [int(b) for b in np.argsort(-histogram_256, kind="stable")[:3] if histogram_256[b]]
    return " ".join(chr(b) if b in printable else names.get(b, f"0x{b:02x}") for b in most)


def print_report(
    console: Console, settings: Settings, plan: Sequence[Sequence[Span]], reports: Sequence[RankReport]
) -> None:
    console.print()
    console.print(
        f"[bold]transport[/bold]: {reports[0].transport}, because {reports[0].transport_reason}",
        soft_wrap=True,
    )
    fields = ", ".join(f"{name}: {value}" for name, value in reports[0].transport_fields.items())
    console.print(f"           {fields}", style="dim", soft_wrap=True)
    console.print(batches_line(plan))
    console.print()
    show_checks(console, settings, reports)
    if settings.ranks <= MOST_RANKS_IN_TABLE and settings.experts <= MOST_EXPERTS_IN_TABLE:
        show_send_counts(console, reports)
    else:
        show_busiest(console, reports)
    show_bytes(console, settings, reports)
    show_phases(console, reports)
    show_speed(console, reports)


def batches_line(plan: Sequence[Sequence[Span]]) -> str:
    lengths = np.array([[span.length for span in spans] for spans in plan])
    return (
        f"[bold]batches[/bold]: {len(plan)} of {lengths.min()} to {lengths.max()} tokens per rank; "
        f"{int((lengths == 0).sum())} times a rank had none"
    )


def new_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def show(console: Console, title: str, table: Table, *notes: str) -> None:
    """Title and notes as text of their own: as part of a narrow table they would be broken to its width."""
    console.print(f"[bold]{title}[/bold]")
    console.print(table)
    for note in notes:
        console.print(note)
    console.print()


def show_checks(console: Console, settings: Settings, reports: Sequence[RankReport]) -> None:
    table = new_table()
    for column in ("what", "items", "against", "wrong"):
        table.add_column(column, justify="right" if column in ("items", "wrong") else "left")
    failures = [failure for report in reports for failure in report.failures]

    def add(what: str, items: int, against: str, *kinds: str) -> None:
        wrong = sum(failure.wrong for failure in failures if failure.what in kinds)
        table.add_row(what, f"{items:,}", against, f"[red]{wrong:,}[/red]" if wrong else "0")

    used = max(report.tolerance_used for report in reports)
    eps = {"bfloat16": "2^-7", "float16": "2^-10", "float32": "2^-23"}[settings.dtype]
    add(
        "received rows, in order",
        sum(r.rows_checked for r in reports),
        "oracle, bitwise",
        "received rows",
        "received weights",
        "rows per expert",
        "group offsets",
        "send-count matrix",
    )
    add("combined tokens", sum(r.tokens_checked for r in reports), "oracle, bitwise", "combined tokens")
    add(
        "tokens end to end",
        sum(r.tokens_end_to_end for r in reports),
        "fp64, within a tolerance",
        "end-to-end result (fp64)",
    )
    add(
        "tokens while timed",
        sum(r.timed_tokens_checked["moe_a2a"] for r in reports),
        "oracle, bitwise",
        "moe_a2a rows, timed",
        "moe_a2a output, timed",
    )
    add(
        "the same by all_to_all",
        sum(r.timed_tokens_checked["all_to_all"] for r in reports),
        "oracle, bitwise",
        "all_to_all rows, timed",
        "all_to_all output, timed",
    )
    seen, distinct = sum(r.tokens_seen for r in reports), sum(r.tokens_distinct for r in reports)
    show(
        console,
        "What was checked (every item, no sample)",
        table,
        f"tolerance: {eps} sum|w f| + 1e-5 of the token's largest, per element; {used:.0%} of it used",
        f"{distinct:,} of {seen:,} input rows differ from all others in their batch: a misplaced row shows",
    )


def show_send_counts(console: Console, reports: Sequence[RankReport]) -> None:
    """The send-count matrix with one line per expert, which stays readable at any number of experts."""
    counts_RE = send_counts(reports)
    load_E = counts_RE.sum(0)
    fair = load_E.mean()
    bytes_E256 = np.sum([report.bytes_E256 for report in reports], axis=0)
    table = new_table()
    table.add_column("expert", justify="right")
    table.add_column("on", justify="right")
    for report in reports:
        table.add_column(f"rank {report.rank}", justify="right")
    table.add_column("load", justify="right", style="bold")
    table.add_column("")
    table.add_column("often", no_wrap=True)
    owner = owners(reports, len(load_E))
    for expert, load in enumerate(load_E.tolist()):
        bar = "█" * round(BAR_WIDTH * load / load_E.max())
        table.add_row(
            str(expert),
            f"rank {owner[expert]}",
            *[f"{c:,}" for c in counts_RE[:, expert].tolist()],
            f"{load:,}",
            bar,
            typical_bytes(bytes_E256[expert]),
            end_section=expert + 1 < len(owner) and owner[expert + 1] != owner[expert],
        )
    table.add_row("all", "", *[f"{c:,}" for c in counts_RE.sum(1).tolist()], f"{int(load_E.sum()):,}", "", "")
    show(
        console,
        "Send-count matrix: rows from each rank to each expert, and the experts' load",
        table,
        f"fair share: {fair:,.0f} rows; the busiest expert has {load_E.max() / fair:.1f} times that, "
        f"the idlest {load_E.min() / fair:.2f}",
        "often: the bytes that the expert sees most (␣ space, ↵ line end)",
    )


def show_busiest(console: Console, reports: Sequence[RankReport]) -> None:
    """For many ranks or experts: the experts with the most and the fewest rows; the picture has all."""
    load_E = send_counts(reports).sum(0)
    owner = owners(reports, len(load_E))
    order = np.argsort(-load_E, kind="stable")
    table = new_table()
    for column in ("expert", "on", "load"):
        table.add_column(column, justify="right")
    table.add_column("")
    for expert in [*order[:10].tolist(), *order[10:][-5:].tolist()]:
        bar = "█" * round(BAR_WIDTH * int(load_E[expert]) / int(load_E.max()))
        table.add_row(str(expert), f"rank {owner[expert]}", f"{int(load_E[expert]):,}", bar)
    show(
        console,
        "Experts' load, busiest and idlest (the picture shows the whole send-count matrix)",
        table,
        f"fair share: {load_E.mean():,.0f} rows",
    )


def show_bytes(console: Console, settings: Settings, reports: Sequence[RankReport]) -> None:
    rows_RR = rows_between_ranks(reports)
    megabytes_RR = rows_RR * settings.hidden * ITEM_BYTES[settings.dtype] / 1e6
    stayed = float(np.trace(megabytes_RR))
    moved = float(megabytes_RR.sum()) - stayed
    table = new_table()
    table.add_column("from \\ to", justify="left")
    shown = reports[:MOST_RANKS_IN_TABLE]
    for report in shown:
        table.add_column(f"rank {report.rank}", justify="right")
    table.add_column("all ranks", justify="right", style="bold")
    for report in shown:
        row = megabytes_RR[report.rank]
        cells = [f"[dim]{row[r.rank]:.2f}[/dim]" if r is report else f"{row[r.rank]:.2f}" for r in shown]
        table.add_row(f"rank {report.rank}", *cells, f"{row.sum():.2f}")
    show(
        console,
        "Rows moved by dispatch, MB (combine moves the same back)",
        table,
        f"between ranks: {moved:.1f} MB out and {moved:.1f} MB back; {stayed:.1f} MB stayed on their rank",
    )


def show_phases(console: Console, reports: Sequence[RankReport]) -> None:
    table = new_table()
    table.add_column("phase")
    table.add_column("longest on any rank", justify="right")
    table.add_column("after the last rank came", justify="right")
    for phase in PHASES:
        longest, after = step_seconds([report.phase_spans[phase] for report in reports])
        # Local phases have no rank to wait for.
        second = f"{np.median(after) * 1e3:.2f}" if phase in ("dispatch", "combine") else "-"
        table.add_row(phase, f"{np.median(longest) * 1e3:.2f}", second)
    show(
        console,
        "Time by phase, ms per batch (median over batches)",
        table,
        "the difference between the columns is waiting for the slowest rank",
    )


def show_speed(console: Console, reports: Sequence[RankReport]) -> None:
    ours, theirs = (step_seconds([report.speed_spans[side] for report in reports])[1] for side in SPEED_SIDES)
    ratio = float(np.median(theirs) / np.median(ours))
    low, high = np.percentile(theirs / ours, [10, 90])
    table = new_table()
    table.add_column("dispatch + combine")
    table.add_column("median ms", justify="right")
    table.add_column("best ms", justify="right")
    for name, seconds in (("moe_a2a", ours), ("all_to_all_single, gloo", theirs)):
        table.add_row(name, f"{np.median(seconds) * 1e3:.2f}", f"{seconds.min() * 1e3:.2f}")
    verdict = (
        f"{ratio:.1f}x as fast as all_to_all" if ratio >= 1 else f"{1 / ratio:.1f}x slower than all_to_all"
    )
    show(
        console,
        "Speed on the same input, experts left out, both sides in turns",
        table,
        f"moe_a2a was {verdict} in this run ({len(ours)} pairs of calls; 8 of 10: {low:.1f}x to {high:.1f}x)",
        "it depends on the machine, its load and the sizes",
    )


def write_picture(path: Path, settings: Settings, tokens: int, reports: Sequence[RankReport]) -> Path:
    """Send-count matrix as a heat map under the experts' loads, in one PNG.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.figure import Figure

    counts_RE = send_counts(reports)
    R, E = counts_RE.shape
    load_E = counts_RE.sum(0)
    fair = float(load_E.mean())
    owner = owners(reports, E)
    rows_high = 0.6 + 0.42 * min(R, 16)
    roomy = E <= MOST_EXPERTS_WITH_NUMBERS

    figure = Figure(figsize=(min(max(9.0, 0.72 * E + 2), 22), 4.9 + rows_high), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3.2, rows_high], width_ratios=[60, 1])
    loads = figure.add_subplot(grid[0, 0])
    matrix = figure.add_subplot(grid[1, 0], sharex=loads)
    figure.suptitle(
        f"Where {tokens:,} tokens of Hamlet went: top-{settings.top_k} of {E} experts on {R} ranks",
        fontsize=14,
        fontweight="bold",
    )

    loads.bar(range(E), load_E, color=[RANK_COLOURS[rank % len(RANK_COLOURS)] for rank in owner], width=0.8)
    loads.axhline(fair, color="black", linestyle="--", linewidth=1)
    loads.annotate(
        f"1x: the fair\nshare, {fair:,.0f}",
        (E - 0.5, fair),
        ha="left",
        va="center",
        fontsize=9,
        xytext=(4, 0),
        textcoords="offset points",
    ).set_in_layout(False)  # there is room above the colour bar; making more would push the bar away
    loads.set_ylabel("rows received in the run")
    loads.set_title("Load of each expert: the text decides it, so it is uneven", loc="left", fontsize=11)
    loads.yaxis.set_major_formatter("{x:,.0f}")
    loads.set_ylim(0, load_E.max() * 1.32)
    busiest = int(load_E.argmax())
    loads.annotate(
        f"{load_E[busiest] / fair:.1f}x",
        (busiest, load_E[busiest]),
        ha="center",
        va="bottom",
        fontsize=10,
        fontweight="bold",
        xytext=(0, 2),
        textcoords="offset points",
    )
    for report in reports:
        begin, end = report.local_experts
        if end > begin and R <= MOST_RANKS_IN_TABLE:
            share = load_E[begin:end].sum() / load_E.sum()
            loads.text(
                (begin + end - 1) / 2,
                load_E.max() * 1.28,
                f"experts on rank {report.rank}\n{share:.0%} of all rows",
                ha="center",
                va="top",
                fontsize=9,
                fontweight="bold",
                color=RANK_COLOURS[report.rank % len(RANK_COLOURS)],
            )
    loads.spines[["top", "right"]].set_visible(False)
    loads.tick_params(bottom=False, labelbottom=False)

    image = matrix.imshow(counts_RE, aspect="auto", cmap="Blues", vmin=0)
    matrix.set_title(
        "Send-count matrix: rows from each rank (line) to each expert (column)", loc="left", fontsize=11
    )
    matrix.set_ylabel("from")
    matrix.set_yticks(range(R), [f"rank {r}" for r in range(R)])
    bytes_E256 = np.sum([report.bytes_E256 for report in reports], axis=0)
    stride = max(1, -(-E // 32))
    labels = [f"{e}\n{typical_bytes(bytes_E256[e])}" if roomy else str(e) for e in range(0, E, stride)]
    matrix.set_xticks(range(0, E, stride), labels)
    matrix.set_xlabel("expert" + (", and the bytes it sees most (␣ space, ↵ line end)" if roomy else ""))
    for expert in range(1, E):
        if owner[expert] != owner[expert - 1]:
            for axes in (loads, matrix):
                axes.axvline(expert - 0.5, color="grey", linewidth=1.2)
    if roomy and R <= 16:
        for rank in range(R):
            for expert in range(E):
                dark = counts_RE[rank, expert] > 0.55 * counts_RE.max()
                matrix.text(
                    expert,
                    rank,
                    f"{counts_RE[rank, expert]:,}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color="white" if dark else "black",
                )
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]), label="rows", format="{x:,.0f}")
    figure.savefig(path, dpi=110)
    return path
