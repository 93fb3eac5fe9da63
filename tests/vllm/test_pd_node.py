"""Decode-side execution and a node's statistics on vLLM's real scheduler; no model runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from gimbal_runtime.node_report import Computed, NodeReport, Prefill
from gimbal_runtime.vllm import chunk_limit, node_stats
from gimbal_runtime.vllm.guard import HookMismatch
from gimbal_runtime.vllm.iteration_recorder import IterationRecorder
from gimbal_runtime.vllm.pd_connector import SharedFolderConnector
from safetensors.torch import load_file
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata, ReqMeta
from vllm.v1.core.sched.scheduler import Scheduler

from .test_scheduler import BLOCK, Requests, make_config, make_scheduler, run_step

pytestmark = pytest.mark.vllm


def named(request: Any, name: str, max_tokens: int = 1, **arguments: Any) -> Any:
    """The request with a router's extra arguments."""
    request.sampling_params.extra_args = {"gimbal_request": name} | arguments
    request.sampling_params.max_tokens = request.max_tokens = max_tokens
    return request


def scheduled(scheduler: Any, request: Any, steps: int) -> list[int]:
    """Tokens of `request` in each of the next steps."""
    taken = []
    for _ in range(steps):
        before = request.num_computed_tokens
        run_step(scheduler)
        taken.append(request.num_computed_tokens - before)
    return taken


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    return make_scheduler(make_config(monkeypatch, "5"))


@pytest.mark.parametrize("running", [False, True], ids=["alone", "beside a decoding request"])
def test_a_deflected_prompt_is_computed_in_its_chunks(scheduler: Any, running: bool) -> None:
    requests = Requests()
    other = named(requests.make(40), "other", max_tokens=50)
    if running:
        scheduler.add_request(other)
        run_step(scheduler)
    deflected = named(requests.make(201), "d", gimbal_chunks=[100, 60, 41])
    scheduler.add_request(deflected)
    before = other.num_computed_tokens
    assert scheduled(scheduler, deflected, 3) == [100, 60, 41]
    assert deflected.is_finished()
    assert other.num_computed_tokens - before == (3 if running else 0)  # a token in every step


@pytest.mark.parametrize("chunks", [None, [], "100", [100, -1], [50.0], [True], {"a": 1}])
def test_without_a_valid_schedule_chunks_are_vllms(scheduler: Any, chunks: Any) -> None:
    request = named(Requests().make(201), "d", gimbal_chunks=chunks)
    scheduler.add_request(request)
    assert scheduled(scheduler, request, 1) == [201]


def test_the_budget_still_holds_and_the_schedule_is_found_again(scheduler: Any) -> None:
    request = named(Requests().make(400), "d", gimbal_chunks=[300, 100])  # the budget is 256
    scheduler.add_request(request)
    assert scheduled(scheduler, request, 3) == [256, 44, 100]


