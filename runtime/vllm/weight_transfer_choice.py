"""Which executor carries experts between the ranks of a server: the same answer on every rank."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gimbal_kernels.migration import ExpertWeights, host
from gimbal_kernels.migration.executors import (
    Executor,
    PeerMemoryExecutor,
    ProcessGroupExecutor,
    SharedMemoryExecutor,
    peer_memory,
)

START_TIMEOUT = 60.0  # seconds; the ranks come from the same collective


@dataclass(frozen=True)
class Offer:
    """What one rank has: every rank sees everybody's.

    setting, timeout: as configured.
    device: type of the device that the weights are on.
    machine: ranks with the same one can map each other's memory.
    unfit: why this rank cannot have its experts moved by an executor, or None.
    name: a name that no other rank has; rank 0's becomes the group's.
    """

    setting: str
    timeout: float
    device: str
    machine: str
    unfit: str | None
    name: str


def offer(setting: str, timeout: float, device: str, unfit: str | None) -> Offer:
    """This rank's."""
    return Offer(setting, timeout, device, _machine(), unfit, uuid.uuid4().hex[:12])


def choose(offers: Sequence[Offer]) -> tuple[str, str | None]:
    """The way that all ranks take, and why it is not the one that was asked for, if so.

    `auto` does not choose what has never run on the hardware in question: on GPUs vLLM's own way stays.

    Raises:
        ValueError: ranks with other settings, or a way that this server cannot have.
    """
    first = offers[0]
    for rank, other in enumerate(offers):
        if (other.setting, other.timeout) != (first.setting, first.timeout):
            raise ValueError(
                f"migration, migration_timeout: {first.setting}, {first.timeout} on EP rank 0, "
                f"{other.setting}, {other.timeout} on rank {rank}; valid: the same on all"
            )
    if first.setting == "stock":
        return "stock", None
    for rank, other in enumerate(offers):
        if other.unfit is not None:
            return "stock", f"rank {rank}: {other.unfit}"
    devices = sorted({other.device for other in offers})
    possible = ["stock", "process_group"]
    if len({other.machine for other in offers}) == 1 and len(devices) == 1 and host.status() == "ready":
        possible += ["shared_memory"] if devices == ["cpu"] else []
        possible += ["peer_memory"] if devices == ["cuda"] and peer_memory.status() == "ready" else []
    if first.setting == "auto":
        return ("shared_memory" if "shared_memory" in possible else "stock"), None
    if first.setting not in possible:
        raise ValueError(
            f"migration: {first.setting}, with weights on {', '.join(devices)} and ranks on "
            f"{len({other.machine for other in offers})} machines; valid here: {', '.join(possible)}, auto"
        )
    return first.setting, None


def make_executor(
    way: str, weights: ExpertWeights, offers: Sequence[Offer], group: Any, gather: Any
) -> Executor:
    """A collective.

    Args:
        way: as `choose` says, not "stock".
        group: host process group of all ranks; only its members' ranks are used.
        gather: gives every rank's value, in rank order.

    Raises:
        what the executor raises; not necessarily on all ranks.
    """
    rank, name, timeout = dist.get_rank(group), f"serve-{offers[0].name}", offers[0].timeout
    if way == "process_group":
        return _over_process_group(weights, group, gather, timeout)
    kind = SharedMemoryExecutor if way == "shared_memory" else PeerMemoryExecutor
    return kind(
        weights, rank=rank, ranks=len(offers), name=name, timeout=timeout, start_timeout=START_TIMEOUT
    )


def _over_process_group(weights: ExpertWeights, group: Any, gather: Any, timeout: float) -> Executor:
    """A group and a store that nothing else uses: after a failure neither is fit for use."""
    from vllm.utils.network_utils import get_ip

    wait = timedelta(seconds=max(timeout, START_TIMEOUT))
    store: Any = None
    served: Any = None
    if dist.get_rank(group) == 0:
        try:
            address = get_ip()
            store = dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False, timeout=wait)
            served = (address, store.port)
        except Exception as error:  # the others wait in the collective below
            served = f"{type(error).__name__}: {error}"
    found = gather(served)[0]
    if isinstance(found, str):
        raise RuntimeError(f"rank 0 cannot serve a store: {found}")
    address, port = found
    if store is None:
        store = dist.TCPStore(address, port, None, is_master=False, wait_for_workers=False, timeout=wait)
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        backend="gloo" if weights.device.type == "cpu" else "nccl",
        timeout=wait,
        use_local_synchronization=True,
    )
    return ProcessGroupExecutor(weights, group=own, store=store, timeout=timeout, start_timeout=START_TIMEOUT)


def _machine() -> str:
    """Processes for which it is equal see the same shared memory."""
    boot, memory = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    started = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return f"{started}/{memory.stat().st_dev if memory.is_dir() else 0}"
