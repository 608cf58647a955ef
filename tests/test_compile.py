"""torch.compile: no call is dropped, none changes places, and the results are those of the calls uncompiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from rank_bodies import compiled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moe_a2a

BACKENDS = ["aot_eager", "inductor"]
PLAIN = ["plain", "unused", "branches"]
CHECKPOINTED = ["checkpointed", "checkpointed_branches", "checkpointed_unused", "selective"]


@pytest.mark.parametrize(
    ("backend", "programs"),
    [
        ("aot_eager", [*PLAIN, "exact"]),
        ("aot_eager", [*CHECKPOINTED, "checkpointed_exact"]),
        ("inductor", ["unused", "checkpointed_branches"]),
        pytest.param("inductor", [*PLAIN, "exact"], marks=pytest.mark.slow),
        pytest.param("inductor", [*CHECKPOINTED, "checkpointed_exact"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_are_those_of_the_uncompiled(pool: RankPool, backend: str, programs: list[str]) -> None:
    """No program finds another order of calls, whatever a rank does with the results; recomputed ones come when due."""
    ranks = pool.run(2, compiled.same_calls, backend, programs, timeout=300)
    for name in programs:
        forward, backward = zip(*(log.split("|") for log in ranks[0][name]), strict=True)
        assert forward[0] == forward[1], (name, ranks[0][name])
        assert ranks[0][name] == ranks[1][name], name
        if name == "checkpointed":
            # Each part is computed again just before its own backward, not all at once; a combine's result isn't needed.
            assert backward[1] == "MssraDsaaMssra"


def test_a_rank_that_wants_no_gradient_takes_part(pool: RankPool) -> None:
    """Everything on rank 1 is frozen; its backward runs all the same, and rank 0's gradients are right."""
    for name, (_, log) in pool.run(
        2, compiled.same_calls, "aot_eager", ["plain"], True, (True, False), timeout=120
    )[1].items():
        assert log == "MDC|saassra", name


@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "checkpoint"]
)
def test_inductor_keeps_the_order_it_is_given(pool: RankPool, checkpointing: bool) -> None:
    """Rank 1 schedules as contrarily as it may: so what holds the order is what we add, not luck."""
    kept = pool.run(2, compiled.contrary_schedule, True, checkpointing, timeout=120)
    assert kept[0][0] == "ran" and kept[0] == kept[1]
    lost = pool.run(2, compiled.contrary_schedule, False, checkpointing, timeout=120)
    assert lost[0][0] != "ran" and lost[1][0] != "ran", lost


@pytest.mark.parametrize(
    ("backend", "program", "dynamic", "most"),
    [
        ("aot_eager", "plain", True, 4),
        ("aot_eager", "exact", True, 4),
        pytest.param("aot_eager", "plain", None, 4, marks=pytest.mark.slow),
        pytest.param("inductor", "plain", True, 4, marks=pytest.mark.slow),
        pytest.param("inductor", "exact", True, 4, marks=pytest.mark.slow),
    ],
)
def test_66_sizes_change(pool: RankPool, backend: str, program: str, dynamic: bool | None, most: int) -> None:
    """One graph and at most three more, no breaks; bitwise where the rest of the graph is computed as uncompiled."""
    for graphs, breaks in pool.run(2, compiled.sizes, backend, program, dynamic, timeout=280):
        assert 1 <= graphs <= most and breaks == 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_options(pool: RankPool, backend: str) -> None:
    pool.run(2, compiled.options, backend, timeout=200)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_modes(pool: RankPool, backend: str) -> None:
    pool.run(2, compiled.modes, backend, timeout=200)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_errors_have_their_names(pool: RankPool, backend: str) -> None:
    first, second = pool.run(2, compiled.bad_calls, backend, timeout=200)
    for name in ("moe", "dispatch"):
        assert first[name][0] == "PeerAborted" and "rank 1" in first[name][1]
        assert second[name][0] == "BadValue" and "topk_idx[3, 1] = 99" in second[name][1]
    for found in (first, second):
        assert found["pad"][0] == "PadTooSmall" and found["tag"][0] == "CallMismatch"
        assert found["window"][0] == "BadValue" and "group.empty" in found["window"][1]


@pytest.mark.parametrize("compile_it", [False, True], ids=["uncompiled", "compiled"])
def test_a_loss_that_ignores_the_layer_is_an_error_by_name(pool: RankPool, compile_it: bool) -> None:
    first, second = pool.run(2, compiled.ignored_result, compile_it, timeout=120)
    assert first[0] == "PeerTimeout" and "rank 1" in first[1].replace("ranks 1", "rank 1")
    assert second == ("", "")


