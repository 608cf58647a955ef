"""The Triton kernels in the interpreter, driven directly over windows, against the oracle and beside ranks in numpy."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from lanes import slow
from pool import RankPool
from rank_bodies import triton_bodies
from rank_bodies.inputs import Step
from rank_bodies.triton_bodies import Case
from triton_rank import ALL, PARTNER, RETURN, SEND

from moe_a2a.op_host import layout
from moe_a2a.op_kernel.triton import catalogue, words

TIMEOUT = 100.0


def steps(ranks: int, **changes: object) -> tuple[Step, ...]:
    """A few calls of changing shape: odd sizes, dropped pairs, duplicates, a rank with no tokens, one with all rows."""
    base = Step(tokens=(0,) * ranks, top_k=3, hidden=70, dtype="bfloat16", rows="random", drop=0.2)
    base = replace(base, **changes)  # type: ignore[arg-type]
    tokens = [tuple((5 * r + 3 * n + 1) % 12 for r in range(ranks)) for n in range(4)]
    return (
        replace(base, tokens=tokens[0], seed=1),
        replace(base, tokens=tokens[1], seed=2, routing="any"),
        replace(base, tokens=(0, *tokens[2][1:]), seed=3),
        replace(base, tokens=tokens[3], seed=4, routing="one", target=1, drop=0.0),
    )


@pytest.mark.parametrize("ranks", [1, slow(2), 3])
def test_dispatch_and_combine(interpreted: RankPool, ranks: int) -> None:
    case = Case(experts=5, steps=steps(ranks), flag_rows=(0, 1, 3))
    interpreted.run(ranks, triton_bodies.exchange, case, timeout=TIMEOUT)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_dtypes(interpreted: RankPool, dtype: str) -> None:
    """Rows, weights and results of every dtype; y of another one than x."""
    two = steps(2, dtype=dtype, weight_dtype="float64" if dtype == "float64" else "bfloat16", hidden=33)[:2]
    interpreted.run(2, triton_bodies.exchange, Case(experts=3, steps=two), timeout=TIMEOUT)
    two = steps(2, dtype=dtype, y_dtype="bfloat16", weight_dtype=None, hidden=33)[:1]
    interpreted.run(2, triton_bodies.exchange, Case(experts=3, steps=two), timeout=TIMEOUT)


@pytest.mark.parametrize("quantize", ["int8", "fp8_e4m3"])
def test_quantised_rows_have_the_bits_of_the_oracle(interpreted: RankPool, quantize: str) -> None:
    made = steps(2, quantize=quantize, hidden=200)[:2]
    broken = replace(made[0], rows="nan", seed=7)
    case = Case(experts=4, steps=(*made, broken, replace(made[0], dtype="float32", seed=8)), flag_rows=(2,))
    interpreted.run(2, triton_bodies.exchange, case, timeout=TIMEOUT)


def test_programs_of_a_rank_are_processes(interpreted: RankPool) -> None:
    """They wait for each other's rows, and any of them may be late."""
    case = Case(experts=5, steps=steps(2)[1:], programs=2, flag_rows=(2,), delay_ms=4.0)
    interpreted.run(4, triton_bodies.exchange, case, timeout=TIMEOUT)


def test_tens_of_calls_reuse_slots_and_codes(interpreted: RankPool) -> None:
    """Sparse rows at high places: five codes, so each slot sees the codes of many laps."""
    few = tuple(
        Step(
            tokens=((7, 0), (1, 6), (0, 0), (3, 8))[n % 4],
            top_k=1,
            hidden=9,
            dtype="float32",
            rows="turn",
            seed=n,
            routing=("any", "one")[n % 2],
            target=n % 3,
        )
        for n in range(16)
    )
    case = Case(experts=3, steps=few, max_tokens=8, code_max=5, flag_rows=(1, 2))
    interpreted.run(2, triton_bodies.exchange, case, timeout=TIMEOUT)


def test_waves(interpreted: RankPool) -> None:
    """Slots of 5 rows: each call takes several waves, and the flags of one are no flags of the next."""
    case = Case(experts=5, steps=steps(3, align=2)[:3], recv_rows=5, flag_rows=(0, 2))
    interpreted.run(3, triton_bodies.exchange, case, timeout=TIMEOUT)


