"""Experts sent two-sided over torch.distributed, round by round; ranks agree through a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..schedule import Move, Share
from ..verdict import MigrationError, Reason, Verdict
from ..weights import ExpertWeights
from .board import Word
from .protocol import GENERATIONS, Executor, PeerLost
from .store_board import StoreBoard

# Rounds whose sends and receives are posted together: enough to keep a link busy while the oldest is awaited.
ROUNDS_IN_FLIGHT = 16


class ProcessGroupExecutor(Executor):
    """isend and irecv of a process group, a few rounds at a time; on gloo, NCCL or any other backend.

    The ranks agree through `store`, which must outlive each of them for the survivors to agree after a rank died:
    torchrun's does, and so does a FileStore; a TCPStore that rank 0 serves does for every rank but rank 0. A store
    that is gone or does not answer within `timeout` ends the migration with an error on every rank; a wave that
    was being agreed at that moment may have been committed on some of them.
    After an abandoned migration the group's connections are in an unknown state: make a new group and executor.

    Args:
        weights: this rank's tensors, laid out the same on every rank.
        group: of the ranks, used by nothing else while experts move.
        store: a torch.distributed store under a prefix of its own.
        staging_bytes: both staging buffers together. By default enough for whole layers.
        timeout: seconds after which an operation, or a silent rank, is given up.
        start_timeout: seconds to wait for the other ranks at the start.

    Raises:
        ValueError: ranks with different tensors or staging, too little staging.
        MigrationError: a rank did not start in time, or the store does not answer.
    """

    reusable = False

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        group: Any,
        store: Any,
        staging_bytes: int | None = None,
        timeout: float = 30.0,
        start_timeout: float = 300.0,
    ) -> None:
        super().__init__(
            weights,
            rank=dist.get_rank(group),
            ranks=dist.get_world_size(group),
            staging_bytes=staging_bytes,
            timeout=timeout,
        )
        self._group = group
        self._store_board = StoreBoard(store, self.rank, timeout=timeout)
        self.board = self._store_board
        self._told = 0.0
        self._kept = 0
        # Written now, so that a migration touches no page for the first time.
        shape = (GENERATIONS, self.rows, self.row_bytes)
        self._staging = torch.zeros(shape, dtype=torch.uint8, device=weights.device)
        with self._reaching_board(layer=0):
            self._meet(time.monotonic() + start_timeout)

    @property
    def silence(self) -> float:
        return 2 * self.timeout  # a rank that waits for another one is silent for one timeout

    def staging(self, wave: int) -> Any:
        return self._staging[wave % GENERATIONS]

    def enter(self, digest: int) -> None:
        super().enter(digest)
        if self.rank == 0 and self.migration > 1:
            self._store_board.forget(self.migration - 1, self._kept)
        self._kept = self.weights.num_layers

    def beat(self) -> None:
        now = time.monotonic()
        if now - self._told > self.timeout / 8:  # a store is far away: no more often than needed
            self._told = now
            super().beat()

    def close(self) -> None:
        self._store_board.close()
        super().close()

    def _move(self, share: Share, spend: Callable[[int], None]) -> None:
        sends = {send.round: send for send in share.sends}
        receives = {receive.round: receive for receive in share.receives}
        posted: list[list[tuple[Any, Move]]] = []
        for turn in sorted({*sends, *receives}):
            self.beat()
            works = []
            if turn in receives:
                works += self._receive(share.wave, receives[turn])
            if turn in sends:
                works += self._send(sends[turn], spend)
            posted.append(works)
            if len(posted) == ROUNDS_IN_FLIGHT:
                self._finish(share.wave, posted.pop(0))
        for works in posted:
            self._finish(share.wave, works)

    def _receive(self, wave: int, receive: Move) -> list[tuple[Any, Move]]:
        row = self.staging(wave)[receive.row]
        works = []
        for rows, offset in zip(
            self.weights.rows(receive.layer), self.weights.offsets(receive.layer), strict=True
        ):
            piece = row[offset : offset + rows.shape[1]]
            works.append((self._post(dist.irecv, piece, receive, "group_src"), receive))
        return works

    def _send(self, send: Move, spend: Callable[[int], None]) -> list[tuple[Any, Move]]:
        works = []
        for rows in self.weights.rows(send.layer):
            spend(int(rows.shape[1]))
            works.append((self._post(dist.isend, rows[send.slot], send, "group_dst"), send))
        return works

    def _post(self, operation: Any, piece: Any, move: Move, peer: str) -> Any:
        try:
            return operation(piece, group=self._group, **{peer: move.peer})
        except RuntimeError as error:
            raise PeerLost(move.peer, move.layer, Reason.LINK) from error

    def _finish(self, wave: int, works: list[tuple[Any, Move]]) -> None:
        for work, move in works:
            start = time.monotonic()
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as error:
                # A rank that timed out on somebody closes its connections: the one to blame is who it names.
                if time.monotonic() - start < self.timeout:
                    self._listen(wave)
                raise PeerLost(move.peer, move.layer, Reason.LINK) from error

    def _listen(self, wave: int) -> None:
        """Waits a little for another rank's verdict; MigrationError if there is one."""
        end = time.monotonic() + self.timeout / 4
        while time.monotonic() < end:
            self.check(wave)
            time.sleep(self.timeout / 50)

    def _meet(self, deadline: float) -> None:
        layout = self.weights.signature ^ self.rows | 1
        self.board.tell(Word.LAYOUT, layout)
        while missing := self.behind(Word.LAYOUT, 1):
            if time.monotonic() > deadline:
                raise MigrationError(Verdict(False, rank=missing[0], reason=Reason.TIMEOUT))
            time.sleep(1e-2)
        for rank in range(self.ranks):
            if self.board.ask(Word.LAYOUT, rank) != layout:
                raise ValueError(
                    f"weights: rank {rank} has other tensors or another staging size than rank {self.rank}; "
                    "valid: the same names, dtypes, shapes and staging_bytes on all ranks"
                )
