"""Hook: counts picks per DP source and closes a window at every rearrangement (SPEC section 2).

Routing precedes dispatch, so what one EP rank records in a forward pass are its own tokens' picks: a source row.
Around every real forward pass the rank's recorded load is read off vLLM's counters, turned from physical slots to
logical experts and added to its DP group's row of a `TrafficWindow`. When vLLM rearranges, which all ranks do at
the same step, the window is closed: one all-reduce gives every rank the same [L, S, E].

The tokens of a DP group are counted once: its TP ranks route the same tokens, so the first one's row is kept;
under sequence-parallel MoE they route slices, which add up, less the rows that pad the last slice.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gimbal_kernels.counting import TrafficWindow

from ..balancer import save_rest
from ..config import GimbalConfig
from .guard import Fuse, Hook, expect
from .settings import config_for

STATE = "vllm.distributed.eplb.eplb_state"


@dataclass(frozen=True)
class RankPlace:
    """Where one EP rank stands: its DP group (the source), and which of that group's tokens it routes."""

    source: int
    num_sources: int
    num_ranks: int
    tp_rank: int
    tp_size: int
    sequence_parallel: bool

    @property
    def counts(self) -> bool:
        """Whether this rank's picks go into its source's row."""
        return self.sequence_parallel or self.tp_rank == 0

    def own_tokens(self, num_tokens: int) -> int:
        """How many of its group's `num_tokens` unpadded tokens this rank routes."""
        if not self.sequence_parallel:
            return num_tokens
        slice_length = -(-num_tokens // self.tp_size)
        return max(0, min(slice_length, num_tokens - self.tp_rank * slice_length))


def place_of_this_rank(parallel_config: Any) -> RankPlace:
    """Reads the rank's place from vLLM's groups; ranks of a DP group are consecutive in the EP group."""
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
        sequence_parallel=bool(parallel_config.use_sequence_parallel_moe),
    )


class ModelTraffic:
    """Source rows of one model on one rank.

    Args:
        state: vLLM's EplbModelState.
        place: of this rank.
        group: the EP group's process group, over which windows and pressure are summed.
        pressure_interval: steps between exchanges of rank loads.
    """

    def __init__(self, state: Any, place: RankPlace, group: Any, pressure_interval: int) -> None:
        model = state.model
        device = state.expert_load_pass.device
        self.place = place
        self.window = TrafficWindow(
            model.num_moe_layers, place.num_sources, model.num_logical_experts, device=device, group=group
        )
        self.closed: deque[torch.Tensor] = deque()
        self.figures: dict[str, float] = {}
        self.state = state
        self._group = group
        self._before: torch.Tensor | None = None
        self._pressure = RankLoads(place, device, group, pressure_interval, layers=model.num_moe_layers)

    def before_forward(self) -> None:
        """Notes the counters, so that what warm-up or dummy passes left in them is not counted.

        A drafter runs several passes in a step: the first one counts from here.
        """
        if self._before is None:
            self._before = self.state.expert_load_pass.clone()

    def after_forward(self, *, is_dummy: bool) -> None:
        """Adds the picks of the step that just ran to this rank's source row, unless it was a dummy."""
        before, self._before = self._before, None
        if is_dummy or before is None or not self.place.counts:
            return
        picks = self.state.expert_load_pass - before
        row = self.window.counts[:, self.place.source]
        slots = self.state.physical_to_logical_map
        # Slots without an expert (elastic EP) hold -1 and are never routed to.
        row.scatter_add_(1, slots.clamp_min(0).long(), torch.where(slots >= 0, picks, 0).to(row.dtype))
        self._pressure.add(picks)

    def end_step(self) -> None:
        """Called in every step, dummy or not, on every rank at the same step: exchanges pressure when due."""
        loads = self._pressure.end_step()
        if loads:
            self.figures = self.figures | loads

    def close(self) -> None:
        """Closes the window; its traffic waits in `closed` for the placement policy."""
        self.closed.clear()
        self.closed.append(self.window.close())


