"""Several ranks as processes on this machine, and expert tensors whose content tells which expert it is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gimbal_kernels.migration import ExpertWeights, plan_migration
from gimbal_kernels.migration.executors import Executor, ProcessGroupExecutor, SharedMemoryExecutor
from gimbal_kernels.topology import Topology

FORK = multiprocessing.get_context("fork")
KILLED = "killed"
SHAPES = {  # weights, scales, zero points: one of each width
    "w13": ((6, 8), torch.bfloat16),
    "w2": ((5, 7), torch.float8_e4m3fn),
    "w2_scale": ((), torch.float32),
    "w13_scale": ((3,), torch.float32),
    "zero_point": ((9,), torch.uint8),
}


def run_ranks(
    ranks: int, body: Callable[..., Any], *args: Any, limit: float = 60.0, context: Any = FORK
) -> list[Any]:
    """`body(rank, ranks, name, *args)` in one process each; its results, `KILLED` for a process that was killed.

    Raises:
        AssertionError: a rank raised, or did not end within `limit` seconds; nothing is left running.
    """
    name = uuid.uuid4().hex[:12]
    pipes, workers = [], []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_run, args=(sender, body, rank, ranks, name, args), daemon=True)
        worker.start()
        sender.close()
        pipes.append(receiver)
        workers.append(worker)
    end = time.monotonic() + limit
    results: list[Any] = []
    try:
        for rank, (pipe, worker) in enumerate(zip(pipes, workers, strict=True)):
            assert pipe.poll(max(0.0, end - time.monotonic())), f"rank {rank} did not answer in {limit} s"
            try:
                kind, value = pipe.recv()
            except EOFError:
                worker.join(5)
                kind, value = "result", KILLED
                assert worker.exitcode == -signal.SIGKILL, f"rank {rank} ended with {worker.exitcode}"
            assert kind == "result", f"rank {rank}:\n{value}"
            results.append(value)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for store in Path(tempfile.gettempdir()).glob(f"gimbal-store-{name}*"):
            store.unlink()
    return results


def _run(
    pipe: Any, body: Callable[..., Any], rank: int, ranks: int, name: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        answer = ("result", body(rank, ranks, name, *args))
    except BaseException:
        answer = ("error", traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(0)


class Lockstep:
    """A barrier that a killed process cannot leave locked: each rank counts its own arrivals."""

    GONE = 1 << 60

    def __init__(self, ranks: int) -> None:
        self.arrived = np.frombuffer(multiprocessing.RawArray("q", ranks), dtype=np.int64)

    def wait(self, rank: int, limit: float) -> None:
        """Until all that are there have arrived as often as this rank; who is too late counts as gone."""
        self.arrived[rank] += 1
        end = time.monotonic() + limit
        while (late := np.flatnonzero(self.arrived < self.arrived[rank])).size:
            time.sleep(2e-4)
            if time.monotonic() > end:
                for other in late:
                    self.leave(other)

    def leave(self, rank: int) -> None:
        self.arrived[rank] = self.GONE


def vanish() -> None:
    """Ends this process as a crash does: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def content(layer: int, expert: int, name: str) -> torch.Tensor:
    """Random bytes that are the same in every process; any bit pattern, NaN included."""
    shape, dtype = SHAPES[name]
    count = max(1, int(np.prod(shape))) * torch.empty((), dtype=dtype).element_size()
    seed = [layer, expert, sorted(SHAPES).index(name)]
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def fill(slots: Any, rank: int, ranks: int, **options: Any) -> ExpertWeights:
    """Weights of one rank, each slot holding what `slots` [L, P] says."""
    rows = torch.as_tensor(np.asarray(slots)).view(len(slots), ranks, -1)[:, rank].tolist()
    layers = [
        {name: torch.stack([content(layer, expert, name) for expert in row]) for name in SHAPES}
        for layer, row in enumerate(rows)
    ]
    return ExpertWeights(layers, **options)


def experts_in(weights: ExpertWeights, experts: int) -> list[list[int]]:
    """Which expert each slot of each layer holds, bit for bit; -1 for a slot that is a mixture."""
    found = []
    for layer in range(weights.num_layers):
        known = {_bits(layer, expert): expert for expert in range(experts)}
        tensors = weights.layers[layer]
        found.append(
            [
                known.get(b"".join(raw_bytes(tensors[name][slot]) for name in sorted(SHAPES)), -1)
                for slot in range(weights.slots_per_rank)
            ]
        )
    return found


def _bits(layer: int, expert: int) -> bytes:
    return b"".join(raw_bytes(content(layer, expert, name)) for name in sorted(SHAPES))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def share_of(slots: Any, rank: int, ranks: int) -> list[list[int]]:
    """The part of a slot map that is on one rank."""
    return np.asarray(slots).reshape(len(slots), ranks, -1)[:, rank].tolist()


def shared_memory(weights: ExpertWeights, rank: int, ranks: int, name: str, **options: Any) -> Executor:
    options = {"timeout": 20.0, "start_timeout": 20.0} | options
    return SharedMemoryExecutor(weights, rank=rank, ranks=ranks, name=name, **options)


def process_group(weights: ExpertWeights, rank: int, ranks: int, name: str, **options: Any) -> Executor:
    """Over gloo; the store is a file that outlives every rank."""
    options.pop("start_timeout", None)
    path = Path(tempfile.gettempdir()) / f"gimbal-store-{name}"
    store = dist.FileStore(str(path), -1)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=ranks)
    options = {"timeout": 20.0, "start_timeout": 20.0} | options
    return ProcessGroupExecutor(
        weights, group=dist.group.WORLD, store=dist.PrefixStore("migration", store), **options
    )


EXECUTORS = {"shared_memory": shared_memory, "process_group": process_group}


def plan(old: Any, new: Any, ranks: int) -> Any:
    return plan_migration(old, new, Topology(np.ones((1, ranks))), bytes_per_expert=1)
