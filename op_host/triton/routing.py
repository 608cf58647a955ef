"""Routing of a Triton rank, in torch on the tensors' own device: what is where, and the lists of work that kernels walk.

Until a call's send-count matrix is known, no size depends on the routing, so nothing waits for the device.

Shape symbols: T tokens, E experts, K top-k, R ranks, P = T * K pairs of this rank, dropped ones included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import expert_ranges

HOST = torch.device("cpu")  # said always: callers may have set another default


@dataclass(frozen=True)
class Pairs:
    """A rank's pairs (token, k), sorted by expert.

    Attributes:
        expert_TK: int32, the expert of each pair, -1 where dropped.
        counts_E: int64, pairs of each expert.
        start_E: int64, pairs of smaller experts: where an expert's pairs begin in the list.
        order_P: int64, the list: pairs ``t * K + k`` in (expert, token, k) order; dropped ones stand at the end.
        place_TK: int64, where each pair stands in the list.
    """

    expert_TK: Tensor
    counts_E: Tensor
    start_E: Tensor
    order_P: Tensor
    place_TK: Tensor

    @property
    def token_P(self) -> Tensor:
        """int64, the list's tokens."""
        return self.order_P // max(self.expert_TK.shape[1], 1)


def sort_pairs(topk_idx: Tensor, num_experts: int) -> Pairs:
    """Sorts [T, K] ids, all in -1..E-1.

    >>> pairs = sort_pairs(torch.tensor([[2, 0], [-1, 2]]), 3)
    >>> pairs.counts_E.tolist(), pairs.order_P.tolist(), pairs.place_TK.tolist()
    ([1, 0, 2], [1, 0, 3, 2], [[1, 0], [3, 2]])
    """
    expert_P = topk_idx.reshape(-1).long()
    sortable_P = torch.where(expert_P < 0, num_experts, expert_P)
    order_P = sortable_P.argsort(stable=True)
    # Not bincount, which waits for the device.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_P.device)
    counts.scatter_add_(0, sortable_P, torch.ones_like(sortable_P))
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    counts_E = counts[:num_experts].clone()
    return Pairs(
        topk_idx.to(torch.int32, copy=True).contiguous(),
        counts_E,
        counts_E.cumsum(0) - counts_E,
        order_P,
        place_P.view(topk_idx.shape),
    )


@dataclass(frozen=True)
class Places:
    """Where the rows of a call stand at their owners; follows from the send-count matrix alone.

    Attributes:
        counts_RE: int64, the send-count matrix.
        first_RE: int64, the final row of the first pair of a source for an expert, at the expert's owner.
        totals_R: rows of each owner, padding included.
    """

    counts_RE: Tensor
    first_RE: Tensor
    totals_R: list[int]


@dataclass(frozen=True)
class Runs:
    """Pieces of the runs of (source, expert): rows that follow each other in the list and at their owner. M pieces.

    Attributes:
        source_M, expert_M, owner_M: int64.
        place_M: int64, the first row's place in the source's list.
        row_M: int64, its final row at the owner, in a wave counted from the wave's first.
        count_M: int64, rows.
        flag_M: int64, the row whose flag says that these rows are there.
    """

    source_M: Tensor
    expert_M: Tensor
    owner_M: Tensor
    place_M: Tensor
    row_M: Tensor
    count_M: Tensor
    flag_M: Tensor

    def __len__(self) -> int:
        return len(self.row_M)

    def of(self, keep_M: Tensor) -> Runs:
        """Those for which ``keep_M`` is true."""
        return Runs(*(getattr(self, name)[keep_M] for name in Runs.__dataclass_fields__))


