"""Compiles Triton kernels to x86 from the IR that triton-ascend hands to the Ascend compiler; runs in triton-ascend's Python.

The way of a kernel: Triton IR -> linalg (triton-ascend's adapter, what the NPU gets, too) -> upstream MLIR passes of
bishengir-opt -> LLVM IR -> assembly -> a shared object with ``runtime.c`` in it. What can't be seen here is all that comes
after linalg on an NPU: HIVM, its synchronisation, the vendor's assembler.

    python tests/triton_lanes/lower.py ROOT FOLDER < requests

``ROOT`` is put first on the path; a request is a line of JSON, a reply, too::

    {"module": "op_kernel.triton.push", "kernel": "push", "signature": {"x": "*bf16", ...}, "constants": {"H": 64, ...}}
    {"object": "FOLDER/0123abcd.so", "entry": "push", "arguments": ["windows", ...], "spins": 0}
    {"error": "what went wrong", "vanished": false}

Signature and constants may name more than the kernel takes. A constant that is a Triton type is written as {"dtype": "bf16"}.
{"variant": NAME} asks for one of the catalogue, {"variants": "x86"} for their names.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNTIME = Path(__file__).with_name("runtime.c")

# The list of triton-ascend's own path to a CPU, but branches become LLVM's after functions have: before, blocks with memref
# arguments are left that nothing converts.
PASSES = (
    "convert-linalg-to-affine-loops",
    "eliminate-empty-tensors",
    "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize=allow-return-allocs-from-loops=true",
    "lower-affine",
    "convert-linalg-to-loops",
    "convert-scf-to-cf",
    "convert-arith-to-llvm",
    "convert-math-to-llvm",
    "convert-complex-to-llvm",
    "convert-vector-to-llvm",
    "convert-index-to-llvm",
    "memref-expand",
    "expand-strided-metadata",
    "finalize-memref-to-llvm",
    "convert-func-to-llvm",
    "convert-cf-to-llvm",
    "lower-affine",
    "convert-arith-to-llvm",
    "reconcile-unrealized-casts",
)

TRIPLE = "x86_64-unknown-linux-gnu"
ATTEMPTS = (
    4  # triton-adapter-opt 3.2.0 dies by a signal in one or two of a hundred runs on the very same input
)
EVERYTHING = 2**40  # elements that memory behind an address is said to have

ATOMIC_KINDS = {("add", "i"): "addi", ("add", "f"): "addf", ("and", "i"): "andi", ("or", "i"): "ori"}


class CantBuild(Exception):
    """The kernel has no x86 build; the message says why."""


class Vanished(CantBuild):
    """A loop that waits isn't there any more: the kernel would go on without what it waits for."""


def address_to_memref(element: str) -> str:
    """MLIR of a function that makes a memref of an address: ``hivm.hir.pointer_cast`` in words that upstream passes know."""
    struct = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>"
    fields = (("p", "[0]"), ("p", "[1]"), ("zero", "[2]"), ("size", "[3, 0]"), ("one", "[4, 0]"))
    lines = [
        f"func.func private @memory_at_{element}(%a: i64) -> memref<?x{element}> {{",
        "%p = llvm.inttoptr %a : i64 to !llvm.ptr",
        *(
            f"%{name} = llvm.mlir.constant({value} : i64) : i64"
            for name, value in (("zero", 0), ("one", 1), ("size", EVERYTHING))
        ),
        f"%d0 = llvm.mlir.undef : {struct}",
        *(
            f"%d{i + 1} = llvm.insertvalue %{value}, %d{i}{where} : {struct}"
            for i, (value, where) in enumerate(fields)
        ),
        f"%m = builtin.unrealized_conversion_cast %d{len(fields)} : {struct} to memref<?x{element}>",
        f"return %m : memref<?x{element}>",
        "}",
    ]
    return "\n".join(lines) + "\n"


