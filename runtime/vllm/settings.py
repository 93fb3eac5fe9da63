"""Settings inside vLLM: read once per `VllmConfig`, checked while the server starts."""

from __future__ import annotations

import os
from typing import Any

from ..config import GimbalConfig
from .guard import Hook, HookMismatch, expect, inactive, logger

_OFF = GimbalConfig(mode="off")
SCHEDULER = "gimbal_runtime.vllm.scheduler.GimbalScheduler"
ASYNC_SCHEDULER = "gimbal_runtime.vllm.scheduler.GimbalAsyncScheduler"


def config_for(vllm_config: Any) -> GimbalConfig:
    """The settings in force for one server; `off` for a model without experts, which Gimbal leaves alone.

    Raises:
        ValueError: an unknown setting, mode or value; the message lists the valid ones.
        RuntimeError: `strict`, and a hook does not fit (the setting may come with the configuration, after the
            hooks were installed).
    """
    known = vars(vllm_config).get("_gimbal_config")
    if known is None:
        extra = vllm_config.additional_config
        known = GimbalConfig.from_sources(extra if isinstance(extra, dict) else None, os.environ)
        model = vllm_config.model_config
        if model is None or not model.is_moe:
            known = _OFF
        vllm_config._gimbal_config = known
    if known.strict and inactive:
        raise RuntimeError("; ".join(inactive))
    return known  # type: ignore[no-any-return]


def rust_frontend() -> bool:
    """Whether vLLM's Rust front end is asked for; it reads the coordinator's rows itself."""
    return os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0")


def reports_travel(config: GimbalConfig) -> bool:
    """Whether engines report to the API servers: to choose engines, or to export what is counted."""
    return (config.chooses_engines or config.counts_traffic) and not rust_frontend()


def _prepare(vllm_config: Any) -> None:
    """Checks the settings and puts the queue in place, before any engine process is started."""
    config = config_for(vllm_config)
    scheduler = vllm_config.scheduler_config
    if config.chooses_engines and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    if config.mode == "off" and not config.observe:
        return
    logger.info("Gimbal mode '%s'%s", config.mode, " (observing)" if config.observe else "")
    for half in _idle_halves(config, vllm_config.parallel_config):
        logger.warning("Gimbal: %s", half)


def _idle_halves(config: GimbalConfig, parallel: Any) -> list[str]:
    """What the mode asks for and this server cannot do."""
    halves = []
    if config.counts_traffic and not parallel.enable_eplb:
        halves.append("nothing is counted or placed: --enable-eplb is not set")
    if config.chooses_engines and parallel.data_parallel_size == 1:
        halves.append("engine choice is inactive: there is one engine (--data-parallel-size 1)")
    elif config.chooses_engines and parallel.data_parallel_external_lb:
        halves.append("engine choice is inactive: an external load balancer chooses")
    elif config.chooses_engines and rust_frontend():
        halves.append("engine choice is inactive: the Rust frontend is in use and chooses by itself")
    if config.counts_traffic and (parallel.data_parallel_size == 1 or parallel.data_parallel_external_lb):
        halves.append("placement figures are in the log only: no internal load balancer, no way to /metrics")
    return halves


def _install() -> None:
    arguments = expect("vllm.engine.arg_utils", "EngineArgs")
    stock = expect("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ["self"])
    expect("vllm.config", "VllmConfig")
    # A queue that cannot be built would end the engine, long after this process has found that all is well.
    missing = expect("gimbal_runtime.vllm.scheduler", "WaitingQueue").__abstractmethods__
    if missing:
        raise HookMismatch(f"vLLM's RequestQueue asks for {', '.join(sorted(missing))}")

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = stock(self, *args, **kwargs)
        _prepare(vllm_config)
        return vllm_config

    arguments.create_engine_config = create_engine_config


HOOKS = (Hook("settings", _install),)
