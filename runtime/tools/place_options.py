"""Arguments that `gimbal place`, `report` and `calibrate` share, and the placement problem they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gimbal_kernels.placement import Placement, PlacementProblem, Weights, evaluate, lower_bound, place
from gimbal_kernels.placement.hierarchy import place_by_node
from gimbal_kernels.placement.solve import EFFORTS, METHODS
from gimbal_kernels.topology import Topology

from .errors import InputError
from .traffic_files import NO_SOURCES, TrafficFile, read_traffic

MOST_RANKS = 1024

Result = TypeVar("Result")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Ranks, nodes and weights."""
    group = parser.add_argument_group("where experts can live")
    group.add_argument("--ranks", type=int, metavar="R", help="EP ranks (default: one per source)")
    group.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes of equally many ranks (default 1)"
    )
    group.add_argument("--far", type=float, default=8.0, help="distance to another node (default 8)")
    group = parser.add_argument_group("what a placement costs: alpha*comm + beta*imbalance + gamma*moves/E")
    group.add_argument("--alpha", type=float, help="weight of remote picks")
    group.add_argument("--beta", type=float, help="weight of imbalance")
    group.add_argument("--gamma", type=float, help="price of a moved expert")


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """Spare slots, method and limits."""
    group = parser.add_argument_group("how to place")
    group.add_argument(
        "--spare", type=int, metavar="N", help="spare slots per layer (default: as now, else 0)"
    )
    group.add_argument("--method", choices=METHODS, default="portfolio", help="default: portfolio")
    group.add_argument("--effort", choices=EFFORTS, default="default", help="of method portfolio")
    group.add_argument("--max-moves", type=int, metavar="N", help="experts per layer that may move")
    group.add_argument(
        "--groups", type=int, metavar="N", help="expert groups kept on one node, method eplb only"
    )
    group.add_argument(
        "--expert-bytes",
        type=float,
        metavar="B",
        help="bytes of an expert: gamma from bytes, with --pick-bytes",
    )
    group.add_argument("--pick-bytes", type=float, metavar="B", help="bytes that one remote pick sends")
    group.add_argument(
        "--horizon", type=float, default=10.0, metavar="H", help="windows the placement lives (default 10)"
    )
    group.add_argument(
        "--bound-nodes",
        type=int,
        default=50,
        metavar="N",
        help="effort for the proof, per layer (default 50)",
    )


def read_file(path: Path) -> TrafficFile:
    """The traffic file, with a note on standard output when it has no sources."""
    file = read_traffic(path)
    if file.loads_only:
        print(f"{path}: {file.kind}: {NO_SOURCES}")
    return file


def topology_of(file: TrafficFile, arguments: argparse.Namespace) -> Topology:
    """Distances from the file if it has them, else a grid of --nodes with --ranks.

    Raises:
        InputError: ranks unknown or not divisible by nodes or sources.
    """
    sources = file.traffic.shape[1]
    if file.distance is not None:
        topology = _valid(Topology, file.distance)
        if topology.num_sources != sources:
            raise InputError(
                f"{file.path}: distance: {topology.num_sources} sources; valid: [{sources}, R], as traffic"
            )
        if arguments.ranks not in (None, topology.num_ranks):
            raise InputError(
                f"--ranks: {arguments.ranks}; valid: {topology.num_ranks}, as distance in {file.path}"
            )
        return topology
    ranks = arguments.ranks if arguments.ranks is not None else sources
    if arguments.ranks is None and sources == 1:
        raise InputError("--ranks: not given, and one source does not tell; valid: the number of EP ranks")
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"--ranks: {ranks}; valid: 1 to {MOST_RANKS}")
    if arguments.nodes < 1 or ranks % arguments.nodes:
        raise InputError(f"--nodes: {arguments.nodes}; valid: a divisor of {ranks} ranks")
    if file.loads_only:  # nobody knows where picks come from: all ranks are as near
        return Topology(np.zeros((1, ranks)))
    if ranks % sources:
        nearest = max(sources, round(ranks / sources) * sources)
        raise InputError(f"--ranks: {ranks} for {sources} sources; nearest valid: {nearest}")
    per_node = ranks // arguments.nodes
    return _valid(
        lambda: Topology.grid(
            nodes=arguments.nodes, gpus_per_node=per_node, sources=sources, far=arguments.far
        )
    )


