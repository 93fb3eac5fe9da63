"""Where picks are served on a real server: vLLM's own EPLB against this project's placements, same prompts.

    python bench/serving/placement.py [--system NAME ...] [--spare N ...] [--json FILE]

One server for each system and number of spare slots: two engines, two ranks, synchronous EPLB, so that the slot map
saved with a window was in force for all of it. Every server gets the same prompts in the same order, each of them
at an engine that the client names (X-data-parallel-rank): first at random, then by the prompt's domain. A phase
sends its prompts several times; windows of the first time are adaptation and do not count.

Remote picks are those served off their engine's rank. vLLM lets copies take turns, wherever they are; this
project's tables take the nearest. Rows of earlier calls stay in the JSON file, so systems can be run one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import numpy as np
from gimbal_runtime.balancer import Balancer, ExpertBytes
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.service import even_shares
from gimbal_runtime.tools.scrape import Snapshot, scrape
from gimbal_runtime.tools.server import VllmServer
from gimbal_runtime.tools.windows import SavedWindow, load_windows

from gimbal_kernels.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-qwen3-moe"
ENGINES = RANKS = 2
NEAR = {"python": 0, "c_header": 0, "english": 1, "german": 1}
"""Engine of each domain: the two that route most alike share one."""
SYSTEMS: dict[str, dict[str, str]] = {
    "stock": {"GIMBAL_MODE": "off", "GIMBAL_OBSERVE": "1", "GIMBAL_RECORDING": "loads"},
    "paper": {"GIMBAL_MODE": "ep", "GIMBAL_METHOD": "paper"},
    "portfolio": {"GIMBAL_MODE": "ep", "GIMBAL_METHOD": "portfolio"},
    "shares": {"GIMBAL_MODE": "ep", "GIMBAL_METHOD": "portfolio", "GIMBAL_SHARES_INTERVAL": "4"},
}
DISPATCHES = ("random", "domain")


@dataclass(frozen=True)
class Row:
    """One system, number of spare slots and way to choose engines; means over windows, weighted by picks."""

    system: str
    spare: int
    dispatch: str
    windows: int
    picks: int
    remote_pick_share: float
    max_over_mean: float
    experts_moved_per_window: float
    rho: float | None
    proven_gap: float | None
    """Of the last window."""
    answers: int
    """Checksum over all answers' tokens: the same in every row of a dispatch."""


