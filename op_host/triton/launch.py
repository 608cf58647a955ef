"""Launching kernels: Triton is imported here, when a Triton rank is asked for, and every launch goes through a Launcher.

Shape symbols: none.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from ...errors import TransportUnavailable
from ..tiling import TARGETS, Phase, Target, device_cores, row_tile, target_of


@dataclass(frozen=True)
class Machine:
    """What kernels run on, as far as they are launched differently.

    Attributes:
        name: "interpreter", or the line of ``tiling.TARGETS``.
        memories: that line; None for the interpreter, which has as much as it wants.
        programs: how many run at once, so that one may wait for another; the most that are launched.
        gpu: flags are atomics of system scope there, and a division has to be asked to be exact.
        rounds: a cast from float32 to bfloat16 truncates.
        polls: how often a kernel looks at a code before it returns to the host.
    """

    name: str
    memories: Target | None
    programs: int
    gpu: bool
    rounds: bool
    polls: int

    def tile(self, phase: Phase, hidden: int, itemsize: int, rows: int) -> tuple[int, int]:
        """(rows, columns) that move, or are summed, together; at least two rows, as kernels want."""
        if self.memories is None:
            return 16, min(1 << (hidden - 1).bit_length(), 4096)
        high, wide = row_tile(self.memories, phase, hidden=hidden, itemsize=itemsize, rows=rows)
        return (high, wide) if high > 1 else (2, max(1, wide // 2))


INTERPRETER = Machine("interpreter", None, programs=1, gpu=False, rounds=True, polls=16)


def machine_of(device: torch.device) -> Machine:
    """What runs the kernels for tensors of a device. Raises ValueError where nothing is known of it."""
    if device.type == "cpu":
        return INTERPRETER
    name = target_of(device)
    memories = TARGETS[name]
    return Machine(name, memories, device_cores(device), not memories.ascend, rounds=False, polls=1 << 16)


class Launcher(Protocol):
    """Runs kernels; the native lane of the tests has one that runs them compiled for x86."""

    machine: Machine

    def explain(self) -> str:
        """What runs kernels, and how, for people."""
        ...

    def launch(self, kernel: Any, programs: int, args: dict[str, Any], constants: dict[str, Any]) -> None:
        """Starts ``programs`` programs of a kernel on the current stream.

        Args:
            kernel: a ``triton.jit`` function. args, constants: its arguments by name, in its own order.
        """
        ...


class TritonLauncher:
    """Launches with Triton itself: on a device, or interpreted.

    Attributes:
        launches: how often each kernel was launched.
    """

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.machine, self._device = machine, device
        self.launches: Counter[str] = Counter()
        # The rule of combine: multiply, then add, each rounded.
        self._options: dict[str, Any] = {"enable_fp_fusion": False} if machine.gpu else {}
        if machine.memories is not None and machine.memories.warps:
            self._options["num_warps"] = machine.memories.warps

    def explain(self) -> str:
        machine = self.machine
        return f"rows moved by Triton kernels on {machine.name}, at most {machine.programs} programs a launch"

    def launch(self, kernel: Any, programs: int, args: dict[str, Any], constants: dict[str, Any]) -> None:
        with self._on_device():
            kernel[(programs,)](**args, **constants, **self._options)
        self.launches[kernel.__name__] += 1

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        return torch.get_device_module(self._device).device(self._device)  # type: ignore[no-any-return]


def kernels() -> ModuleType:
    """The package of kernels.

    Raises:
        TransportUnavailable: Triton isn't installed.
    """
    try:
        importlib.import_module("moe_a2a.op_kernel.triton.catalogue")  # and so every kernel
        return importlib.import_module("moe_a2a.op_kernel.triton")
    except ImportError as error:
        raise TransportUnavailable(
            f'kernels = "triton" needs the package triton, which doesn\'t import here ({error}); pip install "moe_a2a[triton]"'
        ) from error


def launcher_for(device: torch.device) -> TritonLauncher:
    """How kernels are launched for tensors of ``device``.

    Raises:
        TransportUnavailable: they can't be, with what to do.
    """
    kernels()
    if device.type == "cpu" and not _interpreted():
        raise TransportUnavailable(
            "kernels = \"triton\" with CPU tensors needs Triton's interpreter, which wasn't on when triton was imported; "
            'set TRITON_INTERPRET=1 in the environment before Python starts, or use kernels = "cpu"'
        )
    try:
        return TritonLauncher(machine_of(device), device)
    except ValueError as error:
        raise TransportUnavailable(f'kernels = "triton": {error}') from error


def _interpreted() -> bool:
    """Whether kernels were made for the interpreter: it depends on the environment when they were."""
    from triton.runtime.interpreter import InterpretedFunction

    record = importlib.import_module("moe_a2a.op_kernel.triton.record")
    return isinstance(record.publish, InterpretedFunction)
