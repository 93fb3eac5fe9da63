"""Counting in plain torch: the specification that every other backend equals bit for bit (SPEC section 2).

Which copy serves a pick. Let a pick come from source s and row t of `topk_ids`, let it go to expert e, and let n
copies of e be equally near to s and nearer than all others, listed in ascending order of slot. Then

    x     = (t·A + (t >> 3)·B + (t >> 5)·C) mod 2^32
    index = (floor(x·n / 2^32) + s + e) mod n

- t·A walks the unit circle by the golden ratio: consecutive rows, and rows with a small stride, are spread more
  evenly than chance would.
- One walk alone resonates with some strides (610 rows are 377.0007 turns, so every 610th row would meet the same
  copy). The carries t >> 3 and t >> 5 walk by steps of their own and break such chains.
- The source is added after the range reduction, so any n sources with one token each, in the same row, use the
  n copies exactly once. The expert is added so that a lone token does not lean towards low ranks.

With shares the n copies are those that have one, in the order of the tables, and copy j is chosen when

    y = (floor(x·n / 2^16) + ((s + e) mod n) · 2^16) mod (n · 2^16)

lies from threshold j - 1 (0 for j = 0) up to, and not including, threshold j; thresholds are the running sums of
the shares times n · 2^16, rounded (`replica_tables`). n even shares have the thresholds 2^16, 2 · 2^16, ...: then
y >> 16 is the index of the even rule, so the two rules agree bit for bit.

A is 2^32 divided by the golden ratio. B and C were found by search: for 2 to 16 copies and strides of 1, 2, 3,
4, 8, 16 and 64 rows the fullest copy of 2,048 tokens stays within 4 % of its share. The worst stride below 1,024
is 8 standard deviations of a random choice off an even spread, where the golden ratio alone is 27 off.
"""

from __future__ import annotations

from typing import Any

import torch

from .replica_map import ReplicaMap

ROW_STEP = 2654435769
CARRY_3_STEP = 2542331567
CARRY_5_STEP = 3337167497
LOW_32_BITS = 0xFFFFFFFF


def choose_replica(row: Any, source: Any, expert: Any, num_nearest: Any) -> Any:
    """Index of the copy to use among the `num_nearest` equally near ones.

    Args:
        row, source, expert, num_nearest: int64, of shapes that broadcast; row < 2^31, num_nearest >= 1.

    Returns:
        int64 in [0, num_nearest).
    """
    index = (_turn(row) * num_nearest) >> 32
    return (index + source + expert) % num_nearest


def choose_by_share(row: Any, source: Any, expert: Any, num_choices: Any, thresholds: Any) -> Any:
    """Index of the copy to use among `num_choices` with thresholds of their own.

    Args:
        row, source, expert, num_choices: int64, of shapes that broadcast; row < 2^31, 1 <= num_choices < 2^15.
        thresholds: integers [..., M], M >= num_choices; ascending up to index num_choices - 1.

    Returns:
        int64 in [0, num_choices).
    """
    place = ((_turn(row) * num_choices) >> 16) + (((source + expert) % num_choices) << 16)
    place = place % (num_choices << 16)
    # The last threshold is the end of the circle; padding lies beyond it.
    return (place[..., None] >= thresholds).sum(-1)


def _turn(row: Any) -> Any:
    turn = row * ROW_STEP + (row >> 3) * CARRY_3_STEP + (row >> 5) * CARRY_5_STEP
    return turn & LOW_32_BITS


def map_and_count(
    topk_ids: Any,
    replica_map: ReplicaMap,
    counts: Any,
    *,
    layer: int,
    source: Any,
    physical_load: Any,
    num_tokens: Any,
    enabled: Any,
    out: Any,
) -> None:
    """Fills `out` and adds to the counters; arguments as the public function has them, checked there.

    Invalid picks are not filtered out: they go to a harmless index with weight 0. Filtering would need their
    number on the host, which is a synchronisation and breaks graph capture.
    """
    num_experts, num_sources = replica_map.num_experts, replica_map.num_sources
    row = torch.arange(topk_ids.shape[0], dtype=torch.int64, device=topk_ids.device)[:, None]
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    if isinstance(source, torch.Tensor):
        source = source.to(torch.int64)[:, None]
        valid = valid & (source >= 0) & (source < num_sources)
        source = source.clamp(0, num_sources - 1)
    else:
        source = torch.full_like(row, source)
    expert = topk_ids.clamp(0, num_experts - 1).to(torch.int64)

    num_nearest = replica_map.nearest[layer][source, expert].to(torch.int64)
    if replica_map.thresholds is None:
        index = choose_replica(row, source, expert, num_nearest)
    else:
        thresholds = replica_map.thresholds[layer][source, expert]
        index = choose_by_share(row, source, expert, num_nearest, thresholds)
    slot = replica_map.replicas[layer][source, expert, index].to(torch.int64)
    # The counters come after the last use of topk_ids, because `out` may be the same tensor.
    out.copy_(torch.where(valid, slot, -1))

    counted = valid
    if num_tokens is not None:
        limit = num_tokens if isinstance(num_tokens, torch.Tensor) else min(num_tokens, topk_ids.shape[0])
        counted = counted & (row < limit)
    if enabled is not None:
        counted = counted & (enabled != 0)
    cell = (source * num_experts + expert).reshape(-1)
    counts[layer].view(-1).index_add_(0, cell, counted.reshape(-1).to(counts.dtype))
    if physical_load is not None:
        physical_load[layer].index_add_(0, slot.reshape(-1), counted.reshape(-1).to(physical_load.dtype))
