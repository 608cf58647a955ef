"""Operator schemas, fakes and autograd; nothing else.

Two levels. ``dispatch`` and ``combine`` are the operators for models: functional, with fakes, known to autograd. The ``_raw``
ones are what they and the Python functions call: C++, no autograd key, as little as possible around the kernel.
``send_counts`` is one operator for both.

A group is passed as its name, a string, so that a graph that holds the call can be kept, printed and cached.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from .compiled import order_in_inductor
from .errors import BadValue
from .group import find_group
from .op_host import native  # loads the C++ kernels
from .op_host.experts import Spec
from .op_host.layout import CODE_DTYPES, handle_words, routing_digest
from .op_host.quant import QUANT_DTYPES, QUANT_NAMES, scales_shape

R_ = TypeVar("R_")

LIB = torch.library.Library("moe_a2a", "DEF")

LIB.define("send_counts(Tensor topk_idx, int num_experts) -> (Tensor counts, Tensor slot)")
LIB.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor? topk_weights, str group, int tag=0, SymInt pad_to=-1, int align=1,"
    " int gradients=-1) -> (Tensor x, Tensor counts, Tensor offsets, Tensor weights, Tensor handle)"
)
LIB.define(
    "dispatch_full(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor? routing, str group, int tag=0, SymInt pad_to=-1,"
    " int align=1, int quant=0, int gradients=-1, Tensor? ledger=None, Tensor? anchor=None)"
    " -> (Tensor x, Tensor counts, Tensor offsets, Tensor weights, Tensor scales, Tensor handle)"
)
LIB.define(
    "combine(Tensor y, Tensor handle, Tensor? topk_weights, SymInt num_tokens, str group, Tensor? ledger=None,"
    " Tensor? anchor=None) -> Tensor"
)
LIB.define("witness(Tensor ledger, Tensor result) -> Tensor")
LIB.define(
    "dispatch_raw(Tensor x, Tensor topk_idx, Tensor? topk_weights, str group, int tag=0, SymInt pad_to=-1, int align=1,"
    " int gradients=0) -> (Tensor x, Tensor weights, Tensor handle)"
)
LIB.define(
    "dispatch_full_raw(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor? routing, str group, int tag, SymInt pad_to,"
    " int align, int quant, int gradients=0, bool backward=False) -> (Tensor x, Tensor weights, Tensor scales, Tensor handle)"
)
LIB.define(
    "dispatch_begin_raw(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor? routing, str group, int tag, SymInt pad_to,"
    " int align, int quant, int gradients=0) -> Tensor"
)
LIB.define(
    "dispatch_wait_raw(Tensor ticket, str group) -> (Tensor x, Tensor weights, Tensor scales, Tensor handle)"
)
LIB.define("combine_begin_raw(Tensor y, Tensor handle, str group) -> Tensor")
LIB.define("combine_wait_raw(Tensor ticket, Tensor? topk_weights, str group) -> Tensor")
LIB.define("combine_raw(Tensor y, Tensor handle, Tensor? topk_weights, str group) -> Tensor")
LIB.define("combine_pairs_raw(Tensor y, Tensor handle, str group) -> Tensor")
LIB.define("combine_again_raw(Tensor y, Tensor routing, str group, int tag, bool pairs) -> Tensor")
_EXPERTS = "Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, int spec, float limit, float alpha"
LIB.define(
    f"moe(Tensor x, Tensor topk_idx, Tensor? topk_weights, {_EXPERTS}, str group, int tag=0, int gradients=-1,"
    " bool keep=False, Tensor? ledger=None, Tensor? anchor=None) -> (Tensor out, Tensor rows, Tensor hidden, Tensor handle)"
)
LIB.define(
    f"moe_raw(Tensor x, Tensor topk_idx, Tensor? topk_weights, {_EXPERTS}, str group, int tag, int gradients, bool keep)"
    " -> (Tensor out, Tensor rows, Tensor hidden, Tensor handle)"
)
LIB.define(
    "moe_begin_raw(Tensor x, Tensor topk_idx, Tensor? topk_weights, str group, int tag, int gradients)"
    " -> (Tensor rows, Tensor handle)"
)
LIB.define("moe_next_raw(Tensor handle, str group) -> int")
LIB.define(
    f"moe_finish_raw(Tensor rows, Tensor handle, Tensor? topk_weights, {_EXPERTS}, str group, bool keep)"
    " -> (Tensor out, Tensor rows, Tensor hidden)"
)
LIB.define(f"experts_raw(Tensor rows, Tensor offsets, {_EXPERTS}, bool keep) -> (Tensor y, Tensor hidden)")
LIB.define(
    f"experts_backward_raw(Tensor grads, Tensor? weights, Tensor rows, Tensor hidden, Tensor offsets, {_EXPERTS},"
    " Tensor(a!) back, int needs) -> (Tensor weights, Tensor up, Tensor down, Tensor up_bias, Tensor down_bias)"
)
LIB.define(
    "activation_backward_raw(Tensor hidden, Tensor grad, int spec, float limit, float alpha) -> (Tensor out, Tensor grad)"
)
LIB.define(
    "dispatch_backward(Tensor grad_rows, Tensor? grad_weights, Tensor handle, SymInt num_tokens, SymInt top_k, str group,"
    " int tag) -> (Tensor grad_x, Tensor grad_weights, Tensor anchor)"
)
LIB.define(
    "combine_backward(Tensor grad_out, Tensor? y, Tensor? topk_weights, Tensor handle, SymInt num_rows, str group)"
    " -> (Tensor grad_y, Tensor grad_weights, Tensor anchor)"
)
LIB.define(
    f"moe_backward(Tensor grad_out, Tensor? x, Tensor? topk_weights, {_EXPERTS}, Tensor rows, Tensor hidden, Tensor handle,"
    " str group, int tag, bool[5] needs) -> (Tensor x, Tensor topk_weights, Tensor up, Tensor down, Tensor up_bias,"
    " Tensor down_bias, Tensor anchor)"
)
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
    order_in_inductor()
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
    gradients: int = 0,
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
    gradients: int = 0,
    backward: bool = False,
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
    gradients: int = -1,
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
    gradients: int = -1,
    ledger: Tensor | None = None,
    anchor: Tensor | None = None,
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
# Parts of a call: rows of the window, a number that only the run knows, results written over the rows.
for _operation in ("moe_begin_raw", "moe_next_raw", "moe_finish_raw"):
    torch.library.register_fake(f"moe_a2a::{_operation}", _no_trace("moe"), lib=LIB)


@torch.library.register_fake("moe_a2a::combine_pairs_raw", lib=LIB)
def _(y: Tensor, handle: Tensor, group: str) -> Tensor:
    return y.new_empty(_new_rows(), _new_rows())


@torch.library.register_fake("moe_a2a::combine_again_raw", lib=LIB)
def _(y: Tensor, routing: Tensor, group: str, tag: int, pairs: bool) -> Tensor:
    return y.new_empty(_new_rows(), _new_rows() if pairs else y.shape[1])


@torch.library.register_fake("moe_a2a::experts_raw", lib=LIB)
def _(
    rows: Tensor,
    offsets: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    spec: int,
    limit: float,
    alpha: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), _fake_hidden(rows, rows.shape[0] if keep else 0, up, spec)


@torch.library.register_fake("moe_a2a::experts_backward_raw", lib=LIB)
def _(
    grads: Tensor,
    weights: Tensor | None,
    rows: Tensor,
    hidden: Tensor,
    offsets: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    spec: int,
    limit: float,
    alpha: float,
    back: Tensor,
    needs: int,
) -> tuple[Tensor, ...]:
    compute = _product_dtype(up)
    wide = torch.float64 if compute == torch.float64 else torch.float32
    return grads.new_empty(grads.shape[0], dtype=wide), *(
        up.new_empty(0) if like is None or not needs >> bit & 1 else like.new_empty(like.shape)
        for bit, like in enumerate((up, down, up_bias, down_bias))
    )


@torch.library.register_fake("moe_a2a::activation_backward_raw", lib=LIB)
def _(hidden: Tensor, grad: Tensor, spec: int, limit: float, alpha: float) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), hidden.new_empty(hidden.shape)


@torch.library.register_fake("moe_a2a::witness", lib=LIB)
def _(ledger: Tensor, result: Tensor) -> Tensor:
    return ledger.new_empty(ledger.shape)


@torch.library.register_fake("moe_a2a::combine", lib=LIB)
def _(
    y: Tensor,
    handle: Tensor,
    topk_weights: Tensor | None,
    num_tokens: int,
    group: str,
    ledger: Tensor | None = None,
    anchor: Tensor | None = None,
) -> Tensor:
    order_in_inductor()
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


def _product_dtype(parameters: Tensor) -> torch.dtype:
    """In which the experts' products are made."""
    return torch.float32 if native.widens(parameters.dtype) else parameters.dtype


