"""Lowers Triton kernels for Ascend and checks what the compiler made of them; no NPU, no CANN and no torch needed.

``python -m moe_a2a.ascend_lint`` goes through this package's own kernels, ``python -m moe_a2a.ascend_lint FILE.py`` through
those of a file. It prints a table, kernel by target, and ends with 1 if anything is wrong. Triton compiles many things for
Ascend without a word that don't do what they say (a polling loop deleted, an atomic lost, a flag before its payload): the rules
are about those. ``--rules`` prints them; docs/ascend-lowering.md has them with examples.

The file says what to compile, and what must be true of it, in ``VARIANTS``, a list of dictionaries (or of objects with such
attributes), or in a function ``variants(target)`` that returns one for ``"ascend"``::

    VARIANTS = [
        {
            "kernel": signal,                              # the @triton.jit function
            "signature": {"flags": "*i32", "code": "i32"}, # argument -> type, in order, constexprs left out
            "constants": {"B": 8},                         # constexpr -> value
            "cross_card": True,                            # it reaches memory of other cards (default: False)
            "spins": 1,                                    # how many of its loops poll (default: 0)
            "signals": 1,                                  # how many of its stores write flags (default: 0)
        },
    ]

A flag is a store of one int32 value to a whole 32-byte record, or to several.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_a2a.op_host.ascend.lower import TARGETS, Kernel, NotInstalled, Target, back, front, versions
from moe_a2a.op_host.ascend.rules import RULES, Fault, check

HONEST = "lowered to final HIVM, not assembled, not run on an NPU"
MODES = {"plain": False, "block loop": True}  # the latter as TRITON_ALL_BLOCKS_PARALLEL asks for


@dataclass(frozen=True)
class Result:
    """A kernel on one target, with or without the loop over blocks."""

    kernel: str
    target: str
    mode: str
    faults: tuple[Fault, ...]


def declared(variant: Any) -> Kernel:
    """A kernel from what a file or the catalogue says of it.

    Raises:
        ValueError: a part is missing or unknown.
    """
    known = ("name", "kernel", "signature", "constants", "cross_card", "spins", "signals")
    if isinstance(variant, Mapping):
        said = dict(variant)
        unknown = sorted(set(said) - set(known))
        if unknown:
            raise ValueError(f"ascend_lint: a variant has {unknown[0]!r}; known are {', '.join(known)}")
    else:
        said = {name: getattr(variant, name) for name in known if hasattr(variant, name)}
    for name in ("kernel", "signature"):
        if name not in said:
            raise ValueError(f"ascend_lint: variant {said.get('name', variant)!r} has no {name!r}")
    function = said.pop("kernel")
    name = said.pop("name", getattr(function, "__name__", "kernel"))
    return Kernel(name=name, function=function, **said)


def load(path: Path) -> list[Kernel]:
    """The kernels that a file declares.

    Raises:
        ValueError: it declares none, or wrongly.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"ascend_lint: no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton looks its functions' globals up there
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    if hasattr(module, "variants"):
        found = module.variants("ascend")
    elif hasattr(module, "VARIANTS"):
        found = module.VARIANTS
    else:
        raise ValueError(
            f"ascend_lint: {path} has neither VARIANTS nor variants(target); see python -m moe_a2a.ascend_lint -h"
        )
    return [declared(variant) for variant in found]


def catalogue() -> list[Kernel]:
    """This package's kernels for Ascend."""
    module = importlib.import_module("moe_a2a.op_kernel.triton.catalogue")
    return [declared(variant) for variant in module.variants("ascend")]


def lint(kernel: Kernel, targets: Iterable[Target] = TARGETS, modes: Iterable[str] = MODES) -> list[Result]:
    """Lowers one kernel for each target and checks it."""
    targets, modes = list(targets), list(modes)
    results = []
    for a5 in sorted({target.a5 for target in targets}):
        family = [target for target in targets if target.a5 == a5]
        try:
            done = front(kernel, a5)
        except Exception as error:  # whatever Triton's front end raises is its word on the kernel
            fault = Fault("not-lowered", _said(error))
            results += [
                Result(kernel.name, target.arch, mode, (fault,)) for target in family for mode in modes
            ]
            continue
        for target in family:
            for mode in modes:
                faults = tuple(check(kernel, back(done, target, MODES[mode])))
                results.append(Result(kernel.name, target.arch, mode, faults))
    return results


def _said(error: BaseException) -> str:
    """What Triton's front end complains of: the innermost error, and the line of the kernel it was at."""
    line = ""
    while True:
        source, node = getattr(error, "src", None), getattr(error, "node", None)
        if source and node is not None:
            line = f", at: {source.splitlines()[node.lineno - 1].strip()}"
        if error.__cause__ is None:
            break
        error = error.__cause__
    said = getattr(error, "error_message", None) or str(error)
    return f"Triton's front end: {type(error).__name__}: {' '.join(str(said).split())[:200]}{line}"


