"""The placement policy's own logic, without a server: what it decides, what it reports, what may fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.vllm import eplb_policy
from gimbal_runtime.vllm.guard import Fuse
from gimbal_runtime.vllm.source_rows import RankPlace, SourceRows

LAYERS, SOURCES, EXPERTS, RANKS = 2, 2, 8, 4


def make_rows(config: GimbalConfig, place: RankPlace | None = None) -> SourceRows:
    """Source rows as they are on one rank, without process groups."""
    rows = SourceRows.__new__(SourceRows)
    rows.config = config
    rows.place = place or RankPlace(
        source=0, num_sources=SOURCES, num_ranks=RANKS, tp_rank=0, tp_size=2, sequence_parallel=True
    )
    rows.totals = {}
    return rows


def make_model() -> Any:
    """Two tensors an expert: 3 x 4 float32 and 5 float32, 68 bytes."""
    weights = [[torch.zeros(2, 3, 4), torch.zeros(2, 5)]]
    return SimpleNamespace(state=SimpleNamespace(model=SimpleNamespace(expert_weights=weights)))


@pytest.fixture
def traffic() -> np.ndarray:
    """Source 0 picks the experts that live far from it, source 1 likewise."""
    picks = np.ones((LAYERS, SOURCES, EXPERTS), dtype=np.int64)
    picks[:, 0, 4:] = 100
    picks[:, 1, :4] = 100
    return picks


@pytest.fixture
def current() -> np.ndarray:
    return np.tile(np.arange(EXPERTS), (LAYERS, 1))


@pytest.fixture(autouse=True)
def fresh_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eplb_policy, "_report_fuse", Fuse("placement-report"))


def no_stock() -> np.ndarray:
    raise AssertionError("vLLM's own policy was asked")


def test_experts_move_to_the_source_that_picks_them(traffic: np.ndarray, current: np.ndarray) -> None:
    rows = make_rows(GimbalConfig(mode="ep", gamma=0.0))
    slots = eplb_policy.decide(rows, make_model(), traffic, current, 1, no_stock)
    assert all(set(row[:4]) == {4, 5, 6, 7} for row in slots.tolist())
    assert rows.totals["experts_moved"] == LAYERS * EXPERTS
    assert rows.totals["bytes_moved"] == LAYERS * EXPERTS * 68
    assert rows.totals["remote_pick_share"] == pytest.approx(100 / 101)
    assert rows.totals["picks"] == traffic.sum()


def test_observing_asks_vllm_and_measures(traffic: np.ndarray, current: np.ndarray) -> None:
    rows = make_rows(GimbalConfig(mode="off", observe=True))
    slots = eplb_policy.decide(rows, make_model(), traffic, current, 1, lambda: current)
    assert slots is current
    assert rows.totals["experts_moved"] == 0
    assert rows.totals["windows"] == 1


def test_spare_slots_are_left_to_vllm(traffic: np.ndarray) -> None:
    with_spare = np.tile(np.arange(12) % EXPERTS, (LAYERS, 1))
    rows = make_rows(GimbalConfig(mode="ep"))
    assert eplb_policy.decide(rows, make_model(), traffic, with_spare, 1, lambda: with_spare) is with_spare


def test_every_rank_decides_the_same(traffic: np.ndarray, current: np.ndarray) -> None:
    config = GimbalConfig(mode="full", gamma=0.1)
    decisions = []
    for rank in range(RANKS):
        place = RankPlace(rank // 2, SOURCES, RANKS, rank % 2, 2, True)
        slots = eplb_policy.decide(make_rows(config, place), make_model(), traffic, current, 1, no_stock)
        decisions.append(np.ascontiguousarray(slots, dtype=np.int64).tobytes())
    assert len(set(decisions)) == 1


def test_a_full_disk_changes_no_decision(traffic: np.ndarray, current: np.ndarray, tmp_path: Path) -> None:
    """Only one rank writes: if its failure made it fall back, the ranks' maps would differ."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a folder")
    good = make_rows(GimbalConfig(mode="ep", gamma=0.0))
    bad = make_rows(GimbalConfig(mode="ep", gamma=0.0, traffic_dir=str(blocked)))
    expected = eplb_policy.decide(good, make_model(), traffic, current, 1, no_stock)
    assert np.array_equal(eplb_policy.decide(bad, make_model(), traffic, current, 1, no_stock), expected)
    assert eplb_policy._report_fuse.blown


@pytest.mark.parametrize(
    ("tokens", "tp_rank", "own"),
    [(6, 0, 3), (6, 1, 3), (5, 0, 3), (5, 1, 2), (1, 0, 1), (1, 1, 0), (0, 0, 0)],
)
def test_slices_of_a_group_add_up(tokens: int, tp_rank: int, own: int) -> None:
    place = RankPlace(0, SOURCES, RANKS, tp_rank, 2, sequence_parallel=True)
    assert place.own_tokens(tokens) == own


def test_repeated_tokens_are_kept_once() -> None:
    places = [RankPlace(0, SOURCES, RANKS, tp_rank, 2, sequence_parallel=False) for tp_rank in (0, 1)]
    assert [place.counts for place in places] == [True, False]
    assert [place.own_tokens(7) for place in places] == [7, 7]
