"""What has to move between two placements, from where, and in which order (SPEC section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._arrays import to_host
from ..topology import Topology
from . import host, reference
from .rounds import Wave, choose_backend, in_rounds, split
from .weights import is_whole

LIMIT = 2**31 - 1
LARGEST_EXPERT = 2**40  # bytes; sums over all transfers of a plan stay below 2**63


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """Transfers from an old slot map to a new one; made by `plan_migration`.

    L layers, R ranks of C slots, P = R*C; physical slot p is on rank p // C.

    Attributes:
        old: int32 [L, P], the slot map that the plan starts from.
        target: int32 [L, P], the map after the migration. Each rank has the experts that `new` gives it; slots
            are permuted inside a rank so that nothing is copied there (a duplicate on one rank excepted).
        transfers: int32 [N, 6], one per new copy, only between different ranks, in ascending (layer,
            destination slot): layer, expert, source rank, source slot, destination rank, destination slot.
        local_copies: int32 [M, 4]: layer, expert, source slot, destination slot, on one rank; the source is a
            slot of `target`, to be read once the layer's transfers are in place.
        rounds: int64 index arrays into `transfers`; in a round no rank sends twice or receives twice.
        num_ranks: R.
        bytes_per_expert: bytes of one expert of one layer.
    """

    old: Any
    target: Any
    transfers: Any
    local_copies: Any
    rounds: list[Any]
    num_ranks: int
    bytes_per_expert: int

    @property
    def slots_per_rank(self) -> int:
        return int(self.target.shape[1]) // self.num_ranks

    @property
    def bytes_in(self) -> Any:
        """int64 [R]: bytes that each rank receives."""
        return self._per_rank(4)

    @property
    def bytes_out(self) -> Any:
        """int64 [R]: bytes that each rank sends."""
        return self._per_rank(2)

    @property
    def changed_layers(self) -> list[int]:
        """Layers whose map changes, ascending."""
        layers = {*self.transfers[:, 0].tolist(), *self.local_copies[:, 0].tolist()}
        return sorted(layers)

    def lower_bound(self, bytes_per_second: float) -> float:
        """Seconds below which no schedule with these sources can get: the busiest rank's bytes over its link.

        Args:
            bytes_per_second: what one rank can send, and at the same time receive.

        Raises:
            ValueError: not a positive number.
        """
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second: {bytes_per_second}; valid: a number > 0")
        return float(max(self.bytes_in.max(), self.bytes_out.max())) / bytes_per_second

    def waves(self, staging_bytes: int, *, max_layers: int | None = None) -> list[Wave]:
        """Groups of consecutive layers whose arrivals fit into a staging buffer, each with its own rounds.

        A layer is committed as a whole, so all that it receives has to be staged at once. As few waves as
        consecutive layers allow; each has as many rounds as its busiest rank has transfers in it.

        Args:
            staging_bytes: bytes of one rank's staging buffer for one wave.
            max_layers: at most so many layers in a wave; by default any number.

        Raises:
            ValueError: max_layers below 1, or a layer brings more to one rank than fits; the message says how
                much is needed.
        """
        return split(self, staging_bytes, max_layers)

    def _per_rank(self, column: int) -> Any:
        counts = torch.bincount(self.transfers[:, column].long(), minlength=self.num_ranks)
        return counts * self.bytes_per_expert


def plan_migration(
    old: Any,
    new: Any,
    topology: Topology,
    *,
    bytes_per_expert: int,
    node_of_rank: Any = None,
    backend: str = "auto",
) -> MigrationPlan:
    """One transfer per new copy, from the nearest and then the least loaded holder, in as few rounds as possible.

    The source is a holder on the destination's node where there is one; among the allowed holders the
    choice makes the largest outgoing load as small as it can be. Rounds are a colouring of all layers'
    transfers at once, so there are exactly as many as the busiest rank has transfers to send or to receive.
    Equal choices are decided in a fixed order (`reference`), so every rank computes the same bytes.

    Args:
        old, new: [L, P] integers, expert of each physical slot; slot p is on rank p // C.
        topology: its R ranks; also the nodes where `node_of_rank` is not given.
        bytes_per_expert: bytes of all tensors of one expert in one layer.
        node_of_rank: [R] integers. By default two ranks are on one node when some source is within distance
            1 of both (SPEC section 1).
        backend: "host" is compiled, "reference" plain Python; both give the same bytes. "auto" takes "host"
            where it is available.

    Raises:
        ValueError: shapes that differ or do not divide into R ranks, negative experts, an expert of `new` that
            no slot of `old` holds, bytes_per_expert below 1, an unknown or unavailable backend.
    """
    ranks = topology.num_ranks
    before, after = _check_slots(old, "old", ranks), _check_slots(new, "new", ranks)
    if before.shape != after.shape:
        raise ValueError(f"new: shape {after.shape}; valid: that of old, {before.shape}")
    _check_held(before, after)
    if not is_whole(bytes_per_expert) or not 1 <= bytes_per_expert <= LARGEST_EXPERT:
        raise ValueError(
            f"bytes_per_expert: {bytes_per_expert}; valid: an integer from 1 to {LARGEST_EXPERT}"
        )
    nodes = _nodes(topology) if node_of_rank is None else _check_nodes(node_of_rank, ranks)
    compiled = choose_backend(backend)
    target, transfers, copies = (host.plan if compiled else _plan_by_reference)(before, after, ranks, nodes)
    return MigrationPlan(
        old=torch.from_numpy(before),
        target=torch.from_numpy(target),
        transfers=torch.from_numpy(transfers),
        local_copies=torch.from_numpy(copies),
        rounds=in_rounds(transfers, ranks, compiled=compiled),
        num_ranks=ranks,
        bytes_per_expert=int(bytes_per_expert),
    )


def _plan_by_reference(old: Any, new: Any, ranks: int, nodes: Any) -> tuple[Any, Any, Any]:
    target, needs, copies = reference.align(old, new, ranks)
    senders = reference.choose_sources(old, needs, ranks, nodes.tolist())
    size = old.shape[1] // ranks
    transfers: Any = np.zeros((len(needs), 6), dtype=np.int32)
    for i, ((layer, expert, slot), sender) in enumerate(zip(needs, senders, strict=True)):
        held = old[layer, sender * size : (sender + 1) * size].tolist()
        transfers[i] = layer, expert, sender, sender * size + held.index(expert), slot // size, slot
    return target, transfers, np.array(copies, dtype=np.int32).reshape(-1, 4)


def _check_slots(value: Any, name: str, ranks: int) -> Any:
    slots = to_host(value, name)
    if slots.dtype.kind not in "iu":
        raise ValueError(f"{name}: dtype {slots.dtype}; valid: integers")
    if slots.ndim != 2 or slots.shape[1] == 0 or slots.shape[1] % ranks:
        raise ValueError(
            f"{name}: shape {tuple(slots.shape)}; valid: [L, P], P a positive multiple of {ranks} ranks"
        )
    if slots.size and not (slots.min() >= 0 and slots.max() <= LIMIT):
        raise ValueError(f"{name}: holds experts from {slots.min()} to {slots.max()}; valid: 0 to {LIMIT}")
    return np.array(slots, dtype=np.int32, order="C")


def _check_held(old: Any, new: Any) -> None:
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        lost = np.setdiff1d(after, before)
        if lost.size:
            raise ValueError(
                f"new: layer {layer} wants expert {lost[0]}, which no slot of old holds; valid: experts of old"
            )


def _check_nodes(value: Any, ranks: int) -> Any:
    nodes = to_host(value, "node_of_rank")
    if nodes.dtype.kind not in "iu" or nodes.shape != (ranks,):
        raise ValueError(f"node_of_rank: {nodes.dtype} {tuple(nodes.shape)}; valid: integers [{ranks}]")
    return np.unique(nodes, return_inverse=True)[1].astype(np.int32)


def _nodes(topology: Topology) -> Any:
    """A node number per rank: ranks that some source has within distance 1 belong together."""
    node: Any = np.arange(topology.num_ranks, dtype=np.int32)
    for near in topology.distance <= 1:
        together = np.isin(node, node[near])
        if together.any():
            node[together] = node[together].min()
    return node
