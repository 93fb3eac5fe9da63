"""The nodes of a router: whether they answer, what they report, and what was sent to them since.

A report is as old as the iteration that the node is in. What the router has sent since is added until the node
knows it, and what has ended since is taken away: a burst does not go to the node that looked best before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..deflection import DecodeNode, IterationModel, PrefillNode
from ..iteration_model import MAX_ERROR
from ..node_report import Computed, NodeReport

PREFILL, DECODE = "prefill", "decode"


@dataclass(slots=True, eq=False)
class Sent:
    """A request that is on a node.

    Attributes:
        name: of the request.
        tokens: of its prompt; None: not known.
        deflected: its prompt is computed on a decode node.
        tbt_slo: seconds between tokens that it asks for; None: none.
        seen: the node has reported it.
        computed: its prompt is complete.
    """

    name: str
    tokens: int | None
    deflected: bool = False
    tbt_slo: float | None = None
    seen: bool = False
    computed: bool = False


class Node:
    """One server.

    Args:
        url: root address, without a slash at the end; also the node's name.
        role: `PREFILL` or `DECODE`.
        stale_after: seconds after which a report counts as missing.
        max_error: relative error up to which its model of iterations is believed.
    """

    def __init__(
        self, url: str, role: str, *, stale_after: float = 5.0, max_error: float = MAX_ERROR
    ) -> None:
        self.url, self.role, self.stale_after, self.max_error = url, role, stale_after, max_error
        self.alive = False
        self.why = "not asked yet"  # it is not alive, or has no report
        self.report: NodeReport | None = None
        self.legs: set[asyncio.Task[object]] = set()  # calls to it; they end when it is lost
        self._reported_at = 0.0
        self._has_reported = False  # ever
        self._sent: dict[str, Sent] = {}
        self._ended: set[str] = set()  # names in the last report that have ended since

    def observe(self, report: NodeReport, now: float) -> list[Computed]:
        """Takes a report; the prompts that this node has completed since the last one."""
        known = set(self.report.computed) if self.report is not None else set()
        self.report, self._reported_at, self._has_reported = report, now, True
        self._ended.clear()
        prefilling = {prefill.request for prefill in report.prefills}
        completed = {entry.request for entry in report.computed}
        for sent in self._sent.values():
            if sent.name in report.resident:
                sent.seen = True
                sent.computed = sent.computed or sent.name not in prefilling
            elif sent.name in completed:
                sent.seen = sent.computed = True
        return [entry for entry in report.computed if entry not in known]

    def send(self, sent: Sent) -> None:
        """A request is on its way to this node."""
        self._sent[sent.name] = sent

    def first_token(self, name: str) -> None:
        """The node has answered: the prompt is complete."""
        if (sent := self._sent.get(name)) is not None:
            sent.computed = True

    def end(self, name: str) -> None:
        """A request has left the node, whichever way; one that is not there changes nothing."""
        known = self.report is not None and name in self.report.resident
        if self._sent.pop(name, None) is not None and known:
            self._ended.add(name)

    def lose(self, why: str) -> None:
        """The node does not answer: calls to it end now."""
        self.alive, self.why, self.report = False, why, None
        self._ended.clear()
        legs = tuple(self.legs)
        self.legs.clear()  # a call finds out by this why it was cancelled, and is not cancelled a second time
        for leg in legs:
            leg.cancel()

    @property
    def unfinished(self) -> int:
        """Requests that the router has on it."""
        return len(self._sent)

    def fresh(self, now: float) -> NodeReport | None:
        """Its report, unless that is missing or stale."""
        report = self.report
        return report if report is not None and now - self._reported_at <= self.stale_after else None

    def silent(self, now: float) -> bool:
        """Its reports have stopped coming, or have not come again since it was lost: its engine may stand still,
        although its server answers."""
        return self._has_reported and self.fresh(now) is None

    def queued(self, now: float) -> list[tuple[int, int]] | None:
        """(tokens left, tokens done) of the prompts on it; None: not known."""
        report = self.fresh(now)
        if report is None:
            return None
        unseen = [sent.tokens for sent in self._sent.values() if not sent.seen and not sent.computed]
        if None in unseen:
            return None
        left = self._ended | {sent.name for sent in self._sent.values() if sent.computed}
        here = [(entry.left, entry.done) for entry in report.prefills if entry.request not in left]
        return here + [(tokens, 0) for tokens in unseen if tokens is not None]

    def as_prefill(self, now: float, held: Sequence[int | None], bandwidth: float | None) -> PrefillNode:
        """As the policy sees it.

        Args:
            now: monotonic seconds.
            held: tokens of the prompts that wait for it at the router.
            bandwidth: of the link, bytes per second; None: not known.
        """
        report, queued = self.fresh(now), self.queued(now)
        if queued is not None:
            queued = None if None in held else queued + [(tokens, 0) for tokens in held if tokens is not None]
        kv_bytes = report.kv_bytes_per_token if report is not None else None
        return PrefillNode(
            self.url,
            self._model(report) if report is not None else None,
            queued,
            0.0 if bandwidth is not None and kv_bytes is not None else None,
            kv_bytes or 0.0,
            bandwidth or 1.0,
            token_budget=report.token_budget if report is not None else None,
            live=self.alive,
        )

    def as_decode(self, now: float) -> DecodeNode:
        """As the policy sees it."""
        report = self.fresh(now)
        if report is None:
            return DecodeNode(self.url, None, None, None, None, None, None, live=self.alive)
        unseen = [sent for sent in self._sent.values() if not sent.seen]
        unknown = any(sent.tokens is None for sent in unseen)
        tokens = sum(sent.tokens or 0 for sent in unseen)
        limits = [report.tbt_slo, *(sent.tbt_slo for sent in unseen)]
        return DecodeNode(
            self.url,
            self._model(report),
            report.n_decode + sum(not sent.deflected for sent in unseen),
            None if unknown else report.kv_tokens + tokens,
            None if unknown or report.kv_free is None else max(0, report.kv_free - tokens),
            min((limit for limit in limits if limit is not None), default=None),
            self._deflected(report) if report.limits_chunks else None,
            live=self.alive,
        )

    def _model(self, report: NodeReport) -> IterationModel | None:
        """Its model; one that is believed up to another error than usual comes without its quality."""
        model = report.model
        if model is None or model.quality is None or self.max_error == MAX_ERROR:
            return model
        return replace(model, quality=None) if model.quality.good_within(self.max_error) else None

    def _deflected(self, report: NodeReport) -> int:
        """Deflected prompts on it, its own report's (other routers may send some too) and ours together."""
        over = self._ended | {sent.name for sent in self._sent.values() if sent.computed}
        names = [name for name in report.deflected if name not in over]
        ours = [sent.name for sent in self._sent.values() if sent.deflected and not sent.computed]
        return len(names) + sum(name not in names for name in ours)

    def room(self, now: float) -> int:
        """Tokens for which its KV cache has room, for a choice among decode nodes; -1: not known."""
        free = self.as_decode(now).kv_free
        return -1 if free is None else free


class Link:
    """Bandwidth between prefill and decode nodes, from the transfers seen, or given.

    Args:
        bandwidth: bytes per second; None: it is measured, and not known before the first transfer.
        forgetting: weight of a transfer relative to the one after it.
    """

    def __init__(self, bandwidth: float | None = None, *, forgetting: float = 0.95) -> None:
        self._given, self._forgetting = bandwidth, forgetting
        self._bytes = self._seconds = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None: not known."""
        if self._given is not None:
            return self._given
        return self._bytes / self._seconds if self._seconds > 0.0 and self._bytes > 0.0 else None

    def add(self, size: float, seconds: float) -> None:
        """A transfer of `size` bytes took `seconds`, the wait for the decode node's iteration included."""
        self._bytes = self._forgetting * self._bytes + size
        self._seconds = self._forgetting * self._seconds + max(0.0, seconds)


def alive(nodes: Iterable[Node], excluded: Iterable[Node] = ()) -> list[Node]:
    """Those that answer, without the excluded ones, in order."""
    left_out = set(excluded)
    return [node for node in nodes if node.alive and node not in left_out]
