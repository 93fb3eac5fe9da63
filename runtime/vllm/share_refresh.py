"""Hook: the shares of an expert's copies follow the traffic more often than weights move (SPEC section 4).

Every `shares_interval` steps the ranks start to sum the picks of the running window. A thread of the first rank
fits shares to the sum beside serving. When the next interval ends the first rank broadcasts what it has, and all
ranks change their tables to the same bytes at the same step. Layers whose slot map changed meanwhile are left out:
after a commit the nearest copies serve until the next refresh.

Every rank joins both collectives whatever happens to it; one that fails says so in the exchange of rank loads.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from gimbal_kernels.counting import ReplicaMap

from ..service import fitted_shares, nearest_shares
from .guard import Fuse, Hook, HookMismatch, expect
from .model_traffic import ModelTraffic
from .source_rows import SourceRows, rows_of

STATE = "vllm.distributed.eplb.eplb_state"


class ShareRefresh:
    """Shares of one model on one rank.

    Args:
        model: its traffic.
        tables: its tables of copies, made for shares.
        group: over which picks are summed, on the counters' device.
        host_group: the same ranks on the host; the first one fits the shares.
    """

    def __init__(self, model: ModelTraffic, tables: ReplicaMap, *, group: Any, host_group: Any) -> None:
        self.refreshes = 0
        self._model, self._tables = model, tables
        self._group, self._host_group = group, host_group
        self._leader = dist.get_process_group_ranks(host_group)[0]
        self._leads = dist.get_rank() == self._leader
        # Per layer 1 where its shares are to be taken, then the shares. Made here, where all ranks would notice.
        self._message = torch.zeros(
            tables.num_layers, 1 + tables.num_sources * tables.num_slots, dtype=torch.float64
        )
        self._work: Any = None
        self._fit: _Fit | None = None
        self._in_force: tuple[Any, Any, Any] | None = None  # layers that have shares, their slots, the shares

    def end_interval(self, fuse: Fuse) -> None:
        """At the same step on every rank: what was fitted comes into force, and the next sum is started."""
        slots = np.array(
            self._model.current_slots()
        )  # a copy: on the CPU it is vLLM's own map, which changes
        if self._work is not None:
            self._work.wait()
            self._message.zero_()
            if self._leads:
                fuse.attempt(self._write, slots)
            dist.broadcast(self._message, src=self._leader, group=self._host_group)
            fuse.attempt(self._take, slots)
        counts = self._model.window.counts
        total = (
            counts.to(torch.int64, copy=True) if self._model.contributes else torch.zeros_like(counts).long()
        )
        self._work = dist.all_reduce(total, group=self._group, async_op=True)
        if self._leads and self._fit is None:
            fuse.attempt(self._start, total, slots)

    def shares(self, slots: Any) -> Any:
        """Shares [L, S, P] in force under a slot map [L, P]: the fitted ones where they were fitted to it."""
        experts = self._tables.num_experts
        shares = nearest_shares(slots, self._tables.topology, experts)  # type: ignore[arg-type]
        if self._in_force is not None:
            taken, fitted_to, fitted = self._in_force
            same = taken & (fitted_to == np.asarray(slots)).all(axis=1)
            shares[same] = fitted[same]
        return shares

    def _start(self, total: torch.Tensor, slots: Any) -> None:
        self._fit = _Fit(self._work, total, slots, self._tables.topology)
        self._fit.start()

    def _write(self, slots: Any) -> None:
        """On the first rank: the finished fit into the message, for layers whose slots are still the same."""
        fit = self._fit
        if fit is None or fit.is_alive():
            return
        self._fit = None
        if fit.error is not None:
            raise fit.error
        same = (fit.slots == slots).all(axis=1)
        self._message[:, 0] = torch.from_numpy(same.astype(np.float64))
        self._message[:, 1:] = torch.from_numpy(fit.shares.reshape(len(slots), -1))

    def _take(self, slots: Any) -> None:
        message = self._message.numpy()
        taken = message[:, 0] > 0
        if not taken.any():
            return
        shape = (self._tables.num_layers, self._tables.num_sources, self._tables.num_slots)
        shares = message[:, 1:].reshape(shape).copy()
        for layer in np.flatnonzero(taken).tolist():
            self._tables.update(slots[layer], shares=shares[layer], layer=layer)
        self._in_force = (taken, slots, shares)
        self.refreshes += 1


class _Fit(threading.Thread):
    """Waits for the sum of the picks and fits shares to it.

    Args:
        work: the sum under way.
        total: int64 [L, S, E], where it arrives.
        slots: [L, P] in force.
        topology: distances from sources to ranks.
    """

    def __init__(self, work: Any, total: torch.Tensor, slots: Any, topology: Any) -> None:
        super().__init__(name="gimbal-shares", daemon=True)
        self.slots = slots
        self.shares: Any = None
        self.error: Exception | None = None
        self._work, self._total, self._topology = work, total, topology

    def run(self) -> None:
        try:
            stream = (
                torch.cuda.stream(torch.cuda.Stream()) if self._total.is_cuda else contextlib.nullcontext()
            )
            with stream:
                self._work.wait()
                traffic = self._total.cpu().numpy()
            self.shares = fitted_shares(traffic, self.slots, self._topology)
        except Exception as error:
            self.error = error


class _Refreshes:
    """All models of one rank whose tables take shares."""

    def __init__(self, rows: SourceRows) -> None:
        group = expect("vllm.distributed.parallel_state", "get_ep_group")()
        self.steps = 0
        self.of_model: dict[int, ShareRefresh] = {}
        for model in rows.counted():
            tables = tables_with_shares(model)
            if tables is not None:
                groups = {"group": group.device_group, "host_group": group.cpu_group}
                self.of_model[id(model)] = ShareRefresh(model, tables, **groups)


_of_rows: WeakKeyDictionary[SourceRows, _Refreshes] = WeakKeyDictionary()


def tables_with_shares(model: ModelTraffic) -> ReplicaMap | None:
    """This project's tables of copies, where they choose and were made for shares; the same on all ranks."""
    tables: ReplicaMap | None = getattr(model.recording, "tables", None)
    return tables if tables is not None and tables.thresholds is not None else None


