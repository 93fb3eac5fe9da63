"""Prefill deflection on real vLLM: prefill and decode servers on this machine's CPU, with and without it.

    python bench/serving/pd.py --shapes 1P1D 2P2D --repetitions 3 --json bench/results/pd.json

The engines of prefill servers share one core, those of decode servers another: deflection can only win by using the
decode servers' core while it has time to spare. Each repetition replays the same bursty arrivals in all modes, one
after the other on the same servers, with prompts that no server has seen (the first words differ). Modes: `none`,
the prefill node of least predicted time; `on arrival`, every request routed once; `held`, looked at again while it
waits.

Every answer is compared with that of a single server which computes everything itself, nothing of it cached. Times
are seconds as the client and the nodes saw them. The rows of shapes that are not run stay in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import numpy as np
from gimbal_runtime.deflection import DeflectionConfig
from gimbal_runtime.tools.pd_servers import PdServers
from gimbal_runtime.tools.replay import Request, load_prompts
from gimbal_runtime.tools.route_dispatch import DispatchConfig
from gimbal_runtime.tools.route_proxy import COMPLETIONS, Proxy, RouteSettings
from gimbal_runtime.tools.route_records import Record
from gimbal_runtime.tools.route_run import running
from gimbal_runtime.tools.route_warmup import warm_up_all

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-qwen3-moe"
PROMPTS = ROOT / "fixtures" / "prompts.jsonl"
MODES = {
    "none": {"deflect": False},
    "on arrival": {"hold": False},
    "held": {},
}
ARRIVAL_CV = 3.0
LONG_SHARE = 0.4
"""Of the prompts, which are several texts in a row; up to about 1,600 tokens, whatever the text."""
WARM_UP = 48
TTFT_SLO, TBT_SLO = 1.0, 0.1
LOCK_SECONDS = 90.0


@dataclass(frozen=True)
class Seen:
    """What the client saw of one request; seconds. Times are None when it failed."""

    status: int
    tokens: tuple[int, ...] = ()
    ttft: float | None = None
    gaps: tuple[float, ...] = ()


def make_load(count: int, rate: float, seed: int, label: str) -> list[Request]:
    """Bursty arrivals of short and long prompts; a function of all arguments but for the first words of a prompt,
    which are `label` and its number."""
    draw = random.Random(seed)
    texts = [text for _, text in load_prompts(PROMPTS)]
    shape, arrival, load = 1.0 / ARRIVAL_CV**2, 0.0, []
    for place in range(count):
        arrival += draw.gammavariate(shape, 1.0 / (rate * shape))
        pieces = draw.randint(5, 12) if draw.random() < LONG_SHARE else 1
        text = " ".join(draw.choice(texts) for _ in range(pieces))[:4000]
        output = draw.randint(2, 10)
        load.append(Request(f"{place}", f"{label} {place}: {text}", arrival, output))
    return load


async def ask(
    session: aiohttp.ClientSession, url: str, request: Request, start: float, salt: str | None
) -> Seen:
    """Sends a request at its time and reads its stream; only requests of one `salt` share cached prefixes."""
    await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
    body = {"model": MODEL.name, "prompt": request.prompt, "max_tokens": request.output_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    body |= {"cache_salt": salt} if salt is not None else {}
    sent, times, tokens = time.perf_counter(), [], []
    async with session.post(url + COMPLETIONS, json=body) as answer:
        if answer.status != 200:
            return Seen(answer.status)
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                return Seen(502)
            ids = event["choices"][0].get("token_ids") or []
            tokens += ids
            times += [time.perf_counter()] * len(ids)
    gaps = tuple(b - a for a, b in itertools.pairwise(times))
    return Seen(200, tuple(tokens), times[0] - sent if times else None, gaps)


async def replay(url: str, load: list[Request], *, salt: str | None = None) -> list[Seen]:
    """All requests at their times."""
    start = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return list(await asyncio.gather(*(ask(session, url, request, start, salt) for request in load)))


def make_proxy(servers: PdServers, arguments: argparse.Namespace, mode: str) -> Proxy:
    """A fresh proxy; the models of iterations are the servers' and stay."""
    return Proxy(
        RouteSettings(
            prefill=tuple(server.url for server in servers.prefill),
            decode=tuple(server.url for server in servers.decode),
            dispatch=DispatchConfig(deflection=DeflectionConfig(beta=arguments.beta), **MODES[mode]),
            tbt_slo=TBT_SLO,
            bandwidth=arguments.bandwidth,
            max_fit_error=arguments.max_fit_error,
            report_interval=0.05,
        )
    )


