"""A call as 64-bit words, for the compiled code: `Call` in csrc/counting/call.cuh, field by field."""

from __future__ import annotations

from typing import Any

import torch

from .replica_map import ReplicaMap

CALL_WORDS = 25
IDS_WIDE, COUNTS_WIDE, LOAD_WIDE, SOURCES_WIDE, NUM_TOKENS_WIDE = 1, 2, 4, 8, 16


def call_words(
    topk_ids: Any,
    replica_map: ReplicaMap,
    counts: Any,
    physical_load: Any,
    layer: int,
    source: Any,
    num_tokens: Any,
    enabled: Any,
    out: Any,
) -> tuple[int, ...]:
    """The words of `map_and_count`'s checked arguments; addresses of absent arrays are 0."""
    rows, top_k = topk_ids.shape
    sources, experts, width = replica_map.replicas.shape[1:]
    slots, thresholds = replica_map.slots.shape[1], replica_map.thresholds
    cells = layer * sources * experts
    types = IDS_WIDE if topk_ids.dtype is torch.int64 else 0
    wide_counts = counts.dtype is torch.int64
    types |= COUNTS_WIDE if wide_counts else 0
    load_address = 0
    if physical_load is not None:
        wide_load = physical_load.dtype is torch.int64
        types |= LOAD_WIDE if wide_load else 0
        load_address = physical_load.data_ptr() + layer * slots * (8 if wide_load else 4)
    source_type, source_of_row, source, source_stride = _source(source)
    limit_type, limit, limit_address, flag_address, flag_bytes = _limits(rows, num_tokens, enabled)
    return (
        topk_ids.data_ptr(),
        out.data_ptr(),
        replica_map.replicas.data_ptr() + cells * width * 4,
        replica_map.nearest.data_ptr() + cells * 4,
        0 if thresholds is None else thresholds.data_ptr() + cells * width * 4,
        counts.data_ptr() + cells * (8 if wide_counts else 4),
        load_address,
        source_of_row,
        limit_address,
        flag_address,
        rows,
        top_k,
        limit,
        sources,
        experts,
        slots,
        width,
        source,
        *topk_ids.stride(),
        *out.stride(),
        source_stride,
        types | source_type | limit_type,
        flag_bytes,
    )


def _source(source: Any) -> tuple[int, int, int, int]:
    """Type bit, address (0: none), the one source, stride."""
    if not isinstance(source, torch.Tensor):
        return 0, 0, source, 0
    return (
        SOURCES_WIDE if source.dtype is torch.int64 else 0,
        source.data_ptr(),
        0,
        source.stride(0),
    )


def _limits(rows: int, num_tokens: Any, enabled: Any) -> tuple[int, int, int, int, int]:
    """Type bit and rows to count, the address of `num_tokens`, and address and size of `enabled` (0: no tensor)."""
    types = limit_address = flag_address = flag_bytes = 0
    limit = rows
    if isinstance(num_tokens, torch.Tensor):
        types = NUM_TOKENS_WIDE if num_tokens.dtype is torch.int64 else 0
        limit_address = num_tokens.data_ptr()
    elif num_tokens is not None:
        limit = min(num_tokens, rows)
    if isinstance(enabled, torch.Tensor):
        flag_address, flag_bytes = enabled.data_ptr(), enabled.element_size()
    elif enabled is not None and not enabled:
        limit = 0
    return types, limit, limit_address, flag_address, flag_bytes
