"""Dispatch and combine between processes against the oracle, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lanes import crossed, slow
from pool import GROUP_SIZES, RankPool
from rank_bodies import cases
from rank_bodies import steps as bodies
from rank_bodies.inputs import GroupSpec, Step, assert_bits, tag_rows

import moe_a2a
from moe_a2a import reference

HIDDEN = (1, 3, 7, 63, 100, 129, 513, 1537)
DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHTS = ("float32", "bfloat16", "float64", None)


def uneven(ranks: int, limit: int, seed: int) -> tuple[int, ...]:
    """A T for each rank: odd sizes below ``limit``, and one rank without tokens when there are several."""
    rng = random.Random(seed)
    tokens = [min(limit, rng.randrange(limit) | 1) for _ in range(ranks)]
    if ranks > 1:
        tokens[rng.randrange(ranks)] = 0
    return tuple(tokens)


@pytest.mark.parametrize("record_format", ["compact", "portable"])
@pytest.mark.parametrize("ranks", GROUP_SIZES)
def test_every_hidden_size_and_dtype(pool: RankPool, ranks: int, record_format: str) -> None:
    """One group with the widest row serves all smaller ones; memory is full of NaN before."""
    spec = GroupSpec(7, 3, 13, max(HIDDEN), "float64", record_format=record_format)
    steps = [
        Step(
            tokens=uneven(ranks, 13, 100 * i + j),
            top_k=1 + (i + j) % 3,
            hidden=hidden,
            dtype=dtype,
            weight_dtype=WEIGHTS[(i + j) % 4],
            ids=("int32", "int64")[(i + j) % 2],
            rows=("tags", "random")[i % 2],
            source=("plain", "window")[(i + j // 2) % 2],
            result=("plain", "window")[(i + j) // 2 % 2],
            drop=0.2 * (j % 2),
            seed=i * 10 + j,
        )
        for i, hidden in enumerate(HIDDEN)
        for j, dtype in enumerate(DTYPES)
    ]
    pool.run(ranks, bodies.steps_match, spec, steps)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weight_dtypes_and_y_dtypes(pool: RankPool, ranks: int) -> None:
    """Weights of any float dtype or none, at dispatch, at combine or both, and y of another dtype than x."""
    spec = GroupSpec(6, 4, 17, 65, "float64")
    steps = [
        Step(
            tokens=uneven(ranks, 17, seed),
            top_k=4,
            hidden=65,
            dtype=dtype,
            weight_dtype=weight_dtype,
            y_dtype=y_dtype,
            weigh=("both", "dispatch", "combine")[seed % 3],
            rows="random",
            drop=0.1,
            routing="any",
            result=("plain", "window")[seed % 2],
            seed=seed,
        )
        for seed, (dtype, weight_dtype, y_dtype) in enumerate(
            (dtype, weight_dtype, y_dtype)
            for dtype in ("bfloat16", "float32")
            for weight_dtype in (*WEIGHTS, "float16")
            for y_dtype in DTYPES
        )
    ]
    pool.run(ranks, bodies.steps_match, spec, steps)


@pytest.mark.parametrize(
    ("ranks", "experts"), [(1, 1), (2, 1), (2, 5), (3, 7), (3, 2), (4, 1), (4, 6), (8, 4), (8, 30), (8, 1)]
)
def test_any_number_of_experts(pool: RankPool, ranks: int, experts: int) -> None:
    """E that R doesn't divide, and fewer experts than ranks."""
    spec = GroupSpec(experts, 5, 21, 33)
    steps = [
        Step(uneven(ranks, 21, seed), 5, 33, routing="any", drop=0.15 * (seed % 2), rows="random", seed=seed)
        for seed in range(4)
    ]
    pool.run(ranks, bodies.steps_match, spec, steps)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_top_k_up_to_16_with_duplicates(pool: RankPool, ranks: int) -> None:
    """K above E makes duplicates certain; a group serves every K up to its own."""
    spec = GroupSpec(9, 16, 11, 40, "bfloat16")
    steps = [
        Step(uneven(ranks, 11, k), k, 40, "bfloat16", routing="any", rows=("tags", "random")[k % 2], seed=k)
        for k in range(1, 17)
    ]
    pool.run(ranks, bodies.steps_match, spec, steps)


