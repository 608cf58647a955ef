"""Rank bodies: symmetric memory, in shared memory and, with a stand-in for the device, by torch's interface."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from pool import RankContext

import moe_a2a
from moe_a2a import errors
from moe_a2a.op_host import heap as heap_module
from moe_a2a.op_host import native, transport
from moe_a2a.op_host.heap import HeapUnavailable, SharedMemoryHeap, SymmetricHeap, TorchSymmetricHeap
from moe_a2a.op_host.layout import MAGIC, HeaderWord, WindowLayout, window_layout
from moe_a2a.op_host.meeting import Meeting
from rank_bodies.windows import SIZES, check_step, no_entry

CPU = torch.device("cpu")


def meeting(ctx: RankContext) -> Meeting:
    return Meeting(ctx.process_group, ctx.rank, ctx.world_size)


def layout(ctx: RankContext) -> WindowLayout:
    return window_layout(
        world_size=ctx.world_size, num_experts=5, top_k=2, max_tokens=3, row_bytes=10, recv_rows=7
    )


def held() -> tuple[int, int]:
    """Windows that this process maps, and its descriptors."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:" in line for line in maps), len(os.listdir("/proc/self/fd"))


def exchange(ctx: RankContext, heap: SymmetricHeap) -> None:
    """Every rank writes a word of its own into every block, by address; everybody finds all of them in its own block."""
    place = heap.size - 8 * ctx.world_size
    for peer, address in enumerate(heap.addresses):
        word = np.ctypeslib.as_array((ctypes.c_uint8 * 8).from_address(address + place + 8 * ctx.rank))
        word[:] = [ctx.rank, peer] * 4
    ctx.barrier()
    own = heap.block(ctx.rank)
    for source in range(ctx.world_size):
        at = place + 8 * source
        assert own[at : at + 8].tolist() == [source, ctx.rank] * 4
    for peer in range(ctx.world_size):
        block = heap.block(peer)
        assert block.dtype == torch.uint8 and block.shape == (heap.size,)
        words = block[: 8 * len(HeaderWord)].view(torch.int64).tolist()
        assert words[HeaderWord.MAGIC] == MAGIC and words[HeaderWord.RANK] == peer
        assert not block[8 * len(HeaderWord) : place].any(), "a fresh window is zeros"


def shared_memory(ctx: RankContext, delay: float) -> None:
    """A heap from its making to its end; the first to leave takes nothing from the others."""
    before = held()
    heap = SharedMemoryHeap(meeting(ctx), layout(ctx))
    exchange(ctx, heap)
    assert [fd >= 0 for fd in heap.pidfds] == [peer != ctx.rank for peer in range(ctx.world_size)]
    kept = heap.block((ctx.rank + 1) % ctx.world_size)
    time.sleep(delay * ctx.rank)
    heap.close()
    heap.close()
    assert held()[1] == before[1], "descriptors stay open after close"
    # What is held keeps its memory, also of a rank that has left.
    assert kept[: 8 * len(HeaderWord)].view(torch.int64)[HeaderWord.MAGIC] == MAGIC
    del kept
    assert held() == before
    ctx.barrier()


def dropped(ctx: RankContext) -> None:
    """A heap that is forgotten instead of closed gives everything back, too."""
    before = held()
    SharedMemoryHeap(meeting(ctx), layout(ctx))
    assert held() == before


@dataclass
class StandInHandle:
    """What torch's rendezvous gives, of memory that this process maps."""

    windows: list[native.MappedWindow]
    offset: int
    buffer_ptrs: list[int]

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        whole = torch.from_numpy(np.asarray(self.windows[rank]))
        return whole.view(dtype)[storage_offset : storage_offset + sizes[0]]


