"""The board in a torch.distributed store, for ranks that share no memory."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from .board import Board, BoardLost, Word


class StoreBoard(Board):
    """Numbers as keys of a store; a verdict is decided by its compare-and-set.

    A call to a store whose server is stopped does not return, whatever the store's own timeout. So a thread makes
    the calls, and whoever waits for it longer than `timeout` seconds takes the store for lost, for good.
    """

    def __init__(self, store: Any, rank: int, *, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._told: set[tuple[Word, int]] = set()
        self._lost: str | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="gimbal-store", daemon=True).start()
        for word in Word:
            self.tell(word, 0)

    def tell(self, word: Word, value: int) -> None:
        with contextlib.suppress(BoardLost):
            self._reach(lambda: self._store.set(f"{self._rank}/{word.name}", str(value)))

    def ask(self, word: Word, rank: int) -> int:
        return int(self._reach(lambda: self._read(word, rank)))

    def ask_all(self, word: Word, ranks: int) -> list[int]:
        found: list[int] = self._reach(lambda: [self._read(word, rank) for rank in range(ranks)])
        return found

    def propose(self, migration: int, wave: int, body: int) -> int:
        key = self._key(migration, wave)
        return int(self._reach(lambda: self._store.compare_set(key, "", str(body))))

    def decided(self, migration: int, wave: int) -> int | None:
        word: int | None = self._reach(lambda: self._read_if_there(self._key(migration, wave)))
        return word

    def forget(self, migration: int, waves: int) -> None:
        """Removes the verdicts of a migration that nobody asks about any more."""
        for wave in range(waves):
            with contextlib.suppress(BoardLost):
                self._reach(partial(self._delete, self._key(migration, wave)))

    def close(self) -> None:
        """Ends the thread that makes the calls."""
        self._lost = self._lost or "closed"
        self._calls.put(None)

    def _read(self, word: Word, rank: int) -> int:
        key = f"{rank}/{word.name}"
        if (word, rank) not in self._told:  # a question for a key that is not there would wait for it
            if not self._store.check([key]):
                return 0
            self._told.add((word, rank))
        return int(self._store.get(key))

    def _read_if_there(self, key: str) -> int | None:
        return int(self._store.get(key)) if self._store.check([key]) else None

    def _delete(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # not every store can
            self._store.delete_key(key)

    def _reach(self, function: Callable[[], Any]) -> Any:
        if self._lost is not None:
            raise BoardLost(self._lost)
        call = _Call(function)
        self._calls.put(call)
        if not call.done.wait(self._timeout):
            self._lost = f"the store did not answer within {self._timeout} s"
        elif call.error is not None:
            self._lost = f"the store failed: {call.error}"
        if self._lost is not None:
            raise BoardLost(self._lost) from call.error
        return call.result

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.function()
            except Exception as error:
                call.error = error
            call.done.set()

    @staticmethod
    def _key(migration: int, wave: int) -> str:
        return f"verdict/{migration}/{wave}"


class _Call:
    """One call to the store and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
