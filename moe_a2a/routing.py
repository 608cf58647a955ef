"""Routing: how many rows this rank sends to each expert, and where each of its pairs stands among them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _ops  # noqa: F401  registers the operators
from .op_host import native

_send_counts = torch.ops.moe_a2a.send_counts.default


def send_counts(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Counts this rank's pairs by expert (a counting sort, without the sort). Local: no communication.

    Args:
        topk_idx: [T, K] int32 or int64, any strides; expert ids, -1 for no expert.
        num_experts: E.

    Returns:
        counts: [E] int64, pairs of each expert.
        slot: [T, K] int32, how many earlier pairs, in (token, k) order, have the same expert; -1 where dropped. So
        ``cumsum(counts)[e - 1] + slot`` is a pair's place in the order by expert.

    Raises:
        BadType: topk_idx isn't int32 or int64. BadValue: wrong shape, or an id outside -1..E-1 (named).

    >>> counts, slot = send_counts(torch.tensor([[1, 3], [3, -1], [1, 1]]), 4)
    >>> counts.tolist(), slot.tolist()
    ([0, 3, 0, 2], [[0, 0], [1, -1], [1, 2]])
    """
    try:
        return _send_counts(topk_idx, num_experts)  # type: ignore[no-any-return]
    except (RuntimeError, TypeError, NotImplementedError) as error:
        kind = f"topk_idx is a {type(topk_idx).__name__}" if not isinstance(topk_idx, Tensor) else str(error)
        native.raise_failure(error, f"moe_a2a.send_counts: {kind}; expected an integer torch.Tensor [T, K]")
