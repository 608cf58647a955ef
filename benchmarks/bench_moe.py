"""A whole MoE layer: fused against unfused, a gloo layer and, on one rank, no library at all; in one interleaved run.

    python benchmarks/bench_moe.py                        # table and results/moe.json
    python benchmarks/bench_moe.py --short                # small sizes, and it fails if fused is slower than unfused
    python benchmarks/bench_moe.py --trace train_out/traces.npz   # the routing of a training run as well

Forward without gradients, and forward + backward. Starts its own ranks on this host: two, then one. A call's time
is that of its slowest rank; given are medians over the rounds, and ratios of them. Every contender's results and gradients are
compared with those of the fused call first.

* fused: ``moe_a2a.moe``
* unfused: ``moe_a2a.dispatch``, two ``F.grouped_mm`` with a SwiGLU between them, ``moe_a2a.combine``
* gloo: the same experts between two differentiable all-to-alls of torch.distributed, rows sorted before and after
* plain (one rank): sort, the same experts, ``index_add``: no library
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from bench_dispatch_combine import git_state
from bench_plan import StartLine
from einops import rearrange
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import moe_a2a

HERE = Path(__file__).resolve().parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(NamedTuple):
    """One row of the table."""

    T: int
    H: int
    I: int  # noqa: E741  inner
    E: int
    K: int
    dtype: str = "float32"
    routing: str = "uniform"

    def __str__(self) -> str:
        return ", ".join(map(str, self))


LAYERS = [
    Layer(1, 2048, 768, 8, 2),
    Layer(1, 2048, 768, 64, 8),
    Layer(16, 1024, 512, 32, 4),
    Layer(128, 2048, 768, 8, 2),
    Layer(128, 2048, 768, 8, 2, "bfloat16"),
    Layer(1024, 1024, 512, 32, 4),
]
SHORT = [Layer(1, 1024, 512, 8, 2), Layer(128, 512, 256, 8, 2)]


class Inputs(NamedTuple):
    """Of one rank. up [E_local, 2 I, H], down [E_local, H, I]."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor


