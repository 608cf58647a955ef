"""How the ranks of a group agree on things while it is being made: small objects to all, and steps that may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

T_ = TypeVar("T_")


@dataclass(frozen=True)
class Attempt(Generic[T_]):
    """What a step gave on this rank, and who failed: the same list of sentences on every rank."""

    value: T_ | None
    error: Exception | None
    failures: list[str]

    @property
    def why(self) -> str:
        return "; ".join(self.failures)


@dataclass(frozen=True)
class Meeting:
    """All-gathers small objects between the ranks of a group. Collective: every rank makes the same calls.

    Attributes:
        process_group: None is the default group, or nobody when ``world_size`` is 1.
        operation: what errors begin with.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    world_size: int
    operation: str = "moe_a2a.EPGroup"

    def gather(self, value: T_) -> list[T_]:
        """[R] what each rank passed."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def attempt(self, step: Callable[[], T_]) -> Attempt[T_]:
        """Runs a step that may fail on some ranks only; every rank hears of every failure."""
        value, error = None, None
        try:
            value = step()
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        mine = "" if error is None else f"rank {self.rank}: {type(error).__name__}: {error}"
        return Attempt(value, error, [text for text in self.gather(mine) if text])
