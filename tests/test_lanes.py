"""What the quick lane leaves away is what it may leave away."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import lanes
import pytest
from lanes import crossed, slow


def values_of(cases: list[Any], quick: bool) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if bool(case.marks) != quick]


def test_example() -> None:
    found = doctest.testmod(lanes)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("strength", [1, 2, 3, 9])
def test_every_combination_of_so_many_axes_is_quick(strength: int) -> None:
    axes: list[list[Any]] = [[1, 2, 3, 4], ["a", "b", "c"], [None, 5], [False, True]]
    cases = crossed(*axes, strength=strength)
    assert [case.values for case in cases] == [one[::-1] for one in itertools.product(*axes[::-1])]
    assert len({case.id for case in cases}) == len(cases)
    quick = values_of(cases, True)
    for which in itertools.combinations(range(4), min(strength, 4)):
        assert {tuple(one[i] for i in which) for one in quick} == set(
            itertools.product(*(axes[i] for i in which))
        )
    # As few as can be here: the product of the largest axes.
    assert len(quick) == {1: 4, 2: 12, 3: 24, 9: 48}[strength]


def test_slow_values_are_never_quick() -> None:
    cases = crossed({"one": 1, "two": slow(2)}, [slow("a"), "b", "c"], strength=2)
    assert values_of(cases, True) == [(1, "b"), (1, "c")]
    assert values_of(cases, False) == [(1, "a"), (2, "a"), (2, "b"), (2, "c")]
    assert [case.id for case in cases] == ["one-a", "two-a", "one-b", "two-b", "one-c", "two-c"]
