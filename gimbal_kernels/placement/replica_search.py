"""Search of method "portfolio" with spare slots in plain numpy (SPEC section 4): fill, swap, copy.

With `replicas` the specification of csrc/placement/replica_search.hpp and replica_api.hpp: the same integers, the
same ties. Written for reading, not for speed: small cases only.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from .portfolio_search import Lcg
from .problem import PlacementProblem
from .replicas import STAGE_WEIGHT, ReplicaLayer, to_integers

# A move: its change of the objective; 0 for a swap, 1 for a copy; the rank and slot to swap with, or (expert, 0).
Move = tuple[int, int, int, int]


class Search:
    """Experts in slots [P], -1 where one is free, and the change of the objective that new copy sets make."""

    def __init__(self, y: ReplicaLayer, slots: Any) -> None:
        self.y = y
        self.slots = np.array(slots, dtype=np.int64)
        self.copies: list[list[int]] = [[] for _ in range(y.experts)]
        for slot, expert in enumerate(self.slots.tolist()):
            rank = slot // y.size
            if expert >= 0 and rank in self.copies[expert]:
                self.slots[slot] = -1  # of two copies on one rank the lower slot is kept
            elif expert >= 0:
                self.copies[expert].append(rank)
        known = [self.copy_set(expert, ranks) for expert, ranks in enumerate(self.copies)]
        self.cost = [cost for cost, _ in known]
        self.load = [load for _, load in known]
        self.excess = np.sum(self.load, axis=0) - y.mean[:, None]  # [K, R] over the mean

    def copy_set(self, expert: int, ranks: list[int]) -> tuple[int, Any]:
        key = (expert, *ranks)
        if key not in self.y.known:
            self.y.known[key] = self.y.copy_set(expert, ranks)
        return self.y.known[key]

    def objective(self) -> int:
        return sum(self.cost) + int((self.excess**2).sum())

    def new_copies(self) -> int:
        return sum(
            not self.y.was_on[expert, rank] for expert, ranks in enumerate(self.copies) for rank in ranks
        )

    def change(self, sets: dict[int, list[int]]) -> int:
        """Change of the objective when the experts of `sets` have their copies on other ranks."""
        cost, load = 0, np.zeros_like(self.excess)
        for expert, ranks in sets.items():
            new_cost, new_load = self.copy_set(expert, ranks)
            cost += new_cost - self.cost[expert]
            load = load + new_load - self.load[expert]
        return cost + int((load * (2 * self.excess + load)).sum())

    def added(self, sets: dict[int, list[int]]) -> int:
        """New copies that `sets` bring, less those that they take away."""
        return sum(
            int((~self.y.was_on[expert, ranks]).sum())
            - int((~self.y.was_on[expert, self.copies[expert]]).sum())
            for expert, ranks in sets.items()
        )

    def apply(self, sets: dict[int, list[int]]) -> None:
        for expert, ranks in sets.items():
            self.copies[expert] = ranks
            self.excess = self.excess - self.load[expert]
            self.cost[expert], self.load[expert] = self.copy_set(expert, ranks)
            self.excess = self.excess + self.load[expert]

    def moved(self, expert: int, drop: int | None, take: int | None) -> list[int]:
        ranks = {rank for rank in self.copies[expert] if rank != drop} | (
            {take} if take is not None else set()
        )
        return sorted(ranks)

    def sets_of(self, slot: int, move: Move) -> dict[int, list[int]]:
        """The copy sets after a move of the copy in `slot`."""
        _, kind, first, second = move
        here, expert = slot // self.y.size, int(self.slots[slot])
        if kind == 1:
            return {expert: self.moved(expert, here, None), first: self.moved(first, None, here)}
        other = int(self.slots[second])
        return {expert: self.moved(expert, here, first), other: self.moved(other, first, here)}

    def moves(self, slot: int) -> list[Move]:
        """Everything that the copy in a slot can do, with its change: swaps and copies of other experts."""
        y, expert, here = self.y, int(self.slots[slot]), slot // self.y.size
        if expert < 0:
            return []
        found: list[Move] = []
        for rank in range(y.ranks):
            if rank in self.copies[expert]:
                continue
            for other_slot in range(rank * y.size, (rank + 1) * y.size):
                other = int(self.slots[other_slot])
                if other >= 0 and here not in self.copies[other]:
                    found.append((0, 0, rank, other_slot))
        if len(self.copies[expert]) > 1:
            found += [(0, 1, other, 0) for other in range(y.experts) if here not in self.copies[other]]
        return [(self.change(self.sets_of(slot, move)), *move[1:]) for move in found]

    def make(self, slot: int, move: Move) -> Any:
        """Makes a move; returns which ranks' loads it changes, [R]."""
        before = self.excess
        sets = self.sets_of(slot, move)
        expert = int(self.slots[slot])
        if move[1] == 0:
            self.slots[slot], self.slots[move[3]] = self.slots[move[3]], expert
        else:
            self.slots[slot] = move[2]
        self.apply(sets)
        return (self.excess != before).any(axis=0)


