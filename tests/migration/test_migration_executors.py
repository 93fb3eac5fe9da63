"""Executors between real processes: every bit arrives, maps and weights change together, inputs are checked."""

from __future__ import annotations

import os
from pathlib import Path

import migration_ranks as group
import numpy as np
import pytest
import torch
from migration_cases import random_slots

from gimbal_kernels.migration import ExpertWeights, migrate
from gimbal_kernels.migration import host as compiled
from gimbal_kernels.migration.executors import SharedMemoryExecutor

pytestmark = pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
LAYERS, EXPERTS, SLOTS = 5, 12, 16


def random_chain(seed: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [random_slots(rng, LAYERS, EXPERTS, SLOTS) for _ in range(length)]


def move_along(rank, ranks, name, make, chain, staged_experts):
    """Migrates from map to map; after each, every slot must hold its expert, bit for bit."""
    weights = group.fill(chain[0], rank, ranks)
    size = None if staged_experts is None else 2 * staged_experts * weights.row_bytes
    executor = make(weights, rank, ranks, name, staging_bytes=size)
    current, waves, received = chain[0], 0, 0
    for new in chain[1:]:
        maps = {}
        plan = group.plan(current, new, ranks)
        report = migrate(
            plan, weights, executor, on_commit=lambda layer, slots, maps=maps: maps.update({layer: slots})
        )
        assert sorted(maps) == list(report.layers) == plan.changed_layers
        for layer, slots in maps.items():
            assert slots.tolist() == plan.target[layer].tolist()
        current = plan.target.numpy()
        assert group.experts_in(weights, EXPERTS) == group.share_of(current, rank, ranks)
        assert report.bytes_received == int(plan.bytes_in[rank]) * weights.bytes_per_expert
        waves += report.waves
        received += report.bytes_received
    executor.close()
    return waves, received


@pytest.mark.parametrize("make", group.EXECUTORS.values(), ids=group.EXECUTORS)
@pytest.mark.parametrize("staged_experts", [None, 4])
def test_row_40_every_dtype_moves_bit_exactly(make, staged_experts):
    results = group.run_ranks(4, move_along, make, random_chain(0, 6), staged_experts)
    waves, received = zip(*results, strict=True)
    assert len(set(waves)) == 1
    assert sum(received) > 0
    if staged_experts:
        assert waves[0] > 10  # a small buffer makes many waves, and both generations are used again and again


def test_row_37_staging_is_allocated_once_and_its_size_is_logged(caplog):
    weights = group.fill([[0, 1, 2, 3]], 0, 1)
    with caplog.at_level("INFO", logger="gimbal_kernels.migration"):
        executor = group.shared_memory(
            weights, 0, 1, f"log-{os.getpid()}", staging_bytes=10 * weights.row_bytes + 5
        )
    assert executor.rows == 5
    assert executor.staging_bytes == 10 * weights.row_bytes
    assert f"{executor.staging_bytes} bytes of migration staging" in caplog.text
    executor.close()


def measure_memory(rank, ranks, name, rows):
    """Growth of resident memory over one migration of 64 MiB per rank, in bytes."""
    size = 1 << 20
    slots = np.arange(ranks * rows)[None]
    weights = ExpertWeights([{"w": torch.full((rows, size), rank, dtype=torch.uint8)}])
    executor = group.shared_memory(weights, rank, ranks, name)
    plan, back = (
        group.plan(old, new, ranks)
        for old, new in ((slots, np.roll(slots, rows, 1)), (np.roll(slots, rows, 1), slots))
    )
    migrate(plan, weights, executor)
    migrate(back, weights, executor)  # what Python imports and compiles at first use
    before = resident()
    report = migrate(plan, weights, executor)
    grown = resident() - before
    assert (weights.layers[0]["w"] == (rank - 1) % ranks).all()
    assert report.bytes_received == rows * size
    return grown


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_row_37_a_migration_allocates_nothing_beyond_staging():
    for grown in group.run_ranks(2, measure_memory, 32):
        assert abs(grown) <= 1 << 20


def other_layout(rank, ranks, name):
    weights = group.fill([[0, 1, 2, 3]], rank, ranks)
    if rank == 1:
        weights = ExpertWeights([{"w": torch.zeros(weights.layers[0]["w2"].shape)}])
    with pytest.raises(ValueError, match=r"weights: rank \d has other tensors or another staging size"):
        group.shared_memory(weights, rank, ranks, name, start_timeout=3.0)
    return True


def test_ranks_with_other_tensors_are_refused():
    assert group.run_ranks(2, other_layout) == [True, True]
    assert not list(Path("/dev/shm").glob("gimbal-*"))


def other_plan(rank, ranks, name):
    weights = group.fill([[0, 1, 2, 3]], rank, ranks)
    executor = group.shared_memory(weights, rank, ranks, name)
    new = [[2, 3, 0, 1]] if rank == 0 else [[3, 1, 2, 0]]
    with pytest.raises(
        RuntimeError, match="layer 0: rank 1 has another plan or other weights than rank 0"
    ) as caught:
        migrate(group.plan([[0, 1, 2, 3]], new, ranks), weights, executor)
    assert caught.value.rank == 1
    assert group.experts_in(weights, 4) == group.share_of([[0, 1, 2, 3]], rank, ranks)
    migrate(group.plan([[0, 1, 2, 3]], [[2, 3, 0, 1]], ranks), weights, executor)
    return group.experts_in(weights, 4)


def test_ranks_with_other_plans_move_nothing_and_may_try_again():
    assert group.run_ranks(2, other_plan) == [[[2, 3]], [[0, 1]]]


def hook_calls(rank, ranks, name):
    calls = []
    chain = random_chain(3, 2)
    chain[1][2] = chain[0][2]
    weights = group.fill(chain[0], rank, ranks, after_commit=calls.append)
    executor = group.shared_memory(weights, rank, ranks, name)
    plan = group.plan(*chain, ranks)

    def on_commit(layer, slots):
        assert calls[-1] == layer  # derived tensors are fresh before the map is swapped

    migrate(plan, weights, executor, on_commit=on_commit)
    return calls, plan.changed_layers


def test_row_39_the_hook_runs_once_for_every_moved_layer():
    for calls, changed in group.run_ranks(2, hook_calls):
        assert calls == changed == [0, 1, 3, 4]


def failing_callback(rank, ranks, name):
    chain = random_chain(4, 2)
    weights = group.fill(chain[0], rank, ranks)
    executor = group.shared_memory(weights, rank, ranks, name, staging_bytes=8 * weights.row_bytes)
    plan = group.plan(*chain, ranks)
    seen = []

    def on_commit(layer, slots):
        seen.append(layer)
        if rank == 1 and layer == plan.changed_layers[0]:
            raise KeyError("map")

    try:
        migrate(plan, weights, executor, on_commit=on_commit)
    except KeyError:
        error = "own"
    except RuntimeError as caught:
        error = caught.rank
    held = group.experts_in(weights, EXPERTS)
    new, old = group.share_of(plan.target.numpy(), rank, ranks), group.share_of(chain[0], rank, ranks)
    assert held == [new[layer] if layer in seen else old[layer] for layer in range(LAYERS)]
    return error, seen


def test_an_exception_in_a_callback_leaves_whole_layers_everywhere():
    results = group.run_ranks(4, failing_callback)
    assert [error for error, _ in results] == [1, "own", 1, 1]
    assert len({tuple(seen) for _, seen in results}) == 1


def test_bad_arguments_are_refused():
    weights = group.fill([[0, 1, 2, 3]], 0, 1)
    name = f"bad-{os.getpid()}"
    with pytest.raises(ValueError, match="rank: 2 of 2; valid: 0 to ranks - 1"):
        SharedMemoryExecutor(weights, rank=2, ranks=2, name=name)
    with pytest.raises(ValueError, match="timeout: 0; valid: seconds > 0"):
        SharedMemoryExecutor(weights, rank=0, ranks=1, name=name, timeout=0)
    for size in (10, 1e6, True):
        with pytest.raises(ValueError, match=f"staging_bytes: {size}; valid: an integer, at least"):
            SharedMemoryExecutor(weights, rank=0, ranks=1, name=name, staging_bytes=size)
    for bad in ("", "a/b"):
        with pytest.raises(ValueError, match=f"name: '{bad}'; valid: part of a file's name"):
            SharedMemoryExecutor(weights, rank=0, ranks=1, name=bad)
    executor = SharedMemoryExecutor(weights, rank=0, ranks=1, name=name)
    with pytest.raises(ValueError, match="plan: 2 ranks"):
        migrate(group.plan([[0, 1, 2, 3]], [[2, 3, 0, 1]], 2), weights, executor)
    with pytest.raises(ValueError, match="weights: not those that the executor was made with"):
        migrate(group.plan([[0, 1, 2, 3]], [[2, 3, 0, 1]], 1), group.fill([[0, 1, 2, 3]], 0, 1), executor)
    executor.close()
    with pytest.raises(RuntimeError, match="cannot be used any more: closed"):
        migrate(group.plan([[0, 1, 2, 3]], [[0, 1, 2, 2]], 1), weights, executor)


def too_small(rank, ranks, name):
    weights = group.fill([[0, 1, 2, 3, 4, 5]], rank, ranks)
    executor = group.shared_memory(weights, rank, ranks, name, staging_bytes=4 * weights.row_bytes)
    need = 6 * weights.row_bytes
    with pytest.raises(ValueError, match=f"plan: layer 0 brings 3 experts to rank 0, .* at least {need}"):
        migrate(group.plan([[0, 1, 2, 3, 4, 5]], [[3, 4, 5, 0, 1, 2]], 2), weights, executor)


def test_a_layer_that_does_not_fit_into_staging_is_refused():
    group.run_ranks(2, too_small)


def test_a_name_in_use_is_refused():
    path = Path("/dev/shm/gimbal-taken-0")
    path.write_bytes(b"x")
    try:
        with pytest.raises(ValueError, match="name: 'taken' is in use on this machine"):
            SharedMemoryExecutor(group.fill([[0, 1]], 0, 1), rank=0, ranks=1, name="taken")
    finally:
        path.unlink()
