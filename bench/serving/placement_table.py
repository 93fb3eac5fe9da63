"""The table of docs/placement.md from the stored result of placement.py.

python bench/serving/placement_table.py [FILE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULT = Path(__file__).resolve().parents[1] / "results" / "serving-placement.json"
HEAD = (
    "| spare slots | engines chosen | placement | remote picks | max/mean "
    "| experts moved per window | gap, last window |"
)


def table(path: Path) -> list[str]:
    """Markdown lines."""
    lines = [HEAD, "|---" * 7 + "|"]
    for row in json.loads(path.read_text())["rows"]:
        chosen = "at random" if row["dispatch"] == "random" else "by domain"
        gap = "" if row["proven_gap"] is None else f"{100 * row['proven_gap']:.1f} %"
        lines.append(
            f"| {row['spare']} | {chosen} | {row['system']} | {row['remote_pick_share']:.3f} "
            f"| {row['max_over_mean']:.3f} | {row['experts_moved_per_window']:.1f} | {gap} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT)))
