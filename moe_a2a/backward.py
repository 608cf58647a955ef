"""What runs backward: the reverse exchanges, and how a call's results get their place in autograd's graph.

dispatch's backward is a combine without weights on a round of its own; combine's backward is a dispatch of the gradient rows by
the saved routing, with the weights, whose own gradients are dot products made where the experts are and sent back as a scalar
for each pair (layers built on all-to-alls, such as Megatron's, do the same; nothing here needs a new routing).

Every rank does the same whatever it needs itself: what is needed by any of them stands in the handle.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from . import _ops, errors
from .compiled import anchored
from .group import EPGroup, find_group
from .op_host import native
from .op_host.layout import Gradient, HandleView

BACKWARD = "moe_a2a (backward)"
_ALL = Gradient.X | Gradient.WEIGHTS | Gradient.EXPERTS


def wanted(x: Tensor, topk_weights: Tensor | None, parameters: Sequence[Tensor | None] = ()) -> Gradient:
    """What this rank wants gradients of. Forward-mode gradients, which no operator here has, are refused, not lost."""
    if forward_ad._current_level >= 0:
        for tensor in (x, topk_weights, *parameters):
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(
                    "an argument carries a forward-mode gradient (jvp), which is not supported"
                )
    bits = Gradient(0)
    if not torch.is_grad_enabled():
        return bits
    if x.requires_grad:
        bits |= Gradient.X
    if topk_weights is not None and topk_weights.requires_grad:
        bits |= Gradient.WEIGHTS
    if any(value is not None and value.requires_grad for value in parameters):
        bits |= Gradient.EXPERTS
    return bits


def agreed(handle: Tensor) -> Gradient:
    """What some rank of the call wants; everything if nobody said."""
    return HandleView(handle).gradients & (_ALL | Gradient.RECOMPUTE) or _ALL


class _Attach(torch.autograd.Function):
    """Results that were made outside of autograd become outputs of a node with these inputs, as the same tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[..., Sequence[Tensor | None]],
        inputs: int,
        saved: int,
        *tensors: Tensor | None,
    ) -> Any:
        ctx.backward_of, ctx.inputs, ctx.rest = backward, inputs, len(tensors) - inputs
        ctx.save_for_backward(*tensors[inputs : inputs + saved])
        outputs = tensors[inputs + saved :]
        ctx.mark_dirty(*outputs)  # not copies, and not views, which couldn't be written to
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needs = ctx.needs_input_grad[3 : 3 + ctx.inputs]
        try:
            with torch.no_grad():
                found = ctx.backward_of(ctx.saved_tensors, needs, *grads)
        except RuntimeError as error:
            native.raise_kernel_failure(error)
            raise
        gradients = [grad if need else None for grad, need in zip(found, needs, strict=False)]
        if torch.is_grad_enabled():  # create_graph
            _refuse_second([grad for grad in gradients if grad is not None])
        gradients += [None] * (ctx.inputs - len(gradients))
        return None, None, None, *gradients, *([None] * ctx.rest)


class _NoSecond(torch.autograd.Function):
    """Gradients whose own gradients nobody can compute: whoever asks for them hears it, instead of losing them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor) -> Any:
        ctx.mark_dirty(*grads)
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"{BACKWARD}: there are no second derivatives (create_graph) of dispatch, combine and moe; detach the gradients, "
            "or keep what they are differentiated for away from these calls"
        )


def _refuse_second(grads: list[Tensor]) -> None:
    if grads:
        _NoSecond.apply(torch.empty(0, requires_grad=True, device="cpu"), *grads)


def attach(
    backward: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Makes ``outputs`` depend on ``inputs``, and returns them.

    Args:
        backward: (saved, which inputs need a gradient, gradients of the outputs) -> gradients of the inputs.
        inputs: none of them may need a gradient; the outputs get their place all the same, since another rank needs one.
        saved: what backward is handed; through autograd's hooks, so that checkpointing and offloading see it.
        outputs: float tensors without a graph.
    """
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    made = (backward, len(inputs) + 1, len(saved), *inputs, anchor, *saved)
    if torch._C._len_torch_dispatch_stack() == 0:
        # An asynchronous call may be waited for under no_grad; that it has gradients was decided when it began.
        with torch.enable_grad():
            _Attach.apply(*made, *outputs)
        return outputs
    # Some mode looks on. Selective checkpointing keeps the operators' own tensors to hand them out again: they must get no
    # graph, and look as if nobody had written to them.
    outputs = [tensor.detach() for tensor in outputs]
    with _unsafe_preserve_version_counter(tuple(outputs)), torch.enable_grad():
        _Attach.apply(*made, *outputs)
    return outputs


