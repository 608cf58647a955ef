"""EPGroup: the ranks that share experts, their windows, and the life of both."""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from . import errors
from .op_host import native, transport
from .op_host.heap import HeapUnavailable, SharedMemoryHeap, SymmetricHeap, TorchSymmetricHeap
from .op_host.layout import (
    CODE_DTYPES,
    DTYPE_CODES,
    LAYOUT_VERSION,
    Format,
    WindowLayout,
    expert_ranges,
    window_layout,
)
from .op_host.meeting import Meeting
from .op_host.tiling import PROTOCOLS, cpu_tiling, may_push
from .op_host.transport import DEVICES
from .reference import CollectiveExchange, Exchange, Limits

if TYPE_CHECKING:
    from .op_host.triton.launch import Launcher

_numbers = itertools.count(1)
_groups: weakref.WeakValueDictionary[str, EPGroup] = weakref.WeakValueDictionary()


def find_group(name: str) -> EPGroup:
    """The open group of this name in this process (operators take a group by its name)."""
    group = _groups.get(name)
    if group is None or group.closed:
        raise errors.GroupClosed(
            f'moe_a2a: there is no open group named "{name}" in this process; it was closed, or the name is wrong '
            "(it is EPGroup.name)"
        )
    return group


@dataclass(frozen=True)
class SizeHint:
    """Memory that a group takes on each rank, in bytes."""

    total_bytes: int
    regions: dict[str, int]
    layout: WindowLayout

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {size / 2**20:.1f}" for name, size in self.regions.items() if size >= 2**16
        )
        return f"{self.total_bytes / 2**20:.1f} MiB a rank ({parts} MiB)"


@dataclass(frozen=True)
class _Config:
    """What every rank must pass alike; compared field by field at creation."""

    num_experts: int
    top_k: int
    max_tokens: int
    hidden_size: int
    dtype: str
    max_recv_rows: int
    depth: int
    transport: str
    timeout: float
    warmup_timeout: float
    record_format: str
    protocol: str
    code_max: int | None
    first_epoch: int
    layout_version: int = LAYOUT_VERSION


def _resolve(process_group: Any) -> tuple[dist.ProcessGroup | None, int, int]:
    """(process group, rank, world size) of what the user passed."""
    if process_group is None:
        if dist.is_available() and dist.is_initialized():
            return None, dist.get_rank(), dist.get_world_size()
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            raise errors.BadValue(
                f"moe_a2a.EPGroup: WORLD_SIZE = {started} in the environment, but torch.distributed isn't initialised, so this "
                "would be a group of one rank; call torch.distributed.init_process_group first (or unset WORLD_SIZE)"
            )
        return None, 0, 1
    if hasattr(process_group, "get_group") and hasattr(process_group, "mesh_dim_names"):  # a DeviceMesh
        if process_group.ndim != 1:
            raise errors.BadValue(
                f"moe_a2a.EPGroup: process_group is a DeviceMesh with {process_group.ndim} dimensions "
                f"{process_group.mesh_dim_names}; pass the one for experts, such as mesh['ep']"
            )
        process_group = process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise errors.BadType(
            f"moe_a2a.EPGroup: process_group is a {type(process_group).__name__}; expected a torch ProcessGroup, a "
            "one-dimensional DeviceMesh or None (a rank that isn't in the group has no EPGroup)"
        )
    return process_group, dist.get_rank(process_group), dist.get_world_size(process_group)


SMALL_WINDOW = 16 << 20


