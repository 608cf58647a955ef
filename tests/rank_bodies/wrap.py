"""Rank bodies: codes that wrap, and records that make no sense."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from typing import Any

import torch
from pool import RankContext

import moe_a2a
from moe_a2a import errors, reference
from moe_a2a.op_host.layout import CellWord, RecordWord

SIZES: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 1,
    "max_tokens": 24,
    "hidden_size": 5,
    "dtype": torch.float32,
    "timeout": 20.0,
    "warmup_timeout": 40.0,
}


def across_the_wrap(
    ctx: RankContext, record_format: str, protocol: str, code_max: int, first: int, depth: int, steps: int
) -> None:
    """Steps over several laps: most ranks idle in most steps, so that old codes stay where nothing overwrites them."""
    group = ctx.fresh_group(
        **{**SIZES, "depth": depth},
        record_format=record_format,
        protocol=protocol,
        _code_max=code_max,
        _first_epoch=first,
        _tiling={"mix": 5, "flag_rows": 3} if protocol == "push" else None,
    )
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * (first % 1000) + step)
        # Only now and then does anybody send anything, and then to one expert.
        tokens = [
            int(torch.randint(0, 25, (), generator=generator))
            if torch.rand((), generator=generator) < 0.3
            else 0
            for _ in range(ctx.world_size)
        ]
        xs = [torch.randn(t, 5, generator=generator) for t in tokens]
        ids = [torch.randint(0, 4, (1, 1), generator=generator).expand(t, 1) for t in tokens]
        d = moe_a2a.dispatch(xs[ctx.rank], ids[ctx.rank], group)
        expected = reference.dispatch_reference(xs, ids, 4)
        assert torch.equal(d.x, expected[ctx.rank].x_NH), f"step {step}"
        if step % 5 == 4:
            continue  # a dropped handle
        # The owner is late: a source that believes an old code sums what is there.
        ctx.jitter(4)
        out = moe_a2a.combine(d.x * (step + 1), d.handle)
        sums = reference.combine_reference([e.x_NH * (step + 1) for e in expected], ids, 4)
        assert torch.equal(out, sums[ctx.rank]), f"step {step}"


def late_cell(ctx: RankContext, record_format: str, protocol: str) -> float:
    """A source leaves a combine early; the owner's late cell must not be taken for the one a lap later (V = 6, NS = 2).

    Call 5 is the last of lap 0 in its slot, and its cell so late that the source has cleared the slot in call 7 meanwhile. It
    could be taken for that of call 11; only the second clearing, in call 9, removes it.
    """
    group = ctx.fresh_group(**SIZES, record_format=record_format, protocol=protocol, _code_max=6)
    nothing = torch.zeros(0, 5), torch.zeros(0, 1, dtype=torch.int64)

    def call(value: float | None) -> Any:
        if ctx.rank == 0 and value is not None:
            # expert 2 is rank 1's
            return moe_a2a.dispatch(torch.full((1, 5), value), torch.tensor([[2]]), group)
        return moe_a2a.dispatch(*nothing, group)

    for _ in range(4):
        call(None)
    fifth = call(5.0)
    call(None)
    if ctx.rank == 1:
        time.sleep(0.3)
    bad = torch.ones(2, 7) if ctx.rank == 0 else None
    with contextlib.suppress(errors.BadValue):
        moe_a2a.combine(fifth.x, fifth.handle, bad)
    for _ in range(4):
        call(None)
    last = call(11.0)
    if ctx.rank == 1:
        time.sleep(0.3)
    out = moe_a2a.combine(last.x, last.handle)
    return float(out[0, 0]) if ctx.rank == 0 else 11.0


def _spoil(view: memoryview, offset: int, word: int, value: int) -> None:
    struct.pack_into("<i", view, offset + 4 * word, value)


def spoiled_record(ctx: RankContext, record_format: str, word: str, value: int) -> str:
    """Rank 1's record arrives with one word changed; rank 0 says so instead of crashing or taking wrong rows."""
    group = ctx.fresh_group(**SIZES, record_format=record_format)
    layout = group.layout
    x, idx = torch.ones(3, 5), torch.tensor([[0], [3], [1]])
    if ctx.rank == 1:
        # A thread makes the call, so that its record can be changed before rank 0 looks at it.
        results: list[str] = []

        def call() -> None:
            try:
                moe_a2a.dispatch(x, idx, group)
                results.append("")
            except errors.MoeA2AError as error:
                results.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        heap = group.heap
        assert heap is not None
        view = memoryview(heap.block(0).numpy())
        record = layout.record + 1 % layout.record_slots * layout.record_slot_stride + layout.record_stride
        deadline = time.monotonic() + 20
        while struct.unpack_from("<i", view, record + layout.record_code)[0] != layout.code(1):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        _spoil(view, record + layout.record_header, RecordWord[word], value)
        ctx.barrier()
        thread.join(30)
        assert not thread.is_alive()
        return results[0]
    ctx.barrier()
    try:
        moe_a2a.dispatch(x, idx, group)
    except errors.CallMismatch as error:
        return str(error)
    return "taken"


def spoiled_cell(ctx: RankContext, record_format: str, word: str, value: int) -> str:
    """Rank 1's combine cell arrives with one word changed."""
    group = ctx.fresh_group(**SIZES, record_format=record_format)
    layout = group.layout
    x, idx = torch.ones(3, 5), torch.tensor([[0], [3], [3]])
    d = moe_a2a.dispatch(x, idx, group)
    if ctx.rank == 1:
        heap = group.heap
        assert heap is not None
        view = memoryview(heap.block(0).numpy())
        with contextlib.suppress(errors.MoeA2AError):
            # Bad weights: the rows go out, and this rank doesn't wait.
            moe_a2a.combine(d.x, d.handle, torch.ones(1, 9))
        cell = layout.cell + 1 % layout.slots * layout.cell_slot_stride + layout.cell_stride
        _spoil(view, cell + layout.cell_body, CellWord[word], value)
        ctx.barrier()
        return ""
    ctx.barrier()
    try:
        moe_a2a.combine(d.x, d.handle)
    except errors.CallMismatch as error:
        return str(error)
    return "taken"
