"""However a job ends, nothing of it stays: no window, no file, no process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lanes import slow

RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist, moe_a2a
rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
group = moe_a2a.EPGroup(num_experts=2, top_k=1, max_tokens=4, hidden_size=64, dtype=torch.float32,
                        timeout=30, warmup_timeout=30)
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


def windows_of(pid: int) -> set[str]:
    """Inodes of the windows that a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "/memfd:moe_a2a" in line}


def holders(inodes: set[str]) -> list[str]:
    """Processes that map one of these files or hold a descriptor of it: a file without a name lives as long as these."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if windows_of(int(process.name)) & inodes:
                found.append(f"{process.name} maps it")
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.stat().st_ino) in inodes and "memfd:moe_a2a" in os.readlink(fd):
                        found.append(f"{process.name} holds {fd}")
    return found


@pytest.mark.parametrize(
    "how", ["close", "end", "exception", "sys.exit", slow("os._exit"), "SIGKILL", "inside"]
)
def test_nothing_stays(tmp_path: Path, how: str) -> None:
    names = set(os.listdir("/dev/shm"))
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
        inodes = windows_of(ranks[0].pid)
        assert len(inodes) == 2 and inodes == windows_of(ranks[1].pid)
        assert len(holders(inodes)) == 2, "this test must be able to see them"
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
    assert holders(inodes) == []
    assert set(os.listdir("/dev/shm")) <= names
