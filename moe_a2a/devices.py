"""The operators on devices: calls of a group whose kernels are Triton's, reached by torch's dispatcher.

The CPU's are C++ (``op_host/cpu/bindings.cpp``). Here are those of tensors on "CUDA" (which is AMD's key, too) and
"PrivateUse1" (an NPU's): the same schemas, results and errors.

Shape symbols: T tokens, H hidden, E experts, K top-k, N received rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _ops, exchange
from .errors import BadType
from .group import find_group
from .op_host.triton.routing import sort_pairs
from .reference import Exchange, check_ids

KEYS = ("CUDA", "PrivateUse1")


def _exchange_of(group: str, operation: str) -> Exchange:
    """What makes the calls of a group of Triton ranks."""
    owner = find_group(group)
    if owner._exchange is None:
        raise BadType(
            f"{operation}: the tensors are on a device, and the kernels of group {group} on rank {owner.rank} take tensors on "
            "the CPU; move them with .cpu(), or make a group with kernels = 'triton' for the device"
        )
    return owner._exchange


def dispatch_raw(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    group: str,
    tag: int = 0,
    pad_to: int = -1,
    align: int = 1,
    gradients: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    made = _exchange_of(group, "moe_a2a.dispatch")
    rows, weights, _, meta = made.dispatch(x, topk_idx, topk_weights, None, tag, pad_to, align, 0, gradients)
    return rows, weights, meta


def dispatch_full_raw(
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing: Tensor | None,
    group: str,
    tag: int,
    pad_to: int,
    align: int,
    quant: int,
    gradients: int = 0,
    backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = _exchange_of(group, "moe_a2a.dispatch")
    return made.dispatch(x, topk_idx, topk_weights, routing, tag, pad_to, align, quant, gradients)


def combine_raw(y: Tensor, handle: Tensor, topk_weights: Tensor | None, group: str) -> Tensor:
    return _exchange_of(group, "moe_a2a.combine").combine(y, handle, topk_weights)


def combine_pairs_raw(y: Tensor, handle: Tensor, group: str) -> Tensor:
    return _exchange_of(group, "moe_a2a.combine").combine(y, handle, None, True)


def combine_again_raw(y: Tensor, routing: Tensor, group: str, tag: int, pairs: bool) -> Tensor:
    return _exchange_of(group, "moe_a2a (backward)").combine_again(y, routing, tag, pairs)


def send_counts(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """:func:`moe_a2a.send_counts`; waits for the device, since it checks the ids."""
    check_ids("moe_a2a.send_counts", topk_idx, num_experts, 0)
    pairs = sort_pairs(topk_idx, num_experts)
    slot_TK = pairs.place_TK - pairs.start_E[pairs.expert_TK.long().clamp(min=0)]
    return pairs.counts_E, torch.where(pairs.expert_TK < 0, -1, slot_TK).int()


OPERATORS: dict[str, Callable[..., Any]] = {
    "dispatch_raw": dispatch_raw,
    "dispatch_full_raw": dispatch_full_raw,
    "combine_raw": combine_raw,
    "combine_pairs_raw": combine_pairs_raw,
    "combine_again_raw": combine_again_raw,
    "send_counts": send_counts,
    "dispatch": exchange._dispatch_impl,
    "dispatch_full": exchange._dispatch_full_impl,
    "combine": exchange._combine_impl,
}

for _key in KEYS:
    for _name, _operator in OPERATORS.items():
        _ops.LIB.impl(_name, _operator, _key)
