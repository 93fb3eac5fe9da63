"""Search of method "portfolio" in plain numpy (SPEC section 3.3): swaps, kicks, choice of the best.

With `portfolio` the specification of csrc/placement/search.cuh and descent.cuh: the same integers, the same ties.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .portfolio import FEW_RANKS, Effort, IntegerLayer, prices, round_by_class, round_by_rank, to_integers
from .problem import PlacementProblem


class Lcg:
    """The generator behind the kicks; `below(n)` is uniform in [0, n), from the upper 28 bits."""

    def __init__(self, seed: int) -> None:
        self.state = (seed * 2654435761 + 12345) & 0xFFFFFFFF

    def below(self, n: int) -> int:
        self.state = (self.state * 1664525 + 1013904223) & 0xFFFFFFFF
        return ((self.state >> 4) * n) >> 28


class Search:
    """Experts in slots [R, C], and the change of the objective that a swap of two of them makes."""

    def __init__(self, y: IntegerLayer, home: Any, stage: int) -> None:
        self.y = y
        self.slots = np.stack([np.flatnonzero(home == rank) for rank in range(y.ranks)])
        self.reweigh(stage)

    def reweigh(self, stage: int) -> None:
        self.load = self.y.load[stage]  # [K, E]
        self.rank_load = self.load[:, self.slots].sum(axis=2)  # [K, R]

    def changes(self, a: int, x: int) -> Any:
        """[C, C]: slot i of rank a with slot j of rank x."""
        e, f = self.slots[a][:, None], self.slots[x][None]
        cost = self.y.cost
        total = cost[x, e] - cost[a, e] + cost[a, f] - cost[x, f]
        for load, of_rank in zip(self.load, self.rank_load, strict=True):
            d = load[e] - load[f]
            total = total + d * (d - (of_rank[a] - of_rank[x]))
        return total

    def swap(self, a: int, i: int, x: int, j: int) -> None:
        e, f = self.slots[a, i], self.slots[x, j]
        self.slots[a, i], self.slots[x, j] = f, e
        self.rank_load[:, a] += self.load[:, f] - self.load[:, e]
        self.rank_load[:, x] += self.load[:, e] - self.load[:, f]

    def home(self) -> Any:
        """Rank of each expert, [E]."""
        home: Any = np.zeros(self.y.experts, dtype=np.int64)
        home[self.slots] = np.arange(self.y.ranks)[:, None]
        return home

    def objective(self) -> int:
        """Twice the objective up to a constant: 2 c + sum of squared rank loads."""
        cost = self.y.cost[np.arange(self.y.ranks)[:, None], self.slots].sum()
        return int(2 * cost + (self.rank_load**2).sum())


def descend(search: Search, limit: int | None = None) -> int:
    """Applies the best swap until none improves; returns the change of the objective.

    Ties: lowest rank a, then x > a, then slot i, then j. `limit`: experts that may be away from their current
    rank; the descent ends before a swap exceeds it.
    """
    y, total = search.y, 0
    while True:
        value, a, x, i, j = 0, -1, -1, -1, -1
        for first in range(y.ranks):
            for second in range(first + 1, y.ranks):
                change = search.changes(first, second)
                if change.min() < value:
                    value, a, x = int(change.min()), first, second
                    i, j = divmod(int(change.argmin()), y.size)
        if a < 0:
            return total
        if limit is not None:
            moved = search.home()
            moved[[search.slots[a, i], search.slots[x, j]]] = x, a
            if int((moved != y.home).sum()) > limit:
                return total
        search.swap(a, i, x, j)
        total += value


def kick(search: Search, kicks: int, seed: int) -> None:
    """Chains of 3 to 5 forced swaps, each followed by a descent; what does not improve is undone."""
    y, random = search.y, Lcg(seed)
    if y.ranks < 2:
        return
    descend(search)
    for _ in range(kicks):
        slots, rank_load, total = search.slots.copy(), search.rank_load.copy(), 0
        length, a = 3 + random.below(3), random.below(y.ranks)
        for _ in range(length):
            i, x = random.below(y.size), random.below(y.ranks - 1)
            x += x >= a
            change = search.changes(a, x)[i]
            j = int(change.argmin())  # ties: the lowest slot
            total += int(change[j])
            search.swap(a, i, x, j)
            a = x
        total += descend(search)
        if total >= 0:
            search.slots, search.rank_load = slots, rank_load


def solve_layer(problem: PlacementProblem, layer: int, effort: Effort, most_moves: int | None) -> Any | None:
    """Rank of each expert [E], or None where the layer has no traffic and stays.

    The best of the starts (ties: the first), then of the seeds (ties: the first); the current placement when
    nothing is better than it.
    """
    y = to_integers(problem, layer)
    if y is None:
        return None
    priced = prices(y)
    starts = [round_by_rank(y, priced)]
    if y.rank_class.max() + 1 < y.ranks:
        starts.append(round_by_class(y, priced))
    if problem.current is not None and y.ranks <= FEW_RANKS:
        starts.append(y.home)
    last, best, lowest = len(y.load) - 1, starts[0], 1 << 100
    for start in starts:
        search = Search(y, start, 0)
        for stage in range(last + 1):
            search.reweigh(stage)
            descend(search)
        if search.objective() < lowest:
            best, lowest = search.home(), search.objective()
    start = best
    for seed in range(1, effort.seeds + 1):
        search = Search(y, start, last)
        kick(search, effort.kicks, seed)
        if search.objective() < lowest:
            best, lowest = search.home(), search.objective()
    if problem.current is None:
        return best
    search = Search(y, y.home, last)
    if search.objective() <= lowest:
        best = y.home
    if most_moves is not None and int((best != y.home).sum()) > most_moves:
        descend(search, most_moves)
        best = search.home()
    return best
