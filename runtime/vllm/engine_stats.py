"""An engine reports its requests, the prefill that they have left, KV use, MoE pressure and what it has admitted.

The report goes out with vLLM's own load statistics when something has changed, at most every 100 ms, and at least
once per heartbeat. The heartbeat is not a thread's word: it wakes the engine's own loop, which publishes, so a
stuck engine falls silent. Part of the hook `trace-path`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..trace import EngineReport
from .coordinator import REPORT_KEY
from .guard import Fuse, HookMismatch, expect
from .settings import config_for, reports_travel

CORE = "vllm.v1.engine.core"
SEQUENCE_HEADER = "x-gimbal-sequence"
"""Trace header in which an API server numbers the requests that it sends to one engine."""
MIN_INTERVAL = 0.1
"""Seconds between reports, as between the coordinator's own publications, except when a request was admitted or
the engine has become idle."""
STOCK_METHODS = {
    "_maybe_publish_request_counts": ["self"],
    "run_busy_loop": ["self"],
    "_handle_client_request": ["self", "request_type", "request"],
    "preprocess_add_request": ["self", "request"],
    "add_request": ["self", "request", "request_wave"],
}


class Reporter:
    """One engine's side of the trace path; used on the engine's main thread, `stamp` on its input thread."""

    def __init__(self, engine: Any) -> None:
        config = config_for(engine.vllm_config)
        self.fuse = Fuse("engine-statistics")
        self.heartbeat = config.heartbeat
        self.active = reports_travel(config)
        self._sums_prefill = config.chooses_engines
        self._engine = weakref.ref(engine)
        self._acks: dict[int, int] = {}
        self._counter = 0
        self._last: EngineReport | None = None
        self._published = 0.0
        self._urgent = False

    def start_heartbeat(self) -> None:
        """Wakes the engine's loop whenever nothing was published for a heartbeat."""
        engine = self._engine()
        if engine is not None and engine.publish_dp_lb_stats:
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
            self._urgent = True

    def publish(self) -> None:
        """Sends the report if it is due and differs from the last one, or if the heartbeat is due."""
        engine = self._engine()
        if engine is None or not engine.publish_dp_lb_stats:
            return
        now = time.monotonic()
        idle = not engine.scheduler.has_unfinished_requests()
        if not (self._urgent or idle or now - self._published >= MIN_INTERVAL):
            return
        report = self._report(engine)
        if report == self._last and now - self._published < self.heartbeat:
            return
        self._last, self._published, self._urgent = report, now, False
        self._counter += 1
        wire = report.to_wire() | {"c": self._counter}
        engine.output_queue.put_nowait((-1, _statistics(engine, wire)))

    def _report(self, engine: Any) -> EngineReport:
        scheduler = engine.scheduler
        worker = getattr(scheduler, "gimbal_figures", None) or {}
        run_prefill = wait_prefill = 0
        if self._sums_prefill:
            run_prefill = sum(_prefill_left(request) for request in scheduler.running)
            wait_prefill = _queued_prefill(scheduler.waiting) + _queued_prefill(scheduler.kv_holding_waiting)
        return EngineReport(
            run_prefill=run_prefill,
            wait_prefill=wait_prefill,
            kv=min(1.0, max(0.0, scheduler.get_kv_cache_usage())),
            moe=worker.get(f"pressure_{engine.dp_rank}", 0.0),
            counter=0,  # numbered on publication: two reports that say the same are equal
            acks=dict(self._acks),
            figures=worker,
            requests=sum(scheduler.get_request_counts()),
            # A scheduler class of the user's own does not know it.
            request_steps=steps.mean if (steps := getattr(scheduler, "request_steps", None)) else 0.0,
        )


def _prefill_left(request: Any) -> int:
    return max(0, int(request.num_prompt_tokens - request.num_computed_tokens))


def _queued_prefill(queue: Any) -> int:
    """Tokens that the queue's requests have to prefill; our own queue keeps the (uncached) total."""
    total = getattr(queue, "prefill_tokens", None)
    if total is None:
        # vLLM's priority queue sorts itself when it is iterated; its heap has the same requests.
        requests = getattr(queue, "_heap", queue)
        total = sum(request.num_tokens - request.num_computed_tokens for request in requests)
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
    if reporter is None:  # asked for on two threads; the first one to be stored serves both
        reporter = vars(engine).setdefault("gimbal_reporter", Reporter(engine))
    return reporter  # type: ignore[no-any-return]


def _guarded(engine: Any, action: Callable[..., None], *args: Any) -> None:
    reporter = _reporter(engine)
    if reporter.active:
        reporter.fuse.attempt(action, reporter, *args)


def check() -> None:
    """Looks up all that `install` changes, and changes nothing.

    Raises:
        HookMismatch: this vLLM is not as expected.
    """
    for name, parameters in STOCK_METHODS.items():
        expect(CORE, f"DPEngineCoreProc.{name}", parameters)
    expect("vllm.v1.engine", "EngineCoreRequestType.WAKEUP")
    fields = expect("vllm.v1.metrics.stats", "SchedulerStats").__dataclass_fields__
    missing = {"kv_cache_usage", "step_counter", "current_wave", "kv_connector_stats"} - set(fields)
    if missing:
        raise HookMismatch(f"SchedulerStats has no {', '.join(sorted(missing))}")


def install() -> None:
    """Makes an engine report."""
    engine_class = expect(CORE, "DPEngineCoreProc")
    publish, loop, handle, preprocess, add = (
        expect(CORE, f"DPEngineCoreProc.{name}") for name in STOCK_METHODS
    )
    wakeup = expect("vllm.v1.engine", "EngineCoreRequestType").WAKEUP

    def maybe_publish(self: Any) -> None:
        publish(self)
        _guarded(self, Reporter.publish)

    def run_busy_loop(self: Any) -> Any:
        _guarded(self, Reporter.start_heartbeat)
        return loop(self)

    def handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        handle(self, request_type, request)
        if request_type == wakeup:
            _guarded(self, Reporter.publish)

    def preprocess_add_request(self: Any, request: Any) -> Any:
        result = preprocess(self, request)
        _guarded(self, Reporter.stamp, request, result[0])
        return result

    def add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        _guarded(self, Reporter.admitted, request)
        add(self, request, request_wave)

    engine_class._maybe_publish_request_counts = maybe_publish
    engine_class.run_busy_loop = run_busy_loop
    engine_class._handle_client_request = handle_client_request
    engine_class.preprocess_add_request = preprocess_add_request
    engine_class.add_request = add_request
