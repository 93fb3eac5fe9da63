"""No bound is above the true optimum: against exhaustive search on hundreds of tiny problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, host, lower_bound, place
from gimbal_kernels.topology import Topology

needs_host = pytest.mark.skipif(host.status() != "ready", reason=host.status())
SHAPES = ((6, 3, 2), (6, 2, 3), (4, 4, 2), (8, 4, 2), (8, 2, 1), (6, 6, 3))


def tiny_problems(count: int, seed: int):
    """[1, S, E] with loads from even to one expert above the mean rank load."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        experts, ranks, sources = SHAPES[i % len(SHAPES)]
        popularity = np.exp(rng.choice([0.3, 1.0, 2.0]) * rng.standard_normal(experts))
        tilt = np.exp(rng.choice([0.0, 0.5, 1.5]) * rng.standard_normal((sources, experts)))
        traffic = rng.poisson(3000 * popularity * tilt)[None]
        distance = rng.integers(0, 2, (sources, ranks)) if i % 3 else 3 * rng.random((sources, ranks))
        current = rng.permutation(experts)[None] if i % 2 else None
        weights = Weights(1.0, float(rng.choice([0.0, 0.5, 4.0, 20.0])), 0.02)
        yield PlacementProblem(traffic, Topology(distance), experts // ranks, current, weights)


def all_homes(experts: int, ranks: int) -> np.ndarray:
    """Every assignment of experts to ranks with equal numbers, [N, E]."""
    homes = np.full((1, experts), -1)
    size = experts // ranks
    for rank in range(ranks):
        grown = []
        for home in homes:
            for chosen in combinations(np.flatnonzero(home < 0), size):
                filled = home.copy()
                filled[list(chosen)] = rank
                grown.append(filled)
        homes = np.array(grown)
    return homes


def exhaustive(problem: PlacementProblem) -> float:
    homes = all_homes(problem.num_experts, problem.num_ranks)
    slots = np.argsort(homes, axis=1, kind="stable")
    many = replace(
        problem,
        traffic=np.repeat(problem.traffic, len(slots), axis=0),
        current=None if problem.current is None else np.repeat(problem.current, len(slots), axis=0),
        history=tuple(np.repeat(past, len(slots), axis=0) for past in problem.history),
    )
    return evaluate(many, slots).cost.min().item()


@needs_host
def test_never_above_the_optimum_and_each_refinement_helps():
    gap = Counter()
    for problem in tiny_problems(240, seed=1):
        best = exhaustive(problem)
        bounds = {
            "plain": lower_bound(problem, lift=False).item(),
            "lifted": lower_bound(problem).item(),
            "branched": lower_bound(problem, lift=False, nodes=60).item(),
            "both": lower_bound(problem, nodes=60).item(),
        }
        for name, bound in bounds.items():
            assert bound <= best + 1e-9 * max(1.0, best), (name, bound, best, problem)
            gap[name] += (best - bound) / max(best, 1e-9)
        assert bounds["both"] >= bounds["lifted"] - 1e-12
        assert bounds["branched"] >= bounds["plain"] - 1e-12
        assert place(problem).cost.item() >= best - 1e-9
    assert gap["lifted"] < 0.8 * gap["plain"]
    assert gap["both"] < 0.75 * gap["lifted"]  # where a rank has one slot there is nothing left to gain


@needs_host
def test_branching_to_the_end_proves_the_optimum():
    proven = 0
    for problem in tiny_problems(36, seed=2):
        best = exhaustive(problem)
        bound = lower_bound(problem, nodes=3000).item()
        assert bound <= best + 1e-9 * max(1.0, best)
        proven += bound >= best * (1 - 1e-4) - 1e-9
    assert proven >= 33


def test_without_the_library_the_plain_dual_is_a_bound_too(monkeypatch):
    monkeypatch.setattr(host, "_bind", lambda: (None, "libgimbal_host.so was not built"))
    close = 0
    for problem in tiny_problems(40, seed=3):
        best = exhaustive(problem)
        bound = lower_bound(problem, nodes=5).item()
        assert bound <= best + 1e-9 * max(1.0, best)
        close += bound >= 0.9 * best
    assert close > 5


@needs_host
def test_history_and_drift_stay_below_the_optimum():
    rng = np.random.default_rng(4)
    for problem in tiny_problems(60, seed=4):
        past = tuple(
            rng.poisson(100 * np.exp(rng.standard_normal((1, problem.num_experts)))) for _ in range(2)
        )
        richer = replace(problem, history=past, drift=0.3)
        best = exhaustive(richer)
        for nodes in (0, 40):
            assert lower_bound(richer, nodes=nodes).item() <= best + 1e-9 * max(1.0, best)


@needs_host
def test_experts_whose_picks_are_all_earlier_keep_the_bound_below_the_optimum():
    # The only rank with earlier picks cannot be avoided: as much as the best placement costs.
    flat = Topology([[0, 0, 0, 0]])
    alone = PlacementProblem([[[10, 10, 10, 0]]], flat, 1, history=([[0, 0, 0, 1000]],))
    assert lower_bound(alone, nodes=500).item() <= place(alone).cost.item() * (1 + 1e-9)
    rng = np.random.default_rng(6)
    for problem in tiny_problems(60, seed=7):
        idle = rng.random(problem.num_experts) < 0.4
        idle[rng.integers(problem.num_experts)] = False
        past = tuple(
            rng.poisson(2000 * np.exp(rng.standard_normal((1, problem.num_experts)))) for _ in range(2)
        )
        richer = replace(problem, traffic=problem.traffic * ~idle, history=past)
        best = exhaustive(richer)
        for nodes in (0, 40):
            assert lower_bound(richer, nodes=nodes).item() <= best + 1e-9 * max(1.0, best), (nodes, richer)
        assert (
            place(richer).cost.item() <= 1.02 * best + 1e-6
        )  # where such an expert goes is not left to chance


@needs_host
@pytest.mark.parametrize("windows", [0, 2])
def test_with_one_slot_per_rank_it_is_the_optimum(windows):
    rng = np.random.default_rng(8)
    for problem in (p for p in tiny_problems(40, seed=9) if p.slots_per_rank == 1):
        past = tuple(rng.poisson(300, (1, problem.num_experts)) for _ in range(windows))
        problem = replace(problem, history=past, drift=0.3)
        best = exhaustive(problem)
        assert best * (1 - 1e-9) - 1e-9 <= lower_bound(problem).item() <= best * (1 + 1e-9) + 1e-9


def every_slot_map(experts: int, slots: int):
    return (row for row in product(range(experts), repeat=slots) if len(set(row)) == experts)


@pytest.mark.parametrize("enumerated", [10, 0])
def test_with_spare_slots_never_above_the_optimum(enumerated, monkeypatch):
    monkeypatch.setattr("gimbal_kernels.placement.replica_bound.ENUMERATED_CLASSES", enumerated)
    rng = np.random.default_rng(5)
    slots = np.array(list(every_slot_map(3, 6)))
    positive = 0
    for i in range(40):
        sources = int(rng.integers(1, 4))
        traffic = rng.poisson(50 * np.exp(rng.standard_normal((1, sources, 3))))
        distance = rng.integers(0, 3, (sources, 3)) if i % 2 else rng.random((sources, 3))
        topology = Topology(distance)
        many = PlacementProblem(np.repeat(traffic, len(slots), axis=0), topology, 2, weights=Weights(2, 1, 0))
        best = evaluate(many, slots).cost.min().item()
        bound = lower_bound(PlacementProblem(traffic, topology, 2, weights=Weights(2, 1, 0))).item()
        assert bound <= best + 1e-9
        positive += bound > 0.3 * best
    assert positive > 5


def test_layers_without_traffic_and_no_layers():
    topology = Topology([[0, 1]])
    assert lower_bound(PlacementProblem(np.zeros((2, 1, 4)), topology, 2)).tolist() == [0.0, 0.0]
    assert lower_bound(PlacementProblem(np.zeros((2, 1, 4)), topology, 3)).tolist() == [0.0, 0.0]
    assert lower_bound(PlacementProblem(np.zeros((0, 1, 4)), topology, 2)).shape == (0,)


@pytest.mark.parametrize("nodes", [-1, 1.5, True])
def test_bad_nodes(nodes):
    with pytest.raises(ValueError, match=r"nodes: .*valid: an integer >= 0"):
        lower_bound(PlacementProblem([[[1, 2]]], Topology([[0, 1]]), 1), nodes=nodes)
