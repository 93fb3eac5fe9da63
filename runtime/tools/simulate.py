"""`gimbal simulate`: engine-choice policies and prefill deflection compared on simulated engines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError
from .sim_engines import EngineSettings
from .sim_pd import PdMeasured, PdSettings, prefill_rate, simulate_pd
from .sim_policies import POLICIES, Measured, build, measure, saturated_rate
from .sim_traffic import (
    Arrival,
    at_rate,
    generate,
    generate_disaggregated,
    in_sessions,
    load_azure,
    window,
)

ENGINES = (2, 4, 8, 16)
LOADS = (0.5, 0.8, 0.95)
SHAPES = ("2P2D", "3P1D", "1P3D")
AGE_LIMIT = 5.0
# deflect, look again at requests that wait, age limit of the prefill nodes' queues (0: arrival order)
DEFLECTION_MODES = {
    "none": (False, False, 0.0),
    "on arrival": (True, False, 0.0),
    "also while waiting": (True, True, 0.0),
    "none, shortest first": (False, False, AGE_LIMIT),
    "also while waiting, shortest first": (True, True, AGE_LIMIT),
}
# Smaller is better, except throughput.
COLUMNS = ("ttft_mean", "ttft_p99", "tpot_mean", "throughput")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to simulate.

    Attributes:
        engines: numbers of engines.
        loads: shares of the rate at which the engines are saturated.
        per_engine: requests per engine and run; a disaggregated run has six times as many.
        seeds: runs per row, averaged.
        clients: API servers.
        policies: names in `POLICIES`.
        trace: the Azure trace; None: its rows are skipped.
        sessions: requests are turns of sessions and engines cache prefixes.
        shapes: of disaggregated deployments, such as 2P2D.
    """

    engines: tuple[int, ...] = ENGINES
    loads: tuple[float, ...] = LOADS
    per_engine: int = 250
    seeds: int = 2
    clients: int = 1
    policies: tuple[str, ...] = tuple(POLICIES)
    trace: tuple[Arrival, ...] | None = None
    sessions: bool = False
    shapes: tuple[str, ...] = SHAPES

    @property
    def skipped(self) -> list[str]:
        """What is left out, and why."""
        return [] if self.trace is not None else ["azure: no trace given (--trace FILE)"]


def _mean(runs: Sequence[Any]) -> dict[str, float]:
    """Mean of every figure over the runs of one row."""
    rows = [asdict(run) for run in runs]
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def simulate_engines(plan: Plan) -> Iterator[dict[str, Any]]:
    """One row per traffic, number of engines, load and policy."""
    sources: dict[str, Callable[[int, int], list[Arrival]]] = {"generated": generate}
    if plan.trace is not None:
        trace = plan.trace
        sources["azure"] = lambda count, seed: window(trace, count, seed)
    settings = EngineSettings(prefix_cache=plan.sessions)
    for traffic, source in sources.items():
        for engines in plan.engines:
            for load in plan.loads:
                runs: dict[str, list[Measured]] = {name: [] for name in plan.policies}
                for seed in range(plan.seeds):
                    arrivals = source(plan.per_engine * engines, seed)
                    if plan.sessions:
                        arrivals = in_sessions(arrivals, seed)
                    arrivals = at_rate(arrivals, load * saturated_rate(arrivals, settings, engines))
                    for name in plan.policies:
                        cluster = build(POLICIES[name], settings, engines, plan.clients)
                        runs[name].append(measure(cluster, arrivals))
                for name in plan.policies:
                    yield {
                        "traffic": traffic,
                        "engines": engines,
                        "load": load,
                        "policy": name,
                        **_mean(runs[name]),
                    }


