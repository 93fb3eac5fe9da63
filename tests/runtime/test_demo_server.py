"""Servers come up or say why not, and nothing of them stays: with a small stand-in, then with real vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="psutil comes with vLLM")

from gimbal_runtime.tools import processes
from gimbal_runtime.tools.server import ServerError, VllmServer

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3-moe"

# Answers /health, maps shared memory, and starts a child in a session of its own that ignores SIGTERM.
STAND_IN = """
import http.server, mmap, os, signal, subprocess, sys
path = "/dev/shm/gimbal-test-" + os.environ["GIMBAL_SERVER_ID"]
with open(path, "wb+") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
loop = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", loop], start_new_session=True)
print("stand-in is up", flush=True)
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if sys.argv[2] != "ill" else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def _stand_in(tmp_path: Path, kind: str, **kwargs) -> VllmServer:
    server = VllmServer(MODEL, "off", log_path=tmp_path / "server.log", stop_grace=0.5, **kwargs)
    server.command = [sys.executable, "-c", STAND_IN, str(server.port), kind]
    return server


def _left(server: VllmServer) -> list[int]:
    return [process.pid for process in processes.marked_processes(server.marker, -1)]


@pytest.mark.parametrize("kind", ["polite", "stubborn"])
def test_stop_ends_every_process_and_frees_its_shared_memory(tmp_path, kind):
    with _stand_in(tmp_path, kind) as server:
        members = server.processes()
        assert len(members) == 2
        assert len({os.getsid(process.pid) for process in members}) == 2
        assert sorted(_left(server)) == sorted(process.pid for process in members)
        shared = Path(f"/dev/shm/gimbal-test-{server.marker}")
        assert shared.is_file()
    assert _left(server) == []
    assert processes.alive(members) == []
    assert not shared.exists()
    server.stop()  # a second stop is harmless


def test_children_of_a_leader_that_was_killed_are_found(tmp_path):
    with _stand_in(tmp_path, "polite") as server:
        os.kill(server.pid, signal.SIGKILL)
        time.sleep(0.2)
        assert len(_left(server)) == 1
    assert _left(server) == []


def test_a_server_that_ends_early_shows_its_log_and_leaves_nothing(tmp_path):
    server = _stand_in(tmp_path, "polite")
    server.command = [sys.executable, "-c", "print('no such weights'); raise SystemExit(3)"]
    with pytest.raises(ServerError, match=r"(?s)code 3.*no such weights"):
        server.start()
    assert server.pid is None


def test_a_server_that_never_gets_healthy_is_given_up(tmp_path):
    server = _stand_in(tmp_path, "ill", start_timeout=1.0)
    with pytest.raises(ServerError, match=r"(?s)not ready after 1 s.*stand-in is up"):
        server.start()
    assert _left(server) == []


def test_an_exception_inside_the_block_stops_the_server(tmp_path):
    server = _stand_in(tmp_path, "polite")
    with pytest.raises(KeyError), server:
        raise KeyError("x")
    assert _left(server) == []


def test_interrupts_are_held_back_and_then_delivered():
    reached = False

    def work() -> None:
        nonlocal reached
        with processes.deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            reached = True

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_command_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("GIMBAL_W_MOE", "9")
    server = VllmServer(
        MODEL, "ep", log_path=tmp_path / "l", extra_args=["--max-num-seqs", "4"], env={"GIMBAL_STRICT": "1"}
    )
    command = " ".join(server.command)
    for part in ("--host 127.0.0.1", "--data-parallel-size 2", "--enable-expert-parallel", "--enable-eplb"):
        assert part in command
    assert server.command[-2:] == ["--max-num-seqs", "4"]
    assert server.env["GIMBAL_MODE"] == "ep"
    assert server.env["GIMBAL_STRICT"] == "1"
    assert "GIMBAL_W_MOE" not in server.env  # the caller's shell must not change a comparison
    single = VllmServer(
        MODEL, "off", log_path=tmp_path / "l", data_parallel=1, eplb=False, expert_parallel=False
    )
    assert not {"--enable-eplb", "--enable-expert-parallel"} & set(single.command)
    assert single.port != server.port


def _interrupt(script: str, tmp_path: Path, ready: str) -> list[int]:
    """Runs a script, sends SIGINT when its output or its server's log holds `ready`; its server's survivors."""
    marker_file, log = tmp_path / "marker", tmp_path / "server.log"
    code = textwrap.dedent(script)
    output = tmp_path / "out"
    with output.open("wb") as sink:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(MODEL), str(log), str(marker_file)],
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline and child.poll() is None:
                seen = output.read_text() + (log.read_text(errors="replace") if log.exists() else "")
                if ready in seen:
                    break
                time.sleep(0.1)
            assert child.poll() is None, output.read_text() + log.read_text(errors="replace")[-3000:]
            marker = marker_file.read_text()
            members = processes.marked_processes(marker, -1)
            assert len(members) >= 2
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=60) != 0
        finally:
            child.kill()
    found = {*processes.marked_processes(marker, -1), *processes.alive(members)}
    return sorted(process.pid for process in found)


@pytest.mark.vllm
@pytest.mark.slow
def test_ctrl_c_while_vllm_starts_leaves_no_process(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    script = """
    import sys
    from pathlib import Path
    from gimbal_runtime.tools.server import VllmServer
    server = VllmServer(sys.argv[1], "off", data_parallel=1, expert_parallel=False, eplb=False,
                        log_path=sys.argv[2])
    Path(sys.argv[3]).write_text(server.marker)
    with server:
        pass
    """
    assert _interrupt(script, tmp_path, "EngineCore") == []


@pytest.mark.vllm
@pytest.mark.slow
def test_ctrl_c_while_two_engines_serve_leaves_no_process(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    script = """
    import sys, time
    from pathlib import Path
    from gimbal_runtime.tools.server import VllmServer
    server = VllmServer(sys.argv[1], "full", log_path=sys.argv[2])
    Path(sys.argv[3]).write_text(server.marker)
    with server:
        print("serving with", len(server.processes()), "processes", flush=True)
        time.sleep(600)
    """
    assert _interrupt(script, tmp_path, "serving with") == []