def attach_dispatch(
    x: Tensor,
    topk_weights: Tensor | None,
    rows: Tensor,
    weights_N: Tensor | None,
    handle: Tensor,
    group: EPGroup,
    tag: int,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gives what a dispatch returned its gradients.

    Returns:
        The rows, their weights, and a link [0, H] for :func:`attach_combine`: where a rank's results don't come of its rows
        (it has none, say), its part in dispatch's backward must not be left out, for the others wait for it.
    """
    tokens, top_k, name = x.shape[0], 0 if topk_weights is None else topk_weights.shape[1], group.name

    def backward(saved: Any, needs: Any, grad_rows: Tensor, *grad_weights: Tensor) -> Any:
        grad = grad_weights[0] if weighted else None
        grad_x, grad_w = dispatch_backward(grad_rows, grad, saved[0], tokens, top_k, name, tag)
        return grad_x, None if grad is None else grad_w

    link, weighted = rows.new_empty(0, rows.shape[1]), weights_N is not None
    outputs = [rows, link] if weights_N is None else [rows, weights_N, link]
    outputs = list(attach(backward, (x, topk_weights), (handle, _ops.seal(handle)), outputs))
    return outputs[0], outputs[1] if weighted else None, outputs[-1]


def attach_combine(
    y: Tensor,
    topk_weights: Tensor | None,
    out: Tensor,
    handle: Tensor,
    group: EPGroup,
    link: Tensor | None = None,
) -> Tensor:
    """Gives what a combine returned its gradients; ``link`` is what :func:`attach_dispatch` returned."""
    rows, name = y.shape[0], group.name

    def backward(saved: Any, needs: Any, grad_out: Tensor) -> Any:
        grad_y, grad_w = combine_backward(grad_out, saved[0], saved[1], saved[2], rows, name)
        return grad_y, None if saved[1] is None else grad_w

    kept = None if topk_weights is None else _ops.lasting(y, name)
    return attach(backward, (y, topk_weights, link), (kept, topk_weights, handle), [out])[0]


# ------------------------------------------------------------------------------------------------------- the exchanges


def send_again(
    x: Tensor, topk_weights: Tensor | None, handle: Tensor, group: EPGroup, tag: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Dispatches [T, H] rows by the routing of an older call: (rows [N, H], weights [N] or empty, handle)."""
    view = HandleView(handle)
    if group._exchange is not None:
        rows, weights, _, new = group._exchange.dispatch(
            x, None, topk_weights, handle, tag, view.out_rows, view.align
        )
    else:
        rows, weights, _, new = torch.ops.moe_a2a.dispatch_full_raw.default(
            x, None, topk_weights, handle, group.name, tag, view.out_rows, view.align, 0, 0, True
        )
    return rows, weights, new


def return_rows(y: Tensor, handle: Tensor, group: EPGroup) -> Tensor:
    """Sums the rows [N, H] of each token: [T, H]."""
    if group._exchange is not None:
        return group._exchange.combine(y, handle, None)
    return torch.ops.moe_a2a.combine_raw.default(y, handle, None, group.name)  # type: ignore[no-any-return]


def return_scalars(values_N: Tensor, handle: Tensor, group: EPGroup) -> Tensor:
    """A value for each row becomes one for each pair: [T, K], 0 where dropped. On an open handle."""
    if group._exchange is not None:
        return group._exchange.combine(values_N[:, None], handle, None, True)
    return torch.ops.moe_a2a.combine_pairs_raw.default(values_N[:, None], handle, group.name)  # type: ignore[no-any-return]


def return_again(y: Tensor, handle: Tensor, group: EPGroup, tag: int, pairs: bool) -> Tensor:
    """:func:`return_rows`, or with ``pairs`` what :func:`return_scalars` does, on a round of its own."""
    if group._exchange is not None:
        return group._exchange.combine_again(y, handle, tag, pairs)
    return torch.ops.moe_a2a.combine_again_raw.default(y, handle, group.name, tag, pairs)  # type: ignore[no-any-return]


def refuse_rows(group: EPGroup, handle: Tensor, error: BaseException, where: str) -> None:
    """Tells the ranks that wait for this one's rows why there are none. Closes the handle; raises nothing."""
    text = f"{where} raised {type(error).__name__} on rank {group.rank}: {error}"
    if group._exchange is not None:
        with contextlib.suppress(errors.MoeA2AError):
            group._exchange.combine(errors.BadValue(text), handle, None)
        return
    with contextlib.suppress(RuntimeError):
        native.refuse_combine(group.name, handle)(
            1, text.encode(errors="replace").decode().replace("\0", "?")
        )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which a sum is accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.no_grad()
def dispatch_backward(
    grad_rows: Tensor,
    grad_weights: Tensor | None,
    handle: Tensor,
    num_tokens: int,
    top_k: int,
    group: str,
    tag: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, H] and topk_weights [T, K] from those of the rows [N, H] and their weights [N]."""
    owner, needed = find_group(group), agreed(handle)
    if needed & Gradient.X:
        grad_x = return_again(grad_rows, handle, owner, tag, False)
    else:
        grad_x = grad_rows.new_zeros(num_tokens, grad_rows.shape[1])
    if grad_weights is None:
        return grad_x, handle.new_empty(0)
    if needed & Gradient.WEIGHTS:
        values = grad_weights.to(wide(grad_weights.dtype))
        return grad_x, return_again(values[:, None], handle, owner, tag, True).to(grad_weights.dtype)
    return grad_x, grad_weights.new_zeros(num_tokens, top_k)


@torch.no_grad()
def combine_backward(
    grad_out: Tensor,
    y: Tensor | None,
    topk_weights: Tensor | None,
    handle: Tensor,
    num_rows: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of y [N, H] and topk_weights [T, K] from that of the sums [T, H]."""
    owner = find_group(group)
    grads_NH, weights_N, opened = send_again(grad_out, topk_weights, handle, owner, 0)
    if topk_weights is None:
        return grads_NH, handle.new_empty(0)
    try:
        assert y is not None
        precise = wide(y.dtype)
        wide_NH = grads_NH.to(precise)
        values_N = (wide_NH * y.to(precise)).sum(1)
    except BaseException as error:
        refuse_rows(owner, opened, error, BACKWARD)
        raise
    grad_weights = return_scalars(values_N, opened, owner).to(topk_weights.dtype)
    return (wide_NH * weights_N.to(precise)[:, None]).to(y.dtype), grad_weights


_ops.LIB.impl("dispatch_backward", anchored(dispatch_backward), "CPU")
_ops.LIB.impl("combine_backward", anchored(combine_backward), "CPU")
