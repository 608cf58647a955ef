"""Triton ranks, by Triton's interpreter: groups of nothing else, and groups in which C++ ranks take part.

The cases are those of the C++ ranks: the same bodies, and where a test says what each rank must see, the same test. Each runs
in at least one kind of group; `make test-long` runs every case in every kind.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import test_cases_abch
import test_cases_de
import test_ends
import test_errors
import test_gradients
import test_moe
import test_options
import test_parity
import torch
from pool import RankPool, address_of
from rank_bodies import cases, cases_de, errors, gradients, moe_bodies, options, triton_ranks, wrap
from rank_bodies import steps as bodies
from rank_bodies.inputs import GroupSpec, Step
from rank_bodies.moe_bodies import Layer
from test_parity import uneven, varied

import moe_a2a
from moe_a2a import devices, reference
from moe_a2a.op_host.triton import record, routing

# What each rank's kernels are, T Triton's and C C++'s; a group takes as many as it has ranks.
GROUPS = {"triton": "TTT", "mixed": "TCT", "mixed otherwise": "CTC"}


class Playing:
    """A pool whose groups have the kernels that ``kinds`` says.

    Attributes:
        launches: kernels launched by all ranks.
    """

    def __init__(self, pool: RankPool, kinds: str) -> None:
        self._pool, self._kinds = pool, kinds
        self.launches: Counter[str] = Counter()

    def run(
        self,
        world_size: int,
        body: str | Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        deaths: Sequence[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """As :meth:`RankPool.run`."""
        played = self._pool.run(
            world_size,
            triton_ranks.play,
            self._kinds[:world_size],
            address_of(body),
            args,
            kwargs,
            timeout=2 * timeout,
            deaths=deaths,
        )
        results = []
        for rank, outcome in enumerate(played):
            if rank in deaths:
                results.append(outcome)
                continue
            result, launches = outcome
            assert self._kinds[rank] == "T" or not launches, "a C++ rank launched kernels"
            self.launches += launches
            results.append(result)
        return results


Case = Callable[[RankPool], Any]


def groups(parametrised: dict[str, Case]) -> Any:
    """Every case in one kind of group, the kinds taken in turn; in the others it is slow."""
    return pytest.mark.parametrize(
        ("case", "kinds"),
        [
            pytest.param(
                case, kinds, id=f"{name}-{label}", marks=() if number % 3 == turn else pytest.mark.slow
            )
            for number, (name, case) in enumerate(parametrised.items())
            for turn, (label, kinds) in enumerate(GROUPS.items())
        ],
    )


def played(interpreted: RankPool, kinds: str, case: Case) -> Counter[str]:
    """Runs a case; returns what was launched."""
    playing = Playing(interpreted, kinds)
    case(cast(RankPool, playing))
    return playing.launches


# ----------------------------------------------------------------------------------------------- what ranks exchange

SPEC = GroupSpec(5, 3, 9, 20, "float64")
KINDS_OF_STEPS = [
    Step((5, 9), 3, 20, "float32", "float64", drop=0.2, rows="random"),
    Step((9, 3), 2, 7, "bfloat16", "bfloat16", routing="any", rows="random", seed=1),
    Step((0, 9), 3, 13, "float16", "float32", y_dtype="float32", rows="random", weigh="dispatch", seed=2),
    Step((9, 0), 1, 3, "float64", None, routing="one", target=4, rows="random", ids="int32", seed=3),
    Step((6, 7), 3, 1, "bfloat16", "float16", y_dtype="bfloat16", rows="tags", weigh="combine", seed=4),
    Step((1, 1), 3, 20, "float32", drop=1.0, rows="nan", seed=5),
]


def steps(pool: RankPool) -> None:
    """Every dtype of rows, weights and results, narrow rows, -1, duplicates, no tokens."""
    pool.run(2, bodies.steps_match, SPEC, KINDS_OF_STEPS, False)


def dirty_windows(pool: RankPool) -> None:
    """Every row of every slot holds NaN before."""
    spec = GroupSpec(4, 2, 5, 7)
    pool.run(2, bodies.steps_match, spec, [Step((5, 3), 2, 7, rows="random", seed=seed) for seed in range(2)])


def steps_of_three(pool: RankPool) -> None:
    three = [
        replace(step, tokens=uneven(3, 9, number), align=1 + number, pad=number if number % 2 else None)
        for number, step in enumerate(KINDS_OF_STEPS)
    ]
    pool.run(3, bodies.steps_match, SPEC, three, False)


def several_tiles(pool: RankPool) -> None:
    """More rows of a run than share a flag, and wider rows than a scale covers."""
    spec = GroupSpec(2, 2, 40, 300)
    kinds: list[dict[str, Any]] = [{}, {"quantize": "int8"}, {"quantize": "fp8_e4m3", "align": 8}]
    many = [Step((40, 37), 2, 300, rows="random", seed=seed, **kind) for seed, kind in enumerate(kinds)]
    pool.run(2, bodies.steps_match, spec, many, False)


def all_options(pool: RankPool, quantised: bool, ranks: int, **more: Any) -> None:
    """Padded, aligned, quantised, asynchronous, with a routing used again; random delays, nothing between the steps."""
    spec = GroupSpec(6, 3, 9, 12, **more)
    many = varied(ranks, spec, 10 if ranks == 2 else 7, ranks + quantised, quantised)
    if "recv_rows" in more:  # where rows go in waves all ranks are asynchronous or none
        many = [replace(step, later="") for step in many]
    assert pool.run(ranks, bodies.back_to_back, spec, many, 3.0, True) == [len(many)] * ranks


def orders(pool: RankPool, depth: int, order: str) -> None:
    spec = GroupSpec(6, 3, 9, 12, depth=depth)
    many = [Step(uneven(2, 9, seed), 3, 12, rows="random", seed=seed) for seed in range(6)]
    pool.run(2, bodies.interleaved, spec, order, many)


def wrap_of(pool: RankPool, ranks: int, code_max: int, first: int, depth: int, count: int) -> None:
    pool.run(ranks, wrap.across_the_wrap, "portable", "push", code_max, first, depth, count, timeout=100)


def late_cell(pool: RankPool) -> None:
    """Needs the codes of a slot to be cleared in a new lap."""
    assert pool.run(2, wrap.late_cell, "portable", "push") == [11.0, 11.0]


def waves(pool: RankPool, ranks: int, rows: int) -> None:
    taken = pool.run(ranks, cases_de.more_rows_than_the_window, {}, rows)
    # Of 5 steps with 8, 3, 8, 0 and 1 rows of each rank, all to one expert.
    assert max(taken) >= sum(max(1, -(-count * ranks // rows)) for count in (8, 3, 8, 0, 1)), taken


EXCHANGES: dict[str, Case] = {
    "every kind of step": steps,
    "windows full of NaN": dirty_windows,
    "three ranks": steps_of_three,
    "several tiles": several_tiles,
    "fewer experts than ranks": lambda pool: pool.run(
        3, bodies.steps_match, GroupSpec(2, 2, 5, 9), [Step((5, 0, 3), 2, 9, routing="any")], False
    ),
    "options": lambda pool: all_options(pool, False, 2),
    "options of three": lambda pool: all_options(pool, False, 3),
    "options quantised": lambda pool: all_options(pool, True, 2),
    "options in waves": lambda pool: all_options(pool, False, 2, recv_rows=5),
    "options around V": lambda pool: all_options(pool, False, 2, code_max=5),
    "two handles": lambda pool: orders(pool, 2, "D0 D1 C1 C0 D2 X2 D3 C3 D4 C4"),
    "three handles": lambda pool: orders(pool, 3, "D0 D1 D2 C1 C2 C0 D3 D4 C4 D5 C3 C5"),
    "two groups": lambda pool: pool.run(
        2, bodies.two_groups, GroupSpec(6, 2, 7, 20), GroupSpec(9, 3, 4, 50, "bfloat16")
    ),
    "operators": lambda pool: test_parity.test_operator_level(pool, 2),
    "wrap": lambda pool: wrap_of(pool, 2, 5, 1, 2, 16),
    "wrap of three slots": lambda pool: wrap_of(pool, 3, 9, 2, 3, 16),
    "the real wrap": lambda pool: wrap_of(pool, 2, 2**31 - 1, 2**31 - 4, 2, 8),
    "calls beyond 32 bits": lambda pool: wrap_of(pool, 2, 9, 2**32 - 3, 2, 8),
    "a late cell of the lap before": late_cell,
    "waves of three rows": lambda pool: waves(pool, 2, 3),
    "waves of one row": lambda pool: waves(pool, 3, 1),
    "no rows for a rank": test_cases_abch.test_case_04_rank_receives_zero_rows,
    "NaN weights of dropped slots": lambda pool: test_cases_abch.test_case_10_dropped_slots_with_nan_weights(
        pool, 0
    ),
    "the same expert twice": test_cases_abch.test_case_13_same_expert_twice,
    "width of ids": test_cases_abch.test_case_14_id_width,
    "strided": lambda pool: pool.run(2, cases.case_16, "transposed", torch.float32, torch.int32),
    "expanded": lambda pool: pool.run(2, cases.case_16, "one row expanded", torch.bfloat16, torch.int64),
    "small terms": lambda pool: test_cases_abch.test_case_55_small_terms_survive(pool, 4),
    "bits of floats": lambda pool: test_cases_de.test_22_24_bits_of_rows_mean_nothing(
        pool, {}, "float32", False
    ),
    "bits of bfloat16": lambda pool: test_cases_de.test_22_24_bits_of_rows_mean_nothing(
        pool, {}, "bfloat16", False
    ),
    "views": lambda pool: test_ends.test_views_of_window_tensors(pool, 2),
}


@groups(EXCHANGES)
def test_exchange(interpreted: RankPool, case: Case, kinds: str) -> None:
    launches = played(interpreted, kinds, case)
    assert {"publish", "await_records", "combine"} <= set(launches), launches


@pytest.mark.parametrize(
    ("kinds", "used"),
    [
        ("TT", {"publish", "await_records", "push", "take", "give", "combine"}),
        ("TC", {"publish", "await_records", "push", "pull", "give", "fetch", "combine"}),
    ],
)
def test_which_kernels_move_the_rows(interpreted: RankPool, kinds: str, used: set[str]) -> None:
    """What Triton ranks push is taken; what C++ ranks leave is pulled, or fetched."""
    playing = Playing(interpreted, kinds)
    playing.run(2, bodies.steps_match, SPEC, [Step((5, 9), 3, 20, rows="random")], False)
    assert set(playing.launches) == used


# --------------------------------------------------------------------------------------------- the layer, and backward

LAYER = Layer((5, 9), seed=3)

LAYERS: dict[str, Case] = {
    **{
        f"layer {way}": lambda pool, way=way: pool.run(2, moe_bodies.layers_match, [LAYER], (way,))  # type: ignore[misc]
        for way in moe_bodies.WAYS
    },
    "layer of three": lambda pool: pool.run(
        3, moe_bodies.layers_match, [Layer((6, 0, 9), seed=1)], ("fused", "later")
    ),
    "layer in waves": lambda pool: pool.run(
        3, moe_bodies.layers_match, [Layer((6, 3, 9), seed=2)], ("fused",), [{"recv_rows": 3}]
    ),
    "layer in bfloat16": lambda pool: pool.run(
        2, moe_bodies.layers_match, [Layer((5, 4), dtype="bfloat16", seed=4)], ("fused", "parts")
    ),
    "what ranks want": lambda pool: pool.run(
        3, gradients.frozen, Layer((4, 0, 5), experts=4, seed=3), "fused", [("e", "", "x"), ("", "we", "")]
    ),
    "what ranks want of parts": lambda pool: pool.run(
        2, gradients.frozen, Layer((4, 5), seed=3), "weights travel", [("x", ""), ("", "w"), ("e", "e")]
    ),
    "recompute on some": lambda pool: test_gradients.test_recompute_on_some_ranks(pool, 2),
    "without rows": lambda pool: test_gradients.test_ranks_without_rows_or_experts_take_part(
        pool, 3, "applied"
    ),
    "micro batches": lambda pool: pool.run(
        2, gradients.micro_batches, (Layer((4, 5), seed=1), Layer((4, 0), seed=2)), "later"
    ),
    "results of another form": test_gradients.test_results_of_another_form_than_rows,
    "small terms of a sum": lambda pool: test_moe.test_case_55_small_terms_of_a_sum(
        pool, "moe_apply", "bfloat16"
    ),
}


@groups(LAYERS)
def test_layer(interpreted: RankPool, case: Case, kinds: str) -> None:
    assert played(interpreted, kinds, case)["publish"]


# ---------------------------------------------------------------------------------------------------------- errors


def bad_dispatch(pool: RankPool, what: str) -> None:
    (case,) = (case for case in test_errors.BAD_DISPATCH if case[0] == what)
    test_errors.test_bad_dispatch(pool, *case, 3, 1)
    test_errors.test_bad_dispatch(pool, *case, 2, 0)


ERRORS: dict[str, Case] = {
    **{
        f"dispatch: {what}": lambda pool, what=what: bad_dispatch(pool, what)  # type: ignore[misc]
        for what in (
            "rows of x and ids",
            "too many tokens",
            "row too wide",
            "last id",
            "sparse x",
            "tag not a string",
        )
    },
    **{
        f"ranks differ: {what}": lambda pool, what=what, words=words: test_errors.test_call_mismatch(  # type: ignore[misc]
            pool, 3, what, words
        )
        for what, words in (
            ("hidden", ("7 on rank", "8 on rank")),
            ("weights", ("weights", "none on rank")),
            ("tag on one rank", ("tag",)),
        )
    },
    **{
        f"combine: {case[0]}": lambda pool, case=case, rank=rank: test_errors.test_bad_y(  # type: ignore[misc]
            pool, case[0], case[1], case[2], rank
        )
        for rank, case in enumerate((test_errors.BAD_Y[0], test_errors.BAD_Y[4]))
    },
    **{
        f"combine: {case[0]}": lambda pool, case=case, rank=rank: (  # type: ignore[misc]
            test_errors.test_bad_combine_weights(pool, case[0], case[1], case[2], rank)
        )
        for rank, case in zip((0, 2), (test_errors.BAD_W[0], test_errors.BAD_W[3]), strict=True)
    },
    "errors in a row": lambda pool: pool.run(2, errors.many_errors_in_a_row, 6),
    "results differ in dtype": lambda pool: test_errors.test_owners_disagree_on_y(
        pool, "dtype", ("bfloat16", "float32")
    ),
    "combined twice, or too late": lambda pool: test_errors.test_handle_expires(pool, 3),
    "pad too small": lambda pool: pool.run(
        2, options.pad_too_small, test_options.SPECS["waves"], 16, 1, False
    ),
    "options differ": lambda pool: pool.run(
        3, options.mismatch, GroupSpec(4, 2, 16, 8), "other routing", False
    ),
    "quantize differs": lambda pool: pool.run(2, options.mismatch, GroupSpec(4, 2, 16, 8), "scheme", False),
    "bad options": lambda pool: pool.run(
        3, options.bad_option, GroupSpec(4, 2, 16, 8), "ids written to", False, 1
    ),
    "swapped layers": lambda pool: test_cases_de.test_38c_swapped_layers(pool, {}),
    "aborts in flight": lambda pool: test_cases_de.test_aborts_among_calls_in_flight(pool, {}, 2),
    "experts that raise": lambda pool: test_gradients.test_callables_that_raise(
        pool, "experts", "RuntimeError"
    ),
    "a handle written to": lambda pool: (
        test_ends.test_combine_takes_the_routing_from_the_group_not_from_the_tensor(pool, "row")
    ),
    "x of any kind": lambda pool: test_ends.test_peers_hear_of_a_bad_x_of_any_kind(pool, "subclass"),
    "y of any kind": lambda pool: test_ends.test_peers_hear_of_a_bad_y_of_any_kind(pool, "bool"),
    "weights and another default device": test_ends.test_bad_weights_cost_only_the_rank_that_gave_them,
}


@groups(ERRORS)
def test_error(interpreted: RankPool, case: Case, kinds: str) -> None:
    assert played(interpreted, kinds, case)["publish"]


RECORDS: list[tuple[str, int, str]] = [
    ("X_LO", -4, "x region"),
    ("X_STRIDE", 2**30, "x region"),
    ("TOKENS", 2**30, "x region"),
    ("GENERATION", 7, "generation"),
    ("EPOCH_LO", 9, "call number"),
    ("MODE", 2, "the call is dispatch"),
    ("MODE", 3, "mode 3"),
    ("FLAG_ROWS", -1, "-1 rows a flag"),
    ("PAD_LO", -7, "pad_to"),
    ("KIND", 2, "kind of call"),
    ("DTYPE", 77, "77"),
]


@pytest.mark.parametrize(("word", "value", "says"), RECORDS)
def test_a_record_that_makes_no_sense(interpreted: RankPool, word: str, value: int, says: str) -> None:
    """Rank 0 is Triton's; where x is concerned it reads what a C++ rank has written, which alone has an x to be pulled."""
    playing = Playing(interpreted, "TC")
    text = playing.run(2, wrap.spoiled_record, "portable", word, value)[0]
    assert "rank 1" in text and says in text, text


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [("Y_LO", -512, "y region"), ("STRIDE", 2**30, "y region"), ("HIDDEN", 4, "H = 4")],
)
def test_a_cell_that_makes_no_sense(interpreted: RankPool, word: str, value: int, says: str) -> None:
    playing = Playing(interpreted, "TC")
    text = playing.run(2, wrap.spoiled_cell, "portable", word, value)[0]
    assert "rank 1" in text and says in text, text


