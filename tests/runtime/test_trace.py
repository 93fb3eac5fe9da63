"""The engine trace and its wire form: round trips, and nothing malformed gets through or raises."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from gimbal_runtime.trace import EngineReport, EngineTrace
from hypothesis import given
from hypothesis import strategies as st

REPORT = EngineReport(
    run_prefill=1200,
    wait_prefill=800,
    kv=0.25,
    moe=64.5,
    counter=7,
    acks={0: 12, 3: 5},
    figures={"remote_pick_share": 0.5},
    requests=9,
    request_steps=31.5,
)
REPORTS = st.builds(
    EngineReport,
    run_prefill=st.integers(0, 2**40),
    wait_prefill=st.integers(0, 2**40),
    kv=st.floats(0, 1),
    moe=st.floats(0, 1e15),
    counter=st.integers(0, 2**60),
    acks=st.dictionaries(st.integers(0, 64), st.integers(0, 2**40)),
    figures=st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False)),
    requests=st.integers(0, 2**40),
    request_steps=st.floats(0, 1e15),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("vrwumcafng01"), inner),
    max_leaves=12,
)


@given(REPORTS)
def test_a_report_survives_the_wire(report: EngineReport) -> None:
    assert EngineReport.from_wire(report.to_wire()) == report
    assert EngineReport.from_wire(json.loads(json.dumps(report.to_wire()))) == report


def test_the_wire_form_is_plain_with_string_keys() -> None:
    wire = REPORT.to_wire()
    assert wire["a"] == {"0": 12, "3": 5}
    assert all(isinstance(key, str) and len(key) == 1 for key in wire)
    assert {type(value) for value in wire.values()} == {int, float, dict}
    assert "f" not in EngineReport(0, 0, 0.0, 0.0, 0, {}).to_wire()


def test_a_client_gets_its_own_ack() -> None:
    assert REPORT.trace_for(3, 9.5) == EngineTrace(1200, 800, 0.25, 64.5, 5, 9.5, 9, 31.5)
    assert REPORT.trace_for(1, 9.5).ack == 0  # nothing of this client admitted yet


@pytest.mark.parametrize("key", ["v", "r", "w", "u", "m", "c", "a", "n", "g"])
@pytest.mark.parametrize("value", [None, "1", True, -1, math.nan, math.inf, 10**400, [], {"x": 1}])
def test_a_report_with_a_bad_signal_is_no_report(key: str, value: Any) -> None:
    assert EngineReport.from_wire({**REPORT.to_wire(), key: value}) is None


@pytest.mark.parametrize("key", ["v", "r", "w", "u", "m", "c", "a", "n", "g"])
def test_a_report_without_a_signal_is_no_report(key: str) -> None:
    wire = REPORT.to_wire()
    del wire[key]
    assert EngineReport.from_wire(wire) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("u", 1.01),
        ("r", 1.5),
        ("v", 1),
        ("g", 2.0**63),
        ("g", 1e300),
        ("a", {"0": -1}),
        ("a", {"0": 1.0}),
        ("a", {0: 1}),
        ("a", {"-1": 1}),
        ("a", {"²": 1}),
        ("a", {"": 1}),
    ],
)
def test_a_signal_out_of_range_is_no_report(key: str, value: Any) -> None:
    assert EngineReport.from_wire({**REPORT.to_wire(), key: value}) is None


def test_bad_figures_are_left_out_and_the_report_stays() -> None:
    wire = {**REPORT.to_wire(), "f": {"a": 1, "b": math.nan, "c": "x", 5: 1.0, "d": 10**400}}
    report = EngineReport.from_wire(wire)
    assert report is not None
    assert report.figures == {"a": 1.0}
    without = EngineReport.from_wire({**REPORT.to_wire(), "f": 3})
    assert without is not None
    assert without.figures == {}


@given(st.one_of(ANYTHING, ANYTHING.map(lambda value: {**REPORT.to_wire(), "a": value})))
def test_nothing_on_the_wire_raises(obj: Any) -> None:
    report = EngineReport.from_wire(obj)
    assert report is None or EngineReport.from_wire(report.to_wire()) == report
