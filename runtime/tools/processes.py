"""Processes of one server: find all of them, end all of them, and keep Ctrl-C from interrupting half-way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import psutil

from ..config import SERVER_VARIABLE

SHARED_MEMORY = "/dev/shm/"
MARKER = SERVER_VARIABLE
"""Environment variable whose value is unique to one server; its child processes inherit it."""


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back inside the block, then delivers them as KeyboardInterrupt.

    A Ctrl-C between the start of a process and the moment its id is stored, or in the middle of ending one,
    would leave that process behind. Outside the main thread Python delivers no signals: nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if arrived:
        raise KeyboardInterrupt


def marked_processes(marker: str, leader: int) -> list[psutil.Process]:
    """Live processes whose environment carries `marker`, or that belong to the session of `leader`.

    Two tests because each can miss one: a process that rewrites its title may overwrite its environment, and
    a process may start a session of its own. This process itself is never among them.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(process.pid) == leader or process.environ().get(MARKER) == marker:
                found.append(process)
    return found


def descendants(pid: int) -> list[psutil.Process]:
    """The process `pid` and everything below it; empty when it is gone."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; zombies, which only wait for their parent to read the exit code, do not count."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def wait_gone(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Waits until none is alive, at most `seconds`; returns the survivors."""
    deadline = time.monotonic() + seconds
    living = alive(processes)
    while living and time.monotonic() < deadline:
        time.sleep(0.05)
        living = alive(living)
    return living


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each; one that has just ended, or whose id another process has now, is passed over."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def shared_memory_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped now."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines():
                _, slash, rest = line.partition(SHARED_MEMORY)
                if slash and not rest.endswith("(deleted)"):
                    found.add(Path(SHARED_MEMORY + rest))
    return found


def remove_files(paths: Iterable[Path]) -> None:
    """Deletes those that are still there; a killed process cannot unlink its shared memory itself."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
