"""The tables of a `ReplicaMap`, built and checked in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._arrays import to_host
from ..topology import Topology

SHARE_BITS = 16
MAX_COPIES = 2**15 - 1  # thresholds count in 2^-16 of a copy and are 31 bits wide
NO_THRESHOLD = 2**31 - 1


@dataclass(frozen=True)
class Tables:
    """`ReplicaMap`'s tables as numpy arrays, all int32; thresholds only where asked for."""

    replicas: Any
    nearest: Any
    thresholds: Any


def check_slots(slots: Any, topology: Topology, num_experts: int) -> Any:
    """Checks a slot map and returns it as int64 [L, P] in host memory."""
    if not isinstance(topology, Topology):
        raise ValueError(f"topology: a {type(topology).__name__}; valid: a gimbal_kernels.topology.Topology")
    host = to_host(slots, "slots")
    if host.ndim != 2 or host.shape[1] == 0:
        raise ValueError(f"slots: shape {list(host.shape)}; valid: [L, P] with P >= 1")
    if host.dtype.kind not in "iu":
        raise ValueError(f"slots: dtype {host.dtype}; valid: an integer type")
    host = host.astype(np.int64)
    num_slots, ranks = host.shape[1], topology.num_ranks
    if num_slots % ranks:
        raise ValueError(
            f"slots: {num_slots} slots do not divide among {ranks} ranks; valid: a multiple of {ranks}, "
            f"the next is {-(-num_slots // ranks) * ranks}"
        )
    if num_slots < num_experts:
        raise ValueError(
            f"slots: {num_slots} slots for {num_experts} experts; valid: at least one per expert, "
            f"the least multiple of {ranks} ranks is {-(-num_experts // ranks) * ranks}"
        )
    for layer, row in enumerate(host):
        _check_layer(layer, row, num_experts)
    return host


def _check_layer(layer: int, row: Any, num_experts: int) -> None:
    outside = np.flatnonzero((row < 0) | (row >= num_experts))
    if outside.size:
        slot = int(outside[0])
        raise ValueError(
            f"slots: layer {layer}, slot {slot} holds expert {int(row[slot])}; valid: 0 to {num_experts - 1}"
        )
    if num_experts > 1 and (row == row[0]).all():
        raise ValueError(
            f"slots: layer {layer} holds expert {int(row[0])} in all {row.size} slots, as a map that was "
            f"never filled in does; valid: every expert of 0 to {num_experts - 1} at least once"
        )
    missing = np.flatnonzero(np.bincount(row, minlength=num_experts) == 0)
    if missing.size:
        raise ValueError(
            f"slots: layer {layer} has no slot for expert {int(missing[0])} ({missing.size} missing in all); "
            f"valid: every expert at least once"
        )


def check_shares(shares: Any, host: Any, num_sources: int, num_experts: int) -> Any:
    """Checks shares [L, S, P] against a checked slot map; float64, scaled to a sum of 1 per source and expert.

    Raises:
        ValueError: a wrong shape or type, a negative or non-finite share or sum, or an expert without any.
    """
    layers, num_slots = host.shape
    array = to_host(shares, "shares")
    if array.shape != (layers, num_sources, num_slots):
        raise ValueError(f"shares: shape {list(array.shape)}; valid: {[layers, num_sources, num_slots]}")
    array = array.astype(np.float64)
    bad = np.argwhere(~np.isfinite(array) | (array < 0))
    if bad.size:
        layer, source, slot = (int(v) for v in bad[0])
        raise ValueError(
            f"shares: layer {layer}, source {source}, slot {slot} has {array[layer, source, slot]}; "
            f"valid: finite numbers >= 0"
        )
    total = np.zeros((layers, num_sources, num_experts))
    layer_of, source_of = np.arange(layers)[:, None, None], np.arange(num_sources)[None, :, None]
    expert = np.broadcast_to(host[:, None, :], array.shape)
    with np.errstate(over="ignore"):
        np.add.at(total, (layer_of, source_of, expert), array)
    if not np.isfinite(total).all():
        raise ValueError("shares: the copies of an expert sum to more than 1.8e308; valid: a finite sum")
    empty = np.argwhere(total <= 0)
    if empty.size:
        layer, source, lost = (int(v) for v in empty[0])
        raise ValueError(
            f"shares: layer {layer}, source {source}: all copies of expert {lost} have 0; "
            f"valid: at least one above 0"
        )
    return array / np.take_along_axis(total, expert, axis=2)


