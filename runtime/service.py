"""Which copy serves which pick, and the rank loads that follow (SPEC section 4); float64 on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from gimbal_kernels.placement import PlacementProblem, Weights, water_fill
from gimbal_kernels.topology import Topology

SHARES_BETA = 20.0
"""Weight of balance when shares are fitted: unlike a placement they cost nothing to change (SPEC section 4)."""
ENOUGH = 10.0
"""Picks per expert from which a layer's shares are fitted; with fewer, the nearest copies serve."""


def nearest_shares(slots: Any, topology: Topology, num_experts: int) -> Any:
    """Picks go to the nearest copies, evenly among equally near ones: shares [L, S, P] of a slot map [L, P].

    The share of slot p for source s is which part of s's picks of the expert in that slot it serves.
    """
    slots = np.asarray(slots)
    rank = np.arange(slots.shape[1]) // (slots.shape[1] // topology.num_ranks)
    shape = (len(slots), topology.num_sources, slots.shape[1])
    distance = np.broadcast_to(topology.distance[:, rank], shape)
    at = (np.arange(shape[0])[:, None, None], np.arange(shape[1])[None, :, None], slots[:, None])
    nearest = np.full((shape[0], shape[1], num_experts), np.inf)
    np.minimum.at(nearest, at, distance)
    serves = distance == nearest[at]
    servers = np.zeros_like(nearest)
    np.add.at(servers, at, serves)
    return serves / servers[at]


def fitted_shares(traffic: Any, slots: Any, topology: Topology) -> Any:
    """Shares [L, S, P] that trade distance for even rank loads, by water-filling (SPEC section 4).

    Args:
        traffic: [L, S, E] picks of the first part of a window, say.
        slots: [L, P].

    A layer with less than `ENOUGH` picks per expert keeps the nearest copies.
    """
    traffic, slots = np.asarray(traffic), np.asarray(slots)
    enough = traffic.sum(axis=(1, 2)) >= ENOUGH * traffic.shape[2]
    problem = PlacementProblem(
        traffic * enough[:, None, None],
        topology,
        slots.shape[1] // topology.num_ranks,
        weights=Weights(1.0, SHARES_BETA, 0.0),
    )
    return water_fill(problem, slots).numpy()


def even_shares(slots: Any, num_sources: int, num_experts: int) -> Any:
    """Every copy serves as much as the others, wherever it is, as with vLLM's own recording: shares [L, S, P]."""
    slots = np.asarray(slots)
    copies = np.zeros((len(slots), num_experts))
    layer = np.arange(len(slots))[:, None]
    np.add.at(copies, (layer, slots), 1.0)
    return np.repeat(1.0 / copies[layer, slots][:, None], num_sources, axis=1)


def served(traffic: Any, slots: Any, shares: Any) -> Any:
    """Picks of source s that slot p serves, [L, S, P]; traffic [L, S, E], slots [L, P], shares [L, S, P]."""
    index = np.broadcast_to(np.asarray(slots)[:, None], np.shape(shares))
    return np.take_along_axis(np.asarray(traffic, dtype=np.float64), index, axis=2) * shares


def max_over_mean(windows: Any, weights: Any, traffic: Any, slots: Any, shares: Any, *, ranks: int) -> Any:
    """Fullest rank over the mean rank, [L], as a weighted mean over windows.

    A slot map that was fitted to one window looks better in it than in the next; over several windows it
    looks less so.

    Args:
        windows: [K, L, E] picks; windows in which a layer saw none do not count there.
        weights: [K].
        traffic: [L, S, E] picks by which an expert's load is split over its copies; that of an expert without
            any is split evenly over its slots, as in the cost of a placement (`evaluate`).
        slots: [L, P]; shares: [L, S, P].

    Returns:
        float64 [L]; 1 for a layer without picks.
    """
    slots, windows = np.asarray(slots), np.asarray(windows, dtype=np.float64)
    layer = np.arange(len(slots))[:, None]
    picked = served(traffic, slots, shares).sum(axis=1)
    total = np.asarray(traffic, dtype=np.float64).sum(axis=1)[layer, slots]
    evenly = even_shares(slots, 1, windows.shape[2])[:, 0]
    part = np.where(total > 0, picked / np.where(total > 0, total, 1.0), evenly)
    load = (windows[:, layer, slots] * part).reshape(len(windows), len(slots), ranks, -1).sum(axis=3)
    mean = load.mean(axis=2)
    seen = mean > 0
    ratio = np.where(seen, load.max(axis=2) / np.where(seen, mean, 1.0), 0.0)
    weight = np.asarray(weights)[:, None] * seen
    in_all = weight.sum(axis=0)
    return np.where(in_all > 0, (ratio * weight).sum(axis=0) / np.where(in_all > 0, in_all, 1.0), 1.0)
