"""Placement in figures: proven gap and time of method "portfolio" against the installed vLLM's policy.

    python bench/placement_report.py [--parts gaps times growth budgets] [--seeds 3] [--nodes 1000] [--json FILE]
    python bench/placement_report.py --table

gaps: mean and largest gap to the lower bound at weights (1, 4, 0.02) per shape; takes many minutes, but no quiet
machine. times: the wall time of both efforts as a multiple of vLLM's policy in the same process; processor time is
that of all threads together. growth: how the time grows with experts, ranks and layers. budgets: what a time budget
buys. Every part is stored with its own commit and settings; parts that are not run keep what they have. --table
prints the stored gaps and times as docs/placement.md shows them.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gimbal_kernels.placement import PlacementProblem, Weights, lower_bound, place
from gimbal_kernels.topology import Topology

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    experts: int
    ranks: int
    sources: int
    spread: float  # of the logarithm of an expert's popularity
    nodes: bool  # whether the bound branches


SHAPES = (
    Shape("128x4", 48, 128, 4, 2, 1.0, True),
    Shape("256x8", 58, 256, 8, 2, 0.8, True),
    Shape("256x32", 58, 256, 32, 4, 0.6, False),
    Shape("256x64", 58, 256, 64, 8, 0.5, False),
)


# What is varied in the table of growth: layers, experts, ranks; two sources.
GROWTH = (
    ("layers", ((12, 128, 4), (24, 128, 4), (48, 128, 4), (96, 128, 4))),
    ("experts", ((16, 64, 8), (16, 128, 8), (16, 256, 8), (16, 512, 8))),
    ("ranks", ((16, 256, 4), (16, 256, 8), (16, 256, 16), (16, 256, 32), (16, 256, 64))),
)


def make_problem(shape: Shape, seed: int, layers: int | None) -> PlacementProblem:
    """Affine traffic of 850,000 tokens with 8 picks each; the current placement balances yesterday's loads."""
    rng = np.random.default_rng(seed)
    count = layers or shape.layers
    popularity = np.exp(shape.spread * rng.standard_normal((count, 1, shape.experts)))
    popularity = np.minimum(popularity / popularity.sum(axis=2, keepdims=True), 0.9 / 8)
    share = popularity * np.exp(0.5 * rng.standard_normal((count, shape.sources, shape.experts)))
    share /= share.sum(axis=2, keepdims=True)
    split = rng.dirichlet(np.full(shape.sources, 60.0))
    traffic = rng.poisson(6_800_000 * split[:, None] * share)
    topology = Topology.grid(gpus_per_node=shape.ranks, sources=shape.sources)
    size = shape.experts // shape.ranks
    old = traffic.sum(axis=1, keepdims=True) * np.exp(0.3 * rng.standard_normal((count, 1, shape.experts)))
    flat = Topology(np.zeros((1, shape.ranks)))
    current = place(PlacementProblem(old, flat, size), method="eplb").slots
    return PlacementProblem(traffic, topology, size, current, Weights(1.0, 4.0, 0.02))


