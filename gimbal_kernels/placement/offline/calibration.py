"""Calibration of the paper's heuristic against the offline reference (arXiv 2606.15177; SPEC section 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..objective import evaluate
from ..problem import CALIBRATED, UNCALIBRATED, Placement, PlacementProblem, Weights
from ..solve import place
from .reference import ReferencePlacement, home_of, solve_reference

BETAS = (0.0, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
GAMMAS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Agreement:
    """How a placement compares with the reference, over all layers with traffic.

    agreement: share of experts on the same rank. agreement_moved: the same among the experts that the reference
    moves; None when it moves none. agreement_moved_class: there, on a rank that is as far from every source.
    comm_difference: comm over the reference's, minus 1. gap: (cost - bound)/cost with the reference's proven
    bound, costs and bounds added up over layers. comm, max_over_mean, moves: means per layer.
    """

    name: str
    weights: Weights | None
    agreement: float
    agreement_moved: float | None
    agreement_moved_class: float | None
    comm_difference: float
    gap: float
    comm: float
    max_over_mean: float
    moves: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """What `calibrate` found.

    rows: do nothing, the paper's weights before and after its calibration, the best of the grid by three
    measures, the other methods, the reference itself. grid: every point. per_layer: name of a row ->
    (agreement, comm_difference, moves), each [L].
    """

    reference: ReferencePlacement
    rows: tuple[Agreement, ...]
    grid: tuple[Agreement, ...]
    per_layer: dict[str, tuple[Any, Any, Any]]
    matching: Weights


def matching_weights(problem: PlacementProblem) -> Weights:
    """The weights at which method "paper" scores the marginals of the problem's own cost: (1, b*R/E, g).

    Its score of a whole placement is alpha*sum(picks*d)/b + beta*sum(load - mu)^2/b^2 + gamma*moves with b = T/E
    (SPEC section 3.1). Divided by E that is alpha*comm + beta*(E/R)*imbalance + gamma*moves/E: the cost of
    section 3.2 with beta*E/R in place of beta.
    """
    chosen = problem.weights_for(Weights())
    return Weights(chosen.alpha, chosen.beta * problem.num_ranks / problem.num_experts, chosen.gamma)


def objective_of(weights: Weights, *, num_experts: int, num_ranks: int) -> Weights:
    """The other way round: the weights of the cost whose marginals method "paper" scores at `weights`."""
    return Weights(weights.alpha, weights.beta * num_experts / num_ranks, weights.gamma)


def calibrate(
    problem: PlacementProblem,
    *,
    betas: Sequence[float] = BETAS,
    gammas: Sequence[float] = GAMMAS,
    time_limit: float = 30.0,
    gap: float = 1e-4,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Compares method "paper" on a grid of weights with the exact placement for the problem's own weights.

    alpha is 1 throughout: the method compares scores, so only the ratios of the three weights matter.

    Args:
        problem: traffic, topology, current placement, and the weights of the cost that the reference minimises.
        betas, gammas: the grid, in the units of method "paper".
        time_limit, gap: of the reference, as in `solve_reference`.
        progress: called with a line of text before each longer step.

    Raises:
        ValueError: spare slots, no current placement, no traffic, or an empty grid.
    """
    if problem.current is None:
        raise ValueError("problem: no current placement; valid: one, moves are counted from it")
    if not problem.traffic.any():
        raise ValueError("problem: no traffic in any layer; valid: at least one layer with picks")
    if not betas or not gammas:
        raise ValueError("betas, gammas: empty; valid: at least one number each")
    say = progress or (lambda text: None)
    say(f"exact reference, {problem.num_layers} layers")
    reference = solve_reference(problem, time_limit=time_limit, gap=gap)
    say(f"grid of {len(betas) * len(gammas)} weights")
    compare = _Comparison(problem, reference)
    grid = []
    for gamma in gammas:
        for beta in betas:
            weights = Weights(1.0, beta, gamma)
            grid.append(compare.row(_name(weights), _paper(problem, weights), weights))
    matching = matching_weights(problem)
    named = {
        "do nothing": (place(problem, method="stay"), None),
        "paper, uncalibrated": (_paper(problem, UNCALIBRATED), UNCALIBRATED),
        "paper, calibrated": (_paper(problem, CALIBRATED), CALIBRATED),
        "paper, matching": (_paper(problem, matching), matching),
    }
    for name, best in best_of(grid).items():
        named[name] = (_paper(problem, best.weights), best.weights)
    for method in ("eplb", "greedy", "portfolio"):
        named[method] = (place(problem, method=method), None)
    named["reference"] = (reference.placement, None)
    rows = tuple(compare.row(name, placement, weights) for name, (placement, weights) in named.items())
    per_layer = {name: compare.per_layer(placement) for name, (placement, _) in named.items()}
    return Calibration(reference, rows, tuple(grid), per_layer, matching)


