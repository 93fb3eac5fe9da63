"""Counting in Triton: one fused pass over `topk_ids` (SPEC section 2), equal to `reference` bit for bit.

Grid: one program per BLOCK picks of the flattened [T, K] ids; a program owns those picks and no counter.
A block counts its picks in a histogram of its own and adds each non-zero bin to the global counter once. That is
at most E + P atomics per block, where one atomic per pick and counter would make the hot experts a queue.

Experts beyond 1,024 and slots beyond 1,024 take one further histogram pass per 1,024 of them. Where every row has
its own source, a block makes one expert pass per source between the lowest and the highest that it meets: after an
all-gather, which lays the sources' rows one after the other, that is one or two.

Compiled variants: one per (E, P, M, K, dtypes, optional arguments). Everything that changes from step to step,
T and the layer included, is an ordinary argument that Triton must not specialise on.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton compiles these functions: their arguments are device values, which Python's type system cannot name.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import reference
from .replica_map import ReplicaMap

BLOCK = 1024
MAX_BINS = 1024
MIN_BINS = 64  # AMD's histogram wants at least one bin per lane
NUM_WARPS = 4

ROW_STEP = tl.constexpr(reference.ROW_STEP)
CARRY_3_STEP = tl.constexpr(reference.CARRY_3_STEP)
CARRY_5_STEP = tl.constexpr(reference.CARRY_5_STEP)


@triton.jit
def turn_of(row):
    """The row's point on the circle, int64 in [0, 2^32)."""
    low_row = row.to(tl.uint32)
    turn = low_row * ROW_STEP + (low_row >> 3) * CARRY_3_STEP + (low_row >> 5) * CARRY_5_STEP
    return turn.to(tl.int64)


@triton.jit
def choose_replica(row, source, expert, num_nearest):
    """`reference.choose_replica`: row int64, the others int32; -> int32 in [0, num_nearest)."""
    index = (turn_of(row) * num_nearest.to(tl.int64)) >> 32
    return (index.to(tl.int32) + source + expert) % num_nearest


@triton.jit
def choose_by_share(row, source, expert, num_choices, p_thresholds, mask):
    """`reference.choose_by_share`; p_thresholds: where the thresholds of each pick's cell begin."""
    circle = num_choices << 16
    place = ((turn_of(row) * num_choices.to(tl.int64)) >> 16).to(tl.int32)
    place = (place + ((source + expert) % num_choices << 16)).to(tl.uint32) % circle.to(tl.uint32)
    index = tl.zeros_like(num_choices)
    for j in range(tl.max(tl.where(mask, num_choices, 1), 0) - 1):
        m_real = mask & (j + 1 < num_choices)
        b_threshold = tl.load(p_thresholds + j, mask=m_real, other=2147483647)
        index += (place >= b_threshold.to(tl.uint32)).to(tl.int32)
    return index


