"""Engine selection against a direct transcription of Algorithm 1, and compensation as a state machine."""

from __future__ import annotations

import pytest
from gimbal_runtime.engine_select import REASONS, EngineSelector
from gimbal_runtime.trace import EngineTrace
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

Q = 8192


def trace(
    run: float = 0,
    wait: float = 0,
    kv: float = 0.0,
    moe: float = 0.0,
    ack: int = 0,
    time: float = 0.0,
    requests: int = 0,
    steps: float = 0.0,
) -> EngineTrace:
    return EngineTrace(run, wait, kv, moe, ack, time, requests=requests, request_steps=steps)


# --- the whole algorithm against a direct transcription ---


def expected_decision(
    traces: list[EngineTrace | None],
    sent: list[list[int]],
    capacity: int | None,
    slots: int | None,
    position: int,
    now: float,
) -> tuple[int, str, list[float | None] | None]:
    """Algorithm 1 as written, with none of the selector's bookkeeping: engine, reason, scores."""
    count = len(traces)
    room = [seen is not None and seen.kv < 0.90 for seen in traces]
    members = [
        engine
        for engine, seen in enumerate(traces)
        if not (seen is not None and seen.kv >= 0.995 and any(room[:engine] + room[engine + 1 :]))
    ]

    def following(group: list[int]) -> int:
        return min(group, key=lambda engine: (engine - position) % count)

    known = {engine: traces[engine] for engine in members}
    if any(seen is None for seen in known.values()):
        return following(members), "ordered_no_trace", None
    if any(now - seen.time > 5.0 for seen in known.values()):
        return following(members), "ordered_stale", None
    kv = {
        engine: seen.kv + (sum(sent[engine]) / capacity if capacity else 0) for engine, seen in known.items()
    }
    if max(kv.values()) > 0.90 and max(kv.values()) - min(kv.values()) > 0.10:
        return (
            following([engine for engine in members if kv[engine] == min(kv.values())]),
            "kv_saturated",
            None,
        )
    mean = sum(seen.moe for seen in traces) / count
    steps = [seen.request_steps for seen in traces if seen.request_steps]
    held = sum(steps) / len(steps) if steps else 0.0

    def slot_wait(engine: int) -> float:
        if slots is None:
            return 0.0
        return max(0, known[engine].requests + len(sent[engine]) + 1 - slots) / slots * held

    scores = {
        engine: (seen.run_prefill + seen.wait_prefill + sum(sent[engine])) / Q
        + kv[engine]
        + 0.5 * slot_wait(engine)
        + (max(0.0, seen.moe / mean - 1) if mean else 0.0)
        for engine, seen in known.items()
    }
    close = [engine for engine in members if scores[engine] - min(scores.values()) <= 0.05]
    reason = "score" if len(close) == 1 else "close"
    return following(close), reason, [scores.get(engine) for engine in range(count)]


TRACES = st.one_of(
    st.none(),
    st.builds(
        trace,
        run=st.sampled_from([0, 100, 400, 410, 2_000, 50_000]),
        wait=st.sampled_from([0, 10, 3_000]),
        kv=st.sampled_from([0.0, 0.5, 0.79, 0.8, 0.85, 0.899, 0.9, 0.92, 0.994, 0.995, 1.0]),
        moe=st.sampled_from([0.0, 1.0, 1.04, 7.5, 1e6]),
        time=st.sampled_from([0.0, 4.0, 5.0, 9.9]),
        requests=st.sampled_from([0, 3, 4, 5, 40]),
        steps=st.sampled_from([0.0, 2.0, 30.0]),
    ),
)
KNOWN = TRACES.filter(lambda seen: seen is not None and seen.time > 4.0)


