"""`gimbal route` in front of emulated nodes: what the proxy itself makes of the policy, in real time.

    python bench/serving/pd_emulated.py --shapes 2P2D 1P3D --json bench/results/pd-emulated.json

The nodes are small HTTP servers in this process. They compute nothing: an iteration is a sleep as long as an
assumed model says (the one of the simulator), so that nodes do not compete for this machine's cores. Proxy, HTTP,
reports and their age are real. Prefill nodes serve prompts in order of arrival; a transfer takes its bytes over the
bandwidth. Load is a share of what the prefill nodes can compute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from gimbal_runtime.chunk_steps import next_chunk
from gimbal_runtime.deflection import DeflectionConfig
from gimbal_runtime.iteration_model import IterationModel
from gimbal_runtime.node_report import (
    CHUNKS_ARGUMENT,
    PATH,
    REQUEST_ARGUMENT,
    TRANSFERRED_ARGUMENT,
    Computed,
    NodeReport,
    Prefill,
)
from gimbal_runtime.tools.route_dispatch import DispatchConfig
from gimbal_runtime.tools.route_proxy import COMPLETIONS, Proxy, RouteSettings
from gimbal_runtime.tools.route_run import running

RESULT = Path(__file__).resolve().parents[1] / "results" / "pd-emulated.json"
MODEL = IterationModel(0.009, 6e-5, 2.5e-8, 8e-5, 4e-10)
BUDGET, KV_BYTES, BANDWIDTH, KV_TOKENS = 8192, 31e3, 4e9, 600_000
TBT_SLO, TTFT_SLO = 0.05, 1.0
MODES: dict[str, dict[str, Any]] = {"none": {"deflect": False}, "on arrival": {"hold": False}, "held": {}}


@dataclass(eq=False)
class Job:
    """A request on a node."""

    name: str
    prompt: int
    done: int
    chunks: list[int]
    output: int
    begun: float = 0.0
    arrived: float = field(default_factory=time.perf_counter)
    tokens: asyncio.Queue[float] = field(default_factory=asyncio.Queue)


class EmulatedNode:
    """One engine: its iterations are sleeps."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.computed: list[Computed] = []
        self.steps = 0
        self._wake = asyncio.Event()
        self.url = ""

    async def start(self, stack: AsyncExitStack) -> None:
        """Listens and iterates until the stack is left."""
        app = web.Application()
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get(PATH, self._report)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        loop = asyncio.ensure_future(self._iterate())
        stack.callback(loop.cancel)

    async def _iterate(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.jobs:
                await self._step()

    async def _step(self) -> None:
        budget, chunks = BUDGET, []
        decoding = [job for job in self.jobs if job.done >= job.prompt]
        for job in self.jobs:
            if job.done < job.prompt and budget > 0:
                job.begun = job.begun or time.perf_counter()
                most = next_chunk(job.chunks, job.prompt, job.done)
                chunk = min(job.prompt - job.done, budget, most if most is not None else budget)
                chunks.append((job, chunk))
                budget -= chunk
        kv_tokens = sum(job.done for job in decoding)
        seconds = MODEL.time(len(decoding), kv_tokens, [(chunk, job.done) for job, chunk in chunks])
        await asyncio.sleep(seconds)
        self.steps += 1
        now = time.perf_counter()
        for job, chunk in chunks:
            job.done += chunk
            if job.done >= job.prompt:
                self.computed.append(Computed(job.name, now - job.begun, now - job.arrived))
                decoding.append(job)
        for job in decoding:
            job.output -= 1
            job.tokens.put_nowait(seconds)
        self.jobs = [job for job in self.jobs if job.output > 0]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _report(self, request: web.Request) -> web.Response:
        prefills = [job for job in self.jobs if job.done < job.prompt]
        decoding = [job for job in self.jobs if job.done >= job.prompt]
        report = NodeReport(
            steps=self.steps,
            model=MODEL,
            prefills=tuple(Prefill(job.name, job.prompt - job.done, job.done) for job in prefills),
            resident=frozenset(job.name for job in self.jobs),
            n_decode=len(decoding),
            kv_tokens=sum(job.done for job in decoding),
            kv_free=KV_TOKENS - sum(job.prompt for job in self.jobs),
            tbt_slo=TBT_SLO if self.jobs else None,
            deflected=tuple(job.name for job in prefills if job.chunks),
            limits_chunks=True,
            token_budget=BUDGET,
            kv_bytes_per_token=KV_BYTES,
            computed=tuple(self.computed[-64:]),
        )
        return web.json_response({"engines": [report.to_wire()]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        arguments, prompt = body["vllm_xargs"], len(body["prompt"])
        transferred = bool(arguments.get(TRANSFERRED_ARGUMENT))
        chunks, name = arguments.get(CHUNKS_ARGUMENT, []), arguments[REQUEST_ARGUMENT]
        job = Job(name, prompt, prompt - 1 if transferred else 0, chunks, body["max_tokens"])
        if transferred:
            await asyncio.sleep(prompt * KV_BYTES / BANDWIDTH)
        self.jobs.append(job)
        self._wake.set()
        if not body.get("stream"):
            await job.tokens.get()
            return web.json_response({"choices": []})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        for place in range(body["max_tokens"]):
            seconds = await job.tokens.get()
            if place == 0:
                await reply.prepare(request)
            await reply.write(f"data: {seconds}\n\n".encode())
        return reply


def make_load(count: int, load: float, prefill: int, seed: int) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens): a heavy tail of prompts, gaps with a CV of 3."""
    draw = np.random.default_rng(seed)
    long = draw.random(count) < 0.25
    tokens = np.where(long, draw.lognormal(np.log(4000), 0.5, count), draw.lognormal(np.log(500), 0.7, count))
    prompts = tokens.astype(int).clip(16, 16_000)
    seconds = np.mean([MODEL.c_pf * p + MODEL.c_attn * p * p / 2 + MODEL.a * p / BUDGET for p in prompts])
    gaps = draw.gamma(1 / 9, 9 * seconds / (load * prefill), count)
    outputs = draw.integers(20, 120, count)
    return [(float(a), int(p), int(o)) for a, p, o in zip(gaps.cumsum(), prompts, outputs, strict=True)]


async def ask(session: aiohttp.ClientSession, url: str, start: float, entry: tuple[float, int, int]) -> Any:
    """(time to first token, shares of late iterations) of one request."""
    arrival, prompt, output = entry
    await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
    sent, first, steps = time.perf_counter(), 0.0, []
    body = {"model": "m", "prompt": [7] * prompt, "max_tokens": output, "stream": True}
    async with session.post(url + COMPLETIONS, json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                first = first or time.perf_counter()
                steps.append(float(line.removeprefix(b"data: ")))
    return first - sent, [seconds > TBT_SLO for seconds in steps[1:]]


async def run(shape: str, mode: str, load: list[tuple[float, int, int]]) -> dict[str, Any]:
    """One mode in figures: seconds, shares from 0 to 1."""
    async with AsyncExitStack() as stack:
        nodes = [EmulatedNode() for _ in range(int(shape[0]) + int(shape[2]))]
        for node in nodes:
            await node.start(stack)
        urls = [node.url for node in nodes]
        proxy = Proxy(
            RouteSettings(
                prefill=tuple(urls[: int(shape[0])]),
                decode=tuple(urls[int(shape[0]) :]),
                dispatch=DispatchConfig(
                    deflection=DeflectionConfig(beta=0.95, ttft_slo=TTFT_SLO), **MODES[mode]
                ),
                bandwidth=BANDWIDTH,
            )
        )
        url = await stack.enter_async_context(running(proxy))
        while any(node.report is None for node in proxy.nodes):
            await asyncio.sleep(0.02)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            start = time.perf_counter()
            seen = await asyncio.gather(*(ask(session, url, start, entry) for entry in load))
        await asyncio.sleep(0.3)
        records = proxy.records.recent()
    ttft = np.array([first for first, _ in seen])
    late = [late for _, steps in seen for late in steps]
    split = [record for record in records if record.queueing is not None]
    names = ("queueing", "prefill", "transfer")
    parts = {name: float(np.mean([getattr(record, name) for record in split])) for name in names}
    return {
        "shape": shape,
        "mode": mode,
        "requests": len(load),
        "ttft_p95": float(np.quantile(ttft, 0.95)),
        "ttft_mean": float(ttft.mean()),
        **parts,
        "in_slo": float((ttft <= TTFT_SLO).mean()),
        "late_tokens": float(np.mean(late)),
        "deflected": float(np.mean([record.deflected for record in records])),
        "decision_median": float(np.median([record.cost for record in records])),
    }


def origin(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where the figures come from."""
    commit = subprocess.run(
        ["git", "-C", str(RESULT.parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    command = f"python bench/serving/pd_emulated.py --shapes {' '.join(arguments.shapes)}"
    command += f" --load {arguments.load} --requests {arguments.requests} --seed {arguments.seed}"
    return {
        "note": "emulated nodes: iterations are sleeps by an assumed model; proxy, HTTP and reports are real",
        "commit": commit,
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "aiohttp": metadata.version("aiohttp")},
    }


def main() -> int:
    """Runs every shape in every mode on the same arrivals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["2P2D"], metavar="nPmD")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rows = []
    for shape in arguments.shapes:
        load = make_load(arguments.requests, arguments.load, int(shape[0]), arguments.seed)
        for mode in MODES:
            rows.append(asyncio.run(run(shape, mode, load)))
            print(json.dumps(rows[-1]), flush=True)
    arguments.json.write_text(json.dumps(origin(arguments) | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
