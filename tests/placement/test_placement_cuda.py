"""The launches of backend "cuda", made by the product over host memory and run on the host (tests/simt)."""

from __future__ import annotations

import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from placement_problems import random_problems

from gimbal_kernels import _device_library
from gimbal_kernels._arrays import cuda_device
from gimbal_kernels.placement import PlacementProblem, Weights, cuda, host, place, reference
from gimbal_kernels.placement.portfolio import Effort, prices, round_by_class, round_by_rank, to_integers
from gimbal_kernels.topology import Topology
from tests.simt import build

CSRC = build.ROOT / "csrc" / "placement"
KERNELS = ("gimbal_portfolio_starts", "gimbal_portfolio_settle", "gimbal_portfolio_kick")
EFFORT = Effort(kicks=3, seeds=2)


def parameters(kernel: str) -> list[type]:
    """numpy types of a kernel's parameters, from its source: pointers and ints."""
    text = (CSRC / "kernels.cuh").read_text()
    listed = re.search(rf"{kernel}\(([^)]*)\)\s*{{", text)
    assert listed is not None
    return [np.uint64 if "*" in each else np.int32 for each in listed[1].split(",")]


class HostDevice:
    """Memory that the product puts on the device, and its launches, each a run of simt_launches.cpp."""

    def __init__(self, sanitizer: str, file: Path) -> None:
        if build.why_not(sanitizer) is not None:
            pytest.skip(build.why_not(sanitizer))
        source = build.ROOT / "tests" / "placement" / "simt_launches.cpp"
        self.program = build.build("launches", source, sanitizer=sanitizer, watch=sorted(CSRC.glob("*.cuh")))
        self.file, self.memory, self.launches = file, [], []

    def put(self, array: Any) -> torch.Tensor:
        self.memory.append(torch.from_numpy(np.array(array)))
        return self.memory[-1]

    def launch(self, folder: str, name: str, device: str, *, blocks, threads, shared_bytes, argument) -> None:
        assert (folder, device) == ("placement", "cpu")
        assert [type(each) for each in argument] == parameters(name)
        assert threads % 32 == 0
        assert 0 < threads <= 512
        views = [each for each in self.memory if each.data_ptr() == int(argument[0])]
        regions = views + [each for each in self.memory if each is not views[0]]
        numbers = [int(each) for each in argument] + [0, 0, 0]
        head = [KERNELS.index(name), blocks, threads, shared_bytes, len(numbers), len(regions)]
        raw = struct.pack(f"<{len(head) + len(numbers)}Q", *head, *numbers)
        for each in regions:
            content = each.numpy().tobytes()
            raw += struct.pack("<2Q", each.data_ptr(), len(content)) + content
        self.file.write_bytes(raw)
        done = build.run(self.program, self.file, len(self.launches), timeout=60)
        assert done.returncode == 0, done.stderr
        content = self.file.read_bytes()
        for each in regions[1:]:
            size = each.numel() * each.element_size()
            each.numpy().reshape(-1).view(np.uint8)[:] = np.frombuffer(content[:size], dtype=np.uint8)
            content = content[size:]
        self.launches.append((name, blocks))