@settings(max_examples=300, deadline=None)
@given(
    traces=st.one_of(st.lists(KNOWN, min_size=1, max_size=6), st.lists(TRACES, min_size=1, max_size=6)),
    requests=st.lists(
        st.tuples(st.sampled_from([0, 60, 500, 4_000]), st.booleans()), min_size=1, max_size=12
    ),
    capacity=st.sampled_from([None, 8_000, 100_000]),
    slots=st.sampled_from([None, 1, 4, 64]),
)
def test_every_decision_is_the_one_of_the_algorithm(
    traces: list[EngineTrace | None],
    requests: list[tuple[int, bool]],
    capacity: int | None,
    slots: int | None,
) -> None:
    made = EngineSelector(len(traces), Q, kv_capacity_tokens=capacity, max_num_seqs=slots)
    for engine, seen in enumerate(traces):
        if seen is not None:
            made.observe(engine, seen)
    sent: list[list[int]] = [[] for _ in traces]
    position, scores = 0, None
    for size, finishes in requests:
        engine, reason, computed = expected_decision(traces, sent, capacity, slots, position, now=10.0)
        scores = computed if computed is not None else scores
        decision = made.select(size, now=10.0)
        assert (decision.engine, decision.reason) == (engine, reason)
        assert decision.reason in REASONS
        assert made.scores == (None if scores is None else pytest.approx(tuple(scores), nan_ok=False))
        if finishes:
            made.release(engine, decision.seq)
        else:
            sent[engine].append(size)
        position = engine + 1
    assert [sum(sizes) for sizes in sent] == [made.compensation(engine) for engine in range(len(traces))]


# --- compensation as a state machine ---


class Compensation(RuleBasedStateMachine):
    """An engine's queue modelled by sets of requests; the selector has to agree with it after every step."""

    ENGINES = 3

    def __init__(self) -> None:
        super().__init__()
        self.made = EngineSelector(self.ENGINES, Q, kv_capacity_tokens=50_000)
        self.now = 0.0
        self.open: list[tuple[int, int]] = []  # not finished: (engine, seq)
        self.unseen: dict[tuple[int, int], int] = {}  # in no trace and not finished -> tokens
        self.sent = [0] * self.ENGINES
        self.acks = [0] * self.ENGINES
        self.old: list[tuple[int, EngineTrace]] = []

    @rule(tokens=st.integers(0, 20_000), pinned=st.one_of(st.none(), st.integers(0, ENGINES - 1)))
    def select(self, tokens: int, pinned: int | None) -> None:
        decision = self.made.select(tokens, now=self.now, pinned=pinned)
        self.sent[decision.engine] += 1
        assert decision.seq == self.sent[decision.engine]
        self.open.append((decision.engine, decision.seq))
        self.unseen[decision.engine, decision.seq] = tokens

    @rule(engine=st.integers(0, ENGINES - 1), share=st.floats(0, 1), kv=st.floats(0, 1), step=st.floats(0, 3))
    def observe(self, engine: int, share: float, kv: float, step: float) -> None:
        self.now += step
        behind = self.acks[engine]
        ack = behind + round(share * (self.sent[engine] - behind))
        seen = trace(run=100, kv=kv, moe=kv, ack=ack, time=self.now)
        self.made.observe(engine, seen)
        self.old.append((engine, seen))
        self.acks[engine] = ack
        self.unseen = {key: n for key, n in self.unseen.items() if key[0] != engine or key[1] > ack}

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def observe_a_late_copy(self, data: st.DataObject) -> None:
        engine, seen = data.draw(st.sampled_from(self.old))
        self.made.observe(engine, seen)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        key = data.draw(st.sampled_from(self.open))
        self.open.remove(key)
        self.unseen.pop(key, None)
        for _ in range(1 + twice):
            self.made.release(*key)

    @rule(engine=st.integers(0, ENGINES - 1), beyond=st.integers(1, 5))
    def release_what_was_never_sent(self, engine: int, beyond: int) -> None:
        self.made.release(engine, self.sent[engine] + beyond)

    @invariant()
    def compensation_is_what_no_trace_includes(self) -> None:
        for engine in range(self.ENGINES):
            expected = sum(n for (where, _), n in self.unseen.items() if where == engine)
            assert self.made.compensation(engine) == expected

    def teardown(self) -> None:
        for key in self.open:
            self.made.release(*key)
        assert [self.made.compensation(engine) for engine in range(self.ENGINES)] == [0] * self.ENGINES


Compensation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCompensation = Compensation.TestCase