def simulate_deflection(plan: Plan) -> Iterator[dict[str, Any]]:
    """One row per deployment, load (share of what the prefill nodes can compute) and mode."""
    for shape in plan.shapes:
        prefills, decodes = shape_of(shape)
        for load in plan.loads:
            for mode, (deflect, reconsider, age_limit) in DEFLECTION_MODES.items():
                settings = PdSettings(
                    prefill_nodes=prefills,
                    decode_nodes=decodes,
                    reconsider=reconsider,
                    age_limit=age_limit,
                )
                runs: list[PdMeasured] = []
                for seed in range(plan.seeds):
                    arrivals = generate_disaggregated(6 * plan.per_engine, seed)
                    arrivals = at_rate(arrivals, load * prefill_rate(arrivals, settings))
                    runs.append(simulate_pd(settings, arrivals, deflect=deflect, seed=seed))
                yield {"shape": shape, "load": load, "deflection": mode, **_mean(runs)}


def shape_of(text: str) -> tuple[int, int]:
    """Prefill and decode nodes of a shape such as 2P2D.

    Raises:
        InputError: not such a shape.
    """
    parts = text.upper().removesuffix("D").split("P")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"--shapes: {text!r}; valid: such as 2P2D")
    return int(parts[0]), int(parts[1])


def verdict(rows: Sequence[dict[str, Any]], policy: str = "gimbal") -> list[dict[str, Any]]:
    """How `policy` compares, per traffic, number of engines and load.

    `over_best`: its mean TTFT over that of the best policy without a part of this project (`best`); `last_in`: the
    columns in which it is behind all of those, by more than 0.5 %, which is below the spread between seeds.
    """
    others = [name for name, entry in POLICIES.items() if not entry.ours and entry.age_limit is None]
    found = []
    for key in dict.fromkeys((row["traffic"], row["engines"], row["load"]) for row in rows):
        group = {r["policy"]: r for r in rows if (r["traffic"], r["engines"], r["load"]) == key}
        compared = [name for name in others if name in group]
        if policy not in group or not compared:
            continue
        own = group[policy]
        best = min(compared, key=lambda name: group[name]["ttft_mean"])
        last = [
            column
            for column in COLUMNS
            if all(_worse(own[column], group[name][column], column == "throughput") for name in compared)
        ]
        over_best = own["ttft_mean"] / group[best]["ttft_mean"]
        found.append(
            {
                **dict(zip(("traffic", "engines", "load"), key, strict=True)),
                "over_best": over_best,
                "best": best,
                "last_in": last,
            }
        )
    return found


def _worse(own: float, other: float, more_is_better: bool) -> bool:
    return own * 1.005 < other if more_is_better else own > other * 1.005


def _print_engines(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'traffic':10} {'eng':>3} {'load':>5}  {'policy':24} {'TTFT ms':>8} {'P99 ms':>8}", end="")
    print(f" {'TPOT ms':>8} {'req/s':>7} {'running':>8}")
    previous = None
    for row in rows:
        key = (row["traffic"], row["engines"], row["load"])
        if key != previous and previous is not None:
            print()
        previous = key
        print(
            f"{row['traffic']:10} {row['engines']:3d} {row['load']:5.2f}  {row['policy']:24}"
            f" {1e3 * row['ttft_mean']:8.1f} {1e3 * row['ttft_p99']:8.0f} {1e3 * row['tpot_mean']:8.2f}"
            f" {row['throughput']:7.2f} {row['running']:8.1f}"
        )
    print()
    for entry in verdict(rows):
        last = f"; last in {', '.join(entry['last_in'])}" if entry["last_in"] else ""
        print(
            f"{entry['traffic']:10} {entry['engines']:3d} {entry['load']:5.2f}  mean TTFT of gimbal over the best"
            f" other, {entry['best']}: {entry['over_best']:.3f}{last}"
        )


