"""Asks the nodes whether they live and what they do, for as long as the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from ..node_report import PATH, Computed, NodeReport
from .route_nodes import Node

logger = logging.getLogger("gimbal.route")

REFUSED = 1
SILENT = 2
"""Failed questions in a row after which a node is lost: one where nothing listens any more, two of other kinds."""
_OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What this process lacks says nothing of a node. All of them would be lost, and every call to them ended."""


class Monitor:
    """Questions to one node.

    Args:
        session: HTTP client.
        node: that is kept up to date.
        on_change: called when the node is lost or found, and whenever it was asked for a report, with the prompts
            completed.
        health_interval, report_interval: seconds between questions.
        timeout: seconds until a question has failed. A report comes between two iterations, so the time for it
            is bounded by the node's `stale_after` instead.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        node: Node,
        on_change: Callable[[Node, list[Computed]], None],
        *,
        health_interval: float = 1.0,
        report_interval: float = 0.1,
        timeout: float = 5.0,
    ) -> None:
        self._session, self._node, self._on_change = session, node, on_change
        self._health_interval, self._report_interval = health_interval, report_interval
        self._timeout = timeout
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self._watch(), self._ask())

    async def _watch(self) -> None:
        while True:
            await self._safely(self.check)
            await asyncio.sleep(self._health_interval)

    async def _safely(self, question: Callable[[], Awaitable[None]]) -> None:
        """An error of ours must not end the questions: the node would seem to be what it was for ever."""
        try:
            await question()
        except Exception:
            logger.exception("%s: a question to the node failed", self._node.url)

    async def check(self) -> None:
        """Asks once whether the node lives."""
        node = self._node
        why, refused = "", False
        try:
            async with self._session.get(f"{node.url}/health", timeout=_total(self._timeout)) as answer:
                if answer.status != 200:
                    why = f"/health answers {answer.status}"
        except aiohttp.ClientConnectorError as failure:
            if failure.errno in _OUR_OWN:
                node.why = str(failure)
                return
            why, refused = str(failure), failure.errno == errno.ECONNREFUSED
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as failure:
            why = str(failure) or f"/health is silent for {self._timeout} s"
        if not why:
            self._failures = 0
            if not node.alive:
                node.alive, node.why = True, "no report yet"
                logger.info("%s answers", node.url)
                self._on_change(node, [])
            return
        self._failures += 1
        if self._failures >= (REFUSED if refused else SILENT) and node.alive:
            logger.warning("%s is lost: %s", node.url, why)
            node.lose(why)
            self._on_change(node, [])
        elif not node.alive:
            node.why = why

    async def _ask(self) -> None:
        while True:
            if self._node.alive:
                await self._safely(self._report)
            await asyncio.sleep(self._report_interval)

    async def _report(self) -> None:
        node, report = self._node, None
        try:
            async with self._session.get(f"{node.url}{PATH}", timeout=_total(node.stale_after)) as answer:
                if answer.status == 200:
                    report = _only_engine(await answer.json())
                    node.why = "" if report is not None else "its report is not one of a single engine"
                else:
                    node.why = f"{PATH} answers {answer.status}: GIMBAL_NODE_STATISTICS=1 is not set there?"
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError, ValueError) as failure:
            node.why = f"no report: {failure or type(failure).__name__}"
            # A connection that breaks is often the first sign of a server's end.
            if not isinstance(failure, asyncio.TimeoutError):
                await self.check()
        if node.alive:  # without a report as well: the last one may have become too old
            self._on_change(node, [] if report is None else node.observe(report, time.monotonic()))


def _only_engine(body: Any) -> NodeReport | None:
    """The report of a server's one engine. Several engines behind one address choose among themselves: what one
    of them has to do says nothing about a request's time there."""
    engines = body.get("engines") if isinstance(body, dict) else None
    if not isinstance(engines, list) or len(engines) != 1:
        return None
    return NodeReport.from_wire(engines[0])


def _total(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


async def stop(tasks: list[asyncio.Task[None]]) -> None:
    """Ends tasks and waits until they have."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
