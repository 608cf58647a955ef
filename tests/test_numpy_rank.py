"""docs/protocol.md is enough to write another implementation, and the product follows it.

tests/numpy_rank.py was written from the document alone. Here it takes part, as one rank of a group, in everything that
the document describes; the other ranks are the product. Results are compared with the oracle to the bit on all ranks.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy_rank
import pytest
import torch
from numpy_rank import Layout, Sizes
from pool import RankFailed, RankPool
from rank_bodies import numpy_rank_bodies as bodies
from rank_bodies.errors import Caught
from rank_bodies.inputs import dtype_of

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
FORMATS = ["portable", "compact", "line"]
BOTH = pytest.mark.parametrize("fmt", FORMATS)


def usual(fmt: str = "portable", experts: int = 4, timeout: float = 20.0, **more: Any) -> bodies.Spec:
    """A small group."""
    return bodies.Spec(experts, 2, 16, 8, record_format=fmt, timeout=timeout, **more)


def check(error: Caught | None, kind: str, *words: str) -> None:
    """The error is of that class, and its text has all words."""
    assert error is not None, f"nothing was raised, expected {kind}"
    assert kind in error.kinds, f"{error.kinds}: {error.message}"
    for word in words:
        assert word in error.message, f"{word!r} is missing in: {error.message}"


# -------------------------------------------------------------------------------------------- the document's tables


def table(name: str) -> list[list[str]]:
    """The cells of a table of the document, without its head."""
    text = DOCUMENT.read_text()
    match = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end -->", text, re.S)
    assert match, f"no table {name}"
    lines = match[1].strip().splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", ["example", "record-bytes", "cell-bytes", "wave-bytes", "status-bytes"])
def test_layout_is_the_document_s_example(name: str) -> None:
    sizes = Sizes(2, 8, 2, 16, row_bytes=65 * 2, max_recv_rows=64, slots=2, push=True)
    rows = table(name)
    assert len(rows) >= 3
    for field, *documented in rows:
        got = [getattr(Layout(sizes, fmt), field) for fmt in (0, 1, 2)]
        assert got == [int(value) for value in documented], field


@pytest.mark.parametrize("name", ["header", "record", "cell", "status", "progress"])
def test_words_are_the_document_s(name: str) -> None:
    words: dict[str, int] = getattr(numpy_rank, name.upper())
    assert words == {row[1]: int(row[0]) for row in table(name)}


def test_numbers_are_the_document_s() -> None:
    named = {row[0]: row[1] for row in table("numbers")}
    dtypes = {"none": "NO_DTYPE", "float32": "FLOAT32", "bfloat16": "BFLOAT16", "float16": "FLOAT16"}
    dtypes["float64"] = "FLOAT64"
    for what in (
        "kind of a record",
        "code of a status cell",
        "phase",
        "mode",
        "quantisation",
        "kind of a wave cell",
        "bits of gradients",
        "dtype",
    ):
        for pair in named[what].split(", "):
            number, name = pair.split()
            assert getattr(numpy_rank, dtypes.get(name, name)) == int(number), what
    assert {what: int(n) for what, n in named.items() if n.isdigit()} == {
        "words of a record's header": numpy_rank.RECORD_WORDS,
        "least bytes of a record's payload": numpy_rank.LEAST_PAYLOAD,
        "words of a combine or status body": numpy_rank.CELL_WORDS,
        "bytes of a refusal's text": numpy_rank.CELL_TEXT_BYTES,
        "bytes of a code in portable and line": numpy_rank.CODE_BYTES,
        "most bytes beside a row's elements": numpy_rank.BESIDE_A_ROW,
        "room for a row of y or z, at least": numpy_rank.LEAST_RETURNED,
    }
    assert (
        named["bytes of a line, and of its payload"] == f"{numpy_rank.LINE_BYTES}, {numpy_rank.LINE_PAYLOAD}"
    )


# ------------------------------------------------------------------------------------------------------------ elements


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (rng.integers(0, 2**16, 2000, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    values = values[~np.isnan(values)]
    want = bodies.to_numpy(torch.from_numpy(values).to(torch.bfloat16))
    got = numpy_rank.narrow(values, numpy_rank.BFLOAT16)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(numpy_rank.widen(numpy_rank.narrow(np.full(1, np.nan), 2), 2, np.float32)).all()
    np.testing.assert_array_equal(
        numpy_rank.widen(got, numpy_rank.BFLOAT16, np.float32),
        bodies.to_torch(want, torch.bfloat16).float().numpy(),
    )


# --------------------------------------------------------------------------------------------------------- many steps

# ranks, numpy's rank, format, dispatches, more. A code wraps after V calls: once in "around V", often where V is small. cap is
# max_recv_rows: where it is small, push dispatches go in waves, and combines too in groups without push.
RUNS: dict[str, tuple[int, int, str, int, dict[str, Any]]] = {
    "2 ranks, numpy first": (2, 0, "portable", 36, {}),
    "2 ranks, around V": (2, 1, "portable", 32, {"first_n": 2**31 - 20}),
    "2 ranks, V of 5": (2, 0, "portable", 36, {"largest_code": 5}),
    "3 ranks, three slots, n beyond 32 bits": (3, 1, "portable", 32, {"depth": 3, "first_n": 2**32 - 20}),
    "2 ranks, compact, around V": (2, 1, "compact", 32, {"first_n": 2**62 - 20}),
    "3 ranks, compact, V of 7": (3, 0, "compact", 36, {"depth": 3, "largest_code": 7}),
    "2 ranks, line": (2, 0, "line", 32, {"largest_code": 8}),
    "push, compact": (3, 2, "compact", 36, {"push": True, "flag_rows": 1}),
    "push, portable, three slots": (3, 0, "portable", 32, {"push": True, "flag_rows": 3, "depth": 3}),
    "push, line": (3, 1, "line", 32, {"push": True}),
    "push, V of 5": (2, 0, "compact", 36, {"push": True, "largest_code": 5, "flag_rows": 3}),
    "push, portable, V of 6": (2, 1, "portable", 36, {"push": True, "largest_code": 6}),
    "push, line, V of 8": (2, 1, "line", 32, {"push": True, "largest_code": 8}),
    "always push": (3, 1, "portable", 32, {"push": True, "always": True, "flag_rows": 1}),
    "waves, compact": (3, 1, "compact", 32, {"push": True, "recv_rows": 9, "flag_rows": 3, "sync": True}),
    "waves, portable": (
        2,
        0,
        "portable",
        40,
        {"push": True, "recv_rows": 11, "largest_code": 5, "sync": True},
    ),
    "waves, line": (3, 2, "line", 32, {"push": True, "recv_rows": 9, "largest_code": 6, "sync": True}),
    "waves of one row": (2, 1, "compact", 30, {"push": True, "recv_rows": 1, "sync": True}),
    "combine in waves, compact": (3, 0, "compact", 32, {"recv_rows": 9, "largest_code": 5}),
    "combine in waves, portable": (2, 1, "portable", 32, {"recv_rows": 11}),
    "combine in waves, line": (3, 1, "line", 32, {"recv_rows": 9, "largest_code": 8}),
}


@pytest.mark.parametrize("run", RUNS)
def test_many_steps(pool: RankPool, run: str) -> None:
    ranks, numpy_at, fmt, dispatches, more = RUNS[run]
    spec = bodies.Spec(7, 3, 24, 40, record_format=fmt, **more)
    seed = list(RUNS).index(run)
    program = bodies.make_program(seed, spec.depth, dispatches, not spec.sync)
    combined = sum(word[0] == "C" for word in program)
    assert combined >= dispatches // 2
    ran = pool.run(ranks, bodies.many_steps, spec, numpy_at, dispatches, seed)
    assert [found["combined"] for found in ran] == [combined] * ranks
    product = ran[1 if numpy_at == 0 else 0]
    assert (product["pushes"] > dispatches // 2) == spec.push
    assert (product["waves"] > product["dispatches"]) == (spec.recv_rows is not None)


def test_turns_are_of_every_kind() -> None:
    """The steps of two runs above cover what the test is about."""
    spec = bodies.Spec(7, 3, 24, 40)
    made = []
    for seed in (0, 7):
        program = bodies.make_program(seed, 2, 64)
        assert {word[0] for word in program} == set("ABCDWX")
        made += list(bodies.make_turns(seed, program, spec, 2).values())
    turns = [turn for turn, _ in made]
    assert {turn.step.dtype for turn in turns} == set(bodies.NAMES)
    assert {turn.step.weight_dtype for turn in turns} == {None, *bodies.NAMES}
    assert {turn.step.weigh for turn in turns} == {"both", "dispatch", "combine"}
    assert {turn.other for turn in turns} == {False, True}
    assert {turn.padding for turn in turns} == {1, 2, 5}
    assert {turn.quantize for turn in turns} == {None, "int8", "fp8_e4m3"}
    assert {pad is None for turn in turns for pad in turn.pads} == {False, True}
    assert sum(again >= 0 for _, again in made) >= 10
    assert len({turn.step.hidden for turn in turns}) >= 4
    assert any(0 in turn.step.tokens and any(turn.step.tokens) for turn in turns)
    assert any(not any(turn.step.tokens) for turn in turns)
    assert any(turn.top_k[0] != turn.top_k[1] for turn in turns)
    assert any(turn.step.drop == 1.0 for turn in turns)
    for turn in turns:
        room = 40 * 4
        for name in (turn.step.dtype, turn.step.y_dtype or turn.step.dtype):
            assert turn.step.hidden * dtype_of(name).itemsize <= room


@pytest.mark.parametrize(
    ("experts", "fmt", "push"), [(2, "portable", False), (201, "portable", True), (201, "line", False)]
)
def test_numbers_of_experts(pool: RankPool, experts: int, fmt: str, push: bool) -> None:
    """Fewer experts than ranks, and more counts than the least payload of a record, or its first lines, hold."""
    spec = bodies.Spec(experts, 3, 24, 40, record_format=fmt, push=push)
    pool.run(3, bodies.many_steps, spec, 1, 12, 4)


@BOTH
def test_wide_rows(pool: RankPool, fmt: str) -> None:
    """Rows of several lines, and several scales in each."""
    spec = bodies.Spec(5, 2, 6, 300, record_format=fmt, push=True, flag_rows=1)
    pool.run(2, bodies.many_steps, spec, 1, 20, 5)


# ------------------------------------------------------------------------------------------------------------- headers


@BOTH
def test_header(pool: RankPool, fmt: str) -> None:
    spec = bodies.Spec(5, 2, 33, 77, "bfloat16", record_format=fmt, depth=3, push=True, first_n=8)
    found = pool.run(3, bodies.headers, spec, 1)[1]
    headers, sizes, rest, unwritten, counters, total_bytes = found
    for rank, header in enumerate(headers):
        nonce = (header.pop("NONCE_LO"), header.pop("NONCE_HI"))
        assert header == {
            "MAGIC": numpy_rank.MAGIC,
            "VERSION": numpy_rank.VERSION,
            "FORMAT": bodies.FORMATS[fmt],
            "GENERATION": headers[0]["GENERATION"],
            "RANK": rank,
            "WORLD_SIZE": 3,
            "TOTAL_BYTES": total_bytes,
        }
        header["nonce"] = nonce
    assert len({header["nonce"] for header in headers}) == 3
    assert sizes == [total_bytes] * 3
    assert counters == [[7, 0, 0]] * 3
    assert rest == [False] * 3 and unwritten == [False] * 3, "a new window is zero but for those"


# ------------------------------------------------------------------------------------------------------ calls that fail


@pytest.mark.parametrize(
    ("ranks", "numpy_at", "fmt"),
    [(2, 0, "portable"), (2, 1, "compact"), (3, 0, "compact"), (3, 1, "portable")],
)
def test_aborts(pool: RankPool, ranks: int, numpy_at: int, fmt: str) -> None:
    results = pool.run(ranks, bodies.aborts, usual(fmt), numpy_at)
    calls = [{r} for r in range(ranks)] + [set(range(ranks))] + [{0}] * 3
    assert [len(found) for found in results] == [len(calls)] * ranks
    for number, bad in enumerate(calls):
        for rank in range(ranks):
            error = results[rank][number]
            if rank not in bad:
                check(
                    error, "PeerAborted", f"rank {rank}", bodies.TEXT if numpy_at in bad else "outside -1..3"
                )
            elif rank == numpy_at:
                assert error is None
            else:
                check(error, "BadValue", "topk_idx")


@BOTH
def test_long_text_of_an_abort(pool: RankPool, fmt: str) -> None:
    nothing, error = pool.run(2, bodies.long_abort, usual(fmt), 0)
    assert nothing is None
    check(error, "PeerAborted", "0123456789" * 40, "-end-")


@BOTH
@pytest.mark.parametrize("late", [0, 1])
def test_records_of_an_ended_call_are_waited_out(pool: RankPool, fmt: str, late: int) -> None:
    assert pool.run(2, bodies.waits_out, usual(fmt), 1, late) == ["", ""]


def test_records_of_an_ended_call_have_to_be_waited_out(pool: RankPool) -> None:
    """What happens when the numpy rank is the one that hurries: the product never gets to see a record."""
    product, numpy = pool.run(2, bodies.waits_out, usual(timeout=1.0), 1, 0, bodies.HastyRank)
    # Whichever gives up first.
    assert "PeerTimeout" in product or "PeerLost" in product
    assert "TimeoutError" in numpy or "PeerGone" in numpy


MISMATCHES = [
    "tag",
    "H",
    "dtype",
    "weight dtype",
    "weights",
    "quantize",
    "align",
    "routing",
    "other routing",
]


@pytest.mark.parametrize(
    ("ranks", "numpy_at", "fmt"), [(2, 0, "portable"), (3, 1, "compact"), (2, 1, "line")]
)
def test_mismatch(pool: RankPool, ranks: int, numpy_at: int, fmt: str) -> None:
    for errors in pool.run(ranks, bodies.mismatches, usual(fmt, push=ranks == 3), numpy_at, MISMATCHES):
        assert len(errors) == len(MISMATCHES)
        for error in errors:
            check(error, "CallMismatch")


@pytest.mark.parametrize(
    ("numpy_at", "fmt", "padding"),
    [(0, "portable", 1), (2, "compact", 1), (0, "line", 7), (2, "portable", 7)],
)
def test_pad_too_small(pool: RankPool, numpy_at: int, fmt: str, padding: int) -> None:
    """PAD counts the padding of ALIGN, too."""
    rows = {1: 96, 7: 98}[padding]
    for error in pool.run(3, bodies.pads, usual(fmt), numpy_at, rows - 1, padding):
        check(error, "PadTooSmall", "rank 2", str(rows), str(rows - 1))
    assert pool.run(3, bodies.pads, usual(fmt), numpy_at, rows, padding) == [None] * 3


@pytest.mark.parametrize(
    ("numpy_at", "refuser", "concerned", "fmt"),
    [
        (0, 0, 2, "portable"),
        (0, 2, 0, "portable"),
        (1, 2, 0, "portable"),
        (0, 0, 2, "compact"),
        (0, 2, 0, "compact"),
    ],
)
def test_refused_combine(pool: RankPool, numpy_at: int, refuser: int, concerned: int, fmt: str) -> None:
    """The refuser raises its own error, the one with rows there a PeerAborted; the third isn't concerned."""
    results = pool.run(3, bodies.refusals, usual(fmt), numpy_at, refuser, concerned)
    if refuser == numpy_at:
        assert results[refuser] is None
    else:
        check(results[refuser], "BadValue", "y")
    check(
        results[concerned],
        "PeerAborted",
        str(refuser),
        bodies.TEXT if refuser == numpy_at else "y has shape [4, 4]",
    )
    (third,) = {0, 1, 2} - {refuser, concerned}
    assert results[third] is None


