"""The traffic windows that a server saved, and what a placement did with them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gimbal_kernels.placement import PlacementProblem, evaluate
from gimbal_kernels.topology import Topology


@dataclass(frozen=True, eq=False)
class SavedWindow:
    """One closed window: picks `traffic` [L, S, E] and the slot map `current` [L, P] in force meanwhile."""

    name: str
    traffic: npt.NDArray[np.int64]
    current: npt.NDArray[np.int32]

    @property
    def picks(self) -> int:
        """Routed picks over all layers and sources."""
        return int(self.traffic.sum())


@dataclass(frozen=True)
class WindowFigures:
    """Shares and ratios of one window or of several.

    `remote_share`: picks served on a rank of another DP group / picks. `max_over_mean`: load of the fullest
    rank / mean load, averaged over layers by picks. None without traffic.
    """

    picks: int
    remote_share: float | None
    max_over_mean: float | None


def load_windows(folder: str | os.PathLike[str]) -> list[SavedWindow]:
    """All `window-*.npz` of a folder in the order of their numbers; windows without a pick are left out.

    A file cut short (its server was being stopped) is left out too.
    """
    windows = []
    for path in sorted(Path(folder).glob("window-*.npz")):
        try:
            with np.load(path) as data:
                traffic = np.asarray(data["traffic"], dtype=np.int64)
                current = np.asarray(data["current"], dtype=np.int32)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
            continue
        if traffic.ndim == 3 and traffic.sum() > 0:
            windows.append(SavedWindow(path.stem, traffic, current))
    return windows


def judge(window: SavedWindow, *, ranks: int, sources: int) -> WindowFigures:
    """Figures of one window under the placement that was in force.

    Args:
        ranks: EP ranks, which hold equal blocks of slots.
        sources: DP engines; each owns an equal block of consecutive ranks (SPEC section 1).
    """
    topology = Topology.grid(gpus_per_node=ranks, sources=sources)
    slots_per_rank = window.current.shape[1] // ranks
    placement: Any = evaluate(PlacementProblem(window.traffic, topology, slots_per_rank), window.current)
    weight = window.traffic.sum(axis=(1, 2)).astype(np.float64)
    busy = weight > 0
    if not busy.any():
        return WindowFigures(0, None, None)
    # Distances here are 0 and 1 only, so that the mean distance of a pick is the remote share.
    remote = np.average(np.asarray(placement.comm, dtype=np.float64)[busy], weights=weight[busy])
    ratio = np.average(np.asarray(placement.max_over_mean, dtype=np.float64)[busy], weights=weight[busy])
    return WindowFigures(window.picks, float(remote), float(ratio))


def combine(figures: Sequence[WindowFigures]) -> WindowFigures:
    """Averages over windows, weighted by their picks."""
    used = [f for f in figures if f.remote_share is not None and f.max_over_mean is not None]
    if not used:
        return WindowFigures(0, None, None)
    weights = [f.picks for f in used]
    return WindowFigures(
        sum(weights),
        float(np.average([f.remote_share for f in used], weights=weights)),
        float(np.average([f.max_over_mean for f in used], weights=weights)),
    )


def busy(windows: Sequence[SavedWindow], share: float = 0.1) -> list[int]:
    """Indices of the windows with at least `share` of the picks of the fullest one.

    Windows are a fixed number of engine steps: before and after a burst they hold a handful of tokens, whose
    shares are mostly chance.
    """
    most = max((window.picks for window in windows), default=0)
    return [i for i, window in enumerate(windows) if window.picks >= share * most]
