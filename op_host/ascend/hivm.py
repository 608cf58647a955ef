"""What the final HIVM of a kernel does: its functions per kind of core, transfers, barriers, locks, and where buffers lie.

HIVM is the last level of BiSheng's compiler before machine code. By then every transfer is a call of the runtime's library,
named after what it does (``load_gm_to_ubuf_1d_bfloat16_t``), source before destination; a store's last operand is its atomic
mode (0 none, 1 add, 2 max, 3 min).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .flow import Graph, constant
from .mlir import Attribute, Operation, Shaped, Value, shaped


def _inside(attribute: object) -> str:
    """``PIPE_ALL`` of ``#hivm.pipe<PIPE_ALL>``."""
    return str(attribute.body[0]) if isinstance(attribute, Attribute) and attribute.body else ""


@dataclass(frozen=True)
class Transfer:
    """A read or write of global memory."""

    op: Operation
    store: bool
    gm: Value
    local: Value | None  # the buffer at the core's end; None where a scalar register is
    atomic: bool

    @property
    def scalar(self) -> bool:
        return self.local is None


def transfer(op: Operation) -> Transfer | None:
    """The transfer an operation makes, None if it makes none."""
    kinds = [(value, shaped(value.type)) for value in op.operands]
    memrefs = [
        (value, kind) for value, kind in kinds if kind is not None and value.type.startswith("memref<")
    ]
    gm = next((value for value, kind in memrefs if kind.space == "gm"), None)
    if gm is None:
        return None
    if op.name in ("memref.load", "memref.store"):
        return Transfer(op, op.name == "memref.store", gm, None, False)
    moves = op.name == "func.call" or (
        op.name.startswith("hivm.hir.") and not op.name.endswith("pointer_cast")
    )
    local = next((value for value, kind in memrefs if kind.space != "gm"), None)
    if not moves or local is None:
        return None
    store = [value for value, _ in memrefs].index(gm) > 0
    mode = constant(op.operands[-1]) if store and op.operands[-1].type == "i32" else None
    library = str(op.attributes.get("callee", "")).startswith("store_ubuf_to_gm")
    return Transfer(op, store, gm, local, library and mode not in (None, 0))


def callee(op: Operation) -> str:
    return str(op.attributes.get("callee", "")) if op.name == "func.call" else ""


def is_barrier(op: Operation) -> bool:
    return op.name == "hivm.hir.pipe_barrier" and _inside(op.attributes.get("pipe")) == "PIPE_ALL"


class Function:
    """One function that a core runs."""

    def __init__(self, op: Operation, module: Module) -> None:
        self.op = op
        self.module = module
        self.graph = Graph(op)
        self.name = str(op.attributes["sym_name"])
        self.core = _inside(op.attributes.get("hivm.func_core_type"))  # AIC: matrix, AIV: vector

    @cached_property
    def transfers(self) -> dict[Operation, Transfer]:
        return {op: found for op in self.graph.operations if (found := transfer(op)) is not None}

    @cached_property
    def flags(self) -> list[Transfer]:
        """Stores of one int32 value to several places; a vector core's share of a record may be less than a record."""
        return [t for t in self.transfers.values() if t.store and not t.atomic and self._is_flag(t)]

    def _is_flag(self, t: Transfer) -> bool:
        if t.local is None:
            return False
        buffers = self.graph.roots(t.local)
        kinds = [shaped(buffer.type) for buffer in buffers]
        if any(kind is None or kind.element != "i32" or kind.bits == 32 for kind in kinds):
            return False
        writers = [(op, i) for op in self.graph.operations for i in self._writes(op, buffers)]
        return bool(writers) and all(self._fills(op, i) for op, i in writers)

    def _writes(self, op: Operation, buffers: frozenset[Value]) -> Iterator[int]:
        """The operands of a call through which it may write one of the buffers."""
        if op.name not in ("func.call", "memref.store"):
            return
        found = self.transfers.get(op)
        if found is not None and found.store:
            return
        memrefs = [i for i, value in enumerate(op.operands) if value.type.startswith("memref<")]
        body = self.module.vector_function(callee(op))
        for position, i in enumerate(memrefs):
            source = body is None and position == 0 and len(memrefs) > 1  # the library's order: sources first
            if not source and not buffers.isdisjoint(self.graph.roots(op.operands[i])):
                yield i

    def _fills(self, op: Operation, operand: int) -> bool:
        """Whether a call writes one scalar to every element of this operand (or doesn't write it)."""
        body = self.module.vector_function(callee(op))
        if body is None:
            return callee(op).startswith("broadcast_scalar_int32")
        argument = body.entry.arguments[operand]
        for inner in body.operations:
            if ".vst" in inner.name and argument in body.roots(inner.operands[1]):
                made = [
                    v.owner.name for v in body.slice(inner.operands[:1]) if isinstance(v.owner, Operation)
                ]
                spread = any(name.endswith((".vbr", ".vdups.z", ".vdup")) or ".vdup" in name for name in made)
                if not spread or any(".vld" in name or ".vci" in name for name in made):
                    return False
        return True

    def extent(self, t: Transfer) -> Shaped | None:
        """The type of the part of global memory a transfer touches: the last one that isn't a mere cast."""
        value = t.gm
        while isinstance(value.owner, Operation) and value.owner.name == "memref.cast":
            value = value.owner.operands[0]
        return shaped(value.type)

    def argument_kind(self, value: Value) -> str:
        """What the runtime passes in an argument ("workspace", "sync_block_lock"), "" for the kernel's own."""
        arguments = self.op.attributes.get("arg_attrs")
        if value in self.graph.entry.arguments and isinstance(arguments, list):
            return _inside(arguments[value.index].get("hacc.arg_type"))
        return ""


class Module:
    def __init__(self, op: Operation) -> None:
        self.op = op
        self._functions = {
            str(f.attributes["sym_name"]): f for f in op.regions[0][0].operations if f.name == "func.func"
        }
        self._vectors: dict[str, Graph] = {}

    @cached_property
    def functions(self) -> list[Function]:
        """What cores run: one function, or in a kernel that uses both kinds of core one for each."""
        return [Function(f, self) for f in self._functions.values() if "hacc.entry" in f.attributes]

    @property
    def mix(self) -> bool:
        return len({function.core for function in self.functions}) > 1

    @property
    def vector(self) -> Function | None:
        """The function that vector cores run."""
        return next((function for function in self.functions if function.core == "AIV"), None)

    @property
    def matrix(self) -> Function | None:
        return next((function for function in self.functions if function.core == "AIC"), None)

    def vector_function(self, name: str) -> Graph | None:
        """The body of a function the compiler outlined for vector registers (950), None for the library's."""
        function = self._functions.get(name)
        if function is None or not function.regions or not function.regions[0]:
            return None
        if name not in self._vectors:
            self._vectors[name] = Graph(function)
        return self._vectors[name]

    def capacity(self) -> int | None:
        """Bits of the unified buffer, as the compiler's description of the target says."""
        for attribute in self.op.attributes.values():
            if isinstance(attribute, Attribute):
                for entry in attribute.find("dlti.dl_entry"):
                    if entry.body[0] == "UB_SIZE":
                        return int(entry.body[1])
        return None
