"""The waiting queue: shortest prefill first, with an age limit (SPEC section 7, Algorithm 2).

Service order:
1. resumed (preempted) requests, the one put back last first, as at the left end of a deque;
2. requests older than the age limit, in arrival order; where requests wait for slots it shrinks (`end_pass`);
3. all others by (uncached prefill tokens in KV blocks, arrival).
Equal arrivals and equal keys go in the order in which they were pushed. With priorities this is the order among
requests of one priority, and a lower priority value comes before a higher one whatever their ages.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from .age_limit import AutoAgeLimit
from .slot_wait import TokenShare

AUTO = "auto"


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


class _Level:
    """Entries of one priority, by push number. What has been removed is not in `live` and dropped later."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.resumed: list[int] = []  # the next one at the end
        self.by_size: list[tuple[int, float, int]] = []  # (blocks, arrival, push number)
        self.by_arrival: list[tuple[float, int]] = []  # (arrival, push number)

    def head(self, limit: float) -> int:
        """The next entry; those that arrived before `limit` are of age. There is one."""
        while self.resumed:
            if self.resumed[-1] in self.live:
                return self.resumed[-1]
            self.resumed.pop()
        while self.by_arrival and self.by_arrival[0][-1] not in self.live:
            heappop(self.by_arrival)
        if self.by_arrival and self.by_arrival[0][0] < limit:
            return self.by_arrival[0][-1]
        while self.by_size[0][-1] not in self.live:
            heappop(self.by_size)
        return self.by_size[0][-1]

    def order(self, limit: float) -> list[int]:
        """All entries in service order."""
        resumed = [number for number in reversed(self.resumed) if number in self.live]
        rest = [entry for entry in self.by_size if entry[-1] in self.live]
        aged = sorted(entry[1:] for entry in rest if entry[1] < limit)
        young = sorted(entry for entry in rest if not entry[1] < limit)
        return resumed + [number for _, number in aged] + [number for _, _, number in young]

    def compact(self) -> None:
        """Rebuild what consists mostly of removed entries.

        Dropping them at the top alone is not enough: under lasting overload requests are served by age, and
        the entries of the long ones would pile up at the bottom of the heap by size.
        """
        enough = _COMPACT_FROM + 2 * len(self.live)
        if len(self.by_size) > enough:
            self.by_size = [entry for entry in self.by_size if entry[-1] in self.live]
            heapify(self.by_size)
        if len(self.by_arrival) > enough:
            self.by_arrival = [entry for entry in self.by_arrival if entry[-1] in self.live]
            heapify(self.by_arrival)
        if len(self.resumed) > enough:
            self.resumed = [number for number in self.resumed if number in self.live]


