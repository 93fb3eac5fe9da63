"""What a placement is asked for (PlacementProblem, Weights) and what comes back (Placement)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .._arrays import cuda_device, to_host
from ..topology import Topology
from .checks import LIMIT, check_number, check_slots, check_traffic


@dataclass(frozen=True)
class Weights:
    """Weights of remote picks (alpha), imbalance (beta) and moves (gamma) in the cost (SPEC section 3.2).

    In `evaluate` and in every method but "paper" they weigh the cost `alpha*comm + beta*imbalance +
    gamma*moves/E`. Method "paper" takes the three in its own units (SPEC section 3.1).

    Raises:
        ValueError: a weight that is negative, NaN, infinite or above 2**64.
    """

    alpha: float = 1.0
    beta: float = 4.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            value = getattr(self, name)
            check_number(value, name)
            object.__setattr__(self, name, float(value))

    @staticmethod
    def for_expert(
        bytes_per_expert: float,
        bytes_per_pick: float,
        horizon: float,
        traffic: Any,
        *,
        alpha: float = 1.0,
        beta: float = 4.0,
    ) -> Weights:
        """Weights whose gamma makes a move earn back its bytes: gamma = n_mig/(b*H) (SPEC section 3.2).

        Args:
            bytes_per_expert: bytes of one expert's weights in one layer.
            bytes_per_pick: bytes that one remote pick sends, dispatch and combine together.
            horizon: H, the number of windows that the placement is expected to live.
            traffic: [L, S, E] picks of one window; b is its mean load per expert and layer. A window
                without traffic gives gamma = 0: its layers stay where they are in any case.

        Raises:
            ValueError: bytes or a horizon that are not positive and finite; bad traffic.
        """
        given = {
            "bytes_per_expert": bytes_per_expert,
            "bytes_per_pick": bytes_per_pick,
            "horizon": horizon,
        }
        for name, value in given.items():
            check_number(value, name)
            if value <= 0:
                raise ValueError(f"{name}: {value}; valid: a number > 0")
        picks = check_traffic(traffic, "traffic")
        mean_load = float(picks.sum()) / max(1, picks.shape[0] * picks.shape[2])
        gamma = bytes_per_expert / bytes_per_pick / (mean_load * horizon) if mean_load > 0 else 0.0
        return Weights(alpha=alpha, beta=beta, gamma=gamma)


# Windows of history that a problem may carry; with a weight of 0.8^age older ones hardly count.
MAX_HISTORY = 7

# The paper's weights (arXiv 2606.15177): found by its calibration, and as they are before it.
CALIBRATED = Weights(1.0, 0.0025, 1.0)
UNCALIBRATED = Weights(1.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """Which experts are picked from where, and the slots that they can live in (SPEC section 1).

    Args:
        traffic: [L, S, E] picks per layer, DP source and logical expert, integers or reals. L = 0 is valid.
        topology: distances from the S sources to the R ranks.
        slots_per_rank: C; P = R*C slots per layer, slot p on rank p // C. C*R >= E, and C <= E.
        current: [L, P] integers, the expert that each slot holds now, or None when nothing is loaded yet:
            then moves cost nothing and none are counted.
        weights: None takes each method's own: (1, 0.0025, 1) for "paper", `Weights()` for the others.
        history: earlier windows, the newest first, at most 7: each [L, S, E] picks (any S) or [L, E] loads. Their
            rank loads enter the imbalance term of the cost with the weights of `window_weights`.
        drift: relative change of an expert's load from one window to the next (`measure_drift`). It adds the
            imbalance that such a change is expected to cause to the cost (SPEC section 4); 0 leaves it out.

    The arrays are copied and kept read-only on the host: traffic float64, current int32, history float64 [L, E]
    per window. `traffic_device` is the CUDA device that `traffic` came from, or None.

    Raises:
        ValueError: wrong shapes or dtypes, NaN, infinite or negative picks, more than 2**64 picks in a cell,
            experts out of range or without a slot in `current`, too few or too many slots, windows of other
            layers or experts in `history`.
    """

    traffic: Any
    topology: Topology
    slots_per_rank: int
    current: Any = None
    weights: Weights | None = None
    history: tuple[Any, ...] = ()
    drift: float = 0.0
    traffic_device: torch.device | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traffic_device", cuda_device(self.traffic))
        traffic = np.array(check_traffic(self.traffic, "traffic"), dtype=np.float64, order="C")
        traffic.setflags(write=False)
        object.__setattr__(self, "traffic", traffic)
        self._check_topology()
        object.__setattr__(self, "slots_per_rank", self._check_slots_per_rank())
        if self.weights is not None and not isinstance(self.weights, Weights):
            raise ValueError(f"weights: {type(self.weights).__name__}; valid: Weights(...) or None")
        object.__setattr__(self, "history", self._check_history())
        check_number(self.drift, "drift")
        object.__setattr__(self, "drift", float(self.drift))
        if self.current is not None:
            current = self.check_slots(self.current, "current")
            current.setflags(write=False)
            object.__setattr__(self, "current", current)

    @property
    def num_layers(self) -> int:
        return int(self.traffic.shape[0])

    @property
    def num_sources(self) -> int:
        return int(self.traffic.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.traffic.shape[2])

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank

    def weights_for(self, default: Weights) -> Weights:
        """The weights in force: those given, else `default`; gamma is 0 when there is no placement yet."""
        chosen = default if self.weights is None else self.weights
        if self.current is None:
            return Weights(chosen.alpha, chosen.beta, 0.0)
        return chosen

    def window_loads(self) -> Any:
        """Picks of each expert in each window, this one first, float64 [K, L, E]; sums in ascending source."""
        now = np.zeros((self.num_layers, self.num_experts))
        for source in range(self.num_sources):
            now = now + self.traffic[:, source]
        return np.stack([now, *self.history])

    def check_slots(self, value: Any, name: str) -> Any:
        """`value` as a fresh int32 numpy array [L, P] in which every expert has a slot, else ValueError."""
        return check_slots(
            value,
            name,
            layers=self.num_layers,
            experts=self.num_experts,
            ranks=self.num_ranks,
            slots_per_rank=self.slots_per_rank,
        )

    def _check_topology(self) -> None:
        if not isinstance(self.topology, Topology):
            raise ValueError(f"topology: {type(self.topology).__name__}; valid: a Topology")
        sources = self.topology.num_sources
        if sources != self.num_sources:
            raise ValueError(
                f"traffic: {self.num_sources} sources, topology has {sources}; valid: [L, {sources}, E]"
            )
        if self.topology.distance.max() > LIMIT:
            raise ValueError("topology: distances above 2**64; valid: smaller ones")

    def _check_history(self) -> tuple[Any, ...]:
        windows = tuple(self.history)
        if len(windows) > MAX_HISTORY:
            raise ValueError(
                f"history: {len(windows)} windows; valid: at most {MAX_HISTORY}, the newest first"
            )
        return tuple(self._check_window(value, f"history[{i}]") for i, value in enumerate(windows))

    def _check_window(self, value: Any, name: str) -> Any:
        picks = to_host(value, name)
        picks = check_traffic(picks[:, None] if picks.ndim == 2 else picks, name)
        if (picks.shape[0], picks.shape[2]) != (self.num_layers, self.num_experts):
            raise ValueError(
                f"{name}: {picks.shape[0]} layers of {picks.shape[2]} experts; "
                f"valid: {self.num_layers} layers of {self.num_experts} experts, as traffic"
            )
        loads = np.zeros((self.num_layers, self.num_experts))
        for source in range(picks.shape[1]):
            loads = loads + picks[:, source]
        loads.setflags(write=False)
        return loads

    def _check_slots_per_rank(self) -> int:
        experts, ranks, slots = self.num_experts, self.num_ranks, self.slots_per_rank
        least = -(-experts // ranks)
        if isinstance(slots, bool) or not isinstance(slots, (int, np.integer)):
            raise ValueError(
                f"slots_per_rank: {slots!r}; valid: an integer, at least {least} for {experts} experts on "
                f"{ranks} ranks ({least * ranks} slots, {least * ranks - experts} spare)"
            )
        if slots < least:
            raise ValueError(
                f"slots_per_rank: {slots} gives {slots * ranks} slots for {experts} experts on "
                f"{ranks} ranks; valid: at least {least} "
                f"({least * ranks} slots, {least * ranks - experts} spare)"
            )
        if slots > experts:
            raise ValueError(
                f"slots_per_rank: {slots} for {experts} experts, so a rank would hold one expert twice; "
                f"valid: at most {experts}"
            )
        return int(slots)


@dataclass(frozen=True, eq=False)
class Placement:
    """A slot map and what it costs under the problem's traffic; torch tensors on the host.

    slots: int32 [L, P], the expert of each physical slot. float64 [L]: cost, comm (mean distance of a pick),
    imbalance (mean squared relative deviation of the rank loads), max_over_mean (heaviest rank load over the
    mean one). moves: int64 [L], copies that a rank holds now and did not hold in `current`.
    """

    slots: torch.Tensor
    cost: torch.Tensor
    comm: torch.Tensor
    imbalance: torch.Tensor
    max_over_mean: torch.Tensor
    moves: torch.Tensor
