"""A rank that is killed or hangs: the others name it in time, agree, hold whole layers, and go on."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import migration_ranks as group
import numpy as np
import pytest
import torch.distributed as dist
from migration_cases import random_slots

from gimbal_kernels.migration import BackgroundMigration, MigrationError, migrate
from gimbal_kernels.migration import host as compiled
from gimbal_kernels.migration.executors import ProcessGroupExecutor
from gimbal_kernels.migration.executors.board import Word

pytestmark = pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
MIGRATE = sys.modules["gimbal_kernels.migration.migrate"]
LAYERS, EXPERTS, SLOTS, RANKS = 4, 6, 16, 4
VICTIM, TIMEOUT = 2, 2.0
LONG = 10 * TIMEOUT  # generous: the machine may be busy


def two_maps() -> list[np.ndarray]:
    """Every expert has copies on several ranks; all layers change; two waves or more."""
    rng = np.random.default_rng(0)
    return [random_slots(rng, LAYERS, EXPERTS, SLOTS) for _ in range(2)]


def at_call(owner, name, number, action):
    """`action` runs before the `number`-th call (from 0) of a method or function."""
    real = getattr(owner, name)
    calls = iter(range(10**9))

    def patched(*args, **kwargs):
        if next(calls) == number:
            action()
        return real(*args, **kwargs)

    setattr(owner, name, patched)


def before_telling(executor, word, number, action):
    real = executor.board.tell
    calls = iter(range(10**9))

    def patched(told, value):
        if told == word and next(calls) == number:
            action()
        real(told, value)

    executor.board.tell = patched


def after_telling(executor, word, number, action):
    real = executor.board.tell
    calls = iter(range(10**9))

    def patched(told, value):
        real(told, value)
        if told == word and next(calls) == number:
            action()

    executor.board.tell = patched


def prepare_victim(executor, weights, point, action):
    """Where the victim stops: (what, which time)."""
    what, number = point
    if what == "staging":
        at_call(executor, "_push" if hasattr(executor, "_push") else "_send", number, action)
    elif what == "flag":
        at_call(executor, "_raise_flag", number, action)
    elif what == "enter":
        before_telling(executor, Word.ENTERED, 0, action)
    elif what == "ready":
        before_telling(executor, Word.READY, number, action)
    elif what == "agreement":  # after it said that it is ready, before it knows what was agreed
        after_telling(executor, Word.READY, number, action)
    else:  # in the middle of overwriting its slots
        before_telling(executor, Word.CONSUMED, number, action)


def attempt(plan, weights, executor, old):
    """What came of a migration, and the map in force; the weights must be what that map says."""
    held = [row.tolist() for row in np.asarray(old)]
    start = time.monotonic()
    try:
        migrate(
            plan, weights, executor, on_commit=lambda layer, slots: held.__setitem__(layer, slots.tolist())
        )
        outcome = "done"
    except MigrationError as error:
        outcome = (error.rank, error.layer)
    seconds = time.monotonic() - start
    assert group.experts_in(weights, EXPERTS) == group.share_of(held, executor.rank, executor.ranks)
    return outcome, held, seconds


def killed(rank, ranks, name, make, point):
    old, new = two_maps()
    weights = group.fill(old, rank, ranks)
    executor = make(weights, rank, ranks, name, staging_bytes=8 * weights.row_bytes, timeout=TIMEOUT)
    plan = group.plan(old, new, ranks)
    if rank == VICTIM:
        prepare_victim(executor, weights, point, group.vanish)
    outcome, held, seconds = attempt(plan, weights, executor, old)
    executor.close()
    go_on(make, weights, held, rank, name)
    return outcome, held, seconds, len(MIGRATE.prepare(plan, weights, executor))


def go_on(make, weights, held, rank, name):
    """The survivors form a group and migrate again."""
    survivors = [r for r in range(RANKS) if r != VICTIM]
    if dist.is_initialized():
        dist.destroy_process_group()
    maps = np.asarray(held).reshape(LAYERS, RANKS, -1)[:, survivors].reshape(LAYERS, -1)
    turned = np.roll(maps, maps.shape[1] // len(survivors), axis=1)
    me = survivors.index(rank)
    executor = make(weights, me, len(survivors), f"{name}-survivors")
    plan = group.plan(maps, turned, len(survivors))
    migrate(plan, weights, executor)
    assert group.experts_in(weights, EXPERTS) == group.share_of(plan.target.numpy(), me, len(survivors))


def check_survivors(results):
    assert results[VICTIM] == group.KILLED
    alive = [result for rank, result in enumerate(results) if rank != VICTIM]
    outcome, held, _, waves = alive[0]
    assert [result[0] for result in alive] == [outcome] * len(alive)
    assert [result[1] for result in alive] == [held] * len(alive)
    return outcome, held, max(result[2] for result in alive), waves


OLD, NEW = (slots.tolist() for slots in two_maps())
POINTS = [("shared_memory", ("staging", 1)), ("shared_memory", ("flag", 1)), ("shared_memory", ("ready", 0))]
POINTS += [("process_group", ("staging", 0))]
MORE = [("shared_memory", ("enter", 0)), ("shared_memory", ("staging", 0)), ("shared_memory", ("flag", 0))]
MORE += [("process_group", ("staging", 1)), ("process_group", ("ready", 0))]
POINTS += [pytest.param(*more, marks=pytest.mark.slow) for more in MORE]


@pytest.mark.parametrize(("make", "point"), POINTS)
def test_row_44_a_rank_killed_before_the_agreement_leaves_the_old_map_everywhere(make, point):
    results = group.run_ranks(RANKS, killed, group.EXECUTORS[make], point)
    outcome, held, seconds, waves = check_survivors(results)
    assert waves > 1
    assert outcome[0] == VICTIM
    assert 0 <= outcome[1] < LAYERS
    assert held == OLD
    assert seconds < LONG


@pytest.mark.parametrize("make", group.EXECUTORS)
@pytest.mark.parametrize(
    "where", ["first commit", "last commit", pytest.param("last agreement", marks=pytest.mark.slow)]
)
def test_row_44_a_rank_killed_after_the_agreement_leaves_the_new_map_where_it_was_agreed(make, where):
    plan = group.plan(*two_maps(), RANKS)
    waves = plan.waves(4)
    number = 0 if where == "first commit" else len(waves) - 1
    point = ("commit" if where.endswith("commit") else "agreement", number)
    results = group.run_ranks(RANKS, killed, group.EXECUTORS[make], point)
    outcome, held, seconds, count = check_survivors(results)
    assert count == len(waves) > 1
    target = plan.target.tolist()
    if number:
        assert outcome == "done"
        assert held == target
    else:
        assert outcome[0] == VICTIM
        # It had said that it was ready for the next wave, too.
        assert len(waves) > 2
        assert outcome[1] in waves[2].layers
        new = waves[0].layers + waves[1].layers
        assert held == [target[i] if i in new else OLD[i] for i in range(LAYERS)]
    assert seconds < LONG


def hanging(rank, ranks, name, point):
    old, new = two_maps()
    weights = group.fill(old, rank, ranks)
    executor = group.shared_memory(
        weights, rank, ranks, name, staging_bytes=8 * weights.row_bytes, timeout=TIMEOUT
    )
    note = Path(tempfile.gettempdir()) / f"gimbal-pid-{name}"
    if rank == VICTIM:
        note.write_text(str(os.getpid()))
        prepare_victim(executor, weights, point, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    first = attempt(group.plan(old, new, ranks), weights, executor, old)
    if rank == 0:
        os.kill(int(note.read_text()), signal.SIGCONT)
        note.unlink()
    assert executor.health == "ready"
    executor.timeout = 20.0
    plan = group.plan(first[1], new, ranks)
    return first, attempt(plan, weights, executor, first[1]), plan.target.tolist()


@pytest.mark.parametrize(
    "point", [("staging", 1), *(pytest.param(p, marks=pytest.mark.slow) for p in [("flag", 1), ("ready", 0)])]
)
def test_a_rank_that_hangs_is_named_and_may_come_back(point):
    """What it still writes when it wakes must not reach the next migration's experts."""
    results = group.run_ranks(RANKS, hanging, point)
    for first, second, target in results:
        assert first[0][0] == VICTIM
        assert first[1] == OLD
        assert second[0] == "done"
        assert second[1] == target
    assert len({first[0] for first, _, _ in results}) == 1


