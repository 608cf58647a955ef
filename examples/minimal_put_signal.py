"""The smallest chain of a Triton rank: allocate symmetric memory, put, signal, wait, confirm, tear down.

``python examples/minimal_put_signal.py`` starts two processes. In every epoch each of them writes one row into every peer's
window and then the epoch's code behind it; a kernel of the peer polls for the code and copies the row out; the host
compares it. The last line says what was verified, or what was not; the exit code is 0 or 1 accordingly.

Without a GPU the windows are shared memory and Triton's interpreter runs the kernels. What is different on an NPU stands in
examples/README.md. Shape symbols: H columns of a row, R ranks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import tempfile
import time
from dataclasses import dataclass

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    raise SystemExit('NOT verified: triton is not installed; run: pip install "moe_a2a[triton]"') from None

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from moe_a2a.op_host.heap import SharedMemoryHeap, SymmetricHeap, TorchSymmetricHeap
from moe_a2a.op_host.layout import Format, WindowLayout, window_layout
from moe_a2a.op_host.meeting import Meeting
from moe_a2a.op_kernel.triton.signal import poll, signal, words_at

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COLUMNS = 64  # H
MEETING_TIMEOUT = datetime.timedelta(seconds=120)  # for processes that start on a busy machine
FAULTS = ("none", "no-signal", "wrong-row")


# ---------------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def put_signal(  # type: ignore[no-untyped-def]
    windows, row, row_at, flag_at, code, me, R: tl.constexpr, H: tl.constexpr, SYS: tl.constexpr
):
    """Writes ``row`` into the window of each peer, then the code behind it.

    Example, R = 2, rank 0 in epoch 3: rank 1's window gets ``row`` at ``row_at`` and eight times the int32 3 at ``flag_at``.

    Args:
        windows: int64 [R], address of each rank's window as this process (or its device) maps it.
        row: float32 [H].
        row_at, flag_at: int64, byte offsets in every window; from the layout, never computed here.
        code: int32, what says that the row of this epoch is there.
        SYS: codes are atomics of system scope (GPUs); a plain store orders nothing there.
    """
    columns = tl.arange(0, H)
    for peer in range(R):
        if peer != me:
            window = tl.load(windows + peer)
            # Bytes are added to the address first, then it becomes a pointer: the other way round doesn't lower for Ascend.
            there = (window + row_at).to(tl.pointer_type(tl.float32))
            tl.store(there + columns, tl.load(row + columns))
            # A barrier, so that the row is there before the code; then the code.
            signal(words_at(window + flag_at), code, SYS)


@triton.jit
def wait_take(  # type: ignore[no-untyped-def]
    windows, out, arrived, row_at, flag_at, code, me, polls, H: tl.constexpr, SYS: tl.constexpr
):
    """Polls the own window for a code; when it is there, copies the row before it.

    Example, rank 1 in epoch 3, rank 0's row is {7, 7, ...}: out = {7, 7, ...} and arrived = {1}; if rank 0 is late, {0}.

    Args:
        out: float32 [H], written. arrived: int32 [1], written.
        polls: int32, how often to look. Bounded: a kernel that polls for ever can't be stopped, or asked what it waits for.
        The others: see :func:`put_signal`.
    """
    columns = tl.arange(0, H)
    window = tl.load(windows + me)
    # Compared with ==, all eight words: neither an older epoch nor half a code is taken for this one.
    seen = poll(words_at(window + flag_at), code, code, polls, SYS)
    if seen == code:
        here = (window + row_at).to(tl.pointer_type(tl.float32))
        tl.store(out + columns, tl.load(here + columns))
    tl.store(arrived, tl.where(seen == code, 1, 0))


# ------------------------------------------------------------------------------------------------------------- the host


@dataclass(frozen=True)
class Settings:
    ranks: int
    epochs: int
    timeout: float
    fault: str
    seed: int


def place(layout: WindowLayout, epoch: int, source: int) -> tuple[int, int]:
    """(row, flag) of a source in an epoch: byte offsets in every window. Epochs take turns in the layout's slots."""
    slot = epoch % layout.slots
    row = (
        layout.row + slot * layout.row_slot_stride + source * 512
    )  # rows of the portable format begin at multiples of 512
    flag = layout.row_flag + slot * layout.row_flag_slot_stride + source * layout.row_flag_stride
    return row, flag


def row_of(rank: int, epoch: int) -> torch.Tensor:
    """float32 [H], what ``rank`` sends in ``epoch``: no two are alike."""
    return (torch.arange(COLUMNS) + 1000 * rank + 10_000 * epoch).float()


