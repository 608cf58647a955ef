"""Experts of a loaded model onto ranks: :func:`convert`, and what one wants to know and save of such a model.

Shape symbols: E experts, R ranks, K top-k, H hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import errors
from ..op_host.layout import expert_ranges
from .experts import (
    AT_LOAD,
    CONVERTED,
    FIRST_CALL,
    LAYER,
    ExpertLayer,
    Windows,
    follows_interface,
    read_recipe,
)

Model = TypeVar("Model", bound=nn.Module)

_CONVERT = "moe_a2a.convert"
# What configurations call K.
_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token", "moe_top_k", "top_k")


def convert(
    model: Model,
    process_group: Any = None,
    *,
    same_batch: DeviceMesh | None = None,
    max_tokens: int | None = None,
    top_k: int | None = None,
    recompute: bool | None = None,
    **options: Any,
) -> Model:
    """Spreads the experts of a loaded model over ranks, in place. Every rank passes the same model and arguments.

    A rank keeps the experts of its range (the first E mod R ranks own one more) and lets go of the others; everything else
    stays on every rank. Each rank then calls the model on tokens of its own, as many as it likes, and the results are those of
    the whole model. Calls are collective: see docs/transformers.md, also for gradients, which are sums over ranks for experts.

    With a model that was loaded with ``DistributedConfig(ep_size=R, ep_implementation="moe_a2a")``, or converted before, or
    spread by the first call of ``experts_implementation="moe_a2a"``, only ``max_tokens``, ``top_k``, ``recompute`` and
    the options are taken.

    Args:
        model: has modules that follow transformers' experts interface (``use_experts_implementation``).
        process_group: the ranks that share the experts: a ProcessGroup or one-dimensional DeviceMesh; None for the default
            group, or one rank if torch.distributed isn't initialised. It must live as long as the model.
        same_batch: a mesh of ranks that pass the same tokens, as in tensor parallelism. Each then sends its share of them, and
            all get all results.
        max_tokens: the most tokens a rank passes in one forward. With it the group is made at once, which is collective, and
            torch.compile can trace the model; without it by the first forward. More tokens, in a forward that isn't compiled,
            make a larger group.
        top_k: K, where the model's configuration doesn't tell it; needed with max_tokens only.
        recompute: keep nothing for backward but x, as in :func:`moe_a2a.moe`; None leaves it as it is, at first False.
        options: of :class:`moe_a2a.EPGroup`, such as ``transport`` or ``timeout``.

    Returns:
        The model.

    Raises:
        BadValue: nothing in the model can be converted, or arguments don't go together. What EPGroup raises.
    """
    layers = dict(_layers(model))
    made = {id(layer.windows): layer.windows for layer in layers.values()}
    first = [name for name, layer in layers.items() if layer.placed == FIRST_CALL]
    if first or not layers:
        _refuse_sharded(model)
    if layers:
        if process_group is not None or same_batch is not None:
            raise errors.BadValue(
                f"{_CONVERT}: {type(model).__name__} has its experts spread already; leave process_group and same_batch away"
            )
        for name in first:
            layers[name].placed = CONVERTED
    else:
        made = _spread(model, process_group, same_batch)
    if hasattr(model, "save_pretrained") and not any(layer.placed == AT_LOAD for _, layer in _layers(model)):
        vars(model)["save_pretrained"] = MethodType(_save_pretrained, model)
    for windows in made.values():
        windows.configure(max_tokens, recompute, options)
    if max_tokens is not None:
        done: set[int] = set()
        for name, experts in model.named_modules():
            layer = getattr(experts, LAYER, None)
            if layer is not None and id(layer.windows) not in done:
                done.add(id(layer.windows))
                down = experts.get_parameter("down_proj")
                hidden = down.shape[2] if layer.recipe.transposed else down.shape[1]
                layer.windows.make(
                    max_tokens, hidden, down.dtype, _top_k(name, experts) if top_k is None else top_k
                )
    return model


def _spread(model: nn.Module, process_group: Any, same_batch: DeviceMesh | None) -> dict[int, Windows]:
    """Slices the parameters of all experts in the model, and puts the exchange in front of them."""
    found = [(name, module) for name, module in model.named_modules() if follows_interface(module)]
    if not found:
        raise errors.BadValue(
            f"{_CONVERT}: {type(model).__name__} has no experts that can be spread: no module with down_proj and the flags of "
            "transformers' use_experts_implementation. Models of transformers 5 have them; a model that keeps its experts in a "
            "ModuleList doesn't. moe_a2a.MoE is a layer to write models with"
        )
    shared: dict[int, Windows] = {}
    for name, experts in found:
        check_spreadable(name, experts)
        shared.setdefault(int(experts.num_experts), Windows(process_group, int(experts.num_experts)))
    for _, experts in found:
        spread_module(experts, shared[int(experts.num_experts)], same_batch)
    return {id(windows): windows for windows in shared.values()}


def spread_module(
    experts: Any, windows: Windows, same_batch: DeviceMesh | None, placed: str = CONVERTED
) -> None:
    """Keeps this rank's part of the parameters, which stay the same objects, and puts the exchange before the module."""
    layer = ExpertLayer(read_recipe(experts), windows, windows.tag(), same_batch, placed)
    own = layer.local_experts
    with torch.inference_mode(False):
        for value in experts.parameters(recurse=False):
            if value.shape[0] != len(own):  # layers may share a parameter
                # A slice alone would keep all experts' memory.
                value.data = value.detach()[own.start : own.stop].clone()
                value.grad = None
    experts.num_experts = len(own)
    setattr(experts, LAYER, layer)
    # Of the instance: changing the model's experts implementation then changes what computes the rows that came, and can't
    # hand global ids to a class that has a part of the experts.
    experts.forward = MethodType(_forward, experts)
    experts.register_load_state_dict_pre_hook(_take_own)


