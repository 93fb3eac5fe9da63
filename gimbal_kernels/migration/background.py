"""A migration that runs beside serving: staged by a thread, committed between forward passes."""

from __future__ import annotations

import contextlib
import threading

from .executors.board import Word
from .executors.protocol import Executor
from .migrate import OnCommit, abandon_from, commit, prepare
from .plan import MigrationPlan
from .schedule import digest
from .verdict import MigrationError, Reason, Verdict
from .weights import ExpertWeights


class _Stopped(BaseException):
    """The migration was stopped while the worker waited."""


class BackgroundMigration:
    """Carries a plan out layer by layer while forward passes go on; all ranks make one at the same step.

    A thread stages one layer after the other, no faster than the budget allows. `step`, called by every rank
    before every forward pass, commits at most one layer, at the step that was agreed for it: all ranks are ready
    when the first to notice proposes a step `lead` ahead. With lead 1 this is safe where a forward pass cannot end
    on one rank before it has begun on all (expert-parallel layers exchange tokens, so it cannot).

    Args:
        plan, weights, executor, on_commit: as for `migrate`.
        bytes_per_step: at most so many bytes are sent per step. A tensor of one expert that is larger
            waits until enough steps have gone by.
        lead: steps from the agreement to the commit, at least by how much steps of two ranks can differ.

    Raises:
        ValueError: as `migrate`, and a budget or lead below 1.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        weights: ExpertWeights,
        executor: Executor,
        *,
        bytes_per_step: int,
        on_commit: OnCommit | None = None,
        lead: int = 1,
    ) -> None:
        for name, value in (("bytes_per_step", bytes_per_step), ("lead", lead)):
            if value < 1:
                raise ValueError(f"{name}: {value}; valid: at least 1")
        self._plan, self._weights, self._executor, self._on_commit = plan, weights, executor, on_commit
        self._shares = prepare(plan, weights, executor, max_layers=1)
        self._budget, self._lead = bytes_per_step, lead
        self._committed = 0  # shares
        self._staging = 0  # the share that the worker is at
        self._credit = 0
        self._wanted = 0
        self._entered = threading.Event()
        self._changed = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="gimbal-migration", daemon=True)
        if self._shares:
            self._worker.start()

    @property
    def done(self) -> bool:
        """Whether all layers are committed."""
        return self._committed == len(self._shares)

    @property
    def health(self) -> str:
        """ "done", "running", or what went wrong."""
        if self._failure is not None:
            return f"failed: {self._failure}"
        return "done" if self.done else "running"

    def step(self, number: int) -> tuple[int, ...]:
        """Commits the layer that is due; between two forward passes.

        Args:
            number: of the forward pass that follows, the same on all ranks, growing by one.

        Returns:
            The layers that were committed: their slots and maps are new from this step on, on every rank.

        Raises:
            MigrationError: the migration was abandoned; what is not committed keeps its old placement.
            Exception: what `on_commit` raised. The layers after this one are abandoned, but the next may be agreed
                already: `step` is to be called on until it raises MigrationError or all is done.
            RuntimeError: the ranks are not in step, or the executor cannot be used any more.
        """
        if self.done:
            return ()
        # Before anything else: a number of an earlier migration must not be taken for this one's.
        self._executor.board.tell(Word.STEP, number)
        with self._changed:
            self._credit = min(self._credit + self._budget, max(self._budget, self._wanted))
            self._changed.notify_all()
        if not self._entered.is_set() and self._failure is None:
            return ()
        try:
            committed = self._commit_due(number)
        except MigrationError as error:
            self._failure = error
            self._stop()
            raise
        if self.done:
            self._stop()
        else:
            with contextlib.suppress(MigrationError):  # the next step raises it
                self._verdict(number)  # proposes the next layer, so that one can be committed at every step
        return committed

    def close(self) -> None:
        """Abandons what is not agreed, on all ranks; nothing happens if all layers are committed.

        A layer may be agreed already: `step` is to be called on until it raises.
        """
        if not self.done and not self._stopping:
            try:
                if self._entered.is_set():
                    abandon_from(self._executor, self._shares, self._committed)
            finally:
                self._stop()

    def _commit_due(self, number: int) -> tuple[int, ...]:
        verdict = self._verdict(number)
        if verdict is None:
            return ()
        if not verdict.commit:
            abandon_from(self._executor, self._shares, self._committed + 1, verdict)
            raise self._executor.error(verdict) from self._failure
        if verdict.step > number:
            return ()
        share = self._shares[self._committed]
        self._committed += 1
        try:
            commit(share, self._plan, self._weights, self._executor, self._on_commit)
            self._check_step(number, verdict.step, share.layers[0])
        except Exception as error:
            abandon_from(self._executor, self._shares, self._committed)
            self._stop()
            self._failure = error
            raise
        return share.layers

    def _check_step(self, number: int, agreed: int, layer: int) -> None:
        """RuntimeError if this rank is late, or another one so far ahead that it cannot have waited for this."""
        ahead = [
            rank
            for rank in range(self._executor.ranks)
            if self._executor.board.ask(Word.STEP, rank) >= number + self._lead
        ]
        if agreed < number or ahead:
            raise RuntimeError(
                f"layer {layer} was to be committed at step {agreed}, this is step {number} and ranks {ahead} are "
                f"ahead: the ranks are further apart than lead = {self._lead}, or count differently"
            )

    def _verdict(self, number: int) -> Verdict | None:
        share = self._shares[self._committed]
        if not self._entered.is_set():  # the worker did not get so far as to meet the others
            if isinstance(self._failure, MigrationError):
                raise self._failure
            raise RuntimeError(f"migration did not start: {self._failure}") from self._failure
        verdict = self._executor.poll(share, number + self._lead)
        if verdict is None and not self._worker.is_alive() and self._staging == share.wave:
            # Without a word: nobody else will say it.
            return self._executor.abandon(share.wave, self._executor.rank, share.layers[0], Reason.FAILURE)
        return verdict

    def _work(self) -> None:
        try:
            self._executor.enter(digest(self._plan))
            self._entered.set()
            for share in self._shares:
                self._executor.stage(share, self._spend)
                self._staging += 1
            with self._changed:
                while not self._stopping:  # others may still wait for this rank's commits
                    self._executor.beat()
                    self._changed.wait(self._pulse)
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = error

    @property
    def _pulse(self) -> float:
        """Seconds between two signs of life while the worker waits."""
        return min(0.02, self._executor.timeout / 10)

    def _spend(self, size: int) -> None:
        """Waits until the budget allows `size` bytes."""
        with self._changed:
            self._wanted = size
            while self._credit < size:
                if self._stopping:
                    raise _Stopped
                self._executor.check(self._staging)
                self._executor.beat()
                self._changed.wait(self._pulse)
            self._credit -= size

    def _stop(self) -> None:
        """Ends the worker: while it lives it could still write to peers, and no other migration may begin."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._executor.reusable:  # otherwise it may wait for a peer, and nothing comes after it anyway
            self._worker.join(self._executor.timeout)
        if self._executor.reusable and self._worker.is_alive():
            self._executor.give_up("a staging thread did not stop")
