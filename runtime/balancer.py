"""The placement half of the loop, free of any serving engine: a window's traffic in, slots and figures out."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gimbal_kernels.migration import plan_migration
from gimbal_kernels.placement import (
    CALIBRATED,
    PlacementProblem,
    ShrinkState,
    Weights,
    evaluate,
    measure_drift,
    place,
    shrink,
)
from gimbal_kernels.placement.objective import window_weights
from gimbal_kernels.topology import Topology

from .break_even import BreakEven, ServingCosts, break_even, layer_seconds
from .config import GimbalConfig
from .service import max_over_mean, nearest_shares, served

HISTORY = 6
"""Earlier windows whose loads enter the imbalance term (SPEC section 3.2)."""
SMALL_WINDOW = 0.1
"""A window with less than this share of the picks of the fullest recent one is chance: nothing moves by it."""
SKEW_MEMORY = 0.98
"""What confirms skew is summed over windows, each weighted this much of the one after it: where few topics make up
the traffic, single windows agree by chance."""
QUANTUM = 2.0**-10
"""Picks that a placement is computed from are multiples of this. Float sums may differ by an ulp between kinds of
processors; rounded, they are the same bytes on every rank."""


@dataclass(frozen=True)
class ExpertBytes:
    """What the model's experts and activations weigh.

    per_expert: bytes of all per-expert tensors of one expert in one layer.
    per_pick: bytes that one remote pick sends, dispatch and combine together: hidden size * bytes per value * 2.
    """

    per_expert: int
    per_pick: int


@dataclass(frozen=True)
class WindowFigures:
    """One closed window under the slots that were in force.

    remote_pick_share: share of picks served off their source's own ranks, 0 to 1.
    max_over_mean: fullest rank over the mean rank, averaged over the layers that saw picks; 1 is balanced.
    picks: routed picks in the window.
    """

    remote_pick_share: float
    max_over_mean: float
    picks: int


@dataclass(frozen=True, eq=False)
class Decision:
    """What a balancer came to after a window.

    slots: int32 [L, P] for the next window; the current ones unless `reason` is "placed".
    reason: "placed"; "unchanged": the method found nothing better; "does not pay": a better placement would not
        earn back its bytes (`verdict`); "no traffic"; "little traffic": too few picks to tell skew from chance.
    moved: copies that the method asked for, whether or not they are made.
    problem: what was solved, in the weights of the objective J, for the certificate; None where nothing was.
    verdict: both sides of the break-even rule; None where it was not asked or something that it needs is unknown.
    """

    slots: Any
    reason: str
    moved: int = 0
    problem: PlacementProblem | None = None
    verdict: BreakEven | None = None


class Balancer:
    """Places one model's experts window by window.

    Args:
        config: method, weights and limits.
        topology: distances from the DP sources to the EP ranks.
        slots_per_rank: C.
        expert_bytes: of the model.

    Every rank of a serving group runs its own Balancer on the same reduced traffic and must come to the same
    bytes: nothing in here depends on time, on threads or on chance. What is kept from window to window follows
    from the windows alone, so two balancers of one `lineage` decide alike.
    """

    def __init__(
        self, config: GimbalConfig, topology: Topology, slots_per_rank: int, expert_bytes: ExpertBytes
    ) -> None:
        self.config = config
        self.topology = topology
        self.slots_per_rank = slots_per_rank
        self.expert_bytes = expert_bytes
        self.costs = ServingCosts(
            bytes_per_pick=expert_bytes.per_pick,
            bandwidth=None if config.bandwidth is None else config.bandwidth * 1e9,
            seconds_per_pick=None if config.pick_time is None else config.pick_time * 1e-6,
        )
        self.forget()

    def forget(self) -> None:
        """Back to the state before the first window: all ranks do so when they no longer agree."""
        self.lineage = 0
        """Checksum over all windows since the last `forget`."""
        self._loads: deque[Any] = deque(maxlen=HISTORY)  # [L, E], the newest first
        self._picks: deque[int] = deque(maxlen=HISTORY)
        self._changes: deque[float] = deque(maxlen=HISTORY)  # squared relative drift
        self._skew: ShrinkState | None = None

    @property
    def rho(self) -> float:
        """Share of the last window's skew between sources that was kept, 0 (chance) to 1 (SPEC section 3.2)."""
        return 0.0 if self._skew is None else self._skew.rho

    @property
    def drift(self) -> float:
        """Relative change of an expert's load between windows, root mean square over those kept; 0 before two."""
        return float(np.float32(np.sqrt(np.mean(self._changes)))) if self._changes else 0.0

    def decide(self, traffic: Any, slots: Any) -> Decision:
        """After a window: traffic [L, S, E] picks, slots [L, P] in force."""
        traffic = np.ascontiguousarray(traffic)
        slots = np.asarray(slots, dtype=np.int32)
        self.lineage = zlib.crc32(traffic.tobytes(), self.lineage)
        picks = int(traffic.sum())
        if picks == 0:
            return Decision(slots, "no traffic")
        fullest = max(self._picks, default=0)
        self._picks.appendleft(picks)
        if picks < SMALL_WINDOW * fullest:
            return Decision(slots, "little traffic")
        problem = self._problem(traffic, slots)
        return self._judge(problem, self._solve(problem))

    def measure(self, traffic: Any, slots: Any, shares: Any = None) -> WindowFigures:
        """Figures of a window.

        Args:
            traffic: [L, S, E] picks.
            slots: [L, P] in force.
            shares: [L, S, P], which part of source s's picks of the expert in slot p that copy serves. None: the
                nearest copies, evenly.
        """
        traffic, slots = np.asarray(traffic, dtype=np.float64), np.asarray(slots)
        if shares is None:
            shares = nearest_shares(slots, self.topology, traffic.shape[2])
        picks = served(traffic, slots, shares)
        rank: Any = np.arange(slots.shape[1]) // self.slots_per_rank
        remote = float((picks * (self.topology.distance[:, rank] > 0)).sum())
        load = picks.sum(axis=1).reshape(len(slots), self.topology.num_ranks, -1).sum(axis=2)
        total = float(load.sum())
        if total <= 0:
            return WindowFigures(0.0, 1.0, 0)
        load = load[load.sum(axis=1) > 0]
        fullest = float((load.max(axis=1) / load.mean(axis=1)).mean())
        return WindowFigures(remote / total, fullest, int(traffic.sum()))

    def problem_for(self, traffic: Any, slots: Any) -> PlacementProblem:
        """A window by itself, in the weights of the objective J: what a placement of another's is judged by."""
        traffic = np.asarray(traffic)
        return PlacementProblem(
            traffic, self.topology, self.slots_per_rank, current=slots, weights=self._weights(traffic)
        )

    def _problem(self, traffic: Any, slots: Any) -> PlacementProblem:
        """What to solve: the confirmed part of the skew, earlier loads, drift; then takes the window in."""
        loads = traffic.sum(axis=1)
        if self._loads:
            self._changes.appendleft(measure_drift(self._loads[0], loads) ** 2)
        confirmed, self._skew = shrink(traffic, self._skew, memory=SKEW_MEMORY)
        history = tuple(self._loads)
        self._loads.appendleft(loads)
        return PlacementProblem(
            np.rint(confirmed.numpy() / QUANTUM) * QUANTUM,
            self.topology,
            self.slots_per_rank,
            current=slots,
            weights=self._weights(traffic),
            history=history,
            drift=self.drift,
        )

    def _weights(self, traffic: Any) -> Weights:
        """Weights of the objective J (SPEC section 3.2); gamma from the experts' bytes.

        Layers without traffic place nothing, so they do not count in the mean load that a move is priced by.
        """
        weights = Weights.for_expert(
            self.expert_bytes.per_expert,
            self.expert_bytes.per_pick,
            self.config.horizon,
            traffic[traffic.sum(axis=(1, 2)) > 0],
        )
        return weights if self.config.method == "paper" else self._as_given(weights)

    def _as_given(self, base: Weights) -> Weights:
        """Weights that the settings name, the others from `base`."""
        given = {name: getattr(self.config, name) for name in ("alpha", "beta", "gamma")}
        return Weights(**{name: getattr(base, name) if v is None else v for name, v in given.items()})

    def _solve(self, problem: PlacementProblem) -> Any:
        method = self.config.method
        if method == "paper":  # its score has units of its own
            problem = replace(problem, weights=self._as_given(CALIBRATED))
        max_moves = self.config.max_moves if method == "portfolio" else None
        return place(problem, method=method, max_moves=max_moves).slots.numpy()

    def _judge(self, problem: PlacementProblem, found: Any) -> Decision:
        """Applies the break-even rule where its inputs are known; else the method's answer stands."""
        current = problem.current
        plan = plan_migration(current, found, self.topology, bytes_per_expert=self.expert_bytes.per_expert)
        moved = len(plan.transfers)
        if moved == 0:
            return Decision(current, "unchanged", 0, problem)
        if self.costs.unknown:
            return Decision(found, "placed", moved, problem)
        busiest = max(int(plan.bytes_in.max()), int(plan.bytes_out.max()))
        verdict = break_even(
            self._seconds(problem, current) - self._seconds(problem, found),
            busiest,
            bandwidth=float(self.costs.bandwidth or 0.0),
            horizon=self.config.horizon,
            overlap=self.config.overlap,
            margin=self.config.margin,
        )
        if not verdict.pays:
            return Decision(current, "does not pay", moved, problem, verdict)
        return Decision(found, "placed", moved, problem, verdict)

    def _seconds(self, problem: PlacementProblem, slots: Any) -> Any:
        """Expected seconds of each layer in a window like those seen, [L]."""
        windows = problem.window_loads()
        shares = nearest_shares(slots, self.topology, problem.num_experts)
        fullest = max_over_mean(
            *(windows, window_weights(len(windows)), problem.traffic, slots, shares), ranks=problem.num_ranks
        )
        picks = problem.traffic.sum(axis=(1, 2))
        comm = evaluate(problem, slots).comm
        return layer_seconds(comm, fullest, picks, ranks=problem.num_ranks, costs=self.costs)


