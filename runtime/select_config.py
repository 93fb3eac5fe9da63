"""Constants of engine selection (SPEC section 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import GimbalConfig


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Constants of engine selection. 0.90 and 0.10 are the paper's (arXiv 2606.15177).

    Attributes:
        w_kv, w_moe: weights of KV cache use and MoE pressure; w_moe = 0 is the mode without feedback.
        w_slots: weight of a step's wait for a slot (`max_num_seqs`) against a step that computes prompts. Below 1,
            since a step that only decodes is the shorter one.
        close: scores at most this far above the lowest one count as equal.
        stale_after: seconds; a trace older than this is stale.
        kv_saturated, kv_gap: the veto acts when the highest KV cache use exceeds the first and the spread
            exceeds the second.
        kv_full: an engine at or above it is left out while another one is below `kv_saturated`.
        affinity_keys: affinity keys remembered; the least recently used one makes room.
        decisions_kept: decisions kept for a look at them.

    Raises:
        ValueError: a value that is not finite or outside its range.
    """

    w_kv: float = 1.0
    w_moe: float = 1.0
    w_slots: float = 0.5
    close: float = 0.05
    stale_after: float = 5.0
    kv_saturated: float = 0.90
    kv_gap: float = 0.10
    kv_full: float = 0.995
    affinity_keys: int = 65_536
    decisions_kept: int = 256

    def __post_init__(self) -> None:
        levels = ("w_kv", "w_moe", "w_slots", "close", "stale_after", "kv_saturated", "kv_gap", "kv_full")
        for name in levels:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}: {value!r}; valid: a finite number >= 0")
        if self.kv_full < self.kv_saturated:
            # Otherwise one engine could be full and below saturation at once, and all of them be left out.
            raise ValueError(f"kv_full: {self.kv_full}; valid: at least kv_saturated ({self.kv_saturated})")

    @classmethod
    def from_config(cls, config: GimbalConfig) -> SelectConfig:
        """The constants that the settings ask for; w_moe is 0 in modes without feedback."""
        return cls(
            w_kv=config.w_kv,
            w_moe=config.w_moe if config.feeds_pressure else 0.0,
            w_slots=config.w_slots,
            close=config.close,
            stale_after=config.stale_after,
            kv_saturated=config.kv_saturated,
            kv_gap=config.kv_gap,
            kv_full=config.kv_full,
        )
