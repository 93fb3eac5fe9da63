"""What each method promises, checked against the formulas and small cases worked by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from placement_problems import random_problems, ranks_of

from gimbal_kernels.placement import CALIBRATED, UNCALIBRATED, PlacementProblem, Weights, place
from gimbal_kernels.topology import Topology

GRID = Topology.grid(gpus_per_node=4, sources=2)


def exact_score(
    problem: PlacementProblem, method: str, layer: int, expert: int, rank: int, load: list
) -> float:
    """The score of SPEC section 3.1 ("paper") or the marginal of J of section 3.2 ("greedy"), exactly."""
    picks = [[Fraction(x) for x in row] for row in problem.traffic[layer].tolist()]
    total = sum(map(sum, picks))
    ranks, experts = problem.num_ranks, problem.num_experts
    mine = sum(row[expert] for row in picks)
    near = [Fraction(x) for x in problem.topology.distance[:, rank].tolist()]
    comm = sum(row[expert] * d for row, d in zip(picks, near, strict=True))
    mean = total / ranks
    moved = (
        problem.current is not None
        and expert not in ranks_of(problem.current[layer], problem.slots_per_rank)[rank]
    )
    if method == "paper":
        weights = problem.weights or CALIBRATED
        unit = total / experts
        square = ((load[rank] + mine - mean) ** 2 - (load[rank] - mean) ** 2) / unit**2
        return float(
            Fraction(weights.alpha) * comm / unit
            + Fraction(weights.beta) * square
            + Fraction(weights.gamma) * moved
        )
    weights = problem.weights or Weights()
    square = ((load[rank] + mine) / mean - 1) ** 2 - (load[rank] / mean - 1) ** 2
    return float(
        Fraction(weights.alpha) * comm / total
        + Fraction(weights.beta) * square / ranks
        + Fraction(weights.gamma) * moved / experts
    )


@pytest.mark.parametrize("method", ["paper", "greedy"])
def test_every_step_takes_the_feasible_rank_of_lowest_score(method):
    checked = 0
    for problem in random_problems(40, seed=5, replicas=False):
        slots = place(problem, method=method).slots.numpy()
        for layer in range(problem.num_layers):
            hot = problem.traffic[layer].sum(axis=0)
            if not hot.any():
                continue
            held = ranks_of(slots[layer], problem.slots_per_rank)
            home = {expert: rank for rank, experts in enumerate(held) for expert in experts}
            load, filled = [Fraction(0)] * problem.num_ranks, [0] * problem.num_ranks
            for expert in sorted(range(problem.num_experts), key=lambda e: (-hot[e], e)):
                score = {
                    rank: exact_score(problem, method, layer, expert, rank, load)
                    for rank in range(problem.num_ranks)
                    if filled[rank] < problem.slots_per_rank
                }
                chosen = home[expert]
                slack = 1e-12 * (1 + max(map(abs, score.values())))
                assert score[chosen] <= min(score.values()) + slack
                load[chosen] += sum(Fraction(x) for x in problem.traffic[layer][:, expert].tolist())
                filled[chosen] += 1
                checked += 1
    assert checked > 500


def test_affine_sources_get_their_experts_on_their_own_ranks():
    traffic = np.zeros((1, 2, 8), dtype=np.int64)
    traffic[0, 0, 1::2] = 100
    traffic[0, 1, 0::2] = 100
    for method in ("paper", "greedy"):
        found = place(PlacementProblem(traffic, GRID, 2), method=method)
        assert found.comm.tolist() == [0.0]
        assert found.max_over_mean.tolist() == [1.0]


def test_ties_no_migration_then_fewer_filled_slots_then_lowest_rank():
    near = Topology([[0, 0, 0]])
    # Alike for the score (beta = gamma = 0): without a home experts spread over the emptiest ranks in order.
    free = PlacementProblem([[[1] * 6]], near, 2, weights=Weights(1, 0, 0))
    assert place(free, method="paper").slots.tolist() == [[0, 3, 1, 4, 2, 5]]
    # With a home each stays there, though other ranks are emptier.
    settled = PlacementProblem([[[1] * 6]], near, 2, [[5, 4, 3, 2, 1, 0]], Weights(1, 0, 0))
    assert place(settled, method="paper").slots.tolist() == [[5, 4, 3, 2, 1, 0]]


def test_paper_takes_its_calibrated_weights_unless_given_others():
    rng = np.random.default_rng(2)
    traffic = rng.poisson(40 * np.exp(rng.standard_normal((4, 2, 16))))
    current = np.tile(np.arange(16), (4, 1))

    def slots(weights: Weights | None) -> list:
        return place(PlacementProblem(traffic, GRID, 4, current, weights), method="paper").slots.tolist()

    assert (CALIBRATED.alpha, CALIBRATED.beta, CALIBRATED.gamma) == (1, 0.0025, 1)
    assert (UNCALIBRATED.alpha, UNCALIBRATED.beta, UNCALIBRATED.gamma) == (1, 1, 1)
    assert slots(None) == slots(Weights(1, 0.0025, 1))
    assert slots(None) != slots(UNCALIBRATED)
    assert slots(None) != slots(Weights())


def test_source_awareness_beats_balance_only_in_remote_picks_and_greedy_beats_both_in_cost():
    rng = np.random.default_rng(4)
    traffic = rng.poisson(40 * np.exp(rng.standard_normal((8, 2, 32))))
    problem = PlacementProblem(traffic, GRID, 8, np.tile(np.arange(32), (8, 1)))
    found = {method: place(problem, method=method) for method in ("paper", "greedy", "eplb", "stay")}
    assert found["paper"].comm.sum() < found["eplb"].comm.sum()
    assert min(found, key=lambda method: found[method].cost.sum().item()) == "greedy"
    assert min(found, key=lambda method: found[method].imbalance.sum().item()) == "eplb"


def test_balanced_packing_is_the_usual_one():
    # Heaviest first onto the lightest rank: 9 | 8 | 7 | 6, then 5 to 6, 4 to 7, 3 to 8, 2 to 9.
    found = place(PlacementProblem([[[2, 3, 4, 5, 6, 7, 8, 9]]], Topology([[0] * 4]), 2), method="eplb")
    assert ranks_of(found.slots[0], 2) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert found.max_over_mean.tolist() == [1.0]


def test_spare_slots_make_the_fullest_copy_as_light_as_can_be():
    rng = np.random.default_rng(6)
    for _ in range(60):
        load = rng.integers(0, 30, 4)
        ranks, size = 4, int(rng.integers(1, 4))
        found = place(PlacementProblem(load[None, None], Topology([[0] * ranks]), size), method="eplb")
        copies = np.bincount(found.slots[0].numpy(), minlength=4)
        best = min(
            max(x / n for x, n in zip(load, counts, strict=True))
            for counts in np.ndindex(ranks, ranks, ranks, ranks)
            if sum(counts) + 4 == ranks * size
            for counts in [tuple(c + 1 for c in counts)]
        )
        if load.any():
            assert max(x / n for x, n in zip(load, copies, strict=True)) == best


def test_no_expert_is_twice_on_a_rank():
    spare = 0
    for problem in random_problems(300, seed=8, replicas=True):
        for layer, row in enumerate(place(problem, method="eplb").slots):
            if problem.traffic[layer].any():
                assert all(
                    len(set(experts)) == len(experts) for experts in ranks_of(row, problem.slots_per_rank)
                )
                spare += problem.num_slots - problem.num_experts
    assert spare > 500


def test_stay_is_the_current_placement_even_with_two_copies_on_a_rank():
    problem = PlacementProblem([[[5, 1, 1]]], Topology([[0, 1]]), 2, [[0, 0, 2, 1]])
    found = place(problem, method="stay")
    assert found.slots.tolist() == [[0, 0, 2, 1]]
    assert found.moves.tolist() == [0]
    assert place(PlacementProblem([[[5, 1, 1]]], Topology([[0, 1]]), 2), method="stay").slots.tolist() == [
        [0, 1, 2, 0]
    ]


def test_stayers_keep_their_slots_and_newcomers_fill_the_freed_ones_in_ascending_id():
    moved = 0
    for problem in random_problems(150, seed=9, replicas=False):
        if problem.current is None:
            continue
        size = problem.slots_per_rank
        for method in ("paper", "greedy", "eplb"):
            for old, new in zip(
                problem.current.tolist(), place(problem, method=method).slots.tolist(), strict=True
            ):
                for rank in range(problem.num_ranks):
                    before, after = old[rank * size : (rank + 1) * size], new[rank * size : (rank + 1) * size]
                    freed = [i for i in range(size) if before[i] not in after]
                    assert all(before[i] == after[i] for i in range(size) if i not in freed)
                    newcomers = [after[i] for i in freed]
                    assert newcomers == sorted(newcomers)
                    moved += len(freed)
    assert moved > 200
