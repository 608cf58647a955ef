"""Rank bodies of sections D and E of the case list: codes and payloads, calls in flight, several groups, threads."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from pool import RankContext

import moe_a2a
from moe_a2a import errors
from rank_bodies.inputs import Step, assert_bits, make_inputs
from rank_bodies.steps import (
    check_combine,
    check_dispatch,
    combine_step,
    dispatch_step,
    expert_step,
)

_INT_OF_SIZE = {2: torch.int16, 4: torch.int32}


def _open(ctx: RankContext, setting: dict[str, Any], **sizes: Any) -> Any:
    """A group with the ways a test is run in: formats, protocols, room."""
    defaults = {"dtype": torch.float32, "timeout": 20.0, "warmup_timeout": 40.0}
    return ctx.group(**{**defaults, **sizes, **setting})


@contextlib.contextmanager
def _flushing(flush: bool) -> Iterator[None]:
    if not flush:
        yield
        return
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


# ----------------------------------------------------------------------------------------------------------- D


def special_bits(
    ctx: RankContext, setting: dict[str, Any], dtype: torch.dtype, patterns: list[int], flush: bool
) -> None:
    """Cases 22 and 24: a row of each pattern to the other rank and back; the bits that arrive are the bits that left."""
    size = torch.empty(0, dtype=dtype).element_size()
    hidden, tokens = 32, len(patterns)
    group = _open(
        ctx, setting, num_experts=ctx.world_size, top_k=1, max_tokens=tokens + 1, hidden_size=hidden
    )
    signed = torch.tensor(patterns, dtype=torch.int64)
    ints = torch.where(signed >= 2 ** (8 * size - 1), signed - 2 ** (8 * size), signed).to(_INT_OF_SIZE[size])
    # One ordinary row beside them shows that only the rows that hold a pattern have it.
    x = torch.cat([ints.view(dtype)[:, None].expand(tokens, hidden), torch.ones(1, hidden, dtype=dtype)])
    idx = torch.full((tokens + 1, 1), (ctx.rank + 1) % ctx.world_size)
    with _flushing(flush):
        for _ in range(3):
            ctx.jitter(2)
            d = moe_a2a.dispatch(x, idx, group)
            assert_bits(d.x, x, "rows that arrived")
            out = moe_a2a.combine(d.x, d.handle)
            number = ~x.isnan().any(1)
            assert torch.equal(out.isnan().any(1), ~number)  # the sum may quieten a NaN
            assert_bits(out[number], x[number], "rows that came back")
            weighted = moe_a2a.combine(
                *(lambda e: (e.x, e.handle))(moe_a2a.dispatch(x, idx, group)), torch.ones(tokens + 1, 1)
            )
            finite = x.isfinite().all(1)
            assert torch.equal(weighted.isfinite().all(1), finite), "only rows with a pattern aren't finite"
            assert_bits(weighted[-1:], x[-1:], "the ordinary row")


def across_a_limit(ctx: RankContext, setting: dict[str, Any], code_max: int, first: int, steps: int) -> None:
    """Case 26: ten steps that begin three calls before the codes wrap."""
    group = ctx.fresh_group(
        **setting,
        num_experts=5,
        top_k=2,
        max_tokens=16,
        hidden_size=8,
        dtype=torch.float32,
        timeout=20.0,
        warmup_timeout=40.0,
        _code_max=code_max,
        _first_epoch=first,
    )
    for number in range(steps):
        tokens = tuple((number * 7 + rank * 5) % 17 for rank in range(ctx.world_size))
        step = Step(tokens, 2, 8, routing="any", drop=0.3, rows="turn", seed=number)
        mine = make_inputs(step, ctx.rank, 5)
        ctx.jitter(2)
        d = dispatch_step(group, step, mine)
        what = f"call {first + number}, rank {ctx.rank}"
        check_dispatch(group, step, d, ctx.rank, what)
        out = combine_step(step, expert_step(group, step, d), d, mine)
        check_combine(step, out, 5, ctx.rank, what)
    assert group.stats()["epoch"] == first + steps - 1


def many_steps(ctx: RankContext, setting: dict[str, Any], steps: int, threads: int, cores: int) -> int:
    """Case 28: more ranks than cores, each step's rows carry a checksum of themselves."""
    before, torch_threads = os.sched_getaffinity(0), torch.get_num_threads()
    group = _open(ctx, setting, num_experts=9, top_k=2, max_tokens=64, hidden_size=128)
    rng = random.Random(99)
    wrong = 0
    try:
        os.sched_setaffinity(0, sorted(before)[:cores])
        torch.set_num_threads(threads)
        for number in range(steps):
            tokens = [rng.randrange(65) for _ in range(ctx.world_size)]
            generator = torch.Generator().manual_seed(number * 64 + ctx.rank)
            x = torch.randint(-99, 100, (tokens[ctx.rank], 128), generator=generator).float()
            x[:, -1] = x[:, :-1].sum(1)
            idx = torch.randint(0, 9, (tokens[ctx.rank], 2), generator=generator)
            d = moe_a2a.dispatch(x, idx, group)
            wrong += int((d.x[:, :-1].sum(1) != d.x[:, -1]).sum())
            out = moe_a2a.combine(d.x * 2, d.handle)
            wrong += int((out != 4 * x).any(1).sum())
    finally:
        torch.set_num_threads(torch_threads)
        os.sched_setaffinity(0, before)
    return wrong


