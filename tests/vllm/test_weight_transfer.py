"""Experts travel by this project's executors: the communicator between processes, what fits, what is refused."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm", reason="vLLM is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "migration"))

import migration_ranks as group
from gimbal_runtime.config import GimbalConfig
from gimbal_runtime.tools.server import VllmServer
from gimbal_runtime.vllm import weight_transfer
from gimbal_runtime.vllm.guard import HookMismatch, logger
from gimbal_runtime.vllm.weight_transfer_choice import choose, make_executor, offer
from gimbal_runtime.vllm.weight_transfer_communicator import ExecutorCommunicator
from gimbal_runtime.vllm.weight_transfer_tensors import collect
from migration_cases import random_slots

from gimbal_kernels.migration import host as compiled

from .conftest import MODEL, Client, load_prompts
from .plugins import write_plugin

needs_host = pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
LAYERS, EXPERTS, SLOTS, RANKS, VICTIM = 4, 6, 12, 3, 1


def maps(count: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(5)
    return [torch.from_numpy(random_slots(rng, LAYERS, EXPERTS, SLOTS)).long() for _ in range(count)]


def everyone(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Rank:
    """One rank with weights as the first map says, an executor and vLLM's door to it."""

    def __init__(self, rank: int, ranks: int, name: str, way: str, timeout: float = 20.0) -> None:
        self.slots = maps(1)[0]
        self.weights = group.fill(self.slots.numpy(), rank, ranks)
        if way == "shared_memory":
            store = dist.FileStore(str(Path(tempfile.gettempdir()) / f"gimbal-store-{name}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        self.executor = group.EXECUTORS[way](self.weights, rank, ranks, name, timeout=timeout)
        nodes = [0] * ranks
        self.door = ExecutorCommunicator(self.weights, self.executor, node_of_rank=nodes, gather=everyone)
        self.errors: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.errors.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)

    def check(self, wanted: torch.Tensor, held: torch.Tensor) -> None:
        """Each rank has the experts that were wanted, where the map in force says, bit for bit."""
        rank, ranks = self.executor.rank, self.executor.ranks
        assert group.experts_in(self.weights, EXPERTS) == group.share_of(held.numpy(), rank, ranks)
        sort = [torch.sort(slots.view(LAYERS, ranks, -1)).values for slots in (wanted, held)]
        assert torch.equal(*sort)

    def rearrange(self, new: torch.Tensor) -> torch.Tensor:
        self.door.rearrange(self.slots, new)
        self.slots = new
        return new

    def rearrange_layer_by_layer(self, new: torch.Tensor) -> torch.Tensor:
        """As vLLM's transfer thread and serving thread do in turn."""
        self.door.plan_ahead(self.slots.clone(), new)
        for layer in range(LAYERS):
            self.door.stage(layer, self.slots[layer], new[layer]).commit()
        self.slots = new
        return new


PATHS = {"synchronous": Rank.rearrange, "asynchronous": Rank.rearrange_layer_by_layer}


def follow(rank: int, ranks: int, name: str, way: str, path: str) -> list[Any]:
    this = Rank(rank, ranks, name, way)
    held = []
    for wanted in maps(5)[1:]:
        held.append(PATHS[path](this, wanted.clone()))
        this.check(wanted, held[-1])
    assert not this.errors, this.errors
    return [slots.tolist() for slots in held]


@needs_host
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", group.EXECUTORS)
def test_the_map_that_vllm_commits_is_where_the_experts_are(way: str, path: str) -> None:
    results = group.run_ranks(RANKS, follow, way, path)
    assert results == [results[0]] * RANKS


def by_vllms_own_code(rank: int, ranks: int, name: str) -> None:
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    this = Rank(rank, ranks, name, "shared_memory")
    tensors = [list(layer.values()) for layer in this.weights.layers]
    buffers = [torch.zeros_like(tensor) for tensor in tensors[0]]
    current = this.slots
    for wanted in maps(4)[1:]:
        rearrange_expert_weights_inplace(current, wanted, tensors, buffers, dist.group.WORLD, this.door)
        this.check(wanted, wanted)
        current = wanted
    with pytest.raises(ValueError, match="no slot of layer 3"):
        this.door._slot([torch.zeros(3)] * len(tensors[0]))


@needs_host
def test_vllms_own_code_moves_experts_through_the_interface() -> None:
    group.run_ranks(RANKS, by_vllms_own_code)


def fail() -> None:
    raise OSError("copy engine")


def stall() -> None:
    time.sleep(5.0)


def faulty(rank: int, ranks: int, name: str, path: str, how: Callable[[], None]) -> tuple[Any, ...]:
    this = Rank(rank, ranks, name, "shared_memory", timeout=2.0)
    push, calls = this.executor._push, iter(range(10**6))

    def faulty_push(*args: Any) -> Any:
        if rank == VICTIM and next(calls) == 1:
            how()
        return push(*args)

    this.executor._push = faulty_push  # type: ignore[method-assign]
    before, wanted = this.slots.clone(), maps(3)[1]
    held = PATHS[path](this, wanted.clone()).clone()
    assert group.experts_in(this.weights, EXPERTS) == group.share_of(held.numpy(), rank, ranks)
    errors = list(this.errors)
    this.executor.timeout = 20.0
    again = maps(3)[2]
    this.check(again, PATHS[path](this, again.clone()))
    return [torch.equal(*rows) for rows in zip(before, held, strict=True)], errors


@needs_host
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", [fail, stall])
def test_rows_42_and_44_a_rank_that_fails_or_stalls_leaves_vllm_with_the_old_map(
    how: Callable[[], None], path: str
) -> None:
    results = group.run_ranks(RANKS, faulty, path, how)
    kept, _ = results[0]
    assert kept == [True] * LAYERS  # it happens in the first layers that are staged
    for other, errors in results:
        assert other == kept
        assert len(errors) == 1
        assert f"migration abandoned at layer 0: rank {VICTIM} " in errors[0]


def broken(rank: int, ranks: int, name: str) -> tuple[bool, list[str]]:
    this = Rank(rank, ranks, name, "process_group")
    if rank == VICTIM:
        this.executor._send = lambda *_: fail()  # type: ignore[attr-defined]
    before = this.slots.clone()
    held = [this.rearrange_layer_by_layer(wanted.clone()) for wanted in maps(4)[1:]]
    return all(torch.equal(slots, before) for slots in held), this.errors


@needs_host
def test_an_executor_that_cannot_be_used_again_says_so_once() -> None:
    for kept, errors in group.run_ranks(RANKS, broken):
        assert kept
        assert len(errors) == 1
        assert f"rank {VICTIM} failed while it moved experts" in errors[0]
        assert errors[0].endswith("until a restart nothing moves")


class Experts(torch.nn.Module):
    """As much of vLLM's RoutedExperts as matters."""

    def __init__(self, slots: int = 4) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.rand(slots, 6, 8), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.rand(slots, 8, 3), requires_grad=False)
        self.expert_map = torch.arange(slots)
        self.global_scale = torch.ones(()).expand(slots)


