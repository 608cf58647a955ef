"""pad_to, align, quantize, routing and async_op used wrongly: who raises what, and that the group goes on after it."""

from __future__ import annotations

from typing import Any

import pytest
from lanes import crossed
from pool import RankPool
from rank_bodies import errors, options
from rank_bodies.inputs import GroupSpec
from test_errors import BAD_W, BAD_Y, PEER, TYPE, VALUE, check

SPECS = {
    "pull": GroupSpec(4, 2, 16, 8, protocol="pull"),
    "push": GroupSpec(4, 2, 16, 8, protocol="push", record_format="line"),
    "waves": GroupSpec(4, 2, 16, 8, protocol="push", mix=5, recv_rows=3, record_format="portable"),
    "pull waves": GroupSpec(4, 2, 16, 8, protocol="pull", recv_rows=3),
    "collective": GroupSpec(4, 2, 16, 8, transport="collective"),
}
MISMATCH = ("CallMismatch", "RuntimeError")
EXPIRED = ("HandleExpired", "RuntimeError")
LATER = {"at once": False, "async": True}

BAD_OPTIONS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("negative pad_to", VALUE, ("pad_to", "-2")),
    ("pad_to -1", VALUE, ("pad_to", "-1")),
    ("huge pad_to", VALUE, ("pad_to", "2147483648")),
    ("pad_to a string", TYPE, ("pad_to",)),
    ("align 0", VALUE, ("align", "0")),
    ("negative align", VALUE, ("align", "-4")),
    ("huge align", VALUE, ("align", "1048577")),
    ("align a string", TYPE, ("align",)),
    ("unknown quantize", VALUE, ("quantize", "'int4'", "'int8'", "'fp8_e4m3'")),
    ("quantize a number", VALUE, ("quantize", "1")),
    ("both", VALUE, ("both topk_idx and routing",)),
    ("neither", VALUE, ("neither topk_idx nor routing",)),
    ("routing a tensor", TYPE, ("routing", "Tensor", ".handle")),
    ("routing of another group", VALUE, ("routing", "another group")),
    ("routing of another T", VALUE, ("x ", "15", "16")),
    ("routing of another K", VALUE, ("topk_weights", "[16, 1]", "16, 2")),
    ("magic written to", VALUE, ("routing",)),
    ("tokens written to", VALUE, ("routing", "written to")),
    ("K written to", VALUE, ("routing", "written to")),
    ("ids written to", VALUE, ("routing", "written to")),
]


@pytest.mark.parametrize(
    ("later", "case", "spec"), crossed(LATER, {case[0]: case for case in BAD_OPTIONS}, ["pull", "collective"])
)
def test_bad_options(
    pool: RankPool, spec: str, case: tuple[str, tuple[str, ...], tuple[str, ...]], later: bool
) -> None:
    """The rank raises the reason, the others hear it."""
    what, kinds, words = case
    if what == "neither" and not later and spec != "collective":
        kinds, words = TYPE, ("topk_idx", "NoneType")
    for ranks, bad_rank in ((1, 0), (3, 1)):
        results = pool.run(ranks, options.bad_option, SPECS[spec], what, later, bad_rank)
        for rank, error in enumerate(results):
            check(error, kinds if rank == bad_rank else PEER, ("dispatch", f"rank {bad_rank}", *words))