def experts_of(rows: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """SwiGLU experts on rows in the experts' order; ``ends`` [E_local] int32."""
    gate, value = F.grouped_mm(rows, up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * value, down.transpose(-2, -1), offs=ends)


def fused(group: moe_a2a.EPGroup, i: Inputs) -> Tensor:
    return moe_a2a.moe(i.x, i.idx, i.weights, i.up, i.down, group)


def unfused(group: moe_a2a.EPGroup, i: Inputs) -> Tensor:
    d = moe_a2a.dispatch(i.x, i.idx, group)
    return moe_a2a.combine(experts_of(d.x, i.up, i.down, d.offsets[1:]), d, i.weights)


def plain(group: moe_a2a.EPGroup, i: Inputs) -> Tensor:
    chosen = rearrange(i.idx, "t k -> (t k)")
    order = chosen.argsort(stable=True)
    ends = torch.bincount(chosen, minlength=group.num_experts).cumsum(0).int()
    tokens = order // i.idx.shape[1]
    y = experts_of(i.x[tokens], i.up, i.down, ends)
    weights = rearrange(i.weights, "t k -> (t k)")[order, None].to(y.dtype)
    return torch.zeros_like(i.x).index_add(0, tokens, y * weights)


def gloo(group: moe_a2a.EPGroup, i: Inputs) -> Tensor:
    chosen = rearrange(i.idx, "t k -> (t k)")
    order = chosen.argsort(stable=True)
    counts_E = torch.bincount(chosen, minlength=group.num_experts)
    bounds = [group.expert_range(rank) for rank in range(group.world_size)]
    send = [int(counts_E[b.start : b.stop].sum()) for b in bounds]
    mine = group.local_experts
    counts_RE = torch.empty(group.world_size, group.num_experts, dtype=torch.int64)
    dist.all_gather(list(counts_RE), counts_E)
    local_RE = counts_RE[:, mine.start : mine.stop]
    receive = local_RE.sum(1).tolist()
    world = dist.group.WORLD
    assert world is not None
    rows = collectives.all_to_all_single_autograd(i.x[order // i.idx.shape[1]], receive, send, group=world)
    expert_of = torch.arange(len(mine)).repeat(group.world_size).repeat_interleave(local_RE.reshape(-1))
    places = expert_of.argsort(stable=True)
    y = experts_of(rows[places], i.up, i.down, local_RE.sum(0).cumsum(0).int())
    back = collectives.all_to_all_single_autograd(
        torch.empty_like(y).index_copy(0, places, y), send, receive, group=world
    )
    weighted = back * rearrange(i.weights, "t k -> (t k)")[order, None].to(back.dtype)
    return torch.zeros_like(i.x).index_add(0, order // i.idx.shape[1], weighted)


Contender = Callable[[moe_a2a.EPGroup, Inputs], Tensor]
PARALLEL: dict[str, Contender] = {"fused": fused, "unfused": unfused, "gloo": gloo}
ALONE: dict[str, Contender] = {"fused": fused, "unfused": unfused, "plain": plain}


def make_inputs(layer: Layer, rank: int, local: int, traces: dict[str, np.ndarray]) -> Inputs:
    generator = torch.Generator().manual_seed(rank)
    dtype = DTYPES[layer.dtype]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    if layer.routing == "uniform":
        idx = torch.rand(layer.T, layer.E, generator=generator).topk(layer.K).indices
    else:
        # [calls, tokens, K]: consecutive tokens of a training run, from another place for each rank.
        trace = traces[layer.routing]
        flat = torch.from_numpy(trace.reshape(-1, trace.shape[-1]).astype(np.int64))
        idx = flat.roll(-rank * layer.T, 0)[: layer.T]
    return Inputs(
        normal(layer.T, layer.H),
        idx,
        torch.rand(layer.T, layer.K, generator=generator),
        normal(local, 2 * layer.I, layer.H, scale=layer.H**-0.5),
        normal(local, layer.H, layer.I, scale=layer.I**-0.5),
    )


def train(contender: Contender, group: moe_a2a.EPGroup, inputs: Inputs) -> tuple[Tensor, ...]:
    """One step's forward and backward; the gradients of x, weights, up, down."""
    leaves = [inputs.x, inputs.weights, inputs.up, inputs.down]
    out = contender(group, inputs)
    return torch.autograd.grad(out, leaves, torch.ones_like(out))


def infer(contender: Contender, group: moe_a2a.EPGroup, inputs: Inputs) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (contender(group, inputs),)


MODES = {"forward": infer, "training": train}


def measure(
    rank: int,
    world_size: int,
    scratch: Path,
    layers: list[Layer],
    seconds: float,
    traces: dict[str, np.ndarray],
    fault: str,
) -> None:
    """One rank; rank 0 writes what all of them took."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    store = f"file://{scratch / f'store{world_size}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    line = StartLine(scratch / f"start{world_size}", rank, world_size, len(os.sched_getaffinity(0)))
    contenders = PARALLEL if world_size > 1 else ALONE
    found: dict[str, Any] = {}
    for layer in layers:
        group = moe_a2a.EPGroup(
            num_experts=layer.E,
            top_k=layer.K,
            max_tokens=layer.T,
            hidden_size=layer.H,
            dtype=DTYPES[layer.dtype],
            max_recv_rows=world_size * layer.T * layer.K,
        )
        inputs = make_inputs(layer, rank, group.num_local_experts, traces)
        found[str(layer)] = {}
        for mode, run in MODES.items():
            if mode == "training":
                inputs = inputs._replace(
                    **{
                        name: getattr(inputs, name).requires_grad_()
                        for name in ("x", "weights", "up", "down")
                    }
                )
            first = run(fused, group, inputs)
            for name, contender in contenders.items():
                for got, expected in zip(run(contender, group, inputs), first, strict=True):
                    if name == fault:
                        got = got * 1.5
                    within = 2e-5 if layer.dtype == "float32" else 0.05
                    scale = max(float(expected.abs().max()), 1e-30)
                    error = float((got - expected).abs().max()) / scale
                    assert error <= within, f"{name}, {mode}, {layer}: differs by {error:.2g} of the largest"
            assert group.transport.name == "cpu-shm"
            times: dict[str, list[int]] = {name: [] for name in contenders}
            order = list(contenders)
            shuffle = random.Random(1)
            start_all = time.perf_counter()
            while True:
                shuffle.shuffle(order)
                for name in order:
                    line.wait()
                    start = time.perf_counter_ns()
                    run(contenders[name], group, inputs)
                    times[name].append(time.perf_counter_ns() - start)
                enough = torch.tensor(
                    [time.perf_counter() - start_all > seconds or len(times["fused"]) >= 2000]
                )
                if world_size > 1:
                    dist.broadcast(enough, 0)
                if enough and len(times["fused"]) >= 5:
                    break
            everyone: list[Any] = [times]
            if world_size > 1:
                everyone = [None] * world_size
                dist.all_gather_object(everyone, times)
            slowest = {
                name: [max(call) for call in zip(*(e[name] for e in everyone), strict=True)] for name in times
            }
            found[str(layer)][mode] = {
                name: {
                    "median_us": statistics.median(calls[1:]) / 1e3,
                    "min_us": min(calls) / 1e3,
                    "calls": len(calls) - 1,
                }
                for name, calls in slowest.items()
            }
        group.close()
    if rank == 0:
        (scratch / f"found{world_size}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def show(found: dict[str, Any], ranks: int) -> None:
    names = list(PARALLEL if ranks > 1 else ALONE)
    table = Table(
        title=f"MoE layer, {ranks} rank{'s' if ranks > 1 else ''}: fused, median us (min); the others as multiples"
    )
    table.add_column("T, H, I, E, K, dtype, routing", no_wrap=True)
    for mode in MODES:
        table.add_column(mode, justify="right", no_wrap=True)
        for name in names[1:]:
            table.add_column(name, justify="right", no_wrap=True)
    for layer, row in found.items():
        cells = []
        for mode in MODES:
            best = row[mode]["fused"]
            cells.append(f"{best['median_us']:,.0f} ({best['min_us']:,.0f})")
            cells += [f"{row[mode][name]['median_us'] / best['median_us']:.2f}" for name in names[1:]]
        table.add_row(layer, *cells)
    Console(width=150).print(table)


def layer_of(text: str) -> Layer:
    parts = text.split(",")
    if len(parts) not in (5, 6) or not all(map(str.isdigit, parts[:5])) or not set(parts[5:]) <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a layer: expected T,H,I,E,K or T,H,I,E,K,dtype")
    tokens, hidden, inner, experts, top_k = map(int, parts[:5])
    return Layer(tokens, hidden, inner, experts, top_k, *parts[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of sampling for each size and mode")
    parser.add_argument(
        "--short", action="store_true", help="two small layers; fails if fused is slower by a fifth"
    )
    parser.add_argument("--layers", nargs="+", type=layer_of, metavar="T,H,I,E,K[,dtype]")
    parser.add_argument(
        "--inject-fault", default="", help=argparse.SUPPRESS
    )  # this contender's results are wrong
    parser.add_argument(
        "--trace", type=Path, nargs="*", default=[], help=".npz files with topk ids [..., tokens, K]"
    )
    parser.add_argument("--json", type=Path, default=HERE / "results" / "moe.json")
    arguments = parser.parse_args()
    layers, seconds = (SHORT, 1.5) if arguments.short else (list(LAYERS), arguments.seconds)
    layers = arguments.layers or layers
    traces = {}
    for path in arguments.trace:
        with np.load(path) as arrays:
            traces[path.stem] = arrays[arrays.files[0]]
        experts = int(traces[path.stem].max()) + 1
        layers.append(Layer(128, 1024, 512, experts, traces[path.stem].shape[-1], routing=path.stem))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for ranks in (2, 1):
            StartLine.create(scratch / f"start{ranks}", ranks)
            spawn(measure, (ranks, scratch, layers, seconds, traces, arguments.inject_fault), ranks)
            results[ranks] = json.loads((scratch / f"found{ranks}.json").read_text())
            show(results[ranks], ranks)
    if arguments.short:
        slow = [
            f"{ranks} ranks, {layer}, {mode}: {other} takes {ratio:.2f} of fused"
            for ranks, found in results.items()
            for layer, row in found.items()
            for mode in MODES
            for other in row[mode]
            if other != "gloo"
            # Twice over: by medians and by minima, with room for a noisy host.
            and (ratio := max(row[mode][other][k] / row[mode]["fused"][k] for k in ("median_us", "min_us")))
            < 0.8
        ]
        if slow:
            sys.exit("benchmark: fused is slower\n" + "\n".join(slow))
        return
    settings = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_state()["commit"],
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "seconds": seconds,
        "results": results,
    }
    arguments.json.write_text(json.dumps(settings, indent=1) + "\n")
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
