"""What a placement does with a window's traffic, for tables and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gimbal_kernels.placement import Placement, PlacementProblem


@dataclass(frozen=True, eq=False)
class PlacementFigures:
    """One placement under one window; picks go to the nearest copies, split evenly among equally near ones.

    placement: with its costs. served: float64 [L, S, P], picks of each source that each slot serves.
    """

    problem: PlacementProblem
    placement: Placement
    served: Any

    @property
    def rank_load(self) -> Any:
        """Picks served by each rank, [L, R]."""
        return self.pairs.sum(axis=1)

    @property
    def pairs(self) -> Any:
        """Picks from each source to each rank, [L, S, R]."""
        layers, sources, _ = self.served.shape
        return self.served.reshape(layers, sources, self.problem.num_ranks, -1).sum(axis=3)

    @property
    def remote_share(self) -> Any:
        """Share of picks served at a distance above 0, [L]; 0 in a layer without picks."""
        far = (self.pairs * (self.problem.topology.distance > 0)).sum(axis=(1, 2))
        total = self.served.sum(axis=(1, 2))
        return np.divide(far, total, out=np.zeros_like(total), where=total > 0)


def figures_of(problem: PlacementProblem, placement: Placement) -> PlacementFigures:
    """The figures of a placement of the problem."""
    slots = placement.slots.numpy()
    rank: Any = np.arange(problem.num_slots) // problem.slots_per_rank
    served: Any = np.zeros((problem.num_layers, problem.num_sources, problem.num_slots))
    for layer, experts in enumerate(slots):
        same = experts[:, None] == experts  # slots that hold the same expert
        for source in range(problem.num_sources):
            distance = problem.topology.distance[source, rank]
            nearest = np.where(same, distance, np.inf).min(axis=1)
            serves = distance == nearest
            sharing = (same & serves).sum(axis=1)
            served[layer, source] = problem.traffic[layer, source, experts] * serves / np.maximum(sharing, 1)
    return PlacementFigures(problem, placement, served)


def summary(figures: PlacementFigures) -> dict[str, float]:
    """Figures over layers with traffic, each layer weighted alike; moves are summed."""
    busy = figures.problem.traffic.any(axis=(1, 2))
    placement = figures.placement
    return {
        "remote_share": float(figures.remote_share[busy].mean()),
        "comm": float(placement.comm.numpy()[busy].mean()),
        "imbalance": float(placement.imbalance.numpy()[busy].mean()),
        "max_over_mean": float(placement.max_over_mean.numpy()[busy].mean()),
        "max_over_mean_worst": float(placement.max_over_mean.numpy()[busy].max()),
        "moves": int(placement.moves.sum()),
        "cost": float(placement.cost.numpy()[busy].mean()),
    }


def per_layer(figures: PlacementFigures) -> dict[str, list[Any]]:
    """The same per layer."""
    placement = figures.placement
    found = {
        name: getattr(placement, name).tolist() for name in ("comm", "imbalance", "max_over_mean", "cost")
    }
    return {
        "remote_share": figures.remote_share.tolist(),
        **found,
        "moves": placement.moves.tolist(),
    }


def relative_gap(cost: Any, bound: Any) -> Any:
    """(cost - bound)/cost, at least 0 and 0 where the cost is 0, [L]."""
    gap = np.divide(cost - bound, cost, out=np.zeros_like(cost), where=cost > 0)
    return np.maximum(gap, 0.0)