@pytest.mark.parametrize(("numpy_at", "fmt"), [(0, "portable"), (1, "compact")])
@pytest.mark.parametrize("what", ["dtype", "H"])
def test_owners_disagree_on_y(pool: RankPool, numpy_at: int, fmt: str, what: str) -> None:
    for error in pool.run(2, bodies.y_differs, usual(fmt), numpy_at, what):
        check(error, "CallMismatch")


@pytest.mark.parametrize("numpy_at", [0, 1])
def test_expired_handle(pool: RankPool, numpy_at: int) -> None:
    for errors in pool.run(2, bodies.expired, usual(), numpy_at):
        assert len(errors) == 3
        for error in errors:
            check(error, "HandleExpired")


@pytest.mark.parametrize(("numpy_at", "fmt"), [(0, "portable"), (1, "compact")])
@pytest.mark.parametrize("aborting", [0, 1])
def test_code_of_the_lap_before(pool: RankPool, numpy_at: int, fmt: str, aborting: int) -> None:
    assert pool.run(2, bodies.stale_code, usual(fmt, largest_code=6), numpy_at, aborting) == [None, None]


def test_code_of_the_lap_before_has_to_go(pool: RankPool) -> None:
    """What happens when the numpy rank forgets to clear: it reads rows that are not there yet."""
    product, numpy = pool.run(2, bodies.stale_code, usual(largest_code=6), 1, 1, bodies.ForgetfulRank)
    assert product is None
    check(numpy, "AssertionError", "call 9 on rank 1: combined")


