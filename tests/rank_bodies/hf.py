"""Rank bodies: models of transformers with their experts spread over ranks, against the same models in one piece."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pool import RankContext
from tiny_models import make_ids, make_model
from torch import Tensor, nn

import moe_a2a
from moe_a2a.integrations import experts as spread

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
SIZES = ((2, 7), (1, 5), (3, 4), (1, 2))  # batch and length of each rank


def ids_of(rank: int) -> Tensor:
    ids: Tensor = make_ids(rank, *SIZES[rank])
    return ids


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often the fused operator was called, and how often dispatch for the model's own experts."""
    calls = {"moe": 0, "dispatch": 0}

    def counting(name: str) -> Callable[..., Any]:
        whole = getattr(spread, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return whole(*args, **kwargs)

        return call

    with mock.patch.multiple(spread, **{name: counting(name) for name in calls}):
        yield calls


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """A model's experts modules, converted or not."""
    return {name: module for name, module in model.named_modules() if spread.follows_interface(module)}


def own_part(layer: spread.ExpertLayer, whole: Tensor) -> Tensor:
    own = layer.local_experts
    return whole[own.start : own.stop]


def compare_gradients(ctx: RankContext, model: nn.Module, alone: nn.Module) -> None:
    """Experts' gradients are this rank's part of the whole model's; the sum of the others' over ranks is, too."""
    own = dict(moe_a2a.expert_parameters(model))
    wanted = dict(alone.named_parameters())
    layers = {name: getattr(module, spread.LAYER) for name, module in experts_of(model).items()}
    for name, value in model.named_parameters():
        want = wanted[name].grad
        if want is None:
            assert value.grad is None or not value.grad.any(), name
            continue
        assert value.grad is not None, name
        assert want.abs().max() > 1e-7, name
        if name in own:
            want = own_part(layers[name.rpartition(".")[0]], want)
            got = value.grad
        else:
            got = value.grad.clone()
            if ctx.world_size > 1:
                dist.all_reduce(got, group=ctx.process_group)
        # Entries differ in size by orders of magnitude, with what they are sums of.
        assert (got - want).norm() <= 1e-5 * want.norm(), f"{name}: {(got - want).norm() / want.norm()}"


def parity(ctx: RankContext, family: str, changes: dict[str, Any], fused: bool, steps: int = 2) -> str:
    """Logits, losses and gradients of uneven batches. Returns what explain says."""
    alone = make_model(family, **changes)
    model = moe_a2a.convert(make_model(family, **changes), ctx.process_group)
    for step in range(steps):
        batches = [ids_of((rank + step) % len(SIZES)) for rank in range(ctx.world_size)]
        model.zero_grad()
        alone.zero_grad()
        ctx.jitter(3)
        mine = batches[ctx.rank]
        with counted() as calls:
            out = model(mine, labels=mine)
            out.logits.pow(2).sum().backward()
        layers = len(experts_of(model))
        assert calls == ({"moe": layers, "dispatch": 0} if fused else {"moe": 0, "dispatch": layers}), calls
        for rank, ids in enumerate(batches):
            whole = alone(ids, labels=ids)
            whole.logits.pow(2).sum().backward()
            if rank == ctx.rank:
                torch.testing.assert_close(out.logits, whole.logits, **CLOSE)
                torch.testing.assert_close(out.loss, whole.loss, **CLOSE)
        compare_gradients(ctx, model, alone)
    return explained(model)


def explained(model: nn.Module) -> str:
    import io

    text = io.StringIO()
    moe_a2a.explain(model, text)
    return text.getvalue()


MESHES: dict[str, dict[str, Any]] = {
    "experts over all": {"fsdp_size": 4, "ep_size": 4},
    "experts over pairs": {"fsdp_size": 4, "ep_size": 2},
    "tensor parallel": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "tensor parallel, experts over it": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
}


def load(folder: str, mesh: dict[str, Any], implementation: str = "moe_a2a") -> nn.Module:
    """A saved model, sharded by transformers itself."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import moe_a2a.integrations.transformers  # noqa: F401  (registers)

    config = DistributedConfig(**mesh, ep_implementation=implementation)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    return model


def whole(value: Any) -> Tensor:
    """A tensor that may be sharded, in one piece."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def loaded(ctx: RankContext, folder: str, mesh_name: str, saved: str | None) -> str:
    """``ep_implementation="moe_a2a"`` against the plain model, and against "all_to_all"; saves, if asked to."""
    from transformers import AutoModelForCausalLM

    mesh = MESHES[mesh_name]
    shared = mesh.get("tp_size", 1)  # ranks that hold the same batch
    batches = 4 // shared
    alone = AutoModelForCausalLM.from_pretrained(folder)
    model, other = load(folder, mesh), load(folder, mesh, "all_to_all")
    mine = ctx.rank // shared
    for turn in range(2):
        ctx.jitter(3)
        ids = [ids_of((batch + turn) % len(SIZES)) for batch in range(batches)]
        model.zero_grad()
        alone.zero_grad()
        with counted() as calls:
            out = model(ids[mine])
            out.logits.pow(2).sum().backward()
        assert calls["moe"] == len(experts_of(model)) and not calls["dispatch"], calls
        with torch.no_grad():
            torch.testing.assert_close(other(ids[mine]).logits, out.logits, rtol=1e-5, atol=1e-6)
        for batch, one in enumerate(ids):
            result = alone(one)
            (result.logits.pow(2).sum() / batches).backward()  # FSDP2 averages
            if batch == mine:
                torch.testing.assert_close(out.logits, result.logits, **CLOSE)
        for (name, value), want in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert value.grad is not None and want.grad is not None, name
            got = whole(value.grad)
            assert (got - want.grad).norm() <= 1e-5 * want.grad.norm(), f"{name}: {got.norm()}, {want.grad.norm()}"
    if saved is not None:
        model.save_pretrained(saved)  # type: ignore[operator]
    return explained(model)


def save_tiny(folder: str, family: str, **changes: Any) -> None:
    make_model(family, **changes).save_pretrained(folder)
