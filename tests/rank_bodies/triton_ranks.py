"""Bodies in groups whose ranks' kernels are Triton's, all of them or some.

:func:`play` runs the bodies that other tests run in groups of C++ ranks, so the whole list of cases holds for Triton ranks and
for groups of both kinds.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from pool import RankContext

from moe_a2a import devices
from moe_a2a.op_host.triton.launch import TritonLauncher
from rank_bodies.errors import Caught, caught
from rank_bodies.inputs import Step, all_inputs, assert_bits, run_experts
from rank_bodies.steps import expected

KINDS = {"T": "triton", "C": "cpu"}


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Launches of each kernel in this process, meanwhile."""
    launches: Counter[str] = Counter()
    launch = TritonLauncher.launch

    def counting(self: TritonLauncher, kernel: Any, *args: Any) -> None:
        launch(self, kernel, *args)
        launches[kernel.__name__] += 1

    TritonLauncher.launch = counting  # type: ignore[method-assign, assignment]
    try:
        yield launches
    finally:
        TritonLauncher.launch = launch  # type: ignore[method-assign]


def play(
    ctx: RankContext, kinds: str, address: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Counter[str]]:
    """(what a body returns, kernels launched); ``kinds``: T or C for each rank."""
    ctx.kernels = tuple(KINDS[kind] for kind in kinds)
    module, name = address.split(":")
    with counted() as launches:
        result = getattr(importlib.import_module(module), name)(ctx, *args, **kwargs)
    return result, launches


SIZES: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 2,
    "max_tokens": 8,
    "hidden_size": 6,
    "dtype": torch.float32,
    "timeout": 20.0,
    "warmup_timeout": 20.0,
}


def chosen(ctx: RankContext) -> tuple[str, dict[str, str], int]:
    """(kernels, the transport's description, the windows' format) of a group."""
    group = ctx.group(**SIZES)
    return group.kernels, group.transport.describe(), group.layout.format


def refused(
    ctx: RankContext, arguments: dict[str, Any], kernels: tuple[str, ...] | None = None
) -> Caught | None:
    """What making a group raises; a good one can be made after it."""
    if kernels is not None:
        ctx.kernels = kernels
    error = caught(lambda: ctx.fresh_group(**{**SIZES, **arguments}))
    ctx.kernels = ()
    with ctx.fresh_group(**SIZES) as group:
        assert group.kernels == "cpu"
    return error


def operators(ctx: RankContext) -> None:
    """The operators of devices, on this group's tensors, against the oracle."""
    group = ctx.group(**SIZES)
    step = Step((5, 8), 2, 6, rows="random", routing="any", drop=0.2)
    inputs = all_inputs(step, 4)
    mine = inputs[ctx.rank]
    rows, weights, meta = devices.dispatch_raw(mine.x_TH, mine.idx_TK, mine.weights_TK, group.name)
    want = expected(step, 4, ctx.rank)
    assert_bits(rows, want.received.x_NH, "rows")
    assert want.received.weights_N is not None
    assert_bits(weights, want.received.weights_N, "weights")
    y_NH = run_experts(rows, want.received.offsets, group.local_experts, rows.dtype)
    assert_bits(devices.combine_raw(y_NH, meta, mine.weights_TK, group.name), want.out_TH, "combined")
    scalars = torch.arange(len(rows), dtype=torch.float64)[:, None]
    again, _, _, other = devices.dispatch_full_raw(
        mine.x_TH, None, None, meta, group.name, 0, -1, 1, 0, 0, True
    )
    assert_bits(again, rows, "rows, by the routing of before")
    pairs = devices.combine_pairs_raw(scalars, other, group.name)
    assert_bits(devices.combine_again_raw(scalars, meta, group.name, 0, True), pairs, "pairs, on a round")
    assert ((pairs == 0) | (mine.idx_TK >= 0)).all()
