"""Hook: Gimbal's placement as vLLM's EPLB policy.

vLLM asks its policy for a new slot map with the experts' total loads; this one looks at the closed window's source
matrix and the current slots instead. It runs on every rank (in asynchronous EPLB on the transfer thread), on the
same bytes, and returns the same bytes. In mode `off` with `observe` it measures and lets vLLM's own policy decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gimbal_kernels.topology import Topology

from ..balancer import Balancer, moved_copies, save_window
from .guard import Fuse, Hook, expect, logger, warn_once
from .source_rows import ModelTraffic, SourceRows, rows_of_this_process

MODULE = "vllm.distributed.eplb.policy"
_fuse = Fuse("eplb-policy")
_report_fuse = Fuse("placement-report")


def _take_traffic(rows: SourceRows, layers: int, experts: int) -> tuple[ModelTraffic, torch.Tensor] | None:
    """The closed window that belongs to this call; vLLM asks for one model after the other."""
    for model in rows.all():
        if model.closed and tuple(model.closed[0].shape[::2]) == (layers, experts):
            return model, model.closed.popleft()
    return None


def _bytes_per_expert(model: ModelTraffic) -> int:
    """Of all per-expert tensors of one layer together."""
    weights = model.state.model.expert_weights[0]
    return sum(tensor[0].numel() * tensor.element_size() for tensor in weights)


def decide(rows: SourceRows, model: ModelTraffic, traffic: Any, current: Any, nodes: int, stock: Any) -> Any:
    """New slots [L, P] from the closed window; keeps the figures and saves the window where asked.

    Args:
        traffic: [L, S, E] picks.
        current: [L, P] slots in force.
        nodes: that the ranks are spread over, evenly.
        stock: returns vLLM's own answer, an array [L, P].
    """
    config, place = rows.config, rows.place
    slots_per_rank = current.shape[1] // place.num_ranks
    topology = Topology.grid(nodes=nodes, gpus_per_node=place.num_ranks // nodes, sources=place.num_sources)
    balancer = Balancer(config, topology, slots_per_rank)
    if not config.places_experts:
        slots = stock()
    elif current.shape[1] != traffic.shape[2] and config.method == "paper":
        warn_once("Gimbal: spare slots are not placed by method 'paper'; vLLM's own policy decides")
        slots = stock()
    else:
        slots = balancer.decide(traffic, current)
    # Apart from the decision: a full disk on one rank must not make that rank decide otherwise than the others.
    _report_fuse.run(lambda: _report(rows, model, balancer, traffic, current, slots), lambda: None)
    return slots


def _report(
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
    rows.count("windows", 1)
    if rows.place.source or rows.place.tp_rank:
        return
    index = int(rows.totals["windows"])
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


def _install() -> None:
    policies = expect(MODULE, "EPLB_POLICIES")
    base = expect(MODULE, "AbstractEplbPolicy")
    state_policies = expect("vllm.distributed.eplb.eplb_state", "EPLB_POLICIES")
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
    if state_policies is not policies:
        raise AttributeError("eplb_state looks its policies up in another table")

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
            def stock() -> torch.Tensor:
                return stock_class.rebalance_experts(  # type: ignore[no-any-return]
                    weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices
                )

            def ours() -> torch.Tensor:
                rows = rows_of_this_process()
                taken = None if rows is None else _take_traffic(rows, *weight.shape)
                old = old_global_expert_indices
                # No window: a profiling call. Another shape: elastic EP is changing the number of ranks.
                if rows is None or taken is None or old is None or num_ranks != rows.place.num_ranks:
                    return stock()
                model, traffic = taken
                if tuple(old.shape) != (weight.shape[0], num_replicas) or bool((old < 0).any()):
                    return stock()
                nodes = num_nodes if num_ranks % num_nodes == 0 else 1
                slots = decide(
                    rows, model, traffic.cpu().numpy(), old.cpu().numpy(), nodes, lambda: stock().numpy()
                )
                return torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int64))

            return _fuse.run(ours, stock)

    policies["default"] = GimbalPolicy


HOOKS = (Hook("eplb-policy", _install),)
