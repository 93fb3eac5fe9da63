"""Offline only, with HiGHS (extra `offline`): the exact reference, calibration, static baselines."""

from .calibration import Agreement, Calibration, calibrate
from .moetuner import moetuner
from .reference import ReferencePlacement, solve_reference
from .sem_moe import CoLocation, Replay, oracle_replay, sem_moe

__all__ = [
    "Agreement",
    "Calibration",
    "CoLocation",
    "ReferencePlacement",
    "Replay",
    "calibrate",
    "moetuner",
    "oracle_replay",
    "sem_moe",
    "solve_reference",
]
