"""Experts pushed through memory that the processes of one machine share: the CPU twin of `peer_memory`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..schedule import Move
from ..weights import ExpertWeights
from .protocol import GENERATIONS
from .push import PushExecutor


class SharedMemoryExecutor(PushExecutor):
    """Staging in shared memory; the sender's thread copies into it.

    Args:
        weights: this rank's tensors, on the CPU, laid out the same on every rank.
        rank, ranks: which of how many; all are processes of one machine.
        name: of this group, used by nobody else on the machine at that time; the same on all ranks.
        staging_bytes: both staging buffers together. By default enough for whole layers.
        timeout: seconds of silence after which a rank is given up. Longer than any `on_commit` takes.
        start_timeout: seconds to wait for the other ranks at the start.

    Raises:
        ValueError: tensors that are not on the CPU, a name in use, ranks with different tensors or staging,
            too little staging, no host library.
        MigrationError: a rank did not start in time.
        OSError: no room in shared memory.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        rank: int,
        ranks: int,
        name: str,
        staging_bytes: int | None = None,
        timeout: float = 30.0,
        start_timeout: float = 300.0,
    ) -> None:
        if weights.device.type != "cpu":
            raise ValueError(f"weights: on {weights.device}; valid: cpu")
        super().__init__(
            weights,
            rank=rank,
            ranks=ranks,
            name=name,
            staging_bytes=staging_bytes,
            timeout=timeout,
            start_timeout=start_timeout,
        )

    def staging(self, wave: int) -> Any:
        first = self.layout.row(wave % GENERATIONS, 0)
        size = self.rows * self.row_bytes
        return self._blocks[self.rank].bytes[first : first + size].view(self.rows, self.row_bytes)

    def _row_bytes_in_block(self) -> int:
        return self.row_bytes

    def _push(self, wave: int, send: Move, spend: Callable[[int], None]) -> None:
        row = self._blocks[send.peer].address + self.layout.row(wave % GENERATIONS, send.row)
        tensors, offsets = self.weights.rows(send.layer), self.weights.offsets(send.layer)
        piece: Any = np.empty(3, dtype=np.uint64)
        for rows, offset in zip(tensors, offsets, strict=True):
            size = int(rows.shape[1])
            spend(size)
            piece[:] = rows.data_ptr() + send.slot * size, row + offset, size
            self._native.gimbal_migration_copy(piece.ctypes.data, 1)
