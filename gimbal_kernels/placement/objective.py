"""What a slot map costs under a problem's traffic (SPEC sections 3.2 and 4, one window)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .checks import EMPTY_BELOW
from .problem import Placement, PlacementProblem, Weights


def evaluate(problem: PlacementProblem, slots: Any) -> Placement:
    """The cost of a slot map, per layer.

    Picks of (source, expert) are served by the nearest copies of the expert, evenly split among copies that
    are equally near. With T picks in the layer, rank loads `load` and their mean `mu`:

    - comm = (1/T) * sum of picks * distance, in remote picks per pick
    - imbalance = (1/R) * sum over ranks of (load/mu - 1)^2
    - max_over_mean = max(load)/mu
    - moves = (rank, expert) pairs that are new; a second copy on a rank that has one costs no transfer and is
      not counted. 0 without a current placement.
    - cost = alpha*comm + beta*imbalance + gamma*moves/E

    A layer without traffic has comm 0, imbalance 0 and max_over_mean 1.

    Args:
        problem: traffic, topology, current placement and weights (`Weights()` when the problem has none).
        slots: [L, P] integers; every expert needs at least one slot.

    Raises:
        ValueError: wrong shape or dtype, experts out of range or without a slot.
    """
    slots = problem.check_slots(slots, "slots")
    comm_sum, rank_load = serve_from_nearest(problem, slots)
    total = rank_load.sum(axis=1)
    empty = total < EMPTY_BELOW
    safe_total = np.where(empty, 1.0, total)
    relative = np.where(empty[:, None], 1.0, rank_load * problem.num_ranks / safe_total[:, None])
    comm = np.where(empty, 0.0, comm_sum / safe_total)
    imbalance = np.mean((relative - 1.0) ** 2, axis=1)
    moves = count_moves(problem, slots)
    weights = problem.weights_for(Weights())
    cost = weights.alpha * comm + weights.beta * imbalance + weights.gamma * moves / problem.num_experts
    return Placement(
        slots=torch.from_numpy(slots),
        cost=torch.from_numpy(cost),
        comm=torch.from_numpy(comm),
        imbalance=torch.from_numpy(imbalance),
        max_over_mean=torch.from_numpy(relative.max(axis=1)),
        moves=torch.from_numpy(moves),
    )


def serve_from_nearest(problem: PlacementProblem, slots: Any) -> tuple[Any, Any]:
    """Sum of picks * distance [L] and picks served by each rank [L, R], each pick by its nearest copies."""
    layers, experts, ranks = problem.num_layers, problem.num_experts, problem.num_ranks
    # All copies of all layers in one row, those of one (layer, expert) side by side: each has at least one.
    pair = (np.arange(layers)[:, None] * experts + slots).ravel()
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    first_copy = np.searchsorted(pair, np.arange(layers * experts))
    layer, slot = np.divmod(order, problem.num_slots)
    rank = slot // problem.slots_per_rank
    cell = layer * ranks + rank
    comm = np.zeros(layers)
    rank_load = np.zeros(layers * ranks)
    for source in range(problem.num_sources):
        picks = problem.traffic[:, source].ravel()
        distance = problem.topology.distance[source, rank]
        nearest = np.minimum.reduceat(distance, first_copy)
        serves = distance == nearest[pair]
        servers = np.add.reduceat(serves, first_copy, dtype=np.int64)
        rank_load += np.bincount(cell, weights=(picks / servers)[pair] * serves, minlength=layers * ranks)
        comm += (picks * nearest).reshape(layers, experts).sum(axis=1)
    return comm, rank_load.reshape(layers, ranks)


def count_moves(problem: PlacementProblem, slots: Any) -> Any:
    """Copies that are new on their rank, int64 [L]."""
    layers, experts = problem.num_layers, problem.num_experts
    if problem.current is None:
        return np.zeros(layers, dtype=np.int64)
    rank: Any = np.arange(problem.num_slots) // problem.slots_per_rank
    row = np.arange(layers)[:, None]
    holds: Any = np.zeros((2, layers, problem.num_ranks, experts), dtype=bool)
    holds[0, row, rank, problem.current] = True
    holds[1, row, rank, slots] = True
    return (holds[1] & ~holds[0]).sum(axis=(1, 2)).astype(np.int64)
