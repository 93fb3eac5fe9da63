"""Engine selection: uncached tokens as the size of a request, and engines that are added (SPEC section 6)."""

from __future__ import annotations

import random

import pytest
from gimbal_runtime.engine_select import Decision, EngineSelector
from gimbal_runtime.prefix_estimate import PrefixEstimate
from gimbal_runtime.trace import EngineTrace


def estimate(engines: int = 2, block: int = 4, capacity: int = 100) -> PrefixEstimate:
    return PrefixEstimate(engines, block_size=block, capacity_blocks=capacity)


def trace(run: float = 0, ack: int = 0, time: float = 0.0) -> EngineTrace:
    return EngineTrace(run_prefill=run, wait_prefill=0, kv=0.0, moe=0.0, ack=ack, time=time)


# --- the estimate ---


def test_whole_leading_blocks_count_on_the_engine_they_were_sent_to() -> None:
    made = estimate()
    made.add(0, made.blocks(list(range(10))))  # two whole blocks
    assert made.cached_tokens(0, made.blocks(list(range(10)))) == 8
    assert made.cached_tokens(0, made.blocks([*range(6), 99, *range(7, 20)])) == 4
    assert made.cached_tokens(0, made.blocks([99, *range(1, 10)])) == 0
    assert made.cached_tokens(0, made.blocks([0, 1, 2])) == 0
    assert made.cached_tokens(1, made.blocks(list(range(10)))) == 0


def test_a_block_depends_on_all_that_comes_before_it() -> None:
    made = estimate()
    made.add(0, made.blocks([1, 2, 3, 4, 5, 6, 7, 8]))
    assert made.cached_tokens(0, made.blocks([5, 6, 7, 8, 1, 2, 3, 4])) == 0


def test_another_salt_shares_nothing() -> None:
    made = estimate()
    made.add(0, made.blocks(list(range(8)), seed="a"))
    assert made.cached_tokens(0, made.blocks(list(range(8)), seed="a")) == 8
    assert made.cached_tokens(0, made.blocks(list(range(8)), seed="b")) == 0
    assert made.cached_tokens(0, made.blocks(list(range(8)))) == 0


def test_it_holds_as_much_as_the_cache_and_forgets_ends_first() -> None:
    made = estimate(capacity=3)
    first = made.blocks(list(range(8)))
    made.add(0, first)
    made.add(0, made.blocks(list(range(100, 108))))
    assert made.cached_tokens(0, first) == 4  # its second block made room
    made.add(0, made.blocks(list(range(200, 240))))  # more than the cache has
    assert made.cached_tokens(0, made.blocks(list(range(200, 240)))) == 12
    assert made.cached_tokens(0, first) == 0
    assert len(made._held[0]) == 3


def test_use_keeps_a_prefix() -> None:
    made = estimate(capacity=4)
    shared = list(range(8))
    for i in range(20):
        made.add(0, made.blocks([*shared, *range(1_000 + 8 * i, 1_008 + 8 * i)]))
        assert made.cached_tokens(0, made.blocks(shared)) == 8


def test_random_prompts_against_whole_prefixes() -> None:
    draw = random.Random(5)
    made, sent = estimate(capacity=10_000), []
    for _ in range(300):
        prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 30))]
        common = [
            sum(1 for _ in _common(prompt, other)) // 4 * 4 for other in sent
        ]  # whole blocks that some earlier prompt had as well
        expected = max((min(c, len(o) // 4 * 4) for c, o in zip(common, sent, strict=True)), default=0)
        assert made.cached_tokens(0, made.blocks(prompt)) == min(expected, len(prompt) // 4 * 4)
        made.add(0, made.blocks(prompt))
        sent.append(prompt)


def _common(a: list[int], b: list[int]) -> list[int]:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def test_an_engine_that_is_gone_holds_nothing_and_a_new_one_neither() -> None:
    made = estimate(engines=1)
    blocks = made.blocks(list(range(8)))
    made.add(0, blocks)
    made.add_engine()
    assert (made.cached_tokens(0, blocks), made.cached_tokens(1, blocks)) == (8, 0)
    made.forget(0)
    assert made.cached_tokens(0, blocks) == 0


@pytest.mark.parametrize("name", ["num_engines", "block_size", "capacity_blocks"])
def test_bad_sizes_are_named(name: str) -> None:
    sizes = {"num_engines": 1, "block_size": 1, "capacity_blocks": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: 0; valid: an integer >= 1"):
        PrefixEstimate(
            sizes["num_engines"], block_size=sizes["block_size"], capacity_blocks=sizes["capacity_blocks"]
        )


# --- in the selection ---


def test_what_the_chosen_engine_has_cached_does_not_count() -> None:
    made = EngineSelector(2, 1_000)
    for engine in (0, 1):
        made.observe(engine, trace())
    cached = {0: 900, 1: 0}
    assert made.select(1_000, now=0.0, cached=cached.__getitem__).engine == 0
    assert made.compensation(0) == 100
    assert made.select(1_000, now=0.0, cached=cached.__getitem__).engine == 1
    assert made.compensation(1) == 1_000
    assert [entry.tokens for entry in made.decisions.recent()] == [100, 1_000]


def test_an_engine_computes_at_least_the_last_token() -> None:
    made = EngineSelector(1, 1_000)
    made.select(64, now=0.0, cached=lambda _: 64)
    assert made.compensation(0) == 1
    made.select(0, now=0.0, cached=lambda _: 64, pinned=0)
    assert made.compensation(0) == 1


def test_pinned_requests_are_sized_by_their_engine() -> None:
    made = EngineSelector(2, 1_000)
    made.select(100, now=0.0, pinned=1, cached=lambda engine: 40 * engine)
    assert made.compensation(1) == 60


# --- engines that are added ---


def test_an_added_engine_takes_part_once_it_has_a_trace() -> None:
    made = EngineSelector(2, 1_000)
    for engine in (0, 1):
        made.observe(engine, trace(run=5_000))
    assert made.add_engine() == 2
    assert made.live_engines == (0, 1, 2)
    assert made.select(10, now=0.0).reason == "ordered_no_trace"
    made.observe(2, trace())
    assert made.select(10, now=0.0) == Decision(2, "score", 1)
    assert made.scores == pytest.approx((5.01, 5.0, 0.0))
    made.remove_engine(2)
    made.add_engine()
    assert made.live_engines == (0, 1, 3)