class RankLoads:
    """MoE pressure: picks that each rank's experts processed lately, as a decaying sum, one entry per engine.

    Each rank knows where its own tokens went; the sum over ranks is what each rank received. The exchange is
    read one interval late, so that an accelerator is never waited for.
    """

    DECAY = 0.5

    def __init__(
        self, place: RankPlace, device: torch.device, group: Any, interval: int, *, layers: int
    ) -> None:
        self._place, self._group, self._interval, self._layers = place, group, interval, layers
        self._own = torch.zeros(place.num_ranks, dtype=torch.int64, device=device)
        self._host = torch.zeros(place.num_ranks, dtype=torch.int64)
        self._recent = torch.zeros(place.num_ranks, dtype=torch.float64)
        self._steps = 0

    def add(self, picks: torch.Tensor) -> None:
        """picks: [L, P] of one forward pass."""
        self._own += picks.reshape(picks.shape[0], self._place.num_ranks, -1).sum(
            dim=(0, 2), dtype=torch.int64
        )

    def end_step(self) -> dict[str, float]:
        """The figures `pressure_<engine>` (picks per layer) and `pressure_step` when an exchange was read."""
        self._steps += 1
        if self._steps % self._interval:
            return {}
        self._recent = self.DECAY * self._recent + self._host.double() / max(1, self._layers)
        total = self._own.clone()
        self._own.zero_()
        dist.all_reduce(total, group=self._group)
        self._host.copy_(total, non_blocking=True)
        per_engine = self._recent.reshape(self._place.num_sources, -1).sum(dim=1).tolist()
        figures = {f"pressure_{engine}": load for engine, load in enumerate(per_engine)}
        return figures | {"pressure_step": float(self._steps)}


