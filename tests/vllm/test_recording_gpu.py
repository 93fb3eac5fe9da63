"""Recording in vLLM's routers on a GPU: equal to vLLM's kernel, and one captured graph that goes on recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.vllm.rank_place import RankPlace

from .recording_models import (
    LAYERS,
    TWO_COPIES,
    histogram,
    make_model,
    make_recording,
    random_picks,
    route,
    use_vllms_recording_on,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PLACE = RankPlace(1, 2, 4, 0, 2)


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_vllms_recording_on("cuda", monkeypatch)


@pytest.mark.parametrize("rows", [1, 17, 4096])
def test_counts_and_load_are_those_of_vllms_kernel(rows: int) -> None:
    ids = random_picks(rows).cuda()
    stock, ours = make_model(device="cuda"), make_model(device="cuda")
    recording, counts = make_recording(ours, PLACE)
    recording.before_forward()
    num_tokens = max(1, rows - 5)
    for state in (stock, ours):
        state.num_unpadded_tokens_tensors[0].fill_(num_tokens)
    for layer in range(LAYERS):
        assert torch.equal(route(ours, layer, ids), route(stock, layer, ids))
    assert not recording.fuse.blown
    assert torch.equal(ours.expert_load_pass, stock.expert_load_pass)
    assert counts[:, 1].tolist() == [histogram(ids, num_tokens)] * LAYERS


def test_comparison_with_vllms_kernel_is_clean_with_spare_copies() -> None:
    state = make_model(TWO_COPIES, device="cuda")
    recording, counts = make_recording(state, PLACE, compare=True)
    state.num_unpadded_tokens_tensors[0].fill_(900)
    recording.before_forward()
    for layer in range(LAYERS):
        route(state, layer, random_picks(1000, seed=layer).cuda())
    recording.after_forward(is_dummy=False)
    comparison: Any = recording._comparison
    assert comparison.close(counts[:, 1]) == (900 * 2 * LAYERS, 0)


def test_a_captured_graph_follows_tokens_flag_and_slot_maps() -> None:
    from vllm.distributed.eplb.eplb_state import _commit_eplb_maps

    state = make_model(TWO_COPIES, device="cuda")
    recording, counts = make_recording(state, PLACE)
    ids = random_picks(64).cuda()
    tokens = state.num_unpadded_tokens_tensors[0]
    for layer in range(LAYERS):
        route(state, layer, ids)  # compiles the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            slots = [route(state, layer, ids) for layer in range(LAYERS)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not recording.fuse.blown
    maps = torch.tensor(TWO_COPIES), torch.tensor([[3, 3, 2, 1, 0, 0, 1, 2], [1, 0, 3, 2, 3, 2, 1, 0]])
    expected = 0
    for num_tokens, is_real, slot_map in ((50, True, maps[0]), (3, False, maps[1]), (64, True, maps[1])):
        _commit_eplb_maps(state, slot_map)
        recording.follow(slot_map, None)
        tokens.fill_(num_tokens)
        if is_real:
            recording.before_forward()
        graph.replay()
        for layer in range(LAYERS):
            assert torch.equal(slot_map.cuda()[layer][slots[layer].long()].int(), ids)
        expected += num_tokens * 2 * LAYERS * is_real
        assert int(counts.sum()) == expected
        recording.after_forward(is_dummy=False)
        recording.drop_load()


def test_preparing_and_ending_a_step_waits_for_nothing() -> None:
    state = make_model(device="cuda")
    recording, _ = make_recording(state, PLACE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for is_dummy in (False, True):
            recording.before_forward()
            recording.after_forward(is_dummy=is_dummy)
            recording.drop_load()
    finally:
        torch.cuda.set_sync_debug_mode("default")
