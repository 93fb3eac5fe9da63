"""The Triton kernel under Triton's interpreter: equal to the reference bit for bit, and planted faults are caught.

Runs in a process of its own with TRITON_INTERPRET=1 (see test_counting_triton.py): the interpreter is chosen when
the kernel is defined. It runs the programs of a grid one after another, so it cannot show races; here it runs
them in a shuffled order, which shows results that depend on the order.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from counting_cases import BY_NAME, CASES, differences, prepare, run
from random_cases import random_case
from triton.runtime import interpreter

from gimbal_kernels import counting
from gimbal_kernels.counting import available_backends, backends, triton_kernels

SOURCE = Path(triton_kernels.__file__)


class ShuffledGrid:
    """Gives program k of the serial loop the index of program permutation[k]."""

    def __init__(self, builder, monkeypatch, seed):
        self.builder, self.random = builder, random.Random(seed)
        self.set_dim, self.set_index = builder.set_grid_dim, builder.set_grid_idx
        self.order = []
        monkeypatch.setattr(builder, "set_grid_dim", self.new_grid)
        monkeypatch.setattr(builder, "set_grid_idx", self.new_program)

    def new_grid(self, x, y, z):
        assert (y, z) == (1, 1), "the kernel's grid has one dimension"
        self.order = self.random.sample(range(x), x)
        self.set_dim(x, y, z)

    def new_program(self, x, y, z):
        self.set_index(self.order[x], y, z)


@pytest.fixture(params=[1, 2])
def shuffled(request, monkeypatch):
    return ShuffledGrid(interpreter.interpreter_builder, monkeypatch, request.param)


def test_the_interpreter_is_in_use():
    assert triton_kernels.is_interpreted()
    assert available_backends()["triton"] == "ready"


def test_auto_never_takes_the_interpreter():
    assert backends.choose("auto", torch.zeros(1, 1, dtype=torch.int32)) in ("torch", "host")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_equals_the_reference(case, shuffled):
    prepared = prepare(case)
    assert differences(run(prepared, "torch"), run(prepared, "triton")) == []


@pytest.mark.parametrize("tens", range(10))
def test_triton_equals_the_reference_on_random_shapes(tens, monkeypatch):
    seeds = range(12 * tens, 12 * tens + 12)  # 120 small shapes in all
    for seed in seeds:
        ShuffledGrid(interpreter.interpreter_builder, monkeypatch, seed)
        case = random_case(seed, max_tokens=60, max_experts=200)
        prepared = prepare(case, seed=seed)
        assert differences(run(prepared, "torch"), run(prepared, "triton")) == [], f"seed {seed}"
        monkeypatch.undo()
    print(f"{len(seeds)} shapes, seeds {seeds}: equal bit for bit")


def test_the_order_of_programs_is_shuffled(shuffled):
    run(prepare(BY_NAME["many blocks"]), "triton")
    assert len(shuffled.order) == 3


@pytest.mark.parametrize("sources", [1, 3])
def test_the_scheme_that_the_benchmark_compares_with_counts_the_same(sources):
    from gimbal_runtime.tools import bench_counting, bench_triton

    shape = bench_counting.Shape(70, experts=64, sources=sources)
    per_pick, plain = (bench_counting.make_inputs(shape, "cpu") for _ in range(2))
    bench_triton.map_per_pick(per_pick, count=True)
    bench_counting.steps(plain)["bincount"]()
    for name in ("counts", "load", "out"):
        assert torch.equal(getattr(per_pick, name), getattr(plain, name)), name


@dataclass(frozen=True)
class Fault:
    """A plausible mistake in the kernel: `old` replaced by `new`; the case that shows it."""

    name: str
    old: str
    new: str
    case: str


PASSES = "tl.static_range((SIZE + BINS - 1) // BINS)"
ADDING = 'tl.atomic_add(counter + chunk * BINS + i_bin, b_added, mask=b_histogram > 0, sem="relaxed")'
STORING = "tl.store(counter + chunk * BINS + i_bin, b_added, mask=b_histogram > 0)"
FAULTS = [
    Fault("negative ids mapped", "(b_id >= 0)", "(b_id >= -1)", "padding ids"),
    Fault("off by one at E", "(b_id < E)", "(b_id <= E)", "padding ids"),
    Fault("padding rows counted", "i_row < tl.load(num_tokens)", "i_row >= 0", "num_tokens on the device"),
    Fault("one padding row counted", "i_row < tl.load", "i_row <= tl.load", "num_tokens on the device"),
    Fault("host limit ignored", "mask & (i_row < num_counted_rows)", "mask", "num_tokens int"),
    Fault("flag ignored", "(tl.load(enabled) != 0)", "(tl.load(enabled) > -1)", "disabled on the device"),
    Fault("writes past the rows", "m_pick = i_row < num_rows", "m_pick = i_row < num_rows + 1", "plain"),
    Fault("experts in one pass only", PASSES, "tl.static_range(1)", "1025 experts"),
    Fault("slots in one pass only", PASSES, "tl.static_range(1)", "1500 slots"),
    Fault("chunk offset lost", "counter + chunk * BINS + i_bin", "counter + i_bin", "1025 experts"),
    Fault("stores instead of adding", ADDING, STORING, "many blocks"),
    Fault("every layer in layer 0", "counts + layer.to(tl.int64) * num_sources * E", "counts", "plain"),
    Fault("load in layer 0", "physical_load + layer.to(tl.int64) * P", "physical_load", "plain"),
    Fault("source axis lost", "p_layer + source * E, b_expert", "p_layer, b_expert", "plain"),
    Fault("last source lost", "range(first, last + 1)", "range(first, last)", "source blocks"),
    Fault("sources not told apart", "mask & (source_of_pick == source)", "mask", "source mixed"),
    Fault("stray source mapped", "(b_source_id >= 0) & ", "", "source stray"),
    Fault("source not mixed in", "to(tl.int32) + source + expert)", "to(tl.int32) + expert)", "plain"),
    Fault("carry lost", "(low_row >> 5) * CARRY_5_STEP", "(low_row >> 6) * CARRY_5_STEP", "many blocks"),
    Fault("padding counted in the load", "b_slot, m_count, P", "b_slot, m_valid, P", "num_tokens int"),
    Fault("threshold at its own copy", "(place >= b_threshold", "(place > b_threshold", "even shares"),
    Fault("last threshold lost", "(j + 1 < num_choices)", "(j + 2 < num_choices)", "random shares"),
    Fault("shares not turned", "((source + expert) % num_choices << 16)", "0", "even shares"),
    Fault("strides ignored", "i_row * ids_row_stride + i_column * ids_column_stride", "i_pick", "transposed"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault, tmp_path, monkeypatch):
    text = SOURCE.read_text()
    assert text.count(fault.old) == 1, "the kernel's text has changed: plant the fault anew"
    path = tmp_path / "faulty_kernels.py"
    path.write_text(text.replace(fault.old, fault.new))
    spec = importlib.util.spec_from_file_location("gimbal_kernels.counting.faulty_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(counting, "triton_kernels", module)
    prepared = prepare(BY_NAME[fault.case])
    assert differences(run(prepared, "torch"), run(prepared, "triton")) != []
