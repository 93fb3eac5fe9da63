"""The Triton kernel compiled for GPUs that are not there: it compiles, and nothing spills.

Runs in a process of its own without TRITON_INTERPRET (see test_counting_triton.py).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gimbal_kernels.counting import triton_kernels

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KERNEL = triton_kernels.map_and_count_kernel
POINTERS = tuple(p.name for p in KERNEL.params if not p.is_constexpr and not p.do_not_specialize)
SHAPES = {
    # name: constants, and the types of the pointers that differ from the default; None: argument absent
    "qwen": (
        {"E": 128, "P": 144, "M": 17, "K": 8},
        {"source_of_row": None, "thresholds": None},
    ),
    "1025 experts, all arguments": (
        {"E": 1025, "P": 1536, "M": 16, "K": 8},
        {"topk_ids": "*i64", "out": "*i64", "source_of_row": "*i64", "enabled": "*u8"},
    ),
}  # fmt: skip
NVIDIA = (80, 90, 100, 120)


def compile_for(target, shape, **options):
    constants, types = SHAPES[shape]
    pointers = dict.fromkeys(POINTERS, "*i32") | {"counts": "*i64"} | types
    absent = {name: None for name, kind in pointers.items() if kind is None}
    bins = triton_kernels.histogram_bins
    constants = constants | {
        "EXPERT_BINS": bins(constants["E"]),
        "SLOT_BINS": bins(constants["P"]),
        "BLOCK": triton_kernels.BLOCK,
    }
    signature, attributes = {}, {}
    for i, parameter in enumerate(KERNEL.params):
        name = parameter.name
        if name in constants or name in absent:
            signature[name] = "constexpr"
        else:
            signature[name] = pointers.get(name, "i32")
        if signature[name].startswith("*") and not parameter.do_not_specialize_on_alignment:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=KERNEL, signature=signature, constexprs=constants | absent, attrs=attributes)
    options = {"num_warps": triton_kernels.NUM_WARPS} | options
    return triton.compile(source, target=target, options=options)


def resources(kernel, folder):
    """Registers, bytes of stack and of local memory, and the machine code of a kernel for NVIDIA."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = cuobjdump("--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = (int(v) for v in found.groups())
    return registers, stack, local, cuobjdump("-sass", cubin)


def cuobjdump(option, cubin):
    done = subprocess.run([TOOLS / "cuobjdump", option, cubin], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", NVIDIA)
def test_nvidia_no_spill_and_no_stack(arch, shape, tmp_path):
    kernel = compile_for(GPUTarget("cuda", arch, 32), shape)
    registers, stack, local, sass = resources(kernel, tmp_path)
    print(f"sm_{arch} {shape}: {registers} registers, {kernel.metadata.shared} bytes of shared memory")
    assert (stack, local) == (0, 0)
    assert re.search(r"\b(ATOM|RED)", sass), "no machine code to look at"
    assert not re.search(r"\b(LDL|STL)\b", sass)


def test_a_spill_would_be_seen(tmp_path):
    kernel = compile_for(GPUTarget("cuda", 90, 32), "qwen", maxnreg=24)
    _, stack, _, sass = resources(kernel, tmp_path)
    assert stack > 0
    assert re.search(r"\b(LDL|STL)\b", sass)


@pytest.mark.parametrize("shape", SHAPES)
def test_amd_no_spill_and_no_stack(shape):
    kernel = compile_for(GPUTarget("hip", "gfx942", 64), shape)
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