def _fake_hidden(x: Tensor, rows: Any, up: Tensor, spec: int) -> Tensor:
    """[N, W], what the experts keep for backward."""
    width = up.shape[2] if Spec.of(spec).transposed else up.shape[1]
    return x.new_empty(rows, width, dtype=_product_dtype(up))


def _fake_moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    spec: int,
    limit: float,
    alpha: float,
    group: str,
    tag: int = 0,
    gradients: int = -1,
    keep: bool = False,
    ledger: Tensor | None = None,
    anchor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order_in_inductor()
    _no_mixture(x=x, topk_idx=topk_idx, topk_weights=topk_weights, up=up, down=down)
    rows = _new_rows() if keep else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(rows, x.shape[1]),
        _fake_hidden(x, rows, up, spec),
        x.new_empty(_handle_size(topk_idx, group), dtype=torch.int64),
    )


torch.library.register_fake("moe_a2a::moe", _fake_moe, lib=LIB)
torch.library.register_fake("moe_a2a::moe_raw", _fake_moe, lib=LIB)


def _fake_anchor(handle: Tensor) -> Tensor:
    return handle.new_empty(0, dtype=torch.float32)


@torch.library.register_fake("moe_a2a::dispatch_backward", lib=LIB)
def _(
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    handle: Tensor,
    num_tokens: int,
    top_k: int,
    group: str,
    tag: int,
) -> tuple[Tensor, Tensor, Tensor]:
    order_in_inductor()
    weights = handle.new_empty(0) if grad_weights is None else grad_weights.new_empty(num_tokens, top_k)
    return grad_rows.new_empty(num_tokens, grad_rows.shape[1]), weights, _fake_anchor(handle)


