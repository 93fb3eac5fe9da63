"""The table of docs/migration.md from a stored result: `python bench/serving/rearrangement_table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "rearrangement.json"
HEAD = (
    "| EPLB | transfer | rearrangements | rearrangement, mean | P90 | token gaps | mean | P90 | P99 |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table(report: dict[str, Any]) -> list[str]:
    """Milliseconds; gaps between tokens that overlap a rearrangement, and those that overlap none."""
    lines = list(HEAD)
    for mode in ("sync", "async"):
        for way in ("stock", "gimbal", "no rearrangement"):
            row = report[mode][way]
            gaps = row["itl_ms"]
            cells = [mode, way]
            if way == "no rearrangement":
                cells += ["", "", ""]
            else:
                lengths = row["rearrangement_ms"]
                cells += [str(row["rearrangements"]), f"{lengths['mean']:.0f}", f"{lengths['p90']:.0f}"]
            cells += [f"{gaps['count']:.0f}", *(f"{gaps[name]:.0f}" for name in ("mean", "p90", "p99"))]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(json.loads(RESULTS.read_text()))))
