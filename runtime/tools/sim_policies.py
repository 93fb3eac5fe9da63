"""The policies that the simulator compares, and what it measures of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..baselines import (
    BalanceRoute,
    BalanceRouteAhead,
    EngineChooser,
    Lmetric,
    RoundRobin,
    ShortestKvQueue,
    StockVllm,
)
from ..engine_select import EngineSelector
from ..request_queue import ShortestPrefillQueue
from .sim_engines import Chooser, Cluster, EngineSettings
from .sim_requests import ArrivalQueue, Queue, Request
from .sim_traffic import Arrival

HORIZON = 8


@dataclass(frozen=True, slots=True)
class Policy:
    """An engine choice with a queue order.

    Attributes:
        choice: key of `CHOICES`.
        age_limit: of the shortest-prefill-first queue; None: first come, first served.
        ours: it is this project's.
    """

    choice: str
    age_limit: float | str | None = None
    ours: bool = False


CHOICES: dict[str, type[EngineChooser] | None] = {
    "vllm": StockVllm,
    "round-robin": RoundRobin,
    "kv-queue": ShortestKvQueue,
    "lmetric": Lmetric,
    "br-0": BalanceRoute,
    "br-h": BalanceRouteAhead,
    "gimbal": None,
}

POLICIES: dict[str, Policy] = {
    "vllm": Policy("vllm"),
    "round-robin": Policy("round-robin"),
    "kv-queue": Policy("kv-queue"),
    "lmetric": Policy("lmetric"),
    "br-0": Policy("br-0"),
    "br-h": Policy("br-h"),
    "gimbal": Policy("gimbal", "auto", ours=True),
    "gimbal, age limit 5 s": Policy("gimbal", 5.0, ours=True),
    "gimbal choice only": Policy("gimbal", ours=True),
    "vllm + our queue": Policy("vllm", "auto"),
    "lmetric + our queue": Policy("lmetric", "auto"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Times in seconds.

    Attributes:
        ttft_mean, ttft_p99: to the first token, from arrival.
        tpot_mean: per further token, mean over requests that had one.
        throughput: requests per second from the first arrival to the last end.
        running: requests running per engine and step.
        preemptions: of all engines.
    """

    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    throughput: float
    running: float
    preemptions: int


def build(policy: Policy, settings: EngineSettings, num_engines: int, clients: int = 1) -> Cluster:
    """A cluster whose clients follow `policy`; client i of n starts its order at engine i·engines/n, as in vLLM."""
    choosers: list[Chooser] = []
    for client in range(clients):
        first = num_engines * client // clients
        choosers.append(_chooser(policy, settings, num_engines, first, clients))

    def make_queue(clock: Callable[[], float]) -> Queue:
        if policy.age_limit is None:
            return ArrivalQueue()
        return ShortestPrefillQueue[Request](age_limit=policy.age_limit, clock=clock, block_size=16)

    cluster = Cluster(settings, choosers, make_queue, num_engines)
    for chooser in choosers:
        if isinstance(chooser, BalanceRouteAhead):
            chooser.foresee(lambda engine: cluster.engines[engine].freed_within(HORIZON))
    return cluster


def _chooser(policy: Policy, settings: EngineSettings, num_engines: int, first: int, clients: int) -> Chooser:
    kind = CHOICES[policy.choice]
    capacity = settings.kv_capacity
    if kind is None:
        return EngineSelector(
            num_engines,
            settings.token_budget,
            kv_capacity_tokens=capacity,
            max_num_seqs=settings.max_num_seqs,
            first=first,
            clients=clients,
        )
    if kind is StockVllm:
        return StockVllm(num_engines, first=first, clients=clients)
    if kind is BalanceRouteAhead:
        return BalanceRouteAhead(num_engines, kv_capacity_tokens=capacity, first=first, horizon=HORIZON)
    return kind(num_engines, kv_capacity_tokens=capacity, first=first)


def measure(cluster: Cluster, arrivals: Sequence[Arrival]) -> Measured:
    """Serve the arrivals and measure."""
    requests = cluster.run(arrivals)
    ttft = np.array([request.first - request.arrival_time for request in requests])
    tpot = [
        (request.done - request.first) / (request.arrival.output - 1)
        for request in requests
        if request.arrival.output > 1
    ]
    end = max(request.done for request in requests)
    return Measured(
        ttft_mean=float(ttft.mean()),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        tpot_mean=float(np.mean(tpot)) if tpot else 0.0,
        throughput=len(requests) / (end - requests[0].arrival_time),
        running=cluster.running_sum / max(1, cluster.busy_steps * len(cluster.engines)),
        preemptions=sum(engine.preemptions for engine in cluster.engines),
    )


def saturated_rate(arrivals: Sequence[Arrival], settings: EngineSettings, num_engines: int) -> float:
    """Requests per second that the engines serve while their queues are full.

    All requests arrive at once, spread by KV tokens; the rate is that between the first fifth and the fourth
    fifth of all ends, so that neither the filling nor the last long outputs count.
    """
    at_once = [Arrival(0.0, entry.prompt, entry.output) for entry in arrivals]
    requests = build(POLICIES["kv-queue"], settings, num_engines).run(at_once)
    ends = np.sort([request.done for request in requests])
    early, late = len(ends) // 5, len(ends) * 4 // 5
    return float((late - early) / max(ends[late] - ends[early], settings.model.a))