def paused_everywhere(ctx: RankContext, setting: dict[str, Any], steps: int, pause_ms: float) -> None:
    """Case 29: pauses before dispatch, between its send and its receive, before combine, and inside it."""
    group = _open(ctx, setting, num_experts=6, top_k=2, max_tokens=12, hidden_size=16)
    shared = random.Random(7)
    for number in range(steps):
        tokens = tuple(shared.randrange(13) for _ in range(ctx.world_size))
        step = Step(tokens, 2, 16, routing="any", drop=0.2, rows="turn", seed=number)
        mine = make_inputs(step, ctx.rank, 6)
        late_receive, late_sum = shared.random() < 0.5, shared.random() < 0.5
        ctx.jitter(pause_ms)
        if late_receive:
            pending = moe_a2a.dispatch(
                mine.x_TH.clone(), mine.idx_TK, group, topk_weights=mine.weights_TK, async_op=True
            )
            ctx.jitter(pause_ms)
            d = pending.wait()
        else:
            d = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group, topk_weights=mine.weights_TK)
        what = f"step {number}, rank {ctx.rank}"
        check_dispatch(group, step, d, ctx.rank, what)
        y = expert_step(group, step, d)
        ctx.jitter(pause_ms)
        if late_sum:
            combining = moe_a2a.combine(y, d, mine.weights_TK, async_op=True)
            y.fill_(float("nan"))
            ctx.jitter(pause_ms)
            out = combining.wait()
        else:
            out = moe_a2a.combine(y, d, mine.weights_TK)
        check_combine(step, out, 6, ctx.rank, what)


# ----------------------------------------------------------------------------------------------------------- E


def in_flight(ctx: RankContext, setting: dict[str, Any], order: str) -> None:
    """Case 31 and its kind. Words: D dispatch, B begin a dispatch, W wait for it, C combine, b begin a combine, w wait for it,
    X drop whatever is held. The number is the step's.
    """
    group = _open(ctx, setting, num_experts=4, top_k=2, max_tokens=16, hidden_size=64)
    numbers = sorted({int(word[1:]) for word in order.split()})
    steps = {
        n: Step((16, 3, 9, 0)[: ctx.world_size], 2, 64, routing="any", drop=0.2, rows="turn", seed=n)
        for n in numbers
    }
    inputs = {n: make_inputs(step, ctx.rank, 4) for n, step in steps.items()}
    held: dict[int, Any] = {}
    for word in order.split():
        kind, n = word[0], int(word[1:])
        step, mine = steps[n], inputs[n]
        what = f"{order}: {word}, rank {ctx.rank}"
        ctx.jitter(3)
        if kind in "DB":
            x = mine.x_TH.clone()
            result: Any = moe_a2a.dispatch(
                x, mine.idx_TK, group, topk_weights=mine.weights_TK, async_op=kind == "B"
            )
            if kind == "B":
                x.fill_(float("nan"))  # it may be written again at once
            held[n] = result
        elif kind == "W":
            held[n] = held[n].wait()
        elif kind in "Cb":
            y = expert_step(group, step, held[n])
            result = moe_a2a.combine(y, held[n], mine.weights_TK, async_op=kind == "b")
            if kind == "b":
                y.fill_(float("nan"))
                held[n] = result
            else:
                check_combine(step, result, 4, ctx.rank, what)
        elif kind == "w":
            check_combine(step, held[n].wait(), 4, ctx.rank, what)
        else:
            assert kind == "X", word
            del held[n]
        if kind in "DW":
            check_dispatch(group, step, held[n], ctx.rank, what)