def make_layer() -> tuple[Any, list[torch.Tensor]]:
    experts = Experts()
    listed = [p.view(p.shape[0], -1) for p in (experts.w13_weight, experts.w2_weight)]
    return SimpleNamespace(routed_experts=experts), listed


@dataclass
class QuantConfig:
    """As vLLM keeps what it derives from scales after loading."""

    g1_alphas: torch.Tensor


def test_row_39_what_is_derived_per_expert_moves_too() -> None:
    layer, listed = make_layer()
    derived = torch.rand(4)
    layer.routed_experts.quant_method = SimpleNamespace()  # a foreign object is not looked into
    layer.routed_experts.quant_config = QuantConfig(derived)
    weights = collect([layer], [listed])
    assert [tensor.data_ptr() for tensor in weights.layers[0].values()] == [
        listed[0].data_ptr(),
        listed[1].data_ptr(),
        derived.data_ptr(),
    ]


def test_a_tensor_that_nobody_knows_is_an_error() -> None:
    layer, listed = make_layer()
    layer.routed_experts.register_buffer("mystery", torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"layer 0: mystery \[4, 2\] has a row for each of the 4 slots"):
        collect([layer], [listed])


def test_a_derived_tensor_without_contiguous_experts_is_an_error() -> None:
    layer, listed = make_layer()
    layer.routed_experts.register_buffer("w13_scale", torch.zeros(2, 4).t())
    with pytest.raises(ValueError, match="contiguous in the expert dimension"):
        collect([layer], [listed])


