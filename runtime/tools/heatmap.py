"""Source x expert heatmap of one traffic window, experts ordered by the rank that holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .charts import shade, svg, text
from .windows import SavedWindow

CELL, ROW = 10.0, 13.0
LAYER_GAP = 6.0
RANK_GAP = 8.0
LABEL_WIDTH, SHARE_WIDTH = 44.0, 44.0
HEADER, LEGEND = 22.0, 34.0
DARKEST = 3.0
"""Picks relative to an even spread over all experts; this and more is the darkest colour."""


def _slot_order(traffic: Any, slots: Any, ranks: int) -> list[list[int]]:
    """Experts of each rank, most used first (lowest id first among equals); traffic [S, E], slots [P]."""
    load = traffic.sum(axis=0)
    per_rank = len(slots) // ranks
    blocks = [slots[r * per_rank : (r + 1) * per_rank] for r in range(ranks)]
    return [sorted((int(e) for e in block if e >= 0), key=lambda e: (-load[e], e)) for block in blocks]


def _row(values: Any, order: list[list[int]], source: int, y: float) -> list[str]:
    """Cells of one source; its own rank's block gets a frame. values [E], relative to an even spread."""
    parts = []
    x = LABEL_WIDTH
    for rank, experts in enumerate(order):
        start = x
        for expert in experts:
            value = float(values[expert])
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{CELL}" height="{ROW}" '
                f'fill="{shade(value / DARKEST)}"><title>expert {expert}: {value:.2f}</title></rect>'
            )
            x += CELL
        css = "own" if rank == source else "other"
        parts.append(
            f'<rect class="{css}" x="{start:.1f}" y="{y:.1f}" width="{x - start:.1f}" height="{ROW}"/>'
        )
        x += RANK_GAP
    return parts


def _legend(width: float, y: float) -> list[str]:
    steps = 32
    bar = 120.0
    parts = [
        f'<rect x="{LABEL_WIDTH + i * bar / steps:.1f}" y="{y:.1f}" width="{bar / steps + 0.5:.1f}" '
        f'height="8" fill="{shade((i + 0.5) / steps)}"/>'
        for i in range(steps)
    ]
    for value in (0, 1, 2, 3):
        at = LABEL_WIDTH + value / DARKEST * bar
        parts.append(text(at, y + 20, f"{value}", anchor="middle"))
    parts.append(text(LABEL_WIDTH + bar + 14, y + 8, "picks / even spread"))
    return parts


def heatmap(window: SavedWindow, *, ranks: int, label: str) -> str:
    """One row per layer and source, one column per expert, a block of columns per rank.

    Source s owns rank s here (one rank per source): its frame is the local block, and the number at the end
    of the row is the share of its picks served there. Expects as many sources as ranks and no replicas.
    """
    layers, sources, experts = window.traffic.shape
    width = LABEL_WIDTH + experts * CELL + (ranks - 1) * RANK_GAP + SHARE_WIDTH
    parts = []
    block = (experts / ranks) * CELL + RANK_GAP
    for rank in range(ranks):
        middle = LABEL_WIDTH + rank * block + (block - RANK_GAP) / 2
        parts.append(text(middle, 14, f"experts on rank {rank}", anchor="middle"))
    parts.append(text(width, 14, "local", anchor="end"))
    y = HEADER
    for layer in range(layers):
        order = _slot_order(window.traffic[layer], window.current[layer], ranks)
        for source in range(sources):
            picks = window.traffic[layer, source].astype(np.float64)
            total = picks.sum()
            values = picks * experts / total if total else picks
            parts.append(text(LABEL_WIDTH - 5, y + 10, f"L{layer} s{source}", anchor="end", css="small"))
            parts += _row(values, order, source, y)
            local = picks[order[source]].sum() / total if total else float("nan")
            share = f"{100 * local:.0f} %" if total else "-"
            parts.append(text(width, y + 10, share, anchor="end", css="small"))
            y += ROW + 1
        y += LAYER_GAP
    parts += _legend(width, y + 4)
    return svg(width, y + LEGEND, parts, label)
