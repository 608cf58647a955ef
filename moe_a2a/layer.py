"""A mixture-of-experts layer to write models with: router, experts spread over a group's ranks, shared experts, balancing.

Shape symbols: T tokens, H hidden, E experts, K top-k, R ranks, I inner, W = 2 I with a gate, else I.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from . import errors
from .group import EPGroup
from .moe import moe
from .op_host.experts import ACTIVATIONS

# The operator, which can be traced; the function around it names errors.
_send_counts = torch.ops.moe_a2a.send_counts.default

_SCORES = ("softmax", "sigmoid")
_AUX = ("none", "switch")
_OVER = ("rank", "group")
_LEAST = 1e-20  # a sum of scores that all underflowed


def _one_of(where: str, name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise errors.BadValue(f"{where}: {name} = {value!r}; expected one of {', '.join(known)}")


def load_balancing_loss(scores: Tensor, topk_idx: Tensor, counts: Tensor | None = None) -> Tensor:
    """Switch Transformer's loss, ``E * sum over e of f_e * P_e``: 1 when all experts have the same load, at most E / K.

    f_e is the share of all pairs that went to expert e, and P_e the mean over all tokens of e's share of the token's scores.
    Only P has a gradient.

    Args:
        scores: [T, E], at least 0, of the tokens at hand. Their sum over experts needn't be 1.
        topk_idx: [T, K] int64, the experts chosen.
        counts: [E], pairs of each expert among all tokens that the loss is over, where these are more than the T at hand. The
            result is then the T tokens' share in it: the shares of disjoint sets of tokens add up to the loss over all.

    Returns:
        A scalar of scores' dtype; 0 without tokens.
    """
    if counts is None:
        counts = _send_counts(topk_idx, scores.shape[1])[0]
    pairs = counts.sum().clamp(min=1).to(scores.dtype)
    share_TE = scores / scores.sum(1, keepdim=True).clamp(min=_LEAST)
    f_E = counts.to(scores.dtype) / pairs
    return scores.shape[1] * (f_E * share_TE.sum(0)).sum() * (topk_idx.shape[1] / pairs)


class Routed(NamedTuple):
    """What a :class:`Router` returns."""

    topk_idx: Tensor
    """[T, K] int64"""
    topk_weights: Tensor
    """[T, K] float32, or float64 where x is"""
    scores: Tensor
    """[T, E] of the weights' dtype, before the correction"""


