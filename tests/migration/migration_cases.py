"""Random pairs of slot maps, and an independent optimum of the largest outgoing load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_kernels.topology import Topology


@dataclass(frozen=True)
class Case:
    old: np.ndarray
    new: np.ndarray
    nodes: np.ndarray
    topology: Topology

    @property
    def ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def size(self) -> int:
        return self.old.shape[1] // self.ranks


def random_slots(rng: np.random.Generator, layers: int, experts: int, total: int) -> np.ndarray:
    """[L, P] with every expert somewhere; spare copies anywhere, even twice on one rank."""
    spare = rng.integers(0, experts, (layers, total - experts))
    base = np.tile(np.arange(experts), (layers, 1))
    return rng.permuted(np.concatenate([base, spare], axis=1), axis=1).astype(np.int32)


def random_case(rng: np.random.Generator) -> Case:
    """With and without replicas, one node or several, everything moved or only a little."""
    nodes = int(rng.integers(1, 4))
    ranks, size = nodes * int(rng.integers(1, 4)), int(rng.integers(1, 7))
    total, layers = ranks * size, int(rng.integers(1, 4))
    experts = int(rng.integers(max(1, total // 4), total + 1))
    old = random_slots(rng, layers, experts, total)
    if rng.random() < 0.5:
        new = random_slots(rng, layers, experts, total)
    else:
        new = old.copy()
        for layer in range(layers):
            some = rng.choice(total, int(rng.integers(0, total + 1)), replace=False)
            new[layer, some] = new[layer, rng.permutation(some)]
    node_of_rank = np.arange(ranks) // (ranks // nodes)
    return Case(old, new, node_of_rank, Topology(np.ones((1, ranks))))


def swapped(rng: np.random.Generator, layers: int, experts: int, ranks: int, share: float) -> tuple:
    """One copy each, in order, and the same after `share` of the experts changed rank by pairwise swaps."""
    size = experts // ranks
    old = np.tile(np.arange(experts, dtype=np.int32), (layers, 1))
    new = old.copy()
    for layer in range(layers):
        free = list(rng.permutation(experts))
        for _ in range(round(experts * share / 2)):
            one = free.pop()
            partner = next((k for k, slot in enumerate(free) if slot // size != one // size), None)
            if partner is None:
                break
            other = free.pop(partner)
            new[layer, [one, other]] = new[layer, [other, one]]
    return old, new


def least_possible_load(candidates: list[list[int]], ranks: int) -> int:
    """The smallest K such that every need gets a candidate and nobody more than K, by matching with capacities."""
    limit = -(-len(candidates) // ranks)
    given: list[list[int]] = [[] for _ in range(ranks)]

    def place(need: int, seen: set[int]) -> bool:
        for rank in candidates[need]:
            if rank in seen:
                continue
            seen.add(rank)
            if len(given[rank]) < limit:
                given[rank].append(need)
                return True
            for k, other in enumerate(given[rank]):
                if place(other, seen):
                    given[rank][k] = need
                    return True
        return False

    for need in range(len(candidates)):
        while not place(need, set()):
            limit += 1
    return limit
