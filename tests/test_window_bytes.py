"""How many payload bytes the operators copy, and that no output shares memory with a window.

The design's numbers: dispatch copies at most T rows in (those that only its own rank needs are not copied;
none with ``group.empty``) and N rows out; combine copies at most N rows in (those of its own tokens are not
copied; none with ``d.empty_like_rows``) and T rows out. A push writes the rows that leave, once each, into the windows
of others instead, and copies nothing in. An asynchronous call may copy own rows, too: T in for dispatch, N in for combine;
its dispatch never pushes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lanes import crossed
from pool import GROUP_SIZES, RankPool
from rank_bodies import window_bytes
from rank_bodies.inputs import GroupSpec, Step

PROTOCOLS = ["pull", "push"]
FORMATS = ["compact", "portable", "line"]
WHERE = ["plain", "window"]


@pytest.mark.parametrize(
    ("result", "source", "later", "protocol", "record_format", "ranks"),
    crossed(WHERE, WHERE, {"at once": "", "async": "both"}, PROTOCOLS, FORMATS, GROUP_SIZES, strength=3),
)
def test_copied_payload(
    pool: RankPool, ranks: int, record_format: str, protocol: str, later: str, source: str, result: str
) -> None:
    spec = GroupSpec(8, 3, 24, 65, record_format=record_format, protocol=protocol)
    for seed, (routing, y_dtype) in enumerate(
        [("distinct", None), ("any", None), ("one", None), ("low half", "bfloat16"), ("round", None)]
    ):
        step = Step(
            tuple((5 * rank + 3 * seed) % 25 for rank in range(ranks)),
            3,
            65,
            y_dtype=y_dtype,
            routing=routing,
            drop=0.2,
            source=source,
            result=result,
            later=later,
            seed=seed,
        )
        for rank, n in enumerate(pool.run(ranks, window_bytes.count_copies, spec, step)):
            check_counts(n, step, protocol, f"rank {rank} of {ranks}, {record_format}, {step}: {n}")


def check_counts(n: dict[str, Any], step: Step, protocol: str, what: str) -> None:
    """Bytes in are bounds: fewer would be better. What comes out has to, once; so has what is pushed."""
    dispatch, both = n["dispatch"], n["both"]
    assert set(dispatch) == {
        "dispatch_in",
        "dispatch_out",
        "dispatch_push",
        "combine_in",
        "combine_out",
        "combine_push",
    }
    pushes = protocol == "push" and not step.later
    tokens_in = 0 if pushes else n["tokens_kept"] if step.later else n["tokens_away"]
    assert dispatch["dispatch_in"] <= (tokens_in * n["row"] if step.source == "plain" else 0), what
    assert dispatch["dispatch_push"] == (n["rows_leaving"] * n["row"] if pushes else 0), what
    assert dispatch["dispatch_out"] == n["rows"] * n["row"], what
    for name in ("combine_in", "combine_out", "combine_push"):
        assert dispatch[name] == 0, what
    for name in ("dispatch_in", "dispatch_out", "dispatch_push"):
        assert both[name] == dispatch[name], what
    rows_in = (n["rows"] - n["rows_away"] if step.later else 0) + (
        n["rows_away"] if protocol == "pull" else 0
    )
    assert both["combine_in"] <= (rows_in * n["y_row"] if step.result == "plain" else 0), what
    assert both["combine_push"] == (n["rows_away"] * n["y_row"] if protocol == "push" else 0), what
    assert both["combine_out"] == n["tokens"] * n["out_row"], what


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_copied_payload_in_waves(pool: RankPool, ranks: int, protocol: str) -> None:
    """Waves write no row twice; in a pull combine the rows of a crowded owner are kept by whoever waits for them, once."""
    spec = GroupSpec(8, 3, 24, 65, recv_rows=4, protocol=protocol)
    step = Step((24, 0, 17)[:ranks], 3, 65, routing="any", drop=0.2)
    for rank, n in enumerate(pool.run(ranks, window_bytes.count_copies, spec, step)):
        what = f"rank {rank} of {ranks}: {n}"
        both = n["both"]
        assert both["dispatch_in"] <= (n["tokens_away"] * n["row"] if protocol == "pull" else 0), what
        assert both["dispatch_push"] == (n["rows_leaving"] * n["row"] if protocol == "push" else 0), what
        assert both["dispatch_out"] == n["rows"] * n["row"], what
        rows_in = n["rows_away"] + n["rows_leaving"] if protocol == "pull" else 0
        assert both["combine_in"] <= rows_in * n["y_row"], what
        assert both["combine_push"] == (n["rows_away"] * n["y_row"] if protocol == "push" else 0), what
        assert both["combine_out"] == n["tokens"] * n["out_row"], what


@pytest.mark.parametrize(
    ("source", "hidden", "protocol", "ranks"), crossed(WHERE, [16, 4096], PROTOCOLS, [1, 2, 4])
)
def test_outputs_share_nothing_with_the_window(
    pool: RankPool, ranks: int, protocol: str, hidden: int, source: str
) -> None:
    """At H = 4096 outputs are above 1 MB and come from another allocator than small ones."""
    spec = GroupSpec(8, 2, 64, hidden, protocol=protocol)
    step = Step((64,) * ranks, 2, hidden, rows="random", source=source, result=source)
    for pointers in pool.run(ranks, window_bytes.outputs_are_private, spec, step):
        assert len(set(pointers)) == len(pointers), "live tensors share memory"


@pytest.mark.parametrize(
    ("record_format", "protocol", "recv_rows", "ranks"),
    crossed(FORMATS, PROTOCOLS, {"one wave": None, "waves": 5}, [2, 4], strength=3),
)
def test_inputs_may_change_after_the_call(
    pool: RankPool, ranks: int, recv_rows: int | None, protocol: str, record_format: str
) -> None:
    spec = GroupSpec(8, 2, 32, 40, record_format=record_format, recv_rows=recv_rows, protocol=protocol)
    pool.run(ranks, window_bytes.inputs_may_change, spec, Step((32,) * ranks, 2, 40))


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("protocol", ["pull", "push"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_fused_call_copies_each_row_once(
    pool: RankPool, ranks: int, protocol: str, gradients: bool
) -> None:
    """Each pair's row is written once, into its owner's window, and nothing else is copied until the sums; backward needs the
    received rows, so they are kept, once.
    """
    for record_format in ("compact", "portable"):
        spec = GroupSpec(8, 3, 24, 65, record_format=record_format, protocol=protocol)
        for routing in ("distinct", "any", "one"):
            step = Step((24, 0, 17)[:ranks], 3, 65, routing=routing, drop=0.2, rows="random")
            found = pool.run(ranks, window_bytes.count_fused_copies, spec, step, gradients)
            for rank, n in enumerate(found):
                copied, row, what = n["copied"], n["row"], f"rank {rank} of {ranks}, {record_format}, {n}"
                kept = n["rows"] if gradients else 0
                assert copied["dispatch_in"] == 0, what
                assert copied["dispatch_push"] == n["leaving"] * row, what
                assert copied["dispatch_out"] == (n["own"] + kept) * row, what
                assert copied["combine_in"] == 0, what
                returned = n["rows"] - n["own"] if protocol == "push" else 0
                assert copied["combine_push"] == returned * row, what
                assert copied["combine_out"] == n["tokens"] * row, what
            written = sum(
                n["copied"]["dispatch_push"]
                + n["copied"]["dispatch_out"]
                - (n["rows"] * n["row"] if gradients else 0)
                for n in found
            )
            assert written == sum(n["rows"] for n in found) * found[0]["row"]


START = """
import ctypes, sys
import torch, torch.distributed as dist, moe_a2a
rank, store = int(sys.argv[1]), sys.argv[2]
shim = ctypes.CDLL(None)
shim.bytes_in_rows.restype = ctypes.c_size_t
shim.watch_rows_of.argtypes = [ctypes.c_size_t]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
"""


FUSED_COUNTED = (
    START
    + """
