"""What ranks tell each other beside the weights: a few numbers each, and one verdict per wave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum


class Word(IntEnum):
    """Numbers that a rank publishes about itself; only it writes them, and they only grow (digests excepted)."""

    LAYOUT = 0  # digest of its tensors' layout and of the size of its staging
    ATTACHED = 1  # 1 once it can reach everybody
    ENTERED = 2  # migrations that it has entered
    PLAN = 3  # digest of the plan that it entered with
    READY = 4  # ticket of the last wave whose experts it has sent and received
    CONSUMED = 5  # ticket of the last wave that it has copied out of staging
    BEAT = 6  # grows while it is alive
    STEP = 7  # number of the forward pass that it is about to begin, or is in


class BoardLost(Exception):
    """The place where the ranks agree is out of reach."""


class Board(ABC):
    """Numbers by rank, and verdicts that are decided once.

    A number that was told is seen by everybody who asks later, together with all memory that the teller wrote
    before. Of several verdicts proposed for a wave, exactly one is decided, and everybody gets that one,
    whoever dies meanwhile: this is what survivors agree by.

    `ask`, `propose` and `decided` raise BoardLost when the place itself is gone. `tell` does not: it is called in
    the middle of a commit, and whoever waits for an answer finds out.
    """

    @abstractmethod
    def tell(self, word: Word, value: int) -> None:
        """Publishes a number of this rank."""

    @abstractmethod
    def ask(self, word: Word, rank: int) -> int:
        """The latest number that a rank has published, 0 before its first."""

    def ask_all(self, word: Word, ranks: int) -> list[int]:
        """`ask` of ranks 0 to `ranks` - 1."""
        return [self.ask(word, rank) for rank in range(ranks)]

    @abstractmethod
    def propose(self, migration: int, wave: int, body: int) -> int:
        """Decides the wave, unless it is decided; returns the decided body, a `Verdict` as an integer."""

    @abstractmethod
    def decided(self, migration: int, wave: int) -> int | None:
        """The decided body, or None."""
