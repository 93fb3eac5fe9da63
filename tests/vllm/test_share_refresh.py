"""Shares that follow the traffic: two ranks in processes change their tables to the same bytes at the same step."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.service import fitted_shares, nearest_shares
from gimbal_runtime.vllm import share_refresh
from gimbal_runtime.vllm.rank_place import RankPlace
from gimbal_runtime.vllm.source_rows import SourceRows

from gimbal_kernels.counting import ReplicaMap
from gimbal_kernels.topology import Topology

from .test_source_rows import run_ranks

RANKS, LAYERS, EXPERTS, INTERVAL = 2, 2, 4, 4
TOPOLOGY = Topology.grid(gpus_per_node=RANKS, sources=RANKS)
SLOTS = np.tile([0, 1, 2, 0, 1, 3], (LAYERS, 1))  # experts 0 and 1 have a copy on each rank
PICKS = np.array([[800, 800, 0, 0], [10, 10, 0, 100]])  # by source: rank 0 has far more to do than rank 1


def make_rows(rank: int, interval: int | None = INTERVAL) -> tuple[SourceRows, Any]:
    shares = nearest_shares(SLOTS, TOPOLOGY, EXPERTS)
    tables = ReplicaMap.from_slots(SLOTS, TOPOLOGY, num_experts=EXPERTS, shares=shares)
    model = SimpleNamespace(
        contributes=True,
        window=SimpleNamespace(counts=torch.zeros(LAYERS, RANKS, EXPERTS, dtype=torch.int64)),
        recording=SimpleNamespace(tables=tables),
        slots=SLOTS.copy(),
    )
    model.current_slots = lambda: model.slots
    config = GimbalConfig(mode="ep", shares_interval=interval)
    rows = SourceRows(SimpleNamespace(model_states={}), config, RankPlace(rank, RANKS, RANKS, 0, 1), None)
    rows._models["key"] = model  # type: ignore[assignment]
    return rows, model


def serve(rows: SourceRows, model: Any, rank: int, steps: int) -> list[str]:
    """The tables' bytes after each step."""
    group = SimpleNamespace(device_group=dist.group.WORLD, cpu_group=dist.group.WORLD)
    share_refresh.expect = lambda *_: lambda: group  # type: ignore[assignment]
    seen = []
    for _ in range(steps):
        model.window.counts[:, rank] += torch.from_numpy(PICKS[rank])
        share_refresh.after_step(rows)
        seen.append(model.recording.tables.thresholds.numpy().tobytes().hex())
        time.sleep(0.05)  # the fit runs beside serving
    return seen


def test_tables_change_on_all_ranks_at_the_end_of_an_interval(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        rows, model = make_rows(rank)
        seen = serve(rows, model, rank, 3 * INTERVAL - 1)
        return seen, share_refresh.shares_in_force(rows, model, SLOTS).tolist(), rows.totals

    (first, shares, totals), (second, other, _) = run_ranks(tmp_path, work)
    assert first == second
    assert shares == other
    assert len(set(first)) == 2
    assert first.index(first[-1]) == 2 * INTERVAL - 1  # summed after four steps, in force after eight
    traffic = np.tile(PICKS * INTERVAL, (LAYERS, 1, 1))
    assert shares == fitted_shares(traffic, SLOTS, TOPOLOGY).tolist()
    assert 0.0 < shares[0][0][0] < 1.0  # rank 0 sends a part of its picks of expert 0 to the other copy
    assert totals["share_refreshes"] == 1


def test_a_layer_that_moved_meanwhile_keeps_the_nearest_copies(tmp_path: Path) -> None:
    moved = np.array([2, 0, 1, 3, 0, 1])

    def work(rank: int) -> Any:
        rows, model = make_rows(rank)
        serve(rows, model, rank, INTERVAL + 1)
        model.slots[1] = moved
        model.recording.tables.update(moved, layer=1)
        serve(rows, model, rank, INTERVAL)
        return share_refresh.shares_in_force(rows, model, model.slots).tolist()

    now = np.stack([SLOTS[0], moved])
    nearest = nearest_shares(now, TOPOLOGY, EXPERTS)
    first, second = run_ranks(tmp_path, work)
    assert first == second
    assert first[0] != nearest[0].tolist()
    assert first[1] == nearest[1].tolist()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_hangs_nobody(tmp_path: Path, failing: int) -> None:
    def work(rank: int) -> Any:
        rows, model = make_rows(rank)
        if rank == failing:
            share_refresh.ShareRefresh._take = lambda *_: 1 / 0  # type: ignore[method-assign]
            share_refresh.ShareRefresh._write = lambda *_: 1 / 0  # type: ignore[method-assign]
        serve(rows, model, rank, 4 * INTERVAL)
        return rows.fuse.blown

    assert run_ranks(tmp_path, work) == [rank == failing for rank in range(RANKS)]


def test_a_fit_that_fails_blows_the_fuse_of_its_rank(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        share_refresh.fitted_shares = lambda *_: 1 / 0  # type: ignore[assignment]
        rows, model = make_rows(rank)
        return len(set(serve(rows, model, rank, 3 * INTERVAL))), rows.fuse.blown

    assert run_ranks(tmp_path, work) == [(1, True), (1, False)]


def test_without_the_setting_or_tables_for_shares_nothing_is_exchanged() -> None:
    rows, model = make_rows(0, interval=None)
    share_refresh.after_step(rows)  # without process groups any collective would fail
    assert share_refresh.shares_in_force(rows, model, SLOTS) is None
    plain = ReplicaMap.from_slots(SLOTS, TOPOLOGY, num_experts=EXPERTS)
    model.recording.tables = plain
    assert share_refresh.tables_with_shares(model) is None


def test_few_picks_leave_the_nearest_copies() -> None:
    traffic = np.tile(PICKS, (LAYERS, 1, 1))
    traffic[1] = np.minimum(traffic[1], 3)
    shares = fitted_shares(traffic, SLOTS, TOPOLOGY)
    nearest = nearest_shares(SLOTS, TOPOLOGY, EXPERTS)
    assert (shares[1] == nearest[1]).all()
    assert (shares[0] != nearest[0]).any()
