"""Models of transformers, their experts spread over two ranks: ``ep_implementation="moe_a2a"`` against its own "all_to_all".

    python benchmarks/bench_transformers.py            # table and results/transformers.json; transformers 5.23 or newer
    python benchmarks/bench_transformers.py --short    # one tiny model, seconds

Both load the same checkpoint with ``DistributedConfig(fsdp_size=2, ep_size=2)`` in the same processes, and take turns in an
order that is shuffled in every round: forward without gradients, and forward + backward. A call's time is that of its slowest
rank; given are medians over the rounds, and ratios of them. *In the experts* is what forward spends in the experts modules,
which is all that the two do differently. Logits and gradients of both are compared first.
Shape symbols: T tokens of a rank, H hidden, I inner, E experts, K top-k, L layers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_dispatch_combine import git_state
from bench_plan import StartLine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).resolve().parent
RANKS = 2
OURS, THEIRS = "moe_a2a", "all_to_all"


class Model(NamedTuple):
    """A Qwen3-MoE, as small as its name allows beside its experts."""

    H: int
    I: int  # noqa: E741  inner
    E: int
    K: int
    L: int

    def config(self) -> Any:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=self.H,
            moe_intermediate_size=self.I,
            num_experts=self.E,
            num_experts_per_tok=self.K,
            num_hidden_layers=self.L,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=self.H // 4,
            max_position_embeddings=2048,
        )

    def __str__(self) -> str:
        return ", ".join(map(str, self))


FULL = {Model(512, 1024, 8, 2, 4): (1, 16, 128, 512), Model(1024, 256, 64, 8, 2): (1, 16, 128, 512)}
SHORT = {Model(64, 64, 8, 2, 2): (1, 16)}


class Watch:
    """Nanoseconds in the experts modules of a model since the last reading."""

    def __init__(self, model: nn.Module) -> None:
        self.spent = self.begun = 0
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self.begun = time.perf_counter_ns()

    def _end(self, *_: Any) -> None:
        self.spent += time.perf_counter_ns() - self.begun

    def read(self) -> int:
        spent, self.spent = self.spent, 0
        return spent


class Contender:
    """A checkpoint, loaded with one implementation of expert parallelism."""

    def __init__(self, folder: Path, implementation: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        import moe_a2a.integrations.transformers  # noqa: F401  (registers)

        config = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS, ep_implementation=implementation)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        self.watch = Watch(self.model)

    def forward(self, ids: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [self.model(ids, use_cache=False).logits]

    def training(self, ids: Tensor) -> list[Tensor]:
        self.model.zero_grad(set_to_none=True)
        self.model(ids, labels=ids, use_cache=False).loss.backward()
        return [value.grad.to_local() for value in self.model.parameters()]


MODES = ("forward", "training")


def compare(mode: str, got: list[Tensor], expected: list[Tensor], what: str) -> None:
    for mine, its in zip(got, expected, strict=True):
        error = float((mine - its).norm()) / max(float(its.norm()), 1e-30)
        if not error <= 1e-4:
            raise AssertionError(f"benchmark: {what}, {mode}: {OURS} differs from {THEIRS} by {error:.2g}")


def measure(
    rank: int, scratch: Path, models: dict[Model, tuple[int, ...]], seconds: float, fault: bool
) -> None:
    """One rank; rank 0 writes what both took."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // RANKS))
    # What transformers takes its device mesh's ranks from.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{scratch / 'store'}", rank=rank, world_size=RANKS)
    line = StartLine(scratch / "start", rank, RANKS, cores)
    found: dict[str, Any] = {}
    for number, (model, sizes) in enumerate(models.items()):
        folder = scratch / str(number)
        if rank == 0:
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(model.config()).save_pretrained(folder)
        dist.barrier()
        contenders = {name: Contender(folder, name) for name in (OURS, THEIRS)}
        for tokens in sizes:
            ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(rank))
            row: dict[str, Any] = {}
            for mode in MODES:
                # A training step of one token has no loss; its forward is what decoding does.
                if mode == "training" and tokens == 1:
                    continue
                results = {name: getattr(one, mode)(ids) for name, one in contenders.items()}
                if fault:
                    results[OURS][0] = results[OURS][0] * 1.01
                compare(mode, results[OURS], results[THEIRS], f"{model}, T={tokens}")
                row[mode] = sample(mode, contenders, ids, line, seconds)
            found[f"{tokens}, {model}"] = row
        layer = contenders[OURS].model.model.layers[0].mlp.experts._moe_a2a
        if layer.recipe.why or layer.windows.group.transport.name != "cpu-shm":
            raise RuntimeError(f"benchmark: not the path that is to be measured: {layer.describe()}")
    if rank == 0:
        (scratch / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def sample(
    mode: str, contenders: dict[str, Contender], ids: Tensor, line: StartLine, seconds: float
) -> dict[str, dict[str, float]]:
    """Of each contender the median and least time of a call, and the median of what it spent in the experts."""
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in contenders}
    order = list(contenders)
    shuffle = random.Random(1)
    began = time.perf_counter()
    while True:
        shuffle.shuffle(order)
        for name in order:
            contenders[name].watch.read()
            line.wait()
            start = time.perf_counter_ns()
            getattr(contenders[name], mode)(ids)
            times[name].append((time.perf_counter_ns() - start, contenders[name].watch.read()))
        enough = torch.tensor([time.perf_counter() - began > seconds or len(times[OURS]) >= 2000])
        dist.broadcast(enough, 0)
        if enough and len(times[OURS]) >= 6:
            break
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, times)
    found = {}
    for name in contenders:
        # Not the first round: pages of outputs are touched for the first time there.
        calls, inside = zip(
            *(
                map(max, zip(*ranks, strict=True))
                for ranks in zip(*(e[name][1:] for e in everyone), strict=True)
            ),
            strict=True,
        )
        found[name] = {
            "median_us": statistics.median(calls) / 1e3,
            "min_us": min(calls) / 1e3,
            "experts_median_us": statistics.median(inside) / 1e3,
            "calls": len(calls),
        }
    return found


def show(found: dict[str, Any]) -> None:
    table = Table(title=f"{RANKS} ranks, transformers: {OURS}, median us; {THEIRS} as a multiple of it")
    table.add_column("T, H, I, E, K, L", no_wrap=True)
    for column in ("forward", THEIRS, "in the experts", THEIRS, "training step", THEIRS):
        table.add_column(column, justify="right", no_wrap=True)
    for size, row in found.items():
        cells = []
        for mode, key in (
            ("forward", "median_us"),
            ("forward", "experts_median_us"),
            ("training", "median_us"),
        ):
            if mode in row:
                ours, theirs = (row[mode][name][key] for name in (OURS, THEIRS))
                cells += [f"{ours:,.0f}", f"{theirs / ours:.2f}"]
            else:
                cells += ["", ""]
        table.add_row(size, *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of sampling for each size and mode")
    parser.add_argument("--short", action="store_true", help="one tiny model, half a second each")
    parser.add_argument("--inject-fault", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "transformers.json")
    arguments = parser.parse_args()
    models, seconds = (SHORT, 0.5) if arguments.short else (FULL, arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        StartLine.create(scratch / "start", RANKS)
        try:
            spawn(measure, (scratch, models, seconds, arguments.inject_fault), RANKS)
        except Exception as error:
            sys.exit(f"benchmark: failed\n{error}")
        found = json.loads((scratch / "found.json").read_text())
    show(found)
    settings = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_state()["commit"],
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "seconds": seconds,
        "results": found,
    }
    arguments.json.write_text(json.dumps(settings, indent=1) + "\n")
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