def fill(search: Search, most: int | None) -> None:
    """Gives every free slot the copy that changes the objective by least.

    A copy's change is computed again only when it is the lowest known; ties: lowest expert, then rank. `most`:
    copies that may be new.
    """
    y = search.y
    room = [
        [p for p in range((r + 1) * y.size - 1, r * y.size - 1, -1) if search.slots[p] < 0]
        for r in range(y.ranks)
    ]

    def change(expert: int, rank: int) -> int:
        return search.change({expert: search.moved(expert, None, rank)})

    waiting = [
        (change(expert, rank), expert, rank)
        for expert in range(y.experts)
        for rank in range(y.ranks)
        if room[rank] and rank not in search.copies[expert]
    ]
    heapq.heapify(waiting)
    while waiting:
        _, expert, rank = heapq.heappop(waiting)
        if not room[rank] or rank in search.copies[expert]:
            continue
        if most is not None and not y.was_on[expert, rank] and search.new_copies() >= most:
            continue
        known = (change(expert, rank), expert, rank)
        if waiting and waiting[0] < known:
            heapq.heappush(waiting, known)
            continue
        search.slots[room[rank].pop()] = expert
        search.apply({expert: search.moved(expert, None, rank)})


def descend(search: Search, look: Any) -> None:
    """Rank after rank, slot after slot, each slot's best move at once, until no rank is left to look at.

    look: [R] ranks to look at, used up; a move adds those whose loads it changes.
    """
    y = search.y
    while look.any():
        for rank in range(y.ranks):
            if not look[rank]:
                continue
            look[rank] = False
            for slot in range(rank * y.size, (rank + 1) * y.size):
                best = min(search.moves(slot), default=(0, 0, 0, 0))
                if best[0] < 0:
                    look |= search.make(slot, best)


def kick(search: Search, kicks: int, seed: int) -> Search:
    """Leaves local optima: 2 to 4 forced moves, a descent nearby; what does not improve is undone."""
    y, random = search.y, Lcg(seed)
    best = Search(y, search.slots)
    for _ in range(kicks):
        search = Search(y, best.slots)
        look: Any = np.zeros(y.ranks, dtype=bool)
        for _ in range(2 + random.below(3)):
            slot = random.below(len(search.slots))
            look |= _force(search, slot, random.below(y.ranks))
        descend(search, look)
        if search.objective() < best.objective():
            best = search
    return best


def _force(search: Search, slot: int, rank: int) -> Any:
    """The best move of the copy in `slot` to `rank`, or if it is there, into a copy of another expert.

    Returns the ranks whose loads it changes, [R].
    """
    there = search.slots[slot] >= 0 and rank in search.copies[int(search.slots[slot])]
    moves = [move for move in search.moves(slot) if move[1] == there and (there or move[2] == rank)]
    return search.make(slot, min(moves)) if moves else np.zeros(search.y.ranks, dtype=bool)


def descend_within(search: Search, most: int) -> None:
    """The best move of all slots, again and again, as long as at most `most` copies are new."""
    while True:
        room = most - search.new_copies()
        candidates = [
            (move[0], slot, move)
            for slot in range(len(search.slots))
            for move in search.moves(slot)
            if move[0] < 0 and search.added(search.sets_of(slot, move)) <= room
        ]
        if not candidates:
            return
        _, slot, best = min(candidates)
        search.make(slot, best)


