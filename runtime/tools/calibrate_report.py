"""The plots of `gimbal calibrate`: agreement and remote picks per layer, and over the grid of weights."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from gimbal_kernels.placement import CALIBRATED, PlacementProblem, Weights

from . import charts, html_page, matrix_chart
from .charts import Line

if TYPE_CHECKING:
    from gimbal_kernels.placement.offline import Agreement, Calibration

COLOURS = {
    "do nothing": "#6b7280",
    "paper, uncalibrated": "#c26a00",
    "paper, calibrated": "#0072b2",
    "reference": "#111827",
}
SHORT = {"paper, uncalibrated": "uncalibrated", "paper, calibrated": "calibrated", "reference": "exact"}
HEAD = ("", "weights", "agree %", "moved %", "near %", "comm +%", "gap %", "max/mean", "moves")


def _percent(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(100 * value)


def cells_of(row: Agreement) -> tuple[str, ...]:
    """One row of the table as texts."""
    weights = row.weights
    return (
        row.name,
        "" if weights is None else f"({weights.alpha:g}, {weights.beta:g}, {weights.gamma:g})",
        _percent(row.agreement),
        _percent(row.agreement_moved),
        _percent(row.agreement_moved_class),
        _percent(row.comm_difference, "{:+.2f}"),
        _percent(row.gap, "{:.2f}"),
        f"{row.max_over_mean:.3f}",
        f"{row.moves:.1f}",
    )


def build(name: str, problem: PlacementProblem, found: Calibration) -> str:
    """The whole page."""
    chosen = problem.weights_for(Weights())
    gap = found.reference.gap
    head = (
        f"<p class='soft'>{html.escape(name)}: {problem.num_layers} layers, {problem.num_experts} experts on "
        f"{problem.num_ranks} ranks, {problem.num_sources} sources. Reference: lowest {chosen.alpha:g}*comm + "
        f"{chosen.beta:g}*imbalance + {chosen.gamma:g}*moves/E, proven to {float(gap.max()):.4%} everywhere.</p>"
    )
    table = html_page.table(HEAD, [cells_of(row) for row in found.rows])
    note = (
        "<p>Agreement on all experts says little where the reference moves few: doing nothing agrees nearly as "
        "often. Agreement on the experts that it moves, and the proven gap, tell methods apart.</p>"
    )
    sections = [
        head,
        f"<h2>Agreement with the exact placement</h2>{note}{table}",
        f"<h2>Per layer</h2>{_per_layer(found)}",
        f"<h2>Over the grid</h2>{_grids(found)}",
    ]
    return html_page.page("Calibration of the placement heuristic", sections)


def _per_layer(found: Calibration) -> str:
    figures = []
    for index, caption, label in (
        (0, "Experts on the rank that the exact placement gives them", "share of experts"),
        (1, "Remote picks over those of the exact placement", "difference"),
        (2, "Experts moved", "experts"),
    ):
        left_out = "do nothing" if index == 2 else "reference"  # flat by definition
        lines = []
        for row, colour in COLOURS.items():
            values = found.per_layer[row][index]
            points = [(float(i), float(value)) for i, value in enumerate(values)]
            if row != left_out:
                lines.append(Line(SHORT.get(row, row), colour, points))
        layers = len(lines[0].points)
        x = charts.linear_axis("layer", [0.0, float(max(1, layers - 1))], digits=0, count=8)
        spots = [point[1] for line in lines for point in line.points]
        y = charts.linear_axis(label, spots, digits=0 if index == 2 else 2)
        figures.append(html_page.figure(caption, charts.line_chart(lines, x, y, caption)))
    return html_page.side_by_side(figures)


def _grids(found: Calibration) -> str:
    betas = sorted({row.weights.beta for row in found.grid if row.weights is not None})
    gammas = sorted({row.weights.gamma for row in found.grid if row.weights is not None})
    at = {(row.weights.gamma, row.weights.beta): row for row in found.grid if row.weights is not None}
    marked = []
    if CALIBRATED.gamma in gammas and CALIBRATED.beta in betas:
        marked.append((gammas.index(CALIBRATED.gamma), betas.index(CALIBRATED.beta)))

    def picture(caption: str, value: Any, form: str, *, low: float | None = None) -> str:
        values = np.array([[value(at[gamma, beta]) for beta in betas] for gamma in gammas], dtype=np.float64)
        shown = np.nan_to_num(values)
        return html_page.figure(
            caption,
            matrix_chart.number_grid(
                shown,
                rows=[f"{gamma:g}" for gamma in gammas],
                columns=[f"{beta:g}" for beta in betas],
                cells=[[form.format(100 * cell) for cell in row] for row in shown],
                low=float(shown.min()) if low is None else low,
                high=float(shown.max()),
                label=caption,
                titles=("beta", "gamma"),
                marked=marked,
            ),
        )

    def moved(row: Agreement) -> float:
        return 0.0 if row.agreement_moved is None else row.agreement_moved

    figures = [
        picture("Agreement on all experts, %", lambda row: row.agreement, "{:.0f}", low=0.0),
        picture("Agreement on the experts that the exact placement moves, %", moved, "{:.0f}", low=0.0),
        picture("Remote picks over the exact placement's, %", lambda row: row.comm_difference, "{:+.1f}"),
        picture("Cost above the proven bound, %", lambda row: row.gap, "{:.1f}", low=0.0),
    ]
    frame = "The framed cell is (1, 0.0025, 1), the paper's calibrated weights." if marked else ""
    return (
        f"<p>alpha is 1: only the ratios of the weights matter. {frame}</p>{html_page.side_by_side(figures)}"
    )