@pytest.mark.parametrize(
    ("numpy_at", "fmt", "code_max", "more"),
    [
        (1, "compact", 6, {"push": True, "always": True}),
        (0, "portable", 8, {"push": True, "always": True, "flag_rows": 1}),
        (1, "line", 6, {"push": True, "always": True}),
        (0, "compact", 6, {"push": True, "always": True, "recv_rows": 5}),
        (1, "portable", 6, {"recv_rows": 5}),
        (0, "line", 8, {"recv_rows": 5}),
    ],
)
def test_sparse_rows_over_laps(
    pool: RankPool, numpy_at: int, fmt: str, code_max: int, more: dict[str, Any]
) -> None:
    """Rows whose place nobody else writes, a lap apart, from a rank that is late."""
    spec = usual(fmt, largest_code=code_max, **more)
    assert pool.run(2, bodies.sparse_laps, spec, numpy_at, 2 * code_max + 3) == [None, None]


@pytest.mark.parametrize(
    ("numpy_at", "fmt", "push"),
    [
        (0, "portable", False),
        (1, "compact", False),
        (2, "line", False),
        (0, "line", True),
        (1, "portable", True),
    ],
)
def test_combine_that_ends_early_in_waves(pool: RankPool, numpy_at: int, fmt: str, push: bool) -> None:
    """A rank that can't sum keeps nobody waiting and gives its own rows to the end."""
    spec = usual(fmt, recv_rows=5, timeout=5.0, push=push)
    cases = [(who, how) for how in ("refuses", "bad weights") for who in (0, 1, 0)]
    for rank, errors in enumerate(pool.run(3, bodies.ends_in_waves, spec, numpy_at, cases)):
        for error, (who, how) in zip(errors, cases, strict=True):
            if rank == who:
                if rank != numpy_at:
                    check(error, "BadValue")
                elif how == "bad weights":
                    check(error, "ValueError", "weights")
                else:
                    assert error is None
            elif how == "refuses":
                check(error, "PeerAborted", str(who))
            else:
                assert error is None


