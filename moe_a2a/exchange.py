"""dispatch and combine, as users call them.

They call the raw C++ operators, with nothing in between, and give the results their gradients afterwards, when all ranks have
said whether somebody wants any. Inside torch.compile they call the operators that autograd knows.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, N received rows.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from typing import Any, Generic, Literal, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from . import _ops, errors
from .backward import attach_combine, attach_dispatch, wanted
from .compiled import eagerly, held, hold, not_in_window
from .group import EPGroup, find_group
from .op_host import native
from .op_host.layout import DTYPE_CODES, HandleView
from .op_host.quant import QUANT_CODES
from .recompute import check_routing

_dispatch_raw = torch.ops.moe_a2a.dispatch_raw.default
_dispatch_full_raw = torch.ops.moe_a2a.dispatch_full_raw.default
_dispatch_begin_raw = torch.ops.moe_a2a.dispatch_begin_raw.default
_dispatch_wait_raw = torch.ops.moe_a2a.dispatch_wait_raw.default
_combine_raw = torch.ops.moe_a2a.combine_raw.default
_combine_begin_raw = torch.ops.moe_a2a.combine_begin_raw.default
_combine_wait_raw = torch.ops.moe_a2a.combine_wait_raw.default
_dispatch_full = torch.ops.moe_a2a.dispatch_full.default
_combine = torch.ops.moe_a2a.combine.default


class Handle:
    """What combine needs of a dispatch. Good for one combine, while fewer than ``depth`` newer dispatches have started.

    Attributes:
        meta: int64 [words], the tensor the operators pass around; read by :class:`op_host.layout.HandleView`.
        group: the EPGroup.
    """

    __slots__ = ("_link", "_num_tokens", "_view", "group", "meta")

    def __init__(self, meta: Tensor, group: EPGroup, num_tokens: int | None = None) -> None:
        self.meta = meta
        self.group = group
        self._view: HandleView | None = None
        self._link: Tensor | None = None  # ties combine's gradients to dispatch's
        self._num_tokens = num_tokens  # known without a look into the tensor, which a graph couldn't take

    @property
    def view(self) -> HandleView:
        """The handle tensor's fields."""
        if self._view is None:
            self._view = HandleView(self.meta)
        return self._view

    @property
    def epoch(self) -> int:
        """n, the call number of the dispatch."""
        return self.view.epoch

    @property
    def num_tokens(self) -> int:
        """T of the dispatch."""
        return self.view.num_tokens if self._num_tokens is None else self._num_tokens

    @property
    def top_k(self) -> int:
        """K of the dispatch."""
        return self.view.top_k

    @property
    def send_count_matrix(self) -> Tensor:
        """[R, E] int32: rows each rank sent to each expert; a copy."""
        return self.view.counts_RE.clone()

    def __repr__(self) -> str:
        return f"Handle(call {self.epoch}, T={self.num_tokens}, K={self.top_k}, N={self.view.rows}, {self.group.name})"


