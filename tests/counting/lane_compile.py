"""The kernels compiled for GPUs that are not there: they compile, nothing spills, registers stay in their budget.

Runs in a process of its own without TRITON_INTERPRET (see test_counting_triton.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import triton
from compiled import (
    KERNEL,
    NVIDIA,
    POINTERS,
    SHAPES,
    compile_triton,
    examine_nvcc,
    examine_triton,
    nvcc_release,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

# Registers per thread by compiler version and architecture. A version that is not listed has no budget: only spills
# and stack fail there.
BUDGETS = json.loads((Path(__file__).parent / "budgets.json").read_text())


def within_budget(compiler, arch, kernel, registers):
    budget = BUDGETS.get(compiler, {}).get(f"sm_{arch}", {}).get(kernel)
    print(f"{compiler} sm_{arch} {kernel}: {registers} registers, budget {budget}")
    return budget is None or registers <= budget


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", NVIDIA)
def test_triton_for_nvidia_no_spill_no_stack_and_within_its_budget(arch, shape, tmp_path):
    found = examine_triton(arch, shape, tmp_path)
    assert (found.stack, found.local, found.spills) == (0, 0, 0)
    assert found.count("ATOM", "RED") > 0, "no machine code to look at"
    version = ".".join(triton.__version__.split(".")[:2])
    assert within_budget(f"triton {version}", arch, shape, found.registers)


def test_a_spill_would_be_seen(tmp_path):
    found = examine_triton(90, "qwen", tmp_path, maxnreg=24)
    assert found.stack > 0
    assert found.spills > 0


@pytest.mark.skipif(nvcc_release() is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_nvcc_no_spill_no_stack_and_within_its_budget(arch, tmp_path):
    kernels = examine_nvcc(arch, tmp_path)
    assert len(kernels) == 8
    for name, found in kernels.items():
        assert (found.stack, found.local, found.spills) == (0, 0, 0), name
        assert found.count("LDG.E.128") > 0, f"{name}: ids are not loaded 16 bytes at a time"
        assert found.count("STG.E.128") > 0, f"{name}: slots are not stored 16 bytes at a time"
        assert found.count("MATCH.ANY") > 0, f"{name}: lanes do not add up before the atomics"
        assert within_budget(f"nvcc {nvcc_release()}", arch, name, found.registers)


def test_twenty_numbers_of_rows_give_one_specialisation():
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(KERNEL.signature, KERNEL.params, backend)
    rows = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 128, 1000, 4096, 16_384]
    aligned = torch.zeros(16 * 16_384, dtype=torch.int32)
    fixed = dict.fromkeys(("replicas", "nearest", "counts", "physical_load"), aligned)
    fixed |= dict.fromkeys(("thresholds", "source_of_row", "num_tokens", "enabled"))
    fixed |= {"ids_column_stride": 1, "out_column_stride": 1, "source_stride": 0, "num_sources": 4}
    fixed |= {"E": 128, "P": 144, "M": 17, "K": 8, "EXPERT_BINS": 128, "SLOT_BINS": 256, "BLOCK": 1024}

    def key(number, **changes):
        # The ids of a step may begin anywhere in a larger tensor.
        ids = aligned[number : number + 8 * number].view(number, 8)
        step = {"topk_ids": ids, "out": ids, "num_rows": number, "num_counted_rows": number}
        step |= {"layer": number % 48, "source": number % 4, "ids_row_stride": 8, "out_row_stride": 8}
        return str(binder(**(fixed | step | changes), num_warps=4)[1])

    assert len(rows) == 20
    keys = {key(number) for number in rows}
    print(f"{len(rows)} numbers of rows, {len(keys)} specialisation key")
    assert len(keys) == 1
    assert key(16, counts=aligned.long()) != key(16), "a change of type must show in the key"


@pytest.mark.parametrize("shape", SHAPES)
def test_amd_no_spill_and_no_stack(shape):
    kernel = compile_triton(GPUTarget("hip", "gfx942", 64), shape)
    text = kernel.asm["amdgcn"]
    # Scalar registers spill into lanes of vector registers, not into memory: those are not counted here.
    for field in ("vgpr_spill_count", "private_segment_fixed_size"):
        values = re.findall(rf"\.{field}:\s+(\d+)", text)
        assert values, field
        assert set(values) == {"0"}, field


def test_nothing_that_changes_from_step_to_step_is_specialised():
    assert POINTERS == (
        "topk_ids",
        "out",
        "replicas",
        "nearest",
        "thresholds",
        "counts",
        "physical_load",
        "source_of_row",
        "num_tokens",
        "enabled",
    )
    # The tensors of one step may start anywhere in a larger one; the others are allocated once.
    aligned = [p.name for p in KERNEL.params if p.name in POINTERS and not p.do_not_specialize_on_alignment]
    assert aligned == ["replicas", "nearest", "thresholds", "counts", "physical_load"]