# ------------------------------------------------------------------------------------------------------------- ends


def absent(pool: RankPool, operation: str) -> None:
    """Rank 1 doesn't come: the others name it, and the group takes no further calls. Seconds are long for the interpreter."""
    body = {"dispatch": errors.absent_from_dispatch, "combine": errors.absent_from_combine}[operation]
    first, late, third = pool.run(3, body, 1, 6.0)
    found = [error for error in (first[0], third[0]) if "PeerTimeout" in error.kinds]
    assert found, (first, third)
    for error in found:
        test_errors.check(error, ("TimeoutError",), (operation, "call 2", "rank 1"), 60.0)
    for error in first[1:] + third[1:]:
        test_errors.check(error, ("GroupPoisoned", "RuntimeError"), ("dispatch", "rank 1"))
    assert {"PeerLost", "GroupPoisoned"} & set(late[-1].kinds), late


ENDS: dict[str, Case] = {
    "absent from dispatch": lambda pool: absent(pool, "dispatch"),
    "absent from combine": lambda pool: absent(pool, "combine"),
    "unequal calls": test_errors.test_unequal_calls_are_an_error,
    "interrupted dispatch": lambda pool: test_errors.test_case_48_interrupt_during_a_wait(pool, "dispatch"),
    "interrupted combine": lambda pool: test_errors.test_case_48_interrupt_during_a_wait(pool, "combine"),
    "a peer closes": test_errors.test_peer_closed,
    "forked": test_errors.test_forked_child,
    "a handler closes": lambda pool: (
        test_ends.test_a_signal_handler_may_close_the_group_of_the_call_it_interrupts(pool, "dispatch")
    ),
    "a handler raises": test_ends.test_an_interrupt_is_not_lost_when_the_peer_comes_meanwhile,
    "another thread closes": test_ends.test_close_ends_a_call_that_waits_in_another_thread,
    "forked in a call": test_ends.test_a_fork_in_the_middle_of_a_call,
    "orders of closing": lambda pool: test_cases_de.test_45_orders_of_closing(pool, {}, "some leave"),
    "two threads": lambda pool: pool.run(2, cases_de.threads_on_one_group, {}, 4, timeout=120),
}


