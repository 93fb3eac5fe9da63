"""The part of every executor that does not depend on how bytes travel: agreement, timeouts, staging generations.

A wave passes four points. Staged: each rank has sent what it owes and has received what it gets, into a staging
buffer; nothing that a forward pass reads has changed. Ready: it says so. Decided: once all ranks are ready, one
of them proposes to commit; if one falls silent, another proposes to abandon; the board decides once. Committed:
each rank copies from staging to its slots. Two staging buffers alternate, so the next wave can be staged
before this one is committed; the one after waits until the buffer is free.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from ..schedule import Share
from ..verdict import EXPLANATIONS, STEP_LIMIT, MigrationError, Reason, Verdict
from ..weights import ExpertWeights, is_whole
from .board import Board, BoardLost, Word

logger = logging.getLogger("gimbal_kernels.migration")

GENERATIONS = 2
WAVES = 1 << 20  # more than a migration can have


class PeerLost(Exception):
    """Raised by a transport: a rank is out of reach."""

    def __init__(self, rank: int, layer: int, reason: Reason) -> None:
        super().__init__(rank, layer, reason)
        self.rank, self.layer, self.reason = rank, layer, reason


class Executor(ABC):
    """Carries experts between the ranks of a group. One per rank, used by one migration at a time.

    Attributes:
        rank, ranks: which of how many.
        rows: experts that one generation of staging holds; a plan that needs more is split into waves.
        staging_bytes: bytes of staging in all, allocated when the executor is made and never again.
        timeout: seconds of silence after which a rank is given up.
    """

    board: Board
    # Whether a migration that was abandoned leaves the transport fit for another one.
    reusable = True

    def __init__(
        self, weights: ExpertWeights, *, rank: int, ranks: int, staging_bytes: int | None, timeout: float
    ) -> None:
        if not 0 <= rank < ranks <= 1 << 16:
            raise ValueError(f"rank: {rank} of {ranks}; valid: 0 to ranks - 1, at most 65536 ranks")
        if not timeout > 0:
            raise ValueError(f"timeout: {timeout}; valid: seconds > 0")
        row_bytes = weights.row_bytes
        if staging_bytes is None:
            staging_bytes = GENERATIONS * weights.slots_per_rank * row_bytes
        if not is_whole(staging_bytes) or staging_bytes < GENERATIONS * row_bytes:
            raise ValueError(
                f"staging_bytes: {staging_bytes}; valid: an integer, at least {GENERATIONS * row_bytes}, "
                f"{GENERATIONS} buffers of one expert of {row_bytes} bytes"
            )
        self.weights = weights
        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self.row_bytes = row_bytes
        self.rows = staging_bytes // (GENERATIONS * row_bytes)
        self.staging_bytes = GENERATIONS * self.rows * row_bytes
        self.migration = 0
        self._broken: str | None = None
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        logger.info(
            "rank %d: %d bytes of migration staging (%d buffers of %d experts of %d bytes)",
            *(rank, self.staging_bytes, GENERATIONS, self.rows, row_bytes),
        )

    @property
    def health(self) -> str:
        """ "ready", or why no further migration is possible with this executor."""
        return self._broken or "ready"

    @property
    def silence(self) -> float:
        """Seconds without a sign of life after which a rank is given up."""
        return self.timeout

    @abstractmethod
    def staging(self, wave: int) -> Any:
        """This rank's staging of a wave: uint8 [rows, row_bytes]."""

    @abstractmethod
    def _move(self, share: Share, spend: Callable[[int], None]) -> None:
        """Sends and receives a wave's experts; returns when both are done.

        Calls `spend` with the bytes of a piece before sending it, and `check` often enough to stop soon after
        the wave was abandoned. Raises PeerLost for a rank that is out of reach.
        """

    def give_up(self, reason: str) -> None:
        """Marks the executor as broken."""
        self._broken = reason

    def close(self) -> None:
        """Gives the staging back; the executor cannot be used any more."""
        self._broken = "closed"

    def enter(self, digest: int) -> None:
        """Meets all ranks. No bytes of an earlier migration are under way after that.

        Args:
            digest: of the plan, to be the same everywhere.

        Raises:
            MigrationError: a rank did not come, or came with another plan.
            RuntimeError: this executor is broken, see `health`.
        """
        if self._broken:
            raise RuntimeError(f"this executor cannot be used any more: {self._broken}; make a new one")
        self.migration += 1
        with self._lock:
            self._seen.clear()
        self.board.tell(Word.PLAN, digest)
        self.board.tell(Word.ENTERED, self.migration)
        with self._reaching_board(layer=0):
            self.wait(lambda: self.behind(Word.ENTERED, self.migration), wave=0, layer=0)
            for rank in range(self.ranks):
                if self.board.ask(Word.PLAN, rank) != self.board.ask(Word.PLAN, 0):
                    raise self.error(self.abandon(0, rank, 0, Reason.PLAN))

    def stage(self, share: Share, spend: Callable[[int], None]) -> None:
        """Moves a wave's experts into staging and says that this rank is ready.

        Raises:
            MigrationError: the wave was abandoned, by this rank or by another.
        """
        with self._reaching_board(share.layers[0]):
            try:
                self._wait_for_own_buffer(share)
                self._move(share, spend)
            except PeerLost as lost:
                raise self.error(self.abandon(share.wave, lost.rank, lost.layer, lost.reason)) from lost
            except (MigrationError, BoardLost):
                raise
            except Exception as error:
                verdict = self.abandon(share.wave, self.rank, share.layers[0], Reason.FAILURE)
                raise self.error(verdict) from error
        self.board.tell(Word.READY, self.ticket(share.wave))

    def poll(self, share: Share, step: int) -> Verdict | None:
        """The wave's verdict, if there is one: proposes to commit at `step` once all ranks are ready, and to
        abandon once one that is not has fallen silent.

        Raises:
            MigrationError: the board is lost. What the others know of this wave is then unknown, too.
        """
        with self._reaching_board(share.layers[0]):
            word = self.board.decided(self.migration, share.wave)
            if word is not None:
                return Verdict.decode(word)
            missing = self.behind(Word.READY, self.ticket(share.wave))
            if not missing:
                return self._propose(share.wave, Verdict(True, step=step % STEP_LIMIT))
            silent = self._silent(missing)
            return self.abandon(share.wave, silent[0], share.layers[0], Reason.TIMEOUT) if silent else None

    def consumed(self, wave: int) -> None:
        """To be called when a wave was copied out of staging: its buffer may be filled again."""
        self.board.tell(Word.CONSUMED, self.ticket(wave))

    def abandon(self, wave: int, rank: int, layer: int, reason: Reason) -> Verdict:
        """Proposes to abandon a wave and those after it; the verdict may be another rank's, even to commit."""
        with self._reaching_board(layer):
            return self._propose(wave, Verdict(False, rank=rank, layer=layer, reason=reason))

    def error(self, verdict: Verdict) -> MigrationError:
        """The error for a wave that was abandoned."""
        if not self.reusable:
            self._broken = f"rank {verdict.rank} {EXPLANATIONS[verdict.reason]}"
        return MigrationError(verdict)

    def check(self, wave: int) -> None:
        """MigrationError if the wave was abandoned, or the one before, which may not be settled yet."""
        for one in range(max(0, wave - GENERATIONS + 1), wave + 1):
            word = self.board.decided(self.migration, one)
            if word is not None and not word & 1:
                raise self.error(Verdict.decode(word))

    def wait(self, missing: Callable[[], list[int]], wave: int, layer: int) -> None:
        """Until no rank is missing; MigrationError when one of them falls silent or the wave is abandoned."""
        pause = 0.0
        while ranks := missing():
            self.check(wave)
            silent = self._silent(ranks)
            if silent:
                raise self.error(self.abandon(wave, silent[0], layer, Reason.TIMEOUT))
            self.beat()
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)

    def beat(self) -> None:
        """A sign of life."""
        self._beats += 1
        self.board.tell(Word.BEAT, self._beats)

    def ticket(self, wave: int) -> int:
        """A number that grows from wave to wave and from migration to migration."""
        return self.migration * WAVES + wave + 1

    def behind(self, word: Word, value: int) -> list[int]:
        """Ranks whose number is below a value."""
        return [rank for rank, told in enumerate(self.board.ask_all(word, self.ranks)) if told < value]

    @contextlib.contextmanager
    def _reaching_board(self, layer: int) -> Iterator[None]:
        """MigrationError in this rank's name when the board is lost."""
        try:
            yield
        except BoardLost as lost:
            raise self.error(Verdict(False, rank=self.rank, layer=layer, reason=Reason.BOARD)) from lost

    def _wait_for_own_buffer(self, share: Share) -> None:
        needed = self.ticket(share.wave - GENERATIONS)

        def missing() -> list[int]:
            return [self.rank] if self.board.ask(Word.CONSUMED, self.rank) < needed else []

        if share.wave >= GENERATIONS:
            self.wait(missing, share.wave, share.layers[0])

    def _propose(self, wave: int, verdict: Verdict) -> Verdict:
        return Verdict.decode(self.board.propose(self.migration, wave, verdict.encode()))

    def _silent(self, ranks: list[int]) -> list[int]:
        """Those of the ranks whose beat has not changed for as long as a rank may be silent."""
        now = time.monotonic()
        lost = []
        with self._lock:
            for rank in ranks:
                beat = self.board.ask(Word.BEAT, rank)
                known = self._seen.get(rank)
                if known is None or known[0] != beat:
                    self._seen[rank] = (beat, now)
                elif rank != self.rank and now - known[1] > self.silence:
                    lost.append(rank)
        return lost
