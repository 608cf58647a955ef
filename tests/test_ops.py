"""The operators as torch sees them: schemas, fakes, what autograd does, and what they return."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

import moe_a2a
from moe_a2a import reference
from moe_a2a.op_host import native

OPS = torch.ops.moe_a2a


@pytest.fixture(params=["cpu-shm", "collective"])
def group(request: pytest.FixtureRequest) -> Iterator[moe_a2a.EPGroup]:
    with moe_a2a.EPGroup(
        num_experts=5, top_k=3, max_tokens=7, hidden_size=9, dtype=torch.float32, transport=request.param
    ) as made:
        yield made


def inputs(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    idx = torch.randint(-1, 5, (tokens, 3), generator=generator)
    return torch.randn(tokens, 9, generator=generator), idx, torch.rand(tokens, 3, generator=generator)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_send_counts(tokens: int, dtype: torch.dtype) -> None:
    idx = inputs(tokens)[1].to(dtype)
    counts, slot = OPS.send_counts(idx, 5)
    expected = reference.send_counts_reference(idx, 5)
    assert torch.equal(counts, expected[0]) and counts.dtype == torch.int64
    assert torch.equal(slot, expected[1]) and slot.dtype == torch.int32
    opcheck(OPS.send_counts.default, (idx, 5))


def test_send_counts_of_strided_ids() -> None:
    wide = torch.randint(0, 5, (6, 9))
    for idx in (wide[:, 2:5], wide.t()[:4], wide[::2, ::3]):
        counts, slot = moe_a2a.send_counts(idx, 5)
        expected = reference.send_counts_reference(idx.contiguous(), 5)
        assert torch.equal(counts, expected[0]) and torch.equal(slot, expected[1])


@pytest.mark.parametrize(
    ("idx", "experts", "kind", "words"),
    [
        (torch.tensor([[0, 1], [2, 5]]), 5, moe_a2a.errors.BadValue, "topk_idx[1, 1] = 5 is outside -1..4"),
        (torch.tensor([[2**32, 1]]), 5, moe_a2a.errors.BadValue, "topk_idx[0, 0] = 4294967296"),
        (torch.tensor([[-2, 1]]), 5, moe_a2a.errors.BadValue, "topk_idx[0, 0] = -2"),
        (torch.tensor([0, 1]), 5, moe_a2a.errors.BadValue, "shape [2]"),
        (torch.tensor([[0, 1]]), 0, moe_a2a.errors.BadValue, "num_experts = 0"),
        (torch.tensor([[0.0]]), 5, moe_a2a.errors.BadType, "dtype float32;"),
        (torch.tensor([[True]]), 5, moe_a2a.errors.BadType, "dtype bool;"),
        ([[0, 1]], 5, moe_a2a.errors.BadType, "topk_idx"),
    ],
)
def test_send_counts_of_bad_ids(idx: torch.Tensor, experts: int, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        moe_a2a.send_counts(idx, experts)
    assert words in str(caught.value)


@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("weighted", [True, False])
def test_operators_are_what_the_functions_are(group: moe_a2a.EPGroup, tokens: int, weighted: bool) -> None:
    x, idx, w = inputs(tokens)
    weights = w if weighted else None
    rows, counts, offsets, row_weights, handle = OPS.dispatch(x, idx, weights, group.name)
    all_weights = [w] if weighted else None
    expected = reference.dispatch_reference([x], [idx], 5, all_weights)[0]
    assert torch.equal(rows, expected.x_NH)
    assert torch.equal(counts, expected.counts) and counts.dtype == torch.int64
    assert torch.equal(offsets, expected.offsets) and offsets.dtype == torch.int32
    if expected.weights_N is not None:
        assert torch.equal(row_weights, expected.weights_N)
    else:
        assert row_weights.numel() == 0
    storages = [
        t.untyped_storage().data_ptr() for t in (rows, counts, offsets, row_weights, handle) if t.numel()
    ]
    assert len(set(storages)) == len(storages), "outputs share memory"
    y = rows * 2
    out = OPS.combine(y, handle, weights, tokens, group.name)
    assert torch.equal(out, reference.combine_reference([y], [idx], 5, all_weights)[0])


@pytest.mark.parametrize("weighted", [True, False])
def test_fakes_have_the_shapes_of_the_real_thing(group: moe_a2a.EPGroup, weighted: bool) -> None:
    x, idx, w = inputs()
    weights = w if weighted else None
    real = OPS.dispatch(x, idx, weights, group.name)
    real_out = OPS.combine(real[0], real[4], weights, 7, group.name)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        args = [mode.from_tensor(t) if t is not None else None for t in (x, idx, weights)]
        fake = OPS.dispatch(*args, group.name)
        fake_out = OPS.combine(fake[0], fake[4], args[2], 7, group.name)
    for ours, theirs in zip((*real, real_out), (*fake, fake_out), strict=True):
        assert ours.dtype == theirs.dtype and ours.dim() == theirs.dim() and ours.device == theirs.device
        for size, symbol in zip(ours.shape, theirs.shape, strict=True):
            assert not isinstance(symbol, int) or size == symbol
    assert not isinstance(fake[0].shape[0], int), "N depends on the data"


@pytest.mark.parametrize("operators", [False, True], ids=["functions", "operators"])
def test_gradients(group: moe_a2a.EPGroup, operators: bool) -> None:
    """Out and back without experts is a weighted sum; the functions and the operators make the same gradients of it."""
    x, idx, w = inputs()
    leaves = [x.requires_grad_(), w.requires_grad_()]
    if operators:
        rows, _, _, weights_N, handle = OPS.dispatch(x, idx, w, group.name)
        out = OPS.combine(rows * weights_N[:, None], handle, None, 7, group.name)
        rows, _, _, _, handle = OPS.dispatch(x, idx, None, group.name)
        again = OPS.combine(rows, handle, w, 7, group.name)
    else:
        d = moe_a2a.dispatch(x, idx, group, w)
        assert d.x.requires_grad and d.weights is not None and d.weights.requires_grad
        out = moe_a2a.combine(d.x * d.weights[:, None], d.handle)
        d = moe_a2a.dispatch(x, idx, group)
        again = moe_a2a.combine(d.x, d.handle, w)
    kept = torch.where(idx >= 0, w, 0).sum(1, keepdim=True)
    grad = torch.randn(out.shape)
    expected = torch.autograd.grad(x * kept, leaves, grad)
    for result in (out, again):
        for got, want in zip(torch.autograd.grad(result, leaves, grad), expected, strict=True):
            torch.testing.assert_close(got, want)
    with torch.no_grad():
        d = moe_a2a.dispatch(x, idx, group, w)
        assert not moe_a2a.combine(d.x, d.handle, w).requires_grad


def test_integer_outputs_carry_no_gradient(group: moe_a2a.EPGroup) -> None:
    x, idx, w = inputs()
    _, counts, offsets, _, handle = OPS.dispatch(x.requires_grad_(), idx, w, group.name)
    assert not counts.requires_grad and not offsets.requires_grad and not handle.requires_grad


def test_operators_raise_the_same_sentence(group: moe_a2a.EPGroup) -> None:
    x, idx, w = inputs()
    idx[2, 1] = 17
    with pytest.raises(Exception, match=r"topk_idx\[2, 1\] = 17 is outside -1\.\.4 on rank 0"):
        OPS.dispatch(x, idx, w, group.name)
    with pytest.raises(Exception, match=r'no open group named "elsewhere"'):
        OPS.dispatch(x, idx, w, "elsewhere")


def test_the_functions_do_nothing_for_gradients_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that claims to be the fast one is the one taken: raw operators, and no node in a graph."""
    from moe_a2a import exchange

    def never(*_: object) -> None:
        raise AssertionError("something was done for gradients")

    for name in ("_dispatch_full", "_combine", "attach_dispatch", "attach_combine"):
        monkeypatch.setattr(exchange, name, never)
    x, idx, w = inputs()
    with moe_a2a.EPGroup(num_experts=5, top_k=3, max_tokens=7, hidden_size=9, dtype=torch.float32) as group:
        d = moe_a2a.dispatch(x, idx, group, w)
        moe_a2a.combine(d.x, d.handle, w)
        with pytest.raises(AssertionError, match="for gradients"):
            moe_a2a.dispatch(x.requires_grad_(), idx, group, w)


