"""An OpenAI-compatible server in front of prefill and decode servers (SPEC section 8).

A request's prompt is computed on a prefill node, then the request goes to a decode node; or it is deflected and
goes to a decode node at once, with a chunk schedule. When a node fails before anything was sent to the client, the
request is tried once more without that node.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from ..iteration_model import MAX_ERROR
from ..node_report import TBT_ARGUMENT, Computed
from .route_dispatch import DispatchConfig, Dispatcher, NoNode, Ticket
from .route_monitor import Monitor, stop
from .route_nodes import DECODE, PREFILL, Link, Node, alive
from .route_records import Record, Records
from .route_upstream import (
    Unanswered,
    Upstream,
    decode_body,
    error,
    extra_arguments,
    passed_headers,
    prefill_body,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ATTEMPTS = 2
MAX_BODY = 64 << 20
KEEP_ALIVE = 2.0
"""Seconds for which an idle connection to a node is kept. vLLM closes one after 5 s; a request that is sent in that
very moment gets no answer, and cannot be told from one that the node has failed."""


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Settings of the proxy.

    Attributes:
        prefill, decode: root addresses of the nodes.
        dispatch: of the dispatcher.
        bandwidth: of the link, bytes per second; None: measured.
        tbt_slo: seconds between tokens of requests that do not say; None: no limit.
        kv_params: `kv_transfer_params` of the prefill half, for connectors that ask for some.
        timeout: seconds without a byte until a node has failed a request.
        stale_after: seconds after which a node's report counts as missing.
        max_fit_error: relative error up to which a node's model of iterations is believed.
        health_interval, report_interval: seconds between questions to a node.
        health_timeout: seconds until a question whether a node lives has failed.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    bandwidth: float | None = None
    tbt_slo: float | None = None
    kv_params: Mapping[str, Any] | None = None
    timeout: float = 300.0
    stale_after: float = 5.0
    max_fit_error: float = MAX_ERROR
    health_interval: float = 1.0
    report_interval: float = 0.1
    health_timeout: float = 5.0


class Proxy:
    """The server's handlers and state; `app` is an aiohttp application.

    Args:
        settings: of the proxy.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self.settings = settings
        known = {"stale_after": settings.stale_after, "max_error": settings.max_fit_error}
        self.prefill = [Node(url, PREFILL, **known) for url in settings.prefill]
        self.decode = [Node(url, DECODE, **known) for url in settings.decode]
        self.link = Link(settings.bandwidth)
        self.dispatcher = Dispatcher(self.prefill, self.decode, settings.dispatch, link=self.link)
        self.records = Records(self.nodes)
        self._upstream: Upstream | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def nodes(self) -> list[Node]:
        """All nodes, prefill nodes first."""
        return [*self.prefill, *self.decode]

    def app(self) -> web.Application:
        """The application; its start asks every node once, so that the first request finds them."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post(COMPLETIONS, self._serve)
        app.router.add_post(CHAT, self._serve)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/debug/decisions", self._decisions)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        async with aiohttp.ClientSession(connector=connector) as session:
            settings = self.settings
            self._session = session
            self._upstream = Upstream(session, timeout=settings.timeout)
            monitors = [
                Monitor(
                    session,
                    node,
                    self._changed,
                    health_interval=settings.health_interval,
                    report_interval=settings.report_interval,
                    timeout=settings.health_timeout,
                )
                for node in self.nodes
            ]
            await asyncio.gather(*(monitor.check() for monitor in monitors))
            tasks = [asyncio.ensure_future(monitor.run()) for monitor in monitors]
            yield
            await stop(tasks)  # type: ignore[arg-type]

    def _changed(self, node: Node, completed: Sequence[Computed]) -> None:
        for entry in completed:
            record = self.records.computed(node, entry)
            size = node.report.kv_bytes_per_token if node.report is not None else None
            if record is not None and record.tokens is not None and record.transfer is not None and size:
                self.link.add(record.tokens * size, record.transfer)
        self.dispatcher.pump()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        arrival = time.monotonic()
        try:
            body = await request.json()
        except (ValueError, LookupError, RecursionError):  # no JSON, an unknown charset, too deep
            return self._answered("bad_request", error(400, "the body is no JSON", "invalid_request_error"))
        if not isinstance(body, dict):
            return self._answered(
                "bad_request", error(400, "the body is no JSON object", "invalid_request_error")
            )
        outcome = "client_gone"  # unless it turns out otherwise
        try:
            reply = await self._try(request, body, arrival)
            outcome = "answered" if reply.status < 400 else "refused" if reply.status < 500 else "no_node"
            return reply
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.records.requests.labels(outcome).inc()

    def _answered(self, outcome: str, reply: web.Response) -> web.Response:
        self.records.requests.labels(outcome).inc()
        return reply

    async def _try(self, request: web.Request, body: dict[str, Any], arrival: float) -> web.StreamResponse:
        """Serves a request, once more without the node that failed it."""
        name, tokens = uuid.uuid4().hex[:16], await self._count(body)
        counting = time.monotonic() - arrival
        single, tbt_slo = _is_single(body), self._tbt_slo(body)
        excluded: set[Node] = set()
        failures: list[str] = []
        for attempt in range(ATTEMPTS):
            ticket = Ticket(f"{name}-{attempt}", tokens, single, tbt_slo, counting)
            try:
                return await self._attempt(request, body, ticket, arrival, excluded)
            except Unanswered as failure:
                failures.append(str(failure))
                excluded.add(failure.node)
                self.records.retries.labels(failure.node.url).inc()
            except NoNode as failure:
                failures.append(str(failure))
                break
        return error(503, "no node could serve the request: " + "; ".join(failures), "service_unavailable")

    async def _attempt(
        self,
        request: web.Request,
        body: dict[str, Any],
        ticket: Ticket,
        arrival: float,
        excluded: set[Node],
    ) -> web.StreamResponse:
        placement = await self.dispatcher.place(ticket, excluded)
        record = self.records.decided(ticket, placement, arrival)
        try:
            if placement.chunks:
                beta = self.settings.dispatch.deflection.beta
                half = decode_body(body, ticket, chunks=placement.chunks, beta=beta)
                reply = await self._decode(request, placement.node, half, ticket, record)
            else:
                reply = await self._prefill_and_decode(
                    request, body, placement.node, ticket, record, excluded
                )
            record.outcome = str(reply.status)
            return reply
        except BaseException as failure:
            record.outcome = type(failure).__name__
            raise

    async def _prefill_and_decode(
        self,
        request: web.Request,
        body: dict[str, Any],
        node: Node,
        ticket: Ticket,
        record: Record,
        excluded: set[Node],
    ) -> web.StreamResponse:
        assert self._upstream is not None
        half = prefill_body(body, ticket, self.settings.kv_params)
        try:
            answer = await self._upstream.leg(
                node,
                self._upstream.prefill(node, request.path, half, passed_headers(request, ticket)),
            )
        finally:
            self._end(node, ticket)
        if isinstance(answer, web.Response):
            return answer  # the node refuses the request: so would the others
        decode = self.dispatcher.take_decode(ticket, excluded)
        return await self._decode(
            request, decode, decode_body(body, ticket, kv_params=answer), ticket, record
        )

    async def _decode(
        self, request: web.Request, node: Node, half: dict[str, Any], ticket: Ticket, record: Record
    ) -> web.StreamResponse:
        assert self._upstream is not None
        record.decode, record.decode_sent = node.url, time.monotonic()

        def on_first() -> None:
            node.first_token(ticket.name)
            self.records.first_token(record, time.monotonic())
            self.dispatcher.pump()

        headers = passed_headers(request, ticket)
        call = self._upstream.relay(request, node, request.path, half, headers, on_first)
        try:
            return await self._upstream.leg(node, call)
        finally:
            self._end(node, ticket)

    def _end(self, node: Node, ticket: Ticket) -> None:
        node.end(ticket.name)
        self.dispatcher.pump()

    async def _count(self, body: Mapping[str, Any]) -> int | None:
        """Tokens of the prompt, of all prompts together; None: not known."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return len(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(part, list) and part for part in prompt):
            return sum(len(part) for part in prompt)
        if not isinstance(prompt, str) and "messages" not in body:
            return None
        assert self._upstream is not None
        now = time.monotonic()
        asked = sorted(alive([*self.decode, *self.prefill]), key=lambda node: node.silent(now))
        for node in asked[:ATTEMPTS]:
            count = await self._upstream.count_tokens(node, body)
            if count is not None:
                return count
        return None

    def _tbt_slo(self, body: Mapping[str, Any]) -> float | None:
        asked = extra_arguments(body).get(TBT_ARGUMENT)
        known = isinstance(asked, (int, float)) and not isinstance(asked, bool)
        # An infinity, or an integer beyond a double, is JSON to Python but no number of seconds.
        known = known and 0.0 < asked < sys.float_info.max  # type: ignore[operator]
        return float(asked) if known else self.settings.tbt_slo  # type: ignore[arg-type]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The models of the first decode node that answers."""
        assert self._session is not None
        for node in alive(self.decode):
            try:
                timeout = aiohttp.ClientTimeout(total=self.settings.health_timeout)
                headers = passed_headers(request)
                async with self._session.get(
                    f"{node.url}/v1/models", timeout=timeout, headers=headers
                ) as answer:
                    if answer.status == 200:
                        return web.Response(body=await answer.read(), content_type="application/json")
            except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError):
                continue
        return error(503, "no decode node answers", "service_unavailable")

    async def _health(self, request: web.Request) -> web.Response:
        """200 while requests can be served; the state of every node either way."""
        now = time.monotonic()
        nodes = {
            node.url: {
                "role": node.role,
                "alive": node.alive,
                "known": node.fresh(now) is not None,
                "requests": node.unfinished,
                "why": node.why,
            }
            for node in self.nodes
        }
        serving = bool(alive(self.decode))
        return web.json_response(
            {"status": "ok" if serving else "no decode node answers", "nodes": nodes},
            status=200 if serving else 503,
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        page = self.records.page(self.dispatcher.held(), time.monotonic(), self.link.bandwidth)
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _decisions(self, request: web.Request) -> web.Response:
        """The last decisions, newest last; `?count=N` of them."""
        given = request.query.get("count")
        if given is not None and not given.isdecimal():
            return error(400, f"count: {given!r}; valid: an integer >= 0", "invalid_request_error")
        recent = self.records.recent(None if given is None else int(given))
        return web.json_response({"decisions": [record.as_dict() for record in recent]})


def _is_single(body: Mapping[str, Any]) -> bool:
    """One prompt and one answer."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(type(token) is int for token in prompt)
    return not several and body.get("n") in (None, 1) and body.get("best_of") in (None, 1)
