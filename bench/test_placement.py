"""Placement: compiled against numpy against the policy of the installed vLLM, in one process.

    python -m pytest bench/test_placement.py --benchmark-json=placement.json

Times compare only within one run. Every method is timed from host arrays to a slot map, as a server would call it:
`place` includes the checks and the evaluation of the result; "solve" is the search alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gimbal_kernels.placement import PlacementProblem, evaluate, host, place, reference
from gimbal_kernels.topology import Topology


@dataclass(frozen=True)
class Shape:
    layers: int
    experts: int
    ranks: int
    sources: int
    spare: int = 0


SHAPES = {
    "qwen 48x128 R4 S2": Shape(48, 128, 4, 2),
    "deepseek 58x256 R32 S32": Shape(58, 256, 32, 32),
    "deepseek 58x256+32 R32 S32": Shape(58, 256, 32, 32, spare=32),
}


def make_problem(shape: Shape) -> PlacementProblem:
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.standard_normal((shape.layers, 1, shape.experts)))
    tilt = np.exp(0.5 * rng.standard_normal((shape.layers, shape.sources, shape.experts)))
    traffic = rng.poisson(20_000 / shape.sources * popularity * tilt)
    total = shape.experts + shape.spare
    current = np.tile(np.arange(total) % shape.experts, (shape.layers, 1))
    topology = Topology.grid(gpus_per_node=shape.ranks, sources=shape.sources)
    return PlacementProblem(traffic, topology, total // shape.ranks, current)


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def quality(problem: PlacementProblem, slots: object) -> dict[str, float]:
    found = evaluate(problem, slots)
    return {
        "max_over_mean": round(found.max_over_mean.mean().item(), 4),
        "comm": round(found.comm.mean().item(), 4),
        "moves_per_layer": round(found.moves.double().mean().item(), 2),
    }


def methods(shape: Shape) -> tuple[str, ...]:
    return ("eplb",) if shape.spare else ("paper", "greedy", "eplb")


@pytest.mark.parametrize("method", ["paper", "greedy", "eplb"])
@pytest.mark.skipif(host.status() != "ready", reason=host.status())
def test_host_solve(benchmark, shape, method):
    if method not in methods(shape):
        pytest.skip("places one copy per expert")
    problem = make_problem(shape)
    benchmark.group = f"{shape}"
    slots = benchmark(host.solve, problem, method)
    assert slots.tobytes() == reference.solve(problem, method).tobytes()
    benchmark.extra_info.update(quality(problem, slots))


@pytest.mark.parametrize("method", ["paper", "eplb"])
def test_place(benchmark, shape, method):
    if method not in methods(shape):
        pytest.skip("places one copy per expert")
    problem = make_problem(shape)
    benchmark.group = f"{shape}"
    benchmark(place, problem, method=method)


@pytest.mark.parametrize("method", ["paper", "eplb"])
def test_reference_solve(benchmark, shape, method):
    if method not in methods(shape):
        pytest.skip("places one copy per expert")
    problem = make_problem(shape)
    benchmark.group = f"{shape}"
    benchmark.pedantic(reference.solve, args=(problem, method), rounds=3)


def test_vllm_policy(benchmark, shape):
    policy = pytest.importorskip("vllm.distributed.eplb.policy.default").DefaultEplbPolicy
    problem = make_problem(shape)
    benchmark.group = f"{shape}"
    load = torch.from_numpy(problem.traffic.sum(axis=1))
    current = torch.from_numpy(problem.current.astype(np.int64))
    slots = benchmark(policy.rebalance_experts, load, problem.num_slots, 1, 1, shape.ranks, current)
    benchmark.extra_info.update(quality(problem, slots))
