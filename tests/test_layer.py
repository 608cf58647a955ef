"""The layer: parity with plain torch on 1 to 4 ranks, its router, balancing, and how it gets on with the rest of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import RankPool
from rank_bodies import layer as bodies
from rank_bodies.inputs import assert_bits
from rank_bodies.layer import LayerCase, naive_aux, naive_choice
from torch import Tensor

import moe_a2a
from moe_a2a import MoE, Router, errors, load_balancing_loss

DEEPSEEK = {
    "scores": "sigmoid",
    "expert_groups": 4,
    "top_groups": 2,
    "correction_bias": True,
    "routed_scale": 2.5,
}
CASES = {
    "one rank": LayerCase((9,)),
    "two": LayerCase((9, 6), options={"norm_topk": False}),
    "three": LayerCase((5, 0, 8), options={"shared_inner": 10, "bias": True}),
    "four": LayerCase(
        (4, 7, 0, 3), options={"aux_loss": "switch", "aux_coefficient": 0.5, "aux_over": "group"}
    ),
    "float64": LayerCase(
        (6, 5), dtype="float64", options={"shared_inner": 6, "scores": "sigmoid", "bias": True}
    ),
    "bfloat16": LayerCase((9, 7), dtype="bfloat16", options={"shared_inner": 6}),
    "wide parameters": LayerCase((9, 7), x_dtype="bfloat16", options={"shared_inner": 6, "bias": True}),
    "groups": LayerCase((7, 9), experts=8, corrected=True, options=DEEPSEEK),
    "groups, one rank": LayerCase((9,), experts=12, top_k=4, corrected=True, options=DEEPSEEK),
    "groups, loss": LayerCase(
        (6, 4, 5),
        experts=8,
        corrected=True,
        dtype="float64",
        options={**DEEPSEEK, "aux_loss": "switch", "aux_coefficient": 0.3, "aux_over": "group"},
    ),
    "own loss": LayerCase(
        (6, 0, 5),
        options={"aux_loss": "switch", "aux_coefficient": 0.3, "shared_inner": 6, "norm_topk": False},
    ),
    "more ranks than experts": LayerCase((4, 3, 2, 5), experts=3, options={"bias": True, "shared_inner": 6}),
    "no tokens": LayerCase(
        (0, 0), options={"aux_loss": "switch", "aux_over": "group", "shared_inner": 6, "bias": True}
    ),
    "clamped": LayerCase(
        (5, 6), options={"activation": "clamped", "interleaved": True, "limit": 0.4, "bias": True}
    ),
    "clamped, shared": LayerCase((5, 6), options={"activation": "clamped", "limit": 0.4, "shared_inner": 6}),
    "gelu": LayerCase((5, 6), options={"activation": "gelu", "gated": False, "shared_inner": 6}),
    "gelu_tanh": LayerCase((5, 6), options={"activation": "gelu_tanh", "shared_inner": 6}),
    "relu": LayerCase((5, 6), options={"activation": "relu", "shared_inner": 6}),
    "relu2": LayerCase((5, 6), options={"activation": "relu2", "gated": False, "shared_inner": 6}),
    "recomputed": LayerCase((9, 4), options={"recompute": True, "shared_inner": 6, "bias": True}),
    "fewer experts a token": LayerCase(
        (9, 4), top_k=3, options={"top_k": 1, "norm_topk": False, "tag": "a layer"}
    ),
    "collective": LayerCase((5, 7, 0), transport="collective", options={"shared_inner": 6, "bias": True}),
    "waves": LayerCase((9, 7), recv_rows=3, options={"shared_inner": 6, "bias": True}),
    "push": LayerCase((9, 0, 7), protocol="push", options={"aux_loss": "switch", "aux_over": "group"}),
}


@pytest.mark.parametrize("name", CASES)
def test_parity(pool: RankPool, name: str) -> None:
    """Outputs, auxiliary loss and all gradients, three steps in a row."""
    case = CASES[name]
    rows = pool.run(len(case.tokens), bodies.parity, case)
    assert rows[0] == rows[-1] and sum(rows[0]) == 3 * sum(case.tokens) * case.options.get(
        "top_k", case.top_k
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_idle_expert_has_zero_gradients(pool: RankPool, ranks: int) -> None:
    case = LayerCase((9, 4, 0, 30)[:ranks], idle=True, options={"bias": True})
    pool.run(ranks, bodies.idle_experts, replace(case, tokens=(*case.tokens[:-1], 40)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_begins_alike_on_any_number_of_ranks(pool: RankPool, dtype: str) -> None:
    """Bit for bit, whatever the number of ranks; another seed makes another layer, and no two experts are alike."""
    case = LayerCase((1,) * 4, dtype=dtype, options={"bias": True, "shared_inner": 5})
    first, *others = (
        pool.run(ranks, bodies.first_parameters, replace(case, tokens=(1,) * ranks))[-1]
        for ranks in (1, 2, 3)
    )
    for other in others:
        assert first.keys() == other.keys()
        for name, value in first.items():
            assert_bits(other[name], value, name)
    reseeded = pool.run(2, bodies.first_parameters, replace(case, tokens=(1, 1), seed=6))[0]
    for name, value in first.items():
        assert not torch.equal(reseeded[name], value)
        assert 0.5 < value.abs().max() * (12 if name.endswith("down_proj") else 16) ** 0.5 < 2.0
        if name in bodies.EXPERT_NAMES:
            assert len({tuple(expert.flatten().tolist()) for expert in value}) == case.experts


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_layer_begins_alike_in_any_dtype(pool: RankPool, dtype: str) -> None:
    """Up to the rounding of its own type; in bfloat16 the router is float32 all the same."""
    case = LayerCase((1, 1), options={"bias": True, "shared_inner": 5})
    wanted = pool.run(2, bodies.first_parameters, case)[0]
    for name, value in pool.run(2, bodies.first_parameters, replace(case, dtype=dtype))[0].items():
        narrow = dtype == "bfloat16" and name != "router.weight"
        assert_bits(value, wanted[name].bfloat16().double() if narrow else wanted[name], name)


@pytest.mark.parametrize("transport", ["cpu-shm", "collective"])
def test_checkpoints_give_the_same(pool: RankPool, transport: str) -> None:
    options = {"aux_loss": "switch", "aux_coefficient": 0.5, "shared_inner": 6, "aux_over": "group"}
    case = LayerCase((6, 9), transport=transport, options=options)
    pool.run(2, bodies.checkpointed, case)


@pytest.mark.parametrize("tokens", [(6,), (6, 0, 9)])
def test_state_dict(pool: RankPool, tokens: tuple[int, ...]) -> None:
    options = {"correction_bias": True, "bias": True, "shared_inner": 6, "aux_loss": "switch"}
    for names in pool.run(
        len(tokens), bodies.saved_and_loaded, LayerCase(tokens, corrected=True, options=options)
    ):
        assert names == [
            *bodies.EXPERT_NAMES,
            "router.weight",
            "router.correction_bias",
            "shared.gate_up_proj",
            "shared.down_proj",
        ]


@pytest.mark.parametrize("transport", ["cpu-shm", "collective"])
def test_autocast(pool: RankPool, transport: str) -> None:
    options = {"aux_loss": "switch", "shared_inner": 6, "bias": True}
    pool.run(2, bodies.under_autocast, LayerCase((6, 9), transport=transport, options=options))


@pytest.mark.parametrize("recompute", [False, True])
def test_inference_then_training(pool: RankPool, recompute: bool) -> None:
    options = {"shared_inner": 6, "correction_bias": True, "recompute": recompute}
    pool.run(2, bodies.inference_then_training, LayerCase((6, 9), options=options))


@pytest.mark.parametrize("tokens", [(200,), (80, 0, 120)])
def test_the_correction_balances(pool: RankPool, tokens: tuple[int, ...]) -> None:
    options = {**DEEPSEEK, "expert_groups": 1, "top_groups": 1}
    case = LayerCase(tokens, experts=8, corrected=True, options=options)
    first, *others = pool.run(len(tokens), bodies.balanced, case, 30)
    for other in others:
        assert_bits(other[0], first[0], "correction")
    assert first[1] > 2 and first[2] < 1.4, (
        f"largest load / mean: {first[1]:.2f} before, {first[2]:.2f} after"
    )


# ------------------------------------------------------------------------------------------------------ without other ranks


def near(got: Tensor, wanted: Tensor, relative: float, absolute: float = 0.0) -> None:
    assert got.shape == wanted.shape
    assert ((got - wanted).abs() <= relative * wanted.abs() + absolute).all(), f"{got} is not {wanted}"


def router(case: LayerCase, seed: int = 0, **changes: Any) -> tuple[Router, Tensor]:
    torch.manual_seed(seed)
    made = Router(case.hidden, case.experts, case.top_k, **{**case.options, **changes})
    return made, torch.randn(300, case.hidden)


@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (4, 2), (4, 3), (4, 4), (12, 3), (6, 3)])
@pytest.mark.parametrize("corrected", [False, True])
def test_group_limited_choice(groups: tuple[int, int], corrected: bool) -> None:
    """Against the loop. A large correction makes scores negative, which must not bring in experts of other groups."""
    options = {"scores": "sigmoid", "expert_groups": groups[0], "top_groups": groups[1]}
    case = LayerCase((), experts=12, top_k=2, options={**options, "correction_bias": corrected})
    made, x = router(case)
    if made.correction_bias is not None:
        made.correction_bias += torch.linspace(-2, 0, 12)[torch.randperm(12)]
    routed = made(x)
    assert routed.topk_idx.tolist() == naive_choice(routed.scores, made.correction_bias, case)
    if groups[1] < groups[0] < 12:  # of groups of one, the best are the best experts
        free, _ = router(case, expert_groups=1, top_groups=1)
        assert not torch.equal(free.choose(routed.scores), routed.topk_idx), "the groups made no difference"


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm_topk", [False, True])
def test_the_correction_steers_the_choice_and_not_the_weights(scores: str, norm_topk: bool) -> None:
    case = LayerCase((), options={"scores": scores, "norm_topk": norm_topk, "routed_scale": 1.5})
    made, x = router(case, correction_bias=True)
    plain = made(x)
    assert made.correction_bias is not None
    made.correction_bias[3] += 10.0
    steered = made(x)
    assert_bits(steered.scores, plain.scores, "scores")
    assert (steered.topk_idx == 3).any(1).all() and not (plain.topk_idx == 3).any(1).all()
    logits = x.double() @ made.weight.detach().double().T
    naive = logits.sigmoid() if scores == "sigmoid" else logits.softmax(1)
    for token, ids in enumerate(steered.topk_idx.tolist()):
        weights = naive[token, ids] * 1.5
        weights = weights / (naive[token, ids].sum() if norm_topk else 1)
        near(steered.topk_weights[token].double(), weights, 1e-5)
    assert not any(p is made.correction_bias for p in made.parameters())


def test_the_router_is_float32() -> None:
    """Whatever comes in, and also after the module was made bfloat16; its correction keeps its bits."""
    made, x = router(LayerCase(()), correction_bias=True)
    assert made.correction_bias is not None
    made.correction_bias += 1 / 3
    wanted = made(x.bfloat16().float())
    assert_bits(made(x.bfloat16()).topk_weights, wanted.topk_weights, "weights")
    with torch.autocast("cpu", torch.bfloat16):
        assert_bits(made(x.bfloat16()).scores, wanted.scores, "scores")
    narrow = made.bfloat16()
    assert narrow.correction_bias is not None and narrow.correction_bias.dtype == torch.float32
    assert (narrow.correction_bias == torch.tensor(1 / 3)).all()
    assert narrow.weight.dtype == torch.bfloat16 and narrow(x.bfloat16()).topk_weights.dtype == torch.float32
    assert made.double()(x.double()).topk_weights.dtype == torch.float64


def test_ties_are_resolved_by_the_tokens_scores_alone() -> None:
    """The same scores among other tokens, and in another place, choose the same."""
    made, _ = router(LayerCase((), experts=64, top_k=6))
    scores = torch.randint(0, 4, (200, 64)).float()
    whole = made.choose(scores)
    for rows in (slice(0, 1), slice(3, 10), slice(57, 200)):
        assert_bits(made.choose(scores[rows].clone()), whole[rows], "choice")


@pytest.mark.parametrize("top_k", [1, 3])
def test_load_balancing_loss(top_k: int) -> None:
    """Against the loop: value and gradient; shares of parts add up; 1 for an even load, E / K where K experts have all."""
    torch.manual_seed(1)
    scores = torch.rand(40, 6, dtype=torch.float64, requires_grad=True)
    idx = scores.topk(top_k, 1).indices
    loss, naive = load_balancing_loss(scores, idx), naive_aux(scores, idx.tolist())
    near(loss, naive, 1e-12)
    (got,), (wanted,) = torch.autograd.grad(loss, scores), torch.autograd.grad(naive, scores)
    near(got, wanted, 1e-9, 1e-15)
    counts = idx.flatten().bincount(minlength=6)
    parts = [load_balancing_loss(scores[a:b], idx[a:b], counts) for a, b in ((0, 7), (7, 7), (7, 40))]
    near(torch.stack(parts).sum(), loss, 1e-12)
    even = torch.arange(6 * top_k).view(-1, top_k) % 6
    assert float(load_balancing_loss(torch.ones(6, 6), even)) == pytest.approx(1.0)
    one = torch.zeros(5, 6)
    one[:, :top_k] = 1.0
    assert float(load_balancing_loss(one, one.topk(top_k, 1).indices)) == pytest.approx(6 / top_k)
    none = torch.zeros(0, 6, requires_grad=True)
    nothing = load_balancing_loss(none, torch.zeros(0, top_k, dtype=torch.int64))
    nothing.backward()
    assert float(nothing.detach()) == 0.0 and none.grad is not None


def test_a_load_at_the_mean_moves_nothing() -> None:
    made, _ = router(LayerCase((), experts=3), correction_bias=True)
    made.update_correction_bias(torch.tensor([4, 7, 10]), 0.5)
    assert made.correction_bias is not None and made.correction_bias.tolist() == [0.5, 0.0, -0.5]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"scores": "tanh"}, "scores"),
    ({"expert_groups": 3}, "expert_groups"),
    ({"expert_groups": 0}, "expert_groups"),
    ({"expert_groups": 4, "top_groups": 5}, "top_groups"),
    ({"expert_groups": 4, "top_groups": 0}, "top_groups"),
    ({"expert_groups": 8, "top_groups": 1}, "top_k"),
    ({"top_k": 3}, "top_k"),
    ({"top_k": 0}, "top_k"),
    ({"activation": "swish"}, "activation"),
    ({"activation": "clamped", "gated": False}, "gated"),
    ({"aux_loss": "z"}, "aux_loss"),
    ({"aux_over": "all"}, "aux_over"),
]


@pytest.mark.parametrize(("options", "word"), BAD)
def test_bad_arguments(options: dict[str, Any], word: str) -> None:
    with moe_a2a.EPGroup(num_experts=8, top_k=2, max_tokens=4, hidden_size=8) as group:
        with pytest.raises(errors.BadValue, match=word):
            MoE(group, 4, **options)
        with pytest.raises(errors.BadValue, match="correction_bias"):
            MoE(group, 4).update_correction_bias()
