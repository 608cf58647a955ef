"""torch.compile: no call is dropped, none changes places, and the results are those of the calls uncompiled."""

from __future__ import annotations

import pytest
from pool import RankPool
from rank_bodies import compiled

BACKENDS = ["aot_eager", "inductor"]
PLAIN = ["plain", "unused", "branches"]
CHECKPOINTED = ["checkpointed", "checkpointed_branches", "checkpointed_unused", "selective"]


@pytest.mark.parametrize(
    ("backend", "programs"),
    [
        ("aot_eager", [*PLAIN, "exact"]),
        ("aot_eager", [*CHECKPOINTED, "checkpointed_exact"]),
        ("inductor", ["unused", "checkpointed_branches"]),
        pytest.param("inductor", [*PLAIN, "exact"], marks=pytest.mark.slow),
        pytest.param("inductor", [*CHECKPOINTED, "checkpointed_exact"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_are_those_of_the_uncompiled(pool: RankPool, backend: str, programs: list[str]) -> None:
    """No program finds another order of calls, whatever a rank does with the results; recomputed ones come when they are due."""
    ranks = pool.run(2, compiled.same_calls, backend, programs, timeout=300)
    for name in programs:
        forward, backward = zip(*(log.split("|") for log in ranks[0][name]), strict=True)
        assert forward[0] == forward[1], (name, ranks[0][name])
        assert ranks[0][name] == ranks[1][name], name


def test_a_rank_that_wants_no_gradient_takes_part(pool: RankPool) -> None:
    """Everything on rank 1 is frozen; its backward runs all the same, and rank 0's gradients are right."""
    for name, (_, log) in pool.run(
        2, compiled.same_calls, "aot_eager", ["plain"], True, (True, False), timeout=120
    )[1].items():
        assert log == "MDC|saassra", name


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpoint"])
def test_inductor_keeps_the_order_it_is_given(pool: RankPool, checkpointing: bool) -> None:
    """Rank 1 schedules as contrarily as it may: so what holds the order is what we add, not luck."""
    kept = pool.run(2, compiled.contrary_schedule, True, checkpointing, timeout=120)
    assert kept[0][0] == "ran" and kept[0] == kept[1]
    lost = pool.run(2, compiled.contrary_schedule, False, checkpointing, timeout=120)
    assert lost[0][0] != "ran" and lost[1][0] != "ran", lost


@pytest.mark.parametrize(
    ("backend", "program", "dynamic", "most"),
    [
        ("aot_eager", "plain", True, 4),
        ("aot_eager", "exact", True, 4),
        pytest.param("aot_eager", "plain", None, 4, marks=pytest.mark.slow),
        pytest.param("inductor", "plain", True, 4, marks=pytest.mark.slow),
        pytest.param("inductor", "exact", True, 4, marks=pytest.mark.slow),
    ],
)
def test_66_sizes_change(pool: RankPool, backend: str, program: str, dynamic: bool | None, most: int) -> None:
    """One graph and at most three more, no breaks; bitwise where the rest of the graph is computed as uncompiled."""
    for graphs, breaks in pool.run(2, compiled.sizes, backend, program, dynamic, timeout=280):
        assert 1 <= graphs <= most and breaks == 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_options(pool: RankPool, backend: str) -> None:
    pool.run(2, compiled.options, backend, timeout=200)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_modes(pool: RankPool, backend: str) -> None:
    pool.run(2, compiled.modes, backend, timeout=200)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_errors_have_their_names(pool: RankPool, backend: str) -> None:
    first, second = pool.run(2, compiled.bad_calls, backend, timeout=200)
    for name in ("moe", "dispatch"):
        assert first[name][0] == "PeerAborted" and "rank 1" in first[name][1]
        assert second[name][0] == "BadValue" and "topk_idx[3, 1] = 99" in second[name][1]
    for found in (first, second):
        assert found["pad"][0] == "PadTooSmall" and found["tag"][0] == "CallMismatch"
        assert found["window"][0] == "BadValue" and "group.empty" in found["window"][1]


@pytest.mark.parametrize("compile_it", [False, True], ids=["uncompiled", "compiled"])
def test_a_loss_that_ignores_the_layer_is_an_error_by_name(pool: RankPool, compile_it: bool) -> None:
    first, second = pool.run(2, compiled.ignored_result, compile_it, timeout=120)
    assert first[0] == "PeerTimeout" and "rank 1" in first[1].replace("ranks 1", "rank 1")
    assert second == ("", "")
