"""Transports: what each one is, what this process could have of them, and the choice, made once for a group and the same on
every rank.

``npu`` is described and not offered: it needs a heap over Ascend's symmetric memory, which isn't there yet.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import heap, tiling

NAMES = ("auto", "cpu-shm", "cuda", "hip", "collective")
DEVICES = ("cuda", "hip")  # whose windows lie in a device's memory


@dataclass(frozen=True)
class Transport:
    """A transport in five fields, since names in this field mislead, with the reason it was taken."""

    name: str
    reason: str
    semantics: str  # one-sided put/get + signal, or collective
    resources: str  # what is mapped or registered
    submitter: str  # who starts a transfer
    engine: str  # what moves the bytes
    link: str

    def describe(self) -> dict[str, str]:
        """The five fields."""
        return {
            "semantics": self.semantics,
            "resources": self.resources,
            "submitter": self.submitter,
            "engine": self.engine,
            "link": self.link,
        }


def cpu_shm(reason: str) -> Transport:
    """Windows in shared memory, between the processes of one host."""
    return Transport(
        "cpu-shm",
        reason,
        semantics="one-sided get + signal",
        resources="memfd windows, mapped by every rank of the host",
        submitter="CPU thread of the caller",
        engine="load/store",
        link="shared memory",
    )


def collective(reason: str) -> Transport:
    """torch.distributed's collectives: anywhere, and the baseline."""
    return Transport(
        "collective",
        reason,
        semantics="collective",
        resources="none",
        submitter="torch.distributed",
        engine="all_gather, all_to_all_single",
        link="the process group's backend",
    )


def cuda(reason: str) -> Transport:
    """Windows in the memory of NVIDIA GPUs of one host, or of one NVLink domain."""
    return _gpu("cuda", reason, "NVLink or PCIe peer access")


def hip(reason: str) -> Transport:
    """Windows in the memory of AMD GPUs of one host."""
    return _gpu("hip", reason, "xGMI or PCIe peer access")


def _gpu(name: str, reason: str, link: str) -> Transport:
    return Transport(
        name,
        reason,
        semantics="one-sided put + signal",
        resources="torch symmetric memory, mapped by every rank's GPU",
        submitter="programs of the kernel on the GPU",
        engine="load/store of the multiprocessors",
        link=link,
    )


def npu(reason: str) -> Transport:
    """Windows in the symmetric memory of Ascend NPUs."""
    return Transport(
        "npu",
        reason,
        semantics="one-sided put + signal",
        resources="symmetric heap of cann/shmem, mapped by every rank's NPU",
        submitter="programs of the kernel on the vector cores",
        engine="MTE",
        link="HCCS",
    )


DESCRIPTIONS: dict[str, Callable[[str], Transport]] = {
    "cpu-shm": cpu_shm,
    "cuda": cuda,
    "hip": hip,
    "npu": npu,
    "collective": collective,
}


def device_of(name: str) -> torch.device:
    """The device in whose memory this rank's window lies, for one of DEVICES: torch's current one."""
    return torch.device("cuda", torch.cuda.current_device())  # ROCm's too


def missing(name: str) -> str:
    """Why this process can't have a transport; "" when nothing here stands against it.

    What peers and links allow is found out when a group is made.
    """
    if name == "cpu-shm":
        return "" if hasattr(os, "memfd_create") else "this Python or system has no memfd_create (Linux 3.17)"
    if name == "collective":
        return "" if dist.is_available() else "this torch was built without torch.distributed"
    if name == "npu":
        return "not implemented yet: op_host/heap.py has no heap over Ascend's symmetric memory"
    if name not in DEVICES:
        raise ValueError(f"there is no transport {name!r}; there are {', '.join(DESCRIPTIONS)}")
    build = torch.version.hip if name == "hip" else torch.version.cuda
    if build is None:
        return f"torch {torch.__version__} isn't a build for {'ROCm' if name == 'hip' else 'CUDA'}"
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    device = device_of(name)
    try:
        tiling.target_of(device)
    except ValueError as unknown:
        return str(unknown)
    if importlib.util.find_spec("triton") is None:
        return "triton isn't installed; install moe_a2a[triton]"
    return heap.symmetric_memory_missing(device)


def probe() -> dict[str, str]:
    """:func:`missing` of every transport there is, by name."""
    return {name: missing(name) for name in DESCRIPTIONS}
