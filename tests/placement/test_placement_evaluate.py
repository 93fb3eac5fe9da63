"""`evaluate` against the formulas pick by pick, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from placement_problems import naive_evaluation, random_problems, random_slots

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, place
from gimbal_kernels.topology import Topology


@pytest.mark.parametrize("replicas", [False, True])
def test_equals_the_naive_loop(replicas):
    rng = np.random.default_rng(7)
    for problem in random_problems(80, seed=11, replicas=replicas):
        slots = random_slots(rng, problem.num_layers, problem.num_experts, problem.num_slots)
        found = evaluate(problem, slots)
        for layer in range(problem.num_layers):
            for name, value in naive_evaluation(problem, slots, layer).items():
                # 1e-9 of the heaviest term: counts near 2^63 are rounded once when they become float64.
                assert getattr(found, name)[layer].item() == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_an_example_worked_by_hand():
    # Two sources and two ranks; expert 0 has a copy on each rank, experts 1 and 2 one each. Source 0 sends 6, 2, 0
    # picks, source 1 sends 2, 4, 2. Only source 1's 4 picks of expert 1 and nothing else cross over.
    problem = PlacementProblem(
        [[[6, 2, 0], [2, 4, 2]]],
        Topology([[0, 1], [1, 0]]),
        2,
        current=[[0, 1, 1, 2]],
        weights=Weights(alpha=2.0, beta=3.0, gamma=6.0),
    )
    found = evaluate(problem, [[0, 1, 0, 2]])
    assert found.comm.tolist() == [4 / 16]
    assert found.max_over_mean.tolist() == [12 / 8]  # loads 6 + 2 + 4 and 2 + 2
    assert found.imbalance.tolist() == [0.25]
    assert found.moves.tolist() == [1]  # expert 0 on rank 1
    assert found.cost.tolist() == [2 * 0.25 + 3 * 0.25 + 6 * 1 / 3]


def test_equally_near_copies_share_evenly_and_two_on_a_rank_take_two_shares():
    problem = PlacementProblem([[[9, 0, 0]]], Topology([[1, 1, 5]]), 2)
    found = evaluate(problem, [[0, 0, 0, 1, 0, 2]])
    assert found.max_over_mean.tolist() == [2.0]  # 6 of 9 picks on rank 0 against a mean of 3
    assert found.comm.tolist() == [1.0]


def test_a_second_copy_on_a_rank_is_not_a_move():
    problem = PlacementProblem([[[1, 1, 1]]], Topology([[0, 0]]), 2, current=[[0, 1, 2, 1]])
    assert evaluate(problem, [[0, 0, 2, 1]]).moves.tolist() == [0]


def test_slots_permuted_inside_a_rank_are_no_moves():
    problem = PlacementProblem([[[1, 1, 1, 1]]], Topology([[0, 0]]), 2, current=[[0, 1, 2, 3]])
    assert evaluate(problem, [[1, 0, 3, 2]]).moves.tolist() == [0]
    assert evaluate(problem, [[2, 0, 1, 3]]).moves.tolist() == [2]


def test_without_a_current_placement_gamma_costs_nothing():
    problem = PlacementProblem([[[1, 1]]], Topology([[0, 0]]), 1, weights=Weights(1, 4, 100))
    assert evaluate(problem, [[1, 0]]).cost.tolist() == [0.0]


def test_result_types_and_no_shared_memory():
    problem = PlacementProblem([[[1, 1]]], Topology([[0, 0]]), 1, current=[[0, 1]])
    slots = np.array([[1, 0]])
    found = evaluate(problem, slots)
    assert found.slots.dtype == torch.int32
    assert found.moves.dtype == torch.int64
    assert {getattr(found, n).dtype for n in ("cost", "comm", "imbalance", "max_over_mean")} == {
        torch.float64
    }
    found.slots[0, 0] = 0
    assert slots.tolist() == [[1, 0]]
    place(problem, method="stay").slots[0, 0] = 1
    assert problem.current.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 2]], r"slots: shape \(1, 3\); valid: \[1, 4\]"),
        ([[0, 1, 2, 4]], "slots: layer 0, slot 3 holds 4; valid: 0 to 2"),
        ([[0, 1, 2, -1]], "slots: layer 0, slot 3 holds -1"),
        ([[0, 1, 1, 0]], "slots: layer 0 has no slot for expert 2"),
        ([[0.0, 1.0, 2.0, 2.0]], "slots: dtype float64"),
    ],
)
def test_bad_slots_are_refused_by_name(slots, message):
    problem = PlacementProblem([[[1, 1, 1]]], Topology([[0, 0]]), 2)
    with pytest.raises(ValueError, match=message):
        evaluate(problem, slots)
