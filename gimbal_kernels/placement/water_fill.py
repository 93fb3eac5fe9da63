"""Shares of the picks of every source and expert over the copies of the expert (SPEC section 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from . import replica_host
from .checks import EMPTY_BELOW, check_number
from .objective import evaluate, window_weights
from .problem import PlacementProblem, Weights

# A round that moves less than this part of all picks is the last.
STILL = 1e-6
BACKENDS = ("auto", "host", "reference")


def water_fill(
    problem: PlacementProblem,
    slots: Any,
    *,
    beta: float | None = None,
    rounds: int = 50,
    backend: str = "auto",
) -> torch.Tensor:
    """What part of the picks of each source each copy of an expert should serve, for a given slot map.

    Without moving a weight, shares trade distance for balance: they minimise the cost of `evaluate`, in which
    only the shares are free, by block coordinate descent from the nearest rule. A block is one (source, expert)
    with a picks to share out over the expert's copies i. With y_i the picks sent to copy i, on rank r(i) at
    distance d_i, and L_r all other picks of rank r, the cost is, up to a constant,

        sum_i [ alpha/T * d_i * y_i + beta/(R*mu^2) * (L_r(i) + y_i)^2 ],    sum_i y_i = a,  y_i >= 0

    (the mean load is constant under the constraint). By the conditions of Karush, Kuhn and Tucker there is a
    level v with y_i = max(0, (v - o_i)/k), where o_i = alpha/T * d_i + k * L_r(i) is the marginal cost of an
    empty copy and k = 2*beta/(R*mu^2): water poured over a floor of heights o_i. Sorted by height, the first m
    copies get some where v = (sum of their o_i + k*a)/m is at most the next height. Earlier windows and the
    drift term add to o_i and k in the same form. Each block is solved exactly, so no step raises the cost; the
    cost is convex in the shares. Ties: the copy on the lower rank first.

    Args:
        problem: traffic (of the first part of a window, say), topology, weights, history and drift as for
            `evaluate`.
        slots: [L, P] integers, the slot map; every expert needs a slot.
        beta: weight of balance instead of the problem's. 20 evens out loads more than a placement should be
            fitted to one window: shares cost nothing to change.
        rounds: most rounds over all blocks; fewer where a round moves less than 1e-6 of the picks.
        backend: "host" is compiled, "reference" plain numpy; both give the same bytes. "auto" takes "host"
            where it is available.

    Returns:
        float64 [L, S, P]; for each source and expert the shares of its slots sum to 1. They are what
        `ReplicaMap` takes as `shares`. Sources without picks of an expert, and layers without traffic, keep the
        nearest copies, evenly. In no layer is the cost above that of the nearest copies (up to 1e-14 of it).

    Raises:
        ValueError: bad slots, a beta that is negative or not finite, rounds that are no integer >= 1, an unknown
            backend, or "host" where it is not available.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds: {rounds!r}; valid: an integer >= 1")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r}; valid: {', '.join(BACKENDS)}")
    ready = replica_host.status()
    if backend == "host" and ready != "ready":
        raise ValueError(f"backend: 'host' is not available: {ready}; valid: auto, reference")
    if beta is not None:
        check_number(beta, "beta")
        given = problem.weights_for(Weights())
        problem = replace(problem, weights=Weights(given.alpha, float(beta), given.gamma))
    held = problem.check_slots(slots, "slots")
    if backend == "reference" or ready != "ready":
        shares = reference(problem, held, rounds)
    else:
        shares = replica_host.water_fill(problem, held, rounds, STILL)
    return _never_worse(problem, held, shares)


def _never_worse(problem: PlacementProblem, slots: Any, shares: Any) -> torch.Tensor:
    """The nearest copies again in layers whose cost the rounding of the steps has raised."""
    before = evaluate(problem, slots).cost
    after = evaluate(problem, slots, shares=shares).cost
    worse = (after > before).numpy()
    if worse.any():
        shares[worse] = nearest_shares(problem, slots)[worse]
    return torch.from_numpy(shares)


def nearest_shares(problem: PlacementProblem, slots: Any) -> Any:
    """Even shares among the nearest slots, float64 [L, S, P]: what picks do without shares."""
    shares = np.empty((problem.num_layers, problem.num_sources, problem.num_slots))
    for layer in range(problem.num_layers):
        shares[layer] = _Layer.of(problem, layer, slots[layer]).shares()
    return shares


def reference(problem: PlacementProblem, slots: Any, rounds: int) -> Any:
    """As `water_fill`, in plain numpy: the specification of csrc/placement/water_fill.hpp, bit for bit."""
    shares = np.empty((problem.num_layers, problem.num_sources, problem.num_slots))
    for layer in range(problem.num_layers):
        state = _Layer.of(problem, layer, slots[layer])
        for _ in range(rounds if state.total > 0 else 0):
            if state.round() <= STILL * state.total:
                break
        shares[layer] = state.shares()
    return shares


