"""Calls from the router to the nodes: the bodies of both halves of a request, answers passed on as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from ..node_report import (
    BETA_ARGUMENT,
    CHUNKS_ARGUMENT,
    REQUEST_ARGUMENT,
    TBT_ARGUMENT,
    TRANSFERRED_ARGUMENT,
)
from .route_dispatch import Ticket
from .route_events import Events
from .route_nodes import Node

EXTRA = "vllm_xargs"
_PASSED_ON = ("Authorization", "Accept", "Accept-Language", "User-Agent")
_ONE_ANSWER = ("stream_options", "min_tokens", "best_of", "use_beam_search")
_OURS = (CHUNKS_ARGUMENT, BETA_ARGUMENT, TRANSFERRED_ARGUMENT)
"""What a router decides: a client's word on it is not passed on."""

Result = TypeVar("Result")


class Unanswered(Exception):
    """A node has failed a request before anything was sent to the client: another one may try.

    Attributes:
        node: the one that failed.
    """

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(f"{node.url}: {why}")
        self.node = node


def error(status: int, message: str, kind: str) -> web.Response:
    """An error in the form of the OpenAI API."""
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


def extra_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request's extra arguments; empty: it has none."""
    given = body.get(EXTRA)
    return dict(given) if isinstance(given, dict) else {}