@pytest.mark.parametrize(("numpy_at", "fmt"), [(0, "portable"), (1, "compact"), (0, "line")])
@pytest.mark.parametrize("aborting", [0, 1])
def test_abort_with_a_dispatch_under_way(pool: RankPool, numpy_at: int, fmt: str, aborting: int) -> None:
    for rank, (second, late) in enumerate(
        pool.run(2, bodies.abort_under_way, usual(fmt), numpy_at, aborting)
    ):
        if rank != aborting:
            check(second, "PeerAborted", f"rank {rank}")
        elif rank != numpy_at:
            check(second, "BadValue")
        check(late, "HandleExpired")


@pytest.mark.parametrize(
    ("fmt", "lie", "got"),
    [
        ("compact", 0, [False, False, True, True]),
        ("portable", 0, [False, False, True, True]),
        ("line", 0, [False, False, True, True]),
        ("compact", 1000, [True, False, True, True]),
        ("line", -5, [True, False, True, True]),
    ],
)
def test_read_words(pool: RankPool, fmt: str, lie: int, got: list[bool]) -> None:
    """x of a call may be written again when all ranks have said so; one that says more than can be true isn't believed."""
    assert pool.run(2, bodies.read_words, usual(fmt), 1, lie)[0] == got


VERDICTS = {
    "good": (1, 0),
    "good combine": (0, 0),
    "combined twice": (0, 0),
    "good again": (1, 0),
    "own abort": (1, 1),
    "own abort, no tensor": (1, 2),
    "peer's abort": (1, 3),
    "mismatch": (1, 4),
    "pad": (1, 5),
    "refusal of a peer": (0, 3),
    "own refusal": (0, 1),
    "bad weights": (0, 1),
    "expired": (0, 1),  # a local error says nothing: that is still the call before
    "the last of them": (0, 0),
    "left": (1, 6),
    "after the end": (0, 6),
}


