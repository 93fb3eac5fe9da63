"""The glue to vLLM: one file per hook, installed through vLLM's plug-in entry point."""

from __future__ import annotations

import importlib
import os

from ..config import GimbalConfig
from .guard import Hook, install_hooks, once

CPU_MODULES = ("cpu_platform", "cpu_eplb")
"""Platform layer: active on vLLM's CPU platform only, in every mode."""

MODULES = (
    "settings",
    "counting_hooks",
    "slot_maps",
    "share_refresh",
    "eplb_policy",
    "weight_transfer",
    "worker_report",
    "trace_path",
    "chunk_limit",
    "node_stats",
)
"""The hooks proper. They ask each server's settings what to do, so that mode `off` is stock vLLM."""


def _hooks(name: str) -> list[Hook]:
    """The hooks of one module; a module that cannot even be imported is one hook that does not fit."""
    try:
        return list(importlib.import_module(f"{__name__}.{name}").HOOKS)
    except Exception as error:
        failure = error

        def fail() -> None:
            raise failure

        return [Hook(name, fail)]


@once
def register() -> None:
    """Entry point `vllm.general_plugins`: called in every vLLM process before an engine is built.

    Raises:
        ValueError: an unknown GIMBAL_* variable, mode or value; the message lists the valid ones.
        RuntimeError: `strict`, and a hook does not fit the installed vLLM.
    """
    import vllm
    from vllm.platforms import current_platform

    config = GimbalConfig.from_sources(None, os.environ)
    modules = [*(CPU_MODULES if current_platform.is_cpu() else ()), *MODULES]
    hooks = [hook for name in modules for hook in _hooks(name)]
    install_hooks(hooks, vllm.__version__, strict=config.strict)
