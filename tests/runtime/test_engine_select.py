"""Engine selection (SPEC section 6): public reports, bursts, order, KV cache use, MoE pressure, bad input."""

from __future__ import annotations

import math

import pytest
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.engine_select import Decision, EngineSelector, SelectConfig
from gimbal_runtime.trace import EngineTrace

Q = 8192


def trace(
    run: float = 0, wait: float = 0, kv: float = 0.0, moe: float = 0.0, ack: int = 0, time: float = 0.0
) -> EngineTrace:
    return EngineTrace(run_prefill=run, wait_prefill=wait, kv=kv, moe=moe, ack=ack, time=time)


def selector(*traces: EngineTrace | None, **arguments: object) -> EngineSelector:
    made = EngineSelector(len(traces), Q, **arguments)
    for engine, seen in enumerate(traces):
        if seen is not None:
            made.observe(engine, seen)
    return made


def picks(made: EngineSelector, count: int, tokens: int = 100, now: float = 0.0) -> list[int]:
    return [made.select(tokens, now=now).engine for _ in range(count)]


# --- public reports ---


def test_row_47_long_contexts_are_not_piled_on_one_engine() -> None:
    """Requests 27/5/0/0: what the 27 long contexts show is KV cache use, their prefill is done."""
    made = selector(trace(kv=0.81), trace(kv=0.15), trace(), trace())
    assert 0 not in picks(made, 10, tokens=1000)


def test_row_48_kv_use_counts_with_nothing_waiting() -> None:
    made = selector(trace(kv=0.92), trace(kv=0.08))
    assert made.select(100, now=0.0) == Decision(1, "kv_saturated", 1)
    below_saturation = selector(trace(kv=0.80), trace(kv=0.08))
    assert below_saturation.select(100, now=0.0) == Decision(1, "score", 1)


def test_row_50_remaining_tokens_count_not_requests() -> None:
    """One request of 10,000 tokens against two of 1,000."""
    for first, second in [(trace(run=10_000), trace(run=2_000)), (trace(wait=10_000), trace(1_000, 1_000))]:
        assert selector(first, second).select(100, now=0.0).engine == 1


def test_row_51_a_full_engine_is_never_chosen_while_another_has_room() -> None:
    # Engine 1 looks worse by every other figure; 0.895 leaves a gap below 0.10 for 0.99 but 1.0 is full.
    made = selector(trace(kv=1.0), trace(run=90_000, kv=0.895, moe=9.0))
    assert picks(made, 50, tokens=5_000) == [1] * 50
    full_as_the_rest = selector(trace(kv=1.0), trace(run=90_000, kv=0.95))
    assert full_as_the_rest.select(1, now=0.0).engine == 0


def test_row_51_engines_that_are_all_full_are_all_candidates() -> None:
    assert sorted(picks(selector(trace(kv=1.0), trace(kv=0.999)), 2)) == [0, 1]


def test_row_53_a_snapshot_older_than_the_sends_erases_nothing() -> None:
    made = selector(trace(), trace())
    for _ in range(5):
        made.select(300, now=0.0, pinned=0)
    made.observe(0, trace(ack=0, time=0.1))
    assert made.compensation(0) == 5 * 300
    made.observe(0, trace(ack=3, run=900, time=0.2))
    assert made.compensation(0) == 2 * 300
    assert made.select(300, now=0.2).engine == 1


def test_row_53_a_trace_out_of_order_neither_erases_nor_resurrects() -> None:
    made = selector(trace())
    for _ in range(5):
        made.select(300, now=0.0, pinned=0)
    made.observe(0, trace(ack=3, run=900, time=1.0))
    # By ack, by time, and by both: older each time, whatever it says.
    for late in (trace(ack=2, time=1.5), trace(ack=5, time=0.5), trace(ack=1, time=0.5)):
        made.observe(0, late)
        assert made.compensation(0) == 2 * 300
        made.select(0, now=1.0)
        assert made.scores == pytest.approx(((900 + 600) / Q,))