T, H, E, K = 24, 2503, 5, 3  # rows of 10012 bytes: nothing else is a multiple of that
for protocol in ("pull", "push"):
    group = moe_a2a.EPGroup(num_experts=E, top_k=K, max_tokens=T, hidden_size=H, dtype=torch.float32, timeout=30,
        warmup_timeout=30, protocol=protocol)
    push = protocol == "push"
    generator = torch.Generator().manual_seed(rank)
    local = group.local_experts
    up, down = torch.randn(len(local), 3, H) / 50, torch.randn(len(local), H, 3)
    for turn in range(6):
        x = torch.randn(T, H, generator=generator)
        idx = torch.randint(-1, E, (T, K), generator=generator)
        up.requires_grad_(turn >= 4)
        dist.barrier()
        before = group.stats()["copied_bytes"]
        shim.watch_rows_of(4 * H)
        if turn < 2:
            out = moe_a2a.moe_apply(lambda rows, e: rows.mul_(2.0), x, idx, None, group)
        else:
            out = moe_a2a.moe(x, idx, None, up, down, group, gated=False)
        seen = shim.bytes_in_rows()
        shim.watch_rows_of(0)
        after = group.stats()["copied_bytes"]
        counted = {name: after[name] - before[name] for name in after}
        own = ((idx >= local.start) & (idx < local.stop)).sum().item()
        leave = (idx >= 0).sum().item() - own
        matrix = group.stats()["send_count_matrix"]
        N = matrix[:, local.start : local.stop].sum().item()
        kept = N if turn >= 4 else 0
        give = N - own if push else 0
        assert seen == 4 * H * (own + leave + kept + give), (turn, seen, 4 * H, own, leave, kept, give, counted)
        assert counted == {
            "dispatch_in": 0, "dispatch_push": 4 * H * leave, "dispatch_out": 4 * H * (own + kept),
            "combine_in": 0, "combine_push": 4 * H * give, "combine_out": 4 * H * T,
        }, counted
    print("counted", protocol, flush=True)
