"""Properties of every method on problems that hypothesis makes up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placement_problems import ranks_of

from gimbal_kernels.placement import PlacementProblem, Weights, place
from gimbal_kernels.placement.solve import METHODS, WITHOUT_REPLICAS
from gimbal_kernels.topology import Topology

SETTINGS = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# No two terms of a score can cancel by chance: a tie is a tie at every scale of the traffic.
GENERIC = Weights(1.0, 0.0025 * 2**0.5, 3**0.5)


@st.composite
def problems(draw: st.DrawFn, *, replicas: bool = True, weights: Weights | None = None) -> PlacementProblem:
    ranks, size = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    total = ranks * size
    experts = draw(st.integers(size, total)) if replicas else total
    layers, sources = draw(st.integers(1, 2)), draw(st.integers(1, 3))

    def matrix(cells: st.SearchStrategy, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        return np.array(draw(st.lists(cells, min_size=count, max_size=count))).reshape(shape)

    traffic = matrix(st.one_of(st.integers(0, 3), st.integers(0, 10**6)), layers, sources, experts)
    # Quarters: sums of integer picks times these are exact, so the order of the sources cannot show.
    distance = matrix(st.integers(0, 12), sources, ranks) / 4
    current = None
    if draw(st.booleans()):
        spare = matrix(st.integers(0, experts - 1), layers, total - experts).astype(int)
        base = [draw(st.permutations(range(experts))) for _ in range(layers)]
        current = np.concatenate([np.array(base), spare], axis=1)
    return PlacementProblem(traffic, Topology(distance), size, current, weights)


@pytest.mark.parametrize("method", METHODS)
@SETTINGS
@given(data=st.data())
def test_every_expert_has_a_slot_and_every_slot_an_expert(method, data):
    problem = data.draw(problems(replicas=method not in WITHOUT_REPLICAS))
    slots = place(problem, method=method).slots.numpy()
    assert slots.shape == (problem.num_layers, problem.num_ranks * problem.slots_per_rank)
    for row in slots:
        assert set(row.tolist()) == set(range(problem.num_experts))


@pytest.mark.parametrize("method", ["paper", "greedy", "eplb"])
@SETTINGS
@given(data=st.data())
def test_the_names_of_the_sources_do_not_matter(method, data):
    problem = data.draw(problems(replicas=method == "eplb"))
    order = data.draw(st.permutations(range(problem.num_sources)))
    renamed = replace(
        problem, traffic=problem.traffic[:, order], topology=Topology(problem.topology.distance[order])
    )
    first, second = place(problem, method=method), place(renamed, method=method)
    assert first.slots.tolist() == second.slots.tolist()
    assert first.comm.tolist() == pytest.approx(second.comm.tolist())


@SETTINGS
@given(problem=problems(replicas=False, weights=GENERIC), factor=st.integers(1, 1000))
def test_a_longer_window_of_the_same_traffic_changes_nothing(problem, factor):
    longer = replace(problem, traffic=problem.traffic * factor)
    assert place(longer, method="paper").slots.tolist() == place(problem, method="paper").slots.tolist()


@SETTINGS
@given(problem=problems(replicas=False), power=st.integers(-20, 20))
def test_nor_does_any_power_of_two_with_the_paper_s_own_weights(problem, power):
    scaled = replace(problem, traffic=problem.traffic * 2.0**power)
    assert place(scaled, method="paper").slots.tolist() == place(problem, method="paper").slots.tolist()


@SETTINGS
@given(problem=problems())
def test_balance_only_ignores_where_the_picks_come_from(problem):
    pooled = np.zeros_like(problem.traffic)
    pooled[:, 0] = problem.traffic.sum(axis=1)
    assert (
        place(replace(problem, traffic=pooled), method="eplb").slots.tolist()
        == place(problem, method="eplb").slots.tolist()
    )


@SETTINGS
@given(problem=problems())
def test_a_second_run_on_the_result_moves_no_more_than_the_packing_does(problem):
    first = place(problem, method="eplb")
    again = place(replace(problem, current=first.slots), method="eplb")
    assert again.moves.tolist() == [0] * problem.num_layers
    for row, same in zip(first.slots, again.slots, strict=True):
        assert ranks_of(row, problem.slots_per_rank) == ranks_of(same, problem.slots_per_rank)
