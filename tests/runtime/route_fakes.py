"""Small asynchronous servers that answer like vLLM, and misbehave on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from gimbal_runtime.iteration_model import FitQuality, IterationModel
from gimbal_runtime.node_report import PATH, Computed, NodeReport, Prefill
from gimbal_runtime.tools.route_dispatch import DispatchConfig
from gimbal_runtime.tools.route_proxy import COMPLETIONS, Proxy, RouteSettings
from gimbal_runtime.tools.route_run import running

QUICK = {
    "health_interval": 0.05,
    "report_interval": 0.02,
    "health_timeout": 1.0,
    "timeout": 5.0,
    "bandwidth": 1e9,
}
PROMPT = "one two three four five six seven eight"
SLOW = IterationModel(1.0, 1e-4, 1e-7, 1e-4, 1e-9)  # nobody would choose this node
UNFITTED = IterationModel(0.01, 0, 0, 0, 0, quality=FitQuality(0.1, 400.0, 0.0))
MODEL = IterationModel(0.01, 1e-4, 1e-7, 1e-4, 1e-9)  # given, not fitted: believed


def make_report(**changes: Any) -> NodeReport:
    """An idle node."""
    figures: dict[str, Any] = {
        "steps": 100,
        "model": MODEL,
        "prefills": (),
        "resident": frozenset(),
        "n_decode": 0,
        "kv_tokens": 0,
        "kv_free": 100_000,
        "tbt_slo": None,
        "deflected": (),
        "limits_chunks": True,
        "token_budget": 2048,
        "kv_bytes_per_token": 1000.0,
    }
    return NodeReport(**(figures | changes))


@dataclass(eq=False)
class FakeNode:
    """One server. Attributes are what it does; change them while it runs.

    `gate`: answers wait until it is set. `drop_after`: the connection breaks after that many streamed tokens,
    `drop_inside`: that many and half an event. `thawed`: while it is not set, the server stands still as if stopped
    by SIGSTOP; `engine`: the same of what is behind an API server that goes on answering. `raw`: a stream in so
    many pieces, after which the connection breaks. `stalls`: of an error no more comes than its headers.
    """

    status: int = 200
    models_status: int = 200
    report: NodeReport | None = field(default_factory=make_report)
    report_body: Any = None
    tokens: int = 3
    token_gap: float = 0.0
    drop_after: int | None = None
    drop_inside: bool = False
    error_event: bool = False
    raw: tuple[bytes, ...] = ()
    stalls: bool = False
    stalled: bool = False
    healthy: bool = True
    tokenizes: bool = True
    kv_params: dict[str, Any] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    engine: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    aborted: int = 0
    runner: web.AppRunner | None = None

    def __post_init__(self) -> None:
        for event in (self.gate, self.thawed, self.engine):
            event.set()

    async def start(self, port: int = 0) -> None:
        """Listens; gives `url` its value."""
        app = web.Application(middlewares=[self._stand_still])
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get(PATH, self._node)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        """As if killed: its connections break."""
        if self.runner is not None:
            runner, self.runner = self.runner, None
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def restart(self) -> None:
        """On the same port."""
        await self.start(int(self.url.rsplit(":", 1)[1]))

    @web.middleware
    async def _stand_still(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self.thawed.wait()
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        body = {"object": "list", "data": [{"id": "tiny", "max_model_len": 2048}]}
        return web.json_response(body if self.models_status == 200 else {}, status=self.models_status)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.json_response({"error": {"message": "no"}}, status=400)
        body = await request.json()
        text = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        return web.json_response({"count": len(text.split()), "tokens": []})

    async def _node(self, request: web.Request) -> web.Response:
        await self.engine.wait()
        if self.report_body is not None:
            return web.json_response(self.report_body)
        if self.report is None:
            return web.json_response({"error": "off"}, status=404)
        return web.json_response({"engines": [self.report.to_wire()]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        try:
            await self.gate.wait()
            await self.engine.wait()
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.status != 200:
            if self.stalls:
                await self._stall(request)
            return web.json_response({"error": {"message": f"from {self.url}"}}, status=self.status)
        text = [f"t{place} " for place in range(min(self.tokens, body.get("max_tokens") or self.tokens))]
        if not body.get("stream"):
            if self.drop_after is not None:
                return await self._broken(request)
            answer = {"choices": [{"text": "".join(text)}], "usage": {"completion_tokens": len(text)}}
            return web.json_response(answer | {"kv_transfer_params": self.kv_params})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await reply.prepare(request)
        for piece in self.raw:
            await reply.write(piece)
            await asyncio.sleep(0.02)
        if self.raw:
            request.transport.abort()
            return reply
        for place, token in enumerate(text):
            await self.thawed.wait()
            await self.engine.wait()
            if place == self.drop_after:
                if self.drop_inside:
                    await reply.write(b'data: {"choices": [{"te')
                    await asyncio.sleep(0.05)
                request.transport.abort()
                return reply
            if self.error_event:
                await reply.write(b'data: {"error": {"message": "engine dead", "code": 500}}\n\n')
                return reply
            await reply.write(b"data: " + json.dumps({"choices": [{"text": token}]}).encode() + b"\n\n")
            await asyncio.sleep(self.token_gap)
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _stall(self, request: web.Request) -> None:
        reply = web.StreamResponse(status=self.status, headers={"Content-Length": "1000"})
        await reply.prepare(request)
        await reply.write(b"{")
        self.stalled = True
        await asyncio.Event().wait()

    async def _broken(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await reply.prepare(request)
        await reply.write(b'{"choices": [')
        request.transport.abort()
        return reply

    def queue(self, *prefills: tuple[str, int, int], **changes: Any) -> None:
        """Its next reports have these prompts on it."""
        entries = tuple(Prefill(*prefill) for prefill in prefills)
        self.report = make_report(prefills=entries, **changes)

    def completed(self, *entries: tuple[str, float, float], **changes: Any) -> None:
        """Its next reports say that these prompts are complete."""
        self.report = make_report(computed=tuple(Computed(*entry) for entry in entries), **changes)


@contextlib.asynccontextmanager
async def fleet(
    prefill: int = 1,
    decode: int = 1,
    *,
    deflect: bool = True,
    hold: bool = True,
    hold_timeout: float = 5.0,
    settle: bool = True,
    **settings: Any,
) -> AsyncIterator[tuple[Proxy, str, list[FakeNode], list[FakeNode]]]:
    """A proxy in front of fake nodes: (proxy, its address, prefill nodes, decode nodes)."""
    nodes = [FakeNode() for _ in range(prefill + decode)]
    for node in nodes:
        await node.start()
    proxy = Proxy(
        RouteSettings(
            prefill=tuple(node.url for node in nodes[:prefill]),
            decode=tuple(node.url for node in nodes[prefill:]),
            dispatch=DispatchConfig(deflect=deflect, hold=hold, hold_timeout=hold_timeout),
            **(QUICK | settings),
        )
    )
    try:
        async with running(proxy) as url:
            if settle:
                await reach(lambda: all(node.report is not None for node in proxy.nodes))
            yield proxy, url, nodes[:prefill], nodes[prefill:]
    finally:
        for node in nodes:
            await node.stop()


async def reach(condition: Any, seconds: float = 10.0) -> None:
    """Waits until `condition` holds; fails when it does not."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "not reached"
        await asyncio.sleep(0.005)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def post(url: str, path: str = COMPLETIONS, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        return await send(session, url, path, **body)


async def send(session: Any, url: str, path: str = COMPLETIONS, **body: Any) -> tuple[int, Any]:
    default = {"model": "tiny"} | ({"prompt": PROMPT} if path == COMPLETIONS else {})
    async with session.post(url + path, json=default | body) as answer:
        text = await answer.text()
        return answer.status, text if body.get("stream") and answer.status == 200 else json.loads(text)


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


def prefer_prefill(*decode: FakeNode) -> None:
    for node in decode:
        node.report = make_report(model=SLOW)


async def settled(proxy: Any, *fakes: FakeNode) -> None:
    """Until the proxy has the fakes' reports as they are now."""
    by_url = {node.url: node for node in proxy.nodes}
    await reach(lambda: all(by_url[fake.url].report == fake.report for fake in fakes))
