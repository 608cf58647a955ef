"""Groups in which one rank is the numpy implementation of docs/protocol.md and the others are the product.

All ranks run the same body; a :class:`Player` hides which of the two a rank is, so that what is compared with the
oracle on a product rank is compared on the numpy rank as well. The numpy rank makes its ``EPGroup`` like everybody,
for the meeting and the memory, and never calls dispatch or combine of the product.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy_rank
import torch
from numpy_rank import NumpyRank, Sizes
from pool import RankContext
from torch import Tensor

import moe_a2a
from moe_a2a import reference
from moe_a2a.op_host.layout import HandleView, ids_digest
from rank_bodies.errors import Caught, caught
from rank_bodies.inputs import (
    GroupSpec,
    Inputs,
    Step,
    assert_bits,
    dtype_of,
    make_inputs,
    run_experts,
    scale_expert,
)

CODES = {
    "float32": numpy_rank.FLOAT32,
    "bfloat16": numpy_rank.BFLOAT16,
    "float16": numpy_rank.FLOAT16,
    "float64": numpy_rank.FLOAT64,
}
NAMES = list(CODES)


def code_of(tensor: Tensor | None) -> int:
    """The document's number of a tensor's dtype; 0 for no tensor."""
    return numpy_rank.NO_DTYPE if tensor is None else CODES[str(tensor.dtype).removeprefix("torch.")]


def to_numpy(tensor: Tensor) -> Any:
    """The same bits in numpy's storage type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().numpy()


def to_torch(array: Any, dtype: torch.dtype) -> Tensor:
    """The same bits in a tensor."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array).view(dtype)


# ------------------------------------------------------------------------------------------------------------- players


@dataclass(frozen=True)
class Spec(GroupSpec):
    """Arguments of a group in which a rank is numpy.

    Attributes:
        push: whether the group has the regions for pushing; then each product rank pushes by chance, call by call, and so does
            the numpy rank.
        flag_rows: of the product's ranks; the numpy rank takes any.
        flags: flag_rows of each rank, where the product's differ.
        always: push whenever the document allows it.
        first_n: number of the first call.
        largest_code: V.
        sync: nobody calls asynchronously where others may not.
    """

    push: bool = False
    flag_rows: int = 0
    flags: tuple[int, ...] = ()
    always: bool = False
    first_n: int = 1
    largest_code: int | None = None
    sync: bool = False

    def kwargs(self, world_size: int) -> dict[str, Any]:
        tiling = {"flag_rows": self.flag_rows, "mix": 7 if self.push and not self.always else 0}
        return {
            **super().kwargs(world_size),
            "protocol": "push" if self.push else "pull",
            "_tiling": tiling,
            "_first_epoch": self.first_n,
            "_code_max": self.largest_code,
        }


@dataclass(frozen=True)
class Turn:
    """A dispatch and what follows of it.

    Attributes:
        step: of all ranks, but for top_k.
        top_k: K of each rank; the document doesn't ask that they agree.
        tag: of the call.
        other: put x and y where the record says, and not where they are by default.
        padding: rows of an expert are padded to a multiple of it.
        pads: pad_to of each rank, None anywhere: as many rows as come.
        quantize: None, "int8" or "fp8_e4m3".
        like: the turn whose routing is used again.
    """

    step: Step
    top_k: tuple[int, ...]
    tag: int = 0
    other: bool = False
    padding: int = 1
    pads: tuple[int | None, ...] = ()
    quantize: str | None = None
    like: Turn | None = None

    def of(self, rank: int) -> Step:
        """The step as that rank has it."""
        return replace(self.step, top_k=self.top_k[rank])

    def pad(self, rank: int) -> int | None:
        """pad_to of that rank."""
        return self.pads[rank] if self.pads else None

    def inputs(self, experts: int) -> list[Inputs]:
        """What every rank passes."""
        made = [make_inputs(self.of(rank), rank, experts) for rank in range(len(self.top_k))]
        if self.like is None:
            return made
        routed = []
        for mine, old in zip(made, self.like.inputs(experts), strict=True):
            weights = mine.weights_TK
            if weights is not None:
                weights = weights.masked_fill(old.idx_TK < 0, float("nan"))
            routed.append(Inputs(-mine.x_TH, old.idx_TK, weights))
        return routed

    def dispatch_weights(self, mine: Inputs) -> Tensor | None:
        """The weights that travel."""
        return mine.weights_TK if self.step.weigh in ("both", "dispatch") else None

    def combine_weights(self, mine: Inputs) -> Tensor | None:
        """The weights that are applied."""
        return mine.weights_TK if self.step.weigh in ("both", "combine") else None


@dataclass
class _Handle:
    send_count_matrix: Tensor
    num_tokens: int
    top_k: int
    real: Any


@dataclass
class _Dispatched:
    """The numpy rank's result, with the names of the product's."""

    x: Tensor
    weights: Tensor | None
    scales: Tensor | None
    counts: Tensor
    offsets: Tensor
    handle: _Handle


class Player:
    """A rank that is the product."""

    is_numpy = False

    def __init__(self, ctx: RankContext, group: Any) -> None:
        self.rank = ctx.rank
        self.group = group
        self.rng = random.Random(ctx.rng.random())

    def begin(self, mine: Inputs, turn: Turn, like: Any = None, asynchronous: bool = True) -> Any:
        """Start a dispatch with the weights that the turn's step sends; ``wait`` gives the result."""
        x_TH = mine.x_TH
        if turn.other:
            # With dispatches under way the tensors may all be in use.
            with contextlib.suppress(moe_a2a.errors.WindowBusy):
                x_TH = self.group.empty(*mine.x_TH.shape, mine.x_TH.dtype)
                x_TH.copy_(mine.x_TH)
        dispatch: Any = moe_a2a.dispatch
        return dispatch(
            x_TH,
            mine.idx_TK if turn.like is None else None,
            self.group,
            turn.dispatch_weights(mine),
            routing=None if turn.like is None else like.handle,
            pad_to=turn.pad(self.rank),
            align=turn.padding,
            quantize=turn.quantize,
            async_op=asynchronous,
            tag=turn.tag,
        )

    def wait(self, begun: Any, mine: Inputs) -> Any:
        """The result of a dispatch that was begun."""
        return begun.wait()

    def dispatch(self, mine: Inputs, turn: Turn, like: Any = None) -> Any:
        """Dispatch."""
        return self.begin(mine, turn, like, asynchronous=False)

    def combine(self, y_NH: Tensor, d: Any, mine: Inputs, turn: Turn) -> Tensor:
        """Combine with the weights that the turn's step applies."""
        if turn.other:
            slot_NH = d.empty_like_rows(y_NH.dtype, y_NH.shape[1])
            slot_NH.copy_(y_NH)
            y_NH = slot_NH
        weights = turn.combine_weights(mine)
        if self.rng.random() < 0.3:
            return moe_a2a.combine(y_NH, d.handle, weights, async_op=True).wait()
        return moe_a2a.combine(y_NH, d.handle, weights)

    def abort(self, text: str) -> None:
        """Start a call with bad input."""
        x_TH = torch.zeros(1, self.group.hidden_size, dtype=self.group.dtype)
        moe_a2a.dispatch(x_TH, torch.tensor([[self.group.num_experts + 7]]), self.group)

    def refuse(self, d: Any, text: str) -> None:
        """Combine with an unusable y."""
        moe_a2a.combine(torch.zeros(len(d.x) + 1, d.x.shape[1]), d.handle)

    def combine_badly(self, y_NH: Tensor, d: Any) -> None:
        """Combine with unusable weights: the rows go out all the same."""
        moe_a2a.combine(y_NH, d.handle, torch.ones(1, 99))

    def leave(self) -> None:
        """Close the group."""
        self.group.close()


class NumpyPlayer(Player):
    """The rank that is numpy."""

    is_numpy = True

    def __init__(self, ctx: RankContext, group: Any, node: NumpyRank, spec: GroupSpec) -> None:
        super().__init__(ctx, group)
        self.node = node
        self.always = isinstance(spec, Spec) and spec.always

    def _pushes(self) -> bool:
        return self.node.sizes.push and (self.always or self.rng.random() < 0.5)

    def begin(self, mine: Inputs, turn: Turn, like: Any = None, asynchronous: bool = True) -> Any:
        weights = turn.dispatch_weights(mine)
        x, scales = to_numpy(mine.x_TH), None
        if turn.quantize is not None:
            q_TH, scales = quantised(mine.x_TH, turn.quantize)
            x = q_TH.view(torch.uint8).numpy()
        pad = turn.pad(self.rank)
        return self.node.begin(
            x,
            mine.idx_TK.numpy() if turn.like is None else None,
            None if weights is None else to_numpy(weights),
            code_of(mine.x_TH),
            code_of(weights),
            turn.tag,
            staged=turn.other,
            push=not asynchronous and self._pushes(),
            later=asynchronous,
            flag_rows=self.rng.choice([0, 0, 1, 3]),
            padding=turn.padding,
            pad=-1 if pad is None else pad,
            quant=QUANTS[turn.quantize],
            scales=scales,
            routing=None if turn.like is None else like.handle.real,
        )

    def wait(self, begun: Any, mine: Inputs) -> Any:
        got = self.node.receive(begun)
        counts, handle = torch.from_numpy(got.counts), got.handle
        x_dtype, scales = mine.x_TH.dtype, None
        if got.scales_NS is not None:
            int8 = begun.record["QUANT"] == numpy_rank.INT8
            x_dtype = torch.int8 if int8 else torch.float8_e4m3fn
            scales = torch.from_numpy(got.scales_NS)
            scales = scales[:, 0] if int8 else scales
        padded = (counts + handle.align - 1) // handle.align * handle.align
        weights = None
        if got.weights_N is not None:
            assert mine.weights_TK is not None
            weights = to_torch(got.weights_N, mine.weights_TK.dtype)
        return _Dispatched(
            x=to_torch(got.x_NH, x_dtype),
            weights=weights,
            scales=scales,
            counts=counts,
            offsets=torch.nn.functional.pad(padded.cumsum(0), (1, 0)).int(),
            handle=_Handle(
                send_count_matrix=torch.from_numpy(handle.counts_RE).int(),
                num_tokens=int(handle.idx_TK.shape[0]),
                top_k=int(handle.idx_TK.shape[1]),
                real=handle,
            ),
        )

    def dispatch(self, mine: Inputs, turn: Turn, like: Any = None) -> Any:
        return self.wait(self.begin(mine, turn, like, asynchronous=False), mine)

    def combine(self, y_NH: Tensor, d: Any, mine: Inputs, turn: Turn) -> Tensor:
        weights = turn.combine_weights(mine)
        out = self.node.combine(
            to_numpy(y_NH),
            d.handle.real,
            None if weights is None else to_numpy(weights),
            code_of(y_NH),
            code_of(weights),
            wide=turn.other,
            push=self._pushes(),
        )
        return to_torch(out, y_NH.dtype)

    def abort(self, text: str) -> None:
        self.node.abort(text)

    def refuse(self, d: Any, text: str) -> None:
        self.node.refuse(d.handle.real, text)

    def combine_badly(self, y_NH: Tensor, d: Any) -> None:
        self.node.combine(to_numpy(y_NH), d.handle.real, None, code_of(y_NH), push=self._pushes(), sums=False)

    def leave(self) -> None:
        self.node.leave()