@dataclass(eq=False)
class _Layer:
    """One layer. What a source sends to a copy is a part of all picks of the expert; windows scale it.

    loads: [K][E] picks per window. curve: [K], cost of a squared pick. square: of one pick of the drift term.
    ranks, at: per expert the ranks of its copies, ascending, and their slots. share: per source and expert the
    shares of its copies. part: per expert the parts that its copies serve. rank_load: [K][R].
    """

    picks: Any
    distance: Any
    loads: Any
    curve: Any
    square: float
    per_pick: float
    total: float
    ranks: list[list[int]]
    at: list[list[list[int]]]
    share: list[list[Any]]
    part: list[Any]
    rank_load: Any
    num_slots: int

    @staticmethod
    def of(problem: PlacementProblem, layer: int, slots: Any) -> _Layer:
        loads = problem.window_loads()[:, layer]
        totals = np.add.accumulate(loads, axis=1)[:, -1]
        kept = totals >= EMPTY_BELOW if totals[0] >= EMPTY_BELOW else np.zeros(len(totals), dtype=bool)
        loads, totals = loads[kept], totals[kept]
        chosen = problem.weights_for(Weights())
        means = totals / problem.num_ranks
        weight = window_weights(len(kept))[kept]
        curve = chosen.beta / (problem.num_ranks * (means * means))
        square = float(curve[0] * (problem.drift * problem.drift)) if len(curve) else 0.0
        if len(curve):
            curve = curve * (weight / np.add.accumulate(weight)[-1])
        at: list[list[list[int]]] = []
        ranks: list[list[int]] = []
        for expert in range(problem.num_experts):
            held = np.flatnonzero(slots == expert)
            ranks.append(sorted({int(p) // problem.slots_per_rank for p in held}))
            at.append([[int(p) for p in held if p // problem.slots_per_rank == r] for r in ranks[-1]])
        state = _Layer(
            picks=problem.traffic[layer],
            distance=problem.topology.distance,
            loads=loads,
            curve=curve,
            square=square,
            per_pick=chosen.alpha / float(totals[0]) if len(totals) else 0.0,
            total=float(totals[0]) if len(totals) else 0.0,
            ranks=ranks,
            at=at,
            share=[[None] * problem.num_experts for _ in range(problem.num_sources)],
            part=[np.zeros(len(held)) for held in ranks],
            rank_load=np.zeros((len(loads), problem.num_ranks)),
            num_slots=problem.num_slots,
        )
        state._start_nearest()
        return state

    def _start_nearest(self) -> None:
        for expert, ranks in enumerate(self.ranks):
            count = np.array([float(len(held)) for held in self.at[expert]])
            if len(self.loads) and self.loads[0, expert] <= 0:  # earlier picks: evenly on all its slots
                for i, part in enumerate(count / count.sum()):
                    self._shift(expert, i, float(part))
            for source, distance in enumerate(self.distance):
                near = distance[ranks] == distance[ranks].min()
                share = np.where(near, count / count[near].sum(), 0.0)
                self.share[source][expert] = share
                for i in np.flatnonzero(near):
                    self._shift(expert, int(i), self._amount(source, expert) * share[i])

    def _amount(self, source: int, expert: int) -> float:
        """The part of an expert's picks that come from one source."""
        picks = self.picks[source, expert]
        return float(picks / self.loads[0, expert]) if picks > 0 and len(self.loads) else 0.0

    def _shift(self, expert: int, i: int, part: float) -> None:
        self.part[expert][i] += part
        for k in range(len(self.loads)):
            self.rank_load[k, self.ranks[expert][i]] += self.loads[k, expert] * part

    def round(self) -> float:
        """Every block once, by expert, then source; the picks that changed their copy."""
        moved = 0.0
        for expert in range(len(self.ranks)):
            picks = float(self.loads[0, expert])
            if len(self.ranks[expert]) < 2 or picks <= 0:
                continue
            curvature = self.square * (picks * picks)
            for k in range(len(self.loads)):
                curvature += self.curve[k] * (self.loads[k, expert] * self.loads[k, expert])
            if curvature <= 0:
                continue
            here = 0.0
            for source in range(len(self.picks)):
                if self._amount(source, expert) > 0:
                    here += self._fill(source, expert, 2.0 * curvature)
            moved += here * picks
        return moved

    def _fill(self, source: int, expert: int, curvature: float) -> float:
        picks, send = self.loads[0, expert], self._amount(source, expert)
        share = self.share[source][expert]
        slope = np.empty(len(share))
        for i, rank in enumerate(self.ranks[expert]):
            now = send * share[i]
            total = self.per_pick * picks * self.distance[source, rank]
            for k in range(len(self.loads)):
                others = self.rank_load[k, rank] - self.loads[k, expert] * now
                total += 2.0 * self.curve[k] * self.loads[k, expert] * others
            slope[i] = total + 2.0 * self.square * (picks * picks) * (self.part[expert][i] - now)
        order = np.argsort(slope, kind="stable")
        heights, count = 0.0, 0
        while True:
            heights += slope[order[count]]
            count += 1
            level = (heights + curvature * send) / count
            if count == len(order) or level <= slope[order[count]]:
                break
        return self._pour(source, expert, slope, order[:count], level)

    def _pour(self, source: int, expert: int, slope: Any, open_copies: Any, level: float) -> float:
        """The cheapest copies take what lifts their slopes to `level`."""
        share, send = self.share[source][expert], self._amount(source, expert)
        depth = np.zeros(len(share))
        total = 0.0
        for i in open_copies:
            depth[i] = max(0.0, level - slope[i])
            total += depth[i]
        if total <= 0:
            return 0.0
        moved = 0.0
        for i in range(len(share)):
            part = send * (depth[i] / total) - send * share[i]
            share[i] = depth[i] / total
            self._shift(expert, i, part)
            moved += abs(part)
        return moved

    def shares(self) -> Any:
        """[S, P], evenly among slots of one rank."""
        shares = np.zeros((len(self.picks), self.num_slots))
        for source in range(len(self.picks)):
            for expert, slots in enumerate(self.at):
                for i, held in enumerate(slots):
                    shares[source, held] = self.share[source][expert][i] / len(held)
        return shares
