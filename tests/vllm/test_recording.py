"""`map_and_count` in place of vLLM's recording function: what is counted, what vLLM reads, where tokens go."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.vllm import kernel_recording, slot_maps
from gimbal_runtime.vllm.kernel_recording import STOCK_RECORDING, KernelRecording, reason_not_to_record
from gimbal_runtime.vllm.model_traffic import ModelTraffic
from gimbal_runtime.vllm.rank_place import RankPlace

from gimbal_kernels.counting import ReplicaMap

from .recording_models import (
    EXPERTS,
    LAYERS,
    ONE_COPY,
    TWO_COPIES,
    histogram,
    make_model,
    make_recording,
    random_picks,
    route,
    use_vllms_recording_on,
)

ALONE = RankPlace(0, 1, 2, 0, 2)
TWO_GROUPS = RankPlace(1, 2, 4, 0, 2)  # first rank of the second group: its own ranks are 2 and 3


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_vllms_recording_on("cpu", monkeypatch)


def step(state: Any, recording: Any, ids: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
    """A real forward pass of all layers: the slots of each."""
    state.num_unpadded_tokens_tensors[0].fill_(num_tokens)
    recording.before_forward()
    return [route(state, layer, ids) for layer in range(LAYERS)]


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_counts_and_vllms_load_are_those_of_vllms_own_function(rows: int) -> None:
    """Without spare slots there is nothing to choose, so every slot's load must be the same."""
    ids = random_picks(rows)
    stock, ours = make_model(), make_model()
    recording, counts = make_recording(ours, TWO_GROUPS)
    num_tokens = max(1, rows - 3)
    stock.num_unpadded_tokens_tensors[0].fill_(num_tokens)
    expected = [route(stock, layer, ids) for layer in range(LAYERS)]
    slots = step(ours, recording, ids, num_tokens)
    assert all(torch.equal(a, b) for a, b in zip(slots, expected, strict=True))
    assert torch.equal(ours.expert_load_pass, stock.expert_load_pass)
    assert counts[:, 0].sum() == 0
    assert counts[:, 1].tolist() == [histogram(ids, num_tokens)] * LAYERS
    picks = recording.after_forward(is_dummy=False)
    assert picks is not None
    assert torch.equal(picks, stock.expert_load_pass)


def test_copies_are_chosen_nearest_first_and_the_load_is_where_picks_went() -> None:
    state = make_model(TWO_COPIES)  # slots 4 to 7 are on ranks 2 and 3
    recording, counts = make_recording(state, TWO_GROUPS)
    ids = random_picks(500)
    slots = step(state, recording, ids, 500)
    for layer in range(LAYERS):
        assert torch.equal(torch.tensor(TWO_COPIES[layer])[slots[layer].long()].int(), ids)
        assert (
            state.expert_load_pass[layer].tolist()
            == torch.bincount(slots[layer].flatten(), minlength=8).tolist()
        )
        near = set(TWO_COPIES[layer][4:])
        is_near = torch.tensor([expert in near for expert in range(EXPERTS)])[ids.long()]
        assert (slots[layer][is_near] >= 4).all()
        assert (slots[layer][~is_near] < 4).all()
    assert counts[:, 1].tolist() == [histogram(ids, 500)] * LAYERS


def test_warm_up_and_idle_steps_are_mapped_and_counted_nowhere() -> None:
    state = make_model()
    recording, counts = make_recording(state, ALONE)
    state.num_unpadded_tokens_tensors[0].fill_(5)
    slots = route(state, 1, random_picks(5))  # no `before_forward`: not a real step
    assert torch.equal(torch.tensor(ONE_COPY[1])[slots.long()].int(), random_picks(5))
    assert recording.after_forward(is_dummy=True) is None
    assert counts.sum() == state.expert_load_pass.sum() == 0
    step(state, recording, random_picks(5), 5)
    recording.after_forward(is_dummy=False)
    before = counts.clone(), state.expert_load_pass.clone()
    route(state, 1, random_picks(5))  # an idle engine's pass after a real step
    assert torch.equal(counts, before[0])
    assert torch.equal(state.expert_load_pass, before[1])


def test_a_step_that_turns_out_to_be_a_dummy_is_taken_back() -> None:
    state = make_model(TWO_COPIES)
    recording, counts = make_recording(state, TWO_GROUPS)
    step(state, recording, random_picks(20), 20)
    assert recording.after_forward(is_dummy=False) is not None
    before = counts.clone()
    state.expert_load_pass.zero_()  # by vLLM, which has taken the step in
    step(state, recording, random_picks(9, seed=1), 9)
    assert recording.after_forward(is_dummy=True) is None
    assert torch.equal(counts, before)


