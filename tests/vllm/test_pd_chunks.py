"""A deflected prompt's planned chunks against the batch beside them, on vLLM's real scheduler; no model runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.iteration_model import FitQuality, IterationModel
from gimbal_runtime.node_report import NodeReport
from gimbal_runtime.vllm import node_stats
from gimbal_runtime.vllm.iteration_recorder import IterationRecorder

from .test_pd_node import named, scheduled
from .test_scheduler import Requests, make_config, make_scheduler, run_step

pytestmark = pytest.mark.vllm
PER_TOKEN = IterationModel(0.01, 0.001, 0.0, 0.0001, 0.0)
"""10 ms and 0.1 ms per prompt token, and 1 ms per decoding request."""


class Recorder(IterationRecorder):
    """Has measured nothing, and knows the model."""

    def model(self) -> IterationModel | None:
        return PER_TOKEN


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = make_scheduler(make_config(monkeypatch, "5", max_num_batched_tokens=1024))
    made.gimbal_recorder = Recorder()
    return made


def decode(scheduler: Any, requests: Requests, count: int = 1, **arguments: Any) -> None:
    """`count` requests that decode from now on."""
    for place in range(count):
        scheduler.add_request(named(requests.make(40), f"o{place}", max_tokens=99, **arguments))
    run_step(scheduler)


def deflect(scheduler: Any, requests: Requests, steps: int, length: int = 900, **arguments: Any) -> list[int]:
    """Tokens that a deflected prompt, planned as chunks of 600 and 300, is given in each of the next steps."""
    request = named(requests.make(length), "d", gimbal_chunks=[600, 300], **arguments)
    scheduler.add_request(request)
    return scheduled(scheduler, request, steps)


@pytest.mark.parametrize(
    ("limit", "taken"),
    [
        (0.0711, [600, 300]),  # 11 ms and 60 ms for the tokens
        (0.0709, [512, 88, 300]),
        (0.04, [256, 256, 88, 256, 44]),
        (0.0175, [64] * 9 + [24, 64]),  # 6.5 ms for the tokens: finer than any plan
        (0.0127, [16] * 3),
        (0.001, [128, 128, 128, 128, 88, 128, 128, 44]),  # too late whatever is taken: it has to end
    ],
)
def test_a_chunk_that_would_be_late_by_now_is_taken_smaller(
    scheduler: Any, limit: float, taken: list[int]
) -> None:
    requests = Requests()
    decode(scheduler, requests, gimbal_tbt_slo=limit)
    assert deflect(scheduler, requests, len(taken)) == taken


def test_the_batch_of_the_moment_counts_and_not_that_of_the_plan(scheduler: Any) -> None:
    requests = Requests()
    decode(scheduler, requests, gimbal_tbt_slo=0.0711)
    request = named(requests.make(900), "d", gimbal_chunks=[100, 200, 600])
    scheduler.add_request(request)
    assert scheduled(scheduler, request, 1) == [100]
    for place in range(10):  # their prompts join the next iteration behind the chunk
        scheduler.add_request(named(requests.make(2), f"late{place}", max_tokens=99))
    assert scheduled(scheduler, request, 3) == [200, 256, 344]  # 10 ms more for those that decode now


def test_the_strictest_limit_and_its_share_hold(scheduler: Any) -> None:
    requests = Requests()
    decode(scheduler, requests, gimbal_tbt_slo=0.0711)
    decode(scheduler, requests, gimbal_tbt_slo=0.5)
    assert deflect(scheduler, requests, 1, gimbal_beta=0.5) == [128]  # 36 ms, 12 of them without a chunk


@pytest.mark.parametrize(("limit", "taken"), [(0.0711, 600), (0.0709, 512)])
def test_a_model_that_is_off_leaves_room_for_its_error(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, limit: float, taken: int
) -> None:
    off = replace(PER_TOKEN, quality=FitQuality(error=0.25, iterations=100.0, prefills=20.0))
    monkeypatch.setattr(Recorder, "model", lambda self: off)
    requests = Requests()
    decode(scheduler, requests, gimbal_tbt_slo=1.25 * limit)
    assert deflect(scheduler, requests, 1) == [taken]  # 11 ms and 60 for the tokens planned


def test_prompts_beside_it_are_part_of_the_iteration(scheduler: Any) -> None:
    requests = Requests()
    decode(scheduler, requests, gimbal_tbt_slo=0.0711)
    other = named(requests.make(300), "other", gimbal_chunks=[100, 200])
    scheduler.add_request(other)
    assert scheduled(scheduler, other, 1) == [100]
    assert deflect(scheduler, requests, 1) == [256]  # 11 ms, and 20 for the 200 tokens that are left there


@pytest.mark.parametrize("limit", [None, 0, -1, True, "0.01", float("nan"), float("inf"), 10**400])
def test_without_a_limit_or_a_model_the_plan_stands(scheduler: Any, limit: Any) -> None:
    requests = Requests()
    decode(scheduler, requests, gimbal_tbt_slo=limit)
    report = node_stats.report(scheduler, Recorder())
    assert report.tbt_slo is None
    assert NodeReport.from_wire(json.loads(json.dumps(report.to_wire(), allow_nan=False))) == report
    assert deflect(scheduler, requests, 2) == [600, 300]
    decode(scheduler, requests, gimbal_tbt_slo=0.01)
    scheduler.gimbal_recorder = None
    assert deflect(scheduler, requests, 2) == [600, 300]


def test_vllm_has_the_last_word_on_a_prompts_end_and_the_prompt_ends(scheduler: Any) -> None:
    scheduler.num_prefill_lookahead = 3  # a drafter that looks at the three tokens behind a chunk
    request = named(Requests().make(201), "d", gimbal_chunks=[100, 100, 1])
    scheduler.add_request(request)
    assert scheduled(scheduler, request, 3) == [100, 98, 3]
    assert request.is_finished()
