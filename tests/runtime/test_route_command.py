"""`gimbal route` as a command: what it refuses, and that it serves and ends."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from gimbal_runtime import cli
from gimbal_runtime.tools.route import settings_from
from gimbal_runtime.tools.server import free_port

NODES = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prefill", "127.0.0.1:8000", "--decode", "http://d"], "--prefill"),
        (["--prefill", "http://p", "--decode", "ftp://d"], "--decode"),
        (["--prefill", "http://p:99999", "--decode", "http://d"], "--prefill"),
        (["--prefill", "http://p", "--decode", "http://p/"], "twice"),
        ([*NODES, "--alpha", "0"], "--alpha"),
        ([*NODES, "--beta", "nan"], "--beta"),
        ([*NODES, "--tbt-slo", "-1"], "--tbt-slo"),
        ([*NODES, "--bandwidth", "inf"], "--bandwidth"),
        ([*NODES, "--hold-timeout", "-1"], "--hold-timeout"),
        ([*NODES, "--warm-up", "-1"], "--warm-up"),
        ([*NODES, "--kv-transfer-params", "[1]"], "--kv-transfer-params"),
        ([*NODES, "--kv-transfer-params", "{"], "--kv-transfer-params"),
        ([*NODES, "--port", "0"], "port"),
        ([*NODES, "--json", "no/such/folder/x.json"], "--json"),
        ([*NODES, "--json", "."], "--json: . is a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, named, capsys) -> None:
    assert cli.main(["route", *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert error.startswith("gimbal route: ")
    assert named in error
    assert "valid: " in error


def test_settings_of_the_defaults_and_of_options() -> None:
    parser = cli.build_parser()
    settings = settings_from(parser.parse_args(["route", *NODES]))
    policy = settings.dispatch.deflection
    assert (policy.alpha, policy.beta, policy.ttft_slo) == (0.95, 1.0, math.inf)
    assert (settings.dispatch.deflect, settings.dispatch.hold, settings.max_fit_error) == (True, True, 0.15)
    options = ["--ttft-slo", "2", "--no-deflection", "--no-hold", "--kv-transfer-params", '{"a": 1}']
    settings = settings_from(parser.parse_args(["route", *NODES, *options]))
    assert settings.dispatch.deflection.ttft_slo == 2.0
    assert not settings.dispatch.deflect
    assert not settings.dispatch.hold
    assert settings.kv_params == {"a": 1}


def test_serves_without_nodes_and_ends_on_sigterm(tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "decisions.json"
    command = [sys.executable, "-m", "gimbal_runtime.cli", "route", *NODES]
    command += ["--port", str(port), "--json", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"gimbal route: serving on http://127.0.0.1:{port}\n"
            body = json.dumps({"model": "m", "prompt": [1, 2, 3]}).encode()
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=20)
            assert refused.value.code == 503
            assert "no decode node" in json.load(refused.value)["error"]["message"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert json.loads(out.read_text()) == {"decisions": []}
