"""The CUDA kernels on the host: random schedules, shuffled blocks, sanitizers, and planted faults (tests/simt)."""

from __future__ import annotations

import pytest
import torch
from counting_cases import CASES, Case
from mutants import MUTANTS, catch
from random_cases import random_case
from simt_lane import KERNELS, make_call, program, run_calls

from gimbal_kernels.counting import cuda
from tests.simt import build

TYPES = (torch.int32, torch.int64)
SOME = [seed for seed in range(60) if random_case(seed, max_tokens=50).tokens]
FILLED = [case for case in CASES if case.tokens * case.top_k]
# Fibers are slow to make under ThreadSanitizer: few blocks, every kernel, all kinds of counters.
RACES = [
    Case("races", tokens=300, top_k=4, experts=16, slots=20),
    Case("races, sources of rows", tokens=300, top_k=4, experts=16, slots=20, sources=3, source="mixed"),
    Case("races, shares", tokens=300, top_k=4, experts=8, slots=20, shares="random"),
    Case("races, everything", tokens=260, top_k=4, experts=8, slots=20, source="stray", shares="random"),
    Case("races, no shared counters", tokens=140, experts=6500, slots=6500, source="mixed"),
]


def skip_without(sanitizer):
    reason = build.why_not(sanitizer)
    if reason is not None:
        pytest.skip(reason)


def agrees(calls, sanitizer, folder):
    done, wrong = run_calls(program(sanitizer), calls, folder)
    assert done.returncode == 0, done.stderr
    assert [(call.case.name, names) for call, names in zip(calls, wrong, strict=True) if names] == []


@pytest.mark.parametrize("sanitizer", ["plain", "asan"])
def test_equal_to_the_reference_and_inside_its_arrays(sanitizer, tmp_path):
    skip_without(sanitizer)
    agrees([make_call(case, seed=i) for i, case in enumerate(FILLED)], sanitizer, tmp_path)


@pytest.mark.parametrize(("sanitizer", "seeds"), [("plain", range(120)), ("asan", range(1000, 1040))])
def test_equal_to_the_reference_on_random_shapes(sanitizer, seeds, tmp_path):
    skip_without(sanitizer)
    cases = {seed: random_case(seed, max_tokens=400) for seed in seeds}
    # 1 multiprocessor: one block takes all tiles. 132: many blocks of one tile.
    calls = [
        make_call(case, seed, multiprocessors=(1, 3, 132)[seed % 3])
        for seed, case in cases.items()
        if case.tokens
    ]
    assert len(calls) >= len(seeds) // 2
    agrees(calls, sanitizer, tmp_path)


def test_reports_11_and_2_one_token_stays_inside_its_arrays(tmp_path):
    # 64 experts, one row: a block has far more threads than picks. Allocations end at the arrays' last byte.
    skip_without("asan")
    cases = [Case("one token", tokens=1, top_k=k, experts=64, slots=64) for k in (1, 3, 8, 16)]
    agrees([make_call(case, seed=i) for i, case in enumerate(cases)], "asan", tmp_path)


def test_no_races(tmp_path):
    skip_without("tsan")
    both = [
        Case(**{**vars(case), "load_dtype": dtype, "id_dtype": dtype}) for case in RACES for dtype in TYPES
    ]
    agrees([make_call(case, seed=i) for i, case in enumerate(both)], "tsan", tmp_path)


def test_every_kernel_is_run_by_the_cases():
    seen = {int.from_bytes(make_call(case, 0).data[:8], "little") for case in FILLED}
    seen |= {int.from_bytes(make_call(random_case(s, max_tokens=50), s).data[:8], "little") for s in SOME}
    assert seen == set(range(len(KERNELS)))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant, tmp_path):
    skip_without({"race": "tsan", "overrun": "asan"}.get(mutant.shown_by, "plain"))
    assert catch(mutant, mutant.case, mutant.shown_by, tmp_path) != ""


def test_the_real_kernels_show_none_of_these_faults(tmp_path):
    for sanitizer in ("plain", "tsan", "asan"):
        skip_without(sanitizer)
    shown = sorted({(mutant.case, mutant.shown_by) for mutant in MUTANTS})
    assert [(case, how) for case, how in shown if catch(None, case, how, tmp_path)] == []


def test_what_shared_memory_holds():
    assert cuda.shared_sizes(1, 128, 144) == (1, 144)
    assert cuda.shared_sizes(8, 128, 144) == (8, 144)
    assert cuda.shared_sizes(64, 128, 144) == (32, 144)
    assert cuda.shared_sizes(4, 1100, 1140) == (3, 1140)
    assert cuda.shared_sizes(1, 7000, 7000) == (1, 0)
    assert cuda.shared_sizes(1, 13_000, 13_000) == (0, 0)
