"""Where one EP rank stands among the DP groups, and which of its group's tokens it routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gimbal_kernels.topology import Topology

from .guard import expect, warn_once


@dataclass(frozen=True)
class RankPlace:
    """Ranks of a DP group, a source, are consecutive in the EP group.

    source: index of this rank's DP group, 0 to num_sources - 1.
    tp_rank, tp_size: its place among the ranks of that group, and their number.
    """

    source: int
    num_sources: int
    num_ranks: int
    tp_rank: int
    tp_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the EP group, which logs and writes for all."""
        return self.source == 0 and self.tp_rank == 0

    @property
    def rank(self) -> int:
        """Of the EP group."""
        return self.source * self.tp_size + self.tp_rank

    def topology(self, nodes: int) -> Topology:
        """Ranks in node order, sources on consecutive ranks; `nodes` that do not divide the ranks count as one."""
        if self.num_ranks % nodes:
            warn_once(
                f"Gimbal: {self.num_ranks} EP ranks do not divide among {nodes} nodes, all count as near"
            )
            nodes = 1
        return Topology.grid(nodes=nodes, gpus_per_node=self.num_ranks // nodes, sources=self.num_sources)

    def counts(self, *, sequence_parallel: bool) -> bool:
        """Whether this rank's picks go into its source's row.

        The TP ranks of a group route the same tokens: the first one's are kept. Under sequence-parallel MoE they
        route slices of them, which add up.
        """
        return sequence_parallel or self.tp_rank == 0

    def unpadded_rows(self, num_unpadded: torch.Tensor, rows: int) -> torch.Tensor:
        """How many of this rank's `rows` rows are tokens, under sequence-parallel MoE.

        Args:
            num_unpadded: int scalar tensor, tokens of the whole group; the group's padded batch is cut into
                `tp_size` slices of `rows` rows, the padding last.
        """
        return (num_unpadded - self.tp_rank * rows).clamp(0, rows)


def place_of_this_rank(parallel_config: Any) -> RankPlace:
    """Reads the rank's place from vLLM's groups.

    Raises:
        ValueError: the EP ranks do not divide among the DP groups.
    """
    ep_group = expect("vllm.distributed.parallel_state", "get_ep_group")()
    num_ranks, num_sources = ep_group.world_size, parallel_config.data_parallel_size
    if num_ranks % num_sources:
        raise ValueError(f"{num_ranks} EP ranks do not divide among {num_sources} DP groups")
    tp_size = num_ranks // num_sources
    return RankPlace(
        source=ep_group.rank_in_group // tp_size,
        num_sources=num_sources,
        num_ranks=num_ranks,
        tp_rank=ep_group.rank_in_group % tp_size,
        tp_size=tp_size,
    )


def reason_not_to_count(parallel_config: Any) -> str | None:
    """Why source rows cannot be had from this server's layout, or None."""
    if parallel_config.enable_elastic_ep:
        return "elastic expert parallelism changes the ranks while serving"
    if parallel_config.prefill_context_parallel_size > 1:
        return "prefill context parallelism splits a source's tokens in another way"
    return None


def reason_not_to_count_model(model: Any) -> str | None:
    """Why source rows cannot be had from this model's MoE layers, or None."""
    for layer in model.moe_layers:
        known = all(
            hasattr(layer, name) for name in ("is_monolithic", "do_naive_dispatch_combine", "moe_config")
        )
        if not known:
            return f"its experts ({type(layer).__name__}) are not run by vLLM's MoE runner"
        if layer.is_monolithic:
            return "its fused kernel routes by itself and records nothing"
    return None


def reason_not_to_read_loads(model: Any) -> str | None:
    """Why vLLM's load counters are not a source row, or None."""
    if any(layer.do_naive_dispatch_combine for layer in model.moe_layers):
        return "its tokens are gathered before they are routed"
    return None
