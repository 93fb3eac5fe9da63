"""ReplicaMap: nearest-first tables at stable addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counting_cases import random_slots

from gimbal_kernels.counting import ReplicaMap, map_and_count
from gimbal_kernels.topology import Topology

TWO_GROUPS = Topology.grid(gpus_per_node=4, sources=2)


def test_tables_are_nearest_first_with_ties_by_slot():
    # 4 ranks of 2 slots; source 0 owns ranks 0 and 1, source 1 owns ranks 2 and 3.
    slots = [[0, 1, 0, 2, 0, 3, 1, 0]]
    table = ReplicaMap.from_slots(slots, TWO_GROUPS, num_experts=4)
    assert table.replicas.shape == (1, 2, 4, 5)
    assert table.replicas.dtype == table.nearest.dtype == table.slots.dtype == torch.int32
    assert table.replicas[0, 0, 0].tolist() == [0, 2, 4, 7, -1]
    assert table.replicas[0, 1, 0].tolist() == [4, 7, 0, 2, -1]
    assert table.replicas[0, 0, 1].tolist() == [1, 6, -1, -1, -1]
    assert table.replicas[0, 1, 1].tolist() == [6, 1, -1, -1, -1]
    assert table.nearest[0].tolist() == [[2, 1, 1, 1], [2, 1, 1, 1]]


def test_tables_equal_a_naive_build():
    rng = np.random.default_rng(0)
    for _ in range(20):
        layers, sources, ranks, experts = (int(v) for v in rng.integers(1, 6, 4))
        total = ranks * int(np.ceil((experts + rng.integers(0, 9)) / ranks))
        slots = random_slots(rng, layers, experts, total)
        distance = rng.integers(0, 3, (sources, ranks)).astype(float)
        table = ReplicaMap.from_slots(slots, Topology(distance), num_experts=experts)
        for layer in range(layers):
            for source in range(sources):
                for expert in range(experts):
                    copies = [p for p in range(total) if slots[layer, p] == expert]
                    copies.sort(key=lambda p: (distance[source, p // (total // ranks)], p))
                    near = [distance[source, p // (total // ranks)] for p in copies]
                    row = table.replicas[layer, source, expert].tolist()
                    assert row == copies + [-1] * (len(row) - len(copies))
                    assert table.nearest[layer, source, expert] == near.count(near[0])


def test_two_copies_on_one_rank_are_accepted():
    table = ReplicaMap.from_slots([[0, 0, 1, 2]], Topology([[0.0, 1.0]]), num_experts=3)
    assert table.nearest[0, 0].tolist() == [2, 1, 1]


def test_report_19_update_keeps_addresses_and_outputs_follow_the_new_map():
    before, after = [[0, 1, 2, 3, 0, 1]], [[3, 2, 1, 0, 3, 3]]
    topology = Topology(np.ones((1, 2)))
    table = ReplicaMap.from_slots(before, topology, num_experts=4)
    addresses = [t.data_ptr() for t in (table.replicas, table.nearest, table.slots)]
    ids = torch.arange(4, dtype=torch.int32)[None].repeat(16, 1)
    counts = torch.zeros(1, 1, 4, dtype=torch.int64)
    for slots in (before, after, before):
        table.update(slots)
        mapped = map_and_count(ids, table, counts, layer=0, source=0)
        assert torch.equal(torch.tensor(slots[0])[mapped.long()].int(), ids)
        fresh = ReplicaMap.from_slots(slots, topology, num_experts=4)
        assert torch.equal(table.replicas, fresh.replicas)
        assert torch.equal(table.nearest, fresh.nearest)
        assert torch.equal(table.slots, fresh.slots)
    assert addresses == [t.data_ptr() for t in (table.replicas, table.nearest, table.slots)]


def test_update_of_one_layer_equals_a_map_made_anew_and_leaves_the_others():
    topology = Topology.grid(gpus_per_node=2, sources=2)
    old, row = [[0, 1, 2, 0], [2, 1, 0, 1], [0, 1, 2, 2]], [1, 2, 0, 2]
    shares = np.random.default_rng(0).random((3, 2, 4)) + 0.1
    for weighted in (False, True):
        given = {"shares": shares} if weighted else {}
        table = ReplicaMap.from_slots(old, topology, num_experts=3, **given)
        addresses = [tensor.data_ptr() for tensor in (table.replicas, table.nearest, table.slots)]
        table.update(torch.tensor(row), layer=1, **({"shares": shares[1]} if weighted else {}))
        fresh = ReplicaMap.from_slots([old[0], row, old[2]], topology, num_experts=3, **given)
        for name in ("replicas", "nearest", "slots", *(("thresholds",) if weighted else ())):
            assert torch.equal(getattr(table, name), getattr(fresh, name)), name
        assert [tensor.data_ptr() for tensor in (table.replicas, table.nearest, table.slots)] == addresses


@pytest.mark.parametrize(
    ("slots", "layer", "message"),
    [
        ([0, 1, 2, 0], 3, "layer: 3; valid: an integer from 0 to 2"),
        ([0, 1, 2, 0], True, "layer: True"),
        ([0, 1, 2, 0, 1, 2], 1, r"slots: shape \[6\]; valid: \[4\]"),
        ([[0, 1, 2, 0]], 1, r"slots: shape \[1, 4\]; valid: \[4\] with `layer`"),
        ([0, 1, 1, 0], 1, "no slot for expert 2"),
    ],
)
def test_a_refused_update_of_one_layer_leaves_it_in_force(slots, layer, message):
    table = ReplicaMap.from_slots([[0, 1, 2, 0]] * 3, Topology([[0.0, 1.0]]), num_experts=3)
    before = table.replicas.clone()
    with pytest.raises(ValueError, match=message):
        table.update(slots, layer=layer)
    assert torch.equal(table.replicas, before)


def test_a_refused_update_leaves_the_old_map_in_force():
    table = ReplicaMap.from_slots([[0, 1, 2, 0]], Topology([[0.0, 1.0]]), num_experts=3)
    replicas = table.replicas.clone()
    with pytest.raises(ValueError, match="layer 0 has no slot for expert 2"):
        table.update([[0, 1, 1, 0]])
    with pytest.raises(ValueError, match=r"slots: shape \[1, 6\]; valid: \[1, 4\]"):
        table.update([[0, 1, 2, 0, 1, 2]])
    assert torch.equal(table.replicas, replicas)
    assert table.slots.tolist() == [[0, 1, 2, 0]]


def test_report_14_a_map_of_zeros_names_the_layer():
    good, zeros = list(range(8)), [0] * 8
    with pytest.raises(ValueError, match="layer 1 holds expert 0 in all 8 slots"):
        ReplicaMap.from_slots([good, zeros], Topology(np.zeros((1, 4))), num_experts=8)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 2, 4]], "layer 0, slot 3 holds expert 4; valid: 0 to 3"),
        ([[0, 1, 2, -1]], "layer 0, slot 3 holds expert -1"),
        ([[0, 1, 2, 2]], "layer 0 has no slot for expert 3"),
        ([[0, 1, 2, 3, 0]], "5 slots do not divide among 2 ranks; valid: a multiple of 2, the next is 6"),
        (
            [[0, 1]],
            "2 slots for 4 experts; valid: at least one per expert, the least multiple of 2 ranks is 4",
        ),
        ([0, 1, 2, 3], r"slots: shape \[4\]; valid: \[L, P\]"),
        ([[0.0, 1.0, 2.0, 3.0]], "slots: dtype float64; valid: an integer type"),
        ([[0, 1], [2]], "slots: not an array of numbers"),
    ],
)
def test_impossible_maps_are_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        ReplicaMap.from_slots(slots, Topology([[0.0, 1.0]]), num_experts=4)


@pytest.mark.parametrize("topology", [None, [[0.0, 1.0]]])
def test_a_topology_of_another_kind_is_refused(topology):
    with pytest.raises(ValueError, match=r"topology: a (NoneType|list); valid: a gimbal_kernels\.topology"):
        ReplicaMap.from_slots([[0, 1]], topology, num_experts=2)


def test_max_replicas_bounds_the_tables_and_later_updates():
    topology = Topology([[0.0, 1.0]])
    table = ReplicaMap.from_slots([[0, 1, 2, 0, 1, 2]], topology, num_experts=3, max_replicas=2)
    assert table.replicas.shape == (1, 1, 3, 2)
    with pytest.raises(ValueError, match="layer 0 has 4 copies of expert 0; valid: at most max_replicas = 2"):
        table.update([[0, 1, 2, 0, 0, 0]])
    for width in (0, 5, True):
        with pytest.raises(ValueError, match="max_replicas"):
            ReplicaMap.from_slots([[0, 1, 2, 0, 1, 2]], topology, num_experts=3, max_replicas=width)


def test_host_arrays_of_every_kind_and_no_layers():
    topology = Topology([[0.0, 1.0]])
    for slots in (np.array([[0, 1]], dtype=np.uint8), torch.tensor([[0, 1]]), [[0, 1]]):
        assert ReplicaMap.from_slots(slots, topology, num_experts=2).slots.tolist() == [[0, 1]]
    empty = ReplicaMap.from_slots(np.zeros((0, 2), dtype=np.int32), topology, num_experts=2)
    assert empty.replicas.shape == (0, 1, 2, 1)
