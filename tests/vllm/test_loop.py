"""Real servers, one a test: conservation of counts, the negative control, faults."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import MODEL, Client, load_prompts, wait_until
from .plugins import CAPTURE_ROUTER, NO_TRANSFER, write_plugin

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.tools.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOP_K, LAYERS, EXPERTS = 4, 6, 32
NO_PREFIX_CACHE = ["--no-enable-prefix-caching"]
# vLLM kills its workers at once otherwise, and with them the counts of the window that is open.
ORDERLY = ["--shutdown-timeout", "20"]


def expected_picks(answers: list[dict[str, Any]]) -> int:
    """top-k x (prompt + output - 1) per layer: the last output token is never fed back."""
    return TOP_K * sum(answer["prompt_tokens"] + len(answer["tokens"]) - 1 for answer in answers)


def total_traffic(folder: Path) -> np.ndarray:
    """[L, S, E] over all closed windows and what every rank had counted when the server stopped."""
    files = sorted(folder.glob("*.npz"))
    assert any(file.name.startswith("window") for file in files)
    assert any(file.name.startswith("rest") for file in files)
    return np.sum([np.load(file)["traffic"] for file in files], axis=0)


def send_to_each_engine(client: Client, prompts: list[Any]) -> dict[int, list[dict[str, Any]]]:
    """Even prompts to engine 0, odd ones to engine 1, all at once; the answers by engine."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        futures = [
            (i % 2, pool.submit(client.complete, prompt, 16, engine=i % 2))
            for i, prompt in enumerate(prompts)
        ]
        return {engine: [f.result() for e, f in futures if e == engine] for engine in (0, 1)}


def run_and_count(tmp_path: Path, **options: Any) -> tuple[dict[int, list[dict[str, Any]]], np.ndarray, str]:
    """Serves the prompts, half by each engine, and stops: the answers, the traffic [L, S, E], the log."""
    traffic, log = tmp_path / "traffic", tmp_path / "server.log"
    env = {"GIMBAL_TRAFFIC_DIR": str(traffic), "GIMBAL_BETA": "1.0", "GIMBAL_GAMMA": "0.0"}
    with VllmServer(
        MODEL,
        "full",
        extra_args=[*NO_PREFIX_CACHE, *ORDERLY],
        env=env,
        log_path=log,
        eplb_window=10,
        stop_grace=40.0,
        **options,
    ) as server:
        answers = send_to_each_engine(Client(server.url), load_prompts(48))
    return answers, total_traffic(traffic), log.read_text()


def check_conservation(answers: dict[int, list[dict[str, Any]]], traffic: np.ndarray) -> None:
    for source in (0, 1):
        assert traffic[:, source].sum(axis=1).tolist() == [expected_picks(answers[source])] * LAYERS


