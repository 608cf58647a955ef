"""Ranks as processes exchange rows with the Triton kernels, call after call, and compare every bit with the oracle.

    PYTHONPATH=CHECKOUT:CHECKOUT/tests python -m triton_lanes.lane native|interpreter [--ranks 3] [--calls 40] [--weak]

``native``: the IR that the Ascend compiler gets, on x86; programs are threads. ``interpreter``: TRITON_INTERPRET=1; the
programs of a launch run one after the other. Exit status 9: a result differs, a wait gave up or has vanished, a rank died.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if "interpreter" in sys.argv[1:2]:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import triton
from triton_rank import ALL, PARTNER, RETURN, SEND, KernelFailed, KernelRank, Launch, Memory, interpreted

from moe_a2a.op_host.layout import Format, Quant, WindowLayout, window_layout
from moe_a2a.reference import combine_reference, dispatch_reference, moe_reference

from .native import Builder, NativeKernel, Vanished, Weather

KINDS = {
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
LONGS = {"stride", "scales_at", "weight_at", "x_stride"}  # int64 whatever their value


def kind_of(name: str, value: Any) -> str:
    """A type as a signature has it."""
    if isinstance(value, Tensor):
        return KINDS[value.dtype]
    return "i64" if name in LONGS else "i32"


class NativeLaunch:
    """Launches the x86 build of a kernel, building it when it is first asked for.

    Attributes:
        launches: how often each kernel ran.
        overtaken: stores that became visible before an older one.
    """

    def __init__(
        self,
        builder: Builder,
        shared: list[tuple[int, int]],
        seed: int,
        weak: bool,
        delays: tuple[int, int] = (8, 60),
    ) -> None:
        self._builder, self._shared, self._seed, self._weak, self._delays = (
            builder,
            shared,
            seed,
            weak,
            delays,
        )
        self._kernels: dict[Any, NativeKernel] = {}
        self._lock = threading.Lock()
        self.launches: collections.Counter[str] = collections.Counter()
        self.overtaken = 0

    def __call__(
        self, kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        module = kernel.fn.__module__.removeprefix("moe_a2a.")
        name = kernel.fn.__name__
        signature = {argument: kind_of(argument, value) for argument, value in arguments.items()}
        plain = {
            c: {"dtype": str(v)} if isinstance(v, triton.language.dtype) else v for c, v in constants.items()
        }
        key = (name, tuple(signature.items()), str(plain))
        with self._lock:  # the partner of a fused kernel launches from a thread of its own
            if key not in self._kernels:
                built = self._builder.build(module, name, signature, plain)
                built.share(self._shared)
                self._kernels[key] = built
            self.launches[name] += 1
            seed = self._seed * 100_003 + self.launches.total()
        weather = Weather(seed, *self._delays, weak_stores=self._weak)
        self.overtaken += self._kernels[key](programs, arguments, weather).overtaken


class InterpreterLaunch:
    """Launches a kernel in triton's interpreter and counts."""

    def __init__(self) -> None:
        self.launches: collections.Counter[str] = collections.Counter()
        self.overtaken = 0

    def __call__(
        self, kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        interpreted(kernel, programs, arguments, constants)
        self.launches[kernel.fn.__name__] += 1


@dataclass(frozen=True)
class Sizes:
    """A group."""

    ranks: int
    experts: int = 5
    top_k: int = 3
    tokens: int = 6
    hidden: int = 50
    inner: int = 24

    def layout(self) -> WindowLayout:
        return window_layout(
            world_size=self.ranks,
            num_experts=self.experts,
            top_k=self.top_k,
            max_tokens=self.tokens,
            row_bytes=self.hidden * 4,
            recv_rows=self.ranks * self.tokens * self.top_k,
            record_format=Format.PORTABLE,
            push=True,
            code_max=23,  # small: each slot sees the codes of several laps
        )


@dataclass
class Node:
    """One rank: its kernels, and as ``beside`` those of a second stream."""

    kernels: KernelRank
    beside: KernelRank | None
    sizes: Sizes
    seed: int
    dtypes: Sequence[str]
    quantize: bool

    def dtype(self, call: int) -> torch.dtype:
        """Of this call's rows."""
        dtype = getattr(torch, self.dtypes[call % len(self.dtypes)])
        assert isinstance(dtype, torch.dtype)
        return dtype


def inputs(node: Node, call: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """x, ids and weights of all ranks for one call; some ranks have no tokens, some pairs are dropped, some ids repeat."""
    generator = torch.Generator().manual_seed(node.seed * 10_007 + call)
    sizes = node.sizes
    xs, idxs, weights = [], [], []
    for _ in range(sizes.ranks):
        T = int(torch.randint(0, sizes.tokens + 1, (), generator=generator))
        xs.append(torch.randn(T, sizes.hidden, generator=generator).to(dtype))
        idxs.append(
            torch.randint(-1, sizes.experts, (T, sizes.top_k), generator=generator, dtype=torch.int32)
        )
        weights.append(torch.randn(T, sizes.top_k, generator=generator))
    return xs, idxs, weights


def differs(name: str, got: Tensor | None, expected: Tensor | None) -> str:
    """ "" when both are the same to the bit, else what is wrong."""
    if got is None or expected is None:
        return "" if got is None and expected is None else f"{name}: one is missing"
    got, expected = got.contiguous(), expected.contiguous()
    if got.shape != expected.shape:
        return f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not got.numel() or torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        return ""
    same = (got.view(torch.uint8) == expected.view(torch.uint8)).reshape(len(got), -1).all(1)
    rows = (~same).nonzero()[:, 0]
    return f"{name}: {len(rows)} of {len(got)} rows differ, the first is {int(rows[0])}"


def exchange(node: Node, call: int) -> list[str]:
    """One dispatch and its combine; what differs from the oracle."""
    dtype = node.dtype(call)
    quantize = "int8" if node.quantize and call % 3 == 2 else None
    me, E = node.kernels.me, node.sizes.experts
    xs, idxs, weights = inputs(node, call, dtype)
    received = dispatch_reference(xs, idxs, E, weights, quantize=quantize)
    expected = received[me]
    got = node.kernels.dispatch(xs[me], idxs[me], weights[me], quant=Quant.INT8 if quantize else Quant.NONE)
    wrong = [differs("x", got.x_NH, expected.x_NH), differs("weights", got.weights_N, expected.weights_N)]
    if expected.scales is not None:
        wrong.append(differs("scales", got.scales_NS[:, 0], expected.scales))
    columns = torch.arange(node.sizes.hidden)
    ys = [((r.source_N3.sum(1, keepdim=True) + columns + call) / 7).to(dtype) for r in received]
    out = node.kernels.combine(ys[me], got.handle, weights[me])
    wrong.append(differs("out", out, combine_reference(ys, idxs, E, weights)[me]))
    return wrong


def overlap(node: Node, call: int) -> list[str]:
    """Two dispatches, then their combines: both slots are open."""
    me, E = node.kernels.me, node.sizes.experts
    kept, wrong = [], []
    for turn in range(2):
        xs, idxs, weights = inputs(node, 2 * call + turn + 5000, torch.float16)
        expected = dispatch_reference(xs, idxs, E)
        got = node.kernels.dispatch(xs[me], idxs[me])
        wrong.append(differs("x", got.x_NH, expected[me].x_NH))
        kept.append((got.handle, [r.x_NH * (turn + 2) for r in expected], idxs, weights))
    for handle, ys, idxs, weights in kept:
        out = node.kernels.combine(ys[me], handle, weights[me])
        wrong.append(differs("out", out, combine_reference(ys, idxs, E, weights)[me]))
    return wrong


def exact_experts(sizes: Sizes, call: int) -> tuple[Tensor, Tensor]:
    """[E, 2 I, H] and [E, H, I] whose products with small integers are exact in any order, so that bits can be compared.

    Column 0 of x is 1 and gates are 32 times that; silu(32) is 32 in float32. The others are -1, 0 or 1.
    """
    generator = torch.Generator().manual_seed(call)
    E, H, I = sizes.experts, sizes.hidden, sizes.inner  # noqa: E741

    def sparse(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator) * (
            torch.rand(shape, generator=generator) < 0.2
        )

    gate = torch.zeros(E, I, H)
    gate[:, :, 0] = 32
    return torch.cat([gate, sparse(E, I, H)], 1), sparse(E, H, I).float()


WAYS: dict[
    str, tuple[tuple[int, ...], bool]
] = {  # launches of the fused call, and whether experts are on the vector cores
    "fused": ((ALL,), False),
    "vector": ((ALL,), True),
    "split": ((SEND, RETURN), False),
    "partner": ((PARTNER,), True),
}


def fused(way: str) -> Callable[[Node, int], list[str]]:
    """One fused call by this way."""
    launches, vector = WAYS[way]

    def step(node: Node, call: int) -> list[str]:
        dtype = node.dtype(call)
        me = node.kernels.me
        xs, idxs, weights = inputs(node, call, torch.float32)
        xs = [torch.cat([torch.ones(len(x), 1), (x[:, 1:] * 2).round()], 1).to(dtype) for x in xs]
        gate_up, down = exact_experts(node.sizes, call)

        def expert(number: int, rows: Tensor) -> Tensor:
            gate, up = (rows.double() @ gate_up[number].double().t()).to(dtype).double().chunk(2, 1)
            hidden = (gate * torch.sigmoid(gate) * up).to(dtype).double()
            return (hidden @ down[number].double().t()).to(dtype)

        own = slice(node.kernels.own.start, node.kernels.own.stop)
        arguments = xs[me], idxs[me], weights[me], gate_up[own].to(dtype), down[own].to(dtype)
        if way == "partner":
            streams = [node.kernels, node.beside]
            with ThreadPoolExecutor(2) as pool:
                futures = [
                    pool.submit(s.moe, *arguments, launches=launches, vector=vector) for s in streams if s
                ]
                out = futures[0].result()[0]
                futures[1].result()
        else:
            out, _ = node.kernels.moe(*arguments, launches=launches, vector=vector)
        expected = moe_reference(xs, idxs, weights, expert, node.sizes.experts)[me]
        return [differs(f"{way}: out", out, expected)]

    return step


STEPS: dict[str, Callable[[Node, int], list[str]]] = {
    "exchange": exchange,
    "overlap": overlap,
    **{way: fused(way) for way in WAYS},
}


DEFAULT = ["exchange", "overlap", "fused", "vector", "split"]


def run_rank(
    me: int, sizes: Sizes, options: argparse.Namespace, windows: list[int], extra: int
) -> dict[str, Any]:
    """All calls of one rank; windows and the memory that its streams share come as descriptors."""
    torch.set_num_threads(1)
    layout = sizes.layout()
    memories = [Memory(os.dup(fd), layout.total_bytes) for fd in windows]
    if options.lane == "interpreter":
        launch = InterpreterLaunch()
        return run_calls(me, sizes, options, memories, extra, launch, launch)
    with Builder(Path(options.folder), Path(options.root)) as builder:
        shared = [(memory.address, layout.total_bytes) for memory in memories]
        native = NativeLaunch(builder, shared, options.seed * 10 + me, options.weak)
        return run_calls(me, sizes, options, memories, extra, native, native)


def run_calls(
    me: int,
    sizes: Sizes,
    options: argparse.Namespace,
    memories: list[Memory],
    extra: int,
    launch: Launch,
    counts: NativeLaunch | InterpreterLaunch,
) -> dict[str, Any]:
    interpreter = options.lane == "interpreter"
    pause = random.Random(options.seed * 100 + me)

    def delay(_: str) -> None:
        if pause.random() < 0.1:
            time.sleep(pause.random() * 0.005)

    common: dict[str, Any] = {
        "flag_rows": options.group,
        "delay": delay,
        "polls": 5 if interpreter else 1000,  # a look takes the interpreter a millisecond
        "patience": options.stuck,
        "rounds": interpreter,
    }
    if options.steps == ["partner"]:
        streams = [
            KernelRank(
                me,
                sizes.layout(),
                memories,
                launch,
                shared=Memory(os.dup(extra), STREAMS_BYTES),
                program=p,
                programs=2,
                **common,
            )
            for p in range(2)
        ]
        node = Node(streams[0], streams[1], sizes, options.seed, options.dtypes, options.quantize)
    else:
        kernels = KernelRank(me, sizes.layout(), memories, launch, programs=options.programs, **common)
        node = Node(kernels, None, sizes, options.seed, options.dtypes, options.quantize)
    for call in range(1, options.calls + 1):
        step = options.steps[call % len(options.steps)]
        if wrong := [what for what in STEPS[step](node, call) if what]:
            return {"wrong": [f"call {call}, {step}: {what}" for what in wrong]}
    return {"wrong": [], "launches": dict(counts.launches), "overtaken": counts.overtaken}


def in_process(me: int, body: Any, results: Any, *arguments: Any) -> None:
    try:
        results.put((me, body(me, *arguments)))
    except (KernelFailed, Vanished) as error:
        results.put((me, {"wrong": [str(error)]}))
    except BaseException:
        results.put((me, {"wrong": [], "broken": traceback.format_exc().strip()}))


WRONG = 9  # exit status: the ranks ran, and something was wrong
STREAMS_BYTES = 1 << 20  # of memory that the two streams of a rank share


def memfd(size: int) -> int:
    """Memory that processes can share, by its descriptor."""
    fd = os.memfd_create("moe_a2a_lane")
    os.ftruncate(fd, size)
    return fd


def kill(ranks: Sequence[Any]) -> None:
    """Ends processes that don't end by themselves."""
    for process in ranks:
        process.join(timeout=0.5)
        if process.is_alive():
            process.kill()
            process.join()


def run(sizes: Sizes, options: argparse.Namespace, patience: float) -> list[str]:
    """Runs all ranks; what went wrong, each with its rank."""
    layout = sizes.layout()
    windows = [memfd(layout.total_bytes) for _ in range(sizes.ranks)]
    for fd in windows:  # rows nobody has written are NaN
        for begin, end in ((layout.x, layout.row_flag), (layout.row, layout.total_bytes)):
            os.pwrite(fd, b"\xff" * (end - begin), begin)
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    ranks = [
        context.Process(
            target=in_process, args=(me, run_rank, results, sizes, options, windows, memfd(STREAMS_BYTES))
        )
        for me in range(sizes.ranks)
    ]
    for process in ranks:
        process.start()
    wrong: list[str] = []
    counts, overtaken = collections.Counter[str](), 0
    deadline = time.monotonic() + patience
    missing = set(range(sizes.ranks))
    while missing and not wrong:
        try:
            me, result = results.get(timeout=0.2)
        except Exception:
            dead = [me for me in missing if ranks[me].exitcode not in (None, 0)]
            wrong += [f"rank {me} died with {ranks[me].exitcode}" for me in dead]
            if time.monotonic() > deadline:
                wrong.append(f"ranks {sorted(missing)} didn't come back within {patience:.0f} s")
            continue
        missing.discard(me)
        wrong += [f"rank {me}: {what}" for what in result["wrong"]]
        if broken := result.get("broken"):
            kill(ranks)
            raise RuntimeError(f"rank {me} broke down:\n{broken}")
        counts.update(result.get("launches", {}))
        overtaken += result.get("overtaken", 0)
    kill(ranks)
    if not wrong:
        print(
            f"{options.lane}: {options.calls} calls right; launches {dict(counts)}; {overtaken} stores overtook others"
        )
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lane", choices=("native", "interpreter"))
    parser.add_argument(
        "--steps", nargs="*", choices=STEPS, default=DEFAULT, help="what the calls are, in turn"
    )
    parser.add_argument(
        "--dtypes", nargs="*", default=["bfloat16", "float32"], help="of the calls' rows, in turn"
    )
    parser.add_argument("--quantize", action="store_true", help="every third exchange in int8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--programs", type=int, default=2)
    parser.add_argument("--group", type=int, default=2, help="rows of an expert that share a flag, 0 all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--weak", action="store_true", help="native: stores may overtake each other between barriers"
    )
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for all calls")
    parser.add_argument("--stuck", type=float, default=30.0, help="seconds for one launch that is repeated")
    parser.add_argument(
        "--root", default=str(Path(__file__).parent.parent.parent), help="where op_kernel is (native)"
    )
    parser.add_argument("--folder", default="", help="where builds are kept (native)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or folder
        sizes = Sizes(options.ranks)
        wrong = run(sizes, options, options.patience)
    for what in wrong:
        print(what)
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
