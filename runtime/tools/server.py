"""A real vLLM server on this machine for the demo and the tests: started, awaited, stopped entirely."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from . import processes
from .errors import InputError, RunError

HOST = "127.0.0.1"
KV_CACHE_BYTES = 256 << 20


class ServerError(RunError):
    """The server did not come up, or would not go away; the message holds the end of its log."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raises InputError when `port` is out of range or something already listens on it."""
    if not 0 < port < 65536:
        raise InputError(f"port: {port}; valid: 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InputError(f"port: {port} is in use on {HOST}; valid: a free port") from error


def check_model(model: str | os.PathLike[str]) -> Path:
    """The model folder as an absolute path.

    Raises:
        InputError: no such folder, or a folder without config.json.
    """
    folder = Path(model)
    if not folder.is_dir():
        raise InputError(f"model: no folder {folder}; valid: a folder with config.json and weights")
    if not (folder / "config.json").is_file():
        raise InputError(f"model: {folder} has no config.json; valid: a Hugging Face model folder")
    return folder.resolve()


class VllmServer:
    """`vllm serve` on the CPU as a context manager; `with` returns once /health answers.

    Args:
        model: model folder.
        mode: value of GIMBAL_MODE: off, dp, ep, uncoordinated or full.
        data_parallel, tensor_parallel: engines, and ranks per engine.
        expert_parallel: spread the experts over all ranks.
        eplb: expert-parallel load balancer on (asynchronous, no spare slots), every `eplb_window` steps.
        api_servers: front-end processes.
        extra_args: more arguments for `vllm serve`; they come last and therefore win.
        env: more environment variables; they win over the ones set here.
        log_path: the server's output goes here.
        port: TCP port on 127.0.0.1; a free one by default.
        start_timeout: seconds until /health must answer.
        stop_grace: seconds between SIGTERM and SIGKILL.

    Raises:
        InputError: no such model folder, or the port is in use.
        ServerError: on entering, when the server ends or stays silent; on leaving, when a process survives.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        mode: str,
        *,
        log_path: str | os.PathLike[str],
        data_parallel: int = 2,
        tensor_parallel: int = 1,
        expert_parallel: bool = True,
        eplb: bool = True,
        eplb_window: int = 16,
        api_servers: int = 1,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        start_timeout: float = 240.0,
        stop_grace: float = 20.0,
    ) -> None:
        self.model = check_model(model)
        if port is not None:
            check_port(port)
        self.mode = mode
        self.ranks = data_parallel * tensor_parallel
        self.log_path = Path(log_path)
        self.port = port if port is not None else free_port()
        self.start_timeout = start_timeout
        self.stop_grace = stop_grace
        self.marker = uuid.uuid4().hex
        self.model_name = self.model.name
        self.command = self._command(data_parallel, tensor_parallel, expert_parallel, api_servers)
        if eplb:
            window = {"window_size": eplb_window, "step_interval": eplb_window, "use_async": True}
            self.command += ["--enable-eplb", "--eplb-config", json.dumps(window)]
        self.command += extra_args
        self.env = self._environment(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._shared: set[Path] = set()
        self._was_healthy = False

    @property
    def url(self) -> str:
        """Root address, without a slash at the end."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of `vllm serve`; None before the start and after the stop."""
        return self._process.pid if self._process else None

    def _command(self, dp: int, tp: int, expert_parallel: bool, api_servers: int) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        command += ["--served-model-name", self.model_name, "--host", HOST, "--port", str(self.port)]
        # fp32 and eager: greedy outputs must not depend on how requests were batched.
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        command += ["--data-parallel-size", str(dp), "--tensor-parallel-size", str(tp)]
        if dp > 1:
            command += ["--api-server-count", str(api_servers)]
        if expert_parallel:
            command += ["--enable-expert-parallel"]
        return command

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        # Settings of a user's shell must not leak into a run that is compared with another one.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIMBAL_")}
        env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        env |= {"VLLM_HOST_IP": HOST, "PYTHONUNBUFFERED": "1"}
        # vLLM binds each rank to a NUMA node of its own; a small machine has one. Ranks and the front end share
        # the cores instead: OpenMP threads beyond the cores spin against each other.
        threads = max(1, len(os.sched_getaffinity(0)) // (self.ranks + 1))
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        # Process titles are otherwise written over the environment, where the marker is looked for.
        env |= {"SPT_NOENV": "1", processes.MARKER: self.marker, "GIMBAL_MODE": self.mode}
        return env | dict(extra)

    def start(self) -> None:
        """Starts the server and waits for /health; whatever goes wrong, no process is left."""
        if self._process is not None:
            raise ServerError(f"server on port {self.port} is running already")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with processes.deferred_interrupts(), self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise

    def _wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"vLLM ended with code {code} before it was ready{self._tail_text()}")
            if self.healthy():
                self._was_healthy = True
                # Now as well as at the stop: a process that somebody kills meanwhile cannot be asked then.
                self._shared = processes.shared_memory_files(self.processes())
                return
            time.sleep(0.25)
        raise ServerError(f"vLLM not ready after {self.start_timeout:.0f} s{self._tail_text()}")

    def healthy(self) -> bool:
        """True when /health answers 200 within 2 s."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def processes(self) -> list[psutil.Process]:
        """All live processes of this server: `vllm serve`, front ends, coordinator, engines, helpers."""
        if self._process is not None:
            found = processes.descendants(self._process.pid)
            found += processes.marked_processes(self.marker, self._process.pid)
            self._seen.update({process.pid: process for process in found})
        return processes.alive(self._seen.values())

    def stop(self) -> None:
        """SIGTERM to `vllm serve`, SIGKILL to whatever is left after the grace time; then all must be gone.

        Ctrl-C in the meantime takes effect when this is done. Does nothing when the server is not running.

        Raises:
            ServerError: a process outlived SIGKILL by 10 s.
        """
        if self._process is None:
            return
        with processes.deferred_interrupts():
            members = self.processes()
            self._shared |= processes.shared_memory_files(members)
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                # vLLM answers SIGTERM only once it serves: while it starts, waiting would be in vain.
                processes.wait_gone(
                    members, self.stop_grace if self._was_healthy else min(2.0, self.stop_grace)
                )
            survivors = self.processes()
            processes.kill_all(survivors)
            processes.wait_gone(survivors, 10.0)
            self._process.poll()
            # A process that was being started during the sweep shows up in a second one.
            survivors = self.processes()
            processes.kill_all(survivors)
            survivors = processes.wait_gone(survivors, 10.0)
            self._process.poll()
            if not survivors:
                processes.remove_files(self._shared)
            self._process = None
            self._was_healthy = False
            self._seen.clear()
            self._shared.clear()
        if survivors:
            raise ServerError(f"processes {sorted(p.pid for p in survivors)} outlived SIGKILL")

    def tail(self, lines: int = 30) -> str:
        """The last lines of the server's log."""
        if not self.log_path.is_file():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 200 * lines))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def _tail_text(self) -> str:
        return f"; the end of {self.log_path}:\n{self.tail()}"

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
