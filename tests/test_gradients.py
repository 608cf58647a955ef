"""Gradients of dispatch, combine, moe and moe_apply: by finite differences, by who wants them, and by how backward is run.

Cases are numbered as in the collection of reported faults that test_cases_abch.py names.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from pool import RankPool
from rank_bodies import gradients as bodies
from rank_bodies import moe_bodies
from rank_bodies.moe_bodies import Layer
from test_errors import PEER, TYPE, VALUE, check

SMALL = {2: (2, 3), 4: (2, 0, 3, 1)}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped")


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks of their own for the tests that kill one."""
    ranks = RankPool(4)
    yield ranks
    problems = ranks.close()
    assert not problems, "\n".join(problems)


def fp64(tokens: tuple[int, ...], **changes: object) -> Layer:
    values = {"hidden": 2, "inner": 2, "dtype": "float64", "weight_dtype": "float64", "bias": True, **changes}
    return Layer(tokens, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", moe_bodies.WAYS)
@pytest.mark.parametrize("ranks", SMALL)
def test_finite_differences(pool: RankPool, ranks: int, way: str) -> None:
    assert min(pool.run(ranks, bodies.differences, fp64(SMALL[ranks]), way)) > 150


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finite_differences_of_every_kind_of_expert(pool: RankPool, activation: str) -> None:
    kinds = itertools.product((True, False), (False, True), (False, True))
    for number, (gated, transposed, interleaved) in enumerate(kinds):
        if (interleaved or activation == "clamped") and not gated:
            continue
        layer = fp64(
            (1, 2),
            experts=3,
            activation=activation,
            gated=gated,
            transposed=transposed,
            interleaved=interleaved,
            bias=number % 2 == 0,
            seed=number,
        )
        pool.run(2, bodies.differences, layer, ("fused", "recomputed")[number // 2 % 2])


def test_case_49_gradients_of_routing_weights(pool: RankPool) -> None:
    layer = fp64((5,) * 4, experts=8, top_k=3, hidden=8, inner=1, seed=49)
    pool.run(4, bodies.differences, layer, "fused")
    pool.run(4, bodies.weight_gradients, layer, tuple(moe_bodies.WAYS))


def test_case_02_rank_sends_nothing(pool: RankPool) -> None:
    layer = Layer((0, 7, 0, 33), experts=8, hidden=64, inner=16)
    pool.run(4, moe_bodies.layers_match, [layer], tuple(moe_bodies.WAYS), looser=3.0)


def test_case_04_rank_receives_nothing(pool: RankPool) -> None:
    layer = Layer((8, 8), experts=4, top_k=1, hidden=16, routing="low", drop=0.0)
    pool.run(2, bodies.idle_rank, layer, tuple(moe_bodies.WAYS))


@pytest.mark.parametrize(("ranks", "experts"), [(3, 7), (8, 30), (8, 4), (2, 1)])
def test_case_09_experts_not_divisible(pool: RankPool, ranks: int, experts: int) -> None:
    layer = Layer((9,) * ranks, experts=experts, hidden=16)
    pool.run(ranks, moe_bodies.layers_match, [layer], tuple(moe_bodies.WAYS), looser=3.0)


def test_case_10_dropped_slots_with_nan_weights(pool: RankPool) -> None:
    layer = Layer((8, 8), experts=4, hidden=16, drop=0.3, seed=10)
    pool.run(2, bodies.weight_gradients, layer, tuple(moe_bodies.WAYS))


def test_case_11_rows_with_only_dropped_slots(pool: RankPool) -> None:
    layer = Layer((6,) * 4, experts=8, top_k=4, blank=(0, 5), seed=11)
    pool.run(4, bodies.weight_gradients, layer, tuple(moe_bodies.WAYS))


def test_case_13_same_expert_twice(pool: RankPool) -> None:
    layer = Layer(
        (4, 4),
        4,
        3,
        8,
        dtype="float64",
        weight_dtype="float64",
        routing="1,1,3",
        weights=(0.2, 0.3, 0.5),
        drop=0.0,
    )
    pool.run(2, bodies.weight_gradients, layer, tuple(moe_bodies.WAYS))


LETTERS = ["".join(letters) for n in range(4) for letters in itertools.combinations("xwe", n)]


def test_every_combination_of_what_ranks_want(pool: RankPool) -> None:
    combinations = list(itertools.product(LETTERS, LETTERS))
    assert pool.run(2, bodies.frozen, Layer((4, 5), seed=3), "fused", combinations) == [64, 64]


@pytest.mark.parametrize("way", ["recomputed", "later", "beside", "applied"])
def test_what_three_ranks_want(pool: RankPool, way: str) -> None:
    wants = [("e", "", "x"), ("", "", "w"), ("x", "", ""), ("", "we", ""), ("", "", "e"), ("", "", "")]
    pool.run(3, bodies.frozen, Layer((4, 0, 5), experts=4, seed=3), way, wants)


@pytest.mark.parametrize("way", ["parts", "weights travel", "padded", "parts later"])
def test_what_ranks_want_of_dispatch_and_combine(pool: RankPool, way: str) -> None:
    """All take part where one wants gradients of something that dispatch was given."""
    known = "xw" if way in ("weights travel", "padded") else "x"
    combinations = [
        both
        for both in itertools.product(LETTERS, LETTERS)
        if any(letter in "".join(both) for letter in known) or both == ("", "") or both == ("e", "e")
    ]
    pool.run(2, bodies.frozen, Layer((4, 5), seed=3), way, combinations)


@pytest.mark.parametrize("letter", "ew")
def test_gradients_that_only_one_rank_has(pool: RankPool, letter: str) -> None:
    layer = Layer((4, 5), seed=3, drop=0.0)
    error, _ = pool.run(2, bodies.only_one_wants_what_dispatch_cannot_know, layer, letter)
    check(error, ("PeerTimeout",), ("backward", "rank 1"))


@pytest.mark.parametrize("under_no_grad", [False, True], ids=["no backward", "no_grad"])
@pytest.mark.parametrize("way", ["fused", "parts"])
def test_a_rank_without_backward_is_named(pool: RankPool, way: str, under_no_grad: bool) -> None:
    first, _, third = pool.run(3, bodies.no_backward, Layer((4, 5, 3), drop=0.0), way, under_no_grad)
    for error in (first, third):
        check(error, ("PeerLost",), ("backward", "rank 1"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_recompute_on_some_ranks(pool: RankPool, ranks: int) -> None:
    layers = [Layer((4, 5, 3)[:ranks], seed=5), Layer((4, 5, 3)[:ranks], routing="one", drop=0.0)]
    pool.run(ranks, bodies.recompute_on_some, layers)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", ["parts", "applied"])
def test_ranks_without_rows_or_experts_take_part(pool: RankPool, ranks: int, way: str) -> None:
    pool.run(ranks, bodies.without_rows_nobody_is_cut_off, way)


@pytest.mark.parametrize("way", moe_bodies.WAYS)
def test_case_33_same_group_forward_and_backward(pool: RankPool, way: str) -> None:
    layer = Layer((8, 8), hidden=32, experts=4, seed=33)
    pool.run(2, bodies.many_steps, layer, way, 15)
    pool.run(2, bodies.accumulate, layer, way)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", moe_bodies.WAYS)
def test_case_33_long(pool: RankPool, way: str, ranks: int) -> None:
    pool.run(ranks, bodies.many_steps, Layer((8, 8, 0, 3)[:ranks], hidden=32, experts=4), way, 300)


@pytest.mark.parametrize("way", moe_bodies.WAYS)
def test_case_51_odd_layouts_of_gradients(pool: RankPool, way: str) -> None:
    pool.run(2, bodies.odd_gradients, Layer((8, 8), hidden=16, drop=0.1, seed=51), way)


def test_several_groups_in_one_graph(pool: RankPool) -> None:
    pool.run(3, bodies.interleaved_groups, Layer((4, 0, 6), seed=2), 4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", moe_bodies.WAYS)
def test_case_52_checkpoint(pool: RankPool, way: str, reentrant: bool) -> None:
    pool.run(4, bodies.checkpointed, Layer((3, 0, 6, 2), seed=52), way, reentrant)


@pytest.mark.parametrize("way", ["fused", "beside", "later", "parts", "weights travel", "parts later"])
def test_case_52_selective_checkpoint_sends_nothing_again(pool: RankPool, way: str) -> None:
    for alone, calls in pool.run(2, bodies.selectively, Layer((3, 5), seed=52), way):
        assert alone == calls > 0


@pytest.mark.parametrize("way", ["fused", "parts"])
def test_two_micro_batches_under_way(pool: RankPool, way: str) -> None:
    pool.run(3, bodies.micro_batches, (Layer((4, 5, 3), seed=1), Layer((4, 2, 0), seed=2)), way)


@pytest.mark.parametrize("way", moe_bodies.WAYS)
def test_case_65_results_may_be_written_to(pool: RankPool, way: str) -> None:
    pool.run(2, bodies.written_to, Layer((4, 5), seed=65), way)


def test_case_65_rows_may_be_written_to(pool: RankPool) -> None:
    pool.run(2, bodies.rows_written_to, Layer((4, 5), seed=65))


@pytest.mark.parametrize("way", moe_bodies.WAYS)
def test_case_68_inference_first(pool: RankPool, way: str) -> None:
    pool.run(2, bodies.modes, Layer((4, 5), seed=68), way)


@pytest.mark.parametrize("ranks", [1, 3])
def test_window_tensors_in_training(pool: RankPool, ranks: int) -> None:
    pool.run(ranks, bodies.window_training, Layer((4, 5, 3)[:ranks], seed=4), 12)


@pytest.mark.parametrize("what", bodies.BAD)
def test_bad_arguments(pool: RankPool, what: str) -> None:
    word = bodies.BAD[what][0]
    for ranks, bad_rank in ((2, 1), (3, 0)):
        for rank, error in enumerate(pool.run(ranks, bodies.bad_argument, what, bad_rank)):
            if rank == bad_rank:
                assert error is not None
                check(
                    error,
                    TYPE if "BadType" in error.kinds else VALUE,
                    (f"rank {bad_rank}", word, "moe_a2a.moe"),
                )
            else:
                check(error, PEER, (f"rank {bad_rank}", word))


NOT_FUSED: dict[str, dict[str, Any]] = {
    "line": {"record_format": "line"},
    "collective": {"transport": "collective"},
}


@pytest.mark.parametrize("how", NOT_FUSED)
def test_bad_arguments_where_calls_are_not_fused(pool: RankPool, how: str) -> None:
    """They are found before anything is sent, in one call on all ranks."""
    for what, (word, _) in bodies.BAD.items():
        for rank, error in enumerate(pool.run(2, bodies.bad_argument, what, 1, NOT_FUSED[how])):
            assert error is not None, what
            if rank == 1:
                check(error, TYPE if "BadType" in error.kinds else VALUE, ("rank 1", word, "moe_a2a."))
                assert "rank -1" not in error.message
            else:
                check(error, PEER, ("rank 1", word))


@pytest.mark.parametrize("how", NOT_FUSED)
def test_experts_that_fail_where_calls_are_not_fused(pool: RankPool, how: str) -> None:
    """The peers hear of it in combine, and not once more in a call of its own."""
    for rank, (error, calls) in enumerate(pool.run(3, bodies.experts_that_fail, NOT_FUSED[how])):
        assert error is not None and "no memory for products" in error.message and "rank 1" in error.message
        assert calls == 1
        assert ("PeerAborted" in error.kinds) == (rank != 1), error


@pytest.mark.parametrize("changes", [{}, *NOT_FUSED.values()], ids=["fused", *NOT_FUSED])
@pytest.mark.parametrize("how", ["none", "float64"])
@pytest.mark.parametrize("way", ["moe", "apply"])
def test_weights_that_differ_are_found_in_forward(
    pool: RankPool, way: str, how: str, changes: dict[str, Any]
) -> None:
    """Where backward would send them; on all ranks alike. Without gradients each rank's weights are its own affair."""
    for wants in ("x", "w", "xwe"):
        for first, second in pool.run(3, bodies.other_weights, changes, how, wants, way):
            assert first is not None and second is None
            assert "CallMismatch" in first.kinds and "topk_weights" in first.message, first
            assert "rank 1" in first.message and "float32" in first.message, first
    assert pool.run(3, bodies.other_weights, changes, how, "", way) == [(None, None)] * 3


def test_weights_that_differ_in_combine_are_found_in_backward(pool: RankPool) -> None:
    """Nothing of combine is known when rows are dispatched, and it sends nothing about weights."""
    for first, second in pool.run(3, bodies.other_weights, {}, "none", "xw", "parts"):
        assert first is None
        assert second is not None and "CallMismatch" in second.kinds and "topk_weights" in second.message


@pytest.mark.parametrize("kind", ["RuntimeError", "KeyboardInterrupt", "PeerAborted"])
@pytest.mark.parametrize("where", ["shared", "experts", "experts without gradients", "shared of moe_apply"])
def test_callables_that_raise(pool: RankPool, where: str, kind: str) -> None:
    first, second, third = pool.run(3, bodies.raising, where, kind)
    assert second is not None and kind in second.kinds and second.message == "wanted"
    for error in (first, third):
        check(error, PEER, ("rank 1", "wanted", kind))


def test_shared_may_call_the_group(pool: RankPool) -> None:
    pool.run(3, bodies.shared_calls_the_group)


def test_calls_that_do_not_go_together(pool: RankPool) -> None:
    for rank, (mixed, *weights) in enumerate(pool.run(2, bodies.mixed_calls)):
        check(mixed, ("CallMismatch",), ("dispatch", "moe_a2a.moe", f"rank {rank}"))
        for error in weights:
            check(error, ("CallMismatch",), ("weights",))


@pytest.mark.parametrize("way", ["fused", "parts"])
def test_a_rank_that_fails_in_backward_tells_the_others(pool: RankPool, way: str) -> None:
    first, second, third = pool.run(3, bodies.fails_in_backward, way)
    assert second is not None and "RuntimeError" in second.kinds and "memory" in second.message
    for error in (first, third):
        check(error, PEER, ("rank 1", "memory"))


@pytest.mark.parametrize(
    "where",
    [
        "in backward",
        pytest.param("before backward", marks=pytest.mark.slow),
        pytest.param("experts", marks=pytest.mark.slow),
    ],
)
def test_case_39_killed_inside_moe(four: RankPool, where: str) -> None:
    results = four.run(4, bodies.killed, where, deaths=(2,))
    assert results[2] == -signal.SIGKILL
    for error in results[:2] + results[3:]:
        check(error, ("PeerLost",), ("rank 2",), 7.0)


@pytest.mark.parametrize("way", ["fused", "padded", "applied"])
def test_memory_does_not_grow(pool: RankPool, way: str) -> None:
    for grown, held, found in pool.run(2, bodies.memory, Layer((40, 30), hidden=64, inner=64), way, 300):
        assert held == 0 and found < 100 and grown < 4 << 20, (grown, held, found)


def test_moe_apply_calls_experts_in_their_order_where_gradients_are_recorded(pool: RankPool) -> None:
    pool.run(2, bodies.in_the_order_of_experts)


def test_backward_of_equal_routings_in_another_order_is_noticed(pool: RankPool) -> None:
    """Their matrices are the same; the numbers of their calls aren't."""
    for said in pool.run(2, bodies.waited_for_in_another_order):
        assert said.startswith(("CallMismatch", "PeerAborted")) and "routing" in said, said


def test_a_frozen_rank_that_asks_to_recompute(pool: RankPool) -> None:
    pool.run(2, bodies.frozen_that_recomputes)


def test_results_of_another_form_than_rows(pool: RankPool) -> None:
    pool.run(2, bodies.results_of_another_form)


def test_ends_of_a_pending_call(pool: RankPool) -> None:
    for said in pool.run(2, bodies.ends_of_pending):
        assert "no second derivatives" in said["second"]
        assert said["once"] == said["again"] == "GroupClosed"


def test_a_handle_written_to_before_backward(pool: RankPool) -> None:
    (said,) = pool.run(1, bodies.handle_written_to)
    assert said.startswith("BadValue") and "handle" in said