def _refuse_sharded(model: nn.Module) -> None:
    """FSDP2 around whole experts: after a forward their parameters may not look sharded, and slices of them would be lost."""
    from torch.distributed.fsdp import FSDPModule  # takes its time, which not every program should pay

    for name, module in model.named_modules():
        if issubclass(type(module), FSDPModule) and any(map(follows_interface, module.modules())):
            raise errors.BadValue(
                f"{_CONVERT}: {name or type(model).__name__} has been sharded by fully_shard, with the experts in it; convert "
                'first and shard later, or load with DistributedConfig(..., ep_implementation="moe_a2a")'
            )


def check_spreadable(name: str, experts: nn.Module) -> None:
    """Raises BadValue where a module's experts can't be sliced."""
    if "forward" in vars(experts):
        raise errors.BadValue(
            f"{_CONVERT}: {name} has another forward already (expert or tensor parallelism of transformers?); for both, load "
            'with DistributedConfig(..., ep_implementation="moe_a2a")'
        )
    for at, value in experts.named_parameters(recurse=False):
        if _is_dtensor(value):
            raise errors.BadValue(
                f"{_CONVERT}: {name}.{at} is a DTensor; convert first and shard later, or load with "
                'DistributedConfig(..., ep_implementation="moe_a2a")'
            )
        if value.dim() == 0 or value.shape[0] != experts.num_experts:
            raise errors.BadValue(
                f"{_CONVERT}: {name}.{at} is {list(value.shape)}; expected {experts.num_experts} experts in its first dimension"
            )


def _is_dtensor(value: Any) -> bool:
    """Without importing the class, which takes a second: where there is one, it is imported."""
    return hasattr(value, "full_tensor")


def _forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    layer: ExpertLayer = getattr(self, LAYER)
    return layer(self, partial(type(self).forward, self), hidden_states, top_k_index, top_k_weights)