def test_row_55_equal_scores_rotate_over_all_engines() -> None:
    assert picks(selector(*[trace()] * 8), 80, tokens=100) == list(range(8)) * 10
    assert picks(selector(*[trace(run=50_000, kv=0.5, moe=3.0)] * 8), 80, tokens=100) == list(range(8)) * 10


def test_row_57_nothing_is_left_after_finish_abort_and_error() -> None:
    made = selector(*[trace()] * 3)
    sent = [made.select(tokens, now=0.0) for tokens in range(1, 61)]
    made.observe(1, trace(ack=7, time=0.1))
    for decision in sent:
        made.release(decision.engine, decision.seq)
        made.release(decision.engine, decision.seq)  # an abort that crosses a finish
    assert [made.compensation(engine) for engine in range(3)] == [0, 0, 0]


def test_a_finished_request_no_longer_weighs_on_the_next_choice() -> None:
    for capacity in (None, 10_000):
        made = selector(trace(), trace(run=2_000), kv_capacity_tokens=capacity)
        sent = made.select(9_500, now=0.0)
        assert sent.engine == 0
        made.release(0, sent.seq)
        assert made.select(100, now=0.0) == Decision(0, "score", 2)


# --- bursts ---


@pytest.mark.parametrize("tokens", [0, 1, 100, 1_000, 9_000])
@pytest.mark.parametrize("capacity", [None, 20_000])
@pytest.mark.parametrize("known", [True, False])
def test_a_burst_of_800_splits_evenly_over_4_engines(tokens: int, capacity: int | None, known: bool) -> None:
    """No trace arrives during the burst: compensation and the order alone spread it."""
    made = selector(*[trace() if known else None] * 4, kv_capacity_tokens=capacity)
    chosen = picks(made, 800, tokens=tokens)
    assert all(abs(chosen.count(engine) - 200) <= 1 for engine in range(4))


def test_a_burst_spreads_by_tokens_over_unequal_engines() -> None:
    made = selector(trace(run=40_000), trace(), trace(), trace())
    chosen = picks(made, 100, tokens=400)
    # 40,000 tokens sent and 40,000 there already: 20,000 each in the end.
    assert chosen.count(0) == 0
    assert all(30 <= chosen.count(engine) <= 37 for engine in (1, 2, 3))


# --- ordered dispatch, staleness ---


def test_an_engine_without_a_trace_means_ordered_dispatch() -> None:
    made = selector(trace(run=99_999), None, trace())
    decisions = [made.select(10, now=0.0) for _ in range(6)]
    assert [decision.engine for decision in decisions] == [0, 1, 2, 0, 1, 2]
    assert {decision.reason for decision in decisions} == {"ordered_no_trace"}
    assert made.scores is None
    made.observe(1, trace())
    assert made.select(10, now=0.0).reason == "close"


def test_a_stale_engine_means_ordered_dispatch_until_it_is_heard_again() -> None:
    made = selector(trace(run=99_999, time=10.0), trace(time=10.0))
    assert made.select(10, now=15.0) == Decision(1, "score", 1)  # exactly 5 s: not stale yet
    made.observe(1, trace(time=15.1))
    assert made.select(10, now=15.1) == Decision(0, "ordered_stale", 1)
    assert made.select(10, now=15.1) == Decision(1, "ordered_stale", 2)
    made.observe(0, trace(run=99_999, time=15.1))
    assert made.select(10, now=15.1) == Decision(1, "score", 3)


def test_a_full_engine_is_left_out_of_ordered_dispatch_too() -> None:
    made = selector(trace(kv=1.0), trace(kv=0.2), None)
    assert picks(made, 4) == [1, 2, 1, 2]


def test_an_engine_without_a_trace_is_no_room() -> None:
    """Its KV cache use is unknown, so it is no reason to leave out a full engine."""
    assert picks(selector(trace(kv=1.0), None), 4) == [0, 1, 0, 1]


# --- order ---


def test_scores_exactly_at_the_margin_are_close() -> None:
    config = SelectConfig(close=0.125)  # 1,024 of 8,192 tokens: exact in binary
    assert selector(trace(run=1), trace(run=1_025), config=config).select(0, now=0.0).reason == "close"
    assert selector(trace(run=1), trace(run=1_026), config=config).select(0, now=0.0).reason == "score"


