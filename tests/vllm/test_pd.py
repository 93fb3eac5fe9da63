"""Prefill and decode servers behind `gimbal route`, on real vLLM: the same tokens on every path; none hangs.

Two of each. The last tests kill or stop one after the other under load, in the order in which they stand here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import aiohttp
from gimbal_runtime.node_report import NodeReport
from gimbal_runtime.tools import processes
from gimbal_runtime.tools.pd_servers import PdServers
from gimbal_runtime.tools.route_dispatch import DispatchConfig
from gimbal_runtime.tools.route_nodes import Node
from gimbal_runtime.tools.route_proxy import COMPLETIONS, Proxy, RouteSettings
from gimbal_runtime.tools.route_run import running
from gimbal_runtime.tools.route_warmup import warm_up_all
from gimbal_runtime.tools.server import VllmServer

from .conftest import MODEL, load_prompts
from .pd_client import (
    TOKENS,
    Seen,
    ask,
    ask_all,
    body_for,
    check_state,
    complete,
    complete_all,
    known,
    reach,
    retried,
    unfinished,
)

pytestmark = pytest.mark.vllm
PROMPTS = load_prompts(16)
LONG = [f"{place} " + " ".join(PROMPTS[place:] + PROMPTS[:place])[:1500] for place in range(len(PROMPTS))]
LONG_TOKENS = 400
"""Of answers that go on while something happens."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PdServers]:
    """Two prefill and two decode servers, warmed up so that all models of iterations are fitted."""
    with PdServers(MODEL, tmp_path_factory.mktemp("pd"), prefill=2, decode=2) as four:
        nodes = [Node(server.url, role) for role, group in _groups(four) for server in group]
        for node in nodes:
            node.alive = True
        asyncio.run(warm_up_all(nodes, 40))
        yield four


def _groups(servers: PdServers) -> list[tuple[str, list[VllmServer]]]:
    return [("prefill", servers.prefill), ("decode", servers.decode)]


def proxy_for(servers: PdServers, *, bandwidth: float | None = None, **dispatch: Any) -> Proxy:
    return Proxy(
        RouteSettings(
            prefill=tuple(server.url for server in servers.prefill),
            decode=tuple(server.url for server in servers.decode),
            dispatch=DispatchConfig(**dispatch),
            bandwidth=bandwidth,
            health_interval=0.2,
            report_interval=0.05,
            health_timeout=3.0,
            # Two cores that others use too: what matters here is where requests go, not how well it is predicted.
            max_fit_error=10.0,
        )
    )


@pytest.fixture(scope="module")
def alone(servers: PdServers) -> list[list[int]]:
    """The decode server's own answers, without router, transfer or chunks."""
    answers = asyncio.run(complete_all(servers.decode[0].url, PROMPTS, "alone"))
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    return [tokens for _, tokens in answers]


def test_transferred_prompts_give_the_tokens_of_a_single_server(servers: PdServers, alone: list[Any]) -> None:
    async def test() -> None:
        proxy = proxy_for(servers, deflect=False)
        async with running(proxy) as url:
            answers = await complete_all(url, PROMPTS, "transferred")
            assert answers == [(200, tokens) for tokens in alone]
            assert not any(record.deflected for record in proxy.records.recent())
            await asyncio.sleep(0.5)
            for record in proxy.records.recent():
                assert record.prefill is not None
                assert record.transfer is not None

    asyncio.run(test())
    # Transfers did happen: the decode servers' own logs count the tokens that they were given.
    for server in servers.decode:
        assert "Inject KV cache of" in server.log_path.read_text()