def quantised(x_TH: Tensor, quantize: str) -> tuple[Tensor, Any]:
    """Finite rows in one byte a value, and their scales [T, S] for numpy; written once more, on purpose."""
    width = {"int8": x_TH.shape[1], "fp8_e4m3": numpy_rank.SCALE_COLUMNS}[quantize]
    limit = {"int8": 127.0, "fp8_e4m3": 448.0}[quantize]
    x = x_TH.float().numpy()
    blocks = range(0, x.shape[1], width)
    scales = np.stack([np.abs(x[:, b : b + width]).max(1) / np.float32(limit) for b in blocks], 1)
    spread = np.repeat(scales, width, axis=1)[:, : x.shape[1]]
    with np.errstate(all="ignore"):
        quotient = np.where(spread > 0, x / spread, np.float32(0))
    if quantize == "int8":
        return torch.from_numpy(np.rint(quotient).astype(np.int8)), scales.astype(np.float32)
    return torch.from_numpy(quotient).to(torch.float8_e4m3fn), scales.astype(np.float32)


QUANTS = {None: numpy_rank.NONE, "int8": numpy_rank.INT8, "fp8_e4m3": numpy_rank.FP8_E4M3}
FORMATS = {"compact": numpy_rank.COMPACT, "portable": numpy_rank.PORTABLE, "line": numpy_rank.LINE}


def sizes_of(spec: GroupSpec, world_size: int) -> Sizes:
    """What the numpy rank computes its layout from."""
    kwargs = spec.kwargs(world_size)
    return Sizes(
        world_size=world_size,
        num_experts=spec.experts,
        top_k=spec.top_k,
        max_tokens=spec.max_tokens,
        row_bytes=spec.hidden * dtype_of(spec.dtype).itemsize,
        max_recv_rows=kwargs["max_recv_rows"],
        slots=spec.depth,
        push=kwargs.get("protocol") == "push",
    )


@contextmanager
def playing(
    ctx: RankContext,
    spec: GroupSpec,
    numpy_at: int,
    make: Callable[..., NumpyRank] = NumpyRank,
) -> Iterator[Player]:
    """A group of its own in which rank ``numpy_at`` is numpy."""
    kwargs = spec.kwargs(ctx.world_size)
    if isinstance(spec, Spec) and spec.flags:
        kwargs["_tiling"]["flag_rows"] = spec.flags[ctx.rank]
    group = ctx.fresh_group(**kwargs)
    assert group.transport.name == "cpu-shm", group.transport.reason
    if ctx.rank != numpy_at:
        yield Player(ctx, group)
        return
    node = make(
        [window.view() for window in group.heap.windows],
        ctx.rank,
        sizes_of(spec, ctx.world_size),
        FORMATS[spec.record_format],
        timeout=spec.timeout,
        largest_code=spec.largest_code if isinstance(spec, Spec) else None,
    )
    try:
        yield NumpyPlayer(ctx, group, node, spec)
    finally:
        node.detach()


# ------------------------------------------------------------------------------------------------------- many good steps

# D a dispatch, B and W its halves (a rank may do all of it in B), A an asynchronous one on all ranks, C its combine, X dropped.
BLOCKS = {
    2: ["D0 C0", "D0 D1 C0 C1", "D0 D1 C1 C0", "D0 X0", "D0 D1 X0 C1", "D0 D1 C0 X1"],
    3: ["D0 D1 D2 C1 C0 C2", "D0 D1 D2 C2 C1 C0", "D0 D1 C0 D2 C1 C2", "D0 D1 D2 X1 C0 C2"],
}
ASYNCHRONOUS = {
    2: ["A0 A1 W0 W1 C0 C1", "A0 A1 W1 C1 W0 C0", "A0 A1 D2 W1 C1 C2"],
    3: ["A0 A1 A2 W0 C0 W1 W2 C2 C1", "A0 A1 A2 W2 W0 W1 C1 C0 C2"],
}
EITHER = {
    2: ["B0 D1 W0 C1 C0", "B0 B1 W0 W1 C1 C0", "D0 B1 C0 W1 C1"],
    3: ["B0 B1 B2 W0 W1 C1 W2 C0 C2"],
}


def make_program(seed: int, depth: int, dispatches: int, either: bool = True) -> list[str]:
    """At least that many dispatches: ``D3`` starts handle 3, ``C3`` combines it, ``X3`` drops it."""
    rng = random.Random(seed)
    kinds = [BLOCKS, ASYNCHRONOUS, EITHER] if either else [BLOCKS, ASYNCHRONOUS]
    blocks = [block for kind in kinds for size in range(2, depth + 1) for block in kind[size]]
    program: list[str] = []
    first = 0
    while first < dispatches:
        rng.shuffle(blocks)
        for block in blocks:
            words = block.split()
            program += [f"{word[0]}{first + int(word[1:])}" for word in words]
            first = max(int(word[1:]) for word in program) + 1
    return program


