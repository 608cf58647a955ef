"""Every error of the contract: on which ranks it is raised, what its message says, and that the group goes on
after it.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lanes import crossed
from pool import RankPool
from rank_bodies import errors
from rank_bodies.errors import AT_ONCE, USUAL, Caught

import moe_a2a


@pytest.fixture(scope="module")
def small() -> Iterator[RankPool]:
    """Two ranks of their own for the tests that kill one."""
    ranks = RankPool(2)
    yield ranks
    problems = ranks.close()
    assert not problems, "\n".join(problems)


def check(
    error: Caught | None, kinds: tuple[str, ...], words: tuple[str, ...], limit: float = AT_ONCE
) -> None:
    """The error is of all ``kinds``, its text has all ``words``, and it came within ``limit`` seconds."""
    assert error is not None, f"nothing was raised, expected {kinds}"
    for kind in ("MoeA2AError", *kinds):
        assert kind in error.kinds, f"{error.kinds}: {error.message}"
    for word in words:
        assert word in error.message, f"{word!r} is missing in: {error.message}"
    assert error.seconds < limit, f"took {error.seconds:.1f} s: {error.message}"


VALUE, TYPE = ("BadValue", "ValueError"), ("BadType", "TypeError")
PEER = ("PeerAborted", "RuntimeError")

BAD_DISPATCH: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("rows of x and ids", VALUE, ("x", "topk_idx", "[16, 8]", "[15, 2]")),
    ("ids and weights", VALUE, ("topk_weights", "topk_idx", "[16, 3]", "[16, 2]")),
    ("x with one dimension", VALUE, ("x ", "[16]", "expected")),
    ("x with three dimensions", VALUE, ("x ", "[16, 2, 4]", "expected")),
    ("ids with one dimension", VALUE, ("topk_idx", "[16]", "expected")),
    ("weights with one dimension", VALUE, ("topk_weights", "[16]", "[16, 2]")),
    ("too many tokens", VALUE, ("17", "max_tokens", "16")),
    ("too large K", VALUE, ("K = 3", "top_k", "2")),
    ("row too wide", VALUE, ("x", "9", "36", "32", "hidden_size")),
    ("row too wide by dtype", VALUE, ("x", "64", "32", "float64")),
    ("int32 id", VALUE, ("topk_idx", "= 4", "[9, 1]", "-1..3")),
    ("first id", VALUE, ("topk_idx", "77", "[0, 0]", "-1..3")),
    ("last id", VALUE, ("topk_idx", "-7", "[15, 1]", "-1..3")),
    ("x not a tensor", TYPE, ("x ", "list", "expected")),
    ("ids not a tensor", TYPE, ("topk_idx", "list", "expected")),
    ("weights not a tensor", TYPE, ("topk_weights", "float", "expected")),
    ("integer weights", TYPE, ("topk_weights", "int64", "expected")),
    ("sparse x", TYPE, ("x ", "sparse")),
    ("tag not a string", TYPE, ("tag", "float")),
]


@pytest.mark.parametrize(("ranks", "bad_rank"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(("what", "kinds", "words"), BAD_DISPATCH, ids=[case[0] for case in BAD_DISPATCH])
def test_bad_dispatch(
    pool: RankPool, what: str, kinds: tuple[str, ...], words: tuple[str, ...], ranks: int, bad_rank: int
) -> None:
    results = pool.run(ranks, errors.bad_shape, what, bad_rank)
    for rank, error in enumerate(results):
        if rank == bad_rank:
            check(error, kinds, ("dispatch", f"rank {bad_rank}", *words))
        else:
            check(error, PEER, ("dispatch", f"rank {bad_rank}", *words))


def test_bad_dispatch_on_one_rank(pool: RankPool) -> None:
    check(pool.run(1, errors.bad_shape, "too large K")[0], VALUE, ("dispatch", "rank 0", "K = 3"))


def test_bad_input_on_two_ranks(pool: RankPool) -> None:
    first, second, third, fourth = pool.run(4, errors.bad_on_two_ranks)
    check(second, VALUE, ("11", "rank 1"))
    check(third, VALUE, ("12", "rank 2"))
    for error in (first, fourth):
        check(error, PEER, ("-1..3",))
        assert error.message.count("rank 1") + error.message.count("rank 2") >= 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_errors_in_a_row(pool: RankPool, ranks: int) -> None:
    for rank, names in enumerate(pool.run(ranks, errors.many_errors_in_a_row, 24)):
        assert names == ["BadValue" if turn % ranks == rank else "PeerAborted" for turn in range(24)]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hidden", ("7 on rank", "8 on rank")),
        ("dtype", ("bfloat16 on rank", "float32 on rank")),
        ("weights", ("weights", "none on rank")),
        ("weight dtype", ("weights", "float64", "float32")),
        ("tag", ("tag",)),
        ("tag on one rank", ("tag",)),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_call_mismatch(pool: RankPool, ranks: int, what: str, words: tuple[str, ...]) -> None:
    for error in pool.run(ranks, errors.mismatch, what):
        check(error, ("CallMismatch", "RuntimeError"), ("dispatch", "rank", *words))


def test_equal_tags(pool: RankPool) -> None:
    pool.run(2, errors.equal_tags)


# ---------------------------------------------------------------------------------------------------- combine

BAD_Y: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("a row too few", VALUE, ("y", "expected")),
    ("a row too many", VALUE, ("y", "expected")),
    ("one dimension", VALUE, ("y", "expected")),
    ("integer y", TYPE, ("y", "int32")),
    ("y not a tensor", TYPE, ("y", "NoneType")),
    ("too wide by dtype", VALUE, ("y", "64", "32")),
]
BAD_W: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("weights of another shape", VALUE, ("topk_weights", "[6, 1]", "[6, 2]")),
    ("weights of another T", VALUE, ("topk_weights", "[5, 2]", "[6, 2]")),
    ("integer weights", TYPE, ("topk_weights", "int32")),
    ("weights not a tensor", TYPE, ("topk_weights", "list")),
]


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(("what", "kinds", "words"), BAD_Y, ids=[case[0] for case in BAD_Y])
def test_bad_y(
    pool: RankPool, what: str, kinds: tuple[str, ...], words: tuple[str, ...], bad_rank: int
) -> None:
    """The owner raises, the ranks whose tokens it holds raise with its reason, the third isn't concerned."""
    results = pool.run(3, errors.bad_combine, what, bad_rank)
    check(results[bad_rank], kinds, ("combine", f"rank {bad_rank}", *words))
    check(results[1 - bad_rank], PEER, ("combine", f"rank {bad_rank}", *words))
    assert results[2] is None


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize(("what", "kinds", "words"), BAD_W, ids=[case[0] for case in BAD_W])
def test_bad_combine_weights(
    pool: RankPool, what: str, kinds: tuple[str, ...], words: tuple[str, ...], bad_rank: int
) -> None:
    """Weights concern only their own rank."""
    results = pool.run(3, errors.bad_combine, what, bad_rank)
    check(results.pop(bad_rank), kinds, ("combine", f"rank {bad_rank}", *words))
    assert results == [None, None]


