"""Waiting for peers: launch again until it is there, a peer is lost, or time is up.

A kernel polls a bounded number of times and returns; between two launches the host looks at status cells and at the ends of
processes. So nothing waits for ever, and whatever ends a wait has a name.

Shape symbols: R ranks.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import (
    INTERRUPTED,
    GroupClosed,
    GroupPoisoned,
    MoeA2AError,
    PeerLost,
    PeerTimeout,
    failure_number,
)
from ..heap import SymmetricHeap
from ..layout import CODE_BLOCK, Phase, ProgressWord, Status, StatusWord, WindowLayout
from .record import high, joined, low

_REMEDY = "The group is poisoned: close it and make a new one"
_LONGEST_SLEEP = 1e-3  # seconds between two launches of a wait
_PHASES = {
    Phase.IDLE: "idle",
    Phase.DISPATCH_PACK: "packing in dispatch",
    Phase.DISPATCH_COUNTS: "waiting for counts in dispatch",
    Phase.DISPATCH_ROWS: "copying rows in dispatch",
    Phase.DISPATCH_PUSH: "pushing rows in dispatch",
    Phase.COMBINE_WRITE: "writing rows in combine",
    Phase.COMBINE_WAIT: "waiting for rows in combine",
    Phase.COMBINE_SUM: "summing in combine",
}


def _phase(number: int) -> str:
    return _PHASES[Phase(number)] if number in tuple(Phase) else "unknown"


def rank_list(ranks: Iterable[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


@dataclass(frozen=True)
class _Loss:
    """Why a wait ends without what it waited for."""

    error: MoeA2AError
    who: int
    gone: bool = False  # who ended or left: counts only while its part is missing


class Peers:
    """The other ranks of a group: are they there, and what are they told when this one goes.

    Attributes:
        poison: why the group takes no further calls; "" while it does.
        closing: set when the group is to be closed; ends a wait.
        waited: [R] seconds this rank has waited for each.
    """

    def __init__(
        self,
        layout: WindowLayout,
        heap: SymmetricHeap,
        timeout: float,
        warmup_timeout: float,
    ) -> None:
        self._layout, self._heap = layout, heap
        self.rank, self.world_size = heap.rank, heap.world_size
        self.others = [peer for peer in range(self.world_size) if peer != self.rank]
        self._timeout, self._warmup = timeout, max(timeout, warmup_timeout)
        self._seen: set[int] = set()
        self.poison = ""
        self.closing = threading.Event()
        self.waited = [0.0] * self.world_size
        self._progress = self._int64(self.rank)

    def _int64(self, rank: int) -> Tensor:
        at = self._layout.progress
        return self._heap.block(rank)[at : at + 8 * len(ProgressWord)].view(torch.int64)

    # ------------------------------------------------------------------------------------------------- progress

    @property
    def epoch(self) -> int:
        """n, the call counter, which lives in the own window."""
        return int(self._progress[ProgressWord.EPOCH])

    @epoch.setter
    def epoch(self, n: int) -> None:
        self._progress[ProgressWord.EPOCH] = n

    def phase(self, phase: Phase) -> None:
        """What peers read of this rank when they report a hang."""
        self._progress[ProgressWord.PHASE] = int(phase)

    def verdict(self, error: BaseException | None) -> None:
        """How a call ended."""
        self._progress[ProgressWord.VERDICT] = 0 if error is None else failure_number(error)
        self.phase(Phase.IDLE)

    def last_seen(self, peer: int) -> str:
        """Where a peer is, by its own progress cell."""
        epoch, phase = self._int64(peer).tolist()[:2]
        if epoch == 0 and phase == Phase.IDLE:
            return f"rank {peer} has made no call yet"
        return f"rank {peer} was last seen in call {epoch}, {_phase(phase)}"

    # --------------------------------------------------------------------------------------------------- status

    def _status_words(self, window: int, writer: int) -> Tensor:
        at = self._layout.status + writer * self._layout.status_stride
        return self._heap.block(window)[at : at + self._layout.status_stride].view(torch.int32)

    def _status(self, peer: int) -> tuple[int, list[int]]:
        """(code, body) of a peer's word to this rank; 0 when never written or torn."""
        words = self._status_words(self.rank, peer).tolist()
        at = self._layout.status_code // 4
        block = words[at : at + CODE_BLOCK // 4]
        code = block[0] if min(block) == max(block) else 0
        at = self._layout.status_body // 4
        return code, words[at : at + len(StatusWord)]

    def tell(self, status: Status, reason: int, who: int, epoch: int, phase: Phase) -> None:
        """Writes this rank's status cell into every peer's window: body, then code."""
        body = [0] * len(StatusWord)
        body[StatusWord.REASON], body[StatusWord.WHO], body[StatusWord.PHASE] = reason, who, int(phase)
        body[StatusWord.EPOCH_LO], body[StatusWord.EPOCH_HI] = low(epoch), high(epoch)
        body[StatusWord.GENERATION] = self._layout.generation
        at, code = self._layout.status_body // 4, self._layout.status_code // 4
        for peer in self.others:
            words = self._status_words(peer, self.rank)
            words[at : at + len(body)] = torch.tensor(body, dtype=torch.int32, device=words.device)
            release()
            words[code : code + CODE_BLOCK // 4] = int(status)

    def leave(self, epoch: int) -> None:
        """Says that this rank has closed its group, unless it has given it up."""
        if not self.poison:
            self.tell(Status.LEFT, 0, -1, epoch, Phase.IDLE)

    def check(self, operation: str, name: str) -> None:
        """Raises GroupPoisoned once the group takes no further calls."""
        if self.poison:
            raise GroupPoisoned(
                f"{operation}: group {name} on rank {self.rank} takes no further calls after: {self.poison}"
            )

    def lose(self, reason: int, text: str, who: int, epoch: int, phase: Phase) -> None:
        """This rank gives the group up, and tells every peer.

        Args:
            reason: number of the error. text: what later calls say. who: the rank that was missing; this one for its own part.
        """
        self._progress[ProgressWord.VERDICT] = reason
        if not self.poison:
            self.poison = text
            self.tell(Status.POISON, reason, who, epoch, phase)

    # -------------------------------------------------------------------------------------------------- waiting

    def wait(
        self,
        missing: Iterable[int],
        epoch: int,
        operation: str,
        phase: Phase,
        attempt: Callable[[set[int]], set[int]],
    ) -> None:
        """Until nobody is missing.

        Args:
            missing: ranks that something is expected of.
            attempt: launches a kernel that polls; given who is missing, returns who still is.

        Raises:
            PeerLost, PeerTimeout: after having told every peer. GroupClosed: by another thread or a signal handler. Whatever
            ``attempt`` raises; an exception that isn't of this package (a signal's) poisons the group.
        """
        waiting = set(missing)
        if not waiting:
            return
        self.phase(phase)
        start = time.monotonic()
        sleep = 1e-4

        def poll() -> bool:
            nonlocal waiting
            left = attempt(waiting)
            for peer in waiting - left:
                self._seen.add(peer)
                self.waited[peer] += time.monotonic() - start
            waiting = left
            return not waiting

        try:
            while not poll():
                loss = self._loss(waiting, epoch, operation, time.monotonic() - start)
                if loss is not None:
                    # A peer may have done its part and left, or ended, between the poll and the look at it: poll once more.
                    own_wish = isinstance(loss.error, GroupClosed)
                    if not own_wish and poll():
                        return
                    if own_wish:
                        self.verdict(loss.error)
                        raise loss.error
                    if not loss.gone or loss.who in waiting:
                        self.lose(failure_number(loss.error), str(loss.error), loss.who, epoch, phase)
                        raise loss.error
                time.sleep(sleep)
                sleep = min(2 * sleep, _LONGEST_SLEEP)
        except MoeA2AError:
            raise
        except BaseException as error:  # a signal's handler raised, say: peers mustn't wait for this rank
            text = (
                f"{operation}, call {epoch} on rank {self.rank}: interrupted ({type(error).__name__}: {error}) while waiting "
                f"for {rank_list(waiting)}. {_REMEDY}"
            )
            self.lose(INTERRUPTED, text, self.rank, epoch, phase)
            raise

    def _loss(self, missing: set[int], epoch: int, operation: str, waited: float) -> _Loss | None:
        where = f"{operation}, call {epoch} on rank {self.rank}"
        if self.closing.is_set():
            return _Loss(
                GroupClosed(
                    f"{where}: the group was closed (by another thread or a signal handler) while this call waited for "
                    f"{rank_list(missing)}"
                ),
                self.rank,
            )
        # First who is gone, then who gave up: the second is often only a consequence of the first.
        for peer in sorted(missing):
            code, body = self._status(peer)
            if code == Status.LEFT:
                last = joined(body[StatusWord.EPOCH_LO], body[StatusWord.EPOCH_HI])
                text = f"{where}: rank {peer} closed its group after call {last}. {_REMEDY}"
                return _Loss(PeerLost(text), peer, True)
            if _ended(self._heap.pidfds[peer]):
                text = f"{where}: the process of rank {peer} has ended ({self.last_seen(peer)}). {_REMEDY}"
                return _Loss(PeerLost(text), peer, True)
        for peer in self.others:
            code, body = self._status(peer)
            if code == Status.POISON:
                last = joined(body[StatusWord.EPOCH_LO], body[StatusWord.EPOCH_HI])
                who = body[StatusWord.WHO]
                missed = f", it missed rank {who}" if who >= 0 and who != peer else ""
                text = (
                    f"{where}: rank {peer} gave the group up in call {last} ({_phase(body[StatusWord.PHASE])}{missed}). "
                    f"{_REMEDY}"
                )
                return _Loss(PeerLost(text), peer)
        warming = not missing <= self._seen
        if waited < (self._warmup if warming else self._timeout):
            return None
        seen = "; ".join(self.last_seen(peer) for peer in sorted(missing))
        text = (
            f"{where}: nothing from {rank_list(missing)} for {waited:.3g} s{' (warmup_timeout)' if warming else ''} ({seen}). "
            f"All ranks must make the same calls in the same order. {_REMEDY}"
        )
        return _Loss(PeerTimeout(text), min(missing))


def _ended(pidfd: int) -> bool:
    """Whether the process behind a descriptor has ended; -1: nobody knows."""
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


_fence = threading.Lock()


def release() -> None:
    """What this thread wrote before is seen before what it writes next: a lock taken twice is a barrier on every CPU."""
    for _ in range(2):
        with _fence:
            pass


__all__ = ["Peers", "rank_list", "release"]
