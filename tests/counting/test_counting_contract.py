"""map_and_count: the contract of SPEC section 2 on the plain torch reference."""

from __future__ import annotations

import pytest
import torch
from counting_cases import BY_NAME, CASES, GUARD, GUARD_VALUE, Case, naive, prepare, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gimbal_kernels.counting import ReplicaMap, available_backends, map_and_count
from gimbal_kernels.topology import Topology


def agrees_with_naive(prepared):
    case = prepared.case
    mapped, picks, load = naive(prepared)
    result = run(prepared, "torch")
    assert result["slots"].tolist() == mapped
    shape = (case.layers, case.sources, case.experts)
    counts = torch.arange(case.layers * case.sources * case.experts).view(shape) % 7
    for (source, expert), number in picks.items():
        counts[case.layer, source, expert] += number
    assert torch.equal(inner(result["counts"]).view(shape).long(), counts)
    expected = torch.ones(case.layers, case.slots, dtype=torch.int64)
    for slot, number in load.items() if case.with_load else ():
        expected[case.layer, slot] += number
    assert torch.equal(inner(result["load"]).view(expected.shape).long(), expected)


def inner(buffer):
    assert (buffer[:GUARD] == GUARD_VALUE).all()
    assert (buffer[-GUARD:] == GUARD_VALUE).all()
    return buffer[GUARD:-GUARD]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_equals_plain_loops(case):
    agrees_with_naive(prepare(case))