@pytest.mark.parametrize(
    ("backend", "fused"),
    [
        ("aot_eager", True),
        pytest.param("inductor", True, marks=pytest.mark.slow),
        ("aot_eager", False),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_as_uncompiled(pool: RankPool, backend: str, fused: bool) -> None:
    for plain, graph in pool.run(2, compiled.trained, backend, 4, fused, timeout=200):
        assert graph == pytest.approx(plain, rel=1e-4)


CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor"]
OPERATORS = [
    "dispatch",
    "dispatch_full",
    "dispatch_raw",
    "dispatch_full_raw",
    "combine",
    "combine_raw",
    "combine_pairs_raw",
    "combine_again_raw",
    "moe",
    "moe_raw",
    "experts_raw",
    "experts_backward_raw",
    "activation_backward_raw",
    "dispatch_backward",
    "combine_backward",
    "moe_backward",
    "witness",
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [0, 5])
def test_opcheck(pool: RankPool, ranks: int, tokens: int) -> None:
    """torch's own checks of operators that talk to other ranks, and of all with gradients."""
    pool.run(ranks, compiled.opchecks, tokens, OPERATORS, CHECKS, timeout=120)


@pytest.mark.parametrize("tokens", [0, 5])
def test_opcheck_in_a_graph(pool: RankPool, tokens: int) -> None:
    """As test_aot_dispatch_dynamic runs a call twice and compares, only operators whose results don't hold its number."""
    names = [
        "combine_again_raw",
        "dispatch_backward",
        "combine_backward",
        "moe_backward",
        "witness",
        "experts_raw",
    ]
    for ranks in (1, 2):
        pool.run(ranks, compiled.opchecks, tokens, names, ["test_aot_dispatch_dynamic"], timeout=120)


def test_every_operator_has_a_fake() -> None:
    """One without would be found only by who traces it."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_a2a::")]
    assert len(names) > 20
    for name in names:
        entry = torch._library.simple_registry.singleton.find(name)
        assert entry.fake_impl.kernel is not None, name


@pytest.mark.parametrize("name", ["moe_next_raw", "combine_wait_raw"])
def test_parts_of_calls_refuse_to_be_traced(name: str) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="can't be traced"):
        handle = torch.zeros(4, dtype=torch.int64)
        arguments = (handle, "any") if name == "moe_next_raw" else (handle, None, "any")
        getattr(torch.ops.moe_a2a, name)(*arguments)


def _group() -> Any:
    return moe_a2a.EPGroup(
        num_experts=compiled.EXPERTS, dtype=torch.float32, top_k=2, max_tokens=64, hidden_size=compiled.HIDDEN
    )


def _operators(group: Any, pad_to: int, x: Any, idx: Any, w: Any, up: Any, down: Any) -> tuple[Any, ...]:
    ops = torch.ops.moe_a2a
    rows, counts, offsets, weights, _, handle = ops.dispatch_full(x, idx, w, None, group.name, 0, pad_to)
    out = ops.combine(rows * 2, handle, w, x.shape[0], group.name)
    fused, _, _, _ = ops.moe(x, idx, w, up, down, None, None, 256, 7.0, 1.702, group.name)
    return rows, counts, offsets, weights, out, fused


def _arguments(tokens: int) -> tuple[torch.Tensor, ...]:
    x, idx, w = compiled.make_inputs(0, tokens, 1, False)
    up = torch.randn(compiled.EXPERTS, 2 * compiled.INNER, compiled.HIDDEN)
    return x, idx, w, up, torch.randn(compiled.EXPERTS, compiled.HIDDEN, compiled.INNER)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("pad_to", [40, -1])
def test_tracing_sends_nothing(tokens: int, pad_to: int) -> None:
    with _group() as group:
        arguments = _arguments(tokens)
        real = _operators(group, pad_to, *arguments)
        epoch = group.stats()["epoch"]
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = _operators(group, pad_to, *(mode.from_tensor(value) for value in arguments))
        traced = make_fx(lambda *a: _operators(group, pad_to, *a), tracing_mode="fake")(*arguments)
        assert group.stats()["epoch"] == epoch
        for ours, theirs in zip(real, fake, strict=True):
            assert ours.dtype == theirs.dtype and ours.dim() == theirs.dim()
            for size, known in zip(ours.shape, theirs.shape, strict=True):
                assert not isinstance(known, int) or size == known
        for ours, theirs in zip(real, traced(*arguments), strict=True):
            assert torch.equal(ours, theirs)
        assert group.stats()["epoch"] == epoch + 2


@pytest.mark.parametrize("name", ["dispatch", "combine", "moe", "moe_apply"])
def test_what_cannot_be_traced_runs_between_graphs(name: str) -> None:
    """With fullgraph it is refused, with the reason."""
    x, idx, w, up, down = _arguments(7)
    with _group() as group:

        def step(x: torch.Tensor) -> Any:
            x = x * 2
            if name == "moe":
                return moe_a2a.moe(x, idx, w, up, down, group, async_op=True).wait() + 1
            if name == "moe_apply":
                return moe_a2a.moe_apply(lambda rows, e: rows * (e + 1), x, idx, w, group) + 1
            d: Any = moe_a2a.dispatch(x, idx, group, async_op=name == "dispatch")
            if name == "dispatch":
                d = d.wait()
            out: Any = moe_a2a.combine(d.x * 3, d, w, async_op=name == "combine")
            return (out.wait() if name == "combine" else out) + 1

        graphs = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        want = step(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(step, backend=backend)(x), want)
        assert graphs, "nothing was compiled"
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="with fullgraph=True leave async_op out"):
            torch.compile(step, backend=backend, fullgraph=True)(x)


class _Exported(torch.nn.Module):
    def __init__(self, group: Any, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = torch.nn.Parameter(up), torch.nn.Parameter(down)

    def forward(self, x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        d = moe_a2a.dispatch(x, idx, self.group, w, pad_to=64, tag="exported")
        out = moe_a2a.combine(d.x * 2, d, w)
        return out + moe_a2a.moe(x, idx, w, self.up, self.down, self.group, tag="exported")


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    with _group() as group, torch.no_grad():
        x, idx, w, up, down = _arguments(7)
        module = _Exported(group, up, down)
        want = module(x, idx, w)
        epoch = group.stats()["epoch"]
        sizes = {0: torch.export.Dim("tokens", min=2, max=64)}
        program = torch.export.export(
            module, (x, idx, w), dynamic_shapes=(sizes, sizes, sizes), strict=strict
        )
        assert group.stats()["epoch"] == epoch
        torch.testing.assert_close(program.module()(x, idx, w), want)
        assert program.module()(x[:3], idx[:3], w[:3]).shape == (3, compiled.HIDDEN)
