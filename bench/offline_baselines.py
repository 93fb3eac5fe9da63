"""Static baselines from the literature beside this project's placement, on requests that none was fitted on.

    python bench/offline_baselines.py [--routing FILE] [--ranks 4] [--sources 2] [--json FILE]

Without --routing the requests are generated: topics tilt which experts a token picks. A routing file is an .npz
with `topk_ids` [T, L, K], `domain` [T] and `doc` [T]; requests are then runs of 256 tokens of a document.

Columns: remote picks and fullest rank over the mean when requests go to engines at random, by topic, or by an
oracle that knows their picks (Sem-MoE's online half); and the share of tokens that change rank from layer to layer,
which is what MoETuner minimises.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gimbal_runtime.tools.bench import environment

from gimbal_kernels.placement import PlacementProblem, evaluate, place
from gimbal_kernels.placement.offline import moetuner, oracle_replay, sem_moe
from gimbal_kernels.placement.offline.moetuner import remote_transitions
from gimbal_kernels.placement.offline.profile import expert_transitions, request_picks
from gimbal_kernels.placement.offline.reference import home_of
from gimbal_kernels.placement.offline.sem_moe import traffic_by_engine
from gimbal_kernels.topology import Topology

RESULT = Path(__file__).parent / "results" / "offline-baselines.json"


@dataclass(frozen=True, eq=False)
class Recorded:
    """topk_ids: [T, L, K]. request: [T]. topic: [N]."""

    topk_ids: Any
    request: Any
    topic: Any


def generate(
    seed: int, *, requests: int = 320, tokens: int = 96, layers: int = 6, experts: int = 32
) -> Recorded:
    """Requests of one of four topics each; a topic tilts the router's logits by 0.7 standard deviations."""
    rng = np.random.default_rng(seed)
    base = 0.6 * rng.standard_normal((layers, experts))
    tilt = 0.7 * rng.standard_normal((4, layers, experts))
    topic = rng.integers(0, 4, requests)
    ids = np.empty((requests * tokens, layers, 4), dtype=np.int64)
    for request, kind in enumerate(topic):
        own = base + tilt[kind] + 0.3 * rng.standard_normal((layers, experts))
        logits = own + rng.gumbel(size=(tokens, layers, experts))
        ids[request * tokens : (request + 1) * tokens] = np.argpartition(-logits, 4, axis=2)[:, :, :4]
    return Recorded(ids, np.repeat(np.arange(requests), tokens), topic)


def load(path: Path) -> Recorded:
    """Recorded routing cut into requests of 256 tokens at most."""
    with np.load(path) as data:
        ids, domain, doc = data["topk_ids"].astype(np.int64), data["domain"], data["doc"].astype(np.int64)
    start = np.flatnonzero(np.diff(doc, prepend=-1))
    position = np.arange(len(doc)) - np.repeat(start, np.diff(np.append(start, len(doc))))
    request = np.cumsum(position % 256 == 0) - 1
    first = np.flatnonzero(np.diff(request, prepend=-1))
    return Recorded(ids, request, domain[first].astype(np.int64))


def compare(recorded: Recorded, ranks: int, sources: int, seed: int) -> list[dict[str, Any]]:
    """One row per placement, its figures on the requests that it was not fitted on."""
    experts = 32
    rng = np.random.default_rng(seed)
    picks = request_picks(recorded.topk_ids, recorded.request, experts)
    fitted = rng.permutation(len(picks)) % 2 == 0
    profile, test = picks[fitted].astype(float), picks[~fitted].astype(float)
    topology, size = Topology.grid(gpus_per_node=ranks, sources=sources), experts // ranks
    engines = {
        "random": (rng.integers(0, sources, len(profile)), rng.integers(0, sources, len(test))),
        "topic": (recorded.topic[fitted] % sources, recorded.topic[~fitted] % sources),
    }

    def problem(counts: Any, chosen: Any) -> PlacementProblem:
        return PlacementProblem(traffic_by_engine(counts, chosen, sources), topology, size)

    seen = fitted[recorded.request]
    flow = expert_transitions(recorded.topk_ids[seen], experts)
    held_out = expert_transitions(recorded.topk_ids[~seen], experts)
    known = {name: problem(profile, chosen[0]) for name, chosen in engines.items()}
    placements = {
        "contiguous": np.tile(np.arange(experts), (picks.shape[1], 1)),
        "EPLB": place(known["random"], method="eplb").slots,
        "MoETuner": moetuner(known["random"], flow, time_limit=5.0).slots,
        "Sem-MoE": sem_moe(profile, topology, size).slots,
        "portfolio, from random dispatch": place(known["random"]).slots,
        "portfolio, from dispatch by topic": place(known["topic"]).slots,
    }
    rows = []
    for name, slots in placements.items():
        row: dict[str, Any] = {"placement": name}
        chosen = {key: value[1] for key, value in engines.items()}
        chosen["oracle"] = oracle_replay(test, slots, topology).engines
        for key, value in chosen.items():
            found = evaluate(problem(test, value), slots)
            row[key] = {
                "remote": float(found.comm.mean()),
                "max_over_mean": float(found.max_over_mean.mean()),
            }
        home = np.stack([home_of(layer, size) for layer in np.asarray(slots)])
        row["rank_changes"] = float(remote_transitions(held_out, home).mean())
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routing", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    recorded = generate(options.seed) if options.routing is None else load(options.routing)
    rows = compare(recorded, options.ranks, options.sources, options.seed)
    print(f"{'':34} {'random':>15} {'by topic':>15} {'oracle':>15} {'rank changes':>13}")
    for row in rows:
        cells = [
            f"{row[k]['remote']:7.3f} {row[k]['max_over_mean']:7.3f}" for k in ("random", "topic", "oracle")
        ]
        print(f"{row['placement']:34} {' '.join(cells)} {row['rank_changes']:13.3f}")
    routing = None if options.routing is None else options.routing.name
    settings = {"routing": routing, "ranks": options.ranks, "sources": options.sources, "seed": options.seed}
    result = {"settings": settings, "rows": rows, **environment("cpu", torch.get_num_threads())}
    result["command"] = "python bench/offline_baselines.py" + (f" --routing {routing}" if routing else "")
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
