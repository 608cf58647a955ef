"""Rank bodies: models of transformers with their experts spread over ranks, against the same models in one piece."""

from __future__ import annotations

import contextlib
import copy
import io
import re
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
from moe_a2a.integrations import models

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
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

    with contextlib.ExitStack() as stack:
        for name in calls:
            stack.enter_context(mock.patch.object(spread, name, counting(name)))
        yield calls


def experts_of(model: nn.Module) -> dict[str, Any]:
    """A model's experts modules, converted or not."""
    return {name: module for name, module in model.named_modules() if spread.follows_interface(module)}


def windows_of(model: nn.Module) -> Any:
    return next(iter(experts_of(model).values()))._moe_a2a.windows


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
    for name, experts in experts_of(model).items():
        # What convert(max_tokens=...) would take from the configuration.
        assert models._top_k(name, experts) == experts._moe_a2a.windows.group.top_k
    return explained(model)


def explained(model: nn.Module) -> str:
    text = io.StringIO()
    moe_a2a.explain(model, text)
    return text.getvalue()


MESHES: dict[str, dict[str, Any]] = {
    "experts over all": {"fsdp_size": 4, "ep_size": 4},
    "experts over pairs": {"fsdp_size": 4, "ep_size": 2},
    "tensor parallel": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "tensor parallel, experts over it": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
}


def load(folder: str, mesh: dict[str, Any], implementation: str = "moe_a2a") -> Any:
    """A saved model, sharded by transformers itself."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import moe_a2a.integrations.transformers  # noqa: F401  (registers)

    config = DistributedConfig(**mesh, ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def whole(value: Any) -> Tensor:
    """A tensor that may be sharded, in one piece."""
    tensor: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor


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
            assert (got - want.grad).norm() <= 1e-5 * want.grad.norm(), (
                f"{name}: {got.norm()}, {want.grad.norm()}"
            )
    assert "spread by something else" in explained(other)
    if saved is not None:
        model.save_pretrained(saved)
    return explained(model)


def loaded_family(ctx: RankContext, folder: str) -> str:
    """A family on two ranks by the argument at load: logits and the experts' gradients, which FSDP2 averages."""
    alone, model = plain(folder), load(folder, {"fsdp_size": 2, "ep_size": 2})
    for rank in range(2):
        want = alone(ids_of(rank)).logits
        (want.pow(2).sum() / 2).backward()
        if rank == ctx.rank:
            with counted() as calls:
                got = model(ids_of(rank)).logits
                got.pow(2).sum().backward()
            assert calls == {"moe": len(experts_of(model)), "dispatch": 0}
            torch.testing.assert_close(got, want, **CLOSE)
    for name, value in model.named_parameters():
        if "experts" in name:
            got, want = whole(value.grad), alone.get_parameter(name).grad
            assert (got - want).norm() <= 1e-5 * want.norm(), name
    return explained(model)


