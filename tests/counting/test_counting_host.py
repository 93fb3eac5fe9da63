"""The compiled backend for host memory equals the reference bit for bit, guard words included."""

from __future__ import annotations

import pytest
import torch
from counting_cases import CASES, Case, differences, prepare, run
from random_cases import random_case

from gimbal_kernels.counting import ReplicaMap, available_backends, backends, host, map_and_count
from gimbal_kernels.topology import Topology

pytestmark = pytest.mark.skipif(host.status() != "ready", reason=host.status())

SERVING = [
    # Long runs of one source are counted by slot, short ones pick by pick; 1,024 slots are the limit between them.
    Case("serving", tokens=2048, source="blocks", sources=8, slots=160),
    Case("serving, alternating sources", tokens=2048, source="mixed", sources=8, slots=160),
    Case("1024 slots", tokens=2048, experts=1000, slots=1024),
    Case("1028 slots", tokens=2048, experts=1000, slots=1028),
    Case("half of the rows", tokens=2048, num_tokens=("device", 1000), count_dtype=torch.int32),
]


@pytest.mark.parametrize("case", CASES + SERVING, ids=lambda case: case.name)
def test_host_equals_the_reference(case):
    prepared = prepare(case)
    assert differences(run(prepared, "torch"), run(prepared, "host")) == []


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_the_number_of_threads_does_not_show(threads, monkeypatch):
    real = host.map_and_count
    monkeypatch.setattr(host, "map_and_count", lambda *a, **k: real(*a, **k, threads=threads))
    for case in CASES + SERVING:
        prepared = prepare(case)
        assert differences(run(prepared, "torch"), run(prepared, "host")) == [], case.name


def test_host_equals_the_reference_on_random_shapes():
    for seed in range(150):
        prepared = prepare(random_case(seed), seed=seed)
        assert differences(run(prepared, "torch"), run(prepared, "host")) == [], f"seed {seed}"


def test_auto_takes_it_for_tensors_in_host_memory():
    assert available_backends()["host"] == "ready"
    assert backends.choose("auto", torch.zeros(1, 1, dtype=torch.int32)) == "host"


def test_a_counter_wraps_like_torch_does():
    topology = Topology([[0.0]])
    table = ReplicaMap.from_slots([[0, 1]], topology, num_experts=2)
    results = []
    for backend in ("torch", "host"):
        counts = torch.full((1, 1, 2), 2**31 - 1, dtype=torch.int32)
        ids = torch.tensor([[1], [1]], dtype=torch.int32)
        map_and_count(ids, table, counts, layer=0, source=0, backend=backend)
        results.append(counts.tolist())
    assert results[0] == results[1] == [[[2**31 - 1, -(2**31) + 1]]]


def test_tensors_elsewhere_are_refused():
    ids = torch.zeros(1, 1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="backend: 'host' cannot be used here: topk_ids are on meta"):
        backends.choose("host", ids)


def test_an_old_library_is_not_used(monkeypatch):
    class Library:
        pass

    monkeypatch.setattr(host._host_library, "load", Library)
    host._bind.cache_clear()
    try:
        assert "built from other sources, reinstall" in host.status()
        assert backends.choose("auto", torch.zeros(1, 1, dtype=torch.int32)) == "torch"
        with pytest.raises(ValueError, match="reinstall"):
            backends.choose("host", torch.zeros(1, 1, dtype=torch.int32))
    finally:
        host._bind.cache_clear()
