"""The placement policy's own logic, without a server: what it decides, what it reports, what may fail."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gimbal_runtime.balancer import Balancer, Decision
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.vllm import eplb_policy, placement_state
from gimbal_runtime.vllm.guard import Fuse
from gimbal_runtime.vllm.rank_place import (
    RankPlace,
    reason_not_to_count,
    reason_not_to_count_model,
    reason_not_to_read_loads,
)
from gimbal_runtime.vllm.source_rows import SourceRows

LAYERS, SOURCES, EXPERTS, RANKS = 2, 2, 8, 4
STOCK = np.tile(np.arange(EXPERTS)[::-1], (LAYERS, 1))


def make_rows(config: GimbalConfig, rank: int = 0) -> SourceRows:
    """Source rows as they are on one rank, without process groups; one model whose window is closed."""
    place = RankPlace(rank // 2, SOURCES, RANKS, rank % 2, 2)
    rows = SourceRows(SimpleNamespace(model_states={}), config, place, None)
    rows.joint = True
    return rows


def make_traffic() -> np.ndarray:
    """Source 0 picks the experts that live far from it, source 1 likewise."""
    picks = np.ones((LAYERS, SOURCES, EXPERTS), dtype=np.int64)
    picks[:, 0, 4:] = 100
    picks[:, 1, :4] = 100
    return picks


def add_model(rows: SourceRows, traffic: np.ndarray) -> Any:
    """A model with a closed window; two tensors an expert: 3 x 4 and 5 float32, 68 bytes."""
    weights = [[torch.zeros(2, 3, 4), torch.zeros(2, 5)]]
    layer = SimpleNamespace(moe_config=SimpleNamespace(hidden_dim=4, in_dtype=torch.bfloat16))
    vllm_model = SimpleNamespace(expert_weights=weights, moe_layers=[layer])
    state = SimpleNamespace(model=vllm_model, communicator=None)
    window = SimpleNamespace(counts=torch.zeros(traffic.shape))
    model = SimpleNamespace(state=state, window=window, closed=deque(), reads_loads=True)
    close(model, traffic)
    rows._models[str(len(rows._models))] = model
    return model


def close(model: Any, traffic: np.ndarray) -> None:
    """Another window of the model is closed."""
    model.closed.append(SimpleNamespace(wait=lambda: torch.from_numpy(traffic)))


def current_slots() -> np.ndarray:
    return np.tile(np.arange(EXPERTS), (LAYERS, 1))


def balancer_of(rows: SourceRows, model: Any, num_slots: int = EXPERTS) -> Balancer:
    return placement_state.state_of(rows).balancer(rows, model, num_slots, nodes=1)


def decide(rows: SourceRows, traffic: np.ndarray, current: np.ndarray) -> Any:
    """What a fresh balancer comes to after two such windows: the second one confirms the skew."""
    balancer = balancer_of(rows, add_model(rows, traffic), current.shape[1])
    eplb_policy.decide(rows, balancer, traffic, current)
    return eplb_policy.decide(rows, balancer, traffic, current)


@pytest.fixture(autouse=True)
def fresh_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eplb_policy, "_report_fuse", Fuse("placement-report"))
    monkeypatch.setattr(eplb_policy, "_fuse", Fuse("eplb-policy"))


def test_experts_move_to_the_source_that_picks_them() -> None:
    decision = decide(make_rows(GimbalConfig(mode="ep", gamma=0.0)), make_traffic(), current_slots())
    assert all(set(row[:4]) == {4, 5, 6, 7} for row in decision.slots.tolist())


def test_vllm_decides_when_only_observing_and_where_the_method_has_no_use_for_spare_slots() -> None:
    assert decide(make_rows(GimbalConfig(mode="off", observe=True)), make_traffic(), current_slots()) is None
    with_spare = np.tile(np.arange(12) % EXPERTS, (LAYERS, 1))
    for method in ("paper", "greedy"):
        rows = make_rows(GimbalConfig(mode="ep", method=method))
        assert decide(rows, make_traffic(), with_spare) is None
    placed = decide(make_rows(GimbalConfig(mode="ep")), make_traffic(), with_spare)
    assert placed.reason == "placed"


def test_every_rank_decides_the_same() -> None:
    config = GimbalConfig(mode="full", gamma=0.1)
    decisions = [decide(make_rows(config, rank), make_traffic(), current_slots()) for rank in range(RANKS)]
    assert len({decision.slots.tobytes() for decision in decisions}) == 1


def run_rank(rank: int, folder: Path, scenario: str, results: Any) -> None:
    """One of two ranks asks the policy; rank 1 is the odd one out."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    config = GimbalConfig(mode="ep", method="paper", gamma=0.0)
    rows = make_rows(config, rank=2 * rank)
    model = add_model(rows, make_traffic())
    if rank == 1 and scenario == "fails":
        eplb_policy.decide = lambda *_: 1 / 0  # type: ignore[assignment]
    if rank == 1 and scenario == "cannot count":
        rows.fuse.blown = True
    if rank == 1 and scenario == "differs":
        eplb_policy.decide = lambda *_: Decision(np.roll(STOCK, 1, axis=1), "placed")  # type: ignore[assignment]
    if rank == 1 and scenario == "remembers more":
        eplb_policy.decide(rows, balancer_of(rows, model), make_traffic(), current_slots())
    if rank == 1 and scenario == "disk full":
        (folder / "file").write_text("in the way of a folder")
        object.__setattr__(config, "traffic_dir", str(folder / "file"))
    shape = (LAYERS, EXPERTS)
    slots = eplb_policy.rebalance(rows, shape, current_slots(), 1, lambda: STOCK, dist.group.WORLD)
    # Two windows later ranks that can go on are of one mind again: all have forgotten what they did not share.
    for _ in range(2):
        close(model, make_traffic())
        later = eplb_policy.rebalance(rows, shape, current_slots(), 1, lambda: STOCK, dist.group.WORLD)
    results.put((rank, np.asarray(slots).tolist(), np.asarray(later).tolist(), rows.totals))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("scenario", "is_ours", "recovers"),
    [
        ("well", True, True),
        ("disk full", True, True),
        ("fails", False, False),
        ("cannot count", False, False),
        ("differs", False, False),
        ("remembers more", False, True),
    ],
)
def test_ranks_end_up_with_one_map(tmp_path: Path, scenario: str, is_ours: bool, recovers: bool) -> None:
    """If one rank fell back on its own, the maps would differ and tokens go to the wrong experts."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path, scenario, results)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    answers = [results.get(timeout=60) for _ in ranks]
    slots = {rank: answer for rank, answer, _, _ in answers}
    later = {rank: answer for rank, _, answer, _ in answers}
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert slots[0] == slots[1]
    assert later[0] == later[1]
    assert (slots[0] != STOCK.tolist()) == is_ours
    assert (later[0] != STOCK.tolist()) == recovers
    if scenario in ("fails", "cannot count"):  # a window that lacks one rank's picks is told to nobody
        assert all(totals == {} for _, _, _, totals in answers)


def test_report_counts_moves_and_bytes(tmp_path: Path) -> None:
    rows = make_rows(GimbalConfig(mode="ep", traffic_dir=str(tmp_path)))
    traffic, current = make_traffic(), current_slots()
    model = add_model(rows, traffic)
    balancer = balancer_of(rows, model)
    placement_state.report(
        rows, model, balancer, traffic=traffic, current=current, slots=STOCK, decision=None
    )
    assert rows.totals["experts_moved"] == LAYERS * EXPERTS
    assert rows.totals["bytes_moved"] == LAYERS * EXPERTS * 68
    assert rows.totals["remote_pick_share"] == pytest.approx(100 / 101)
    assert rows.totals["picks"] == traffic.sum()
    [saved] = tmp_path.glob("window-*.npz")
    assert np.array_equal(np.load(saved)["slots"], STOCK)


def test_a_drafter_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eplb_policy, "vote", lambda digest, well, group: (digest is not None, well))
    rows = make_rows(GimbalConfig(mode="ep"))
    add_model(rows, make_traffic())
    draft = np.ones((1, SOURCES, EXPERTS), dtype=np.int64)
    add_model(rows, draft)
    for traffic, current in ((make_traffic(), current_slots()), (draft, current_slots()[:1])):
        shape = (traffic.shape[0], EXPERTS)
        eplb_policy.rebalance(rows, shape, current, 1, lambda current=current: current, None)
    assert rows.totals["rearrangements"] == 1
    assert rows.totals["picks"] == make_traffic().sum()


def rebalance(rows: SourceRows, current: np.ndarray) -> Any:
    shape = (current.shape[0], EXPERTS)
    return eplb_policy.rebalance(rows, shape, current, 1, lambda: STOCK, None)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eplb_policy, "vote", lambda digest, well, group: (digest is not None and well, well))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("bandwidth", "horizon", "skipped"), [(1, 1e-6, 1), (1, 10, 0), (None, 1e-6, 0)])
def test_what_does_not_pay_is_counted_and_the_slots_stay(
    bandwidth: float | None, horizon: float, skipped: int
) -> None:
    settings = {"bandwidth": bandwidth, "horizon": horizon, "pick_time": 1e-6}
    rows = make_rows(GimbalConfig(mode="ep", method="portfolio", gamma=0.0, **settings))
    model = add_model(rows, make_traffic())
    rebalance(rows, current_slots())
    close(model, make_traffic())
    slots = rebalance(rows, current_slots())
    assert (slots == current_slots()).all() == bool(skipped)
    assert rows.totals["rearrangements_skipped"] == skipped
    assert rows.totals["rearrangements"] == 2
    assert rows.totals["break_even_known"] == (bandwidth is not None)
    assert ("seconds_saved" in rows.totals) == (bandwidth is not None)
    assert rows.totals["skew_kept"] == 1.0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("rank", "proves"), [(0, True), (1, False)])
def test_the_first_rank_proves_how_good_the_slots_are(rank: int, proves: bool) -> None:
    rows = make_rows(GimbalConfig(mode="ep", method="portfolio"), rank=rank)
    model = add_model(rows, make_traffic())
    rebalance(rows, current_slots())
    close(model, make_traffic())
    rebalance(rows, current_slots())
    deadline = time.monotonic() + (10.0 if proves else 0.5)
    while "placement_gap" not in rows.totals and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ("placement_gap" in rows.totals) == proves
    assert 0.0 <= rows.totals.get("placement_gap", 0.0) < 0.1


@pytest.mark.usefixtures("one_rank")
def test_a_drafter_of_the_same_shape_has_a_memory_of_its_own() -> None:
    rows = make_rows(GimbalConfig(mode="ep", method="portfolio", gamma=0.0))
    other = make_traffic()[:, ::-1].copy()
    models = [add_model(rows, make_traffic()), add_model(rows, other)]
    for _ in range(2):
        slots = [rebalance(rows, current_slots()) for _ in models]
        close(models[0], make_traffic())
        close(models[1], other)
    assert all(set(row[:4]) == {4, 5, 6, 7} for row in slots[0].tolist())
    assert (slots[1] == current_slots()).all()  # its experts live where they are picked
    assert [balancer_of(rows, model).rho for model in models] == [1.0, 1.0]


@pytest.mark.usefixtures("one_rank")
def test_other_slots_start_another_memory() -> None:
    rows = make_rows(GimbalConfig(mode="ep", method="eplb"))
    model = add_model(rows, make_traffic())
    rebalance(rows, current_slots())
    first = balancer_of(rows, model)
    assert balancer_of(rows, model) is first
    assert balancer_of(rows, model, EXPERTS + RANKS) is not first


@pytest.mark.parametrize(
    ("tokens", "rows", "own"),
    [
        (50, 16, [16, 16, 16, 2]),  # 50 tokens, padded to 64, in four slices
        (6, 2, [2, 2, 2, 0]),
        (0, 4, [0, 0, 0, 0]),
        (64, 16, [16, 16, 16, 16]),
    ],
)
def test_padding_of_the_last_slices_is_no_token(tokens: int, rows: int, own: list[int]) -> None:
    places = [RankPlace(0, 1, 4, tp_rank, 4) for tp_rank in range(4)]
    assert [int(place.unpadded_rows(torch.tensor(tokens), rows)) for place in places] == own


def test_repeated_tokens_are_kept_once_and_slices_add_up() -> None:
    places = [RankPlace(0, SOURCES, RANKS, tp_rank, 2) for tp_rank in (0, 1)]
    assert [place.counts(sequence_parallel=False) for place in places] == [True, False]
    assert [place.counts(sequence_parallel=True) for place in places] == [True, True]


def test_layouts_that_cannot_be_counted_are_named() -> None:
    usual = {"enable_elastic_ep": False, "prefill_context_parallel_size": 1}
    assert reason_not_to_count(SimpleNamespace(**usual)) is None
    assert "elastic" in str(reason_not_to_count(SimpleNamespace(**usual | {"enable_elastic_ep": True})))
    assert "context" in str(
        reason_not_to_count(SimpleNamespace(**usual | {"prefill_context_parallel_size": 2}))
    )

    def model(monolithic: bool, gathers: bool) -> Any:
        layer = SimpleNamespace(is_monolithic=monolithic, do_naive_dispatch_combine=gathers, moe_config=None)
        return SimpleNamespace(moe_layers=[layer])

    assert reason_not_to_count_model(model(False, False)) is None
    assert "fused kernel" in str(reason_not_to_count_model(model(True, False)))
    assert reason_not_to_count_model(model(False, True)) is None
    assert reason_not_to_read_loads(model(False, False)) is None
    assert "gathered" in str(reason_not_to_read_loads(model(False, True)))
    own_kernel = SimpleNamespace(moe_layers=[torch.nn.Linear(1, 1)])
    assert "MoE runner" in str(reason_not_to_count_model(own_kernel))