def test_a_group_that_went_out_of_scope_is_closed() -> None:
    group = moe_a2a.EPGroup(num_experts=5, top_k=3, max_tokens=7, hidden_size=9, dtype=torch.float32)
    name = group.name
    x, idx, w = inputs()
    OPS.dispatch(x, idx, w, name)
    del group
    with pytest.raises(RuntimeError, match="no open group"):
        OPS.dispatch_raw(x, idx, w, name)


def test_offsets_beyond_32_bits_in_the_kernels() -> None:
    """Rows 2 GiB apart (virtual memory only): gather and sum reach the right ones."""
    stride, hidden = 2**29, 3
    with moe_a2a.EPGroup(
        num_experts=3, top_k=2, max_tokens=5, hidden_size=hidden, dtype=torch.float32
    ) as group:
        x = torch.empty(4 * stride + hidden).as_strided((5, hidden), (stride, 1))
        for row in range(5):
            x[row] = torch.tensor([row + 1.0, -row, 0.5])
        idx = torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1], [2, 2]])
        d = moe_a2a.dispatch(x, idx, group)
        assert torch.equal(d.x, reference.dispatch_reference([x.contiguous()], [idx], 3)[0].x_NH)
        y = torch.empty(9 * stride + hidden).as_strided((10, hidden), (stride, 1))
        for row in range(10):
            y[row] = d.x[row] * (row + 2)
        out = moe_a2a.combine(y, d.handle)
        assert torch.equal(out, reference.combine_reference([y.contiguous()], [idx], 3)[0])


