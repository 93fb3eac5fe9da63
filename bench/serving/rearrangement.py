"""Latency while experts are rearranged: vLLM's own transfer against Gimbal's, in turn on one real server.

    python bench/serving/rearrangement.py [--rearrangements 80] [--json FILE]

A single stock engine answers first; its tokens are the reference. Then a server with two engines and experts
over both runs under constant load, once with synchronous and once with asynchronous EPLB. Its rearrangements
alternate between the two ways (`rearrangement_switch.py`), so both meet the same load in the same run. An
inter-token gap belongs to a rearrangement when the two overlap. Times of one run compare, those of two do not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from gimbal_runtime.tools.server import VllmServer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-qwen3-moe"
PROMPTS, TOKENS, STREAMS, WINDOW = 48, 48, 8, 16
NAME = "rearrangement_switch"


@dataclass
class Load:
    """What the client saw: answers by prompt, and (start, end) of every gap between tokens."""

    answers: list[tuple[int, list[int]]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)


def load_prompts() -> list[str]:
    rows = [json.loads(line) for line in (ROOT / "fixtures" / "prompts.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["id"].split("-")[-1])  # domains mixed
    return [row["text"] for row in rows[:PROMPTS]]


async def stream(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[list[int], list[float]]:
    """Tokens of a greedy answer, and when each piece of it arrived."""
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    tokens: list[int] = []
    times: list[float] = []
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for raw in reply.content:
            line = raw.strip()
            if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                tokens += json.loads(line[5:])["choices"][0].get("token_ids") or []
                times.append(time.perf_counter())
    return tokens, times


async def put_under_load(url: str, prompts: list[str], done: Any) -> Load:
    """STREAMS requests at any time, prompts in order, until `done()` after a request has ended."""
    load, turn = Load(), iter(range(10**9))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def worker() -> None:
            while not done(len(load.answers)):
                i = next(turn) % len(prompts)
                tokens, times = await stream(session, url, prompts[i])
                load.answers.append((i, tokens))
                load.gaps += itertools.pairwise(times)

        await asyncio.gather(*(worker() for _ in range(STREAMS)))
    return load


def make_plugin(folder: Path) -> str:
    """A folder from which vLLM loads the switch; returns the PYTHONPATH."""
    info = folder / f"{NAME}-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def serve(prompts: list[str], *, asynchronous: bool, count: int, folder: Path) -> tuple[Load, list[dict]]:
    """Load and rearrangements of one server, until it has made `count` of them."""
    name = "async" if asynchronous else "sync"
    log = folder / f"{name}.jsonl"
    eplb = {"window_size": WINDOW, "step_interval": WINDOW, "use_async": asynchronous}
    env = {"GIMBAL_METHOD": "eplb", "GIMBAL_MIGRATION": "shared_memory", "GIMBAL_STRICT": "1"}
    plugin = folder / f"plugin-{name}"
    plugin.mkdir()
    with VllmServer(
        MODEL,
        "ep",
        extra_args=["--eplb-config", json.dumps(eplb)],
        env=env | {"PYTHONPATH": make_plugin(plugin), "REARRANGEMENT_LOG": str(log)},
        log_path=folder / f"{name}.log",
    ) as server:
        print(f"{name}: server ready", flush=True)
        # The first batch of each size costs extra; prompts are in the prefix cache then, so that steps are alike.
        asyncio.run(put_under_load(server.url, prompts, lambda answered: answered >= PROMPTS))
        first = len(read_log(log))
        load = asyncio.run(put_under_load(server.url, prompts, lambda _: len(read_log(log)) >= first + count))
    return load, read_log(log)[first:]


def figures(load: Load, rows: list[dict], reference: list[list[int]]) -> dict[str, Any]:
    """Milliseconds by way: the time of a rearrangement, and the gaps that overlap one."""
    gaps = np.array(load.gaps)
    result: dict[str, Any] = {
        "answers": len(load.answers),
        "identical": sum(tokens == reference[i] for i, tokens in load.answers),
    }
    during_any = np.zeros(len(gaps), dtype=bool)
    for way in ("stock", "gimbal"):
        spans = [(row["start"], row["end"]) for row in rows if row["way"] == way]
        during = np.zeros(len(gaps), dtype=bool)
        for start, end in spans:
            during |= (gaps[:, 0] < end) & (gaps[:, 1] > start)
        during_any |= during
        lengths = [1e3 * (end - start) for start, end in spans]
        result[way] = {
            "rearrangements": len(spans),
            "rearrangement_ms": quantiles(lengths),
            "itl_ms": quantiles(1e3 * (gaps[during, 1] - gaps[during, 0])),
        }
    quiet = gaps[~during_any]
    result["no rearrangement"] = {"itl_ms": quantiles(1e3 * (quiet[:, 1] - quiet[:, 0]))}
    return result


def quantiles(values: Any) -> dict[str, float]:
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    summary = {
        "count": len(values),
        "mean": np.mean(values),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": np.max(values),
    }
    return {name: round(float(value), 2) for name, value in summary.items()}


def versions() -> dict[str, str]:
    import torch
    import vllm

    return {"python": sys.version.split()[0], "torch": torch.__version__, "vllm": vllm.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rearrangements", type=int, default=80, help="per EPLB mode, both ways together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    prompts = load_prompts()
    command = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    report: dict[str, Any] = {
        "commit": command.stdout.strip(),
        "command": f"python bench/serving/rearrangement.py --rearrangements {args.rearrangements}",
        "machine": f"{os.cpu_count()} cores, shared by client and server",
        "versions": versions(),
        "note": f"{STREAMS} streams of {TOKENS} tokens, two engines, a rearrangement every {WINDOW} steps, "
        "shared_memory against vLLM's two-sided transfer over gloo, alternating",
    }
    with tempfile.TemporaryDirectory(prefix="gimbal-rearrangement-") as name:
        folder = Path(name)
        with VllmServer(
            MODEL,
            "off",
            data_parallel=1,
            expert_parallel=False,
            eplb=False,
            log_path=folder / "reference.log",
        ) as server:
            answers = asyncio.run(put_under_load(server.url, prompts, lambda n: n >= PROMPTS)).answers
        reference = [tokens for _, tokens in sorted(dict(answers).items())]
        assert len(reference) == PROMPTS
        for mode in ("sync", "async"):
            count = args.rearrangements
            load, rows = serve(prompts, asynchronous=mode == "async", count=count, folder=folder)
            report[mode] = figures(load, rows, reference)
            print(mode, json.dumps(report[mode], indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report[m]["answers"] == report[m]["identical"] for m in ("sync", "async")) else 1


if __name__ == "__main__":
    sys.exit(main())
