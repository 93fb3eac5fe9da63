"""Platform layer: data-parallel expert parallelism on vLLM's CPU platform.

vLLM 0.32 lets a CPU server start with data and expert parallelism and fails at the first request: its CPU
communicator has no variable-length gather, and its CPU experts ignore the expert map. This layer supplies both,
so that a loop written for GPUs can be run and tested on any machine. It is active on the CPU platform only and
in every mode, `off` included. `cpu_eplb` adds expert load balancing on top.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .guard import Hook, expect


def _gather_rows(communicator: Any, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    """Concatenates `rows` [n_r, ...] of every rank r; gloo gathers equal shapes only, so short ranks are padded."""
    group, world = communicator.device_group, communicator.world_size
    rows = rows.contiguous()
    longest = rows.shape[0] if sizes is None else max(sizes)
    if rows.shape[0] < longest:
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        rows = padded
    gathered = rows.new_empty((longest * world, *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows, group=group)
    if sizes is None or min(sizes) == longest:
        return gathered
    return torch.cat([gathered[r * longest : r * longest + n] for r, n in enumerate(sizes)])


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if dim != 0:
        raise ValueError(f"dim: {dim}; valid on the CPU platform: 0")
    if isinstance(input_, list):
        return [_gather_rows(self, rows, sizes) for rows in input_]
    return _gather_rows(self, input_, sizes)


def _reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Sums `input_` [n, ...] over the ranks in float32 and keeps this rank's rows."""
    if dim not in (0, -input_.dim()):
        raise ValueError(f"dim: {dim}; valid on the CPU platform: 0")
    total = input_.to(torch.float32, copy=True).contiguous()
    dist.all_reduce(total, group=self.device_group)
    if sizes is None:
        sizes = [total.shape[0] // self.world_size] * self.world_size
    first = sum(sizes[: self.rank_in_group])
    return total[first : first + sizes[self.rank_in_group]].to(input_.dtype)


def _install_communicator() -> None:
    module = "vllm.distributed.device_communicators.cpu_communicator"
    communicator = expect(module, "CpuCommunicator")
    for name, function in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if name not in vars(communicator):  # a later vLLM may bring its own
            setattr(communicator, name, function)


def _install_experts() -> None:
    parameters = ["self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"]
    parameters += ["activation", "global_num_experts", "expert_map"]
    module = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
    stock = expect(module, "CPUUnquantizedExperts.apply", parameters)

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if expert_map is not None:
            # The kernel indexes this rank's weights: translate, and give other ranks' picks weight 0.
            local = expert_map.to(torch.long)[topk_ids.to(torch.long)]
            mine = local >= 0
            topk_ids = torch.where(mine, local, 0).to(torch.int32).contiguous()
            topk_weights = torch.where(mine, topk_weights, 0.0).to(torch.float32).contiguous()
        return stock(
            self,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            *args,
            **kwargs,
        )

    expect(module, "CPUUnquantizedExperts").apply = apply


HOOKS = (
    Hook("cpu-communicator", _install_communicator),
    Hook("cpu-expert-map", _install_experts),
)
