"""Which cases of a product of many axes `make test` runs; `make test-long` runs the others.

>>> [case.id for case in crossed({"pull": 1, "push": 2}, ["compact", "line"], [1, 2]) if not case.marks]
['pull-compact-1', 'push-line-1', 'push-compact-2', 'pull-line-2']
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]


def covering(sizes: Sequence[int], strength: int) -> list[tuple[int, ...]]:
    """Combinations of indices that have every value of every ``strength`` axes together, few of them: the one that has most
    of what is still missing is taken, again and again.
    """
    which = list(itertools.combinations(range(len(sizes)), min(strength, len(sizes))))
    everything = list(itertools.product(*map(range, sizes)))
    parts = {one: {(axes, tuple(one[a] for a in axes)) for axes in which} for one in everything}
    missing = set().union(*parts.values())
    chosen = []
    while missing:
        best = max(everything, key=lambda one: len(parts[one] & missing))
        chosen.append(best)
        missing -= parts[best]
    return chosen


def crossed(*axes: Axis, strength: int = 2) -> list[Any]:
    """The whole product as parameters, the first axis fastest; marked slow are those that :func:`covering` can do without.

    Args:
        axes: values, or values by their names in the ids of the tests; of those given as :func:`slow` nothing is quick.
        strength: how many axes are combined in full in the quick lane.
    """
    named = [axis if isinstance(axis, Mapping) else {_name(value): value for value in axis} for axis in axes]
    quick_at = [[i for i, value in enumerate(axis.values()) if not _is_slow(value)] for axis in named]
    quick = {
        tuple(places[i] for places, i in zip(quick_at, at, strict=True))
        for at in covering([len(places) for places in quick_at], strength)
    }
    made = []
    for backwards in itertools.product(*(range(len(axis)) for axis in reversed(named))):
        at = backwards[::-1]
        items = [list(axis.items())[i] for axis, i in zip(named, at, strict=True)]
        made.append(
            pytest.param(
                *(value.values[0] if _is_slow(value) else value for _, value in items),
                id="-".join(name for name, _ in items),
                marks=() if at in quick else pytest.mark.slow,
            )
        )
    return made


def slow(*values: Any) -> Any:
    """A case that only `make test-long` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _is_slow(value: Any) -> bool:
    return isinstance(value, type(slow(None)))


def _name(value: Any) -> str:
    return _name(value.values[0]) if _is_slow(value) else str(value)
