"""Transports: what each one is, and the choice, made once for a group and the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("auto", "cpu-shm", "collective")


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
