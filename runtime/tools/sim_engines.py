"""Event-driven simulation of data-parallel MoE engines in lockstep, for engine choice and queue order.

What is modelled: engines that step together (expert parallelism ends every layer in an all-to-all, so a step is as
long as its slowest engine), a token budget per step, chunked prefill, `max_num_seqs`, a KV cache that fills and
preempts its youngest request, an optional prefix cache, and what a client knows: traces as of the end of a step,
passed on by a coordinator every 100 ms while something changes and at least once a second.

What is not: which experts tokens go to. Their work is spread evenly over the ranks, MoE pressure is 0 in every
trace, and that term of the score has no part in these results.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from ..baselines import CountedTrace
from ..engine_select import Decision, EngineSelector
from ..iteration_model import IterationModel
from ..slot_wait import RequestSteps
from .sim_requests import Queue, Request
from .sim_traffic import Arrival


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One engine, and what they share.

    Attributes:
        model: seconds of a step. The defaults are of the size of a 30B MoE with 3B active on one node of current
            GPUs; they are assumed, not measured.
        expert_share: share of the token work that is in the experts, which all engines carry evenly.
        token_budget: tokens of a step (max_num_batched_tokens).
        max_num_seqs: requests running at a time.
        kv_capacity: tokens of the KV cache.
        prefix_cache: whether finished sessions stay in the cache while there is room.
        publish_every: seconds between the coordinator's messages.
        heartbeat: seconds after which an unchanged trace is published all the same.
    """

    model: IterationModel = field(default_factory=lambda: IterationModel(0.012, 3e-5, 1.6e-8, 2e-5, 3e-10))
    expert_share: float = 0.5
    token_budget: int = 4_096
    max_num_seqs: int = 128
    kv_capacity: int = 300_000
    prefix_cache: bool = False
    publish_every: float = 0.1
    heartbeat: float = 1.0


class Chooser(Protocol):
    """What the simulation asks of an engine choice; `EngineSelector` and all baselines are one."""

    def observe(self, engine: int, trace: CountedTrace) -> None:
        """A new trace."""

    def select(self, tokens: int, *, now: float) -> Decision:
        """The engine of a request."""

    def release(self, engine: int, seq: int) -> None:
        """A request has ended."""


