"""Windows between the processes of one host: memfd files without a name, so that nothing stays behind after any exit.

A window is created by its owner, announced by process id and descriptor number, and opened by its peers through
``/proc/PID/fd/N``. Where /proc is closed to them (another user-id mapping, hardened mounts) the descriptor is sent over an
abstract socket. Either way a peer believes the window only after it has read the owner's random nonce in it: a process id
means another process on another host, and "same host" is what could really be opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .layout import MAGIC, HeaderWord, WindowLayout

_F_ADD_SEALS = 1033
_F_SEAL_SHRINK, _F_SEAL_GROW = 0x2, 0x4


@dataclass(frozen=True)
class WindowFile:
    """A window this process created: descriptor, size and what it announces to its peers."""

    fd: int
    size: int
    nonce: bytes

    def announce(self) -> WindowAddress:
        return WindowAddress(os.getpid(), self.fd, self.size, self.nonce, boot_id())


@dataclass(frozen=True)
class WindowAddress:
    """What a rank tells its peers about its window."""

    pid: int
    fd: int
    size: int
    nonce: bytes
    boot_id: str


def boot_id() -> str:
    """A number that differs between hosts and between boots ("" where the kernel doesn't tell)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def window_header(layout: WindowLayout, rank: int, nonce: bytes) -> bytes:
    """The first words of a window; ``nonce`` (16 random bytes) tells it from every other one."""
    words = [0] * len(HeaderWord)
    words[HeaderWord.MAGIC] = MAGIC
    words[HeaderWord.VERSION] = layout.version
    words[HeaderWord.FORMAT] = layout.format
    words[HeaderWord.GENERATION] = layout.generation
    words[HeaderWord.RANK] = rank
    words[HeaderWord.WORLD_SIZE] = layout.world_size
    words[HeaderWord.TOTAL_BYTES] = layout.total_bytes
    words[HeaderWord.NONCE_LO], words[HeaderWord.NONCE_HI] = struct.unpack("<qq", nonce)
    return struct.pack(f"<{len(words)}q", *words)


def check_header(data: bytes, nonce: bytes) -> None:
    """Raises OSError unless ``data`` begins as the window of this nonce does."""
    words = struct.unpack_from(f"<{len(HeaderWord)}q", data)
    found = struct.pack("<qq", words[HeaderWord.NONCE_LO], words[HeaderWord.NONCE_HI])
    if words[HeaderWord.MAGIC] != MAGIC or found != nonce:
        raise OSError("what was opened isn't the window announced (its nonce differs)")


def create_window(layout: WindowLayout, rank: int) -> WindowFile:
    """Creates this rank's window: an unnamed file of the layout's size with a header, readable by this user only.

    Raises:
        OSError: when the kernel refuses; ENOSPC or ENOMEM when it has no room.
    """
    fd = os.memfd_create("moe_a2a", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, layout.total_bytes)
        # A file that can't shrink can't kill a peer with SIGBUS.
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        nonce = secrets.token_bytes(16)
        os.pwrite(fd, window_header(layout, rank, nonce), 0)
    except BaseException:
        os.close(fd)
        raise
    return WindowFile(fd, layout.total_bytes, nonce)


def _verify(fd: int, address: WindowAddress) -> None:
    """Raises OSError unless ``fd`` is the announced window."""
    size = os.fstat(fd).st_size
    if size != address.size:
        raise OSError(f"the file opened has {size} bytes, the window announced has {address.size}")
    check_header(os.pread(fd, 8 * len(HeaderWord), 0), address.nonce)


def open_by_proc(address: WindowAddress) -> int:
    """Opens a peer's window through /proc; returns the descriptor. Raises OSError with the reason."""
    if address.boot_id != boot_id():
        raise OSError("the peer runs on another host (its boot id differs)")
    # Not a plain open: should the number mean something else here, a pipe must not block us.
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _verify(fd, address)
    except BaseException:
        os.close(fd)
        raise
    return fd


class WindowServer:
    """Hands this rank's window to peers over an abstract socket, where /proc is closed.

    A peer must run as the same user and know the window's nonce. Use as a context manager; peers connect to ``address``.
    """

    def __init__(self, window: WindowFile) -> None:
        self._window = window
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = "moe_a2a." + secrets.token_hex(16)
        self._socket.bind("\0" + self.address)
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._serve, name="moe_a2a window server", daemon=True)
        self._stop = False

    def __enter__(self) -> WindowServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        # accept() doesn't wake when another thread closes the socket; a connection does.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wake:
            wake.connect("\0" + self.address)
        self._thread.join(timeout=10)
        self._socket.close()

    def _serve(self) -> None:
        while not self._stop:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(10)
                credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                _, uid, _ = struct.unpack("3i", credentials)
                if uid == os.geteuid() and peer.recv(16, socket.MSG_WAITALL) == self._window.nonce:
                    socket.send_fds(peer, [b"w"], [self._window.fd])


def open_by_socket(address: WindowAddress, server: str) -> tuple[int, int]:
    """Receives a peer's window over its abstract socket. Raises OSError with the reason.

    Returns:
        The descriptor, and the peer's process id as this process sees it (0: it can't).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect("\0" + server)
        # Of the process that listens; the kernel translates the id into our namespace.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", credentials)
        connection.sendall(address.nonce)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not fds:
        raise OSError("the peer's window server sent no descriptor (another user?)")
    fd = fds[0]
    try:
        os.set_inheritable(fd, False)
        _verify(fd, address)
    except BaseException:
        os.close(fd)
        raise
    return fd, pid


def _meminfo() -> Iterator[tuple[str, int]]:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        yield name, int(rest.split()[0]) * 1024


def free_memory() -> int:
    """Bytes this process can still get: what the host has available, or less where a control group allows less."""
    limits: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(dict(_meminfo())["MemAvailable"])
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(limit).read_text()) - int(Path(usage).read_text()))
    return max(0, min(limits)) if limits else 2**62


def huge_page_bytes(address: int) -> int:
    """Bytes of the mapping at ``address`` that the kernel really maps by huge pages (ShmemPmdMapped)."""
    inside = False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = line.startswith(f"{address:x}-")
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0