# What a rank must wait for, and the process that is late with it.
LATE = {
    "rows": (0, "push"),
    "results": (0, "give"),
    "a wave is read": (1, "take"),
    "rows of the next wave": (0, "push"),
}


@pytest.mark.parametrize("what", list(LATE))
def test_nobody_goes_on_without_a_rank_that_is_late(interpreted: RankPool, what: str) -> None:
    """All rows go to one rank, in slots of 4 rows where it is about waves."""
    waves = "wave" in what
    late, kernel = LATE[what]
    calls = (1,) if waves else range(4)  # the third finds in its slot what the first left, with another code
    made = [
        Step(
            tokens=(5, 2),
            top_k=1,
            hidden=9,
            rows="turn",
            seed=n,
            routing="one",
            target=1 if waves else (n + 1) % 2,
        )
        for n in calls
    ]
    case = Case(
        experts=2,
        steps=tuple(made),
        recv_rows=4 if waves else None,
        flag_rows=(1,),
        late=((late, kernel),),
    )
    interpreted.run(2, triton_bodies.exchange, case, timeout=TIMEOUT)


def test_codes_of_the_lap_before_say_nothing(interpreted: RankPool) -> None:
    """Calls 1 and 11 have slot and code in common (NS = 2, V = 5), and nothing is sent between; who sends again is late."""
    calls = tuple(
        Step(
            tokens=(5, 3) if n in (1, 11) else (0, 0), top_k=2, hidden=9, rows="turn", seed=n, routing="round"
        )
        for n in range(1, 12)
    )
    for kernel in ("push", "give"):
        case = Case(experts=2, steps=calls, max_tokens=8, code_max=5, late=((1, kernel),))
        interpreted.run(2, triton_bodies.exchange, case, timeout=TIMEOUT)


def test_a_program_that_is_late_is_waited_for(interpreted: RankPool) -> None:
    """A combine cell speaks for rows that several programs write."""
    late = ((1, "give"), (3, "give"))
    step = Step(
        tokens=(5, 1), top_k=1, hidden=9, seed=1, routing="round"
    )  # rank 0's rows are given by both programs
    case = Case(experts=4, steps=(step,), programs=2, late=late, late_s=1.0)
    interpreted.run(4, triton_bodies.exchange, case, timeout=TIMEOUT)


def test_rows_of_pairs(interpreted: RankPool) -> None:
    case = Case(experts=3, steps=steps(2, weight_dtype=None)[:1])
    interpreted.run(2, triton_bodies.pair_rows, case, timeout=TIMEOUT)


@pytest.mark.parametrize("step", [slow({}), {"quantize": "int8"}, {"align": 4, "weight_dtype": "float64"}])
def test_beside_numpy(interpreted: RankPool, step: dict[str, object]) -> None:
    """A rank made from the document alone pulls and pushes as it likes."""
    case = Case(experts=5, steps=steps(3, **step), numpy=(1,), flag_rows=(0, 0, 2))
    interpreted.run(3, triton_bodies.mixed, case, timeout=TIMEOUT)


def test_a_refusal_is_seen(interpreted: RankPool) -> None:
    case = Case(experts=2, steps=(steps(2, weight_dtype=None)[1],), numpy=(1,))
    errors = interpreted.run(2, triton_bodies.refused, case, timeout=TIMEOUT)
    assert errors[0] == words.ERROR_REFUSED.value


def test_a_missing_rank_is_named(interpreted: RankPool) -> None:
    case = Case(experts=3, steps=(steps(2)[0],))
    assert interpreted.run(2, triton_bodies.missing, case, timeout=TIMEOUT)[0] == [
        words.ERROR_RECORD.value,
        1,
    ]


def test_sums_are_exact_about_zeros_subnormals_and_ties(interpreted: RankPool) -> None:
    interpreted.run(1, triton_bodies.exact_sums, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("token", "error"), [(2, 0), (3, words.ERROR_TOKEN.value), (-1, words.ERROR_TOKEN.value)]
)
def test_a_lying_token_list(interpreted: RankPool, token: int, error: int) -> None:
    assert interpreted.run(1, triton_bodies.lying_list, token, timeout=TIMEOUT) == [error]


