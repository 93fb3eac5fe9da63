"""Executors whose senders write straight into the receivers' staging and raise a flag there."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable

from .. import host
from ..schedule import Move, Share
from ..verdict import MigrationError, Reason, Verdict
from ..weights import ExpertWeights
from .board import Word
from .protocol import GENERATIONS, Executor
from .shared_block import BlockLayout, SharedBlock, SharedBoard


class PushExecutor(Executor):
    """The push protocol, wherever the staging memory is. Processes of one machine.

    A sender writes an expert into its row of the receiver's staging, then stores the wave's ticket into that row's
    flag (release). The receiver waits until all its rows carry the ticket (acquire). The receiver publishes the
    ticket of a wave when it has copied it out; a sender waits for that before it writes into the same buffer again.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        rank: int,
        ranks: int,
        name: str,
        staging_bytes: int | None,
        timeout: float,
        start_timeout: float,
    ) -> None:
        super().__init__(weights, rank=rank, ranks=ranks, staging_bytes=staging_bytes, timeout=timeout)
        if not name or "/" in name:
            raise ValueError(f"name: {name!r}; valid: part of a file's name, not empty")
        reason = host.status()
        if reason != "ready":
            raise ValueError(
                f"executor: {type(self).__name__} needs the host library: {reason}; valid: process_group"
            )
        self.layout = BlockLayout(weights.num_layers, GENERATIONS, self.rows, self._row_bytes_in_block())
        self._native = host.require()
        self._blocks = self._meet(name, time.monotonic() + start_timeout)

    @abstractmethod
    def _row_bytes_in_block(self) -> int:
        """Bytes of a staging row in the shared block; 0 when staging is elsewhere."""

    @abstractmethod
    def _push(self, wave: int, send: Move, spend: Callable[[int], None]) -> Callable[[], bool] | None:
        """Writes one expert into the receiver's staging; None when it is there, else a way to ask whether it is."""

    def _all_pushed(self) -> None:
        """Called when all that a wave sends has been pushed: what was kept back to go together goes now."""

    def _prepare_own(self, block: SharedBlock) -> None:
        """Called before peers are told that this rank's block is usable."""

    def _attach_peers(self, blocks: list[SharedBlock]) -> None:
        """Called when the blocks of all ranks are mapped and prepared."""

    def close(self) -> None:
        for block in self._blocks:
            block.bytes = None
        self._blocks = []
        super().close()

    def _move(self, share: Share, spend: Callable[[int], None]) -> None:
        under_way: list[tuple[Move, Callable[[], bool]]] = []
        for send in share.sends:
            if share.wave >= GENERATIONS:
                self._wait_for_buffer(share, send.peer)
            written = self._push(share.wave, send, spend)
            if written is None:
                self._raise_flag(share.wave, send)
            else:
                under_way.append((send, written))
            self._raise_flags(share.wave, under_way)
            self.beat()
            self.check(share.wave)
        self._all_pushed()
        while under_way:
            self._raise_flags(share.wave, under_way)
            self.beat()
            self.check(share.wave)
            time.sleep(2e-5)
        pending = list(share.receives)

        def missing() -> list[int]:
            pending[:] = [receive for receive in pending if not self._has_landed(share.wave, receive)]
            return sorted({receive.peer for receive in pending})

        if pending:
            self.wait(missing, share.wave, pending[0].layer)

    def _wait_for_buffer(self, share: Share, peer: int) -> None:
        needed = self.ticket(share.wave - GENERATIONS)

        def missing() -> list[int]:
            return [peer] if self.board.ask(Word.CONSUMED, peer) < needed else []

        self.wait(missing, share.wave, share.layers[0])

    def _raise_flags(self, wave: int, under_way: list[tuple[Move, Callable[[], bool]]]) -> None:
        """Raises the flags of those that have been written since; copies end in the order in which they began."""
        while under_way and under_way[0][1]():
            self._raise_flag(wave, under_way.pop(0)[0])

    def _raise_flag(self, wave: int, send: Move) -> None:
        flag = self._blocks[send.peer].address + self.layout.flag(wave % GENERATIONS, send.row)
        self._native.gimbal_migration_store(flag, self.ticket(wave))

    def _has_landed(self, wave: int, receive: Move) -> bool:
        flag = self._blocks[self.rank].address + self.layout.flag(wave % GENERATIONS, receive.row)
        return int(self._native.gimbal_migration_load(flag)) == self.ticket(wave)

    def _meet(self, name: str, deadline: float) -> list[SharedBlock]:
        """Makes this rank's block, maps those of the others, and removes the names once all have done so."""
        try:
            own = SharedBlock(SharedBlock.path_of(name, self.rank), self.layout.total, create=True)
        except FileExistsError:
            raise ValueError(
                f"name: {name!r} is in use on this machine; valid: a name of this group alone"
            ) from None
        try:
            self._prepare_own(own)
            layout = self.weights.signature ^ self.layout.total | 1
            self.board = SharedBoard([own] * self.ranks, self.layout, self.rank)
            self.board.tell(Word.LAYOUT, layout)
            others = [
                None if rank == self.rank else self._open(name, rank, deadline) for rank in range(self.ranks)
            ]
            blocks = [other or own for other in others]
            self.board = SharedBoard(blocks, self.layout, self.rank)
            self._until(Word.LAYOUT, deadline)
            self.board.tell(Word.ATTACHED, 1)
            self._until(Word.ATTACHED, deadline)  # so that every rank sees a difference, not only the fastest
        finally:
            own.unlink()
        for rank in range(self.ranks):
            if self.board.ask(Word.LAYOUT, rank) != layout:
                raise ValueError(
                    f"weights: rank {rank} has other tensors or another staging size than rank {self.rank}; "
                    "valid: the same names, dtypes, shapes and staging_bytes on all ranks"
                )
        self._attach_peers(blocks)
        return blocks

    def _open(self, name: str, rank: int, deadline: float) -> SharedBlock:
        path = SharedBlock.path_of(name, rank)
        while True:
            try:
                if size := path.stat().st_size:
                    return SharedBlock(path, size, create=False)
            except FileNotFoundError:  # not there yet, or removed since by a rank that gave up
                pass
            self._pause(rank, deadline)

    def _until(self, word: Word, deadline: float) -> None:
        while missing := self.behind(word, 1):
            self._pause(missing[0], deadline)

    def _pause(self, rank: int, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise MigrationError(Verdict(False, rank=rank, reason=Reason.TIMEOUT))
        time.sleep(1e-3)