def best_of(grid: Sequence[Agreement]) -> dict[str, Agreement]:
    """The grid's best by agreement, by agreement on moved experts, by cost. Ties: lower gap, then first."""
    found = {
        "grid, best agreement": min(grid, key=lambda row: (-row.agreement, row.gap)),
        "grid, best cost": min(grid, key=lambda row: row.gap),
    }
    if grid[0].agreement_moved is not None:
        best = min(grid, key=lambda row: (-(row.agreement_moved or 0.0), row.gap))
        found["grid, best on moved experts"] = best
    return found


def _name(weights: Weights) -> str:
    return f"({weights.alpha:g}, {weights.beta:g}, {weights.gamma:g})"


def _paper(problem: PlacementProblem, weights: Weights | None) -> Placement:
    """Method "paper" at `weights`, evaluated under the problem's own."""
    return evaluate(problem, place(replace(problem, weights=weights), method="paper").slots)


class _Comparison:
    """The reference's ranks, and what placements are compared by."""

    def __init__(self, problem: PlacementProblem, reference: ReferencePlacement) -> None:
        self.problem, self.reference = problem, reference
        self.busy = problem.traffic.any(axis=(1, 2))
        self.home = self._homes(reference.placement.slots.numpy())
        self.moved = self.home != self._homes(problem.current)
        distance = problem.topology.distance.T
        _, self.rank_class = np.unique(distance, axis=0, return_inverse=True)
        self.rank_class = self.rank_class.ravel()

    def _homes(self, slots: Any) -> Any:
        return np.stack([home_of(row, self.problem.slots_per_rank) for row in slots])

    def row(self, name: str, found: Placement, weights: Weights | None) -> Agreement:
        home, busy = self._homes(found.slots.numpy()), self.busy
        same, moved = (home == self.home)[busy], self.moved[busy]
        alike = (self.rank_class[home] == self.rank_class[self.home])[busy]
        cost, bound = float(found.cost.numpy()[busy].sum()), float(self.reference.bound.numpy()[busy].sum())
        comm, best_comm = found.comm.numpy()[busy].mean(), self.reference.placement.comm.numpy()[busy].mean()
        return Agreement(
            name=name,
            weights=weights,
            agreement=float(same.mean()),
            agreement_moved=float(same[moved].mean()) if moved.any() else None,
            agreement_moved_class=float(alike[moved].mean()) if moved.any() else None,
            comm_difference=float(comm / best_comm - 1) if best_comm > 0 else 0.0,
            gap=(cost - bound) / cost if cost > 0 else 0.0,
            comm=float(comm),
            max_over_mean=float(found.max_over_mean.numpy()[busy].mean()),
            moves=float(found.moves.numpy()[busy].mean()),
        )

    def per_layer(self, found: Placement) -> tuple[Any, Any, Any]:
        """(agreement, comm_difference, moves) of each layer."""
        same = (self._homes(found.slots.numpy()) == self.home).mean(axis=1)
        best = self.reference.placement.comm.numpy()
        comm = found.comm.numpy()
        difference = np.divide(comm, best, out=np.ones_like(comm), where=best > 0) - 1
        return same, difference, found.moves.numpy()
