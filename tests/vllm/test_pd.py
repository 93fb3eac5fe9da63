"""Prefill and decode servers behind `gimbal route`, on real vLLM: the same tokens on every path; none hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import aiohttp
from gimbal_runtime.node_report import NodeReport
from gimbal_runtime.tools.pd_servers import PdServers
from gimbal_runtime.tools.route_dispatch import DispatchConfig
from gimbal_runtime.tools.route_nodes import Node
from gimbal_runtime.tools.route_proxy import COMPLETIONS, Proxy, RouteSettings
from gimbal_runtime.tools.route_run import running
from gimbal_runtime.tools.route_warmup import warm_up_all

from .conftest import MODEL, load_prompts

pytestmark = pytest.mark.vllm
TOKENS = 16
PROMPTS = load_prompts(16)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PdServers]:
    """One prefill and one decode server, warmed up so that both models of iterations are fitted."""
    with PdServers(MODEL, tmp_path_factory.mktemp("pd")) as pair:
        nodes = [Node(server.url, role) for role, group in _groups(pair) for server in group]
        for node in nodes:
            node.alive = True
        asyncio.run(warm_up_all(nodes, 40))
        yield pair


def _groups(pair: PdServers) -> list[tuple[str, list[Any]]]:
    return [("prefill", pair.prefill), ("decode", pair.decode)]


def proxy_for(pair: PdServers, **dispatch: Any) -> Proxy:
    return Proxy(
        RouteSettings(
            prefill=tuple(server.url for server in pair.prefill),
            decode=tuple(server.url for server in pair.decode),
            dispatch=DispatchConfig(**dispatch),
            health_interval=0.2,
            report_interval=0.05,
            # Two cores that others use too: what matters here is where requests go, not how well it is predicted.
            max_fit_error=10.0,
        )
    )


def body_for(prompt: str, salt: str, **more: Any) -> dict[str, Any]:
    """A request; only those of one `salt` share cached prefixes."""
    return {
        "model": MODEL.name,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    } | more


async def complete(
    session: aiohttp.ClientSession, url: str, prompt: str, salt: str, **more: Any
) -> tuple[int, Any]:
    async with session.post(url + COMPLETIONS, json=body_for(prompt, salt, **more)) as answer:
        reply = await answer.json()
        return answer.status, reply["choices"][0]["token_ids"] if answer.status == 200 else reply


async def complete_all(url: str, prompts: list[str], salt: str, **more: Any) -> list[tuple[int, Any]]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return list(
            await asyncio.gather(*(complete(session, url, prompt, salt, **more) for prompt in prompts))
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
    # Transfers did happen: the decode server's own log counts the tokens that it was given.
    assert "Inject KV cache of" in Path(servers.decode[0].log_path).read_text()


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


def test_killed_servers_under_load_leave_no_request_hanging(servers: PdServers, alone: list[Any]) -> None:
    """Last: first the prefill server dies, then the decode server."""

    async def test() -> None:
        proxy = proxy_for(servers, hold_timeout=60.0)
        async with running(proxy) as url:
            await asyncio.sleep(0.5)
            load = asyncio.ensure_future(complete_all(url, PROMPTS * 2, "killed"))
            await asyncio.sleep(0.15)
            _kill(servers.prefill[0])
            answers = await asyncio.wait_for(load, 100)
            for place, (status, tokens) in enumerate(answers):
                assert status in (200, 503)
                if status == 200:
                    assert tokens == alone[place % len(PROMPTS)]
            assert sum(status == 200 for status, _ in answers) > len(PROMPTS)  # the decode server goes on
            load = asyncio.ensure_future(complete_all(url, PROMPTS * 2, "killed too", max_tokens=64))
            await asyncio.sleep(0.3)
            _kill(servers.decode[0])
            answers = await asyncio.wait_for(load, 60)
            failed = [reply for status, reply in answers if status != 200]
            assert failed
            assert all(reply["error"]["code"] == 503 for reply in failed)

    asyncio.run(test())


def _kill(server: Any) -> None:
    """As the kernel would: every process of the server, none of them asked."""
    for process in server.processes():
        os.kill(process.pid, signal.SIGKILL)
