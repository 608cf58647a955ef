"""R virtual ranks on one device, in one process: windows side by side, and the kernels of real ranks on them.

Dispatch and combine go phase by phase through ``op_host/triton/phases.py``, each phase for all ranks before the next, so that
nothing waits. The fused call is one launch for all ranks, in which programs of different ranks do wait for each other.

Shape symbols: T tokens of a rank, H hidden, I intermediate, E experts, K top-k, R ranks, N received rows, P pairs of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_a2a.op_host.layout import DTYPE_CODES, Format, Kind, Mode, WindowLayout, expert_ranges, window_layout
from moe_a2a.op_host.tiling import product_tile
from moe_a2a.op_host.triton.launch import Machine, TritonLauncher, launcher_for
from moe_a2a.op_host.triton.phases import FLAG_ROWS, Phases, Source
from moe_a2a.op_host.triton.record import Cell, Record
from moe_a2a.op_host.triton.routing import Geometry, Pairs, Runs, sort_pairs
from moe_a2a.op_kernel.triton.fused import fused

ALL_PHASES = 63
PATIENCE = 60.0  # seconds of launching again before a fused call counts as stuck


@dataclass(frozen=True)
class Size:
    """What is dispatched, computed and combined."""

    ranks: int
    tokens: int  # of each rank
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return (
            f"R={self.ranks} T={self.tokens} H={self.hidden} I={self.intermediate} "
            f"E={self.experts} K={self.top_k}"
        )

    def layout(self, item_bytes: int) -> WindowLayout:
        return window_layout(
            world_size=self.ranks,
            num_experts=self.experts,
            top_k=self.top_k,
            max_tokens=self.tokens,
            row_bytes=self.hidden * item_bytes,
            recv_rows=self.ranks * self.tokens * self.top_k,
            record_format=Format.PORTABLE,
            push=True,
        )


@dataclass(frozen=True)
class Inputs:
    """Of each rank x [T, H], ids [T, K] in -1..E-1, weights [T, K] float32; and of all experts gate_up [E, 2 I, H] and
    down [E, H, I]."""

    xs: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    gate_up: Tensor
    down: Tensor


def make_inputs(size: Size, device: torch.device, dtype: torch.dtype, seed: int, dropped: bool) -> Inputs:
    """Random inputs; ``dropped``: uneven numbers of tokens, none on one rank, and pairs that go nowhere."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [size.tokens] * size.ranks
    if dropped:
        tokens = torch.randint(1, size.tokens + 1, (size.ranks,), generator=generator).tolist()
        tokens[seed % size.ranks] = 0
    scores = [torch.rand(t, size.experts, generator=generator) for t in tokens]
    ids = [score.topk(size.top_k).indices for score in scores]
    if dropped:
        ids = [torch.where(torch.rand(i.shape, generator=generator) < 0.2, -1, i) for i in ids]
    torch.manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, device=device, dtype=torch.float32) * scale).to(dtype)

    return Inputs(
        [normal(t, size.hidden, scale=1.0) for t in tokens],
        [i.to(device) for i in ids],
        [torch.rand(t, size.top_k, generator=generator).to(device) for t in tokens],
        normal(size.experts, 2 * size.intermediate, size.hidden, scale=size.hidden**-0.5),
        normal(size.experts, size.hidden, size.intermediate, scale=size.intermediate**-0.5),
    )


class LocalHeap:
    """A SymmetricHeap whose blocks all lie on one device, in this process."""

    def __init__(self, rank: int, blocks: Tensor) -> None:
        self.rank, self._blocks = rank, blocks
        self.world_size, self.size = blocks.shape
        self.addresses = [block.data_ptr() for block in blocks]
        self.pidfds = [-1] * self.world_size

    def block(self, rank: int) -> Tensor:
        return self._blocks[rank]

    def close(self) -> None:
        self.addresses = []


Step = tuple[Any, int, dict[str, Any], dict[str, Any]]
"""(kernel, programs, arguments, constants)."""


@dataclass
class Steps:
    """A Launcher that also keeps what it launches, to launch it again with frozen arguments: a call's number is in memory."""

    inner: TritonLauncher
    machine: Machine
    kept: list[Step] = field(default_factory=list)

    def explain(self) -> str:
        return self.inner.explain()

    def launch(self, kernel: Any, programs: int, args: dict[str, Any], constants: dict[str, Any]) -> None:
        self.kept.append((kernel, programs, args, constants))
        self.inner.launch(kernel, programs, args, constants)

    def taken(self) -> list[Step]:
        """What was launched since the last time."""
        kept, self.kept = self.kept, []
        return kept

    def renew(self, steps: list[Step]) -> None:
        """Makes steps ready to be launched again."""
        for _, _, args, _ in steps:
            for name in ("state", "given"):
                if name in args:
                    args[name].zero_()

    def again(self, steps: list[Step]) -> None:
        for step in steps:
            self.inner.launch(*step)