@given(
    tokens=st.integers(0, 20),
    top_k=st.integers(1, 5),
    experts=st.integers(1, 12),
    ranks=st.integers(1, 4),
    spare=st.integers(0, 8),
    sources=st.integers(1, 5),
    source=st.sampled_from([0, "blocks", "mixed", "stray"]),
    num_tokens=st.sampled_from([None, 0, 3, ("device", 2), ("device", 30)]),
    enabled=st.sampled_from([None, True, ("device", 0, torch.bool), ("device", 2, torch.int64)]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_reference_equals_plain_loops_on_any_shape(
    tokens, top_k, experts, ranks, spare, sources, source, num_tokens, enabled, seed
):
    slots = -(-(experts + spare) // ranks) * ranks
    case = Case("any", tokens, top_k, experts, ranks, slots, sources, 2, 1, source, num_tokens=num_tokens)
    prepared = prepare(Case(**{**vars(case), "enabled": enabled}), seed=seed)
    agrees_with_naive(prepared)


def identity(experts, *, layers=1, sources=1):
    topology = Topology([[0.0]] * sources)
    return ReplicaMap.from_slots([list(range(experts))] * layers, topology, num_experts=experts)


def test_report_1_padding_rows_are_mapped_but_not_counted():
    table, n = identity(8), torch.tensor([5], dtype=torch.int32)
    ids = torch.tensor([[2, 3]] * 5 + [[0, 1]] * 3, dtype=torch.int32)
    counts = torch.zeros(1, 1, 8, dtype=torch.int64)
    out = map_and_count(ids, table, counts, layer=0, source=0, num_tokens=n)
    assert torch.equal(out, ids)
    assert counts.sum() == 10
    assert counts[0, 0, :2].sum() == 0
    n.fill_(3)
    map_and_count(ids, table, counts, layer=0, source=0, num_tokens=n)
    assert counts.sum() == 16


def test_report_2_padding_ids_leave_as_minus_one_and_touch_nothing():
    prepared = prepare(BY_NAME["padding ids"])
    result = run(prepared, "torch")
    assert (result["slots"].flatten() == -1).tolist() == [True, False, True, True]
    fresh = torch.zeros(prepared.case.layers, prepared.case.sources, 8, dtype=torch.int64)
    map_and_count(prepared.ids, prepared.replica_map, fresh, layer=1, source=0)
    assert fresh.sum() == 1
    assert fresh[1, 0, 3] == 1


@pytest.mark.parametrize("extreme", [-(2**31), 2**31 - 1])
def test_ids_at_the_ends_of_their_type_are_padding(extreme):
    ids = torch.tensor([[extreme, 1]], dtype=torch.int32)
    counts = torch.zeros(1, 1, 4, dtype=torch.int64)
    assert map_and_count(ids, identity(4), counts, layer=0, source=0).tolist() == [[-1, 1]]
    assert counts.tolist() == [[[0, 1, 0, 0]]]


@pytest.mark.parametrize("flag", [False, 0, torch.tensor(0), torch.tensor([False])])
def test_report_3_a_disabled_batch_is_mapped_and_leaves_the_matrix_as_it_was(flag):
    table = identity(4)
    counts = torch.arange(4).view(1, 1, 4)
    load = torch.arange(4, dtype=torch.int32).view(1, 4)
    before = counts.clone(), load.clone()
    ids = torch.tensor([[0, 3]])
    out = map_and_count(ids, table, counts, layer=0, source=0, physical_load=load, enabled=flag)
    assert torch.equal(out, ids)
    assert torch.equal(counts, before[0])
    assert torch.equal(load, before[1])


def test_report_6_every_layer_has_its_own_row():
    top_k, table = 4, identity(8, layers=3)
    counts = torch.zeros(3, 1, 8, dtype=torch.int64)
    for layer, tokens in ((0, 1), (1, 2), (2, 3)):
        map_and_count(torch.zeros(tokens, top_k, dtype=torch.int32), table, counts, layer=layer, source=0)
    assert counts.sum((1, 2)).tolist() == [top_k, 2 * top_k, 3 * top_k]


def test_report_10_expert_1024_of_1025():
    counts = torch.zeros(1, 1, 1025, dtype=torch.int64)
    map_and_count(torch.tensor([[1024]]), identity(1025), counts, layer=0, source=0)
    assert counts[0, 0, 1024] == 1
    assert counts.sum() == 1


def test_report_15_a_cell_passes_two_to_the_31():
    counts = torch.full((1, 1, 2), 2**31 - 1, dtype=torch.int64)
    map_and_count(torch.tensor([[1]], dtype=torch.int32), identity(2), counts, layer=0, source=0)
    assert counts.tolist() == [[[2**31 - 1, 2**31]]]


def test_report_20_slots_beyond_the_experts_are_not_mapped_again():
    # 4 experts, 8 slots; source 0 is near the upper half, whose ids are no expert ids.
    table = ReplicaMap.from_slots([[0, 1, 2, 3] * 2], Topology([[1.0, 0.0]]), num_experts=4)
    counts = torch.zeros(1, 1, 4, dtype=torch.int64)
    once = map_and_count(torch.tensor([[0, 3], [1, 2]]), table, counts, layer=0, source=0)
    assert once.tolist() == [[4, 7], [5, 6]]
    twice = map_and_count(once, table, counts, layer=0, source=0)
    assert (twice == -1).all()
    assert counts.sum() == 4


class NoHostSync(TorchDispatchMode):
    """Fails on any operation whose result's size or branch needs a value on the host."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "_unique",
        "bincount",
        "equal",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.FORBIDDEN:
            raise AssertionError(f"{name} reads device values on the host")
        indices = args[1] if name in ("index", "index_put_") else ()
        if any(i is not None and i.dtype == torch.bool for i in indices):
            raise AssertionError("a boolean index needs its count on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["source stray", "blocks and scalars", "disabled on the device"])
def test_reports_8_and_13_the_record_path_never_reads_back(name):
    prepared = prepare(BY_NAME[name])
    case = prepared.case
    counts = torch.zeros(case.layers, case.sources, case.experts, dtype=torch.int64)
    load = torch.zeros(case.layers, case.slots, dtype=torch.int64)
    with NoHostSync():
        map_and_count(
            prepared.ids,
            prepared.replica_map,
            counts,
            layer=1,
            source=prepared.source,
            physical_load=load,
            num_tokens=prepared.num_tokens,
            enabled=prepared.enabled,
        )
    with pytest.raises(AssertionError, match="host"), NoHostSync():
        counts[counts > 0]
    with pytest.raises(AssertionError, match="host"), NoHostSync():
        counts.sum().item()


def test_rows_of_all_sources_together_count_as_each_source_alone():
    # Counts do not depend on a row's place, so the sources' rows counted apart add up to the same matrix.
    prepared = prepare(BY_NAME["source blocks"])
    case = prepared.case
    together = torch.zeros(case.layers, case.sources, case.experts, dtype=torch.int64)
    map_and_count(prepared.ids, prepared.replica_map, together, layer=1, source=prepared.source)
    apart = torch.zeros_like(together)
    for source in range(case.sources):
        own = prepared.ids[prepared.source == source]
        map_and_count(own, prepared.replica_map, apart, layer=1, source=source)
    assert torch.equal(together, apart)


def test_available_backends_says_why_not():
    states = available_backends()
    assert set(states) == {"torch", "host", "triton", "cuda"}
    assert states["torch"] == "ready"
    assert states["cuda"] == "ready" or "cupy" in states["cuda"] or "CUDA" in states["cuda"]
    assert states["triton"] == "ready" or "CUDA" in states["triton"] or "installed" in states["triton"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_triton_on_cpu_tensors_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="backend: 'triton' cannot be used here: no CUDA device"):
        call(backend="triton")


def call(**changes):
    arguments = {
        "topk_ids": torch.zeros(2, 2, dtype=torch.int32),
        "replica_map": identity(4, sources=2),
        "counts": torch.zeros(1, 2, 4, dtype=torch.int64),
        "layer": 0,
        "source": 0,
    } | changes
    return map_and_count(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_ids": torch.zeros(4, dtype=torch.int32)}, r"topk_ids: \[4\]; valid: a torch tensor \[T, K\]"),
        ({"topk_ids": [[0, 1]]}, "topk_ids: list"),
        ({"topk_ids": torch.zeros(2, 2)}, "topk_ids: dtype torch.float32; valid: torch.int32 or torch.int64"),
        ({"replica_map": None}, "replica_map: a NoneType"),
        ({"counts": torch.zeros(2, 4, dtype=torch.int64)}, r"counts: shape \[2, 4\]; valid: \[1, 2, 4\]"),
        ({"counts": torch.zeros(1, 2, 4)}, "counts: dtype torch.float32"),
        ({"counts": torch.zeros(1, 4, 2, dtype=torch.int64).mT}, "counts: strides .* contiguous"),
        ({"physical_load": torch.zeros(1, 5, dtype=torch.int32)}, r"physical_load: shape \[1, 5\]"),
        ({"layer": 1}, "layer: 1; valid: an integer from 0 to 0"),
        ({"layer": -1}, "layer: -1"),
        ({"layer": True}, "layer: True"),
        ({"source": 2}, "source: 2; valid: an integer from 0 to 1"),
        ({"source": torch.zeros(3, dtype=torch.int64)}, r"source: shape \[3\]; valid: \[2\]"),
        ({"source": torch.zeros(2)}, "source: dtype torch.float32"),
        ({"num_tokens": -1}, "num_tokens: -1; valid: an integer >= 0"),
        ({"num_tokens": torch.zeros(2, dtype=torch.int32)}, r"num_tokens: shape \[2\]; valid: one element"),
        ({"num_tokens": torch.tensor(1.0)}, "num_tokens: dtype torch.float32"),
        ({"enabled": "yes"}, "enabled: 'yes'"),
        ({"enabled": torch.tensor(1.0)}, "enabled: dtype torch.float32"),
        ({"out": torch.zeros(2, 2, dtype=torch.int64)}, "out: dtype torch.int64; valid: torch.int32"),
        ({"out": torch.zeros(2, 3, dtype=torch.int32)}, r"out: shape \[2, 3\]"),
        ({"backend": "hip"}, "backend: 'hip'; valid: 'auto', 'torch', 'host', 'triton', 'cuda'"),
    ],
)
def test_bad_input_names_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)
