"""`gimbal demo`: arguments, checks before anything starts, and what is written at the end."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import MODES
from .errors import InputError, RunError

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_MODEL = REPOSITORY / "fixtures" / "tiny-qwen3-moe"
DEFAULT_PROMPTS = REPOSITORY / "fixtures" / "prompts.jsonl"
DEFAULT_OUT = Path("demo-out")
DEFAULT_MODES = ("off", "full")


@dataclass(frozen=True)
class DemoSettings:
    """One run of the demo. `json`, `report` and `logs` are None when not wanted.

    `sequences` and `token_budget` are vLLM's max_num_seqs and max_num_batched_tokens per engine; `window` is
    the number of engine steps between two rearrangements of the experts. `port` None: a free one for each server.
    """

    model: Path
    prompts: Path
    modes: tuple[str, ...]
    requests: int
    rate: float
    seed: int
    sequences: int
    token_budget: int
    window: int
    port: int | None
    json: Path | None
    report: Path | None
    logs: Path | None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "demo",
        help="the loop on real vLLM: stock against Gimbal, from one command",
        description="Serves a small MoE with two engines and two expert-parallel ranks on this machine's "
        "CPU, replays prompts with bursty arrivals in each mode, and compares every answer with that of a "
        "single engine.",
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="model folder")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="JSON lines with id and text")
    parser.add_argument(
        "--modes", nargs="+", metavar="MODE", help=f"of {' '.join(MODES)} (default: off full)"
    )
    parser.add_argument("--all-modes", action="store_true", help=f"the same as --modes {' '.join(MODES)}")
    parser.add_argument("--requests", type=int, default=300, help="requests per mode (default 300)")
    parser.add_argument("--rate", type=float, default=30.0, help="mean arrivals per second (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, arrivals and lengths (default 1)")
    parser.add_argument("--sequences", type=int, default=64, help="sequences per engine (default 64)")
    parser.add_argument("--token-budget", type=int, default=256, help="tokens per engine step (default 256)")
    parser.add_argument("--window", type=int, default=16, help="engine steps per traffic window (default 16)")
    parser.add_argument("--port", type=int, help="of every server, on 127.0.0.1 (default: a free one each)")
    parser.add_argument("--json", type=Path, default=DEFAULT_OUT / "demo.json", help="figures")
    parser.add_argument("--report", type=Path, default=DEFAULT_OUT / "report.html", help="HTML report")
    parser.add_argument("--no-report", action="store_true", help="write no HTML report")
    parser.add_argument(
        "--keep-logs", type=Path, metavar="DIR", help="keep server logs and traffic windows here"
    )
    parser.set_defaults(run=run)


def settings_from(arguments: argparse.Namespace) -> DemoSettings:
    """Checked settings.

    Raises:
        InputError: an unknown or repeated mode, a number out of range, a file or folder that is not there;
            names the option.
    """
    if arguments.all_modes and arguments.modes:
        raise InputError("--all-modes: given together with --modes; valid: one of the two")
    modes = MODES if arguments.all_modes else tuple(arguments.modes or DEFAULT_MODES)
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or len(set(modes)) != len(modes):
        raise InputError(f"--modes: {' '.join(modes)}; valid: each of {', '.join(MODES)} at most once")
    for option in ("requests", "sequences", "token_budget", "window"):
        if getattr(arguments, option) < 1:
            name = option.replace("_", "-")
            raise InputError(f"--{name}: {getattr(arguments, option)}; valid: an integer >= 1")
    if not 0 < arguments.rate < float("inf"):
        raise InputError(f"--rate: {arguments.rate}; valid: a number > 0, in requests per second")
    if arguments.token_budget < arguments.sequences:
        raise InputError(
            f"--token-budget: {arguments.token_budget} is below --sequences ({arguments.sequences}); "
            f"valid: at least {arguments.sequences}"
        )
    settings = DemoSettings(
        model=arguments.model,
        prompts=arguments.prompts,
        modes=modes,
        requests=arguments.requests,
        rate=arguments.rate,
        seed=arguments.seed,
        sequences=arguments.sequences,
        token_budget=arguments.token_budget,
        window=arguments.window,
        port=arguments.port,
        json=arguments.json,
        report=None if arguments.no_report else arguments.report,
        logs=arguments.keep_logs,
    )
    for option, path in (("--json", settings.json), ("--report", settings.report)):
        if path is not None:
            _check_writable(option, path)
    return settings


def _check_writable(option: str, path: Path) -> None:
    """A run of minutes must not end with a path that cannot be written."""
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder; valid: a file")
    folder = path.parent
    if folder == DEFAULT_OUT:
        folder.mkdir(exist_ok=True)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option}: cannot write to folder {folder}; valid: a folder that is there")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 0 when every mode's answers equal the reference's, else 1."""
    settings = settings_from(arguments)
    missing = [name for name in ("vllm", "aiohttp", "psutil") if importlib.util.find_spec(name) is None]
    if missing:
        raise RunError(
            f"not installed here: {', '.join(missing)}; `make venv` installs all that the demo needs"
        )
    # Only here: the rest of the command line works without vLLM and what comes with it.
    from . import demo_run

    return demo_run.run(settings)
