"""Engine choices of other systems: each against its source's formula, by hand."""

from __future__ import annotations

import pytest
from gimbal_runtime.baselines import (
    BalanceRoute,
    BalanceRouteAhead,
    CountedTrace,
    EngineChooser,
    Lmetric,
    RoundRobin,
    ShortestKvQueue,
    StockVllm,
)

POLICIES = [RoundRobin, StockVllm, ShortestKvQueue, Lmetric, BalanceRoute, BalanceRouteAhead]


def trace(
    waiting: int = 0, running: int = 0, kv: float = 0.0, prefill: int = 0, ack: int = 0, time: float = 0.0
) -> CountedTrace:
    return CountedTrace(0, prefill, kv, 0.0, ack, time, waiting=waiting, running=running)


def seeing(policy: EngineChooser, *traces: CountedTrace) -> EngineChooser:
    for engine, seen in enumerate(traces):
        policy.observe(engine, seen)
    return policy


def picks(policy: EngineChooser, count: int, tokens: int = 100) -> list[int]:
    return [policy.select(tokens, now=0.0).engine for _ in range(count)]


@pytest.mark.parametrize("kind", POLICIES)
def test_equal_engines_take_turns(kind: type[EngineChooser]) -> None:
    policy = seeing(kind(4, kv_capacity_tokens=100_000), *[trace()] * 4)
    assert sorted(picks(policy, 4)) == [0, 1, 2, 3]
    chosen = picks(policy, 396)
    assert all(abs(chosen.count(engine) - 99) <= 1 for engine in range(4))