@BOTH
def test_progress_after_every_way_out(pool: RankPool, fmt: str) -> None:
    """The counter goes on by one in every dispatch, and VERDICT says how the call ended."""
    found = pool.run(2, bodies.verdicts, usual(fmt, timeout=2.0), 0)[1]
    assert {name: (step, verdict) for name, step, _, verdict in found} == VERDICTS
    assert {phase for name, _, phase, _ in found if name != "expired"} == {numpy_rank.IDLE}


# ---------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("ranks", "numpy_at", "leaver", "fmt"),
    [(2, 0, 0, "portable"), (2, 0, 1, "portable"), (3, 1, 1, "compact"), (3, 1, 0, "compact")],
)
def test_leave(pool: RankPool, ranks: int, numpy_at: int, leaver: int, fmt: str) -> None:
    for rank, (error, status) in enumerate(pool.run(ranks, bodies.leaves, usual(fmt), numpy_at, leaver)):
        if rank == leaver:
            continue
        check(error, "PeerGone" if rank == numpy_at else "PeerLost", f"rank {rank}", str(leaver))
        assert error is not None and error.seconds < 5.0, "a leave is seen at once"
        if rank == numpy_at:
            code, body, generation = status
            assert code == numpy_rank.LEFT and body["GENERATION"] == generation
            assert (numpy_rank.joined(body["EPOCH_LO"], body["EPOCH_HI"]), body["WHO"]) == (1, -1)
            assert body["PHASE"] == numpy_rank.IDLE


@pytest.mark.parametrize("where", ["dispatch", "combine"])
@pytest.mark.parametrize(
    ("ranks", "numpy_at", "leaver", "fmt"),
    [(2, 0, 0, "portable"), (2, 0, 1, "compact"), (3, 1, 1, "portable"), (3, 1, 2, "portable")],
)
def test_leave_after_its_part(
    pool: RankPool, ranks: int, numpy_at: int, leaver: int, fmt: str, where: str
) -> None:
    pool.run(ranks, bodies.goes_after_its_part, usual(fmt), numpy_at, leaver, where)