class VirtualRanks:
    """The ranks.

    Attributes:
        launches: how often each kernel was launched.
    """

    def __init__(self, size: Size, inputs: Inputs, device: torch.device) -> None:
        self.size, self.inputs, self.device = size, inputs, device
        self.dtype = inputs.gate_up.dtype
        self.layout = size.layout(self.dtype.itemsize)
        launcher = launcher_for(device)
        self.steps = Steps(launcher, launcher.machine)
        self.launches = self.steps.inner.launches
        blocks = torch.zeros(size.ranks, self.layout.total_bytes, dtype=torch.uint8, device=device)
        self._heaps = [LocalHeap(rank, blocks) for rank in range(size.ranks)]
        self._phases = [Phases(self.layout, heap, self.steps) for heap in self._heaps]
        self._geometry = Geometry(size.experts, size.ranks)
        self._pairs = [sort_pairs(ids, size.experts) for ids in inputs.ids]
        self._sources = [self._source(rank) for rank in range(size.ranks)]
        counts_RE = torch.stack([pairs.counts_E.cpu() for pairs in self._pairs])
        self.places = self._geometry.places(counts_RE, 1)
        self.n = 0
        self.call = self._phases[0].call_words(1)

    def _source(self, rank: int) -> Source:
        pairs = self._pairs[rank]
        kept = int(pairs.counts_E.sum())
        return Source(self.inputs.xs[rank].contiguous(), pairs.token_P[:kept].int(), None, 0)

    def next_call(self) -> None:
        """Begins a call: one more than the last."""
        self.n += 1
        self.call.copy_(self._phases[0].call_words(self.n))

    def record(self, rank: int, mode: Mode, flag_rows: int) -> Record:
        """The header of a rank's record of this call."""
        return Record(
            kind=int(Kind.COUNTS),
            generation=self.layout.generation,
            epoch=self.n,
            tokens=len(self.inputs.xs[rank]),
            hidden=self.size.hidden,
            dtype=DTYPE_CODES[self.dtype],
            top_k=self.size.top_k,
            mode=int(mode),
            flag_rows=flag_rows,
            read=self.n - 1,
        )

    def _runs(self) -> Runs:
        return self._geometry.runs(self.places, None, 0, [FLAG_ROWS] * self.size.ranks)

    def dispatch(self) -> list[Tensor]:
        """A whole dispatch: of each rank the rows [N, H] that it receives, NaN where no row came."""
        self.next_call()
        for rank, phases in enumerate(self._phases):
            header = self.record(rank, Mode.PUSH, FLAG_ROWS).words()
            phases.publish(self.call, header, self._pairs[rank].counts_E)
        for phases in self._phases:
            missing = phases.await_records(self.call).missing()
            assert not missing, f"records of ranks {missing} aren't there, and all were published"
        runs = self._runs()
        for rank, phases in enumerate(self._phases):
            phases.push(self.call, self._sources[rank], runs.of(runs.source_M == rank), False)
        received = []
        for rank, phases in enumerate(self._phases):
            rows = self.places.totals_R[rank]
            out = torch.full((rows, self.size.hidden), float("nan"), dtype=self.dtype, device=self.device)
            mine = runs.of(runs.owner_M == rank)
            if len(mine):
                taking = phases.take(self.call, self._sources[rank], mine, 0, False, out, None, None)
                missing = taking(set(range(self.size.ranks)))
                assert not missing, f"rows of ranks {missing} aren't there, and all were pushed"
            received.append(out)
        return received

    def combine(self, ys: list[Tensor]) -> list[Tensor]:
        """The combine of the last dispatch: of each rank [T, H]."""
        cell = Cell(dtype=DTYPE_CODES[self.dtype], hidden=self.size.hidden, mode=int(Mode.PUSH)).words()
        runs = self._runs()
        for rank, phases in enumerate(self._phases):
            mine = runs.of(runs.owner_M == rank)
            sources = sorted(set(mine.source_M.tolist()) - {rank})
            giving = phases.give(self.call, ys[rank], mine, sources, cell)
            deadline = time.monotonic() + PATIENCE
            while giving({rank}):
                assert time.monotonic() < deadline, f"rank {rank} can't give its rows"
        outs = []
        for rank, phases in enumerate(self._phases):
            owners = set(runs.owner_M[runs.source_M == rank].tolist()) - {rank}
            weights = self.inputs.weights[rank]
            summing = phases.combine(self.call, self._pairs[rank], ys[rank], weights, False, owners, cell)
            missing = summing.missing()
            assert summing.done, f"rows of ranks {missing} aren't there for rank {rank}, and all were given"
            outs.append(summing.out)
        return outs

    # ------------------------------------------------------------------------------------------------ the fused call

    def fused(self) -> Fused:
        """The whole layer as one launch, ready to be run."""
        return Fused(self)

    @property
    def pairs(self) -> list[Pairs]:
        return self._pairs

    @property
    def windows(self) -> Tensor:
        """int64 [R]."""
        return torch.tensor(self._heaps[0].addresses, dtype=torch.int64, device=self.device)


