"""The exact solver that heuristics are measured against: one mixed-integer program per layer (SPEC section 3.4)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..checks import EMPTY_BELOW, check_number
from ..objective import drift_term, evaluate, load_by_expert, window_weights
from ..problem import Placement, PlacementProblem, Weights
from ..reference import slots_in_ranks
from ..solve import place
from .highs import INFINITY, Program, assignment_columns

# Tangents per rank at the start: half of them within NEAR of the mean load, where the optimum is.
TANGENTS = 50
NEAR = 0.12
# Rounds of solving and cutting; what is left after so many is seen in the gap.
MAX_ROUNDS = 30
# HiGHS keeps to its constraints up to about 1e-6.
SOLVER_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class ReferencePlacement:
    """The best placement found and what is proven about it.

    bound: float64 [L], no placement costs less. gap: float64 [L], (cost - bound)/cost, 0 where the cost is 0.
    seconds: float64 [L] spent on each layer.
    """

    placement: Placement
    bound: torch.Tensor
    gap: torch.Tensor
    seconds: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerModel:
    """cost = (linear[r, e] on chosen places) + sum over windows k and ranks of weight[k] * (load - 1)^2 + constant.

    linear: [R, E]. loads: [K, E] in mean rank loads. weight: [K], beta/R times the window's weight.
    """

    linear: Any
    loads: Any
    weight: Any
    constant: float

    def rank_loads(self, home: Any) -> Any:
        """[K, R]; home: [E] ranks."""
        return np.stack([np.bincount(home, weights=row, minlength=len(self.linear)) for row in self.loads])

    def cost(self, home: Any) -> float:
        uneven = ((self.rank_loads(home) - 1.0) ** 2).sum(axis=1)
        linear = self.linear[home, np.arange(len(home))].sum()
        return float(linear + self.weight @ uneven + self.constant)


def solve_reference(
    problem: PlacementProblem, *, time_limit: float = 30.0, gap: float = 1e-4, threads: int = 1
) -> ReferencePlacement:
    """The placement of lowest cost, layer by layer, with a proof of how far from the optimum it can be.

    The squared rank loads are replaced by tangents from below, so that HiGHS solves a mixed-integer linear
    program whose bound holds for the true cost as well. Tangents are added at the loads that come out, and the
    program is solved again, until the true cost is within `gap` of the bound (outer approximation; Duran and
    Grossmann, 1986). It starts from method "portfolio", whose placement comes back where nothing better exists.

    Slow: seconds to minutes per layer, for offline comparison. The time limit makes results depend on the
    machine; without reaching it they do not.

    Args:
        problem: one slot per expert, at most as many as HiGHS can handle in the time.
        time_limit: seconds per layer. When it ends the best placement so far is returned, and `gap` says what
            is not proven.
        gap: relative gap at which a layer is done.
        threads: of HiGHS.

    Raises:
        ValueError: spare slots, or a time limit, gap or number of threads that is not positive.
        RuntimeError: HiGHS contradicts itself.
    """
    if problem.num_slots != problem.num_experts:
        raise ValueError(
            f"problem: {problem.num_slots} slots for {problem.num_experts} experts; "
            "valid for the offline reference: one slot per expert"
        )
    for name, value in (("time_limit", time_limit), ("gap", gap), ("threads", threads)):
        check_number(value, name)
        if value <= 0:
            raise ValueError(f"{name}: {value}; valid: a number > 0")
    slots = place(problem).slots.numpy().copy()
    bound: Any = np.zeros(problem.num_layers)
    seconds: Any = np.zeros(problem.num_layers)
    for layer in range(problem.num_layers):
        if problem.traffic[layer].sum() < EMPTY_BELOW:
            bound[layer] = np.inf  # replaced by the cost below: an empty layer stays as it is
            continue
        began = time.perf_counter()
        model = layer_model(problem, layer, slots)
        home = home_of(slots[layer], problem.slots_per_rank)
        home, bound[layer] = _solve_layer(model, home, problem.slots_per_rank, time_limit, gap, threads)
        current = None if problem.current is None else problem.current[layer]
        held = [set(np.flatnonzero(home == rank).tolist()) for rank in range(problem.num_ranks)]
        slots[layer] = slots_in_ranks(held, current, problem.slots_per_rank)
        seconds[layer] = time.perf_counter() - began
    placement = evaluate(problem, slots)
    cost = placement.cost.numpy()
    bound = np.minimum(bound, cost)
    left = np.divide(cost - bound, cost, out=np.zeros_like(cost), where=cost > 0)
    return ReferencePlacement(
        placement, torch.from_numpy(bound), torch.from_numpy(left), torch.from_numpy(seconds)
    )


def home_of(slots: Any, slots_per_rank: int) -> Any:
    """Rank of each expert [E], from a layer's slots [P] with one slot per expert."""
    home: Any = np.empty(len(slots), dtype=np.int64)
    home[slots] = np.arange(len(slots)) // slots_per_rank
    return home


