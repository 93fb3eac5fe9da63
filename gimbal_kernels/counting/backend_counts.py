"""Counts that the all-to-all backend already has are added without looking at ids again (SPEC section 2)."""

from __future__ import annotations

from typing import Any

import torch

from .._arrays import to_host

COUNT_TYPES = (torch.int32, torch.int64)


def add_backend_counts(
    counts: Any,
    *,
    layer: int,
    source: Any,
    per_expert: Any = None,
    per_expert_per_rank: Any = None,
    experts: Any = None,
    expected: int | None = None,
) -> None:
    """Adds token counts per expert to `counts[layer]`, in place.

    Exactly one of two layouts is given:

    - `per_expert` [N] with one int as `source`. Without `experts` it is the vector of all E experts that one
      source sends (DeepEP normal mode's tokens per expert). With `experts` entry i belongs to logical expert
      `experts[i]`: this rank's local experts when the source is known (pplx `expert_num_tokens`), or physical
      slots, with the layer's row of the slot map as `experts`.
    - `per_expert_per_rank` [N, ranks] with `source` [ranks] and `experts` [N]: what this rank's local experts
      received from every rank. Column r is added to `source[r]`, the DP source that rank r belongs to.
      DeepEP low-latency's layout range packs (begin, count) of [local experts, ranks] in one int64: give
      `layout_range & 0xFFFFFFFF`, the count. FlashInfer gathers counters [ranks, E] of all experts on every
      rank: give them transposed with `experts=range(E)`, on one rank of the group only.

    Entries whose expert lies outside [0, E), and columns whose source lies outside [0, S), are left out. Under
    tensor parallelism, where the ranks of a DP group send the same tokens, give -1 for all but one of them.

    Aligned or padded lists (every count rounded up to a block) are not token counts. They do not sum to T·K:
    `expected` refuses them.

    Args:
        counts: int32 or int64 [L, S, E], contiguous.
        layer: which layer the counts belong to.
        source: an int, or integers [ranks] with `per_expert_per_rank`.
        per_expert: integers [E], or [N] with `experts`.
        per_expert_per_rank: integers [N, ranks].
        experts: integers [N], the logical expert of each entry; one expert may occur several times.
        expected: the picks that the counts must sum to, left-out entries excluded: T·K at the source, or what this
            rank received. Checking it reads the sum back to the host, so it has no place in a captured graph;
            without it tensors on a GPU are added unread.

    Raises:
        ValueError: a wrong shape or type, both layouts or none, a negative count (seen in host memory, or
            anywhere when `expected` is given), or a sum other than `expected`. Nothing has been added then.
    """
    _check_counts(counts)
    num_layers, num_sources, num_experts = counts.shape
    _check_int("layer", layer, num_layers)
    name, picks, source_of_column = _layout(source, per_expert, per_expert_per_rank, counts)
    expert_of_entry = _experts(experts, picks, num_experts, needed=per_expert is None)
    kept = ((expert_of_entry >= 0) & (expert_of_entry < num_experts))[:, None]
    kept = kept & (source_of_column >= 0) & (source_of_column < num_sources)
    _check_values(name, picks, kept, expected)
    cell = source_of_column.clamp(0, num_sources - 1) * num_experts
    cell = cell + expert_of_entry.clamp(0, num_experts - 1)[:, None]
    added = torch.where(kept, picks, 0).to(counts.dtype)
    counts[layer].view(-1).index_add_(0, cell.reshape(-1), added.reshape(-1))


def _layout(source: Any, per_expert: Any, per_expert_per_rank: Any, counts: Any) -> tuple[str, Any, Any]:
    """Either layout as picks [N, columns] with the source of every column; and the argument's name."""
    if (per_expert is None) == (per_expert_per_rank is None):
        raise ValueError("per_expert, per_expert_per_rank: both or neither given; valid: exactly one of them")
    if per_expert is not None:
        _check_int("source", source, counts.shape[1])
        picks = _integers("per_expert", per_expert, counts.device, 1)[:, None]
        return "per_expert", picks, torch.full((1,), source, dtype=torch.int64, device=counts.device)
    picks = _integers("per_expert_per_rank", per_expert_per_rank, counts.device, 2)
    return "per_expert_per_rank", picks, _integers("source", source, counts.device, 1, size=picks.shape[1])


def _check_counts(counts: Any) -> None:
    if not isinstance(counts, torch.Tensor) or counts.ndim != 3 or 0 in counts.shape:
        what = list(counts.shape) if isinstance(counts, torch.Tensor) else type(counts).__name__
        raise ValueError(f"counts: {what}; valid: a torch tensor [L, S, E]")
    if counts.dtype not in COUNT_TYPES or not counts.is_contiguous():
        raise ValueError(
            f"counts: {counts.dtype}, strides {list(counts.stride())}; valid: int32 or int64, contiguous"
        )


def _check_int(name: str, value: Any, size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"{name}: {value!r}; valid: an integer from 0 to {size - 1}")


def _integers(name: str, value: Any, device: Any, ndim: int, size: int | None = None) -> Any:
    """`value` as an int64 tensor on `device`, with its shape and type checked but not its values."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(to_host(value, name).copy())
    if tensor.ndim != ndim or (size is not None and tensor.shape[0] != size):
        valid = f"[{size}]" if size is not None else "[N]" if ndim == 1 else "[N, ranks]"
        raise ValueError(f"{name}: shape {list(tensor.shape)}; valid: {valid}")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"{name}: dtype {tensor.dtype}; valid: an integer type")
    return tensor.to(device=device, dtype=torch.int64)


def _experts(experts: Any, picks: Any, num_experts: int, *, needed: bool) -> Any:
    """The logical expert of every row of `picks`, int64 [N]."""
    if experts is not None:
        return _integers("experts", experts, picks.device, 1, size=picks.shape[0])
    if needed:
        raise ValueError("experts: absent; valid: integers [N], the logical expert of each local expert")
    if picks.shape[0] != num_experts:
        raise ValueError(
            f"per_expert: shape [{picks.shape[0]}]; valid: [{num_experts}], "
            f"or any length with the logical expert of each entry in `experts`"
        )
    return torch.arange(num_experts, device=picks.device)


def _check_values(name: str, picks: Any, kept: Any, expected: int | None) -> None:
    if expected is None and picks.is_cuda:
        return
    if picks.numel() and int(picks.min()) < 0:
        raise ValueError(f"{name}: has {int(picks.min())}; valid: counts >= 0")
    if expected is None:
        return
    if isinstance(expected, bool) or not isinstance(expected, int) or expected < 0:
        raise ValueError(f"expected: {expected!r}; valid: an integer >= 0, the number of picks")
    total = int(torch.where(kept, picks, 0).sum())
    if total != expected:
        raise ValueError(
            f"{name}: sums to {total}; valid: {expected} picks as `expected` says "
            f"(lists aligned or padded to blocks are not token counts)"
        )
