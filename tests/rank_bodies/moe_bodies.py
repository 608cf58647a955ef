"""Layers of experts on all ranks, what they have to give in fp64, and the ways there are to run one.

T tokens of a rank, H hidden, I inner, W first product's columns, E experts, K top-k, R ranks, N received rows.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import RankContext
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_a2a
from moe_a2a.op_host import native
from rank_bodies.inputs import GroupSpec, assert_bits, dtype_of

TOLERANCE = {"float64": 1e-10, "float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Layer:
    """A layer of experts and one batch for every rank.

    Attributes:
        tokens: T of each rank.
        routing: "any" (duplicates), "one" (all to expert ``target``), "low" (experts 0..E/2 only), or the ids of every row, as
            "1,1,3".
        drop: share of slots that are -1, with NaN as weight.
        blank: rows that are -1 altogether, and Inf.
        weights: those of every row; by chance if None.
        dtype, param_dtype, weight_dtype: of x, of the parameters (None: x's), of the routing weights (None: no weights).
    """

    tokens: tuple[int, ...]
    experts: int = 5
    top_k: int = 2
    hidden: int = 6
    inner: int = 5
    dtype: str = "float32"
    param_dtype: str | None = None
    weight_dtype: str | None = "float32"
    activation: str = "silu"
    gated: bool = True
    transposed: bool = False
    interleaved: bool = False
    bias: bool = True
    routing: str = "any"
    target: int = 0
    drop: float = 0.2
    blank: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None
    seed: int = 0

    @property
    def spec(self) -> GroupSpec:
        """A group that fits."""
        return GroupSpec(self.experts, self.top_k, max(1, *self.tokens), self.hidden, self.dtype, depth=3)

    @property
    def options(self) -> dict[str, Any]:
        """moe's keyword arguments."""
        return {
            "activation": self.activation,
            "gated": self.gated,
            "transposed": self.transposed,
            "interleaved": self.interleaved,
            "limit": 0.7,  # so low that it cuts
            "alpha": 1.3,
        }


@dataclass(frozen=True)
class World:
    """The leaves of all ranks: of each its x [T, H], ids [T, K], weights [T, K] or None, the gradient of its output; and the
    parameters of all experts (up, down, up_bias, down_bias).
    """

    xs: tuple[Tensor, ...]
    idxs: tuple[Tensor, ...]
    ws: tuple[Tensor | None, ...]
    gs: tuple[Tensor, ...]
    parameters: tuple[Tensor | None, ...]


@lru_cache(maxsize=256)
def make_world(layer: Layer) -> World:
    """The same on every rank."""
    rng = torch.Generator().manual_seed(layer.seed * 7919 + 13)
    E, K, H, inner = layer.experts, layer.top_k, layer.hidden, layer.inner
    width = 2 * inner if layer.gated else inner
    kind = dtype_of(layer.dtype)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64) * scale

    xs, idxs, ws, gs = [], [], [], []
    for T in layer.tokens:
        high = {"low": (E + 1) // 2, "one": 1}.get(layer.routing, E)
        idx_TK = torch.randint(0, high, (T, K), generator=rng)
        if layer.routing == "one":
            idx_TK = idx_TK + layer.target
        elif layer.routing not in ("any", "low"):
            idx_TK = torch.tensor([int(e) for e in layer.routing.split(",")]).repeat(T, 1)
        dropped_TK = torch.rand(T, K, generator=rng) < layer.drop
        w_TK = torch.rand(T, K, generator=rng, dtype=torch.float64) * 2 - 0.5
        if layer.weights is not None:
            w_TK = torch.tensor(layer.weights, dtype=torch.float64).repeat(T, 1)
        x_TH = normal(T, H)
        for row in layer.blank:
            dropped_TK[row] = True
            x_TH[row] = float("inf")
        w_TK = w_TK.masked_fill(dropped_TK, float("nan"))
        xs.append(x_TH.to(kind))
        idxs.append(idx_TK.masked_fill(dropped_TK, -1))
        ws.append(None if layer.weight_dtype is None else w_TK.to(dtype_of(layer.weight_dtype)))
        gs.append(normal(T, H).to(kind))
    made: list[Tensor | None] = [
        normal(E, width, H, scale=H**-0.5),
        normal(E, H, inner, scale=inner**-0.5),
        normal(E, width, scale=0.3) if layer.bias else None,
        normal(E, H, scale=0.3) if layer.bias else None,
    ]
    if layer.transposed:
        made[:2] = [value.transpose(1, 2).contiguous() for value in made[:2] if value is not None]
    kind = dtype_of(layer.param_dtype or layer.dtype)
    parameters = tuple(None if value is None else value.to(kind) for value in made)
    return World(tuple(xs), tuple(idxs), tuple(ws), tuple(gs), parameters)


def activate(layer: Layer, h_nW: Tensor) -> Tensor:
    """[n, W] -> [n, I], in torch's own functions."""
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
    }
    if not layer.gated:
        return acts[layer.activation](h_nW)
    gate, up = (h_nW[:, ::2], h_nW[:, 1::2]) if layer.interleaved else h_nW.chunk(2, dim=1)
    if layer.activation == "clamped":
        gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
        return gate * torch.sigmoid(1.3 * gate) * (up + 1)
    return acts[layer.activation](gate) * up


