"""add_backend_counts: the layouts of SPEC section 2, and the checksum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gimbal_kernels.counting import ReplicaMap, add_backend_counts, map_and_count
from gimbal_kernels.topology import Topology

E, S, L = 8, 4, 2


def zeros(dtype=torch.int64):
    return torch.zeros(L, S, E, dtype=dtype)


@pytest.fixture
def routed():
    """Ids of every source, and the matrix [S, E] that counting them gives."""
    rng = np.random.default_rng(0)
    ids = [torch.from_numpy(rng.integers(0, E, (10 + s, 2))) for s in range(S)]
    topology = Topology(np.ones((S, 1)))
    table = ReplicaMap.from_slots([list(range(E))] * L, topology, num_experts=E)
    counts = zeros()
    for source in range(S):
        map_and_count(ids[source], table, counts, layer=1, source=source)
    return ids, counts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_deepep_normal_mode_the_vector_of_all_experts_at_the_source(routed, dtype):
    ids, expected = routed
    counts = zeros(dtype)
    for source in range(S):
        vector = torch.bincount(ids[source].flatten(), minlength=E).to(torch.int32)
        add_backend_counts(counts, layer=1, source=source, per_expert=vector, expected=ids[source].numel())
    assert torch.equal(counts.long(), expected)


def test_what_each_rank_received_from_every_rank(routed):
    # Two ranks of four experts; four sources on two sending ranks each; of the two senders one is a TP twin.
    _, expected = routed
    counts = zeros()
    sources = [0, -1, 1, -1, 2, -1, 3, -1]
    for experts in ([0, 1, 2, 3], [7, 6, 5, 4]):
        received = expected[1][:, experts].T.repeat_interleave(2, dim=1)
        add_backend_counts(
            counts,
            layer=1,
            source=sources,
            per_expert_per_rank=received,
            experts=experts,
            expected=int(expected[1][:, experts].sum()),
        )
    assert torch.equal(counts, expected)


def test_deepep_low_latency_layout_range_holds_the_count_in_its_low_half(routed):
    # What a rank that holds experts 4 to 7 received from four ranks, packed as (begin, count) in one int64.
    _, expected = routed
    received = expected[1][:, 4:].T.contiguous()
    begin = torch.cumsum(received, 1) - received
    packed = begin << 32 | received
    counts, local = zeros(), list(range(4, 8))
    arguments = {"layer": 1, "source": [0, 1, 2, 3], "experts": local, "expected": int(received.sum())}
    with pytest.raises(ValueError, match="per_expert_per_rank: sums to"):
        add_backend_counts(counts, per_expert_per_rank=packed, **arguments)
    add_backend_counts(counts, per_expert_per_rank=packed & 0xFFFFFFFF, **arguments)
    assert torch.equal(counts[:, :, 4:], expected[:, :, 4:])
    assert counts[:, :, :4].sum() == 0


def test_flashinfer_counters_gathered_from_all_ranks(routed):
    ids, expected = routed
    gathered = torch.stack([torch.bincount(i.flatten(), minlength=E) for i in ids]).int()
    counts = zeros()
    add_backend_counts(
        counts,
        layer=1,
        source=range(S),
        per_expert_per_rank=gathered.T,
        experts=range(E),
        expected=sum(i.numel() for i in ids),
    )
    assert torch.equal(counts, expected)


def test_slices_of_one_source_from_two_ranks_add_up():
    counts = zeros()
    received = np.array([[1, 2], [3, 4]])
    add_backend_counts(
        counts, layer=0, source=[2, 2], per_expert_per_rank=received, experts=[5, 0], expected=10
    )
    assert counts[0, 2].tolist() == [7, 0, 0, 0, 0, 3, 0, 0]
    assert counts.sum() == 10


def test_pplx_expert_num_tokens_local_experts_of_one_known_source():
    counts = zeros()
    add_backend_counts(counts, layer=0, source=3, per_expert=[4, 5], experts=torch.tensor([6, 2]), expected=9)
    assert counts[0, 3].tolist() == [0, 0, 5, 0, 0, 0, 4, 0]


def test_physical_slots_fold_into_their_experts():
    # Ten slots; the backend counts per slot, experts 0 and 3 have two. A slot that holds nothing is left out.
    slots = [0, 1, 2, 3, 4, 5, 6, 7, 0, 3, -1]
    counts = zeros()
    picks = torch.arange(1, 12)
    add_backend_counts(counts, layer=1, source=0, per_expert=picks, experts=slots, expected=55)
    assert counts[1, 0].tolist() == [10, 2, 3, 14, 5, 6, 7, 8]


def test_counts_are_added_to_what_is_there():
    counts = zeros()
    for _ in range(2):
        add_backend_counts(counts, layer=0, source=1, per_expert=torch.arange(E))
    assert counts[0, 1].tolist() == [2 * e for e in range(E)]
    assert counts.sum() == 2 * 28


@pytest.mark.parametrize("block", [16, 64, 128])
def test_aligned_lists_are_refused_and_leave_the_counts_alone(block):
    true = torch.tensor([3, 0, 16, 1, 0, 0, 9, 3])
    aligned = (true + block - 1) // block * block
    counts = zeros()
    with pytest.raises(ValueError, match=f"per_expert: sums to {int(aligned.sum())}; valid: 32 picks"):
        add_backend_counts(counts, layer=0, source=0, per_expert=aligned, expected=32)
    assert counts.sum() == 0
    add_backend_counts(counts, layer=0, source=0, per_expert=true, expected=32)
    assert counts.sum() == 32


VECTOR = torch.ones(E, dtype=torch.int64)
MATRIX = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"counts": torch.zeros(S, E, dtype=torch.int64)},
            r"counts: \[4, 8\]; valid: a torch tensor \[L, S, E\]",
        ),
        ({"counts": torch.zeros(L, S, E)}, "counts: torch.float32"),
        ({"layer": 2}, "layer: 2; valid: an integer from 0 to 1"),
        ({"source": 4}, "source: 4; valid: an integer from 0 to 3"),
        ({"source": [0]}, r"source: \[0\]"),
        ({"per_expert": None}, "both or neither given"),
        ({"per_expert_per_rank": MATRIX}, "both or neither given"),
        ({"per_expert": VECTOR[:5]}, r"per_expert: shape \[5\]; valid: \[8\]"),
        ({"per_expert": MATRIX}, r"per_expert: shape \[2, 3\]; valid: \[N\]"),
        ({"per_expert": VECTOR.double()}, "per_expert: dtype torch.float64; valid: an integer type"),
        ({"per_expert": -VECTOR}, "per_expert: has -1; valid: counts >= 0"),
        ({"experts": [0, 1]}, r"experts: shape \[2\]; valid: \[8\]"),
        ({"expected": 9}, "per_expert: sums to 8; valid: 9 picks"),
        ({"expected": -1}, "expected: -1; valid: an integer >= 0"),
        ({"per_expert": None, "per_expert_per_rank": MATRIX, "source": [0, 1, 2]}, "experts: absent"),
        (
            {"per_expert": None, "per_expert_per_rank": MATRIX, "experts": [0, 1], "source": [0]},
            r"source: shape \[1\]; valid: \[3\]",
        ),
    ],
)
def test_bad_input_names_the_argument(changes, message):
    arguments = {"counts": zeros(), "layer": 0, "source": 0, "per_expert": VECTOR} | changes
    counts = arguments.pop("counts")
    with pytest.raises(ValueError, match=message):
        add_backend_counts(counts, **arguments)
