"""What a kernel's Triton IR says it does: where it polls, which of its stores are flags, what it masks, its atomics.

"Source" is the IR as Triton's front end wrote it, before any pass: the first one may already take away what the lint looks for
(a poll without ``volatile``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .flow import Graph, Loop
from .mlir import Attribute, Operation, Value, inlined, shaped

RECORD_BITS = 256  # a flag is a record of eight equal int32
READS = ("tt.load", "tt.atomic_rmw", "tt.atomic_cas")
WRITES = ("tt.store", "tt.atomic_rmw", "tt.atomic_cas")
Range = tuple[int, int]
ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas")


def kernel(module: Operation) -> Operation:
    """The one public function."""
    functions = [op for op in module.walk() if op.name == "tt.func"]
    return next(op for op in functions if op.attributes.get("sym_visibility") != "private")


def graph(module: Operation) -> Graph:
    """The kernel with the helpers it calls in the place of the calls."""
    functions = {str(op.attributes["sym_name"]): op for op in module.walk() if op.name == "tt.func"}
    return Graph(inlined(kernel(module), functions))


@dataclass(frozen=True)
class DataLoop:
    """A loop whose end depends on memory that it reads itself."""

    loop: Loop
    reads: tuple[Operation, ...]  # those the end depends on
    fixed: tuple[Operation, ...]  # of these, the ones that read the same address again and again

    @property
    def polls(self) -> bool:
        return bool(self.fixed) or any(op.attributes.get("isVolatile") is True for op in self.reads)


def data_loops(graph: Graph) -> list[DataLoop]:
    found = []
    for loop in graph.loops:
        within = [op for op in loop.operations if op.name in READS]
        reads = [op for op in within if not graph.tainted(loop, op.__eq__).isdisjoint(loop.conditions)]
        if reads:
            fixed = tuple(op for op in reads if _is_fixed(graph, loop, op, within))
            found.append(DataLoop(loop, tuple(reads), fixed))
    return found


def _is_fixed(graph: Graph, loop: Loop, read: Operation, within: list[Operation]) -> bool:
    """Whether the address is the same in every round: made of nothing that is carried from round to round, or read in one."""
    made = graph.slice(read.operands[:1], stop=lambda value: graph.home.get(value) not in loop.nodes)
    return made.isdisjoint(loop.header.arguments) and not any(value.owner in within for value in made)


def is_uniform(graph: Graph, value: Value) -> bool:
    """Whether all elements of a tensor are the same, as far as its operations show."""
    owner = value.owner
    if shaped(value.type) is None:
        return True
    if not isinstance(owner, Operation) or owner.regions:
        origins = graph.sources.get(value, [])
        carried = any(value in loop.header.arguments for loop in graph.loops)
        return bool(origins) and not carried and all(is_uniform(graph, origin) for origin in origins)
    if owner.name == "arith.constant":
        dense = owner.attributes.get("value")
        return (
            isinstance(dense, Attribute) and len(dense.body) == 1 and not str(dense.body[0]).startswith("0x")
        )
    if owner.name == "tt.splat":
        return True
    elementwise = owner.name.startswith(("arith.", "math.")) or owner.name in (
        "tt.broadcast",
        "tt.expand_dims",
        "tt.reshape",
        "tt.trans",
        "tt.bitcast",
    )
    return elementwise and all(is_uniform(graph, operand) for operand in owner.operands)


def is_flag(graph: Graph, op: Operation) -> bool:
    """A store of one int32 value to a whole record or several."""
    if op.name != "tt.store":
        return False
    kind = shaped(op.operands[1].type)
    return (
        kind is not None
        and kind.element == "i32"
        and (kind.bits or 0) >= RECORD_BITS
        and is_uniform(graph, op.operands[1])
    )


def counters(graph: Graph) -> list[Operation]:
    """Atomics whose result nobody uses: others wait for what they add up to."""
    used = {value for op in graph.operations for value in op.operands}
    used |= {value for origins in graph.sources.values() for value in origins}
    return [op for op in graph.operations if op.name in ATOMICS and used.isdisjoint(op.results)]


def flags(graph: Graph) -> list[Operation]:
    return [op for op in graph.operations if is_flag(graph, op)]


def writes(module: Operation) -> Iterator[Operation]:
    """Stores and atomics, in the order of the text."""
    return (op for op in kernel(module).walk() if op.name in WRITES)


def mask(op: Operation) -> Value | None:
    """The mask of a store or atomic, unless it is known to let everything pass."""
    if op.name == "tt.atomic_cas" or len(op.operands) < 3 or _always(op.operands[2]):
        return None
    return op.operands[2]


SPREADS = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans")
COMPARISONS: dict[int, Callable[[Range, Range], bool]] = {  # arith.cmpi's numbering of the signed ones
    0: lambda a, b: a[0] == a[1] == b[0] == b[1],
    2: lambda a, b: a[1] < b[0],
    3: lambda a, b: a[1] <= b[0],
    4: lambda a, b: a[0] > b[1],
    5: lambda a, b: a[0] >= b[1],
}


def _always(value: Value) -> bool:
    """Whether a mask is true in every element, as far as constants and ranges show."""
    op = value.owner
    if not isinstance(op, Operation):
        return False
    if op.name in SPREADS:
        return _always(op.operands[0])
    if op.name == "arith.andi":
        return all(map(_always, op.operands))
    if op.name == "arith.ori":
        return any(map(_always, op.operands))
    if op.name == "arith.cmpi":
        left, right = map(_range, op.operands)
        compare = COMPARISONS.get(int(op.attributes["predicate"]))
        return left is not None and right is not None and compare is not None and compare(left, right)
    return _constant(op) in (True, -1, "true")


def _constant(op: Operation) -> Any:
    """The value of a constant, or of every element of it; None where they differ."""
    found = op.attributes.get("value") if op.name == "arith.constant" else None
    if isinstance(found, Attribute):
        return found.body[0] if len(found.body) == 1 else None
    return found


def _range(value: Value) -> Range | None:
    """The least and the greatest an integer, or any element of a tensor of integers, can be; None where that isn't known."""
    op = value.owner
    if not isinstance(op, Operation):
        return None
    if op.name == "tt.make_range":
        return op.attributes["start"], op.attributes["end"] - 1
    if op.name in SPREADS or op.name in ("arith.extsi", "arith.trunci"):
        return _range(op.operands[0])
    if op.name == "arith.constant":
        found = _constant(op)
        return (found, found) if isinstance(found, int) else None
    if op.name in ("arith.addi", "arith.subi"):
        left, right = map(_range, op.operands)
        if left is None or right is None:
            return None
        plus = op.name == "arith.addi"
        return (left[0] + right[0], left[1] + right[1]) if plus else (left[0] - right[1], left[1] - right[0])
    return None


def depth(op: Operation, name: str) -> int:
    """How many operations called ``name`` stand around this one."""
    count = 0
    around = op.inside(name)
    while around is not None:
        count += 1
        around = around.inside(name)
    return count
