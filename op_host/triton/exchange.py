"""The calls of a Triton rank: what a rank does by docs/protocol.md, with kernels for what is hot.

The host validates, decides, waits and names errors; kernels write records, rows, flags and cells, and read them. A Triton rank
pushes whatever it has to send, and takes what its peers push, or, when they are CPU ranks that pull, leave to be taken.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows, P = T * K pairs, NS slots (``depth``).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import (
    BadValue,
    CallMismatch,
    GroupBusy,
    GroupClosed,
    MoeA2AError,
    PadTooSmall,
    PeerAborted,
    PeerLost,
    failure_number,
)
from ...reference import (
    Exchange,
    Limits,
    check_combine_rows,
    check_combine_weights,
    check_dispatch,
    check_options,
    named_error,
    quantized_rows,
)
from ..heap import SymmetricHeap
from ..layout import (
    CELL_TEXT_BYTES,
    CODE_DTYPES,
    COMBINE_WEIGHTS,
    DTYPE_CODES,
    GRADIENT_BITS,
    SCALAR_BYTES,
    CellWord,
    HandleView,
    Kind,
    Mode,
    Phase,
    Wave,
    WindowLayout,
    ids_digest,
    pack_handle,
)
from ..quant import QUANT_NAMES
from .peers import Peers
from .phases import FLAG_ROWS, AwaitedRecords, Combining, Phases, Source
from .record import (
    Cell,
    Record,
    clip_text,
    differs,
    routing_digest,
    rows_fit,
    text_of,
    words_of,
)
from .routing import HOST, Geometry, Pairs, Places, Runs, rows_of, sort_pairs

DISPATCH, COMBINE, MOE = "moe_a2a.dispatch", "moe_a2a.combine", "moe_a2a.moe"
BACKWARD = "moe_a2a (backward)"
_USABLE = "Nothing was exchanged; the group stays usable"


class _Stage(enum.Enum):
    """How far a call is."""

    SENT = enum.auto()  # its record is out
    MET = enum.auto()  # the records of all ranks are here and go together
    OPEN = enum.auto()  # it can be combined
    CLOSED = enum.auto()
    FAILED = enum.auto()


@dataclass
class _Call:
    """A call of this rank, as far as it has come."""

    n: int
    operation: str
    words: Tensor  # what kernels are told of it, int64
    stage: _Stage = _Stage.FAILED  # until its record is out
    failure: MoeA2AError | None = None
    record: Record | None = None
    pairs: Pairs | None = None
    source: Source | None = None  # the rows it sends; None in a round
    matrix_RE: Tensor | None = None  # of a routing that is used again
    # Since all records were here:
    records: list[Record] = field(default_factory=list)
    places: Places | None = None
    waves: int = 1
    gradients: int = 0

    @property
    def combining(self) -> str:
        """What its combine is called in errors."""
        return COMBINE if self.operation == DISPATCH else self.operation


@dataclass
class _Counters:
    dispatches: int = 0
    combines: int = 0
    pushes: int = 0
    waves: int = 0
    sent_rows: int = 0
    received_rows: int = 0
    copied: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "dispatch_in",
                "dispatch_out",
                "combine_in",
                "combine_out",
                "dispatch_push",
                "combine_push",
            ),
            0,
        )
    )


class TritonExchange(Exchange):
    """A group's calls on a Triton rank. Arguments, results and errors of the calls are those of the other exchanges.

    Args:
        layout: of the windows: portable, with the regions for pushing.
        heap: the windows; closed with the exchange.
        limits: what arguments are checked against.
        phases: launches the kernels.
        name: of the group, for errors.
        timeout, warmup_timeout: seconds, as EPGroup takes them.
        first_epoch: number of the first call.
    """

    def __init__(
        self,
        layout: WindowLayout,
        heap: SymmetricHeap,
        limits: Limits,
        phases: Phases,
        *,
        name: str,
        timeout: float,
        warmup_timeout: float,
        first_epoch: int = 1,
    ) -> None:
        super().__init__(heap.rank, heap.world_size, layout.slots, limits)
        self.name = name
        self._layout, self._heap, self._phases = layout, heap, phases
        self._peers = Peers(layout, heap, timeout, warmup_timeout)
        self._geometry = Geometry(limits.num_experts, heap.world_size)
        self._epoch = self._heard = first_epoch - 1
        self._peers.epoch = first_epoch - 1
        self._calls: dict[int, _Call] = {}
        self._counters = _Counters()
        self._rows_E = torch.zeros(len(self._experts[self.rank]), dtype=torch.int64, device=HOST)
        self._matrix_RE = torch.zeros(heap.world_size, limits.num_experts, dtype=torch.int32, device=HOST)
        self._closed = False
        self._process = os.getpid()
        self._turns = threading.Lock()
        self._holder: int | None = None  # the thread whose call it is

    # -------------------------------------------------------------------------------------------------- dispatch

    @torch.no_grad()
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        routing: Tensor | None = None,
        tag: int = 0,
        pad_to: int = -1,
        align: int = 1,
        quant: int = 0,
        gradients: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sends every token's row to the owners of its experts, and receives. Collective."""
        with self._turn(DISPATCH):
            call = self._send(
                DISPATCH,
                functools.partial(
                    self._prepare,
                    x=x,
                    topk_idx=topk_idx,
                    topk_weights=topk_weights,
                    routing=routing,
                    tag=tag,
                    pad_to=pad_to,
                    align=align,
                    quant=quant,
                    gradients=gradients,
                ),
            )
            self._meet(call)
            return self._receive(call)

    @torch.no_grad()
    def begin_moe(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, tag: int, gradients: int
    ) -> tuple[Tensor, Tensor]:
        """The first half of a fused call: this rank's rows go to their owners."""
        with self._turn(MOE):
            call = self._send(
                MOE,
                functools.partial(
                    self._prepare,
                    x=x,
                    topk_idx=topk_idx,
                    topk_weights=topk_weights,
                    tag=tag,
                    gradients=gradients,
                    fused=True,
                ),
            )
            self._meet(call)
            if call.waves > 1:  # every wave needs the one before to be read, so they can't wait
                rows, _, _, meta = self._receive(call)
                return rows, meta
            assert call.places is not None
            self._push(call, 0)
            rows = self._new_rows(call, call.places.totals_R[self.rank])[0]
            return rows, self._open_call(call, len(rows))

    @torch.no_grad()
    def arrive(self, rows: Tensor, meta: Tensor) -> None:
        """Waits for the rows of a fused call and copies them into ``rows``, of :meth:`begin_moe`."""
        with self._turn(MOE):
            call = self._calls[self._open_handle(meta, whole=False).epoch]
            if call.waves == 1:
                self._take_own(call, rows, None, None)
                self._take(call, 0, rows, None, None)
                self._peers.verdict(None)

    def abort(self, failure: Exception) -> None:
        """Uses up the next call on all ranks, for bad input that was found before: they raise PeerAborted."""

        def fail(_: _Call) -> None:
            raise failure

        with self._turn(DISPATCH), contextlib.suppress(type(failure)):
            self._send(DISPATCH, fail)

    def _send(self, operation: str, prepare: Callable[[_Call], None]) -> _Call:
        """Steps 1 to 5: the record of a new call, or an ABORT and the error that ``prepare`` raised."""
        self._check_usable(operation)
        n = self._epoch + 1
        # Only a rank that has read all records of n - NS may publish n: no peer is then more than 2 NS ahead of a record that
        # somebody hasn't read.
        self._hear(n - self.depth, operation)
        self._peers.epoch = self._epoch = n
        self._expire()
        call = self._calls[n] = _Call(n, operation, self._phases.call_words(n))
        self._calls.pop(n - 2 * self.depth, None)
        self._peers.phase(Phase.DISPATCH_PACK)
        before = n - 2 * self.depth
        if self._layout.lap(n) != (self._layout.lap(before) if before > 0 else 0):
            self._phases.clear(call.words)
        try:
            prepare(call)
        except Exception as error:  # whatever stops this rank, its peers must hear of it
            failure = named_error(operation, error, self.rank)
            text = clip_text(str(failure), self._layout.record_payload_bytes)
            record = self._record(
                call, Kind.ABORT, reason=failure_number(failure), text_bytes=len(text), pad_to=0, align=0
            )
            self._phases.publish(call.words, record.words(), words_of(text))
            raise self._fail(call, failure) from failure.__cause__
        assert call.record is not None and call.pairs is not None
        again = call.record.routing != 0
        counts_E = None if again else call.pairs.counts_E
        self._phases.publish(call.words, call.record.words(), counts_E)
        call.stage = _Stage.SENT
        self._peers.phase(Phase.DISPATCH_COUNTS)
        return call

    def _record(self, call: _Call, kind: Kind, **fields: int) -> Record:
        # Whatever this rank takes from its peers it has taken when a call returns.
        return Record(int(kind), self._layout.generation, call.n, read=call.n - 1, **fields)

    def _prepare(
        self,
        call: _Call,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        routing: Tensor | None = None,
        tag: int = 0,
        pad_to: int = -1,
        align: int = 1,
        quant: int = 0,
        gradients: int = 0,
        fused: bool = False,
    ) -> None:
        """Validates the arguments of a call with rows and sorts its pairs. Writes to nobody."""
        ids_TK, again = self._routing_of(topk_idx, routing)
        check_dispatch(x, ids_TK, topk_weights, self._limits, self.rank, call.operation)
        check_options(pad_to, align, quant, self.rank)
        assert isinstance(ids_TK, Tensor)
        self._use_routing(call, ids_TK, again)
        assert call.pairs is not None
        weights_P = None
        if topk_weights is not None and not fused:  # a fused call's are applied in combine
            weights_P = topk_weights.detach().reshape(-1)[call.pairs.order_P]
        call.source = Source(x.detach().contiguous(), call.pairs.token_P.int(), weights_P, quant)
        call.record = self._record(
            call,
            Kind.COUNTS,
            tokens=x.shape[0],
            hidden=x.shape[1],
            dtype=DTYPE_CODES[x.dtype],
            quant=quant,
            weight_dtype=0 if weights_P is None else DTYPE_CODES[weights_P.dtype],
            top_k=ids_TK.shape[1],
            mode=Mode.FUSED if fused else Mode.PUSH,
            pad_to=pad_to,
            align=align,
            tag=tag,
            flag_rows=FLAG_ROWS,
            routing=self._digest_of(again),
            gradients=gradients,
            ids=int(ids_digest(ids_TK)),
        )

    def _use_routing(self, call: _Call, ids_TK: Tensor, again: HandleView | None) -> None:
        call.pairs = sort_pairs(ids_TK, self._limits.num_experts)
        call.matrix_RE = None if again is None else again.counts_RE.clone()

    @staticmethod
    def _digest_of(again: HandleView | None) -> int:
        return 0 if again is None else routing_digest(again.counts_RE.flatten().tolist(), again.epoch)

    # --------------------------------------------------------------------------------------------------- records

    def _hear(self, n: int, operation: str, asked: _Call | None = None) -> None:
        """Waits for the records of all calls up to n; an ABORT of the one that is asked for ends the wait at once."""
        while self._heard < n:
            m = self._heard + 1
            call = self._calls.get(m)
            waiting = self._phases.await_records(self._phases.call_words(m))

            def attempt(
                missing: set[int],
                waiting: AwaitedRecords = waiting,
                call: _Call | None = call,
            ) -> set[int]:
                left = missing & waiting.missing()
                if call is not None and call is asked and call.stage is _Stage.SENT:
                    for peer in missing - left:
                        if waiting.header(peer).kind == Kind.ABORT:
                            raise self._aborted(call, peer, waiting)
                return left

            self._peers.wait(self._peers.others, m, operation, Phase.DISPATCH_COUNTS, attempt)
            self._heard = m
            if call is not None and call.stage is _Stage.SENT:
                self._judge(call, waiting)

    def _aborted(self, call: _Call, peer: int, waiting: AwaitedRecords) -> MoeA2AError:
        text = text_of(waiting.text(peer), waiting.header(peer).text_bytes)
        return self._fail(
            call, PeerAborted(f"{self._where(call)}: rank {peer} aborted the call: {text}. {_USABLE}")
        )

    def _fail(self, call: _Call, failure: MoeA2AError) -> MoeA2AError:
        """Ends a call without rows; the number is used up."""
        call.stage, call.failure = _Stage.FAILED, failure
        self._peers.verdict(failure)
        return failure

    def _where(self, call: _Call) -> str:
        return f"{call.operation}, call {call.n} on rank {self.rank}"

    def _meet(self, call: _Call) -> None:
        """Step 6: all records are here and go together, or an error that all ranks raise."""
        self._hear(call.n, call.operation, call)
        if call.failure is not None:
            raise call.failure
        self._peers.phase(Phase.DISPATCH_ROWS)

    def _judge(self, call: _Call, waiting: AwaitedRecords) -> None:
        """Keeps what the records of all ranks say, and decides. Every rank sees the same records and decides alike."""
        assert call.record is not None and call.pairs is not None
        mine, where = call.record, self._where(call)
        pull_bytes = 0 if call.source is None else call.source.form.pulled_bytes
        headers, counts_RE = waiting.copied()
        call.records = [mine if peer == self.rank else Record.of(words) for peer, words in enumerate(headers)]

        def refuse(why: str) -> None:
            self._fail(call, CallMismatch(f"{where}: the ranks' calls don't go together: {why}. {_USABLE}"))

        for peer, record in enumerate(call.records):
            if record.kind == Kind.ABORT:
                self._aborted(call, peer, waiting)
                return
            if peer != self.rank and (
                why := differs(mine, record, self.rank, peer, pull_bytes, self._layout)
            ):
                return refuse(why)
        matrix_RE = counts_RE.long() if call.matrix_RE is None else call.matrix_RE
        pairs_R = matrix_RE.long().sum(1).tolist()
        for peer, record in enumerate(call.records):
            if int(matrix_RE[peer].min()) < 0 or pairs_R[peer] > record.tokens * record.top_k:
                return refuse(
                    f"rank {peer}'s record counts {pairs_R[peer]} pairs of {record.tokens} tokens with {record.top_k} experts "
                    "each"
                )
        call.places = self._geometry.places(matrix_RE, mine.align)
        cap, totals_R = self._layout.recv_rows, call.places.totals_R
        for owner, (total, record) in enumerate(zip(totals_R, call.records, strict=True)):
            if 0 <= record.pad_to < total:
                aligned = " (with align)" if mine.align > 1 else ""
                self._fail(
                    call,
                    PadTooSmall(
                        f"{where}: rank {owner} would receive {total} rows{aligned} and asked for pad_to = {record.pad_to}. "
                        f"{_USABLE}. Raise pad_to, or leave it out"
                    ),
                )
                return
            if total >= 2**31:
                self._fail(
                    call,
                    BadValue(
                        f"{where}: rank {owner} would receive {total} rows; positions are int32. Dispatch fewer tokens at once"
                    ),
                )
                return
        if mine.kind != Kind.ROUND and any(record.mode != Mode.PULL for record in call.records):
            call.waves = max(1, *(-(-total // cap) for total in totals_R))
        if call.waves > 1 and len({record.later != 0 for record in call.records}) > 1:
            late = next(peer for peer, record in enumerate(call.records) if record.later)
            prompt = next(peer for peer, record in enumerate(call.records) if not record.later)
            return refuse(
                f"async_op is used on rank {late} and not on rank {prompt}, and rank {totals_R.index(max(totals_R))} receives "
                f"more rows than the window holds (max_recv_rows = {cap}), which some rank pushes"
            )
        wanted = functools.reduce(operator.or_, (record.gradients for record in call.records))
        call.gradients = wanted & GRADIENT_BITS
        said = {
            peer: record.gradients // COMBINE_WEIGHTS
            for peer, record in enumerate(call.records)
            if record.gradients // COMBINE_WEIGHTS
        }
        if call.gradients and len(set(said.values())) > 1:  # backward sends the weights that combine gets
            dtypes = ", ".join(
                f"{CODE_DTYPES.get(code - 1, 'not given')} on rank {peer}" for peer, code in said.items()
            )
            return refuse(f"topk_weights, of which gradients are wanted, are {dtypes}")
        call.stage = _Stage.MET

    # ------------------------------------------------------------------------------------------------------ rows

    def _flag_rows(self, call: _Call) -> list[int]:
        return [record.flag_rows for record in call.records]

    def _runs(self, call: _Call, wave: int | None, keep: Callable[[Runs], Tensor]) -> Runs:
        """Pieces of a wave (None: of all), those that ``keep`` wants."""
        assert call.places is not None
        cap = None if wave is None or call.waves == 1 else self._layout.recv_rows
        runs = self._geometry.runs(call.places, cap, wave or 0, self._flag_rows(call))
        return runs.of(keep(runs))

    def _new_rows(self, call: _Call, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Outputs for ``rows`` rows: rows, scales, weights; zeros where there is padding."""
        assert call.source is not None and call.places is not None and call.record is not None
        padded = rows != call.places.totals_R[self.rank] or call.record.align > 1
        return call.source.new_outputs(rows, torch.zeros if padded else torch.empty)

    def _receive(self, call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Steps 7 and 8: rows go out, and come, wave by wave."""
        assert call.record is not None and call.places is not None and call.source is not None
        total = call.places.totals_R[self.rank]
        rows = total if call.record.pad_to < 0 else call.record.pad_to
        try:
            out, scales, weights = self._new_rows(call, rows)
        except Exception as error:  # peers count on this rank from here on
            named = named_error(call.operation, error, self.rank)
            self._peers.lose(
                failure_number(named), f"{self._where(call)}: {named}", self.rank, call.n, Phase.DISPATCH_ROWS
            )
            raise named from error
        for wave in range(call.waves):
            self._push(call, wave)
            if wave == 0:
                self._take_own(call, out, scales, weights)
                self._pull(call, out, scales, weights)
            pushed = self._take(call, wave, out, scales, weights)
            if wave + 1 < call.waves:
                self._read_wave(call, wave, pushed)
        meta = self._open_call(call, rows)
        return (
            out,
            torch.empty(0, device=out.device) if weights is None else weights,
            torch.empty(0, device=out.device) if scales is None else scales,
            meta,
        )

    def _push(self, call: _Call, wave: int) -> None:
        """Writes this rank's rows of a wave into the windows of their owners."""
        assert call.source is not None
        runs = self._runs(call, wave, lambda r: (r.source_M == self.rank) & (r.owner_M != self.rank))
        if not len(runs):
            return
        if wave:
            owners = set(runs.owner_M.tolist())
            self._peers.wait(
                owners,
                call.n,
                call.operation,
                Phase.DISPATCH_PUSH,
                lambda missing: self._phases.unread(call.words, Wave.DISPATCH_READ, missing, wave),
            )
        self._peers.phase(Phase.DISPATCH_PUSH)
        self._phases.push(call.words, call.source, runs, self._is_fused(call))
        self._counters.copied["dispatch_push"] += int(runs.count_M.sum()) * call.source.form.pushed_bytes
        self._peers.phase(Phase.DISPATCH_ROWS)

    @staticmethod
    def _is_fused(call: _Call) -> bool:
        return call.record is not None and call.record.mode == Mode.FUSED

    def _take_own(self, call: _Call, out: Tensor, scales: Tensor | None, weights: Tensor | None) -> None:
        """Rows of this rank's own tokens for its own experts: from where they are."""
        assert call.source is not None
        runs = self._runs(call, None, lambda r: (r.source_M == self.rank) & (r.owner_M == self.rank))
        at = rows_of(runs.row_M, runs.count_M).to(out.device)
        places = rows_of(runs.place_M, runs.count_M).to(out.device)
        x_nH = call.source.x.index_select(0, call.source.tokens_P[places].long())
        x_nH, scales_n = quantized_rows(x_nH, QUANT_NAMES.get(call.source.quant))
        out[at] = x_nH
        if scales is not None:
            scales[at] = scales_n
        if weights is not None and call.source.weights_P is not None:
            weights[at] = call.source.weights_P[places]
        self._counters.copied["dispatch_out"] += len(at) * call.source.form.pulled_bytes

    def _pull(self, call: _Call, out: Tensor, scales: Tensor | None, weights: Tensor | None) -> None:
        """Rows that CPU ranks left in their windows."""
        assert call.source is not None
        pulled = self._peers_that(lambda peer: call.records[peer].mode == Mode.PULL)
        runs = self._runs(call, None, lambda r: pulled[r.source_M] & (r.owner_M == self.rank))
        if not len(runs):
            return
        wrong = self._phases.pull(call.words, call.source, runs, call.records, out, scales, weights)
        self._counters.copied["dispatch_out"] += int(runs.count_M.sum()) * call.source.form.pulled_bytes
        if wrong is not None:
            text = f"{self._where(call)}: the token list of rank {wrong} names a token it doesn't have"
            error = PeerLost(text)
            self._peers.lose(failure_number(error), text, wrong, call.n, Phase.DISPATCH_ROWS)
            raise error

    def _take(
        self, call: _Call, wave: int, out: Tensor, scales: Tensor | None, weights: Tensor | None
    ) -> Runs:
        """Waits for the rows of a wave that were pushed here, and copies them. Returns their pieces."""
        assert call.source is not None
        pushes = self._peers_that(lambda peer: call.records[peer].mode != Mode.PULL)
        runs = self._runs(call, wave, lambda r: pushes[r.source_M] & (r.owner_M == self.rank))
        if len(runs):
            first = wave * self._layout.recv_rows if call.waves > 1 else 0
            taking = self._phases.take(
                call.words, call.source, runs, first, self._is_fused(call), out, scales, weights
            )
            sources = set(runs.source_M.tolist())
            self._peers.wait(sources, call.n, call.operation, Phase.DISPATCH_ROWS, taking)
            self._counters.copied["dispatch_out"] += int(runs.count_M.sum()) * call.source.form.pulled_bytes
        return runs

    def _read_wave(self, call: _Call, wave: int, runs: Runs) -> None:
        """Clears the flags of a wave that was taken, and only then says so to everybody who pushes rows here."""
        self._phases.clear_flags(call.words, runs)
        sources = self._sources(call)
        self._phases.say(
            call.words,
            Wave.DISPATCH_READ,
            [s for s in sources if call.records[s].mode != Mode.PULL],
            wave + 1,
        )

    def _peers_that(self, do: Callable[[int], bool]) -> Tensor:
        """bool [R]: which other ranks do something."""
        return torch.tensor([peer != self.rank and do(peer) for peer in range(self.world_size)], device=HOST)

    def _sources(self, call: _Call) -> list[int]:
        """Other ranks that have rows here."""
        assert call.places is not None
        owned = self._experts[self.rank]
        rows_R = call.places.counts_RE[:, owned.start : owned.stop].sum(1).tolist()
        return [peer for peer in self._peers.others if rows_R[peer]]

    def _owners(self, call: _Call) -> set[int]:
        """Other ranks that have rows of this one."""
        assert call.places is not None
        sent_E = call.places.counts_RE[self.rank] > 0
        return set(self._geometry.owner_E[sent_E].tolist()) - {self.rank}

    def _open_call(self, call: _Call, out_rows: int) -> Tensor:
        """The call can be combined: its handle."""
        assert call.record is not None and call.places is not None and call.pairs is not None
        pairs, places = call.pairs, call.places
        expert_TK = pairs.expert_TK.cpu()
        slot_TK = pairs.place_TK.cpu() - pairs.start_E.cpu()[expert_TK.long().clamp(min=0)]
        row_TK = places.first_RE[self.rank][expert_TK.long().clamp(min=0)] + slot_TK
        owned = self._experts[self.rank]
        meta = pack_handle(
            epoch=call.n,
            generation=self._generation,
            num_tokens=call.record.tokens,
            top_k=call.record.top_k,
            hidden=call.record.hidden,
            rows=places.totals_R[self.rank],
            rank=self.rank,
            dtype=self._limits.dtype if call.source is None else call.source.x.dtype,
            counts_RE=places.counts_RE,
            expert_TK=expert_TK,
            row_TK=torch.where(expert_TK >= 0, row_TK, -1),
            num_experts=self._limits.num_experts,
            align=call.record.align,
            out_rows=out_rows,
            gradients=call.gradients,
            ids_R=[record.ids for record in call.records],
        )
        self._open[call.n] = meta.clone()
        call.stage = _Stage.OPEN
        if call.source is not None:
            counters = self._counters
            self._matrix_RE = places.counts_RE.int()
            rows_R = places.counts_RE[:, owned.start : owned.stop]
            self._rows_E += rows_R.sum(0)
            counters.dispatches += 1
            counters.pushes += 1
            counters.waves += call.waves
            counters.received_rows += int(rows_R.sum() - rows_R[self.rank].sum())
            counters.sent_rows += int(places.counts_RE[self.rank].sum() - rows_R[self.rank].sum())
        self._peers.verdict(None)
        return meta

    # --------------------------------------------------------------------------------------------------- combine

    @torch.no_grad()
    def combine(
        self, y: Tensor | MoeA2AError, meta: Tensor, topk_weights: Tensor | None, pairs: bool = False
    ) -> Tensor:
        """Brings the rows back to their tokens and sums them. Collective; closes the handle."""
        with self._turn(COMBINE):
            self._check_usable(COMBINE)
            handle = self._open_handle(meta, whole=False)
            call = self._calls[handle.epoch]
            return self._combine(call, y, handle.out_rows, topk_weights, pairs)

    @torch.no_grad()
    def combine_again(self, y: Tensor, routing: Tensor, tag: int, pairs: bool) -> Tensor:
        """Combines rows by the routing of an older call, on a round of its own. Collective."""

        def prepare(call: _Call) -> None:
            ids_TK, again = self._read_routing(routing)
            check_combine_rows(y, again.out_rows, self._returned(pairs), self.rank, BACKWARD)
            self._use_routing(call, ids_TK, again)
            call.record = self._record(
                call,
                Kind.ROUND,
                tokens=again.num_tokens,
                top_k=again.top_k,
                align=again.align,
                tag=tag,
                routing=self._digest_of(again),
            )

        with self._turn(BACKWARD):
            call = self._send(BACKWARD, prepare)
            self._meet(call)
            assert call.places is not None
            self._open_call(call, len(y))
            rows: Tensor | MoeA2AError = y
            if len(y) < call.places.totals_R[self.rank]:
                # The handle is a tensor, and what it says of the rows is believed only as far as it goes with the matrix.
                rows = BadValue(
                    f"{BACKWARD}: routing on rank {self.rank} is a handle that was written to after dispatch returned it"
                )
            return self._combine(call, rows, len(y), None, pairs)

    def _returned(self, pairs: bool) -> Limits:
        """What y may be; a scalar for a pair may be wider than a very narrow row."""
        limits = self._limits
        least = -(-SCALAR_BYTES // limits.dtype.itemsize)
        return replace(limits, hidden_size=max(limits.hidden_size, least)) if pairs else limits

    def _combine(
        self,
        call: _Call,
        y: Tensor | MoeA2AError,
        out_rows: int,
        topk_weights: Tensor | None,
        pairs: bool,
    ) -> Tensor:
        assert call.record is not None and call.pairs is not None and call.places is not None
        del self._open[call.n]
        call.stage = _Stage.CLOSED
        self._peers.phase(Phase.COMBINE_WRITE)
        try:
            if isinstance(y, MoeA2AError):
                raise y
            check_combine_rows(y, out_rows, self._returned(pairs), self.rank, call.combining)
        except Exception as error:  # no rows to give: whoever waits for some hears why
            failure = named_error(call.combining, error, self.rank)
            text = clip_text(str(failure), CELL_TEXT_BYTES)
            cell = Cell(reason=failure_number(failure), text_bytes=len(text))
            self._phases.refuse(call.words, self._sources(call), cell.words(), words_of(text))
            self._peers.verdict(failure)
            raise failure from failure.__cause__
        assert isinstance(y, Tensor)
        y = y.detach().contiguous()
        self._give(call, y)
        try:
            check_combine_weights(
                topk_weights,
                call.record.tokens,
                call.record.top_k,
                self.rank,
                self._limits.device,
                call.combining,
            )
        except MoeA2AError as error:  # only this rank's sum can't be made
            self._peers.verdict(error)
            raise
        weights = None if topk_weights is None else topk_weights.detach().contiguous()
        owners = self._owners(call)
        combining = self._phases.combine(
            call.words, call.pairs, y, weights, pairs, owners, self._cell(y).words()
        )
        self._peers.wait(
            owners,
            call.n,
            call.combining,
            Phase.COMBINE_WAIT,
            lambda missing: missing & combining.missing(),
        )
        self._peers.phase(Phase.COMBINE_SUM)
        if not owners:
            combining.missing()
        if not combining.done:
            self._fetch(call, y, self._judge_cells(call, y, owners, combining))
            combining.finish()
        self._counters.combines += 1
        self._counters.copied["combine_out"] += combining.out.numel() * combining.out.element_size()
        self._peers.verdict(None)
        return combining.out

    @staticmethod
    def _cell(y: Tensor) -> Cell:
        """What this rank says of its results."""
        return Cell(dtype=DTYPE_CODES[y.dtype], hidden=y.shape[1], mode=int(Mode.PUSH))

    def _give(self, call: _Call, y: Tensor) -> None:
        """Writes rows of y into the z of their sources, then the cells that say so."""
        runs = self._runs(call, None, lambda r: r.owner_M == self.rank)
        sources = self._sources(call)
        giving = self._phases.give(call.words, y, runs, sources, self._cell(y).words())
        # Programs wait for others of the same launch only; and that not for ever.
        self._peers.wait({self.rank}, call.n, call.combining, Phase.COMBINE_WRITE, giving)
        if sources:
            self._counters.pushes += 1
            given = int(runs.count_M[runs.source_M != self.rank].sum())
            self._counters.copied["combine_push"] += given * y.shape[1] * y.element_size()

    def _judge_cells(self, call: _Call, y: Tensor, owners: set[int], combining: Combining) -> dict[int, Cell]:
        """The cells of the owners of this rank's rows, all of which are here, if rows can be had from them."""
        where = f"{call.combining}, call {call.n} on rank {self.rank}"
        closed = "The handle is closed; the group stays usable"
        cells: dict[int, Cell] = {}
        try:
            for owner in sorted(owners):
                words, refused = combining.cell(owner)
                cells[owner] = cell = Cell.of(words)
                if refused:
                    text = text_of(words[len(CellWord) :], cell.text_bytes)
                    raise PeerAborted(f"{where}: rank {owner} has no rows to give: {text}. {closed}")
            for owner, cell in cells.items():
                self._check_cell(call, y, owner, cell, where, closed)
        except MoeA2AError as error:
            self._peers.verdict(error)
            raise
        return cells

    def _check_cell(self, call: _Call, y: Tensor, owner: int, cell: Cell, where: str, closed: str) -> None:
        assert call.places is not None
        dtype, hidden = DTYPE_CODES[y.dtype], y.shape[1]
        if (cell.dtype, cell.hidden) != (dtype, hidden):
            names = {code: str(kind).removeprefix("torch.") for kind, code in DTYPE_CODES.items()}
            raise CallMismatch(
                f"{where}: y is {names[dtype]} with H = {hidden} here and {names.get(cell.dtype, cell.dtype)} with H = "
                f"{cell.hidden} on rank {owner}. {closed}"
            )
        total = call.places.totals_R[owner]
        row_bytes = hidden * y.element_size()
        if cell.mode != Mode.PUSH and not (
            cell.mode == Mode.PULL
            and total <= self._layout.recv_rows
            and rows_fit(cell.y, cell.stride, total, row_bytes, self._layout.y, self._layout.row_flag)
        ):
            raise CallMismatch(
                f"{where}: rank {owner}'s cell places y [{total}, {hidden}] at byte {cell.y} with {cell.stride} bytes from row "
                f"to row, which isn't inside its y region. {closed}"
            )

    def _fetch(self, call: _Call, y: Tensor, cells: dict[int, Cell]) -> None:
        """Copies rows that CPU ranks left in their y to where pushed ones are."""
        pulled = self._peers_that(lambda peer: peer in cells and cells[peer].mode == Mode.PULL)
        runs = self._runs(call, None, lambda r: (r.source_M == self.rank) & pulled[r.owner_M])
        if len(runs):
            self._phases.fetch(call.words, y, runs, cells)
            self._counters.copied["combine_in"] += int(runs.count_M.sum()) * y.shape[1] * y.element_size()

    # ------------------------------------------------------------------------------------------------------ life

    @contextlib.contextmanager
    def _turn(self, operation: str) -> Iterator[None]:
        """Calls on a group take turns; one from inside another call of the same thread is refused."""
        self._check_process(operation)
        if self._holder == threading.get_ident():
            raise GroupBusy(
                f"{operation}: group {self.name} on rank {self.rank} is in the middle of a call of this very thread (a signal "
                "handler or a finaliser called it); only close() and stats() can be used there"
            )
        with self._turns:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None
                if self._peers.closing.is_set():
                    self._leave()

    def _check_process(self, operation: str) -> None:
        if os.getpid() != self._process:
            raise GroupClosed(
                f"{operation}: group {self.name} was made before this process forked and belongs to the parent; make an "
                "EPGroup in the child"
            )

    def _check_usable(self, operation: str) -> None:
        if self._closed or self._peers.closing.is_set():
            raise GroupClosed(
                f"{operation}: group {self.name} on rank {self.rank} is closed; make a new EPGroup"
            )
        self._peers.check(operation, self.name)

    def close(self) -> None:
        """Leaves the group: says so to every peer, unless it was given up, and lets go of the windows. Idempotent."""
        if os.getpid() != self._process:  # the parent's windows: not ours to write to
            return
        self._peers.closing.set()
        if self._holder == threading.get_ident():
            return  # below a signal handler: the call that it interrupted ends, and leaves
        with self._turns:
            self._leave()

    def _leave(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._open.clear()
        self._calls.clear()
        self._peers.leave(self._epoch)
        self._phases.close()
        self._heap.close()

    def stats(self) -> dict[str, Any]:
        """Counters, as ``EPGroup.stats`` describes them, and launches by kernel."""
        counters = self._counters
        return {
            "epoch": self._epoch,
            "dispatches": counters.dispatches,
            "combines": counters.combines,
            "tokens_per_expert": self._rows_E.tolist(),
            "send_count_matrix": self._matrix_RE.clone(),
            "expert_order": [],
            "sent_rows": counters.sent_rows,
            "received_rows": counters.received_rows,
            "pushes": counters.pushes,
            "waves": counters.waves,
            "copied_bytes": dict(counters.copied),
            "wait_seconds": list(self._peers.waited),
            "launches": self._phases.launches(),
        }
