"""One GPU, one command: are the Triton kernels right there, and how fast are they?

    python benchmarks/device_check.py [--out FILE.json]

1. Four virtual ranks, their windows on one device: dispatch and combine phase by phase, bitwise against the oracle, and the
   fused call, all ranks in one launch whose programs wait for each other, within rounding of the oracle.
2. Times of these against torch doing the same on one device without any protocol (permute + copy, and for the layer a grouped
   product), and against the device's copy bandwidth.
3. Two processes that share the device's memory, through ``moe_a2a.dispatch``, ``combine`` and ``moe``.

Takes less than six minutes; what has no time left is a failure. Exit code 0: everything is right; 1: something isn't, or
didn't run; 3: there is no GPU. ``--interpret`` runs all of it at tiny sizes by Triton's interpreter on a CPU: it tests this
script and the kernels' logic, and prints no times. Shape symbols: T tokens of a rank, H hidden, I intermediate, E experts,
K top-k, R ranks.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIMIT = 330.0  # seconds after which no further part is begun
HARD_LIMIT = 355.0  # then the process ends: a kernel hangs, say
NO_DEVICE = 3

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

DEVICE = torch.device("cpu" if "--interpret" in sys.argv or not torch.cuda.is_available() else "cuda")


class Wrong(AssertionError):
    """A result isn't what the oracle says."""