def test_what_dispatch_returned_will_do_for_combine() -> None:
    x, idx, w = inputs()
    with moe_a2a.EPGroup(num_experts=5, top_k=3, max_tokens=7, hidden_size=9, dtype=torch.float32) as group:
        d = moe_a2a.dispatch(x, idx, group)
        assert torch.equal(moe_a2a.combine(d.x, d, w), reference.combine_reference([d.x], [idx], 5, [w])[0])


def test_unpacked_columns_are_counted_as_what_they_cost() -> None:
    x, idx, _ = inputs()
    with moe_a2a.EPGroup(num_experts=5, top_k=3, max_tokens=7, hidden_size=9, dtype=torch.float32) as group:
        d = moe_a2a.dispatch(x.t().contiguous().t(), idx, group)
        copied = group.stats()["copied_bytes"]
        assert copied["dispatch_in"] == x.numel() * 4 and copied["dispatch_out"] == d.x.numel() * 4
        moe_a2a.combine(d.x.t().contiguous().t(), d.handle)
        assert group.stats()["copied_bytes"]["combine_in"] == d.x.numel() * 4


def test_one_rank_by_mistake_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher, a group made before init_process_group would be one rank that nobody asked for."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(moe_a2a.errors.BadValue, match=r"WORLD_SIZE = 2 .*init_process_group first"):
        moe_a2a.EPGroup(num_experts=5, top_k=3, max_tokens=7, hidden_size=9)


def test_sizes_may_be_numpy_integers() -> None:
    eight: Any = np.int64(8)
    two: Any = np.int32(2)
    with moe_a2a.EPGroup(num_experts=eight, top_k=two, max_tokens=eight, hidden_size=eight) as group:
        assert type(group.num_experts) is int and group.num_experts == 8
    for wrong in (True, 2.0, "2"):
        with pytest.raises(moe_a2a.errors.BadType, match="num_experts"):
            moe_a2a.EPGroup(num_experts=wrong, top_k=2, max_tokens=8, hidden_size=8)  # type: ignore[arg-type]


