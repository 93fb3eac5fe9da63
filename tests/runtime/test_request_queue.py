"""The queue (SPEC section 7): public reports, wait bound, ageing, and a naive sorted list as the model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from gimbal_runtime.request_queue import ShortestPrefillQueue
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


@dataclass  # with __eq__ and without __hash__: the queue goes by identity
class Prompt:
    prefill_tokens: int
    arrival_time: float = 0.0
    name: str = ""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def drain(queue: ShortestPrefillQueue[Prompt]) -> list[str]:
    return [queue.pop().name for _ in range(len(queue))]


# --- public reports ---


def serve_stream(age_limit: float, until: float = 60.0) -> float:
    """Seconds until a 30,000-token prompt starts on an engine (1,000 tokens/s) that short ones overload."""
    clock = Clock()
    queue = ShortestPrefillQueue[Prompt](age_limit=age_limit, clock=clock)
    queue.push(Prompt(100, 0.0))
    queue.push(Prompt(30_000, 0.0, "long"))
    arrivals = 0
    while clock.now < until:
        while arrivals / 10.5 <= clock.now:  # 10.5 prompts/s of 100 tokens: the queue is never empty
            queue.push(Prompt(100, arrivals / 10.5))
            arrivals += 1
        prompt = queue.pop()
        if prompt.name == "long":
            return clock.now
        clock.now += prompt.prefill_tokens / 1_000
    return math.inf


def test_row_58_a_long_prompt_is_served_within_the_bound() -> None:
    # When it comes of age nothing that still waits is older: the prompt in service is all that is before it.
    service = 100 / 1_000
    for age_limit in (1.0, 5.0, 29.9 - service):
        assert age_limit <= serve_stream(age_limit) <= age_limit + service + 1e-9
    assert serve_stream(5.0) <= (30_000 - 100) / 1_000


def test_row_58_without_ageing_it_starves() -> None:
    assert serve_stream(age_limit=math.inf) == math.inf


def test_row_60_a_long_prompt_that_is_cached_is_short(clock: Clock) -> None:
    for block_size in (1, 16):
        queue = ShortestPrefillQueue[Prompt](clock=clock, block_size=block_size)
        queue.push(Prompt(1_000 - 0, 0.0, "1k, nothing cached"))
        queue.push(Prompt(30_000 - 29_900, 1.0, "30k, 29.9k cached"))
        assert drain(queue) == ["30k, 29.9k cached", "1k, nothing cached"]


def test_row_60_sizes_are_compared_in_blocks(clock: Clock) -> None:
    by_block = ShortestPrefillQueue[Prompt](clock=clock, block_size=16)
    by_token = ShortestPrefillQueue[Prompt](clock=clock)
    for queue in (by_block, by_token):
        for name, tokens, arrival in [("33", 33, 0.0), ("32", 32, 1.0), ("17", 17, 2.0), ("1", 1, 3.0)]:
            queue.push(Prompt(tokens, arrival, name))
    assert drain(by_block) == ["1", "32", "17", "33"]  # 1, 2, 2 and 3 blocks
    assert drain(by_token) == ["1", "17", "32", "33"]


def test_row_61_a_preempted_request_resumes_first(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    queue.push(Prompt(500, 0.0, "B"))
    queue.push(Prompt(1, 0.0, "short"))
    preempted = Prompt(500, 1.0, "A")
    clock.now = 100.0  # B is of age as well
    queue.push_front(preempted)
    assert drain(queue) == ["A", "B", "short"]


# --- order ---


def test_several_preempted_requests_resume_last_put_back_first(clock: Clock) -> None:
    """A scheduler preempts its youngest request first, so the oldest comes back last and resumes first."""
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    for name in ("young", "old"):
        queue.push_front(Prompt(10, 0.0, name))
    queue.push(Prompt(1, 0.0, "new"))
    assert drain(queue) == ["old", "young", "new"]


def test_equal_sizes_go_by_arrival_then_by_push(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    for name, arrival in [("second", 2.0), ("first", 1.0), ("third", 2.0)]:
        queue.push(Prompt(10, arrival, name))
    assert drain(queue) == ["first", "second", "third"]


def test_items_pushed_out_of_arrival_order_age_in_arrival_order(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    for name, tokens, arrival in [("b", 10, 2.0), ("a", 90, 1.0), ("c", 50, 3.0), ("young", 1, 6.0)]:
        queue.push(Prompt(tokens, arrival, name))
    clock.now = 8.5
    assert [prompt.name for prompt in queue] == ["a", "b", "c", "young"]
    assert drain(queue) == ["a", "b", "c", "young"]


def test_a_request_is_of_age_when_older_than_the_limit_not_before(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    queue.push(Prompt(90, 0.0, "long"))
    queue.push(Prompt(1, 4.0, "short"))
    clock.now = 5.0
    assert queue.peek().name == "short"
    clock.now = 5.001
    assert queue.peek().name == "long"


def test_an_age_limit_of_zero_is_arrival_order(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](age_limit=0.0, clock=clock)
    for name, tokens, arrival in [("a", 90, 0.0), ("b", 1, 1.0), ("c", 40, 2.0)]:
        queue.push(Prompt(tokens, arrival, name))
    clock.now = 3.0
    assert drain(queue) == ["a", "b", "c"]


def test_without_ageing_size_alone_decides(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](age_limit=math.inf, clock=clock)
    queue.push(Prompt(90, 0.0, "long"))
    clock.now = 1e9
    queue.push(Prompt(1, 1e9, "short"))
    assert [prompt.name for prompt in queue] == ["short", "long"]
    assert drain(queue) == ["short", "long"]


# --- peek and pop ---


def test_peek_and_pop_agree_although_the_clock_moves(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    queue.push(Prompt(90, 0.0, "long"))
    queue.push(Prompt(1, 0.1, "short"))
    assert queue.peek().name == "short"
    clock.now = 5.05  # "long" has come of age
    assert queue.pop().name == "short"
    assert queue.pop().name == "long"


def test_a_new_peek_looks_again(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    queue.push(Prompt(90, 0.0, "long"))
    queue.push(Prompt(1, 0.1, "short"))
    assert queue.peek().name == "short"
    clock.now = 5.05
    assert queue.peek().name == "long"
    assert queue.pop().name == "long"


def test_a_changed_queue_forgets_what_was_shown(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    first, second = Prompt(1, 0.0, "first"), Prompt(2, 0.0, "second")
    queue.push(first)
    queue.push(second)
    assert queue.peek() is first
    queue.remove(first)
    assert queue.pop() is second
    queue.push(second)
    assert queue.peek() is second
    queue.push_front(first)
    assert queue.pop() is first


def test_the_clock_is_read_once_per_look(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    for size in range(1_000):
        queue.push(Prompt(size, float(size)))
    assert clock.reads == 0
    queue.peek()
    queue.pop()
    assert clock.reads == 1
    list(queue)
    assert clock.reads == 2


# --- membership and memory ---


def test_membership_is_by_identity(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    one, twin = Prompt(5), Prompt(5)
    assert not queue
    queue.push(one)
    assert queue
    assert one in queue
    assert twin not in queue
    queue.push(twin)
    queue.remove(one)
    assert len(queue) == 1
    assert queue.pop() is twin


def test_an_item_may_leave_and_come_back_changed(clock: Clock) -> None:
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    item = Prompt(5, 0.0, "item")
    queue.push(item)
    queue.push(Prompt(7, 0.0, "other"))
    for _ in range(3):
        queue.remove(item)
        item.prefill_tokens += 1
        queue.push(item)
    assert drain(queue) == ["other", "item"]


@pytest.mark.parametrize("age_limit", [5.0, math.inf])
def test_removed_entries_do_not_pile_up(clock: Clock, age_limit: float) -> None:
    """One request stays at the top of each heap: looking at the top alone would drop nothing below it."""
    queue = ShortestPrefillQueue[Prompt](age_limit=age_limit, clock=clock)
    queue.push(Prompt(0, 0.0))
    resumed = Prompt(1)
    for _ in range(2_000):
        item = Prompt(5, 1.0)
        queue.push(item)
        queue.remove(item)
        queue.push_front(resumed)
        queue.remove(resumed)
    (level,) = queue._levels.values()
    assert max(len(level.by_size), len(level.by_arrival), len(level.resumed)) < 200
    assert len(queue) == 1


# --- against a naive sorted list ---


class AgainstSortedList(RuleBasedStateMachine):
    LIMIT = 5.0
    BLOCK = 4

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue = ShortestPrefillQueue[Prompt](
            age_limit=self.LIMIT, clock=self.clock, block_size=self.BLOCK
        )
        self.waiting: list[Prompt] = []  # in the order of the pushes
        self.resumed: list[Prompt] = []  # the next one first
        self.gone: list[Prompt] = []

    def order(self) -> list[Prompt]:
        now = self.clock.now
        aged = [item for item in self.waiting if item.arrival_time < now - self.LIMIT]
        young = [item for item in self.waiting if not item.arrival_time < now - self.LIMIT]
        aged.sort(key=lambda item: item.arrival_time)
        young.sort(key=lambda item: (math.ceil(item.prefill_tokens / self.BLOCK), item.arrival_time))
        return self.resumed + aged + young

    def forget(self, item: Prompt) -> None:
        for group in (self.waiting, self.resumed):
            group[:] = [other for other in group if other is not item]
        self.gone.append(item)

    @rule(tokens=st.integers(0, 40), late=st.sampled_from([0.0, 0.0, 0.5, 3.0, 6.0]))
    def push(self, tokens: int, late: float) -> None:
        item = Prompt(tokens, self.clock.now - late)
        self.queue.push(item)
        self.waiting.append(item)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), front=st.booleans())
    def come_back(self, data: st.DataObject, front: bool) -> None:
        item = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        if front:
            self.queue.push_front(item)
            self.resumed.insert(0, item)
        else:
            self.queue.push(item)
            self.waiting.append(item)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.waiting or self.resumed)
    @rule(moves=st.sampled_from([None, 0.0, 3.0, 10.0]))
    def pop(self, moves: float | None) -> None:
        expected = self.order()[0]
        if moves is not None:
            assert self.queue.peek() is expected
            self.clock.now += moves
        assert self.queue.pop() is expected
        self.forget(expected)

    @precondition(lambda self: self.waiting or self.resumed)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.order()))
        self.queue.remove(item)
        self.forget(item)

    @invariant()
    def same_order(self) -> None:
        order = self.order()
        assert [id(item) for item in self.queue] == [id(item) for item in order]
        assert len(self.queue) == len(order)
        assert bool(self.queue) is bool(order)
        assert not any(item in self.queue for item in self.gone)


AgainstSortedList.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstSortedList = AgainstSortedList.TestCase


def test_a_thousand_random_prompts_come_out_sorted(clock: Clock) -> None:
    """Long enough for the heaps to be rebuilt on the way."""
    draw = random.Random(0)
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    prompts = [Prompt(draw.randrange(500), draw.random() * 10) for _ in range(1_000)]
    for prompt in prompts:
        queue.push(prompt)
    clock.now = 10.0
    for prompt in (dropped := draw.sample(prompts, 700)):
        queue.remove(prompt)
    left = [prompt for prompt in prompts if not any(prompt is other for other in dropped)]
    aged = sorted((p for p in left if p.arrival_time < 5.0), key=lambda p: p.arrival_time)
    young = sorted(
        (p for p in left if p.arrival_time >= 5.0), key=lambda p: (p.prefill_tokens, p.arrival_time)
    )
    assert [queue.pop() for _ in range(300)] == aged + young


# --- bad input ---


def test_bad_input_is_named(clock: Clock) -> None:
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match="age_limit: "):
            ShortestPrefillQueue[Prompt](age_limit=limit, clock=clock)
    with pytest.raises(ValueError, match="block_size: 0"):
        ShortestPrefillQueue[Prompt](clock=clock, block_size=0)
    queue = ShortestPrefillQueue[Prompt](clock=clock)
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(ValueError, match=r"item\.prefill_tokens: -5"):
        queue.push(Prompt(-5))
    with pytest.raises(ValueError, match=r"item\.arrival_time: nan"):
        queue.push(Prompt(5, math.nan))
    item = Prompt(5)
    with pytest.raises(ValueError, match="is not in the queue"):
        queue.remove(item)
    queue.push(item)
    for again in (queue.push, queue.push_front):
        with pytest.raises(ValueError, match="in the queue already"):
            again(item)
    assert len(queue) == 1
