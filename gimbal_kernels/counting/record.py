"""The record path's public function: checks its arguments, then hands them to a backend."""

from __future__ import annotations

from typing import Any

import torch

from . import torch_op
from .backends import implementation
from .replica_map import ReplicaMap

ID_TYPES = (torch.int32, torch.int64)
FLAG_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def map_and_count(
    topk_ids: Any,
    replica_map: ReplicaMap,
    counts: Any,
    *,
    layer: int,
    source: Any,
    physical_load: Any = None,
    num_tokens: Any = None,
    enabled: Any = None,
    out: Any = None,
    backend: str = "auto",
) -> Any:
    """Maps logical expert ids to physical slots and counts the picks, in one pass (SPEC section 2).

    Which copy serves a pick is written down in `gimbal_kernels.counting.reference`. An id < 0 or >= E is padding:
    it leaves as -1 and is counted nowhere. So is every id of a row whose source lies outside [0, S).

    Map ids exactly once, before any stream forks off. When a result is mapped again, slots >= E leave as -1;
    slots < E cannot be told from expert ids and are mapped and counted once more.

    The host never waits for the device, and with `out` given nothing is allocated on a GPU: the call can be
    captured in a CUDA graph. A replay reads `num_tokens`, `enabled` and the tables of `replica_map` anew. Under
    torch.compile the call becomes the operator `torch.ops.gimbal.map_and_count`, which checks when it runs.

    Args:
        topk_ids: int32 or int64 [T, K], logical expert ids, of any strides; T may be 0.
        replica_map: tables on the same device.
        counts: int32 or int64 [L, S, E], contiguous; picks are added in place. An int32 counter wraps at 2^31
            picks: fold it into int64 in time (`TrafficWindow.fold`).
        layer: which layer of `replica_map`, `counts` and `physical_load` the ids belong to.
        source: the DP source of all rows, or an int32 or int64 tensor [T] with one source per row.
        physical_load: int32 or int64 [L, P], contiguous; picks per slot are added in place.
        num_tokens: rows at or past it are mapped but not counted: an int >= 0, or an integer tensor with one
            element on the same device. Absent: all rows count.
        enabled: 0 or False maps without counting: a bool, an int, or a bool or integer tensor with one element on
            the same device. Absent: counting is on.
        out: where the result goes: shape, dtype and device of `topk_ids`; may be `topk_ids` itself.
        backend: "torch", "host", "triton", "cuda", or "auto": triton for CUDA tensors and the compiled host code
            for tensors in host memory where they are there, torch otherwise.

    Returns:
        Physical slots [T, K] in the dtype of `topk_ids`: `out` if given, else a new tensor.

    Raises:
        ValueError: a wrong shape, dtype, device, layer, source, or a backend that cannot serve these tensors.
    """
    controls = {"layer": layer, "source": source, "num_tokens": num_tokens, "enabled": enabled}
    if torch.compiler.is_compiling():
        slots = torch_op.call(
            topk_ids, replica_map, counts, physical_load=physical_load, backend=backend, **controls
        )
        return slots if out is None else out.copy_(slots)
    _check_tensors(topk_ids, replica_map, counts, physical_load, out)
    _check_controls(topk_ids, replica_map, layer, source, num_tokens, enabled)
    serve = implementation(backend, topk_ids)
    if out is None:
        out = torch.empty_like(topk_ids, memory_format=torch.contiguous_format)
    if topk_ids.numel():
        serve(topk_ids, replica_map, counts, physical_load=physical_load, out=out, **controls)
    return out


def _check_tensor(
    name: str, value: Any, device: Any, dtypes: tuple[Any, ...], shape: tuple[int, ...]
) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: a {type(value).__name__}; valid: a torch tensor {list(shape)}")
    if value.shape != shape:
        raise ValueError(f"{name}: shape {list(value.shape)}; valid: {list(shape)}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {value.dtype}; valid: {' or '.join(map(str, dtypes))}")
    if value.device != device:
        raise ValueError(f"{name}: on {value.device}; valid: {device}, where topk_ids is")


def _check_tensors(topk_ids: Any, replica_map: Any, counts: Any, physical_load: Any, out: Any) -> None:
    if not isinstance(topk_ids, torch.Tensor) or topk_ids.ndim != 2:
        what = list(topk_ids.shape) if isinstance(topk_ids, torch.Tensor) else type(topk_ids).__name__
        raise ValueError(f"topk_ids: {what}; valid: a torch tensor [T, K]")
    if topk_ids.dtype not in ID_TYPES:
        raise ValueError(f"topk_ids: dtype {topk_ids.dtype}; valid: torch.int32 or torch.int64")
    device = topk_ids.device
    if not isinstance(replica_map, ReplicaMap):
        raise ValueError(f"replica_map: a {type(replica_map).__name__}; valid: a ReplicaMap")
    if replica_map.device != device:
        raise ValueError(f"replica_map: on {replica_map.device}; valid: {device}, where topk_ids is")
    cells, slots = replica_map.nearest.shape, replica_map.slots.shape
    _check_tensor("counts", counts, device, ID_TYPES, cells)
    _check_contiguous("counts", counts)
    if physical_load is not None:
        _check_tensor("physical_load", physical_load, device, ID_TYPES, slots)
        _check_contiguous("physical_load", physical_load)
    if out is not None:
        _check_tensor("out", out, device, (topk_ids.dtype,), topk_ids.shape)


def _check_contiguous(name: str, value: Any) -> None:
    if not value.is_contiguous():
        raise ValueError(f"{name}: strides {list(value.stride())}; valid: a contiguous tensor")


def _check_controls(
    topk_ids: Any, replica_map: ReplicaMap, layer: Any, source: Any, num_tokens: Any, enabled: Any
) -> None:
    device = topk_ids.device
    _check_index("layer", layer, replica_map.num_layers)
    if isinstance(source, torch.Tensor):
        _check_tensor("source", source, device, ID_TYPES, (topk_ids.shape[0],))
    else:
        _check_index("source", source, replica_map.num_sources)
    if isinstance(num_tokens, torch.Tensor):
        _check_scalar_tensor("num_tokens", num_tokens, device, ID_TYPES)
    elif num_tokens is not None and (
        isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0
    ):
        raise ValueError(f"num_tokens: {num_tokens!r}; valid: an integer >= 0 or a tensor with one integer")
    if isinstance(enabled, torch.Tensor):
        _check_scalar_tensor("enabled", enabled, device, FLAG_TYPES)
    elif enabled is not None and not isinstance(enabled, int):
        raise ValueError(f"enabled: {enabled!r}; valid: a bool, an integer or a tensor with one of them")


def _check_index(name: str, value: Any, size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"{name}: {value!r}; valid: an integer from 0 to {size - 1}")


def _check_scalar_tensor(name: str, value: Any, device: Any, dtypes: tuple[Any, ...]) -> None:
    if value.numel() != 1 or value.ndim > 1:
        raise ValueError(f"{name}: shape {list(value.shape)}; valid: one element, [] or [1]")
    _check_tensor(name, value, device, dtypes, tuple(value.shape))
