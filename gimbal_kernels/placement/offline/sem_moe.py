"""Baseline Sem-MoE (arXiv 2503.04398): experts placed with the requests that pick them, and its oracle replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...topology import Topology
from ..checks import check_number, check_slots
from ..reference import pack_evenly, slots_in_ranks
from .highs import INFINITY, Program, assignment_columns
from .profile import check_count, check_request_picks

# Cost of a load above the limit, per mean load: more than any share of remote picks could repay.
OVERLOAD = 10.0


@dataclass(frozen=True, eq=False)
class CoLocation:
    """slots: int32 [L, P], expert of each slot. engines: int64 [N], source of each request of the profile.

    remote: mean distance of a pick under both, after each round; it never rises.
    """

    slots: Any
    engines: Any
    remote: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Replay:
    """engines: int64 [N], source chosen for each request. traffic: float64 [L, S, E], the picks that result."""

    engines: Any
    traffic: Any


def sem_moe(
    picks: Any,
    topology: Topology,
    slots_per_rank: int,
    *,
    slack: float = 0.05,
    rounds: int = 6,
    time_limit: float = 10.0,
    gap: float = 1e-3,
) -> CoLocation:
    """Requests of a profile in clusters, one per source, and each expert near the clusters that pick it.

    The offline half of Sem-MoE: a 0-1 program over the clusters of requests and of experts that minimises remote
    picks under balance. As a whole it has products of variables; here the two halves are solved in turn, each as an
    integer program, from clusters around requests that differ most. Loads above (1 + slack) times the mean of
    ranks or engines are charged heavily, not forbidden: a single expert can be heavier.

    Args:
        picks: [N, L, E] of each profiled request, see `profile.request_picks`.
        topology: distances of the S sources to the R ranks.
        slots_per_rank: C with R*C = E.
        slack: what ranks and engines may have above their mean load.
        rounds: turns at most; it stops when nothing improves.
        time_limit: seconds per integer program.
        gap: relative gap at which a program counts as solved.

    Raises:
        ValueError: picks that are no [N, L, E] counts, slots that do not fit the experts, or numbers out of range.
    """
    counts = check_request_picks(picks, "picks")
    experts = counts.shape[2]
    if topology.num_ranks * slots_per_rank != experts:
        raise ValueError(
            f"slots_per_rank: {slots_per_rank} on {topology.num_ranks} ranks for {experts} experts; "
            "valid here: one slot per expert"
        )
    check_count(rounds, "rounds")
    for name, value in (("slack", slack), ("time_limit", time_limit), ("gap", gap)):
        check_number(value, name)
    limits = {"slack": slack, "time_limit": time_limit, "gap": gap}
    engines = _first_clusters(counts, topology.num_sources, limits)
    best: CoLocation | None = None
    remote: list[float] = []
    for _ in range(rounds):
        traffic = traffic_by_engine(counts, engines, topology.num_sources)
        slots = np.stack([_place_layer(layer, topology, slots_per_rank, limits) for layer in traffic])
        cost = _request_costs(counts, slots, topology)
        engines = _assign(cost, counts.sum(axis=(1, 2)), np.zeros(topology.num_sources), limits)
        share = float(cost[np.arange(len(cost)), engines].sum() / max(counts.sum(), 1e-300))
        if best is not None and share >= best.remote[-1] - 1e-12:
            break
        remote.append(share)
        best = CoLocation(slots, engines, tuple(remote))
    assert best is not None
    return best


def oracle_replay(
    picks: Any, slots: Any, topology: Topology, *, batch: int = 64, slack: float = 0.05, gap: float = 1e-3
) -> Replay:
    """Each request to the engine nearest to the experts that it will pick, engines kept level.

    The oracle of Sem-MoE's online half: what its predictor estimates, the picks of a request, is known here
    exactly. Requests come in order, `batch` at a time; each batch is one integer program: least remote picks,
    engines at most `slack` above their mean of all picks so far (charged heavily, not forbidden).

    Args:
        picks: [N, L, E] of each request, in order of arrival.
        slots: [L, P] placement; copies serve the nearest sources.
        topology: distances of the S sources to the R ranks; P is a multiple of R.

    Raises:
        ValueError: picks that are no [N, L, E] counts, slots that do not fit, or numbers out of range.
    """
    counts = check_request_picks(picks, "picks")
    check_count(batch, "batch")
    for name, value in (("slack", slack), ("gap", gap)):
        check_number(value, name)
    total = np.shape(slots)[-1] if np.ndim(slots) == 2 else 0
    if total == 0 or total % topology.num_ranks:
        raise ValueError(
            f"slots: shape {np.shape(slots)}; valid: [{counts.shape[1]}, P], P a multiple of "
            f"{topology.num_ranks} ranks"
        )
    placed = check_slots(
        slots,
        "slots",
        layers=counts.shape[1],
        experts=counts.shape[2],
        ranks=topology.num_ranks,
        slots_per_rank=total // topology.num_ranks,
    )
    cost, work = _request_costs(counts, placed, topology), counts.sum(axis=(1, 2))
    engines: Any = np.empty(len(counts), dtype=np.int64)
    busy: Any = np.zeros(topology.num_sources)
    limits = {"slack": slack, "time_limit": 10.0, "gap": gap}
    for first in range(0, len(counts), batch):
        part = slice(first, first + batch)
        engines[part] = _assign(cost[part], work[part], busy, limits)
        busy = busy + np.bincount(engines[part], weights=work[part], minlength=len(busy))
    return Replay(engines, traffic_by_engine(counts, engines, topology.num_sources))


def traffic_by_engine(picks: Any, engines: Any, sources: int) -> Any:
    """[L, S, E] picks when request n enters at source engines[n]; picks: [N, L, E]."""
    chosen = np.arange(sources)[:, None] == np.asarray(engines)
    by_source = np.tensordot(chosen.astype(np.float64), picks, axes=(1, 0))
    return np.ascontiguousarray(by_source.transpose(1, 0, 2))


def _request_costs(counts: Any, slots: Any, topology: Topology) -> Any:
    """Sum of picks * distance of each request at each source, [N, S]; each pick by the nearest copy."""
    distance = topology.distance
    rank = np.arange(slots.shape[1]) // (slots.shape[1] // topology.num_ranks)
    cost: Any = np.zeros((len(counts), topology.num_sources))
    for layer, experts in enumerate(slots):
        near: Any = np.full((topology.num_sources, counts.shape[2]), np.inf)
        for slot, expert in enumerate(experts):
            near[:, expert] = np.minimum(near[:, expert], distance[:, rank[slot]])
        cost += counts[:, layer] @ near.T
    return cost


def _first_clusters(counts: Any, sources: int, limits: dict[str, float]) -> Any:
    """Clusters around requests that are far apart: the largest request, then each time the farthest from all."""
    share = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1e-300)
    flat = share.reshape(len(share), -1)
    work = counts.sum(axis=(1, 2))
    centres = [int(work.argmax())]
    apart = np.abs(flat - flat[centres[0]]).sum(axis=1)
    for _ in range(1, sources):
        centres.append(int((apart * work).argmax()))
        apart = np.minimum(apart, np.abs(flat - flat[centres[-1]]).sum(axis=1))
    cost = np.stack([np.abs(flat - flat[centre]).sum(axis=1) * work for centre in centres], axis=1)
    return _assign(cost, work, np.zeros(sources), limits)


def _place_layer(traffic: Any, topology: Topology, size: int, limits: dict[str, float]) -> Any:
    """Slots [P] of one layer: least remote picks from its sources, ranks level; traffic: [S, E]."""
    total = max(float(traffic.sum()), 1e-300)
    load = traffic.sum(axis=0) * topology.num_ranks / total
    cost = topology.distance.T @ traffic / total
    program = Program()
    chosen = assignment_columns(program, cost, size)
    over = program.add_columns(np.full(len(cost), OVERLOAD), low=0.0, high=INFINITY)
    for rank in range(len(cost)):
        row = np.append(chosen[rank], over[rank])
        program.add_row(row, np.append(load, -1.0), -INFINITY, 1.0 + limits["slack"])
    packed = pack_evenly(load, topology.num_ranks, size)
    start = np.zeros(program.num_columns)
    for rank, experts in enumerate(packed):
        start[chosen[rank, sorted(experts)]] = 1.0
        start[over[rank]] = max(0.0, load[sorted(experts)].sum() - 1.0 - limits["slack"])
    found = program.solve(time_limit=limits["time_limit"], gap=limits["gap"], start=start)
    if found.values is not None:
        home = found.values[chosen].argmax(axis=0)
        packed = [set(np.flatnonzero(home == rank).tolist()) for rank in range(topology.num_ranks)]
    return slots_in_ranks(packed, None, size)


def _assign(cost: Any, work: Any, busy: Any, limits: dict[str, float]) -> Any:
    """Engine of each request [N]: least total cost, engines level; cost: [N, S], work: [N], busy: [S] so far."""
    requests, engines = cost.shape
    mean = max(float(work.sum() + busy.sum()) / engines, 1e-300)
    scale = max(float(work.sum()), 1e-300)
    program = Program()
    chosen = program.add_columns(cost / scale, low=0.0, high=1.0, integer=True)
    over = program.add_columns(np.full(engines, OVERLOAD), low=0.0, high=INFINITY)
    for request in range(requests):
        program.add_row(chosen[request], 1.0, 1.0, 1.0)
    for engine in range(engines):
        row = np.append(chosen[:, engine], over[engine])
        limit = 1.0 + limits["slack"] - busy[engine] / mean
        program.add_row(row, np.append(work / mean, -1.0), -INFINITY, limit)
    found = program.solve(time_limit=limits["time_limit"], gap=limits["gap"])
    if found.values is None:
        raise RuntimeError("no assignment of requests to engines within the time limit")
    return found.values[chosen].argmax(axis=1)
