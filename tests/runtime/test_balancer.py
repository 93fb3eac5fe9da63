"""The placement loop of one model, window by window: what it remembers, when it moves, when it stands still."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gimbal_runtime import balancer as module
from gimbal_runtime.balancer import HISTORY, Balancer, ExpertBytes
from gimbal_runtime.config import GimbalConfig

from gimbal_kernels.placement import CALIBRATED, PlacementProblem, Weights, evaluate, shrink
from gimbal_kernels.topology import Topology

LAYERS, SOURCES, EXPERTS, RANKS = 2, 2, 8, 4
BYTES = ExpertBytes(per_expert=1000, per_pick=10)


def make(spare: int = 0, **settings: Any) -> Balancer:
    config = GimbalConfig(**({"mode": "ep", "method": "portfolio"} | settings))
    return Balancer(config, Topology.grid(gpus_per_node=RANKS, sources=SOURCES), 2 + spare, BYTES)


def current() -> np.ndarray:
    return np.tile(np.arange(EXPERTS), (LAYERS, 1))


def skewed(picks: int = 100) -> np.ndarray:
    """Source 0 picks the experts that live far from it, source 1 likewise."""
    traffic = np.full((LAYERS, SOURCES, EXPERTS), picks // 100)
    traffic[:, 0, 4:] = picks
    traffic[:, 1, :4] = picks
    return traffic


def uneven(scale: int = 1) -> np.ndarray:
    """No skew between sources; the two experts of rank 0 have most of the load."""
    loads = np.array([40, 40, 5, 5, 5, 5, 5, 5]) * scale
    return np.tile(loads, (LAYERS, SOURCES, 1))


def test_skew_is_followed_once_a_second_window_confirms_it() -> None:
    balancer = make(gamma=0.0)
    first = balancer.decide(skewed(), current())
    assert balancer.rho == 0.0
    assert (first.slots == current()).all()  # every expert is picked equally often: nothing else to gain
    second = balancer.decide(skewed(), first.slots)
    assert balancer.rho == 1.0
    assert second.reason == "placed"
    assert all(set(row[:4]) == {4, 5, 6, 7} for row in second.slots.tolist())


def test_skew_of_chance_is_not_followed() -> None:
    balancer = make(gamma=0.001)
    noise = np.random.default_rng(5)
    rho = []
    slots = np.tile(np.arange(EXPERTS), (40, 1))
    for _ in range(6):
        decision = balancer.decide(noise.poisson(30, (40, SOURCES, EXPERTS)), slots)
        rho.append(balancer.rho)
        assert decision.problem is not None
        claimed = evaluate(decision.problem, decision.slots).comm.mean()
        assert claimed > 0.46  # 0.5 is what any placement has when all sources look alike
    assert max(rho[2:]) < 0.4


def test_one_window_that_agrees_by_chance_confirms_nothing_after_many_that_did_not() -> None:
    """Few topics, dealt out anew in every window: few directions of skew, which often agree for a window."""
    balancer, memory_of_one = make(gamma=0.001), None
    draw = np.random.default_rng(7)
    topics = draw.dirichlet(np.full(EXPERTS, 0.3), 3)
    rho, alone = [], []
    for _ in range(40):
        mixes = draw.dirichlet(np.full(3, 2.0), SOURCES)
        traffic = draw.poisson(2000 * mixes @ topics, (LAYERS, SOURCES, EXPERTS))
        balancer.decide(traffic, current())
        _, memory_of_one = shrink(traffic, memory_of_one)
        rho.append(balancer.rho)
        alone.append(memory_of_one.rho)
    assert max(alone[10:]) == 1.0
    assert max(rho[10:]) < 0.5


def test_loads_are_balanced_in_the_first_window() -> None:
    decision = make(gamma=0.0).decide(uneven(), current())
    problem = PlacementProblem(uneven(), Topology.grid(gpus_per_node=RANKS, sources=SOURCES), 2)
    assert decision.reason == "placed"
    assert (
        evaluate(problem, decision.slots).max_over_mean < evaluate(problem, current()).max_over_mean
    ).all()


def test_a_window_without_picks_changes_nothing_and_is_not_remembered() -> None:
    balancer, other = make(gamma=0.0), make(gamma=0.0)
    for b in (balancer, other):
        b.decide(skewed(), current())
    empty = balancer.decide(np.zeros_like(skewed()), current())
    assert (empty.reason, empty.problem) == ("no traffic", None)
    assert (empty.slots == current()).all()
    assert balancer.rho == 0.0
    assert (balancer.decide(skewed(), current()).slots == other.decide(skewed(), current()).slots).all()


def test_a_window_of_a_few_picks_is_no_reason_to_move() -> None:
    balancer = make(gamma=0.0)
    balancer.decide(skewed(1000), current())
    little = balancer.decide(uneven()[:, :, ::-1] // 5, current())
    assert little.reason == "little traffic"
    assert (little.slots == current()).all()
    for _ in range(HISTORY):  # less traffic for good is the new measure
        last = balancer.decide(uneven(), current())
    assert last.reason == "placed"


def test_a_layer_without_traffic_stays_and_does_not_raise_the_price_of_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = capture(monkeypatch)
    traffic = uneven(100)
    make().decide(traffic, current())
    half = traffic.copy()
    half[1] = 0
    decision = make().decide(half, current())
    assert (decision.slots[1] == current()[1]).all()
    assert problems[0].weights == problems[1].weights


def capture(monkeypatch: pytest.MonkeyPatch) -> list[PlacementProblem]:
    """The problems that are solved from here on."""
    seen: list[PlacementProblem] = []
    stock = module.place

    def place(problem: PlacementProblem, **kwargs: Any) -> Any:
        seen.append(problem)
        return stock(problem, **kwargs)

    monkeypatch.setattr(module, "place", place)
    return seen


def test_a_move_is_priced_by_the_experts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = capture(monkeypatch)
    traffic = uneven(100)
    make(horizon=5.0).decide(traffic, current())
    mean_load = traffic[0].sum() / EXPERTS
    assert problems[0].weights == Weights(1.0, 4.0, 1000 / 10 / (mean_load * 5.0))
    make(horizon=5.0, beta=2.0, gamma=0.25).decide(traffic, current())
    assert problems[1].weights == Weights(1.0, 2.0, 0.25)


def test_the_papers_method_keeps_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = capture(monkeypatch)
    decision = make(method="paper", beta=0.5).decide(uneven(100), current())
    assert problems[0].weights == Weights(CALIBRATED.alpha, 0.5, CALIBRATED.gamma)
    assert decision.problem is not None
    assert decision.problem.weights is not None
    assert decision.problem.weights.beta == 4.0  # its gap is proven in the objective's own


def test_history_is_six_windows_the_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = capture(monkeypatch)
    balancer = make()
    for i in range(9):
        balancer.decide(uneven(10 + i), current())
    assert [len(problem.history) for problem in problems] == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert [int(window[0, 0]) for window in problems[-1].history] == [80 * (10 + i) for i in range(7, 1, -1)]


def test_drift_is_that_of_the_windows_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = capture(monkeypatch)
    balancer = make()
    balancer.decide(uneven(100), current())
    assert balancer.drift == 0.0
    balancer.decide(uneven(200), current())  # twice the picks, the same shares
    assert balancer.drift == 0.0
    balancer.decide(uneven(100)[:, :, ::-1], current())
    assert balancer.drift > 0.3
    assert [problem.drift > 0 for problem in problems] == [False, False, True]


def test_moves_are_capped() -> None:
    free = make(gamma=0.0).decide(uneven(), current())
    capped = make(gamma=0.0, max_moves=1).decide(uneven(), current())
    assert free.moved > LAYERS >= capped.moved
    assert make(gamma=0.0, max_moves=0).decide(uneven(), current()).reason == "unchanged"


def test_even_load_with_noise_moves_nothing() -> None:
    """Public report: rebalancing what is balanced costs more than it gains."""
    noise = np.random.default_rng(0)
    balancer = make()
    for _ in range(5):
        traffic = np.rint(1000 * (1 + 0.01 * noise.standard_normal((LAYERS, SOURCES, EXPERTS)))).astype(int)
        decision = balancer.decide(traffic, current())
        assert (decision.reason, decision.moved) == ("unchanged", 0)


def test_spare_slots_serve_hot_experts_where_they_are_picked() -> None:
    """Both sources pick the same two experts; one slot more a rank, two ranks a source."""
    balancer = make(spare=1)
    slots = np.tile([0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5], (LAYERS, 1))
    traffic = uneven(100)
    decision = balancer.decide(traffic, slots)
    assert decision.reason == "placed"
    for row in decision.slots.reshape(LAYERS, RANKS, 3).tolist():
        assert all(len(set(rank)) == 3 for rank in row)  # never two copies on a rank
        for source in (row[:2], row[2:]):
            assert {0, 1} <= {expert for rank in source for expert in rank}
    before, after = balancer.measure(traffic, slots), balancer.measure(traffic, decision.slots)
    assert after.remote_pick_share < 0.6 * before.remote_pick_share


def costs(bandwidth: float, **settings: Any) -> dict[str, Any]:
    """A rank's link in GB/s, and a millisecond per pick."""
    return {"gamma": 0.0, "bandwidth": bandwidth, "pick_time": 1000.0, "horizon": 2.0} | settings