@triton.jit
def virtual_ranks(  # type: ignore[no-untyped-def]
    windows,
    layout,
    call,
    header,
    counts,
    starts,
    owned,
    x,
    tokens,
    work,
    place,
    weights,
    gate_up,
    down,
    act,
    y,
    cell,
    given,
    records,
    out,
    state,
    entries,
    rows,
    stride,
    programs,
    polls,
    T: tl.constexpr,
    N: tl.constexpr,
    PHASES: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    ELP: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    GPU: tl.constexpr,
    SYS: tl.constexpr,
):
    """The fused kernel of all ranks in one launch: program p is program p mod ``programs`` of rank p div ``programs``.

    Example, R = 2, programs = 3: programs 0..2 are rank 0's, 3..5 are rank 1's; program 4 is program 1 of rank 1 and is
    handed counts[1].

    Args:
        rows: int32 [R], tokens of each rank. entries: int32 [R], of each rank's work list.
        The others are those of ``op_kernel/triton/fused.py``, one after the other for each rank where ranks differ, with room
        for T tokens, N rows and E entries.
    """
    me = tl.program_id(0) // programs
    m = me.to(tl.int64)
    first = tl.load(starts + me).to(tl.int64)
    fused(
        windows,
        layout,
        call,
        header + me * 32,
        counts + me * E,
        starts,
        owned + me * R,
        x + m * (T * H),
        tokens + me * (T * K),
        work + me * (E * 8),
        place + me * (T * K),
        weights + me * (T * K),
        gate_up + first * (2 * I * H),
        down + first * (H * I),
        act + m * programs * (BM * I),
        y + m * (N * H),
        cell,
        given + me * (R * 8),
        given,
        given,
        records + me * (R * (32 + E)),
        counts,
        out + m * (T * H),
        state + me * programs * 8,
        tl.load(entries + me),
        tl.load(rows + me),
        stride,
        me,
        -me * programs,
        programs,
        polls,
        PHASES,
        R,
        RP,
        E,
        EP,
        ELP,
        K,
        H,
        I,
        True,
        False,
        False,
        False,
        PARTS,
        tl.float32,
        DOT,
        ROUND,
        BM,
        BN,
        BK,
        BR,
        BT,
        BH,
        GPU,
        SYS,
    )


