"""What one rank keeps for the placement of its models, and what it tells about each window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..balancer import Balancer, Decision, ExpertBytes, WindowFigures, moved_copies, save_window
from ..proven_gap import Gap, GapThread
from ..service import even_shares
from .guard import Fuse, logger
from .model_traffic import ModelTraffic
from .share_refresh import shares_in_force
from .source_rows import SourceRows


class PlacementState:
    """One rank's balancers, one per model, and the thread that proves gaps on the first rank.

    Args:
        rows: the rank's source rows.
    """

    def __init__(self, rows: SourceRows) -> None:
        self._balancers: dict[int, tuple[tuple[int, int], Balancer]] = {}
        self.fuse = Fuse("proven-gap")
        totals = rows.totals

        def publish(window: int, gap: Gap) -> None:
            totals["placement_gap"] = gap.mean
            logger.info(
                "Gimbal window %d: the best placement costs at most %.2f %% less, worst layer %.2f %%",
                *(window, 100 * gap.mean, 100 * gap.worst),
            )

        self.gaps = GapThread(publish, self.fuse.blow)

    def balancer(self, rows: SourceRows, model: ModelTraffic, num_slots: int, nodes: int) -> Balancer:
        """The model's balancer; a new one when slots or nodes are others than before."""
        shape = (num_slots, nodes)
        known = self._balancers.get(id(model))
        if known is None or known[0] != shape:
            slots_per_rank = num_slots // rows.place.num_ranks
            balancer = Balancer(rows.config, rows.place.topology(nodes), slots_per_rank, expert_bytes(model))
            self._balancers[id(model)] = known = (shape, balancer)
            _say_costs(rows, balancer)
        return known[1]

    def forget(self) -> None:
        """Called on every rank alike: what the balancers remember may differ between ranks."""
        for _, balancer in self._balancers.values():
            balancer.forget()


_states: WeakKeyDictionary[SourceRows, PlacementState] = WeakKeyDictionary()


def state_of(rows: SourceRows) -> PlacementState:
    """The placement state that belongs to a rank's source rows."""
    state = _states.get(rows)
    if state is None:
        state = _states[rows] = PlacementState(rows)
    return state


def expert_bytes(model: ModelTraffic) -> ExpertBytes:
    """Bytes of one expert's tensors that travel, and of one remote pick's activations to the expert and back."""
    state = model.state
    moe = state.model.moe_layers[0].moe_config
    return ExpertBytes(_per_expert(state), 2 * moe.hidden_dim * moe.in_dtype.itemsize)


def _per_expert(state: Any) -> int:
    ours = getattr(state.communicator, "weights", None)  # where this project's executors move them
    if ours is not None:
        return int(ours.bytes_per_expert)
    return sum(tensor[0].numel() * tensor.element_size() for tensor in state.model.expert_weights[0])


def _say_costs(rows: SourceRows, balancer: Balancer) -> None:
    if rows.place.is_first and rows.config.places_experts and balancer.costs.unknown:
        unknown = " and ".join(balancer.costs.unknown)
        logger.info(
            "Gimbal: the break-even rule is off, %s not known (settings bandwidth, pick_time)", unknown
        )


def report(
    rows: SourceRows,
    model: ModelTraffic,
    balancer: Balancer,
    *,
    traffic: Any,
    current: Any,
    slots: Any,
    decision: Decision | None,
) -> None:
    """Figures for the metrics, a line in the log, the proven gap and, where asked, the window's file.

    Args:
        traffic: [L, S, E] picks of the window.
        current, slots: [L, P], in force during the window and from now on.
        decision: what led to `slots`; None: vLLM decided.
    """
    shares = _shares_of(rows, model, traffic, current)
    window = balancer.measure(traffic, current, shares)
    moved = moved_copies(current, slots, balancer.slots_per_rank)
    rows.totals |= {"remote_pick_share": window.remote_pick_share, "max_over_mean": window.max_over_mean}
    rows.count("picks", window.picks)
    rows.count("experts_moved", moved)
    rows.count("bytes_moved", moved * balancer.expert_bytes.per_expert)
    rows.count("rearrangements", 1)
    rows.count("rearrangements_skipped", int(decision is not None and decision.reason == "does not pay"))
    if decision is not None:
        _note_decision(rows, balancer, decision)
    if not rows.place.is_first:
        return
    index = int(rows.totals["rearrangements"])
    logger.info("Gimbal window %d: %s", index, "; ".join(_lines(window, moved, decision, balancer)))
    problem = decision.problem if decision is not None else None
    if window.picks > 0:
        state_of(rows).gaps.submit(index, problem or balancer.problem_for(traffic, current), slots)
    if rows.config.traffic_dir is not None:
        save_window(
            rows.config.traffic_dir, index, traffic=traffic, current=current, slots=slots, shares=shares
        )


def _note_decision(rows: SourceRows, balancer: Balancer, decision: Decision) -> None:
    rows.totals |= {
        "skew_kept": balancer.rho,
        "drift": balancer.drift,
        "break_even_known": float(not balancer.costs.unknown),
    }
    if decision.verdict is not None:
        rows.totals |= {"seconds_saved": decision.verdict.saved, "seconds_to_move": decision.verdict.price}


def _lines(window: WindowFigures, moved: int, decision: Decision | None, balancer: Balancer) -> Iterable[str]:
    yield (
        f"{window.picks} picks, remote share {window.remote_pick_share:.3f}, "
        f"max/mean {window.max_over_mean:.3f}, {moved} experts move"
    )
    if decision is None:
        yield "vLLM decided"
        return
    yield f"{decision.reason}, skew kept {balancer.rho:.2f}, drift {balancer.drift:.2f}"
    if decision.verdict is not None:
        yield (
            f"{decision.moved} moves save {decision.verdict.saved:.3g} s "
            f"and take {decision.verdict.price:.3g} s"
        )


def _shares_of(rows: SourceRows, model: ModelTraffic, traffic: Any, current: Any) -> Any | None:
    """By which the copies served: this project's tables choose the nearest ones (None) or by shares; vLLM's copies
    take turns."""
    if not model.reads_loads:
        return shares_in_force(rows, model, current)
    return even_shares(current, np.shape(traffic)[1], np.shape(traffic)[2])
