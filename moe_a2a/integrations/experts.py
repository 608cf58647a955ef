"""A layer's experts, spread over ranks, behind the call that transformers' expert classes share.

That call is ``experts(hidden [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]``. Its classes say by flags how they
compute (``has_gate``, ``has_bias``, ``is_transposed``, ``has_post_expert_norm``); what the fused operator can compute it
does, everything else the class does itself, on the rows that came. Nothing here imports transformers.

Shape symbols: T tokens of a rank, H hidden, E experts, K top-k, R ranks, N received rows, I inner, W = 2 I with a gate, else I.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import errors
from ..backward import refuse_rows
from ..exchange import _fail_call, combine, dispatch
from ..group import EPGroup
from ..layer import _activate
from ..moe import moe
from ..op_host.experts import ACTIVATIONS
from ..op_host.layout import DTYPE_CODES, expert_ranges

T_ = TypeVar("T_")

FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "config")
# How a layer came to be spread.
CONVERTED, AT_LOAD, FIRST_CALL = "converted", "at load", "by its first call"
LAYER = "_moe_a2a"  # the attribute of an experts module that holds its ExpertLayer
_OPERATION = "moe_a2a.convert"
_GROW = "this rank's call needs a larger group; all ranks make one and repeat the call"

OwnExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The class's own computation: (rows [N, H], local expert ids [N, K], weights [N, K]) -> [N, H]."""


def follows_interface(module: nn.Module) -> bool:
    """Whether a module is a layer's experts, as transformers 5 writes them."""
    return all(hasattr(module, name) for name in FLAGS) and isinstance(
        module._parameters.get("down_proj"), Tensor
    )


# ------------------------------------------------------------------------------------------- what the operator can compute


@dataclass(frozen=True)
class Recipe:
    """How a class's experts compute, in the terms of :func:`moe_a2a.moe`; ``why`` is set where that can't."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    biased: bool = False
    limit: float | None = None
    alpha: float | None = None
    why: str = ""

    @property
    def up(self) -> str:
        """Name of the first product's parameter."""
        return "gate_up_proj" if self.gated else "up_proj"

    @property
    def form(self) -> dict[str, Any]:
        """Keyword arguments for ``moe``."""
        return {
            "activation": self.activation,
            "gated": self.gated,
            "interleaved": self.interleaved,
            "transposed": self.transposed,
            "limit": self.limit,
            "alpha": self.alpha,
        }

    def __str__(self) -> str:
        words = [self.activation, "gated" if self.gated else "no gate"]
        words += [name for name in ("interleaved", "transposed", "biased") if getattr(self, name)]
        return ", ".join(words)


def read_recipe(experts: Any) -> Recipe:
    """Reads a class's flags, and finds by trial what its gate computes: names of classes say nothing."""
    gated, biased = bool(experts.has_gate), bool(experts.has_bias)
    if getattr(experts, "has_post_expert_norm", False):
        return Recipe(why="a norm follows each expert (has_post_expert_norm)")
    names = {"gate_up_proj" if gated else "up_proj", "down_proj"}
    names |= {f"{name}_bias" for name in names} if biased else set()
    found = {name for name, _ in experts.named_parameters()}
    if found != names:
        return Recipe(why=f"parameters are {', '.join(sorted(found))}; expected {', '.join(sorted(names))}")
    for name, value in experts.named_parameters():
        if value.dtype not in DTYPE_CODES:
            return Recipe(why=f"{name} is {value.dtype}")
    gate = experts._apply_gate if gated else experts.act_fn
    limit, alpha = (_number(experts, name) for name in ("limit", "alpha"))
    computed = _computed(gate, gated, limit, alpha)
    if computed is None:
        return Recipe(why="its gate is none that the operator has")
    activation, interleaved = computed
    if activation != "clamped":
        limit = alpha = None
    return Recipe(activation, gated, interleaved, bool(experts.is_transposed), biased, limit, alpha)