@pytest.mark.parametrize(("what", "words"), [("dtype", ("bfloat16", "float32")), ("hidden", ("7", "8"))])
def test_owners_disagree_on_y(pool: RankPool, what: str, words: tuple[str, ...]) -> None:
    for error in pool.run(2, errors.combine_mismatch, what):
        check(error, ("CallMismatch", "RuntimeError"), ("combine", "y", *words))


@pytest.mark.parametrize("ranks", [1, 3])
def test_handle_expires(pool: RankPool, ranks: int) -> None:
    for rank, (twice, expired) in enumerate(pool.run(ranks, errors.combine_twice)):
        check(twice, ("HandleExpired", "RuntimeError"), ("combine", f"rank {rank}"))
        check(expired, ("HandleExpired", "RuntimeError"), ("combine", f"rank {rank}", "depth", "2"))


def test_wrong_objects(pool: RankPool) -> None:
    for results in pool.run(2, errors.wrong_objects):
        group, handle, big_id, float_ids, flat_ids, name = results
        check(group, TYPE, ("dispatch", "group", "str", "EPGroup"))
        check(handle, TYPE, ("combine", "handle", "str"))
        check(big_id, VALUE, ("send_counts", "9", "-1..3", "[0, 1]"))
        check(float_ids, TYPE, ("send_counts", "topk_idx", "float32"))
        check(flat_ids, VALUE, ("send_counts", "topk_idx", "[1]"))
        assert name is not None and "RuntimeError" in name.kinds and "no such group" in name.message, name


def test_bad_empty(pool: RankPool) -> None:
    for tokens, hidden, wide, negative, integers in pool.run(2, errors.bad_empty):
        check(tokens, VALUE, ("empty", "17", "16"))
        check(hidden, VALUE, ("empty", "hidden = 9", "32"))
        check(wide, VALUE, ("empty", "64", "32"))
        check(negative, VALUE, ("empty", "-1"))
        check(integers, TYPE, ("empty", "int32"))


# --------------------------------------------------------------------------------------------------- creation

