"""With spare slots no bound is above the best of all slot maps, and each of its terms makes it tighter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from replica_problems import best_cost, every_slot_map, tiny_problems

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, lower_bound, place
from gimbal_kernels.topology import Topology


@pytest.mark.parametrize("joint", [6, 0])
def test_never_above_the_best_slot_map(joint, monkeypatch):
    monkeypatch.setattr("gimbal_kernels.placement.replica_bound.JOINT_CLASSES", joint)
    rng = np.random.default_rng(11)
    close = 0
    for i, problem in enumerate(tiny_problems(200, seed=12)):
        past = tuple(
            rng.poisson(40 * np.exp(rng.standard_normal((1, problem.num_experts)))) for _ in range(i % 3)
        )
        problem = replace(problem, history=past if i % 2 else ())
        best = best_cost(problem)
        bound = lower_bound(problem).item()
        assert bound <= best * (1 + 1e-9) + 1e-9, (i, bound, best, problem)
        close += bound > 0.6 * best
    assert close > 40


def test_never_above_the_best_slot_map_when_picks_of_some_experts_are_all_earlier():
    rng = np.random.default_rng(18)
    for problem in tiny_problems(60, seed=19):
        idle = rng.random(problem.num_experts) < 0.5
        idle[rng.integers(problem.num_experts)] = False
        past = tuple(
            rng.poisson(90 * np.exp(rng.standard_normal((1, problem.num_experts)))) for _ in range(2)
        )
        problem = replace(problem, traffic=problem.traffic * ~idle, history=past)
        best = best_cost(problem)
        assert lower_bound(problem).item() <= best * (1 + 1e-9) + 1e-9
        assert place(problem).cost.item() == pytest.approx(best, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_never_above_it_on_nodes_with_many_different_ranks(size, monkeypatch):
    monkeypatch.setattr("gimbal_kernels.placement.replica_bound.ENUMERATED_CLASSES", 3)
    topology = Topology.grid(nodes=2, gpus_per_node=2, sources=4)
    experts = 5 if size == 2 else 3
    rng = np.random.default_rng(16)
    by_node = 0
    for _ in range(20):
        traffic = rng.poisson(40 * np.exp(rng.standard_normal((1, 4, experts))))
        problem = PlacementProblem(1 + traffic, topology, size, weights=Weights(1, 0.1, 0))
        best, bound = best_cost(problem), lower_bound(problem).item()
        assert bound <= best * (1 + 1e-9)
        by_node += bound > 0.5 * best
    assert by_node > 10


def test_one_expert_too_heavy_for_its_copies():
    rng = np.random.default_rng(17)
    for _ in range(20):
        load = [int(rng.integers(500, 2000)), *rng.integers(1, 40, 4).tolist()]
        # One spare slot, so two copies at most on three ranks.
        problem = PlacementProblem([[load]], Topology(np.zeros((1, 3))), 2, weights=Weights(0, 4, 0))
        best, bound = best_cost(problem), lower_bound(problem).item()
        assert 0.3 * best < bound <= best * (1 + 1e-9)


def test_second_copies_on_a_rank_are_no_way_below_it():
    rng = np.random.default_rng(13)
    maps = np.array([row for row in np.ndindex(3, 3, 3, 3, 3, 3) if len(set(row)) == 3])
    for i in range(40):
        traffic = rng.poisson(50 * np.exp(rng.standard_normal((1, 2, 3))))
        topology = Topology(rng.integers(0, 3, (2, 3)) if i % 2 else rng.random((2, 3)))
        current = maps[rng.integers(len(maps))][None]
        problem = PlacementProblem(traffic, topology, 2, current, Weights(1, 4, 0.1), drift=0.4 * (i % 3))
        many = replace(
            problem,
            traffic=np.repeat(traffic, len(maps), axis=0),
            current=np.repeat(current, len(maps), axis=0),
        )
        assert lower_bound(problem).item() <= evaluate(many, maps).cost.min().item() + 1e-9


def test_each_term_counts():
    rng = np.random.default_rng(14)
    traffic = 1 + rng.poisson(40 * np.exp(rng.standard_normal((3, 2, 5))))
    maps = every_slot_map(5, 4, 2)
    topology = Topology([[0, 0, 1, 1], [1, 1, 0, 0]])
    plain = PlacementProblem(traffic, topology, 2, np.repeat(maps[:1], 3, axis=0), Weights(1, 4, 0))
    bound = lower_bound(plain)
    assert (lower_bound(replace(plain, drift=1.0)) > bound + 1e-3).all()
    assert (lower_bound(replace(plain, weights=Weights(1, 4, 1.0))) > bound + 1e-3).any()
    # One expert with nearly all picks: with 4 spare slots it may be on all four ranks, with 2 on three at most.
    flat = Topology(np.zeros((1, 4)))
    free = PlacementProblem([[[1000, *[1] * 7]]], flat, 3, weights=Weights(0, 4, 0))
    assert lower_bound(free).item() == pytest.approx(0.0, abs=1e-9)
    narrow = PlacementProblem([[[1000, *[1] * 5]]], flat, 2, weights=Weights(0, 4, 0))
    assert place(narrow).cost.item() >= lower_bound(narrow).item() > 1.0


def test_a_placement_that_stays_put_is_proven_close():
    rng = np.random.default_rng(15)
    traffic = rng.poisson(60 * np.exp(rng.standard_normal((4, 2, 32))))
    topology = Topology.grid(gpus_per_node=4, sources=2)
    first = place(PlacementProblem(traffic, topology, 12), effort="fast")
    problem = PlacementProblem(traffic, topology, 12, first.slots, Weights(1, 4, 1.0))
    found = place(problem, effort="fast")
    gap = (found.cost - lower_bound(problem)) / found.cost
    assert (gap >= -1e-9).all()
    assert gap.mean() < 0.5
