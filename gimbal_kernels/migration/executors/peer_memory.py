"""Experts pushed into staging on other GPUs of the machine, which each process maps by CUDA IPC."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..schedule import Move
from ..weights import ExpertWeights
from .board import Word
from .protocol import GENERATIONS
from .push import PushExecutor
from .shared_block import OWN_WORDS, WORD_BYTES, SharedBlock
from .small_copies import SMALL_BYTES, SmallCopies

logger = logging.getLogger("gimbal_kernels.migration")

HANDLE_BYTES = 64  # of a CUDA IPC handle; it lies in a rank's block behind its words
HANDLE_AT = len(Word) * WORD_BYTES
assert HANDLE_AT + HANDLE_BYTES <= OWN_WORDS * WORD_BYTES


def status() -> str:
    """ "ready", or the reason why this executor cannot be used here."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("cupy") is None:
        return "the package cupy is not installed (extras cuda12 and cuda13)"
    return "ready"


class PeerMemoryExecutor(PushExecutor):
    """The protocol of `SharedMemoryExecutor` with staging on the GPUs; flags and agreement stay in host memory.

    Copies run on a stream of their own: large tensors by the copy engines, the small ones of a wave together by the
    copy kernel (`small_copies`). Where the kernel cannot be had, a warning says why and all tensors take the copy
    engines. A flag is raised when the event behind its copies is complete; a buffer counts as consumed when the
    event behind the commit on the caller's stream is.

    Args:
        weights: this rank's tensors, on its GPU, laid out the same on every rank.
        rank, ranks, name, staging_bytes, timeout, start_timeout: as for `SharedMemoryExecutor`.
        small_bytes: bytes of one expert up to which a tensor counts as small; 0: none does.

    Raises:
        ValueError: no CUDA device or no CuPy, tensors that are not on a GPU, a negative small_bytes, and what
            `SharedMemoryExecutor` refuses.
        MigrationError: a rank did not start in time.
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
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        reason = status()
        if reason != "ready":
            raise ValueError(f"executor: PeerMemoryExecutor is not available: {reason}; valid: process_group")
        if weights.device.type != "cuda":
            raise ValueError(f"weights: on {weights.device}; valid: a CUDA device")
        if small_bytes < 0:
            raise ValueError(f"small_bytes: {small_bytes}; valid: 0 or more")
        self._order = threading.Lock()
        self._uncopied: list[tuple[int, Any]] = []
        self._mapped: dict[int, int] = {}
        self._peers: list[Any] = []
        self._wave_event: list[Any] = []  # empty until all copies of the wave have been queued
        with torch.cuda.device(weights.device):
            self._stream = torch.cuda.Stream()
            super().__init__(
                weights,
                rank=rank,
                ranks=ranks,
                name=name,
                staging_bytes=staging_bytes,
                timeout=timeout,
                start_timeout=start_timeout,
            )
            self._small = self._load_kernel(small_bytes)

    def staging(self, wave: int) -> Any:
        return self._peers[self.rank][wave % GENERATIONS]

    def enter(self, digest: int) -> None:
        # Whatever was queued, on whatever stream: copies of a wave that was abandoned, commits and what was made
        # from them, weights that were just loaded. The copies of this migration are not ordered behind any of it.
        torch.cuda.synchronize(self.weights.device)
        with self._order:
            self._uncopied = []
        if self._small is not None:
            self._small.clear()
        super().enter(digest)

    def consumed(self, wave: int) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.weights.device))
        with self._order:
            self._uncopied.append((wave, event))

    def beat(self) -> None:
        with self._order:  # serving and staging threads both come by
            while self._uncopied and self._uncopied[0][1].query():
                super().consumed(self._uncopied.pop(0)[0])
        super().beat()

    def close(self) -> None:
        runtime = _runtime()
        torch.cuda.synchronize(self.weights.device)
        self._peers = []
        for rank, address in self._mapped.items():
            if rank == self.rank:
                runtime.free(address)
            else:
                runtime.ipcCloseMemHandle(address)
        self._mapped = {}
        super().close()

    def _row_bytes_in_block(self) -> int:
        return 0

    def _prepare_own(self, block: SharedBlock) -> None:
        # Straight from the driver: a handle names a whole allocation, and torch's allocator cuts its own to pieces.
        runtime = _runtime()
        self._mapped[self.rank] = runtime.malloc(self.staging_bytes)
        handle = bytearray(runtime.ipcGetMemHandle(self._mapped[self.rank]))
        block.bytes[HANDLE_AT : HANDLE_AT + HANDLE_BYTES] = torch.frombuffer(handle, dtype=torch.uint8)

    def _attach_peers(self, blocks: list[SharedBlock]) -> None:
        for rank, block in enumerate(blocks):
            if rank != self.rank:
                handle = block.bytes[HANDLE_AT : HANDLE_AT + HANDLE_BYTES].numpy().tobytes()
                self._mapped[rank] = _runtime().ipcOpenMemHandle(handle)
        shape = (GENERATIONS, self.rows, self.row_bytes)
        self._peers = [
            _as_tensor(self._mapped[rank], shape, self.weights.device) for rank in range(self.ranks)
        ]
        self._peers[self.rank].zero_()
        torch.cuda.synchronize(self.weights.device)

    def _push(self, wave: int, send: Move, spend: Callable[[int], None]) -> Callable[[], bool]:
        row = self._peers[send.peer][wave % GENERATIONS, send.row]
        small = []
        for rows, offset in zip(self.weights.rows(send.layer), self.weights.offsets(send.layer), strict=True):
            size = int(rows.shape[1])
            spend(size)
            source, target = rows[send.slot], row[offset : offset + size]
            if self._small is not None and size <= self._small.limit:
                small.append((source.data_ptr(), target.data_ptr(), size))
                continue
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
        if small and self._small is not None:
            self._small.add(small)
        event = self._wave_event
        return lambda: bool(event) and bool(event[0].query())

    def _all_pushed(self) -> None:
        if self._small is not None:
            self._small.launch()
        event = torch.cuda.Event()
        event.record(self._stream)
        self._wave_event.append(event)
        self._wave_event = []

    def _load_kernel(self, limit: int) -> SmallCopies | None:
        if limit == 0:
            return None
        try:
            return SmallCopies(self.weights, self._stream, limit=limit)
        except Exception as error:
            logger.warning(
                "rank %d: no copy kernel (%s): small tensors travel one by one, by the copy engine",
                *(self.rank, error),
            )
            return None


def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


def _as_tensor(address: int, shape: tuple[int, ...], device: Any) -> Any:
    """uint8 memory on a GPU as a torch tensor; whoever mapped it frees it."""
    import cupy

    size = shape[0] * shape[1] * shape[2]
    index = device.index if device.index is not None else torch.cuda.current_device()
    memory = cupy.cuda.UnownedMemory(address, size, None, index)
    flat = cupy.ndarray((size,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return torch.from_dlpack(flat).view(shape)