def slots_per_rank_of(file: TrafficFile, ranks: int, spare: int | None) -> int:
    """Slots of a rank: those of the file's current placement, or the experts and --spare.

    Raises:
        InputError: slots that do not divide, or that differ from the current placement's.
    """
    experts = file.traffic.shape[2]
    now = None if file.current is None else file.current.shape[1]
    if spare is None:
        spare = 0 if now is None else now - experts
    if spare < 0:
        raise InputError(f"--spare: {spare}; valid: an integer >= 0")
    total = experts + spare
    if now is not None and now != total:
        raise InputError(f"--spare: {spare}; valid: {now - experts}, the current placement has {now} slots")
    if total % ranks:
        nearest = spare + -total % ranks
        raise InputError(
            f"--spare: {spare} gives {total} slots on {ranks} ranks; nearest valid: {nearest} spare slots "
            f"({experts + nearest} slots)"
        )
    return int(total // ranks)


def weights_of(file: TrafficFile, arguments: argparse.Namespace) -> Weights:
    """The weights of the cost; what is not given has its default.

    Raises:
        InputError: a weight that is not valid, or gamma twice.
    """
    default = Weights()
    alpha = default.alpha if arguments.alpha is None else arguments.alpha
    beta = default.beta if arguments.beta is None else arguments.beta
    size, pick = arguments.expert_bytes, arguments.pick_bytes
    if (size is None) != (pick is None):
        raise InputError("--expert-bytes and --pick-bytes: one of them; valid: both or none")
    if size is None:
        return _valid(Weights, alpha, beta, default.gamma if arguments.gamma is None else arguments.gamma)
    if arguments.gamma is not None:
        raise InputError("--gamma: given, and bytes too; valid: one of them")
    return _valid(
        lambda: Weights.for_expert(size, pick, arguments.horizon, file.traffic, alpha=alpha, beta=beta)
    )


def problem_of(file: TrafficFile, arguments: argparse.Namespace, weights: Weights) -> PlacementProblem:
    """The problem that the file and the arguments describe.

    Raises:
        InputError: what does not fit together, in the words of the option or of the file's array.
    """
    topology = topology_of(file, arguments)
    size = slots_per_rank_of(file, topology.num_ranks, getattr(arguments, "spare", 0))
    return _valid(lambda: PlacementProblem(file.traffic, topology, size, file.current, weights))


def solve(problem: PlacementProblem, arguments: argparse.Namespace) -> Placement:
    """The placement by --method; its costs are those of the problem's weights.

    Weights on the command line are for the cost. Method paper takes its own calibrated ones.

    Raises:
        InputError: limits that do not go with the method or the problem.
    """
    if arguments.groups is not None:
        if arguments.method != "eplb":
            raise InputError(f"--groups: with method {arguments.method}; valid with method eplb")
        return _valid(lambda: place_by_node(problem, nodes=arguments.nodes, groups=arguments.groups))
    asked = replace(problem, weights=None) if arguments.method == "paper" else problem
    found = _valid(
        lambda: place(asked, method=arguments.method, effort=arguments.effort, max_moves=arguments.max_moves)
    )
    return evaluate(problem, found.slots)


def bound_of(problem: PlacementProblem, arguments: argparse.Namespace) -> Any:
    """Lower bound on the cost of each layer, numpy [L].

    Raises:
        InputError: --bound-nodes is negative.
    """
    return _valid(lambda: lower_bound(problem, nodes=arguments.bound_nodes)).numpy()


def check_target(path: Path | None, option: str) -> None:
    """InputError unless a file can be written to `path`."""
    if path is None:
        return
    with writing(option, path):
        if path.is_dir():
            raise InputError(f"{option}: {path} is a folder; valid: a file")
        if not path.parent.is_dir():
            raise InputError(f"{option}: no folder {path.parent}; valid: a folder that is there")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Around the writing of a file: what goes wrong with it is bad input."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{option}: {path}: {error.strerror}; valid: a file that can be written") from None


def _valid(work: Callable[..., Result], *arguments: Any) -> Result:
    """The result of `work`, its ValueError as bad input."""
    try:
        return work(*arguments)
    except ValueError as error:
        raise InputError(str(error)) from None
