"""Builds programs that run CUDA source on the host (simt.hpp): plain, or with a sanitizer."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "simt"
# -fno-strict-aliasing: device code reads arrays 16 bytes at a time through a vector type, as nvcc allows.
FLAGS = ["-std=c++17", "-g", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", f"-I{HERE}"]
SANITIZERS = {
    "plain": ["-O1"],
    "tsan": ["-O1", "-fsanitize=thread"],
    "asan": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
# One failure ends the program. Leaks are not looked for: it needs ptrace, which containers often forbid.
ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=67",
}


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


@functools.lru_cache(maxsize=3)
def why_not(sanitizer: str = "plain") -> str | None:
    """Why programs cannot be built and run here, or None: no compiler, or a sanitizer without its library."""
    if shutil.which(compiler()[0]) is None:
        return f"no C++ compiler ({compiler()[0]})"
    FOLDER.mkdir(parents=True, exist_ok=True)
    probe = FOLDER / f"probe-{sanitizer}"
    command = [*compiler(), *SANITIZERS[sanitizer], "-x", "c++", "-", "-o", str(probe)]
    built = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
    if built.returncode or subprocess.run([probe], capture_output=True).returncode:
        return f"{sanitizer} programs cannot be built and run here"
    return None


def build(
    name: str,
    source: Path,
    *,
    sanitizer: str = "plain",
    include: Sequence[Path] = (ROOT / "csrc",),
    watch: Sequence[Path] = (),
    defines: Sequence[str] = (),
) -> Path:
    """Compiles `source` with the runtime and returns the program, from the cache when nothing has changed.

    Args:
        name: of the program.
        source: the C++ file with `main`; it includes simt.hpp first, then the .cuh under test.
        sanitizer: a key of SANITIZERS.
        include: folders to look for headers in; a folder with an altered header goes first.
        watch: further files whose contents decide whether the cached program is still good.
        defines: macros, as "NAME=VALUE".
    """
    flags = [*FLAGS, *SANITIZERS[sanitizer], *(f"-D{d}" for d in defines)]
    runtime = HERE / "simt_runtime.cpp"
    digest = hashlib.sha256(" ".join([*compiler(), *flags]).encode())
    for path in (source, runtime, HERE / "simt.hpp", *watch):
        digest.update(path.read_bytes())
    FOLDER.mkdir(parents=True, exist_ok=True)
    program = FOLDER / f"{name}-{sanitizer}-{digest.hexdigest()[:16]}"
    if not program.exists():
        part = program.with_suffix(f".{os.getpid()}")
        plain = [*compiler(), *FLAGS, "-O2", "-c", str(runtime), "-o", f"{part}.o"]
        subprocess.run(plain, check=True)
        folders = [f"-I{folder}" for folder in include]
        subprocess.run([*compiler(), *flags, *folders, str(source), f"{part}.o", "-o", str(part)], check=True)
        Path(f"{part}.o").unlink()
        part.replace(program)
    return program


def run(program: Path, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs a program built here; its standard error says what was found."""
    command = [str(program), *map(str, arguments)]
    env = os.environ | ENVIRONMENT
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
