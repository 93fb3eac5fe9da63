"""Which physical slots hold a logical expert, nearest first for every DP source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._arrays import to_host
from ..topology import Topology
from .replica_tables import build_tables, check_shares, check_slots


@dataclass(frozen=True, eq=False)
class ReplicaMap:
    """Padded tables of the copies of every expert, at addresses that never change.

    Made by `from_slots`; `update` rewrites the tables in place, so a captured CUDA graph follows the new map.
    Slot p lives on rank p // C, C = P / R (SPEC section 1).

    A map made without shares sends the picks of a source to the nearest copies, spread evenly. One made with
    shares sends them to every copy with a share above 0, in that proportion, whatever the distance; they come from
    the water-filling of SPEC section 4.

    Attributes:
        replicas: int32 [L, S, E, M]; the slots of an expert, nearest first as source s sees them. Ties are
            broken by the lower slot, hence by the lower rank. With shares, copies without one come last.
            Unused places hold -1.
        nearest: int32 [L, S, E]; how many of the leading copies are chosen from: those at the smallest distance, or
            those with a share.
        thresholds: int32 [L, S, E, M], or None: a map without shares. Copy j takes the part of the circle from
            threshold j - 1 (0 for j = 0) to threshold j, in units of 2^-16 of 1 / `nearest`.
        slots: int32 [L, P]; the slot map that the tables were made from.
        topology: distances [S, R]; None in the views that the torch operator makes, which cannot be updated.
        num_experts: E.
    """

    replicas: Any
    nearest: Any
    thresholds: Any
    slots: Any
    topology: Topology | None
    num_experts: int

    @property
    def num_layers(self) -> int:
        return int(self.slots.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.slots.shape[1])

    @property
    def num_sources(self) -> int:
        return int(self.nearest.shape[1])

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
        shares: Any = None,
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
                4·L·S·E·M bytes (twice that with shares), so a smaller M is worth giving when many sources
                meet many spare slots.
            shares: real numbers [L, S, P] >= 0, what part of the picks of source s to the expert in slot p goes to
                that copy; scaled to a sum of 1 per expert. Resolution: 2^-16 of an even share.

        Raises:
            ValueError: a wrong shape or type, an expert id outside [0, E), an expert without a slot, a layer
                whose slots all hold one expert, P not a multiple of R, more than M copies, or shares that are
                negative, not finite, or 0 for all copies of an expert.
        """
        if isinstance(num_experts, bool) or not isinstance(num_experts, int) or num_experts < 1:
            raise ValueError(f"num_experts: {num_experts!r}; valid: an integer >= 1")
        host = check_slots(slots, topology, num_experts)
        room = host.shape[1] - num_experts + 1
        width = room if max_replicas is None else max_replicas
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= room:
            raise ValueError(
                f"max_replicas: {max_replicas!r}; valid: an integer from 1 to P - E + 1 = {room}"
            )
        weights = None if shares is None else check_shares(shares, host, topology.num_sources, num_experts)
        tables = build_tables(
            host, topology, num_experts, width, weights, with_thresholds=weights is not None
        )
        with torch.inference_mode(False):  # tensors made inside of it could not be updated outside
            return ReplicaMap(
                replicas=torch.from_numpy(tables.replicas).to(device),
                nearest=torch.from_numpy(tables.nearest).to(device),
                thresholds=None if shares is None else torch.from_numpy(tables.thresholds).to(device),
                slots=torch.from_numpy(host.astype(np.int32)).to(device),
                topology=topology,
                num_experts=num_experts,
            )

    def update(self, slots: Any = None, *, shares: Any = None, layer: int | None = None) -> None:
        """Replaces the map in place: same tensors, same addresses, new contents.

        On CUDA the copies run on the current stream. Called on the stream that runs the forward passes, a
        pass sees the whole old map or the whole new one.

        Args:
            slots: integers [L, P], the shape that the map was made with; [P] with `layer`. Absent: the slots
                stay, only the shares change.
            shares: as in `from_slots`, [S, P] with `layer`, for a map that was made with some. Absent: the
                nearest copies take even shares.
            layer: the only layer that changes. Absent: all of them.

        Raises:
            ValueError: as `from_slots`, and shares for a map made without; the old map then stays in force
                unchanged.
        """
        if self.topology is None:
            raise ValueError("topology: None; valid: a map made by from_slots")
        if layer is not None and (
            isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.num_layers
        ):
            raise ValueError(f"layer: {layer!r}; valid: an integer from 0 to {self.num_layers - 1}")
        first, last = (0, self.num_layers) if layer is None else (layer, layer + 1)
        part = slice(first, last)
        if layer is not None:
            slots = _as_one_layer("slots", slots, self.num_slots)
            shares = _as_one_layer("shares", shares, self.num_sources, self.num_slots)
        host = check_slots(self.slots[part] if slots is None else slots, self.topology, self.num_experts)
        if host.shape != (last - first, self.num_slots):
            raise ValueError(
                f"slots: shape {list(host.shape)}; valid: {list(self.slots.shape)}, as the map was made with"
            )
        weights = None
        if shares is not None:
            if self.thresholds is None:
                raise ValueError("shares: given; valid: none, as the map was made without (see from_slots)")
            weights = check_shares(shares, host, self.num_sources, self.num_experts)
        weighted = self.thresholds is not None
        sizes = (self.num_experts, self.max_replicas)
        tables = build_tables(host, self.topology, *sizes, weights, with_thresholds=weighted)
        self.replicas[part].copy_(torch.from_numpy(tables.replicas))
        self.nearest[part].copy_(torch.from_numpy(tables.nearest))
        if self.thresholds is not None:
            self.thresholds[part].copy_(torch.from_numpy(tables.thresholds))
        self.slots[part].copy_(torch.from_numpy(host.astype(np.int32)))


def _as_one_layer(name: str, value: Any, *shape: int) -> Any:
    """What stands for one layer, as [1, ...]; None stays None.

    Raises:
        ValueError: another shape than that of one layer.
    """
    if value is None:
        return None
    array = to_host(value, name)
    if array.shape != shape:
        raise ValueError(f"{name}: shape {list(array.shape)}; valid: {list(shape)} with `layer`")
    return array[None]
