"""Method "portfolio" with spare slots in plain numpy: what the objective says about copies (SPEC section 4).

With `replica_search` the specification of csrc/placement/replica_layer.hpp and replica_search.hpp, bit for bit.
The cost of an expert's copies and the loads that they put on their ranks are computed in float64, every sum in a
written order, and rounded to integers once; from there on the search is exact.

    J = alpha/T * sum of picks * distance  +  beta * (weighted imbalance + drift term)  +  gamma * new copies / E

The drift term of one expert, beta*sigma^2/(R*mu^2) * sum over ranks of l_er^2 less a constant, depends on its own
copies alone: like its remote picks and its new copies it is part of the cost of the set of ranks that hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .objective import windows_with_picks
from .portfolio import MOST_UNITS
from .problem import PlacementProblem, Weights

# Weight of balance in each stage, in units of beta: a geometric series from 0.2 to 1.
STAGE_WEIGHT = (0.2, 0.4472135954999579, 1.0)


@dataclass(frozen=True, eq=False)
class ReplicaLayer:
    """A layer in units of the search, for one weight of balance.

    picks: [S, E]. loads: [K, E] picks per window that saw any, this one first. order: [S, R], how many different
    distances from a source are below that of a rank. was_on: [E, R] copies now. unit_remote, unit_square: units
    per pick times distance, and per picks squared on one rank. unit_load: [K], units per pick. mean: [K],
    load of a rank when all are equal.
    """

    picks: Any
    loads: Any
    distance: Any
    order: Any
    was_on: Any
    size: int
    move: int
    unit_remote: float
    unit_square: float
    unit_load: Any
    mean: Any
    known: dict[tuple[int, ...], tuple[int, Any]] = field(default_factory=dict)  # copy sets seen before

    @property
    def experts(self) -> int:
        return int(self.picks.shape[1])

    @property
    def ranks(self) -> int:
        return int(self.order.shape[1])

    def copy_set(self, expert: int, ranks: list[int]) -> tuple[int, Any]:
        """Cost in units of the copies of an expert on `ranks`, ascending, and their loads [K, R] in units.

        Picks of a source go to the nearest copies, evenly among equals; those of an earlier window where the
        picks of this one go, or evenly to all copies when this one has none.
        """
        served = np.zeros(len(ranks))
        remote = 0.0
        for source, picks in enumerate(self.picks[:, expert]):
            if picks == 0.0:
                continue
            nearest = self.order[source, ranks].min()
            serving = self.order[source, ranks] == nearest
            remote += picks * self.distance[source, ranks[int(serving.argmax())]]
            served[serving] += picks / float(serving.sum())
        if len(ranks) == 1:
            served[0] = self.loads[0, expert]
        squares, new = 0.0, 0
        for rank, picks in zip(ranks, served, strict=True):
            squares += picks * picks
            new += not self.was_on[expert, rank]
        load: Any = np.zeros((len(self.loads), self.ranks), dtype=np.int64)
        now = self.loads[0, expert]
        part = served / now if now > 0 else np.full(len(ranks), 1.0 / len(ranks))
        for k, unit in enumerate(self.unit_load):
            load[k, ranks] = np.rint(served * unit if k == 0 else part * (unit * self.loads[k, expert]))
        cost = int(np.rint(self.unit_remote * remote + self.unit_square * squares))
        return cost + new * self.move, load


def kicks_for(effort: str, experts: int, slots: int) -> int:
    """Kicks of `effort`: none, up to 400, or 16 times as many.

    On large layers a kick costs as much as a good part of the search and gains less than 0.1 %; small ones have
    local optima that are tens of percent above the best.
    """
    usual = min(400, 150_000 // (slots * (slots + experts)))
    return {"fast": 0, "default": usual, "best": 16 * max(1, usual)}[effort]


def to_integers(problem: PlacementProblem, layer: int, stage: float) -> ReplicaLayer | None:
    """The layer with balance at `stage` times beta; None without traffic in this window."""
    windows = windows_with_picks(problem, layer)
    if windows is None:
        return None
    loads, total, weight = windows
    means = total / problem.num_ranks
    chosen = problem.weights_for(Weights())
    ranks, placed = problem.num_ranks, problem.current is not None
    was_on: Any = np.zeros((problem.num_experts, ranks), dtype=bool)
    if problem.current is not None:
        was_on[problem.current[layer], np.arange(problem.num_slots) // problem.slots_per_rank] = True
    square = chosen.beta * (problem.drift * problem.drift) / (ranks * (means[0] * means[0]))
    move = chosen.gamma / problem.num_experts if placed else 0.0
    units = _units(problem, layer, loads / means[:, None], weight, chosen.alpha / total[0], square, move)
    each = np.sqrt(chosen.beta * stage * weight * units / ranks) / means
    distance = problem.topology.distance
    return ReplicaLayer(
        picks=problem.traffic[layer],
        loads=loads,
        distance=distance,
        order=np.stack([np.unique(row, return_inverse=True)[1].ravel() for row in distance]),
        was_on=was_on if placed else np.ones_like(was_on),
        size=problem.slots_per_rank,
        move=int(np.rint(units * move)),
        unit_remote=units * (chosen.alpha / total[0]),
        unit_square=units * square,
        unit_load=each,
        mean=np.rint(means * each).astype(np.int64),
    )


def _units(
    problem: PlacementProblem,
    layer: int,
    relative: Any,
    weight: Any,
    per_pick: float,
    square: float,
    move: float,
) -> float:
    """Integer units per unit of J: the largest power of two up to 2^28 for which no move exceeds MOST_UNITS.

    A move changes the copies of two experts: two costs, and in each window loads that come at most from the
    fullest rank possible, which holds the `size` heaviest experts.
    """
    remote = np.zeros((problem.num_experts, problem.num_ranks))
    for source, distance in enumerate(problem.topology.distance):
        remote = remote + problem.traffic[layer, source][:, None] * distance
    heaviest_now = float((problem.window_loads()[0, layer]).max())
    top = 2.0 * (per_pick * float(remote.max()) + square * (heaviest_now * heaviest_now) + move)
    beta = problem.weights_for(Weights()).beta
    for load, share in zip(relative, weight, strict=True):
        ordered = np.sort(load)[::-1]
        full = float(np.add.accumulate(ordered[: problem.slots_per_rank])[-1])
        heaviest = float(ordered[0])
        top += beta * float(share) / problem.num_ranks * heaviest * (4.0 * full + 8.0 * heaviest)
    exponent = 28
    while exponent > -1000 and np.ldexp(top, exponent) >= MOST_UNITS:
        exponent -= 1
    return float(np.ldexp(1.0, exponent))
