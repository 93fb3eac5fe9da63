"""Random problems that are hard on ties and on rounding, and a naive evaluation to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from gimbal_kernels.placement import UNCALIBRATED, PlacementProblem, Weights
from gimbal_kernels.topology import Topology

WEIGHTS = (None, UNCALIBRATED, Weights(0.3, 7.7, 0.0), Weights(1.0, 4.0, 0.1), Weights(0.0, 1.0, 0.0))


def random_traffic(rng: np.random.Generator, kind: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Full of ties, ordinary, hot-skewed, as large as int64 goes, not integer, ties that only rounding breaks."""
    if kind == 0:
        return rng.integers(0, 3, shape)
    if kind == 1:
        return rng.integers(0, 1000, shape)
    if kind == 2:
        return rng.poisson(5 * np.exp(2 * rng.standard_normal(shape)))
    if kind == 3:
        return rng.integers(0, 2**63 - 1, shape)
    if kind == 4:
        return rng.integers(0, 4, shape) * rng.random(shape)
    return np.broadcast_to(rng.integers(1, 4, (shape[0], 1, shape[2])) * 0.1, shape).copy()


def random_distance(rng: np.random.Generator, kind: int, sources: int, ranks: int) -> np.ndarray:
    """Near or far, anything real, or the same numbers in another order for every rank."""
    if kind == 0:
        return rng.integers(0, 2, (sources, ranks))
    if kind == 1:
        return 3 * rng.random((sources, ranks))
    return rng.permuted(np.tile(0.1 * np.arange(1, sources + 1)[:, None], (1, ranks)), axis=0)


def random_slots(rng: np.random.Generator, layers: int, experts: int, total: int) -> np.ndarray:
    """[L, P] with every expert somewhere; spare copies anywhere, even twice on one rank."""
    spare = rng.integers(0, experts, (layers, total - experts))
    base = np.tile(np.arange(experts), (layers, 1))
    return rng.permuted(np.concatenate([base, spare], axis=1), axis=1)


def random_problems(count: int, *, seed: int, replicas: bool) -> Iterator[PlacementProblem]:
    rng = np.random.default_rng(seed)
    for i in range(count):
        ranks, slots_per_rank = int(rng.integers(1, 7)), int(rng.integers(1, 7))
        total = ranks * slots_per_rank
        experts = int(rng.integers(slots_per_rank, total + 1)) if replicas else total
        layers, sources = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        traffic = random_traffic(rng, i % 6, (layers, sources, experts))
        if i % 4 == 0:
            traffic[rng.integers(layers)] = 0
        distance = random_distance(rng, int(rng.integers(3)), sources, ranks)
        current = random_slots(rng, layers, experts, total) if i % 7 else None
        weights = WEIGHTS[int(rng.integers(len(WEIGHTS)))]
        yield PlacementProblem(traffic, Topology(distance), slots_per_rank, current, weights)


def naive_evaluation(problem: PlacementProblem, slots: np.ndarray, layer: int) -> dict[str, float]:
    """The formulas of `evaluate` pick by pick, in exact rational arithmetic."""
    traffic, distance = problem.traffic[layer], problem.topology.distance
    ranks, size = problem.num_ranks, problem.slots_per_rank
    load = [Fraction(0)] * ranks
    weighted = Fraction(0)
    for source in range(problem.num_sources):
        for expert in range(problem.num_experts):
            copies = [slot // size for slot in range(len(slots[layer])) if slots[layer][slot] == expert]
            near = min(distance[source, rank] for rank in copies)
            serving = [rank for rank in copies if distance[source, rank] == near]
            picks = Fraction(float(traffic[source, expert]))
            weighted += picks * Fraction(float(near))
            for rank in serving:
                load[rank] += picks / len(serving)
    total = sum(load)
    mean = total / ranks
    moves = 0
    if problem.current is not None:
        for rank in range(ranks):
            here = slice(rank * size, (rank + 1) * size)
            moves += len(set(slots[layer][here].tolist()) - set(problem.current[layer][here].tolist()))
    weights = problem.weights or Weights()
    comm = weighted / total if total else Fraction(0)
    imbalance = sum((x / mean - 1) ** 2 for x in load) / ranks if total else Fraction(0)
    cost = weights.alpha * float(comm) + weights.beta * float(imbalance)
    return {
        "comm": float(comm),
        "imbalance": float(imbalance),
        "max_over_mean": float(max(load) / mean) if total else 1.0,
        "moves": moves,
        "cost": cost + weights.gamma * moves / problem.num_experts,
    }


def ranks_of(slots: np.ndarray, slots_per_rank: int) -> list[list[int]]:
    """Experts of each rank of one layer, in slot order."""
    return np.asarray(slots).reshape(-1, slots_per_rank).tolist()