def moved_copies(old: Any, new: Any, slots_per_rank: int) -> int:
    """Copies of experts that a rank holds in `new` [L, P] and not in `old` [L, P]: what has to be sent."""
    old, new = np.asarray(old), np.asarray(new)
    moved = 0
    for first in range(0, old.shape[1], slots_per_rank):
        held = old[:, first : first + slots_per_rank]
        wanted = np.sort(new[:, first : first + slots_per_rank], axis=1)
        is_new = (wanted[:, :, None] != held[:, None, :]).all(axis=2)
        repeated = np.zeros_like(is_new)
        repeated[:, 1:] = wanted[:, 1:] == wanted[:, :-1]  # a second copy on the same rank costs no transfer
        moved += int((is_new & ~repeated).sum())
    return moved


def save_window(
    folder: str, index: int, *, traffic: Any, current: Any, slots: Any, shares: Any = None
) -> Path:
    """Writes `window-NNNNNN.npz`: traffic [L, S, E], the slots in force and those decided, both [L, P].

    shares: [L, S, P] by which copies served at the window's end; None: no such array, the nearest ones.
    """
    arrays = {
        "traffic": np.asarray(traffic, dtype=np.int64),
        "current": np.asarray(current, dtype=np.int32),
        "slots": np.asarray(slots, dtype=np.int32),
    }
    if shares is not None:
        arrays["shares"] = np.asarray(shares, dtype=np.float64)
    return _save(Path(folder) / f"window-{index:06d}.npz", arrays)


def save_rest(folder: str, rank: int, *, traffic: Any, current: Any) -> Path:
    """Writes `rest-rankNNNN.npz`: one rank's own picks [L, S, E] in the window that was open at the end."""
    arrays = {
        "traffic": np.asarray(traffic, dtype=np.int64),
        "current": np.asarray(current, dtype=np.int32),
    }
    return _save(Path(folder) / f"rest-rank{rank:04d}.npz", arrays)


def _save(target: Path, arrays: dict[str, Any]) -> Path:
    """Written beside and renamed, so that a reader never finds half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".tmp")
    with scratch.open("wb") as file:
        np.savez_compressed(file, **arrays)
    scratch.replace(target)
    return target
