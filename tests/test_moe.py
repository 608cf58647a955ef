"""The fused operator against the truth, and what the ways of running a layer of experts promise about each other.

Cases are numbered as in the collection of reported faults that test_cases_abch.py names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from rank_bodies import moe_bodies as bodies
from rank_bodies.moe_bodies import Layer

TOKENS = {1: (7,), 2: (5, 9), 3: (0, 6, 4), 4: (4, 0, 9, 1)}
DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.mark.parametrize("ranks", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_against_the_truth(pool: RankPool, ranks: int, dtype: str) -> None:
    layers = [
        Layer(TOKENS[ranks], dtype=dtype),
        Layer(TOKENS[ranks], dtype=dtype, weight_dtype=None, seed=1),
        Layer(TOKENS[ranks], dtype=dtype, weight_dtype=dtype, routing="low", bias=False, seed=2),
    ]
    pool.run(ranks, bodies.layers_match, layers, tuple(bodies.WAYS))


@pytest.mark.parametrize(("ranks", "experts"), [(1, 7), (2, 7), (3, 7), (4, 3)])
def test_odd_sizes(pool: RankPool, ranks: int, experts: int) -> None:
    for dtype in ("float32", "bfloat16"):
        layers = [
            Layer(TOKENS[ranks], experts, hidden=hidden, dtype=dtype, seed=hidden, transposed=hidden == 63)
            for hidden in (1, 3, 63, 129)
        ]
        pool.run(ranks, bodies.layers_match, layers, ("fused", "recomputed", "padded"), looser=3.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_with_wide_parameters(pool: RankPool, dtype: str) -> None:
    layers = [Layer((5, 0, 4), dtype=dtype, param_dtype="float32", seed=seed) for seed in range(3)]
    pool.run(3, bodies.layers_match, layers, tuple(bodies.WAYS))


def test_products_of_16_bits_and_in_float32() -> None:
    """Both are right, so they are close to each other; and they aren't the same."""
    kinds = [
        Layer((5, 0, 4), dtype=dtype, param_dtype=wide, transposed=wide is None, seed=7)
        for dtype in ("bfloat16", "float16")
        for wide in ("float32", None)
    ]
    found = {}
    for wish in ("wide", "narrow"):
        ranks = RankPool(3, env={"MOE_A2A_GEMM": wish})
        try:
            found[wish] = ranks.run(3, bodies.products_of_one_type, kinds, wish)
        finally:
            ranks.close()
    for wide, narrow in zip(found["wide"], found["narrow"], strict=True):
        for layer, one, other in zip(kinds, wide, narrow, strict=True):
            if layer.param_dtype == "float32":
                assert torch.equal(one.out, other.out), layer
    assert any(
        not torch.equal(one.out, other.out)
        for wide, narrow in zip(found["wide"], found["narrow"], strict=True)
        for one, other in zip(wide, narrow, strict=True)
    )


GROUPS: dict[str, dict[str, Any]] = {
    "compact": {},
    "portable": {"record_format": "portable"},
    "line": {"record_format": "line"},
    "push": {"protocol": "push"},
    "push line": {"protocol": "push", "record_format": "line"},
    "collective": {"transport": "collective"},
    "waves": {"recv_rows": 3},
    "waves of pushes": {"recv_rows": 3, "protocol": "push"},
    "pull": {"protocol": "pull"},
    "laps": {"code_max": 9},
}


@pytest.mark.parametrize("how", [name for name in GROUPS if name != "compact"])
def test_every_way_over_every_transport(pool: RankPool, how: str) -> None:
    layers = [Layer((6, 0, 9), seed=1), Layer((6, 3, 9), routing="one", drop=0.0, seed=2)]
    pool.run(3, bodies.layers_match, layers, tuple(bodies.WAYS), [GROUPS[how]])


def test_transports_agree(pool: RankPool) -> None:
    layers = [Layer((6, 0, 9), seed=1), Layer((6, 3, 9), dtype="bfloat16", hidden=32, inner=16, seed=2)]
    names = list(GROUPS)
    for part in (names[:4], names[:1] + names[4:7], names[:1] + names[7:]):
        pool.run(3, bodies.transports_agree, layers, [GROUPS[name] for name in part])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["moe", "moe_apply"])
def test_case_55_small_terms_of_a_sum(pool: RankPool, way: str, dtype: str) -> None:
    pool.run(2, bodies.small_terms, way, dtype)


def test_case_56_any_number_of_ranks(pool: RankPool) -> None:
    whole = Layer((16,), experts=8, hidden=16, inner=8, seed=56)
    ranks, parameters = bodies.truth(whole)
    want = [ranks[0].out, *ranks[0].grads, *parameters]
    for ranks_now, threads in ((1, 1), (2, 1), (4, 4), (8, 1)):
        results = pool.run(ranks_now, bodies.split, whole, threads)
        found = [torch.cat([out for out, _ in results])]
        found += [torch.cat([grads[place] for _, grads in results]) for place in range(6)]
        for got, wanted in zip(found, want, strict=True):
            assert wanted is not None
            bodies.near(got, wanted, 1e-6, f"{ranks_now} ranks")


def test_case_56_one_expert_that_does_nothing(pool: RankPool) -> None:
    pool.run(1, bodies.identity)


@pytest.mark.parametrize("way", ["fused", "recomputed", "later", "beside"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_case_62_autocast(pool: RankPool, way: str, param_dtype: str) -> None:
    pool.run(2, bodies.autocast, Layer((5, 4), param_dtype=param_dtype, seed=62), way)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_case_69_data_parallel(pool: RankPool, wrapper: str) -> None:
    layer = Layer((5, 3, 4, 6), experts=4, hidden=8, seed=69)
    pool.run(8, bodies.data_parallel, layer, wrapper, 3)


@pytest.mark.parametrize("way", ["fused", "later"])
def test_forward_holds_one_expert_at_a_time(pool: RankPool, way: str) -> None:
    layer = Layer((200, 200), experts=64, top_k=4, hidden=16, inner=256, bias=False, drop=0.0)
    for used, kept, one, everything in pool.run(2, bodies.peak, layer, way):
        assert one < used < 3 * one + (1 << 16) < everything / 2 < kept, (used, kept, one, everything)
