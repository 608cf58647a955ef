"""The fused operator: dispatch, experts and combine in one call.

Every rank writes its rows straight into the windows of their owners, an expert is computed in the window as soon as the rows
of all sources are there, and the results leave from the window: each row is written once and read once.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows, I inner, W = 2 I with a gate, else I.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _ops, errors
from .backward import (
    BACKWARD,
    agreed,
    attach,
    dispatch_backward,
    refuse_rows,
    return_again,
    return_rows,
    send_again,
    wanted,
)
from .compiled import anchored, constant, eagerly, held, hold, not_in_window
from .exchange import Handle, _fail_call, _Pending, _tag_id, combine
from .group import EPGroup, find_group
from .op_host import native
from .op_host.experts import ACTIVATIONS, Spec
from .op_host.layout import DTYPE_CODES, Format, Gradient, HandleView, said_weights
from .recompute import check_routing
from .reference import check_combine_weights

_moe = torch.ops.moe_a2a.moe.default
_moe_raw = torch.ops.moe_a2a.moe_raw.default
_begin_raw = torch.ops.moe_a2a.moe_begin_raw.default
_next_raw = torch.ops.moe_a2a.moe_next_raw.default
_finish_raw = torch.ops.moe_a2a.moe_finish_raw.default
_experts_raw = torch.ops.moe_a2a.experts_raw.default
_experts_backward_raw = torch.ops.moe_a2a.experts_backward_raw.default
_combine_raw = torch.ops.moe_a2a.combine_raw.default
_dispatch_raw = torch.ops.moe_a2a.dispatch_raw.default

_OPERATION = "moe_a2a.moe"

ExpertFn = Callable[[Tensor, int], Tensor]
"""What :func:`moe_apply` is given: (rows [n, H], local expert) -> results [n, H']."""


def _fuses(group: EPGroup) -> bool:
    """Whether C++ computes rows where they arrive: not over torch.distributed or on a Triton rank, and not cut in lines."""
    return group._exchange is None and group.layout.format != Format.LINE


def _begin(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, group: EPGroup, tag: int, gradients: int
) -> tuple[Tensor, Tensor]:
    """(rows [N, H], handle) of a call that has sent what this rank has; :func:`_arrive` or ``_next_raw`` awaits the rows."""
    if group._exchange is not None:
        return group._exchange.begin_moe(x, topk_idx, topk_weights, tag, gradients)
    if _fuses(group):
        return _begin_raw(x, topk_idx, topk_weights, group.name, tag, gradients)  # type: ignore[no-any-return]
    rows, _, meta = _dispatch_raw(x, topk_idx, None, group.name, tag, -1, 1, gradients)
    return rows, meta


def _arrive(rows: Tensor, meta: Tensor, group: EPGroup) -> None:
    """Waits for all rows of a call that C++ doesn't fuse."""
    if group._exchange is not None:
        group._exchange.arrive(rows, meta)


def _check_ahead(
    x: Any, topk_idx: Any, topk_weights: Any, group: EPGroup, experts: tuple[Any, ...] = ()
) -> None:
    """Finds what a fused call finds before it sends anything, where the call isn't fused.

    What dispatch finds itself is left to it. ``experts``: parameters and options, as operators take them.

    Raises:
        TypeError, ValueError: an argument can't be; the peers don't know it yet.
    """
    if any(not isinstance(value, Tensor) or value.dim() != 2 for value in (x, topk_idx)):
        return
    try:
        check_combine_weights(topk_weights, topk_idx.shape[0], topk_idx.shape[1], group.rank)
        if experts and x.dtype in DTYPE_CODES:
            offsets = torch.zeros(group.num_local_experts + 1, dtype=torch.int32, device="cpu")
            try:
                _experts_raw(x[:0], offsets, *experts, False)
            except RuntimeError as error:
                native.raise_kernel_failure(error)
                raise
    except (errors.MoeA2AError, RuntimeError) as found:
        kind = ValueError if isinstance(found, errors.BadValue) else TypeError
        # Who looks at parameters alone doesn't know the rank.
        text = re.sub(r"^moe_a2a\.\w+: ", "", str(found)).replace("on rank -1", f"on rank {group.rank}")
        raise kind(text) from None


class _Call:
    """A fused call's arguments, and what is left to do when its results are there."""

    __slots__ = (
        "alpha",
        "code",
        "gradients",
        "group",
        "keep",
        "limit",
        "parameters",
        "recorded",
        "tag",
        "weights",
        "x",
    )

    def __init__(
        self,
        x: Tensor,
        weights: Tensor | None,
        parameters: tuple[Tensor | None, ...],
        spec: tuple[int, float, float],
        group: EPGroup,
        tag: int,
        gradients: int,
        keep: bool,
    ) -> None:
        self.x = x
        self.weights = weights
        self.parameters = parameters
        self.code, self.limit, self.alpha = spec
        self.group = group
        self.tag = tag
        self.gradients = gradients | said_weights(weights)
        self.keep = keep
        self.recorded = torch.is_grad_enabled()

    @property
    def experts(self) -> tuple[Any, ...]:
        """As operators take them."""
        return (*self.parameters, self.code, self.limit, self.alpha)

    def run(self, topk_idx: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it: (out, rows, hidden, handle), as the operator returns them."""
        group = self.group
        if _fuses(group):
            return _moe_raw(  # type: ignore[no-any-return]
                self.x, topk_idx, self.weights, *self.experts, group.name, self.tag, self.gradients, self.keep
            )
        _check_ahead(self.x, topk_idx, self.weights, group, self.experts)
        return self._composed(*_begin(self.x, topk_idx, self.weights, group, self.tag, self.gradients))

    def _composed(self, rows: Tensor, meta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Experts and combine, when all rows are here."""
        group = self.group
        _arrive(rows, meta, group)
        view = HandleView(meta)
        keep = self.keep and bool(view.gradients)
        try:
            y, hidden = _experts_raw(rows, view.offsets, *self.experts, keep)
        except BaseException as error:
            # The peers hear of it here. They must not hear of it once more, in another call.
            refuse_rows(group, meta, error, _OPERATION)
            if not isinstance(error, Exception):
                raise
            native.raise_failure(error, f"{_OPERATION}: on rank {group.rank}, {error}")
        if group._exchange is not None:
            out = group._exchange.combine(y, meta, self.weights)
        else:
            out = _combine_raw(y, meta, self.weights, group.name)
        return out, rows if keep else rows[:0].clone(), hidden, meta

    def finish(self, rows: Tensor, meta: Tensor) -> Tensor:
        """The second half of a call that has begun."""
        try:
            if self.group._exchange is not None:
                return self.record(*self._composed(rows, meta))
            out, kept, hidden = _finish_raw(
                rows, meta, self.weights, *self.experts, self.group.name, self.keep
            )
        except RuntimeError as error:
            self.group._check_open(_OPERATION)
            native.raise_failure(error, f"{_OPERATION}: {error}")
        return self.record(out, kept, hidden, meta)

    def record(self, out: Tensor, rows: Tensor, hidden: Tensor, meta: Tensor) -> Tensor:
        """The result with its gradients, if some rank wants any."""
        check_routing(_OPERATION, meta)
        if not self.recorded:
            return out
        union = HandleView(meta).gradients
        if not union:
            return out
        name, tag, spec = self.group.name, self.tag, (self.code, self.limit, self.alpha)

        def backward(saved: Any, needs: Sequence[bool], grad_out: Tensor) -> Sequence[Tensor | None]:
            *tensors, rows, hidden, handle, _ = saved
            return _moe_backward(
                *(grad_out, *tensors, *spec, rows, hidden, handle, name, tag, list(needs[1:6]))
            )

        # One rank that recomputes needs everybody's rows again.
        again = not self.keep or bool(union & Gradient.RECOMPUTE)
        x = _ops.lasting(self.x, name) if again else None
        inputs = (self.x, self.weights, *self.parameters)
        saved = (x, *inputs[1:], rows, hidden, meta, _ops.seal(meta))
        return attach(backward, inputs, saved, [out])[0]


class PendingMoe(_Pending[Tensor]):
    """A fused call under way: what ``moe(..., async_op=True)`` returns. ``wait()`` computes the experts and combines."""

    __slots__ = ("_begun", "_beside", "_call")

    def __init__(
        self,
        group: EPGroup,
        call: _Call,
        begun: tuple[Tensor, Tensor] | None,
        beside: Tensor | None,
        done: Tensor | None = None,
    ) -> None:
        super().__init__(group, None, done)
        self._call: _Call | None = call
        self._begun = begun
        self._beside = beside

    def _finish(self) -> Tensor:
        assert self._call is not None and self._begun is not None
        # Let go of only when it is over: a wait that was refused can be repeated.
        out = self._call.finish(*self._begun)
        self._begun = self._call = None
        return out if self._beside is None else out + self._beside


@overload
def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    group: EPGroup,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    recompute: bool = False,
    async_op: Literal[False] = False,
    tag: str | int | None = None,
) -> Tensor: ...


@overload
def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    group: EPGroup,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    recompute: bool = False,
    async_op: Literal[True],
    tag: str | int | None = None,
) -> PendingMoe: ...


