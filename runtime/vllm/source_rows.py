"""Hook: counts picks per DP source and closes a window at every rearrangement (SPEC section 2).

Routing precedes dispatch, so what one EP rank records in a forward pass are its own tokens' picks: a source row.
Around every real forward pass the rank's recorded load is read off vLLM's counters, turned from physical slots to
logical experts and added to its DP group's row of a `TrafficWindow`. When vLLM rearranges, which all ranks do at
the same step, the window is closed: one all-reduce gives every rank the same [L, S, E].

Layouts and models where routing does not precede dispatch are not counted, and a warning says so.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from ..balancer import save_rest
from ..config import GimbalConfig
from .guard import Fuse, Hook, HookMismatch, expect, logger, patch, warn_once
from .model_traffic import ModelTraffic
from .rank_place import RankPlace, place_of_this_rank, reason_not_to_count, reason_not_to_count_model
from .settings import config_for

STATE = "vllm.distributed.eplb.eplb_state"
ROUTER = "vllm.model_executor.layers.fused_moe.router.base_router"
RECORD = "eplb_map_to_physical_and_record"
# What all ranks must agree on: a rank with other settings would reduce at other steps or place otherwise.
SHARED_SETTINGS = ("mode", "observe", "method", "alpha", "beta", "gamma", "pressure_interval")


class SourceRows:
    """All models of one rank (a main model, perhaps a drafter); kept on vLLM's EplbState.

    Args:
        eplb_state: vLLM's.
        config: the settings in force.
        place: of this rank.
        group: the EP group's process group.
    """

    def __init__(self, eplb_state: Any, config: GimbalConfig, place: RankPlace, group: Any) -> None:
        self.config = config
        self.place = place
        self.fuse = Fuse("source-rows")
        self.stood_aside = False
        """All ranks have stopped counting, at the same step, because one of them could not go on."""
        self.joint = False
        """Whether all ranks closed a window at the last rearrangement, and so will compare placements."""
        self.totals: dict[str, float] = {}
        """Figures that only grow, and those of the last closed window; written by the placement policy."""
        self._eplb_state = eplb_state
        self._group = group
        self._models: dict[str, ModelTraffic] = {}  # by vLLM's key, in vLLM's order
        self.has_slices = False
        """Whether a model routes slices of its group's tokens; asked in every MoE layer of every pass."""
        self._rearranging_since: float | None = None

    def add(self, model_key: str) -> None:
        """A model was loaded; on every rank at the same time. Unless all can count it, none does.

        Tensors are made here, before serving: later there is nothing left that could fail on one rank only.
        """
        state = self._eplb_state.model_states[model_key]
        with torch.inference_mode(False):  # they are written to in and outside of it
            result = _traffic_or_reason(state, self.place, self._group, self.config.pressure_interval)
        reason = result if isinstance(result, str) else None
        reasons = [other for other in gather(reason) if other is not None]
        if reasons:
            warn_once(f"Gimbal does not count {state.model_name}: {reasons[0]}")
        elif isinstance(result, ModelTraffic):
            self._models[model_key] = result
            self.has_slices |= result.sequence_parallel

    def counted(self) -> list[ModelTraffic]:
        """Models that are counted, in vLLM's order."""
        return [] if self.stood_aside else list(self._models.values())

    def main(self) -> ModelTraffic | None:
        """The model whose figures are reported; a drafter is the smaller one."""
        return max(self._models.values(), key=lambda model: model.window.counts.numel(), default=None)

    def start_afresh(self) -> None:
        """The server is about to serve: picks of profiling and warm-up are dropped."""
        for model in self.counted():
            model.start_afresh()

    def before_forward(self, model_key: str) -> None:
        """A forward pass of one model is about to run."""
        model = self._models.get(model_key)
        if model is not None and not self.stood_aside:
            model.before_forward()

    def after_profile(self) -> None:
        """A pass that counts for nothing has run."""
        for model in self.counted():
            model.after_forward(is_dummy=True)

    def after_step(self, *, is_dummy: bool) -> None:
        """Counts the step that just ran; then, on every rank alike, exchanges loads when that is due."""
        for model in self.counted():
            self.fuse.attempt(model.after_forward, is_dummy=is_dummy)
        well = [model.loads.end_step(well=not self.fuse.blown) for model in self.counted()]
        if not all(well):
            self.stood_aside = True
            warn_once("Gimbal: a rank can no longer count; all ranks have stopped, vLLM's own policy decides")

    def close_windows(self) -> None:
        """A collective on every rank; a window to which not all ranks could add is not used, see the policy."""
        self._rearranging_since = time.perf_counter()
        # Noted here, at the same step on all ranks: the transfer thread asks for it at a time of its own.
        self.joint = not self.stood_aside
        for model in self.counted():
            model.close()

    def note_finished(self) -> None:
        """Adds up the time from a window's close to the last layer's commit, once nothing is under way."""
        states = self._eplb_state.model_states.values()
        if self._rearranging_since is None or any(state.rebalanced for state in states):
            return
        self.count("rearrangement_seconds", time.perf_counter() - self._rearranging_since)
        self._rearranging_since = None

    def count(self, name: str, amount: float) -> None:
        """Adds to one of the totals."""
        self.totals[name] = self.totals.get(name, 0.0) + amount

    def figures(self) -> dict[str, float]:
        """All figures of this rank, for the engine's report."""
        main = self.main()
        return self.totals | (main.loads.figures if main is not None else {})

    def save_rest(self) -> None:
        """Saves what this rank has counted since the last window was closed, where windows are saved."""
        main = self.main()
        if self.config.traffic_dir is None or main is None:
            return
        rank = self.place.source * self.place.tp_size + self.place.tp_rank
        traffic = main.window.counts.cpu().numpy()
        save_rest(self.config.traffic_dir, rank, traffic=traffic, current=main.current_slots())