def plain(folder: str) -> Any:
    """A saved model, unswapped, with what was missing or left over checked."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def equal_states(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for key, value in want.items():
        assert got[key].shape == value.shape and torch.equal(got[key], value), key


def convert_and_save(ctx: RankContext, folder: str, saved: str) -> None:
    """A checkpoint into a converted model whose experts are NaN, and out of it again, bit for bit."""
    alone = plain(folder)
    state = alone.state_dict()
    model = moe_a2a.convert(make_model_like(alone), ctx.process_group)
    with torch.no_grad():
        for _, value in moe_a2a.expert_parameters(model):
            value.fill_(float("nan"))
    model.load_state_dict(state, strict=True)
    for name, value in moe_a2a.expert_parameters(model):
        assert len(value) == len(state[name]) // 4
        assert value.untyped_storage().nbytes() == value.numel() * value.itemsize, "others' experts are kept"
    assert not any(value.isnan().any() for value in model.parameters())
    ids = ids_of(ctx.rank)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, alone(ids).logits, **CLOSE)
    gathered = moe_a2a.full_state_dict(model)
    if ctx.rank == 0:
        equal_states(gathered, state)
    else:
        assert not gathered
    model.load_state_dict(model.state_dict(), strict=True)  # its own, too
    model.save_pretrained(saved)
    equal_states(plain(saved).state_dict(), state)


def make_model_like(model: Any) -> Any:
    """A model of the same configuration with other values."""
    return type(model)(model.config).eval()


def read_on_two(ctx: RankContext, folder: str, saved: str, native: bool) -> None:
    """What four ranks have saved: converted on two, loaded by transformers on two, and in one piece."""
    alone, again = plain(folder), plain(saved)
    equal_states(again.state_dict(), alone.state_dict())
    those: list[Any] = [moe_a2a.convert(again, ctx.process_group)]
    if native:
        those.append(load(saved, {"fsdp_size": 2, "ep_size": 2}))
    ids = ids_of(ctx.rank)
    for model in those:
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, alone(ids).logits, **CLOSE)
        gathered = moe_a2a.full_state_dict(model)
        if ctx.rank == 0:
            equal_states(gathered, alone.state_dict())


def save_tiny(folder: str, family: str, fused: bool = False) -> None:
    """A checkpoint as the family publishes its own (Mixtral: a tensor for each expert), or with the experts in one tensor."""
    make_model(family).save_pretrained(folder, save_original_format=not fused)


def saved_names(folder: str) -> list[str]:
    """Keys in a saved model's file."""
    from safetensors import safe_open  # type: ignore[import-not-found, unused-ignore]

    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        return list(file.keys())


def generated(ctx: RankContext, folder: str, native: bool) -> None:
    """Greedy text from prompts of other lengths on each rank, and of other lengths itself."""
    alone = plain(folder)
    mesh = {"fsdp_size": 2, "ep_size": 2}
    model: Any = load(folder, mesh) if native else moe_a2a.convert(plain(folder), ctx.process_group)
    options = {"do_sample": False, "max_new_tokens": 3 + 4 * ctx.rank, "eos_token_id": None}
    ids = ids_of(ctx.rank)
    # The left-hand prompt is padded.
    mask = torch.ones_like(ids)
    mask[0, :2], ids[0, :2] = 0, 0
    want = alone.generate(ids, attention_mask=mask, **options)
    got = model.generate(ids, attention_mask=mask, synced_gpus=True, **options)
    assert torch.equal(got, want)
    assert want.shape[1] == ids.shape[1] + 3 + 4 * ctx.rank


def router_outputs(ctx: RankContext, family: str) -> None:
    """Loss, auxiliary loss and router logits are those of the rank's own batch, with padding and without, by every flag."""
    alone, model = make_model(family), moe_a2a.convert(make_model(family), ctx.process_group)
    ids = ids_of(ctx.rank)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    for training in (True, False):
        alone.train(training)
        model.train(training)
        for wanted in (True, False):
            for attention in (None, mask):
                arguments = {"labels": ids, "attention_mask": attention, "output_router_logits": wanted}
                got, want = model(ids, **arguments), alone(ids, **arguments)
                torch.testing.assert_close(got.loss, want.loss, **CLOSE)
                assert (want.aux_loss is not None) == wanted == (got.aux_loss is not None)
                assert len(got.router_logits or ()) == len(want.router_logits or ()) == (2 if wanted else 0)
                if wanted:
                    torch.testing.assert_close(got.aux_loss, want.aux_loss, **CLOSE)
                    for mine, its in zip(got.router_logits, want.router_logits, strict=True):
                        torch.testing.assert_close(mine, its, **CLOSE)
                got.loss.backward()
                want.loss.backward()
    for name, value in alone.named_parameters():
        if "gate.weight" in name:
            mine = model.get_parameter(name).grad
            assert (mine - value.grad).norm() <= 1e-5 * value.grad.norm(), name
    options = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None, "output_router_logits": True}
    try:
        text = alone.generate(ids, **options)
    except RuntimeError as error:  # transformers 5.14.1 can't; then neither can we, on all ranks
        with raises(RuntimeError, re.escape(str(error).partition("\n")[0])):
            model.generate(ids, synced_gpus=True, **options)
    else:
        assert torch.equal(model.generate(ids, synced_gpus=True, **options), text)


