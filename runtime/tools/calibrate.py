"""`gimbal calibrate`: the paper's heuristic on a grid of weights against an exact solver."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gimbal_kernels.placement import CALIBRATED, PlacementProblem, Weights

from . import place_options
from .bench import environment
from .calibrate_report import HEAD, build, cells_of
from .errors import InputError, RunError
from .place_example import EXPERTS, LAYERS, RANKS, example_traffic
from .traffic_files import TrafficFile

if TYPE_CHECKING:
    from gimbal_kernels.placement.offline import Calibration

TARGET = Path("calibration.html")


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "calibrate",
        help="calibrate the paper's heuristic against an exact solver",
        description="Compares method paper on a grid of weights with the exact placement (HiGHS, extra offline): "
        "agreement on all experts and on those that the exact solver moves, difference in remote picks, proven "
        "gap, beside doing nothing. Without a file: generated traffic in the paper's setting, 128 experts on 4 "
        "ranks, 2 sources. The default weights of the cost are those that the calibrated (1, 0.0025, 1) stand for.",
    )
    parser.add_argument("traffic", type=Path, nargs="?", metavar="TRAFFIC", help="default: generated")
    parser.add_argument("--seed", type=int, default=0, help="of the generated traffic (default 0)")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    place_options.add_shape_arguments(parser)
    group = parser.add_argument_group("the grid, in the units of method paper, alpha = 1")
    group.add_argument("--betas", type=float, nargs="+", metavar="B")
    group.add_argument("--gammas", type=float, nargs="+", metavar="G")
    group = parser.add_argument_group("the exact solver")
    group.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds per layer (default 30)"
    )
    group.add_argument(
        "--gap", type=float, default=1e-4, help="relative gap that counts as solved (default 0.0001)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write the plots to FILE, such as {TARGET}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the sub-command; 0.

    Raises:
        InputError: a file or an option that is not valid.
        RunError: HiGHS is not installed.
    """
    for option in ("out", "json"):
        place_options.check_target(getattr(arguments, option), f"--{option}")
    file = generated(arguments) if arguments.traffic is None else place_options.read_file(arguments.traffic)
    problem = problem_of(file, arguments)
    try:
        from gimbal_kernels.placement.offline import calibrate
    except ImportError as error:
        raise RunError(
            f"the exact solver is not installed ({error}); install highspy, or this package with [offline]"
        ) from None
    grid = {name: tuple(values) for name in ("betas", "gammas") if (values := getattr(arguments, name))}
    try:
        for values in grid.values():
            for value in values:
                Weights(1.0, value, value)
        found = calibrate(
            problem, **grid, time_limit=arguments.time_limit, gap=arguments.gap, progress=_progress
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    name = "generated traffic" if arguments.traffic is None else arguments.traffic.name
    show(name, problem, found)
    if arguments.out is not None:
        with place_options.writing("--out", arguments.out):
            arguments.out.write_text(build(name, problem, found), encoding="utf-8")
        print(f"{arguments.out}: plots")
    if arguments.json is not None:
        result = result_of(name, problem, found) | environment("cpu", torch.get_num_threads())
        result["versions"]["highspy"] = importlib.metadata.version("highspy")
        with place_options.writing("--json", arguments.json):
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def generated(arguments: argparse.Namespace) -> TrafficFile:
    """The paper's setting, from the seed."""
    if arguments.seed < 0:
        raise InputError(f"--seed: {arguments.seed}; valid: an integer >= 0")
    current: Any = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    if arguments.ranks is None:
        arguments.ranks = RANKS
    return TrafficFile(Path("generated"), "traffic", example_traffic(arguments.seed), current, None, False)


def problem_of(file: TrafficFile, arguments: argparse.Namespace) -> PlacementProblem:
    """The problem with the reference's weights and a current placement: expert e in slot e if the file has none."""
    layers = file.traffic.shape[0] if arguments.layers is None else arguments.layers
    if not 1 <= layers <= file.traffic.shape[0]:
        raise InputError(f"--layers: {layers}; valid: 1 to {file.traffic.shape[0]}")
    experts = file.traffic.shape[2]
    current = file.current
    if current is None:
        current = np.tile(np.arange(experts, dtype=np.int32), (file.traffic.shape[0], 1))
    if current.shape[1] != experts:
        raise InputError(
            f"current: {current.shape[1]} slots for {experts} experts; valid here: one slot per expert"
        )
    if len(current) != len(file.traffic):
        raise InputError(f"current: {len(current)} layers; valid: {len(file.traffic)}, as traffic")
    if not file.traffic[:layers].any():
        raise InputError(f"--layers: no picks in the first {layers}; valid: layers with traffic")
    cut = TrafficFile(
        file.path, file.kind, file.traffic[:layers], current[:layers], file.distance, file.loads_only
    )
    ranks = place_options.topology_of(cut, arguments).num_ranks
    asked = {"alpha": CALIBRATED.alpha, "beta": CALIBRATED.beta * experts / ranks, "gamma": CALIBRATED.gamma}
    for name in asked:
        if getattr(arguments, name) is not None:
            asked[name] = getattr(arguments, name)
    try:
        weights = Weights(**asked)
    except ValueError as error:
        raise InputError(f"--{error}") from None
    return place_options.problem_of(cut, arguments, weights)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def show(name: str, problem: PlacementProblem, found: Calibration) -> None:
    """Prints the table."""
    chosen, gap = problem.weights_for(Weights()), found.reference.gap
    print(
        f"{name}: {problem.num_layers} layers, {problem.num_experts} experts, {problem.num_ranks} ranks, "
        f"{problem.num_sources} sources"
    )
    print(
        f"reference: lowest {chosen.alpha:g}*comm + {chosen.beta:g}*imbalance + {chosen.gamma:g}*moves/E, "
        f"proven to {float(gap.mean()):.4%} (worst layer {float(gap.max()):.4%}), "
        f"{float(found.reference.seconds.sum()):.1f} s"
    )
    lines = [HEAD, *(cells_of(row) for row in found.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    for line in lines:
        print(
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)),
                ]
            )
        )
    print(
        "agree: experts on the reference's rank; moved: the same among those that the reference moves; near: there,"
    )
    print(
        "on a rank as far from every source; comm: over the reference's; gap: above the proven bound of the cost."
    )


def result_of(name: str, problem: PlacementProblem, found: Calibration) -> dict[str, Any]:
    """All figures, for JSON."""
    reference = found.reference
    return {
        "file": name,
        "layers": problem.num_layers,
        "sources": problem.num_sources,
        "experts": problem.num_experts,
        "ranks": problem.num_ranks,
        "reference": {
            "weights": asdict(problem.weights_for(Weights())),
            "cost": reference.placement.cost.tolist(),
            "bound": reference.bound.tolist(),
            "gap": reference.gap.tolist(),
            "seconds": reference.seconds.tolist(),
        },
        "matching": asdict(found.matching),
        "rows": [asdict(row) for row in found.rows],
        "grid": [asdict(row) for row in found.grid],
        "per_layer": {
            row: {
                "agreement": agreement.tolist(),
                "comm_difference": difference.tolist(),
                "moves": moves.tolist(),
            }
            for row, (agreement, difference, moves) in found.per_layer.items()
        },
    }
