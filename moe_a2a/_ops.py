"""Operator schemas, fakes and autograd; nothing else.

Two levels. ``dispatch`` and ``combine`` are the operators for models: functional, with fakes, known to autograd. The ``_raw``
ones are what they and the Python functions call: C++, no autograd key, as little as possible around the kernel.
``send_counts`` is one operator for both.

A group is passed as its name, a string, so that a graph that holds the call can be kept, printed and cached.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .errors import BadValue
from .group import find_group
from .op_host import native  # noqa: F401  loads the C++ kernels
from .op_host.layout import CODE_DTYPES, handle_words
from .op_host.quant import QUANT_DTYPES, QUANT_NAMES, scales_shape

LIB = torch.library.Library("moe_a2a", "DEF")

LIB.define("send_counts(Tensor topk_idx, int num_experts) -> (Tensor counts, Tensor slot)")
LIB.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor? topk_weights, str group, int tag=0, SymInt pad_to=-1, int align=1)"
    " -> (Tensor x, Tensor counts, Tensor offsets, Tensor weights, Tensor handle)"
)
LIB.define(
    "dispatch_full(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor? routing, str group, int tag=0, SymInt pad_to=-1,"
    " int align=1, int quant=0)"
    " -> (Tensor x, Tensor counts, Tensor offsets, Tensor weights, Tensor scales, Tensor handle)"
)
LIB.define("combine(Tensor y, Tensor handle, Tensor? topk_weights, SymInt num_tokens, str group) -> Tensor")
LIB.define(
    "dispatch_raw(Tensor x, Tensor topk_idx, Tensor? topk_weights, str group, int tag=0, SymInt pad_to=-1, int align=1)"
    " -> (Tensor x, Tensor weights, Tensor handle)"
)
LIB.define(
    "dispatch_full_raw(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor? routing, str group, int tag, SymInt pad_to,"
    " int align, int quant) -> (Tensor x, Tensor weights, Tensor scales, Tensor handle)"
)
LIB.define(
    "dispatch_begin_raw(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor? routing, str group, int tag, SymInt pad_to,"
    " int align, int quant) -> Tensor"
)
LIB.define(
    "dispatch_wait_raw(Tensor ticket, str group) -> (Tensor x, Tensor weights, Tensor scales, Tensor handle)"
)
LIB.define("combine_begin_raw(Tensor y, Tensor handle, str group) -> Tensor")
LIB.define("combine_wait_raw(Tensor ticket, Tensor? topk_weights, str group) -> Tensor")
LIB.define("combine_raw(Tensor y, Tensor handle, Tensor? topk_weights, str group) -> Tensor")
LIB.define("quantize_rows(Tensor x, str quantize) -> (Tensor q, Tensor scales)")
LIB.define("window_x(int num_tokens, int hidden, int dtype_code, str group) -> Tensor")
LIB.define("window_y(Tensor handle, int hidden, int dtype_code, str group) -> Tensor")


# ------------------------------------------------------------------------------------------------------------------ fakes


def _new_rows() -> Any:
    """N, which only the run knows."""
    return torch.library.get_ctx().new_dynamic_size()


def _handle_size(topk_idx: Tensor, group_name: str) -> Any:
    group = find_group(group_name)
    return handle_words(
        num_tokens=topk_idx.shape[0],
        top_k=topk_idx.shape[1],
        world_size=group.world_size,
        num_experts=group.num_experts,
        local_experts=group.num_local_experts,
    )[-1]


def _no_mixture(**arguments: Tensor | None) -> None:
    """A fake also answers calls in which one real tensor is on the meta device; that would be no call at all."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, FakeTensor) and value.device.type != "meta":
            raise RuntimeError(f"{name} is a tensor on {value.device}, others are on the meta device")


