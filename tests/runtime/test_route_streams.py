"""Streams that pass through `gimbal route`: whole events however they are cut, and none begun a second time."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import aiohttp
from gimbal_runtime.tools import route_events
from gimbal_runtime.tools.route_events import MAX_EVENT, Events
from gimbal_runtime.tools.route_nodes import DECODE, Node
from gimbal_runtime.tools.route_proxy import COMPLETIONS
from gimbal_runtime.tools.route_upstream import Upstream
from route_fakes import PROMPT, FakeNode, fleet, post, reach, run, settled

TOKEN = b'data: {"choices": [{"text": "t0 "}]}'
ERROR = b'data: {"error": {"message": "engine dead", "code": 500}}'


class Content:
    """Comes in given pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


async def read_all(*pieces: bytes) -> tuple[list[bytes], list[bool]]:
    """What is read of these pieces, and of each part whether it ends in the middle of an event."""
    events, parts, inside = Events(Content(*pieces)), [], []
    while part := await events.read():
        parts.append(part)
        inside.append(events.inside)
    assert await events.read() == b""
    return parts, inside


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n", b"\r"])
def test_events_are_whole_however_they_are_cut(line: bytes, size: int) -> None:
    text = line.join([TOKEN, b"", b": a comment", b"", b"event: x", b"data: 1", b"data: 2", b"", b""])
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    parts, inside = asyncio.run(read_all(*pieces))
    assert b"".join(parts) == text
    assert not any(inside)
    assert len(parts) == (1 if size == 1000 else 3)


def test_what_is_left_at_the_end_is_passed_on() -> None:
    parts, _ = asyncio.run(read_all(TOKEN + b"\n\nda", b"ta: [DO", b"NE]"))
    assert parts == [TOKEN + b"\n\n", b"data: [DONE]"]


def test_an_event_without_an_end_is_not_collected() -> None:
    piece = b"x" * (MAX_EVENT // 4)
    parts, inside = asyncio.run(read_all(*[piece] * 40, b"\n\n", TOKEN + b"\n\n"))
    assert b"".join(parts) == piece * 40 + b"\n\n" + TOKEN + b"\n\n"
    assert max(map(len, parts)) <= MAX_EVENT + len(piece)
    assert inside == [True] * (len(parts) - 2) + [False] * 2


async def deflecting(proxy: Any, prefill: FakeNode, decode: list[FakeNode]) -> None:
    """The next request is deflected."""
    prefill.queue(("x", 50_000, 0))
    await settled(proxy, prefill, *decode)


@pytest.mark.parametrize(
    "raw",
    [
        (TOKEN[:20],),  # and then the connection breaks
        (TOKEN, b"\n"),
        (ERROR[:12], ERROR[12:] + b"\n\n"),
        (ERROR + b"\n", b"\ndata: [DONE]\n\n"),
    ],
)
def test_before_the_first_whole_event_another_node_may_try(raw: tuple[bytes, ...]) -> None:
    async def test() -> None:
        async with fleet(1, 2) as (proxy, url, [prefill], decode):
            await deflecting(proxy, prefill, decode)
            decode[0].raw = raw
            status, text = await post(url, stream=True)
            assert (status, len(decode[0].bodies), len(decode[1].bodies)) == (200, 1, 1)
            assert "t0" in text
            assert "error" not in text
            first, second = proxy.records.recent()
            assert (first.ttft, first.outcome, second.outcome) == (None, "Unanswered", "200")

    run(test())


def test_an_error_can_be_read_behind_an_event_that_was_passed_on_in_parts() -> None:
    async def test() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(route_events, "MAX_EVENT", 30)
            async with fleet(1, 1) as (_, url, _, [decode]):
                decode.raw = (TOKEN + b"\n\n", b"data: " + b"x" * 40)
                _, text = await post(url, stream=True)
            first, part, last = text.strip().split("\n\n")
            assert (first, part) == (TOKEN.decode(), "data: " + "x" * 40)
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == 502

    run(test())


def test_a_node_that_is_lost_and_found_at_once_does_not_get_a_begun_stream_again() -> None:
    async def test() -> None:
        async with fleet(1, 2) as (proxy, url, _, decode), aiohttp.ClientSession() as session:
            for node in decode:
                node.tokens, node.token_gap = 1_000_000, 0.01
            body = {"model": "tiny", "prompt": PROMPT, "stream": True}
            async with session.post(url + COMPLETIONS, json=body) as answer:
                await answer.content.readany()
                used = next(one for one in proxy.decode if one.legs)
                used.lose("gone")
                used.alive = True  # another question to it is answered in that very moment
                text = await asyncio.wait_for(answer.text(), 10.0)
            assert text.count('"upstream_error"') == 1
            assert text.strip().rsplit("\n\n", 1)[-1].startswith('data: {"error"')
            assert sum(len(node.bodies) for node in decode) == 1
            await reach(lambda: all(not one.legs and not one.unfinished for one in proxy.nodes))

    run(test())


def test_a_client_that_leaves_a_stream_ends_the_call_to_the_node() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (proxy, url, _, [decode]), aiohttp.ClientSession() as session:
            decode.tokens, decode.token_gap = 1_000_000, 0.01
            body = {"model": "tiny", "prompt": PROMPT, "stream": True}
            async with session.post(url + COMPLETIONS, json=body) as answer:
                await answer.content.readany()
            await reach(lambda: decode.aborted == 1)
            await reach(lambda: all(not one.legs and not one.unfinished for one in proxy.nodes))
            await reach(lambda: 'outcome="client_gone"} 1.0' in proxy.records.page(0, 0.0).decode())

    run(test())


def test_a_server_error_whose_text_does_not_come_leaves_no_connection_behind() -> None:
    async def test() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what["message"]))
        async with fleet(1, 2, health_interval=60.0) as (proxy, url, [prefill], decode):
            await deflecting(proxy, prefill, decode)
            decode[0].status, decode[0].stalls = 500, True
            task = asyncio.ensure_future(post(url))
            await reach(lambda: decode[0].stalled)
            await asyncio.sleep(0.05)
            proxy.decode[0].lose("gone")
            assert (await task)[0] == 200
        assert complaints == []

    run(test())


@pytest.mark.parametrize("ticks", range(1, 5))
def test_a_call_that_fails_in_the_moment_in_which_the_client_leaves_complains_to_nobody(ticks: int) -> None:
    async def test() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what["message"]))

        async def call() -> None:
            await asyncio.sleep(0)
            raise aiohttp.ClientError("no")

        node = Node("n", DECODE)
        node.alive = True
        async with aiohttp.ClientSession() as session:
            leg = asyncio.ensure_future(Upstream(session, timeout=1.0).leg(node, call()))
            for _ in range(ticks):
                await asyncio.sleep(0)
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
            assert not node.legs
            del leg
            gc.collect()
        assert complaints == []

    run(test())


def test_an_error_of_ours_is_not_counted_as_a_client_that_has_gone() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (proxy, url, _, _), aiohttp.ClientSession() as session:

            async def fail(*arguments: Any) -> Any:
                raise RuntimeError("no")

            proxy._try = fail  # type: ignore[method-assign]
            async with session.post(url + COMPLETIONS, json={"prompt": PROMPT}) as answer:
                assert answer.status == 500
            page = proxy.records.page(0, 0.0).decode()
            assert 'gimbal_route_requests_total{outcome="failed"} 1.0' in page
            assert "client_gone" not in page

    run(test())
