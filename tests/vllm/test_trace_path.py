"""The trace path's parts without a server: report, coordinator row, engine choice, metrics."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from gimbal_runtime import metrics
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.trace import EngineReport
from gimbal_runtime.vllm import engine_stats
from gimbal_runtime.vllm.coordinator import REPORT_KEY, attach_report
from gimbal_runtime.vllm.engine_choice import EngineChoice, _Rows
from gimbal_runtime.vllm.engine_stats import SEQUENCE_HEADER, Reporter

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """Instruments of one test do not meet those of another."""
    import vllm.v1.metrics.utils  # noqa: F401  # builds a union of the classes that are replaced below

    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        stock = getattr(prometheus_client, kind)
        monkeypatch.setattr(
            prometheus_client,
            kind,
            lambda *args, stock=stock, **kwargs: stock(*args, registry=registry, **kwargs),
        )
    metrics._instruments.cache_clear()
    yield registry
    metrics._instruments.cache_clear()


def make_config(*, prefix_caching: bool = False, **settings: Any) -> Any:
    """As much of vLLM's configuration as the trace path reads."""
    return SimpleNamespace(
        additional_config={"gimbal": {"mode": "full", **settings}},
        model_config=SimpleNamespace(is_moe=True),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=1000, max_num_seqs=64, max_num_active_seqs=None
        ),
        cache_config=SimpleNamespace(
            kv_cache_size_tokens=100_000, block_size=16, enable_prefix_caching=prefix_caching
        ),
    )


