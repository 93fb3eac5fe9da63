"""Engine selection: affinity keys, the record of decisions, engines that are gone (SPEC section 6)."""

from __future__ import annotations

import json
import math

import pytest
from gimbal_runtime.affinity import AffinityMap, prefix_key
from gimbal_runtime.decision_log import DecisionLog, LoggedDecision
from gimbal_runtime.engine_select import Decision, EngineSelector, SelectConfig
from gimbal_runtime.trace import EngineTrace
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

Q = 8192


def trace(run: float = 0, kv: float = 0.0, moe: float = 0.0, ack: int = 0, time: float = 0.0) -> EngineTrace:
    return EngineTrace(run_prefill=run, wait_prefill=0, kv=kv, moe=moe, ack=ack, time=time)


def selector(*traces: EngineTrace | None, **arguments: object) -> EngineSelector:
    made = EngineSelector(len(traces), Q, **arguments)
    for engine, seen in enumerate(traces):
        if seen is not None:
            made.observe(engine, seen)
    return made


# --- affinity keys ---


def test_a_key_returns_to_its_engine_while_scores_are_close() -> None:
    made = selector(*[trace()] * 4)
    first = [made.select(10, now=0.0, affinity_key=f"session {i}").engine for i in range(4)]
    assert first == [0, 1, 2, 3]
    again = [made.select(10, now=0.0, affinity_key=f"session {i}").engine for i in (2, 0, 3, 2, 1)]
    assert again == [2, 0, 3, 2, 1]


def test_affinity_never_outweighs_a_clear_difference_in_load() -> None:
    made = selector(trace(), trace())
    assert made.select(400, now=0.0, affinity_key="s").engine == 0
    made.observe(0, trace(run=4_000, ack=1, time=0.1))
    assert made.select(0, now=0.1, affinity_key="s") == Decision(1, "score", 1)
    made.observe(0, trace(run=0, ack=1, time=0.2))
    assert made.select(0, now=0.2, affinity_key="s") == Decision(1, "affinity", 2)  # where its last turn went


def test_one_hot_key_cannot_lead_an_engine_by_more_than_the_margin() -> None:
    """All requests share a prefix and no trace arrives: the spread stays below close·Q plus one request."""
    made = selector(*[trace()] * 4)
    for _ in range(1_000):
        made.select(100, now=0.0, affinity_key="system prompt")
    sent = [made.compensation(engine) for engine in range(4)]
    assert max(sent) - min(sent) <= 0.05 * Q + 100
    assert min(sent) > 0


def test_an_explicit_engine_comes_before_the_key() -> None:
    made = selector(*[trace()] * 3)
    made.select(1, now=0.0, affinity_key="s")
    assert made.select(1, now=0.0, affinity=2, affinity_key="s").engine == 2
    assert made.select(1, now=0.0, affinity_key="s").engine == 2


def test_a_pinned_request_moves_its_key() -> None:
    made = selector(*[trace()] * 3)
    made.select(1, now=0.0, pinned=2, affinity_key="s")
    assert made.select(1, now=0.0, affinity_key="s").engine == 2


def test_the_map_is_bounded_and_forgets_the_least_recently_used() -> None:
    kept = AffinityMap(2)
    kept.put("a", 0)
    kept.put("b", 1)
    kept.put("a", 0)
    kept.put("c", 2)
    assert [kept.get(key) for key in "abc"] == [0, None, 2]
    made = selector(trace(), trace(), config=SelectConfig(affinity_keys=100))
    for key in range(10_000):
        made.select(0, now=0.0, affinity_key=key)
    assert len(made._affinity) == 100
    AffinityMap(0).put("a", 0)


def test_prefix_key() -> None:
    ids = list(range(300))
    assert prefix_key(ids) == prefix_key([*range(256), 7, 7, 7])
    assert prefix_key(ids) != prefix_key([9, *range(1, 300)])
    assert prefix_key(ids[:255]) is None
    assert prefix_key(ids[:16], tokens=16) == prefix_key(ids, tokens=16)
    with pytest.raises(ValueError, match="tokens: 0"):
        prefix_key(ids, tokens=0)


# --- the record of decisions ---


