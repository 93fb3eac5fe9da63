"""Event-driven simulation of prefill/decode-disaggregated serving, with and without prefill deflection.

Prefill nodes compute prompts in iterations of at most `token_budget` tokens, first come, first served or in the
order of Algorithm 2, then send the KV cache over their link, one request at a time. Decode nodes iterate over
their batch; at most one deflected prompt per node is computed along, in the largest chunk that the batch's limit
allows at that step and never a larger one than planned. Iterations take the model's time with noise; the router
knows only models fitted to what the nodes have measured. The first token counts as delivered when the transfer
has ended, or the last chunk of a deflected prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ..deflection import DeflectionConfig, DeflectionRouter
from .sim_pd_nodes import Decode, Job, PdSettings, Prefill
from .sim_traffic import Arrival

__all__ = ["Deployment", "PdMeasured", "PdSettings", "prefill_rate", "simulate_pd"]

# Requests of one prefill node that are looked at again when a decode node is free.
RECONSIDERED = 16


@dataclass(frozen=True, slots=True)
class PdMeasured:
    """One run. Times in seconds, shares from 0 to 1.

    Attributes:
        ttft_mean, ttft_p95, ttft_p99: to the first token.
        queueing, prefill, transfer: mean parts of it.
        attainment: requests whose first token met its limit.
        late_tokens: further tokens whose gap exceeded its limit.
        deflected: requests.
    """

    ttft_mean: float
    ttft_p95: float
    ttft_p99: float
    queueing: float
    prefill: float
    transfer: float
    attainment: float
    late_tokens: float
    deflected: float


class Deployment:
    """The event loop over arrivals, iterations and transfers."""

    def __init__(self, settings: PdSettings, arrivals: Sequence[Arrival], deflect: bool, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.settings = settings
        self.deflect = deflect
        self.now = 0.0
        self.prefills = [
            Prefill(f"prefill-{i}", settings, draw, lambda: self.now) for i in range(settings.prefill_nodes)
        ]
        self.decodes = [Decode(f"decode-{i}", settings, draw) for i in range(settings.decode_nodes)]
        self.by_name: dict[str, Prefill | Decode] = {}
        self.by_name.update((node.name, node) for node in self.prefills)
        self.by_name.update((node.name, node) for node in self.decodes)
        self.router = DeflectionRouter(
            DeflectionConfig(
                beta=settings.beta, ttft_slo=settings.deflection_slo, chunk_sizes=settings.chunk_sizes
            )
        )
        self.jobs = [Job(arrival, arrival.prompt) for arrival in arrivals]
        self._order = 0
        self._events: list[tuple[float, int, Job | Prefill | Decode]] = []
        for job in self.jobs:
            self._at(job.arrival.time, job)

    def run(self) -> None:
        """Until every request has its first token."""
        left = len(self.jobs)
        while left:
            now, _, subject = heappop(self._events)
            self.now = now
            if isinstance(subject, Prefill):
                for job in subject.finish(now):
                    self._at(job.first, job)
                self._begin(subject, now)
            elif isinstance(subject, Decode):
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

    def _arrive(self, job: Job, now: float) -> None:
        shown = [node.view() for node in self.decodes] if self.deflect else []
        tokens = job.arrival.prompt
        queues = [node.view(now, node.ahead_of(job, now)) for node in self.prefills]
        route = self.router.route(tokens, tokens, queues, shown)
        node = self.by_name[str(route.node)]
        if isinstance(node, Decode):
            self._take(job, node, route.chunks, now)
        else:
            node.waiting.push(job)
            if not node.batch:
                self._begin(node, now)

    def _reconsider(self, now: float) -> None:
        """A decode node is free: the first request that waits and is better deflected goes there."""
        if not (self.deflect and self.settings.reconsider):
            return
        for node in self.prefills:
            waiting = list(node.waiting)[:RECONSIDERED]
            if not waiting:
                continue
            sizes = [(job.arrival.prompt, job.arrival.prompt) for job in waiting]
            decodes = [decode.view() for decode in self.decodes]
            found = self.router.reconsider(sizes, node.view(now, ()), decodes)
            if found is not None:
                place, route = found
                node.waiting.remove(waiting[place])
                target = self.by_name[str(route.node)]
                assert isinstance(target, Decode)
                self._take(waiting[place], target, route.chunks, now)

    def _take(self, job: Job, node: Decode, chunks: Sequence[int], now: float) -> None:
        job.deflected, job.plan = True, list(chunks)
        node.deflected = job
        self._wake(node, now)

    def _wake(self, node: Decode, now: float) -> None:
        if not node.working:
            self._begin(node, now)

    def _begin(self, node: Prefill | Decode, now: float) -> None:
        end = node.start(now)
        if isinstance(node, Decode):
            node.working = end is not None
        if end is not None:
            self._at(end, node)

    def _at(self, time: float, subject: Job | Prefill | Decode) -> None:
        self._order += 1
        heappush(self._events, (time, self._order, subject))


def simulate_pd(
    settings: PdSettings, arrivals: Sequence[Arrival], *, deflect: bool, seed: int = 0
) -> PdMeasured:
    """Serve the arrivals, with prefill deflection or by the prefill node of least predicted time alone."""
    deployment = Deployment(settings, arrivals, deflect, seed)
    deployment.run()
    return _measure(deployment.jobs, deployment.decodes, settings)


def _measure(jobs: Sequence[Job], decodes: Sequence[Decode], settings: PdSettings) -> PdMeasured:
    ttft = np.array([job.first - job.arrival.time for job in jobs])
    tokens = sum(node.tokens for node in decodes)
    return PdMeasured(
        ttft_mean=float(ttft.mean()),
        ttft_p95=float(np.quantile(ttft, 0.95)),
        ttft_p99=float(np.quantile(ttft, 0.99)),
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
