"""Engine choices of other systems behind the interface of `EngineSelector`, to compare with.

Each follows its source's definition of the choice; what a source leaves open is named where it is filled in. All
but vLLM's own add the requests that no trace includes yet, by the same sequence numbers as `EngineSelector`: a
late snapshot is no reason for one of them to lose. None has a veto, a staleness rule or affinity. Before every
engine has a trace they dispatch in order.

Ties: "next in order" as in `engine_select`, the first of the tied engines at or behind the ring's position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .engine_select import ORDERED_NO_TRACE, PINNED, SCORE, Decision
from .sent_requests import SentRequests
from .trace import EngineTrace


@dataclass(frozen=True, slots=True)
class CountedTrace(EngineTrace):
    """An engine's trace with the figures that other systems choose by.

    Attributes:
        waiting: requests in the engine's queue.
        running: requests being computed.
    """

    waiting: int = 0
    running: int = 0


class EngineChooser:
    """Base of the policies: traces, what was sent since, pins, and the order for ties.

    Args:
        num_engines: engines to choose from, >= 1.
        kv_capacity_tokens: tokens that one engine's KV cache holds.
        first: engine at which the order starts.

    Raises:
        ValueError: a size below 1, or `first` that is no engine.
    """

    def __init__(self, num_engines: int, *, kv_capacity_tokens: int = 1, first: int = 0) -> None:
        if num_engines < 1:
            raise ValueError(f"num_engines: {num_engines}; valid: an integer >= 1")
        if kv_capacity_tokens < 1:
            raise ValueError(f"kv_capacity_tokens: {kv_capacity_tokens}; valid: an integer >= 1")
        if not 0 <= first < num_engines:
            raise ValueError(f"first: {first}; valid: 0 to {num_engines - 1}")
        self.num_engines = num_engines
        self.kv_capacity_tokens = kv_capacity_tokens
        self._next = first
        self._sent = SentRequests(num_engines)
        self._traces: list[CountedTrace | None] = [None] * num_engines

    def observe(self, engine: int, trace: CountedTrace) -> None:
        """Take a new trace; one that is older than the last one is ignored.

        Raises:
            ValueError: `engine` is none.
        """
        self._check_engine("engine", engine)
        before = self._traces[engine]
        if before is not None and trace.time < before.time:
            return
        if self._sent.acknowledge(engine, trace.ack):
            self._traces[engine] = trace

    def release(self, engine: int, seq: int) -> None:
        """A request has ended.

        Raises:
            ValueError: `engine` is none.
        """
        self._check_engine("engine", engine)
        self._sent.release(engine, seq)

    def select(self, tokens: int, *, now: float, pinned: int | None = None) -> Decision:
        """Choose the engine for a request of `tokens` uncached prompt tokens; `now` as in `EngineSelector`.

        Raises:
            ValueError: `tokens` is negative; `pinned` is no engine.
        """
        if tokens < 0:
            raise ValueError(f"tokens: {tokens!r}; valid: an integer >= 0")
        if pinned is not None:
            self._check_engine("pinned", pinned)
            return Decision(pinned, PINNED, self._sent.send(pinned, tokens))
        engine, reason = self._choose(tokens)
        return Decision(engine, reason, self._sent.send(engine, tokens))

    def _choose(self, tokens: int) -> tuple[int, str]:
        traces = [trace for trace in self._traces if trace is not None]
        if len(traces) < self.num_engines:
            return self._first_of_least([0.0] * self.num_engines), ORDERED_NO_TRACE
        return self._first_of_least(self._costs(tokens, traces)), SCORE

    def _costs(self, tokens: int, traces: Sequence[CountedTrace]) -> Sequence[float | tuple[float, ...]]:
        """Cost of each engine; the least is chosen."""
        raise NotImplementedError

    def _first_of_least(self, costs: Sequence[float | tuple[float, ...]]) -> int:
        count = self.num_engines
        ring = [(self._next + step) % count for step in range(count)]
        engine = min(ring, key=lambda engine: costs[engine])  # type: ignore[arg-type, return-value]
        self._next = (engine + 1) % count
        return engine

    def _batch(self, engine: int, trace: CountedTrace) -> int:
        """Requests on an engine, those sent since included."""
        return trace.waiting + trace.running + self._sent.count(engine)

    def _kv_tokens(self, engine: int, trace: EngineTrace) -> float:
        """Tokens in an engine's KV cache, the prompts sent since included."""
        return trace.kv * self.kv_capacity_tokens + self._sent.tokens[engine]

    def _check_engine(self, name: str, engine: int) -> None:
        if not 0 <= engine < self.num_engines:
            raise ValueError(f"{name}: {engine}; valid: 0 to {self.num_engines - 1}")


class RoundRobin(EngineChooser):
    """Every engine in turn."""

    def _choose(self, tokens: int) -> tuple[int, str]:
        return self._first_of_least([0.0] * self.num_engines), SCORE


