"""Hook: Gimbal's placement as vLLM's EPLB policy.

vLLM asks its policy for a new slot map with the experts' total loads; this one looks at the closed window's source
matrix and the current slots instead. It runs on every rank (in asynchronous EPLB on the transfer thread), on the
same bytes, and returns the same bytes; the ranks compare what they came to, and unless all agree vLLM's own policy
decides on all of them. In mode `off` with `observe` it measures and lets vLLM's own policy decide.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gimbal_kernels.counting.window import ClosingWindow
from gimbal_kernels.topology import Topology

from ..balancer import Balancer, moved_copies, save_window
from .guard import Fuse, Hook, HookMismatch, expect, logger, warn_once
from .model_traffic import ModelTraffic
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


def balancer_for(rows: SourceRows, num_slots: int, nodes: int) -> Balancer:
    """Ranks in node order, sources on consecutive ranks; `nodes` that do not divide the ranks count as one."""
    num_ranks = rows.place.num_ranks
    nodes = nodes if num_ranks % nodes == 0 else 1
    topology = Topology.grid(nodes=nodes, gpus_per_node=num_ranks // nodes, sources=rows.place.num_sources)
    return Balancer(rows.config, topology, num_slots // num_ranks)


def decide(rows: SourceRows, balancer: Balancer, traffic: Any, current: Any) -> Any | None:
    """New slots [L, P] from a closed window [L, S, E] and the slots in force [L, P]; None: vLLM is to decide."""
    if not rows.config.places_experts:
        return None
    if current.shape[1] != traffic.shape[2] and rows.config.method == "paper":
        warn_once("Gimbal: spare slots are not placed by method 'paper'; vLLM's own policy decides")
        return None
    return balancer.decide(traffic, current)


def vote(slots: Any | None, *, well: bool, group: Any) -> tuple[bool, bool]:
    """A collective on the host, joined by every rank of `group`.

    Args:
        slots: what this rank came to; None: nothing.
        well: whether this rank counted all its picks.

    Returns:
        Whether all ranks came to the same slots, and whether all are well.
    """
    digest = 0 if slots is None else zlib.crc32(np.ascontiguousarray(slots, dtype=np.int64).tobytes())
    votes = torch.tensor([int(slots is not None), digest, -digest, int(well)], dtype=torch.int64)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    has_slots, lowest, highest, all_well = votes.tolist()
    return bool(has_slots) and bool(all_well) and lowest == -highest, bool(all_well)


def report(
    rows: SourceRows, model: ModelTraffic, balancer: Balancer, traffic: Any, current: Any, slots: Any
) -> None:
    """Figures for the metrics, a line in the log and, where asked, the window's file."""
    window = balancer.measure(traffic, current)
    moved = moved_copies(current, slots, balancer.slots_per_rank)
    rows.totals |= {"remote_pick_share": window.remote_pick_share, "max_over_mean": window.max_over_mean}
    rows.count("picks", window.picks)
    rows.count("experts_moved", moved)
    rows.count("bytes_moved", moved * _bytes_per_expert(model))
    rows.count("rearrangements", 1)
    if not rows.place.is_first:
        return
    index = int(rows.totals["rearrangements"])
    logger.info(
        "Gimbal window %d: %d picks, remote share %.3f, max/mean %.3f, %d experts move",
        index,
        window.picks,
        window.remote_pick_share,
        window.max_over_mean,
        moved,
    )
    if rows.config.traffic_dir is not None:
        save_window(rows.config.traffic_dir, index, traffic=traffic, current=current, slots=slots)


def _bytes_per_expert(model: ModelTraffic) -> int:
    """Of all per-expert tensors of one layer together."""
    weights = model.state.model.expert_weights[0]
    return sum(tensor[0].numel() * tensor.element_size() for tensor in weights)


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

    def ours() -> tuple[Any, ...] | None:
        taken = take_window(rows, *shape)
        if taken is None:
            return None
        model, traffic = taken[0], taken[1].wait().cpu().numpy()
        balancer = balancer_for(rows, current.shape[1], nodes)
        return decide(rows, balancer, traffic, current), model, balancer, traffic

    result = _fuse.run(ours, lambda: None)
    slots = result[0] if result is not None else None
    agreed, all_well = vote(slots, well=not (rows.fuse.blown or _fuse.blown), group=group)
    chosen = slots if agreed else stock()
    if all_well and result is not None and result[1] is rows.main():
        _, model, balancer, traffic = result
        _report_fuse.attempt(report, rows, model, balancer, traffic, current, chosen)
    return chosen


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
