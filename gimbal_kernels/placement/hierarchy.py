"""The hierarchical form of balance-only EPLB: expert groups to nodes first, then copies to the node's ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import EMPTY_BELOW
from .objective import evaluate
from .problem import Placement, PlacementProblem
from .reference import identity, pack_evenly, slots_in_ranks, sum_in_order


def place_by_node(problem: PlacementProblem, *, nodes: int, groups: int) -> Placement:
    """Balance only, with every expert group whole on one node, and evaluates it.

    After the hierarchical policy of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), for models whose router limits
    a token to few groups: groups go to nodes, heaviest first onto the lightest node; each node then gives its spare
    slots to the experts whose copies are the fullest, and packs copies onto its ranks, as method "eplb" does on all
    ranks at once. Unlike there, no rank holds two copies of an expert. Neither sources nor distances matter.

    Ties: see method "eplb" (docs/placement.md); equally heavy groups go in ascending order, equally light nodes
    by fewer groups, then the lowest.

    Args:
        problem: see `PlacementProblem`. Node n holds the n-th block of R/nodes consecutive ranks.
        nodes: number of nodes; divides the ranks and the groups.
        groups: number of expert groups, equal blocks of consecutive experts; divides the experts.

    Returns:
        Placement; a layer without traffic keeps its current one, as with `place`.

    Raises:
        ValueError: a number that does not divide as above, or more slots on a rank than a node has experts.
    """
    _check(problem, nodes, groups)
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    for layer in range(problem.num_layers):
        load = sum_in_order(problem.traffic[layer])
        current = None if problem.current is None else problem.current[layer]
        if load.sum() < EMPTY_BELOW:
            slots[layer] = identity(problem) if current is None else current
            continue
        held = _held(load, problem.num_ranks, problem.slots_per_rank, nodes, groups)
        slots[layer] = slots_in_ranks(held, current, problem.slots_per_rank)
    return evaluate(problem, slots)


def _held(load: Any, ranks: int, slots_per_rank: int, nodes: int, groups: int) -> list[set[int]]:
    """Experts of each rank."""
    members = np.arange(len(load)).reshape(groups, -1)
    groups_of_node = pack_evenly(load[members].sum(axis=1), nodes, groups // nodes)
    held: list[set[int]] = []
    for own in groups_of_node:
        experts = np.sort(members[sorted(own)].ravel())
        packed = pack_evenly(load[experts], ranks // nodes, slots_per_rank)
        held += [set(experts[sorted(chosen)].tolist()) for chosen in packed]
    return held


def _check(problem: PlacementProblem, nodes: int, groups: int) -> None:
    for name, value in (("nodes", nodes), ("groups", groups)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {value!r}; valid: an integer >= 1")
    for name, value, whole, what in (
        ("nodes", nodes, problem.num_ranks, "ranks"),
        ("groups", groups, problem.num_experts, "experts"),
        ("nodes", nodes, groups, "groups"),
    ):
        if whole % value:
            nearest = min(
                (n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: (abs(n - value), n)
            )
            raise ValueError(f"{name}: {value} does not divide {whole} {what}; nearest valid: {nearest}")
    if problem.slots_per_rank > problem.num_experts // nodes:
        raise ValueError(
            f"nodes: {nodes} leave {problem.num_experts // nodes} experts to a node, fewer than the "
            f"{problem.slots_per_rank} slots of a rank; valid: at most "
            f"{problem.num_experts // problem.slots_per_rank} nodes"
        )