def single_copies(y: ReplicaLayer) -> Any:
    """One copy per expert, heaviest first, each to the lightest rank that has fewer than ceil(E/R); others free.

    Ties: the lowest expert; the rank with fewer copies, then the lowest.
    """
    most = -(-y.experts // y.ranks)
    slots = np.full(y.ranks * y.size, -1)
    filled: Any = np.zeros(y.ranks, dtype=np.int64)
    rank_load = np.zeros(y.ranks)
    for expert in np.argsort(-y.loads[0], kind="stable").tolist():
        open_ranks = [rank for rank in range(y.ranks) if filled[rank] < most]
        best = min(open_ranks, key=lambda rank: (rank_load[rank], filled[rank], rank))
        slots[best * y.size + filled[best]] = expert
        filled[best] += 1
        rank_load[best] += y.loads[0, expert]
    return slots


def solve_layer(problem: PlacementProblem, layer: int, kicks: int, start: Any, max_moves: int | None) -> Any:
    """Slots [P], -1 where a cap left one free; None where the layer has no traffic and stays.

    From the current slots; from `start`, at the last stage; and from single copies where there is neither or kicks
    follow. Ties: the first. Then kicked. The current placement when nothing is better than it and it has no expert
    twice on a rank.
    """
    stages = [y for stage in STAGE_WEIGHT if (y := to_integers(problem, layer, stage)) is not None]
    if not stages:
        return None
    current = None if problem.current is None else problem.current[layer]
    found = [] if current is None else [_search_from(stages, current)]
    if start is not None:
        found.append(_search_from(stages[-1:], start))
    if not found or kicks > 0:
        found.append(_search_from(stages, single_copies(stages[-1])))
    best = kick(min(found, key=Search.objective), kicks, seed=1)
    if current is None:
        return best.slots
    search = Search(stages[-1], current)
    if (search.slots == current).all() and search.objective() <= best.objective():
        return current
    if max_moves is None or best.new_copies() <= max_moves:
        return best.slots
    fill(search, max_moves)
    descend_within(search, max_moves)
    return search.slots


def _search_from(stages: list[ReplicaLayer], start: Any) -> Search:
    """All stages from one start: the balance weighs more in each, and the last one counts."""
    for y in stages:
        search = Search(y, start)
        fill(search, None)
        descend(search, np.ones(y.ranks, dtype=bool))
        start = search.slots
    return search


def slots_in_ranks(found: Any, current: Any, slots_per_rank: int) -> Any:
    """Slot map [P] of the copies found, those that stay in the slots that they are in.

    Of two copies of an expert on one rank the one in the lower slot stays. What comes takes the slots of experts
    that left, then those of second copies, ascending id into ascending slot; a second copy stays where nothing
    came for its slot.
    """
    slots = np.array(found if current is None else current, dtype=np.int32)
    for first in range(0, len(slots), slots_per_rank):
        row = range(first, first + slots_per_rank)
        held = sorted(int(found[p]) for p in row if found[p] >= 0)
        coming, free, second = list(held), [], []
        for p in row:
            expert = -1 if current is None else int(current[p])
            if expert in coming:
                coming.remove(expert)
            elif expert in held:
                second.append(p)
            else:
                free.append(p)
        for p, expert in zip(free + second, coming, strict=False):
            slots[p] = expert
    return slots


def solve(
    problem: PlacementProblem,
    kicks: int,
    *,
    start: Any = None,
    max_moves: int | None = None,
    time_budget: float | None = None,
) -> Any:
    """Slot map int32 [L, P] by method "portfolio" with spare slots. A time budget is not kept: never fast.

    start: [L, P] where the search begins too, or None.
    """
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    for layer in range(problem.num_layers):
        current = None if problem.current is None else problem.current[layer]
        found = solve_layer(problem, layer, kicks, None if start is None else start[layer], max_moves)
        if found is None:
            slots[layer] = (
                current if current is not None else np.arange(problem.num_slots) % problem.num_experts
            )
        else:
            slots[layer] = slots_in_ranks(found, current, problem.slots_per_rank)
    return slots
