"""The demo's HTML report: one file, readable without a network and without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence

from . import charts, demo_table
from .charts import Line
from .demo import DemoSettings
from .demo_result import ModeResult
from .heatmap import heatmap
from .loop_picture import picture
from .windows import busy

COLOURS = {
    "off": "#6b7280",
    "dp": "#0072b2",
    "ep": "#c26a00",
    "uncoordinated": "#a4477f",
    "full": "#00805c",
}
RANKS = 2

STYLE = """
:root { color-scheme: light; --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 24px 16px 48px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 6px; }
p { margin: 4px 0 12px; max-width: 76ch; } .soft { color: var(--soft); }
.verdict { display: inline-block; padding: 4px 12px; border-radius: 6px; font-weight: 600; margin: 8px 0; }
.good { background: #dcfce7; color: #14532d; } .bad { background: #fee2e2; color: #7f1d1d; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; font-weight: 400; } thead th { font-weight: 600; }
.grid2 { display: grid; gap: 12px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: 8px 0; min-width: 0; } figcaption { font-weight: 600; font-size: 14px; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, "DejaVu Sans", sans-serif;
  fill: var(--ink); } svg .axis { fill: var(--soft); } svg .small { font-size: 11px; }
svg .grid { stroke: var(--line); } svg .name { font-weight: 600; font-size: 13px; }
svg .own { fill: none; stroke: #d9480f; stroke-width: 1.4; } svg .other { fill: none; stroke: #9ca3af;
  stroke-width: 0.6; }
svg .box { fill: #f3f6fa; stroke: #94a3b8; } svg .arrow { fill: none; stroke: #475569; stroke-width: 1.6; }
svg .dashed { stroke-dasharray: 5 4; } svg .tip { fill: #475569; stroke: none; }
.loop svg { max-width: 760px; margin: 0 auto; } .loop.narrow { display: none; }
@media (max-width: 640px) { .loop.wide { display: none; } .loop.narrow { display: block; }
  .loop svg { max-width: 400px; } th, td { padding: 4px 6px; font-size: 14px; } }
"""


def _figure(caption: str, body: str) -> str:
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{body}</figure>"


def _colour(mode: str) -> str:
    return COLOURS.get(mode, "#111827")


def _table(results: Sequence[ModeResult]) -> str:
    head, *body = demo_table.rows(results)
    cells = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    lines = [f"<thead><tr>{cells}</tr></thead><tbody>"]
    for label, *values in body:
        numbers = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{html.escape(label)}</th>{numbers}</tr>')
    return f'<div class="scroll"><table>{"".join(lines)}</tbody></table></div>'


def _ttft(results: Sequence[ModeResult]) -> str:
    """Empirical distribution functions of TTFT and of TPOT."""
    figures = []
    for name, unit, field, factor, log in (
        ("Time to first token", "s", "ttft", 1.0, True),
        ("Time per later token", "ms", "tpot", 1e3, False),
    ):
        lines = []
        for result in results:
            found = sorted(v * factor for r in result.records if (v := getattr(r, field)))
            points = [(value, (i + 1) / len(found)) for i, value in enumerate(found)]
            if points:
                lines.append(
                    Line(result.mode, _colour(result.mode), [(points[0][0], 0.0), *points], steps=True)
                )
        if not lines:
            continue
        spots = [point[0] for line in lines for point in line.points]
        if log:
            x = charts.log_axis(f"{name} ({unit}, log scale)", spots)
        else:
            x = charts.linear_axis(f"{name} ({unit})", [0.0, *spots], digits=0, count=8)
        y = charts.Axis("share of requests", 0.0, 1.0, [(i / 4, f"{25 * i} %") for i in range(5)])
        figures.append(
            _figure(f"{name}: share of requests at or below", charts.line_chart(lines, x, y, name))
        )
    return f'<div class="grid2">{"".join(figures)}</div>' if figures else "<p>No request finished.</p>"


def _per_window(results: Sequence[ModeResult]) -> str:
    figures = []
    for caption, label, field in (
        ("Remote-pick share per window", "picks on another rank", "remote_share"),
        ("Fullest rank / mean rank load per window", "max / mean", "max_over_mean"),
    ):
        lines = []
        for result in results:
            values = {i + 1: getattr(result.figures[i], field) for i in busy(result.windows)}
            points = [(float(i), v) for i, v in values.items() if v is not None]
            if points:
                lines.append(Line(result.mode, _colour(result.mode), points))
        if not lines:
            continue
        spots = [point for line in lines for point in line.points]
        x = charts.linear_axis("traffic window", [p[0] for p in spots], digits=0, count=8)
        y = charts.linear_axis(label, [p[1] for p in spots], digits=2)
        figures.append(_figure(caption, charts.line_chart(lines, x, y, caption)))
    if not figures:
        return "<p>No traffic window was saved in these modes.</p>"
    return f'<div class="grid2">{"".join(figures)}</div>'


def _heatmaps(results: Sequence[ModeResult]) -> str:
    figures = []
    for result in results:
        if not result.windows:
            continue
        full = busy(result.windows)
        for i in sorted({full[0], full[-1]}):
            window = result.windows[i]
            label = f"{result.mode}: traffic window {i + 1} of {len(result.windows)}"
            figures.append(_figure(label, heatmap(window, ranks=RANKS, label=label)))
    if not figures:
        return "<p>No traffic window was saved in these modes.</p>"
    return f'<div class="grid2">{"".join(figures)}</div>'


def _verdict(settings: DemoSettings, results: Sequence[ModeResult]) -> str:
    parts = [f"{r.mode} {r.identical} of {settings.requests}" for r in results]
    good = all(r.identical == settings.requests for r in results)
    css = "good" if good else "bad"
    return f'<div class="verdict {css}">Identical to the reference: {html.escape(", ".join(parts))}</div>'


def page(settings: DemoSettings, results: Sequence[ModeResult]) -> str:
    """The whole page."""
    found = demo_table.versions()
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    load = (
        f"{settings.requests} requests per mode, {settings.rate:g} a second with bursty arrivals (CV 2), "
        f"seed {settings.seed}; {settings.sequences} sequences and {settings.token_budget} tokens per engine "
        f"step; windows of {settings.window} steps; model {settings.model.name}, fp32, greedy."
    )
    sections = (
        f"<h1>Gimbal on real vLLM</h1><p class='soft'>{html.escape(load)}<br>{html.escape(versions)}</p>",
        _verdict(settings, results),
        f'<h2>The loop</h2><div class="loop wide">{picture()}</div>'
        f'<div class="loop narrow">{picture(narrow=True)}</div>',
        "<h2>Figures</h2><p>The reference is one stock engine without expert parallelism. Mode <b>off</b> is "
        "stock vLLM with its own load balancer, <b>full</b> has engine choice, queue order, placement and "
        "pressure feedback. One run on a small shared machine: compare modes, not machines.</p>"
        f"{_table(results)}",
        f"<h2>Latency</h2>{_ttft(results)}",
        f"<h2>Traffic over time</h2><p>A window is {settings.window} engine steps, whatever they hold; those "
        "with less than a tenth of the fullest window's picks are left out here, and weigh as little in the "
        f"table.</p>{_per_window(results)}",
        "<h2>Source × expert traffic</h2><p>First and last busy window of each mode. One row per layer (L) "
        "and data-parallel source (s), one column per expert, grouped by the rank that held it in that window "
        "and sorted by use. The framed block is the source's own rank: dark cells inside it are picks that "
        "cross no link, and the number at the end is their share. With requests spread evenly over engines "
        "both sources look alike, and half of the picks are local whatever the placement; what then counts "
        f"is the balance.</p>{_heatmaps(results)}",
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Gimbal demo</title><style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )
