"""Shares of picks over copies: against numpy bit for bit, at a minimum, never above the nearest rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from placement_problems import random_problems, random_slots

from gimbal_kernels.counting import ReplicaMap
from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, place, replica_host, water_fill
from gimbal_kernels.placement.water_fill import nearest_shares
from gimbal_kernels.topology import Topology

needs_host = pytest.mark.skipif(replica_host.status() != "ready", reason=replica_host.status())
GRID = Topology.grid(gpus_per_node=4, sources=2)


def problems(count: int, seed: int):
    """Random problems and slot maps, second copies on a rank among them, with history and drift in turn."""
    rng = np.random.default_rng(seed)
    for i, problem in enumerate(random_problems(count, seed=seed, replicas=True)):
        past = tuple(
            rng.integers(0, 5, (problem.num_layers, 1, problem.num_experts))
            for _ in range(i // 6 % 2 * (i % 3 + 1))
        )
        slots = random_slots(rng, problem.num_layers, problem.num_experts, problem.num_slots)
        yield replace(problem, history=past, drift=(0.0, 0.3, 1.0)[i % 3]), slots


def sums(problem: PlacementProblem, slots: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Sum of the shares of each (source, expert), [L, S, E]."""
    total = np.zeros((problem.num_layers, problem.num_sources, problem.num_experts))
    for layer, slot in np.ndindex(slots.shape):
        total[layer, :, slots[layer, slot]] += shares[layer, :, slot]
    return total


@needs_host
def test_same_bytes_as_the_reference():
    for i, (problem, slots) in enumerate(problems(120, seed=1)):
        expected = water_fill(problem, slots, rounds=1 + i % 6, backend="reference")
        found = water_fill(problem, slots, rounds=1 + i % 6, backend="host")
        assert found.numpy().tobytes() == expected.numpy().tobytes(), (i, problem)


@needs_host
def test_never_above_the_nearest_rule_and_often_below():
    below = 0
    for problem, slots in problems(200, seed=2):
        nearest = evaluate(problem, slots)
        shares = water_fill(problem, slots)
        assert (shares >= 0).all()
        assert np.allclose(sums(problem, slots, shares.numpy()), 1)
        served = evaluate(problem, slots, shares=shares)
        assert (served.cost <= nearest.cost * (1 + 1e-13)).all()
        below += (served.cost < nearest.cost * (1 - 1e-6)).any().item()
    assert below > 80


@needs_host
def test_no_shares_are_better():
    """The cost is convex in the shares: at the optimum every step towards any other shares raises it."""
    rng = np.random.default_rng(3)
    tried = 0
    for problem, slots in problems(60, seed=4):
        shares = water_fill(problem, slots, rounds=2000).numpy()
        cost = evaluate(problem, slots, shares=shares).cost.numpy()
        for _ in range(4):
            other = rng.random(shares.shape) * rng.integers(0, 2, shares.shape) + 1e-9
            total = sums(problem, slots, other)
            for layer in range(problem.num_layers):
                other[layer] /= total[layer][:, slots[layer]]
            for step in (1e-3, 1e-1):
                moved = evaluate(problem, slots, shares=(1 - step) * shares + step * other).cost.numpy()
                assert (moved >= cost * (1 - 1e-6) - 1e-12).all()
                tried += 1
    assert tried > 300


def test_costs_by_shares_equal_the_naive_sums():
    rng = np.random.default_rng(7)
    for problem, slots in problems(40, seed=8):
        shares = rng.random((problem.num_layers, problem.num_sources, problem.num_slots)) + 0.01
        part = shares / np.take_along_axis(sums(problem, slots, shares), slots[:, None], axis=2)
        found = evaluate(problem, slots, shares=shares)  # scaled inside
        even = evaluate(problem, slots, shares=nearest_shares(problem, slots))
        assert np.allclose(even.cost, evaluate(problem, slots).cost)
        for layer in range(problem.num_layers):
            total = problem.traffic[layer].sum()
            load, comm = np.zeros(problem.num_ranks), 0.0
            for source in range(problem.num_sources):
                for slot, expert in enumerate(slots[layer]):
                    rank = slot // problem.slots_per_rank
                    picks = problem.traffic[layer, source, expert] * part[layer, source, slot]
                    load[rank] += picks
                    comm += picks * problem.topology.distance[source, rank]
            if total > 0:
                assert found.comm[layer].item() == pytest.approx(comm / total)
                mean = total / problem.num_ranks
                assert found.imbalance[layer].item() == pytest.approx(
                    ((load / mean - 1) ** 2).mean(), abs=1e-12
                )
                assert found.max_over_mean[layer].item() == pytest.approx(load.max() / mean)