@groups(ENDS)
def test_end(interpreted: RankPool, case: Case, kinds: str) -> None:
    played(interpreted, kinds, case)


@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_a_peer_dies(where: str) -> None:
    ranks = RankPool(2, env={"TRITON_INTERPRET": "1"})
    try:
        playing = Playing(ranks, "TC" if where == "dispatch" else "TT")
        survivor, dead = playing.run(2, errors.peer_killed, where, False, deaths=(1,))
    finally:
        ranks.close()
    assert dead == -signal.SIGKILL
    test_errors.check(survivor, ("PeerLost", "RuntimeError"), (where, "rank 1", "has ended"))


# ---------------------------------------------------------------------------------------------------------- creation


@pytest.mark.parametrize("kinds", GROUPS.values())
def test_what_was_chosen_is_said(interpreted: RankPool, kinds: str) -> None:
    for kind, (kernels, described, record_format) in zip(
        kinds, Playing(interpreted, kinds).run(3, triton_ranks.chosen), strict=True
    ):
        assert kernels == triton_ranks.KINDS[kind] and record_format == 1
        assert ("interpreter" in described["submitter"]) == (kind == "T"), described


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"record_format": "compact"}, ("record_format = 'compact'", "'portable'", "rank 0")),
        ({"protocol": "pull"}, ("protocol = 'pull'", "'push'", "rank 0")),
        ({"transport": "collective"}, ("transport = 'collective'", "'cpu-shm'", "rank 0")),
    ],
)
def test_what_a_triton_rank_needs(
    interpreted: RankPool, arguments: dict[str, str], words: tuple[str, ...]
) -> None:
    for error in Playing(interpreted, "TC").run(2, triton_ranks.refused, arguments):
        test_errors.check(error, ("BadValue", "ValueError"), words)


