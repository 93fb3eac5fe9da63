"""Real servers in mode full whose every window is counted twice: by `map_and_count` and by vLLM's own recording."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODEL, Client, load_prompts
from .test_loop import (
    NO_PREFIX_CACHE,
    ORDERLY,
    check_conservation,
    in_order,
    send_to_each_engine,
    total_traffic,
)

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.tools.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

COMPARED = re.compile(r"Gimbal recording on EP rank (\d+): (\d+) of (\d+) picks differ from vLLM's own")
CHOSEN = "by map_and_count, in place of vLLM's recording"
# vLLM's own window holds 3 of the 12 steps: whatever else is counted does not come from it.
WINDOW, INTERVAL, FIRST_WINDOW = 3, 12, 4


def serve_and_compare(tmp_path: Path, *, ranks: int, redundant: int, **options: Any) -> tuple[Any, Any, str]:
    """Serves the prompts, half by each engine, and stops: the answers, the traffic [L, S, E], the log."""
    eplb = {"window_size": WINDOW, "step_interval": INTERVAL, "use_async": options.pop("use_async", True)}
    eplb["num_redundant_experts"] = redundant
    env = {
        "GIMBAL_TRAFFIC_DIR": str(tmp_path / "traffic"),
        "GIMBAL_RECORDING": "compare",
        "GIMBAL_FIRST_WINDOW": str(FIRST_WINDOW),
        "GIMBAL_METHOD": "eplb",
    }
    arguments = [*NO_PREFIX_CACHE, *ORDERLY, "--eplb-config", json.dumps(eplb)]
    log = tmp_path / "server.log"
    with VllmServer(
        MODEL, "full", extra_args=arguments, env=env, log_path=log, stop_grace=40.0, **options
    ) as server:
        answers = send_to_each_engine(Client(server.url), load_prompts(48))
    text = log.read_text()
    found = [tuple(map(int, match)) for match in COMPARED.findall(text)]
    picks = {rank: sum(n for r, _, n in found if r == rank) for rank in range(ranks)}
    print(f"{len(found)} windows compared, picks of each rank {picks}")
    assert CHOSEN in text
    assert all(count > 0 for count in picks.values()), picks
    assert [differing for _, differing, _ in found] == [0] * len(found)
    return answers, total_traffic(tmp_path / "traffic"), text


@pytest.mark.parametrize("use_async", [True, False])
def test_spare_copies_outputs_and_matrix_are_those_of_the_previous_path(
    tmp_path: Path, reference: list[list[int]], use_async: bool
) -> None:
    answers, traffic, _ = serve_and_compare(tmp_path, ranks=2, redundant=4, use_async=use_async)
    check_conservation(answers, traffic)
    assert in_order(answers) == reference


def test_two_groups_of_two_ranks(tmp_path: Path, reference: list[list[int]]) -> None:
    """DP=2, TP=2, EP=4, where vLLM gives each TP rank a slice of its group's tokens (sequence-parallel MoE)."""
    answers, traffic, _ = serve_and_compare(tmp_path, ranks=4, redundant=4, tensor_parallel=2)
    check_conservation(answers, traffic)
    assert in_order(answers) == reference
