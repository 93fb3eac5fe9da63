"""Small tensors of moved experts, many of them by one launch of the copy kernel (csrc/migration/transfer.cuh).

The copy engine takes a command per tensor, however small. Scales and zero points of an expert, and of the other
experts of a wave, are listed in a table of descriptors instead, one row per expert, and one launch copies them all.

`CopyTable` fills the table and needs no GPU: tests run the kernel over its bytes on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ... import _device_library
from ..weights import ExpertWeights

FOLDER, KERNEL = "migration", "gimbal_transfer"
# Up to here a tensor is small: the copy engine's fixed cost of a command is then more than its bytes cost at the
# rate of a link (64 KiB at 380 GB/s: 0.2 us). A choice by that reckoning, not by a measurement.
SMALL_BYTES = 1 << 16
THREADS = 256  # kThreads
PARTS = 1  # blocks per expert
EXPERTS_PER_LAUNCH = 256
HOST_TABLES = 2  # one is filled while the other may still be on its way to the device

# struct Piece, Row and Transfer of transfer.cuh.
PIECE: Any = np.dtype([("source", "<u8"), ("destination", "<u8"), ("bytes", "<i8")])
ROW: Any = np.dtype(
    [
        ("first_piece", "<i8"),
        ("pieces", "<i8"),
        ("wait_for", "<u8"),
        ("wait_value", "<u8"),
        ("arrived", "<u8"),
        ("expected", "<i8"),
        ("raise", "<u8"),
        ("raise_value", "<u8"),
    ]
)
ARGUMENTS: Any = np.dtype([("words", "<i8", (3,))])  # address of the pieces, address of the rows, parts


class CopyTable:
    """Descriptors of one launch, in memory of a fixed size: `rows` rows, then the pieces.

    Args:
        memory: uint8 [table_bytes(rows, pieces_per_row)], written to.
        rows: experts that fit.
    """

    def __init__(self, memory: Any, *, rows: int) -> None:
        self._split = rows * ROW.itemsize
        self._rows = memory[: self._split].view(ROW)
        self._pieces = memory[self._split :].view(PIECE)
        self.clear()

    @property
    def full(self) -> bool:
        return self.num_rows == len(self._rows)

    def clear(self) -> None:
        self.num_rows = self.num_pieces = 0

    def add(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """One expert's pieces: source address, destination address, bytes."""
        first, end = self.num_pieces, self.num_pieces + len(pieces)
        self._pieces[first:end] = np.array(list(pieces), dtype=PIECE)
        row = self._rows[self.num_rows]
        row["first_piece"], row["pieces"] = first, len(pieces)
        self.num_rows, self.num_pieces = self.num_rows + 1, end

    def finish(self, arrived: int) -> None:
        """Nothing is waited for and no flag is raised: that is done on the host, by the stream's event.

        Args:
            arrived: address of a 32-bit zero on the device; the last block of the launch clears it again.
        """
        rows = self._rows[: self.num_rows]
        for name in ("wait_for", "wait_value", "raise", "raise_value"):
            rows[name] = 0
        rows["arrived"], rows["expected"] = arrived, self.num_rows * PARTS

    def argument(self, address: int) -> Any:
        """The kernel's argument when the table lies at `address`."""
        return np.array([((address + self._split, address, PARTS),)], dtype=ARGUMENTS)


def table_bytes(rows: int, pieces_per_row: int) -> int:
    """Size of a `CopyTable`."""
    return int(rows * (ROW.itemsize + pieces_per_row * PIECE.itemsize))


def most_small(weights: ExpertWeights, limit: int) -> int:
    """The largest number of tensors of at most `limit` bytes that an expert of one layer has."""
    return max(
        sum(int(rows.shape[1]) <= limit for rows in weights.rows(layer))
        for layer in range(weights.num_layers)
    )


class SmallCopies:
    """Launches for the small tensors of one rank's sends, in stream order; memory is allocated here, once.

    Used by one thread at a time, on the stream on which the large tensors of the same experts travel.

    Args:
        weights: of this rank, on its GPU.
        stream: torch's CUDA stream.
        limit: bytes of one expert up to which a tensor counts as small.

    Raises:
        RuntimeError: the kernel is not available, with the reason; and what loading it raises.
    """

    def __init__(self, weights: ExpertWeights, stream: Any, *, limit: int = SMALL_BYTES) -> None:
        reason = _device_library.status(FOLDER)
        if reason != "ready":
            raise RuntimeError(reason)
        self.limit = limit
        size = table_bytes(EXPERTS_PER_LAUNCH, most_small(weights, limit))
        self._where, self._stream = weights.device, stream
        index = weights.device.index
        # Loaded now, by NVRTC if need be, so that no migration waits for a compiler.
        _device_library.kernel(FOLDER, KERNEL, torch.cuda.current_device() if index is None else index)
        self._device = torch.zeros(size, dtype=torch.uint8, device=weights.device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=weights.device)
        self._host = [_pinned(size) for _ in range(HOST_TABLES)]
        self._tables = [CopyTable(memory.numpy(), rows=EXPERTS_PER_LAUNCH) for memory in self._host]
        self._sent: list[Any] = [None] * HOST_TABLES
        self._turn = 0

    def add(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """One expert's small tensors: source address, destination address, bytes. Copied by the next launch."""
        if self._tables[self._turn].full:
            self.launch()
        self._tables[self._turn].add(pieces)

    def clear(self) -> None:
        """Forgets what was added and not launched: of a migration that was abandoned."""
        self._tables[self._turn].clear()

    def launch(self) -> None:
        """Copies what was added since the last launch, on the stream."""
        table = self._tables[self._turn]
        if not table.num_rows:
            return
        table.finish(self._arrived.data_ptr())
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host[self._turn], non_blocking=True)
            sent = torch.cuda.Event()
            sent.record(self._stream)
            _device_library.launch(
                FOLDER,
                KERNEL,
                self._where,
                blocks=table.num_rows * PARTS,
                threads=THREADS,
                shared_bytes=0,
                argument=table.argument(self._device.data_ptr()),
            )
        self._sent[self._turn] = sent
        self._turn = (self._turn + 1) % HOST_TABLES
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        self._tables[self._turn].clear()


def _pinned(size: int) -> Any:
    """Page-locked, so that the copy to the device does not wait for the host."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