def in_order(answers: dict[int, list[dict[str, Any]]]) -> list[list[int]]:
    return [answers[i % 2][i // 2]["tokens"] for i in range(len(answers[0]) + len(answers[1]))]


def test_counts_are_conserved_and_agree_with_the_router(tmp_path: Path, reference: list[list[int]]) -> None:
    answers, traffic, _ = run_and_count(tmp_path / "dp2")
    check_conservation(answers, traffic)
    assert in_order(answers) == reference
    captured = capture_single_engine(tmp_path / "dp1")
    difference = np.abs(traffic.sum(axis=1) - captured).sum() / captured.sum()
    print(f"picks {captured.sum()}, differing {difference:.6%}")
    assert difference <= 1e-4


def capture_single_engine(tmp_path: Path) -> np.ndarray:
    """Picks [L, E] by the routers of one stock engine over the same prompts."""
    tmp_path.mkdir()
    counts = np.memmap(tmp_path / "picks", dtype=np.int64, mode="w+", shape=(LAYERS, EXPERTS))
    folder = write_plugin(tmp_path / "plugin", "capture_router", CAPTURE_ROUTER)
    with VllmServer(
        MODEL,
        "off",
        data_parallel=1,
        expert_parallel=False,
        eplb=False,
        extra_args=NO_PREFIX_CACHE,
        env={"PYTHONPATH": str(folder), "CAPTURE_FILE": str(tmp_path / "picks")},
        log_path=tmp_path / "server.log",
    ) as server:
        before = np.array(counts)
        answers = Client(server.url).complete_all(load_prompts(48))
        picks = np.array(counts) - before
    assert picks.sum(axis=1).tolist() == [expected_picks(answers)] * LAYERS
    return picks


def test_counts_are_conserved_under_tensor_parallelism(tmp_path: Path, reference: list[list[int]]) -> None:
    answers, traffic, _ = run_and_count(tmp_path, tensor_parallel=2)
    check_conservation(answers, traffic)
    assert in_order(answers) == reference


def test_maps_without_weights_are_noticed(tmp_path: Path, reference: list[list[int]]) -> None:
    """Negative control: if weights did not move with the maps, the comparison of outputs would show it."""
    folder = write_plugin(tmp_path / "plugin", "no_transfer", NO_TRANSFER)
    env = {"PYTHONPATH": str(folder), "GIMBAL_METHOD": "eplb"}
    with VllmServer(MODEL, "ep", env=env, log_path=tmp_path / "server.log", eplb_window=10) as server:
        client = Client(server.url)
        client.complete_all(load_prompts(48))
        assert wait_until(lambda: client.complete("warm", 32) and moved(client) > 100, 60.0)
        answers = client.complete_all(load_prompts(48))
    identical = sum(answer["tokens"] == tokens for answer, tokens in zip(answers, reference, strict=True))
    print(f"identical with weights left behind: {identical} of {len(reference)}")
    assert identical <= 2


def moved(client: Client) -> float:
    return client.metrics().get("gimbal_experts_moved_total", 0.0)


def test_stock_mode_observes_without_acting(tmp_path: Path, reference: list[list[int]]) -> None:
    env = {"GIMBAL_OBSERVE": "1", "GIMBAL_TRAFFIC_DIR": str(tmp_path / "traffic")}
    with VllmServer(
        MODEL,
        "off",
        env=env,
        log_path=tmp_path / "server.log",
        eplb_window=10,
        extra_args=[*NO_PREFIX_CACHE, *ORDERLY],
        stop_grace=40.0,
    ) as server:
        client = Client(server.url)
        answers = client.complete_all(load_prompts(48))
        metrics = client.metrics()
    assert [answer["tokens"] for answer in answers] == reference
    assert not any(name.startswith("gimbal_engine_decisions") for name in metrics)
    assert total_traffic(tmp_path / "traffic").sum() == LAYERS * expected_picks(answers)


def test_killed_engine_ends_the_server(tmp_path: Path) -> None:
    """As stock vLLM does: requests fail, the server ends, nothing hangs."""
    with VllmServer(MODEL, "full", log_path=tmp_path / "server.log") as server:
        client = Client(server.url)
        with ThreadPoolExecutor(max_workers=8) as pool:
            futures = [pool.submit(client.complete, "x " * 50, 1500) for _ in range(8)]
            time.sleep(1.0)
            [engine] = [p for p in server.processes() if "EngineCore_DP1" in " ".join(p.cmdline())]
            engine.kill()
            errors = [future.exception(timeout=60) for future in futures]  # raises if one hangs
        assert all(error is not None for error in errors), errors
        assert wait_until(lambda: not server.healthy(), 60.0)
        assert wait_until(lambda: not server.processes(), 60.0)


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        ({"GIMBAL_MODE": "fast"}, [], "uncoordinated"),
        ({}, ["--additional-config", '{"gimbal": {"colour": "red"}}'], "age_limit"),
    ],
)
def test_unknown_setting_is_an_error_at_start(
    tmp_path: Path, env: dict[str, str], arguments: list[str], message: str
) -> None:
    from gimbal_runtime.tools.server import ServerError

    server = VllmServer(
        MODEL, "full", data_parallel=1, eplb=False, env=env, extra_args=arguments, log_path=tmp_path / "log"
    )
    with pytest.raises(ServerError, match="ended with code"):
        server.start()
    assert message in (tmp_path / "log").read_text()
