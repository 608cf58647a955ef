"""Symmetric memory: one block a rank, each mapped by every rank of the group.

====================  ==================================  ===========================================
heap                  memory                              how peers get at it
====================  ==================================  ===========================================
SharedMemoryHeap      memfd, huge pages, prefaulted       mapped by every process of the host
TorchSymmetricHeap    of a device (CUDA, HIP)             torch symmetric memory: mapped by each device
====================  ==================================  ===========================================

A block is a window of ``layout.py``: zeros but for its header. Making a heap is collective, closing one isn't: mappings keep
the memory alive, so a rank may leave while a peer still reads. Kernels are handed ``addresses`` as int64 and nothing else.
"""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..errors import OutOfMemory, TransportUnavailable
from . import native
from .layout import WindowLayout
from .meeting import Meeting
from .window import (
    WindowAddress,
    WindowFile,
    WindowServer,
    boot_id,
    check_header,
    create_window,
    free_memory,
    open_by_proc,
    open_by_socket,
    window_header,
)


class HeapUnavailable(Exception):
    """This kind of memory can't be shared here; says why, in the same words on every rank."""


class SymmetricHeap(Protocol):
    """What a group needs of its memory.

    Attributes:
        rank, world_size: this rank and R.
        size: bytes of each block.
        addresses: [R] int64, where this process (or its device) sees the block of each rank.
        pidfds: [R] descriptors that become readable when a peer's process ends; -1 for this rank and where there is none.
            They are the heap's.
    """

    rank: int
    world_size: int
    size: int
    addresses: list[int]
    pidfds: list[int]

    def block(self, rank: int) -> torch.Tensor:
        """uint8 [size], the block of ``rank``, to be used until the heap is closed (one of shared memory also later)."""
        ...

    def close(self) -> None:
        """Lets go of every block. Whoever polls or writes on behalf of this rank must have ended. Idempotent, local."""
        ...


class SharedMemoryHeap:
    """Windows in shared memory between the processes of one host.

    Attributes:
        windows: [R] the mappings, as the C++ group takes them.

    Raises:
        OutOfMemory: the host hasn't room for all blocks; has needed and free bytes.
        HeapUnavailable: windows can't be made or opened here.
        TransportUnavailable: they were opened and can't be mapped or watched.
        Each on every rank.
    """

    def __init__(self, meeting: Meeting, layout: WindowLayout) -> None:
        self.rank, self.world_size, self.size = meeting.rank, meeting.world_size, layout.total_bytes
        _check_room(meeting, self.size)
        made = meeting.attempt(lambda: create_window(layout, meeting.rank))
        file = made.value
        try:
            if made.failures:
                raise HeapUnavailable(made.why)
            assert file is not None
            with ExitStack() as stack:
                fds, pids = _open_files(meeting, file, stack)
                self.windows = _map(meeting, file, fds)
                self.pidfds = _watch(meeting, pids)
        finally:
            if file is not None:
                os.close(file.fd)  # mappings keep the memory; a descriptor is needed only to pass it on
        self.addresses = [window.address for window in self.windows]
        self._watched = weakref.finalize(self, _close_all, self.pidfds)

    def block(self, rank: int) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.windows[rank]))

    def close(self) -> None:
        self.windows, self.addresses = [], []
        self._watched()