FUSED = {
    "one launch": ((ALL,), False, 1),
    "by vectors": ((ALL,), True, 1),
    "three launches": ((SEND, RETURN), False, 1),
    "programs": ((ALL,), False, 2),
    "three launches, programs": ((SEND, RETURN), False, 2),
    "partner": ((PARTNER,), False, 2),
}


@pytest.mark.parametrize(
    ("how", "ranks"), [*((how, 2) for how in FUSED), ("one launch", 3), ("three launches", 3)]
)
def test_fused(interpreted: RankPool, how: str, ranks: int) -> None:
    launches, vector, programs = FUSED[how]
    made = steps(ranks, dtype="float32" if ranks == 2 else "bfloat16", hidden=40)
    again = replace(made[0], again=made[0].seed, seed=9)
    chosen = {"one launch": (*made, again), "by vectors": made[1:2]}.get(how, (made[0], made[3]))
    case = Case(experts=5, steps=chosen, programs=programs, flag_rows=(0, 2), delay_ms=3.0)
    interpreted.run(ranks * programs, triton_bodies.fused_calls, case, launches, vector, 20, timeout=TIMEOUT)


def test_fused_on_one_rank(interpreted: RankPool) -> None:
    case = Case(experts=3, steps=steps(1, dtype="float64", hidden=24))
    interpreted.run(1, triton_bodies.fused_calls, case, (ALL,), False, 17, timeout=TIMEOUT)


def test_fused_writes_nothing_when_the_records_want_judgement(interpreted: RankPool) -> None:
    """Too many rows for a slot; a rank of another H."""
    few = steps(2, dtype="float32", hidden=12)
    case = Case(experts=2, steps=(replace(few[3], seed=0), few[1]), recv_rows=5)
    for errors in interpreted.run(2, triton_bodies.fused_judged, case, timeout=TIMEOUT):
        assert errors == [words.ERROR_JUDGE.value] * 2


# ------------------------------------------------------------------------------------------- numbers and the catalogue


def test_layout_numbers_are_the_layouts() -> None:
    places = {field.name: at for at, field in enumerate(fields(layout.WindowLayout))}
    numbers = {name[3:].lower(): value.value for name, value in vars(words).items() if name.startswith("AT_")}
    assert len(numbers) > 30
    assert numbers == {name: places[name] for name in numbers}


def test_words_are_the_documents() -> None:
    for prefix, enum in (("RECORD_", layout.RecordWord), ("CELL_", layout.CellWord)):
        for name, value in vars(words).items():
            word = name.removeprefix(prefix)
            if name.startswith(prefix) and word in enum.__members__:
                assert value.value == enum[word], name
    for kind in layout.Quant:
        assert vars(words)[f"QUANT_{kind.name}"].value == kind
    assert (words.MODE_PULL.value, words.MODE_PUSH.value) == (layout.Mode.PULL, layout.Mode.PUSH)
    assert words.KIND_COUNTS.value == layout.Kind.COUNTS
    agree = "KIND GENERATION EPOCH_LO EPOCH_HI HIDDEN DTYPE QUANT WEIGHT_DTYPE MODE PAD_LO PAD_HI ALIGN TAG_LO TAG_HI"
    names = [*agree.split(), "ROUTING_LO", "ROUTING_HI"]
    assert words.RECORD_AGREE.value == sum(1 << layout.RecordWord[name] for name in names)


@pytest.mark.parametrize("target", catalogue.TARGETS)
def test_catalogue(target: str) -> None:
    """Every argument has a type or a value, and no two variants one name; what polls doesn't use the matrix unit on Ascend."""
    found = catalogue.variants(target)
    assert len({(variant.name, variant.arch) for variant in found}) == len(found) > 40
    for variant in found:
        names = [*variant.signature, *variant.constants]
        assert sorted(names) == sorted(variant.kernel.arg_names), variant.name
        assert list(variant.signature) == [n for n in variant.kernel.arg_names if n not in variant.constants]
        assert not (target == "ascend" and variant.spins and variant.uses_dot), variant.name


def test_catalogue_knows_its_targets() -> None:
    with pytest.raises(
        ValueError, match=r"catalogue.variants: target = 'cpu'; expected one of ascend, gpu, x86"
    ):
        catalogue.variants("cpu")
