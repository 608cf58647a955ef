"""The phases of a call, each a launch: what a kernel is handed, and what the host reads of its outcome.

Work lists and addresses are made here, in torch, from the layout and the places of a call; a kernel adds and copies.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows, P pairs of this rank, M pieces of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..heap import SymmetricHeap
from ..layout import (
    CELL_BODY_WORDS,
    CODE_BLOCK,
    RECORD_HEADER_WORDS,
    Quant,
    RecordWord,
    Wave,
    WindowLayout,
    align_up,
)
from ..quant import QUANT_DTYPES, QUANT_NAMES, scales_shape
from ..tiling import Phase
from .launch import Launcher, kernels
from .peers import release
from .record import Cell, Record, RowForm
from .routing import HOST, Pairs, Runs

_HEADER_ROOM = 32  # int32 words from a record's header to its payload
_WORK_WORDS = 8
_STATE_WORDS = 8
_CALL_WORDS = 8
_CLEARED_AT_ONCE = 1024  # int32
FLAG_ROWS = 16  # rows that share a flag where this rank pushes


def _power(value: int, least: int = 1) -> int:
    """The smallest power of two that isn't below either."""
    return 1 << (max(value, least) - 1).bit_length()


def _travelling(tensor: Tensor) -> Tensor:
    """As kernels see it: an fp8 value is a byte."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


@dataclass(frozen=True)
class Source:
    """The rows that a rank sends in a call.

    Attributes:
        x: [T, H], contiguous.
        tokens_P: int32, the token of each pair in the list.
        weights_P: the weights that travel, in the list's order, or None.
        quant: Quant.
    """

    x: Tensor
    tokens_P: Tensor
    weights_P: Tensor | None
    quant: int

    @property
    def _dtype(self) -> torch.dtype:
        return QUANT_DTYPES[QUANT_NAMES[self.quant]] if self.quant else self.x.dtype

    @property
    def scales(self) -> int:
        """Scales of a row."""
        hidden = self.x.shape[1]
        return {Quant.NONE: 0, Quant.INT8: 1}.get(Quant(self.quant), -(-hidden // 128))

    @property
    def form(self) -> RowForm:
        weight = 0 if self.weights_P is None else self.weights_P.element_size()
        return RowForm(self.x.shape[1] * self._dtype.itemsize, self.scales, weight)

    def new_outputs(
        self, rows: int, make: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(rows, scales or None, weights or None) for ``rows`` rows; ``make`` is torch.empty or torch.zeros."""
        device = self.x.device
        out = make(rows, self.x.shape[1], dtype=self._dtype, device=device)
        scales = weights = None
        if self.quant:
            shape = scales_shape(QUANT_NAMES[self.quant], rows, self.x.shape[1])
            scales = make(shape, dtype=torch.float32, device=device)
        if self.weights_P is not None:
            weights = make(rows, dtype=self.weights_P.dtype, device=device)
        return out, scales, weights


