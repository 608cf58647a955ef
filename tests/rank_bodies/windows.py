"""Rank bodies: how windows are had, and what happens where they can't be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from pool import RankContext
from torch.distributed.device_mesh import DeviceMesh

import moe_a2a
from moe_a2a import errors, reference
from moe_a2a.op_host import heap as heap_module

SIZES: dict[str, Any] = {
    "num_experts": 5,
    "top_k": 2,
    "max_tokens": 9,
    "hidden_size": 33,
    "dtype": torch.float32,
    "timeout": 20.0,
    "warmup_timeout": 40.0,
}


def no_entry(*_: Any) -> Any:
    """What opening a window gives where it is closed to this process."""
    raise PermissionError(13, "Permission denied")


def check_step(ctx: RankContext, group: moe_a2a.EPGroup, seed: int = 0) -> None:
    """One dispatch and combine against the oracle, rows and sums bitwise."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [int(torch.randint(0, 10, (), generator=generator)) for _ in range(group.world_size)]
    xs = [torch.randn(t, 33, generator=generator) for t in tokens]
    ids = [torch.randint(-1, 5, (t, 2), generator=generator) for t in tokens]
    weights = [torch.rand(t, 2, generator=generator) for t in tokens]
    d = moe_a2a.dispatch(xs[group.rank], ids[group.rank], group, weights[group.rank])
    expected = reference.dispatch_reference(xs, ids, 5, weights)
    assert torch.equal(d.x, expected[group.rank].x_NH)
    out = moe_a2a.combine(d.x * 3, d.handle, weights[group.rank])
    sums = reference.combine_reference([e.x_NH * 3 for e in expected], ids, 5, weights)
    assert torch.equal(out, sums[group.rank])


@contextlib.contextmanager
def replaced(name: str, value: Callable[..., Any]) -> Iterator[None]:
    """moe_a2a.op_host.heap.NAME is ``value`` inside the block."""
    original = getattr(heap_module, name)
    setattr(heap_module, name, value)
    try:
        yield
    finally:
        setattr(heap_module, name, original)


def proc_closed(ctx: RankContext, closed_on: list[int]) -> str:
    """/proc is closed to some ranks: the windows come over the socket, and the transport is the same."""
    asked: list[int] = []

    original: Callable[[Any, str], tuple[int, int]] = vars(heap_module)["open_by_socket"]

    def counted(address: Any, server: str) -> tuple[int, int]:
        asked.append(address.pid)
        return original(address, server)

    with (
        replaced("open_by_socket", counted),
        replaced("open_by_proc", no_entry) if ctx.rank in closed_on else contextlib.nullcontext(),
    ):
        group = ctx.fresh_group(**SIZES)
    assert len(asked) == (ctx.world_size - 1 if ctx.rank in closed_on else 0)
    for seed in range(5):
        check_step(ctx, group, seed)
    return str(group.transport.name)


def no_windows(ctx: RankContext, failing: int) -> tuple[str, str]:
    """One rank can't make a window: all take the collective transport, and it works."""

    def refused(*_: Any) -> Any:
        raise OSError(38, "Function not implemented")

    context = replaced("create_window", refused) if ctx.rank == failing else contextlib.nullcontext()
    with context:
        group = ctx.fresh_group(**SIZES)
        try:
            ctx.fresh_group(**SIZES, transport="cpu-shm")
            raise AssertionError("cpu-shm was promised")
        except errors.TransportUnavailable as error:
            text = str(error)
    for seed in range(3):
        check_step(ctx, group, seed)
    assert group.transport.name == "collective" and f"rank {failing}" in group.transport.reason
    return group.transport.reason, text


def nothing_opens(ctx: RankContext) -> str:
    """Neither way to a peer's window is open to one rank: the collective transport, with the reason."""

    if ctx.rank == 1:
        with replaced("open_by_proc", no_entry), replaced("open_by_socket", no_entry):
            group = ctx.fresh_group(**SIZES)
    else:
        group = ctx.fresh_group(**SIZES)
    check_step(ctx, group)
    assert group.transport.name == "collective"
    return str(group.transport.reason)


