"""The compiled methods: same bytes as `reference`, layers on threads for large problems (csrc/placement)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from .. import _host_library
from .objective import window_weights
from .portfolio import Effort
from .problem import CALIBRATED, PlacementProblem, Weights

ABI = 4
METHOD_NUMBERS = {"paper": 0, "greedy": 1, "eplb": 2}
# Of the compiled search; every one finds the same bytes (enum InstructionSet in csrc/placement/job.hpp).
INSTRUCTION_SETS = {"best": 0, "baseline": 1, "avx2": 2, "avx512": 3}
DEFAULT_WEIGHTS = {"paper": CALIBRATED, "greedy": Weights(), "eplb": Weights()}


@lru_cache(maxsize=1)
def _bind() -> tuple[Any, str]:
    library, reason = _host_library.interface("placement", ABI)
    if library is None:
        return None, reason
    pointer = ctypes.c_void_p
    solve_layers = library.gimbal_placement_solve
    solve_layers.argtypes = [ctypes.c_int32, *[pointer] * 5, ctypes.c_int32, pointer]
    solve_layers.restype = ctypes.c_int32
    portfolio = library.gimbal_placement_portfolio
    portfolio.argtypes = [*[pointer] * 7, ctypes.c_double, ctypes.c_int32, pointer]
    portfolio.restype = ctypes.c_int32
    bound = library.gimbal_placement_bound
    bound.argtypes = [pointer] * 9
    bound.restype = ctypes.c_int32
    return library, "ready"


def status() -> str:
    """ "ready", or the reason why the compiled methods cannot be used."""
    return _bind()[1]


def _library() -> Any:
    library, reason = _bind()
    if library is None:
        raise RuntimeError(f"compiled placement is not available: {reason}")
    return library


def solve(problem: PlacementProblem, method: str, *, threads: int = 0) -> Any:
    """Slot map int32 [L, P] by `method`, as `reference.solve`; threads = 0 chooses their number by size.

    Raises:
        RuntimeError: the library is not available (`status` says why).
        MemoryError: no memory for the work space.
    """
    solve_layers = _library().gimbal_placement_solve
    if method == "stay" and problem.current is not None:
        return problem.current
    traffic = problem.traffic
    if method == "stay":  # without a current placement: what a layer without traffic gets
        method, traffic = "eplb", np.zeros_like(traffic)
    chosen = problem.weights_for(DEFAULT_WEIGHTS[method])
    weights = np.array([chosen.alpha, chosen.beta, chosen.gamma], dtype=np.float64)
    shape = np.array([*traffic.shape, problem.num_ranks, problem.slots_per_rank], dtype=np.int64)
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    failed = solve_layers(
        METHOD_NUMBERS[method],
        shape.ctypes.data,
        traffic.ctypes.data,
        problem.topology.distance.ctypes.data,
        None if problem.current is None else problem.current.ctypes.data,
        weights.ctypes.data,
        threads,
        slots.ctypes.data,
    )
    if failed:
        raise MemoryError("compiled placement: out of memory")
    return slots


def solve_portfolio(
    problem: PlacementProblem,
    effort: Effort,
    *,
    max_moves: int | None = None,
    time_budget: float | None = None,
    threads: int = 0,
    instruction_set: str = "best",
) -> Any:
    """Slot map int32 [L, P] by method "portfolio" without spare slots, as `reference.solve_portfolio`.

    time_budget: seconds after which no kick starts, or None. threads = 0: one per core, at most 8.
    instruction_set: "best", or one of `instruction_sets()`.

    Raises:
        RuntimeError, MemoryError: as `solve`; RuntimeError: the processor lacks the instruction set.
    """
    solve_layers = _library().gimbal_placement_portfolio
    sizes, arrays = _arrays(problem)
    limits = [effort.kicks, effort.seeds, -1 if max_moves is None else max_moves]
    shape = np.array([*sizes, *limits, INSTRUCTION_SETS[instruction_set]], dtype=np.int64)
    slots: Any = np.empty((problem.num_layers, problem.num_slots), dtype=np.int32)
    failed = solve_layers(
        shape.ctypes.data,
        *[None if array is None else array.ctypes.data for array in arrays],
        -1.0 if time_budget is None else time_budget,
        threads,
        slots.ctypes.data,
    )
    if failed == 2:
        raise RuntimeError(f"this processor or build has no {instruction_set}")
    if failed:
        raise MemoryError("compiled placement: out of memory")
    return slots


def instruction_sets() -> list[str]:
    """What the compiled search can use on this processor; "baseline" is always among them."""
    found = _library().gimbal_placement_instruction_sets()
    return [name for name, number in INSTRUCTION_SETS.items() if found >> number & 1]


def bound(problem: PlacementProblem, upper: Any, *, lift: bool, nodes: int) -> Any:
    """Lower bounds float64 [L] on the cost without its drift term, P = E; upper: [L] costs that are reached.

    Raises:
        RuntimeError, MemoryError: as `solve`.
    """
    bound_layers = _library().gimbal_placement_bound
    sizes, arrays = _arrays(problem)
    shape = np.array([*sizes, nodes, int(lift)], dtype=np.int64)
    upper = np.ascontiguousarray(upper, dtype=np.float64)
    found: Any = np.empty(problem.num_layers, dtype=np.float64)
    failed = bound_layers(
        shape.ctypes.data,
        *[None if array is None else array.ctypes.data for array in arrays],
        upper.ctypes.data,
        found.ctypes.data,
    )
    if failed:
        raise MemoryError("lower bound: out of memory")
    return found


def _arrays(problem: PlacementProblem) -> tuple[list[int], list[Any]]:
    """Sizes, and the arrays that the compiled search and bound take, in the order of their arguments."""
    loads = np.ascontiguousarray(problem.window_loads())
    chosen = problem.weights_for(Weights())
    arrays = [
        problem.traffic,
        problem.topology.distance,
        loads,
        np.ascontiguousarray(window_weights(len(loads))),
        problem.current,
        np.array([chosen.alpha, chosen.beta, chosen.gamma], dtype=np.float64),
    ]
    return [*problem.traffic.shape, problem.num_ranks, problem.slots_per_rank, len(loads)], arrays
