"""What only a CUDA device shows: Triton's results there, graphs, the absence of synchronisation, and streams."""

from __future__ import annotations

import pytest
import torch
from counting_cases import CASES, Case, differences, prepare, run

from gimbal_kernels.counting import ReplicaMap, TrafficWindow, add_backend_counts, cuda, map_and_count
from gimbal_kernels.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(cuda.status() != "ready", reason=cuda.status()))


@pytest.mark.parametrize("backend", ["torch", "triton", CUDA])
def test_equal_to_the_reference_on_the_host(backend):
    serving = [Case("serving", tokens=t, source="blocks", sources=8, slots=160) for t in (1, 2048, 16_384)]
    for case in CASES + serving:
        host, device = run(prepare(case), "torch"), run(prepare(case, device="cuda"), backend)
        assert differences(host, device) == [], case.name


@pytest.mark.parametrize("backend", ["torch", "triton", CUDA])
def test_reports_1_3_8_13_19_one_captured_graph_follows_its_device_inputs(backend):
    topology = Topology([[1.0, 1.0]])
    old, new = [[0, 1, 2, 3, 0, 1]], [[3, 2, 1, 0, 3, 2]]
    table = ReplicaMap.from_slots(old, topology, num_experts=4, device="cuda")
    ids = torch.randint(0, 4, (8, 2), dtype=torch.int32, device="cuda")
    out = torch.empty_like(ids)
    n = torch.tensor([8], dtype=torch.int32, device="cuda")
    flag = torch.tensor([1], dtype=torch.int32, device="cuda")
    window = TrafficWindow(1, 1, 4, device="cuda")

    def record():
        map_and_count(
            ids, table, window.counts, layer=0, source=0, num_tokens=n, enabled=flag, out=out, backend=backend
        )

    record()
    window.close()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            record()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def replay(tokens, enabled, slots):
        n.fill_(tokens)
        flag.fill_(enabled)
        table.update(slots)
        graph.replay()
        assert torch.equal(torch.tensor(slots[0], device="cuda")[out.long()].int(), ids)
        return int(window.close().sum())

    assert replay(5, 1, old) == 10
    assert replay(3, 1, new) == 6
    assert replay(8, 0, old) == 0


@pytest.mark.parametrize("backend", ["torch", "triton", CUDA])
def test_report_11_one_token_touches_nothing_around_its_arrays(backend):
    case = Case("one token", tokens=1, top_k=8, experts=64, slots=64)
    host, device = run(prepare(case), "torch"), run(prepare(case, device="cuda"), backend)
    assert differences(host, device) == []  # guard words included


def test_no_recompilation_as_rows_layers_and_sources_change():
    from gimbal_kernels.counting import triton_kernels

    table = ReplicaMap.from_slots([[0, 1, 2, 3]] * 17, Topology([[0.0]] * 17), num_experts=4, device="cuda")
    counts = torch.zeros(17, 17, 4, dtype=torch.int64, device="cuda")
    ids = torch.zeros(5000, 3, dtype=torch.int32, device="cuda")
    variants = set()
    for tokens, place in ((1, 0), (2, 1), (16, 2), (17, 16), (5000, 3)):
        map_and_count(ids[5000 - tokens :], table, counts, layer=place, source=place, backend="triton")
        caches = triton_kernels.map_and_count_kernel.device_caches[torch.cuda.current_device()]
        variants.add(len(caches[0]))
    assert len(variants) == 1


def test_recording_goes_on_while_a_window_closes():
    window = TrafficWindow(2, 2, 128, device="cuda")
    for step in range(1, 20):
        window.counts.add_(step)
        assert int(window.close().sum()) == step * window.counts.numel()


def test_closing_waits_for_nothing_on_the_host():
    window = TrafficWindow(2, 2, 128, device="cuda")
    handles = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 6):
            window.counts.add_(step)
            handles.append(window.close_async())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(h.wait().sum()) for h in handles] == [s * window.counts.numel() for s in range(1, 6)]


def test_backend_counts_on_the_device_are_not_read_back():
    counts = torch.zeros(1, 2, 4, dtype=torch.int64, device="cuda")
    received = torch.tensor([[1, 2], [3, 4]], device="cuda")
    ids = torch.tensor([3, 0], device="cuda")
    source = torch.tensor([0, 1], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_backend_counts(counts, layer=0, source=source, per_expert_per_rank=received, experts=ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts.tolist() == [[[3, 0, 0, 1], [4, 0, 0, 2]]]
