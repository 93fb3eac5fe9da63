"""What one mode of the demo did."""

from __future__ import annotations

from dataclasses import dataclass

from .replay import Record, Summary
from .windows import SavedWindow, WindowFigures


@dataclass(frozen=True, eq=False)
class ModeResult:
    """Answers and figures of one mode; a figure that the mode does not export is None.

    `records` in the order of the requests; `identical` of them have the reference's token ids, `different`
    names the others. `windows` and `figures` go together, in order of time; `total` is their average by
    picks. `decisions` counts engine choices by reason.
    """

    mode: str
    records: tuple[Record, ...]
    identical: int
    different: tuple[str, ...]
    summary: Summary
    windows: tuple[SavedWindow, ...]
    figures: tuple[WindowFigures, ...]
    total: WindowFigures
    rearrangements: int | None
    experts_moved: int | None
    decisions: dict[str, int] | None
