"""The rules: what must hold between a kernel's source and what the compiler made of it. Each has a name and a reason.

A rule looks at one :class:`Case` (a kernel as lowered for one target) and yields a sentence for every place where it is broken.
Where the compiler fails, only the rules of the source speak, and the failure is a fault of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from . import hivm, source
from .flow import Graph, Loop, constant
from .lower import Kernel, Lowered
from .mlir import Operation, Value, shaped


@dataclass(frozen=True)
class Fault:
    rule: str
    detail: str


class Case:
    """A kernel, what it declares, and its lowering for one target."""

    def __init__(self, kernel: Kernel, lowered: Lowered) -> None:
        self.kernel = kernel
        self.lowered = lowered

    @cached_property
    def written(self) -> Graph:
        return source.graph(self.lowered.source)

    @cached_property
    def data_loops(self) -> list[source.DataLoop]:
        return source.data_loops(self.written)

    @cached_property
    def final(self) -> hivm.Module | None:
        return hivm.Module(self.lowered.hivm) if self.lowered.hivm is not None else None

    @cached_property
    def data_loops_left(self) -> list[tuple[hivm.Function, Loop]]:
        """The loops whose end depends on global memory read in them, in the final HIVM."""
        return [
            (function, loop)
            for function in (self.final.functions if self.final else [])
            for loop in function.graph.loops
            if _depends(function, loop, scalar_only=False)
        ]


def _depends(function: hivm.Function, loop: Loop, scalar_only: bool) -> bool:
    def reads(op: Operation) -> bool:
        found = function.transfers.get(op)
        return found is not None and not found.store and (found.scalar or not scalar_only)

    return not function.graph.tainted(loop, reads).isdisjoint(loop.conditions)


Rule = Callable[[Case], Iterator[str]]
RULES: dict[str, tuple[Rule, str]] = {}


def rule(name: str, reason: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES[name] = (function, reason)
        return function

    return add


def check(kernel: Kernel, lowered: Lowered) -> list[Fault]:
    """All faults of a kernel as lowered for one target, in the order of the rules."""
    case = Case(kernel, lowered)
    return [Fault(name, detail) for name, (function, _) in RULES.items() for detail in function(case)]


# The source


@rule(
    "no-volatile",
    "a poll that isn't volatile may be read once; the compiler deletes the loop or hoists the load",
)
def no_volatile(case: Case) -> Iterator[str]:
    for found in case.data_loops:
        for op in found.fixed:
            if op.name == "tt.load" and op.attributes.get("isVolatile") is not True:
                yield "a loop ends by a load of an address that stays the same, without volatile=True"


@rule(
    "spin-count",
    "the number of polling loops is declared; another number means a wait was lost, or added unseen",
)
def spin_count(case: Case) -> Iterator[str]:
    polls = sum(found.polls for found in case.data_loops)
    if polls != case.kernel.spins:
        yield f"{case.kernel.spins} polling loops declared, {polls} in the source"


@rule(
    "signal-count",
    "the number of flag stores is declared: what the barrier rule looks at must be all of them",
)
def signal_count(case: Case) -> Iterator[str]:
    declared, found = case.kernel.signals, len(source.flags(case.written))
    if declared != found:
        yield f"{declared} flag stores declared, {found} in the source (one int32 value to whole 32-byte records)"
    elif case.final is not None and case.final.vector is not None and len(case.final.vector.flags) < found:
        yield f"{found} flag stores in the source, {len(case.final.vector.flags)} in the final HIVM"


# The compiler


@rule(
    "ub-overflow",
    "tiles must fit into the unified buffer of a vector core (192 KiB on 910B and 910_93, 248 KiB on 950)",
)
def ub_overflow(case: Case) -> Iterator[str]:
    if "ub overflow" in case.lowered.error:
        yield _line(case.lowered.error, "ub overflow")
    capacity = case.final.capacity() if case.final else None
    if case.final is None or capacity is None:
        return
    for function in case.final.functions:
        for op in function.graph.operations:
            kind = shaped(op.results[0].type) if op.name == "hivm.hir.pointer_cast" else None
            start = constant(op.operands[0]) if kind is not None and kind.space == "ub" else None
            if kind is not None and start is not None and 8 * start + (kind.bits or 0) > capacity:
                yield f"a buffer of {kind.bits} bits at byte {start}, while the unified buffer has {capacity} bits"


@rule("not-lowered", "the compiler must reach final HIVM")
def not_lowered(case: Case) -> Iterator[str]:
    if case.lowered.hivm is None and "ub overflow" not in case.lowered.error:
        crashed = "PLEASE submit a bug report" in case.lowered.error
        yield "the compiler crashed" if crashed else _line(case.lowered.error, "error:", "error")


def _line(text: str, *words: str) -> str:
    """The first line with one of the words, from the earliest of them on."""
    for word in words:
        for line in text.splitlines():
            if word in line:
                return line[line.index(word) :][:200]
    return text[:200]


# What was lost on the way


@rule(
    "vanished-loop", "a loop whose value isn't used afterwards is deleted without a word; then nothing waits"
)
def vanished_loop(case: Case) -> Iterator[str]:
    if case.final is None:
        return
    for core in {function.core for function in case.final.functions} & {"AIV"} or {"AIC"}:
        left = sum(function.core == core for function, _ in case.data_loops_left)
        if left < len(case.data_loops):
            yield f"{len(case.data_loops)} loops that end by what they read in the source, {left} in the final HIVM"


@rule("lost-atomic", "an atomic operation the target lacks is dropped without a word (atomic_xchg on 910B)")
def lost_atomic(case: Case) -> Iterator[str]:
    if case.final is None:
        return
    transfers = [t for function in case.final.functions for t in function.transfers.values()]
    locks = sum(
        hivm.callee(op) == "sync_block_lock" for f in case.final.functions for op in f.graph.operations
    )
    kept = sum(t.atomic for t in transfers)
    direct = [op for op in case.written.operations if op.name == "tt.atomic_rmw" and _kind(op) in DIRECT]
    locked = [op for op in case.written.operations if op.name in source.ATOMICS and op not in direct]
    if kept < len(direct):
        yield f"{len(direct)} atomic add, max or min in the source, {kept} in the final HIVM"
    if locks < len(locked):
        names = ", ".join(sorted({_kind(op) for op in locked}))
        yield f"{len(locked)} atomic operations ({names}) in the source, {locks} in the final HIVM"


KINDS = ("", "and", "or", "xor", "add", "fadd", "max", "min", "umax", "umin", "xchg")  # Triton's numbering
DIRECT = ("add", "fadd", "max", "min", "umax", "umin")  # what the store engine does by itself


def _kind(op: Operation) -> str:
    return KINDS[int(op.attributes.get("atomic_rmw_op", 0))] if op.name == "tt.atomic_rmw" else "cas"


@rule("dropped-mask", "a mask that is dropped makes the operation touch what it must not")
def dropped_mask(case: Case) -> Iterator[str]:
    pairs = _pairs(case)
    for before, after in pairs or []:
        if source.mask(before) is not None and not _guarded(before, after):
            yield f"{before.name} with a mask became one without"


@rule(
    "rewritten-mask",
    "a mask that becomes read, select, write puts back old values of a peer's memory over newer ones",
)
def rewritten_mask(case: Case) -> Iterator[str]:
    if not case.kernel.cross_card:
        return
    for before, after in _pairs(case) or []:
        if before.name == "tt.store" and source.mask(before) is not None and _selects_old(after):
            yield "a masked store became load, select and store of the whole tile"


def _pairs(case: Case) -> list[tuple[Operation, Operation]] | None:
    """Each write of the Triton IR with what the adapter made of it; None where their numbers differ."""
    if case.lowered.ttir is None or case.lowered.linalg is None:
        return None
    before = list(source.writes(case.lowered.ttir))
    after = [op for op in case.lowered.linalg.walk() if _writes_memory(op)]
    return list(zip(before, after, strict=True)) if len(before) == len(after) else None


def _writes_memory(op: Operation) -> bool:
    return op.name == "bufferization.materialize_in_destination" or "GenericAtomicRMW" in op.attributes


@rule("unmatched-write", "every store and atomic of the Triton IR must still be there after the adapter")
def unmatched_write(case: Case) -> Iterator[str]:
    if case.lowered.ttir is not None and case.lowered.linalg is not None and _pairs(case) is None:
        before = sum(1 for _ in source.writes(case.lowered.ttir))
        after = sum(map(_writes_memory, case.lowered.linalg.walk()))
        yield f"{before} stores and atomics in the Triton IR, {after} after the adapter"


def _destination(op: Operation) -> Value:
    return op.operands[1] if op.name.startswith("bufferization") else op.operands[0]


def _chain(value: Value) -> Iterator[Operation]:
    """The operations a value comes from, along first operands."""
    while isinstance(value.owner, Operation):
        yield value.owner
        if not value.owner.operands:
            return
        value = value.owner.operands[0]


def _guarded(before: Operation, after: Operation) -> bool:
    """Whether a mask still has an effect: a part of the tile, a condition around one element, or a selected value."""
    destination = _destination(after).owner
    partial = isinstance(destination, Operation) and destination.name == "memref.subview"
    conditions = source.depth(after, "scf.if") > source.depth(before, "scf.if")
    value = after.operands[0] if after.name.startswith("bufferization") else after.operands[1]
    return partial or conditions or any(op.name == "arith.select" for op in _chain(value))


def _selects_old(op: Operation) -> bool:
    """Whether the value stored is chosen, element by element, between a new one and what was read from the destination."""
    if not op.name.startswith("bufferization"):
        return False
    select = op.operands[0].owner
    if not isinstance(select, Operation) or select.name != "arith.select":
        return False
    graph = Graph(next(f for f in _around(op) if f.name == "func.func"))
    buffers = graph.roots(_buffer(select.operands[2]))
    copies = (c for c in graph.operations if c.name == "memref.copy" and c.operands[0] is op.operands[1])
    return any(not buffers.isdisjoint(graph.roots(c.operands[1])) for c in copies)


def _around(op: Operation) -> Iterator[Operation]:
    while op.parent is not None and op.parent.parent is not None:
        op = op.parent.parent
        yield op


def _buffer(value: Value) -> Value:
    """The memref a tensor was read from, or the value itself."""
    owner = value.owner
    return (
        owner.operands[0]
        if isinstance(owner, Operation) and owner.name == "bufferization.to_tensor"
        else value
    )


# What doesn't hold between cards or between cores


@rule("launch-lock", "sync_block_lock is a lock of this launch: another card's cores don't know it")
def launch_lock(case: Case) -> Iterator[str]:
    if case.final is None or not case.kernel.cross_card:
        return
    for function in case.final.functions:
        if any(hivm.callee(op) == "sync_block_lock" for op in function.graph.operations):
            yield f"{function.name} takes a lock, and the kernel reaches other cards' memory"


@rule(
    "cached-poll",
    "a scalar load goes through the data cache, which a peer's write doesn't invalidate: it may never be seen",
)
def cached_poll(case: Case) -> Iterator[str]:
    if case.final is None or case.final.mix:
        return
    for function, loop in case.data_loops_left:
        if _depends(function, loop, scalar_only=True) and not any(
            "dcci" in op.name for op in loop.operations
        ):
            yield f"a polling loop of {function.name} reads global memory by a scalar load"


@rule("missing-barrier", "without PIPE_ALL in between, a flag may become visible before its payload")
def missing_barrier(case: Case) -> Iterator[str]:
    function = case.final.vector if case.final else None
    if function is None:
        return
    flags = {t.op for t in function.flags}
    atomics = {t.op for t in function.transfers.values() if t.store and t.atomic}
    signals = flags | (atomics if source.counters(case.written) else set())
    payloads = {t.op for t in function.transfers.values() if t.store} - signals
    for op in _reached(function.graph, payloads, hivm.is_barrier, signals):
        yield f"{'a flag' if op in flags else 'an atomic'} follows other stores with no PIPE_ALL between them"


def _reached(
    graph: Graph, starts: set[Operation], ends: Callable[[Operation], bool], targets: set[Operation]
) -> list[Operation]:
    """The targets that some path reaches from a start without passing an end."""
    found: dict[Operation, None] = {}
    dirty_after = dict.fromkeys(graph.nodes, False)
    before = graph.predecessors()
    changed = True
    while changed:
        changed = False
        for node in graph.nodes:
            dirty = any(dirty_after[b] for b in before[node])
            for op in node.operations:
                if op in targets and dirty:
                    found[op] = None
                dirty = (dirty or op in starts) and not ends(op)
            if dirty != dirty_after[node]:
                dirty_after[node] = dirty
                changed = True
    return list(found)


@rule(
    "poll-in-mix",
    "in a kernel for both kinds of core, vector cores and matrix core poll on their own and drift apart",
)
def poll_in_mix(case: Case) -> Iterator[str]:
    if case.final is not None and case.final.mix and any(found.polls for found in case.data_loops):
        yield "the kernel multiplies matrices (one matrix core and two vector cores run it) and polls"


@rule(
    "unordered-flag",
    "a matrix result leaves from the matrix core, a flag from a vector core; no barrier orders the two",
)
def unordered_flag(case: Case) -> Iterator[str]:
    matrix, vector = (case.final.matrix, case.final.vector) if case.final else (None, None)
    if matrix is None or vector is None:
        return
    results = {
        t.op
        for t in matrix.transfers.values()
        if t.store and all(matrix.argument_kind(root) != "workspace" for root in matrix.graph.roots(t.gm))
    }
    if not results:
        return
    handed = {
        _flag_id(op)
        for op in _reached(matrix.graph, results, lambda _: False, _synchronisations(matrix, "set"))
    }
    waits = {op for op in _synchronisations(vector, "wait") if _flag_id(op) in handed}
    flags = {t.op for t in vector.flags if _follows_result(case, vector, t)}
    first = set(vector.graph.entry.operations[:1])
    for _ in _reached(vector.graph, first, lambda op: op in waits, flags):
        yield "a flag follows a matrix result that leaves from the matrix core, with no wait for that core before it"


def _synchronisations(function: hivm.Function, which: str) -> set[Operation]:
    return {op for op in function.graph.operations if op.name == f"hivm.hir.sync_block_{which}"}


def _flag_id(op: Operation) -> object:
    return op.attributes.get("static_flag_id", op.operands[0] if op.operands else None)


def _follows_result(case: Case, vector: hivm.Function, flag: hivm.Transfer) -> bool:
    """Whether in the source this flag (by its place among the flags) comes after a store of what tl.dot made."""
    graph = case.written
    before = source.flags(graph)
    if len(before) != len(vector.flags):
        return True
    mine = before[vector.flags.index(flag)]
    dots = {op for op in graph.operations if op.name == "tt.dot"}
    results = {
        op
        for op in graph.operations
        if op.name == "tt.store" and any(value.owner in dots for value in graph.slice(op.operands[1:2]))
    }
    return bool(_reached(graph, results, lambda _: False, {mine}))


@rule("split-record", "two vector cores would each write a part of one record: a reader may see half of it")
def split_record(case: Case) -> Iterator[str]:
    function = case.final.vector if case.final is not None and case.final.mix else None
    for t in function.flags if function else []:
        extent = function.extent(t) if function else None
        size = extent.bits if extent else None
        shared = any(
            isinstance(value.owner, Operation) and value.owner.name == "hivm.hir.get_sub_block_idx"
            for value in (function.graph.slice([t.gm]) if function else ())
        )
        if shared and (size is None or size % source.RECORD_BITS):
            yield f"each of two vector cores writes {'a part' if size is None else f'{size // 8} bytes'} of a flag's records"