@BOTH
def test_numpy_does_not_come(pool: RankPool, fmt: str) -> None:
    (missing, _), (error, status) = pool.run(2, bodies.absent, usual(fmt, timeout=1.0), 1, 1)
    check(missing, "PeerTimeout", "rank 1", "call 2")
    check(error, "PeerGone", str({0: numpy_rank.POISON}))
    code, body, generation = status
    assert code == numpy_rank.POISON
    assert (body["GENERATION"], body["WHO"]) == (generation, 1)
    assert numpy_rank.joined(body["EPOCH_LO"], body["EPOCH_HI"]) == 2
    assert body["PHASE"] == numpy_rank.DISPATCH_COUNTS


@BOTH
def test_product_does_not_come(pool: RankPool, fmt: str) -> None:
    (missing, _), (error, _) = pool.run(2, bodies.absent, usual(fmt, timeout=1.0), 0, 1)
    check(missing, "TimeoutError", "rank 0", "call 2", "[1]")
    check(error, "PeerLost", "rank 0")


# -------------------------------------------------------------------------------------- what the product doesn't accept

FAULTS: dict[str, str] = {
    "seven of eight words of a record": "portable",
    "first word missing": "portable",
    "record in the other slot": "portable",
    "record of another rank": "compact",
    "code of the call before": "compact",
    "code of the call after": "portable",
    "code of a refusal": "portable",
    "seven of eight words of a cell": "portable",
    "seven of eight words of a line": "line",
    "cell in the other slot": "compact",
}


@pytest.mark.parametrize(("fault", "fmt"), FAULTS.items())
def test_broken_rule(pool: RankPool, fault: str, fmt: str) -> None:
    """The product waits for what never becomes complete, and says whom it waited for."""
    product, numpy = pool.run(2, bodies.broken, usual(fmt, timeout=0.5), 1, fault, None)
    assert numpy is None
    check(product, "PeerTimeout", "combine" if "cell" in fault else "dispatch", "rank 1", "call 2")


@pytest.mark.parametrize("fault", ["seven of eight words of a record", "seven of eight words of a cell"])
def test_broken_rule_repaired(pool: RankPool, fault: str) -> None:
    """The word that was missing is all that the product waited for."""
    assert pool.run(2, bodies.broken, usual(), 1, fault, 0.3) == [None, None]


@pytest.mark.parametrize(
    "wrong",
    [
        "order of the token list",
        "order of the weights",
        "a bit of x",
        "counts",
        "a bit of y",
        "where y begins",
    ],
)
def test_wrong_contents_are_seen(pool: RankPool, wrong: str) -> None:
    """The comparisons of this file notice what the numpy rank gets wrong."""
    product, _ = pool.run(2, bodies.wrong_contents, usual(), 1, wrong)
    check(product, "AssertionError", wrong)


@pytest.mark.parametrize(
    ("fmt", "wrong"),
    [
        ("compact", "a bit of a pushed row"),
        ("portable", "a bit behind a pushed row"),
        ("line", "a bit behind a pushed row"),
        ("line", "a bit of z"),
    ],
)
def test_wrong_contents_of_a_push_are_seen(pool: RankPool, fmt: str, wrong: str) -> None:
    spec = usual(fmt, push=True, always=True)
    product, _ = pool.run(2, bodies.wrong_contents, spec, 1, wrong)
    check(product, "AssertionError", wrong)


@pytest.mark.parametrize("push", [False, True])
def test_right_contents_are_right(pool: RankPool, push: bool) -> None:
    """The tests above see nothing when nothing is wrong."""
    assert pool.run(2, bodies.wrong_contents, usual(push=push, always=push), 1, "") == [None, None]


LIES = {
    "a mode that doesn't exist": ({"MODE": 3}, "mode 3"),
    "a fused call": ({"MODE": 2}, "the call is dispatch on rank 0 and moe_a2a.moe on rank 1"),
    "no rows a flag": ({"MODE": 1, "FLAG_ROWS": -1}, "-1 rows a flag"),
    "less than no rows": ({"PAD_LO": -2, "PAD_HI": -1}, "pad_to = -2"),
    "a digest": ({"ROUTING_LO": 5}, "routing"),
    "quantised": ({"QUANT": 2}, "quantize is"),
    "a quantisation that doesn't exist": ({"QUANT": 77}, "quantize is"),
    "no alignment": ({"ALIGN": 0}, "align is 1 on rank 0 and 0 on rank 1"),
    "align": ({"ALIGN": 8}, "align is 1 on rank 0 and 8 on rank 1"),
    "too many tokens": ({"TOKENS": 1000}, "x region"),
    "x in y": ({"X_LO": 2**30}, "x region"),
    "another kind": ({"KIND": numpy_rank.ROUND}, "kind of call"),
}


