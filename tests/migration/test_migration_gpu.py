"""What only CUDA devices show: staging mapped by IPC between processes, here two of them on one GPU."""

from __future__ import annotations

import json
import multiprocessing
import runpy
import subprocess
import sys
from pathlib import Path

import migration_ranks as group
import numpy as np
import pytest
from migration_cases import random_slots

from gimbal_kernels.migration import ExpertWeights, migrate
from gimbal_kernels.migration import host as compiled
from gimbal_kernels.migration.executors import PeerMemoryExecutor, peer_memory

READY = peer_memory.status()
LAYERS, EXPERTS, SLOTS, RANKS = 3, 6, 8, 2


def random_chain(length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [random_slots(rng, LAYERS, EXPERTS, SLOTS) for _ in range(length)]


def move_along(rank, ranks, name, small_bytes):
    chain = random_chain(6)
    host = group.fill(chain[0], rank, ranks)
    weights = ExpertWeights([{key: value.cuda() for key, value in layer.items()} for layer in host.layers])
    executor = PeerMemoryExecutor(
        weights, rank=rank, ranks=ranks, name=name, timeout=20.0, small_bytes=small_bytes
    )
    assert (executor._small is not None) == (small_bytes > 0)  # with the kernel, not beside it
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
@pytest.mark.parametrize("small_bytes", [0, 40, 1 << 16])
def test_every_dtype_moves_bit_exactly_between_two_processes(small_bytes):
    """By copies alone, by copies and the copy kernel, by the kernel alone."""
    spawn = multiprocessing.get_context("spawn")
    assert group.run_ranks(RANKS, move_along, small_bytes, limit=120, context=spawn) == [True] * RANKS


@pytest.mark.skipif(READY == "ready", reason="it is available here")
def test_without_a_gpu_it_says_why():
    weights = group.fill([[0, 1]], 0, 1)
    with pytest.raises(
        ValueError, match=r"executor: PeerMemoryExecutor is not available: .*; valid: process_group"
    ):
        PeerMemoryExecutor(weights, rank=0, ranks=1, name="none")


SCRIPT = Path(__file__).parents[2] / "bench" / "device_migration.py"


@pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
def test_the_device_benchmark_checks_every_byte_here_over_shared_memory(tmp_path):
    table = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--expert-bytes", "3000", "--json", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(table.read_text())
    assert result["wrong_experts"] == 0
    assert result["megabytes"] == pytest.approx(4 * 64 * 3004 / 1e6, abs=0.05)
    assert result["migration_gb_s"] > 0


def test_the_device_benchmark_claims_nothing_where_the_device_was_not_full():
    explain = runpy.run_path(str(SCRIPT))["explain"]
    assert [explain(*seen)[:6] for seen in ((True, True), (False, True))] == ["0: cop", "needed"]
    assert explain(True, False) == explain(False, False)
    assert explain(True, False).startswith("not shown")


def test_the_device_benchmark_sees_one_wrong_byte():
    script, sizes = runpy.run_path(str(SCRIPT)), {"w13": 200, "w2": 100}
    weights = script["make_weights"]([5, 9], sizes, "cpu")
    assert script["wrong_experts"](weights, [5, 9], sizes, "cpu") == 0
    assert script["wrong_experts"](weights, [9, 5], sizes, "cpu") == 2 * weights.num_layers
    weights.layers[1]["w2"][0, 50] += 1
    assert script["wrong_experts"](weights, [5, 9], sizes, "cpu") == 1
