"""Tiny problems with spare slots, and the cost of the best of all their slot maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate
from gimbal_kernels.topology import Topology

SHAPES = ((4, 3, 2), (5, 4, 2), (6, 3, 3), (5, 3, 3))  # experts, ranks, slots per rank


@cache
def every_slot_map(experts: int, ranks: int, size: int) -> np.ndarray:
    """All slot maps with every expert somewhere and none twice on a rank, up to the order in a rank, [N, P]."""
    rows = list(combinations(range(experts), size))
    maps = (sum(chosen, ()) for chosen in product(rows, repeat=ranks))
    return np.array([row for row in maps if len(set(row)) == experts])


def tiny_problems(count: int, seed: int) -> Iterator[PlacementProblem]:
    """[1, S, E], with and without a current placement and drift; loads up to one expert above a rank's mean."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        experts, ranks, size = SHAPES[i % len(SHAPES)]
        maps = every_slot_map(experts, ranks, size)
        sources = int(rng.integers(1, 4))
        spread = rng.choice([0.5, 1.0, 1.5])
        traffic = 1 + rng.poisson(40 * np.exp(spread * rng.standard_normal((1, sources, experts))))
        distance = rng.integers(0, 2, (sources, ranks)) if i % 3 else 2 * rng.random((sources, ranks))
        current = maps[rng.integers(len(maps))][None] if i % 2 else None
        weights = Weights(1.0, float(rng.choice([1.0, 4.0, 20.0])), 0.1)
        drift = float(rng.choice([0.0, 0.5]))
        yield PlacementProblem(traffic, Topology(distance), size, current, weights, drift=drift)


def best_cost(problem: PlacementProblem) -> float:
    """The least cost of all slot maps that hold no expert twice on a rank."""
    maps = every_slot_map(problem.num_experts, problem.num_ranks, problem.slots_per_rank)
    many = replace(
        problem,
        traffic=np.repeat(problem.traffic, len(maps), axis=0),
        current=None if problem.current is None else np.repeat(problem.current, len(maps), axis=0),
        history=tuple(np.repeat(past, len(maps), axis=0) for past in problem.history),
    )
    return float(evaluate(many, maps).cost.min())
