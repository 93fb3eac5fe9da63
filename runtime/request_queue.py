"""The waiting queue: shortest prefill first, with an age limit (SPEC section 7, Algorithm 2).

Service order:
1. resumed (preempted) requests, the one put back last first, as at the left end of a deque;
2. requests older than the age limit, in arrival order;
3. all others by (uncached prefill tokens in KV blocks, arrival).
Equal arrivals and equal keys go in the order in which they were pushed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class PrefillItem(Protocol):
    """What the queue reads of an item, once, when it is pushed."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens still to compute: those that no prefix cache holds."""

    @property
    def arrival_time(self) -> float:
        """Seconds, on the queue's clock."""


Item = TypeVar("Item", bound=PrefillItem)

# Removed entries may make up half of a heap, and a short heap is not worth rebuilding.
_COMPACT_FROM = 64


class ShortestPrefillQueue(Generic[Item]):
    """Algorithm 2 of SPEC section 7. Every operation costs O(log n), amortised; iteration O(n log n).

    Items are told apart by identity, so they need neither hash nor order. An item is in two heaps, by size
    and by arrival (items pushed out of arrival order still age in arrival order); when it leaves through one,
    its entry in the other is dropped once it comes to the top there. The clock is read once per look at the
    head and never inside a comparison: a heap whose order depends on the time of the comparison is no heap.

    Args:
        age_limit: seconds; a request that has waited longer is served in arrival order. math.inf: never.
        clock: returns seconds on the clock of the items' `arrival_time`.
        block_size: tokens of one KV block; sizes are compared in whole blocks. 1: `prefill_tokens` already is
            the figure to compare.

    Raises:
        ValueError: a negative or NaN `age_limit`, a `block_size` below 1.
    """

    def __init__(self, *, age_limit: float = 5.0, clock: Callable[[], float], block_size: int = 1) -> None:
        if not age_limit >= 0.0:
            raise ValueError(f"age_limit: {age_limit!r}; valid: seconds >= 0, or math.inf for no ageing")
        if block_size < 1:
            raise ValueError(f"block_size: {block_size!r}; valid: an integer >= 1")
        self.age_limit = age_limit
        self.block_size = block_size
        self._clock = clock
        self._pushed = 0
        self._items: dict[int, Item] = {}  # push number -> item; what is not in here has been removed
        self._number: dict[int, int] = {}  # id(item) -> push number
        self._resumed: list[int] = []  # push numbers, the next one at the end
        self._by_size: list[tuple[int, float, int]] = []  # (blocks, arrival, push number)
        self._by_arrival: list[tuple[float, int]] = []  # (arrival, push number)
        self._shown: int | None = None  # what peek() showed since the queue last changed

    def push(self, item: Item) -> None:
        """Add a request.

        Raises:
            ValueError: it is queued already; `prefill_tokens` is negative; `arrival_time` is not finite.
        """
        blocks = -(-item.prefill_tokens // self.block_size)
        arrival = item.arrival_time
        if not blocks >= 0:
            raise ValueError(f"item.prefill_tokens: {item.prefill_tokens!r}; valid: an integer >= 0")
        if not math.isfinite(arrival):
            raise ValueError(f"item.arrival_time: {arrival!r}; valid: finite seconds")
        number = self._enter(item)
        heappush(self._by_size, (blocks, arrival, number))
        if self.age_limit != math.inf:
            heappush(self._by_arrival, (arrival, number))

    def push_front(self, item: Item) -> None:
        """Put a preempted request back: it comes before all others, and before those put back earlier.

        Raises:
            ValueError: it is queued already.
        """
        self._resumed.append(self._enter(item))

    def peek(self) -> Item:
        """The next request, left in the queue.

        Raises:
            IndexError: the queue is empty.
        """
        self._shown = self._head()
        return self._items[self._shown]

    def pop(self) -> Item:
        """Take the next request out: what peek() showed last, if the queue has not been changed since.

        A scheduler looks at the head, reserves memory for it and only then takes it out; were the clock read
        again in between, another request could have come of age and the memory be the wrong one's.

        Raises:
            IndexError: the queue is empty.
        """
        number = self._shown if self._shown is not None else self._head()
        return self._leave(number)

    def remove(self, item: Item) -> None:
        """Take out a request wherever it stands.

        Raises:
            ValueError: it is not in the queue.
        """
        number = self._number.get(id(item))
        if number is None:
            raise ValueError(
                f"item: {item!r} is not in the queue; valid: an item pushed and not yet taken out"
            )
        self._leave(number)

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return bool(self._items)

    def __contains__(self, item: object) -> bool:
        return id(item) in self._number

    def __iter__(self) -> Iterator[Item]:
        """All requests in service order at this moment; later changes of the queue do not show."""
        limit = self._clock() - self.age_limit
        resumed = [number for number in reversed(self._resumed) if number in self._items]
        rest = [entry for entry in self._by_size if entry[-1] in self._items]
        aged = sorted(entry[1:] for entry in rest if entry[1] < limit)
        young = sorted(entry for entry in rest if not entry[1] < limit)
        order = resumed + [number for _, number in aged] + [number for _, _, number in young]
        return iter([self._items[number] for number in order])

    def _head(self) -> int:
        """Push number of the next request."""
        if not self._items:
            raise IndexError("the queue is empty")
        while self._resumed:
            if self._resumed[-1] in self._items:
                return self._resumed[-1]
            self._resumed.pop()
        while self._by_arrival and self._by_arrival[0][-1] not in self._items:
            heappop(self._by_arrival)
        if self._by_arrival:
            arrival, number = self._by_arrival[0]
            if arrival < self._clock() - self.age_limit:
                return number
        while self._by_size[0][-1] not in self._items:
            heappop(self._by_size)
        return self._by_size[0][-1]

    def _enter(self, item: Item) -> int:
        if id(item) in self._number:
            raise ValueError(f"item: {item!r} is in the queue already; valid: an item that is not")
        number = self._pushed
        self._pushed += 1
        self._items[number] = item
        self._number[id(item)] = number
        self._shown = None
        return number

    def _leave(self, number: int) -> Item:
        item = self._items.pop(number)
        del self._number[id(item)]
        self._shown = None
        self._compact()
        return item

    def _compact(self) -> None:
        """Rebuild what consists mostly of removed entries.

        Dropping them at the top alone is not enough: under lasting overload requests are served by age, and
        the entries of the long ones would pile up at the bottom of the heap by size.
        """
        enough = _COMPACT_FROM + 2 * len(self._items)
        if len(self._by_size) > enough:
            self._by_size = [entry for entry in self._by_size if entry[-1] in self._items]
            heapify(self._by_size)
        if len(self._by_arrival) > enough:
            self._by_arrival = [entry for entry in self._by_arrival if entry[-1] in self._items]
            heapify(self._by_arrival)
        if len(self._resumed) > enough:
            self._resumed = [number for number in self._resumed if number in self._items]
