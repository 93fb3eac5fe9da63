"""What a slot map costs under a problem's traffic (SPEC sections 3.2 and 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .._arrays import to_host
from ..counting.replica_tables import check_shares
from .checks import EMPTY_BELOW, check_traffic
from .problem import Placement, PlacementProblem, Weights

# A window that is one window older counts 0.8 times as much.
AGE_DECAY = 0.8


def evaluate(problem: PlacementProblem, slots: Any, *, shares: Any = None) -> Placement:
    """The cost of a slot map, per layer.

    Picks of (source, expert) are served by the nearest copies of the expert, evenly split among copies that
    are equally near. With T picks in the layer, rank loads `load` and their mean `mu`:

    - comm = (1/T) * sum of picks * distance, in remote picks per pick
    - imbalance = (1/R) * sum over ranks of (load/mu - 1)^2
    - max_over_mean = max(load)/mu
    - moves = (rank, expert) pairs that are new; a second copy on a rank that has one costs no transfer and is
      not counted. 0 without a current placement.
    - cost = alpha*comm + beta*(weighted imbalance + drift term) + gamma*moves/E. Without history the weighted
      imbalance is the imbalance. With it, it is the mean over this and the earlier windows by
      `window_weights`; an earlier window's picks of an expert go to its copies in the shares of this window,
      or evenly to its slots when this window has no picks of it. The drift term is `drift_term`, 0 when the
      problem's drift is 0.

    A layer without traffic has comm 0, imbalance 0 and max_over_mean 1.

    Args:
        problem: traffic, topology, current placement and weights (`Weights()` when the problem has none).
        slots: [L, P] integers; every expert needs at least one slot.
        shares: [L, S, P] real numbers >= 0, what part of the picks of source s to the expert in slot p goes there
            (`water_fill`); scaled to a sum of 1 per source and expert. None: the nearest copies, evenly.

    Raises:
        ValueError: wrong shape or dtype, experts out of range or without a slot; shares that are negative, not
            finite, or 0 for all copies of an expert.
    """
    slots = problem.check_slots(slots, "slots")
    if shares is None:
        comm_sum, rank_load = serve_from_nearest(problem, slots)
    else:
        shares = check_shares(shares, slots, problem.num_sources, problem.num_experts)
        comm_sum, rank_load = serve_by_shares(problem, slots, shares)
    total = rank_load.sum(axis=1)
    empty = total < EMPTY_BELOW
    safe_total = np.where(empty, 1.0, total)
    relative = np.where(empty[:, None], 1.0, rank_load * problem.num_ranks / safe_total[:, None])
    comm = np.where(empty, 0.0, comm_sum / safe_total)
    imbalance = np.mean((relative - 1.0) ** 2, axis=1)
    moves = count_moves(problem, slots)
    weights = problem.weights_for(Weights())
    uneven = imbalance
    if problem.history or problem.drift > 0:
        by_expert = load_by_expert(problem, slots, shares)
        uneven = weighted_imbalance(problem, slots, by_expert) + drift_term(problem, by_expert)
    cost = weights.alpha * comm + weights.beta * uneven + weights.gamma * moves / problem.num_experts
    return Placement(
        slots=torch.from_numpy(slots),
        cost=torch.from_numpy(cost),
        comm=torch.from_numpy(comm),
        imbalance=torch.from_numpy(imbalance),
        max_over_mean=torch.from_numpy(relative.max(axis=1)),
        moves=torch.from_numpy(moves),
    )


def serve_from_nearest(problem: PlacementProblem, slots: Any) -> tuple[Any, Any]:
    """Sum of picks * distance [L] and picks served by each rank [L, R], each pick by its nearest copies."""
    layers, experts, ranks = problem.num_layers, problem.num_experts, problem.num_ranks
    # All copies of all layers in one row, those of one (layer, expert) side by side: each has at least one.
    pair = (np.arange(layers)[:, None] * experts + slots).ravel()
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    first_copy = np.searchsorted(pair, np.arange(layers * experts))
    layer, slot = np.divmod(order, problem.num_slots)
    rank = slot // problem.slots_per_rank
    cell = layer * ranks + rank
    comm = np.zeros(layers)
    rank_load = np.zeros(layers * ranks)
    for source in range(problem.num_sources):
        picks = problem.traffic[:, source].ravel()
        distance = problem.topology.distance[source, rank]
        nearest = np.minimum.reduceat(distance, first_copy)
        serves = distance == nearest[pair]
        servers = np.add.reduceat(serves, first_copy, dtype=np.int64)
        rank_load += np.bincount(cell, weights=(picks / servers)[pair] * serves, minlength=layers * ranks)
        comm += (picks * nearest).reshape(layers, experts).sum(axis=1)
    return comm, rank_load.reshape(layers, ranks)


def serve_by_shares(problem: PlacementProblem, slots: Any, shares: Any) -> tuple[Any, Any]:
    """As `serve_from_nearest`, the picks of each (source, expert) by `shares` [L, S, P] of its slots."""
    layers, ranks, size = problem.num_layers, problem.num_ranks, problem.slots_per_rank
    comm, rank_load = np.zeros(layers), np.zeros((layers, ranks))
    for source in range(problem.num_sources):
        picks = np.take_along_axis(problem.traffic[:, source], slots, axis=1) * shares[:, source]
        by_rank = picks.reshape(layers, ranks, size).sum(axis=2)
        rank_load += by_rank
        comm += by_rank @ problem.topology.distance[source]
    return comm, rank_load


def window_weights(count: int) -> Any:
    """Weights of `count` windows, the newest first: in proportion to 0.8^age, summing to 1 (SPEC section 3.2)."""
    weight = AGE_DECAY ** np.arange(count)
    return weight / weight.sum()


def windows_with_picks(problem: PlacementProblem, layer: int) -> tuple[Any, Any, Any] | None:
    """Loads [K, E], totals [K] and weights [K] (summing to 1) of a layer's windows that saw picks, this one first.

    None without picks in this window. Sums run one after another, as in the compiled solvers.
    """
    loads = problem.window_loads()[:, layer]
    totals = np.add.accumulate(loads, axis=1)[:, -1]
    if totals[0] < EMPTY_BELOW:
        return None
    kept = totals >= EMPTY_BELOW
    weight = window_weights(len(kept))[kept]
    return loads[kept], totals[kept], weight / np.add.accumulate(weight)[-1]


def load_by_expert(problem: PlacementProblem, slots: Any, shares: Any = None) -> Any:
    """Picks of each expert that each rank serves, float64 [L, E, R]: by `shares`, or the nearest copies evenly."""
    rank: Any = np.arange(problem.num_slots) // problem.slots_per_rank
    row = np.arange(problem.num_layers)[:, None]
    copies = count_copies(problem, slots)
    load = np.zeros_like(copies)
    for source in range(problem.num_sources):
        picks = problem.traffic[:, source]
        if shares is not None:
            np.add.at(load, (row, slots, rank), np.take_along_axis(picks, slots, axis=1) * shares[:, source])
            continue
        distance = np.where(copies > 0, problem.topology.distance[source], np.inf)
        serves = copies * (distance == distance.min(axis=2, keepdims=True))
        load += picks[:, :, None] * serves / serves.sum(axis=2, keepdims=True)
    return load


def count_copies(problem: PlacementProblem, slots: Any) -> Any:
    """Slots of each expert on each rank, float64 [L, E, R]."""
    rank: Any = np.arange(problem.num_slots) // problem.slots_per_rank
    copies = np.zeros((problem.num_layers, problem.num_experts, problem.num_ranks))
    np.add.at(copies, (np.arange(problem.num_layers)[:, None], slots, rank), 1.0)
    return copies


def weighted_imbalance(problem: PlacementProblem, slots: Any, by_expert: Any) -> Any:
    """Mean over the windows of (1/R) * sum over ranks of (load/mu - 1)^2, [L]; empty windows do not count.

    An expert without picks in this window has its earlier picks split evenly over its own slots: they are served
    where it lives, and no slot is known to serve more than another. by_expert: [L, E, R] picks of this window.
    """
    served = by_expert.sum(axis=2, keepdims=True)
    copies = count_copies(problem, slots)
    share = copies / copies.sum(axis=2, keepdims=True)
    np.divide(by_expert, served, out=share, where=served > 0)
    loads = problem.window_loads()
    weight = window_weights(len(loads))[:, None] * (loads.sum(axis=2) >= EMPTY_BELOW)
    weight = weight / np.maximum(weight.sum(axis=0), 1e-300)
    total = np.zeros(problem.num_layers)
    for window, share_of_window in zip(loads, weight, strict=True):
        rank_load = (window[:, :, None] * share).sum(axis=1)
        mean = rank_load.mean(axis=1, keepdims=True)
        relative = np.divide(rank_load, mean, out=np.ones_like(rank_load), where=mean > 0)
        total += share_of_window * np.mean((relative - 1.0) ** 2, axis=1)
    return total


def drift_term(problem: PlacementProblem, by_expert: Any) -> Any:
    """Imbalance that a relative drift of sigma per expert is expected to add, [L] (SPEC section 4).

    sigma^2/(R*mu^2) * sum over experts of [sum over ranks of l_er^2 - w_e^2/R], with l_er the picks of expert e
    that rank r serves and w_e all of them: what drifts on many ranks at once drifts on each by less.
    """
    served = by_expert.sum(axis=2)
    mean = served.sum(axis=1) / problem.num_ranks
    spread = (by_expert**2).sum(axis=(1, 2)) - (served**2).sum(axis=1) / problem.num_ranks
    scale = problem.num_ranks * mean**2
    return problem.drift**2 * np.divide(spread, scale, out=np.zeros_like(scale), where=scale > 0)


def measure_drift(previous: Any, traffic: Any) -> float:
    """sigma: how much an expert's share of the picks changes from one window to the next, relative to itself.

    Root mean square over layers and experts, each weighted by its load, of the change of the share of a layer's
    picks over the mean of the two shares. Windows: [L, S, E] picks, or [L, E] loads. 0 without picks.

    Raises:
        ValueError: windows of different layers or experts, or that are no picks.
    """
    share = []
    for value, name in ((previous, "previous"), (traffic, "traffic")):
        picks = to_host(value, name)
        picks = check_traffic(picks[:, None] if picks.ndim == 2 else picks, name)
        loads = np.asarray(picks, dtype=np.float64).sum(axis=1)
        total = loads.sum(axis=1, keepdims=True)
        share.append(np.divide(loads, total, out=np.zeros_like(loads), where=total > 0))
    if share[0].shape != share[1].shape:
        raise ValueError(f"traffic: [layers, experts] {share[1].shape}; valid: {share[0].shape}, as previous")
    mean = (share[0] + share[1]) / 2
    both = (share[0].sum(axis=1) > 0) & (share[1].sum(axis=1) > 0)
    change = np.divide((share[1] - share[0]) ** 2, mean, out=np.zeros_like(mean), where=mean > 0)
    return float(np.sqrt(change[both].sum() / both.sum())) if both.any() else 0.0


def count_moves(problem: PlacementProblem, slots: Any) -> Any:
    """Copies that are new on their rank, int64 [L]."""
    layers, experts = problem.num_layers, problem.num_experts
    if problem.current is None:
        return np.zeros(layers, dtype=np.int64)
    rank: Any = np.arange(problem.num_slots) // problem.slots_per_rank
    row = np.arange(layers)[:, None]
    holds: Any = np.zeros((2, layers, problem.num_ranks, experts), dtype=bool)
    holds[0, row, rank, problem.current] = True
    holds[1, row, rank, slots] = True
    return (holds[1] & ~holds[0]).sum(axis=(1, 2)).astype(np.int64)
