"""History, drift and shrinkage against loops that follow the formulas term by term."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from placement_problems import random_problems, random_slots

from gimbal_kernels.placement import (
    PlacementProblem,
    ShrinkState,
    Weights,
    evaluate,
    measure_drift,
    shrink,
)
from gimbal_kernels.topology import Topology


def naive_uneven(problem: PlacementProblem, row: np.ndarray, layer: int) -> float:
    """Weighted imbalance plus drift term of one layer, copy by copy."""
    ranks, size = problem.num_ranks, problem.slots_per_rank
    load = np.zeros((problem.num_experts, ranks))
    for source in range(problem.num_sources):
        for expert in range(problem.num_experts):
            copies = [slot // size for slot in range(len(row)) if row[slot] == expert]
            near = min(problem.topology.distance[source, rank] for rank in copies)
            serving = [rank for rank in copies if problem.topology.distance[source, rank] == near]
            for rank in serving:
                load[expert, rank] += problem.traffic[layer, source, expert] / len(serving)
    now = load.sum(axis=1)
    value = weight = 0.0
    for age, window in enumerate([now, *(past[layer] for past in problem.history)]):
        if window.sum() == 0:
            continue
        rank_load = np.zeros(ranks)
        for expert in range(problem.num_experts):
            copies = np.bincount(np.flatnonzero(row == expert) // size, minlength=ranks)
            share = load[expert] / now[expert] if now[expert] else copies / copies.sum()
            rank_load += window[expert] * share
        relative = rank_load / rank_load.mean() - 1
        value += 0.8**age * (relative**2).mean()
        weight += 0.8**age
    mean = now.sum() / ranks
    spread = sum((load[e] ** 2).sum() - now[e] ** 2 / ranks for e in range(problem.num_experts))
    return value / weight + problem.drift**2 * spread / (ranks * mean**2)


@pytest.mark.parametrize("replicas", [False, True])
def test_cost_with_history_and_drift_equals_the_naive_loop(replicas):
    rng = np.random.default_rng(3)
    compared = 0
    for problem in random_problems(60, seed=21, replicas=replicas):
        past = tuple(
            rng.integers(0, 4, (problem.num_layers, 2, problem.num_experts)) * (rng.random() < 0.9)
            for _ in range(int(rng.integers(0, 4)))
        )
        problem = replace(problem, history=past, drift=float(rng.choice([0.0, 0.3])))
        slots = random_slots(rng, problem.num_layers, problem.num_experts, problem.num_slots)
        found = evaluate(problem, slots)
        weights = problem.weights_for(Weights())
        for layer in range(problem.num_layers):
            if not problem.traffic[layer].any():
                continue
            expected = (
                weights.alpha * found.comm[layer].item()
                + weights.beta * naive_uneven(problem, slots[layer], layer)
                + weights.gamma * found.moves[layer].item() / problem.num_experts
            )
            assert found.cost[layer].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
            compared += 1
    assert compared > 60


def test_history_example_worked_by_hand():
    # Now the loads are even; one window ago the first rank had 3/2 of the mean: imbalance 1/4, weight 0.8/1.8.
    problem = PlacementProblem(
        [[[2, 2]]], Topology([[0, 0]]), 1, history=([[3, 1]],), weights=Weights(1, 9, 0)
    )
    found = evaluate(problem, [[0, 1]])
    assert found.imbalance.tolist() == [0.0]
    assert found.cost.tolist() == [pytest.approx(9 * 0.25 * 0.8 / 1.8)]


def test_earlier_picks_of_an_expert_without_picks_are_on_its_own_copies():
    topology = Topology([[0, 0, 0, 0]])
    past = ([[0, 0, 0, 1000]],)
    alone = PlacementProblem([[[10, 10, 10, 0]]], topology, 1, history=past, weights=Weights(0, 9, 0))
    # Now loads over the mean are 4/3 on three ranks and 0: imbalance 1/3. Before, one rank had it all: imbalance 3.
    assert evaluate(alone, [[0, 1, 2, 3]]).cost.item() == pytest.approx(9 * (1 / 3 + 0.8 * 3) / 1.8)
    # Two copies, one of them in two slots: parts 0, 0, 2/3 and 1/3, over the mean 8/3 and 4/3.
    spare = replace(alone, slots_per_rank=2)
    before = (1 + 1 + (5 / 3) ** 2 + (1 / 3) ** 2) / 4
    found = evaluate(spare, [[0, 1, 2, 0, 3, 3, 3, 1]])
    loads = np.array([15, 10, 0, 5]) / 7.5 - 1
    assert found.cost.item() == pytest.approx(9 * ((loads**2).mean() + 0.8 * before) / 1.8)


def test_history_may_be_loads_or_traffic_and_survives_replace():
    traffic = np.arange(12).reshape(1, 3, 4)
    topology = Topology([[0, 1]] * 3)
    by_traffic = PlacementProblem(traffic, topology, 2, history=(traffic,))
    by_load = PlacementProblem(traffic, topology, 2, history=(traffic.sum(axis=1),))
    assert by_traffic.history[0].tolist() == by_load.history[0].tolist() == [[12, 15, 18, 21]]
    assert replace(by_traffic, slots_per_rank=3).history[0].tolist() == [[12, 15, 18, 21]]
    assert not by_traffic.history[0].flags.writeable


@pytest.mark.parametrize(
    ("slots", "spread"),
    [
        ([0, 1, 2, 3, 1, 2, 3, 1], 0.75),  # one copy of the only expert that has picks
        ([0, 1, 0, 3, 1, 2, 3, 1], 0.25),  # two
        ([0, 1, 0, 3, 0, 2, 0, 1], 0.0),  # on every rank
    ],
)
def test_drift_counts_an_expert_by_how_many_ranks_share_it(slots, spread):
    problem = PlacementProblem([[[8, 0, 0, 0]]], Topology([[0] * 4]), 2, weights=Weights(0, 5, 0), drift=0.5)
    added = (
        evaluate(problem, [slots]).cost.item() - evaluate(replace(problem, drift=0.0), [slots]).cost.item()
    )
    assert added == pytest.approx(5 * 0.5**2 * spread * 8**2 / (4 * 2**2))


def test_drift_of_two_windows():
    before = np.array([[[10.0, 10.0, 20.0]]])
    assert measure_drift(before, before * 7) == 0.0
    assert measure_drift(before, np.zeros_like(before)) == 0.0
    # Shares .25 .25 .5 become .2 .3 .5: squared changes .0025 over means .225 and .275.
    assert measure_drift(before, [[[20, 30, 50]]]) == pytest.approx((0.0025 / 0.225 + 0.0025 / 0.275) ** 0.5)
    with pytest.raises(ValueError, match="traffic"):
        measure_drift(before, [[[1, 2]]])


def naive_shrink(picks, skew, rho):
    out = np.zeros_like(picks)
    for layer in range(picks.shape[0]):
        total = picks[layer].sum()
        if total == 0:
            continue
        for expert in range(picks.shape[2]):
            load = picks[layer, :, expert].sum()
            column = []
            for source in range(picks.shape[1]):
                mine = picks[layer, source].sum()
                column.append(max(0.0, mine * load / total + rho * mine * skew[layer, source, expert]))
            out[layer, :, expert] = np.array(column) * (load / sum(column) if sum(column) else 0)
    return out


def test_shrink_follows_the_formula_window_by_window():
    rng = np.random.default_rng(0)
    state, mean = None, None
    for window in range(5):
        picks = rng.poisson(5, (3, 2, 6)).astype(float)
        picks[1] *= window != 2  # a layer that is idle for one window
        new = np.zeros_like(picks)
        for layer, source in np.ndindex(3, 2):
            if picks[layer, source].sum():
                pooled = picks[layer].sum(axis=0) / picks[layer].sum()
                new[layer, source] = picks[layer, source] / picks[layer, source].sum() - pooled
        rho = 0.0 if mean is None else float(np.clip((new * mean).sum() / (mean**2).sum(), 0, 1))
        mean = new if mean is None else 0.8 * mean + 0.2 * new
        found, state = shrink(torch.from_numpy(picks), state)
        assert state.rho == pytest.approx(rho)
        assert np.allclose(state.skew, mean)
        assert np.allclose(found.numpy(), naive_shrink(picks, mean, rho))
        assert np.allclose(found.numpy().sum(axis=1), picks.sum(axis=1))


def test_shrink_refuses_a_state_of_another_model():
    with pytest.raises(ValueError, match=r"state: skew of shape \(1, 2, 3\); valid: \(1, 2, 4\)"):
        shrink(np.ones((1, 2, 4)), ShrinkState(np.zeros((1, 2, 3)), 0.0))


@pytest.mark.parametrize(("affine", "low", "high"), [(False, 0.0, 0.2), (True, 0.8, 1.0)])
def test_shrink_tells_random_dispatch_from_affine(affine, low, high):
    rng = np.random.default_rng(1)
    popularity = np.exp(rng.standard_normal((4, 1, 32)))
    tilt = np.exp(0.5 * rng.standard_normal((4, 2, 32))) if affine else 1.0
    state = None
    for _ in range(6):
        noise = np.exp(0.1 * rng.standard_normal((4, 2, 32)))
        _, state = shrink(rng.poisson(300 * popularity * tilt * noise), state)
    assert low <= state.rho <= high
