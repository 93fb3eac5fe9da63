"""What the static baselines are fitted on: profiles counted from recorded routing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._arrays import to_host


def expert_transitions(topk_ids: Any, num_experts: int) -> Any:
    """How often a token that picked expert e in a layer picks f in the next one, int64 [L - 1, E, E].

    topk_ids: [T, L, K] integers, the experts that each token picked.

    Raises:
        ValueError: another shape or dtype, or ids that are no experts.
    """
    ids = _check_ids(topk_ids, num_experts)
    layers = ids.shape[1]
    counts: Any = np.zeros((max(0, layers - 1), num_experts, num_experts), dtype=np.int64)
    for layer in range(layers - 1):
        pair = ids[:, layer, :, None] * num_experts + ids[:, layer + 1, None, :]
        counts[layer] = np.bincount(pair.ravel(), minlength=num_experts**2).reshape(num_experts, -1)
    return counts


def request_picks(topk_ids: Any, request: Any, num_experts: int) -> Any:
    """Picks of each request per layer and expert, int64 [N, L, E].

    topk_ids: [T, L, K] integers. request: [T] integers from 0 on, the request of each token.

    Raises:
        ValueError: other shapes or dtypes, ids that are no experts, negative requests.
    """
    ids = _check_ids(topk_ids, num_experts)
    owner = to_host(request, "request")
    if owner.shape != ids.shape[:1] or owner.dtype.kind not in "iu":
        raise ValueError(
            f"request: shape {tuple(owner.shape)}, dtype {owner.dtype}; valid: integers [{len(ids)}]"
        )
    if owner.size and owner.min() < 0:
        raise ValueError(f"request: {owner.min()}; valid: integers >= 0")
    owner = owner.astype(np.int64)
    count, layers = (int(owner.max()) + 1 if owner.size else 0), ids.shape[1]
    picks: Any = np.zeros((count, layers, num_experts), dtype=np.int64)
    for layer in range(layers):
        cell = owner[:, None] * num_experts + ids[:, layer]
        picks[:, layer] = np.bincount(cell.ravel(), minlength=count * num_experts).reshape(count, -1)
    return picks


def check_request_picks(value: Any, name: str) -> Any:
    """`value` as float64 [N, L, E] of valid picks, else ValueError."""
    picks = np.asarray(to_host(value, name), dtype=np.float64)
    if picks.ndim != 3 or 0 in picks.shape:
        raise ValueError(f"{name}: shape {tuple(picks.shape)}; valid: [N, L, E], none of them 0")
    if not (np.isfinite(picks).all() and picks.min() >= 0):
        raise ValueError(f"{name}: has negative, NaN or infinite entries; valid: picks >= 0")
    return picks


def check_count(value: Any, name: str) -> None:
    """ValueError unless `value` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {value!r}; valid: an integer >= 1")


def _check_ids(topk_ids: Any, num_experts: int) -> Any:
    ids = to_host(topk_ids, "topk_ids")
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ValueError(f"topk_ids: shape {tuple(ids.shape)}, dtype {ids.dtype}; valid: integers [T, L, K]")
    if ids.size and not (ids.min() >= 0 and ids.max() < num_experts):
        raise ValueError(f"topk_ids: from {ids.min()} to {ids.max()}; valid: 0 to {num_experts - 1}")
    return ids.astype(np.int64)