def _number(experts: nn.Module, name: str) -> float | None:
    value = getattr(experts, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def _probe(inner: int = 64) -> Tensor:
    """[4, 2 * inner] of every sign and of sizes from 1e-3 to 1e4, so that clamps and caps show, too."""
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = torch.logspace(-3, 4, 4, dtype=torch.float64, device="cpu")[:, None]
    noise = torch.randn(4, 2 * inner, generator=generator, dtype=torch.float64, device="cpu")
    return torch.cat([sizes * noise, 3 * noise])


@torch.no_grad()
def _computed(
    gate: Callable[[Tensor], Tensor], gated: bool, limit: float | None, alpha: float | None
) -> tuple[str, bool] | None:
    """(activation, interleaved) that give what ``gate`` gives; None if none does."""
    probe = _probe()
    try:
        found = gate(probe).to(torch.float64)
    except Exception:  # whatever stands in its way, the class itself can compute it
        return None
    for interleaved in (False, True) if gated else (False,):
        sides = torch.cat([probe[:, ::2], probe[:, 1::2]], 1) if interleaved else probe
        for activation in ACTIVATIONS:
            if activation == "clamped" and (not gated or limit is None or alpha is None):
                continue
            made = _activate(
                sides, activation=activation, gated=gated, limit=limit or 0.0, alpha=alpha or 0.0
            )
            if made.shape == found.shape and torch.allclose(made, found, rtol=1e-5, atol=1e-7):
                return activation, interleaved
    return None


# --------------------------------------------------------------------------------------------------- the group of a model


@dataclass
class Windows:
    """The EPGroup that a model's layers share: made by the first call, and made anew when a call needs a larger one.

    Args:
        process_group: as EPGroup takes it.
        num_experts: E.
        max_tokens: the least that a group is made for.
        options: further arguments of EPGroup.
    """

    process_group: Any
    num_experts: int
    max_tokens: int = 1
    recompute: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    group: EPGroup | None = None
    layers: int = 0
    _outgrown: list[EPGroup] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> Windows:
        return self  # as EPGroup: a copied model makes its calls on the same windows

    @property
    def rank(self) -> int:
        return dist.get_rank(self._torch_group) if self._distributed else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self._torch_group) if self._distributed else 1

    @property
    def _distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    @property
    def _torch_group(self) -> Any:
        group = self.process_group
        return group.get_group() if isinstance(group, DeviceMesh) else group

    def configure(self, max_tokens: int | None, recompute: bool | None, options: dict[str, Any]) -> None:
        """Takes what isn't None; other options take another group, which the next call makes."""
        self.max_tokens = self.max_tokens if max_tokens is None else max_tokens
        self.recompute = self.recompute if recompute is None else recompute
        if options and self.group is not None:
            self._outgrown.append(self.group)
            self.group = None
        self.options.update(options)

    def tag(self) -> str:
        """A name for the next layer; the same on all ranks, as layers are made in the model's order."""
        self.layers += 1
        return f"experts {self.layers - 1}"

    def call(self, run: Callable[[EPGroup], T_], x: Tensor, top_k: int, tag: str) -> T_:
        """``run(group)``, collective, with a group that takes every rank's x [T, H] and K.

        A rank that needs a larger group says so in its place in the call, all ranks make one, and all repeat the call.
        """
        if torch.compiler.is_compiling():
            # What a group needs isn't known in a graph, and can't be agreed on there.
            if self.group is None:
                raise RuntimeError(
                    f"{_OPERATION}: a compiled model needs its group before it is traced: pass max_tokens to "
                    "moe_a2a.convert, or call the model once without torch.compile"
                )
            return run(self.group)
        while True:
            if self.group is None:
                self.make(x.shape[0], x.shape[1], x.dtype, top_k)
            group = self.group
            assert group is not None
            if not _fits(group, x, top_k):
                with contextlib.suppress(errors.BadValue):
                    _fail_call(group, ValueError(_GROW), _OPERATION, tag)
                self.make(x.shape[0], x.shape[1], x.dtype, top_k)
                continue
            try:
                return run(group)
            except errors.PeerAborted as error:
                if _GROW not in str(error):
                    raise
            self.make(x.shape[0], x.shape[1], x.dtype, top_k)

    def make(self, tokens: int, hidden: int, dtype: torch.dtype, top_k: int) -> None:
        """Makes a group for what this rank, any other and the group before need. Collective."""
        needs: list[Any] = [None] * self.world_size
        need = (tokens, hidden, dtype, top_k)
        if self.world_size == 1:
            needs = [need]
        else:
            dist.all_gather_object(needs, need, group=self._torch_group)
        old = self.group
        if old is not None:
            needs.append((old.max_tokens, old.hidden_size, old.dtype, old.top_k))
            # Backwards of calls made on it may still come.
            self._outgrown.append(old)
        tokens, hidden, top_k = (max(need[at] for need in needs) for at in (0, 1, 3))
        if tokens > self.max_tokens:
            # Powers of two, so that prompts that grow by a token each don't make a group each.
            tokens = 1 << (tokens - 1).bit_length()
        self.group = EPGroup(
            self.process_group,
            num_experts=self.num_experts,
            top_k=top_k,
            max_tokens=max(self.max_tokens, tokens),
            hidden_size=hidden,
            dtype=max((need[2] for need in needs), key=lambda dtype: (dtype.itemsize, str(dtype))),
            **self.options,
        )


