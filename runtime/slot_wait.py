"""Waiting for a slot: an engine runs `max_num_seqs` requests at a time, however few tokens they leave to compute.

Serving the shortest prefill first shortens the mean wait because it is tokens that all wait for. Where they wait
for a slot, what counts is how long the requests before them decode, which no prompt tells: order by size then gains
little and costs the tail as much as ever. `TokenShare` tells the two apart, for the queue; `RequestSteps` says how
long a slot is held, for engine choice.
"""

from __future__ import annotations


class TokenShare:
    """Of the scheduling passes, lately, that left requests waiting: the share that did so for want of tokens or KV
    blocks, not of slots. 1, which is Algorithm 2 as published, until something else is seen.

    Args:
        memory: weight of the passes before, per pass, in [0, 1). 0.95 remembers about twenty.

    Raises:
        ValueError: a memory outside its range.
    """

    def __init__(self, *, memory: float = 0.95) -> None:
        if not 0.0 <= memory < 1.0:
            raise ValueError(f"memory: {memory!r}; valid: at least 0 and below 1")
        self.memory = memory
        self._value = 1.0

    @property
    def value(self) -> float:
        """0 to 1."""
        return self._value

    def observe(self, *, slots_short: bool) -> None:
        """A pass has left requests waiting; `slots_short`: there were tokens left, but no slot."""
        self._value = self.memory * self._value + (1.0 - self.memory) * (not slots_short)


class RequestSteps:
    """Mean number of tokens that requests have produced, over those that ended lately: each held a slot for about
    as many engine steps, fewer where drafts are accepted (speculative decoding).

    Args:
        window: requests that the mean remembers, about; until there are as many it is the plain mean.

    Raises:
        ValueError: a window below 1.
    """

    def __init__(self, *, window: int = 256) -> None:
        if window < 1:
            raise ValueError(f"window: {window!r}; valid: an integer >= 1")
        self.window = window
        self._seen = 0
        self._mean = 0.0

    @property
    def mean(self) -> float:
        """Steps; 0: no request has ended yet."""
        return self._mean

    def observe(self, tokens: int) -> None:
        """A request has ended, also by an abort, after producing `tokens`; one that never started says nothing."""
        if tokens < 1:
            return
        self._seen = min(self._seen + 1, self.window)
        self._mean += (tokens - self._mean) / self._seen
