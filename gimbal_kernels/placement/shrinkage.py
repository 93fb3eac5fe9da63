"""How much of a window's skew between sources is real: shrinkage towards the pooled shares (SPEC section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .checks import check_number, check_traffic

# Share of the newest window in the running mean of the skew.
EMA_RATE = 0.2


@dataclass(frozen=True, eq=False)
class ShrinkState:
    """What `shrink` carries from window to window.

    skew: float64 [L, S, E], running mean of each source's share of an expert minus the pooled share.
    rho: share of the skew that was kept in the last window, 0 (noise) to 1 (persistent).
    agreement, energy: sums of new*mean and of mean^2 over the windows so far, older ones weighted by `memory`.
    """

    skew: Any
    rho: float
    agreement: float = 0.0
    energy: float = 0.0


def shrink(
    traffic: Any, state: ShrinkState | None = None, *, rate: float = EMA_RATE, memory: float = 0.0
) -> tuple[torch.Tensor, ShrinkState]:
    """The part of a window's source x expert skew that earlier windows confirm (SPEC section 3.2).

    With T_s the picks of a source, B_e those of an expert and T all of a layer's, the result is
    `T_s*B_e/T + rho*T_s*skew[s, e]`, clipped at 0 and rescaled so that every expert keeps B_e exactly as
    summed. rho = clip(sum of new*mean / sum of mean^2, 0, 1), pooled over layers, compares the new window's
    skew with the running mean from before it: 0 in the first window. Layers without traffic stay as they are.

    Args:
        traffic: [L, S, E] picks of the window that just closed.
        state: what the last call returned; None before the first window.
        rate: share of the newest window in the running mean, 0 to 1.
        memory: rho's two sums also take in earlier windows, each weighted `memory` times as much as the one after
            it, 0 to 1. Where few topics make up the traffic, a skew that is all noise agrees with the running mean
            by chance every few windows; 0.98 averages that out and notices a change of dispatch more slowly.

    Returns:
        float64 [L, S, E] picks to place by, and the state for the next window.

    Raises:
        ValueError: bad traffic, a state of another shape, or a rate or memory outside [0, 1].
    """
    for name, value in (("rate", rate), ("memory", memory)):
        check_number(value, name)
        if value > 1:
            raise ValueError(f"{name}: {value}; valid: a number from 0 to 1")
    picks = np.asarray(check_traffic(traffic, "traffic"), dtype=np.float64)
    if state is not None and np.shape(state.skew) != picks.shape:
        raise ValueError(f"state: skew of shape {np.shape(state.skew)}; valid: {picks.shape}, as traffic")
    new = _skew(picks)
    old = np.zeros_like(new) if state is None else state.skew
    agreement, energy = float((new * old).sum()), float((old * old).sum())
    if state is not None:
        agreement += memory * state.agreement
        energy += memory * state.energy
    rho = float(np.clip(agreement / energy, 0.0, 1.0)) if energy > 0 else 0.0
    mean = new if state is None else (1 - rate) * old + rate * new
    return torch.from_numpy(_rebuild(picks, mean, rho)), ShrinkState(mean, rho, agreement, energy)


def _skew(picks: Any) -> Any:
    """A[s, e]/T_s - B_e/T, and 0 for sources without picks. [L, S, E]"""
    by_source = picks.sum(axis=2, keepdims=True)
    share = np.divide(picks, by_source, out=np.zeros_like(picks), where=by_source > 0)
    return np.where(by_source > 0, share - _pooled_share(picks), 0.0)


def _pooled_share(picks: Any) -> Any:
    """B_e/T, 0 in a layer without picks. [L, 1, E]"""
    by_expert = picks.sum(axis=1, keepdims=True)
    total = by_expert.sum(axis=2, keepdims=True)
    return np.divide(by_expert, total, out=np.zeros_like(by_expert), where=total > 0)


def _rebuild(picks: Any, skew: Any, rho: float) -> Any:
    by_source = picks.sum(axis=2, keepdims=True)
    by_expert = picks.sum(axis=1, keepdims=True)
    even = by_source * _pooled_share(picks)
    kept = np.maximum(even + rho * by_source * skew, 0.0)
    column = kept.sum(axis=1, keepdims=True)
    # A column that the clipping emptied has nothing to rescale: it falls back to the pooled shares.
    kept, column = np.where(column > 0, kept, even), np.where(column > 0, column, by_expert)
    factor = np.divide(by_expert, column, out=np.zeros_like(column), where=column > 0)
    return kept * factor
