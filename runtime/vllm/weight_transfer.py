"""Hook: experts travel between ranks by this project's plans and executors, in both of vLLM's EPLB modes.

After vLLM has set up a model for its balancer, the ranks choose an executor together and its communicator takes
the place of vLLM's. The two functions that vLLM calls to move weights then lead to it. For a model or server
that does not fit, all ranks stay with vLLM's own transfer, and one warning says why.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config import GimbalConfig
from .guard import Hook, HookMismatch, expect, logger, patch, warn_once
from .settings import config_for
from .source_rows import gather
from .weight_transfer_choice import choose, make_executor, offer
from .weight_transfer_communicator import ExecutorCommunicator, StagedLayer
from .weight_transfer_tensors import collect

EPLB = "vllm.distributed.eplb"


def communicator_for(state: Any, config: GimbalConfig) -> ExecutorCommunicator | None:
    """A collective while a model is loaded: the communicator of one rank, or None on all of them.

    Args:
        state: vLLM's EplbModelState of the model.

    Raises:
        ValueError: ranks with other settings, or a way that this server cannot have.
        RuntimeError: `strict`, and the model's experts cannot be moved by an executor.
    """
    if not config.places_experts:  # the same on all ranks: source rows see to that
        return None
    weights, unfit = None, None
    setting = config.migration
    device = state.model.expert_weights[0][0].device.type
    if setting != "stock":
        try:
            weights = collect(state.model.moe_layers, state.model.expert_weights)
        except Exception as error:
            unfit = f"{type(error).__name__}: {error}"
    offers = gather(offer(setting, config.migration_timeout, device, unfit))
    way, reason = choose(offers)
    if reason is None and way != "stock":
        assert weights is not None
        executor, failure = None, None
        group = expect("vllm.distributed.parallel_state", "get_eplb_group")().cpu_group
        try:
            executor = make_executor(way, weights, offers, group, gather)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = [
            f"rank {rank}: {other}" for rank, other in enumerate(gather(failure)) if other is not None
        ]
        if executor is not None and not failures:
            _say(state, way, executor)
            machines = [other.machine for other in offers]
            nodes = [machines.index(machine) for machine in machines]
            return ExecutorCommunicator(weights, executor, node_of_rank=nodes, gather=gather)
        if executor is not None:
            executor.close()
        reason = failures[0]
    if reason is not None:
        message = f"Gimbal leaves the transfer of experts of {state.model_name} to vLLM: {reason}"
        if config.strict:
            raise RuntimeError(message)
        warn_once(message)
    return None


def _say(state: Any, way: str, executor: Any) -> None:
    if executor.rank == 0:
        logger.info(
            "Gimbal moves experts of %s by %s; staging on each rank: %d bytes, two buffers of %d experts",
            *(state.model_name, way, executor.staging_bytes, executor.rows),
        )


def _ours(communicator: Any) -> bool:
    return isinstance(communicator, ExecutorCommunicator)


def _install_models() -> None:
    """The communicator's place: set when a model is added."""
    state_class = expect(f"{EPLB}.eplb_state", "EplbState")
    add_model = expect(f"{EPLB}.eplb_state", "EplbState.add_model", ["self", "model", "model_config"])
    update = expect(
        f"{EPLB}.eplb_state", "EplbState.update_communicator", ["self", "model_config", "communicator"]
    )
    current_config = expect("vllm.config", "get_current_vllm_config")
    for name in ("communicator", "expert_buffer", "model"):
        if name not in expect(f"{EPLB}.eplb_state", "EplbModelState").__dataclass_fields__:
            raise HookMismatch(f"EplbModelState has no {name}")

    def eplb_add_model(self: Any, model: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        add_model(self, model, model_config, *args, **kwargs)
        config = config_for(current_config())
        if self.parallel_config.enable_elastic_ep:
            if config.places_experts and config.migration not in ("auto", "stock"):
                warn_once("Gimbal leaves the transfer of experts to vLLM: elastic EP changes the ranks")
            return
        state = self.model_states[model_config.compute_hash()]
        with torch.inference_mode(False):  # staging is written to in and outside of it
            communicator = communicator_for(state, config)
        if communicator is not None:
            update(self, model_config, communicator)
            state.expert_buffer = []  # the executor has staging of its own

    state_class.add_model = eplb_add_model


def _wrap_synchronous() -> Any:
    names = ["old_global_expert_indices", "new_global_expert_indices", "expert_weights", "expert_buffer"]
    names += ["ep_group", "communicator", "is_profile", "rank_mapping"]
    stock = expect(f"{EPLB}.rebalance_execute", "rearrange_expert_weights_inplace", names)

    def rearrange_expert_weights_inplace(
        old_global_expert_indices: torch.Tensor,
        new_global_expert_indices: torch.Tensor,
        expert_weights: Any,
        expert_buffer: Any,
        ep_group: Any,
        communicator: Any,
        is_profile: bool = False,
        rank_mapping: dict[int, int] | None = None,
    ) -> None:
        if not _ours(communicator):
            stock(
                old_global_expert_indices,
                new_global_expert_indices,
                expert_weights,
                expert_buffer,
                ep_group,
                communicator,
                is_profile,
                rank_mapping,
            )
        elif not is_profile:  # which only reserves memory; staging is there already
            communicator.rearrange(old_global_expert_indices, new_global_expert_indices)

    return rearrange_expert_weights_inplace


def _wrap_planning() -> Any:
    names = ["model_state", "eplb_state", "physical_to_logical_map_cpu", "stream"]
    stock = expect(f"{EPLB}.async_worker", "run_rebalance_experts", names)

    def run_rebalance_experts(
        model_state: Any, eplb_state: Any, physical_to_logical_map_cpu: torch.Tensor, stream: Any
    ) -> torch.Tensor:
        new: torch.Tensor = stock(model_state, eplb_state, physical_to_logical_map_cpu, stream)
        if _ours(model_state.communicator):
            model_state.communicator.plan_ahead(physical_to_logical_map_cpu, new)
        return new

    return run_rebalance_experts


def _wrap_staging() -> Any:
    names = ["old_layer_indices", "new_layer_indices", "expert_weights", "expert_weights_buffer"]
    names += ["ep_group", "communicator", "is_profile", "stream", "rank_mapping", "layer_idx"]
    stock = expect(f"{EPLB}.async_worker", "transfer_layer", names)

    def transfer_layer(
        old_layer_indices: torch.Tensor,
        new_layer_indices: torch.Tensor,
        *args: Any,
        communicator: Any,
        layer_idx: int = 0,
        **kwargs: Any,
    ) -> Any:
        if _ours(communicator):
            return communicator.stage(layer_idx, old_layer_indices, new_layer_indices)
        kwargs |= {"communicator": communicator, "layer_idx": layer_idx}
        return stock(old_layer_indices, new_layer_indices, *args, **kwargs)

    return transfer_layer


def _wrap_commit() -> Any:
    names = ["expert_weights", "expert_weights_buffers", "transfer_metadata", "new_indices", "ep_rank"]
    stock = expect(f"{EPLB}.eplb_state", "move_from_buffer", names)
    expect(f"{EPLB}.eplb_state", "_move_to_workspace", ["model_state", "ep_rank"])

    def move_from_buffer(
        expert_weights: Any, expert_weights_buffers: Any, transfer_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(transfer_metadata, StagedLayer):
            transfer_metadata.commit()
        else:
            stock(expert_weights, expert_weights_buffers, transfer_metadata, *args, **kwargs)

    return move_from_buffer


def _install() -> None:
    rearrange, planning, staging, commit = (
        _wrap_synchronous(),
        _wrap_planning(),
        _wrap_staging(),
        _wrap_commit(),
    )
    expect("vllm.distributed.parallel_state", "get_eplb_group")
    _install_models()
    patch(f"{EPLB}.eplb_state", "rearrange_expert_weights_inplace", rearrange)
    patch(f"{EPLB}.eplb_state", "move_from_buffer", commit)
    patch(f"{EPLB}.async_worker", "run_rebalance_experts", planning)
    patch(f"{EPLB}.async_worker", "transfer_layer", staging)


HOOKS = (Hook("weight-transfer", _install),)