def offers(count: int = 2, **changes: Any) -> list[Any]:
    return [replace(offer("auto", 30.0, "cpu", None), **changes) for _ in range(count)]


def test_ways_are_chosen_by_what_all_ranks_have() -> None:
    assert choose(offers(setting="stock")) == ("stock", None)
    assert choose(offers(setting="process_group")) == ("process_group", None)
    assert choose(offers(setting="stock", unfit="unknown tensor")) == ("stock", None)
    assert choose([*offers(1), *offers(1, unfit="unknown tensor")]) == ("stock", "rank 1: unknown tensor")
    assert choose(offers(device="cuda")) == ("stock", None)
    assert choose([*offers(1), *offers(1, machine="elsewhere")]) == ("stock", None)
    if compiled.status() == "ready":
        assert choose(offers()) == ("shared_memory", None)
        assert choose(offers(setting="shared_memory")) == ("shared_memory", None)


@pytest.mark.parametrize(
    "changes", [{"setting": "peer_memory"}, {"setting": "shared_memory", "device": "cuda"}]
)
def test_a_way_that_the_server_cannot_have_is_an_error(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"migration: .*valid here: stock, process_group"):
        choose(offers(**changes))


def test_ranks_must_have_the_same_settings() -> None:
    with pytest.raises(ValueError, match=r"auto, 30.0 on EP rank 0, auto, 5.0 on rank 1; valid: the same"):
        choose([*offers(1), *offers(1, timeout=5.0)])


def without_a_store(rank: int, ranks: int, name: str) -> str:
    files = dist.FileStore(str(Path(tempfile.gettempdir()) / f"gimbal-store-{name}"), ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=ranks)
    dist.TCPStore = lambda *_, **__: fail()  # type: ignore[misc, assignment]
    with pytest.raises(RuntimeError, match="rank 0 cannot serve a store: OSError: copy engine"):
        make_executor(
            "process_group", group.fill([[0, 1]], rank, ranks), offers(), dist.group.WORLD, everyone
        )
    return "told"


def test_a_store_that_cannot_be_served_is_told_on_all_ranks() -> None:
    assert group.run_ranks(2, without_a_store) == ["told"] * 2


