"""Inputs that every rank can make for every rank, and comparisons that look at bits.

A rank's inputs depend on the step's seed and the rank alone, so each rank computes what all the others send,
asks the oracle, and compares its own part: no result has to travel for a check.

T tokens of a rank, H hidden, E experts, K top-k, R ranks, N received rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pool import RankContext
from torch import Tensor

DATA = Path(__file__).resolve().parent.parent / "data"
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``: cases carry names, since they are compared and printed."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class GroupSpec:
    """Arguments of an ``EPGroup``; ``recv_rows`` None makes room for every row on one rank, without align.

    ``mix`` is a seed: with protocol "push" each call then pushes or pulls by chance. ``flag_rows``: pushed rows that share a
    flag. ``streaming`` 0: everything is written past the cache. ``code_max``: codes begin anew after so many calls.
    """

    experts: int
    top_k: int
    max_tokens: int
    hidden: int
    dtype: str = "float32"
    recv_rows: int | None = None
    record_format: str = "auto"
    depth: int = 2
    timeout: float = 20.0
    transport: str = "cpu-shm"
    protocol: str = "auto"
    mix: int = 0
    flag_rows: int = 0
    streaming: int | None = None
    code_max: int | None = None

    def kwargs(self, world_size: int) -> dict[str, Any]:
        """Keyword arguments for ``EPGroup``."""
        return {
            "num_experts": self.experts,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "hidden_size": self.hidden,
            "dtype": dtype_of(self.dtype),
            "max_recv_rows": world_size * self.max_tokens * self.top_k
            if self.recv_rows is None
            else self.recv_rows,
            "record_format": self.record_format,
            "depth": self.depth,
            "transport": self.transport,
            "protocol": self.protocol,
            "_tiling": {
                "mix": self.mix,
                "flag_rows": self.flag_rows,
                **({} if self.streaming is None else {"streaming_bytes": self.streaming}),
            },
            "_code_max": self.code_max,
            "timeout": self.timeout,
            "warmup_timeout": 2 * self.timeout,
        }

    def open(self, ctx: RankContext) -> Any:
        """The cached group of these arguments, which must be what was asked for and not a fallback."""
        group = ctx.group(**self.kwargs(ctx.world_size))
        assert group.transport.name == self.transport, group.transport.reason
        return group


@dataclass(frozen=True)
class Step:
    """One dispatch + experts + combine on all ranks.

    Attributes:
        tokens: T of each rank.
        routing: "distinct" (no expert twice in a row), "any" (duplicates), "one" (all to expert ``target``),
            "skew" (90 % of the tokens share one row of ids), "nearly all alike" (all but 10 rows do),
            "round" (pair p goes to expert p mod E), "low half" (experts 0..E/2-1 only),
            "trace_none/3/17" (layer 3, batch 17 + rank of that file; E 16, K 2).
        drop: share of slots that are -1; their weights are NaN.
        rows: "tags" ((rank, token) as integers below 256, exact in every dtype), "turn" (tags that
            differ from step to step), "random", or "nan".
        weight_dtype, y_dtype: None means no weights, and y in x's dtype.
        source, result: "plain", or "window" for a tensor of ``group.empty`` / ``d.empty_like_rows``.
        weigh: weights "combine" only, "dispatch" only (they arrive with the rows), or "both".
        pad: None, or rank r asks for ``pad + r`` rows more than it gets.
        align, quantize: as dispatch takes them.
        again: the seed of an earlier step whose routing is used again; all that makes a routing has to be that step's.
        later: "dispatch", "combine" or "both" are called with async_op; plain inputs are overwritten before ``wait()``.
    """

    tokens: tuple[int, ...]
    top_k: int
    hidden: int
    dtype: str = "float32"
    weight_dtype: str | None = "float32"
    y_dtype: str | None = None
    ids: str = "int64"
    routing: str = "distinct"
    target: int = 0
    drop: float = 0.0
    rows: str = "tags"
    source: str = "plain"
    result: str = "plain"
    weigh: str = "both"
    seed: int = 0
    pad: int | None = None
    align: int = 1
    quantize: str | None = None
    again: int | None = None
    later: str = ""

    @property
    def routing_seed(self) -> int:
        """The seed of the step whose routing this is."""
        return self.seed if self.again is None else self.again


@dataclass(frozen=True)
class Inputs:
    """What one rank passes: x [T, H], idx [T, K], weights [T, K] or None."""

    x_TH: Tensor
    idx_TK: Tensor
    weights_TK: Tensor | None


def tag_rows(rank: int, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """[T, H] rows that name their rank and token: base-256 digits in the columns, shifted from set to set.

    With H >= 4 every (rank, token < 2**21) has a row of its own; fewer columns tell as much as they can hold.
    """
    t = torch.arange(tokens)[:, None]
    digits_T4 = torch.cat(
        [(t * 8 + rank) % 256, t // 32 % 256, t // 8192 % 256, torch.full_like(t, rank + 1)], dim=1
    )
    column = torch.arange(hidden)
    rows_TH = (digits_T4[:, column % 4] + column // 4 * 7) % 256
    return rows_TH.to(dtype)


@cache
def trace(name: str) -> Any:
    """Expert ids [layers 4, batches 64, tokens 128, top-2] of a recorded model."""
    with np.load(DATA / f"{name}.npz") as archive:
        return archive["I"]


def _routing(step: Step, rank: int, experts: int, rng: torch.Generator) -> Tensor:
    T, K = step.tokens[rank], step.top_k
    if step.routing.startswith("trace"):
        name, layer, batch = step.routing.split("/")
        return torch.from_numpy(trace(name)[int(layer), (int(batch) + rank) % 64, :T].astype(np.int64))
    if step.routing == "one":
        return torch.full((T, K), step.target)
    if step.routing == "round":
        return (torch.arange(T * K).view(T, K) + rank) % experts
    if step.routing == "any":
        return torch.randint(0, experts, (T, K), generator=rng)
    if step.routing == "low half":
        return torch.rand(T, experts // 2, generator=rng).topk(K).indices
    if step.routing not in ("distinct", "skew", "nearly all alike"):
        raise ValueError(f"Step: routing = {step.routing!r}")
    idx_TK = torch.rand(T, experts, generator=rng).topk(K).indices
    if step.routing == "distinct":
        return idx_TK
    shared_K = torch.rand(experts, generator=torch.Generator().manual_seed(step.routing_seed)).topk(K).indices
    if step.routing == "skew":
        alike_T1 = torch.rand(T, 1, generator=rng) < 0.9
    else:
        alike_T1 = torch.rand(T, 1, generator=rng).argsort(0).argsort(0) >= 10
    return torch.where(alike_T1, shared_K, idx_TK)


def make_inputs(step: Step, rank: int, experts: int) -> Inputs:
    """The inputs of ``rank`` in this step; every rank can make them for every other."""
    rng = torch.Generator().manual_seed(step.routing_seed * 1009 + rank)
    T, K, dtype = step.tokens[rank], step.top_k, dtype_of(step.dtype)
    idx_TK = _routing(step, rank, experts, rng)
    dropped_TK = torch.rand(T, K, generator=rng) < step.drop
    idx_TK = torch.where(dropped_TK, -1, idx_TK).to(dtype_of(step.ids))
    if step.again is not None:
        rng = torch.Generator().manual_seed(step.seed * 1009 + rank)
    weights_TK = None
    if step.weight_dtype is not None:
        weights = torch.rand(T, K, generator=rng, dtype=torch.float64).mul(2).sub(0.5)
        weights_TK = weights.to(dtype_of(step.weight_dtype)).masked_fill(dropped_TK, float("nan"))
    if step.rows == "tags":
        x_TH = tag_rows(rank, T, step.hidden, dtype)
    elif step.rows == "turn":
        x_TH = tag_rows(rank, T, step.hidden, dtype) * 128 + step.seed
    elif step.rows == "random":
        x_TH = torch.randn(T, step.hidden, generator=rng, dtype=torch.float64).to(dtype)
    else:
        x_TH = torch.full((T, step.hidden), float("nan"), dtype=dtype)
    return Inputs(x_TH, idx_TK, weights_TK)


def all_inputs(step: Step, experts: int) -> list[Inputs]:
    """The inputs of all ranks of a step."""
    return [make_inputs(step, rank, experts) for rank in range(len(step.tokens))]


def scale_expert(expert: int, rows: Tensor) -> Tensor:
    """``x * 2**(e mod 8)``: exact in every dtype, so only a reordering of rows can be wrong."""
    return rows * 2.0 ** (expert % 8)


def real_rows(offsets: Tensor, counts: Tensor, rows: int) -> Tensor:
    """[N] bool: which rows are no padding."""
    real_N = torch.zeros(rows, dtype=torch.bool)
    for first, count in zip(offsets[:-1].tolist(), counts.tolist(), strict=True):
        real_N[first : first + count] = True
    return real_N


def run_experts(
    rows_NH: Tensor,
    offsets: Tensor,
    local_experts: range,
    y_dtype: torch.dtype,
    counts: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """[N, H]: each local expert's :func:`scale_expert` on its group of rows.

    Args:
        counts: with padding, the rows of each expert; the result is NaN in the others.
        scales: of quantised rows.
    """
    if scales is not None:
        wide = (
            scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(128, 1)[:, : rows_NH.shape[1]]
        )
        rows_NH = rows_NH.float() * wide
    shares = offsets[1:] - offsets[:-1]
    ids = torch.tensor(list(local_experts), dtype=torch.int64).repeat_interleave(shares)
    factor_N1 = torch.ones(len(rows_NH), 1)
    factor_N1[: len(ids), 0] = 2.0 ** (ids % 8)
    y_NH = rows_NH.to(y_dtype) * factor_N1.to(y_dtype)
    if counts is not None:
        y_NH[~real_rows(offsets, counts, len(y_NH))] = float("nan")
    return y_NH


# ------------------------------------------------------------------------------------------------ comparisons


def bits(tensor: Tensor) -> Tensor:
    """The integer view: NaN payloads and signs of zero count."""
    return tensor.contiguous().view(_INT_OF_SIZE[tensor.element_size()])


def assert_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Same dtype, shape and bits, or an error that shows the first difference."""
    assert isinstance(actual, Tensor), f"{what}: got {type(actual).__name__}, expected a tensor"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    differs = bits(actual) != bits(expected)
    if differs.any():
        where = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, first at {where}: "
            f"{actual[where].item()!r}, expected {expected[where].item()!r}"
            + (
                f"\nrow got      {actual[where[0]][:8].tolist()}"
                f"\nrow expected {expected[where[0]][:8].tolist()}"
                if actual.dim() == 2
                else ""
            )
        )


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of ``dtype`` at ``value`` (fp64 in, fp64 out)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - _MANTISSA_BITS[dtype])


def assert_close_to_truth(out: Tensor, truth: Tensor, magnitude: Tensor, what: str) -> None:
    """|out - truth| within one ulp of out's dtype plus 1e-6 (fp64: 1e-14) of the sum of |w f|."""
    got = out.double()
    if out.dtype == torch.float64:
        bound = 1e-14 * magnitude
    else:
        bound = ulp(torch.maximum(got.abs(), truth.abs()), out.dtype) + 1e-6 * magnitude
    wrong = ~((got - truth).abs() <= bound)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are too far from fp64, at {where}: "
            f"{got[where].item()!r}, truth {truth[where].item()!r}, allowed {bound[where].item()!r}"
        )