class Fused:
    """The fused call of all virtual ranks."""

    def __init__(self, ranks: VirtualRanks) -> None:
        self._ranks, size, layout = ranks, ranks.size, ranks.layout
        inputs, device, dtype = ranks.inputs, ranks.device, ranks.dtype
        machine = ranks.steps.machine
        R, T, H, E, K = size.ranks, size.tokens, size.hidden, size.experts, size.top_k
        owned = expert_ranges(E, R)
        self._programs = max(1, machine.programs // R)
        item = dtype.itemsize
        if machine.memories is None:
            m, n, k = 16, 16, 16
        else:
            m, n, k = product_tile(
                machine.memories,
                hidden=H,
                intermediate=size.intermediate,
                itemsize=item,
                rows=-(-R * T * K // E),
            )
        copied = machine.tile("copy", H, item, T)
        summed = machine.tile("sum", H, item, -(-T // self._programs))

        def int32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32)

        tokens, place, work, entries = int32(R, T * K), int32(R, T, K) - 1, int32(R, E, 8), int32(R)
        for rank, pairs in enumerate(ranks.pairs):
            ids = pairs.expert_TK.cpu()
            kept = int((ids >= 0).sum())
            tokens[rank, :kept] = pairs.token_P[:kept].cpu()
            place[rank, : len(ids)] = torch.where(ids < 0, -1, pairs.place_TK.cpu())
            runs = [
                (owner, int(pairs.start_E[e]), int(pairs.counts_E[e]), 0, e, experts.start, 0, 0)
                for owner, experts in enumerate(owned)
                for e in experts
                if pairs.counts_E[e]
            ]
            entries[rank] = len(runs)
            if runs:
                work[rank, : len(runs)] = torch.tensor(runs)
        counts_RE = ranks.places.counts_RE
        self._header = int32(R, 32).to(device)
        cell = Cell(dtype=DTYPE_CODES[dtype], hidden=H, mode=int(Mode.PUSH)).words()

        def padded(parts: list[Tensor]) -> Tensor:
            """[R, T, ...] of tensors with fewer rows each."""
            whole = parts[0].new_zeros(R, T, *parts[0].shape[1:])
            for rank, part in enumerate(parts):
                whole[rank, : len(part)] = part
            return whole

        self.out = torch.empty(R, T, H, dtype=dtype, device=device)
        self._state = torch.zeros(R * self._programs, 8, dtype=torch.int32, device=device)
        self._given = torch.zeros(R, R, 8, dtype=torch.int32, device=device)
        self._args: dict[str, Any] = {
            "windows": ranks.windows,
            "layout": torch.tensor(layout.params(), dtype=torch.int64, device=device),
            "call": ranks.call,
            "header": self._header,
            "counts": counts_RE.int().to(device),
            "starts": torch.tensor([*(e.start for e in owned), E], dtype=torch.int32, device=device),
            "owned": torch.stack([counts_RE[:, e.start : e.stop].sum(1) for e in owned], 1).int().to(device),
            "x": padded(inputs.xs),
            "tokens": tokens.to(device),
            "work": work.to(device),
            "place": place.to(device),
            "weights": padded(inputs.weights),
            "gate_up": inputs.gate_up,
            "down": inputs.down,
            "act": torch.empty(R * self._programs, m, size.intermediate, dtype=dtype, device=device),
            "y": torch.empty(R, layout.recv_rows, H, dtype=dtype, device=device),
            "cell": torch.tensor(cell, dtype=torch.int32, device=device),
            "given": self._given,
            "records": torch.zeros(R, R, 32 + E, dtype=torch.int32, device=device),
            "out": self.out,
            "state": self._state,
            "entries": entries.to(device),
            "rows": torch.tensor([len(x) for x in inputs.xs], dtype=torch.int32, device=device),
            "stride": layout.row_stride(H, item),
            "programs": self._programs,
            "polls": machine.polls,
        }
        power = triton.next_power_of_2
        self._constants: dict[str, Any] = {
            "T": T,
            "N": layout.recv_rows,
            "PHASES": ALL_PHASES,
            "R": R,
            "RP": power(R),
            "E": E,
            "EP": max(8, power(E)),
            "ELP": max(8, power(-(-E // R))),
            "K": K,
            "H": H,
            "I": size.intermediate,
            "PARTS": max(1, self._programs // -(-E // R)),
            "DOT": tl.bfloat16 if machine.gpu and dtype == torch.bfloat16 else tl.float32,
            "ROUND": machine.rounds,
            "BM": m,
            "BN": n,
            "BK": k,
            "BR": copied[0] if copied[1] <= summed[1] else 1,
            "BT": summed[0],
            "BH": summed[1],
            "GPU": machine.gpu,
            "SYS": machine.gpu,
        }

    def renew(self) -> None:
        """Makes the next call ready."""
        ranks = self._ranks
        ranks.next_call()
        header = self._header.cpu()
        for rank in range(ranks.size.ranks):
            words = ranks.record(rank, Mode.FUSED, 0).words()
            header[rank, : len(words)] = torch.tensor(words)
        self._header.copy_(header)
        self._state.zero_()
        self._given.zero_()

    def launch(self) -> None:
        """One launch for all ranks. Where programs can wait for each other it is the whole call."""
        launcher = self._ranks.steps.inner
        launcher.launch(virtual_ranks, self._ranks.size.ranks * self._programs, self._args, self._constants)

    def run(self) -> tuple[list[Tensor], int]:
        """A whole call: (of each rank [T, H], launches it took). Launches again what ran out of polls.

        Raises:
            TimeoutError: it is stuck; names each program's error, phase and the rank it waits for.
        """
        self.renew()
        self.out.fill_(float("nan"))
        deadline = time.monotonic() + PATIENCE
        launches = 0
        while True:
            self.launch()
            launches += 1
            state = self._state.cpu()
            if not state[:, 0].any():
                break
            if time.monotonic() > deadline:
                stuck = [(i // self._programs, *row[:4].tolist()) for i, row in enumerate(state) if row[0]]
                raise TimeoutError(f"stuck (rank, error, phase, item, waits for): {stuck}")
            self._state[:, 0] = 0
        outs = [self.out[rank, : len(x)] for rank, x in enumerate(self._ranks.inputs.xs)]
        return outs, launches


def seconds(
    device: torch.device, run: Callable[[], object], before: Callable[[], object], repeats: int
) -> list[float]:
    """Times of ``run``, in seconds; ``before`` isn't timed.

    On a GPU ``run`` is captured in a graph, so that kernels are timed and not their launches.
    """
    times = []
    if device.type == "cpu":
        for _ in range(repeats):
            before()
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return times
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    before()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(repeats):
        before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times
