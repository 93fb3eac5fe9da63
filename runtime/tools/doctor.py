"""`gimbal doctor`: what works on this machine, and why the rest does not."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .demo import DEFAULT_MODEL, DEFAULT_PROMPTS
from .errors import InputError

READY, ABSENT, BROKEN = "ready", "absent", "broken"


@dataclass(frozen=True)
class Finding:
    """One check: `state` is ready, absent (not there, which may be fine) or broken (there, does not work)."""

    name: str
    state: str
    detail: str


def _imported(name: str, distribution: str) -> Finding | None:
    """None when `name` imports; else a finding that says why not."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return Finding(distribution, ABSENT, "not installed")
        return Finding(distribution, BROKEN, f"needs {error.name}, which is not installed")
    except Exception as error:  # a broken binary package raises whatever its loader raises
        return Finding(distribution, BROKEN, f"{type(error).__name__}: {error}")
    return None


def check_python() -> Finding:
    """The interpreter."""
    return Finding(
        "python", READY, f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    )


def check_torch() -> Finding:
    """torch, which everything needs."""
    missing = _imported("torch", "torch")
    if missing:
        return missing
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", READY, f"{torch.__version__}, {build}")


def check_gpu() -> Finding:
    """A CUDA device as torch sees it."""
    if _imported("torch", "torch"):
        return Finding("GPU", ABSENT, "torch does not import")
    import torch

    if not torch.cuda.is_available():
        why = "torch sees no CUDA device" if torch.version.cuda else "this torch is a CPU build"
        return Finding("GPU", ABSENT, f"{why}: GPU kernels are not used, torch and host code serve")
    major, minor = torch.cuda.get_device_capability()
    return Finding("GPU", READY, f"{torch.cuda.get_device_name()}, sm_{major}{minor}")


def check_triton() -> Finding:
    """Triton: compiled on a GPU, by its interpreter elsewhere."""
    missing = _imported("triton", "triton")
    if missing:
        return missing
    version = importlib.metadata.version("triton")
    if check_gpu().state == READY:
        return Finding("triton", READY, version)
    return Finding(
        "triton", READY, f"{version}; without a GPU only its interpreter runs (TRITON_INTERPRET=1)"
    )


def check_cupy() -> Finding:
    """CuPy, by which the CUDA kernels are called."""
    missing = _imported("cupy", "cupy")
    if missing and missing.state == ABSENT:
        return Finding("cupy", ABSENT, "not installed: extras cuda12 and cuda13 bring it")
    return missing or Finding("cupy", READY, str(importlib.import_module("cupy").__version__))


def check_nvcc() -> Finding:
    """nvcc, with which an installation compiles the CUDA kernels ahead of time."""
    found = shutil.which("nvcc")
    if found is None:
        return Finding("nvcc", ABSENT, "not on PATH: kernels are compiled at first use where CuPy is there")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=False)
    lines = [line for line in done.stdout.splitlines() if "release" in line]
    return Finding(
        "nvcc", READY if lines else BROKEN, lines[0].strip() if lines else done.stderr.strip()[:200]
    )


def check_host_library() -> Finding:
    """The C++ library built at installation."""
    import gimbal_kernels

    path = Path(gimbal_kernels.__file__).parent / "_native" / "libgimbal_host.so"
    if not path.is_file():
        compiler = "g++ is there: reinstall" if shutil.which("g++") else "g++ was not found"
        return Finding("host library", ABSENT, f"not built ({compiler}); numpy serves, slower")
    import ctypes

    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return Finding("host library", BROKEN, str(error))
    return Finding("host library", READY, f"{path.name}, {path.stat().st_size // 1024} KiB")


def check_vllm() -> Finding:
    """vLLM, its plug-in entry point, and whether the hooks know this version."""
    missing = _imported("vllm", "vllm")
    if missing:
        return missing
    import vllm

    from ..vllm.guard import SUPPORTED_VERSIONS, is_supported

    version = str(vllm.__version__)
    names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "gimbal" not in names:
        return Finding("vllm", BROKEN, f"{version}; the plug-in is not registered: install this package")
    if not is_supported(version):
        known = ", ".join(SUPPORTED_VERSIONS)
        return Finding("vllm", BROKEN, f"{version}; the hooks know {known}: vLLM would run as stock")
    misfit = _hook_misfit()
    if misfit:
        return Finding("vllm", BROKEN, f"{version}; {misfit}")
    return Finding("vllm", READY, f"{version}; every hook fits")


def _hook_misfit() -> str:
    """Installs all hooks in a process of its own, as vLLM's processes do; empty, or why one does not fit."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIMBAL_")}
    code = "from gimbal_runtime.vllm import register; register()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"GIMBAL_STRICT": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    lines = done.stderr.strip().splitlines()
    return (
        "" if done.returncode == 0 else (lines[-1] if lines else f"register() ended with {done.returncode}")
    )


def check_fixtures() -> Finding:
    """The demo's model and prompts."""
    missing = [
        path.name for path in (DEFAULT_MODEL / "model.safetensors", DEFAULT_PROMPTS) if not path.is_file()
    ]
    if missing:
        return Finding(
            "fixtures", ABSENT, f"no {', '.join(missing)}: `gimbal demo` needs --model and --prompts"
        )
    return Finding("fixtures", READY, f"{DEFAULT_MODEL.name}, {DEFAULT_PROMPTS.name}")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_gpu,
    check_triton,
    check_cupy,
    check_nvcc,
    check_host_library,
    check_vllm,
    check_fixtures,
)


def examine() -> Iterator[Finding]:
    """Every check in order; one that fails unexpectedly is a broken finding, not an end."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name, BROKEN, f"{type(error).__name__}: {error}")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "doctor",
        help="what works on this machine and why not",
        description="Looks at torch, Triton, CuPy, nvcc, the GPU, the host library, vLLM and the fixtures. "
        "Exit code 1 when something is there and does not work.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; 0, or 1 when one is broken."""
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise InputError(f"--json: no folder {arguments.json.parent}; valid: a folder that is there")
    findings = []
    for finding in examine():
        findings.append(finding)
        print(f"{finding.name:12}  {finding.state:6}  {finding.detail}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps([asdict(f) for f in findings], indent=2) + "\n", encoding="utf-8"
        )
    return 1 if any(finding.state == BROKEN for finding in findings) else 0
