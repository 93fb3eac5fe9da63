"""What one rank does in each wave of a plan: sends, receives with their staging rows, copies inside the rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .plan import MigrationPlan


class Move(NamedTuple):
    """One transfer as one of its ends sees it.

    `peer` is the other rank, `slot` this rank's own slot (0 to C - 1), `row` the staging row at the receiver.
    """

    layer: int
    peer: int
    slot: int
    row: int
    round: int


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of one wave; sends and receives are in the order of their rounds.

    `copies` are (layer, source slot, destination slot) on this rank, to be done after the receives.
    """

    wave: int
    layers: tuple[int, ...]
    sends: list[Move]
    receives: list[Move]
    copies: list[tuple[int, int, int]]


def share_out(plan: MigrationPlan, *, rank: int, rows: int, max_layers: int | None = None) -> list[Share]:
    """The shares of one rank, wave by wave; every rank gives each transfer the same staging row.

    At a receiver, rows are handed out from 0 in the order of the transfers.

    Args:
        rank: whose share.
        rows: experts that one rank's staging holds per wave.
        max_layers: layers per wave at most; by default as many as fit.

    Raises:
        ValueError: a layer brings more experts to a rank than there are rows.
    """
    transfers, copies = plan.transfers.numpy(), plan.local_copies.tolist()
    size = plan.slots_per_rank
    shares = []
    for number, wave in enumerate(plan.waves(rows * plan.bytes_per_expert, max_layers=max_layers)):
        sends, receives = [], []
        members = [members.numpy() for members in wave.rounds]
        row_of = _rows(transfers, members)
        for i, turn in ((i, turn) for turn, group in enumerate(members) for i in group.tolist()):
            layer, _, source, source_slot, destination, slot = transfers[i].tolist()
            if source == rank:
                sends.append(Move(layer, destination, source_slot % size, row_of[i], turn))
            elif destination == rank:
                receives.append(Move(layer, source, slot % size, row_of[i], turn))
        inside = [
            (layer, source % size, slot % size)
            for layer, _, source, slot in copies
            if layer in wave.layers and slot // size == rank
        ]
        shares.append(Share(number, wave.layers, sends, receives, inside))
    return shares


def digest(plan: MigrationPlan) -> int:
    """63 bits of what all ranks must agree on before anything moves."""
    summary = hashlib.blake2b(digest_size=8)
    for table in (plan.old, plan.target, plan.transfers):
        summary.update(np.ascontiguousarray(table.numpy()).tobytes())
    return int.from_bytes(summary.digest(), "little") >> 1


def _rows(transfers: Any, members: list[Any]) -> dict[int, int]:
    """Staging row of each transfer of a wave."""
    filled: dict[int, int] = {}
    rows = {}
    for i in sorted(i for group in members for i in group.tolist()):
        destination = int(transfers[i, 4])
        rows[i] = filled.get(destination, 0)
        filled[destination] = rows[i] + 1
    return rows
