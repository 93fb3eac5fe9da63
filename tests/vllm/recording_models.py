"""Made-up models with vLLM's own routers and EPLB state, for the tests of recording; one process, no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gimbal_runtime.vllm import cpu_eplb, kernel_recording
from gimbal_runtime.vllm.kernel_recording import KernelRecording
from gimbal_runtime.vllm.rank_place import RankPlace

from gimbal_kernels.topology import Topology

LAYERS, EXPERTS = 2, 4
ONE_COPY = [[0, 1, 2, 3], [3, 2, 1, 0]]
TWO_COPIES = [[0, 1, 2, 3, 0, 1, 2, 0], [3, 2, 1, 0, 3, 3, 1, 2]]


def use_vllms_recording_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hooks do at the start of a server, undone after the test."""
    from vllm.model_executor.layers.fused_moe.router import base_router

    monkeypatch.setattr(kernel_recording, "_follows_slot_maps", True)
    if device == "cpu":
        monkeypatch.setattr(base_router, kernel_recording.STOCK_RECORDING, cpu_eplb.map_and_record)


def make_model(
    slots: list[list[int]] = ONE_COPY,
    *,
    sequence_parallel: bool = False,
    gathered: bool = False,
    device: str = "cpu",
) -> Any:
    """An EplbModelState with the slot map in force, and vLLM's routers in its model's layers."""
    from vllm.distributed.eplb.eplb_state import EplbLayerState, _commit_eplb_maps

    num_slots = len(slots[0])
    load = torch.zeros(LAYERS, num_slots, dtype=torch.int32, device=device)
    copies = torch.full((LAYERS, EXPERTS, num_slots), -1, device=device)
    num_copies = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64, device=device)
    num_tokens = [torch.tensor(0, dtype=torch.int32, device=device)]
    layers = []
    for index in range(LAYERS):
        layer_state = EplbLayerState(load[index], copies[index], num_copies[index])
        layer_state.should_record_tensor = torch.tensor(True, device=device)
        layer_state.num_unpadded_tokens_tensors = num_tokens
        router = make_router(layer_state)
        config = SimpleNamespace(is_sequence_parallel=sequence_parallel)
        layers.append(
            SimpleNamespace(
                is_monolithic=False,
                do_naive_dispatch_combine=gathered,
                moe_config=config,
                router=router,
                eplb_state=layer_state,
            )
        )
    model = SimpleNamespace(num_moe_layers=LAYERS, num_logical_experts=EXPERTS, moe_layers=layers)
    state = SimpleNamespace(
        model=model,
        model_name="tiny",
        rebalanced=False,
        expert_load_pass=load,
        physical_to_logical_map=torch.zeros(LAYERS, num_slots, dtype=torch.int64, device=device),
        logical_to_physical_map=copies,
        logical_replica_count=num_copies,
        num_unpadded_tokens_tensors=num_tokens,
    )
    _commit_eplb_maps(state, torch.tensor(slots))
    return state


def make_router(layer_state: Any) -> Any:
    """One whose picks are its router logits, so that a test says what is picked."""
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    class GivenPicks(BaseRouter):
        routing_method_type = RoutingMethodType.Default

        def _compute_routing(
            self, hidden_states: Any, router_logits: Any, indices_type: Any, *, input_ids: Any = None
        ) -> Any:
            return router_logits.to(torch.float32), router_logits

    return GivenPicks(2, EXPERTS, layer_state)


def route(state: Any, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
    """Slots [T, K] that vLLM's router sends the picks [T, K] to."""
    slots: torch.Tensor = state.model.moe_layers[layer].router.select_experts(topk_ids, topk_ids)[1]
    return slots


def random_picks(rows: int, seed: int = 0) -> torch.Tensor:
    """Two different experts in each row, int32 [rows, 2]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, EXPERTS, generator=generator).topk(2).indices.to(torch.int32)


def make_recording(state: Any, place: RankPlace, **options: Any) -> tuple[KernelRecording, torch.Tensor]:
    """A recording in force in the model's routers, and its counters [L, S, E]."""
    counts = torch.zeros(
        LAYERS, place.num_sources, EXPERTS, dtype=torch.int64, device=state.expert_load_pass.device
    )
    topology: Topology = place.topology(nodes=1)
    recording = KernelRecording(state, place, counts, topology, compare=options.pop("compare", False))
    recording.attach()
    return recording, counts


def histogram(topk_ids: torch.Tensor, rows: int) -> list[int]:
    """Picks of each expert in the first `rows` rows, by plain Python."""
    picks = topk_ids[:rows].flatten().tolist()
    return [picks.count(expert) for expert in range(EXPERTS)]