class Geometry:
    """Experts and owners of a group, and what follows from them for a matrix. On the CPU, where the host decides."""

    def __init__(self, num_experts: int, world_size: int) -> None:
        self.ranges = expert_ranges(num_experts, world_size)
        self.owner_E = torch.tensor(
            [rank for rank, owned in enumerate(self.ranges) for _ in owned], dtype=torch.int64, device=HOST
        )
        self._first_of_owner_E = torch.tensor(
            [owned.start for owned in self.ranges for _ in owned], dtype=torch.int64, device=HOST
        )

    def places(self, counts_RE: Tensor, align: int) -> Places:
        """Final rows, each expert's rows padded to a multiple of ``align``.

        >>> places = Geometry(3, 2).places(torch.tensor([[1, 2, 1], [3, 0, 1]]), 4)
        >>> places.first_RE.tolist(), places.totals_R
        ([[0, 4, 0], [1, 6, 1]], [8, 4])
        """
        counts_RE = counts_RE.long()
        padded_E = (counts_RE.sum(0) + align - 1).div(align, rounding_mode="floor") * align
        before_E = padded_E.cumsum(0) - padded_E
        base_E = before_E - before_E[self._first_of_owner_E]
        totals_R = [int(padded_E[owned.start : owned.stop].sum()) for owned in self.ranges]
        return Places(counts_RE, base_E + counts_RE.cumsum(0) - counts_RE, totals_R)

    def runs(
        self, places: Places, cap: int | None, wave: int, flag_rows_R: Sequence[int], most: int | None = None
    ) -> Runs:
        """All pieces of a wave, by (expert, source).

        Args:
            cap: rows of a wave; None when all rows go at once.
            flag_rows_R: rows that share a flag, by source; 0 for all of a run.
            most: the most rows of a piece; a flag may then be that of several pieces.

        >>> geometry = Geometry(2, 2)
        >>> runs = geometry.runs(geometry.places(torch.tensor([[5, 0], [1, 0]]), 1), None, 0, [2, 0])
        >>> runs.row_M.tolist(), runs.count_M.tolist(), runs.flag_M.tolist(), runs.place_M.tolist()
        ([0, 2, 4, 5], [2, 2, 1, 1], [1, 3, 4, 5], [0, 2, 4, 0])
        """
        counts_RE, first_RE = places.counts_RE, places.first_RE
        start_RE = counts_RE.cumsum(1) - counts_RE
        lo_RE, hi_RE = first_RE, first_RE + counts_RE
        if cap is not None:
            lo_RE, hi_RE = lo_RE.clamp(min=wave * cap), hi_RE.clamp(max=(wave + 1) * cap)
        expert_N, source_N = (hi_RE > lo_RE).t().nonzero(as_tuple=True)
        at = source_N, expert_N
        lo_N, length_N = lo_RE[at], (hi_RE - lo_RE)[at]
        group_N = torch.tensor(list(flag_rows_R), device=HOST)[source_N]
        group_N = torch.where(group_N > 0, group_N, length_N)
        piece_N = group_N if most is None else group_N.clamp(max=most)
        # Pieces don't cross the borders of groups.
        pieces_of_group_N = (group_N + piece_N - 1).div(piece_N.clamp(min=1), rounding_mode="floor")
        full_N = length_N.div(group_N.clamp(min=1), rounding_mode="floor")
        rest_N = length_N - full_N * group_N
        pieces_N = full_N * pieces_of_group_N + (rest_N + piece_N - 1).div(
            piece_N.clamp(min=1), rounding_mode="floor"
        )
        run_M = torch.arange(len(lo_N), device=HOST).repeat_interleave(pieces_N)
        number_M = torch.arange(len(run_M), device=HOST) - (pieces_N.cumsum(0) - pieces_N)[run_M]
        per_M = pieces_of_group_N[run_M]
        group_M = number_M.div(per_M, rounding_mode="floor")
        in_group_M = (number_M - group_M * per_M) * piece_N[run_M]
        begin_M = group_M * group_N[run_M] + in_group_M
        group_end_M = torch.minimum((group_M + 1) * group_N[run_M], length_N[run_M])
        count_M = torch.minimum(begin_M + piece_N[run_M], group_end_M) - begin_M
        shift = 0 if cap is None else wave * cap
        first_M = lo_N[run_M] - shift
        place_N = start_RE[at] + lo_N - first_RE[at]
        return Runs(
            source_N[run_M],
            expert_N[run_M],
            self.owner_E[expert_N[run_M]],
            place_N[run_M] + begin_M,
            first_M + begin_M,
            count_M,
            first_M + group_end_M - 1,
        )


def rows_of(first_M: Tensor, count_M: Tensor) -> Tensor:
    """The numbers of all rows of pieces, one after the other.

    >>> rows_of(torch.tensor([4, 0]), torch.tensor([2, 3])).tolist()
    [4, 5, 0, 1, 2]
    """
    before_M = count_M.cumsum(0) - count_M
    return (first_M - before_M).repeat_interleave(count_M) + torch.arange(int(count_M.sum()), device=HOST)