def await_row(
    heap: SymmetricHeap,
    windows: torch.Tensor,
    layout: WindowLayout,
    epoch: int,
    source: int,
    timeout: float,
) -> torch.Tensor:
    """float32 [H], the row of ``source``. Launches the wait again until it is there, or raises TimeoutError."""
    out = torch.full((COLUMNS,), float("nan"), device=DEVICE)
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    row_at, flag_at = place(layout, epoch, source)
    deadline = time.monotonic() + timeout
    polls = 100 if DEVICE.type == "cpu" else 100_000
    while True:
        wait_take[(1,)](
            windows,
            out,
            arrived,
            row_at,
            flag_at,
            layout.code(epoch),
            heap.rank,
            polls,
            H=COLUMNS,
            SYS=DEVICE.type == "cuda",
        )
        if arrived.item():  # waits for the kernel
            return out.cpu()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {heap.rank}: the row of rank {source} in epoch {epoch} didn't come within {timeout:g} s"
            )
        time.sleep(0.001)  # with more ranks than cores the peer needs the core


def run_rank(rank: int, settings: Settings, store: str) -> None:
    ranks = settings.ranks
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=MEETING_TIMEOUT,
    )

    # 1. Symmetric memory: a window of the same layout on every rank, each mapped by all of them.
    layout = window_layout(
        world_size=ranks,
        num_experts=ranks,
        top_k=1,
        max_tokens=1,
        row_bytes=4 * COLUMNS,
        recv_rows=ranks,
        record_format=Format.PORTABLE,
        push=True,
    )
    meeting = Meeting(None, rank, ranks, "minimal_put_signal")
    heap: SymmetricHeap
    if DEVICE.type == "cuda":
        heap = TorchSymmetricHeap(meeting, layout, torch.device("cuda", torch.cuda.current_device()))
    else:
        heap = SharedMemoryHeap(meeting, layout)
    windows = torch.tensor(heap.addresses, dtype=torch.int64, device=DEVICE)
    where = ", ".join(f"rank {peer}'s at {address:#x}" for peer, address in enumerate(heap.addresses))
    print(f"rank {rank}: windows of {heap.size} bytes, as it maps them: {where}", flush=True)

    late = random.Random(settings.seed + rank)
    for epoch in range(1, settings.epochs + 1):
        time.sleep(late.uniform(0, 0.02))
        spoiled = rank == 1 and epoch == settings.epochs
        row = row_of(rank, epoch - (spoiled and settings.fault == "wrong-row"))
        row_at, flag_at = place(layout, epoch, rank)
        if not (spoiled and settings.fault == "no-signal"):
            # 2. Put, and publish the epoch. No barrier with anybody, and the slot is free: who sent me the row of epoch - 1 had
            # taken mine of epoch - 2 before, and I heard from every peer. So two slots are enough.
            put_signal[(1,)](
                windows,
                row.to(DEVICE),
                row_at,
                flag_at,
                layout.code(epoch),
                rank,
                R=ranks,
                H=COLUMNS,
                SYS=DEVICE.type == "cuda",
            )
        for source in range(ranks):
            if source != rank:
                # 3. Wait for the peer's epoch, and 4. confirm on the host.
                got = await_row(heap, windows, layout, epoch, source, settings.timeout)
                if not torch.equal(got, row_of(source, epoch)):
                    raise AssertionError(
                        f"rank {rank}: epoch {epoch} brought {got[:3].tolist()}... from rank {source}, expected "
                        f"{row_of(source, epoch)[:3].tolist()}..."
                    )
        if rank == 0:
            print(f"epoch {epoch}: rank 0 has the rows of all peers", flush=True)

    # 5. Tear down in order: kernels that use the windows have ended; then the windows go; then what the ranks met by. A peer
    # may still be reading: its mapping keeps the memory, so nobody has to wait for anybody.
    heap.close()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (R)")
    parser.add_argument("--epochs", type=int, default=5, help="how often everybody writes to everybody")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds to wait for a row")
    parser.add_argument("--seed", type=int, default=0, help="of the random delays")
    parser.add_argument(
        "--inject-fault", choices=FAULTS, default="none", help="what rank 1 does wrong in the last epoch"
    )
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.epochs < 1:
        parser.error("--ranks must be at least 2 and --epochs at least 1")
    settings = Settings(
        arguments.ranks, arguments.epochs, arguments.timeout, arguments.inject_fault, arguments.seed
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(run_rank, (settings, os.path.join(folder, "store")), nprocs=settings.ranks)
        except ProcessRaisedException as failure:
            print(f"NOT verified: {str(failure).strip().splitlines()[-1]}", flush=True)
            return 1
        except ProcessExitedException as failure:
            print(f"NOT verified: {failure}", flush=True)
            return 1
    rows = settings.epochs * settings.ranks * (settings.ranks - 1)
    how = (
        "shared memory, kernels interpreted"
        if DEVICE.type == "cpu"
        else f"the memory of {torch.cuda.get_device_name()}"
    )
    print(
        f"verified: {settings.ranks} ranks, {settings.epochs} epochs, {rows} rows through {how}", flush=True
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
