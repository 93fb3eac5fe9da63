"""Experts between two processes on one GPU, by CUDA IPC, against a plain copy on the same device in the same run.

    python bench/device_migration.py [--device cuda] [--json FILE]

Each process holds half of the experts (SPEC section 1: qwen's size) and hands all of them to the other, there and
back. Every byte is checked. A byte is copied twice, into the peer's staging and from there to its slot, so half of
the plain copy's speed is what one device can give. Whether copies need multiprocessors is seen by filling all of
them with a kernel that waits: what ends meanwhile needs none. `--device cpu` moves experts over shared memory, for
trying out, without that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gimbal_kernels import _device_library
from gimbal_kernels.migration import ExpertWeights, migrate, plan_migration
from gimbal_kernels.migration.executors import PeerMemoryExecutor, SharedMemoryExecutor, peer_memory
from gimbal_kernels.migration.schedule import Move
from gimbal_kernels.topology import Topology

ROOT = Path(__file__).resolve().parents[1]
RANKS, EXPERTS, LAYERS, TURNS = 2, 64, 4, 6
# Weights, and a scale of a few bytes per expert.
SHARES = {"w13": 2 / 3, "w2": 1 / 3}
LIMIT = 50.0
# Holds its multiprocessor until it is told to stop, or for so many nanoseconds.
FILL_THREADS, FILL_NANOSECONDS = 512, 2_000_000_000
FILL = """
extern "C" __global__ void fill_device(const volatile int* stop, long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  if (threadIdx.x == 0) {
    do {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*stop == 0 && now - start < nanoseconds);
  }
  __syncthreads();
}
"""


def content(expert: int, size: int, device: str) -> torch.Tensor:
    """Bytes that no other expert has at any place."""
    return ((torch.arange(size, device=device) * 3 + expert * 7 + 1) % 251).to(torch.uint8)


def make_weights(experts: list[int], sizes: dict[str, int], device: str) -> ExpertWeights:
    layers = []
    for _ in range(LAYERS):
        layer = {
            name: torch.stack([content(expert, size, device) for expert in experts])
            for name, size in sizes.items()
        }
        layer["scale"] = torch.tensor(experts, dtype=torch.float32, device=device)
        layers.append(layer)
    return ExpertWeights(layers)


def wrong_experts(weights: ExpertWeights, experts: list[int], sizes: dict[str, int], device: str) -> int:
    wrong = 0
    for layer in weights.layers:
        for slot, expert in enumerate(experts):
            same = all(torch.equal(layer[n][slot], content(expert, s, device)) for n, s in sizes.items())
            wrong += not same or float(layer["scale"][slot]) != expert
    return wrong


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def plain_copy(weights: ExpertWeights, device: str) -> float:
    """Seconds to copy one layer's bytes to another place on the device, as often as there are layers."""
    source = weights.layers[0]["w13"]
    target = torch.empty_like(source)
    times = LAYERS * weights.bytes_per_expert / source[0].numel()
    target.copy_(source)
    wait(device)
    start = time.perf_counter()
    for _ in range(round(times)):
        target.copy_(source)
    wait(device)
    return (time.perf_counter() - start) * times / round(times)


def copies_on_a_full_device(executor: Any) -> str:
    """Whether the executor's copies of large tensors end while every multiprocessor is taken."""
    import cupy

    fill, index = cupy.RawKernel(FILL, "fill_device"), torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // FILL_THREADS)
    stop, probe = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.zeros(1, device="cuda")
    filling, probing = torch.cuda.Stream(), torch.cuda.Stream()
    filled, probed, copied = (torch.cuda.Event() for _ in range(3))
    executor._small = None
    probe.add_(1)  # loads the kernel: that would wait for the device
    torch.cuda.synchronize()
    with _device_library._stream(filling.cuda_stream, index):
        fill((blocks,), (FILL_THREADS,), (np.uint64(stop.data_ptr()), np.int64(FILL_NANOSECONDS)))
    filled.record(filling)
    time.sleep(0.05)
    with torch.cuda.stream(probing):
        probe.add_(1)
    probed.record(probing)
    executor._push(0, Move(layer=0, peer=1 - executor.rank, slot=0, row=0, round=0), lambda _: None)
    copied.record(executor._stream)
    end = time.monotonic() + 0.5
    while not copied.query() and time.monotonic() < end:
        time.sleep(1e-3)
    seen = copied.query(), not probed.query() and not filled.query()
    stop[0] = 1
    torch.cuda.synchronize()
    return explain(*seen)