def expired_in_flight(ctx: RankContext, setting: dict[str, Any]) -> dict[str, str]:
    """What was begun and never waited for expires; a second wait gives the same object."""
    group = ctx.fresh_group(
        **setting, num_experts=4, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32, timeout=20.0
    )
    x, idx = torch.ones(4, 8), torch.arange(4)[:, None]
    said, found = _said, {}
    never = moe_a2a.dispatch(x, idx, group, async_op=True)
    second = moe_a2a.dispatch(x, idx, group, async_op=True)
    third = moe_a2a.dispatch(x, idx, group, async_op=True)
    found["dispatch"] = said(never.wait)
    d = second.wait()
    assert second.wait() is d
    begun = moe_a2a.combine(d.x, d, async_op=True)
    found["twice"] = said(lambda: moe_a2a.combine(d.x, d))
    last = third.wait()
    fourth = moe_a2a.dispatch(x, idx, group)
    found["combine"] = said(begun.wait)
    out = moe_a2a.combine(fourth.x, fourth, async_op=True)
    assert torch.equal(out.wait(), x) and out.wait() is out.wait()
    assert torch.equal(moe_a2a.combine(last.x, last), x)
    # A ticket of an earlier call is refused by the operator, too.
    ticket = out._ticket
    again = moe_a2a.exchange.PendingCombine(group, ticket, None, fourth.handle, None)
    found["ticket"] = said(again.wait)
    return found


def async_on_some_ranks(ctx: RankContext, setting: dict[str, Any], rows: int) -> str:
    """Rank 0 dispatches asynchronously and waits after its next dispatch, the others at once."""
    group = ctx.fresh_group(
        **setting,
        num_experts=2,
        top_k=1,
        max_tokens=8,
        hidden_size=8,
        dtype=torch.float32,
        max_recv_rows=rows,
        timeout=5.0,
        warmup_timeout=10.0,
    )
    step = Step((8,) * ctx.world_size, 1, 8, routing="round", rows="turn")
    mine = make_inputs(step, ctx.rank, 2)
    result = "rows"
    for _ in range(3):
        pending: Any = None
        try:
            pending = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group, async_op=ctx.rank == 0)
        except errors.CallMismatch as error:
            assert "async_op is used on rank 0" in str(error)
            result = "mismatch"
        try:
            second = moe_a2a.dispatch(mine.x_TH, mine.idx_TK, group)
            assert torch.equal(moe_a2a.combine(second.x, second), mine.x_TH)
            if ctx.rank == 0:
                pending = pending.wait()
        except errors.CallMismatch as error:
            assert "async_op is used on rank 0" in str(error)
            result = "mismatch"
        if result == "rows":
            assert torch.equal(moe_a2a.combine(pending.x, pending), mine.x_TH)
    return result


