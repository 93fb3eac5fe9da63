"""What servers tell the router: all of it or nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from gimbal_runtime.chunk_steps import fitting_chunk, next_chunk
from gimbal_runtime.iteration_model import FitQuality, IterationModel
from gimbal_runtime.node_report import Computed, NodeReport, Prefill
from hypothesis import given
from hypothesis import strategies as st

FITTED = IterationModel(0.01, 1e-4, 1e-7, 1e-4, 1e-9, quality=FitQuality(0.05, 400.0, 30.0))
REPORT = NodeReport(
    steps=400,
    model=FITTED,
    prefills=(Prefill("a", 100, 0), Prefill("", 5, 20)),
    resident=frozenset({"a", "b"}),
    n_decode=3,
    kv_tokens=700,
    kv_free=9_000,
    tbt_slo=0.05,
    deflected=("a",),
    limits_chunks=True,
    token_budget=2048,
    kv_bytes_per_token=3072.0,
    computed=(Computed("b", 0.2, 0.3),),
)


@pytest.mark.parametrize(
    "report",
    [REPORT, replace(REPORT, model=None, kv_free=None, tbt_slo=None, kv_bytes_per_token=None, computed=())],
)
def test_a_report_survives_json(report: NodeReport) -> None:
    assert NodeReport.from_wire(json.loads(json.dumps(report.to_wire()))) == report


def test_every_field_has_to_be_there() -> None:
    wire = REPORT.to_wire()
    for name in wire:
        assert NodeReport.from_wire({key: value for key, value in wire.items() if key != name}) is None
    for name in ("a", "c1", "quality"):
        model = {key: value for key, value in wire["model"].items() if key != name}
        assert NodeReport.from_wire(wire | {"model": model}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("steps", -1),
        ("steps", True),
        ("n_decode", 1.5),
        ("n_decode", None),  # missing is not zero
        ("kv_tokens", "7"),
        ("kv_free", -1),
        ("kv_free", 2**80),
        ("tbt_slo", 0.0),
        ("tbt_slo", float("nan")),
        ("limits_chunks", 1),
        ("prefills", None),
        ("prefills", [["a", 1]]),
        ("prefills", [["a", -1, 0]]),
        ("prefills", {"a": 1}),
        ("resident", [7]),
        ("computed", [["a", 0.1, float("inf")]]),
        ("kv_bytes_per_token", -3.0),
        ("model", {"a": 1.0}),
        ("model", REPORT.to_wire()["model"] | {"c_pf": -1e-4}),
    ],
)
def test_a_report_with_a_bad_field_is_none(name: str, value: object) -> None:
    assert NodeReport.from_wire(REPORT.to_wire() | {name: value}) is None


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_anything_else_is_none(value: object) -> None:
    assert NodeReport.from_wire(value) is None
    assert NodeReport.from_wire({"version": 1, "model": value}) is None


@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=8),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_the_schedule_is_kept_from_wherever_the_prompt_starts(
    chunks: list[int], cached: int, done: int
) -> None:
    """Chunks taken one by one: the planned ones when the prompt starts where the plan does."""
    prompt = cached + sum(chunks)
    taken, at = [], cached
    while (most := next_chunk(chunks, prompt, at)) is not None:
        taken.append(most)
        at += most
    assert taken == chunks
    # Elsewhere: never more than the largest chunk, and the iterations end where the schedule's do.
    at, ends = min(done, prompt - 1), []
    while (most := next_chunk(chunks, prompt, at)) is not None:
        assert 0 < most <= max(chunks)
        at += most
        ends.append(at)
    assert ends[-1] == prompt
    boundaries = {prompt - sum(chunks[place:]) for place in range(len(chunks) + 1)} | {prompt}
    assert {end for end in ends if end >= cached} <= boundaries


def test_no_limit_without_a_schedule_or_while_decoding() -> None:
    assert next_chunk([], 100, 0) is None
    assert next_chunk([50, 50], 100, 100) is None
    assert next_chunk([50, 50], 100, 130) is None
    assert next_chunk([64, 36], 200, 0) == 64  # less was cached than the plan had it


def test_the_largest_chunk_that_stays_within_the_limit() -> None:
    def seconds(size: int) -> float:
        return 0.01 + size * 0.0001

    taken = [
        fitting_chunk(planned, seconds, limit)
        for planned, limit in ((2048, 1.0), (700, 0.08), (700, 0.0799), (700, 0.0613), (700, 0.0611))
    ]
    assert taken == [2048, 700, 512, 512, 256]
    assert fitting_chunk(700, seconds, 0.001) == 128  # none fits: the smallest, so that the prompt ends
    assert fitting_chunk(100, seconds, 0.001) == 100
    assert fitting_chunk(700, seconds, 0.07, sizes=(600, 300)) == 600
    assert [fitting_chunk(700, seconds, limit) for limit in (0.0227, 0.0165, 0.0133, 0.0117)] == [
        64,
        64,
        32,
        16,
    ]
    assert fitting_chunk(700, seconds, 0.0115) == 128  # finer ones would be late as well, only more often
    assert [fitting_chunk(planned, seconds, 0.0117) for planned in (50, 16, 10)] == [16, 16, 10]
