"""Shares per (source, copy) in place of the nearest copies' even ones (SPEC sections 2 and 4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counting_cases import BY_NAME, differences, prepare, run

from gimbal_kernels.counting import ReplicaMap, host, map_and_count
from gimbal_kernels.topology import Topology

TOKENS = 2048
BACKENDS = ["torch", pytest.param("host", marks=pytest.mark.skipif(host.status() != "ready", reason=""))]


def load_of(table, *, sources=1, backend="torch", rows=TOKENS, stride=1):
    """Picks per slot [P] of expert 0, one token of each source in every stride-th row."""
    ids = torch.full((rows * stride, 1), -1, dtype=torch.int32)
    ids[::stride] = 0
    load = torch.zeros(table.slots.shape, dtype=torch.int64)
    counts = torch.zeros(1, table.num_sources, table.num_experts, dtype=torch.int64)
    for source in range(sources):
        map_and_count(ids, table, counts, layer=0, source=source, physical_load=load, backend=backend)
    return load[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stride", [1, 2, 3, 8, 64])
def test_every_copy_gets_its_share(backend, stride):
    # Expert 0 has a copy on each of four ranks; the second one, the nearest, gets nothing.
    slots = [[0, 1, 0, 1, 0, 1, 0, 1]]
    share = np.array([0.5, 0.0, 0.125, 0.375])
    shares = np.zeros((1, 1, 8))
    shares[0, 0, ::2], shares[0, 0, 1] = share * 3.0, 1.0  # any scale will do
    topology = Topology([[1.0, 0.0, 1.0, 2.0]])
    table = ReplicaMap.from_slots(slots, topology, num_experts=2, shares=shares)
    picks = load_of(table, backend=backend, stride=stride)[::2] / TOKENS
    assert picks[1] == 0
    assert np.abs(picks.numpy() - share).max() <= 0.02


def test_even_shares_of_the_nearest_copies_choose_as_no_shares_do():
    weighted = prepare(BY_NAME["even shares"])
    plain = ReplicaMap.from_slots(weighted.slots, Topology(weighted.distance), num_experts=8)
    nearest = {**vars(weighted), "replica_map": plain}
    assert differences(run(weighted, "torch"), run(type(weighted)(**nearest), "torch")) == []


def test_one_token_of_each_source_uses_all_copies():
    table = ReplicaMap.from_slots(
        [[0, 1, 0, 1]], Topology([[1.0, 1.0]] * 8), num_experts=2, shares=np.ones((1, 8, 4))
    )
    assert load_of(table, sources=8, rows=1)[::2].tolist() == [4, 4]


def test_shares_change_in_place_and_go_back_to_the_nearest():
    topology = Topology([[0.0, 1.0]])
    shares = np.array([[[0.25, 1.0, 0.75, 0.0]]])
    table = ReplicaMap.from_slots([[0, 1, 0, 1]], topology, num_experts=2, shares=shares)
    addresses = [t.data_ptr() for t in (table.replicas, table.nearest, table.thresholds)]
    assert load_of(table)[0] / TOKENS == pytest.approx(0.25, abs=0.01)
    table.update(shares=shares[:, :, ::-1])
    assert load_of(table)[0] == 0
    table.update([[1, 0, 1, 0]], shares=np.ones((1, 1, 4)))
    assert load_of(table)[1] / TOKENS == pytest.approx(0.5, abs=0.01)
    table.update([[0, 1, 0, 1]])
    assert load_of(table).tolist() == [TOKENS, 0, 0, 0]
    assert addresses == [t.data_ptr() for t in (table.replicas, table.nearest, table.thresholds)]


def test_shares_of_one_layer_have_its_shape():
    table = ReplicaMap.from_slots([[0, 1]], Topology([[0.0]]), num_experts=2, shares=np.ones((1, 1, 2)))
    with pytest.raises(ValueError, match=r"shares: shape \[1, 1, 2\]; valid: \[1, 2\] with `layer`"):
        table.update(shares=np.ones((1, 1, 2)), layer=0)


def test_a_map_made_without_shares_takes_none():
    table = ReplicaMap.from_slots([[0, 1]], Topology([[0.0]]), num_experts=2)
    with pytest.raises(ValueError, match="shares: given; valid: none"):
        table.update(shares=np.ones((1, 1, 2)))


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (np.ones((1, 4)), r"shares: shape \[1, 4\]; valid: \[1, 1, 4\]"),
        ([[[0.5, 1, -0.5, 1]]], "shares: layer 0, source 0, slot 2 has -0.5; valid: finite numbers >= 0"),
        ([[[0.5, float("nan"), 0.5, 1]]], "slot 1 has nan"),
        ([[[0.5, float("inf"), 0.5, 1]]], "slot 1 has inf"),
        ([[[0.0, 1, 0.0, 1]]], "shares: layer 0, source 0: all copies of expert 0 have 0"),
        ([[[1e308, 1, 1e308, 1]]], "shares: the copies of an expert sum to more than 1.8e308"),
    ],
)
def test_impossible_shares_are_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        ReplicaMap.from_slots([[0, 1, 0, 1]], Topology([[0.0, 1.0]]), num_experts=2, shares=shares)
