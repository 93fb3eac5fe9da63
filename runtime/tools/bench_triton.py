"""The counting scheme with one global atomic per pick and counter, in Triton: what the benchmark compares with."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def per_pick_kernel(
    topk_ids,  # int32 [T, K], contiguous
    out,  # int32 [T, K]
    replicas,  # int32 [S, E, M]
    copies,  # int32 [S, E]
    counts,  # int64 [S, E]
    load,  # int32 [P]
    source_of_row,  # int64 [T] or None
    num_picks,
    K: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_pick = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_pick = i_pick < num_picks
    i_row = i_pick // K
    b_expert = tl.load(topk_ids + i_pick, mask=m_pick, other=0)
    i_cell = b_expert.to(tl.int64)
    if source_of_row is not None:
        i_cell += tl.load(source_of_row + i_row, mask=m_pick, other=0) * E
    b_copies = tl.load(copies + i_cell, mask=m_pick, other=1)
    b_slot = tl.load(replicas + i_cell * M + i_row % b_copies, mask=m_pick, other=0)
    tl.store(out + i_pick, b_slot, mask=m_pick)
    if COUNT:
        tl.atomic_add(counts + i_cell, 1, mask=m_pick, sem="relaxed")
        tl.atomic_add(load + b_slot, 1, mask=m_pick, sem="relaxed")


def map_per_pick(inputs: Any, *, count: bool) -> None:
    """Maps the benchmark's ids, and counts them when asked to."""
    picks = inputs.ids.numel()
    per_pick_kernel[(triton.cdiv(picks, BLOCK),)](
        inputs.ids,
        inputs.out,
        inputs.replica_map.replicas,
        inputs.replica_map.nearest,
        inputs.counts,
        inputs.load,
        None if inputs.shape.sources == 1 else inputs.source,
        picks,
        K=inputs.shape.top_k,
        E=inputs.shape.experts,
        M=inputs.replica_map.max_replicas,
        COUNT=count,
        BLOCK=BLOCK,
    )
