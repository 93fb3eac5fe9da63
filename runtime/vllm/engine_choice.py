"""An API server chooses the engine of a new request by Algorithm 1 (SPEC section 6). Part of hook `trace-path`.

The chosen engine is handed to vLLM's own method as if the request had been pinned to it, so that vLLM's
bookkeeping stays vLLM's. Rows from the coordinator are cut back to vLLM's three columns; the fourth, an engine's
report, feeds the selector and the metrics.

The size of a request is its prompt's tokens without those that the chosen engine's prefix cache probably holds
(`prefix_estimate`). When elastic EP changes the number of engines, those that are gone are removed from the choice
and new ones added. vLLM itself ends the server when one of its engines dies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..engine_select import Decision, EngineSelector, SelectConfig
from ..metrics import EngineMetrics
from ..trace import EngineReport
from . import debug_endpoint
from .coordinator import STOCK_ROW
from .engine_stats import SEQUENCE_HEADER
from .guard import Fuse, HookMismatch, expect, warn_once
from .request_key import affinity_key, make_estimate, prompt_blocks
from .settings import config_for, reports_travel

MODULE = "vllm.v1.engine.core_client"
STOCK_METHODS = {
    "__init__": ["self", "vllm_config"],
    "get_core_engine_for_request": ["self", "request"],
    "process_engine_outputs": ["self", "outputs"],
    "abort_requests_async": ["self", "request_ids"],
}
REQUEST_FIELDS = {
    "trace_headers",
    "cache_salt",
    "lora_request",
    "mm_features",
    "sampling_params",
    "pooling_params",
}


class EngineChoice:
    """One API server's view of its engines.

    Args:
        vllm_config: of the server; gives Q = max_num_batched_tokens, max_num_seqs and the KV capacity in tokens.
        engine_ranks: DP ranks of the engines that this API server may choose from, consecutive.
        client_index: of this API server; engines acknowledge per client.
        clients: number of API servers.
        first: engine, by its place in `engine_ranks`, at which this API server's order starts.
    """

    def __init__(
        self,
        vllm_config: Any,
        engine_ranks: Sequence[int],
        client_index: int,
        *,
        clients: int = 1,
        first: int = 0,
    ) -> None:
        self.config = config_for(vllm_config)
        self.fuse = Fuse("engine-choice")
        self.metrics_fuse = Fuse("engine-metrics")
        self.client_index = client_index
        self.first_rank = engine_ranks[0]
        self.metrics = self.metrics_fuse.run(
            lambda: EngineMetrics(exports_figures=client_index == 0, first_rank=self.first_rank), lambda: None
        )
        self.selector = EngineSelector(
            len(engine_ranks),
            vllm_config.scheduler_config.max_num_batched_tokens,
            SelectConfig.from_config(self.config),
            kv_capacity_tokens=getattr(vllm_config.cache_config, "kv_cache_size_tokens", None) or None,
            max_num_seqs=_slots(vllm_config.scheduler_config),
            first=first % len(engine_ranks),
            clients=clients,
        )
        self.clients = clients
        self.prefixes = make_estimate(vllm_config.cache_config, len(engine_ranks))
        self._counters = [-1] * len(engine_ranks)
        self._sent: dict[str, tuple[int, int]] = {}
        self._pressure_step = 0.0
        self._pressure_time = -math.inf

    def observe(self, rows: Sequence[Sequence[Any]]) -> None:
        """Takes the reports out of the coordinator's rows; a row without one, or an old one, changes nothing."""
        now = time.monotonic()
        reports = [_report(row) for row in rows]
        pressure = self._pressure(reports, now)
        for engine, report in enumerate(reports[: len(self._counters)]):
            if report is None or report.counter <= self._counters[engine]:
                continue
            self._counters[engine] = report.counter
            # An engine without requests has no worker output to learn its pressure from: any engine's newest
            # exchange tells it of all of them.
            moe = pressure.get(f"pressure_{self.first_rank + engine}", 0.0)
            self.selector.observe(engine, replace(report.trace_for(self.client_index, now), moe=moe))
            self._tell("trace_seen", engine)
            self._tell_compensation(engine)
        self._tell("figures", reports)

    def choose(self, request: Any, pinned: int | None) -> Decision:
        """Chooses, remembers the request for `release`, and numbers it for the engine's acknowledgement."""
        prefixes, blocks = self.prefixes, prompt_blocks(request, self.prefixes)
        decision = self.selector.select(
            _prompt_tokens(request),
            now=time.monotonic(),
            pinned=pinned,
            affinity_key=affinity_key(request, self.config.affinity),
            cached=None if prefixes is None else lambda engine: prefixes.cached_tokens(engine, blocks),
        )
        if prefixes is not None:
            prefixes.add(decision.engine, blocks)
        request.trace_headers = {**(request.trace_headers or {}), SEQUENCE_HEADER: str(decision.seq)}
        self.release(request.request_id)  # a streaming session sends again under the same id
        self._sent[request.request_id] = (decision.engine, decision.seq)
        self._tell("decision", decision, self.selector.scores)
        self._tell_compensation(decision.engine)
        return decision

    def fit(self, num_engines: int) -> None:
        """There are `num_engines` engines now: those behind them are gone, and what is new starts anew."""
        selector = self.selector
        while selector.num_engines < num_engines:
            selector.add_engine()
            self._counters.append(-1)
            if self.prefixes is not None:
                self.prefixes.add_engine()
        if len(selector.live_engines) == num_engines:
            return
        for engine in range(selector.num_engines):
            live = engine in selector.live_engines
            if live and engine >= num_engines:
                selector.remove_engine(engine)
                if self.prefixes is not None:
                    self.prefixes.forget(engine)
                self._tell_compensation(engine)
            elif not live and engine < num_engines:
                selector.restore_engine(engine)
                self._counters[engine] = -1  # its successor counts from the start

    def state(self, last: int) -> dict[str, Any]:
        """The engine choice and its last decisions in plain JSON types; engines are named by their DP rank."""
        now, selector = time.monotonic(), self.selector
        engines = [
            {
                "engine": self.first_rank + engine,
                "live": engine in selector.live_engines,
                "trace_age": selector.trace_age(engine, now),
                "compensation": selector.compensation(engine),
            }
            for engine in range(selector.num_engines)
        ]
        recent = [entry.as_dict(self.first_rank) for entry in selector.decisions.recent(max(0, last))]
        return {
            "client": self.client_index,
            "clients": self.clients,
            "mode": self.config.mode,
            "time": now,
            "active": not self.fuse.blown,
            "engines": engines,
            "reasons": dict(selector.decisions.counts),
            "recent": recent,
        }

    def release(self, request_id: str) -> None:
        """The request has finished, failed or been aborted."""
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self.selector.release(*sent)
            self._tell_compensation(sent[0])

    def release_all(self, request_ids: Iterable[str]) -> None:
        """As `release`, guarded: called where an exception would end the API server's client."""
        for request_id in request_ids:
            self.fuse.attempt(self.release, request_id)

    def _pressure(self, reports: Sequence[EngineReport | None], now: float) -> dict[str, float]:
        """The newest exchange's figures; none once it is stale: engines that stand still have no pressure."""
        figures = _newest_pressure(reports)
        step = figures.get("pressure_step", 0.0)
        if step > self._pressure_step:
            self._pressure_step, self._pressure_time = step, now
        return figures if now - self._pressure_time <= self.config.stale_after else {}

    def _tell_compensation(self, engine: int) -> None:
        self._tell("compensation", engine, self.selector.compensation(engine))

    def _tell(self, name: str, *args: Any) -> None:
        """Calls one of the metrics' methods; an error there stops no choice."""
        if self.metrics is not None:
            self.metrics_fuse.attempt(getattr(self.metrics, name), *args)


