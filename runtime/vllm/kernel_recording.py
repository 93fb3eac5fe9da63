"""Recording by `map_and_count`: it takes the place of vLLM's recording function in every MoE layer of a model.

Where routing happens in vLLM 0.32 (`MoERunner._forward_impl`): experts with a dispatch of their own (modular
kernels) choose before it, so the rows are this rank's own tokens and the source is its DP group. Others gather all
ranks' rows first: then every rank maps every row in the same way, and counts those of its own source only.

The counters, the tables and the flag keep their addresses: CUDA graphs that were captured go on recording into the
running window, and follow every new slot map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gimbal_kernels.counting import ReplicaMap, map_and_count
from gimbal_kernels.counting.record import ID_TYPES
from gimbal_kernels.counting.replica_tables import SHARE_BITS
from gimbal_kernels.topology import Topology

from ..service import nearest_shares
from .guard import Fuse, expect, logger
from .loads_recording import LoadsRecording
from .rank_place import RankPlace

ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"
STOCK_RECORDING = "eplb_map_to_physical_and_record"
MAPPING = "_apply_eplb_mapping"
MAX_TABLE_BYTES = 1 << 30


class KernelRecording:
    """Maps and counts in all MoE layers of one model on one rank.

    vLLM's own load counters are written too, and hold at the end of a step what vLLM would have recorded:
    `drop_load` clears them in the steps in which it records nothing. The source matrix does not depend on that.

    Args:
        state: vLLM's EplbModelState.
        place: of this rank.
        counts: int64 [L, S, E], a window's recording counters.
        topology: distances [S, R].
        compare: record by vLLM's own function as well, into counters of its own, and compare window by window.
        weighted: make tables that can take shares; until they do, the nearest copies serve.

    Raises:
        ValueError: vLLM's slot map is not one.
    """

    def __init__(
        self,
        state: Any,
        place: RankPlace,
        counts: torch.Tensor,
        topology: Topology,
        *,
        compare: bool,
        weighted: bool = False,
    ) -> None:
        load = state.expert_load_pass
        slots, experts = state.physical_to_logical_map, state.model.num_logical_experts
        self.tables = ReplicaMap.from_slots(
            slots,
            topology,
            num_experts=experts,
            device=load.device,
            shares=nearest_shares(slots.cpu().numpy(), topology, experts) if weighted else None,
        )
        self.enabled = torch.zeros((), dtype=torch.bool, device=load.device)
        """On the device, true between the preparation of a real step and its end: what warm-up and idle steps
        route is mapped and not counted."""
        self.fuse = Fuse("recording", "plain torch goes on with the same tables and counters")
        self._state, self._place, self._counts, self._load = state, place, counts, load
        self._slices = bool(state.model.moe_layers[0].moe_config.is_sequence_parallel)
        self._is_on = False
        self._comparison = Comparison(state, self.enabled) if compare else None
        self._forward_context = expect("vllm.forward_context", "get_forward_context")

    def attach(self) -> None:
        """Replaces the mapping of this model's routers; other models, and other servers, keep vLLM's own."""
        for index, layer in enumerate(self._state.model.moe_layers):
            setattr(layer.router, MAPPING, self._mapping(index, layer))

    def _mapping(self, index: int, layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        layer_state = layer.eplb_state
        record = self._record_gathered if layer.do_naive_dispatch_combine else self._record
        micro_batch = expect(ROUTER, "dbo_current_ubatch_id")

        def apply(topk_ids: torch.Tensor) -> torch.Tensor:
            num_tokens = layer_state.num_unpadded_tokens_tensors[micro_batch()]
            if torch.compiler.is_compiling():
                return record(topk_ids, index, num_tokens, "auto")
            # All ranks of a DP group must map alike: what stands in uses the same tables by the same rule.
            return self.fuse.run(
                lambda: record(topk_ids, index, num_tokens, "auto"),
                lambda: record(topk_ids, index, num_tokens, "torch"),
            )

        return apply

    def _record(self, topk_ids: torch.Tensor, index: int, num_tokens: Any, backend: str) -> torch.Tensor:
        """Slots [T, K] of this rank's own tokens."""
        if self._slices:
            num_tokens = self._place.unpadded_rows(num_tokens, topk_ids.shape[0])
        slots = self._map(topk_ids, index, self._place.source, num_tokens, backend)
        if self._comparison is not None:
            self._comparison.fuse.attempt(self._comparison.record, topk_ids, index, num_tokens)
        return slots

    def _record_gathered(
        self, topk_ids: torch.Tensor, index: int, num_tokens: Any, backend: str
    ) -> torch.Tensor:
        """Slots [T, K] of all ranks' rows, one rank's after the other's; this rank's own rows are counted.

        Rows are numbered from each rank's first one, so that every rank chooses the same copy for a pick.
        """
        sizes = self._forward_context().dp_metadata.local_sizes
        per_source = len(sizes) // self._place.num_sources  # slices of a group's tokens, or one
        own = self._place.source if per_source == 1 else self._place.rank
        parts = []
        for rank, ids in enumerate(topk_ids.split(sizes)):
            limit: Any = 0
            if rank == own:
                limit = self._place.unpadded_rows(num_tokens, ids.shape[0]) if self._slices else num_tokens
            parts.append(self._map(ids, index, rank // per_source, limit, backend))
        return torch.cat(parts)

    def _map(
        self, topk_ids: torch.Tensor, index: int, source: int, num_tokens: Any, backend: str
    ) -> torch.Tensor:
        is_known = topk_ids.dtype in ID_TYPES
        slots: torch.Tensor = map_and_count(
            topk_ids if is_known else topk_ids.to(torch.int64),
            self.tables,
            self._counts,
            layer=index,
            source=source,
            physical_load=self._load,
            num_tokens=num_tokens,
            enabled=self.enabled,
            backend=backend,
        )
        return slots if is_known else slots.to(topk_ids.dtype)

    def before_forward(self) -> None:
        """Counting is on from here to the end of the step; a drafter's several passes all count."""
        if not self._is_on:
            self._is_on = True
            self.enabled.fill_(True)
        if self._comparison is not None:
            self._comparison.loads.before_forward()

    def after_forward(self, *, is_dummy: bool) -> torch.Tensor | None:
        """Picks [L, P] of the step that just ran; None for a dummy, or without a pass."""
        if self._comparison is not None:
            self._comparison.loads.after_forward(is_dummy=is_dummy)
        if not self._is_on:
            return None
        self._is_on = False
        self.enabled.fill_(False)
        if is_dummy:
            # vLLM's second model runner prepares dummy steps like real ones and says so afterwards only.
            row = self._counts[:, self._place.source]
            row.scatter_add_(1, self._state.physical_to_logical_map.long(), -self._load.to(row.dtype))
            return None
        return self._load

    def drop_load(self) -> None:
        """The step that just ran is none of those that vLLM records."""
        self._load.zero_()

    def follow(self, slots: Any, layer: int | None) -> None:
        """vLLM has committed a slot map: [L, P] on the host, or [P] of one layer."""
        try:
            self.tables.update(slots, layer=layer)
        except Exception:
            # The weights have moved: tables that stay behind would send tokens to the wrong experts.
            logger.exception("Gimbal: no nearest-first tables for the new slot map, its copies take turns")
            self._copy_vllms_tables()

    def _copy_vllms_tables(self) -> None:
        """The same for every source.

        An expert that has no slot in vLLM's map gets slot 0: backends trust their tables, and a count of 0 or a
        slot of -1 in them would end the process.
        """
        copies = self._state.logical_to_physical_map[:, :, : self.tables.max_replicas].clamp_min(0)
        self.tables.replicas.copy_(copies[:, None].expand_as(self.tables.replicas))
        count = self._state.logical_replica_count.clamp(1, self.tables.max_replicas)
        self.tables.nearest.copy_(count[:, None].expand_as(self.tables.nearest))
        self.tables.slots.copy_(self._state.physical_to_logical_map)
        if self.tables.thresholds is not None:  # even shares
            ends = torch.arange(1, self.tables.max_replicas + 1, device=count.device) << SHARE_BITS
            self.tables.thresholds.copy_(ends.expand_as(self.tables.thresholds))

    def leave_on(self) -> None:
        """Nobody counts any more, but vLLM's own policy goes on reading its counters."""
        self.enabled.fill_(True)

    def close(self, own: torch.Tensor) -> None:
        """A window ends; own [L, E]: what this rank has counted in it."""
        if self._comparison is not None and not self._comparison.fuse.blown:
            picks, differing = self._comparison.close(own)
            logger.info(
                "Gimbal recording on EP rank %d: %d of %d picks differ from vLLM's own recording",
                self._place.rank,
                differing,
                picks,
            )

    def forget(self) -> None:
        """Drops the pass that is being recorded, and what there is to compare."""
        self._is_on = False
        self.enabled.fill_(False)
        if self._comparison is not None:
            self._comparison.loads.forget()
            self._comparison.row.zero_()


class Comparison:
    """vLLM's own recording beside ours, with counters of its own; for tests.

    Args:
        state: vLLM's EplbModelState.
        enabled: bool scalar on the device, whether the running step counts.
    """

    def __init__(self, state: Any, enabled: torch.Tensor) -> None:
        model = state.model
        self.fuse = Fuse("recording-comparison", "nothing is compared any more")
        self._state, self._enabled = state, enabled
        self._stock = expect(ROUTER, STOCK_RECORDING)
        self._load = torch.zeros_like(state.expert_load_pass)
        self.row = torch.zeros(
            model.num_moe_layers, model.num_logical_experts, dtype=torch.int64, device=self._load.device
        )
        self.loads = LoadsRecording(self._load, state.physical_to_logical_map, self.row)

    def record(self, topk_ids: torch.Tensor, index: int, num_tokens: Any) -> None:
        """One layer's ids [T, K] of one pass; where they are sent is not used."""
        self._stock(
            topk_ids=topk_ids,
            expert_load_view=self._load[index],
            logical_to_physical_map=self._state.logical_to_physical_map[index],
            logical_replica_count=self._state.logical_replica_count[index],
            record_enabled=self._enabled,
            num_unpadded_tokens=num_tokens,
        )

    def close(self, own: torch.Tensor) -> tuple[int, int]:
        """Picks of the window by vLLM's recording, and by how many `own` [L, E] differs, cell by cell."""
        picks, differing = int(self.row.sum()), int((own - self.row).abs().sum())
        self.row.zero_()
        return picks, differing


_follows_slot_maps = False


def note_slot_maps_are_followed() -> None:
    """The hook that tells of every committed slot map is in force."""
    global _follows_slot_maps
    _follows_slot_maps = True


def reason_not_to_record(
    state: Any, place: RankPlace, *, compare: bool, weighted: bool = False
) -> str | None:
    """Why vLLM's recording function cannot be replaced in this model, or None."""
    if not _follows_slot_maps:
        return "new slot maps would go unnoticed (hook 'slot-maps' is not active)"
    router_class = expect(ROUTER, "BaseRouter")
    for layer in state.model.moe_layers:
        router = getattr(layer, "router", None)
        if not isinstance(router, router_class) or layer.eplb_state is None:
            return f"its router ({type(router).__name__}) does not map through vLLM's BaseRouter"
        if layer.do_naive_dispatch_combine and compare:
            return "vLLM's own recording has no single source to compare with where tokens are gathered first"
    if not state.expert_load_pass.is_contiguous():
        return "vLLM's load counters are not contiguous"
    layers, slots = state.physical_to_logical_map.shape
    experts = state.model.num_logical_experts
    size = (8 if weighted else 4) * layers * place.num_sources * experts * (slots - experts + 1)
    if size > MAX_TABLE_BYTES:
        return f"its tables of copies would take {size >> 20} MiB, more than {MAX_TABLE_BYTES >> 20}"
    return None
