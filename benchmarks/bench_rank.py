"""One rank of the benchmark: ``bench_rank.py PLAN``, started by bench_dispatch_combine.py."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from baselines import BareMpi, Comm, GlooComm, MpiComm, PackedExchange, PairExchange
from bench_contenders import Bare, Buffers, Contender, Inputs, Ours, Peer, make_inputs
from bench_plan import ITEM_BYTES, MESSAGE_MARK, Plan, Size, StartLine

import moe_a2a

STAT = Path("/proc/stat")
SMALL_MB = 4.0  # below this, samples are taken in small blocks


@dataclass
class Samples:
    """Times of one contender on this rank, ns."""

    dispatch: list[int] = field(default_factory=list)
    combine: list[int] = field(default_factory=list)
    dispatch_start: list[int] = field(default_factory=list)
    combine_start: list[int] = field(default_factory=list)
    arrival_spread: list[int] = field(default_factory=list)
    checked: int = 0


class Rank:
    """What one rank does."""

    def __init__(self, plan: Plan, rank: int, world_size: int, mpi_comm: Any) -> None:
        import torch

        self.plan, self.rank, self.world_size, self.mpi_comm = plan, rank, world_size, mpi_comm
        scratch = Path(plan.scratch)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{scratch / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=StartLine.BOUND_S),
        )
        torch.set_num_threads(max(1, len(plan.cores) // world_size))
        self.start_line = StartLine(scratch / "start_line", rank, world_size, len(plan.cores))

    def tell(self, kind: str, **content: Any) -> None:
        if self.rank == 0:
            print(MESSAGE_MARK + json.dumps({"kind": kind, **content}), flush=True)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def run(self) -> None:
        self.tell("start", versions=self.versions(), placement=self.gather(sorted(os.sched_getaffinity(0))))
        for number, size in enumerate(self.plan.sizes):
            self.tell("size", number=number, name=str(size))
            self.tell("result", **self.run_size(size))

    def versions(self) -> dict[str, str]:
        found = {"python": platform.python_version(), "torch": torch.__version__}
        for package in ("moe_a2a", "numpy", "mpi4py"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        if self.plan.mpi:
            from mpi4py import MPI

            found["mpi"] = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        return found

    def run_size(self, size: Size) -> dict[str, Any]:
        # Two sets take turns: with one, rows that were not sent again would look right.
        sets = [
            make_inputs(size, self.world_size, self.rank, self.plan.seed + n, self.plan.routing)
            for n in range(2)
        ]
        needed = self.gather(max(len(s.expected_x) for s in sets))
        fair = size.T * size.K
        with moe_a2a.EPGroup(
            num_experts=size.E,
            top_k=size.K,
            max_tokens=size.T,
            hidden_size=size.H,
            dtype=torch.bfloat16,
            max_recv_rows=None if max(needed) <= 2 * fair else max(needed),
        ) as group:
            if group.transport.name != "cpu-shm":
                raise RuntimeError(
                    f"benchmark: transport is {group.transport.name!r} ({group.transport.reason}), expected "
                    "'cpu-shm': numbers of another path would be published under the wrong name"
                )
            most_rows = max(1, *(len(s.expected_x) for s in sets))
            buffers = Buffers(
                torch.zeros((size.T, size.H), dtype=torch.bfloat16),
                torch.zeros((most_rows, size.H), dtype=torch.bfloat16),
            )
            contenders = self.contenders(size, group, buffers, sets)
            bytes_found = self.check_copied_bytes(size, group, contenders[:2], sets[0])
            samples, failures, how = self.sample(size, contenders, sets)
            result = self.summary(size, contenders, sets, samples)
            all_failures = [text for part in self.gather(failures + bytes_found.failures) for text in part]
        result.update(**how, failures=all_failures, copied_bytes=self.gather(bytes_found.copied))
        return result

    def contenders(
        self, size: Size, group: moe_a2a.EPGroup, buffers: Buffers, sets: list[Inputs]
    ) -> list[Contender]:
        # The last rank's expert spoils a row, and only for one contender.
        fault = self.plan.inject_fault == "wrong-row" and self.rank == self.world_size - 1
        found: list[Contender] = [
            Ours(group, buffers, in_window=False, fault=fault),
            Ours(group, buffers, in_window=True, fault=False),
        ]
        who: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size, "num_experts": size.E}
        comms: list[Comm] = [GlooComm()]
        if self.mpi_comm is not None:
            comms.append(MpiComm(self.mpi_comm))
        for comm in comms:
            found += [Peer(PairExchange(comm, **who), buffers), Peer(PackedExchange(comm, **who), buffers)]
        if self.mpi_comm is not None:
            room = {
                "max_send_bytes": max(s.bare_send.numel() for s in sets) * ITEM_BYTES,
                "max_recv_bytes": max(s.bare_recv.numel() for s in sets) * ITEM_BYTES,
            }
            found += [Bare(BareMpi(self.mpi_comm, copy_own=copy_own, **room)) for copy_own in (False, True)]
        return found

    @dataclass
    class CopiedBytes:
        copied: dict[str, dict[str, int]] = field(default_factory=dict)
        failures: list[str] = field(default_factory=list)

    def check_copied_bytes(
        self, size: Size, group: moe_a2a.EPGroup, contenders: list[Contender], inputs: Inputs
    ) -> CopiedBytes:
        """The path in bytes: N rows out of dispatch, T out of combine, nothing in what's in the window."""
        found = self.CopiedBytes()
        row = size.H * ITEM_BYTES
        received, routed_tokens = len(inputs.expected_x), int((inputs.topk_idx >= 0).any(1).sum())
        for contender in contenders:
            before = dict(group.stats()["copied_bytes"])
            self.one_sample(contender, inputs, None)
            contender.release()
            now = group.stats()["copied_bytes"]
            copied = {key: int(now[key] - before[key]) for key in now}
            found.copied[contender.name] = copied
            limit_in = 0 if contender.name == "ours-window" else 1
            bounds = {
                "dispatch_in": (0, limit_in * size.T * row),
                "dispatch_out": (received * row, received * row),
                "combine_in": (0, limit_in * received * row),
                "combine_out": (routed_tokens * row, size.T * row),
            }
            for key, (least, most) in bounds.items():
                if not least <= copied[key] <= most:
                    found.failures.append(
                        f"{size}: {contender.name} on rank {self.rank} copied {copied[key]} bytes as {key}, "
                        f"expected {least} to {most}"
                    )
        return found

    def one_sample(self, contender: Contender, inputs: Inputs, into: Samples | None) -> None:
        clock = time.perf_counter_ns
        late = self.plan.delay_ms / 1e3 if self.rank == 1 else 0.0
        contender.prepare(inputs)
        if late:
            time.sleep(late)
        spread = self.start_line.wait()
        t0 = clock()
        contender.dispatch()
        t1 = clock()
        contender.experts()
        if late:
            time.sleep(late)
        self.start_line.wait()
        t2 = clock()
        contender.combine()
        t3 = clock()
        if into is not None:
            into.dispatch.append(t1 - t0)
            into.combine.append(t3 - t2)
            into.dispatch_start.append(t0)
            into.combine_start.append(t2)
            into.arrival_spread.append(spread)

    def sample(
        self, size: Size, contenders: list[Contender], sets: list[Inputs]
    ) -> tuple[dict[str, Samples], list[str], dict[str, Any]]:
        samples = {c.name: Samples() for c in contenders}
        failures: list[str] = []
        turn = 0

        def visit(contender: Contender, timed: bool, check: bool) -> None:
            nonlocal turn
            inputs = sets[turn % len(sets)]
            turn += 1
            into = samples[contender.name]
            self.one_sample(contender, inputs, into if timed else None)
            if check:
                into.checked += 1
                # One sentence per contender and rank is enough to fail the run.
                if not any(f" {contender.name} on" in text for text in failures):
                    failures.extend(
                        f"{size}: {contender.name} on rank {self.rank}: {text}" for text in contender.check()
                    )
            contender.release()

        for _ in range(2):
            for contender in contenders:
                visit(contender, timed=False, check=True)
        # In blocks, the first sample of a block isn't counted: it would measure the previous contender's
        # cache leftovers.
        block = 5 if size.megabytes < SMALL_MB and not self.plan.delay_ms else 1
        began = time.perf_counter()
        for contender in contenders:
            for _ in range(block + (block > 1)):
                visit(contender, timed=False, check=False)
        per_round = time.perf_counter() - began
        rounds = self.gather(max(8, min(400, math.ceil(self.plan.seconds / per_round))))[0]

        busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
        order = list(contenders)
        shuffler = random.Random(
            self.plan.seed
        )  # the same on all ranks: every contender is a collective call
        gc.collect()
        gc.disable()
        try:
            for number in range(rounds):
                shuffler.shuffle(order)
                for contender in order:
                    if block > 1:
                        visit(contender, timed=False, check=self.plan.check_all)
                    for _ in range(block):
                        visit(contender, timed=True, check=self.plan.check_all)
                self.tell("progress", done=(number + 1) / rounds)
        finally:
            gc.enable()
        busy, own, wall = busy_seconds() - busy, time.process_time() - own, time.perf_counter() - began
        others = max(0.0, busy - sum(self.gather(own))) / wall
        for contender in contenders:
            visit(contender, timed=False, check=True)
        how = {"rounds": rounds, "block": block, "cores_used_by_others": round(others, 2)}
        return samples, failures, how

    def summary(
        self, size: Size, contenders: list[Contender], sets: list[Inputs], samples: dict[str, Samples]
    ) -> dict[str, Any]:
        # The mean over the sets that take turns, of the rank that sends most.
        routed = [sum(s.routed_bytes for s in sets) / len(sets)]
        routed_bytes = [part[0] for part in self.gather(routed)]
        moved = max(routed_bytes)
        rows: dict[str, Any] = {}
        for contender in contenders:
            parts = self.gather(samples[contender.name])
            dispatch = np.array([p.dispatch for p in parts]) / 1e3
            combine = np.array([p.combine for p in parts]) / 1e3
            starts = np.array([p.dispatch_start for p in parts] + [p.combine_start for p in parts]).reshape(
                2, len(parts), -1
            )
            times = {
                "dispatch": dispatch.max(0),
                "combine": combine.max(0),
                "total": (dispatch + combine).max(0),
            }
            row: dict[str, Any] = {f"{key}_us": spread_of(values) for key, values in times.items()}
            row["start_skew_us"] = spread_of((starts.max(1) - starts.min(1)).max(0) / 1e3)
            row["arrival_spread_us"] = spread_of(np.array(parts[0].arrival_spread) / 1e3)
            for key in ("dispatch", "combine"):
                row[f"{key}_GBps"] = bandwidth(moved, row[f"{key}_us"]["median"])
            row["samples"] = len(parts[0].dispatch)
            row["checked"] = sum(p.checked for p in parts)
            rows[contender.name] = row
        return {
            **size._asdict(),
            "routed_bytes_per_rank": routed_bytes,
            "mb_per_rank": moved / 1e6,
            "contenders": rows,
            **compare(rows),
        }


