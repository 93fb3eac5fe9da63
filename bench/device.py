"""The GPU lane in one command, in under 8 minutes: correctness, then timings, then compute-sanitizer.

    python bench/device.py [--results FOLDER]

Every step has a time limit; the sum of the limits is below 8 minutes. Results go to bench/results as JSON. On a
machine without a GPU every step is shown as skipped, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
BUDGET_SECONDS = 480
TARGET_MICROSECONDS, TARGET_RATIO = 5.0, 1.05  # at 16,384 x 8 and 128 experts, against mapping alone


@dataclass(frozen=True)
class Step:
    """One command with its time limit; without `tool` on the PATH, or `module` to import, it is skipped."""

    name: str
    command: tuple[str, ...]
    seconds: int
    tool: str | None = None
    module: str | None = None


def make_steps(results: Path, gpu: str) -> list[Step]:
    python, gimbal = sys.executable, (sys.executable, "-m", "gimbal_runtime.cli")
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    small = ("tests/counting/test_counting_gpu.py", "-k", "report_11")
    table = results / f"counting-{gpu}.json"
    return [
        Step("tests marked gpu", (*pytest, "-m", "gpu", "tests"), 115),
        Step(
            "random shapes on every backend",
            (python, "tests/counting/acceptance.py", "--cases", "300", "--simt", "1"),
            70,
        ),
        Step("timings", (*gimbal, "bench", "counting", "--device", "cuda", "--json", str(table)), 80),
        Step(
            "recording inside vLLM",
            (
                python,
                "bench/recording.py",
                "--device",
                "cuda",
                "--json",
                str(results / f"recording-{gpu}.json"),
            ),
            40,
            module="vllm",
        ),
        Step(
            "migration between two processes",
            (python, "bench/device_migration.py", "--json", str(results / f"migration-{gpu}.json")),
            60,
        ),
        Step(
            "placement against the host",
            (python, "bench/device_placement.py", "--json", str(results / f"placement-{gpu}.json")),
            35,
        ),
        Step(
            "memory errors",
            ("compute-sanitizer", "--error-exitcode", "1", *pytest, *small),
            75,
            tool="compute-sanitizer",
        ),
    ]


def run_step(step: Step, has_gpu: bool) -> tuple[str, str]:
    """State (passed, failed, skipped) and what to show for it."""
    if not has_gpu:
        return "skipped", "no CUDA device"
    if step.tool is not None and shutil.which(step.tool) is None:
        return "skipped", f"{step.tool} is not installed"
    if step.module is not None and importlib.util.find_spec(step.module) is None:
        return "skipped", f"{step.module} is not installed"
    try:
        done = subprocess.run(
            step.command, cwd=ROOT, capture_output=True, text=True, timeout=step.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "failed", f"longer than {step.seconds} s"
    text = (done.stdout + done.stderr).strip()
    return ("passed" if done.returncode == 0 else "failed"), text[-3000:]


def targets(table: Path) -> list[str]:
    """How the fastest backend at 16,384 x 8 stands to the targets, one line per figure."""
    if not table.exists():
        return []
    rows = json.loads(table.read_text())["rows"]
    for row in rows:
        if (row["tokens"], row["experts"], row["top_k"], row["sources"]) == (16_384, 128, 8, 1):
            spent = row["microseconds"]
            name = min((n for n in ("cuda", "triton") if n in spent), key=spent.__getitem__)
            ours, bare = spent[name], spent["map only"]
            return [
                f"{name} at 16,384 x 8: {ours:.2f} us, target {TARGET_MICROSECONDS} us",
                f"over mapping alone: {ours / bare:.3f}, target {TARGET_RATIO}",
            ]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER")
    results = parser.parse_args().results
    has_gpu = torch.cuda.is_available()
    gpu = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower() if has_gpu else "none"
    steps = make_steps(results, gpu)
    assert sum(step.seconds for step in steps) < BUDGET_SECONDS
    failed = False
    for step in steps:
        start = time.perf_counter()
        state, text = run_step(step, has_gpu)
        failed |= state == "failed"
        spent = time.perf_counter() - start
        print(f"{step.name:32} {state} ({spent:.0f} s)" + (f": {text}" if state == "skipped" else ""))
        if state != "skipped":
            print(text, flush=True)
    for line in targets(results / f"counting-{gpu}.json"):
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
