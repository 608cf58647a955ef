"""Fixtures shared by the whole suite: the pool of rank processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import RankPool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked slow to a run that asks for them with -m."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks that start with the first test that uses them; an unclean end fails the session."""
    ranks = RankPool()
    yield ranks
    problems = ranks.close()
    assert not problems, "\n".join(problems)
