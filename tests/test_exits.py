"""However a job ends, nothing of it stays: no window, no file, no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WINDOW = 256 << 20  # bytes of each rank's window, well above what else on the machine moves in a second

RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist, moe_a2a
rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
group = moe_a2a.EPGroup(num_experts=2, top_k=1, max_tokens=4, hidden_size=64, dtype=torch.float32,
                        max_recv_rows=(120 << 20) // 256, timeout=30, warmup_timeout=30)
x = group.empty(4, 64).fill_(1)
d = moe_a2a.dispatch(x, torch.tensor([[0], [1], [0], [1]]), group)
y = d.empty_like_rows().fill_(2)
assert moe_a2a.combine(y, d.handle).eq(2).all()
print("ready", flush=True)
sys.stdin.readline()
if how == "exception":
    raise RuntimeError("on purpose")
if how == "sys.exit":
    sys.exit(3)
if how == "os._exit":
    os._exit(4)
if how == "close":
    group.close()
if how == "inside" and rank == 0:
    moe_a2a.dispatch(x, torch.zeros(4, 1, dtype=torch.int64), group)  # rank 1 never comes
if how in ("SIGKILL", "inside"):
    time.sleep(60)
"""


def shared_bytes() -> int:
    """What the whole machine holds in shared memory, memfd files included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


@pytest.mark.parametrize("how", ["close", "end", "exception", "sys.exit", "os._exit", "SIGKILL", "inside"])
def test_nothing_stays(tmp_path: Path, how: str) -> None:
    names = set(os.listdir("/dev/shm"))
    before = shared_bytes()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        assert shared_bytes() > before + WINDOW, "the windows should have been seen: this test can't tell"
        assert set(os.listdir("/dev/shm")) <= names
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        if how in ("SIGKILL", "inside"):
            time.sleep(0.5)
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        codes = [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    expected = {"exception": 1, "sys.exit": 3, "os._exit": 4, "SIGKILL": -9, "inside": -9}.get(how, 0)
    assert codes == [expected] * 2
    deadline = time.monotonic() + 20
    while shared_bytes() > before + WINDOW // 4:
        assert time.monotonic() < deadline, f"{(shared_bytes() - before) >> 20} MiB of shared memory stay"
        time.sleep(0.1)
    assert set(os.listdir("/dev/shm")) <= names
