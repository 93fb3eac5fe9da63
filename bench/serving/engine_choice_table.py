"""Markdown tables of bench/results/engine-choice.json: `python bench/serving/engine_choice_table.py [FILE]`.

Every figure is the mean over the repetitions with its standard deviation. The change against stock vLLM is taken
repetition by repetition, since both served the same requests within minutes: the geometric mean of the ratios and
its 95 % confidence interval (Student's t on their logarithms). The arithmetic mean of ratios that scatter would be
too high whichever of the two is the base: 2 and 1/2 have the mean 1.25.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parents[1] / "results" / "engine-choice.json"
BASE = "off"
COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("TTFT mean, s", "ttft_mean", 1.0, "{:.3f}"),
    ("median, s", "ttft_p50", 1.0, "{:.3f}"),
    ("P99, s", "ttft_p99", 1.0, "{:.2f}"),
    ("TPOT, ms", "tpot_mean", 1e3, "{:.1f}"),
    ("served/s", "throughput", 1.0, "{:.2f}"),
    ("in SLO, %", "attainment", 100.0, "{:.1f}"),
    ("running per engine", "running", 1.0, "{:.1f}"),
    ("prompt gap, tokens/s", "prompt_throughput_gap", 1.0, "{:.0f}"),
)
"""(heading, key, factor, format)."""
CHANGES = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean", "throughput")

Row = dict[str, Any]


def values(rows: Sequence[Row], key: str) -> list[float]:
    """The figure of every repetition that has it."""
    return [row[key] for row in rows if row.get(key) is not None]


def paired_changes(rows: Sequence[Row], base: Sequence[Row], key: str) -> list[float]:
    """Per repetition that both have: the figure over the base's, minus 1."""
    before = {row["repetition"]: row[key] for row in base if row.get(key)}
    return [
        row[key] / before[row["repetition"]] - 1.0
        for row in rows
        if row["repetition"] in before and row.get(key) is not None
    ]


def _spread(numbers: Sequence[float], factor: float, pattern: str) -> str:
    if not numbers:
        return "-"
    mean = pattern.format(factor * float(np.mean(numbers)))
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {pattern.format(factor * float(np.std(numbers, ddof=1)))}"


def _change(numbers: Sequence[float]) -> str:
    if not numbers:
        return "-"
    logs = np.log1p(numbers)
    mean = float(np.mean(logs))
    text = f"{100 * math.expm1(mean):+.0f} %"
    if len(numbers) == 1:
        return text
    half = _t_quantile(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return f"{text} ({100 * math.expm1(mean - half):+.0f} to {100 * math.expm1(mean + half):+.0f})"


@cache
def _t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t: numpy has no inverse of its distribution, so its density is summed.

    With t = sqrt(freedom)·tan(a) the density of the angle a is proportional to cos(a)^(freedom − 1).
    """
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95 * mass[-1], mass, angles)))


def _by_variant(result: Row, setting: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in result["runs"]:
        if row["setting"] == setting:
            found.setdefault(row["variant"], []).append(row)
    return found


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def figures_table(result: Row, setting: str) -> list[str]:
    """One line per variant: every figure with its spread."""
    cell: Callable[[list[Row], tuple[str, str, float, str]], str] = lambda rows, c: _spread(  # noqa: E731
        values(rows, c[1]), c[2], c[3]
    )
    lines = [[name, *(cell(rows, c) for c in COLUMNS)] for name, rows in _by_variant(result, setting).items()]
    return _table([setting, *(column[0] for column in COLUMNS)], lines)


def changes_table(result: Row, setting: str) -> list[str]:
    """One line per variant but stock vLLM: paired changes against it."""
    rows = _by_variant(result, setting)
    base = rows.pop(BASE, [])
    heads = {key: head.split(",")[0] for head, key, _, _ in COLUMNS}
    lines = [
        [name, *(_change(paired_changes(own, base, key)) for key in CHANGES)] for name, own in rows.items()
    ]
    return _table([f"{setting}, against {BASE}", *(heads[key] for key in CHANGES)], lines)


def tables(result: Row) -> list[str]:
    """All tables, one setting after the other."""
    lines: list[str] = []
    for setting in dict.fromkeys(row["setting"] for row in result["runs"]):
        lines += [*figures_table(result, setting), "", *changes_table(result, setting), ""]
    return lines[:-1]


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    print("\n".join(tables(json.loads(file.read_text()))))
