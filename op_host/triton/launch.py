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


@dataclass(frozen=True)
class Target:
    """What kernels run on, as far as they are launched differently.

    Attributes:
        name: "interpreter", "gpu" or "ascend".
        programs: how many run at once, so that one may wait for another; the most that are launched.
        sys: flags are atomics of system scope.
        rounds: a cast from float32 to bfloat16 truncates.
        polls: how often a kernel looks at a code before it returns to the host.
        rows, columns: the most rows and columns that move together.
    """

    name: str
    programs: int
    sys: bool
    rounds: bool
    polls: int
    rows: int = 16
    columns: int = 4096


INTERPRETER = Target("interpreter", programs=1, sys=False, rounds=True, polls=16)


class Launcher(Protocol):
    """Runs kernels; the native lane of the tests has one that runs them compiled for x86."""

    target: Target

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

    def __init__(self, target: Target, device: torch.device) -> None:
        self.target, self._device = target, device
        self.launches: Counter[str] = Counter()
        # The rule of combine: multiply, then add, each rounded.
        self._options: dict[str, Any] = {"enable_fp_fusion": False} if target.name == "gpu" else {}

    def explain(self) -> str:
        target = self.target
        return f"rows moved by Triton kernels on {target.name}, at most {target.programs} programs a launch"

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
    if device.type == "cpu":
        if not _interpreted():
            raise TransportUnavailable(
                "kernels = \"triton\" with CPU tensors needs Triton's interpreter, which wasn't on when triton was imported; "
                'set TRITON_INTERPRET=1 in the environment before Python starts, or use kernels = "cpu"'
            )
        return TritonLauncher(INTERPRETER, device)
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonLauncher(Target("gpu", cores, sys=True, rounds=False, polls=1 << 16), device)
    cores = _vector_cores()
    return TritonLauncher(Target("ascend", cores, sys=False, rounds=False, polls=1 << 16), device)


def _interpreted() -> bool:
    """Whether kernels were made for the interpreter: it depends on the environment when they were."""
    from triton.runtime.interpreter import InterpretedFunction

    record = importlib.import_module("moe_a2a.op_kernel.triton.record")
    return isinstance(record.publish, InterpretedFunction)


def _vector_cores() -> int:
    from triton.runtime import driver

    device = driver.active.get_current_device()
    return int(driver.active.utils.get_device_properties(device)["num_vectorcore"])