class Dispatched:
    """What dispatch returns.

    Attributes:
        x: [N, H], rows in (local expert, source rank, token, k) order; with ``align`` each expert's rows are followed by zero
            rows up to a multiple of it, with ``pad_to=M`` it is [M, H] with zero rows behind the others. int8 or
            float8_e4m3fn when quantised.
        weights: [N] in topk_weights' dtype (0 in padding), or None when none were given.
        scales: float32, what ``x`` is to be multiplied with: [N] for int8, [N, ceil(H / 128)] for fp8_e4m3 (0 in padding);
            None when not quantised.
        handle: what combine needs.
    """

    __slots__ = ("_traced", "handle", "scales", "weights", "x")

    def __init__(
        self,
        x: Tensor,
        weights: Tensor | None,
        handle: Handle,
        scales: Tensor | None = None,
        traced: tuple[Tensor, Tensor, torch.dtype] | None = None,
    ) -> None:
        self.x = x
        self.weights = weights
        self.scales = scales
        self.handle = handle
        self._traced = (
            traced  # counts, offsets and x's dtype, of a call in a graph, which can't look into the handle
        )

    @property
    def counts(self) -> Tensor:
        """[E_local] int64: rows of each local expert."""
        return self.handle.view.counts if self._traced is None else self._traced[0]

    @property
    def offsets(self) -> Tensor:
        """[E_local + 1] int32: first row of each local expert, and N; ``offsets[1:]`` is what F.grouped_mm takes. With
        ``align`` each is a multiple of it, so an expert's part has ``counts`` rows and then zero rows.
        """
        return self.handle.view.offsets if self._traced is None else self._traced[1]

    def empty_like_rows(self, dtype: torch.dtype | None = None, hidden: int | None = None) -> Tensor:
        """An uninitialised [N, H] tensor in this rank's window for the experts' results, so that combine copies nothing.

        One a handle: every call returns the same memory. It may be written until combine, and must not be afterwards, nor
        once the handle has expired. On the collective transport, and where more rows came than the window holds
        (max_recv_rows), and inside torch.compile, it is an ordinary tensor.

        Args:
            dtype: x's by default (what x had before it was quantised).
            hidden: x's H by default.
        """
        if dtype is None:
            dtype = self.handle.view.dtype if self._traced is None else self._traced[2]
        hidden = self.x.shape[1] if hidden is None else hidden
        code = DTYPE_CODES.get(dtype)
        if code is None:
            raise errors.BadType(
                f"moe_a2a.Dispatched.empty_like_rows: dtype = {dtype}; expected a float type that travels"
            )
        group = self.handle.group
        if group._exchange is not None or torch.compiler.is_compiling():
            return self.x.new_empty(self.x.shape[0], hidden, dtype=dtype)
        try:
            return torch.ops.moe_a2a.window_y.default(self.handle.meta, hidden, code, group.name)  # type: ignore[no-any-return]
        except RuntimeError as error:
            native.raise_failure(error, f"moe_a2a.Dispatched.empty_like_rows: {error}")

    def __repr__(self) -> str:
        return f"Dispatched(x {list(self.x.shape)} {self.x.dtype}, {self.handle!r})"


# What peers did: an asynchronous call says so when it is waited for.
_OF_PEERS = (errors.PeerAborted, errors.CallMismatch, errors.PadTooSmall)

_Result = TypeVar("_Result")


class _Pending(Generic[_Result]):
    """A call under way: it ends once, in whichever thread waits first, and says the same to all who wait."""

    __slots__ = ("_done", "_error", "_lock", "_ticket", "group")

    def __init__(
        self,
        group: EPGroup,
        ticket: Tensor | None,
        done: _Result | None,
        error: errors.MoeA2AError | None = None,
    ) -> None:
        self.group = group
        self._ticket = ticket
        self._done = done
        self._error = error  # of a call that is over
        self._lock = threading.RLock()  # a signal handler may come here while its own thread waits

    def _finish(self) -> _Result:
        raise NotImplementedError

    def wait(self) -> _Result:
        """The result. A second call, from any thread, returns the same object or raises the same error.

        Raises:
            HandleExpired: ``depth`` newer dispatches have started. Otherwise what :func:`dispatch` or :func:`combine` raises
            for what the peers did, and for bad weights.
        """
        if torch.compiler.is_compiling():
            return eagerly(self.wait)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._done is None:
                try:
                    self._done = self._finish()
                except (errors.GroupBusy, errors.GroupClosed):
                    raise  # says nothing about this call
                except errors.MoeA2AError as error:
                    self._error = error
                    raise
            return self._done

    def __repr__(self) -> str:
        state = "received" if self._done is not None else "under way"
        return f"{type(self).__name__}({state}, {self.group.name})"


class PendingDispatch(_Pending[Dispatched]):
    """A dispatch under way: what ``dispatch(..., async_op=True)`` returns; ``wait()`` receives the rows."""

    __slots__ = ("_call",)

    def __init__(
        self,
        group: EPGroup,
        ticket: Tensor | None,
        call: _Call,
        done: Dispatched | None = None,
        error: errors.MoeA2AError | None = None,
    ) -> None:
        super().__init__(group, ticket, done, error)
        self._call: _Call | None = call

    def _finish(self) -> Dispatched:
        try:
            rows, weights, scales, meta = _dispatch_wait_raw(self._ticket, self.group.name)
        except RuntimeError as error:
            self.group._check_open("moe_a2a.dispatch")
            native.raise_failure(error, f"moe_a2a.dispatch: {error}")
        assert self._call is not None
        call, self._call = self._call, None
        return call.dispatched(rows, weights, scales, meta)