def same(what: str, got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Raises Wrong unless they are bitwise the same; names the first rank and row that differ."""
    for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
        a, b = a.cpu(), b.cpu()
        if a.shape != b.shape:
            raise Wrong(f"{what}: rank {rank} has {tuple(a.shape)}, expected {tuple(b.shape)}")
        rows = (a != b).flatten(1).any(1) if a.numel() else torch.zeros(0)
        if rows.any():
            raise Wrong(
                f"{what}: rank {rank}: {int(rows.sum())} of {len(a)} rows differ, first {int(rows.nonzero()[0])}"
            )


def near(what: str, got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Raises Wrong unless every element is within 2^-6 of its row's largest; returns the largest such part."""
    worst = 0.0
    for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
        if not len(a):
            continue
        a, b = a.double().cpu(), b.double().cpu()
        part = (a - b).abs().amax(1) / b.abs().amax(1).clamp(min=1e-3)
        if not bool((part <= 2**-6).all()):  # NaN isn't near anything
            token = int((~(part <= 2**-6)).nonzero()[0])
            raise Wrong(
                f"{what}: rank {rank}, token {token}: off by {float(part[token]):.3g} of its row's largest"
            )
        worst = max(worst, float(part.max()))
    return worst


def expert_of(inputs: Any) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """SwiGLU as the oracle wants it: rows on the CPU, the products where the weights are."""

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        weights = inputs.gate_up[number]
        gate, up = (rows.to(weights.device) @ weights.T).chunk(2, -1)
        y: torch.Tensor = (torch.nn.functional.silu(gate) * up) @ inputs.down[number].T
        return y.cpu()

    return expert


# ----------------------------------------------------------------------------------------------------- 1. virtual ranks


def check_virtual_ranks(report: dict[str, Any], interpret: bool, fault: str) -> None:
    """Dispatch, combine and the fused call of four virtual ranks, uneven and with dropped pairs, against the oracle."""
    from device_ranks import Size, VirtualRanks, make_inputs

    from moe_a2a import reference

    size = Size(4, 2, 16, 16, 4, 2) if interpret else Size(4, 96, 1000, 200, 30, 4)
    report["checked"] = str(size)
    for seed in range(1 if interpret else 8):
        inputs = make_inputs(size, DEVICE, torch.bfloat16, seed, dropped=True)
        ranks = VirtualRanks(size, inputs, DEVICE)
        xs, ids = [x.cpu() for x in inputs.xs], [i.cpu() for i in inputs.ids]
        weights = [w.cpu() for w in inputs.weights]
        expected = [r.x_NH for r in reference.dispatch_reference(xs, ids, size.experts)]
        for _ in range(2 if interpret else 5):  # slots are used again
            rows = ranks.dispatch()
            if fault == "wrong-row" and len(rows[1]):
                rows[1][0] += 1
            same("dispatch", rows, expected)
            ys = [row * 2 for row in rows]
            sums = reference.combine_reference([y.cpu() for y in ys], ids, size.experts, weights)
            same("combine", ranks.combine(ys), sums)
        layer = reference.moe_reference(xs, ids, weights, expert_of(inputs), size.experts)
        fused = ranks.fused()
        for _ in range(1 if interpret else 5):
            outs, launches = fused.run()
            report["fused_off_by"] = max(report.get("fused_off_by", 0.0), near("fused", outs, layer))
            report["fused_launches"] = max(report.get("fused_launches", 0), launches)
        report["kernel_launches"] = dict(ranks.launches)


# -------------------------------------------------------------------------------------------------------------- 2. times


def copy_bandwidth() -> float:
    """Bytes per second of a copy inside the device's memory, each byte counted once."""
    from device_ranks import seconds

    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = seconds(DEVICE, lambda: target.copy_(source), lambda: None, 10)
    return source.numel() / statistics.median(times)


def measure(report: dict[str, Any], interpret: bool, repeats: int) -> None:
    """Times of dispatch, combine and the fused call, ours and torch's; one dictionary for each size and operation."""
    from device_ranks import Size

    if interpret:
        measure_size(Size(4, 2, 16, 16, 4, 2), 1.0, 1)
        return
    report["copy_bytes_per_s"] = bandwidth = copy_bandwidth()
    report["times"] = []
    for tokens in (1, 32, 128, 1024):
        found = measure_size(Size(4, tokens, 7168, 2048, 32, 8), bandwidth, repeats)
        report["times"] += found
        for line in found:
            print(
                f"{line['size']:42}{line['operation']:9}{line['seconds'] * 1e6:10.1f} us, "
                f"torch {line['torch_seconds'] * 1e6:10.1f} us, {line['part_of_copy_bandwidth']:5.2f} of copy bandwidth",
                flush=True,
            )


def measure_size(size: Any, bandwidth: float, repeats: int) -> list[dict[str, Any]]:
    from device_ranks import VirtualRanks, make_inputs, seconds

    inputs = make_inputs(size, DEVICE, torch.bfloat16, 0, dropped=False)
    ranks = VirtualRanks(size, inputs, DEVICE)
    rows = ranks.dispatch()
    dispatch = ranks.steps.taken()
    sums = ranks.combine(rows)
    combine = ranks.steps.taken()
    fused = ranks.fused()
    outs, _ = fused.run()
    torch_side = TorchRanks(size, inputs, ranks)
    near("torch's combine", torch_side.combine(), sums)
    near("torch's layer", torch_side.layer(), outs)

    def begin() -> None:
        ranks.next_call()
        ranks.steps.renew(dispatch)
        ranks.steps.renew(combine)

    def after_dispatch() -> None:
        begin()
        ranks.steps.again(dispatch)

    moved = size.ranks * size.tokens * size.top_k * size.hidden * 2
    found = []
    for name, run, before, baseline in (
        ("dispatch", lambda: ranks.steps.again(dispatch), begin, torch_side.dispatch),
        ("combine", lambda: ranks.steps.again(combine), after_dispatch, torch_side.combine),
        ("fused", fused.launch, fused.renew, torch_side.layer),
    ):
        ours = statistics.median(seconds(DEVICE, run, before, repeats))
        theirs = statistics.median(seconds(DEVICE, baseline, lambda: None, repeats))
        found.append(
            {
                "size": str(size),
                "operation": name,
                "seconds": ours,
                "torch_seconds": theirs,
                "times_as_fast_as_torch": theirs / ours,
                "bytes": moved,
                "part_of_copy_bandwidth": moved / ours / bandwidth,
            }
        )
    # After the last replay everything must still be right: what was timed was the work.
    after_dispatch()
    ranks.steps.again(combine)
    same("combine, repeated", [step[2]["out"] for step in combine if "place" in step[2]], sums)
    return found


class TorchRanks:
    """The same data movement by torch on one device, with everything known beforehand and no protocol."""

    def __init__(self, size: Any, inputs: Any, ranks: Any) -> None:
        self._inputs, self._size = inputs, size
        self._tokens = [pairs.token_P for pairs in ranks.pairs]
        self._places = [pairs.place_TK.reshape(-1) for pairs in ranks.pairs]
        counts_RE = ranks.places.counts_RE
        self._sent = [counts_RE[r].tolist() for r in range(size.ranks)]
        per_rank = size.tokens * size.top_k
        # Pairs of all ranks in expert order, as one process without expert parallelism has them.
        expert_P = torch.cat([ids.reshape(-1) for ids in inputs.ids])
        self._order = expert_P.argsort(stable=True)
        self._offsets = counts_RE.sum(0).cumsum(0).int().to(DEVICE)
        self._all_x = torch.cat(inputs.xs)
        self._row = self._order.argsort().view(-1, size.top_k)
        self._all_weights = torch.cat(inputs.weights).to(torch.bfloat16)
        shape = (size.ranks, per_rank, size.hidden)
        self._arrived = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        self._returned = torch.empty_like(self._arrived)
        self.dispatch()

    def dispatch(self) -> None:
        """Permute by expert, then one copy for each source."""
        for rank, tokens in enumerate(self._tokens):
            self._arrived[rank].copy_(self._inputs.xs[rank].index_select(0, tokens))

    def combine(self) -> list[torch.Tensor]:
        """One copy for each source, then gather and weighted sum in one pass."""
        outs = []
        for rank, places in enumerate(self._places):
            self._returned[rank].copy_(self._arrived[rank])
            outs.append(self._sum(self._returned[rank], places.view(-1, self._size.top_k), rank))
        return outs

    def _sum(self, rows: torch.Tensor, place_TK: torch.Tensor, rank: int) -> torch.Tensor:
        weights = self._inputs.weights[rank].to(rows.dtype)
        return torch.nn.functional.embedding_bag(place_TK, rows, per_sample_weights=weights, mode="sum")

    def layer(self) -> list[torch.Tensor]:
        """The layer in one process: permute, grouped products, gather and weighted sum."""
        rows = self._all_x.index_select(0, self._order // self._size.top_k)
        grouped = torch.nn.functional.grouped_mm
        gate, up = grouped(rows, self._inputs.gate_up.transpose(1, 2), offs=self._offsets).chunk(2, -1)
        act = torch.nn.functional.silu(gate) * up
        y = grouped(act, self._inputs.down.transpose(1, 2), offs=self._offsets)
        out = torch.nn.functional.embedding_bag(
            self._row, y, per_sample_weights=self._all_weights, mode="sum"
        )
        return list(out.split(self._size.tokens))


# ------------------------------------------------------------------------------------------------------ 3. two processes


def run_pair_rank(rank: int, store: str, results: str, interpret: bool) -> None:
    """One of two processes: the public calls against the oracle, whose inputs both ranks make alike."""
    import torch.distributed as dist
    from device_ranks import Size, make_inputs

    import moe_a2a
    from moe_a2a import reference

    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=100),
    )
    size = Size(2, 3, 16, 16, 3, 2) if interpret else Size(2, 200, 1024, 256, 30, 4)
    with moe_a2a.EPGroup(
        num_experts=size.experts,
        top_k=size.top_k,
        max_tokens=size.tokens,
        hidden_size=size.hidden,
        dtype=torch.bfloat16,
        transport="cpu-shm" if interpret else ("hip" if torch.version.hip else "cuda"),
        kernels="triton",
        timeout=60.0,
        warmup_timeout=90.0,
    ) as group:
        local = group.local_experts
        begin = time.perf_counter()
        rounds = 2 if interpret else 30
        for seed in range(rounds):
            inputs = make_inputs(size, DEVICE, torch.bfloat16, seed, dropped=True)
            xs, ids = [x.cpu() for x in inputs.xs], [i.cpu() for i in inputs.ids]
            weights = [w.cpu() for w in inputs.weights]
            d = moe_a2a.dispatch(inputs.xs[rank], inputs.ids[rank], group)
            expected = [r.x_NH for r in reference.dispatch_reference(xs, ids, size.experts)]
            same("dispatch", [d.x], [expected[rank]])
            sums = reference.combine_reference([x * 2 for x in expected], ids, size.experts, weights)
            same("combine", [moe_a2a.combine(d.x * 2, d.handle, inputs.weights[rank])], [sums[rank]])
            out = moe_a2a.moe(
                inputs.xs[rank],
                inputs.ids[rank],
                inputs.weights[rank].to(torch.bfloat16),
                inputs.gate_up[local.start : local.stop],
                inputs.down[local.start : local.stop],
                group,
            )
            rounded = [w.to(torch.bfloat16) for w in weights]
            layer = reference.moe_reference(xs, ids, rounded, expert_of(inputs), size.experts)
            near("moe", [out], [layer[rank]])
        took = time.perf_counter() - begin
        if rank == 0:
            found = {
                "size": str(size),
                "rounds": rounds,
                "seconds": took,
                "transport": group.transport.reason,
            }
            Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


