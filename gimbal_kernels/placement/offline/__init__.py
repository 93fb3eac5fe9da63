"""Offline only, with HiGHS (extra `offline`): the exact reference, calibration, static baselines."""

from .calibration import Agreement, Calibration, calibrate
from .reference import ReferencePlacement, solve_reference

__all__ = ["Agreement", "Calibration", "ReferencePlacement", "calibrate", "solve_reference"]
