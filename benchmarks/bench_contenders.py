"""What is compared: moe_a2a and the peers behind one interface, their inputs, and the checks of what they
return.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows, L experts of the largest
rank.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from baselines import BareMpi, PackedExchange, PackedState, PairExchange, PairState, expert_starts
from bench_plan import ITEM_BYTES, Size

import moe_a2a
from moe_a2a import reference


@dataclass
class Inputs:
    """One set of inputs of this rank and what has to come out of it."""

    x_TH: torch.Tensor
    topk_idx: torch.Tensor  # [T, K] int64
    weights: torch.Tensor  # [T, K] fp32 holding bf16 values, so that no peer loses by keeping them in bf16
    expected_x: torch.Tensor  # [N, H]
    expected_counts: torch.Tensor  # [local experts]
    expected_matrix: torch.Tensor  # [R, E]
    expected_out: torch.Tensor  # [T, H]
    out_scale: torch.Tensor  # [T, H] fp32: sum over k of |weight * row|, what rounding errors are measured by
    expert_N1: torch.Tensor  # factor of each received row's expert
    bare_send: torch.Tensor  # [pairs, H] rows sorted by expert
    bare_send_RL: torch.Tensor  # [R, experts of the largest rank]
    bare_recv: torch.Tensor  # [N, H] in (source, expert, token, k) order

    @property
    def routed_bytes(self) -> int:
        """Bytes of the rows that this rank really sends: dropped pairs don't count."""
        return self.bare_send.numel() * ITEM_BYTES


def make_inputs(size: Size, world_size: int, rank: int, seed: int, routing: str) -> Inputs:
    """Every rank makes the inputs of all ranks, so that each can ask the oracle."""
    xs, idxs, weights = [], [], []
    for r in range(world_size):
        generator = torch.Generator().manual_seed(seed * 1009 + r)
        xs.append(torch.randn(size.T, size.H, generator=generator).to(torch.bfloat16))
        ids = torch.rand(size.T, size.E, generator=generator).topk(size.K, dim=1).indices
        idxs.append(torch.full_like(ids, -1) if routing == "dropped" else ids)
        weights.append(torch.rand(size.T, size.K, generator=generator).to(torch.bfloat16).float())

    delivered = reference.dispatch_reference(xs, idxs, size.E)
    starts = expert_starts(size.E, world_size)
    # Powers of two: exact in bf16, and different from one expert to the next, so that rows of the wrong
    # expert show.
    factor_E = torch.tensor(
        [(1.0, -2.0, 0.5, 4.0, -0.25)[e % 5] for e in range(size.E)], dtype=torch.bfloat16
    )
    factors = [
        torch.repeat_interleave(factor_E[starts[r] : starts[r + 1]], delivered[r].counts).unsqueeze(1)
        for r in range(world_size)
    ]
    ys = [delivered[r].x_NH * factors[r] for r in range(world_size)]
    out = reference.combine_reference(ys, idxs, size.E, weights)[rank]

    mine = idxs[rank].reshape(-1)
    order = torch.argsort(mine, stable=True)[int((mine < 0).sum()) :]
    widths = [b - a for a, b in itertools.pairwise(starts)]
    counts_RE = torch.stack([torch.bincount(idx[idx >= 0].reshape(-1), minlength=size.E) for idx in idxs])
    send_RL = torch.zeros((world_size, max(*widths, 1)), dtype=torch.int64)
    for r in range(world_size):
        send_RL[r, : widths[r]] = counts_RE[rank, starts[r] : starts[r + 1]]
    magnitude_TK = (weights[rank] * factor_E.float()[idxs[rank]]).abs() * (idxs[rank] >= 0)
    by_source = torch.argsort(delivered[rank].source_N3[:, 0], stable=True)
    return Inputs(
        x_TH=xs[rank],
        topk_idx=idxs[rank],
        weights=weights[rank],
        expected_x=delivered[rank].x_NH,
        expected_counts=delivered[rank].counts,
        expected_matrix=counts_RE,
        expected_out=out,
        out_scale=magnitude_TK.sum(1, keepdim=True) * xs[rank].float().abs(),
        expert_N1=factors[rank],
        bare_send=xs[rank][torch.div(order, size.K, rounding_mode="floor")],
        bare_send_RL=send_RL,
        bare_recv=delivered[rank].x_NH[by_source],
    )


def first_wrong_row(got: torch.Tensor, expected: torch.Tensor) -> int:
    return int(torch.nonzero((got != expected).any(1))[0])


