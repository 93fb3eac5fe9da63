"""One model's source rows and rank loads on one rank.

Work that can fail on one rank only (memory) is kept apart from collectives, which every rank joins in any case: a
rank that has failed says so in the exchange, and all ranks stand aside at the same step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from gimbal_kernels.counting import TrafficWindow
from gimbal_kernels.counting.window import ClosingWindow

from .kernel_recording import KernelRecording
from .loads_recording import LoadsRecording
from .rank_place import RankPlace


class ModelTraffic:
    """Source rows of one model on one rank.

    Args:
        state: vLLM's EplbModelState.
        place: of this rank.
        group: the EP group's process group, over which windows and loads are summed.
        pressure_interval: steps between exchanges of rank loads.
    """

    def __init__(self, state: Any, place: RankPlace, group: Any, pressure_interval: int) -> None:
        model = state.model
        device = state.expert_load_pass.device
        self.state = state
        self.place = place
        self.sequence_parallel = bool(model.moe_layers[0].moe_config.is_sequence_parallel)
        self.contributes = place.counts(sequence_parallel=self.sequence_parallel)
        """Whether this rank's picks go into its source's row."""
        self.window = TrafficWindow(
            model.num_moe_layers,
            place.num_sources,
            model.num_logical_experts,
            device=device,
            group=group,
            contribute=self.contributes,
        )
        self.closed: deque[ClosingWindow] = deque()
        self.loads = RankLoads(place, device, group, pressure_interval, layers=model.num_moe_layers)
        self.recording: LoadsRecording | KernelRecording = self.by_loads()

    def by_loads(self) -> LoadsRecording:
        """A recording from vLLM's counters into this rank's source row."""
        return LoadsRecording(
            self.state.expert_load_pass, self.state.physical_to_logical_map, self._own_row()
        )

    def _own_row(self) -> torch.Tensor:
        """[L, E] of the window that is being recorded."""
        return self.window.counts[:, self.place.source]  # type: ignore[no-any-return]

    @property
    def reads_loads(self) -> bool:
        """Whether vLLM must record every step, since its counters are read."""
        return isinstance(self.recording, LoadsRecording)

    def before_forward(self) -> None:
        """A forward pass of a real step is about to run."""
        self.recording.before_forward()

    def after_forward(self, *, is_dummy: bool, vllm_records: bool = True) -> None:
        """Takes in the step that just ran, unless it was a dummy.

        Args:
            vllm_records: whether vLLM takes this step's load into its own window; if not, it is to find none.
        """
        picks = self.recording.after_forward(is_dummy=is_dummy)
        if picks is not None and self.contributes:
            self.loads.add(picks)
        if not (is_dummy or vllm_records):
            self.recording.drop_load()

    def start_afresh(self) -> None:
        """Forgets what was counted so far: the server has been profiled and warmed up, and serves from here."""
        self.recording.forget()
        self.window.counts.zero_()
        self.loads.forget()

    def close(self) -> None:
        """Closes the window, a collective that is not waited for here; `closed` holds it for the policy."""
        self.recording.close(self._own_row())
        self.closed.clear()
        self.closed.append(self.window.close_async())

    def current_slots(self) -> Any:
        """The slot map in force, [L, P] on the host."""
        return self.state.physical_to_logical_map.cpu().numpy()


class RankLoads:
    """MoE pressure: picks that each rank's experts processed lately, as a decaying sum, one entry per engine.

    Each rank knows where its own tokens went; the sum over ranks is what each rank received. The exchange is
    read one interval late, so that an accelerator is never waited for. Its last entry counts the ranks that are
    well.

    Args:
        place: of this rank.
        device: of the counters.
        group: process group to sum over.
        interval: steps between exchanges, the same on all ranks.
        layers: L; loads are given per layer, in token-equivalents times top-k.
    """

    DECAY = 0.5

    def __init__(
        self, place: RankPlace, device: torch.device, group: Any, interval: int, *, layers: int
    ) -> None:
        self._place, self._group, self._interval, self._layers = place, group, interval, layers
        self._own = torch.zeros(place.num_ranks + 1, dtype=torch.int64, device=device)
        self._total = torch.zeros_like(self._own)
        self._host = torch.zeros(place.num_ranks + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._recent = torch.zeros(place.num_ranks, dtype=torch.float64)
        self._steps = 0
        self.figures: dict[str, float] = {}
        """`pressure_<engine>`, picks per layer, and `pressure_step`; empty before the second exchange."""

    def add(self, picks: torch.Tensor) -> None:
        """picks: [L, P] of one forward pass."""
        per_rank = picks.reshape(picks.shape[0], self._place.num_ranks, -1).sum(dim=(0, 2), dtype=torch.int64)
        self._own[:-1] += per_rank

    def forget(self) -> None:
        """Drops this rank's picks since the last exchange."""
        self._own.zero_()

    def end_step(self, *, well: bool) -> bool:
        """Called in every step, dummy or not, at the same step on every rank; a collective when it is due.

        Args:
            well: whether this rank still counts.

        Returns:
            False when some rank was not well at the last exchange: the same answer at the same step everywhere.
        """
        self._steps += 1
        if self._steps % self._interval:
            return True
        all_well = self._read()
        self._own[-1] = int(well)
        self._total.copy_(self._own)
        self._own.zero_()
        dist.all_reduce(self._total, group=self._group)
        self._host.copy_(self._total, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return all_well

    def _read(self) -> bool:
        """Takes in the exchange before this one."""
        if self._steps == self._interval:
            return True
        if self._copied is not None:
            self._copied.synchronize()  # recorded an interval ago
        self._recent = self.DECAY * self._recent + self._host[:-1].double() / max(1, self._layers)
        per_engine = self._recent.reshape(self._place.num_sources, -1).sum(dim=1).tolist()
        self.figures = {f"pressure_{engine}": load for engine, load in enumerate(per_engine)}
        self.figures["pressure_step"] = float(self._steps)
        return int(self._host[-1]) == self._place.num_ranks