def timed(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Least wall and processor time in milliseconds."""
    wall, used = [], []
    for _ in range(repeats):
        began, began_cpu = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - began)
        used.append(time.process_time() - began_cpu)
    return {"wall_ms": 1e3 * min(wall), "cpu_ms": 1e3 * min(used)}


def vllm_time(problem: PlacementProblem, repeats: int) -> dict[str, float] | None:
    try:
        from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    except ImportError:
        return None
    load = torch.from_numpy(problem.traffic.sum(axis=1))
    current = torch.from_numpy(problem.current.astype(np.int64))
    arguments = (load, problem.num_slots, 1, 1, problem.num_ranks, current)
    return timed(lambda: DefaultEplbPolicy.rebalance_experts(*arguments), repeats)


def measure_gaps(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"fast": [], "default": []}
    loose = []
    for seed in range(options.seeds):
        problem = make_problem(shape, seed, options.layers)
        lifted = lower_bound(problem).numpy()
        bound = lower_bound(problem, nodes=options.nodes).numpy() if shape.nodes else lifted
        for effort, found in gaps.items():
            cost = place(problem, effort=effort).cost.numpy()
            found += list(100 * (cost - bound) / cost)
        for layer in np.flatnonzero(100 * (cost - bound) / cost > 1):
            loose.append([seed, int(layer), float(cost[layer]), float(lifted[layer]), float(bound[layer])])
    row = {
        "shape": shape.name,
        "bound": f"nodes={options.nodes}" if shape.nodes else "lifted",
        "layers": problem.num_layers,
        "gap_percent": {e: {"mean": float(np.mean(g)), "max": float(np.max(g))} for e, g in gaps.items()},
        "layers_above_1_percent": loose,  # seed, layer, cost, lifted bound, bound
    }
    print(f"{shape.name}, {row['layers']} layers, {options.seeds} seeds, bound {row['bound']}")
    for effort, gap in row["gap_percent"].items():
        print(f"  {effort:8s} gap mean {gap['mean']:.3f} % max {gap['max']:.2f} %")
    for seed, layer, cost_of, lifted_bound, tight in loose:
        print(
            f"  seed {seed} layer {layer}: cost {cost_of:.6f}, lifted {lifted_bound:.6f}, bound {tight:.6f}"
        )
    return row


def measure_times(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    problem = make_problem(shape, 0, options.layers)
    efforts = ("fast", "default")
    times = {effort: timed(lambda e=effort: place(problem, effort=e), options.repeats) for effort in efforts}
    policy = vllm_time(problem, options.repeats)
    print(f"{shape.name}, {problem.num_layers} layers")
    for effort, spent in times.items():
        ratio = f", {spent['wall_ms'] / policy['wall_ms']:.2f} x vLLM" if policy else ""
        print(f"  {effort:8s} {spent['wall_ms']:.1f} ms wall, {spent['cpu_ms']:.1f} ms processor{ratio}")
    return {"shape": shape.name, "layers": problem.num_layers, "time": times, "vllm": policy}


def measure_growth(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for varied, sizes in GROWTH:
        for layers, experts, ranks in sizes:
            problem = make_problem(Shape("", layers, experts, ranks, 2, 0.8, False), 0, None)
            row = {"varied": varied, "layers": layers, "experts": experts, "ranks": ranks}
            for effort in ("fast", "default"):
                row[effort] = timed(lambda e=effort, p=problem: place(p, effort=e), repeats)["wall_ms"]
            rows.append(row)
            print(
                f"growth with {varied:7s} {layers:3d} layers {experts:3d} experts {ranks:2d} ranks: "
                f"fast {row['fast']:.2f} ms, default {row['default']:.2f} ms"
            )
    return rows


def measure_budget(layers: int | None) -> list[dict[str, float]]:
    """Wall time and mean cost of effort "best" under time budgets, 256 experts on 32 ranks."""
    problem = make_problem(SHAPES[2], 0, layers)
    rows = []
    for budget in (0.0, 0.03, 0.1, 0.3, 1.0):
        began = time.perf_counter()
        cost = float(place(problem, effort="best", time_budget=budget).cost.mean())
        rows.append({"budget_s": budget, "wall_s": time.perf_counter() - began, "cost": cost})
        print(f"budget {budget:.2f} s: {rows[-1]['wall_s']:.3f} s, mean cost {cost:.6f}")
    return rows


def table(stored: dict[str, Any]) -> str:
    """The stored gaps and times as one Markdown table."""
    lines = [
        "| shape | effort | gap, mean | gap, max | bound | time | vLLM's policy | ratio |",
        "|" + "---|" * 8,
    ]
    times = {row["shape"]: row for row in stored["times"]["rows"]}
    for row in stored["gaps"]["rows"]:
        timing = times[row["shape"]]
        policy = timing["vllm"]["wall_ms"]
        for effort, gap in row["gap_percent"].items():
            spent = timing["time"][effort]["wall_ms"]
            lines.append(
                f"| {row['layers']} x {row['shape']} | {effort} | {gap['mean']:.3f} % | {gap['max']:.2f} % "
                f"| {row['bound']} | {spent:.1f} ms | {policy:.1f} ms | {spent / policy:.2f} |"
            )
    return "\n".join(lines)


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "gaps": lambda options: [measure_gaps(shape, options) for shape in chosen(options)],
    "times": lambda options: [measure_times(shape, options) for shape in chosen(options)],
    "growth": lambda options: measure_growth(options.repeats),
    "budgets": lambda options: measure_budget(options.layers),
}


def chosen(options: argparse.Namespace) -> list[Shape]:
    return [shape for shape in SHAPES if shape.name in options.shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--json", type=Path, default=RESULTS / "placement.json")
    parser.add_argument("--table", action="store_true", help="print what is stored, measure nothing")
    options = parser.parse_args()
    stored = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.table:
        print(table(stored))
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    settings = {k: v for k, v in vars(options).items() if k not in ("json", "table", "parts")}
    for part in options.parts:
        rows = PARTS[part](options)
        stored[part] = {"commit": commit, "machine": platform.machine(), "settings": settings, "rows": rows}
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
