"""The rank pool itself: what it must notice, and that it recovers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pool as pool_module
import pytest
from pool import GROUP_SIZES, RankDied, RankFailed, RankHung, RankPool
from rank_bodies import pool_bodies


@pytest.fixture(scope="module")
def small() -> Iterator[RankPool]:
    """A pool of two ranks of its own, so that breaking it doesn't cost the session's pool a restart."""
    ranks = RankPool(2)
    yield ranks
    problems = ranks.close()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Two ranks without a world, to be killed and started often."""
    ranks = RankPool(2, world=False)
    yield ranks
    problems = ranks.close()
    assert not problems, "\n".join(problems)


def gone(pid: int) -> bool:
    """True if the process has ended (a zombie that nobody has reaped yet counts as ended)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


@pytest.mark.parametrize("world_size", GROUP_SIZES)
def test_runs_on_ranks_of_the_group(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, pool_bodies.identify, scale=10)
    expected = 10 * sum(range(world_size))
    assert [r[:3] for r in results] == [(rank, world_size, expected) for rank in range(world_size)]
    starts = pool.starts
    again = pool.run(world_size, "rank_bodies.pool_bodies:identify")
    assert [r[3] for r in again] == [r[3] for r in results] == pool.pids[:world_size]
    assert pool.starts == starts


def test_seed_decides_the_generator(small: RankPool) -> None:
    first, second = small.run(2, pool_bodies.draw, seed=7), small.run(2, pool_bodies.draw, seed=7)
    assert first == second and first[0] != first[1]
    assert small.run(2, pool_bodies.draw, seed=8) != first


def test_tensors_come_back_by_value(small: RankPool) -> None:
    assert [t.tolist() for t in small.run(2, pool_bodies.tensor_back)] == [[0.0] * 3, [1.0] * 3]


def test_exception_is_carried_with_rank_and_traceback(small: RankPool) -> None:
    with pytest.raises(RankFailed) as info:
        small.run(2, pool_bodies.raise_on, 1)
    assert list(info.value.failures) == [1]
    error = info.value.failures[1]
    assert (error.rank, error.kind) == (1, "LookupError")
    assert error.message == "deliberate failure of rank 1"
    assert "in raise_on" in error.traceback and "rank 1 of 2: LookupError" in str(info.value)
    starts = small.starts
    assert [r[0] for r in small.run(2, pool_bodies.identify)] == [0, 1]
    assert small.starts == starts, "an exception must not cost a restart"


def test_keyboard_interrupt_and_unpicklable_results_are_failures(small: RankPool) -> None:
    with pytest.raises(RankFailed, match="KeyboardInterrupt"):
        small.run(2, pool_bodies.interrupted)
    with pytest.raises(RankFailed, match="pickle"):
        small.run(2, pool_bodies.unpicklable)
    assert len(small.run(2, pool_bodies.identify)) == 2


def test_a_hang_is_found_and_the_pool_restarts(bare: RankPool) -> None:
    bare.run(2, pool_bodies.draw)
    pids, starts = bare.pids, bare.starts
    begin = time.monotonic()
    with pytest.raises(RankHung) as info:
        bare.run(2, pool_bodies.sleep_in_here, 1, timeout=1.0)
    assert time.monotonic() - begin < 30
    assert info.value.ranks == [1]
    assert "in sleep_in_here" in info.value.report, "the stacks of the ranks belong in the report"
    assert all(gone(pid) for pid in pids)
    assert bare.run(2, pool_bodies.draw, seed=7) == [random.Random(7000 + rank).random() for rank in range(2)]
    assert bare.starts == starts + 1


def test_ranks_left_waiting_after_a_failure_are_reported(
    bare: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "GRACE", 0.5)
    with pytest.raises(RankFailed, match=r"(?s)deliberate failure.*ranks \[1\] did not come back") as info:
        bare.run(2, pool_bodies.raise_while_others_wait, 0)
    assert list(info.value.failures) == [0]
    assert "in raise_while_others_wait" in info.value.report
    monkeypatch.undo()
    assert len(bare.run(2, pool_bodies.draw)) == 2


def test_a_dead_rank_is_found_and_the_pool_restarts(small: RankPool) -> None:
    pids = small.pids
    with pytest.raises(RankDied) as info:
        small.run(2, pool_bodies.die, 1, int(signal.SIGKILL))
    assert info.value.exit_codes == {1: -signal.SIGKILL}
    assert all(gone(pid) for pid in pids)
    assert len(small.run(2, pool_bodies.identify)) == 2
    # A rank that dies between two runs is noticed by the next one.
    os.kill(small.pids[0], signal.SIGKILL)
    with pytest.raises(RankDied):
        small.run(2, pool_bodies.identify)


def test_ranks_do_not_outlive_the_parent() -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pool import RankPool; p = RankPool(2, world=False)\n"
        "p.run(2, 'rank_bodies.pool_bodies:draw'); print(*p.pids, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(gone(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(gone(pid) for pid in pids)


def test_what_a_run_imported_is_not_looked_at_after_each_later_one(bare: RankPool) -> None:
    """The 300,000 objects of torch.compile took each rank 0.2 s of collection a run."""
    bare.run(2, pool_bodies.import_much, 100_000)
    assert max(bare.run(2, pool_bodies.collectable)) < 20_000


class Enough(BaseException):
    pass


def test_an_interrupted_run_leaves_nothing_for_the_next_one(bare: RankPool) -> None:
    bare.run(2, pool_bodies.draw)
    pids = bare.pids

    def raise_it(*_: object) -> None:
        raise Enough

    before = signal.signal(signal.SIGUSR1, raise_it)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(Enough):
            bare.run(2, pool_bodies.sleep_in_here, 1)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert all(gone(pid) for pid in pids)
    assert bare.run(2, pool_bodies.draw, seed=7) == [random.Random(7000 + rank).random() for rank in range(2)]


STUCK_TESTS = """
    import itertools, time
    def test_in_python(): time.sleep(100)
    def test_goes_on(): pass
    def test_in_c(): sum(itertools.repeat(0))
