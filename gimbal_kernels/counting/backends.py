"""The backends of `map_and_count`: which are there, and which one serves given tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from . import cuda, host, reference

BACKENDS = ("torch", "host", "triton", "cuda")


def available_backends() -> dict[str, str]:
    """Backends of `map_and_count` on this machine.

    Returns:
        name -> "ready", or the reason why it cannot be used here.
    """
    return {"torch": "ready", "host": host.status(), "triton": _triton_state(), "cuda": cuda.status()}


def implementation(backend: str, topk_ids: Any) -> Callable[..., None]:
    """The function that serves `topk_ids`: a module's `map_and_count`, as `reference` defines it.

    Raises:
        ValueError: an unknown backend, or one that cannot serve these tensors here, with the reason.
    """
    name = choose(backend, topk_ids)
    if name == "host":
        return host.map_and_count
    if name == "torch":
        return reference.map_and_count
    if name == "cuda":
        return cuda.map_and_count
    from . import triton_kernels

    return triton_kernels.map_and_count


def choose(backend: str, topk_ids: Any) -> str:
    """The backend's name once "auto" is resolved; raises as `implementation`."""
    if backend == "auto":
        # The interpreter is for tests that ask for it by name; it is thousands of times slower than torch.
        if topk_ids.is_cuda:
            return "triton" if _has_triton() else "torch"
        return "host" if topk_ids.device.type == "cpu" and host.status() == "ready" else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r}; valid: 'auto', {', '.join(map(repr, BACKENDS))}")
    state = "ready"
    if backend == "cuda":
        state = (
            cuda.status() if topk_ids.is_cuda else f"topk_ids are on {topk_ids.device}, not on a CUDA device"
        )
    elif backend == "host":
        on_host = topk_ids.device.type == "cpu"
        state = host.status() if on_host else f"topk_ids are on {topk_ids.device}, not in host memory"
    elif backend == "triton":
        state = _triton_state()
        if state == "ready" and not topk_ids.is_cuda and not _is_interpreted():
            state = f"topk_ids are on {topk_ids.device}, not on a CUDA device"
    if state != "ready":
        raise ValueError(f"backend: {backend!r} cannot be used here: {state}")
    return backend


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    from . import triton_kernels

    return triton_kernels.is_interpreted()


def _triton_state() -> str:
    if not _has_triton():
        return "the package triton is not installed"
    if torch.cuda.is_available():
        return "ready"
    try:
        interpreted = _is_interpreted()
    except Exception as error:  # a broken or unknown Triton must not take the caller down
        return f"triton cannot be imported: {type(error).__name__}: {error}"
    if interpreted:
        return "ready"
    return "no CUDA device (CPU tensors need TRITON_INTERPRET=1, a testing aid, set before the import)"
