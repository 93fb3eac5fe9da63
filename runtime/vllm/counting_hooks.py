"""Hook: where vLLM's steps, models and rearrangements reach the source rows."""

from __future__ import annotations

from typing import Any

import torch

from . import source_rows
from .guard import Hook, HookMismatch, expect, patch
from .kernel_recording import ROUTER
from .kernel_recording import STOCK_RECORDING as RECORD
from .settings import config_for
from .source_rows import rows_of, rows_of_this_process, start_counting

STATE = "vllm.distributed.eplb.eplb_state"
RECORD_PARAMETERS = [
    "topk_ids",
    "expert_load_view",
    "logical_to_physical_map",
    "logical_replica_count",
    "record_enabled",
    "num_unpadded_tokens",
]
METHODS = {
    "__init__": ["self", "parallel_config", "device"],
    "add_model": ["self", "model", "model_config"],
    "prepare_forward": ["self", "model_config", "num_unpadded_tokens"],
    "step": ["self", "is_dummy", "is_profile", "log_stats"],
    "rearrange": ["self", "is_profile"],
    "_should_record_current_step": ["self"],
    "_update_layer_should_record": ["self"],
}


def _own_unpadded(load_view: torch.Tensor, num_unpadded: torch.Tensor | None, rows: int) -> Any:
    """The count of unpadded rows that this rank's slice has, for the layer that `load_view` belongs to.

    vLLM hands every TP rank the count of the whole group, also under sequence-parallel MoE.
    """
    all_rows = rows_of_this_process()
    if all_rows is None or num_unpadded is None or not all_rows.has_slices:
        return num_unpadded

    def own() -> Any:
        storage = load_view.untyped_storage().data_ptr()
        for model in all_rows.counted():
            load = model.state.expert_load_pass
            if model.sequence_parallel and load.untyped_storage().data_ptr() == storage:
                return all_rows.place.unpadded_rows(num_unpadded, rows)
        return num_unpadded

    return all_rows.fuse.run(own, lambda: num_unpadded)


def _install_recording() -> None:
    stock = expect(ROUTER, RECORD, RECORD_PARAMETERS)

    def record(
        topk_ids: torch.Tensor,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
        record_enabled: torch.Tensor,
        num_unpadded_tokens: torch.Tensor | None = None,
    ) -> Any:
        return stock(
            topk_ids=topk_ids,
            expert_load_view=expert_load_view,
            logical_to_physical_map=logical_to_physical_map,
            logical_replica_count=logical_replica_count,
            record_enabled=record_enabled,
            num_unpadded_tokens=_own_unpadded(expert_load_view, num_unpadded_tokens, topk_ids.shape[0]),
        )

    patch(ROUTER, RECORD, record)


def _check() -> None:
    """Looks up all that is changed, and changes nothing."""
    for name in ("expert_load_pass", "physical_to_logical_map", "model_name", "rebalanced"):
        if name not in expect(STATE, "EplbModelState").__dataclass_fields__:
            raise HookMismatch(f"EplbModelState has no {name}")
    runner = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
    expect(runner, "MoERunner.is_monolithic")
    expect(runner, "MoERunner.do_naive_dispatch_combine")
    expect("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig.is_sequence_parallel")
    for name, parameters in METHODS.items():
        expect(STATE, f"EplbState.{name}", parameters)
    expect(ROUTER, RECORD, RECORD_PARAMETERS)
    expect("vllm.config.utils", "compute_hash_cached")
    expect("vllm.config", "get_current_vllm_config")
    expect("vllm.v1.worker.gpu_worker", "Worker.shutdown", ["self"])
    _warming_class()


def _warming_class() -> Any:
    """The worker class whose warm-up is the last thing before serving; the CPU's has one of its own."""
    if expect("vllm.platforms", "current_platform").is_cpu():
        module, name = "vllm.v1.worker.cpu_worker", "CPUWorker"
    else:
        module, name = "vllm.v1.worker.gpu_worker", "Worker"
    expect(module, f"{name}.compile_or_warm_up_model", ["self"])
    return expect(module, name)


def _install_models() -> None:
    """A state is made, a model is added to it."""
    state_class = expect(STATE, "EplbState")
    init, add_model = state_class.__init__, state_class.add_model
    current_config = expect("vllm.config", "get_current_vllm_config")

    def state_init(self: Any, parallel_config: Any, device: torch.device) -> None:
        init(self, parallel_config, device)
        start_counting(self, config_for(current_config()))

    def eplb_add_model(self: Any, model: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        add_model(self, model, model_config, *args, **kwargs)
        rows = rows_of(self)
        if rows is not None:
            rows.add(model_config.compute_hash())

    state_class.__init__ = state_init
    state_class.add_model = eplb_add_model


def _install_steps() -> None:
    """A forward pass, the end of its step, a rearrangement."""
    state_class = expect(STATE, "EplbState")
    prepare, step, rearrange = state_class.prepare_forward, state_class.step, state_class.rearrange
    should_record = state_class._should_record_current_step
    model_key = expect("vllm.config.utils", "compute_hash_cached")

    def prepare_forward(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        prepare(self, model_config, *args, **kwargs)
        rows = rows_of(self)
        if rows is not None:
            rows.fuse.attempt(lambda: rows.before_forward(model_key(model_config)))

    def eplb_step(
        self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        rows = rows_of(self)
        if rows is not None and is_profile:
            rows.after_profile()
        elif rows is not None:
            vllm_records = self._should_record_current_step(log_stats=log_stats)
            rows.after_step(is_dummy=is_dummy, vllm_records=vllm_records)
        step(self, is_dummy, is_profile, log_stats)
        if rows is not None:
            rows.note_finished()

    def eplb_rearrange(self: Any, is_profile: bool = False, *args: Any, **kwargs: Any) -> Any:
        rows = rows_of(self)
        if rows is not None and not is_profile:
            rows.close_windows()
        return rearrange(self, is_profile, *args, **kwargs)

    def should_record_current_step(self: Any, log_stats: bool = False) -> bool:
        # vLLM records only the last steps before a rearrangement; a source row that is read off its counters needs
        # all of them. The sliding window that vLLM's own policy reads holds the latest steps either way.
        rows = rows_of(self)
        return (rows is not None and rows.reads_loads) or should_record(self, log_stats)

    state_class.prepare_forward = prepare_forward
    state_class.step = eplb_step
    state_class.rearrange = eplb_rearrange
    state_class._should_record_current_step = should_record_current_step


def _install_worker() -> None:
    """The start and the end of serving."""
    warming_class, worker_class = _warming_class(), expect("vllm.v1.worker.gpu_worker", "Worker")
    warm_up, stop_worker = warming_class.compile_or_warm_up_model, worker_class.shutdown

    def compile_or_warm_up_model(self: Any) -> Any:
        result = warm_up(self)
        rows = rows_of_this_process()
        if rows is not None:
            rows.fuse.attempt(rows.start_afresh)
            rows.shorten_first_window()
        return result

    def shutdown(self: Any) -> None:
        rows = source_rows.forget_process()
        if rows is not None:
            rows.fuse.attempt(rows.save_rest)
        stop_worker(self)

    warming_class.compile_or_warm_up_model = compile_or_warm_up_model
    worker_class.shutdown = shutdown


def _install() -> None:
    _check()
    _install_recording()
    _install_models()
    _install_steps()
    _install_worker()


HOOKS = (Hook("source-rows", _install),)
