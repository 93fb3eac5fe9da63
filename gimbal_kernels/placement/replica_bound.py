"""Lower bound on the cost of any placement with spare slots (SPEC sections 3.4 and 4)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from .checks import EMPTY_BELOW
from .objective import window_weights
from .problem import PlacementProblem, Weights
from .two_level import ranks_per_node

# Up to so many classes of equally distant ranks the sets that copies can cover are tried one by one; and up to so
# many, together with the new copies that each set takes.
ENUMERATED_CLASSES = 10
JOINT_CLASSES = 6


def bound_with_spare_slots(problem: PlacementProblem) -> Any:
    """No slot map of a layer costs less, float64 [L].

    Relaxed: which ranks copies share, and that ranks have equally many slots. What is left adds up over experts,
    coupled only by the P slots: the cost of expert e with n copies is at least

        alpha/T * (remote picks with the best n copies)  +  gamma/E * (new copies that these need)
        + beta*sigma^2/(R*mu^2) * w_e^2 * (1/n - 1/R)        its drift term: squares are least when spread evenly
        + for the heaviest expert, the imbalance that n copies cannot help: n ranks carry w_e together

    and the price of a slot shares the slots out (`_share_out`). Imbalance between ranks is taken as free otherwise.
    """
    bound: Any = np.zeros(problem.num_layers)
    for layer in range(problem.num_layers):
        if problem.traffic[layer].sum() >= EMPTY_BELOW:
            bound[layer] = _share_out(_cost_by_copies(problem, layer), problem.num_slots)
    return bound


def _cost_by_copies(problem: PlacementProblem, layer: int) -> Any:
    """Least cost of each expert with 1, 2 .. R copies, or less, [E, R]."""
    chosen, ranks = problem.weights_for(Weights()), problem.num_ranks
    load = problem.traffic[layer].sum(axis=0)
    total = load.sum()
    relative = load * ranks / total
    copies = np.arange(1, ranks + 1)
    cost = _remote_and_moves(problem, layer, chosen.alpha / total, chosen.gamma / problem.num_experts)
    square = chosen.beta * problem.drift**2 / ranks
    cost = cost + square * relative[:, None] ** 2 * (1 / copies - 1 / ranks)
    heaviest = int(relative.argmax())
    over = np.maximum(0.0, relative[heaviest] - copies)
    rest = np.maximum(1, ranks - copies)  # over is 0 where no rank is left
    share = _weight_of_this_window(problem, layer)
    cost[heaviest] += chosen.beta * share / ranks * (over**2 / copies + over**2 / rest)
    return cost


def _weight_of_this_window(problem: PlacementProblem, layer: int) -> float:
    totals = problem.window_loads()[:, layer].sum(axis=1)
    weight = window_weights(len(totals)) * (totals >= EMPTY_BELOW)
    return float(weight[0] / weight.sum())


def _remote_and_moves(problem: PlacementProblem, layer: int, remote: float, move: float) -> Any:
    """Least cost of remote picks and new copies, [E, R]; remote: of a pick times distance, move: of a new copy."""
    classes, of_rank = np.unique(problem.topology.distance, axis=1, return_inverse=True)
    of_rank = of_rank.ravel()
    count, ranks = classes.shape[1], problem.num_ranks
    if problem.current is None or move == 0:
        return remote * remote_by_copies(problem, layer)
    held: Any = np.zeros((problem.num_experts, count), dtype=np.int64)  # copies now, by class
    rank: Any = np.arange(problem.num_slots) // problem.slots_per_rank
    pairs = np.unique(np.stack([problem.current[layer], rank]), axis=1)
    np.add.at(held, (pairs[0], of_rank[pairs[1]]), 1)
    copies = np.arange(1, ranks + 1)
    if count > JOINT_CLASSES:
        new = np.maximum(0, copies - held.sum(axis=1)[:, None])
        return remote * remote_by_copies(problem, layer) + move * new
    cost = np.full((problem.num_experts, ranks), np.inf)
    for size in range(1, count + 1):
        for covered in map(list, combinations(range(count), size)):
            picks = remote * (classes[:, covered].min(axis=1) @ problem.traffic[layer])
            missing = (held[:, covered] == 0).sum(axis=1)[:, None]
            new = np.maximum(missing, copies - held[:, covered].sum(axis=1)[:, None])
            cost = np.where(copies >= size, np.minimum(cost, picks[:, None] + move * new), cost)
    return cost


def remote_by_copies(problem: PlacementProblem, layer: int) -> Any:
    """Least sum of picks * distance of each expert with 1, 2 .. R copies, or less, [E, R]."""
    picks = problem.traffic[layer]
    classes = np.unique(problem.topology.distance, axis=1)
    count, ranks = classes.shape[1], problem.num_ranks
    remote: Any = np.empty((problem.num_experts, ranks))
    if count <= ENUMERATED_CLASSES:
        for copies in range(1, ranks + 1):
            sets = combinations(range(count), copies) if copies <= count else [tuple(range(count))]
            near = np.stack([classes[:, chosen].min(axis=1) for chosen in map(list, sets)])
            remote[:, copies - 1] = (near @ picks).min(axis=0)
        return remote
    return np.maximum(_remote_by_service(classes, picks, ranks), _remote_by_node(problem, layer))


def _remote_by_node(problem: PlacementProblem, layer: int) -> Any:
    """As `remote_by_copies`, every rank as near as the nearest of its node; 0 where there are too many nodes."""
    size = ranks_per_node(problem.topology)
    if size is None or problem.num_ranks // size > ENUMERATED_CLASSES:
        return 0.0
    near = problem.topology.distance.reshape(problem.num_sources, -1, size).min(axis=2)
    nodes = near.shape[1]
    least = []
    for copies in range(1, nodes + 1):
        covered = np.stack(
            [near[:, chosen].min(axis=1) for chosen in map(list, combinations(range(nodes), copies))]
        )
        least.append((covered @ problem.traffic[layer]).min(axis=0))
    return np.stack(least + [least[-1]] * (problem.num_ranks - nodes), axis=1)


def _remote_by_service(classes: Any, picks: Any, ranks: int) -> Any:
    """As `remote_by_copies`: a copy is nearest to a few sources, the others pay their second least distance."""
    remote: Any = np.empty((picks.shape[1], ranks))
    ordered = np.sort(classes, axis=1)
    least = ordered[:, 0]
    above = np.where(classes > least[:, None], classes, np.inf).min(axis=1)
    extra = np.sort(np.where(np.isfinite(above), above - least, 0.0)[:, None] * picks, axis=0)[::-1]
    served = int((classes == least[:, None]).sum(axis=0).max())
    for copies in range(1, ranks + 1):
        remote[:, copies - 1] = least @ picks + extra[copies * served :].sum(axis=0)
    return remote


def _share_out(cost: Any, slots: int) -> float:
    """Lower bound on the sum of cost[e, n_e - 1] over all n_e >= 1 that add up to `slots` at most.

    Lagrangian dual in the price of a slot, by bisection: valid at every price, best where the copies just fit.
    """
    copies = np.arange(1, cost.shape[1] + 1)
    low, high = 0.0, float(cost.max()) + 1e-300
    best = -np.inf
    for _ in range(60):
        price = (low + high) / 2
        priced = cost + price * copies
        best = max(best, float(priced.min(axis=1).sum()) - price * slots)
        if int(copies[priced.argmin(axis=1)].sum()) > slots:
            low = price
        else:
            high = price
    free = float(cost.min(axis=1).sum())  # price 0
    return max(best, free) - 1e-12 * float(cost.max(axis=1).sum())
