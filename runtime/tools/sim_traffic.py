"""Requests for the simulator: from a trace file, or generated.

Two sources of lengths and arrivals:

- the Azure code trace (CSV with TIMESTAMP, ContextTokens, GeneratedTokens; Azure/AzurePublicDataset 2023), real
  lengths and real bursts, its time stretched or squeezed to the rate that is asked for;
- a generator, named as one wherever it is used: log-normal prompts of two kinds (70 % short, 30 % long), log-normal
  outputs, gaps from a gamma distribution.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it arrives.

    Attributes:
        time: seconds from the first request.
        prompt: its prompt tokens, >= 1.
        output: tokens that it will generate, >= 1.
        session: it belongs to; None: to none.
        shared: leading prompt tokens that the session's last turn had computed or generated.
    """

    time: float
    prompt: int
    output: int
    session: int | None = None
    shared: int = 0


def load_azure(path: Path) -> list[Arrival]:
    """The requests of an Azure LLM inference trace, in order, times from the first one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing or a row is not readable; the row is named.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(rows.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; valid: an Azure LLM trace")
        found = []
        for number, row in enumerate(rows, start=2):
            try:
                # Seven digits of a second: one more than Python reads.
                stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
                found.append((stamp, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no rows; valid: at least one request")
    start = found[0][0]
    return [
        Arrival((stamp - start).total_seconds(), max(1, prompt), max(1, output))
        for stamp, prompt, output in found
    ]


def window(trace: Sequence[Arrival], count: int, seed: int) -> list[Arrival]:
    """`count` consecutive requests from a place in the trace that the seed chooses; the trace goes round."""
    if count < 1:
        raise ValueError(f"count: {count}; valid: an integer >= 1")
    start = int(np.random.default_rng(seed).integers(len(trace)))
    length = trace[-1].time + trace[-1].time / len(trace)
    rows = []
    for place in range(start, start + count):
        turn, index = divmod(place, len(trace))
        entry = trace[index]
        rows.append(Arrival(entry.time + turn * length - trace[start].time, entry.prompt, entry.output))
    return rows


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests with time stretched so that `rate` of them arrive per second on average.

    Raises:
        ValueError: a rate that is not finite and > 0.
    """
    if not (math.isfinite(rate) and rate > 0.0):
        raise ValueError(f"rate: {rate!r}; valid: requests per second > 0")
    span = arrivals[-1].time - arrivals[0].time
    scale = (len(arrivals) - 1) / (rate * span) if span > 0.0 else 0.0
    start = arrivals[0].time
    return [
        Arrival((entry.time - start) * scale, entry.prompt, entry.output, entry.session, entry.shared)
        for entry in arrivals
    ]


def _gaps(draw: Any, count: int, cv: float) -> Any:
    """Gaps of mean 1 and coefficient of variation `cv`, from a gamma distribution."""
    shape = 1.0 / cv**2
    return draw.gamma(shape, 1.0 / shape, count)


def generate(count: int, seed: int, *, cv: float = 2.0, long_share: float = 0.3) -> list[Arrival]:
    """Requests at 1 per second: prompts of median 245 (short) and 1,480 tokens (long), outputs of median 180.

    Args:
        count: requests.
        seed: of the generator.
        cv: coefficient of variation of the gaps; 1 is Poisson.
        long_share: share of long prompts.

    Raises:
        ValueError: `count` below 1, `cv` not above 0, or `long_share` outside 0 to 1.
    """
    if count < 1 or not cv > 0.0 or not 0.0 <= long_share <= 1.0:
        raise ValueError(
            f"count, cv, long_share: {count}, {cv}, {long_share}; valid: >= 1, above 0, from 0 to 1"
        )
    draw = np.random.default_rng(seed)
    times = np.cumsum(_gaps(draw, count, cv))
    long = draw.random(count) < long_share
    prompts = np.where(long, draw.lognormal(7.3, 0.6, count), draw.lognormal(5.5, 1.0, count))
    outputs = draw.lognormal(5.2, 0.8, count)
    prompts, outputs = prompts.clip(8, 8_000).astype(int), outputs.clip(4, 1_500).astype(int)
    return [
        Arrival(float(time - times[0]), int(prompt), int(output))
        for time, prompt, output in zip(times, prompts, outputs, strict=True)
    ]


def generate_disaggregated(count: int, seed: int, *, cv: float = 3.0) -> list[Arrival]:
    """Requests at 1 per second with a heavier tail: a quarter of the prompts has a median of 4,000 tokens.

    Args:
        count: requests, >= 1.
        seed: of the generator.
        cv: coefficient of variation of the gaps.
    """
    draw = np.random.default_rng(seed)
    times = np.cumsum(_gaps(draw, count, cv))
    long = draw.random(count) < 0.25
    prompts = np.where(long, draw.lognormal(8.3, 0.5, count), draw.lognormal(6.2, 0.9, count))
    outputs = draw.lognormal(5.0, 0.7, count)
    prompts, outputs = prompts.clip(16, 16_000).astype(int), outputs.clip(4, 1_000).astype(int)
    return [
        Arrival(float(time - times[0]), int(prompt), int(output))
        for time, prompt, output in zip(times, prompts, outputs, strict=True)
    ]


def in_sessions(arrivals: Sequence[Arrival], seed: int, *, turns: int = 6) -> list[Arrival]:
    """The same arrivals as turns of sessions: each prompt is the session's context so far and its own tokens.

    Args:
        arrivals: in order of time.
        seed: chooses which open session a request continues.
        turns: of a session on average, >= 1.
    """
    draw = np.random.default_rng(seed)
    context: dict[int, int] = {}
    made, opened = [], 0
    for entry in arrivals:
        if context and draw.random() < 1.0 - 1.0 / turns:
            session = int(draw.choice(list(context)))
        else:
            session, opened = opened, opened + 1
        shared = min(context.get(session, 0), 12_000)
        prompt = shared + entry.prompt
        made.append(Arrival(entry.time, prompt, entry.output, session, shared))
        context[session] = prompt + entry.output
        if len(context) > 64:  # open at a time
            del context[next(iter(context))]
    return made
