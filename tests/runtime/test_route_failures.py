"""`gimbal route` in front of fake servers: every way in which a node or a client can fail a request."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import aiohttp
from gimbal_runtime.tools.route_proxy import COMPLETIONS
from route_fakes import (
    PROMPT,
    UNFITTED,
    FakeNode,
    fleet,
    get,
    make_report,
    post,
    prefer_prefill,
    reach,
    run,
    send,
    settled,
)


@pytest.mark.parametrize("stage", ["prefill", "deflected", "decode", "held"])
def test_a_client_that_goes_away_is_gone_everywhere(stage: str) -> None:
    async def test() -> None:
        async with fleet() as (proxy, url, [prefill], [decode]), aiohttp.ClientSession() as session:
            if stage != "deflected":
                prefer_prefill(decode)
            else:
                prefill.queue(("x", 50_000, 0))
            if stage == "held":
                prefill.queue(("x", 4096, 0), ("y", 4096, 0))
            await settled(proxy, prefill, decode)
            waiting = prefill if stage == "prefill" else decode
            waiting.gate.clear()
            task = asyncio.ensure_future(send(session, url))
            if stage == "held":
                await reach(lambda: proxy.dispatcher.held() == 1)
            else:
                await reach(lambda: waiting.bodies)
            task.cancel()
            await reach(lambda: all(node.unfinished == 0 for node in proxy.nodes))
            await reach(lambda: proxy.dispatcher.held() == 0)
            if stage == "held":
                assert prefill.bodies == decode.bodies == []
            else:
                await reach(lambda: waiting.aborted == 1)
            await reach(lambda: 'outcome="client_gone"} 1.0' in proxy.records.page(0, 0.0).decode())

    run(test())


@pytest.mark.parametrize("how", ["status", "broken", "dead", "stream", "error_event"])
def test_retried_once_on_another_node(how: str) -> None:
    async def test() -> None:
        stream = how in ("stream", "error_event")
        async with fleet(0 + 1, 2, health_interval=60.0) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            decode[1].report = make_report(n_decode=1)  # the first one looks better
            await settled(proxy, prefill, *decode)
            if how == "status":
                decode[0].status = 500
            elif how == "dead":
                await decode[0].stop()
            elif how == "error_event":
                decode[0].error_event = True
            else:
                decode[0].drop_after = 0
            status, answer = await post(url, stream=stream)
            assert status == 200
            assert "t0" in (answer if stream else answer["choices"][0]["text"])
            assert len(decode[1].bodies) == 1
            first, second = proxy.records.recent()
            assert (first.node, second.node) == (decode[0].url, decode[1].url)
            assert first.outcome == "Unanswered"
            assert first.request != second.request
            assert [node.unfinished for node in proxy.nodes] == [0, 0, 0]

    run(test())


def test_two_failures_are_a_clear_503() -> None:
    async def test() -> None:
        async with fleet(1, 3) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            await settled(proxy, prefill)
            for node in decode:
                node.status = 500
            status, answer = await post(url)
            assert status == 503
            assert answer["error"]["code"] == 503
            assert decode[0].url in answer["error"]["message"]
            assert sum(len(node.bodies) for node in decode) == 2  # not a third time

    run(test())


def test_a_failed_prefill_node_is_left_out_and_the_request_done_again() -> None:
    async def test() -> None:
        async with fleet(2, 1) as (proxy, url, prefill, [decode]):
            prefer_prefill(decode)
            await settled(proxy, decode)
            prefill[0].status = 503
            status, _ = await post(url)
            assert status == 200
            assert (len(prefill[0].bodies), len(prefill[1].bodies), len(decode.bodies)) == (1, 1, 1)

    run(test())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_refusal_is_passed_on_and_not_retried(role: str) -> None:
    async def test() -> None:
        async with fleet(2, 2) as (proxy, url, prefill, decode):
            if role == "prefill":
                prefer_prefill(*decode)
            await settled(proxy, *decode)
            for node in (*prefill, *decode):
                node.status = 422
            status, answer = await post(url)
            nodes = prefill if role == "prefill" else [*prefill, *decode]
            assert (status, sum(len(node.bodies) for node in nodes)) == (422, 1)
            assert answer["error"]["message"].startswith("from ")

    run(test())


def test_once_tokens_were_sent_an_error_ends_the_stream_and_nothing_is_retried() -> None:
    async def test() -> None:
        async with fleet(1, 2) as (_, url, _, decode):
            for node in decode:
                node.drop_after = 2
            status, text = await post(url, stream=True)
            events = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
            assert status == 200
            assert [json.loads(event)["choices"][0]["text"] for event in events[:2]] == ["t0 ", "t1 "]
            assert json.loads(events[2])["error"]["code"] == 502
            assert "[DONE]" not in text
            assert sum(len(node.bodies) for node in decode) == 1

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_node_that_freezes_is_given_up_when_its_health_is_silent(stream: bool) -> None:
    async def test() -> None:
        async with fleet(1, 2) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            decode[1].report = make_report(n_decode=1)
            await settled(proxy, prefill, *decode)
            decode[0].gate.clear()
            task = asyncio.ensure_future(post(url, stream=stream))
            await reach(lambda: decode[0].bodies)
            decode[0].healthy = False
            status, _ = await task
            assert status == 200
            assert len(decode[1].bodies) == 1

    run(test())


def test_a_node_lost_in_the_middle_of_a_stream_is_told_in_it() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (_, url, _, [decode]), aiohttp.ClientSession() as session:
            decode.tokens, decode.token_gap = 1_000_000, 0.01
            body = {"model": "tiny", "prompt": PROMPT, "stream": True}
            async with session.post(url + COMPLETIONS, json=body) as answer:
                await answer.content.readany()
                decode.healthy = False
                text = await answer.text()
            assert json.loads(text.strip().rsplit("data: ", 1)[1])["error"]["type"] == "upstream_error"

    run(test())


def test_a_silent_node_times_out() -> None:
    async def test() -> None:
        async with fleet(1, 2, timeout=0.3) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            decode[1].report = make_report(n_decode=1)
            await settled(proxy, prefill, *decode)
            decode[0].gate.clear()
            status, _ = await post(url)
            assert (status, len(decode[1].bodies)) == (200, 1)

    run(test())


def test_a_dead_node_is_left_out_and_comes_back() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (proxy, url, [prefill], [decode]):
            prefer_prefill(decode)
            await settled(proxy, decode)
            await prefill.stop()
            await reach(lambda: not proxy.prefill[0].alive)
            status, _ = await post(url)  # better late on the decode node than never
            assert (status, decode.bodies[-1]["vllm_xargs"]["gimbal_chunks"]) == (200, [8])
            assert json.loads((await get(f"{url}/health"))[1])["nodes"][prefill.url]["alive"] is False
            await prefill.restart()
            await reach(lambda: proxy.prefill[0].report is not None)
            await post(url)
            assert len(prefill.bodies) == 1
            await decode.stop()
            await reach(lambda: not proxy.decode[0].alive)
            status, answer = await post(url)
            assert (status, answer["error"]["type"]) == (503, "service_unavailable")
            assert (await get(f"{url}/health"))[0] == 503
            assert (await get(f"{url}/v1/models"))[0] == 503

    run(test())


def test_an_error_of_ours_does_not_end_the_questions() -> None:
    async def test() -> None:
        async with fleet() as (proxy, _, [prefill], _):
            pump, calls = proxy.dispatcher.pump, []

            def fail() -> None:
                calls.append(1)
                raise RuntimeError("no")

            proxy.dispatcher.pump = fail  # type: ignore[method-assign]
            await reach(lambda: len(calls) > 5)
            proxy.dispatcher.pump = pump  # type: ignore[method-assign]
            prefill.queue(("x", 7, 0))
            await settled(proxy, prefill)

    run(test())


def test_without_prefill_nodes_requests_take_turns_on_the_decode_node() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (proxy, url, [prefill], [decode]):
            await prefill.stop()
            await reach(lambda: not proxy.prefill[0].alive)
            decode.gate.clear()
            tasks = [asyncio.ensure_future(post(url)) for _ in range(6)]
            await reach(lambda: len(decode.bodies) == 1 and proxy.dispatcher.held() == 5)
            await asyncio.sleep(0.1)
            assert len(decode.bodies) == 1  # one deflected prompt at a time
            decode.gate.set()
            assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 6

    run(test())


def test_a_request_that_nobody_can_take_in_time_is_a_503() -> None:
    async def test() -> None:
        async with fleet(1, 1, hold_timeout=0.1) as (proxy, url, [prefill], [decode]):
            decode.report = make_report(model=UNFITTED)
            await settled(proxy, decode)
            await prefill.stop()
            await reach(lambda: not proxy.prefill[0].alive)
            status, answer = await post(url)
            assert (status, decode.bodies) == (503, [])
            assert "in time" in answer["error"]["message"]
            assert proxy.dispatcher.held() == 0

    run(test())


def test_whatever_happens_every_request_is_answered_and_nothing_is_left_behind() -> None:
    """Servers that die, come back, freeze and fail at random, clients that go away."""

    async def client(session: Any, url: str, draw: random.Random, outcomes: list[int]) -> None:
        await asyncio.sleep(draw.uniform(0.0, 1.5))
        call = send(session, url, stream=draw.random() < 0.5, max_tokens=draw.randint(1, 20))
        try:
            if draw.random() < 0.2:
                await asyncio.wait_for(call, draw.uniform(0.0, 0.05))
            else:
                outcomes.append((await call)[0])
        except asyncio.TimeoutError:
            pass

    async def trouble(nodes: list[FakeNode], draw: random.Random) -> None:
        while True:
            node = draw.choice(nodes)
            kind = draw.choice(["kill", "status", "drop", "freeze"])
            if kind == "kill":
                await node.stop()
                await asyncio.sleep(0.1)
                await node.restart()
            elif kind == "status":
                node.status = 500
            elif kind == "drop":
                node.drop_after = draw.randint(0, 3)
            else:
                node.gate.clear()
            await asyncio.sleep(0.05)
            node.status, node.drop_after = 200, None
            node.gate.set()

    async def test() -> None:
        draw, outcomes = random.Random(7), []
        async with (
            fleet(2, 2, timeout=1.0) as (proxy, url, prefill, decode),
            aiohttp.ClientSession() as session,
        ):
            for node in (*prefill, *decode):
                node.tokens, node.token_gap = 20, 0.002
            causes = asyncio.ensure_future(trouble([*prefill, *decode], draw))
            await asyncio.gather(*(client(session, url, draw, outcomes) for _ in range(300)))
            causes.cancel()
            await asyncio.gather(causes, return_exceptions=True)
            assert set(outcomes) <= {200, 503}
            assert outcomes.count(200) > len(outcomes) / 2
            await reach(lambda: all(node.unfinished == 0 and not node.legs for node in proxy.nodes))
            assert proxy.dispatcher.held() == 0
            assert {record.outcome for record in proxy.records.recent()} >= {"200", "Unanswered"}

    run(test())