def autocast(ctx: RankContext, weights: str) -> None:
    """Dtypes are the unswapped model's: of outputs, of gradients, of what the router gives."""
    dtype = getattr(torch, weights)
    alone = make_model("qwen3_moe").to(dtype)
    model = moe_a2a.convert(make_model("qwen3_moe").to(dtype), ctx.process_group)
    ids = ids_of(ctx.rank)
    seen: dict[str, list[Any]] = {"alone": [], "model": []}
    for name, one in (("alone", alone), ("model", model)):
        for experts in experts_of(one).values():
            experts.register_forward_hook(
                lambda _, inputs, output, name=name: seen[name].append((inputs, output))
            )
    with torch.autocast("cpu", torch.bfloat16):
        got, want = model(ids, labels=ids), alone(ids, labels=ids)
    for (inputs, output), (its_inputs, its_output) in zip(seen["model"], seen["alone"], strict=True):
        assert [value.dtype for value in inputs] == [value.dtype for value in its_inputs]
        assert output.dtype == its_output.dtype and output.shape == its_output.shape
        torch.testing.assert_close(output, its_output, rtol=3e-2, atol=3e-2)
    assert torch.equal(
        seen["model"][0][0][1], seen["alone"][0][0][1]
    )  # ids of the first layer, whose input is the same
    assert got.logits.dtype == want.logits.dtype and got.loss.dtype == want.loss.dtype
    torch.testing.assert_close(got.logits, want.logits, rtol=5e-2, atol=5e-2)
    got.loss.backward()
    assert all(value.grad.dtype == value.dtype == dtype for value in model.parameters())
    assert all(value.grad.isfinite().all() for value in model.parameters())


def options(ctx: RankContext) -> None:
    """Over torch.distributed, and with rows computed again in backward: the same numbers, and the options arrive."""
    wanted: dict[str, Tensor] = {}
    for chosen in ({}, {"transport": "collective"}, {"recompute": True, "timeout": 50.0, "max_tokens": 14}):
        model: Any = moe_a2a.convert(make_model("mixtral"), ctx.process_group, **chosen)
        with mock.patch.object(spread, "moe", wraps=moe_a2a.moe) as moe:
            model(ids_of(ctx.rank)).logits.pow(2).sum().backward()
        assert [call.kwargs["recompute"] for call in moe.call_args_list] == [
            chosen.get("recompute", False)
        ] * 2
        group = windows_of(model).group
        assert group.transport.name == chosen.get("transport", "cpu-shm")
        assert group.max_tokens == chosen.get("max_tokens", 16)
        for name, value in model.named_parameters():
            want = wanted.setdefault(name, value.grad)
            assert (value.grad - want).norm() <= 1e-6 * want.norm(), name
    # Later calls of convert change what they name.
    windows = windows_of(moe_a2a.convert(model, timeout=51.0))
    assert windows.recompute and windows.max_tokens == 14
    assert windows.group is None
    with torch.no_grad():
        model(ids_of(ctx.rank))
    windows = windows_of(moe_a2a.convert(model, recompute=False))
    assert windows.options["timeout"] == 51.0 and windows.group.max_tokens == 14 and not windows.recompute


def checkpointed(ctx: RankContext, reentrant: bool) -> None:
    """Gradients are, bit for bit, those without checkpointing."""
    grads = []
    for checkpoint in (False, True):
        model = moe_a2a.convert(make_model("mixtral"), ctx.process_group).train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with counted() as calls:
            model(ids_of(ctx.rank), use_cache=False).logits.pow(2).sum().backward()
        assert calls["moe"] == (4 if checkpoint else 2), calls
        grads.append({name: value.grad for name, value in model.named_parameters()})
    for name, value in grads[0].items():
        assert torch.equal(value, grads[1][name]), name


