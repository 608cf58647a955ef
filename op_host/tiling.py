"""How work is cut and how a rank waits, per target. A table that a person can read; the numbers' sources are in
``docs/measurements.md``."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

NEVER = 2**62  # bytes that no call has

PROTOCOLS = ("auto", "push", "pull")


@dataclass(frozen=True)
class Tiling:
    """What the CPU kernels are told. The field order is what :meth:`params` hands to them."""

    pauses: int  # polls with a pause between them before a waiting rank yields its core
    yields: int  # polls with a yield between them before it sleeps
    sleep_ns: int  # then it polls this far apart
    streaming_bytes: int  # what is at least this size is written past the cache
    # In a group that may push, a source pushes when fewer bytes than `below` leave it, or at least `from`; an owner in combine
    # does the same.
    dispatch_push_below: int = 0
    dispatch_push_from: int = NEVER
    combine_push_below: int = 0
    combine_push_from: int = NEVER
    flag_rows: int = 0  # pushed rows of an expert that share a flag, in fused calls too; 0: all of them
    mix: int = 0  # for tests: not 0, each call pushes or pulls by chance, with this seed

    def params(self) -> list[int]:
        return [getattr(self, field.name) for field in fields(self)]


# A rank that has a core to itself may spin for the few microseconds a peer needs to answer. With more ranks than cores the
# peer needs the core we would spin on.
ENOUGH_CORES = Tiling(pauses=400, yields=2000, sleep_ns=50_000, streaming_bytes=12 << 20)
TOO_FEW_CORES = Tiling(pauses=0, yields=4000, sleep_ns=50_000, streaming_bytes=12 << 20)


def cpu_tiling(ranks_on_host: int, cores: int | None = None, protocol: str = "auto") -> Tiling:
    """The tiling for a CPU rank that shares its host's cores with ``ranks_on_host - 1`` others.

    Args:
        cores: defaults to the cores this process may run on.
        protocol: one of PROTOCOLS.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0))
    tiling = ENOUGH_CORES if ranks_on_host <= cores else TOO_FEW_CORES
    if protocol == "push":
        return replace(tiling, dispatch_push_from=0, combine_push_from=0)
    return tiling


def may_push(protocol: str) -> bool:
    """Whether a group of this protocol needs the regions for pushing."""
    tiling = cpu_tiling(1, 1, protocol)
    thresholds = (tiling.dispatch_push_from, tiling.combine_push_from)
    return tiling.dispatch_push_below > 0 or tiling.combine_push_below > 0 or min(thresholds) < NEVER
