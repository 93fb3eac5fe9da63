"""The table of docs/placement.md is that of the stored results of bench/placement_report.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "bench" / "results" / "placement.json").read_text())


@pytest.mark.parametrize("effort", ["fast", "default"])
@pytest.mark.parametrize("shape", [row["shape"] for row in STORED["gaps"]["rows"]])
def test_gaps_and_times_are_the_stored_ones(shape, effort):
    gaps = next(row for row in STORED["gaps"]["rows"] if row["shape"] == shape)
    times = next(row for row in STORED["times"]["rows"] if row["shape"] == shape)
    gap, spent = gaps["gap_percent"][effort], times["time"][effort]["wall_ms"]
    policy = times["vllm"]["wall_ms"]
    line = (
        f"| {gaps['layers']} x {shape} | {effort} | {gap['mean']:.3f} % | {gap['max']:.2f} % | {gaps['bound']} "
        f"| {spent:.1f} ms | {policy:.1f} ms | {spent / policy:.2f} |"
    )
    assert line in (ROOT / "docs" / "placement.md").read_text().splitlines()


def test_every_layer_above_one_percent_is_named():
    text = (ROOT / "docs" / "placement.md").read_text()
    for row in STORED["gaps"]["rows"]:
        for seed, layer, cost, lifted, _bound in row["layers_above_1_percent"]:
            assert f"{row['shape']}, seed {seed}, layer {layer}, cost {cost:.4f}" in text
            assert f"lifted bound {lifted:.4f}" in text