@torch.library.register_fake("moe_a2a::send_counts", lib=LIB)
def _(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return topk_idx.new_empty(num_experts, dtype=torch.int64), topk_idx.new_empty(
        topk_idx.shape, dtype=torch.int32
    )


def _fake_dispatch(
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing: Tensor | None,
    group: str,
    pad_to: int,
    quant: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, weights, scales, handle) as every kind of dispatch returns them."""
    _no_mixture(x=x, topk_idx=topk_idx, topk_weights=topk_weights, routing=routing)
    if (topk_idx is None) == (routing is None):
        raise RuntimeError("dispatch takes one of topk_idx and routing")
    rows = _new_rows() if pad_to == -1 else pad_to
    name = QUANT_NAMES.get(quant)
    scales = (0,) if name is None else scales_shape(name, rows, x.shape[1])
    words = _handle_size(topk_idx, group) if topk_idx is not None else routing.shape[0]  # type: ignore[union-attr]
    return (
        x.new_empty(rows, x.shape[1], dtype=x.dtype if name is None else QUANT_DTYPES[name]),
        x.new_empty(0, dtype=torch.float32) if topk_weights is None else topk_weights.new_empty(rows),
        x.new_empty(scales, dtype=torch.float32),
        x.new_empty(words, dtype=torch.int64),
    )


def _fake_counts(x: Tensor, group: str) -> tuple[Tensor, Tensor]:
    local = find_group(group).num_local_experts
    return x.new_empty(local, dtype=torch.int64), x.new_empty(local + 1, dtype=torch.int32)


@torch.library.register_fake("moe_a2a::dispatch_raw", lib=LIB)
def _(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    group: str,
    tag: int = 0,
    pad_to: int = -1,
    align: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, weights, _, handle = _fake_dispatch(x, topk_idx, topk_weights, None, group, pad_to)
    return rows, weights, handle


@torch.library.register_fake("moe_a2a::dispatch_full_raw", lib=LIB)
def _(
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing: Tensor | None,
    group: str,
    tag: int,
    pad_to: int,
    align: int,
    quant: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_dispatch(x, topk_idx, topk_weights, routing, group, pad_to, quant)


@torch.library.register_fake("moe_a2a::dispatch", lib=LIB)
def _(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    group: str,
    tag: int = 0,
    pad_to: int = -1,
    align: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, weights, _, handle = _fake_dispatch(x, topk_idx, topk_weights, None, group, pad_to)
    return rows, *_fake_counts(x, group), weights, handle


@torch.library.register_fake("moe_a2a::dispatch_full", lib=LIB)
def _(
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    routing: Tensor | None,
    group: str,
    tag: int = 0,
    pad_to: int = -1,
    align: int = 1,
    quant: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, weights, scales, handle = _fake_dispatch(x, topk_idx, topk_weights, routing, group, pad_to, quant)
    return rows, *_fake_counts(x, group), weights, scales, handle


def _no_trace(operation: str) -> Any:
    def fake(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"moe_a2a.{operation}: an asynchronous call can't be traced: what it returns depends on when it is waited for. "
            "Leave async_op out inside torch.compile"
        )

    return fake


for _operation in ("dispatch_begin_raw", "dispatch_wait_raw", "combine_begin_raw", "combine_wait_raw"):
    torch.library.register_fake(f"moe_a2a::{_operation}", _no_trace(_operation.split("_")[0]), lib=LIB)


@torch.library.register_fake("moe_a2a::combine", lib=LIB)
def _(y: Tensor, handle: Tensor, topk_weights: Tensor | None, num_tokens: int, group: str) -> Tensor:
    _no_mixture(y=y, handle=handle, topk_weights=topk_weights)
    return y.new_empty(num_tokens, y.shape[1])


@torch.library.register_fake("moe_a2a::combine_raw", lib=LIB)
def _(y: Tensor, handle: Tensor, topk_weights: Tensor | None, group: str) -> Tensor:
    _no_mixture(y=y, handle=handle, topk_weights=topk_weights)
    return y.new_empty(_new_rows() if topk_weights is None else topk_weights.shape[0], y.shape[1])


@torch.library.register_fake("moe_a2a::quantize_rows", lib=LIB)
def _(x: Tensor, quantize: str) -> tuple[Tensor, Tensor]:
    if quantize not in QUANT_DTYPES:
        raise BadValue(
            f'moe_a2a.quantize_rows: quantize = "{quantize}"; expected {" or ".join(map(repr, QUANT_DTYPES))}'
        )
    q = x.new_empty(x.shape, dtype=QUANT_DTYPES[quantize])
    return q, x.new_empty(scales_shape(quantize, *x.shape), dtype=torch.float32)


@torch.library.register_fake("moe_a2a::window_x", lib=LIB)
def _(num_tokens: int, hidden: int, dtype_code: int, group: str) -> Tensor:
    stride = find_group(group).layout.row_stride(hidden, CODE_DTYPES[dtype_code].itemsize)
    return torch.empty_strided(
        (num_tokens, hidden), (stride // CODE_DTYPES[dtype_code].itemsize, 1), dtype=CODE_DTYPES[dtype_code]
    )


@torch.library.register_fake("moe_a2a::window_y", lib=LIB)
def _(handle: Tensor, hidden: int, dtype_code: int, group: str) -> Tensor:
    stride = find_group(group).layout.row_stride(hidden, CODE_DTYPES[dtype_code].itemsize)
    return handle.new_empty_strided(
        (_new_rows(), hidden), (stride // CODE_DTYPES[dtype_code].itemsize, 1), dtype=CODE_DTYPES[dtype_code]
    )


# --------------------------------------------------------------------------------------------------------------- autograd


def _no_backward(operation: str) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f"moe_a2a.{operation}: this version computes no gradients through {operation}; run it under torch.no_grad(), "
            "or detach its inputs"
        )

    return backward


# Without a formula autograd would return outputs that look like constants and lose the gradient without a word.
for _operation in ("dispatch", "dispatch_full", "combine", "quantize_rows"):
    torch.library.register_autograd(f"moe_a2a::{_operation}", _no_backward(_operation), lib=LIB)
