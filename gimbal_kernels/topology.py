"""Who is near whom: the distance from every DP source to every EP rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._arrays import to_host


@dataclass(frozen=True, eq=False)
class Topology:
    """Distances d(s, r) from DP source s to EP rank r (SPEC section 1).

    Args:
        distance: [S, R] non-negative, finite. 0 means that a pick served there crosses no link; the unit is
            "remote picks", so 1 is one ordinary link and 8 a link eight times as dear.

    Raises:
        ValueError: not two-dimensional, empty, negative, NaN or infinite.
    """

    distance: Any

    def __post_init__(self) -> None:
        distance = np.array(to_host(self.distance, "distance"), dtype=np.float64)
        if distance.ndim != 2 or 0 in distance.shape:
            raise ValueError(f"distance: shape {distance.shape}; valid: [S, R] with S >= 1 and R >= 1")
        if not np.isfinite(distance).all() or (distance < 0).any():
            raise ValueError("distance: has negative, NaN or infinite entries; valid: finite numbers >= 0")
        distance.setflags(write=False)
        object.__setattr__(self, "distance", distance)

    @property
    def num_sources(self) -> int:
        return int(self.distance.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.distance.shape[1])

    @staticmethod
    def grid(*, nodes: int = 1, gpus_per_node: int, sources: int, far: float = 8.0) -> Topology:
        """Ranks in node order; each source owns an equal block of consecutive ranks.

        The distance is 0 to the ranks that a source owns, 1 to the others of the nodes on which it owns
        ranks, and `far` to all other nodes.

        Raises:
            ValueError: a non-positive count, or ranks that do not divide evenly among the sources.
        """
        for name, value in (("nodes", nodes), ("gpus_per_node", gpus_per_node), ("sources", sources)):
            if value < 1:
                raise ValueError(f"{name}: {value}; valid: an integer >= 1")
        ranks = nodes * gpus_per_node
        if ranks % sources:
            raise ValueError(f"sources: {sources} does not divide {ranks} ranks; valid: a divisor of {ranks}")
        owned = ranks // sources
        rank: Any = np.arange(ranks)
        owner: Any = rank // owned
        node: Any = rank // gpus_per_node
        distance = np.full((sources, ranks), float(far))
        for source in range(sources):
            mine = owner == source
            distance[source, np.isin(node, node[mine])] = 1.0
            distance[source, mine] = 0.0
        return Topology(distance)
