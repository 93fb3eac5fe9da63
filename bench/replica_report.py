"""Placement with spare slots in figures: next windows, drift over 50 windows, confirmed skew, times.

    python bench/replica_report.py [next drift skew time] [--json FILE]

`next`: placed by one window of requests dispatched at random, judged by many resampled ones of the same law.
`drift`: 50 windows whose mix of topics drifts; the costs of remote picks, of imbalance and of moved experts add up.
`skew`: how much of the sources' skew `shrink` keeps. `time`: of one call. Traffic is synthetic, seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from replica_traffic import Topics, random_windows

from gimbal_kernels.placement import (
    Placement,
    PlacementProblem,
    Weights,
    evaluate,
    lower_bound,
    measure_drift,
    place,
    shrink,
    water_fill,
)
from gimbal_kernels.topology import Topology

RESULTS = Path(__file__).parent / "results"
# Shares are refitted when this part of a window has passed, with this weight of balance.
EARLY, ROUTING_BETA = 0.05, 20.0
# One moved expert costs as much as this many remote picks (9.44 MB against 8 KiB); a mean rank load on top of the
# fullest rank costs as much as 0.6 of all picks being remote.
MOVE_PICKS, IMBALANCE_PICKS = 1152.0, 0.6


def first_part(window: Any, rng: Any) -> Any:
    """The picks of a window's first requests, as far as a source's share of them can be trusted."""
    return shrink(rng.binomial(window.astype(np.int64), EARLY))[0]


# ---- next windows


def judge(problem: PlacementProblem, slots: Any, windows: list[Any], rng: Any = None) -> list[float]:
    """Mean distance of a pick and mean max/mean in later windows; rng: with shares refitted early in each."""
    found = []
    for window in windows:
        later = replace(problem, traffic=window, current=None)
        shares = None
        if rng is not None:
            early = replace(later, traffic=first_part(window, rng))
            shares = water_fill(early, slots, beta=ROUTING_BETA)
        served = evaluate(later, slots, shares=shares)
        found.append([float(served.comm.mean()), float(served.max_over_mean.mean())])
    return np.mean(found, axis=0).tolist()


def next_windows(experts: int, ranks: int, sources: int, spare: tuple[int, ...], options: Any) -> list[Any]:
    topology = Topology.grid(gpus_per_node=ranks, sources=sources)
    figures: dict[str, list[list[float]]] = {}
    for seed in range(options.seeds):
        rng = np.random.default_rng(1000 + seed)
        last, now, *later = random_windows(seed, options.layers, experts, sources, 2 + options.windows)
        drift = measure_drift(last, now)
        trusted, _ = shrink(now, shrink(last)[1])
        one = PlacementProblem(now, topology, experts // ranks)
        balanced = place(one, method="eplb").slots
        figures.setdefault("balance only, one copy", []).append(judge(one, balanced, later))
        for more in spare:
            problem = PlacementProblem(trusted, topology, (experts + more) // ranks, drift=drift)
            copied = place(replace(problem, traffic=now), method="eplb").slots
            slots = place(problem).slots
            for name, result in (
                (f"balance only, {more} spare", judge(problem, copied, later)),
                (f"portfolio, {more} spare", judge(problem, slots, later)),
                (f"portfolio, {more} spare, shares refitted", judge(problem, slots, later, rng)),
            ):
                figures.setdefault(name, []).append(result)
    base = np.mean(figures["balance only, one copy"], axis=0)[0]
    return [
        {
            "experts": experts,
            "ranks": ranks,
            "what": name,
            "remote_of_balance_only": float(np.mean(values, axis=0)[0] / base),
            "max_over_mean": float(np.mean(values, axis=0)[1]),
        }
        for name, values in figures.items()
    ]


# ---- drift


@dataclass
class Policy:
    """What happens at the end of a window. Of several betas and histories each layer takes the placement that would
    have cost least in the last six windows, its moves included."""

    spare: int = 0
    betas: tuple[float, ...] = (4.0,)
    histories: tuple[int, ...] = (6,)
    rate: float = 0.5  # of the running mean of the skew between sources
    memory: float = 0.98  # of the confirmation of that skew
    shares: bool = False
    drifts: bool = False
    static: bool = False


POLICIES = {
    "static": Policy(static=True),
    "portfolio, one copy, beta 4": Policy(),
    "portfolio, one copy, beta 10": Policy(betas=(10.0,)),
    "portfolio, one copy, by hindsight": Policy(betas=(4.0, 1.0, 2.0, 10.0, 20.0), histories=(6, 0)),
    "portfolio, 16 spare": Policy(spare=16, drifts=True),
    "portfolio, 16 spare, shares refitted": Policy(spare=16, drifts=True, shares=True),
}


def replaced(policy: Policy, problem: PlacementProblem, windows: list[Any]) -> tuple[PlacementProblem, Any]:
    """The problem with its next placement as the current one, and the moves [L]; windows: the newest first."""
    now, *earlier = windows
    drift = measure_drift(earlier[0], now) if policy.drifts and earlier else 0.0
    several = len(policy.betas) * len(policy.histories) > 1
    lowest: Any = np.full(problem.num_layers, np.inf)
    slots, moves = np.array(problem.current), np.zeros(problem.num_layers)
    for history in policy.histories:
        for beta in policy.betas:
            weights = Weights.for_expert(MOVE_PICKS, 1.0, 1.0, now, beta=beta)
            past = tuple(earlier[: max(0, history - 1)])
            found = place(replace(problem, weights=weights, history=past, drift=drift))
            cost = hindsight(problem, found, windows) if several else np.zeros(problem.num_layers)
            better = cost < lowest
            lowest = np.where(better, cost, lowest)
            slots[better], moves[better] = found.slots.numpy()[better], found.moves.numpy()[better]
    return replace(problem, current=slots), moves


def hindsight(problem: PlacementProblem, found: Placement, windows: list[Any]) -> Any:
    """What a placement would have cost in past windows, in picks per pick, [L]; newer ones count more."""
    weight = 0.8 ** np.arange(len(windows))
    cost = MOVE_PICKS * found.moves.numpy() / windows[0].sum(axis=(1, 2))
    for share, window in zip(weight / weight.sum(), windows, strict=True):
        served = evaluate(replace(problem, traffic=window), found.slots)
        cost = cost + share * (served.comm + IMBALANCE_PICKS * (served.max_over_mean - 1)).numpy()
    return cost


def live(policy: Policy, windows: list[Any], topology: Topology) -> dict[str, float]:
    """Placed by each window, judged by the next; costs in picks, per layer and window."""
    layers, _, experts = windows[0].shape
    size = (experts + policy.spare) // topology.num_ranks
    start = np.tile(np.arange(size * topology.num_ranks) % experts, (layers, 1))
    problem = PlacementProblem(windows[0], topology, size, start)
    if policy.spare:  # what the first window would have had: copies, before anything is known
        problem = replace(problem, current=place(problem, method="eplb").slots)
    rng = np.random.default_rng(0)
    state, costs, kept = None, [], []
    for now, later in pairwise(windows):
        trusted, state = shrink(now, state, rate=policy.rate, memory=policy.memory)
        moves = np.zeros(layers)
        if not policy.static:
            problem, moves = replaced(policy, replace(problem, traffic=trusted), [now, *kept])
        kept = [now, *kept][:5]
        judged = replace(problem, traffic=later, drift=0.0)
        shares = None
        if policy.shares:
            early = replace(judged, traffic=first_part(later, rng))
            shares = water_fill(early, problem.current, beta=ROUTING_BETA)
        served = evaluate(judged, problem.current, shares=shares)
        picks, fullest = later.sum(axis=(1, 2)), served.max_over_mean.numpy()
        remote = served.comm.numpy()
        costs.append(
            [
                (remote * picks).mean(),
                (IMBALANCE_PICKS * (fullest - 1) * picks).mean(),
                MOVE_PICKS * moves.mean(),
                moves.mean(),
                remote.mean(),
                fullest.mean(),
            ]
        )
    names = ("remote", "imbalance", "moving", "moves", "remote_share", "max_over_mean")
    found = dict(zip(names, np.mean(costs, axis=0).tolist(), strict=True))
    return {**found, "total": found["remote"] + found["imbalance"] + found["moving"], "rho": state.rho}


def drifting(affine: bool, rate: float, options: Any) -> list[Any]:
    topology = Topology.grid(gpus_per_node=4, sources=2)
    topics, windows = Topics(options.seed), []
    for _ in range(options.length + 1):
        windows.append(topics.window(affine=affine))
        topics.drift(rate)
    rows = []
    for name, policy in POLICIES.items():
        row = {"dispatch": "affine" if affine else "random", "drift": rate, "what": name}
        rows.append({**row, **live(policy, windows, topology)})
        rows[-1]["of_static"] = rows[-1]["total"] / rows[0]["total"]
    return rows


def confirmed_skew(options: Any) -> list[Any]:
    """Mean and largest rho after the first ten windows, and the remote picks that one copy claims and gets."""
    rows, topology = [], Topology.grid(gpus_per_node=4, sources=2)
    for affine in (False, True):
        topics, state, rho, claimed, got = Topics(options.seed), None, [], [], []
        window = topics.window(affine=affine)
        for step in range(30):
            trusted, state = shrink(window, state, memory=0.98)
            later = topics.window(affine=affine)
            if step >= 10:
                placed = place(PlacementProblem(trusted, topology, 32), effort="fast")
                rho.append(state.rho)
                claimed.append(float(placed.comm.mean()))
                got.append(float(evaluate(PlacementProblem(later, topology, 32), placed.slots).comm.mean()))
            window = later
            topics.drift(0.1)
        rows.append(
            {
                "dispatch": "affine" if affine else "random",
                "rho_mean": float(np.mean(rho)),
                "rho_range": [float(np.min(rho)), float(np.max(rho))],
                "remote_claimed": float(np.mean(claimed)),
                "remote_next": float(np.mean(got)),
            }
        )
    return rows


# ---- time


def times(options: Any) -> list[Any]:
    """Processor and wall time in ms of one call, from nothing and from the last window's placement; proven gap."""
    shapes = (
        ("48 x (128 + 16) x 4", 48, 128, 16, Topology.grid(gpus_per_node=4, sources=2)),
        ("58 x (256 + 32) x 32", 58, 256, 32, Topology.grid(gpus_per_node=32, sources=4)),
        (
            "58 x (256 + 64) on 8 x 8, 8 sources",
            58,
            256,
            64,
            Topology.grid(nodes=8, gpus_per_node=8, sources=8),
        ),
        (
            "58 x (256 + 64) on 8 x 8, 64 sources",
            58,
            256,
            64,
            Topology.grid(nodes=8, gpus_per_node=8, sources=64),
        ),
    )
    rows = []
    for name, layers, experts, spare, topology in shapes:
        some = min(layers, options.most_layers)
        last, now = random_windows(0, some, experts, topology.num_sources, 2)
        problem = PlacementProblem(
            shrink(last)[0], topology, (experts + spare) // topology.num_ranks, drift=0.2
        )
        first = timed(lambda p=problem: place(p))
        weights = Weights.for_expert(MOVE_PICKS, 1.0, 10.0, now)
        again = replace(problem, traffic=shrink(now)[0], current=first["result"].slots, weights=weights)
        second = timed(lambda p=again: place(p))
        fill = timed(lambda p=again, s=second["result"].slots: water_fill(p, s, beta=ROUTING_BETA))
        bound = timed(lambda p=again: lower_bound(p))
        cost = second["result"].cost
        gap = 100 * float(((cost - bound["result"]) / cost).mean())
        row: dict[str, Any] = {"shape": name, "layers_timed": some, "layers": layers, "gap_percent": gap}
        for what, spent in (
            ("place_first", first),
            ("place_next", second),
            ("water_fill", fill),
            ("lower_bound", bound),
        ):
            row[what] = {k: 1e3 * spent[k] * layers / some for k in ("wall", "processor")}
        rows.append(row)
    return rows