DIFFERENT: list[tuple[str, Any, Any]] = [
    ("num_experts", 4, 5),
    ("top_k", 2, 3),
    ("max_tokens", 16, 17),
    ("hidden_size", 8, 9),
    ("dtype", torch.float32, torch.bfloat16),
    ("max_recv_rows", 40, 41),
    ("depth", 2, 3),
    ("record_format", "compact", "portable"),
    ("protocol", "pull", "push"),
    ("transport", "cpu-shm", "collective"),
    ("timeout", 20.0, 30.0),
    ("warmup_timeout", 20.0, 30.0),
]


@pytest.mark.parametrize(("field", "usual", "other"), DIFFERENT, ids=[case[0] for case in DIFFERENT])
def test_arguments_differ_between_ranks(pool: RankPool, field: str, usual: Any, other: Any) -> None:
    values = [usual, usual, other]
    for error in pool.run(3, errors.create_with, field, values):
        words = [str(value).removeprefix("torch.") for value in (usual, other)]
        check(error, VALUE, ("EPGroup", field, "rank", *words))


BAD_ARGUMENTS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("num_experts", 0, ("0",)),
    ("num_experts", -3, ("-3",)),
    ("top_k", 0, ("0",)),
    ("max_tokens", -1, ("-1",)),
    ("hidden_size", 0, ("0",)),
    ("max_recv_rows", -1, ("-1",)),
    ("depth", 0, ("0",)),
    ("transport", "telepathy", ("telepathy", "cpu-shm", "collective")),
    ("record_format", "loose", ("loose", "compact", "portable", "line")),
    ("protocol", "shove", ("shove", "auto", "push", "pull")),
    ("timeout", 0.0, ("0",)),
    ("timeout", -2.0, ("-2",)),
    ("dtype", torch.int32, ("int32",)),
    ("dtype", "float32", ("str",)),
    ("num_experts", 2.5, ("2.5",)),
    ("top_k", "2", ("str",)),
]


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(("field", "value", "words"), BAD_ARGUMENTS)
def test_bad_arguments(
    pool: RankPool, field: str, value: Any, words: tuple[str, ...], everywhere: bool
) -> None:
    """A bad argument is an error on every rank, also where only one rank has it."""
    good = USUAL.kwargs(2)[field] if field != "transport" else "auto"
    results = pool.run(2, errors.create_with, field, [value if everywhere else good, value])
    for rank, error in enumerate(results):
        assert error is not None and "MoeA2AError" in error.kinds, f"rank {rank}: {error}"
        assert {"BadValue", "BadType", "PeerAborted"} & set(error.kinds), f"rank {rank}: {error}"
        check(error, (), ("EPGroup", field, *words))
    kinds = results[1].kinds
    assert "BadValue" in kinds or "BadType" in kinds


@pytest.mark.parametrize("ranks", [1, 3])
def test_too_little_memory(pool: RankPool, ranks: int) -> None:
    for error in pool.run(ranks, errors.create_huge):
        check(error, ("OutOfMemory", "MemoryError"), ("EPGroup", "need", "free"), 20.0)
        assert len(re.findall(r"\d+(?:\.\d+)?", error.message)) >= 2


# --------------------------------------------------------------------------------------- timeouts and signals


def check_missing(results: list[Caught | None], operation: str) -> None:
    """Whoever noticed first has the timeout; the others were told by it, and both name rank 1 and the call."""
    for error in results:
        check(error, ("PeerLost", "RuntimeError"), (operation, "call 2", "rank 1"), 1.0 + 2.5)
        assert error is not None and error.seconds >= 0.9
    late = [error for error in results if error is not None and "PeerTimeout" in error.kinds]
    assert late
    for error in late:
        check(error, ("PeerTimeout", "TimeoutError"), (operation, "call 2", "rank 1", "1"), 1.0 + 2.5)


def test_peer_does_not_come_to_dispatch(pool: RankPool) -> None:
    first, absent, third = pool.run(3, errors.absent_from_dispatch, 1, 1.0)
    check_missing([first[0], third[0]], "dispatch")
    for error in first[1:] + third[1:]:
        check(error, ("GroupPoisoned", "RuntimeError"), ("dispatch", "rank 1"), 1.0)
    # The peers had sent their records before they gave up: the late rank's call 2 may still find all it needs.
    if absent[0] is not None:
        check(absent[0], ("PeerLost",), ("dispatch", "rank"), 1.0)
    check(absent[1], (), ("dispatch", "rank"), 1.0)
    assert {"PeerLost", "GroupPoisoned"} & set(absent[1].kinds), absent


