"""How many payload bytes the operators copy, and that no output shares memory with a window.

The design's numbers: dispatch copies at most T rows in (those that only its own rank needs are not copied;
none with ``group.empty``) and N rows out; combine copies at most N rows in (those of its own tokens are not
copied; none with ``d.empty_like_rows``) and T rows out.
"""

from __future__ import annotations

import pytest
from pool import GROUP_SIZES, RankPool
from rank_bodies import window_bytes
from rank_bodies.inputs import GroupSpec, Step


@pytest.mark.parametrize("result", ["plain", "window"])
@pytest.mark.parametrize("source", ["plain", "window"])
@pytest.mark.parametrize("record_format", ["compact", "portable"])
@pytest.mark.parametrize("ranks", GROUP_SIZES)
def test_copied_payload(pool: RankPool, ranks: int, record_format: str, source: str, result: str) -> None:
    spec = GroupSpec(8, 3, 24, 65, record_format=record_format)
    for seed, (routing, y_dtype) in enumerate(
        [("distinct", None), ("any", None), ("one", None), ("low half", "bfloat16"), ("round", None)]
    ):
        tokens = tuple((5 * rank + 3 * seed) % 25 for rank in range(ranks))
        step = Step(
            tokens, 3, 65, y_dtype=y_dtype, routing=routing, drop=0.2, source=source, result=result, seed=seed
        )
        for rank, n in enumerate(pool.run(ranks, window_bytes.count_copies, spec, step)):
            what = f"rank {rank} of {ranks}, {step}: {n}"
            dispatch, both = n["dispatch"], n["both"]
            assert set(dispatch) == {"dispatch_in", "dispatch_out", "combine_in", "combine_out"}
            away_in = n["tokens_away"] * n["row"] if source == "plain" else 0
            assert dispatch["dispatch_in"] <= away_in, what
            # Every row has to come out once: fewer would mean that the counter doesn't count.
            assert dispatch["dispatch_out"] == n["rows"] * n["row"], what
            assert dispatch["combine_in"] == dispatch["combine_out"] == 0, what
            assert both["dispatch_in"] == dispatch["dispatch_in"], what
            assert both["dispatch_out"] == dispatch["dispatch_out"], what
            y_in = n["rows_away"] * n["y_row"] if result == "plain" else 0
            assert both["combine_in"] <= y_in, what
            assert both["combine_out"] == n["tokens"] * n["out_row"], what


@pytest.mark.parametrize("source", ["plain", "window"])
@pytest.mark.parametrize("hidden", [16, 4096])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_outputs_share_nothing_with_the_window(pool: RankPool, ranks: int, hidden: int, source: str) -> None:
    """At H = 4096 outputs are above 1 MB and come from another allocator than small ones."""
    spec = GroupSpec(8, 2, 64, hidden)
    step = Step((64,) * ranks, 2, hidden, rows="random", source=source, result=source)
    for pointers in pool.run(ranks, window_bytes.outputs_are_private, spec, step):
        assert len(set(pointers)) == len(pointers), "live tensors share memory"


@pytest.mark.parametrize("record_format", ["compact", "portable"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_inputs_may_change_after_the_call(pool: RankPool, ranks: int, record_format: str) -> None:
    spec = GroupSpec(8, 2, 32, 40, record_format=record_format)
    pool.run(ranks, window_bytes.inputs_may_change, spec, Step((32,) * ranks, 2, 40))
