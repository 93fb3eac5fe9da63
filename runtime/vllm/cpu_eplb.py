"""Platform layer, second half: expert load balancing on vLLM's CPU platform.

vLLM 0.32 refuses it there: the configuration check allows GPUs only, routing records nothing, the model runner
builds no balancer state, and the asynchronous worker drives accelerator streams. On the CPU every operation has
happened when its call returns, so streams and events shrink to ordering between two threads, which vLLM's own
locks already give.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from .guard import Hook, expect, logger, patch

EPLB = "vllm.distributed.eplb"


class HostEvent:
    """The part of `torch.Event` that the balancer uses, where every operation is complete on return."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded = time.perf_counter()

    def record(self, *_: Any) -> None:
        self.recorded = time.perf_counter()

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.recorded - self.recorded) * 1e3  # milliseconds, as torch.Event


class HostStream:
    """Stands in for an accelerator stream that is always drained."""

    device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass


class _PlatformWithBalancer:
    """vLLM's platform as its parallel configuration sees it: expert load balancing is allowed."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


def _install_permission() -> None:
    # `is_cuda_alike` is asked in that module by the balancer's check alone.
    expect("vllm.config.parallel", "current_platform.is_cuda_alike")
    platform = expect("vllm.config.parallel", "current_platform")
    patch("vllm.config.parallel", "current_platform", _PlatformWithBalancer(platform))


def map_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """vLLM's recording contract: physical slots [T, K] for logical ids [T, K], and their load [P] when enabled.

    The replica of row t is t mod the replica count, as vLLM's GPU kernel picks for the counts 2, 4 and 8.
    """
    rows = topk_ids.shape[0]
    ids = topk_ids.to(torch.long)
    valid = (ids >= 0) & (ids < logical_replica_count.shape[0])
    ids = torch.where(valid, ids, 0)
    replica = torch.arange(rows).unsqueeze(1) % logical_replica_count[ids].clamp_min(1)
    slots = torch.where(valid, logical_to_physical_map[ids, replica], -1)
    counted = (slots >= 0) & (slots < expert_load_view.shape[0]) & record_enabled
    if num_unpadded_tokens is not None:
        counted &= (torch.arange(rows) < num_unpadded_tokens).unsqueeze(1)
    expert_load_view.scatter_add_(
        0,
        slots.clamp(0, expert_load_view.shape[0] - 1).flatten(),
        counted.flatten().to(expert_load_view.dtype),
    )
    return slots.to(topk_ids.dtype)


def _install_recording() -> None:
    parameters = ["topk_ids", "expert_load_view", "logical_to_physical_map", "logical_replica_count"]
    parameters += ["record_enabled", "num_unpadded_tokens"]
    module = "vllm.model_executor.layers.fused_moe.router.base_router"
    expect(module, "eplb_map_to_physical_and_record", parameters)
    patch(module, "eplb_map_to_physical_and_record", map_and_record)


def _install_runner() -> None:
    runner = expect("vllm.v1.worker.cpu_model_runner", "CPUModelRunner")
    stock = expect("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model", ["self"])
    state_class = expect(f"{EPLB}.eplb_state", "EplbState")
    expect(f"{EPLB}.eplb_state", "EplbState.add_model", ["self", "model", "model_config"])
    find_moe = expect("vllm.model_executor.models.interfaces", "get_mixture_of_experts_model", ["model"])

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        if self.parallel_config.enable_eplb:
            # vLLM's CPU worker put a placeholder there that cannot measure time.
            torch.Event = HostEvent  # type: ignore[misc, assignment]
            self._moe_model = find_moe(self.model)
            if self._moe_model is None:
                raise ValueError(
                    f"enable_eplb: {type(self.model).__name__} has no MoE layers; valid: a MoE model"
                )
            self.eplb_state = state_class(self.parallel_config, self.device)
            self.eplb_state.add_model(self._moe_model, self.model_config)
            if self.eplb_state.is_async:
                self.eplb_state.start_async_loop()
        return result

    runner.load_model = load_model


@contextlib.contextmanager
def _no_stream(_stream: Any) -> Iterator[None]:
    yield


def _start_async_worker(state: Any, is_profile: bool = False) -> threading.Thread:
    transfer = expect(f"{EPLB}.async_worker", "transfer_run_periodically", ["state", "stream"])

    def run() -> None:
        try:
            transfer(state=state, stream=HostStream(), is_profile=is_profile)
        except Exception:
            logger.exception("the asynchronous expert transfer stopped")

    thread = threading.Thread(target=run, name="eplb-transfer", daemon=True)
    thread.start()
    return thread


def _install_runtime() -> None:
    names = ("async_worker", "rebalance_execute", "eplb_communicator", "eplb_utils")
    for name in names:
        expect(f"{EPLB}.{name}", "device_stream", ["stream"])
    expect(f"{EPLB}.async_worker", "transfer_run_periodically", ["state", "stream"])
    expect(f"{EPLB}.eplb_state", "start_async_worker", ["state"])
    expect(f"{EPLB}.eplb_state", "create_eplb_communicator", ["group_coordinator", "backend"])
    two_sided = expect(f"{EPLB}.eplb_communicator", "TorchDistNcclEplbCommunicator")
    expect(f"{EPLB}.eplb_communicator", "TorchDistNcclEplbCommunicator.__init__", ["self", "ep_group"])

    def create(group_coordinator: Any, *_: Any, **__: Any) -> Any:
        # Batched send and receive over gloo: tensors are in host memory already, so nothing is staged.
        communicator = two_sided(ep_group=group_coordinator.cpu_group)
        communicator.set_stream = lambda _stream: None
        return communicator

    for name in names:
        patch(f"{EPLB}.{name}", "device_stream", _no_stream)
    patch(f"{EPLB}.eplb_state", "create_eplb_communicator", create)
    patch(f"{EPLB}.eplb_state", "start_async_worker", _start_async_worker)


HOOKS = (
    Hook("cpu-eplb-permission", _install_permission),
    Hook("cpu-eplb-recording", _install_recording),
    Hook("cpu-eplb-runner", _install_runner),
    Hook("cpu-eplb-runtime", _install_runtime),
)
