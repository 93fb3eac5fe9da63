"""Hook: Gimbal's placement as vLLM's EPLB policy.

vLLM asks its policy for a new slot map with the experts' total loads; this one looks at the closed window's source
matrix and the current slots instead. It runs on every rank (in asynchronous EPLB on the transfer thread), on the
same bytes, and returns the same bytes; the ranks compare what they came to, and unless all agree vLLM's own policy
decides on all of them and all forget what they remembered of earlier windows. In mode `off` with `observe` it
measures and lets vLLM's own policy decide.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gimbal_kernels.counting.window import ClosingWindow

from ..balancer import Balancer, Decision
from .guard import Fuse, Hook, HookMismatch, expect, warn_once
from .model_traffic import ModelTraffic
from .placement_state import report, state_of
from .source_rows import SourceRows, rows_of_this_process

MODULE = "vllm.distributed.eplb.policy"
_fuse = Fuse("eplb-policy")
_report_fuse = Fuse("placement-report")


def take_window(rows: SourceRows, layers: int, experts: int) -> tuple[ModelTraffic, ClosingWindow] | None:
    """The closed window that belongs to this call; vLLM asks for one model after the other."""
    for model in rows.counted():
        if model.closed and tuple(model.window.counts.shape[::2]) == (layers, experts):
            return model, model.closed.popleft()
    return None


WITHOUT_REPLICAS = ("paper", "greedy")
"""Methods that place one copy per expert."""


def decide(rows: SourceRows, balancer: Balancer, traffic: Any, current: Any) -> Decision | None:
    """What follows from a closed window [L, S, E] and the slots in force [L, P]; None: vLLM is to decide."""
    if not rows.config.places_experts:
        return None
    if current.shape[1] != traffic.shape[2] and rows.config.method in WITHOUT_REPLICAS:
        warn_once(
            f"Gimbal: spare slots are not placed by method '{rows.config.method}'; vLLM's own policy decides"
        )
        return None
    return balancer.decide(traffic, current)


def checksum(slots: Any, balancer: Balancer) -> int:
    """Of a slot map and of the windows that it was decided from: ranks that remember others must not go on."""
    return zlib.crc32(np.ascontiguousarray(slots, dtype=np.int64).tobytes(), balancer.lineage)


def vote(digest: int | None, *, well: bool, group: Any) -> tuple[bool, bool]:
    """A collective on the host, joined by every rank of `group`.

    Args:
        digest: of what this rank came to; None: nothing.
        well: whether this rank counted all its picks.

    Returns:
        Whether all ranks came to the same, and whether all are well.
    """
    mine = 0 if digest is None else digest
    votes = torch.tensor([int(digest is not None), mine, -mine, int(well)], dtype=torch.int64)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    has_digest, lowest, highest, all_well = votes.tolist()
    return bool(has_digest) and bool(all_well) and lowest == -highest, bool(all_well)


def rebalance(
    rows: SourceRows, shape: tuple[int, int], current: Any, nodes: int, stock: Callable[[], Any], group: Any
) -> Any:
    """Slots [L, P] for one model: ours if all ranks came to the same, else vLLM's own.

    Args:
        shape: L, E of the model.
        current: [L, P] slots in force on the host.
        stock: vLLM's own answer.
        group: host process group of all ranks.
    """

    def ours() -> tuple[Decision | None, ModelTraffic, Balancer, Any] | None:
        taken = take_window(rows, *shape)
        if taken is None:
            return None
        model, traffic = taken[0], taken[1].wait().cpu().numpy()
        balancer = state_of(rows).balancer(rows, model, current.shape[1], nodes)
        return decide(rows, balancer, traffic, current), model, balancer, traffic

    result = _fuse.run(ours, lambda: None)
    decision, model, balancer, traffic = result if result is not None else (None, None, None, None)
    digest = None if decision is None or balancer is None else checksum(decision.slots, balancer)
    agreed, all_well = vote(digest, well=not (rows.fuse.blown or _fuse.blown), group=group)
    if not agreed:
        _fall_back(rows, decision)
    told = decision if agreed else None
    chosen = stock() if told is None else told.slots
    if all_well and model is not None and model is rows.main():
        _report_fuse.attempt(
            report, rows, model, balancer, traffic=traffic, current=current, slots=chosen, decision=told
        )
    return chosen


def _fall_back(rows: SourceRows, decision: Decision | None) -> None:
    """On every rank, when vLLM decides: no rank may go on from what another one does not remember."""
    _fuse.attempt(state_of(rows).forget)
    if decision is not None and rows.place.is_first:
        warn_once(
            "Gimbal: a rank came to no placement, or to another one than the rest; vLLM's own policy decides"
        )


def _install() -> None:
    policies = expect(MODULE, "EPLB_POLICIES")
    base = expect(MODULE, "AbstractEplbPolicy")
    stock_class = policies["default"]
    parameters = [
        "weight",
        "num_replicas",
        "num_groups",
        "num_nodes",
        "num_ranks",
        "old_global_expert_indices",
    ]
    expect(MODULE, "DefaultEplbPolicy.rebalance_experts", ["cls", *parameters])
    moe_config = expect("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig")
    for name in ("hidden_dim", "in_dtype"):
        if name not in moe_config.__dataclass_fields__:
            raise HookMismatch(f"FusedMoEConfig has no {name}")
    eplb_group = expect("vllm.distributed.parallel_state", "get_eplb_group")
    if expect("vllm.distributed.eplb.eplb_state", "EPLB_POLICIES") is not policies:
        raise HookMismatch("eplb_state looks its policies up in another table")

    class GimbalPolicy(base):  # type: ignore[misc, valid-type]
        @classmethod
        def rebalance_experts(
            cls,
            weight: torch.Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            def stock() -> Any:
                return stock_class.rebalance_experts(
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
                ).numpy()

            rows = rows_of_this_process()
            old = old_global_expert_indices
            # The same on all ranks: settings were compared at start-up, windows are closed at the same step.
            if rows is None or not rows.joint or old is None:
                slots = stock()
            else:
                shape = (int(weight.shape[0]), int(weight.shape[1]))
                slots = rebalance(rows, shape, old.cpu().numpy(), num_nodes, stock, eplb_group().cpu_group)
            return torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int64))

    policies["default"] = GimbalPolicy


HOOKS = (Hook("eplb-policy", _install),)