class TorchSymmetricHeap:
    """Windows in the memory of devices that reach each other, by torch symmetric memory.

    Every rank has one device. torch refuses two ranks on one, unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is in the
    environment. A rank alone has plain memory of its device.

    Raises:
        OutOfMemory: a device hasn't room for its block.
        HeapUnavailable: torch has no symmetric memory for this device, or its peers can't be reached.
        Each on every rank.
    """

    def __init__(self, meeting: Meeting, layout: WindowLayout, device: torch.device) -> None:
        self.rank, self.world_size, self.size = meeting.rank, meeting.world_size, layout.total_bytes
        self._device = device
        self._handle: Any = None
        nonce = secrets.token_bytes(16)
        header = window_header(layout, meeting.rank, nonce)
        made = meeting.attempt(lambda: self._make_block(header))
        if made.failures:
            if all("out of memory" in failure.lower() for failure in made.failures):
                raise OutOfMemory(
                    f"{meeting.operation}: the windows need {self.size} bytes on each device: {made.why}. Lower max_tokens, "
                    "max_recv_rows or depth; EPGroup.size_hint tells what they cost"
                )
            raise HeapUnavailable(made.why)
        assert made.value is not None
        self._block = made.value
        # Collective inside torch: begun only when every rank has a block.
        met = meeting.attempt(lambda: self._meet(meeting.process_group))
        if met.failures:
            raise HeapUnavailable(met.why)
        assert met.value is not None
        self.addresses = met.value
        nonces = meeting.gather(nonce)
        seen = meeting.attempt(lambda: self._verify(nonces))
        if seen.failures:
            raise HeapUnavailable(seen.why)
        self.pidfds = _watch_processes(meeting, layout)
        self._watched = weakref.finalize(self, _close_all, self.pidfds)

    def _make_block(self, header: bytes) -> torch.Tensor:
        size, device = self.size, self._device
        if self.world_size == 1:
            block = torch.zeros(size, dtype=torch.uint8, device=device)
        else:
            symm_mem = _symmetric_memory(device)
            block = symm_mem.empty(size, dtype=torch.uint8, device=device).zero_()
        block[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        _synchronize(device)  # a peer that has met this rank may look at once
        return block

    def _meet(self, process_group: dist.ProcessGroup | None) -> list[int]:
        """[R] addresses of the blocks as this device sees them."""
        if self.world_size == 1:
            return [self._block.data_ptr()]
        group = dist.group.WORLD if process_group is None else process_group
        self._handle = _symmetric_memory(self._device).rendezvous(self._block, group)
        # buffer_ptrs are those of allocations; where torch allocates from a pool a tensor may begin inside of one.
        offset = self._handle.offset
        addresses = [int(pointer) + offset for pointer in self._handle.buffer_ptrs]
        if len(addresses) != self.world_size or not all(pointer for pointer in self._handle.buffer_ptrs):
            raise RuntimeError(
                f"torch symmetric memory gave the addresses {addresses} for {self.world_size} ranks: some peer's memory isn't "
                "mapped here (its backend moves rows by calls, not by loads and stores)"
            )
        if addresses[self.rank] != self._block.data_ptr():
            raise RuntimeError(
                f"torch symmetric memory says this rank's block is at {addresses[self.rank]:#x}, it is at "
                f"{self._block.data_ptr():#x}"
            )
        return addresses

    def _verify(self, nonces: list[bytes]) -> None:
        """What is mapped as a peer's block must be the block which that peer made."""
        for peer, nonce in enumerate(nonces):
            try:
                check_header(self.block(peer)[:4096].cpu().numpy().tobytes(), nonce)
            except OSError as error:
                raise RuntimeError(f"the block of rank {peer}: {error}") from None

    def block(self, rank: int) -> torch.Tensor:
        if rank == self.rank:
            return self._block
        peer: torch.Tensor = self._handle.get_buffer(rank, (self.size,), torch.uint8, self._handle.offset)
        return peer

    def close(self) -> None:
        """Waits for what this device has been given to do, then unmaps the peers' blocks, then frees the own one."""
        if not self._watched.alive:
            return
        _synchronize(self._device)
        self._handle, self.addresses = None, []
        del self._block
        self._watched()


def symmetric_memory_missing(device: torch.device) -> str:
    """Why torch has no symmetric memory for this device; "" when it has."""
    try:
        _symmetric_memory(device)
    except RuntimeError as error:
        return str(error)
    return ""


def _symmetric_memory(device: torch.device) -> Any:
    """torch.distributed._symmetric_memory, which must be able to serve ``device``."""
    import torch.distributed._symmetric_memory as symm_mem

    if device.type == "cpu" or symm_mem.get_backend(device) is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no symmetric memory for device {device}; expected a build for CUDA or ROCm"
        )
    return symm_mem


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _check_room(meeting: Meeting, size: int) -> None:
    hosts = meeting.gather((boot_id(), free_memory()))
    neighbours = [free for boot, free in hosts if boot == hosts[meeting.rank][0]]
    needed = size * len(neighbours)
    short = meeting.gather(needed > min(neighbours))
    if any(short):
        raise OutOfMemory(
            f"{meeting.operation}: the windows need {needed} bytes on this host ({len(neighbours)} ranks x "
            f"{size}), {min(neighbours)} bytes are free (rank {short.index(True)} says it isn't "
            "enough). Lower max_tokens, max_recv_rows or depth; EPGroup.size_hint tells what they cost"
        )


