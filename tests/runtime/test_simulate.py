"""`gimbal simulate`: its traffic, its tables, its verdict, bad input."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gimbal_runtime import cli
from gimbal_runtime.tools.sim_traffic import (
    Arrival,
    at_rate,
    generate,
    generate_disaggregated,
    in_sessions,
    load_azure,
    window,
)
from gimbal_runtime.tools.simulate import DEFLECTION_MODES, shape_of, verdict

AZURE = Path(__file__).resolve().parents[3] / "shared/data/azure/AzureLLMInferenceTrace_code.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:{i % 60:02d}.1234567,{100 + 10 * i},{5 + i % 3}\n" for i in range(50)]
    path.write_text(HEADER + "".join(rows))
    return path


# --- traffic ---


def test_azure_rows(trace: Path) -> None:
    rows = load_azure(trace)
    assert len(rows) == 50
    assert rows[0] == Arrival(0.0, 100, 5)
    assert rows[3] == Arrival(3.0, 130, 5)


@pytest.mark.skipif(not AZURE.is_file(), reason="the Azure code trace is not there (../shared)")
def test_the_azure_code_trace() -> None:
    rows = load_azure(AZURE)
    assert len(rows) == 8_819
    assert np.mean([row.prompt for row in rows]) == pytest.approx(2_048, rel=0.01)
    assert rows[-1].time == pytest.approx(3_436, rel=0.01)


def test_a_window_goes_round_and_keeps_time() -> None:
    rows = [Arrival(float(i), 10 + i, 1) for i in range(10)]
    taken = window(rows, 25, seed=3)
    assert len(taken) == 25
    assert taken[0].time == 0.0
    assert all(a.time < b.time for a, b in pairwise(taken))
    assert taken[0].prompt == taken[10].prompt == taken[20].prompt


def test_rate() -> None:
    rows = at_rate(generate(2_000, 1), 12.5)
    assert (len(rows) - 1) / rows[-1].time == pytest.approx(12.5)
    with pytest.raises(ValueError, match="rate: 0"):
        at_rate(rows, 0.0)


def test_generated_gaps_and_lengths() -> None:
    for make, cv in [(generate, 2.0), (generate_disaggregated, 3.0)]:
        rows = make(20_000, 7)
        gaps = np.diff([row.time for row in rows])
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
        assert min(row.prompt for row in rows) >= 8
        assert min(row.output for row in rows) >= 4
    assert generate(50, 1) == generate(50, 1) != generate(50, 2)


def test_sessions_grow_and_share_what_came_before() -> None:
    rows = in_sessions(generate(500, 1), 1)
    context: dict[int, int] = {}
    turns = 0
    for row in rows:
        assert row.shared == min(context.get(row.session, 0), 12_000)
        assert row.prompt > row.shared
        turns += row.shared > 0
        context[row.session] = row.prompt + row.output
    assert 0.7 < turns / len(rows) < 0.9  # six turns each


# --- the command ---


def test_both_tables(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    arguments = ["simulate", "--engines", "2", "--loads", "0.8", "--requests", "20", "--seeds", "1"]
    arguments += ["--shapes", "1P1D", "--trace", str(trace), "--json", str(target)]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "round-robin" in shown
    assert "1P1D" in shown
    result = json.loads(target.read_text())
    assert {row["traffic"] for row in result["engines"]} == {"generated", "azure"}
    assert [row["deflection"] for row in result["deflection"]] == list(DEFLECTION_MODES)
    assert result["skipped"] == []
    assert len(result["verdict"]) == 2
    assert all(row["ttft_mean"] > 0.0 for row in result["engines"])


def test_a_missing_trace_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    arguments = ["simulate", "--only", "engines", "--engines", "1", "--loads", "0.5", "--requests", "10"]
    assert cli.main([*arguments, "--seeds", "1", "--policies", "gimbal", "vllm", "--json", str(target)]) == 0
    captured = capsys.readouterr()
    assert "skipped: azure: no trace given" in captured.err
    result = json.loads(target.read_text())
    assert {row["traffic"] for row in result["engines"]} == {"generated"}
    assert "deflection" not in result


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engines", "0"], "--engines"),
        (["--loads", "nan"], "--loads"),
        (["--loads", "2.5"], "--loads"),
        (["--requests", "0"], "--requests"),
        (["--seeds", "0"], "--seeds"),
        (["--clients", "0"], "--clients"),
        (["--policies", "best"], "--policies"),
        (["--shapes", "2X2"], "--shapes"),
        (["--shapes", "0P1D"], "--shapes"),
        (["--trace", "no/such/file.csv"], "no/such/file.csv"),
        (["--json", "no/such/folder/x.json"], "--json"),
        (["--json", "."], "--json: . is a folder"),
    ],
)
def test_bad_input(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        (HEADER + "2023-11-16 18:17:03.9,12,3\n2023-11-16 18:17:04.9,many,3\n", "line 3"),
        (HEADER + "yesterday,12,3\n", "line 2"),
        (HEADER, "no rows"),
    ],
)
def test_a_broken_trace_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_azure(path)


# --- verdict ---


def row(
    policy: str, ttft: float, p99: float = 1.0, tpot: float = 1.0, rate: float = 1.0
) -> dict[str, object]:
    figures = {"ttft_mean": ttft, "ttft_p99": p99, "tpot_mean": tpot, "throughput": rate}
    return {"traffic": "generated", "engines": 2, "load": 0.8, "policy": policy, **figures}


def test_verdict_compares_with_policies_that_have_no_part_of_ours() -> None:
    rows = [row("vllm", 2.0), row("lmetric", 1.6), row("vllm + our queue", 0.5), row("gimbal", 1.2)]
    (entry,) = verdict([*rows, row("gimbal choice only", 0.1)])
    assert entry["best"] == "lmetric"
    assert entry["over_best"] == pytest.approx(0.75)
    assert entry["last_in"] == []


def test_verdict_names_the_columns_in_which_it_is_last() -> None:
    rows = [row("vllm", 1.0, p99=1.0, rate=1.0), row("lmetric", 1.0, p99=2.0, rate=0.9)]
    (entry,) = verdict([*rows, row("gimbal", 1.1, p99=1.5, tpot=1.004, rate=0.8)])
    assert entry["last_in"] == ["ttft_mean", "throughput"]
    assert verdict(rows) == []


def test_shapes() -> None:
    assert shape_of("3P1D") == (3, 1)
    assert shape_of("12p4d") == (12, 4)