def prefill_body(
    body: Mapping[str, Any], ticket: Ticket, kv_params: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The half of a request that a prefill node computes: the prompt and one token, which is thrown away."""
    half = {name: value for name, value in body.items() if name not in _ONE_ANSWER}
    half |= {"stream": False, "max_tokens": 1, "n": 1}
    if "max_completion_tokens" in half:
        half["max_completion_tokens"] = 1
    if kv_params:
        half["kv_transfer_params"] = dict(kv_params)
    return half | {EXTRA: _named(body, ticket)}


def decode_body(
    body: Mapping[str, Any],
    ticket: Ticket,
    *,
    chunks: tuple[int, ...] = (),
    beta: float = 1.0,
    kv_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a decode node gets: the request with its chunk schedule, or told that its KV cache is there.

    Args:
        body: of the client's request.
        ticket: its name and length.
        chunks: prompt tokens of each iteration; empty: the prompt was computed by a prefill node.
        beta: share of the strictest time between tokens that such an iteration may take.
        kv_params: what that node has answered for the transfer.
    """
    half = dict(body)
    if kv_params:
        half["kv_transfer_params"] = dict(kv_params)
    mark: dict[str, Any] = {TRANSFERRED_ARGUMENT: 1}
    if chunks:
        mark = {CHUNKS_ARGUMENT: list(chunks), BETA_ARGUMENT: beta}
    return half | {EXTRA: _named(body, ticket) | mark}


def _named(body: Mapping[str, Any], ticket: Ticket) -> dict[str, Any]:
    given = {name: value for name, value in extra_arguments(body).items() if name not in _OURS}
    named = given | {REQUEST_ARGUMENT: ticket.name}
    return named if ticket.tbt_slo is None else named | {TBT_ARGUMENT: ticket.tbt_slo}


class Upstream:
    """HTTP client of the router.

    Args:
        session: shared by all calls.
        timeout: seconds without a byte until a node has failed a request.
    """

    def __init__(self, session: aiohttp.ClientSession, *, timeout: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(5.0, timeout), sock_read=timeout)

    async def leg(self, node: Node, call: Coroutine[Any, Any, Result]) -> Result:
        """Runs a call to a node; it ends when the node is lost, or when the client has gone away.

        Raises:
            Unanswered: the node was lost, or did not answer properly.
        """
        if not node.alive:  # its loss, which ends the calls to it, is over
            call.close()
            raise Unanswered(node, f"lost before it was asked ({node.why})")
        task = asyncio.ensure_future(call)
        node.legs.add(task)
        task.add_done_callback(node.legs.discard)
        try:
            await asyncio.wait({task})
        except BaseException:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.cancelled():
            raise Unanswered(node, f"lost while it was computing ({node.why})")
        try:
            return task.result()
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as failure:
            raise Unanswered(node, str(failure) or type(failure).__name__) from failure

    async def prefill(
        self, node: Node, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> web.Response | dict[str, Any] | None:
        """Has a prompt computed; the transfer's parameters if there are any, or the node's refusal."""
        async with self._post(node, path, body, headers) as answer:
            data = await answer.read()
            if answer.status != 200:
                return _passed(answer, data)
            try:
                params = json.loads(data).get("kv_transfer_params")
            except (ValueError, AttributeError) as failure:
                raise Unanswered(node, "its answer is no JSON object") from failure
            return params if isinstance(params, dict) else None

    async def relay(
        self,
        request: web.Request,
        node: Node,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        on_first: Callable[[], None],
    ) -> web.StreamResponse:
        """Passes a request on and the answer back, byte for byte; calls `on_first` at a stream's first event."""
        async with self._post(node, path, body, headers) as answer:
            if answer.status != 200 or not answer.content_type.startswith("text/event-stream"):
                return _passed(answer, await answer.read())
            events = Events(answer.content)
            first = await events.read()
            if not first or first.startswith(b'data: {"error"'):
                raise Unanswered(
                    node, "its stream ended before the first token" if not first else _text(first)
                )
            on_first()
            reply = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            reply.headers["Cache-Control"] = "no-cache"
            await self._stream(request, node, events, first, reply)
            return reply

    async def _stream(
        self,
        request: web.Request,
        node: Node,
        events: Events,
        part: bytes,
        reply: web.StreamResponse,
    ) -> None:
        """Too late for another node from here on: what goes wrong is told in the stream, which then ends."""
        try:
            await reply.prepare(request)
            while part:
                await reply.write(part)
                part = await events.read()
            return
        except asyncio.CancelledError:
            # Not `node.alive`: by now it may be back.
            if asyncio.current_task() in node.legs:
                raise  # the client has gone away
            why = f"lost while it was answering ({node.why})"
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as failure:
            why = str(failure) or type(failure).__name__
        # Lost while the client makes us wait, the node must not make this look like a call to be retried.
        node.legs.discard(asyncio.current_task())  # type: ignore[arg-type]
        await _say(reply, f"{node.url}: {why}", inside=events.inside)

    def _post(self, node: Node, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        return _Answer(
            node, self._session.post(node.url + path, json=body, headers=headers, timeout=self._timeout)
        )

    async def count_tokens(self, node: Node, body: Mapping[str, Any]) -> int | None:
        """Length of a prompt by a node's own tokenizer and chat template; None: it does not say."""
        names = ("model", "prompt", "messages", "add_special_tokens", "tools", "chat_template_kwargs")
        asked = {name: body[name] for name in names if name in body}
        try:
            async with self._session.post(
                f"{node.url}/tokenize", json=asked, timeout=aiohttp.ClientTimeout(total=5.0)
            ) as answer:
                count = (await answer.json())["count"] if answer.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError, ValueError, KeyError, TypeError):
            return None
        return count if type(count) is int and count > 0 else None


class _Answer:
    """An answer of a node as a context manager; a server error, or no answer, is `Unanswered`."""

    def __init__(self, node: Node, call: Any) -> None:
        self._node, self._call = node, call

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            answer: aiohttp.ClientResponse = await self._call.__aenter__()
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as failure:
            raise Unanswered(self._node, str(failure) or type(failure).__name__) from failure
        if answer.status >= 500:
            try:
                text = _text(await answer.content.read(2000))
            finally:
                answer.close()
            raise Unanswered(self._node, f"status {answer.status}: {text}")
        return answer

    async def __aexit__(self, *exception: Any) -> None:
        await self._call.__aexit__(*exception)


def passed_headers(request: web.Request, ticket: Ticket | None = None) -> dict[str, str]:
    """Headers of a call on behalf of a client, and for a request's sake its name."""
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    return headers if ticket is None else headers | {"X-Request-Id": ticket.name}


def _passed(answer: aiohttp.ClientResponse, data: bytes) -> web.Response:
    kind = answer.headers.get("Content-Type", "application/octet-stream")
    return web.Response(body=data, status=answer.status, headers={"Content-Type": kind})


def _text(data: bytes) -> str:
    return data.decode(errors="replace").strip()[:500]


async def _say(reply: web.StreamResponse, message: str, *, inside: bool) -> None:
    """An error event as the last one of a stream; `inside`: half of another one stands before it."""
    event = {"error": {"message": message, "type": "upstream_error", "param": None, "code": 502}}
    try:
        await reply.write((b"\n\n" if inside else b"") + b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply.write_eof()
    except (ConnectionError, aiohttp.ClientError):
        return  # the client has gone as well
