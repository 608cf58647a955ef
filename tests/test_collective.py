"""``CollectiveExchange`` against the oracle, its failures, and what it sends.

The bodies (``check_*``) run on every rank of a group: in this process for one rank, on the pool for several;
lost peers have processes of their own, since they spoil a process group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankContext, RankPool
from rank_bodies.inputs import assert_bits, bits
from torch import Tensor

from moe_a2a import reference
from moe_a2a.errors import (
    BadType,
    BadValue,
    CallMismatch,
    GroupClosed,
    GroupPoisoned,
    HandleExpired,
    MoeA2AError,
    OutOfMemory,
    PadTooSmall,
    PeerAborted,
    PeerLost,
    PeerTimeout,
)
from moe_a2a.op_host.layout import HandleView, HandleWord
from moe_a2a.op_host.quant import QUANT_CODES
from moe_a2a.reference import CollectiveExchange

NAN, INF = float("nan"), float("inf")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
E, K, T, H = 5, 3, 11, 7  # of most groups here; E divides by neither 2 nor 3


class Ranks:
    """One rank of several: who it is, and how to make exchanges over its process group."""

    def __init__(self, rank: int, world_size: int, process_group: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self.process_group = process_group

    def exchange(self, experts: int = E, depth: int = 2) -> CollectiveExchange:
        """An exchange with room for fp64 rows of H."""
        return CollectiveExchange(
            self.process_group,
            self.rank,
            self.world_size,
            num_experts=experts,
            top_k=K,
            max_tokens=T,
            hidden_size=H,
            dtype=torch.float64,
            max_recv_rows=1,
            depth=depth,
            timeout=20.0,
            warmup_timeout=20.0,
        )

    def inputs(
        self, seed: int, experts: int = E, dtype: torch.dtype = torch.float32
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """xs, idxs and weights of all ranks: T from 0 up, duplicates, and -1 with NaN weights."""
        rng = torch.Generator().manual_seed(seed)
        xs, idxs, weights = [], [], []
        for rank in range(self.world_size):
            tokens = (seed + 5 * rank) % (T + 1)
            xs.append(torch.randn(tokens, H, generator=rng, dtype=torch.float64).to(dtype))
            idx_TK = torch.randint(0, experts, (tokens, K), generator=rng)
            dropped = torch.rand(tokens, K, generator=rng) < 0.2
            idxs.append(torch.where(dropped, -1, idx_TK))
            weights.append((torch.rand(tokens, K, generator=rng) * 3 - 1).masked_fill(dropped, float("nan")))
        return xs, idxs, weights


def expert_rows(x_NH: Tensor, counts: Tensor, owner: range, dtype: torch.dtype) -> Tensor:
    """[N, H]: each row times its expert's own factor, inexact on purpose."""
    factor_E = torch.tensor([1.1 + expert / 3 for expert in owner], dtype=torch.float64)
    return (x_NH.double() * factor_E.repeat_interleave(counts)[:, None]).to(dtype)


def step(ranks: Ranks, exchange: CollectiveExchange, seed: int = 3, experts: int = E) -> None:
    """One dispatch and combine that have to equal the oracle: also the proof that an exchange is still usable."""
    xs, idxs, weights = ranks.inputs(seed, experts)
    r = ranks.rank
    x_NH, weights_N, _, meta = exchange.dispatch(xs[r], idxs[r], weights[r], tag=seed)
    want = reference.dispatch_reference(xs, idxs, experts, weights)
    expected = want[r].weights_N
    assert expected is not None
    assert_bits(x_NH, want[r].x_NH, f"rank {r}: rows")
    assert_bits(weights_N, expected, f"rank {r}: weights")
    owners = reference.expert_owner(experts, ranks.world_size)
    ys = [expert_rows(w.x_NH, w.counts, owner, torch.float32) for w, owner in zip(want, owners, strict=True)]
    out_TH = exchange.combine(ys[r], meta, weights[r])
    assert_bits(out_TH, reference.combine_reference(ys, idxs, experts, weights)[r], f"rank {r}: sums")


def caught(call: Callable[..., Any], *arguments: Any, **named: Any) -> MoeA2AError | None:
    """The error of this package that the call raises, if any."""
    try:
        call(*arguments, **named)
    except MoeA2AError as error:
        return error
    return None


def expect(error: MoeA2AError | None, kind: type[MoeA2AError], *parts: str) -> None:
    """It is exactly of this kind and says all of this."""
    assert type(error) is kind, f"expected {kind.__name__}, got {error!r}"
    for part in parts:
        assert part in str(error), f"{part!r} is missing in: {error}"


@dataclass
class Traffic:
    """Collectives that were called, and the rows per peer of the last all-to-all."""

    gathers: int = 0
    exchanges: int = 0
    receive: list[int] = field(default_factory=list)
    send: list[int] = field(default_factory=list)


