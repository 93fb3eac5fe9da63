"""Distances: the grid's rule, what is accepted, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gimbal_kernels.topology import Topology


def test_one_node_two_sources_own_half_the_ranks_each():
    distance = Topology.grid(gpus_per_node=4, sources=2).distance
    assert distance.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]


def test_two_nodes_put_the_other_node_far_away():
    topology = Topology.grid(nodes=2, gpus_per_node=2, sources=4)
    assert topology.distance.tolist() == [[0, 1, 8, 8], [1, 0, 8, 8], [8, 8, 0, 1], [8, 8, 1, 0]]
    assert (topology.num_sources, topology.num_ranks) == (4, 4)


def test_a_source_that_spans_nodes_is_near_to_all_of_them():
    assert Topology.grid(nodes=2, gpus_per_node=2, sources=1, far=3.0).distance.tolist() == [[0, 0, 0, 0]]
    spanning = Topology.grid(nodes=3, gpus_per_node=2, sources=2, far=3.0).distance
    assert spanning.tolist() == [[0, 0, 0, 1, 3, 3], [3, 3, 1, 0, 0, 0]]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_any_array_is_copied_and_kept_read_only(kind):
    given = kind([[0.0, 0.5], [2.0, 0.0]])
    topology = Topology(given)
    given[0][1] = 7.0
    assert topology.distance[0, 1] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        topology.distance[0, 1] = 7.0


@pytest.mark.parametrize(
    "distance",
    [
        [0, 1],
        np.zeros((0, 4)),
        np.zeros((4, 0)),
        [[0, -1]],
        [[0, np.nan]],
        [[0, np.inf]],
        [["a"]],
        [[0], [0, 1]],
    ],
)
def test_bad_distances_are_refused_by_name(distance):
    with pytest.raises(ValueError, match="distance"):
        Topology(distance)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus_per_node": 4, "sources": 3}, "sources: 3 does not divide 4 ranks"),
        ({"gpus_per_node": 0, "sources": 1}, "gpus_per_node: 0"),
        ({"gpus_per_node": 4, "sources": 0}, "sources: 0"),
        ({"nodes": 0, "gpus_per_node": 4, "sources": 1}, "nodes: 0"),
    ],
)
def test_impossible_grids_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Topology.grid(**arguments)
