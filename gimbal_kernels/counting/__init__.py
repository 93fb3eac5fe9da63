"""Counting: logical expert ids to physical slots, and who sends how much to which expert (SPEC section 2)."""

from .backend_counts import add_backend_counts
from .backends import available_backends
from .record import map_and_count
from .replica_map import ReplicaMap
from .window import TrafficWindow

__all__ = [
    "ReplicaMap",
    "TrafficWindow",
    "add_backend_counts",
    "available_backends",
    "map_and_count",
]