class PendingCombine(_Pending[Tensor]):
    """A combine under way: what ``combine(..., async_op=True)`` returns; ``wait()`` sums the rows."""

    __slots__ = ("_handle", "_weights", "_y")

    def __init__(
        self,
        group: EPGroup,
        ticket: Tensor | None,
        y: Tensor | None,
        handle: Handle,
        weights: Tensor | None,
        done: Tensor | None = None,
    ) -> None:
        super().__init__(group, ticket, done)
        self._y = y  # only where it has a gradient
        self._handle = handle
        self._weights = weights

    def _finish(self) -> Tensor:
        try:
            out: Tensor = _combine_wait_raw(self._ticket, self._weights, self.group.name)
        except Exception as error:
            self.group._check_open("moe_a2a.combine")
            wrong = _wrong_tensor(topk_weights=self._weights)
            native.raise_failure(error, f"moe_a2a.combine: on rank {self.group.rank}, {wrong or error}")
        if self._y is not None:
            out = attach_combine(
                self._y, self._weights, out, self._handle.meta, self.group, self._handle._link
            )
            self._handle._link = None
        self._y = self._weights = None
        return out


def _tag_id(tag: str | int) -> int:
    """A tag as the 64-bit number that records carry; the same on every rank."""
    if not torch.compiler.is_compiling():
        return _known_tag(tag)
    return _traced_tag(tag) if isinstance(tag, str) else _make_tag(tag)


def _make_tag(tag: str | int) -> int:
    if isinstance(tag, str):
        return int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "little", signed=True)
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise TypeError(f"tag is a {type(tag).__name__}; expected a string or a 64-bit integer")
    if not -(2**63) <= tag < 2**63:
        raise ValueError(f"tag = {tag}; expected a string or a 64-bit integer")
    return tag


_known_tag = functools.lru_cache(maxsize=4096, typed=True)(_make_tag)


def _traced_tag(tag: str | int) -> int:
    return _known_tag(tag)


# torch.compiler.assume_constant_result, without importing all of torch._dynamo.
_traced_tag._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Call:
    """What is left to do with a dispatch when its rows are there."""

    __slots__ = ("gradients", "group", "quantised", "recorded", "tag", "weights", "x")

    def __init__(
        self, x: Tensor, weights: Tensor | None, group: EPGroup, tag: int, quantised: bool, gradients: int
    ) -> None:
        self.group = group
        self.tag = tag
        self.quantised = quantised
        self.gradients = gradients
        self.recorded = torch.is_grad_enabled() and not quantised
        self.x = x
        self.weights = weights

    def dispatched(self, rows: Tensor, weights: Tensor, scales: Tensor, meta: Tensor) -> Dispatched:
        weights_N = None if self.weights is None else weights
        # Where another rank wants gradients this one has to take part in making them.
        handle = Handle(meta, self.group, self.x.shape[0])
        check_routing("moe_a2a.dispatch", meta)
        if self.recorded and (self.gradients or handle.view.gradients):
            rows, weights_N, handle._link = attach_dispatch(
                self.x, self.weights, rows, weights_N, meta, self.group, self.tag
            )
        return Dispatched(rows, weights_N, handle, scales if self.quantised else None)


def _quant_code(quantize: str | None) -> int:
    if quantize is None:
        return 0
    code = QUANT_CODES.get(quantize) if isinstance(quantize, str) else None
    if code is None:
        raise ValueError(f"quantize = {quantize!r}; expected None, 'int8' or 'fp8_e4m3'")
    return code