def test_peer_does_not_come_to_combine(pool: RankPool) -> None:
    first, absent, third = pool.run(3, errors.absent_from_combine, 1, 1.0)
    check_missing([first[0], third[0]], "combine")
    for error in first[1:] + third[1:]:
        check(error, ("GroupPoisoned", "RuntimeError"), ("dispatch", "rank 1"), 1.0)
    check(absent[0], (), ("dispatch", "rank"), 1.0)
    assert {"PeerLost", "GroupPoisoned"} & set(absent[0].kinds)


def test_unequal_calls_are_an_error(pool: RankPool) -> None:
    for error in pool.run(2, errors.dispatch_meets_combine, 1.5):
        check(error, (), ("rank",), 1.5 + 2.5)
        assert {"PeerLost", "CallMismatch", "PeerTimeout", "GroupPoisoned"} & set(error.kinds), error


def test_first_call_has_its_own_timeout(pool: RankPool) -> None:
    assert pool.run(2, errors.late_first_call, 1.2) == [(None, None)] * 2
    (waiting, poisoned), (_, late) = pool.run(2, errors.late_first_call, 3.5)
    check(waiting, ("PeerTimeout",), ("dispatch", "call 1", "rank 1"), 2.5 + 2.0)
    assert waiting.seconds >= 2.4
    check(poisoned, ("GroupPoisoned",), ("rank 1",), 1.0)
    check(late, (), ("rank",), 1.0)
    assert {"PeerLost", "GroupPoisoned"} & set(late.kinds), late


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_case_48_interrupt_during_a_wait(pool: RankPool, operation: str) -> None:
    result, nothing = pool.run(2, errors.interrupted_wait, operation)
    assert nothing is None
    error, delay, counted = result
    assert error is not None and "KeyboardInterrupt" in error.kinds, error
    assert delay < 2.0, f"{delay:.1f} s from the signal to the exception"
    assert counted > 50, f"another thread got to run {counted} times in a second"


# Each costs a start of two ranks.
@pytest.mark.parametrize(
    ("proc_closed", "where"),
    crossed({"by proc": False, "by socket": True}, ["dispatch", "combine"], strength=1),
)
def test_peer_dies(small: RankPool, where: str, proc_closed: bool) -> None:
    survivor, dead = small.run(2, errors.peer_killed, where, proc_closed, deaths=(1,))
    assert dead == -signal.SIGKILL
    check(survivor, ("PeerLost", "RuntimeError"), (where, "rank 1"), 0.3 + 4.0)


# ------------------------------------------------------------------------------------------------- life cycle


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_close(pool: RankPool, ranks: int) -> None:
    for found in pool.run(ranks, errors.closing):
        assert found.pop("close again") is None
        for use, error in found.items():
            assert error is not None and "GroupClosed" in error.kinds, f"{use}: {error}"
            assert "RuntimeError" in error.kinds and "closed" in error.message, f"{use}: {error}"


def test_peer_closed(pool: RankPool) -> None:
    results = pool.run(3, errors.peer_closed)
    assert results[0] is None
    for error in results[1:]:
        check(error, ("PeerLost", "RuntimeError"), ("dispatch", "rank 0"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_left_by_create_and_close(pool: RankPool, ranks: int) -> None:
    for seen, names in pool.run(ranks, errors.cycles, 6):
        assert names == 0
        # The first cycle may open what the process keeps for good.
        assert all(now == seen[1] for now in seen[2:]), seen


def test_window_tensor_outlives_the_group(pool: RankPool) -> None:
    assert pool.run(2, errors.window_tensor_after_close) == [5 * 8 * 2.0] * 2


def test_forked_child(pool: RankPool) -> None:
    for use, close in pool.run(2, errors.forked_child):
        assert use.startswith("GroupClosed") and "fork" in use, use
        assert close == "nothing raised" or close.startswith("GroupClosed"), close


def test_errors_have_the_bases_that_callers_expect() -> None:
    expected = {
        "BadValue": ValueError,
        "BadType": TypeError,
        "PeerAborted": RuntimeError,
        "CallMismatch": RuntimeError,
        "PadTooSmall": ValueError,
        "PeerLost": RuntimeError,
        "PeerTimeout": TimeoutError,
        "GroupPoisoned": RuntimeError,
        "GroupClosed": RuntimeError,
        "HandleExpired": RuntimeError,
        "OutOfMemory": MemoryError,
        "TransportUnavailable": RuntimeError,
    }
    for name, base in expected.items():
        kind = getattr(moe_a2a.errors, name)
        assert issubclass(kind, base) and issubclass(kind, moe_a2a.errors.MoeA2AError)
    assert issubclass(moe_a2a.errors.PeerTimeout, moe_a2a.errors.PeerLost)
    assert sys.modules["moe_a2a.errors"] is moe_a2a.errors
