"""The last decisions of engine selection, for a metrics or debug endpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One decision.

    Attributes:
        time: of the decision, seconds on the client's monotonic clock; None for a pinned request, for which no
            clock is read.
        engine, reason, seq: as in `Decision`.
        tokens: size of the request, prompt tokens that no prefix cache holds.
        candidates: engines that were compared, and
        scores: theirs; both empty where the decision needed none.
    """

    time: float | None
    engine: int
    reason: str
    seq: int
    tokens: int
    candidates: Sequence[int] = ()
    scores: Sequence[float] = ()

    def as_dict(self, first: int = 0) -> dict[str, Any]:
        """Plain JSON types; scores by engine. `first` is added to the engines' numbers."""
        return {
            "time": self.time,
            "engine": first + self.engine,
            "reason": self.reason,
            "seq": self.seq,
            "tokens": self.tokens,
            "scores": {str(first + e): s for e, s in zip(self.candidates, self.scores, strict=True)},
        }


class DecisionLog:
    """A ring buffer of the last `size` decisions, and how many there were of each reason in all.

    Args:
        size: decisions kept, >= 0.

    Raises:
        ValueError: a negative `size`.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size: {size}; valid: an integer >= 0")
        self._ring: deque[LoggedDecision] = deque(maxlen=size)
        self.counts: dict[str, int] = {}

    def add(self, decision: LoggedDecision) -> None:
        """Keep a decision; the oldest one goes when the ring is full."""
        self._ring.append(decision)
        self.counts[decision.reason] = self.counts.get(decision.reason, 0) + 1

    def recent(self, count: int | None = None) -> list[LoggedDecision]:
        """The last `count` decisions (None: all that are kept), newest last."""
        kept = list(self._ring)
        return kept if count is None else kept[max(0, len(kept) - count) :]

    def __len__(self) -> int:
        return len(self._ring)
