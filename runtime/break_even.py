"""Whether a rearrangement earns back its bytes (SPEC section 5). Pure arithmetic, the same on every rank.

A model of the seconds that one MoE layer takes in a window of T picks on R ranks, which wait for each other in
every layer. Of a slot map it knows what `gimbal_kernels.placement.evaluate` gives:

    link = comm * T * bytes_per_pick / (R * bandwidth)    what a rank sends on average; comm weighs by distance
    load = max_over_mean * T / R * seconds_per_pick       what the fullest rank computes
    seconds = link + load

Both are lower bounds: links are taken as evenly used, and the fullest rank of a window as the fullest of each step.
What does not depend on the slot map (attention, launches, latency) cancels in the difference of two maps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ServingCosts:
    """What a pick and a byte cost on one rank.

    Args:
        bytes_per_pick: bytes that one remote pick sends, dispatch and combine together.
        bandwidth: bytes per second that a rank can send, and at the same time receive, over a link of distance 1;
            None: not known.
        seconds_per_pick: what one more pick adds to a layer on the rank that serves it; None: not known.

    Raises:
        ValueError: a value that is not positive and finite.
    """

    bytes_per_pick: float
    bandwidth: float | None = None
    seconds_per_pick: float | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_pick", "bandwidth", "seconds_per_pick"):
            value = getattr(self, name)
            if value is not None:
                _check_positive(value, name)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of what is not known; the rule cannot be applied unless there are none."""
        return tuple(name for name in ("bandwidth", "seconds_per_pick") if getattr(self, name) is None)


@dataclass(frozen=True)
class BreakEven:
    """Both sides of the rule, in seconds.

    saved: H * sum over layers of what the new slot map saves in a window; negative when it costs.
    price: (1 - overlap) * seconds of the busiest rank's bytes * (1 + margin).
    """

    saved: float
    price: float

    @property
    def pays(self) -> bool:
        """Migrate iff more is saved than is paid; what saves nothing and costs nothing does not move."""
        return self.saved > self.price


def layer_seconds(comm: Any, max_over_mean: Any, picks: Any, *, ranks: int, costs: ServingCosts) -> Any:
    """Seconds of each layer in a window under one slot map, float64 [L]; the model is this module's.

    Args:
        comm: [L] mean distance of a pick, in remote picks.
        max_over_mean: [L] fullest rank over the mean rank.
        picks: [L] picks of the window; 0 gives 0 seconds.
        ranks: R.

    Raises:
        ValueError: ranks below 1, or costs of which something is unknown.
    """
    if ranks < 1:
        raise ValueError(f"ranks: {ranks}; valid: an integer >= 1")
    if costs.bandwidth is None or costs.seconds_per_pick is None:
        raise ValueError(f"costs: {', '.join(costs.unknown)} unknown; valid: costs that are all given")
    per_rank = np.asarray(picks, dtype=np.float64) / ranks
    link = np.asarray(comm, dtype=np.float64) * per_rank * (costs.bytes_per_pick / costs.bandwidth)
    load = np.asarray(max_over_mean, dtype=np.float64) * per_rank * costs.seconds_per_pick
    return link + load


def break_even(
    saved_seconds: Any,
    busiest_bytes: float,
    *,
    bandwidth: float,
    horizon: float,
    overlap: float = 0.0,
    margin: float = 0.0,
) -> BreakEven:
    """The rule of SPEC section 5: H * sum of saved seconds > (1 - overlap) * bytes / bandwidth * (1 + margin).

    Args:
        saved_seconds: [L] seconds that each layer saves in one window, negative where it gets slower.
        busiest_bytes: of the rank that sends or receives most: max over ranks of max(in, out).
        bandwidth: bytes per second of a rank's link.
        horizon: H, windows that the new placement is expected to live.
        overlap: share of the transfer that is hidden behind serving, in [0, 1).
        margin: by how much the gain must exceed the price, in [0, 1).

    Raises:
        ValueError: an argument outside its range, or seconds that are not finite.
    """
    _check_positive(bandwidth, "bandwidth")
    _check_positive(horizon, "horizon")
    for value, name in ((overlap, "overlap"), (margin, "margin")):
        if not 0 <= value < 1:
            raise ValueError(f"{name}: {value}; valid: a number in [0, 1)")
    if not (busiest_bytes >= 0 and math.isfinite(busiest_bytes)):
        raise ValueError(f"busiest_bytes: {busiest_bytes}; valid: a finite number >= 0")
    saved = math.fsum(np.asarray(saved_seconds, dtype=np.float64).ravel().tolist())
    if not math.isfinite(saved):
        raise ValueError(f"saved_seconds: their sum is {saved}; valid: finite seconds")
    return BreakEven(horizon * saved, (1 - overlap) * busiest_bytes / bandwidth * (1 + margin))


def _check_positive(value: float, name: str) -> None:
    if not (value > 0 and math.isfinite(value)):  # NaN is not above 0
        raise ValueError(f"{name}: {value}; valid: a finite number > 0")
