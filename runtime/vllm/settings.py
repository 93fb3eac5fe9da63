"""Settings inside vLLM: read once per `VllmConfig`, checked while the server starts."""

from __future__ import annotations

import os
from typing import Any

from ..config import GimbalConfig
from .guard import Hook, expect, inactive, logger

_OFF = GimbalConfig(mode="off")
SCHEDULER = "gimbal_runtime.vllm.scheduler.GimbalScheduler"
ASYNC_SCHEDULER = "gimbal_runtime.vllm.scheduler.GimbalAsyncScheduler"


def config_for(vllm_config: Any) -> GimbalConfig:
    """The settings in force for one server; `off` for a model without experts, which Gimbal leaves alone.

    Raises:
        ValueError: an unknown setting, mode or value; the message lists the valid ones.
    """
    known = vars(vllm_config).get("_gimbal_config")
    if known is not None:
        return known  # type: ignore[no-any-return]
    extra = vllm_config.additional_config
    config = GimbalConfig.from_sources(extra if isinstance(extra, dict) else None, os.environ)
    model = vllm_config.model_config
    if model is None or not model.is_moe:
        config = _OFF
    vllm_config._gimbal_config = config
    return config


def traffic_travels(config: GimbalConfig) -> bool:
    """Whether engines report to the API servers: to choose engines, or to export what is counted."""
    return config.chooses_engines or config.counts_traffic


def _prepare(vllm_config: Any) -> None:
    """Checks the settings and puts the queue in place, before any engine process is started."""
    config = config_for(vllm_config)
    if config.strict and inactive:  # the setting may have come with the configuration, after the hooks
        raise RuntimeError("; ".join(inactive))
    scheduler = vllm_config.scheduler_config
    if config.chooses_engines and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    if config.mode != "off" or config.observe:
        logger.info("Gimbal mode '%s'%s", config.mode, " (observing)" if config.observe else "")
    if config.chooses_engines and os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        logger.warning(
            "Gimbal: the Rust frontend is in use and chooses engines itself: engine choice is inactive"
        )


def _install() -> None:
    arguments = expect("vllm.engine.arg_utils", "EngineArgs")
    stock = expect("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ["self"])
    expect("vllm.config", "VllmConfig")
    expect("vllm.v1.core.sched.scheduler", "Scheduler")

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = stock(self, *args, **kwargs)
        _prepare(vllm_config)
        return vllm_config

    arguments.create_engine_config = create_engine_config


HOOKS = (Hook("settings", _install),)