"""
)


COUNTED = (
    START
    + """
T, H, E, K = 24, 2503, 5, 3  # rows of 5006 bytes: nothing else is a multiple of that
generator = torch.Generator().manual_seed(rank)
for protocol in ("pull", "push"):
    group = moe_a2a.EPGroup(num_experts=E, top_k=K, max_tokens=T, hidden_size=H, timeout=30, warmup_timeout=30,
        protocol=protocol)
    push = protocol == "push"
    for turn in range(6):
        window = turn % 2 == 1
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
        away = (idx >= 0) & ((idx < mine.start) | (idx >= mine.stop))
        travels, leave = away.any(1).sum().item(), away.sum().item()
        own = d.handle.send_count_matrix[rank, mine.start : mine.stop].sum().item()
        N = len(d.x)
        begin = leave if push else 0 if window else travels
        give = N - own if push or not window else 0
        into = ("push", "in") if push else ("in", "push")
        assert counted["dispatch_" + into[0]] == 2 * H * begin and counted["dispatch_" + into[1]] == 0, counted
        assert counted["combine_" + into[0]] == 2 * H * give and counted["combine_" + into[1]] == 0, counted
        assert counted["dispatch_out"] == 2 * H * N, counted
        assert seen_in_dispatch == 2 * H * (N + begin), (seen_in_dispatch, counted, N, travels, leave)
        assert seen_in_combine == 2 * H * give, (seen_in_combine, counted, N, own)
        assert counted["combine_out"] == 2 * H * T
    print("counted", protocol, flush=True)
"""
)


@pytest.mark.parametrize("program", [COUNTED, FUSED_COUNTED], ids=["parts", "fused"])
def test_copied_payload_as_seen_from_outside(tmp_path: Path, program: str) -> None:
    """What the product counts is what went through memcpy, and that is the design's number: ordinary rows and rows in a window
    in turns, fused calls with and without gradients; pulled and pushed.
    """
    shim = tmp_path / "memcpy_count.so"
    source = Path(__file__).with_name("memcpy_count.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None, "the package was built with a compiler; where is it?"
    subprocess.run(
        [compiler, "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", str(shim), str(source)],
        check=True,
        timeout=120,
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "store")],
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
            assert rank.returncode == 0 and out == "counted pull\ncounted push\n", err[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