def test_without_the_interpreter(pool: RankPool) -> None:
    """Tensors on the CPU, and Triton was imported to compile: a sentence on every rank, and another group can be made."""
    for rank, error in enumerate(pool.run(2, triton_ranks.refused, {}, ("triton", "cpu"))):
        kind = "TransportUnavailable" if rank == 0 else "BadValue"
        test_errors.check(error, (kind,), ("rank 0", "TRITON_INTERPRET=1", "kernels"))


def test_no_such_kernels(interpreted: RankPool) -> None:
    for error in interpreted.run(2, triton_ranks.refused, {}, ("cpu", "vulkan")):
        test_errors.check(error, ("BadValue",), ("rank 1", "'vulkan'", "triton"))


def test_triton_is_imported_only_where_it_is_asked_for() -> None:
    program = "import sys, moe_a2a; moe_a2a.EPGroup(num_experts=1, top_k=1, max_tokens=1, hidden_size=1); "
    program += "assert not [name for name in sys.modules if name.split('.')[0] == 'triton']"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_without_triton() -> None:
    """Where the package isn't installed the sentence says what to install."""
    program = """
import sys
sys.modules["triton"] = None
import moe_a2a
try:
    moe_a2a.EPGroup(num_experts=1, top_k=1, max_tokens=1, hidden_size=1, kernels="triton")
except moe_a2a.errors.TransportUnavailable as error:
    assert "moe_a2a[triton]" in str(error), error
else:
    raise AssertionError("a group was made")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


# ----------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("key", devices.KEYS)
def test_operators_are_registered_on_devices(key: str) -> None:
    for name in devices.OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_a2a::{name}", key), name


def test_operators_of_devices(interpreted: RankPool) -> None:
    """What the dispatcher calls for a device's tensors, called by hand, since there is no device here."""
    Playing(interpreted, "TT").run(2, triton_ranks.operators)


