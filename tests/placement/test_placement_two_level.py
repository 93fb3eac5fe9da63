"""The search by node, then by rank, that starts the search with spare slots on many ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, host, place, reference, replica_host
from gimbal_kernels.placement import replica_search as search
from gimbal_kernels.placement.two_level import merge_sources, ranks_per_node, start_by_node
from gimbal_kernels.topology import Topology

ready = host.status() == "ready" and replica_host.status() == "ready"
needs_host = pytest.mark.skipif(not ready, reason=f"{host.status()}; {replica_host.status()}")


def problem_on(
    topology: Topology, experts: int, size: int, layers: int = 2, seed: int = 0
) -> PlacementProblem:
    rng = np.random.default_rng(seed)
    shape = (layers, topology.num_sources, experts)
    traffic = rng.poisson(
        60 * np.exp(rng.standard_normal((layers, 1, experts)) + 0.4 * rng.standard_normal(shape))
    )
    return PlacementProblem(traffic, topology, size, drift=0.2)


@pytest.mark.parametrize(
    ("topology", "size"),
    [
        (Topology.grid(nodes=8, gpus_per_node=8, sources=8), 8),
        (Topology.grid(nodes=8, gpus_per_node=8, sources=64), 8),
        (Topology.grid(nodes=2, gpus_per_node=4, sources=1), None),
        (Topology.grid(gpus_per_node=8, sources=2), 4),
        (Topology.grid(gpus_per_node=8, sources=8), None),
        (Topology(np.zeros((2, 6))), None),
        (Topology([[0, 0, 1, 1, 1]]), None),
        (Topology([[0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1]]), 2),
        (Topology([[0, 1, 0, 1]]), None),
    ],
)
def test_nodes_are_read_off_the_distances(topology, size):
    assert ranks_per_node(topology) == size


def test_merged_sources_make_the_same_costs():
    rng = np.random.default_rng(1)
    distance = np.array([[0, 1, 2], [1, 0, 2], [0, 1, 2], [1, 0, 2]])
    traffic = rng.integers(0, 50, (2, 4, 5))
    merged, rows = merge_sources(traffic, distance)
    assert merged.shape == (2, 2, 5)
    slots = np.tile([0, 1, 2, 3, 4, 0], (2, 1))
    whole = evaluate(PlacementProblem(traffic, Topology(distance), 2), slots)
    less = evaluate(PlacementProblem(merged, Topology(rows), 2), slots)
    assert np.allclose(whole.cost, less.cost)


@needs_host
def test_same_bytes_with_both_backends():
    for seed, topology in enumerate(
        (Topology.grid(nodes=2, gpus_per_node=2, sources=4), Topology.grid(gpus_per_node=6, sources=2))
    ):
        problem = problem_on(topology, 14, 4, seed=seed)
        expected = start_by_node(problem, search, reference)
        found = start_by_node(problem, replica_host, host)
        assert found.tobytes() == expected.tobytes()
        from_there = search.solve(problem, 0, start=expected)
        assert replica_host.solve(problem, 0, start=found).tobytes() == from_there.tobytes()


@needs_host
@pytest.mark.parametrize("sources", [4, 16])
def test_better_than_the_flat_search_alone(sources):
    topology = Topology.grid(nodes=4, gpus_per_node=4, sources=sources)
    problem = problem_on(topology, 64, 5, layers=6)
    start = start_by_node(problem, replica_host, host)
    for layer in start.reshape(6, 16, 5):
        assert all(len(set(rank)) == 5 for rank in layer.tolist())
    flat = evaluate(problem, replica_host.solve(problem, 0)).cost
    found = place(problem, effort="fast").cost
    assert found.mean() < flat.mean()
    settled = replace(problem, current=place(problem).slots, weights=Weights(1, 4, 10.0))
    assert place(settled).slots.tolist() == settled.current.tolist()


@needs_host
def test_where_there_are_no_nodes_the_flat_search_serves():
    odd = problem_on(Topology(np.random.default_rng(2).random((3, 17))), 40, 3)
    assert start_by_node(odd, replica_host, host) is None
    few = problem_on(
        Topology.grid(nodes=2, gpus_per_node=8, sources=2), 24, 4
    )  # 32 slots per node, 24 experts
    assert start_by_node(few, replica_host, host) is None
    for problem in (odd, few):
        found = place(problem)
        ranks = found.slots.reshape(2, problem.num_ranks, -1).tolist()
        assert all(len(set(rank)) == len(rank) for layer in ranks for rank in layer)