class StockVllm(EngineChooser):
    """vLLM 0.32 (`DPLBAsyncMPClient.get_core_engine_for_request`).

    score = max(clients · in flight, waiting + running) + 6 · waiting · max(0, kv - 0.5), where `in flight` are
    this client's unfinished requests and `waiting` rises by `clients` with each request until the next snapshot
    overwrites it. Ties: the first engine from a start that moves on by one with each request.

    Args:
        clients: API servers that choose for the same engines.
    """

    def __init__(
        self, num_engines: int, *, kv_capacity_tokens: int = 1, first: int = 0, clients: int = 1
    ) -> None:
        super().__init__(num_engines, kv_capacity_tokens=kv_capacity_tokens, first=first)
        if clients < 1:
            raise ValueError(f"clients: {clients}; valid: an integer >= 1")
        self.clients = clients
        self._seen = [(0, 0, 0.0)] * num_engines  # waiting, running, kv
        self._unfinished: list[set[int]] = [set() for _ in range(num_engines)]

    def observe(self, engine: int, trace: CountedTrace) -> None:
        """A snapshot overwrites what was counted since the one before it, as in vLLM."""
        super().observe(engine, trace)
        self._seen[engine] = (trace.waiting, trace.running, trace.kv)

    def release(self, engine: int, seq: int) -> None:
        """A request has ended: it is no longer in flight."""
        super().release(engine, seq)
        self._unfinished[engine].discard(seq)

    def select(self, tokens: int, *, now: float, pinned: int | None = None) -> Decision:
        """As in the base class; every request is in flight until its release."""
        decision = super().select(tokens, now=now, pinned=pinned)
        self._unfinished[decision.engine].add(decision.seq)
        return decision

    def _choose(self, tokens: int) -> tuple[int, str]:
        costs = []
        for engine, (waiting, running, kv) in enumerate(self._seen):
            load = max(self.clients * len(self._unfinished[engine]), waiting + running)
            costs.append(load + 6.0 * waiting * max(0.0, kv - 0.5))
        start = self._next
        engine = self._first_of_least(costs)
        self._next = (start + 1) % self.num_engines
        waiting, running, kv = self._seen[engine]
        self._seen[engine] = (waiting + self.clients, running, kv)
        return engine, SCORE


class ShortestKvQueue(EngineChooser):
    """Join the shortest queue, its length in KV tokens; ties next in order."""

    def _costs(self, tokens: int, traces: Sequence[CountedTrace]) -> Sequence[float]:
        return [self._kv_tokens(engine, trace) for engine, trace in enumerate(traces)]


class Lmetric(EngineChooser):
    """LMETRIC ("Simple is Better", arXiv 2603.15202): prefill tokens times batch size, without weights.

    The first factor is the prefill that the engine would have with the request: its queued and running prefill
    and the request's own uncached tokens. The second is the number of its requests. An engine without requests
    costs 0; among several, the one of least prefill, then next in order (the paper leaves ties open).
    """

    def _costs(self, tokens: int, traces: Sequence[CountedTrace]) -> Sequence[tuple[float, ...]]:
        costs = []
        for engine, trace in enumerate(traces):
            prefill = trace.run_prefill + trace.wait_prefill + self._sent.tokens[engine] + tokens
            costs.append((prefill * self._batch(engine, trace), prefill))
        return costs


class BalanceRoute(EngineChooser):
    """BR-0 of BalanceRoute (arXiv 2605.06113): fill what is below the most loaded engine, never lift that one.

    With L_g the KV tokens of engine g, m_g = max L - L_g its margin and s the request's size,
    F_g = s - G·max(0, s - m_g) for G engines; the largest F_g is chosen. Where a request fits several margins F is
    equal; then the least loaded engine, then next in order.
    """

    def _costs(self, tokens: int, traces: Sequence[CountedTrace]) -> Sequence[tuple[float, ...]]:
        loads = [self._kv_tokens(engine, trace) for engine, trace in enumerate(traces)]
        return [(-self._score(tokens, max(loads) - load), load) for load in loads]

    def _score(self, size: float, margin: float) -> float:
        return size - self.num_engines * max(0.0, size - margin)


Releases = Callable[[int], Sequence[float]]
"""Engine -> KV tokens that requests which end by step 0, 1, ..., H from now will have freed."""


class BalanceRouteAhead(BalanceRoute):
    """BR-H of BalanceRoute (arXiv 2605.06113): BR-0 over a short horizon, discounted.

    The load of engine g h steps ahead is L_g + h·(its requests) - (what ends by then), as told by a termination
    classifier; F_g(h) is BR-0's score with those loads, and the largest Σ_h discount^h·F_g(h) is chosen, ties as in
    BR-0. Horizon and discount are this project's choice: the published abstract names neither.

    Args:
        releases: the classifier; None foresees no end of any request.
        horizon: H, decode steps.
        discount: weight of a step relative to the one before it.

    Raises:
        ValueError: a horizon below 0 or a discount outside (0, 1].
    """

    def __init__(
        self,
        num_engines: int,
        *,
        kv_capacity_tokens: int = 1,
        first: int = 0,
        releases: Releases | None = None,
        horizon: int = 8,
        discount: float = 0.9,
    ) -> None:
        super().__init__(num_engines, kv_capacity_tokens=kv_capacity_tokens, first=first)
        if horizon < 0:
            raise ValueError(f"horizon: {horizon}; valid: an integer >= 0")
        if not (math.isfinite(discount) and 0.0 < discount <= 1.0):
            raise ValueError(f"discount: {discount!r}; valid: above 0 and at most 1")
        self.horizon = horizon
        self.discount = discount
        self._releases: Releases = releases if releases is not None else lambda _: [0.0] * (horizon + 1)

    def _costs(self, tokens: int, traces: Sequence[CountedTrace]) -> Sequence[tuple[float, ...]]:
        ahead = []
        for engine, trace in enumerate(traces):
            load, batch = self._kv_tokens(engine, trace), self._batch(engine, trace)
            freed = self._releases(engine)
            ahead.append([load + step * batch - freed[step] for step in range(self.horizon + 1)])
        costs = []
        heaviest = [max(loads) for loads in zip(*ahead, strict=True)]
        for loads in ahead:
            score = sum(
                self.discount**step * self._score(tokens + step, heaviest[step] - load)
                for step, load in enumerate(loads)
            )
            costs.append((-score, loads[0]))
        return costs

    def foresee(self, releases: Releases) -> None:
        """Take another classifier; it must look at least `horizon` steps ahead."""
        self._releases = releases
