"""Parts of a model that are computed again in backward: with the same routing, or an error on every rank.

Cases are numbered as in the collection of reported faults that test_cases_abch.py names.
"""

from __future__ import annotations

import pytest
from pool import RankPool
from rank_bodies import moe_bodies
from rank_bodies import recompute as bodies
from rank_bodies.moe_bodies import Layer
from rank_bodies.recompute import Part

KINDS = {"reentrant": (True,), "not reentrant": (False,)}
NESTED = [(outer, inner) for outer in (False, True) for inner in (False, True)]
TOKENS = {1: (5,), 2: (4, 3), 4: (3, 4, 0, 2)}


def all_name_rank_1(found: list[list[bodies.Found]], least: int) -> None:
    """Every rank has the same named error for each time that rank 1's routing changed."""
    assert len(found[0]) >= least
    for rank, errors in enumerate(found):
        for time, call, error in errors:
            where = f"rank {rank}, computation {time}, call {call}: {error}"
            assert error is not None, where
            assert "CallMismatch" in error.kinds, where
            assert f"on rank {rank}: a checkpointed part" in error.message, where
            assert "topk_idx of rank 1 isn't what it was in call" in error.message, where
            assert f"(number {call + 1} of the part)" in error.message, where
            assert "outside of the checkpointed part" in error.message, where


@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("transport", ["cpu-shm", "collective"])
def test_case_52_a_near_tie_flips(pool: RankPool, transport: str, reentrant: bool, flips: bool) -> None:
    """As a router does it: uneven T, one id of rank 1. Without the flip the gradients are to the bit those of no checkpoint."""
    for error in pool.run(4, bodies.near_tie, transport, reentrant, flips):
        assert (error is not None) == flips
        assert error is None or (
            "CallMismatch" in error.kinds and "topk_idx of rank 1 isn't" in error.message
        )


@pytest.mark.parametrize("how", ["swapped", pytest.param("moved", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("way", moe_bodies.WAYS)
def test_every_way_of_calling(pool: RankPool, way: str, kinds: str, how: str) -> None:
    layer = Layer(TOKENS[4], drop=0.0, seed=52)
    all_name_rank_1(pool.run(4, bodies.flipped, layer, Part(way, KINDS[kinds]), how), 1)


@pytest.mark.parametrize("transport", ["cpu-shm", "collective"])
@pytest.mark.parametrize("kinds", [*KINDS.values(), *NESTED, (True, False, True)])
def test_several_calls_in_nested_parts(pool: RankPool, kinds: tuple[bool, ...], transport: str) -> None:
    layer = Layer(TOKENS[2], drop=0.0, seed=52)
    part = Part(kinds=kinds, calls=3, transport=transport)
    all_name_rank_1(pool.run(2, bodies.flipped, layer, part, "swapped"), 3 * len(kinds))


@pytest.mark.parametrize("kinds", [*KINDS.values(), (True, True)])
def test_backward_twice(pool: RankPool, kinds: tuple[bool, ...]) -> None:
    """With retain_graph all is computed again for each backward, and compared again."""
    part = Part("parts", kinds, calls=2, backwards=2)
    layer = Layer(TOKENS[2], drop=0.0, seed=52)
    all_name_rank_1(pool.run(2, bodies.flipped, layer, part, "swapped"), 4 * len(kinds))


@pytest.mark.parametrize("ranks", TOKENS)
@pytest.mark.parametrize("kinds", [*KINDS.values(), *NESTED])
def test_the_same_as_without_checkpoints(pool: RankPool, kinds: tuple[bool, ...], ranks: int) -> None:
    for tokens in (TOKENS[ranks], (0,) * ranks):
        for way in ("fused", "parts"):
            part = Part(way, kinds, calls=2)
            times = pool.run(ranks, bodies.same_as_plain, Layer(tokens, seed=52), part)
            assert times == [1 + len(kinds)] * ranks


@pytest.mark.parametrize("transport", ["cpu-shm", "collective"])
@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_no_other_routing(pool: RankPool, kinds: str, transport: str) -> None:
    pool.run(2, bodies.quiet, Layer(TOKENS[2], seed=52), Part(kinds=KINDS[kinds], transport=transport))


def test_checkpointing_itself_notices_too(pool: RankPool) -> None:
    """Where the stack says nothing: torch compares the shapes of what is saved, one of which is a digest of the routing."""
    layer, part = Layer(TOKENS[4], drop=0.0, seed=52), Part()
    for errors in pool.run(4, bodies.flipped, layer, part, "swapped", True):
        for _, _, error in errors:
            assert error is not None and "CheckpointError" in error.kinds
            assert "different metadata" in error.message


def test_calls_outside_of_checkpoints_do_not_look_at_the_stack(pool: RankPool) -> None:
    for found in pool.run(2, bodies.calls_that_look, Layer(TOKENS[2], seed=52)):
        assert found["plain"] == found["without gradients"] == 0 < found["checkpointed"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_compiled_function_inside(pool: RankPool, reentrant: bool) -> None:
    layer = Layer(TOKENS[2], drop=0.0, weight_dtype=None, bias=False, seed=52)
    for same, other in pool.run(2, bodies.around_compiled, layer, reentrant, timeout=120):
        assert same is None
        assert other is not None and "CallMismatch" in other.kinds and "topk_idx of rank 1" in other.message
