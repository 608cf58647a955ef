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

from pool import RankContext

from moe_a2a.op_host.triton.launch import TritonLauncher

KINDS = {"T": "triton", "C": "cpu"}


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Launches of each kernel in this process, meanwhile."""
    launches: Counter[str] = Counter()
    launch = TritonLauncher.launch

    def counting(self: TritonLauncher, kernel: Any, *args: Any) -> None:
        launch(self, kernel, *args)
        launches[kernel.__name__] += 1

    TritonLauncher.launch = counting  # type: ignore[method-assign]
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