class SourceRows:
    """All models of one rank (a main model, perhaps a drafter); kept on vLLM's EplbState."""

    def __init__(self, eplb_state: Any, config: GimbalConfig) -> None:
        self.config = config
        self.fuse = Fuse("source-rows")
        self.place = place_of_this_rank(eplb_state.parallel_config)
        self._eplb_state = eplb_state
        self._models: dict[int, ModelTraffic] = {}
        self._rearranging_since: float | None = None
        self.totals: dict[str, float] = {}
        """Figures that only grow, and those of the last closed window; written by the placement policy."""

    def of(self, model_state: Any) -> ModelTraffic:
        """The traffic of one EplbModelState, created when first asked for."""
        key = id(model_state)
        if key not in self._models:
            group = expect("vllm.distributed.parallel_state", "get_ep_group")().device_group
            self._models[key] = ModelTraffic(model_state, self.place, group, self.config.pressure_interval)
        return self._models[key]

    def all(self) -> list[ModelTraffic]:
        return [self.of(state) for state in self._eplb_state.model_states.values()]

    def before_forward(self, model_key: str) -> None:
        """A forward pass of one model is about to run; `model_key` is vLLM's for it."""
        state = self._eplb_state.model_states.get(model_key)
        if state is not None:
            self.of(state).before_forward()

    def after_step(self, *, is_dummy: bool) -> None:
        for traffic in self.all():
            traffic.after_forward(is_dummy=is_dummy)
            traffic.end_step()

    def close_windows(self) -> None:
        self._rearranging_since = time.perf_counter()
        for traffic in self.all():
            traffic.close()

    def save_rest(self) -> None:
        """Saves what this rank has counted since the last window was closed, where windows are saved."""
        main = self._main()
        if self.config.traffic_dir is None or main is None:
            return
        rank = self.place.source * self.place.tp_size + self.place.tp_rank
        current = main.state.physical_to_logical_map.cpu().numpy()
        save_rest(self.config.traffic_dir, rank, traffic=main.window.counts.cpu().numpy(), current=current)

    def note_finished(self) -> None:
        """Adds up the time from the decision to the last layer's commit, once nothing is under way."""
        states = self._eplb_state.model_states.values()
        if self._rearranging_since is None or any(state.rebalanced for state in states):
            return
        self.count("rearrangement_seconds", time.perf_counter() - self._rearranging_since)
        self._rearranging_since = None

    def count(self, name: str, amount: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + amount

    def figures(self) -> dict[str, float]:
        """All figures of this rank, for the engine's report."""
        main = self._main()
        return dict(self.totals) | (main.figures if main is not None else {})

    def _main(self) -> ModelTraffic | None:
        """The model whose pressure counts; a drafter is the smaller one."""
        return max(self._models.values(), key=lambda model: model.window.counts.numel(), default=None)


_of_this_process: SourceRows | None = None


def rows_of_this_process() -> SourceRows | None:
    """The source rows of the worker in this process, or None; a worker has one EplbState."""
    return _of_this_process


def rows_of(eplb_state: Any) -> SourceRows | None:
    """The source rows of an EplbState, or None when nothing is counted there."""
    return vars(eplb_state).get("gimbal_rows")  # type: ignore[no-any-return]


def _install() -> None:
    state_class = expect(STATE, "EplbState")
    init = expect(STATE, "EplbState.__init__", ["self", "parallel_config", "device"])
    prepare = expect(STATE, "EplbState.prepare_forward", ["self", "model_config", "num_unpadded_tokens"])
    step = expect(STATE, "EplbState.step", ["self", "is_dummy", "is_profile", "log_stats"])
    rearrange = expect(STATE, "EplbState.rearrange", ["self", "is_profile"])
    model_key = expect("vllm.config.utils", "compute_hash_cached")
    should_record = expect(STATE, "EplbState._should_record_current_step", ["self"])
    current_config = expect("vllm.config", "get_current_vllm_config")
    worker_class = expect("vllm.v1.worker.gpu_worker", "Worker")
    stop_worker = expect("vllm.v1.worker.gpu_worker", "Worker.shutdown", ["self"])
    for name in ("expert_load_pass", "physical_to_logical_map", "logical_to_physical_map"):
        if name not in expect(STATE, "EplbModelState").__dataclass_fields__:
            raise AttributeError(f"EplbModelState has no {name}")

    def state_init(self: Any, parallel_config: Any, device: torch.device) -> None:
        global _of_this_process
        init(self, parallel_config, device)
        config = config_for(current_config())
        if config.counts_traffic:
            self.gimbal_rows = _of_this_process = SourceRows(self, config)

    def prepare_forward(
        self: Any, model_config: Any, num_unpadded_tokens: int, ubatch_slices: Any = None
    ) -> None:
        rows = rows_of(self)
        own = num_unpadded_tokens if rows is None else rows.place.own_tokens(num_unpadded_tokens)
        prepare(self, model_config, own, ubatch_slices)
        if rows is not None:
            rows.fuse.run(lambda: rows.before_forward(model_key(model_config)), lambda: None)

    def eplb_step(
        self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        rows = rows_of(self)
        if rows is not None and not is_profile:
            rows.fuse.run(lambda: rows.after_step(is_dummy=is_dummy), lambda: None)
        step(self, is_dummy, is_profile, log_stats)
        if rows is not None:
            rows.fuse.run(rows.note_finished, lambda: None)

    def eplb_rearrange(self: Any, is_profile: bool = False, *args: Any, **kwargs: Any) -> Any:
        rows = rows_of(self)
        if rows is not None and not is_profile:
            rows.fuse.run(rows.close_windows, lambda: None)
        return rearrange(self, is_profile, *args, **kwargs)

    def should_record_current_step(self: Any, log_stats: bool = False) -> bool:
        # vLLM records only the last steps before a rearrangement; a source row needs all of them. The sliding
        # window that vLLM's own policy reads holds the latest steps either way.
        return rows_of(self) is not None or should_record(self, log_stats)

    def shutdown(self: Any) -> None:
        rows = rows_of_this_process()
        if rows is not None:
            rows.fuse.run(rows.save_rest, lambda: None)
        stop_worker(self)

    worker_class.shutdown = shutdown
    state_class.__init__ = state_init
    state_class.prepare_forward = prepare_forward
    state_class.step = eplb_step
    state_class.rearrange = eplb_rearrange
    state_class._should_record_current_step = should_record_current_step


HOOKS = (Hook("source-rows", _install),)
