"""docs/protocol.md is enough to write another implementation, and the product follows it.

tests/numpy_rank.py was written from the document alone. Here it takes part, as one rank of a group, in everything that
the document describes; the other ranks are the product. Results are compared with the oracle to the bit on all ranks.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import numpy as np
import numpy_rank
import pytest
import torch
from numpy_rank import Layout, Sizes
from pool import RankFailed, RankPool
from rank_bodies import numpy_rank_bodies as bodies
from rank_bodies.errors import Caught
from rank_bodies.inputs import GroupSpec, dtype_of

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
FORMATS = ["portable", "compact"]
BOTH = pytest.mark.parametrize("fmt", FORMATS)


def usual(
    fmt: str = "portable", experts: int = 4, timeout: float = 20.0, recv_rows: int | None = None
) -> GroupSpec:
    """A small group."""
    return GroupSpec(experts, 2, 16, 8, record_format=fmt, timeout=timeout, recv_rows=recv_rows)


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


@pytest.mark.parametrize("name", ["example", "record-bytes", "cell-bytes", "status-bytes"])
def test_layout_is_the_document_s_example(name: str) -> None:
    sizes = Sizes(2, 8, 2, 16, row_bytes=65 * 2, max_recv_rows=64, slots=2)
    rows = table(name)
    assert len(rows) >= 3
    for field, compact, portable in rows:
        got = [getattr(Layout(sizes, fmt), field) for fmt in (numpy_rank.COMPACT, numpy_rank.PORTABLE)]
        assert got == [int(compact), int(portable)], field


@pytest.mark.parametrize("name", ["header", "record", "cell", "status", "progress"])
def test_words_are_the_document_s(name: str) -> None:
    words: dict[str, int] = getattr(numpy_rank, name.upper())
    assert words == {row[1]: int(row[0]) for row in table(name)}


def test_numbers_are_the_document_s() -> None:
    named = {row[0]: row[1] for row in table("numbers")}
    dtypes = {"none": "NO_DTYPE", "float32": "FLOAT32", "bfloat16": "BFLOAT16", "float16": "FLOAT16"}
    dtypes["float64"] = "FLOAT64"
    for what in ("kind of a record", "code of a status cell", "phase", "dtype"):
        for pair in named[what].split(", "):
            number, name = pair.split()
            assert getattr(numpy_rank, dtypes.get(name, name)) == int(number), what
    assert {
        "words of a record's header": numpy_rank.RECORD_WORDS,
        "least bytes of a record's payload": numpy_rank.LEAST_PAYLOAD,
        "words of a combine or status body": numpy_rank.CELL_WORDS,
        "bytes of a refusal's text": numpy_rank.CELL_TEXT_BYTES,
        "bytes of a portable code": numpy_rank.PORTABLE_CODE_BYTES,
    }.items() <= {what: int(n) for what, n in named.items() if n.isdigit()}.items()


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

# R, the numpy rank, format, NS, first n, V. A code wraps after V calls: once in "around V", often where V is small.
RUNS = {
    "2 ranks, numpy first": (2, 0, "portable", 2, 1, None),
    "2 ranks, around V": (2, 1, "portable", 2, 2**31 - 20, None),
    "2 ranks, V of 5": (2, 0, "portable", 2, 1, 5),
    "3 ranks, three slots, n beyond 32 bits": (3, 1, "portable", 3, 2**32 - 30, None),
    "3 ranks, numpy last": (3, 2, "portable", 2, 1, None),
    "2 ranks, compact": (2, 1, "compact", 2, 2**62 - 20, None),
    "3 ranks, compact, V of 6": (3, 0, "compact", 3, 1, 6),
}


@pytest.mark.parametrize(
    ("ranks", "numpy_at", "fmt", "depth", "first_n", "largest_code"), RUNS.values(), ids=RUNS
)
def test_many_steps(
    pool: RankPool, ranks: int, numpy_at: int, fmt: str, depth: int, first_n: int, largest_code: int | None
) -> None:
    spec = GroupSpec(7, 3, 24, 40, record_format=fmt, depth=depth)
    seed = 10 * ranks + numpy_at
    program = bodies.make_program(seed, depth, 64)
    combined = sum(word[0] == "C" for word in program)
    assert combined >= 40 and any(word[0] == "X" for word in program)
    ran = pool.run(ranks, bodies.many_steps, spec, numpy_at, 64, seed, first_n, largest_code)
    assert ran == [combined] * ranks


def test_turns_are_of_every_kind() -> None:
    """The steps of the first run above (its seed is 20) cover what the test is about."""
    spec = GroupSpec(7, 3, 24, 40)
    turns = [bodies.make_turn(20_000 + i, spec, 2) for i in range(64)]
    assert {turn.step.dtype for turn in turns} == set(bodies.NAMES)
    assert {turn.step.weight_dtype for turn in turns} == {None, *bodies.NAMES}
    assert {turn.step.weigh for turn in turns} == {"both", "dispatch", "combine"}
    assert {turn.other for turn in turns} == {False, True}
    assert len({turn.step.hidden for turn in turns}) >= 4
    assert any(0 in turn.step.tokens and any(turn.step.tokens) for turn in turns)
    assert any(not any(turn.step.tokens) for turn in turns)
    assert any(turn.top_k[0] != turn.top_k[1] for turn in turns)
    assert any(turn.step.drop == 1.0 for turn in turns)
    for turn in turns:
        room = 40 * 4
        for name in (turn.step.dtype, turn.step.y_dtype or turn.step.dtype):
            assert turn.step.hidden * dtype_of(name).itemsize <= room


@pytest.mark.parametrize("experts", [2, 201])
def test_numbers_of_experts(pool: RankPool, experts: int) -> None:
    """Fewer experts than ranks, and more counts than the least payload of a record holds."""
    spec = GroupSpec(experts, 3, 24, 40, record_format="portable")
    pool.run(3, bodies.many_steps, spec, 1, 12, 4, 1, None)


# ------------------------------------------------------------------------------------------------------------- headers


@BOTH
def test_header(pool: RankPool, fmt: str) -> None:
    spec = GroupSpec(5, 2, 33, 77, "bfloat16", record_format=fmt, depth=3)
    found = pool.run(3, bodies.headers, spec, 1)[1]
    headers, sizes, rest, unwritten, total_bytes = found
    for rank, header in enumerate(headers):
        nonce = (header.pop("NONCE_LO"), header.pop("NONCE_HI"))
        assert header == {
            "MAGIC": numpy_rank.MAGIC,
            "VERSION": numpy_rank.VERSION,
            "FORMAT": numpy_rank.COMPACT if fmt == "compact" else numpy_rank.PORTABLE,
            "GENERATION": headers[0]["GENERATION"],
            "RANK": rank,
            "WORLD_SIZE": 3,
            "TOTAL_BYTES": total_bytes,
        }
        header["nonce"] = nonce
    assert len({header["nonce"] for header in headers}) == 3
    assert sizes == [total_bytes] * 3
    assert rest == [False] * 3 and unwritten == [False] * 3, "a new window is zero but for its header"


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
    for error in pool.run(2, bodies.waits_out, usual(timeout=1.0), 1, 0, bodies.HastyRank):
        assert "PeerLost" in error or "PeerGone" in error or "TimeoutError" in error


@pytest.mark.parametrize(("ranks", "numpy_at", "fmt"), [(2, 0, "portable"), (3, 1, "compact")])
@pytest.mark.parametrize("what", ["tag", "H", "dtype", "weight dtype", "weights"])
def test_mismatch(pool: RankPool, ranks: int, numpy_at: int, fmt: str, what: str) -> None:
    for error in pool.run(ranks, bodies.mismatch, usual(fmt), numpy_at, what):
        check(error, "CallMismatch")


@pytest.mark.parametrize(("numpy_at", "fmt"), [(0, "portable"), (2, "compact")])
def test_too_many_rows(pool: RankPool, numpy_at: int, fmt: str) -> None:
    too_few = usual(fmt, recv_rows=3 * 16 * 2 - 1)
    for rank, error in enumerate(pool.run(3, bodies.mismatch, too_few, numpy_at, "rows")):
        check(error, "TooManyRows" if rank == numpy_at else "WindowTooSmall", "rank 2", "96")
    enough = usual(fmt, recv_rows=3 * 16 * 2)
    assert pool.run(3, bodies.mismatch, enough, numpy_at, "rows") == [None] * 3


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
    assert pool.run(2, bodies.stale_code, usual(fmt), numpy_at, aborting) == [None, None]


def test_code_of_the_lap_before_has_to_go(pool: RankPool) -> None:
    """What happens when the numpy rank forgets to clear: it reads rows that are not there yet."""
    product, numpy = pool.run(2, bodies.stale_code, usual(), 1, 1, bodies.ForgetfulRank)
    assert product is None
    check(numpy, "AssertionError", "call 9 on rank 1: combined")


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

FAULTS = {
    "seven of eight words of a record": "portable",
    "first word missing": "portable",
    "record in the other slot": "portable",
    "record of another rank": "compact",
    "code of the call before": "compact",
    "code of the call after": "portable",
    "code of a refusal": "portable",
    "seven of eight words of a cell": "portable",
    "cell in the other slot": "compact",
}


@pytest.mark.parametrize(("fault", "fmt"), FAULTS.items())
def test_broken_rule(pool: RankPool, fault: str, fmt: str) -> None:
    """The product waits for what never becomes complete, and says whom it waited for."""
    product, numpy = pool.run(2, bodies.broken, usual(fmt, timeout=1.0), 1, fault, None)
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


def test_right_contents_are_right(pool: RankPool) -> None:
    """The test above sees nothing when nothing is wrong."""
    assert pool.run(2, bodies.wrong_contents, usual(), 1, "") == [None, None]


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
