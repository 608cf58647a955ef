"""The demonstration, run as a user runs it: one command, its last line, its exit code and its picture."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from as_user import run_as_user
from lanes import slow

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TEXT = EXAMPLES / "data" / "hamlet.txt"
sys.path.insert(0, str(EXAMPLES))
# A plain module beside the demo, not part of an installed package.
demo_types = importlib.import_module("demo_types")

SMALL = ("--tokens", "48", "--hidden", "32", "--experts", "8", "--batches", "3", "--seed", "0")


def run_demo(out: Path, *arguments: str, limit: float = 120.0) -> tuple[int, str, str]:
    """(exit code, last line, everything printed) of the demo; its whole process group is gone afterwards."""
    code, printed = run_as_user(
        out, str(EXAMPLES / "demo.py"), *SMALL, "--out", str(out), *arguments, limit=limit
    )
    assert printed.strip(), "the demo printed nothing"
    return code, printed.splitlines()[-1], printed


def expected_tokens(ranks: int) -> int:
    plan = demo_types.plan_batches(TEXT.stat().st_size, ranks, tokens=48, batches=3, seed=0)
    return sum(span.length for spans in plan for span in spans)


# 8 experts on 2 ranks; 7 on 4, so that ranks own 2, 2, 2 and 1; 2 on 3, so that one rank owns none.
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "transport"),
    [(2, 8, 2, "collective"), (4, 7, 3, "auto"), slow(3, 2, 1, "auto")],
)
def test_verifies_and_draws(tmp_path: Path, ranks: int, experts: int, top_k: int, transport: str) -> None:
    sizes = ("--ranks", str(ranks), "--experts", str(experts), "--top-k", str(top_k))
    code, last, printed = run_demo(tmp_path, *sizes, "--transport", transport)
    assert code == 0, printed
    tokens = expected_tokens(ranks)
    wanted = rf"verified: {ranks} ranks, 3 batches, {tokens * top_k} rows bitwise, {tokens} tokens bitwise "
    assert re.fullmatch(wanted + r"and end to end against fp64, transport [\w-]+", last), printed
    taken = last.rsplit(" ", 1)[1]
    assert transport in ("auto", taken) and f"transport: {taken}, because " in printed, printed
    assert re.search(r"moe_a2a was \d+\.\dx (as fast as|slower than) all_to_all", printed), printed
    # Each row that the tables show must be there: the matrix' last line adds up to all rows.
    total = re.search(r"^ *all +[\d, ]+?([\d,]+) *$", printed, re.MULTILINE)
    assert total is not None and int(total[1].replace(",", "")) == tokens * top_k, printed

    picture = tmp_path / "send_counts.png"
    assert picture.stat().st_size > 10_000
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 700
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50, "the picture is nearly empty"


def test_one_rank_and_fp32(tmp_path: Path) -> None:
    code, last, printed = run_demo(tmp_path, "--ranks", "1", "--dtype", "float32")
    assert code == 0 and last.startswith("verified: 1 ranks, 3 batches, "), printed


@pytest.mark.parametrize(
    ("fault", "noticed", "unharmed"),
    [
        ("drop-row", ("received rows", "end-to-end result"), ("combined tokens", "timed")),
        slow("swap-rows", ("received rows", "end-to-end result"), ("combined tokens", "timed")),
        ("stale-row", ("combined tokens", "end-to-end result"), ("received rows", "timed")),
        ("wrong-expert", ("end-to-end result",), ("combined tokens", "received rows", "timed")),
        slow("baseline-row", ("all_to_all rows, timed",), ("combined tokens", "received rows", "end-to-end")),
        ("skip-batch", ("rows: only", "combined tokens: only", "tokens end to end: only"), ("wrong",)),
    ],
)
def test_a_fault_is_named(
    tmp_path: Path, fault: str, noticed: tuple[str, ...], unharmed: tuple[str, ...]
) -> None:
    code, last, printed = run_demo(tmp_path, "--ranks", "2", "--inject-fault", fault)
    assert code == 1, printed
    assert last.startswith("NOT verified: "), printed
    for check in noticed:
        assert check in last, printed
    for check in unharmed:
        assert check not in last, printed
    if fault in ("swap-rows", "stale-row"):
        # Exactly what was spoiled is reported: two rows, one token.
        assert re.search(rf"{noticed[0]}: {2 if fault == 'swap-rows' else 1} wrong", last), printed


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    code, last, printed = run_demo(tmp_path, "--ranks", "2", "--inject-fault", "crash")
    assert code == 1 and last.startswith("NOT verified: "), printed
    assert "rank 1 ended without a word (exit code 70)" in last, printed


def test_the_watchdog_ends_a_run_that_stalls(tmp_path: Path) -> None:
    started = time.monotonic()
    code, last, printed = run_demo(tmp_path, "--ranks", "2", "--inject-fault", "stall", "--timeout", "10")
    assert code == 1 and last.startswith("NOT verified: "), printed
    # Either the group's own timeout or the watchdog is first; both name who is missing.
    assert "rank 1" in last, printed
    # Nothing sleeps on for the 100 s that the stalled rank would.
    assert time.monotonic() - started < 60, printed


@pytest.mark.parametrize(
    "arguments", [("--top-k", "9"), ("--ranks", "0"), ("--batches", "-1"), ("--hidden", "1000000")]
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: tuple[str, str]) -> None:
    code, _, printed = run_demo(tmp_path, *arguments)
    assert code == 2 and f"error: {arguments[0]} " in printed


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, last, printed = run_demo(tmp_path, "--out", str(tmp_path / "file" / "below"))
    assert code == 1 and last.startswith("NOT verified: --out "), printed


@pytest.mark.parametrize(
    ("ranks", "tokens", "batches"), [(1, 64, 0), (4, 1024, 0), (3, 7, 5), (4, 100_000, 0), (2, 1, 4)]
)
def test_batches_cover_the_text(ranks: int, tokens: int, batches: int) -> None:
    total = TEXT.stat().st_size
    plan = demo_types.plan_batches(total, ranks, tokens, batches, seed=3)
    spans = [span for batch in plan for span in batch]
    assert all(0 <= span.length <= tokens for span in spans)
    position = 0
    for span in spans:
        assert span == demo_types.Span(position, span.length)
        position += span.length
    assert position == total if batches == 0 else len(plan) == batches
    if ranks > 1 and len(plan) > 1:
        assert any(span.length == 0 for span in plan[1]), "one rank has no token in the second batch"
    if tokens > 1:
        assert max(span.length for span in plan[-1]) < tokens
    if ranks > 1 and tokens > 50:
        assert len({span.length for span in plan[0]}) > 1


def test_the_text_is_the_one_the_notice_describes() -> None:
    text = TEXT.read_bytes()
    notice = (TEXT.parent / "NOTICE.md").read_text(encoding="utf-8")
    assert len(text) >= 100_000 and text.decode("utf-8").startswith("HAMLET, PRINCE OF DENMARK")
    assert hashlib.sha256(text).hexdigest() in notice
    assert "public domain" in notice
