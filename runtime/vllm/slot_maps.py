"""Hook: the recording kernel's tables follow every slot map that vLLM commits.

Synchronous EPLB commits all layers at once, asynchronous EPLB one layer per step, both on the stream of the forward
passes: a pass sees the old map with the old weights or the new map with the new ones.
"""

from __future__ import annotations

from typing import Any

from .guard import Hook, HookMismatch, expect, patch
from .kernel_recording import MAPPING, ROUTER, note_slot_maps_are_followed
from .source_rows import rows_of_this_process

STATE = "vllm.distributed.eplb.eplb_state"


def _tell(model_state: Any, slots: Any, layer: int | None) -> None:
    rows = rows_of_this_process()
    if rows is not None:
        rows.follow(model_state, slots, layer)


def _install() -> None:
    parameters = ["model_state", "new_physical_to_logical_map"]
    stock_all = expect(STATE, "_commit_eplb_maps", parameters)
    stock_layer = expect(STATE, "_commit_eplb_maps_for_layer", [*parameters, "layer"])
    expect(ROUTER, f"BaseRouter.{MAPPING}", ["self", "topk_ids"])
    expect(ROUTER, "dbo_current_ubatch_id")
    expect("vllm.forward_context", "get_forward_context")
    expect("vllm.forward_context", "DPMetadata.sp_local_sizes")
    expect("vllm.distributed.parallel_state", "get_node_count")
    if "num_unpadded_tokens_tensors" not in expect(STATE, "EplbLayerState").__dataclass_fields__:
        raise HookMismatch("EplbLayerState has no num_unpadded_tokens_tensors")

    def commit_all(model_state: Any, new_physical_to_logical_map: Any) -> None:
        stock_all(model_state, new_physical_to_logical_map)
        _tell(model_state, new_physical_to_logical_map, None)

    def commit_layer(model_state: Any, new_physical_to_logical_map: Any, layer: int) -> None:
        stock_layer(model_state, new_physical_to_logical_map, layer)
        _tell(model_state, new_physical_to_logical_map, layer)

    patch(STATE, "_commit_eplb_maps", commit_all)
    patch(STATE, "_commit_eplb_maps_for_layer", commit_layer)
    note_slot_maps_are_followed()


HOOKS = (Hook("slot-maps", _install),)
