"""Every method in plain numpy: the specification, bit for bit, of the compiled one in csrc/placement.

All arithmetic is float64 and every sum is an explicit loop in ascending order: `numpy.sum` adds pairwise and
would give other bits than a plain loop. Nothing here needs to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import portfolio_search
from .checks import EMPTY_BELOW
from .portfolio import Effort
from .problem import CALIBRATED, PlacementProblem, Weights


@dataclass(frozen=True)
class ScoreFactors:
    """What one unit of each term adds to the score of putting an expert on a rank.

    remote: per pick times distance. square: per pick squared. move: for leaving the current rank.
    """

    remote: float
    square: float
    move: float


def solve(problem: PlacementProblem, method: str) -> Any:
    """Slot map int32 [L, P] by `method`, one of "paper", "greedy" (both P = E only), "eplb" and "stay"."""
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    for layer in range(problem.num_layers):
        slots[layer] = solve_layer(problem, layer, method)
    return slots


def solve_portfolio(
    problem: PlacementProblem,
    effort: Effort,
    *,
    max_moves: int | None = None,
    time_budget: float | None = None,
) -> Any:
    """Slot map int32 [L, P] by method "portfolio", P = E. A time budget is not kept: this is never fast."""
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    for layer in range(problem.num_layers):
        slots[layer] = slots_of(
            problem, layer, portfolio_search.solve_layer(problem, layer, effort, max_moves)
        )
    return slots


def slots_of(problem: PlacementProblem, layer: int, home: Any | None) -> Any:
    """Slot map [P] of a layer from the rank of each expert [E]; None: the layer has no traffic and stays."""
    current = None if problem.current is None else problem.current[layer]
    if home is None:
        return identity(problem) if current is None else current
    held = [set(np.flatnonzero(home == rank).tolist()) for rank in range(problem.num_ranks)]
    return slots_in_ranks(held, current, problem.slots_per_rank)


def solve_layer(problem: PlacementProblem, layer: int, method: str) -> Any:
    current = None if problem.current is None else problem.current[layer]
    traffic = problem.traffic[layer]
    load = sum_in_order(traffic)
    total = float(sum_in_order(load[:, None])[0])
    if method == "stay" or total < EMPTY_BELOW:
        return identity(problem) if current is None else current
    if method == "eplb":
        held = pack_evenly(load, problem.num_ranks, problem.slots_per_rank)
    else:
        factors = score_factors(problem, total, method)
        held = place_by_score(traffic, load, total, problem, current, factors)
    return slots_in_ranks(held, current, problem.slots_per_rank)


def sum_in_order(rows: Any) -> Any:
    """Sum over the first axis, first row first."""
    total = np.zeros(rows.shape[1])
    for row in rows:
        total = total + row
    return total


def identity(problem: PlacementProblem) -> Any:
    """Slot p holds expert p mod E: the placement when there is neither traffic nor a current one."""
    return np.arange(problem.num_slots, dtype=np.int32) % problem.num_experts


def score_factors(problem: PlacementProblem, total: float, method: str) -> ScoreFactors:
    """SPEC section 3.1 for "paper", the marginals of J (section 3.2, one window) for "greedy"."""
    experts, ranks = problem.num_experts, problem.num_ranks
    if method == "paper":
        weights = problem.weights_for(CALIBRATED)
        mean_expert = total / experts
        return ScoreFactors(
            weights.alpha / mean_expert, weights.beta / (mean_expert * mean_expert), weights.gamma
        )
    weights = problem.weights_for(Weights())
    mean_rank = total / ranks
    return ScoreFactors(
        weights.alpha / total, weights.beta / (ranks * (mean_rank * mean_rank)), weights.gamma / experts
    )


def place_by_score(
    traffic: Any,
    load: Any,
    total: float,
    problem: PlacementProblem,
    current: Any,
    factors: ScoreFactors,
) -> list[set[int]]:
    """Experts of each rank: hottest expert first, each to the rank of lowest score that has a free slot.

    Equally hot experts go in ascending id. Equal scores: the rank that needs no migration, then the one with
    fewer filled slots, then the lowest one.
    """
    ranks, slots_per_rank = problem.num_ranks, problem.slots_per_rank
    home = np.full(problem.num_experts, -1)
    if current is not None:
        home[current] = np.arange(problem.num_slots) // slots_per_rank
    mean_rank = total / ranks
    rank_load = np.zeros(ranks)
    held: list[set[int]] = [set() for _ in range(ranks)]
    for expert in np.argsort(-load, kind="stable").tolist():
        remote = sum_in_order(traffic[:, expert, None] * problem.topology.distance)
        after = rank_load + load[expert] - mean_rank
        before = rank_load - mean_rank
        moved = (np.arange(ranks) != home[expert]) & (home[expert] >= 0)
        score = factors.remote * remote + factors.square * (after * after - before * before)
        score = score + factors.move * moved
        feasible = [rank for rank in range(ranks) if len(held[rank]) < slots_per_rank]
        best = min(feasible, key=lambda rank: (score[rank], moved[rank], len(held[rank]), rank))
        held[best].add(expert)
        rank_load[best] += load[expert]
    return held


def count_copies(load: Any, ranks: int, slots: int) -> Any:
    """Copies of each expert, [E]: each spare slot goes to the expert whose copies are the fullest.

    That makes the fullest copy as light as it can be. Never more copies than ranks. Ties: fewer copies, then
    the lowest id.
    """
    copies: Any = np.ones(len(load), dtype=np.int64)
    for _ in range(slots - len(load)):
        growing = [expert for expert in range(len(load)) if copies[expert] < ranks]
        fullest = min(growing, key=lambda e: (-(load[e] / copies[e]), copies[e], e))
        copies[fullest] += 1
    return copies


def pack_evenly(load: Any, ranks: int, slots_per_rank: int) -> list[set[int]]:
    """Experts of each rank, balance only: heaviest copy first, each to the lightest rank that can take it.

    A rank can take a copy when it has a free slot and no copy of that expert. Equally heavy copies go in
    ascending id; equally light ranks: fewer filled slots, then the lowest one.

    Until the last expert with several copies is placed, only the least filled of those ranks are considered.
    Up to rounding that is no restriction, because such copies are at least half as heavy as the fullest one and
    so fill the ranks row by row anyway; and with ranks filled row by row some rank without the expert has a
    free slot for each of its copies.
    """
    copies = count_copies(load, ranks, ranks * slots_per_rank)
    weight = load / copies
    order = np.argsort(-weight, kind="stable").tolist()
    rows_until = max((nth for nth, expert in enumerate(order) if copies[expert] > 1), default=-1)
    rank_load = np.zeros(ranks)
    held: list[set[int]] = [set() for _ in range(ranks)]
    for nth, expert in enumerate(order):
        for _ in range(copies[expert]):
            able = [r for r in range(ranks) if len(held[r]) < slots_per_rank and expert not in held[r]]
            if nth <= rows_until:
                least = min(len(held[rank]) for rank in able)
                able = [rank for rank in able if len(held[rank]) == least]
            best = min(able, key=lambda rank: (rank_load[rank], len(held[rank]), rank))
            held[best].add(expert)
            rank_load[best] += weight[expert]
    return held


def slots_in_ranks(held: list[set[int]], current: Any, slots_per_rank: int) -> Any:
    """Slot map [P] of the experts of each rank.

    An expert that stays on its rank keeps its slot there, so nothing is copied inside a rank (of two copies
    on one rank the one in the lower slot stays). The others fill the freed slots, ascending id into ascending
    slot.
    """
    slots: Any = np.full(len(held) * slots_per_rank, -1, dtype=np.int32)
    for rank, experts in enumerate(held):
        first = rank * slots_per_rank
        newcomers = set(experts)
        if current is not None:
            for slot in range(first, first + slots_per_rank):
                if int(current[slot]) in newcomers:
                    slots[slot] = current[slot]
                    newcomers.remove(int(current[slot]))
        freed = [slot for slot in range(first, first + slots_per_rank) if slots[slot] < 0]
        for slot, expert in zip(freed, sorted(newcomers), strict=True):
            slots[slot] = expert
    return slots