_work: list[
    tuple[Kernel, tuple[Target, ...]]
] = []  # handed to the processes by fork: kernels can't be pickled


def _lint(index: int) -> list[Result]:
    return lint(*_work[index])


def lint_all(
    kernels: Sequence[Kernel],
    targets: Sequence[Target] = TARGETS,
    jobs: int | None = None,
    report: Callable[[list[Result]], None] = lambda _: None,
) -> list[Result]:
    """Lowers and checks many kernels, in processes side by side; each kernel's results are reported as they come."""
    _work[:] = [
        (kernel, family)
        for kernel in kernels
        for a5 in (False, True)
        if (family := tuple(target for target in targets if target.a5 == a5))
    ]
    with multiprocessing.get_context("fork").Pool(jobs or os.cpu_count()) as pool:
        found = []
        for results in pool.imap(_lint, range(len(_work))):
            report(results)
            found += results
        return found


def table(results: Sequence[Result]) -> str:
    """Kernel by target; a cell names the rules that are broken, and says where only one mode is meant."""
    targets = list(dict.fromkeys(result.target for result in results))
    kernels = list(dict.fromkeys(result.kernel for result in results))
    rows = [["kernel", *targets]]
    for kernel in kernels:
        cells = []
        for target in targets:
            mine = {
                r.mode: sorted({f.rule for f in r.faults})
                for r in results
                if (r.kernel, r.target) == (kernel, target)
            }
            same = len({tuple(rules) for rules in mine.values()}) == 1
            said = [
                ", ".join(rules) + ("" if same else f" ({mode})") for mode, rules in mine.items() if rules
            ]
            cells.append("; ".join(dict.fromkeys(said)) or "clean")
        rows.append([kernel, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def details(results: Sequence[Result]) -> list[str]:
    """One line for each fault of each kernel, and where it was found."""
    where: dict[tuple[str, Fault], list[str]] = {}
    for result in results:
        for fault in result.faults:
            where.setdefault((result.kernel, fault), []).append(f"{result.target} {result.mode}")
    everywhere = len({(result.target, result.mode) for result in results})
    return [
        f"{kernel}: {fault.rule}: {fault.detail} [{'everywhere' if len(at) >= everywhere else ', '.join(dict.fromkeys(at))}]"
        for (kernel, fault), at in where.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moe_a2a.ascend_lint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE.py", help="kernels to check instead of this package's own"
    )
    parser.add_argument(
        "--kernel",
        action="append",
        help="only this one, or those of a pattern such as '*-small'; may be repeated",
    )
    parser.add_argument(
        "--target", action="append", choices=[t.arch for t in TARGETS], help="only this one; may be repeated"
    )
    parser.add_argument("--jobs", type=int, help="processes side by side (default: one for each CPU)")
    parser.add_argument("--rules", action="store_true", help="print the rules with their reasons")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print each kernel's faults as soon as they are known"
    )
    options = parser.parse_args(arguments)
    if options.rules:
        width = max(map(len, RULES))
        print("\n".join(f"{name.ljust(width)}  {reason}" for name, (_, reason) in RULES.items()))
        return 0
    try:
        installed = versions()
        kernels = load(options.file) if options.file else catalogue()
        wanted = options.kernel or ["*"]
        missing = [one for one in wanted if not fnmatch.filter([kernel.name for kernel in kernels], one)]
        if missing:
            raise ValueError(
                f"ascend_lint: no kernel {missing[0]!r}; there are {', '.join(k.name for k in kernels)}"
            )
    except (NotInstalled, ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    kernels = [kernel for kernel in kernels if any(fnmatch.fnmatchcase(kernel.name, one) for one in wanted)]
    targets = [target for target in TARGETS if target.arch in (options.target or [target.arch])]
    start = time.monotonic()

    def report(results: list[Result]) -> None:
        where = ", ".join(dict.fromkeys(result.target for result in results))
        faults = details(results) or [f"{results[0].kernel}: clean"]
        print(
            f"{time.monotonic() - start:.1f} s: {where}: ",
            "\n  ".join(faults),
            sep="",
            file=sys.stderr,
            flush=True,
        )

    results = lint_all(kernels, targets, options.jobs, report if options.verbose else lambda _: None)
    print(table(results))
    for line in details(results):
        print(line)
    broken = sum(bool(result.faults) for result in results)
    print(
        f"{len(kernels)} kernels for {len(targets)} targets, each plain and with the loop over blocks: "
        f"{len(results)} lowerings, {len(results) - broken} clean, {broken} with faults "
        f"({', '.join(f'{name} {version}' for name, version in installed.items())})"
    )
    print(f"Clean means: {HONEST}; no rule broken.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