@pytest.mark.parametrize("ranks", GROUP_SIZES)
def test_zero_tokens_everywhere(pool: RankPool, ranks: int) -> None:
    """No rank has a token, then some have, then only one."""
    spec = GroupSpec(8, 2, 9, 24, "bfloat16")
    none = (0,) * ranks
    only_last = (*none[1:], 9)
    every = tuple(1 + rank % 9 for rank in range(ranks))
    steps = [
        Step(tokens, 2, 24, "bfloat16", source=source, result=source, seed=seed)
        for seed, tokens in enumerate((none, every, none, only_last))
        for source in ("plain", "window")
    ]
    pool.run(ranks, bodies.steps_match, spec, steps)


@pytest.mark.parametrize("name", ["trace_none", "trace_aux", "trace_bias"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_recorded_routings(pool: RankPool, ranks: int, name: str) -> None:
    """Routings of a trained model: far from uniform, and different for every layer and batch."""
    spec = GroupSpec(16, 2, 128, 20, "bfloat16")
    steps = [
        Step(
            (128,) * ranks,
            2,
            20,
            "bfloat16",
            routing=f"{name}/{layer}/{batch}",
            rows="tags" if batch % 2 else "random",
            seed=batch,
        )
        for layer in range(4)
        for batch in range(layer, 64, 16 if ranks < 8 else 32)
    ]
    pool.run(ranks, bodies.steps_match, spec, steps, False)


def split(total: Step, ranks: int) -> tuple[int, ...]:
    """Cut a batch of one rank into uneven parts for ``ranks``."""
    tokens = total.tokens[0]
    cuts = sorted(random.Random(ranks).sample(range(tokens + 1), ranks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_do_not_depend_on_the_number_of_ranks(pool: RankPool, dtype: str) -> None:
    """One global batch cut over 1, 2, 3, 4 and 8 ranks, twice each: all outputs are equal, bit by bit."""
    total = Step((61,), 4, 37, dtype, rows="random", routing="any", drop=0.1, seed=5)
    spec = GroupSpec(10, 4, 61, 37, dtype)
    outs = []
    for ranks in GROUP_SIZES:
        parts = pool.run(ranks, bodies.split_batch, spec, total, split(total, ranks))
        outs += [
            (ranks, torch.cat([first for first, _ in parts])),
            (ranks, torch.cat([again for _, again in parts])),
        ]
    for ranks, out in outs[1:]:
        assert_bits(out, outs[0][1], f"{ranks} ranks against one")


@pytest.mark.parametrize(
    ("record_format", "ranks_count"),
    crossed(["compact", "portable"], {"2-300": (2, 300), "4-150": (4, 150), "8-60": (8, 60)}, strength=1),
)
def test_many_steps_without_barriers(
    pool: RankPool, ranks_count: tuple[int, int], record_format: str
) -> None:
    """Random T, K, H and delays, and nothing between the steps that would order the ranks."""
    ranks, count = ranks_count
    rng = random.Random(ranks)
    spec = GroupSpec(8, 4, 32, 96, record_format=record_format)
    steps = [
        Step(
            tuple(rng.choice((0, rng.randrange(33))) for _ in range(ranks)),
            rng.randint(1, 4),
            rng.randint(1, 96),
            rng.choice(("float32", "bfloat16", "float16")),
            weight_dtype=rng.choice(WEIGHTS),
            routing=rng.choice(("distinct", "any", "one", "skew")),
            target=rng.randrange(8),
            drop=rng.choice((0.0, 0.3)),
            rows="random",
            source=rng.choice(("plain", "window")),
            result=rng.choice(("plain", "window")),
            seed=seed,
        )
        for seed in range(count)
    ]
    assert pool.run(ranks, bodies.back_to_back, spec, steps, 3.0 if ranks < 8 else 1.0) == [count] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_dispatches_only(pool: RankPool, ranks: int) -> None:
    """More ranks than cores, rows of 16 KiB, no combine that would wait for slow readers."""
    pool.run(ranks, cases.dispatches_only, GroupSpec(8, 2, 48, 4096), 40)


@pytest.mark.parametrize("record_format", ["compact", "portable"])
@pytest.mark.parametrize(
    ("depth", "order"),
    [
        (2, "D0 D1 C0 C1 D2 C2"),
        (2, "D0 D1 C1 C0 D2 D3 C3 C2 D4 C4"),
        (2, "D0 X0 D1 C1 D2 C2 D3 C3"),
        (2, "D0 D1 X0 C1 D2 X2 D3 D4 X3 X4 D5 C5"),
        (3, "D0 D1 D2 C1 C2 C0 D3 D4 C4 D5 C3 C5"),
        (4, "D0 D1 D2 D3 C3 C2 C1 C0 D4 C4"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_handles_in_any_order(pool: RankPool, ranks: int, depth: int, order: str, record_format: str) -> None:
    """Several handles open at once, closed in any order, or dropped without a combine."""
    spec = GroupSpec(6, 3, 16, 48, record_format=record_format, depth=depth)
    steps = [
        Step(
            uneven(ranks, 16, seed),
            3,
            48,
            rows="random",
            source=("plain", "window")[seed % 2],
            result=("plain", "window")[seed // 2 % 2],
            seed=seed,
        )
        for seed in range(6)
    ]
    pool.run(ranks, bodies.interleaved, spec, order, steps)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_operator_level(pool: RankPool, ranks: int) -> None:
    """``torch.ops.moe_a2a`` gives what the Python functions give."""
    spec = GroupSpec(5, 3, 15, 31, "bfloat16")
    for seed in range(3):
        step = Step(uneven(ranks, 15, seed), 3, 31, "bfloat16", rows="random", drop=0.1, seed=seed)
        pool.run(ranks, bodies.operators_match, spec, step)


def test_interleaved_groups(pool: RankPool) -> None:
    """Two groups of the same ranks, used alternately with handles open on both, stay apart."""
    first, second = GroupSpec(6, 2, 12, 20), GroupSpec(9, 3, 7, 50, "bfloat16")
    pool.run(4, bodies.two_groups, first, second)


LATER = ("", "dispatch", "combine", "both")


def varied(ranks: int, spec: GroupSpec, count: int, seed: int, quantised: bool = False) -> list[Step]:
    """Steps of every kind a group serves: padded, aligned, with a routing used again, asynchronous, by chance."""
    rng = random.Random(1000 * ranks + seed)
    steps: list[Step] = []
    for number in range(count):
        step = Step(
            tuple(rng.choice((0, rng.randrange(spec.max_tokens + 1))) for _ in range(ranks)),
            rng.randint(1, spec.top_k),
            rng.randint(1, spec.hidden),
            rng.choice(("float32", "bfloat16", "float16")),
            weight_dtype=rng.choice(WEIGHTS),
            routing=rng.choice(("distinct", "any", "one", "skew")),
            target=rng.randrange(spec.experts),
            drop=rng.choice((0.0, 0.3)),
            rows="random",
            weigh=rng.choice(("both", "dispatch", "combine")),
            source=rng.choice(("plain", "window")),
            result=rng.choice(("plain", "window")),
            seed=number,
            pad=rng.choice((None, None, 0, 5)),
            align=rng.choice((1, 1, 3, 8)),
            quantize=rng.choice(("int8", "fp8_e4m3")) if quantised else None,
            later=rng.choice(LATER),
        )
        fresh = [earlier for earlier in steps if earlier.again is None]
        if fresh and rng.random() < 0.25:
            old = rng.choice(fresh)
            step = replace(
                step,
                **{
                    name: getattr(old, name)
                    for name in ("tokens", "top_k", "routing", "target", "drop", "ids")
                },
                again=old.seed,
            )
        steps.append(step)
    return steps


OPTIONS: list[dict[str, Any]] = [
    {"pad": 0},
    {"pad": 4},
    {"align": 1, "pad": 0, "drop": 1.0},
    {"align": 5},
    {"align": 128},
    {"again": 0},
    {"later": "dispatch"},
    {"later": "combine"},
    {"later": "both"},
    {"align": 4, "pad": 3},
    {"align": 4, "pad": 3, "again": 0, "later": "both"},
    {"again": 0, "later": "both", "weight_dtype": None},
    {"pad": 2, "weigh": "dispatch", "y_dtype": "float64"},
]
QUANTISED: list[dict[str, Any]] = [
    {"quantize": quantize, **options}
    for quantize in ("int8", "fp8_e4m3")
    for options in ({}, {"rows": "nan"}, *OPTIONS)
]


def option_steps(ranks: int, spec: GroupSpec, all_options: Sequence[dict[str, Any]]) -> list[Step]:
    """A plain step, then each of these options on top of it; several ranks have none or few tokens."""
    first = Step(uneven(ranks, spec.max_tokens, 3), 3, 40, "bfloat16", drop=0.2, rows="random")
    steps = [first]
    for seed, options in enumerate(all_options, start=1):
        step = replace(first, seed=seed, hidden=spec.hidden - seed % 5, **options)
        if step.again is None:
            step = replace(step, tokens=uneven(ranks, spec.max_tokens, seed))
        steps.append(
            replace(step, source=("plain", "window")[seed % 2], result=("plain", "window")[seed // 2 % 2])
        )
    none = (0,) * ranks
    return [
        *steps,
        replace(first, tokens=none, pad=3, align=8, seed=90),
        replace(first, tokens=none, align=4, seed=91),
    ]


PROTOCOLS: dict[str, dict[str, Any]] = {
    "pull": {"protocol": "pull"},
    "push": {"protocol": "push"},
    "mixed": {"protocol": "push", "mix": 7},
    "push, flags": {"protocol": "push", "flag_rows": 3},
}
FORMATS = ("compact", "portable", "line")


# Rows that fit the window, and rows that come in waves.
WAVES = {"one wave": None, "waves": 6}


@pytest.mark.parametrize(
    ("recv_rows", "protocol", "record_format", "ranks"),
    crossed({"one wave": None, "waves": 5}, list(PROTOCOLS), FORMATS, [1, slow(2), 3], strength=3),
)
def test_each_option(
    pool: RankPool, ranks: int, record_format: str, protocol: str, recv_rows: int | None
) -> None:
    """pad_to, align, a routing used again and asynchronous calls, alone and together, against the oracle."""
    spec = GroupSpec(
        7,
        3,
        13,
        67,
        "float64",
        record_format=record_format,
        recv_rows=recv_rows,
        depth=2,
        **PROTOCOLS[protocol],
    )
    pool.run(ranks, bodies.steps_match, spec, option_steps(ranks, spec, OPTIONS))


@pytest.mark.parametrize(
    ("recv_rows", "ranks_depth", "protocol", "record_format"),
    crossed(
        WAVES,
        {
            "1-2": (1, 2),
            "2-2": (2, 2),
            "3-3": (3, 3),
            "4-2": (4, 2),
            **{f"{ranks}-{depth}": slow((ranks, depth)) for ranks, depth in ((1, 3), (2, 3), (3, 2), (4, 3))},
        },
        list(PROTOCOLS),
        FORMATS,
        strength=3,
    ),
)
def test_all_options_without_barriers(
    pool: RankPool, ranks_depth: tuple[int, int], record_format: str, protocol: str, recv_rows: int | None
) -> None:
    """Every kind of step by chance, with random delays, outputs in memory full of NaN, and nothing that orders the ranks."""
    ranks, depth = ranks_depth
    spec = GroupSpec(
        6, 3, 14, 150, record_format=record_format, depth=depth, recv_rows=recv_rows, **PROTOCOLS[protocol]
    )
    count = 40 if ranks < 4 else 25
    seed = 10 * FORMATS.index(record_format) + 3 * depth + len(protocol)
    steps = varied(ranks, spec, count, seed)
    assert pool.run(ranks, bodies.back_to_back, spec, steps, 2.0, True) == [count] * ranks
    for rank, stats in enumerate(pool.run(ranks, bodies.statistics, spec)):
        # Otherwise this would be a test of something else.
        calls = stats["dispatches"] + stats["combines"]
        assert stats["dispatches"] == stats["combines"] >= count, rank
        assert (stats["pushes"] > 0) == (protocol != "pull"), rank
        assert (protocol == "mixed") <= (0 < stats["pushes"] < calls), rank
        assert recv_rows is None or ranks == 1 or stats["waves"] > stats["dispatches"], rank


@pytest.mark.parametrize("record_format", FORMATS)
def test_all_options_on_eight_ranks(pool: RankPool, record_format: str) -> None:
    """Four times as many ranks as cores, waves, pushes and pulls by chance."""
    spec = GroupSpec(9, 2, 12, 70, record_format=record_format, depth=3, recv_rows=9, protocol="push", mix=3)
    steps = varied(8, spec, 30, FORMATS.index(record_format))
    assert pool.run(8, bodies.back_to_back, spec, steps, 2.0, True) == [30] * 8


ASYNC_ORDERS = [
    (2, "B0 W0 G0 T0 B1 W1 G1 T1"),
    (2, "B0 B1 W0 W1 C0 C1 B2 B3 W3 W2 C2 C3"),
    (2, "B0 W0 G0 B1 T0 W1 G1 B2 T1 W2 C2"),
    (2, "D0 B1 C0 W1 G1 D2 T1 C2"),
    (2, "B0 B1 X0 W1 C1 B2 B3 X2 X3 D4 C4"),
    (2, "D0 G0 X0 D1 D2 C2 C1 D3 G3 X3 D4 D5 C5 C4"),
    (3, "B0 B1 B2 W2 W0 W1 G1 G0 G2 T2 T0 T1"),
    (3, "B0 B1 W0 G0 B2 W1 G1 T0 B3 W2 G2 T1 W3 C3 T2"),
    (4, "B0 B1 B2 B3 W3 G3 W2 G2 W1 G1 W0 G0 T0 T1 T2 T3 D4 C4"),
]


@pytest.mark.parametrize(
    ("recv_rows", "protocol", "depth_order", "ranks"),
    crossed(
        WAVES,
        ["pull", "mixed"],
        {f"{depth}-{order}": (depth, order) for depth, order in ASYNC_ORDERS},
        [1, slow(2), 3],
    ),
)
def test_asynchronous_calls_in_any_order(
    pool: RankPool, ranks: int, depth_order: tuple[int, str], protocol: str, recv_rows: int | None
) -> None:
    """Dispatches and combines begun and waited for in any order, or begun and never waited for."""
    depth, order = depth_order
    for record_format in FORMATS:
        spec = GroupSpec(
            6, 3, 12, 48, record_format=record_format, depth=depth, recv_rows=recv_rows, **PROTOCOLS[protocol]
        )
        steps = [
            Step(
                uneven(ranks, 12, seed),
                3,
                48,
                rows="random",
                source=("plain", "window")[seed % 2],
                result=("plain", "window")[seed // 2 % 2],
                align=(1, 4)[seed % 2],
                later="both" if f"B{seed}" in order else "combine",
                seed=seed,
            )
            for seed in range(6)
        ]
        pool.run(ranks, bodies.interleaved, spec, order, steps, True)


@pytest.mark.parametrize(
    ("recv_rows", "protocol", "depth_codes", "record_format", "ranks"),
    crossed(
        WAVES,
        list(PROTOCOLS),
        {"2-5": (2, 5), "3-7": (3, 7), "2-7": (2, 7)},
        FORMATS,
        [slow(2), 3],
    ),
)
def test_all_options_when_codes_wrap(
    pool: RankPool,
    ranks: int,
    record_format: str,
    protocol: str,
    depth_codes: tuple[int, int],
    recv_rows: int | None,
) -> None:
    """The fewest codes there can be: flags, marks and lines of the lap before have to be gone; all rows past the cache."""
    depth, code_max = depth_codes
    spec = GroupSpec(
        6,
        3,
        14,
        150,
        record_format=record_format,
        depth=depth,
        recv_rows=recv_rows,
        streaming=0,
        code_max=code_max,
        **PROTOCOLS[protocol],
    )
    steps = varied(ranks, spec, 40, code_max)
    assert pool.run(ranks, bodies.back_to_back, spec, steps, 1.0, True) == [40] * ranks


def wandering_order(rng: random.Random, count: int, depth: int, dropped: Sequence[int]) -> str:
    """Begins of ``count`` dispatches and of their combines, all while the handles are good."""
    words: list[str] = []
    waiting: list[int] = []
    for number in range(count):
        words.append(f"B{number}")
        waiting += [number] * (number not in dropped)
        rng.shuffle(waiting)
        while waiting and (rng.random() < 0.4 or min(waiting) <= number + 1 - depth or number == count - 1):
            first = min(waiting) if min(waiting) <= number + 1 - depth else waiting[0]
            waiting.remove(first)
            words.append(f"G{first}")
    return " ".join(words)


@pytest.mark.parametrize(
    ("recv_rows", "protocol", "ranks_depth", "record_format"),
    crossed(
        WAVES,
        list(PROTOCOLS),
        {
            "1-2": (1, 2),
            "2-5": (2, 5),
            "3-3": (3, 3),
            "4-2": (4, 2),
            **{
                f"{ranks}-{depth}": slow((ranks, depth))
                for ranks, depth in ((1, 3), (1, 5), (2, 2), (2, 3), (3, 2), (3, 5), (4, 3), (4, 5))
            },
        },
        FORMATS,
    ),
)
def test_waits_in_any_order(
    pool: RankPool, ranks_depth: tuple[int, int], protocol: str, record_format: str, recv_rows: int | None
) -> None:
    """Ranks begin the same calls in the same order and wait for them when they like, each at another time."""
    ranks, depth = ranks_depth
    rng = random.Random(100 * depth + 10 * ranks + len(protocol) + 1000 * FORMATS.index(record_format))
    spec = GroupSpec(
        6, 3, 12, 50, record_format=record_format, depth=depth, recv_rows=recv_rows, **PROTOCOLS[protocol]
    )
    steps = [replace(step, again=None) for step in varied(ranks, spec, 30, depth)]
    dropped = rng.sample(range(30), 4)
    order = wandering_order(rng, 30, depth, dropped)
    pool.run(ranks, bodies.wandering, spec, order, steps, dropped)


@pytest.mark.parametrize(
    ("recv_rows", "protocol", "record_format", "ranks"),
    crossed(WAVES, list(PROTOCOLS), FORMATS, [1, slow(2), 3]),
)
def test_quantized(
    pool: RankPool, ranks: int, record_format: str, protocol: str, recv_rows: int | None
) -> None:
    """int8 and fp8_e4m3 alone and with every other option; the elements and scales are the oracle's to the bit."""
    spec = GroupSpec(
        7,
        3,
        13,
        300,
        "float64",
        record_format=record_format,
        recv_rows=recv_rows,
        depth=3,
        **PROTOCOLS[protocol],
    )
    pool.run(ranks, bodies.steps_match, spec, option_steps(ranks, spec, QUANTISED))
    steps = varied(ranks, spec, 30, len(protocol), quantised=True)
    assert pool.run(ranks, bodies.back_to_back, spec, steps, 2.0, True) == [30] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collective_transport(pool: RankPool, ranks: int) -> None:
    """The same public calls over torch.distributed give the same bits, with handles closed in any order."""
    spec = GroupSpec(7, 3, 16, 48, "float64", recv_rows=3, transport="collective")
    steps = [
        Step(
            uneven(ranks, 16, seed),
            3,
            48 - 5 * seed,
            DTYPES[seed % 4],
            weight_dtype=WEIGHTS[seed % 4],
            routing="any",
            drop=0.2,
            rows="random",
            source=("plain", "window")[seed % 2],
            result=("plain", "window")[seed // 2 % 2],
            seed=seed,
        )
        for seed in range(8)
    ]
    pool.run(ranks, bodies.steps_match, spec, steps)
    pool.run(ranks, bodies.interleaved, spec, "D0 D1 C1 C0 D2 X2 D3 C3 D4 D5 C4 C5", steps)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_options_on_the_collective_transport(pool: RankPool, ranks: int) -> None:
    """Every option alone, and all of them by chance; asynchronous calls are done when they return."""
    spec = GroupSpec(7, 3, 13, 300, "float64", recv_rows=1, transport="collective", depth=3)
    pool.run(ranks, bodies.steps_match, spec, option_steps(ranks, spec, [*OPTIONS, *QUANTISED]))
    for quantised in (False, True):
        steps = varied(ranks, spec, 20, 5 + quantised, quantised)
        assert pool.run(ranks, bodies.back_to_back, spec, steps, 2.0) == [20] * ranks
    orders = [order for depth, order in ASYNC_ORDERS if depth == 3]
    later = [
        Step(uneven(ranks, 13, seed), 3, 20, rows="random", later="both", seed=seed) for seed in range(4)
    ]
    for order in orders:
        pool.run(ranks, bodies.interleaved, spec, order, later)


def test_one_rank_without_torch_distributed() -> None:
    """With no process group there is one rank, and the whole call path still runs."""
    with moe_a2a.EPGroup(
        num_experts=5, top_k=3, max_tokens=9, hidden_size=11, dtype=torch.float32, max_recv_rows=27
    ) as group:
        assert (group.rank, group.world_size, list(group.local_experts)) == (0, 1, list(range(5)))
        x_TH = tag_rows(0, 9, 11, torch.float32)
        idx_TK = torch.randint(-1, 5, (9, 3), generator=torch.Generator().manual_seed(1))
        weights_TK = torch.rand(9, 3, generator=torch.Generator().manual_seed(2))
        d = moe_a2a.dispatch(x_TH, idx_TK, group, topk_weights=weights_TK)
        want = reference.dispatch_reference([x_TH], [idx_TK], 5, [weights_TK])[0]
        assert_bits(d.x, want.x_NH, "rows")
        assert want.weights_N is not None and d.weights is not None
        assert_bits(d.weights, want.weights_N, "weights")
        out = moe_a2a.combine(d.x * 3, d.handle, topk_weights=weights_TK)
        assert_bits(
            out, reference.combine_reference([want.x_NH * 3], [idx_TK], 5, [weights_TK])[0], "combined"
        )


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 4), (1, 1, 1), (257, 8, 64), (4097, 2, 3)])
def test_send_counts(tokens: int, top_k: int, experts: int, ids: torch.dtype) -> None:
    """Counts and slots of a local routing, contiguous and not."""
    wide = torch.randint(-1, experts, (tokens, 2 * top_k), generator=torch.Generator().manual_seed(tokens))
    for idx_TK in (wide[:, :top_k].contiguous().to(ids), wide.to(ids)[:, ::2]):
        counts_E, slot_TK = moe_a2a.send_counts(idx_TK, experts)
        want_counts, want_slots = reference.send_counts_reference(idx_TK, experts)
        assert_bits(counts_E, want_counts, "counts")
        assert_bits(slot_TK, want_slots, "slots")


def test_oracle_by_hand() -> None:
    """The oracle itself on numbers worked out on paper: 2 ranks, 3 experts (rank 0 owns 0 and 1, rank 1 owns
    2).
    """
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0]])]
    idxs = [torch.tensor([[2, 0], [0, -1]]), torch.tensor([[0, 2]])]
    weights = [torch.tensor([[0.5, 2.0], [4.0, float("nan")]]), torch.tensor([[1.0, 0.25]])]
    received: Sequence[reference.DispatchReference] = reference.dispatch_reference(xs, idxs, 3, weights)
    assert received[0].x_NH.flatten().tolist() == [1.0, 2.0, 10.0] and received[0].counts.tolist() == [3, 0]
    assert received[1].x_NH.flatten().tolist() == [1.0, 10.0] and received[1].offsets.tolist() == [0, 2]
    assert received[1].weights_N is not None and received[1].weights_N.tolist() == [0.5, 0.25]
    ys = [torch.tensor([[100.0], [200.0], [300.0]]), torch.tensor([[7.0], [8.0]])]
    outs = reference.combine_reference(ys, idxs, 3, weights)
    assert outs[0].flatten().tolist() == [0.5 * 7 + 2 * 100, 4 * 200] and outs[1].tolist() == [
        [300 + 0.25 * 8]
    ]