def _traffic_or_reason(state: Any, place: RankPlace, group: Any, interval: int) -> ModelTraffic | str:
    """The counters of a model, or why it is not counted."""
    reason = reason_not_to_count_model(state.model)
    if reason is not None:
        return reason
    try:
        return ModelTraffic(state, place, group, interval)
    except Exception as error:
        logger.exception("Gimbal: no counters for %s", state.model_name)
        return f"{type(error).__name__}: {error}"


def gather(mine: Any) -> list[Any]:
    """`mine` of every EP rank, in rank order; a collective on the host."""
    ep_group = expect("vllm.distributed.parallel_state", "get_ep_group")()
    everyone: list[Any] = [None] * ep_group.world_size
    dist.all_gather_object(everyone, mine, group=ep_group.cpu_group)
    return everyone


_of_this_process: SourceRows | None = None


def rows_of_this_process() -> SourceRows | None:
    """The source rows of the worker in this process, or None; a worker has one EplbState."""
    return _of_this_process


def rows_of(eplb_state: Any) -> SourceRows | None:
    """The source rows of an EplbState, or None when nothing is counted there."""
    return vars(eplb_state).get("gimbal_rows")  # type: ignore[no-any-return]


def start_counting(eplb_state: Any, config: GimbalConfig) -> None:
    """Called while a worker starts, on every rank, whatever its settings.

    Raises:
        ValueError: the ranks have different settings.
    """
    global _of_this_process
    reason = reason_not_to_count(eplb_state.parallel_config)
    if reason is not None:
        if config.counts_traffic:
            warn_once(f"Gimbal does not count on this server: {reason}")
        return
    mine = {name: value for name, value in asdict(config).items() if name in SHARED_SETTINGS}
    for rank, settings in enumerate(gather(mine)):
        if settings != mine:
            raise ValueError(
                f"Gimbal's settings: {mine} here, {settings} on EP rank {rank}; valid: the same on all"
            )
    if not config.counts_traffic:
        return
    if config.traffic_dir is not None and eplb_state.parallel_config.pipeline_parallel_size > 1:
        warn_once("Gimbal saves no windows: pipeline stages would write the same files")
        config = replace(config, traffic_dir=None)
    place = place_of_this_rank(eplb_state.parallel_config)
    group = expect("vllm.distributed.parallel_state", "get_ep_group")().device_group
    eplb_state.gimbal_rows = _of_this_process = SourceRows(eplb_state, config, place, group)


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
    parameters = ["topk_ids", "expert_load_view", "logical_to_physical_map", "logical_replica_count"]
    stock = expect(ROUTER, RECORD, [*parameters, "record_enabled", "num_unpadded_tokens"])

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
    for name in ("expert_load_pass", "physical_to_logical_map", "model_name", "rebalanced"):
        if name not in expect(STATE, "EplbModelState").__dataclass_fields__:
            raise HookMismatch(f"EplbModelState has no {name}")
    runner = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
    expect(runner, "MoERunner.is_monolithic")
    expect(runner, "MoERunner.do_naive_dispatch_combine")
    expect("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig.is_sequence_parallel")


