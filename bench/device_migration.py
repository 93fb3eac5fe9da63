"""Experts between two processes on one GPU, by CUDA IPC, against a plain copy on the same device in the same run.

    python bench/device_migration.py [--device cuda] [--json FILE]

Each process holds half of the experts (SPEC section 1: qwen's size) and hands all of them to the other, there and
back. Every byte is checked. A byte is copied twice, into the peer's staging and from there to its slot, so half of
the plain copy's speed is what one device can give. `--device cpu` does the same over shared memory, for trying out.
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

from gimbal_kernels.migration import ExpertWeights, migrate, plan_migration
from gimbal_kernels.migration.executors import PeerMemoryExecutor, SharedMemoryExecutor, peer_memory
from gimbal_kernels.topology import Topology

ROOT = Path(__file__).resolve().parents[1]
RANKS, EXPERTS, LAYERS, TURNS = 2, 64, 4, 6
# Weights, and a scale of a few bytes per expert.
SHARES = {"w13": 2 / 3, "w2": 1 / 3}
LIMIT = 50.0


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


def measure(rank: int, name: str, device: str, sizes: dict[str, int], barrier: Any, results: Any) -> None:
    """Body of one process: (wrong experts, seconds of migrations, seconds of plain copies, staging)."""
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
    results.put((wrong, moved[1:], copied[1:], executor.staging_bytes))
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
        found = [results.get(timeout=LIMIT) for _ in workers]
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    total = LAYERS * EXPERTS * (sum(sizes.values()) + 4)
    moved = statistics.median(max(pair) for pair in zip(*(f[1] for f in found), strict=True))
    copied = statistics.median(max(pair) for pair in zip(*(f[2] for f in found), strict=True))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "wrong_experts": sum(f[0] for f in found),
        "megabytes": round(total / 1e6, 1),
        "staging_bytes_per_rank": found[0][3],
        "migration_ms": round(1e3 * moved, 2),
        "migration_gb_s": round(total / moved / 1e9, 2),
        "plain_copy_gb_s": round(total / copied / 1e9, 2),
        "share_of_plain_copy": round(copied / moved, 3),
        "streaming_multiprocessors": "not read: needs the profiler's counters",
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
