"""Bodies that compare :class:`moe_a2a.MoE` with a layer written here in plain torch, on one process with all ranks' tokens.

T tokens of a rank, H hidden, E experts, K top-k, I inner, W columns of the first product.
"""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field
from typing import Any

import torch
from pool import RankContext
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_a2a import MoE
from rank_bodies.inputs import GroupSpec, assert_bits, dtype_of
from rank_bodies.steps import dirty_outputs

EXPERT_NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


@dataclass(frozen=True)
class LayerCase:
    """A layer and what it is given; ``options`` are MoE's. ``idle``: the router keeps away from the last expert."""

    tokens: tuple[int, ...]
    experts: int = 7
    hidden: int = 16
    inner: int = 12
    top_k: int = 2
    dtype: str = "float32"
    x_dtype: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    transport: str = "cpu-shm"
    protocol: str = "auto"
    recv_rows: int | None = None
    corrected: bool = False
    idle: bool = False
    seed: int = 5

    @property
    def spec(self) -> GroupSpec:
        """The group; rows of x's type, and room for a few tokens more."""
        return GroupSpec(
            self.experts,
            self.top_k,
            max(*self.tokens, 1) + 1,
            self.hidden,
            self.x_dtype or self.dtype,
            recv_rows=self.recv_rows,
            transport=self.transport,
            protocol=self.protocol,
        )


def make_layer(ctx: RankContext, case: LayerCase, **changes: Any) -> MoE:
    """The case's layer, the same on any number of ranks."""
    torch.manual_seed(case.seed)
    group = ctx.group(**case.spec.kwargs(ctx.world_size))
    layer = MoE(group, case.inner, **{"dtype": dtype_of(case.dtype), **case.options, **changes})
    with torch.no_grad():
        if case.corrected:
            assert layer.router.correction_bias is not None
            layer.router.correction_bias += torch.linspace(0.3, -0.3, case.experts)
        if case.idle:
            layer.router.weight[-1] = -1.0
    return layer


