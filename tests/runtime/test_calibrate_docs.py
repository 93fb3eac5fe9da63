"""The tables of docs/calibration.md are those of the stored results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def percent(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(100 * value)


def calibration_lines(name: str) -> list[str]:
    lines = []
    for row in json.loads((RESULTS / name).read_text())["rows"]:
        weights = row["weights"]
        cells = [
            row["name"],
            "" if weights is None else f"({weights['alpha']:g}, {weights['beta']:g}, {weights['gamma']:g})",
            percent(row["agreement"]),
            percent(row["agreement_moved"]),
            percent(row["agreement_moved_class"]),
            percent(row["comm_difference"], "{:+.2f}"),
            percent(row["gap"], "{:.2f}"),
            f"{row['max_over_mean']:.3f}",
            f"{row['moves']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def baseline_lines(name: str) -> list[str]:
    return [
        f"| {row['placement']} | {row['random']['remote']:.3f} | {row['topic']['remote']:.3f} | "
        f"{row['oracle']['remote']:.3f} | {row['random']['max_over_mean']:.3f} | {row['rank_changes']:.3f} |"
        for row in json.loads((RESULTS / name).read_text())["rows"]
    ]


@pytest.mark.parametrize(
    ("name", "lines_of"),
    [
        ("calibration.json", calibration_lines),
        ("calibration-balanced.json", calibration_lines),
        ("offline-baselines.json", baseline_lines),
        ("offline-baselines-recorded.json", baseline_lines),
    ],
)
def test_tables_come_from_stored_results(name, lines_of):
    document = (ROOT / "docs" / "calibration.md").read_text()
    expected = "\n".join(lines_of(name))
    assert len(expected.splitlines()) >= 6
    assert expected in document


def test_the_references_gaps_are_those_in_the_text():
    document = (ROOT / "docs" / "calibration.md").read_text()
    for name, limit, text in (
        ("calibration.json", 4e-5, "0.004 % in every layer"),
        ("calibration-balanced.json", 8e-5, "0.008 %"),
    ):
        assert max(json.loads((RESULTS / name).read_text())["reference"]["gap"]) <= limit
        assert text in document.replace("\n", " ")
