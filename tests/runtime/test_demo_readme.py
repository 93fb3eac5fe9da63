"""README: its tables are those of the code, and its picture is the report's."""

from __future__ import annotations

from pathlib import Path

from gimbal_runtime.config import MODES, settings
from gimbal_runtime.metrics import METRICS
from gimbal_runtime.tools.loop_picture import standalone

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _default(value: object) -> str:
    if value is None:
        return "unset"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def test_settings_table():
    rows = [
        f"| `{s.name}` `{s.variable}` | {_default(s.default)} | {s.meaning} | {s.valid} |" for s in settings()
    ]
    assert [row for row in rows if row not in README] == []
    assert README.count("`GIMBAL_") == len(rows) + 1  # and one mention in the text


def test_metrics_table():
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.meaning} |" for m in METRICS]
    assert [row for row in rows if row not in README] == []


def test_modes_table():
    assert all(f"\n| `{mode}` |" in README for mode in MODES)


def test_length_and_picture():
    assert len(README.splitlines()) <= 200
    assert (ROOT / "docs" / "loop.svg").read_text(encoding="utf-8") == standalone()


def test_linked_files_exist():
    for link in ("docs/loop.svg", "docs/placement.md", "docs/engine-choice.md", "docs/counting.md"):
        assert f"({link})" in README
        assert (ROOT / link).is_file()
