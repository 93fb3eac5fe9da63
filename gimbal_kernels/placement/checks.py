"""Validation shared by the problem, the weights and the evaluation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._arrays import to_host

# Above any count, distance or weight that means something; up to it no float64 score overflows to infinity.
LIMIT = 2.0**64
# A layer with less than this many picks in all counts as empty: its mean load would underflow when squared.
EMPTY_BELOW = 2.0**-64


def is_number(value: Any) -> bool:
    """Whether `value` is one real number; text that reads as one is none."""
    if isinstance(value, (str, bytes, bytearray)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def check_number(value: Any, name: str) -> None:
    """ValueError unless `value` is a real number in [0, 2**64]."""
    if not is_number(value):
        raise ValueError(f"{name}: {value!r}; valid: a number >= 0")
    number = float(value)
    if math.isnan(number) or not 0 <= number <= LIMIT:
        raise ValueError(f"{name}: {value}; valid: a finite number from 0 to 2**64")


def check_traffic(value: Any, name: str) -> Any:
    """`value` as a numpy array [L, S, E] of valid picks, else ValueError."""
    picks = to_host(value, name)
    if picks.ndim != 3 or 0 in picks.shape[1:]:
        raise ValueError(f"{name}: shape {tuple(picks.shape)}; valid: [L, S, E] with S >= 1 and E >= 1")
    if picks.dtype.kind == "b":
        raise ValueError(f"{name}: dtype bool; valid: integers or real numbers")
    if picks.size and not (picks.min() >= 0 and picks.max() <= LIMIT):  # NaN fails both comparisons
        bad = ~((picks >= 0) & (picks <= LIMIT))
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}: {picks[where]} at {list(where)}; valid: finite picks from 0 to 2**64")
    return picks


def check_slots(value: Any, name: str, *, layers: int, experts: int, ranks: int, slots_per_rank: int) -> Any:
    """`value` as a fresh int32 array [L, P] in which every expert has a slot, else ValueError."""
    slots = to_host(value, name)
    total = ranks * slots_per_rank
    if slots.dtype.kind not in "iu":
        raise ValueError(f"{name}: dtype {slots.dtype}; valid: integers")
    if slots.shape != (layers, total):
        raise ValueError(
            f"{name}: shape {tuple(slots.shape)}; valid: [{layers}, {total}] "
            f"({ranks} ranks of {slots_per_rank} slots)"
        )
    outside = (slots < 0) | (slots >= experts)
    if outside.any():
        layer, slot = (int(i) for i in np.argwhere(outside)[0])
        raise ValueError(
            f"{name}: layer {layer}, slot {slot} holds {slots[layer, slot]}; valid: 0 to {experts - 1}"
        )
    present: Any = np.zeros((layers, experts), dtype=bool)
    present[np.arange(layers)[:, None], slots] = True
    if not present.all():
        layer, expert = (int(i) for i in np.argwhere(~present)[0])
        raise ValueError(f"{name}: layer {layer} has no slot for expert {expert}; valid: at least one each")
    return np.array(slots, dtype=np.int32, order="C")
