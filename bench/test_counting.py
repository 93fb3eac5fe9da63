"""Counting: the backends that work here against a plain torch version and a copy of the same bytes.

    python -m pytest bench/test_counting.py --benchmark-json=counting.json

Times compare only within one run. `gimbal bench counting` measures more shapes and prints one table.
"""

from __future__ import annotations

import pytest
import torch
from gimbal_runtime.tools.bench_counting import Shape, make_inputs, steps, time_on_cpu

from gimbal_kernels.counting import host

SHAPES = [Shape(1), Shape(64), Shape(4096), Shape(4096, sources=8), Shape(16_384)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = list(steps(make_inputs(Shape(1), DEVICE)))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_step(benchmark, shape, name):
    inputs = make_inputs(shape, DEVICE)
    step = steps(inputs)[name]

    def whole():
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = str(shape)
    benchmark(whole)


def test_variants_count_the_same_picks():
    for shape in (Shape(64), Shape(300, sources=8)):
        totals = {}
        for name in NAMES:
            inputs = make_inputs(shape, DEVICE)
            steps(inputs)[name]()
            if name not in ("gather only", "map only", "copy only"):
                totals[name] = inputs.counts.cpu().tolist()
        assert len({str(counts) for counts in totals.values()}) == 1, totals.keys()


@pytest.mark.skipif(host.status() != "ready", reason=host.status())
def test_ratio_of_the_host_backend_to_gather_and_bincount():
    """At 4,096 x 8 and 128 experts, one run: printed, for the record (-s shows it)."""
    for spare, label in ((False, "one copy per expert"), (True, "16 experts with two copies")):
        named = steps(make_inputs(Shape(4096), "cpu", spare=spare))
        spent = time_on_cpu({name: named[name] for name in ("host", "bincount", "copy only")}, 2.0)
        ratio = spent["bincount"] / spent["host"]
        print(f"{label}: host {spent['host']:.0f} us, bincount {spent['bincount']:.0f} us, ratio {ratio:.1f}")
        assert ratio > 1