@pytest.fixture
def device(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    fake = HostDevice(getattr(request, "param", "plain"), tmp_path / "launch")
    monkeypatch.setattr(cuda._Kernels, "put", lambda _, array: fake.put(array))
    monkeypatch.setattr(_device_library, "launch", fake.launch)
    return fake


def solve(device: HostDevice, problem: PlacementProblem, effort: Effort = EFFORT) -> bytes:
    device.memory.clear()
    return cuda.solve_portfolio(problem, effort, device="cpu").tobytes()


@pytest.mark.parametrize("device", ["plain", "asan"], indirect=True)
def test_same_bytes_as_the_reference_on_random_problems(device):
    for problem in random_problems(16, seed=5, replicas=False):
        expected = reference.solve_portfolio(problem, EFFORT).tobytes()
        assert solve(device, problem) == expected, problem


def with_history() -> PlacementProblem:
    """Layers with different numbers of windows, one layer without traffic, classes of ranks."""
    rng = np.random.default_rng(2)
    traffic = rng.poisson(30 * np.exp(rng.standard_normal((4, 2, 24))))
    traffic[2] = 0
    history = tuple(rng.poisson(30 * np.exp(rng.standard_normal((4, 24)))) for _ in range(3))
    history[1][0] = 0
    topology = Topology.grid(gpus_per_node=4, sources=2)
    current = rng.permuted(np.tile(np.arange(24), (4, 1)), axis=1)
    return PlacementProblem(traffic, topology, 6, current, Weights(gamma=0.02), history)


@pytest.mark.skipif(host.status() != "ready", reason=host.status())
def test_history_and_layers_without_traffic(device):
    problem = with_history()
    assert solve(device, problem) == host.solve_portfolio(problem, EFFORT).tobytes()
    assert device.launches == [(KERNELS[0], 3), (KERNELS[1], 9), (KERNELS[2], 6)]


def test_starts_of_the_reference(device):
    problem = with_history()
    layers = [y for y in map(partial(to_integers, problem), range(4)) if y is not None]
    for y, found in zip(layers, cuda._Kernels(layers, "cpu").starts().numpy(), strict=True):
        expected = [round_by_rank(y, prices(y)), round_by_class(y, prices(y)), y.home]
        assert found.tolist() == np.stack(expected).tolist()


@pytest.mark.parametrize("ranks", [4, 8, 10])
def test_the_starts_that_the_reference_takes(device, ranks):
    """Without kicks, which would even out where the search started; the current ranks are one up to 8 ranks."""
    rng = np.random.default_rng(0)
    traffic = rng.poisson(100 * np.exp(rng.standard_normal((8, 2, 4 * ranks))))
    current = rng.permuted(np.tile(np.arange(4 * ranks), (8, 1)), axis=1)
    topology = Topology.grid(gpus_per_node=ranks, sources=2)
    problem = PlacementProblem(traffic, topology, 4, current, Weights(gamma=0.1))
    assert solve(device, problem, Effort(0, 0)) == reference.solve_portfolio(problem, Effort(0, 0)).tobytes()


def test_what_is_no_better_stays(device):
    """All placements cost the same, and the current one, on more than 8 ranks, is no start."""
    current = np.random.default_rng(1).permutation(24)[None]
    problem = PlacementProblem(np.full((1, 1, 24), 5), Topology(np.ones((1, 12))), 2, current)
    assert solve(device, problem) == current.astype(np.int32).tobytes()


def test_without_kicks_there_are_two_launches_and_without_traffic_none(device):
    problem = with_history()
    assert solve(device, problem, Effort(0, 0)) == reference.solve_portfolio(problem, Effort(0, 0)).tobytes()
    assert [name for name, _ in device.launches] == list(KERNELS[:2])
    nothing = PlacementProblem(np.zeros((2, 2, 8)), Topology.grid(gpus_per_node=4, sources=2), 2)
    assert solve(device, nothing) == reference.solve_portfolio(nothing, EFFORT).tobytes()
    assert len(device.launches) == 2


class OnGpu:
    """Traffic of a GPU's memory, as far as DLPack tells."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, **_: Any) -> Any:
        return torch.full((1, 2, 8), 3.0).__dlpack__()


def test_auto_takes_it_for_traffic_on_a_gpu_where_it_can_serve(monkeypatch):
    topology = Topology.grid(gpus_per_node=4, sources=2)
    there = PlacementProblem(torch.full((1, 2, 8), 3.0), topology, 2, [[*range(8)]])
    assert (there.traffic_device, cuda_device(np.zeros(1)), cuda_device([1])) == (None, None, None)
    assert cuda_device(OnGpu()) == torch.device("cuda", 3)
    object.__setattr__(there, "traffic_device", torch.device("cuda", 3))
    calls = []

    def solved(problem: PlacementProblem, effort: Effort, *, device: Any) -> Any:
        calls.append((str(device), effort))
        return problem.current

    monkeypatch.setattr(cuda, "solve_portfolio", solved)
    if cuda.status() != "ready":
        place(there)
        assert calls == []
    monkeypatch.setattr(_device_library, "status", lambda _: "ready")
    monkeypatch.setattr(_device_library, "most_shared_bytes", lambda index: 1 << 16)
    place(there)
    assert calls == [("cuda:3", Effort.named("default", 4))]
    for other in ({"max_moves": 2}, {"time_budget": 1.0}, {"method": "greedy"}, {"backend": "reference"}):
        place(there, **other)
    monkeypatch.setattr(_device_library, "most_shared_bytes", lambda index: 1 << 10)
    place(there)
    assert len(calls) == 1
    with pytest.raises(
        ValueError, match=r"\d+ bytes of shared memory per block are needed, and this GPU has 1024"
    ):
        place(there, backend="cuda")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "paper"}, "it serves method portfolio only, not 'paper'"),
        ({"max_moves": 3}, "it takes neither max_moves nor time_budget"),
        ({"time_budget": 1.0}, "it takes neither max_moves nor time_budget"),
    ],
)
def test_asked_for_what_it_does_not_serve_it_says_so(options, reason):
    problem = PlacementProblem([[[3, 2, 1, 0]]], Topology([[0, 1]]), 2, [[0, 1, 2, 3]])
    with pytest.raises(
        ValueError, match=f"backend: 'cuda' is not available: {reason}; valid: auto, host, ref"
    ):
        place(problem, backend="cuda", **options)


def test_spare_slots_and_a_missing_gpu_are_told(monkeypatch):
    with pytest.raises(ValueError, match="it has one copy per expert, but there are 6 slots for 4"):
        place(PlacementProblem([[[3, 2, 1, 0]]], Topology([[0, 1]]), 3), backend="cuda")
    monkeypatch.setattr(_device_library, "status", lambda _: "no CUDA device")
    with pytest.raises(ValueError, match="backend: 'cuda' is not available: no CUDA device; valid: auto"):
        place(PlacementProblem([[[3, 2, 1, 0]]], Topology([[0, 1]]), 2), backend="cuda")