def collective_asked_for(ctx: RankContext) -> None:
    """transport="collective" does the same, for all dtypes, and says so."""
    group = ctx.fresh_group(**SIZES, transport="collective")
    assert group.transport.name == "collective"
    assert set(group.transport.describe()) == {"semantics", "resources", "submitter", "engine", "link"}
    for seed in range(3):
        check_step(ctx, group, seed)
    x = group.empty(3)
    assert x.shape == (3, 33) and x.dtype == torch.float32


def gpu_asked_for(ctx: RankContext, name: str) -> str:
    """A transport that isn't here is refused by all ranks, with each one's reason; the ranks can go on with another."""
    try:
        ctx.fresh_group(**SIZES, transport=name)
        raise AssertionError(f"{name} was promised")
    except errors.TransportUnavailable as error:
        text = str(error)
    check_step(ctx, ctx.fresh_group(**SIZES))
    return text


def device_mesh(ctx: RankContext) -> None:
    """A one-dimensional mesh is a group; a two-dimensional one is asked for its dimension."""
    ranks = torch.arange(ctx.world_size)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("ep",))
    with moe_a2a.EPGroup(mesh, **SIZES) as group:
        assert group.world_size == ctx.world_size and group.rank == ctx.rank
        check_step(ctx, group)
    square = DeviceMesh("cpu", ranks.view(2, 2), mesh_dim_names=("dp", "ep"))
    try:
        moe_a2a.EPGroup(square, **SIZES)
        raise AssertionError("a two-dimensional mesh was taken")
    except errors.BadValue as error:
        assert "('dp', 'ep')" in str(error) and "mesh['ep']" in str(error)
    with moe_a2a.EPGroup(square["ep"], **SIZES) as pair:
        assert pair.world_size == 2
        check_step(ctx, pair, 1)


def process_group_may_go(ctx: RankContext) -> None:
    """After creation the windows need no process group: a group over a destroyed one goes on."""
    pg = dist.new_group(list(range(ctx.world_size)))
    group = moe_a2a.EPGroup(pg, **SIZES)
    dist.destroy_process_group(pg)
    with group:
        for seed in range(3):
            check_step(ctx, group, seed)
        ctx.barrier()  # through another group: nobody closes while a peer still waits


def own_memory(ctx: RankContext) -> tuple[int, int, int, int]:
    """(window bytes, bytes by huge pages, mode, seals) of this rank's own window."""
    import fcntl

    from moe_a2a.op_host import layout, window

    group = ctx.fresh_group(**{**SIZES, "max_tokens": 4096, "hidden_size": 512})
    heap = group.heap
    assert isinstance(heap, heap_module.SharedMemoryHeap)
    own = heap.windows[ctx.rank]
    hint = moe_a2a.EPGroup.size_hint(
        ctx.world_size,
        **{k: v for k, v in {**SIZES, "max_tokens": 4096, "hidden_size": 512}.items() if "time" not in k},
    )
    assert hint.total_bytes == own.size == sum(hint.regions.values())
    huge = window.huge_page_bytes(own.address)
    assert huge == (own.size if own.collapsed else 0)
    assert own.address % layout.PAGE == 0
    file = window.create_window(group.layout, 0)
    try:
        seals = fcntl.fcntl(file.fd, 1034)  # F_GET_SEALS
        mode = os.fstat(file.fd).st_mode & 0o7777
    finally:
        os.close(file.fd)
    return own.size, huge, mode, seals


def wait_statistics(ctx: RankContext) -> list[float]:
    """Rank 1 comes 0.3 s late to one dispatch; the others' statistics say whom they waited for."""
    import time

    group = ctx.fresh_group(**SIZES)
    check_step(ctx, group)
    ctx.barrier()
    before = group.stats()["wait_seconds"]
    if ctx.rank == 1:
        time.sleep(0.3)
    check_step(ctx, group, 1)
    after = group.stats()["wait_seconds"]
    return [b - a for a, b in zip(before, after, strict=True)]
