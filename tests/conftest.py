"""What the whole suite shares: the pool of rank processes, and limits that keep a stuck test from taking all the time."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import pytest
from pool import RankHung, RankPool

collect_ignore = ["ascend"]  # runs in the environment of triton-ascend, by `make ascend-check`
LIMIT = 240.0  # seconds for a test, for its setup and for its teardown; several times what the longest needs on a slow machine
SLOW_LIMIT = 3600.0
MORE = 30.0  # seconds after LIMIT at which the session ends, where the main thread runs no Python that could raise
MOST_STUCK = 4  # tests; then the session ends: the next ones would wait as long
LATER = ("slow", "transformers")
STDERR = pytest.StashKey[int]()
STUCK = pytest.StashKey[list[str]]()


class Stuck(BaseException):
    """A test took longer than it may; the traceback says where it was."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # during a test, 2 is pytest's own file
    config.stash[STUCK] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what it puts into the background; tests interrupt processes, which inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests with a marker of :data:`LATER` to a run that asks for them with -m."""
    if config.option.markexpr:
        return
    later = [item for item in items if any(item.get_closest_marker(name) for name in LATER)]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]


@contextlib.contextmanager
def limited(item: pytest.Item) -> Iterator[None]:
    """Raises :class:`Stuck` when it takes too long."""
    limit = SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT

    def give_up(*_: Any) -> NoReturn:
        raise Stuck(f"{item.nodeid} took more than {limit:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    faulthandler.dump_traceback_later(limit + MORE, exit=True, file=item.config.stash[STDERR])
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Ends the session after too many stuck tests."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, (Stuck, RankHung)):
        stuck = item.config.stash[STUCK]
        stuck.append(item.nodeid)
        if len(stuck) == MOST_STUCK:
            item.session.shouldfail = f"{MOST_STUCK} tests got stuck: {', '.join(stuck)}"
    return report


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks that start with the first test that uses them; an unclean end fails the session."""
    ranks = RankPool()
    yield ranks
    problems = ranks.close()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[RankPool]:
    """Four ranks whose Triton kernels are interpreted, which has to be known before Triton is imported."""
    ranks = RankPool(4, env={"TRITON_INTERPRET": "1"})
    yield ranks
    problems = ranks.close()
    assert not problems, "\n".join(problems)
