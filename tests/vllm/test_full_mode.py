"""One real server, DP=2, EP=2, two API servers, mode full: outputs, engine choice, compensation, freshness."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from .conftest import MODEL, Client, load_prompts, wait_until

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.tools.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("full") / "server.log"
    env = {"GIMBAL_BETA": "1.0", "GIMBAL_GAMMA": "0.0"}
    arguments = ["--no-enable-prefix-caching", "--max-num-seqs", "128"]
    with VllmServer(
        MODEL, "full", api_servers=2, extra_args=arguments, env=env, log_path=log, eplb_window=10
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: VllmServer) -> Client:
    return Client(server.url)


def test_outputs_are_those_of_one_engine(client: Client, reference: list[list[int]]) -> None:
    for _ in range(2):
        answers = client.complete_all(load_prompts(48))
        assert [answer["tokens"] for answer in answers] == reference
    metrics = client.metrics()
    assert metrics["gimbal_rearrangements_total"] > 0
    assert metrics["gimbal_experts_moved_total"] > 0
    assert metrics["gimbal_bytes_moved_total"] > 0
    assert 0.0 < metrics["gimbal_remote_pick_share"] < 1.0
    assert metrics["gimbal_rank_load_max_over_mean"] >= 1.0


def test_burst_splits_evenly(client: Client) -> None:
    client.complete("warm", 2)  # the engines have reported, so that choices are made by score
    time.sleep(1.5)
    before = client.decisions()
    # Long enough that all have arrived before the first is through: what is served meanwhile is not a burst.
    assert asyncio.run(send_at_once(client, [list(range(100, 600))] * 64)) == [200] * 64
    after = client.decisions()
    sent = {engine: after[engine] - before.get(engine, 0.0) for engine in (0, 1)}
    assert sum(sent.values()) == 64
    assert abs(sent[0] - 32) <= 2, sent


async def send_at_once(client: Client, prompts: list[list[int]]) -> list[int]:
    """HTTP status of each request; all are written before any answer is read."""
    body = {"model": client.model, "max_tokens": 2, "temperature": 0}

    async def send(session: aiohttp.ClientSession, prompt: list[int]) -> int:
        async with session.post(f"{client.url}/v1/completions", json=body | {"prompt": prompt}) as reply:
            await reply.read()
            return reply.status

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=180)
    ) as session:
        return await asyncio.gather(*(send(session, prompt) for prompt in prompts))


def test_pinned_requests_go_where_they_are_pinned(client: Client) -> None:
    before = client.metrics()
    for _ in range(5):
        client.complete("pinned", 2, engine=1)
    name = 'gimbal_engine_decisions_total{engine="1",reason="pinned"}'
    assert client.metrics()[name] - before.get(name, 0.0) == 5


def test_aborted_requests_leave_no_compensation(client: Client) -> None:
    """Streams that are left while they run; test_trace_path has those that end before they are admitted."""
    body = {
        "model": MODEL.name,
        "prompt": "x " * 400,
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{client.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )

    def open_and_leave(_: int) -> None:
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.readline()

    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(open_and_leave, range(16)))

    def nothing_left() -> bool:
        metrics = client.metrics()
        return all(
            metrics[f'gimbal_engine_compensation_tokens{{engine="{engine}"}}'] == 0 for engine in (0, 1)
        )

    assert wait_until(nothing_left, 10.0)


def test_idle_engines_stay_fresh(client: Client) -> None:
    time.sleep(20.0)
    metrics = client.metrics()
    ages = [
        time.time() - metrics[f'gimbal_engine_trace_timestamp_seconds{{engine="{engine}"}}']
        for engine in (0, 1)
    ]
    assert max(ages) < 3.0, ages