def make_turn(seed: int, spec: GroupSpec, world_size: int, like: Turn | None = None) -> Turn:
    """Anything that the group can take; every rank makes the same."""
    rng = random.Random(seed)
    room = spec.hidden * dtype_of(spec.dtype).itemsize

    def some_dtype(hidden: int) -> str:
        return rng.choice([name for name in NAMES if dtype_of(name).itemsize * hidden <= room])

    hidden = rng.choice([1, 3, room // 8, room // 4, room // 2])
    same_k = rng.randint(1, spec.top_k)
    top_k = tuple(rng.choice([same_k, rng.randint(1, spec.top_k)]) for _ in range(world_size))
    none_at_all = rng.random() < 0.08
    tokens = tuple(
        0
        if none_at_all or rng.random() < 0.2
        else rng.choice([1, spec.max_tokens, rng.randint(1, spec.max_tokens)])
        for _ in range(world_size)
    )
    step = Step(
        tokens=tokens,
        top_k=same_k,
        hidden=hidden,
        dtype=some_dtype(hidden),
        weight_dtype=rng.choice([None, *NAMES]),
        y_dtype=rng.choice([None, None, some_dtype(hidden)]),
        ids=rng.choice(["int32", "int64"]),
        routing=rng.choice(
            ["any", "any", "distinct" if spec.experts >= spec.top_k else "any", "one", "round"]
        ),
        target=rng.randrange(spec.experts),
        drop=rng.choice([0.0, 0.0, 0.3, 0.3, 0.9, 1.0]),
        rows="random",
        weigh=rng.choice(["both", "both", "dispatch", "combine"]),
        seed=seed,
    )
    tag = rng.choice([0, 1, -1, 2**31, -(2**63), rng.getrandbits(62)])
    turn = Turn(
        step,
        top_k,
        tag,
        rng.random() < 0.4,
        padding=rng.choice([1, 1, 1, 2, 5]),
        quantize=rng.choice([None, None, "int8", "fp8_e4m3"]),
    )
    if like is not None:
        turn = replace(
            turn, step=replace(step, tokens=like.step.tokens, drop=0.0), top_k=like.top_k, like=like
        )
    if rng.random() < 0.3:
        totals = rows_of(turn, spec.experts)
        turn = replace(turn, pads=tuple(rng.choice([None, total, total + 3]) for total in totals))
    return turn


def matrix_of(turn: Turn, experts: int) -> Tensor:
    """[R, E] the pairs that each rank has for each expert."""
    idxs = [i.idx_TK for i in turn.inputs(experts)]
    return torch.stack([reference.send_counts_reference(idx_TK, experts)[0] for idx_TK in idxs]).int()


def padded_counts(counts: Tensor, padding: int) -> Tensor:
    """Rows of each expert with its padding."""
    return (counts + padding - 1) // padding * padding


def rows_of(turn: Turn, experts: int) -> list[int]:
    """Rows that each rank receives, with padding."""
    counts_E = padded_counts(matrix_of(turn, experts).sum(0), turn.padding)
    owners = reference.expert_owner(experts, len(turn.top_k))
    return [int(counts_E[own.start : own.stop].sum()) for own in owners]


def spread_rows(turn: Turn, rows: Tensor, counts: Tensor, rank: int) -> Tensor:
    """Put the oracle's rows where padding leaves them, with zeros between and behind."""
    padded = padded_counts(counts, turn.padding)
    pad = turn.pad(rank)
    total = int(padded.sum()) if pad is None else pad
    result = torch.zeros(total, *rows.shape[1:], dtype=rows.dtype)
    from_row, to_row = 0, 0
    for count, room in zip(counts.tolist(), padded.tolist(), strict=True):
        result[to_row : to_row + count] = rows[from_row : from_row + count]
        from_row, to_row = from_row + count, to_row + room
    return result


def check_dispatched(
    turn: Turn, d: Any, inputs: Sequence[Inputs], experts: int, rank: int, what: str
) -> None:
    """Compare every field of a dispatch's result with the oracle, to the bit."""
    idxs = [i.idx_TK for i in inputs]
    weights: Any = [i.weights_TK for i in inputs]
    if turn.step.weight_dtype is None or turn.step.weigh == "combine":
        weights = None
    xs = [i.x_TH for i in inputs]
    scales_N = None
    if turn.quantize is not None:
        pairs = [reference.quantize_rows_reference(x, turn.quantize) for x in xs]
        xs = [q.view(torch.uint8) for q, _ in pairs]
        scales = [s if s.dim() == 2 else s[:, None] for _, s in pairs]
        scales_N = reference.dispatch_reference(scales, idxs, experts)[rank].x_NH
    want = reference.dispatch_reference(xs, idxs, experts, weights)[rank]
    matrix_RE = torch.stack([reference.send_counts_reference(idx_TK, experts)[0] for idx_TK in idxs]).int()
    assert_bits(d.handle.send_count_matrix, matrix_RE, f"{what}: send-count matrix")
    assert_bits(d.counts, want.counts, f"{what}: counts")
    ends = padded_counts(want.counts, turn.padding).cumsum(0)
    assert_bits(d.offsets, torch.nn.functional.pad(ends, (1, 0)).int(), f"{what}: offsets")
    x_NH = d.x
    if turn.quantize is not None:
        assert d.x.dtype == {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[turn.quantize], what
        x_NH = d.x.view(torch.uint8)
    assert_bits(x_NH, spread_rows(turn, want.x_NH, want.counts, rank), f"{what}: rows")
    if scales_N is None:
        assert d.scales is None, what
    else:
        scales_NS = spread_rows(turn, scales_N, want.counts, rank)
        assert_bits(d.scales, scales_NS[:, 0] if turn.quantize == "int8" else scales_NS, f"{what}: scales")
    if want.weights_N is None:
        assert d.weights is None, f"{what}: weights came without having been sent"
    else:
        assert_bits(d.weights, spread_rows(turn, want.weights_N, want.counts, rank), f"{what}: weights")
    assert (d.handle.num_tokens, d.handle.top_k) == tuple(idxs[rank].shape), what


def check_combined(
    turn: Turn, out_TH: Tensor, inputs: Sequence[Inputs], experts: int, rank: int, what: str
) -> None:
    """Compare with the oracle to the bit."""
    step = turn.step
    y_dtype = dtype_of(step.y_dtype or step.dtype)
    weights: Any = [i.weights_TK for i in inputs]
    if step.weight_dtype is None or step.weigh == "dispatch":
        weights = None
    xs = [i.x_TH for i in inputs]
    if turn.quantize is not None:
        pairs = [reference.quantize_rows_reference(x, turn.quantize) for x in xs]
        xs = [reference.dequantize_rows_reference(q, s) for q, s in pairs]
    xs = [x.to(y_dtype) for x in xs]
    want = reference.moe_reference(xs, [i.idx_TK for i in inputs], weights, scale_expert, experts)[rank]
    assert_bits(out_TH, want, f"{what}: combined")


def results_of(player: Player, d: Any, turn: Turn) -> Tensor:
    """What this rank's experts make of the rows; rows behind them, which nobody looks at, are NaN."""
    y_dtype = dtype_of(turn.step.y_dtype or turn.step.dtype)
    N = int(d.offsets[-1])
    x_NH = d.x[:N]
    if turn.quantize is not None:
        x_NH = moe_a2a.dequantize_rows(x_NH, d.scales[:N], y_dtype)
    y_NH = run_experts(x_NH, d.offsets, player.group.local_experts, y_dtype)
    behind = torch.full((len(d.x) - N, y_NH.shape[1]), float("nan"), dtype=y_dtype)
    return torch.cat([y_NH, behind])


def good_turn(player: Player, spec: GroupSpec, world_size: int, seed: int) -> None:
    """One step that has to work, every rank with tokens for every expert."""
    T = min(spec.max_tokens, spec.experts)
    step = Step(
        (T,) * world_size, 1, 3, spec.dtype, rows="random", routing="round", weight_dtype="float32", seed=seed
    )
    turn = Turn(step, (min(2, spec.top_k),) * world_size)
    inputs = turn.inputs(spec.experts)
    mine = inputs[player.rank]
    d = player.dispatch(mine, turn)
    out_TH = player.combine(results_of(player, d, turn), d, mine, turn)
    what = f"good turn {seed}, rank {player.rank}"
    check_dispatched(turn, d, inputs, spec.experts, player.rank, what)
    check_combined(turn, out_TH, inputs, spec.experts, player.rank, what)


def make_turns(
    seed: int, program: list[str], spec: GroupSpec, world_size: int
) -> dict[int, tuple[Turn, int]]:
    """The turn of every dispatch, and the one whose routing it uses again or -1; the same on all ranks."""
    rng = random.Random(seed)
    turns: dict[int, tuple[Turn, int]] = {}
    received: list[int] = []
    for word in program:
        i = int(word[1:])
        if word[0] in "ABD":
            again = rng.choice(received[-3:]) if received and rng.random() < 0.25 else -1
            like = turns[again][0] if again >= 0 else None
            turns[i] = make_turn(1000 * seed + i, spec, world_size, like), again
        if word[0] in "DW":
            received.append(i)
    return turns


def many_steps(ctx: RankContext, spec: Spec, numpy_at: int, dispatches: int, seed: int) -> dict[str, int]:
    """Run a program with random delays and nothing else that orders the ranks; then compare all of it.

    Returns how many combines there were, and of a product rank how often it pushed and how many waves there were.
    """
    program = make_program(seed, spec.depth, dispatches, not spec.sync)
    turns = make_turns(seed, program, spec, ctx.world_size)
    inputs = {i: turn.inputs(spec.experts) for i, (turn, _) in turns.items()}
    begun: dict[int, Any] = {}
    opened: dict[int, Any] = {}
    outs: dict[int, Tensor] = {}
    with playing(ctx, spec, numpy_at) as player:
        for word in program:
            i = int(word[1:])
            turn, again = turns[i]
            mine = inputs[i][ctx.rank]
            ctx.jitter(2)
            if word[0] in "ABD":
                like = opened[again] if again >= 0 else None
                if word[0] == "A" or (word[0] == "B" and ctx.rng.random() < 0.5):
                    begun[i] = player.begin(mine, turn, like)
                else:
                    opened[i] = player.dispatch(mine, turn, like)
            elif word[0] == "W" and i in begun:
                opened[i] = player.wait(begun[i], mine)
            elif word[0] == "C":
                outs[i] = player.combine(results_of(player, opened[i], turn), opened[i], mine, turn)
        for i, d in opened.items():
            what = f"rank {ctx.rank} (numpy at {numpy_at}), {turns[i]}"
            check_dispatched(turns[i][0], d, inputs[i], spec.experts, ctx.rank, what)
            if i in outs:
                check_combined(turns[i][0], outs[i], inputs[i], spec.experts, ctx.rank, what)
        stats = {} if player.is_numpy else player.group.stats()
        return {
            "combined": len(outs),
            "pushes": stats.get("pushes", 0),
            "waves": stats.get("waves", 0),
            "dispatches": stats.get("dispatches", 0),
        }


# ------------------------------------------------------------------------------------------------------------- headers


def headers(ctx: RankContext, spec: GroupSpec, numpy_at: int) -> Any:
    """The headers of all windows and their sizes, as the numpy rank reads them."""
    with playing(ctx, spec, numpy_at) as player:
        if not isinstance(player, NumpyPlayer):
            ctx.barrier()  # a rank that closes its group writes to the windows
            return None
        node, R = player.node, range(ctx.world_size)
        end = node.at.total_bytes
        rest = [bool(node._bytes(q, 72, 4096 - 72).any()) for q in R]
        counters = [node._bytes(q, 4096, 24).view("<i8").tolist() for q in R]
        unwritten = [bool(node._bytes(q, 4096 + 24, end - 4096 - 24).any()) for q in R]
        sizes = [len(window.view()) for window in player.group.heap.windows]
        found = [node.header(q) for q in R], sizes, rest, unwritten, counters, end
        ctx.barrier()
        return found


# ------------------------------------------------------------------------------------------------------ calls that fail

TEXT = "the gate gave NaN: naïve façade, ½ of it"


def aborts(ctx: RankContext, spec: GroupSpec, numpy_at: int) -> list[Caught | None]:
    """Calls that one rank, or two, abort; several in a row, so that records of ended calls have to be waited out.

    Returns what each call raised here: abort of rank 0, 1, ..; then of all ranks; then three of rank 0.
    """
    found = []
    bad_ranks = [{r} for r in range(ctx.world_size)] + [set(range(ctx.world_size))] + [{0}] * 3
    with playing(ctx, spec, numpy_at) as player:
        good_turn(player, spec, ctx.world_size, 1)
        for number, bad in enumerate(bad_ranks):
            ctx.jitter(10)
            turn = Turn(Step((4,) * ctx.world_size, 2, 8, spec.dtype, seed=number), (2,) * ctx.world_size)
            mine = make_inputs(turn.step, ctx.rank, spec.experts)
            if ctx.rank in bad:
                found.append(caught(partial(player.abort, TEXT)))
            else:
                found.append(caught(partial(player.dispatch, mine, turn)))
        for seed in (2, 3, 4):
            good_turn(player, spec, ctx.world_size, seed)
    return found


def long_abort(ctx: RankContext, spec: GroupSpec, numpy_at: int) -> Caught | None:
    """The numpy rank aborts with a text as long as a record can carry; a good step follows."""
    with playing(ctx, spec, numpy_at) as player:
        turn = Turn(Step((4,) * ctx.world_size, 2, 8, spec.dtype), (2,) * ctx.world_size)
        mine = make_inputs(turn.step, ctx.rank, spec.experts)
        if isinstance(player, NumpyPlayer):
            text = ("0123456789" * 200)[: player.node.at.record_payload_bytes - 5] + "-end-"
            error = caught(partial(player.abort, text))
        else:
            error = caught(partial(player.dispatch, mine, turn))
        good_turn(player, spec, ctx.world_size, 1)
        return error


def mismatches(ctx: RankContext, spec: GroupSpec, numpy_at: int, whats: Sequence[str]) -> list[Caught | None]:
    """Rank 0 and the others differ in one thing after the other; a good step follows each."""
    R = ctx.world_size
    usual = Turn(Step((4,) * R, 2, 8, "float32", "float32", rows="random"), (2,) * R, tag=11)
    of_step: dict[str, dict[str, Any]] = {
        "H": {"hidden": 6},
        "dtype": {"dtype": "bfloat16"},
        "weight dtype": {"weight_dtype": "float64"},
        "weights": {"weight_dtype": None},
    }
    of_turn: dict[str, dict[str, Any]] = {
        "tag": {"tag": 11 + 2**40},
        "align": {"padding": 4},
        "quantize": {"quantize": "int8"},
    }
    found = []
    with playing(ctx, spec, numpy_at) as player:
        # The ranks have two routings, one of which they may use again.
        old = [replace(usual, step=replace(usual.step, seed=seed)) for seed in (5, 6)]
        handles = [player.dispatch(turn.inputs(spec.experts)[ctx.rank], turn) for turn in old]
        for what in whats:
            turn, again = usual, None
            if what == "other routing":
                again = int(ctx.rank == 0)
            elif what == "routing" and ctx.rank == 0:
                again = 0
            elif ctx.rank == 0:
                changed = replace(turn.step, **of_step.get(what, {}))
                turn = replace(turn, step=changed, **of_turn.get(what, {}))
            if again is not None:
                turn = replace(turn, like=old[again])
            mine = turn.inputs(spec.experts)[ctx.rank]
            like = None if again is None else handles[again]
            found.append(caught(partial(player.dispatch, mine, turn, like)))
            good_turn(player, spec, R, 1)
    return found


def pads(ctx: RankContext, spec: GroupSpec, numpy_at: int, pad: int, padding: int) -> Caught | None:
    """All rows go to the last rank, which wants ``pad`` of them at most; a good step follows."""
    R = ctx.world_size
    step = Step((spec.max_tokens,) * R, 2, 8, routing="one", target=spec.experts - 1, rows="random")
    turn = Turn(step, (2,) * R, padding=padding, pads=(*[0] * (R - 1), pad))
    inputs = turn.inputs(spec.experts)
    with playing(ctx, spec, numpy_at) as player:

        def call() -> None:
            d = player.dispatch(inputs[ctx.rank], turn)
            check_dispatched(turn, d, inputs, spec.experts, ctx.rank, f"rank {ctx.rank}")

        error = caught(call)
        good_turn(player, spec, R, 1)
        return error


def refusals(ctx: RankContext, spec: GroupSpec, numpy_at: int, refuser: int, concerned: int) -> Caught | None:
    """``refuser`` finds its y unusable; only rank ``concerned`` has rows there; a good step follows."""
    with playing(ctx, spec, numpy_at) as player:
        error = None
        for number in range(2):  # twice: the slot of the first has to be usable again
            inputs = [
                Inputs(
                    torch.full((2, 4), float(rank + 1)),
                    torch.tensor(
                        [
                            [player.group.expert_range(rank)[0], -1],
                            [player.group.expert_range(refuser if rank == concerned else rank)[0], -1],
                        ]
                    ),
                    None,
                )
                for rank in range(ctx.world_size)
            ]
            turn = Turn(Step((2,) * ctx.world_size, 2, 4, weight_dtype=None), (2,) * ctx.world_size)
            mine = inputs[ctx.rank]
            d = player.dispatch(mine, turn)
            check_dispatched(turn, d, inputs, spec.experts, ctx.rank, f"refusal {number}")
            if ctx.rank == refuser:
                error = caught(partial(player.refuse, d, TEXT))
                closed = caught(partial(player.combine, d.x, d, mine, turn))
                assert closed is not None and "HandleExpired" in closed.kinds, closed
            else:
                error = caught(partial(player.combine, d.x, d, mine, turn))
        for seed in (1, 2, 3):
            good_turn(player, spec, ctx.world_size, seed)
        return error


def y_differs(ctx: RankContext, spec: GroupSpec, numpy_at: int, what: str) -> Caught | None:
    """The owners' y differ in dtype or H; a good step follows."""
    with playing(ctx, spec, numpy_at) as player:
        T = spec.experts
        turn = Turn(
            Step((T,) * ctx.world_size, 2, 4, weight_dtype=None, routing="round"), (2,) * ctx.world_size
        )
        mine = make_inputs(turn.step, ctx.rank, spec.experts)
        d = player.dispatch(mine, turn)
        y_NH = d.x
        if ctx.rank == 0:
            y_NH = y_NH.bfloat16() if what == "dtype" else y_NH[:, :3].contiguous()
        error = caught(partial(player.combine, y_NH, d, mine, turn))
        good_turn(player, spec, ctx.world_size, 1)
        return error


def expired(ctx: RankContext, spec: GroupSpec, numpy_at: int) -> list[Caught | None]:
    """Combines that come a second time or too late are local errors, which leave the others alone."""
    with playing(ctx, spec, numpy_at) as player:
        turn = Turn(Step((4,) * ctx.world_size, 2, 4, routing="any"), (2,) * ctx.world_size)
        mine = make_inputs(turn.step, ctx.rank, spec.experts)

        def combine(d: Any) -> Caught | None:
            return caught(partial(player.combine, d.x, d, mine, turn))

        opened = [player.dispatch(mine, turn)]
        assert combine(opened[0]) is None
        found = [combine(opened[0])]
        opened = [player.dispatch(mine, turn) for _ in range(spec.depth + 1)]
        found.append(combine(opened[0]))
        for d in opened[1:]:  # the last NS are good
            assert combine(d) is None
        # An aborted call is a dispatch that has started, so it counts.
        d = player.dispatch(mine, turn)
        for _ in range(spec.depth):
            call = partial(player.abort, TEXT) if ctx.rank == 0 else partial(player.dispatch, mine, turn)
            caught(call)
        found.append(combine(d))
        good_turn(player, spec, ctx.world_size, 1)
        return found


def waits_out(
    ctx: RankContext, spec: GroupSpec, numpy_at: int, late: int, make: Callable[..., NumpyRank] = NumpyRank
) -> str:
    """Calls 2 to 6 are aborted by the one rank while ``late`` takes its time before call 2.

    The record of call 6 goes where that of call 2 is, which ``late`` hasn't read. Returns what went wrong afterwards.
    """
    with playing(ctx, spec, numpy_at, make=make) as player:
        good_turn(player, spec, ctx.world_size, 1)
        turn = Turn(Step((4,) * ctx.world_size, 2, 4, routing="any"), (2,) * ctx.world_size)
        call = partial(player.dispatch, make_inputs(turn.step, ctx.rank, spec.experts), turn)
        wrong = ""
        if ctx.rank == late:
            time.sleep(0.3)
            if isinstance(player, NumpyPlayer):
                came = [player.node._came(n, 1 - late) for n in (2, 3, 4)]
                assert came == [True, True, False], came
            for n in range(2, 7):
                error = caught(call)
                if error is None or "PeerAborted" not in error.kinds:
                    wrong = wrong or f"call {n}: {error}"
        else:
            for _ in range(2, 7):
                caught(partial(player.abort, TEXT))
        last = caught(partial(good_turn, player, spec, ctx.world_size, 2))
        ctx.barrier()
        return wrong or ("" if last is None else str(last))


class HastyRank(NumpyRank):
    """A numpy rank that doesn't wait out the records of a call that has ended."""

    def _end_old_call(self, old: int) -> None:
        self._open.discard(old)


class ForgetfulRank(NumpyRank):
    """A numpy rank that leaves the codes of the lap before in their cells."""

    def _clear_slot(self) -> None:
        pass


def stale_code(
    ctx: RankContext,
    spec: GroupSpec,
    numpy_at: int,
    aborting: int,
    make: Callable[..., NumpyRank] = NumpyRank,
) -> Caught | None:
    """The first call of a lap in a slot is aborted: the codes of the lap before have to go all the same.

    With V = 6 and two slots the combine of handle 9 looks for what that of handle 3 left in its cell. Call 7, the
    first of lap 1 in that slot, is the one that clears it. Only calls 3 and 9 have rows for another rank; in call 9 the
    owner is late with its y. Returns what the comparison of handle 9 raises.
    """
    empty = Turn(Step((2,) * ctx.world_size, 1, 4, weight_dtype=None, drop=1.0), (1,) * ctx.world_size)
    owner = 1 - aborting
    with playing(ctx, spec, numpy_at, make=make) as player:
        for n in range(1, 10):
            if n == 7:
                mine = make_inputs(empty.step, ctx.rank, spec.experts)
                if ctx.rank == aborting:
                    caught(partial(player.abort, TEXT))
                else:
                    error = caught(partial(player.dispatch, mine, empty))
                    assert error is not None and "PeerAborted" in error.kinds, error
                continue
            turn = empty
            if n in (3, 9):
                target = player.group.expert_range(owner)[0]
                turn = Turn(
                    Step(
                        (2,) * ctx.world_size,
                        1,
                        4,
                        weight_dtype=None,
                        routing="one",
                        target=target,
                        rows="random",
                        seed=n,
                    ),
                    (1,) * ctx.world_size,
                )
            inputs = turn.inputs(spec.experts)
            mine = inputs[ctx.rank]
            d = player.dispatch(mine, turn)
            if n == 9 and ctx.rank == owner:
                time.sleep(0.3)
            y_NH = results_of(player, d, turn)
            out_TH = player.combine(y_NH, d, mine, turn)
            what = f"call {n} on rank {ctx.rank}"
            compared = caught(partial(check_combined, turn, out_TH, inputs, spec.experts, ctx.rank, what))
            assert compared is None or n == 9, compared
        ctx.barrier()
        return compared


class LateRank(NumpyRank):
    """A numpy rank whose rows are late: who believes an old code takes what is there."""

    def _push(self, *args: Any) -> None:
        time.sleep(0.03)
        super()._push(*args)

    def _give(self, *args: Any) -> None:
        time.sleep(0.03)
        super()._give(*args)

    def _say(self, *args: Any) -> None:
        time.sleep(0.01)
        super()._say(*args)

    def _push_run(self, *args: Any) -> None:
        time.sleep(0.03)
        super()._push_run(*args)


class LateAndForgetfulRank(LateRank, ForgetfulRank):
    """Late and forgetful."""


def sparse_laps(
    ctx: RankContext, spec: Spec, numpy_at: int, last: int, make: Callable[..., NumpyRank] = LateRank
) -> Caught | None:
    """Few calls have rows, a lap apart, and the last of many rows is the other rank's: nothing else overwrites its flag.

    Returns the first error of this rank.
    """
    E, (first, other) = spec.experts, (0, 1)
    period = spec.largest_code
    assert period is not None and period % spec.depth == 0 and ctx.world_size == 2
    with playing(ctx, spec, numpy_at, make=make) as player:
        for n in range(1, last + 1):
            rows = n % period == 3
            tokens = (12, 12) if rows else (0, 0)
            turn = Turn(Step(tokens, 1, 4, weight_dtype=None, rows="random", seed=n), (1, 1))
            inputs = turn.inputs(E)
            if rows:
                # Eleven rows stay at home; the last goes behind the other rank's own ones, or behind those of a smaller rank.
                for rank in (first, other):
                    idx_TK = torch.full((12, 1), E // 2 - 1 if rank == first else E - 1)
                    idx_TK[-1] = E - 1 if rank == first else E // 2 - 1
                    inputs[rank] = replace(inputs[rank], idx_TK=idx_TK)
            error = caught(partial(one_step, player, turn, inputs, E, f"call {n} on rank {ctx.rank}"))
            if error is not None:
                ctx.barrier()
                return error
        ctx.barrier()
    return None


# -------------------------------------------------------------------------------------------------------- ends of waves


def ends_in_waves(
    ctx: RankContext, spec: GroupSpec, numpy_at: int, cases: Sequence[tuple[int, str]]
) -> list[Caught | None]:
    """Combines that take several waves, in which a rank refuses its y or has bad weights; good steps follow."""
    R = ctx.world_size
    step = Step((spec.max_tokens,) * R, 2, 4, weight_dtype=None, routing="round", rows="random")
    turn = Turn(step, (2,) * R)
    inputs = turn.inputs(spec.experts)
    mine = inputs[ctx.rank]
    found = []
    with playing(ctx, spec, numpy_at) as player:
        for who, how in cases:
            d = player.dispatch(mine, turn)
            check_dispatched(turn, d, inputs, spec.experts, ctx.rank, how)
            y_NH = results_of(player, d, turn)
            ctx.jitter(10)
            if ctx.rank != who:

                def whole(d: Any = d, y_NH: Tensor = y_NH, how: str = how) -> None:
                    out_TH = player.combine(y_NH, d, mine, turn)
                    check_combined(turn, out_TH, inputs, spec.experts, ctx.rank, how)

                found.append(caught(whole))
            elif how == "refuses":
                found.append(caught(partial(player.refuse, d, TEXT)))
            else:
                found.append(caught(partial(player.combine_badly, y_NH, d)))
            if ctx.rng.random() < 0.7:
                ctx.jitter(5)
            good_turn(player, spec, R, 1)
    return found


# ------------------------------------------------------------------------------------------------- several under way


def abort_under_way(ctx: RankContext, spec: GroupSpec, numpy_at: int, aborting: int) -> list[Caught | None]:
    """Dispatch 1 is under way while call 2 is aborted; dispatch 3 ends dispatch 1 unreceived. Returns the errors of both."""
    R = ctx.world_size
    turn = Turn(Step((4,) * R, 2, 4, routing="any", rows="random"), (2,) * R)
    inputs = turn.inputs(spec.experts)
    mine = inputs[ctx.rank]
    with playing(ctx, spec, numpy_at) as player:
        for take_first in (True, False):
            first = player.begin(mine, turn)
            if ctx.rank == aborting:
                second = caught(partial(player.abort, TEXT))
            else:
                begun = player.begin(mine, turn)
                second = caught(partial(player.wait, begun, mine))
            if take_first:
                d = player.wait(first, mine)
                check_dispatched(turn, d, inputs, spec.experts, ctx.rank, "under way")
            good_turn(player, spec, R, 1)
        late = caught(partial(player.wait, first, mine))
        good_turn(player, spec, R, 2)
        return [second, late]


def read_words(ctx: RankContext, spec: GroupSpec, numpy_at: int, lie: int) -> list[bool]:
    """What a product rank may write again while the numpy rank hasn't received: returns which ``empty`` it got.

    After calls 1 and 2, which the numpy rank has begun only, twice; and after call 3, before which it has received them.
    """

    class LyingRank(NumpyRank):
        def _send_record(self, words: dict[str, int], payload: bytes) -> None:
            super()._send_record(words if not lie else {**words, **numpy_rank.both("READ", lie)}, payload)

    turn = Turn(Step((3,) * 2, 2, 4, weight_dtype=None, routing="round", rows="random"), (2,) * 2)
    inputs = turn.inputs(spec.experts)
    mine = inputs[ctx.rank]
    got = []
    with playing(ctx, spec, numpy_at, make=LyingRank) as player:

        def empty() -> Tensor | None:
            with contextlib.suppress(moe_a2a.errors.WindowBusy):
                x_TH: Tensor = player.group.empty(*mine.x_TH.shape, mine.x_TH.dtype)
                return x_TH
            return None

        if isinstance(player, NumpyPlayer):
            begun = [player.begin(mine, turn), player.begin(mine, turn)]
            ctx.barrier()
            for call in begun:
                d = player.wait(call, mine)
                check_dispatched(turn, d, inputs, spec.experts, ctx.rank, "READ")
            player.dispatch(mine, turn)
            return []
        for _ in range(2):
            x_TH = empty()
            assert x_TH is not None
            x_TH.copy_(mine.x_TH)
            moe_a2a.dispatch(x_TH, mine.idx_TK, player.group)
            del x_TH
        kept = [empty(), empty()]
        got += [x_TH is not None for x_TH in kept]
        del kept
        ctx.barrier()
        player.dispatch(mine, turn)
        kept = [empty(), empty()]
        got += [x_TH is not None for x_TH in kept]
        return got


# ------------------------------------------------------------------------------------------------------------ progress


def progress_of(player: Player) -> tuple[int, int, int]:
    """EPOCH, PHASE and VERDICT of a rank's own window."""
    epoch, phase, verdict = struct.unpack_from("<3q", player.group.heap.windows[player.rank].view(), 4096)
    return epoch, phase, verdict


def verdicts(ctx: RankContext, spec: GroupSpec, numpy_at: int) -> list[tuple[str, int, int, int]]:
    """Every way out of a call with two ranks: (name, how far EPOCH went, PHASE, VERDICT) of the product rank."""
    R, product = 2, 1 - numpy_at
    found: list[tuple[str, int, int, int]] = []
    good = Turn(Step((4,) * R, 2, 4, routing="round", rows="random"), (2,) * R)
    mine = good.inputs(spec.experts)[ctx.rank]
    with playing(ctx, spec, numpy_at) as player:

        def note(name: str, action: Callable[[], object]) -> None:
            before = progress_of(player)[0]
            caught(action)
            epoch, phase, verdict = progress_of(player)
            found.append((name, epoch - before, phase, verdict))

        def dispatch(turn: Turn = good, like: Any = None) -> Callable[[], Any]:
            return partial(player.dispatch, turn.inputs(spec.experts)[ctx.rank], turn, like)

        def either(here: Callable[[], object], there: Callable[[], object]) -> Callable[[], object]:
            return here if ctx.rank == product else there

        opened: list[Any] = []
        note("good", lambda: opened.append(dispatch()()))
        d = opened[0]
        note("good combine", lambda: player.combine(d.x, d, mine, good))
        note("combined twice", lambda: player.combine(d.x, d, mine, good))
        note("good again", dispatch())
        note("own abort", either(lambda: player.abort(TEXT), dispatch()))
        note("own abort, no tensor", either(lambda: moe_a2a.dispatch("x", None, player.group), dispatch()))  # type: ignore
        note("peer's abort", either(dispatch(), lambda: player.abort(TEXT)))
        note("mismatch", dispatch(replace(good, tag=ctx.rank)))
        note("pad", dispatch(replace(good, pads=(1, 1))))
        d = dispatch()()
        note(
            "refusal of a peer",
            either(lambda: player.combine(d.x, d, mine, good), lambda: player.refuse(d, TEXT)),
        )
        d = dispatch()()
        note(
            "own refusal", either(lambda: player.refuse(d, TEXT), lambda: player.combine(d.x, d, mine, good))
        )
        d = dispatch()()
        note("bad weights", lambda: player.combine_badly(d.x, d))
        begun = [player.begin(mine, good) for _ in range(spec.depth + 1)]
        note("expired", lambda: player.wait(begun[0], mine))
        note("the last of them", lambda: player.wait(begun[-1], mine))
        if ctx.rank == numpy_at:
            player.leave()
        else:
            note("left", dispatch())
            note("after the end", dispatch())
    return found


# ---------------------------------------------------------------------------------------------------------------- ends


def leaves(ctx: RankContext, spec: GroupSpec, numpy_at: int, leaver: int) -> tuple[Caught | None, Any]:
    """After a good step ``leaver`` leaves, and the others call dispatch.

    Returns its error, and on the numpy rank the leaver's status cell.
    """
    with playing(ctx, spec, numpy_at) as player:
        good_turn(player, spec, ctx.world_size, 1)
        if ctx.rank == leaver:
            player.leave()
            return None, None
        turn = Turn(Step((4,) * ctx.world_size, 1, 4, routing="round"), (1,) * ctx.world_size)
        mine = make_inputs(turn.step, ctx.rank, spec.experts)
        error = caught(partial(player.dispatch, mine, turn))
        return error, status_seen(player, leaver)


def status_seen(player: Player, q: int) -> Any:
    """The code and body of q's status cell, and the generation they should carry; None on a product rank."""
    if not isinstance(player, NumpyPlayer):
        return None
    return player.node.gone().get(q), player.node.status_of(q), player.node.generation


def goes_after_its_part(ctx: RankContext, spec: GroupSpec, numpy_at: int, leaver: int, where: str) -> None:
    """``leaver`` writes its last record or cell and leaves before the others look; nobody may miss it.

    The others come one after the other, so that they also wait for each other while the leaver is gone. The leaver
    has no tokens, so it waits for nobody in combine; where it leaves after dispatch it holds no rows either.
    """
    with playing(ctx, spec, numpy_at) as player:
        holder = leaver if where == "combine" else (leaver + 1) % ctx.world_size
        step = Step(
            tuple(0 if rank == leaver else 4 for rank in range(ctx.world_size)),
            1,
            4,
            routing="one",
            target=player.group.expert_range(holder)[0],
            rows="random",
        )
        turn = Turn(step, (1,) * ctx.world_size)
        inputs = turn.inputs(spec.experts)
        mine = inputs[ctx.rank]
        d = player.dispatch(mine, turn)
        y_NH = results_of(player, d, turn)
        if ctx.rank == leaver and where == "dispatch":
            player.leave()
            return
        if ctx.rank != leaver:
            time.sleep(0.2 * (1 + (ctx.rank - leaver) % ctx.world_size))
        out_TH = player.combine(y_NH, d, mine, turn)
        if ctx.rank == leaver:
            player.leave()
        check_combined(turn, out_TH, inputs, spec.experts, ctx.rank, f"rank {ctx.rank}")


def absent(ctx: RankContext, spec: GroupSpec, numpy_at: int, missing: int) -> tuple[Caught | None, Any]:
    """``missing`` comes to the second call when the others have given up.

    Returns the error and, on numpy, the status cell of the rank that gave up. The record of the one that gave up is
    there, so the late call itself may succeed; then it is the next one that has to fail.
    """
    with playing(ctx, spec, numpy_at) as player:
        good_turn(player, spec, ctx.world_size, 1)
        turn = Turn(Step((4,) * ctx.world_size, 1, 4), (1,) * ctx.world_size)
        call = partial(player.dispatch, make_inputs(turn.step, ctx.rank, spec.experts), turn)
        if ctx.rank == missing:
            ctx.barrier()
            return caught(call) or caught(call), status_seen(player, 1 - missing)
        error = caught(call)
        ctx.barrier()
        return error, None


# ----------------------------------------------------------------------------------- a numpy rank that does it wrong


class BrokenRank(NumpyRank):
    """A numpy rank that breaks one rule from call 2 on; ``repair`` then does what was left undone."""

    fault = ""

    def _armed(self, fault: str) -> bool:
        return self.fault == fault and self.n >= 2

    def _is_record(self, offset: int) -> bool:
        return self.at.record <= offset < self.at.cell

    def _is_cell(self, offset: int) -> bool:
        return self.at.cell <= offset < self.at.token_list

    def _write_code(self, window: int, offset: int, value: int) -> None:
        whole = super()._write_code
        if window == self.rank:
            whole(window, offset, value)
            return
        self._skipped = (window, offset, value)
        if (
            (self._armed("seven of eight words of a record") and self._is_record(offset))
            or (self._armed("seven of eight words of a cell") and self._is_cell(offset))
            or (self._armed("seven of eight words of a line") and self._is_record(offset) and value > 0)
        ):
            self._words(window, offset, 8)[:7] = value
        elif self._armed("first word missing") and self._is_record(offset):
            self._words(window, offset, 8)[1:] = value
        elif self._armed("code of the call before") and self._is_record(offset):
            whole(window, offset, value - 1)
        elif self._armed("code of the call after") and self._is_record(offset):
            whole(window, offset, value + 1)
        elif self._armed("code of a refusal") and self._is_record(offset):
            whole(window, offset, -value)
        else:
            whole(window, offset, value)

    def _record(self, n: int, source: int) -> int:
        right = super()._record(n, source)
        if source != self.rank or n < 2:
            return right
        if self.fault == "record in the other slot":
            return super()._record(n + 1, source)
        if self.fault == "record of another rank":
            return super()._record(n, self.peers[0])
        return right

    def _cell(self, h: int, owner: int) -> int:
        if self.fault == "cell in the other slot" and owner == self.rank and h >= 2:
            return super()._cell(h + 1, owner)
        return super()._cell(h, owner)

    def repair(self) -> None:
        """Write the last code as it should have been."""
        window, offset, value = self._skipped
        NumpyRank._write_code(self, window, offset, value)


def broken(
    ctx: RankContext, spec: GroupSpec, numpy_at: int, fault: str, repair_after: float | None
) -> Caught | None:
    """The second step of a group whose numpy rank breaks a rule. Returns what the product raises in it."""

    def make(*args: Any, **kwargs: Any) -> BrokenRank:
        node = BrokenRank(*args, **kwargs)
        node.fault = fault
        return node

    with playing(ctx, spec, numpy_at, make=make) as player:
        good_turn(player, spec, ctx.world_size, 1)
        in_cell = "cell" in fault
        turn = Turn(
            Step((spec.experts,) * ctx.world_size, 1, 4, weight_dtype=None, routing="round", rows="random"),
            (1,) * ctx.world_size,
        )
        inputs = turn.inputs(spec.experts)
        mine = inputs[ctx.rank]

        def whole_step() -> None:
            d = player.dispatch(mine, turn)
            check_dispatched(turn, d, inputs, spec.experts, ctx.rank, fault)
            y_NH = results_of(player, d, turn)
            out_TH = player.combine(y_NH, d, mine, turn)
            check_combined(turn, out_TH, inputs, spec.experts, ctx.rank, fault)

        if isinstance(player, NumpyPlayer):
            node = player.node
            assert isinstance(node, BrokenRank)
            d = player.dispatch(mine, turn)
            if repair_after is not None and not in_cell:
                time.sleep(repair_after)
                node.repair()
            y_NH = results_of(player, d, turn)
            # In a fault of the dispatch the product never comes to combine.
            error = caught(partial(player.combine, y_NH, d, mine, turn)) if in_cell or repair_after else None
            if repair_after is not None and in_cell:
                time.sleep(repair_after)
                node.repair()
        else:
            error = caught(whole_step)
        ctx.barrier()
        return error


class WrongRank(NumpyRank):
    """A numpy rank that keeps the forms and gets the contents wrong, from call 2 on."""

    wrong = ""

    def _send_record(self, words: dict[str, int], payload: bytes) -> None:
        if self.n >= 2 and self.wrong == "order of the token list":
            tokens = self._words(self.rank, self._slot("token_list", self.n), 2)
            tokens[:] = tokens[::-1].copy()
        if self.n >= 2 and self.wrong == "order of the weights":
            weights = self._words(self.rank, self._slot("weight", self.n), 2)
            weights[:] = weights[::-1].copy()
        if self.n >= 2 and self.wrong == "a bit of x":
            x_offset = numpy_rank.joined(words["X_LO"], words["X_HI"])
            self._bytes(self.rank, x_offset, 1)[0] ^= 1
        if self.n >= 2 and self.wrong == "counts":
            counts = np.frombuffer(payload, "<i4").copy()
            counts[[0, 1]] += (-1, 1)  # moves a row from expert 0 to expert 1
            payload = counts.tobytes()
        super()._send_record(words, payload)

    def _put(self, window: int, start: int, b: int, data: bytes | Any) -> None:
        if self.n >= 2 and self.sizes.push and not isinstance(data, bytes):
            in_row = self.at.row <= start < self.at.z
            if in_row and self.wrong in ("a bit of a pushed row", "a bit behind a pushed row"):
                data = data.copy()
                data[0 if "of" in self.wrong else -1] ^= 1
            if start >= self.at.z and self.wrong == "a bit of z":
                data = data.copy()
                data[-1] ^= 1
        super()._put(window, start, b, data)

    def _send_cell(self, q: int, h: int, words: dict[str, int], text: bytes, code: int) -> None:
        if h >= 2 and self.wrong == "a bit of y":
            y_offset = numpy_rank.joined(words["Y_LO"], words["Y_HI"])
            for row in range(self.sizes.max_recv_rows):
                self._bytes(self.rank, y_offset + row * words["STRIDE"], 1)[0] ^= 1
        if h >= 2 and self.wrong == "where y begins":
            words = {**words, "Y_LO": words["Y_LO"] + words["STRIDE"]}
        super()._send_cell(q, h, words, text, code)


def wrong_contents(ctx: RankContext, spec: GroupSpec, numpy_at: int, wrong: str) -> Caught | None:
    """Two steps, the second with something wrong. Returns what the comparison with the oracle raises, if it does."""

    def make(*args: Any, **kwargs: Any) -> WrongRank:
        node = WrongRank(*args, **kwargs)
        node.wrong = wrong
        return node

    with playing(ctx, spec, numpy_at, make=make) as player:
        good_turn(player, spec, ctx.world_size, 1)
        T = spec.experts
        turn = Turn(
            Step((T,) * ctx.world_size, 1, 4, "float32", "float32", rows="random"), (1,) * ctx.world_size
        )
        inputs = []
        for rank in range(ctx.world_size):
            made = make_inputs(turn.step, rank, spec.experts)
            # All to expert 0, whose owner is a product rank, but for the owner's own tokens.
            target = spec.experts - 1 if rank != numpy_at else 0
            inputs.append(replace(made, idx_TK=torch.full_like(made.idx_TK, target)))
        mine = inputs[ctx.rank]
        d = player.dispatch(mine, turn)
        y_NH = results_of(player, d, turn)
        out_TH = player.combine(y_NH, d, mine, turn) if wrong != "counts" else None
        what = f"{wrong}, rank {ctx.rank}"

        def compare() -> None:
            check_dispatched(turn, d, inputs, spec.experts, ctx.rank, what)
            if out_TH is not None:
                check_combined(turn, out_TH, inputs, spec.experts, ctx.rank, what)

        error = caught(compare)
        ctx.barrier()
        return error


class DemandingRank(NumpyRank):
    """A numpy rank that takes the windows for those of another generation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generation += 1


def demanding(ctx: RankContext, spec: GroupSpec, numpy_at: int) -> None:
    """A step in which the numpy rank finds a record that it can't accept."""
    with playing(ctx, spec, numpy_at, make=DemandingRank) as player:
        turn = Turn(Step((4,) * ctx.world_size, 1, 4, routing="round"), (1,) * ctx.world_size)
        player.dispatch(make_inputs(turn.step, ctx.rank, spec.experts), turn)


# -------------------------------------------------------------------------------------------- what can't be true


def one_step(player: Player, turn: Turn, inputs: Sequence[Inputs], experts: int, what: str) -> None:
    """A dispatch and its combine, compared with the oracle."""
    mine = inputs[player.rank]
    d = player.dispatch(mine, turn)
    check_dispatched(turn, d, inputs, experts, player.rank, what)
    out_TH = player.combine(results_of(player, d, turn), d, mine, turn)
    check_combined(turn, out_TH, inputs, experts, player.rank, what)


def lies(
    ctx: RankContext, spec: GroupSpec, numpy_at: int, all_words: Sequence[dict[str, int]]
) -> list[Caught | None]:
    """The numpy rank's records of calls 2, 4, .. have these words. Returns what the product raises; good steps follow."""

    class LyingRank(NumpyRank):
        def _send_record(self, said: dict[str, int], payload: bytes) -> None:
            lie = all_words[self.n // 2 - 1] if self.n % 2 == 0 else {}
            super()._send_record({**said, **lie}, payload)

    turn = Turn(Step((4,) * 2, 2, 4, weight_dtype=None, routing="round"), (2,) * 2)
    mine = make_inputs(turn.step, ctx.rank, spec.experts)
    found: list[Caught | None] = []
    with playing(ctx, spec, numpy_at, make=LyingRank) as player:
        good_turn(player, spec, 2, 1)
        for _ in all_words:
            begun = player.begin(mine, turn)
            # The numpy rank doesn't know better and would take rows that the product never pushes.
            found.append(None if player.is_numpy else caught(partial(player.wait, begun, mine)))
            good_turn(player, spec, 2, 2)
    return found


def wrong_token(ctx: RankContext, spec: GroupSpec, numpy_at: int, entry: int) -> Any:
    """The token list of the numpy rank names a token that doesn't exist. Returns the product's error, and its status cell."""

    class LyingRank(NumpyRank):
        def _send_record(self, said: dict[str, int], payload: bytes) -> None:
            if self.n == 2:
                self._words(self.rank, self._slot("token_list", 2), 16)[:] = entry
            super()._send_record(said, payload)

    with playing(ctx, spec, numpy_at, make=LyingRank) as player:
        good_turn(player, spec, 2, 1)
        turn = Turn(Step((8,) * 2, 2, 4, weight_dtype=None, routing="round"), (2,) * 2)
        error = caught(partial(player.dispatch, make_inputs(turn.step, ctx.rank, spec.experts), turn))
        ctx.barrier()
        return status_seen(player, 1 - numpy_at) if player.is_numpy else error


def wrong_marks(ctx: RankContext, spec: GroupSpec, numpy_at: int, fault: str, waits: bool) -> Caught | None:
    """The numpy rank's watermarks of call 3 are wrong. Returns what the product raises in it.

    Where the product waits in vain the numpy rank is the more patient one.
    """

    class LyingRank(NumpyRank):
        def _say(self, q: int, n: int, kind: int, mark: int) -> None:
            start = self._wave(n, kind, self.rank)
            if n != 3 or kind == numpy_rank.COMBINE_READY:
                super()._say(q, n, kind, mark)
            elif fault == "mark without a code":
                self._write_code(q, start + self.at.wave_mark, mark)
            elif fault == "code without a mark":  # what an older call left is there
                self._write_code(q, start + self.at.wave_mark, 0)
                self._write_code(q, start + self.at.wave_code, self.code(n))
            elif fault == "negative mark":
                super()._say(q, n, kind, -3)
            elif fault in ("all at once", "far beyond"):
                super()._say(q, n, kind, 1000 if fault == "all at once" else 2**31 - 1)

    T = spec.max_tokens
    turn = Turn(Step((T,) * 2, 2, 4, weight_dtype=None, routing="round", rows="random"), (2,) * 2)
    inputs = turn.inputs(spec.experts)
    with playing(ctx, spec, numpy_at, make=LyingRank) as player:
        for n in (1, 2):
            one_step(player, turn, inputs, spec.experts, f"call {n}")
        if isinstance(player, NumpyPlayer):
            player.node.timeout = 10.0 if waits else 0.5
        error = caught(partial(one_step, player, turn, inputs, spec.experts, fault))
        ctx.barrier()
        return error


def wrong_flags(ctx: RankContext, spec: GroupSpec, numpy_at: int, fault: str) -> Caught | None:
    """The flags of the numpy rank's rows of call 2 are wrong. Returns what the product raises in it."""

    class LyingRank(NumpyRank):
        def _write_code(self, window: int, offset: int, value: int) -> None:
            is_flag = window != self.rank and self.at.row_flag <= offset < self.at.z
            if not is_flag or self.n < 2 or fault == "":
                super()._write_code(window, offset, value)
            elif fault == "flag of another row":
                super()._write_code(window, offset + 20 * self.at.row_flag_stride, value)
            elif fault == "flags in the other slot":
                other = 1 if self.n % self.sizes.slots == 0 else -1
                super()._write_code(window, offset + other * self.at.row_flag_slot_stride, value)

    turn = Turn(Step((8,) * 2, 2, 4, weight_dtype=None, routing="round", rows="random"), (2,) * 2)
    inputs = turn.inputs(spec.experts)
    with playing(ctx, spec, numpy_at, make=LyingRank) as player:
        good_turn(player, spec, 2, 1)
        if isinstance(player, NumpyPlayer):
            player.node.timeout = 10.0
        error = caught(partial(one_step, player, turn, inputs, spec.experts, fault))
        ctx.barrier()
        return error


# --------------------------------------------------------------------------------------------------- fused calls and rounds

FUSED_PROGRAMS = {
    2: [
        "F0 F1",
        "D0 F1 C0",
        "F0 D1 C1",
        "P0 P1 Q1 Q0",
        "P0 D1 Q0 C1",
        "D0 P1 C0 Q1",
        "P0 F1 Q0",
        "P0 X1 Q0",
        "D0 R1 C0",
        "D0 C0 R1",
    ],
    3: ["P0 P1 P2 Q1 Q0 Q2", "D0 P1 F2 C0 Q1", "D0 R1 P2 C0 Q2", "D0 D1 P2 Q2 C1 C0", "P0 R1 Q0"],
}


def fused_program(seed: int, depth: int, calls: int) -> list[str]:
    """F a fused call, P and Q its halves, R a round on the newest routing, X a call that one rank aborts; else as above."""
    rng = random.Random(seed)
    kinds = [block for size in range(2, depth + 1) for block in FUSED_PROGRAMS[size]]
    program: list[str] = []
    first = 0
    while first < calls:
        words = rng.choice(kinds).split()
        program += [f"{word[0]}{first + int(word[1:])}" for word in words]
        first = max(int(word[1:]) for word in program) + 1
    return program


def relu_expert(expert: int, rows: Tensor) -> Tensor:
    """``relu(x) * 2**(e mod 8)``, which products with a diagonal make exactly, too."""
    return rows.relu() * 2.0 ** (expert % 8)


def diagonals(player: Player, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[E_local, H, H] parameters of experts without a gate that make :func:`relu_expert` of their rows."""
    local = player.group.local_experts
    eye = torch.eye(hidden, dtype=dtype).repeat(len(local), 1, 1)
    factors = torch.tensor([2.0 ** (e % 8) for e in local], dtype=dtype)
    return eye, eye * factors[:, None, None]


class _Fused:
    """A fused call of the product or of the numpy rank, in two halves."""

    def __init__(self, player: Player, mine: Inputs, turn: Turn) -> None:
        self.player, self.mine, self.turn = player, mine, turn
        self.weights = turn.combine_weights(mine)
        self.pending: Any = None

    def begin(self) -> None:
        player, mine, turn = self.player, self.mine, self.turn
        if isinstance(player, NumpyPlayer):
            node = player.node
            self.call = node.begin(
                to_numpy(mine.x_TH),
                mine.idx_TK.numpy(),
                None,
                code_of(mine.x_TH),
                tag=turn.tag,
                flag_rows=player.rng.choice([0, 1, 2, 3]),
                fused=True,
                gradients=0,
            )
            self.met = node.push_experts(self.call) if node.fits(self.call) else None
            if self.met is None:  # in waves the rows come with the call
                self.got = node.receive(self.call)
            return
        up, down = diagonals(player, turn.step.hidden, mine.x_TH.dtype)
        self.pending = moe_a2a.moe(
            mine.x_TH,
            mine.idx_TK,
            self.weights,
            up,
            down,
            player.group,
            activation="relu",
            gated=False,
            async_op=True,
            tag=turn.tag,
        )

    def finish(self) -> Tensor:
        player, mine = self.player, self.mine
        if not isinstance(player, NumpyPlayer):
            return self.pending.wait()  # type: ignore[no-any-return]
        node, dtype = player.node, mine.x_TH.dtype

        def expert(x_nH: Any, e: int) -> Any:
            return to_numpy(relu_expert(e, to_torch(x_nH.copy(), dtype)))

        if self.met is not None:
            computed = node.compute_experts(self.call, self.met, expert)
            y, handle = computed.y_NH, computed.handle
        else:
            y, handle, at = self.got.x_NH, self.got.handle, 0
            for e, count in zip(node.own, self.got.counts, strict=True):
                y[at : at + count] = expert(y[at : at + count], e)
                at += count
        out = node.combine(
            y,
            handle,
            None if self.weights is None else to_numpy(self.weights),
            code_of(mine.x_TH),
            code_of(self.weights),
            wide=self.turn.other,
            push=player._pushes(),
            there=self.met is not None and not self.turn.other,
        )
        return to_torch(out, dtype)

    def whole(self) -> Tensor:
        player, mine, turn = self.player, self.mine, self.turn
        if isinstance(player, NumpyPlayer) or player.rng.random() < 0.4:
            self.begin()
            return self.finish()
        tag, first = turn.tag, player.group.local_experts.start
        if player.rng.random() < 0.5:
            up, down = diagonals(player, turn.step.hidden, mine.x_TH.dtype)
            return moe_a2a.moe(
                mine.x_TH,
                mine.idx_TK,
                self.weights,
                up,
                down,
                player.group,
                activation="relu",
                gated=False,
                tag=tag,
            )
        return moe_a2a.moe_apply(
            lambda rows, e: relu_expert(first + e, rows),
            mine.x_TH,
            mine.idx_TK,
            self.weights,
            player.group,
            tag=tag,
        )


def rounds_rows(turn: Turn, matrix_RE: Tensor, rank: int, hidden: int) -> Tensor:
    """[N, H] doubles that tell (expert, source, how many earlier) apart, zeros in the padding."""
    parts = []
    local = reference.expert_owner(matrix_RE.shape[1], matrix_RE.shape[0])[rank]
    for e in local:
        rows = [
            torch.full((1, hidden), 1.0 + e * 1e6 + s * 1e3 + i, dtype=torch.float64)
            for s in range(matrix_RE.shape[0])
            for i in range(int(matrix_RE[s, e]))
        ]
        parts += rows + [torch.zeros(1, hidden, dtype=torch.float64)] * (-len(rows) % turn.padding)
    return torch.cat(parts) if parts else torch.zeros(0, hidden, dtype=torch.float64)


def rounds_result(idx_TK: Tensor, rank: int, hidden: int) -> Tensor:
    """[T, K, H]: what comes back of :func:`rounds_rows`, for each pair."""
    T, K = idx_TK.shape
    out = torch.zeros(T, K, hidden, dtype=torch.float64)
    seen: dict[int, int] = {}
    for t in range(T):
        for k in range(K):
            e = int(idx_TK[t, k])
            if e < 0:
                continue
            out[t, k] = 1.0 + e * 1e6 + rank * 1e3 + seen.get(e, 0)
            seen[e] = seen.get(e, 0) + 1
    return out


def again(player: Player, y: Tensor, d: Any, tag: int, pairs: bool) -> Tensor:
    """Combine y by the routing of a dispatch, on a round of its own."""
    if isinstance(player, NumpyPlayer):
        handle = player.node.round(d.handle.real, tag)
        push = player._pushes()
        out = player.node.combine(to_numpy(y), handle, None, code_of(y), push=push, pairs=pairs)
        return to_torch(out, y.dtype)
    behind = torch.full((len(d.x) - len(y), y.shape[1]), float("nan"), dtype=y.dtype)
    y = torch.cat([y, behind])
    found: Tensor = torch.ops.moe_a2a.combine_again_raw(y, d.handle.meta, player.group.name, tag, pairs)
    return found.view(*HandleView(d.handle.meta).expert_TK.shape, y.shape[1]) if pairs else found


def fused_steps(ctx: RankContext, spec: Spec, numpy_at: int, calls: int, seed: int) -> dict[str, int]:
    """Fused calls, dispatches and rounds in one sequence with random delays; all compared with the oracle."""
    program = fused_program(seed, spec.depth, calls)
    rng = random.Random(seed)
    turns, rounds = {}, {}
    for word in program:
        i = int(word[1:])
        if word[0] in "DFPX":
            turn = make_turn(1000 * seed + i, spec, ctx.world_size)
            turns[i] = turn
            if word[0] != "D":
                step = replace(turn.step, y_dtype=None, weigh="combine")
                turns[i] = replace(turn, step=step, quantize=None, padding=1, pads=())
        elif word[0] == "R":
            rounds[i] = (
                max(j for j in turns if j < i and f"D{j}" in program),
                rng.random() < 0.5,
                rng.randint(1, 2),
            )
        if word[0] == "X":
            rounds[i] = (rng.randrange(ctx.world_size), False, 0)
    inputs = {i: turn.inputs(spec.experts) for i, turn in turns.items()}
    opened: dict[int, Any] = {}
    outs: dict[int, Tensor] = {}
    fused: dict[int, _Fused] = {}
    with playing(ctx, spec, numpy_at) as player:
        for word in program:
            i = int(word[1:])
            ctx.jitter(2)
            if word[0] == "X":
                guilty = rounds[i][0] == ctx.rank
                error = (
                    caught(lambda: player.abort("no"))
                    if guilty
                    else caught(_Fused(player, inputs[i][ctx.rank], turns[i]).whole)
                )
                assert error is not None or (guilty and player.is_numpy), word
                continue
            if word[0] == "R":
                like, pairs, hidden = rounds[i]
                matrix_RE = matrix_of(turns[like], spec.experts)
                y_NH = rounds_rows(turns[like], matrix_RE, ctx.rank, hidden)
                found = again(player, y_NH, opened[like], i, pairs)
                want_TKH = rounds_result(inputs[like][ctx.rank].idx_TK, ctx.rank, hidden)
                want = want_TKH
                if not pairs:
                    want = torch.zeros(want_TKH.shape[0], hidden, dtype=torch.float64)
                    for k in range(want_TKH.shape[1]):
                        want = want + want_TKH[:, k]
                assert_bits(found, want, f"rank {ctx.rank} (numpy at {numpy_at}), round {i}")
                continue
            turn, mine = turns[i], inputs[i][ctx.rank]
            if word[0] == "D":
                opened[i] = player.dispatch(mine, turn)
            elif word[0] == "C":
                outs[i] = player.combine(results_of(player, opened[i], turn), opened[i], mine, turn)
            elif word[0] == "F":
                outs[i] = _Fused(player, mine, turn).whole()
            elif word[0] == "P":
                fused[i] = _Fused(player, mine, turn)
                fused[i].begin()
            else:
                outs[i] = fused[i].finish()
        for i, out in outs.items():
            what = f"rank {ctx.rank} (numpy at {numpy_at}), call {i}, {turns[i]}"
            if i in opened:
                check_combined(turns[i], out, inputs[i], spec.experts, ctx.rank, what)
                continue
            weights: Any = [one.weights_TK for one in inputs[i]]
            if turns[i].step.weight_dtype is None:
                weights = None
            xs, idxs = [one.x_TH for one in inputs[i]], [one.idx_TK for one in inputs[i]]
            want = reference.moe_reference(xs, idxs, weights, relu_expert, spec.experts)[ctx.rank]
            assert_bits(out, want, f"{what}: fused")
        stats = {} if player.is_numpy else player.group.stats()
        return {
            "compared": len(outs),
            "waves": stats.get("waves", 0),
            "dispatches": stats.get("dispatches", 0),
        }


def fused_laps(ctx: RankContext, spec: Spec, numpy_at: int, last: int) -> Caught | None:
    """:func:`sparse_laps` with fused calls, also in a group without push, whose row flags nobody else uses."""
    E, period = spec.experts, spec.largest_code
    assert period is not None and period % spec.depth == 0 and ctx.world_size == 2
    with playing(ctx, spec, numpy_at, make=LateRank) as player:
        for n in range(1, last + 1):
            rows = n % period == 3
            turn = Turn(
                Step((12 * rows,) * 2, 1, 4, weight_dtype=None, rows="random", seed=n), (1, 1), other=False
            )
            inputs = turn.inputs(E)
            for rank in range(2) if rows else ():
                idx_TK = torch.full((12, 1), E // 2 - 1 if rank == 0 else E - 1)
                idx_TK[-1] = E - 1 if rank == 0 else E // 2 - 1
                inputs[rank] = replace(inputs[rank], idx_TK=idx_TK)
            mine = inputs[ctx.rank]
            if not rows:
                error = caught(partial(one_step, player, turn, inputs, E, f"call {n}"))
            else:
                out_TH = _Fused(player, mine, turn).whole()
                xs, idxs = [one.x_TH for one in inputs], [one.idx_TK for one in inputs]
                want = reference.moe_reference(xs, idxs, None, relu_expert, E)[ctx.rank]
                error = caught(partial(assert_bits, out_TH, want, f"call {n} on rank {ctx.rank}"))
            if error is not None:
                ctx.barrier()
                return error
        ctx.barrier()
    return None


class SlowGroupsRank(NumpyRank):
    """Waits between the groups of a run, of which the last one goes first."""

    def _pause(self) -> None:
        time.sleep(0.01)


def slow_groups(ctx: RankContext, spec: Spec, numpy_at: int) -> None:
    """Fused calls whose rows come from the numpy rank group by group, each slot's more than once."""
    R = ctx.world_size
    with playing(ctx, spec, numpy_at, SlowGroupsRank) as player:
        for seed in range(6):
            step = Step((9,) * R, 2, 5, weight_dtype=None, rows="random", routing="any", seed=seed)
            turn = Turn(step, (2,) * R)
            inputs = turn.inputs(spec.experts)
            out_TH = _Fused(player, inputs[ctx.rank], turn).whole()
            xs, idxs = [one.x_TH for one in inputs], [one.idx_TK for one in inputs]
            want = reference.moe_reference(xs, idxs, None, relu_expert, spec.experts)[ctx.rank]
            assert_bits(out_TH, want, f"rank {ctx.rank} (numpy at {numpy_at}), call {seed}")


class DelayingRank(NumpyRank):
    """Holds back its rows for the first expert of every other rank until that rank has computed all others, or seconds pass."""

    patience = 2.0
    seen = False  # whether the others were computed meanwhile

    def _push_run(self, call: Any, p: int, begin: int, lo: int, hi: int) -> None:
        expert = int(call.idx_TK.reshape(-1)[call.pairs_P[begin]])
        if p != self.rank and expert == self.sizes.first_expert(p):
            self.kept.append((call, p, begin, lo, hi))
            return
        super()._push_run(call, p, begin, lo, hi)
        if p != self.rank:
            self.others += [(p, self._pushed_row(call, r), call.form.element_bytes) for r in range(lo, hi)]

    def push_experts(self, call: Any) -> Any:
        self.kept: list[Any] = []
        self.others: list[tuple[int, int, int]] = []
        met = super().push_experts(call)
        # Ones, as they were pushed: results are larger.
        left, deadline = list(self.others), time.monotonic() + self.patience
        while left and time.monotonic() < deadline:
            left = [place for place in left if (self._bytes(*place).view("<f4") == 1).all()]
            time.sleep(1e-3)
        self.seen = not left and bool(self.others)
        for run in self.kept:
            super()._push_run(*run)
        return met


def delayed_expert(ctx: RankContext, spec: Spec, numpy_at: int, operator: str) -> list[int] | bool:
    """A fused call in which the numpy rank delays its rows for the first expert of every product rank.

    Returns of a product rank the order in which its experts were computed, as its callable and as its counters saw it; of the
    numpy rank whether it saw the results of all other experts before it sent the rows it had delayed.
    """
    E = spec.experts
    # Ones, of every rank for every expert: results, twice as large at least but for expert 0, show in the window.
    x_TH = torch.ones(E, spec.hidden)
    idx_TK = (torch.arange(E)[:, None] + torch.arange(2)) % E
    order: list[int] = []
    with playing(ctx, spec, numpy_at, DelayingRank) as player:
        if isinstance(player, NumpyPlayer):
            node = player.node
            call = node.begin(x_TH.numpy(), idx_TK.numpy(), None, numpy_rank.FLOAT32, fused=True)
            met = node.push_experts(call)
            computed = node.compute_experts(call, met, lambda rows, e: rows * np.float32(2.0**e))
            out = node.combine(computed.y_NH, computed.handle, None, numpy_rank.FLOAT32, there=True)
            assert (out == (2.0**idx_TK).sum(1, keepdim=True).numpy()).all()
            return bool(getattr(node, "seen", False))
        group, first = player.group, player.group.local_experts.start
        if operator == "moe":
            up, down = diagonals(player, spec.hidden, torch.float32)
            out_TH = moe_a2a.moe(x_TH, idx_TK, None, up, down, group, activation="relu", gated=False)
            order = group.stats()["expert_order"]
        else:

            def record(rows: Tensor, e: int) -> Tensor:
                order.append(e)
                return rows.mul_(2.0 ** (first + e))

            out_TH = moe_a2a.moe_apply(record, x_TH, idx_TK, None, group)
        assert (out_TH == (2.0**idx_TK).sum(1, keepdim=True)).all()
        assert group.stats()["expert_order"] == order
        return order


def fused_mismatches(ctx: RankContext, spec: Spec, numpy_at: int, fusing: int) -> Caught | None:
    """A call that is fused on one rank and a dispatch on the others; then one that is good."""
    turn = Turn(Step((4,) * ctx.world_size, 2, 4), (2,) * ctx.world_size)
    mine = turn.inputs(spec.experts)[ctx.rank]
    with playing(ctx, spec, numpy_at) as player:
        fused = _Fused(player, mine, turn)
        error = caught(fused.whole) if ctx.rank == fusing else caught(lambda: player.dispatch(mine, turn))
        good_turn(player, spec, ctx.world_size, 3)
        return error


def fused_refusals(ctx: RankContext, spec: Spec, numpy_at: int, refuser: int) -> list[Caught | None]:
    """Experts of one rank that can't compute, before all rows have come or after; again and again, around the codes' wrap."""
    errors: list[Caught | None] = []
    R = ctx.world_size

    def fail(rows: Tensor, e: int) -> Tensor:
        raise ValueError("expert without a clue")

    with playing(ctx, spec, numpy_at) as player:
        for i in range(14):
            step = Step((5,) * R, 2, 4, weight_dtype=None, rows="random", routing="round", seed=i)
            turn = Turn(step, (2,) * R)
            mine = turn.inputs(spec.experts)[ctx.rank]
            ctx.jitter(2)
            if ctx.rank != refuser:
                errors.append(caught(_Fused(player, mine, turn).whole))
            elif isinstance(player, NumpyPlayer):
                call = player.node.begin(
                    mine.x_TH.numpy(), mine.idx_TK.numpy(), None, numpy_rank.FLOAT32, fused=True
                )
                player.node.refuse(player.node.push_experts(call).handle, "expert without a clue")
            else:
                errors.append(
                    caught(partial(moe_a2a.moe_apply, fail, mine.x_TH, mine.idx_TK, None, player.group))
                )
            good_turn(player, spec, R, 100 + i)
        return errors


def ids_of_all(ctx: RankContext, spec: Spec, numpy_at: int) -> list[tuple[int, ...]]:
    """The digests of all ranks' ids, as this rank reads them, of calls with routings of all sizes."""
    found = []
    with playing(ctx, spec, numpy_at) as player:
        for seed, tokens in enumerate(([0, 5, 3], [7, 0, 0], [1, 2, 8])):
            rng = torch.Generator().manual_seed(seed + 10 * ctx.rank)
            idx_TK = torch.randint(-1, spec.experts, (tokens[ctx.rank], 2), generator=rng)
            x_TH = torch.ones(len(idx_TK), spec.hidden)
            mine = int(ids_digest(idx_TK))
            if isinstance(player, NumpyPlayer):
                call = player.node.begin(x_TH.numpy(), idx_TK.numpy(), None, numpy_rank.FLOAT32)
                ids = player.node.receive(call).handle.ids
            else:
                raw = torch.ops.moe_a2a.dispatch_raw
                ids = tuple(HandleView(raw(x_TH, idx_TK, None, player.group.name)[2]).ids)
            assert ids[ctx.rank] == mine
            found.append(ids)
    return found


def gradient_words(ctx: RankContext, spec: Spec, numpy_at: int) -> list[int]:
    """GRADIENTS as every rank reads them out of a call, when each wants something else."""
    found = []
    with playing(ctx, spec, numpy_at) as player:
        for bits in (0, 1, 2, 4, 8 | 4):
            mine = bits if ctx.rank == bits % ctx.world_size else 0
            x_TH, idx_TK = torch.ones(2, spec.hidden), torch.tensor([[0], [1]])
            if isinstance(player, NumpyPlayer):
                call = player.node.begin(
                    x_TH.numpy(), idx_TK.numpy(), None, numpy_rank.FLOAT32, gradients=mine
                )
                found.append(player.node.receive(call).handle.gradients)
            else:
                raw = torch.ops.moe_a2a.dispatch_raw
                _, _, meta = raw(x_TH, idx_TK, None, player.group.name, 0, -1, 1, mine)
                found.append(int(HandleView(meta).gradients))
    return found
