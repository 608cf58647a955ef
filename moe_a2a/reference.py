"""Plain-torch reference of dispatch and combine, in two parts.

1. **The oracle** (single process): pure functions over the inputs of *all* ranks. They share no code with the
   kernels and say what those have to produce, bit for bit: :func:`dispatch_reference`,
   :func:`combine_reference`, :func:`moe_reference`. :func:`moe_truth_fp64` computes the layer in fp64 with no
   dispatch at all, so that comparing with it can't share a mistake.
2. **The collective transport** (many processes): :class:`CollectiveExchange` does the same over
   torch.distributed, for ranks that can't share memory. The ``check_*`` functions in front of it are the
   Python twin of the validation that the C++ operators do.

Shape symbols, as suffixes of tensor names: T tokens of a rank, H hidden size, E experts, K top-k, R ranks,
N received rows, P pairs (token, k) of a rank that are kept, that is, not dropped by an id of -1.

The combine rule, which every implementation follows to the bit: with ``acc`` the wider of fp32 and y's dtype,
a term is ``y_row.to(acc) * weight.to(acc)`` (without weights just ``y_row.to(acc)``); the sum starts with the
first kept term, adds the others in k order (multiply, round, add, round: no fused multiply-add), and is
rounded to y's dtype once, at the end. Starting with the first term instead of zero keeps the sign of -0.0. A
token without terms gives +0.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange, repeat
from torch import Tensor

from .errors import (
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
from .op_host.layout import (
    CODE_DTYPES,
    COMBINE_WEIGHTS,
    DTYPE_CODES,
    GRADIENT_BITS,
    HANDLE_HEADER_WORDS,
    HandleView,
    HandleWord,
    expert_ranges,
    handle_words,
    ids_digest,
    pack_handle,
)
from .op_host.quant import QUANT_NAMES

ExpertFn = Callable[[int, Tensor], Tensor]
"""What an expert does: (global expert id, rows [n, H]) -> rows [n, H]."""


# ============================================================================================================
# Part 1: the oracle. Single process, the inputs of all ranks, no communication.
# ============================================================================================================


def expert_owner(num_experts: int, world_size: int) -> list[range]:
    """Global expert ids that each rank owns: contiguous, and the first E mod R ranks own one expert more.

    >>> expert_owner(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    sizes = [num_experts // world_size + (rank < num_experts % world_size) for rank in range(world_size)]
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _pairs_by_expert(topk_idx: Tensor) -> Tensor:
    """[P] int64: kept pairs as positions in the flattened [T, K], in (expert, token, k) order."""
    expert = rearrange(topk_idx, "t k -> (t k)")
    return expert.argsort(stable=True)[int((expert < 0).sum()) :]  # -1 sorts to the front


def send_counts_reference(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Counts a rank's pairs per expert and numbers them.

    Args:
        topk_idx: [T, K] int32 or int64, ids in -1..E-1 (-1: dropped).
        num_experts: E.

    Returns:
        counts_E: [E] int64, pairs for each expert.
        slot_TK: [T, K] int32, earlier pairs, in (token, k) order, of the same expert; -1 where dropped.

    >>> counts, slots = send_counts_reference(torch.tensor([[2, 0], [-1, 2]]), 3)
    >>> counts.tolist(), slots.tolist()
    ([1, 0, 2], [[0, 0], [-1, 1]])
    """
    expert = rearrange(topk_idx, "t k -> (t k)").long()
    pairs = _pairs_by_expert(topk_idx)
    counts_E = torch.bincount(expert[pairs], minlength=num_experts)
    first_E = counts_E.cumsum(0) - counts_E
    slot = torch.full_like(expert, -1)
    slot[pairs] = torch.arange(len(pairs)) - first_E[expert[pairs]]
    return counts_E, rearrange(slot, "(t k) -> t k", t=topk_idx.shape[0], k=topk_idx.shape[1]).int()


def quantized_rows(x: Tensor, quantize: str | None) -> tuple[Tensor, Tensor]:
    """[N, H] rows as they travel, and their float32 scales: [0] when they aren't quantised."""
    return (x, torch.empty(0)) if quantize is None else quantize_rows_reference(x, quantize)


def _places(counts_E: Tensor, align: int) -> tuple[Tensor, int]:
    """Where rows stand when each expert's are padded to a multiple of ``align``: [sum of counts] int64, and the rows in all.

    >>> places, rows = _places(torch.tensor([3, 0, 1]), 2)
    >>> places.tolist(), rows
    ([0, 1, 2, 4], 6)
    """
    padded_E = (counts_E + align - 1).div(align, rounding_mode="floor") * align
    shift_E = (padded_E - counts_E).cumsum(0) - (padded_E - counts_E)
    return torch.arange(int(counts_E.sum())) + shift_E.repeat_interleave(counts_E), int(padded_E.sum())


def _pad_of(pad_to: int | Sequence[int | None] | None, rank: int, rows: int) -> int:
    """Rows of what a rank gets: its pad_to, or the ``rows`` that come."""
    pad = pad_to[rank] if isinstance(pad_to, Sequence) else pad_to
    if pad is not None and pad < rows:
        raise ValueError(f"rank {rank} receives {rows} rows; pad_to = {pad} is below that")
    return rows if pad is None else pad


@dataclass(frozen=True)
class DispatchReference:
    """What one rank has to receive. N counts the padding, too: zeros in all tensors but source_N3, where it is -1.

    Attributes:
        x_NH: [N, H] in x's dtype or the one it was quantised to, rows in (local expert, source rank, token, k) order.
        weights_N: [N] in the weights' dtype, or None when dispatched without weights.
        counts: [E_local] int64, rows of each local expert, without padding.
        offsets: [E_local + 1] int32, first row of each local expert, and where the last one's end, with its padding.
        source_N3: [N, 3] int64, where each row comes from: (source rank, token, k).
        scales: float32 [N] (int8) or [N, ceil(H / 128)] (fp8_e4m3), or None when not quantised.
    """

    x_NH: Tensor
    weights_N: Tensor | None
    counts: Tensor
    offsets: Tensor
    source_N3: Tensor
    scales: Tensor | None = None


class _Pairs(NamedTuple):
    """The kept pairs of all ranks in (expert, source rank, token, k) order.

    Which is also the order of all received rows, the owners' rows put one after the other.

    Attributes:
        expert: int64, the expert of each pair.
        source_N3: int64, (source rank, token, k) of each pair.
        order: int64, the place of each pair in (source rank, token, k) order.
    """

    expert: Tensor
    source_N3: Tensor
    order: Tensor


def _sorted_pairs(idxs: Sequence[Tensor]) -> _Pairs:
    experts, sources = [], []
    for rank, idx_TK in enumerate(idxs):
        kept = idx_TK >= 0
        experts.append(idx_TK[kept].long())
        token_and_k = kept.nonzero()  # row-major, so in (token, k) order
        sources.append(torch.nn.functional.pad(token_and_k, (1, 0), value=rank))
    expert = torch.cat(experts)
    order = expert.argsort(stable=True)  # stable: (rank, token, k) order stays inside an expert
    return _Pairs(expert[order], torch.cat(sources)[order], order)


def dispatch_reference(
    xs: Sequence[Tensor],
    idxs: Sequence[Tensor],
    num_experts: int,
    weights: Sequence[Tensor] | None = None,
    *,
    pad_to: int | Sequence[int | None] | None = None,
    align: int = 1,
    quantize: str | None = None,
) -> list[DispatchReference]:
    """What dispatch has to deliver to every rank.

    Args:
        xs: of each rank [T, H], one dtype and H, any T.
        idxs: of each rank [T, K], ids in -1..E-1.
        num_experts: E.
        weights: of each rank [T, K], one dtype; or None.
        pad_to: rows that each rank asks for, or one number for all; None for as many as come.
        align: each expert's rows are padded to a multiple of this.
        quantize: None, "int8" or "fp8_e4m3".

    Returns:
        One :class:`DispatchReference` per rank. Rows and weights of dropped pairs are never read.

    Raises:
        ValueError: a rank receives more rows than its pad_to.
    """
    pairs = _sorted_pairs(idxs)
    tokens_R = torch.tensor([len(x) for x in xs])
    first_R = tokens_R.cumsum(0) - tokens_R  # each rank's first row when the ranks' tokens are put together
    all_rows = torch.cat(list(xs))[first_R[pairs.source_N3[:, 0]] + pairs.source_N3[:, 1]]
    all_rows, all_scales = quantized_rows(all_rows, quantize)
    all_weights = None
    if weights is not None:
        kept = [weights_TK[idx_TK >= 0] for weights_TK, idx_TK in zip(weights, idxs, strict=True)]
        all_weights = torch.cat(kept)[pairs.order]
    counts_E = torch.bincount(pairs.expert, minlength=num_experts)
    results = []
    for rank, experts in enumerate(expert_owner(num_experts, len(xs))):
        mine = (pairs.expert >= experts.start) & (pairs.expert < experts.stop)
        counts = counts_E[experts.start : experts.stop]
        places, rows = _places(counts, align)
        rows = _pad_of(pad_to, rank, rows)

        def spread(
            packed: Tensor, fill: int = 0, mine: Tensor = mine, places: Tensor = places, rows: int = rows
        ) -> Tensor:
            padded = packed.new_full((rows, *packed.shape[1:]), fill)
            padded[places] = packed[mine]
            return padded

        first = itertools.accumulate((-(-n // align) * align for n in counts.tolist()), initial=0)
        results.append(
            DispatchReference(
                x_NH=spread(all_rows),
                weights_N=None if all_weights is None else spread(all_weights),
                counts=counts,
                offsets=torch.tensor(list(first), dtype=torch.int32),
                source_N3=spread(pairs.source_N3, -1),
                scales=None if quantize is None else spread(all_scales),
            )
        )
    return results


def weighted_sum_reference(rows_PH: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """The combine rule (see the module's docstring) for one rank.

    Args:
        rows_PH: [P, H] fp32/bf16/fp16/fp64, the rows to sum.
        position_TK: [T, K] int64, the row of each pair in rows_PH, -1 where dropped.
        weights_TK: [T, K] of any float dtype, or None. Ignored where dropped, even if NaN.

    Returns:
        [T, H] in the dtype of rows_PH.
    """
    acc = torch.promote_types(torch.float32, rows_PH.dtype)
    num_tokens, top_k = position_TK.shape
    total_TH = torch.zeros(num_tokens, rows_PH.shape[1], dtype=acc)
    if len(rows_PH) == 0:
        return total_TH.to(rows_PH.dtype)
    started_T1 = torch.zeros(num_tokens, 1, dtype=torch.bool)
    for k in range(top_k):
        kept_T1 = position_TK[:, k, None] >= 0
        # A dropped pair computes with row 0 and its own weight, and torch.where throws the result away:
        # multiplying by zero instead would let NaN and Inf through.
        term_TH = rows_PH.index_select(0, position_TK[:, k].clamp(min=0)).to(acc)
        if weights_TK is not None:
            term_TH = term_TH * weights_TK[:, k, None].to(acc)
        added_TH = torch.where(started_T1, total_TH + term_TH, term_TH)
        total_TH = torch.where(kept_T1, added_TH, total_TH)
        started_T1 = started_T1 | kept_T1
    return total_TH.to(rows_PH.dtype)


def combine_reference(
    ys: Sequence[Tensor],
    idxs: Sequence[Tensor],
    num_experts: int,
    weights: Sequence[Tensor] | None = None,
    *,
    pad_to: int | Sequence[int | None] | None = None,
    align: int = 1,
) -> list[Tensor]:
    """What combine has to return on every rank, bit for bit.

    Args:
        ys: of each rank [N, H], in the row order of :func:`dispatch_reference`, one dtype. Padding is not looked at.
        idxs: of each rank [T, K], as dispatched.
        num_experts: E.
        weights: of each rank [T, K]; or None, then rows are summed as they are.
        pad_to, align: as dispatched.

    Returns:
        Of each rank [T, H] in the dtype of ys.
    """
    pairs = _sorted_pairs(idxs)
    counts_E = torch.bincount(pairs.expert, minlength=num_experts)
    places = [_places(counts_E[e.start : e.stop], align) for e in expert_owner(num_experts, len(ys))]
    expected = [_pad_of(pad_to, rank, rows) for rank, (_, rows) in enumerate(places)]
    if expected != [len(y) for y in ys]:
        raise ValueError(f"combine_reference: ys have {[len(y) for y in ys]} rows; expected {expected}")
    rows = torch.cat([y[at] for y, (at, _) in zip(ys, places, strict=True)])
    outs = []
    for rank, idx_TK in enumerate(idxs):
        position_TK = torch.full(tuple(idx_TK.shape), -1, dtype=torch.int64)
        mine = (pairs.source_N3[:, 0] == rank).nonzero()[:, 0]
        position_TK[pairs.source_N3[mine, 1], pairs.source_N3[mine, 2]] = mine
        outs.append(weighted_sum_reference(rows, position_TK, None if weights is None else weights[rank]))
    return outs


def moe_reference(
    xs: Sequence[Tensor],
    idxs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    expert_fn: ExpertFn,
    num_experts: int,
) -> list[Tensor]:
    """Dispatch, experts and combine by the rules of this package.

    Args:
        xs: of each rank [T, H].
        idxs: of each rank [T, K], ids in -1..E-1.
        weights: of each rank [T, K], applied in combine; or None.
        expert_fn: called once per expert with its rows of all ranks, also when there are none.
        num_experts: E.

    Returns:
        Of each rank [T, H] in the dtype that expert_fn returns.
    """
    ys = []
    owners = expert_owner(num_experts, len(xs))
    for received, experts in zip(dispatch_reference(xs, idxs, num_experts), owners, strict=True):
        shares = torch.split(received.x_NH, received.counts.tolist()) if len(experts) else ()
        results = [expert_fn(expert, rows) for expert, rows in zip(experts, shares, strict=True)]
        ys.append(torch.cat(results) if results else None)
    kinds = [y for y in ys if y is not None]
    return combine_reference([kinds[0][:0] if y is None else y for y in ys], idxs, num_experts, weights)


def _fp64_terms(
    xs: Sequence[Tensor],
    idxs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    expert_fn: ExpertFn,
    num_experts: int,
    size: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    outs = []
    for rank, (x_TH, idx_TK) in enumerate(zip(xs, idxs, strict=True)):
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
        for k in range(idx_TK.shape[1]):
            for expert in range(num_experts):
                tokens = (idx_TK[:, k] == expert).nonzero()[:, 0]
                term = expert_fn(expert, x_TH[tokens].double()).double()
                if weights is not None:
                    term = term * weights[rank][tokens, k, None].double()
                out_TH[tokens] += size(term)
        outs.append(out_TH)
    return outs


def moe_truth_fp64(
    xs: Sequence[Tensor],
    idxs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    expert_fn: ExpertFn,
    num_experts: int,
) -> list[Tensor]:
    """``out[t] = sum over k of weight[t, k] * f_e(x[t])`` in fp64, each rank on its own, with no dispatch.

    Args and returns are those of :func:`moe_reference`, but expert_fn gets fp64 rows and returns are fp64.
    """
    return _fp64_terms(xs, idxs, weights, expert_fn, num_experts, lambda term: term)


def moe_magnitude_fp64(
    xs: Sequence[Tensor],
    idxs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    expert_fn: ExpertFn,
    num_experts: int,
) -> list[Tensor]:
    """``sum over k of |weight[t, k] * f_e(x[t])|`` in fp64: the scale of a sum's rounding error."""
    return _fp64_terms(xs, idxs, weights, expert_fn, num_experts, torch.abs)


def quantize_rows_reference(x_TH: Tensor, quantize: str) -> tuple[Tensor, Tensor]:
    """What quantize_rows has to return, bit for bit.

    Args:
        x_TH: [T, H] fp32/bf16/fp16/fp64, H >= 1.
        quantize: "int8" (one scale a row) or "fp8_e4m3" (one scale per 128 columns).

    Returns:
        q_TH: [T, H] int8 or float8_e4m3fn.
        scales: fp32, [T] for int8, [T, ceil(H / 128)] for fp8_e4m3. NaN where a value that it covers is NaN or Inf (q is 0
        there), 0 where it underflows (q is 0, too).

    >>> q_TH, scales_T = quantize_rows_reference(torch.tensor([[2.0, -1.0, 0.5, 0.0]]), "int8")
    >>> q_TH.tolist(), (scales_T * 127).tolist()
    ([[127, -64, 32, 0]], [2.0])
    """
    hidden = x_TH.shape[1]
    limit, width = {"int8": (127.0, hidden), "fp8_e4m3": (448.0, 128)}[quantize]
    # B parts of a row, n columns each; zeros behind the last column change no maximum.
    x_TBn = rearrange(
        torch.nn.functional.pad(x_TH.to(torch.float32), (0, -hidden % width)), "t (b n) -> t b n", n=width
    )
    amax_TB1 = x_TBn.abs().amax(-1, keepdim=True)  # NaN if there is one
    scales_TB1 = amax_TB1 / torch.full_like(amax_TB1, limit)  # both tensors: a true division
    finite_TB1 = amax_TB1.isfinite()
    scales_TB1 = torch.where(finite_TB1, scales_TB1, torch.full_like(scales_TB1, torch.nan))
    ratio_TBn = torch.where(scales_TB1 > 0, x_TBn / scales_TB1, torch.zeros_like(x_TBn)).clamp(-limit, limit)
    ratio_TH = rearrange(ratio_TBn, "t b n -> t (b n)")[:, :hidden]
    if quantize == "int8":
        return ratio_TH.round().to(torch.int8), rearrange(scales_TB1, "t 1 1 -> t")  # round: ties to even
    return ratio_TH.to(torch.float8_e4m3fn), rearrange(scales_TB1, "t b 1 -> t b")


def dequantize_rows_reference(q_TH: Tensor, scales: Tensor) -> Tensor:
    """[T, H] fp32, ``float32(q) * scale``: what quantised rows stand for. Arguments as quantize_rows_reference returns them."""
    column_H = torch.arange(q_TH.shape[1])
    scales_TH = scales[:, None].expand(q_TH.shape) if scales.dim() == 1 else scales[:, column_H // 128]
    return q_TH.to(torch.float32) * scales_TH


# ============================================================================================================
# Part 2: the collective transport. Validation first, then the exchange.
# ============================================================================================================


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Limits:
    """What a group was created with: the bounds that the arguments of a call are checked against."""

    num_experts: int
    top_k: int
    max_tokens: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device = _CPU

    @property
    def row_bytes(self) -> int:
        """Bytes of the widest row."""
        return self.hidden_size * self.dtype.itemsize


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def check_tensor(
    operation: str,
    name: str,
    value: object,
    shape: str,
    dtypes: Sequence[torch.dtype],
    rank: int,
    device: torch.device = _CPU,
) -> None:
    """A strided tensor of one of ``dtypes`` on ``device``, with the dimensions that ``shape`` names, e.g. ``"[T, H]"``.

    Raises:
        BadType: not a tensor, on another device, not strided, another dtype.
        BadValue: another number of dimensions.
    """
    if not isinstance(value, Tensor):
        raise BadType(
            f"{operation}: {name} is a {type(value).__name__} on rank {rank}; expected a torch.Tensor {shape}"
        )
    if value.device != device or value.layout != torch.strided:
        raise BadType(
            f"{operation}: {name} is a {value.layout} tensor on {value.device} on rank {rank}; "
            f"expected a torch.strided tensor on {device}; convert it with .to_dense() or .to({str(device)!r})"
        )
    if value.dtype not in dtypes:
        raise BadType(
            f"{operation}: {name} has dtype {value.dtype} on rank {rank}; "
            f"expected one of {', '.join(str(dtype) for dtype in dtypes)}; convert it with .to(dtype)"
        )
    dims = shape.count(",") + 1
    if value.dim() != dims:
        raise BadValue(
            f"{operation}: {name} has shape {_shape(value)} on rank {rank}; "
            f"expected {dims} dimensions, {shape}"
        )


_FLOATS = tuple(DTYPE_CODES)
_IDS = (torch.int32, torch.int64)


def check_ids(operation: str, topk_idx: Tensor, num_experts: int, rank: int) -> None:
    """All ids of topk_idx [T, K] are in -1..E-1.

    Raises:
        BadValue: naming the first id, in (token, k) order, that isn't.
    """
    bad = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if len(bad):
        token, k = bad[0].tolist()
        raise BadValue(
            f"{operation}: topk_idx[{token}, {k}] = {int(topk_idx[token, k])} is outside "
            f"-1..{num_experts - 1} on rank {rank} (num_experts = {num_experts}); "
            f"ids must be global expert ids, or -1 for no expert"
        )


def check_row(operation: str, name: str, rows: Tensor, limits: Limits, rank: int) -> None:
    """The rows of a [*, H] tensor have at least one column and are not wider than the group's.

    Raises:
        BadValue
    """
    hidden = rows.shape[1]
    if hidden == 0:
        raise BadValue(
            f"{operation}: {name} has shape {_shape(rows)} on rank {rank}; expected at least one column"
        )
    row_bytes = hidden * rows.dtype.itemsize
    if row_bytes > limits.row_bytes:
        raise BadValue(
            f"{operation}: a row of {name} has {row_bytes} bytes (H = {hidden}, {rows.dtype}) on rank "
            f"{rank}, more than the group's {limits.row_bytes} (hidden_size = {limits.hidden_size}, "
            f"{limits.dtype}); create the group with the largest row it has to carry"
        )


def check_options(pad_to: int, align: int, quant: int, rank: int) -> None:
    """How a dispatch is to be done, beside its tensors; pad_to -1 for as many rows as come.

    Raises:
        BadValue
    """
    operation = "moe_a2a.dispatch"
    if not -1 <= pad_to < 2**31:
        raise BadValue(f"{operation}: pad_to = {pad_to} on rank {rank}; expected 0 to 2**31 - 1, or none")
    if not 1 <= align <= 2**20:
        raise BadValue(f"{operation}: align = {align} on rank {rank}; expected 1 to 2**20")
    if quant != 0 and quant not in QUANT_NAMES:
        raise BadValue(
            f"{operation}: quantisation {quant} on rank {rank}; expected 0 (none), 1 (int8) or 2 (fp8_e4m3)"
        )


def check_dispatch(
    x: object,
    topk_idx: object,
    topk_weights: object,
    limits: Limits,
    rank: int,
    operation: str = "moe_a2a.dispatch",
) -> None:
    """The arguments of dispatch are good: types first, then shapes, then limits, then the ids.

    Raises:
        BadType, BadValue: see :func:`check_tensor`, :func:`check_row`, :func:`check_ids`; also T or K above
            the group's, and row counts or shapes that don't go together.
    """
    check_tensor(operation, "x", x, "[T, H]", _FLOATS, rank, limits.device)
    check_tensor(operation, "topk_idx", topk_idx, "[T, K]", _IDS, rank, limits.device)
    if topk_weights is not None:
        check_tensor(operation, "topk_weights", topk_weights, "[T, K]", _FLOATS, rank, limits.device)
    assert isinstance(x, Tensor) and isinstance(topk_idx, Tensor)
    num_tokens, top_k = x.shape[0], topk_idx.shape[1]
    if topk_idx.shape[0] != num_tokens:
        raise BadValue(
            f"{operation}: topk_idx has shape {_shape(topk_idx)} but x has shape {_shape(x)} on rank {rank}; "
            f"expected one row of topk_idx per token: [{num_tokens}, K]"
        )
    if isinstance(topk_weights, Tensor) and topk_weights.shape != topk_idx.shape:
        raise BadValue(
            f"{operation}: topk_weights has shape {_shape(topk_weights)} but topk_idx has shape "
            f"{_shape(topk_idx)} on rank {rank}; expected one weight per id: {_shape(topk_idx)}"
        )
    if num_tokens > limits.max_tokens:
        raise BadValue(
            f"{operation}: x has {num_tokens} tokens on rank {rank}, more than the group's max_tokens = "
            f"{limits.max_tokens}; create the group with max_tokens >= {num_tokens} or pass fewer tokens"
        )
    if top_k > limits.top_k:
        raise BadValue(
            f"{operation}: topk_idx has K = {top_k} columns on rank {rank}, more than the group's top_k = "
            f"{limits.top_k}; create the group with the largest K it has to carry"
        )
    check_row(operation, "x", x, limits, rank)
    check_ids(operation, topk_idx, limits.num_experts, rank)


def check_combine_rows(
    y: object, rows: int, limits: Limits, rank: int, operation: str = "moe_a2a.combine"
) -> None:
    """y is [rows, H] of a float dtype and no wider than the group's row; H may be another than x's.

    Raises:
        BadType, BadValue
    """
    check_tensor(operation, "y", y, "[N, H]", _FLOATS, rank, limits.device)
    assert isinstance(y, Tensor)
    if len(y) != rows:
        raise BadValue(
            f"{operation}: y has shape {_shape(y)} on rank {rank}; expected [{rows}, H], "
            f"a row for every row that dispatch returned as d.x, in the same order"
        )
    check_row(operation, "y", y, limits, rank)


def check_combine_weights(
    topk_weights: object,
    num_tokens: int,
    top_k: int,
    rank: int,
    device: torch.device = _CPU,
    operation: str = "moe_a2a.combine",
) -> None:
    """topk_weights is None or [num_tokens, top_k] of a float dtype.

    Raises:
        BadType, BadValue
    """
    if topk_weights is None:
        return
    check_tensor(operation, "topk_weights", topk_weights, "[T, K]", _FLOATS, rank, device)
    assert isinstance(topk_weights, Tensor)
    if tuple(topk_weights.shape) != (num_tokens, top_k):
        raise BadValue(
            f"{operation}: topk_weights has shape {_shape(topk_weights)} on rank {rank}; expected "
            f"[{num_tokens}, {top_k}], the shape of the topk_idx that was dispatched"
        )


_DISPATCH, _COMBINE = 1, 2
_OPERATIONS = {_DISPATCH: "moe_a2a.dispatch", _COMBINE: "moe_a2a.combine"}
_TEXT_BYTES = 4096  # an abort's text is cut here
_WAIT_SLICE = timedelta(milliseconds=50)  # how long a wait may keep Python from handling a signal


class _Header(NamedTuple):
    """What a rank says about its call before any payload moves, as int64.

    The same fields for both operations, so that a dispatch that meets a combine is noticed, not misread.
    """

    kind: int
    abort_bytes: int = 0  # 0: the call is good; else the length of the reason's UTF-8 text
    epoch: int = 0  # n: dispatches started
    handle: int = 0  # combine: the n of its dispatch
    hidden: int = 0
    dtype: int = 0  # DTYPE_CODES
    weight_dtype: int = 0  # DTYPE_CODES, 0 when no weights travel
    tag: int = 0
    quant: int = 0  # QUANT_CODES of op_host/quant.py
    align: int = 1
    routing: int = 0  # digest of the send-count matrix that is used again, 0 for a new one
    pad_to: int = -1  # may differ
    gradients: int = 0  # bits of Gradient, which may differ; plus said_weights()
    ids: int = 0  # ids_digest of topk_idx; may differ

    @property
    def combine_weights(self) -> int:
        """One more than the code of the dtype of the weights that combine will get, 0 if nobody knows."""
        return self.gradients // COMBINE_WEIGHTS


# Fields that all ranks have to agree on: name for the message, how its value reads.
_AGREE: dict[str, tuple[str, Callable[[int], str]]] = {
    "kind": ("the operation", lambda kind: _OPERATIONS.get(kind, str(kind))),
    "epoch": ("the call number", str),
    "handle": ("which dispatch's handle is combined (call number)", str),
    "hidden": ("the hidden size H", str),
    "dtype": ("the rows' dtype", lambda code: str(CODE_DTYPES.get(code))),
    "weight_dtype": ("topk_weights", lambda code: str(CODE_DTYPES.get(code))),
    "combine_weights": (
        "topk_weights, of which gradients are wanted",
        lambda said: str(CODE_DTYPES.get(said - 1)),
    ),
    "tag": ("the tag", str),
    "quant": ("quantize", lambda code: str(QUANT_NAMES.get(code))),
    "align": ("align", str),
    "routing": ("the routing", lambda digest: f"used again (digest {digest})" if digest else "new"),
}


def _reason_text(error: Exception) -> bytes:
    """What peers are told, in UTF-8."""
    return str(error).encode(errors="replace")[:_TEXT_BYTES]


def named_error(operation: str, error: Exception, rank: int) -> MoeA2AError:
    """The error of this package for what a call met. Whoever gets one of these knows that the peers were told."""
    if isinstance(error, MoeA2AError):
        return error
    # torch says so with a RuntimeError.
    memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
    kind = OutOfMemory if memory else BadValue if isinstance(error, ValueError) else BadType
    named = kind(f"{operation}: on rank {rank}, {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def _int64(value: int) -> int:
    """The signed 64-bit number with the same low 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous [n, m] tensor as [n, m * itemsize] uint8."""
    return tensor.contiguous().view(torch.uint8)


def _labels(counts_AB: Tensor) -> Tensor:
    """For rows in blocks of counts_AB rows, blocks in row-major order: the column of each row's block.

    >>> _labels(torch.tensor([[2, 1], [0, 3]])).tolist()
    [0, 0, 1, 1, 1, 1]
    """
    blocks, columns = counts_AB.shape
    column = repeat(torch.arange(columns), "b -> (a b)", a=blocks)
    return column.repeat_interleave(rearrange(counts_AB, "a b -> (a b)").long())


def _digest(counts_RE: Tensor, epoch: int) -> int:
    """A signed 64-bit number that stands for the send-count matrix of call ``epoch``; not 0."""
    matrix = counts_RE.int().contiguous().numpy().tobytes()
    words = hashlib.blake2b(matrix + epoch.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(words, "little", signed=True) or 1


def _pack_rows(parts: Sequence[Tensor], topk_idx: Tensor, topk_weights: Tensor | None) -> Tensor:
    """[P, B] uint8: each pair's row of every part ([T, *]), then its weight, in (expert, token, k) order, so by owner too."""
    pairs = _pairs_by_expert(topk_idx)
    tokens = pairs // max(topk_idx.shape[1], 1)
    columns = [_bytes(part.index_select(0, tokens)) for part in parts]
    if topk_weights is not None:
        weights = rearrange(topk_weights.detach(), "t k -> (t k) 1").index_select(0, pairs)
        columns.append(_bytes(weights))
    return torch.cat(columns, dim=1)


def _unpack_rows(rows: Tensor, columns: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Undoes :func:`_pack_rows`: one tensor [N, n] for each (n, dtype)."""
    parts = rows.split([n * dtype.itemsize for n, dtype in columns], dim=1)
    # clone: a slice of one row counts as contiguous, and its start need not be aligned for the dtype.
    return [
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        for part, (_, dtype) in zip(parts, columns, strict=True)
    ]


class Exchange(abc.ABC):
    """dispatch and combine of a group whose calls Python makes; arguments, results and errors are those of
    :class:`CollectiveExchange`. Here is what all of them know of their handles.

    Attributes:
        rank, world_size, depth: of the group.
        device: of the tensors it takes and returns.
    """

    _generations = itertools.count(1)  # tells the handles of one exchange from another's, in this process

    def __init__(self, rank: int, world_size: int, depth: int, limits: Limits) -> None:
        self.rank = rank
        self.world_size = world_size
        self.depth = depth
        self.device = limits.device
        self._limits = limits
        self._experts = expert_ranges(limits.num_experts, world_size)
        self._generation = next(self._generations)
        self._epoch = 0  # n: dispatches started, the same on all ranks
        self._open: dict[int, Tensor] = {}  # handles that may be combined by n, as dispatch made them

    @abc.abstractmethod
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    @abc.abstractmethod
    def combine(
        self, y: Tensor | MoeA2AError, meta: Tensor, topk_weights: Tensor | None, pairs: bool = False
    ) -> Tensor: ...

    @abc.abstractmethod
    def combine_again(self, y: Tensor, routing: Tensor, tag: int, pairs: bool) -> Tensor: ...

    def begin_moe(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, tag: int, gradients: int
    ) -> tuple[Tensor, Tensor]:
        """The first half of a fused call: sends what is this rank's to send. ``gradients``: bits of Gradient, and what
        :func:`op_host.layout.said_weights` says.

        Returns:
            rows: [N, H], where the experts' rows are after :meth:`arrive`. meta: the handle.
        """
        rows, _, _, meta = self.dispatch(x, topk_idx, None, None, tag, -1, 1, 0, gradients)
        return rows, meta

    def arrive(self, rows: Tensor, meta: Tensor) -> None:  # noqa: B027  nothing is late where dispatch brings all
        """Waits until all rows of a fused call are there."""

    @abc.abstractmethod
    def abort(self, failure: Exception) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        """Counters, as ``EPGroup.stats`` describes them; {} where nothing is counted."""
        return {}

    # ------------------------------------------------------------------------------------------------- handles

    def _expire(self) -> None:
        self._open = {n: meta for n, meta in self._open.items() if self._epoch - n < self.depth}

    def _read_handle(self, operation: str, name: str, meta: object) -> HandleView:
        """The handle of a dispatch of this exchange, open or not."""
        if (
            not isinstance(meta, Tensor)
            or meta.dtype != torch.int64
            or meta.dim() != 1
            or meta.device.type != "cpu"
            or not meta.is_contiguous()
        ):
            what = (
                f"a {_shape(meta)} {meta.dtype} tensor"
                if isinstance(meta, Tensor)
                else f"a {type(meta).__name__}"
            )
            raise BadType(
                f"{operation}: {name} is {what} on rank {self.rank}; expected the handle that dispatch returned"
            )
        try:
            handle = HandleView(meta)
            generation, rank = handle.generation, handle.rank
        except (ValueError, IndexError) as error:
            raise BadValue(
                f"{operation}: {name} can't be read on rank {self.rank} ({error}); "
                f"expected the handle that dispatch returned"
            ) from error
        if (generation, rank) != (self._generation, self.rank):
            raise BadValue(
                f"{operation}: {name} is of another group on rank {self.rank} (generation {generation}, "
                f"rank {rank}; this group has generation {self._generation}); use it on the group it came from"
            )
        return handle

    def _open_handle(self, meta: Tensor, whole: bool = True) -> HandleView:
        """What this exchange knows of an open handle. One that was written to is refused, unless that is behind its header
        and ``whole`` is False: nobody has to hear of it then, for what stands there isn't used.
        """
        operation = "moe_a2a.combine"
        epoch = self._read_handle(operation, "handle", meta).epoch
        if epoch not in self._open:
            newer = self._epoch - epoch
            why = (
                f"{newer} newer dispatches have started and depth = {self.depth}; "
                f"create the group with a larger depth"
                if newer >= self.depth
                else "it was combined already; a handle serves one combine"
            )
            raise HandleExpired(
                f"{operation}: the handle of call {epoch} has expired on rank {self.rank}: {why}"
            )
        known = self._open[epoch]
        words = len(known) if whole else HANDLE_HEADER_WORDS
        if len(meta) != len(known) or not torch.equal(meta[:words], known[:words]):
            raise BadValue(
                f"{operation}: the handle of call {epoch} was written to after dispatch returned it on rank {self.rank}; "
                f"leave it as it is"
            )
        return HandleView(known)

    def _routing_of(
        self, topk_idx: Tensor | None, routing: Tensor | None
    ) -> tuple[Tensor | None, HandleView | None]:
        """The ids of a dispatch, and the handle whose routing is used again."""
        if (topk_idx is None) == (routing is None):
            both = (
                "both topk_idx and routing are" if routing is not None else "neither topk_idx nor routing is"
            )
            raise BadValue(f"moe_a2a.dispatch: {both} given on rank {self.rank}; expected one of them")
        return (topk_idx, None) if routing is None else self._read_routing(routing)

    def _read_routing(self, meta: object) -> tuple[Tensor, HandleView]:
        """The ids [T, K] of the dispatch whose handle this is, and the handle."""
        operation = "moe_a2a.dispatch"
        handle = self._read_handle(operation, "routing", meta)
        changed = BadValue(
            f"{operation}: routing is a handle that was written to after dispatch returned it, on rank {self.rank}; "
            f"leave handles as they are"
        )
        limits, local = self._limits, self._experts[self.rank]
        sizes = handle.num_tokens, handle.top_k, handle.world_size, handle.num_experts
        most = limits.max_tokens, limits.top_k, self.world_size, limits.num_experts
        if (
            min(sizes) < 0
            or any(size > limit for size, limit in zip(sizes, most, strict=True))
            or sizes[2:] != most[2:]
        ):
            raise changed
        assert isinstance(meta, Tensor)
        first = handle_words(
            num_tokens=handle.num_tokens,
            top_k=handle.top_k,
            world_size=self.world_size,
            num_experts=limits.num_experts,
            local_experts=len(local),
        )
        parts = (
            HandleWord.COUNTS,
            HandleWord.OFFSETS,
            HandleWord.MATRIX,
            HandleWord.EXPERT,
            HandleWord.ROW,
            HandleWord.IDS,
        )
        if [int(meta[part]) for part in parts] + [len(meta)] != first:
            raise changed
        topk_idx = handle.expert_TK.clone()
        if len(topk_idx) and bool(((topk_idx < -1) | (topk_idx >= limits.num_experts)).any()):
            raise changed
        counts_E, _ = send_counts_reference(topk_idx, limits.num_experts)
        if not torch.equal(counts_E.int(), handle.counts_RE[self.rank]):
            raise changed
        return topk_idx, handle


class CollectiveExchange(Exchange):
    """The ``collective`` transport: dispatch and combine over torch.distributed where no memory is shared.

    Calls are collective: every rank makes the same calls in the same order, with any number of tokens. What
    it sends, all of it over the process group's own collectives:

    * **dispatch**: one all-gather of a fixed-size int64 record (the header and the send counts [E]); if
      somebody found bad input, a second one with the reasons; otherwise one all-to-all of rows. A row travels
      as raw bytes, its scales and its weight behind it, so that every bit of every dtype arrives; quantised rows
      travel quantised. Padding doesn't travel.
    * **combine**: an all-gather of the same record (counts zero), then one all-to-all of y's rows, weighted
      and summed where the tokens came from. If a rank's y is bad, its record says so before any payload: that
      rank raises, the ranks whose tokens it holds raise :class:`PeerAborted` with its reason, and the others
      finish. A rank whose topk_weights are bad raises alone, after its rows have gone out. The handle is
      closed either way.

    A call that fails before its payload uses up its number on every rank, and the next call works. When
    torch.distributed fails or a peer doesn't come in time, the ranks' calls can't be matched any more: the
    exchange is poisoned.

    Args:
        process_group: a torch ProcessGroup, or None for the default one. With None and world_size 1
            torch.distributed need not be initialised.
        rank, world_size: this rank and R.
        num_experts, top_k, max_tokens, hidden_size, dtype: the group's E, largest K and T, and widest row.
        max_recv_rows: not used: there is no window that has to hold rows.
        depth: handles open at once, at least 1.
        timeout: seconds a call waits for peers; the process group's own timeout holds as well.
        warmup_timeout: the same for the first call.

    Raises:
        BadValue: a size that makes no sense, or rank and world_size that aren't the process group's.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        rank: int,
        world_size: int,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        max_recv_rows: int,
        depth: int,
        *,
        timeout: float = 600.0,
        warmup_timeout: float = 3600.0,
    ) -> None:
        for name, value, least in (
            ("world_size", world_size, 1),
            ("num_experts", num_experts, 1),
            ("top_k", top_k, 1),
            ("max_tokens", max_tokens, 0),
            ("hidden_size", hidden_size, 1),
            ("depth", depth, 1),
        ):
            if value < least:
                raise BadValue(
                    f"CollectiveExchange: {name} = {value} on rank {rank}; expected at least {least}"
                )
        if max_tokens * top_k >= 2**31:
            raise BadValue(
                f"CollectiveExchange: max_tokens * top_k = {max_tokens * top_k} on rank {rank}; it must be below 2**31, "
                f"since positions are int32"
            )
        if process_group is not None or world_size > 1:
            if not dist.is_initialized():
                raise BadValue(
                    f"CollectiveExchange: world_size = {world_size} on rank {rank}, but torch.distributed is "
                    f"not initialised; call torch.distributed.init_process_group first"
                )
            actual = dist.get_rank(process_group), dist.get_world_size(process_group)
            if actual != (rank, world_size):
                raise BadValue(
                    f"CollectiveExchange: rank, world_size = {(rank, world_size)}; "
                    f"expected the process group's own, {actual}"
                )
        super().__init__(rank, world_size, depth, Limits(num_experts, top_k, max_tokens, hidden_size, dtype))
        self._process_group = process_group
        self._timeout = timeout
        self._next_timeout = warmup_timeout
        self._poisoned = ""
        self._closed = False

    # ---------------------------------------------------------------------------------------------- dispatch

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
        """Sends every token's row to the owners of its experts. Collective.

        Args:
            x: [T, H] fp32/bf16/fp16/fp64, any strides.
            topk_idx: [T, K] int32 or int64, any strides; global expert ids, -1 for no expert. None with ``routing``.
            topk_weights: [T, K] float, any strides, or None.
            routing: the handle of an earlier dispatch, open or not, whose routing is used again; the same call's on all ranks.
            tag: 64-bit number that has to be the same on all ranks.
            pad_to: rows of the result, zeros behind the others; -1 for as many as come. May differ between ranks.
            align: each expert's rows are padded to a multiple of this with zeros. The same on all ranks.
            quant: 0 none, 1 int8, 2 fp8_e4m3. The same on all ranks.
            gradients: what this rank wants gradients of, bits of Gradient. The handle has those of all ranks.

        Returns:
            x_NH: [N, H] in x's dtype or the quantised one, rows in (local expert, source rank, token, k) order.
            weights_N: [N] in the weights' dtype; empty without weights.
            scales: float32, [N] (int8) or [N, ceil(H / 128)] (fp8_e4m3); empty when not quantised.
            meta: the handle for :meth:`combine`, int64 [words], read with :class:`HandleView`.

        Raises:
            BadType, BadValue: bad input on this rank.
            PeerAborted: bad input on another rank.
            CallMismatch: ranks disagree on H, dtype, weights, tag, quantisation, align, routing or the operation.
            PadTooSmall: some rank would receive more rows than its pad_to.
            PeerLost, PeerTimeout: torch.distributed failed; only after these the exchange is not usable.
        """
        self._check_usable("moe_a2a.dispatch")
        self._epoch += 1
        self._expire()
        failure: Exception | None = None
        header = _Header(_DISPATCH, epoch=self._epoch)
        counts_E = torch.zeros(self._limits.num_experts, dtype=torch.int64)
        try:
            ids_TK, again = self._routing_of(topk_idx, routing)
            digest = 0 if again is None else _digest(again.counts_RE, again.epoch)
            check_dispatch(x, ids_TK, topk_weights, self._limits, self.rank)
            check_options(pad_to, align, quant, self.rank)
            assert isinstance(ids_TK, Tensor)
            counts_E, slot_TK = send_counts_reference(ids_TK, self._limits.num_experts)
            rows_TH, scales_T = quantized_rows(x.detach(), QUANT_NAMES.get(quant))
            parts = [rows_TH, scales_T[:, None] if quant == 1 else scales_T][: 1 + (quant > 0)]
            send = _pack_rows(parts, ids_TK, topk_weights)
            header = header._replace(
                hidden=x.shape[1],
                dtype=DTYPE_CODES[x.dtype],
                weight_dtype=0 if topk_weights is None else DTYPE_CODES[topk_weights.dtype],
                tag=_int64(tag),
                quant=quant,
                align=align,
                routing=digest,
                pad_to=pad_to,
                gradients=gradients,
                ids=int(ids_digest(ids_TK)),
            )
        except Exception as error:  # whatever stops this rank, its peers must hear of it
            failure = named_error("moe_a2a.dispatch", error, self.rank)
        with self._in_step():
            headers, counts_RE, reasons = self._exchange_records(header, counts_E, failure)
        if failure is not None:
            raise failure
        self._check_agreement(_DISPATCH, headers, ("kind",))
        if reasons:
            raise self._peer_aborted(_DISPATCH, reasons)
        self._check_agreement(
            _DISPATCH,
            headers,
            ("epoch", "hidden", "dtype", "weight_dtype", "tag", "quant", "align", "routing"),
        )
        wanted = functools.reduce(operator.or_, (h.gradients for h in headers.values())) & GRADIENT_BITS
        if wanted:  # backward sends the weights that combine gets
            said = {rank: h for rank, h in headers.items() if h.combine_weights}
            self._check_agreement(_DISPATCH, said, ("combine_weights",))
        self._check_sizes(headers, counts_RE, align)

        assert ids_TK is not None
        local = self._experts[self.rank]
        with self._in_step():
            rows_RR = self._rows_of_owner(counts_RE)
            arrived = self._all_to_all(_DISPATCH, send, rows_RR[self.rank], rows_RR[:, self.rank])
        try:
            # They arrive in (source, local expert, token, k) order.
            expert_of_row = _labels(counts_RE[:, local.start : local.stop])
            places, rows = _places(counts_RE[:, local.start : local.stop].sum(0), align)
            out_rows = rows if pad_to == -1 else pad_to
            padded = arrived.new_zeros(out_rows, arrived.shape[1])
            padded[places] = arrived.index_select(0, expert_of_row.argsort(stable=True))
            columns = [(part.shape[1], part.dtype) for part in parts]
            if topk_weights is not None:
                columns.append((1, topk_weights.dtype))
            arrays = _unpack_rows(padded, columns)
            weights_N = torch.empty(0) if topk_weights is None else arrays[-1][:, 0]
            scales = arrays[1] if quant else torch.empty(0)
            row_E = self._first_row_of_expert(counts_RE, align)
            meta = pack_handle(
                epoch=self._epoch,
                generation=self._generation,
                num_tokens=x.shape[0],
                top_k=ids_TK.shape[1],
                hidden=x.shape[1],
                rows=rows,
                rank=self.rank,
                dtype=x.dtype,
                counts_RE=counts_RE,
                expert_TK=ids_TK,
                row_TK=torch.where(ids_TK >= 0, row_E[ids_TK.long().clamp(min=0)] + slot_TK, -1),
                num_experts=self._limits.num_experts,
                align=align,
                out_rows=out_rows,
                gradients=wanted,
                ids_R=[headers[rank].ids for rank in range(self.world_size)],
            )
        except Exception as error:  # no memory for padding, say: this rank's own affair
            raise named_error("moe_a2a.dispatch", error, self.rank) from error
        self._open[self._epoch] = meta.clone()
        # Copies: an operator's outputs must not be views.
        return arrays[0].clone(), weights_N.clone(), scales[:, 0] if quant == 1 else scales, meta

    # ----------------------------------------------------------------------------------------------- combine

    @torch.no_grad()
    def combine(
        self, y: Tensor | MoeA2AError, meta: Tensor, topk_weights: Tensor | None, pairs: bool = False
    ) -> Tensor:
        """Brings the rows back to their tokens and sums them by the combine rule. Collective; closes it.

        Args:
            y: [N, H] fp32/bf16/fp16/fp64, any strides, a row for each row of dispatch, padding included, which is not
                looked at; dtype and H may be others than x's. An error: there is none, and the peers are told why.
            meta: the handle of a dispatch, not combined yet, with fewer than ``depth`` newer dispatches.
            topk_weights: [T, K] float, any strides, or None to sum the rows as they are.
            pairs: the rows aren't summed.

        Returns:
            [T, H] in y's dtype; with ``pairs`` [T, K * H], zeros where dropped.

        Raises:
            HandleExpired: at once and without a word to the others, which make the same call.
            BadType, BadValue: bad input on this rank.
            PeerAborted: a rank that holds rows of this one's tokens had a bad y.
            CallMismatch: ranks disagree on y's dtype or H, the handle or the operation.
            PeerLost, PeerTimeout: torch.distributed failed; only after these the exchange is not usable.
        """
        self._check_usable("moe_a2a.combine")
        failure: Exception | None = None
        weights_failure: Exception | None = None
        header = _Header(_COMBINE, epoch=self._epoch)
        counts_RE = torch.zeros(self.world_size, self._limits.num_experts, dtype=torch.int64)
        send = torch.empty(0, 1, dtype=torch.uint8)
        try:
            handle = self._open_handle(meta)
            header = header._replace(handle=handle.epoch)
            if isinstance(y, MoeA2AError):
                raise y
            # A scalar for a pair may be wider than a very narrow row.
            scalars = replace(self._limits, hidden_size=self._limits.hidden_size + 8)
            check_combine_rows(y, handle.out_rows, scalars if pairs else self._limits, self.rank)
            try:
                check_combine_weights(topk_weights, handle.num_tokens, handle.top_k, self.rank)
            except MoeA2AError as error:
                weights_failure = error
            # Rows leave in (source, local expert, token, k) order.
            local = self._experts[self.rank]
            source_of_row = _labels(handle.counts_RE[:, local.start : local.stop].t())
            places, _ = _places(handle.counts, handle.align)
            send = _bytes(y.detach().index_select(0, places[source_of_row.argsort(stable=True)]))
            counts_RE = handle.counts_RE.long()
            header = header._replace(hidden=y.shape[1], dtype=DTYPE_CODES[y.dtype])
        except HandleExpired:
            raise
        except Exception as error:  # as in dispatch
            failure = named_error("moe_a2a.combine", error, self.rank)
        self._open.pop(header.handle, None)
        with self._in_step():
            no_counts_E = torch.zeros(self._limits.num_experts, dtype=torch.int64)
            headers, _, reasons = self._exchange_records(header, no_counts_E, failure)
        good = {rank: header for rank, header in headers.items() if rank not in reasons}
        try:
            self._check_agreement(_COMBINE, headers, ("kind",))
            self._check_agreement(_COMBINE, good, ("epoch", "handle", "hidden", "dtype"))
        except CallMismatch as mismatch:
            raise failure or mismatch from None

        with self._in_step():
            rows_RR = self._rows_of_owner(counts_RE)
            needed_R = rows_RR[self.rank].tolist()
            if reasons:
                # Nothing goes to or from a rank with bad input, but an all-to-all needs it to take part.
                if failure is None:
                    parts = torch.split(send, rows_RR[:, self.rank].tolist())
                    send = torch.cat([parts[rank] for rank in good])
                bad = list(reasons)
                rows_RR[bad] = 0
                rows_RR[:, bad] = 0
            arrived = self._all_to_all(_COMBINE, send, rows_RR[:, self.rank], rows_RR[self.rank])
        if failure is not None:
            raise failure
        assert isinstance(y, Tensor)
        holders = {rank: reason for rank, reason in reasons.items() if needed_R[rank]}
        if holders:
            raise self._peer_aborted(_COMBINE, holders)
        if weights_failure is not None:
            raise weights_failure
        # Rows arrive in (owner, local expert, token, k) order, which is (expert, token, k).
        pairs_P = _pairs_by_expert(handle.expert_TK)
        position = torch.full((handle.num_tokens * handle.top_k,), -1)
        position[pairs_P] = torch.arange(len(pairs_P))
        position_TK = rearrange(position, "(t k) -> t k", t=handle.num_tokens, k=handle.top_k)
        if pairs:
            out = y.new_zeros(handle.num_tokens * handle.top_k, y.shape[1])
            out[pairs_P] = arrived.view(y.dtype)
            return rearrange(out, "(t k) h -> t (k h)", t=handle.num_tokens, k=handle.top_k)
        return weighted_sum_reference(arrived.view(y.dtype), position_TK, topk_weights)

    def combine_again(self, y: Tensor, routing: Tensor, tag: int, pairs: bool) -> Tensor:
        """Combines rows that go with the routing of an older dispatch: what backward does. Collective.

        A dispatch of one number for each token opens the handle. Args, returns and errors are those of :meth:`combine`.
        """
        handle = self._read_handle("moe_a2a (backward)", "routing", routing)
        ones = torch.ones(handle.num_tokens, 1, dtype=self._limits.dtype)
        *_, meta = self.dispatch(ones, None, None, routing, tag, handle.out_rows, handle.align)
        return self.combine(y, meta, None, pairs)

    def abort(self, failure: Exception) -> None:
        """Uses up the next call on all ranks, for bad input that was found before dispatch: they raise PeerAborted."""
        self._check_usable("moe_a2a.dispatch")
        self._epoch += 1
        self._expire()
        with self._in_step():
            header = _Header(_DISPATCH, epoch=self._epoch)
            counts_E = torch.zeros(self._limits.num_experts, dtype=torch.int64)
            self._exchange_records(header, counts_E, failure)

    def close(self) -> None:
        """Ends the use of this exchange on this rank; idempotent. The process group is left to its owner."""
        self._closed = True
        self._open.clear()

    # -------------------------------------------------------------------------------------- state and checks

    def _check_usable(self, operation: str) -> None:
        if self._closed:
            raise GroupClosed(f"{operation}: the group was closed on rank {self.rank}; create a new one")
        if self._poisoned:
            raise GroupPoisoned(
                f"{operation}: the group is poisoned on rank {self.rank} by an earlier failure "
                f"({self._poisoned}); close it and create a new one"
            )

    def _check_sizes(self, headers: dict[int, _Header], counts_RE: Tensor, align: int) -> None:
        """Every rank gets as many rows as it asked for, and no more than int32 can number. All ranks decide alike.

        Raises:
            PadTooSmall, BadValue
        """
        where = f"moe_a2a.dispatch: call {self._epoch} on rank {self.rank}"
        for rank, owned in enumerate(self._experts):
            totals = counts_RE[:, owned.start : owned.stop].sum(0).tolist()
            rows, pad_to = sum(-(-n // align) * align for n in totals), headers[rank].pad_to
            if 0 <= pad_to < rows:
                aligned = " (with align)" if align > 1 else ""
                raise PadTooSmall(
                    f"{where}: rank {rank} would receive {rows} rows{aligned} and asked for pad_to = {pad_to}; nothing was "
                    f"exchanged; raise pad_to, or leave it out"
                )
            if rows >= 2**31:
                raise BadValue(
                    f"{where}: rank {rank} would receive {rows} rows; positions are int32; dispatch fewer tokens at once"
                )

    def _check_agreement(self, kind: int, headers: dict[int, _Header], names: Sequence[str]) -> None:
        """Raises CallMismatch for the first of these fields in which these ranks' headers differ."""
        for name in names:
            values: dict[int, list[int]] = {}
            for rank, header in headers.items():
                values.setdefault(getattr(header, name), []).append(rank)
            if len(values) > 1:
                what, show = _AGREE[name]
                said = ", ".join(
                    f"{show(value)} on rank {', '.join(map(str, at))}" for value, at in values.items()
                )
                raise CallMismatch(
                    f"{_OPERATIONS[kind]}: the ranks disagree on {what} in call {self._epoch}: {said} (this "
                    f"is rank {self.rank}); all have to make the same calls in the same order, and {what} "
                    f"has to be the same"
                )

    def _peer_aborted(self, kind: int, reasons: dict[int, str]) -> PeerAborted:
        said = "; ".join(f"rank {rank} said: {reason}" for rank, reason in reasons.items())
        return PeerAborted(
            f"{_OPERATIONS[kind]}: bad input on another rank ended call {self._epoch} on rank {self.rank}; "
            f"{said}"
        )

    # ---------------------------------------------------------------------------------------------- geometry

    def _rows_of_owner(self, counts_RE: Tensor) -> Tensor:
        """[R, R] int64: rows that each source (first index) has at each owner."""
        return torch.stack([counts_RE[:, e.start : e.stop].sum(1) for e in self._experts], dim=1)

    def _first_row_of_expert(self, counts_RE: Tensor, align: int) -> Tensor:
        """[E] int64: where this rank's pairs of each expert begin among the rows of the expert's owner."""
        totals_E = (counts_RE.sum(0) + align - 1).div(align, rounding_mode="floor") * align
        before_E = totals_E.cumsum(0) - totals_E
        owner_first_E = torch.tensor([experts.start for experts in self._experts for _ in experts])
        return before_E - before_E[owner_first_E] + counts_RE[: self.rank].sum(0)

    # ----------------------------------------------------------------------------------------- communication

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """While peers count on this rank's next collective, any failure puts it out of step: it poisons."""
        try:
            yield
        except BaseException as error:
            if self.world_size > 1:
                self._poisoned = f"{type(error).__name__}: {error}"
            raise

    def _exchange_records(
        self, header: _Header, counts_E: Tensor, failure: Exception | None
    ) -> tuple[dict[int, _Header], Tensor, dict[int, str]]:
        """Tells every rank about this rank's call, or that it can't make it.

        Returns:
            The headers by rank, the send-count matrix [R, E] int64, and the reasons of failed ranks.
        """
        text = b"" if failure is None else _reason_text(failure)
        header = header._replace(abort_bytes=len(text))
        records = self._all_gather(header.kind, torch.cat([torch.tensor(header), counts_E]))
        rows = records[:, : len(header)].tolist()
        headers = {rank: _Header(*row) for rank, row in enumerate(rows)}
        # The same everywhere, unless a dispatch met a combine: then all ranks go on from the larger number.
        self._epoch = max(h.epoch for h in headers.values())
        self._expire()
        reasons: dict[int, str] = {}
        longest = max(h.abort_bytes for h in headers.values())
        if longest:
            texts = self._all_gather(
                header.kind, torch.tensor(list(text.ljust(longest, b"\0")), dtype=torch.uint8)
            )
            reasons = {
                rank: bytes(texts[rank, : h.abort_bytes].tolist()).decode(errors="replace")
                for rank, h in headers.items()
                if h.abort_bytes
            }
        return headers, records[:, len(header) :], reasons

    def _all_gather(self, kind: int, mine: Tensor) -> Tensor:
        """Every rank's ``mine`` [n], as [R, n]."""
        if self.world_size == 1:
            return mine[None]
        everyone = mine.new_empty(self.world_size, len(mine))
        self._finish(
            kind, lambda: dist.all_gather(list(everyone), mine, group=self._process_group, async_op=True)
        )
        return everyone

    def _all_to_all(self, kind: int, rows: Tensor, send_R: Tensor, receive_R: Tensor) -> Tensor:
        """Sends ``rows`` [*, B] uint8, cut by send_R, to the ranks; returns what came, in rank order."""
        if self.world_size == 1:
            return rows
        arrived = rows.new_empty(int(receive_R.sum()), rows.shape[1])
        self._finish(
            kind,
            lambda: dist.all_to_all_single(
                arrived, rows, receive_R.tolist(), send_R.tolist(), group=self._process_group, async_op=True
            ),
        )
        return arrived

    def _finish(self, kind: int, begin: Callable[[], dist.Work | None]) -> None:
        """Runs a collective to its end or the timeout, in slices short enough that Ctrl-C is heard."""
        where = f"{_OPERATIONS[kind]}: call {self._epoch} on rank {self.rank}"
        deadline = time.monotonic() + self._next_timeout
        try:
            work = begin()
            assert work is not None  # only for ranks outside the group, which the constructor turns away
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise PeerTimeout(
                        f"{where}: waited {self._next_timeout:g} s for the other ranks (torch.distributed "
                        f"doesn't tell which one is missing); the group is poisoned, close it and create a "
                        f"new one"
                    )
                # Raises when the slice runs out, and when the work has failed: then it is completed, too.
                with contextlib.suppress(RuntimeError):
                    work.wait(_WAIT_SLICE)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, MoeA2AError):
                raise
            late = "timed out" in str(error).lower()
            raise (PeerTimeout if late else PeerLost)(
                f"{where}: torch.distributed failed, so a peer died or did not come ({error}); "
                f"the group is poisoned, close it and create a new one"
            ) from error
        self._next_timeout = self._timeout
