"""Algorithm 2 in vLLM's real scheduler: no model runs, every step's output is made up."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3-moe"
BUDGET = 256
BLOCK = 16


def make_config(monkeypatch: pytest.MonkeyPatch, age_limit: str, **kwargs: Any) -> VllmConfig:
    monkeypatch.setenv("GIMBAL_MODE", "dp")
    monkeypatch.setenv("GIMBAL_AGE_LIMIT", age_limit)
    options = {
        "model": str(MODEL),
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 256,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
    }
    config = EngineArgs(**(options | kwargs)).create_engine_config()
    config.cache_config.num_gpu_blocks = 8192
    return config


def make_scheduler(config: VllmConfig) -> Scheduler:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=config.model_config.dtype)
    blocks = config.cache_config.num_gpu_blocks
    kv_cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],  # no model runs
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        log_stats=False,
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


class Requests:
    """Makes requests with prompts that share nothing, unless tokens are given."""

    def __init__(self) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        self._count = 0

    def make(self, length: int, *, tokens: list[int] | None = None, arrival: float | None = None) -> Request:
        self._count += 1
        unique = [self._count % 2000, self._count // 2000] * length
        return Request(
            request_id=str(self._count),
            prompt_token_ids=tokens or unique[:length],
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time() if arrival is None else arrival,
            block_hasher=self._hasher,
        )


def run_step(scheduler: Scheduler) -> set[str]:
    """Schedules one step and finishes it; the ids of the requests that started in it."""
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    running = [scheduler.requests[request] for request in ids]
    done = [request.num_computed_tokens >= request.num_prompt_tokens for request in running]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=[[7] if finished else [] for finished in done],
        ),
    )
    return {request.req_id for request in output.scheduled_new_reqs}


def seconds_until_started(scheduler: Scheduler, limit: float) -> float:
    """A 3,000-token prompt under a stream of 50-token prompts that fills every step; its wait in seconds."""
    requests = Requests()
    started = time.time()
    long = requests.make(3000, arrival=started)
    scheduler.add_request(long)
    while time.time() - started < limit:
        while len(scheduler.waiting) < 1 + BUDGET // 50 + 1:
            scheduler.add_request(requests.make(50))
        if long.request_id in run_step(scheduler):
            return time.time() - started
        time.sleep(0.01)
    return math.inf


@pytest.mark.vllm
def test_long_prompt_starts_when_it_has_aged(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_config(monkeypatch, "5.0"))
    waited = seconds_until_started(scheduler, limit=8.0)
    print(f"3,000-token prompt started after {waited:.2f} s")
    assert 5.0 < waited < 6.0


@pytest.mark.vllm
@pytest.mark.slow
def test_long_prompt_waits_without_ageing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_config(monkeypatch, "off"))
    assert seconds_until_started(scheduler, limit=15.0) == math.inf


@pytest.mark.vllm
def test_row_60_cached_prefix_makes_a_long_prompt_short(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_config(monkeypatch, "5.0", enable_prefix_caching=True))
    requests = Requests()
    shared = list(range(2000))
    scheduler.add_request(requests.make(2000, tokens=shared))
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    cold = requests.make(400)
    warm = requests.make(2010, tokens=[*shared, *range(10)])
    scheduler.add_request(cold)
    scheduler.add_request(warm)
    assert [request.request_id for request in scheduler.waiting] == [warm.request_id, cold.request_id]


@pytest.mark.vllm
def test_row_61_preempted_request_resumes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_config(monkeypatch, "5.0"))
    requests = Requests()
    preempted = requests.make(200)
    scheduler.add_request(preempted)
    run_step(scheduler)
    earlier = requests.make(200, arrival=preempted.arrival_time - 1.0)
    shorter = requests.make(20)
    scheduler.add_request(earlier)
    scheduler.add_request(shorter)
    preempted.status = RequestStatus.PREEMPTED
    preempted.num_computed_tokens = 0
    scheduler.waiting.prepend_request(preempted)
    order = [scheduler.waiting.pop_request() for _ in range(3)]
    assert order == [preempted, shorter, earlier]


@pytest.mark.vllm
def test_passed_over_request_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM puts requests that it cannot start yet back in front; they must not overtake shorter ones."""
    scheduler = make_scheduler(make_config(monkeypatch, "5.0"))
    requests = Requests()
    blocked, short = requests.make(500), requests.make(50)
    scheduler.waiting.add_request(short)
    scheduler.waiting.prepend_requests([blocked])
    assert scheduler.waiting.peek_request() is short
    assert scheduler.waiting.prefill_tokens == 550
    looked_up: list[Request] = []
    scheduler.waiting._uncached_tokens = lambda request: looked_up.append(request) or 1
    popped = [scheduler.waiting.pop_request(), scheduler.waiting.pop_request()]
    scheduler.waiting.prepend_requests(popped)
    assert looked_up == []  # both were only passed over: sizes are kept
    assert scheduler.waiting.prefill_tokens == 550
    scheduler.waiting.pop_request()
    scheduler.waiting.end_pass()
    scheduler.waiting.add_request(short)
    assert looked_up == [short]
    scheduler.waiting.remove_requests([blocked, short])
    assert not scheduler.waiting
    assert scheduler.waiting.prefill_tokens == 0


@pytest.mark.vllm
def test_mode_off_leaves_the_scheduler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIMBAL_MODE", "off")
    config = EngineArgs(model=str(MODEL), dtype="float32", max_model_len=2048).create_engine_config()
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.vllm
def test_priority_policy_stays_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_config(monkeypatch, "5.0", scheduling_policy="priority"))
    assert type(scheduler.waiting).__name__ == "PriorityRequestQueue"
