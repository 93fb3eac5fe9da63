"""Picks per DP source on one rank, and the windows that they are closed in at every rearrangement (SPEC section 2).

Every rank adds the picks of its own tokens to its DP group's row of a `TrafficWindow`: in the router itself
(`kernel_recording`), or from vLLM's load counters after each step (`loads_recording`). When vLLM rearranges, which
all ranks do at the same step, the window is closed: one all-reduce gives every rank the same [L, S, E].

Layouts and models that neither of the two can count are not counted, and a warning says so.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..balancer import save_rest
from ..config import GimbalConfig
from .guard import Fuse, expect, logger, warn_once
from .kernel_recording import KernelRecording, reason_not_to_record
from .model_traffic import ModelTraffic
from .rank_place import (
    RankPlace,
    place_of_this_rank,
    reason_not_to_count,
    reason_not_to_count_model,
    reason_not_to_read_loads,
)

# What all ranks must agree on: a rank with other settings would reduce at other steps or place otherwise.
SHARED_SETTINGS = (
    "mode",
    "observe",
    "method",
    "alpha",
    "beta",
    "gamma",
    "horizon",
    "max_moves",
    "bandwidth",
    "pick_time",
    "overlap",
    "margin",
    "shares_interval",
    "pressure_interval",
    "recording",
    "first_window",
)


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
        self.reads_loads = False
        """Whether a model is counted from vLLM's load counters, which then must be kept in every step."""
        self._rearranging_since: float | None = None

    def add(self, model_key: str) -> None:
        """A model was loaded; on every rank at the same time. Unless all can count it, none does.

        Tensors are made here, before serving: later there is nothing left that could fail on one rank only.
        """
        state = self._eplb_state.model_states[model_key]
        with torch.inference_mode(False):  # they are written to in and outside of it
            model, kernel, reasons = _count_by(state, self.place, self._group, self.config)
        reasons_of_rank = gather(reasons)
        no_kernel = next((reason.kernel for reason in reasons_of_rank if reason.kernel is not None), None)
        problem = next((reason.model for reason in reasons_of_rank if reason.model is not None), None)
        if problem is None and no_kernel is not None:
            problem = reason_not_to_read_loads(state.model)
        if problem is not None or model is None:
            warn_once(f"Gimbal does not count {state.model_name}: {problem}")
            return
        if no_kernel is None and kernel is not None:
            model.recording = kernel
            kernel.attach()
        self._models[model_key] = model
        self.has_slices |= model.sequence_parallel
        self.reads_loads |= model.reads_loads
        self._log_choice(state.model_name, no_kernel)

    def _log_choice(self, name: str, no_kernel: str | None) -> None:
        """One line that says where the picks of a model are counted."""
        if not self.place.is_first:
            return
        if no_kernel is None:
            logger.info("Gimbal counts %s by map_and_count, in place of vLLM's recording", name)
        else:
            level = logging.WARNING if self.config.replaces_recording else logging.INFO
            logger.log(level, "Gimbal counts %s from vLLM's load counters: %s", name, no_kernel)

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

    def shorten_first_window(self) -> None:
        """The first rearrangement comes after `first_window` steps; the same step count on every rank.

        Only the count of steps is moved on: vLLM's window stays as long as it is.
        """
        steps, state = self.config.first_window, self._eplb_state
        if steps is not None and self._models:
            interval = state.expert_rearrangement_step_interval
            if steps > interval and self.place.is_first:
                warn_once(f"Gimbal: first_window ({steps}) is cut to vLLM's step_interval ({interval})")
            state.expert_rearrangement_step = max(0, interval - steps)
            state._update_layer_should_record()

    def follow(self, model_state: Any, slots: Any, layer: int | None) -> None:
        """vLLM has committed a slot map [L, P], or [P] of one layer; also while nothing is counted any more."""
        for model in self._models.values():
            if model.state is model_state:
                model.recording.follow(slots, layer)

    def before_forward(self, model_key: str) -> None:
        """A forward pass of one model is about to run."""
        model = self._models.get(model_key)
        if model is not None and not self.stood_aside:
            model.before_forward()

    def after_profile(self) -> None:
        """A pass that counts for nothing has run."""
        for model in self.counted():
            model.after_forward(is_dummy=True)

    def after_step(self, *, is_dummy: bool, vllm_records: bool = True) -> None:
        """Counts the step that just ran; then, on every rank alike, exchanges loads when that is due.

        Args:
            vllm_records: whether vLLM takes the step's load into its own window.
        """
        if self.stood_aside and not (is_dummy or vllm_records):
            for model in self._models.values():
                model.recording.drop_load()
        for model in self.counted():
            self.fuse.attempt(model.after_forward, is_dummy=is_dummy, vllm_records=vllm_records)
        well = [model.loads.end_step(well=not self.fuse.blown) for model in self.counted()]
        if not all(well):
            self.stood_aside = True
            for model in self._models.values():
                model.recording.leave_on()
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
        if self.config.traffic_dir is None or main is None or not main.contributes:
            return
        traffic = main.window.counts.cpu().numpy()
        save_rest(self.config.traffic_dir, self.place.rank, traffic=traffic, current=main.current_slots())


@dataclass(frozen=True)
class _Reasons:
    """Why one rank cannot count a model at all, or not by the kernel; None: it can."""

    model: str | None = None
    kernel: str | None = None


def _count_by(
    state: Any, place: RankPlace, group: Any, config: GimbalConfig
) -> tuple[ModelTraffic | None, KernelRecording | None, _Reasons]:
    """A model's counters and the recording that would replace vLLM's, as far as this rank can have them."""
    reason = reason_not_to_count_model(state.model)
    if reason is not None:
        return None, None, _Reasons(model=reason)
    try:
        model = ModelTraffic(state, place, group, config.pressure_interval)
    except Exception as error:
        logger.exception("Gimbal: no counters for %s", state.model_name)
        return None, None, _Reasons(model=f"{type(error).__name__}: {error}")
    if not config.replaces_recording:
        return model, None, _Reasons(kernel=f"setting recording is '{config.recording}'")
    compare = config.recording == "compare"
    try:
        spare = state.physical_to_logical_map.shape[1] > state.model.num_logical_experts
        weighted = spare and config.shares_interval is not None
        reason = reason_not_to_record(state, place, compare=compare, weighted=weighted)
        if reason is not None:
            return model, None, _Reasons(kernel=reason)
        topology = place.topology(expect("vllm.distributed.parallel_state", "get_node_count")())
        counts = model.window.counts
        kernel = KernelRecording(state, place, counts, topology, compare=compare, weighted=weighted)
    except Exception as error:
        logger.exception("Gimbal: vLLM's recording of %s is not replaced", state.model_name)
        return model, None, _Reasons(kernel=f"{type(error).__name__}: {error}")
    return model, kernel, _Reasons()


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


def forget_process() -> SourceRows | None:
    """The worker stops: its source rows, for the last time."""
    global _of_this_process
    rows, _of_this_process = _of_this_process, None
    return rows


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
