"""Rank bodies: calls that end in odd ways (signals, other threads, forks) and tensors that were tampered with."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pool import RankContext

import moe_a2a
from moe_a2a import errors
from moe_a2a.op_host import native
from rank_bodies.windows import SIZES, check_step

QUICK = 5.0  # seconds on a busy machine; the groups' timeout is 20 and more


def _late_step(group: moe_a2a.EPGroup) -> Any:
    return moe_a2a.dispatch(torch.ones(2, 33), torch.tensor([[0, 4], [1, 2]]), group)


def handler_closes(ctx: RankContext, also: str) -> dict[str, Any]:
    """A signal handler on rank 0 uses the group that the interrupted call is waiting in; rank 1 doesn't come."""
    group = ctx.fresh_group(**SIZES)
    check_step(ctx, group)
    ctx.barrier()
    found: dict[str, Any] = {}
    if ctx.rank == 0:

        def handler(*_: Any) -> None:
            found["stats"] = group.stats()["epoch"]
            if also == "dispatch":
                try:
                    _late_step(group)
                except errors.MoeA2AError as error:
                    found["nested"] = type(error).__name__
            group.close()

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        try:
            _late_step(group)
        except errors.MoeA2AError as error:
            found["raised"] = type(error).__name__
        found["seconds"] = time.monotonic() - start
        signal.signal(signal.SIGALRM, before)
        assert group.closed
    ctx.barrier()
    if ctx.rank == 1:
        try:
            # Rank 0 had published this call before it left; the next one can't come.
            with contextlib.suppress(errors.PeerLost):
                _late_step(group)
            _late_step(group)
        except errors.PeerLost as error:
            found["peer"] = str(error)
        except errors.GroupPoisoned as error:
            found["peer"] = str(error)
    return found


def interrupt_is_not_lost(ctx: RankContext) -> str:
    """A handler that raises after the peer has come: the exception must surface all the same."""
    group = ctx.fresh_group(**SIZES)
    check_step(ctx, group)
    ctx.barrier()
    if ctx.rank == 1:
        time.sleep(1.0)
        with contextlib.suppress(errors.PeerLost):
            _late_step(group)
        ctx.barrier()
        return ""

    def handler(*_: Any) -> None:
        time.sleep(1.5)  # the peer's record arrives meanwhile
        raise KeyboardInterrupt("wanted")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        _late_step(group)
        return "the interrupt was lost"
    except KeyboardInterrupt as error:
        return str(error)
    finally:
        signal.signal(signal.SIGALRM, before)
        ctx.barrier()


def closed_by_another_thread(ctx: RankContext) -> tuple[float, str, int]:
    """Rank 0's worker waits in dispatch for rank 1, which doesn't come; the main thread looks at it and closes."""
    group = ctx.fresh_group(**SIZES)
    check_step(ctx, group)
    ctx.barrier()
    if ctx.rank == 1:
        ctx.barrier()
        return 0.0, "", 0
    raised: list[str] = []

    def work() -> None:
        try:
            _late_step(group)
        except errors.MoeA2AError as error:
            raised.append(type(error).__name__)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    epoch = group.stats()["epoch"]
    group.close()
    took = time.monotonic() - start
    thread.join(20)
    assert not thread.is_alive()
    ctx.barrier()
    return took, raised[0], epoch


def forked_in_a_call(ctx: RankContext) -> int:
    """Rank 0 forks while another thread of it is in a call; the child closes the group and ends. Returns its status."""
    group = ctx.fresh_group(**SIZES)
    check_step(ctx, group)
    ctx.barrier()
    status = 0
    if ctx.rank == 0:
        thread = threading.Thread(target=lambda: _late_step(group))
        thread.start()
        time.sleep(0.3)
        child = os.fork()
        if child == 0:
            signal.alarm(15)  # a child that hangs is killed by it
            try:
                _late_step(group)
            except errors.GroupClosed:
                group.close()
                os._exit(0)
            os._exit(1)
        _, code = os.waitpid(child, 0)
        status = os.waitstatus_to_exitcode(code)
    ctx.barrier()
    if ctx.rank == 1:
        _late_step(group)
    else:
        thread.join(20)
        assert not thread.is_alive()
    check_step(ctx, group, 3)
    return status


