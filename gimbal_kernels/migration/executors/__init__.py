"""Ways to carry bytes between ranks, all under one protocol (`protocol.Executor`)."""

from .protocol import Executor
from .shared_memory import SharedMemoryExecutor

__all__ = ["Executor", "SharedMemoryExecutor"]
