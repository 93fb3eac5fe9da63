"""How prefill and decode servers are started; none is started here (tests/vllm/test_pd.py does)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="psutil is not installed")

from gimbal_runtime.tools import pd_servers
from gimbal_runtime.tools.demo import DEFAULT_MODEL
from gimbal_runtime.tools.errors import InputError
from gimbal_runtime.tools.pd_servers import PdServers
from gimbal_runtime.tools.server import ServerError, VllmServer


def test_roles_and_what_follows_from_them(tmp_path: Path) -> None:
    servers = PdServers(DEFAULT_MODEL, tmp_path, prefill=2, decode=1, cores=["0", "0", "1"])
    assert len({server.port for server in servers.servers}) == 3
    roles = []
    for server in servers.servers:
        transfer = json.loads(server.command[server.command.index("--kv-transfer-config") + 1])
        roles.append(transfer["kv_role"])
        assert transfer["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path / "kv")
        # A prefill node must not cut prompts: the connector stores what is there after the first iteration.
        assert ("--no-enable-chunked-prefill" in server.command) == (roles[-1] == "kv_producer")
        assert server.env["GIMBAL_NODE_STATISTICS"] == "1"
    assert roles == ["kv_producer", "kv_producer", "kv_consumer"]
    assert [server.env["VLLM_CPU_OMP_THREADS_BIND"] for server in servers.servers] == ["0", "0", "1"]


def test_one_that_does_not_start_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    def start(server: VllmServer) -> None:
        if "kv_consumer" in str(server.log_path):
            raise ServerError("no")

    monkeypatch.setattr(VllmServer, "start", start)
    monkeypatch.setattr(VllmServer, "stop", lambda server: stopped.append(server.port))
    servers = PdServers(DEFAULT_MODEL, tmp_path, prefill=2, decode=1)
    with pytest.raises(ServerError), servers:
        raise AssertionError("entered")
    assert sorted(stopped) == sorted(server.port for server in servers.servers)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="model"):
        PdServers(tmp_path / "none", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        pd_servers.main(["--prefill", "0"])
    assert "valid: " in capsys.readouterr().err
