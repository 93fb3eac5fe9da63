"""The glue to vLLM: one file per hook, installed through vLLM's plug-in entry point."""

from __future__ import annotations

from .guard import install_hooks, once


@once
def register() -> None:
    """Entry point `vllm.general_plugins`: called in every vLLM process before anything else is built."""
    import vllm
    from vllm.platforms import current_platform

    from . import cpu_eplb, cpu_platform

    if current_platform.is_cpu():
        install_hooks((*cpu_platform.HOOKS, *cpu_eplb.HOOKS), vllm.__version__, strict=False)
