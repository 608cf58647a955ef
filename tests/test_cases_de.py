"""Sections D and E of the case list, cases 42 and 45, and what goes in waves; each in every way a group can be run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import crossed, slow
from pool import RankPool
from rank_bodies import cases_de as cases

ROOT = Path(__file__).resolve().parent.parent

PULL: dict[str, Any] = {}
PUSH: dict[str, Any] = {"protocol": "push"}
MIXED: dict[str, Any] = {"protocol": "push", "_tiling": {"mix": 3, "flag_rows": 2}}


def settings(*names: str) -> dict[str, dict[str, Any]]:
    """(format, protocol) by name: pull, push, or by chance."""
    protocols = {"pull": PULL, "push": PUSH, "mixed": MIXED}
    return {
        f"{fmt}-{protocol}": {**protocols[protocol], "record_format": fmt}
        for fmt in ("compact", "portable", "line")
        for protocol in (names or ("pull", "mixed"))
    }


def ways(*names: str) -> Any:
    """Parametrises over these settings."""
    made = settings(*names)
    return pytest.mark.parametrize("setting", made.values(), ids=made)


FLOATS = {
    "float32": [
        0x80000000,
        0x80000001,
        0x00000001,
        0x7FC00001,
        0xFFFFFFFF,
        0x7F800001,
        0x7F800000,
        0xFF800000,
    ],
    "bfloat16": [0x8000, 0x8001, 0x0001, 0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80],
}


@pytest.mark.parametrize(
    ("setting", "flush", "dtype"), crossed(settings(), {"": False, "flush": True}, list(FLOATS))
)
def test_22_24_bits_of_rows_mean_nothing(
    pool: RankPool, setting: dict[str, Any], dtype: str, flush: bool
) -> None:
    pool.run(2, cases.special_bits, setting, getattr(torch, dtype), FLOATS[dtype], flush)


CODES = [
    (2**8 - 1, "compact"),
    (2**8 - 1, "portable"),
    (2**8 - 1, "line"),
    (2**16 - 1, "compact"),
    (2**16, "portable"),
    (2**31 - 1, "compact"),
    (2**31 - 1, "portable"),
    (2**31 - 1, "line"),
    (2**32 - 1, "compact"),
    (2**32, "compact"),
    (2**62, "compact"),
]
SIZES = {"pull": (2, 3, 4, 8), "mixed": (4, 2)}


@pytest.mark.parametrize(
    ("protocol", "code_max", "fmt", "ranks"),
    [
        # Quick: each limit in both protocols, the sizes taken in turn.
        pytest.param(*case, marks=() if number % len(sizes) == at else pytest.mark.slow)
        for protocol, sizes in SIZES.items()
        for number, (code_max, fmt) in enumerate(CODES)
        for at, ranks in enumerate(sizes)
        for case in [(protocol, code_max, fmt, ranks)]
    ],
)
def test_26_wrap(pool: RankPool, ranks: int, code_max: int, fmt: str, protocol: str) -> None:
    setting = {**(MIXED if protocol == "mixed" else PULL), "record_format": fmt}
    pool.run(ranks, cases.across_a_limit, setting, code_max, code_max - 3, 10)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("protocol", ["pull", "push"])
def test_28_more_ranks_than_cores(pool: RankPool, threads: int, protocol: str) -> None:
    setting = PUSH if protocol == "push" else PULL
    assert pool.run(8, cases.many_steps, setting, 150, threads, 2, timeout=120) == [0] * 8


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("protocol", ["pull", "push"])
def test_28_at_its_real_length(pool: RankPool, threads: int, protocol: str) -> None:
    setting = PUSH if protocol == "push" else PULL
    assert pool.run(8, cases.many_steps, setting, 5000, threads, 2, timeout=600) == [0] * 8


@ways()
def test_29_pauses(pool: RankPool, setting: dict[str, Any]) -> None:
    pool.run(4, cases.paused_everywhere, setting, 40, 6.0)


@pytest.mark.slow
@ways()
def test_29_at_its_real_length(pool: RankPool, setting: dict[str, Any]) -> None:
    pool.run(4, cases.paused_everywhere, setting, 500, 20.0, timeout=300)


ORDERS = [
    "D1 D2 C1 C2",
    "D1 D2 C2 C1",
    "D1 X1 D2 C2",
    "B1 B2 W1 W2 C1 C2",
    "B1 B2 W2 W1 C2 C1",
    "B1 B2 W2 C2 W1 C1",
    "B1 W1 b1 B2 W2 b2 w1 w2",
    "B1 B2 W1 b1 W2 b2 w2 w1",
    "B1 B2 W1 b1 B3 W2 b2 w1 W3 b3 B4 w2 w3 W4 C4",
    "B1 X1 B2 X2 B3 X3 D4 C4",
    "D1 b1 X1 D2 b2 D3 C3 w2",
]


@pytest.mark.parametrize(("setting", "order", "ranks"), crossed(settings(), ORDERS, [2, 4]))
def test_31_calls_in_flight(pool: RankPool, setting: dict[str, Any], order: str, ranks: int) -> None:
    depth = 3 if "B3 W2" in order or "D3 C3" in order else 2
    pool.run(ranks, cases.in_flight, {**setting, "depth": depth}, order)


@ways("pull", "push")
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_was_never_waited_for_expires(pool: RankPool, setting: dict[str, Any], ranks: int) -> None:
    for found in pool.run(ranks, cases.expired_in_flight, setting):
        assert found["dispatch"].startswith("HandleExpired") and "depth is 2" in found["dispatch"]
        assert found["twice"].startswith("HandleExpired") and "combined already" in found["twice"]
        assert found["combine"].startswith("HandleExpired") and "depth is 2" in found["combine"]
        assert found["ticket"].startswith("HandleExpired") and "already" in found["ticket"]


@pytest.mark.parametrize("setting", [PULL, PUSH], ids=["pull", "push"])
def test_waits_of_two_threads(pool: RankPool, setting: dict[str, Any]) -> None:
    assert pool.run(2, cases.waited_by_two_threads, setting) == [[True] * 6] * 2


@pytest.mark.parametrize("what", ["pad_to", "async", "waves"])
def test_no_memory_on_one_rank(pool: RankPool, what: str) -> None:
    first, second = pool.run(2, cases.no_memory, PULL, what)
    assert first.startswith("OutOfMemory") and "rank 0" in first
    if what == "async" and second == "nothing":
        return  # the rows could be kept, and what there was no memory for was rank 0's own result
    assert second.startswith("PeerAborted") and "rank 0" in second and "memory" in second


@ways("pull", "push")
@pytest.mark.parametrize("rows", [5, 100])
def test_async_on_some_ranks(pool: RankPool, setting: dict[str, Any], rows: int) -> None:
    refused = "protocol" in setting and rows == 5
    assert pool.run(3, cases.async_on_some_ranks, setting, rows) == ["mismatch" if refused else "rows"] * 3


@ways()
@pytest.mark.parametrize("ranks", [2, 3])
def test_aborts_among_calls_in_flight(pool: RankPool, setting: dict[str, Any], ranks: int) -> None:
    for found in pool.run(ranks, cases.aborted_in_flight, setting):
        assert (
            len(found) == 27 and found.count("good") == 18 and found.count("own") + found.count("peer") == 9
        )


# Compiled code doesn't know how rows travel, and a compiler in each rank takes its time.
@pytest.mark.parametrize(("setting", "ranks"), crossed({"pull": PULL, "push": slow(PUSH)}, [2, slow(4)]))
def test_34_replay_with_other_counts(pool: RankPool, setting: dict[str, Any], ranks: int) -> None:
    # Every call dispatched twice, compiled and not: nothing was folded away or called once more.
    assert pool.run(ranks, cases.replayed, setting, 12, timeout=200) == [24] * ranks


def test_35_several_groups() -> None:
    world = RankPool(4)
    try:
        for setting in (PULL, PUSH):
            world.run(4, cases.several_groups, setting, 100, timeout=100)
    finally:
        assert not world.close()


@pytest.mark.parametrize("setting", [PULL, PUSH], ids=["pull", "push"])
def test_38a_a_thread_for_each_group(pool: RankPool, setting: dict[str, Any]) -> None:
    assert pool.run(2, cases.thread_per_group, setting, 200, timeout=120) == [[], []]


@pytest.mark.parametrize("setting", [PULL, PUSH], ids=["pull", "push"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_38b_threads_on_one_group_take_turns(pool: RankPool, setting: dict[str, Any], ranks: int) -> None:
    seen = pool.run(ranks, cases.threads_on_one_group, setting, 100, timeout=120)
    assert all(each["good"] + each["mismatch"] == 200 for each in seen)
    # A call is good or a mismatch on all ranks alike.
    assert len({each["good"] for each in seen}) == 1
    if ranks == 1:
        assert seen[0]["good"] == 200


@ways("pull", "push")
def test_38c_swapped_layers(pool: RankPool, setting: dict[str, Any]) -> None:
    assert pool.run(3, cases.swapped_layers, setting) == [["mismatch"] * 2] * 3


@pytest.mark.parametrize("setting", [PULL, PUSH], ids=["pull", "push"])
@pytest.mark.parametrize("order", ["crosswise", "one goes on", "some leave", "with a handle open"])
def test_45_orders_of_closing(pool: RankPool, setting: dict[str, Any], order: str) -> None:
    assert pool.run(3, cases.orders_of_closing, setting, order) == [["GroupClosed"] * 2] * 3


@pytest.mark.parametrize(
    ("setting", "ranks", "rows"), crossed(settings("pull", "push", "mixed"), [1, 2, 4], [1, 3, 7])
)
def test_waves(pool: RankPool, setting: dict[str, Any], ranks: int, rows: int) -> None:
    waves = pool.run(ranks, cases.more_rows_than_the_window, setting, rows)
    if ranks == 1:
        assert waves[0] >= 5
    else:
        # 8, 3, 8, 0 and 1 rows a rank into `rows`; a group that pulls goes in waves in combine, one that pushes in dispatch.
        needed = [max(1, -(-count * ranks // rows)) for count in (8, 3, 8, 0, 1)]
        if setting.get("_tiling"):
            assert all(5 <= each <= sum(needed) for each in waves)
        elif setting.get("protocol") == "push":
            assert waves == [sum(needed)] * ranks
        else:
            assert waves == [5 + sum(each for each in needed if each > 1)] * ranks


@ways("pull")
@pytest.mark.parametrize("what", ["weights", "y"])
def test_failures_in_waves_reach_who_is_concerned(pool: RankPool, setting: dict[str, Any], what: str) -> None:
    results = pool.run(3, cases.waves_and_failures, setting, what)
    assert results[1] == "BadValue"
    assert results[0] == results[2] == ("good" if what == "weights" else "PeerAborted")


def test_thresholds_choose_push_or_pull(pool: RankPool) -> None:
    assert pool.run(2, cases.protocol_of_large_and_small) == [[1, 0, 0, 1]] * 2


# ------------------------------------------------------------------------------------------------ 42 and 45, whole programs

PROGRAM = """
    import os, sys, time
    import torch, torch.distributed as dist, moe_a2a

    how, path = sys.argv[1], sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + path, rank=int(sys.argv[3]), world_size=2)
    def make():
        return moe_a2a.EPGroup(num_experts=2, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32, timeout=20.0,
                               protocol="push")
    def step(group):
        d = moe_a2a.dispatch(torch.ones(2, 8), torch.tensor([[0], [1]]), group)
        assert torch.equal(moe_a2a.combine(d.x, d), torch.ones(2, 8))
    group = make()
    step(group)
    print("stepped", flush=True)
    if how == "exit without close":
        pass
    elif how == "sys.exit":
        sys.exit(0)
    elif how == "exception":
        raise RuntimeError("on purpose")
    elif how == "wait to be killed":
        time.sleep(600)
    elif how == "close, then destroy":
        group.close()
        group.close()
        dist.destroy_process_group()
    elif how == "destroy, then close":
        dist.destroy_process_group()
        step(group)  # the windows need no process group
        group.close()
    elif how == "destroy, no close":
        dist.destroy_process_group()
    elif how == "twenty times":
        group.close()
        first = None
        for turn in range(20):
            group = make()
            step(group)
            group.close()
            now = len(os.listdir("/proc/self/fd")), sum("memfd:moe_a2a" in m for m in open("/proc/self/maps"))
            if turn == 1: first = now
        assert now == first, (first, now)
    elif how == "module global":
        sys.modules["moe_a2a"].kept = group  # lives until the interpreter has gone
    elif how == "open window tensors":
        sys.modules["moe_a2a"].kept = [group.empty(2), group, group.empty(1)]
