"""Every hook on the installed vLLM, and on one that looks different; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm

REGISTER = "from gimbal_runtime.vllm import register; register()"
OTHER_CHOOSER = """
from vllm.v1.engine import core_client
def get_core_engine_for_request(self, incoming): ...
core_client.DPLBAsyncMPClient.get_core_engine_for_request = get_core_engine_for_request
"""
STOCK_ROWS = """
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core_client import DPLBAsyncMPClient
assert DPCoordinatorProc.run_coordinator.__module__.startswith("vllm."), "coordinator"
assert "lb_engines" not in vars(DPLBAsyncMPClient), "rows"
print("trace path untouched")
"""
OTHER_VERSION = "import vllm; vllm.__version__ = '0.99.0'\n"
RUST_FRONTEND = """
import os
os.environ["VLLM_USE_RUST_FRONTEND"] = "1"
from types import SimpleNamespace
from gimbal_runtime.vllm.settings import _prepare
_prepare(SimpleNamespace(
    additional_config={},
    model_config=SimpleNamespace(is_moe=True),
    scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False),
    parallel_config=SimpleNamespace(enable_eplb=True, data_parallel_size=2, data_parallel_external_lb=False),
))
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIMBAL_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_hook_fits_the_installed_vllm() -> None:
    result = run(REGISTER, GIMBAL_STRICT="1")
    assert result.returncode == 0, result.stderr
    assert "is not active" not in result.stderr + result.stdout


def test_other_signature_leaves_vllm_alone_and_warns_once() -> None:
    result = run(OTHER_CHOOSER + REGISTER + STOCK_ROWS)
    assert result.returncode == 0, result.stderr
    output = result.stdout + result.stderr
    assert output.count("Gimbal hook 'trace-path' is not active") == 1
    assert "get_core_engine_for_request" in output
    assert "trace path untouched" in output


def test_other_signature_is_an_error_when_strict() -> None:
    result = run(OTHER_CHOOSER + REGISTER, GIMBAL_STRICT="1")
    assert result.returncode != 0
    assert "Gimbal hook 'trace-path' is not active" in result.stderr


def test_unknown_version_leaves_vllm_alone() -> None:
    result = run(OTHER_VERSION + REGISTER + STOCK_ROWS)
    assert result.returncode == 0, result.stderr
    assert "trace path untouched" in result.stdout
    assert "vLLM 0.99.0 is none of 0.32, 0.33" in result.stdout + result.stderr


@pytest.mark.parametrize(("variable", "value"), [("GIMBAL_MODE", "fast"), ("GIMBAL_COLOUR", "red")])
def test_unknown_setting_is_an_error(variable: str, value: str) -> None:
    result = run(REGISTER, **{variable: value})
    assert result.returncode != 0
    assert "valid:" in result.stderr


def test_rust_frontend_is_told_of() -> None:
    result = run(RUST_FRONTEND, GIMBAL_MODE="full")
    assert result.returncode == 0, result.stderr
    assert "engine choice is inactive" in result.stdout + result.stderr
