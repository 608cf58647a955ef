"""Faults that users of such operators reported, forward parts: empty ranks and imbalance (01-09), expert ids
(10-14), shape, layout and size (16-21), numerics and repeatability (55, 56). The numbers are those of the
collection that the faults were gathered in; each test has the sizes of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankFailed, RankPool
from rank_bodies import cases, errors
from rank_bodies import steps as bodies
from rank_bodies.inputs import GroupSpec, Step, assert_bits

from moe_a2a.op_host.layout import row_offset, window_layout

DTYPES = ("float32", "bfloat16", "float16", "float64")


def test_case_01_rank_receives_nothing(pool: RankPool) -> None:
    spec = GroupSpec(8, 2, 16, 64, "bfloat16")
    steps = [Step((16,) * 4, 2, 64, "bfloat16", routing="low half", seed=seed) for seed in range(200)]
    assert pool.run(4, bodies.back_to_back, spec, steps, 0.0) == [200] * 4


def test_case_02_rank_sends_nothing(pool: RankPool) -> None:
    spec = GroupSpec(8, 2, 33, 64)
    for seed in range(4):
        step = Step((0, 7, 0, 33), 2, 64, rows="random", seed=seed)
        outs = pool.run(4, bodies.steps_match, spec, [step])
        assert [tuple(out[0].shape) for out in outs] == [(0, 64), (7, 64), (0, 64), (33, 64)]
        assert all(out[0].dtype == torch.float32 for out in outs)


def test_case_04_rank_receives_zero_rows(pool: RankPool) -> None:
    first, second = pool.run(2, cases.case_04)
    assert first == ([16, 16], [8, 8], True)
    assert second == ([0, 16], [0, 0], True)


def test_case_06_heavy_skew(pool: RankPool) -> None:
    """(a) nearly all tokens share one row of ids, (b) every token of every rank goes to one expert."""
    spec = GroupSpec(64, 8, 2304, 32, recv_rows=8 * 2304 * 8)
    step = Step((2304,) * 8, 8, 32, routing="nearly all alike", seed=6)
    counts = pool.run(8, cases.large_step, spec, step, timeout=120)
    flat = [count for rank in counts for count in rank]
    assert sum(flat) == 8 * 2304 * 8 and sum(count >= 8 * 2294 for count in flat) == 8
    spec = GroupSpec(8, 1, 512, 32, recv_rows=4096)
    counts = pool.run(8, cases.large_step, spec, Step((512,) * 8, 1, 32, routing="one", target=7, seed=1))
    assert counts == [[0]] * 7 + [[4096]]


def test_case_07_tokens_change_each_step(pool: RankPool) -> None:
    spec = GroupSpec(8, 2, 128, 64, "bfloat16")
    pool.run(4, cases.changing_tokens, spec, 100)


def test_case_07_capacities_differ_between_ranks(pool: RankPool) -> None:
    results = pool.run(4, errors.create_with, "max_tokens", [128, 128, 64, 128])
    for rank, error in enumerate(results):
        assert error is not None and "BadValue" in error.kinds and "ValueError" in error.kinds, (rank, error)
        assert "max_tokens" in error.message and "128" in error.message and "64" in error.message


@pytest.mark.parametrize(("ranks", "experts"), [(3, 7), (8, 30), (8, 4)])
def test_case_09_experts_not_divisible(pool: RankPool, ranks: int, experts: int) -> None:
    spec = GroupSpec(experts, 2, 9, 16)
    steps = [Step((9,) * ranks, 2, 16, rows="random", seed=seed) for seed in range(4)]
    pool.run(ranks, bodies.steps_match, spec, steps)
    owned = pool.run(ranks, bodies.local_experts, spec)
    assert sorted(e for mine, _, _ in owned for e in mine) == list(range(experts))
    sizes = [len(mine) for mine, _, _ in owned]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    for _, number, ranges in owned:
        assert ranges == [mine for mine, _, _ in owned]
        assert number in sizes


@pytest.mark.parametrize("seed", range(3))
def test_case_10_dropped_slots_with_nan_weights(pool: RankPool, seed: int) -> None:
    assert pool.run(2, cases.case_10, seed) == [False, False]


def test_case_11_rows_with_only_dropped_slots(pool: RankPool) -> None:
    for rank in pool.run(4, cases.case_11):
        assert rank == [[0] * 16, [0] * 16], "exactly +0"


@pytest.mark.parametrize("bad", [4, -2, 2**31, 2**32])
def test_case_12_id_out_of_range(pool: RankPool, bad: int) -> None:
    own, other = pool.run(2, errors.bad_id, bad)
    assert "BadValue" in own.kinds and "ValueError" in own.kinds
    assert f"= {bad} is outside -1..3" in own.message and "rank 0" in own.message
    assert "PeerAborted" in other.kinds and "RuntimeError" in other.kinds
    assert "rank 0" in other.message and f"= {bad} is outside -1..3" in other.message
    assert other.seconds < errors.AT_ONCE


def test_case_13_same_expert_twice(pool: RankPool) -> None:
    for rest in pool.run(2, cases.case_13):
        assert rest.abs().max() <= 1e-14 * 16


def test_case_14_id_width(pool: RankPool) -> None:
    for narrow, wide, mixed in pool.run(2, cases.case_14):
        assert_bits(narrow, wide, "int32 against int64")
        assert_bits(mixed, wide, "int32 and int64 in one call against int64")


@pytest.mark.parametrize("dtype", ["int16", "uint8", "float32", "bool"])
def test_case_14_other_id_dtypes(pool: RankPool, dtype: str) -> None:
    own, other = pool.run(2, errors.bad_id_dtype, dtype)
    assert "BadType" in own.kinds and "TypeError" in own.kinds
    assert dtype in own.message and "topk_idx" in own.message and "int64" in own.message
    assert "PeerAborted" in other.kinds and dtype in other.message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize(
    "kind",
    [
        "every second column",
        "transposed",
        "one row expanded",
        "one column expanded",
        "rows with a gap",
        "every third row",
        "middle of three dimensions",
        "flipped storage",
    ],
)
def test_case_16_strided_inputs(pool: RankPool, kind: str, ids: str, dtype: str) -> None:
    pool.run(2, cases.case_16, kind, getattr(torch, dtype), getattr(torch, ids))


@pytest.mark.parametrize(
    ("what", "shapes", "names"),
    [
        ("rows of x and ids", ("[16, 8]", "[15, 2]"), ("x", "topk_idx")),
        ("ids and weights", ("[16, 2]", "[16, 3]"), ("topk_idx", "topk_weights")),
        ("x with one dimension", ("[16]",), ("x",)),
    ],
)
def test_case_17_shape_mismatch(
    pool: RankPool, what: str, shapes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    own, other = pool.run(2, errors.bad_shape, what)
    assert "BadValue" in own.kinds
    for word in (*shapes, *names, "rank 0"):
        assert word in own.message, own.message
    assert "PeerAborted" in other.kinds and other.seconds < errors.AT_ONCE
    for word in (*shapes, "rank 0"):
        assert word in other.message, other.message


def test_case_17_hidden_differs_between_ranks(pool: RankPool) -> None:
    for error in pool.run(2, errors.mismatch, "hidden"):
        assert "CallMismatch" in error.kinds
        assert "8 on rank" in error.message and "7 on rank" in error.message


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_18_hidden_and_dtype(pool: RankPool, dtype: str) -> None:
    for hidden in (1, 3, 7, 63, 100, 129, 513, 1537):
        spec = GroupSpec(4, 2, 5, hidden, dtype)
        steps = [Step((5, 5), 2, hidden, dtype, rows=rows, seed=hidden) for rows in ("tags", "random")]
        pool.run(2, bodies.steps_match, spec, steps)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "float8_e4m3fn"])
def test_case_18_unsupported_dtype(pool: RankPool, dtype: str) -> None:
    own, other = pool.run(2, errors.bad_x_dtype, dtype)
    assert "BadType" in own.kinds and "TypeError" in own.kinds and dtype in own.message
    assert "PeerAborted" in other.kinds and dtype in other.message


def test_case_20a_offsets_beyond_32_bits() -> None:
    row, hidden, source = 2**20, 7168, 7
    layout = window_layout(
        world_size=8, num_experts=256, top_k=8, max_tokens=2**20, row_bytes=2 * hidden, recv_rows=2**20 + 1
    )
    stride = layout.row_stride(hidden, 2)
    assert stride == 14336
    offset = row_offset(layout.y, 1, layout.y_slot_stride, row, stride)
    assert offset == layout.y + layout.y_slot_stride + 15032385536 > 2**32
    # A region of the last source rank behind seven others of that size, as a kernel would address it.
    assert row_offset(0, source, (row + 1) * stride, row, stride) == 7 * 15032399872 + 15032385536 > 2**36
    assert layout.y >= layout.x + (layout.slots + layout.stage_slots) * row * stride
    assert layout.total_bytes >= layout.y + 2 * layout.y_slot_stride > 2**36
    assert all(isinstance(value, int) and 0 <= value < 2**63 for value in layout.params())
    assert layout.params()[-1] == layout.total_bytes


@pytest.mark.slow
def test_case_20b_rows_beyond_32_bits(pool: RankPool) -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) / 2**20
    if available < 48:
        pytest.skip(f"needs 48 GiB of free memory, there are {available:.0f}")
    assert pool.run(2, cases.case_20b, 70000, 16384, timeout=600) == [0, 70001]


def test_case_20b_same_with_small_rows(pool: RankPool) -> None:
    """The body of the slow test at a size that any machine has."""
    assert pool.run(2, cases.case_20b, 70000, 16) == [0, 70001]


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 255, 256, 257, 4095, 4097, 65535, 65536, 65537])
def test_case_21_block_boundaries(pool: RankPool, tokens: int) -> None:
    # Uniform routing: a window for a rank that gets everything would be four times as large for nothing.
    spec = GroupSpec(4, 2, tokens, 8, recv_rows=3 * tokens + 8)
    counts = pool.run(2, cases.large_step, spec, Step((tokens,) * 2, 2, 8, seed=tokens))
    assert sum(sum(rank) for rank in counts) == 4 * tokens


@pytest.mark.parametrize("last", [2, 4])
def test_case_55_small_terms_survive(pool: RankPool, last: int) -> None:
    """Experts 0, 1, 2 live on one rank; 0, 1, 4 on two."""
    assert pool.run(2, cases.case_55, last) == [[2.0**-9]] * 2


@pytest.mark.parametrize("seed", range(5))
def test_case_55_random_bf16(pool: RankPool, seed: int) -> None:
    pool.run(2, cases.case_55_random, seed)


def test_case_56_run_to_run(pool: RankPool) -> None:
    for rank, outs in enumerate(pool.run(4, cases.case_56_repeat, 20)):
        for run, out in enumerate(outs[1:], start=1):
            assert_bits(out, outs[0], f"rank {rank}, run {run} against the first")


def test_case_56_linear_experts_across_ranks(pool: RankPool) -> None:
    outs: list[torch.Tensor] = []
    for tokens in ((64,), (32, 32), (20, 9, 35, 0), (8,) * 8):
        outs.append(torch.cat(pool.run(len(tokens), cases.case_56_linear, tokens)))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_56_one_expert_is_identity(pool: RankPool, dtype: str) -> None:
    pool.run(1, cases.case_56_identity, getattr(torch, dtype))


def test_a_wrong_row_is_noticed(pool: RankPool) -> None:
    """The comparison these tests rest on must fail when a single bit is wrong."""
    spec = GroupSpec(4, 2, 9, 16)
    kwargs: dict[str, Any] = {"tokens": (9, 9), "top_k": 2, "hidden": 16}
    pool.run(2, bodies.corrupted, spec, Step(**kwargs), "")
    for part in ("rows", "counts", "combined"):
        with pytest.raises(RankFailed, match=part):
            pool.run(2, bodies.corrupted, spec, Step(**kwargs), part)
