"""`gimbal report`: pictures of a window's traffic before and after a placement, in one HTML file."""

from __future__ import annotations

import argparse
import html
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_kernels.placement import Placement, PlacementProblem, evaluate
from gimbal_kernels.placement import place as choose

from . import charts, html_page, matrix_chart, place_options
from .charts import Line
from .errors import InputError
from .place import ROWS, result_of
from .placement_figures import PlacementFigures, figures_of
from .traffic_files import NO_SOURCES, TrafficFile

BEFORE, AFTER = "#6b7280", "#0072b2"
TARGET = Path("placement-report.html")


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "report",
        help="pictures of traffic before and after a placement",
        description="Draws source x expert traffic, rank loads, remote share and traffic per GPU pair, before and "
        "after a placement, into one HTML file without anything from elsewhere.",
    )
    parser.add_argument("traffic", type=Path, metavar="TRAFFIC", help=".npz, or a dump: docs/placement.md")
    parser.add_argument(
        "--placement", type=Path, metavar="FILE", help="what `gimbal place --out` wrote (default: place now)"
    )
    place_options.add_shape_arguments(parser)
    place_options.add_method_arguments(parser)
    parser.add_argument("--out", type=Path, default=TARGET, metavar="FILE", help=f"default: {TARGET}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the sub-command; 0.

    Raises:
        InputError: a file or an option that is not valid.
    """
    for option in ("out", "json"):
        place_options.check_target(getattr(arguments, option), f"--{option}")
    file = place_options.read_file(arguments.traffic)
    problem = place_options.problem_of(file, arguments, place_options.weights_of(file, arguments))
    if arguments.placement is None:
        placement = place_options.solve(problem, arguments)
    else:
        placement = read_placement(arguments.placement, problem)
    before, after = figures_of(problem, choose(problem, method="stay")), figures_of(problem, placement)
    result = result_of(before, after, place_options.bound_of(problem, arguments), arguments)
    if arguments.placement is not None:
        result["method"], result["effort"] = f"from {arguments.placement.name}", None
    result |= {"file": str(file.path), "kind": file.kind, "source_axis": not file.loads_only}
    with place_options.writing("--out", arguments.out):
        arguments.out.write_text(build(file, before, after, result), encoding="utf-8")
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")
    if arguments.json is not None:
        with place_options.writing("--json", arguments.json):
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def read_placement(path: Path, problem: PlacementProblem) -> Placement:
    """The `slots` of an .npz, evaluated.

    Raises:
        InputError: not such a file, slots that do not fit the problem, or that were placed on other ranks.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            slots = data["slots"]
            placed_on = data["distance"].shape[-1] if "distance" in data else problem.num_ranks
    except (OSError, EOFError, KeyError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(
            f"--placement: {path}: {str(error)[:120]}; valid: an .npz with `slots` [L, P]"
        ) from None
    if placed_on != problem.num_ranks:
        raise InputError(
            f"--placement: {path}: placed on {placed_on} ranks; valid: on {problem.num_ranks}, as --ranks says"
        )
    try:
        return evaluate(problem, slots)
    except ValueError as error:
        raise InputError(f"--placement: {path}: {error}") from None


def build(
    file: TrafficFile, before: PlacementFigures, after: PlacementFigures, result: dict[str, Any]
) -> str:
    """The whole page."""
    spare = after.problem.num_slots - after.problem.num_experts
    head = (
        f"<p class='soft'>{html.escape(file.path.name)}: {result['layers']} layers, {result['sources']} sources, "
        f"{result['experts']} experts on {result['ranks']} ranks of {result['slots_per_rank']} slots "
        f"({spare} spare); method {html.escape(result['method'])}; current placement: {result['current']}.</p>"
    )
    sections = [head, _figures_table(result)]
    if file.loads_only:
        sections.append(f"<p>{file.kind}: {NO_SOURCES}.</p>")
    else:
        sections += [_remote_section(before, after, result), _pairs_section(before, after)]
    sections.append(_loads_section(before, after))
    sections.append(_traffic_section(before, after))
    return html_page.page("Expert placement", sections)


def _figures_table(result: dict[str, Any]) -> str:
    rows = [
        (label, form.format(result["before"][key]), form.format(result["after"][key]))
        for label, key, form in ROWS
        if result["source_axis"] or key not in ("remote_share", "comm")
    ]
    covers = "" if result["bound_covers"] == "cost" else " (the bound takes balance as free)"
    gap = result["gap"]
    rows.append(("proven gap, mean over layers" + covers, "", f"{gap['mean']:.3%}"))
    rows.append(("proven gap, worst layer" + covers, "", f"{gap['max']:.3%}"))
    return f"<h2>Figures</h2>{html_page.table(('', 'before', 'after'), rows)}"


def _lines(caption: str, label: str, old: Any, new: Any, *, digits: int, floor: float | None = None) -> str:
    lines = [
        Line(name, colour, [(float(i), float(v)) for i, v in enumerate(values)])
        for name, colour, values in (("before", BEFORE, old), ("after", AFTER, new))
    ]
    spots = [v for line in lines for _, v in line.points] + ([] if floor is None else [floor])
    x = charts.linear_axis("layer", [0.0, float(max(1, len(old) - 1))], digits=0, count=8)
    return html_page.figure(
        caption, charts.line_chart(lines, x, charts.linear_axis(label, spots, digits=digits), caption)
    )


def _remote_section(before: PlacementFigures, after: PlacementFigures, result: dict[str, Any]) -> str:
    share = _lines(
        "Remote picks per layer", "share of picks", before.remote_share, after.remote_share, digits=2
    )
    moves = after.placement.moves.numpy()
    gap = _lines(
        "Cost per layer", "cost", before.placement.cost.numpy(), after.placement.cost.numpy(), digits=2
    )
    text = (
        "<p>A pick is remote when it is served on a rank at a distance above 0 from its source. "
        f"{int(moves.sum())} expert copies change rank, at most {int(moves.max(initial=0))} in a layer.</p>"
    )
    return f"<h2>Remote share and cost</h2>{text}{html_page.side_by_side([share, gap])}"


def _pairs_section(before: PlacementFigures, after: PlacementFigures) -> str:
    sources, ranks = after.problem.num_sources, after.problem.num_ranks
    owned = after.problem.topology.distance == 0
    names = []
    for source in range(sources):
        own = np.flatnonzero(owned[source])
        place = f"GPU {own[0]}" if len(own) == 1 else f"GPUs {own[0]} to {own[-1]}" if len(own) else "-"
        names.append(f"s{source} ({place})")
    totals = [figures.pairs.sum(axis=0) for figures in (before, after)]
    most = max(float(total.max()) for total in totals)
    pictures = []
    for name, total in zip(("before", "after"), totals, strict=True):
        cells = [[_short(value) for value in row] for row in total]
        picture = matrix_chart.number_grid(
            total,
            rows=names,
            columns=[f"GPU {rank}" if ranks <= 12 else str(rank) for rank in range(ranks)],
            cells=cells,
            low=0.0,
            high=most,
            label=f"traffic per GPU pair, {name}",
            titles=("served on", "from"),
            marked=[(int(s), int(r)) for s, r in np.argwhere(owned)] if ranks <= 64 else [],
        )
        pictures.append(html_page.figure(f"Picks per GPU pair, {name}", picture))
    text = (
        "<p>Routed picks of the window over all layers, from each source to each GPU. Framed pairs are local. "
        "Times the bytes of one pick this is what each link carries, in dispatch and again in combine.</p>"
    )
    return f"<h2>Traffic per GPU pair</h2>{text}{html_page.side_by_side(pictures)}"


def _loads_section(before: PlacementFigures, after: PlacementFigures) -> str:
    ratio = _lines(
        "Fullest rank / mean rank load per layer",
        "max / mean",
        before.placement.max_over_mean.numpy(),
        after.placement.max_over_mean.numpy(),
        digits=2,
        floor=1.0,
    )
    layers, ranks = after.problem.num_layers, after.problem.num_ranks
    pictures = []
    relative = [_relative(figures.rank_load) for figures in (before, after)]
    high = max(1.05, float(max(np.max(values) for values in relative)))
    for name, values in zip(("before", "after"), relative, strict=True):
        picture = matrix_chart.number_grid(
            values.T,
            rows=[f"rank {rank}" for rank in range(ranks)],
            columns=[str(layer) for layer in range(layers)],
            cells=[[f"{value:.2f}" for value in row] for row in values.T],
            low=0.0,
            high=high,
            label=f"rank loads, {name}",
            titles=("layer", ""),
        )
        pictures.append(
            html_page.figure(f"Load of each rank over the mean, {name} (0 to {high:.2f})", picture)
        )
    return f"<h2>Rank loads</h2>{html_page.side_by_side([*pictures, ratio])}"


def _traffic_section(before: PlacementFigures, after: PlacementFigures) -> str:
    problem = after.problem
    layers = matrix_chart.chosen_layers(problem.num_layers, problem.num_sources)
    owned = problem.topology.distance == 0
    figures = []
    for name, found in (("before", before), ("after", after)):
        label = f"Source x expert traffic, {name}"
        picture = matrix_chart.source_expert_picture(found.served, problem.num_experts, owned, layers, label)
        figures.append(html_page.figure(label, picture))
    drawn = f"{len(layers)} of {problem.num_layers} layers. " if len(layers) < problem.num_layers else ""
    text = (
        f"<p>{drawn}One row per layer (L) and source (s), one column per slot, grouped by rank and sorted by use "
        "inside it. Framed blocks are the source's own: dark cells inside them are picks that cross no link; the "
        "number at the end is their share.</p>"
    )
    return f"<h2>Source x expert traffic</h2>{text}{''.join(figures)}"


def _relative(loads: Any) -> Any:
    """Rank loads over their layer's mean, 1 in a layer without picks; [L, R]."""
    mean = loads.mean(axis=1, keepdims=True)
    return np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0)


def _short(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
