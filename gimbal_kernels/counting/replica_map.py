"""Which physical slots hold a logical expert, nearest first for every DP source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._arrays import to_host
from ..topology import Topology


@dataclass(frozen=True, eq=False)
class ReplicaMap:
    """Padded tables of the copies of every expert, at addresses that never change.

    Made by `from_slots`; `update` rewrites the tables in place, so a captured CUDA graph follows the new map.
    Slot p lives on rank p // C, C = P / R (SPEC section 1).

    Attributes:
        replicas: int32 [L, S, E, M]; the slots of an expert, nearest first as source s sees them. Ties are
            broken by the lower slot, hence by the lower rank. Unused places hold -1.
        nearest: int32 [L, S, E]; how many of them share the smallest distance. Only these are ever chosen.
        slots: int32 [L, P]; the slot map that the tables were made from.
        topology: distances [S, R].
        num_experts: E.
    """

    replicas: Any
    nearest: Any
    slots: Any
    topology: Topology
    num_experts: int

    @property
    def num_layers(self) -> int:
        return int(self.slots.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.slots.shape[1])

    @property
    def num_sources(self) -> int:
        return self.topology.num_sources

    @property
    def max_replicas(self) -> int:
        return int(self.replicas.shape[3])

    @property
    def device(self) -> Any:
        return self.replicas.device

    @staticmethod
    def from_slots(
        slots: Any,
        topology: Topology,
        *,
        num_experts: int,
        device: Any = "cpu",
        max_replicas: int | None = None,
    ) -> ReplicaMap:
        """Builds the tables of a slot map.

        Args:
            slots: integers [L, P], the expert of each physical slot; a tensor, any DLPack or numpy array, or
                nested lists. Two copies of an expert on one rank are accepted.
            topology: distances [S, R]; R must divide P.
            num_experts: E, the number of logical experts.
            device: where the tables live.
            max_replicas: M, the most copies of one expert that this map and its later updates may have. The
                default P - E + 1 is the most that any map of this shape can have; the tables take
                4·L·S·E·M bytes, so a smaller M is worth giving when many sources meet many spare slots.

        Raises:
            ValueError: a wrong shape or type, an expert id outside [0, E), an expert without a slot, a layer
                whose slots all hold one expert, P not a multiple of R, or more than M copies.
        """
        if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
            raise ValueError(f"num_experts: {num_experts!r}; valid: an integer >= 1")
        host = _host_slots(slots, topology, num_experts)
        room = host.shape[1] - num_experts + 1
        width = room if max_replicas is None else max_replicas
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= room:
            raise ValueError(
                f"max_replicas: {max_replicas!r}; valid: an integer from 1 to P - E + 1 = {room}"
            )
        replicas, nearest = _tables(host, topology, num_experts, width)
        return ReplicaMap(
            replicas=torch.from_numpy(replicas).to(device),
            nearest=torch.from_numpy(nearest).to(device),
            slots=torch.from_numpy(host.astype(np.int32)).to(device),
            topology=topology,
            num_experts=num_experts,
        )

    def update(self, slots: Any) -> None:
        """Replaces the map in place: same tensors, same addresses, new contents.

        On CUDA the copies run on the current stream. Called on the stream that runs the forward passes, a
        pass sees the whole old map or the whole new one.

        Args:
            slots: integers [L, P], the shape that the map was made with.

        Raises:
            ValueError: as `from_slots`; the old map then stays in force unchanged.
        """
        host = _host_slots(slots, self.topology, self.num_experts)
        if host.shape != tuple(self.slots.shape):
            raise ValueError(
                f"slots: shape {list(host.shape)}; valid: {list(self.slots.shape)}, as the map was made with"
            )
        replicas, nearest = _tables(host, self.topology, self.num_experts, self.max_replicas)
        self.replicas.copy_(torch.from_numpy(replicas))
        self.nearest.copy_(torch.from_numpy(nearest))
        self.slots.copy_(torch.from_numpy(host.astype(np.int32)))


def _host_slots(slots: Any, topology: Topology, num_experts: int) -> Any:
    """Checks a slot map and returns it as int64 [L, P] in host memory."""
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


def _tables(host: Any, topology: Topology, num_experts: int, width: int) -> tuple[Any, Any]:
    """The tables `replicas` [L, S, E, M] and `nearest` [L, S, E] of a checked slot map."""
    layers, num_slots = host.shape
    sources = topology.num_sources
    shape = (layers, sources, num_slots)
    copies = np.zeros((layers, num_experts), dtype=np.int64)
    np.add.at(copies, (np.arange(layers)[:, None], host), 1)
    if layers and copies.max() > width:
        layer, expert = np.unravel_index(copies.argmax(), copies.shape)
        raise ValueError(
            f"slots: layer {layer} has {copies.max()} copies of expert {expert}; "
            f"valid: at most max_replicas = {width}"
        )
    rank = np.arange(num_slots) // (num_slots // topology.num_ranks)
    distance = np.broadcast_to(topology.distance[:, rank], shape)
    expert = np.broadcast_to(host[:, None, :], shape)
    # lexsort is stable: by expert, then distance, then the order that was there, which is the slot's.
    order = np.lexsort((distance, expert))
    expert = np.take_along_axis(expert, order, axis=2)
    distance = np.take_along_axis(distance, order, axis=2)
    first = np.cumsum(copies, axis=1) - copies
    place = np.arange(num_slots) - first[np.arange(layers)[:, None, None], expert]

    layer_of, source_of = np.arange(layers)[:, None, None], np.arange(sources)[None, :, None]
    replicas = np.full((layers, sources, num_experts, width), -1, dtype=np.int32)
    replicas[layer_of, source_of, expert, place] = order
    smallest = np.take_along_axis(distance, np.arange(num_slots) - place, axis=2)
    nearest = np.zeros((layers, sources, num_experts), dtype=np.int32)
    np.add.at(nearest, (layer_of, source_of, expert), (distance == smallest).astype(np.int32))
    return replicas, nearest