"""


def shm() -> set[str]:
    """What lies in /dev/shm, with the windows of processes that live."""
    return set(os.listdir("/dev/shm"))


def start(tmp_path: Path, how: str) -> list[subprocess.Popen[str]]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    return [
        subprocess.Popen(
            [sys.executable, str(script), how, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    "how",
    [
        "exit without close",
        slow("sys.exit"),  # quick in test_exits.py
        "exception",
        "close, then destroy",
        "destroy, then close",
        "destroy, no close",
        "twenty times",
        slow("module global"),  # the next one has more of it
        "open window tensors",
    ],
)
def test_42_45_ways_to_end(tmp_path: Path, how: str) -> None:
    before = shm()
    for process in start(tmp_path, how):
        out, err = process.communicate(timeout=120)
        # torch's gloo threads may abort a process that ends without destroy_process_group: 4 of 10 times in a program that
        # doesn't know this package (docs/measurements.md).
        torch_aborted = process.returncode == -signal.SIGABRT and err.rstrip().endswith(
            "terminate called without an active exception"
        )
        if not (torch_aborted and "destroy" not in how):
            assert process.returncode == (1 if how == "exception" else 0), err[-2000:]
        assert out.startswith("stepped")
        if how != "exception":
            assert "Traceback" not in err, err[-2000:]
    assert shm() <= before


def test_42_killed(tmp_path: Path) -> None:
    before = shm()
    processes = start(tmp_path, "wait to be killed")
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "stepped\n"
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate(timeout=60)
    assert shm() <= before
    again = tmp_path / "again"
    again.mkdir()
    for process in start(again, "close, then destroy"):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-2000:]
