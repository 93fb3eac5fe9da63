"""`gimbal route` in front of fake servers of which one is killed or stands still with requests on it.

Two prefill and two decode nodes: what had not been answered is answered by another node, what had begun ends with
an error, and none waits longer than the time after which a node counts as lost or a request as failed.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import aiohttp
from gimbal_runtime.node_report import Prefill
from gimbal_runtime.tools import route_proxy, route_upstream
from gimbal_runtime.tools.route_dispatch import DispatchConfig, Dispatcher, Ticket
from gimbal_runtime.tools.route_nodes import DECODE, PREFILL, Node
from gimbal_runtime.tools.route_proxy import COMPLETIONS
from gimbal_runtime.tools.route_upstream import Unanswered, Upstream
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

STAGES = ["prefill", "deflected", "transferred"]
UNASKED = {"health_interval": 60.0, "report_interval": 60.0}
"""The router hears of a death by its requests alone."""


async def stage_at(stage: str, prefill: list[FakeNode], decode: list[FakeNode], proxy: Any) -> FakeNode:
    """Makes the next request stop at a stage; the node that it is on then."""
    for node in (prefill[1], decode[1]):  # the first ones look better
        node.report = make_report(n_decode=1, kv_free=50_000)
    if stage == "deflected":
        for place, node in enumerate(prefill):
            node.queue(("x", 50_000 + place, 0))
    else:
        prefer_prefill(*decode)
        decode[1].report = make_report(model=decode[1].report.model, kv_free=50_000)
        prefill[1].queue(("x", 100, 0))
    await settled(proxy, *prefill, *decode)
    node = prefill[0] if stage == "prefill" else decode[0]
    node.gate.clear()
    return node


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_killed_with_a_request_on_it(stage: str, stream: bool) -> None:
    async def test() -> None:
        async with fleet(2, 2) as (proxy, url, prefill, decode):
            node = await stage_at(stage, prefill, decode, proxy)
            task = asyncio.ensure_future(post(url, stream=stream))
            await reach(lambda: node.bodies)
            await node.stop()
            status, answer = await task
            assert status == 200
            assert "t2" in (answer if stream else answer["choices"][0]["text"])
            first, second = proxy.records.recent()
            assert (first.outcome, second.outcome) == ("Unanswered", "200")
            assert node.url not in (second.node, second.decode)
            await reach(lambda: not next(one for one in proxy.nodes if one.url == node.url).alive)
            health = json.loads((await get(f"{url}/health"))[1])
            assert [state["alive"] for state in health["nodes"].values()].count(False) == 1
            metrics = (await get(f"{url}/metrics"))[1]
            assert f'gimbal_route_node_up{{node="{node.url}",role="{node_role(stage)}"}} 0.0' in metrics
            assert (await post(url))[0] == 200
            assert [one.unfinished for one in proxy.nodes] == [0] * 4

    run(test())


def node_role(stage: str) -> str:
    return PREFILL if stage == "prefill" else DECODE


def test_killed_between_the_transfer_and_the_start_of_decoding() -> None:
    async def test() -> None:
        async with fleet(2, 2, **UNASKED) as (_, url, prefill, decode):
            for node in prefill:
                node.gate.clear()
            task = asyncio.ensure_future(post(url))
            await reach(lambda: any(node.bodies for node in prefill))
            await decode[0].stop()  # which the request will be sent to next
            for node in prefill:
                node.gate.set()
            status, _ = await task
            assert (status, len(decode[0].bodies), len(decode[1].bodies)) == (200, 0, 1)
            # From the start: what was computed for the killed node may be gone with it.
            assert sum(len(node.bodies) for node in prefill) == 2

    run(test())


def test_a_deflected_prompt_on_the_only_decode_node_that_is_killed_is_a_503() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (proxy, url, [prefill], [decode]):
            prefill.queue(("x", 50_000, 0), ("y", 50_000, 0))
            await settled(proxy, prefill)
            decode.gate.clear()
            tasks = [asyncio.ensure_future(post(url)) for _ in range(3)]  # two of them are held
            await reach(lambda: decode.bodies and proxy.dispatcher.held() == 2)
            await decode.stop()
            answers = await asyncio.gather(*tasks)
            assert [status for status, _ in answers] == [503] * 3
            assert any(decode.url in answer["error"]["message"] for _, answer in answers)
            assert prefill.bodies == []  # nobody could decode what it would compute
            assert (proxy.dispatcher.held(), [one.unfinished for one in proxy.nodes]) == (0, [0, 0])

    run(test())


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_with_a_request_on_it(stage: str) -> None:
    """Lost after two questions without an answer, and used again when it goes on."""

    async def test() -> None:
        async with fleet(2, 2, health_timeout=0.2, timeout=60.0) as (proxy, url, prefill, decode):
            node = await stage_at(stage, prefill, decode, proxy)
            task = asyncio.ensure_future(post(url))
            await reach(lambda: node.bodies)
            node.thawed.clear()
            began = time.monotonic()
            assert (await task)[0] == 200
            assert time.monotonic() - began < 10.0
            assert not next(one for one in proxy.nodes if one.url == node.url).alive
            assert (await post(url))[0] == 200  # at once by the others
            node.gate.set()
            node.thawed.set()
            await settled(proxy, node)
            await reach(lambda: node.aborted == 1)  # the router has hung up on it
            before = len(node.bodies)
            assert (await post(url))[0] == 200
            assert len(node.bodies) == before + 1

    run(test())


def test_frozen_in_the_middle_of_a_stream() -> None:
    async def test() -> None:
        async with (
            fleet(1, 1, health_timeout=0.2, timeout=60.0) as (proxy, url, _, [decode]),
            aiohttp.ClientSession() as session,
        ):
            decode.tokens, decode.token_gap = 1_000_000, 0.01
            body = {"model": "tiny", "prompt": PROMPT, "stream": True}
            async with session.post(url + COMPLETIONS, json=body) as answer:
                await answer.content.readany()
                decode.thawed.clear()
                text = await asyncio.wait_for(answer.text(), 10.0)
            assert json.loads(text.strip().rsplit("data: ", 1)[1])["error"]["type"] == "upstream_error"
            assert "[DONE]" not in text
            assert proxy.decode[0].unfinished == 0
            decode.thawed.set()

    run(test())


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_stands_still_behind_a_server_that_answers(stage: str) -> None:
    """Its health is good, so that nothing but the silence of its requests tells."""

    async def test() -> None:
        async with fleet(2, 2, timeout=0.8, stale_after=0.2) as (proxy, url, prefill, decode):
            node = await stage_at(stage, prefill, decode, proxy)
            task = asyncio.ensure_future(post(url))
            await reach(lambda: node.bodies)
            node.engine.clear()
            assert (await task)[0] == 200
            assert next(one for one in proxy.nodes if one.url == node.url).alive
            before = len(node.bodies)
            answers = await asyncio.gather(*(post(url) for _ in range(4)))
            assert [status for status, _ in answers] == [200] * 4
            assert len(node.bodies) == before  # nothing new goes there
            node.engine.set()

    run(test())


@pytest.mark.parametrize("text", [PROMPT, ["several", "texts"]])
def test_in_order_means_among_nodes_that_still_report(text: Any) -> None:
    """Without a prediction, and for prompts that cannot be counted; unless no other node is left."""

    async def test() -> None:
        async with fleet(2, 1, timeout=1.0, stale_after=0.1, deflect=False) as (proxy, url, prefill, _):
            for node in prefill:
                node.report = make_report(model=UNFITTED)
            await settled(proxy, *prefill)
            prefill[0].engine.clear()
            await reach(lambda: proxy.prefill[0].silent(time.monotonic()))
            answers = await asyncio.gather(*(post(url, prompt=text) for _ in range(6)))
            assert [status for status, _ in answers] == [200] * 6
            assert (len(prefill[0].bodies), len(prefill[1].bodies)) == (0, 6)
            await prefill[1].stop()
            await reach(lambda: not proxy.prefill[1].alive)
            task = asyncio.ensure_future(post(url, prompt=text))
            await reach(lambda: prefill[0].bodies)
            prefill[0].engine.set()
            assert (await task)[0] == 200

    run(test())


def test_held_requests_leave_a_prefill_node_whose_reports_stop() -> None:
    async def test() -> None:
        now = [0.0]
        nodes = [Node(name, PREFILL) for name in "ab"]
        decode = Node("d", DECODE)
        for node in (*nodes, decode):
            node.alive = True
        busy = make_report(prefills=(Prefill("x", 4096, 0), Prefill("y", 4096, 0)))
        config = DispatchConfig(deflect=False)
        dispatcher = Dispatcher(nodes, [decode], config, clock=lambda: now[0])
        nodes[0].observe(busy, 0.0)
        nodes[1].observe(make_report(model=UNFITTED, prefills=busy.prefills), 0.0)
        dispatcher.link.add(1e9, 1.0)
        waiting = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        failed_by_b = asyncio.ensure_future(dispatcher.place(Ticket("b", 100), {nodes[1]}))
        await reach(lambda: dispatcher.held() == 2)
        now[0] = 6.0
        nodes[1].observe(make_report(model=UNFITTED), 6.0)
        dispatcher.pump()
        assert (await asyncio.wait_for(waiting, 5)).node is nodes[1]
        # Rather a node that may stand still than none.
        assert (await asyncio.wait_for(failed_by_b, 5)).node is nodes[0]

    run(test())


def test_a_node_that_is_lost_twice_while_a_stream_is_being_ended() -> None:
    """What has begun is not begun again, however often the node is lost."""

    async def test() -> None:
        async with fleet(1, 2) as (proxy, url, _, decode), aiohttp.ClientSession() as session:
            for node in decode:
                node.tokens, node.token_gap = 1_000_000, 0.01
            say, saying = route_upstream._say, asyncio.Event()

            async def slowly(reply: Any, message: str, **more: Any) -> None:
                saying.set()
                await asyncio.sleep(0.3)  # as a client that does not read makes it wait
                await say(reply, message, **more)

            body = {"model": "tiny", "prompt": PROMPT, "stream": True}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(route_upstream, "_say", slowly)
                async with session.post(url + COMPLETIONS, json=body) as answer:
                    await answer.content.readany()
                    used = next(one for one in proxy.decode if one.legs)
                    used.lose("once")
                    await saying.wait()
                    used.lose("twice")
                    text = await answer.text()
            assert text.count('"upstream_error"') == 1
            assert sum(len(node.bodies) for node in decode) == 1

    run(test())


def test_a_call_to_a_node_that_was_lost_in_the_moment_of_being_chosen_is_not_made() -> None:
    """It would not be ended by that loss; a node that stands still would keep it until it goes on."""

    async def test() -> None:
        async def call() -> None:
            raise AssertionError("made")

        node = Node("n", DECODE)
        node.alive = True
        node.lose("gone")
        async with aiohttp.ClientSession() as session:
            with pytest.raises(Unanswered, match="n: lost before it was asked"):
                await Upstream(session, timeout=1.0).leg(node, call())

    run(test())


def test_half_an_event_is_not_passed_on() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (_, url, _, [decode]):
            decode.drop_after, decode.drop_inside = 2, True
            _, text = await post(url, stream=True)
            events = [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")]
            assert [next(iter(event)) for event in events] == ["choices", "choices", "error"]

    run(test())


def test_idle_connections_are_closed_before_the_server_would() -> None:
    """vLLM closes them after 5 s: a request sent in that moment would count as failed by the node."""

    async def test() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(route_proxy, "KEEP_ALIVE", 0.1)
            async with fleet(1, 1, settle=False, **UNASKED) as (_, url, _, [decode]):
                await post(url)
                assert decode.runner is not None
                assert decode.runner.server is not None
                await reach(lambda: not decode.runner.server.connections)
        assert route_proxy.KEEP_ALIVE < 5.0

    run(test())


def test_a_burst_over_a_death_is_answered_entirely() -> None:
    """None is lost between the death and the router's hearing of it."""

    async def test() -> None:
        async with fleet(2, 2) as (proxy, url, prefill, decode), aiohttp.ClientSession() as session:
            for node in (*prefill, *decode):
                node.tokens, node.token_gap = 5, 0.005
            for doomed in (prefill[0], decode[0]):
                tasks = [asyncio.ensure_future(send(session, url)) for _ in range(40)]
                await reach(lambda doomed=doomed: doomed.bodies)
                await doomed.stop()
                answers = await asyncio.gather(*tasks)
                assert [status for status, _ in answers] == [200] * 40
            assert [one.alive for one in proxy.nodes] == [False, True, False, True]

    run(test())
