"""A migration that the caller waits for, between two forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .executors.protocol import GENERATIONS, Executor
from .plan import MigrationPlan
from .schedule import Share, digest, share_out
from .verdict import MigrationError, Reason, Verdict
from .weights import ExpertWeights

OnCommit = Callable[[int, Any], None]


@dataclass(frozen=True)
class MigrationReport:
    """What one rank did.

    Attributes:
        layers: layers committed, in order.
        waves: how often all ranks had to agree.
        bytes_sent, bytes_received: of expert tensors, by this rank.
        seconds: from the start to the last commit.
    """

    layers: tuple[int, ...]
    waves: int
    bytes_sent: int
    bytes_received: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """The larger of sent and received over the time, in 10**9 bytes per second; 0 if nothing moved."""
        largest = max(self.bytes_sent, self.bytes_received)
        return largest / self.seconds / 1e9 if largest else 0.0


def migrate(
    plan: MigrationPlan, weights: ExpertWeights, executor: Executor, *, on_commit: OnCommit | None = None
) -> MigrationReport:
    """Carries a plan out; all ranks call it between the same two forward passes, with the same plan.

    Wave by wave (as many layers as fit into staging) the experts are staged, the ranks agree, and each commits: the
    slots are overwritten, `weights.after_commit` and `on_commit` are called for each layer. A layer is thus
    old or new on all ranks, and nothing is half-written if a rank dies (SPEC section 5).

    Args:
        plan: from `plan_migration`; its bytes_per_expert is used for planning only.
        weights: this rank's tensors, those that the executor was made with.
        executor: this rank's.
        on_commit: called with a layer and its new slots, int32 [P], when the layer's weights are in place: the
            place to swap the maps. An exception from it is raised after the wave is complete.

    Raises:
        ValueError: the plan does not fit the weights, the executor or its staging.
        MigrationError: a rank failed, vanished or had another plan. Layers committed so far are new on every rank,
            the others old on every rank.
        RuntimeError: the executor cannot be used any more.
    """
    start = time.perf_counter()
    shares = prepare(plan, weights, executor)
    if shares:
        executor.enter(digest(plan))
    failed: Exception | None = None
    ready = 0
    for wave in range(len(shares)):
        # The next wave is staged before this one is agreed: by then the others are ready too, so nobody waits.
        while failed is None and ready < min(wave + GENERATIONS, len(shares)):
            try:
                executor.stage(shares[ready], lambda _: None)
                ready += 1
            except MigrationError as error:
                failed = error
        if wave == ready:
            break
        # Whatever failed since: this rank said that it is ready, so the wave may be agreed, and then it commits.
        try:
            callback = settle(shares, wave, plan, weights, executor, on_commit)
        except MigrationError as error:
            if failed is None or isinstance(failed, MigrationError):
                failed = error  # the earliest wave's, which is the same on every rank
            break
        failed = failed or callback
    if failed is not None:
        raise failed
    return report(shares, weights, time.perf_counter() - start)


def prepare(
    plan: MigrationPlan, weights: ExpertWeights, executor: Executor, *, max_layers: int | None = None
) -> list[Share]:
    """This rank's shares of the plan; ValueError when it fits neither the weights nor the executor."""
    if weights is not executor.weights:
        raise ValueError("weights: not those that the executor was made with; valid: executor.weights")
    expected = (weights.num_layers, executor.ranks * weights.slots_per_rank)
    if tuple(plan.target.shape) != expected or plan.num_ranks != executor.ranks:
        raise ValueError(
            f"plan: {plan.num_ranks} ranks, slots {tuple(plan.target.shape)}; valid: {executor.ranks} ranks, "
            f"{expected} as the executor and its weights have"
        )
    arriving = torch.bincount(
        plan.transfers[:, 0].long() * plan.num_ranks + plan.transfers[:, 4], minlength=1
    )
    most = int(arriving.max())
    if most > executor.rows:
        layer, rank = divmod(int(arriving.argmax()), plan.num_ranks)
        raise ValueError(
            f"plan: layer {layer} brings {most} experts to rank {rank}, staging holds {executor.rows} per buffer; "
            f"valid: an executor with staging_bytes of at least {GENERATIONS * most * executor.row_bytes}"
        )
    return share_out(plan, rank=executor.rank, rows=executor.rows, max_layers=max_layers)


def settle(
    shares: list[Share],
    wave: int,
    plan: MigrationPlan,
    weights: ExpertWeights,
    executor: Executor,
    on_commit: OnCommit | None,
) -> Exception | None:
    """Waits for the verdict about a wave that this rank has staged, and carries it out.

    Returns:
        What a callback raised, after the waves that are not agreed yet were abandoned.

    Raises:
        MigrationError: the wave was abandoned.
    """
    verdict = agree(executor, shares[wave])
    if not verdict.commit:
        abandon_from(executor, shares, wave + 1, verdict)
        raise executor.error(verdict)
    try:
        commit(shares[wave], plan, weights, executor, on_commit)
    except Exception as error:
        abandon_from(executor, shares, wave + 1)
        return error
    return None


def agree(executor: Executor, share: Share) -> Verdict:
    """Waits for the verdict about a wave that this rank has staged."""
    pause = 0.0
    while (verdict := executor.poll(share, 0)) is None:
        executor.beat()
        time.sleep(pause)
        pause = min(pause + 2e-5, 1e-3)
    return verdict


def abandon_from(executor: Executor, shares: list[Share], wave: int, verdict: Verdict | None = None) -> None:
    """Abandons the waves from one on, so that nobody works on them or waits for them.

    For the reason of an earlier wave's verdict, or in this rank's name.
    """
    for share in shares[wave:]:
        blame = verdict or Verdict(False, rank=executor.rank, layer=share.layers[0], reason=Reason.FAILURE)
        executor.abandon(share.wave, blame.rank, blame.layer, blame.reason)


def commit(
    share: Share, plan: MigrationPlan, weights: ExpertWeights, executor: Executor, on_commit: OnCommit | None
) -> None:
    """Staging to slots, copies inside the rank, then the callbacks; only after the wave's verdict."""
    staged = executor.staging(share.wave)
    for receive in share.receives:
        for rows, offset in zip(weights.rows(receive.layer), weights.offsets(receive.layer), strict=True):
            rows[receive.slot].copy_(staged[receive.row, offset : offset + rows.shape[1]])
    for layer, source, destination in share.copies:
        for rows in weights.rows(layer):
            rows[destination].copy_(rows[source])
    executor.consumed(share.wave)
    failed: Exception | None = None
    for layer in share.layers:
        executor.beat()
        try:
            weights.committed(layer)
            if on_commit is not None:
                on_commit(layer, plan.target[layer])
        except Exception as error:  # the others commit this wave too: its other layers must not be left out
            failed = failed or error
    if failed is not None:
        raise failed


def report(shares: list[Share], weights: ExpertWeights, seconds: float) -> MigrationReport:
    """Figures of the shares that were carried out."""

    def size(layer: int) -> int:
        return sum(int(rows.shape[1]) for rows in weights.rows(layer))

    return MigrationReport(
        layers=tuple(layer for share in shares for layer in share.layers),
        waves=len(shares),
        bytes_sent=sum(size(move.layer) for share in shares for move in share.sends),
        bytes_received=sum(size(move.layer) for share in shares for move in share.receives),
        seconds=seconds,
    )
