"""Writes docs/counting-compile.md: what nvcc and Triton make of the counting kernels, architecture by architecture.

    python tests/counting/compile_table.py

With --budgets it also writes tests/counting/budgets.json anew for the installed compiler versions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402
from compiled import NVIDIA, SHAPES, Compiled, examine_nvcc, examine_triton, nvcc_release  # noqa: E402

from gimbal_kernels.counting import cuda, triton_kernels  # noqa: E402

BUDGETS = Path(__file__).parent / "budgets.json"
# Per multiprocessor: warps, blocks, KB of shared memory (CUDA programming guide, compute capabilities).
LIMITS = {80: (64, 32, 164), 90: (64, 32, 228), 100: (64, 32, 228), 120: (48, 24, 100)}
REGISTERS, REGISTER_UNIT, RESERVED_SHARED = 65_536, 256, 1024
EXPERTS, SLOTS = 128, 144


def occupancy(arch: int, threads: int, registers: int, shared: int) -> int:
    """Resident warps in percent of the most possible, from registers, shared memory and block limits."""
    warps, blocks, kilobytes = LIMITS[arch]
    per_block = threads // 32
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    resident = min(
        warps // per_block,
        blocks,
        REGISTERS // per_warp // per_block,
        kilobytes * 1024 // (shared + RESERVED_SHARED),
    )
    return round(100 * resident * per_block / warps)


def row(name: str, arch: int, found: Compiled, threads: int, shared: int) -> str:
    cells = [
        f"`{name}`",
        f"sm_{arch}",
        found.registers,
        shared,
        found.spills,
        found.stack,
        f"{occupancy(arch, threads, found.registers, shared)} %",
        found.count("ATOMS"),
        found.count("RED", "ATOMG"),
        found.count("MATCH"),
        found.widths(),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


HEADER = """# Counting kernels: what the compilers make of them

Written by `python tests/counting/compile_table.py`; no GPU is needed, and nothing here says how fast they are.
Registers are per thread, shared memory is in bytes per block (CUDA: for 128 experts and 144 slots), occupancy is
computed from both. The rest is counted in the machine code: spills are LDL and STL, `shared` atomics are ATOMS,
`global` ones RED and ATOMG, `match` finds the lanes that picked the same slot; widths of global loads in bits, with
their number.

| kernel | GPU | registers | shared memory | spills | stack | occupancy | shared | global | match | load widths |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", action="store_true", help="write tests/counting/budgets.json anew")
    arguments = parser.parse_args()
    version = ".".join(triton.__version__.split(".")[:2])
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        release = nvcc_release()
        window, slots = cuda.shared_sizes(1, EXPERTS, SLOTS)
        for arch in NVIDIA if release else ():
            kernels = examine_nvcc(arch, folder)
            lines += [
                row(kernel, arch, found, cuda.THREADS, 4 * (window * EXPERTS + slots))
                for kernel, found in sorted(kernels.items())
            ]
            budgets.setdefault(f"nvcc {release}", {})[f"sm_{arch}"] = {
                kernel: found.registers for kernel, found in sorted(kernels.items())
            }
        for arch in NVIDIA:
            for shape in SHAPES:
                found = examine_triton(arch, shape, folder)
                lines.append(
                    row(f"triton: {shape}", arch, found, 32 * triton_kernels.NUM_WARPS, found.shared)
                )
                budgets.setdefault(f"triton {version}", {}).setdefault(f"sm_{arch}", {})[shape] = (
                    found.registers
                )
    footer = f"\nCompilers: nvcc {release or 'not installed'}, Triton {triton.__version__}.\n"
    (ROOT / "docs" / "counting-compile.md").write_text(HEADER + "\n".join(lines) + "\n" + footer)
    if arguments.budgets:
        BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
