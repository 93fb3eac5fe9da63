"""docs/deflection.md: its tables are those of the stored results."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "bench" / "serving" / "pd_table.py"))["tables"]()


def test_there_are_results_of_real_and_of_emulated_nodes() -> None:
    assert set(TABLES) == {"pd.json", "pd-emulated.json"}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_that_of_the_results(name: str) -> None:
    text = (ROOT / "docs" / "deflection.md").read_text(encoding="utf-8")
    assert "\n".join(TABLES[name]) in text
