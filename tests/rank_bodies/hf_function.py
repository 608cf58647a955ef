"""Rank bodies: ``experts_implementation="moe_a2a"`` of transformers 5.0 to 5.22, against the same model in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankContext

import moe_a2a
from rank_bodies.hf import (
    CLOSE,
    compare_gradients,
    counted,
    equal_states,
    experts_of,
    explained,
    ids_of,
    plain,
)


def load(folder: str) -> Any:
    """A saved model with the argument that this is about."""
    from transformers import AutoModelForCausalLM

    import moe_a2a.integrations.transformers  # noqa: F401  (registers)

    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moe_a2a")


def refused(*words: str) -> Any:
    return pytest.raises(moe_a2a.errors.BadValue, match=".*".join(words))


def at_load(ctx: RankContext, folder: str, fused: bool, saved: str) -> str:
    """Forwards; then what training and a state dict say, both after convert, and a model that is whole again."""
    model, alone = load(folder), plain(folder)
    ids = ids_of(ctx.rank)
    with refused("a forward that records gradients"):
        model(ids)
    for turn, mode in enumerate((torch.inference_mode, torch.no_grad)):
        ids = ids_of((ctx.rank + turn) % 4)
        ctx.jitter(3)
        with mode(), counted() as calls:
            torch.testing.assert_close(model(ids).logits, alone(ids).logits, **CLOSE)
        layers = len(experts_of(model))
        # The first call of each layer came by the function, and isn't lost.
        assert calls == ({"moe": layers, "dispatch": 0} if fused else {"moe": 0, "dispatch": layers}), calls
    said = explained(model)
    with refused("a forward that records gradients"):
        model(ids)
    with refused("a state dict is a part of the model"):
        model.state_dict()
    with refused("a state dict is a part of the model"):
        model.save_pretrained(saved)
    moe_a2a.convert(model)
    batches = [ids_of(rank) for rank in range(ctx.world_size)]
    model(batches[ctx.rank]).logits.pow(2).sum().backward()
    for one in batches:
        alone(one).logits.pow(2).sum().backward()
    compare_gradients(ctx, model, alone)
    model.save_pretrained(saved)
    equal_states(plain(saved).state_dict(), alone.state_dict())
    return said


def first_call_compiled(ctx: RankContext, folder: str) -> None:
    """A forward that is compiled can't be the first."""
    model = load(folder)
    experts = next(iter(experts_of(model).values()))
    x, idx, weights = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"moe_a2a.convert\(model, max_tokens=...\) before torch.compile"),
    ):
        torch.compile(experts, backend="eager", fullgraph=True)(x, idx, weights)
    assert experts.num_experts == 8


def sharded(ctx: RankContext, folder: str) -> None:
    """With FSDP2 around whole experts, what a forward slices isn't what is trained: neither training nor convert is let in."""
    from torch.distributed.fsdp import fully_shard

    model: Any = load(folder)
    fully_shard(model)
    ids = ids_of(ctx.rank)
    with refused("a forward that records gradients"):
        model(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(folder)(ids).logits, **CLOSE)
    with refused("a forward that records gradients"):
        model(ids)
    with refused("sharded by fully_shard.* convert first and shard later"):
        moe_a2a.convert(model)
