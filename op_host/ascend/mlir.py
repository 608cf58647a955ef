"""Reads MLIR in its generic form: operations with their regions, blocks, values and attributes.

The generic form (``--mlir-print-op-generic``) has one grammar for every dialect, so a reader of a page suffices where no
bindings are shipped (triton-ascend and ascendnpu-ir ship none). The grammar is MLIR's language reference, "Generic operation
syntax"; what it leaves to dialects (the inside of ``<...>``) is kept as a tree of tokens.

>>> module = parse('"builtin.module"() ({ %0 = "a.b"() <{x = 1 : i32}> : () -> i32 "a.c"(%0) : (i32) -> () }) : () -> ()')
>>> [op.name for op in module.walk()]
['builtin.module', 'a.b', 'a.c']
>>> b, c = list(module.walk())[1:]
>>> b.attributes["x"], c.operands[0].owner is b, c.operands[0].type
(1, True, 'i32')
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class ParseError(ValueError):
    """The text isn't MLIR in its generic form; the message says where."""


@dataclass(eq=False)
class Value:
    """An SSA value: the result of an operation, or an argument of a block. Compared by identity."""

    type: str = ""
    owner: Operation | Block | None = None
    index: int = 0


@dataclass(eq=False)
class Operation:
    """One operation; ``attributes`` holds its properties and its discardable attributes alike."""

    name: str
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    successors: list[Block] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    regions: list[list[Block]] = field(default_factory=list)
    parent: Block | None = None

    def walk(self) -> Iterator[Operation]:
        """This operation and all inside it, in the order of the text."""
        yield self
        for region in self.regions:
            for block in region:
                for op in block.operations:
                    yield from op.walk()

    def inside(self, name: str) -> Operation | None:
        """The nearest operation called ``name`` around this one."""
        op = self.parent.parent if self.parent else None
        while op is not None and op.name != name:
            op = op.parent.parent if op.parent else None
        return op


@dataclass(eq=False)
class Block:
    arguments: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    parent: Operation | None = None


@dataclass(frozen=True)
class Attribute:
    """An attribute or type with a name, such as ``#hivm.pipe<PIPE_ALL>``: its name, and what stands between its brackets."""

    name: str
    body: tuple[Any, ...] = ()

    def find(self, name: str) -> Iterator[Attribute]:
        """Every attribute called ``name`` in this one, itself included."""
        if self.name == name:
            yield self
        for item in self.body:
            if isinstance(item, Attribute):
                yield from item.find(name)


TOKEN = re.compile(
    r"""\s+|//[^\n]*
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<arrow>->)
    |(?P<value>%[\w$.-]+(?:\#\d+)?)
    |(?P<block>\^[\w$.-]+)
    |(?P<symbol>@(?:"(?:[^"\\]|\\.)*"|[\w$.-]+)(?:::@[\w$.-]+)*)
    |(?P<number>-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![\w]))
    |(?P<word>[#!]?[A-Za-z_][\w$.]*)
    |(?P<other>\d+[\w?]*|[^\s\w])""",
    re.VERBOSE,
)
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


