"""Recording by reading: a step's picks are the difference of vLLM's own load counters.

vLLM's mapping and counting stay as they are. What routing recorded is read off after each step and turned from
physical slots to logical experts.
"""

from __future__ import annotations

from typing import Any

import torch


class LoadsRecording:
    """Adds each step's picks to one source row.

    Args:
        load: int32 [L, P], vLLM's counters of the running step.
        slot_map: integer [L, P], the expert in each slot; read at the end of each step.
        row: int64 [L, E], where picks are added.
    """

    def __init__(self, load: torch.Tensor, slot_map: torch.Tensor, row: torch.Tensor) -> None:
        self._load, self._slot_map, self._row = load, slot_map, row
        self._before: torch.Tensor | None = None

    def before_forward(self) -> None:
        """Notes the counters, so that what warm-up or dummy passes left in them is not counted.

        A drafter runs several passes in a step: the first one counts from here.
        """
        if self._before is None:
            self._before = self._load.clone()

    def after_forward(self, *, is_dummy: bool) -> torch.Tensor | None:
        """Picks [L, P] of the step that just ran; None for a dummy, or without a pass."""
        before, self._before = self._before, None
        if is_dummy or before is None:
            return None
        picks = self._load - before
        self._row.scatter_add_(1, self._slot_map.long(), picks.to(self._row.dtype))
        return picks

    def drop_load(self) -> None:
        """Nothing: the counters are vLLM's, and it is made to record in every step."""

    def follow(self, slots: Any, layer: int | None) -> None:
        """Nothing: `slot_map` is vLLM's own."""

    def leave_on(self) -> None:
        """Nothing: vLLM's recording was never touched."""

    def close(self, own: torch.Tensor) -> None:
        """Nothing: there is no second count to compare with."""

    def forget(self) -> None:
        """Drops the pass that is being recorded."""
        self._before = None
