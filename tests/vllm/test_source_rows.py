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


def run_ranks(folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns on each of two ranks joined by gloo."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def run(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        group = SimpleNamespace(world_size=RANKS, cpu_group=dist.group.WORLD, device_group=dist.group.WORLD)
        group.rank_in_group = rank
        stock = source_rows.expect

        def expect(module: str, path: str, *args: Any) -> Any:
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
                state.physical_to_logical_map = None  # counting fails on this rank from here on
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