def test_one_block_by_hand():
    # One source with 10 picks of expert 0 on both ranks and 2 of expert 1 on rank 1 only; distance 0 and 1.
    problem = PlacementProblem([[[10, 2]]], Topology([[0, 1]]), 2, weights=Weights(1, 4, 0))
    slots = [[0, 0, 0, 1]]
    shares = water_fill(problem, slots, backend="reference")
    # Marginal costs 1/12 * d + 2*4/(2*36) * load: equal at loads x and 12 - x with x - (12 - x) = 0.75.
    assert (shares[0, 0, :2].sum() * 10).item() == pytest.approx(6.375)
    assert shares[0, 0, 0].item() == shares[0, 0, 1].item()  # two slots of one rank share evenly
    assert shares[0, 0, 3].item() == 1.0


def test_without_balance_or_picks_the_nearest_serve():
    rng = np.random.default_rng(5)
    traffic = rng.poisson(3, (2, 2, 12))
    traffic[1] = 0
    slots = random_slots(rng, 2, 12, 20)
    problem = PlacementProblem(traffic, GRID, 5, weights=Weights(1, 0, 0))
    shares = water_fill(problem, slots)
    assert shares.numpy().tobytes() == nearest_shares(problem, slots).tobytes()
    assert np.allclose(evaluate(problem, slots, shares=shares).cost, evaluate(problem, slots).cost)
    heavy = water_fill(problem, slots, beta=20.0)
    assert heavy[1].numpy().tobytes() == shares[1].numpy().tobytes()
    changed = (heavy[0] != shares[0]).numpy()
    assert changed.any()
    assert not changed[traffic[0][:, slots[0]] == 0].any()


@needs_host
def test_a_larger_beta_evens_out_more_and_the_map_takes_the_shares():
    rng = np.random.default_rng(6)
    traffic = rng.poisson(60 * np.exp(rng.standard_normal((3, 2, 32))))
    placed = place(PlacementProblem(traffic, GRID, 12))
    shifted = traffic * rng.integers(5, 15, traffic.shape)
    problem = PlacementProblem(shifted, GRID, 12)
    plain = evaluate(problem, placed.slots)
    at_4 = evaluate(problem, placed.slots, shares=water_fill(problem, placed.slots))
    shares = water_fill(problem, placed.slots, beta=20.0)
    at_20 = evaluate(problem, placed.slots, shares=shares)
    assert (at_20.imbalance <= at_4.imbalance + 1e-9).all()
    assert (at_4.imbalance < plain.imbalance).all()
    assert at_20.max_over_mean.mean() < plain.max_over_mean.mean() - 0.02
    table = ReplicaMap.from_slots(placed.slots, GRID, num_experts=32, shares=shares)
    assert table.thresholds is not None


@pytest.mark.parametrize(
    "bad", [{"rounds": 0}, {"rounds": 1.5}, {"beta": -1}, {"beta": float("nan")}, {"backend": "gpu"}]
)
def test_bad_arguments(bad):
    problem = PlacementProblem([[[1, 2]]], Topology([[0, 1]]), 2)
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: .*valid"):
        water_fill(problem, [[0, 1, 0, 1]], **bad)


@pytest.mark.parametrize(
    "bad", [np.full((1, 1, 4), -1.0), np.full((1, 1, 4), np.nan), np.zeros((1, 1, 4)), np.ones((1, 4))]
)
def test_bad_shares_are_refused(bad):
    problem = PlacementProblem([[[1, 2]]], Topology([[0, 1]]), 2)
    with pytest.raises(ValueError, match=r"shares: .*valid"):
        evaluate(problem, [[0, 1, 0, 1]], shares=bad)
