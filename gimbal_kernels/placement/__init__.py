"""Expert placement: which expert lives in which slot, from source x expert traffic (SPEC sections 3 and 4)."""

from .bound import lower_bound
from .objective import evaluate, measure_drift
from .problem import CALIBRATED, UNCALIBRATED, Placement, PlacementProblem, Weights
from .shrinkage import ShrinkState, shrink
from .solve import place
from .water_fill import water_fill

__all__ = [
    "CALIBRATED",
    "UNCALIBRATED",
    "Placement",
    "PlacementProblem",
    "ShrinkState",
    "Weights",
    "evaluate",
    "lower_bound",
    "measure_drift",
    "place",
    "shrink",
    "water_fill",
]
