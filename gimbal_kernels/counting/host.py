"""Counting for tensors in host memory, compiled (csrc/counting/host.cpp): equal to `reference` bit for bit.

It runs once per MoE layer and forward pass, often for a handful of tokens, so the call itself must be cheap: all
arguments travel as one packed row of 64-bit words. Nothing is allocated, except by threads for very many picks.
`num_tokens` and `enabled` are read from their memory by the compiled code.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import Any

import torch

from .. import _host_library
from .replica_map import ReplicaMap

ABI = 1
# The fields of `Call` in csrc/counting/host.cpp, in order.
WORDS = struct.Struct("=26q")
IDS_WIDE, COUNTS_WIDE, LOAD_WIDE, SOURCES_WIDE, NUM_TOKENS_WIDE = 1, 2, 4, 8, 16


@lru_cache(maxsize=1)
def _bind() -> tuple[Any, str]:
    library = _host_library.load()
    if library is None:
        return None, _host_library.status()
    try:
        abi = library.gimbal_counting_abi
        call = library.gimbal_counting_map
    except AttributeError as error:
        return None, f"the host library was built from other sources, reinstall ({error})"
    abi.restype = ctypes.c_int32
    if abi() != ABI:
        return None, f"the host library has counting interface {abi()}, not {ABI}: reinstall"
    call.argtypes, call.restype = [ctypes.c_char_p], None
    return call, "ready"


def status() -> str:
    """ "ready", or the reason why the compiled counting cannot be used."""
    return _bind()[1]


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
    threads: int = 0,
) -> None:
    """Fills `out` and adds to the counters; arguments as the public function has them, checked there.

    `threads` = 0 lets the library choose: one, except for very many picks (csrc/counting/host.cpp).

    Raises:
        RuntimeError: the library is not available (`status` says why).
    """
    call, reason = _bind()
    if call is None:
        raise RuntimeError(f"compiled counting is not available: {reason}")
    rows, top_k = topk_ids.shape
    sources, experts, width = replica_map.replicas.shape[1:]
    slots, thresholds = replica_map.slots.shape[1], replica_map.thresholds
    types = IDS_WIDE if topk_ids.dtype is torch.int64 else 0
    cells = layer * sources * experts
    wide_counts = counts.dtype is torch.int64
    types |= COUNTS_WIDE if wide_counts else 0
    load_address = 0
    if physical_load is not None:
        wide_load = physical_load.dtype is torch.int64
        types |= LOAD_WIDE if wide_load else 0
        load_address = physical_load.data_ptr() + layer * slots * (8 if wide_load else 4)
    control_types, source_of_row, source, source_stride = _source(source)
    limit_type, limit, limit_address, flag_address, flag_bytes = _limits(rows, num_tokens, enabled)
    call(
        WORDS.pack(
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
            types | control_types | limit_type,
            flag_bytes,
            threads,
        )
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
