"""Lowers Triton kernels for Ascend as far as it goes without CANN: Triton IR -> linalg -> final HIVM.

What CANN would add is ``hivmc``, the assembler of HIVM; BiSheng's compiler looks for it on PATH at the end. A stand-in there
keeps the HIVM it is handed. So whatever is said of a kernel here holds for its final HIVM, which was neither assembled nor run.

Needs the packages of :data:`PACKAGES` (x86-64 or aarch64 Linux, Python 3.9 to 3.11); nothing of torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .mlir import Operation, parse

PACKAGES = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11")
SECONDS = (
    60  # of processor time for one run of one tool; of the clock ten times that, since machines are shared
)

RUNS = 4  # of a tool that a signal ends: triton-adapter-opt 3.2.0 crashes in 1.7 % of identical runs (25 of 1440)


class NotInstalled(RuntimeError):
    """The compiler isn't there; the message says what to install."""


@dataclass(frozen=True)
class Target:
    """A chip, as the compiler calls it."""

    arch: str
    a5: bool  # of the 950 family, which has a compiler of its own


TARGETS = (Target("Ascend910B1", False), Target("Ascend910_9391", False), Target("Ascend950PR_9589", True))


@dataclass(frozen=True)
class Kernel:
    """A kernel as compiled, and what its author says of it.

    Attributes:
        function: the ``@triton.jit`` function.
        signature: argument -> type ("*bf16", "i64", "i32"), in order, constexprs left out.
        constants: constexpr -> value.
        cross_card: it writes to, or polls, memory of other cards.
        spins: how many loops poll, with these constants.
        signals: how many stores write flags: one int32 value to whole 32-byte records.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    cross_card: bool = False
    spins: int = 0
    signals: int = 0


@dataclass(frozen=True)
class Front:
    """A kernel through the parts of the compiler that know only the chip's family."""

    source: Operation  # Triton IR as written, helpers called
    ttir: Operation | None = None
    linalg: Operation | None = None
    text: str = ""  # of linalg, for the next stage
    error: str = ""


@dataclass(frozen=True)
class Lowered:
    """A kernel's IR at each level for one target; where the compiler failed, None from there on and what it said."""

    source: Operation
    ttir: Operation | None
    linalg: Operation | None
    hivm: Operation | None
    error: str


def versions() -> dict[str, str]:
    """Installed versions of the compiler's packages.

    Raises:
        NotInstalled: one is missing, or another Triton is installed in its place.
    """
    found = {}
    for name in (package.partition("==")[0] for package in PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise NotInstalled(
                f"ascend_lint: {name} is not installed. triton-ascend takes the module name triton for itself, so give it an "
                f"environment of its own: python3.11 -m venv .venv-ascend && .venv-ascend/bin/pip install --no-deps "
                f"{' '.join(PACKAGES)} (in this repository: make ascend-check)"
            ) from None
    return found


def _tool(name: str) -> Path:
    """A program of triton-ascend or of ascendnpu-ir."""
    if name == "triton-adapter-opt":
        package = importlib.import_module("triton.backends.ascend")
        return Path(str(package.__file__)).parent / name
    return Path(str(importlib.import_module("ascendnpuir").__file__)).parent / "bin" / name


def _run(command: list[Any], **options: Any) -> str:
    """Runs a tool; returns its output.

    Raises:
        RuntimeError: it failed, or was ended by a signal RUNS times; the message is what it printed.
    """
    for _ in range(RUNS):
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10 * SECONDS,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1)),
            **options,
        )
        if done.returncode >= 0 or done.returncode == -signal.SIGXCPU:
            break
    if done.returncode == -signal.SIGXCPU:
        raise RuntimeError(f"error: {Path(str(command[0])).name} took over {SECONDS} s of processor time")
    if done.returncode:
        raise RuntimeError(
            f"{done.stderr}{done.stdout}".strip() or f"{command[0]} ended with {done.returncode}"
        )
    output: str = done.stdout
    return output


