"""How a wave ended, as one word that all ranks read, and the error that is raised when it ended badly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

BITS = 43  # of an encoded verdict
STEP_LIMIT = 1 << (BITS - 1)


class Reason(IntEnum):
    """Why a wave was abandoned."""

    TIMEOUT = 1
    FAILURE = 2
    LINK = 3
    PLAN = 4
    BOARD = 5


EXPLANATIONS = {
    Reason.TIMEOUT: "did not respond in time",
    Reason.FAILURE: "failed while it moved experts",
    Reason.LINK: "could not be reached",
    Reason.PLAN: "has another plan or other weights than rank 0",
    Reason.BOARD: "lost the store by which the ranks agree",
}


@dataclass(frozen=True)
class Verdict:
    """What was agreed about one wave, the same on every rank.

    Attributes:
        commit: whether its layers are to be committed.
        step: if so, at which step.
        rank, layer, reason: if not, who is to blame, what it was needed for, and why.
    """

    commit: bool
    step: int = 0
    rank: int = 0
    layer: int = 0
    reason: Reason = Reason.TIMEOUT

    def encode(self) -> int:
        """An integer of `BITS` bits: bit 0 is `commit`; ranks and layers have 16 bits."""
        if self.commit:
            return 1 | self.step << 1
        return self.reason << 1 | self.rank << 4 | self.layer << 20

    @staticmethod
    def decode(word: int) -> Verdict:
        if word & 1:
            return Verdict(True, step=word >> 1)
        return Verdict(
            False, rank=word >> 4 & 0xFFFF, layer=word >> 20 & 0xFFFF, reason=Reason(word >> 1 & 7)
        )


class MigrationError(RuntimeError):
    """A migration was abandoned; layers that are not committed keep their old placement, on every rank.

    Attributes:
        rank: the rank that failed or vanished.
        layer: a layer that waited for it.
        reason: see `Reason`.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(
            f"migration abandoned at layer {verdict.layer}: rank {verdict.rank} {EXPLANATIONS[verdict.reason]}; "
            "layers that were not committed keep their old placement"
        )
        self.rank = verdict.rank
        self.layer = verdict.layer
        self.reason = verdict.reason
