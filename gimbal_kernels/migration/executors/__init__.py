"""Ways to carry bytes between ranks, all under one protocol (`protocol.Executor`)."""

from .process_group import ProcessGroupExecutor
from .protocol import Executor
from .shared_memory import SharedMemoryExecutor

__all__ = ["Executor", "ProcessGroupExecutor", "SharedMemoryExecutor"]