def _generic(text: str, tool: str) -> Operation:
    """IR in whatever form, parsed by way of a tool that knows its dialects."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.mlir")
        path.write_text(text)
        return parse(_run([_tool(tool), path, "--mlir-print-op-generic"]))


def front(kernel: Kernel, a5: bool) -> Front:
    """Through Triton's own stages, which triton-ascend's compiler module calls in this order.

    Raises:
        Whatever Triton's front end raises for a kernel that it can't translate.
    """
    compiler = importlib.import_module("triton.backends.ascend.compiler")
    ir = importlib.import_module("triton._C.libtriton").ir
    target = importlib.import_module("triton.backends.compiler").GPUTarget("npu", "Ascend", 0)
    backend = compiler.AscendBackend(target)
    options = backend.parse_options({"compile_on_910_95": a5})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    written = importlib.import_module("triton.compiler").ASTSource(
        fn=kernel.function, signature=dict(kernel.signature), constants=dict(kernel.constants)
    )
    module = written.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    source = _generic(
        str(module), "triton-adapter-opt"
    )  # before any pass: even the inliner deletes what nothing uses
    metadata = {"target": target, **options.__dict__, "hash": kernel.name}
    module = compiler.make_ttir(module, metadata, options)
    ttir = _generic(str(module), "triton-adapter-opt")
    for run in range(RUNS):
        try:
            text = compiler.ttir_to_linalg(module, metadata, options, named_ops=True)
            break
        except subprocess.CalledProcessError as error:
            if error.returncode >= 0 or run == RUNS - 1:
                return Front(source, ttir, error=error.stderr.decode(errors="replace"))
    linalg = _generic(text, "triton-adapter-opt")
    return Front(source, ttir, linalg, compiler._parse_linalg_metadata(text, metadata)[0])


def back(done: Front, target: Target, blockify: bool) -> Lowered:
    """Through BiSheng's compiler, to final HIVM.

    Args:
        blockify: with the loop over blocks that TRITON_ALL_BLOCKS_PARALLEL asks for, so that a grid may exceed the cores.
    """
    if done.linalg is None:
        return Lowered(done.source, done.ttir, None, None, done.error)
    suffix = "-a5" if target.a5 else ""
    with tempfile.TemporaryDirectory() as folder:
        path, kept = Path(folder, "kernel.mlir"), Path(folder, "hivm.mlir")
        path.write_text(done.text)
        compiler = _tool("bishengir-compile" + suffix)
        command: list[Any] = [
            compiler,
            path,
            f"--target={target.arch}",
            "--enable-auto-multi-buffer=True",
            "--enable-auto-bind-sub-block=True",
            "--enable-hfusion-compile=true",
            *([] if target.a5 else ["--enable-hivm-compile=true"]),
            "--enable-triton-kernel-compile=true",
            "--mlir-print-op-generic",  # the form in which the assembler is given the HIVM
            *(["--enable-auto-blockify-loop"] if blockify else []),
            "-o",
            Path(folder, "kernel"),
        ]
        try:
            with _assembler(kept, "hivmc" + suffix) as environment:
                _run(command, env=environment, cwd=folder)
            if not kept.exists():
                raise RuntimeError(f"error: {compiler.name} ended well and handed no HIVM to the assembler")
            hivm = parse(kept.read_text())
        except RuntimeError as error:
            return Lowered(done.source, done.ttir, done.linalg, None, str(error))
        except subprocess.TimeoutExpired as error:
            return Lowered(done.source, done.ttir, done.linalg, None, f"error: {error}")
    return Lowered(done.source, done.ttir, done.linalg, hivm, "")


@contextmanager
def _assembler(kept: Path, name: str) -> Iterator[dict[str, str]]:
    """An environment whose PATH has a stand-in for CANN's assembler: it copies its input to ``kept``."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, name)
        program.write_text(
            '#!/bin/sh\ncase "$1" in --version|-version) echo "hivmc 1.2.0"; exit 0;; esac\n'
            f'for word in "$@"; do case "$word" in *.mlir) cp "$word" "{kept}";; esac; done\n'
        )
        program.chmod(0o755)
        yield {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}


def lower(kernel: Kernel, target: Target, blockify: bool = False) -> Lowered:
    """A kernel for one target, all the way."""
    return back(front(kernel, target.a5), target, blockify)
