"""Errors of moe_a2a.

Every error names the operation, the argument, the offending value, the rank, what was expected and what to do.
All of them derive from :class:`MoeA2AError` and from the builtin a caller would expect, so ``except ValueError`` works too.

After ``BadValue``, ``BadType``, ``PeerAborted``, ``CallMismatch``, ``PadTooSmall`` and ``HandleExpired`` the group stays
usable: the failed call is used up on every rank and the next one works. After ``PeerLost`` (which includes ``PeerTimeout``)
the group is poisoned, on every rank, and has to be closed and made anew; so it is when a signal interrupts a call that waits.
After ``OutOfMemory`` it is usable, except where dispatch found no memory for its output after the rows were promised: then the
peers raise ``PeerLost``.

Errors about the wrong *object* can reach nobody else: a group that is no EPGroup, a handle that is no handle, one that has
expired. The peers of such a call wait for this rank's next one, or for the timeout.
"""

from __future__ import annotations


class MoeA2AError(Exception):
    """Base of all errors of this package."""


class BadValue(MoeA2AError, ValueError):
    """An argument of this rank has a wrong value or shape; raised before the first remote write."""


class BadType(MoeA2AError, TypeError):
    """An argument of this rank has a wrong type or dtype; raised before the first remote write."""


class PeerAborted(MoeA2AError, RuntimeError):
    """Another rank found bad input in this call; the message names the rank and carries its reason."""


class CallMismatch(MoeA2AError, RuntimeError):
    """The ranks called the operation with arguments that don't go together; raised on every rank involved."""


class PadTooSmall(MoeA2AError, ValueError):
    """Some rank would receive more rows than its pad_to; raised on every rank, nothing was exchanged."""


class PeerLost(MoeA2AError, RuntimeError):
    """A peer died, left or poisoned the group while this rank needed it."""


class PeerTimeout(PeerLost, TimeoutError):
    """A peer did not come within the group's timeout; names the operation, the call number and the ranks missing."""


class GroupPoisoned(MoeA2AError, RuntimeError):
    """The group was poisoned by an earlier timeout, death or interrupt and takes no further calls."""


class GroupClosed(MoeA2AError, RuntimeError):
    """The group was closed, or is used in a forked child that doesn't own it."""


class HandleExpired(MoeA2AError, RuntimeError):
    """The handle was combined already, or ``depth`` newer dispatches have started; also for what an asynchronous call returned
    and was waited for already. A local error."""


class OutOfMemory(MoeA2AError, MemoryError):
    """There isn't enough memory for the group's windows (the message has needed and free bytes), or for what a call needs."""


class WindowBusy(MoeA2AError, RuntimeError):
    """Every tensor that ``group.empty`` can hand out is in use; a local error."""


class GroupBusy(MoeA2AError, RuntimeError):
    """A call on a group from inside another call of the same thread, such as from a signal handler; nothing was sent."""


class TransportUnavailable(MoeA2AError, RuntimeError):
    """The transport that was asked for can't be had here; the message says why."""


# The C++ side reports a failure by one of these numbers (op_host/cpu/failure.h holds the same list, a test compares).
FAILURE_KINDS: dict[int, type[MoeA2AError]] = {
    1: BadValue,
    2: BadType,
    3: PeerAborted,
    4: CallMismatch,
    5: PadTooSmall,
    6: PeerLost,
    7: PeerTimeout,
    8: GroupPoisoned,
    9: GroupClosed,
    10: HandleExpired,
    11: OutOfMemory,
    12: TransportUnavailable,
    13: WindowBusy,
    14: GroupBusy,
}
INTERRUPTED = 99
_NUMBERS = {kind: number for number, kind in FAILURE_KINDS.items()}


def failure_number(error: BaseException) -> int:
    """The number of an error in records, status cells and verdicts; INTERRUPTED for one that isn't of this package."""
    return _NUMBERS.get(type(error), INTERRUPTED)  # type: ignore[arg-type]
