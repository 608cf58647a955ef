"""Rank bodies for torch.compile: the same calls as uncompiled, in the same order, with the same results.

T tokens of a rank, H hidden, E experts, K top-k, N received rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from pool import RankContext
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moe_a2a
from moe_a2a import _ops, backward, errors, exchange

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 5, 2, 16, 8, 64
SIZES = {"dtype": torch.float32, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": TOKENS}
ROOM = 512
OPS = torch.ops.moe_a2a

_fused = functools.partial(__import__, "moe_a2a.moe", fromlist=["moe"])()


def _open(ctx: RankContext, **kwargs: Any) -> Any:
    return ctx.group(**{"num_experts": EXPERTS, "timeout": 120.0, "warmup_timeout": 200.0, **SIZES, **kwargs})


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    """Nothing compiled before, and none of it from a cache on the disk."""
    import torch._inductor.config

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """What is exchanged, in order: D dispatch, C combine, M moe; backward s send_again, r return_rows, a return_again."""
    log: list[str] = []
    places = [
        (exchange, "_dispatch_raw", "D"),
        (exchange, "_dispatch_full_raw", "D"),
        (exchange, "_combine_raw", "C"),
        (_fused, "_moe_raw", "M"),
        (_fused, "send_again", "s"),
        (_fused, "return_rows", "r"),
        (_fused, "return_again", "a"),
        (backward, "send_again", "s"),
        (backward, "return_again", "a"),
    ]

    def spied(real: Any, letter: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(letter)
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module, name, letter in places:
            stack.enter_context(mock.patch.object(module, name, spied(getattr(module, name), letter)))
        yield log


class Model:
    """Experts of this rank, and the ways to call them."""

    def __init__(self, ctx: RankContext, group: Any, wants: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) * 0.2
        down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) * 0.2
        mine = slice(group.local_experts.start, group.local_experts.stop)
        self.group: moe_a2a.EPGroup = group
        self.rank = ctx.rank
        self.up, self.down = (value[mine].clone().requires_grad_(wants) for value in (up, down))

    def moe(self, x: Tensor, idx: Tensor, w: Tensor | None, tag: str = "moe") -> Tensor:
        return moe_a2a.moe(x, idx, w, self.up, self.down, self.group, tag=tag)

    def pair(self, x: Tensor, idx: Tensor, w: Tensor, pad_to: int | None = ROOM, tag: str = "pair") -> Tensor:
        d = moe_a2a.dispatch(x, idx, self.group, w, pad_to=pad_to, tag=tag)
        assert d.weights is not None
        return moe_a2a.combine(d.x.sin() * d.weights[:, None], d, w)

    # Programs: (x, idx, w) -> [T, H]

    def plain(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        return self.pair(self.moe(x, idx, w), idx, w)

    def exact(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        return self.pair(x, idx, w, None)

    def unused(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        """Nobody, or rank 0 alone, looks at what these calls give."""
        moe_a2a.dispatch(x, idx, self.group, pad_to=ROOM, tag="nobody's")
        some = self.moe(x, idx, w, "rank 0's").detach()
        self.pair(x, idx, w, tag="nobody's")
        out = self.moe(x, idx, w)
        return out + some if self.rank == 0 else out

    def branches(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        """Two calls that don't depend on each other, of sizes that order differently on each rank."""
        few = slice(0, 3 if self.rank == 0 else None)
        many = slice(0, None if self.rank == 0 else 2)
        first = self.moe(x[few], idx[few], w[few], "first")
        second = self.pair(x[many].cos(), idx[many], w[many], tag="second")
        return torch.cat([second.exp(), first])

    def checkpointed(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        h = again(lambda *a: a[0] + self.moe(*a), x, idx, w)
        h = again(lambda *a: a[0] + self.pair(*a), h, idx, w)
        return again(lambda *a: a[0] + self.moe(*a), h, idx, w).sin()

    def checkpointed_exact(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        return again(self.exact, x, idx, w).sin()

    def checkpointed_branches(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        return again(self.branches, x, idx, w).sin()

    def checkpointed_unused(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        return again(self.unused, x, idx, w).sin()

    def selective(self, x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, save_exchanges)
        return again(self.plain, x.sin(), idx, w, context_fn=contexts)


def again(fn: Callable[..., Tensor], *args: Tensor, **kwargs: Any) -> Tensor:
    """``fn``, which is computed again in backward."""
    out: Tensor = checkpoint(fn, *args, use_reentrant=False, **kwargs)
    return out


def save_exchanges(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing that keeps what travelled."""
    kept = (OPS.moe.default, OPS.dispatch_full.default, OPS.combine.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def make_inputs(rank: int, tokens: int, seed: int, wants: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_(wants)
    idx = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=generator)
    return x, idx, torch.rand(tokens, TOP_K, generator=generator).requires_grad_(wants)


def _step(fn: Any, model: Model, inputs: tuple[Tensor, ...], log: list[str], train: bool) -> list[Any]:
    """One step; in ``log`` a bar between forward and backward."""
    x, idx, w = inputs
    leaves = [leaf for leaf in (x, w, model.up, model.down) if leaf.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    if not train:
        with torch.no_grad():
            return [fn(x, idx, w)]
    out = fn(x, idx, w)
    log.append("|")
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _close(got: list[Any], want: list[Any], what: str, tolerance: float = 1e-5) -> None:
    assert len(got) == len(want), what
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None), what
        if ours is not None:
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
            )


def same_calls(
    ctx: RankContext,
    backend: str,
    programs: list[str],
    train: bool = True,
    wants: tuple[bool, ...] = (True, True),
) -> dict[str, tuple[str, str]]:
    """Runs each program uncompiled and compiled; (calls uncompiled, calls compiled) of each."""
    group = _open(ctx)
    model = Model(ctx, group, wants[ctx.rank])
    found = {}
    with _fresh():
        for number, name in enumerate(programs):
            torch._dynamo.reset()
            program = getattr(model, name)
            inputs = make_inputs(ctx.rank, (17, 9)[ctx.rank], number, wants[ctx.rank])
            results, logs = [], []
            for fn in (program, torch.compile(program, backend=backend, fullgraph=True, dynamic=True)):
                with _watched() as log:
                    ctx.jitter(2)
                    results.append(_step(fn, model, inputs, log, train))
                logs.append("".join(log))
            _close(results[1], results[0], f"{name}, {backend}, rank {ctx.rank}")
            found[name] = (logs[0], logs[1])
    return found


# ------------------------------------------------------------------------------------------------------------- schedules


def _last_first(nodes: list[Any], name_to_buf: dict[str, Any], *_: Any) -> list[Any]:
    """An order of the scheduler's nodes that its dependencies allow, and as far from the graph's as they do."""
    left, done, order = list(nodes), set(), []
    while left:
        ready = [
            node
            for node in left
            if all(dep.name in done or dep.name not in name_to_buf for dep in node.unmet_dependencies)
        ]
        node = ready[-1]
        left.remove(node)
        order.append(node)
        done.update(node.get_buffer_names())
    return order


def contrary_schedule(ctx: RankContext, ordered: bool, checkpointing: bool) -> list[str]:
    """Rank 1's inductor turns round whatever it may; what happened."""
    import torch._inductor.memory

    # Where the ranks agree they only wait for each other's compiler.
    timeout = 60.0 if ordered else 4.0
    group = ctx.fresh_group(num_experts=EXPERTS, timeout=timeout, warmup_timeout=200.0, **SIZES)
    model = Model(ctx, group)

    def program(x: Tensor, z: Tensor, idx: Tensor) -> Tensor:
        # Uncompiled backward runs the last call's first.
        call = functools.partial(checkpoint, model.moe, use_reentrant=False) if checkpointing else model.moe
        a = call(x, idx, None, "a").sin()
        b = call(z, idx, None, "b").cos()
        return a.sum() + b.sum()

    x, idx, _ = make_inputs(ctx.rank, 17, 1)
    z, _, _ = make_inputs(ctx.rank, 17, 2)
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fresh())
        if ctx.rank == 1:
            stack.enter_context(
                mock.patch.object(torch._inductor.memory, "reorder_for_peak_memory", _last_first)
            )
        if not ordered:
            from torch._inductor import lowering

            own = {op: lowering.lowerings.pop(op) for op in list(lowering.lowerings) if "moe_a2a" in str(op)}
            stack.callback(lowering.lowerings.update, own)
            stack.enter_context(mock.patch.object(_ops, "order_in_inductor", lambda: None))
        log = stack.enter_context(_watched())
        try:
            out = torch.compile(program, fullgraph=True)(x, z, idx)
            ctx.barrier()
            out.backward()
            found.append("ran")
        except errors.MoeA2AError as error:
            found.append(type(error).__name__)
        found.append("".join(log))
    return found


# ----------------------------------------------------------------------------------------------------------------- sizes


def sizes(ctx: RankContext, backend: str, program: str, dynamic: bool | None) -> tuple[int, int]:
    """Case 66: T changes, forward and backward; (graphs compiled, graph breaks)."""
    group = _open(ctx)
    model = Model(ctx, group)
    counter = CompileCounterWithBackend(backend)
    with _fresh():
        fn = getattr(model, program)
        compiled = torch.compile(fn, backend=counter, fullgraph=True, dynamic=dynamic)
        for turn in range(2):
            for number, tokens in enumerate((17, 1, 0, 2, 64, 17)):
                # Rank 1 is somewhere else in the list.
                tokens = tokens if ctx.rank == 0 else (17, 2, 0, 1, 5, 64)[number]
                inputs = make_inputs(ctx.rank, tokens, number + 10 * turn)
                ctx.jitter(2)
                want = _step(fn, model, inputs, [], True)
                got = _step(compiled, model, inputs, [], True)
                # Bitwise, unless inductor computes what lies between.
                tolerance = 1e-5 if backend == "inductor" else 0.0
                _close(got, want, f"T = {tokens}, rank {ctx.rank}", tolerance)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return counter.frame_count, breaks


# --------------------------------------------------------------------------------------------------------------- options


def options(ctx: RankContext, backend: str) -> None:
    """What the functions offer, in one graph."""
    group = _open(ctx)
    model = Model(ctx, group)

    def all_of_it(x: Tensor, idx: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        d = moe_a2a.dispatch(x, idx, group, w, pad_to=ROOM, tag="layer.3")
        rows = d.empty_like_rows()
        rows.copy_(d.x * 2)
        starts = torch.arange(ROOM)[:, None] >= d.offsets[None, :-1]
        y = rows * starts.sum(1)[:, None]
        again = moe_a2a.dispatch(x * 2, None, group, routing=d, pad_to=ROOM, align=1)
        out = moe_a2a.combine(y, d, w) + moe_a2a.combine(again.x, again.handle)
        other = moe_a2a.dispatch(x, idx, group, pad_to=ROOM)
        wide = moe_a2a.combine(other.empty_like_rows(torch.float32, 3).fill_(1.0), other)
        beside = moe_a2a.moe(
            x,
            idx,
            w,
            model.up,
            model.down,
            group,
            shared=torch.sin,
            tag="shared",
            activation="clamped",
            limit=5.0,
        )
        return out, beside, wide, d.counts, d.offsets

    with _fresh():
        compiled = torch.compile(all_of_it, backend=backend, fullgraph=True)
        for tokens in (17, 9):
            inputs = make_inputs(ctx.rank, tokens, tokens)
            got: list[Any] = []
            want: list[Any] = []
            for fn, into in ((all_of_it, want), (compiled, got)):
                x, idx, w = (value.detach().clone() for value in inputs)
                results = fn(x.requires_grad_(), idx, w.requires_grad_())
                torch.stack([part.square().sum() for part in results[:3]]).sum().backward()
                into += [*results, x.grad, w.grad]
            _close(got, want, f"rank {ctx.rank}")
        assert not torch._dynamo.utils.counters["graph_break"]


def modes(ctx: RankContext, backend: str) -> None:
    """inference_mode and no_grad compiled first, training next, and back; autocast inside."""
    group = _open(ctx)
    model = Model(ctx, group)

    def cast(x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.moe(torch.nn.functional.linear(x, model.up[0, :HIDDEN]), idx, w).float()

    with _fresh():
        for fn in (model.plain, cast):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
            x, idx, w = make_inputs(ctx.rank, 7, 3)
            with torch.no_grad():
                want = fn(x, idx, w)
            tolerance = 5e-2 if fn is cast else 1e-5
            log: list[str] = []
            for mode in ("inference", "no_grad", "train", "inference", "train"):
                if mode == "train":
                    _close(
                        _step(compiled, model, (x, idx, w), log, True),
                        _step(fn, model, (x, idx, w), log, True),
                        mode,
                        tolerance,
                    )
                    continue
                with torch.inference_mode() if mode == "inference" else torch.no_grad():
                    _close([compiled(x, idx, w).clone()], [want], mode, tolerance)


# ---------------------------------------------------------------------------------------------------------------- errors


def _said(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def bad_calls(ctx: RankContext, backend: str) -> dict[str, tuple[str, str]]:
    """Rank 1's input is bad, which only the run can know; then all is well again."""
    group = _open(ctx)
    model = Model(ctx, group)
    found = {}
    with _fresh(), torch.no_grad():
        moe = torch.compile(model.moe, backend=backend, fullgraph=True)
        pair = torch.compile(model.pair, backend=backend, fullgraph=True)
        tight = torch.compile(functools.partial(model.pair, pad_to=1), backend=backend, fullgraph=True)
        x, idx, w = make_inputs(ctx.rank, 7, 1)
        wrong = idx.clone()
        if ctx.rank == 1:
            wrong[3, 1] = 99
        for name, call in (
            ("moe", lambda: moe(x, wrong, w)),
            ("dispatch", lambda: pair(x, wrong, w)),
            ("pad", lambda: tight(x, idx.clamp(0), w)),
            ("tag", lambda: torch.compile(model.moe, backend=backend)(x, idx, w, f"rank {ctx.rank}")),
        ):
            found[name] = _said(call)
            torch.testing.assert_close(moe(x, idx, w), model.moe(x, idx, w))
    with _fresh():
        moe = torch.compile(model.moe, backend=backend, fullgraph=True)
        staged = group.empty(7)
        staged.copy_(x.detach())
        want = "" if not isinstance(staged, Tensor) else _said(lambda: moe(staged.requires_grad_(), idx, w))
        found["window"] = want if isinstance(want, tuple) else ("", "")
    return found


def ignored_result(ctx: RankContext, compile_it: bool) -> tuple[str, str]:
    """Rank 1's loss doesn't look at the layer, which is as it is uncompiled: its backward isn't run, and rank 0 waits."""
    group = ctx.fresh_group(num_experts=EXPERTS, timeout=2.0, warmup_timeout=200.0, **SIZES)
    model = Model(ctx, group)

    def loss(x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
        out = model.moe(x, idx, w)
        return out.sum() if model.rank == 0 else x.sum()

    x, idx, w = make_inputs(ctx.rank, 7, 1)
    with _fresh():
        fn = torch.compile(loss, backend="aot_eager", fullgraph=True) if compile_it else loss
        out = fn(x, idx, w)
        ctx.barrier()
        said = _said(out.backward)
        ctx.barrier()
    return said


# ---------------------------------------------------------------------------------------------------------------- opcheck


def opchecks(ctx: RankContext, tokens: int, names: list[str], checks: list[str]) -> None:
    """torch.library.opcheck of each operator, on all ranks at once."""
    from torch.library import opcheck

    group = _open(ctx)
    for name in names:
        for check in checks:
            arguments = operator_arguments(group, ctx.rank, tokens, name)
            try:
                opcheck(getattr(OPS, name).default, arguments, test_utils=(check,))
            except Exception as error:
                raise AssertionError(f"{name}, {check}: {error}") from error


def operator_arguments(group: Any, rank: int, tokens: int, name: str) -> tuple[Any, ...]:
    """Good arguments of an operator; what it opens or uses up is made here. Collective."""
    wants = name in ("dispatch", "dispatch_full", "combine", "moe")
    x, idx, w = make_inputs(rank, tokens, 3, wants)
    if tokens == 0:
        idx = idx.new_empty(0, TOP_K)
    model_up = torch.randn(group.num_local_experts, 2 * INNER, HIDDEN).requires_grad_(wants)
    model_down = torch.randn(group.num_local_experts, HIDDEN, INNER).requires_grad_(wants)
    experts = (model_up, model_down, None, None, 256, 7.0, 1.702)
    ledger, anchor = torch.zeros(1, dtype=torch.int64), torch.zeros(0, requires_grad=True)
    with torch.no_grad():
        wish = 15 if name == "moe_backward" else 0
        rows, weights, handle = OPS.dispatch_raw(x, idx, w, group.name, 0, ROOM if wants else -1, 1, wish)
    match name:
        case "dispatch":
            return x, idx, w, group.name, 0, ROOM, 2
        case "dispatch_full":
            return x, None, w, handle, group.name, 0, ROOM, 1, 0, 3, ledger, anchor
        case "dispatch_raw":
            return x, idx, None, group.name
        case "dispatch_full_raw":
            return x, idx, w, None, group.name, 0, -1, 1, 1
        case "combine":
            return rows.requires_grad_(), handle, w, tokens, group.name, ledger, anchor
        case "combine_raw":
            return rows, handle, w, group.name
        case "combine_pairs_raw":
            return weights[:, None], handle, group.name
        case "combine_again_raw":
            return rows, handle, group.name, 0, False
        case "moe":
            return x, idx, w, *experts, group.name, 3, 15, False, ledger, anchor
        case "moe_raw":
            return x, idx, w, *experts, group.name, 3, 7, True
        case "experts_raw":
            offsets = moe_a2a.Handle(handle, group).view.offsets
            return rows, offsets, *experts, True
        case "experts_backward_raw":
            offsets, hidden = moe_a2a.Handle(handle, group).view.offsets, torch.randn(len(rows), 2 * INNER)
            return rows, weights, rows, hidden, offsets, *experts, torch.empty_like(rows), 3
        case "activation_backward_raw":
            return torch.randn(tokens, 2 * INNER), torch.randn(tokens, INNER), 256, 7.0, 1.702
        case "dispatch_backward":
            return rows, weights, handle, tokens, TOP_K, group.name, 0
        case "combine_backward":
            return x, rows, w, handle, rows.shape[0], group.name
        case "moe_backward":
            return (
                x,
                x,
                w,
                *experts,
                rows[:0],
                rows.new_empty(0, 2 * INNER),
                handle,
                group.name,
                0,
                [True] * 3 + [False] * 2,
            )
        case "witness":
            return ledger, handle
    raise KeyError(name)


# ------------------------------------------------------------------------------------------------------------------ model


class Block(torch.nn.Module):
    """Attention and a mixture of experts, each behind a norm."""

    def __init__(self, ctx: RankContext, group: Any, tag: str, fused: bool) -> None:
        super().__init__()
        self.group, self.tag, self.fused = group, tag, fused
        generator = torch.Generator().manual_seed(int(tag[-1]))

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.qkv, self.gate = parameter(3 * HIDDEN, HIDDEN), parameter(EXPERTS, HIDDEN)
        up, down = parameter(EXPERTS, 2 * INNER, HIDDEN), parameter(EXPERTS, HIDDEN, INNER)
        mine = slice(group.local_experts.start, group.local_experts.stop)
        self.up, self.down = torch.nn.Parameter(up.data[mine]), torch.nn.Parameter(down.data[mine])

    def forward(self, x_TH: Tensor) -> Tensor:
        q, k, v = torch.nn.functional.linear(x_TH, self.qkv).chunk(3, dim=-1)
        attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        h = x_TH + attended[0]
        normed = torch.nn.functional.rms_norm(h, (HIDDEN,))
        w, idx = torch.nn.functional.linear(normed, self.gate).softmax(-1).topk(TOP_K, -1)
        if self.fused:
            return h + moe_a2a.moe(normed, idx, w, self.up, self.down, self.group, tag=self.tag)
        d = moe_a2a.dispatch(normed, idx, self.group, pad_to=ROOM, tag=self.tag)
        local = torch.arange(self.group.num_local_experts)
        expert_N = (torch.arange(ROOM)[:, None] >= d.offsets[None, 1:-1]).sum(1)
        mask_EN = (expert_N[None] == local[:, None]).to(d.x.dtype)
        hidden = torch.einsum("nh,ewh->enw", d.x, self.up)
        first, second = hidden.chunk(2, -1)
        y = torch.einsum("enw,ehw,en->nh", torch.nn.functional.silu(first) * second, self.down, mask_EN)
        return h + moe_a2a.combine(y, d, w)


def trained(ctx: RankContext, backend: str, steps: int, fused: bool) -> list[list[float]]:
    """Losses of a 2-layer model, uncompiled and compiled."""
    group = _open(ctx)
    losses = []
    with _fresh():
        for compile_it in (False, True):
            model = torch.nn.Sequential(*(Block(ctx, group, f"layer.{n}", fused) for n in range(2)))
            fn = torch.compile(model, backend=backend, fullgraph=True) if compile_it else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            seen = []
            for step in range(steps):
                x = torch.randn(12 + 3 * ctx.rank, HIDDEN, generator=torch.Generator().manual_seed(ctx.rank))
                ctx.jitter(2)
                optimizer.zero_grad()
                loss = (fn(x) - x.roll(1, 0)).square().mean()
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
                assert step == 0 or seen[-1] < seen[0]
            losses.append(seen)
        assert not torch._dynamo.utils.counters["graph_break"]
    return losses
