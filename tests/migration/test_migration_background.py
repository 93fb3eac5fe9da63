"""Migration beside serving: the budget holds; a worker that fails, hangs or vanishes surfaces at the next step."""

from __future__ import annotations

import time

import migration_ranks as group
import numpy as np
import pytest
from migration_cases import random_slots

from gimbal_kernels.migration import BackgroundMigration, MigrationError, migrate
from gimbal_kernels.migration import host as compiled

pytestmark = pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
LAYERS, EXPERTS, SLOTS, RANKS = 4, 6, 12, 3
VICTIM, TIMEOUT = 1, 2.0


def maps(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [random_slots(rng, LAYERS, EXPERTS, SLOTS) for _ in range(count)]


class Serving:
    """The steps of one rank: in lockstep with the others as long as they live."""

    def __init__(self, rank, barrier, weights, executor, slots):
        self.rank, self.barrier, self.weights, self.executor = rank, barrier, weights, executor
        self.slots = [row.tolist() for row in slots]
        self.number = 0

    def begin(self, plan, budget):
        self.plan = plan
        self.moving = BackgroundMigration(
            plan, self.weights, self.executor, bytes_per_step=budget, on_commit=self.set_map
        )

    def set_map(self, layer, slots):
        self.slots[layer] = slots.tolist()

    def step(self):
        committed = self.moving.step(self.number)
        self.number += 1
        self.barrier.wait(self.rank, 2 * TIMEOUT)
        time.sleep(2e-4)
        return committed

    def run(self, limit=20.0):
        """Steps until all is committed, or the rank and layer of the error, then compares weights and map."""
        outcome = "done"
        try:
            end = time.monotonic() + limit
            while not self.moving.done:
                assert time.monotonic() < end
                self.step()
        except MigrationError as error:
            outcome = (error.rank, error.layer)
            self.barrier.leave(self.rank)  # nobody waits for a rank that stopped stepping
        held = group.share_of(self.slots, self.rank, self.executor.ranks)
        assert group.experts_in(self.weights, EXPERTS) == held
        return outcome


def start(rank, ranks, name, barrier, make, **options):
    old, new = maps(2)
    weights = group.fill(old, rank, ranks)
    executor = make(weights, rank, ranks, name, **({"timeout": TIMEOUT} | options))
    serving = Serving(rank, barrier, weights, executor, old)
    return serving, group.plan(old, new, ranks)


def chain(rank, ranks, name, barrier, make):
    serving, _ = start(rank, ranks, name, barrier, make, timeout=20.0)
    outcomes = []
    for new in maps(4)[1:]:
        serving.begin(group.plan(np.asarray(serving.slots), new, ranks), 400)
        outcomes.append(serving.run())
        assert serving.slots == serving.plan.target.tolist()
        assert serving.moving.health == "done"
    return outcomes


@pytest.mark.parametrize("make", group.EXECUTORS)
def test_migrations_beside_serving_complete(make):
    results = group.run_ranks(RANKS, chain, group.Lockstep(RANKS), group.EXECUTORS[make])
    assert results == [["done"] * 3] * RANKS


def budgeted(rank, ranks, name, barrier, budget):
    serving, plan = start(rank, ranks, name, barrier, group.shared_memory, timeout=20.0)
    sent = []
    real = serving.executor._native.gimbal_migration_copy

    class Counting:
        def __getattr__(self, attribute):
            return getattr(compiled.require(), attribute)

        def gimbal_migration_copy(self, pieces, count):
            sent.append(tensor_bytes(pieces))
            real(pieces, count)

    serving.executor._native = Counting()
    serving.begin(plan, budget)
    given, allowed = 0, True
    while not serving.moving.done:
        committed = serving.step()
        assert len(committed) <= 1  # a layer per step at most is copied out of staging
        given += budget
        allowed &= sum(sent) <= given + budget
    own = int(plan.bytes_out[rank]) * serving.weights.bytes_per_expert
    return allowed, sum(sent), own, serving.number, max(sent)


def tensor_bytes(pieces):
    return int(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint64 * 3).from_address(pieces))[2])


@pytest.mark.parametrize("budget", [50, 500])
def test_rows_36_and_46_a_step_sends_no_more_than_its_budget(budget):
    """Even where a single tensor (96 bytes) is larger than what a step may send (50)."""
    for allowed, sent, own, steps, largest in group.run_ranks(RANKS, budgeted, group.Lockstep(RANKS), budget):
        assert allowed
        assert sent == own
        assert largest == 96
        assert steps * budget >= own


def test_row_36_the_report_gives_time_and_speed():
    weights = group.fill([[0, 1]], 0, 1)
    executor = group.shared_memory(weights, 0, 1, "report")
    report = migrate(group.plan([[0, 1]], [[0, 0]], 1), weights, executor)
    assert report.layers == (0,)
    assert (report.waves, report.bytes_received, report.gigabytes_per_second) == (1, 0, 0.0)
    assert report.seconds > 0
    executor.close()


