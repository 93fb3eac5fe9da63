"""A certificate beside every answer: a lower bound on the cost of any placement (SPEC section 3.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import host
from .checks import EMPTY_BELOW
from .objective import window_weights
from .problem import PlacementProblem, Weights
from .replica_bound import bound_with_spare_slots
from .solve import place

ASCENT_STEPS = 400


def lower_bound(problem: PlacementProblem, *, lift: bool = True, nodes: int = 0) -> torch.Tensor:
    """No placement of a layer costs less than this, float64 [L]; see `evaluate` for the cost.

    Without spare slots: the Lagrangian dual over slots and loads at softmin prices. It is loose where a few
    experts are heavier than half a rank; the lift closes most of that. With history the loads are the weighted
    mean of the windows, which makes the bound a little looser. One slot per rank leaves an assignment problem:
    the compiled library solves it, and the bound is the least cost itself.

    With spare slots: each expert with the best number of copies for it out of the P slots, charged for remote
    picks, new copies and its drift term; imbalance is taken as free, but for what the heaviest expert cannot
    avoid. Valid and weaker; `lift` and `nodes` change nothing.

    Args:
        problem: see `PlacementProblem`.
        lift: add what heavy experts must cost beyond the dual.
        nodes: bound also up to so many nodes of a best-first search over undecided experts, per layer; 0: none.
            Both need the compiled library; without it the bound is the plain dual.

    Raises:
        ValueError: nodes negative or not an integer.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 0:
        raise ValueError(f"nodes: {nodes!r}; valid: an integer >= 0")
    if problem.num_slots > problem.num_experts:
        return torch.from_numpy(bound_with_spare_slots(problem))
    if host.status() != "ready":
        bound = np.array([_plain_dual(problem, layer) for layer in range(problem.num_layers)])
    else:
        upper = np.full(problem.num_layers, np.inf)
        if nodes > 0 and not problem.history:
            upper = place(problem).cost.numpy() - _drift_cost(problem)
        bound = host.bound(problem, upper, lift=lift, nodes=nodes)
    return torch.from_numpy(bound + _drift_cost(problem))


def _drift_cost(problem: PlacementProblem) -> Any:
    """Drift term of any placement with one copy per expert, times beta, [L]: every expert is on one rank."""
    loads = problem.window_loads()[0]
    total = loads.sum(axis=1)
    squares = np.divide(
        (loads**2).sum(axis=1), total**2, out=np.zeros_like(total), where=total >= EMPTY_BELOW
    )
    beta = problem.weights_for(Weights()).beta
    return beta * problem.drift**2 * problem.num_ranks * (1 - 1 / problem.num_ranks) * squares


def _plain_dual(problem: PlacementProblem, layer: int) -> float:
    """The dual at prices found by softmin ascent in float64."""
    loads = problem.window_loads()[:, layer]
    kept = loads.sum(axis=1) >= EMPTY_BELOW
    if not kept[0]:
        return 0.0
    weight = window_weights(len(loads))[kept]
    relative = loads[kept] * problem.num_ranks / loads[kept].sum(axis=1, keepdims=True)
    load = (weight / weight.sum()) @ relative
    chosen = problem.weights_for(Weights())
    traffic = problem.traffic[layer]
    cost = chosen.alpha / traffic.sum() * (problem.topology.distance.T @ traffic)
    if problem.current is not None:
        home: Any = np.empty(problem.num_experts, dtype=np.int64)
        home[problem.current[layer]] = np.arange(problem.num_slots) // problem.slots_per_rank
        moves = np.arange(problem.num_ranks)[:, None] != home
        cost = cost + chosen.gamma / problem.num_experts * moves
    return _ascend(cost, load, problem.slots_per_rank, chosen.beta / problem.num_ranks)


def _ascend(cost: Any, load: Any, size: int, b: float) -> float:
    """Best dual value seen. cost: [R, E]; load: [E] in mean rank loads; b: beta/R."""
    ranks, experts = cost.shape
    unit = max(float(cost.max()), b, 1e-300)
    cost, b = cost / unit, b / unit
    price, offset, price_mean, offset_mean = np.zeros((4, ranks))
    limit = 2 * b * ranks
    temperature, best = float(np.ptp(cost, axis=0).mean()) + 1e-9, -np.inf
    for _ in range(ASCENT_STEPS):
        priced = cost + offset[:, None] + price[:, None] * load
        lowest = priced.min(axis=0)
        curve = price**2 / (4 * b) if b > 0 else 0 * price
        terms = [lowest, -size * offset, -price, -curve]
        rounding = 1e-13 * sum(np.abs(term).sum() for term in terms)
        best = max(best, sum(float(term.sum()) for term in terms) - rounding)
        share = np.exp(np.maximum((lowest - priced) / temperature, -100))
        share /= share.sum(axis=0)
        over = share @ load - 1 - (price / (2 * b) if b > 0 else 0)
        price_mean = 0.9 * price_mean + 0.1 * over * experts / ranks / size
        offset_mean = 0.9 * offset_mean + 0.1 * (share.sum(axis=1) - size) / size
        price = np.clip(price + 2.1 * temperature * experts / ranks * price_mean, -limit, limit)
        offset = offset + 2.1 * temperature * offset_mean
        temperature *= 1e-3 ** (1 / ASCENT_STEPS)
    return best * unit
