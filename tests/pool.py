"""A pool of rank processes that stays up for a whole test session.

Starting a rank costs about a second (most of it ``import torch``), so tests share one pool: eight processes,
one gloo world of eight, and a process group of ranks 0..R-1 for each R in :data:`GROUP_SIZES`. A test calls::

    results = pool.run(4, body, case, timeout=60)     # body(ctx, case) on ranks 0..3, results[r] = what rank
    r returned

A body that raises fails the test with the remote traceback of every rank that raised. A body that does not
come back in time, or a process that dies, fails the test with the Python stacks of all ranks; the processes
are then killed and the next test gets new ones, so that one fault is not reported twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GROUP_SIZES = (1, 2, 3, 4, 8)
START_TIMEOUT = 180.0  # seconds; eight imports of torch on two busy cores
GRACE = 15.0  # seconds the other ranks get to come back once one rank has raised
CACHED_GROUPS = 6  # EPGroups kept open per world size: windows are memory
_TESTS = Path(__file__).resolve().parent
_PR_SET_PDEATHSIG = 1


class PoolError(AssertionError):
    """Base of what :meth:`RankPool.run` raises; ``report`` is the text that the test log shows."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.report = report


@dataclass(frozen=True)
class RemoteError:
    """An exception of one rank, carried as text because its class may not exist in the parent."""

    rank: int
    kind: str
    message: str
    traceback: str


class RankFailed(PoolError):
    """A body raised on at least one rank; ``failures`` maps the rank to its :class:`RemoteError`."""

    def __init__(self, report: str, failures: dict[int, RemoteError]) -> None:
        super().__init__(report)
        self.failures = failures


class RankHung(PoolError):
    """At least one rank did not come back before the timeout; ``ranks`` lists them."""

    def __init__(self, report: str, ranks: list[int]) -> None:
        super().__init__(report)
        self.ranks = ranks


class RankDied(PoolError):
    """A rank's process ended during a run; ``exit_codes`` maps the rank to its code (negative: a signal)."""

    def __init__(self, report: str, exit_codes: dict[int, int | None]) -> None:
        super().__init__(report)
        self.exit_codes = exit_codes


def address_of(body: str | Callable[..., Any]) -> str:
    """Return ``module:function`` for a body given as such a string or as a module-level function."""
    if isinstance(body, str):
        return body
    if body.__qualname__ != body.__name__:
        raise ValueError(f"pool.run needs a module-level function, got {body.__module__}.{body.__qualname__}")
    return f"{body.__module__}:{body.__name__}"


# ---------------------------------------------------------------------------------------------- inside a rank


