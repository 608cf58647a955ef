"""A rank that is nothing but launches of op_kernel/triton over windows: what a host does between them, in plain loops.

How a kernel is launched is handed in (:class:`Launch`), so that the same rank runs in the interpreter and wherever else
kernels can be executed. The programs of a rank may be processes: each of them runs this same code, they share what kernels
write, and meet where a host would have started the next launch in the stream.

Shape symbols: T tokens of a rank, H hidden, E experts, K top-k, R ranks, N received rows, P kept pairs, S scales of a row.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_a2a.op_host.layout import (
    DTYPE_CODES,
    CellWord,
    Kind,
    Mode,
    Quant,
    RecordWord,
    WindowLayout,
    align_up,
    expert_ranges,
)
from moe_a2a.op_host.window import WindowAddress, create_window, open_by_proc
from moe_a2a.op_kernel.triton import begin, combine, experts, fused, give, partner, push, record, take, wave
from moe_a2a.op_kernel.triton import catalogue as sizes
from moe_a2a.op_kernel.triton.words import (
    DO_EXPERTS,
    ERROR_CELL,
    ERROR_DONE,
    ERROR_GIVEN,
    ERROR_READY,
    ERROR_RECORD,
    ERROR_ROWS,
    ERROR_WAVE,
)

# Errors that say "not yet": the launch is repeated.
AGAIN = {
    error.value
    for error in (ERROR_CELL, ERROR_DONE, ERROR_GIVEN, ERROR_READY, ERROR_RECORD, ERROR_ROWS, ERROR_WAVE)
}
ALL, SEND, RETURN = sizes.ALL, sizes.SEND, sizes.RETURN
PARTNER = ALL & ~DO_EXPERTS.value


class Launch(Protocol):
    """Runs ``programs`` programs of a kernel with arguments and constants by name, and returns when they have ended."""

    def __call__(
        self, kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None: ...


def interpreted(kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Launch in Triton's interpreter: one program after the other."""
    kernel[(programs,)](**arguments, **constants)


class KernelFailed(RuntimeError):
    """A kernel left an error that repeating doesn't mend, or that it left until the patience ran out."""

    def __init__(self, rank: int, kernel: str, error: int, who: int) -> None:
        super().__init__(f"rank {rank}: {kernel} left error {error}, rank or expert {who}")
        self.error, self.who = error, who


class Memory:
    """Memory that several processes map: one makes it, the others open it by its address."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size)
        os.close(fd)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
        """The next tensor of it; all processes ask for the same ones in the same order."""
        size = align_up(torch.Size(shape).numel() * dtype.itemsize, 64)
        at, self._used = self._used, self._used + size
        assert self._used <= len(self.bytes), "the memory of a rank's programs is too small"
        return self.bytes[at : at + size].view(dtype)[: torch.Size(shape).numel()].view(shape)

    def reset(self) -> None:
        """Hand out the same memory again."""
        self._used = 0


def window_memory(layout: WindowLayout, rank: int) -> tuple[Memory, WindowAddress]:
    """A window, and what its peers need to open it. The descriptor stays open as long as the process: peers open it later."""
    file = create_window(layout, rank)
    return Memory(os.dup(file.fd), file.size), file.announce()


def open_window(address: WindowAddress) -> Memory:
    """A peer's window."""
    return Memory(open_by_proc(address), address.size)


@dataclass(frozen=True)
class Sent:
    """A rank's routing: its pairs in (expert, token, k) order.

    Attributes:
        counts_E: int32. tokens_P: int32. place_TK: int32, -1 dropped. owned_R: int32, rows that each owner holds.
    """

    counts_E: Tensor
    tokens_P: Tensor
    pairs_P: Tensor
    place_TK: Tensor
    owned_R: Tensor


@dataclass(frozen=True)
class Handle:
    """What combine needs of a dispatch."""

    call: Tensor
    sent: Sent
    counts_RE: list[list[int]]
    align: int


@dataclass(frozen=True)
class Received:
    """What dispatch returns; rows of padding are zeros."""

    x_NH: Tensor
    scales_NS: Tensor
    weights_N: Tensor
    handle: Handle


