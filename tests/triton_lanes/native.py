"""Runs kernels that ``lower.py`` has compiled: the programs of a launch are threads of this process, ranks are processes.

The launching side needs no triton; the compiler runs in a Python of its own (``.venv-ascend``), since triton-ascend has the
module name of triton.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ASCEND_PYTHON = Path(os.environ.get("MOE_A2A_ASCEND_PYTHON", ROOT / ".venv-ascend" / "bin" / "python"))

SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class CantBuild(Exception):
    """A kernel has no x86 build; the message says why."""


class Vanished(CantBuild):
    """A kernel has lost a loop that waits on the way to x86."""


@dataclass(frozen=True)
class Weather:
    """What a launch is exposed to.

    Attributes:
        seed: of the delays and of the order in which stores become visible.
        delay_one_in: a load, store or barrier in so many is delayed; 0 none.
        delay_max_us: for up to so many microseconds.
        weak_stores: a store to shared memory becomes visible at the program's next barrier or at any time before, in any order.
    """

    seed: int = 1
    delay_one_in: int = 0
    delay_max_us: int = 0
    weak_stores: bool = False


CALM = Weather()


class Builder:
    """The compiler's process. One at a time; it ends with :meth:`close`."""

    def __init__(self, folder: Path, root: Path = ROOT, python: Path = ASCEND_PYTHON) -> None:
        if not python.exists():
            raise FileNotFoundError(
                f"{python}: the environment of triton-ascend isn't there; run: make .venv-ascend"
            )
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
        self._process = subprocess.Popen(
            [str(python), str(HERE / "lower.py"), str(root), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def build(
        self, module: str, kernel: str, signature: Mapping[str, str], constants: Mapping[str, Any]
    ) -> NativeKernel:
        """Compiles ``kernel`` of ``module``, or takes it from the folder.

        Raises:
            CantBuild: with the compiler's first complaint.
        """
        request = {"module": module, "kernel": kernel, "signature": signature, "constants": constants}
        reply = self._ask(request, f"{module}.{kernel}")
        ordered = {name: signature[name] for name in reply["arguments"]}
        return NativeKernel(Path(reply["object"]), reply["entry"], ordered, reply["spins"])

    def variants(self) -> list[str]:
        """Names of the catalogue's variants for x86."""
        return list(self._ask({"variants": "x86"}, "catalogue")["names"])

    def spins(self, variant: str) -> int:
        """Compiles a variant of the catalogue and says how many loops it has that wait.

        Raises:
            CantBuild: with the compiler's first complaint.
        """
        return int(self._ask({"variant": variant}, variant)["spins"])

    def _ask(self, request: Mapping[str, Any], what: str) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise CantBuild(f"{what}: the compiler's process ended ({self._process.poll()})")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise (Vanished if reply["vanished"] else CantBuild)(f"{what}: {reply['error']}")
        return reply

    def close(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        self._process.wait(timeout=30)

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Counters:
    """Of one launch: stores to shared memory that waited in a queue, and how often one overtook an older one."""

    deferred: int
    overtaken: int


class NativeKernel:
    """A compiled kernel. Calling it runs one launch and returns when all of its programs have.

    Args:
        signature: argument -> type, as triton has it, in the kernel's order.
        spins: loops in the Triton IR that wait for a condition.
    """

    def __init__(self, path: Path, entry: str, signature: dict[str, str], spins: int) -> None:
        library = ctypes.CDLL(str(path))
        self._library, self._entry = library, getattr(library, entry)
        self._entry.restype = None
        library.lowered_begin.argtypes = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint32]
        self.signature, self.spins = signature, spins
        self._pool: ThreadPoolExecutor | None = None
        self._threads = 0

    def share(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Says which memory, as (address, bytes), other programs and ranks see; weak stores are about that."""
        begins = (ctypes.c_int64 * len(ranges))(*(begin for begin, _ in ranges))
        sizes = (ctypes.c_int64 * len(ranges))(*(size for _, size in ranges))
        self._library.lowered_shared(begins, sizes, ctypes.c_int64(len(ranges)))

    def __call__(self, programs: int, arguments: Mapping[str, Any], weather: Weather = CALM) -> Counters:
        """Runs ``programs`` programs side by side.

        Args:
            arguments: by name, more than the kernel takes if need be; a tensor (contiguous, on the CPU) where the signature
                has a pointer, else a number.
        """
        fixed: list[Any] = []
        scratch = torch.zeros(4096, dtype=torch.uint8)
        for tensor in (scratch, scratch):  # the lock and the workspace that the adapter gives every kernel
            fixed += self._memref(tensor)
        for name, kind in self.signature.items():
            value = arguments[name]
            fixed += self._memref(value) if kind.startswith("*") else [SCALARS[kind](value)]

        def program(index: int) -> Counters:
            seed = weather.seed * 1_000_003 + index
            self._library.lowered_begin(
                seed % 2**64, weather.weak_stores, weather.delay_one_in, weather.delay_max_us
            )
            self._entry(*fixed, *(ctypes.c_int32(v) for v in (programs, 1, 1, index, 0, 0)))
            counters = (ctypes.c_int64 * 2)()
            self._library.lowered_end(counters)
            return Counters(*counters)

        if programs == 1:
            return program(0)
        if self._threads < programs:  # each program needs a thread: they wait for each other
            self._pool, self._threads = ThreadPoolExecutor(programs), programs
        assert self._pool is not None
        done = list(self._pool.map(program, range(programs)))
        return Counters(sum(c.deferred for c in done), sum(c.overtaken for c in done))

    @staticmethod
    def _memref(tensor: torch.Tensor) -> list[Any]:
        address = ctypes.c_void_p(tensor.data_ptr())
        return [address, address, ctypes.c_int64(0), ctypes.c_int64(tensor.numel()), ctypes.c_int64(1)]