def test_counting_is_continuous_and_vllm_finds_no_load_in_steps_that_it_does_not_record() -> None:
    state = make_model()
    traffic = ModelTraffic(state, ALONE, None, pressure_interval=1)
    recording = KernelRecording(state, ALONE, traffic.window.counts, ALONE.topology(1), compare=False)
    recording.attach()
    traffic.recording = recording
    assert not traffic.reads_loads
    for vllm_records in (False, False, True):
        step(state, recording, random_picks(6), 6)
        traffic.after_forward(is_dummy=False, vllm_records=vllm_records)
    assert traffic.window.counts.sum() == 3 * 6 * 2 * LAYERS
    assert int(traffic.loads._own.sum()) == 3 * 6 * 2 * LAYERS
    assert state.expert_load_pass.sum() == 6 * 2 * LAYERS  # the last step's only


def test_slices_of_a_group_add_up_to_its_tokens_once() -> None:
    """Sequence-parallel MoE: 7 tokens padded to 8, four rows for each of two TP ranks."""
    ids = random_picks(8)
    total = torch.zeros(LAYERS, 1, EXPERTS, dtype=torch.int64)
    for tp_rank in range(2):
        state = make_model(sequence_parallel=True)
        recording, counts = make_recording(state, RankPlace(0, 1, 2, tp_rank, 2))
        step(state, recording, ids[4 * tp_rank :][:4], 7)
        total += counts
    assert total[:, 0].tolist() == [histogram(ids, 7)] * LAYERS


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gathered_rows_are_mapped_alike_and_counted_once_over_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """Two sources with 6 and 4 rows, of which 5 and 2 are tokens; with TP in slices of half as many rows."""
    rows, tokens = (6, 4), (5, 2)
    sizes = [n // tp_size for n in rows for _ in range(tp_size)]
    context = SimpleNamespace(dp_metadata=SimpleNamespace(local_sizes=sizes))
    stock = kernel_recording.expect
    monkeypatch.setattr(
        kernel_recording,
        "expect",
        lambda module, path, *rest: (
            (lambda: context) if path == "get_forward_context" else stock(module, path, *rest)
        ),
    )
    ids = random_picks(10)
    total = torch.zeros(LAYERS, 2, EXPERTS, dtype=torch.int64)
    loads, slots_of_rank = [], []
    for rank in range(2 * tp_size):
        state = make_model(TWO_COPIES, gathered=True, sequence_parallel=tp_size > 1)
        place = RankPlace(rank // tp_size, 2, 2 * tp_size, rank % tp_size, tp_size)
        recording, counts = make_recording(state, place)
        slots_of_rank.append(step(state, recording, ids, tokens[place.source]))
        loads.append(state.expert_load_pass)
        total += counts
    for slots in slots_of_rank:
        assert all(torch.equal(a, b) for a, b in zip(slots, slots_of_rank[0], strict=True))
    for layer in range(LAYERS):
        assert total[layer, 0].tolist() == histogram(ids[:6], 5)
        assert total[layer, 1].tolist() == histogram(ids[6:], 2)
        chosen = torch.cat([slots_of_rank[0][layer][:5], slots_of_rank[0][layer][6:8]])
        assert (
            sum(load[layer] for load in loads).tolist()
            == torch.bincount(chosen.flatten(), minlength=8).tolist()
        )


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The slot-map hook in force, with source rows that one test supplies."""
    from vllm.distributed.eplb import eplb_state

    for name in ("_commit_eplb_maps", "_commit_eplb_maps_for_layer"):
        monkeypatch.setattr(eplb_state, name, getattr(eplb_state, name))
    slot_maps._install()

    def follow(recording: KernelRecording) -> Any:
        rows = SimpleNamespace(follow=lambda _, slots, layer: recording.follow(slots, layer))
        monkeypatch.setattr(slot_maps, "rows_of_this_process", lambda: rows)
        return eplb_state

    return follow


def test_tables_follow_every_map_that_vllm_commits_in_place(followed: Any) -> None:
    state = make_model(TWO_COPIES)
    recording, _ = make_recording(state, TWO_GROUPS)
    eplb_state = followed(recording)
    addresses = [t.data_ptr() for t in (recording.tables.replicas, recording.tables.nearest)]
    ids = random_picks(50)
    one_layer = torch.tensor([3, 3, 2, 1, 0, 0, 1, 2])
    eplb_state._commit_eplb_maps_for_layer(state, one_layer, 1)
    assert torch.equal(torch.tensor(TWO_COPIES[0])[route(state, 0, ids).long()].int(), ids)
    assert torch.equal(one_layer[route(state, 1, ids).long()].int(), ids)
    both = torch.stack([one_layer, torch.tensor([1, 0, 3, 2, 3, 2, 1, 0])])
    eplb_state._commit_eplb_maps(state, both)
    for layer in range(LAYERS):
        assert torch.equal(both[layer][route(state, layer, ids).long()].int(), ids)
    assert addresses == [t.data_ptr() for t in (recording.tables.replicas, recording.tables.nearest)]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_map_whose_tables_cannot_be_built_is_still_followed(
    followed: Any, monkeypatch: pytest.MonkeyPatch, weighted: bool
) -> None:
    state = make_model(TWO_COPIES)
    recording, _ = make_recording(state, TWO_GROUPS)
    if weighted:  # tables with shares: all picks to the last copy
        shares = torch.zeros(LAYERS, 2, 8)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                shares[layer, :, max(i for i, e in enumerate(TWO_COPIES[layer]) if e == expert)] = 1.0
        recording.tables = ReplicaMap.from_slots(
            TWO_COPIES, TWO_GROUPS.topology(1), num_experts=EXPERTS, shares=shares
        )
    eplb_state = followed(recording)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("made up")

    monkeypatch.setattr(type(recording.tables), "update", fail)
    row = torch.tensor([3, 3, 2, 1, 0, 0, 1, 2])
    eplb_state._commit_eplb_maps_for_layer(state, row, 0)
    ids = random_picks(50)
    slots = route(state, 0, ids)
    assert torch.equal(row[slots.long()].int(), ids)
    assert torch.bincount(slots.flatten(), minlength=8).min() > 0  # all copies take turns
    assert torch.equal(torch.tensor(TWO_COPIES[1])[route(state, 1, ids).long()].int(), ids)


def test_a_map_that_has_lost_an_expert_leaves_tables_that_end_no_process(followed: Any) -> None:
    state = make_model(TWO_COPIES)
    recording, _ = make_recording(state, TWO_GROUPS)
    followed(recording)._commit_eplb_maps_for_layer(state, torch.tensor([0, 0, 0, 0, 0, 0, 1, 2]), 0)
    width = recording.tables.max_replicas
    assert width == 5  # expert 0 has one copy more than any whole map could give it
    assert recording.tables.nearest[0].tolist() == [[5, 1, 1, 1]] * 2
    assert recording.tables.replicas[0].min() == 0
    slots = step(state, recording, random_picks(50), 50)[0]
    known = random_picks(50) != 3
    holds = torch.tensor([0, 0, 0, 0, 0, 0, 1, 2])
    assert torch.equal(holds[slots.long()].int()[known], random_picks(50)[known])


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(kernel_recording.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO", logger="vllm.gimbal")
    return caplog


def test_a_comparison_that_fails_leaves_counts_and_mapping_as_they_are(
    log: pytest.LogCaptureFixture,
) -> None:
    state = make_model(TWO_COPIES)
    recording, counts = make_recording(state, TWO_GROUPS, compare=True)
    comparison: Any = recording._comparison

    def fail(**_: Any) -> None:
        raise RuntimeError("made up")

    comparison._stock = fail
    ids = random_picks(30)
    slots = step(state, recording, ids, 25)
    recording.after_forward(is_dummy=False)
    assert not recording.fuse.blown
    assert all(torch.equal(torch.tensor(TWO_COPIES[i])[s.long()].int(), ids) for i, s in enumerate(slots))
    assert counts[:, 1].tolist() == [histogram(ids, 25)] * LAYERS
    recording.close(counts[:, 1])
    assert "nothing is compared any more" in log.text
    assert "picks differ" not in log.text


def test_comparison_with_vllms_recording_is_clean_and_can_fail(log: pytest.LogCaptureFixture) -> None:
    state = make_model(TWO_COPIES)
    recording, counts = make_recording(state, TWO_GROUPS, compare=True)
    for is_dummy in (False, True, False):
        step(state, recording, random_picks(30), 25)
        recording.after_forward(is_dummy=is_dummy)
        state.expert_load_pass.zero_()
    recording.close(counts[:, 1])
    assert f"0 of {2 * 25 * 2 * LAYERS} picks differ" in log.text
    counts.zero_()
    step(state, recording, random_picks(30), 25)
    recording.after_forward(is_dummy=False)
    counts[0, 1, 0] += 3
    recording.close(counts[:, 1])
    assert f"3 of {25 * 2 * LAYERS} picks differ" in log.text


def test_a_backend_that_fails_is_replaced_by_one_that_chooses_the_same(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    ids = random_picks(40)
    well = make_model(TWO_COPIES)
    good, good_counts = make_recording(well, TWO_GROUPS)
    expected = step(well, good, ids, 33)
    stock = kernel_recording.map_and_count

    def fails(*args: Any, backend: str, **kwargs: Any) -> Any:
        if backend == "auto":
            raise RuntimeError("made up")
        return stock(*args, backend=backend, **kwargs)

    monkeypatch.setattr(kernel_recording, "map_and_count", fails)
    state = make_model(TWO_COPIES)
    recording, counts = make_recording(state, TWO_GROUPS)
    slots = step(state, recording, ids, 33)
    assert recording.fuse.blown
    assert log.text.count("now off; plain torch goes on with the same tables") == 1
    assert all(torch.equal(a, b) for a, b in zip(slots, expected, strict=True))
    assert torch.equal(counts, good_counts)
    assert torch.equal(state.expert_load_pass, well.expert_load_pass)


def test_vllm_keeps_its_load_when_nobody_counts_any_more() -> None:
    state = make_model()
    recording, _ = make_recording(state, ALONE)
    recording.leave_on()
    state.num_unpadded_tokens_tensors[0].fill_(4)
    route(state, 0, random_picks(4))
    assert state.expert_load_pass.sum() == 8


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_ids_keep_their_type(dtype: torch.dtype) -> None:
    state = make_model()
    recording, counts = make_recording(state, ALONE)
    ids = torch.tensor([[0, 3], [2, -1], [1, EXPERTS]], dtype=dtype)
    slots = step(state, recording, ids, 3)[1]
    assert slots.dtype is dtype
    assert slots.tolist() == [[3, 0], [1, -1], [2, -1]]
    assert counts[1, 0].tolist() == [1, 1, 1, 1]


def test_compiled_routing_holds_the_operator() -> None:
    state = make_model(TWO_COPIES)
    recording, counts = make_recording(state, TWO_GROUPS)
    graphs = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return module

    torch._dynamo.reset()
    mapping = state.model.moe_layers[1].router._apply_eplb_mapping
    compiled = torch.compile(lambda ids: mapping(ids) + 0, fullgraph=True, backend=keep, dynamic=True)
    state.num_unpadded_tokens_tensors[0].fill_(10)
    recording.before_forward()
    ids = random_picks(12)
    slots = compiled(ids)
    [graph] = graphs
    assert [node.target for node in graph.nodes].count(torch.ops.gimbal.map_and_count) == 1
    assert counts[1, 1].tolist() == histogram(ids, 10)
    assert torch.equal(slots, route(state, 1, ids))


def test_reasons_to_leave_vllms_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_not_to_record(make_model(), ALONE, compare=True) is None
    other = make_model()
    other.model.moe_layers[1].router = object()
    assert "router (object)" in str(reason_not_to_record(other, ALONE, compare=False))
    gathered = make_model(gathered=True)
    assert reason_not_to_record(gathered, ALONE, compare=False) is None
    assert "gathered" in str(reason_not_to_record(gathered, ALONE, compare=True))
    monkeypatch.setattr(kernel_recording, "MAX_TABLE_BYTES", 4 * LAYERS * EXPERTS * 5 - 1)
    assert "tables" in str(reason_not_to_record(make_model(TWO_COPIES), ALONE, compare=False))
    monkeypatch.setattr(kernel_recording, "MAX_TABLE_BYTES", 4 * LAYERS * EXPERTS * 5)
    assert reason_not_to_record(make_model(TWO_COPIES), ALONE, compare=False) is None
    assert "tables" in str(reason_not_to_record(make_model(TWO_COPIES), ALONE, compare=False, weighted=True))
    assert reason_not_to_record(make_model(), ALONE, compare=False) is None
    monkeypatch.setattr(kernel_recording, "_follows_slot_maps", False)
    assert "slot-maps" in str(reason_not_to_record(make_model(), ALONE, compare=False))


def test_stock_function_is_where_the_comparison_looks_for_it() -> None:
    from vllm.model_executor.layers.fused_moe.router import base_router

    assert callable(getattr(base_router, STOCK_RECORDING))
