"""Waiting for slots: what the queue's age limit and the score of engine choice make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from gimbal_runtime.age_limit import AutoAgeLimit
from gimbal_runtime.engine_select import EngineSelector, SelectConfig
from gimbal_runtime.request_queue import ShortestPrefillQueue
from gimbal_runtime.slot_wait import RequestSteps, TokenShare
from gimbal_runtime.trace import EngineTrace

Q = 512


@dataclass(eq=False)
class Prompt:
    prefill_tokens: int
    arrival_time: float
    name: str


# --- the share of waiting that is not for slots ---


def test_the_published_order_stands_until_slots_are_seen_to_be_short() -> None:
    share = TokenShare()
    assert share.value == 1.0
    for _ in range(50):
        share.observe(slots_short=False)
    assert share.value == 1.0


def test_the_share_follows_what_is_short() -> None:
    share = TokenShare(memory=0.5)
    seen = []
    for short in (True, True, False, True):
        share.observe(slots_short=short)
        seen.append(share.value)
    assert seen == [0.5, 0.25, 0.625, 0.3125]


def test_twenty_passes_are_remembered_by_default() -> None:
    share = TokenShare()
    for _ in range(20):
        share.observe(slots_short=True)
    assert share.value == pytest.approx(0.95**20)


@pytest.mark.parametrize("memory", [-0.1, 1.0, math.nan])
def test_a_memory_out_of_range_is_refused(memory: float) -> None:
    with pytest.raises(ValueError, match=r"memory: .*valid: at least 0 and below 1"):
        TokenShare(memory=memory)


def test_the_mean_is_plain_at_first_and_then_forgets() -> None:
    steps = RequestSteps(window=4)
    assert steps.mean == 0.0
    for tokens in (10, 20, 0, 30):  # 0: aborted before it started
        steps.observe(tokens)
    assert steps.mean == pytest.approx(20.0)
    for _ in range(40):
        steps.observe(100)
    assert steps.mean == pytest.approx(100.0, rel=0.01)


def test_a_window_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="window: 0; valid: an integer >= 1"):
        RequestSteps(window=0)


# --- the queue ---


def waiting(age_limit: float | str | AutoAgeLimit, now: float) -> ShortestPrefillQueue[Prompt]:
    queue = ShortestPrefillQueue[Prompt](age_limit=age_limit, clock=lambda: now)
    for prompt in (Prompt(900, 0.0, "long"), Prompt(300, 1.0, "middle"), Prompt(10, 2.0, "short")):
        queue.push(prompt)
    return queue


def names(queue: ShortestPrefillQueue[Prompt]) -> list[str]:
    return [prompt.name for prompt in queue]


def end_passes(queue: ShortestPrefillQueue[Prompt], count: int, *, slots_short: bool) -> None:
    for _ in range(count):
        queue.end_pass(slots_short=slots_short)


@pytest.mark.parametrize("age_limit", [5.0, "auto"])
def test_arrival_order_while_slots_are_short_and_size_when_tokens_are_again(age_limit: float | str) -> None:
    queue = waiting(age_limit, now=2.5)
    assert names(queue) == ["short", "middle", "long"]
    end_passes(queue, 150, slots_short=True)
    assert queue.age_limit < 0.01
    assert names(queue) == ["long", "middle", "short"]
    assert queue.peek().name == "long"
    end_passes(queue, 150, slots_short=False)
    assert queue.age_limit == pytest.approx(5.0, rel=0.01)
    assert names(queue) == ["short", "middle", "long"]


def test_in_between_only_the_oldest_have_come_of_age() -> None:
    queue = waiting(5.0, now=2.5)
    end_passes(queue, 18, slots_short=True)
    assert queue.age_limit == pytest.approx(5.0 * 0.95**18)  # 1.99 s: less than the long prompt has waited
    assert names(queue) == ["long", "short", "middle"]


def test_a_limit_that_grows_makes_young_again_but_nothing_that_has_waited_for_the_whole_of_it() -> None:
    now = [2.5]
    queue = ShortestPrefillQueue[Prompt](age_limit=5.0, clock=lambda: now[0])
    for prompt in (Prompt(900, 0.0, "long"), Prompt(10, 2.0, "short")):
        queue.push(prompt)
    end_passes(queue, 18, slots_short=True)
    assert queue.peek().name == "long"
    end_passes(queue, 200, slots_short=False)
    assert queue.peek().name == "short"
    now[0] = 5.01
    for short in (True, False):
        end_passes(queue, 200, slots_short=short)
        assert queue.peek().name == "long"


@pytest.mark.parametrize(
    "passes",
    [
        [(200, False)],
        [(200, True)],
        [(18, True), (200, False)],
        [(1, True), (1, False)],
        [(3, True), (60, False)],
    ],
)
def test_no_change_of_the_limit_delays_a_start_beyond_the_whole_of_it(passes: list[tuple[int, bool]]) -> None:
    """Twice as many short prompts as the server computes; between starts the limit shrinks and grows."""
    now = [0.0]
    queue = ShortestPrefillQueue[Prompt](age_limit=5.0, clock=lambda: now[0])
    long = Prompt(900, 0.0, "long")
    queue.push(long)
    while long in queue:
        for _ in range(2):
            queue.push(Prompt(10, now[0], "short"))
        for count, short in passes:
            end_passes(queue, count, slots_short=short)
            assert queue.peek().name == "long" or now[0] <= 5.0
        queue.pop()
        now[0] += 0.05
    assert now[0] <= 5.0 + 2 * 0.05


def test_off_stays_off() -> None:
    queue = waiting(math.inf, now=1e6)
    end_passes(queue, 10_000, slots_short=True)
    assert queue.age_limit == math.inf
    assert names(queue) == ["short", "middle", "long"]


# --- engine choice ---


def trace(requests: int, steps: float = 30.0, prefill: int = 0) -> EngineTrace:
    return EngineTrace(prefill, 0, 0.0, 0.0, 0, 0.0, requests=requests, request_steps=steps)


def scores(*traces: EngineTrace, slots: int | None = 16, clients: int = 1, **config: float) -> list[float]:
    made = EngineSelector(
        len(traces), Q, SelectConfig(**config), max_num_seqs=slots, clients=clients, kv_capacity_tokens=None
    )
    for engine, seen in enumerate(traces):
        made.observe(engine, seen)
    made.select(0, now=0.0)
    assert made.scores is not None
    return [score for score in made.scores if score is not None]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [(0, 0.0), (15, 0.0), (16, 1 / 16 * 30), (47, 2.0 * 30)],
)
def test_the_term_counts_steps_until_a_slot_is_free(requests: int, expected: float) -> None:
    assert scores(trace(requests), trace(0), w_slots=1.0) == pytest.approx([expected, 0.0])
    assert scores(trace(requests), trace(0)) == pytest.approx([expected / 2, 0.0])  # the default weight
    assert scores(trace(requests), trace(0), w_slots=0.0) == [0.0, 0.0]


def test_an_unknown_limit_or_length_means_no_term() -> None:
    assert scores(trace(500), trace(0), slots=None) == [0.0, 0.0]
    assert scores(trace(500, steps=0.0), trace(0, steps=0.0)) == [0.0, 0.0]


def test_the_length_of_a_request_is_the_mean_over_engines_that_know_it() -> None:
    assert scores(trace(16, steps=20.0), trace(16, steps=40.0), trace(16, steps=0.0)) == pytest.approx(
        [0.5 * 30 / 16] * 3
    )


def test_free_slots_win_over_fewer_tokens_where_slots_are_short() -> None:
    """Forty short prompts wait on engine 0, engine 1 has one long one: by tokens alone engine 0 would be taken."""
    full, long = trace(40, prefill=1_000), trace(1, prefill=3_000)
    made = EngineSelector(2, Q, max_num_seqs=16)
    blind = EngineSelector(2, Q)
    for engine, seen in enumerate((full, long)):
        made.observe(engine, seen)
        blind.observe(engine, seen)
    assert blind.select(10, now=0.0).engine == 0
    assert made.select(10, now=0.0).engine == 1


def test_requests_sent_since_the_trace_fill_slots_too() -> None:
    made = EngineSelector(2, Q, max_num_seqs=4)
    for engine in (0, 1):
        made.observe(engine, trace(0))
    seqs = [made.select(0, now=0.0, pinned=0).seq for _ in range(4)]
    assert made.select(0, now=0.0).engine == 1
    for seq in seqs:
        made.release(0, seq)
    made.select(0, now=0.0)
    assert made.scores == (0.0, 0.0)


def test_what_one_client_sent_counts_once_per_client() -> None:
    made = EngineSelector(2, Q, max_num_seqs=4, clients=3)
    for engine in (0, 1):
        made.observe(engine, trace(0))
    made.select(0, now=0.0, pinned=0)
    made.select(0, now=0.0, pinned=0)
    made.select(0, now=0.0)
    assert made.scores == pytest.approx((0.5 * (6 + 1 - 4) / 4 * 30, 0.0))


def test_engines_that_come_and_go_take_their_slots_along() -> None:
    made = EngineSelector(2, Q, max_num_seqs=4)
    made.observe(0, trace(9, steps=10.0))
    made.observe(1, trace(4, steps=50.0))
    made.remove_engine(0)
    made.select(0, now=0.0)
    assert made.scores == (None, pytest.approx(0.5 * 50 / 4))  # the other one's length has gone with it
    made.release(1, 1)
    made.observe(1, trace(0, steps=50.0))
    made.restore_engine(0)
    made.observe(0, trace(4, steps=0.0))
    made.select(0, now=0.0)
    assert made.scores == pytest.approx((0.5 * 50 / 4, 0.0))
    assert made.add_engine() == 2
    made.observe(2, trace(5, steps=10.0))
    made.select(0, now=0.0)
    assert made.scores is not None
    assert made.scores[2] == pytest.approx(0.5 * 2 / 4 * 30)


@pytest.mark.parametrize("steps", [math.nan, math.inf])
def test_a_trace_that_is_not_finite_changes_nothing(steps: float) -> None:
    made = EngineSelector(1, Q, max_num_seqs=1)
    made.observe(0, trace(1))
    made.observe(0, trace(9, steps=steps))
    made.select(0, now=0.0)
    assert made.scores == (15.0,)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs: 0; valid: an integer >= 1"):
        EngineSelector(1, Q, max_num_seqs=0)
    with pytest.raises(ValueError, match=r"w_slots: -1\.0; valid: a finite number >= 0"):
        SelectConfig(w_slots=-1.0)