class ShortestPrefillQueue(Generic[Item]):
    """Algorithm 2 of SPEC section 7. Every operation costs O(log n), amortised; iteration O(n log n).

    Items are told apart by identity, so they need neither hash nor order. An item is in two heaps, by size
    and by arrival (items pushed out of arrival order still age in arrival order); when it leaves through one,
    its entry in the other is dropped once it comes to the top there. The clock is read once per look at the
    head and never inside a comparison: a heap whose order depends on the time of the comparison is no heap.

    Wait bound, for requests of one priority: with θ the largest age limit in force, a request starts at the
    latest when, counted from its coming of age θ after its arrival, the work in service, the older requests
    still waiting and the requests resumed meanwhile have been served. What arrives later cannot delay it.
    A limit that grows again (`end_pass`, "auto") may make a request young again, but none that has waited θ.

    Args:
        age_limit: seconds; a request that has waited longer is served in arrival order. math.inf: never.
            "auto": `AutoAgeLimit` with its defaults, or one given; it sees the wait of every request popped.
        clock: returns seconds on the clock of the items' `arrival_time`.
        block_size: tokens of one KV block; sizes are compared in whole blocks. 1: `prefill_tokens` already is
            the figure to compare.
        priorities: items have a `priority` (an integer; lower is served first, as in vLLM).

    Raises:
        ValueError: a negative or NaN `age_limit`, a `block_size` below 1.
    """

    def __init__(
        self,
        *,
        age_limit: float | str | AutoAgeLimit = 5.0,
        clock: Callable[[], float],
        block_size: int = 1,
        priorities: bool = False,
    ) -> None:
        if isinstance(age_limit, str) and age_limit == AUTO:
            age_limit = AutoAgeLimit()
        if isinstance(age_limit, str) or not (isinstance(age_limit, AutoAgeLimit) or age_limit >= 0.0):
            raise ValueError(f"age_limit: {age_limit!r}; valid: seconds >= 0, math.inf, or {AUTO!r}")
        if block_size < 1:
            raise ValueError(f"block_size: {block_size!r}; valid: an integer >= 1")
        self.block_size = block_size
        self.priorities = priorities
        self._auto = age_limit if isinstance(age_limit, AutoAgeLimit) else None
        self._fixed = math.inf if isinstance(age_limit, AutoAgeLimit) else age_limit
        self._clock = clock
        self._token_share = TokenShare()
        self._pushed = 0
        self._items: dict[int, tuple[Item, _Level, int]] = {}  # push number -> item, its level and priority
        self._number: dict[int, int] = {}  # id(item) -> push number
        self._levels: dict[int, _Level] = {}  # priority -> entries; none of them is empty
        self._present: list[int] = []  # its keys, ascending
        self._shown: int | None = None  # what peek() showed since the queue last changed

    @property
    def age_limit(self) -> float:
        """Seconds, at this moment: the limit times the share of waiting that is not for slots."""
        limit = self._fixed if self._auto is None else self._auto.value
        return limit if limit == math.inf else limit * self._token_share.value

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
        number, level = self._enter(item)
        heappush(level.by_size, (blocks, arrival, number))
        if self._auto is not None or self._fixed != math.inf:
            heappush(level.by_arrival, (arrival, number))

    def push_front(self, item: Item) -> None:
        """Put a preempted request back: it comes before all others, and before those put back earlier.

        Raises:
            ValueError: it is queued already.
        """
        number, level = self._enter(item)
        level.resumed.append(number)

    def peek(self) -> Item:
        """The next request, left in the queue.

        Raises:
            IndexError: the queue is empty.
        """
        self._shown = self._head()
        return self._items[self._shown][0]

    def pop(self) -> Item:
        """Take the next request out: what peek() showed last, if the queue has not been changed since.

        A scheduler looks at the head, reserves memory for it and only then takes it out; were the clock read
        again in between, another request could have come of age and the memory be the wrong one's.

        Raises:
            IndexError: the queue is empty.
        """
        number = self._shown if self._shown is not None else self._head()
        if self._auto is not None:
            item, level, _ = self._items[number]
            if not (level.resumed and level.resumed[-1] == number):  # it has waited before, and been served
                self._auto.observe(self._clock() - item.arrival_time)
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

    def end_pass(self, *, slots_short: bool) -> None:
        """A scheduling pass has left requests waiting. A scheduler that never says so has the age limit unchanged.

        Args:
            slots_short: it had tokens left to give, but no slot (`max_num_seqs`).
        """
        self._token_share.observe(slots_short=slots_short)

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return bool(self._items)

    def __contains__(self, item: object) -> bool:
        return id(item) in self._number

    def __iter__(self) -> Iterator[Item]:
        """All requests in service order at this moment; later changes of the queue do not show."""
        limit = self._clock() - self.age_limit
        order = [number for priority in self._present for number in self._levels[priority].order(limit)]
        return iter([self._items[number][0] for number in order])

    def _head(self) -> int:
        """Push number of the next request."""
        if not self._present:
            raise IndexError("the queue is empty")
        return self._levels[self._present[0]].head(self._clock() - self.age_limit)

    def _enter(self, item: Item) -> tuple[int, _Level]:
        if id(item) in self._number:
            raise ValueError(f"item: {item!r} is in the queue already; valid: an item that is not")
        priority = int(item.priority) if self.priorities else 0  # type: ignore[attr-defined]
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            insort(self._present, priority)
        number = self._pushed
        self._pushed += 1
        self._items[number] = (item, level, priority)
        self._number[id(item)] = number
        level.live.add(number)
        self._shown = None
        return number, level

    def _leave(self, number: int) -> Item:
        item, level, priority = self._items.pop(number)
        del self._number[id(item)]
        self._shown = None
        level.live.discard(number)
        if level.live:
            level.compact()
        else:
            del self._levels[priority]
            del self._present[bisect_left(self._present, priority)]
        return item
