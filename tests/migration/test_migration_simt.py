"""The copy kernel and its flags on the host (tests/simt), with planted faults; and what nvcc makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.simt import build

HERE = Path(__file__).parent
HEADER = build.ROOT / "csrc" / "migration" / "transfer.cuh"
TSAN, ASAN = 66, 67
# A quarter of the threads: fibers are slow to make under a sanitizer.
THREADS = ("kThreads = 256;", "kThreads = 64;")
SEEN = "  __syncthreads();  // after the flag was seen\n"
RAISED = "  __syncthreads();  // before the flag is raised\n"
# name: text, replacement, where it shows
FAULTS = {
    "no barrier after waiting": (SEEN, "", "tsan"),
    "no barrier before raising": (RAISED, "", "tsan"),
    "flag raised without release": ("value, __ATOMIC_RELEASE)", "value, __ATOMIC_RELAXED)", "tsan"),
    "flag read without acquire": ("flag, __ATOMIC_ACQUIRE)", "flag, __ATOMIC_RELAXED)", "tsan"),
    "raised by the first block": ("+ 1 == row.expected", "+ 1 == 1", "plain"),
    "consumers not waited for": ("< row.wait_value)", "< row.wait_value && row.expected != 2)", "plain"),
    "tail lost": ("vectors * 16 + first; i <", "vectors * 16 + first; i + 15 <", "plain"),
    "tail past the end": ("i < piece.bytes;", "i < piece.bytes + 1;", "asan"),
    "parts overlap": ("step = parts * kThreads", "step = kThreads + parts", "tsan"),
}  # fmt: skip


def run(sanitizer, seeds, folder, *changes):
    """The driver with an altered kernel."""
    reason = build.why_not(sanitizer)
    if reason is not None:
        pytest.skip(reason)
    text = HEADER.read_text()
    for old, new in (THREADS, *changes):
        assert text.count(old) == 1
        text = text.replace(old, new)
    altered = folder / "migration" / HEADER.name
    altered.parent.mkdir()
    altered.write_text(text)
    source = HERE / "simt_transfer.cpp"
    include = [folder, build.ROOT / "csrc"]
    program = build.build("transfer", source, sanitizer=sanitizer, include=include, watch=[altered])
    return build.run(program, seeds, timeout=120)


@pytest.mark.parametrize(("sanitizer", "seeds"), [("plain", 5), ("asan", 2), ("tsan", 1)])
def test_every_byte_arrives_without_a_race_or_an_overrun(sanitizer, seeds, tmp_path):
    done = run(sanitizer, seeds, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "0 bytes wrong\n"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, tmp_path):
    old, new, sanitizer = FAULTS[fault]
    done = run(sanitizer, 4 if sanitizer == "plain" else 1, tmp_path, (old, new))
    assert done.returncode == {"plain": 1, "tsan": TSAN, "asan": ASAN}[sanitizer], done.stdout + done.stderr


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_nvcc_makes_16_byte_accesses_and_no_spills(architecture, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    target = tmp_path / "transfer.cubin"
    source = build.ROOT / "csrc" / "migration" / "device.cu"
    command = ["nvcc", "-std=c++17", f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v"]
    command += [f"-I{build.ROOT / 'csrc'}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    usage = done.stdout + done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in usage, usage
    registers = int(re.search(r"Used (\d+) registers", usage)[1])
    assert registers <= 64  # 1024 threads of it on a multiprocessor
    if shutil.which("cuobjdump") is None:
        return
    code = subprocess.run(
        ["cuobjdump", "-sass", str(target)], capture_output=True, text=True, check=True
    ).stdout
    assert "LDG.E.128" in code
    assert "STG.E.128" in code
    assert re.search(r"LD\S*\.STRONG\.SYS", code)
    assert re.search(r"ST\S*\.STRONG\.SYS", code)
