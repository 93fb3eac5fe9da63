"""Replay: arrivals and lengths as stated, and what is recorded of each answer."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")

import itertools

from aiohttp import web
from gimbal_runtime.tools.replay import (
    Record,
    Request,
    count_identical,
    load_prompts,
    make_requests,
    replay_async,
    summarize,
)

PROMPTS = [(f"p{i}", f"text {i}") for i in range(10)]
FIXTURE = Path(__file__).parents[2] / "fixtures" / "prompts.jsonl"


def test_requests_depend_on_the_seed_alone():
    first = make_requests(PROMPTS, count=50, rate=10.0, seed=3)
    assert first == make_requests(PROMPTS, count=50, rate=10.0, seed=3)
    assert first != make_requests(PROMPTS, count=50, rate=10.0, seed=4)


def test_arrivals_have_the_rate_and_the_burstiness_asked_for():
    requests = make_requests(PROMPTS, count=20_000, rate=25.0, seed=0)
    times = [0.0, *(request.arrival for request in requests)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 25.0, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(2.0, rel=0.08)


def test_every_prompt_comes_once_before_one_comes_again():
    requests = make_requests(PROMPTS, count=25, rate=1.0, seed=0)
    for start in (0, 10):
        assert {r.prompt for r in requests[start : start + 10]} == {text for _, text in PROMPTS}
    assert len({r.name for r in requests}) == 25


def test_output_lengths_stay_in_bounds():
    lengths = [r.output_tokens for r in make_requests(PROMPTS, count=5000, rate=1.0, seed=0)]
    assert min(lengths) == 4
    assert max(lengths) == 120
    assert 20 < statistics.median(lengths) < 29  # exp(3.2) = 24.5


@pytest.mark.parametrize("bad", [{"count": 0}, {"rate": 0.0}, {"rate": float("nan")}, {"cv": -1.0}])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="valid: all positive"):
        make_requests(PROMPTS, **{"count": 1, "rate": 1.0, "seed": 0, **bad})


def test_prompt_files(tmp_path):
    assert len(load_prompts(FIXTURE)) == 300
    with pytest.raises(ValueError, match="no file"):
        load_prompts(tmp_path / "none.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "text": "b"}\n{"id": "c"}\n')
    with pytest.raises(ValueError, match="line 2"):
        load_prompts(bad)
    bad.write_text("")
    with pytest.raises(ValueError, match="empty"):
        load_prompts(bad)


async def _answer(request: web.Request) -> web.StreamResponse:
    """Streams the tokens 0, 1, 2 ... in events of two; misbehaves when the prompt says so."""
    body = await request.json()
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    if body["prompt"] == "refuse":
        return web.Response(status=400, text="no such thing")
    reply = web.StreamResponse()
    await reply.prepare(request)
    if body["prompt"] == "error":
        await reply.write(b'data: {"error": {"message": "engine dead"}}\n\n')
        return reply
    if body["prompt"] == "silent":
        await reply.write(b"data: [DONE]\n\n")
        return reply
    tokens = list(range(body["max_tokens"]))
    for start in range(0, len(tokens), 2):
        event = {"choices": [{"token_ids": tokens[start : start + 2]}], "usage": None}
        await reply.write(f"data: {json.dumps(event)}\n\n".encode())
        await asyncio.sleep(0.01)
    await reply.write(b'data: {"choices": [], "usage": {"prompt_tokens": 7}}\n\ndata: [DONE]\n\n')
    return reply


async def _against_fake_server(requests: list[Request]) -> tuple[list[Record], float]:
    app = web.Application()
    app.router.add_post("/v1/completions", _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        return await replay_async(f"http://127.0.0.1:{port}", "m", requests)
    finally:
        await runner.cleanup()


def test_records_of_good_and_bad_answers():
    prompts = ["fine", "refuse", "error", "silent", "fine"]
    requests = [Request(f"r{i}", prompt, 0.05 * i, 5) for i, prompt in enumerate(prompts)]
    records, seconds = asyncio.run(_against_fake_server(requests))
    assert [record.name for record in records] == [request.name for request in requests]
    good, refused, broken, silent, late = records
    assert good.token_ids == late.token_ids == (0, 1, 2, 3, 4)
    assert good.prompt_tokens == 7
    assert 0 < good.ttft < good.e2e
    assert good.tpot == pytest.approx((good.e2e - good.ttft) / 4)
    assert (refused.status, refused.token_ids) == (400, ())
    assert "no such thing" in refused.error
    assert broken.status == 0
    assert "engine dead" in broken.error
    assert silent.status == 0
    assert silent.ttft is None
    assert seconds > 0.2  # the last request was not sent before its time


def test_a_server_that_is_not_there_gives_records_not_an_exception():
    records, _ = asyncio.run(replay_async("http://127.0.0.1:9", "m", [Request("r", "x", 0.0, 4)]))
    assert records[0].status == 0
    assert records[0].error


def test_summary_leaves_failures_out():
    records = [
        Record("a", 0.0, 200, (1, 2), ttft=1.0, tpot=0.1, e2e=1.1),
        Record("b", 0.0, 200, (1,), ttft=3.0, tpot=None, e2e=3.0),
        Record("c", 0.0, 500),
    ]
    summary = summarize(records, 4.0)
    assert summary.finished == 2
    assert summary.ttft_mean == 2.0
    assert summary.ttft_p99 == pytest.approx(2.98)
    assert summary.tpot_mean == 0.1
    assert summary.throughput == 0.5
    nothing = summarize(records[2:], 4.0)
    assert (nothing.ttft_mean, nothing.throughput) == (None, None)


def test_identity_check_can_fail():
    reference = [Record("a", 0.0, 200, (1, 2)), Record("b", 0.0, 200, (3,)), Record("c", 0.0, 500)]
    assert count_identical(reference[:2], reference[:2]) == (2, [])
    got = [Record("a", 0.0, 200, (1, 3)), Record("b", 0.0, 0, (3,)), Record("c", 0.0, 500)]
    assert count_identical(got, reference) == (0, ["a", "b", "c"])
    with pytest.raises(ValueError, match="same order"):
        count_identical(got[::-1], reference)
