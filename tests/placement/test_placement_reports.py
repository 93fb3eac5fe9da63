"""Faults that users of other placement systems reported, by the number of the report; each must not happen here."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from placement_problems import ranks_of

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, host, place
from gimbal_kernels.placement.solve import METHODS
from gimbal_kernels.topology import Topology

FOUR = Topology.grid(gpus_per_node=4, sources=1)
BACKENDS = [
    "reference",
    pytest.param("host", marks=pytest.mark.skipif(host.status() != "ready", reason=host.status())),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_21_replicas_of_one_expert_are_on_distinct_ranks(backend):
    load = [1000, *[10] * 7]
    found = place(PlacementProblem([[load]], FOUR, 3), method="eplb", backend=backend)
    ranks = ranks_of(found.slots[0], 3)
    assert all(0 in experts for experts in ranks)
    assert all(len(set(experts)) == 3 for experts in ranks)
    assert found.max_over_mean.item() * sum(load) / 4 <= 270


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_23_a_layer_without_load_keeps_its_placement(backend):
    current = [[3, 0, 1, 2, 4, 5, 0, 6, 7, 1, 2, 3]]
    settled = place(PlacementProblem(np.zeros((1, 1, 8)), FOUR, 3, current), method="eplb", backend=backend)
    assert settled.slots.tolist() == current
    assert settled.moves.tolist() == [0]
    first = place(PlacementProblem(np.zeros((1, 1, 8)), FOUR, 3), method="eplb", backend=backend)
    assert first.slots.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert first.max_over_mean.tolist() == [1.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_row_23_one_idle_layer_among_busy_ones(method, backend):
    traffic = np.random.default_rng(0).integers(1, 100, (3, 1, 8))
    traffic[1] = 0
    current = np.tile([7, 6, 5, 4, 3, 2, 1, 0], (3, 1))
    found = place(PlacementProblem(traffic, FOUR, 2, current), method=method, backend=backend)
    assert found.slots[1].tolist() == current[1].tolist()
    assert found.moves[1].item() == 0
    fresh = place(PlacementProblem(traffic, FOUR, 2), method=method, backend=backend)
    assert fresh.slots[1].tolist() == list(range(8))


def test_row_25_balance_is_bounded_by_what_is_possible():
    rng = np.random.default_rng(0)
    load = np.rint(1e5 * np.exp(rng.standard_normal((300, 128))))
    found = place(PlacementProblem(load[:, None], FOUR, 32), method="eplb")
    mean = load.sum(axis=1) / 4
    ordered = np.sort(load, axis=1)
    possible = np.maximum(mean, ordered[:, -1] + ordered[:, :31].sum(axis=1))
    heaviest = found.max_over_mean.numpy() * mean
    assert (heaviest / possible).max() <= 1.06  # 1.044 on these seeds
    assert (heaviest / possible).mean() <= 1.005
    assert (heaviest >= possible * (1 - 1e-12)).all()


def test_row_26_slots_that_do_not_suffice_name_the_least_number_that_does():
    three = Topology.grid(gpus_per_node=3, sources=1)
    for given in (85, 256 / 3):
        with pytest.raises(ValueError, match=r"at least 86 .*\(258 slots, 2 spare\)"):
            PlacementProblem(np.ones((1, 1, 256)), three, given)
    assert place(PlacementProblem(np.ones((1, 1, 256)), three, 86), method="eplb").slots.shape == (1, 258)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_29_noise_moves_nothing(backend):
    rng = np.random.default_rng(0)
    two_sources = Topology.grid(gpus_per_node=4, sources=2)
    traffic = rng.normal(10_000, 100, (48, 2, 128)).round()
    current = np.tile(np.arange(128), (48, 1))
    assert evaluate(PlacementProblem(traffic, two_sources, 32, current), current).max_over_mean.max() < 1.01
    calibrated = place(PlacementProblem(traffic, two_sources, 32, current), method="paper", backend=backend)
    assert calibrated.moves.sum().item() == 0
    free = PlacementProblem(traffic, two_sources, 32, current, Weights(1, 0.0025, 0))
    assert place(free, method="paper", backend=backend).moves.sum().item() > 1000


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_row_30_the_first_call_has_no_old_placement(method, backend):
    traffic = np.random.default_rng(1).integers(0, 100, (2, 1, 8))
    dear = place(PlacementProblem(traffic, FOUR, 2, None, Weights(1, 1, 1e6)), method=method, backend=backend)
    free = place(PlacementProblem(traffic, FOUR, 2, None, Weights(1, 1, 0)), method=method, backend=backend)
    assert dear.slots.tolist() == free.slots.tolist()
    assert dear.cost.tolist() == free.cost.tolist()
    assert dear.moves.tolist() == [0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_row_31_every_rank_computes_the_same_bytes(method):
    rng = np.random.default_rng(2)
    column = rng.integers(0, 9, (2, 2, 4))
    traffic = np.repeat(
        column, 4, axis=2
    )  # four equally loaded experts each: nothing but ids tells them apart
    grid = Topology.grid(gpus_per_node=4, sources=2)
    digests = set()
    for _ in range(3):
        shuffled = traffic.reshape(2, 2, 4, 4)[..., rng.permutation(4)].reshape(2, 2, 16)
        for backend in ("auto", "reference"):
            found = place(PlacementProblem(shuffled, grid, 4), method=method, backend=backend)
            digests.add(hashlib.sha256(found.slots.numpy().tobytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0])
def test_row_33_a_load_that_is_no_load_is_refused(bad):
    traffic = np.ones((2, 1, 8))
    traffic[1, 0, 3] = bad
    with pytest.raises(ValueError, match=r"traffic: .* at \[1, 0, 3\]; valid: finite picks"):
        PlacementProblem(traffic, FOUR, 2)
    with pytest.raises(ValueError, match="traffic"):
        Weights.for_expert(1e6, 1e3, 10, traffic)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_row_34_no_moe_layers_is_a_no_op(method, backend):
    for current in (None, np.zeros((0, 8), dtype=np.int32)):
        problem = PlacementProblem(np.zeros((0, 1, 8)), FOUR, 2, current)
        found = place(problem, method=method, backend=backend)
        assert found.slots.shape == (0, 8)
        assert found.cost.shape == found.moves.shape == found.max_over_mean.shape == (0,)
