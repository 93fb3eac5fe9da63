"""The command line: help everywhere, one line and exit code 2 on bad input."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from gimbal_runtime import cli
from gimbal_runtime.tools import doctor
from gimbal_runtime.tools.demo import settings_from
from gimbal_runtime.tools.errors import InputError, RunError

COMMANDS = ("calibrate", "demo", "doctor", "place", "report", "simulate")


def test_the_commands_are_those_that_exist(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert command in shown
    with pytest.raises(SystemExit) as ended:
        cli.main(["conjure"])
    assert ended.value.code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--modes", "off", "fast"], "--modes"),
        (["--modes", "off", "off"], "--modes"),
        (["--modes", "off", "--all-modes"], "--all-modes"),
        (["--requests", "0"], "--requests"),
        (["--rate", "nan"], "--rate"),
        (["--window", "-1"], "--window"),
        (["--token-budget", "32"], "--token-budget"),
        (["--model", "no/such/model"], "model"),
        (["--prompts", "no/such/file"], "prompts"),
        (["--json", "no/such/folder/x.json"], "--json"),
        (["--report", "."], "--report"),
    ],
)
def test_demo_refuses_bad_input_before_it_starts_anything(arguments, named, capsys, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import subprocess

    def never(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", never)
    assert cli.main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("gimbal demo: ")
    assert named in captured.err
    assert "valid: " in captured.err


def test_a_model_folder_without_config_is_bad_input(capsys, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_settings_of_the_default_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_from(cli.build_parser().parse_args(["demo"]))
    assert settings.modes == ("off", "full")
    assert (settings.sequences, settings.token_budget, settings.rate) == (64, 256, 30.0)
    assert settings.json == Path("demo-out/demo.json")
    assert settings.logs is None
    every = settings_from(cli.build_parser().parse_args(["demo", "--all-modes", "--no-report"]))
    assert every.modes == ("off", "dp", "ep", "uncoordinated", "full")
    assert every.report is None


@pytest.mark.parametrize(
    ("error", "code"), [(RunError("it broke"), 1), (InputError("bad"), 2), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(error, code, capsys, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err.startswith("gimbal doctor: ")


def test_doctor_reports_every_part(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_hook_misfit", str)  # the real one starts a process that imports all of vLLM
    out = tmp_path / "doctor.json"
    code = cli.main(["doctor", "--json", str(out)])
    findings = {finding["name"]: finding for finding in json.loads(out.read_text())}
    assert list(findings) == [
        "python", "torch", "GPU", "triton", "cupy", "nvcc", "host library", "vllm", "fixtures",
    ]  # fmt: skip
    assert {finding["state"] for finding in findings.values()} <= {"ready", "absent", "broken"}
    assert code == int(any(finding["state"] == "broken" for finding in findings.values()))
    assert findings["fixtures"]["state"] == "ready"
    printed = capsys.readouterr().out
    assert all(finding["detail"] in printed for finding in findings.values())


def test_doctor_says_broken_when_a_check_raises(monkeypatch, capsys):
    def check_gpu():
        raise RuntimeError("driver mismatch")

    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python, check_gpu))
    assert cli.main(["doctor"]) == 1
    assert "broken  RuntimeError: driver mismatch" in capsys.readouterr().out


@pytest.mark.parametrize("misfit", ["", "Gimbal hook 'queue' is not active"])
def test_doctor_says_whether_the_hooks_fit(misfit, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr(doctor, "_hook_misfit", lambda: misfit)
    finding = doctor.check_vllm()
    assert finding.state == ("broken" if misfit else "ready")
    assert misfit in finding.detail


@pytest.mark.vllm
def test_every_hook_fits_the_installed_vllm():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    assert doctor._hook_misfit() == ""


def test_a_port_in_use_and_a_missing_model_are_named(tmp_path):
    pytest.importorskip("psutil", reason="psutil comes with vLLM")
    from gimbal_runtime.tools.server import VllmServer

    model = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3-moe"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port: {port} is in use"):
            VllmServer(model, "off", log_path=tmp_path / "log", port=port)
    with pytest.raises(ValueError, match="model: no folder"):
        VllmServer(tmp_path / "none", "off", log_path=tmp_path / "log")


def test_a_fault_of_ours_is_not_called_bad_input(monkeypatch):
    def fail():
        raise ValueError("arrays do not fit")

    monkeypatch.setattr(doctor, "examine", fail)
    with pytest.raises(ValueError, match="arrays do not fit"):
        cli.main(["doctor"])