def test_what_does_not_pay_for_its_bytes_is_not_done() -> None:
    fast = make(**costs(1.0)).decide(uneven(), current())
    assert fast.reason == "placed"
    assert fast.verdict is not None
    assert fast.verdict.pays
    slow = make(**costs(1e-9)).decide(uneven(), current())
    assert slow.reason == "does not pay"
    assert slow.verdict is not None
    assert slow.verdict.saved < slow.verdict.price
    assert (slow.slots == current()).all()
    assert slow.moved == fast.moved > 0
    assert (make(**costs(1e-9, overlap=0.9999999999)).decide(uneven(), current()).slots == fast.slots).all()


def test_both_sides_of_the_rule_by_hand() -> None:
    decision = make(**costs(1e-3, margin=0.5)).decide(uneven(), current())
    assert decision.verdict is not None
    problem = PlacementProblem(uneven(), Topology.grid(gpus_per_node=RANKS, sources=SOURCES), 2)
    old, new = evaluate(problem, current()), evaluate(problem, decision.slots)
    picks = uneven()[0].sum()
    seconds = ((old.max_over_mean - new.max_over_mean) * picks / RANKS * 1e-3).sum()
    seconds += ((old.comm - new.comm) * picks * 10 / RANKS / 1e6).sum()
    assert decision.verdict.saved == pytest.approx(2.0 * float(seconds))
    moves = [set(a.tolist()) ^ set(b.tolist()) for a, b in pairs(current(), decision.slots)]
    assert decision.moved == sum(map(len, moves)) / 2
    assert 1e3 / 1e6 * 1.5 <= decision.verdict.price <= decision.moved * 1e3 / 1e6 * 1.5


