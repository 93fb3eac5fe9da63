"""The age at which a waiting request is served in arrival order, taken from the waits seen lately (SPEC section 7).

The paper's 5 s (arXiv 2606.15177) is its own P99 wait. Where waits are about as long as the limit, nearly every
request comes of age and shortest-first turns into arrival order; where they are much shorter, 5 s protects nobody.
`AutoAgeLimit` follows the waits instead, between two bounds: the upper one is what bounds a request's wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

# A quantile of fewer waits says little: until then the paper's constant is in force.
MIN_WAITS = 32


class AutoAgeLimit:
    """factor · the `quantile` of the last `window` waits, between `low` and `high`. O(window) per wait.

    Args:
        quantile: share of waits that are at most the one taken, in (0, 1].
        factor: multiple of that wait. Even with 1 the limit rises when waits do: what comes of age waits longer
            than the limit.
        window: waits remembered.
        low, high: seconds; the limit stays within.
        initial: seconds, in force until `MIN_WAITS` waits have been seen.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        *,
        quantile: float = 0.99,
        factor: float = 1.0,
        window: int = 512,
        low: float = 1.0,
        high: float = 60.0,
        initial: float = 5.0,
    ) -> None:
        if not 0.0 < quantile <= 1.0:
            raise ValueError(f"quantile: {quantile!r}; valid: above 0 and at most 1")
        if not (math.isfinite(factor) and factor > 0.0):
            raise ValueError(f"factor: {factor!r}; valid: a finite number > 0")
        if window < MIN_WAITS:
            raise ValueError(f"window: {window}; valid: an integer >= {MIN_WAITS}")
        if not (math.isfinite(high) and 0.0 <= low <= high):
            raise ValueError(f"low, high: {low!r}, {high!r}; valid: 0 <= low <= high, finite")
        self.quantile = quantile
        self.factor = factor
        self.low = low
        self.high = high
        self._recent: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []
        self._value = min(max(initial, low), high)

    @property
    def value(self) -> float:
        """Seconds."""
        return self._value

    def observe(self, wait: float) -> None:
        """A request has been taken from the queue after `wait` seconds; one that is not finite is ignored."""
        if not math.isfinite(wait):
            return
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(wait)
        insort(self._sorted, wait)
        if len(self._sorted) >= MIN_WAITS:
            rank = max(0, math.ceil(self.quantile * len(self._sorted)) - 1)
            self._value = min(max(self.factor * self._sorted[rank], self.low), self.high)