def modes(ctx: RankContext, transport: str) -> None:
    """Inference first, training next; batches that outgrow the group on one rank or all, also between forward and backward."""
    alone, model = make_model("mixtral"), make_model("mixtral")
    moe_a2a.convert(model, ctx.process_group, transport=transport)
    windows = windows_of(model)

    def check(length: int, batch: int = 1) -> Tensor:
        ids: Tensor = make_ids(ctx.rank, batch, length)
        got: Tensor = model(ids).logits
        torch.testing.assert_close(got, alone(ids).logits, **CLOSE)
        return got

    with torch.inference_mode():
        check(2 + ctx.rank)
    with torch.no_grad():
        check(2 + ctx.rank)
    first = check(3)
    assert windows.group.max_tokens == 4
    group = windows.group
    ctx.jitter(5)
    check(20 if ctx.rank == 0 else 2)  # one rank's batch is too large
    assert windows.group is not group and windows.group.max_tokens == 32 and not group.closed
    check(40 + ctx.rank)  # all are
    assert windows.group.max_tokens == 64
    with torch.autocast("cpu", torch.bfloat16):
        model(make_ids(ctx.rank, 1, 5))
    model.double()
    model(make_ids(ctx.rank, 1, 5))
    assert windows.group.dtype == torch.float64
    model.float()
    first.pow(2).sum().backward()  # of a call on the first group
    for rank in range(2):
        alone(make_ids(rank, 1, 3)).logits.pow(2).sum().backward()
    compare_gradients(ctx, model, alone)


