"""Which copy serves which pick, against loops and the placement package's own evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from gimbal_runtime.service import even_shares, max_over_mean, nearest_shares, served
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_kernels.placement import PlacementProblem, evaluate
from gimbal_kernels.placement.objective import window_weights
from gimbal_kernels.topology import Topology


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2]), st.integers(1, 4))
def test_nearest_shares_are_what_evaluate_serves_by(seed: int, nodes: int, sources: int) -> None:
    generator = np.random.default_rng(seed)
    topology = Topology.grid(nodes=nodes, gpus_per_node=4 // nodes, sources=2 if sources == 3 else sources)
    experts, size = 6, 3
    slots = np.stack([random_slots(generator, experts, 4 * size) for _ in range(2)])
    traffic = generator.integers(0, 50, (2, topology.num_sources, experts))
    shares = nearest_shares(slots, topology, experts)
    picks = served(traffic, slots, shares)
    distance = topology.distance[:, np.arange(12) // size]
    found = evaluate(PlacementProblem(traffic, topology, size), slots)
    total = traffic.sum(axis=(1, 2))
    assert picks.sum(axis=(1, 2)) == pytest.approx(total)
    assert (picks * distance).sum(axis=(1, 2)) / total == pytest.approx(found.comm.numpy())
    windows = traffic.sum(axis=1)[None]
    assert max_over_mean(windows, [1.0], traffic, slots, shares, ranks=4) == pytest.approx(
        found.max_over_mean.numpy()
    )


def random_slots(generator: np.random.Generator, experts: int, count: int) -> np.ndarray:
    """Every expert at least once, copies anywhere."""
    more = generator.integers(0, experts, count - experts)
    return generator.permutation(np.concatenate([np.arange(experts), more]))


def test_even_shares_know_no_distance() -> None:
    assert even_shares([[0, 1, 0, 0]], 2, 2).tolist() == [[[1 / 3, 1, 1 / 3, 1 / 3]] * 2]


def test_earlier_windows_soften_what_was_fitted_to_the_last() -> None:
    slots = np.array([[0, 1, 2, 3]])
    windows = np.array([[[10, 10, 10, 10]], [[30, 10, 0, 0]], [[0, 0, 0, 0]]])
    traffic = windows[0][:, None]
    shares = np.ones((1, 1, 4))
    found = max_over_mean(windows, window_weights(3), traffic, slots, shares, ranks=2)
    assert found.tolist() == pytest.approx([(1.0 * 1.0 + 0.8 * 2.0) / 1.8])  # the empty window does not count
    nothing = max_over_mean(windows[2:], [1.0], 0 * traffic, slots, shares, ranks=2)
    assert nothing.tolist() == [1.0]


def test_earlier_picks_of_an_expert_without_picks_are_spread_over_its_slots() -> None:
    slots = np.array([[0, 1, 2, 1]])  # a copy of expert 1 on each rank, each near one source
    topology = Topology.grid(gpus_per_node=2, sources=2)
    traffic = np.array([[[4, 0, 4], [4, 0, 4]]])
    windows = np.array([[[0, 10, 0]]])
    shares = nearest_shares(slots, topology, 3)
    assert max_over_mean(windows, [1.0], traffic, slots, shares, ranks=2).tolist() == [1.0]
