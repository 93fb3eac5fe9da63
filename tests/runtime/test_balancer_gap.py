"""The certificate beside serving: what it proves, what it drops, how it ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from gimbal_runtime import proven_gap
from gimbal_runtime.proven_gap import Gap, GapThread, gap_of

from gimbal_kernels.placement import PlacementProblem, place
from gimbal_kernels.topology import Topology


def make_problem(layers: int = 2) -> PlacementProblem:
    traffic = np.random.default_rng(1).gamma(0.7, 100, (layers, 2, 8)).astype(np.int64)
    return PlacementProblem(traffic, Topology.grid(gpus_per_node=2, sources=2), 4)


def test_a_good_placement_has_a_small_gap_and_a_bad_one_a_large_one() -> None:
    problem = make_problem()
    good = gap_of(problem, place(problem).slots)
    bad = gap_of(problem, np.stack([np.argsort(-row.sum(axis=0)) for row in problem.traffic]))
    assert 0.0 <= good.mean <= good.worst < 0.2
    assert bad.mean > good.mean + 0.2


def test_layers_without_picks_do_not_count() -> None:
    problem = make_problem()
    traffic = np.concatenate([problem.traffic, np.zeros((3, 2, 8))])
    longer = PlacementProblem(traffic, problem.topology, 4)
    assert gap_of(longer, place(longer).slots) == gap_of(problem, place(problem).slots)
    assert gap_of(PlacementProblem(0 * traffic, problem.topology, 4), place(longer).slots) == Gap(0.0, 0.0)


def test_the_newest_waits_and_older_ones_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, done = threading.Event(), threading.Event(), threading.Event()
    published = []

    def slow(problem: object, slots: int) -> Gap:
        begun.set()
        assert release.wait(10)
        return Gap(float(slots), 0.0)

    def publish(window: int, gap: Gap) -> None:
        published.append((window, gap.mean))
        if window == 9:
            done.set()

    monkeypatch.setattr(proven_gap, "gap_of", slow)
    thread = GapThread(publish, lambda: None)
    thread.submit(0, None, 0)  # type: ignore[arg-type]
    assert begun.wait(10)
    for window in range(1, 10):
        thread.submit(window, None, window)  # type: ignore[arg-type]
    release.set()
    assert done.wait(10)
    assert published == [(0, 0.0), (9, 9.0)]


def test_an_error_ends_the_thread_and_nothing_else() -> None:
    failed = threading.Event()
    thread = GapThread(lambda *_: None, failed.set)
    thread.submit(1, make_problem(), [[0]])
    assert failed.wait(10)
    thread.submit(2, make_problem(), [[0]])  # nobody reads it, nobody waits
