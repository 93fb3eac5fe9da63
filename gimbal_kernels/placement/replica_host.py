"""The compiled search with spare slots and the compiled water-filling (csrc/placement/replica_api.hpp)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from .. import _host_library
from .objective import window_weights
from .problem import PlacementProblem, Weights

ABI = 2


@lru_cache(maxsize=1)
def _bind() -> tuple[Any, str]:
    library, reason = _host_library.interface("replicas", ABI)
    if library is None:
        return None, reason
    pointer = ctypes.c_void_p
    place = library.gimbal_replicas_place
    place.argtypes = [*[pointer] * 7, ctypes.c_double, pointer, ctypes.c_double, ctypes.c_int32, pointer]
    place.restype = ctypes.c_int32
    fill = library.gimbal_water_fill
    fill.argtypes = [*[pointer] * 7, ctypes.c_double, ctypes.c_double, ctypes.c_int32, pointer]
    fill.restype = ctypes.c_int32
    return library, "ready"


def status() -> str:
    """ "ready", or the reason why the compiled functions cannot be used."""
    return _bind()[1]


def _library() -> Any:
    library, reason = _bind()
    if library is None:
        raise RuntimeError(f"compiled placement with spare slots is not available: {reason}")
    return library


def solve(
    problem: PlacementProblem,
    kicks: int,
    *,
    start: Any = None,
    max_moves: int | None = None,
    time_budget: float | None = None,
    threads: int = 0,
) -> Any:
    """Slot map int32 [L, P] by method "portfolio" with spare slots, as `replica_search.solve`.

    start: int32 [L, P] where the search begins too, or None. time_budget: seconds after which no kick starts, or
    None. threads = 0: one per core, at most 8.

    Raises:
        RuntimeError: the library is not available (`status` says why).
        MemoryError: no memory for the work space.
    """
    place = _library().gimbal_replicas_place
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    arrays = _arrays(problem, problem.current, kicks, -1 if max_moves is None else max_moves)
    seconds = -1.0 if time_budget is None else time_budget
    failed = place(
        *_addresses(arrays), problem.drift, *_addresses([start]), seconds, threads, slots.ctypes.data
    )
    if failed:
        raise MemoryError("compiled placement with spare slots: out of memory")
    return slots


def water_fill(problem: PlacementProblem, slots: Any, rounds: int, still: float, *, threads: int = 0) -> Any:
    """Shares float64 [L, S, P], as `water_fill.reference`; slots: checked int32 [L, P].

    Raises:
        RuntimeError, MemoryError: as `solve`.
    """
    fill = _library().gimbal_water_fill
    shares: Any = np.empty((problem.num_layers, problem.num_sources, problem.num_slots))
    arrays = _arrays(problem, slots, rounds)
    failed = fill(*_addresses(arrays), problem.drift, still, threads, shares.ctypes.data)
    if failed:
        raise MemoryError("compiled water-filling: out of memory")
    return shares


def _arrays(problem: PlacementProblem, slots: Any, *limits: int) -> list[Any]:
    """The arrays that both functions take, in the order of their arguments."""
    loads = np.ascontiguousarray(problem.window_loads())
    sizes = [*problem.traffic.shape, problem.num_ranks, problem.slots_per_rank, len(loads), *limits]
    chosen = problem.weights_for(Weights())
    return [
        np.array(sizes, dtype=np.int64),
        problem.traffic,
        problem.topology.distance,
        loads,
        np.ascontiguousarray(window_weights(len(loads))),
        slots,
        np.array([chosen.alpha, chosen.beta, chosen.gamma], dtype=np.float64),
    ]


def _addresses(arrays: list[Any]) -> list[Any]:
    return [None if array is None else array.ctypes.data for array in arrays]
