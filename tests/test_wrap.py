"""Codes wrap and slots are used again; what a peer writes is looked at before it is used."""

from __future__ import annotations

import pytest
from lanes import crossed
from pool import RankPool
from rank_bodies import wrap

FORMATS = ["compact", "portable", "line"]


# (ranks, V, first, depth): the least V; multiples of NS, where a slot's codes come back in every lap; of NREC; and one that
# wraps late.
LAPS = [(2, 5, 1, 2), (2, 6, 1, 2), (2, 8, 1, 2), (3, 9, 2, 3), (4, 255, 250, 2)]


@pytest.mark.parametrize(
    ("record_format", "protocol", "lap"),
    crossed(FORMATS, ["pull", "push"], {"-".join(map(str, lap)): lap for lap in LAPS}),
)
def test_across_the_wrap(
    pool: RankPool, record_format: str, protocol: str, lap: tuple[int, int, int, int]
) -> None:
    ranks, code_max, first, depth = lap
    pool.run(ranks, wrap.across_the_wrap, record_format, protocol, code_max, first, depth, 60)


@pytest.mark.parametrize(
    ("record_format", "first"),
    [("portable", 2**31 - 4), ("line", 2**31 - 4), ("compact", 2**62 - 3), ("compact", 2**32 - 3)],
)
def test_across_the_real_wrap(pool: RankPool, record_format: str, first: int) -> None:
    code_max = 2**62 if record_format == "compact" else 2**31 - 1
    pool.run(2, wrap.across_the_wrap, record_format, "push", code_max, first, 2, 12)


@pytest.mark.parametrize("protocol", ["pull", "push"])
@pytest.mark.parametrize("record_format", FORMATS)
def test_a_late_cell_of_the_lap_before_is_not_taken(
    pool: RankPool, record_format: str, protocol: str
) -> None:
    assert pool.run(2, wrap.late_cell, record_format, protocol) == [11.0, 11.0]


@pytest.mark.parametrize("record_format", FORMATS)
@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("X_LO", -4, "x region"),
        ("X_HI", 1, "x region"),
        ("X_STRIDE", -512, "x region"),
        ("X_STRIDE", 2**30, "x region"),
        ("TOKENS", 2**30, "x region"),
        ("TOP_K", 99, "x region"),
        ("GENERATION", 7, "generation"),
        ("EPOCH_LO", 9, "call number"),
        ("MODE", 1, "mode 1"),
        ("MODE", 2, "the call is dispatch"),
        ("MODE", 3, "mode 3"),
        ("FLAG_ROWS", -1, "-1 rows a flag"),
        ("QUANT", 1, "quantize is None on rank 0 and int8 on rank 1"),
        ("ALIGN", 8, "align is 1 on rank 0 and 8 on rank 1"),
        ("PAD_LO", -7, "pad_to"),
        ("ROUTING_LO", 5, "routing is new on rank 0 and used again on rank 1"),
        ("KIND", 2, "kind of call"),
        ("HIDDEN", 4, "hidden size"),
        ("DTYPE", 4, "float64"),
        ("DTYPE", 77, "unknown"),
        ("TAG_LO", 1, "tag"),
        ("WEIGHT_DTYPE", 1, "topk_weights"),
    ],
)
def test_a_record_that_makes_no_sense_is_an_error(
    pool: RankPool, record_format: str, word: str, value: int, says: str
) -> None:
    text = pool.run(2, wrap.spoiled_record, record_format, word, value)[0]
    assert "rank 1" in text and says in text, text


@pytest.mark.parametrize("record_format", FORMATS)
@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("Y_LO", -512, "y region"),
        ("Y_HI", 1, "y region"),
        ("STRIDE", -4, "y region"),
        ("STRIDE", 2**30, "y region"),
        ("DTYPE", 4, "float64"),
        ("HIDDEN", 4, "H = 4"),
    ],
)
def test_a_cell_that_makes_no_sense_is_an_error(
    pool: RankPool, record_format: str, word: str, value: int, says: str
) -> None:
    text = pool.run(2, wrap.spoiled_cell, record_format, word, value)[0]
    assert "rank 1" in text and says in text, text
