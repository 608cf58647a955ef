"""How many payload bytes the operators copy, and that no output shares memory with a window.

The design's numbers: dispatch copies at most T rows in (those that only its own rank needs are not copied;
none with ``group.empty``) and N rows out; combine copies at most N rows in (those of its own tokens are not
copied; none with ``d.empty_like_rows``) and T rows out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


COUNTED = """
import ctypes, sys
import torch, torch.distributed as dist, moe_a2a
rank, store, window = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "window"
shim = ctypes.CDLL(None)
shim.bytes_in_rows.restype = ctypes.c_size_t
shim.watch_rows_of.argtypes = [ctypes.c_size_t]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
T, H, E, K = 24, 2503, 5, 3  # rows of 5006 bytes: nothing else is a multiple of that
group = moe_a2a.EPGroup(num_experts=E, top_k=K, max_tokens=T, hidden_size=H, timeout=30, warmup_timeout=30)
generator = torch.Generator().manual_seed(rank)
for _ in range(3):
    rows = torch.randn(T, H, generator=generator).bfloat16()
    idx = torch.randint(-1, E, (T, K), generator=generator)
    x = group.empty(T, H) if window else torch.empty(T, H, dtype=torch.bfloat16)
    x.copy_(rows)
    before = group.stats()["copied_bytes"]
    shim.watch_rows_of(2 * H)
    d = moe_a2a.dispatch(x, idx, group)
    seen_in_dispatch = shim.bytes_in_rows()
    shim.watch_rows_of(0)
    y = d.empty_like_rows() if window else torch.empty_like(d.x)
    y.copy_(d.x)
    shim.watch_rows_of(2 * H)
    out = moe_a2a.combine(y, d.handle)
    seen_in_combine = shim.bytes_in_rows()
    shim.watch_rows_of(0)
    after = group.stats()["copied_bytes"]
    counted = {name: after[name] - before[name] for name in after}
    mine = group.local_experts
    travels = ((idx >= 0) & ((idx < mine.start) | (idx >= mine.stop))).any(1).sum().item()
    own = d.handle.send_count_matrix[rank, mine.start : mine.stop].sum().item()
    N = len(d.x)
    assert seen_in_dispatch == counted["dispatch_in"] + counted["dispatch_out"], (seen_in_dispatch, counted)
    assert seen_in_dispatch == 2 * H * (N + (0 if window else travels)), (seen_in_dispatch, N, travels)
    assert seen_in_combine == counted["combine_in"] == (0 if window else 2 * H * (N - own)), (seen_in_combine, counted)
    assert counted["combine_out"] == 2 * H * T
print("counted")
"""


@pytest.mark.parametrize("where", ["ordinary", "window"])
def test_copied_payload_as_seen_from_outside(tmp_path: Path, where: str) -> None:
    """What the product counts is what went through memcpy, and that is the design's number."""
    shim = tmp_path / "memcpy_count.so"
    source = Path(__file__).with_name("memcpy_count.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None, "the package was built with a compiler; where is it?"
    subprocess.run(
        [compiler, "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", str(shim), str(source)], check=True
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COUNTED, str(rank), str(tmp_path / "store"), where],
            env={**os.environ, "LD_PRELOAD": str(shim)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=90)
            assert rank.returncode == 0 and out == "counted\n", err[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