_shared: WeakValueDictionary[tuple[int, str, int], Windows] = WeakValueDictionary()


def shared_windows(config: Any, process_group: Any, num_experts: int) -> Windows:
    """The Windows of all layers that have one configuration, ranks and number of experts: those of a model."""
    windows = Windows(process_group, num_experts)
    group = (windows._torch_group or dist.group.WORLD) if windows._distributed else None
    key = (id(config), "" if group is None else group.group_name, num_experts)
    return _shared.setdefault(key, windows)


def _fits(group: EPGroup, x: Tensor, top_k: int) -> bool:
    return (
        x.shape[0] <= group.max_tokens
        and top_k <= group.top_k
        and x.shape[1] * x.dtype.itemsize <= group.hidden_size * group.dtype.itemsize
    )


# ------------------------------------------------------------------------------------------------------- a layer's experts


@dataclass
class ExpertLayer:
    """What takes the place of an experts module's forward.

    Args:
        recipe: how the experts compute.
        windows: the model's.
        tag: the layer's name among those that share the windows.
        same_batch: ranks that hold the same tokens (tensor parallelism): each sends its share of them, and all get all results.
        placed: how the layer came to be here, for :func:`moe_a2a.explain`.
    """

    recipe: Recipe
    windows: Windows
    tag: str
    same_batch: DeviceMesh | None = None
    placed: str = CONVERTED

    @property
    def local_experts(self) -> range:
        """Global ids of this rank's experts."""
        windows = self.windows
        return expert_ranges(windows.num_experts, windows.world_size)[windows.rank]

    def __call__(
        self,
        experts: Any,
        own: OwnExperts,
        hidden_TH: Tensor,
        idx_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        """The weighted sum of each token's experts, [T, H] of hidden's dtype. Collective over the windows' ranks."""
        mesh = self.same_batch
        if mesh is None or mesh.size() == 1:
            return self._spread(experts, own, hidden_TH, idx_TK, weights_TK).to(hidden_TH.dtype)
        shares = (_share(value, mesh) for value in (hidden_TH, idx_TK, weights_TK))
        out = self._spread(experts, own, *shares).to(hidden_TH.dtype)
        return _whole(out, mesh, hidden_TH.shape[0])

    def _spread(
        self, experts: Any, own: OwnExperts, x_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        recipe, windows, top_k = self.recipe, self.windows, idx_TK.shape[1]
        if recipe.why:
            return self._own(experts, own, x_TH, idx_TK, weights_TK)
        up, down = getattr(experts, recipe.up), experts.down_proj
        up_bias = getattr(experts, f"{recipe.up}_bias") if recipe.biased else None
        down_bias = experts.down_proj_bias if recipe.biased else None

        def fused(group: EPGroup) -> Tensor:
            out: Tensor = moe(
                x_TH,
                idx_TK,
                weights_TK,
                up,
                down,
                group,
                gate_up_bias=up_bias,
                down_bias=down_bias,
                recompute=windows.recompute,
                tag=self.tag,
                **recipe.form,
            )
            return out

        return windows.call(fused, x_TH, top_k, self.tag)

    def _own(self, experts: Any, own: OwnExperts, x_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Rows to their experts, the class's own computation there, and back."""
        d = self.windows.call(
            lambda group: dispatch(x_TH, idx_TK, group, tag=self.tag), x_TH, idx_TK.shape[1], self.tag
        )
        rows_NH = d.x
        num_rows = rows_NH.shape[0]
        ids_N1 = torch.repeat_interleave(
            torch.arange(d.counts.shape[0], device=d.counts.device), d.counts, output_size=num_rows
        )[:, None]
        try:
            if d.counts.shape[0] == 0:
                # No experts here, so no rows; but if others' parameters have gradients, this rank takes part in backward.
                nothing = torch.cat([value.flatten() for value in experts.parameters()]).sum()
                y_NH = rows_NH + nothing.to(rows_NH.dtype)
            elif torch.compiler.is_compiling():
                # N isn't known in a graph, so there is always one row more: a zero, for the first expert.
                rows_NH = torch.cat([rows_NH, rows_NH.new_zeros(1, rows_NH.shape[1])])
                ids_N1 = torch.cat([ids_N1, ids_N1.new_zeros(1, 1)])
                y_NH = own(rows_NH, ids_N1, torch.ones_like(ids_N1, dtype=x_TH.dtype))[:num_rows]
            elif num_rows == 0:
                # The class may not take zero rows, and its parameters and the rows must stay in the graph.
                row = rows_NH.sum(0, keepdim=True)
                y_NH = own(row, ids_N1.new_zeros(1, 1), row.new_ones(1, 1))[:0]
            else:
                y_NH = own(rows_NH, ids_N1, torch.ones_like(ids_N1, dtype=x_TH.dtype))
        except Exception as error:
            group = self.windows.group
            if group is not None and not torch.compiler.is_compiling():
                refuse_rows(group, d.handle.meta, error, f"{_OPERATION}: the experts of {self.tag}")
            raise
        return combine(y_NH, d.handle, weights_TK)

    def describe(self) -> str:
        """What is taken and why, in one line."""
        group, own = self.windows.group, self.local_experts
        whose = f"experts {own.start}..{own.stop - 1}" if own else "no experts"
        where = (
            f"{whose} of {self.windows.num_experts} on rank {self.windows.rank} of {self.windows.world_size}"
        )
        over = "group not made yet" if group is None else f"over {group.transport.name}"
        recipe = self.recipe
        taken = f"own experts, since {recipe.why}" if recipe.why else f"fused operator ({recipe})"
        return f"{taken}; {where}, {over}; {self.placed}"


def _share(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of the first dimension of what all ranks of the mesh hold; backward gathers the parts."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # a second to import, and few need it

    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _whole(share: Tensor, mesh: DeviceMesh, tokens: int) -> Tensor:
    """The other way round, for [T, H]; backward takes this rank's part."""
    from torch.distributed.tensor import DTensor, Shard

    hidden = share.shape[1]
    parts = DTensor.from_local(
        share.contiguous(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((tokens, hidden)),
        stride=(hidden, 1),
    )
    return parts.full_tensor()