def busy_seconds() -> float:
    """CPU time that all processes of the host have used so far, with what the hypervisor took away."""
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def spread_of(values: Any) -> dict[str, float]:
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "p99": float(np.percentile(values, 99)),
        "max": float(np.max(values)),
    }


def bandwidth(num_bytes: float, microseconds: float) -> float | None:
    """GB/s; None where nothing was moved, since a rate of nothing isn't zero or infinite."""
    return num_bytes / microseconds / 1e3 if num_bytes > 0 and microseconds > 0 else None


def compare(rows: dict[str, Any]) -> dict[str, Any]:
    """The better variant of each peer, and how many times its median total is ours."""

    def total(name: str) -> float:
        return float(rows[name]["total_us"]["median"])

    families = {
        "gloo": [name for name in rows if name.startswith("gloo-")],
        "mpi": [name for name in rows if name in ("mpi-pair", "mpi-packed")],
        "bare_mpi": [name for name in rows if name.startswith("mpi-bare")],
    }
    best = {family: min(names, key=total) if names else None for family, names in families.items()}
    ratios = {
        own: {family: total(name) / total(own) if name else None for family, name in best.items()}
        for own in ("ours", "ours-window")
    }
    return {"best": best, "ratios": ratios}


def run_rank(plan_path: Path) -> None:
    """Entry of a rank's process."""
    plan = Plan.load(plan_path)
    comm: Any = None
    if plan.mpi:
        import mpi4py

        # Only this thread calls MPI, which lets MPI leave its locks out.
        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rank, world_size = comm.Get_rank(), comm.Get_size()
    else:
        rank, world_size = int(os.environ["RANK"]), plan.ranks
    try:
        allowed = os.sched_getaffinity(0)
        if allowed != set(plan.cores):
            raise RuntimeError(
                f"benchmark: rank {rank} may run on cores {sorted(allowed)}, expected {plan.cores}: the "
                "launcher has bound it; bound ranks share a core with their own communication thread"
            )
        with torch.inference_mode():
            Rank(plan, rank, world_size, comm).run()
        torch.distributed.destroy_process_group()
    except BaseException as error:
        print(f"benchmark: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if comm is not None:
            comm.Abort(1)  # the others may wait for this rank inside MPI, where no timeout reaches them
        raise


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