@pytest.mark.parametrize(("fmt", "push"), [("portable", False), ("compact", True), ("line", True)])
def test_records_that_cannot_be(pool: RankPool, fmt: str, push: bool) -> None:
    spec = usual(fmt, push=push)
    errors = pool.run(2, bodies.lies, spec, 1, [words for words, _ in LIES.values()])[0]
    for error, (_, says) in zip(errors, LIES.values(), strict=True):
        check(error, "CallMismatch", "rank 1", says)


def test_push_in_a_group_without_push(pool: RankPool) -> None:
    check(pool.run(2, bodies.lies, usual(), 1, [{"MODE": 1}])[0][0], "CallMismatch", "rank 1", "mode 1")


@pytest.mark.parametrize(
    ("fmt", "entry"), [("portable", -1), ("compact", 8), ("line", 2**31 - 1), ("compact", -(2**31))]
)
def test_token_that_does_not_exist(pool: RankPool, fmt: str, entry: int) -> None:
    """The product reads no rows beyond x, says whose list it was, and ends the group."""
    error, numpy = pool.run(2, bodies.wrong_token, usual(fmt), 1, entry)
    check(error, "PeerLost", "token list of rank 1")
    code, body, _ = numpy
    assert (code, body["REASON"], body["WHO"]) == (numpy_rank.POISON, numpy_rank.LOST, 1)


@pytest.mark.parametrize(
    ("fmt", "fault", "push", "waits"),
    [
        ("portable", "silent", True, True),
        ("compact", "silent", False, True),
        ("line", "mark without a code", True, True),
        ("portable", "mark without a code", False, True),
        ("compact", "code without a mark", True, True),
        ("line", "code without a mark", False, True),
        ("portable", "negative mark", True, True),
        ("compact", "all at once", True, False),
        ("portable", "all at once", False, False),
        ("line", "far beyond", True, False),
        ("compact", "far beyond", False, False),
    ],
)
def test_watermarks_that_lie(pool: RankPool, fmt: str, fault: str, push: bool, waits: bool) -> None:
    """What never says that it has read is waited for; one that says so early harms itself and nobody else."""
    spec = usual(fmt, timeout=0.5 if waits else 1.0, recv_rows=5, push=push, always=push)
    error = pool.run(2, bodies.wrong_marks, spec, 1, fault, waits)[0]
    if waits:
        check(error, "PeerTimeout", "rank 1")
    elif error is not None:
        assert push  # the numpy rank may have lost flags that it had cleared too late, and given up
        check(error, "PeerLost", "rank 1")


@pytest.mark.parametrize("fault", ["no flag", "flag of another row", "flags in the other slot"])
@pytest.mark.parametrize("fmt", ["portable", "compact"])
def test_flags_that_are_wrong(pool: RankPool, fmt: str, fault: str) -> None:
    spec = usual(fmt, timeout=0.5, push=True, always=True)
    check(pool.run(2, bodies.wrong_flags, spec, 1, fault)[0], "PeerTimeout", "rank 1")


# ranks, numpy's rank, format, calls, more.
FUSED_RUNS: dict[str, tuple[int, int, str, int, dict[str, Any]]] = {
    "2 ranks, compact": (2, 0, "compact", 40, {}),
    "2 ranks, portable, V of 5": (2, 1, "portable", 40, {"largest_code": 5}),
    "3 ranks, portable, three slots, V of 7": (3, 1, "portable", 36, {"depth": 3, "largest_code": 7}),
    "3 ranks, compact, around V": (3, 2, "compact", 36, {"first_n": 2**62 - 20}),
    "3 ranks, push, V of 6": (3, 0, "compact", 36, {"push": True, "largest_code": 6, "flag_rows": 2}),
    "2 ranks, portable, push": (2, 1, "portable", 36, {"push": True, "largest_code": 5}),
    "in waves": (3, 1, "compact", 36, {"recv_rows": 9, "largest_code": 5, "flags": (3, 0, 1)}),
    "in waves of push": (2, 0, "portable", 36, {"push": True, "recv_rows": 7, "largest_code": 6}),
    "a flag a row": (2, 0, "portable", 36, {"largest_code": 5, "flag_rows": 1}),
    "other flags on each rank": (4, 2, "compact", 28, {"largest_code": 5, "flags": (1, 2, 0, 3)}),
}


