"""Codes wrap and slots are used again; what a peer writes is looked at before it is used."""

from __future__ import annotations

import pytest
from pool import RankPool
from rank_bodies import wrap

FORMATS = ["compact", "portable"]


@pytest.mark.parametrize("record_format", FORMATS)
@pytest.mark.parametrize(
    ("ranks", "code_max", "first", "depth"), [(2, 3, 1, 2), (2, 4, 1, 2), (3, 6, 2, 3), (4, 255, 250, 2)]
)
def test_across_the_wrap(
    pool: RankPool, record_format: str, ranks: int, code_max: int, first: int, depth: int
) -> None:
    pool.run(ranks, wrap.across_the_wrap, record_format, code_max, first, depth, 60)


@pytest.mark.parametrize(
    ("record_format", "first"), [("portable", 2**31 - 4), ("compact", 2**62 - 3), ("compact", 2**32 - 3)]
)
def test_across_the_real_wrap(pool: RankPool, record_format: str, first: int) -> None:
    code_max = 2**31 - 1 if record_format == "portable" else 2**62
    pool.run(2, wrap.across_the_wrap, record_format, code_max, first, 2, 12)


@pytest.mark.parametrize("record_format", FORMATS)
def test_a_late_cell_of_the_lap_before_is_not_taken(pool: RankPool, record_format: str) -> None:
    assert pool.run(2, wrap.late_cell, record_format) == [7.0, 7.0]


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
        ("QUANT", 1, "quantisation 1"),
        ("PAD_LO", 5, "pad_to"),
        ("ALIGN", 8, "align 8"),
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