def build_tables(
    host: Any, topology: Topology, num_experts: int, width: int, shares: Any, *, with_thresholds: bool
) -> Tables:
    """The tables of a checked slot map [L, P]; shares [L, S, P] from `check_shares`, or None: even, nearest only.

    Raises:
        ValueError: an expert has more copies than `width`, or shares meet more than 32,767 copies.
    """
    layers, num_slots = host.shape
    shape = (layers, topology.num_sources, num_slots)
    copies = _count_copies(host, num_experts, width)
    rank = np.arange(num_slots) // (num_slots // topology.num_ranks)
    distance = np.broadcast_to(topology.distance[:, rank], shape)
    expert = np.broadcast_to(host[:, None, :], shape)
    unused = np.zeros(shape, dtype=bool) if shares is None else shares <= 0
    # lexsort is stable: by expert, then use, then distance, then the order that was there, which is the slot's.
    order = np.lexsort((distance, unused, expert))
    expert = np.take_along_axis(expert, order, axis=2)
    distance = np.take_along_axis(distance, order, axis=2)
    first = np.cumsum(copies, axis=1) - copies
    place = np.arange(num_slots) - first[np.arange(layers)[:, None, None], expert]

    at = (np.arange(layers)[:, None, None], np.arange(topology.num_sources)[None, :, None], expert)
    replicas = np.full((*shape[:2], num_experts, width), -1, dtype=np.int32)
    replicas[(*at, place)] = order
    nearest = np.zeros((*shape[:2], num_experts), dtype=np.int32)
    if shares is None:
        used = distance == np.take_along_axis(distance, np.arange(num_slots) - place, axis=2)
    else:
        used = ~np.take_along_axis(unused, order, axis=2)
    np.add.at(nearest, at, used.astype(np.int32))
    if not with_thresholds:
        return Tables(replicas, nearest, None)
    part = used / nearest[at] if shares is None else np.take_along_axis(shares, order, axis=2)
    thresholds = np.full(replicas.shape, NO_THRESHOLD, dtype=np.int32)
    thresholds[(*at, place)] = _thresholds(part, place, nearest[at])
    return Tables(replicas, nearest, thresholds)


def _count_copies(host: Any, num_experts: int, width: int) -> Any:
    layers = host.shape[0]
    copies = np.zeros((layers, num_experts), dtype=np.int64)
    np.add.at(copies, (np.arange(layers)[:, None], host), 1)
    most = min(width, MAX_COPIES)
    if layers and copies.max() > most:
        layer, expert = np.unravel_index(copies.argmax(), copies.shape)
        raise ValueError(
            f"slots: layer {layer} has {copies.max()} copies of expert {expert}; "
            f"valid: at most max_replicas = {most}"
        )
    return copies


def _thresholds(part: Any, place: Any, choices: Any) -> Any:
    """Upper ends of the copies' parts of the circle, in units of 2^-16 of 1 / choices; arrays in sorted order."""
    upper = np.cumsum(part, axis=2)
    before = upper - part
    upper = upper - np.take_along_axis(before, np.arange(part.shape[2]) - place, axis=2)
    # Rounding to whole units makes even shares exact: copy j of n ends at (j + 1) << 16.
    ends = np.rint(upper * choices * (1 << SHARE_BITS)).astype(np.int64)
    return np.where(place >= choices - 1, choices.astype(np.int64) << SHARE_BITS, ends)