def layer_model(problem: PlacementProblem, layer: int, slots: Any) -> LayerModel:
    """The cost of `evaluate` for placements with one copy per expert; slots: [L, P], any of them."""
    weights = problem.weights_for(Weights())
    loads = problem.window_loads()[:, layer]
    kept = loads.sum(axis=1) >= EMPTY_BELOW
    share = window_weights(len(loads))[kept]
    relative = loads[kept] * problem.num_ranks / loads[kept].sum(axis=1, keepdims=True)
    traffic = problem.traffic[layer]
    linear = weights.alpha / traffic.sum() * (problem.topology.distance.T @ traffic)
    if problem.current is not None:
        home = home_of(problem.current[layer], problem.slots_per_rank)
        moved = np.arange(problem.num_ranks)[:, None] != home
        linear = linear + weights.gamma / problem.num_experts * moved
    constant = 0.0
    if problem.drift > 0:  # the same for every placement with one copy per expert
        constant = weights.beta * float(drift_term(problem, load_by_expert(problem, slots))[layer])
    return LayerModel(linear, relative, weights.beta * share / share.sum() / problem.num_ranks, constant)


def _solve_layer(
    model: LayerModel, home: Any, size: int, time_limit: float, gap: float, threads: int
) -> tuple[Any, float]:
    """Best ranks found [E] and a lower bound on the cost, by outer approximation from `home`."""
    deadline = time.perf_counter() + time_limit
    points = _first_points(model, size, home)
    best, best_cost = home, model.cost(home)
    bound = float(model.linear.min(axis=0).sum()) + model.constant  # what is known without solving anything
    scale = max(abs(best_cost), 1e-300)
    for _ in range(MAX_ROUNDS):
        left = deadline - time.perf_counter()
        if left <= 0 or best_cost - bound <= gap * scale:
            break
        program, place_columns, start = _program(model, size, points, best)
        found = program.solve(time_limit=left, gap=gap / 4, start=start, threads=threads)
        bound = max(bound, found.bound + model.constant)
        if found.values is None:
            break
        home = found.values[place_columns].argmax(axis=0)
        cost = model.cost(home)
        if cost < best_cost:
            best, best_cost = home, cost
        new = model.rank_loads(home)[:, :, None]
        if not found.optimal or (np.abs(points - new).min(axis=2) < 1e-12).all():
            break  # out of time, or exact at this solution: what is left is the program's own gap
        points = np.concatenate([points, new], axis=2)
    if bound > best_cost + SOLVER_TOLERANCE * scale:
        raise RuntimeError(f"HiGHS proves {bound} for a placement that costs {best_cost}")
    return best, min(bound, best_cost)


def _first_points(model: LayerModel, size: int, home: Any) -> Any:
    """Loads at which the first tangents touch, [K, R, TANGENTS]: near the mean, over the range, at the start."""
    near = np.linspace(1 - NEAR, 1 + NEAR, TANGENTS // 2)
    points = []
    for loads in model.loads:
        ordered = np.sort(loads)
        wide = np.linspace(ordered[:size].sum(), ordered[-size:].sum(), TANGENTS - len(near) - 1)
        points.append(np.concatenate([near, wide]))
    every = np.repeat(np.stack(points)[:, None], len(model.linear), axis=1)
    return np.concatenate([every, model.rank_loads(home)[:, :, None]], axis=2)


def _program(model: LayerModel, size: int, points: Any, home: Any) -> tuple[Program, Any, Any]:
    """The program, the columns [R, E] that place experts, and a start [columns] from `home`."""
    program = Program()
    chosen = assignment_columns(program, model.linear, size)
    windows, ranks = len(model.loads), len(model.linear)
    load = program.add_columns(np.zeros((windows, ranks)), low=0.0, high=INFINITY)
    square = program.add_columns(np.repeat(model.weight[:, None], ranks, axis=1), low=0.0, high=INFINITY)
    for k in range(windows):
        for rank in range(ranks):
            row = np.append(chosen[rank], load[k, rank])
            program.add_row(row, np.append(model.loads[k], -1.0), 0.0, 0.0)
            for point in points[k, rank]:  # square >= (point - 1)^2 + slope * (load - point)
                slope = 2 * (point - 1)
                pair = [square[k, rank], load[k, rank]]
                program.add_row(pair, [1.0, -slope], (point - 1) ** 2 - slope * point, INFINITY)
    start = np.zeros(program.num_columns)
    start[chosen[home, np.arange(len(home))]] = 1.0
    start[load] = model.rank_loads(home)
    start[square] = (model.rank_loads(home) - 1.0) ** 2
    return program, chosen, start
