"""The CUDA kernels of method "portfolio": on the host under random schedules (tests/simt), and compiled."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.simt import build

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SOURCES = sorted([*CSRC.glob("placement/*.cuh"), *CSRC.glob("placement/*.hpp")])


def run(
    schedules: int, *, sanitizer: str = "plain", headers: Path = CSRC
) -> subprocess.CompletedProcess[str]:
    reason = build.why_not(sanitizer)
    if reason is not None:
        pytest.skip(reason)
    watch = [headers / path.relative_to(CSRC) for path in SOURCES]
    source = HERE / "simt_portfolio.cpp"
    program = build.build("portfolio", source, sanitizer=sanitizer, include=[headers], watch=watch)
    return build.run(program, schedules)


def test_same_bytes_as_the_host_under_random_schedules():
    done = run(6)
    launches, different, shared = map(int, re.findall(r"\d+", done.stdout))
    assert (done.returncode, different) == (0, 0), done.stderr
    assert launches >= 192
    assert shared <= 50 * 1024  # at 256 experts on 64 ranks


@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_compiles_without_spills(architecture, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    flags = ["-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-cubin"]
    source = CSRC / "placement" / "device.cu"
    command = ["nvcc", *flags, f"-I{CSRC}", str(source), "-o", str(tmp_path / "device.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert frames == [("0", "0", "0")] * 3, report
    assert max(registers) <= 128  # 512 threads in the 65,536 registers of a multiprocessor


@pytest.mark.parametrize("sanitizer", [pytest.param("tsan", marks=pytest.mark.slow), "asan"])
def test_no_race_and_no_access_out_of_bounds(sanitizer):
    done = run(1, sanitizer=sanitizer)
    assert done.returncode == 0, done.stderr[-3000:]


# (file, text with the barrier): without it results depend on the schedule, or the threads part ways.
BARRIERS = {
    "after a swap": ("search.cuh", "s.dirty[a] = s.dirty[x] = 1;\n    }\n    b.sync();"),
    "after the lowest of a scan": ("search.cuh", "lowest_within(a, first, last);\n    b.sync();"),
    "between two calls of min64": (
        "block.cuh",
        "key = part[warp] < key ? part[warp] : key;\n    __syncthreads();",
    ),
    "after an expert is put": ("prices.cuh", "s.count_sum[rank] += 1;\n    }\n    b.sync();"),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_a_removed_barrier_is_caught(name, tmp_path):
    file, right = BARRIERS[name]
    headers = tmp_path / "csrc"
    shutil.copytree(CSRC, headers)
    text = (headers / "placement" / file).read_text()
    assert text.count(right) == 1
    wrong = right.replace("b.sync();", "").replace("__syncthreads();", "")
    (headers / "placement" / file).write_text(text.replace(right, wrong))
    assert run(2, headers=headers).returncode != 0
