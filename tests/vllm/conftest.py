"""Real vLLM servers for the tests: one small client, requests with known token counts, and the reference."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "fixtures" / "tiny-qwen3-moe"


def load_prompts(count: int) -> list[str]:
    """The first `count` prompts of the fixture, domains mixed."""
    lines = (ROOT / "fixtures" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows.sort(key=lambda row: row["id"].split("-")[-1])
    return [row["text"] for row in rows[:count]]


class Client:
    """Plain HTTP, one thread a request."""

    def __init__(self, url: str, model: str = MODEL.name) -> None:
        self.url, self.model = url, model

    def complete(
        self,
        prompt: str | list[int],
        tokens: int = 16,
        *,
        engine: int | None = None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Greedy completion of exactly `tokens` tokens: {"tokens": ids, "prompt_tokens": n}; `more` goes along."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **(more or {}),
        }
        headers = {"Content-Type": "application/json"}
        if engine is not None:
            headers["X-data-parallel-rank"] = str(engine)
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=180) as reply:
            answer = json.load(reply)
        return {
            "tokens": answer["choices"][0]["token_ids"],
            "prompt_tokens": answer["usage"]["prompt_tokens"],
        }

    def complete_all(self, prompts: list[Any], tokens: int = 16, **kwargs: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(max_workers=64) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, tokens, **kwargs), prompts))

    def metrics(self) -> dict[str, float]:
        """All gimbal_* samples: name with labels -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line.startswith("gimbal_"))
        return {name: float(value) for name, value in samples}

    def debug(self) -> dict[str, Any]:
        """What the API server shows of engine choice."""
        with urllib.request.urlopen(f"{self.url}/gimbal/decisions", timeout=30) as reply:
            return json.load(reply)

    def decisions(self) -> dict[int, float]:
        """Requests sent to each engine so far, over all reasons."""
        counts: dict[int, float] = {}
        for name, value in self.metrics().items():
            if name.startswith("gimbal_engine_decisions_total"):
                engine = int(name.split('engine="')[1].split('"')[0])
                counts[engine] = counts.get(engine, 0.0) + value
        return counts


def wait_until(condition: Any, seconds: float) -> bool:
    """Polls `condition` until it holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return bool(condition())


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Greedy tokens of `load_prompts(48)`, 16 each, from a single stock engine."""
    from gimbal_runtime.tools.server import VllmServer

    log = tmp_path_factory.mktemp("reference") / "server.log"
    with VllmServer(MODEL, "off", data_parallel=1, expert_parallel=False, eplb=False, log_path=log) as server:
        return [answer["tokens"] for answer in Client(server.url).complete_all(load_prompts(48))]