def inputs_of(case: LayerCase, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """x [T, H] of a rank, and the gradient [T, H] that its output gets: every rank can make every rank's."""
    rng = torch.Generator().manual_seed(1000 * number + rank)
    shape = (case.tokens[rank], case.hidden)
    x, grad = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
    if case.idle:
        x = x.abs()
    dtype = dtype_of(case.x_dtype or case.dtype)
    return x.to(dtype), grad.to(dtype)


# ------------------------------------------------------------------------------------------------- the layer, once more


def naive_choice(scores: Tensor, bias: Tensor | None, case: LayerCase) -> list[list[int]]:
    """K experts of each token: groups first, then experts; of equal ones it doesn't know which comes first."""
    groups, top_groups = case.options.get("expert_groups", 1), case.options.get("top_groups", 1)
    size = case.experts // groups
    chosen = []
    for row in (scores if bias is None else scores + bias.to(scores.dtype)).tolist():
        allowed = list(range(case.experts))
        if top_groups < groups:
            members = [allowed[g * size : (g + 1) * size] for g in range(groups)]
            best = [sum(sorted((row[e] for e in part), reverse=True)[:2]) for part in members]
            kept = sorted(range(groups), key=lambda g: -best[g])[:top_groups]
            allowed = [e for g in kept for e in members[g]]
        chosen.append(sorted(allowed, key=lambda e: -row[e])[: case.options.get("top_k", case.top_k)])
    return chosen


def naive_aux(scores: Tensor, chosen: list[list[int]], of: list[list[int]] | None = None) -> Tensor:
    """E * sum of f_e * P_e over the tokens ``of`` which these are some, token by token."""
    experts, everyone = scores.shape[1], chosen if of is None else of
    pairs = [e for row in everyone for e in row]
    total = scores.new_zeros(())
    for row in scores:
        for e in range(experts):
            total = total + experts * pairs.count(e) / len(pairs) * row[e] / row.sum() / len(everyone)
    return total


def naive_mlp(rows: Tensor, parameters: list[Any], options: dict[str, Any]) -> Tensor:
    """An expert, or a shared one; parameters in the order of EXPERT_NAMES, biases may be None."""
    up, down, up_bias, down_bias = parameters
    hidden = rows @ up.T + (0 if up_bias is None else up_bias)
    kind = options.get("activation", "silu")
    other: Any = 1
    if options.get("gated", True):
        interleaved = options.get("interleaved", False)
        half = hidden.shape[1] // 2
        hidden, other = (
            (hidden[:, 0::2], hidden[:, 1::2]) if interleaved else (hidden[:, :half], hidden[:, half:])
        )
    if kind == "clamped":
        limit, alpha = options.get("limit", 7.0), options.get("alpha", 1.702)
        hidden, other = hidden.minimum(torch.tensor(limit)), other.clamp(-limit, limit) + 1
        hidden = hidden / (1 + torch.exp(-alpha * hidden))
    elif kind == "silu":
        hidden = hidden / (1 + torch.exp(-hidden))
    elif kind == "gelu":
        hidden = hidden / 2 * (1 + torch.erf(hidden / 2**0.5))
    elif kind == "gelu_tanh":
        hidden = hidden / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    else:
        hidden = hidden.maximum(torch.tensor(0.0)) ** (2 if kind == "relu2" else 1)
    out: Tensor = (hidden * other) @ down.T + (0 if down_bias is None else down_bias)
    return out


def naive_layer(
    parameters: dict[str, Tensor], bias: Tensor | None, xs: list[Tensor], case: LayerCase
) -> tuple[list[Tensor], list[Tensor], list[list[int]]]:
    """(outputs, auxiliary losses) of each rank, and the experts of all tokens, from whole parameters in float64."""
    options = case.options
    x = torch.cat(xs)
    logits = x @ parameters["router.weight"].T
    scores = (
        logits.sigmoid()
        if options.get("scores") == "sigmoid"
        else logits.exp() / logits.exp().sum(1, keepdim=True)
    )
    chosen = naive_choice(scores.detach(), bias, case)
    shared_form = {name: value for name, value in options.items() if name != "interleaved"}
    outs = []
    for token, row in enumerate(chosen):
        weights = torch.stack([scores[token, e] for e in row])
        if options.get("norm_topk", True):
            weights = weights / weights.sum()
        out = x.new_zeros(case.hidden)
        for e, weight in zip(row, weights * options.get("routed_scale", 1.0), strict=True):
            expert = [parameters[name][e] if name in parameters else None for name in EXPERT_NAMES]
            out = out + weight * naive_mlp(x[token : token + 1], expert, options)[0]
        outs.append(out)
    out = torch.stack(outs) if outs else x.new_zeros(0, case.hidden)
    if "shared.down_proj" in parameters:
        shared = [parameters["shared.gate_up_proj"], parameters["shared.down_proj"], None, None]
        out = out + naive_mlp(x, shared, shared_form)
    sizes, begin, auxes = [len(part) for part in xs], 0, []
    for size in sizes:
        own_scores, own = scores[begin : begin + size], chosen[begin : begin + size]
        over = chosen if options.get("aux_over") == "group" else own
        auxes.append(naive_aux(own_scores, own, over) if size else scores.new_zeros(()))
        begin += size
    return list(out.split(sizes)), auxes, chosen


# ------------------------------------------------------------------------------------------------------------ comparisons

# Parts of the largest value: float32's rounding times what a sum of some dozens of terms makes of it. bfloat16 rounds to 2^-9,
# and on the way to a gradient that happens about eight times: products, activation, result, sum, and the same backward.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 8 * 2**-9}


def close(got: Tensor | None, wanted: Tensor, dtype: str, what: str) -> None:
    assert got is not None, f"{what}: None"
    assert got.shape == wanted.shape, f"{what}: {list(got.shape)}, expected {list(wanted.shape)}"
    if not wanted.numel():
        return
    error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    if not wanted.any():
        error = got.double().abs().max()
    assert error <= TOLERANCE[dtype], f"{what}: off by {float(error):.2e} of the largest value, in {dtype}"


def whole_parameters(ctx: RankContext, layer: MoE) -> dict[str, Tensor]:
    """All experts' parameters and the replicated ones, float64 leaves; those that are replicated must be equal."""
    parts = ctx.gather({name: value.detach().clone() for name, value in layer.named_parameters()})
    whole = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name not in EXPERT_NAMES:
            for value in values:
                assert_bits(value, values[0], name)
            values = values[:1]
        whole[name] = torch.cat(values).double().requires_grad_()
    return whole


def parity(ctx: RankContext, case: LayerCase, steps: int = 3) -> list[int]:
    """Outputs, losses and all gradients against the naive layer, some steps in a row; how many rows each expert had."""
    layer = make_layer(ctx, case)
    whole = whole_parameters(ctx, layer)
    coefficient = layer.aux_coefficient
    bias = layer.router.correction_bias
    rows = [0] * case.experts
    precision = case.dtype if case.x_dtype == "" else case.x_dtype
    with dirty_outputs():
        for number in range(steps):
            made = [inputs_of(case, rank, number) for rank in range(ctx.world_size)]
            xs = [x.double().clone().requires_grad_() for x, _ in made]
            outs, auxes, chosen = naive_layer(whole, bias, xs, case)
            losses = [(out * grad.double()).sum() for out, (_, grad) in zip(outs, made, strict=True)]
            if layer.aux_loss != "none":
                losses += [coefficient * aux for aux in auxes]
            leaves = {**whole, **{f"x{rank}": x for rank, x in enumerate(xs)}}
            grads = torch.autograd.grad(
                sum(losses, torch.zeros(())), list(leaves.values()), allow_unused=True
            )
            wanted = {
                name: torch.zeros_like(leaf) if grad is None else grad
                for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
            }

            x, grad = (part.clone() for part in made[ctx.rank])
            x.requires_grad_()
            ctx.jitter(2)
            out = layer(x[:, None])
            assert out.shape == (len(x), 1, case.hidden) and out.dtype == x.dtype
            close(out[:, 0], outs[ctx.rank], precision, f"output of step {number}")
            ctx.jitter(2)
            out.backward(grad[:, None])
            close(x.grad, wanted[f"x{ctx.rank}"], precision, f"x.grad of step {number}")
            if layer.aux_loss != "none":
                assert layer.last_aux_loss is not None and not layer.last_aux_loss.requires_grad
                close(layer.last_aux_loss, auxes[ctx.rank], "float32", "last_aux_loss")
            own = layer.group.local_experts
            for name, parameter in layer.named_parameters():
                if name in EXPERT_NAMES:
                    close(parameter.grad, wanted[name][own.start : own.stop], precision, f"{name}.grad")
                    continue
                assert parameter.grad is not None
                summed = torch.stack(ctx.gather(parameter.grad.double())).sum(0)
                close(summed, wanted[name], precision, f"{name}.grad")
            layer.zero_grad()
            for expert in (e for row in chosen for e in row):
                rows[expert] += 1
    return rows


def idle_experts(ctx: RankContext, case: LayerCase) -> None:
    """The last expert gets no token: zeros, and not None."""
    layer = make_layer(ctx, case)
    x, grad = inputs_of(case, ctx.rank, 0)
    ids: list[int] = layer.router(x).topk_idx.flatten().tolist()
    busy = {expert for some in ctx.gather(ids) for expert in some}
    assert case.experts - 1 not in busy
    layer(x).backward(grad)
    for name in EXPERT_NAMES:
        gradient = getattr(layer, name).grad
        assert gradient is not None
        for local, expert in enumerate(layer.group.local_experts):
            assert bool(gradient[local].any()) == (expert in busy), f"{name} of expert {expert}"


def first_parameters(ctx: RankContext, case: LayerCase) -> dict[str, Tensor]:
    """The parameters of a new layer, all experts in order, in float64."""
    return {name: value.detach() for name, value in whole_parameters(ctx, make_layer(ctx, case)).items()}


def gradients_of(layer: MoE, x: Tensor, grad: Tensor, how: str) -> list[Tensor]:
    """[output, x.grad, every parameter's gradient] of a step that is checkpointed, or not."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how == "reentrant")
    assert isinstance(out, Tensor)
    out.backward(grad)
    assert x.grad is not None
    values = [out.detach(), x.grad]
    for parameter in layer.parameters():
        assert parameter.grad is not None
        values.append(parameter.grad.clone())
    return values


def checkpointed(ctx: RankContext, case: LayerCase) -> None:
    """Both kinds of checkpoint give what the plain layer gives, the auxiliary loss' gradient included, to the bit."""
    layer = make_layer(ctx, case)
    x, grad = inputs_of(case, ctx.rank, 0)
    plain = gradients_of(layer, x, grad, "plain")
    layer.aux_coefficient = 0.0
    without = gradients_of(layer, x, grad, "plain")
    names = ["out", "x", *(name for name, _ in layer.named_parameters())]
    assert not torch.equal(plain[names.index("router.weight")], without[names.index("router.weight")])
    layer.aux_coefficient = case.options["aux_coefficient"]
    for how in ("reentrant", "not reentrant"):
        ctx.jitter(2)
        for name, got, wanted in zip(names, gradients_of(layer, x, grad, how), plain, strict=True):
            assert_bits(got, wanted, f"{name}, {how}")


def saved_and_loaded(ctx: RankContext, case: LayerCase) -> list[str]:
    """A layer that begins otherwise gives the same after loading; so does a deep copy. The state's names."""
    layer = make_layer(ctx, case)
    x, grad = inputs_of(case, ctx.rank, 0)
    layer(x).backward(grad)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    other = MoE(layer.group, case.inner, dtype=dtype_of(case.dtype), **case.options)
    before = other(x)
    other.load_state_dict(torch.load(file, weights_only=True))
    out = layer(x)
    if len(x):
        assert not torch.equal(before, out)
    assert_bits(other(x), out, "loaded")
    twin = copy.deepcopy(layer)
    assert twin.group is layer.group
    assert_bits(twin(x), out, "copied")
    own, shared = list(layer.expert_parameters()), list(layer.replicated_parameters())
    assert {id(p) for p in own + shared} == {id(p) for p in layer.parameters()}
    assert all(len(p) == layer.group.num_local_experts for p in own)
    assert repr(list(layer.group.local_experts)[-1]) in layer.extra_repr()
    return list(layer.state_dict())


def under_autocast(ctx: RankContext, case: LayerCase) -> None:
    """bfloat16 comes out, float32 gradients come back, and the router isn't touched by it."""
    layer = make_layer(ctx, case)
    x, grad = inputs_of(case, ctx.rank, 0)
    seen: list[Any] = []
    layer.router.register_forward_hook(lambda module, inputs, routed: seen.append(routed))
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert plain.dtype == torch.float32 and out.dtype == torch.bfloat16
    for before, after in zip(*seen, strict=True):
        assert_bits(after.detach(), before.detach(), "routing")
    close(out, plain.detach().double(), "bfloat16", "output")
    out.backward(grad.to(out.dtype))
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def inference_then_training(ctx: RankContext, case: LayerCase) -> None:
    """What inference_mode leaves behind does no harm to the next training step; evaluation counts nothing."""
    layer, fresh = make_layer(ctx, case), make_layer(ctx, case)
    x, grad = inputs_of(case, ctx.rank, 0)
    with torch.inference_mode():
        seen = layer(x)
    layer.eval()
    with torch.no_grad():
        assert_bits(layer(x), seen.clone(), "eval")
    assert int(layer.load.sum()) == len(x) * case.top_k
    layer.train()
    after, wanted = (gradients_of(made, x, grad, "plain") for made in (layer, fresh))
    for got, value in zip(after, wanted, strict=True):
        assert_bits(got, value, "after inference")


def balanced(ctx: RankContext, case: LayerCase, rounds: int) -> tuple[Tensor, float, float]:
    """(the last correction, the spread of the load before and after): every rank moves it alike, as the sum of loads says."""
    layer = make_layer(ctx, case)
    bias = layer.router.correction_bias
    assert bias is not None
    spread = []
    for number in range(rounds):
        x, _ = inputs_of(case, ctx.rank, number % 3)
        with torch.no_grad():
            layer(x)
        loads = ctx.gather(layer.load.tolist())
        total = [sum(column) for column in zip(*loads, strict=True)]
        mean = sum(total) / case.experts
        assert sum(total) == sum(case.tokens) * case.top_k
        spread.append(max(total) / mean)
        wanted = bias.clone()
        for expert, load in enumerate(total):
            wanted[expert] += 0.02 if load < mean else -0.02 if load > mean else 0.0
        layer.update_correction_bias(0.02)
        assert_bits(bias, wanted, "correction")
        assert not layer.load.any()
    return bias.clone(), spread[0], spread[-1]