@contextlib.contextmanager
def watched() -> Iterator[Traffic]:
    """Notes the collectives of torch.distributed that are called meanwhile."""
    traffic = Traffic()
    all_gather, all_to_all_single = dist.all_gather, dist.all_to_all_single

    def gather(*arguments: Any, **named: Any) -> Any:
        traffic.gathers += 1
        return all_gather(*arguments, **named)

    def exchange(output: Tensor, rows: Tensor, receive: list[int], send: list[int], **named: Any) -> Any:
        traffic.exchanges += 1
        traffic.receive, traffic.send = receive, send
        return all_to_all_single(output, rows, receive, send, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", gather)
        patch.setattr(dist, "all_to_all_single", exchange)
        yield traffic


# ----------------------------------------------------------------------------------------------------- parity


def check_parity(ranks: Ranks) -> None:
    """Rows, weights, handle and sums for every dtype of x, weights and y, any E, both id widths, T = 0."""
    r, R = ranks.rank, ranks.world_size
    for experts in (1, 2, E, 8):
        exchange = ranks.exchange(experts)
        owners = reference.expert_owner(experts, R)
        for seed, (dtype, y_dtype) in enumerate((a, b) for a in FLOATS for b in FLOATS):
            xs, idxs, all_weights = ranks.inputs(seed, experts, dtype)
            weights = None if seed % 5 == 4 else [w.to(FLOATS[seed // 2 % 4]) for w in all_weights]
            own = None if weights is None else weights[r]
            ids = idxs[r].int() if (seed + r) % 2 else idxs[r]
            x_NH, weights_N, _, meta = exchange.dispatch(xs[r], ids, own, tag=seed)
            want = reference.dispatch_reference(xs, idxs, experts, weights)
            what = f"rank {r} of {R}, E {experts}, seed {seed}: "
            assert_bits(x_NH, want[r].x_NH, what + "rows")
            expected = want[r].weights_N
            assert_bits(weights_N, torch.empty(0) if expected is None else expected, what + "weights")

            handle = HandleView(meta)
            matrix = torch.stack([reference.send_counts_reference(idx, experts)[0] for idx in idxs])
            assert_bits(handle.counts_RE, matrix.int(), what + "send-count matrix")
            assert_bits(handle.counts, want[r].counts, what + "counts")
            assert_bits(handle.offsets, want[r].offsets, what + "offsets")
            assert_bits(handle.expert_TK, idxs[r].int(), what + "experts of pairs")
            row_TK = torch.full_like(handle.row_TK, -1)
            for received in want:
                for row, (source, token, k) in enumerate(received.source_N3.tolist()):
                    if source == r:
                        row_TK[token, k] = row
            assert_bits(handle.row_TK, row_TK, what + "rows of pairs")
            assert (handle.num_tokens, handle.top_k, handle.hidden, handle.rows) == (
                len(xs[r]),
                K,
                H,
                len(x_NH),
            )
            assert (handle.epoch, handle.rank, handle.dtype) == (seed + 1, r, dtype)

            ys = [
                expert_rows(w.x_NH, w.counts, owner, y_dtype) for w, owner in zip(want, owners, strict=True)
            ]
            out_TH = exchange.combine(ys[r], meta, own)
            assert_bits(out_TH, reference.combine_reference(ys, idxs, experts, weights)[r], what + "sums")
        exchange.close()


def check_narrow_rows(ranks: Ranks) -> None:
    """Every width up to the group's, one row: the weight behind a row of odd size need not be aligned."""
    exchange = ranks.exchange()
    for hidden in range(1, H + 1):
        for dtype in FLOATS:
            for weight_dtype in FLOATS:
                x_TH = torch.arange(hidden)[None].to(dtype) + 1
                idx_TK = torch.full((1, 1), -1 if ranks.rank else E - 1)
                weights_TK = torch.full((1, 1), 0.75, dtype=weight_dtype)
                x_NH, weights_N, _, meta = exchange.dispatch(x_TH, idx_TK, weights_TK, tag=0)
                last = ranks.rank == ranks.world_size - 1
                assert_bits(x_NH, x_TH if last else x_TH[:0], "rows")
                assert_bits(weights_N, weights_TK[0] if last else weights_TK[0, :0], "weights")
                out_TH = exchange.combine(x_NH, meta, None)
                assert_bits(out_TH, torch.zeros_like(x_TH) if ranks.rank else x_TH, "sums")


def check_other_widths(ranks: Ranks) -> None:
    """y may have another H than x, the same on all ranks; K = 0 gives zeros."""
    exchange = ranks.exchange()
    xs, idxs, weights = ranks.inputs(8)
    r = ranks.rank
    received = reference.dispatch_reference(xs, idxs, E)
    for width in (1, H - 1, H):
        x_NH, _, _, meta = exchange.dispatch(xs[r][:, 1:], idxs[r], None, tag=0)
        assert_bits(x_NH, received[r].x_NH[:, 1:], "rows")
        ys = [rows.x_NH[:, :width] for rows in received]
        want = reference.combine_reference(ys, idxs, E, weights)[r]
        assert_bits(exchange.combine(ys[r], meta, weights[r]), want, f"width {width}")
    x_NH, _, _, meta = exchange.dispatch(torch.ones(2, H), torch.zeros(2, 0).long(), torch.zeros(2, 0), tag=0)
    assert x_NH.shape == (0, H)
    assert_bits(exchange.combine(x_NH, meta, torch.zeros(2, 0)), torch.zeros(2, H), "K = 0")


def check_strides(ranks: Ranks) -> None:
    """Strided, expanded and negated views give what copies give, and stay as they were."""
    exchange = ranks.exchange()
    rng = torch.Generator().manual_seed(ranks.rank)
    conjugate = torch.complex(torch.randn(T, H, generator=rng), torch.randn(T, H, generator=rng)).conj()
    views = {
        "every second column": torch.randn(T, 2 * H, generator=rng)[:, ::2],
        "transposed": torch.randn(H, T, generator=rng).t(),
        "one row expanded": torch.randn(1, H, generator=rng).expand(T, H),
        "negative bit": conjugate.imag,
        "needs a gradient": torch.randn(T, H, generator=rng).requires_grad_(),
    }
    assert views["negative bit"].is_neg()
    idx_TK = torch.randint(-1, E, (T, 2 * K), generator=rng)[:, ::2]
    weights_TK = torch.rand(K, T, generator=rng).t()
    for name, x_TH in views.items():
        before = x_TH.detach().clone()
        x_NH, weights_N, _, meta = exchange.dispatch(x_TH, idx_TK, weights_TK, tag=0)
        copies = before.resolve_neg().contiguous(), idx_TK.contiguous(), weights_TK.contiguous()
        plain = exchange.dispatch(*copies, tag=0)
        assert_bits(x_NH, plain[0], f"{name}: rows")
        assert_bits(weights_N, plain[1], f"{name}: weights")
        y_NH = torch.empty(H, len(x_NH)).t().copy_(x_NH)
        out_TH = exchange.combine(y_NH, meta, weights_TK)
        assert_bits(out_TH, exchange.combine(x_NH, plain[3], copies[2]), f"{name}: sums")
        assert torch.equal(x_TH.detach(), before), f"{name}: x was changed"
        assert not out_TH.requires_grad


def check_every_bit(ranks: Ranks) -> None:
    """-0.0, subnormals, infinities and NaN payloads of rows and weights arrive as they were."""
    exchange = ranks.exchange()
    words: dict[
        torch.dtype, tuple[torch.dtype, list[int]]
    ] = {  # -0, -subnormal, NaN, NaN, signalling NaN, Inf, -Inf
        torch.float32: (
            torch.int32,
            [-(2**31), 1 - 2**31, 0x7FC00001, -1, 0x7F800001, 0x7F800000, -0x800000],
        ),
        torch.bfloat16: (torch.int16, [-(2**15), 1 - 2**15, 0x7FC1, -1, 0x7F81, 0x7F80, -0x80]),
        torch.float16: (torch.int16, [-(2**15), 1 - 2**15, 0x7E01, -1, 0x7C01, 0x7C00, -0x400]),
        torch.float64: (
            torch.int64,
            [-(2**63), 1 - 2**63, 0x7FF8 << 48 | 1, -1, 0x7FF0 << 48 | 1, 0x7FF0 << 48],
        ),
    }
    r, R = ranks.rank, ranks.world_size
    for dtype, (integer, values) in words.items():
        column = torch.tensor(values, dtype=integer).view(dtype)[:, None]
        xs = [column.expand(-1, H).roll(rank, 0) for rank in range(R)]
        idxs = [torch.arange(len(column))[:, None].add(rank).remainder(E) for rank in range(R)]
        weights = [x_TH[:, :1] for x_TH in xs]
        x_NH, weights_N, _, meta = exchange.dispatch(xs[r], idxs[r], weights[r], tag=0)
        want = reference.dispatch_reference(xs, idxs, E, weights)[r]
        assert_bits(x_NH, want.x_NH, f"{dtype}: rows")
        assert want.weights_N is not None
        assert_bits(weights_N, want.weights_N, f"{dtype}: weights")
        out_TH = exchange.combine(x_NH, meta, None)
        finite = xs[r].isfinite()
        assert torch.equal(out_TH.isfinite(), finite), f"{dtype}: a NaN or Inf leaked"
        assert torch.equal(bits(out_TH)[finite], bits(xs[r])[finite]), f"{dtype}: sums"


def check_outputs_are_their_own(ranks: Ranks) -> None:
    """Writing to what a call returned changes nothing that another call returned or was given."""
    exchange = ranks.exchange()
    xs, idxs, weights = ranks.inputs(7)
    x_TH, idx_TK, weights_TK = xs[ranks.rank], idxs[ranks.rank], weights[ranks.rank]
    before = x_TH.clone(), weights_TK.clone()
    first = exchange.dispatch(x_TH, idx_TK, weights_TK, tag=0)
    again = exchange.dispatch(x_TH, idx_TK, weights_TK, tag=0)
    kept = again[0].clone()
    first[0].fill_(5), first[1].fill_(5)
    assert_bits(again[0], kept, "rows of the second call")
    out_TH = exchange.combine(again[0], again[3], None)
    again[0].fill_(6)
    assert_bits(x_TH, before[0], "x")
    assert_bits(weights_TK, before[1], "weights")
    out_TH.fill_(8)
    assert (again[0] == 6).all()


# ----------------------------------------------------------------------------------------------------- errors


def check_bad_input(ranks: Ranks) -> None:
    """Of each kind, on each rank in turn: it raises its reason, the others PeerAborted; nothing moved."""
    xs, idxs, weights = ranks.inputs(4)
    x_TH, idx_TK, weights_TK = torch.ones(4, H), torch.zeros(4, K, dtype=torch.int64), torch.ones(4, K)
    far = idx_TK.clone()
    far[3, 1] = 2**32
    exchange = ranks.exchange()
    good = (xs[ranks.rank], idxs[ranks.rank], weights[ranks.rank])
    handle = exchange.dispatch(x_TH, idx_TK, None)[3]
    foreign = ranks.exchange().dispatch(x_TH, idx_TK, None)[3]
    moved = ranks.exchange().dispatch(x_TH, idx_TK, None)[3]
    moved[HandleWord.RANK] += 1

    def written(at: int, value: int) -> Tensor:
        changed = handle.clone()
        changed[at] = value
        return changed

    names = ("x", "topk_idx", "topk_weights", "routing", "pad_to", "align", "quant")
    again = (x_TH, None, weights_TK)
    bad: list[tuple[tuple[Any, ...], type[MoeA2AError], str]] = [
        ((x_TH, far, weights_TK), BadValue, "topk_idx[3, 1] = 4294967296 is outside -1..4"),
        ((x_TH, idx_TK.float(), weights_TK), BadType, "topk_idx has dtype torch.float32"),
        ((x_TH, idx_TK[:3], weights_TK), BadValue, "topk_idx has shape [3, 3] but x has shape [4, 7]"),
        ((x_TH[0], idx_TK, weights_TK), BadValue, "x has shape [7]"),
        ((x_TH.tolist(), idx_TK, weights_TK), BadType, "x is a list"),
        ((torch.ones(T + 1, H), torch.zeros(T + 1, K).long(), None), BadValue, "12 tokens"),
        ((*good, None, -2, 1, 0), BadValue, "pad_to = -2"),
        ((*good, None, 2**31, 1, 0), BadValue, "pad_to = 2147483648"),
        ((*good, None, -1, 0, 0), BadValue, "align = 0"),
        ((*good, None, -1, 2**20 + 1, 0), BadValue, "align = 1048577"),
        ((*good, None, -1, 1, 3), BadValue, "quantisation 3"),
        ((*good, handle, -1, 1, 0), BadValue, "both topk_idx and routing"),
        (again, BadValue, "neither topk_idx nor routing"),
        ((*again, handle.int()), BadType, "routing is a ["),
        ((*again, handle[None]), BadType, "routing is a [1, "),
        ((*again, handle.repeat_interleave(2)[::2]), BadType, "routing is a ["),
        ((*again, handle[:5]), BadValue, "routing can't be read"),
        ((*again, written(0, 1)), BadValue, "routing can't be read"),
        ((*again, foreign), BadValue, "routing is of another group"),
        ((*again, moved), BadValue, "routing is of another group"),
        ((x_TH[:3], None, None, handle), BadValue, "x has shape [3, 7]"),
        ((x_TH, None, weights_TK[:, 1:], handle), BadValue, "topk_weights has shape [4, 2]"),
        *(
            ((*again, written(at, value)), BadValue, "was written to")
            for at, value in (
                (HandleWord.TOKENS, 3),
                (HandleWord.TOKENS, -1),
                (HandleWord.TOP_K, 2**40),
                (HandleWord.NUM_EXPERTS, E - 1),
                (HandleWord.MATRIX, 2**50),
                (int(handle[HandleWord.EXPERT]), 2**33 + E),
                (int(handle[HandleWord.EXPERT]), 2**32 - 2),
                (int(handle[HandleWord.EXPERT]), 1),
                (int(handle[HandleWord.MATRIX]) + ranks.rank * E // 2, 77 << 32 | 77),
            )
        ),
    ]
    for culprit in range(ranks.world_size):
        for arguments, kind, reason in bad:
            mine = arguments if ranks.rank == culprit else good
            with watched() as traffic:
                error = caught(exchange.dispatch, tag=1, **dict(zip(names, mine, strict=False)))
            if ranks.rank == culprit:
                expect(error, kind, reason, f"on rank {culprit}")
            else:
                expect(
                    error,
                    PeerAborted,
                    "moe_a2a.dispatch",
                    f"rank {culprit} said",
                    reason,
                    f"on rank {culprit}",
                )
            several = ranks.world_size > 1
            assert (traffic.gathers, traffic.exchanges) == (2 * several, 0)
        step(ranks, exchange)


def check_two_culprits(ranks: Ranks) -> None:
    """Two ranks with bad input raise their own reasons; whoever else there is hears both."""
    exchange = ranks.exchange()
    x_TH = torch.ones(2, H) if ranks.rank > 1 else torch.ones(2, H + 1 + ranks.rank, dtype=torch.float64)
    error = caught(exchange.dispatch, x_TH, torch.zeros(2, 1).long(), None, None, 0)
    if ranks.rank > 1:
        expect(error, PeerAborted, "rank 0 said", "H = 8", "rank 1 said", "H = 9")
    else:
        expect(error, BadValue, f"H = {H + 1 + ranks.rank}", f"on rank {ranks.rank}")
    step(ranks, exchange)


def check_foreign_failure(ranks: Ranks) -> None:
    """An error that isn't this package's, before payload, is given a name and reaches the others; a long reason is cut."""
    exchange = ranks.exchange()

    def no_memory(*_: Any) -> Tensor:
        raise MemoryError("no room for x " + "ä" * 10000)

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 0:
            patch.setattr(reference, "_pack_rows", no_memory)
        error = caught(exchange.dispatch, torch.ones(2, H), torch.zeros(2, 1).long(), None)
    if ranks.rank == 0:
        expect(error, OutOfMemory, "moe_a2a.dispatch: on rank 0, MemoryError: no room for x ää")
        assert error is not None and isinstance(error.__cause__, MemoryError)
    else:
        expect(error, PeerAborted, "rank 0 said: moe_a2a.dispatch: on rank 0, MemoryError: no room for x ää")
        assert 4000 < len(str(error).encode()) < 5000
    step(ranks, exchange)
    # Of torch's own: no memory for the padding. It concerns this rank alone.
    pad_to = 2**31 - 1 if ranks.rank == 0 else 2000

    def no_zeros(*_: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 0:
            patch.setattr(Tensor, "new_zeros", no_zeros)
        error = caught(exchange.dispatch, torch.ones(2, H), torch.zeros(2, 1).long(), None, pad_to=pad_to)
    if ranks.rank == 0:
        expect(error, OutOfMemory, "moe_a2a.dispatch: on rank 0, RuntimeError: DefaultCPUAllocator")
    else:
        assert error is None
    step(ranks, exchange)


def check_mismatch(ranks: Ranks) -> None:
    """One rank differs in H, dtype, weights, their dtype, or the tag: all ranks say so, with both values."""
    exchange = ranks.exchange()
    last = ranks.rank == ranks.world_size - 1
    x_TH, idx_TK, weights_TK = torch.ones(3, H), torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)
    same = (x_TH, idx_TK, weights_TK, None, 1)
    empty = (x_TH[:0], idx_TK[:0], weights_TK[:0], None, 1)
    handles = [exchange.dispatch(x_TH, ids, None)[3] for ids in (idx_TK, idx_TK + 1)]
    again = (x_TH, None, weights_TK, handles[0], 1)
    cases: list[tuple[tuple[Any, ...], list[str]]] = [
        ((x_TH[:, :3], *same[1:]), ["hidden size", "7 on rank 0", "3 on rank"]),
        ((x_TH[:0, :3], *empty[1:]), ["hidden size", "7 on rank 0", "3 on rank"]),
        ((x_TH.double(), *same[1:]), ["dtype", "torch.float32 on rank 0", "torch.float64 on rank"]),
        ((x_TH, idx_TK, None, None, 1), ["topk_weights", "torch.float32 on rank 0", "None on rank"]),
        ((x_TH, idx_TK, weights_TK.half(), None, 1), ["topk_weights", "torch.float16 on rank"]),
        ((*same[:4], 2), ["the tag", "1 on rank 0", "2 on rank"]),
        ((*same[:4], 1 + 2**63), ["the tag", "1 on rank 0", "-9223372036854775807 on rank"]),
        ((*same, -1, 1, 1), ["quantize", "None on rank 0", "int8 on rank"]),
        ((*same, -1, 1, 2), ["quantize", "None on rank 0", "fp8_e4m3 on rank"]),
        ((*same, -1, 4, 0), ["align", "1 on rank 0", "4 on rank"]),
        (again, ["the routing", "new on rank 0", "used again (digest "]),
    ]
    for other, parts in cases:
        with watched() as traffic:
            error = caught(exchange.dispatch, *(other if last else same))
        expect(error, CallMismatch, "moe_a2a.dispatch", f"this is rank {ranks.rank}", *parts)
        assert (traffic.gathers, traffic.exchanges) == (1, 0)
    mine = (x_TH, None, weights_TK, handles[last], 1)
    expect(caught(exchange.dispatch, *mine), CallMismatch, "the routing", "used again (digest ")
    step(ranks, exchange)
    # A tag is 64 bits, however it is written; K may differ.
    x_NH, *_ = exchange.dispatch(x_TH, idx_TK[:, : 1 + ranks.rank % 2], None, tag=2**64 - 1 if last else -1)
    pairs = sum(3 * (1 + rank % 2) for rank in range(ranks.world_size))
    assert len(x_NH) == (0 if ranks.rank else pairs)


def check_swapped_calls(ranks: Ranks) -> None:
    """A dispatch that meets a combine, and combines of different handles: errors everywhere, then in step."""
    exchange = ranks.exchange(depth=3)
    x_TH, idx_TK = torch.ones(3, H), torch.arange(3)[:, None]
    for bad_dispatch in (False, True):
        x_NH, _, _, meta = exchange.dispatch(x_TH, idx_TK, None, tag=1)
        if ranks.rank:
            ids = idx_TK + 99 if bad_dispatch else idx_TK
            error = caught(exchange.dispatch, x_TH, ids, None, None, 1)
        else:
            error = caught(exchange.combine, x_NH, meta, None)
        if bad_dispatch and ranks.rank:
            expect(error, BadValue, "topk_idx[0, 0] = 99")
        else:
            said = "moe_a2a.combine on rank 0", "moe_a2a.dispatch on rank 1"
            expect(error, CallMismatch, "disagree on the operation", *said)
        if ranks.rank == 0:
            expect(caught(exchange.combine, x_NH, meta, None), HandleExpired)
        step(ranks, exchange)
    x_NH, _, _, meta = exchange.dispatch(x_TH, idx_TK, None, tag=1)
    if ranks.rank:
        expect(
            caught(exchange.dispatch, x_TH, idx_TK, None, None, 1), CallMismatch, "disagree on the operation"
        )
    else:
        expect(caught(exchange.combine, x_NH[1:], meta, None), BadValue, "y has shape")
    step(ranks, exchange)
    first = exchange.dispatch(x_TH, idx_TK, None, tag=1)
    second = exchange.dispatch(x_TH, idx_TK, None, tag=1)
    mine = second if ranks.rank else first
    with watched() as traffic:
        error = caught(exchange.combine, mine[0], mine[3], None)
    expect(error, CallMismatch, "moe_a2a.combine", "which dispatch's handle")
    assert (traffic.gathers, traffic.exchanges) == (1, 0)
    step(ranks, exchange)


def check_pad_too_small(ranks: Ranks) -> None:
    """The last rank would get one row too many: an error on all, nothing moves; exactly full is fine."""
    last = ranks.world_size - 1
    exchange = ranks.exchange()
    x_TH, full = torch.ones(3, H), torch.tensor([[E - 1], [E - 1], [-1]])
    for align in (1, 4):
        rows = -(-2 * ranks.world_size // align) * align
        pad_to = rows if ranks.rank == last else 0
        x_NH, *_ = exchange.dispatch(x_TH, full, None, None, 0, pad_to, align)
        assert len(x_NH) == pad_to
        with watched() as traffic:
            error = caught(exchange.dispatch, x_TH, full, None, None, 0, max(pad_to - 1, 0), align)
        parts = (
            f"on rank {ranks.rank}",
            f"rank {last} would receive {rows} rows",
            f"pad_to = {rows - 1}",
            "with align" if align > 1 else "rows and asked",
        )
        expect(error, PadTooSmall, "moe_a2a.dispatch", *parts)
        assert isinstance(error, ValueError)
        assert traffic.exchanges == 0
        step(ranks, exchange)


# ---------------------------------------------------------------------------------------------------- options

OPTIONS: list[dict[str, Any]] = [
    {"pad_to": 3},
    {"align": 4},
    {"quantize": "int8"},
    {"quantize": "fp8_e4m3"},
    {"align": 7, "pad_to": 0},
    {"align": 2, "pad_to": 5, "quantize": "fp8_e4m3"},
    {"align": 16, "pad_to": 1, "quantize": "int8"},
]


def check_options(ranks: Ranks) -> None:
    """pad_to (``pad_to`` + rank rows more than needed), align, quantize and routing, each alone and together."""
    r, R = ranks.rank, ranks.world_size
    for experts in (1, E):
        exchange = ranks.exchange(experts)
        owners = reference.expert_owner(experts, R)
        kept: dict[int, Tensor] = {}
        for number, options in enumerate(OPTIONS * 2):
            # Every second use of the options takes the routing of the first: its handle has expired by then.
            seed, again = number % len(OPTIONS), number >= len(OPTIONS)
            _, idxs, all_weights = ranks.inputs(seed, experts)
            dtype, what = FLOATS[number % 4], f"rank {r} of {R}, E {experts}, {options}, again {again}: "
            rng = torch.Generator().manual_seed(number)
            xs = [torch.randn(len(idx), H, generator=rng, dtype=torch.float64).to(dtype) for idx in idxs]
            for x_TH in xs[:: 1 + number % 2]:
                x_TH[::3, 1], x_TH[1::5] = (NAN, INF)[number % 2], 0.0
            weights = None if number % 3 == 2 else [w.to(FLOATS[number // 2 % 4]) for w in all_weights]
            align, quantize = options.get("align", 1), options.get("quantize")
            exact = reference.dispatch_reference(xs, idxs, experts, align=align)
            pads = (
                [len(e.x_NH) + options["pad_to"] + q for q, e in enumerate(exact)]
                if "pad_to" in options
                else None
            )
            want = reference.dispatch_reference(
                xs, idxs, experts, weights, pad_to=pads, align=align, quantize=quantize
            )
            x_NH, weights_N, scales, meta = exchange.dispatch(
                xs[r],
                None if again else idxs[r],
                None if weights is None else weights[r],
                kept.get(seed) if again else None,
                pad_to=-1 if pads is None else pads[r],
                align=align,
                quant=0 if quantize is None else QUANT_CODES[quantize],
            )
            kept[seed] = meta.clone()
            expected = want[r].weights_N
            assert_bits(x_NH, want[r].x_NH, what + "rows")
            assert_bits(weights_N, torch.empty(0) if expected is None else expected, what + "weights")
            expected = want[r].scales
            assert_bits(scales, torch.empty(0) if expected is None else expected, what + "scales")
            handle = HandleView(meta)
            assert_bits(handle.counts, want[r].counts, what + "counts")
            assert_bits(handle.offsets, want[r].offsets, what + "offsets")
            assert (handle.rows, handle.out_rows) == (len(exact[r].x_NH), len(x_NH)), what
            assert (handle.align, handle.dtype) == (align, dtype), what
            row_TK = torch.full_like(handle.row_TK, -1)
            for received in want:
                for row, (source, token, k) in enumerate(received.source_N3.tolist()):
                    if source == r:
                        row_TK[token, k] = row
            assert_bits(handle.row_TK, row_TK, what + "rows of pairs")

            ys = []
            for q, owner in enumerate(owners):
                factor_E = torch.tensor([1.1 + expert / 3 for expert in owner], dtype=torch.float64)
                y_NH = torch.full((len(want[q].x_NH), H), NAN, dtype=dtype)
                real = want[q].source_N3[:, 0] >= 0
                y_NH[real] = torch.randn(int(real.sum()), H, generator=rng).to(dtype)
                y_NH[real] *= factor_E.repeat_interleave(want[q].counts)[:, None].to(dtype)
                ys.append(y_NH)
            out_TH = exchange.combine(ys[r], meta, None if weights is None else weights[r])
            sums = reference.combine_reference(ys, idxs, experts, weights, pad_to=pads, align=align)
            assert_bits(out_TH, sums[r], what + "sums")
            assert out_TH.isfinite().all(), what + "padding was summed"


def check_routing(ranks: Ranks) -> None:
    """A routing serves again and again, whatever has become of its dispatch, and only as often as it is asked for."""
    exchange = ranks.exchange()
    xs, idxs, weights = ranks.inputs(6)
    r = ranks.rank
    handle = first = exchange.dispatch(xs[r], idxs[r], weights[r])[3]
    before = first.clone()
    for turn in range(4):
        turned = [x * (turn + 2) for x in xs]
        want = reference.dispatch_reference(turned, idxs, E)[r]
        x_NH, _, _, meta = exchange.dispatch(turned[r], None, None, handle)
        assert_bits(x_NH, want.x_NH, f"turn {turn}")
        assert HandleView(meta).epoch == turn + 2
        ys = [received.x_NH for received in reference.dispatch_reference(turned, idxs, E)]
        out_TH = exchange.combine(x_NH, meta, weights[r])
        assert_bits(out_TH, reference.combine_reference(ys, idxs, E, weights)[r], f"turn {turn}: sums")
        if turn == 2:
            handle = meta
    assert first.equal(before)
    with watched() as traffic:
        exchange.dispatch(xs[r], None, weights[r], handle)
    several = ranks.world_size > 1
    assert (traffic.gathers, traffic.exchanges) == (several, several)


# ---------------------------------------------------------------------------------------------------- handles


def check_handles(ranks: Ranks) -> None:
    """Any order of open handles; a second combine and an expired handle are errors of this rank alone."""
    exchange = ranks.exchange(depth=2)
    xs, idxs, _ = ranks.inputs(9)
    x_TH, idx_TK = xs[ranks.rank], idxs[ranks.rank]

    def dispatch(scale: float) -> tuple[Tensor, Tensor, Tensor]:
        x_NH, _, _, meta = exchange.dispatch(x_TH * scale, idx_TK, None, tag=0)
        want = reference.combine_reference(
            [received.x_NH for received in reference.dispatch_reference([x * scale for x in xs], idxs, E)],
            idxs,
            E,
        )
        return x_NH, meta, want[ranks.rank]

    def gone(meta: Tensor, y_NH: Tensor, *parts: str) -> None:
        with watched() as traffic:
            error = caught(exchange.combine, y_NH, meta, None)
        expect(error, HandleExpired, "moe_a2a.combine", f"on rank {ranks.rank}", *parts)
        assert (traffic.gathers, traffic.exchanges) == (0, 0)

    for order in ((0, 1), (1, 0)):
        both = [dispatch(1.0), dispatch(3.0)]
        for which in order:
            assert_bits(
                exchange.combine(both[which][0], both[which][1], None), both[which][2], f"handle {which}"
            )
        for x_NH, meta, _ in both:
            gone(meta, x_NH, "combined already")
    dropped, kept = dispatch(1.0), dispatch(2.0)
    newest = dispatch(4.0)
    gone(dropped[1], dropped[0], "2 newer dispatches", "depth = 2")
    for x_NH, meta, want in (newest, kept):
        assert_bits(exchange.combine(x_NH, meta, None), want, "after a dropped handle")
    # A call that fails starts a dispatch too: it counts for depth.
    early = dispatch(1.0)
    for _ in range(2):
        caught(exchange.dispatch, x_TH, idx_TK.float(), None, None, 0)
    gone(early[1], early[0], "2 newer dispatches")


def check_bad_handle(ranks: Ranks) -> None:
    """Something that isn't a handle, or is another exchange's: a bad argument like any other."""
    exchange, other = ranks.exchange(), ranks.exchange()
    x_TH, idx_TK = torch.ones(2, H), torch.tensor([[0], [E - 1]])
    foreign = other.dispatch(x_TH, idx_TK, None, tag=0)
    for handle, kind, part in (
        (None, BadType, "handle is a NoneType"),
        (foreign[3].float(), BadType, "torch.float32 tensor"),
        (foreign[3][None], BadType, "handle is a [1, "),
        (foreign[3][1:], BadValue, "can't be read"),
        (foreign[3][:5], BadValue, "can't be read"),
        (foreign[3], BadValue, "another group"),
        (HandleWord.ROWS, BadValue, "was written to"),
        (HandleWord.OUT_ROWS, BadValue, "was written to"),
        (HandleWord.MATRIX, BadValue, "was written to"),
        (25, BadValue, "was written to"),
    ):
        x_NH, _, _, meta = exchange.dispatch(x_TH, idx_TK, None, tag=0)
        mine = meta if ranks.rank else handle
        if isinstance(handle, int) and ranks.rank == 0:
            mine = meta
            mine[handle] += 1
        error = caught(exchange.combine, x_NH, mine, None)
        if ranks.rank == 0:
            expect(error, kind, "moe_a2a.combine", "on rank 0", part)
        else:  # every rank has a token at expert 0
            expect(error, PeerAborted, "moe_a2a.combine", "rank 0 said", part)
    step(ranks, exchange)
    assert_bits(other.combine(foreign[0], foreign[3], None), x_TH, "the other exchange's handle")


def check_bad_combine(ranks: Ranks) -> None:
    """A bad y ends the call where its rows are needed, and only there; bad weights end it on their rank."""
    exchange = ranks.exchange()
    r, R = ranks.rank, ranks.world_size
    owners = reference.expert_owner(E, R)
    # Rank q's tokens go to rank 0's and rank q's experts; rank R-1 keeps to itself.
    experts = [[0, owners[rank].start] if rank < R - 1 else [owners[rank].start] * 2 for rank in range(R)]
    xs = [torch.arange(2 * H).view(2, H).float() + 100 * rank for rank in range(R)]
    idxs = [torch.tensor([pair, pair]) for pair in experts]
    weights = [torch.tensor([[2.0, 0.5]] * 2) for _ in range(R)]
    ys = [received.x_NH for received in reference.dispatch_reference(xs, idxs, E)]
    want = reference.combine_reference(ys, idxs, E, weights)[r]

    def combine(
        change: Callable[[Tensor], Any], own_weights: Any
    ) -> tuple[MoeA2AError | None, Tensor | None, Traffic]:
        x_NH, _, _, meta = exchange.dispatch(xs[r], idxs[r], None, tag=0)
        outs: list[Tensor] = []
        with watched() as traffic:
            error = caught(lambda: outs.append(exchange.combine(change(x_NH), meta, own_weights)))
        expect(caught(exchange.combine, x_NH, meta, None), HandleExpired, "combined already")
        return error, outs[0] if outs else None, traffic

    for change, kind, part in (
        (lambda y: y[1:], BadValue, "y has shape"),
        (lambda y: y.int(), BadType, "y has dtype torch.int32"),
        (lambda y: None, BadType, "y is a NoneType"),
    ):
        error, out, traffic = combine(change if r == 0 else (lambda y: y), weights[r])
        if r == 0:
            expect(error, kind, "moe_a2a.combine", "on rank 0", part)
        elif r < R - 1:
            expect(error, PeerAborted, "moe_a2a.combine", "rank 0 said", part)
        else:
            assert error is None and out is not None
            assert_bits(out, want, f"rank {r} needs no row of rank 0")
        if R > 1:  # rank 0 takes part in the exchange, but nothing is sent to it or expected from it
            assert (traffic.gathers, traffic.exchanges) == (2, 1)
            own = 0 if r == 0 else 2 * (1 + (r == R - 1))  # this rank's rows at its own expert
            assert traffic.receive == traffic.send == [own * (q == r) for q in range(R)]
        step(ranks, exchange)

    for bad, kind, part in (
        (weights[r][:1], BadValue, "has shape [1, 2]"),
        (weights[r].int(), BadType, "int32"),
    ):
        error, out, _ = combine(lambda y: y, bad if r == 0 else weights[r])
        if r == 0:
            expect(error, kind, "moe_a2a.combine", "topk_weights", "on rank 0", part)
        else:
            assert error is None and out is not None
            assert_bits(out, want, f"rank {r} beside bad weights")
        step(ranks, exchange)

    error, _, _ = combine(lambda y: y[:, :3] if r else y, weights[r])
    if R > 1:
        expect(error, CallMismatch, "moe_a2a.combine", "hidden size", "7 on rank 0", "3 on rank 1")
    error, _, _ = combine(lambda y: y.double() if r else y, weights[r])
    if R > 1:
        expect(
            error,
            CallMismatch,
            "moe_a2a.combine",
            "dtype",
            "torch.float32 on rank 0",
            "torch.float64 on rank 1",
        )
    else:
        assert error is None
    step(ranks, exchange)


def check_late_peer(ranks: Ranks) -> None:
    """A peer that comes after several slices of a wait, to a dispatch and to a combine, is waited for."""
    exchange = ranks.exchange()
    x_TH = torch.full((1, H), 2.0)
    for late in range(ranks.world_size):
        time.sleep(0.3 * (ranks.rank == late))
        x_NH, _, _, meta = exchange.dispatch(x_TH, torch.full((1, 1), E - 1), None, tag=0)
        time.sleep(0.3 * (ranks.rank == late))
        assert_bits(exchange.combine(x_NH, meta, None), x_TH, f"rank {late} is late")


def check_traffic(ranks: Ranks) -> None:
    """A dispatch is one all-gather and one all-to-all, and so is a combine; one rank alone sends nothing."""
    exchange = ranks.exchange()
    with watched() as traffic:
        step(ranks, exchange)
    several = ranks.world_size > 1
    assert (traffic.gathers, traffic.exchanges) == (2 * several, 2 * several)


def check_close(ranks: Ranks) -> None:
    """Closing twice is fine, using it afterwards isn't; the process group lives on and others are untouched."""
    exchange, other = ranks.exchange(), ranks.exchange()
    x_NH, _, _, meta = exchange.dispatch(torch.ones(1, H), torch.zeros(1, 1).long(), None, tag=0)
    exchange.close()
    exchange.close()
    expect(
        caught(exchange.combine, x_NH, meta, None),
        GroupClosed,
        "moe_a2a.combine",
        f"rank {ranks.rank}",
    )
    expect(caught(exchange.dispatch, x_NH, meta, None, None, 0), GroupClosed, "moe_a2a.dispatch")
    step(ranks, other)


CHECKS_ANYWHERE = (
    check_parity,
    check_narrow_rows,
    check_other_widths,
    check_strides,
    check_every_bit,
    check_outputs_are_their_own,
    check_bad_input,
    check_pad_too_small,
    check_options,
    check_routing,
    check_handles,
    check_bad_handle,
    check_bad_combine,
    check_traffic,
    check_close,
)
CHECKS_TOGETHER = (
    check_late_peer,
    check_two_culprits,
    check_foreign_failure,
    check_mismatch,
    check_swapped_calls,
)


def on_pool(ctx: RankContext, name: str) -> None:
    """Runs the check of this name on a rank of the pool."""
    globals()[name](Ranks(ctx.rank, ctx.world_size, ctx.process_group))


@pytest.mark.parametrize("check", CHECKS_ANYWHERE)
def test_one_rank(check: Callable[[Ranks], None]) -> None:
    """Without torch.distributed."""
    assert not dist.is_initialized()
    check(Ranks(0, 1, None))


@pytest.mark.parametrize("check", CHECKS_ANYWHERE + CHECKS_TOGETHER)
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks(pool: RankPool, ranks: int, check: Callable[[Ranks], None]) -> None:
    """Over gloo."""
    pool.run(ranks, on_pool, check.__name__)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"world_size": 0}, "world_size = 0"),
        ({"world_size": 2}, "torch.distributed is not initialised"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"top_k": 0}, "top_k = 0"),
        ({"max_tokens": -1}, "max_tokens = -1"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"depth": 0}, "depth = 0"),
        ({"max_tokens": 2**30, "top_k": 2}, "max_tokens * top_k = 2147483648"),
    ],
)
def test_constructor(change: dict[str, int], part: str) -> None:
    """Sizes that make no sense are named."""
    sizes = {"num_experts": 4, "top_k": 2, "max_tokens": 8, "hidden_size": 4, "max_recv_rows": 9, "depth": 2}
    sizes.update({"rank": 0, "world_size": 1}, **change)
    arguments: dict[str, Any] = {"process_group": None, "dtype": torch.float32, **sizes}
    with pytest.raises(BadValue, match="CollectiveExchange: ") as error:
        CollectiveExchange(**arguments)
    assert part in str(error.value)


# ------------------------------------------------------------------------------------------------- lost peers


def lost_peers(rank: int, folder: str) -> None:
    """Three ranks: one doesn't come, one is interrupted while it waits, one dies; each in a process group of its own.

    Writes ``ok`` beside the rendezvous file when all was as it should be.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=timedelta(seconds=30)
    )
    x_TH, idx_TK = torch.ones(2, H), torch.tensor([[0], [E - 1]])

    def exchange(members: Sequence[int], timeout: float) -> CollectiveExchange | None:
        process_group = dist.new_group(list(members))
        if rank not in members:
            return None
        sizes = {
            "num_experts": E,
            "top_k": K,
            "max_tokens": T,
            "hidden_size": H,
            "max_recv_rows": 99,
            "depth": 2,
        }
        arguments: dict[str, Any] = {"dtype": torch.float32, "timeout": timeout, **sizes}
        made = CollectiveExchange(
            process_group, members.index(rank), len(members), warmup_timeout=20.0, **arguments
        )
        made.dispatch(x_TH, idx_TK, None, tag=0)  # the first call has more time
        return made

    def poisoned(broken: CollectiveExchange, why: str) -> None:
        expect(caught(broken.dispatch, x_TH, idx_TK, None, None, 0), GroupPoisoned, why)
        expect(caught(broken.combine, x_TH, idx_TK[0], None), GroupPoisoned, why)
        broken.close()
        expect(caught(broken.dispatch, x_TH, idx_TK, None, None, 0), GroupClosed)

    waiting = exchange((0, 1), 1.0)
    if rank == 0:
        assert waiting is not None
        started = time.monotonic()
        error = caught(waiting.dispatch, x_TH, idx_TK, None, None, 0)
        expect(error, PeerTimeout, "moe_a2a.dispatch: call 2 on rank 0", "waited 1 s")
        assert isinstance(error, TimeoutError)
        assert 0.9 < time.monotonic() - started < 11, "the bound is 1 s, with room for a busy machine"
        poisoned(waiting, "PeerTimeout")

    interrupted = exchange((1, 2), 60.0)
    if rank == 1:
        assert interrupted is not None
        alarm = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            interrupted.dispatch(x_TH, idx_TK, None, tag=0)
        assert time.monotonic() - started < 20, "Ctrl-C has to end a wait of 60 s"
        poisoned(interrupted, "KeyboardInterrupt")

    bereft = exchange((0, 1, 2), 20.0)
    assert bereft is not None
    Path(folder, f"ok{rank}").touch()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught(bereft.dispatch, x_TH, idx_TK, None, None, 0)
    assert isinstance(error, PeerLost), repr(error)
    expect(error, type(error), "moe_a2a.dispatch: call 2 on rank", "poisoned")
    poisoned(bereft, type(error).__name__)
    Path(folder, f"end{rank}").touch()
    os._exit(0)  # a process group with a dead member can't be taken down in order


def test_lost_peers(tmp_path: Path) -> None:
    """A bound on every wait, an error that says what happened, and no further use."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=lost_peers, args=(rank, str(tmp_path))) for rank in range(3)]
    deadline = time.monotonic() + 90
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
    assert codes == [0, 0, -signal.SIGKILL]
    assert sorted(path.name for path in tmp_path.glob("[oe]*")) == ["end0", "end1", "ok0", "ok1", "ok2"]