@triton.jit
def add_histogram(counter, values, mask, SIZE: tl.constexpr, BINS: tl.constexpr):
    """counter[v] += how often v is among the masked values, all of them in [0, SIZE)."""
    i_bin = tl.arange(0, BINS)
    for chunk in tl.static_range((SIZE + BINS - 1) // BINS):
        local = values - chunk * BINS
        m_chunk = mask & (local >= 0) & (local < BINS)
        b_histogram = tl.histogram(tl.where(m_chunk, local, 0), BINS, mask=m_chunk)
        b_added = b_histogram.to(counter.dtype.element_ty)
        # Bins past SIZE are empty: the mask that saves atomics also keeps them inside the array.
        tl.atomic_add(counter + chunk * BINS + i_bin, b_added, mask=b_histogram > 0, sem="relaxed")


@triton.jit
def count_by_source(p_layer, expert, source_of_pick, mask, num_sources, E: tl.constexpr, BINS: tl.constexpr):
    """Adds the picks of a block to [S, E] counters where its rows come from several sources."""
    first = tl.min(tl.where(mask, source_of_pick, num_sources), 0)
    last = tl.max(tl.where(mask, source_of_pick, -1), 0)
    for source in range(first, last + 1):
        add_histogram(p_layer + source * E, expert, mask & (source_of_pick == source), E, BINS)


@triton.jit
def counted(mask, i_row, num_counted_rows, num_tokens, enabled):
    """Which of the masked picks count; num_tokens and enabled: integer [1], or None."""
    m_count = mask & (i_row < num_counted_rows)
    if num_tokens is not None:
        m_count = m_count & (i_row < tl.load(num_tokens))
    if enabled is not None:
        m_count = m_count & (tl.load(enabled) != 0)
    return m_count


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_counted_rows",
        "layer",
        "source",
        "num_sources",
        "ids_row_stride",
        "ids_column_stride",
        "out_row_stride",
        "out_column_stride",
        "source_stride",
    ],
    do_not_specialize_on_alignment=["topk_ids", "out", "source_of_row", "num_tokens", "enabled"],
)
def map_and_count_kernel(
    topk_ids,  # int32|int64 [T, K]
    out,  # same dtype [T, K]
    replicas,  # int32 [L, S, E, M]
    nearest,  # int32 [L, S, E]
    thresholds,  # int32 [L, S, E, M] or None: even shares
    counts,  # int32|int64 [L, S, E]
    physical_load,  # int32|int64 [L, P] or None
    source_of_row,  # int32|int64 [T], or None: `source` holds for all rows
    num_tokens,  # integer [1] or None
    enabled,  # integer [1] or None
    num_rows,
    num_counted_rows,
    layer,
    source,
    num_sources,
    ids_row_stride,
    ids_column_stride,
    out_row_stride,
    out_column_stride,
    source_stride,
    E: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    EXPERT_BINS: tl.constexpr,
    SLOT_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_pick = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i_row, i_column = i_pick // K, i_pick % K
    m_pick = i_row < num_rows
    b_id = tl.load(topk_ids + i_row * ids_row_stride + i_column * ids_column_stride, mask=m_pick, other=-1)
    m_valid = m_pick & (b_id >= 0) & (b_id < E)
    b_source = tl.zeros([BLOCK], tl.int32) + source
    if source_of_row is not None:
        b_source_id = tl.load(source_of_row + i_row * source_stride, mask=m_pick, other=-1)
        m_valid = m_valid & (b_source_id >= 0) & (b_source_id < num_sources)
        b_source = tl.where(m_valid, b_source_id, 0).to(tl.int32)
    b_expert = tl.where(m_valid, b_id, 0).to(tl.int32)

    i_cell = (layer.to(tl.int64) * num_sources + b_source) * E + b_expert
    b_nearest = tl.load(nearest + i_cell, mask=m_valid, other=1)
    if thresholds is not None:
        b_index = choose_by_share(i_row, b_source, b_expert, b_nearest, thresholds + i_cell * M, m_valid)
    else:
        b_index = choose_replica(i_row, b_source, b_expert, b_nearest)
    b_slot = tl.load(replicas + i_cell * M + b_index, mask=m_valid, other=-1)
    p_out = out + i_row * out_row_stride + i_column * out_column_stride
    tl.store(p_out, b_slot.to(out.dtype.element_ty), mask=m_pick)

    m_count = counted(m_valid, i_row, num_counted_rows, num_tokens, enabled)
    p_layer = counts + layer.to(tl.int64) * num_sources * E
    if source_of_row is not None:
        count_by_source(p_layer, b_expert, b_source, m_count, num_sources, E, EXPERT_BINS)
    else:
        add_histogram(p_layer + source * E, b_expert, m_count, E, EXPERT_BINS)
    if physical_load is not None:
        add_histogram(physical_load + layer.to(tl.int64) * P, b_slot, m_count, P, SLOT_BINS)


def histogram_bins(size: int) -> int:
    """Bins of one histogram pass over `size` counters: a power of two from 64 to 1,024."""
    return int(max(MIN_BINS, min(MAX_BINS, triton.next_power_of_2(size))))


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 was set when this module was imported."""
    return not isinstance(map_and_count_kernel, triton.runtime.JITFunction)


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
    """Launches the kernel; arguments as the public function has them, checked there."""
    num_rows, top_k = topk_ids.shape
    source_of_row = source if isinstance(source, torch.Tensor) else None
    token_limit = num_tokens if isinstance(num_tokens, torch.Tensor) else None
    flag = enabled if isinstance(enabled, torch.Tensor) else None
    if flag is not None and flag.dtype == torch.bool:
        flag = flag.view(torch.uint8)
    counted_rows = num_rows
    if token_limit is None and num_tokens is not None:
        counted_rows = min(num_tokens, num_rows)
    if flag is None and enabled is not None and not enabled:
        counted_rows = 0
    # Triton launches on the current device, which need not be the tensors' one.
    with torch.cuda.device_of(topk_ids):
        map_and_count_kernel[(triton.cdiv(num_rows * top_k, BLOCK),)](
            topk_ids,
            out,
            replica_map.replicas,
            replica_map.nearest,
            replica_map.thresholds,
            counts,
            physical_load,
            source_of_row,
            token_limit,
            flag,
            num_rows,
            counted_rows,
            layer,
            source if source_of_row is None else 0,
            replica_map.num_sources,
            *topk_ids.stride(),
            *out.stride(),
            0 if source_of_row is None else source_of_row.stride(0),
            E=replica_map.num_experts,
            P=replica_map.num_slots,
            M=replica_map.max_replicas,
            K=top_k,
            EXPERT_BINS=histogram_bins(replica_map.num_experts),
            SLOT_BINS=histogram_bins(replica_map.num_slots),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