def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    group: EPGroup,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    recompute: bool = False,
    async_op: bool = False,
    tag: str | int | None = None,
) -> Tensor | PendingMoe:
    """Sends tokens to their experts, computes these and sums the results. Collective: every rank of the group calls it.

    ``out[t] = sum over k of topk_weights[t, k] * expert[topk_idx[t, k]](x[t])``, where an expert is
    ``(act(gate) * up) @ down_proj.T + down_bias`` and gate and up are the halves of ``x @ gate_up_proj.T + gate_up_bias``.

    An expert is computed as soon as the rows of all ranks for it are there, and waits for no other expert's rows. With
    gradients, x, topk_weights and all parameters get theirs; experts without rows get zeros. Gradients are collective as
    the call is: if any rank wants some, all take part, also one on which everything is frozen; every rank must run backward
    then. They are those of the sum over all ranks' losses, so a parameter's aren't divided by R.

    Args:
        x: [T, H] float32, bfloat16, float16 or float64, any strides.
        topk_idx: [T, K] int32 or int64, global expert ids, -1 for no expert.
        topk_weights: [T, K] of a float type, or None for a plain sum.
        gate_up_proj: [E_local, W, H], this rank's experts (``group.local_experts``); [E_local, H, W] when ``transposed``.
            Of x's dtype, or float32 with x in a 16-bit type.
        down_proj: [E_local, H, I]; [E_local, I, H] when ``transposed``.
        group: the EPGroup.
        gate_up_bias, down_bias: [E_local, W] and [E_local, H], or None.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" (relu squared), or "clamped": gpt-oss' gate, which cuts the
            gate above ``limit`` and up outside of +-limit, and makes ``gate * sigmoid(alpha * gate) * (up + 1)``.
        gated: False for experts with one matrix before the activation: W = I, and ``gate_up_proj`` is that matrix.
        transposed: parameters are [in, out] for each expert.
        interleaved: gate and up alternate among the W columns, instead of standing side by side.
        limit, alpha: of "clamped"; 7.0 and 1.702 by default.
        shared: called with x when this rank's rows have been sent, and added to the result: experts that every token visits.
        recompute: keep nothing for backward but x: backward sends x again and makes the first product again.
        async_op: return when this rank's rows have been sent, with an object whose ``wait()`` computes the experts and
            combines. x may be written again; up to ``depth`` calls can be under way, and a backward that runs meanwhile
            counts as three for each ``moe`` in it.
        tag: names the caller, such as a layer; ranks whose tags differ get ``CallMismatch``.

    Returns:
        [T, H] in x's dtype (autocast's, under autocast); or :class:`PendingMoe`.

    Raises:
        What :func:`dispatch` and :func:`combine` raise. BadType, BadValue also for parameters that don't go together; before
        anything was sent, except with ``async_op`` or ``shared``, where the peers raise PeerAborted when this rank's rows are
        due.
    """
    if async_op and torch.compiler.is_compiling():
        return eagerly(
            moe,
            x,
            topk_idx,
            topk_weights,
            gate_up_proj,
            down_proj,
            group,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=activation,
            gated=gated,
            transposed=transposed,
            interleaved=interleaved,
            limit=limit,
            alpha=alpha,
            shared=shared,
            recompute=recompute,
            async_op=True,
            tag=tag,
        )
    begun: tuple[Tensor, Tensor] | None = None
    try:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation = {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        parameters: tuple[Tensor | None, ...] = (gate_up_proj, down_proj, gate_up_bias, down_bias)
        if torch.is_autocast_enabled("cpu"):
            # As torch's own linear layers do.
            dtype = torch.get_autocast_dtype("cpu")
            x = x.to(dtype)
            parameters = tuple(None if value is None else value.to(dtype) for value in parameters)
        code = Spec(activation, bool(gated), bool(transposed), bool(interleaved)).code
        tag_id = 0 if tag is None else _tag_id(tag)
        gradients = int(wanted(x, topk_weights, parameters))
        # Not defaults of the signature: torch.compile makes symbols of those when sizes are dynamic.
        limit = 7.0 if limit is None else constant(_real("limit", limit))
        spec = (code, limit, 1.702 if alpha is None else constant(_real("alpha", alpha)))
        if torch.compiler.is_compiling():
            ledger, anchor = held()
            # What is kept has as many rows as come, which a graph had better not hold. An anchored call has a backward, also
            # where nobody wants any.
            gradients |= int(Gradient.RECOMPUTE) if gradients or anchor is not None else 0
            results = _moe(
                x,
                topk_idx,
                topk_weights,
                *parameters,
                *spec,
                group.name,
                tag_id,
                gradients,
                False,
                ledger,
                anchor,
            )
            hold(results[3])
            out: Tensor = results[0]
            return out if shared is None else out + shared(x)
        if gradients and recompute:
            gradients |= int(Gradient.RECOMPUTE)
        # A rank that wants nothing keeps rows for those who do; whether x is sent again is for them to say.
        keep = torch.is_grad_enabled() and not (recompute and gradients)
        call = _Call(x, topk_weights, parameters, spec, group, tag_id, gradients, keep)
        if (shared is not None or async_op) and (_fuses(group) or group._exchange is not None):
            begun = _begin(x, topk_idx, topk_weights, group, tag_id, call.gradients)
        else:
            out, rows, hidden, meta = call.run(topk_idx)
    except errors.MoeA2AError:
        group._check_open(_OPERATION)
        raise
    except Exception as error:
        tensors: dict[str, Any] = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        tensors |= {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        tensors |= {name: value for name, value in biases.items() if value is not None}
        _fail_call(group, error, _OPERATION, tag, **tensors)
    if begun is not None:
        beside = None
        if shared is not None:
            try:
                beside = shared(x)
            except BaseException as error:
                refuse_rows(group, begun[1], error, f"{_OPERATION}: shared")
                raise
        pending = PendingMoe(group, call, begun, beside)
        return pending if async_op else pending.wait()
    out = call.record(out, rows, hidden, meta)
    if shared is not None:
        out = out + shared(x)
    return PendingMoe(group, call, None, None, out) if async_op else out


def _real(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}); expected a number") from None


def moe_apply(
    experts: ExpertFn,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    group: EPGroup,
    *,
    parameters: Iterable[Tensor] = (),
    shared: Callable[[Tensor], Tensor] | None = None,
    tag: str | int | None = None,
) -> Tensor:
    """:func:`moe` with experts of any kind. Collective.

    Args:
        experts: called with (rows [n, H], local expert) as soon as the rows of all ranks for it are there, and returns [n, H']
            of a float type, the same H' and dtype for all experts on all ranks. Without gradients the rows lie in the window:
            it may write to them, and mustn't keep them. With gradients it is called in the experts' order when all rows are
            there, for experts without rows, too, so that their parameters get zeros.
        x, topk_idx, topk_weights, group, shared, tag: as in :func:`moe`. If a rank owns no experts, H' and the dtype are x's.
        parameters: what ``experts`` computes with. Needed only where x and topk_weights have no gradients and ``experts`` has
            some on some ranks: gradients are collective, and so all ranks hear that there will be some.

    Returns:
        [T, H'] in the dtype of the results.

    Raises:
        What :func:`dispatch` and :func:`combine` raise, and what ``experts`` raises: the peers then raise PeerAborted.
    """
    if torch.compiler.is_compiling():
        return eagerly(
            moe_apply,
            experts,
            x,
            topk_idx,
            topk_weights,
            group,
            parameters=parameters,
            shared=shared,
            tag=tag,
        )
    parts: list[Tensor] = []
    try:
        gradients = int(wanted(x, topk_weights, tuple(parameters)))
        tag_id = 0 if tag is None else _tag_id(tag)
        fused, said = _fuses(group), gradients | said_weights(topk_weights)
        if not fused:
            _check_ahead(x, topk_idx, topk_weights, group)
        rows, meta = _begin(x, topk_idx, topk_weights, group, tag_id, said)
    except errors.MoeA2AError:
        group._check_open("moe_a2a.moe_apply")
        raise
    except Exception as error:
        _fail_call(group, error, "moe_a2a.moe_apply", tag, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    handle = Handle(meta, group, x.shape[0])
    offsets = handle.view.offsets.tolist()
    local = group.num_local_experts
    recorded = torch.is_grad_enabled() and bool(gradients or handle.view.gradients)
    try:
        check_routing("moe_a2a.moe_apply", meta)
        beside = None if shared is None else shared(x)
        if not fused:
            _arrive(rows, meta, group)
        if recorded:
            parts = [x.new_empty(offsets[e + 1] - offsets[e], x.shape[1]) for e in range(local)]
            handle._link = _attach_parts(x, parts, meta, group, tag_id)
        results: dict[int, Tensor] = {}
        waiting = iter([e for e in range(local) if offsets[e] < offsets[e + 1]])
        while (expert := _next_expert(group, meta) if fused else next(waiting, -1)) >= 0:
            arrived = rows[offsets[expert] : offsets[expert + 1]]
            if recorded:
                with torch.no_grad():
                    parts[expert].copy_(arrived)
            else:
                results[expert] = _placed(_checked(experts(arrived, expert), arrived, expert, group), arrived)
        if recorded:
            # In their order, not that of arrival: checkpointing finds what a recomputed forward saves by its place among all.
            for expert in range(local):
                results[expert] = _checked(experts(parts[expert], expert), parts[expert], expert, group)
        elif local and not results:
            # No rows, so no results; but the sum of what others return takes their form.
            results[0] = _checked(experts(rows[:0], 0), rows[:0], 0, group)
        y = (
            torch.cat([results[expert] for expert in sorted(results)])
            if recorded and results
            else _joined(results, rows)
        )
    except BaseException as error:  # also one of this package: it may be another group's
        refuse_rows(group, meta, error, "moe_a2a.moe_apply: experts")
        raise
    out = combine(y, handle, topk_weights)
    return out if beside is None else out + beside


def _next_expert(group: EPGroup, meta: Tensor) -> int:
    try:
        return int(_next_raw(meta, group.name))
    except RuntimeError as error:
        group._check_open("moe_a2a.moe_apply")
        native.raise_failure(error, f"moe_a2a.moe_apply: {error}")


def _checked(y: Any, rows: Tensor, expert: int, group: EPGroup) -> Tensor:
    """What ``experts`` returned, if it can be that."""
    if isinstance(y, Tensor) and y.dim() == 2 and y.shape[0] == rows.shape[0]:
        return y
    found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
    raise errors.BadValue(
        f"moe_a2a.moe_apply: experts returned {found} for the {rows.shape[0]} rows of local expert {expert} on rank "
        f"{group.rank}; expected a tensor [{rows.shape[0]}, H']"
    )


def _placed(y: Tensor, place: Tensor) -> Tensor:
    """An expert's results where its rows were, if they are as wide; at once: the next call may reuse their memory."""
    if y.dtype != place.dtype or y.shape != place.shape:
        return y.clone()
    if y.data_ptr() != place.data_ptr() or y.stride() != place.stride():
        place.copy_(y)
    return place


def _joined(results: dict[int, Tensor], rows: Tensor) -> Tensor:
    """The results in the experts' order: ``rows`` itself, if they stand there."""
    ordered = [results[expert] for expert in sorted(results)]
    inside = all(y.dtype == rows.dtype and y.shape[1] == rows.shape[1] for y in ordered)
    return rows if inside else torch.cat(ordered)


def _attach_parts(x: Tensor, parts: list[Tensor], meta: Tensor, group: EPGroup, tag: int) -> Tensor:
    """Makes the rows of each expert, which are filled in later, depend on x. Returns the call's link for combine."""
    tokens, name = x.shape[0], group.name
    link = x.new_empty(0, x.shape[1])

    def backward(saved: Any, needs: Any, *grads: Tensor) -> Sequence[Tensor | None]:
        return (dispatch_backward(torch.cat(grads), None, saved[0], tokens, 0, name, tag)[0],)

    *parts[:], link = attach(backward, (x,), (meta, _ops.seal(meta)), [*parts, link])
    return link


# ------------------------------------------------------------------------------------------------ the differentiable operator


def _moe_impl(
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
    if gradients < 0:
        everything = Gradient.X | Gradient.WEIGHTS | Gradient.EXPERTS
        gradients = int(everything if keep else everything | Gradient.RECOMPUTE)
    parameters = (up, down, up_bias, down_bias)
    owner = find_group(group)
    call = _Call(x, topk_weights, parameters, (spec, limit, alpha), owner, tag, gradients, keep)
    try:
        if anchor is not None:
            not_in_window("x", x, group)
        results = call.run(topk_idx)
        check_routing(_OPERATION, results[3])
        return results
    except errors.MoeA2AError:
        raise
    except Exception as error:
        wrong: dict[str, Any] = {"gate_up_proj": up, "down_proj": down}
        _fail_call(owner, error, _OPERATION, tag, x=x, topk_idx=topk_idx, topk_weights=topk_weights, **wrong)


@torch.no_grad()
def _moe_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, topk_weights, up, down, up_bias and down_bias; empty where ``needs`` (all but x's) says so."""
    owner, agreement = find_group(group), agreed(handle)
    kept = hidden.shape[0] > 0 or rows.shape[0] > 0
    if agreement & Gradient.RECOMPUTE:
        assert x is not None or kept
        again, _, _ = send_again(grad_out if x is None else x, None, handle, owner, tag)
        rows = rows if kept else again
    grads_NH, weights_N, opened = send_again(grad_out, topk_weights, handle, owner, tag)
    need_weights, *others = needs
    try:
        back_NH = _place_for(grads_NH, opened, owner)
        values_N, *grads = _experts_backward_raw(
            grads_NH,
            None if topk_weights is None else weights_N,
            rows,
            hidden,
            HandleView(handle).offsets,
            *(up, down, up_bias, down_bias, spec, limit, alpha),
            back_NH,
            sum(need << bit for bit, need in enumerate(others)),
        )
    except BaseException as error:
        refuse_rows(owner, opened, error, BACKWARD)
        raise
    grad_x = return_rows(back_NH, opened, owner)
    if topk_weights is None:
        grad_weights = grad_out.new_empty(0)
    elif agreement & Gradient.WEIGHTS:
        grad_weights = return_again(values_N[:, None], handle, owner, tag, True).to(topk_weights.dtype)
    else:
        grad_weights = torch.zeros_like(topk_weights)
    if not need_weights:
        grad_weights = grad_out.new_empty(0)
    return grad_x, grad_weights, *grads


def _place_for(like: Tensor, handle: Tensor, group: EPGroup) -> Tensor:
    """Rows [N, H] for a combine on this handle: in the window, where there is one and they fit."""
    if group._exchange is not None:
        return torch.empty_like(like)
    code = DTYPE_CODES[like.dtype]
    return torch.ops.moe_a2a.window_y.default(handle, like.shape[1], code, group.name)  # type: ignore[no-any-return]


_ops.LIB.impl("moe", _moe_impl, "CPU")
_ops.LIB.impl("moe_backward", anchored(_moe_backward), "CPU")
