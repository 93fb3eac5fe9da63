"""`gimbal bench`: tables of our kernels against plain versions of the same work, measured on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from . import bench_counting
from .errors import InputError

HERE = Path(__file__).parent


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "bench",
        help="measure our kernels against plain versions of the same work",
        description="Measures kernels on this machine. Times compare only within one run.",
    )
    parser.add_argument("what", choices=("counting",), help="which kernels")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--seconds", type=float, default=0.5, help="per row, on a CPU (default 0.5)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="T", help="only rows with so many tokens")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads on a CPU (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints the table of the kernels asked for.

    Raises:
        InputError: no such device here, or a number that is not valid.
    """
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no CUDA device here; valid: cpu")
    if not 0 < arguments.seconds <= 60:
        raise InputError(f"--seconds {arguments.seconds}; valid: above 0, at most 60")
    if arguments.threads < 1:
        raise InputError(f"--threads {arguments.threads}; valid: 1 or more")
    shapes = bench_counting.sweep()
    sizes = sorted({shape.tokens for shape in shapes})
    if arguments.tokens is not None:
        shapes = [shape for shape in shapes if shape.tokens in arguments.tokens]
        if not shapes:
            raise InputError(f"--tokens {arguments.tokens}; valid: some of {', '.join(map(str, sizes))}")
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for row in bench_counting.measure(device, shapes, arguments.seconds):
        if not rows:
            print(_head(row), flush=True)
        rows.append(row)
        print(_line(row), flush=True)
    if arguments.json is not None:
        result = {"rows": rows, "unit": "microseconds"} | environment(device, arguments.threads)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _head(row: dict[str, Any]) -> str:
    return f"{'T':>6} {'E':>4} {'K':>3} {'S':>3}  " + " ".join(f"{name:>12}" for name in row["microseconds"])


def _line(row: dict[str, Any]) -> str:
    sizes = f"{row['tokens']:>6} {row['experts']:>4} {row['top_k']:>3} {row['sources']:>3}  "
    return sizes + " ".join(f"{value:>9.1f} us" for value in row["microseconds"].values())


def environment(device: str, threads: int) -> dict[str, Any]:
    """Commit, command, machine and versions, for a result's JSON."""
    packages = {}
    for name in ("torch", "triton", "numpy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {
        "command": " ".join(["gimbal", *sys.argv[1:]]),
        "commit": commit or None,
        "machine": f"{platform.machine()}, {_processor()}",
        "torch_threads": threads,
        "versions": {"python": platform.python_version(), **packages},
        **gpu,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
