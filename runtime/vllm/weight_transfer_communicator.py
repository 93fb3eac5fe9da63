"""vLLM's communicator for expert weights, over one of this project's executors (SPEC section 5).

vLLM rearranges in two ways. Synchronously, all layers between two forward passes: `rearrange`. Asynchronously, a
thread brings one layer after the other and the serving thread takes it over between two passes: `plan_ahead`
and `stage`. In both, sources and rounds are the planner's, slots are permuted inside a rank so that
nothing is copied there, and vLLM is given the map that results. Where something fails, that is the map in
force: vLLM serves on with it.

The calls of vLLM's interface (`add_send`, `add_recv`, `execute`) serve vLLM's own code, which chooses the sources.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator

from gimbal_kernels.migration import ExpertWeights, MigrationPlan, host, migrate, plan_migration
from gimbal_kernels.migration.executors import Executor
from gimbal_kernels.migration.migrate import agree, commit, prepare
from gimbal_kernels.migration.rounds import in_rounds
from gimbal_kernels.migration.schedule import Move, Share, digest
from gimbal_kernels.topology import Topology

from .guard import logger

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class StagedLayer:
    """What the transfer thread hands to the serving thread in place of vLLM's TransferMetadata.

    `commit` carries the layer from staging to its slots, at the same step on all ranks.
    """

    commit: Callable[[], Any]


def _nothing() -> None:
    """The commit of a layer that stays as it is."""


class ExecutorCommunicator(EplbCommunicator):
    """One per model and rank.

    Args:
        weights: this rank's tensors, those that the executor was made with.
        executor: this rank's.
        node_of_rank: [R] integers, the machine of each rank.
        gather: a collective of the host that gives every rank's value, in rank order; used by `execute` only.
    """

    def __init__(
        self, weights: ExpertWeights, executor: Executor, *, node_of_rank: list[int], gather: Gather
    ) -> None:
        self.weights, self.executor = weights, executor
        self._nodes = np.asarray(node_of_rank)
        self._topology = Topology(np.ones((1, executor.ranks)))
        self._gather = gather
        self._plan: MigrationPlan | None = None
        self._shares: dict[int, Share] = {}
        self._broken = False
        self._layer = 0
        self._sends: list[tuple[int, int, list[torch.Tensor]]] = []
        self._receives: list[tuple[int, int, list[torch.Tensor]]] = []

    def rearrange(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Synchronous path; all ranks call it between the same two forward passes.

        Args:
            old: [L, P] integers, the map in force.
            new: [L, P] on the host, the map that is wanted; holds the map in force when this returns.
        """
        in_force = old.cpu().clone()
        try:
            plan = self._plan_for(in_force, new)
            migrate(plan, self.weights, self.executor, on_commit=lambda i, slots: in_force[i].copy_(slots))
        except Exception as error:
            self._report(error)
        new.copy_(in_force)

    def plan_ahead(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Asynchronous path, first: plans all layers together and meets the other ranks.

        Args:
            old, new: [L, P] on the host; `new` becomes the map that the plan leads to.
        """
        self._plan, self._shares = None, {}
        try:
            plan = self._plan_for(old, new)
            shares = prepare(plan, self.weights, self.executor, max_layers=1)
            if shares:
                self.executor.enter(digest(plan))
        except Exception as error:
            self._report(error)
            new.copy_(old)
        else:
            new.copy_(plan.target)
            self._plan, self._shares = plan, {share.layers[0]: share for share in shares}

    def stage(self, layer: int, old: torch.Tensor, new: torch.Tensor) -> StagedLayer:
        """Asynchronous path, for each layer: stages it and waits until it is staged on all ranks.

        Args:
            old, new: [P] on the host, the layer's map in force and the one to come. When the layer cannot be
                staged it stays as it is, on all ranks, and so do the layers after it: `new` becomes `old`.
        """
        share, plan = self._shares.pop(layer, None), self._plan
        if share is not None and plan is not None:
            try:
                self.executor.stage(share, lambda _: None)
                verdict = agree(self.executor, share)
                if verdict.commit:
                    carry_out = partial(commit, share, plan, self.weights, self.executor, None)
                    return StagedLayer(carry_out)
                raise self.executor.error(verdict)
            except Exception as error:
                self._shares = {}
                self._report(error)
        new.copy_(old)
        return StagedLayer(_nothing)

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        """No: staging is allocated when the executor is made."""
        return False

    def set_stream(self, stream: Any) -> None:
        """Nothing to do: executors order their copies themselves."""

    def set_transfer_context(self, old_indices: np.ndarray, layer_idx: int) -> None:
        self._layer = layer_idx

    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        self._sends.append((dst_rank, expert_id, tensors))

    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        self._receives.append((src_rank, expert_id, tensors))

    def execute(self) -> None:
        """Moves what was added, in rounds without contention; every rank calls it, with sends or without.

        Raises:
            MigrationError: a rank failed or fell silent; the receivers' tensors may be incomplete.
            ValueError: tensors that are no slots of the layer, or a layer with tensors that vLLM does not know.
        """
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        wanted = self._gather([(source, expert) for source, expert, _ in receives])
        share = self._share_of(wanted, sends)
        self.executor.enter(zlib.crc32(repr(wanted).encode()))
        self.executor.stage(share, lambda _: None)
        verdict = agree(self.executor, share)
        if not verdict.commit:
            raise self.executor.error(verdict)
        staged, offsets = self.executor.staging(share.wave), self.weights.offsets(self._layer)
        for row, (_, _, tensors) in enumerate(receives):
            for tensor, offset in zip(tensors, offsets, strict=True):
                raw = tensor.view(-1).view(torch.uint8)
                raw.copy_(staged[row, offset : offset + raw.numel()])
        self.executor.consumed(share.wave)

    def _share_of(
        self, wanted: list[list[tuple[int, int]]], sends: list[tuple[int, int, list[torch.Tensor]]]
    ) -> Share:
        """This rank's sends and receives; row i of a receiver's staging is for what it asked for as i-th."""
        rank, layer = self.executor.rank, self._layer
        edges = [(source, to, i) for to, asked in enumerate(wanted) for i, (source, _) in enumerate(asked)]
        table: Any = np.array([(layer, 0, source, 0, to, i) for source, to, i in edges], dtype=np.int32)
        ranks, compiled = self.executor.ranks, host.status() == "ready"
        turns = {
            edges[index]: turn
            for turn, group in enumerate(in_rounds(table.reshape(-1, 6), ranks, compiled=compiled))
            for index in group.tolist()
        }
        slot_of = {(to, expert): self._slot(tensors) for to, expert, tensors in sends}
        moves = sorted((turn, edge) for edge, turn in turns.items())
        return Share(
            wave=0,
            layers=(layer,),
            sends=[
                Move(layer, to, slot_of[to, wanted[to][i][1]], i, turn)
                for turn, (source, to, i) in moves
                if source == rank
            ],
            receives=[Move(layer, source, i, i, turn) for turn, (source, to, i) in moves if to == rank],
            copies=[],
        )

    def _slot(self, tensors: list[torch.Tensor]) -> int:
        """The slot of this layer whose tensors these are."""
        rows = self.weights.rows(self._layer)
        first = rows[0].data_ptr()
        slot, rest = divmod(tensors[0].data_ptr() - first, rows[0].shape[1])
        if rest or not 0 <= slot < self.weights.slots_per_rank or len(rows) != len(tensors):
            raise ValueError(
                f"tensors: {len(tensors)} that are no slot of layer {self._layer}, which has {len(rows)} tensors; "
                "valid: one row of each of the layer's tensors"
            )
        return int(slot)

    def _plan_for(self, old: torch.Tensor, new: torch.Tensor) -> MigrationPlan:
        size = self.weights.bytes_per_expert
        return plan_migration(old, new, self._topology, bytes_per_expert=size, node_of_rank=self._nodes)

    def _report(self, error: Exception) -> None:
        """One line in the log; an executor that cannot be used any more fails alike every time: it says so once."""
        if self._broken:
            return
        self._broken = self.executor.health != "ready"
        rest = "; until a restart nothing moves" if self._broken else ""
        logger.error("Gimbal, rank %d: experts stay where they are: %s%s", self.executor.rank, error, rest)
