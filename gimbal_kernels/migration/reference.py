"""The planner in plain Python: the specification that the compiled one is compared with, byte for byte."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np


def align(old: Any, new: Any, ranks: int) -> tuple[Any, list[list[int]], list[list[int]]]:
    """Slots that keep what they hold, and what has to come from where.

    An expert that stays on its rank keeps its lowest slots; newcomers fill the freed slots, ascending id into
    ascending slot. The first copy on a rank that had none arrives by transfer, any further one is copied
    inside the rank from the lowest slot that already has it.

    Args:
        old, new: int32 [L, P].
        ranks: R, a divisor of P.

    Returns:
        target [L, P]; needs, rows (layer, expert, destination slot) in ascending (layer, slot); local copies,
        rows (layer, expert, source slot, destination slot) in the same order.
    """
    layers, total = old.shape
    size = total // ranks
    target = old.copy()
    needs: list[list[int]] = []
    copies: list[list[int]] = []
    for layer in range(layers):
        for first in range(0, total, size):
            here = range(first, first + size)
            wanted = Counter(new[layer, first : first + size].tolist())
            home: dict[int, int] = {}
            free = []
            for slot in here:
                expert = int(old[layer, slot])
                if wanted[expert] > 0:
                    wanted[expert] -= 1
                    home.setdefault(expert, slot)
                else:
                    free.append(slot)
            for slot, expert in zip(free, sorted(wanted.elements()), strict=True):
                target[layer, slot] = expert
                if expert in home:
                    copies.append([layer, expert, home[expert], slot])
                else:
                    home[expert] = slot
                    needs.append([layer, expert, slot])
    return target, needs, copies


def choose_sources(old: Any, needs: list[list[int]], ranks: int, node_of_rank: Any) -> list[int]:
    """The sending rank of every need.

    Candidates are the holders on the destination's node, or all holders where the node has none. Needs with
    few candidates choose first (then in order), each the least loaded candidate, ties the lowest rank. Then,
    while a chain of re-assignments from the most loaded rank (ties the lowest) ends at a rank with at least
    two fewer, the shortest such chain is applied. Without such a chain the ranks that the most loaded one can
    reach carry at least its load less one and only they can send what they send, so the largest load is
    the least possible (optimal semi-matchings: Harvey, Ladner, Lovász, Tamir 2006).
    """
    size = old.shape[1] // ranks
    holders: dict[tuple[int, int], list[int]] = {}
    for layer, row in enumerate(old.tolist()):
        for slot, expert in enumerate(row):
            known = holders.setdefault((layer, expert), [])
            if not known or known[-1] != slot // size:
                known.append(slot // size)
    candidates = []
    for layer, expert, slot in needs:
        everyone = holders[layer, expert]
        node = node_of_rank[slot // size]
        candidates.append([rank for rank in everyone if node_of_rank[rank] == node] or everyone)
    load = [0] * ranks
    chosen = [0] * len(needs)
    for i in sorted(range(len(needs)), key=lambda i: len(candidates[i])):
        chosen[i] = min(candidates[i], key=lambda rank: (load[rank], rank))
        load[chosen[i]] += 1
    flexible = [i for i, ranks_of in enumerate(candidates) if len(ranks_of) > 1]
    while _shift_one(candidates, flexible, chosen, load):
        pass
    return chosen


def _shift_one(candidates: list[list[int]], flexible: list[int], chosen: list[int], load: list[int]) -> bool:
    """Applies the shortest chain that takes one transfer from the most loaded rank; False if there is none."""
    start = max(range(len(load)), key=lambda rank: (load[rank], -rank))
    edges: dict[int, dict[int, int]] = {}
    for i in flexible:
        for rank in candidates[i]:
            if rank != chosen[i]:
                edges.setdefault(chosen[i], {}).setdefault(rank, i)
    came_from: dict[int, tuple[int, int]] = {start: (start, -1)}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for rank, i in sorted(edges.get(here, {}).items()):
            if rank in came_from:
                continue
            came_from[rank] = (here, i)
            if load[rank] <= load[start] - 2:
                load[start] -= 1
                load[rank] += 1
                while rank != start:
                    before, moved = came_from[rank]
                    chosen[moved] = rank
                    rank = before
                return True
            queue.append(rank)
    return False


def colour(sources: Any, destinations: Any, ranks: int) -> tuple[list[int], int]:
    """Rounds such that no rank sends twice or receives twice in one round, as few as possible.

    The edges of a bipartite multigraph (senders, receivers) are coloured with as many colours as the largest
    degree (König 1916). In order of the transfers: the lowest colour free at both ends; where there is none,
    the lowest free at the sender, after swapping two colours along the path that blocks it at the receiver.

    Returns:
        the round of each transfer, and the number of rounds.
    """
    if len(sources) == 0:
        return [], 0
    rounds = int(max(np.bincount(sources).max(), np.bincount(destinations).max()))
    edges = _Edges(sources, destinations, ranks, rounds)
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        common = edges.free_out[source] & edges.free_in[destination]
        if common:
            edges.paint(i, _lowest(common))
        else:
            chosen = _lowest(edges.free_out[source])
            edges.swap_path(destination, chosen, _lowest(edges.free_in[destination]))
            edges.paint(i, chosen)
    return edges.colours, rounds


class _Edges:
    """Transfers coloured so far; per rank, which transfer has which colour, and the free colours as bits."""

    def __init__(self, sources: Any, destinations: Any, ranks: int, rounds: int) -> None:
        self.ends = list(zip(map(int, sources), map(int, destinations), strict=True))
        self.colours = [-1] * len(self.ends)
        self.free_out = [(1 << rounds) - 1] * ranks
        self.free_in = list(self.free_out)
        self.sent: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.received: list[dict[int, int]] = [{} for _ in range(ranks)]

    def paint(self, i: int, colour: int) -> None:
        source, destination = self.ends[i]
        self.colours[i] = colour
        self.sent[source][colour] = self.received[destination][colour] = i
        self.free_out[source] &= ~(1 << colour)
        self.free_in[destination] &= ~(1 << colour)

    def erase(self, i: int) -> None:
        source, destination = self.ends[i]
        colour = self.colours[i]
        del self.sent[source][colour], self.received[destination][colour]
        self.free_out[source] |= 1 << colour
        self.free_in[destination] |= 1 << colour

    def swap_path(self, destination: int, first: int, second: int) -> None:
        """Swaps two colours along the path that starts with colour `first` at a receiver."""
        path = []
        at, colour, receiving = destination, first, True
        while (i := (self.received if receiving else self.sent)[at].get(colour)) is not None:
            path.append((i, first + second - colour))
            at = self.ends[i][0 if receiving else 1]
            colour, receiving = first + second - colour, not receiving
        for i, _ in path:
            self.erase(i)
        for i, colour in path:
            self.paint(i, colour)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
