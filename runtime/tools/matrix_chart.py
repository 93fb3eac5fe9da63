"""Matrices as pictures: source x expert traffic by rank, labelled grids of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .charts import shade, svg, text
from .html_page import png_uri

PICTURE_WIDTH, ROW = 1000.0, 11.0
LABELS, SHARES, HEADER, LEGEND = 52.0, 52.0, 22.0, 30.0
GAP = 4.0
MOST_ROWS = 200
DARKEST = 3.0
"""Picks relative to an even spread over all experts; this and more is the darkest colour."""


def chosen_layers(layers: int, sources: int) -> list[int]:
    """As many layers as fit into MOST_ROWS rows, evenly spaced, first and last included."""
    count = max(1, min(layers, MOST_ROWS // sources))
    return sorted({round(i) for i in np.linspace(0, layers - 1, count)})


def _colours(values: Any) -> Any:
    """uint8 [..., 3] of `shade` for values in 0..1, in 64 steps."""
    steps = [shade(i / 63) for i in range(64)]
    palette = np.array([[int(step[k : k + 2], 16) for k in (1, 3, 5)] for step in steps], dtype=np.uint8)
    return palette[np.clip(np.rint(values * 63), 0, 63).astype(int)]


def source_expert_picture(served: Any, experts: int, owned: Any, layers: Sequence[int], label: str) -> str:
    """One row per layer and source, one column per slot, a block of columns per rank.

    Inside a block slots are sorted by use. A framed block is at distance 0 from the row's source; the number at
    the end is the share of the source's picks served in such blocks.

    Args:
        served: [L, S, P] picks that each slot serves to each source.
        experts: E; an even spread is 1/E of a source's picks.
        owned: bool [S, R], ranks at distance 0 from each source.
        layers: those to draw.
    """
    _, sources, slots = served.shape
    ranks = owned.shape[1]
    size = slots // ranks
    block = (PICTURE_WIDTH - GAP * (ranks - 1)) / ranks
    height = ROW * sources * len(layers) + 3.0 * (len(layers) - 1)
    parts = [text(LABELS + PICTURE_WIDTH + SHARES, 14, "local", anchor="end", css="small")]
    for rank in range(ranks):
        x = LABELS + rank * (block + GAP)
        if block > 22 or rank % 4 == 0:
            name = f"rank {rank}" if block > 44 else f"{rank}"
            parts.append(text(x + block / 2, 14, name, anchor="middle", css="small"))
    y = HEADER
    for layer in layers:
        picks = served[layer].reshape(sources, ranks, size)
        order = np.argsort(-picks.sum(axis=0), axis=1, kind="stable")
        sorted_picks = np.take_along_axis(picks, order[None], axis=2)
        total = np.maximum(picks.sum(axis=(1, 2)), 1e-300)
        pixels = _colours(sorted_picks * experts / total[:, None, None] / DARKEST)
        for rank in range(ranks):
            parts.append(
                f'<image x="{LABELS + rank * (block + GAP):.1f}" y="{y:.1f}" width="{block:.1f}" '
                f'height="{ROW * sources:.1f}" preserveAspectRatio="none" href="{png_uri(pixels[:, rank])}"/>'
            )
        local = (picks.sum(axis=2) * owned).sum(axis=1) / total
        parts += _frames(owned, block, y)
        for source in range(sources):
            at = y + ROW * source + ROW - 2.0
            if sources <= 4 or source % 4 == 0:
                parts.append(text(LABELS - 5, at, f"L{layer} s{source}", anchor="end", css="tiny"))
                share = f"{100 * local[source]:.0f} %" if picks[source].any() else "-"
                parts.append(text(LABELS + PICTURE_WIDTH + SHARES, at, share, anchor="end", css="tiny"))
        y += ROW * sources + 3.0
    parts += colour_scale(LABELS, HEADER + height + 8, ("0", "1", "2", "3 or more"), "picks / even spread")
    return svg(LABELS + PICTURE_WIDTH + SHARES, HEADER + height + 8 + LEGEND, parts, label)


def _frames(owned: Any, block: float, y: float) -> list[str]:
    """A frame around each source's own block."""
    return [
        f'<rect class="own" x="{LABELS + rank * (block + GAP):.1f}" y="{y + ROW * source:.1f}" '
        f'width="{block:.1f}" height="{ROW:.1f}"/>'
        for source, rank in np.argwhere(owned)
    ]


def colour_scale(x: float, y: float, ticks: Sequence[str], label: str) -> list[str]:
    """A bar from white to dark with texts below at equal distances."""
    steps, width = 32, 150.0
    parts = [
        f'<rect x="{x + i * width / steps:.1f}" y="{y:.1f}" width="{width / steps + 0.5:.1f}" height="8" '
        f'fill="{shade((i + 0.5) / steps)}"/>'
        for i in range(steps)
    ]
    for i, tick in enumerate(ticks):
        at = x + width * i / (len(ticks) - 1)
        anchor = "start" if i == 0 else "middle"
        parts.append(text(at, y + 20, tick, anchor=anchor, css="small"))
    parts.append(text(x + width + 34, y + 9, label, css="small"))
    return parts


def number_grid(
    values: Any,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Any,
    low: float,
    high: float,
    label: str,
    titles: tuple[str, str] = ("", ""),
    marked: Sequence[tuple[int, int]] = (),
) -> str:
    """A labelled grid whose colour is `values` from `low` to `high`; large grids go without the numbers.

    Args:
        values: [n, m]. cells: [n][m] texts. titles: of the column and of the row axis. marked: framed cells.
    """
    count, across = np.shape(values)
    left, top, cell_height = 20.0 + 7.0 * max(map(len, rows)), 34.0, 20.0 if count <= 20 else 11.0
    cell_width = max(6.0, (620.0 - left) / across)
    show_numbers = cell_width >= 7.0 * max(len(cell) for row in cells for cell in row) and cell_height >= 20
    parts = [text(left, 12, titles[0], css="axis"), text(2, 12, titles[1], css="axis")]
    step = max(1, int(np.ceil(7.5 * max(map(len, columns)) / cell_width)))
    for j in range(0, across, step):
        parts.append(text(left + (j + 0.5) * cell_width, 28, columns[j], anchor="middle", css="small"))
    span = max(high - low, 1e-300)
    for i in range(count):
        y = top + i * cell_height
        if cell_height >= 20 or i % 2 == 0:
            parts.append(text(left - 6, y + cell_height * 0.7, rows[i], anchor="end", css="small"))
        for j in range(across):
            at = min(1.0, max(0.0, (float(values[i][j]) - low) / span))
            x = left + j * cell_width
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell_width - 0.5:.1f}" height="{cell_height - 0.5:.1f}" '
                f'fill="{shade(at)}"><title>{rows[i]}, {columns[j]}: {cells[i][j]}</title></rect>'
            )
            if show_numbers:
                css = "small light" if at > 0.55 else "small"
                parts.append(text(x + cell_width / 2, y + 14, cells[i][j], anchor="middle", css=css))
    for i, j in marked:
        parts.append(
            f'<rect class="mark" x="{left + j * cell_width:.1f}" y="{top + i * cell_height:.1f}" '
            f'width="{cell_width - 0.5:.1f}" height="{cell_height - 0.5:.1f}"/>'
        )
    return svg(left + across * cell_width + 6, top + count * cell_height + 6, parts, label)