"""


@pytest.mark.parametrize("which", ["one", "in C", "many"])
def test_a_stuck_test_does_not_take_all_the_time(tmp_path: Path, which: str) -> None:
    """This suite's conftest.py with limits of a second."""
    (tmp_path / "short.py").write_text("import conftest\nconftest.LIMIT = conftest.MORE = 1.0\n")
    script = textwrap.dedent(STUCK_TESTS)
    if which == "many":
        (tmp_path / "short.py").write_text("import conftest\nconftest.LIMIT, conftest.MOST_STUCK = 0.5, 2\n")
        script += "for number in range(9): globals()[f'test_again_{number}'] = test_in_python\n"
    (tmp_path / "test_stuck.py").write_text(script)
    # tests/conftest.py as a plugin
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "conftest", "-p", "short"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "test_stuck.py"]
        + {"one": ["-k", "python or on"], "in C": ["-k", "in_c"], "many": ["-k", "not in_c"]}[which],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{tmp_path}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if which == "in C":
        assert (
            done.returncode not in (0, 2)
            and "Timeout (0:00:02)" in done.stderr
            and "in test_in_c" in done.stderr
        )
        return
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "Stuck: test_stuck.py::test_in_python took more than" in done.stdout
        and "time.sleep(100)" in done.stdout
    )
    assert ("1 failed, 1 passed" in done.stdout) == (which == "one"), done.stdout
    assert ("2 tests got stuck" in done.stdout) == (which == "many"), done.stdout


def test_wrong_use_is_named() -> None:
    ranks = RankPool(2)
    with pytest.raises(ValueError, match="world_size = 5"):
        ranks.run(5, pool_bodies.identify)
    with pytest.raises(ValueError, match="size = 6"):
        RankPool(6)
    with pytest.raises(ValueError, match="module-level"):
        ranks.run(2, lambda ctx: None)
    assert ranks.pids == [] and ranks.starts == 0
