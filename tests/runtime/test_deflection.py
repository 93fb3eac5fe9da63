"""Prefill deflection (SPEC section 8) against a step-by-step reference, and case by case."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from gimbal_runtime.deflection import DecodeNode, DeflectionConfig, DeflectionRouter, PrefillNode
from gimbal_runtime.iteration_model import FitQuality, IterationModel
from hypothesis import given, settings
from hypothesis import strategies as st

MODEL = IterationModel(0.009, 6e-5, 2.5e-8, 8e-5, 4e-10)
CONFIG = DeflectionConfig()
FINER = (2_048, 1_536, 1_024, 768, 512, 384, 256, 192, 128)


def prefill(name: str = "p", queued: object = (), **changes: object) -> PrefillNode:
    node = PrefillNode(name, MODEL, queued, 0.0, 31e3, 4e9)
    return replace(node, **changes)


def decode(name: str = "d", **changes: object) -> DecodeNode:
    node = DecodeNode(name, MODEL, 20, 20_000, 100_000, 0.05, 0)
    return replace(node, **changes)


# --- reference: one step at a time ---


def naive_chunks(tokens: int, uncached: int, node: DecodeNode, config: DeflectionConfig) -> list[int] | None:
    model = node.model
    base = model.a + model.c0 * node.n_decode + model.c1 * node.kv_tokens
    limit = math.inf if node.n_decode == 0 or node.tbt_slo is None else config.beta * node.tbt_slo
    done, chunks = tokens - uncached, []
    while done < tokens:
        rest = tokens - done
        sizes = [size for size in config.chunk_sizes if size <= rest]
        if rest <= config.chunk_sizes[0]:
            sizes.append(rest)
        fits = [s for s in sizes if base + s * (model.c_pf + model.c_attn * (done + s / 2)) <= limit]
        if not fits:
            return None
        chunks.append(max(fits))
        done += max(fits)
    return chunks


def naive_best(
    tokens: int, uncached: int, nodes: list[DecodeNode], config: DeflectionConfig
) -> tuple[float, str | None, list[int]]:
    best: tuple[float, str | None, list[int]] = (math.inf, None, [])
    for node in nodes:
        if node.kv_free < tokens or node.deflected_in_flight:
            continue
        chunks = naive_chunks(tokens, uncached, node, config)
        if chunks is None:
            continue
        model, done = node.model, tokens - uncached
        base = model.a + model.c0 * node.n_decode + model.c1 * node.kv_tokens
        seconds = len(chunks) * base + uncached * (model.c_pf + model.c_attn * (done + uncached / 2))
        if seconds < best[0]:
            best = (seconds, node.name, chunks)
    return best


def random_nodes(draw: random.Random, count: int, attention: float) -> list[DecodeNode]:
    nodes = []
    for place in range(count):
        model = IterationModel(
            draw.uniform(0.001, 0.02),
            draw.uniform(0, 1e-4),
            draw.uniform(0, 5e-8),
            draw.choice([0.0, draw.uniform(1e-6, 2e-4)]),
            attention * draw.uniform(0.1, 1.0),
        )
        n_decode, kv = draw.randrange(80), draw.randrange(100_000)
        # Limits from hopeless to generous, some exactly at the time of a chunk.
        chunk = draw.choice([64, 128, 200, 256, 512, 1024, 2048])
        at = draw.choice([chunk * draw.randrange(9), draw.randrange(9_000)])
        limit = model.time(n_decode, kv, [(chunk, at)]) * draw.choice([0.5, 1.0, 1.0, 1.3])
        free = draw.choice([100_000, 100_000, 3_000])
        nodes.append(DecodeNode(f"d{place}", model, n_decode, kv, free, limit, int(draw.random() < 0.1)))
    return nodes


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.one_of(st.integers(1, 12_000), st.sampled_from([127, 128, 129, 2_047, 2_048, 4_095, 4_097])),
    share=st.sampled_from([1.0, 1.0, 0.5, 0.01]),
    attention=st.sampled_from([0.0, 1e-16, 4e-10, 1e-7]),
    sizes=st.sampled_from([CONFIG.chunk_sizes, FINER, (64,), (16, 8, 4, 2, 1), (9, 8, 5, 3, 2)]),
)
def test_equals_the_step_by_step_reference(
    seed: int, tokens: int, share: float, attention: float, sizes: tuple[int, ...]
) -> None:
    if sizes[0] < 100:
        tokens = 1 + tokens % 700
    draw = random.Random(seed)
    uncached = max(1, int(tokens * share))
    nodes = random_nodes(draw, draw.choice([1, 3, 9]), attention)
    config = DeflectionConfig(alpha=1.0, beta=draw.choice([1.0, 0.9]), chunk_sizes=sizes)
    route = DeflectionRouter(config).route(tokens, uncached, [], nodes)
    seconds, name, chunks = naive_best(tokens, uncached, nodes, config)
    assert (route.ttft_decode, route.node, list(route.chunks)) == (seconds, name, chunks)
    assert route.deflected is (name is not None)


def test_the_predicted_time_is_the_sum_over_the_steps() -> None:
    node = decode()
    route = DeflectionRouter().route(8_192, 6_000, [], [node])
    done, seconds = 8_192 - 6_000, 0.0
    for chunk in route.chunks:
        step = MODEL.time(node.n_decode, node.kv_tokens, [(chunk, done)])
        assert step <= node.tbt_slo
        seconds += step
        done += chunk
    assert done == 8_192
    assert len(set(route.chunks)) > 1
    assert route.ttft_decode == pytest.approx(seconds, rel=1e-12)


# --- the decision ---


def test_prefill_time_adds_up_by_hand() -> None:
    model = IterationModel(0.01, 0, 0, 1e-4, 1e-8)
    node = PrefillNode("p", model, [(1_000, 500), (200, 0)], 0.3, 1e4, 1e9)
    queued = 2 * 0.01 + 1_200 * 1e-4 + (1_000 * 1_000 + 200 * 100) * 1e-8
    own = 0.01 + 600 * 1e-4 + 600 * (400 + 300) * 1e-8
    route = DeflectionRouter().route(1_000, 600, [node], [])
    assert route.ttft_prefill == pytest.approx(queued + own + 0.3 + 1_000 * 1e4 / 1e9)
    assert (route.node, route.deflected, route.chunks, route.reason) == ("p", False, (), "prefill")
    batched = replace(node, token_budget=512)  # 1,800 tokens: four iterations instead of three
    assert DeflectionRouter().route(1_000, 600, [batched], []).ttft_prefill == pytest.approx(
        route.ttft_prefill + 0.01
    )


def test_the_prefill_node_of_least_time_ties_go_to_the_first() -> None:
    busy, link = prefill("busy", [(9_000, 0)]), prefill("link", link_wait=5.0)
    route = DeflectionRouter().route(1_000, 1_000, [busy, link, prefill("free"), prefill("twin")], [])
    assert route.node == "free"


def test_deflects_only_when_clearly_faster() -> None:
    """T_D against 0.95·T_P, with T_P moved by the wait for the link."""
    node = decode()
    alone = DeflectionRouter().route(2_000, 2_000, [], [node]).ttft_decode
    own = DeflectionRouter().route(2_000, 2_000, [prefill()], []).ttft_prefill
    for wait, deflected in [(alone / 0.95 - own + 1e-6, True), (alone / 0.95 - own - 1e-6, False)]:
        route = DeflectionRouter().route(2_000, 2_000, [prefill(link_wait=wait)], [node])
        assert route.deflected is deflected
        assert route.node == ("d" if deflected else "p")
        assert bool(route.chunks) is deflected


def test_a_deflected_request_must_meet_the_ttft_slo() -> None:
    busy = prefill(queued=[(500_000, 0)])
    alone = DeflectionRouter().route(2_000, 2_000, [busy], [decode()])
    assert alone.deflected
    strict = DeflectionRouter(DeflectionConfig(ttft_slo=0.99 * alone.ttft_decode))
    assert strict.route(2_000, 2_000, [busy], [decode()]).node == "p"


def test_the_decode_node_of_least_time_ties_go_to_the_first() -> None:
    nodes = [decode("full", n_decode=60), decode("first"), decode("second")]
    assert DeflectionRouter().route(3_000, 3_000, [], nodes).node == "first"


def test_room_for_exactly_the_prompt_is_enough() -> None:
    assert DeflectionRouter().route(2_000, 100, [], [decode(kv_free=2_000)]).deflected


def test_without_a_resident_request_there_is_no_limit() -> None:
    idle = decode(n_decode=0, kv_tokens=0, tbt_slo=1e-9)
    assert DeflectionRouter().route(5_000, 5_000, [], [idle]).chunks == (2_048, 2_048, 904)
    unasked = decode(tbt_slo=None)
    assert DeflectionRouter().route(5_000, 5_000, [], [unasked]).chunks == (2_048, 2_048, 904)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_free": 1_999},
        {"deflected_in_flight": 1},
        {"tbt_slo": 0.0101},  # not even 128 tokens
        {"live": False},
        {"model": None},
        {"model": replace(MODEL, quality=FitQuality(error=0.2, iterations=500.0, prefills=99.0))},
        {"n_decode": None},
        {"kv_tokens": None},
        {"kv_free": None},
        {"deflected_in_flight": None},
    ],
)
def test_a_decode_node_that_is_no_candidate(changes: dict[str, object]) -> None:
    busy = prefill(queued=[(900_000, 0)])
    assert DeflectionRouter().route(2_000, 2_000, [busy], [decode()]).deflected
    route = DeflectionRouter().route(2_000, 2_000, [busy], [decode(**changes)])
    assert (route.node, route.ttft_decode) == ("p", math.inf)


@pytest.mark.parametrize(
    "changes",
    [
        {"queued": None},
        {"link_wait": None},
        {"model": None},
        {"live": False},
        {"model": replace(MODEL, quality=FitQuality(error=0.0, iterations=500.0, prefills=1.0))},
    ],
)
def test_a_prefill_node_without_a_signal_is_not_one_without_load(changes: dict[str, object]) -> None:
    loaded = prefill("loaded", [(50_000, 0)])
    route = DeflectionRouter().route(2_000, 2_000, [prefill("silent", **changes), loaded], [])
    assert route.node == "loaded"


def test_without_any_candidate_prefill_nodes_go_in_order() -> None:
    router = DeflectionRouter()
    silent = [prefill(name, None) for name in ("a", "b", "c")]
    silent[1] = replace(silent[1], live=False)
    routes = [router.route(100, 100, silent, [decode(live=False)]) for _ in range(4)]
    assert [route.node for route in routes] == ["a", "c", "a", "c"]
    assert {route.reason for route in routes} == {"in_order"}
    assert routes[0].ttft_prefill == math.inf


def test_a_request_that_waits_is_deflected_when_a_node_becomes_free() -> None:
    router = DeflectionRouter()
    node = prefill(queued=[(4_000, 0)])
    waiting = [(15_000, 15_000), (1_000, 1_000), (2_000, 2_000)]
    # The first is too long for the decode node's KV cache; the second is the first that gains.
    free = decode(kv_free=14_000)
    found = router.reconsider(waiting, node, [free])
    assert found is not None
    place, route = found
    assert (place, route.node, sum(route.chunks)) == (1, "d", 1_000)
    ahead = replace(node, queued=[(4_000, 0), (15_000, 0)])
    assert route.ttft_prefill == router.route(1_000, 1_000, [ahead], []).ttft_prefill
    assert router.reconsider(waiting, node, [decode(deflected_in_flight=1)]) is None
    assert router.reconsider([(100, 100)], prefill(), [decode(n_decode=60)]) is None  # nothing to gain
    assert router.reconsider([], node, [free]) is None


def test_when_every_prefill_node_is_dead() -> None:
    dead = prefill(live=False)
    strict = DeflectionRouter(DeflectionConfig(ttft_slo=1e-6))
    late = strict.route(2_000, 2_000, [dead], [decode()])
    assert (late.node, late.reason) == ("d", "only_decode")
    assert sum(late.chunks) == 2_000
    nowhere = strict.route(2_000, 2_000, [dead], [decode(live=False)])
    assert (nowhere.node, nowhere.reason) == (None, "nowhere")


def test_a_prompt_that_is_cached_still_computes_its_last_token() -> None:
    route = DeflectionRouter().route(500, 0, [], [decode()])
    assert route.chunks == (1,)


def test_64_nodes_with_small_chunks() -> None:
    """The case that is timed by the benchmark, checked in full."""
    draw = random.Random(1)
    nodes = []
    for place in range(64):
        model = replace(MODEL, c_pf=draw.uniform(7e-5, 9e-5))
        limit = model.time(50, 60_000) + 256 * (model.c_pf + model.c_attn * 8_192) * draw.uniform(1.0, 1.2)
        nodes.append(DecodeNode(f"d{place}", model, 50, 60_000, 100_000, limit, 0))
    route = DeflectionRouter().route(8_192, 8_192, [], nodes)
    assert (route.ttft_decode, route.node, list(route.chunks)) == naive_best(8_192, 8_192, nodes, CONFIG)
    assert max(route.chunks) == 256


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DeflectionRouter().route(0, 0, [], []), "prompt_tokens: 0"),
        (lambda: DeflectionRouter().route(10, 11, [], []), "uncached_tokens: 11; valid: 0 to 10"),
        (lambda: DeflectionRouter().route(10, -1, [], []), "uncached_tokens: -1"),
        (lambda: DeflectionConfig(alpha=0.0), "alpha: 0.0"),
        (lambda: DeflectionConfig(beta=math.nan), "beta: nan"),
        (lambda: DeflectionConfig(ttft_slo=0.0), "ttft_slo: 0.0"),
        (lambda: DeflectionConfig(chunk_sizes=(128, 256)), "chunk_sizes"),
        (lambda: DeflectionConfig(chunk_sizes=()), "chunk_sizes"),
        (lambda: DeflectionConfig(chunk_sizes=(512, 255)), "chunk_sizes"),
        (lambda: prefill(queued=[(5, -1)]), "queued: "),
        (lambda: prefill(bandwidth=0.0), "bandwidth: 0.0"),
        (lambda: prefill(link_wait=-1.0), "link_wait: -1.0"),
        (lambda: prefill(token_budget=0), "token_budget: 0"),
        (lambda: decode(kv_free=-1), "kv_free: -1"),
        (lambda: decode(tbt_slo=0.0), "tbt_slo: 0.0"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
