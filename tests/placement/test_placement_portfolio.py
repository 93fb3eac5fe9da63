"""Method "portfolio": compiled against numpy bit for bit, against exhaustive search, and what it promises."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from placement_problems import random_problems

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, host, place, portfolio, reference
from gimbal_kernels.placement.portfolio import Effort
from gimbal_kernels.topology import Topology

needs_host = pytest.mark.skipif(host.status() != "ready", reason=host.status())


def problems(count: int, seed: int):
    """Random problems, every other one with history, some with many ranks of few slots."""
    rng = np.random.default_rng(seed)
    for i, problem in enumerate(random_problems(count, seed=seed, replicas=False)):
        past = tuple(
            rng.integers(0, 5, (problem.num_layers, 1, problem.num_experts))
            for _ in range(i // 6 % 2 * (i % 3 + 1))
        )
        yield replace(problem, history=past)
    for ranks, size, sources in ((20, 2, 4), (18, 1, 3), (9, 5, 9), (16, 3, 1)):
        traffic = rng.poisson(50 * np.exp(rng.standard_normal((2, sources, ranks * size))))
        distance = rng.integers(0, 2, (sources, ranks))
        current = np.stack([rng.permutation(ranks * size) for _ in range(2)])
        yield PlacementProblem(traffic, Topology(distance), size, current, Weights(1, 4, 0.05))


@needs_host
def test_same_bytes_as_the_reference():
    changed = 0
    for i, problem in enumerate(problems(120, seed=31)):
        effort = Effort(i % 4 * 3, 1 + i % 2)
        most = i % 5 if problem.current is not None and i % 3 == 0 else None
        expected = reference.solve_portfolio(problem, effort, max_moves=most)
        found = host.solve_portfolio(problem, effort, max_moves=most)
        assert found.tobytes() == expected.tobytes(), (i, problem)
        changed += problem.current is not None and (found != problem.current).any()
    assert changed > 40


@needs_host
@pytest.mark.parametrize(
    ("experts", "ranks", "sources"), [(128, 4, 2), (256, 32, 4), (256, 64, 8), (60, 20, 4)]
)
def test_same_bytes_with_every_instruction_set(experts, ranks, sources):
    rng = np.random.default_rng(12)
    traffic = rng.poisson(300 * np.exp(rng.standard_normal((2, sources, experts))))
    current = np.stack([rng.permutation(experts) for _ in range(2)])
    topology = Topology.grid(gpus_per_node=ranks, sources=sources)
    problem = PlacementProblem(traffic, topology, experts // ranks, current, Weights(1, 4, 0.02))
    names = host.instruction_sets()
    found = [host.solve_portfolio(problem, Effort(20, 1), instruction_set=name) for name in names]
    assert "baseline" in names
    assert all(slots.tobytes() == found[0].tobytes() for slots in found), names
    assert (found[0] != current).any()
    missing = set(host.INSTRUCTION_SETS) - {"best", *names}
    for name in missing:
        with pytest.raises(RuntimeError, match=name):
            host.solve_portfolio(problem, Effort(0, 0), instruction_set=name)


@needs_host
def test_same_bytes_on_any_number_of_threads():
    rng = np.random.default_rng(0)
    traffic = rng.integers(0, 50, (20, 4, 32))
    problem = PlacementProblem(traffic, Topology.grid(gpus_per_node=8, sources=4), 4)
    one = host.solve_portfolio(problem, Effort(5, 1), threads=1)
    assert all(
        host.solve_portfolio(problem, Effort(5, 1), threads=n).tobytes() == one.tobytes() for n in (0, 2, 7)
    )


def test_equals_exhaustive_search_on_tiny_problems():
    rng = np.random.default_rng(5)
    for _ in range(20):
        traffic = rng.poisson(40 * np.exp(rng.standard_normal((1, 2, 8))))
        current = rng.permutation(8)[None]
        problem = PlacementProblem(
            traffic, Topology.grid(gpus_per_node=4, sources=2), 2, current, Weights(1, 4, 0.05)
        )
        best = min(
            evaluate(problem, np.argsort(np.array(home), kind="stable")[None]).cost.item()
            for home in set(itertools.permutations([0, 0, 1, 1, 2, 2, 3, 3]))
        )
        assert place(problem).cost.item() == pytest.approx(best, rel=1e-6, abs=1e-7)


@needs_host
@pytest.mark.parametrize("weights", [Weights(1, 4, 0.02), Weights(1, 20, 0.0), Weights(0, 1, 0.5)])
def test_never_worse_than_the_other_methods_nor_than_staying(weights):
    rng = np.random.default_rng(6)
    traffic = rng.poisson(40 * np.exp(rng.standard_normal((6, 2, 32))))
    current = np.tile(np.arange(32), (6, 1))
    problem = PlacementProblem(traffic, Topology.grid(gpus_per_node=4, sources=2), 8, current, weights)
    fast = place(problem, effort="fast").cost
    default = place(problem).cost
    best = place(problem, effort="best").cost
    slack = 1e-6
    assert (default <= fast + slack).all()
    assert (best <= default + slack).all()
    for method in ("paper", "greedy", "eplb", "stay"):
        assert (fast <= place(problem, method=method).cost + slack).all()


def test_what_does_not_pay_for_its_move_stays():
    rng = np.random.default_rng(0)
    traffic = rng.normal(10_000, 100, (6, 2, 32)).round()
    current = np.stack([rng.permutation(32) for _ in range(6)])
    topology = Topology.grid(gpus_per_node=4, sources=2)
    dear = PlacementProblem(traffic, topology, 8, current, Weights(1, 4, 1.0))
    assert place(dear).slots.tolist() == current.tolist()
    free = PlacementProblem(traffic, topology, 8, current, Weights(1, 4, 0.0))
    assert place(free).moves.sum() > 50


@pytest.mark.parametrize("most", [0, 1, 2, 5, 12])
def test_max_moves_holds_and_never_costs_more_than_staying(most):
    rng = np.random.default_rng(8)
    traffic = rng.poisson(40 * np.exp(rng.standard_normal((4, 2, 24))))
    current = np.tile(np.arange(24), (4, 1))
    problem = PlacementProblem(traffic, Topology.grid(gpus_per_node=4, sources=2), 6, current)
    found = place(problem, max_moves=most)
    assert (found.moves <= most).all()
    assert (found.cost <= place(problem, method="stay").cost + 1e-7).all()
    if most >= 2:
        assert found.moves.sum() > 0


def test_time_budget_zero_is_the_fast_effort():
    rng = np.random.default_rng(9)
    traffic = rng.poisson(40 * np.exp(rng.standard_normal((3, 2, 32))))
    problem = PlacementProblem(traffic, Topology.grid(gpus_per_node=4, sources=2), 8)
    fast = place(problem, effort="fast").cost
    assert (place(problem, time_budget=0.0).cost <= fast + 1e-7).all()


def test_weights_of_any_size_give_a_placement():
    rng = np.random.default_rng(10)
    traffic = rng.integers(0, 100, (2, 2, 12))
    current = np.tile(np.arange(12), (2, 1))
    topology = Topology.grid(gpus_per_node=4, sources=2)
    for weights in ((0, 0, 0), (2.0**64, 1e-30, 0), (1e-30, 2.0**64, 1), (1, 1e-9, 2.0**64), (0, 0, 1)):
        problem = PlacementProblem(traffic, topology, 3, current, Weights(*weights))
        for row in place(problem).slots.tolist():
            assert sorted(row) == list(range(12))


def test_units_bound_every_change_of_a_swap():
    for problem in problems(40, seed=33):
        for layer in range(problem.num_layers):
            y = portfolio.to_integers(problem, layer)
            if y is None:
                continue
            order = np.sort(y.load[-1], axis=1)[:, ::-1]
            swap = 2 * y.cost.max() + (order[:, 0] * (order[:, 0] + order[:, : y.size].sum(axis=1))).sum()
            assert swap < 2**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "huge"}, "effort: 'huge'; valid: fast, default, best"),
        ({"max_moves": -1}, "max_moves: -1; valid: an integer >= 0"),
        ({"max_moves": 1.5}, "max_moves: 1.5"),
        ({"time_budget": -0.1}, "time_budget: -0.1; valid: seconds >= 0"),
        ({"time_budget": float("nan")}, "time_budget: nan"),
        ({"time_budget": "1"}, "time_budget: '1'"),
        ({"method": "paper", "max_moves": 3}, "max_moves: 3 with method 'paper'"),
    ],
)
def test_bad_limits_are_refused_by_name(options, message):
    problem = PlacementProblem([[[3, 2, 1, 0]]], Topology([[0, 1]]), 2, [[0, 1, 2, 3]])
    with pytest.raises(ValueError, match=message):
        place(problem, **options)
    with pytest.raises(ValueError, match="max_moves: 1 without a current placement"):
        place(PlacementProblem([[[3, 2, 1, 0]]], Topology([[0, 1]]), 2), max_moves=1)