def timed(work: Any) -> dict[str, Any]:
    began, began_processor = time.perf_counter(), time.process_time()
    result = work()
    return {
        "result": result,
        "wall": time.perf_counter() - began,
        "processor": time.process_time() - began_processor,
    }


def tables(options: Any) -> Iterator[tuple[str, list[Any]]]:
    if "next" in options.tables:
        yield "next_4_ranks", next_windows(128, 4, 2, (16, 32), options)
        few = argparse.Namespace(**{**vars(options), "layers": 3, "seeds": 2})
        yield "next_32_ranks", next_windows(256, 32, 4, (32, 64), few)
    if "drift" in options.tables:
        rows = [
            row for affine in (False, True) for rate in (0.1, 0.5) for row in drifting(affine, rate, options)
        ]
        yield "drift", rows
    if "skew" in options.tables:
        yield "skew", confirmed_skew(options)
    if "time" in options.tables:
        yield "time", times(options)


def text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{k} {text(v)}" for k, v in value.items())
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("next", "drift", "skew", "time")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=4, help="placements that are judged")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--windows", type=int, default=20, help="later windows that judge each")
    parser.add_argument("--length", type=int, default=50, help="windows of the drift table")
    parser.add_argument("--seed", type=int, default=70, help="of the topics")
    parser.add_argument("--most-layers", type=int, default=8, help="layers that are timed; times are for all")
    parser.add_argument("--json", type=Path, default=RESULTS / "replicas.json")
    options = parser.parse_args()
    unknown = set(options.tables) - set(names)
    if unknown:
        parser.error(f"TABLE: {', '.join(sorted(unknown))}; valid: {', '.join(names)}")
    options.tables = options.tables or list(names)
    result = json.loads(options.json.read_text()) if options.json.exists() else {}
    for name, rows in tables(options):
        print(name)
        for row in rows:
            print("  " + ", ".join(f"{k} {text(v)}" for k, v in row.items()))
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        settings = {k: v for k, v in vars(options).items() if k not in ("json", "tables")}
        result[name] = {
            "commit": commit,
            "machine": platform.machine(),
            "settings": settings,
            "rows": rows,
        }
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