class Phases:
    """Launches the kernels of one group on one rank.

    Args:
        layout: of the windows. heap: the windows. launcher: what runs kernels.
    """

    def __init__(self, layout: WindowLayout, heap: SymmetricHeap, launcher: Launcher) -> None:
        self._layout, self._heap, self._launcher = layout, heap, launcher
        self._kernels = kernels()
        self._rank, self._ranks = heap.rank, heap.world_size
        own = heap.block(heap.rank)
        self._own, self._device = own, own.device
        self._windows = torch.tensor(heap.addresses, dtype=torch.int64, device=self._device)
        self._params = torch.tensor(layout.params(), dtype=torch.int64, device=self._device)
        self._machine = launcher.machine

    def close(self) -> None:
        """Lets go of the windows."""
        del self._own

    def launches(self) -> dict[str, int]:
        """How often each kernel was launched."""
        return dict(getattr(self._launcher, "launches", {}))

    # ------------------------------------------------------------------------------------------------- launching

    def _launch(self, kernel: Any, items: int, args: dict[str, Any], **constants: Any) -> None:
        """Launches on as many programs as there are items, or run at once.

        ``args`` may be given in any order; windows, layout, me, program0, programs, polls and SYS are added where a kernel has
        them.
        """
        programs = max(1, min(items, self._machine.programs))
        common = {
            "windows": self._windows,
            "layout": self._params,
            "me": self._rank,
            "program0": 0,
            "programs": programs,
            "polls": self._machine.polls,
            "SYS": self._machine.gpu,
            "GPU": self._machine.gpu,
            "ROUND": self._machine.rounds,
            "R": self._ranks,
        }
        given = {**common, **args, **constants}
        named = {name: given[name] for name in kernel.arg_names}
        fixed = {name: named.pop(name) for name in list(named) if name.isupper()}
        self._launcher.launch(kernel, programs, named, fixed)

    def _state(self, items: int) -> Tensor:
        """int32 [programs, 8]: what a kernel that polls leaves behind, for the next launch of it."""
        return self._zeros(max(1, min(items, self._machine.programs)), _STATE_WORDS)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def _errors(self, state: Tensor) -> set[int]:
        """The errors that programs have left, which are taken back: waits for the launch."""
        errors = set(state[:, 0].tolist()) - {0}
        if errors:
            state[:, 0] = 0
        return errors

    def _tile(self, phase: Phase, rows: Tensor) -> dict[str, int]:
        """BR and BH for rows like those of [*, H]."""
        tile = self._machine.tile(phase, rows.shape[1], rows.element_size(), FLAG_ROWS)
        return {"BR": tile[0], "BH": tile[1]}

    def _work(self, rank_M: Tensor, runs: Runs, out_M: Tensor | None = None) -> Tensor:
        """int32 [M, 8], the WORK words; ``rank_M``: the other rank of each piece."""
        work = torch.zeros(len(runs), _WORK_WORDS, dtype=torch.int32, device=HOST)
        work[:, 0], work[:, 1], work[:, 2], work[:, 3] = rank_M, runs.place_M, runs.count_M, runs.row_M
        if out_M is not None:
            work[:, 6] = out_M
        return work.to(self._device)

    # ----------------------------------------------------------------------------------------------- of the call

    def call_words(self, n: int) -> Tensor:
        """int64 [8], what kernels are told of call n."""
        layout = self._layout
        before = max(n - 2 * layout.slots, 1)
        words = [0] * _CALL_WORDS
        words[:5] = [
            n,
            layout.code(n),
            n % layout.slots,
            n % layout.record_slots,
            int(layout.lap(n) != layout.lap(before)),
        ]
        return torch.tensor(words, dtype=torch.int64, device=self._device)

    def clear(self, call: Tensor) -> None:
        """Zeroes the codes of the call's slot in the own window, if they are of the lap before."""
        self._launch(
            self._kernels.begin.clear, self._machine.programs, {"call": call}, BLOCK=_CLEARED_AT_ONCE
        )

    def publish(self, call: Tensor, header: Sequence[int], payload: Tensor | Sequence[int] | None) -> None:
        """Writes this rank's record into every window.

        Args:
            payload: send counts [E], or the words of a text; None for none.
        """
        if payload is None:
            payload = self._zeros(1)
        elif isinstance(payload, Tensor):
            payload = payload.int()
        else:
            payload = self._int32([*payload, *[0] * (self._layout.record_payload_bytes // 4 - len(payload))])
        words = len(payload)
        head = self._int32([*header, *[0] * (_HEADER_ROOM - RECORD_HEADER_WORDS)])
        self._launch(
            self._kernels.record.publish,
            self._ranks,
            {"call": call, "header": head, "payload": payload},
            WORDS=words,
            WORDS_P=_power(words, 8),
        )

    def await_records(self, call: Tensor) -> AwaitedRecords:
        """The records of all ranks; see there."""
        return AwaitedRecords(self, call)

    # ------------------------------------------------------------------------------------------------------ rows

    def push(self, call: Tensor, source: Source, runs: Runs, fused: bool) -> None:
        """Writes pieces of this rank's rows into their owners' windows, with a flag each."""
        form = source.form
        bytes_of_row = form.element_bytes if fused else form.pushed_bytes
        hidden = source.x.shape[1]
        self._launch(
            self._kernels.push.push,
            len(runs),
            {
                "call": call,
                "x": source.x,
                "tokens": source.tokens_P,
                "weights": source.x if source.weights_P is None else source.weights_P,
                "work": self._work(runs.owner_M, runs),
                "state": self._state(len(runs)),
                "entries": len(runs),
                "stride": align_up(bytes_of_row, self._layout.row_align),
                "scales_at": form.scales_at,
                "weight_at": form.weight_at,
            },
            H=hidden,
            FUSED=fused,
            QUANT=source.quant,
            WEIGHTED=source.weights_P is not None,
            **self._tile("quantise" if source.quant else "copy", source.x),
        )

    def _outputs(
        self, source: Source, out: Tensor, scales: Tensor | None, weights: Tensor | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments, constants) that say where rows go which are taken or pulled."""
        hidden = source.x.shape[1]
        args = {
            "out": _travelling(out),
            "scales": out if scales is None else scales,
            "weights": out if weights is None else weights,
            "scales_at": source.form.scales_at,
        }
        if scales is None:
            args["scales"] = _travelling(out)
        if weights is None:
            args["weights"] = _travelling(out)
        constants = {
            "H": hidden,
            "SCALES": source.scales,
            "SCALES_P": _power(source.scales),
            "WEIGHTED": weights is not None,
            **self._tile("copy", out),
        }
        return args, constants

    def pull(
        self,
        call: Tensor,
        source: Source,
        runs: Runs,
        records: Sequence[Record],
        out: Tensor,
        scales: Tensor | None,
        weights: Tensor | None,
    ) -> int | None:
        """Gathers pieces that their sources left to be pulled. Returns a rank whose token list is wrong, or None."""
        sources = torch.tensor(
            [
                (address + record.x, record.x_stride, record.tokens, 0)
                for address, record in zip(self._heap.addresses, records, strict=True)
            ],
            dtype=torch.int64,
            device=self._device,
        )
        args, constants = self._outputs(source, out, scales, weights)
        state = self._state(len(runs))
        self._launch(
            self._kernels.take.pull,
            len(runs),
            {
                "call": call,
                "sources": sources,
                "work": self._work(runs.source_M, runs, runs.row_M),
                "state": state,
                "entries": len(runs),
                **args,
            },
            **constants,
        )
        wrong = state[:, 0] != 0
        return int(state[wrong][0, 3]) if bool(wrong.any()) else None

    def take(
        self,
        call: Tensor,
        source: Source,
        runs: Runs,
        first: int,
        fused: bool,
        out: Tensor,
        scales: Tensor | None,
        weights: Tensor | None,
    ) -> Callable[[set[int]], set[int]]:
        """Takes pieces that are pushed here. Returns what launches: (sources missing) -> sources still missing.

        Args:
            first: row of ``out`` of the slot's row 0.
        """
        form = source.form
        bytes_of_row = form.element_bytes if fused else form.pushed_bytes
        args, constants = self._outputs(source, out, scales, weights)
        state = self._state(len(runs))
        args |= {
            "call": call,
            "work": self._work(runs.source_M, runs, runs.row_M + first),
            "state": state,
            "entries": len(runs),
            "stride": align_up(bytes_of_row, self._layout.row_align),
            "weight_at": form.weight_at,
        }
        layout, code = self._layout, int(call[1])
        flags_at = layout.row_flag + int(call[2]) * layout.row_flag_slot_stride

        def attempt(missing: set[int]) -> set[int]:
            self._launch(self._kernels.take.take, len(runs), args, FUSED=fused, **constants)
            if not self._errors(state):
                return set()
            flags = self._blocks(flags_at + runs.flag_M * layout.row_flag_stride)
            absent_M = (flags != code).any(1)
            # A program that gave up hasn't copied what came since: its sources are missing until a launch has.
            return missing & set(runs.source_M[absent_M].tolist()) or missing

        return attempt

    def clear_flags(self, call: Tensor, runs: Runs) -> None:
        """Zeroes the row flags of a wave that was taken."""
        rows = int((runs.row_M + runs.count_M).max()) if len(runs) else 0
        if rows:
            self._launch(self._kernels.wave.clear_flags, rows, {"call": call, "rows": rows})

    def say(self, call: Tensor, kind: Wave, listeners: Sequence[int], mark: int) -> None:
        """Writes a watermark into the wave cells of ``listeners``."""
        if listeners:
            args = {"call": call, "listeners": self._mask(listeners), "kind": int(kind), "mark": mark}
            self._launch(self._kernels.wave.say, self._ranks, args)

    def unread(self, call: Tensor, kind: Wave, speakers: set[int], mark: int) -> set[int]:
        """Those of ``speakers`` whose watermark isn't at least ``mark`` yet."""
        state = self._state(self._ranks)
        args = {
            "call": call,
            "speakers": self._mask(speakers),
            "state": state,
            "kind": int(kind),
            "mark": mark,
        }
        self._launch(self._kernels.wave.hear, self._ranks, args)
        if not self._errors(state):
            return set()
        layout, ranks = self._layout, sorted(speakers)
        at = layout.wave + int(call[2]) * layout.wave_slot_stride + int(kind) * layout.wave_kind_stride
        cells = at + torch.tensor(ranks, device=HOST) * layout.wave_stride
        codes = self._blocks(cells + layout.wave_code)
        marks = self._blocks(cells + layout.wave_mark)
        here = (codes == int(call[1])).all(1) & (marks == marks[:, :1]).all(1) & (marks[:, 0] >= mark)
        return {rank for rank, there in zip(ranks, here.tolist(), strict=True) if not there}

    def _mask(self, ranks: Sequence[int] | set[int]) -> Tensor:
        """int32 [R], 1 for these ranks."""
        return self._int32([int(rank in ranks) for rank in range(self._ranks)])

    # --------------------------------------------------------------------------------------------------- combine

    def give(
        self, call: Tensor, y: Tensor, runs: Runs, sources: Sequence[int], cell: Sequence[int]
    ) -> Callable[[set[int]], set[int]]:
        """Writes pieces of y into the z of their sources, this rank's own included, then the cells of ``sources``.

        Returns what launches, as :meth:`take`: it waits for nobody but programs of its own launch.
        """
        totals = [0] * self._ranks
        for source in sources:
            totals[source] = int(runs.count_M[runs.source_M == source].sum())
        state = self._state(max(len(runs), self._ranks))
        args = {
            "call": call,
            "y": y,
            "cell": self._int32(cell),
            "work": self._work(runs.source_M, runs),
            "totals": self._int32(totals),
            "given": self._zeros(self._ranks, CODE_BLOCK // 4),
            "state": state,
            "entries": len(runs),
            "stride": self._z_stride(y),
        }

        def attempt(missing: set[int]) -> set[int]:
            items = max(len(runs), self._ranks)
            self._launch(self._kernels.give.give, items, args, H=y.shape[1], **self._tile("copy", y))
            return missing if self._errors(state) else set()

        return attempt

    def _z_stride(self, y: Tensor) -> int:
        return self._layout.row_stride(y.shape[1], y.element_size())

    def refuse(self, call: Tensor, sources: Sequence[int], body: Sequence[int], text: Sequence[int]) -> None:
        """Writes refusals into the combine cells of ``sources``."""
        layout, code = self._layout, int(call[1])
        at = layout.cell + int(call[2]) * layout.cell_slot_stride + self._rank * layout.cell_stride
        for source in sources:
            words = self._heap.block(source)[at : at + layout.cell_stride].view(torch.int32)
            for offset, part in ((layout.cell_body, body), (layout.cell_text, text)):
                words[offset // 4 : offset // 4 + len(part)] = self._int32(part)
            release()
            words[layout.cell_code // 4 : (layout.cell_code + CODE_BLOCK) // 4] = -code

    def fetch(self, call: Tensor, y: Tensor, runs: Runs, cells: dict[int, Cell]) -> None:
        """Copies pieces that owners left in their y into the own z."""
        owners = set(runs.owner_M.tolist())
        state = self._state(len(runs))
        self._launch(
            self._kernels.combine.fetch,
            len(runs),
            {
                "call": call,
                "y": y,
                "cell": self._int32(cells[min(owners)].words()),
                "owned": self._mask(owners),
                "work": self._work(runs.owner_M, runs),
                "state": state,
                "entries": len(runs),
                "stride": self._z_stride(y),
            },
            H=y.shape[1],
            **self._tile("copy", y),
        )
        assert not self._errors(state), "cells that were here have gone"

    def combine(
        self,
        call: Tensor,
        pairs: Pairs,
        y: Tensor,
        weights: Tensor | None,
        separate: bool,
        owners: set[int],
        cell: Sequence[int],
    ) -> Combining:
        """The sum of rows in z; see there."""
        return Combining(self, call, pairs, y, weights, separate, owners, cell)

    # ------------------------------------------------------------------------------------- what the host looks at

    def _blocks(self, offsets_M: Tensor) -> Tensor:
        """int32 [M, 8]: the blocks at these bytes of the own window."""
        words = self._own.view(torch.int32)
        at = (offsets_M // 4)[:, None] + torch.arange(CODE_BLOCK // 4, device=HOST)
        return words[at.to(self._device)].cpu()

    def words_at(self, offset: int, count: int) -> list[int]:
        """int32 words of the own window."""
        words: list[int] = self._own[offset : offset + 4 * count].view(torch.int32).tolist()
        return words


class AwaitedRecords:
    """The records of a call, while they come and when they are here."""

    def __init__(self, phases: Phases, call: Tensor) -> None:
        self._phases, self._call = phases, call
        layout = phases._layout
        self._counts = layout.num_experts
        self._at = layout.record + int(call[3]) * layout.record_slot_stride
        self._records = phases._zeros(phases._ranks, _HEADER_ROOM + self._counts)
        self._state = phases._state(phases._ranks)

    def missing(self) -> set[int]:
        """Launches a wait; returns ranks whose record isn't here."""
        phases = self._phases
        phases._launch(
            phases._kernels.record.await_records,
            phases._ranks,
            {"call": self._call, "records": self._records, "state": self._state},
            WORDS=self._counts,
            WORDS_P=_power(self._counts, 8),
        )
        if not phases._errors(self._state):
            return set()
        # What isn't here hasn't been copied.
        kinds_R = self._records[:, RecordWord.KIND].tolist()
        return {rank for rank, kind in enumerate(kinds_R) if kind == 0}

    def header(self, rank: int) -> Record:
        """The header of a record that is here."""
        return Record.of(self._records[rank, :RECORD_HEADER_WORDS].tolist())

    def text(self, rank: int) -> list[int]:
        """The payload of a record that is here, as words: an ABORT's text."""
        layout = self._phases._layout
        at = self._at + rank * layout.record_stride + layout.record_payload
        return self._phases.words_at(at, layout.record_payload_bytes // 4)

    def copied(self) -> tuple[list[list[int]], Tensor]:
        """All headers as words, and the send counts int32 [R, E] on the CPU, when nothing is missing."""
        records = self._records.cpu()
        return records[:, :RECORD_HEADER_WORDS].tolist(), records[:, _HEADER_ROOM:]


class Combining:
    """Sums the rows in z once the cells of their owners are here.

    Args:
        y: [N, H], this rank's own; its type and H are those of all rows.
        weights: [T, K], or None.
        separate: the rows aren't summed.
        owners: other ranks that hold rows of this one. cell: this rank's own cell, which theirs are compared with.

    Attributes:
        done: whether ``out`` is made.
        out: [T, H]; [T, K * H] where rows aren't summed.
    """

    def __init__(
        self,
        phases: Phases,
        call: Tensor,
        pairs: Pairs,
        y: Tensor,
        weights: Tensor | None,
        separate: bool,
        owners: set[int],
        cell: Sequence[int],
    ) -> None:
        self._phases, self._code, self._owners = phases, int(call[1]), sorted(owners)
        layout = phases._layout
        self._at = layout.cell + int(call[2]) * layout.cell_slot_stride
        (tokens, top_k), hidden = pairs.expert_TK.shape, y.shape[1]
        rows, self._terms = (tokens * top_k, 1) if separate else (tokens, top_k)
        self._rows = y.new_empty(rows, hidden)
        self.out = self._rows.view(tokens, top_k * hidden) if separate else self._rows
        self.done = False
        place_TK = torch.where(pairs.expert_TK < 0, -1, pairs.place_TK).int()
        tile = phases._machine.tile("sum", hidden, y.element_size(), rows)
        self._args = {
            "call": call,
            "place": place_TK.contiguous(),
            "weights": y if weights is None else weights,
            "out": self._rows,
            "cell": phases._int32(cell),
            "owned": phases._mask(owners),
            "T": rows,
            "stride": phases._z_stride(y),
        }
        self._constants = {
            "K": self._terms,
            "H": hidden,
            "WEIGHTED": weights is not None,
            "ACC": phases._kernels.catalogue.accumulator(y.element_size()),
            "BT": tile[0],
            "BH": tile[1],
        }
        self._state = phases._state(rows)

    def missing(self) -> set[int]:
        """Launches; returns owners whose cell isn't here. With none left and not ``done``, the cells want a look."""
        if self._launch(self._state, fetched=False):
            return set()
        layout, owners = self._phases._layout, torch.tensor(self._owners, device=HOST)
        codes = self._phases._blocks(self._at + owners * layout.cell_stride + layout.cell_code)
        here = ((codes == self._code) | (codes == -self._code)).all(1) & (codes == codes[:, :1]).all(1)
        return set(owners[~here].tolist())

    def finish(self) -> None:
        """Sums when all rows stand in z, whatever the cells say of where they were."""
        self._launch(self._phases._state(len(self._rows)), fetched=True)
        assert self.done, "cells that were here have gone"

    def _launch(self, state: Tensor, fetched: bool) -> bool:
        if self._terms == 0 and len(self._rows):
            self._rows.zero_()
        args = {**self._args, "state": state}
        self._phases._launch(
            self._phases._kernels.combine.combine,
            len(self._rows),
            args,
            FETCHED=fetched,
            **self._constants,
        )
        self.done = not self._phases._errors(state)
        return self.done

    def cell(self, owner: int) -> tuple[list[int], bool]:
        """(body and text as words, whether it is a refusal) of a cell that is here."""
        layout = self._phases._layout
        at = self._at + owner * layout.cell_stride
        words = self._phases.words_at(at + layout.cell_body, CELL_BODY_WORDS + layout.cell_text_bytes // 4)
        return words, self._phases.words_at(at + layout.cell_code, 1)[0] == -self._code