def test_a_failure_of_ours_leaves_vllms_chunks(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("no")

    monkeypatch.setattr(chunk_limit, "next_chunk", fail)
    request = named(Requests().make(201), "d", gimbal_chunks=[100, 101])
    scheduler.add_request(request)
    assert scheduled(scheduler, request, 1) == [201]


def test_a_node_that_cannot_limit_chunks_says_so(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_stats.report(scheduler, IterationRecorder()).limits_chunks
    monkeypatch.setattr(chunk_limit, "_fits", lambda: False)
    assert not node_stats.report(scheduler, IterationRecorder()).limits_chunks
    monkeypatch.undo()
    scheduler.need_mamba_block_aligned_split = True
    assert not node_stats.report(scheduler, IterationRecorder()).limits_chunks


def test_hooks_that_do_not_fit_change_nothing(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Scheduler.schedule
    with monkeypatch.context() as other_vllm:
        other_vllm.delattr(Scheduler, chunk_limit.METHOD)
        chunk_limit._fits.cache_clear()
        with pytest.raises(HookMismatch, match="_reserve_prefill_lookahead"):
            chunk_limit._install()
        assert not node_stats.report(scheduler, IterationRecorder()).limits_chunks
        other_vllm.delattr("vllm.v1.engine.core_client.AsyncMPClient.call_utility_all_async")
        with pytest.raises(HookMismatch, match="call_utility_all_async"):
            node_stats._install()
        assert Scheduler.schedule is stock
    chunk_limit._fits.cache_clear()


def test_the_report_is_the_schedulers_state(scheduler: Any) -> None:
    requests = Requests()
    free = node_stats.report(scheduler, IterationRecorder()).kv_free
    decoding = named(requests.make(40), "decoding", max_tokens=9, gimbal_tbt_slo=0.25)
    scheduler.add_request(decoding)
    run_step(scheduler)
    scheduler.add_request(
        named(requests.make(300), "deflected", gimbal_chunks=[100, 200], gimbal_tbt_slo=0.5)
    )
    run_step(scheduler)
    scheduler.add_request(requests.make(70))
    report = node_stats.report(scheduler, IterationRecorder())
    assert set(report.prefills) == {Prefill("deflected", 200, 100), Prefill("", 70, 0)}
    assert report.resident == {"decoding", "deflected"}
    assert (report.n_decode, report.kv_tokens) == (1, decoding.num_computed_tokens)
    assert (report.tbt_slo, report.deflected) == (0.25, ("deflected",))
    # Blocks of 40 + 2 and of 100 tokens are taken, and 70 tokens are promised.
    assert free is not None
    assert report.kv_free == free - 3 * BLOCK - 7 * BLOCK - 70
    assert report.kv_bytes_per_token == 2 * 2 * 32 * 4  # keys and values, heads, their size, float32
    assert NodeReport.from_wire(json.loads(json.dumps(report.to_wire()))) == report


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(scheduler: Any, **tokens: int) -> Any:
    """A scheduler output; vLLM has counted its tokens as computed already."""
    for name, count in tokens.items():
        scheduler.requests[name].num_computed_tokens += count
    return SimpleNamespace(num_scheduled_tokens=tokens, finished_req_ids=set(), has_sync_kv_loads=False)


def fake_scheduler(**prompts: int) -> Any:
    requests = {
        name: SimpleNamespace(
            request_id=name,
            num_prompt_tokens=length,
            num_tokens=length,
            num_computed_tokens=0,
            arrival_time=time.time(),
            sampling_params=SimpleNamespace(extra_args={"gimbal_request": name}),
        )
        for name, length in prompts.items()
    }
    return SimpleNamespace(requests=requests)


def test_iterations_are_timed_from_end_to_end() -> None:
    clock, taken = Clock(), []
    recorder = IterationRecorder(clock)
    recorder._fitter = SimpleNamespace(add=taken.append)  # type: ignore[assignment]
    scheduler = fake_scheduler(a=150, b=10)
    first = batch(scheduler, a=100)
    recorder.scheduled(scheduler, first, 1.0)
    clock.now = 3.0
    recorder.ended(first, idle=False)
    second = batch(scheduler, a=50, b=10)
    recorder.scheduled(scheduler, second, 3.5)  # 0.5 s between two steps belong to the second
    clock.now = 4.0
    recorder.ended(second, idle=False)
    third = batch(scheduler, a=1, b=1)
    recorder.scheduled(scheduler, third, 3.9)  # overlaps: scheduled before the second ended
    clock.now = 4.5
    recorder.ended(third, idle=True)
    fourth = batch(scheduler, a=1)
    recorder.scheduled(scheduler, fourth, 100.0)  # idle in between
    clock.now = 101.0
    recorder.ended(fourth, idle=True)
    assert [sample.seconds for sample in taken] == [2.0, 1.0, 0.5, 1.0]
    assert taken[0][:3] == (0, 0, ((100, 0),))
    assert taken[1][:3] == (0, 0, ((50, 100), (10, 0)))
    assert taken[2][:3] == (2, 160, ())
    [a, b] = recorder.computed
    assert (a.request, a.seconds, b.request, b.seconds) == ("a", 3.0, "b", 0.5)
    assert recorder.steps == 4


def test_iterations_that_load_a_cache_are_not_measured() -> None:
    clock = Clock()
    recorder, scheduler = IterationRecorder(clock), fake_scheduler(a=150)
    output = batch(scheduler, a=150)
    output.has_sync_kv_loads = True
    recorder.scheduled(scheduler, output, 0.0)
    clock.now = 1.0
    recorder.ended(output, idle=True)
    assert (recorder.steps, recorder.model()) == (0, None)
    assert [entry.request for entry in recorder.computed] == ["a"]


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    code = """
from gimbal_runtime.vllm import register
register()
from types import SimpleNamespace
from gimbal_runtime.vllm import node_stats
from vllm.entrypoints.launchers import app
print("wrapped:", app.register_api_routers.__module__)
for config in ({}, {"gimbal": {"node_statistics": True}}):
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=config))
    print("recorder:", node_stats._recorder(scheduler) is not None, "route:", node_stats._wanted(config))
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIMBAL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"GIMBAL_STRICT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()[-3:]
    assert lines[0] == "wrapped: gimbal_runtime.vllm.node_stats"
    assert lines[1:] == ["recorder: False route: False", "recorder: True route: True"]


def test_the_route_answers_for_every_engine_or_says_why_not() -> None:
    async def answers(*reports: Any) -> tuple[int, dict[str, Any]]:
        async def call(name: str) -> list[Any]:
            assert name == node_stats.UTILITY
            return list(reports)

        return await node_stats.answer(
            SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=call))
        )

    assert asyncio.run(answers({"a": 1}, {"b": 2})) == (200, {"engines": [{"a": 1}, {"b": 2}]})
    status, body = asyncio.run(answers({"a": 1}, None))
    assert status == 503
    assert "switched" in body["error"]


def make_connector(monkeypatch: pytest.MonkeyPatch, role: str, folder: Path) -> SharedFolderConnector:
    config = make_config(monkeypatch, "5")
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="SharedFolderConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )
    scheduler = make_scheduler(make_config(monkeypatch, "5"))
    return SharedFolderConnector(config, KVConnectorRole.SCHEDULER, scheduler.kv_cache_config)


def test_only_what_a_prefill_node_completed_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    consumer = make_connector(monkeypatch, "kv_consumer", tmp_path)
    producer = make_connector(monkeypatch, "kv_producer", tmp_path)
    block = consumer._block_size
    request = named(Requests().make(3 * block + 1), "a")
    assert consumer.get_num_new_matched_tokens(request, 0) == (0, False)
    stored = torch.tensor(request.prompt_token_ids[: 3 * block])
    producer._generate_filename_debug("layer", stored, [])  # makes the folder, as a stored layer does
    assert consumer.get_num_new_matched_tokens(request, 0) == (0, False)  # not told that it is complete
    named(request, "a", gimbal_transferred=1)
    assert consumer.get_num_new_matched_tokens(request, 0) == (3 * block, False)
    assert consumer.get_num_new_matched_tokens(request, block) == (2 * block, False)
    # Never less than nothing, also where the prefix cache has as much.
    assert consumer.get_num_new_matched_tokens(request, 3 * block) == (0, False)
    assert producer.get_num_new_matched_tokens(request, 0) == (0, False)
    assert (
        consumer.get_num_new_matched_tokens(named(Requests().make(1), "b", gimbal_transferred=1), 0)[0] == 0
    )


def test_equal_prompts_of_one_batch_are_stored_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    producer = make_connector(monkeypatch, "kv_producer", tmp_path)
    block = producer._block_size
    kv = torch.arange(4 * block * 2, dtype=torch.float32).reshape(4, 1, block, 2)
    equal = [ReqMeta.make_meta(list(range(block + 1)), [1, 2], block, True, []) for _ in range(2)]
    producer.bind_connector_metadata(ExampleConnectorMetadata(requests=equal))
    producer.save_kv_layer("layer", kv, None)
    [stored] = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert stored.name == "layer.safetensors"
    assert torch.equal(load_file(stored)["kv_cache"], kv[1].transpose(0, 1))


def test_nodes_with_the_same_process_id_write_files_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = set()
    for _ in range(2):
        producer = make_connector(monkeypatch, "kv_producer", tmp_path)
        producer._written = {}
        names.add(producer._generate_filename_debug("layer", torch.arange(16), []))
    assert len(names) == 2


def test_prefill_nodes_store_and_decode_nodes_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for role, stores in (("kv_producer", 2), ("kv_consumer", 0)):
        connector = make_connector(monkeypatch, role, tmp_path)
        new = [
            SimpleNamespace(
                req_id=name, prompt_token_ids=list(range(100)), mm_features=[], block_ids=([1, 2],)
            )
            for name in "ab"
        ]
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set())
        for _ in range(
            2
        ):  # what is there already is stored again: it may be half of what a killed server wrote
            output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
            meta = connector.build_connector_meta(output)
            assert [entry.is_store for entry in meta.requests] == [True] * stores


def test_a_stored_layer_appears_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    producer = make_connector(monkeypatch, "kv_producer", tmp_path)
    block = producer._block_size
    entry = ReqMeta.make_meta(list(range(2 * block + 1)), [1, 2], block, True, [])
    monkeypatch.setattr(producer, "_get_connector_metadata", lambda: _metadata(entry))
    layer = torch.arange(4 * block * 6, dtype=torch.float32).reshape(4, 2, block, 3)
    producer.save_kv_layer("layer", layer, None)
    [path] = tmp_path.rglob("*.safetensors*")
    assert path.name == "layer.safetensors"

    def killed(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", killed)
    before = path.read_bytes()
    with pytest.raises(OSError, match="no space"):
        producer.save_kv_layer("layer", layer + 1, None)
    assert path.read_bytes() == before


def _metadata(entry: ReqMeta) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata

    return ExampleConnectorMetadata(requests=[entry])


def test_completed_prompts_are_named() -> None:
    assert Computed("a", 1.0, 2.0)._asdict() == {"request": "a", "seconds": 1.0, "since_arrival": 2.0}
