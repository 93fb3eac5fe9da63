"""The table of docs/deflection.md from bench/results/pd.json: `python bench/serving/pd_table.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "results" / "pd.json"
HEAD = (
    "| servers | deflection | identical | P95 TTFT, s | mean | queueing | prefill | transfer | in SLO | late "
    "| deflected | decision, ms |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: list[dict[str, Any]]) -> str:
    """One line per shape and mode: means over the repetitions, and the range of P95."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["mode"]), []).append(row)
    return "\n".join([HEAD, *(_line(shape, mode, group) for (shape, mode), group in groups.items())])


def _line(shape: str, mode: str, group: list[dict[str, Any]]) -> str:
    def average(name: str) -> float:
        return mean(row[name] for row in group)

    tails = [row["ttft_p95"] for row in group]
    identical = f"{sum(row['identical'] for row in group)} of {sum(row['requests'] for row in group)}"
    cells = [shape, mode, identical, f"{average('ttft_p95'):.2f} ({min(tails):.2f} to {max(tails):.2f})"]
    cells += [f"{average(name):.2f}" for name in ("ttft_mean", "queueing", "prefill", "transfer")]
    cells += [f"{100 * average(name):.1f} %" for name in ("in_slo", "late_tokens", "deflected")]
    cells += [f"{1e3 * average('decision_median'):.2f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RESULT).read_text())["rows"]))