def loaded(rank: int, ranks: int, name: str, mode: str, spoilt: bool) -> tuple[Any, ...]:
    store = dist.FileStore(str(Path(tempfile.gettempdir()) / f"gimbal-store-{name}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    layer, listed = make_layer()
    if spoilt and rank == 1:
        layer.routed_experts.register_buffer("mystery", torch.zeros(4))
    model = SimpleNamespace(moe_layers=[layer], expert_weights=[listed])
    weight_transfer.gather = everyone  # type: ignore[assignment]
    weight_transfer.expect = lambda *_: lambda: SimpleNamespace(cpu_group=dist.group.WORLD)  # type: ignore[assignment]
    messages: list[str] = []
    weight_transfer.warn_once = messages.append  # type: ignore[assignment]
    state = SimpleNamespace(model=model, model_name="tiny")
    found = weight_transfer.communicator_for(state, GimbalConfig(mode=mode))
    try:
        weight_transfer.communicator_for(state, GimbalConfig(mode=mode, strict=True))
        strict = "nothing"
    except RuntimeError as error:
        strict = str(error)
    return type(found).__name__, messages, strict


@needs_host
@pytest.mark.parametrize(("mode", "kind"), [("ep", "ExecutorCommunicator"), ("off", "NoneType")])
def test_all_ranks_get_the_communicator_that_the_mode_asks_for(mode: str, kind: str) -> None:
    assert group.run_ranks(2, loaded, mode, False) == [(kind, [], "nothing")] * 2


@needs_host
def test_a_model_that_does_not_fit_on_one_rank_stays_with_vllm_on_all() -> None:
    for kind, messages, strict in group.run_ranks(2, loaded, "ep", True):
        assert kind == "NoneType"
        assert len(messages) == 1
        assert "to vLLM: rank 1: ValueError: layer 0: mystery [4]" in messages[0] == strict


FAULTY_TRANSFER = """
    import time

    def register():
        # Rank 1's second migration fails, its fourth stalls for longer than the others wait.
        from gimbal_kernels.migration.executors import SharedMemoryExecutor
        stock, done = SharedMemoryExecutor._push, set()

        def push(self, wave, send, spend):
            if self.rank == 1 and self.migration in (2, 4) and self.migration not in done:
                done.add(self.migration)
                if self.migration == 2:
                    raise OSError("made up")
                time.sleep(8)
            return stock(self, wave, send, spend)

        SharedMemoryExecutor._push = push
"""
FAILED, STALLED = "rank 1 failed while it moved experts", "rank 1 did not respond in time"


@pytest.fixture(scope="module", params=["async", pytest.param("sync", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two engines whose experts are rearranged every 8 steps, some of the times with a fault on rank 1."""
    folder = tmp_path_factory.mktemp("weight-transfer")
    plugin = write_plugin(folder / "plugin", "faulty_transfer", FAULTY_TRANSFER)
    eplb = {"window_size": 8, "step_interval": 8, "use_async": request.param == "async"}
    env = {"GIMBAL_METHOD": "eplb", "GIMBAL_MIGRATION": "shared_memory", "GIMBAL_MIGRATION_TIMEOUT": "3"}
    with VllmServer(
        MODEL,
        "ep",
        env=env | {"GIMBAL_STRICT": "1", "PYTHONPATH": str(plugin)},
        extra_args=["--eplb-config", json.dumps(eplb)],
        log_path=folder / "server.log",
    ) as running:
        yield running


def rearrangements(client: Client) -> float:
    return client.metrics().get("gimbal_rearrangements_total", 0.0)


@needs_host
@pytest.mark.vllm
@pytest.mark.slow
def test_twenty_rearrangements_under_load_change_no_answer(
    server: VllmServer, reference: list[list[int]]
) -> None:
    client, prompts = Client(server.url), load_prompts(48)
    rounds, end = 0, time.monotonic() + 120
    abandoned = 0
    while rearrangements(client) - abandoned < 20 or rounds < 3:
        assert time.monotonic() < end
        answers = client.complete_all(prompts)
        assert [answer["tokens"] for answer in answers] == reference
        rounds += 1
        log = server.log_path.read_text()
        abandoned = log.count("Gimbal, rank 0: experts stay where they are")
    assert "by shared_memory; staging on each rank: " in log
    assert FAILED in log
    assert STALLED in log
    assert server.healthy()


def test_a_vllm_that_looks_different_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.eplb import async_worker, eplb_state

    monkeypatch.setattr(async_worker, "transfer_layer", lambda layer: None)
    before = dict(vars(eplb_state)), vars(eplb_state.EplbState)["add_model"]
    with pytest.raises(HookMismatch, match="transfer_layer takes"):
        weight_transfer._install()
    assert (dict(vars(eplb_state)), vars(eplb_state.EplbState)["add_model"]) == before