def data_parallel(ctx: RankContext, wrapper: str) -> None:
    """Experts over pairs, two such pairs: three steps as one process makes them, an expert idle in the second."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    alone, model = make_model("mixtral"), moe_a2a.convert(make_model("mixtral"), mesh["ep"])
    own = dict(moe_a2a.expert_parameters(model))
    wrapped: Any = model
    if wrapper == "DDP":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(own))
        wrapped = DistributedDataParallel(model)
    else:
        world = init_device_mesh("cpu", (4,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=world, ignored_params=set(own.values()))
        fully_shard(model, mesh=world, ignored_params=set(own.values()))
    trainers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, alone)]
    for step in range(3):
        # With equal tokens all routing is equal, and most experts idle.
        batches = [torch.full_like(ids_of(rank), 5) if step == 1 else ids_of(rank) for rank in range(4)]
        for trainer in trainers:
            trainer.zero_grad()
        ctx.jitter(3)
        wrapped(batches[ctx.rank]).logits.pow(2).mean().backward()
        for value in own.values():
            assert value.grad is not None
            dist.all_reduce(value.grad, group=mesh.get_group("dp"))
            value.grad /= 4  # replicated gradients are averaged, too
        (sum(alone(ids).logits.pow(2).mean() for ids in batches) / 4).backward()
        if step == 1:
            assert any(not grad.any() for e in experts_of(alone).values() for grad in e.down_proj.grad)
        for trainer in trainers:
            trainer.step()
    layers = {name: getattr(module, spread.LAYER) for name, module in experts_of(model).items()}
    values = dict(alone.named_parameters())
    for name, value in model.named_parameters():
        got = whole(value)
        want = own_part(layers[name.rpartition(".")[0]], values[name]) if name in own else values[name]
        torch.testing.assert_close(got, want, **CLOSE)
        if "gate.weight" in name:
            assert all(torch.equal(got, other) for other in ctx.gather(got.detach()))


def compiled_model(ctx: RankContext, family: str, backend: str) -> None:
    """A whole model in one graph, forward and backward."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    layers = {"num_hidden_layers": 1} if backend == "inductor" else {}  # half the code to compile
    alone = make_model(family, **layers)
    model = moe_a2a.convert(make_model(family, **layers), ctx.process_group, max_tokens=16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    batches = [make_ids(rank, 2, 7) for rank in range(ctx.world_size)]
    ctx.jitter(20)
    out = compiled(batches[ctx.rank], use_cache=False)
    out.logits.pow(2).sum().backward()
    assert not counters["graph_break"]
    for rank, ids in enumerate(batches):
        want = alone(ids).logits
        want.pow(2).sum().backward()
        if rank == ctx.rank:
            torch.testing.assert_close(out.logits, want, **CLOSE)
    compare_gradients(ctx, model, alone)


def compiled_at_load(ctx: RankContext, folder: str) -> None:
    """A model that transformers has sharded: FSDP2's hooks break the graph, the experts' calls keep their order."""
    torch._dynamo.reset()
    alone = plain(folder)
    model = moe_a2a.convert(load(folder, {"fsdp_size": 2, "ep_size": 2}), max_tokens=16)
    out = torch.compile(model, backend="aot_eager")(ids_of(ctx.rank), use_cache=False)
    out.logits.pow(2).sum().backward()
    for rank in range(2):
        want = alone(ids_of(rank)).logits
        (want.pow(2).sum() / 2).backward()
        if rank == ctx.rank:
            torch.testing.assert_close(out.logits, want, **CLOSE)
    for name, value in model.named_parameters():
        got, grad = whole(value.grad), alone.get_parameter(name).grad
        assert (got - grad).norm() <= 1e-5 * grad.norm(), name


def compiled_layer(ctx: RankContext, activation: str) -> None:
    """Numbers of tokens that change, one of them 0, in one layer, fused and with the class's own experts."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = moe_a2a.convert(make_model("mixtral", hidden_act=activation), ctx.process_group, max_tokens=64)
    block = model.model.layers[1].mlp
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (17, 1, 0, 2, 64, 17):
        x = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(tokens + ctx.rank))
        results = []
        for one in (block, compiled):
            leaf = x.clone().requires_grad_()
            out = one(leaf)
            out.pow(2).sum().backward()
            results.append((out.detach(), leaf.grad))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager, **CLOSE)
    assert counters["stats"]["unique_graphs"] <= 4, counters["stats"]


def raises(kind: type[Exception], *words: str) -> Any:
    import pytest

    return pytest.raises(kind, match=".*".join(words))


def refusals(ctx: RankContext) -> None:
    """What can't be converted is refused by name, before anything is changed."""
    with raises(moe_a2a.errors.BadValue, "Linear has no experts", "ModuleList"):
        moe_a2a.convert(nn.Linear(2, 2))
    model = moe_a2a.convert(make_model("mixtral"), ctx.process_group)
    with raises(moe_a2a.errors.BadValue, "spread already"):
        moe_a2a.convert(model, ctx.process_group)
    with raises(RuntimeError, "max_tokens"):
        torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="eager")(torch.ones(1, 3, 32))
    assert moe_a2a.convert(model, max_tokens=14) is model
    torch._dynamo.reset()
    torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="eager")(torch.ones(1, 3, 32))
    odd = make_model("mixtral")
    experts = odd.model.layers[0].mlp.experts
    experts.scale = nn.Parameter(torch.ones(3))
    before = dict(odd.named_parameters())
    with raises(moe_a2a.errors.BadValue, r"layers.0.mlp.experts.scale is \[3\]", "8 experts"):
        moe_a2a.convert(odd, ctx.process_group)
    assert all(value is before[name] for name, value in odd.named_parameters())
    nameless = mock.patch.object(models, "_TOP_K", ("other",))
    with nameless, raises(moe_a2a.errors.BadValue, "layers.0.mlp.experts", "none of other", "pass top_k"):
        moe_a2a.convert(make_model("mixtral"), ctx.process_group, max_tokens=4)


