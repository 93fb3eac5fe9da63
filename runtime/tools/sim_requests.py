"""Requests of the simulated engines, and the queue that serves them in the order of their arrival."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ..request_queue import ShortestPrefillQueue
from .sim_traffic import Arrival


@dataclass(slots=True, eq=False)
class Request:
    """A request in the simulation; a queue item (`prefill_tokens`, `arrival_time`)."""

    arrival: Arrival
    client: int = 0
    engine: int = -1
    seq: int = 0
    prefill_tokens: int = 0
    produced: int = 0
    first: float = math.nan
    done: float = math.nan

    @property
    def arrival_time(self) -> float:
        """Seconds."""
        return self.arrival.time

    @property
    def context(self) -> int:
        """Prompt and tokens so far: what a prefill of it would have to compute."""
        return self.arrival.prompt + self.produced


class ArrivalQueue:
    """First come, first served; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._items: deque[Request] = deque()

    def push(self, item: Request) -> None:
        """Add at the end."""
        self._items.append(item)

    def push_front(self, item: Request) -> None:
        """Add at the front."""
        self._items.appendleft(item)

    def peek(self) -> Request:
        """The next one."""
        return self._items[0]

    def pop(self) -> Request:
        """Take out the next one."""
        return self._items.popleft()

    def end_pass(self, *, slots_short: bool) -> None:
        """Nothing depends on it."""

    def __len__(self) -> int:
        return len(self._items)


Queue = ArrivalQueue | ShortestPrefillQueue[Request]
