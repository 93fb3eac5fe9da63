"""Prefill and decode servers of a small model on this machine's CPU, for tests, the benchmark and trying it out.

The KV cache travels in files of a shared folder (`gimbal_runtime.vllm.pd_connector`).

    python -m gimbal_runtime.tools.pd_servers --prefill 1 --decode 1 --port 8100

starts them and `gimbal route` in front; Ctrl-C stops all. Options that it does not know are the router's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from .server import VllmServer

MAX_TOKENS = 2048
"""Longest prompt and answer together; prefill nodes compute a whole prompt in one iteration."""
CONNECTOR = {
    "kv_connector": "SharedFolderConnector",
    "kv_connector_module_path": "gimbal_runtime.vllm.pd_connector",
}


class PdServers:
    """P prefill and D decode servers as a context manager; `with` returns once all answer.

    Args:
        model: model folder.
        folder: for the KV caches and the servers' logs; it is not emptied at the end.
        prefill, decode: numbers of servers.
        mode: value of GIMBAL_MODE of all of them.
        cores: per server in order, prefill first, the cores that its engine may use; None: all share all.

    Raises:
        InputError: no such model folder.
        ServerError: on entering, when a server does not come up; the others are stopped.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        folder: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        mode: str = "dp",
        cores: Sequence[str] | None = None,
    ) -> None:
        self._cores = cores
        self._mode = mode
        self._model = model
        self._folder = folder
        self.prefill = [self._server("kv_producer", place, place) for place in range(prefill)]
        self.decode = [self._server("kv_consumer", place, prefill + place) for place in range(decode)]

    def _server(self, role: str, place: int, order: int) -> VllmServer:
        storage = {"shared_storage_path": str(self._folder / "kv")}
        transfer = CONNECTOR | {"kv_role": role, "kv_connector_extra_config": storage}
        arguments = ["--kv-transfer-config", json.dumps(transfer), "--block-size", "32"]
        arguments += ["--max-num-batched-tokens", str(MAX_TOKENS), "--max-num-seqs", "64"]
        if role == "kv_producer":
            arguments += ["--no-enable-chunked-prefill"]
        env = {"GIMBAL_NODE_STATISTICS": "1", "OMP_NUM_THREADS": "1"}
        if self._cores is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = self._cores[order]
        return VllmServer(
            self._model,
            self._mode,
            log_path=self._folder / f"{role}-{place}.log",
            data_parallel=1,
            expert_parallel=False,
            eplb=False,
            extra_args=arguments,
            env=env,
        )

    @property
    def servers(self) -> list[VllmServer]:
        """All servers, prefill nodes first."""
        return [*self.prefill, *self.decode]

    def __enter__(self) -> PdServers:
        (self._folder / "kv").mkdir(parents=True, exist_ok=True)
        try:
            with ThreadPoolExecutor(len(self.servers)) as pool:
                list(pool.map(VllmServer.start, self.servers))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stops every server that runs."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(VllmServer.stop, self.servers))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the servers and the router; the router's exit code."""
    from .. import cli
    from .demo import DEFAULT_MODEL

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="model folder")
    parser.add_argument("--prefill", type=int, default=1, help="prefill servers (default: 1)")
    parser.add_argument("--decode", type=int, default=1, help="decode servers (default: 1)")
    known, router = parser.parse_known_args(arguments)
    if known.prefill < 1 or known.decode < 1:
        parser.error("--prefill, --decode: valid: integers >= 1")
    with (
        tempfile.TemporaryDirectory(prefix="gimbal-pd-") as folder,
        PdServers(known.model, Path(folder), prefill=known.prefill, decode=known.decode) as servers,
    ):
        command = ["route", "--prefill", *(server.url for server in servers.prefill)]
        command += ["--decode", *(server.url for server in servers.decode)]
        return cli.main([*command, *router])


if __name__ == "__main__":
    sys.exit(main())
