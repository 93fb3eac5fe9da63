"""The demo's figures as a table for the terminal and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .demo import DemoSettings
from .demo_result import ModeResult
from .replay import Record

NONE = "-"
DISTRIBUTIONS = ("gimbal-kernels", "vllm", "torch", "triton", "numpy")


def _number(pattern: str, value: float | None, factor: float = 1.0) -> str:
    return NONE if value is None else pattern.format(value * factor)


ROWS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("identical to reference", lambda r: f"{r.identical} of {len(r.records)}"),
    ("TTFT mean (s)", lambda r: _number("{:.3f}", r.summary.ttft_mean)),
    ("TTFT P99 (s)", lambda r: _number("{:.3f}", r.summary.ttft_p99)),
    ("TPOT mean (ms)", lambda r: _number("{:.1f}", r.summary.tpot_mean, 1e3)),
    ("requests/s", lambda r: _number("{:.2f}", r.summary.throughput)),
    ("remote-pick share", lambda r: _number("{:.3f}", r.total.remote_share)),
    ("rank load max/mean", lambda r: _number("{:.3f}", r.total.max_over_mean)),
    ("rearrangements", lambda r: _number("{:.0f}", r.rearrangements)),
    ("experts moved", lambda r: _number("{:.0f}", r.experts_moved)),
)
"""(label, text of one mode's figure), from top to bottom."""


def rows(results: Sequence[ModeResult]) -> list[list[str]]:
    """The table as text cells; the first row and the first column are headings."""
    cells = [["", *(result.mode for result in results)]]
    cells += [[label, *(text(result) for result in results)] for label, text in ROWS]
    reasons = sorted({reason for result in results for reason in result.decisions or {}})
    for reason in reasons:
        cells.append([f"decisions: {reason}", *(str((r.decisions or {}).get(reason, NONE)) for r in results)])
    if not reasons:
        cells.append(["decisions", *(NONE for _ in results)])
    return cells


def table(results: Sequence[ModeResult]) -> str:
    """One line per figure, one column per mode."""
    cells = rows(results)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def difference_lines(result: ModeResult, reference: Sequence[Record], limit: int = 3) -> list[str]:
    """What went wrong with the first requests of a mode that are not identical."""
    wanted = {record.name: record for record in reference}
    lines = []
    for record in [r for r in result.records if r.name in result.different][:limit]:
        want = wanted[record.name].token_ids
        if record.status != 200:
            what = f"status {record.status} {record.error}".strip()
        else:
            pairs = list(zip(record.token_ids, want, strict=False))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            what = f"token {at} of {len(want)} is the first that differs"
        lines.append(f"{result.mode}: request {record.name}: {what}")
    if len(result.different) > limit:
        lines.append(f"{result.mode}: and {len(result.different) - limit} more")
    return lines


def versions() -> dict[str, str | None]:
    """Installed versions of what takes part; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def as_json(settings: DemoSettings, results: Sequence[ModeResult], seconds: float) -> dict[str, Any]:
    """The JSON document: `requests`, `modes`, `versions`, and the settings of the run."""
    modes = {
        result.mode: {
            "identical": result.identical,
            "ttft_mean_s": result.summary.ttft_mean,
            "ttft_p99_s": result.summary.ttft_p99,
            "tpot_mean_s": result.summary.tpot_mean,
            "throughput_rps": result.summary.throughput,
            "remote_pick_share": result.total.remote_share,
            "max_over_mean": result.total.max_over_mean,
            "rearrangements": result.rearrangements,
            "experts_moved": result.experts_moved,
            "decisions": result.decisions,
        }
        for result in results
    }
    chosen = {
        "model": settings.model.name,
        "rate": settings.rate,
        "seed": settings.seed,
        "sequences": settings.sequences,
        "token_budget": settings.token_budget,
        "window": settings.window,
    }
    return {
        "requests": settings.requests,
        "modes": modes,
        "versions": versions(),
        "settings": chosen,
        "seconds": round(seconds, 1),
    }


def write_json(path: Path, settings: DemoSettings, results: Sequence[ModeResult], seconds: float) -> None:
    """Writes `as_json` to a file."""
    text = json.dumps(as_json(settings, results, seconds), indent=2)
    path.write_text(text + "\n", encoding="utf-8")
