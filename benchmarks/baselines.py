"""What a user would write today for dispatch and combine: the peers that the benchmark compares with.

Two ways of doing it in plain torch, each over two kinds of communication (gloo through torch.distributed,
and MPI):

* ``PairExchange``: one row per (token, expert) pair: sort the pairs by expert, exchange the counts,
  exchange the rows, bring them into (expert, source, token, k) order, and all of that backwards for
  combine, with the weighted sum at the token's rank.
* ``PackedExchange``: one message per (token, rank) pair, however many of that rank's experts the token goes
  to: row, expert ids and weights travel packed as bytes. The receiver copies the row once per expert; on
  the way back it sums its experts' rows, so that one row per (token, rank) returns.

``BareMpi`` moves the rows of ``PairExchange`` between preallocated buffers and does nothing else: no
sorting, no permutation, no sum. It's a lower bound for what an MPI program with one row per pair can reach,
not a usable operator.

These are meant to be hard to beat. ``torch.embedding_bag`` gathers and sums weighted rows in one pass
(several times faster than gather, multiply, sum), ``index_select`` copies whole rows, no pass over the rows
is made twice, and what depends on the routing only is computed in dispatch and kept for combine.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows, L experts per rank (the
largest count), M messages sent, P messages received.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange

if TYPE_CHECKING:
    from mpi4py import MPI

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Comm(Protocol):
    """The two exchanges that a peer needs. Both are collective calls."""

    name: str

    def exchange_counts(self, send_RL: torch.Tensor) -> torch.Tensor:
        """Row r of ``send_RL`` (int64, contiguous) goes to rank r; row r of the result came from rank r."""

    def exchange_rows(self, send: torch.Tensor, send_rows: list[int], recv_rows: list[int]) -> torch.Tensor:
        """The next ``send_rows[r]`` rows of ``send`` go to rank r; the result has rank 0's rows first."""


class GlooComm:
    """torch.distributed's all_to_all_single over gloo."""

    name = "gloo"

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group

    def exchange_counts(self, send_RL: torch.Tensor) -> torch.Tensor:
        recv_RL = torch.empty_like(send_RL)
        dist.all_to_all_single(recv_RL, send_RL, group=self._group)
        return recv_RL

    def exchange_rows(self, send: torch.Tensor, send_rows: list[int], recv_rows: list[int]) -> torch.Tensor:
        recv = send.new_empty((sum(recv_rows), send.shape[1]))
        dist.all_to_all_single(recv, send, recv_rows, send_rows, group=self._group)
        return recv


class MpiComm:
    """MPI_Alltoall and MPI_Alltoallv through mpi4py, straight on the tensors' memory.

    Rows that stay on their rank are copied here and not by MPI: MPICH moves them at a third of memcpy's
    speed.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._rank = comm.Get_rank()
        self._byte = MPI.BYTE

    def exchange_counts(self, send_RL: torch.Tensor) -> torch.Tensor:
        recv_RL = torch.empty_like(send_RL)
        self._comm.Alltoall(send_RL.numpy(), recv_RL.numpy())
        return recv_RL

    def exchange_rows(self, send: torch.Tensor, send_rows: list[int], recv_rows: list[int]) -> torch.Tensor:
        recv = send.new_empty((sum(recv_rows), send.shape[1]))
        row_bytes = send.shape[1] * send.element_size()
        own_send, own_recv = sum(send_rows[: self._rank]), sum(recv_rows[: self._rank])
        own = send_rows[self._rank]
        recv[own_recv : own_recv + own] = send[own_send : own_send + own]
        # numpy has no bfloat16, so the bytes are handed over.
        self._comm.Alltoallv(
            [send.view(torch.uint8).numpy(), *peer_blocks(send_rows, self._rank, row_bytes), self._byte],
            [recv.view(torch.uint8).numpy(), *peer_blocks(recv_rows, self._rank, row_bytes), self._byte],
        )
        return recv


def peer_blocks(rows: list[int], rank: int, row_bytes: int) -> tuple[list[int], list[int]]:
    """Byte counts and displacements of every rank's block, with nothing for ``rank`` itself."""
    counts = [n * row_bytes for n in rows]
    places = [0, *itertools.accumulate(counts)][:-1]
    counts[rank] = 0
    return counts, places