def real_atomics(linalg: str) -> str:
    """An atomic of the adapter is a loop over elements with an attribute; upstream would make a plain read and write of it."""
    atomic = re.compile(
        r"linalg\.generic \{[^}]*\} ins\((?P<p>%\w+), (?P<v>%\w+) : (?P<pt>memref<.*?>+), (?P<vt>memref<.*?>+)\) "
        r"outs\((?P=p) : (?P=pt)\) attrs = *\{GenericAtomicRMW = \"(?P<op>\w+)\"[^}]*\} \{.*?linalg\.yield[^\n]*\n\s*\}",
        re.S,
    )
    count = 0

    def loop(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        p, v, pt, vt, op = match.group("p", "v", "pt", "vt", "op")
        shape = re.match(r"memref<((?:\d+x)+)([a-z]+)\d+", pt)
        kind = shape and ATOMIC_KINDS.get((op, shape.group(2)[0]))
        if not shape or not kind:
            raise CantBuild(f"an atomic {op} on {pt}")
        element = re.search(r"x([a-z]+\d+)[,>]", pt)
        assert element is not None
        kept = element.group(1)
        indices, lines = [], []
        for axis, size in enumerate(shape.group(1).rstrip("x").split("x")):
            name = f"at{count}_{axis}"
            lines += [
                f"%{name}_from = arith.constant 0 : index",
                f"%{name}_to = arith.constant {size} : index",
                f"%{name}_by = arith.constant 1 : index",
                f"scf.for %{name} = %{name}_from to %{name}_to step %{name}_by {{",
            ]
            indices.append(f"%{name}")
        at = ", ".join(indices)
        lines += [
            f"%value{count} = memref.load {v}[{at}] : {vt}",
            f"%old{count} = memref.atomic_rmw {kind} %value{count}, {p}[{at}] : ({kept}, {pt}) -> {kept}",
            *("}" for _ in indices),
        ]
        return "\n".join(lines)

    linalg = atomic.sub(loop, linalg)
    if left := re.search(r"GenericAtomicRMW[^}]*", linalg):
        raise CantBuild(f"an atomic whose result is used: {left.group(0)}")
    return linalg


def upstream(linalg: str) -> str:
    """The adapter's IR without what only Ascend's passes know.

    Raises:
        CantBuild: something is left that has no meaning here.
    """
    elements: set[str] = set()

    def memory(match: re.Match[str]) -> str:
        result, address, element = match.groups()
        elements.add(element)
        return f"{result} = func.call @memory_at_{element}({address}) : (i64) -> memref<?x{element}>"

    linalg = re.sub(
        r"(%\w+) = hivm\.hir\.pointer_cast\((%\w+)\)(?: \[[^\]]*\])? : memref<\?x(\w+)>", memory, linalg
    )
    linalg = "\n".join(
        line for line in linalg.splitlines() if not line.lstrip().startswith("annotation.mark")
    )
    linalg = real_atomics(linalg)
    linalg = linalg.replace("gpu.barrier", "func.call @lowered_fence() : () -> ()")
    if ascend := re.search(r"(?:^|=) *\"?((?:hivm|hfusion)\.[\w.]+)", linalg, re.M):
        raise CantBuild(f"{ascend.group(1)} has no meaning on x86")
    begin = linalg.index("  func.func")
    helpers = "func.func private @lowered_fence()\n" + "".join(map(address_to_memref, sorted(elements)))
    return linalg[:begin] + helpers + linalg[begin:]


def instrumented(llvm_dialect: str) -> str:
    """Copies and allocations are those of runtime.c."""
    copy, count = re.subn(
        r'"llvm\.intr\.memcpy"\((%\w+), (%\w+), (%\w+)\) <\{isVolatile = false\}>',
        r"llvm.call @lowered_copy(\1, \2, \3)",
        llvm_dialect,
    )
    for name, ours in (("malloc", "lowered_alloc"), ("free", "lowered_free")):
        copy = re.sub(rf"@{name}\b", f"@{ours}", copy)
    if "intr.memcpy" in copy or "intr.memmove" in copy:
        raise CantBuild("a copy of a kind that isn't known here")
    begin = copy.index("{\n") + 2
    return copy[:begin] + "llvm.func @lowered_copy(!llvm.ptr, !llvm.ptr, i64)\n" * bool(count) + copy[begin:]


def constant(value: Any) -> Any:
    if isinstance(value, dict):
        import triton.language as tl

        return tl.dtype(value["dtype"])
    return value


def catalogue() -> dict[str, Any]:
    """Variants for x86, by name."""
    return {
        variant.name: variant
        for variant in importlib.import_module("op_kernel.triton.catalogue").variants("x86")
    }


def kernel_of(request: dict[str, Any]) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The kernel that a request means, its signature and its constants."""
    if "variant" in request:
        variant = catalogue()[request["variant"]]
        return variant.kernel, variant.signature, variant.constants
    kernel = getattr(importlib.import_module(request["module"]), request["kernel"])
    constants = {
        key: constant(value) for key, value in request["constants"].items() if key in kernel.arg_names
    }
    return (
        kernel,
        {key: request["signature"][key] for key in kernel.arg_names if key not in constants},
        constants,
    )


def linalg_of(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> tuple[str, str]:
    """The Triton IR of a kernel, and the adapter's IR of that."""
    from triton._C.libtriton import ir
    from triton.backends import backends
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("npu", "Ascend910B1", 0)
    backend = backends["ascend"].compiler(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=signature, constants=constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    meta = {"target": target, **options.__dict__, "hash": "x"}
    module = ascend.make_ttir(module, meta, options)
    for left in reversed(range(ATTEMPTS)):
        try:
            return str(module), ascend.ttir_to_linalg(module, meta, options, named_ops=False)
        except subprocess.CalledProcessError as error:
            if error.returncode >= 0 or not left:
                raise
    raise AssertionError("not reached")


def assembly(linalg: str, folder: Path, name: str) -> str:
    from triton._C.libtriton import ir, llvm

    source, lowered = folder / f"{name}.mlir", folder / f"{name}.llvm.mlir"
    source.write_text(linalg)
    opt = Path(str(importlib.import_module("ascendnpuir").__file__)).parent / "bin" / "bishengir-opt"
    subprocess.run(
        [str(opt), str(source), *(f"--{p}" for p in PASSES), "-o", str(lowered)],
        check=True,
        capture_output=True,
        text=True,
    )
    lowered.write_text(instrumented(lowered.read_text()))
    context = ir.context()
    ir.load_dialects(context)
    module = ir.parse_mlir_module(str(lowered), context)
    module.context = context
    llvm.init_targets()
    llvm_context = llvm.context()
    llvm_module = llvm.to_module(module, llvm_context)
    llvm.attach_datalayout(llvm_module, TRIPLE, "x86-64", "")
    llvm.optimize_module(llvm_module, llvm.OPTIMIZE_O3)
    return str(llvm.translate_to_asm(str(llvm_module), TRIPLE, "x86-64", "", [], False, False))


def build(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """A shared object for one request; from the folder if a kernel with the same IR has been compiled before.

    Raises:
        Vanished: the adapter has deleted a loop that waits.
    """
    kernel, signature, constants = kernel_of(request)
    triton_ir, linalg = linalg_of(kernel, signature, constants)
    spins = triton_ir.count("scf.while")
    if linalg.count("scf.while") < spins:
        left = linalg.count("scf.while")
        raise Vanished(f"{spins - left} of {spins} loops that wait have vanished in the adapter")
    entry = re.search(r"func\.func @(\w+)", linalg)
    assert entry is not None
    made_of = linalg.encode() + RUNTIME.read_bytes() + Path(__file__).read_bytes()
    name = hashlib.sha256(made_of).hexdigest()[:16]
    target = folder / f"{name}.so"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another rank may be at the same kernel
        if not target.exists():
            compile_to(target, linalg)
    return {"object": str(target), "entry": entry.group(1), "arguments": list(signature), "spins": spins}


def compile_to(target: Path, linalg: str) -> None:
    """From the adapter's IR to a shared object."""
    source, unfinished = target.with_suffix(".s"), target.with_suffix(".unfinished")
    source.write_text(assembly(upstream(linalg), target.parent, target.stem))
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(unfinished), str(source), str(RUNTIME), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    unfinished.rename(target)


def reason(error: BaseException) -> str:
    """One line that says why a build failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(getattr(error, "error_message", None) or error)
    if isinstance(error, subprocess.CalledProcessError):
        output = error.stderr or b""
        text = output.decode() if isinstance(output, bytes) else output
        text = "\n".join(re.findall(r"error: .*", text)[:1]) or text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    node = getattr(error, "node", None)
    where = f" (line {node.lineno} of its function)" if node is not None else ""
    return f"{type(error).__name__}: {lines[-1] if lines else ''}{where}"[:300]


def main() -> None:
    root, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    sys.path.insert(0, str(root))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    folder.mkdir(parents=True, exist_ok=True)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints isn't a reply
    for line in sys.stdin:
        try:
            request = json.loads(line)
            reply = {"names": list(catalogue())} if "variants" in request else build(folder, request)
        except BaseException as error:
            reply = {"error": reason(error), "vanished": isinstance(error, Vanished)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
