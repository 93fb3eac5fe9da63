"""Which node serves a request, and when: the policy of `gimbal_runtime.deflection` over the nodes' reports.

Requests for a prefill node are held here while that node has enough to do, and looked at again when a decode node
has become free: in a burst every decode node has a deflected prompt in flight when a request arrives.
Held requests are sent in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ..deflection import DeflectionConfig, DeflectionRouter, Route
from .route_nodes import Link, Node, Sent, alive

DEPTH = 2
RESERVE_SECONDS = 0.1
"""A prefill node always has `DEPTH` requests, or work for `RESERVE_SECONDS` besides the first of them. With less it
would stand still after an iteration until a call has arrived; what is more can still be deflected here."""
RECONSIDERED = 32
"""Held requests per prefill node that are looked at again."""


class NoNode(Exception):
    """No node can serve the request; the message says why."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through the router.

    Attributes:
        name: unique, also among the attempts at one request.
        tokens: of its prompt; None: not known.
        single: one prompt and one answer; others are not deflected.
        tbt_slo: seconds between tokens that it asks for; None: none.
        counting: seconds that it took to count the tokens.
    """

    name: str
    tokens: int | None
    single: bool = True
    tbt_slo: float | None = None
    counting: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request's prompt is computed.

    Attributes:
        node: a prefill node, or the decode node to which it is deflected.
        chunks: prompt tokens of each iteration when deflected, else empty.
        route: the policy's decision; None: the prompt's length is not known, prefill nodes in order.
        seconds: of the decision itself.
        held: seconds that the request was held.
    """

    node: Node
    chunks: tuple[int, ...]
    route: Route | None
    seconds: float
    held: float = 0.0