class _Reader:
    """A recursive-descent parser over the tokens of TOKEN."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kinds: list[str] = []
        self.tokens: list[str] = []
        self.starts: list[int] = []
        for match in TOKEN.finditer(text):
            if match.lastgroup:
                self.kinds.append(match.lastgroup)
                self.tokens.append(match.group())
                self.starts.append(match.start())
        self.kinds.append("end")
        self.tokens.append("")
        self.starts.append(len(text))
        self.at = 0
        self.scopes: list[dict[str, Value]] = [{}]
        self.labels: list[dict[str, Block]] = []

    # Tokens

    def peek(self, token: str) -> bool:
        return self.tokens[self.at] == token and self.kinds[self.at] != "string"

    def accept(self, token: str) -> bool:
        if self.peek(token):
            self.at += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected {token!r}")

    def take(self, kind: str) -> str:
        if self.kinds[self.at] != kind:
            self.fail(f"expected a {kind}")
        self.at += 1
        return self.tokens[self.at - 1]

    def advance(self) -> str:
        """The token here; the reader is past it then."""
        if self.kinds[self.at] == "end":
            self.fail("the text ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def fail(self, what: str) -> None:
        line = self.text.count("\n", 0, self.starts[self.at]) + 1
        raise ParseError(f"line {line}: {what}, found {self.tokens[self.at][:60]!r}")

    def skip_balanced(self) -> None:
        """Past one token, or past all between a bracket and its partner."""
        bracket = self.kinds[self.at] == "other"
        opening = self.advance()
        if bracket and opening in CLOSING:
            while not self.accept(CLOSING[opening]):
                self.skip_balanced()

    # Types, kept as text

    def type(self) -> str:
        start = self.at
        if self.peek("("):
            self.skip_balanced()
            self.expect("->")
            self.types()
        else:
            self.advance()
            if self.peek("<"):
                self.skip_balanced()
        return self.text[self.starts[start] : self.starts[self.at - 1] + len(self.tokens[self.at - 1])]

    def types(self) -> list[str]:
        """``(a, b)``, or one type."""
        if not self.accept("("):
            return [self.type()]
        found = []
        while not self.accept(")"):
            found.append(self.type())
            self.accept(",")
        return found

    # Attributes

    def attribute(self) -> Any:
        kind, token = self.kinds[self.at], self.tokens[self.at]
        if kind == "string":
            self.at += 1
            value: Any = token[1:-1]
        elif kind == "number":
            self.at += 1
            hexadecimal = token.lstrip("-").startswith("0x")
            value = (
                int(token, 16) if hexadecimal else float(token) if re.search(r"[.eE]", token) else int(token)
            )
        elif kind == "symbol":
            self.at += 1
            value = token[1:].strip('"')
        elif token == "[":
            self.at += 1
            value = []
            while not self.accept("]"):
                value.append(self.attribute())
                self.accept(",")
        elif token == "{":
            value = self.dictionary()
        elif token in ("true", "false"):
            self.at += 1
            value = token == "true"
        elif token == "(":
            return self.type()
        else:
            self.advance()
            value = Attribute(token.lstrip("#!"), self.body() if self.peek("<") else ())
        if self.accept(":"):
            self.type()
        return value

    def body(self) -> tuple[Any, ...]:
        """What stands between ``<`` and ``>``: attributes where they read as such, else tokens."""
        self.expect("<")
        items: list[Any] = []
        while not self.accept(">"):
            kind, token = self.kinds[self.at], self.tokens[self.at]
            if token in (",", ":"):
                self.at += 1
            elif kind == "number":
                self.at += 1
                items.append(int(token, 0) if token.lstrip("-").isdigit() else token)
            elif kind == "string":
                self.at += 1
                items.append(token[1:-1])
            elif kind == "word":
                self.at += 1
                items.append(Attribute(token.lstrip("#!"), self.body()) if self.peek("<") else token)
            elif kind == "other" and token in CLOSING:
                self.skip_balanced()
            else:
                items.append(self.advance())
        return tuple(items)

    def dictionary(self) -> dict[str, Any]:
        self.expect("{")
        found = {}
        while not self.accept("}"):
            name = self.advance().strip('"')
            found[name] = self.attribute() if self.accept("=") else True
            self.accept(",")
        return found

    # Values

    def use(self, name: str) -> Value:
        """The value called so; one that is defined further down is made now and completed by :meth:`define`."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return self.scopes[-1].setdefault(name, Value())

    def define(self, name: str, owner: Operation | Block, index: int, type: str) -> Value:
        value = self.scopes[-1].get(name)
        if value is None or value.owner is not None:
            value = self.scopes[-1][name] = Value()
        value.type, value.owner, value.index = type, owner, index
        return value

    # Operations

    def operation(self, parent: Block | None) -> Operation:
        names: list[str] = []
        if self.kinds[self.at] == "value":
            while True:
                name = self.take("value")
                count = 1
                if self.accept(":"):
                    count = int(self.take("number"))
                names += [name] if count == 1 else [f"{name}#{i}" for i in range(count)]
                if not self.accept(","):
                    break
            self.expect("=")
        op = Operation(self.take("string")[1:-1], parent=parent)
        self.expect("(")
        while not self.accept(")"):
            op.operands.append(self.use(self.take("value")))
            self.accept(",")
        if self.accept("["):
            while not self.accept("]"):
                op.successors.append(self.labels[-1].setdefault(self.take("block"), Block()))
                self.accept(",")
        if self.peek("<"):
            self.at += 1
            op.attributes |= self.dictionary()
            self.expect(">")
        if self.accept("("):
            while not self.accept(")"):
                op.regions.append(self.region(op))
                self.accept(",")
        if self.peek("{"):
            op.attributes |= self.dictionary()
        self.expect(":")
        for value, type in zip(op.operands, self.types(), strict=True):
            value.type = value.type or type
        self.expect("->")
        results = self.types()
        if len(results) != len(names) and names:
            self.fail(f"expected {len(names)} result types, found {len(results)} before")
        op.results = [
            self.define(name, op, i, type) for i, (name, type) in enumerate(zip(names, results, strict=False))
        ]
        op.results += [Value(type, op, i) for i, type in enumerate(results) if i >= len(names)]
        if self.peek("loc"):
            self.at += 1
            self.skip_balanced()
        return op

    def region(self, parent: Operation) -> list[Block]:
        self.expect("{")
        self.scopes.append({})
        self.labels.append({})
        blocks: list[Block] = []
        while not self.accept("}"):
            if self.kinds[self.at] == "block":
                block = self.labels[-1].setdefault(self.take("block"), Block())
                if self.accept("("):
                    while not self.accept(")"):
                        name = self.take("value")
                        self.expect(":")
                        block.arguments.append(self.define(name, block, len(block.arguments), self.type()))
                        if self.peek("loc"):
                            self.at += 1
                            self.skip_balanced()
                        self.accept(",")
                self.expect(":")
            else:
                block = Block()
            block.parent = parent
            blocks.append(block)
            while not self.peek("}") and self.kinds[self.at] != "block":
                block.operations.append(self.operation(block))
        self.scopes.pop()
        self.labels.pop()
        return blocks

    def module(self) -> Operation:
        while self.kinds[self.at] == "word":  # an alias: "#map = affine_map<...>"
            self.at += 1
            self.expect("=")
            self.attribute()
        op = self.operation(None)
        while self.kinds[self.at] == "word":
            self.at += 1
            self.expect("=")
            self.attribute()
        if self.kinds[self.at] != "end":
            self.fail("expected the end")
        return op


