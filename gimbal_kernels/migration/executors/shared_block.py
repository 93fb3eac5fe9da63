"""A piece of memory that several processes map, and the board that lives in it."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import host
from .board import Board, Word

PAGE = 4096
WORD_BYTES = 8
OWN_WORDS = 16  # words of each rank, two cache lines
BODY_BITS = 43


@dataclass(frozen=True)
class BlockLayout:
    """Where things are in the block of one rank, in bytes.

    The rank's own words; one verdict per layer (used in the block of rank 0); one landing flag per staging row and
    generation, written by senders; the staging rows themselves.
    """

    layers: int
    generations: int
    rows: int
    row_bytes: int

    @property
    def verdicts(self) -> int:
        return OWN_WORDS * WORD_BYTES

    @property
    def flags(self) -> int:
        return self.verdicts + self.layers * WORD_BYTES

    @property
    def staging(self) -> int:
        return -(-(self.flags + self.generations * self.rows * WORD_BYTES) // PAGE) * PAGE

    @property
    def total(self) -> int:
        return self.staging + self.generations * self.rows * self.row_bytes

    def flag(self, generation: int, row: int) -> int:
        return self.flags + (generation * self.rows + row) * WORD_BYTES

    def row(self, generation: int, row: int) -> int:
        return self.staging + (generation * self.rows + row) * self.row_bytes


class SharedBlock:
    """A mapped file in memory; the mapping outlives the file's name and the process that made it."""

    def __init__(self, path: Path, size: int, *, create: bool) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        self.path = path
        try:
            if create:  # reserved now: running out later would kill whoever writes
                os.posix_fallocate(descriptor, 0, size)
            # Populated now: a migration then touches no page for the first time.
            mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except BaseException:
            if create:
                self.unlink()
            raise
        finally:
            os.close(descriptor)
        self.bytes: Any = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()

    def unlink(self) -> None:
        """Removes the name: nobody else can map it, and nothing stays behind when all processes are gone."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    @staticmethod
    def path_of(name: str, rank: int) -> Path:
        folder = Path("/dev/shm")
        if not folder.is_dir():
            folder = Path(tempfile.gettempdir())
        return folder / f"gimbal-{name}-{rank}"


class SharedBoard(Board):
    """Words in the blocks of all ranks; a verdict is decided by one compare-and-swap."""

    def __init__(self, blocks: list[SharedBlock], layout: BlockLayout, rank: int) -> None:
        self._native = host.require()
        self._blocks = blocks
        self._layout = layout
        self._own = blocks[rank].address

    def tell(self, word: Word, value: int) -> None:
        self._native.gimbal_migration_store(self._own + word * WORD_BYTES, value)

    def ask(self, word: Word, rank: int) -> int:
        return int(self._native.gimbal_migration_load(self._blocks[rank].address + word * WORD_BYTES))

    def propose(self, migration: int, wave: int, body: int) -> int:
        at = self._verdict(wave)
        before = int(self._native.gimbal_migration_load(at))
        number = _number(migration)
        if before >> BODY_BITS == number:
            return before % (1 << BODY_BITS)
        found = int(self._native.gimbal_migration_swap(at, before, number << BODY_BITS | body))
        return body if found == before else found % (1 << BODY_BITS)

    def decided(self, migration: int, wave: int) -> int | None:
        word = int(self._native.gimbal_migration_load(self._verdict(wave)))
        return word % (1 << BODY_BITS) if word >> BODY_BITS == _number(migration) else None

    def _verdict(self, wave: int) -> int:
        return self._blocks[0].address + self._layout.verdicts + wave * WORD_BYTES


def _number(migration: int) -> int:
    """What tells this migration's verdicts from earlier ones; 0 is "none yet"."""
    return migration % ((1 << 64 - BODY_BITS) - 1) + 1