class Engine:
    """One engine: its queue, its running requests, its KV cache.

    Args:
        settings: of the engine.
        queue: empty.
        clients: number of clients that send to it.
    """

    def __init__(self, settings: EngineSettings, queue: Queue, clients: int) -> None:
        self.settings = settings
        self.queue = queue
        self.inbox: list[Request] = []  # sent, not read yet: an engine reads between steps
        self.acks = [0] * clients
        self.waiting_tokens = 0
        self.prefills: list[list[int]] = []  # per running prefill: tokens left, tokens done
        self.prefilling: list[Request] = []
        self.n_decode = 0
        self.kv_decode = 0  # tokens in the KV cache of decoding requests
        self.kv_used = 0  # of these and of prefills, whole prompts
        self.steps = 0
        self.ending: list[tuple[int, int, Request]] = []  # heap: step of its last token, order, request
        self.decoding: OrderedDict[int, tuple[Request, int]] = (
            OrderedDict()
        )  # order -> request, step it began
        self.chunks: list[int] = []
        self.preemptions = 0
        self.request_steps = RequestSteps()
        self.cache: OrderedDict[int, int] = OrderedDict()  # session -> tokens, least recently used first
        self._order = 0

    @property
    def idle(self) -> bool:
        """Nothing to do."""
        return not (self.inbox or self.prefilling or self.n_decode or len(self.queue))

    @property
    def running(self) -> int:
        """Requests being computed."""
        return len(self.prefilling) + self.n_decode

    def uncached(self, request: Request) -> int:
        """Tokens that a prefill of the request has to compute now; at least the last one."""
        session = request.arrival.session
        if session is None or not self.settings.prefix_cache:
            return request.context
        return max(1, request.context - min(request.arrival.shared, self.cache.get(session, 0)))

    def read_inbox(self) -> None:
        """Admit what has arrived into the queue."""
        for request in self.inbox:
            self.acks[request.client] = max(self.acks[request.client], request.seq)
            request.prefill_tokens = self.uncached(request)
            self.waiting_tokens += request.prefill_tokens
            self.queue.push(request)
        self.inbox.clear()

    def schedule(self) -> tuple[int, int, int, float]:
        """Plan a step: decoding requests, their KV tokens, prefill tokens, and Σ χ·(k + χ/2)."""
        settings = self.settings
        while self.kv_used + self.n_decode > settings.kv_capacity and self.n_decode > 1:
            self._preempt()
        budget = settings.token_budget - self.n_decode
        self.chunks = []
        for left, _ in self.prefills:
            chunk = min(left, budget)
            self.chunks.append(chunk)
            budget -= chunk
        while budget > 0 and len(self.queue) and self.running < settings.max_num_seqs:
            request = self.queue.peek()
            # An engine that is empty takes even a prompt that it has no room for: the simulation must end.
            if self.kv_used + request.context > settings.kv_capacity and self.running:
                break
            self.queue.pop()
            self.waiting_tokens -= request.prefill_tokens
            left = self.uncached(request)
            self.kv_used += request.context
            self.prefilling.append(request)
            self.prefills.append([left, request.context - left])
            self.chunks.append(min(left, budget))
            budget -= self.chunks[-1]
        if len(self.queue):
            self.queue.end_pass(slots_short=budget > 0 and self.running >= settings.max_num_seqs)
        attention = sum(
            chunk * (done + chunk / 2) for chunk, (_, done) in zip(self.chunks, self.prefills, strict=True)
        )
        return self.n_decode, self.kv_decode, sum(self.chunks), attention

    def finish_step(self, now: float) -> list[Request]:
        """The planned step has been computed; the requests that ended with it."""
        self.steps += 1
        self.kv_used += self.n_decode
        self.kv_decode += self.n_decode
        ended = []
        while self.ending and self.ending[0][0] <= self.steps:
            _, order, request = heappop(self.ending)
            if order in self.decoding:
                self._leave(order)
                ended.append(request)
        left_over: list[int] = []
        for place, (chunk, prefill) in enumerate(zip(self.chunks, self.prefills, strict=True)):
            prefill[0] -= chunk
            prefill[1] += chunk
            if prefill[0] > 0:
                left_over.append(place)
                continue
            request = self.prefilling[place]
            if math.isnan(request.first):
                request.first = now
            request.produced += 1
            if request.produced >= request.arrival.output:
                self.kv_used -= request.context - 1
                ended.append(request)
            else:
                self._begin_decode(request)
        self.prefilling = [self.prefilling[place] for place in left_over]
        self.prefills = [self.prefills[place] for place in left_over]
        for request in ended:
            request.done = now
            self.request_steps.observe(request.arrival.output)
            self._keep(request)
        return ended

    def trace(self, client: int, now: float) -> CountedTrace:
        """What one client is told of the engine."""
        return CountedTrace(
            run_prefill=sum(left for left, _ in self.prefills),
            wait_prefill=self.waiting_tokens,
            kv=min(1.0, self.kv_used / self.settings.kv_capacity),
            moe=0.0,
            ack=self.acks[client],
            time=now,
            requests=len(self.queue) + self.running,
            request_steps=self.request_steps.mean,
            waiting=len(self.queue),
            running=self.running,
        )

    def freed_within(self, steps: int) -> list[float]:
        """KV tokens that requests ending within 0, 1, ..., `steps` steps will free: an exact classifier."""
        freed = [0.0] * (steps + 1)
        for last, order, request in self.ending:
            ahead = last - self.steps
            if ahead <= steps and order in self.decoding:
                freed[max(0, ahead)] += request.arrival.prompt + request.arrival.output
        for step in range(steps):
            freed[step + 1] += freed[step]
        return freed

    def _begin_decode(self, request: Request) -> None:
        self._order += 1
        self.decoding[self._order] = (request, self.steps - request.produced)
        heappush(self.ending, (self.steps + request.arrival.output - request.produced, self._order, request))
        self.n_decode += 1
        self.kv_decode += request.context - 1  # its last token is computed in the next step

    def _leave(self, order: int) -> Request:
        request, begun = self.decoding.pop(order)
        request.produced = self.steps - begun
        self.n_decode -= 1
        tokens = request.context - 1
        self.kv_decode -= tokens
        self.kv_used -= tokens
        return request

    def _preempt(self) -> None:
        """Put the youngest request back; it computes its prompt and its tokens so far again."""
        request = self._leave(next(reversed(self.decoding)))
        self.preemptions += 1
        request.prefill_tokens = self.uncached(request)
        self.waiting_tokens += request.prefill_tokens
        self.queue.push_front(request)

    def _keep(self, request: Request) -> None:
        """Leave a finished request's tokens in the prefix cache as far as there is room."""
        session = request.arrival.session
        if session is None or not self.settings.prefix_cache:
            return
        self.cache[session] = request.context
        self.cache.move_to_end(session)
        kept = sum(self.cache.values())
        while self.cache and kept + self.kv_used > self.settings.kv_capacity:
            kept -= self.cache.popitem(last=False)[1]