def close_races_with_empty(ctx: RankContext) -> None:
    """Threads take window tensors and write to them while the group closes under them."""
    for _ in range(15):
        group = ctx.fresh_group(**SIZES)
        stop = threading.Event()

        def take(group: moe_a2a.EPGroup = group, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                try:
                    group.empty(4).fill_(1.0)
                except (errors.GroupClosed, errors.WindowBusy):
                    time.sleep(0)

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        ctx.jitter(10)
        group.close()
        stop.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def one_row_views(ctx: RankContext) -> None:
    """A view of one row has a stride that means nothing; a view of rows far apart is a view like any other."""
    group = ctx.fresh_group(**{**SIZES, "max_tokens": 2048})
    x = group.empty(2048)
    x.zero_()
    x[0] = ctx.rank + 1.0
    view = x[::100000]
    assert view.shape == (1, 33)
    d = moe_a2a.dispatch(view, torch.tensor([[0, 4]]), group)
    rows = [float(rank + 1) for rank in range(ctx.world_size)]
    experts = [e for e in (0, 4) if e in group.local_experts]
    assert d.x[:, 0].tolist() == rows * len(experts)
    y = d.empty_like_rows()
    if len(y):
        y.copy_(d.x)
    out = moe_a2a.combine(y[::100000] if len(y) == 1 else y, d.handle)
    assert out[0, 0] == 2 * (ctx.rank + 1.0)
    # Every second row of the window tensor, in place; the rows of a transposed one are copied.
    x = group.empty(16)
    x.copy_(torch.arange(16.0).view(16, 1).expand(16, 33) + 100 * ctx.rank)
    d = moe_a2a.dispatch(x[::2], torch.tensor([[0, 4]] * 8), group)
    want = [v + 100.0 * rank for rank in range(ctx.world_size) for v in range(0, 16, 2)]
    assert d.x[:, 0].tolist() == want * len(experts)
    moe_a2a.combine(d.x, d.handle)


def tampered(ctx: RankContext, part: str) -> str:
    """The handle is a tensor, and tensors can be written to."""
    group = ctx.fresh_group(**SIZES)
    d = _late_step(group)
    want = moe_a2a.combine(d.x, d.handle)
    d = _late_step(group)
    meta = d.handle.meta
    if ctx.rank == 0:
        if part == "row":
            d.handle.view.row_TK.fill_(2**30)
        elif part == "expert":
            d.handle.view.expert_TK.fill_(77)
        elif part == "tokens":
            meta[3] = 2**40
        elif part == "matrix of zeros":
            d.handle.view.counts_RE.zero_()
        elif part == "matrix too large":
            d.handle.view.counts_RE.fill_(10**6)
        elif part == "offset":
            meta[14] = 5
        elif part == "copies":
            d.handle.send_count_matrix.zero_()
    try:
        assert torch.equal(moe_a2a.combine(d.x, d.handle), want)
        result = "combined"
    except errors.MoeA2AError as error:
        result = str(error)
    ctx.barrier()
    return result


def groups_are_not_copied(ctx: RankContext) -> None:
    group = ctx.fresh_group(**SIZES)
    assert copy.deepcopy({"group": group})["group"] is group
    try:
        pickle.dumps(group)
        raise AssertionError("a group was pickled")
    except TypeError as error:
        assert "can't be pickled" in str(error)


def _outcome(call: Callable[[], Any]) -> tuple[str, float]:
    """ "ok" or the name of the error, and how long it took."""
    start = time.monotonic()
    try:
        call()
        result = "ok"
    except errors.MoeA2AError as error:
        result = type(error).__name__
    return result, time.monotonic() - start


class Unwilling(torch.Tensor):
    """Raises for whatever it is asked."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ValueError("not for you")


def bad_x_of_any_kind_is_told(ctx: RankContext, kind: str) -> tuple[str, float]:
    """Whatever keeps rank 1's x from the kernels, rank 0 hears of it at once."""
    group = ctx.fresh_group(**SIZES)
    check_step(ctx, group)
    x, idx = torch.ones(2, 33), torch.tensor([[0, 4], [1, 2]])
    bad: Any = {
        "subclass": lambda: x.as_subclass(Unwilling),
        "None": lambda: None,
        "meta": lambda: x.to("meta"),
    }[kind]()
    outcome = _outcome(lambda: moe_a2a.dispatch(bad if ctx.rank == 1 else x, idx, group))
    check_step(ctx, group, 5)
    return outcome


def bad_weights_under_another_device(ctx: RankContext) -> tuple[str, float]:
    """Weights that are a list, with torch's default device elsewhere: only this rank's sum is lost."""
    group = ctx.fresh_group(**SIZES)
    d = _late_step(group)
    weights: Any = [1.0] if ctx.rank == 1 else None
    with torch.device("meta"):
        outcome = _outcome(lambda: moe_a2a.combine(d.x, d.handle, weights))
    check_step(ctx, group, 5)
    return outcome


def interrupted_creation(ctx: RankContext) -> tuple[int, int]:
    """An exception right after each step of creation: mappings and descriptors of this process, before and after."""
    from rank_bodies.windows import replaced

    def held() -> tuple[int, int]:
        maps = sum("/memfd:moe_a2a" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return maps, len(os.listdir("/proc/self/fd"))

    with moe_a2a.EPGroup(ctx.process_group, **SIZES):
        ctx.barrier()
    gc.collect()
    before = held()

    class Interrupt(BaseException):
        pass

    for name in ("map_window", "create_group"):
        original = getattr(native, name)

        def stop(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            kept = original(*args, **kwargs)
            del kept
            raise Interrupt

        setattr(native, name, stop)
        try:
            moe_a2a.EPGroup(ctx.process_group, **SIZES)
            raise AssertionError("nothing was raised")
        except Interrupt:
            pass
        finally:
            setattr(native, name, original)
        gc.collect()
    with (
        replaced("_pidfd", lambda pid: (_ for _ in ()).throw(OSError(24, "Too many open files"))),
        contextlib.suppress(errors.TransportUnavailable),
    ):
        moe_a2a.EPGroup(ctx.process_group, **SIZES).close()
    gc.collect()
    after = held()
    return after[0] - before[0], after[1] - before[1]


def bad_y_of_any_kind_is_told(ctx: RankContext, kind: str) -> tuple[str, float]:
    """Whatever keeps rank 1's y from the kernels, rank 0 hears of it at once."""
    group = ctx.fresh_group(**SIZES)
    d = _late_step(group)
    bad: Any = {
        "subclass": lambda: torch.ones(len(d.x), 33).as_subclass(Unwilling),
        "list": lambda: d.x.tolist(),
        "sparse": lambda: d.x.to_sparse(),
        "meta": lambda: d.x.to("meta"),
        "quantised": lambda: torch.quantize_per_tensor(d.x, 0.1, 0, torch.qint8),
        "None": lambda: None,
        "bool": lambda: d.x > 0,
    }[kind]()
    outcome = _outcome(lambda: moe_a2a.combine(bad if ctx.rank == 1 else d.x, d.handle))
    check_step(ctx, group, 5)
    return outcome


def descriptors_run_out(ctx: RankContext, spare: int) -> str:
    """One rank has only so many descriptors left: whatever happens, it happens on all ranks, and quickly."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    try:
        if ctx.rank == 1:
            lowest = os.open("/dev/null", os.O_RDONLY)
            fillers.append(lowest)
            top = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (top + spare, hard))
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(spare):
                os.close(fillers.pop())
        try:
            group = moe_a2a.EPGroup(ctx.process_group, **SIZES)
        except errors.MoeA2AError as error:
            result = type(error).__name__
        else:
            result = group.transport.name
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if result in ("cpu-shm", "collective"):
        check_step(ctx, group)
        ctx.barrier()
        group.close()
    return result
