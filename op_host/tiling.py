"""How work is cut and how a rank waits, per target. A table that a person can read; the numbers' sources are in
``docs/measurements.md``."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Tiling:
    """What the CPU kernels are told. The field order is what :meth:`params` hands to them."""

    pauses: int  # polls with a pause between them before a waiting rank yields its core
    yields: int  # polls with a yield between them before it sleeps
    sleep_ns: int  # then it polls this far apart
    streaming_bytes: int  # an output of at least this size is written past the cache

    def params(self) -> list[int]:
        return [getattr(self, field.name) for field in fields(self)]


# A rank that has a core to itself may spin for the few microseconds a peer needs to answer. With more ranks than cores the
# peer needs the core we would spin on.
ENOUGH_CORES = Tiling(pauses=400, yields=2000, sleep_ns=50_000, streaming_bytes=12 << 20)
TOO_FEW_CORES = Tiling(pauses=0, yields=4000, sleep_ns=50_000, streaming_bytes=12 << 20)


def cpu_tiling(ranks_on_host: int, cores: int | None = None) -> Tiling:
    """The tiling for a CPU rank that shares its host's cores with ``ranks_on_host - 1`` others.

    ``cores`` defaults to the cores this process may run on.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0))
    return ENOUGH_CORES if ranks_on_host <= cores else TOO_FEW_CORES