def _number(name: str, value: Any, least: int, most: int) -> int:
    """An int, or what stands for one while a graph is traced."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}); expected an int")
    if not least <= value <= most:
        raise ValueError(f"{name} = {value}; expected {least} to {most}")
    return value


def _meta_of(routing: Any) -> Tensor:
    handle = routing.handle if isinstance(routing, Dispatched) else routing
    if not isinstance(handle, Handle):
        raise TypeError(
            f"routing is a {type(routing).__name__}; expected the .handle of what dispatch returned"
        )
    return handle.meta


@overload
def dispatch(
    x: Tensor,
    topk_idx: Tensor | None,
    group: EPGroup,
    topk_weights: Tensor | None = None,
    *,
    routing: Handle | Dispatched | None = None,
    pad_to: int | None = None,
    align: int = 1,
    quantize: str | None = None,
    async_op: Literal[False] = False,
    tag: str | int | None = None,
) -> Dispatched: ...


@overload
def dispatch(
    x: Tensor,
    topk_idx: Tensor | None,
    group: EPGroup,
    topk_weights: Tensor | None = None,
    *,
    routing: Handle | Dispatched | None = None,
    pad_to: int | None = None,
    align: int = 1,
    quantize: str | None = None,
    async_op: Literal[True],
    tag: str | int | None = None,
) -> PendingDispatch: ...


@overload
def dispatch(
    x: Tensor,
    topk_idx: Tensor | None,
    group: EPGroup,
    topk_weights: Tensor | None = None,
    *,
    routing: Handle | Dispatched | None = None,
    pad_to: int | None = None,
    align: int = 1,
    quantize: str | None = None,
    async_op: bool,
    tag: str | int | None = None,
) -> Dispatched | PendingDispatch: ...


def dispatch(
    x: Tensor,
    topk_idx: Tensor | None,
    group: EPGroup,
    topk_weights: Tensor | None = None,
    *,
    routing: Handle | Dispatched | None = None,
    pad_to: int | None = None,
    align: int = 1,
    quantize: str | None = None,
    async_op: bool = False,
    tag: str | int | None = None,
) -> Dispatched | PendingDispatch:
    """Sends every token to the ranks that own its experts. Collective: every rank of the group calls it.

    What the window can't take at once goes in waves, so nothing is ever dropped.

    x and topk_weights get their gradients, and backward is collective: where one rank's x or weights want some, every rank's
    results have a place in its graph, and every rank runs backward, a rank that got no rows, too. What only the experts'
    parameters or combine's weights want isn't known here, so there it is all ranks or none. A rank that doesn't run backward,
    or ran forward under no_grad, is named by the PeerTimeout that the others raise.

    Args:
        x: [T, H] float32, bfloat16, float16 or float64, any strides. T may be 0 and differ between ranks; H and dtype may not.
        topk_idx: [T, K] int32 or int64, any strides; global expert ids, -1 for no expert, duplicates allowed.
        group: the EPGroup.
        topk_weights: [T, K] of a float type, any strides; travel with the rows when given. Must be given by all ranks or none.
        routing: the handle of an earlier dispatch on this group, whose routing is used again; topk_idx is None then. Every rank
            uses that of the same call. The handle needn't be open any more.
        pad_to: M: the result has exactly M rows, so nothing in it depends on the routing. May differ between ranks. None: as
            many as come.
        align: the rows of each expert are padded to a multiple of this with zero rows. The same on all ranks.
        quantize: "int8" (a scale for each token) or "fp8_e4m3" (a scale for each 128 columns of a token): rows travel, and
            arrive, quantised. See :func:`quantize_rows` for what happens to NaN and infinity. The same on all ranks.
        async_op: return at once with an object whose ``wait()`` gives the result; x may be written again at once, unless it
            came from ``group.empty``. Up to ``depth`` dispatches can be under way. Use it on all ranks or none: ranks may
            differ only while nothing is pushed in waves.
        tag: names the caller, such as a layer; ranks whose tags differ get ``CallMismatch`` instead of each other's rows.

    Returns:
        :class:`Dispatched`, whose tensors are this rank's own and never alias a window; or :class:`PendingDispatch`.

    Raises:
        BadType, BadValue: bad input on this rank, before anything was sent.
        PeerAborted: bad input on another rank. CallMismatch: the ranks' calls differ. PadTooSmall: some rank would receive
        more rows than its pad_to. The group stays usable after each of these.
        PeerTimeout, PeerLost: a peer didn't come, ended or left; the group is poisoned.
        GroupPoisoned, GroupClosed: no further calls.
    """
    if async_op and torch.compiler.is_compiling():
        return eagerly(
            dispatch,
            x,
            topk_idx,
            group,
            topk_weights,
            routing=routing,
            pad_to=pad_to,
            align=align,
            quantize=quantize,
            async_op=True,
            tag=tag,
        )
    try:
        tag_id = 0 if tag is None else _tag_id(tag)
        pad = -1 if pad_to is None else _number("pad_to", pad_to, 0, 2**31 - 1)
        align = _number("align", align, 1, 2**20)
        gradients = int(wanted(x, topk_weights))
        quant = 0 if quantize is None else _quant_code(quantize)
        again = None if routing is None else _meta_of(routing)
        if quant and gradients:
            raise ValueError(
                "quantize is asked for together with a gradient, which quantised rows don't have; run under "
                "torch.no_grad(), or detach x and topk_weights"
            )
        full = (x, topk_idx, topk_weights, again, group.name, tag_id, pad, align, quant)
        if torch.compiler.is_compiling():
            ledger, anchor = held(not quant)
            rows, counts, offsets, weights, scales, meta = _dispatch_full(*full, gradients, ledger, anchor)
            hold(meta)
            return Dispatched(
                rows,
                None if topk_weights is None else weights,
                Handle(meta, group, x.shape[0]),
                scales if quant else None,
                (counts, offsets, x.dtype),
            )
        call = _Call(x, topk_weights, group, tag_id, quant != 0, gradients)
        if group._exchange is not None:
            rows, weights, scales, meta = group._exchange.dispatch(*full[:4], *full[5:], gradients)
        elif async_op:
            return PendingDispatch(group, _dispatch_begin_raw(*full, gradients), call)
        elif routing is None and not quant:
            rows, weights, meta = _dispatch_raw(
                x, topk_idx, topk_weights, group.name, tag_id, pad, align, gradients
            )
            scales = weights
        else:
            rows, weights, scales, meta = _dispatch_full_raw(*full, gradients)
    except errors.MoeA2AError as error:
        group._check_open("moe_a2a.dispatch")
        if async_op and isinstance(error, _OF_PEERS):  # of an exchange, which has done all at once
            return PendingDispatch(group, None, call, error=error)
        raise
    except Exception as error:
        tensors = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        _fail_call(group, error, "moe_a2a.dispatch", tag, routing is not None, **tensors)
    result = call.dispatched(rows, weights, scales, meta)
    return PendingDispatch(group, None, call, result) if async_op else result


@overload
def combine(
    y: Tensor,
    handle: Handle | Dispatched,
    topk_weights: Tensor | None = None,
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...


@overload
def combine(
    y: Tensor,
    handle: Handle | Dispatched,
    topk_weights: Tensor | None = None,
    *,
    async_op: Literal[True],
) -> PendingCombine: ...


@overload
def combine(
    y: Tensor,
    handle: Handle | Dispatched,
    topk_weights: Tensor | None = None,
    *,
    async_op: bool,
) -> Tensor | PendingCombine: ...


def combine(
    y: Tensor,
    handle: Handle | Dispatched,
    topk_weights: Tensor | None = None,
    *,
    async_op: bool = False,
) -> Tensor | PendingCombine:
    """Brings the experts' results back and sums the K rows of each token. Collective, once for a handle.

    Args:
        y: [N, H] of a float type, any strides: a result for each row of ``Dispatched.x``, in its order; rows of padding are not
            looked at. The dtype may be another than x's, and must be the same on all ranks.
        handle: of the dispatch; what dispatch returned will do, too.
        topk_weights: [T, K] of a float type; None sums the rows as they are.
        async_op: return at once with an object whose ``wait()`` gives the result. y may be written again at once, unless it
            lies in the window (``empty_like_rows``); the weights must stay as they are until ``wait()``. Where rows go in waves
            (see ``max_recv_rows``) the call waits for its peers.

    Returns:
        [T, H] in y's dtype: ``sum over k of weight * y``, accumulated in the wider of float32 and y's dtype, in k order,
        multiply then add, rounded once; exact zeros for a token whose slots are all dropped.

    Raises:
        HandleExpired: combined before, or ``depth`` newer dispatches have started (a local error: nothing was sent).
        BadType, BadValue: bad y or weights on this rank. PeerAborted: bad y on a rank that has rows of this one.
        CallMismatch: y's dtype or H differs. The handle is closed and the group stays usable after each of these.
        PeerTimeout, PeerLost: a peer didn't come, ended or left; the group is poisoned.
    """
    if isinstance(handle, Dispatched):
        handle = handle.handle
    try:
        group = handle.group
    except AttributeError:
        raise errors.BadType(
            f"moe_a2a.combine: handle is a {type(handle).__name__}; expected the .handle of what dispatch returned"
        ) from None
    if async_op and torch.compiler.is_compiling():
        return eagerly(combine, y, handle, topk_weights, async_op=True)
    try:
        if torch.compiler.is_compiling():
            ledger, anchor = held()
            summed: Tensor = _combine(
                y, handle.meta, topk_weights, handle.num_tokens, group.name, ledger, anchor
            )
            hold(summed)
            return summed
        recorded = wanted(y, topk_weights) or (torch.is_grad_enabled() and handle.view.gradients)
        if group._exchange is not None:
            out = group._exchange.combine(y, handle.meta, topk_weights)
        elif async_op:
            ticket = _combine_begin_raw(y, handle.meta, group.name)
            return PendingCombine(group, ticket, y if recorded else None, handle, topk_weights)
        else:
            out = _combine_raw(y, handle.meta, topk_weights, group.name)
    except errors.MoeA2AError:
        group._check_open("moe_a2a.combine")
        raise
    except Exception as error:
        _fail_combine(group, error, y, handle, topk_weights)
    # The call is over: what checkpointing raises here, when it has seen enough, is no failure of it.
    if recorded:
        out = attach_combine(y, topk_weights, out, handle.meta, group, handle._link)
        handle._link = None
    return PendingCombine(group, None, None, handle, None, out) if async_op else out


# What follows runs after a call has failed. A failure of the kernels has been told to the peers already; anything else (an
# argument that isn't a tensor, say) happened before anything was sent, and the peers must hear of it.


def _wrong_tensor(has_routing: bool = False, **arguments: Any) -> str:
    """What keeps torch from handing these arguments to the kernels; "" when it isn't they."""
    # A subclass may raise for whatever it is asked; it isn't asked here.
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in arguments.items():
            if value is None and (name == "topk_weights" or (name == "topk_idx" and has_routing)):
                continue
            if not isinstance(value, Tensor):
                return f"{name} is a {type(value).__name__}; expected a torch.Tensor"
            if value.layout != torch.strided:
                return f"{name} has layout {value.layout}; expected a dense (strided) tensor"
            if value.device.type != "cpu":
                return f"{name} is on {value.device}; this group's tensors are on the CPU"
    return ""


