"""Several ranks count together, in processes of their own: a rank that fails, settings that differ."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.vllm import rank_place, source_rows
from gimbal_runtime.vllm.rank_place import RankPlace
from gimbal_runtime.vllm.source_rows import SourceRows

RANKS, LAYERS, EXPERTS = 2, 2, 4


def make_state() -> Any:
    layer = SimpleNamespace(
        is_monolithic=False,
        do_naive_dispatch_combine=False,
        moe_config=SimpleNamespace(is_sequence_parallel=True),
    )
    model = SimpleNamespace(num_moe_layers=LAYERS, num_logical_experts=EXPERTS, moe_layers=[layer])
    return SimpleNamespace(
        model=model,
        model_name="tiny",
        rebalanced=False,
        expert_load_pass=torch.zeros(LAYERS, EXPERTS, dtype=torch.int32),
        physical_to_logical_map=torch.arange(EXPERTS).repeat(LAYERS, 1),
    )


def run_ranks(folder: Path, work: Callable[[int], Any], *, nodes: int | None = None) -> list[Any]:
    """What `work(rank)` returns on each of two ranks joined by gloo; `nodes` as vLLM would count them."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def run(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        group = SimpleNamespace(world_size=RANKS, cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
        group.rank_in_group = rank
        stock = source_rows.expect

        def expect(module: str, path: str, *args: Any) -> Any:
            if path == "get_node_count" and nodes is not None:
                return lambda: nodes
            return (lambda: group) if path == "get_ep_group" else stock(module, path, *args)

        source_rows.expect = rank_place.expect = expect  # type: ignore[assignment]
        results.put((rank, work(rank)))

    ranks = [context.Process(target=run, args=(rank,)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    answers = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    return [answers[rank] for rank in range(RANKS)]


def make_rows(rank: int, interval: int = 2) -> tuple[SourceRows, Any]:
    state = make_state()
    config = GimbalConfig(mode="ep", pressure_interval=interval)
    eplb_state = SimpleNamespace(model_states={"key": state})
    rows = SourceRows(eplb_state, config, RankPlace(rank, RANKS, RANKS, 0, 1), dist.group.WORLD)
    rows.add("key")
    return rows, state


def out_of_memory(*_: Any) -> Any:
    raise MemoryError("made up")


def serve(rows: SourceRows, state: Any, picks: int) -> None:
    """One step in which this rank's tokens pick expert 1."""
    rows.before_forward("key")
    state.expert_load_pass[:, 1] += picks
    rows.after_step(is_dummy=False)


def test_window_and_pressure_hold_every_ranks_picks(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        rows, state = make_rows(rank)
        for _ in range(4):
            serve(rows, state, picks=10 * (rank + 1))
        rows.close_windows()
        [model] = rows.counted()
        return model.closed[0].wait().tolist(), rows.figures()

    for traffic, figures in run_ranks(tmp_path, work):
        assert traffic == [[[0, 40, 0, 0], [0, 80, 0, 0]]] * LAYERS
        assert figures["pressure_0"] == 60.0  # expert 1 lives on rank 0: two steps of 10 + 20
        assert figures["pressure_1"] == 0.0


def test_all_ranks_stop_at_the_same_step_when_one_can_no_longer_count(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        rows, state = make_rows(rank)
        stopped = None
        for step in range(12):
            if rank == 1 and step == 3:
                rows.counted()[0].recording.after_forward = out_of_memory  # type: ignore[method-assign]
            serve(rows, state, picks=1)
            if rows.stood_aside and stopped is None:
                stopped = step
        rows.close_windows()
        return stopped, rows.fuse.blown, rows.joint

    first, second = run_ranks(tmp_path, work)
    assert first[0] == second[0] is not None
    assert (first[1], second[1]) == (False, True)
    assert not first[2]
    assert not second[2]


def test_a_model_that_one_rank_cannot_count_is_counted_by_none(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        if rank == 1:
            source_rows.ModelTraffic = out_of_memory  # type: ignore[assignment, misc]
        rows, _ = make_rows(rank)
        return len(rows.counted())

    assert run_ranks(tmp_path, work) == [0, 0]


@pytest.mark.parametrize(
    ("unfit_rank", "recording", "by_kernel"),
    [(None, "auto", True), (1, "auto", False), (None, "loads", False), (None, "compare", True)],
)
def test_the_kernel_records_on_all_ranks_or_on_none(
    tmp_path: Path, unfit_rank: int | None, recording: str, by_kernel: bool
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from gimbal_runtime.vllm import kernel_recording
    from vllm.model_executor.layers.fused_moe.router import base_router  # noqa: F401  # once, for all ranks

    from .recording_models import make_model, random_picks, route

    def work(rank: int) -> Any:
        kernel_recording._follows_slot_maps = True
        state = make_model()
        if rank == unfit_rank:
            state.model.moe_layers[1].router = object()
        config = GimbalConfig(mode="ep", recording=recording, pressure_interval=2)
        eplb_state = SimpleNamespace(model_states={"key": state})
        rows = SourceRows(eplb_state, config, RankPlace(rank, RANKS, RANKS, 0, 1), dist.group.WORLD)
        rows.add("key")
        ids = random_picks(5)
        stock = "_apply_eplb_mapping" not in vars(state.model.moe_layers[0].router)
        if not stock:  # on the CPU vLLM's own function counts nothing
            state.num_unpadded_tokens_tensors[0].fill_(4)
            rows.before_forward("key")
            route(state, 0, ids)
            rows.after_step(is_dummy=False, vllm_records=False)
            rows.close_windows()
            [model] = rows.counted()
            assert model.closed[0].wait()[0, rank].sum() == 4 * 2
            assert state.expert_load_pass.sum() == 0
        return stock, rows.reads_loads

    answers = run_ranks(tmp_path, work, nodes=1)
    assert answers == [(not by_kernel, not by_kernel)] * RANKS


def test_vllm_finds_the_load_of_its_own_steps_when_all_have_stood_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from gimbal_runtime.vllm.kernel_recording import KernelRecording
    from gimbal_runtime.vllm.model_traffic import ModelTraffic

    from .recording_models import make_model, random_picks, route, use_vllms_recording_on

    use_vllms_recording_on("cpu", monkeypatch)
    state, place = make_model(), RankPlace(0, 1, 1, 0, 1)
    rows = SourceRows(SimpleNamespace(model_states={}), GimbalConfig(mode="ep"), place, None)
    model = ModelTraffic(state, place, None, 1)
    recording = KernelRecording(state, place, model.window.counts, place.topology(1), compare=False)
    recording.attach()
    model.recording = recording
    rows._models["key"] = model
    rows.stood_aside = True
    recording.leave_on()
    state.num_unpadded_tokens_tensors[0].fill_(3)
    for vllm_records in (False, False, True):
        rows.before_forward("key")
        route(state, 0, random_picks(3))
        rows.after_step(is_dummy=False, vllm_records=vllm_records)
    assert state.expert_load_pass.sum() == 3 * 2


def test_a_first_window_of_its_own_length_moves_the_count_of_steps_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(source_rows, "warn_once", warnings.append)
    state = SimpleNamespace(
        model_states={}, expert_rearrangement_step=75, expert_rearrangement_step_interval=100, updated=0
    )
    state._update_layer_should_record = lambda: setattr(state, "updated", state.updated + 1)
    for steps, expected in ((None, 75), (10, 90), (1000, 0)):
        config = GimbalConfig(mode="ep", first_window=steps)
        rows = SourceRows(state, config, RankPlace(0, 1, 1, 0, 1), None)
        rows.shorten_first_window()  # nothing is counted
        assert state.expert_rearrangement_step == 75
        rows._models["key"] = SimpleNamespace()  # type: ignore[assignment]
        rows.shorten_first_window()
        assert state.expert_rearrangement_step == expected
        state.expert_rearrangement_step = 75
    assert state.updated == 2
    assert warnings == ["Gimbal: first_window (1000) is cut to vLLM's step_interval (100)"]


def test_nodes_that_do_not_divide_the_ranks_count_as_one_and_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(rank_place, "warn_once", warnings.append)
    place = RankPlace(0, 2, 4, 0, 2)
    assert place.topology(2).distance.max() == 8.0
    assert warnings == []
    assert place.topology(3).distance.max() == 1.0
    assert warnings == ["Gimbal: 4 EP ranks do not divide among 3 nodes, all count as near"]


@pytest.mark.parametrize("differs", [False, True])
def test_ranks_with_other_settings_refuse_to_start(tmp_path: Path, differs: bool) -> None:
    def work(rank: int) -> Any:
        parallel = SimpleNamespace(
            enable_elastic_ep=False,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=RANKS,
        )
        state = SimpleNamespace(parallel_config=parallel, model_states={})
        config = GimbalConfig(mode="ep", beta=0.5 if differs and rank else 0.25)
        try:
            source_rows.start_counting(state, config)
        except ValueError as error:
            return str(error)
        return None

    answers = run_ranks(tmp_path, work)
    assert all(("the same on all" in answer) if differs else answer is None for answer in answers)