def wrong_rows(what: str, got: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """A sentence if the two aren't bitwise equal, else nothing."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return [f"{what} is {got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}"]
    if torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
        return []
    if torch.equal(got, expected):
        return [f"{what} differs from the oracle in the sign of a zero"]
    return [f"{what} differs from the oracle, first in row {first_wrong_row(got, expected)}"]


def far_rows(what: str, got: torch.Tensor, inputs: Inputs) -> list[str]:
    """A sentence if a peer's sum is further off than roundings to bf16 explain (partial sums too)."""
    expected = inputs.expected_out
    if got.shape != expected.shape:
        return [f"{what} is {list(got.shape)}, expected {list(expected.shape)}"]
    far = (got.float() - expected.float()).abs() > inputs.out_scale * 2.0**-6 + 1e-30
    if not bool(far.any()):
        return []
    return [f"{what} is further off than rounding explains, first in row {int(far.any(1).nonzero()[0])}"]


@dataclass
class Buffers:
    """x and y of all contenders that keep them in ordinary memory."""

    x_TH: torch.Tensor
    y_NH: torch.Tensor


class Contender(ABC):
    """One way of doing dispatch and combine. Only ``dispatch`` and ``combine`` are timed."""

    name: str
    _y: torch.Tensor | None = None

    @abstractmethod
    def prepare(self, inputs: Inputs) -> None:
        """Writes x, as the layer before would have done just now: lines that this core has written cost a peer
        more to read than lines that lie in a shared cache since the sample before."""

    @abstractmethod
    def dispatch(self) -> None: ...

    @abstractmethod
    def experts(self) -> None: ...

    @abstractmethod
    def combine(self) -> None: ...

    @abstractmethod
    def check(self) -> list[str]: ...

    def release(self) -> None:
        """Drops what the sample made, so that memory can be used again. Not timed."""
        self._y = None


class Ours(Contender):
    """The public functions of moe_a2a, with ordinary tensors or with x and y already in the window."""

    def __init__(self, group: moe_a2a.EPGroup, buffers: Buffers, *, in_window: bool, fault: bool) -> None:
        self.name = "ours-window" if in_window else "ours"
        self._group, self._in_window, self._fault, self._buffers = group, in_window, fault, buffers
        self._d: Any = None
        self._y: torch.Tensor | None = None
        self._out: torch.Tensor | None = None

    def prepare(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._x = self._group.empty(*inputs.x_TH.shape) if self._in_window else self._buffers.x_TH
        self._x.copy_(inputs.x_TH)

    def dispatch(self) -> None:
        self._d = moe_a2a.dispatch(self._x, self.inputs.topk_idx, self._group)

    def experts(self) -> None:
        x_NH = self._d.x
        self._y = self._d.empty_like_rows() if self._in_window else self._buffers.y_NH[: len(x_NH)]
        torch.mul(x_NH, self.inputs.expert_N1, out=self._y)
        if self._fault and len(x_NH) > 0:
            self._y[0] += 1.0

    def combine(self) -> None:
        assert self._y is not None
        self._out = moe_a2a.combine(self._y, self._d.handle, self.inputs.weights)

    def check(self) -> list[str]:
        assert self._out is not None
        found = wrong_rows("d.x", self._d.x, self.inputs.expected_x)
        found += wrong_rows("combine's result", self._out, self.inputs.expected_out)
        if not torch.equal(self._d.counts, self.inputs.expected_counts):
            found.append(
                f"d.counts is {self._d.counts.tolist()}, expected {self.inputs.expected_counts.tolist()}"
            )
        offsets = torch.nn.functional.pad(self.inputs.expected_counts.cumsum(0), (1, 0))
        if not torch.equal(self._d.offsets.long(), offsets):
            found.append(f"d.offsets is {self._d.offsets.tolist()}, expected {offsets.tolist()}")
        if not torch.equal(self._d.handle.send_count_matrix.long(), self.inputs.expected_matrix):
            found.append("handle.send_count_matrix differs from the counts of the ranks' ids")
        return found

    def release(self) -> None:
        self._d = self._y = self._out = None


class Peer(Contender):
    """PairExchange or PackedExchange over gloo or MPI."""

    def __init__(self, exchange: PairExchange | PackedExchange, buffers: Buffers) -> None:
        self.name = exchange.name
        self._exchange: Any = exchange
        self._buffers = buffers
        self._state: PairState | PackedState | None = None
        self._out: torch.Tensor | None = None

    def prepare(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._buffers.x_TH.copy_(inputs.x_TH)

    def dispatch(self) -> None:
        self._state = self._exchange.dispatch(self._buffers.x_TH, self.inputs.topk_idx, self.inputs.weights)

    def experts(self) -> None:
        assert self._state is not None
        x_NH = self._state.x_NH
        self._y = self._buffers.y_NH[: len(x_NH)]
        torch.mul(x_NH, self.inputs.expert_N1, out=self._y)

    def combine(self) -> None:
        self._out = self._exchange.combine(self._y, self._state, self.inputs.weights)

    def check(self) -> list[str]:
        assert self._state is not None and self._out is not None
        found = wrong_rows("x", self._state.x_NH, self.inputs.expected_x)
        found += far_rows("combine's result", self._out, self.inputs)
        if not torch.equal(self._state.counts, self.inputs.expected_counts):
            found.append(
                f"counts are {self._state.counts.tolist()}, expected {self.inputs.expected_counts.tolist()}"
            )
        return found

    def release(self) -> None:
        self._state = self._out = None


class Bare(Contender):
    """MPI alone: counts, rows, rows back. Its rows stay in the order in which they were sent."""

    def __init__(self, bare: BareMpi) -> None:
        self.name = bare.name
        self._bare = bare

    def prepare(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._bare.load(inputs.bare_send, inputs.bare_send_RL)

    def dispatch(self) -> None:
        self._bare.dispatch()

    def experts(self) -> None:
        size = self._bare.recv_bytes
        self._bare.reply[:size] = self._bare.recv[:size]

    def combine(self) -> None:
        self._bare.combine()

    def check(self) -> list[str]:
        sent, received = (rows.view(torch.uint8) for rows in (self.inputs.bare_send, self.inputs.bare_recv))
        if self._bare.recv_bytes != received.numel():
            return [f"{self._bare.recv_bytes} bytes were received, expected {received.numel()}"]
        got = torch.from_numpy(self._bare.recv[: received.numel()]).view_as(received)
        back = torch.from_numpy(self._bare.returned[: sent.numel()]).view_as(sent)
        return wrong_rows("the received rows", got, received) + wrong_rows("the returned rows", back, sent)