def _take_own(experts: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Of a whole model's parameters this rank's part, before they are loaded."""
    layer: ExpertLayer = getattr(experts, LAYER)
    own = layer.local_experts
    for at, _value in experts.named_parameters(recurse=False):
        whole = state.get(prefix + at)
        if (
            isinstance(whole, Tensor)
            and whole.dim()
            and whole.shape[0] == layer.windows.num_experts != len(own)
        ):
            state[prefix + at] = whole[own.start : own.stop]


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """transformers' ``save_pretrained`` for all ranks together: rank 0 writes the whole model."""
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = full_state_dict(self)
    if not _distributed() or dist.get_rank() == 0:
        type(self).save_pretrained(self, save_directory, *args, **kwargs)
    if _distributed():
        dist.barrier()


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _top_k(name: str, experts: nn.Module) -> int:
    for key in _TOP_K:
        value = getattr(experts.config, key, None)
        if isinstance(value, int):
            return value
    raise errors.BadValue(
        f"{_CONVERT}: the configuration of {name} doesn't say how many experts a token goes to (none of {', '.join(_TOP_K)}); "
        "pass top_k"
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, ExpertLayer]]:
    for name, module in model.named_modules():
        layer = getattr(module, LAYER, None)
        if isinstance(layer, ExpertLayer):
            yield name, layer


def explain(model: nn.Module, file: TextIO | None = None) -> None:
    """Prints a line for each layer with experts: what computes them and why, and which are this rank's.

    Args:
        model: any; before :func:`convert` the lines say what it would do.
        file: where to; standard output by default.
    """
    out = sys.stdout if file is None else file
    lines = 0
    for name, module in model.named_modules():
        layer = getattr(module, LAYER, None)
        if layer is not None:
            print(f"{name}: {layer.describe()}", file=out)
        elif follows_interface(module) and "forward" in vars(module):
            print(f"{name}: spread by something else than moe_a2a", file=out)
        elif follows_interface(module):
            recipe = read_recipe(module)
            would = f"own experts, since {recipe.why}" if recipe.why else f"the fused operator ({recipe})"
            print(f"{name}: not converted; moe_a2a.convert would take {would}", file=out)
        else:
            continue
        lines += 1
    if not lines:
        print(f"{type(model).__name__}: no layer that follows transformers' experts interface", file=out)


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of this rank's experts: their gradients are sums over ranks already.

    For DistributedDataParallel to leave alone, for ``fully_shard(ignored_params=...)``, for a division by the number of ranks.
    """
    for name, _ in _layers(model):
        experts = model.get_submodule(name)
        for at, value in experts.named_parameters(recurse=False):
            yield f"{name}.{at}", value


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's state dict, keys and shapes as before :func:`convert`. Collective over all ranks.

    Returns:
        On rank 0 of the default process group tensors on the CPU, whichever way the model is sharded; {} on the others.
        ``save_pretrained`` of a converted model, called on all ranks, takes it by itself.
    """
    main = not _distributed() or dist.get_rank() == 0
    spread = {name: layer for name, layer in _layers(model) if layer.placed == CONVERTED}
    state = {}
    for key, value in model.state_dict().items():
        whole = value.full_tensor() if _is_dtensor(value) else value
        layer = spread.get(key.rpartition(".")[0])
        if layer is not None and layer.windows.world_size > 1:
            whole = _all_experts(whole, layer)
        if main:
            state[key] = whole.detach().cpu()
    return state


def _all_experts(own: Tensor, layer: ExpertLayer) -> Tensor:
    """[E, ...] of [E_local, ...], on the first of the ranks; nothing of use on the others."""
    windows = layer.windows
    ranges = expert_ranges(windows.num_experts, windows.world_size)
    most = len(ranges[0])
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: own.shape[0]] = own
    first = windows.rank == 0
    parts = [torch.empty_like(padded) for _ in ranges] if first else None
    dist.gather(padded, parts, group=windows._torch_group, group_dst=0)
    return torch.cat([part[: len(r)] for part, r in zip(parts, ranges, strict=True)]) if parts else own
