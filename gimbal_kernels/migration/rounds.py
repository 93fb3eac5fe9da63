"""Rounds without contention, and waves that fit into a staging buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import host, reference

if TYPE_CHECKING:
    from .plan import MigrationPlan

BACKENDS = ("auto", "host", "reference")


@dataclass(frozen=True, eq=False)
class Wave:
    """Layers that are staged together and then committed.

    Attributes:
        layers: ascending layers.
        rounds: int64 index arrays into the plan's transfers; in a round no rank sends twice or receives twice.
    """

    layers: tuple[int, ...]
    rounds: list[Any]


def choose_backend(name: str) -> bool:
    """Whether the compiled planner is to be used; ValueError for a name that is unknown or not available."""
    if name not in BACKENDS:
        raise ValueError(f"backend: {name!r}; valid: {', '.join(BACKENDS)}")
    reason = host.status()
    if name == "host" and reason != "ready":
        raise ValueError(f"backend: 'host' is not available: {reason}; valid: auto, reference")
    return name != "reference" and reason == "ready"


def in_rounds(transfers: Any, ranks: int, *, compiled: bool) -> list[Any]:
    """int64 index arrays, one per round, into numpy transfers [N, 6]; ascending inside a round."""
    sources, destinations = transfers[:, 2], transfers[:, 4]
    colours, rounds = (host if compiled else reference).colour(sources, destinations, ranks)
    if rounds == 0:
        return []
    order = torch.from_numpy(np.argsort(colours, kind="stable"))
    return list(torch.split(order, np.bincount(colours, minlength=rounds).tolist()))


def split(plan: MigrationPlan, staging_bytes: int, max_layers: int | None) -> list[Wave]:
    """See `MigrationPlan.waves`."""
    if max_layers is not None and max_layers < 1:
        raise ValueError(f"max_layers: {max_layers}; valid: at least 1, or None")
    transfers = plan.transfers.numpy()
    arriving: Any = np.zeros((plan.target.shape[0], plan.num_ranks), dtype=np.int64)
    np.add.at(arriving, (transfers[:, 0], transfers[:, 4]), plan.bytes_per_expert)
    largest = int(arriving.max(initial=0))
    if largest > staging_bytes:
        layer, rank = (int(i) for i in np.argwhere(arriving == largest)[0])
        raise ValueError(
            f"staging_bytes: {staging_bytes}, but layer {layer} brings {largest} bytes to rank {rank} and a "
            f"layer is staged as a whole; valid: at least {largest}"
        )
    groups: list[list[int]] = []
    filled: Any = np.zeros(plan.num_ranks, dtype=np.int64)
    for layer in plan.changed_layers:
        full = groups and len(groups[-1]) == max_layers
        if not groups or full or (filled + arriving[layer] > staging_bytes).any():
            groups.append([])
            filled = np.zeros_like(filled)
        groups[-1].append(layer)
        filled = filled + arriving[layer]
    if len(groups) == 1:
        return [Wave(tuple(groups[0]), plan.rounds)]
    return [_wave(plan, layers) for layers in groups]


def _wave(plan: MigrationPlan, layers: list[int]) -> Wave:
    transfers = plan.transfers.numpy()  # ascending in the layer
    bounds: Any = np.searchsorted(transfers[:, 0], [layers[0], layers[-1] + 1])
    first, last = bounds.tolist()
    rounds = in_rounds(transfers[first:last], plan.num_ranks, compiled=host.status() == "ready")
    return Wave(tuple(layers), [members + first for members in rounds])
