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

from .. import _host_library
from .replica_map import ReplicaMap
from .words import CALL_WORDS, call_words

ABI = 2
WORDS = struct.Struct(f"={CALL_WORDS}q")


@lru_cache(maxsize=1)
def _bind() -> tuple[Any, str]:
    library, reason = _host_library.interface("counting", ABI)
    if library is None:
        return None, reason
    call = library.gimbal_counting_map
    call.argtypes, call.restype = [ctypes.c_char_p, ctypes.c_int64], None
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
    arguments = (topk_ids, replica_map, counts, physical_load, layer, source, num_tokens, enabled, out)
    call(WORDS.pack(*call_words(*arguments)), threads)