class Cluster:
    """Engines in lockstep and the clients that choose among them.

    Args:
        settings: of all engines.
        choosers: one per client (API server); requests come to them in turn.
        make_queue: makes an engine's queue, given the simulation's clock.
        num_engines: >= 1.
    """

    def __init__(
        self,
        settings: EngineSettings,
        choosers: Sequence[Chooser],
        make_queue: Callable[[Callable[[], float]], Queue],
        num_engines: int,
    ) -> None:
        self.settings = settings
        self.choosers = choosers
        self.now = 0.0
        self.engines = [
            Engine(settings, make_queue(lambda: self.now), len(choosers)) for _ in range(num_engines)
        ]
        self._tick = 0.0
        self._snapshots: list[list[CountedTrace]] = []
        self._told = [-math.inf] * num_engines
        self.busy_steps = 0
        self.running_sum = 0

    def run(self, arrivals: Sequence[Arrival]) -> list[Request]:
        """Serve all arrivals; the requests with their times, in order of arrival."""
        requests = [
            Request(arrival, client=place % len(self.choosers)) for place, arrival in enumerate(arrivals)
        ]
        self._snapshot()
        coming, left = 0, len(requests)
        while left:
            if all(engine.idle for engine in self.engines):
                self.now = max(self.now, requests[coming].arrival_time)
                self._tick = max(self._tick, self.now - self.settings.publish_every)
                self._snapshot()
                coming = self._events(requests, coming, self.now)
            for engine in self.engines:
                engine.read_inbox()
            end = self.now + self._step_seconds()
            coming = self._events(requests, coming, end)
            self.now = end
            for engine in self.engines:
                for request in engine.finish_step(end):
                    self.choosers[request.client].release(request.engine, request.seq)
                    left -= 1
            self._snapshot()
        return requests

    def _step_seconds(self) -> float:
        model, share = self.settings.model, self.settings.expert_share
        slowest, experts = 0.0, 0.0
        for engine in self.engines:
            n_decode, kv_tokens, prefill, attention = engine.schedule()
            tokens = model.c0 * n_decode + model.c_pf * prefill
            slowest = max(slowest, (1 - share) * tokens + model.c1 * kv_tokens + model.c_attn * attention)
            experts += share * tokens
            self.running_sum += engine.running
        self.busy_steps += 1
        return model.a + slowest + experts / len(self.engines)

    def _events(self, requests: Sequence[Request], coming: int, until: float) -> int:
        """Arrivals and the coordinator's messages up to `until`, in order; the number of arrivals so far."""
        while True:
            arrival = requests[coming].arrival_time if coming < len(requests) else math.inf
            if min(arrival, self._tick) > until:
                return coming
            if self._tick <= arrival:
                self._publish(self._tick)
                self._tick += self.settings.publish_every
            else:
                request = requests[coming]
                self._send(request)
                coming += 1

    def _send(self, request: Request) -> None:
        """A client knows a prompt's length and its session, not what an engine's cache holds of it."""
        chooser, arrival = self.choosers[request.client], request.arrival
        if isinstance(chooser, EngineSelector) and arrival.session is not None:
            decision = chooser.select(arrival.prompt, now=arrival.time, affinity_key=arrival.session)
        else:
            decision = chooser.select(arrival.prompt, now=arrival.time)
        request.engine, request.seq = decision.engine, decision.seq
        self.engines[decision.engine].inbox.append(request)

    def _snapshot(self) -> None:
        """Engines report at the end of a step."""
        every = range(len(self.choosers))
        self._snapshots = [[engine.trace(client, self.now) for client in every] for engine in self.engines]

    def _publish(self, now: float) -> None:
        for engine, traces in enumerate(self._snapshots):
            # Lockstep: while any engine works all of them step, and report; idle ones by their heartbeat.
            if traces[0].time > self._told[engine] or now - self._told[engine] >= self.settings.heartbeat:
                self._told[engine] = now
                for chooser, trace in zip(self.choosers, traces, strict=True):
                    chooser.observe(engine, trace)