def test_the_order_goes_on_behind_the_engine_chosen_last() -> None:
    made = selector(trace(), trace(), trace(run=4_000), trace())
    assert picks(made, 2, tokens=0) == [0, 1]
    assert picks(made, 3, tokens=0) == [3, 0, 1]
    made.observe(3, trace(run=9_000, time=1.0))
    made.observe(0, trace(run=9_000, time=1.0))
    made.observe(1, trace(run=9_000, time=1.0))
    assert made.select(0, now=1.0) == Decision(2, "score", 1)
    made.observe(2, trace(run=9_000, time=1.0))
    assert picks(made, 2, tokens=0, now=1.0) == [3, 0]  # a choice by score turns the ring as well


def test_pinned_requests_do_not_turn_the_ring() -> None:
    made = selector(*[trace()] * 4)
    chosen = []
    for _ in range(8):
        assert made.select(0, now=0.0, pinned=0).reason == "pinned"
        chosen.append(made.select(0, now=0.0).engine)
    assert chosen == [0, 1, 2, 3] * 2


def test_clients_may_start_at_different_engines() -> None:
    assert picks(selector(*[None] * 4, first=2), 5) == [2, 3, 0, 1, 2]


def test_with_several_clients_what_one_sends_stands_for_all() -> None:
    made = selector(trace(), trace(run=1_500), clients=4, kv_capacity_tokens=100_000)
    assert made.select(500, now=0.0).engine == 0
    assert made.compensation(0) == 500
    assert (
        made.select(500, now=0.0).engine == 1
    )  # 2,000 on engine 0 by now, three quarters from other clients
    assert made.scores == pytest.approx((2_000 / Q + 0.02, 1_500 / Q))
    made.observe(0, trace(run=700, ack=1, time=0.1))  # they have sent less
    assert made.select(500, now=0.1).engine == 0


def test_affinity_is_followed_among_close_scores_only() -> None:
    made = selector(trace(), trace(run=300), trace(run=9_000))
    assert made.select(0, now=0.0, affinity=1) == Decision(1, "affinity", 1)
    assert made.select(0, now=0.0, affinity=2) == Decision(0, "close", 1)
    assert made.select(0, now=0.0, affinity=1) == Decision(1, "affinity", 2)
    assert made.select(0, now=0.0).engine == 1  # behind engine 0: following an affinity did not turn the ring
    far = selector(trace(), trace(run=9_000))
    assert far.select(0, now=0.0, affinity=1) == Decision(0, "score", 1)


def test_a_pinned_request_is_numbered_and_compensated() -> None:
    made = selector(trace(kv=1.0), trace())
    assert made.select(500, now=99.0, pinned=0) == Decision(0, "pinned", 1)
    assert made.select(500, now=99.0, pinned=0) == Decision(0, "pinned", 2)
    assert made.compensation(0) == 1_000
    made.observe(0, trace(ack=2, time=99.0))
    assert made.compensation(0) == 0


# --- KV cache use ---


def test_the_veto_needs_both_saturation_and_a_gap() -> None:
    assert selector(trace(kv=0.91), trace(run=50_000, kv=0.80)).select(1, now=0.0).reason == "kv_saturated"
    assert selector(trace(kv=0.91), trace(run=50_000, kv=0.82)).select(1, now=0.0) == Decision(0, "score", 1)
    assert selector(trace(kv=0.90), trace(run=50_000, kv=0.10)).select(1, now=0.0) == Decision(0, "score", 1)


def test_the_veto_takes_the_lowest_use_and_ties_go_in_order() -> None:
    made = selector(trace(kv=0.3), trace(kv=0.95), trace(kv=0.2), trace(kv=0.2))
    assert picks(made, 4) == [2, 3, 2, 3]


