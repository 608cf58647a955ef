"""What the demonstration's parent and ranks exchange: settings, plan of batches, reports. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PHASES = ("route", "dispatch", "experts", "combine")
SPEED_SIDES = ("moe_a2a", "all_to_all")
SPEED_REPEATS = 2
# Ways to spoil a run on purpose, to show that the checks and the watchdog can fail.
FAULTS = (
    "drop-row",
    "swap-rows",
    "stale-row",
    "wrong-expert",
    "baseline-row",
    "skip-batch",
    "crash",
    "stall",
)


class Span(NamedTuple):
    """Bytes [start, start + length) of the text: the tokens of one rank in one batch."""

    start: int
    length: int


@dataclass(frozen=True)
class Settings:
    """What the user asked for; every rank gets the same."""

    ranks: int
    tokens: int
    experts: int
    top_k: int
    hidden: int
    batches: int
    seed: int
    dtype: str
    transport: str
    timeout: float
    text_path: str
    inject_fault: str | None

    @property
    def expert_width(self) -> int:
        """I: columns between the two projections of an expert."""
        return max(1, self.hidden // 2)

    @property
    def weight_bytes(self) -> int:
        """Memory of all ranks' weights: every rank has those of all experts, to check its tokens end to end."""
        return self.ranks * self.experts * 3 * self.hidden * self.expert_width * 4


@dataclass(frozen=True)
class Failure:
    """One check that didn't hold: what was compared, where, and how many of its items were wrong."""

    what: str
    rank: int
    batch: int
    wrong: int
    of: int
    detail: str


@dataclass
class RankReport:
    """What a rank sends back at the end."""

    rank: int
    local_experts: tuple[int, int]
    transport: str
    transport_reason: str
    transport_fields: dict[str, str]
    sent_E: npt.NDArray[np.int64]
    """[E] rows this rank sent to each expert, from the send-count matrices that dispatch returned."""
    bytes_E256: npt.NDArray[np.int64]
    """[E, 256] which byte stood at each token that was sent to an expert."""
    rows_checked: int = 0
    tokens_checked: int = 0
    tokens_end_to_end: int = 0
    timed_rows_checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPEED_SIDES, 0))
    timed_tokens_checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPEED_SIDES, 0))
    tokens_seen: int = 0
    tokens_distinct: int = 0
    tolerance_used: float = 0.0
    phase_spans: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {p: [] for p in PHASES})
    """Phase -> (start, end) of each batch, nanoseconds of the host's monotonic clock."""
    speed_spans: dict[str, list[tuple[int, int]]] = field(
        default_factory=lambda: {s: [] for s in SPEED_SIDES}
    )
    """Side -> (start, end) of each timed dispatch + combine, same clock."""
    failures: list[Failure] = field(default_factory=list)


def plan_batches(total: int, ranks: int, tokens: int, batches: int, seed: int) -> list[list[Span]]:
    """Cut a text into batches of uneven spans, one span per rank and batch.

    Args:
        total: length of the text in bytes.
        ranks: R.
        tokens: the most tokens a rank takes in one batch.
        batches: how many batches at most; 0 reads the whole text.
        seed: fixes the lengths.

    Returns:
        ``plan[batch][rank]``. The spans follow each other without a gap. Lengths differ between ranks and
        batches, the last batch is short, and with several ranks every fourth leaves one of them with none.
    """
    rng = np.random.default_rng(seed)
    plan: list[list[Span]] = []
    position = 0
    while position < total and (batches == 0 or len(plan) < batches):
        lengths = rng.integers(tokens // 2 + 1, tokens + 1, size=ranks)
        if ranks > 1 and len(plan) % 4 == 1:
            lengths[int(rng.integers(ranks))] = 0
        if batches and len(plan) == batches - 1:
            lengths = (lengths + 2) // 3
        remaining = total - position
        if int(lengths.sum()) > remaining:
            lengths = np.array([remaining // ranks + (r < remaining % ranks) for r in range(ranks)])
        spans = []
        for length in lengths.tolist():
            spans.append(Span(position, length))
            position += length
        plan.append(spans)
    return plan
