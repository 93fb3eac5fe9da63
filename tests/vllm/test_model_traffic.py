"""Source rows and rank loads of one model, on made-up counters; vLLM's recording contract on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gimbal_runtime.vllm.cpu_eplb import map_and_record
from gimbal_runtime.vllm.model_traffic import ModelTraffic, RankLoads
from gimbal_runtime.vllm.rank_place import RankPlace

LAYERS, EXPERTS = 2, 4


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over a group of one rank changes nothing."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: None)


def make_state(sequence_parallel: bool = False) -> Any:
    moe_config = SimpleNamespace(is_sequence_parallel=sequence_parallel)
    model = SimpleNamespace(
        num_moe_layers=LAYERS,
        num_logical_experts=EXPERTS,
        moe_layers=[SimpleNamespace(moe_config=moe_config)],
    )
    return SimpleNamespace(
        model=model,
        expert_load_pass=torch.zeros(LAYERS, EXPERTS, dtype=torch.int32),
        physical_to_logical_map=torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]),
    )


def make_traffic(place: RankPlace, state: Any) -> ModelTraffic:
    return ModelTraffic(state, place, None, pressure_interval=1)


def test_slots_become_experts_in_the_sources_row() -> None:
    state = make_state()
    traffic = make_traffic(RankPlace(1, 2, 2, 0, 1), state)
    traffic.before_forward()
    state.expert_load_pass += torch.tensor([[5, 0, 0, 1], [5, 0, 0, 1]], dtype=torch.int32)
    traffic.after_forward(is_dummy=False)
    assert traffic.window.counts[:, 0].sum() == 0
    assert traffic.window.counts[:, 1].tolist() == [[5, 0, 0, 1], [1, 0, 0, 5]]


def test_warm_up_dummies_and_leftovers_are_not_counted() -> None:
    state = make_state()
    traffic = make_traffic(RankPlace(0, 2, 2, 0, 1), state)
    state.expert_load_pass += 7  # warm-up left this behind
    traffic.before_forward()
    state.expert_load_pass[:, 0] += 2
    traffic.after_forward(is_dummy=False)
    traffic.before_forward()
    state.expert_load_pass += 100
    traffic.after_forward(is_dummy=True)
    traffic.after_forward(is_dummy=False)  # a step without a forward pass of this model
    assert traffic.window.counts.sum() == 2 * LAYERS


def test_several_passes_of_a_step_all_count() -> None:
    state = make_state()
    traffic = make_traffic(RankPlace(0, 1, 1, 0, 1), state)
    for _ in range(3):
        traffic.before_forward()
        state.expert_load_pass[:, 1] += 1
    traffic.after_forward(is_dummy=False)
    assert traffic.window.counts[:, 0].tolist() == [[0, 3, 0, 0], [0, 0, 3, 0]]  # by each layer's slot map


@pytest.mark.parametrize(("sequence_parallel", "counted"), [(False, 0), (True, 4 * LAYERS)])
def test_second_tp_rank_counts_its_slice_only(sequence_parallel: bool, counted: int) -> None:
    state = make_state(sequence_parallel)
    traffic = make_traffic(RankPlace(0, 1, 2, 1, 2), state)
    traffic.before_forward()
    state.expert_load_pass[:, 0] += 4
    traffic.after_forward(is_dummy=False)
    assert int(traffic.loads._own.sum()) == counted
    traffic.close()
    assert traffic.closed[0].wait().sum() == counted


def test_closed_window_waits_for_the_policy_and_replaces_an_older_one() -> None:
    state = make_state()
    traffic = make_traffic(RankPlace(0, 1, 1, 0, 1), state)
    traffic.close()
    traffic.window.counts[0, 0, 0] = 9
    traffic.close()
    [closed] = traffic.closed
    assert closed.wait()[0, 0, 0] == 9
    assert traffic.window.counts.sum() == 0


def test_profiling_and_warm_up_before_serving_are_dropped() -> None:
    state = make_state()
    traffic = make_traffic(RankPlace(0, 1, 1, 0, 1), state)
    traffic.before_forward()
    state.expert_load_pass += 1000  # the profiling pass
    traffic.after_forward(is_dummy=True)
    traffic.before_forward()
    state.expert_load_pass[:, 0] += 3  # made-up requests of the warm-up
    traffic.after_forward(is_dummy=False)
    traffic.start_afresh()
    traffic.before_forward()
    state.expert_load_pass[:, 0] += 2
    traffic.after_forward(is_dummy=False)
    assert traffic.window.counts.sum() == 2 * LAYERS
    assert int(traffic.loads._own.sum()) == 2 * LAYERS


def make_loads(interval: int) -> RankLoads:
    return RankLoads(RankPlace(0, 2, 4, 0, 2), torch.device("cpu"), None, interval, layers=LAYERS)


def test_pressure_is_summed_over_an_engines_ranks_one_exchange_late() -> None:
    loads = make_loads(interval=2)
    picks = torch.zeros(LAYERS, 8, dtype=torch.int32)
    picks[:, :2] = 10  # rank 0
    picks[:, 6:] = 5  # rank 3
    loads.add(picks)
    assert all(loads.end_step(well=True) for _ in range(2))
    assert loads.figures == {}
    loads._host[-1] = 4  # as if four ranks had said that they are well
    assert all(loads.end_step(well=True) for _ in range(2))
    assert loads.figures["pressure_0"] == 20.0
    assert loads.figures["pressure_1"] == 10.0


def test_a_rank_that_is_not_well_is_noticed_by_all() -> None:
    loads = make_loads(interval=1)
    assert loads.end_step(well=True)
    loads._host[-1] = 3
    assert not loads.end_step(well=True)


def test_recording_on_the_cpu_keeps_vllms_contract() -> None:
    ids = torch.tensor([[0, 1], [1, -1], [0, 4], [1, 0]], dtype=torch.int32)
    slots = torch.tensor([[0, 2], [1, -1], [3, -1], [4, -1]])
    counts = torch.tensor([2, 1, 1, 1])
    load = torch.zeros(5, dtype=torch.int32)
    out = map_and_record(ids, load, slots, counts, torch.tensor(True), torch.tensor(3))
    assert out.tolist() == [[0, 1], [1, -1], [0, -1], [1, 2]]
    assert out.dtype == ids.dtype
    assert load.tolist() == [2, 2, 0, 0, 0]  # the fourth row is padding
    map_and_record(ids, load, slots, counts, torch.tensor(False), None)
    assert load.tolist() == [2, 2, 0, 0, 0]
