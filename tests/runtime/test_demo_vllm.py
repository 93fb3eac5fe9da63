"""The demo from end to end on real vLLM, small."""

from __future__ import annotations

import json

import pytest
from gimbal_runtime import cli


@pytest.mark.vllm
@pytest.mark.slow
def test_demo_end_to_end(tmp_path, monkeypatch, capsys):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    arguments = ["demo", "--modes", "full", "--requests", "40", "--window", "4", "--keep-logs", str(logs)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "every answer equals the reference" in printed
    document = json.loads((tmp_path / "demo-out" / "demo.json").read_text())
    assert document["requests"] == 40
    assert document["versions"]["vllm"]
    full = document["modes"]["full"]
    assert full["identical"] == 40
    assert sum(full["decisions"].values()) == 40  # every request was routed by engine choice
    assert full["rearrangements"] >= 1
    assert 0 < full["ttft_mean_s"] <= full["ttft_p99_s"]
    assert 0.2 < full["remote_pick_share"] < 0.8
    assert 1.0 <= full["max_over_mean"] < 2.0
    assert list(logs.glob("windows-full/window-*.npz"))
    report = (tmp_path / "demo-out" / "report.html").read_text()
    assert "Identical to the reference: full 40 of 40" in report
    assert "expert 0:" in report  # heatmap cells, hence traffic arrived
