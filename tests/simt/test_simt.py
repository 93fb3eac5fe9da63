"""The host runtime for CUDA source finds what it is there to find, and nothing in kernels that are right."""

from __future__ import annotations

import pytest

from tests.simt.build import HERE, SANITIZERS, build, run, why_not

TSAN, ASAN = 66, 67


def check(sanitizer, what):
    reason = why_not(sanitizer)
    if reason is not None:
        pytest.skip(reason)
    return run(build("self-check", HERE / "self_check.cpp", sanitizer=sanitizer), what)


@pytest.mark.parametrize("what", ["barrier", "atomic"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_right_kernels_pass(sanitizer, what):
    done = check(sanitizer, what)
    assert done.returncode == 0, done.stderr


def test_a_missing_barrier_gives_wrong_results_under_some_schedule():
    assert check("plain", "no-barrier").returncode == 1


@pytest.mark.parametrize("what", ["no-barrier", "no-atomic"])
def test_races_are_reported(what):
    done = check("tsan", what)
    assert done.returncode == TSAN, done.stderr
    assert "data race" in done.stderr


def test_an_access_past_shared_memory_is_reported():
    done = check("asan", "past-the-end")
    assert done.returncode == ASAN, done.stderr
    assert "heap-buffer-overflow" in done.stderr


def test_a_deadlock_is_reported_with_the_operation():
    done = check("plain", "deadlock")
    assert done.returncode < 0
    assert "SIMT: deadlock in block 0: 7 at a barrier, 0 have returned, 25 in warp operations" in done.stderr
    assert "__ballot_sync at line" in done.stderr
