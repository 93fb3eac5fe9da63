"""One process of the group test of TrafficWindow: records, closes twice, writes what it saw as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gimbal_kernels.counting import ReplicaMap, TrafficWindow, map_and_count
from gimbal_kernels.topology import Topology

LAYERS, EXPERTS, TOP_K = 2, 16, 4


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    reductions = count_all_reduces()
    topology = Topology.grid(gpus_per_node=world, sources=world)
    table = ReplicaMap.from_slots([list(range(EXPERTS))] * LAYERS, topology, num_experts=EXPERTS)
    window = TrafficWindow(LAYERS, world, EXPERTS, group=dist.group.WORLD)
    # The twin stands for the second TP rank of each DP group: it routes the same tokens and must not count.
    twin = TrafficWindow(LAYERS, world, EXPERTS, group=dist.group.WORLD, contribute=rank == 0)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for tokens in (5 + rank, 0):
        for layer in range(LAYERS):
            ids = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=generator)
            map_and_count(ids, table, window.counts, layer=layer, source=rank)
            map_and_count(ids[:5], table, twin.counts, layer=layer, source=0)
        before = len(reductions)
        total = window.close()
        seen.append({"total": total.tolist(), "all_reduces": len(reductions) - before})
        seen[-1]["twin"] = int(twin.close().sum())
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def count_all_reduces() -> list[int]:
    calls: list[int] = []
    real = dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    dist.all_reduce = counted
    return calls


main()