def _print_deflection(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'nodes':6} {'load':>5}  {'deflection':34} {'P95 s':>7} {'P99 s':>7} {'mean s':>7} {'queue':>7}",
        end="",
    )
    print(f" {'prefill':>7} {'transf.':>7} {'in SLO':>7} {'late tok':>8} {'defl.':>6} {'P95 change':>10}")
    without = 1.0
    for row in rows:
        if row["deflection"] == "none":
            without = row["ttft_p95"]
        print(
            f"{row['shape']:6} {row['load']:5.2f}  {row['deflection']:34} {row['ttft_p95']:7.3f}"
            f" {row['ttft_p99']:7.3f} {row['ttft_mean']:7.3f} {row['queueing']:7.3f}"
            f" {row['prefill']:7.3f} {row['transfer']:7.3f}"
            f" {row['attainment']:7.3f} {row['late_tokens']:8.4f} {row['deflected']:6.2f}"
            f" {100 * (row['ttft_p95'] / without - 1):+9.1f}%"
        )


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "simulate",
        help="compare engine choices and prefill deflection on simulated engines",
        description="Compares engine choices and queue orders, and prefill deflection, on simulated engines.",
    )
    parser.add_argument("--only", choices=("engines", "deflection"), help="one of the two tables")
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES), metavar="N")
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS), metavar="SHARE")
    parser.add_argument("--requests", type=int, default=250, help="per engine (default 250)")
    parser.add_argument("--seeds", type=int, default=2, help="runs per row, averaged (default 2)")
    parser.add_argument("--clients", type=int, default=1, help="API servers (default 1)")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME", help="default: all")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Azure LLM inference trace (CSV)")
    parser.add_argument("--sessions", action="store_true", help="turns of sessions, with prefix caching")
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), metavar="nPmD", help="disaggregated nodes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.set_defaults(run=run)


def plan_from(arguments: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for.

    Raises:
        InputError: an argument that is not valid.
        FileNotFoundError: there is no such trace.
    """
    for name, low in (("requests", 10), ("seeds", 1), ("clients", 1)):
        if getattr(arguments, name) < low:
            raise InputError(f"--{name}: {getattr(arguments, name)}; valid: an integer >= {low}")
    if any(count < 1 for count in arguments.engines):
        raise InputError(f"--engines: {arguments.engines}; valid: integers >= 1")
    if any(not 0.0 < load <= 2.0 for load in arguments.loads):
        raise InputError(f"--loads: {arguments.loads}; valid: above 0 and at most 2")
    unknown = [name for name in arguments.policies if name not in POLICIES]
    if unknown:
        raise InputError(f"--policies: {unknown[0]!r}; valid: {', '.join(POLICIES)}")
    for shape in arguments.shapes:
        shape_of(shape)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise InputError(f"--json: no folder {arguments.json.parent}; valid: a folder that is there")
    if arguments.json is not None and arguments.json.is_dir():
        raise InputError(f"--json: {arguments.json} is a folder; valid: a file")
    return Plan(
        engines=tuple(arguments.engines),
        loads=tuple(arguments.loads),
        per_engine=arguments.requests,
        seeds=arguments.seeds,
        clients=arguments.clients,
        policies=tuple(arguments.policies),
        trace=_load_trace(arguments.trace),
        sessions=arguments.sessions,
        shapes=tuple(arguments.shapes),
    )


def _load_trace(path: Path | None) -> tuple[Arrival, ...] | None:
    if path is None:
        return None
    try:
        return tuple(load_azure(path))
    except (ValueError, OSError) as error:
        raise InputError(f"--trace: {error}") from error


def run(arguments: argparse.Namespace) -> int:
    """Runs the sub-command; 0."""
    plan = plan_from(arguments)
    result: dict[str, Any] = {"skipped": plan.skipped if arguments.only != "deflection" else []}
    for line in result["skipped"]:
        print(f"skipped: {line}", file=sys.stderr)
    if arguments.only != "deflection":
        rows = list(_counted(simulate_engines(plan)))
        result["engines"], result["verdict"] = rows, verdict(rows)
        _print_engines(rows)
    if arguments.only != "engines":
        rows = list(_counted(simulate_deflection(plan)))
        result["deflection"] = rows
        if "engines" in result:
            print()
        _print_deflection(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _counted(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Progress on a terminal."""
    for number, row in enumerate(rows, start=1):
        if sys.stderr.isatty():
            print(f"\r{number} rows", end="", file=sys.stderr, flush=True)
        yield row
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
