"""Time of one deflection decision: `pytest bench/test_deflection.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gimbal_runtime.deflection import DecodeNode, DeflectionRouter, PrefillNode
from gimbal_runtime.iteration_model import Iteration, IterationFitter, IterationModel

PROMPT = 8_192


def decode_nodes(count: int) -> list[DecodeNode]:
    """Nodes that differ in model and load, all so near to their limit that chunks are at most 256 tokens."""
    draw = random.Random(count)
    nodes = []
    for place in range(count):
        model = IterationModel(0.009, 6e-5, 2.5e-8, draw.uniform(7e-5, 9e-5), draw.uniform(3e-10, 5e-10))
        n_decode, kv_tokens = draw.randrange(40, 80), draw.randrange(50_000, 90_000)
        base = model.time(n_decode, kv_tokens)
        room = model.time(0, 0, [(256, PROMPT)]) - model.a
        limit = base + room * draw.uniform(1.0, 1.2)
        nodes.append(DecodeNode(f"decode-{place}", model, n_decode, kv_tokens, 500_000, limit, 0))
    return nodes


@pytest.mark.parametrize("count", [2, 8, 64])
def test_route(benchmark: Any, count: int) -> None:
    """64 decode nodes, an 8,192-token prompt, chunks of at most 256 tokens: aim 300 µs, limit 1 ms."""
    router = DeflectionRouter()
    nodes = decode_nodes(count)
    model = IterationModel(0.009, 6e-5, 2.5e-8, 8e-5, 4e-10)
    prefill = [
        PrefillNode(f"prefill-{place}", model, [(40_000, 0)] * 4, 0.2, 31e3, 4e9) for place in range(2)
    ]
    route = benchmark(router.route, PROMPT, PROMPT, prefill, nodes)
    assert route.deflected
    assert max(route.chunks) <= 256


def test_fit(benchmark: Any) -> None:
    """One refit from the normal equations, as a node does once in a while."""
    draw = random.Random(0)
    model = IterationModel(0.009, 6e-5, 2.5e-8, 8e-5, 4e-10)
    fitter = IterationFitter()
    for _ in range(200):
        chunks = [(draw.randrange(1, 2_048), draw.randrange(8_192))] if draw.random() < 0.5 else []
        n_decode, kv = draw.randrange(64), draw.randrange(90_000)
        fitter.add(
            Iteration(n_decode, kv, chunks, model.time(n_decode, kv, chunks) * draw.uniform(0.95, 1.05))
        )
    assert benchmark(fitter.model).good
