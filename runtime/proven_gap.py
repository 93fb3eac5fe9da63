"""How far a returned placement can be from the best one, proven beside serving (SPEC section 3.4)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from gimbal_kernels.placement import PlacementProblem, evaluate, lower_bound


@dataclass(frozen=True)
class Gap:
    """Shares of the cost, (cost - lower bound) / cost, over the layers that saw picks: 0 is proven optimal.

    With spare slots the bound takes balance as free, and part of the gap is what it does not see.
    """

    mean: float
    worst: float


def gap_of(problem: PlacementProblem, slots: Any) -> Gap:
    """The proven gap of a slot map [L, P]; bounded work: no branching.

    Raises:
        ValueError: slots that do not fit the problem.
    """
    cost = evaluate(problem, slots).cost.numpy()
    bound = lower_bound(problem).numpy()
    seen = (problem.traffic.sum(axis=(1, 2)) > 0) & (cost > 0)
    if not seen.any():
        return Gap(0.0, 0.0)
    gap = np.maximum(
        0.0, (cost[seen] - bound[seen]) / cost[seen]
    )  # rounding may put an optimum below its bound
    return Gap(float(gap.mean()), float(gap.max()))


class GapThread:
    """Computes gaps on a thread of its own, one at a time; a placement that still waits gives way to a newer one.

    Args:
        publish: called on the thread with the number of the window and its gap.
        failed: called on the thread while the exception that ends it is being handled.
    """

    def __init__(self, publish: Callable[[int, Gap], None], failed: Callable[[], None]) -> None:
        self._publish, self._failed = publish, failed
        self._waiting: queue.Queue[tuple[int, PlacementProblem, Any]] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def submit(self, window: int, problem: PlacementProblem, slots: Any) -> None:
        """Returns at once; always called from one thread."""
        with suppress(queue.Empty):
            self._waiting.get_nowait()
        self._waiting.put_nowait((window, problem, slots))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gimbal-proven-gap", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                window, problem, slots = self._waiting.get()
                self._publish(window, gap_of(problem, slots))
        except Exception:
            self._failed()
