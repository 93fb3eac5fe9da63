"""Ways to carry bytes between ranks, all under one protocol (`protocol.Executor`)."""

from .peer_memory import PeerMemoryExecutor
from .process_group import ProcessGroupExecutor
from .protocol import Executor
from .shared_memory import SharedMemoryExecutor

__all__ = ["Executor", "PeerMemoryExecutor", "ProcessGroupExecutor", "SharedMemoryExecutor"]
