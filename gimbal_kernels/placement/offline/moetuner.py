"""Baseline MoETuner (arXiv 2502.06643): static placement by integer programs on offline routing profiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._arrays import to_host
from ..checks import check_number
from ..objective import evaluate
from ..problem import Placement, PlacementProblem
from ..reference import pack_evenly, slots_in_ranks
from .highs import INFINITY, Program, assignment_columns
from .profile import check_count


def moetuner(
    problem: PlacementProblem,
    transitions: Any,
    *,
    balance: float = 1.0,
    sweeps: int = 3,
    time_limit: float = 10.0,
    gap: float = 1e-3,
) -> Placement:
    """Keeps tokens on their rank from layer to layer, and the fullest rank low; knows no sources.

    Minimises, over all layers, `remote share of transitions + balance * (fullest rank load)/mean`, where a
    transition from expert e to expert f of the next layer is remote when their ranks differ. The paper solves two
    integer programs, experts into clusters and clusters onto GPUs; their exact form is not used here. Here a layer
    is one integer program with its neighbours fixed, which decides both at once: one sweep forwards, then sweeps
    over all layers with both neighbours until nothing improves. The total never rises.

    Tokens of data-parallel attention go back to their source after each layer, so what this saves is not what
    `evaluate` calls comm: that difference is what the comparison shows.

    Args:
        problem: loads are the sums over sources of its traffic; one slot per expert. Its weights do not matter.
        transitions: [L - 1, E, E] of the profile, see `profile.expert_transitions`.
        balance: weight of the fullest rank.
        sweeps: sweeps at most, the forward one included.
        time_limit: seconds per layer and sweep.
        gap: relative gap at which a layer's program counts as solved.

    Raises:
        ValueError: spare slots, transitions of another shape, or numbers out of range.
    """
    layers, experts = problem.num_layers, problem.num_experts
    if problem.num_slots != experts:
        raise ValueError(
            f"problem: {problem.num_slots} slots for {experts} experts; valid here: one slot per expert"
        )
    flow = np.asarray(to_host(transitions, "transitions"), dtype=np.float64)
    if flow.shape != (max(0, layers - 1), experts, experts):
        raise ValueError(
            f"transitions: shape {flow.shape}; valid: [{max(0, layers - 1)}, {experts}, {experts}]"
        )
    if flow.size and not (np.isfinite(flow).all() and flow.min() >= 0):
        raise ValueError("transitions: has negative, NaN or infinite entries; valid: counts >= 0")
    check_count(sweeps, "sweeps")
    for name, value in (("balance", balance), ("time_limit", time_limit), ("gap", gap)):
        check_number(value, name)
    flow = flow / np.maximum(flow.sum(axis=(1, 2), keepdims=True), 1e-300)
    tuner = _Tuner(problem, flow, balance, time_limit, gap)
    for layer in range(layers):
        tuner.improve(layer, range(layer))
    for _ in range(1, sweeps):
        before = tuner.total()
        for layer in [*range(layers - 2, -1, -1), *range(1, layers)]:
            tuner.improve(layer, range(layers))
        if tuner.total() >= before - 1e-9:
            break
    return evaluate(problem, tuner.slots())


def remote_transitions(transitions: Any, home: Any) -> Any:
    """Share of transitions between experts on different ranks, [L - 1]. home: [L, E] rank of each expert."""
    share = []
    for flow, before, after in zip(np.asarray(transitions), home[:-1], home[1:], strict=True):
        share.append(float((flow * (before[:, None] != after)).sum() / max(flow.sum(), 1e-300)))
    return np.array(share)


class _Tuner:
    """Rank of each expert, [L, E], improved one layer at a time."""

    def __init__(
        self, problem: PlacementProblem, flow: Any, balance: float, time_limit: float, gap: float
    ) -> None:
        self.problem, self.flow = problem, flow
        self.balance, self.time_limit, self.gap = balance, time_limit, gap
        loads = problem.window_loads()[0]
        total = np.maximum(loads.sum(axis=1, keepdims=True), 1e-300)
        self.load = loads * problem.num_ranks / total  # in mean rank loads
        self.home: Any = np.empty((problem.num_layers, problem.num_experts), dtype=np.int64)
        for layer, load in enumerate(self.load):
            for rank, experts in enumerate(pack_evenly(load, problem.num_ranks, problem.slots_per_rank)):
                self.home[layer, sorted(experts)] = rank

    def slots(self) -> Any:
        ranks, size = self.problem.num_ranks, self.problem.slots_per_rank
        rows = []
        for layer, home in enumerate(self.home):
            current = None if self.problem.current is None else self.problem.current[layer]
            if current is None or self.load[layer].any():
                held = [set(np.flatnonzero(home == rank).tolist()) for rank in range(ranks)]
                rows.append(slots_in_ranks(held, current, size))
            else:
                rows.append(current)
        return np.stack(rows) if rows else np.empty((0, self.problem.num_slots), dtype=np.int32)

    def total(self) -> float:
        fullest = sum(float(self._rank_loads(layer).max()) for layer in range(len(self.home)))
        return float(remote_transitions(self.flow, self.home).sum()) + self.balance * fullest

    def improve(self, layer: int, neighbours: range) -> None:
        """The best ranks of one layer, with those of its neighbours (as far as they are in `neighbours`) fixed."""
        ranks = self.problem.num_ranks
        cost: Any = np.zeros((ranks, self.problem.num_experts))
        if layer - 1 in neighbours:
            arriving = self.flow[layer - 1]
            from_rank = np.stack(
                [arriving[self.home[layer - 1] == rank].sum(axis=0) for rank in range(ranks)]
            )
            cost += arriving.sum(axis=0) - from_rank
        if layer + 1 in neighbours and layer + 1 < len(self.home):
            leaving = self.flow[layer]
            to_rank = np.stack(
                [leaving[:, self.home[layer + 1] == rank].sum(axis=1) for rank in range(ranks)]
            )
            cost += leaving.sum(axis=1) - to_rank
        program = Program()
        chosen = assignment_columns(program, cost, self.problem.slots_per_rank)
        fullest = program.add_columns([self.balance], low=0.0, high=INFINITY)
        for rank in range(ranks):
            row = np.append(chosen[rank], fullest)
            program.add_row(row, np.append(self.load[layer], -1.0), -INFINITY, 0.0)
        start = np.zeros(program.num_columns)
        start[chosen[self.home[layer], np.arange(len(self.home[layer]))]] = 1.0
        start[fullest] = self._rank_loads(layer).max()
        found = program.solve(time_limit=self.time_limit, gap=self.gap, start=start)
        if found.values is not None:
            home = found.values[chosen].argmax(axis=0)
            if self._value(cost, home, layer) < self._value(cost, self.home[layer], layer):
                self.home[layer] = home

    def _value(self, cost: Any, home: Any, layer: int) -> float:
        fullest = np.bincount(home, weights=self.load[layer], minlength=len(cost)).max()
        return float(cost[home, np.arange(len(home))].sum() + self.balance * fullest)

    def _rank_loads(self, layer: int) -> Any:
        return np.bincount(self.home[layer], weights=self.load[layer], minlength=self.problem.num_ranks)
