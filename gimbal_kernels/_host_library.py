"""The compiled host kernels: one shared library with a plain C interface, loaded once per process."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

LIBRARY_PATH = Path(__file__).parent / "_native" / "libgimbal_host.so"


@lru_cache(maxsize=1)
def _open() -> tuple[ctypes.CDLL | None, str]:
    if not LIBRARY_PATH.exists():
        return (
            None,
            f"{LIBRARY_PATH.name} was not built (no C++ compiler at install time)",
        )
    try:
        return ctypes.CDLL(str(LIBRARY_PATH)), "ready"
    except OSError as error:
        return None, f"{LIBRARY_PATH.name} does not load: {error}"


def load() -> ctypes.CDLL | None:
    """The library, or None when it was not built or does not load; `status` says why."""
    return _open()[0]


def status() -> str:
    """ "ready", or the reason why the library cannot be used."""
    return _open()[1]


def interface(room: str, version: int) -> tuple[Any, str]:
    """The library and "ready" if one primitive's functions (csrc/<room>) are those expected; else None and why.

    Args:
        room: the primitive's folder in csrc.
        version: that its `gimbal_<room>_abi` must return.
    """
    library = load()
    if library is None:
        return None, status()
    try:
        abi = getattr(library, f"gimbal_{room}_abi")
    except AttributeError as error:
        return None, f"the host library was built from other sources, reinstall ({error})"
    abi.restype = ctypes.c_int32
    found = abi()
    if found != version:
        return None, f"the host library has {room} interface {found}, not {version}: reinstall"
    return library, "ready"