def _fail_call(
    group: Any,
    error: Exception,
    operation: str,
    tag: str | int | None,
    has_routing: bool = False,
    **tensors: Any,
) -> NoReturn:
    """Raises the named error behind ``error``."""
    if not isinstance(group, EPGroup):
        raise errors.BadType(f"{operation}: group is a {type(group).__name__}; expected an EPGroup") from None
    try:
        native.raise_kernel_failure(error)
    except errors.GroupClosed:
        group._check_open(operation)
        raise
    except errors.CallMismatch as mismatch:
        # Records carry a tag as a number; here is what it stands for.
        if isinstance(tag, str) and "tag" in str(mismatch):
            raise errors.CallMismatch(f"{mismatch} ({_tag_id(tag)} is {tag!r})") from None
        raise
    group._check_open(operation)
    if detect_fake_mode(tuple(tensors.values())) is not None:
        raise error  # nobody waits for a call that is only traced
    wrong = _wrong_tensor(has_routing, **tensors)
    reason = f"{operation}: on rank {group.rank}, {wrong or error}"
    if group._exchange is not None:
        group._exchange.abort(errors.BadType(reason))
    native.raise_failure(error, reason, native.abort_call(group.name) if group._exchange is None else None)


def _fail_combine(group: EPGroup, error: Exception, y: Any, handle: Handle, topk_weights: Any) -> NoReturn:
    """Raises the named error behind ``error``."""
    try:
        native.raise_kernel_failure(error)
    except errors.GroupClosed:
        group._check_open("moe_a2a.combine")
        raise
    group._check_open("moe_a2a.combine")
    if detect_fake_mode((y, topk_weights)) is not None:
        raise error  # nobody waits for a call that is only traced
    wrong_weights = "" if _wrong_tensor(y=y) else _wrong_tensor(topk_weights=topk_weights)
    wrong = _wrong_tensor(y=y) or wrong_weights
    reason = f"moe_a2a.combine: on rank {group.rank}, {wrong or error}"
    tell_peers = None
    if wrong_weights:
        # Only this rank's sum can't be made; the rows that others wait for are good. Weights that can't fit stop the call
        # right after they have gone out.
        with contextlib.suppress(RuntimeError, ValueError):
            _combine_now(y, handle.meta, torch.empty(0, device="cpu"), group)
        if group._exchange is None:
            # Should that have failed in another way, the handle is still open. A closed one answers with HandleExpired.
            with contextlib.suppress(RuntimeError):
                native.refuse_combine(group.name, handle.meta)(2, reason)
    elif group._exchange is not None:
        with contextlib.suppress(errors.MoeA2AError):
            group._exchange.combine(y, handle.meta, None)
    else:
        tell_peers = native.refuse_combine(group.name, handle.meta)
    native.raise_failure(error, reason, tell_peers)