def _install() -> None:
    _check()
    state_class = expect(STATE, "EplbState")
    init = expect(STATE, "EplbState.__init__", ["self", "parallel_config", "device"])
    add_model = expect(STATE, "EplbState.add_model", ["self", "model", "model_config"])
    prepare = expect(STATE, "EplbState.prepare_forward", ["self", "model_config", "num_unpadded_tokens"])
    step = expect(STATE, "EplbState.step", ["self", "is_dummy", "is_profile", "log_stats"])
    rearrange = expect(STATE, "EplbState.rearrange", ["self", "is_profile"])
    should_record = expect(STATE, "EplbState._should_record_current_step", ["self"])
    model_key = expect("vllm.config.utils", "compute_hash_cached")
    current_config = expect("vllm.config", "get_current_vllm_config")
    worker_class = expect("vllm.v1.worker.gpu_worker", "Worker")
    warm_up = expect("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ["self"])
    stop_worker = expect("vllm.v1.worker.gpu_worker", "Worker.shutdown", ["self"])
    _install_recording()

    def state_init(self: Any, parallel_config: Any, device: torch.device) -> None:
        init(self, parallel_config, device)
        start_counting(self, config_for(current_config()))

    def eplb_add_model(self: Any, model: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        add_model(self, model, model_config, *args, **kwargs)
        rows = rows_of(self)
        if rows is not None:
            rows.add(model_config.compute_hash())

    def compile_or_warm_up_model(self: Any) -> Any:
        result = warm_up(self)
        rows = rows_of_this_process()
        if rows is not None:
            rows.fuse.attempt(rows.start_afresh)
        return result

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
            rows.after_step(is_dummy=is_dummy)
        step(self, is_dummy, is_profile, log_stats)
        if rows is not None:
            rows.note_finished()

    def eplb_rearrange(self: Any, is_profile: bool = False, *args: Any, **kwargs: Any) -> Any:
        rows = rows_of(self)
        if rows is not None and not is_profile:
            rows.close_windows()
        return rearrange(self, is_profile, *args, **kwargs)

    def should_record_current_step(self: Any, log_stats: bool = False) -> bool:
        # vLLM records only the last steps before a rearrangement; a source row needs all of them. The sliding
        # window that vLLM's own policy reads holds the latest steps either way.
        return rows_of(self) is not None or should_record(self, log_stats)

    def shutdown(self: Any) -> None:
        global _of_this_process
        rows, _of_this_process = _of_this_process, None
        if rows is not None:
            rows.fuse.attempt(rows.save_rest)
        stop_worker(self)

    worker_class.compile_or_warm_up_model = compile_or_warm_up_model
    worker_class.shutdown = shutdown
    state_class.add_model = eplb_add_model
    state_class.__init__ = state_init
    state_class.prepare_forward = prepare_forward
    state_class.step = eplb_step
    state_class.rearrange = eplb_rearrange
    state_class._should_record_current_step = should_record_current_step


HOOKS = (Hook("source-rows", _install),)
