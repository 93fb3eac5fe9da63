"""What the router has decided and what became of it: a ring of decisions, totals, and Prometheus figures.

A request's time to first token is split into prefill (what the node measured from the prompt's first iteration to
its last), transfer (on a decode node, from the arrival of a prompt that was computed elsewhere to its first token)
and queueing, which is all the rest. The nodes tell of it in their next reports, so that a record is complete a
moment after the answer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..node_report import Computed
from .route_dispatch import Placement, Ticket
from .route_nodes import Node

KEPT = 1024
UNKNOWN_LENGTH = "unknown_length"
"""Reason of a decision without a prediction: the prompt could not be counted."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_COST = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)


@dataclass(slots=True, eq=False)
class Record:
    """One attempt at a request; seconds.

    Attributes:
        request: name.
        time: Unix time of its arrival.
        tokens: of its prompt; None: not known.
        node, reason, chunks: the decision.
        ttft_prefill, ttft_decode: predicted, as in `Route`; None: no prediction.
        counting: of the prompt's tokens.
        cost: of the decision, and
        held: how long the request was held.
        decode: node that decodes it; empty: none yet.
        outcome: how the attempt ended; empty: it has not.
        ttft: from arrival to first token, and its parts; None: not known (yet).
    """

    request: str
    time: float
    tokens: int | None
    node: str
    reason: str
    chunks: tuple[int, ...]
    ttft_prefill: float | None
    ttft_decode: float | None
    counting: float
    cost: float
    held: float
    deflected: bool
    decode: str = ""
    outcome: str = ""
    ttft: float | None = None
    prefill: float | None = None
    transfer: float | None = None
    arrival: float = field(default=0.0, repr=False)
    decode_sent: float = field(default=0.0, repr=False)

    @property
    def queueing(self) -> float | None:
        """What is left of the time to first token; None: a part is missing."""
        if self.ttft is None or self.prefill is None or self.transfer is None:
            return None
        return max(0.0, self.ttft - self.prefill - self.transfer)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        shown = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.repr}
        return shown | {"chunks": list(self.chunks), "queueing": self.queueing}


class Records:
    """Everything that `/metrics` and `/debug/decisions` show.

    Args:
        nodes: of the router.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.registry = CollectorRegistry()
        self._nodes = tuple(nodes)
        self._ring: deque[Record] = deque(maxlen=KEPT)
        self._open: dict[str, Record] = {}
        self.requests = self._counter("requests", "requests answered, by outcome", "outcome")
        self.decisions = self._counter("decisions", "attempts sent to a node, by reason", "node", "reason")
        self.retries = self._counter(
            "retries", "attempts that a node failed before anything was answered", "node"
        )
        self._cost = Histogram(
            "gimbal_route_decision_seconds", "cost of a decision", registry=self.registry, buckets=_COST
        )
        self._ttft = Histogram(
            "gimbal_route_ttft_seconds",
            "time to first token: total, queueing, prefill, transfer",
            ["part"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._up = self._gauge("node_up", "1: the node answers", "node", "role")
        self._known = self._gauge("node_known", "1: the node has a fresh report", "node", "role")
        self._held = self._gauge("held_requests", "requests that wait at the router")
        self._bandwidth = self._gauge("link_bytes_per_second", "bandwidth of the link; NaN: not measured yet")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"gimbal_route_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"gimbal_route_{name}", meaning, labels, registry=self.registry)

    def decided(self, ticket: Ticket, placement: Placement, arrival: float) -> Record:
        """A request has been placed; `arrival` in monotonic seconds."""
        route = placement.route
        record = Record(
            request=ticket.name,
            time=time.time() - (time.monotonic() - arrival),
            tokens=ticket.tokens,
            node=placement.node.url,
            reason=route.reason if route is not None else UNKNOWN_LENGTH,
            chunks=placement.chunks,
            ttft_prefill=_finite(route.ttft_prefill) if route is not None else None,
            ttft_decode=_finite(route.ttft_decode) if route is not None else None,
            counting=ticket.counting,
            cost=placement.seconds,
            held=placement.held,
            deflected=bool(placement.chunks),
            transfer=0.0 if placement.chunks else None,
            arrival=arrival,
        )
        self._ring.append(record)
        self._open[ticket.name] = record
        if len(self._open) > 2 * KEPT:  # nodes without statistics never complete a record
            del self._open[next(iter(self._open))]
        self.decisions.labels(record.node, record.reason).inc()
        self._cost.observe(record.cost)
        return record

    def first_token(self, record: Record, now: float) -> None:
        """The first event of a streamed answer has come."""
        record.ttft = now - record.arrival
        self._complete(record)

    def computed(self, node: Node, entry: Computed) -> Record | None:
        """A node has completed a prompt; the record, if that ended its transfer."""
        record = self._open.get(entry.request)
        if record is None:
            return None
        transferred = node.url == record.decode and not record.deflected
        if node.url == record.node:
            record.prefill = entry.seconds
        if transferred:
            record.transfer = entry.since_arrival
        if node.url == record.decode and record.ttft is None:
            # An answer in one piece: only the node sees its first token.
            record.ttft = record.decode_sent - record.arrival + entry.since_arrival
        self._complete(record)
        return record if transferred else None

    def _complete(self, record: Record) -> None:
        if record.queueing is None or self._open.pop(record.request, None) is None:
            return
        for part in ("queueing", "prefill", "transfer"):
            self._ttft.labels(part).observe(getattr(record, part))
        self._ttft.labels("total").observe(record.ttft)

    def recent(self, count: int | None = None) -> list[Record]:
        """The last `count` records (None: all that are kept), newest last."""
        kept = list(self._ring)
        return kept if count is None else kept[max(0, len(kept) - count) :]

    def page(self, held: int, now: float, bandwidth: float | None = None) -> bytes:
        """The figures in Prometheus' text format; `bandwidth` of the link in bytes per second, None: not known."""
        self._held.set(held)
        self._bandwidth.set(math.nan if bandwidth is None else bandwidth)
        for node in self._nodes:
            self._up.labels(node.url, node.role).set(node.alive)
            self._known.labels(node.url, node.role).set(node.fresh(now) is not None)
        return bytes(generate_latest(self.registry))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
