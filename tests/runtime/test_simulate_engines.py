"""The engine simulator: against a request-by-request reference, conservation, what clients know."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gimbal_runtime.baselines import CountedTrace
from gimbal_runtime.engine_select import EngineSelector
from gimbal_runtime.iteration_model import IterationModel
from gimbal_runtime.tools.sim_engines import Cluster, Engine, EngineSettings
from gimbal_runtime.tools.sim_policies import POLICIES, build, measure, saturated_rate
from gimbal_runtime.tools.sim_requests import ArrivalQueue
from gimbal_runtime.tools.sim_traffic import Arrival, at_rate, generate, in_sessions

MODEL = IterationModel(0.01, 1e-4, 1e-7, 1e-4, 1e-8)


class NaiveEngine:
    """One engine, first come first served; every request is looked at in every step."""

    def __init__(self, arrivals: list[Arrival], settings: EngineSettings) -> None:
        self.arrivals, self.settings = arrivals, settings
        count = len(arrivals)
        self.first, self.done = [math.nan] * count, [math.nan] * count
        self.produced, self.computed = [0] * count, [0] * count  # tokens generated; tokens in the KV cache
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.order: list[int] = []  # as they began to decode
        self.preempted = 0
        self.now = 0.0

    def context(self, i: int) -> int:
        return self.arrivals[i].prompt + self.produced[i]

    def decoding(self, i: int) -> bool:
        return self.produced[i] > 0 and self.computed[i] == self.context(i) - 1

    def reserved(self) -> int:
        return sum(self.computed[i] if self.decoding(i) else self.context(i) for i in self.running)

    def run(self) -> None:
        coming = 0
        while any(math.isnan(time) for time in self.done):
            while coming < len(self.arrivals) and self.arrivals[coming].time <= self.now:
                self.waiting.append(coming)
                coming += 1
            if self.waiting or self.running:
                self.step()
            else:
                self.now = self.arrivals[coming].time

    def step(self) -> None:
        decodes = [i for i in self.running if self.decoding(i)]
        while self.reserved() + len(decodes) > self.settings.kv_capacity and len(decodes) > 1:
            victim = max(decodes, key=lambda i: len(self.order) - self.order[::-1].index(i))
            decodes.remove(victim)
            self.running.remove(victim)
            self.computed[victim] = 0
            self.waiting.insert(0, victim)
            self.preempted += 1
        budget = self.settings.token_budget - len(decodes)
        chunks = {}
        for i in self.running:
            if i not in decodes:
                chunks[i] = min(budget, self.context(i) - self.computed[i])
                budget -= chunks[i]
        while budget > 0 and self.waiting and len(self.running) < self.settings.max_num_seqs:
            i = self.waiting[0]
            if self.reserved() + self.context(i) > self.settings.kv_capacity and self.running:
                break
            self.running.append(self.waiting.pop(0))
            chunks[i] = min(budget, self.context(i))
            budget -= chunks[i]
        parts = [(chunk, self.computed[i]) for i, chunk in chunks.items()]
        kv_tokens = sum(self.computed[i] for i in decodes)
        self.now += self.settings.model.time(len(decodes), kv_tokens, parts)
        for i in list(self.running):
            self.advance(i, chunks.get(i, 0), i in decodes)

    def advance(self, i: int, chunk: int, decode: bool) -> None:
        self.computed[i] += 1 if decode else chunk
        if not decode:
            if self.computed[i] < self.context(i):
                return
            self.order.append(i)
            self.first[i] = self.now if math.isnan(self.first[i]) else self.first[i]
        self.produced[i] += 1
        if self.produced[i] >= self.arrivals[i].output:
            self.done[i] = self.now
            self.running.remove(i)


@pytest.mark.parametrize(
    ("capacity", "budget", "seqs"), [(100_000, 512, 64), (100_000, 300, 4), (4_000, 512, 64), (1_500, 64, 32)]
)
def test_one_engine_equals_the_reference(capacity: int, budget: int, seqs: int) -> None:
    settings = EngineSettings(
        model=MODEL, expert_share=0.0, token_budget=budget, max_num_seqs=seqs, kv_capacity=capacity
    )
    draw = np.random.default_rng(capacity + budget)
    arrivals = [
        Arrival(float(time), int(draw.integers(1, 700)), int(draw.integers(1, 60)))
        for time in np.cumsum(draw.exponential(0.05, 150))
    ]
    naive = NaiveEngine(arrivals, settings)
    naive.run()
    cluster = build(POLICIES["round-robin"], settings, 1)
    requests = cluster.run(arrivals)
    assert [r.first for r in requests] == pytest.approx(naive.first, rel=1e-9)
    assert [r.done for r in requests] == pytest.approx(naive.done, rel=1e-9)
    assert cluster.engines[0].preemptions == naive.preempted
    assert (naive.preempted > 0) is (capacity < 100_000)


@pytest.mark.parametrize("name", POLICIES)
def test_everything_is_served_and_nothing_is_left_behind(name: str) -> None:
    settings = EngineSettings(kv_capacity=20_000)
    arrivals = at_rate(generate(150, 1), 30.0)
    cluster = build(POLICIES[name], settings, 3, clients=2)
    requests = cluster.run(arrivals)
    assert all(r.arrival_time < r.first <= r.done for r in requests)
    for engine in cluster.engines:
        assert engine.idle
        assert (engine.kv_used, engine.kv_decode, engine.n_decode, engine.waiting_tokens) == (0, 0, 0, 0)
    for chooser in cluster.choosers:
        assert list(chooser._sent.tokens) == [0, 0, 0]


def test_runs_are_repeatable() -> None:
    arrivals = at_rate(generate(200, 5), 25.0)
    runs = [measure(build(POLICIES["gimbal"], EngineSettings(), 4), arrivals) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_step_takes_as_long_as_its_slowest_engine() -> None:
    settings = EngineSettings(model=MODEL, expert_share=0.25)
    cluster = Cluster(
        settings, build(POLICIES["round-robin"], settings, 2).choosers, lambda _: ArrivalQueue(), 2
    )
    big, small = cluster.run([Arrival(0.0, 1_000, 1), Arrival(0.0, 100, 1)])
    own = 0.75 * 1_000 * MODEL.c_pf + MODEL.c_attn * 1_000**2 / 2
    shared = 0.25 * 1_100 * MODEL.c_pf / 2
    assert big.first == small.first == pytest.approx(MODEL.a + own + shared)


def test_token_budget_and_sequence_limit_hold_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(token_budget=256, max_num_seqs=7)
    seen = []
    schedule = Engine.schedule

    def watched(engine: Engine) -> tuple[int, int, int, float]:
        planned = schedule(engine)
        seen.append((planned[0] + planned[2], engine.running))
        return planned

    monkeypatch.setattr(Engine, "schedule", watched)
    build(POLICIES["vllm"], settings, 2).run(at_rate(generate(80, 2), 50.0))
    assert max(tokens for tokens, _ in seen) == 256
    assert max(running for _, running in seen) == 7


def test_clients_hear_of_a_step_at_the_next_message_only() -> None:
    """A burst within one publication interval: what spreads it is what the client itself has sent."""
    settings = EngineSettings()
    burst = [Arrival(0.001 * i, 500, 20) for i in range(80)]
    cluster = build(POLICIES["gimbal choice only"], settings, 4)
    requests = cluster.run(burst)
    for engine in range(4):
        assert sum(r.engine == engine for r in requests) == 20
    told = []

    class Listener(EngineSelector):
        def observe(self, engine: int, trace: object) -> None:
            told.append((engine, trace.time))
            super().observe(engine, trace)

    listening = Cluster(settings, [Listener(2, 4_096)], lambda _: ArrivalQueue(), 2)
    requests = listening.run([Arrival(0.0, 100, 150)])
    seconds = requests[0].done
    # About ten messages a second while steps are much shorter than that.
    assert abs(len(told) / 2 - seconds / 0.1) <= 2


def test_engines_tell_of_slots_and_their_queues_age_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    observe = EngineSelector.observe

    def watched(chooser: EngineSelector, engine: int, trace: CountedTrace) -> None:
        told.append(trace)
        observe(chooser, engine, trace)

    monkeypatch.setattr(EngineSelector, "observe", watched)
    arrivals = [Arrival(0.001 * i, 100, 30) for i in range(60)]
    cluster = build(POLICIES["gimbal, age limit 5 s"], EngineSettings(max_num_seqs=4), 2)
    cluster.run(arrivals)
    assert all(trace.requests == trace.waiting + trace.running for trace in told)
    assert max(trace.requests for trace in told) > 4
    assert {trace.request_steps for trace in told} == {0.0, 30.0}
    assert [chooser.max_num_seqs for chooser in cluster.choosers] == [4]
    assert all(engine.queue.age_limit < 0.5 for engine in cluster.engines)
    both_short = build(POLICIES["gimbal, age limit 5 s"], EngineSettings(token_budget=64, max_num_seqs=1), 2)
    both_short.run([Arrival(0.0, 128, 1)] * 20)  # two whole steps each
    assert [engine.queue.age_limit for engine in both_short.engines] == [5.0, 5.0]


def test_prefix_caching_saves_prefill_and_affinity_helps_it() -> None:
    arrivals = in_sessions(generate(400, 3), 3)
    settings = EngineSettings(prefix_cache=True)
    arrivals = at_rate(arrivals, 0.6 * saturated_rate(arrivals, settings, 4))
    cached = measure(build(POLICIES["gimbal"], settings, 4), arrivals)
    without = measure(build(POLICIES["gimbal"], EngineSettings(), 4), arrivals)
    scattered = measure(build(POLICIES["round-robin"], settings, 4), arrivals)
    assert cached.ttft_mean < 0.95 * without.ttft_mean
    assert cached.ttft_mean < scattered.ttft_mean


def test_saturation_is_what_the_engines_can_serve() -> None:
    arrivals = generate(600, 4)
    rate = saturated_rate(arrivals, EngineSettings(), 2)
    below = measure(build(POLICIES["kv-queue"], EngineSettings(), 2), at_rate(arrivals, 0.5 * rate))
    beyond = measure(build(POLICIES["kv-queue"], EngineSettings(), 2), at_rate(arrivals, 2.0 * rate))
    assert beyond.ttft_mean > 10 * below.ttft_mean
    assert beyond.throughput < 1.1 * rate
