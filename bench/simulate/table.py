"""Markdown tables of bench/results/simulate.json, as in docs/simulator.md: `python bench/simulate/table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "simulate.json"
SHOWN = ("vllm", "round-robin", "lmetric", "br-h", "gimbal choice only", "gimbal, age limit 5 s", "gimbal")


def engines_table(result: dict[str, Any]) -> list[str]:
    """Mean and P99 TTFT, milliseconds, of the policies in `SHOWN`, one line per traffic, engines and load."""
    lines = [
        "| traffic | engines | load | " + " | ".join(SHOWN) + " |",
        "|---|---|---|" + "---|" * len(SHOWN),
    ]
    rows = result["engines"]
    for key in dict.fromkeys((row["traffic"], row["engines"], row["load"]) for row in rows):
        group = {r["policy"]: r for r in rows if (r["traffic"], r["engines"], r["load"]) == key}
        cells = [f"{1e3 * group[p]['ttft_mean']:.0f} / {1e3 * group[p]['ttft_p99']:.0f}" for p in SHOWN]
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(cells) + " |")
    return lines


def deflection_table(result: dict[str, Any]) -> list[str]:
    """P95 and P99 TTFT and its parts in seconds, SLO attainment and late tokens, one line per mode."""
    lines = [
        "| nodes | load | deflection | P95 | P99 | mean | queueing | prefill | transfer | in SLO | late "
        "| deflected |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    parts = ("ttft_p95", "ttft_p99", "ttft_mean", "queueing", "prefill", "transfer")
    for row in result["deflection"]:
        seconds = [f"{row[k]:.2f}" for k in parts]
        shares = [f"{100 * row[k]:.1f} %" for k in ("attainment", "late_tokens", "deflected")]
        cells = [row["shape"], str(row["load"]), row["deflection"], *seconds, *shares]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    figures = json.loads(RESULTS.read_text())
    print("\n".join(engines_table(figures)))
    print()
    print("\n".join(deflection_table(figures)))
