"""The queue: automatic age limit, priorities, and the wait bound under adversarial streams (SPEC section 7)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from gimbal_runtime.age_limit import MIN_WAITS, AutoAgeLimit
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.request_queue import ShortestPrefillQueue
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass(eq=False)
class Prompt:
    prefill_tokens: int
    arrival_time: float = 0.0
    priority: int = 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- the automatic limit ---


def test_the_paper_constant_until_enough_waits_were_seen() -> None:
    limit = AutoAgeLimit()
    for _ in range(MIN_WAITS - 1):
        limit.observe(20.0)
    assert limit.value == 5.0
    limit.observe(20.0)
    assert limit.value == 20.0


def test_it_is_a_multiple_of_the_quantile_of_the_last_waits() -> None:
    limit = AutoAgeLimit(quantile=0.9, factor=2.0, window=100, low=0.0, high=1_000.0)
    for wait in range(1, 301):
        limit.observe(float(wait))
    assert limit.value == 2.0 * 290  # of 201..300: 90 of them are at most 290
    for _ in range(100):
        limit.observe(3.0)
    assert limit.value == 6.0


def test_it_stays_within_its_bounds() -> None:
    limit = AutoAgeLimit(low=2.0, high=30.0)
    for _ in range(100):
        limit.observe(0.001)
    assert limit.value == 2.0
    for _ in range(1_000):
        limit.observe(1e9)
    limit.observe(math.nan)
    limit.observe(math.inf)
    assert limit.value == 30.0


def test_the_queue_shows_it_the_wait_of_each_request_once() -> None:
    clock = Clock()
    limit = AutoAgeLimit(low=0.0, factor=1.0, quantile=1.0)
    queue = ShortestPrefillQueue[Prompt](age_limit=limit, clock=clock)
    prompts = [Prompt(10, float(i)) for i in range(MIN_WAITS)]
    for prompt in prompts:
        queue.push(prompt)
    clock.now = 50.0
    removed = prompts[0]
    queue.remove(removed)  # aborted: it was not served after its wait
    first = queue.pop()
    queue.push_front(first)
    clock.now = 500.0
    assert queue.pop() is first  # resumed: its wait was counted before
    while queue:
        clock.now = 60.0
        queue.pop()
    assert limit.value == 5.0  # one short of MIN_WAITS
    queue.push(Prompt(1, 60.0))
    queue.pop()
    assert limit.value == 60.0 - 2.0


def test_auto_lets_shortest_first_work_where_waits_are_long() -> None:
    """Waits of about 15 s on an overloaded engine: with a fixed 5 s the order of service is that of arrival."""
    means = {}
    for name, limit in [("fixed", 5.0), ("auto", "auto"), ("arrival", 0.0)]:
        clock, draw = Clock(), random.Random(7)
        queue = ShortestPrefillQueue[Prompt](age_limit=limit, clock=clock)
        arrivals = [i / 11.0 for i in range(1_500)]  # 10 % more than can be served
        waits, at = [], 0
        while at < len(arrivals) or queue:
            while at < len(arrivals) and arrivals[at] <= clock.now:
                queue.push(Prompt(draw.choice([20, 20, 20, 340]), arrivals[at]))
                at += 1
            if not queue:
                clock.now = arrivals[at]
                continue
            prompt = queue.pop()
            waits.append(clock.now - prompt.arrival_time)
            clock.now += prompt.prefill_tokens / 1_000
        means[name] = sum(waits) / len(waits)
    assert means["auto"] < 0.8 * means["fixed"]
    assert means["fixed"] < 1.05 * means["arrival"]


def test_the_setting_takes_auto() -> None:
    assert GimbalConfig(age_limit="auto").age_limit == "auto"
    config = GimbalConfig.from_sources(None, {"GIMBAL_AGE_LIMIT": "auto"})
    assert ShortestPrefillQueue[Prompt](age_limit=config.age_limit, clock=Clock()).age_limit == 5.0
    with pytest.raises(ValueError, match="age_limit: 'soon'"):
        GimbalConfig(age_limit="soon")
    with pytest.raises(ValueError, match="w_kv"):
        GimbalConfig(w_kv="auto")


# --- the wait bound ---


@settings(max_examples=60, deadline=None)
@given(data=st.data(), limit=st.sampled_from([0.0, 1.0, 4.0, "auto"]))
def test_no_stream_delays_a_request_beyond_the_bound(data: st.DataObject, limit: float | str) -> None:
    """A server of 1,000 tokens/s; arrivals, sizes, lateness, preemptions and what is short are the adversary's.

    From its coming of age a request waits for the work in service, older waiting work, and work resumed.
    """
    auto = AutoAgeLimit(low=0.5, high=6.0, window=32)
    clock = Clock()
    queue = ShortestPrefillQueue[Prompt](age_limit=auto if limit == "auto" else limit, clock=clock)
    largest = 6.0 if limit == "auto" else float(limit)
    count = data.draw(st.integers(1, 60))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.4]), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.sampled_from([10, 50, 400, 3_000]), min_size=count, max_size=count))
    preempted = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    passes = data.draw(
        st.lists(st.tuples(st.booleans(), st.sampled_from([0, 1, 80])), min_size=1, max_size=9)
    )
    prompts, at = [], 0.0
    for gap, size in zip(gaps, sizes, strict=True):
        at += gap
        prompts.append(Prompt(size, at))
    started: dict[int, float] = {}
    resumed_work, pushed, busy = 0.0, 0, []
    while len(started) < count:
        while pushed < count and prompts[pushed].arrival_time <= clock.now:
            queue.push(prompts[pushed])
            pushed += 1
        if not queue:
            clock.now = prompts[pushed].arrival_time
            continue
        short, times = passes[len(busy) % len(passes)]
        for _ in range(times):
            queue.end_pass(slots_short=short)
        prompt = queue.pop()
        first = id(prompt) not in started
        started.setdefault(id(prompt), clock.now)
        busy.append((clock.now, clock.now + prompt.prefill_tokens / 1_000))
        clock.now += prompt.prefill_tokens / 1_000
        if first and prompts.index(prompt) in preempted:
            queue.push_front(prompt)
            resumed_work += prompt.prefill_tokens / 1_000
    for prompt in prompts:
        of_age = prompt.arrival_time + largest
        older = [p for p in prompts if p.arrival_time <= prompt.arrival_time and p is not prompt]
        waiting = sum(p.prefill_tokens for p in older if started[id(p)] >= of_age) / 1_000
        in_service = max((end - of_age for begin, end in busy if begin <= of_age < end), default=0.0)
        assert started[id(prompt)] <= of_age + in_service + waiting + resumed_work + 1e-6


# --- priorities ---


def test_priorities_come_before_age_and_size() -> None:
    clock = Clock()
    queue = ShortestPrefillQueue[Prompt](clock=clock, priorities=True)
    old_low, small_low = Prompt(900, 0.0, priority=5), Prompt(1, 9.0, priority=5)
    big_high, small_high = Prompt(800, 8.0, priority=-1), Prompt(10, 9.5, priority=-1)
    preempted_low = Prompt(7, 0.0, priority=5)
    for prompt in (old_low, small_low, big_high, small_high):
        queue.push(prompt)
    queue.push_front(preempted_low)
    clock.now = 10.0
    expected = [small_high, big_high, preempted_low, old_low, small_low]
    assert list(queue) == expected
    assert [queue.pop() for _ in range(5)] == expected
    assert not queue._levels
    assert not queue._present


def test_priorities_are_ignored_unless_asked_for() -> None:
    clock = Clock()
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    queue.push(Prompt(10, priority=-9))
    queue.push(Prompt(1, priority=9))
    assert queue.pop().prefill_tokens == 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_priorities_against_a_sorted_list(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    queue = ShortestPrefillQueue[Prompt](clock=clock, priorities=True)
    waiting: list[Prompt] = []
    for _ in range(200):
        clock.now += draw.random() * 0.2
        action = draw.random()
        if action < 0.6 or not waiting:
            prompt = Prompt(draw.randrange(100), clock.now, draw.randrange(4))
            queue.push(prompt)
            waiting.append(prompt)
        elif action < 0.7:
            gone = draw.choice(waiting)
            queue.remove(gone)
            waiting.remove(gone)
        else:
            limit = clock.now - 5.0
            best = min(
                waiting,
                key=lambda p: (
                    (p.priority, (0, p.arrival_time, 0))
                    if p.arrival_time < limit
                    else (p.priority, (1, p.prefill_tokens, p.arrival_time))
                ),
            )
            assert queue.pop() is best
            waiting.remove(best)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AutoAgeLimit(quantile=0.0), "quantile: 0.0"),
        (lambda: AutoAgeLimit(factor=0.0), "factor: 0.0"),
        (lambda: AutoAgeLimit(window=8), "window: 8"),
        (lambda: AutoAgeLimit(low=3.0, high=2.0), "low, high: 3.0, 2.0"),
        (lambda: AutoAgeLimit(high=math.inf), "low, high"),
        (lambda: ShortestPrefillQueue(age_limit="soon", clock=Clock()), "age_limit: 'soon'"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
