"""Event-driven simulation of prefill/decode-disaggregated serving, with and without prefill deflection.

Prefill nodes compute prompts first come, first served in iterations of at most `token_budget` tokens, then send
the KV cache over their link, one request at a time. Decode nodes iterate over their batch; at most one deflected
prompt per node is computed along, in the largest chunk that the batch's limit allows at that step and never a
larger one than planned. Iterations take the model's time with noise; the router knows only models fitted to what
the nodes have measured. The first token counts as delivered when the transfer has ended, or the last chunk of a
deflected prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from ..deflection import DecodeNode, DeflectionConfig, DeflectionRouter, PrefillNode
from ..iteration_model import Iteration, IterationFitter, IterationModel
from .sim_traffic import Arrival

REFIT_EVERY = 50
WARM_UP = 64
# Requests of one prefill node that are looked at again when a decode node is free.
RECONSIDERED = 16


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


@dataclass(slots=True, eq=False)
class _Job:
    """A request: what is left of its prefill, and when its parts began and ended."""

    arrival: Arrival
    left: int
    done: int = 0
    plan: list[int] = field(default_factory=list)
    deflected: bool = False
    begun: float = math.nan
    computed: float = math.nan
    first: float = math.nan


class _Measuring:
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


class _Prefill:
    """A prefill node and its link."""

    def __init__(self, name: str, settings: PdSettings, draw: np.random.Generator) -> None:
        self.name, self.settings = name, settings
        self.clock = _Measuring(settings, draw)
        self.queue: deque[_Job] = deque()
        self.batch: list[tuple[_Job, int]] = []
        self.link_free = 0.0

    def view(self, now: float) -> PrefillNode:
        """As the router sees it."""
        return PrefillNode(
            self.name,
            self.clock.model,
            [(job.left, job.done) for job in self.queue],
            max(0.0, self.link_free - now),
            self.settings.kv_bytes,
            self.settings.bandwidth,
            token_budget=self.settings.token_budget,
        )

    def start(self, now: float) -> float | None:
        """Begin an iteration; its end, or None when there is nothing to do."""
        budget, self.batch = self.settings.token_budget, []
        for job in self.queue:
            if budget == 0:
                break
            job.begun = now if math.isnan(job.begun) else job.begun
            self.batch.append((job, min(job.left, budget)))
            budget -= self.batch[-1][1]
        if not self.batch:
            return None
        return now + self.clock.seconds(0, 0, [(chunk, job.done) for job, chunk in self.batch])

    def finish(self, now: float) -> list[_Job]:
        """The iteration has ended; the prompts that are complete, with the time at which each has arrived at
        the decode node."""
        complete = []
        for job, chunk in self.batch:
            job.left -= chunk
            job.done += chunk
            if job.left == 0:
                self.queue.remove(job)
                job.computed = now
                transfer = job.arrival.prompt * self.settings.kv_bytes / self.settings.bandwidth
                self.link_free = max(now, self.link_free) + transfer
                job.first = self.link_free
                complete.append(job)
        return complete


class _Decode:
    """A decode node."""

    def __init__(self, name: str, settings: PdSettings, draw: np.random.Generator) -> None:
        self.name, self.settings = name, settings
        self.clock = _Measuring(settings, draw)
        self.deflected: _Job | None = None
        self.chunk = 0
        self.incoming: list[_Job] = []
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

    def finish(self, now: float) -> _Job | None:
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

    def _next_chunk(self, job: _Job) -> int:
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

    def _join(self, job: _Job) -> None:
        further = job.arrival.output - 1
        if further < 1:
            return
        self._order += 1
        heappush(self.ending, (self.steps + further, self._order, job.arrival.prompt + further))
        self.n_decode += 1
        self.kv_tokens += job.arrival.prompt


@dataclass(frozen=True, slots=True)
class PdMeasured:
    """One run. Times in seconds, shares from 0 to 1.

    Attributes:
        ttft_mean, ttft_p95: to the first token.
        queueing, prefill, transfer: mean parts of it.
        attainment: requests whose first token met its limit.
        late_tokens: further tokens whose gap exceeded its limit.
        deflected: requests.
    """

    ttft_mean: float
    ttft_p95: float
    queueing: float
    prefill: float
    transfer: float
    attainment: float
    late_tokens: float
    deflected: float


class _Deployment:
    """The event loop over arrivals, iterations and transfers."""

    def __init__(self, settings: PdSettings, arrivals: Sequence[Arrival], deflect: bool, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.settings = settings
        self.deflect = deflect
        self.prefills = [_Prefill(f"prefill-{i}", settings, draw) for i in range(settings.prefill_nodes)]
        self.decodes = [_Decode(f"decode-{i}", settings, draw) for i in range(settings.decode_nodes)]
        self.by_name: dict[str, _Prefill | _Decode] = {}
        self.by_name.update((node.name, node) for node in self.prefills)
        self.by_name.update((node.name, node) for node in self.decodes)
        self.router = DeflectionRouter(
            DeflectionConfig(
                beta=settings.beta, ttft_slo=settings.deflection_slo, chunk_sizes=settings.chunk_sizes
            )
        )
        self.jobs = [_Job(arrival, arrival.prompt) for arrival in arrivals]
        self._order = 0
        self._events: list[tuple[float, int, _Job | _Prefill | _Decode]] = []
        for job in self.jobs:
            self._at(job.arrival.time, job)

    def run(self) -> None:
        """Until every request has its first token."""
        left = len(self.jobs)
        while left:
            now, _, subject = heappop(self._events)
            if isinstance(subject, _Prefill):
                for job in subject.finish(now):
                    self._at(job.first, job)
                self._begin(subject, now)
            elif isinstance(subject, _Decode):
                complete = subject.finish(now)
                if complete is not None:
                    left -= 1
                    self._reconsider(now)
                self._begin(subject, now)
            elif math.isnan(subject.computed):
                self._arrive(subject, now)
            else:  # its KV cache has arrived
                left -= 1
                target = min(self.decodes, key=lambda node: node.reserved)
                target.incoming.append(subject)
                self._wake(target, now)

    def _arrive(self, job: _Job, now: float) -> None:
        shown = [node.view() for node in self.decodes] if self.deflect else []
        tokens = job.arrival.prompt
        route = self.router.route(tokens, tokens, [node.view(now) for node in self.prefills], shown)
        node = self.by_name[str(route.node)]
        if isinstance(node, _Decode):
            self._take(job, node, route.chunks, now)
        else:
            node.queue.append(job)
            if not node.batch:
                self._begin(node, now)

    def _reconsider(self, now: float) -> None:
        """A decode node is free: the first request that waits and is better deflected goes there."""
        if not (self.deflect and self.settings.reconsider):
            return
        for node in self.prefills:
            waiting = [job for job in node.queue if math.isnan(job.begun)][:RECONSIDERED]
            if not waiting:
                continue
            begun = tuple((job.left, job.done) for job in node.queue if not math.isnan(job.begun))
            view = replace(node.view(now), queued=begun)
            sizes = [(job.arrival.prompt, job.arrival.prompt) for job in waiting]
            found = self.router.reconsider(sizes, view, [decode.view() for decode in self.decodes])
            if found is not None:
                place, route = found
                node.queue.remove(waiting[place])
                target = self.by_name[str(route.node)]
                assert isinstance(target, _Decode)
                self._take(waiting[place], target, route.chunks, now)

    def _take(self, job: _Job, node: _Decode, chunks: Sequence[int], now: float) -> None:
        job.deflected, job.plan = True, list(chunks)
        node.deflected = job
        self._wake(node, now)

    def _wake(self, node: _Decode, now: float) -> None:
        if not node.working:
            self._begin(node, now)

    def _begin(self, node: _Prefill | _Decode, now: float) -> None:
        end = node.start(now)
        if isinstance(node, _Decode):
            node.working = end is not None
        if end is not None:
            self._at(end, node)

    def _at(self, time: float, subject: _Job | _Prefill | _Decode) -> None:
        self._order += 1
        heappush(self._events, (time, self._order, subject))


def simulate_pd(
    settings: PdSettings, arrivals: Sequence[Arrival], *, deflect: bool, seed: int = 0
) -> PdMeasured:
    """Serve the arrivals, with prefill deflection or by the prefill node of least predicted time alone."""
    deployment = _Deployment(settings, arrivals, deflect, seed)
    deployment.run()
    return _measure(deployment.jobs, deployment.decodes, settings)


def _measure(jobs: Sequence[_Job], decodes: Sequence[_Decode], settings: PdSettings) -> PdMeasured:
    ttft = np.array([job.first - job.arrival.time for job in jobs])
    tokens = sum(node.tokens for node in decodes)
    return PdMeasured(
        ttft_mean=float(ttft.mean()),
        ttft_p95=float(np.quantile(ttft, 0.95)),
        queueing=float(np.mean([job.begun - job.arrival.time for job in jobs])),
        prefill=float(np.mean([job.computed - job.begun for job in jobs])),
        transfer=float(np.mean([job.first - job.computed for job in jobs])),
        attainment=float((ttft <= settings.ttft_slo).mean()),
        late_tokens=sum(node.late_tokens for node in decodes) / max(1, tokens),
        deflected=float(np.mean([job.deflected for job in jobs])),
    )


def prefill_rate(arrivals: Sequence[Arrival], settings: PdSettings) -> float:
    """Requests per second that the prefill nodes alone can compute."""
    model = settings.model
    tokens = sum(entry.prompt for entry in arrivals)
    work = sum(model.c_pf * entry.prompt + model.c_attn * entry.prompt**2 / 2 for entry in arrivals)
    seconds = work + model.a * tokens / settings.token_budget
    return settings.prefill_nodes * len(arrivals) / seconds