class StandIn:
    """torch.distributed._symmetric_memory where there is no device: the same calls over shared memory.

    A tensor begins inside its allocation, as it does where torch allocates from a pool.
    """

    def __init__(self, ctx: RankContext, fault: str) -> None:
        self.ctx, self.fault, self.offset, self.fd = ctx, fault, 4096, -1

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.fault == "memory" and self.ctx.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        self.fd = os.memfd_create("stand-in")
        os.ftruncate(self.fd, self.offset + size)
        os.pwrite(self.fd, b"\xff" * (self.offset + size), 0)
        self.own = native.map_window(self.fd, self.offset + size, fill=False)
        return torch.from_numpy(np.asarray(self.own))[self.offset :]

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> StandInHandle:
        met = meeting(self.ctx)
        windows = []
        for rank, (pid, fd) in enumerate(met.gather((os.getpid(), self.fd))):
            if rank == self.ctx.rank:
                windows.append(self.own)
                continue
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            windows.append(native.map_window(opened, self.own.size, fill=False))
            os.close(opened)
        self.ctx.barrier()
        os.close(self.fd)
        pointers = [window.address for window in windows]
        if self.fault == "unmapped":
            pointers[(self.ctx.rank + 1) % len(pointers)] = 0
        if self.fault == "swapped" and self.ctx.rank == 0:
            windows[1] = windows[0]
        offset = self.offset + 512 if self.fault == "offset" and self.ctx.rank == 0 else self.offset
        return StandInHandle(windows, offset, pointers)


def _replaced(name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(heap_module, name, value)


def by_torch(ctx: RankContext, see_processes: bool) -> None:
    """The same life by torch's interface."""
    before = held()
    stand_in = StandIn(ctx, "")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced("_symmetric_memory", lambda device: stand_in))
        if not see_processes and ctx.rank == 0:
            stack.enter_context(_replaced("open_by_proc", no_entry))
            stack.enter_context(_replaced("open_by_socket", no_entry))
        heap: SymmetricHeap = TorchSymmetricHeap(meeting(ctx), layout(ctx), CPU)
    exchange(ctx, heap)
    watched = [fd >= 0 for fd in heap.pidfds]
    assert watched == [see_processes and peer != ctx.rank for peer in range(ctx.world_size)]
    heap.close()
    heap.close()
    stand_in.own = None  # type: ignore[assignment]
    assert held() == before


def by_torch_fails(ctx: RankContext, fault: str) -> str:
    """What every rank raises when something is wrong on one of them."""
    if fault == "backend":
        made: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # torch itself, on a CPU
    else:
        stand_in = StandIn(ctx, fault)
        made = _replaced("_symmetric_memory", lambda device: stand_in)
    try:
        with made:
            TorchSymmetricHeap(meeting(ctx), layout(ctx), CPU)
    except (HeapUnavailable, errors.OutOfMemory) as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def no_room(ctx: RankContext) -> str:
    with _replaced("free_memory", lambda: 2**20 if ctx.rank == 1 else 2**40):
        try:
            SharedMemoryHeap(meeting(ctx), layout(ctx))
        except errors.OutOfMemory as error:
            return str(error)
    return "made"


def group_on_devices(ctx: RankContext, kernels: str) -> str:
    """A group with transport "cuda": everything of it but the device, which the interpreter and shared memory stand in for."""
    before = held()
    stand_in = StandIn(ctx, "")
    with (
        _replaced("_symmetric_memory", lambda device: stand_in),
        mock.patch.object(transport, "missing", lambda name: ""),
        mock.patch.object(transport, "device_of", lambda name: CPU),
    ):
        group = moe_a2a.EPGroup(ctx.process_group, **SIZES, transport="cuda", kernels=kernels)
    assert isinstance(group.heap, TorchSymmetricHeap) and group.kernels == "triton"
    for seed in range(3):
        check_step(ctx, group, seed)
    described = f"{group.transport.name}: {group.transport.reason}"
    ctx.barrier()
    group.close()
    assert group.heap is None
    del stand_in.own
    del group
    assert held() == before
    return described


def cpu_kernels_on_devices(ctx: RankContext) -> str:
    try:
        moe_a2a.EPGroup(ctx.process_group, **SIZES, transport="cuda", kernels="cpu")
    except errors.BadValue as error:
        return str(error)
    return "made"