async def measure(
    servers: PdServers, arguments: argparse.Namespace, mode: str, load: list[Request]
) -> tuple[list[Seen], list[Record], dict[str, Any]]:
    """One run of one mode."""
    proxy = make_proxy(servers, arguments, mode)
    async with running(proxy) as url:
        while any(node.report is None for node in proxy.nodes):
            await asyncio.sleep(0.05)
        fits = {node.role: _fit(node.report.model) for node in proxy.nodes if node.report is not None}
        seen = await replay(url, load)
        await asyncio.sleep(0.5)  # the nodes' last reports
        return seen, proxy.records.recent(), fits


def _fit(model: Any) -> dict[str, float] | None:
    if model is None:
        return None
    figures = {name: getattr(model, name) for name in ("a", "c0", "c1", "c_pf", "c_attn")}
    return figures | {"error": model.quality.error, "prefills": model.quality.prefills}


def figures(seen: list[Seen], records: list[Record], expected: list[tuple[int, ...]]) -> dict[str, Any]:
    """One run in figures: seconds, shares from 0 to 1."""
    ttft = np.array([entry.ttft if entry.ttft is not None else math.inf for entry in seen])
    gaps = [gap for entry in seen for gap in entry.gaps]
    parts = [record for record in records if record.queueing is not None]
    mean = {
        part: float(np.mean([getattr(record, part) for record in parts])) if parts else None
        for part in ("queueing", "prefill", "transfer")
    }
    return {
        "requests": len(seen),
        "answered": sum(entry.status == 200 for entry in seen),
        "identical": sum(
            entry.status == 200 and entry.tokens == tokens
            for entry, tokens in zip(seen, expected, strict=True)
        ),
        "ttft_mean": float(ttft.mean()),
        "ttft_p50": float(np.quantile(ttft, 0.5)),
        "ttft_p95": float(np.quantile(ttft, 0.95)),
        "in_slo": float((ttft <= TTFT_SLO).mean()),
        "late_tokens": sum(gap > TBT_SLO for gap in gaps) / max(1, len(gaps)),
        "gap_p99": float(np.quantile(gaps, 0.99)) if gaps else None,
        "deflected": float(np.mean([record.deflected for record in records])),
        "split_known": len(parts),
        **mean,
        "actual_over_predicted": _ratio(records),
        "counting_median": float(np.median([record.counting for record in records])),
        "decision_median": float(np.median([record.cost for record in records])),
        "decision_p99": float(np.quantile([record.cost for record in records], 0.99)),
    }


def _ratio(records: list[Record]) -> float | None:
    """Median of time to first token over the one predicted, of requests with a prediction."""
    pairs = [
        (record.ttft, record.ttft_decode if record.deflected else record.ttft_prefill) for record in records
    ]
    ratios = [ttft / predicted for ttft, predicted in pairs if ttft is not None and predicted]
    return float(np.median(ratios)) if ratios else None


async def alone(url: str, load: list[Request]) -> list[tuple[int, ...]]:
    """The answers of one server that computes everything itself."""
    again = [
        Request(entry.name, entry.prompt, 0.05 * place, entry.output_tokens)
        for place, entry in enumerate(load)
    ]
    return [entry.tokens for entry in await replay(url, again, salt="alone")]