@dataclass(slots=True, eq=False)
class _Held:
    ticket: Ticket
    excluded: Collection[Node]
    since: float
    result: asyncio.Future[Placement | None]
    placement: Placement | None = None  # on the prefill node that it waits for


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Settings of the dispatcher.

    Attributes:
        deflection: constants of the policy.
        deflect: whether prompts may be computed on decode nodes while a prefill node answers.
        hold: whether requests are held and looked at again.
        hold_timeout: seconds that a request waits for a node that can take it while a decode node answers.

    Raises:
        ValueError: a negative `hold_timeout`.
    """

    deflection: DeflectionConfig = field(default_factory=DeflectionConfig)
    deflect: bool = True
    hold: bool = True
    hold_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.hold_timeout >= 0.0:
            raise ValueError(f"hold_timeout: {self.hold_timeout!r}; valid: seconds >= 0")


class Dispatcher:
    """Places requests on nodes; used on one event loop.

    Args:
        prefill, decode: nodes, in their fixed order.
        config: settings.
        link: between them.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        prefill: Sequence[Node],
        decode: Sequence[Node],
        config: DispatchConfig | None = None,
        *,
        link: Link | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prefill, self.decode = tuple(prefill), tuple(decode)
        self.config = config if config is not None else DispatchConfig()
        self.link = link if link is not None else Link()
        self._clock = clock
        self._router = DeflectionRouter(self.config.deflection)
        self._by_url = {node.url: node for node in (*prefill, *decode)}
        self._held: dict[Node, deque[_Held]] = {node: deque() for node in self.prefill}
        self._stranded: deque[_Held] = deque()
        self._order = 0

    def held(self) -> int:
        """Requests that are held now."""
        return len(self._stranded) + sum(len(queue) for queue in self._held.values())

    async def place(self, ticket: Ticket, excluded: Collection[Node] = ()) -> Placement:
        """Waits until a node takes the request, and books it there: the caller ends it by `Node.end`.

        Args:
            ticket: the request.
            excluded: nodes that have failed it.

        Raises:
            NoNode: no decode node answers, or none could take it within `hold_timeout`.
        """
        started = self._clock()
        patience = self.config.hold_timeout  # of the time in which no node can take it, not of a queue's
        while True:
            if not alive(self.decode, excluded):
                raise NoNode("no decode node answers")
            placement = self._decide(ticket, excluded)
            if placement is not None and (placement.chunks or not self.config.hold):
                return self._book(ticket, placement, started)
            entry = _Held(
                ticket, excluded, started, asyncio.get_running_loop().create_future(), placement=placement
            )
            queue = self._stranded if placement is None else self._held[placement.node]
            queue.append(entry)
            self.pump()
            began = self._clock()
            outcome = await self._wait(entry, queue, patience if placement is None else None)
            if outcome is not None:
                return outcome
            if placement is None:
                patience = max(0.0, patience - (self._clock() - began))

    async def _wait(self, entry: _Held, queue: deque[_Held], patience: float | None) -> Placement | None:
        """The placement of a held request; None: it has to be decided again. `patience` in seconds, None: any."""
        try:
            # Not `wait_for`: before Python 3.12 it forgets a client that goes away in the moment of the result.
            await asyncio.wait({entry.result}, timeout=patience)
        except BaseException:
            self._abandon(entry, queue)
            raise
        if entry.result.done():
            return entry.result.result()
        self._abandon(entry, queue)
        raise NoNode("no prefill node answers, and no decode node could take the prompt in time")

    def _abandon(self, entry: _Held, queue: deque[_Held]) -> None:
        """The request has gone away; one that was placed in that very moment leaves its node again."""
        if entry in queue:
            queue.remove(entry)
        if not entry.result.done():
            entry.result.cancel()
        elif (placement := entry.result.result()) is not None:
            placement.node.end(entry.ticket.name)

    def pump(self) -> None:
        """To be called when anything has changed: sends what may be sent, looks again at what waits."""
        decoders_lost = len(alive(self.decode)) < len(self.decode)
        for node, queue in self._held.items():
            if decoders_lost or not node.alive or node.silent(self._clock()):
                self._leave(node, queue)
            while queue and self._has_room(node):
                entry = queue.popleft()
                assert entry.placement is not None
                entry.result.set_result(self._book(entry.ticket, entry.placement, entry.since))
        if self.config.deflect and self.config.hold:
            for node, queue in self._held.items():
                self._reconsider(node, queue)
        hopeful = bool(self._stranded) and self._anyone_can_take()
        for entry in tuple(self._stranded):
            decodable = alive(self.decode, entry.excluded)
            if not decodable or (hopeful and self._decide(entry.ticket, entry.excluded)):
                self._stranded.remove(entry)
                _finish(entry, None)

    def take_decode(self, ticket: Ticket, excluded: Collection[Node] = ()) -> Node:
        """Books a request whose prompt is computed on the decode node with most room; ties, and nodes whose room
        is not known: the one with fewest requests of this router, then the first. Nodes whose reports have stopped
        only where no other one answers.

        Raises:
            NoNode: none answers.
        """
        nodes = alive(self.decode, excluded)
        if not nodes:
            raise NoNode("no decode node answers")
        now = self._clock()
        node = min(nodes, key=lambda node: (node.silent(now), -node.room(now), node.unfinished))
        node.send(Sent(ticket.name, ticket.tokens, tbt_slo=ticket.tbt_slo))
        return node

    def _decide(self, ticket: Ticket, excluded: Collection[Node]) -> Placement | None:
        """The policy's decision; None: nobody can take it now."""
        started = time.perf_counter()
        prefill = self._prefill_nodes(excluded)
        if ticket.tokens is None:
            live = alive(prefill)
            if not live:
                return None
            self._order += 1
            return Placement(live[self._order % len(live)], (), None, time.perf_counter() - started)
        now = self._clock()
        views = [node.as_prefill(now, self._waiting(node), self.link.bandwidth) for node in prefill]
        may_deflect = ticket.single and (self.config.deflect or not alive(prefill))
        may_deflect = may_deflect and not self._link_unmeasured(prefill, now)
        decode = [node.as_decode(now) for node in self.decode if node not in excluded] if may_deflect else []
        route = self._router.route(ticket.tokens, ticket.tokens, views, decode)
        seconds = time.perf_counter() - started
        if route.node is None:
            return None
        return Placement(self._by_url[route.node], route.chunks, route, seconds)

    def _anyone_can_take(self) -> bool:
        """Whether a decision could find a node for a request: without this, all that wait would be decided again
        with every report and every arrival, and hundreds of them would leave no time for anything else."""
        now = self._clock()
        return bool(alive(self.prefill)) or any(node.as_decode(now).candidate for node in self.decode)

    def _prefill_nodes(self, excluded: Collection[Node]) -> list[Node]:
        """In order; those whose reports have stopped only where no other one answers."""
        nodes, now = [node for node in self.prefill if node not in excluded], self._clock()
        heard = [node for node in nodes if not node.silent(now)]
        return heard if alive(heard) else nodes

    def _leave(self, node: Node, queue: deque[_Held]) -> None:
        """Requests that another node should compute by now, or nobody could decode, no longer wait for this one."""
        stays: dict[frozenset[Node], bool] = {}  # by the nodes that have failed a request: mostly none
        for entry in tuple(queue):
            failed = frozenset(entry.excluded)
            if failed not in stays:
                served = node.alive and node in self._prefill_nodes(failed)
                stays[failed] = served and bool(alive(self.decode, failed))
            if not stays[failed]:
                queue.remove(entry)
                _finish(entry, None)

    def _link_unmeasured(self, prefill: Sequence[Node], now: float) -> bool:
        """The link's bandwidth is not known, and the first prompt that one of these nodes computes will tell it.

        Until then there is no time by a prefill node to compare with, and the policy would deflect whatever fits.
        """
        if self.link.bandwidth is not None:
            return False
        reports = [node.fresh(now) for node in alive(prefill)]
        return any(report is not None and report.kv_bytes_per_token for report in reports)

    def _waiting(self, node: Node) -> list[int | None]:
        return [entry.ticket.tokens for entry in self._held[node]]

    def _has_room(self, node: Node) -> bool:
        """Whether a prefill node might run out of work before it hears of more."""
        now = self._clock()
        report, queued = node.fresh(now), node.queued(now)
        if report is None or queued is None:
            return True  # nothing is known of it: holding requests back would not help
        if len(queued) < DEPTH:
            return True
        reserve: float = report.token_budget
        if report.model is not None and report.model.c_pf > 0.0:
            reserve = min(reserve, RESERVE_SECONDS / report.model.c_pf)
        return sum(left for left, _ in queued[1:]) < reserve

    def _reconsider(self, node: Node, queue: deque[_Held]) -> None:
        now = self._clock()
        while queue and not self._link_unmeasured(self.prefill, now):
            waiting = [entry for entry in queue if entry.ticket.single and entry.ticket.tokens is not None]
            sizes = [(entry.ticket.tokens or 0, entry.ticket.tokens or 0) for entry in waiting[:RECONSIDERED]]
            failed = {other for entry in waiting for other in entry.excluded}
            decode = [other.as_decode(now) for other in self.decode if other not in failed]
            started = time.perf_counter()
            found = self._router.reconsider(sizes, node.as_prefill(now, [], self.link.bandwidth), decode)
            if found is None:
                return
            place, route = found
            entry, target = waiting[place], self._by_url[str(route.node)]
            queue.remove(entry)
            placement = Placement(target, route.chunks, route, time.perf_counter() - started)
            entry.result.set_result(self._book(entry.ticket, placement, entry.since))

    def _book(self, ticket: Ticket, placement: Placement, since: float) -> Placement:
        node, deflected = placement.node, bool(placement.chunks)
        node.send(Sent(ticket.name, ticket.tokens, deflected, ticket.tbt_slo))
        held = self._clock() - since
        return Placement(node, placement.chunks, placement.route, placement.seconds, held)


def _finish(entry: _Held, placement: Placement | None) -> None:
    if not entry.result.done():
        entry.result.set_result(placement)
