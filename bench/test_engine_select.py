"""Time of one engine choice, traces fresh and no ties to speak of: `pytest bench/test_engine_select.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gimbal_runtime.affinity import prefix_key
from gimbal_runtime.engine_select import EngineSelector
from gimbal_runtime.prefix_estimate import PrefixEstimate
from gimbal_runtime.trace import EngineTrace


def make_traces(engines: int) -> list[EngineTrace]:
    draw = random.Random(engines)
    return [
        EngineTrace(
            run_prefill=draw.randrange(9_000),
            wait_prefill=draw.randrange(9_000),
            kv=draw.random() * 0.8,
            moe=draw.random() * 1e4,
            ack=0,
            time=0.0,
            requests=draw.randrange(60, 400),
            request_steps=200.0,
        )
        for _ in range(engines)
    ]


@pytest.mark.parametrize("engines", [2, 8, 64])
def test_select(benchmark: Any, engines: int) -> None:
    """One request: choose, remember, and release it again so that the load stays as it is."""
    selector = EngineSelector(engines, 8_192, kv_capacity_tokens=1_000_000, max_num_seqs=128)
    for engine, trace in enumerate(make_traces(engines)):
        selector.observe(engine, trace)

    def choose() -> None:
        decision = selector.select(200, now=1.0)
        selector.release(decision.engine, decision.seq)

    benchmark(choose)
    assert selector.scores is not None


@pytest.mark.parametrize("engines", [2, 8, 64])
def test_observe_all_then_select(benchmark: Any, engines: int) -> None:
    """One publication of all engines, about every 100 ms, and the choice after it."""
    selector = EngineSelector(engines, 8_192, kv_capacity_tokens=1_000_000, max_num_seqs=128)
    traces = make_traces(engines)

    def publish() -> None:
        for engine, trace in enumerate(traces):
            selector.observe(engine, trace)
        decision = selector.select(200, now=1.0)
        selector.release(decision.engine, decision.seq)

    benchmark(publish)
    assert selector.scores is not None


@pytest.mark.parametrize("tokens", [256, 2_048, 8_192])
def test_select_with_affinity_and_prefix_estimate(benchmark: Any, tokens: int) -> None:
    """One request as an API server chooses for it, 64 engines: key, blocks, what is cached, the choice."""
    selector = EngineSelector(64, 8_192, kv_capacity_tokens=1_000_000, max_num_seqs=128)
    estimate = PrefixEstimate(64, block_size=64, capacity_blocks=15_625)
    for engine, trace in enumerate(make_traces(64)):
        selector.observe(engine, trace)
    prompt = list(range(tokens))

    def choose() -> None:
        blocks = estimate.blocks(prompt)
        decision = selector.select(
            tokens,
            now=1.0,
            affinity_key=prefix_key(prompt),
            cached=lambda engine: estimate.cached_tokens(engine, blocks),
        )
        estimate.add(decision.engine, blocks)
        selector.release(decision.engine, decision.seq)

    benchmark(choose)
    assert estimate.cached_tokens(selector.decisions.recent(1)[0].engine, estimate.blocks(prompt)) == tokens
