"""Tiny traffic files of every kind that `gimbal place` reads, laid out as their programs lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

LAYERS, EXPERTS, SLOTS = 3, 8, 12
# Slot map with spare copies of experts 0 to 3.
CURRENT = np.tile(np.concatenate([np.arange(8), np.arange(4)]), (LAYERS, 1)).astype(np.int32)


def physical_loads(steps: int) -> Any:
    """int32 [steps, L, P] tokens that each slot served."""
    return np.random.default_rng(5).integers(0, 50, (steps, LAYERS, SLOTS)).astype(np.int32)


def logical_loads(physical: Any) -> Any:
    """[L, E] sums over steps and copies, slot by slot."""
    loads = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
    for step in physical:
        for layer in range(LAYERS):
            for slot in range(SLOTS):
                loads[layer, CURRENT[layer, slot]] += step[layer, slot]
    return loads


def write_all(folder: Path) -> dict[str, tuple[Path, bool]]:
    """One file per kind -> (path, whether it holds a slot map)."""
    steps = physical_loads(4)
    by_step = np.stack([logical_loads(step[None]) for step in steps]).astype(np.int32)
    stat = {
        "rank": 0,
        "logical_count": torch.from_numpy(by_step),
        "average_utilization_rate_over_window": None,
    }
    passes = [
        {
            "forward_pass_id": i,
            "rank": 0,
            "gatherer_key": "primary",
            "global_physical_count": torch.from_numpy(step),
        }
        for i, step in enumerate(steps)
    ]
    window = {"expert_load_window": steps, "physical_to_logical_map": CURRENT.astype(np.int64)}
    files = {
        "sglang_stat": ("expert_distribution_recorder_1.pt", False),
        "sglang_per_pass": ("expert_distribution_recorder_2_0.pt", True),
        "sglang_json": ("init_expert_location.json", False),
        "vllm_npz": ("window.npz", True),
        "vllm_pt": ("window.pt", True),
        "vllm_global": ("global.npz", False),
    }
    paths = {kind: (folder / name, has_map) for kind, (name, has_map) in files.items()}
    torch.save(stat, paths["sglang_stat"][0])
    detail = {"records": passes, "last_physical_to_logical_map": torch.from_numpy(CURRENT)}
    torch.save(detail, paths["sglang_per_pass"][0])
    paths["sglang_json"][0].write_text(json.dumps({"logical_count": by_step.tolist()}))
    np.savez(paths["vllm_npz"][0], **window)
    torch.save({name: torch.from_numpy(value) for name, value in window.items()}, paths["vllm_pt"][0])
    np.savez(paths["vllm_global"][0], global_expert_load_window=logical_loads(steps))
    return paths