def expert_starts(num_experts: int, world_size: int) -> list[int]:
    """First expert of each rank, and E at the end: the first E mod R ranks own one expert more."""
    small, extra = divmod(num_experts, world_size)
    return [r * small + min(r, extra) for r in range(world_size + 1)]


def exclusive_cumsum(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.cumsum(0) - lengths


def inverse_permutation(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return inverse


def weighted_bags(
    rows: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """out[b] = sum over entries i of bag b of weights[i] * rows[index[i]]; bag b begins at ``starts[b]``."""
    if index.numel() == 0:
        return rows.new_zeros((starts.numel(), rows.shape[1]))
    return torch.nn.functional.embedding_bag(index, rows, starts, mode="sum", per_sample_weights=weights)


@dataclass
class PairState:
    """What dispatch leaves for combine in ``PairExchange``."""

    x_NH: torch.Tensor
    counts: torch.Tensor  # [local experts]
    back: torch.Tensor | None  # [N] row of y that goes to each received row's place; None: same order
    send_rows: list[int]
    recv_rows: list[int]
    bag_index: torch.Tensor  # [pairs] each kept pair's place among the sent rows, in (token, k) order
    bag_starts: torch.Tensor  # [T]
    kept: torch.Tensor | None  # [T*K] bool; None: nothing dropped


class PairExchange:
    """One row per (token, expert) pair."""

    variant = "pair"

    def __init__(self, comm: Comm, *, rank: int, world_size: int, num_experts: int) -> None:
        self.comm = comm
        self.name = f"{comm.name}-{self.variant}"
        self._rank, self._world_size, self._num_experts = rank, world_size, num_experts
        self._starts = expert_starts(num_experts, world_size)
        sizes = [b - a for a, b in itertools.pairwise(self._starts)]
        self._num_local = sizes[rank]
        # Ranks with fewer experts than the others send and receive a zero for the one they don't have.
        self._num_slots = max(max(sizes), 1)
        self._even = min(sizes) == max(sizes)
        self._slot_of_expert = torch.cat(
            [torch.arange(n) + r * self._num_slots for r, n in enumerate(sizes)],
        )

    def dispatch(self, x_TH: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> PairState:
        num_tokens, top_k = topk_idx.shape
        ids = topk_idx.reshape(-1)
        order = torch.argsort(ids, stable=True)
        counts = torch.bincount(ids + 1, minlength=self._num_experts + 1)  # dropped ones (-1) in front
        send_E = counts[1:]
        if self._even:
            send_RL = send_E.view(self._world_size, self._num_slots)
        else:
            padded = send_E.new_zeros(self._world_size * self._num_slots)
            padded[self._slot_of_expert] = send_E
            send_RL = padded.view(self._world_size, self._num_slots)
        recv_RL = self.comm.exchange_counts(send_RL)
        send_rows: list[int] = send_RL.sum(1).tolist()
        recv_rows: list[int] = recv_RL.sum(1).tolist()

        dropped = ids.numel() - sum(send_rows)
        order = order[dropped:]
        send = x_TH.index_select(0, torch.div(order, top_k, rounding_mode="floor"))
        recv = self.comm.exchange_rows(send, send_rows, recv_rows)

        back: torch.Tensor | None = None
        x_NH = recv
        if self._num_slots > 1 and self._world_size > 1:
            # Chunks lie in (source, expert) order and are wanted in (expert, source) order.
            lengths = rearrange(recv_RL, "r l -> (l r)")
            begins = rearrange(exclusive_cumsum(recv_RL.view(-1)).view_as(recv_RL), "r l -> (l r)")
            row_of = torch.repeat_interleave(begins - exclusive_cumsum(lengths), lengths)
            row_of += torch.arange(row_of.numel())
            x_NH = recv.index_select(0, row_of)
            back = inverse_permutation(row_of)

        kept: torch.Tensor | None = None
        if dropped == 0:
            bag_index = inverse_permutation(order)
            bag_starts = torch.arange(0, num_tokens * top_k, top_k)
        else:
            kept = ids >= 0
            where = torch.empty_like(ids)
            where[order] = torch.arange(order.numel())
            bag_index = where[kept]
            bag_starts = exclusive_cumsum(kept.view(num_tokens, top_k).sum(1))
        counts_local = recv_RL[:, : self._num_local].sum(0)
        return PairState(x_NH, counts_local, back, send_rows, recv_rows, bag_index, bag_starts, kept)

    def combine(self, y_NH: torch.Tensor, state: PairState, topk_weights: torch.Tensor) -> torch.Tensor:
        send = y_NH if state.back is None else y_NH.index_select(0, state.back)
        rows = self.comm.exchange_rows(send, state.recv_rows, state.send_rows)
        weights = topk_weights.to(y_NH.dtype).view(-1)
        if state.kept is not None:
            weights = weights[state.kept]
        return weighted_bags(rows, state.bag_index, state.bag_starts, weights)


@dataclass
class PackedState:
    """What dispatch leaves for combine in ``PackedExchange``."""

    x_NH: torch.Tensor
    counts: torch.Tensor  # [local experts]
    send_rows: list[int]
    recv_rows: list[int]
    expert_index: torch.Tensor  # [N] where each received (message, k) lies in x_NH, in (message, k) order
    expert_starts: torch.Tensor  # [P]
    expert_weights: torch.Tensor  # [N]
    rank_index: torch.Tensor  # [M] the messages of each token
    rank_starts: torch.Tensor  # [T]


class PackedExchange:
    """One message per (token, rank) pair: row, ids, weights as bytes; one summed row per message returns."""

    variant = "packed"

    def __init__(self, comm: Comm, *, rank: int, world_size: int, num_experts: int) -> None:
        self.comm = comm
        self.name = f"{comm.name}-{self.variant}"
        self._world_size = world_size
        starts = expert_starts(num_experts, world_size)
        self._first, self._num_local = starts[rank], starts[rank + 1] - starts[rank]
        # Index -1 (dropped) reads the last entry, a rank that doesn't exist.
        self._owner = torch.tensor(
            [r for r in range(world_size) for _ in range(starts[r], starts[r + 1])] + [world_size]
        )

    def dispatch(self, x_TH: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> PackedState:
        num_tokens, hidden = x_TH.shape
        top_k = topk_idx.shape[1]
        dtype = x_TH.dtype
        wanted_TR = torch.zeros((num_tokens, self._world_size + 1), dtype=torch.bool)
        wanted_TR = wanted_TR.scatter_(1, self._owner[topk_idx], True)[:, : self._world_size]
        wanted_RT = wanted_TR.t().contiguous()
        send_R = wanted_RT.sum(1)
        recv_R = self.comm.exchange_counts(send_R.view(-1, 1))
        send_rows: list[int] = send_R.tolist()
        recv_rows: list[int] = recv_R.view(-1).tolist()

        # int32 ids and weights in the row's dtype, behind the row; 16 bits is the unit because the row's
        # dtype is.
        ids16 = topk_idx.to(torch.int32).view(dtype)
        packed_TW = torch.cat([x_TH, ids16, topk_weights.to(dtype)], 1)
        token_M = wanted_RT.nonzero()[:, 1]
        recv_PW = self.comm.exchange_rows(packed_TW.index_select(0, token_M), send_rows, recv_rows)

        id_width = ids16.shape[1]
        ids_PK = recv_PW[:, hidden : hidden + id_width].contiguous().view(torch.int32).to(torch.int64)
        local_PK = ids_PK - self._first
        mine_PK = (local_PK >= 0) & (local_PK < self._num_local)
        pair = mine_PK.view(-1).nonzero().view(-1)
        expert = local_PK.view(-1)[pair]
        order = torch.argsort(expert, stable=True)
        message = torch.div(pair[order], top_k, rounding_mode="floor")
        x_NH = recv_PW[:, :hidden].index_select(0, message)
        weights = recv_PW[:, hidden + id_width :].contiguous().view(-1)[pair]

        place_TR = (wanted_RT.view(-1).cumsum(0) - 1).view_as(wanted_RT).t()
        return PackedState(
            x_NH,
            torch.bincount(expert, minlength=self._num_local),
            send_rows,
            recv_rows,
            inverse_permutation(order),
            exclusive_cumsum(mine_PK.sum(1)),
            weights,
            place_TR[wanted_TR],
            exclusive_cumsum(wanted_TR.sum(1)),
        )

    def combine(self, y_NH: torch.Tensor, state: PackedState, topk_weights: torch.Tensor) -> torch.Tensor:
        summed_PH = weighted_bags(y_NH, state.expert_index, state.expert_starts, state.expert_weights)
        rows_MH = self.comm.exchange_rows(summed_PH, state.recv_rows, state.send_rows)
        return weighted_bags(rows_MH, state.rank_index, state.rank_starts, None)


class BareMpi:
    """Counts, rows and rows back between preallocated buffers: MPI's part of ``PairExchange`` and nothing
    else.

    The rows to send are already sorted by expert, and what comes back is left in that order. With
    ``copy_own``, rows that stay on their rank are copied by numpy, which MPI does more slowly from some
    size on.
    """

    def __init__(self, comm: MPI.Comm, *, copy_own: bool, max_send_bytes: int, max_recv_bytes: int) -> None:
        from mpi4py import MPI

        self.name = "mpi-bare-copy" if copy_own else "mpi-bare"
        self._comm, self._rank, self._byte, self._copy_own = comm, comm.Get_rank(), MPI.BYTE, copy_own
        # Filled, so that no page is touched for the first time while the clock runs.
        self._room, self.returned = (np.full(max_send_bytes, 0, np.uint8) for _ in range(2))
        self.recv, self.reply = (np.full(max_recv_bytes, 0, np.uint8) for _ in range(2))
        self._row_bytes = 0
        self._send = self._room[:0]
        self._send_RL = self._recv_RL = np.zeros((0, 0), np.int64)
        self._send_rows: list[int] = []
        self._recv_rows: list[int] = []

    def load(self, send: torch.Tensor, send_RL: torch.Tensor) -> None:
        """Not timed. ``send`` [pairs, H]: rows sorted by expert; ``send_RL``: how many for each expert."""
        self._row_bytes = send.shape[1] * send.element_size()
        self._send = self._room[: send.numel() * send.element_size()]
        self._send[:] = send.view(torch.uint8).numpy().reshape(-1)
        self._send_RL = send_RL.numpy()
        self._recv_RL = np.zeros_like(self._send_RL)

    def dispatch(self) -> None:
        self._comm.Alltoall(self._send_RL, self._recv_RL)
        self._send_rows = self._send_RL.sum(1).tolist()
        self._recv_rows = self._recv_RL.sum(1).tolist()
        self._move(self._send, self._send_rows, self.recv, self._recv_rows)

    def combine(self) -> None:
        self._move(self.reply, self._recv_rows, self.returned, self._send_rows)

    def _move(self, send: Bytes, send_rows: list[int], recv: Bytes, recv_rows: list[int]) -> None:
        if not self._copy_own:
            self._comm.Alltoallv(
                [send, [n * self._row_bytes for n in send_rows], self._byte],
                [recv, [n * self._row_bytes for n in recv_rows], self._byte],
            )
            return
        send_counts, send_places = peer_blocks(send_rows, self._rank, self._row_bytes)
        recv_counts, recv_places = peer_blocks(recv_rows, self._rank, self._row_bytes)
        own = send_rows[self._rank] * self._row_bytes
        first_send, first_recv = send_places[self._rank], recv_places[self._rank]
        recv[first_recv : first_recv + own] = send[first_send : first_send + own]
        self._comm.Alltoallv(
            [send, send_counts, send_places, self._byte],
            [recv, recv_counts, recv_places, self._byte],
        )

    @property
    def recv_bytes(self) -> int:
        return sum(self._recv_rows) * self._row_bytes
