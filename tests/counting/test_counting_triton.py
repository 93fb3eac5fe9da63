"""Starts the Triton lanes: interpreter and compiler need processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
HERE = Path(__file__).parent


def run_lane(name, tmp_path, *, least, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "pytest", str(HERE / name), "-q", "-s", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=HERE.parents[1])
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed.group(1)) >= least, "the lane has lost tests"


def release(version):
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.mark.skipif(
    release(triton.__version__) < (3, 7) and release(np.__version__) >= (2, 4),
    reason="the interpreter of Triton 3.6 needs numpy < 2.4",
)
def test_interpreter_lane(tmp_path):
    run_lane("lane_interpreter.py", tmp_path, least=95, TRITON_INTERPRET="1")


def test_compile_lane(tmp_path):
    run_lane("lane_compile.py", tmp_path, least=13)
