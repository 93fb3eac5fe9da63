"""Migration: planner, and four processes that move experts by three ways and by the installed vLLM's, in one run.

    python -m pytest bench/test_migration.py -s --benchmark-json=migration.json

Times compare only within one run. Layer sizes are qwen's scaled down (SPEC section 1): a quarter of the expert, a
quarter of the experts, an eighth of the layers. Every way moves 75 % of the experts and back again; the ways take
turns, and the median over the turns is reported. A way's time ends when the slowest rank has all experts in place.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gimbal_kernels.migration import ExpertWeights, host, migrate, plan_migration
from gimbal_kernels.migration.executors import ProcessGroupExecutor, SharedMemoryExecutor
from gimbal_kernels.topology import Topology

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "migration"))
from migration_cases import random_slots, swapped
from migration_ranks import run_ranks

RANKS, LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 4, 6, 32, 1024, 384
TURNS = 7


def spread(seed: int) -> tuple[np.ndarray, np.ndarray, Topology]:
    """58 layers, 256 experts and 64 copies on 8 nodes of 8."""
    rng = np.random.default_rng(seed)
    old = random_slots(rng, 58, 256, 320)
    return old, rng.permuted(old, axis=1), Topology.grid(nodes=8, gpus_per_node=8, sources=8)


SHAPES = {
    "qwen 48x128 on 4, 75 % moved": lambda: (
        *swapped(np.random.default_rng(0), 48, 128, 4, 0.75),
        Topology.grid(gpus_per_node=4, sources=2),
    ),
    "58x256+64 on 8x8, all moved": lambda: spread(0),
}


@pytest.mark.parametrize("backend", ["host", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_planner(benchmark, shape, backend):
    if backend == "host" and host.status() != "ready":
        pytest.skip(host.status())
    old, new, topology = SHAPES[shape]()
    benchmark.group = shape

    def run():
        return plan_migration(old, new, topology, bytes_per_expert=9_437_184, backend=backend)

    plan = benchmark(run) if backend == "host" else benchmark.pedantic(run, rounds=3)
    busiest = max(int(plan.bytes_in.max()), int(plan.bytes_out.max()))
    benchmark.extra_info.update(
        transfers=len(plan.transfers),
        rounds=len(plan.rounds),
        busiest_rank_gb=busiest / 1e9,
        lower_bound_ms_at_450_gb_s=round(plan.lower_bound(450e9) * 1e3, 2),
    )


def make_weights(rank: int, slots: np.ndarray) -> ExpertWeights:
    """Each expert's tensors are filled with its number, so that the result can be checked."""
    size = EXPERTS // RANKS
    layers = []
    for row in slots.reshape(LAYERS, RANKS, size)[:, rank].tolist():
        w13 = torch.empty(size, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
        w2 = torch.empty(size, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
        for slot, expert in enumerate(row):
            w13[slot], w2[slot] = expert, expert
        layers.append({"w13": w13, "w2": w2})
    return ExpertWeights(layers)


def ways(rank: int, name: str, old: np.ndarray) -> dict:
    """Name -> (weights, function that moves them from one map to another and returns where they are then)."""
    store = dist.FileStore(str(Path(tempfile.gettempdir()) / f"gimbal-store-{name}"), -1)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=RANKS)
    topology = Topology(np.ones((1, RANKS)))
    found = {}
    for way in ("shared_memory", "process_group gloo"):
        weights = make_weights(rank, old)
        if way == "shared_memory":
            executor = SharedMemoryExecutor(weights, rank=rank, ranks=RANKS, name=name)
        else:
            board = serve_store(rank, store)
            executor = ProcessGroupExecutor(weights, group=dist.group.WORLD, store=board)

        def move(before, after, weights=weights, executor=executor):
            plan = plan_migration(before, after, topology, bytes_per_expert=weights.bytes_per_expert)
            migrate(plan, weights, executor)
            return plan.target.numpy()

        found[way] = (weights, move)
    found["vLLM in place, gloo"] = vllm_way(make_weights(rank, old))
    return found


def serve_store(rank: int, store: dist.Store) -> dist.Store:
    """A store as servers have it: rank 0 serves, the others find its port in the file."""
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, RANKS, is_master=True, wait_for_workers=False)
        store.set("port", str(served.port))
        return served
    return dist.TCPStore("127.0.0.1", int(store.get("port")), RANKS, is_master=False, wait_for_workers=False)


def vllm_way(weights: ExpertWeights) -> tuple:
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    tensors = [list(layer.values()) for layer in weights.layers]
    buffers = [torch.zeros_like(tensor) for tensor in tensors[0]]
    communicator = TorchDistNcclEplbCommunicator(dist.group.WORLD)

    def move(before, after):
        rearrange_expert_weights_inplace(
            torch.from_numpy(before).long(),
            torch.from_numpy(after).long(),
            tensors,
            buffers,
            dist.group.WORLD,
            communicator,
        )
        return after

    return weights, move


def race(rank: int, ranks: int, name: str, old: np.ndarray, new: np.ndarray) -> dict[str, list[float]]:
    """Seconds of each turn of each way, as this rank saw them, barrier to barrier."""
    found = ways(rank, name, old)
    seconds: dict[str, list[float]] = {way: [] for way in found}
    current = dict.fromkeys(found, old)
    for turn in range(TURNS + 1):
        after = (new, old)[turn % 2]
        for way, (weights, move) in found.items():
            dist.barrier()
            start = time.perf_counter()
            current[way] = move(current[way], after)
            dist.barrier()
            if turn:  # the first turn touches everything for the first time
                seconds[way].append(time.perf_counter() - start)
            expected = sorted(after.reshape(LAYERS, RANKS, -1)[0, rank].tolist())
            held = sorted(weights.layers[0]["w2"][:, 0, 0].tolist())
            assert held == expected, (way, turn)
    return seconds


def test_transfers_against_vllm(benchmark):
    pytest.importorskip("vllm.distributed.eplb.rebalance_execute")
    old, new = swapped(np.random.default_rng(0), LAYERS, EXPERTS, RANKS, 0.75)
    plan = plan_migration(old, new, Topology(np.ones((1, RANKS))), bytes_per_expert=6 * HIDDEN * INTERMEDIATE)
    benchmark.group = "transfers"
    results = benchmark.pedantic(run_ranks, (RANKS, race, old, new), {"limit": 600}, rounds=1)
    total = int(plan.bytes_in.sum())
    print(
        f"\n{total / 1e6:.0f} MB moved, busiest rank {max(plan.bytes_in.max(), plan.bytes_out.max()) / 1e6:.0f} MB"
    )
    medians = {
        way: statistics.median(map(max, zip(*(r[way] for r in results), strict=True))) for way in results[0]
    }
    stock = medians["vLLM in place, gloo"]
    for way, median in medians.items():
        speed = total / median / 1e9
        benchmark.extra_info[way] = {
            "ms": round(median * 1e3, 1),
            "gb_s": round(speed, 2),
            "x_vllm": round(stock / median, 2),
        }
        print(f"{way:24s} {median * 1e3:8.1f} ms  {speed:6.2f} GB/s  {stock / median:5.2f} x vLLM")