def explain(copied: bool, full: bool) -> str:
    """What was seen: whether the copies ended, and whether a kernel still waited for a place at that time."""
    if not full:
        return "not shown: the device was not full, a kernel found a place"
    return f"{'0: copies ended' if copied else 'needed: copies did not end'} while a kernel held all of them"


def measure(rank: int, name: str, device: str, sizes: dict[str, int], barrier: Any, results: Any) -> None:
    """Body of one process: (rank, wrong experts, seconds of migrations, of plain copies, staging, `explain`)."""
    half = EXPERTS // RANKS
    maps = [np.tile(np.roll(np.arange(EXPERTS), half * turn), (LAYERS, 1)) for turn in range(RANKS)]
    weights = make_weights(maps[0][0][rank * half : (rank + 1) * half].tolist(), sizes, device)
    kind = PeerMemoryExecutor if device == "cuda" else SharedMemoryExecutor
    executor = kind(weights, rank=rank, ranks=RANKS, name=name, timeout=20.0)
    current, wrong = maps[0], 0
    moved: list[float] = []
    copied: list[float] = []
    for turn in range(TURNS + 1):
        size = weights.bytes_per_expert
        plan = plan_migration(
            current, maps[(turn + 1) % RANKS], Topology(np.ones((1, RANKS))), bytes_per_expert=size
        )
        barrier.wait(LIMIT)
        start = time.perf_counter()
        migrate(plan, weights, executor)
        wait(device)
        barrier.wait(LIMIT)
        moved.append(time.perf_counter() - start)
        copied.append(plain_copy(weights, device))
        barrier.wait(LIMIT)
        current = plan.target.numpy()
        held = current[0][rank * half : (rank + 1) * half].tolist()
        if turn in (0, TURNS):
            wrong += wrong_experts(weights, held, sizes, device)
    full = copies_on_a_full_device(executor) if device == "cuda" and rank == 0 else "not shown: no GPU"
    results.put((rank, wrong, moved[1:], copied[1:], executor.staging_bytes, full))
    barrier.wait(LIMIT)
    executor.close()


def run(device: str, expert_bytes: int) -> dict[str, Any]:
    sizes = {name: int(expert_bytes * share) for name, share in SHARES.items()}
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(RANKS), context.Queue()
    name = uuid.uuid4().hex[:12]
    workers = [
        context.Process(target=measure, args=(rank, name, device, sizes, barrier, results), daemon=True)
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    try:
        found = sorted(results.get(timeout=LIMIT) for _ in workers)
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    total = LAYERS * EXPERTS * (sum(sizes.values()) + 4)
    moved = statistics.median(max(pair) for pair in zip(*(f[2] for f in found), strict=True))
    copied = statistics.median(max(pair) for pair in zip(*(f[3] for f in found), strict=True))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "wrong_experts": sum(f[1] for f in found),
        "megabytes": round(total / 1e6, 1),
        "staging_bytes_per_rank": found[0][4],
        "migration_ms": round(1e3 * moved, 2),
        "migration_gb_s": round(total / moved / 1e9, 2),
        "plain_copy_gb_s": round(total / copied / 1e9, 2),
        "share_of_plain_copy": round(copied / moved, 3),
        "streaming_multiprocessors": found[0][5],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--expert-bytes", type=int, default=9_437_184, metavar="N", help="default: qwen's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    if args.device == "cuda" and peer_memory.status() != "ready":
        print(f"skipped: {peer_memory.status()}")
        return 0
    result = run(args.device, args.expert_bytes)
    print(json.dumps(result, indent=1))
    if args.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        head = {"commit": commit.stdout.strip(), "command": " ".join(["python", *sys.argv])}
        head |= {"versions": {"torch": torch.__version__, "numpy": np.__version__}}
        args.json.write_text(json.dumps(head | result, indent=1) + "\n")
    return 1 if result["wrong_experts"] else 0


if __name__ == "__main__":
    sys.exit(main())