def test_deflected_prompts_give_the_same_tokens_in_the_chunks_planned(
    servers: PdServers, alone: list[Any]
) -> None:
    async def test() -> None:
        url = servers.decode[0].url
        async with aiohttp.ClientSession() as session:
            for place, prompt in enumerate(PROMPTS[:6]):
                fresh = f"({place}) {prompt}"  # in no cache
                _, expected = await complete(session, url, fresh, "whole")
                async with session.post(
                    f"{url}/tokenize", json={"model": MODEL.name, "prompt": fresh}
                ) as reply:
                    length = (await reply.json())["count"]
                chunks = [9] * (length // 9) + ([length % 9] if length % 9 else [])
                steps = (await _report(session, url)).steps
                arguments = {"gimbal_request": f"c{place}", "gimbal_chunks": chunks}
                status, tokens = await complete(session, url, fresh, "cut", vllm_xargs=arguments)
                assert (status, tokens) == (200, expected)
                report = await _report(session, url)
                assert report.steps - steps >= len(chunks) + TOKENS - 1
                assert report.computed[-1].request == f"c{place}"

    asyncio.run(test())


async def _report(session: aiohttp.ClientSession, url: str) -> NodeReport:
    async with session.get(f"{url}/gimbal/node") as answer:
        report = NodeReport.from_wire((await answer.json())["engines"][0])
    assert report is not None
    return report


def test_the_router_deflects_and_the_tokens_stay_the_same(servers: PdServers, alone: list[Any]) -> None:
    async def test() -> None:
        proxy = proxy_for(servers)
        async with running(proxy) as url:
            for node in proxy.nodes:
                while node.report is None or not node.as_decode(0.0).live:
                    await asyncio.sleep(0.05)
            proxy.link.add(1.0, 1.0)  # a link of a byte per second: whoever can is deflected
            answers = await complete_all(url, PROMPTS, "deflected")
            assert answers == [(200, tokens) for tokens in alone]
            reasons = {record.reason for record in proxy.records.recent()}
            assert "deflected" in reasons

    asyncio.run(test())


def test_aborted_half_way_and_asked_again(servers: PdServers, alone: list[Any]) -> None:
    async def test() -> None:
        for deflect in (False, True):
            proxy, salt = proxy_for(servers, deflect=deflect), f"aborted {deflect}"
            async with running(proxy) as url, aiohttp.ClientSession() as session:
                for place in (0, 3):
                    body = body_for(PROMPTS[place], salt, stream=True, max_tokens=512)
                    async with session.post(url + COMPLETIONS, json=body) as answer:
                        await answer.content.readany()
                answers = await asyncio.gather(
                    *(complete(session, url, PROMPTS[place], salt) for place in (0, 3))
                )
                assert answers == [(200, alone[0]), (200, alone[3])]
                for server in servers.servers:
                    for _ in range(100):
                        report = await _report(session, server.url)
                        if not report.resident:
                            break
                        await asyncio.sleep(0.05)
                    assert not report.resident  # the aborts have reached the engines

    asyncio.run(test())


def test_a_streamed_answer_has_the_same_tokens(servers: PdServers, alone: list[Any]) -> None:
    async def test() -> None:
        async with running(proxy_for(servers)) as url, aiohttp.ClientSession() as session:
            async with session.post(
                url + COMPLETIONS, json=body_for(PROMPTS[1], "streamed", stream=True)
            ) as answer:
                lines = (await answer.text()).strip().split("\n\n")
            assert lines[-1] == "data: [DONE]"
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            assert [token for event in events for token in event["choices"][0]["token_ids"]] == alone[1]

    asyncio.run(test())


@pytest.fixture(scope="module")
def long_alone(servers: PdServers) -> list[list[int]]:
    """The second decode server's own answers to the long prompts: it is the last one that is killed."""
    answers = asyncio.run(complete_all(servers.decode[1].url, LONG, "alone", max_tokens=LONG_TOKENS))
    assert [status for status, _ in answers] == [200] * len(LONG)
    return [tokens for _, tokens in answers]


def test_a_prefill_server_killed_under_load(servers: PdServers, long_alone: list[Any]) -> None:
    """Not one of its requests has begun to be answered: the other one computes them, and all are answered."""

    async def test() -> None:
        proxy, doomed = proxy_for(servers, deflect=False), servers.prefill[0].processes()
        killed, other = proxy.prefill
        async with running(proxy) as url:
            await known(proxy)
            load = asyncio.ensure_future(
                ask_all(url, LONG * 2, "p killed", stream=lambda place: place % 2 == 0)
            )
            await reach(lambda: killed.legs and proxy.dispatcher.held())
            processes.kill_all(doomed)
            answers = await asyncio.wait_for(load, 100)
            assert answers == [Seen(200, tokens[:TOKENS]) for tokens in long_alone * 2]
            again = retried(proxy, killed)
            assert again
            assert {(second.node, second.outcome) for _, second in again} == {(other.url, "200")}
            await check_state(url, proxy, {killed})

    asyncio.run(test())


def test_a_decode_server_killed_under_load(servers: PdServers, long_alone: list[Any]) -> None:
    """Streams that had begun there end with an error; all else is done again on the other one."""

    async def test() -> None:
        proxy, doomed = proxy_for(servers, bandwidth=1.0), servers.decode[0].processes()
        killed, other = proxy.decode
        async with running(proxy) as url:
            await known(proxy, proxy.prefill[1], *proxy.decode)

            async def begin(prompts: list[str], stream: bool, tokens: int) -> tuple[Any, Callable[[], Any]]:
                """Sends requests; their answers, and those of them that are on the server."""
                before = {entry.request for entry in proxy.records.recent()}
                load = asyncio.ensure_future(
                    ask_all(url, prompts, "d killed", stream=lambda _: stream, max_tokens=tokens)
                )
                await reach(lambda: len(proxy.records.recent()) == len(before) + len(prompts))
                names = {entry.request for entry in proxy.records.recent()} - before
                return load, lambda: [one for one in unfinished(proxy, killed) if one.request in names]

            whole, whole_here = await begin(LONG[:6], False, LONG_TOKENS)
            await reach(lambda: any(not one.deflected for one in whole_here()))
            streams, streams_here = await begin(LONG[6:10], True, LONG_TOKENS)
            await reach(lambda: any(one.ttft for one in streams_here()))
            rest, rest_here = await begin(LONG[10:], False, TOKENS)
            await reach(lambda: any(one.deflected and one.prefill is None for one in rest_here()))
            begun = sum(one.ttft is not None for one in streams_here())
            may_have_begun = streams_here()
            unanswered = [one for one in unfinished(proxy, killed) if one not in may_have_begun]
            assert begun
            assert {one.deflected for one in unanswered} == {False, True}
            processes.kill_all(doomed)

            answers = await asyncio.wait_for(asyncio.gather(whole, rest), 100)
            assert answers[0] == [Seen(200, tokens) for tokens in long_alone[:6]]
            assert answers[1] == [Seen(200, tokens[:TOKENS]) for tokens in long_alone[10:]]
            again = retried(proxy, killed)
            assert {*unanswered} <= {first for first, _ in again}
            assert {(second.decode, second.outcome) for _, second in again} == {(other.url, "200")}
            seen = await asyncio.wait_for(streams, 100)
            assert begun <= sum(bool(one.error) for one in seen) <= len(may_have_begun)
            for one, tokens in zip(seen, long_alone[6:10], strict=True):
                if one.error:
                    assert (one.status, one.ended, killed.url in one.error) == (200, False, True)
                    assert one.tokens == tokens[: len(one.tokens)] != []
                else:
                    assert one == Seen(200, tokens)
            await check_state(url, proxy, {proxy.prefill[0], killed})
            # And goes on with those that are left.
            answers = await asyncio.wait_for(ask_all(url, LONG, "after", stream=lambda _: True), 100)
            assert answers == [Seen(200, tokens[:TOKENS]) for tokens in long_alone]

    asyncio.run(test())


@contextlib.contextmanager
def frozen(members: list[Any]) -> Iterator[None]:
    """Stands still inside the block."""
    try:
        for process in members:
            process.suspend()
        yield
    finally:
        for process in members:
            process.resume()


def test_a_prefill_server_that_stands_still_under_load(servers: PdServers, long_alone: list[Any]) -> None:
    """Lost after two questions of 3 s; the decode server computes its prompts. It is used again when it goes on."""

    async def test() -> None:
        proxy, members = proxy_for(servers, deflect=False, hold_timeout=60.0), servers.prefill[1].processes()
        stopped, down = proxy.prefill[1], {proxy.prefill[0], proxy.decode[0]}
        async with running(proxy) as url:
            await known(proxy, stopped, proxy.decode[1])
            load = asyncio.ensure_future(ask_all(url, LONG, "p stopped", stream=lambda place: place % 2 == 0))
            await reach(lambda: stopped.legs and proxy.dispatcher.held())
            with frozen(members):
                answers = await asyncio.wait_for(load, 60)
                assert answers == [Seen(200, tokens[:TOKENS]) for tokens in long_alone]
                assert all(second.deflected for _, second in retried(proxy, stopped))
                assert retried(proxy, stopped)
                await check_state(url, proxy, {stopped, *down})
            await known(proxy, stopped)
            await check_state(url, proxy, down)
            answers = await asyncio.wait_for(ask_all(url, LONG[:1], "p goes on", stream=lambda _: True), 60)
            assert answers == [Seen(200, long_alone[0][:TOKENS])]
            assert proxy.records.recent()[-1].node == stopped.url

    asyncio.run(test())


def test_the_last_decode_server_stands_still(servers: PdServers, long_alone: list[Any]) -> None:
    async def test() -> None:
        proxy, members = proxy_for(servers), servers.decode[1].processes()
        stopped, down = proxy.decode[1], {proxy.prefill[0], proxy.decode[0]}
        async with running(proxy) as url, aiohttp.ClientSession() as session:
            await known(proxy, proxy.prefill[1], stopped)
            load = asyncio.ensure_future(
                ask_all(url, LONG[:8], "d stopped", stream=lambda place: place < 6, max_tokens=LONG_TOKENS)
            )
            # Three have begun, so one of the streams has.
            await reach(lambda: len([entry for entry in unfinished(proxy, stopped) if entry.ttft]) > 2)
            with frozen(members):
                seen = await asyncio.wait_for(load, 60)
                whole = [place for place, one in enumerate(seen) if one == Seen(200, long_alone[place])]
                failed = [
                    (place, one) for place, one in enumerate(seen) if place not in whole
                ]  # the rest was done
                assert any(one.status == 200 for _, one in failed)
                for place, one in failed:
                    assert one.status == 503 or (place < 6 and one.status == 200 and not one.ended)
                    assert stopped.url in one.error or "no decode node answers" in one.error
                await check_state(url, proxy, {stopped, *down})
                one = await asyncio.wait_for(ask(session, url, LONG[0], "none", stream=True), 5)
                assert (one.status, "no decode node answers" in one.error) == (503, True)
            await known(proxy, stopped)
            await check_state(url, proxy, down)
            answers = await asyncio.wait_for(ask_all(url, LONG[:4], "on", stream=lambda _: True), 60)
            assert answers == [Seen(200, tokens[:TOKENS]) for tokens in long_alone[:4]]

    asyncio.run(test())


def test_the_last_servers_killed_under_load(servers: PdServers, long_alone: list[Any]) -> None:
    """First the engine of the prefill server alone, whose API server fails its requests, then the decode server."""

    async def test() -> None:
        proxy, doomed = proxy_for(servers, hold_timeout=60.0), servers.decode[1].processes()
        [engine] = [one for one in servers.prefill[1].processes() if "EngineCore" in " ".join(one.cmdline())]
        async with running(proxy) as url:
            await known(proxy, proxy.prefill[1], proxy.decode[1])
            load = asyncio.ensure_future(ask_all(url, LONG, "engine killed", stream=lambda _: True))
            await reach(lambda: proxy.prefill[1].legs)
            processes.kill_all([engine])
            answers = await asyncio.wait_for(load, 100)
            assert answers == [Seen(200, tokens[:TOKENS]) for tokens in long_alone]
            await check_state(url, proxy, {*proxy.prefill, proxy.decode[0]})
            processes.kill_all(servers.prefill[1].processes())  # it does not end on SIGTERM any more
            load = asyncio.ensure_future(ask_all(url, LONG, "all killed", stream=lambda _: False))
            await reach(lambda: unfinished(proxy, proxy.decode[1]))
            processes.kill_all(doomed)
            answers = await asyncio.wait_for(load, 60)
            failed = [one for one in answers if one.status != 200]
            assert failed
            assert all(one.status == 503 and one.error for one in failed)
            await check_state(url, proxy, set(proxy.nodes))

    asyncio.run(test())
