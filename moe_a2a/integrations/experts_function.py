"""The experts function "moe_a2a" of transformers 5.0 to 5.22; registered when imported. For inference.

Such a function computes all experts of a layer. This one lets go, in its first call, of those that aren't this rank's; from
then on the exchange stands in front of the module, and the function computes the rows that came where the fused operator can't.
What an optimizer, DDP or FSDP already knows of the parameters can't be seen from here, so training takes moe_a2a.convert.

Shape symbols: T tokens of a rank, H hidden, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from .. import errors
from .experts import FIRST_CALL, LAYER, ExpertLayer, shared_windows
from .models import check_spreadable, spread_module

_ARGUMENT = 'experts_implementation="moe_a2a"'


def experts_function(experts: Any, hidden_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H]; the first call of a module is collective over the default group, as all calls are thereafter.

    Raises:
        BadValue: it can't be spread, or gradients are wanted.
    """
    if getattr(experts, LAYER, None) is not None:
        out: Tensor = grouped_mm_experts_forward(experts, hidden_TH, idx_TK, weights_TK)
        return out
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{_ARGUMENT}: the first forward lets go of other ranks' experts, which can't be compiled: call "
            "moe_a2a.convert(model, max_tokens=...) before torch.compile"
        )
    _refuse_training(experts)
    check_spreadable(type(experts).__name__, experts)
    windows = shared_windows(experts.config, None, experts.num_experts)
    spread_module(experts, windows, None, FIRST_CALL)
    experts.register_forward_pre_hook(_refuse_training)
    experts.register_state_dict_post_hook(_refuse_part)
    return experts(hidden_TH, idx_TK, weights_TK)  # type: ignore[no-any-return]


def _by_first_call(experts: nn.Module) -> bool:
    layer = getattr(experts, LAYER, None)
    return layer is None or layer.placed == FIRST_CALL


def _refuse_training(experts: nn.Module, *_: Any) -> None:
    if (
        torch.is_grad_enabled()
        and _by_first_call(experts)
        and any(p.requires_grad for p in experts.parameters())
    ):
        raise errors.BadValue(
            f"{_ARGUMENT}: a forward that records gradients of {type(experts).__name__}; the argument is for inference. For "
            "training call moe_a2a.convert(model) before optimizer, DDP or FSDP; else call the model under torch.no_grad()"
        )


def _refuse_part(experts: nn.Module, *_: Any) -> None:
    """What is spread by its first call has no save_pretrained that gathers; nobody should lose experts by not knowing."""
    if _by_first_call(experts):
        layer: ExpertLayer = getattr(experts, LAYER)
        own, windows = layer.local_experts, layer.windows
        raise errors.BadValue(
            f"{_ARGUMENT}: since the first forward rank {windows.rank} has experts {own.start}..{own.stop - 1} of "
            f"{windows.num_experts}, so a state dict is a part of the model. Call moe_a2a.convert(model) first; then "
            "model.save_pretrained, on all ranks, and moe_a2a.full_state_dict(model) give all of it"
        )


ExpertsInterface.register("moe_a2a", experts_function)