def test_decisions_are_kept_with_their_reasons_and_scores() -> None:
    made = selector(trace(run=8_192), trace(), None)
    made.select(5, now=1.0)
    made.observe(2, trace(run=4_096))
    made.select(6, now=2.0)
    made.select(7, now=3.0, pinned=0)
    ordered, scored, pinned = made.decisions.recent()
    assert (ordered.reason, ordered.time, list(ordered.scores)) == ("ordered_no_trace", 1.0, [])
    assert (scored.reason, scored.engine, scored.tokens) == ("score", 1, 6)
    assert scored.scores == pytest.approx((1.0 + 5 / Q, 0.0, 0.5))
    assert (pinned.reason, pinned.time, list(pinned.scores)) == ("pinned", None, [])
    assert made.decisions.counts == {"ordered_no_trace": 1, "score": 1, "pinned": 1}
    assert json.loads(json.dumps(scored.as_dict()))["scores"]["2"] == 0.5
    assert made.scores is not None  # of the last decision that computed any


def test_the_record_is_a_ring() -> None:
    log = DecisionLog(3)
    for seq in range(10):
        log.add(LoggedDecision(0.0, 0, "score", seq, 1))
    assert [entry.seq for entry in log.recent()] == [7, 8, 9]
    assert [entry.seq for entry in log.recent(2)] == [8, 9]
    assert log.recent(0) == []
    assert len(log) == 3
    assert log.counts == {"score": 10}


def test_scores_in_the_record_do_not_change_afterwards() -> None:
    made = selector(trace(), trace(run=9_000))
    made.select(1_000, now=0.0)
    made.select(1_000, now=0.0)
    first, second = made.decisions.recent()
    assert first.scores[0] == 0.0
    assert second.scores[0] == pytest.approx(1_000 / Q)


# --- engines that are gone ---


def test_a_removed_engine_is_never_chosen_and_leaves_nothing_behind() -> None:
    made = selector(*[trace()] * 3)
    sent = [made.select(100, now=0.0, affinity_key=f"s{i}") for i in range(6)]
    made.remove_engine(1)
    made.remove_engine(1)
    assert made.compensation(1) == 0
    assert made.live_engines == (0, 2)
    chosen = [made.select(0, now=0.0, affinity_key=f"s{i}").engine for i in range(6)]
    assert chosen[0::3] == [0, 0]
    assert chosen[2::3] == [2, 2]
    assert 1 not in chosen
    for decision in sent:
        made.release(decision.engine, decision.seq)
    assert [made.compensation(engine) for engine in range(3)] == [0, 0, 0]


def test_the_trace_of_a_removed_engine_is_ignored() -> None:
    made = selector(trace(run=500), trace())
    made.remove_engine(1)
    made.observe(1, trace(time=1.0))
    assert [made.select(0, now=0.0).engine for _ in range(3)] == [0, 0, 0]
    assert made.select(0, now=99.0).reason == "ordered_stale"


def test_a_removed_engine_that_was_full_or_hot_no_longer_counts() -> None:
    made = selector(trace(kv=1.0, moe=900.0), trace(kv=0.5, moe=3.0), trace(kv=0.5, moe=1.0))
    made.remove_engine(0)
    made.select(0, now=0.0)
    assert made.scores == pytest.approx((None, 1.0, 0.5))  # the mean of what is left is 2


def test_a_restored_engine_starts_without_a_trace_and_with_new_acks() -> None:
    made = selector(trace(ack=0), trace())
    old = made.select(100, now=0.0, pinned=0)
    made.observe(0, trace(ack=1, time=0.5))
    made.remove_engine(0)
    made.restore_engine(0)
    assert made.select(10, now=1.0).reason == "ordered_no_trace"
    new = made.select(70, now=1.0, pinned=0)
    assert new.seq > old.seq
    made.release(0, old.seq)
    before = made.compensation(0)
    made.observe(0, trace(ack=0, time=1.1))  # its successor has admitted nothing yet
    assert made.compensation(0) == before > 0
    made.observe(0, trace(ack=new.seq, time=1.2))
    assert made.compensation(0) == 0
    assert made.select(10, now=1.2).reason == "close"


def test_when_no_engine_is_left() -> None:
    made = selector(trace())
    made.remove_engine(0)
    with pytest.raises(ValueError, match="every engine has been removed"):
        made.select(1, now=0.0)
    with pytest.raises(ValueError, match="pinned: engine 0 has been removed"):
        made.select(1, now=0.0, pinned=0)
    with pytest.raises(ValueError, match="engine: 5"):
        made.remove_engine(5)
    with pytest.raises(ValueError, match="limit: -1"):
        AffinityMap(-1)
    with pytest.raises(ValueError, match="size: -1"):
        DecisionLog(-1)


