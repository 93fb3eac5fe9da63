"""Hook: an engine reports prefill left, waiting prefill, KV use, MoE pressure and what it has admitted.

The report goes out with vLLM's own load statistics, whenever it has changed and at least once per heartbeat. The
heartbeat is not a thread's word: it wakes the engine's own loop, which publishes, so a stuck engine falls silent.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from ..trace import EngineReport
from .coordinator import REPORT_KEY
from .guard import Fuse, Hook, expect
from .settings import config_for, traffic_travels

CORE = "vllm.v1.engine.core"
SEQUENCE_HEADER = "x-gimbal-sequence"
"""Trace header in which an API server numbers the requests that it sends to one engine."""


class Reporter:
    """One engine's side of the trace path; used on the engine's main thread, `stamp` on its input thread."""

    def __init__(self, engine: Any) -> None:
        config = config_for(engine.vllm_config)
        self.fuse = Fuse("engine-statistics")
        self.heartbeat = config.heartbeat
        self.active = traffic_travels(config)
        self._engine = weakref.ref(engine)
        self._acks: dict[int, int] = {}
        self._counter = 0
        self._last: EngineReport | None = None
        self._published = 0.0

    def start_heartbeat(self) -> None:
        """Wakes the engine's loop whenever nothing was published for a heartbeat."""
        threading.Thread(target=self._beat, name="gimbal-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        wakeup = expect("vllm.v1.engine", "EngineCoreRequestType").WAKEUP
        while (engine := self._engine()) is not None and not self.fuse.blown:
            if time.monotonic() - self._published >= self.heartbeat and engine.input_queue.empty():
                engine.input_queue.put_nowait((wakeup, None))
            del engine
            time.sleep(self.heartbeat / 2)

    def stamp(self, message: Any, request: Any) -> None:
        """Moves the sequence number from the message's headers to the request, as if it had never been there."""
        headers = message.trace_headers
        if headers and SEQUENCE_HEADER in headers:
            request.gimbal_sequence = int(headers[SEQUENCE_HEADER])
            request.trace_headers = {k: v for k, v in headers.items() if k != SEQUENCE_HEADER} or None

    def admitted(self, request: Any) -> None:
        """The scheduler has the request: its tokens are in the next report, so the client may forget them."""
        sequence = getattr(request, "gimbal_sequence", 0)
        client = request.client_index
        if sequence > self._acks.get(client, 0):
            self._acks[client] = sequence

    def publish(self) -> None:
        """Sends the report if it differs from the last one, or if the heartbeat is due."""
        engine = self._engine()
        if engine is None or not engine.publish_dp_lb_stats:
            return
        report = self._report(engine)
        now = time.monotonic()
        if report == self._last and now - self._published < self.heartbeat:
            return
        self._last, self._published = report, now
        self._counter += 1
        wire = report.to_wire() | {"c": self._counter}
        engine.output_queue.put_nowait((-1, _statistics(engine, wire)))

    def _report(self, engine: Any) -> EngineReport:
        scheduler = engine.scheduler
        worker = getattr(scheduler, "gimbal_figures", None) or {}
        return EngineReport(
            run_prefill=sum(_prefill_left(request) for request in scheduler.running),
            wait_prefill=_queued_prefill(scheduler.waiting) + _queued_prefill(scheduler.kv_holding_waiting),
            kv=min(1.0, max(0.0, scheduler.get_kv_cache_usage())),
            moe=worker.get(f"pressure_{engine.dp_rank}", 0.0),
            counter=0,  # numbered on publication: two reports that say the same are equal
            acks=dict(self._acks),
            figures=worker,
        )


def _prefill_left(request: Any) -> int:
    return max(0, int(request.num_prompt_tokens - request.num_computed_tokens))


def _queued_prefill(queue: Any) -> int:
    """Tokens that the queue's requests have to prefill; our own queue keeps the (uncached) total."""
    total = getattr(queue, "prefill_tokens", None)
    if total is None:
        total = sum(request.num_tokens - request.num_computed_tokens for request in queue)
    return int(total)


def _statistics(engine: Any, wire: dict[str, Any]) -> Any:
    stats = expect("vllm.v1.metrics.stats", "SchedulerStats")(
        *engine.scheduler.get_request_counts(),
        kv_cache_usage=engine.scheduler.get_kv_cache_usage(),
        step_counter=engine.step_counter,
        current_wave=engine.current_wave,
        kv_connector_stats={REPORT_KEY: wire},
    )
    return expect("vllm.v1.engine", "EngineCoreOutputs")(scheduler_stats=stats)


def _reporter(engine: Any) -> Reporter:
    reporter = vars(engine).get("gimbal_reporter")
    if reporter is None:
        reporter = engine.gimbal_reporter = Reporter(engine)
    return reporter  # type: ignore[no-any-return]


def _install() -> None:
    engine_class = expect(CORE, "DPEngineCoreProc")
    publish = expect(CORE, "DPEngineCoreProc._maybe_publish_request_counts", ["self"])
    loop = expect(CORE, "DPEngineCoreProc.run_busy_loop", ["self"])
    add = expect(CORE, "DPEngineCoreProc.add_request", ["self", "request", "request_wave"])
    preprocess = expect(CORE, "DPEngineCoreProc.preprocess_add_request", ["self", "request"])
    handle = expect(CORE, "DPEngineCoreProc._handle_client_request", ["self", "request_type", "request"])
    wakeup = expect("vllm.v1.engine", "EngineCoreRequestType").WAKEUP
    stats = expect("vllm.v1.metrics.stats", "SchedulerStats")
    missing = {"kv_cache_usage", "step_counter", "current_wave", "kv_connector_stats"} - set(
        stats.__dataclass_fields__
    )
    if missing:
        raise AttributeError(f"SchedulerStats has no {', '.join(sorted(missing))}")

    def guarded(engine: Any, action: Any) -> None:
        reporter = _reporter(engine)
        if reporter.active:
            reporter.fuse.run(lambda: action(reporter), lambda: None)

    def maybe_publish(self: Any) -> None:
        publish(self)
        guarded(self, Reporter.publish)

    def run_busy_loop(self: Any) -> Any:
        guarded(self, Reporter.start_heartbeat)
        return loop(self)

    def handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        handle(self, request_type, request)
        if request_type == wakeup:
            guarded(self, Reporter.publish)

    def preprocess_add_request(self: Any, request: Any) -> Any:
        result = preprocess(self, request)
        guarded(self, lambda reporter: reporter.stamp(request, result[0]))
        return result

    def add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        guarded(self, lambda reporter: reporter.admitted(request))
        add(self, request, request_wave)

    engine_class._maybe_publish_request_counts = maybe_publish
    engine_class.run_busy_loop = run_busy_loop
    engine_class._handle_client_request = handle_client_request
    engine_class.preprocess_add_request = preprocess_add_request
    engine_class.add_request = add_request


HOOKS = (Hook("engine-statistics", _install),)
