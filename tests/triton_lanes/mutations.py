"""Faults put into copies of the kernels' sources, one at a time, by rewriting their syntax trees.

Each is one of the mistakes that make a one-sided exchange wrong without making it fail: what is checked is that some lane
notices. A mutation that finds nothing to change is an error of this file, not a lane's success.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Rewrite = Callable[[ast.Module], int]
"""Changes a module in place and says how many places it has changed."""


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: as the table prints it.
        files: the files of op_kernel/triton it is put into; empty: all of them.
        rewrite: puts it in.
        linted: kernels of the catalogue, of small sizes, that the lint looks at.
    """

    name: str
    files: tuple[str, ...]
    rewrite: Rewrite
    linted: tuple[str, ...] = ("push", "take")


def called(node: ast.AST) -> str:
    """The name of what a call calls: ``tl.store(...)`` -> "store"; "" for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def functions(module: ast.Module, *names: str) -> list[ast.FunctionDef]:
    """The functions of these names, all of them without names."""
    return [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and (not names or n.name in names)]


class _Calls(ast.NodeTransformer):
    """Replaces calls of ``name`` by what ``change`` makes of them; None leaves one as it is."""

    def __init__(self, name: str, change: Callable[[ast.Call], ast.expr | None]) -> None:
        self.name, self.change, self.count = name, change, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        changed = self.change(node) if called(node) == self.name else None
        if changed is None:
            return node
        self.count += 1
        return changed


class _Statements(ast.NodeTransformer):
    """Replaces statements that are a call of ``name`` by ``pass``."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if called(node.value) != self.name:
            return node
        self.count += 1
        return ast.copy_location(ast.Pass(), node)


def without_keywords(call: str, keyword: str, *inside: str) -> Rewrite:
    """Calls of ``call`` lose a keyword, in the functions ``inside``."""

    def change(node: ast.Call) -> ast.expr | None:
        kept = [k for k in node.keywords if k.arg != keyword]
        if len(kept) == len(node.keywords):
            return None
        return ast.Call(node.func, node.args, kept)

    def rewrite(module: ast.Module) -> int:
        count = 0
        for function in functions(module, *inside):
            calls = _Calls(call, change)
            calls.visit(function)
            count += calls.count
        return count

    return rewrite


def without_statements(call: str, *inside: str) -> Rewrite:
    """Statements that call ``call`` vanish, in the functions ``inside``."""

    def rewrite(module: ast.Module) -> int:
        count = 0
        for function in functions(module, *inside):
            statements = _Statements(call)
            statements.visit(function)
            count += statements.count
        return count

    return rewrite


def without_waiting(*inside: str) -> Rewrite:
    """``poll(address, code, ...)`` is taken for ``code`` with no look at memory, in the functions ``inside``."""

    def rewrite(module: ast.Module) -> int:
        count = 0
        for function in functions(module, *inside):
            calls = _Calls("poll", lambda node: node.args[1])
            calls.visit(function)
            count += calls.count
        return count

    return rewrite


def compared(operator: type[ast.cmpop], right: ast.expr | None = None) -> Rewrite:
    """A poll compares what it sees with ``operator`` and not with ``==``, or with something else than the code."""

    def rewrite(module: ast.Module) -> int:
        count = 0
        for function in functions(module, "poll"):
            for node in ast.walk(function):
                if isinstance(node, ast.Compare) and ast.unparse(node) == "low == code":
                    node.ops = [operator()]
                    node.comparators = [right or node.comparators[0]]
                    count += 1
        return count

    return rewrite


def flag_first(module: ast.Module) -> int:
    """A signal, with the assignments right before it, goes in front of the stores it stands behind."""
    count = 0
    blocks = [
        block
        for node in ast.walk(module)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(block, list)
    ]
    for block in blocks:
        at = next(
            (i for i, s in enumerate(block) if isinstance(s, ast.Expr) and called(s.value) == "signal"), 0
        )
        begin = at
        while begin and isinstance(block[begin - 1], ast.Assign):
            begin -= 1
        first = begin
        while first and isinstance(block[first - 1], ast.Expr | ast.If):
            first -= 1
        if first < begin:
            block[first : at + 1] = block[begin : at + 1] + block[first:begin]
            count += 1
    return count


def apply(mutation: Mutation | None, source: Path, target: Path) -> None:
    """Copies the package's kernels from ``source`` (a checkout) to ``target``, with the fault in them.

    ``target`` becomes a folder to put first on the path: ``op_kernel`` is a copy, everything else of ``moe_a2a`` a link.

    Raises:
        ValueError: the mutation finds nothing to change.
    """
    shutil.copytree(source / "op_kernel", target / "op_kernel")
    package = target / "moe_a2a"
    package.mkdir()
    for entry in sorted((source / "moe_a2a").iterdir()):
        if entry.name not in ("op_kernel", "__pycache__"):
            (package / entry.name).symlink_to(entry.resolve())
    (package / "op_kernel").symlink_to(target / "op_kernel")
    if mutation is None:
        return
    changed = 0
    for path in sorted((target / "op_kernel" / "triton").glob("*.py")):
        if mutation.files and path.name not in mutation.files:
            continue
        module = ast.parse(path.read_text())
        if count := mutation.rewrite(module):
            changed += count
            path.write_text(ast.unparse(ast.fix_missing_locations(module)) + "\n")
    if not changed:
        raise ValueError(f"mutation {mutation.name!r} changes nothing: the kernels have changed, adapt it")


MUTATIONS = [
    Mutation("wait removed: records", ("record.py",), without_waiting("records_phase"), ("await-records",)),
    Mutation("wait removed: rows", ("take.py",), without_waiting("await_run"), ("take",)),
    Mutation("wait removed: cells", ("combine.py",), without_waiting("cells_phase"), ("combine",)),
    Mutation("wait removed: rows given", ("give.py",), without_waiting("give"), ("give",)),
    Mutation(
        "barrier removed: before a flag",
        ("signal.py",),
        without_statements("debug_barrier", "signal"),
        ("push",),
    ),
    Mutation(
        "barrier removed: before a count",
        ("signal.py",),
        without_statements("debug_barrier", "count"),
        ("give",),
    ),
    Mutation("comparison weakened: any code", ("signal.py",), compared(ast.NotEq, ast.Constant(0))),
    Mutation("comparison weakened: this code or a later one", ("signal.py",), compared(ast.GtE)),
    Mutation("volatile removed", (), without_keywords("load", "volatile")),
    Mutation(
        "mask removed: rows",
        ("push.py", "take.py"),
        without_keywords("store", "mask", "gather_rows", "copy_rows"),
    ),
    Mutation("flag before payload", ("record.py", "push.py", "give.py"), flag_first),
]
