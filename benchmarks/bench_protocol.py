"""The same dispatch + combine by every protocol, format and quantisation, in one interleaved run.

    python benchmarks/bench_protocol.py                 # seven sizes, two ranks; table and results/protocols.json
    python benchmarks/bench_protocol.py --sizes 1,2048,8,2 --rounds 50

It is where ``op_host/tiling.py`` takes from which way a call goes with ``protocol="auto"``. Starts its own ranks on this host.
A call's time is that of its slowest rank; given are medians over the rounds, as multiples of pull in compact. Every contender's
result is compared once, bit by bit, with that of pull (quantised rows: with what the rows dequantise to).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_dispatch_combine import git_state
from bench_plan import Size, StartLine
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

import moe_a2a

HERE = Path(__file__).resolve().parent
SIZES = [
    Size(1, 2048, 8, 2),
    Size(16, 2048, 64, 8),
    Size(128, 2048, 8, 2),
    Size(32, 7168, 64, 8),
    Size(128, 7168, 64, 8),
    Size(1024, 2048, 64, 8),
    Size(2048, 4096, 8, 2),
]
NEVER = 2**62
# name -> (arguments of EPGroup, of dispatch)
CONTENDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pull": ({}, {}),
    "push dispatch": ({"protocol": "push", "_tiling": {"combine_push_from": NEVER}}, {}),
    "push combine": ({"protocol": "push", "_tiling": {"dispatch_push_from": NEVER}}, {}),
    "portable": ({"record_format": "portable"}, {}),
    "line": ({"record_format": "line"}, {}),
    "line, push": ({"record_format": "line", "protocol": "push"}, {}),
    "int8": ({}, {"quantize": "int8"}),
    "fp8_e4m3": ({}, {"quantize": "fp8_e4m3"}),
}


def rows_of(d: moe_a2a.Dispatched) -> torch.Tensor:
    """What the experts see, as float32."""
    return d.x.float() if d.scales is None else moe_a2a.dequantize_rows(d.x, d.scales)


def measure(rank: int, world_size: int, scratch: Path, sizes: list[Size], rounds: int) -> None:
    """One rank; rank 0 writes what all of them took."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch / 'store'}", rank=rank, world_size=world_size
    )
    line = StartLine(scratch / "start", rank, world_size, len(os.sched_getaffinity(0)))
    found: dict[str, Any] = {}
    for size in sizes:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(size.T, size.H, generator=generator).bfloat16()
        idx = torch.rand(size.T, size.E, generator=generator).topk(size.K).indices
        weights = torch.rand(size.T, size.K, generator=generator)
        groups = {
            name: moe_a2a.EPGroup(
                num_experts=size.E,
                top_k=size.K,
                max_tokens=size.T,
                hidden_size=size.H,
                max_recv_rows=world_size * size.T * size.K,
                **arguments,
            )
            for name, (arguments, _) in CONTENDERS.items()
        }
        ys: dict[str, torch.Tensor] = {}
        first: tuple[torch.Tensor, torch.Tensor] | None = None
        for name, group in groups.items():
            d = moe_a2a.dispatch(x, idx, group, **CONTENDERS[name][1])
            rows = rows_of(d)
            ys[name] = rows.bfloat16()
            out = moe_a2a.combine(rows.bfloat16(), d, weights)
            if first is None:
                first = (rows, out)
            elif d.scales is None:
                assert torch.equal(rows, first[0]) and torch.equal(out, first[1]), f"{name}: wrong at {size}"
            else:
                assert ((rows - first[0]).abs() <= 0.08 * first[0].abs().amax()).all(), f"{name}: {size}"
            pushes = group.stats()["pushes"]
            expected = {"push dispatch": 1, "push combine": 1, "line, push": 2}.get(name, 0)
            assert pushes == expected, f"{name}: {pushes} pushes"
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        order = list(groups)
        shuffle = random.Random(1)
        for turn in range(rounds + 3):
            shuffle.shuffle(order)
            for name in order:
                line.wait()
                start = time.perf_counter_ns()
                d = moe_a2a.dispatch(x, idx, groups[name], **CONTENDERS[name][1])
                middle = time.perf_counter_ns()
                line.wait()
                second = time.perf_counter_ns()
                moe_a2a.combine(ys[name], d, weights)
                if turn >= 3:
                    times[name].append((middle - start, time.perf_counter_ns() - second))
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, times)
        if rank == 0:
            found[", ".join(map(str, size))] = {
                name: {
                    part: statistics.median(
                        max(each[name][i][which] for each in everyone) for i in range(rounds)
                    )
                    / 1e3
                    for which, part in enumerate(("dispatch_us", "combine_us"))
                }
                for name in groups
            }
        for group in groups.values():
            group.close()
    if rank == 0:
        (scratch / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", nargs="*", help="T,H,E,K ...")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "protocols.json")
    arguments = parser.parse_args()
    sizes = SIZES
    if arguments.sizes:
        sizes = [Size(*map(int, text.split(","))) for text in arguments.sizes]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        StartLine.create(scratch / "start", arguments.ranks)
        spawn(measure, (arguments.ranks, scratch, sizes, arguments.rounds), arguments.ranks)
        found = json.loads((scratch / "found.json").read_text())
    console = Console(width=140)
    for part in ("dispatch_us", "combine_us"):
        table = Table(title=f"{part.split('_')[0]}: pull in us, the others as multiples of it")
        table.add_column("T, H, E, K")
        for name in CONTENDERS:
            table.add_column(name, justify="right")
        for size, row in found.items():
            base = row["pull"][part]
            table.add_row(
                size, *(f"{base:,.0f}" if n == "pull" else f"{row[n][part] / base:.2f}" for n in CONTENDERS)
            )
        console.print(table)
    arguments.json.write_text(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"),
                "commit": git_state()["commit"],
                "ranks": arguments.ranks,
                "rounds": arguments.rounds,
                "cores": len(os.sched_getaffinity(0)),
                "machine": platform.machine(),
                "torch": torch.__version__,
                "median_us": found,
            },
            indent=1,
        )
        + "\n"
    )
    console.print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