def _said(action: Callable[[], object]) -> str:
    try:
        action()
    except (errors.MoeA2AError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def waited_by_two_threads(ctx: RankContext, setting: dict[str, Any]) -> list[bool]:
    """Both get the same object, or the same error."""
    group = ctx.fresh_group(
        **setting, num_experts=2, top_k=1, max_tokens=4, hidden_size=8, dtype=torch.float32, timeout=20.0
    )
    x, idx = torch.ones(4, 8), torch.tensor([[0], [1], [0], [1]])
    same = []
    for bad in (False, True, False):
        pending: Any = None
        if bad and ctx.rank == 0:
            assert _said(lambda: moe_a2a.dispatch(x, idx + 9, group, async_op=True)).startswith("BadValue")
            same += [True, True]
            continue
        pending = moe_a2a.dispatch(x, idx, group, async_op=True)
        for _ in range(2):
            found: list[Any] = []

            def wait(pending: Any = pending, found: list[Any] = found) -> None:
                try:
                    found.append(pending.wait())
                except errors.PeerAborted as error:
                    found.append(error)

            threads = [threading.Thread(target=wait) for _ in range(2)]
            ctx.jitter(5)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            same.append(len(found) == 2 and found[0] is found[1])
            if bad:
                assert isinstance(found[0], errors.PeerAborted)
                continue
            if isinstance(pending, moe_a2a.exchange.PendingDispatch):
                pending = moe_a2a.combine(found[0].x, found[0], async_op=True)
    return same


def no_memory(ctx: RankContext, setting: dict[str, Any], what: str) -> str:
    """Rank 0 has no memory for what a call needs: it says so, the others hear of it at once, and the group goes on."""
    import resource

    # What a call needs is to be more than the limit below leaves; in waves that is a part of y.
    tokens, hidden = 4096, 4096 if what == "waves" else 1024
    group = ctx.fresh_group(
        **setting,
        num_experts=ctx.world_size,
        top_k=1,
        max_tokens=tokens,
        hidden_size=hidden,
        dtype=torch.float32,
        max_recv_rows=tokens // 2 if what == "waves" else None,
        timeout=60.0,
    )
    idx = torch.arange(tokens)[:, None] % ctx.world_size
    x = torch.ones(tokens, hidden)
    if what == "pad_to":
        said = _said(lambda: moe_a2a.dispatch(x, idx, group, pad_to=2**31 - 1 if ctx.rank == 0 else None))
    else:
        d = moe_a2a.dispatch(x, idx, group)
        y = d.x
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        try:
            if ctx.rank == 0:
                resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), hard))
            said = _said(
                lambda: (
                    moe_a2a.combine(y, d, async_op=True).wait() if what == "async" else moe_a2a.combine(y, d)
                )
            )
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    again = moe_a2a.dispatch(x[:3], idx[:3], group)
    assert torch.equal(moe_a2a.combine(again.x, again), x[:3])
    return said


def aborted_in_flight(ctx: RankContext, setting: dict[str, Any]) -> list[str]:
    """A call that a rank aborts between two that are under way; each says how it ended when it is waited for."""
    group = ctx.fresh_group(
        **setting,
        num_experts=4,
        top_k=1,
        max_tokens=4,
        hidden_size=8,
        dtype=torch.float32,
        depth=3,
        timeout=20.0,
    )
    x, idx = torch.full((4, 8), float(ctx.rank)), torch.arange(4)[:, None]
    found = []
    for number in range(9):
        aborter = number % ctx.world_size
        calls: list[Any] = []
        for place in range(3):
            ctx.jitter(3)
            bad = place == number // 3 and ctx.rank == aborter
            try:
                calls.append(
                    moe_a2a.dispatch(x, torch.full((4, 1), 99) if bad else idx, group, async_op=True)
                )
            except errors.BadValue:
                calls.append(None)
        order = [0, 1, 2] if number % 2 else [2, 0, 1]
        for place in order:
            call = calls[place]
            if call is None:
                found.append("own")
                continue
            try:
                d = call.wait()
            except errors.PeerAborted as error:
                assert f"rank {aborter}" in str(error)
                found.append("peer")
                continue
            out = moe_a2a.combine(d.x, d)
            assert torch.equal(out, x)
            found.append("good")
    return found