async def run_repetition(
    shape: str, repetition: int, servers: PdServers, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The same arrivals in all modes, in turns from the first to the last or the other way round."""
    order = list(MODES) if repetition % 2 == 0 else list(reversed(MODES))
    loads = {
        mode: make_load(arguments.requests, arguments.rate, repetition, f"{shape} {mode} {repetition}")
        for mode in order
    }
    with quiet(arguments.lock) as alone_here:
        measured = {mode: await measure(servers, arguments, mode, loads[mode]) for mode in order}
    rows = []
    for mode, (seen, records, fits) in measured.items():
        expected = await alone(servers.decode[0].url, loads[mode])
        row = {"shape": shape, "mode": mode, "repetition": repetition, "quiet": alone_here}
        rows.append(row | figures(seen, records, expected) | {"fits": fits})
        print(line(rows[-1]), flush=True)
    return rows


@contextlib.contextmanager
def quiet(lock: Path | None) -> Iterator[bool]:
    """Holds a lock file meanwhile, where other jobs of the machine respect it; whether it could be had in time."""
    if lock is None:
        yield False
        return
    with lock.open("a") as file:
        deadline, held = time.monotonic() + LOCK_SECONDS, False
        while not held and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(0.002)
        yield held


async def run_shape(
    shape: str, arguments: argparse.Namespace, folder: Path, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """All modes and repetitions on one set of servers."""
    prefill, decode = int(shape[0]), int(shape[2])
    cores = ["0"] * prefill + ["1"] * decode if (os.cpu_count() or 1) >= 2 else None
    rows = []
    with PdServers(MODEL, folder, prefill=prefill, decode=decode, cores=cores) as servers:
        async with running(make_proxy(servers, arguments, "none")) as url:
            await asyncio.sleep(0.5)
            nodes = make_proxy(servers, arguments, "none").nodes
            for node in nodes:
                node.alive = True
            await warm_up_all(nodes, WARM_UP)
            await replay(url, make_load(16, 50.0, 0, f"{shape} first"))
        for repetition in range(arguments.repetitions):
            rows += await run_repetition(shape, repetition, servers, arguments)
            keep(rows)
            for stored in (folder / "kv").iterdir():
                shutil.rmtree(stored)
    return rows


def line(row: dict[str, Any]) -> str:
    """One run for the terminal."""
    names = ("ttft_p95", "ttft_mean", "queueing", "prefill", "transfer", "in_slo", "late_tokens", "deflected")
    values = "  ".join(f"{name} {row[name]:.3f}" if row[name] is not None else f"{name} -" for name in names)
    return f"{row['shape']} {row['mode']:10} {row['identical']}/{row['requests']} identical  {values}"


def origin(shape: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Where a shape's figures come from."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    options = [f"--shapes {shape}"]
    options += [
        f"--{name} {getattr(arguments, name.replace('-', '_'))}"
        for name in ("repetitions", "requests", "rate", "beta", "max-fit-error")
    ]
    return {
        "commit": commit,
        "command": f"python bench/serving/pd.py {' '.join(options)}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: metadata.version(name) for name in ("vllm", "torch", "aiohttp")},
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """Runs the benchmark; 1 when an answer differs from a single server's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["1P1D", "2P2D"], choices=["1P1D", "2P2D"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=10.0, help="mean arrivals per second")
    parser.add_argument("--bandwidth", type=float, help="bytes per second of the link (default: measured)")
    parser.add_argument("--max-fit-error", type=float, default=0.5)
    parser.add_argument(
        "--beta", type=float, default=0.6, help="share of the limit that an iteration may take"
    )
    parser.add_argument("--lock", type=Path, help="lock file to hold while times are measured")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "pd.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    kept = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {"runs": {}, "rows": []}
    identical = True
    for shape in arguments.shapes:
        begun = time.monotonic()
        others = [row for row in kept["rows"] if row["shape"] != shape]

        def keep(rows: list[dict[str, Any]]) -> None:
            """What there is stays when the next repetition does not end."""
            kept["runs"][shape] = origin(shape, arguments, time.monotonic() - begun)  # noqa: B023
            kept["rows"] = others + rows  # noqa: B023
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

        with tempfile.TemporaryDirectory() as folder:
            rows = asyncio.run(run_shape(shape, arguments, Path(folder), keep))
        identical = identical and all(row["identical"] == row["requests"] for row in rows)
    return 0 if identical else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # the servers are stopped on the way out


if __name__ == "__main__":
    sys.exit(main())
