"""Placement on a GPU against the host: the same bytes, and the time of both in the same run.

    python bench/device_placement.py [--json FILE]

Times are medians of whole solves, from traffic to slots on the host, evaluation not counted. Exit code 1
when a byte differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gimbal_kernels.placement import PlacementProblem, Weights, cuda, host
from gimbal_kernels.placement.portfolio import Effort
from gimbal_kernels.topology import Topology

ROOT = Path(__file__).resolve().parents[1]
TURNS = 5
# Layers, experts, topology (SPEC section 1).
SHAPES = {
    "qwen": (48, 128, Topology.grid(gpus_per_node=4, sources=2)),
    "deepseek": (58, 256, Topology.grid(gpus_per_node=8, sources=8)),
    "wide": (58, 256, Topology.grid(nodes=8, gpus_per_node=8, sources=8)),
}


def make_problem(layers: int, experts: int, topology: Topology) -> PlacementProblem:
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.standard_normal((layers, 1, experts)))
    skew = np.exp(rng.standard_normal((layers, topology.num_sources, experts)))
    current = rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)
    traffic = rng.poisson(300 * popularity * skew)
    return PlacementProblem(traffic, topology, experts // topology.num_ranks, current, Weights(gamma=0.02))


def median_ms(solve: Callable[[], Any]) -> float:
    spent = []
    for _ in range(TURNS):
        start = time.perf_counter()
        solve()
        spent.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(spent), 3)


def compare(name: str, effort_name: str) -> dict[str, Any]:
    problem = make_problem(*SHAPES[name])
    effort = Effort.named(effort_name, problem.num_ranks)

    def on_gpu() -> Any:
        return cuda.solve_portfolio(problem, effort, device="cuda")

    def on_host() -> Any:
        return host.solve_portfolio(problem, effort)

    equal = on_gpu().tobytes() == on_host().tobytes()
    cost = {"cuda_ms": median_ms(on_gpu), "host_ms": median_ms(on_host)}
    return {"shape": name, "effort": effort_name, "equal": equal, **cost}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    target = parser.parse_args().json
    for state in (cuda.status(), host.status()):
        if state != "ready":
            parser.error(state)
    rows = [compare(name, effort) for name in SHAPES for effort in ("fast", "default")]
    for row in rows:
        print(row)
    if target is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        about = {
            "commit": commit.stdout.strip(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        result = {**about, "command": "python bench/device_placement.py", "rows": rows}
        target.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
