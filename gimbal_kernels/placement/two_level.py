"""Search with spare slots on several nodes: which node holds a copy, then which of its ranks (SPEC section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..topology import Topology
from .portfolio import Effort
from .problem import PlacementProblem


def ranks_per_node(topology: Topology) -> int | None:
    """Ranks of a node, or None where the distances show no nodes.

    Nodes are equal blocks of at least two consecutive ranks; the sources to which a rank is farthest of all are the
    same for all ranks of one. On a single node they are the blocks that the DP groups own.
    """
    far = topology.distance == topology.distance.max()
    size = int((far == far[:, :1]).all(axis=0).argmin())  # ranks like the first, up to the first that differs
    if size < 2 or topology.num_ranks % size:
        return None
    blocks = far.reshape(len(far), -1, size)
    return size if (blocks == blocks[:, :, :1]).all() else None


def start_by_node(problem: PlacementProblem, solver: Any, one_copy: Any) -> Any:
    """Slots int32 [L, P] for the flat search to begin with; None where there are no nodes, or too small a model.

    First the nodes are ranks with all slots of their ranks, as near as the nearest of these: how many copies, on
    which nodes. Then each node's experts, one copy each, go to its ranks by the picks that the node serves. Both
    are searches of method "portfolio"; `solver` with spare slots, `one_copy` without.
    """
    size = ranks_per_node(problem.topology)
    if size is None or size * problem.slots_per_rank > problem.num_experts:
        return None
    nodes, slots_per_node = problem.num_ranks // size, size * problem.slots_per_rank
    distance = problem.topology.distance.reshape(problem.num_sources, nodes, size)
    traffic, near = merge_sources(problem.traffic, distance.min(axis=2))
    coarse = PlacementProblem(
        traffic,
        Topology(near),
        slots_per_node,
        weights=problem.weights,
        history=problem.history,
        drift=problem.drift,
    )
    held = np.sort(solver.solve(coarse, 0).reshape(problem.num_layers, nodes, slots_per_node), axis=2)
    served = _served(problem, held, distance.min(axis=2))
    found: Any = np.empty((problem.num_layers, nodes, slots_per_node), dtype=np.int32)
    for node in range(nodes):
        traffic, near = merge_sources(served[node], distance[:, node])
        inside = PlacementProblem(traffic, Topology(near), problem.slots_per_rank, weights=problem.weights)
        local = one_copy.solve_portfolio(inside, Effort(0, 0))
        found[:, node] = np.take_along_axis(held[:, node], local, axis=1)
    return found.reshape(problem.num_layers, problem.num_slots)


def merge_sources(traffic: Any, distance: Any) -> tuple[Any, Any]:
    """Sources that are as far from everything as each other as one source; sums in ascending order of source."""
    rows, of_source = np.unique(distance, axis=0, return_inverse=True)
    merged = np.zeros((traffic.shape[0], len(rows), traffic.shape[2]))
    for source, row in enumerate(of_source.ravel()):
        merged[:, row] += traffic[:, source]
    return merged, rows


def _served(problem: PlacementProblem, held: Any, distance: Any) -> Any:
    """Picks of each source that each node serves of each expert that it holds, [nodes][L, S, experts of a node].

    held: [L, nodes, experts of a node]. distance: [S, nodes]. By the nearest nodes, evenly among equals.
    """
    layers, nodes, _ = held.shape
    has: Any = np.zeros((layers, nodes, problem.num_experts), dtype=bool)
    np.put_along_axis(has, held, True, axis=2)
    served = np.empty((nodes, layers, problem.num_sources, held.shape[2]))
    for source, row in enumerate(distance):
        away = np.where(has, row[:, None], np.inf)
        serves = away == away.min(axis=1, keepdims=True)
        picks = problem.traffic[:, source][:, None] * serves / serves.sum(axis=1, keepdims=True)
        for node in range(nodes):
            served[node][:, source] = np.take_along_axis(picks[:, node], held[:, node], axis=1)
    return served