def replayed(ctx: RankContext, setting: dict[str, Any], calls: int) -> int:
    """Case 34: a compiled callable over buffers whose contents change in place, and once with sizes that change; against the
    same function uncompiled.
    """
    group = ctx.fresh_group(
        **setting,
        num_experts=5,
        top_k=2,
        max_tokens=8,
        hidden_size=16,
        dtype=torch.float32,
        timeout=120.0,
        warmup_timeout=300.0,
    )
    room = 2 * 8 * ctx.world_size

    def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = moe_a2a.dispatch(x, idx, group, weights, pad_to=room)
        assert d.weights is not None
        return moe_a2a.combine(d.x * 2.0 + d.weights[:, None] * 0.0, d, weights)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    x, idx, weights = torch.empty(8, 16), torch.empty(8, 2, dtype=torch.int64), torch.empty(8, 2)
    with torch.no_grad():
        for number in range(calls):
            # The same on every rank but for what it sends; one rank sends nothing at all.
            generator = torch.Generator().manual_seed(number * 64 + ctx.rank)
            x.copy_(torch.randn(8, 16, generator=generator))
            idx.copy_(torch.randint(-1, 5, (8, 2), generator=generator))
            weights.copy_(torch.rand(8, 2, generator=generator))
            if ctx.rank == number % ctx.world_size:
                idx.fill_(-1)
            tokens = 8 if number < calls // 2 else (3 * number + 5 * ctx.rank) % 7 + 2
            arguments = (x[:tokens], idx[:tokens], weights[:tokens])
            ctx.jitter(3)
            got = compiled(*arguments)
            assert_bits(got, layer(*arguments), f"call {number}, rank {ctx.rank}")
    epoch = group.stats()["epoch"]
    assert isinstance(epoch, int)
    return epoch


def several_groups(ctx: RankContext, setting: dict[str, Any], rounds: int) -> None:
    """Case 35: groups over {0, 1}, {2, 3}, {0, 2} and all; one random order of calls, ranks skip what they aren't in. The world
    has four ranks.
    """
    members = [[0, 1], [2, 3], [0, 2], [0, 1, 2, 3]]
    made: list[Any] = []
    handles = []
    for ranks in members:
        handle = dist.new_group(ranks)  # collective over the world, also for ranks that aren't in it
        handles.append(handle)
        made.append(
            moe_a2a.EPGroup(
                handle,
                **setting,
                num_experts=5,
                top_k=2,
                max_tokens=8,
                hidden_size=16,
                dtype=torch.float32,
                timeout=20.0,
            )
            if ctx.rank in ranks
            else None
        )
    order = random.Random(5)
    for number in range(rounds):
        which = order.randrange(len(members))
        tokens = tuple(order.randrange(9) for _ in members[which])
        group = made[which]
        if group is None:
            continue
        step = Step(tokens, 2, 16, routing="any", drop=0.2, rows="turn", seed=number)
        mine = make_inputs(step, group.rank, 5)
        ctx.jitter(3)
        d = dispatch_step(group, step, mine)
        what = f"round {number}, group {members[which]}, rank {ctx.rank}"
        check_dispatch(group, step, d, group.rank, what)
        out = combine_step(step, expert_step(group, step, d), d, mine)
        check_combine(step, out, 5, group.rank, what)
    for group in made:
        if group is not None:
            group.close()
    for ranks, handle in zip(members, handles, strict=True):
        if ctx.rank in ranks:
            dist.destroy_process_group(handle)


def _loop(ctx: RankContext, group: Any, seed: int, count: int, faults: list[str]) -> None:
    try:
        for number in range(count):
            tokens = tuple((number * 3 + rank * 5 + seed) % 9 for rank in range(ctx.world_size))
            step = Step(tokens, 2, 16, routing="any", drop=0.2, rows="turn", seed=seed * 1000 + number)
            mine = make_inputs(step, ctx.rank, 4)
            d = dispatch_step(group, step, mine)
            what = f"thread {seed}, step {number}, rank {ctx.rank}"
            check_dispatch(group, step, d, ctx.rank, what)
            check_combine(step, combine_step(step, expert_step(group, step, d), d, mine), 4, ctx.rank, what)
    except BaseException as error:
        faults.append(f"thread {seed}: {type(error).__name__}: {error}")


