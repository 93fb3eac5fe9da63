"""`map_and_count` as a torch operator: torch.compile keeps it, and what it does is what its schema says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gimbal_kernels.counting import ReplicaMap, map_and_count
from gimbal_kernels.topology import Topology

LAYERS, SOURCES, EXPERTS = 2, 2, 4
SLOTS = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 2, 2]]


def make_table(device: str = "cpu") -> ReplicaMap:
    return ReplicaMap.from_slots(
        SLOTS, Topology.grid(gpus_per_node=2, sources=SOURCES), num_experts=EXPERTS, device=device
    )


def make_counters(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.zeros(LAYERS, SOURCES, EXPERTS, dtype=torch.int64, device=device)
    return counts, torch.zeros(LAYERS, 6, dtype=torch.int32, device=device)


def compiled_with_graph(function: Any) -> tuple[Any, list[Any]]:
    """`function` compiled as a whole, and the list that its graphs will be in once it has run."""
    graphs: list[Any] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return module

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=keep, dynamic=True), graphs


CONTROLS = {
    "all rows": {},
    "device scalars": {"num_tokens": torch.tensor(2, dtype=torch.int32), "enabled": torch.tensor(True)},
    "off by a device flag": {"enabled": torch.tensor([0], dtype=torch.int32)},
    "numbers": {"num_tokens": 3, "enabled": True},
    "no rows": {"num_tokens": 0},
    "off beside a device scalar": {"num_tokens": torch.tensor(2), "enabled": False},
}


@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS.keys())
@pytest.mark.parametrize("source", [1, torch.tensor([0, 1, 1, -1, 0])], ids=["one source", "source per row"])
def test_compiled_call_is_one_operator_and_counts_the_same(controls: dict[str, Any], source: Any) -> None:
    table = make_table()
    counts, load = make_counters()
    ids = torch.tensor([[0, 1], [2, -1], [3, 4], [0, 2], [1, 0]], dtype=torch.int32)

    def record(topk_ids: torch.Tensor) -> torch.Tensor:
        double = topk_ids + 0  # something for the compiler beside the operator
        return (
            map_and_count(double, table, counts, layer=1, source=source, physical_load=load, **controls) + 0
        )

    compiled, graphs = compiled_with_graph(record)
    slots = compiled(ids)
    [graph] = graphs
    assert [node.target for node in graph.nodes].count(torch.ops.gimbal.map_and_count) == 1
    expected_counts, expected_load = make_counters()
    expected = map_and_count(
        ids, table, expected_counts, layer=1, source=source, physical_load=expected_load, **controls
    )
    assert torch.equal(slots, expected)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(load, expected_load)


def test_the_compilers_own_passes_keep_what_the_operator_writes() -> None:
    """Functionalised and written back, twice over the same counters."""
    table = make_table()
    counts, load = make_counters()

    def record(topk_ids: torch.Tensor, counts: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
        first = map_and_count(topk_ids, table, counts, layer=0, source=0, physical_load=load)
        return first + map_and_count(topk_ids, table, counts, layer=1, source=1, physical_load=load)

    torch._dynamo.reset()
    compiled = torch.compile(record, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (1, 3, 16):
        ids = torch.arange(rows * 2, dtype=torch.int64).reshape(rows, 2) % EXPERTS
        before = counts.clone(), load.clone()
        slots = compiled(ids, counts, load)
        assert torch.equal(slots, record(ids, *before))
        assert torch.equal(counts, before[0])
        assert torch.equal(load, before[1])
    assert counts.sum() == load.sum() == 2 * 2 * (1 + 3 + 16)


@pytest.mark.parametrize("rows", [0, 5])
def test_opcheck(rows: int) -> None:
    table = make_table()
    counts, load = make_counters()
    ids = torch.zeros(rows, 2, dtype=torch.int32)
    sources = torch.zeros(rows, dtype=torch.int64)
    tables = (table.replicas, table.nearest, table.thresholds, table.slots)
    for per_row, limit in ((None, -1), (sources, 3)):
        arguments = (ids, *tables, counts, load, per_row, None, torch.tensor(True), 1, 0, limit, "auto")
        torch.library.opcheck(torch.ops.gimbal.map_and_count.default, arguments)


def test_out_is_filled_in_compiled_code() -> None:
    table = make_table()
    counts, _ = make_counters()
    out = torch.empty(3, 2, dtype=torch.int32)

    def record(topk_ids: torch.Tensor) -> torch.Tensor:
        return map_and_count(topk_ids, table, counts, layer=0, source=0, out=out)

    compiled, _ = compiled_with_graph(record)
    ids = torch.tensor([[0, 1], [2, 3], [3, -1]], dtype=torch.int32)
    assert torch.equal(compiled(ids), record(ids))
    assert torch.equal(out, record(ids))


def test_arguments_are_checked_when_the_operator_runs() -> None:
    table = make_table()
    counts, _ = make_counters()
    compiled, _ = compiled_with_graph(
        lambda topk_ids: map_and_count(topk_ids, table, counts, layer=LAYERS, source=0)
    )
    with pytest.raises(ValueError, match="layer: 2; valid: an integer from 0 to 1"):
        compiled(torch.zeros(1, 2, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_operator_follows_its_device_inputs() -> None:
    table = make_table("cuda")
    counts, load = make_counters("cuda")
    ids = torch.randint(0, EXPERTS, (8, 2), dtype=torch.int32, device="cuda")
    rows = torch.tensor(8, dtype=torch.int32, device="cuda")
    enabled = torch.tensor(True, device="cuda")

    def record(topk_ids: torch.Tensor) -> torch.Tensor:
        return map_and_count(
            topk_ids, table, counts, layer=0, source=1, physical_load=load, num_tokens=rows, enabled=enabled
        )

    compiled, graphs = compiled_with_graph(record)
    compiled(ids)  # compiles before the capture
    assert len(graphs) == 1
    counts.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            slots = compiled(ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for tokens, on, expected in ((5, True, 10), (3, True, 6), (8, False, 0)):
        rows.fill_(tokens)
        enabled.fill_(on)
        graph.replay()
        assert int(counts.sum()) == expected
        assert torch.equal(table.slots[0][slots.long()], ids)
        counts.zero_()