def test_ordered_dispatch_skips_a_removed_engine() -> None:
    made = selector(*[None] * 4)
    made.remove_engine(2)
    assert [made.select(1, now=0.0).engine for _ in range(7)] == [0, 1, 3, 0, 1, 3, 0]
    assert made.compensation(2) == 0
    assert math.inf > made.compensation(0) > 0


# --- any mix of events ---


class AnyMix(RuleBasedStateMachine):
    """Sends, ends, late and repeated traces, engines lost and found again: what is remembered is what is owed."""

    ENGINES = 3

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.made = EngineSelector(self.ENGINES, Q, kv_capacity_tokens=50_000)
        self.open: list[tuple[Decision, int]] = []  # sent, neither ended nor acknowledged nor lost
        self.all: list[Decision] = []
        self.lost: set[int] = set()
        self.traces: list[tuple[int, EngineTrace]] = []
        self.heard = [-math.inf] * self.ENGINES
        self.acks = [0] * self.ENGINES

    @rule(
        tokens=st.integers(0, 3_000),
        key=st.integers(0, 4),
        step=st.sampled_from([0.0, 0.5, 6.0]),
        data=st.data(),
    )
    def send(self, tokens: int, key: int, step: float, data: st.DataObject) -> None:
        self.now += step
        live = [engine for engine in range(self.ENGINES) if engine not in self.lost]
        if not live:
            with pytest.raises(ValueError, match="every engine has been removed"):
                self.made.select(tokens, now=self.now, affinity_key=key)
            return
        pinned = data.draw(st.sampled_from([None, None, *live]))
        decision = self.made.select(tokens, now=self.now, pinned=pinned, affinity_key=key)
        assert decision.engine in live
        self.open.append((decision, tokens))
        self.all.append(decision)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finish, abort or error; also of a request that ended before."""
        decision = data.draw(st.sampled_from(self.all))
        self.made.release(decision.engine, decision.seq)
        self.open = [entry for entry in self.open if entry[0] is not decision]

    @rule(engine=st.integers(0, 2), ack=st.integers(0, 12), run=st.integers(0, 9_000))
    def report(self, engine: int, ack: int, run: int) -> None:
        self.now += 0.1
        sent = max((d.seq for d in self.all if d.engine == engine), default=0)
        seen = trace(run=run, ack=min(ack, sent), time=self.now)
        self.traces.append((engine, seen))
        self.deliver(engine, seen)

    @precondition(lambda self: self.traces)
    @rule(data=st.data())
    def repeat_an_old_report(self, data: st.DataObject) -> None:
        self.deliver(*data.draw(st.sampled_from(self.traces)))

    def deliver(self, engine: int, seen: EngineTrace) -> None:
        self.made.observe(engine, seen)
        out_of_order = seen.time < self.heard[engine] or seen.ack < self.acks[engine]
        if engine in self.lost or out_of_order:
            return
        self.heard[engine], self.acks[engine] = seen.time, seen.ack
        self.open = [e for e in self.open if e[0].engine != engine or e[0].seq > seen.ack]

    @rule(engine=st.integers(0, 2))
    def lose(self, engine: int) -> None:
        self.made.remove_engine(engine)
        self.lost.add(engine)
        self.heard[engine], self.acks[engine] = -math.inf, 0
        self.open = [entry for entry in self.open if entry[0].engine != engine]

    @rule(engine=st.integers(0, 2))
    def find(self, engine: int) -> None:
        self.made.restore_engine(engine)
        self.lost.discard(engine)

    @invariant()
    def compensation_is_what_is_open(self) -> None:
        for engine in range(self.ENGINES):
            owed = sum(tokens for decision, tokens in self.open if decision.engine == engine)
            assert self.made.compensation(engine) == owed

    def teardown(self) -> None:
        for decision in self.all:
            self.made.release(decision.engine, decision.seq)
        assert [self.made.compensation(engine) for engine in range(self.ENGINES)] == [0, 0, 0]


AnyMix.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyMix = AnyMix.TestCase
