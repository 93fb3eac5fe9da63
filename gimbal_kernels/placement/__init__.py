"""Expert placement: which expert lives in which slot, from source x expert traffic (SPEC section 3)."""

from .objective import evaluate
from .problem import CALIBRATED, UNCALIBRATED, Placement, PlacementProblem, Weights
from .solve import place

__all__ = [
    "CALIBRATED",
    "UNCALIBRATED",
    "Placement",
    "PlacementProblem",
    "Weights",
    "evaluate",
    "place",
]