def test_compensation_counts_as_kv_use_when_the_capacity_is_known() -> None:
    traces = (trace(kv=0.85), trace(kv=0.70, run=50_000))
    with_capacity = selector(*traces, kv_capacity_tokens=10_000)
    assert with_capacity.select(1_000, now=0.0) == Decision(0, "score", 1)
    # kv' of engine 0 is 0.95 now, although no trace says so yet.
    assert with_capacity.select(1_000, now=0.0) == Decision(1, "kv_saturated", 1)
    without = selector(*traces)
    assert [without.select(1_000, now=0.0).reason for _ in range(2)] == ["score", "score"]


# --- MoE pressure ---


def test_moe_pressure_above_the_mean_costs_and_below_earns_nothing() -> None:
    made = selector(trace(moe=3.0), trace(moe=1.0), trace(moe=2.0))
    assert picks(made, 4, tokens=0) == [1, 2, 1, 2]
    assert made.scores == pytest.approx((0.5, 0.0, 0.0))


def test_without_moe_weight_there_is_no_feedback() -> None:
    made = selector(trace(moe=900.0), trace(moe=1.0), config=SelectConfig(w_moe=0.0))
    assert picks(made, 4, tokens=0) == [0, 1, 0, 1]
    assert made.scores == (0.0, 0.0)


@pytest.mark.parametrize(("mode", "weight"), [("dp", 0.0), ("uncoordinated", 0.0), ("full", 1.0)])
def test_modes_without_feedback_have_no_moe_weight(mode: str, weight: float) -> None:
    config = GimbalConfig(mode=mode, w_slots=0.25, close=0.2, kv_gap=0.3)
    expected = SelectConfig(w_moe=weight, w_slots=0.25, close=0.2, kv_gap=0.3)
    assert SelectConfig.from_config(config) == expected
    assert SelectConfig.from_config(GimbalConfig(mode="full")) == SelectConfig()


# --- bad input ---


@pytest.mark.parametrize(
    "field", ["run_prefill", "wait_prefill", "kv", "moe", "time", "requests", "request_steps"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_trace_that_is_not_finite_is_no_trace(field: str, value: float) -> None:
    figures = {"run_prefill": 0.0, "wait_prefill": 0.0, "kv": 0.0, "moe": 1.0, "ack": 1, "time": 1.0}
    made = selector(trace(kv=0.5), trace(kv=0.5))
    made.select(700, now=0.0, pinned=0)
    made.observe(0, EngineTrace(**{**figures, field: value}))
    assert made.compensation(0) == 700
    assert made.select(0, now=1.0) == Decision(1, "score", 1)
    assert made.scores == pytest.approx((0.5 + 700 / Q, 0.5))


def test_an_ack_beyond_anything_sent_drops_nothing() -> None:
    made = selector(trace())
    made.select(700, now=0.0)
    made.observe(0, trace(run=50, ack=9, time=1.0))
    assert made.compensation(0) == 700
    made.observe(0, trace(run=50, ack=1, time=2.0))
    assert made.compensation(0) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: EngineSelector(0, Q), "num_engines: 0"),
        (lambda: EngineSelector(2, 0), "token_budget: 0"),
        (lambda: EngineSelector(2, Q, clients=0), "clients: 0"),
        (lambda: EngineSelector(2, Q, kv_capacity_tokens=0), "kv_capacity_tokens: 0"),
        (lambda: EngineSelector(2, Q, first=2), "first: 2; valid: 0 to 1"),
        (lambda: selector(trace()).select(-1, now=0.0), "tokens: -1"),
        (lambda: selector(trace()).select(math.nan, now=0.0), "tokens: nan"),
        (lambda: selector(trace()).select(1, now=0.0, pinned=1), "pinned: 1; valid: 0 to 0"),
        (lambda: selector(trace()).select(1, now=0.0, affinity=-1), "affinity: -1"),
        (lambda: selector(trace()).observe(-1, trace()), "engine: -1"),
        (lambda: selector(trace()).release(1, 1), "engine: 1"),
        (lambda: SelectConfig(close=math.nan), "close: nan"),
        (lambda: SelectConfig(w_kv=-1.0), "w_kv: -1.0"),
        (lambda: SelectConfig(kv_full=0.8), "kv_full: 0.8"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