class KernelRank:
    """One rank, or one of its programs.

    Args:
        me: the rank. layout: of all windows. windows: of all ranks, by rank.
        launch: runs a kernel.
        shared: memory that this rank's programs share.
        program, programs: which of the rank's programs this process is; a launch has then one program. None: a launch
            has all of them.
        flag_rows: rows of a run that share a flag, 0 all.
        delay: called with the kernel's name before each launch that may be repeated.
        polls: looks at a code before a launch returns.
        patience: seconds that launches are repeated.
        rounds: casts from float32 to bfloat16 truncate (see rounding.py).
    """

    def __init__(
        self,
        me: int,
        layout: WindowLayout,
        windows: list[Memory],
        launch: Launch = interpreted,
        *,
        shared: Memory | None = None,
        program: int | None = None,
        programs: int = 1,
        flag_rows: int = 0,
        delay: Callable[[str], None] = lambda _: None,
        polls: int = 20,
        patience: float = 80.0,
        rounds: bool = True,
    ) -> None:
        self.me, self.layout, self.launch, self.programs = me, layout, launch, programs
        self.flag_rows, self.delay, self.polls, self.patience = flag_rows, delay, polls, patience
        self.rounds = rounds
        self.R, self.E = layout.world_size, layout.num_experts
        self.ranges = expert_ranges(self.E, self.R)
        self.own = self.ranges[me]
        self.windows_R = torch.tensor([window.address for window in windows])
        self.vector = torch.tensor(layout.params())
        self._windows = windows  # mapped as long as this lives
        self._program = program
        self._shared = shared
        self._met: Tensor | None = None
        self.repeats = 0  # launches that were repeated
        if shared is not None:
            self._met = shared.tensor((programs,), torch.int64)
            shared._used = 4096  # what comes is handed out anew by every call
        self.words: dict[str, int] = {
            "R": self.R,
            "E": self.E,
            "RP": sizes.power_of_two(self.R),
            "EP": sizes.power_of_two(self.E, 8),
            "ELP": sizes.power_of_two(max(len(range_) for range_ in self.ranges), 8),
        }

    # ------------------------------------------------------------------------------------------------- launching

    def run(self, kernel: Any, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
        """Launches a kernel, and again while its polls run out.

        Raises:
            KernelFailed: the kernel left another error, or still the same when the patience was over.
        """
        state = torch.zeros(self.programs, 8, dtype=torch.int32)
        known = {
            "windows": self.windows_R,
            "layout": self.vector,
            "state": state,
            "me": self.me,
            "program0": self._program or 0,
            "programs": self.programs,
            "polls": self.polls,
            **arguments,
        }
        names = kernel.arg_names
        constants = {name: value for name, value in constants.items() if name in names}
        arguments = {name: known[name] for name in names if name not in constants}
        deadline = time.monotonic() + self.patience
        while True:
            self.delay(kernel.__name__)
            self.launch(kernel, 1 if self._program is not None else self.programs, arguments, constants)
            wrong = state[state[:, 0] != 0]
            if len(wrong) == 0:
                return
            error, who = int(wrong[0, 0]), int(wrong[0, 3])
            if error not in AGAIN or time.monotonic() > deadline:
                raise KernelFailed(self.me, kernel.__name__, error, who)
            state[:, 0] = 0
            self.repeats += 1
            time.sleep(0.0005)

    def meet(self) -> None:
        """Wait for this rank's other programs."""
        if self._met is None or self._program is None:
            return
        self._met[self._program] += 1
        mine = int(self._met[self._program])
        deadline = time.monotonic() + self.patience
        while int(self._met.min()) < mine:
            assert time.monotonic() < deadline, f"rank {self.me}: a program is missing"
            time.sleep(0.0002)

    @property
    def first(self) -> bool:
        """Whether this process does what only one of a rank's programs may."""
        return not self._program

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> Tensor:
        """A tensor that all of the rank's programs see; :meth:`meet` before it is used."""
        if self._shared is None:
            return torch.full(shape, fill, dtype=dtype)
        tensor = self._shared.tensor(shape, dtype)
        if self.first:
            tensor.fill_(fill)
        return tensor

    # --------------------------------------------------------------------------------------------------- places

    def sent(self, idx_TK: Tensor) -> Sent:
        """What this rank's ids mean."""
        flat = idx_TK.reshape(-1).tolist()
        pairs = sorted((pair for pair, e in enumerate(flat) if e >= 0), key=lambda pair: (flat[pair], pair))
        place = torch.full((len(flat),), -1, dtype=torch.int32)
        place[pairs] = torch.arange(len(pairs), dtype=torch.int32)
        counts = [flat.count(e) for e in range(self.E)]
        return Sent(
            torch.tensor(counts, dtype=torch.int32),
            torch.tensor([pair // idx_TK.shape[1] for pair in pairs], dtype=torch.int32),
            torch.tensor(pairs, dtype=torch.int64),
            place.view(idx_TK.shape),
            torch.tensor([sum(counts[owned.start : owned.stop]) for owned in self.ranges], dtype=torch.int32),
        )

    def runs(
        self, counts_RE: list[list[int]], owner: int, align: int, wave: int | None = None
    ) -> Iterator[tuple[int, int, int, int]]:
        """(source, place in its list, first final row, rows) of all runs at an owner; of a wave: what lies in it."""
        row = 0
        for e in self.ranges[owner]:
            begin = row
            for source in range(self.R):
                low, high = row, row + counts_RE[source][e]
                row = high
                first = low
                if wave is not None:
                    low = max(low, wave * self.layout.recv_rows)
                    high = min(high, (wave + 1) * self.layout.recv_rows)
                if low < high:
                    yield source, sum(counts_RE[source][:e]) + low - first, low, high - low
            row = begin + align_up(row - begin, align)

    def totals(self, counts_RE: list[list[int]], align: int) -> list[int]:
        """Rows that each owner receives, padding included."""
        return [
            sum(align_up(sum(row[e] for row in counts_RE), align) for e in owned) for owned in self.ranges
        ]

    @staticmethod
    def work(entries: Sequence[tuple[int, ...]]) -> Tensor:
        """A work list: entries in the order of the WORK words, the rest 0."""
        rows = [[*entry, *[0] * (8 - len(entry))] for entry in entries] or [[0] * 8]
        return torch.tensor(rows, dtype=torch.int32)

    @staticmethod
    def groups(rows: int, size: int) -> Iterator[tuple[int, int]]:
        """(first, rows) of a run's groups."""
        for first in range(0, rows, size or rows):
            yield first, min(size or rows, rows - first)

    # ------------------------------------------------------------------------------------------------- the call

    def start(self, header: dict[RecordWord, int], payload: Tensor) -> tuple[Any, Any]:
        """Begin a call, publish, await all records: (call, records [R, 32 + words] as lists)."""
        self.meet()
        if self._shared is not None:
            self._shared._used = 4096
        call = self.memory((8,), torch.int64, 0)
        words = self.memory((32,), torch.int32, 0)
        if self.first:
            for word, value in {RecordWord.GENERATION: self.layout.generation, **header}.items():
                words[word] = value
            self.launch(
                begin.begin,
                1,
                {
                    "windows": self.windows_R,
                    "layout": self.vector,
                    "call": call,
                    "header": words,
                    "me": self.me,
                },
                {},
            )
        self.meet()
        kept = call.clone()
        self.run(begin.clear, {"call": kept}, {"R": self.R, "BLOCK": 64})
        self.meet()
        size = len(payload)
        constants = {"R": self.R, "WORDS": size, "WORDS_P": sizes.power_of_two(size, 8), "SYS": False}
        self.run(record.publish, {"call": kept, "header": words, "payload": payload}, constants)
        records = self.memory((self.R, 32 + size), torch.int32, 0)
        self.meet()
        self.run(record.await_records, {"call": kept, "records": records}, constants)
        self.meet()
        return kept, records.tolist()

    def dispatch(
        self,
        x_TH: Tensor,
        idx_TK: Tensor,
        weights_TK: Tensor | None = None,
        *,
        quant: Quant = Quant.NONE,
        align: int = 1,
    ) -> Received:
        """Push rows, take those of others, in as many waves as it takes."""
        T, H = x_TH.shape
        sent = self.sent(idx_TK)
        S = {Quant.NONE: 0, Quant.INT8: 1, Quant.FP8_E4M3: -(-H // 128)}[quant]
        element = torch.int8 if S else x_TH.dtype
        scales_at = align_up(H * element.itemsize, 4)
        pulled = scales_at + 4 * S if S else H * element.itemsize
        weight = torch.float32 if weights_TK is None else weights_TK.dtype
        weight_at = align_up(pulled, 8)
        stride = align_up(
            pulled if weights_TK is None else weight_at + weight.itemsize, self.layout.row_align
        )
        call, records = self.start(
            {
                RecordWord.KIND: Kind.COUNTS,
                RecordWord.TOKENS: T,
                RecordWord.HIDDEN: H,
                RecordWord.DTYPE: DTYPE_CODES[x_TH.dtype],
                RecordWord.QUANT: quant,
                RecordWord.WEIGHT_DTYPE: 0 if weights_TK is None else DTYPE_CODES[weight],
                RecordWord.TOP_K: idx_TK.shape[1],
                RecordWord.MODE: Mode.PUSH,
                RecordWord.PAD_LO: -1,
                RecordWord.PAD_HI: -1,
                RecordWord.ALIGN: align,
                RecordWord.FLAG_ROWS: self.flag_rows,
            },
            sent.counts_E,
        )
        counts_RE = [row[32:] for row in records]
        totals = self.totals(counts_RE, align)
        waves = max(1, *(-(-total // self.layout.recv_rows) for total in totals))
        pushing = [row[RecordWord.MODE] == Mode.PUSH for row in records]
        N = totals[self.me]
        out = self.memory((N, H), element, 0)
        scales = self.memory((N, max(S, 1)), torch.float32, 0)
        out_weights = self.memory((N,), weight, 0)
        self.meet()
        common = {
            "call": call,
            "stride": stride,
            "scales_at": scales_at,
            "weight_at": weight_at,
            "out": out,
            "scales": scales,
        }
        constants = {
            "H": H,
            "QUANT": int(quant),
            "SCALES": S,
            "SCALES_P": sizes.power_of_two(max(S, 1)),
            "WEIGHTED": weights_TK is not None,
            "FUSED": False,
            "BR": 4,
            "BH": min(sizes.power_of_two(H), 64),
            "GPU": False,
            "SYS": False,
            "R": self.R,
        }
        weights_P = torch.zeros(1) if weights_TK is None else weights_TK.reshape(-1)[sent.pairs_P]
        moved = {**common, "x": x_TH, "tokens": sent.tokens_P, "weights": weights_P}
        pull = [
            (source, place, rows, 0, 0, 0, low)
            for source, place, low, rows in self.runs(counts_RE, self.me, align)
            if not pushing[source]
        ]
        if pull:
            places = torch.zeros(self.R, 4, dtype=torch.int64)
            for source, words in enumerate(records):
                x_at = (words[RecordWord.X_HI] << 32) | (words[RecordWord.X_LO] & 0xFFFFFFFF)
                places[source, 0] = self.windows_R[source] + x_at
                places[source, 1], places[source, 2] = words[RecordWord.X_STRIDE], words[RecordWord.TOKENS]
            arguments = {**common, "sources": places, "weights": out_weights, "work": self.work(pull)}
            self.run(take.pull, {**arguments, "entries": len(pull)}, constants)
        listening = torch.tensor([sum(row[e] for e in self.own) for row in counts_RE], dtype=torch.int32)
        for w in range(waves):
            mine = [
                (owner, place, low, rows)
                for owner in range(self.R)
                for source, place, low, rows in self.runs(counts_RE, owner, align, w)
                if source == self.me
            ]
            if w:
                heard = torch.zeros(self.R, dtype=torch.int32)
                heard[[owner for owner, *_ in mine]] = 1
                self.run(wave.hear, {"call": call, "speakers": heard, "kind": 0, "mark": w}, constants)
                self.meet()
            shift = w * self.layout.recv_rows
            entries = [
                (owner, place + first, n, low + first - shift)
                for owner, place, low, rows in mine
                for first, n in self.groups(rows, self.flag_rows)
            ]
            self.run(push.push, {**moved, "work": self.work(entries), "entries": len(entries)}, constants)
            taken = [
                (source, 0, rows, low - shift, 0, 0, low, records[source][RecordWord.FLAG_ROWS])
                for source, _, low, rows in self.runs(counts_RE, self.me, align, w)
                if pushing[source]
            ]
            arguments = {
                **common,
                "weights": out_weights,
                "work": self.work(taken),
                "entries": len(taken),
            }
            self.run(take.take, arguments, constants)
            if w + 1 < waves:
                self.meet()
                rows = min(N - shift, self.layout.recv_rows)
                self.run(wave.clear_flags, {"call": call, "rows": max(rows, 0)}, constants)
                self.meet()
                said = {"call": call, "listeners": listening, "kind": 0, "mark": w + 1}
                self.run(wave.say, said, constants)
        self.meet()
        handle = Handle(call, sent, counts_RE, align)
        return Received(out.clone(), scales.clone()[:, :S], out_weights.clone(), handle)

    def cell(self, y: Tensor) -> Tensor:
        """The body of this rank's combine cells."""
        cell = torch.zeros(8, dtype=torch.int32)
        cell[CellWord.DTYPE], cell[CellWord.HIDDEN] = DTYPE_CODES[y.dtype], y.shape[1]
        cell[CellWord.MODE] = Mode.PUSH
        return cell

    def combine(
        self,
        y_NH: Tensor,
        handle: Handle,
        weights_TK: Tensor | None = None,
        *,
        fetched: bool = False,
        pairs: bool = False,
    ) -> Tensor:
        """Give rows back, sum this rank's: [T, H]; with ``pairs`` the rows themselves, [T * K, H]."""
        H = y_NH.shape[1]
        stride = align_up(y_NH.element_size() * H, self.layout.row_align)
        sent, counts_RE = handle.sent, handle.counts_RE
        self.meet()
        if self._shared is not None:
            self._shared._used = 4096
        place = sent.place_TK.reshape(-1, 1) if pairs else sent.place_TK
        given = self.memory((self.R, 8), torch.int32, 0)
        out = self.memory((len(place), H), y_NH.dtype, float("nan"))
        self.meet()
        common = {
            "call": handle.call,
            "cell": self.cell(y_NH),
            "owned": sent.owned_R,
            "stride": stride,
            "y": y_NH,
        }
        constants = {
            "R": self.R,
            "K": place.shape[1],
            "H": H,
            "WEIGHTED": weights_TK is not None and not pairs,
            "FETCHED": fetched,
            "ACC": sizes.accumulator(y_NH.dtype.itemsize),
            "ROUND": self.rounds,
            "BR": 4,
            "BT": 4,
            "BH": min(sizes.power_of_two(H), 64),
            "SYS": False,
        }
        entries = [(s, at, n, low) for s, at, low, n in self.runs(counts_RE, self.me, handle.align)]
        totals = torch.tensor([sum(row[e] for e in self.own) for row in counts_RE], dtype=torch.int32)
        giving = {**common, "work": self.work(entries), "entries": len(entries), "totals": totals}
        self.run(give.give, {**giving, "given": given}, constants)
        if fetched:
            entries = [
                (owner, at, n, low)
                for owner in range(self.R)
                for source, at, low, n in self.runs(counts_RE, owner, handle.align)
                if source == self.me
            ]
            fetching = {**common, "work": self.work(entries), "entries": len(entries)}
            self.run(combine.fetch, fetching, constants)
            self.meet()
        weights = torch.zeros(1) if weights_TK is None else weights_TK
        summing = {**common, "place": place.contiguous(), "weights": weights, "out": out, "T": len(place)}
        self.run(combine.combine, summing, constants)
        self.meet()
        return out.clone()

    def moe(
        self,
        x_TH: Tensor,
        idx_TK: Tensor,
        weights_TK: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        *,
        launches: tuple[int, ...] = (ALL,),
        vector: bool = False,
        again: Handle | None = None,
    ) -> tuple[Tensor, Handle]:
        """The fused call, in these launches; the experts' own kernel runs between two of them where none does experts.

        With ``launches = (PARTNER,)`` program 0 is the vector-core kernel and program 1 its partner, both of one program.
        """
        (T, H), K, inner = x_TH.shape, idx_TK.shape[1], down.shape[2]
        sent = self.sent(idx_TK)
        beside = launches == (PARTNER,)
        self.meet()
        if self._shared is not None:
            self._shared._used = 4096
        call = self.memory((8,), torch.int64, 0)
        header = self.memory((32,), torch.int32, 0)
        given = self.memory((self.R, 8), torch.int32, 0)
        ready = self.memory((max(len(self.own), 1), 8), torch.int32, 0)
        done = self.memory((max(len(self.own), 1), 8), torch.int32, 0)
        records = self.memory((self.R, 32 + self.E), torch.int32, 0)
        y = self.memory((self.layout.recv_rows, H), x_TH.dtype, float("nan"))
        out = self.memory((T, H), x_TH.dtype, float("nan"))
        words = {
            RecordWord.KIND: Kind.COUNTS,
            RecordWord.GENERATION: self.layout.generation,
            RecordWord.TOKENS: T,
            RecordWord.HIDDEN: H,
            RecordWord.DTYPE: DTYPE_CODES[x_TH.dtype],
            RecordWord.TOP_K: K,
            RecordWord.MODE: Mode.FUSED,
            RecordWord.PAD_LO: -1,
            RecordWord.PAD_HI: -1,
            RecordWord.ALIGN: 1,
            RecordWord.FLAG_ROWS: self.flag_rows,
        }
        if self.first:
            for word, value in words.items():
                header[word] = value
            self.launch(
                begin.begin,
                1,
                {
                    "windows": self.windows_R,
                    "layout": self.vector,
                    "call": call,
                    "header": header,
                    "me": self.me,
                },
                {},
            )
        self.meet()
        call = call.clone()
        self.run(begin.clear, {"call": call}, {"R": self.R, "BLOCK": 64})
        self.meet()
        entries = [
            (owner, int(sent.counts_E[:e].sum()) + first, n, first, e, owned.start)
            for owner, owned in enumerate(self.ranges)
            for e in owned
            if int(sent.counts_E[e])
            for first, n in self.groups(int(sent.counts_E[e]), self.flag_rows)
        ]
        BM = 16
        matrix = self.work([]) if again is None else torch.tensor(again.counts_RE, dtype=torch.int32)
        starts = torch.tensor([*(owned.start for owned in self.ranges), self.E], dtype=torch.int32)
        arguments = {
            "call": call,
            "header": header,
            "counts": sent.counts_E,
            "starts": starts,
            "owned": sent.owned_R,
            "x": x_TH,
            "tokens": sent.tokens_P,
            "work": self.work(entries),
            "place": sent.place_TK,
            "weights": torch.zeros(1) if weights_TK is None else weights_TK,
            "gate_up": gate_up,
            "down": down,
            "act": torch.zeros(self.programs * BM * inner, dtype=x_TH.dtype),
            "y": y,
            "cell": self.cell(y),
            "given": given,
            "ready": ready,
            "done": done,
            "records": records,
            "matrix": matrix,
            "out": out,
            "entries": len(entries),
            "T": T,
            "stride": align_up(x_TH.element_size() * H, self.layout.row_align),
        }
        constants = {
            **self.words,
            "K": K,
            "H": H,
            "I": inner,
            "WEIGHTED": weights_TK is not None,
            "REUSED": again is not None,
            "PARTNER": beside,
            "VECTOR": vector,
            "PARTS": 2,
            "ACC": sizes.accumulator(x_TH.dtype.itemsize),
            "DOT": sizes.accumulator(x_TH.dtype.itemsize),
            "ROUND": self.rounds,
            "BM": BM,
            "BN": 16,
            "BK": 32,
            "BR": 4,
            "BT": 4,
            "BH": min(sizes.power_of_two(H), 64),
            "GPU": False,
            "SYS": False,
            "IN_WINDOW": True,
        }
        if beside:
            self._beside(arguments, constants)
        else:
            for number, phases in enumerate(launches):
                if number:
                    self.meet()
                self.run(fused.fused, arguments, {**constants, "PHASES": phases})
                if not any(each & DO_EXPERTS.value for each in launches) and not number:
                    self.meet()
                    self._experts(arguments, constants, 0, len(self.own))
        self.meet()
        handle = Handle(call, sent, [row[32:] for row in records.tolist()], 1)
        return out.clone(), handle

    def _experts(self, arguments: dict[str, Any], constants: dict[str, Any], first: int, last: int) -> None:
        """The kernel of the experts alone, on rows in the window."""
        more = {
            "matrix": arguments["records"].reshape(-1)[32:],
            "matrix_stride": 32 + self.E,
            "x_stride": arguments["stride"] // arguments["x"].element_size(),
            "first_expert": self.own.start,
            "first": first,
            "last": last,
            "align": 1,
        }
        self.run(experts.experts, {**arguments, **more}, constants)

    def _beside(self, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
        """Program 0 is the fused kernel without experts, program 1 what runs beside it, expert by expert."""
        program, programs = self._program, self.programs
        assert programs == 2 and program is not None
        self._program, self.programs = 0, 1
        try:
            if program == 0:
                self.run(fused.fused, arguments, {**constants, "PHASES": PARTNER, "VECTOR": True})
            else:
                for local in range(len(self.own)):
                    some = {**arguments, "first": local, "last": local + 1}
                    self.run(partner.gate, some, constants)
                    self._experts(arguments, constants, local, local + 1)
                    self.run(partner.finish, some, constants)
        finally:
            self._program, self.programs = program, programs
