"""Small tensors by one launch: the product's descriptors drive the kernel on the host, and the whole executor runs
with memory of the host where a GPU's would be: two ranks as threads, CUDA's calls replaced by what they promise."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import uuid
from types import SimpleNamespace
from typing import Any

import migration_ranks as group
import numpy as np
import pytest
import torch
from migration_cases import random_slots

from gimbal_kernels import _device_library
from gimbal_kernels.migration import ExpertWeights, migrate
from gimbal_kernels.migration import host as compiled
from gimbal_kernels.migration.executors import PeerMemoryExecutor, peer_memory, small_copies
from gimbal_kernels.migration.executors.small_copies import PIECE, ROW, CopyTable, table_bytes
from tests.simt import build

EXPERTS, PIECES, MEMORY = 5, 4, 1 << 16


def random_table(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """A table, the memory before, and the memory that it must lead to; sizes and addresses of all alignments."""
    before = rng.integers(0, 256, MEMORY, dtype=np.uint8)
    before[:16] = 0  # the counter
    after = before.copy()
    raw = np.full(table_bytes(EXPERTS, PIECES), 0xEE, dtype=np.uint8)  # of an earlier launch
    table = CopyTable(raw, rows=EXPERTS)
    source, target = 16, MEMORY // 2
    for _ in range(EXPERTS):
        pieces = []
        for _ in range(int(rng.integers(1, PIECES + 1))):
            size = int(rng.choice([1, 4, 15, 16, 64, 203, 1600]))
            source += int(rng.choice([0, 0, 1, 4]))
            pieces.append((source, target, size))
            after[target : target + size] = before[source : source + size]
            source, target = -(-(source + size) // 16) * 16, -(-(target + size) // 16) * 16
        table.add(pieces)
    table.finish(0)
    return raw, before, after


@pytest.mark.parametrize("sanitizer", ["plain", "asan", "tsan"])
def test_the_kernel_copies_what_the_table_lists_and_nothing_else(sanitizer, tmp_path):
    if build.why_not(sanitizer) is not None:
        pytest.skip(build.why_not(sanitizer))
    header = build.ROOT / "csrc" / "migration" / "transfer.cuh"
    source = build.ROOT / "tests" / "migration" / "simt_descriptors.cpp"
    program = build.build("descriptors", source, sanitizer=sanitizer, watch=[header])
    rng = np.random.default_rng(0)
    for seed in range(6 if sanitizer == "plain" else 1):
        raw, before, after = random_table(rng)
        head = struct.pack("<5Q", EXPERTS, small_copies.PARTS, raw.size, EXPERTS * ROW.itemsize, MEMORY)
        file = tmp_path / "launch"
        file.write_bytes(head + raw.tobytes() + before.tobytes())
        done = build.run(program, file, seed, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert file.read_bytes()[:MEMORY] == after.tobytes()


def test_a_table_is_filled_again_from_its_start():
    table = CopyTable(np.zeros(table_bytes(2, 3), dtype=np.uint8), rows=2)
    table.add([(1, 2, 3)])
    assert not table.full
    table.add([(4, 5, 6), (7, 8, 9)])
    assert table.full
    table.clear()
    assert not table.full
    assert (table.num_rows, table.num_pieces) == (0, 0)
    words = table.argument(1000)["words"][0].tolist()
    assert words == [1000 + 2 * ROW.itemsize, 1000, small_copies.PARTS]


class HostDevice(str):
    """Memory of the host that says it is a GPU's."""

    type, index = "cuda", 0


class SlowEvent:
    """Complete at the third question; `synchronize` waits for it."""

    def __init__(self) -> None:
        self.asked = 0

    def record(self, stream: Any) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def synchronize(self) -> None:
        self.asked = 3