def test_output_memory_is_kept_within_its_limit_and_given_back_on_request() -> None:
    native.pool_trim()
    before = native.pool_stats()
    x, idx, _ = inputs()
    with moe_a2a.EPGroup(num_experts=5, top_k=3, max_tokens=7, hidden_size=9, dtype=torch.float32) as group:
        d = moe_a2a.dispatch(x, idx, group)
        assert native.pool_stats()["held_bytes"] > before["held_bytes"]
        del d
        kept = native.pool_stats()
        assert kept["held_bytes"] == before["held_bytes"] and kept["kept_bytes"] > 0
        d = moe_a2a.dispatch(x, idx, group)
        assert native.pool_stats()["reused"] > kept["reused"]
        del d
    assert native.pool_trim() > 0 and native.pool_stats()["kept_bytes"] == 0


@pytest.mark.parametrize(
    ("ranks", "tokens", "top_k", "hidden", "rows"),
    [
        (1, 4096, 8, 2048, 4096 * 8),  # all there can be
        (4, 4096, 8, 2048, 2 * 4096 * 8),  # twice the fair share
        (4, 1, 2, 2048, 8),  # decode: all there can be
        (64, 16, 8, 4096, 2048),  # 16 MiB of rows, between the two
    ],
)
def test_default_room_for_rows(ranks: int, tokens: int, top_k: int, hidden: int, rows: int) -> None:
    hint = moe_a2a.EPGroup.size_hint(
        ranks, num_experts=64, top_k=top_k, max_tokens=tokens, hidden_size=hidden, dtype=torch.bfloat16
    )
    assert hint.layout.recv_rows == rows


@pytest.mark.parametrize("check", ["test_schema", "test_autograd_registration", "test_faketensor"])
@pytest.mark.parametrize(
    "name",
    [
        "dispatch",
        "dispatch_full",
        "dispatch_raw",
        "dispatch_full_raw",
        "combine",
        "combine_raw",
        "window_x",
        "window_y",
    ],
)
def test_opcheck(name: str, check: str) -> None:
    """torch's own checks; test_aot_dispatch_dynamic calls twice and compares, which the call number in a handle forbids."""
    ops = torch.ops.moe_a2a
    with moe_a2a.EPGroup(num_experts=3, top_k=2, max_tokens=6, hidden_size=8, dtype=torch.float32) as group:
        x, idx, w = (
            torch.randn(5, 8),
            torch.tensor([[0, 2], [1, -1], [2, 2], [0, 1], [-1, -1]]),
            torch.rand(5, 2),
        )
        rows, _, handle = ops.dispatch_raw(x, idx, w, group.name)
        arguments: dict[str, tuple[Any, ...]] = {
            "dispatch": (x, idx, w, group.name, 0, 12, 2),
            "dispatch_full": (x, None, w, handle, group.name, 0, 12, 1, 2),
            "dispatch_raw": (x, idx, None, group.name),
            "dispatch_full_raw": (x, idx, w, None, group.name, 0, -1, 1, 1),
            "combine": (rows, handle, w, 5, group.name),
            "combine_raw": (rows, handle, w, group.name),
            "window_x": (3, 8, 1, group.name),
            "window_y": (handle, 8, 1, group.name),
        }
        opcheck(getattr(ops, name).default, arguments[name], test_utils=(check,))


STALE = """
import torch, moe_a2a
from moe_a2a.op_host import native
group = moe_a2a.EPGroup(num_experts=1, top_k=1, max_tokens=1400, hidden_size=1024, dtype=torch.float32)
for tokens in (700, 1400):  # blocks of 4 and 6 MiB, which together are too many
    moe_a2a.dispatch(torch.ones(tokens, 1024), torch.zeros(tokens, 1, dtype=torch.int64), group)
assert 6 << 20 <= native.pool_stats()["kept_bytes"] <= 8 << 20, native.pool_stats()
"""


def test_blocks_of_sizes_nobody_asks_for_make_room() -> None:
    """A pool that is full of them would keep nothing else."""
    environment = {**os.environ, "MOE_A2A_POOL_BYTES": str(8 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", STALE], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
