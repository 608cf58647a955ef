"""Rank bodies: what docs/transformers.md says, done as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import RankContext
from tiny_models import make_model

import moe_a2a
from moe_a2a.integrations.experts import LAYER
from rank_bodies.hf import CLOSE, counted, experts_of, ids_of, own_part, plain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"
ADAM, SGD = (
    "AdamW(model.parameters(), lr=1e-3, foreach=False)",
    "SGD(model.parameters(), lr=0.5, foreach=False)",
)


def recipe(ctx: RankContext, path: str, saved: str, optimizer: str) -> None:
    """The page's program, on batches of two tensor-parallel pairs, against one process with both batches."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert ADAM in code
    code = code.replace(ADAM, optimizer)
    pairs = [[ids_of(pair + turn) for turn in range(3)] for pair in range(2)]
    names: dict[str, Any] = {"path": path, "saved": saved, "batches": pairs[ctx.rank // 2]}
    with counted() as calls:
        exec(compile(code, str(PAGE), "exec"), names)
    layers = len(experts_of(names["model"]))
    assert calls == {"moe": 2 * 3 * layers, "dispatch": 0}, calls  # forward, and again in backward
    alone = plain(path).train()
    reference = eval(optimizer.replace("model.", "alone."), {**vars(torch.optim), "alone": alone})
    for both in zip(*pairs, strict=True):
        for ids in both:
            (alone(ids, labels=ids).loss / 2).backward()
        reference.step()
        reference.zero_grad()
    before, after = plain(path).state_dict(), plain(saved).state_dict()
    for name, value in alone.state_dict().items():
        # Where a gradient is next to nothing, Adam makes a whole step of its sign.
        moved, apart = (value - before[name]).norm(), (after[name] - value).norm()
        assert apart <= (1e-4 if optimizer == SGD else 0.05) * moved, f"{name}: {apart} of {moved}"


def optimizer_made_before(ctx: RankContext) -> None:
    """convert changes the size of parameters, not which they are."""
    model, alone = make_model("mixtral"), make_model("mixtral")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
    moe_a2a.convert(model, ctx.process_group)
    ids = [ids_of(rank) for rank in range(ctx.world_size)]
    model(ids[ctx.rank], labels=ids[ctx.rank]).loss.backward()
    for one in ids:
        alone(one, labels=one).loss.backward()
    own = dict(moe_a2a.expert_parameters(model))
    for name, value in model.named_parameters():
        if name not in own and value.grad is not None:
            dist.all_reduce(value.grad, group=ctx.process_group)
    for optimizer in optimizers:
        optimizer.step()
    layers = {name: getattr(module, LAYER) for name, module in experts_of(model).items()}
    values = dict(alone.named_parameters())
    for name, value in model.named_parameters():
        layer = layers.get(name.rpartition(".")[0])
        want = values[name] if layer is None else own_part(layer, values[name])
        torch.testing.assert_close(value, want, **CLOSE)
    gathered = moe_a2a.full_state_dict(model)
    if ctx.rank == 0:
        assert gathered.keys() == alone.state_dict().keys()
