"""`map_and_count` as a torch operator, so that torch.compile and graph capture keep it as one opaque call.

While a function is being compiled, `map_and_count` calls `torch.ops.gimbal.map_and_count`; the compiled graph then
holds the operator with everything it writes to named in its schema. Otherwise the backend is called
directly: on a CPU the dispatcher would add about 2 us to a call of 8.
"""

from __future__ import annotations

from typing import Any

import torch

from .replica_map import ReplicaMap

NAMESPACE, NAME = "gimbal", "map_and_count"
SCHEMA = (
    f"{NAME}(Tensor topk_ids, Tensor replicas, Tensor nearest, Tensor? thresholds, Tensor slots, "
    "Tensor(a!) counts, Tensor(b!)? physical_load, Tensor? source_of_row, Tensor? num_tokens, Tensor? enabled, "
    "int layer, int source, SymInt row_limit, str backend) -> Tensor"
)
ALL_ROWS = -1


def call(
    topk_ids: Any,
    replica_map: ReplicaMap,
    counts: Any,
    *,
    layer: int,
    source: Any,
    physical_load: Any,
    num_tokens: Any,
    enabled: Any,
    backend: str,
) -> Any:
    """The operator with the arguments of the public function; -> physical slots [T, K], a new tensor."""
    per_row = isinstance(source, torch.Tensor)
    limit = ALL_ROWS if num_tokens is None or isinstance(num_tokens, torch.Tensor) else num_tokens
    if enabled is not None and not isinstance(enabled, torch.Tensor) and not enabled:
        limit = 0
    return torch.ops.gimbal.map_and_count(
        topk_ids,
        replica_map.replicas,
        replica_map.nearest,
        replica_map.thresholds,
        replica_map.slots,
        counts,
        physical_load,
        source if per_row else None,
        num_tokens if isinstance(num_tokens, torch.Tensor) else None,
        enabled if isinstance(enabled, torch.Tensor) else None,
        layer,
        0 if per_row else source,
        limit,
        backend,
    )


def _run(
    topk_ids: Any,
    replicas: Any,
    nearest: Any,
    thresholds: Any,
    slots: Any,
    counts: Any,
    physical_load: Any,
    source_of_row: Any,
    num_tokens: Any,
    enabled: Any,
    layer: int,
    source: int,
    row_limit: int,
    backend: str,
) -> Any:
    from .record import map_and_count  # which imports this module

    view = ReplicaMap(replicas, nearest, thresholds, slots, topology=None, num_experts=nearest.shape[2])
    if row_limit == 0:
        enabled = False  # `num_tokens` may be a tensor beside it
    elif num_tokens is None and row_limit != ALL_ROWS:
        num_tokens = row_limit
    return map_and_count(
        topk_ids,
        view,
        counts,
        layer=layer,
        source=source if source_of_row is None else source_of_row,
        physical_load=physical_load,
        num_tokens=num_tokens,
        enabled=enabled,
        backend=backend,
    )


def _shape(topk_ids: Any, *_: Any) -> Any:
    """What the compiler sees: a new contiguous tensor like `topk_ids`."""
    return topk_ids.new_empty(topk_ids.shape)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(SCHEMA)
for _device in ("CPU", "CUDA"):
    _library.impl(NAME, _run, _device)
torch.library.register_fake(f"{NAMESPACE}::{NAME}", _shape, lib=_library)