def default_recv_rows(world_size: int, max_tokens: int, top_k: int, row_bytes: int) -> int:
    """Twice the fair share of rows, or what fits 16 MiB if that is more; never more than there can be.

    At decode the fair share is a handful of rows, which any routing exceeds, and memory is no reason to be stingy.
    """
    return min(world_size * max_tokens * top_k, max(2 * max_tokens * top_k, SMALL_WINDOW // row_bytes))


class EPGroup:
    """The ranks among which experts are spread, with a window of shared memory each.

    Making one is a collective call: every rank of ``process_group`` passes the same values, which is checked. The operators
    on the group are collective, too: every rank makes the same calls in the same order, with any number of tokens.

    Args:
        process_group: a torch ProcessGroup or one-dimensional DeviceMesh; None is the default group, or one rank alone if
            torch.distributed isn't initialised. Needed during the call only, unless the transport is "collective".
        num_experts: E, experts in all; any number. The first E mod R ranks own one expert more than the others.
        top_k: the largest K.
        max_tokens: the largest T, tokens of one rank in one dispatch.
        hidden_size, dtype: the widest row; layers with narrower rows can share the group.
        max_recv_rows: rows the window holds of what this rank's experts receive or return; None is twice the fair share, or
            16 MiB of rows where that is more. What doesn't fit goes in waves, which cost time but drop nothing.
        depth: handles open at once, at least 2: a handle can be combined while fewer than ``depth`` newer dispatches have
            started. As many asynchronous dispatches can be under way.
        transport: "auto", "cpu-shm" (windows in shared memory, one host), "cuda" or "hip" (in the memory of GPUs that reach
            each other) or "collective" (torch.distributed). `moe_a2a.op_host.transport.probe()` says what stands against each.
        timeout: seconds a call waits for a peer that lives and doesn't come. A peer that ends or leaves is noticed at once.
        warmup_timeout: the same, until a peer's first call.
        record_format: "auto", "compact", "portable" or "line" (see docs/protocol.md).
        kernels: what moves this rank's rows: "cpu" (C++), "triton" (Triton kernels, which for CPU tensors need
            TRITON_INTERPRET=1 in the environment before Python starts) or "auto": C++, and Triton where the windows are on
            devices. May differ between ranks. A group with a Triton rank has the portable format and the memory for
            pushing; a Triton rank always pushes.
        protocol: who moves rows: "pull" (whoever needs them), "push" (whoever has them) or "auto": by size, as the table in
            ``op_host/tiling.py`` says, which on a CPU is pull at every size. Push needs more memory; asynchronous dispatches
            pull in any case.

    Raises:
        BadValue, BadType: an argument can't be used, or ranks differ; on every rank.
        OutOfMemory: the host hasn't enough memory for the windows; has needed and free bytes; on every rank.
        TransportUnavailable: the transport asked for can't be had, with the reason; on every rank.

    Attributes:
        rank, world_size, num_experts, top_k, max_tokens, hidden_size, dtype, max_recv_rows, depth: as above.
        name: what operators call the group by, unique in this process.
        local_experts: range of the global ids of this rank's experts; num_local_experts is its length.
        transport: what was chosen and why.
        kernels: "cpu" or "triton".
        heap: the windows; None where the transport has none, and once the group is closed.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype = torch.bfloat16,
        max_recv_rows: int | None = None,
        depth: int = 2,
        transport: str = "auto",
        timeout: float = 600.0,
        warmup_timeout: float = 3600.0,
        record_format: str = "auto",
        protocol: str = "auto",
        kernels: str = "auto",
        _code_max: int | None = None,
        _first_epoch: int = 1,
        _tiling: dict[str, int] | None = None,
    ) -> None:
        self._closed = False
        self._exchange: Exchange | None = None
        self.heap: SymmetricHeap | None = None
        group, rank, world_size = _resolve(process_group)
        meeting = Meeting(group, rank, world_size)
        self.rank, self.world_size = rank, world_size
        self._launcher: Launcher | None = None
        kinds = meeting.gather("triton" if transport in DEVICES and kernels == "auto" else kernels)
        triton_ranks = [peer for peer, kind in enumerate(kinds) if kind == "triton"]

        def checked() -> tuple[_Config, WindowLayout]:
            self._launcher = _check_kernels(kernels, transport, rank)
            return _check_arguments(
                rank,
                world_size,
                num_experts=num_experts,
                top_k=top_k,
                max_tokens=max_tokens,
                hidden_size=hidden_size,
                dtype=dtype,
                max_recv_rows=max_recv_rows,
                depth=depth,
                transport_name=transport,
                timeout=timeout,
                warmup_timeout=warmup_timeout,
                record_format=record_format,
                protocol=protocol,
                code_max=_code_max,
                first_epoch=_first_epoch,
                triton_ranks=triton_ranks,
            )

        check = meeting.attempt(checked)
        if check.error is not None:
            raise check.error
        if check.failures:
            raise errors.BadValue(f"moe_a2a.EPGroup: {check.why}")
        assert check.value is not None
        config, layout = check.value
        _compare(meeting.gather(config))

        self.num_experts, self.top_k, self.max_tokens = config.num_experts, config.top_k, config.max_tokens
        self.hidden_size, self.dtype, self.depth = config.hidden_size, dtype, config.depth
        self.max_recv_rows = config.max_recv_rows
        self._ranges = expert_ranges(config.num_experts, world_size)
        self.local_experts = self._ranges[rank]
        self.num_local_experts = len(self.local_experts)
        # Compiled code is cached, also on disk and between ranks, by what stands in its graph; the sizes of operators' outputs
        # depend on the rank and the group's numbers. So the name tells all of these apart.
        digest = hashlib.blake2b(repr((config, rank, world_size)).encode(), digest_size=4).hexdigest()
        self.name = f"moe_a2a.{next(_numbers)}.rank{rank}of{world_size}.{digest}"
        self.layout = layout
        self.kernels = "cpu" if self._launcher is None else "triton"
        self.protocol = config.protocol
        self._tiling = replace(cpu_tiling(world_size, protocol=protocol), **(_tiling or {}))
        self.process_group = group
        self.transport = self._choose(meeting, config)
        _groups[self.name] = self

    # ------------------------------------------------------------------------------------------------ making it

    def _choose(self, meeting: Meeting, config: _Config) -> transport.Transport:
        """Takes the first transport that every rank can have, and sets it up."""
        if config.transport == "collective":
            self._make_exchange(config)
            return transport.collective("asked for")
        if config.transport in DEVICES:
            return self._use_devices(meeting, config)
        try:
            heap = SharedMemoryHeap(meeting, self.layout)
        except HeapUnavailable as unavailable:
            if config.transport == "cpu-shm":
                raise errors.TransportUnavailable(
                    f"moe_a2a.EPGroup: transport cpu-shm can't be had: {unavailable}"
                ) from None
            self._make_exchange(config)
            return transport.collective(f"windows can't be had: {unavailable}")
        hosts = (
            "one rank"
            if meeting.world_size == 1
            else f"all {meeting.world_size} ranks opened each other's windows"
        )
        if self._launcher is None:
            self._make_group(meeting, config, heap)
            return transport.cpu_shm(hosts)
        self._make_triton(meeting, config, heap, self._launcher)
        return replace(
            transport.cpu_shm(f"{hosts}; {self._launcher.explain()}"),
            semantics="one-sided put + signal",
            submitter=f"Triton kernels ({self._launcher.machine.name})",
        )

    def _use_devices(self, meeting: Meeting, config: _Config) -> transport.Transport:
        """Windows in the memory of this rank's device, and kernels that run there."""
        name = config.transport

        def reach() -> tuple[torch.device, Launcher]:
            reason = transport.missing(name)
            if reason:
                raise errors.TransportUnavailable(reason)
            from .op_host.triton.launch import launcher_for

            device = transport.device_of(name)
            return device, launcher_for(device)

        reached = meeting.attempt(reach)
        try:
            if reached.failures:
                raise HeapUnavailable(reached.why)
            assert reached.value is not None
            device, self._launcher = reached.value
            heap = TorchSymmetricHeap(meeting, self.layout, device)
        except HeapUnavailable as unavailable:
            raise errors.TransportUnavailable(
                f"moe_a2a.EPGroup: transport {name} can't be had: {unavailable}"
            ) from None
        self.kernels = "triton"
        self._make_triton(meeting, config, heap, self._launcher)
        reason = f"asked for; all {meeting.world_size} ranks' memory is mapped on {device}"
        return transport.DESCRIPTIONS[name](f"{reason}; {self._launcher.explain()}")

    def _make_exchange(self, config: _Config) -> None:
        self._exchange = CollectiveExchange(
            self.process_group,
            self.rank,
            self.world_size,
            self.num_experts,
            self.top_k,
            self.max_tokens,
            self.hidden_size,
            self.dtype,
            self.max_recv_rows,
            self.depth,
            timeout=config.timeout,
            warmup_timeout=config.warmup_timeout,
        )
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(self, self._exchange.close)

    def _make_triton(
        self, meeting: Meeting, config: _Config, heap: SymmetricHeap, launcher: Launcher
    ) -> None:
        """Hands the windows to a Triton rank's exchange."""
        # Triton is imported only where it is asked for.
        from .op_host.triton.exchange import TritonExchange
        from .op_host.triton.phases import Phases

        limits = Limits(
            self.num_experts,
            self.top_k,
            self.max_tokens,
            self.hidden_size,
            self.dtype,
            heap.block(self.rank).device,
        )

        def make() -> TritonExchange:
            return TritonExchange(
                self.layout,
                heap,
                limits,
                Phases(self.layout, heap, launcher),
                name=self.name,
                timeout=config.timeout,
                warmup_timeout=config.warmup_timeout,
                first_epoch=config.first_epoch,
            )

        made = meeting.attempt(make)
        if made.value is not None:
            self._exchange, self.heap = made.value, heap
            self._finalizer = weakref.finalize(self, made.value.close)
        if made.failures:
            if made.value is not None:
                made.value.close()
            raise errors.TransportUnavailable(f"moe_a2a.EPGroup: setting the windows up failed: {made.why}")

    def _make_group(self, meeting: Meeting, config: _Config, heap: SharedMemoryHeap) -> None:
        """Hands the windows to the C++ group."""
        # Also at interpreter exit, so that peers hear of it at once. Registered first: closing no group is nothing.
        self._finalizer = weakref.finalize(self, _end, self.name, heap)
        done = meeting.attempt(
            lambda: native.create_group(
                self.name,
                self.layout,
                self.rank,
                self._tiling,
                heap.windows,
                heap.pidfds,
                int(config.timeout * 1e9),
                int(config.warmup_timeout * 1e9),
                config.first_epoch,
            )
        )
        if done.failures:
            self._finalizer()
            raise errors.TransportUnavailable(f"moe_a2a.EPGroup: setting the windows up failed: {done.why}")
        self.heap = heap

    # ------------------------------------------------------------------------------------------------- using it

    def expert_range(self, rank: int) -> range:
        """Global ids of the experts of ``rank``."""
        return self._ranges[rank]

    def empty(
        self, num_tokens: int, hidden: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """An uninitialised tensor [num_tokens, hidden] that lies in this rank's window, so that dispatch needn't copy it.

        It serves one dispatch, and must not be written again until the next dispatch on the group has returned (with
        asynchronous ones: until all ranks have waited for the dispatch): peers may be reading it. ``depth`` such tensors can
        exist at once. In the formats portable and line rows are padded to 512 bytes, so the tensor isn't contiguous. On
        the collective transport it is an ordinary tensor.

        Args:
            num_tokens: T, at most max_tokens.
            hidden: H; the group's hidden_size by default.
            dtype: the group's by default.

        Raises:
            BadValue: it doesn't fit the group. WindowBusy: all of them are in use.
        """
        hidden = self.hidden_size if hidden is None else hidden
        dtype = self.dtype if dtype is None else dtype
        self._check_open("moe_a2a.EPGroup.empty")
        code = DTYPE_CODES.get(dtype)
        if code is None:
            raise errors.BadType(
                f"moe_a2a.EPGroup.empty: dtype = {dtype}; expected one of {_names(DTYPE_CODES)}"
            )
        if self._exchange is not None:
            return torch.empty(num_tokens, hidden, dtype=dtype, device=self._exchange.device)
        try:
            return torch.ops.moe_a2a.window_x.default(num_tokens, hidden, code, self.name)  # type: ignore[no-any-return]
        except RuntimeError as error:
            native.raise_failure(error, f"moe_a2a.EPGroup.empty: {error}")

    def stats(self) -> dict[str, Any]:
        """Counters of this rank since the group was made.

        Returns:
            ``epoch`` (dispatches started), ``dispatches``, ``combines``; ``tokens_per_expert`` (list, rows each local
            expert received); ``send_count_matrix`` (int32 [R, E] of the last dispatch); ``sent_rows`` and
            ``received_rows`` (rows that crossed ranks); ``expert_order`` (local experts with rows, in the order in which the
            last :func:`moe` computed them); ``pushes`` (dispatches and combines in which this rank pushed);
            ``waves`` (that dispatches took, and combines that took more than one); ``copied_bytes`` (payload bytes this rank
            copied: ``dispatch_in`` and ``combine_in`` into its own window, ``dispatch_push`` and ``combine_push`` into
            windows of others, ``dispatch_out`` and ``combine_out`` into results; a fused call's own rows, which go to where
            they are computed, and what it keeps for backward are ``dispatch_out``); ``wait_seconds`` (list by rank, time spent
            waiting for each peer); on a Triton rank ``launches`` (of each kernel, by name), and ``expert_order`` is empty. The
            collective transport counts nothing of this and returns {}.
        """
        self._check_open("moe_a2a.EPGroup.stats")
        if self._exchange is not None:
            return self._exchange.stats()
        stats = native.group_stats(self.name)
        matrix = torch.tensor(stats.matrix, dtype=torch.int32, device="cpu").view(
            self.world_size, self.num_experts
        )
        return {
            "epoch": stats.epoch,
            "dispatches": stats.dispatches,
            "combines": stats.combines,
            "tokens_per_expert": stats.expert_rows,
            "send_count_matrix": matrix,
            "expert_order": stats.expert_order,
            "sent_rows": stats.sent_rows,
            "received_rows": stats.received_rows,
            "pushes": stats.pushes,
            "waves": stats.waves,
            "copied_bytes": {
                "dispatch_in": stats.dispatch_in_bytes,
                "dispatch_out": stats.dispatch_out_bytes,
                "combine_in": stats.combine_in_bytes,
                "combine_out": stats.combine_out_bytes,
                "dispatch_push": stats.dispatch_push_bytes,
                "combine_push": stats.combine_push_bytes,
            },
            "wait_seconds": [waited * 1e-9 for waited in stats.waited_ns],
        }

    @staticmethod
    def size_hint(
        world_size: int,
        *,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype = torch.bfloat16,
        max_recv_rows: int | None = None,
        depth: int = 2,
        record_format: str = "auto",
        protocol: str = "auto",
        kernels: str = "auto",
    ) -> SizeHint:
        """Bytes of shared memory that each rank of such a group takes; makes nothing.

        ``kernels`` is "triton" if those of any rank are.
        """
        _, layout = _check_arguments(
            0,
            world_size,
            num_experts=num_experts,
            top_k=top_k,
            max_tokens=max_tokens,
            hidden_size=hidden_size,
            dtype=dtype,
            max_recv_rows=max_recv_rows,
            depth=depth,
            transport_name="auto",
            timeout=1.0,
            warmup_timeout=1.0,
            record_format=record_format,
            protocol=protocol,
            code_max=None,
            first_epoch=1,
            triton_ranks=[0] if kernels == "triton" else [],
        )
        return SizeHint(layout.total_bytes, layout.regions(), layout)

    # ---------------------------------------------------------------------------------------------- its end

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Leaves the group; not collective, and a second call does nothing.

        Peers that still need this rank raise ``PeerLost`` at once. Tensors from :meth:`empty` and ``empty_like_rows`` stay
        valid memory. The process group isn't touched.
        """
        if self._closed:
            return
        self._closed = True
        self.heap = None
        if hasattr(self, "_finalizer"):
            self._finalizer()

    def __enter__(self) -> EPGroup:
        self._check_open("moe_a2a.EPGroup")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} can't be pickled: it is windows mapped into this process. Make an EPGroup in the other process"
        )

    def __deepcopy__(self, memo: Any) -> EPGroup:
        return self  # a model that holds its group is copied with the same one

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.transport.name
        return (
            f"EPGroup({self.name}, rank {self.rank} of {self.world_size}, "
            f"{self.num_local_experts} of {self.num_experts} experts, {state})"
        )

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise errors.GroupClosed(
                f"{operation}: group {self.name} on rank {self.rank} is closed; make a new EPGroup"
            )


def _names(dtypes: dict[torch.dtype, int]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _end(name: str, heap: SymmetricHeap) -> None:
    """Peers hear of the end first; then the memory may go."""
    native.close_group(name)
    heap.close()


KERNELS = ("auto", "cpu", "triton")


def _check_kernels(kernels: str, transport_name: str, rank: int) -> Launcher | None:
    """What launches this rank's kernels on CPU tensors; None for C++, and on devices, which are looked for later."""
    if kernels not in KERNELS:
        raise errors.BadValue(
            f"moe_a2a.EPGroup: kernels = {kernels!r} on rank {rank}; expected one of {', '.join(KERNELS)}"
        )
    if transport_name in DEVICES:
        if kernels == "cpu":
            raise errors.BadValue(
                f"moe_a2a.EPGroup: kernels = 'cpu' on rank {rank}, and transport = {transport_name!r} has its windows on "
                "devices; expected kernels = 'auto' or 'triton'"
            )
        return None
    if kernels != "triton":
        return None
    from .op_host.triton.launch import launcher_for

    try:
        return launcher_for(torch.device("cpu"))
    except errors.TransportUnavailable as error:
        raise errors.TransportUnavailable(f"moe_a2a.EPGroup: on rank {rank}, {error}") from error


def _check_arguments(
    rank: int,
    world_size: int,
    *,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    max_recv_rows: int | None,
    depth: int,
    transport_name: str,
    timeout: float,
    warmup_timeout: float,
    record_format: str,
    protocol: str,
    code_max: int | None,
    first_epoch: int,
    triton_ranks: list[int],
) -> tuple[_Config, WindowLayout]:
    where = f"on rank {rank}"

    def integer(name: str, value: Any, least: int) -> int:
        try:
            number = int(operator.index(value))
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise errors.BadType(
                f"moe_a2a.EPGroup: {name} = {value!r} ({type(value).__name__}) {where}; expected an int"
            )
        if number < least:
            raise errors.BadValue(f"moe_a2a.EPGroup: {name} = {number} {where}; expected at least {least}")
        return number

    num_experts = integer("num_experts", num_experts, 1)
    top_k = integer("top_k", top_k, 1)
    max_tokens = integer("max_tokens", max_tokens, 1)
    hidden_size = integer("hidden_size", hidden_size, 1)
    depth = integer("depth", depth, 2)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_CODES:
        raise errors.BadType(
            f"moe_a2a.EPGroup: dtype = {dtype!r} ({type(dtype).__name__}) {where}; expected one of "
            + ", ".join(str(known) for known in DTYPE_CODES)
        )
    recv_rows = (
        default_recv_rows(world_size, max_tokens, top_k, hidden_size * dtype.itemsize)
        if max_recv_rows is None
        else integer("max_recv_rows", max_recv_rows, 1)
    )
    if transport_name not in transport.NAMES:
        raise errors.BadValue(
            f"moe_a2a.EPGroup: transport = {transport_name!r} {where}; expected one of {', '.join(transport.NAMES)}"
        )
    if protocol not in PROTOCOLS:
        raise errors.BadValue(
            f"moe_a2a.EPGroup: protocol = {protocol!r} {where}; expected one of {', '.join(PROTOCOLS)}"
        )
    if triton_ranks:
        asked = {
            "record_format": (record_format, ("auto", "portable")),
            "protocol": (protocol, ("auto", "push")),
            "transport": (transport_name, ("auto", "cpu-shm", *DEVICES)),
        }
        for name, (value, allowed) in asked.items():
            if value not in allowed:
                raise errors.BadValue(
                    f"moe_a2a.EPGroup: {name} = {value!r} {where}, and rank {triton_ranks[0]} has kernels = 'triton'; a "
                    f"group with a Triton rank needs {name} to be one of {', '.join(map(repr, allowed))}"
                )
    formats = {
        "auto": Format.PORTABLE if triton_ranks else Format.COMPACT,
        "compact": Format.COMPACT,
        "portable": Format.PORTABLE,
        "line": Format.LINE,
    }
    if record_format not in formats:
        raise errors.BadValue(
            f"moe_a2a.EPGroup: record_format = {record_format!r} {where}; expected one of {', '.join(formats)}"
        )
    for name, seconds in (("timeout", timeout), ("warmup_timeout", warmup_timeout)):
        if not isinstance(seconds, (int, float)) or not 0 < seconds < 1e9:
            raise errors.BadValue(
                f"moe_a2a.EPGroup: {name} = {seconds!r} {where}; expected a number of seconds above 0"
            )
    try:
        layout = window_layout(
            world_size=world_size,
            num_experts=num_experts,
            top_k=top_k,
            max_tokens=max_tokens,
            row_bytes=hidden_size * dtype.itemsize,
            recv_rows=recv_rows,
            slots=depth,
            record_format=formats[record_format],
            push=bool(triton_ranks) or may_push(protocol),
            code_max=code_max,
        )
    except ValueError as error:
        raise errors.BadValue(f"moe_a2a.EPGroup: {error} {where}") from None
    config = _Config(
        num_experts=num_experts,
        top_k=top_k,
        max_tokens=max_tokens,
        hidden_size=hidden_size,
        dtype=str(dtype),
        max_recv_rows=recv_rows,
        depth=depth,
        transport=transport_name,
        timeout=float(timeout),
        warmup_timeout=float(warmup_timeout),
        record_format=record_format,
        protocol=protocol,
        code_max=code_max,
        first_epoch=first_epoch,
    )
    return config, layout


def _differences(configs: list[_Config]) -> Iterator[str]:
    tables = [asdict(config) for config in configs]
    for name in tables[0]:
        values = [table[name] for table in tables]
        if any(value != values[0] for value in values):
            yield f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def _compare(configs: list[_Config]) -> None:
    differences = list(_differences(configs))
    if differences:
        raise errors.BadValue(
            "moe_a2a.EPGroup: the ranks passed different arguments: "
            + "; ".join(differences)
            + ". Every rank must pass the same"
        )


__all__ = ["CODE_DTYPES", "EPGroup", "SizeHint", "default_recv_rows", "find_group"]