def load_prompts(count: int) -> list[tuple[str, str]]:
    """(domain, text), domains mixed."""
    rows = [json.loads(line) for line in (ROOT / "fixtures" / "prompts.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["id"].split("-")[-1])
    return [(row["domain"], row["text"]) for row in rows[:count]]


async def send(
    server: VllmServer, prompts: list[tuple[str, str]], engines: list[int], options: argparse.Namespace
) -> list[list[int]]:
    """Greedy tokens of every prompt; at most `options.streams` requests under way."""
    limit = asyncio.Semaphore(options.streams)

    async def one(session: aiohttp.ClientSession, text: str, engine: int) -> list[int]:
        body = {"model": server.model_name, "prompt": text, "max_tokens": options.tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        headers = {"X-data-parallel-rank": str(engine)}
        async with limit, session.post(f"{server.url}/v1/completions", json=body, headers=headers) as reply:
            reply.raise_for_status()
            return (await reply.json())["choices"][0]["token_ids"]

    # A fresh connection each: the server closes idle ones, at times just as a request goes out on it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        pairs = zip(prompts, engines, strict=True)
        return await asyncio.gather(*(one(session, text, engine) for (_, text), engine in pairs))


def engines_for(dispatch: str, prompts: list[tuple[str, str]], seed: int) -> list[int]:
    """The engine of each prompt, a function of the seed."""
    if dispatch == "domain":
        return [NEAR[domain] for domain, _ in prompts]
    draw = random.Random(seed)
    return [draw.randrange(ENGINES) for _ in prompts]


def run_server(system: str, spare: int, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Both phases on one server."""
    traffic = folder / f"{system}-{spare}"
    eplb = {"window_size": options.window, "step_interval": options.window, "use_async": False}
    eplb["num_redundant_experts"] = spare
    arguments = ["--no-enable-prefix-caching", "--max-num-seqs", "32", "--eplb-config", json.dumps(eplb)]
    env = SYSTEMS[system] | {"GIMBAL_TRAFFIC_DIR": str(traffic)}
    prompts = load_prompts(options.prompts)
    rows = []
    server = VllmServer(
        MODEL, env["GIMBAL_MODE"], env=env, extra_args=arguments, log_path=folder / f"{system}-{spare}.log"
    )
    with server:
        for dispatch in DISPATCHES:
            seen, checksum = {window.name for window in load_windows(traffic)}, 0
            for round_ in range(options.rounds):
                engines = engines_for(dispatch, prompts, options.seed + round_)
                answers = asyncio.run(send(server, prompts, engines, options))
                checksum = zlib.crc32(json.dumps(answers).encode(), checksum)
                if round_ == 0:
                    seen |= {window.name for window in load_windows(traffic)}
                    before = scrape(server.url)
            time.sleep(1.5)  # the last counters reach the front end with the next engine statistics
            after = scrape(server.url)
            windows = [window for window in load_windows(traffic) if window.name not in seen]
            rows.append(judge(system, spare, dispatch, windows, traffic, (before, after), checksum))
            print(json.dumps(asdict(rows[-1])), flush=True)
    return rows


def judge(
    system: str,
    spare: int,
    dispatch: str,
    windows: list[SavedWindow],
    folder: Path,
    scraped: tuple[Snapshot, Snapshot],
    checksum: int,
) -> Row:
    """Figures of the windows under the slot maps that were in force, and the shares at their ends."""
    growth, metrics = scraped[1].since(scraped[0]), scraped[1]
    topology = Topology.grid(gpus_per_node=RANKS, sources=ENGINES)
    slots_per_rank = windows[0].current.shape[1] // RANKS
    balancer = Balancer(GimbalConfig(mode="ep"), topology, slots_per_rank, ExpertBytes(1, 1))
    figures = []
    for window in windows:
        experts = window.traffic.shape[2]
        if system == "stock":  # copies take turns
            shares = even_shares(window.current, ENGINES, experts)
        else:
            with np.load(folder / f"{window.name}.npz") as saved:
                shares = saved.get("shares")
        figures.append(balancer.measure(window.traffic, window.current, shares))
    weights = [figure.picks for figure in figures]
    moved = growth.total("gimbal_experts_moved_total") or 0.0
    decided = growth.total("gimbal_rearrangements_total")
    return Row(
        system,
        spare,
        dispatch,
        windows=len(windows),
        picks=sum(weights),
        remote_pick_share=float(np.average([f.remote_pick_share for f in figures], weights=weights)),
        max_over_mean=float(np.average([f.max_over_mean for f in figures], weights=weights)),
        experts_moved_per_window=float(moved / decided) if decided else 0.0,
        rho=None if system == "stock" else metrics.total("gimbal_traffic_skew_kept"),
        proven_gap=metrics.total("gimbal_placement_gap"),
        answers=checksum,
    )


def git_commit() -> str:
    """The checkout's commit; "+" when files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def write(path: Path, rows: list[Row], options: argparse.Namespace) -> None:
    """Puts the rows into the file, in place of those of the same system and number of spare slots."""
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    new = {(row.system, row.spare) for row in rows}
    kept = [row for row in old if (row["system"], row["spare"]) not in new]
    settings = {name: getattr(options, name) for name in ("prompts", "rounds", "tokens", "window", "seed")}
    result = {
        "command": "python bench/serving/placement.py",
        "commit": git_commit(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]},
        "settings": settings | {"streams": options.streams, "model": MODEL.name},
        "rows": sorted(kept + [asdict(row) for row in rows], key=lambda row: (row["spare"], row["dispatch"])),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", nargs="+", choices=list(SYSTEMS), default=["stock", "portfolio"])
    parser.add_argument("--spare", nargs="+", type=int, default=[0, 4], help="redundant experts")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="how often each phase sends its prompts")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--window", type=int, default=12, help="engine steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "serving-placement.json")
    parser.add_argument("--keep", type=Path, help="folder for windows and logs (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="placement-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for spare in options.spare:
            for system in options.system:
                write(options.json, run_server(system, spare, options, folder), options)


if __name__ == "__main__":
    main()
