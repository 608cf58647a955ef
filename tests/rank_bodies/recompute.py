"""Bodies on parts of a model that are computed again in backward, with the same routing or another one.

T tokens, H hidden, E experts, K top-k, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from pool import RankContext
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import moe_a2a
import moe_a2a.recompute
from rank_bodies.errors import Caught, caught
from rank_bodies.inputs import assert_bits
from rank_bodies.moe_bodies import WAYS, Layer, Leaves, Result, leaves, make_world, run, same_bits

Block = Callable[[Tensor], Tensor]
Found = tuple[int, int, Caught | None]
"""In which computation of a part an id was another one, at which of its calls, and what came of it."""


@dataclass(frozen=True)
class Part:
    """A part of a model that is checkpointed.

    Attributes:
        way: how its layers are called.
        kinds: use_reentrant of each checkpoint around it, outer first.
        calls: layers in it, one behind the other.
        backwards: how often backward runs; each time all is computed again.
        transport: of the group.
    """

    way: str = "fused"
    kinds: tuple[bool, ...] = (False,)
    calls: int = 1
    backwards: int = 1
    transport: str = "cpu-shm"


def _other(idx_TK: Tensor, experts: int, how: str) -> Tensor:
    """Ids that count otherwise ("moved"), or alike ("swapped")."""
    flat = idx_TK.clone().view(-1)
    if how == "moved":
        flat[0] = (flat[0] + 1) % experts
    else:
        second = int((flat != flat[0]).nonzero()[0])
        flat[0], flat[second] = flat[second].clone(), flat[0].clone()
    return flat.view(idx_TK.shape)


class _Run:
    """One forward and backward of a part; counts how often the part was computed."""

    def __init__(self, ctx: RankContext, layer: Layer, part: Part) -> None:
        self.ctx, self.layer, self.part = ctx, layer, part
        self.group = replace(layer.spec, transport=part.transport).open(ctx)
        self.own = leaves(layer, self.group)
        self.seen = 0
        self.flip: tuple[int, int, str] | None = None  # in which computation, at which call, how

    def block(self, x: Tensor) -> Tensor:
        self.seen += 1
        for call in range(self.part.calls):
            idx_TK = self.own.idx
            if self.ctx.rank == 1 and self.flip is not None and self.flip[:2] == (self.seen, call):
                idx_TK = _other(idx_TK, self.layer.experts, self.flip[2])
            given = Leaves(x * 1, idx_TK, self.own.w, self.own.parameters)
            x = x + WAYS[self.part.way](self.layer, self.group, given)
        return x

    def forward(self) -> Tensor:
        fn: Block = self.block
        for kind in reversed(self.part.kinds):
            # Something before, so that it has to be computed again itself; and behind, which makes it run to its end.
            fn = partial(
                lambda fn, kind, x: checkpoint(fn, torch.sin(x), use_reentrant=kind).tanh(), fn, kind
            )
        return fn(self.own.x)

    def backward(self, out: Tensor) -> None:
        g = make_world(self.layer).gs[self.ctx.rank]
        for left in reversed(range(self.part.backwards)):
            out.backward(g, retain_graph=left > 0)

    def plain(self) -> Result:
        """Without checkpoints."""
        own = leaves(self.layer, self.group)
        self.own, before = own, self.own
        x = own.x
        for _ in self.part.kinds:
            x = torch.sin(x)
        x = self.block(x)
        for _ in self.part.kinds:
            x = x.tanh()
        self.backward(x)
        self.own = before
        return Result(x.detach(), own.grads())


def same_as_plain(ctx: RankContext, layer: Layer, part: Part) -> int:
    """Bitwise as without a checkpoint; returns how often the part was computed."""
    this = _Run(ctx, layer, part)
    plain = this.plain()
    this.seen = 0
    out = this.forward()
    ctx.jitter(2)
    this.backward(out)
    same_bits(Result(out.detach(), this.own.grads()), plain, str(part))
    return this.seen


def flipped(ctx: RankContext, layer: Layer, part: Part, how: str, unseen: bool = False) -> list[Found]:
    """An id of rank 1 is another one: in each computation of the part after the first, and at each call, in turn.

    Args:
        unseen: as if :mod:`moe_a2a.recompute` saw nothing.
    """
    times = same_as_plain(ctx, layer, part)
    found: list[Found] = []
    with pytest.MonkeyPatch.context() as patch:
        if unseen:
            patch.setattr("moe_a2a.recompute._checkpoints", lambda: iter(()))
        for time, call in itertools.product(range(2, times + 1), range(part.calls)):
            this = _Run(ctx, layer, part)
            this.flip = (time, call, how)
            out = this.forward()
            ctx.jitter(1)
            found.append((time, call, caught(partial(this.backward, out))))
            ctx.barrier()
    assert same_as_plain(ctx, layer, part) == times
    return found


def near_tie(ctx: RankContext, transport: str, reentrant: bool, flips: bool) -> Caught | None:
    """A router with two logits close to each other on rank 1, which come out the other way round when computed again."""
    layer = Layer((3, 7, 0, 5)[: ctx.world_size], experts=8, drop=0.0, seed=52)
    group = replace(layer.spec, transport=transport).open(ctx)
    own = leaves(layer, group, "")
    router = torch.randn(layer.hidden, layer.experts, generator=torch.Generator().manual_seed(3))
    hook = False

    def block(x: Tensor, router: Tensor) -> Tensor:
        logits = x.detach() @ router + 0 * x.sum()
        if ctx.rank == 1 and len(x):
            # The second and the third of token 2 nearly tie.
            order = logits[2].argsort(descending=True)
            near = logits.clone()
            near[2, order[2]] = logits[2, order[1]] - 1e-6 + (2e-6 if hook else 0.0)
            logits = near
        weights, idx = logits.softmax(-1).topk(layer.top_k)
        return WAYS["fused"](layer, group, Leaves(x, idx, weights, own.parameters))

    results = []
    for again in (None, reentrant):
        hook = False
        x = own.x.clone().requires_grad_()
        w = router.clone().requires_grad_()
        out = (
            block(x * 1, w)
            if again is None
            else checkpoint(lambda x, w: block(x * 1, w), x, w, use_reentrant=again)
        )
        hook = flips and again is not None
        error = caught(partial(out.backward, make_world(layer).gs[ctx.rank]))
        if error is not None:
            assert again is not None
            return error
        results.append([out.detach(), x.grad, w.grad])
    for one, other in zip(*results, strict=True):
        if one is not None:
            assert_bits(other, one, f"rank {ctx.rank}")
    return None


# ---------------------------------------------------------------------------------------------------- what isn't a flip


def _to_the_end(this: _Run) -> None:
    """The computation after the first isn't cut short."""
    with set_checkpoint_early_stop(False):
        out = this.forward()
        out.backward(make_world(this.layer).gs[this.ctx.rank])