@dataclass
class RankContext:
    """What a body gets as its first argument.

    Attributes:
        rank, world_size: this rank and the number of ranks in the run.
        process_group: the torch process group of ranks 0..world_size-1; None in a pool without a world.
        rng: a generator seeded by the run's seed and the rank, so that delays differ between ranks.
        kernels: what moves rows, by rank, in the groups made here; () for the usual.
    """

    rank: int
    world_size: int
    process_group: Any
    rng: random.Random
    _caches: dict[int, OrderedDict[str, Any]]
    _fresh: list[Any] = field(default_factory=list)
    kernels: tuple[str, ...] = ()

    def group(self, **kwargs: Any) -> Any:
        """An ``EPGroup`` over this run's ranks, kept open and handed out again for equal arguments.

        Every rank of a run must ask for the same groups in the same order, because creation and eviction are
        decided by each rank alone.
        """
        cache = self._caches.setdefault(self.world_size, OrderedDict())
        key = repr((self.kernels, sorted(kwargs.items())))
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
        while len(cache) >= CACHED_GROUPS:
            cache.popitem(last=False)[1].close()
        cache[key] = self._make(**kwargs)
        return cache[key]

    def fresh_group(self, **kwargs: Any) -> Any:
        """A new ``EPGroup`` that is closed when the run ends: for tests that break or close it."""
        group = self._make(**kwargs)
        self._fresh.append(group)
        return group

    def _make(self, **kwargs: Any) -> Any:
        import moe_a2a

        if self.kernels:
            kwargs = {"kernels": self.kernels[self.rank], **kwargs}
        return moe_a2a.EPGroup(self.process_group, **kwargs)

    def jitter(self, max_ms: float) -> None:
        """Sleep for a random time of at most ``max_ms`` milliseconds; a third of the calls don't sleep at
        all.
        """
        if self.rng.random() > 1 / 3:
            time.sleep(self.rng.random() * max_ms / 1e3)

    def barrier(self) -> None:
        """Wait for the run's other ranks through gloo, independently of the code under test."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.process_group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (any picklable object) in rank order, through gloo."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.process_group)
        return values


def _close_all(groups: Sequence[Any]) -> list[str]:
    """Close groups, oldest first, and return the tracebacks of those whose close raised."""
    problems = []
    for group in groups:
        try:
            group.close()
        except Exception:
            problems.append(traceback.format_exc())
    return problems


def _send(conn: Connection, message: Any) -> None:
    # Not conn.send: torch registers reducers there that pass tensors as file descriptors.
    conn.send_bytes(pickle.dumps(message))


def _make_world(conn: Connection, rank: int, size: int) -> dict[int, Any]:
    """Meet the other ranks; returns the process group of each size."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=START_TIMEOUT)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, size, is_master=True, timeout=limit, wait_for_workers=False)
        _send(conn, store.port)
    else:
        port = pickle.loads(conn.recv_bytes())
        store = TCPStore("127.0.0.1", port, size, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    groups: dict[int, Any] = {r: dist.new_group(list(range(r))) for r in GROUP_SIZES if r < size}
    groups[size] = dist.group.WORLD
    return groups


def _worker_main(fd: int, rank: int, size: int, traces: str, parent: int, world: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)
    trace_file = open(traces, "w")  # noqa: SIM115  (stays open: the signal handler writes to it)
    faulthandler.enable(file=trace_file)
    faulthandler.register(signal.SIGUSR1, file=trace_file, all_threads=True)
    conn = Connection(fd)

    groups = _make_world(conn, rank, size) if world else {}
    gc.collect()
    gc.freeze()  # what torch brought along is not looked at by the collections below
    modules = len(sys.modules)
    _send(conn, "ready")

    caches: dict[int, OrderedDict[str, Any]] = {}
    while True:
        try:
            message = pickle.loads(conn.recv_bytes())
        except EOFError:
            os._exit(1)
        if message[0] == "stop":
            problems = _close_all([g for cache in caches.values() for g in cache.values()])
            if world:
                import torch.distributed as dist

                dist.destroy_process_group()
            _send(conn, problems)
            return
        if message[0] == "drop":
            problems = _close_all(list(caches.pop(message[1], {}).values()))
            _send(conn, problems)
            continue
        _, address, world_size, seed, args, kwargs = message
        rng = random.Random(seed * 1000 + rank)
        ctx = RankContext(rank, world_size, groups.get(world_size), rng, caches)
        reply: tuple[str, Any]
        try:
            module, name = address.split(":")
            result = getattr(importlib.import_module(module), name)(ctx, *args, **kwargs)
            problems = _close_all(ctx._fresh)
            if problems:
                raise RuntimeError("closing a fresh group raised:\n" + "\n".join(problems))
            reply = ("ok", result)
        except BaseException as error:
            remote = RemoteError(rank, type(error).__name__, str(error), traceback.format_exc())
            reply = ("error", remote)
            _close_all(ctx._fresh)
        try:
            _send(conn, reply)
        except Exception as error:  # the result can't be pickled
            remote = RemoteError(rank, type(error).__name__, str(error), traceback.format_exc())
            _send(conn, ("error", remote))
        # A traceback kept alive would keep the body's tensors, and with them handles of closed groups.
        del ctx, reply
        gc.collect()
        if len(sys.modules) != modules:
            # torch.compile brings 300,000 objects along: each later collection, and so each run, would take 0.2 s a rank.
            gc.freeze()
            modules = len(sys.modules)


# ------------------------------------------------------------------------------------------ inside the parent


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    conn: Connection
    traces: Path
    log: Path


class RankPool:
    """``size`` rank processes, started at the first :meth:`run` and kept until :meth:`close`.

    Without a ``world`` they import no torch and have no process groups: for bodies that need none, as it starts at once.
    """

    def __init__(self, size: int = 8, env: dict[str, str] | None = None, world: bool = True) -> None:
        if size not in GROUP_SIZES:
            raise ValueError(f"RankPool: size = {size}, expected one of {GROUP_SIZES}")
        self.size = size
        self.starts = 0
        self._env = env or {}
        self._world = world
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._seed = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the running ranks, in rank order; empty before the first run."""
        return [worker.process.pid for worker in self._workers]

    def run(
        self,
        world_size: int,
        body: str | Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        seed: int | None = None,
        deaths: Sequence[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``body(ctx, *args, **kwargs)`` on ranks 0..world_size-1 and return their results in rank order.

        The ranks in ``deaths`` have to end during the run: their result is the exit code (negative: a
        signal), and the next run starts new processes, because the survivors' world is broken.

        Raises:
            RankFailed: the body raised; RankHung: no result within ``timeout`` seconds; RankDied: a process
            ended.
        """
        if world_size not in GROUP_SIZES or world_size > self.size:
            raise ValueError(
                f"pool.run: world_size = {world_size}, expected one of {GROUP_SIZES} <= {self.size}"
            )
        address = address_of(body)
        self._seed += 1
        request = ("run", address, world_size, self._seed if seed is None else seed, args, kwargs)
        try:
            self._start()
            return self._run(self._workers[:world_size], request, timeout, deaths)
        except PoolError:
            raise
        except BaseException:
            self._kill()  # interrupted: what the ranks still say belongs to no later run
            raise

    def _run(
        self, workers: Sequence[_Worker], request: tuple[Any, ...], timeout: float, deaths: Sequence[int]
    ) -> list[Any]:
        """Send the request to these ranks and return their results."""
        _, address, world_size, *_ = request
        for worker in workers:
            # A rank that died since the last run: _collect sees the closed connection and reports it.
            with contextlib.suppress(OSError):
                _send(worker.conn, request)
        replies = self._collect(workers, timeout, f"{address} on {world_size} ranks", deaths)
        failures = {r: value for r, (kind, value) in replies.items() if kind == "error"}
        if failures:
            text = _failure_text(failures, world_size)
            if deaths:
                self._kill()
                raise RankFailed(text, failures)
            # The ranks that raised may have left cached groups at another call number than the others.
            try:
                for worker in workers:
                    _send(worker.conn, ("drop", world_size))
                self._collect(workers, GRACE, "closing the cached groups")
            except (PoolError, OSError) as error:
                text += f"\nthen {error}"
            raise RankFailed(text, failures)
        if deaths:
            self._kill()
        return [replies[r][1] for r in range(world_size)]

    def close(self) -> list[str]:
        """Stop the ranks. Returns what went wrong on the way, one text per problem; an empty list is a clean
        end.
        """
        problems: list[str] = []
        for worker in self._workers:
            try:
                _send(worker.conn, ("stop",))
            except OSError as error:
                problems.append(f"rank {worker.rank}: {error}")
        deadline = time.monotonic() + 2 * GRACE
        for worker in self._workers:
            try:
                if worker.conn.poll(max(0.0, deadline - time.monotonic())):
                    problems += [
                        f"rank {worker.rank}: {text}" for text in pickle.loads(worker.conn.recv_bytes())
                    ]
                code = worker.process.wait(max(0.1, deadline - time.monotonic()))
                if code != 0:
                    problems.append(f"rank {worker.rank}: exit code {code} at the end of the session")
            except (subprocess.TimeoutExpired, EOFError, OSError) as error:
                problems.append(f"rank {worker.rank}: did not stop ({error!r})")
        if problems:
            problems.append(self._stacks())
        self._kill()
        return problems

    def _start(self) -> None:
        if self._workers:
            return
        self.starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="moe_a2a_pool_"))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **self._env}
        code = (
            f"import sys; sys.path.insert(0, {str(_TESTS)!r}); import pool; "
            "fd, rank, size, traces, parent, world = sys.argv[1:]; "
            "pool._worker_main(int(fd), int(rank), int(size), traces, int(parent), bool(int(world)))"
        )
        for rank in range(self.size):
            ours, theirs = socket.socketpair()
            traces, log = self._folder / f"rank{rank}.stacks", self._folder / f"rank{rank}.log"
            with theirs, log.open("wb") as log_file:
                command = [sys.executable, "-c", code, str(theirs.fileno()), str(rank), str(self.size)]
                process = subprocess.Popen(
                    [*command, str(traces), str(os.getpid()), str(int(self._world))],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C at the terminal is the parent's business
                    env=env,
                )
            self._workers.append(_Worker(rank, process, Connection(ours.detach()), traces, log))
        if self._world:
            port = self._collect(self._workers[:1], START_TIMEOUT, "starting rank 0")[0]
            for worker in self._workers[1:]:
                _send(worker.conn, port)
        self._collect(self._workers, START_TIMEOUT, "starting the ranks")

    def _collect(
        self, workers: Sequence[_Worker], timeout: float, what: str, deaths: Sequence[int] = ()
    ) -> dict[int, Any]:
        """Wait for one message of each worker; a death that isn't in ``deaths``, or a hang, ends the pool and
        raises.
        """
        waiting = {worker.conn: worker for worker in workers}
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while waiting:
            for conn in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(conn, Connection)
                worker = waiting.pop(conn)
                try:
                    reply = pickle.loads(conn.recv_bytes())
                except (EOFError, OSError):
                    if worker.rank not in deaths:
                        self._end_dead(what, replies)
                    reply = ("dead", worker.process.wait(GRACE))
                replies[worker.rank] = reply
                if isinstance(reply, tuple) and reply[0] == "error" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
            if waiting and time.monotonic() >= deadline:
                self._end_hung(what, timeout, sorted(w.rank for w in waiting.values()), replies)
        return replies

    def _end_dead(self, what: str, replies: dict[int, Any]) -> None:
        time.sleep(0.2)  # the connection closes a moment before the exit code is there
        codes = {w.rank: code for w in self._workers if (code := w.process.poll()) is not None}
        text = f"{what}: a rank's process ended: {codes or 'connection closed'}\n"
        text += _failure_text(_failures(replies), len(self._workers)) + self._stacks()
        self._kill()
        raise RankDied(text, dict(codes))

    def _end_hung(self, what: str, timeout: float, missing: list[int], replies: dict[int, Any]) -> None:
        failures = _failures(replies)
        stacks = self._stacks()
        self._kill()
        if failures:
            text = _failure_text(failures, len(replies) + len(missing))
            text += f"{what}: ranks {missing} did not come back within {GRACE:g} s of that\n{stacks}"
            raise RankFailed(text, failures)
        raise RankHung(f"{what}: ranks {missing} did not come back within {timeout:g} s\n{stacks}", missing)

    def _stacks(self) -> str:
        """Ask every live rank for its Python stacks and return them with the ends of the ranks' logs."""
        alive = [worker for worker in self._workers if worker.process.poll() is None]
        for worker in alive:
            worker.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not all(
            w.traces.exists() and w.traces.stat().st_size for w in alive
        ):
            time.sleep(0.05)
        time.sleep(0.1)  # the handler writes in several pieces
        parts = []
        for worker in self._workers:
            stacks = worker.traces.read_text() if worker.traces.exists() else ""
            log = worker.log.read_text(errors="replace")[-2000:]
            parts.append(f"--- rank {worker.rank} (pid {worker.process.pid})\n{stacks}{log}")
        return "\n".join(parts)

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.conn.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _failures(replies: dict[int, Any]) -> dict[int, RemoteError]:
    return {r: v[1] for r, v in replies.items() if isinstance(v, tuple) and v[0] == "error"}


def _failure_text(failures: dict[int, RemoteError], world_size: int) -> str:
    parts = []
    for rank, error in sorted(failures.items()):
        parts.append(f"rank {rank} of {world_size}: {error.kind}: {error.message}\n{error.traceback}")
    return "\n".join(parts)