def parse(text: str) -> Operation:
    """The module in ``text``, which is in the generic form.

    Raises:
        ParseError: it isn't.
    """
    return _Reader(text).module()


def inlined(function: Operation, functions: dict[str, Operation]) -> Operation:
    """A copy of a function in which each call of one of ``functions`` has, as its region, a copy of what it calls."""
    return _copy(function, {}, None, functions)


def _copy(
    op: Operation, values: dict[Value, Value], parent: Block | None, functions: dict[str, Operation]
) -> Operation:
    new = Operation(op.name, attributes=op.attributes, parent=parent)
    new.operands = [values.get(value, value) for value in op.operands]
    new.results = [Value(value.type, new, value.index) for value in op.results]
    values |= zip(op.results, new.results, strict=True)
    called = functions.get(str(op.attributes.get("callee"))) if op.name.endswith(".call") else None
    for region in called.regions if called else op.regions:
        blocks = {block: Block(parent=new) for block in region}
        for block, copy in blocks.items():
            copy.arguments = [Value(value.type, copy, value.index) for value in block.arguments]
            values |= zip(block.arguments, copy.arguments, strict=True)
        for block, copy in blocks.items():
            for inner in block.operations:
                copied = _copy(inner, values, copy, functions)
                copied.successors = [blocks[successor] for successor in inner.successors]
                copy.operations.append(copied)
        new.regions.append(list(blocks.values()))
    return new


ELEMENT = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True)
class Shaped:
    """A memref, tensor or vector type: dimensions (None where dynamic), element type and, of a memref, its address space."""

    shape: tuple[int | None, ...]
    element: str
    space: str | None

    @property
    def bits(self) -> int | None:
        """Size in bits, None where a dimension is dynamic or the element has no size."""
        match = ELEMENT.match(self.element)
        if match is None:
            return None
        total = int(match.group(1))
        for size in self.shape:
            if size is None:
                return None
            total *= size
        return total


def shaped(type: str) -> Shaped | None:
    """The parts of a shaped type, None of any other.

    >>> shaped("memref<?x256xbf16, strided<[256, 1]>, #hivm.address_space<gm>>")
    Shaped(shape=(None, 256), element='bf16', space='gm')
    >>> shaped("tensor<8x!tt.ptr<i32>>")
    Shaped(shape=(8,), element='!tt.ptr<i32>', space=None)
    """
    kind, bracket, rest = type.partition("<")
    if not bracket or kind not in ("memref", "tensor", "vector"):
        return None
    depth, cut = 0, len(rest) - 1
    for i, character in enumerate(rest):
        if character == "," and depth == 0:
            cut = i
            break
        depth += (character in "<([") - (character in ">)]")
    shape: list[int | None] = []
    element = rest[:cut].strip()
    while True:
        size, times, more = element.partition("x")
        if not times or not (size == "?" or size.isdigit()):
            break
        shape.append(None if size == "?" else int(size))
        element = more
    _, found, space = rest[cut:].partition("address_space<")
    return Shaped(tuple(shape), element, space.partition(">")[0] if found else None)