def failing(rank, ranks, name, barrier, make, how, later=None):
    serving, plan = start(rank, ranks, name, barrier, make)
    push = "_push" if hasattr(serving.executor, "_push") else "_send"
    if rank == VICTIM:
        real = getattr(serving.executor, push)
        calls = iter(range(10**6))

        def faulty(*args):
            if next(calls) == 1:
                how()
            return real(*args)

        setattr(serving.executor, push, faulty)
    serving.begin(plan, 10**9)
    outcome = serving.run()
    health = serving.moving.health
    again = None
    if (
        later and serving.executor.health == "ready"
    ):  # serving went on with the old placement; the next attempt works
        serving.executor.timeout = 20.0
        serving.barrier = later
        serving.number = 0
        serving.begin(group.plan(np.asarray(serving.slots), maps(2)[1], ranks), 10**9)
        again = serving.run()
    return outcome, health, again


def raise_error():
    raise OSError("copy engine")


def end_silently():
    raise SystemExit


def hang():
    time.sleep(3 * TIMEOUT)


@pytest.mark.parametrize("how", [raise_error, end_silently, hang])
def test_row_42_a_worker_that_fails_ends_or_hangs_surfaces_at_the_next_step(how):
    # A thread that hangs could still write to the others when it wakes: no second attempt with this executor.
    later = None if how is hang else group.Lockstep(RANKS)
    results = group.run_ranks(RANKS, failing, group.Lockstep(RANKS), group.shared_memory, how, later)
    for outcome, health, again in results:
        assert outcome[0] == VICTIM
        assert health.startswith("failed: migration abandoned at layer")
        assert again == ("done" if later else None)
    assert len({outcome for outcome, _, _ in results}) == 1


def test_row_42_a_worker_that_fails_surfaces_with_a_process_group_too():
    results = group.run_ranks(RANKS, failing, group.Lockstep(RANKS), group.process_group, raise_error)
    assert [outcome[0] for outcome, _, _ in results] == [VICTIM] * RANKS


@pytest.mark.parametrize("make", ["shared_memory", pytest.param("process_group", marks=pytest.mark.slow)])
def test_row_44_a_rank_killed_while_it_serves_is_named_by_the_others(make):
    results = group.run_ranks(RANKS, failing, group.Lockstep(RANKS), group.EXECUTORS[make], group.vanish)
    assert results[VICTIM] == group.KILLED
    alive = [result for result in results if result != group.KILLED]
    assert [outcome[0] for outcome, _, _ in alive] == [VICTIM] * (RANKS - 1)
    assert len({outcome for outcome, _, _ in alive}) == 1


def closing(rank, ranks, name, barrier):
    serving, plan = start(rank, ranks, name, barrier, group.shared_memory)
    serving.begin(plan, 300)
    while len(plan.changed_layers) and serving.moving._committed < 1:
        serving.step()
    if rank == VICTIM:
        serving.moving.close()
    outcome = serving.run()
    return outcome, [serving.slots[i] == plan.target[i].tolist() for i in range(LAYERS)]


def test_a_migration_that_is_closed_ends_on_all_ranks_with_whole_layers():
    results = group.run_ranks(RANKS, closing, group.Lockstep(RANKS))
    assert len({outcome for outcome, _ in results}) == 1
    assert results[0][0][0] == VICTIM
    assert len({tuple(new) for _, new in results}) == 1
    new = results[0][1]
    assert new[0]
    assert not new[-1]
    assert new == sorted(
        new, reverse=True
    )  # in order, and what was agreed before the end is committed everywhere


def out_of_step(rank, ranks, name, barrier):
    serving, plan = start(rank, ranks, name, barrier, group.shared_memory, timeout=20.0)
    serving.begin(plan, 10**9)
    serving.number = 5 * rank  # numbers that mean different passes
    try:
        serving.run()
    except RuntimeError as error:
        serving.barrier.leave(rank)
        return str(error)
    return "nothing"


def test_ranks_that_count_differently_are_told():
    messages = group.run_ranks(2, out_of_step, group.Lockstep(2))
    assert any("further apart than lead = 1" in message for message in messages)


def test_bad_arguments_are_refused():
    weights = group.fill([[0, 1]], 0, 1)
    executor = group.shared_memory(weights, 0, 1, "arguments")
    plan = group.plan([[0, 1]], [[0, 0]], 1)
    for name in ("bytes_per_step", "lead"):
        with pytest.raises(ValueError, match=f"{name}: 0; valid: at least 1"):
            BackgroundMigration(plan, weights, executor, **({"bytes_per_step": 1} | {name: 0}))
    executor.close()
