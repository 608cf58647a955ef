"""Bodies that misbehave on purpose, for the tests of the pool itself."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

from pool import RankContext

if TYPE_CHECKING:
    import torch


def identify(ctx: RankContext, scale: int = 1) -> tuple[int, int, int, int]:
    """Return (rank, world size, sum of ranks over the process group, process id)."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([ctx.rank * scale])
    dist.all_reduce(total, group=ctx.process_group)
    return ctx.rank, ctx.world_size, int(total), os.getpid()


def draw(ctx: RankContext) -> float:
    """Return one number of the rank's generator."""
    return ctx.rng.random()


def tensor_back(ctx: RankContext) -> torch.Tensor:
    """Return a tensor, which must travel by value."""
    import torch

    return torch.full((3,), float(ctx.rank))


def unpicklable(ctx: RankContext) -> Any:
    """Return something that can't travel."""
    return threading.Lock()


def raise_on(ctx: RankContext, rank: int) -> None:
    """Raise on one rank; the others return."""
    if ctx.rank == rank:
        raise LookupError(f"deliberate failure of rank {rank}")


def raise_while_others_wait(ctx: RankContext, rank: int) -> None:
    """Raise on one rank while the others wait for it for ever."""
    raise_on(ctx, rank)
    while True:
        time.sleep(1)


def sleep_in_here(ctx: RankContext, rank: int) -> None:
    """Sleep for ever on one rank."""
    if ctx.rank == rank:
        time.sleep(1e6)


def die(ctx: RankContext, rank: int, number: int) -> None:
    """Send this process a signal on one rank; the others wait for it in vain."""
    if ctx.rank == rank:
        os.kill(os.getpid(), number)
    time.sleep(1e6)


def interrupted(ctx: RankContext) -> None:
    """Raise the exception that a Ctrl-C raises."""
    if ctx.rank == 0:
        signal.raise_signal(signal.SIGINT)
        time.sleep(5)


def import_much(ctx: RankContext, count: int) -> None:
    """Import a module of many objects."""
    module = types.ModuleType("ballast")
    module.__dict__["kept"] = [[] for _ in range(count)]
    sys.modules["ballast"] = module


def collectable(ctx: RankContext) -> int:
    """How many objects a collection has to look at."""
    return len(gc.get_objects())
