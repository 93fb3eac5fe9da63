"""The compiled planner (csrc/migration): same bytes as `reference`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from .. import _host_library

ABI = 1


@lru_cache(maxsize=1)
def library() -> tuple[Any, str]:
    """The library with its migration functions declared, or None and the reason."""
    loaded, reason = _host_library.interface("migration", ABI)
    if loaded is None:
        return None, reason
    number, pointer, word = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64
    signatures = {
        "gimbal_migration_plan": (ctypes.c_int32, [pointer] * 8),
        "gimbal_migration_colour": (number, [number, number, *[pointer] * 3]),
        "gimbal_migration_copy": (None, [pointer, number]),
        "gimbal_migration_load": (word, [pointer]),
        "gimbal_migration_store": (None, [pointer, word]),
        "gimbal_migration_swap": (word, [pointer, word, word]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded, "ready"


def status() -> str:
    """ "ready", or the reason why the compiled planner cannot be used."""
    return library()[1]


def require() -> Any:
    """The library; RuntimeError with the reason when there is none."""
    found, reason = library()
    if found is None:
        raise RuntimeError(f"compiled migration is not available: {reason}")
    return found


def plan(old: Any, new: Any, ranks: int, node_of_rank: Any) -> tuple[Any, Any, Any]:
    """Target int32 [L, P], transfers int32 [N, 6], local copies int32 [M, 4]; see `reference`.

    Raises:
        RuntimeError: the library is not available. MemoryError: no memory for the work space.
    """
    call = require().gimbal_migration_plan
    shape: Any = np.array([*old.shape, ranks], dtype=np.int64)
    nodes: Any = np.ascontiguousarray(node_of_rank, dtype=np.int32)
    target: Any = np.empty_like(old)
    transfers: Any = np.empty((old.size, 6), dtype=np.int32)
    copies: Any = np.empty((old.size, 4), dtype=np.int32)
    counts: Any = np.zeros(2, dtype=np.int64)
    arrays = (shape, old, new, nodes, target, transfers, copies, counts)
    if call(*(array.ctypes.data for array in arrays)):
        raise MemoryError("compiled migration planner: out of memory")
    return target, transfers[: counts[0]].copy(), copies[: counts[1]].copy()


def colour(sources: Any, destinations: Any, ranks: int) -> tuple[Any, int]:
    """Round of each transfer, int32 [N], and the number of rounds; see `reference.colour`.

    Raises:
        RuntimeError: the library is not available. MemoryError: no memory for the work space.
    """
    call = require().gimbal_migration_colour
    source: Any = np.ascontiguousarray(sources, dtype=np.int32)
    destination: Any = np.ascontiguousarray(destinations, dtype=np.int32)
    colours: Any = np.empty(len(source), dtype=np.int32)
    rounds = call(ranks, len(source), source.ctypes.data, destination.ctypes.data, colours.ctypes.data)
    if rounds < 0:
        raise MemoryError("compiled migration planner: out of memory")
    return colours, int(rounds)