def _hooks_call(this: _Run) -> None:
    """Hooks call the layer with other ids, in backward, at the border of the part and inside of it."""
    turn = 0

    def hook(grad: Tensor) -> None:
        nonlocal turn
        turn += 1
        with torch.no_grad():
            idx_TK = (this.own.idx + turn) % this.layer.experts
            WAYS[this.part.way](this.layer, this.group, replace(this.own, idx=idx_TK))

    block = this.block

    def hooked(x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(hook)
        y = block(x)
        if y.requires_grad:
            y.register_hook(hook)
        return y

    this.block = hooked  # type: ignore[method-assign]
    out = this.forward()
    out.backward(make_world(this.layer).gs[this.ctx.rank])
    assert turn >= 2


def _values_differ(this: _Run) -> None:
    """Noise on x, other each time; the routing is the same."""
    block = this.block
    this.block = lambda x: block(torch.nn.functional.dropout(x, 0.5))  # type: ignore[method-assign]
    fn = checkpoint(this.block, this.own.x, use_reentrant=this.part.kinds[0], preserve_rng_state=False)
    fn.backward(make_world(this.layer).gs[this.ctx.rank])


def _teacher(this: _Run) -> None:
    """A call under no_grad inside of the part, and one in inference mode."""
    block = this.block

    def taught(x: Tensor) -> Tensor:
        with torch.no_grad():
            first = WAYS["fused"](
                this.layer,
                this.group,
                replace(this.own, x=x.detach(), idx=(this.own.idx + 1) % this.layer.experts),
            )
        with torch.inference_mode():
            WAYS["fused"](this.layer, this.group, replace(this.own, x=torch.ones_like(x)))
        return block(x + first)

    this.block = taught  # type: ignore[method-assign]
    this.forward().backward(make_world(this.layer).gs[this.ctx.rank])


class _OwnBackward(torch.autograd.Function):
    """A function whose backward calls the layer itself, with other ids than its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, this: _Run) -> Tensor:
        ctx.this = this
        return WAYS["fused"](this.layer, this.group, replace(this.own, x=x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        this = ctx.this
        idx_TK = (this.own.idx + 1) % this.layer.experts
        return WAYS["fused"](this.layer, this.group, replace(this.own, x=grad, idx=idx_TK)), None


def _own_function(this: _Run) -> None:
    """Outside of a checkpoint, where there's no forward to compare with, and inside of one."""
    x = this.own.x
    _OwnBackward.apply(x * 1, this).sum().backward()
    checkpoint(
        lambda x: _OwnBackward.apply(x * 1, this), x, use_reentrant=this.part.kinds[0]
    ).sum().backward()


QUIET: dict[str, Callable[[_Run], None]] = {
    "no early stop": _to_the_end,
    "hooks that call": _hooks_call,
    "other values": _values_differ,
    "calls without gradients": _teacher,
    "a function of one's own": _own_function,
}


def quiet(ctx: RankContext, layer: Layer, part: Part) -> None:
    """None of these is an error; and there are steps with other routings between."""
    for name, body in QUIET.items():
        this = _Run(ctx, layer, part)
        error = caught(lambda body=body, this=this: body(this))  # type: ignore[misc]
        assert error is None, f"{name}: {error}"
        ctx.jitter(1)
        run(replace(layer, seed=layer.seed + 1), this.group)


def calls_that_look(ctx: RankContext, layer: Layer) -> dict[str, int]:
    """How many calls look at the stack: of a plain step, of one without gradients, of a checkpointed one."""
    group = layer.spec.open(ctx)
    looks = 0
    real = moe_a2a.recompute._checkpoints

    def counted() -> Any:
        nonlocal looks
        looks += 1
        return iter(list(real()))

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_a2a.recompute._checkpoints", counted)
        run(layer, group)
        found["plain"] = looks
        with torch.no_grad():
            WAYS["fused"](layer, group, leaves(layer, group))
        with torch.inference_mode():
            WAYS["fused"](layer, group, leaves(layer, group, ""))
        found["without gradients"] = looks - found["plain"]
        same_as_plain(ctx, layer, Part())
        found["checkpointed"] = looks
    return found


def around_compiled(ctx: RankContext, layer: Layer, reentrant: bool) -> list[Caught | None]:
    """Checkpoints around a compiled function: the same routing, then another one."""
    group = layer.spec.open(ctx)
    own = leaves(layer, group)
    up, down = own.parameters[:2]
    assert up is not None and down is not None

    @torch.compile(backend="aot_eager")
    def compiled(x: Tensor, idx: Tensor) -> Tensor:
        return moe_a2a.moe(x * 1, idx, None, up, down, group)

    found = []
    for flips in (False, True):
        seen = 0

        def block(x: Tensor, flips: bool = flips) -> Tensor:
            nonlocal seen
            seen += 1
            idx_TK = own.idx
            if flips and seen == 2 and ctx.rank == 1:
                idx_TK = _other(idx_TK, layer.experts, "swapped")
            return compiled(x, idx_TK)

        out = checkpoint(block, own.x, use_reentrant=reentrant)
        found.append(caught(out.sum().backward))
        ctx.barrier()
    return found
