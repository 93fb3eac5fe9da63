"""The figures in docs/migration.md are those of the stored results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "migration.md").read_text().splitlines()


def test_latencies_beside_rearrangements():
    script = runpy.run_path(str(ROOT / "bench" / "serving" / "rearrangement_table.py"))
    report = json.loads((ROOT / "bench" / "results" / "rearrangement.json").read_text())
    missing = [line for line in script["table"](report) if line not in DOCS]
    assert not missing
    for mode in ("sync", "async"):
        assert report[mode]["answers"] == report[mode]["identical"] > 0
        assert report[mode]["gimbal"]["rearrangements"] >= 20


def test_transfers_against_vllm():
    rows = json.loads((ROOT / "bench" / "results" / "migration.json").read_text())["rows"]
    for row in rows:
        if row["name"].startswith("transfers, "):
            way = row["name"].removeprefix("transfers, ")
            assert f"| {way} | {row['median']:.0f} | {row['gb_s']:.2f} | {row['x_vllm']:.2f} |" in DOCS