def _open_files(
    meeting: Meeting, file: WindowFile, stack: ExitStack
) -> tuple[dict[int, int], dict[int, int]]:
    """Opens the file of every peer. Raises HeapUnavailable, on every rank.

    Returns:
        By peer: descriptors, which ``stack`` closes, and process ids as this process sees them (0: it can't).
    """
    addresses = meeting.gather(file.announce())
    fds: dict[int, int] = {}
    pids: dict[int, int] = {}
    stack.callback(lambda: _close_all(list(fds.values())))

    def open_peers(opener: Callable[[int, WindowAddress], tuple[int, int]]) -> None:
        for peer, address in enumerate(addresses):
            if peer != meeting.rank and peer not in fds:
                fds[peer], pids[peer] = opener(peer, address)

    opened = meeting.attempt(lambda: open_peers(lambda _, address: (open_by_proc(address), address.pid)))
    if opened.failures:
        # The server's name is gathered by ranks that need none, too: each serves those who couldn't open it.
        with ExitStack() as serving:
            served = meeting.attempt(lambda: serving.enter_context(WindowServer(file)).address)
            if served.failures:
                raise HeapUnavailable(served.why)
            servers = meeting.gather(served.value)
            opened = meeting.attempt(
                lambda: open_peers(lambda peer, address: open_by_socket(address, str(servers[peer])))
            )
        if opened.failures:
            raise HeapUnavailable(opened.why)
    return fds, pids


def _map(meeting: Meeting, file: WindowFile, fds: dict[int, int]) -> list[native.MappedWindow]:
    mapped: dict[int, native.MappedWindow] = {}

    def map_own() -> None:
        mapped[meeting.rank] = native.map_window(file.fd, file.size, fill=True)

    def map_peers() -> None:
        for peer, fd in fds.items():
            mapped[peer] = native.map_window(fd, file.size, fill=False)

    # First every rank fills its own window, then the others map it: pages that exist as huge ones are mapped as such.
    for step in (map_own, map_peers):
        done = meeting.attempt(step)
        if done.failures:
            memory = all("OSError" in failure or "MemoryError" in failure for failure in done.failures)
            kind = OutOfMemory if memory else TransportUnavailable
            raise kind(f"{meeting.operation}: setting the windows up failed: {done.why}")
    return [mapped[peer] for peer in range(meeting.world_size)]


def _watch(meeting: Meeting, pids: dict[int, int]) -> list[int]:
    """[R] descriptors that tell of a peer's end. Raises TransportUnavailable, on every rank."""
    pidfds = [-1] * meeting.world_size

    def watch_peers() -> None:
        for peer, pid in pids.items():
            pidfds[peer] = _pidfd(pid)

    try:
        done = meeting.attempt(watch_peers)
        if done.failures:
            raise TransportUnavailable(f"{meeting.operation}: setting the windows up failed: {done.why}")
    except BaseException:
        _close_all(pidfds)
        raise
    return pidfds


def _watch_processes(meeting: Meeting, layout: WindowLayout) -> list[int]:
    """As ``_watch``, for ranks that share no file: one that nobody maps shows which process a peer is.

    Peers on another host, or whose process can't be seen, are not watched (-1): their death shows as a timeout.
    """
    made = meeting.attempt(lambda: create_window(layout, meeting.rank))  # without pages but its header's
    try:
        with ExitStack() as stack:
            pids: dict[int, int] = {}
            if made.value is not None and not made.failures:
                with suppress(HeapUnavailable):
                    _, pids = _open_files(meeting, made.value, stack)
            return _watch(meeting, pids)
    finally:
        if made.value is not None:
            os.close(made.value.fd)


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where the kernel has none (before 5.3) or can't see it."""
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return -1
        raise  # no descriptors left, say: a rank that can't see deaths must not look like one that can


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