@pytest.mark.parametrize("run", FUSED_RUNS)
def test_fused_calls_and_rounds(pool: RankPool, run: str) -> None:
    """Fused calls whole and in halves, dispatches, aborts and rounds in one sequence, with numpy as source and owner."""
    ranks, numpy_at, fmt, calls, more = FUSED_RUNS[run]
    spec = bodies.Spec(7, 3, 24, 40, record_format=fmt, **more)
    ran = pool.run(ranks, bodies.fused_steps, spec, numpy_at, calls, list(FUSED_RUNS).index(run))
    product = ran[1 if numpy_at == 0 else 0]
    assert min(found["compared"] for found in ran) > calls // 2
    assert ("waves" in run) == (product["waves"] > product["dispatches"])


@pytest.mark.parametrize(
    ("ranks", "numpy_at", "fmt", "operator"),
    [
        (2, 0, "compact", "moe"),
        (3, 1, "portable", "moe"),
        (2, 1, "portable", "moe_apply"),
        (3, 2, "compact", "moe_apply"),
    ],
)
def test_no_expert_waits_for_rows_of_another_one(
    pool: RankPool, ranks: int, numpy_at: int, fmt: str, operator: str
) -> None:
    """One source's rows for the first expert come when all others have been computed, and not before."""
    spec = bodies.Spec(8, 2, 8, 4, record_format=fmt)
    found = pool.run(ranks, bodies.delayed_expert, spec, numpy_at, operator)
    assert found.pop(numpy_at) is True, (
        f"the delayed rows went out before the other experts were computed: {found}"
    )
    for order in found:
        assert order[-1] == 0 and sorted(order) == list(range(len(order))), found
        assert len(order) >= 2


@pytest.mark.parametrize("fmt", ["compact", "portable"])
def test_an_expert_waits_for_every_group_of_a_run(pool: RankPool, fmt: str) -> None:
    """A run's last flag may be there long before its other ones."""
    pool.run(2, bodies.slow_groups, usual(fmt), 1)


@pytest.mark.parametrize("fmt", ["compact", "portable"])
@pytest.mark.parametrize(("ranks", "numpy_at", "fusing"), [(2, 0, 0), (2, 0, 1), (3, 1, 2)])
def test_a_fused_call_meets_a_dispatch(
    pool: RankPool, ranks: int, numpy_at: int, fusing: int, fmt: str
) -> None:
    for error in pool.run(ranks, bodies.fused_mismatches, usual(fmt), numpy_at, fusing):
        check(error, "CallMismatch")


@pytest.mark.parametrize("fmt", ["compact", "portable"])
@pytest.mark.parametrize(("numpy_at", "refuser"), [(0, 0), (0, 1)])
def test_experts_that_fail(pool: RankPool, numpy_at: int, refuser: int, fmt: str) -> None:
    """The owner refuses its rows; the group stays usable, also when rows of the call it ended come late, over laps."""
    spec = usual(fmt, largest_code=6)
    for rank, errors in enumerate(pool.run(3, bodies.fused_refusals, spec, numpy_at, refuser)):
        for error in errors:
            check(error, "ValueError" if rank == refuser else "PeerAborted", "expert without a clue")


@pytest.mark.parametrize(
    ("numpy_at", "fmt", "push"), [(1, "compact", False), (0, "portable", False), (1, "compact", True)]
)
def test_flags_of_fused_calls_over_laps(pool: RankPool, numpy_at: int, fmt: str, push: bool) -> None:
    """Rows whose flag nothing else overwrites, a lap apart, from a rank that is late."""
    spec = usual(fmt, largest_code=6, push=push)
    assert pool.run(2, bodies.fused_laps, spec, numpy_at, 22) == [None, None]


def test_gradients_that_some_rank_wants(pool: RankPool) -> None:
    for found in pool.run(3, bodies.gradient_words, usual(), 1):
        assert found == [0, 1, 2, 4, 12]


def test_digests_of_ids(pool: RankPool) -> None:
    """In plain Python, in torch and in C++ they are the same, and all ranks know all of them."""
    first, *others = pool.run(3, bodies.ids_of_all, usual(), 1)
    assert all(found == first for found in others)
    assert len({word for ids in first for word in ids}) == 7  # and a zero where there are no tokens


def test_foreign_record_is_checked(pool: RankPool) -> None:
    """The numpy rank's own demands on records are not idle: one that is not met ends the run."""
    with pytest.raises(RankFailed, match="ProtocolError"):
        pool.run(2, bodies.demanding, usual(timeout=2.0), 1)


def test_the_numpy_rank_shares_nothing_with_the_product() -> None:
    """It is written from docs/protocol.md: numpy and the standard library are all it imports."""
    source = Path(__file__).with_name("numpy_rank.py").read_text()
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= set(sys.stdlib_module_names) | {"numpy"}, names
