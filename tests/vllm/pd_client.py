"""Requests to prefill and decode servers or the router in front of them, and what came of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from gimbal_runtime.tools.route_nodes import Node
from gimbal_runtime.tools.route_proxy import COMPLETIONS, Proxy
from gimbal_runtime.tools.route_records import Record

from .conftest import MODEL

TOKENS = 16


@dataclass(frozen=True)
class Seen:
    """An answer: its status, its tokens, whether it is complete, and what it says of an error."""

    status: int
    tokens: list[int]
    ended: bool = True
    error: str = ""


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
    """Status, and the tokens or the error of an answer in one piece."""
    async with session.post(url + COMPLETIONS, json=body_for(prompt, salt, **more)) as answer:
        reply = await answer.json()
        return answer.status, reply["choices"][0]["token_ids"] if answer.status == 200 else reply


async def complete_all(url: str, prompts: list[str], salt: str, **more: Any) -> list[tuple[int, Any]]:
    """All at once."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return list(
            await asyncio.gather(*(complete(session, url, prompt, salt, **more) for prompt in prompts))
        )


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: str, salt: str, *, stream: bool, **more: Any
) -> Seen:
    """One request, streamed or not."""
    if not stream:
        status, reply = await complete(session, url, prompt, salt, **more)
        return Seen(status, reply) if status == 200 else Seen(status, [], error=reply["error"]["message"])
    async with session.post(url + COMPLETIONS, json=body_for(prompt, salt, stream=True, **more)) as answer:
        if answer.status != 200:
            return Seen(answer.status, [], error=(await answer.json())["error"]["message"])
        tokens: list[int] = []
        error, ended = "", False
        for line in (await answer.text()).strip().split("\n\n"):
            if line == "data: [DONE]":
                ended = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                error = event["error"]["message"]
            else:
                tokens += event["choices"][0]["token_ids"]
        return Seen(200, tokens, ended, error)


async def ask_all(
    url: str, prompts: list[str], salt: str, *, stream: Callable[[int], bool], **more: Any
) -> list[Seen]:
    """All at once; `stream` says of each place whether that one is streamed."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return list(
            await asyncio.gather(
                *(
                    ask(session, url, prompt, salt, stream=stream(place), **more)
                    for place, prompt in enumerate(prompts)
                )
            )
        )


async def reach(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits until `condition` holds, without a pause between that and what comes next."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "not reached"
        await asyncio.sleep(0.005)


async def known(proxy: Proxy, *nodes: Node) -> None:
    await reach(lambda: all(node.report is not None for node in nodes or proxy.nodes))


def unfinished(proxy: Proxy, node: Node) -> list[Record]:
    """Attempts that are on a decode node."""
    return [entry for entry in proxy.records.recent() if entry.decode == node.url and not entry.outcome]


def retried(proxy: Proxy, node: Node) -> list[tuple[Record, Record]]:
    """Attempts that a node has failed before anything was answered, and the second one of each."""
    records = {entry.request: entry for entry in proxy.records.recent()}
    failed = [entry for entry in records.values() if entry.outcome == "Unanswered"]
    failed = [entry for entry in failed if node.url in (entry.node, entry.decode)]
    return [(entry, records[entry.request.removesuffix("-0") + "-1"]) for entry in failed]


async def check_state(url: str, proxy: Proxy, down: set[Node]) -> None:
    """What /health and /metrics tell of all nodes."""
    await reach(lambda: all(node.alive == (node not in down) for node in proxy.nodes))
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as answer:
            state = await answer.json()
        async with session.get(f"{url}/metrics") as answer:
            metrics = await answer.text()
    for node in proxy.nodes:
        up = node not in down
        assert state["nodes"][node.url]["alive"] == up
        assert bool(state["nodes"][node.url]["why"]) != up
        labels = f'{{node="{node.url}",role="{node.role}"}}'
        assert f"gimbal_route_node_up{labels} {float(up)}" in metrics
