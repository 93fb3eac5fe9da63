"""What only CUDA devices show: staging mapped by IPC between processes, here two of them on one GPU."""

from __future__ import annotations

import multiprocessing

import migration_ranks as group
import numpy as np
import pytest
from migration_cases import random_slots

from gimbal_kernels.migration import ExpertWeights, migrate
from gimbal_kernels.migration.executors import PeerMemoryExecutor, peer_memory

READY = peer_memory.status()
LAYERS, EXPERTS, SLOTS, RANKS = 3, 6, 8, 2


def random_chain(length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [random_slots(rng, LAYERS, EXPERTS, SLOTS) for _ in range(length)]


def move_along(rank, ranks, name):
    chain = random_chain(6)
    host = group.fill(chain[0], rank, ranks)
    weights = ExpertWeights([{key: value.cuda() for key, value in layer.items()} for layer in host.layers])
    executor = PeerMemoryExecutor(weights, rank=rank, ranks=ranks, name=name, timeout=20.0)
    current = chain[0]
    for new in chain[1:]:
        plan = group.plan(current, new, ranks)
        migrate(plan, weights, executor)
        current = plan.target.numpy()
        assert group.experts_in(weights, EXPERTS) == group.share_of(current, rank, ranks)
    executor.close()
    return True


@pytest.mark.gpu
@pytest.mark.skipif(READY != "ready", reason=READY)
def test_every_dtype_moves_bit_exactly_between_two_processes():
    spawn = multiprocessing.get_context("spawn")
    assert group.run_ranks(RANKS, move_along, limit=120, context=spawn) == [True] * RANKS


@pytest.mark.skipif(READY == "ready", reason="it is available here")
def test_without_a_gpu_it_says_why():
    weights = group.fill([[0, 1]], 0, 1)
    with pytest.raises(
        ValueError, match=r"executor: PeerMemoryExecutor is not available: .*; valid: process_group"
    ):
        PeerMemoryExecutor(weights, rank=0, ranks=1, name="none")