class Router(nn.Module):
    """Chooses K experts for each token, and their weights. Local: no communication.

    It computes in float32 whatever x is (in float64 if x is), also under autocast. Tokens with the same scores choose the same
    experts, on every rank: a tie is resolved by ``torch.topk``, which looks at one token's scores only.

    Args:
        hidden_size, num_experts, top_k: H, E, K.
        scores: "softmax" or "sigmoid" of the logits.
        norm_topk: divide the K weights by their sum.
        routed_scale: multiplies the weights, after that.
        expert_groups, top_groups: the E experts form ``expert_groups`` groups of neighbours, whose score is the sum of their
            two best; K are chosen among the experts of the ``top_groups`` best.
        correction_bias: have a buffer of E float32 that is added to the scores for the choice, of groups and experts, and never
            to the weights.
        dtype: of the weight; float32 by default.

    Raises:
        BadValue: numbers that don't go together.
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        norm_topk: bool = True,
        routed_scale: float = 1.0,
        expert_groups: int = 1,
        top_groups: int = 1,
        correction_bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = "moe_a2a.Router"
        _one_of(where, "scores", scores, _SCORES)
        if expert_groups < 1 or num_experts % expert_groups:
            raise errors.BadValue(
                f"{where}: expert_groups = {expert_groups}; expected a divisor of num_experts = {num_experts}"
            )
        if not 1 <= top_groups <= expert_groups:
            raise errors.BadValue(
                f"{where}: top_groups = {top_groups}; expected 1 to expert_groups = {expert_groups}"
            )
        choice = num_experts // expert_groups * top_groups
        if not 1 <= top_k <= choice:
            raise errors.BadValue(
                f"{where}: top_k = {top_k}; expected 1 to {choice}, as many experts as there are to choose from"
            )
        self.num_experts, self.top_k = num_experts, top_k
        self.scores, self.norm_topk, self.routed_scale = scores, norm_topk, routed_scale
        self.expert_groups, self.top_groups = expert_groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype or torch.float32))
        bias = torch.zeros(num_experts, dtype=torch.float32) if correction_bias else None
        self.register_buffer("correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Uniform in +-1 / sqrt(H), and no correction."""
        _fill(self.weight, self.weight.shape[1], generator)
        if self.correction_bias is not None:
            self.correction_bias.zero_()

    def forward(self, x: Tensor) -> Routed:
        """[T, H] of a float type -> :class:`Routed`."""
        precise = torch.float64 if torch.float64 in (x.dtype, self.weight.dtype) else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits_TE = F.linear(x.to(precise), self.weight.to(precise))
        scores_TE = logits_TE.softmax(1) if self.scores == "softmax" else logits_TE.sigmoid()
        idx_TK = self.choose(scores_TE)
        weights_TK = scores_TE.gather(1, idx_TK)
        if self.norm_topk:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp(min=_LEAST)
        if self.routed_scale != 1.0:
            weights_TK = weights_TK * self.routed_scale
        return Routed(idx_TK, weights_TK, scores_TE)

    def choose(self, scores: Tensor) -> Tensor:
        """[T, E] scores -> [T, K] int64 ids, best first."""
        choice_TE = scores.detach()
        if self.correction_bias is not None:
            choice_TE = choice_TE + self.correction_bias
        if self.top_groups < self.expert_groups:
            choice_TGM = rearrange(choice_TE, "t (g m) -> t g m", g=self.expert_groups)
            best_TG = choice_TGM.topk(min(2, choice_TGM.shape[2]), dim=2).values.sum(2)
            groups = best_TG.topk(self.top_groups, dim=1).indices
            out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, groups, False)
            choice_TE = rearrange(
                choice_TGM.masked_fill(rearrange(out_TG, "t g -> t g 1"), -math.inf), "t g m -> t (g m)"
            )
        return choice_TE.topk(self.top_k, dim=1).indices

    @torch.no_grad()
    def update_correction_bias(self, load: Tensor, rate: float = 1e-3) -> None:
        """Raises the correction of experts with less than the mean load by ``rate``, and lowers that of the others.

        Args:
            load: [E], pairs of each expert, over all ranks: every rank passes the same, so that the corrections stay the same.
        """
        if self.correction_bias is None:
            raise errors.BadValue("moe_a2a.Router: correction_bias is False; there is nothing to update")
        # E times the difference to the mean: whole numbers, so that a load equal to the mean is seen as such.
        above_E = self.num_experts * load - load.sum()
        self.correction_bias -= rate * above_E.sign().to(self.correction_bias.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.correction_bias
        super()._apply(fn, recurse)
        # In 16 bits many small updates would add up to none, so .to(dtype) leaves it alone.
        if bias is not None and self.correction_bias is not None and self.correction_bias.dtype != bias.dtype:
            self.correction_bias = bias.to(self.correction_bias.device)
        return self

    def extra_repr(self) -> str:
        parts = [f"{self.weight.shape[1]} -> {self.top_k} of {self.num_experts}", self.scores]
        if self.top_groups < self.expert_groups:
            parts.append(f"{self.top_groups} of {self.expert_groups} groups")
        if self.norm_topk:
            parts.append("normalised")
        if self.routed_scale != 1.0:
            parts.append(f"times {self.routed_scale:g}")
        if self.correction_bias is not None:
            parts.append("corrected")
        return ", ".join(parts)


class SharedExpert(nn.Module):
    """The expert that every token visits: an MLP like the others, on every rank. Rows in, rows out; no communication."""

    def __init__(
        self, hidden_size: int, inner_size: int, *, dtype: torch.dtype | None = None, **form: Any
    ) -> None:
        super().__init__()
        self.form = form
        width = 2 * inner_size if form["gated"] else inner_size
        self.gate_up_proj = nn.Parameter(torch.empty(width, hidden_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(hidden_size, inner_size, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Uniform in +-1 / sqrt(inputs)."""
        _fill(self.gate_up_proj, self.gate_up_proj.shape[1], generator)
        _fill(self.down_proj, self.down_proj.shape[1], generator)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]. Of x's dtype; parameters in float32 compute in it."""
        hidden = F.linear(x.to(self.gate_up_proj.dtype), self.gate_up_proj)
        out = F.linear(_activate(hidden, **self.form), self.down_proj)
        return out.to(x.dtype)


class MoE(nn.Module):
    """A router, this rank's experts, and what is between them. Collective: every rank of the group calls it.

    **Parameters and their gradients.** ``gate_up_proj`` [E_local, W, H] and ``down_proj`` [E_local, H, I] (and the biases) are
    of this rank's experts, ``group.local_experts``; :meth:`expert_parameters` lists them. Their gradients already are those of
    the sum over all ranks' losses, so they must be neither summed nor averaged over the group. Router and shared expert,
    :meth:`replicated_parameters`, are the same on all ranks, and their gradients are of this rank's loss alone: sum them over
    the ranks, as in ``dist.all_reduce(p.grad)``. If each rank's loss is divided by the number of all ranks' tokens, the sums
    are right as they are. If it is a mean over the rank's own tokens, they are R times too large: average the replicated
    gradients (as DistributedDataParallel does, told to leave the experts alone) and divide the experts' by R.

    **Balance.** ``aux_loss="switch"`` adds ``aux_coefficient *`` :func:`load_balancing_loss` to what is differentiated: its
    gradient enters where the output's comes in, so it isn't to be added to the loss, and is there also in a part of the model
    that is checkpointed. Where the loss is scaled before backward, scale ``aux_coefficient`` alike. ``correction_bias`` is the
    other way, without a loss: call :meth:`update_correction_bias` after each step. Either is at work in training mode only.

    Args:
        group: the EPGroup. Layers can share one. Its process_group must live on for ``aux_over="group"`` and
            :meth:`update_correction_bias`.
        inner_size: I of each expert.
        hidden_size: H; the group's by default.
        scores, top_k, norm_topk, routed_scale, expert_groups, top_groups, correction_bias: of the :class:`Router`; K is the
            group's by default.
        activation, gated, interleaved, limit, alpha: as in :func:`moe`.
        bias: experts have biases.
        shared_inner: inner size of an expert that every token visits, with the same activation and no bias; it is computed
            while rows travel.
        aux_loss: "none" or "switch".
        aux_coefficient: a float; can be changed at any time.
        aux_over: "rank": a mean over this rank's tokens, without communication. "group": this rank's share in the loss over all
            ranks' tokens, so that the sum over ranks is what one process with all the tokens gets; costs an all-reduce of E
            numbers over ``group.process_group`` in every forward, after the experts.
        recompute: keep nothing for backward but x, as in :func:`moe`.
        dtype: of the expert parameters; the group's by default. x has it, too, or is of a 16-bit type with float32 parameters.
        tag: names the layer among those of the group, as in :func:`moe`.

    Attributes:
        last_aux_loss: scalar, the loss of the last forward in training mode, without the coefficient and without a graph; None
            before. With ``aux_over="group"`` this rank's share.
        load: [E] int64, with a correction_bias or aux_loss: pairs of this rank's tokens that went to each expert in training
            mode since the last :meth:`update_correction_bias`. A forward that checkpointing repeats is counted again.

    Raises:
        BadValue: arguments that don't go together.
    """

    load: Tensor

    def __init__(
        self,
        group: EPGroup,
        inner_size: int,
        *,
        hidden_size: int | None = None,
        scores: str = "softmax",
        top_k: int | None = None,
        norm_topk: bool = True,
        routed_scale: float = 1.0,
        expert_groups: int = 1,
        top_groups: int = 1,
        correction_bias: bool = False,
        activation: str = "silu",
        gated: bool = True,
        interleaved: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        bias: bool = False,
        shared_inner: int | None = None,
        aux_loss: str = "none",
        aux_coefficient: float = 0.01,
        aux_over: str = "rank",
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        tag: str | int | None = None,
    ) -> None:
        super().__init__()
        where = "moe_a2a.MoE"
        _one_of(where, "activation", activation, ACTIVATIONS)
        _one_of(where, "aux_loss", aux_loss, _AUX)
        _one_of(where, "aux_over", aux_over, _OVER)
        if activation == "clamped" and not gated:
            raise errors.BadValue(f"{where}: the clamped activation has a gate; gated is False")
        hidden = group.hidden_size if hidden_size is None else hidden_size
        top_k = group.top_k if top_k is None else top_k
        if not 1 <= top_k <= group.top_k:
            raise errors.BadValue(f"{where}: top_k = {top_k}; expected 1 to the group's {group.top_k}")
        dtype = group.dtype if dtype is None else dtype
        local, width = group.num_local_experts, 2 * inner_size if gated else inner_size
        self.group, self.tag, self.recompute = group, tag, recompute
        self.hidden_size, self.inner_size = hidden, inner_size
        self.form: dict[str, Any] = {"activation": activation, "gated": gated, "limit": limit, "alpha": alpha}
        self.interleaved = interleaved
        self.aux_loss, self.aux_coefficient, self.aux_over = aux_loss, aux_coefficient, aux_over
        self.last_aux_loss: Tensor | None = None
        self.router = Router(
            hidden,
            group.num_experts,
            top_k,
            scores=scores,
            norm_topk=norm_topk,
            routed_scale=routed_scale,
            expert_groups=expert_groups,
            top_groups=top_groups,
            correction_bias=correction_bias,
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(local, width, hidden, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(local, hidden, inner_size, dtype=dtype))
        self.gate_up_bias = nn.Parameter(torch.empty(local, width, dtype=dtype)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(local, hidden, dtype=dtype)) if bias else None
        self.shared = (
            None if shared_inner is None else SharedExpert(hidden, shared_inner, dtype=dtype, **self.form)
        )
        # No buffer: those are broadcast by DistributedDataParallel, and this one is each rank's own.
        self.load = torch.zeros(group.num_experts, dtype=torch.int64)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws all parameters anew: uniform in +-1 / sqrt(inputs), biases too.

        One number is drawn from ``generator`` (torch's global one by default), which every rank must have in the same state.
        All values follow from it, those of an expert from it and the expert's global id: a layer on any number of ranks begins
        as the same layer, whatever its dtype.
        """
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        self.router.reset_parameters(_generator(seed, "router"))
        if self.shared is not None:
            self.shared.reset_parameters(_generator(seed, "shared"))
        for local, expert in enumerate(self.group.local_experts):
            own = _generator(seed, f"expert {expert}")
            _fill(self.gate_up_proj[local], self.hidden_size, own)
            _fill(self.down_proj[local], self.inner_size, own)
            if self.gate_up_bias is not None and self.down_bias is not None:
                _fill(self.gate_up_bias[local], self.hidden_size, own)
                _fill(self.down_bias[local], self.inner_size, own)
        self.load.zero_()

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's own parameters: gradients are complete, and no other rank has these."""
        yield from self.parameters(recurse=False)

    def replicated_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that all ranks have: gradients must be summed over the ranks."""
        for child in self.children():
            yield from child.parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] of x's dtype (autocast's, under autocast); any number of tokens up to the group's max_tokens."""
        x_TH = rearrange(x, "... h -> (...) h")
        idx_TK, weights_TK, scores_TE = self.router(x_TH)
        out_TH: Tensor = moe(
            x_TH,
            idx_TK,
            weights_TK,
            self.gate_up_proj,
            self.down_proj,
            self.group,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            interleaved=self.interleaved,
            shared=self.shared,
            recompute=self.recompute,
            tag=self.tag,
            **self.form,
        )
        if self.training and (self.aux_loss != "none" or self.router.correction_bias is not None):
            out_TH = self._balance(out_TH, idx_TK, scores_TE)
        return out_TH.view(x.shape)

    def _balance(self, out: Tensor, topk_idx: Tensor, scores: Tensor) -> Tensor:
        counts_E = _send_counts(topk_idx, self.group.num_experts)[0]
        with torch.no_grad():
            self.load += counts_E
        if self.aux_loss == "none":
            return out
        if self.aux_over == "group":
            self._sum_over_ranks(counts_E)
        loss = load_balancing_loss(scores, topk_idx, counts_E)
        self.last_aux_loss = loss.detach()
        return _WithLoss.apply(out, self.aux_coefficient * loss)  # type: ignore[no-any-return]

    def _sum_over_ranks(self, tensor: Tensor) -> None:
        if self.group.world_size > 1:
            dist.all_reduce(tensor, group=self.group.process_group)

    @torch.no_grad()
    def update_correction_bias(self, rate: float = 1e-3) -> None:
        """Steers towards experts that had less than the mean load, over all ranks, since the last call. Collective.

        One all-reduce of E numbers over ``group.process_group``; once a step is meant, outside of forward and backward.
        """
        load = self.load.clone()
        self._sum_over_ranks(load)
        self.router.update_correction_bias(load, rate)
        self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        super()._apply(fn, recurse)
        self.load = fn(self.load)
        return self

    def extra_repr(self) -> str:
        group, experts = self.group, self.group.local_experts
        own = f"{experts[0]}..{experts[-1]}" if experts else "none"
        parts = [
            f"{self.hidden_size} -> {self.inner_size} x {group.num_experts}",
            f"rank {group.rank} of {group.world_size}: experts {own}",
            str(self.form["activation"]) + (" gated" if self.form["gated"] else ""),
        ]
        if self.gate_up_bias is not None:
            parts.append("biased")
        if self.aux_loss != "none":
            parts.append(f"{self.aux_loss} loss over the {self.aux_over} times {self.aux_coefficient:g}")
        if self.recompute:
            parts.append("recomputed")
        if self.tag is not None:
            parts.append(f"tag {self.tag!r}")
        return ", ".join(parts)


class _WithLoss(torch.autograd.Function):
    """Hands ``out`` on, and has backward begin at ``loss`` as well."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.loss_dtype)


def _generator(seed: int, what: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {what}".encode(), digest_size=7).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))


@torch.no_grad()
def _fill(parameter: Tensor, inputs: int, generator: torch.Generator | None) -> None:
    """Uniform in +-1 / sqrt(inputs); drawn in float32, so that every dtype gets the same values."""
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    bound = 1 / math.sqrt(inputs)
    parameter.copy_(drawn.uniform_(-bound, bound, generator=generator))


def _activate(hidden: Tensor, *, activation: str, gated: bool, limit: float, alpha: float) -> Tensor:
    """What the operator does between its two products: [T, W] -> [T, I], gate and up side by side."""
    gate, up = hidden.chunk(2, dim=-1) if gated else (hidden, None)
    if activation == "clamped":
        assert up is not None
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        value = gate * (alpha * gate).sigmoid()
    elif activation == "silu":
        value = F.silu(gate)
    elif activation == "gelu":
        value = F.gelu(gate)
    elif activation == "gelu_tanh":
        value = F.gelu(gate, approximate="tanh")
    else:
        value = F.relu(gate)
        value = value * value if activation == "relu2" else value
    return value if up is None else value * up
