"""Engine choice and queue on real vLLM servers, stock against Gimbal: `python bench/serving/engine_choice.py`.

Two engines of the small MoE with expert parallelism, on the CPU; prompts with a long tail in random order, gaps
of arrivals with a coefficient of variation of 2. Two settings: `token-bound` (64 sequences, 256 tokens a step)
and `slot-bound` (16 sequences, 512 tokens a step). All variants of a setting get the same requests at the same
times; in each repetition they take turns within minutes, in an order that rotates, so that what else the
machine does hits all of them. The servers of a setting stay up throughout where memory allows; `--together`
says how many.

Every replay is stored at once. The same command after an interruption, or with more repetitions, does only what
is missing; other parameters need another file. Five repetitions take 20 to 25 minutes on two free cores;
`--repetitions 1 --requests 40` a fifth of it, mostly start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from engine_choice_measure import Sampler, differing, figures
from engine_choice_table import tables
from gimbal_runtime.tools.errors import InputError, RunError
from gimbal_runtime.tools.replay import Record, Request, load_prompts, make_requests, replay
from gimbal_runtime.tools.scrape import scrape
from gimbal_runtime.tools.server import VllmServer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-qwen3-moe"
PROMPTS = ROOT / "fixtures" / "prompts.jsonl"
SERVER_BYTES = 4 << 30
"""Memory of one server, with room to spare."""


@dataclass(frozen=True)
class Setting:
    """Limits of an engine, and the service levels that are looked at there (seconds)."""

    sequences: int
    token_budget: int
    ttft_slo: float
    tpot_slo: float


SETTINGS = {
    "token-bound": Setting(64, 256, ttft_slo=0.5, tpot_slo=0.1),
    "slot-bound": Setting(16, 512, ttft_slo=2.0, tpot_slo=0.1),
}
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "off": ("off", {}),
    "dp": ("dp", {}),
    "full": ("full", {}),
    "full, age limit auto": ("full", {"GIMBAL_AGE_LIMIT": "auto"}),
}
"""Name -> GIMBAL_MODE and more variables. `off` is stock vLLM with its own balancer."""
WARM_UP = tuple(
    Request(f"warm-up {i}", f"# {i}\ndef area(radius):\n" * (1 + 3 * (i % 12)), 0.05 * i, 4 + i % 9)
    for i in range(48)
)


class Store:
    """The results file: what has been measured, saved after every replay.

    Raises:
        InputError: the file was made with other parameters.
    """

    def __init__(self, path: Path, parameters: dict[str, Any]) -> None:
        self.path = path
        self.result: dict[str, Any] = {**_origin(), "parameters": parameters, "runs": []}
        if path.is_file():
            found = json.loads(path.read_text())
            if found["parameters"] != parameters:
                raise InputError(
                    f"--json: {path} was made with {found['parameters']}; valid: these parameters, or another "
                    f"file"
                )
            self.result = found

    def has(self, setting: str, variant: str, repetition: int) -> bool:
        """Whether that replay is there already."""
        key = (setting, variant, repetition)
        return any((r["setting"], r["variant"], r["repetition"]) == key for r in self.result["runs"])

    def add(self, row: dict[str, Any]) -> None:
        """Keep a replay."""
        self.result["runs"].append(row)
        self.result["seconds"] = round(self.result.get("seconds", 0.0) + row["seconds"], 1)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.result, indent=1) + "\n")
        part.replace(self.path)


def _origin() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "command": "python bench/serving/engine_choice.py",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, CPU backend of vLLM",
        "versions": {name: metadata.version(name) for name in ("vllm", "torch", "gimbal-kernels")},
        "settings": {name: asdict(setting) for name, setting in SETTINGS.items()},
        "note": "client, engines and all servers share the cores: figures compare variants, they predict no GPU",
    }


def _server(setting: Setting, variant: str, logs: Path) -> VllmServer:
    mode, env = VARIANTS[variant]
    return VllmServer(
        MODEL,
        mode,
        extra_args=[
            "--max-num-seqs",
            str(setting.sequences),
            "--max-num-batched-tokens",
            str(setting.token_budget),
            # Every repetition has the same prompts: a prefix cache would have seen them all.
            "--no-enable-prefix-caching",
        ],
        # Both engines get prompts of every kind: balance is all that placement can give here.
        env={"GIMBAL_METHOD": "paper", "GIMBAL_BETA": "0.25", **env},
        log_path=logs / f"{variant}.log",
    )


def _calibrate(server: VllmServer, prompts: Sequence[tuple[str, str]]) -> float:
    """Requests per second that the server answers while its queues are full."""
    requests = [
        Request(r.name, r.prompt, 0.0, r.output_tokens)
        for r in make_requests(prompts, count=120, rate=1.0, seed=10_000)
    ]
    records, seconds = replay(server.url, server.model_name, requests)
    return sum(record.status == 200 for record in records) / seconds


def _measure(
    server: VllmServer, requests: Sequence[Request], setting: Setting
) -> tuple[dict[str, Any], list[Record]]:
    before = scrape(server.url)
    with Sampler(server.url) as sampler:
        records, seconds = replay(server.url, server.model_name, requests)
    time.sleep(1.5)  # the last counters reach the front end with the next engine statistics
    growth = scrape(server.url).since(before)
    slo = {"ttft": setting.ttft_slo, "tpot": setting.tpot_slo}
    return {"seconds": round(seconds, 2), **figures(records, seconds, sampler.samples, growth, slo)}, records


class Bench:
    """The whole comparison.

    Args:
        arguments: of the command line.
        store: where results go.
    """

    def __init__(self, arguments: argparse.Namespace, store: Store) -> None:
        self.arguments, self.store = arguments, store
        self.repetitions = range(arguments.first, arguments.repetitions)
        self.prompts = load_prompts(PROMPTS)
        self.logs = Path()
        self.begun = time.monotonic()

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self.begun:6.0f} s] {text}", flush=True)

    def run(self) -> None:
        """Everything that is missing. The servers' logs stay where a run fails."""
        self.logs = Path(tempfile.mkdtemp(prefix="gimbal-engine-choice-"))
        self.say(f"server logs in {self.logs}")
        self._run_settings()
        shutil.rmtree(self.logs, ignore_errors=True)

    def _run_settings(self) -> None:
        for name in self.arguments.settings:
            for group in self._groups(name):
                self._run_group(name, group)

    def _groups(self, setting: str) -> Iterator[list[str]]:
        """Variants whose servers are up together: all that have a replay missing, if there is room for them."""
        missing = [
            variant
            for variant in self.arguments.variants
            if any(not self.store.has(setting, variant, n) for n in self.repetitions)
        ]
        together = self.arguments.together or max(1, int(psutil.virtual_memory().available // SERVER_BYTES))
        for start in range(0, len(missing), together):
            yield missing[start : start + together]

    def _run_group(self, name: str, group: Sequence[str]) -> None:
        setting = SETTINGS[name]
        with ExitStack() as stack:
            servers: dict[str, VllmServer] = {}
            for variant in group:
                self.say(f"{name}: starting {variant}")
                servers[variant] = stack.enter_context(_server(setting, variant, self.logs))
                replay(servers[variant].url, servers[variant].model_name, WARM_UP)
            rate = self._rate(name, next(iter(servers.values())))
            for repetition in self.repetitions:
                turn = [group[(place + repetition) % len(group)] for place in range(len(group))]
                self._run_repetition(name, repetition, turn, servers, rate)

    def _run_repetition(
        self, name: str, repetition: int, turn: Sequence[str], servers: dict[str, VllmServer], rate: float
    ) -> None:
        requests = make_requests(
            self.prompts, count=self.arguments.requests, rate=rate, seed=self.arguments.seed + repetition
        )
        reference: list[Record] | None = None
        for variant in turn:
            if self.store.has(name, variant, repetition):
                continue
            row, records = _measure(servers[variant], requests, SETTINGS[name])
            # Greedy answers depend on nothing but the prompt: whoever came first this time is the reference.
            different = differing(records, reference) if reference is not None else []
            reference = reference if reference is not None else records
            head = {"setting": name, "variant": variant, "repetition": repetition, "rate": rate}
            self.store.add({**head, **row, "different": different})
            self.say(
                f"{name} {repetition + 1}: {variant:22} {row['finished']} of {len(requests)} answered, TTFT"
                f" {row['ttft_mean']:.3f} s, P99 {row['ttft_p99']:.2f} s, {row['throughput']:.1f}/s"
            )

    def _rate(self, name: str, server: VllmServer) -> float:
        """Requests per second to offer in a setting: the same in every group and every later call."""
        if self.arguments.rate is not None:
            return float(self.arguments.rate)
        known = [row["rate"] for row in self.store.result["runs"] if row["setting"] == name]
        if known:
            return float(known[0])
        served = _calibrate(server, self.prompts)
        self.say(f"{name}: {served:.1f} requests/s when full; offering {self.arguments.load:g} times that")
        return self.arguments.load * served


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="repetition to begin with (default 0)")
    parser.add_argument("--requests", type=int, default=250, help="per replay (default 250)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument(
        "--rate", type=float, help="offered requests/s (default: --load times the rate when full)"
    )
    parser.add_argument("--load", type=float, default=1.4, help="share of the rate when full (default 1.4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", type=int, help="servers up at a time (default: as memory allows)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "engine-choice.json")
    return parser


def main(arguments: argparse.Namespace) -> int:
    """Measures what is missing and prints the tables; 0, 1 for a failed run, 2 for bad input."""
    try:
        for name in ("repetitions", "requests", "load"):
            if getattr(arguments, name) <= 0:
                raise InputError(f"--{name}: {getattr(arguments, name)}; valid: above 0")
        parameters = {name: getattr(arguments, name) for name in ("requests", "rate", "load", "seed")}
        store = Store(arguments.json, parameters)
        Bench(arguments, store).run()
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n" + "\n".join(tables(store.result)))
    wrong = [(r["setting"], r["variant"], r["different"]) for r in store.result["runs"] if r["different"]]
    short = [r for r in store.result["runs"] if r["finished"] != arguments.requests]
    print(
        f"\n{len(store.result['runs'])} replays; answers that differ: {wrong or 'none'}; unfinished: {len(short)}"
    )
    return 1 if wrong or short else 0


if __name__ == "__main__":
    sys.exit(main(_parser().parse_args()))