def check_pair(report: dict[str, Any], interpret: bool) -> None:
    """Two processes that share memory of one device (or of two, where there are two)."""
    from torch.multiprocessing.spawn import spawn

    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results")
        spawn(run_pair_rank, (os.path.join(folder, "store"), results, interpret), nprocs=2)
        report["pair"] = json.loads(Path(results).read_text())


# ------------------------------------------------------------------------------------------------------------ the verdict


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: standard output)")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes on a CPU; no times")
    parser.add_argument("--repeats", type=int, default=50, help="samples of each time")
    parser.add_argument(
        "--inject-fault", choices=("none", "wrong-row"), default="none", help="must be noticed"
    )
    parser.add_argument("--only", choices=("virtual ranks", "times", "two processes"), help="one part")
    arguments = parser.parse_args(argv)
    if DEVICE.type == "cpu" and not arguments.interpret:
        print(
            "device_check: torch sees no GPU here, so nothing was run; --interpret tests the script on a CPU"
        )
        return NO_DEVICE
    started = time.monotonic()
    faulthandler.dump_traceback_later(HARD_LIMIT, exit=True)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": "interpreter" if arguments.interpret else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "failures": [],
    }
    parts: list[tuple[str, Callable[[], None]]] = [
        ("virtual ranks", lambda: check_virtual_ranks(report, arguments.interpret, arguments.inject_fault)),
        ("times", lambda: measure(report, arguments.interpret, arguments.repeats)),
        ("two processes", lambda: check_pair(report, arguments.interpret)),
    ]
    parts = [part for part in parts if arguments.only in (None, part[0])]
    for name, part in parts:
        begin = time.monotonic()
        try:
            if begin - started > LIMIT:
                raise TimeoutError(f"not begun: {begin - started:.0f} s are over")
            part()
            print(f"{name}: right, {time.monotonic() - begin:.0f} s", flush=True)
        except Exception as error:
            report["failures"].append(
                f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
            )
            print(f"{name}: {traceback.format_exc()}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    report["seconds"] = time.monotonic() - started
    text = json.dumps(report, indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n")
    how = (
        "by the interpreter, nothing was run on a device" if arguments.interpret else f"on {report['device']}"
    )
    if report["failures"]:
        print(f"NOT verified {how}: {'; '.join(report['failures'])}")
        return 1
    print(f"verified {how}: {', '.join(name for name, _ in parts)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
