"""How windows are had: every way to open one, what is chosen where none opens, and who can't get at one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pool import RankPool
from rank_bodies import windows

from moe_a2a.op_host import native, window
from moe_a2a.op_host.layout import window_layout
from moe_a2a.op_host.tiling import cpu_tiling

LAYOUT = window_layout(world_size=1, num_experts=1, top_k=1, max_tokens=1, row_bytes=4, recv_rows=1)


@pytest.mark.parametrize("closed_on", [[1], [0, 1, 2]])
def test_windows_come_over_a_socket_where_proc_is_closed(pool: RankPool, closed_on: list[int]) -> None:
    assert pool.run(3, windows.proc_closed, closed_on) == ["cpu-shm"] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_collective_is_chosen_by_all_when_one_has_no_window(pool: RankPool, failing: int) -> None:
    for reason, refusal in pool.run(2, windows.no_windows, failing):
        assert f"rank {failing}" in reason and "Function not implemented" in reason
        assert "cpu-shm can't be had" in refusal and "Function not implemented" in refusal


def test_collective_is_chosen_by_all_when_one_can_open_nothing(pool: RankPool) -> None:
    for reason in pool.run(3, windows.nothing_opens):
        assert "rank 1" in reason and "Permission denied" in reason


@pytest.mark.parametrize("ranks", [1, 3])
def test_collective_when_asked_for(pool: RankPool, ranks: int) -> None:
    pool.run(ranks, windows.collective_asked_for)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_a_transport_that_is_not_here_is_refused_with_reasons(pool: RankPool, name: str) -> None:
    first, second = pool.run(2, windows.gpu_asked_for, name)
    assert first == second and first.startswith(f"moe_a2a.EPGroup: transport {name} can't be had: rank 0: ")
    assert "; rank 1: " in first and ("isn't a build for" in first or "sees no GPU" in first)


def test_device_mesh(pool: RankPool) -> None:
    pool.run(4, windows.device_mesh)


def test_process_group_is_needed_for_creation_only(pool: RankPool) -> None:
    pool.run(2, windows.process_group_may_go)


def test_own_window(pool: RankPool) -> None:
    # Whether this kernel collapses shared pages at all: Linux 6.1 and newer, built with transparent huge pages.
    probe = window.create_window(LAYOUT, 0)
    mapped = native.map_window(probe.fd, probe.size, fill=True)
    os.close(probe.fd)
    able = mapped.collapsed
    del mapped
    for size, huge, mode, seals in pool.run(2, windows.own_memory):
        assert size > 2**25
        assert huge == (size if able else 0)
        assert mode == 0o600
        assert seals == 0x2 | 0x4  # can't shrink, can't grow


def test_wait_statistics_name_the_late_rank(pool: RankPool) -> None:
    for rank, waited in enumerate(pool.run(3, windows.wait_statistics)):
        assert waited[rank] == 0
        if rank != 1:
            assert waited[1] > 0.2


@pytest.mark.parametrize("populate", [True, False])
def test_every_page_is_there_and_the_header_stays(populate: bool) -> None:
    """Also on a kernel that has no MADV_POPULATE_WRITE."""
    layout = replace(LAYOUT, total_bytes=16 << 20)
    file = window.create_window(layout, 0)
    before = os.pread(file.fd, 4096, 0)
    assert os.fstat(file.fd).st_blocks * 512 < layout.total_bytes // 2
    mapped = native.map_window(file.fd, file.size, fill=True, populate=populate)
    try:
        assert mapped.populated is populate
        assert os.fstat(file.fd).st_blocks * 512 >= layout.total_bytes
        assert bytes(mapped.view()[:4096]) == before and before[:8] == b"1a2a_eom"
        assert not any(mapped.view()[4096:])
    finally:
        del mapped
        os.close(file.fd)


def test_only_the_announced_window_is_believed() -> None:
    mine = window.create_window(LAYOUT, 0)
    other = window.create_window(LAYOUT, 0)
    try:
        address = mine.announce()
        fd = window.open_by_proc(address)
        assert os.fstat(fd).st_ino == os.fstat(mine.fd).st_ino
        os.close(fd)
        for wrong, reason in (
            (replace(address, fd=other.fd), "nonce differs"),
            (replace(address, size=address.size * 2), "has .* bytes"),
            (replace(address, boot_id="elsewhere"), "another host"),
            (replace(address, pid=2**22 + 1), "No such file"),
        ):
            with pytest.raises(OSError, match=reason):
                window.open_by_proc(wrong)
    finally:
        os.close(mine.fd)
        os.close(other.fd)


def test_a_pipe_in_the_announced_place_is_refused_at_once() -> None:
    read, write = os.pipe()
    mine = window.create_window(LAYOUT, 0)
    try:
        with pytest.raises(OSError):
            window.open_by_proc(replace(mine.announce(), fd=read))
    finally:
        for fd in (read, write, mine.fd):
            os.close(fd)


def test_ranks_beyond_the_cores_yield_at_once() -> None:
    assert cpu_tiling(ranks_on_host=2, cores=2).pauses > 0
    for ranks, cores in ((3, 2), (4, 2), (2, 1), (8, 7)):
        assert cpu_tiling(ranks, cores).pauses == 0
    assert cpu_tiling(len(os.sched_getaffinity(0)) + 1).pauses == 0


def test_the_server_wants_the_nonce() -> None:
    mine = window.create_window(LAYOUT, 0)
    try:
        with window.WindowServer(mine) as server:
            fd, pid = window.open_by_socket(mine.announce(), server.address)
            assert pid == os.getpid()
            assert os.fstat(fd).st_ino == os.fstat(mine.fd).st_ino
            os.close(fd)
            with pytest.raises(OSError, match="no descriptor"):
                window.open_by_socket(replace(mine.announce(), nonce=bytes(16)), server.address)
        with pytest.raises(OSError):
            window.open_by_socket(mine.announce(), server.address)
    finally:
        os.close(mine.fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_cannot_open_a_window() -> None:
    mine = window.create_window(LAYOUT, 0)
    code = (
        "import os, sys, socket\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    os.open(sys.argv[1], os.O_RDWR); print('opened')\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect('\\0' + sys.argv[2])\n"
        "try:\n"
        "    s.sendall(bytes.fromhex(sys.argv[3])); print(socket.recv_fds(s, 1, 1)[1])\n"
        "except (ConnectionResetError, BrokenPipeError):\n"
        "    print([])\n"
    )
    try:
        with window.WindowServer(mine) as server:
            path = f"/proc/{os.getpid()}/fd/{mine.fd}"
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", code, path, server.address, mine.nonce.hex()],
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert done.stdout.split("\n")[:2] == ["PermissionError", "[]"], done
    finally:
        os.close(mine.fd)
