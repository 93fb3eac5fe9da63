"""What one replay shows: the client's figures, and the engines' as they were sampled from /metrics meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gimbal_runtime.tools.replay import Record, count_identical, summarize
from gimbal_runtime.tools.scrape import Snapshot, scrape

RUNNING = "vllm:num_requests_running"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
DECISIONS = "gimbal_engine_decisions_total"
WINDOW = 1.0
"""Seconds over which an engine's prompt throughput is taken."""


@dataclass(frozen=True)
class Sample:
    """One look at the engines: monotonic seconds, and per engine running requests and prompt tokens so far."""

    time: float
    running: Mapping[str, float]
    prompt_tokens: Mapping[str, float]


class Sampler:
    """Reads /metrics twice a second, from `with` until its end.

    Args:
        url: of the server.
        period: seconds.
    """

    def __init__(self, url: str, *, period: float = 0.5) -> None:
        self.samples: list[Sample] = []
        self._url, self._period = url, period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(urllib.error.URLError, OSError):  # busy: the next look counts
                self.samples.append(sample(scrape(self._url), time.monotonic()))
            self._stop.wait(self._period)


def sample(seen: Snapshot, now: float) -> Sample:
    """The engines' figures in one scrape."""
    return Sample(now, seen.by_label(RUNNING, "engine"), seen.by_label(PROMPT_TOKENS, "engine"))


def engine_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Mean running requests per engine, and the mean gap of prompt throughput in tokens/s between the fastest and
    the slowest engine, over windows of `WINDOW` seconds; None where there are too few samples.
    """
    engines = sorted({engine for entry in samples for engine in entry.running})
    running = {
        engine: float(np.mean([entry.running.get(engine, 0.0) for entry in samples])) for engine in engines
    }
    gaps, begun = [], 0
    for place, entry in enumerate(samples):
        seconds = entry.time - samples[begun].time
        if seconds < WINDOW:
            continue
        rates = [
            (entry.prompt_tokens.get(engine, 0.0) - samples[begun].prompt_tokens.get(engine, 0.0)) / seconds
            for engine in engines
        ]
        gaps.append(max(rates) - min(rates))
        begun = place
    return {
        "running_per_engine": running,
        "running": float(np.mean(list(running.values()))) if running else None,
        "prompt_throughput_gap": float(np.mean(gaps)) if gaps else None,
    }


def attainment(records: Sequence[Record], *, ttft: float, tpot: float) -> float:
    """Share of all requests whose first token and whose mean gap between tokens met their limits, in seconds."""
    met = [
        r.status == 200 and r.ttft is not None and r.ttft <= ttft and (r.tpot is None or r.tpot <= tpot)
        for r in records
    ]
    return sum(met) / len(met)


def figures(
    records: Sequence[Record],
    seconds: float,
    samples: Sequence[Sample],
    growth: Snapshot,
    slo: Mapping[str, float],
) -> dict[str, Any]:
    """One replay in plain JSON types: seconds, requests per second, tokens per second, shares."""
    summary = summarize(records, seconds)
    ttft = [record.ttft for record in records if record.ttft is not None]
    reasons = growth.by_label(DECISIONS, "reason")
    return {
        "finished": summary.finished,
        "ttft_mean": summary.ttft_mean,
        "ttft_p50": float(np.median(ttft)) if ttft else None,
        "ttft_p99": summary.ttft_p99,
        "tpot_mean": summary.tpot_mean,
        "throughput": summary.throughput,
        "attainment": attainment(records, ttft=slo["ttft"], tpot=slo["tpot"]),
        **engine_figures(samples),
        "decisions": {reason: round(count) for reason, count in sorted(reasons.items()) if count},
    }


def differing(records: Sequence[Record], reference: Sequence[Record]) -> list[str]:
    """Names of the requests whose tokens are not those of the reference."""
    return count_identical(records, reference)[1]
