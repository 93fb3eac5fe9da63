"""The compiled methods give the reference's bytes, and the comparison notices when they do not."""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from placement_problems import random_problems

from gimbal_kernels.placement import PlacementProblem, host, place, reference
from gimbal_kernels.placement.solve import METHODS, WITHOUT_REPLICAS, available_backends
from gimbal_kernels.topology import Topology

HEURISTICS = tuple(method for method in METHODS if method != "portfolio")
needs_host = pytest.mark.skipif(host.status() != "ready", reason=host.status())


def cases(count: int) -> Iterator[tuple[PlacementProblem, str]]:
    for problem in random_problems(count, seed=1, replicas=False):
        for method in HEURISTICS:
            yield problem, method
    for problem in random_problems(count, seed=2, replicas=True):
        for method in set(HEURISTICS) - set(WITHOUT_REPLICAS):
            yield problem, method


@needs_host
def test_same_bytes_on_hundreds_of_random_problems():
    compared = 0
    for problem, method in cases(400):
        expected = reference.solve(problem, method)
        found = host.solve(problem, method)
        assert found.dtype == expected.dtype == np.int32
        assert found.tobytes() == expected.tobytes(), (method, problem)
        compared += 1
    assert compared == 400 * (len(HEURISTICS) + 2)


@needs_host
@pytest.mark.parametrize("method", HEURISTICS)
def test_same_bytes_on_any_number_of_threads(method):
    rng = np.random.default_rng(0)
    traffic = rng.integers(0, 50, (40, 4, 32))
    problem = PlacementProblem(traffic, Topology.grid(gpus_per_node=8, sources=4), 4)
    expected = reference.solve(problem, method).tobytes()
    assert all(host.solve(problem, method, threads=n).tobytes() == expected for n in (0, 1, 2, 3, 64))


@needs_host
@pytest.mark.parametrize("method", HEURISTICS)
def test_same_bytes_at_the_size_of_a_real_model(method):
    rng = np.random.default_rng(3)
    traffic = rng.poisson(300 * np.exp(rng.standard_normal((6, 2, 128))))
    current = np.tile(np.arange(128), (6, 1))
    problem = PlacementProblem(traffic, Topology.grid(gpus_per_node=4, sources=2), 32, current)
    assert host.solve(problem, method).tobytes() == reference.solve(problem, method).tobytes()


# (method's text in the reference, what replaces it): wrong tie-breaks, wrong formulas, wrong orders of summation.
PLANTED = {
    "migration does not break ties": ("(score[rank], moved[rank], len", "(score[rank], len"),
    "filled slots do not break ties": ("moved[rank], len(held[rank]), rank)", "moved[rank], rank)"),
    "the highest rank wins ties": (
        "len(held[rank]), rank))\n        held[best]",
        "len(held[rank]), -rank))\n        held[best]",
    ),
    "the highest id first among equally hot": (
        'np.argsort(-load, kind="stable").tolist()',
        "sorted(range(len(load)), key=lambda e: (-load[e], -e))",
    ),
    "squares before are forgotten": ("after * after - before * before", "after * after"),
    "factored squares round otherwise": (
        "(after * after - before * before)",
        "(after - before) * (after + before)",
    ),
    "last source first": ("for row in rows:", "for row in rows[::-1]:"),
    "mean over slots": ("mean_expert = total / experts", "mean_expert = total / ranks"),
    "gamma per expert": ("weights.gamma / experts", "weights.gamma"),
    "most copies first": ("copies[e], e))", "-copies[e], e))"),
    "two copies on a rank": (" and expert not in held[r]", ""),
    "packed row by row to the end": ("if nth <= rows_until:", "if True:"),
    "the lowest of equally light ranks": (
        "(rank_load[rank], len(held[rank]), rank)",
        "(rank_load[rank], rank)",
    ),
    "stayers lose their slot": ("if int(current[slot]) in newcomers", "if slot < 0"),
    "newcomers in descending id": ("sorted(newcomers), strict", "sorted(newcomers)[::-1], strict"),
}


@needs_host
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name):
    right, wrong = PLANTED[name]
    source = inspect.getsource(reference)
    assert source.count(right) == 1
    mutant = types.ModuleType("gimbal_kernels.placement.mutant")
    mutant.__package__ = "gimbal_kernels.placement"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, mutant.__name__, mutant)
        exec(compile(source.replace(right, wrong), mutant.__name__, "exec"), mutant.__dict__)
        assert any(
            host.solve(problem, method).tobytes() != solution_or_nothing(mutant, problem, method)
            for problem, method in cases(400)
        )


def solution_or_nothing(module: types.ModuleType, problem: PlacementProblem, method: str) -> bytes:
    try:
        return module.solve(problem, method).tobytes()
    except ValueError:  # a mutant may notice itself that its result is no placement
        return b""


def digest(slots: torch.Tensor) -> str:
    return hashlib.sha256(slots.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("backend", ["auto", "host", "reference"])
def test_bytes_do_not_depend_on_the_machine(backend):
    if backend == "host" and host.status() != "ready":
        pytest.skip(host.status())
    cell = np.arange(3 * 2 * 24, dtype=np.int64).reshape(3, 2, 24)
    problem = PlacementProblem(cell * 7919 % 101, Topology.grid(gpus_per_node=4, sources=2), 6)
    digests = {method: digest(place(problem, method=method, backend=backend).slots) for method in METHODS}
    assert digests == {
        "portfolio": "8b0d5a946a55acf4",
        "paper": "9b46d9f38bce4915",
        "greedy": "62e4dca88521262b",
        "eplb": "6859a2d721c5be03",
        "stay": "044b5fec4e69b025",
    }


def test_every_backend_is_listed_with_its_state():
    state = available_backends()
    assert set(state) == {"host", "reference", "cuda"}
    assert state["reference"] == "ready"


def test_without_the_library_auto_falls_back_and_host_says_why(monkeypatch):
    monkeypatch.setattr(host, "_bind", lambda: (None, "libgimbal_host.so was not built"))
    problem = PlacementProblem([[[3, 2, 1, 0]]], Topology([[0, 1]]), 2)
    assert place(problem, backend="auto").slots.shape == (1, 4)
    with pytest.raises(
        ValueError, match=r"backend: 'host' is not available: .*was not built; valid: auto, ref"
    ):
        place(problem, backend="host")
    with pytest.raises(RuntimeError, match="was not built"):
        host.solve(problem, "paper")
