"""Control flow and data flow of one function, the same for structured (``scf``) and for flat (``cf``) control flow.

The kernels of 910B and 910_93 reach the end of the compiler with ``scf.for``, ``scf.while`` and ``scf.if``; those of 950 with
branches between blocks. :class:`Graph` makes one graph of either: nodes of operations, the values a branch depends on, and
which value flows into which block argument. Loops are natural loops: a node that dominates the origin of an edge to it, and all
that lies between (Aho, Sethi, Ullman, "Compilers", 10.4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from .mlir import Attribute, Block, Operation, Value, shaped

STRUCTURED = ("scf.", "affine.for", "affine.if", "affine.parallel", "scope.", "tt.call")


@dataclass(eq=False)
class Node:
    """Operations that run one after another; then one of ``next``, as ``condition`` says."""

    operations: list[Operation] = field(default_factory=list)
    next: list[Node] = field(default_factory=list)
    condition: list[Value] = field(default_factory=list)
    arguments: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Loop:
    header: Node
    nodes: set[Node]

    @property
    def operations(self) -> Iterator[Operation]:
        for node in self.nodes:
            yield from node.operations

    @property
    def conditions(self) -> list[Value]:
        """The values that decide whether the loop goes on."""
        leaving = (node for node in self.nodes if any(after not in self.nodes for after in node.next))
        return [value for node in leaving for value in node.condition]


class Graph:
    """The graph of one function (``func.func`` or ``tt.func``)."""

    def __init__(self, function: Operation) -> None:
        self.function = function
        self.sources: dict[Value, list[Value]] = defaultdict(list)  # what may flow into a value
        self.node_of: dict[Operation, Node] = {}
        self.blocks: dict[Block, Node] = {}
        self.nodes: list[Node] = []
        self.entry = self._node()
        self.entry.arguments = list(function.regions[0][0].arguments) if function.regions[0] else []
        self._region(function.regions[0], self.entry)
        self.nodes = self._ordered()
        self.home = {value: node for node in self.nodes for value in self._defined(node)}
        self.loops = self._loops()
        self._roots: dict[Value, frozenset[Value]] = {}

    @property
    def operations(self) -> Iterator[Operation]:
        for node in self.nodes:
            yield from node.operations

    # Construction

    def _node(self) -> Node:
        node = Node()
        self.nodes.append(node)
        return node

    def _flow(self, targets: Iterable[Value], values: Iterable[Value]) -> None:
        for target, value in zip(targets, values, strict=False):
            self.sources[target].append(value)

    def _region(self, region: list[Block], entry: Node) -> tuple[Node, list[Value]]:
        """Adds the blocks of a region; returns the node at whose end it is left, and what its terminator hands out."""
        if not region:
            return entry, []
        self.blocks[region[0]] = entry
        reached = [region[0]]
        for block in reached:
            for after in block.operations[-1].successors if block.operations else []:
                if after not in self.blocks:
                    self.blocks[after] = self._node()
                    self.blocks[after].arguments = after.arguments
                    reached.append(after)
        ends = [self._block(block, self.blocks[block]) for block in reached]
        left = [end for end in ends if end is not None]
        if len(left) == 1:
            return left[0]
        joined = self._node()  # several blocks return: each of these values may be any of theirs
        joined.arguments = [Value(value.type, None, i) for i, value in enumerate(left[0][1] if left else [])]
        for node, values in left:
            node.next.append(joined)
            self._flow(joined.arguments, values)
        return joined, joined.arguments

    def _block(self, block: Block, node: Node) -> tuple[Node, list[Value]] | None:
        for op in block.operations:
            if op.successors:
                node.operations.append(op)
                self.node_of[op] = node
                self._branch(op, node)
                return None
            if op.regions and op.name.startswith(STRUCTURED):
                node = self._structured(op, node)
            else:
                node.operations.append(op)
                self.node_of[op] = node
        last = block.operations[-1] if block.operations else None
        return node, (list(last.operands) if last is not None and not last.results else [])

    def _branch(self, op: Operation, node: Node) -> None:
        node.next = [self.blocks[block] for block in op.successors]
        sizes = op.attributes.get("operandSegmentSizes")
        if isinstance(sizes, Attribute):  # cf.cond_br: the condition, then what each successor gets
            counts = [item for item in sizes.body if isinstance(item, int)]
            node.condition = op.operands[: counts[0]]
            at = counts[0]
            for block, count in zip(op.successors, counts[1:], strict=False):
                self._flow(block.arguments, op.operands[at : at + count])
                at += count
        else:
            if len(op.successors) > 1:
                node.condition = list(op.operands)
            for block in op.successors:
                self._flow(block.arguments, op.operands)

    def _structured(self, op: Operation, node: Node) -> Node:
        after = self._node()
        after.arguments = list(op.results)
        if op.name == "tt.call":
            (body,) = op.regions
            inner = self._node()
            inner.arguments = body[0].arguments
            node.next.append(inner)
            self._flow(inner.arguments, op.operands)
            end, returned = self._region(body, inner)
            end.next.append(after)
            self._flow(op.results, returned)
        elif op.name == "scf.for":
            (body,) = op.regions
            header = self._node()
            node.next.append(header)
            header.arguments = list(body[0].arguments)
            index, *carried = header.arguments
            header.condition = [index, *op.operands[:3]]
            self.sources[index] += op.operands[:1] + op.operands[2:3]
            self._flow(carried, op.operands[3:])
            inner = self._node()
            header.next = [inner, after]
            end, yielded = self._region(body, inner)
            end.next.append(header)
            self._flow(carried, yielded)
            self._flow(op.results, carried)
        elif op.name == "scf.while":
            test, body = op.regions
            header, inner = self._node(), self._node()
            node.next.append(header)
            header.arguments = list(test[0].arguments)
            inner.arguments = list(body[0].arguments)
            self._flow(header.arguments, op.operands)
            end, (condition, *handed) = self._region(test, header)
            end.condition = [condition]
            end.next = [inner, after]
            self._flow(inner.arguments, handed)
            self._flow(op.results, handed)
            end, yielded = self._region(body, inner)
            end.next.append(header)
            self._flow(header.arguments, yielded)
        else:  # scf.if and whatever else runs a region or doesn't
            node.condition = list(op.operands)
            for region in op.regions:
                inner = self._node()
                inner.arguments = list(region[0].arguments) if region else []
                node.next.append(inner)
                for argument in inner.arguments:
                    self.sources[argument] += op.operands
                end, yielded = self._region(region, inner)
                end.next.append(after)
                self._flow(op.results, yielded)
        return after

    def _ordered(self) -> list[Node]:
        """The nodes that can be reached, each before those that it dominates (reverse postorder)."""
        done: list[Node] = []
        seen = {self.entry}
        stack = [(self.entry, iter(self.entry.next))]
        while stack:
            node, following = stack[-1]
            for after in following:
                if after not in seen:
                    seen.add(after)
                    stack.append((after, iter(after.next)))
                    break
            else:
                done.append(node)
                stack.pop()
        return done[::-1]

    @staticmethod
    def _defined(node: Node) -> Iterator[Value]:
        yield from node.arguments
        for op in node.operations:
            yield from op.results

    def predecessors(self) -> dict[Node, list[Node]]:
        found: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for after in node.next:
                found[after].append(node)
        return found

    def _loops(self) -> list[Loop]:
        before = self.predecessors()
        everything = set(self.nodes)
        dominators = {node: {node} if node is self.entry else everything for node in self.nodes}
        changed = True
        while changed:
            changed = False
            for node in self.nodes[1:]:
                new = set.intersection(*(dominators[b] for b in before[node])) | {node}
                if new != dominators[node]:
                    dominators[node] = new
                    changed = True
        loops: dict[Node, set[Node]] = {}
        for node in self.nodes:
            for header in node.next:
                if header in dominators[node]:
                    body = loops.setdefault(header, {header})
                    stack = [node]
                    while stack:
                        inner = stack.pop()
                        if inner not in body:
                            body.add(inner)
                            stack += before[inner]
        return [Loop(header, nodes) for header, nodes in loops.items()]

    # Data flow

    def inputs(self, value: Value) -> list[Value]:
        """What a value is made of: operands of its operation, or what flows into it."""
        owner = value.owner
        if isinstance(owner, Operation) and not (owner.regions and owner.name.startswith(STRUCTURED)):
            return owner.operands
        return self.sources.get(value, [])

    def slice(self, values: Iterable[Value], stop: Callable[[Value], bool] = lambda _: False) -> set[Value]:
        """All that the values are made of through SSA, themselves included; where ``stop`` holds it isn't followed further."""
        found: set[Value] = set()
        stack = list(values)
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                if not stop(value):
                    stack += self.inputs(value)
        return found

    def roots(self, value: Value) -> frozenset[Value]:
        """The buffers a memref (or a pointer made of one) may lie in: what casts, views, selections and loops end at."""
        if value not in self._roots:
            found = set()
            seen: set[Value] = set()
            stack = [value]
            while stack:
                at = stack.pop()
                if at in seen:
                    continue
                seen.add(at)
                starts = isinstance(at.owner, Operation) and at.owner.name.endswith(
                    ("pointer_cast", ".alloc", ".alloca")
                )
                through = [] if starts else [v for v in self.inputs(at) if is_address(v.type)]
                stack += through
                if not through:
                    found.add(at)
            self._roots[value] = frozenset(found)
        return self._roots[value]

    def tainted(self, loop: Loop, seeds: Callable[[Operation], bool]) -> set[Value]:
        """What, inside the loop, depends on what the operations chosen by ``seeds`` bring in, through values and buffers."""
        dirty: set[Value] = set()  # values, and buffers by their roots
        changed = True

        def spoil(values: Iterable[Value]) -> None:
            nonlocal changed
            for value in values:
                if value not in dirty:
                    dirty.add(value)
                    changed = True

        while changed:
            changed = False
            for op in loop.operations:
                reads = any(
                    value in dirty or not dirty.isdisjoint(self._buffers(value)) for value in op.operands
                )
                if seeds(op) or (reads and not op.successors):
                    spoil(op.results)
                    if op.name in WRITERS or op.name.startswith("hivm.hir."):
                        for value in op.operands:
                            spoil(self._buffers(value))
            for node in loop.nodes:
                for value in node.arguments:
                    spoil([value] if any(source in dirty for source in self.sources.get(value, [])) else [])
        return dirty

    def _buffers(self, value: Value) -> frozenset[Value]:
        """The roots of a memref in the core's own memory; nothing of any other value."""
        kind = shaped(value.type)
        return self.roots(value) if kind is not None and kind.space not in (None, "gm") else frozenset()


WRITERS = ("func.call", "memref.store", "memref.copy")


def is_address(type: str) -> bool:
    return type.startswith(("memref<", "!llvm.ptr", "!llvm.struct"))


def constant(value: Value) -> int | None:
    """The integer a value is defined as, None where it is no constant."""
    owner = value.owner
    if isinstance(owner, Operation) and owner.name in ("arith.constant", "llvm.mlir.constant"):
        found = owner.attributes.get("value")
        return found if isinstance(found, int) else None
    return None
