"""The counting kernels compiled for GPUs that are not there, and what nvcc and Triton made of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gimbal_kernels.counting import triton_kernels

ROOT = Path(__file__).resolve().parents[2]
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
NVCC_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-cubin")


@dataclass(frozen=True)
class Compiled:
    """Registers per thread, bytes of stack, local and shared memory, and how often each instruction occurs."""

    registers: int
    stack: int
    local: int
    shared: int
    instructions: Counter[str]

    @property
    def spills(self) -> int:
        return sum(n for name, n in self.instructions.items() if name.startswith(("LDL", "STL")))

    def count(self, *prefixes: str) -> int:
        return sum(n for name, n in self.instructions.items() if name.startswith(prefixes))

    def widths(self) -> str:
        """Bits of the widest and of all other global loads, as "128 x 1, 64 x 2, 32 x 14"."""
        widths: Counter[int] = Counter()
        for name, number in self.instructions.items():
            if name.startswith("LDG"):
                found = re.search(r"\.U?(128|64|16|8)\b", name)
                widths[int(found.group(1)) if found else 32] += number
        return ", ".join(f"{bits} x {widths[bits]}" for bits in sorted(widths, reverse=True))


def cuobjdump(option: str, cubin: Path) -> str:
    done = subprocess.run([TOOLS / "cuobjdump", option, cubin], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def examine(cubin: Path) -> dict[str, Compiled]:
    """Every kernel of a cubin by name."""
    usage, code = cuobjdump("--dump-resource-usage", cubin), cuobjdump("-sass", cubin)
    resources = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    found = {name: [int(n) for n in numbers] for name, *numbers in re.findall(resources, usage)}
    kernels = {}
    for part in re.split(r"\n\s*Function : ", code)[1:]:
        name = part.split()[0]
        names = re.findall(
            r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", part, re.MULTILINE
        )
        registers, stack, shared, local = found[name]
        kernels[name] = Compiled(registers, stack, local, shared, Counter(names))
    return kernels


def compile_triton(target: GPUTarget, shape: str, **options: Any) -> Any:
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
    return triton.compile(source, target=target, options={"num_warps": triton_kernels.NUM_WARPS} | options)


def examine_triton(arch: int, shape: str, folder: Path, **options: Any) -> Compiled:
    """Triton's kernel for an NVIDIA architecture; shared memory is dynamic there and comes from the metadata."""
    kernel = compile_triton(GPUTarget("cuda", arch, 32), shape, **options)
    cubin = folder / f"triton-{arch}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    (found,) = examine(cubin).values()
    return Compiled(found.registers, found.stack, found.local, kernel.metadata.shared, found.instructions)


def nvcc_release() -> str | None:
    """ "13.0", or None without nvcc."""
    if shutil.which("nvcc") is None:
        return None
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else None


def examine_nvcc(arch: int, folder: Path) -> dict[str, Compiled]:
    """The kernels of csrc/counting by name."""
    cubin = folder / f"nvcc-{arch}.cubin"
    source = ROOT / "csrc" / "counting" / "device.cu"
    command = ["nvcc", *NVCC_FLAGS, f"-arch=sm_{arch}", f"-I{ROOT / 'csrc'}", str(source), "-o", str(cubin)]
    subprocess.run(command, check=True)
    return examine(cubin)
