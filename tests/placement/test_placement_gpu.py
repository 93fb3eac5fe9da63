"""Backend "cuda" on a device: the host's bytes at the shapes of real models (SPEC section 1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from placement_problems import random_problems

from gimbal_kernels.placement import PlacementProblem, Weights, cuda, host, place
from gimbal_kernels.placement.portfolio import Effort
from gimbal_kernels.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.status() != "ready", reason=cuda.status()),
    pytest.mark.skipif(host.status() != "ready", reason=host.status()),
]

# Layers, experts, topology, earlier windows. The last needs more shared memory than a block has without asking.
SHAPES = {
    "qwen": (48, 128, Topology.grid(gpus_per_node=4, sources=2), 6),
    "deepseek, 8 ranks": (58, 256, Topology.grid(gpus_per_node=8, sources=8), 0),
    "deepseek, 32 ranks": (58, 256, Topology.grid(nodes=4, gpus_per_node=8, sources=32), 1),
    "deepseek, 64 ranks": (58, 256, Topology.grid(nodes=8, gpus_per_node=8, sources=8), 7),
}


def at_shape(name: str, *, current: bool) -> PlacementProblem:
    layers, experts, topology, windows = SHAPES[name]
    rng = np.random.default_rng(0)
    popularity = np.exp(rng.standard_normal((layers, 1, experts)))
    traffic = rng.poisson(
        300 * popularity * np.exp(rng.standard_normal((layers, topology.num_sources, experts)))
    )
    traffic[1] = 0
    history = tuple(rng.poisson(300 * popularity[:, 0]) for _ in range(windows))
    slots = rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1) if current else None
    on_gpu = torch.from_numpy(traffic).cuda()
    size = experts // topology.num_ranks
    return PlacementProblem(on_gpu, topology, size, slots, Weights(gamma=0.02), history)


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_the_host(shape, current):
    problem = at_shape(shape, current=current)
    assert problem.traffic_device is not None
    for backend in ("cuda", "auto"):
        found = place(problem, backend=backend).slots
        assert found.numpy().tobytes() == place(problem, backend="host").slots.numpy().tobytes()


def test_bytes_of_the_host_on_random_problems():
    for problem in random_problems(60, seed=6, replicas=False):
        for name in ("fast", "default", "best"):
            effort = Effort.named(name, problem.num_ranks)
            found = cuda.solve_portfolio(problem, effort, device="cuda")
            assert found.tobytes() == host.solve_portfolio(problem, effort).tobytes(), (name, problem)


def test_on_another_stream():
    problem = at_shape("qwen", current=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = place(problem, backend="cuda").slots
    assert found.numpy().tobytes() == place(problem, backend="host").slots.numpy().tobytes()
