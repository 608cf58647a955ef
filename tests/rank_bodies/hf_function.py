"""Rank bodies: ``experts_implementation="moe_a2a"`` of transformers 5.0 to 5.22, against the same model in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankContext
from torch import nn

import moe_a2a
from rank_bodies.hf import CLOSE, compare_gradients, counted, experts_of, explained, ids_of


def load(folder: str) -> Any:
    """A saved model with the argument that this is about."""
    from transformers import AutoModelForCausalLM

    import moe_a2a.integrations.transformers  # noqa: F401  (registers)

    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moe_a2a")


def plain(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def at_load(ctx: RankContext, folder: str, fused: bool, saved: str) -> str:
    """Steps of an optimizer that was made before the first forward; then what a state dict says, and one that is whole."""
    model, alone = load(folder), plain(folder)
    optimizer, reference = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone))
    for step in range(3):
        batches = [ids_of((rank + step) % 4) for rank in range(ctx.world_size)]
        optimizer.zero_grad()
        reference.zero_grad()
        ctx.jitter(3)
        with counted() as calls:
            out = model(batches[ctx.rank], labels=batches[ctx.rank])
            out.logits.pow(2).sum().mul(1e-3).backward()
        layers = len(experts_of(model))
        # The first call of each layer came by the function, and isn't lost.
        assert calls == ({"moe": layers, "dispatch": 0} if fused else {"moe": 0, "dispatch": layers}), calls
        for rank, ids in enumerate(batches):
            whole = alone(ids, labels=ids)
            whole.logits.pow(2).sum().mul(1e-3).backward()
            if rank == ctx.rank:
                torch.testing.assert_close(out.logits, whole.logits, **CLOSE)
        compare_gradients(ctx, model, alone)
        own = {name for name, _ in moe_a2a.expert_parameters(model)}
        for name, value in model.named_parameters():
            if name not in own and value.grad is not None:
                dist.all_reduce(value.grad, group=ctx.process_group)
        optimizer.step()
        reference.step()
    said = explained(model)
    with pytest.raises(RuntimeError, match="a state dict is a part of the model"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="a state dict is a part of the model"):
        model.save_pretrained(saved)
    moe_a2a.convert(model)
    gathered = moe_a2a.full_state_dict(model)
    model.save_pretrained(saved)
    if ctx.rank == 0:
        read = plain(saved).state_dict()
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(gathered[key], value, **CLOSE)
            assert torch.equal(read[key], gathered[key]), key
    return said


def first_call_compiled(ctx: RankContext, folder: str) -> None:
    """A forward that is compiled can't be the first."""
    model = load(folder)
    experts = next(iter(experts_of(model).values()))
    width = model.config.hidden_size
    x, idx, weights = torch.randn(3, width), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with pytest.raises(
        Exception, match=r"call\s+moe_a2a.convert\(model, max_tokens=...\) before torch.compile"
    ):
        torch.compile(experts, backend="eager", fullgraph=True)(x, idx, weights)
    assert experts.num_experts == 8


def first_call_in_inference_mode(ctx: RankContext, folder: str) -> None:
    """Parameters that were sliced there can be trained nevertheless."""
    model, alone = load(folder), plain(folder)
    ids = ids_of(ctx.rank)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, alone(ids).logits, **CLOSE)
    out = model(ids, labels=ids)
    out.loss.backward()
    for rank in range(ctx.world_size):
        alone(ids_of(rank), labels=ids_of(rank)).loss.backward()
    compare_gradients(ctx, model, alone)


def sharded_before(ctx: RankContext, folder: str) -> None:
    """FSDP2 around experts that are still whole would be undone by slicing; it is refused."""
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = load(folder)
    fully_shard(model)
    with pytest.raises(moe_a2a.errors.BadValue, match="is a DTensor; convert first and shard later"):
        model(ids_of(ctx.rank))
