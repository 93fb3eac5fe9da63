"""Hook: a server tells at `/gimbal/node` what a router of prefill and decode nodes has to know (SPEC section 8).

The engine measures its iterations and reports between two of them, when its API server asks. Nothing is measured
and no route is added unless the setting `node_statistics` is on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from ..config import GimbalConfig
from ..node_report import CHUNKS_ARGUMENT, PATH, TBT_ARGUMENT, NodeReport, Prefill
from .chunk_limit import obeyed
from .guard import Fuse, Hook, expect, patch
from .iteration_recorder import IterationRecorder, argument, request_name, seconds_argument

SCHEDULER = "vllm.v1.core.sched.scheduler"
APP = "vllm.entrypoints.launchers.app"
UTILITY = "gimbal_node_report"
"""Name of the engine's method that an API server calls."""

_fuse = Fuse("node-statistics")


def _recorder(scheduler: Any) -> IterationRecorder | None:
    """The scheduler's recorder; None where node statistics are off."""
    known = vars(scheduler).get("gimbal_recorder", False)
    if known is False:
        wanted = _wanted(scheduler.vllm_config.additional_config)
        known = scheduler.gimbal_recorder = IterationRecorder() if wanted else None
    return known  # type: ignore[no-any-return]


def report(scheduler: Any, recorder: IterationRecorder) -> NodeReport:
    """The state of an engine between two iterations."""
    waiting = [*_requests(scheduler.waiting), *_requests(scheduler.kv_holding_waiting)]
    running = list(scheduler.running)
    prefills, deflected = [], []
    for request in (*running, *waiting):
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left > 0:
            prefills.append(Prefill(request_name(request), left, request.num_computed_tokens))
            if argument(request, CHUNKS_ARGUMENT):
                deflected.append(request_name(request))
    decoding = [request for request in running if request.num_computed_tokens >= request.num_prompt_tokens]
    unfinished = [*running, *waiting]
    limits = [limit for request in unfinished if (limit := seconds_argument(request, TBT_ARGUMENT))]
    return NodeReport(
        steps=recorder.steps,
        model=recorder.model(),
        prefills=tuple(prefills),
        resident=frozenset(name for request in unfinished if (name := request_name(request))),
        n_decode=len(decoding),
        kv_tokens=sum(request.num_computed_tokens for request in decoding),
        kv_free=_kv_free(scheduler, waiting),
        tbt_slo=min(limits, default=None),
        deflected=tuple(deflected),
        limits_chunks=obeyed(scheduler),
        token_budget=scheduler.max_num_scheduled_tokens,
        kv_bytes_per_token=_kv_bytes_per_token(scheduler),
        computed=tuple(recorder.computed),
    )


def _requests(queue: Any) -> Iterable[Any]:
    # vLLM's priority queue sorts itself when it is iterated; its heap has the same requests.
    return getattr(queue, "_heap", queue)  # type: ignore[no-any-return]


def _kv_free(scheduler: Any, waiting: Iterable[Any]) -> int | None:
    """Tokens that fit into free blocks, less what waiting prompts will take; None with several kinds of cache."""
    if len(scheduler.kv_cache_config.kv_cache_groups) != 1:
        return None
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * scheduler.block_size
    return max(0, int(free - sum(request.num_tokens for request in waiting)))


def _kv_bytes_per_token(scheduler: Any) -> float | None:
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return None
    spec = groups[0].kv_cache_spec
    return float(spec.page_size_bytes * len(groups[0].layer_names) / spec.block_size)


def _engine_report(engine: Any) -> dict[str, Any] | None:
    scheduler = engine.scheduler
    recorder = _recorder(scheduler)
    return None if recorder is None else report(scheduler, recorder).to_wire()


async def answer(engine_client: Any) -> tuple[int, dict[str, Any]]:
    """Status and body of the route: one report per engine behind this server."""
    reports = await engine_client.engine_core.call_utility_all_async(UTILITY)
    if any(entry is None for entry in reports):
        return 503, {"error": "no node statistics: an engine has switched them off, its log says why"}
    return 200, {"engines": reports}


def _add_route(app: Any) -> None:
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    async def node(request: Request) -> JSONResponse:
        try:
            status, body = await answer(request.app.state.engine_client)
        except Exception as error:
            status, body = 503, {"error": f"{type(error).__name__}: {error}"}
        return JSONResponse(body, status_code=status)

    app.router.add_route(PATH, node, methods=["GET"], include_in_schema=False)


def _wanted(extra: Any) -> bool:
    """The setting; of models without experts too, which everything else leaves alone.

    Args:
        extra: vLLM's `additional_config`.
    """
    return GimbalConfig.from_sources(extra if isinstance(extra, dict) else None, os.environ).node_statistics


def _install() -> None:
    stock_schedule = expect(SCHEDULER, "Scheduler.schedule", ["self"])
    stock_update = expect(
        SCHEDULER, "Scheduler.update_from_output", ["self", "scheduler_output", "model_runner_output"]
    )
    engine_core = expect("vllm.v1.engine.core", "EngineCore")
    expect("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_all_async", ["self", "method"])
    stock_routers = expect(APP, "register_api_routers", ["args", "app"])
    scheduler = expect(SCHEDULER, "Scheduler")

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = stock_schedule(self, *args, **kwargs)
        recorder = _fuse.run(lambda: _recorder(self), lambda: None)
        if recorder is not None:
            _fuse.attempt(recorder.scheduled, self, output, started)
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        result = stock_update(self, scheduler_output, model_runner_output)
        recorder = _fuse.run(lambda: _recorder(self), lambda: None)
        if recorder is not None:
            _fuse.attempt(recorder.ended, scheduler_output, idle=not self.has_unfinished_requests())
        return result

    def gimbal_node_report(self: Any) -> dict[str, Any] | None:
        return _fuse.run(lambda: _engine_report(self), lambda: None)

    def register_api_routers(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
        stock_routers(args, app, *rest, **kwargs)
        if _wanted(getattr(args, "additional_config", None)):
            _fuse.attempt(_add_route, app)

    scheduler.schedule = schedule
    scheduler.update_from_output = update_from_output
    setattr(engine_core, UTILITY, gimbal_node_report)
    patch(APP, "register_api_routers", register_api_routers)


HOOKS = (Hook("node-statistics", _install),)