def _newest_pressure(reports: Sequence[EngineReport | None]) -> dict[str, float]:
    figures = [
        report.figures for report in reports if report is not None and "pressure_step" in report.figures
    ]
    return dict(max(figures, key=lambda entry: entry["pressure_step"])) if figures else {}


def _report(row: Sequence[Any]) -> EngineReport | None:
    """The report in a coordinator's row; None: there is none in it, or none that can be read."""
    if len(row) <= STOCK_ROW:
        return None
    report = EngineReport.from_wire(row[STOCK_ROW])
    if report is None:
        warn_once(
            "Gimbal: an engine's report cannot be read; as long as one is missing, requests go to the engines in "
            "turn. All nodes need the same release of this package"
        )
    return report


def _slots(scheduler_config: Any) -> int:
    """Requests that an engine runs at a time."""
    # The first, if there is one and it is set, is a limit below the second.
    return int(getattr(scheduler_config, "max_num_active_seqs", None) or scheduler_config.max_num_seqs)


def _prompt_tokens(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return int(request.prompt_embeds.shape[0]) if request.prompt_embeds is not None else 0


class _Rows:
    """`lb_engines`: holds vLLM's three columns, hands the fourth to the engine choice."""

    def __get__(self, client: Any, _owner: Any = None) -> Any:
        return self if client is None else vars(client)["_lb_rows"]

    def __set__(self, client: Any, rows: list[list[Any]]) -> None:
        vars(client)["_lb_rows"] = [row[:STOCK_ROW] for row in rows]
        choice = vars(client).get("_gimbal_choice")
        if choice is not None:
            choice.fuse.attempt(choice.observe, rows)


def _choose(client: Any, choice: EngineChoice, request: Any, stock: Any, late_index: Any) -> Any:
    """The engine of a request, chosen by Algorithm 1 and booked by vLLM's own method `stock`."""
    num_engines = len(client.core_engines)
    choice.fit(num_engines)
    known = client.reqs_in_flight.get(request.request_id)
    if known is not None and known not in client.core_engines:
        return stock(client, request)  # a session on an engine that scaling has removed: vLLM's own answer
    pinned = client.core_engines.index(known) if known is not None else request.data_parallel_rank
    if pinned is None:
        pinned = late_index(request.pooling_params, num_engines)
    if pinned is not None and not 0 <= pinned < num_engines:
        return stock(client, request)  # a rank that does not exist: vLLM's own answer to it
    asked = request.data_parallel_rank
    request.data_parallel_rank = choice.choose(request, pinned).engine
    try:
        return stock(client, request)
    finally:
        request.data_parallel_rank = asked


def check() -> None:
    """Looks up all that `install` changes, and changes nothing.

    Raises:
        HookMismatch: this vLLM is not as expected.
    """
    for name, parameters in STOCK_METHODS.items():
        expect(MODULE, f"DPLBAsyncMPClient.{name}", parameters)
    expect(MODULE, "get_late_interaction_engine_index", ["pooling_params", "num_engines"])
    fields = expect("vllm.v1.engine", "EngineCoreRequest").__struct_fields__
    missing = REQUEST_FIELDS - set(fields)
    if missing:
        raise HookMismatch(f"EngineCoreRequest has no {', '.join(sorted(missing))}")


def install() -> None:
    """Replaces the choice of vLLM's API server client, and what it is told."""
    client_class = expect(MODULE, "DPLBAsyncMPClient")
    init, stock, process_outputs, abort = (
        expect(MODULE, f"DPLBAsyncMPClient.{name}") for name in STOCK_METHODS
    )
    late_index = expect(MODULE, "get_late_interaction_engine_index")

    def client_init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        config = config_for(vllm_config)
        if reports_travel(config):
            self._gimbal_choice = Fuse("engine-choice").run(
                lambda: EngineChoice(
                    vllm_config,
                    self.engine_ranks_managed,
                    self.client_index,
                    clients=self.client_count,
                    first=self.eng_start_index,
                ),
                lambda: None,
            )
            if self._gimbal_choice is not None and config.chooses_engines:
                debug_endpoint.serve(self._gimbal_choice.state, strict=config.strict)

    def get_core_engine_for_request(self: Any, request: Any) -> Any:
        choice = vars(self).get("_gimbal_choice")
        if choice is None or not choice.config.chooses_engines:
            return stock(self, request)
        return choice.fuse.run(
            lambda: _choose(self, choice, request, stock, late_index), lambda: stock(self, request)
        )

    async def process_engine_outputs(self: Any, outputs: Any) -> None:
        choice = vars(self).get("_gimbal_choice")
        if choice is not None:
            choice.release_all(outputs.finished_requests or ())
            # A request that failed before it was admitted is reported here only.
            choice.release_all(
                output.request_id for output in outputs.outputs if output.finish_reason is not None
            )
        await process_outputs(self, outputs)

    async def abort_requests_async(self: Any, request_ids: list[str]) -> None:
        choice = vars(self).get("_gimbal_choice")
        if choice is not None:
            choice.release_all(request_ids)
        await abort(self, request_ids)

    client_class.__init__ = client_init
    client_class.lb_engines = _Rows()
    client_class.get_core_engine_for_request = get_core_engine_for_request
    client_class.process_engine_outputs = staticmethod(process_engine_outputs)
    client_class.abort_requests_async = abort_requests_async