def thread_per_group(ctx: RankContext, setting: dict[str, Any], count: int) -> list[str]:
    """Case 38a: two threads, a group each."""
    sizes = {
        "num_experts": 4,
        "top_k": 2,
        "max_tokens": 8,
        "hidden_size": 16,
        "dtype": torch.float32,
        "timeout": 20.0,
    }
    groups = [ctx.fresh_group(**setting, **sizes), ctx.fresh_group(**setting, **sizes)]
    faults: list[str] = []
    threads = [
        threading.Thread(target=_loop, args=(ctx, group, seed, count, faults))
        for seed, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


def threads_on_one_group(ctx: RankContext, setting: dict[str, Any], count: int) -> dict[str, int]:
    """Case 38b: two threads on one group, whose calls carry a tag. Calls take turns; where the ranks' threads came in another
    order the call is a mismatch on all of them, never somebody else's rows.
    """
    group = ctx.fresh_group(
        **setting, num_experts=2, top_k=1, max_tokens=4, hidden_size=4, dtype=torch.float32, timeout=20.0
    )
    seen = {"good": 0, "mismatch": 0}
    faults: list[str] = []

    def work(thread: int) -> None:
        idx = torch.tensor([[0], [1]])
        try:
            for number in range(count):
                value = float(thread * 1000 + number)
                x = torch.full((2, 4), value)
                if ctx.rng.random() < 0.3:
                    time.sleep(ctx.rng.random() * 1e-3)
                try:
                    d = moe_a2a.dispatch(x, idx, group, tag=f"thread {thread}")
                except errors.CallMismatch:
                    seen["mismatch"] += 1
                    continue
                # The rows of the other ranks' thread of this name: of this step or another, never of the other thread.
                assert torch.equal(d.x // 1000, torch.full_like(d.x, float(thread))), d.x
                seen["good"] += 1
        except BaseException as error:
            faults.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    return seen


def swapped_layers(ctx: RankContext, setting: dict[str, Any]) -> list[str]:
    """Case 38c: rank 0 calls layers L1, L2, the others L2, L1."""
    group = ctx.fresh_group(
        **setting, num_experts=2, top_k=1, max_tokens=4, hidden_size=4, dtype=torch.float32, timeout=20.0
    )
    names = ["L1", "L2"] if ctx.rank == 0 else ["L2", "L1"]
    found = []
    for name in names:
        try:
            moe_a2a.dispatch(torch.ones(2, 4), torch.tensor([[0], [1]]), group, tag=name)
            found.append("rows")
        except errors.CallMismatch as error:
            assert "tag" in str(error)
            found.append("mismatch")
    d = moe_a2a.dispatch(torch.ones(2, 4), torch.tensor([[0], [1]]), group, tag="L3")
    assert torch.equal(moe_a2a.combine(d.x, d), torch.ones(2, 4))
    return found


# ------------------------------------------------------------------------------------- the end of a life (42, 45)


def orders_of_closing(ctx: RankContext, setting: dict[str, Any], order: str) -> list[str]:
    """Two groups over the same ranks, closed in an order that differs between ranks; some work on one goes on meanwhile."""
    sizes = {
        "num_experts": 3,
        "top_k": 1,
        "max_tokens": 4,
        "hidden_size": 8,
        "dtype": torch.float32,
        "timeout": 20.0,
    }
    first, second = ctx.fresh_group(**setting, **sizes), ctx.fresh_group(**setting, **sizes)
    x, idx = torch.ones(3, 8), torch.arange(3)[:, None]

    def step(group: Any) -> None:
        d = moe_a2a.dispatch(x, idx, group)
        assert torch.equal(moe_a2a.combine(d.x, d), x)

    step(first)
    step(second)
    ctx.jitter(5)
    if order == "crosswise":
        # Rank 0 leaves the first group, the last rank the second, at the same time; nobody needs anybody any more.
        (first if ctx.rank == 0 else second).close()
        ctx.jitter(5)
        (second if ctx.rank == 0 else first).close()
    elif order == "one goes on":
        first.close()
        for _ in range(20):
            ctx.jitter(2)
            step(second)
        second.close()
    elif order == "some leave":
        # The others find out when they need the one who left, by name, and can still close.
        if ctx.rank == 0:
            first.close()
        else:
            try:
                step(first)
            except errors.PeerLost as error:
                assert "rank 0" in str(error) and "closed" in str(error)
            else:
                return ["a step without rank 0"]
        step(second)
        second.close()
    else:
        assert order == "with a handle open", order
        # A handle whose rows are all here can be combined by ranks whose owners have given theirs and left.
        d = moe_a2a.dispatch(x, idx, first)
        out = moe_a2a.combine(d.x, d, async_op=True)
        if ctx.rank == 0:
            first.close()
        else:
            ctx.jitter(20)
            assert torch.equal(out.wait(), x)
            first.close()
        second.close()
    first.close()
    second.close()
    states = []
    for group in (first, second):
        try:
            moe_a2a.dispatch(x, idx, group)
        except errors.GroupClosed as error:
            states.append(type(error).__name__)
    return states


def more_rows_than_the_window(ctx: RankContext, setting: dict[str, Any], rows: int) -> int:
    """Every rank sends all it has to expert 1, whose owner has room for ``rows``: it takes waves, and loses nothing."""
    group = ctx.fresh_group(
        **setting,
        num_experts=3,
        top_k=1,
        max_tokens=8,
        hidden_size=8,
        dtype=torch.float32,
        max_recv_rows=rows,
        timeout=20.0,
        warmup_timeout=40.0,
    )
    for number, count in enumerate((8, 3, 8, 0, 1)):
        step = Step((count,) * ctx.world_size, 1, 8, routing="one", target=1, rows="turn", seed=number)
        mine = make_inputs(step, ctx.rank, 3)
        ctx.jitter(2)
        d = dispatch_step(group, step, mine)
        what = f"{count} rows a rank into {rows}, rank {ctx.rank}"
        check_dispatch(group, step, d, ctx.rank, what)
        y = expert_step(group, step, d)
        slot = d.empty_like_rows()  # lies in the window where there is room
        slot.copy_(y)
        check_combine(step, combine_step(step, slot, d, mine), 3, ctx.rank, what)
    waves = group.stats()["waves"]
    assert isinstance(waves, int)
    return waves


def waves_and_failures(ctx: RankContext, setting: dict[str, Any], what: str) -> str:
    """A combine in waves in which one rank can't sum, or has no rows to give: the others get theirs, or hear why."""
    group = ctx.fresh_group(
        **setting,
        num_experts=ctx.world_size,
        top_k=2,
        max_tokens=12,
        hidden_size=8,
        dtype=torch.float32,
        max_recv_rows=3,
        timeout=20.0,
        warmup_timeout=40.0,
    )
    tokens = (12,) * ctx.world_size
    result = "good"
    for number in range(6):
        step = Step(tokens, 2, 8, routing="any", rows="turn", seed=number)
        mine = make_inputs(step, ctx.rank, ctx.world_size)
        ctx.jitter(2)
        d = dispatch_step(group, step, mine)
        y = expert_step(group, step, d)
        bad = number == 2 and ctx.rank == 1
        try:
            if bad and what == "weights":
                moe_a2a.combine(y, d, mine.weights_TK[:, :1] if mine.weights_TK is not None else None)
            elif bad and what == "y":
                moe_a2a.combine(y[:-1], d, mine.weights_TK)
            else:
                check_combine(
                    step, combine_step(step, y, d, mine), ctx.world_size, ctx.rank, f"step {number}"
                )
        except (errors.BadValue, errors.PeerAborted) as error:
            assert number == 2, error
            result = type(error).__name__
    return result


def protocol_of_large_and_small(ctx: RankContext) -> list[int]:
    """ "auto" with thresholds by hand: small dispatches push, large ones pull, combine the other way round."""
    group = ctx.fresh_group(
        protocol="push",
        num_experts=2,
        top_k=1,
        max_tokens=64,
        hidden_size=16,
        dtype=torch.float32,
        timeout=20.0,
        _tiling={
            "dispatch_push_below": 64 * 8,
            "dispatch_push_from": 2**62,
            "combine_push_below": 0,
            "combine_push_from": 64 * 8,
        },
    )
    pushes = []
    for tokens in (2, 60):
        before = group.stats()["pushes"]
        x = torch.randn(tokens, 16)
        idx = torch.full((tokens, 1), 1 - ctx.rank)
        d = moe_a2a.dispatch(x, idx, group)
        middle = group.stats()["pushes"]
        assert torch.equal(moe_a2a.combine(d.x, d), x)
        pushes += [middle - before, group.stats()["pushes"] - middle]
    return pushes
