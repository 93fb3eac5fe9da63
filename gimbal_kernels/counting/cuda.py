"""Counting in CUDA (csrc/counting/counting.cuh): one launch, equal to `reference` bit for bit.

`plan_launch` decides the grid and what shared memory holds. It needs no GPU: tests run its launches on the host.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from .. import _device_library
from .replica_map import ReplicaMap
from .words import CALL_WORDS, call_words

FOLDER = "counting"
THREADS = 256
TILE = 4 * THREADS  # picks that a block takes at once; kTile
# 48 KB of 32-bit bins: what every GPU gives a block without asking. Several sources get fewer: clearing and
# flushing them would cost a small batch more than the global atomics that it saves.
MAX_BINS = 12_288
MAX_SOURCE_BINS = 4_096
MAX_PICKS = 2**31 - 1
WORDS = struct.Struct(f"={CALL_WORDS + 4}q")
ARGUMENTS: Any = np.dtype([("words", "<i8", (CALL_WORDS + 4,))])


@dataclass(frozen=True)
class Launch:
    """One launch: kernel name, grid, dynamic shared memory in bytes, and the words of `Arguments`."""

    kernel: str
    blocks: int
    shared_bytes: int
    words: tuple[int, ...]


def status() -> str:
    """ "ready", or the reason why the CUDA kernels cannot be used here."""
    return _device_library.status(FOLDER)


def plan_launch(
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
    multiprocessors: int,
) -> Launch:
    """The launch for a call; arguments as the public function has them, checked there.

    Raises:
        ValueError: 2^31 picks or more.
    """
    rows, top_k = topk_ids.shape
    if rows * top_k > MAX_PICKS:
        raise ValueError(f"topk_ids: {rows} x {top_k} picks; valid: at most {MAX_PICKS} for backend 'cuda'")
    per_row = isinstance(source, torch.Tensor)
    name = "gimbal_count_i64" if topk_ids.dtype is torch.int64 else "gimbal_count_i32"
    name += "_per_row" if per_row else ""
    name += "_weighted" if replica_map.thresholds is not None else ""
    slots = 0 if physical_load is None else replica_map.num_slots
    sources = replica_map.num_sources if per_row else 1
    window, shared_slots = shared_sizes(sources, replica_map.num_experts, slots)
    tiles = -(-rows * top_k // TILE)
    tiles_per_block = -(-tiles // min(tiles, multiprocessors))
    words = call_words(topk_ids, replica_map, counts, physical_load, layer, source, num_tokens, enabled, out)
    aligned = topk_ids.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    vectorised = aligned and topk_ids.is_contiguous() and out.is_contiguous()
    return Launch(
        kernel=name,
        blocks=-(-tiles // tiles_per_block),
        shared_bytes=4 * (window * replica_map.num_experts + shared_slots),
        words=(*words, window, shared_slots, tiles_per_block, int(vectorised)),
    )


def shared_sizes(sources: int, experts: int, slots: int) -> tuple[int, int]:
    """How many sources, and how many slots (all or 0), a block's shared histogram covers.

    All that it does not cover goes to the global counters directly: the second form, for more than about 12,000
    experts and slots, and for sources whose rows alternate in groups wider than the window.
    """
    if experts + slots > MAX_BINS:
        slots = 0
    window = min(sources, max(1, MAX_SOURCE_BINS // experts))
    return (window if window * experts + slots <= MAX_BINS else 0), slots


@lru_cache(maxsize=64)
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def map_and_count(topk_ids: Any, replica_map: ReplicaMap, counts: Any, *, out: Any, **controls: Any) -> None:
    """Fills `out` and adds to the counters; arguments as the public function has them, checked there."""
    index = topk_ids.device.index
    plan = plan_launch(
        topk_ids, replica_map, counts, out=out, multiprocessors=_multiprocessors(index), **controls
    )
    _device_library.launch(
        FOLDER,
        plan.kernel,
        topk_ids.device,
        blocks=plan.blocks,
        threads=THREADS,
        shared_bytes=plan.shared_bytes,
        argument=np.frombuffer(WORDS.pack(*plan.words), dtype=ARGUMENTS),
    )