def faults_in_own_experts(ctx: RankContext) -> None:
    """An error in one rank's experts is everybody's, and the next call works."""
    alone = make_model("mixtral", hidden_act="tanh")
    model = moe_a2a.convert(make_model("mixtral", hidden_act="tanh"), ctx.process_group)
    ids = ids_of(ctx.rank)
    experts = model.model.layers[0].mlp.experts
    kind: type[Exception] = moe_a2a.errors.PeerAborted
    words = ["experts 0", "ZeroDivisionError on rank 1", "division"]
    if ctx.rank == 1:
        kind, words = ZeroDivisionError, ["division"]
        act, experts.act_fn = experts.act_fn, nn.Identity()
        experts.act_fn.forward = lambda x: 1 // 0
    with torch.no_grad():
        with raises(kind, *words):
            model(ids)
        if ctx.rank == 1:
            experts.act_fn = act
        torch.testing.assert_close(model(ids).logits, alone(ids).logits, **CLOSE)


def one_expert_is_all(ctx: RankContext, activation: str) -> None:
    """All tokens go to the first experts, so other ranks get no rows; the last ranks own no experts; one has no tokens."""
    changes: dict[str, Any] = {"hidden_act": activation, "num_experts": 3, "num_experts_per_tok": 2}
    alone, model = (make_model("qwen3_moe", **changes) for _ in range(2))
    for one in (alone, model):
        for name, value in one.named_parameters():
            value.requires_grad_("experts" in name)  # backward is then for these alone
    moe_a2a.convert(model, ctx.process_group)
    xs = [torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens)) for tokens in (5, 0, 1, 3)]
    idx = [torch.arange(2).expand(len(x), 2) for x in xs]
    weights = [torch.full((len(x), 2), 0.25) for x in xs]
    theirs, mine = (one.model.layers[0].mlp.experts for one in (alone, model))
    out = mine(xs[ctx.rank], idx[ctx.rank], weights[ctx.rank])
    out.pow(2).sum().backward()
    for rank, arguments in enumerate(zip(xs, idx, weights, strict=True)):
        if not len(xs[rank]):
            assert rank != ctx.rank or out.shape == (0, 32)
            continue
        want = theirs(*arguments)
        want.pow(2).sum().backward()
        if rank == ctx.rank:
            torch.testing.assert_close(out, want, **CLOSE)
    layer = getattr(mine, spread.LAYER)
    for name, value in mine.named_parameters():
        torch.testing.assert_close(value.grad, own_part(layer, theirs.get_parameter(name).grad), **CLOSE)


def same_batch(ctx: RankContext) -> None:
    """Pairs of ranks pass the same tokens, odd numbers of them: outputs and gradients are as if one of each had."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = make_model("qwen3_moe")
    model = moe_a2a.convert(make_model("qwen3_moe"), same_batch=mesh["tp"])
    ids = [ids_of(1), ids_of(0)[:1, :1]]
    out = model(ids[ctx.rank // 2])
    out.logits.pow(2).sum().backward()
    for batch, one in enumerate(ids):
        want = alone(one)
        want.logits.pow(2).sum().backward()
        if batch == ctx.rank // 2:
            torch.testing.assert_close(out.logits, want.logits, **CLOSE)
    own = dict(moe_a2a.expert_parameters(model))
    layers = {name: experts._moe_a2a for name, experts in experts_of(model).items()}
    for name, value in model.named_parameters():
        got, want = value.grad, alone.get_parameter(name).grad
        if name in own:
            want = own_part(layers[name.rpartition(".")[0]], want)
        else:
            dist.all_reduce(got, group=mesh.get_group("dp"))
        assert (got - want).norm() <= 1e-5 * want.norm(), name


def copied(ctx: RankContext) -> None:
    """A deep copy computes with its own experts."""
    model = moe_a2a.convert(make_model("mixtral"), ctx.process_group)
    twin = copy.deepcopy(model)
    ids = ids_of(ctx.rank)
    with torch.no_grad():
        before = model(ids).logits
        for _, value in moe_a2a.expert_parameters(twin):
            value.zero_()
        assert not torch.equal(twin(ids).logits, before)
        assert torch.equal(model(ids).logits, before)
