"""Window by window without a server: what each method would have made of recorded routing.

    python bench/serving/placement_replay.py --routing ROUTING.npz [--json FILE]
    python bench/serving/placement_replay.py --windows FOLDER

ROUTING.npz has `topk_ids` [tokens, L, K], `domain` [tokens] and `domains`: pieces of 128 tokens are dealt to two
engines at random or by domain, 40 pieces a window. FOLDER holds windows that a server saved (GIMBAL_TRAFFIC_DIR).
Each window is judged under the placement that was decided from the windows before it, so nothing is fitted to what
it is judged by; the first four windows do not count. Figures: remote share, max/mean, experts moved per layer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gimbal_runtime.balancer import Balancer, ExpertBytes, moved_copies
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.service import even_shares, fitted_shares
from gimbal_runtime.tools.windows import load_windows
from vllm.distributed.eplb.policy import DefaultEplbPolicy

from gimbal_kernels.topology import Topology

RANKS = SOURCES = 2
PIECE, PIECES, WARM = 128, 40, 4
NEAR = {"python": 0, "c_header": 0, "english": 1, "german": 1}
TOPOLOGY = Topology.grid(gpus_per_node=RANKS, sources=SOURCES)
BYTES = ExpertBytes(per_expert=3 * 128 * 64 * 4, per_pick=128 * 4 * 2)  # the fixture model in float32
POLICIES: dict[str, dict[str, Any]] = {
    "stock": {},
    "paper": {"method": "paper"},
    "greedy": {"method": "greedy"},
    "portfolio, H=1": {"horizon": 1.0},
    "portfolio, H=3": {"horizon": 3.0},
    "portfolio, H=10": {"horizon": 10.0},
    "portfolio, H=100": {"horizon": 100.0},
    "portfolio, H=3, beta 20": {"horizon": 3.0, "beta": 20.0},
    "portfolio, moves free": {"gamma": 0.0},
}


def deal(path: Path, dispatch: str, *, windows: int, seed: int) -> list[Any]:
    """Windows [L, S, E] from recorded routing."""
    with np.load(path) as data:
        ids, domain, names = data["topk_ids"], data["domain"], data["domains"]
    near = [NEAR[str(name)] for name in names]
    experts = int(ids.max()) + 1
    pieces = [
        (near[int(np.bincount(domain[a : a + PIECE]).argmax())], count(ids[a : a + PIECE], experts))
        for a in range(0, len(ids) - PIECE + 1, PIECE)
    ]
    draw = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < windows * PIECES:
        order += draw.permutation(len(pieces)).tolist()
    found = []
    for first in range(0, windows * PIECES, PIECES):
        traffic = np.zeros((ids.shape[1], SOURCES, experts), dtype=np.int64)
        for piece in order[first : first + PIECES]:
            engine, picks = pieces[piece]
            traffic[:, engine if dispatch == "domain" else int(draw.integers(SOURCES))] += picks
        found.append(traffic)
    return found


def count(ids: Any, experts: int) -> Any:
    """Picks [L, E] of tokens [T, L, K]."""
    return np.stack([np.bincount(ids[:, i].ravel(), minlength=experts) for i in range(ids.shape[1])])


def replay(name: str, windows: list[Any], spare: int) -> dict[str, float]:
    """Figures of one policy; with spare slots also those under shares fitted to the window before."""
    layers, _, experts = windows[0].shape
    current = np.tile(np.concatenate([np.arange(experts), np.arange(spare)]), (layers, 1))
    balancer = Balancer(GimbalConfig(mode="ep", **POLICIES[name]), TOPOLOGY, current.shape[1] // RANKS, BYTES)
    rows, fitted, moved = [], [], []
    for i, traffic in enumerate(windows):
        shares = even_shares(current, SOURCES, experts) if name == "stock" else None
        rows.append(balancer.measure(traffic, current, shares))
        if i and spare and name != "stock":
            fitted.append(
                balancer.measure(traffic, current, fitted_shares(windows[i - 1], current, TOPOLOGY))
            )
        new = stock(traffic, current) if name == "stock" else balancer.decide(traffic, current).slots
        moved.append(moved_copies(current, new, balancer.slots_per_rank) / layers)
        current = np.asarray(new)
    figures = {
        "remote_pick_share": float(np.mean([row.remote_pick_share for row in rows[WARM:]])),
        "max_over_mean": float(np.mean([row.max_over_mean for row in rows[WARM:]])),
        "moved_per_layer": float(np.mean(moved[WARM:])),
    }
    if fitted:
        figures["remote_with_shares"] = float(np.mean([row.remote_pick_share for row in fitted[WARM:]]))
        figures["max_over_mean_with_shares"] = float(np.mean([row.max_over_mean for row in fitted[WARM:]]))
    return figures


def stock(traffic: Any, current: Any) -> Any:
    """The installed vLLM's policy."""
    load = torch.from_numpy(traffic.sum(axis=1))
    slots = torch.from_numpy(np.asarray(current))
    return DefaultEplbPolicy.rebalance_experts(load, current.shape[1], 1, 1, RANKS, slots).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--routing", type=Path)
    source.add_argument("--windows", type=Path)
    parser.add_argument("--spare", nargs="+", type=int, default=[0, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.routing:
        made = {
            dispatch: deal(options.routing, dispatch, windows=24, seed=options.seed)
            for dispatch in ("random", "domain")
        }
    else:
        made = {"saved": [window.traffic for window in load_windows(options.windows)]}
    rows = []
    for dispatch, windows in made.items():
        for spare in options.spare:
            names = [name for name in POLICIES if not spare or name not in ("paper", "greedy")]
            for name in names:
                rows.append({"dispatch": dispatch, "spare": spare, "policy": name})
                rows[-1] |= replay(name, windows, spare)
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        command = "python bench/serving/placement_replay.py --routing ROUTING.npz"
        options.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