class HostRuntime:
    """CUDA IPC inside one process: a handle is an address."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}

    def malloc(self, size: int) -> int:
        memory = (ctypes.c_uint8 * size)()
        self.held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def ipcGetMemHandle(self, address: int) -> bytes:
        return struct.pack("<Q", address).ljust(peer_memory.HANDLE_BYTES, b"\0")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        return int(struct.unpack_from("<Q", handle)[0])

    def ipcCloseMemHandle(self, address: int) -> None:
        assert address in self.held

    def free(self, address: int) -> None:
        pass  # the other rank may not have closed yet; kept until the test ends


class HostKernel:
    """`gimbal_transfer` as plain copies; `pieces` counts what went through it."""

    def __init__(self) -> None:
        self.pieces = self.launches = 0

    def __call__(self, folder: str, name: str, device: Any, *, blocks: int, argument: Any, **_: Any) -> None:
        assert (folder, name) == ("migration", "gimbal_transfer")
        pieces, rows, parts = argument["words"][0].tolist()
        table = np.frombuffer(ctypes.string_at(rows, blocks // parts * ROW.itemsize), dtype=ROW)
        assert (table["expected"] == blocks).all()
        for row in table:
            at = pieces + int(row["first_piece"]) * PIECE.itemsize
            listed = np.frombuffer(ctypes.string_at(at, int(row["pieces"]) * PIECE.itemsize), dtype=PIECE)
            for source, destination, size in listed.tolist():
                ctypes.memmove(destination, source, size)
            self.pieces += len(listed)
        self.launches += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostKernel:
    runtime, kernel = HostRuntime(), HostKernel()

    def as_tensor(address: int, shape: tuple[int, ...], _: Any) -> torch.Tensor:
        memory = (ctypes.c_uint8 * int(np.prod(shape))).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(shape)

    monkeypatch.setattr(peer_memory, "status", lambda: "ready")
    monkeypatch.setattr(peer_memory, "_runtime", lambda: runtime)
    monkeypatch.setattr(peer_memory, "_as_tensor", as_tensor)
    monkeypatch.setattr(small_copies, "_pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(_device_library, "status", lambda _: "ready")
    monkeypatch.setattr(_device_library, "kernel", lambda *_: None)
    monkeypatch.setattr(_device_library, "launch", kernel)
    for name, value in {
        "Stream": SimpleNamespace,
        "Event": SlowEvent,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return kernel


def on_device(weights: ExpertWeights) -> ExpertWeights:
    weights.device = HostDevice("cpu")
    return weights


def move_along(rank: int, ranks: int, name: str, chain: list[Any], options: dict[str, Any]) -> int:
    """Migrates from map to map, checking every bit; the number of experts sent."""
    weights = on_device(group.fill(chain[0], rank, ranks))
    executor = PeerMemoryExecutor(weights, rank=rank, ranks=ranks, name=name, timeout=20.0, **options)
    current, sent = chain[0], 0
    for new in chain[1:]:
        plan = group.plan(current, new, ranks)
        migrate(plan, weights, executor)
        current = plan.target.numpy()
        assert group.experts_in(weights, 6) == group.share_of(current, rank, ranks)
        sent += int((plan.transfers[:, 2] == rank).sum())
    return sent


def in_threads(ranks: int, body: Any, *args: Any) -> list[Any]:
    results: list[Any] = [None] * ranks
    name = uuid.uuid4().hex[:12]

    def run(rank: int) -> None:
        results[rank] = body(rank, ranks, name, *args)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert None not in results, results
    return results


SMALL = {0: 0, 40: 4, 1 << 16: 5}  # limit: how many of an expert's tensors are small (w13 has 96 bytes)


@pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
@pytest.mark.parametrize("limit", SMALL)
@pytest.mark.parametrize("per_launch", [2, 256])
def test_every_bit_arrives_whichever_way_it_takes(device, limit, per_launch, monkeypatch):
    monkeypatch.setattr(small_copies, "EXPERTS_PER_LAUNCH", per_launch)
    rng = np.random.default_rng(0)
    chain = [random_slots(rng, 4, 6, 12) for _ in range(5)]
    staging = 2 * 9 * group.fill(chain[0], 0, 2).row_bytes
    sent = sum(in_threads(2, move_along, chain, {"small_bytes": limit, "staging_bytes": staging}))
    assert device.pieces == sent * SMALL[limit]
    assert (device.launches > sent / 3) == (per_launch == 2 and limit > 0)


def interrupted(rank: int, ranks: int, name: str) -> bool:
    """The first migration fails when small tensors are listed; the second must not copy those."""
    chain = [np.array([[0, 1, 2, 3]]), np.array([[2, 3, 0, 1]])]
    weights = on_device(group.fill(chain[0], rank, ranks))
    executor = PeerMemoryExecutor(weights, rank=rank, ranks=ranks, name=name, timeout=20.0)
    plan = group.plan(*chain, ranks)
    launch = executor._all_pushed
    executor._all_pushed = lambda: [][0]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"layer 0: rank \d failed"):
        migrate(plan, weights, executor)
    assert group.experts_in(weights, 4) == group.share_of(chain[0], rank, ranks)
    executor._all_pushed = launch  # type: ignore[method-assign]
    migrate(plan, weights, executor)
    return group.experts_in(weights, 4) == group.share_of(plan.target.numpy(), rank, ranks)


@pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
def test_what_an_abandoned_migration_listed_is_forgotten(device):
    assert in_threads(2, interrupted) == [True, True]
    assert device.pieces == 4 * 5  # two experts of each rank


@pytest.mark.skipif(compiled.status() != "ready", reason=compiled.status())
def test_without_the_kernel_all_takes_the_copy_engine_and_a_warning_says_why(device, monkeypatch, caplog):
    monkeypatch.setattr(_device_library, "status", lambda _: "made-up reason")
    chain = [np.array([[0, 1, 2, 3]]), np.array([[2, 3, 0, 1]])]
    with caplog.at_level("WARNING", logger="gimbal_kernels.migration"):
        assert in_threads(2, move_along, chain, {}) == [2, 2]
    assert device.launches == 0
    assert caplog.text.count("no copy kernel (made-up reason): small tensors travel one by one") == 2


def test_a_negative_limit_is_refused(device):
    with pytest.raises(ValueError, match="small_bytes: -1; valid: 0 or more"):
        PeerMemoryExecutor(
            on_device(group.fill([[0, 1]], 0, 1)), rank=0, ranks=1, name="none", small_bytes=-1
        )