@pytest.mark.parametrize("kind", POLICIES)
def test_without_traces_engines_take_turns_from_the_first(kind: type[EngineChooser]) -> None:
    assert picks(kind(3, first=1), 6) == [1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("kind", POLICIES)
def test_pins_are_obeyed_and_numbered(kind: type[EngineChooser]) -> None:
    policy = seeing(kind(2, kv_capacity_tokens=1_000), trace(), trace())
    decisions = [policy.select(5, now=0.0, pinned=1) for _ in range(2)]
    assert [(d.engine, d.reason, d.seq) for d in decisions] == [(1, "pinned", 1), (1, "pinned", 2)]
    for decision in decisions:
        policy.release(1, decision.seq)
    assert policy._sent.tokens == [0, 0]


# --- vLLM ---


def test_stock_takes_in_flight_or_snapshot_whichever_is_more() -> None:
    policy = seeing(StockVllm(2), trace(running=3), trace(running=1))
    # Engine 1 leads until it has 3: 1+1 and 2+1 by its own waiting count.
    assert picks(policy, 2) == [1, 1]
    # 3 against 3: a tie goes to the start, which has moved by two.
    assert picks(policy, 1) == [0]


def test_stock_ignores_what_its_snapshot_erased_but_for_requests_in_flight() -> None:
    policy = seeing(StockVllm(2), trace(), trace(running=4))
    assert picks(policy, 3) == [0, 0, 0]
    seeing(policy, trace(time=1.0), trace(running=3, time=1.0))  # older than the three sends
    # In flight 3 against 3 running: the start is at engine 1.
    assert picks(policy, 1) == [1]


def test_stock_weighs_waiting_by_kv_use_above_a_half() -> None:
    # 4 + 6·2·0.25 = 7 against 6 + 6·6·0 = 6.
    assert picks(seeing(StockVllm(2), trace(2, 2, 0.75), trace(6, 0, 0.50)), 1) == [1]
    # Row 48 of the public reports: with nothing waiting, 0.92 ties 0.08.
    assert picks(seeing(StockVllm(2), trace(0, 30, 0.92), trace(0, 30, 0.08)), 1) == [0]


def test_stock_scales_in_flight_by_the_number_of_clients() -> None:
    one, four = StockVllm(2), StockVllm(2, clients=4)
    for policy in (one, four):
        seeing(policy, trace(), trace(running=3))
        policy.select(1, now=0.0, pinned=0)
    assert picks(one, 1) == [0]
    assert picks(four, 1) == [1]


# --- by tokens ---


def test_shortest_kv_queue() -> None:
    policy = seeing(ShortestKvQueue(2, kv_capacity_tokens=1_000), trace(9, 9, kv=0.2), trace(kv=0.5))
    assert picks(policy, 4, tokens=100) == [0, 0, 0, 1]  # 200, 300, 400, then 500 ties: next in order


def test_what_was_sent_counts_until_a_trace_includes_it() -> None:
    policy = seeing(ShortestKvQueue(2, kv_capacity_tokens=1_000), trace(), trace(kv=0.15))
    assert picks(policy, 2, tokens=100) == [0, 0]
    policy.observe(0, trace(ack=0, time=1.0))  # late: includes neither
    assert picks(policy, 1) == [1]
    policy.observe(0, trace(ack=2, kv=0.0, time=2.0))  # both have ended
    assert picks(policy, 1) == [0]
    policy.observe(0, trace(ack=0, kv=0.9, time=0.5))  # out of order: ignored
    assert picks(policy, 1) == [0]


def test_lmetric_multiplies() -> None:
    # (1,000 + 500)·2 = 3,000 against (0 + 500)·5 = 2,500.
    assert picks(seeing(Lmetric(2), trace(1, 1, prefill=1_000), trace(0, 5)), 1, tokens=500) == [1]
    # (1,000 + 100)·2 = 2,200 against (0 + 100)·25 = 2,500.
    assert picks(seeing(Lmetric(2), trace(1, 1, prefill=1_000), trace(0, 25)), 1, tokens=100) == [0]
    assert picks(seeing(Lmetric(3), trace(0, 9), trace(), trace()), 3, tokens=100) == [1, 2, 1]


def test_balance_route_fills_margins_and_spares_the_most_loaded() -> None:
    policy = seeing(BalanceRoute(3, kv_capacity_tokens=1_000), trace(kv=1.0), trace(kv=0.7), trace(kv=0.2))
    # 300 tokens fit engine 1's margin and engine 2's: equal F, so the least loaded.
    assert picks(policy, 1, tokens=300) == [2]
    # Nothing fits 900 tokens: least overflow, engine 2 (500 + 900 - 1,000).
    assert picks(policy, 1, tokens=900) == [2]


def test_balance_route_by_its_formula() -> None:
    policy = BalanceRoute(4)
    assert policy._score(100, 300) == 100
    assert policy._score(100, 40) == 100 - 4 * 60


def test_balance_route_ahead_sees_what_ends_soon() -> None:
    ahead = BalanceRouteAhead(
        2,
        kv_capacity_tokens=1_000,
        horizon=2,
        releases=lambda engine: [0.0, 500.0, 500.0] if engine == 0 else [0.0] * 3,
    )
    traces = (trace(0, 1, kv=0.6), trace(0, 1, kv=0.5))
    assert picks(seeing(BalanceRoute(2, kv_capacity_tokens=1_000), *traces), 1) == [1]
    assert picks(seeing(ahead, *traces), 1) == [0]


def test_a_horizon_of_zero_is_balance_route() -> None:
    traces = [trace(1, g % 3, kv=0.1 * ((g * 7) % 5)) for g in range(6)]
    plain = seeing(BalanceRoute(6, kv_capacity_tokens=10_000), *traces)
    ahead = seeing(BalanceRouteAhead(6, kv_capacity_tokens=10_000, horizon=0), *traces)
    sizes = [300, 2_000, 50, 700, 4_000, 10, 900] * 5
    assert [plain.select(s, now=0.0) for s in sizes] == [ahead.select(s, now=0.0) for s in sizes]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RoundRobin(0), "num_engines: 0"),
        (lambda: RoundRobin(2, first=2), "first: 2"),
        (lambda: RoundRobin(2, kv_capacity_tokens=0), "kv_capacity_tokens: 0"),
        (lambda: StockVllm(2, clients=0), "clients: 0"),
        (lambda: BalanceRouteAhead(2, horizon=-1), "horizon: -1"),
        (lambda: BalanceRouteAhead(2, discount=0.0), "discount: 0.0"),
        (lambda: RoundRobin(2).select(-1, now=0.0), "tokens: -1"),
        (lambda: RoundRobin(2).select(1, now=0.0, pinned=2), "pinned: 2"),
        (lambda: RoundRobin(2).observe(2, trace()), "engine: 2"),
        (lambda: RoundRobin(2).release(-1, 1), "engine: -1"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
