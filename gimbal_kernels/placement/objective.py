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
    comm_sum, rank_load = serve_from_nearest(problem, copy_ranks(problem, slots))
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


def copy_ranks(problem: PlacementProblem, slots: Any) -> Any:
    """Ranks of each expert's copies in slot order, [L, E, K], K the most copies of one; padded with -1."""
    layers, total = slots.shape
    experts = problem.num_experts
    if layers == 0:
        return np.full((0, experts, 1), -1, dtype=np.int64)
    by_expert = np.argsort(slots, axis=1, kind="stable")
    expert = np.take_along_axis(slots, by_expert, axis=1)
    # Position of each copy among those of its expert: slots since the expert's first one in sorted order.
    position = np.arange(total)
    starts = np.concatenate([np.ones((layers, 1), dtype=bool), expert[:, 1:] != expert[:, :-1]], axis=1)
    nth = position - np.maximum.accumulate(np.where(starts, position, 0), axis=1)
    table = np.full((layers, experts, int(nth.max()) + 1), -1, dtype=np.int64)
    table[np.arange(layers)[:, None], expert, nth] = by_expert // problem.slots_per_rank
    return table


def serve_from_nearest(problem: PlacementProblem, table: Any) -> tuple[Any, Any]:
    """Sum of picks * distance [L] and picks served by each rank [L, R], copies at the ranks in `table`."""
    layers, ranks = problem.num_layers, problem.num_ranks
    exists = table >= 0
    comm = np.zeros(layers)
    rank_load = np.zeros(layers * ranks)
    cell = np.arange(layers)[:, None, None] * ranks + table
    for source in range(problem.num_sources):
        picks = problem.traffic[:, source]
        distance = np.where(exists, problem.topology.distance[source][table], np.inf)
        nearest = distance.min(axis=2)
        serves = distance == nearest[:, :, None]
        served = (picks / serves.sum(axis=2))[:, :, None] * serves
        comm += (picks * nearest).sum(axis=1)
        rank_load += np.bincount(cell[serves], weights=served[serves], minlength=layers * ranks)
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