def expert(layer: Layer, parameters: Sequence[Tensor | None], e: int, x_nH: Tensor) -> Tensor:
    """[n, H] -> [n, H], in x's dtype."""
    up, down, up_bias, down_bias = (
        None if value is None else value[e].to(x_nH.dtype) for value in parameters
    )
    assert up is not None and down is not None
    h_nW = x_nH @ (up if layer.transposed else up.T)
    if up_bias is not None:
        h_nW = h_nW + up_bias
    y_nH = activate(layer, h_nW) @ (down if layer.transposed else down.T)
    return y_nH if down_bias is None else y_nH + down_bias


@dataclass
class Result:
    """What came out on one rank: out [T, H] and the gradients of (x, w, up, down, up_bias, down_bias); None where none came."""

    out: Tensor
    grads: list[Tensor | None]


NAMES = ("x", "topk_weights", "up", "down", "up_bias", "down_bias")


@lru_cache(maxsize=256)
def truth(layer: Layer) -> tuple[list[Result], list[Tensor | None]]:
    """In fp64 and without any exchange: of each rank out and the gradients of x and w; those of all experts' parameters."""

    def leaf(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.double().requires_grad_()

    world = make_world(layer)
    xs, ws = [leaf(x) for x in world.xs], [leaf(w) for w in world.ws]
    parameters = [leaf(value) for value in world.parameters]
    outs = []
    loss = torch.zeros((), dtype=torch.float64)
    for x, w, idx_TK, g in zip(xs, ws, world.idxs, world.gs, strict=True):
        assert x is not None
        out = torch.zeros_like(x)
        for e, k in itertools.product(range(layer.experts), range(layer.top_k)):
            tokens = (idx_TK[:, k] == e).nonzero()[:, 0]
            term = expert(layer, parameters, e, x[tokens])
            out = out.index_add(0, tokens, term if w is None else term * w[tokens, k, None])
        outs.append(out)
        loss = loss + (out * g.double()).sum()
    leaves = [value for value in (*xs, *ws, *parameters) if value is not None]
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))

    def gradient(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        grad = next(found)
        return torch.zeros_like(value) if grad is None else grad

    grads_x, grads_w = [gradient(x) for x in xs], [gradient(w) for w in ws]
    of_parameters = [gradient(value) for value in parameters]
    ranks = [Result(out.detach(), [gx, gw]) for out, gx, gw in zip(outs, grads_x, grads_w, strict=True)]
    return ranks, of_parameters


def expected(layer: Layer, group: Any) -> Result:
    """The truth for a rank of this group."""
    ranks, parameters = truth(layer)
    own = slice(group.local_experts.start, group.local_experts.stop)
    mine = ranks[group.rank]
    return Result(mine.out, [*mine.grads, *(None if value is None else value[own] for value in parameters)])


def near(got: Tensor | None, want: Tensor | None, tolerance: float, what: str) -> None:
    """Same shape, close to the truth, and on the whole as large as it: no factor of R hides in a tolerance."""
    if want is None:
        assert got is None, f"{what}: there is one, and shouldn't be"
        return
    if got is None and want.numel() == 0:
        return  # no experts here: nothing was computed with their parameters
    assert got is not None, f"{what}: there is none"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if want.numel() == 0:
        return
    wide = got.detach().double()
    size = want.abs().max().item()
    worst = (wide - want).abs().max().item()
    assert worst <= tolerance * max(size, 1.0), f"{what}: off by {worst} with numbers up to {size}"
    norm = want.square().sum().item()
    if norm > 0:
        ratio = (wide * want).sum().item() / norm
        assert abs(ratio - 1) <= max(tolerance, 1e-9) * 2, f"{what}: ratio {ratio}"


def check(result: Result, want: Result, tolerance: float, what: str) -> None:
    """All of a result."""
    near(result.out, want.out, tolerance, f"{what}: out")
    for name, got, wanted in zip(NAMES, result.grads, want.grads, strict=True):
        # Weights may be of a narrower type than all else.
        own = 0.0 if got is None else TOLERANCE[str(got.dtype).removeprefix("torch.")]
        near(got, wanted, max(tolerance, own), f"{what}: gradient of {name}")


# ------------------------------------------------------------------------------------------------------ ways to run a layer


@dataclass
class Leaves:
    """A rank's own tensors, new ones for each run."""

    x: Tensor
    idx: Tensor
    w: Tensor | None
    parameters: list[Tensor | None]

    @property
    def all(self) -> list[Tensor | None]:
        return [self.x, self.w, *self.parameters]

    def grads(self) -> list[Tensor | None]:
        """As they are in .grad."""
        return [None if value is None else value.grad for value in self.all]


def leaves(layer: Layer, group: Any, wants: str = "xwe") -> Leaves:
    """What rank ``group.rank`` passes; wants: the letters of what gets a gradient (x, w, experts)."""
    world = make_world(layer)
    own = slice(group.local_experts.start, group.local_experts.stop)

    def copy(value: Tensor | None, letter: str) -> Tensor | None:
        return None if value is None else value.detach().clone().requires_grad_(letter in wants)

    x = copy(world.xs[group.rank], "x")
    assert x is not None
    parameters = [copy(None if value is None else value[own], "e") for value in world.parameters]
    return Leaves(x, world.idxs[group.rank], copy(world.ws[group.rank], "w"), parameters)


Way = Callable[[Layer, Any, Leaves], Tensor]


def fused(layer: Layer, group: Any, own: Leaves, **options: Any) -> Tensor:
    up, down, up_bias, down_bias = own.parameters
    assert up is not None and down is not None
    out: Tensor = moe_a2a.moe(
        own.x,
        own.idx,
        own.w,
        up,
        down,
        group,
        gate_up_bias=up_bias,
        down_bias=down_bias,
        **layer.options,
        **options,
    )
    return out


def recomputed(layer: Layer, group: Any, own: Leaves) -> Tensor:
    return fused(layer, group, own, recompute=True)


def later(layer: Layer, group: Any, own: Leaves) -> Tensor:
    pending: Any = fused(layer, group, own, async_op=True)
    out: Tensor = pending.wait()
    return out


def beside(layer: Layer, group: Any, own: Leaves) -> Tensor:
    """With a shared expert that gives and takes nothing."""
    return fused(layer, group, own, shared=lambda x: x.new_zeros(x.shape))


def local_expert(layer: Layer, own: Leaves, rows: Tensor, local: int) -> Tensor:
    """One of this rank's experts in the parameters' dtype, as torch computes it."""
    up = own.parameters[0]
    assert up is not None
    return expert(layer, own.parameters, local, rows.to(up.dtype)).to(rows.dtype)


def applied(layer: Layer, group: Any, own: Leaves) -> Tensor:
    parameters = [value for value in own.parameters if value is not None]
    return moe_a2a.moe_apply(
        lambda rows, local: local_expert(layer, own, rows, local),
        own.x,
        own.idx,
        own.w,
        group,
        parameters=parameters,
    )


def experts_of(layer: Layer, group: Any, own: Leaves, d: Any) -> Tensor:
    """y for what a dispatch brought, padding included."""
    offsets = d.offsets.tolist()
    parts = [
        local_expert(layer, own, d.x[begin:end], local)
        for local, (begin, end) in enumerate(itertools.pairwise(offsets))
    ]
    return torch.cat([*parts, d.x[offsets[-1] :]])


def parts(layer: Layer, group: Any, own: Leaves, at: str = "combine", **options: Any) -> Tensor:
    """dispatch, experts, combine; the weights are applied by combine, or travel and are applied by the owner ("dispatch")."""
    d = moe_a2a.dispatch(own.x, own.idx, group, own.w if at == "dispatch" else None, **options)
    y = experts_of(layer, group, own, d)
    if at == "dispatch" and d.weights is not None:
        y = (y * d.weights[:, None].to(y.dtype)).to(y.dtype)
    return moe_a2a.combine(y, d, own.w if at == "combine" else None)


def padded(layer: Layer, group: Any, own: Leaves) -> Tensor:
    """Padding in between and behind; the weights travel, and their gradients come from there."""
    rows = sum(len(x) for x in make_world(layer).xs) * layer.top_k + 4 * layer.experts
    return parts(layer, group, own, "dispatch", align=4, pad_to=rows + group.rank)


def parts_later(layer: Layer, group: Any, own: Leaves) -> Tensor:
    d = moe_a2a.dispatch(own.x, own.idx, group, async_op=True).wait()
    return moe_a2a.combine(experts_of(layer, group, own, d), d, own.w, async_op=True).wait()


def in_window(layer: Layer, group: Any, own: Leaves) -> Tensor:
    """x and y lie in the window."""
    x = group.empty(*own.x.shape, own.x.dtype)
    with torch.no_grad():
        x.copy_(own.x)
    x = Through.apply(own.x, x)
    d = moe_a2a.dispatch(x, own.idx, group)
    y = Through.apply(experts_of(layer, group, own, d), d.empty_like_rows())
    return moe_a2a.combine(y, d, own.w)


class Through(torch.autograd.Function):
    """Writes a value into a given tensor and passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, place: Tensor) -> Tensor:
        ctx.mark_dirty(place)
        return place.copy_(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


WAYS: dict[str, Way] = {
    "fused": fused,
    "recomputed": recomputed,
    "later": later,
    "beside": beside,
    "applied": applied,
    "parts": parts,
    "weights travel": lambda layer, group, own: parts(layer, group, own, "dispatch"),
    "padded": padded,
    "parts later": parts_later,
    "in window": in_window,
}
FUSED = ("fused", "recomputed", "later", "beside")


def run(layer: Layer, group: Any, way: str = "fused", wants: str = "xwe", rounds: int = 1) -> Result:
    """Forward and backward of the sum over all ranks of <g, out>."""
    own = leaves(layer, group, wants)
    out = WAYS[way](layer, group, own)
    g = make_world(layer).gs[group.rank]
    for turn in range(rounds):
        out.backward(g, retain_graph=turn + 1 < rounds)
    return Result(out.detach(), own.grads())


def layers_match(
    ctx: RankContext,
    layers: Sequence[Layer],
    ways: Sequence[str],
    groups: Sequence[dict[str, Any]] = ({},),
    looser: float = 1.0,
) -> None:
    """Every layer in every way on groups with these changes, against the truth."""
    for layer, changes in itertools.product(layers, groups):
        group = replace(layer.spec, **changes).open(ctx)
        want = expected(layer, group)
        narrow = max(layer.dtype, layer.param_dtype or layer.dtype, key=lambda name: TOLERANCE[name])
        for way in ways:
            ctx.jitter(1.0)
            result = run(layer, group, way)
            assert result.out.dtype == dtype_of(layer.dtype)
            what = f"rank {ctx.rank} of {ctx.world_size}, {way}, {changes}, {layer}"
            for name, leaf, grad in zip(NAMES, leaves(layer, group).all, result.grads, strict=True):
                if leaf is None or leaf.numel():
                    assert (leaf is None) == (grad is None), f"{what}: gradient of {name}"
                assert leaf is None or grad is None or leaf.dtype == grad.dtype, f"{what}: {name}'s dtype"
            check(result, want, looser * TOLERANCE[narrow], what)


def same_bits(first: Result, second: Result, what: str) -> None:
    assert_bits(first.out, second.out, f"{what}: out")
    for name, one, other in zip(NAMES, first.grads, second.grads, strict=True):
        assert (one is None) == (other is None), f"{what}: gradient of {name}"
        if one is not None and other is not None:
            assert_bits(one, other, f"{what}: gradient of {name}")


# ------------------------------------------------------------------------------------------------- what else is promised


def products_of_one_type(ctx: RankContext, layers: Sequence[Layer], wish: str) -> list[Result]:
    """With MOE_A2A_GEMM = wish in the environment of this process, which is read once."""
    results = []
    for layer in layers:
        group = layer.spec.open(ctx)
        results.append(run(layer, group))
        assert native.widens(dtype_of(layer.param_dtype or layer.dtype)) == (
            wish == "wide" and layer.param_dtype != "float32"
        )
        check(results[-1], expected(layer, group), TOLERANCE[layer.dtype], f"{wish}, {layer}")
    return [Result(r.out.detach(), [None if g is None else g.detach() for g in r.grads]) for r in results]


def transports_agree(ctx: RankContext, layers: Sequence[Layer], changes: Sequence[dict[str, Any]]) -> None:
    """Over one transport every kind of fused call gives the same bits; between transports, where rows lie differently and
    torch's products may round differently, results are close.
    """
    for layer in layers:
        first: Result | None = None
        for change in changes:
            group = replace(layer.spec, **change).open(ctx)
            ways = [run(layer, group, way) for way in ("fused", "recomputed", "later", "beside")]
            for result in ways[1:]:
                assert_bits(result.out, ways[0].out, f"{change}, {layer}")
            same_bits(ways[2], ways[0], f"{change}, {layer}")
            if first is None:
                first = Result(ways[0].out.double(), [g if g is None else g.double() for g in ways[0].grads])
            check(ways[0], first, TOLERANCE[layer.dtype], f"{change}, {layer}")


def small_terms(ctx: RankContext, way: str, dtype: str) -> None:
    """1 + 2**-9 - 1 in 16 bits, out and the gradient of x, with the experts on one rank and on two: as in float32."""
    kind = dtype_of(dtype)
    factors = torch.tensor([1, 2**-9, -1, 1, -1, 1, 1, 1], dtype=kind)
    group = GroupSpec(8, 3, 4, 8, dtype).open(ctx)
    own = factors[group.local_experts.start : group.local_experts.stop]
    one = torch.eye(8, dtype=kind)
    for ids in ((0, 1, 2), (0, 1, 4)):
        x = torch.ones(4, 8, dtype=kind, requires_grad=True)
        idx, w = torch.tensor(ids).repeat(4, 1), torch.ones(4, 3)
        if way == "moe":
            up, down = one.repeat(len(own), 1, 1), own[:, None, None] * one
            out = moe_a2a.moe(x, idx, w, up, down, group, gated=False, activation="relu")
        else:
            out = moe_a2a.moe_apply(lambda rows, e: rows * own[e], x, idx, w, group)
        out.backward(torch.ones_like(out))
        assert (out == 2**-9).all() and x.grad is not None and (x.grad == 2**-9).all(), (ids, out, x.grad)


def split(ctx: RankContext, whole: Layer, threads: int) -> tuple[Tensor, list[Tensor | None]]:
    """This rank's part of a batch that is made for one rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        world, R = make_world(whole), ctx.world_size
        group = replace(whole.spec, max_tokens=whole.tokens[0] // R).open(ctx)
        part = slice(whole.tokens[0] // R * ctx.rank, whole.tokens[0] // R * (ctx.rank + 1))
        own = slice(group.local_experts.start, group.local_experts.stop)
        w = world.ws[0]
        mine = Leaves(
            world.xs[0][part].clone().requires_grad_(),
            world.idxs[0][part],
            None if w is None else w[part].clone().requires_grad_(),
            [None if value is None else value[own].clone().requires_grad_() for value in world.parameters],
        )
        first: Result | None = None
        for _ in range(5):
            for value in mine.all:
                if value is not None:
                    value.grad = None
            ctx.jitter(5)
            out = fused(whole, group, mine)
            ctx.jitter(5)
            out.backward(world.gs[0][part])
            result = Result(out.detach(), [None if grad is None else grad.clone() for grad in mine.grads()])
            first = first or result
            same_bits(result, first, "once more")
        assert first is not None
        return first.out, first.grads
    finally:
        torch.set_num_threads(before)


def identity(ctx: RankContext) -> None:
    """One expert, one rank, weight 1: x comes back bit by bit, forward and backward."""
    group = GroupSpec(1, 1, 16, 8).open(ctx)
    x = torch.randn(16, 8).requires_grad_()
    g = torch.randn(16, 8)
    out = moe_a2a.moe_apply(
        lambda rows, e: rows, x, torch.zeros(16, 1, dtype=torch.int64), torch.ones(16, 1), group
    )
    out.backward(g)
    assert x.grad is not None
    assert_bits(out.detach(), x.detach(), "out")
    assert_bits(x.grad, g, "gradient of x")


def autocast(ctx: RankContext, layer: Layer, way: str) -> None:
    """Under autocast: products in bfloat16, gradients in the parameters' own types, weights and ids as they are."""
    group = replace(layer.spec, dtype="float32").open(ctx)
    own = leaves(layer, group)
    with torch.autocast("cpu", torch.bfloat16):
        out = WAYS[way](layer, group, own)
    assert own.w is not None and own.w.dtype == torch.float32
    assert out.dtype == (torch.bfloat16 if way != "applied" else own.x.dtype)
    out.backward(make_world(layer).gs[ctx.rank].to(out.dtype))
    for value, grad in zip(own.all, own.grads(), strict=True):
        assert value is not None and grad is not None and grad.dtype == value.dtype
    check(Result(out.detach(), own.grads()), expected(layer, group), TOLERANCE["bfloat16"], way)


def peak(ctx: RankContext, layer: Layer, way: str) -> tuple[int, int, int, int]:
    """Bytes of a forward without gradients, of one with them, of one expert's activations, of all experts' activations."""
    group = layer.spec.open(ctx)
    used = []
    for wants in ("", "xwe"):
        own = leaves(layer, group, wants)
        WAYS[way](layer, group, own)
        gc.collect()
        native.pool_trim()
        before = native.pool_stats()["held_bytes"]
        out = WAYS[way](layer, group, own)
        # Nothing that was given back has left, so what is there now has been needed at some time.
        stats = native.pool_stats()
        used.append(stats["held_bytes"] + stats["kept_bytes"] - before - out.numel() * 4)
        del out
    counts = torch.stack([torch.bincount(i[i >= 0], minlength=layer.experts) for i in make_world(layer).idxs])
    counts = counts.sum(0)[group.local_experts.start : group.local_experts.stop]
    row = 4 * 3 * layer.inner
    return used[0], used[1], int(counts.max()) * row, int(counts.sum()) * row


class Model(torch.nn.Module):
    """A router and the experts of this rank, or all of them where there is no group."""

    def __init__(self, layer: Layer, group: Any = None) -> None:
        super().__init__()
        world, self.layer, self.group = make_world(layer), layer, group
        own = slice(0, None) if group is None else slice(group.local_experts.start, group.local_experts.stop)
        self.router = torch.nn.Linear(layer.hidden, layer.experts, bias=False)
        with torch.no_grad():
            rng = torch.Generator().manual_seed(3)
            self.router.weight.copy_(torch.randn(layer.experts, layer.hidden, generator=rng))
        values = [value[own].clone() for value in world.parameters if value is not None]
        self.experts = torch.nn.ParameterList([torch.nn.Parameter(value) for value in values])

    def forward(self, x: Tensor, banned: int) -> Tensor:
        scores = self.router(x)
        if banned >= 0:
            scores = scores.masked_fill(torch.arange(self.layer.experts) == banned, float("-inf"))
        w, idx = scores.softmax(-1).topk(self.layer.top_k)
        if self.group is not None:
            return x + fused(self.layer, self.group, Leaves(x, idx, w, list(self.experts)))
        out = x
        for e, k in itertools.product(range(self.layer.experts), range(self.layer.top_k)):
            tokens = (idx[:, k] == e).nonzero()[:, 0]
            term = expert(self.layer, list(self.experts), e, x[tokens])
            out = out.index_add(0, tokens, term * w[tokens, k, None])
        return out


def trained_alone(layer: Layer, steps: int) -> Model:
    """One process, all ranks' batches: the mean of the ranks' losses."""
    model = Model(layer)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    world = make_world(layer)
    for turn in range(steps):
        optimiser.zero_grad()
        losses = [
            (model(x.roll(turn, 1), 1 if turn == 1 else -1) * g).sum()
            for x, g in zip(world.xs, world.gs, strict=True)
        ]
        (sum(losses[1:], losses[0]) / len(losses)).backward()
        optimiser.step()
    return model


def data_parallel(ctx: RankContext, layer: Layer, wrapper: str, steps: int) -> None:
    """Experts over pairs of ranks, and two such pairs, on ranks 0 to 3: after some steps what one process has."""
    # Making a group takes all ranks of the world.
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3])]
    if ctx.rank > 3:
        return
    ep, dp, everyone = made[ctx.rank // 2], made[2 + ctx.rank % 2], made[4]
    group = moe_a2a.EPGroup(ep, **{**layer.spec.kwargs(2), "max_recv_rows": 64})
    try:
        model = Model(layer, group)
        wrapped: torch.nn.Module
        if wrapper == "DDP":
            ignored = [f"experts.{number}" for number in range(len(model.experts))]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            wrapped = DistributedDataParallel(model, process_group=everyone)
        else:
            mesh = DeviceMesh.from_group(everyone, "cpu")
            fully_shard(model, mesh=mesh, ignored_params=set(model.experts))
            wrapped = model
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        world = make_world(layer)
        x, g = world.xs[ctx.rank], world.gs[ctx.rank]
        for turn in range(steps):
            optimiser.zero_grad()
            ctx.jitter(3)
            (wrapped(x.roll(turn, 1), 1 if turn == 1 else -1) * g).sum().backward()
            for value in model.experts:  # of the sum over its pair already; not over the other pair
                assert value.grad is not None
                dist.all_reduce(value.grad, group=dp)
                value.grad /= 4
            optimiser.step()
        alone = trained_alone(layer, steps)
        own = slice(group.local_experts.start, group.local_experts.stop)
        router: Any = model.router.weight
        router = router.full_tensor() if wrapper == "FSDP2" else router
        torch.testing.assert_close(router, alone.router.weight, rtol=1e-5, atol=1e-5)
        routers = [torch.empty_like(router) for _ in range(4)]
        dist.all_gather(routers, router.detach().contiguous(), group=everyone)
        assert all(torch.equal(one, routers[0]) for one in routers)
        for got, want in zip(model.experts, alone.experts, strict=True):
            torch.testing.assert_close(got, want[own], rtol=1e-5, atol=1e-5)
    finally:
        group.close()
        for one in (ep, dp, everyone):
            dist.destroy_process_group(one)
