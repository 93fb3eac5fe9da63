"""The placement half of the loop, free of any serving engine: a window's traffic in, slots and figures out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, place
from gimbal_kernels.placement.problem import CALIBRATED
from gimbal_kernels.topology import Topology

from .config import GimbalConfig


@dataclass(frozen=True)
class WindowFigures:
    """One closed window under the slots that were in force.

    remote_pick_share: share of picks served off their source's own ranks, 0 to 1.
    max_over_mean: fullest rank over the mean rank, averaged over the layers that saw picks; 1 is balanced.
    picks: routed picks in the window.
    """

    remote_pick_share: float
    max_over_mean: float
    picks: int


class Balancer:
    """Places one model's experts window by window.

    Args:
        config: mode, method and weights.
        topology: distances from the DP sources to the EP ranks.
        slots_per_rank: C.

    Every rank of a serving group runs its own Balancer on the same reduced traffic and must come to the same
    bytes: nothing in here depends on time, on threads or on chance.
    """

    def __init__(self, config: GimbalConfig, topology: Topology, slots_per_rank: int) -> None:
        self.config = config
        self.topology = topology
        self.slots_per_rank = slots_per_rank
        self._is_remote = Topology(np.asarray(topology.distance) > 0)

    def measure(self, traffic: Any, slots: Any) -> WindowFigures:
        """Figures of a window; traffic [L, S, E] picks, slots [L, P]."""
        traffic = np.asarray(traffic)
        result = evaluate(PlacementProblem(traffic, self._is_remote, self.slots_per_rank), slots)
        picks = traffic.sum(axis=(1, 2)).astype(np.float64)
        total = float(picks.sum())
        share = float((result.comm.numpy() * picks).sum() / total) if total else 0.0
        seen = picks > 0
        fullest = float(result.max_over_mean.numpy()[seen].mean()) if total else 1.0
        return WindowFigures(share, fullest, int(total))

    def decide(self, traffic: Any, slots: Any) -> Any:
        """Slots [L, P] int32 for the next window; traffic [L, S, E] picks, slots [L, P] those in force."""
        problem = PlacementProblem(
            traffic, self.topology, self.slots_per_rank, current=slots, weights=self._weights()
        )
        return place(problem, method=self.config.method).slots.numpy()

    def _weights(self) -> Weights | None:
        given = {name: getattr(self.config, name) for name in ("alpha", "beta", "gamma")}
        if all(value is None for value in given.values()):
            return None
        base = CALIBRATED if self.config.method == "paper" else Weights()
        return Weights(**{name: getattr(base, name) if v is None else v for name, v in given.items()})


def moved_copies(old: Any, new: Any, slots_per_rank: int) -> int:
    """Copies of experts that a rank holds in `new` [L, P] and not in `old` [L, P]: what has to be sent."""
    old, new = np.asarray(old), np.asarray(new)
    moved = 0
    for first in range(0, old.shape[1], slots_per_rank):
        held = old[:, first : first + slots_per_rank]
        wanted = np.sort(new[:, first : first + slots_per_rank], axis=1)
        is_new = (wanted[:, :, None] != held[:, None, :]).all(axis=2)
        repeated = np.zeros_like(is_new)
        repeated[:, 1:] = wanted[:, 1:] == wanted[:, :-1]  # a second copy on the same rank costs no transfer
        moved += int((is_new & ~repeated).sum())
    return moved


def save_window(folder: str, index: int, *, traffic: Any, current: Any, slots: Any) -> Path:
    """Writes `window-NNNNNN.npz`: traffic [L, S, E], the slots in force and those decided, both [L, P]."""
    arrays = {
        "traffic": np.asarray(traffic, dtype=np.int64),
        "current": np.asarray(current, dtype=np.int32),
        "slots": np.asarray(slots, dtype=np.int32),
    }
    return _save(Path(folder) / f"window-{index:06d}.npz", arrays)


def save_rest(folder: str, rank: int, *, traffic: Any, current: Any) -> Path:
    """Writes `rest-rankNNNN.npz`: one rank's own picks [L, S, E] in the window that was open at the end."""
    arrays = {
        "traffic": np.asarray(traffic, dtype=np.int64),
        "current": np.asarray(current, dtype=np.int32),
    }
    return _save(Path(folder) / f"rest-rank{rank:04d}.npz", arrays)


def _save(target: Path, arrays: dict[str, Any]) -> Path:
    """Written beside and renamed, so that a reader never finds half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".tmp")
    with scratch.open("wb") as file:
        np.savez_compressed(file, **arrays)
    scratch.replace(target)
    return target