@pytest.mark.parametrize(
    ("later", "align", "ranks", "spec"), crossed(LATER, [1, 16], [1, 2, 4], list(SPECS), strength=3)
)
def test_pad_too_small(pool: RankPool, spec: str, ranks: int, align: int, later: bool) -> None:
    """One row too many on one rank is an error on all, each time it is waited for; exactly full isn't."""
    rows = -(-8 * ranks // align) * align
    owner = {1: 0, 2: 0, 4: 1}[ranks]
    for seen in pool.run(ranks, options.pad_too_small, SPECS[spec], align, 1, later):
        for error in seen:
            words = ("dispatch", f"rank {owner}", f"{rows} rows", f"pad_to = {rows - 1}")
            check(error, ("PadTooSmall", "ValueError"), words)
            assert error is not None and ("with align" in error.message) == (align > 1)
    for seen in pool.run(ranks, options.pad_too_small, SPECS[spec], align, 0, later):
        assert seen in ([None], [None, None])


DIFFERENT = {
    "align": ("align", "2 on rank", "4 on rank"),
    "new routing": ("routing", "new on rank", "used again"),
    "other routing": ("routing", "used again", "digest"),
}


@pytest.mark.parametrize(("later", "what", "spec"), crossed(LATER, list(DIFFERENT), list(SPECS)))
def test_options_differ(pool: RankPool, spec: str, what: str, later: bool) -> None:
    words = DIFFERENT[what]
    for ranks in (2, 3):
        for error in pool.run(ranks, options.mismatch, SPECS[spec], what, later):
            check(error, MISMATCH, ("dispatch", *words))


QUANTIZED_DIFFERENT = {"quantize": ("None", "int8"), "scheme": ("fp8_e4m3", "int8")}


@pytest.mark.parametrize(("later", "what", "spec"), crossed(LATER, list(QUANTIZED_DIFFERENT), list(SPECS)))
def test_quantized_differ(pool: RankPool, spec: str, what: str, later: bool) -> None:
    words = QUANTIZED_DIFFERENT[what]
    for error in pool.run(2, options.mismatch, SPECS[spec], what, later):
        check(error, MISMATCH, ("dispatch", "quantize", *words))


@pytest.mark.parametrize("spec", SPECS)
def test_y_has_the_rows_of_padding(pool: RankPool, spec: str) -> None:
    for rank, error in enumerate(pool.run(3, options.padded_y, SPECS[spec])):
        assert error is not None
        if "PeerAborted" not in error.kinds:  # the others' refusals may be here first
            check(
                error,
                VALUE,
                ("combine", "y", f"[{200 + rank}, H]" if spec == "collective" else f"N = {200 + rank}"),
            )


COMBINES: dict[str, dict[str, Any]] = {
    "pull": {"protocol": "pull"},
    "pull waves": {"protocol": "pull", "recv_rows": 3, "record_format": "portable"},
    "push": {"protocol": "push"},
    "push lines": {"protocol": "push", "record_format": "line"},
    "mixed waves": {"protocol": "push", "mix": 5, "recv_rows": 3},
    "collective": {"transport": "collective"},
}


@pytest.mark.parametrize(
    ("later", "bad_rank", "case", "how"),
    crossed(LATER, [0, 1], {case[0]: case for case in BAD_Y + BAD_W}, list(COMBINES)),
)
def test_bad_combine(
    pool: RankPool, how: str, case: tuple[str, tuple[str, ...], tuple[str, ...]], bad_rank: int, later: bool
) -> None:
    """As in test_errors, however the rows travel: a bad y concerns whoever has rows there, bad weights nobody else."""
    what, kinds, words = case
    for _ in range(2):
        results = pool.run(3, errors.bad_combine, what, bad_rank, later, **COMBINES[how])
        check(results[bad_rank], kinds, ("combine", f"rank {bad_rank}", *words))
        if case in BAD_Y:
            check(results[1 - bad_rank], PEER, ("combine", f"rank {bad_rank}", *words))
        else:
            assert results[1 - bad_rank] is None
        assert results[2] is None


@pytest.mark.parametrize(
    ("later", "what", "spec"),
    crossed(LATER, {"dtype": ("dtype", "bfloat16", "float32"), "hidden": ("hidden", "7", "8")}, list(SPECS)),
)
def test_owners_disagree_on_y(pool: RankPool, spec: str, what: tuple[str, ...], later: bool) -> None:
    for _ in range(2):
        for error in pool.run(2, errors.combine_mismatch, what[0], later, SPECS[spec]):
            check(error, MISMATCH, ("combine", *what[1:]))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("spec", [name for name in SPECS if name != "collective"])
def test_pending_calls_expire(pool: RankPool, spec: str, ranks: int) -> None:
    for rank, seen in enumerate(pool.run(ranks, options.pending_ends, SPECS[spec])):
        late, late_combine, twice, *weights = seen
        check(late, EXPIRED, ("dispatch", f"rank {rank}", "2 newer", "depth"))
        check(late_combine, EXPIRED, ("combine", f"rank {rank}", "2 newer", "depth"))
        check(twice, EXPIRED, ("combine", f"rank {rank}", "already"))
        if rank == 0:
            check(weights[0], VALUE, ("combine", "topk_weights", "[16, 3]", "[16, 2]", "rank 0"))
            check(weights[1], VALUE, ("topk_weights", "rank 0"))  # it says the same again
        else:
            assert weights == [None, None]


@pytest.mark.parametrize("ranks", [1, 3])
def test_calls_on_the_collective_transport_are_done_at_once(pool: RankPool, ranks: int) -> None:
    """Nothing is left to expire; what is wrong is said by the call."""
    for rank, seen in enumerate(pool.run(ranks, options.pending_ends, SPECS["collective"])):
        assert seen[:2] == [None, None]
        check(seen[2], EXPIRED, ("combine", f"rank {rank}", "already"))
        if rank == 0:
            assert len(seen) == 4
            check(seen[3], VALUE, ("combine", "topk_weights", "[16, 3]", "[16, 2]", "rank 0"))
        else:
            assert seen[3:] == [None, None]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_waiting_twice_gives_the_same(pool: RankPool, spec: str, ranks: int) -> None:
    pool.run(ranks, options.weights_before_wait, SPECS[spec])


def test_a_rank_without_memory_tells_its_peers_once(pool: RankPool) -> None:
    first, *others = pool.run(3, options.no_memory_on_one, SPECS["collective"])
    check(first, ("OutOfMemory", "MemoryError"), ("dispatch", "rank 0", "memory"))
    for error in others:
        check(error, PEER, ("dispatch", "rank 0", "memory"))
