"""Nodes of the prefill/decode simulation (`sim_pd`): queues, iterations with noise, the models fitted to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from ..deflection import DecodeNode, DeflectionConfig, PrefillNode
from ..iteration_model import Iteration, IterationFitter, IterationModel
from ..request_queue import ShortestPrefillQueue
from .sim_traffic import Arrival

REFIT_EVERY = 50
WARM_UP = 64


@dataclass(frozen=True, kw_only=True)
class PdSettings:
    """A disaggregated deployment. Assumed figures, of the size of a small MoE with a compressed KV cache on one
    GPU per node; none of them is measured.

    Attributes:
        prefill_nodes, decode_nodes: how many.
        model: seconds of an iteration, the same for all nodes.
        noise: half-width of the uniform relative noise of an iteration.
        token_budget: prompt tokens of a prefill node's iteration.
        kv_capacity: tokens of a decode node's KV cache.
        kv_bytes: per token on the link.
        bandwidth: of a prefill node's link, bytes per second.
        tbt_slo, ttft_slo: seconds.
        beta: of the router; below 1 it leaves room for the noise.
        deflection_slo: seconds to first token that the router asks of a deflected request.
        reconsider: requests that still wait for a prefill node are looked at again when a decode node is free.
        chunk_sizes: of the router.
        age_limit: of a prefill node's queue (Algorithm 2), seconds, or auto; 0 is arrival order.
    """

    prefill_nodes: int = 2
    decode_nodes: int = 2
    model: IterationModel = field(default_factory=lambda: IterationModel(0.009, 6e-5, 2.5e-8, 8e-5, 4e-10))
    noise: float = 0.05
    token_budget: int = 8_192
    kv_capacity: int = 600_000
    kv_bytes: float = 31e3
    bandwidth: float = 4e9
    tbt_slo: float = 0.05
    ttft_slo: float = 1.0
    beta: float = 0.95
    deflection_slo: float = 1.0
    reconsider: bool = True
    chunk_sizes: tuple[int, ...] = DeflectionConfig().chunk_sizes
    age_limit: float | str = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """A request: what is left of its prefill, and when its parts began and ended."""

    arrival: Arrival
    left: int
    done: int = 0
    plan: list[int] = field(default_factory=list)
    deflected: bool = False
    begun: float = math.nan
    computed: float = math.nan
    first: float = math.nan

    @property
    def prefill_tokens(self) -> int:
        """What the queue orders by."""
        return self.left

    @property
    def arrival_time(self) -> float:
        """Seconds."""
        return self.arrival.time


class Measuring:
    """A node's clock: iterations with noise, and the model fitted to them."""

    def __init__(self, settings: PdSettings, draw: np.random.Generator) -> None:
        self._settings, self._draw = settings, draw
        self._fitter = IterationFitter()
        self._measured = 0
        # Warm-up as a server would do it: a few prompts and batches of all sizes before traffic comes.
        for place in range(WARM_UP):
            chunks = [(128 * (1 + place % 16), 512 * (place % 7))] if place % 2 else []
            self.seconds(place, 1_000 * place, chunks)
        self.model = self._fitter.model()

    def seconds(self, n_decode: int, kv_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Duration of an iteration, remembered."""
        noise = 1.0 + self._settings.noise * float(self._draw.uniform(-1.0, 1.0))
        seconds = self._settings.model.time(n_decode, kv_tokens, chunks) * noise
        self._fitter.add(Iteration(n_decode, kv_tokens, chunks, seconds))
        self._measured += 1
        if self._measured % REFIT_EVERY == 0:
            self.model = self._fitter.model()
        return seconds


class Prefill:
    """A prefill node and its link.

    Args:
        clock: gives the simulation's time; the queue ages by it.
    """

    def __init__(
        self, name: str, settings: PdSettings, draw: np.random.Generator, clock: Callable[[], float]
    ) -> None:
        self.name, self.settings = name, settings
        self.clock = Measuring(settings, draw)
        self.waiting: ShortestPrefillQueue[Job] = ShortestPrefillQueue(
            age_limit=settings.age_limit, clock=clock
        )
        self.running: list[Job] = []
        self.batch: list[tuple[Job, int]] = []
        self.link_free = 0.0

    def view(self, now: float, ahead: Sequence[Job]) -> PrefillNode:
        """As the router sees it, for a request that is served after those running and those `ahead`."""
        return PrefillNode(
            self.name,
            self.clock.model,
            [(job.left, job.done) for job in (*self.running, *ahead)],
            max(0.0, self.link_free - now),
            self.settings.kv_bytes,
            self.settings.bandwidth,
            token_budget=self.settings.token_budget,
        )

    def ahead_of(self, job: Job, now: float) -> list[Job]:
        """Those waiting that are served before `job`, which arrives now."""
        limit = now - self.waiting.age_limit
        return [other for other in self.waiting if other.arrival_time < limit or other.left <= job.left]

    def start(self, now: float) -> float | None:
        """Begin an iteration; its end, or None when there is nothing to do."""
        budget, self.batch = self.settings.token_budget, []
        for job in self.running:
            self.batch.append((job, min(job.left, budget)))
            budget -= self.batch[-1][1]
        while budget > 0 and self.waiting:
            job = self.waiting.pop()
            job.begun = now
            self.running.append(job)
            self.batch.append((job, min(job.left, budget)))
            budget -= self.batch[-1][1]
        if not self.batch:
            return None
        return now + self.clock.seconds(0, 0, [(chunk, job.done) for job, chunk in self.batch])

    def finish(self, now: float) -> list[Job]:
        """The iteration has ended; the prompts that are complete, with the time at which each has arrived at
        the decode node."""
        complete = []
        for job, chunk in self.batch:
            job.left -= chunk
            job.done += chunk
            if job.left == 0:
                self.running.remove(job)
                job.computed = now
                transfer = job.arrival.prompt * self.settings.kv_bytes / self.settings.bandwidth
                self.link_free = max(now, self.link_free) + transfer
                job.first = self.link_free
                complete.append(job)
        return complete


class Decode:
    """A decode node."""

    def __init__(self, name: str, settings: PdSettings, draw: np.random.Generator) -> None:
        self.name, self.settings = name, settings
        self.clock = Measuring(settings, draw)
        self.deflected: Job | None = None
        self.chunk = 0
        self.incoming: list[Job] = []
        self.ending: list[tuple[int, int, int]] = []  # heap: step of the last token, order, prompt + output
        self.n_decode = self.kv_tokens = self.steps = 0
        self.working = False
        self.tokens = self.late_tokens = 0
        self._order = 0

    @property
    def reserved(self) -> int:
        """Tokens of KV cache in use or promised."""
        promised = sum(job.arrival.prompt for job in self.incoming)
        return self.kv_tokens + promised + (self.deflected.arrival.prompt if self.deflected else 0)

    def view(self) -> DecodeNode:
        """As the router sees it."""
        return DecodeNode(
            self.name,
            self.clock.model,
            self.n_decode,
            self.kv_tokens,
            max(0, self.settings.kv_capacity - self.reserved),
            self.settings.tbt_slo if self.n_decode else None,
            int(self.deflected is not None),
        )

    def start(self, now: float) -> float | None:
        """Begin an iteration; its end, or None when there is nothing to do."""
        while self.incoming:
            self._join(self.incoming.pop())
        job = self.deflected
        self.chunk = self._next_chunk(job) if job is not None else 0
        if not self.n_decode and not self.chunk:
            return None
        chunks = [(self.chunk, job.done)] if job is not None and self.chunk else []
        if job is not None and self.chunk and math.isnan(job.begun):
            job.begun = now
        seconds = self.clock.seconds(self.n_decode, self.kv_tokens, chunks)
        self.tokens += self.n_decode
        self.late_tokens += self.n_decode if seconds > self.settings.tbt_slo else 0
        return now + seconds

    def finish(self, now: float) -> Job | None:
        """The iteration has ended; the deflected prompt if it is complete."""
        self.steps += 1
        self.kv_tokens += self.n_decode
        while self.ending and self.ending[0][0] <= self.steps:
            self.n_decode -= 1
            self.kv_tokens -= heappop(self.ending)[2]
        job = self.deflected
        if job is None or not self.chunk:
            return None
        job.left -= self.chunk
        job.done += self.chunk
        if job.left:
            return None
        self.deflected = None
        job.computed = job.first = now
        self._join(job)
        return job

    def _next_chunk(self, job: Job) -> int:
        """The largest chunk that the batch allows now, at most the one planned; 0: it has to wait."""
        sizes = self.settings.chunk_sizes
        model, settings = self.clock.model, self.settings
        limit = settings.beta * settings.tbt_slo if self.n_decode else math.inf
        planned = job.plan[0] if job.plan else job.left
        most = min(planned, job.left)
        for size in (most, *(size for size in sizes if size < most)):
            if model.time(self.n_decode, self.kv_tokens, [(size, job.done)]) <= limit:
                if job.plan and size == planned:
                    job.plan.pop(0)
                return size
        return 0

    def _join(self, job: Job) -> None:
        further = job.arrival.output - 1
        if further < 1:
            return
        self._order += 1
        heappush(self.ending, (self.steps + further, self._order, job.arrival.prompt + further))
        self.n_decode += 1
        self.kv_tokens += job.arrival.prompt