def make_request(name: str, tokens: int = 100, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return SimpleNamespace(
        **{
            "request_id": name,
            "prompt_token_ids": [1] * tokens,
            "prompt_embeds": None,
            "trace_headers": headers,
            "client_index": 0,
            "sampling_params": None,
            "pooling_params": None,
            "session_id": None,
            "cache_salt": None,
            "lora_request": None,
            "mm_features": None,
        }
        | fields
    )


def make_row(
    counter: int, *, acks: dict[int, int] | None = None, run: int = 0, **figures: float
) -> list[Any]:
    report = EngineReport(run, 0, 0.1, 0.0, counter, acks or {}, figures)
    return [0, 0, 0.1, report.to_wire()]


class FakeEngine:
    """An engine whose scheduler has nothing to do; `sent` collects what it publishes."""

    def __init__(self) -> None:
        self.vllm_config = make_config()
        self.publish_dp_lb_stats = True
        self.dp_rank, self.step_counter, self.current_wave = 0, 0, 0
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.busy = False
        self.kv = 0.0
        self.scheduler = SimpleNamespace(
            running=[],
            waiting=[],
            kv_holding_waiting=[],
            get_kv_cache_usage=lambda: self.kv,
            get_request_counts=lambda: (0, 0),
            has_unfinished_requests=lambda: self.busy,
        )

    def sent(self) -> list[EngineReport]:
        reports = []
        while not self.output_queue.empty():
            client, outputs = self.output_queue.get()
            assert client == -1
            reports.append(EngineReport.from_wire(outputs.scheduler_stats.kv_connector_stats[REPORT_KEY]))
        return reports


def test_sequence_number_travels_in_the_headers_and_is_taken_off() -> None:
    choice = EngineChoice(make_config(), [0, 1], client_index=0)
    request = make_request("a", headers={"traceparent": "t"})
    decision = choice.choose(request, None)
    assert request.trace_headers == {"traceparent": "t", SEQUENCE_HEADER: str(decision.seq)}
    reporter, received = Reporter(FakeEngine()), make_request("a")
    reporter.stamp(request, received)
    assert received.gimbal_sequence == decision.seq
    assert received.trace_headers == {"traceparent": "t"}


def test_report_acknowledges_what_was_admitted() -> None:
    engine = FakeEngine()
    reporter = Reporter(engine)
    request = make_request("a")
    request.gimbal_sequence = 3
    reporter.admitted(request)
    reporter.publish()
    [report] = engine.sent()
    assert report.acks == {0: 3}


def test_reports_are_few_while_busy_and_come_at_once_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(engine_stats.time, "monotonic", lambda: now)
    engine = FakeEngine()
    reporter = Reporter(engine)
    engine.busy = True
    for step in range(40):  # 10 ms a step, something changes in each
        now = 100.0 + 0.01 * step
        engine.kv = step / 1000
        reporter.publish()
    assert 3 <= len(engine.sent()) <= 5
    engine.busy, engine.kv = False, 0.9
    reporter.publish()
    assert [report.kv for report in engine.sent()] == [0.9]
    reporter.publish()
    assert engine.sent() == []  # nothing new, heartbeat not due
    now += 1.0
    reporter.publish()
    assert len(engine.sent()) == 1


def test_coordinator_appends_the_report_to_its_engines_row() -> None:
    engines = [SimpleNamespace(request_counts=[0, 0, 0.0]) for _ in range(2)]
    stats = SimpleNamespace(kv_connector_stats={REPORT_KEY: {"c": 1}})
    attach_report(engines, SimpleNamespace(engine_index=1, scheduler_stats=stats))
    attach_report(engines, SimpleNamespace(engine_index=0, scheduler_stats=None))
    attach_report(engines, SimpleNamespace(engine_index=7, scheduler_stats=stats))
    assert [engine.request_counts for engine in engines] == [[0, 0, 0.0], [0, 0, 0.0, {"c": 1}]]


def test_stock_rows_keep_three_columns() -> None:
    class Client:
        lb_engines = _Rows()

    client = Client()
    client.lb_engines = [make_row(1), [2, 1, 0.5]]
    assert client.lb_engines == [[0, 0, 0.1], [2, 1, 0.5]]
    client.lb_engines[0][0] += 1  # vLLM counts in place
    assert client.lb_engines[0][0] == 1


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_requests_that_end_before_they_are_admitted_leave_nothing(end: str) -> None:
    choice = EngineChoice(make_config(), [0, 1], client_index=0)
    for name in "abcd":
        choice.choose(make_request(name), None)
    assert choice.selector.compensation(0) + choice.selector.compensation(1) == 400
    choice.release_all("abcd")
    assert choice.selector.compensation(0) + choice.selector.compensation(1) == 0
    choice.release_all("abcd")  # a late word of the engine changes nothing


def test_a_late_snapshot_erases_nothing() -> None:
    choice = EngineChoice(make_config(), [0, 1], client_index=1)
    for name in "abc":
        choice.choose(make_request(name), 0)
    choice.observe([make_row(1, acks={1: 1, 0: 9}), make_row(1)])
    assert choice.selector.compensation(0) == 200
    choice.observe([make_row(1, acks={1: 3}), make_row(1)])  # the same counter again: no news
    assert choice.selector.compensation(0) == 200


def test_pressure_is_that_of_the_engines_dp_ranks_and_goes_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    from gimbal_runtime.vllm import engine_choice

    now = 50.0
    monkeypatch.setattr(engine_choice.time, "monotonic", lambda: now)
    choice = EngineChoice(make_config(), [2, 3], client_index=0)
    pressure = {"pressure_0": 900.0, "pressure_1": 900.0, "pressure_2": 100.0, "pressure_3": 50.0}
    choice.observe([make_row(1, pressure_step=8.0, **pressure), make_row(1)])
    assert choice.selector._moe == [100.0, 50.0]
    now += 6.0
    choice.observe([make_row(2, pressure_step=8.0, **pressure), make_row(2)])
    assert choice.selector._moe == [0.0, 0.0]


def test_an_error_in_metrics_stops_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = EngineChoice(make_config(), [0, 1], client_index=0)
    monkeypatch.setattr(choice.metrics, "decision", lambda *_: 1 / 0)
    assert choice.choose(make_request("a"), None).engine in (0, 1)
    assert choice.metrics_fuse.blown
    assert not choice.fuse.blown


def test_totals_never_fall_whichever_engine_reports(
    own_registry: prometheus_client.CollectorRegistry,
) -> None:
    figures = metrics.EngineMetrics(exports_figures=True)
    gauges = {"rearrangements": 1.0, "max_over_mean": 1.5}
    for totals in ((10.0, 12.0), (11.0, 12.0), (15.0, 13.0)):
        figures.figures(
            [EngineReport(0, 0, 0.0, 0.0, 1, {}, {"experts_moved": total, **gauges}) for total in totals]
        )
    assert own_registry.get_sample_value("gimbal_experts_moved_total") == 15.0
    assert own_registry.get_sample_value("gimbal_rank_load_max_over_mean") == 1.5


def test_only_one_api_server_exports_common_figures(
    own_registry: prometheus_client.CollectorRegistry,
) -> None:
    report = EngineReport(0, 0, 0.0, 0.0, 1, {}, {"rearrangements": 1.0, "experts_moved": 5.0})
    metrics.EngineMetrics(exports_figures=False).figures([report])
    assert own_registry.get_sample_value("gimbal_experts_moved_total") == 0.0


def test_dense_models_and_mode_off_are_left_alone() -> None:
    from gimbal_runtime.vllm.settings import config_for, reports_travel

    dense = make_config()
    dense.model_config.is_moe = False
    assert config_for(dense) == GimbalConfig(mode="off")
    assert not reports_travel(config_for(make_config(mode="off")))


# --- slots ---


def test_the_report_tells_how_many_requests_there_are_and_how_long_they_hold_a_slot() -> None:
    engine = FakeEngine()
    reporter = Reporter(engine)
    engine.scheduler.get_request_counts = lambda: (3, 4)
    reporter.publish()
    engine.scheduler.request_steps = SimpleNamespace(mean=12.5)
    reporter.publish()
    assert [(report.requests, report.request_steps) for report in engine.sent()] == [(7, 0.0), (7, 12.5)]


@pytest.mark.parametrize("active", [None, 8, "no such setting"])
def test_requests_beyond_an_engines_slots_count(active: Any) -> None:
    config = make_config(w_slots=2.0)
    if active == "no such setting":
        del config.scheduler_config.max_num_active_seqs
    else:
        config.scheduler_config.max_num_active_seqs = active
    slots = 8 if active == 8 else 64
    choice = EngineChoice(config, [0, 1], client_index=0)
    full = EngineReport(0, 0, 0.1, 0.0, 1, {}, requests=slots + 1, request_steps=10.0)
    choice.observe([[0, 0, 0.1, full.to_wire()], make_row(1)])
    assert choice.choose(make_request("a"), None).engine == 1
    assert choice.selector.scores == pytest.approx((0.1 + 2.0 * 2 * 10 / slots, 0.1))


def test_reports_of_another_release_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from gimbal_runtime.vllm import engine_choice

    warnings: list[str] = []
    monkeypatch.setattr(engine_choice, "warn_once", warnings.append)
    choice = EngineChoice(make_config(), [0, 1], client_index=0)
    choice.observe([[0, 0, 0.1], make_row(1)])  # one that has not reported yet is nothing to warn of
    assert warnings == []
    older = {key: value for key, value in make_row(1)[3].items() if key not in "ng"} | {"v": 1}
    choice.observe([[0, 0, 0.1, older], make_row(2)])
    assert len(warnings) == 1
    assert "the same release" in warnings[0]
    assert choice.choose(make_request("a"), None).reason == "ordered_no_trace"
