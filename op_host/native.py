"""The compiled library ``moe_a2a._C`` as seen from Python: typed control calls and the errors of failed operations.

The operators themselves are reached through ``torch.ops.moe_a2a``; nothing in here is on a hot path.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch  # the library links against torch, which must be loaded first

from ..errors import FAILURE_KINDS, INTERRUPTED, BadType, BadValue, failure_number
from .layout import WindowLayout
from .tiling import Tiling

try:
    from .. import _C as lib
except ImportError as error:  # pragma: no cover - shown to someone whose build is missing
    raise ImportError(
        f"moe_a2a: the compiled part is missing or doesn't load ({error}). Build it with: "
        "pip install --no-build-isolation -e ."
    ) from error


def _int64s(values: list[int]) -> bytes:
    return array.array("q", values).tobytes()


@dataclass(frozen=True)
class MappedWindow:
    """A window in this process's memory; mapped while this object, a group or a tensor needs it."""

    owner: object
    address: int
    size: int
    populated: bool
    collapsed: bool

    def view(self) -> memoryview:
        """The window's bytes. The caller keeps the mapping alive."""
        return lib.view_window(self.address, self.size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """As numpy takes it: uint8 [size], an array that keeps this object, and so the mapping, alive."""
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}


def map_window(fd: int, size: int, *, fill: bool, populate: bool = True) -> MappedWindow:
    """Maps and prefaults the window behind ``fd``; ``fill`` for its owner. Raises OSError.

    ``populate`` False touches page by page, as on a kernel without MADV_POPULATE_WRITE (before 5.14).
    """
    owner, address, populated, collapsed = lib.map_window(fd, size, fill, populate)
    return MappedWindow(owner, address, size, populated, collapsed)


def create_group(
    name: str,
    layout: WindowLayout,
    rank: int,
    tiling: Tiling,
    windows: list[MappedWindow],
    pidfds: list[int],
    timeout_ns: int,
    warmup_ns: int,
    first_epoch: int,
) -> None:
    """Registers a group under its name. The pidfds (-1: none) stay the caller's to close."""
    lib.create_group(
        name,
        _int64s(layout.params()),
        rank,
        _int64s(tiling.params()),
        [window.owner for window in windows],
        _int64s(pidfds),
        timeout_ns,
        warmup_ns,
        first_epoch,
    )


def close_group(name: str) -> None:
    """Closes the group of this name; no-op when there is none."""
    lib.close_group(name)


@dataclass(frozen=True)
class GroupStats:
    """Counters of a group on this rank."""

    epoch: int
    dispatches: int
    combines: int
    dispatch_in_bytes: int
    dispatch_out_bytes: int
    combine_in_bytes: int
    combine_out_bytes: int
    sent_rows: int
    received_rows: int
    dispatch_push_bytes: int
    combine_push_bytes: int
    pushes: int
    waves: int
    waited_ns: list[int]
    expert_rows: list[int]
    matrix: list[int]
    expert_order: list[int]


def group_stats(name: str) -> GroupStats:
    """Counters of the group of this name."""
    try:
        epoch, counters, waited, rows, matrix, order = lib.group_stats(name)
    except RuntimeError as error:
        raise_failure(error)

    def int64s(data: bytes) -> list[int]:
        return array.array("q", data).tolist()

    names = [field.name for field in fields(GroupStats)]
    values = dict(zip(names[1 : names.index("waited_ns")], int64s(counters), strict=True))
    return GroupStats(
        epoch,
        waited_ns=int64s(waited),
        expert_rows=int64s(rows),
        matrix=array.array("i", matrix).tolist(),
        expert_order=array.array("i", order).tolist(),
        **values,
    )


def raise_kernel_failure(error: Exception) -> None:
    """Raises the named error of a failure in the kernels; returns if ``error`` came from elsewhere."""
    failure = lib.take_failure()
    if failure is None or failure[1] not in str(error):
        return
    number, text = failure
    if number == INTERRUPTED:
        interrupt = lib.take_interrupt()
        raise (interrupt if interrupt is not None else KeyboardInterrupt(text)) from None
    raise FAILURE_KINDS[number](text) from None


def raise_failure(
    error: Exception, reason: str = "", tell_peers: Callable[[int, str], None] | None = None
) -> NoReturn:
    """Raises the named error behind a failed operator call.

    An exception that didn't come from the kernels (an argument that isn't a tensor, a device nobody has a kernel for) happened
    on this rank alone and before anything was sent: the peers are told, so that they raise instead of waiting.

    Args:
        error: what the call raised.
        reason: what is wrong with the arguments, for an exception that says it in torch's words.
        tell_peers: ``abort_call`` or ``refuse_combine`` of the group; None when nobody waits for this call.
    """
    raise_kernel_failure(error)
    if not reason:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
    kind = BadValue if isinstance(error, ValueError) else BadType
    if tell_peers is not None:
        try:
            # The text goes to C and to other processes.
            tell_peers(
                failure_number(kind(reason)), reason.encode(errors="replace").decode().replace("\0", "?")
            )
        except RuntimeError as lost:
            raise_failure(lost)
    # What torch, or a Python check, says about an argument.
    if isinstance(error, (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError)):
        raise kind(reason) from error
    raise error


def abort_call(name: str) -> Callable[[int, str], None]:
    """For :func:`raise_failure`: uses up the group's next call; its peers raise ``PeerAborted``."""
    return lambda kind, text: lib.abort_call(name, kind, text)


def refuse_combine(name: str, handle: torch.Tensor) -> Callable[[int, str], None]:
    """For :func:`raise_failure`: closes the handle; peers that wait for rows of this rank raise ``PeerAborted``."""
    return lambda kind, text: lib.refuse_combine(name, handle.numpy().tobytes(), kind, text)


def widens(dtype: torch.dtype) -> bool:
    """Whether products of this type are made in float32 here, because that is faster. MOE_A2A_GEMM=narrow or wide decides."""
    return dtype in (torch.bfloat16, torch.float16) and lib.widens(dtype == torch.bfloat16)


def cpu_kernels() -> str:
    """The instruction set the kernels use on this CPU: "avx2" or "portable"."""
    return lib.cpu_kernels()


def pool_stats() -> dict[str, int]:
    """The output pool of this process: bytes in use, bytes kept for reuse, blocks handed out, blocks reused."""
    held, kept, takes, reused = lib.pool_stats()
    return {"held_bytes": held, "kept_bytes": kept, "takes": takes, "reused": reused}


def pool_trim() -> int:
    """Returns the memory that the output pool keeps for reuse to the system; returns the bytes freed."""
    return lib.pool_trim()


def pool_fill(byte: int) -> None:
    """For tests: fills every output's memory with ``byte`` before the kernels write it; -1 stops that."""
    lib.pool_fill(byte)
