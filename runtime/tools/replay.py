"""Replays prompts against a server with bursty arrivals, and keeps what each request saw."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from .errors import InputError

ARRIVAL_CV = 2.0
"""Coefficient of variation of the gaps between arrivals; 1 would be a Poisson process."""
OUTPUT_LOG_MEAN, OUTPUT_LOG_SIGMA = 3.2, 0.7
OUTPUT_MIN, OUTPUT_MAX = 4, 120


@dataclass(frozen=True)
class Request:
    """One prompt with its arrival time in seconds from the start and the number of tokens to generate."""

    name: str
    prompt: str
    arrival: float
    output_tokens: int


@dataclass(frozen=True)
class Record:
    """What the client saw of one request; seconds.

    `ttft` runs from sending to the first token, `tpot` is the mean gap between later tokens (None for a
    single token), `e2e` runs to the last token. `status` is the HTTP status, or 0 for a broken connection;
    `error` says why. Times are None when the request failed.
    """

    name: str
    arrival: float
    status: int
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Summary:
    """Client-side figures of one replay: seconds, and finished requests per second of wall time."""

    finished: int
    ttft_mean: float | None
    ttft_p99: float | None
    tpot_mean: float | None
    throughput: float | None


def load_prompts(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """(id, text) of each line of a JSON Lines file with `id` and `text`.

    Raises:
        InputError: no such file, no lines, or a line without those fields; names the line.
    """
    if not Path(path).is_file():
        raise InputError(f"prompts: no file {path}; valid: JSON lines with id and text")
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            prompts.append((str(entry["id"]), str(entry["text"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"prompts: line {number} of {path} is not an object with id and text") from error
    if not prompts:
        raise InputError(f"prompts: {path} is empty; valid: at least one line")
    return prompts


def make_requests(
    prompts: Sequence[tuple[str, str]], *, count: int, rate: float, seed: int, cv: float = ARRIVAL_CV
) -> list[Request]:
    """`count` requests: prompts in random order, Gamma gaps, log-normal output lengths; a function of `seed`.

    Args:
        prompts: (id, text); all are used once before one comes again.
        rate: mean arrivals per second.
        cv: coefficient of variation of the gaps (Gamma shape 1/cv^2).

    Raises:
        ValueError: count, rate or cv not positive, or no prompts.
    """
    if count < 1 or not rate > 0 or not cv > 0:
        raise ValueError(f"count {count}, rate {rate}, cv {cv}; valid: all positive")
    if not prompts:
        raise ValueError("prompts: none; valid: at least one")
    draw = random.Random(seed)
    order: list[tuple[str, str]] = []
    while len(order) < count:
        order += draw.sample(prompts, len(prompts))
    shape = 1.0 / cv**2
    arrival = 0.0
    requests = []
    for i, (name, text) in enumerate(order[:count]):
        arrival += draw.gammavariate(shape, 1.0 / (rate * shape))
        length = int(draw.lognormvariate(OUTPUT_LOG_MEAN, OUTPUT_LOG_SIGMA))
        requests.append(Request(f"{i}:{name}", text, arrival, min(OUTPUT_MAX, max(OUTPUT_MIN, length))))
    return requests


async def _complete(
    session: aiohttp.ClientSession, url: str, model: str, request: Request, start: float
) -> Record:
    await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
    sent = time.perf_counter()
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    try:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                text = (await reply.text())[:300]
                return Record(request.name, request.arrival, reply.status, error=text)
            return await _read_stream(reply, request, sent)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        return Record(request.name, request.arrival, 0, error=f"{type(error).__name__}: {error}")


async def _read_stream(reply: aiohttp.ClientResponse, request: Request, sent: float) -> Record:
    tokens: list[int] = []
    first = last = None
    prompt_tokens = 0
    async for raw in reply.content:
        line = raw.strip()
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            continue
        event: dict[str, Any] = json.loads(line[5:])
        if "error" in event:
            return Record(request.name, request.arrival, 0, error=str(event["error"])[:300])
        new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
        if new:
            last = time.perf_counter()
            first = first or last
            tokens += new
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    if first is None or last is None:
        return Record(request.name, request.arrival, 0, error="no token came")
    return Record(
        name=request.name,
        arrival=request.arrival,
        status=200,
        token_ids=tuple(tokens),
        prompt_tokens=prompt_tokens,
        ttft=first - sent,
        tpot=(last - first) / (len(tokens) - 1) if len(tokens) > 1 else None,
        e2e=last - sent,
    )


async def replay_async(
    url: str,
    model: str,
    requests: Sequence[Request],
    *,
    timeout: float = 600.0,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Record], float]:
    """Sends every request at its time over its own connection; see `replay`."""
    # A fresh connection each: the server closes idle ones after 5 s, at times just as a request goes out on it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    limit = aiohttp.ClientTimeout(total=timeout)
    done = 0
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        start = time.perf_counter()

        async def one(request: Request) -> Record:
            nonlocal done
            record = await _complete(session, url, model, request, start)
            done += 1
            if progress is not None:
                progress(done)
            return record

        records = await asyncio.gather(*(one(request) for request in requests))
        return list(records), time.perf_counter() - start


def replay(
    url: str,
    model: str,
    requests: Sequence[Request],
    *,
    timeout: float = 600.0,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Record], float]:
    """Replays `requests` greedily (temperature 0, end-of-text ignored) against an OpenAI-style server.

    Args:
        url: root address of the server.
        model: served model name.
        timeout: seconds for one request.
        progress: called with the number of requests done.

    Returns:
        Records in the order of `requests`, and the seconds from the start to the last answer.
    """
    return asyncio.run(replay_async(url, model, requests, timeout=timeout, progress=progress))


def summarize(records: Sequence[Record], seconds: float) -> Summary:
    """Means and the 99th percentile over the finished requests; None where there are none."""
    good = [record for record in records if record.status == 200]
    ttft = [record.ttft for record in good if record.ttft is not None]
    tpot = [record.tpot for record in good if record.tpot is not None]
    return Summary(
        finished=len(good),
        ttft_mean=float(np.mean(ttft)) if ttft else None,
        ttft_p99=float(np.percentile(ttft, 99)) if ttft else None,
        tpot_mean=float(np.mean(tpot)) if tpot else None,
        throughput=len(good) / seconds if good and seconds > 0 else None,
    )


def count_identical(records: Sequence[Record], reference: Sequence[Record]) -> tuple[int, list[str]]:
    """How many answers have the reference's token ids, and the names of those that do not.

    A failed request, or one without a finished reference, is not identical.

    Raises:
        ValueError: the two do not list the same requests.
    """
    if [record.name for record in records] != [record.name for record in reference]:
        raise ValueError("reference: lists other requests than records; valid: the same, in the same order")
    different = [
        got.name
        for got, want in zip(records, reference, strict=True)
        if got.status != 200 or want.status != 200 or got.token_ids != want.token_ids
    ]
    return len(records) - len(different), different
