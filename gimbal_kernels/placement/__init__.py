"""Expert placement: which expert lives in which slot, from source x expert traffic (SPEC section 3)."""

from .bound import lower_bound
from .objective import evaluate, measure_drift
from .problem import CALIBRATED, UNCALIBRATED, Placement, PlacementProblem, Weights
from .shrinkage import ShrinkState, shrink
from .solve import place

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
]
