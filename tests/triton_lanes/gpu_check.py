"""Compiles every kernel of the catalogue ahead of time for NVIDIA and AMD, with no GPU, and prints what it takes of one.

    python -m triton_lanes.gpu_check [--target sm_90] [--only NAME]

Fails when a kernel doesn't compile or spills registers to memory. What it can't show is that a kernel computes the right values
or ever ends: nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_a2a.op_kernel.triton import catalogue

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes.

    Attributes:
        registers: per thread (on AMD vector registers, accumulators included).
        spills: to memory; on NVIDIA bytes, on AMD vector registers; 0 is expected.
        shared: bytes per program.
        matrix: instructions of the matrix units.
        fused: multiply-adds with one rounding, which would change results.
    """

    registers: int
    spills: int
    shared: int
    matrix: int
    fused: int


def number(pattern: str, text: str) -> int:
    """The sum of all numbers that the pattern finds.

    Raises:
        ValueError: it finds none; then the compiler's report isn't what it was.
    """
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(
            f"gpu_check: the compiler's report has no {pattern!r}; it may have changed with its version"
        )
    return sum(map(int, found))


def nvidia_usage(compiled: Any, log: str) -> Usage:
    ptx = compiled.asm["ptx"]
    return Usage(
        registers=number(r"Used (\d+) registers", log),
        spills=number(r"(\d+) bytes spill (?:stores|loads)", log),
        shared=compiled.metadata.shared,
        matrix=len(re.findall(r"\bwgmma\.mma_async|\bmma\.sync", ptx)),
        fused=len(re.findall(r"\bfma\.rn\.", ptx)),
    )


def amd_usage(compiled: Any, log: str) -> Usage:
    text = compiled.asm["amdgcn"]
    return Usage(
        registers=number(r"\.vgpr_count:\s+(\d+)", text),
        spills=number(
            r"\.vgpr_spill_count:\s*(\d+)", text
        ),  # scalar registers spill to vector ones, not to memory
        shared=compiled.metadata.shared,
        matrix=text.count("v_mfma"),
        fused=len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mac)_f", text)),
    )


USAGES: dict[str, Callable[[Any, str], Usage]] = {"cuda": nvidia_usage, "hip": amd_usage}


def compile_for(variant: catalogue.Variant, target: GPUTarget) -> Usage:
    """Compiles one variant. Contraction is off: multiply, then add, each rounded, as on every target."""
    signature = {
        name: "constexpr" if name in variant.constants else variant.signature[name]
        for name in variant.kernel.arg_names
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            source,
            target=target,
            options={"num_warps": variant.warps, "enable_fp_fusion": False},
        )
    return USAGES[target.backend](compiled, log.getvalue())


def cases(only: str, targets: Sequence[str]) -> list[tuple[catalogue.Variant, str]]:
    """What is compiled: every variant for every target that it is meant for."""
    return [
        (variant, target)
        for variant in catalogue.variants("gpu")
        for target in targets
        if only in variant.name and variant.arch in ("", target)
    ]


def compiled(number: int, only: str, targets: Sequence[str]) -> Usage | str:
    """Compiles one of :func:`cases` (a kernel can't be handed to another process); its usage, or why it doesn't compile."""
    knobs.compilation.always_compile = True  # a kernel from the cache has no report of the assembler
    knobs.nvidia.dump_ptxas_log = True
    variant, target = cases(only, targets)[number]
    try:
        return compile_for(variant, TARGETS[target])
    except Exception as error:
        return f"doesn't compile: {str(error).strip().splitlines()[-1]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=TARGETS, action="append", help="all when not given")
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="kernels compiled side by side"
    )
    options = parser.parse_args(arguments)
    targets = options.target or list(TARGETS)
    table = Table(title=f"Ahead of time with triton {triton.__version__}; compiled, never run on a GPU")
    for column in ("kernel", "target", "result", "registers", "spills", "shared bytes", "matrix", "fma"):
        table.add_column(column, justify="left" if column in ("kernel", "target", "result") else "right")
    failures = 0
    found = cases(options.only, targets)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        results = pool.map(compiled, range(len(found)), repeat(options.only), repeat(targets))
        for (variant, target), usage in zip(found, results, strict=True):
            if isinstance(usage, str):
                failures += 1
                table.add_row(variant.name, target, usage)
                continue
            failures += usage.spills > 0
            numbers = (usage.registers, usage.spills, usage.shared, usage.matrix, usage.fused)
            table.add_row(variant.name, target, "spills" if usage.spills else "ok", *map(str, numbers))
    Console(width=140).print(table)
    print(f"gpu-check: {failures} failed" if failures else "gpu-check: all compile, none spills")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