@torch.library.register_fake("moe_a2a::combine_backward", lib=LIB)
def _(
    grad_out: Tensor, y: Tensor | None, topk_weights: Tensor | None, handle: Tensor, num_rows: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    order_in_inductor()
    weights = handle.new_empty(0) if topk_weights is None else topk_weights.new_empty(topk_weights.shape)
    return grad_out.new_empty(num_rows, grad_out.shape[1]), weights, _fake_anchor(handle)


@torch.library.register_fake("moe_a2a::moe_backward", lib=LIB)
def _(
    grad_out: Tensor,
    x: Tensor | None,
    topk_weights: Tensor | None,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    spec: int,
    limit: float,
    alpha: float,
    rows: Tensor,
    hidden: Tensor,
    handle: Tensor,
    group: str,
    tag: int,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    order_in_inductor()
    parameters = (topk_weights, up, down, up_bias, down_bias)
    return (
        grad_out.new_empty(grad_out.shape),
        *(
            grad_out.new_empty(0) if like is None or not need else like.new_empty(like.shape)
            for like, need in zip(parameters, needs, strict=True)
        ),
        _fake_anchor(handle),
    )


# --------------------------------------------------------------------------------------------------------------- autograd
#
# Backward is collective: it runs on every rank or on none, and does the same on all of them whatever a rank itself needs. What
# that is was agreed on in forward (Gradient) and stands in the handle.


def unseen(look: Callable[[], R_]) -> R_:
    """A look into a handle is nobody's business: no mode hears of it."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return look()
    with _disable_current_modes():
        return look()


def seal(handle: Tensor) -> Tensor:
    """An empty tensor whose shape is a digest of all ranks' routings.

    Saved beside the handle, it makes checkpointing notice, on every rank alike, that a recomputed forward was routed in another
    way, also where :mod:`moe_a2a.recompute` can't say so: torch compares the shapes of what both saved.
    """
    if isinstance(handle, FakeTensor) or type(handle) is not Tensor:
        return handle.new_empty(0)
    return unseen(lambda: handle.new_empty(0, routing_digest(handle)))


def lasting(tensor: Tensor, group: str) -> Tensor:
    """The tensor, to be kept for backward: a copy if it lies in the window, where later calls write."""
    return tensor.clone() if in_window(tensor, group) else tensor


def in_window(tensor: Tensor, group: str) -> bool:
    """Whether it came from ``group.empty`` or ``empty_like_rows``. What is only traced lies nowhere."""
    heap = None if isinstance(tensor, (FakeTensor, FunctionalTensor)) else find_group(group).heap
    return heap is not None and 0 <= tensor.data_ptr() - heap.addresses[heap.rank] < heap.size


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, *_ = inputs
    full = len(output) == 6
    ctx.save_for_backward(output[-1], seal(output[-1]))
    ctx.group, ctx.tag = (inputs[4], inputs[5]) if full else (inputs[3], inputs[4])
    ctx.num_tokens, ctx.top_k = x.shape[0], 0 if weights is None else weights.shape[1]
    ctx.weighted, ctx.inputs, ctx.quantised = weights is not None, len(inputs), full and inputs[8] != 0
    ctx.anchored = full and inputs[-1] is not None


def _dispatch_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.quantised:
        raise RuntimeError(
            "moe_a2a.dispatch: there is no gradient through quantised rows; leave quantize out, or detach x"
        )
    handle, _ = ctx.saved_tensors
    grad_x, grad_weights, anchor = torch.ops.moe_a2a.dispatch_backward.default(
        grads[0], grads[3] if ctx.weighted else None, handle, ctx.num_tokens, ctx.top_k, ctx.group, ctx.tag
    )
    rest = [None] * (ctx.inputs - 4)
    return grad_x, None, grad_weights if ctx.weighted else None, *rest, anchor if ctx.anchored else None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, handle, weights, _, group, _, anchor = inputs
    ctx.save_for_backward(None if weights is None else lasting(y, group), handle, weights)
    ctx.group, ctx.num_rows, ctx.anchored = group, y.shape[0], anchor is not None


def _combine_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    y, handle, weights = ctx.saved_tensors
    grad_y, grad_weights, anchor = torch.ops.moe_a2a.combine_backward.default(
        grad_out, y, weights, handle, ctx.num_rows, ctx.group
    )
    grad_weights = None if weights is None else grad_weights
    return grad_y, None, grad_weights, None, None, None, anchor if ctx.anchored else None


def _save_moe(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, up, down, up_bias, down_bias, spec, limit, alpha, group, tag, *_, anchor = inputs
    _, rows, hidden, handle = output
    x = lasting(x, group)  # also where rows are kept: a rank that recomputes needs everybody's again
    ctx.save_for_backward(x, weights, up, down, up_bias, down_bias, rows, hidden, handle, seal(handle))
    ctx.spec, ctx.group, ctx.tag, ctx.anchored = (spec, limit, alpha), group, tag, anchor is not None


def _moe_gradients(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, up, down, up_bias, down_bias, rows, hidden, handle, _ = ctx.saved_tensors
    needs = [
        need and value is not None
        for need, value in zip(
            ctx.needs_input_grad[2:7], (weights, up, down, up_bias, down_bias), strict=True
        )
    ]
    grad_x, *grads, anchor = torch.ops.moe_a2a.moe_backward.default(
        grad_out,
        x,
        weights,
        up,
        down,
        up_bias,
        down_bias,
        *ctx.spec,
        rows,
        hidden,
        handle,
        ctx.group,
        ctx.tag,
        needs,
    )
    others = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return grad_x, None, *others, *([None] * 8), anchor if ctx.anchored else None


def _no_backward(operation: str) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f"moe_a2a.{operation}: there is no gradient through {operation}; detach its inputs"
        )

    return backward


# The raw ones are called with tensors that want gradients, by functions that give the results theirs afterwards.
for _operation in (
    "dispatch_raw",
    "dispatch_full_raw",
    "dispatch_begin_raw",
    "combine_raw",
    "combine_begin_raw",
    "combine_wait_raw",
    "moe_raw",
    "moe_begin_raw",
    "moe_finish_raw",
    "experts_raw",
    "witness",
):
    LIB.impl(_operation, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_autograd(
    "moe_a2a::dispatch", _dispatch_gradients, setup_context=_save_dispatch, lib=LIB
)
torch.library.register_autograd(
    "moe_a2a::dispatch_full", _dispatch_gradients, setup_context=_save_dispatch, lib=LIB
)
torch.library.register_autograd("moe_a2a::combine", _combine_gradients, setup_context=_save_combine, lib=LIB)
torch.library.register_autograd("moe_a2a::moe", _moe_gradients, setup_context=_save_moe, lib=LIB)
# Without a formula autograd would return outputs that look like constants and lose the gradient without a word.
for _operation in ("quantize_rows", "dispatch_backward", "combine_backward", "moe_backward"):
    torch.library.register_autograd(f"moe_a2a::{_operation}", _no_backward(_operation), lib=LIB)
