"""`gimbal place`: from a window of traffic to a placement, its costs and a proof of how good it is."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_kernels.placement import Weights
from gimbal_kernels.placement import place as choose

from . import place_options
from .errors import InputError
from .place_example import RANKS, write_example
from .placement_figures import PlacementFigures, figures_of, per_layer, relative_gap, summary

ROWS = (
    ("remote picks", "remote_share", "{:.1%}"),
    ("mean distance of a pick", "comm", "{:.4f}"),
    ("rank load max/mean, mean over layers", "max_over_mean", "{:.4f}"),
    ("rank load max/mean, worst layer", "max_over_mean_worst", "{:.4f}"),
    ("cost", "cost", "{:.6f}"),
    ("experts moved", "moves", "{:d}"),
)


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "place",
        help="place experts from recorded traffic, with a proof",
        description="Chooses the expert of every slot from a window of traffic; prints costs and the proven gap. "
        "Weights given here are those of the cost; method paper keeps its own calibrated ones.",
    )
    parser.add_argument(
        "traffic", type=Path, nargs="?", metavar="TRAFFIC", help=".npz, or a dump: docs/placement.md"
    )
    parser.add_argument("--example", type=Path, metavar="FILE", help="write example traffic to FILE, and end")
    parser.add_argument("--seed", type=int, default=0, help="of the example (default 0)")
    place_options.add_shape_arguments(parser)
    place_options.add_method_arguments(parser)
    parser.add_argument("--per-layer", action="store_true", help="print every layer")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the placement to FILE (.npz)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the sub-command; 0.

    Raises:
        InputError: a file or an option that is not valid.
    """
    for option in ("example", "out", "json"):
        place_options.check_target(getattr(arguments, option), f"--{option}")
    if arguments.example is not None:
        return _example(arguments)
    if arguments.traffic is None:
        raise InputError("TRAFFIC: not given; valid: a traffic file, or --example FILE to get one")
    file = place_options.read_file(arguments.traffic)
    problem = place_options.problem_of(file, arguments, place_options.weights_of(file, arguments))
    after = figures_of(problem, place_options.solve(problem, arguments))
    before = figures_of(problem, choose(problem, method="stay"))
    bound = place_options.bound_of(problem, arguments)
    result = result_of(before, after, bound, arguments)
    result |= {"file": str(file.path), "kind": file.kind, "source_axis": not file.loads_only}
    show(result, per_layer_too=arguments.per_layer)
    if arguments.out is not None:
        with place_options.writing("--out", arguments.out):
            save(arguments.out, after, bound)
    if arguments.json is not None:
        with place_options.writing("--json", arguments.json):
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _example(arguments: argparse.Namespace) -> int:
    if arguments.traffic is not None:
        raise InputError(f"--example: with {arguments.traffic} as well; valid: one of them")
    if arguments.seed < 0:
        raise InputError(f"--seed: {arguments.seed}; valid: an integer >= 0")
    with place_options.writing("--example", arguments.example):
        write_example(arguments.example, arguments.seed)
    print(f"{arguments.example}: generated traffic, 48 layers, 2 sources, 128 experts; for {RANKS} ranks:")
    print(f"  gimbal place {arguments.example} --ranks {RANKS}")
    return 0


def result_of(
    before: PlacementFigures, after: PlacementFigures, bound: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All figures, for JSON."""
    problem, placement = after.problem, after.placement
    gap = relative_gap(placement.cost.numpy(), bound)
    busy = problem.traffic.any(axis=(1, 2))
    return {
        "layers": problem.num_layers,
        "sources": problem.num_sources,
        "experts": problem.num_experts,
        "ranks": problem.num_ranks,
        "slots_per_rank": problem.slots_per_rank,
        "method": arguments.method,
        "effort": arguments.effort if arguments.method == "portfolio" else None,
        "weights": asdict(problem.weights_for(Weights())),
        "current": "from the file" if problem.current is not None else "none: slot p holds expert p mod E",
        "before": {**summary(before), "per_layer": per_layer(before)},
        "after": {**summary(after), "per_layer": per_layer(after)},
        "lower_bound": bound.tolist(),
        "bound_covers": "cost" if problem.num_slots == problem.num_experts else "all but balance",
        "gap": {"mean": float(gap[busy].mean()), "max": float(gap[busy].max()), "per_layer": gap.tolist()},
        "slots": placement.slots.tolist(),
    }


def show(result: dict[str, Any], *, per_layer_too: bool) -> None:
    """Prints the tables."""
    spare = result["ranks"] * result["slots_per_rank"] - result["experts"]
    print(
        f"{result['layers']} layers, {result['sources']} sources, {result['experts']} experts on {result['ranks']} "
        f"ranks of {result['slots_per_rank']} slots ({spare} spare); method {result['method']}"
    )
    weights = ", ".join(f"{name} {value:g}" for name, value in result["weights"].items())
    print(f"cost: {weights}; current placement: {result['current']}")
    print(f"{'':38} {'before':>12} {'after':>12}")
    for label, key, form in ROWS:
        if not result["source_axis"] and key in ("remote_share", "comm"):
            continue
        print(f"{label:38} {form.format(result['before'][key]):>12} {form.format(result['after'][key]):>12}")
    gap = result["gap"]
    print(f"proven gap to the lowest cost: mean {gap['mean']:.3%}, worst layer {gap['max']:.3%}", end="")
    weak = result["bound_covers"] != "cost"
    print(" (with spare slots the bound takes balance as free)" if weak else "")
    if per_layer_too:
        _show_layers(result)


def _show_layers(result: dict[str, Any]) -> None:
    print(
        f"{'layer':>5} {'remote picks':>17} {'max/mean':>17} {'moved':>6} {'cost':>10} {'bound':>10} {'gap':>8}"
    )
    old, new = result["before"]["per_layer"], result["after"]["per_layer"]
    for layer in range(result["layers"]):
        print(
            f"{layer:5d} {old['remote_share'][layer]:7.1%} -> {new['remote_share'][layer]:6.1%}"
            f" {old['max_over_mean'][layer]:7.3f} -> {new['max_over_mean'][layer]:6.3f}"
            f" {new['moves'][layer]:6d} {new['cost'][layer]:10.6f} {result['lower_bound'][layer]:10.6f}"
            f" {result['gap']['per_layer'][layer]:8.3%}"
        )


def save(path: Path, figures: PlacementFigures, bound: Any) -> None:
    """Writes the placement: slots and current [L, P], distance [S, R], and the figures and bound of each layer."""
    placement, problem = figures.placement, figures.problem
    arrays = {
        name: getattr(placement, name).numpy()
        for name in ("slots", "cost", "comm", "imbalance", "max_over_mean", "moves")
    }
    arrays |= {"lower_bound": bound, "distance": problem.topology.distance}
    if problem.current is not None:
        arrays["current"] = problem.current
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