def pairs(old: np.ndarray, new: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each rank of each layer held and holds."""
    return list(zip(old.reshape(-1, 2), new.reshape(-1, 2), strict=True))


@pytest.mark.parametrize("missing", ["bandwidth", "pick_time"])
def test_an_unknown_input_switches_the_rule_off(missing: str) -> None:
    balancer = make(**costs(1e-9) | {missing: None})
    decision = balancer.decide(uneven(), current())
    assert balancer.costs.unknown == ("seconds_per_pick" if missing == "pick_time" else missing,)
    assert (decision.reason, decision.verdict) == ("placed", None)


def test_the_same_windows_give_the_same_bytes() -> None:
    generator = np.random.default_rng(3)
    windows = generator.gamma(0.5, 200, (6, LAYERS, SOURCES, EXPERTS)).astype(np.int64)
    one, two = make(horizon=1000.0), make(horizon=1000.0)
    slots = current()
    for window in windows:
        found = one.decide(window, slots)
        assert found.slots.tobytes() == two.decide(window, slots).slots.tobytes()
        assert one.lineage == two.lineage
        slots = found.slots


def test_who_has_seen_other_windows_has_another_lineage_until_all_forget() -> None:
    one, two = make(gamma=0.0), make(gamma=0.0)
    one.decide(skewed(), current())
    for balancer in (one, two):
        balancer.decide(uneven(), current())
    assert one.lineage != two.lineage
    for balancer in (one, two):
        balancer.forget()
    fresh = make(gamma=0.0).decide(skewed(), current())
    for balancer in (one, two):
        assert (balancer.rho, balancer.drift) == (0.0, 0.0)
        assert balancer.decide(skewed(), current()).slots.tobytes() == fresh.slots.tobytes()
    assert one.lineage == two.lineage


def test_figures_of_a_window_depend_on_who_serves() -> None:
    topology = Topology.grid(gpus_per_node=2, sources=2)
    balancer = Balancer(GimbalConfig(mode="ep"), topology, 2, BYTES)
    traffic = np.array([[[10, 20, 0], [10, 0, 40]]])
    slots = np.array([[0, 1, 0, 2]])
    nearest = balancer.measure(traffic, slots)
    assert (nearest.remote_pick_share, nearest.picks) == (0.0, 80)
    assert nearest.max_over_mean == pytest.approx(50 / 40)
    halves = np.array([[[0.5, 1, 0.5, 1]] * 2])
    assert balancer.measure(traffic, slots, halves).remote_pick_share == pytest.approx(10 / 80)
    assert balancer.measure(np.zeros_like(traffic), slots).max_over_mean == 1.0
