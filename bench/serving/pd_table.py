"""The tables of docs/deflection.md from bench/results/pd*.json: `python bench/serving/pd_table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
COLUMNS = ("servers", "deflection", "identical", "P95 TTFT, s", "mean", "queueing", "prefill", "transfer")
COLUMNS += ("in SLO", "late", "deflected", "decision, ms")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table, one per shape and mode: means over the repetitions, and the range of P95."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["mode"]), []).append(row)
    head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return [*head, *(_line(shape, mode, group) for (shape, mode), group in groups.items())]


def _line(shape: str, mode: str, group: list[dict[str, Any]]) -> str:
    def average(name: str) -> float:
        return mean(row[name] for row in group)

    tails = [row["ttft_p95"] for row in group]
    spread = f" ({min(tails):.2f} to {max(tails):.2f})" if len(tails) > 1 else ""
    # Emulated nodes compute nothing that could be compared.
    known = all("identical" in row for row in group)
    total = sum(row["requests"] for row in group)
    cells = [shape, mode, f"{sum(row['identical'] for row in group)} of {total}" if known else "-"]
    cells += [f"{average('ttft_p95'):.2f}{spread}"]
    cells += [f"{average(name):.2f}" for name in ("ttft_mean", "queueing", "prefill", "transfer")]
    cells += [f"{100 * average(name):.1f} %" for name in ("in_slo", "late_tokens", "deflected")]
    timed = all("decision_median" in row for row in group)
    return f"| {' | '.join([*cells, format(1e3 * average('decision_median'), '.2f') if timed else '-'])} |"


def tables() -> dict[str, list[str]]:
    """Name of a result file -> its table."""
    return {
        path.name: table(json.loads(path.read_text())["rows"]) for path in sorted(RESULTS.glob("pd*.json"))
    }


if __name__ == "__main__":
    for name, lines in tables().items():
        print(name, *lines, "", sep="\n")