# ------------------------------------------------------------------------------------------- the differentiable operators


def _dispatch_full_impl(
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
    owner = find_group(group)
    tensors, options = (x, topk_idx, topk_weights, routing), (tag, pad_to, align, quant, max(gradients, 0))
    try:
        if owner._exchange is not None:
            rows, weights, scales, meta = owner._exchange.dispatch(*tensors, *options)
        else:
            rows, weights, scales, meta = _dispatch_full_raw(*tensors, group, *options)
    except errors.MoeA2AError:
        raise
    except Exception as error:
        named = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        _fail_call(owner, error, "moe_a2a.dispatch", tag, routing is not None, **named)
    check_routing("moe_a2a.dispatch", meta)
    view = HandleView(meta)
    # Copies: an operator's outputs must not be views of each other.
    return rows, view.counts.clone(), view.offsets.clone(), weights, scales, meta


def _dispatch_impl(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    group: str,
    tag: int = 0,
    pad_to: int = -1,
    align: int = 1,
    gradients: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, counts, offsets, weights, _, meta = _dispatch_full_impl(
        x, topk_idx, topk_weights, None, group, tag, pad_to, align, 0, gradients
    )
    return rows, counts, offsets, weights, meta


def _combine_now(y: Tensor, handle: Tensor, topk_weights: Tensor | None, group: EPGroup) -> Tensor:
    if group._exchange is not None:
        return group._exchange.combine(y, handle, topk_weights)
    return _combine_raw(y, handle, topk_weights, group.name)  # type: ignore[no-any-return]


def _combine_impl(
    y: Tensor,
    handle: Tensor,
    topk_weights: Tensor | None,
    num_tokens: int,
    group: str,
    ledger: Tensor | None = None,
    anchor: Tensor | None = None,
) -> Tensor:
    owner = find_group(group)
    try:
        if anchor is not None and topk_weights is not None:
            not_in_window("y", y, group)
        return _combine_now(y, handle, topk_weights, owner)
    except errors.MoeA2AError:
        raise
    except Exception as error:
        _fail_combine(owner, error, y, Handle(handle, owner, num_tokens), topk_weights)


def _witness_impl(ledger: Tensor, result: Tensor) -> Tensor:
    return ledger + 1


_ops.LIB.impl("dispatch", _dispatch_impl, "CPU")
_ops.LIB.impl("dispatch_full", _dispatch_full_impl, "CPU")
_ops.LIB.impl("combine", _combine_impl, "CPU")
_ops.LIB.impl("witness", _witness_impl, "CPU")
