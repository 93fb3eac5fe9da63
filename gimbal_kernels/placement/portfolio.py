"""Method "portfolio" in plain numpy, one copy per expert (SPEC section 3.3): the specification of csrc/placement.

The objective is scaled to integers, which makes the search exact and the same on every machine; float32 prices
choose where it starts. Written for reading, not for speed: small cases only, but for `to_integers`, which prepares
the CUDA kernels' input too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .objective import windows_with_picks
from .problem import PlacementProblem, Weights

# Weight of balance in each stage, in units of beta: a geometric series from 0.2 to 1.
STAGE_WEIGHT = (0.2, 0.34199518933533946, 0.5848035476425731, 1.0)
PRICE_STEPS = 80
# Temperature of the prices from step to step: 1e-3^(1/80).
COOLING = 0.9172759353897796
# Every change of the objective stays below this many units, and 2^31 is where 32 bits end.
MOST_UNITS = float(2**29 - 2**12)
SHARE_UNITS = 2.0**20
# On so few ranks the current placement is a start too.
FEW_RANKS = 8


@dataclass(frozen=True)
class Effort:
    """kicks: chains of forced swaps per seed. seeds: independent series of kicks from the best start."""

    kicks: int
    seeds: int

    @staticmethod
    def named(name: str, ranks: int) -> Effort:
        """ "fast", "default" or "best" (SPEC section 3.3, with fewer kicks in "default": see docs/decisions.md)."""
        usual, many = min(128, 8 * ranks), 8 * min(480, 12 * ranks)
        return {"fast": Effort(0, 0), "default": Effort(usual, 1), "best": Effort(many, 2)}[name]


@dataclass(frozen=True, eq=False)
class IntegerLayer:
    """A layer in units of the search; [R, E] and [stages, K, E] integers, [E] float32."""

    size: int
    rank_class: Any  # [R]
    comm: Any  # [classes, E] remote picks
    move_cost: int
    cost: Any  # [R, E] remote picks and moves
    load: Any  # [stages, K, E]
    home: Any  # [E] current rank, or -1
    share: Any  # [E] load over mean rank load, mean over the windows
    cooling: Any  # [PRICE_STEPS]
    curvature: float  # of the balance term's conjugate, R/(2 beta)
    units: float

    @property
    def ranks(self) -> int:
        return int(self.cost.shape[0])

    @property
    def experts(self) -> int:
        return int(self.cost.shape[1])


def to_integers(problem: PlacementProblem, layer: int) -> IntegerLayer | None:
    """The layer scaled to integers; None without traffic in this window."""
    windows = windows_with_picks(problem, layer)
    if windows is None:
        return None
    loads, total, weight = windows
    means = total / problem.num_ranks
    chosen = problem.weights_for(Weights())
    comm, rank_class = _comm(problem, layer, chosen.alpha / total[0])
    units = _units(problem, comm, loads / means[:, None], weight, chosen)
    home = np.full(problem.num_experts, -1)
    if problem.current is not None:
        home[problem.current[layer]] = np.arange(problem.num_slots) // problem.slots_per_rank
    move = int(np.rint(units * chosen.gamma / problem.num_experts)) if problem.current is not None else 0
    moves = (np.arange(problem.num_ranks)[:, None] != home) & (home >= 0)
    comm_units = np.rint(comm * units).astype(np.int64)
    cost = comm_units[rank_class] + move * moves
    stages = []
    for stage in STAGE_WEIGHT:
        each = np.sqrt(2.0 * (chosen.beta * stage * weight) * units / problem.num_ranks) / means
        stages.append(np.rint(loads * each[:, None]).astype(np.int64))
    share = np.zeros(problem.num_experts)
    for k in range(len(loads)):
        share = share + weight[k] * (loads[k] / means[k])
    return IntegerLayer(
        size=problem.slots_per_rank,
        rank_class=rank_class,
        comm=comm_units,
        move_cost=move,
        cost=cost,
        load=np.stack(stages),
        home=home,
        share=share.astype(np.float32),
        cooling=_cooling(cost),
        curvature=_curvature(problem.num_ranks, chosen.beta * units * 2.0**-28),
        units=units,
    )


def _comm(problem: PlacementProblem, layer: int, each: float) -> tuple[Any, Any]:
    """Cost of remote picks [classes, E], and the class [R] of each rank: ranks equally far from all sources."""
    distance = problem.topology.distance
    first: list[int] = []
    rank_class: Any = np.zeros(problem.num_ranks, dtype=np.int64)
    for rank in range(problem.num_ranks):
        same = [k for k, r in enumerate(first) if (distance[:, r] == distance[:, rank]).all()]
        rank_class[rank] = same[0] if same else len(first)
        if not same:
            first.append(rank)
    comm = np.zeros((len(first), problem.num_experts))
    for source in range(problem.num_sources):
        comm = comm + (distance[source, first] * each)[:, None] * problem.traffic[layer, source]
    return comm, rank_class


def _units(problem: PlacementProblem, comm: Any, relative: Any, weight: Any, chosen: Weights) -> float:
    """Integer units per unit of J: the largest power of two up to 2^28 for which no swap exceeds MOST_UNITS."""
    top = 2.0 * (float(comm.max()) + chosen.gamma / problem.num_experts)
    for load, share in zip(relative, weight, strict=True):
        ordered = np.sort(load)[::-1]
        full = float(np.add.accumulate(ordered[: problem.slots_per_rank])[-1])
        heaviest = float(ordered[0])
        top += 2.0 * (chosen.beta * float(share)) / problem.num_ranks * heaviest * (heaviest + full)
    exponent = 28
    while exponent > -1000 and np.ldexp(top, exponent) >= MOST_UNITS:
        exponent -= 1
    return float(np.ldexp(1.0, exponent))


def _cooling(cost: Any) -> Any:
    spread = int((cost.max(axis=0) - np.minimum(cost.min(axis=0), 1 << 30)).sum())
    temperature = spread * 2.0**-28 / cost.shape[1] + 1e-9
    steps = []
    for _ in range(PRICE_STEPS):
        steps.append(np.float32(temperature))
        temperature *= COOLING
    return np.array(steps)


def _curvature(ranks: int, beta: float) -> float:
    return min(1e30, ranks / (2.0 * beta)) if beta > 0 else 1e30


# ---- prices


def exp2_rounded(x: Any) -> Any:
    """2^x for -100 <= x <= 0 to about 1e-4, every operation rounded to float32."""
    f = np.float32
    whole = (x + f(128)).astype(np.int32) - 128
    t = x - whole.astype(np.float32)
    p = t * f(0.00133336) + f(0.00961813)
    for coefficient in (0.05550411, 0.24022651, 0.69314718, 1.0):
        p = p * t + f(coefficient)
    return (p.view(np.int32) + whole * 8388608).view(np.float32)


def prices(y: IntegerLayer) -> Any:
    """Costs with the price of slots and load of each rank, float32 [R, E], after the softmin dual ascent."""
    f = np.float32
    unit, curvature, limit = f(2.0**-28), f(y.curvature), f(y.ranks / y.curvature)
    share_step = f(y.experts / y.ranks)
    count_step = f(y.experts / y.ranks / y.size)
    price, offset, price_mean, offset_mean = np.zeros((4, y.ranks), dtype=np.float32)

    def priced() -> Any:
        return (y.cost.astype(np.float32) * unit + offset[:, None]) + price[:, None] * y.share

    for temperature in y.cooling:
        work = priced()
        x = (work.min(axis=0) - work) * (f(1.4426950408889634) / temperature)
        work = exp2_rounded(np.maximum(x, f(-100)))
        total: Any = np.zeros(y.experts, dtype=np.float32)
        for row in work:
            total = total + row
        part = work * (f(SHARE_UNITS) / total)
        load = (part * y.share).astype(np.int32).sum(axis=1).astype(np.float32) * f(1 / SHARE_UNITS)
        count = part.astype(np.int32).sum(axis=1).astype(np.float32) * f(1 / SHARE_UNITS)
        over = (load - f(1)) - price * curvature
        price_mean = f(0.9) * price_mean + f(0.1) * (over * count_step)
        offset_mean = f(0.9) * offset_mean + f(0.1) * ((count - f(y.size)) / f(y.size))
        step = temperature * f(2.1)
        price = np.clip(price + (step * share_step) * price_mean, -limit, limit)
        offset = offset + step * offset_mean
    return priced()


def _regret(costs: Any) -> Any:
    """Second lowest minus lowest of each column, float32."""
    if len(costs) < 2:
        return np.float32(1e30) - costs[0]
    ordered = np.sort(costs, axis=0)
    return ordered[1] - ordered[0]


def round_by_rank(y: IntegerLayer, priced: Any) -> Any:
    """Experts by descending regret, each to its cheapest rank with a free slot; ties: lowest id, lowest rank."""
    home: Any = np.zeros(y.experts, dtype=np.int64)
    filled: Any = np.zeros(y.ranks, dtype=np.int64)
    for expert in np.argsort(-_regret(priced), kind="stable"):
        rank = min((r for r in range(y.ranks) if filled[r] < y.size), key=lambda r: (priced[r, expert], r))
        home[expert] = rank
        filled[rank] += 1
    return home


def round_by_class(y: IntegerLayer, priced: Any) -> Any:
    """Experts to classes of equally distant ranks by regret, then inside a class to ranks, heaviest first.

    Inside, each goes to the rank where it adds least to the objective of the second stage. Ties: lowest
    expert, class and rank.
    """
    classes = int(y.rank_class.max()) + 1
    low = np.stack([priced[y.rank_class == k].min(axis=0) for k in range(classes)])
    room = np.bincount(y.rank_class, minlength=classes) * y.size
    group: Any = np.zeros(y.experts, dtype=np.int64)
    regret = _regret(low) if classes > 1 else np.zeros(y.experts)
    for expert in np.argsort(-regret, kind="stable"):
        group[expert] = min((k for k in range(classes) if room[k] > 0), key=lambda k: (low[k, expert], k))
        room[group[expert]] -= 1
    load = y.load[1, 0]
    mean = int(load.sum()) // y.ranks
    home: Any = np.zeros(y.experts, dtype=np.int64)
    filled: Any = np.zeros(y.ranks, dtype=np.int64)
    rank_load: Any = np.zeros(y.ranks, dtype=np.int64)
    for expert in np.argsort(-load, kind="stable"):
        rise = 2 * y.cost[:, expert] + load[expert] * (2 * (rank_load - mean) + load[expert])
        open_ranks = [r for r in range(y.ranks) if filled[r] < y.size and y.rank_class[r] == group[expert]]
        rank = min(open_ranks, key=lambda r: (rise[r], r))
        home[expert] = rank
        filled[rank] += 1
        rank_load[rank] += load[expert]
    return home
