"""Mixed-integer linear programs by HiGHS (package highspy, extra `offline`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

INFINITY = highspy.kHighsInf


class _SilentHighs(highspy.Highs):  # type: ignore[misc]  # highspy is Any to the type checker
    """HiGHS prints a banner while its callbacks are enabled, before a caller could switch output off."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


@dataclass(frozen=True, eq=False)
class Solution:
    """values: [columns], or None when none was found. bound: no solution costs less. optimal: within the gap."""

    values: Any
    bound: float
    optimal: bool


class Program:
    """minimise cost @ x, rows and columns within bounds, some columns integer; built by columns, then rows."""

    def __init__(self) -> None:
        self._cost: list[Any] = []
        self._column_bounds: list[tuple[Any, Any]] = []
        self._integer: list[Any] = []
        self._columns = 0
        self._row_start: list[int] = [0]
        self._row_columns: list[Any] = []
        self._row_values: list[Any] = []
        self._row_bounds: list[tuple[float, float]] = []

    @property
    def num_columns(self) -> int:
        return self._columns

    def add_columns(self, cost: Any, *, low: float, high: float, integer: bool = False) -> Any:
        """One column per entry of `cost`; returns their indices in the same shape."""
        cost = np.asarray(cost, dtype=np.float64)
        self._cost.append(cost.ravel())
        self._column_bounds.append((np.full(cost.size, low), np.full(cost.size, high)))
        self._integer.append(np.full(cost.size, integer))
        index = np.arange(self._columns, self._columns + cost.size).reshape(cost.shape)
        self._columns += cost.size
        return index

    def add_row(self, columns: Any, values: Any, low: float, high: float) -> None:
        """low <= sum of values * columns <= high; a single value holds for all columns."""
        columns = np.asarray(columns, dtype=np.int32).ravel()
        self._row_columns.append(columns)
        self._row_values.append(np.broadcast_to(np.asarray(values, dtype=np.float64).ravel(), columns.shape))
        self._row_start.append(self._row_start[-1] + len(columns))
        self._row_bounds.append((low, high))

    def solve(self, *, time_limit: float, gap: float, start: Any = None, threads: int = 1) -> Solution:
        """Branch and bound until the gap between solution and bound, relative to the solution, is reached.

        Args:
            time_limit: seconds.
            start: [columns] of a feasible solution, or None.

        Raises:
            RuntimeError: HiGHS refuses the program, or there is no feasible solution.
        """
        solver = _SilentHighs()
        options = {
            "time_limit": float(time_limit),
            "mip_rel_gap": float(gap),
            "mip_abs_gap": 1e-12,
            "threads": threads,
            "random_seed": 0,
        }
        for name, value in options.items():
            solver.setOptionValue(name, value)
        if solver.passModel(self._model()) == highspy.HighsStatus.kError:
            raise RuntimeError("HiGHS refuses the program")
        if start is not None:
            given = highspy.HighsSolution()
            given.col_value = [float(value) for value in start]
            solver.setSolution(given)
        solver.run()
        status = solver.getModelStatus()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            raise RuntimeError("HiGHS finds no feasible solution")
        info = solver.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        bound = info.mip_dual_bound if any(map(np.any, self._integer)) else info.objective_function_value
        return Solution(values, float(bound), bool(status == highspy.HighsModelStatus.kOptimal))

    def _model(self) -> Any:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self._columns, len(self._row_bounds)
        model.col_cost_ = np.concatenate(self._cost)
        model.col_lower_ = np.concatenate([low for low, _ in self._column_bounds])
        model.col_upper_ = np.concatenate([high for _, high in self._column_bounds])
        model.row_lower_ = np.array([low for low, _ in self._row_bounds], dtype=np.float64)
        model.row_upper_ = np.array([high for _, high in self._row_bounds], dtype=np.float64)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._row_start, dtype=np.int32)
        model.a_matrix_.index_ = np.concatenate(self._row_columns)
        model.a_matrix_.value_ = np.concatenate(self._row_values)
        kinds = highspy.HighsVarType
        model.integrality_ = [
            kinds.kInteger if integer else kinds.kContinuous for integer in np.concatenate(self._integer)
        ]
        return model


def assignment_columns(program: Program, cost: Any, size: int) -> Any:
    """Binary columns x[R, E]: expert e is on rank r. Each expert on one rank, `size` experts on each rank.

    cost: [R, E] of each choice. Returns the columns' indices [R, E].
    """
    columns = program.add_columns(cost, low=0.0, high=1.0, integer=True)
    for expert in range(columns.shape[1]):
        program.add_row(columns[:, expert], 1.0, 1.0, 1.0)
    for rank in range(columns.shape[0]):
        program.add_row(columns[rank], 1.0, size, size)
    return columns