def after_step(rows: SourceRows) -> None:
    """Called after every step, dummy or not, on every rank."""
    interval = rows.config.shares_interval
    if interval is None or rows.stood_aside or not rows.counted():
        return
    refreshes = _of_rows.get(rows)
    if refreshes is None:
        refreshes = _of_rows[rows] = _Refreshes(rows)
    refreshes.steps += 1
    if refreshes.steps % interval == 0:
        for refresh in refreshes.of_model.values():
            refresh.end_interval(rows.fuse)
        rows.totals["share_refreshes"] = float(sum(r.refreshes for r in refreshes.of_model.values()))


def shares_in_force(rows: SourceRows, model: ModelTraffic, slots: Any) -> Any | None:
    """Shares [L, S, P] by which a model's copies serve under a slot map; None: the nearest ones."""
    refreshes = _of_rows.get(rows)
    refresh = None if refreshes is None else refreshes.of_model.get(id(model))
    return None if refresh is None else refresh.shares(slots)


def _install() -> None:
    state_class = expect(STATE, "EplbState")
    step = expect(STATE, "EplbState.step", ["self", "is_dummy", "is_profile", "log_stats"])
    for name in ("device_group", "cpu_group"):
        if name not in expect("vllm.distributed.parallel_state", "GroupCoordinator").__annotations__:
            raise HookMismatch(f"GroupCoordinator has no {name}")

    def eplb_step(
        self: Any, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        step(self, is_dummy, is_profile, log_stats)
        rows = rows_of(self)
        if rows is not None and not is_profile:
            after_step(rows)

    state_class.step = eplb_step


HOOKS = (Hook("share-refresh", _install),)
