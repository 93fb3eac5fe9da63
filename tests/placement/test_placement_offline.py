"""The exact reference against exhaustive search, and the calibration that it is for."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest

pytest.importorskip("highspy", reason="highspy (extra offline) is not installed")

from gimbal_kernels.placement import CALIBRATED, PlacementProblem, Weights, evaluate, lower_bound, place
from gimbal_kernels.placement.offline import calibrate, solve_reference
from gimbal_kernels.placement.offline.calibration import matching_weights, objective_of
from gimbal_kernels.placement.offline.reference import home_of, layer_model
from gimbal_kernels.topology import Topology


def affine(seed: int, *, layers: int = 3, ranks: int = 4, experts: int = 32, weights: Weights | None = None):
    """Two sources with tastes of their own; the current placement is expert e in slot e."""
    rng = np.random.default_rng(seed)
    popularity = np.exp(rng.standard_normal((layers, 1, experts)))
    traffic = rng.poisson(300 * popularity * np.exp(0.5 * rng.standard_normal((layers, 2, experts))))
    topology = Topology.grid(gpus_per_node=ranks, sources=2)
    current = np.tile(np.arange(experts), (layers, 1))
    return PlacementProblem(traffic, topology, experts // ranks, current, weights)


def tiny(seed: int) -> PlacementProblem:
    """Small enough to try every placement; with and without moves, history and drift, with ties and zeros."""
    rng = np.random.default_rng(seed)
    ranks, size = [(2, 3), (3, 2), (2, 2), (4, 1)][seed % 4]
    experts, sources = ranks * size, int(rng.integers(1, 4))
    traffic = rng.poisson(8 * np.exp(rng.standard_normal((1, sources, experts))))
    if seed % 2:
        traffic[:, :, rng.integers(experts)] = 0
    history = tuple(rng.poisson(8.0, (1, experts)) for _ in range(seed % 3))
    distance = rng.integers(0, 2, (sources, ranks)) if seed % 2 else 2 * rng.random((sources, ranks))
    current = rng.permutation(experts)[None] if seed % 5 else None
    weights = Weights(1.0, [0.1, 1.0, 4.0, 40.0][seed % 4], [0.0, 0.3][seed % 2])
    drift = 0.3 if seed % 7 == 0 else 0.0
    return PlacementProblem(traffic, Topology(distance), size, current, weights, history, drift)


def best_by_trying(problem: PlacementProblem) -> float:
    every = np.array([row for row in permutations(range(problem.num_experts)) if _ascending(row, problem)])
    return min(float(evaluate(problem, row[None]).cost[0]) for row in every)


def _ascending(row: tuple[int, ...], problem: PlacementProblem) -> bool:
    """One order per rank is enough: slots inside a rank are alike."""
    size = problem.slots_per_rank
    return all(row[i] < row[i + 1] for i in range(len(row) - 1) if (i + 1) % size)


@pytest.mark.parametrize("seed", range(24))
def test_the_reference_is_the_best_of_all_placements(seed):
    problem = tiny(seed)
    if not problem.traffic.any():
        pytest.fail("a case without traffic shows nothing")
    found = solve_reference(problem, gap=1e-6)
    best = best_by_trying(problem)
    assert float(found.placement.cost[0]) == pytest.approx(best, rel=2e-6, abs=1e-9)
    assert float(found.bound[0]) <= best + 1e-9
    assert float(found.gap[0]) <= 2e-6


def test_the_model_costs_what_evaluate_says():
    for seed in range(12):
        problem = tiny(seed)
        slots = np.random.default_rng(seed).permutation(problem.num_experts)[None]
        model = layer_model(problem, 0, problem.current if problem.current is not None else slots)
        home = home_of(slots[0], problem.slots_per_rank)
        assert model.cost(home) == pytest.approx(float(evaluate(problem, slots).cost[0]), rel=1e-12)


def test_it_proves_portfolio_near_the_optimum_and_agrees_with_the_other_bound():
    problem = affine(1, layers=2, experts=128, weights=Weights(1.0, 4.0, 0.02))
    found = solve_reference(problem, gap=1e-4)
    quick = place(problem)
    assert (found.gap <= 1e-4).all()
    assert (found.placement.cost <= quick.cost + 1e-12).all()
    assert ((quick.cost - found.bound) / quick.cost < 0.01).all()
    assert (lower_bound(problem, nodes=200) <= found.placement.cost + 1e-9).all()


def test_out_of_time_returns_what_it_has_and_a_bound_that_holds():
    problem = affine(2, layers=1, ranks=8, experts=64, weights=Weights(1.0, 40.0, 0.0))
    long, short = solve_reference(problem, gap=1e-3), solve_reference(problem, time_limit=1e-6)
    assert (short.placement.cost == place(problem).cost).all()
    assert (short.bound <= long.placement.cost).all()
    assert short.gap.item() > long.gap.item()


def test_layers_without_traffic_stay_and_count_as_proven():
    problem = affine(3, layers=2, experts=8, weights=Weights(1.0, 4.0, 0.1))
    traffic = problem.traffic.copy()
    traffic[0] = 0
    found = solve_reference(PlacementProblem(traffic, problem.topology, 2, problem.current, problem.weights))
    assert found.placement.slots[0].tolist() == list(range(8))
    assert found.gap[0] == 0
    assert found.seconds[0] == 0


def test_bad_arguments_are_named():
    problem = affine(4, layers=1, experts=8)
    spare = PlacementProblem(problem.traffic, problem.topology, 3)
    with pytest.raises(ValueError, match=r"problem: 12 slots for 8 experts.*one slot per expert"):
        solve_reference(spare)
    for name in ("time_limit", "gap", "threads"):
        with pytest.raises(ValueError, match=name):
            solve_reference(problem, **{name: 0})
    with pytest.raises(ValueError, match="no current placement"):
        calibrate(PlacementProblem(problem.traffic, problem.topology, 2))
    with pytest.raises(ValueError, match="no traffic"):
        calibrate(PlacementProblem(0 * problem.traffic, problem.topology, 2, problem.current))
    with pytest.raises(ValueError, match="empty"):
        calibrate(problem, betas=())


def test_calibration_counts_agreement_by_hand():
    # One source is near rank 0 only, all loads equal: the reference swaps experts 0 and 3, nothing else pays.
    traffic = np.array([[[0, 4, 4, 8], [8, 4, 4, 0]]])
    problem = PlacementProblem(traffic, Topology([[0, 1], [1, 0]]), 2, [[0, 1, 2, 3]], Weights(1.0, 1.0, 0.1))
    found = calibrate(problem, betas=(0.0,), gammas=(1.0,))
    rows = {row.name: row for row in found.rows}
    assert sorted(found.reference.placement.slots[0, :2].tolist()) == [1, 3]
    idle = rows["do nothing"]
    assert (idle.agreement, idle.agreement_moved, idle.moves) == (0.5, 0.0, 0.0)
    assert idle.comm_difference == pytest.approx(0.75 / 0.25 - 1)
    assert idle.gap == pytest.approx((0.75 - (0.25 + 0.1 * 2 / 4)) / 0.75)
    assert (rows["reference"].agreement, rows["reference"].agreement_moved) == (1.0, 1.0)
    assert found.per_layer["do nothing"][0].tolist() == [0.5]


def test_the_papers_calibrated_weights_match_the_cost_with_beta_008():
    """(1, 0.0025, 1) is the marginal of alpha*comm + 0.08*imbalance + moves/E at 128 experts on 4 ranks."""
    cost = objective_of(CALIBRATED, num_experts=128, num_ranks=4)
    assert (cost.alpha, cost.beta, cost.gamma) == (1.0, pytest.approx(0.08), 1.0)
    problem = affine(5, layers=4, experts=128, weights=cost)
    matching = matching_weights(problem)
    assert (matching.alpha, matching.beta, matching.gamma) == (1.0, pytest.approx(0.0025), 1.0)
    paper = place(PlacementProblem(problem.traffic, problem.topology, 32, problem.current), method="paper")
    assert paper.slots.tolist() == place(problem, method="greedy").slots.tolist()


def test_calibration_in_the_papers_setting():
    """128 experts, 4 ranks, 2 sources: four in five decisions are kept, but doing nothing keeps as many."""
    cost = objective_of(CALIBRATED, num_experts=128, num_ranks=4)
    found = calibrate(affine(6, layers=6, experts=128, weights=cost), gap=1e-4)
    rows = {row.name: row for row in found.rows}
    calibrated, idle = rows["paper, calibrated"], rows["do nothing"]
    assert calibrated.agreement > 0.8
    assert idle.agreement > 0.8
    assert idle.agreement_moved == 0.0
    assert calibrated.agreement_moved > 0.2
    assert abs(calibrated.comm_difference) < 0.02
    assert calibrated.agreement > rows["paper, uncalibrated"].agreement + 0.1
    assert calibrated.gap < rows["paper, uncalibrated"].gap
    assert rows["portfolio"].agreement_moved > 0.9
    best = rows["grid, best agreement"]
    assert best.agreement == max(row.agreement for row in found.grid)


def test_serving_code_does_not_import_the_solver():
    code = "import sys, gimbal_kernels.placement, gimbal_runtime.cli; sys.exit('highspy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
