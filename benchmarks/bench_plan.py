"""What the process that starts a benchmark and the ranks agree on. Needs nothing but Python."""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

MESSAGE_MARK = "@bench "  # begins the lines of rank 0 that are messages and not for people
ITEM_BYTES = 2  # bfloat16


class Size(NamedTuple):
    """One row of the table."""

    T: int
    H: int
    E: int
    K: int

    @property
    def megabytes(self) -> float:
        """Payload of one rank in one direction if nothing is dropped, in 10^6 bytes."""
        return self.T * self.K * self.H * ITEM_BYTES / 1e6

    def __str__(self) -> str:
        return f"T={self.T} H={self.H} E={self.E} K={self.K}"


@dataclass
class Plan:
    """What the ranks are told by the process that starts them."""

    ranks: int
    sizes: list[Size]
    seconds: float  # of sampling per size
    check_all: bool
    inject_fault: str
    routing: str
    delay_ms: float
    seed: int
    mpi: bool
    scratch: str
    cores: list[int]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Plan:
        plan = Plan(**json.loads(path.read_text()))
        plan.sizes = [Size(*size) for size in plan.sizes]
        return plan


class StartLine:
    """A barrier that lets all ranks of one host go at the same instant, and knows how late the last one came.

    Each rank writes the time of its arrival (one clock for the whole host) into its own 64-bit cell and
    leaves when all cells are later than the previous release. The time itself is the message, so nothing
    else has to be ordered. Two sets of cells take turns: a rank can be at most one barrier ahead.
    """

    MARGIN_NS = 3_000
    BOUND_S = 180.0
    STRIDE = 8  # cells of 8 bytes: one cache line per rank

    def __init__(self, path: Path, rank: int, world_size: int, num_cores: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(self._map).cast("q")
        self._sets = [[self.STRIDE * (turn * world_size + r) for r in range(world_size)] for turn in (0, 1)]
        self._rank = rank
        self._turn = 0
        self._release = 0
        # Ranks that share a core have to give it away; ranks with a core of their own would only get late
        # by that.
        self._crowded = world_size > num_cores

    @staticmethod
    def create(path: Path, world_size: int) -> None:
        path.write_bytes(bytes(2 * world_size * StartLine.STRIDE * 8))

    def wait(self) -> int:
        """Returns nanoseconds between the first and the last arrival."""
        cells, places, last = self._cells, self._sets[self._turn], self._release
        self._turn ^= 1
        clock = time.perf_counter_ns
        arrival = clock()
        cells[places[self._rank]] = arrival
        deadline = arrival + int(self.BOUND_S * 1e9)
        while True:
            times = [cells[place] for place in places]
            if min(times) > last:
                break
            if self._crowded:
                os.sched_yield()
            if clock() > deadline:
                missing = [r for r, moment in enumerate(times) if moment <= last]
                raise TimeoutError(
                    f"benchmark: rank {self._rank} waited {self.BOUND_S:.0f} s at the start line for ranks "
                    f"{missing}; look for their errors above"
                )
        self._release = max(times) + (0 if self._crowded else self.MARGIN_NS)
        while clock() < self._release:
            pass
        return max(times) - min(times)
