"""Prometheus figures, named `gimbal_*`, in the API server's own /metrics.

Instruments are made when the first API server client is built: prometheus_client then knows whether several API
servers share one registry. Figures that all engines agree on (placement, migration) are exported by one API
server only, so that their sum over the servers is right.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from .engine_select import Decision
from .trace import EngineReport


class Metric(NamedTuple):
    """One row of the README's table."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


DECISIONS = Metric(
    "gimbal_engine_decisions_total", "counter", ("engine", "reason"), "requests sent to an engine, by reason"
)
SCORE = Metric("gimbal_engine_score", "gauge", ("engine",), "score of the engine in the last scored decision")

COMPENSATION = Metric(
    "gimbal_engine_compensation_tokens",
    "gauge",
    ("engine",),
    "prompt tokens sent to the engine that it has not acknowledged yet, summed over the API servers",
)
TRACE_TIME = Metric(
    "gimbal_engine_trace_timestamp_seconds",
    "gauge",
    ("engine",),
    "Unix time of the engine's last trace, at the API server that has the oldest one",
)
MULTIPROCESS_MODE = {COMPENSATION.name: "livesum", TRACE_TIME.name: "livemin"}
"""How the gauges of several API servers become one; the last one set counts where nothing is said."""

WORKER_METRICS = {
    "remote_pick_share": Metric(
        "gimbal_remote_pick_share", "gauge", (), "share of picks served off their source's ranks, last window"
    ),
    "max_over_mean": Metric(
        "gimbal_rank_load_max_over_mean",
        "gauge",
        (),
        "fullest rank over the mean, averaged over layers, last window",
    ),
    "picks": Metric("gimbal_picks_total", "counter", (), "routed picks counted in closed windows"),
    "experts_moved": Metric("gimbal_experts_moved_total", "counter", (), "expert copies that changed rank"),
    "bytes_moved": Metric("gimbal_bytes_moved_total", "counter", (), "bytes of the moved experts' weights"),
    "rearrangements": Metric(
        "gimbal_rearrangements_total", "counter", (), "windows closed with a placement decided"
    ),
    "rearrangements_skipped": Metric(
        "gimbal_rearrangements_skipped_total",
        "counter",
        (),
        "windows after which a better placement would not have earned back its bytes",
    ),
    "break_even_known": Metric(
        "gimbal_break_even_known",
        "gauge",
        (),
        "1 where the break-even rule has all that it needs, else 0: it is off",
    ),
    "seconds_saved": Metric(
        "gimbal_break_even_saved_seconds",
        "gauge",
        (),
        "break-even: what the last placement found would save over the horizon",
    ),
    "seconds_to_move": Metric(
        "gimbal_break_even_price_seconds",
        "gauge",
        (),
        "break-even: what has to be saved, for the last placement found",
    ),
    "placement_gap": Metric(
        "gimbal_placement_gap",
        "gauge",
        (),
        "cost of the last placement above its proven lower bound, as a share of the cost, mean over layers",
    ),
    "skew_kept": Metric(
        "gimbal_traffic_skew_kept",
        "gauge",
        (),
        "rho: share of the last window's skew between sources that earlier windows confirm",
    ),
    "drift": Metric(
        "gimbal_expert_load_drift", "gauge", (), "relative change of an expert's load from window to window"
    ),
    "share_refreshes": Metric(
        "gimbal_share_refreshes_total", "counter", (), "times that the shares of the copies were changed"
    ),
    "rearrangement_seconds": Metric(
        "gimbal_rearrangement_seconds_total",
        "counter",
        (),
        "seconds from a window's close to the last layer's commit, idle time included",
    ),
}
"""Figure name in an engine's report -> metric."""

METRICS = (DECISIONS, SCORE, COMPENSATION, TRACE_TIME, *WORKER_METRICS.values())


@dataclass(frozen=True)
class _Instruments:
    decisions: Any
    score: Any
    compensation: Any
    trace_time: Any
    worker: dict[str, Any]


@lru_cache(maxsize=1)
def _instruments() -> _Instruments:
    from prometheus_client import Counter, Gauge

    def make(metric: Metric) -> Any:
        if metric.kind == "counter":
            return Counter(metric.name.removesuffix("_total"), metric.meaning, metric.labels)
        mode = MULTIPROCESS_MODE.get(metric.name, "mostrecent")
        return Gauge(metric.name, metric.meaning, metric.labels, multiprocess_mode=mode)

    worker = {figure: make(metric) for figure, metric in WORKER_METRICS.items()}
    return _Instruments(make(DECISIONS), make(SCORE), make(COMPENSATION), make(TRACE_TIME), worker)


class EngineMetrics:
    """What one API server exports.

    Args:
        exports_figures: whether this API server is the one that exports the engines' common figures.
        first_rank: DP rank of its first engine; the label `engine` is the DP rank.
    """

    def __init__(self, *, exports_figures: bool, first_rank: int = 0) -> None:
        self._instruments = _instruments()
        self._exports_figures = exports_figures
        self._first_rank = first_rank
        self._totals: dict[str, float] = {}

    def decision(self, decision: Decision, scores: Sequence[float | None] | None) -> None:
        """Counts a decision; `scores` [engines] is None when it was not made by score, an entry when left out."""
        self._instruments.decisions.labels(engine=self._label(decision.engine), reason=decision.reason).inc()
        for engine, score in enumerate(scores or ()):
            if score is not None:
                self._instruments.score.labels(engine=self._label(engine)).set(score)

    def _label(self, engine: int) -> str:
        return str(self._first_rank + engine)

    def compensation(self, engine: int, tokens: float) -> None:
        """Tokens sent to `engine` and not acknowledged."""
        self._instruments.compensation.labels(engine=self._label(engine)).set(tokens)

    def trace_seen(self, engine: int) -> None:
        """A new trace of `engine` has arrived."""
        self._instruments.trace_time.labels(engine=self._label(engine)).set(time.time())

    def figures(self, reports: Iterable[EngineReport | None]) -> None:
        """Exports the newest of the engines' figures; totals never fall, whichever engine reports them."""
        if not self._exports_figures:
            return
        known = [
            report.figures for report in reports if report is not None and "rearrangements" in report.figures
        ]
        if not known:
            return
        newest = max(known, key=lambda figures: figures["rearrangements"])
        for name, instrument in self._instruments.worker.items():
            if name not in newest:
                continue
            if WORKER_METRICS[name].kind == "gauge":
                instrument.set(newest[name])
                continue
            total = max(figures.get(name, 0.0) for figures in known)
            instrument.inc(max(0.0, total - self._totals.get(name, 0.0)))
            self._totals[name] = max(total, self._totals.get(name, 0.0))