def test_a_device_tensor_and_a_group_of_the_cpu() -> None:
    with (
        moe_a2a.EPGroup(num_experts=1, top_k=1, max_tokens=1, hidden_size=1) as group,
        pytest.raises(moe_a2a.errors.BadType, match=r"kernels = 'triton'"),
    ):
        devices.combine_raw(torch.zeros(1, 1), torch.zeros(20, dtype=torch.int64), None, group.name)


# ------------------------------------------------------------------------------------------------ routing and records


@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_the_oracle_s(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    tokens, top_k, experts = [(0, 2, 3), (7, 3, 5), (20, 1, 1), (9, 4, 3)][seed]
    ids_TK = torch.randint(-1, experts, (tokens, top_k), generator=rng)
    counts_E, slot_TK = reference.send_counts_reference(ids_TK, experts)
    pairs = routing.sort_pairs(ids_TK.t().contiguous().t(), experts)
    assert torch.equal(pairs.counts_E, counts_E)
    assert torch.equal(devices.send_counts(ids_TK, experts)[1], slot_TK)
    kept = int(counts_E.sum())
    assert torch.equal(pairs.order_P[:kept], reference._pairs_by_expert(ids_TK))
    listed = ids_TK.reshape(-1)[pairs.order_P]
    assert (listed[kept:] == -1).all() and (listed[:kept].diff() >= 0).all()


@pytest.mark.parametrize("align", [1, 3])
@pytest.mark.parametrize("flag_rows", [0, 1, 4])
@pytest.mark.parametrize("cap", [None, 1, 5, 7])
def test_every_row_is_in_one_piece(cap: int | None, flag_rows: int, align: int) -> None:
    """All waves together have each pair once, at its final row; flags are those of the document's groups."""
    rng = torch.Generator().manual_seed(11)
    geometry = routing.Geometry(5, 3)
    counts_RE = torch.randint(0, 9, (3, 5), generator=rng)
    counts_RE[1] = 0
    places = geometry.places(counts_RE, align)
    seen: Counter[tuple[int, int, int]] = Counter()
    count = 1 if cap is None else max(-(-total // cap) for total in places.totals_R)
    for wave in range(count):
        runs = geometry.runs(places, cap, wave, [flag_rows] * 3, 3)
        shift = 0 if cap is None else wave * cap
        for piece in range(len(runs)):
            source, expert = int(runs.source_M[piece]), int(runs.expert_M[piece])
            row, rows, flag = (int(part[piece]) for part in (runs.row_M, runs.count_M, runs.flag_M))
            assert 1 <= rows <= 3 and (cap is None or row + rows <= cap)
            begin = max(int(places.first_RE[source, expert]) - shift, 0)
            end = int(places.first_RE[source, expert] + counts_RE[source, expert]) - shift
            end = end if cap is None else min(end, cap)
            group = flag_rows or end - begin
            assert (
                flag == min(begin + ((row - begin) // group + 1) * group, end) - 1 and flag >= row + rows - 1
            )
            for i in range(rows):
                final = row + shift + i
                place = int(runs.place_M[piece]) + i
                before = int(counts_RE[source, :expert].sum())
                assert final - int(places.first_RE[source, expert]) == place - before
                seen[source, int(runs.owner_M[piece]), final] += 1
    assert len(seen) == int(counts_RE.sum()) and set(seen.values()) == {1}


def test_records_and_cells_are_read_as_written() -> None:
    full = record.Record(
        1, 2, 2**40 + 7, 3, 4, 5, 6, 1, 2, 7, 1, -1, 8, -(2**63), 2**33 + 1, 512, 9, 16, -5, 2**35, 1, 15
    )
    assert record.Record.of(full.words()) == full
    assert all(-(2**31) <= word < 2**31 for word in full.words())
    cell = record.Cell(1, 2, 3, 512, 2**36 + 4, 5, 1)
    assert record.Cell.of(cell.words()) == cell
    text = record.clip_text("ä" * 100, 33)
    assert text.decode() == "ä" * 16 and record.text_of(record.words_of(text), 32) == "ä" * 16
    assert record.text_of(record.words_of(b"\xff" + b"no\0"), 3) == "?no"