def failing(rank, ranks, name, make):
    old, new = two_maps()
    weights = group.fill(old, rank, ranks)
    executor = make(weights, rank, ranks, name, timeout=LONG)

    def fail():
        raise OSError("copy engine")

    if rank == VICTIM:
        prepare_victim(executor, weights, ("staging", 1), fail)
    return attempt(group.plan(old, new, ranks), weights, executor, old), executor.health


@pytest.mark.parametrize("make", group.EXECUTORS)
def test_a_rank_that_fails_says_so_and_nobody_waits_for_the_timeout(make):
    results = group.run_ranks(RANKS, failing, group.EXECUTORS[make])
    for (outcome, held, seconds), health in results:
        assert outcome[0] == VICTIM
        assert held == OLD
        assert seconds < LONG / 2
        assert (health == "ready") == (make == "shared_memory")


def serve(pipe):
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def without_store(rank, ranks, name, server, port, signal_number, background):
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    files = dist.FileStore(str(Path(tempfile.gettempdir()) / f"gimbal-store-{name}"), ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=ranks)
    old, new = two_maps()
    weights = group.fill(old, rank, ranks)
    executor = ProcessGroupExecutor(weights, group=dist.group.WORLD, store=store, timeout=TIMEOUT)
    plan = group.plan(old, new, ranks)
    if rank == VICTIM:  # before it says that it is ready: nothing can have been agreed
        prepare_victim(executor, weights, ("ready", 0), lambda: os.kill(server, signal_number))
    if background:
        moving = BackgroundMigration(plan, weights, executor, bytes_per_step=10**9)
        error = step_until_it_raises(moving)
        assert moving.health == f"failed: {error}"
    else:
        with pytest.raises(MigrationError) as caught:
            migrate(plan, weights, executor)
        error = caught.value
    assert group.experts_in(weights, EXPERTS) == group.share_of(old, rank, ranks)
    with pytest.raises(RuntimeError, match=r"cannot be used any more: .*lost the store"):
        executor.enter(1)
    executor.close()
    return error.rank == rank and "lost the store by which the ranks agree" in str(error)


def step_until_it_raises(moving):
    end = time.monotonic() + LONG
    number = 0
    while time.monotonic() < end:
        try:
            moving.step(number)
        except MigrationError as error:
            return error
        number += 1
        time.sleep(1e-3)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("signal_number", "background"),
    [
        (signal.SIGKILL, False),
        (signal.SIGSTOP, False),
        pytest.param(signal.SIGSTOP, True, marks=pytest.mark.slow),
    ],
)
def test_row_44_a_store_that_is_lost_or_hangs_is_an_error_and_the_old_map_stays(signal_number, background):
    ours, theirs = group.FORK.Pipe()
    server = group.FORK.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        port = ours.recv()
        results = group.run_ranks(RANKS, without_store, server.pid, port, signal_number, background)
        assert results == [True] * RANKS
    finally:
        server.kill()
        server.join()
